"""What a trace adds up to: by step, and all together."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specmeta._command import format_rate
from specmeta.status import Status
from specmeta.trace.file import Ints, Trace

__all__ = ["Totals", "by_step", "describe", "summarize"]


class Totals(NamedTuple):
    """Sums over the rows of each step, int64 [steps].

    Attributes
    ----------
    drafts, accepted, emitted : int64 [steps]
        Tokens; of drafts, where it is known how many were verified, and behind the prompt.
    used_pages : int64 [steps]
        Pages that the step's rows read.
    faults, rewinds, handovers : int64 [steps]
        Rows with a new bit of `status`; rows that gave up whole pages; pages that came from
        another request.
    """

    drafts: Ints
    accepted: Ints
    emitted: Ints
    used_pages: Ints
    faults: Ints
    rewinds: Ints
    handovers: Ints


def by_step(trace: Trace) -> Totals:
    """Add up each step."""
    steps, rows = trace.num_steps, trace.step_of_row

    def add(values: Any) -> Ints:
        return np.bincount(rows, weights=values, minlength=steps).astype(np.int64)

    verifying = _verifying(trace)
    handed = trace.page_events.step[trace.page_events.previous >= 0]
    return Totals(
        drafts=add(trace["drafts"] * verifying),
        accepted=add(trace["accepted"] * verifying),
        emitted=add(np.diff(trace.emitted.first)),
        used_pages=add(trace["used_pages"]),
        faults=add(trace.new_faults > 0),
        rewinds=add(trace.rewinds[1] > 0),
        handovers=np.bincount(handed, minlength=steps),
    )


def summarize(trace: Trace) -> dict[str, Any]:
    """Return figures of the whole run, by name.

    Returns
    -------
    dict
        ``steps``, ``rows``, ``requests``, ``tokens`` (emitted), ``target_passes`` (rows behind
        their prompt that emitted something), ``drafted`` and ``accepted`` (by position in the
        draft), ``rewound_tokens``, ``rewinds`` (rows that gave up whole pages), ``handovers``,
        ``shared_pages`` (pages that two held at once), ``faults`` (by the bit in words: rows).
    """
    verifying = _verifying(trace)
    accepted, drafts = trace["accepted"][verifying], trace["drafts"][verifying]
    emitted = np.diff(trace.emitted.first)
    tokens, pages = trace.rewinds
    events, faults = trace.page_events, trace.new_faults
    positions = range(int(drafts.max(initial=0)))
    return {
        "steps": trace.num_steps,
        "rows": trace.num_rows,
        "requests": trace.num_requests,
        "tokens": int(emitted.sum()),
        "target_passes": int((verifying & (emitted > 0)).sum()),
        "drafted": [int((drafts > k).sum()) for k in positions],
        "accepted": [int((accepted > k).sum()) for k in positions],
        "rewound_tokens": int(tokens.sum()),
        "rewinds": int((pages > 0).sum()),
        "handovers": int((events.previous >= 0).sum()),
        "shared_pages": len(np.unique(events.page[events.holders > 1])),
        "faults": {
            Status.words(bit): int((faults & bit > 0).sum())
            for bit in (1 << k for k in range(31))
            if (faults & bit).any()
        },
    }


def describe(trace: Trace) -> list[tuple[str, str]]:
    """Return the figures of the whole run in words, by name."""
    summary = summarize(trace)
    accepted, drafted = summary["accepted"], summary["drafted"]
    pairs = zip(accepted, drafted, strict=True)
    passes = summary["target_passes"]
    faults = [f"{name} in {rows:,} rows" for name, rows in summary["faults"].items()]
    return [
        ("page size", str(trace.page_size)),
        ("steps", f"{summary['steps']:,}"),
        ("rows", f"{summary['rows']:,}"),
        ("requests", f"{summary['requests']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
        ("target passes", f"{passes:,}"),
        ("tokens a pass", f"{1 + sum(accepted) / passes:.2f}" if passes else "-"),
        ("acceptance", format_rate(sum(accepted), sum(drafted))),
        ("acceptance by position", " ".join(f"{a / d:.1%}" for a, d in pairs) or "-"),
        ("tokens given up", f"{summary['rewound_tokens']:,}"),
        ("rewinds over a page", f"{summary['rewinds']:,}"),
        ("pages handed over", f"{summary['handovers']:,}"),
        ("pages held twice", f"{summary['shared_pages']:,}"),
        ("faults", ", ".join(faults) or "none"),
    ]


def _verifying(trace: Trace) -> NDArray[np.bool_]:
    known = np.minimum(trace["drafts"], trace["accepted"]) >= 0
    verifying: NDArray[np.bool_] = (trace["prompt_len"] == 0) & known
    return verifying
