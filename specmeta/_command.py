"""What the commands have in common: arguments, models and engines, and how work is shown."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from specmeta._environment import EXTRAS, find_device, how_to_install, os_reason
from specmeta.serving.request import RequestError, check_integer

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

    from specmeta.models import Model
    from specmeta.serving.engine import Engine

__all__ = [
    "Parser",
    "add_device_options",
    "add_drafter_options",
    "add_engine_options",
    "add_trace_option",
    "format_place",
    "format_rate",
    "load_model",
    "make_engine",
    "print_figures",
    "progress_bar",
    "recording",
    "set_up",
]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Between two lines that say how far work has come.
LINE_SECONDS = 30.0


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs a model: what it's made of, and where it runs."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add(
        "--model",
        default="austen",
        help=f"a Llama's directory, or one built in: austen, smollm2 (downloaded once) {default}",
    )
    add("--draft", metavar="DIR", help="the EAGLE-3 head (default: the model's own)")
    add(
        "-k",
        "--num-drafts",
        type=int,
        default=4,
        metavar="K",
        help=f"drafts a step, 0 = none {default}",
    )
    add("--dtype", choices=DTYPES, default="fp32", help=f"of weights and cache {default}")
    add("--page-size", type=int, default=16, metavar="N", help=f"tokens a page {default}")
    add_device_options(parser)


def add_drafter_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command whose drafter can have a cache and graphs of its own."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("--two-model", action="store_true", help="run the head as an engine of its own")
    add("--draft-model", metavar="MODEL", help="a separate Llama that drafts, in place of a head")


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where a command runs."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--device", default="cpu", help=f"cpu, cuda or cuda:N {default}")
    # Where another program runs, two threads wait for each other at every small operation.
    add("--threads", type=int, default=1, metavar="N", help=f"threads on the CPU {default}")


def add_trace_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of a command whose steps can be recorded."""
    text = "record every step: .jsonl or .jsonl.gz, for specmeta trace"
    parser.add_argument("--trace", metavar="FILE", help=text)


@contextmanager
def recording(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[None]:
    """Record what runs inside where `add_trace_option` asks for it; exit where that fails."""
    if args.trace is None:
        yield
        return
    from specmeta.trace import RecordingError, record

    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(record(args.trace))
            except OSError as error:
                parser.error(f"trace: {os_reason(error)}")
            yield
    except RecordingError as error:
        parser.exit(1, f"{parser.prog}: trace: {error}\n")


def set_up(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *, extra: str = "generate"
) -> torch.device:
    """Get everything ready to load a model; exit with one line where something is missing.

    Parameters
    ----------
    parser : ArgumentParser
        Says what is wrong.
    args : Namespace
        With `add_device_options`.
    extra : str
        Which of `EXTRAS` is needed.

    Returns
    -------
    torch.device
        Where to run.
    """
    try:
        check_integer("threads", args.threads, 1, os.cpu_count() or 1)
        device = find_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        for name in (*EXTRAS["generate"], *EXTRAS[extra]):
            importlib.import_module(name)
    except ImportError as error:
        parser.error(f"{error.name} is missing: {how_to_install(extra)}")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    return device


def load_model(args: argparse.Namespace, device: torch.device) -> Model:
    """Load the model that `add_engine_options` name; raise ModelError where it can't be used."""
    import torch

    from specmeta.models import load

    return load(args.model, args.draft, dtype=getattr(torch, DTYPES[args.dtype]), device=device)


def make_engine(args: argparse.Namespace, model: Model, **settings: Any) -> Engine:
    """Make an engine as the command line describes it.

    Parameters
    ----------
    args : Namespace
        With `add_engine_options` and `add_drafter_options`.
    model : Model
        The model. A separate drafter is loaded here.
    **settings
        The other parameters of `Engine`.

    Returns
    -------
    Engine

    Raises
    ------
    ModelError
        The drafter can't be used.
    RequestError
        Settings that don't fit each other or the model, or need more memory than there is.
    """
    from specmeta.models import load
    from specmeta.serving.engine import Engine
    from specmeta.serving.memory import refuse_lack_of_memory

    dtype, device = model.target.dtype, model.target.device
    draft = load(args.draft_model, dtype=dtype, device=device) if args.draft_model else None
    try:
        with refuse_lack_of_memory():
            return Engine(
                model,
                draft=draft,
                two_model=args.two_model,
                num_drafts=args.num_drafts,
                page_size=args.page_size,
                # On the CPU it takes seconds a batch size, and saves little.
                captured=device.type == "cuda",
                **settings,
            )
    except ValueError as error:
        raise RequestError(str(error)) from error


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a progress bar on standard error, gone at the end; a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    if console.is_terminal:
        with bar:
            yield bar
        return
    started, ended = time.monotonic(), threading.Event()

    def print_lines() -> None:
        while not ended.wait(LINE_SECONDS):
            for task in bar.tasks[-1:]:
                of = "" if task.total is None else f" of {task.total:.0f}"
                line = f"{task.description}: {task.completed:.0f}{of}"
                seconds = time.monotonic() - started
                print(f"{line}, {seconds:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield bar
    finally:
        ended.set()
        thread.join()


def print_figures(figures: Iterable[tuple[str, str]]) -> None:
    """Print a table of names and what stands behind each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures:
        table.add_row(name, value)
    Console().print(table)


def format_place(device: str, dtype: str, threads: int) -> str:
    """Say where and how a model ran."""
    place = f"{device}, {dtype}"
    return f"{place}, threads: {threads}" if device == "cpu" else place


def format_rate(accepted: int, drafted: int) -> str:
    """Say how many drafts stood."""
    return f"{accepted / drafted:.2%} ({accepted}/{drafted} tokens)" if drafted else "-"
