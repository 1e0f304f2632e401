"""``specmeta explain``: why a call's results are what they are.

The reasons come from :mod:`specmeta.reference` itself, which says at each decision what it decided
and which section of the contract wants it so. The built operator runs too, and its results are
compared: with what the file expects, else with the reference's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

import specmeta
from specmeta import _notes, reference
from specmeta._command import Parser
from specmeta._environment import how_to_install
from specmeta._notes import Note, show
from specmeta._paste import read_call
from specmeta._rows import Difference, Rows
from specmeta.cases import Case, CaseError, arguments_of
from specmeta.observe import Call
from specmeta.status import Status
from specmeta.testing import Guarded

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Difference", "Explanation", "explain", "main"]

MOST_ROWS = 16  # that are shown where nobody asks for some
ROWS_A_TABLE = 6
MOST_IN_CELL = 6
MOST_DIFFERENCES = 1000  # elements of a tensor whose rows are looked for
PIPED_WIDTH = 200


@dataclass(frozen=True)
class Explanation:
    """Why a call's results are what they are.

    Attributes
    ----------
    case : Case
    notes : list of Note
        What the reference said, in order; ``str(note)`` is a sentence.
    slots : list of int or None
        B entries: the slot of each row, None where it has none.
    results : dict
        What the reference left in each output, by name.
    rows : Rows
        Which tokens are whose.
    reference, operator : Difference or None
        The first element in which they differ from what is expected. Where the case expects
        nothing, the reference is what the operator is compared with.
    differing : set of int
        Rows in which either differs.
    """

    case: Case
    notes: list[Note]
    slots: list[int | None]
    results: dict[str, Tensor]
    rows: Rows
    reference: Difference | None
    operator: Difference | None
    differing: set[int]

    def bits(self, row: int) -> int:
        """Return the status bits that the call itself set for a row."""
        word = 0
        for note in self.notes:
            word |= note.bit if note.row == row else 0
        return word


def explain(case: Case) -> Explanation:
    """Run a call by the reference and by the operator, and say why it comes out as it does.

    Parameters
    ----------
    case
        See :mod:`specmeta.cases`; it isn't changed, and may expect nothing.

    Returns
    -------
    Explanation

    Raises
    ------
    CaseError
        The arguments don't fit each other.

    Examples
    --------
    >>> from specmeta.cases import parse
    >>> case = parse({"op": "advance", "args": {"seq_lens": [9], "num_accepted": [-12],
    ...                                         "page_size": 4}})
    >>> print(explain(case).notes[-1])
    length 9 + -12 = -3, below q = 1: emptied (contract: rule 5)
    """
    tensors, values = case.tensors(), case.numbers
    built, plain = Guarded(tensors).tensors, Guarded(tensors).tensors
    try:
        getattr(specmeta, case.operator)(**values, **built)  # it checks what it is given
    except (RuntimeError, ValueError) as error:
        raise CaseError(str(error).splitlines()[0]) from error
    with _notes.collect() as collected:
        getattr(reference, case.operator)(**values, **plain)

    written = {name for name, argument in arguments_of(case.operator).items() if argument.written}
    results = {name: tensor for name, tensor in plain.items() if name in written}
    numbers = {name: value for name, value in values.items() if value is not None}
    rows = Rows(Call(case.operator, numbers, tensors, results, {}, {}))
    expected = {**tensors, **case.expect} if case.expect else plain
    differing: set[int] = set()
    return Explanation(
        case,
        collected.notes,
        collected.slots,
        results,
        rows,
        _compare(expected, plain, rows, differing),
        _compare(expected, built, rows, differing),
        differing,
    )


def _compare(
    expected: dict[str, Tensor],
    got: dict[str, Tensor],
    rows: Rows,
    differing: set[int],
) -> Difference | None:
    """Return the first difference, and add the rows of all."""
    first = None
    count = 0
    for name, want in expected.items():
        places = (want != got[name]).nonzero()
        count += len(places)
        for index in map(tuple, places[:MOST_DIFFERENCES].tolist()):
            difference = rows.difference(name, index, want, got[name])
            first = first or difference
            if difference.row is not None:
                differing.add(difference.row)
    return first and replace(first, more=count - 1)


# --- Output ------------------------------------------------------------------------------------


def _choose_rows(explanation: Explanation) -> list[int]:
    """Return the rows that say most, in order: those that differ, flagged ones, the first."""
    flagged = {note.row for note in explanation.notes if note.bit}
    rows = range(len(explanation.slots))
    best = sorted(rows, key=lambda b: (b not in explanation.differing, b not in flagged, b))
    return sorted(best[:MOST_ROWS])


def _render(explanation: Explanation, chosen: list[int]) -> Iterator[RenderableType]:
    """Yield what is printed, one part after another."""
    from rich.text import Text

    case, total = explanation.case, len(explanation.slots)
    head = Text(case.operator, style="bold")
    head.append(f"  {case.name}  rows: {total}" if case.name else f"  rows: {total}", "not bold")
    yield head
    if case.why:
        yield Text(case.why, style="dim")
    by_row: dict[int, list[Note]] = {b: [] for b in chosen}
    for note in explanation.notes:
        if note.row in by_row:
            by_row[note.row].append(note)
    for b, notes in by_row.items():
        yield Text()
        yield _row_head(explanation, b)
        for note in notes:
            line = Text("  ")
            if note.bit:
                line.append(f"{Status.words(note.bit)}: ", style="bold red")
            line.append(note.text)
            yield line.append(f" (contract: {note.section})", style="dim")
    if len(chosen) < total:
        left = total - len(chosen)
        yield Text(f"\n… {left} of {total} rows are not shown; --row B shows a row", style="dim")
    yield Text()
    yield from _tables(explanation, chosen)
    yield from _verdict(explanation)


def _row_head(explanation: Explanation, b: int) -> Any:
    from rich.text import Text

    head = Text(f"row {b}", style="bold")
    if explanation.slots[b] not in (None, b):
        head.append(f", slot {explanation.slots[b]}")
    if bits := explanation.bits(b):
        head.append(f"  {Status.words(bits)}", style="red")
    if b in explanation.differing:
        head.append("  differs", style="bold magenta")
    return head


def _tables(explanation: Explanation, chosen: list[int]) -> Iterator[RenderableType]:
    """Yield the outputs: by row as far as they are, the others as lines."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = {
        name: {b: _cell(explanation, name, tensor, b) for b in chosen}
        for name, tensor in explanation.results.items()
    }
    by_row = {name: cell for name, cell in cells.items() if None not in cell.values()}
    for start in range(0, len(chosen), ROWS_A_TABLE) if by_row else ():
        part = chosen[start : start + ROWS_A_TABLE]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("result")
        for b in part:
            table.add_column(f"row {b}", overflow="fold")
        for name, cell in by_row.items():
            table.add_row(name, *(Text(cell[b] or "") for b in part))
        yield table
        yield Text()
    for name, tensor in explanation.results.items():
        if name in by_row:
            continue
        if tensor.dim() == 1:
            yield Text(f"{name} = {show(tensor.tolist())}")
        for i, line in enumerate(tensor.tolist()[:MOST_ROWS] if tensor.dim() == 2 else ()):
            yield Text(f"{name}[{i}] = {show(line)}")


