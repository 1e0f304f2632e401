"""keep_last: each row's last query token, before a draft loop."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import BY_ROW_SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make the rows of a pass that is over."""
    draw = Draw(work, device)
    rows, tokens = work.rows, work.rows * work.tokens
    ends = draw.rows()
    state = {
        "seq_lens": draw.contexts() + work.tokens,
        "input_ids": draw.integers(0, 31_999, tokens).long(),
        "status": torch.zeros(rows, dtype=torch.int32),
    }
    outputs = {
        "position_ids": torch.empty(tokens, dtype=torch.int64),
        "query_lens": torch.empty(rows, dtype=torch.int32),
        "cached_lens": torch.empty(rows, dtype=torch.int32),
        "use_initial_states": torch.empty(rows, dtype=torch.bool),
    }
    return Case(
        inputs={"num_rows": ends["num_rows"]},
        state={"cu_seqlens_q": ends["cu_seqlens_q"], **draw.put(state)},
        outputs=draw.put(outputs),
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row: its last token. All else stands on the host already."""
    ids, rows, live = a["input_ids"], len(a["seq_lens"]), int(a["num_rows"])
    ends = a["cu_seqlens_q"].tolist()
    lens = [n if b < live else 0 for b, n in enumerate(a["seq_lens"].tolist())]
    cached = [max(n - 1, 0) for n in lens]

    def step() -> None:
        kept = [int(ids[ends[b + 1] - 1].item()) if lens[b] else 0 for b in range(rows)]
        layout.send(kept, ids)
        layout.send(cached, a["position_ids"])
        layout.send(lens, a["seq_lens"])
        layout.send([1] * live, a["query_lens"])
        layout.send(cached, a["cached_lens"])
        layout.send([n > 0 for n in cached], a["use_initial_states"])
        layout.send(range(live + 1), a["cu_seqlens_q"], live)

    return step


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    count = len(a["seq_lens"])
    rows = torch.arange(count + 1, dtype=torch.int32, device=a["num_rows"].device)

    def step() -> None:
        ids, positions, ends = a["input_ids"], a["position_ids"], a["cu_seqlens_q"]
        is_live = rows[:-1] < a["num_rows"]
        is_empty = (a["seq_lens"] == 0) | (ends[1:] == ends[:-1]) | ~is_live
        lens = a["seq_lens"].masked_fill(is_empty, 0)
        cached = (lens - 1).clamp(min=0)
        kept = ids.index_select(0, (ends[1:] - 1).clamp(min=0)).masked_fill_(is_empty, 0)
        ids[:count].copy_(kept)
        ids[count:] = 0
        positions[:count].copy_(cached)
        positions[count:] = 0
        a["seq_lens"].copy_(lens)
        a["query_lens"].copy_(is_live)
        a["cached_lens"].copy_(cached)
        a["use_initial_states"].copy_(cached > 0)
        torch.minimum(rows, a["num_rows"], out=ends)

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch two kernels: the rows, then what they overwrite."""
    from bench import triton_kernels as kernels

    rows, tokens = len(a["seq_lens"]), len(a["input_ids"])
    kept = torch.empty(rows, dtype=torch.int64, device=a["num_rows"].device)

    def step() -> None:
        kernels.keep_rows[(rows,)](
            a["cu_seqlens_q"],
            a["seq_lens"],
            a["input_ids"],
            a["num_rows"],
            kept,
            a["query_lens"],
            a["cached_lens"],
            a["use_initial_states"],
        )
        kernels.keep_tokens[(kernels.cdiv(max(tokens, rows + 1), kernels.TILE),)](
            kept,
            a["cached_lens"],
            a["num_rows"],
            a["input_ids"],
            a["position_ids"],
            a["cu_seqlens_q"],
            rows,
            tokens,
            TILE=kernels.TILE,
        )

    return step


OPERATION = Operation(
    name="keep_last",
    function="keep_last",
    sweeps=BY_ROW_SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
