"""The two kinds of completion, as ASGI applications."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specmeta.models import Model
from specmeta.serving.engine_thread import Call, EngineThread
from specmeta.serving.protocol import (
    FINISH_REASONS,
    ApiError,
    Body,
    ChatBody,
    Prompt,
    StreamOptions,
    TextBody,
    no_model,
    parse,
    public_name,
    shorten,
)
from specmeta.serving.request import RequestError, SamplingParams

__all__ = ["Chat", "Completions"]

MAX_BODY = 1 << 20  # bytes
BODY_SECONDS = 30  # for a client to send its body

_B = TypeVar("_B", bound=Body)


class _Endpoint(ABC, Generic[_B]):
    """A kind of completion, as an ASGI application: the parts that both kinds share.

    It's no function of a request, for it must see what happens to its answer: whenever it's left,
    and however, the engine is rid of the call.
    """

    body_type: type[_B]
    prompt_name: str  # the parameter that holds the prompt
    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, thread: EngineThread, model: Model) -> None:
        self.thread = thread
        self.model = model
        self.name = public_name(model)

    @abstractmethod
    def _texts(self, body: _B) -> Iterable[tuple[Prompt, SamplingParams]]:
        """Return what to submit; called in the engine's thread."""

    @abstractmethod
    def _count(self, body: _B) -> int:
        """Return how many texts a body asks for."""

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """Return what a choice says beside its number and how it ended."""

    @abstractmethod
    def _delta(self, piece: str) -> dict[str, Any]:
        """Return the same for a piece of one."""

    def _first_deltas(self) -> Sequence[dict[str, Any]]:
        """Return what the pieces of a choice begin with."""
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

    async def _begin(self, request: HttpRequest) -> tuple[_B, Call]:
        """Read what is asked for and let it in."""
        body = parse(self.body_type, await _read_body(request))
        if body.model != self.name:
            raise no_model(body.model, self.name)
        call = Call(
            lambda: self._texts(body),
            count=self._count(body),
            stream=body.stream,
            prompt_name=self.prompt_name,
        )
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
            _choice(index, self._content(request.text), FINISH_REASONS[request.finish])
            for index, request in enumerate(call.requests)
        ]
        return {**head, "choices": choices, "usage": _usage(call)}

    async def _events(
        self, call: Call, head: dict[str, Any], options: StreamOptions
    ) -> AsyncIterator[str]:
        """Yield the events of a stream. Once it has begun, an error can only be one of them."""
        if options.include_usage:
            head = {**head, "usage": None}

        def event(index: int, content: dict[str, Any], reason: str | None = None) -> str:
            return _event({**head, "choices": [_choice(index, content, reason)]})

        try:
            for index in range(len(call.requests)):
                for content in self._first_deltas():
                    yield event(index, content)
            async for index, piece in call.pieces():
                reason = None if piece else FINISH_REASONS[call.requests[index].finish]
                yield event(index, self._delta(piece), reason)
                # Behind a client that reads slowly, pieces pile up: others needn't wait for all.
                await asyncio.sleep(0)
            if options.include_usage:
                yield _event({**head, "choices": [], "usage": _usage(call)})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)


class Completions(_Endpoint[TextBody]):
    """Continues prompts: ``/v1/completions``."""

    body_type = TextBody
    prompt_name = "prompt"
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def _texts(self, body: TextBody) -> Iterable[tuple[Prompt, SamplingParams]]:
        return [(prompt, body.params(16)) for prompt in body.prompt]  # OpenAI's default

    def _count(self, body: TextBody) -> int:
        return len(body.prompt)

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, piece: str) -> dict[str, Any]:
        return {"text": piece}


class Chat(_Endpoint[ChatBody]):
    """Answers messages, by the model's chat template: ``/v1/chat/completions``."""

    body_type = ChatBody
    prompt_name = "messages"
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _texts(self, body: ChatBody) -> Iterable[tuple[Prompt, SamplingParams]]:
        if not self.model.is_chat:
            raise RequestError(f"{self.name} has no chat template: use /v1/completions")
        messages = [message.for_template() for message in body.messages]
        try:
            template = self.model.tokenizer.apply_chat_template
            ids: Any = template(
                messages,
                add_generation_prompt=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
            )
        except Exception as error:  # a template is a program that comes with the model
            raise RequestError(f"messages: the model's chat template: {error}") from error
        ids = list(ids)
        # Without a limit, as long as there's room.
        return [(ids, body.params(max(self.thread.max_seq_len - len(ids), 1)))]

    def _count(self, body: ChatBody) -> int:
        return 1

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, piece: str) -> dict[str, Any]:
        return {"delta": {"content": piece} if piece else {}}

    def _first_deltas(self) -> Sequence[dict[str, Any]]:
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


async def _read_body(request: HttpRequest) -> bytes:
    """Read a body, of a limited size in a limited time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page in a browser may send other types to a server on this machine without asking it.
    if kind != "application/json":
        raise ApiError(415, f"Content-Type: expected application/json, got {shorten(kind)!r}")

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
