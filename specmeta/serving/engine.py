"""Serves requests: the host's loop around the steps of the device.

With overlap, step i+1 is launched before the host knows what came of step i, and while the device
runs it the host handles step i's results. All that step i+1 needs of step i stands on the device.

Example
-------
>>> from specmeta import models
>>> from specmeta.serving.engine import Engine
>>> from specmeta.serving.request import SamplingParams
>>> engine = Engine(models.load("austen"), num_pages=64)
>>> request = engine.submit("It is a truth", SamplingParams(max_new_tokens=16))
>>> engine.run()
>>> len(request.token_ids), request.finish
(16, 'length')
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specmeta._integers import to_integer
from specmeta.batch import BatchMetadata
from specmeta.models import Model, check_model
from specmeta.serving.one_model import OneModelStep
from specmeta.serving.pages import PagePool
from specmeta.serving.request import (
    PassCounts,
    Request,
    RequestError,
    SamplingParams,
    check_integer,
)
from specmeta.serving.ring import DownloadRing, Fetched
from specmeta.serving.scheduler import Plan, Scheduler
from specmeta.serving.step import Shape, Step
from specmeta.serving.two_model import TwoModelStep

__all__ = ["Engine", "Stats", "encode"]


@dataclass(eq=False, kw_only=True)
class Stats(PassCounts):
    """An engine's counts, as they stood when they were asked for.

    Attributes
    ----------
    drafted, accepted, target_passes
        As in `PassCounts`, all requests together.
    steps : int
        Steps launched.
    launches : int
        Launches: graphs replayed, or run eagerly.
    tokens : int
        New tokens.
    running, waiting : int
        Requests with and without a place in the batch.
    preemptions : int
        How often a request had to give its pages back and was computed anew later.
    faults : int
        How often a request's results were wrong.
    failures : int
        How often a launch raised an error.
    pages_in_use, pages_total : list of int
        By pool: the target's, then the drafter's, where it has one.
    seconds : float
        Wall time of launching steps and waiting for results, without capture.
    """

    steps: int
    launches: int
    tokens: int
    running: int
    waiting: int
    preemptions: int
    faults: int
    failures: int
    pages_in_use: list[int]
    pages_total: list[int]
    seconds: float


class Engine:
    """A model and everything around it. One thread owns it.

    Where the model is spread over ranks (`specmeta.serving.parallel`), each has an engine with the
    same settings, and calls its methods with the same arguments in the same order.

    Parameters
    ----------
    model : Model
        From `specmeta.models.load`.
    draft : Model, optional
        A separate Llama with the same tokenizer that drafts, with a cache and graphs of its own.
    two_model : bool
        Whether the model's own head has a cache and graphs of its own. Not beside `draft`.
    num_drafts : int
        Most drafts a row and step, K; 0 decodes without a drafter.
    max_rows : int
        Requests that run at once.
    max_tokens : int
        Tokens a step, at least ``num_drafts + 1``.
    prompt_chunk : int
        Tokens that a step takes of a prompt at most.
    page_size, num_pages : int
        The target's cache: tokens a page, and pages, the reserved page 0 included.
    draft_page_size, draft_num_pages : int, optional
        Those of a drafter with a cache of its own. Default: the target's page size, and pages for
        as many tokens.
    max_seq_len : int, optional
        No text is longer, its prompt included. Default: as long as model and caches allow.
    overlap : bool
        Whether a step is launched before the last one's results are handled.
    captured : bool
        Whether steps are captured and replayed, or run as they stand.

    Attributes
    ----------
    model, max_rows, max_seq_len, captured
        As given; `max_seq_len` as far as model and caches allow.

    Raises
    ------
    ValueError
        Settings of a wrong type, out of range, or that don't fit each other.
    """

    def __init__(
        self,
        model: Model,
        *,
        draft: Model | None = None,
        two_model: bool = False,
        num_drafts: int = 4,
        max_rows: int = 16,
        max_tokens: int = 512,
        prompt_chunk: int = 64,
        page_size: int = 16,
        num_pages: int,
        draft_page_size: int | None = None,
        draft_num_pages: int | None = None,
        max_seq_len: int | None = None,
        overlap: bool = True,
        captured: bool = True,
    ) -> None:
        check_model("model", model)
        if draft is not None:
            check_model("draft", draft)
            if two_model:
                raise ValueError("two_model: expected False beside a draft, got True")
        # The scheduler checks the others.
        for name, number, least in (
            ("max_rows", max_rows, 1),
            ("num_drafts", num_drafts, 0),
            ("page_size", page_size, 1),
            ("num_pages", num_pages, 2),
        ):
            check_integer(name, number, least)
        for name, value, least in (
            ("draft_page_size", draft_page_size, 1),
            ("draft_num_pages", draft_num_pages, 2),
            ("max_seq_len", max_seq_len, 1),
        ):
            if value is not None:
                check_integer(name, value, least)
        depth = 2 if overlap else 1
        drafter = draft.target if draft is not None else model.head if two_model else None
        pools = [PagePool(num_pages, page_size)]
        if two_model and model.head is None:
            raise ValueError(f"two_model: {model.name} has no draft head")
        if num_drafts > 0 and drafter is not None:
            size = page_size if draft_page_size is None else draft_page_size
            if draft_num_pages is None:
                # Each request may leave a page all but empty.
                draft_num_pages = 1 + -(-(num_pages - 1) * page_size // size) + max_rows
            pools.append(PagePool(draft_num_pages, size))
        limits = [] if max_seq_len is None else [max_seq_len]
        limits += [(pool.num_pages - 1) * pool.page_size for pool in pools]
        limits += [m.target.config.max_position_embeddings for m in (model, draft) if m is not None]
        self.model = model
        self.max_rows = max_rows
        self.max_seq_len = min(limits)
        self.captured = captured
        self._num_drafts = num_drafts
        # A row can have a new request while the last one's slot isn't free yet.
        max_slots = depth * max_rows
        self._scheduler = Scheduler(
            max_rows=max_rows,
            max_slots=max_slots,
            max_tokens=max_tokens,
            prompt_chunk=prompt_chunk,
            num_drafts=num_drafts,
            depth=depth,
            pools=pools,
            max_seq_len=self.max_seq_len,
        )
        settings: dict[str, Any] = {
            "max_rows": max_rows,
            "max_slots": max_slots,
            "max_tokens": min(max_tokens, max_rows * max(prompt_chunk, num_drafts + 1)),
            "max_seq_len": self.max_seq_len,
            "num_drafts": num_drafts,
            "page_size": page_size,
            "num_pages": num_pages,
            "captured": captured,
        }
        self._step: Step
        if num_drafts > 0 and drafter is not None:
            self._step = TwoModelStep(
                model.target,
                drafter,
                draft_page_size=pools[1].page_size,
                draft_num_pages=pools[1].num_pages,
                **settings,
            )
        else:
            self._step = OneModelStep(model.target, model.head, **settings)
        # By pool: whose pages they are.
        self._batches: list[BatchMetadata] = [self._step.batch]
        if self._step.draft_batch is not None:
            self._batches.append(self._step.draft_batch)
        outcome = self._step.outcome
        self._ring = DownloadRing(depth, outcome.nbytes, device=outcome.device)
        self._prompt_len = max(prompt_chunk, num_drafts + 1)
        self._max_tokens = settings["max_tokens"]
        self._depth = depth
        self._launched: deque[tuple[Plan, Fetched]] = deque()
        self._to_tell: deque[Request] = deque()
        self._last_failed = False
        self._num_steps = self._num_launches = self._num_failures = 0
        self._seconds = 0.0

    def warm_up(self, on_capture: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prepare all launches now. Without it, each is prepared when it's first needed.

        Parameters
        ----------
        on_capture : callable
            Called after each shape with the number that is done, and that of all.
        """
        most = 1 << (self.max_rows - 1).bit_length()
        counts = [min(1 << i, self.max_rows) for i in range(most.bit_length())]
        lens = sorted({self._num_drafts + 1, self._prompt_len})
        keys = [
            (self._shape(rows, query_len), sampling)
            for rows in counts
            for query_len in lens
            for sampling in (False, True)
        ]
        for done, (shape, sampling) in enumerate(keys, 1):
            self._step.launches(shape, sampling=sampling)
            on_capture(done, len(keys))

    # Requests.

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> Request:
        """Take a request in. It runs in the steps to come.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids, at least one token.
        params : SamplingParams, optional
            Default: ``SamplingParams()``.
        raw : bool
            As in `encode`.
        on_text : callable, optional
            Called at the end of a step with the text that it gave, and once with ``""`` when the
            text has ended.

        Returns
        -------
        Request

        Raises
        ------
        RequestError
            It can't be served.
        """
        # All is checked here: what raised later would raise in every step, also for the others.
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: expected SamplingParams, got {params!r}")
        if on_text is not None and not callable(on_text):
            raise RequestError(f"on_text: expected a function, got {on_text!r}")
        prompt_ids = encode(self.model, prompt, raw=raw)
        num_drafts = self._num_drafts if params.num_drafts is None else params.num_drafts
        check_integer("num_drafts", num_drafts, 0, self._num_drafts)
        tokenizer = self.model.tokenizer
        request = Request(
            prompt_ids,
            params,
            num_drafts=num_drafts,
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            end_ids=self.model.end_ids,
            on_text=on_text,
        )
        self._scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request, unless it has ended. `on_text` hears of it at the end of the next step.

        Raises
        ------
        RequestError
            It isn't one of this engine's.
        """
        if not isinstance(request, Request):
            raise RequestError(f"request: expected what submit returned, got {request!r}")
        self._scheduler.cancel(request)
        self._to_tell.append(request)

    # Steps.

    def run(self) -> None:
        """Run steps until nothing is left to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """Launch a step, then handle the results that are due.

        Returns
        -------
        bool
            Whether something is left to do.

        Raises
        ------
        Exception
            What a launch raised, the second time in a row. The first time, everything in the step
            is computed anew. What `on_text` raises, once the results are handled.
        """
        plan = self._scheduler.plan()
        self._clear_slots()
        if plan is not None:
            self._launch(plan)
        if self._launched and (plan is None or len(self._launched) == self._depth):
            self._handle()
        elif plan is None and self._scheduler.has_work:
            raise RuntimeError(f"nothing can run: {self._scheduler.waiting}")
        while self._to_tell:
            self._to_tell.popleft().tell()
        return self._scheduler.has_work

    @property
    def stats(self) -> Stats:
        """The counts as they stand; what is returned doesn't change."""
        scheduler = self._scheduler
        return Stats(
            drafted=list(scheduler.counts.drafted),
            accepted=list(scheduler.counts.accepted),
            target_passes=scheduler.counts.target_passes,
            steps=self._num_steps,
            launches=self._num_launches,
            tokens=scheduler.num_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.num_preemptions,
            faults=scheduler.num_faults,
            failures=self._num_failures,
            pages_in_use=[pool.num_pages - 1 - pool.num_free for pool in scheduler.pools],
            pages_total=[pool.num_pages - 1 for pool in scheduler.pools],
            seconds=self._seconds,
        )

    def _launch(self, plan: Plan) -> None:
        """Tell the device what the step needs, launch it, and send for its results."""
        try:
            sampling = any(row.seat.request.params.temperature > 0 for row in plan.rows)
            shape = self._shape(len(plan.rows), max(row.query_len for row in plan.rows))
            launches = self._step.launches(shape, sampling=sampling)
            started = time.perf_counter()
            self._prepare(plan)
            for launch in launches:
                launch()
            fetched = self._ring.fetch(self._step.outcome[: len(plan.rows)])
        except Exception:
            # How far the step came, nobody knows: nothing of it is trusted.
            self._scheduler.abandon_step(plan)
            self._clear_slots()
            self._num_failures += 1
            if self._last_failed:
                self._last_failed = False
                raise
            self._last_failed = True
            return
        self._last_failed = False
        self._launched.append((plan, fetched))
        self._num_steps += 1
        self._num_launches += len(launches)
        self._seconds += time.perf_counter() - started

    def _shape(self, num_rows: int, longest: int) -> Shape:
        """Return the smallest shape of the ladder that has room for a step."""
        rows = min(1 << (num_rows - 1).bit_length(), self.max_rows)
        query_len = self._num_drafts + 1
        if longest > query_len:
            query_len = self._prompt_len
        return Shape(rows, min(rows * query_len, self._max_tokens), query_len)

    def _prepare(self, plan: Plan) -> None:
        for seat in plan.admitted:
            for index, (batch, pages) in enumerate(zip(self._batches, seat.pages, strict=True)):
                batch.assign(seat.slot, [] if index else seat.tokens, pages)
            self._step.sampling.set(seat.slot, seat.request.params)
        for seat, index, keep in plan.dropped:
            self._batches[index].drop_pages(seat.slot, keep)
        for seat, index, pages in plan.added:
            self._batches[index].add_pages(seat.slot, pages)
        self._step.batch.set_rows(
            [row.seat.slot for row in plan.rows], [row.query_len for row in plan.rows]
        )

    def _handle(self) -> None:
        """Handle the results of the oldest launched step."""
        plan, fetched = self._launched.popleft()
        started = time.perf_counter()
        outcome = fetched.read().tolist()
        self._seconds += time.perf_counter() - started
        self._scheduler.finish_step(plan, outcome)
        self._clear_slots()
        self._to_tell.extend(row.seat.request for row in plan.rows)

    def _clear_slots(self) -> None:
        """Clear the slots that have become free: no launched step carries them."""
        while self._scheduler.vacated:
            slot = self._scheduler.vacated.pop()
            for batch in self._batches:
                batch.release(slot)


