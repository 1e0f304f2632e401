"""Reads the file of a trace: JSON lines, compressed where its name ends with ``.gz``.

``docs/trace.md`` describes every field.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from specmeta.trace.writer import FORMAT, VERSION

__all__ = ["PageEvents", "Ragged", "Trace", "TraceError", "read"]

Ints = NDArray[np.int64]

# Columns by row. What a step doesn't know is left out of its line, and is -1 in a `Trace`.
REQUIRED = (
    "slot",
    "request",
    "cached_len",
    "query_len",
    "prompt_len",
    "seq_len",
    "used_pages",
    "status",
)
OPTIONAL = ("staged_len", "committed_len", "drafts", "accepted")
RAGGED = ("draft_tokens", "emitted")
_MAY_BE_NONE = ("slot", "request", *OPTIONAL)
_MOST = 2**31 - 1


class TraceError(ValueError):
    """A file that isn't a trace, or is broken: the message names file, line and field."""


class Ragged(NamedTuple):
    """Lists of token ids by row: row r has ``values[first[r] : first[r + 1]]``."""

    values: Ints
    first: Ints

    def of(self, row: int) -> Ints:
        """Return a row's list."""
        return self.values[self.first[row] : self.first[row + 1]]


class PageEvents(NamedTuple):
    """Who has a page from which step on, by page and, within it, by step.

    Attributes
    ----------
    page, step : int64 [E]
    request : int64 [E]
        Who has it from here on, -1: nobody. Of several, the one that got it last.
    place : int64 [E]
        Where it stands among the request's pages.
    holders : int64 [E]
        How many have it at once.
    previous : int64 [E]
        Where another request had the page before, that one (a hand-over), else -1.
    """

    page: Ints
    step: Ints
    request: Ints
    place: Ints
    holders: Ints
    previous: Ints


