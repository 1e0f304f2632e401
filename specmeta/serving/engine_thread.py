"""Between an event loop and an engine in its own thread.

The event loop reads requests and writes answers, the engine's thread does everything else. They
meet in `EngineThread`, which takes tasks from the loop, and in `Call`, which takes the pieces of
text back to it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from specmeta.serving.protocol import FINISH_REASONS, ApiError, Prompt
from specmeta.serving.request import Request, RequestError, SamplingParams

if TYPE_CHECKING:
    from specmeta.serving.engine import Engine

__all__ = ["CLOSING", "Call", "EngineThread"]

MAX_WAITING = 64  # texts beside those that can run at once
CLOSING = "the server is shutting down"
OUTCOMES = (*FINISH_REASONS, "cancelled", "error", "refused")

_log = logging.getLogger("specmeta.server")
_Piece = tuple[int, str]


class Call:
    """The texts that one HTTP request asks for, on their way from the engine to the client.

    Made in the event loop; `put` is for the engine's thread, `admitted` and `pieces` are for the
    loop.

    Parameters
    ----------
    texts : callable
        Returns the prompts and their parameters; called in the engine's thread, where it may
        raise `RequestError`.
    count : int
        How many.
    stream : bool
        Whether the pieces are wanted, or the ends only.
    prompt_name : str
        The client's parameter that is to blame for what the engine refuses. Those of sampling have
        been checked before.

    Attributes
    ----------
    requests : list of Request
        The engine's, once it has them.
    num_open : int
        Texts that haven't ended.
    is_over : bool
        Whether all ends have come through `pieces`.
    """

    def __init__(
        self,
        texts: Callable[[], Iterable[tuple[Prompt, SamplingParams]]],
        *,
        count: int,
        stream: bool,
        prompt_name: str,
    ) -> None:
        self.texts = texts
        self.stream = stream
        self.prompt_name = prompt_name
        self.requests: list[Request] = []
        self.num_open = count
        self.is_over = False
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Piece | ApiError | None] = asyncio.Queue()

    def put(self, item: _Piece | ApiError | None) -> None:
        """Hand over a piece of a text, ``""`` at its end; an error; or None: let in."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def admitted(self) -> None:
        """Wait until the engine has the requests; raise `ApiError` where it refuses them."""
        item = await self._queue.get()
        if isinstance(item, ApiError):
            self.is_over = True
            raise item

    async def pieces(self) -> AsyncIterator[_Piece]:
        """Yield the pieces of the texts, ``""`` at the end of each, until all have ended.

        Raises
        ------
        ApiError
            A text has failed.
        """
        num_open = len(self.requests)
        while num_open:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                self.is_over = True
                raise item
            assert item is not None
            index, piece = item
            if not piece:
                num_open -= 1
                request = self.requests[index]
                if request.finish == "error":
                    raise ApiError(500, request.error)
                if request.finish == "cancelled":
                    raise ApiError(503, CLOSING)
            yield index, piece
        self.is_over = True


