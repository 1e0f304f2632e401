"""The contract in plain Python: what every operation means, one row after another.

Read this to learn the rules, and test a kernel against it. Each function has the signature of the
operator of the same name, takes CPU tensors, and writes its outputs in place. Nothing here is
shared with the kernels, nothing is fast, and nothing is validated: that is the operator's business.

Tensors are read into lists of Python integers first and written back last, so no rule depends on
the order of stores, and no sum overflows. Stores into a narrower tensor saturate.

How a row is worked off (docs/contract.md, rule 5). Where a step empties the row, the steps behind
it are not made:

    slot -> cu_seqlens_q -> length -> allocated pages -> counts -> UNDERFLOW, else OVERFLOW
         -> kv_indices too small -> negative page ids

`_Rows` makes the first step, `_query_tokens` the second, `_Pages` the fourth, `_write_layout` the
last two; the operation itself makes the others.

Where something is decided about a row, `rows.note` or `rows.flag` says what and why, to whoever
listens (`specmeta explain` does); nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specmeta._notes import Note, collected, show

__all__ = [
    "accept_greedy",
    "accept_sampled",
    "advance",
    "count_sampled",
    "draft_lists",
    "draft_step",
    "keep_last",
    "locate_sampled",
    "map_slots",
    "stage",
]

OVERFLOW = 1  # past the capacity, the token buffer, kv_indices or the ledger
UNDERFLOW = 2  # a length below the row's own query tokens
BAD_COUNT = 4  # a count or length that cannot be
BAD_SLOT = 8  # a slot or index outside its table
BAD_PAGE = 16  # a negative id among the used pages
BAD_INDPTR = 32  # a decreasing or out-of-range pair

INT32_MAX = 2**31 - 1
COUNT_LIMIT = 2**40  # counts and lengths are read clamped to +- this
NO_TOKEN = -1  # behind the last id in a row of accepted_tokens

EMPTY_SPAN = range(0)  # the query tokens of a row that has none


# --- Tensors and integers ----------------------------------------------------------------------


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def _read(tensor: Tensor, limit: int | None = None) -> list[int]:
    values: list[int] = tensor.tolist()
    return values if limit is None else [_clamp(v, -limit, limit) for v in values]


def _read_optional(tensor: Tensor | None, limit: int | None = None) -> list[int] | None:
    return None if tensor is None else _read(tensor, limit)


def _read_table(tensor: Tensor) -> list[list[int]]:
    table: list[list[int]] = tensor.tolist()
    return table


def _write(tensor: Tensor | None, values: Sequence[int]) -> None:
    """Store every element, saturated to the range of the tensor's dtype."""
    if tensor is not None:
        info = torch.iinfo(tensor.dtype)
        stored = list(values)
        if stored and not info.min <= min(stored) <= max(stored) <= info.max:
            stored = [_clamp(v, info.min, info.max) for v in stored]
        tensor.copy_(torch.tensor(stored, dtype=torch.int64).reshape(tensor.shape))


def _write_table(tensor: Tensor | None, table: Sequence[Sequence[int]]) -> None:
    _write(tensor, [value for row in table for value in row])


def _first_size(*tensors: Tensor | None) -> int | None:
    """Give the length of the first tensor there is; None where there is none."""
    return next((len(tensor) for tensor in tensors if tensor is not None), None)


# --- Rows and slots ----------------------------------------------------------------------------


class _Rows:
    """The live rows of a launch, the slot of each, and the status words.

    Attributes
    ----------
    count
        B, the captured batch size.
    live
        `num_rows` clamped to [0, B]; only rows before it are looked at.
    slot
        Per row its slot; None where the row has none, which makes it an empty row.
    """

    def __init__(
        self,
        count: int,
        num_rows: Tensor | int | None,
        row_to_slot: Tensor | None,
        num_slots: int | None,
        status: Tensor | None,
    ) -> None:
        wanted = count if num_rows is None else int(num_rows)
        self.count = count
        self.live = _clamp(wanted, 0, count)
        self.slot: list[int | None] = [None] * count
        self._status = status
        self._words = _read_optional(status)
        self._notes = collected()
        if self._notes is not None:
            self._notes.slots = self.slot

        for b in range(self.live, count):
            self.note(b, "num_rows", f"not below num_rows = {wanted}: padding")
        if row_to_slot is None:  # slot = row
            self.slot[: self.live] = range(self.live)
            return
        for b, s in enumerate(_read(row_to_slot)[: self.live]):
            if s >= 0 and (num_slots is None or s < num_slots):
                self.slot[b] = s
                self.note(b, "slot", f"row_to_slot[{b}] = {s}")
            elif s == -1:  # how the host says that the row is empty
                self.note(b, "slot", f"row_to_slot[{b}] = -1: empty")
            else:
                self.flag(b, BAD_SLOT, f"row_to_slot[{b}] = {s}, of {show(num_slots)} slots: empty")

    def note(self, b: int, section: str, text: str, bit: int = 0) -> None:
        """Say why row b is what it is, and which section of the contract wants it so."""
        if self._notes is not None:
            self._notes.notes.append(Note(b, section, text, bit))

    def flag(self, b: int, bit: int, text: str, section: str = "rule 5") -> None:
        """Report for row b, at its slot, or in the last word where it has none; and say why."""
        if self._words is not None:
            s = self.slot[b]
            self._words[-1 if s is None else s] |= bit
        self.note(b, section, text, bit)

    def is_empty(self, b: int, length: int) -> bool:
        """Say whether this length makes row b an empty one; a negative length is a fault too."""
        if length < 0:
            self.flag(b, BAD_COUNT, f"seq_lens[{b}] = {length} is negative: emptied")
        elif length == 0:
            self.note(b, "seq_lens", f"seq_lens[{b}] = 0: empty")
        return length <= 0

    def write_status(self) -> None:
        if self._words is not None:
            _write(self._status, self._words)


def _num_slots(
    rows: int, row_to_slot: Tensor | None, status: Tensor | None, by_slot: int | None = None
) -> int | None:
    """S: from the page tables or the state, else from `status`; None where nothing says."""
    if row_to_slot is None:
        return rows
    if by_slot is None and status is not None:
        return len(status) - 1
    return by_slot


def _slots_with_pages(page_table: Tensor | None, alloc_indptr: Tensor | None) -> int | None:
    return _first_size(page_table) if alloc_indptr is None else len(alloc_indptr) - 1


def _query_tokens(
    rows: _Rows, cu_seqlens_q: Tensor | None, num_tokens: int | None
) -> list[range | None]:
    """Per row the tokens t that are its own; None where the row is empty already.

    The pairs of `cu_seqlens_q` are checked for every live row, with a slot or without. Behind a
    bad pair nothing can be trusted: from it on every live row is flagged and empty.
    """
    cu = _read_optional(cu_seqlens_q)
    spans: list[range | None] = [None] * rows.count
    trusted = True
    for b in range(rows.live):
        first, end = (b, b + 1) if cu is None else (cu[b], cu[b + 1])  # absent: one token a row
        inside = num_tokens is None or end <= num_tokens
        trusted = trusted and 0 <= first <= end and inside
        if not trusted:
            rows.flag(
                b,
                BAD_INDPTR,
                f"cu_seqlens_q[{b}:{b + 2}] = {first} {end} is a bad pair or behind one, "
                f"T = {show(num_tokens)}: emptied",
            )
        elif rows.slot[b] is not None:
            spans[b] = range(first, end)
            rows.note(b, "cu_seqlens_q", f"tokens [{first}, {end}): q = {end - first}")
    return spans


