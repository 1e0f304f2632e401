"""``specmeta trace``: sum a trace up, draw it, or compare two."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmeta._command import Parser, print_figures
from specmeta._environment import EXTRAS, how_to_install

if TYPE_CHECKING:
    from specmeta.trace.comparison import Divergence
    from specmeta.trace.file import Trace

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Sum a trace up, draw it, or compare two; 1 where two runs part, 2 for bad input."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.diff and args.output is not None:
        parser.error("--output: not beside --diff")
    expected = 2 if args.diff else 1
    if len(args.files) != expected:
        parser.error(f"FILE: expected {expected}, got {len(args.files)}")
    if args.output is not None and args.output.suffix not in (".html", ".png"):
        parser.error(f"--output: expected a name that ends with .html or .png, got {args.output}")
    try:
        for name in EXTRAS["debug"]:
            importlib.import_module(name)
    except ImportError as error:
        parser.error(f"{error.name} is missing: {how_to_install('debug')}")
    from specmeta.trace.comparison import compare
    from specmeta.trace.file import TraceError, read

    try:
        traces = [read(file) for file in args.files]
        if args.output is not None:
            _save(traces[0], args.output)
            return 0
    except TraceError as error:
        parser.error(str(error))
    except OSError as error:  # it doesn't say which file where the device is full
        parser.error(f"{args.output}: {error.strerror or error}")
    if not args.diff:
        _print_summary(traces[0])
        return 0
    try:
        differences = compare(*traces)
    except TraceError as error:
        parser.error(str(error))
    _print_differences(traces, differences)
    return 1 if differences else 0


def _parser() -> Parser:
    parser = Parser(
        prog="specmeta trace",
        description="Sum up a trace that --trace of generate or serve, or specmeta.trace.record, "
        "wrote; make a page or a picture of it; or compare two.",
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a trace, .jsonl or .jsonl.gz")
    add("-o", "--output", type=Path, metavar="OUT", help="a page, .html, or a picture, .png")
    add("--diff", action="store_true", help="say where the runs of two traces part")
    return parser


def _save(trace: Trace, path: Path) -> None:
    if path.suffix == ".png":
        from specmeta.trace.picture import save_picture

        save_picture(trace, path)
    else:
        from specmeta.trace.page import make_page

        path.write_text(make_page(trace), encoding="utf-8")


def _print_summary(trace: Trace) -> None:
    from rich.console import Console

    from specmeta.trace.totals import describe

    print_figures(describe(trace))
    if trace.note:
        Console().print(f"Note: {trace.note}.")


def _print_differences(traces: list[Trace], differences: list[Divergence]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specmeta.trace.totals import describe

    console = Console()
    names: list[Any] = [Path(trace.path).name for trace in traces]
    if names[0] == names[1]:
        names = [trace.path for trace in traces]
    if differences:
        table = Table(title="Where the runs part", title_justify="left")
        for column in ("field", "request", "behind token", *names):
            table.add_column(column)
        for found in differences:
            places = [f"{p.value} (step {p.step}, row {p.row})" for p in (found.a, found.b)]
            table.add_row(found.field, str(found.request), str(found.token), *places)
        console.print(table)
    else:
        console.print("The runs are the same, as far as both go.")
    # What may differ between runs that are the same.
    table = Table(title="Side by side", title_justify="left")
    table.add_column()
    for name in names:
        table.add_column(name, justify="right")
    for (name, a), (_, b) in zip(*(describe(trace) for trace in traces), strict=True):
        table.add_row(name, a, b)
    console.print(table)
    for trace in traces:
        if trace.note:
            console.print(f"Note: {trace.path}: {trace.note}.")
