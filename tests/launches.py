"""The operators that a piece of work runs, by torch's profiler: on a GPU each is a launch."""

from __future__ import annotations

from collections.abc import Callable

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
    "permute",
    "select",
    "slice",
    "squeeze",
    "transpose",
    "unsqueeze",
    "view",
)


def operators(work: Callable[[], object]) -> list[str]:
    """Return the operators that `work` calls, in order; what they call themselves isn't counted."""
    work()  # what the first call alone does isn't counted
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return [
        event.name
        for event in sorted(profiler.events() or [], key=lambda event: event.time_range.start)
        if event.cpu_parent is None
        and "::" in event.name
        and event.name.removeprefix("aten::") not in _NO_LAUNCH
    ]