# --- Pages -------------------------------------------------------------------------------------


class _Pages:
    """What the host reserved: pages by slot, padded or ragged or none at all."""

    def __init__(
        self,
        rows: _Rows,
        page_size: int,
        max_seq_len: int | None,
        page_table: Tensor | None,
        num_pages: Tensor | None,
        alloc_pages: Tensor | None,
        alloc_indptr: Tensor | None,
        block_table: Tensor | None,
    ) -> None:
        self.page_size = page_size
        self._rows = rows
        self._limit = INT32_MAX if max_seq_len is None else max_seq_len
        if block_table is not None:  # a length must fit into every list that is written
            self._limit = min(self._limit, block_table.shape[1] * page_size)
        self._table = None if page_table is None else _read_table(page_table)
        self._num_pages = _read_optional(num_pages)
        self._pages = _read_optional(alloc_pages)
        self._indptr = _read_optional(alloc_indptr)

    def allocated(self, b: int) -> list[int] | None:
        """Give the pages of row b, which has a slot; None where there is no table at all."""
        pages = self._find(b)
        self._rows.note(
            b,
            "allocated pages",
            f"allocated pages: {show(pages)}; page_size {self.page_size}, "
            f"length limit {self._limit}: capacity {self.capacity(pages)}",
        )
        return pages

    def _find(self, b: int) -> list[int] | None:
        s = self._rows.slot[b]
        assert s is not None
        if self._table is not None:
            padded = self._table[s]
            if self._num_pages is None:  # everything before the first negative id
                ends = (i for i, page in enumerate(padded) if page < 0)
                return padded[: next(ends, len(padded))]
            told = self._num_pages[s]
            count = _clamp(told, 0, len(padded))
            if count != told:
                text = f"num_pages[{s}] = {told} outside [0, {len(padded)}]: read as {count}"
                self._rows.flag(b, BAD_COUNT, text)
            return padded[:count]
        if self._pages is not None and self._indptr is not None:
            first, end = self._indptr[s], self._indptr[s + 1]
            if not 0 <= first <= end <= len(self._pages):
                self._rows.flag(
                    b,
                    BAD_INDPTR,
                    f"alloc_indptr[{s}:{s + 2}] = {first} {end} is a bad pair, "
                    f"A = {len(self._pages)}: no pages",
                )
                return []
            return self._pages[first:end]
        return None

    def capacity(self, allocated: list[int] | None) -> int:
        """Give the longest length that these pages hold."""
        if allocated is None:
            return self._limit
        return min(len(allocated) * self.page_size, self._limit)


