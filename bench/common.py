"""What the benches share: the sizes they run at, and the arguments of one call.

The alternatives do none of the operations' checks: no wrong value is looked for, `status` is left
alone, every row has a slot of its own. They must leave the same elements in all other tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import specmeta
from specmeta.testing import POISON, assert_equal

Arguments = dict[str, Any]
Step = Callable[[], None]
Make = Callable[[Arguments], Step]
"""Prepares an implementation for a call's arguments. What it returns runs the call."""


@dataclass(frozen=True)
class Work:
    """One size.

    Attributes
    ----------
    name : str
        What tables and plots call it.
    rows : int
        B.
    tokens : int
        Query tokens a row; all but the first are drafts.
    shortest, longest : int
        Tokens that a row has before them, drawn uniformly.
    page_size : int
        Tokens a page.
    first : int, optional
        What the first row has instead: a skewed batch.
    """

    name: str
    rows: int
    tokens: int
    shortest: int
    longest: int
    page_size: int
    first: int | None = None

    @property
    def max_context(self) -> int:
        """The longest context that a row may have."""
        return max(self.longest, self.first or 0)


HEADLINE = Work("256 rows", 256, 6, 990, 1_010, 32)
ONE_ROW = Work("1 row", 1, 6, 1_000, 1_000, 32)
SMALL = Work("small", 5, 4, 3, 60, 4, first=90)
"""Small enough for the reference."""

SWEEPS = {
    "headline": [HEADLINE, ONE_ROW],
    "works": [
        Work("W1", 256, 5, 500, 1_000, 32),
        Work("W2", 256, 5, 4_000, 8_000, 64),
        Work("W3", 8, 5, 100_000, 128_000, 64),
        Work("W4", 256, 5, 1_000, 1_000, 64, first=128_000),
    ],
    "rows": [Work(f"{rows:,}", rows, 5, 1_000, 1_000, 16) for rows in (1, 16, 256, 2_048, 8_192)],
    "contexts": [
        Work(f"{context:,}", 8, 5, context, context, 16)
        for context in (1_000, 16_000, 128_000, 1_000_000)
    ],
    "page sizes": [Work(f"{size}", 64, 5, 4_000, 8_000, size) for size in (1, 16, 64)],
    # As many tokens in all, but for rounding.
    "skew": [
        Work("even", 256, 5, 1_496, 1_496, 16),
        Work("skewed", 256, 5, 1_000, 1_000, 16, first=128_000),
    ],
}

BY_ROW_SWEEPS = {
    "headline": SWEEPS["headline"],
    "rows": [work for work in SWEEPS["rows"] if work.rows in (256, 8_192)],
}
"""For what costs the same whatever contexts and pages are."""

WHAT_VARIES = {
    "headline": "batch",
    "works": "batch",
    "rows": "rows, 1,000 tokens each",
    "contexts": "tokens a row, 8 rows",
    "page sizes": "tokens a page, 64 rows of 4,000 to 8,000 tokens",
    "skew": "256 rows, 383,000 tokens",
    "pages": "page ids, 256 rows",
}


@dataclass
class Case:
    """The arguments of one call.

    Attributes
    ----------
    inputs : dict
        Never written.
    state : dict of str to Tensor
        Updated in place.
    outputs : dict of str to Tensor
        Written whatever they held.
    ledger : dict of str to Tensor
        Updated in place, but a call that is repeated leaves the same: it need not be put back,
        which for the token ids of a whole batch would push all else out of the caches.
    """

    inputs: Arguments
    state: dict[str, Tensor]
    outputs: dict[str, Tensor]
    ledger: dict[str, Tensor] = field(default_factory=dict)

    def fresh(self) -> Arguments:
        """Return arguments whose written tensors are copies; outputs are poisoned."""
        ledger = {name: tensor.clone() for name, tensor in self.ledger.items()}
        outputs = {name: torch.full_like(t, POISON) for name, t in self.outputs.items()}
        return self.twin({**self.inputs, **ledger, **outputs})

    def twin(self, arguments: Arguments) -> Arguments:
        """Return the same arguments with a state of their own."""
        return arguments | {name: tensor.clone() for name, tensor in self.state.items()}

    def reset(self, arguments: Arguments) -> None:
        """Put back what a call updated, so that the next one does the same work."""
        for name, tensor in self.state.items():
            arguments[name].copy_(tensor)

    def check(self, got: Arguments, want: Arguments) -> None:
        """Raise AssertionError where a call left something else than another one."""
        for name in (*self.state, *self.outputs, *self.ledger):
            if not torch.equal(got[name], want[name]):
                assert_equal(name, got[name], want[name])