class EngineThread:
    """The thread that owns an engine. It sleeps while there's nothing to do.

    A context manager: the thread runs inside.

    Parameters
    ----------
    engine : Engine
        Nobody else may touch it from now on.
    max_waiting : int
        How many texts may wait beside those that run.

    Attributes
    ----------
    stats : Stats
        The engine's counts after its last step.
    outcomes : Counter
        How many texts ended how.
    prompt_tokens : int
        Tokens of all prompts let in.
    failure : str
        Why the engine can't go on; empty while it can.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = MAX_WAITING) -> None:
        self.capacity = engine.max_rows + max_waiting
        self.max_seq_len = engine.max_seq_len
        self.stats = engine.stats
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.prompt_tokens = 0
        self.failure = ""
        self._engine = engine
        # Guards what follows.
        self._changed = threading.Condition()
        self._tasks: list[Callable[[], None]] = []
        self._calls: set[Call] = set()
        self._num_open = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="specmeta-engine", daemon=True)

    def __enter__(self) -> EngineThread:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, and all calls with it."""
        self.close()
        self._thread.join()

    @property
    def is_closing(self) -> bool:
        """Whether it has been told to end."""
        return self._is_closing

    def submit(self, call: Call) -> None:
        """Let a call in.

        Raises
        ------
        ApiError
            There are too many, or the engine has failed or is closing.
        """
        with self._changed:
            if self.failure:
                raise ApiError(503, self.failure)
            if self._is_closing:
                raise ApiError(503, CLOSING)
            if call.num_open > self.capacity:
                raise ApiError(
                    400,
                    f"prompt: expected at most {self.capacity} prompts, got {call.num_open}",
                    param=call.prompt_name,
                )
            if self._num_open + call.num_open > self.capacity:
                raise ApiError(
                    429, f"too many requests: {self._num_open} are running or waiting already"
                )
            self._num_open += call.num_open
            self._calls.add(call)
            self._post(partial(self._admit, call))

    def cancel(self, call: Call) -> None:
        """End a call that nobody waits for any more; its slots and pages become free."""
        with self._changed:
            self._post(partial(self._cancel, call))

    def close(self) -> None:
        """End all calls, then the thread."""
        with self._changed:
            if not self._is_closing:
                self._is_closing = True
                self._post(self._cancel_all)

    def count(self, outcome: str) -> None:
        """Count an outcome."""
        with self._changed:
            self.outcomes[outcome] += 1

    # All below runs in the thread, _post excepted.

    def _post(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._changed.notify()

    def _run(self) -> None:
        device = self._engine.model.target.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is a thread's own
        is_busy = is_closing = False
        try:
            while is_busy or not is_closing:
                with self._changed:
                    while not is_busy and not self._tasks:
                        self._changed.wait()
                    tasks, self._tasks = self._tasks, []
                    is_closing = self._is_closing
                for task in tasks:
                    task()
                is_busy = self._engine.step()
                self.stats = self._engine.stats
        except Exception as error:
            _log.exception("the engine has failed")
            self._fail(error)

    def _admit(self, call: Call) -> None:
        try:
            for index, (prompt, params) in enumerate(call.texts()):
                request = self._engine.submit(
                    prompt, params, raw=True, on_text=partial(self._take, call, index)
                )
                call.requests.append(request)
        except RequestError as error:
            self._refuse(call, ApiError(400, str(error), param=call.prompt_name))
        except Exception:
            _log.exception("a request couldn't be read")
            self._refuse(call, ApiError(500, "the request couldn't be read: see the server's log"))
        else:
            self.prompt_tokens += sum(len(request.prompt_ids) for request in call.requests)
            call.put(None)

    def _refuse(self, call: Call, error: ApiError) -> None:
        # Places are free before the client hears of it, and may ask again. The ends of the texts
        # that were let in come behind the error: nobody reads them.
        self._leave(call, call.num_open - len(call.requests))
        call.put(error)
        self._cancel(call)

    def _cancel(self, call: Call) -> None:
        for request in call.requests:
            if not request.finish:
                self._engine.cancel(request)

    def _cancel_all(self) -> None:
        for call in list(self._calls):
            self._cancel(call)

    def _take(self, call: Call, index: int, piece: str) -> None:
        if not piece:
            self.count(call.requests[index].finish)
            self._leave(call, 1)
        if call.stream or not piece:
            call.put((index, piece))

    def _leave(self, call: Call, count: int) -> None:
        with self._changed:
            self._num_open -= count
            call.num_open -= count
            if not call.num_open:
                self._calls.discard(call)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = f"the engine has failed ({type(error).__name__}): see the server's log"
            for call in list(self._calls):
                call.put(ApiError(500, self.failure))
                self.outcomes["error"] += call.num_open
                self._leave(call, call.num_open)
