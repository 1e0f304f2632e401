"""draft_step: the first draft of a loop, and the next position."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make the first step of Eagle's loop, behind a verify pass that rejected some drafts."""
    draw = Draw(work, device)
    rows = work.rows
    lens = draw.contexts() + work.tokens
    pages, page_lists = draw.pages(lens)
    rejected = draw.integers(0, work.tokens - 1, rows)
    kept = lens - rejected
    slots = draw.permutation(rows)
    inputs = {
        "num_rejected": rejected,
        "draft_tokens": draw.integers(0, 31_999, rows).long(),
        "known_lens": torch.empty_like(kept).index_put_((slots,), kept + 1),
        "row_to_slot": slots,
    }
    state = {
        "seq_lens": lens,
        "position_ids": kept.long() - 1,
        "num_drafts": torch.zeros_like(kept),
        "written_lens": torch.zeros_like(kept),
        "status": torch.zeros(rows + 1, dtype=torch.int32),
    }
    ledger = draw.integers(0, 31_999, rows, int(lens.max()) + 2)
    outputs = {
        "input_ids": torch.empty(rows, dtype=torch.int64),
        "slot_mapping": torch.empty(rows, dtype=torch.int64),
    }
    return Case(
        inputs={**draw.put(inputs), "num_rows": draw.rows()["num_rows"], **pages},
        state=draw.put(state),
        outputs={**page_lists, **draw.put(outputs)},
        ledger=draw.put({"tokens": ledger.long()}),
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row, and once for all drafts."""
    size, rejected = a["page_size"], a["num_rejected"]
    slots_by_row = a["row_to_slot"].tolist()[: int(a["num_rows"])]
    lens, known = a["seq_lens"].tolist(), a["known_lens"].tolist()
    positions, tables = a["position_ids"].tolist(), a["page_table"].tolist()
    device = a["tokens"].device

    def step() -> None:
        drafts = a["draft_tokens"].tolist()
        new_lens, new_positions, ids, slots = [], [], [], []
        written: list[list[int]] = [[], []]
        taken: list[list[int]] = [[], [], []]
        for b, s in enumerate(slots_by_row):
            if lens[b] == 0:
                new_lens.append(0)
                new_positions.append(0)
                ids.append(0)
                slots.append(-1)
                continue
            kept = lens[b] - int(rejected[b].item())
            written[0].append(s)
            written[1].append(kept)
            if known[s] == kept + 1:
                taken[0].append(s)
                taken[1].append(known[s])
                taken[2].append(drafts[b])
            new_lens.append(kept + 1)
            new_positions.append(positions[b] + 1)
            ids.append(drafts[b])
            slots += layout.host_slots(tables[s], kept, 1, size)
        indptr, indices, last = layout.host_pages([tables[s] for s in slots_by_row], new_lens, size)
        layout.send(new_lens, a["seq_lens"])
        layout.send(new_positions, a["position_ids"])
        layout.send(ids, a["input_ids"])
        layout.send(slots, a["slot_mapping"], -1)
        layout.send(indptr, a["kv_indptr"], indptr[-1])
        layout.send(indices, a["kv_indices"])
        layout.send(last, a["last_page_len"])
        at, values = torch.tensor(written, dtype=torch.int64).to(device)
        a["written_lens"][at] = values.int()
        at, column, values = torch.tensor(taken, dtype=torch.int64).to(device)
        a["tokens"][at, column] = values
        a["num_drafts"][at] = 1

    return step


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    device = a["num_rows"].device
    rows = torch.arange(len(a["seq_lens"]), device=device)
    entries = torch.arange(len(a["kv_indices"]), dtype=torch.int32, device=device)

    def step() -> None:
        slots, seq_lens = a["row_to_slot"], a["seq_lens"]
        is_empty = (seq_lens == 0) | (rows >= a["num_rows"])
        kept = seq_lens - a["num_rejected"]
        lens = (kept + 1).masked_fill(is_empty, 0)
        known, drafts, ledger = a["known_lens"][slots], a["draft_tokens"], a["tokens"]
        is_kept_out = is_empty | (known != kept + 1)
        column = known.clamp(max=ledger.shape[1] - 1)
        stored = ledger[slots, column]
        ledger.index_put_((slots, column), torch.where(is_kept_out, stored, drafts))
        count = a["num_drafts"][slots]
        a["num_drafts"].index_put_((slots,), count.masked_fill(~is_kept_out, 1))
        written = a["written_lens"][slots]
        a["written_lens"].index_put_((slots,), torch.where(is_empty, written, kept))
        a["seq_lens"].copy_(lens)
        a["position_ids"].copy_((a["position_ids"] + 1).masked_fill(is_empty, 0))
        a["input_ids"].copy_(drafts.masked_fill(is_empty, 0))
        a["slot_mapping"].copy_(layout.slots_of(a, rows, lens - 1, is_empty))
        layout.write_pages(a, lens, entries)

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch four kernels: lengths and state, prefix sum, pages, slots."""
    from bench import triton_kernels as kernels

    rows = len(a["seq_lens"])
    ends = torch.arange(rows + 1, dtype=torch.int32, device=a["num_rows"].device)

    def step() -> None:
        kernels.draft_rows[(rows,)](
            a["seq_lens"],
            a["num_rejected"],
            a["draft_tokens"],
            a["row_to_slot"],
            a["num_rows"],
            a["known_lens"],
            a["num_drafts"],
            a["written_lens"],
            a["tokens"],
            a["tokens"].stride(0),
            a["position_ids"],
            a["input_ids"],
        )
        kernels.write_pages(a)
        kernels.write_slots({**a, "cu_seqlens_q": ends})

    return step


OPERATION = Operation(
    name="draft_step",
    function="draft_step",
    sweeps=SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
