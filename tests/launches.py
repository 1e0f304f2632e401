"""The operators that a piece of work runs, by torch's profiler: on a GPU each is a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

# These only make a tensor, or another view of one: nothing is launched.
_NO_LAUNCH = (
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "new_empty",
    "permute",
    "select",
    "slice",
    "squeeze",
    "transpose",
    "unsqueeze",
    "view",
)
# The host waits for these: for a value, or for the length of what they make.
_WAITS = ("_local_scalar_dense", "nonzero", "repeat_interleave")


def operators(work: Callable[[], object]) -> list[str]:
    """Return the operators that `work` calls, in order; what they call themselves isn't counted."""
    return operators_and_waits(work)[0]


def operations(work: Callable[[], object]) -> list[str]:
    """Return the operations of specmeta that `work` calls, in order."""
    prefix = "specmeta::"
    return [name.removeprefix(prefix) for name in operators(work) if name.startswith(prefix)]


def operators_and_waits(work: Callable[[], object]) -> tuple[list[str], int]:
    """Return the operators that `work` calls, and for how many of torch's the host waits.

    A copy to the host isn't known as one on the CPU, and isn't among these.
    """
    work()  # what the first call alone does isn't counted
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    called = [
        event
        for event in sorted(profiler.events() or [], key=lambda event: event.time_range.start)
        if event.cpu_parent is None
        and "::" in event.name
        and event.name.removeprefix("aten::") not in _NO_LAUNCH
    ]
    return [event.name for event in called], sum(map(_waits, called))


def _waits(event: Any) -> bool:
    namespace, name = event.name.split("::", 1) if "::" in event.name else ("", event.name)
    # An operator that isn't torch's stands for one kernel, whatever it does on the CPU.
    return namespace == "aten" and (name in _WAITS or any(map(_waits, event.cpu_children)))
