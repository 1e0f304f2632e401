"""Generate text with speculative decoding, and check it against plain greedy decoding.

Example
-------
>>> from specmeta import generate, models
>>> model = models.load("austen")
>>> result = generate.generate(model, ["It is a truth"], max_new_tokens=16)
>>> expected = generate.plain_greedy(model, result, max_new_tokens=16)
>>> expected == [text.token_ids for text in result.texts]
True
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from specmeta.batch import BatchMetadata
from specmeta.graph import capture
from specmeta.models import Model
from specmeta.serving.attention import ATTENTION_NAME
from specmeta.serving.one_model import OneModelStep
from specmeta.serving.pages import PageAllocator
from specmeta.status import Status

__all__ = ["Generation", "RequestError", "Text", "generate", "plain_greedy"]

# Each draft is a pass of the head inside the captured step.
MAX_DRAFTS = 64
# Prompt tokens a row that one step takes.
PROMPT_CHUNK = 64
# What torch says where the CPU's memory isn't enough: only a GPU's has an error of its own type.
LACK_OF_MEMORY = re.compile("DefaultCPUAllocator|Storage size calculation overflowed")


class RequestError(ValueError):
    """A prompt or setting that can't be served; the message says why."""


@dataclass
class Text:
    """What came of one prompt.

    Attributes
    ----------
    prompt : str
        The prompt.
    prompt_ids : list of int
        Its tokens.
    token_ids : list of int
        The new tokens, an end token included.
    text : str
        The new text.
    finish : str
        ``"end"``: an end token. ``"length"``: ``max_new_tokens``. Empty while it goes on.
    """

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""


@dataclass
class Generation:
    """What came of a batch of prompts.

    A *target pass* is one row's part in one launch of the target after its prompt: it verifies
    the row's drafts and gives one token more than it accepts. The first token of a text comes
    out of the prompt's pass, which isn't counted.

    Attributes
    ----------
    texts : list of Text
        One a prompt.
    num_drafts : int
        Drafts a pass, K.
    steps : int
        Launches of the captured step.
    target_passes : int
        Passes, all rows together.
    drafted, accepted : list of int
        By position in the draft, K numbers: how many tokens were verified, and how many stood.
    seconds : float
        Wall time of all steps, without loading, capture and showing the text.
    """

    texts: list[Text]
    num_drafts: int
    steps: int = 0
    target_passes: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, all texts together."""
        return sum(len(text.token_ids) for text in self.texts)

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that come out of a target pass."""
        return 1 + sum(self.accepted) / self.target_passes if self.target_passes else 1.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, all texts together."""
        return self.num_tokens / self.seconds


@contextmanager
def _refuse_lack_of_memory() -> Iterator[None]:
    """Turn failed allocations into a `RequestError`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError) and (
            not LACK_OF_MEMORY.search(str(error))
        ):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestError(f"not enough memory for these prompts and settings: {reason}") from error


