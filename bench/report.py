"""Tables, plots and the JSON file. A figure that was measured on a CPU says so everywhere."""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import specmeta
from bench.common import HEADLINE, ONE_ROW, WHAT_VARIES
from bench.runner import OURS, Result
from bench.timing import Timing

_ROOT = Path(__file__).parent.parent
_WIDTH = 160  # of a table in a file
_PANELS = 5  # of a plot, side by side


def describe(device: torch.device) -> dict[str, Any]:
    """Return where a run takes place: device, versions, commit, date, threads."""
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "specmeta": specmeta.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    if told := os.environ.get("SPECMETA_COMMIT"):
        return told
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def label(where: dict[str, Any]) -> str:
    """Say whose figures they are."""
    if where["device"] == "cuda":
        return f"GPU figures: {where['device_name']}"
    return f"CPU figures, not a GPU's: {where['device_name']}, threads: {where['threads']}"


def ratio(result: Result, results: Sequence[Result]) -> float | None:
    """Return how many times the time of ours a call takes, in the same run, size and mode."""
    for other in results:
        if (
            other.implementation == OURS
            and (other.operation, other.sweep) == (result.operation, result.sweep)
            and (other.work, other.mode) == (result.work, result.mode)
            and other.warm is not None
            and result.warm is not None
        ):
            return result.warm.median_us / other.warm.median_us
    return None


def headline(results: Sequence[Result]) -> dict[str, float]:
    """Return what is said of `advance` first, as far as it was measured.

    Returns
    -------
    dict
        ``ours_us``, ``host_loop_ratio`` and ``torch_ratio`` of 256 rows, ``one_row_call_us``.
    """
    found: dict[str, float] = {}
    for result in results:
        if (result.operation, result.sweep, result.mode) != ("advance", "headline", "eager"):
            continue
        if result.warm is None:
            continue
        ours, times = result.implementation == OURS, ratio(result, results)
        if result.work == ONE_ROW and ours:
            found["one_row_call_us"] = result.warm.median_us
        elif result.work == HEADLINE and ours:
            found["ours_us"] = result.warm.median_us
        elif result.work == HEADLINE and times is not None:
            name = re.sub(r"\W", "_", result.implementation)
            found[f"{name}_ratio"] = times
    return found


def to_json(where: dict[str, Any], floor: Timing, results: Sequence[Result]) -> dict[str, Any]:
    """Return what the JSON file holds; ``docs/bench.md`` explains it."""
    lines = [
        {**asdict(result), "ratio": ratio(result, results)}
        for result in results
        if not result.skipped
    ]
    skipped = [
        {
            "operation": r.operation,
            "sweep": r.sweep,
            "work": r.work.name,
            "implementation": r.implementation,
            "reason": r.skipped,
        }
        for r in results
        if r.skipped
    ]
    for line in lines:
        del line["skipped"]
    return {
        "label": label(where),
        **where,
        "floor": asdict(floor),
        "headline": headline(results),
        "results": lines,
        "skipped": skipped,
    }


def print_results(where: dict[str, Any], floor: Timing, results: Sequence[Result]) -> None:
    """Print a table for each operation and sweep, then the headline and what was skipped."""
    is_cuda = where["device"] == "cuda"
    for operation, sweep in dict.fromkeys((r.operation, r.sweep) for r in results):
        lines = [
            _cells(r, results, is_cuda)
            for r in results
            if (r.operation, r.sweep) == (operation, sweep) and not r.skipped
        ]
        headings = [WHAT_VARIES[sweep], "implementation", "mode", "median", "p95"]
        headings += ["cold median", "cold p95"] if is_cuda else []
        if lines:
            title = f"{operation}, sweep: {sweep}. Microseconds. {label(where)}"
            print_table(title, [*headings, "times ours"], lines)
    print(f"part of every figure: {floor.median_us:.2f} us (nothing, measured the same way)")
    for name, value in headline(results).items():
        print(f"headline {name}: {value:.1f}")
    for result in results:
        if result.skipped:
            what = f"{result.operation}, {result.sweep}, {result.work.name}"
            print(f"skipped: {what}, {result.implementation}: {result.skipped}")


def _cells(result: Result, results: Sequence[Result], is_cuda: bool) -> list[str]:
    times = ratio(result, results)
    cells = [result.work.name, result.implementation, result.mode]
    for timing in (result.warm, result.cold) if is_cuda else (result.warm,):
        assert timing is not None
        cells += [f"{timing.median_us:,.1f}", f"{timing.p95_us:,.1f}"]
    return [*cells, "" if times is None else f"{times:.1f}"]


def print_table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table; a rule where the first column changes."""
    if importlib.util.find_spec("rich") is None:
        print(title)
        for line in [headings, *lines]:
            print("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        are_numbers = all(re.fullmatch(r"[\d.,]*", line[i]) for line in lines)
        table.add_column(heading, justify="right" if are_numbers else "left", no_wrap=True)
    has_groups = len({line[0] for line in lines}) < len(lines)
    for above, line in zip([None, *lines], lines, strict=False):
        if has_groups and above is not None and above[0] != line[0]:
            table.add_section()
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def plot(where: dict[str, Any], results: Sequence[Result], out: Path) -> list[Path]:
    """Draw a PNG for each sweep, a panel an operation.

    Returns
    -------
    list of Path
        The files; none where matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is missing")
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    paths = []
    for sweep in dict.fromkeys(r.sweep for r in results):
        of_sweep = [r for r in results if r.sweep == sweep and r.warm is not None]
        operations = list(dict.fromkeys(r.operation for r in of_sweep))
        if not operations:
            continue
        columns = min(len(operations), _PANELS)
        lines_of_panels = -(-len(operations) // columns)
        figure, panels = pyplot.subplots(
            *(lines_of_panels, columns),
            figsize=(5 * columns, 4 * lines_of_panels),
            squeeze=False,
            sharey=True,
        )
        for panel in panels.flat[len(operations) :]:
            panel.set_visible(False)
        for panel, operation in zip(panels.flat, operations, strict=False):
            lines: dict[str, tuple[list[str], list[float]]] = {}
            for r in of_sweep:
                if r.operation == operation and r.warm is not None:
                    names, medians = lines.setdefault(f"{r.implementation}, {r.mode}", ([], []))
                    names.append(r.work.name)
                    medians.append(r.warm.median_us)
            for name, (names, medians) in lines.items():
                style = "-" if name.endswith("eager") else "--"
                panel.plot(names, medians, style, marker="o", markersize=3, label=name)
            panel.set(title=operation, xlabel=WHAT_VARIES[sweep], yscale="log")
        for panel in panels[:, 0]:
            panel.set_ylabel("median, microseconds")
        panels[0][-1].legend(fontsize="small")
        figure.suptitle(f"sweep: {sweep}. {label(where)}")
        figure.tight_layout()
        paths.append(out / f"{sweep.replace(' ', '-')}-{where['device']}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths
