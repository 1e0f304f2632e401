"""advance: rows that were staged before the counts were known."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make rows that were staged as if no draft had been accepted."""
    draw = Draw(work, device)
    lens = draw.contexts() + work.tokens
    pages, page_lists = draw.pages(lens)
    starts = (lens - work.tokens).repeat_interleave(work.tokens)
    offsets = torch.arange(work.rows * work.tokens) % work.tokens
    counts = {"num_accepted": draw.integers(0, work.tokens - 1, work.rows)}
    state = {
        "seq_lens": lens,
        "position_ids": starts.long() + offsets,
        "status": torch.zeros_like(lens),
    }
    slots = {"slot_mapping": torch.empty(work.rows * work.tokens, dtype=torch.int64)}
    return Case(
        inputs={**draw.put(counts), **draw.rows(), **pages},
        state=draw.put(state),
        outputs={**page_lists, **draw.put(slots)},
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row. All but the counts stands on the host already."""
    size, counts = a["page_size"], a["num_accepted"]
    live = int(a["num_rows"])
    lens = [n if b < live else 0 for b, n in enumerate(a["seq_lens"].tolist())]
    positions, ends = a["position_ids"].tolist(), a["cu_seqlens_q"].tolist()
    tables = a["page_table"].tolist()

    def step() -> None:
        new_lens, new_positions, slots = [], [], []
        for b, length in enumerate(lens):
            count, begin, end = counts[b].item(), ends[b], ends[b + 1]
            if length == 0:
                new_lens.append(0)
                new_positions += [0] * (end - begin)
                slots += [-1] * (end - begin)
                continue
            length += count
            new_lens.append(length)
            new_positions += [p + count for p in positions[begin:end]]
            slots += layout.host_slots(tables[b], length - (end - begin), end - begin, size)
        indptr, indices, last = layout.host_pages(tables, new_lens, size)
        layout.send(new_lens, a["seq_lens"])
        layout.send(new_positions, a["position_ids"])
        layout.send(slots, a["slot_mapping"], -1)
        layout.send(indptr, a["kv_indptr"])
        layout.send(indices, a["kv_indices"])
        layout.send(last, a["last_page_len"])

    return step


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    device = a["num_rows"].device
    rows = torch.arange(len(a["seq_lens"]), device=device)
    tokens = torch.arange(len(a["position_ids"]), dtype=torch.int32, device=device)
    entries = torch.arange(len(a["kv_indices"]), dtype=torch.int32, device=device)

    def step() -> None:
        counts, seq_lens, ends = a["num_accepted"], a["seq_lens"], a["cu_seqlens_q"][1:]
        is_empty = (seq_lens == 0) | (rows >= a["num_rows"])
        lens = (seq_lens + counts).masked_fill(is_empty, 0)
        row, is_past = layout.token_rows(ends, tokens)
        is_padding = is_past | is_empty.index_select(0, row)
        index = (lens - ends).index_select(0, row) + tokens
        moved = a["position_ids"] + counts.index_select(0, row)
        a["seq_lens"].copy_(lens)
        a["position_ids"].copy_(moved.masked_fill_(is_padding, 0))
        a["slot_mapping"].copy_(layout.slots_of(a, row, index, is_padding))
        layout.write_pages(a, lens, entries)

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch four kernels: lengths and positions, prefix sum, pages, slots."""
    from bench import triton_kernels as kernels

    rows = len(a["seq_lens"])

    def step() -> None:
        kernels.advance_rows[(rows + 1,)](
            a["num_accepted"],
            a["seq_lens"],
            a["cu_seqlens_q"],
            a["position_ids"],
            a["num_rows"],
            rows,
            len(a["position_ids"]),
            TILE=kernels.TILE,
        )
        kernels.write_pages(a)
        kernels.write_slots(a)

    return step


OPERATION = Operation(
    name="advance",
    function="advance",
    sweeps=SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
