"""stage: the rows of a step, from the state by slot."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make rows that decode: a token that is certain, then drafts."""
    draw = Draw(work, device)
    rows, tokens = work.rows, work.tokens
    contexts = draw.contexts()
    pages, page_lists = draw.pages(contexts + tokens)
    ends = draw.rows()
    inputs = {
        "committed_lens": contexts,
        "known_lens": contexts + 1,
        "num_drafts": torch.full_like(contexts, tokens - 1),
        "query_lens": torch.full_like(contexts, tokens),
        "tokens": draw.integers(0, 31_999, rows, work.max_context + tokens + 1).long(),
        "row_to_slot": draw.permutation(rows),
    }
    outputs = {
        "seq_lens": torch.empty_like(contexts),
        "num_draft_tokens": torch.empty_like(contexts),
        "position_ids": torch.empty(rows * tokens, dtype=torch.int64),
        "input_ids": torch.empty(rows * tokens, dtype=torch.int64),
        "slot_mapping": torch.empty(rows * tokens, dtype=torch.int64),
    }
    return Case(
        inputs={**draw.put(inputs), "num_rows": ends["num_rows"], **pages},
        state=draw.put({"status": torch.zeros(rows + 1, dtype=torch.int32)}),
        outputs={**page_lists, **draw.put(outputs), "cu_seqlens_q": ends["cu_seqlens_q"]},
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row. All but the committed lengths stands on the host already."""
    size, committed = a["page_size"], a["committed_lens"]
    slots_by_row = a["row_to_slot"].tolist()[: int(a["num_rows"])]
    known, drafts = a["known_lens"].tolist(), a["num_drafts"].tolist()
    asked, ledger, tables = a["query_lens"].tolist(), a["tokens"].tolist(), a["page_table"].tolist()

    def step() -> None:
        ends, lens, drafted = [0], [], []
        positions, ids, slots = list[int](), list[int](), list[int]()
        for b, s in enumerate(slots_by_row):
            c = int(committed[s].item())
            q = min(asked[b], max(known[s] - c + drafts[s], 0))
            ends.append(ends[-1] + q)
            lens.append(c + q if q else 0)
            drafted.append(max(q - max(known[s] - c, 0), 0))
            positions += range(c, c + q)
            ids += ledger[s][c : c + q]
            slots += layout.host_slots(tables[s], c, q, size)
        indptr, indices, last = layout.host_pages([tables[s] for s in slots_by_row], lens, size)
        layout.send(ends, a["cu_seqlens_q"], ends[-1])
        layout.send(lens, a["seq_lens"])
        layout.send(drafted, a["num_draft_tokens"])
        layout.send(positions, a["position_ids"])
        layout.send(ids, a["input_ids"])
        layout.send(slots, a["slot_mapping"], -1)
        layout.send(indptr, a["kv_indptr"], indptr[-1])
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
        slots, ends = a["row_to_slot"], a["cu_seqlens_q"]
        committed = a["committed_lens"][slots]
        certain = a["known_lens"][slots] - committed
        q = torch.minimum(a["query_lens"], (certain + a["num_drafts"][slots]).clamp(min=0))
        q = q.masked_fill(rows >= a["num_rows"], 0)
        ends[:1] = 0
        torch.cumsum(q, 0, dtype=torch.int32, out=ends[1:])
        lens = (committed + q).masked_fill(q == 0, 0)
        row, is_padding = layout.token_rows(ends[1:], tokens)
        index = (lens - ends[1:]).index_select(0, row) + tokens
        a["seq_lens"].copy_(lens)
        a["num_draft_tokens"].copy_((q - certain.clamp(min=0)).clamp(min=0))
        a["position_ids"].copy_(index.masked_fill(is_padding, 0))
        column = index.clamp(0, a["tokens"].shape[1] - 1)
        a["input_ids"].copy_(a["tokens"][slots[row], column].masked_fill(is_padding, 0))
        a["slot_mapping"].copy_(layout.slots_of(a, row, index, is_padding))
        layout.write_pages(a, lens, entries)

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch six kernels: lengths, prefix sum, tokens, prefix sum, pages, slots."""
    from bench import triton_kernels as kernels

    rows, tokens = len(a["seq_lens"]), len(a["position_ids"])
    query_lens = torch.empty_like(a["seq_lens"])

    def step() -> None:
        kernels.stage_rows[(rows,)](
            a["committed_lens"],
            a["known_lens"],
            a["num_drafts"],
            a["query_lens"],
            a["row_to_slot"],
            a["num_rows"],
            query_lens,
            a["seq_lens"],
            a["num_draft_tokens"],
        )
        kernels.prefix_sum[(1,)](
            query_lens, a["cu_seqlens_q"], rows, BLOCK=kernels.next_power_of_2(rows)
        )
        kernels.stage_tokens[(rows + 1,)](
            a["seq_lens"],
            a["cu_seqlens_q"],
            a["row_to_slot"],
            a["tokens"],
            a["tokens"].stride(0),
            a["position_ids"],
            a["input_ids"],
            rows,
            tokens,
            TILE=kernels.TILE,
        )
        kernels.write_pages(a)
        kernels.write_slots(a)

    return step


OPERATION = Operation(
    name="stage",
    function="stage",
    sweeps=SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