@_refuse_lack_of_memory()
def generate(
    model: Model,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    num_drafts: int = 4,
    page_size: int = 16,
    prompt_chunk: int = PROMPT_CHUNK,
    captured: bool = True,
    raw: bool = False,
    on_text: Callable[[int, str], None] | None = None,
) -> Generation:
    """Decode greedily, all prompts in one batch.

    The cache is this batch's own: its pages are allocated before the first step, as many as the
    texts can need, and given back at the end.

    Parameters
    ----------
    model : Model
        From `specmeta.models.load`.
    prompts : sequence of str
        At least one, none empty.
    max_new_tokens : int
        Most new tokens a prompt; an end token ends a text before.
    num_drafts : int
        Drafts a step, K up to 64 and less than the model's positions; 0 decodes without the head.
    page_size : int
        Tokens a page of the cache, no more than the model's positions.
    prompt_chunk : int
        Most prompt tokens a row and step.
    captured : bool
        Whether the step is captured and replayed, or run as it stands.
    raw : bool
        Whether prompts are continued as they stand. Otherwise a model whose tokenizer has a chat
        template answers them, as a user's messages.
    on_text : callable, optional
        Called with a prompt's index and a piece of its text as soon as the piece is known.

    Returns
    -------
    Generation

    Raises
    ------
    RequestError
        Prompts or settings that can't be served, or need more memory than there is.
    """
    limit = model.target.config.max_position_embeddings
    for name, value, least, most in (
        ("new tokens", max_new_tokens, 1, limit),
        ("drafts", num_drafts, 0, min(limit - 1, MAX_DRAFTS)),
        ("page size", page_size, 1, limit),
    ):
        if not least <= value <= most:
            raise RequestError(f"{name}: expected {least} .. {most}, got {value}")
    if prompt_chunk < 1:
        raise RequestError(f"prompt chunk: expected at least 1, got {prompt_chunk}")
    if num_drafts > 0 and model.head is None:
        raise RequestError(f"{model.name} has no draft head: name one, or use 0 drafts")
    texts = _read_prompts(model, prompts, max_new_tokens=max_new_tokens, raw=raw)

    # A row's cache has room for its text and for drafts that go past the end of it.
    lens = [len(t.prompt_ids) + max_new_tokens + 2 * num_drafts for t in texts]
    counts = [-(-min(length, limit) // page_size) for length in lens]
    pages = PageAllocator(1 + sum(counts))
    owned = [pages.allocate(count) for count in counts]

    longest = max(len(t.prompt_ids) for t in texts)
    chunk = min(prompt_chunk, longest)
    try:
        step = OneModelStep(
            model.target,
            model.head,
            rows=len(texts),
            num_drafts=num_drafts,
            max_query_len=max(chunk, num_drafts + 1),
            page_size=page_size,
            num_pages=pages.num_pages,
            max_pages=max(counts),
        )
    except ValueError as error:
        raise RequestError(f"more than the operations can count: {error}") from error
    for slot, text in enumerate(texts):
        step.batch.assign(slot, text.prompt_ids, owned[slot])

    def prepare(query_len: int) -> Callable[[], None]:
        if captured:
            return capture(lambda: step.run(query_len), num_rows=step.batch.num_rows).replay
        return lambda: step.run(query_len)

    prompt_step, decode_step = prepare(chunk), prepare(num_drafts + 1)
    # The host knows how long the prompts are: it needn't ask the device when they're through.
    prompt_steps = -(-longest // chunk)
    result = Generation(texts, num_drafts, drafted=[0] * num_drafts, accepted=[0] * num_drafts)
    rows = list(range(len(texts)))
    with torch.no_grad():
        while max(rows) >= 0:
            in_prompt = result.steps < prompt_steps
            started = time.perf_counter()
            step.batch.set_rows(rows, [chunk if in_prompt else num_drafts + 1] * len(rows))
            (prompt_step if in_prompt else decode_step)()
            # The one thing that the host reads, outside the captured step.
            outcome = step.outcome.tolist()
            result.seconds += time.perf_counter() - started
            result.steps += 1
            for row, (verified, *emitted) in enumerate(outcome):
                if rows[row] < 0:
                    continue
                emitted = [token for token in emitted if token >= 0]
                if not emitted and not in_prompt:
                    raise RuntimeError(f"row {row} stands still: {_describe(step.batch)}")
                text = texts[row]
                if text.token_ids:
                    result.target_passes += 1
                    for position in range(verified):
                        result.drafted[position] += 1
                        result.accepted[position] += position < len(emitted) - 1
                _append(text, emitted, model.end_ids, max_new_tokens)
                piece = _new_text(model, text)
                if piece and on_text is not None:
                    on_text(row, piece)
                if text.finish:
                    # The row stays where it is, empty; its neighbours don't notice.
                    step.batch.release(row)
                    pages.free(owned[row])
                    rows[row] = -1
    _check_status(step.batch)
    return result


@_refuse_lack_of_memory()
def plain_greedy(model: Model, generation: Generation, *, max_new_tokens: int) -> list[list[int]]:
    """Return what ``transformers`` decodes greedily from each prompt, one prompt at a time.

    Parameters
    ----------
    model : Model
        The same model: its own weights, under the attention of ``transformers``.
    generation : Generation
        Whose prompts to decode.
    max_new_tokens : int
        Most new tokens a prompt.

    Returns
    -------
    list of list of int
        The new tokens, an end token included.

    Raises
    ------
    RequestError
        Not enough memory.
    """
    model.target.set_attn_implementation("sdpa")
    try:
        outputs = []
        for text in generation.texts:
            ids = torch.tensor([text.prompt_ids], device=model.target.device)
            output = model.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            outputs.append(output[0, len(text.prompt_ids) :].tolist())
        return outputs
    finally:
        model.target.set_attn_implementation(ATTENTION_NAME)


def _append(text: Text, emitted: list[int], end_ids: frozenset[int], max_new_tokens: int) -> None:
    """Append what a step gave. The device commits past an end token; the text ends there."""
    for token in emitted:
        text.token_ids.append(token)
        if token in end_ids:
            text.finish = "end"
        elif len(text.token_ids) == max_new_tokens:
            text.finish = "length"
        if text.finish:
            return


def _new_text(model: Model, text: Text) -> str:
    """Decode `text` anew and return what has come since the last time."""
    decoded = str(model.tokenizer.decode(text.token_ids, skip_special_tokens=True))
    # The first bytes of a character decode to the replacement character: wait for the rest.
    if not text.finish and decoded.endswith("\ufffd"):
        return ""
    piece, text.text = decoded[len(text.text) :], decoded
    return piece


def _read_prompts(
    model: Model, prompts: Sequence[str], *, max_new_tokens: int, raw: bool
) -> list[Text]:
    if isinstance(prompts, str):  # a sequence of str, too: of its characters
        raise RequestError(f"prompts: expected a list of them, got the text {prompts!r}")
    if not prompts:
        raise RequestError("no prompts")
    config = model.target.config
    texts = []
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"a prompt isn't valid Unicode: {error}") from error
        ids = _encode(model, prompt, raw=raw) if prompt else []
        if not ids:
            raise RequestError("a prompt is empty")
        if max(ids) >= config.vocab_size:
            raise RequestError(
                f"the tokenizer doesn't fit the model: expected ids below {config.vocab_size}, "
                f"got {max(ids)}"
            )
        if len(ids) + max_new_tokens > config.max_position_embeddings:
            raise RequestError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones: the model has "
                f"{config.max_position_embeddings} positions"
            )
        texts.append(Text(prompt, ids))
    return texts


def _encode(model: Model, prompt: str, *, raw: bool) -> list[int]:
    if raw or not model.is_chat:
        return list(model.tokenizer(prompt)["input_ids"])
    message = {"role": "user", "content": prompt}
    try:
        ids = model.tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # a template is a program that comes with the model
        raise RequestError(f"the model's chat template: {error}; --raw does without") from error
    return list(ids)


def _describe(batch: BatchMetadata) -> str:
    return ", ".join(f"slot {s}: {Status(bits)!r}" for s, bits in enumerate(batch.status.tolist()))


def _check_status(batch: BatchMetadata) -> None:
    """Raise where the operations reported anything but drafts that found no room."""
    if any(bits & ~Status.OVERFLOW for bits in batch.status.tolist()):
        raise RuntimeError(f"the operations report {_describe(batch)}")