def _cell(explanation: Explanation, name: str, tensor: Tensor, b: int) -> str | None:
    """Return what an output has for a row; None where it isn't by row."""
    case, slot = explanation.case, explanation.slots[b]
    argument = arguments_of(case.operator)[name]
    value: Any
    if argument.shape in ("B", "B,M", "B,W"):
        value = tensor[b].tolist()
    elif argument.shape == "K,B":
        value = tensor[:, b].tolist()
    elif argument.shape == "B+1":
        return f"{tensor[b]} to {tensor[b + 1]}"
    elif argument.shape == "Z":
        return Status.words(explanation.bits(b) if slot is None else int(tensor[slot]))
    elif argument.shape == "S":
        value = "-" if slot is None else tensor[slot].tolist()
    elif argument.shape == "T" and case.operator == "draft_lists":
        value = tensor.view(-1, case.args["num_steps"])[b].tolist()
    elif argument.shape in ("T", "U"):
        if case.operator == "stage" and "cu_seqlens_q" not in explanation.results:
            return None  # nothing says which are its own
        spans = explanation.rows.tokens
        own = spans[b] if b < len(spans) else range(0)
        value = tensor[max(own.start, 0) : max(own.stop, 0)].tolist()
    else:
        return None
    return show(value, MOST_IN_CELL)


def _verdict(explanation: Explanation) -> Iterator[RenderableType]:
    from rich.text import Text

    whose = "what the file expects" if explanation.case.expect else "the reference"
    compared = {"operator": explanation.operator}
    if explanation.case.expect:
        compared = {"reference": explanation.reference, **compared}
    for name, difference in compared.items():
        text = f"{name}: as {whose}" if difference is None else f"{name}: {difference}"
        yield Text(text, style="green" if difference is None else "bold red")


# --- Command -----------------------------------------------------------------------------------


def _read(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise CaseError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CaseError(f"{path}: expected text in UTF-8: {error}") from error


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 where all agree, 1 where something differs, 2 for bad input."""
    parser = Parser(
        prog="specmeta explain",
        description="Say why a call's results are what they are, rule by rule.",
        epilog="FILE is a case file (JSON), its arguments alone, or lines `name = [..]` and "
        "`name = tensor(..)` as Python prints them, with `op = advance` for the operation.",
    )
    parser.add_argument("file", metavar="FILE", help="- reads standard input")
    parser.add_argument(
        "--op", choices=reference.__all__, metavar="OP", help="where the file has no op"
    )
    parser.add_argument(
        "--row",
        type=int,
        action="append",
        metavar="B",
        help=f"show this row; may be repeated (default: {MOST_ROWS} rows, those with faults first)",
    )
    args = parser.parse_args(argv)
    try:
        from rich.console import Console
    except ImportError:
        parser.error(f"rich is missing: {how_to_install('debug')}")
    source = "standard input" if args.file == "-" else args.file
    try:
        case = read_call(_read(args.file), source=source, operator=args.op)
    except CaseError as error:
        parser.error(str(error))
    try:
        explanation = explain(case)
    except CaseError as error:
        parser.error(f"{source}: {error}")
    rows = len(explanation.slots)
    for b in args.row or ():
        if not 0 <= b < rows:
            parser.error(f"--row: expected 0 .. {rows - 1}, got {b}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width, console.soft_wrap = PIPED_WIDTH, True
    for part in _render(explanation, args.row or _choose_rows(explanation)):
        console.print(part)
    return int(explanation.reference is not None or explanation.operator is not None)
