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


def parse(text: str) -> list[Argument]:
    """Return the arguments of all operators in order."""
    rows = (line.split("\t") for line in text.splitlines())
    return [
        Argument(op, name, kind, req == "1", wr == "1", dtype, shape, default, int(low), int(high))
        for op, name, kind, req, wr, dtype, shape, default, low, high in rows
    ]
