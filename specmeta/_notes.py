"""Why a row's result is what it is: what the reference says where it decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Note", "Notes", "collect", "collected", "show"]

MOST_SHOWN = 12  # elements of a list


class Note(NamedTuple):
    """One decision about one row.

    Attributes
    ----------
    row : int
    section : str
        Where the contract says so: a rule, an operation, or one of its words.
    text : str
    bit : int
        The bit of ``status`` that was set, 0 for none.
    """

    row: int
    section: str
    text: str
    bit: int = 0

    def __str__(self) -> str:
        return f"{self.text} (contract: {self.section})"


@dataclass
class Notes:
    """What an operation says.

    Attributes
    ----------
    notes : list of Note
        In order.
    slots : list of int or None
        By row its slot; None where it has none.
    """

    notes: list[Note] = field(default_factory=list)
    slots: list[int | None] = field(default_factory=list)


_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)


@contextmanager
def collect() -> Iterator[Notes]:
    """Collect the notes of the operation of the reference that this thread runs meanwhile."""
    notes = Notes()
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def collected() -> Notes | None:
    """Return where notes go; None where nobody listens."""
    return _notes.get()


def show(value: object, most: int = MOST_SHOWN) -> str:
    """Return a value of a note as text; a long list is cut, and its length said."""
    if value is None:
        return "not given"
    if not isinstance(value, list):
        return str(value)
    if not value:
        return "none"
    if len(value) <= most:
        return " ".join(map(str, value))
    return f"{' '.join(map(str, value[:most]))} … ({len(value)})"
