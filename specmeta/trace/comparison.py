"""Where two runs part, request by request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specmeta.status import Status
from specmeta.trace.file import Ints, Trace, TraceError

__all__ = ["FIELDS", "Divergence", "Place", "compare"]

# What is compared, in this order.
FIELDS = ("emitted", "committed_len", "seq_len", "used_pages", "status")


@dataclass(frozen=True)
class Place:
    """Where one of the two runs has what, for a request.

    Attributes
    ----------
    step, row : int
    value : str
    """

    step: int
    row: int
    value: str


@dataclass(frozen=True)
class Divergence:
    """The first difference of a field.

    Attributes
    ----------
    field : str
        One of `FIELDS`.
    request : int
        The request's place in the order of assignment, the same in both runs.
    token : int
        How many tokens had come out of the request before; rows, where there are no tokens.
    a, b : Place
    """

    field: str
    request: int
    token: int
    a: Place
    b: Place


def compare(a: Trace, b: Trace) -> list[Divergence]:
    """Return the first difference of each field, none where the runs are the same.

    Requests are matched in the order in which they were assigned. Steps are not: two runs that
    draft, batch or chunk otherwise have the same texts, and the same lengths where as many tokens
    have come out. So tokens are compared one by one, and the other fields in the rows behind which
    both runs stand at the same number of tokens; `used_pages` where these rows also have the same
    length. What only one of the runs has (its last tokens, its last requests) is not compared.
    Where no run has tokens (``advance`` alone), a request's rows are compared one by one, and
    `seq_len` too.

    Parameters
    ----------
    a, b : Trace

    Returns
    -------
    list of Divergence
        In the order of `FIELDS`.

    Raises
    ------
    TraceError
        Only one of them has tokens: nothing says which rows belong together.
    """
    have_tokens = [len(trace.emitted.values) > 0 for trace in (a, b)]
    if have_tokens[0] != have_tokens[1]:
        without = (a, b)[have_tokens.index(False)]
        raise TraceError(f"{without.path}: emitted: expected tokens, as in the other, got none")
    found: dict[str, Divergence] = {}
    for request in range(min(a.num_requests, b.num_requests)):
        stories = (_Story(trace, request, have_tokens[0]) for trace in (a, b))
        for difference in _compare_request(request, *stories):
            known = found.get(difference.field)
            if known is None or difference.a.step < known.a.step:
                found[difference.field] = difference
    return [found[field] for field in FIELDS if field in found]


class _Story:
    """What one run says of a request."""

    def __init__(self, trace: Trace, request: int, has_tokens: bool) -> None:
        self.trace = trace
        self.has_tokens = has_tokens
        self.rows = trace.rows_of(request)
        lists = [trace.emitted.of(row) for row in self.rows]
        self.tokens: Ints = np.concatenate([*lists, np.zeros(0, dtype=np.int64)])
        # Tokens that have come out behind each row; -1 for rows that nothing came out of.
        counts = np.array([len(ids) if has_tokens else 1 for ids in lists], dtype=np.int64)
        self.counts = np.where(counts > 0, np.cumsum(counts), -1)

    def place(self, index: int, value: str) -> Place:
        row = int(self.rows[index])
        step = int(np.searchsorted(self.trace.first, row, side="right")) - 1
        return Place(step, row - int(self.trace.first[step]), value)

    def column(self, name: str) -> Ints:
        return self.trace[name][self.rows]


def _compare_request(request: int, a: _Story, b: _Story) -> Iterator[Divergence]:
    length = min(len(a.tokens), len(b.tokens))
    differ = np.flatnonzero(a.tokens[:length] != b.tokens[:length])
    if len(differ):
        token = int(differ[0])
        places = [
            story.place(int(np.argmax(story.counts > token)), str(story.tokens[token]))
            for story in (a, b)
        ]
        yield Divergence("emitted", request, token, *places)
    counts, in_a, in_b = np.intersect1d(a.counts, b.counts, return_indices=True)
    # The first row of a count is also its only one, but for -1.
    in_a, in_b, counts = in_a[counts > 0], in_b[counts > 0], counts[counts > 0]
    same_page_size = a.trace.page_size == b.trace.page_size
    same_length = a.column("seq_len")[in_a] == b.column("seq_len")[in_b]
    for field in FIELDS[1:]:
        if field == "seq_len" and a.has_tokens:
            continue  # it has the drafts in it
        differs = a.column(field)[in_a] != b.column(field)[in_b]
        if field == "used_pages":
            differs &= same_length & same_page_size
        if not differs.any():
            continue
        at = int(np.argmax(differs))
        places = [
            story.place(int(index[at]), _show(field, int(story.column(field)[index[at]])))
            for story, index in ((a, in_a), (b, in_b))
        ]
        yield Divergence(field, request, int(counts[at]), *places)


def _show(field: str, value: int) -> str:
    return Status.words(value) if field == "status" else str(value)