def encode(model: Model, prompt: str | Sequence[int], *, raw: bool = False) -> list[int]:
    """Return the tokens of a prompt.

    Parameters
    ----------
    model : Model
        Whose tokenizer to use.
    prompt : str or sequence of int
        Text, or token ids.
    raw : bool
        Whether a text is continued as it stands. Otherwise a model whose tokenizer has a chat
        template answers it, as a user's message.

    Returns
    -------
    list of int

    Raises
    ------
    RequestError
        It's empty, isn't valid Unicode, holds something else than ids, or doesn't fit the model.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"a prompt isn't valid Unicode: {error}") from error
        ids = _tokenize(model, prompt, raw=raw) if prompt else []
    else:
        ids = _read_ids(prompt)
    if not ids:
        raise RequestError("a prompt is empty")
    size = model.target.config.vocab_size
    if max(ids) >= size:
        what = "the tokenizer doesn't fit the model" if isinstance(prompt, str) else "a prompt"
        raise RequestError(f"{what}: expected ids below {size}, got {max(ids)}")
    if min(ids) < 0:
        raise RequestError(f"a prompt: expected ids of at least 0, got {min(ids)}")
    return ids


def _read_ids(prompt: Any) -> list[int]:
    expected = "prompt: expected a string or token ids"
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor, an array
    if not isinstance(listed, Iterable) or isinstance(listed, bytes):
        raise RequestError(f"{expected}, got {prompt!r}")
    ids = []
    for token in listed:
        integer = to_integer(token)
        if integer is None:
            raise RequestError(f"{expected}, got {token!r} among them")
        ids.append(integer)
    return ids


def _tokenize(model: Model, prompt: str, *, raw: bool) -> list[int]:
    if raw or not model.is_chat:
        # transformers warns of texts that are too long for a model; here they're refused.
        return list(model.tokenizer(prompt, verbose=False)["input_ids"])
    message = {"role": "user", "content": prompt}
    try:
        ids = model.tokenizer.apply_chat_template(
            [message],
            add_generation_prompt=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    except Exception as error:  # a template is a program that comes with the model
        raise RequestError(f"the model's chat template: {error}; --raw does without") from error
    return list(ids)
