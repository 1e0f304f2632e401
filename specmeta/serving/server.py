"""The HTTP endpoint: OpenAI's completions and chat, served by an `Engine` in its own thread.

The event loop reads requests and writes answers, the engine's thread does everything else. They
meet in `EngineThread`, which takes tasks from the loop, and in `Call`, which takes the pieces of
text back to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specmeta.models import Model
from specmeta.serving.metrics import make_registry
from specmeta.serving.request import Request, RequestError, SamplingParams

if TYPE_CHECKING:
    from specmeta.serving.engine import Engine

__all__ = [
    "ApiError",
    "Call",
    "EngineThread",
    "make_app",
    "make_server",
    "public_name",
    "serve",
]

MAX_BODY = 1 << 20  # bytes
MAX_WAITING = 64  # texts beside those that can run at once
MAX_CONNECTIONS = 1024
BODY_SECONDS = 30  # for a client to send its body
GRACE_SECONDS = 5  # for texts to end before the server does
ABORT_SECONDS = 1  # for clients to read how they ended
RETRY_SECONDS = 1
CLOSING = "the server is shutting down"

FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}
OUTCOMES = (*FINISH_REASONS, "cancelled", "error", "refused")

# Parameters of OpenAI that change nothing here.
HARMLESS = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Parameters that would change the answer, with the values that ask for nothing; so does null.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

_log = logging.getLogger("specmeta.server")
_Piece = tuple[int, str]
_Prompt = str | list[int]


class ApiError(Exception):
    """An answer that isn't a text.

    Parameters
    ----------
    status : int
        The HTTP status.
    message : str
        The reason, for the client to read.
    param : str, optional
        The parameter that's wrong.
    code : str, optional
        OpenAI's name of the error.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """Return the error in OpenAI's form."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


# What a client may send.


class _Part(BaseModel):
    """What all objects in a request have in common: they say what they don't take."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: item
            for key, item in value.items()
            if item is not None and key not in HARMLESS and not _is_neutral(key, item)
        }


def _is_neutral(key: str, value: object) -> bool:
    # In Python, but not in JSON, 0 == False.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL.get(key, ())
    )


class _StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _Body(_Part):
    """The parameters that both kinds of completion have."""

    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=4), BeforeValidator(_as_list)
    ] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    def params(self, default_tokens: int) -> SamplingParams:
        tokens = (self.max_completion_tokens, self.max_tokens, default_tokens)
        return SamplingParams(
            max_new_tokens=next(count for count in tokens if count is not None),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
            stop=tuple(self.stop),
        )


def _read_prompts(value: Any) -> list[_Prompt]:
    def are(kind: type, values: object) -> bool:
        return isinstance(values, list) and all(type(item) is kind for item in values)

    if isinstance(value, str) or (value and are(int, value)):
        return [value]
    if value and isinstance(value, list) and all(type(i) is str or are(int, i) for i in value):
        return list(value)
    raise ValueError("expected a string, a list of strings, or token ids")


class _TextBody(_Body):
    prompt: Annotated[list[_Prompt], PlainValidator(_read_prompts)]


class _TextPart(_Part):
    type: Literal["text"]
    text: str


def _text_as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Message(_Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[_TextPart], BeforeValidator(_text_as_parts)]

    def for_template(self) -> dict[str, str]:
        # OpenAI's new name of the role; templates know the old one.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class _ChatBody(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]


_B = TypeVar("_B", bound=_Body)


def _parse(kind: type[_B], body: bytes) -> _B:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    # The name is the client's, of any length.
    name = _short(".".join(map(str, first["loc"])))
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        reason = "not supported"
    raise ApiError(400, f"{name}: {reason}" if name else reason, param=name or None)


def _short(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "..."


async def _read_body(request: HttpRequest) -> bytes:
    """Read a body, of a limited size in a limited time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page in a browser may send other types to a server on this machine without asking it.
    if kind != "application/json":
        raise ApiError(415, f"Content-Type: expected application/json, got {_short(kind)!r}")

    async def read() -> bytes:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise ApiError(413, f"the body is larger than {MAX_BODY} bytes")
        return body

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except (TimeoutError, asyncio.TimeoutError):  # two types until Python 3.11
        raise ApiError(408, f"the body took longer than {BODY_SECONDS} seconds") from None


