"""The command line: ``specmeta COMMAND ...``, also ``python -m specmeta COMMAND ...``.

Exit codes: 0, 1 where a check fails, 2 for bad input, 130 for an interrupt.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmeta import __version__
from specmeta._command import (
    DTYPES,
    Parser,
    add_engine_options,
    check_range,
    check_threads,
    find_device,
    format_place,
    format_rate,
    set_up,
)

if TYPE_CHECKING:
    import torch

    from specmeta.generate import Generation
    from specmeta.models import Model

__all__ = ["generate", "main", "serve"]

COMMANDS = {
    "generate": "generate text, speculating with a draft head",
    "serve": "answer HTTP requests in the form of OpenAI's",
    "matrix": "decode the same prompts in every way, and compare the texts",
    "eval": "test how often a model's answers are right",
    "doctor": "say what was built, and what is missing",
}
# Commands that have a module of their own.
MODULES = {"matrix": "matrix", "eval": "evaluate", "doctor": "doctor"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        The command and its arguments. Default: those of the process.

    Returns
    -------
    int
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="specmeta", description="Metadata of speculative decoding, on the device.")
    parser.add_argument("--version", action="version", version=f"specmeta {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    runs = {"generate": generate, "serve": serve}
    try:
        if command in runs:
            return runs[command](arguments[1:])
        module = importlib.import_module(f"specmeta.{MODULES[command]}")
        code: int = module.main(arguments[1:])
        return code
    except KeyboardInterrupt:
        return 130


def generate(argv: Sequence[str]) -> int:
    """Run ``specmeta generate``: decode, print the text, check it, print a table.

    Parameters
    ----------
    argv : sequence of str
        The arguments behind the command.

    Returns
    -------
    int
        0; 1 where a text differs from plain greedy decoding in fp32; 2 for bad input.
    """
    parser = _generate_parser()
    args = parser.parse_args(argv)
    try:
        prompts = _read_prompts(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    device = set_up(parser, args)
    import torch

    from specmeta.generate import RequestError, plain_greedy
    from specmeta.generate import generate as decode
    from specmeta.models import ModelError, load

    settings = {
        "max_new_tokens": args.max_new_tokens,
        "page_size": args.page_size,
        "raw": args.raw,
    }
    try:
        model = load(
            args.model, args.draft, dtype=getattr(torch, DTYPES[args.dtype]), device=device
        )
        # A chat model's text is an answer, any other's goes on where the prompt ends.
        end = "\n" if model.is_chat and not args.raw else ""
        shown = [prompt + end for prompt in prompts]
        with _display(shown, silent=args.json) as on_text:
            speculative = decode(
                model, prompts, num_drafts=args.num_drafts, on_text=on_text, **settings
            )
        plain = decode(model, prompts, num_drafts=0, **settings)
        expected = plain_greedy(model, speculative, max_new_tokens=args.max_new_tokens)
    except (ModelError, RequestError) as error:
        parser.error(str(error))
    report = _report(args, model, speculative, plain, expected)
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 1 if args.dtype == "fp32" and not report["identical"] else 0


def _generate_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="specmeta generate",
        description="Generate text greedily, all prompts in one batch, with drafts of an EAGLE-3 "
        "head verified by the model; then check the text against plain greedy decoding.",
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--prompts", type=Path, metavar="FILE", help="a file of prompts, one a line")
    add("--raw", action="store_true", help="continue prompts, without the model's chat template")
    add("--max-new-tokens", type=int, default=64, metavar="N", help=f"a prompt {default}")
    add_engine_options(parser)
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def serve(argv: Sequence[str]) -> int:
    """Run ``specmeta serve``: answer HTTP requests until SIGINT or SIGTERM.

    Parameters
    ----------
    argv : sequence of str
        The arguments behind the command.

    Returns
    -------
    int
        2 for bad input. SIGTERM ends it with 0, SIGINT with a KeyboardInterrupt.
    """
    parser = _serve_parser()
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        check_threads(args.threads)
        check_range("port", args.port, 0, 65_535)
        # The lists that the host keeps are made before the device refuses what is too much.
        check_range("max rows", args.max_rows, 1, 512)
        check_range("pages", args.num_pages, 2, 1 << 24)
        device = find_device(args.device)
        # Before the model is loaded, which takes a while.
        listener = _bind(args.host, args.port)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with listener:
        _serve(parser, args, device, listener)
    return 0


def _serve(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    device: torch.device,
    listener: socket.socket,
) -> None:
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import safetensors  # noqa: F401
        import starlette  # noqa: F401
        import transformers
        import uvicorn  # noqa: F401
    except ImportError as error:
        parser.error(f"{error.name} is missing: pip install 'specmeta[serve]'")
    import torch

    from specmeta.generate import _refuse_lack_of_memory
    from specmeta.models import load
    from specmeta.serving import server
    from specmeta.serving.engine import Engine

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    settings: dict[str, Any] = {"dtype": getattr(torch, DTYPES[args.dtype]), "device": device}
    try:
        model = load(args.model, args.draft, **settings)
        draft = load(args.draft_model, **settings) if args.draft_model else None
        with _refuse_lack_of_memory():
            engine = Engine(
                model,
                draft=draft,
                two_model=args.two_model,
                num_drafts=args.num_drafts,
                max_rows=args.max_rows,
                page_size=args.page_size,
                num_pages=args.num_pages,
                # On the CPU it takes seconds a batch size, amidst requests, and saves little.
                captured=device.type == "cuda",
            )
    except ValueError as error:
        parser.error(str(error))
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server.serve(
        engine,
        listener,
        on_ready=lambda: print(f"{server.public_name(model)}: {url}/v1", flush=True),
    )


def _serve_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="specmeta serve",
        description="Answer HTTP requests in the form of OpenAI's: /v1/models, /v1/completions, "
        "/v1/chat/completions; also /health, and /metrics for Prometheus.",
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add_engine_options(parser)
    add("--two-model", action="store_true", help="run the head as an engine of its own")
    add("--draft-model", metavar="MODEL", help="a separate Llama that drafts, in place of a head")
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


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt)
    if args.prompts is not None:
        try:
            text = args.prompts.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompts}: {error}") from error
        # Not splitlines: form feeds and line separators are part of a prompt.
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE")
    return prompts


@contextmanager
def _display(prompts: list[str], *, silent: bool) -> Iterator[Callable[[int, str], None]]:
    """Show texts as they come; yield the function that takes the pieces.

    One text is written as it is. Several grow side by side on a terminal; anything else than a
    terminal gets them when they're done.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(quiet=silent)
    if len(prompts) == 1:
        prompt = iter(prompts)
        yield lambda _, piece: console.out(next(prompt, "") + piece, end="", highlight=False)
        console.out("")
        return
    texts = [Text(f"[{index}] {prompt}") for index, prompt in enumerate(prompts, 1)]
    live = Live(console=console)

    def show(index: int, piece: str) -> None:
        texts[index].append(piece)
        live.start()
        live.update(Text("\n").join(texts))

    try:
        yield show
    finally:
        live.stop()
    if not console.is_terminal:  # Live ends the last line on a terminal only
        console.out("")


