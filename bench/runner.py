"""Checks implementations against each other, then measures them."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import timing
from bench.common import SMALL, Arguments, Case, Make, Operation, Step, Work
from bench.timing import Timing, phase
from specmeta import reference
from specmeta.graph import capture

OURS = "ours"
_COPIES = 10  # of a call in one graph


@dataclass(frozen=True)
class Result:
    """One line of a table.

    Attributes
    ----------
    operation, sweep : str
        Names.
    work : Work
        The size.
    implementation : str
        Whose call it is.
    mode : str
        ``"eager"`` or ``"graph"``.
    warm : Timing or None
        With what the call reads in the caches.
    cold : Timing or None
        With nothing of it in L2; on a GPU only.
    skipped : str
        Why nothing was measured.
    """

    operation: str
    sweep: str
    work: Work
    implementation: str
    mode: str
    warm: Timing | None = None
    cold: Timing | None = None
    skipped: str = ""


class Runner:
    """Runs benches within limits of time.

    Parameters
    ----------
    device : torch.device
        Where to run.
    seconds : float
        How long a measurement goes on.
    budget : float
        Seconds after which no further size is begun.
    with_compile : bool
        Whether the vectorised form is also run under ``torch.compile``.
    """

    def __init__(
        self, device: torch.device, *, seconds: float, budget: float, with_compile: bool
    ) -> None:
        self.device = device
        self._seconds = seconds
        self._budget = budget
        self._end = time.monotonic() + budget
        self._with_compile = with_compile
        self._is_cuda = device.type == "cuda"
        self._flush: Tensor | None = timing.flush_buffer(device) if self._is_cuda else None

    def floor(self) -> Timing:
        """Measure nothing: what is part of every figure."""
        if self._is_cuda:
            return timing.on_cuda(_nothing, _nothing, seconds=self._seconds, flush=None)
        return timing.on_cpu([(_nothing, _nothing)], seconds=self._seconds)[0]

    def check(self, operation: Operation) -> None:
        """Compare ours with the reference on a small size; raise AssertionError if it differs."""
        case = operation.make_case(SMALL, self.device)
        want = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in case.fresh().items()
        }
        getattr(reference, operation.function)(**want)
        got = case.fresh()
        operation.ours(got)()
        case.check({n: t.cpu() if isinstance(t, Tensor) else t for n, t in got.items()}, want)

    def implementations(self, operation: Operation) -> dict[str, Make]:
        """Return what can be run here, by name."""
        makes = {
            OURS: operation.ours,
            "host loop": operation.host_loop,
            "torch": operation.vectorised,
        }
        if self._with_compile:
            makes["torch.compile"] = lambda a: torch.compile(operation.vectorised(a), dynamic=True)
        if self._is_cuda and importlib.util.find_spec("triton") is not None:
            makes["triton"] = operation.per_row_triton
        return makes | operation.others

    def run(self, operation: Operation, sweep: str, work: Work) -> Iterator[Result]:
        """Measure every implementation on one size, after comparing what it leaves with ours."""
        if time.monotonic() > self._end:
            reason = f"the time budget of {self._budget:.0f} s is used up"
            yield Result(operation.name, sweep, work, "all", "all", skipped=reason)
            return
        case = operation.make_case(work, self.device)
        want = case.fresh()
        operation.ours(want)()
        on_cpu: list[tuple[str, str, Step, Step]] = []  # name, mode, step, reset: measured by turns
        for name, make in self.implementations(operation).items():
            label = f"{operation.name} {sweep} {work.name} {name}"
            arguments = case.fresh()
            reset = functools.partial(case.reset, arguments)
            step = make(arguments)
            with phase(f"check {label}"):
                step()
                _assert_same(label, case, arguments, want)
            if self._is_cuda:
                with phase(f"time {label} eager"):
                    warm, cold = self._warm(step, case, [arguments]), self._cold(step, reset)
                yield Result(operation.name, sweep, work, name, "eager", warm, cold)
            else:
                on_cpu.append((name, "eager", step, reset))
            if name == "host loop" or (name == "torch.compile" and not self._is_cuda):
                continue  # the first can't be captured, the second is traced code already
            with phase(f"check {label} graph"):
                replay = self._capture([step], case, arguments)
                replay()
                _assert_same(f"{label} graph", case, arguments, want)
            if not self._is_cuda:
                on_cpu.append((name, "graph", replay, reset))
                continue
            with phase(f"time {label} graph"):
                cold = self._cold(replay, reset)
                # Each has its own state, so that all do the same work.
                copies = [arguments, *(case.twin(arguments) for _ in range(_COPIES - 1))]
                replay = self._capture([make(copy) for copy in copies], case, arguments)
                warm = self._warm(replay, case, copies)
            yield Result(operation.name, sweep, work, name, "graph", warm, cold)
        timings = timing.on_cpu(
            [(step, reset) for *_, step, reset in on_cpu], seconds=self._seconds
        )
        for (name, mode, *_), warm in zip(on_cpu, timings, strict=True):
            yield Result(operation.name, sweep, work, name, mode, warm)

    def _capture(self, steps: list[Step], case: Case, arguments: Arguments) -> Step:
        def run_all() -> None:
            for step in steps:
                step()

        replay = capture(run_all, num_rows=arguments["num_rows"]).replay
        case.reset(arguments)  # the warm-up emptied its rows
        return replay

    def _warm(self, step: Step, case: Case, copies: list[Arguments]) -> Timing:
        def reset() -> None:
            for arguments in copies:
                case.reset(arguments)

        return timing.on_cuda(step, reset, seconds=self._seconds, flush=None, calls=len(copies))

    def _cold(self, step: Step, reset: Step) -> Timing:
        return timing.on_cuda(step, reset, seconds=self._seconds, flush=self._flush)


def _nothing() -> None:
    pass


def _assert_same(label: str, case: Case, got: Arguments, want: Arguments) -> None:
    try:
        case.check(got, want)
    except AssertionError as error:
        raise AssertionError(f"{label}: not what ours leaves: {error}") from error
