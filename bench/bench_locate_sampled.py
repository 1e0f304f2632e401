"""locate_sampled: the query token that was accepted last."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import BY_ROW_SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make rows that verify as many drafts as fit, and counts of all that can be."""
    draw = Draw(work, device)
    rows, drafts = work.rows, work.tokens - 1
    inputs = {
        "num_sampled": draw.integers(0, work.tokens, rows),
        "cu_num_draft_tokens": torch.arange(1, rows + 1, dtype=torch.int32) * drafts,
    }
    outputs = {name: torch.empty(rows).int() for name in ("num_rejected", "token_indices")}
    return Case(
        inputs={**draw.put(inputs), **draw.rows()},
        state=draw.put({"status": torch.zeros(rows, dtype=torch.int32)}),
        outputs=draw.put(outputs),
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row. All but the counts stands on the host already."""
    counts, live = a["num_sampled"], int(a["num_rows"])
    ends, sums = a["cu_seqlens_q"].tolist(), [0, *a["cu_num_draft_tokens"].tolist()]

    def step() -> None:
        rejected = [0] * len(counts)
        indices = [min(end, max(ends[-1] - 1, 0)) for end in ends[:-1]]
        for b in range(live):
            drafts = sums[b + 1] - sums[b]
            rejected[b] = drafts - max(int(counts[b].item()) - 1, 0)
            indices[b] = ends[b + 1] - 1 - rejected[b]
        layout.send(rejected, a["num_rejected"])
        layout.send(indices, a["token_indices"])

    return step


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    rows = torch.arange(len(a["num_sampled"]), device=a["num_rows"].device)

    def step() -> None:
        sums, ends = a["cu_num_draft_tokens"], a["cu_seqlens_q"]
        is_padding = rows >= a["num_rows"]
        drafts = torch.cat([sums[:1], sums[1:] - sums[:-1]])
        rejected = drafts - (a["num_sampled"] - 1).clamp(min=0)
        padding = torch.minimum(ends[:-1], (ends[-1] - 1).clamp(min=0))
        a["num_rejected"].copy_(rejected.masked_fill(is_padding, 0))
        a["token_indices"].copy_(torch.where(is_padding, padding, ends[1:] - 1 - rejected))

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch one kernel."""
    from bench import triton_kernels as kernels

    rows = len(a["num_sampled"])

    def step() -> None:
        kernels.locate_rows[(rows,)](
            a["num_sampled"],
            a["cu_num_draft_tokens"],
            a["cu_seqlens_q"],
            a["num_rows"],
            a["num_rejected"],
            a["token_indices"],
            rows,
        )

    return step


OPERATION = Operation(
    name="locate_sampled",
    function="locate_sampled",
    sweeps=BY_ROW_SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
