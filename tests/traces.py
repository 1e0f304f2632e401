"""Traces made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specmeta.trace.file import PageEvents, Ragged, Trace
from specmeta.trace.writer import FORMAT, VERSION, Writer

HEADER = {"format": FORMAT, "version": VERSION, "page_size": 4, "num_slots": 3}


def step(number: int, *rows: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A step's line, from rows that each say what isn't as in a row of one token."""
    full = []
    for row in rows:
        cached, query = row.get("cached_len", 0), row.get("query_len", 1)
        length = cached + query
        drafts, accepted = row.get("drafts", 0), row.get("accepted", 0)
        full.append(
            {
                "slot": 0,
                "request": 0,
                "cached_len": cached,
                "query_len": query,
                "prompt_len": 0,
                "seq_len": length,
                "used_pages": -(-length // 4),
                "status": 0,
                "drafts": drafts,
                "accepted": accepted,
                "committed_len": length - drafts + accepted,
                "emitted": [],
                **row,
            }
        )
    return {"step": number, **{name: [row[name] for row in full] for name in full[0]}, **fields}


# Request 0 goes back over a page, request 1 gets one of its pages, request 2 overflows.
STEPS = [
    step(
        0,
        {"query_len": 6, "prompt_len": 6, "emitted": [10]},
        {"slot": 1, "request": 1, "query_len": 3, "prompt_len": 3},
        pages=[[0, 0, 0, [1, 2, 5]], [1, 1, 0, [3]]],
    ),
    step(
        1,
        {
            "cached_len": 6,
            "query_len": 4,
            "drafts": 3,
            "accepted": 1,
            "draft_tokens": [11, 12, 13],
            "emitted": [11, 20],
        },
        {
            "slot": 1,
            "request": 1,
            "cached_len": 3,
            "prompt_len": 1,
            "draft_tokens": [],
            "emitted": [30],
        },
    ),
    step(
        2,
        {"slot": 1, "request": 1, "cached_len": 4, "emitted": [31]},
        {"slot": 2, "request": 2, "query_len": 0, "committed_len": 0, "status": 1},
        pages=[[0, 0, 2, []], [1, 1, 1, [5]], [2, 2, 0, [7]]],
    ),
]


def write(path: Path, steps: list[dict[str, Any]], header: dict[str, Any] = HEADER) -> Path:
    writer = Writer(path)
    for record in (header, *steps):
        writer.write(record)
    writer.close()
    return path


def large(num_steps: int, num_rows: int) -> Trace:
    """A trace of rows that decode with four drafts; every hundred steps a slot's request changes.

    A request has the eight pages that the slot's last one had.
    """
    rng = np.random.default_rng(0)
    shape = num_steps, num_rows
    time = np.arange(num_steps)[:, None] + np.arange(num_rows) * 37 % 100
    age, request = time % 100, time // 100 * num_rows + np.arange(num_rows)
    in_prompt = age == 0
    drafts = np.where(in_prompt, 0, 4)
    accepted = rng.integers(0, 3, shape) * ~in_prompt
    cached, length = np.zeros(shape, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    for step_ in range(num_steps):
        length[in_prompt[step_]] = 0
        cached[step_] = length
        length += np.where(in_prompt[step_], 64, 1) + accepted[step_]
    query = np.where(in_prompt, 64, 5)
    columns = {
        "slot": np.broadcast_to(np.arange(num_rows), shape),
        "request": request,
        "cached_len": cached,
        "query_len": query,
        "prompt_len": np.where(in_prompt, 64, 0),
        "seq_len": cached + query,
        "used_pages": -(-(cached + query) // 48),
        "status": np.zeros(shape, dtype=np.int64),
        "staged_len": np.full(shape, -1),
        "committed_len": cached + query - drafts + accepted,
        "drafts": drafts,
        "accepted": accepted,
    }
    # The numbers of requests, in the order of their first rows.
    order = {int(r): i for i, r in enumerate(dict.fromkeys(request.ravel().tolist()))}
    columns["request"] = np.vectorize(order.__getitem__)(request)

    def ragged(counts: Any) -> Ragged:
        first = np.concatenate(([0], np.cumsum(counts.ravel())))
        return Ragged(rng.integers(0, 1000, first[-1]), first)

    begin = np.flatnonzero((in_prompt | (np.arange(num_steps) == 0)[:, None]).T)  # by slot
    slot, at = begin // num_steps, begin % num_steps
    owner = columns["request"][at, slot]
    before = np.where(np.diff(slot, prepend=-1) == 0, np.roll(owner, 1), -1)
    page = slot[:, None] * 8 + np.arange(8) + 1
    by_page = np.lexsort((np.repeat(at, 8), page.ravel()))
    events = PageEvents(
        page.ravel()[by_page],
        np.repeat(at, 8)[by_page],
        np.repeat(owner, 8)[by_page],
        np.tile(np.arange(8), len(at))[by_page],
        np.ones(len(by_page), dtype=np.int64),
        np.repeat(before, 8)[by_page],
    )
    return Trace(
        "large.jsonl",
        {"page_size": 48, "num_slots": num_rows},
        np.arange(num_steps + 1) * num_rows,
        {name: np.ascontiguousarray(values).ravel() for name, values in columns.items()},
        {"emitted": ragged(accepted + 1), "draft_tokens": ragged(drafts)},
        events,
        "",
    )
