"""``specmeta serve``: answer HTTP requests in the form of OpenAI's."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from specmeta._command import (
    Parser,
    add_drafter_options,
    add_engine_options,
    add_trace_option,
    load_model,
    make_engine,
    progress_bar,
    recording,
    set_up,
)
from specmeta.serving.request import check_integer

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Answer HTTP requests until SIGTERM, which ends it with 0, or SIGINT; 2 for bad input."""
    parser = _parser()
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        check_integer("port", args.port, 0, 65_535)
        # The lists that the host keeps are made before the device refuses what is too much.
        check_integer("max_rows", args.max_rows, 1, 512)
        check_integer("num_pages", args.num_pages, 2, 1 << 24)
        # Before the model is loaded, which takes a while.
        listener = _bind(args.host, args.port)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with listener, ExitStack() as stack:
        device = set_up(parser, args, extra="serve")
        # Before graphs are captured: later it would not see what they do.
        stack.enter_context(recording(parser, args))
        from specmeta.serving import server
        from specmeta.serving.protocol import public_name

        try:
            model = load_model(args, device)
            engine = make_engine(args, model, max_rows=args.max_rows, num_pages=args.num_pages)
            if engine.captured:  # before requests come, not amidst them
                with progress_bar() as progress:
                    task = progress.add_task("shapes")
                    engine.warm_up(
                        lambda done, total: progress.update(task, completed=done, total=total)
                    )
        except ValueError as error:
            parser.error(str(error))
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server.serve(
            engine,
            listener,
            on_ready=lambda: print(f"{public_name(model)}: {url}/v1", flush=True),
        )
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="specmeta serve",
        description="Answer HTTP requests in the form of OpenAI's: /v1/models, /v1/completions, "
        "/v1/chat/completions; also /health, and /metrics for Prometheus.",
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add_engine_options(parser)
    add_drafter_options(parser)
    add_trace_option(parser)
    add("--host", default="127.0.0.1", help=f"who may come: 0.0.0.0 = everyone {default}")
    add("--port", type=int, default=8000, metavar="N", help=f"0 = any that is free {default}")
    add("--max-rows", type=int, default=16, metavar="N", help=f"texts at once {default}")
    add("--num-pages", type=int, default=1024, metavar="N", help=f"of the cache {default}")
    return parser


def _bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to an address; raise OSError and say why."""
    with ExitStack() as stack:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"{host}, port {port}: {reason}") from error
        stack.pop_all()  # open it stays
    return listener
