"""The picture of a trace, for a report: steps by slot, pages over time, acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import hsv_to_rgb, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from specmeta.trace.file import Ints, Trace
from specmeta.trace.totals import by_step

__all__ = ["save_picture"]

PROMPT, TOKEN, FAULT, REWIND = "#7d8ba0", "#3c4a5e", "#c8102e", "#8a36c9"
ACCEPTED, REJECTED = "#10907f", "#d9731f"
# More steps than this are drawn as if each n-th were all.
_MOST_COLUMNS = 2000


def save_picture(trace: Trace, path: str | Path) -> None:
    """Save the picture as PNG.

    Parameters
    ----------
    trace : Trace
    path : str or Path

    Raises
    ------
    OSError
        The file can't be written.
    """
    stride = -(-trace.num_steps // _MOST_COLUMNS)
    steps = np.arange(0, trace.num_steps, stride)
    figure = Figure(figsize=(12, 9), dpi=150, layout="constrained")
    figure.suptitle(f"{Path(trace.path).name}: {trace.num_steps} steps, {trace.num_rows} rows")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    last = trace.num_steps - 0.5
    for ax, name, image in (
        (axes[0], "slot", _draw_rows(trace, steps)),
        (axes[1], "page", _draw_pages(trace, steps)),
    ):
        extent = (-0.5, last, len(image) - 0.5, -0.5)
        ax.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
        ax.set_ylabel(name)
        ax.yaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(
        handles=[
            Patch(color=PROMPT, label="prompt"),
            Patch(color=TOKEN, label="no drafts"),
            Patch(color=ACCEPTED, label="all drafts accepted"),
            Patch(color=REJECTED, label="none accepted"),
            Patch(color=FAULT, label="fault"),
        ],
        **_BESIDE,
    )
    grey = [Patch(color="0.45", label="used"), Patch(color="0.8", label="allocated")]
    axes[1].legend(handles=grey, title="a request has a colour", **_BESIDE)
    _plot_acceptance(axes[2], trace, stride)
    axes[2].set_xlabel("step")
    axes[2].set_xlim(-0.5, last)
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, format="png")


_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}


def _draw_rows(trace: Trace, steps: Ints) -> NDArray[np.float64]:
    image = np.ones((max(trace.num_slots, 1), len(steps), 3))
    accepted, rejected = np.array(to_rgb(ACCEPTED)), np.array(to_rgb(REJECTED))
    for column, step in enumerate(steps):
        rows = np.arange(trace.first[step], trace.first[step + 1])
        rows = rows[trace["slot"][rows] >= 0]
        drafts = trace["drafts"][rows]
        share = np.clip(trace["accepted"][rows] / np.maximum(drafts, 1), 0, 1)[:, None]
        colours = rejected + (accepted - rejected) * share
        colours[drafts <= 0] = to_rgb(TOKEN)
        colours[trace["prompt_len"][rows] > 0] = to_rgb(PROMPT)
        colours[trace["query_len"][rows] == 0] = 1
        colours[trace.new_faults[rows] > 0] = to_rgb(FAULT)
        image[trace["slot"][rows], column] = colours
    return image


def _draw_pages(trace: Trace, steps: Ints) -> NDArray[np.float64]:
    events = trace.page_events
    num_pages = int(events.page.max(initial=0)) + 1
    request, place = np.full(num_pages, -1), np.zeros(num_pages, dtype=np.int64)
    # By request, the pages that its last row read; what it reads in a step counts as used.
    used = np.zeros(trace.num_requests + 1, dtype=np.int64)
    hues = (np.arange(trace.num_requests + 1) * 137.508 + 210) % 360 / 360
    image = np.ones((num_pages, len(steps), 3))
    by_time = np.argsort(events.step, kind="stable")
    time, event, last = events.step[by_time], 0, 0
    for column, step in enumerate(steps):
        end = int(np.searchsorted(time, step, side="right"))
        # Of several events of a page, the last one stands.
        now = by_time[event:end]
        request[events.page[now]], place[events.page[now]] = events.request[now], events.place[now]
        rows = slice(trace.first[last], trace.first[step + 1])
        used[trace["request"][rows]] = trace["used_pages"][rows]
        event, last = end, step + 1
        held = np.flatnonzero(request >= 0)
        is_used = place[held] < used[request[held]]
        image[held, column] = hsv_to_rgb(
            np.stack(
                [hues[request[held]], np.where(is_used, 0.75, 0.2), np.where(is_used, 0.8, 0.97)], 1
            )
        )
    return image


def _plot_acceptance(ax: Any, trace: Trace, stride: int) -> None:
    totals = by_step(trace)
    width = max(stride, trace.num_steps // 100, 1)
    begins = np.arange(0, trace.num_steps, width)

    def add(values: Ints) -> Ints:
        return np.add.reduceat(values, begins)

    accepted, drafts = add(totals.accepted), add(totals.drafts)
    middle = np.minimum(begins + (width - 1) / 2, trace.num_steps - 1)
    shown = drafts > 0
    label = "drafts accepted" if width == 1 else f"drafts accepted, of {width} steps"
    ax.plot(middle[shown], accepted[shown] / drafts[shown], color=ACCEPTED, marker=".", label=label)
    most = max(int(totals.used_pages.max(initial=0)), 1)
    ax.plot(middle, np.maximum.reduceat(totals.used_pages, begins) / most, color=TOKEN, lw=1)
    ax.lines[-1].set_label(f"pages used, of {most}")
    for y, colour, name, counts in (
        (-0.06, FAULT, "fault", totals.faults),
        (-0.12, REWIND, "rewind over a page", totals.rewinds),
        (-0.18, "#0b57d0", "page handed over", totals.handovers),
    ):
        at = np.flatnonzero(counts)
        ax.plot(at, np.full(len(at), y), "|", color=colour, markersize=5, label=name)
    ax.set_ylim(-0.24, 1.05)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.set_ylabel("share")
    ax.grid(alpha=0.3)
    ax.legend(**_BESIDE)
