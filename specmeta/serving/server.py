"""The HTTP endpoint: OpenAI's completions and chat, served by an `Engine` in its own thread."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from specmeta.models import Model
from specmeta.serving.completions import Chat, Completions
from specmeta.serving.engine_thread import CLOSING, EngineThread
from specmeta.serving.metrics import make_registry
from specmeta.serving.protocol import ApiError, no_model, public_name

if TYPE_CHECKING:
    from specmeta.serving.engine import Engine

__all__ = ["make_server", "serve"]

# With what is accepted at a time, fewer than the 1024 files that a process may have by default.
MAX_CONNECTIONS = 512
BACKLOG = 128
HEAD_SECONDS = 30  # for a client to ask for something
GRACE_SECONDS = 5  # for texts to end before the server does
ABORT_SECONDS = 1  # for clients to read how they ended


def _make_app(thread: EngineThread, model: Model) -> Starlette:
    name = public_name(model)
    registry = make_registry(thread)
    described = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "specmeta"}

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    async def one_model(request: HttpRequest) -> Response:
        if request.path_params["name"] != name:
            raise no_model(request.path_params["name"], name)
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
            Route("/v1/completions", Completions(thread, model), methods=["POST"]),
            Route("/v1/chat/completions", Chat(thread, model), methods=["POST"]),
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
        _make_app(thread, model),
        lifespan="off",
        log_level="warning",
        http=_Connection,
        limit_concurrency=MAX_CONNECTIONS,
        backlog=BACKLOG,
    )
    return _HttpServer(config, thread, on_ready)


class _Connection(H11Protocol):
    """A connection that ends where nothing is asked for, and where there are too many.

    uvicorn refuses requests that are too many, but waits for ever for their heads.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._check_silence((None, False))

    def _check_silence(self, before: tuple[object, bool]) -> None:
        now = self.cycle, self.cycle is None or self.cycle.response_complete
        if now == before and now[1]:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(HEAD_SECONDS, self._check_silence, now)


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
        print(
            f"ending: texts have {GRACE_SECONDS} seconds; a second signal ends them now",
            file=sys.stderr,
            flush=True,
        )
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
