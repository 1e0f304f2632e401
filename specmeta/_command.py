"""What the commands have in common: arguments, and how work is shown."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

__all__ = [
    "DTYPES",
    "Parser",
    "add_device_options",
    "add_engine_options",
    "check_range",
    "check_threads",
    "find_device",
    "format_place",
    "format_rate",
    "progress_bar",
    "set_up",
]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


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


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where a command runs."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--device", default="cpu", help=f"cpu, cuda or cuda:N {default}")
    # Where another program runs, two threads wait for each other at every small operation.
    add("--threads", type=int, default=1, metavar="N", help=f"threads on the CPU {default}")


def set_up(parser: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """Get everything ready to load a model; exit with one line where something is missing.

    Parameters
    ----------
    parser : ArgumentParser
        Says what is wrong.
    args : Namespace
        With `add_device_options`.

    Returns
    -------
    torch.device
        Where to run.
    """
    try:
        check_threads(args.threads)
        device = find_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    try:
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import transformers
    except ImportError as error:
        parser.error(f"{error.name} is missing: pip install 'specmeta[generate]'")
    import torch

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    return device


def find_device(name: str) -> torch.device:
    """Return the device `name`; raise ValueError where it can't be used, and say why."""
    match = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", name)
    if match is None:
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {name!r}")

    import torch

    from specmeta import _library

    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ValueError(f"device: {name}: this torch has no CUDA: install a CUDA build of torch")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"device: {name}: GPUs that torch can use: {count}")
    if not _library.build_info().cuda:
        raise ValueError(
            f"device: {name}: the library has no CUDA kernels: SPECMETA_CUDA=1 make build"
        )
    return torch.device("cuda", index)


def check_threads(threads: int) -> None:
    """Raise ValueError where there aren't that many cores."""
    check_range("threads", threads, 1, os.cpu_count() or 1)


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError where a value is out of its range."""
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} .. {most}, got {value}")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a progress bar: on standard error, where that is a terminal, and gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield progress


def format_place(device: str, dtype: str, threads: int) -> str:
    """Say where and how a model ran."""
    place = f"{device}, {dtype}"
    return f"{place}, threads: {threads}" if device == "cpu" else place


def format_rate(accepted: int, drafted: int) -> str:
    """Say how many drafts stood."""
    return f"{accepted / drafted:.2%} ({accepted}/{drafted} tokens)" if drafted else "-"