@dataclass(frozen=True)
class Operation:
    """An operation, and what to compare it with.

    Attributes
    ----------
    name : str
        Of the bench.
    function : str
        The operation's name in `specmeta` and `specmeta.reference`.
    sweeps : dict of str to list of Work
        By name.
    make_case : callable
        Makes the arguments of a call: ``make_case(work, device)``.
    host_loop, vectorised, per_row_triton : Make
        The alternatives.
    others : dict of str to Make
        More of them, by name.
    """

    name: str
    function: str
    sweeps: dict[str, list[Work]]
    make_case: Callable[[Work, torch.device], Case]
    host_loop: Make
    vectorised: Make
    per_row_triton: Make
    others: dict[str, Make] = field(default_factory=dict)

    def ours(self, arguments: Arguments) -> Step:
        """Prepare a call of the operation itself."""
        arguments = dict(arguments)
        device = arguments["num_rows"].device
        if device.type == "cuda" and takes_workspace(self.function):
            rows, steps = len(arguments["status"]), arguments.get("num_steps", 1)
            arguments["workspace"] = specmeta.workspace(rows, num_steps=steps, device=device)
        return functools.partial(getattr(specmeta, self.function), **arguments)


def takes_workspace(function: str) -> bool:
    """Return whether an operation of `specmeta` shares its work among blocks."""
    return "workspace" in inspect.signature(getattr(specmeta, function)).parameters


class Draw:
    """Random arguments, the same each time.

    Parameters
    ----------
    work : Work
        Sizes.
    device : torch.device
        Where the tensors go.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work = work
        self.device = device
        self._generator = torch.Generator().manual_seed(work.rows)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return int32 values in [low, high], on the CPU."""
        drawn = torch.randint(low, high + 1, shape, generator=self._generator)
        return drawn.to(torch.int32)

    def permutation(self, count: int) -> Tensor:
        """Return 0 .. count - 1 in random order, int64, on the CPU."""
        return torch.randperm(count, generator=self._generator)

    def contexts(self) -> Tensor:
        """Return each row's tokens before the query tokens, int32 [B], on the CPU."""
        work = self.work
        contexts = self.integers(work.shortest, work.longest, work.rows)
        if work.first is not None:
            contexts[0] = work.first
        return contexts

    def rows(self) -> Arguments:
        """Return ``num_rows`` and ``cu_seqlens_q``."""
        ends = torch.arange(self.work.rows + 1, dtype=torch.int32) * self.work.tokens
        return self.put({"num_rows": torch.tensor([self.work.rows]).int(), "cu_seqlens_q": ends})

    def pages(self, lens: Tensor) -> tuple[Arguments, dict[str, Tensor]]:
        """Make pages for slots.

        Parameters
        ----------
        lens : Tensor
            int32 [B]: no row gets longer than twice its query tokens more than this.

        Returns
        -------
        dict, dict
            What the page lists are made of, and room for them, a few entries more than they need.
        """
        work = self.work
        rows, size = work.rows, work.page_size
        most = lens.long() + 2 * work.tokens
        width = -(-int(most.max()) // size)
        inputs = {
            "page_table": self.integers(1, 2**20, rows, width),
            "num_pages": torch.full((rows,), width, dtype=torch.int32),
        }
        entries = int((-(-most // size)).sum())
        outputs = {
            "last_page_len": torch.empty(rows, dtype=torch.int32),
            "kv_indptr": torch.empty(rows + 1, dtype=torch.int32),
            "kv_indices": torch.empty(entries, dtype=torch.int32),
        }
        return {**self.put(inputs), "page_size": size}, self.put(outputs)

    def put(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the device."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}
