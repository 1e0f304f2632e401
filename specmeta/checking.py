"""Check mode: every call against the reference, and what must hold from one call to the next.

``SPECMETA_CHECK=1`` in the environment, or ``with specmeta.check():`` around the loop. Each call's
tensors are copied before and after it (:mod:`specmeta.observe`), and a thread compares them with
:mod:`specmeta.reference`; the call itself is not changed. The first difference is reported once,
with the call's inputs in a case file.

What must hold between calls, whoever writes the tensors there:

- a slot stands in one live row of ``stage``, and of what writes the slots' state;
- no request writes a page that another one uses, and finds its own pages as it left them. Pages
  may be shared as long as nobody writes them, and a new request may read a prefix that another one
  is just writing;
- a slot uses no page that it was not given, or that was given back;
- lengths and positions are still those that ``stage`` and ``draft_step`` left;
- the positions of a row's tokens are consecutive;
- a request goes on where ``accept_*`` committed it, and never behind the end of its tokens.

Which pages a slot was given, which were given back, and that it has a new request, the host must
tell. :class:`specmeta.BatchMetadata` does; an engine with tables of its own calls
:func:`specmeta.observe.assigned` and its neighbours. Where nobody tells, other pages or a start at
0 mean a new request, and the last rule holds for ``stage`` only.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specmeta import observe
from specmeta._history import History, Recent
from specmeta._rows import Difference, Rows, owner
from specmeta.cases import run_reference, save_case
from specmeta.observe import Call
from specmeta.status import Status
from specmeta.testing import poisoned

__all__ = ["CheckError", "Checker", "Finding", "check"]

_log = logging.getLogger("specmeta")


@dataclass(frozen=True)
class Finding:
    """What was wrong.

    Attributes
    ----------
    step : int
        How many calls with live rows there were before, of this operation for the same tensors by
        slot and with the same numbers. A trace counts steps so, too.
    operator : str
    wrong : specmeta.explain.Difference
    path : Path or None
        The call's inputs, as a case file; None where none could be written.
    """

    step: int
    operator: str
    wrong: Difference
    path: Path | None

    def __str__(self) -> str:
        """Return all of it as one sentence."""
        more = f". `specmeta explain {self.path}` tells more" if self.path else ""
        return f"specmeta check: step {self.step}, {self.operator}: {self.wrong}{more}"


class CheckError(AssertionError):
    """Check mode found something; ``finding`` says what."""

    def __init__(self, finding: Finding, more: int) -> None:
        super().__init__(f"{finding}" + f" ({more} more calls were wrong)" * (more > 0))
        self.finding = finding


@contextmanager
def check(directory: str | Path = "cases") -> Iterator[Checker]:
    """Compare every call made inside with the reference.

    Calls are copied, and compared on another thread; at the end all of them have been. The first
    difference is logged at once, as an error of the logger ``specmeta``.

    Parameters
    ----------
    directory
        Where the case file of a difference goes.

    Yields
    ------
    Checker

    Raises
    ------
    CheckError
        At the end, if there was a difference.
    RuntimeError
        At the end, if check mode itself failed: later calls were not compared.

    Examples
    --------
    >>> with specmeta.check() as checker:
    ...     specmeta.advance(torch.tensor([2]), torch.tensor([33]), page_size=32)
    >>> checker.calls
    1
    """
    checker = Checker(directory)
    observe.add(checker)
    try:
        yield checker
    finally:
        observe.remove(checker)
    if checker.finding is not None:
        raise CheckError(checker.finding, checker.more)
    if checker.error is not None:
        raise RuntimeError(_failed(checker)) from checker.error


def check_process() -> None:
    """Check the whole process where ``SPECMETA_CHECK`` is 1, and say at its end what came out.

    Raises
    ------
    ValueError
        It is neither 0 nor 1.
    """
    wanted = os.environ.get("SPECMETA_CHECK", "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"SPECMETA_CHECK: expected 0 or 1, got {wanted!r}")
    if wanted == "0":
        return
    checker = Checker()
    observe.add(checker)

    def end() -> None:
        observe.remove(checker)
        wrong = checker.more + (checker.finding is not None)
        faults = f"; status: {Status.words(checker.faults)}" if checker.faults else ""
        print(f"specmeta check: {checker.calls} calls, {wrong} wrong{faults}", file=sys.stderr)
        if checker.error is not None:
            print(f"{_failed(checker)}: {checker.error!r}", file=sys.stderr)

    atexit.register(end)


def _failed(checker: Checker) -> str:
    return f"specmeta check: failed at call {checker.calls}, and compared none after it"


class Checker(observe.Observer):
    """Compares calls with the reference.

    Attributes
    ----------
    calls : int
        So many have been compared.
    finding : Finding or None
        The first difference.
    more : int
        Calls that were wrong after it.
    faults : Status
        All that operations have reported in ``status``. The first row with each of them is logged,
        as a warning: the operation was right, what it was given was not.
    """

    def __init__(self, directory: str | Path = "cases") -> None:
        self.calls = self.more = 0
        self.finding: Finding | None = None
        self.faults = Status(0)
        self._directory = Path(directory)
        self._steps: Recent[int] = Recent(int)
        self._history = History()

    def called(self, call: Call) -> None:
        """Compare a call with the reference, and with the calls before."""
        self.calls += 1
        rows = Rows(call)
        step = self._step(call, rows)
        self._warn(call, rows, step)
        wrong = _difference(call, rows)
        if wrong is not None:
            self._report(call, step, wrong)
        # Asked in any case: the history goes on from what this call left.
        unfit = self._history.wrong(call, rows, step)
        if wrong is None and unfit is not None:
            self._report(call, step, unfit)

    def _step(self, call: Call, rows: Rows) -> int:
        """Count the calls that do the same for the same requests."""
        by_slot = (
            call.addresses[name]
            for name in call.before
            if rows.arguments[name].shape in ("S", "S,P", "S,L", "A")
        )
        numbers = (item for item in call.values.items() if item[0] != "num_rows")
        place = (call.operator, *by_slot, *numbers)
        self._steps[place] += bool(rows.live)
        return max(self._steps[place] - 1, 0)

    def _warn(self, call: Call, rows: Rows, step: int) -> None:
        """Say it where a fault is reported for the first time."""
        if "status" not in call.after:
            return
        new = call.after["status"] & ~call.before["status"] & ~int(self.faults)
        for i in new.nonzero().flatten().tolist():
            bits = Status(int(new[i])) & ~self.faults
            if bits:
                self.faults |= bits
                row, slot = rows.locate("status", (i,))
                _log.warning(
                    "specmeta check: step %s, %s: status[%s]%s: %s",
                    *(step, call.operator, i, owner(row, slot), Status.words(bits)),
                )

    def _report(self, call: Call, step: int, wrong: Difference) -> None:
        if self.finding is not None:
            self.more += 1
            return
        # Known before anything is written: that may fail.
        self.finding = Finding(step, call.operator, wrong, None)
        try:
            path = save_case(
                self._directory,
                call.operator,
                {name: _spaced(call, name) for name in call.before} | call.values,
                name=f"check_{call.operator}_step_{step}",
                why=f"step {step}: {wrong}",
            )
            self.finding = replace(self.finding, path=path)
        except Exception as error:
            _log.error("specmeta check: no case file in %s: %s", self._directory, error)
        _log.error("%s", self.finding)

    def assigned(self, table: int, slot: int) -> None:
        """Forget the request before."""
        self._history.of(table).assigned(slot)

    def pages_added(self, table: int, slot: int, pages: list[int]) -> None:
        """Note that these may be used."""
        self._history.of(table).added(slot, pages)

    def pages_given_back(self, table: int, pages: list[int]) -> None:
        """Note that nobody may use these."""
        self._history.of(table).given_back |= set(pages)


def _spaced(call: Call, name: str) -> Tensor:
    """Return a tensor of a call with the gaps that it had."""
    tensor = call.before[name]
    if name not in call.gaps:
        return tensor
    return poisoned(*tensor.shape, dtype=tensor.dtype, gap=call.gaps[name]).copy_(tensor)


def _difference(call: Call, rows: Rows) -> Difference | None:
    """Compare what a call left with what the reference makes of the same."""
    want = {name: tensor.clone() for name, tensor in call.before.items()}
    run_reference(call.operator, {**want, **call.values})
    for name, got in call.after.items():
        if not torch.equal(got, want[name]):
            index = tuple((got != want[name]).nonzero()[0].tolist())
            return rows.difference(name, index, want[name], got)
    return None
