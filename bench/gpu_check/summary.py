"""The two summaries, and the few files beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu_check.run import Outcome

KEPT = ("results-cuda.json", "matrix.json", "profile-cuda.json", "ncu.csv", "targets.json")
"""What parts may write that's worth keeping; with log and summaries, at most 8 files."""

_LOG_LIMIT = 2**17  # characters of each stream of a part


def write(out: Path, where: dict[str, Any], outcomes: Sequence[Outcome], folder: Path) -> str:
    """Write ``summary.json``, ``summary.md`` and ``log.txt``, and copy what's worth keeping.

    Parameters
    ----------
    out : Path
        Where to.
    where : dict
        Device, versions, commit, date.
    outcomes : sequence of Outcome
        As far as parts have ended.
    folder : Path
        What the parts wrote.

    Returns
    -------
    str
        The Markdown.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (folder / name).exists() and (folder / name).stat().st_size > 0:
            shutil.copyfile(folder / name, out / name)
    content = {**where, "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "log.txt").write_text("".join(_logs(outcomes, folder)))
    text = markdown(where, outcomes)
    (out / "summary.md").write_text(text)
    return text


def _logs(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    for outcome in outcomes:
        for suffix in ("out", "err"):
            path = folder / f"{outcome.name}.{suffix}"
            if not path.exists():
                continue
            text = path.read_text(errors="replace")
            if len(text) > _LOG_LIMIT:
                half = _LOG_LIMIT // 2
                text = f"{text[:half]}\n[...]\n{text[-half:]}"
            if text.strip():
                yield f"\n##### {outcome.name}.{suffix}\n{text}\n"


def markdown(where: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return the summary as Markdown: a table of the parts, their figures, and errors."""
    lines = ["# GPU check", "", *(f"- {name}: {value}" for name, value in where.items()), ""]
    lines += ["| part | what | status | seconds | |", "|---|---|---|--:|---|"]
    for o in outcomes:
        reason = o.reason.replace("|", "\\|")
        lines.append(f"| {o.name} | {o.what} | {o.status} | {o.seconds:.0f} | {reason} |")
    for o in outcomes:
        if o.figures or o.errors:
            lines += ["", f"## {o.name}", ""]
            lines += [f"- {name}: {_shown(value)}" for name, value in o.figures.items()]
        if o.errors:
            lines += ["", "```", *o.errors, "```"]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