# Between the event loop and the engine's thread.


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
        texts: Callable[[], Iterable[tuple[_Prompt, SamplingParams]]],
        *,
        count: int,
        stream: bool,
    ) -> None:
        self.texts = texts
        self.stream = stream
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
                    400, f"prompt: expected at most {self.capacity} prompts, got {call.num_open}"
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
            self._refuse(call, ApiError(400, str(error)))
        except Exception:
            _log.exception("a request couldn't be read")
            self._refuse(call, ApiError(500, "the request couldn't be read: see the server's log"))
        else:
            self.prompt_tokens += sum(len(request.prompt_ids) for request in call.requests)
            call.put(None)

    def _refuse(self, call: Call, error: ApiError) -> None:
        call.put(error)
        self._leave(call, call.num_open - len(call.requests))
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


# HTTP.


class _Endpoint:
    """A kind of completion, as an ASGI application: the parts that both kinds share.

    It's no function of a request, for it must see what happens to its answer: whenever it's left,
    and however, the engine is rid of the call.
    """

    body_type: type[_Body]
    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, thread: EngineThread, model: Model) -> None:
        self.thread = thread
        self.model = model
        self.name = public_name(model)

    def texts(self, body: Any) -> Iterable[tuple[_Prompt, SamplingParams]]:
        """Return what to submit; called in the engine's thread."""
        raise NotImplementedError

    def count(self, body: Any) -> int:
        """Return how many texts a body asks for."""
        raise NotImplementedError

    def choice(self, text: str) -> dict[str, Any]:
        """Return what a choice says beside its number and how it ended."""
        raise NotImplementedError

    def chunk(self, piece: str) -> dict[str, Any]:
        """Return the same for a piece of one."""
        raise NotImplementedError

    def first_chunks(self) -> Sequence[dict[str, Any]]:
        """Return what a streamed choice begins with."""
        return ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body, call = await self._begin(HttpRequest(scope, receive))
        except ClientDisconnect:
            return
        except ApiError:
            self.thread.count("refused")
            raise
        watch = asyncio.create_task(self._cancel_when_gone(receive, call))
        try:
            head = {
                "id": self.id_prefix + secrets.token_hex(12),
                "object": self.chunk_kind if body.stream else self.kind,
                "created": int(time.time()),
                "model": self.name,
            }
            response: Response
            if body.stream:
                events = self._events(call, head, body.stream_options)
                response = StreamingResponse(
                    events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
                )
            else:
                response = JSONResponse(await self._whole(call, head))
            await response(scope, receive, send)
        finally:
            watch.cancel()
            if not call.is_over:
                self.thread.cancel(call)

    async def _begin(self, request: HttpRequest) -> tuple[_Body, Call]:
        """Read what is asked for and let it in."""
        body = _parse(self.body_type, await _read_body(request))
        if body.model != self.name:
            raise _no_model(body.model, self.name)
        call = Call(lambda: self.texts(body), count=self.count(body), stream=body.stream)
        self.thread.submit(call)
        await call.admitted()
        return body, call

    async def _cancel_when_gone(self, receive: Receive, call: Call) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not call.is_over:
            self.thread.cancel(call)

    async def _whole(self, call: Call, head: dict[str, Any]) -> dict[str, Any]:
        async for _ in call.pieces():
            pass
        choices = [
            _choice(index, self.choice(request.text), FINISH_REASONS[request.finish])
            for index, request in enumerate(call.requests)
        ]
        return {**head, "choices": choices, "usage": _usage(call)}

    async def _events(
        self, call: Call, head: dict[str, Any], options: _StreamOptions
    ) -> AsyncIterator[str]:
        """Yield the events of a stream. Once it has begun, an error can only be one of them."""
        if options.include_usage:
            head = {**head, "usage": None}

        def event(index: int, content: dict[str, Any], reason: str | None = None) -> str:
            return _event({**head, "choices": [_choice(index, content, reason)]})

        try:
            for index in range(len(call.requests)):
                for content in self.first_chunks():
                    yield event(index, content)
            async for index, piece in call.pieces():
                reason = None if piece else FINISH_REASONS[call.requests[index].finish]
                yield event(index, self.chunk(piece), reason)
                # Behind a client that reads slowly, pieces pile up: others needn't wait for all.
                await asyncio.sleep(0)
            if options.include_usage:
                yield _event({**head, "choices": [], "usage": _usage(call)})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)


class _Completions(_Endpoint):
    body_type = _TextBody
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def texts(self, body: _TextBody) -> Iterable[tuple[_Prompt, SamplingParams]]:
        return [(prompt, body.params(16)) for prompt in body.prompt]  # OpenAI's default

    def count(self, body: _TextBody) -> int:
        return len(body.prompt)

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def chunk(self, piece: str) -> dict[str, Any]:
        return {"text": piece}