class Trace:
    """A trace in memory. ``trace["seq_len"]`` is a column by row, int64 [R], -1: not known.

    The rows of step i are ``trace.first[i] : trace.first[i + 1]``.

    Attributes
    ----------
    path : str
    page_size, num_slots : int
    first : int64 [steps + 1]
    emitted, draft_tokens : Ragged
    page_events : PageEvents
    note : str
        What was left out of a file that ends in the middle of a line; else empty.
    """

    def __init__(
        self,
        path: str,
        header: Mapping[str, int],
        first: Ints,
        columns: Mapping[str, Ints],
        ragged: Mapping[str, Ragged],
        page_events: PageEvents,
        note: str,
    ) -> None:
        self.path = path
        self.page_size = header["page_size"]
        self.num_slots = header["num_slots"]
        self.first = first
        self._columns = columns
        self.emitted = ragged["emitted"]
        self.draft_tokens = ragged["draft_tokens"]
        self.page_events = page_events
        self.note = note

    def __getitem__(self, column: str) -> Ints:
        """Return a column by row."""
        return self._columns[column]

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.first) - 1

    @property
    def num_rows(self) -> int:
        """Number of rows, all steps together."""
        return int(self.first[-1])

    @property
    def num_requests(self) -> int:
        """Number of requests, which is how often a slot was assigned."""
        return int(self["request"].max(initial=-1)) + 1

    @cached_property
    def step_of_row(self) -> Ints:
        """The step of each row, int64 [R]."""
        return np.repeat(np.arange(self.num_steps), np.diff(self.first))

    def rows_of(self, request: int) -> Ints:
        """Return the rows of a request, in order."""
        return np.flatnonzero(self["request"] == request)

    def before(self, column: str) -> Ints:
        """Return what a column held in the same request's row before, 0 in its first one."""
        values = self[column]
        order = np.argsort(self["request"], kind="stable")
        same = np.diff(self["request"][order], prepend=-2) == 0
        earlier = np.zeros_like(values)
        earlier[order[1:]] = values[order[:-1]] * same[1:]
        return earlier

    @cached_property
    def rewinds(self) -> tuple[Ints, Ints]:
        """How many tokens, and how many whole pages, each row gave up, int64 [R] each.

        The row's rejected drafts; what `advance` took off the staged length; and what the host
        took back between two steps.
        """
        kept = np.where(self["committed_len"] >= 0, self["committed_len"], self["seq_len"])
        reached = np.maximum(self["seq_len"], self["staged_len"])
        committed = np.maximum(self.before("committed_len"), self["cached_len"])
        pairs = (kept, np.maximum(reached, kept)), (self["cached_len"], committed)
        # A row that was emptied has lost nothing.
        live = self["seq_len"] > 0
        tokens = sum((high - low for low, high in pairs), np.zeros_like(kept)) * live
        pages = sum(
            (self._pages(high) - self._pages(low) for low, high in pairs), np.zeros_like(kept)
        )
        return tokens, pages * live

    @cached_property
    def new_faults(self) -> Ints:
        """The bits of `status` that each row was the first of its request to have, int64 [R]."""
        return self["status"] & ~self.before("status")

    def _pages(self, length: Ints) -> Ints:
        return -(-length // self.page_size)


def read(path: str | Path) -> Trace:
    """Read a trace.

    Parameters
    ----------
    path : str or Path
        Compressed where the name ends with ``.gz``.

    Returns
    -------
    Trace
        A last line that is incomplete is left out, and `Trace.note` says so.

    Raises
    ------
    TraceError
        It isn't a trace, or is broken: with the file, the line and the field.
    """
    reader = _Reader(str(path))
    try:
        with _open(path) as lines:
            return reader.read(lines)
    except OSError as error:  # a gzip file that isn't one, too
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _open(path: str | Path) -> io.BufferedIOBase:
    if str(path).endswith(".gz"):
        return gzip.open(path, "rb")
    return open(path, "rb")


class _Reader:
    """Checks a file line by line, and puts its columns together."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._line = 0
        self._num_slots = 0
        self._note = ""
        self._counts: list[int] = []
        self._columns: dict[str, list[Ints]] = {name: [] for name in (*REQUIRED, *OPTIONAL)}
        self._values: dict[str, list[Ints]] = {name: [] for name in RAGGED}
        self._lens: dict[str, list[Ints]] = {name: [] for name in RAGGED}
        self._pages = _Pages()

    def read(self, lines: io.BufferedIOBase) -> Trace:
        records = self._parse(lines)
        header = self._header(next(records, None))
        self._num_slots = header["num_slots"]
        for step, record in enumerate(records):
            self._step(step, record)
        if not self._counts:
            self._fail("step", "expected at least one step, got none")
        ragged = {
            name: Ragged(
                np.concatenate(self._values[name]), _sums(np.concatenate(self._lens[name]))
            )
            for name in RAGGED
        }
        return Trace(
            self._path,
            header,
            _sums(self._counts),
            {name: np.concatenate(parts) for name, parts in self._columns.items()},
            ragged,
            self._pages.events(),
            self._note,
        )

    def _fail(self, field: str, message: str) -> NoReturn:
        raise TraceError(f"{self._path}, line {self._line}: {field}: {message}")

    def _parse(self, lines: io.BufferedIOBase) -> Iterator[dict[str, Any]]:
        """Yield the objects of all lines but an incomplete last one."""
        while True:
            self._line += 1
            try:
                line = lines.readline()
            except EOFError:  # the end of a compressed file is missing
                self._note = f"the file ends early: line {self._line} and what followed is missing"
                return
            except zlib.error as error:
                raise TraceError(f"{self._path}, line {self._line}: {error}") from error
            if not line:
                return
            if not line.endswith(b"\n"):
                self._note = f"line {self._line} is incomplete and was left out"
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(
                    f"{self._path}, line {self._line}: expected a JSON object: {error}"
                ) from error
            if not isinstance(record, dict):
                raise TraceError(f"{self._path}, line {self._line}: expected a JSON object")
            yield record

    def _header(self, record: dict[str, Any] | None) -> dict[str, int]:
        self._line = max(self._line, 1)
        if record is None or record.get("format") != FORMAT:
            got = "nothing" if record is None else repr(record.get("format"))
            self._fail("format", f"expected {FORMAT!r}, got {got}")
        if record.get("version") != VERSION:
            self._fail("version", f"expected {VERSION}, got {record.get('version')!r}")
        for name, low in (("page_size", 1), ("num_slots", 0)):
            self._check_integer(name, record.get(name), low)
        return {name: record[name] for name in ("page_size", "num_slots")}

    def _check_integer(self, field: str, value: Any, low: int) -> None:
        if type(value) is not int or not low <= value <= _MOST:
            self._fail(field, f"expected an integer from {low} to {_MOST}, got {value!r}")

    def _step(self, step: int, record: dict[str, Any]) -> None:
        if record.get("step") != step:
            self._fail("step", f"expected {step}, got {record.get('step')!r}")
        count: int | None = None
        for name in (*REQUIRED, *OPTIONAL):
            values = record.get(name)
            if values is None and name in OPTIONAL:
                column = np.full(count or 0, -1)
            else:
                column = self._column(name, values, count)
            count = len(column)
            self._columns[name].append(column)
        self._counts.append(count or 0)
        for name in RAGGED:
            self._ragged(name, record.get(name), count or 0)
        self._changes(step, record.get("pages", []))

    def _column(self, name: str, values: Any, count: int | None) -> Ints:
        expected = "a list of integers" if count is None else f"a list of {count} integers"
        if not isinstance(values, list) or not _are_all(int, values):
            self._fail(name, f"expected {expected}, got {_short(values)}")
        if count is not None and len(values) != count:
            self._fail(name, f"expected {expected}, got {len(values)}")
        low = -1 if name in _MAY_BE_NONE else 0
        high = self._num_slots - 1 if name == "slot" else _MOST
        if values and not low <= min(values) <= max(values) <= high:
            self._fail(name, f"expected integers from {low} to {high}, got {_short(values)}")
        return np.array(values, dtype=np.int64)

    def _ragged(self, name: str, lists: Any, count: int) -> None:
        if lists is None:
            lists = [[]] * count
        ids = None
        if isinstance(lists, list) and len(lists) == count and _are_all(list, lists):
            ids = list(chain.from_iterable(lists))
        if ids is None or not _are_all(int, ids) or not _fit(ids):
            self._fail(name, f"expected a list of {count} lists of integers, got {_short(lists)}")
        self._values[name].append(np.array(ids, dtype=np.int64))
        self._lens[name].append(np.array([len(ids) for ids in lists], dtype=np.int64))

    def _changes(self, step: int, changes: Any) -> None:
        if not isinstance(changes, list):
            self._fail("pages", f"expected a list of changes, got {changes!r}")
        for change in changes:
            if not (
                isinstance(change, list)
                and [type(part) for part in change] == [int, int, int, list]
                and all(type(page) is int and -1 <= page <= _MOST for page in change[3])
                and change[0] >= 0
                and change[1] >= -1
            ):
                self._fail("pages", f"expected [slot, request, keep, [pages]], got {change!r}")
            most = self._pages.held(change[0])
            if not 0 <= change[2] <= most:
                self._fail("pages", f"keep: expected 0 to the slot's {most}, got {change[2]}")
            if change[2] and self._pages.request(change[0]) != change[1]:
                self._fail("pages", f"keep: expected 0 for another request, got {change[2]}")
            self._pages.change(*change)
        self._pages.end_step(step)


def _are_all(kind: type, values: list[Any]) -> bool:
    """Return whether all are of a type: the same one, as a bool is no integer."""
    return set(map(type, values)) <= {kind}


def _fit(ids: list[int]) -> bool:
    return not ids or -(2**63) <= min(ids) <= max(ids) < 2**63


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _sums(counts: Any) -> Ints:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


class _Pages:
    """Follows who has which page."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, list[int]]] = {}
        # By page: who has it, (slot, place among the slot's pages) to request, in order.
        self._holders: dict[int, dict[tuple[int, int], int]] = {}
        self._state: dict[int, tuple[int, int, int]] = {}
        self._last_request: dict[int, int] = {}
        self._touched: dict[int, None] = {}
        self._events: list[tuple[int, int, int, int, int, int]] = []

    def held(self, slot: int) -> int:
        return len(self._slots[slot][1]) if slot in self._slots else 0

    def request(self, slot: int) -> int:
        return self._slots[slot][0] if slot in self._slots else -1

    def change(self, slot: int, request: int, keep: int, pages: Sequence[int]) -> None:
        _, old = self._slots.get(slot, (-1, []))
        for index, page in enumerate(old[keep:], keep):
            if page >= 0:
                del self._holders[page][slot, index]
                self._touched[page] = None
        for index, page in enumerate(pages, keep):
            if page >= 0:
                self._holders.setdefault(page, {})[slot, index] = request
                self._touched[page] = None
        self._slots[slot] = request, [*old[:keep], *pages]

    def end_step(self, step: int) -> None:
        for page in self._touched:
            holders = self._holders[page]
            (_, index), request = next(reversed(holders.items()), ((-1, 0), -1))
            state = request, index, len(holders)
            if state == self._state.get(page, (-1, 0, 0)):
                continue
            self._state[page] = state
            last = self._last_request.get(page, -1)
            previous = last if -1 not in (request, last) and request != last else -1
            if request >= 0:
                self._last_request[page] = request
            self._events.append((page, step, *state, previous))
        self._touched.clear()

    def events(self) -> PageEvents:
        table = np.array(self._events, dtype=np.int64).reshape(-1, 6)
        table = table[np.argsort(table[:, 0], kind="stable")]
        return PageEvents(*table.T.copy())
