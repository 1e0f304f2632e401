"""draft_lists: the page lists of all draft steps, one step for each draft."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make rows before their draft loop."""
    draw = Draw(work, device)
    rows, steps = work.rows, work.tokens - 1
    contexts = draw.contexts()
    pages, page_lists = draw.pages(contexts)
    outputs = {
        "position_ids": torch.empty(rows, dtype=torch.int64),
        "slot_mapping": torch.empty(rows * steps, dtype=torch.int64),
    }
    return Case(
        inputs={
            **draw.put({"seq_lens": contexts, "row_to_slot": draw.permutation(rows)}),
            "num_rows": draw.rows()["num_rows"],
            "num_steps": steps,
            **pages,
        },
        state=draw.put({"status": torch.zeros(rows + 1, dtype=torch.int32)}),
        outputs={
            **{name: tensor.repeat(steps, 1) for name, tensor in page_lists.items()},
            **draw.put(outputs),
        },
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row. The page tables stand on the host already."""
    seq_lens, size, steps = a["seq_lens"], a["page_size"], a["num_steps"]
    rows, live = len(seq_lens), int(a["num_rows"])
    by_slot = a["page_table"].tolist()
    tables = [by_slot[s] for s in a["row_to_slot"].tolist()]

    def step() -> None:
        lens = [int(seq_lens[b].item()) if b < live else 0 for b in range(rows)]
        slots = []
        for b, n in enumerate(lens):
            slots += layout.host_slots(tables[b], n, steps, size) if n else [-1] * steps
        layout.send(lens, a["position_ids"])
        layout.send(slots, a["slot_mapping"])
        for k in range(steps):
            lens_of_step = [n + k + 1 if n else 0 for n in lens]
            indptr, indices, last = layout.host_pages(tables, lens_of_step, size)
            layout.send(indptr, a["kv_indptr"][k])
            layout.send(indices, a["kv_indices"][k])
            layout.send(last, a["last_page_len"][k])

    return step


def vectorised(a: Arguments) -> Step:
    """Call about three dozen operators for all steps together."""
    device = a["num_rows"].device
    size, steps, count = a["page_size"], a["num_steps"], len(a["seq_lens"])
    capacity = a["kv_indices"].shape[1]
    rows = torch.arange(count, device=device)
    row_of_slot = rows.repeat_interleave(steps)
    added = torch.arange(1, steps + 1, dtype=torch.int32, device=device)[:, None]
    first_entries = (added - 1) * capacity
    entries = torch.arange(steps * capacity, dtype=torch.int32, device=device)

    def step() -> None:
        indptr = a["kv_indptr"]
        is_empty = (a["seq_lens"] == 0) | (rows >= a["num_rows"])
        lens = (a["seq_lens"] + added).masked_fill(is_empty, 0)
        indptr[:, :1] = 0
        indptr[:, 1:] = torch.cumsum((lens + (size - 1)) // size, 1, dtype=torch.int32)
        # The steps' lists stand behind each other. What is behind a step's last page is found to
        # belong to the next step's first row, before that row's first page.
        ends = (indptr[:, 1:] + first_entries).view(-1)
        begins = (indptr[:, :-1] + first_entries).view(-1)
        row, is_past = layout.token_rows(ends, entries)
        column = entries - begins.index_select(0, row)
        pages = layout.page_ids(a, row % count, column)
        a["kv_indices"].view(-1).copy_(pages.masked_fill_(is_past | (column < 0), 0))
        a["last_page_len"].copy_(((lens - 1) % size + 1).masked_fill(is_empty, 0))
        a["position_ids"].copy_(a["seq_lens"].masked_fill(is_empty, 0))
        index = lens.t().reshape(-1) - 1
        slots = layout.slots_of(a, row_of_slot, index, is_empty.index_select(0, row_of_slot))
        a["slot_mapping"].copy_(slots)

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch three kernels for all steps: lengths and slots, prefix sums, pages."""
    from bench import triton_kernels as kernels

    rows, steps = len(a["seq_lens"]), a["num_steps"]
    lens = torch.empty(steps, rows, dtype=torch.int32, device=a["num_rows"].device)

    def step() -> None:
        kernels.draft_loop_rows[(rows,)](
            a["seq_lens"],
            a["page_table"],
            a["page_table"].stride(0),
            a["row_to_slot"],
            a["num_rows"],
            lens,
            a["position_ids"],
            a["slot_mapping"],
            rows,
            steps,
            a["page_size"],
            BLOCK=kernels.next_power_of_2(steps),
        )
        kernels.write_pages({**a, "seq_lens": lens})

    return step


OPERATION = Operation(
    name="draft_lists",
    function="draft_lists",
    sweeps={name: SWEEPS[name] for name in ("headline", "works")},
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
