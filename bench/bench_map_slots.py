"""map_slots: where the KV of tokens goes, from positions that an engine made."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import BY_ROW_SWEEPS, SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make rows whose tokens stand behind each other."""
    draw = Draw(work, device)
    rows, tokens = work.rows, work.tokens
    contexts = draw.contexts()
    pages, _ = draw.pages(contexts + tokens)
    starts = contexts.repeat_interleave(tokens).long()
    return Case(
        inputs={
            **draw.put({"position_ids": starts + torch.arange(rows * tokens) % tokens}),
            **draw.rows(),
            **pages,
        },
        state=draw.put({"status": torch.zeros(rows, dtype=torch.int32)}),
        outputs=draw.put({"slot_mapping": torch.empty(rows * tokens, dtype=torch.int64)}),
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row: its positions. The page tables stand on the host already."""
    positions, size, live = a["position_ids"], a["page_size"], int(a["num_rows"])
    ends, tables = a["cu_seqlens_q"].tolist(), a["page_table"].tolist()

    def step() -> None:
        slots = []
        for b in range(live):
            table = tables[b]
            row = positions[ends[b] : ends[b + 1]].tolist()
            slots += [table[p // size] * size + p % size for p in row]
        layout.send(slots, a["slot_mapping"], -1)

    return step


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    device = a["num_rows"].device
    tokens = torch.arange(len(a["position_ids"]), dtype=torch.int32, device=device)

    def step() -> None:
        row, is_past = layout.token_rows(a["cu_seqlens_q"][1:], tokens)
        is_padding = is_past | (row >= a["num_rows"])
        a["slot_mapping"].copy_(layout.slots_of(a, row, a["position_ids"], is_padding))

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch one kernel."""
    from bench import triton_kernels as kernels

    rows = len(a["page_table"])

    def step() -> None:
        kernels.map_rows[(rows + 1,)](
            a["position_ids"],
            a["cu_seqlens_q"],
            a["page_table"],
            a["page_table"].stride(0),
            a["num_rows"],
            a["slot_mapping"],
            rows,
            len(a["slot_mapping"]),
            a["page_size"],
            TILE=kernels.TILE,
        )

    return step


OPERATION = Operation(
    name="map_slots",
    function="map_slots",
    sweeps={**BY_ROW_SWEEPS, "works": SWEEPS["works"]},
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
