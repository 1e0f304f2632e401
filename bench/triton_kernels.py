"""The same work as chains of per-row Triton kernels, as serving engines do it.

One program a row, in which every thread reads the row's lengths; a prefix sum in one block; tiles
of 1,024 elements. A program behind the last row fills what belongs to no row.
"""

# What @triton.jit takes is Triton's language, in Python's syntax.
# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from triton import cdiv, next_power_of_2

from bench.common import Arguments

__all__ = [
    "TILE",
    "accept_rows",
    "advance_rows",
    "cdiv",
    "count_rows",
    "draft_inputs",
    "draft_loop_rows",
    "draft_rows",
    "keep_rows",
    "keep_tokens",
    "locate_rows",
    "map_rows",
    "next_power_of_2",
    "prefix_sum",
    "stage_rows",
    "stage_tokens",
    "write_pages",
    "write_slots",
]

TILE = 1_024


def write_pages(a: Arguments) -> None:
    """Write ``kv_indptr``, ``last_page_len`` and ``kv_indices`` from ``seq_lens``.

    All may have a dimension of steps before their own.
    """
    rows, capacity = a["seq_lens"].shape[-1], a["kv_indices"].shape[-1]
    steps = a["seq_lens"].numel() // rows
    _count_pages[(steps,)](
        a["seq_lens"],
        a["kv_indptr"],
        a["last_page_len"],
        rows,
        a["page_size"],
        BLOCK=next_power_of_2(rows),
    )
    _copy_pages[(rows + 1, steps)](
        a["page_table"],
        a["page_table"].stride(0),
        a.get("row_to_slot", a["kv_indptr"]),
        a["kv_indptr"],
        a["kv_indices"],
        rows,
        capacity,
        HAS_SLOTS="row_to_slot" in a,
        TILE=TILE,
    )


def write_slots(a: Arguments) -> None:
    """Write ``slot_mapping`` from ``seq_lens`` and ``cu_seqlens_q``."""
    rows = len(a["seq_lens"])
    _write_slots[(rows + 1,)](
        a["seq_lens"],
        a["cu_seqlens_q"],
        a["page_table"],
        a["page_table"].stride(0),
        a.get("row_to_slot", a["cu_seqlens_q"]),
        a["slot_mapping"],
        rows,
        len(a["slot_mapping"]),
        a["page_size"],
        HAS_SLOTS="row_to_slot" in a,
        TILE=TILE,
    )


@triton.jit
def _range_of(ends, b, rows, total):
    """Return where row b's elements begin and end; those past the last row are row `rows`'s."""
    begin = tl.load(ends + b)
    end = tl.load(ends + tl.minimum(b + 1, rows))
    return begin, tl.where(b == rows, total, end)


@triton.jit
def prefix_sum(counts, indptr, rows, BLOCK: tl.constexpr):
    """Sum up the rows' counts, in one block."""
    b = tl.arange(0, BLOCK)
    count = tl.load(counts + b, mask=b < rows, other=0)
    tl.store(indptr + 1 + b, tl.cumsum(count, 0), mask=b < rows)
    tl.store(indptr, 0)


@triton.jit
def _count_pages(seq_lens, indptr, last_page_len, rows, page_size, BLOCK: tl.constexpr):
    step = tl.program_id(0)
    seq_lens += step * rows
    indptr += step * (rows + 1)
    last_page_len += step * rows
    b = tl.arange(0, BLOCK)
    length = tl.load(seq_lens + b, mask=b < rows, other=0)
    pages = (length + page_size - 1) // page_size
    tl.store(indptr + 1 + b, tl.cumsum(pages, 0), mask=b < rows)
    tl.store(indptr, 0)
    last = tl.where(length > 0, length - (pages - 1) * page_size, 0)
    tl.store(last_page_len + b, last, mask=b < rows)