class _Chat(_Endpoint):
    body_type = _ChatBody
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def texts(self, body: _ChatBody) -> Iterable[tuple[_Prompt, SamplingParams]]:
        if not self.model.is_chat:
            raise RequestError(f"{self.name} has no chat template: use /v1/completions")
        messages = [message.for_template() for message in body.messages]
        try:
            template = self.model.tokenizer.apply_chat_template
            ids: Any = template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program that comes with the model
            raise RequestError(f"messages: the model's chat template: {error}") from error
        ids = list(ids)
        # Without a limit, as long as there's room.
        return [(ids, body.params(max(self.thread.max_seq_len - len(ids), 1)))]

    def count(self, body: _ChatBody) -> int:
        return 1

    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def chunk(self, piece: str) -> dict[str, Any]:
        return {"delta": {"content": piece} if piece else {}}

    def first_chunks(self) -> Sequence[dict[str, Any]]:
        return ({"delta": {"role": "assistant", "content": ""}},)


def _choice(index: int, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(call: Call) -> dict[str, int]:
    prompt = sum(len(request.prompt_ids) for request in call.requests)
    completion = sum(len(request.token_ids) for request in call.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def public_name(model: Model) -> str:
    """Return a model's name for clients: where a folder lies is nobody's business.

    Parameters
    ----------
    model : Model
        The model.

    Returns
    -------
    str
    """
    return Path(model.name).resolve().name


def _no_model(name: str, expected: str) -> ApiError:
    return ApiError(
        404,
        f"no model {_short(name)!r}: this server has {expected!r}",
        param="model",
        code="model_not_found",
    )


def make_app(thread: EngineThread, model: Model) -> Starlette:
    """Return the application.

    Parameters
    ----------
    thread : EngineThread
        A thread that runs.
    model : Model
        Its engine's model.

    Returns
    -------
    Starlette
    """
    name = public_name(model)
    registry = make_registry(thread)
    described = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "specmeta"}

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    async def one_model(request: HttpRequest) -> Response:
        if request.path_params["name"] != name:
            raise _no_model(request.path_params["name"], name)
        return JSONResponse(described)

    async def health(_: HttpRequest) -> Response:
        reason = thread.failure or (CLOSING if thread.is_closing else "")
        if reason:
            return JSONResponse({"status": "unavailable", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(_: HttpRequest) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def refuse(_: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, error.detail)
        elif not isinstance(error, ApiError):  # raised again behind this, so it's in the log
            error = ApiError(500, "an error of the server: see its log")
        return error.response()

    return Starlette(
        routes=[
            Route("/v1/completions", _Completions(thread, model), methods=["POST"]),
            Route("/v1/chat/completions", _Chat(thread, model), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={ApiError: refuse, HTTPException: refuse, Exception: refuse},
    )


def make_server(
    thread: EngineThread, model: Model, *, on_ready: Callable[[], None]
) -> uvicorn.Server:
    """Return an HTTP server. At its end, what runs still has `GRACE_SECONDS`, or until told again.

    Parameters
    ----------
    thread : EngineThread
        A thread that runs.
    model : Model
        Its engine's model.
    on_ready : callable
        Called when requests can come.

    Returns
    -------
    uvicorn.Server
    """
    config = uvicorn.Config(
        make_app(thread, model),
        lifespan="off",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
    )
    return _HttpServer(config, thread, on_ready)


class _HttpServer(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, thread: EngineThread, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._thread = thread
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop.call_later(GRACE_SECONDS, self._end)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # once more: now; uvicorn would break off, with tracebacks
            self._captured_signals.append(sig)
            self._loop.call_soon_threadsafe(self._end)
        else:
            super().handle_exit(sig, frame)

    def _end(self) -> None:
        self._thread.close()
        self._loop.call_later(ABORT_SECONDS, self._abort)

    def _abort(self) -> None:
        """Break connections whose clients don't send, or read, what would end them."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(engine: Engine, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, which then does what it would have done.

    Parameters
    ----------
    engine : Engine
        What to serve.
    listener : socket
        A bound TCP socket.
    on_ready : callable
        Called when requests can come.
    """
    with EngineThread(engine) as thread:
        make_server(thread, engine.model, on_ready=on_ready).run(sockets=[listener])