def _report(
    args: argparse.Namespace,
    model: Model,
    speculative: Generation,
    plain: Generation,
    expected: list[list[int]],
) -> dict[str, Any]:
    texts = [
        {
            "prompt": text.prompt,
            "text": text.text,
            "token_ids": text.token_ids,
            "finish": text.finish,
            "identical": text.token_ids == ids,
        }
        for text, ids in zip(speculative.texts, expected, strict=True)
    ]
    return {
        "model": model.name,
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "num_drafts": speculative.num_drafts,
        "page_size": args.page_size,
        "texts": texts,
        "tokens": speculative.num_tokens,
        "steps": speculative.steps,
        "target_passes": speculative.target_passes,
        "tokens_per_pass": speculative.tokens_per_pass,
        "accepted": speculative.accepted,
        "drafted": speculative.drafted,
        "tokens_per_second": speculative.tokens_per_second,
        "tokens_per_second_without_speculation": plain.tokens_per_second,
        "identical": all(text["identical"] for text in texts),
    }


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    pairs = list(zip(report["accepted"], report["drafted"], strict=True))
    rates = " ".join(f"{a / d:.1%}" if d else "-" for a, d in pairs)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("model", report["model"]),
        ("run on", format_place(report["device"], report["dtype"], report["threads"])),
        ("drafts a pass", str(report["num_drafts"])),
        ("tokens", str(report["tokens"])),
        ("target passes", str(report["target_passes"])),
        ("tokens a pass", f"{report['tokens_per_pass']:.2f}"),
        ("acceptance", format_rate(sum(a for a, _ in pairs), sum(d for _, d in pairs))),
        ("acceptance by position", rates or "-"),
        ("tokens/s with speculation", f"{report['tokens_per_second']:.1f}"),
        ("tokens/s without", f"{report['tokens_per_second_without_speculation']:.1f}"),
        ("identical to plain greedy decoding", "yes" if report["identical"] else "no"),
    ):
        table.add_row(name, value)
    Console().print(table)