def _write_layout(
    rows: _Rows,
    lengths: list[int],
    spans: Sequence[range | None],
    allocated: Sequence[list[int] | None],
    *,
    page_size: int,
    pad_page: int,
    pad_slot: int,
    pad_seq_len: int,
    cached_lens: Tensor | None,
    use_initial_states: Tensor | None,
    padded_seq_lens: Tensor | None,
    pages_per_seq: Tensor | None,
    last_page_len: Tensor | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
) -> None:
    """Write all that follows from the lengths; a length of 0 is an empty row.

    `lengths` is updated: where `kv_indices` is too small, its last rows are emptied.
    """
    used = [-(-length // page_size) for length in lengths]  # ceil

    # The cut. Rows behind must at least be able to list their one pad page, and the sums are
    # those of the whole batch: a short row behind a long one does not slip in.
    size = None if kv_indices is None else len(kv_indices)
    listed, cut = 0, False
    for b in range(rows.count):
        listed += used[b] if lengths[b] > 0 else pad_seq_len
        needed = listed + pad_seq_len * (rows.count - 1 - b)
        cut = cut or (size is not None and needed > size)
        if cut and lengths[b] > 0:
            text = f"kv_indices holds {size} pages, {needed} are needed up to this row: emptied"
            rows.flag(b, OVERFLOW, text, "rule 6")
            lengths[b] = used[b] = 0

    # Negative ids among the used pages, as far as an output makes us look at them.
    for b, length in enumerate(lengths):
        span, pages = spans[b] or EMPTY_SPAN, allocated[b]
        if length == 0 or pages is None:
            continue
        first_looked_at = used[b]
        if kv_indices is not None or block_table is not None:
            first_looked_at = 0
        elif slot_mapping is not None and len(span) > 0:
            first_looked_at = (length - len(span)) // page_size
        looked_at = pages[first_looked_at : used[b]]
        if any(page < 0 for page in looked_at):
            rows.flag(b, BAD_PAGE, f"a negative id among used pages: {show(looked_at)}")

    def page_ids(b: int) -> list[int]:
        """List the ids of row b: a pad page where an id is negative, or the row is empty."""
        pages = allocated[b]
        if lengths[b] == 0 or pages is None:
            return [pad_page] * pad_seq_len
        return [page if page >= 0 else pad_page for page in pages[: used[b]]]

    count = [used[b] if length > 0 else pad_seq_len for b, length in enumerate(lengths)]
    indptr = list(accumulate(count, initial=0))
    _write(pages_per_seq, count)
    _write(kv_indptr, indptr)
    _write(
        last_page_len,
        [(length - 1) % page_size + 1 if length > 0 else pad_seq_len for length in lengths],
    )
    _write(padded_seq_lens, [max(length, pad_seq_len) for length in lengths])
    cached = [
        length - len(span or EMPTY_SPAN) if length > 0 else 0
        for length, span in zip(lengths, spans, strict=True)
    ]
    _write(cached_lens, cached)
    if use_initial_states is not None:
        use_initial_states.copy_(torch.tensor(cached) > 0)

    ids = [page_ids(b) for b in range(rows.count)]
    for b, length in enumerate(lengths):
        if length > 0:
            pages = None if allocated[b] is None else ids[b]
            rows.note(
                b,
                "used pages",
                f"length {length}, cached {cached[b]}: used pages {count[b]}, "
                f"kv_indptr {indptr[b]} to {indptr[b + 1]}, their ids {show(pages)}",
            )
        elif pad_seq_len:
            rows.note(b, "rule 4", f"an empty row lists pad_page, {pad_page}")

    if kv_indices is not None:
        every = [page for row in ids for page in row]
        _write(kv_indices, every + [pad_page] * (len(kv_indices) - len(every)))

    if block_table is not None:
        width = block_table.shape[1]
        _write_table(block_table, [(row + [pad_page] * width)[:width] for row in ids])

    if slot_mapping is not None:
        slots = [pad_slot] * len(slot_mapping)
        for b, length in enumerate(lengths):
            owned, pages = spans[b], allocated[b]
            if length == 0 or pages is None or not owned:
                continue
            first = length - len(owned)
            for j, t in enumerate(owned):
                index = first + j  # the token's cache index
                page = pages[index // page_size]
                if page >= 0:
                    slots[t] = page * page_size + index % page_size
            own = show(slots[owned.start : owned.stop])
            rows.note(b, "slot_mapping", f"cache indices [{first}, {length}) are in slots {own}")
        _write(slot_mapping, slots)


# --- The operations ----------------------------------------------------------------------------


def advance(
    num_accepted: Tensor | None,
    seq_lens: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    max_accepted: int | None = None,
    seq_len_bias: int = 0,
    position_bias: int = 0,
    count_index: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_seq_len: int = 0,
    position_ids: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    position_ids_out: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    padded_seq_lens: Tensor | None = None,
    pages_per_seq: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Fast-forward or rewind rows that the host staged: the meaning of `specmeta.advance`.

    Shapes, dtypes and what is mutated are those of `specmeta.advance`; see the contract, section
    "advance".

    Examples
    --------
    >>> seq_lens = torch.tensor([32])
    >>> kv_indices = torch.zeros(3, dtype=torch.int32)
    >>> advance(torch.tensor([1]), seq_lens, page_size=32,
    ...         page_table=torch.tensor([[5, 6]], dtype=torch.int32), kv_indices=kv_indices)
    >>> seq_lens.tolist(), kv_indices.tolist()
    ([33], [5, 6, 0])
    """
    num_tokens = _first_size(position_ids, position_ids_out, slot_mapping)  # the last may be longer
    with_pages = _slots_with_pages(page_table, alloc_indptr)
    num_slots = _num_slots(len(seq_lens), row_to_slot, status, with_pages)
    rows = _Rows(len(seq_lens), num_rows, row_to_slot, num_slots, status)
    spans = _query_tokens(rows, cu_seqlens_q, num_tokens)
    pages = _Pages(
        rows, page_size, max_seq_len, page_table, num_pages, alloc_pages, alloc_indptr, block_table
    )
    counts = _read_optional(num_accepted, COUNT_LIMIT)
    index = _read_optional(count_index)
    staged = _read(seq_lens, COUNT_LIMIT)

    lengths = [0] * rows.count
    steps = [0] * rows.count  # what a position moves by
    allocated: list[list[int] | None] = [None] * rows.count
    for b, span in enumerate(spans):
        if span is None or rows.is_empty(b, staged[b]):
            continue
        allocated[b] = pages.allocated(b)

        k = rows.slot[b] if index is None else index[b]
        assert k is not None
        inc = 0
        if counts is None:
            inc, steps[b] = seq_len_bias, position_bias
            rows.note(b, "advance", f"no num_accepted: seq_len_bias {inc}")
        elif 0 <= k < len(counts):
            c = counts[k]
            if max_accepted is not None and not 0 <= c <= max_accepted:
                told, c = c, _clamp(c, 0, max_accepted)
                text = f"num_accepted[{k}] = {told} outside [0, {max_accepted}]: read as {c}"
                rows.flag(b, BAD_COUNT, text)
            inc, steps[b] = c + seq_len_bias, c + position_bias
            text = f"num_accepted[{k}] = {c}, + seq_len_bias {seq_len_bias} = {inc}"
            rows.note(b, "advance", text)
        elif k == -1:
            rows.note(b, "advance", f"count_index[{b}] = -1: a context row, which stands still")
        else:
            rows.flag(b, BAD_SLOT, f"count {k} of {len(counts)}: the row stands still")

        raw, capacity = staged[b] + inc, pages.capacity(allocated[b])
        said = f"length {staged[b]} + {inc} = {raw}"
        if raw < len(span) or raw < 0:
            rows.flag(b, UNDERFLOW, f"{said}, below q = {len(span)}: emptied")
        elif raw > capacity:
            rows.flag(b, OVERFLOW, f"{said}, above capacity {capacity}: emptied")
        else:
            text = f"{said}: at least q = {len(span)}, at most capacity {capacity}"
            rows.note(b, "advance", text)
            lengths[b] = raw

    _write_layout(
        rows,
        lengths,
        spans,
        allocated,
        page_size=page_size,
        pad_page=pad_page,
        pad_slot=pad_slot,
        pad_seq_len=pad_seq_len,
        cached_lens=cached_lens,
        use_initial_states=use_initial_states,
        padded_seq_lens=padded_seq_lens,
        pages_per_seq=pages_per_seq,
        last_page_len=last_page_len,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        block_table=block_table,
        slot_mapping=slot_mapping,
    )
    _write(seq_lens if seq_lens_out is None else seq_lens_out, lengths)
    moved = position_ids if position_ids_out is None else position_ids_out
    if moved is not None:
        last_position = (INT32_MAX if max_seq_len is None else max_seq_len) - 1
        old = _read_optional(position_ids)
        new = [0] * len(moved)
        for b, span in enumerate(spans):
            if lengths[b] > 0 and span:
                for j, t in enumerate(span):
                    # Without positions, the cache index.
                    first = lengths[b] - len(span)
                    position = first + j if old is None else old[t] + steps[b]
                    new[t] = _clamp(position, 0, last_position)
                own = show(new[span.start : span.stop])
                rows.note(b, "advance", f"position_ids[{span.start}:{span.stop}] = {own}")
        _write(moved, new)
    rows.write_status()


def stage(
    committed_lens: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    limit_lens: Tensor | None = None,
    known_lens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    query_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_token: int = 0,
    pad_seq_len: int = 0,
    cu_seqlens_q: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    padded_seq_lens: Tensor | None = None,
    position_ids: Tensor | None = None,
    input_ids: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    pages_per_seq: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Lay out the rows of a step from the slots' state: the meaning of `specmeta.stage`.

    Shapes, dtypes and what is mutated are those of `specmeta.stage`; see the contract, section
    "stage".

    Examples
    --------
    >>> seq_lens, cu = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    >>> stage(torch.tensor([4]), known_lens=torch.tensor([5]), num_drafts=torch.tensor([2]),
    ...       page_size=4, cu_seqlens_q=cu, seq_lens=seq_lens)
    >>> seq_lens.tolist(), cu.tolist()
    ([7], [0, 3])
    """
    by_row = _first_size(
        row_to_slot,
        query_lens,
        seq_lens,
        cached_lens,
        padded_seq_lens,
        num_draft_tokens,
        pages_per_seq,
        last_page_len,
        block_table,
    )
    by_row_and_one = _first_size(cu_seqlens_q, kv_indptr)
    if by_row is None:
        by_row = len(committed_lens) if by_row_and_one is None else by_row_and_one - 1
    num_tokens = _first_size(position_ids, input_ids, slot_mapping)  # the last may be longer
    rows = _Rows(by_row, num_rows, row_to_slot, len(committed_lens), status)
    pages = _Pages(
        rows, page_size, max_seq_len, page_table, num_pages, alloc_pages, alloc_indptr, block_table
    )
    committed = _read(committed_lens, COUNT_LIMIT)
    limit = _read_optional(limit_lens, COUNT_LIMIT)
    known = _read_optional(known_lens, COUNT_LIMIT)
    drafts = _read_optional(num_drafts, COUNT_LIMIT)
    asked = _read_optional(query_lens, COUNT_LIMIT)
    ledger = None if tokens is None else _read_table(tokens)

    token_buffer = INT32_MAX if num_tokens is None else num_tokens
    cu = [0]
    first_index = [0] * rows.count  # c, the cache index of the row's first query token
    spans: list[range | None] = [None] * rows.count
    lengths = [0] * rows.count
    draft_counts = [0] * rows.count
    allocated: list[list[int] | None] = [None] * rows.count
    for b, s in enumerate(rows.slot):
        cu.append(cu[b])  # an empty row repeats the value
        if s is None:
            continue
        limit_len = None if limit is None else limit[s]
        query_len = None if asked is None else asked[b]
        c = committed[s] if limit_len is None else min(committed[s], limit_len)
        nd = 0 if drafts is None else drafts[s]
        q = COUNT_LIMIT if query_len is None else query_len
        if c < 0 or nd < 0 or q < 0:
            rows.flag(
                b,
                BAD_COUNT,
                f"negative among c = {c}, num_drafts = {nd}, "
                f"query_lens = {show(query_len)}: emptied",
            )
            continue
        rows.note(
            b,
            "stage",
            f"c = {c} (committed_lens {committed[s]}, limit_lens {show(limit_len)}), "
            f"num_drafts {nd}",
        )
        if query_len is not None:
            rows.note(b, "stage", f"query_lens[{b}] = {query_len}")
        if known is not None:  # no more than there are tokens, drafts included
            there = max(known[s] - c + nd, 0)
            rows.note(
                b,
                "stage",
                f"known_lens[{s}] - c + num_drafts = {known[s]} - {c} + {nd}, at least 0: {there}",
            )
            q = min(q, there)

        allocated[b] = pages.allocated(b)
        room = {"pages": pages.capacity(allocated[b]) - c, "token buffer": token_buffer - cu[b]}
        if tokens is not None:
            room["ledger"] = tokens.shape[1] - c
        scarce = min(room, key=room.__getitem__)
        most = max(room[scarce], 0)
        if q > most:
            rows.flag(b, OVERFLOW, f"{q} query tokens, room for {most}: {scarce}")
            q = most

        cu[b + 1] = cu[b] + q
        if q == 0:
            rows.note(b, "stage", "q = 0: empty")
            continue
        first_index[b] = c
        spans[b] = range(cu[b], cu[b + 1])
        lengths[b] = c + q
        if known is not None:
            draft_counts[b] = max(q - max(known[s] - c, 0), 0)
        rows.note(
            b,
            "stage",
            f"tokens [{cu[b]}, {cu[b + 1]}): q = {q}, {draft_counts[b]} of them drafts; "
            f"length {c} + {q} = {lengths[b]}",
        )

    _write_layout(
        rows,
        lengths,
        spans,
        allocated,
        page_size=page_size,
        pad_page=pad_page,
        pad_slot=pad_slot,
        pad_seq_len=pad_seq_len,
        cached_lens=cached_lens,
        use_initial_states=use_initial_states,
        padded_seq_lens=padded_seq_lens,
        pages_per_seq=pages_per_seq,
        last_page_len=last_page_len,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        block_table=block_table,
        slot_mapping=slot_mapping,
    )
    _write(cu_seqlens_q, cu)  # rows that kv_indices cut off keep their tokens, as padding
    _write(seq_lens, lengths)
    _write(
        num_draft_tokens,
        [n if length > 0 else 0 for n, length in zip(draft_counts, lengths, strict=True)],
    )
    positions = [0] * (num_tokens or 0)
    ids = [pad_token] * (num_tokens or 0)
    for b, s in enumerate(rows.slot):
        if num_tokens is None or s is None or lengths[b] == 0:
            continue
        c = first_index[b]
        for j, t in enumerate(spans[b] or EMPTY_SPAN):
            positions[t] = c + j
            if ledger is not None:
                ids[t] = ledger[s][c + j]
        if ledger is not None:
            own = show(ledger[s][c : lengths[b]])
            rows.note(b, "stage", f"input_ids = tokens[{s}, {c}:{lengths[b]}] = {own}")
    _write(position_ids, positions)
    _write(input_ids, ids)
    rows.write_status()


def _accept(
    emit: Callable[[int, int, int], list[int]],
    rows: _Rows,
    num_tokens: int | None,
    max_draft_len: int | None,
    *,
    input_ids: Tensor | None,
    cu_seqlens_q: Tensor | None,
    num_draft_tokens: Tensor | None,
    position_ids: Tensor | None,
    seq_lens: Tensor | None,
    pad_token: int,
    committed_lens: Tensor | None,
    known_lens: Tensor | None,
    tokens: Tensor | None,
    num_drafts: Tensor | None,
    num_accepted: Tensor | None,
    num_rejected: Tensor | None,
    num_sampled: Tensor | None,
    seq_lens_out: Tensor | None,
    next_tokens: Tensor | None,
    token_indices: Tensor | None,
    accepted_tokens: Tensor | None,
    draft_input_ids: Tensor | None,
    last_position_ids: Tensor | None,
) -> None:
    """Do what both ways of acceptance share.

    `emit(b, base, nd)` gives the ids that row b emits, accepted drafts and then the bonus, where
    `base` is the token in front of its `nd` drafts; none where the step is void.
    """
    spans = _query_tokens(rows, cu_seqlens_q, num_tokens)
    cu = list(range(rows.count + 1)) if cu_seqlens_q is None else _read(cu_seqlens_q)
    drafted = _read_optional(num_draft_tokens, COUNT_LIMIT)
    lengths = _read_optional(seq_lens, COUNT_LIMIT)
    committed = _read_optional(committed_lens)
    known = _read_optional(known_lens)
    drafts = _read_optional(num_drafts)
    ledger = None if tokens is None else _read_table(tokens)
    inputs = _read_optional(input_ids)
    positions = _read_optional(position_ids)

    # An empty row's results. Its next token goes into an embedding and its index into a gather:
    # both must be valid ones.
    last_token = max(cu[-1] if num_tokens is None else num_tokens, 1) - 1
    accepted = [0] * rows.count
    rejected = [0] * rows.count
    sampled = [0] * rows.count
    kept = [0] * rows.count
    nexts = [pad_token] * rows.count
    indices = [_clamp(cu[b], 0, last_token) for b in range(rows.count)]
    emitted: list[list[int]] = [[] for _ in range(rows.count)]
    last_positions = [0] * rows.count
    draft_inputs = [pad_token] * (num_tokens or 0)

    for b, span in enumerate(spans):
        if not span:  # no slot, a bad pair, or no tokens
            continue
        if lengths is not None:
            if rows.is_empty(b, lengths[b]):
                continue
            if lengths[b] < len(span):
                text = f"seq_lens[{b}] = {lengths[b]}, below q = {len(span)}: emptied"
                rows.flag(b, UNDERFLOW, text)
                continue

        most = len(span) - 1  # the row's first token is never a draft
        if max_draft_len is not None:
            most = min(most, max_draft_len)
        nd = most if drafted is None else _clamp(drafted[b], 0, most)
        if drafted is not None and nd != drafted[b]:
            text = f"num_draft_tokens[{b}] = {drafted[b]} outside [0, {most}]: read as {nd}"
            rows.flag(b, BAD_COUNT, text)
        base = span.stop - 1 - nd
        rows.note(b, "accept_*", f"drafts: {nd}, behind token {base}")

        ids = emit(b, base, nd)
        void = not ids
        a = 0 if void else len(ids) - 1
        following = pad_token if void else ids[-1]

        chunk = False
        s = rows.slot[b]
        assert s is not None
        if (
            lengths is not None
            and committed is not None
            and known is not None
            and ledger is not None
        ):
            ledger_len = len(ledger[s])
            now_committed = lengths[b] - (nd - a)
            place = f"tokens[{s}, {now_committed}]"  # the next token's
            chunk = now_committed < known[s]
            if chunk:  # of a longer prompt: the next token is known, what the model says is not it
                ids = []
                committed[s] = now_committed
                rows.note(
                    b,
                    "accept_*",
                    f"committed {now_committed} < known_lens[{s}] = {known[s]}: "
                    "a chunk of a prompt, which emits nothing",
                )
                if now_committed < ledger_len:
                    following = ledger[s][now_committed]
                    rows.note(b, "accept_*", f"next = {place} = {following}")
                else:
                    text = f"{place} is past its {ledger_len} places: next = pad_token"
                    rows.flag(b, OVERFLOW, text)
                    following = pad_token
            elif not void:
                committed[s] = now_committed
                known[s] = min(now_committed + 1, ledger_len)
                rows.note(
                    b,
                    "accept_*",
                    f"committed_lens[{s}] = {lengths[b]} - {nd - a} = {now_committed}, "
                    f"known_lens[{s}] = {known[s]}",
                )
                if now_committed < ledger_len:
                    ledger[s][now_committed] = following
                    rows.note(b, "accept_*", f"{place} = {following}")
                else:
                    text = f"{place} is past its {ledger_len} places: {following} is not stored"
                    rows.flag(b, OVERFLOW, text)
            if drafts is not None:
                drafts[s] = 0
        if void and not chunk:
            rows.flag(b, BAD_COUNT, "no valid id: the step is void, next = pad_token")

        accepted[b], rejected[b] = a, nd - a
        sampled[b] = len(ids)
        if lengths is not None:
            kept[b] = lengths[b] - (len(span) if void and not chunk else nd - a)
        nexts[b] = following
        indices[b] = base + a
        emitted[b] = ids
        text = f"{a} accepted, {nd - a} rejected, next {following}, token index {base + a}"
        rows.note(b, "accept_*", text)
        if positions is not None:
            last_positions[b] = positions[base + a]
        if inputs is not None and draft_input_ids is not None:
            for t in range(span.start, base + a):
                draft_inputs[t] = inputs[t + 1]
            draft_inputs[base + a] = following

    _write(num_accepted, accepted)
    _write(num_rejected, rejected)
    _write(num_sampled, sampled)
    _write(seq_lens_out, kept)
    _write(next_tokens, nexts)
    _write(token_indices, indices)
    _write(last_position_ids, last_positions)
    _write(draft_input_ids, draft_inputs)
    if accepted_tokens is not None:
        width = accepted_tokens.shape[1]
        _write_table(accepted_tokens, [(ids + [NO_TOKEN] * width)[:width] for ids in emitted])
    if committed is not None and known is not None and ledger is not None:
        _write(committed_lens, committed)
        _write(known_lens, known)
        _write_table(tokens, ledger)
    if drafts is not None:
        _write(num_drafts, drafts)
    rows.write_status()


def _leading_ids(ids: list[int], vocab_size: int) -> int:
    outside = (i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
    return next(outside, len(ids))


def accept_greedy(
    target_tokens: Tensor,
    input_ids: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    position_ids: Tensor | None = None,
    seq_lens: Tensor | None = None,
    pad_token: int = 0,
    committed_lens: Tensor | None = None,
    known_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    num_accepted: Tensor | None = None,
    num_rejected: Tensor | None = None,
    num_sampled: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    next_tokens: Tensor | None = None,
    token_indices: Tensor | None = None,
    accepted_tokens: Tensor | None = None,
    draft_input_ids: Tensor | None = None,
    last_position_ids: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Accept the drafts that the target's argmax confirms: the meaning of `specmeta.accept_greedy`.

    Shapes, dtypes and what is mutated are those of `specmeta.accept_greedy`; see the contract,
    section "accept_greedy, accept_sampled".

    Examples
    --------
    >>> num_accepted, next_tokens = torch.zeros(1, dtype=torch.int32), torch.zeros(1).long()
    >>> accept_greedy(torch.tensor([1, 2, 9, 4]), torch.tensor([7, 1, 2, 3]),
    ...               cu_seqlens_q=torch.tensor([0, 4]),
    ...               num_accepted=num_accepted, next_tokens=next_tokens)
    >>> num_accepted.tolist(), next_tokens.tolist()
    ([2], [9])
    """
    by_row = _first_size(
        row_to_slot,
        num_draft_tokens,
        seq_lens,
        num_accepted,
        num_rejected,
        num_sampled,
        seq_lens_out,
        next_tokens,
        token_indices,
        accepted_tokens,
        last_position_ids,
    )
    if by_row is None and cu_seqlens_q is not None:
        by_row = len(cu_seqlens_q) - 1
    elif by_row is None:  # slot = row
        by_row = _first_size(status) or 0
    num_slots = _num_slots(by_row, row_to_slot, status, _first_size(committed_lens))
    rows = _Rows(by_row, num_rows, row_to_slot, num_slots, status)
    inputs, targets = _read(input_ids), _read(target_tokens)

    def emit(b: int, base: int, nd: int) -> list[int]:
        a = 0
        while a < nd and inputs[base + a + 1] >= 0 and inputs[base + a + 1] == targets[base + a]:
            a += 1
        confirmed = show(inputs[base + 1 : base + 1 + a])
        rows.note(b, "accept_greedy", f"drafts confirmed: {confirmed}")
        if a < nd:
            draft, target = inputs[base + a + 1], targets[base + a]
            text = f"draft {a} is {draft}, the target says {target}: rejected"
            rows.note(b, "accept_greedy", text)
        return targets[base : base + a + 1]

    _accept(
        emit,
        rows,
        len(target_tokens),
        None if accepted_tokens is None else accepted_tokens.shape[1] - 1,
        input_ids=input_ids,
        cu_seqlens_q=cu_seqlens_q,
        num_draft_tokens=num_draft_tokens,
        position_ids=position_ids,
        seq_lens=seq_lens,
        pad_token=pad_token,
        committed_lens=committed_lens,
        known_lens=known_lens,
        tokens=tokens,
        num_drafts=num_drafts,
        num_accepted=num_accepted,
        num_rejected=num_rejected,
        num_sampled=num_sampled,
        seq_lens_out=seq_lens_out,
        next_tokens=next_tokens,
        token_indices=token_indices,
        accepted_tokens=accepted_tokens,
        draft_input_ids=draft_input_ids,
        last_position_ids=last_position_ids,
    )


def accept_sampled(
    sampled_tokens: Tensor,
    *,
    vocab_size: int,
    input_ids: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    position_ids: Tensor | None = None,
    seq_lens: Tensor | None = None,
    pad_token: int = 0,
    committed_lens: Tensor | None = None,
    known_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    num_accepted: Tensor | None = None,
    num_rejected: Tensor | None = None,
    num_sampled: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    next_tokens: Tensor | None = None,
    token_indices: Tensor | None = None,
    accepted_tokens: Tensor | None = None,
    draft_input_ids: Tensor | None = None,
    last_position_ids: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Accept what a sampler emitted: the meaning of `specmeta.accept_sampled`.

    Shapes, dtypes and what is mutated are those of `specmeta.accept_sampled`; see the contract,
    section "accept_greedy, accept_sampled".

    Examples
    --------
    >>> num_accepted, next_tokens = torch.zeros(1, dtype=torch.int32), torch.zeros(1).long()
    >>> accept_sampled(torch.tensor([[5, 6, -1]]), vocab_size=100,
    ...                cu_seqlens_q=torch.tensor([0, 3]),
    ...                num_accepted=num_accepted, next_tokens=next_tokens)
    >>> num_accepted.tolist(), next_tokens.tolist()
    ([1], [6])
    """
    by_row = len(sampled_tokens)
    num_slots = _num_slots(by_row, row_to_slot, status, _first_size(committed_lens))
    rows = _Rows(by_row, num_rows, row_to_slot, num_slots, status)
    sampled = _read_table(sampled_tokens)

    def emit(b: int, base: int, nd: int) -> list[int]:
        ids = sampled[b][: nd + 1]
        valid = _leading_ids(ids, vocab_size)
        text = f"sampled_tokens[{b}, :{nd + 1}] = {show(ids)}: {valid} valid"
        rows.note(b, "accept_sampled", text)
        return ids[:valid]

    _accept(
        emit,
        rows,
        _first_size(input_ids, position_ids, draft_input_ids),
        sampled_tokens.shape[1] - 1,
        input_ids=input_ids,
        cu_seqlens_q=cu_seqlens_q,
        num_draft_tokens=num_draft_tokens,
        position_ids=position_ids,
        seq_lens=seq_lens,
        pad_token=pad_token,
        committed_lens=committed_lens,
        known_lens=known_lens,
        tokens=tokens,
        num_drafts=num_drafts,
        num_accepted=num_accepted,
        num_rejected=num_rejected,
        num_sampled=num_sampled,
        seq_lens_out=seq_lens_out,
        next_tokens=next_tokens,
        token_indices=token_indices,
        accepted_tokens=accepted_tokens,
        draft_input_ids=draft_input_ids,
        last_position_ids=last_position_ids,
    )


def count_sampled(
    sampled_tokens: Tensor,
    *,
    vocab_size: int,
    discarded: Tensor | None = None,
    backup_tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    pad_token: int = 0,
    num_sampled: Tensor | None = None,
    next_tokens: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Count the ids that a sampler left: the meaning of `specmeta.count_sampled`.

    Shapes, dtypes and what is mutated are those of `specmeta.count_sampled`; see the contract,
    section "count_sampled, locate_sampled".

    Examples
    --------
    >>> num_sampled = torch.zeros(2, dtype=torch.int32)
    >>> count_sampled(torch.tensor([[5, 6, -1], [-1, 7, 7]]), vocab_size=100,
    ...               num_sampled=num_sampled)
    >>> num_sampled.tolist()
    [2, 0]
    """
    by_row = len(sampled_tokens)
    num_slots = _num_slots(by_row, row_to_slot, status)
    rows = _Rows(by_row, num_rows, row_to_slot, num_slots, status)
    backups = _read_optional(backup_tokens)

    counts, nexts = [0] * rows.count, [pad_token] * rows.count
    for b, ids in enumerate(_read_table(sampled_tokens)):
        if rows.slot[b] is None:
            continue
        ignored = discarded is not None and bool(discarded[b])
        if ignored:
            rows.note(b, "count_sampled", f"discarded[{b}]: nothing counts")
        else:
            counts[b] = _leading_ids(ids, vocab_size)
            text = f"sampled_tokens[{b}] = {show(ids)}: {counts[b]} valid"
            rows.note(b, "count_sampled", text)
        if counts[b] > 0:
            nexts[b] = ids[counts[b] - 1]
        elif backups is not None and 0 <= backups[b] < vocab_size:
            nexts[b] = backups[b]
            rows.note(b, "count_sampled", f"next = backup_tokens[{b}] = {backups[b]}")
        elif not ignored:
            rows.flag(b, BAD_COUNT, "no valid id: next = pad_token")
    _write(num_sampled, counts)
    _write(next_tokens, nexts)
    rows.write_status()


def locate_sampled(
    num_sampled: Tensor,
    cu_num_draft_tokens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    num_rejected: Tensor | None = None,
    token_indices: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Find the query token that was accepted last: the meaning of `specmeta.locate_sampled`.

    Shapes, dtypes and what is mutated are those of `specmeta.locate_sampled`; see the contract,
    section "count_sampled, locate_sampled".

    Examples
    --------
    >>> token_indices = torch.zeros(1, dtype=torch.int32)
    >>> locate_sampled(torch.tensor([2]), torch.tensor([3]), torch.tensor([0, 4]),
    ...                token_indices=token_indices)
    >>> token_indices.tolist()
    [1]
    """
    by_row = len(num_sampled)
    num_slots = _num_slots(by_row, row_to_slot, status)
    rows = _Rows(by_row, num_rows, row_to_slot, num_slots, status)
    spans = _query_tokens(rows, cu_seqlens_q, None)
    cu = _read(cu_seqlens_q)
    drafted = _read(cu_num_draft_tokens)
    counts = _read(num_sampled, COUNT_LIMIT)

    rejected = [0] * rows.count
    last_token = max(cu[-1], 1) - 1
    indices = [_clamp(cu[b], 0, last_token) for b in range(rows.count)]
    for b, span in enumerate(spans):
        if not span:  # no slot, a bad pair, or no tokens
            continue
        told = drafted[b] - (drafted[b - 1] if b > 0 else 0)
        nd = _clamp(told, 0, len(span) - 1)
        if nd != told:
            text = f"{told} drafts, outside [0, {len(span) - 1}]: read as {nd}"
            rows.flag(b, BAD_COUNT, text)
        if not 0 <= counts[b] <= nd + 1:
            text = f"num_sampled[{b}] = {counts[b]} outside [0, {nd + 1}]: clamped"
            rows.flag(b, BAD_COUNT, text)
        rejected[b] = nd - _clamp(counts[b] - 1, 0, nd)
        indices[b] = span.stop - 1 - rejected[b]
        text = f"{rejected[b]} of {nd} drafts rejected: token index {indices[b]}"
        rows.note(b, "locate_sampled", text)
    _write(num_rejected, rejected)
    _write(token_indices, indices)
    rows.write_status()


def keep_last(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    num_rows: Tensor | int | None = None,
    pad_token: int = 0,
    input_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    query_lens: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    status: Tensor | None = None,
) -> None:
    """Keep the last query token of each row: the meaning of `specmeta.keep_last`.

    Shapes, dtypes and what is mutated are those of `specmeta.keep_last`; see the contract, section
    "keep_last".

    Examples
    --------
    >>> cu_seqlens_q, input_ids = torch.tensor([0, 3, 5]), torch.tensor([7, 8, 9, 4, 5])
    >>> keep_last(cu_seqlens_q, torch.tensor([3, 8]), input_ids=input_ids)
    >>> cu_seqlens_q.tolist(), input_ids.tolist()
    ([0, 1, 2], [9, 5, 0, 0, 0])
    """
    rows = _Rows(len(seq_lens), num_rows, None, None, status)
    spans = _query_tokens(rows, cu_seqlens_q, _first_size(input_ids, position_ids))
    lengths = _read(seq_lens, COUNT_LIMIT)
    inputs = _read_optional(input_ids)

    kept = [0] * rows.count
    ids = [pad_token] * (0 if inputs is None else len(inputs))
    for b, span in enumerate(spans):
        if span is None or rows.is_empty(b, lengths[b]):
            continue
        if lengths[b] > INT32_MAX:
            rows.flag(b, OVERFLOW, f"seq_lens[{b}] = {lengths[b]} > 2^31 - 1: emptied")
        elif lengths[b] < len(span):
            text = f"seq_lens[{b}] = {lengths[b]}, below q = {len(span)}: emptied"
            rows.flag(b, UNDERFLOW, text)
        elif not span:
            rows.note(b, "keep_last", "q = 0: empty")
        else:
            kept[b] = lengths[b]
            text = f"token {span.stop - 1} is kept: cached {lengths[b] - 1}"
            rows.note(b, "keep_last", text)
            if inputs is not None:
                ids[b] = inputs[span.stop - 1]

    cached = [max(length - 1, 0) for length in kept]
    _write(cu_seqlens_q, [min(b, rows.live) for b in range(rows.count + 1)])
    _write(seq_lens, kept)
    _write(input_ids, ids)
    if position_ids is not None:
        _write(position_ids, cached + [0] * (len(position_ids) - rows.count))
    _write(query_lens, [int(b < rows.live) for b in range(rows.count)])
    _write(cached_lens, cached)
    if use_initial_states is not None:
        use_initial_states.copy_(torch.tensor(cached) > 0)
    rows.write_status()


def draft_lists(
    seq_lens: Tensor,
    *,
    page_size: int,
    num_steps: int,
    max_seq_len: int | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_seq_len: int = 0,
    position_ids: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Write the page lists of all draft steps: the meaning of `specmeta.draft_lists`.

    Shapes, dtypes and what is mutated are those of `specmeta.draft_lists`; see the contract,
    section "draft_lists".

    Examples
    --------
    >>> kv_indices = torch.zeros(2, 3, dtype=torch.int32)
    >>> draft_lists(torch.tensor([3]), page_size=4, num_steps=2, kv_indices=kv_indices,
    ...             page_table=torch.tensor([[5, 9]]))
    >>> kv_indices.tolist()
    [[5, 0, 0], [5, 9, 0]]
    """
    with_pages = _slots_with_pages(page_table, alloc_indptr)
    num_slots = _num_slots(len(seq_lens), row_to_slot, status, with_pages)
    rows = _Rows(len(seq_lens), num_rows, row_to_slot, num_slots, status)
    spans = _query_tokens(rows, None, None)
    pages = _Pages(
        rows, page_size, max_seq_len, page_table, num_pages, alloc_pages, alloc_indptr, None
    )
    cached = _read(seq_lens, COUNT_LIMIT)
    allocated: list[list[int] | None] = [None] * rows.count
    for b, s in enumerate(rows.slot):
        if s is not None and not rows.is_empty(b, cached[b]):
            allocated[b] = pages.allocated(b)

    slots = None if slot_mapping is None else slot_mapping.view(rows.count, num_steps)
    for k in range(num_steps):
        lengths = [0] * rows.count
        for b, s in enumerate(rows.slot):
            if s is None or cached[b] <= 0:
                continue
            length, capacity = cached[b] + k + 1, pages.capacity(allocated[b])
            if length > capacity:
                text = f"step {k}: length {length}, above capacity {capacity}: empty in this step"
                rows.flag(b, OVERFLOW, text)
            else:
                rows.note(b, "draft_lists", f"step {k}: length {length}")
                lengths[b] = length
        slots_of_step = None if slots is None else torch.empty(rows.count, dtype=torch.int64)
        _write_layout(
            rows,
            lengths,
            spans,
            allocated,
            page_size=page_size,
            pad_page=pad_page,
            pad_slot=pad_slot,
            pad_seq_len=pad_seq_len,
            cached_lens=None,
            use_initial_states=None,
            padded_seq_lens=None,
            pages_per_seq=None,
            last_page_len=None if last_page_len is None else last_page_len[k],
            kv_indptr=None if kv_indptr is None else kv_indptr[k],
            kv_indices=None if kv_indices is None else kv_indices[k],
            block_table=None,
            slot_mapping=slots_of_step,
        )
        if slots is not None and slots_of_step is not None:
            slots[:, k] = slots_of_step
        if k == 0:
            _write(position_ids, [max(length - 1, 0) for length in lengths])
    rows.write_status()


def map_slots(
    position_ids: Tensor,
    slot_mapping: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_slot: int = -1,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Say where the KV of each token goes: the meaning of `specmeta.map_slots`.

    Shapes, dtypes and what is mutated are those of `specmeta.map_slots`; see the contract, section
    "map_slots".

    Examples
    --------
    >>> slot_mapping = torch.zeros(3, dtype=torch.int64)
    >>> map_slots(torch.tensor([3, 4]), slot_mapping, page_size=4,
    ...           cu_seqlens_q=torch.tensor([0, 2]), page_table=torch.tensor([[5, 9]]))
    >>> slot_mapping.tolist()
    [23, 36, -1]
    """
    by_row = _first_size(row_to_slot)
    if by_row is None and cu_seqlens_q is not None:
        by_row = len(cu_seqlens_q) - 1
    with_pages = _slots_with_pages(page_table, alloc_indptr)
    if by_row is None:  # slot = row
        by_row = with_pages or 0
    num_slots = _num_slots(by_row, row_to_slot, status, with_pages)
    rows = _Rows(by_row, num_rows, row_to_slot, num_slots, status)
    spans = _query_tokens(rows, cu_seqlens_q, len(position_ids))
    pages = _Pages(
        rows, page_size, max_seq_len, page_table, num_pages, alloc_pages, alloc_indptr, None
    )
    positions = _read(position_ids)

    slots = [pad_slot] * len(slot_mapping)
    for b, span in enumerate(spans):
        if not span:
            continue
        allocated = pages.allocated(b)
        capacity = pages.capacity(allocated)
        for t in span:
            p = positions[t]
            if p < 0:
                rows.flag(b, BAD_COUNT, f"position_ids[{t}] = {p} is negative: pad_slot")
            elif p >= capacity:
                text = f"position_ids[{t}] = {p}, not below capacity {capacity}: pad_slot"
                rows.flag(b, OVERFLOW, text)
            elif allocated is not None:
                page = allocated[p // page_size]
                if page < 0:
                    rows.flag(b, BAD_PAGE, f"position_ids[{t}] = {p} is in page {page}: pad_slot")
                else:
                    slots[t] = page * page_size + p % page_size
        own = slice(span.start, span.stop)
        text = f"positions {show(positions[own])} are in slots {show(slots[own])}"
        rows.note(b, "map_slots", text)
    _write(slot_mapping, slots)
    rows.write_status()


def draft_step(
    seq_lens: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    position_ids: Tensor | None = None,
    num_rejected: Tensor | None = None,
    max_rejected: int | None = None,
    draft_tokens: Tensor | None = None,
    draft_index: int = 0,
    shift: int = 1,
    last: bool = False,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_token: int = 0,
    pad_seq_len: int = 0,
    known_lens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    written_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    position_ids_out: Tensor | None = None,
    input_ids: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    padded_seq_lens: Tensor | None = None,
    pages_per_seq: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Record a draft and step to the next one's position: the meaning of `specmeta.draft_step`.

    Shapes, dtypes and what is mutated are those of `specmeta.draft_step`; see the contract,
    section "draft_step".

    Examples
    --------
    >>> seq_lens, position_ids = torch.tensor([12]), torch.tensor([9])
    >>> draft_step(seq_lens, position_ids=position_ids, page_size=4,
    ...            num_rejected=torch.tensor([2], dtype=torch.int32))
    >>> seq_lens.tolist(), position_ids.tolist()
    ([11], [10])
    """
    by_slot = _slots_with_pages(page_table, alloc_indptr)
    if by_slot is None:
        by_slot = _first_size(tokens, written_lens)
    num_slots = _num_slots(len(seq_lens), row_to_slot, status, by_slot)
    rows = _Rows(len(seq_lens), num_rows, row_to_slot, num_slots, status)
    spans = _query_tokens(rows, None, None)
    pages = _Pages(
        rows, page_size, max_seq_len, page_table, num_pages, alloc_pages, alloc_indptr, block_table
    )
    staged = _read(seq_lens, COUNT_LIMIT)
    rejected = _read_optional(num_rejected, COUNT_LIMIT)
    drafted = _read_optional(draft_tokens)
    known = _read_optional(known_lens)
    drafts = _read_optional(num_drafts)
    written = _read_optional(written_lens)
    ledger = None if tokens is None else _read_table(tokens)

    lengths = [0] * rows.count
    allocated: list[list[int] | None] = [None] * rows.count
    for b, s in enumerate(rows.slot):
        if s is None or rows.is_empty(b, staged[b]):
            continue
        allocated[b] = pages.allocated(b)

        r = 0 if rejected is None else rejected[b]
        most = staged[b] - 1 if max_rejected is None else min(max_rejected, staged[b] - 1)
        if not 0 <= r <= most:
            told, r = r, _clamp(r, 0, most)
            text = f"num_rejected[{b}] = {told} outside [0, {most}]: read as {r}"
            rows.flag(b, BAD_COUNT, text)
        kept = staged[b] - r
        rows.note(b, "draft_step", f"kept = {staged[b]} - {r} rejected = {kept}")

        # A draft made in the middle of a prompt is none: there the next token is known. The passes
        # of such a loop have written drafts into the cache where the prompt goes on.
        holds = kept
        if drafted is not None and known is not None and drafts is not None and ledger is not None:
            place = known[s] + draft_index
            if place != kept + shift:
                holds = max(kept - draft_index, 0)
                rows.note(
                    b,
                    "draft_step",
                    f"known_lens[{s}] = {known[s]} + {draft_index} is not {kept} + shift {shift}: "
                    "mid-prompt, no draft",
                )
            elif 0 <= place < len(ledger[s]):
                ledger[s][place] = drafted[b]
                drafts[s] = draft_index + 1
                text = f"tokens[{s}, {place}] = {drafted[b]}, num_drafts[{s}] = {drafts[s]}"
                rows.note(b, "draft_step", text)
            else:
                text = f"tokens[{s}, {place}] is none of its {len(ledger[s])} places: no draft"
                rows.note(b, "draft_step", text)
        if written is not None:
            written[s] = holds  # what the draft's cache holds now
            rows.note(b, "draft_step", f"written_lens[{s}] = {holds}")

        if last:
            rows.note(b, "draft_step", "last: the row stays as it is")
            continue
        capacity = pages.capacity(allocated[b])
        if kept + 1 > capacity:
            text = f"length {kept} + 1, above capacity {capacity}: emptied, drafts no more"
            rows.flag(b, OVERFLOW, text)
        else:
            lengths[b] = kept + 1
            text = f"length {kept} + 1 = {lengths[b]}, at most capacity {capacity}"
            rows.note(b, "draft_step", text)

    if drafts is not None and ledger is not None:
        _write(num_drafts, drafts)
        _write_table(tokens, ledger)
    if written is not None:
        _write(written_lens, written)
    if not last:
        _write_layout(
            rows,
            lengths,
            spans,
            allocated,
            page_size=page_size,
            pad_page=pad_page,
            pad_slot=pad_slot,
            pad_seq_len=pad_seq_len,
            cached_lens=cached_lens,
            use_initial_states=use_initial_states,
            padded_seq_lens=padded_seq_lens,
            pages_per_seq=pages_per_seq,
            last_page_len=last_page_len,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            block_table=block_table,
            slot_mapping=slot_mapping,
        )
        _write(seq_lens if seq_lens_out is None else seq_lens_out, lengths)
        if position_ids is not None:
            last_position = (INT32_MAX if max_seq_len is None else max_seq_len) - 1
            old = _read(position_ids)
            new = [0] * len(old)
            for b, length in enumerate(lengths):
                if length > 0:
                    new[b] = _clamp(old[b] + 1, 0, last_position)
                    text = f"position_ids[{b}] = {old[b]} + 1 = {new[b]}"
                    rows.note(b, "draft_step", text)
            _write(position_ids if position_ids_out is None else position_ids_out, new)
        if input_ids is not None and drafted is not None:
            ids = [pad_token] * len(input_ids)
            for b, length in enumerate(lengths):
                if length > 0:
                    ids[b] = drafted[b]
            _write(input_ids, ids)
    rows.write_status()
