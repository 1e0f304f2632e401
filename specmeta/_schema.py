"""The table of all operators' arguments, as a library hands it out."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Argument", "parse"]


class Argument(NamedTuple):
    """One argument of an operator, as the library's own table has it."""

    operator: str
    name: str
    kind: str
    required: bool
    written: bool
    dtype: str
    shape: str
    default: str
    low: int
    high: int


def parse(text: str) -> dict[str, list[Argument]]:
    """Return the arguments by operator, in order."""
    operators: dict[str, list[Argument]] = {}
    for line in text.splitlines():
        op, name, kind, req, wr, dtype, shape, default, low, high = line.split("\t")
        flags, limits = (req == "1", wr == "1"), (int(low), int(high))
        argument = Argument(op, name, kind, *flags, dtype, shape, default, *limits)
        operators.setdefault(op, []).append(argument)
    return operators
