"""The page lists alone, beside a plain copy of as many bytes: `advance` by counts of zero."""

from __future__ import annotations

import torch

from bench import layout
from bench.common import Arguments, Case, Draw, Operation, Step, Work

ROWS, PAGE_SIZE = 256, 16


def _even(pages: int) -> Work:
    tokens = pages * PAGE_SIZE // ROWS
    return Work(f"{pages:,}", ROWS, 1, tokens - 1, tokens - 1, PAGE_SIZE)


# The last one: half of the pages belong to one row.
SWEEPS = {
    "pages": [
        *(_even(2**power) for power in (12, 16, 20)),
        Work("1,048,576 skewed", ROWS, 1, 32_895, 32_895, PAGE_SIZE, first=2**19 * PAGE_SIZE - 1),
    ]
}


def make_case(work: Work, device: torch.device) -> Case:
    """Make lengths that stay what they are."""
    draw = Draw(work, device)
    lens = draw.contexts() + work.tokens
    pages, page_lists = draw.pages(lens)
    rows = {"num_accepted": torch.zeros_like(lens)}
    state = {"seq_lens": lens, "status": torch.zeros_like(lens)}
    return Case(
        inputs={**draw.put(rows), "num_rows": draw.rows()["num_rows"], **pages},
        state=draw.put(state),
        outputs=page_lists,
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row. The page tables stand on the host already."""
    counts, size = a["num_accepted"], a["page_size"]
    live = int(a["num_rows"])
    lens = [n if b < live else 0 for b, n in enumerate(a["seq_lens"].tolist())]
    tables = a["page_table"].tolist()

    def step() -> None:
        new_lens = [n + int(counts[b].item()) if n else 0 for b, n in enumerate(lens)]
        indptr, indices, last = layout.host_pages(tables, new_lens, size)
        layout.send(new_lens, a["seq_lens"])
        layout.send(indptr, a["kv_indptr"])
        layout.send(indices, a["kv_indices"])
        layout.send(last, a["last_page_len"])

    return step


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    device = a["num_rows"].device
    rows = torch.arange(len(a["seq_lens"]), device=device)
    entries = torch.arange(len(a["kv_indices"]), dtype=torch.int32, device=device)

    def step() -> None:
        seq_lens = a["seq_lens"]
        is_empty = (seq_lens == 0) | (rows >= a["num_rows"])
        seq_lens.copy_((seq_lens + a["num_accepted"]).masked_fill(is_empty, 0))
        layout.write_pages(a, seq_lens, entries)

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch three kernels: lengths, prefix sum, pages."""
    from bench import triton_kernels as kernels

    rows = len(a["seq_lens"])
    # Rows without query tokens.
    ends = torch.zeros(rows + 1, dtype=torch.int32, device=a["num_rows"].device)

    def step() -> None:
        kernels.advance_rows[(rows + 1,)](
            a["num_accepted"], a["seq_lens"], ends, ends, a["num_rows"], rows, 0, TILE=kernels.TILE
        )
        kernels.write_pages(a)

    return step


def copy(a: Arguments) -> Step:
    """Copy the finished lists: the bandwidth that there is."""
    names = ("seq_lens", "kv_indptr", "kv_indices", "last_page_len")
    vectorised(a)()
    lists = {name: a[name].clone() for name in names}

    def step() -> None:
        for name in names:
            a[name].copy_(lists[name])

    return step


OPERATION = Operation(
    name="repack",
    function="advance",
    sweeps=SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
    others={"copy": copy},
)