@triton.jit
def _copy_pages(
    page_table,
    stride,
    row_to_slot,
    indptr,
    kv_indices,
    rows,
    capacity,
    HAS_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    b = tl.program_id(0)
    step = tl.program_id(1)
    indptr += step * (rows + 1)
    kv_indices += step * capacity
    begin, end = _range_of(indptr, b, rows, capacity)
    used = tl.where(b < rows, end, begin)
    slot = b.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(row_to_slot + b, mask=b < rows, other=0)
    for start in range(begin, end, TILE):
        i = start + tl.arange(0, TILE)
        page = tl.load(page_table + slot * stride + i - begin, mask=i < used, other=0)
        tl.store(kv_indices + i, page, mask=i < end)


@triton.jit
def _write_slots(
    seq_lens,
    ends,
    page_table,
    stride,
    row_to_slot,
    slot_mapping,
    rows,
    num_tokens,
    page_size,
    HAS_SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    b = tl.program_id(0)
    begin, end = _range_of(ends, b, rows, num_tokens)
    length = tl.load(seq_lens + b, mask=b < rows, other=0)
    used = tl.where(length > 0, end, begin)
    slot = b.to(tl.int64)
    if HAS_SLOTS:
        slot = tl.load(row_to_slot + b, mask=b < rows, other=0)
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        index = length - (end - t)
        page = tl.load(page_table + slot * stride + index // page_size, mask=t < used, other=0)
        place = page.to(tl.int64) * page_size + index % page_size
        tl.store(slot_mapping + t, tl.where(t < used, place, -1), mask=t < end)


@triton.jit
def advance_rows(
    num_accepted,
    seq_lens,
    ends,
    position_ids,
    num_rows,
    rows,
    num_tokens,
    TILE: tl.constexpr,
):
    """Move a row and its positions by its count."""
    b = tl.program_id(0)
    begin, end = _range_of(ends, b, rows, num_tokens)
    length = tl.load(seq_lens + b, mask=b < rows, other=0)
    count = tl.load(num_accepted + b, mask=b < rows, other=0)
    is_empty = (length == 0) | (b >= tl.load(num_rows))
    tl.store(seq_lens + b, tl.where(is_empty, 0, length + count), mask=b < rows)
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        position = tl.load(position_ids + t, mask=t < end, other=0) + count
        tl.store(position_ids + t, tl.where(is_empty, 0, position), mask=t < end)


@triton.jit
def stage_rows(
    committed_lens,
    known_lens,
    num_drafts,
    wanted_lens,
    row_to_slot,
    num_rows,
    query_lens,
    seq_lens,
    num_draft_tokens,
):
    """Find a row's query tokens."""
    b = tl.program_id(0)
    s = tl.load(row_to_slot + b)
    committed = tl.load(committed_lens + s)
    certain = tl.load(known_lens + s) - committed
    q = tl.maximum(certain + tl.load(num_drafts + s), 0)
    q = tl.minimum(tl.load(wanted_lens + b), q)
    q = tl.where(b < tl.load(num_rows), q, 0)
    tl.store(query_lens + b, q)
    tl.store(seq_lens + b, tl.where(q > 0, committed + q, 0))
    tl.store(num_draft_tokens + b, tl.maximum(q - tl.maximum(certain, 0), 0))


@triton.jit
def stage_tokens(
    seq_lens,
    ends,
    row_to_slot,
    tokens,
    stride,
    position_ids,
    input_ids,
    rows,
    num_tokens,
    TILE: tl.constexpr,
):
    """Write a row's positions and token ids."""
    b = tl.program_id(0)
    begin, end = _range_of(ends, b, rows, num_tokens)
    length = tl.load(seq_lens + b, mask=b < rows, other=0)
    used = tl.where(length > 0, end, begin)
    s = tl.load(row_to_slot + b, mask=b < rows, other=0)
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        index = length - (end - t)
        token = tl.load(tokens + s * stride + index, mask=t < used, other=0)
        tl.store(position_ids + t, tl.where(t < used, index, 0), mask=t < end)
        tl.store(input_ids + t, token, mask=t < end)


@triton.jit
def accept_rows(
    choices,
    input_ids,
    ends,
    num_draft_tokens,
    position_ids,
    seq_lens,
    row_to_slot,
    num_rows,
    committed_lens,
    known_lens,
    num_drafts,
    tokens,
    stride,
    num_accepted,
    num_rejected,
    next_tokens,
    token_indices,
    last_position_ids,
    accepted_tokens,
    num_tokens,
    vocab_size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
):
    """Count the drafts of a row that stand, and commit them."""
    b = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    begin = tl.load(ends + b)
    end = tl.load(ends + b + 1)
    length = tl.load(seq_lens + b)
    s = tl.load(row_to_slot + b)
    is_row = (length > 0) & (begin < end) & (b < tl.load(num_rows))
    nd = tl.load(num_draft_tokens + b)
    base = tl.maximum(end - 1 - nd, 0)
    if IS_SAMPLED:
        is_asked = (j < WIDTH) & (j <= nd)
        chosen = tl.load(choices + b * WIDTH + j, mask=is_asked, other=-1)
        stands = (chosen >= 0) & (chosen < vocab_size)
        emitted = tl.min(tl.where(stands, BLOCK, j), 0)
        accepted = tl.maximum(emitted - 1, 0)
    else:
        most = tl.where(is_row, nd, -1)
        chosen = tl.load(choices + base + j, mask=j <= most, other=-1)
        draft = tl.load(input_ids + base + j + 1, mask=j < most, other=-1)
        stands = (draft >= 0) & (draft == chosen)
        accepted = tl.min(tl.where(stands, BLOCK, j), 0)
        emitted = accepted + 1
    bonus = tl.sum(tl.where(j == accepted, chosen, 0), 0)
    accepted = tl.where(is_row, accepted, 0)
    rejected = tl.where(is_row, nd - accepted, 0)
    committed = length - rejected
    known = tl.load(known_lens + s)
    stored = tl.load(tokens + s * stride + committed, mask=is_row, other=0)
    is_chunk = committed < known
    next_id = tl.where(is_chunk, stored, bonus)
    at = tl.where(is_row, base + accepted, tl.minimum(begin, num_tokens - 1))
    position = tl.load(position_ids + at)
    tl.store(num_accepted + b, accepted)
    tl.store(num_rejected + b, rejected)
    tl.store(next_tokens + b, tl.where(is_row, next_id, 0))
    tl.store(token_indices + b, at)
    tl.store(last_position_ids + b, tl.where(is_row, position, 0))
    emitted = tl.where(is_row & (committed >= known), emitted, 0)
    shown = tl.where(j < emitted, chosen, -1)
    tl.store(accepted_tokens + b * WIDTH + j, shown, mask=j < WIDTH)
    tl.store(committed_lens + s, committed, mask=is_row)
    tl.store(known_lens + s, tl.where(is_chunk, known, committed + 1), mask=is_row)
    tl.store(num_drafts + s, 0, mask=is_row)
    tl.store(tokens + s * stride + committed, next_id, mask=is_row)


@triton.jit
def draft_inputs(
    input_ids,
    ends,
    seq_lens,
    num_rows,
    token_indices,
    next_tokens,
    draft_input_ids,
    rows,
    num_tokens,
    TILE: tl.constexpr,
):
    """Shift a row's token ids by one."""
    b = tl.program_id(0)
    begin, end = _range_of(ends, b, rows, num_tokens)
    length = tl.load(seq_lens + b, mask=b < rows, other=0)
    is_row = (length > 0) & (b < tl.load(num_rows))
    at = tl.where(is_row, tl.load(token_indices + b, mask=b < rows, other=0), -1)
    next_id = tl.load(next_tokens + b, mask=b < rows, other=0)
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        token = tl.load(input_ids + t + 1, mask=t < at, other=0)
        token = tl.where(t == at, next_id, token)
        tl.store(draft_input_ids + t, token, mask=t < end)


@triton.jit
def draft_rows(
    seq_lens,
    num_rejected,
    draft_tokens,
    row_to_slot,
    num_rows,
    known_lens,
    num_drafts,
    written_lens,
    tokens,
    stride,
    position_ids,
    input_ids,
):
    """Record a row's draft, and move the row to its next position."""
    b = tl.program_id(0)
    length = tl.load(seq_lens + b)
    is_row = (length > 0) & (b < tl.load(num_rows))
    s = tl.load(row_to_slot + b)
    kept = length - tl.load(num_rejected + b)
    known = tl.load(known_lens + s)
    draft = tl.load(draft_tokens + b)
    is_taken = is_row & (known == kept + 1)
    tl.store(tokens + s * stride + known, draft, mask=is_taken)
    tl.store(num_drafts + s, 1, mask=is_taken)
    tl.store(written_lens + s, kept, mask=is_row)
    position = tl.load(position_ids + b) + 1
    tl.store(seq_lens + b, tl.where(is_row, kept + 1, 0))
    tl.store(position_ids + b, tl.where(is_row, position, 0))
    tl.store(input_ids + b, tl.where(is_row, draft, 0))


@triton.jit
def draft_loop_rows(
    seq_lens,
    page_table,
    stride,
    row_to_slot,
    num_rows,
    lens,
    position_ids,
    slot_mapping,
    rows,
    steps,
    page_size,
    BLOCK: tl.constexpr,
):
    """Write a row's length and slot in each step of a draft loop."""
    b = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    length = tl.load(seq_lens + b)
    is_row = (length > 0) & (b < tl.load(num_rows))
    s = tl.load(row_to_slot + b)
    index = length + k
    used = tl.where(is_row, steps, 0)
    page = tl.load(page_table + s * stride + index // page_size, mask=k < used, other=0)
    place = page.to(tl.int64) * page_size + index % page_size
    tl.store(slot_mapping + b * steps + k, tl.where(k < used, place, -1), mask=k < steps)
    tl.store(lens + k * rows + b, tl.where(k < used, index + 1, 0), mask=k < steps)
    tl.store(position_ids + b, tl.where(is_row, length, 0))


@triton.jit
def count_rows(
    sampled_tokens,
    discarded,
    backup_tokens,
    num_rows,
    num_sampled,
    next_tokens,
    vocab_size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the ids of a row, and take the last one."""
    b = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    is_row = b < tl.load(num_rows)
    is_counted = is_row & (tl.load(discarded + b) == 0)
    chosen = tl.load(sampled_tokens + b * WIDTH + j, mask=j < WIDTH, other=-1)
    stands = is_counted & (chosen >= 0) & (chosen < vocab_size)
    count = tl.min(tl.where(stands, BLOCK, j), 0)
    last = tl.sum(tl.where(j == count - 1, chosen, 0), 0)
    next_id = tl.where(count > 0, last, tl.load(backup_tokens + b))
    tl.store(num_sampled + b, count)
    tl.store(next_tokens + b, tl.where(is_row, next_id, 0))


@triton.jit
def locate_rows(
    num_sampled,
    draft_ends,
    ends,
    num_rows,
    num_rejected,
    token_indices,
    rows,
):
    """Find the last accepted token of a row."""
    b = tl.program_id(0)
    is_row = b < tl.load(num_rows)
    drafts = tl.load(draft_ends + b) - tl.load(draft_ends + b - 1, mask=b > 0, other=0)
    rejected = drafts - tl.maximum(tl.load(num_sampled + b) - 1, 0)
    index = tl.load(ends + b + 1) - 1 - rejected
    padding = tl.minimum(tl.load(ends + b), tl.maximum(tl.load(ends + rows) - 1, 0))
    tl.store(num_rejected + b, tl.where(is_row, rejected, 0))
    tl.store(token_indices + b, tl.where(is_row, index, padding))


@triton.jit
def map_rows(
    position_ids,
    ends,
    page_table,
    stride,
    num_rows,
    slot_mapping,
    rows,
    num_tokens,
    page_size,
    TILE: tl.constexpr,
):
    """Write the slots of a row's positions."""
    b = tl.program_id(0)
    begin, end = _range_of(ends, b, rows, num_tokens)
    used = tl.where(b < tl.load(num_rows), end, begin)
    row = page_table + b.to(tl.int64) * stride
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        position = tl.load(position_ids + t, mask=t < used, other=0)
        page = tl.load(row + position // page_size, mask=t < used, other=0)
        place = page.to(tl.int64) * page_size + position % page_size
        tl.store(slot_mapping + t, tl.where(t < used, place, -1), mask=t < end)


@triton.jit
def keep_rows(
    ends,
    seq_lens,
    input_ids,
    num_rows,
    kept,
    query_lens,
    cached_lens,
    use_initial_states,
):
    """Find the last token of a row."""
    b = tl.program_id(0)
    begin = tl.load(ends + b)
    end = tl.load(ends + b + 1)
    length = tl.load(seq_lens + b)
    is_live = b < tl.load(num_rows)
    is_row = is_live & (length > 0) & (begin < end)
    cached = tl.where(is_row, length - 1, 0)
    tl.store(kept + b, tl.load(input_ids + end - 1, mask=is_row, other=0))
    tl.store(seq_lens + b, tl.where(is_row, length, 0))
    tl.store(query_lens + b, is_live.to(tl.int32))
    tl.store(cached_lens + b, cached)
    tl.store(use_initial_states + b, cached > 0)


@triton.jit
def keep_tokens(
    kept,
    cached_lens,
    num_rows,
    input_ids,
    position_ids,
    ends,
    rows,
    num_tokens,
    TILE: tl.constexpr,
):
    """Make rows of one token, and padding behind them."""
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = tl.load(kept + t, mask=t < rows, other=0)
    position = tl.load(cached_lens + t, mask=t < rows, other=0)
    tl.store(input_ids + t, token, mask=t < num_tokens)
    tl.store(position_ids + t, position, mask=t < num_tokens)
    tl.store(ends + t, tl.minimum(t, tl.load(num_rows)), mask=t <= rows)
