"""How long a call takes: many repetitions, each of the same work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.common import Step

WARM_UPS = 3
LEAST, MOST = 10, 2_000  # repetitions
ROUNDS = 10
_FLUSH_BYTES = 2**28  # more than any L2
_HEAD_START_CYCLES = 200_000  # about 0.1 ms


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, over a number of repetitions."""

    median_us: float
    p95_us: float
    repetitions: int


def phase(name: str) -> AbstractContextManager[None]:
    """Mark what runs inside for a profiler (NVTX)."""
    return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()


def summarise(microseconds: Sequence[float]) -> Timing:
    """Return the median and the 95th percentile."""
    ordered = sorted(microseconds)
    last = len(ordered) - 1
    return Timing(ordered[last // 2], ordered[round(last * 0.95)], len(ordered))


def on_cpu(calls: Sequence[tuple[Step, Step]], *, seconds: float) -> list[Timing]:
    """Measure calls on the CPU, by turns, so that a core that slows down slows all of them.

    The thread's own time is measured, which is the wall's on a quiet core. Where other programs
    run, they would make long calls look longer, and short ones not.

    Parameters
    ----------
    calls : sequence of (step, reset)
        `reset` comes before each repetition, outside the measurement.
    seconds : float
        About how long to go on with each.
    """
    for step, reset in calls:
        for _ in range(WARM_UPS):
            reset()
            step()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for (step, reset), taken in zip(calls, times, strict=True):
            count, end = 0, time.perf_counter() + seconds / ROUNDS
            while count < LEAST // ROUNDS or (count < MOST // ROUNDS and time.perf_counter() < end):
                reset()
                start = time.thread_time_ns()
                step()
                taken.append((time.thread_time_ns() - start) / 1e3)
                count += 1
    return [summarise(taken) for taken in times]


def on_cuda(
    step: Step, reset: Step, *, seconds: float, flush: Tensor | None, calls: int = 1
) -> Timing:
    """Measure `step` on the GPU, between two events.

    Parameters
    ----------
    step, reset : callable
        As for `on_cpu`.
    seconds : float
        About how long to go on.
    flush : Tensor, optional
        Written before each repetition, so that nothing else is left in L2.
    calls : int
        Calls in a `step`.
    """

    def run_once(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        reset()
        if flush is not None:
            flush.zero_()
        else:
            # The device is kept busy until the host has queued the call.
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        step()
        end.record()

    def events(count: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        return [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]

    began = time.perf_counter()
    for pair in events(WARM_UPS):
        run_once(*pair)
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / WARM_UPS
    pairs = events(min(max(int(seconds / each), LEAST), MOST))
    for pair in pairs:
        run_once(*pair)
    torch.cuda.synchronize()
    return summarise([start.elapsed_time(end) * 1e3 / calls for start, end in pairs])


def flush_buffer(device: torch.device) -> Tensor:
    """Return a tensor that is larger than L2."""
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
