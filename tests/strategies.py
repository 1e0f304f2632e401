"""Hypothesis strategies: arguments for one call of each operation, right ones and corrupted ones.

Hypothesis draws the structure (sizes, the form of the allocation, which tensors are given, how
corrupted the values are) and one seed; the values come from the seed. That is cheap, and shrinking
still finds the smallest structure. A call is a dict of keyword arguments, absent ones left out,
that passes every check made without looking at device values: it must run, whatever is in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specmeta.testing import poisoned

Call = dict[str, Any]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
WILD32 = (-1, -2, INT32_MIN, INT32_MIN + 1, INT32_MAX - 1, INT32_MAX, 2**30, 2**16)
WILD64 = (
    WILD32
    + tuple(
        sign * (2**power + offset)
        for power in (31, 32, 40, 61, 62)
        for offset in (-1, 0, 1, 2)
        for sign in (1, -1)
    )
    + (2**63 - 1, -(2**63))
)

PAGE_SIZES = (4, 1, 2, 3, 7, 16, 64, 2**30, INT32_MAX)
ALLOCATIONS = ("padded", "counted", "ragged", "none")
BY_ROW_OUTPUTS = ("cached_lens", "padded_seq_lens", "pages_per_seq", "last_page_len")


class Source:
    """The structure of one call, and the random values that fill it.

    Parameters
    ----------
    draw
        Hypothesis's.
    repeated_slots
        A slot may stand in several live rows.
    """

    def __init__(self, draw: Callable[[Any], Any], repeated_slots: bool = False) -> None:
        self.rows: int = draw(st.sampled_from((1, 2, 3, 4, 5, 0, 2, 3, 4, 5, 8)))
        self.noise: float = draw(st.sampled_from((0.0, 0.01, 0.05, 0.2)))
        self.by_slot: bool = draw(st.booleans())
        more: int = draw(st.sampled_from((0, 1, 2, 3, -1, -8))) if self.by_slot else 0
        self.slots = max(self.rows + more, 0)
        self.page_size: int = draw(st.sampled_from(PAGE_SIZES))
        self.allocation: str = draw(st.sampled_from(ALLOCATIONS))
        self._given: int = draw(st.integers(0, 2**40 - 1))
        if draw(st.booleans()):
            self._given = -1  # every optional tensor
        self.rng = random.Random(draw(st.integers(0, 2**32 - 1)))
        self.call: Call = {"page_size": self.page_size}
        self._repeated_slots = repeated_slots

    # --- Values

    def given(self) -> bool:
        """Is the next optional argument given?"""
        bit = self._given & 1
        self._given >>= 1
        return bool(bit)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def value(self, low: int, high: int, wild: Sequence[int] = WILD64) -> int:
        """Something in [low, high], or just outside, or far outside."""
        dice = self.rng.random()
        if dice < self.noise:
            return self.rng.choice(wild)
        if dice < 2 * self.noise:
            return self.rng.choice((low - 1, low, high, high + 1))
        return self.rng.randint(low, max(low, high))

    def length(self, capacity: int, low: int = 0) -> int:
        """A length up to the capacity: often near it, or near the end of a page."""
        dice = self.rng.random()
        if dice < self.noise:
            return self.rng.choice(WILD64)
        if dice < 0.4:
            near = capacity
        elif dice < 0.6:
            near = self.rng.randint(0, 4) * self.page_size
        else:
            return self.rng.randint(low, max(low, min(capacity, 4 * self.page_size)))
        off = self.rng.randint(-2, 1 if self.noise else 0)
        return max(low, near + off if self.noise else min(near + off, capacity))

    def token(self) -> int:
        """An id from a vocabulary so small that chance confirms drafts."""
        if self.chance(self.noise):
            return self.rng.choice(WILD64)
        return self.rng.choice((0, 1, 1, 1, 2))

    # --- Tensors

    def tensor(self, values: Sequence[int], either: bool = False) -> Tensor:
        """An int32 tensor, or one that may be int64 as well."""
        dtype = self.index_dtype() if either else torch.int32
        info = torch.iinfo(dtype)
        return torch.tensor([max(info.min, min(v, info.max)) for v in values], dtype=dtype)

    def flags(self, n: int, probability: float) -> Tensor:
        return torch.tensor([self.chance(probability) for _ in range(n)], dtype=torch.bool)

    def table(self, rows: Sequence[Sequence[int]], width: int, either: bool = False) -> Tensor:
        """A 2-D tensor, often a slice of a wider one."""
        flat = self.tensor([v for row in rows for v in row], either)
        table = poisoned(len(rows), width, dtype=flat.dtype, gap=self.gap())
        table.copy_(flat.reshape(len(rows), width))
        return table

    def index_dtype(self) -> torch.dtype:
        return self.rng.choice((torch.int32, torch.int64))

    def gap(self) -> int:
        return self.rng.choice((0, 0, 1, 3))

    # --- Arguments

    def add_output(self, name: str, *shape: int, either: bool = False) -> None:
        if self.given():
            self.call[name] = self.output(*shape, either=either)

    def output(self, *shape: int, either: bool = False) -> Tensor:
        dtype = self.index_dtype() if either else torch.int32
        return poisoned(*shape, dtype=dtype, gap=self.gap() if len(shape) > 1 else 0)

    def add_rows(self) -> None:
        """`row_to_slot`, `num_rows` and `status`; sets `slot_of`, the slot each row works with."""
        rng = self.rng
        self.slot_of: list[int | None] = list(range(self.rows))
        if self.by_slot:
            free = list(range(self.slots))
            rng.shuffle(free)
            wanted: list[int] = []
            for _ in range(self.rows):
                if self._repeated_slots and free and self.chance(0.3):
                    wanted.append(rng.choice(free))
                elif not free or self.chance(0.1):
                    wanted.append(-1)
                elif self.chance(self.noise):
                    wanted.append(rng.choice((*WILD64, self.slots, self.slots + 1)))
                else:
                    wanted.append(free.pop())
            row_to_slot = self.tensor(wanted, either=True)
            self.slot_of = [s if 0 <= s < self.slots else None for s in row_to_slot.tolist()]
            if not self._repeated_slots:
                self._forget_twins(row_to_slot)
            self.call["row_to_slot"] = row_to_slot
        if self.given():
            live = self.value(self.rows, self.rows, WILD32)
            if self.chance(0.3):
                live = rng.randint(0, self.rows)
            form = rng.choice(("int", "tensor"))
            self.call["num_rows"] = live if form == "int" else self.tensor([live])
        if self.given():
            words = self.slots + 1 if self.by_slot else self.rows
            sticky = [self.value(0, 0, (1, 5, 64, -8)) for _ in range(words)]
            self.call["status"] = self.tensor(sticky)

    def _forget_twins(self, row_to_slot: Tensor) -> None:
        """A wild value can be a slot by accident, or saturated to int32: keep each slot once."""
        seen: set[int] = set()
        for b, s in enumerate(row_to_slot.tolist()):
            if s in seen and 0 <= s < self.slots:
                row_to_slot[b], self.slot_of[b] = -1, None
            seen.add(s)

    def add_pages(self) -> None:
        """The allocation, `max_seq_len`, the width of `block_table`; sets `capacity` by slot."""
        rng = self.rng
        width = rng.choice((0, 1, 2, 3, 3, 4, 4, 4))
        counts = [rng.randint(min(width, 1), width) for _ in range(self.slots)]
        counts = [0 if self.chance(0.05) else n for n in counts]
        self.most_pages = width * self.rows

        def page(negative: float) -> int:
            if self.chance(negative):
                return rng.choice((-1, -7, INT32_MIN))
            return INT32_MAX if self.chance(self.noise / 4) else rng.randint(0, 99)

        if self.allocation == "padded":
            rows = []
            for n in counts:
                stale = [page(0.5) for _ in range(width)]
                rows.append(([page(0) for _ in range(n)] + [-1] + stale)[:width])
            self.call["page_table"] = self.table(rows, width)
        elif self.allocation == "counted":
            rows = [[page(2 * self.noise) for _ in range(width)] for _ in counts]
            self.call["page_table"] = self.table(rows, width)
            told = [n if self.chance(1 - self.noise) else self.value(0, width) for n in counts]
            self.call["num_pages"] = self.tensor(told)
        elif self.allocation == "ragged":
            first = rng.randint(0, 2)
            indptr = [first + sum(counts[:s]) for s in range(self.slots + 1)]
            size = indptr[-1] + rng.randint(0, 2)
            if self.slots > 0 and self.chance(4 * self.noise):
                indptr[rng.randint(0, self.slots)] = self.value(0, size)
            self.call["alloc_pages"] = self.tensor([page(2 * self.noise) for _ in range(size)])
            self.call["alloc_indptr"] = self.tensor(indptr)
            self.most_pages = max(self.most_pages, size)

        limit = INT32_MAX
        if self.given():
            most = width * self.page_size
            limit = rng.choice((rng.randint(1, 12), most, most, most + 1, max(most - 1, 1)))
            limit = max(limit, 1)
            limit = self.call["max_seq_len"] = min(limit, INT32_MAX)
        self.block_width = None
        if self.given() and self.allocation != "none" and self.chance(0.7):
            self.block_width = rng.choice((width, width, width + 1, rng.randint(0, width)))
            limit = min(limit, self.block_width * self.page_size)
        self.capacity = [limit] * self.slots
        if self.allocation != "none":
            self.capacity = [min(limit, n * self.page_size) for n in counts]

    def row_capacity(self, b: int) -> int:
        s = self.slot_of[b]
        return 12 if s is None else self.capacity[s]

    def add_query_tokens(self) -> None:
        """`cu_seqlens_q`; sets `num_tokens` and `query_lens`, what each row owns."""
        rng = self.rng
        self.query_lens = [1] * self.rows
        self.num_tokens = self.rows + rng.choice((0, 0, 1, 3))
        if self.given():
            self.query_lens = [rng.choice((0, 1, 1, 2, 3, 3, 4, 5)) for _ in range(self.rows)]
            first = rng.choice((0, 0, 0, 1))
            cu = [first + sum(self.query_lens[:b]) for b in range(self.rows + 1)]
            self.num_tokens = cu[-1] + rng.choice((0, 0, 1, 3))
            if self.chance(self.noise):
                cu[rng.randint(0, self.rows)] = self.value(0, self.num_tokens)
            elif self.chance(self.noise):
                self.num_tokens = rng.randint(0, self.num_tokens)
            self.call["cu_seqlens_q"] = self.tensor(cu)

    def add_layout(self) -> None:
        """Padding values and the outputs that follow from the lengths, but for `slot_mapping`."""
        self.add_padding()
        for name in BY_ROW_OUTPUTS:
            self.add_output(name, self.rows, either=name == "padded_seq_lens")
        if self.given():
            self.call["use_initial_states"] = poisoned(self.rows, dtype=torch.bool)
        self.add_output("kv_indptr", self.rows + 1)
        if self.block_width is not None:
            self.call["block_table"] = self.output(self.rows, self.block_width)
        if self.given() and self.allocation != "none" and self.chance(0.7):
            self.call["kv_indices"] = self.output(self.kv_capacity())

    def add_padding(self) -> None:
        if self.given():
            self.call["pad_page"] = self.rng.choice((99999, -3, INT32_MAX, INT32_MIN))
        if self.given():
            self.call["pad_slot"] = self.rng.choice((0, -2, 2**62, -(2**63)))
        if self.given():
            self.call["pad_seq_len"] = 1

    def kv_capacity(self) -> int:
        least = self.rows if "pad_seq_len" in self.call else 0
        enough = self.most_pages + least
        return self.rng.choice((enough, enough, enough + 3, self.rng.randint(least, enough)))

    def add_slot_mapping(self) -> None:
        if self.given() and self.allocation != "none":
            self.call["slot_mapping"] = self.slots_of_tokens()

    def slots_of_tokens(self) -> Tensor:
        """T, or more; where no other tensor is by token, this is T."""
        more = self.rng.choice((0, 0, 1, 3))
        return poisoned(self.num_tokens + more, dtype=torch.int64)

    def add_pad_token(self) -> None:
        if self.given():
            self.call["pad_token"] = self.rng.choice((7, -1, INT32_MAX, INT32_MIN))

    def position(self) -> int:
        limit = self.call.get("max_seq_len", INT32_MAX)
        return self.rng.choice((self.value(0, 50), self.value(limit - 3, limit + 3)))


@st.composite
def advance_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `advance`."""
    source = Source(draw, repeated_slots=True)
    call, rng = source.call, source.rng
    source.add_rows()
    source.add_pages()
    source.add_query_tokens()
    source.add_layout()

    for name in ("seq_len_bias", "position_bias"):
        if source.given():
            call[name] = rng.choice((-1, 1, -4, 3))
            if source.chance(source.noise):
                call[name] = rng.choice((2**40, -(2**40), 2**31))
    if source.given():
        call["max_accepted"] = rng.choice((4, 8, 0, INT32_MAX, 2**40))

    index: list[int | None] = list(source.slot_of)
    num_counts = source.slots + rng.choice((0, 0, 1))
    if source.given():
        num_counts = rng.randint(0, source.rows + 1)
        index = [source.value(-1, num_counts - 1, WILD32) for _ in range(source.rows)]
        call["count_index"] = source.tensor([i for i in index if i is not None], either=True)
    elif source.chance(source.noise):
        num_counts = rng.randint(0, source.slots)
    low = 0 if "max_accepted" in call else -5
    counts = [source.value(low, 6) for _ in range(num_counts)]
    call["num_accepted"] = source.tensor(counts, either=True)

    lengths = []
    for b, k in enumerate(index):
        goal = source.length(source.row_capacity(b), low=source.query_lens[b])
        moves = k is not None and 0 <= k < num_counts
        inc = counts[k] + call.get("seq_len_bias", 0) if moves and k is not None else 0
        plain = abs(inc) < 2**31  # a wild count hits whatever length there is
        lengths.append(0 if source.chance(0.1) else goal - inc if plain else goal)
    call["seq_lens"] = source.tensor(lengths, either=True)
    if source.given() and source.chance(0.5):
        call["seq_lens_out"] = source.output(source.rows, either=True)
    if source.given():
        positions = [source.position() for _ in range(source.num_tokens)]
        call["position_ids"] = source.tensor(positions, either=True)
        if source.chance(0.5):
            source.add_output("position_ids_out", source.num_tokens, either=True)
    else:
        source.add_output("position_ids_out", source.num_tokens, either=True)
    source.add_slot_mapping()
    return call


@st.composite
def stage_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `stage`."""
    source = Source(draw)
    call, rng = source.call, source.rng
    source.add_rows()
    source.add_pages()
    source.add_layout()
    slots = range(source.slots)

    ledger_len = rng.randint(0, 20) if source.given() else None
    if ledger_len is not None:
        rows = [[source.token() + 10 * i for i in range(ledger_len)] for _ in slots]
        call["tokens"] = source.table(rows, ledger_len, either=True)
    room = [min(c, INT32_MAX if ledger_len is None else ledger_len) for c in source.capacity]
    committed = [max(source.length(room[s]) - rng.randint(0, 4), 0) for s in slots]
    committed = [source.value(c, c, WILD32) for c in committed]
    call["committed_lens"] = source.tensor(committed)
    if source.given():
        call["limit_lens"] = source.tensor([source.value(c - 2, c + 2, WILD32) for c in committed])
    known = source.given()
    if known:
        call["known_lens"] = source.tensor([source.value(c - 1, c + 4, WILD32) for c in committed])
        if source.given():
            call["num_drafts"] = source.tensor([source.value(0, 4, WILD32) for _ in slots])
    if source.given() or not known:
        asked = [source.value(0, 5, WILD32) for _ in range(source.rows)]
        call["query_lens"] = source.tensor(asked)

    source.num_tokens = rng.randint(0, 3 * source.rows + 2)
    source.add_pad_token()
    source.add_output("cu_seqlens_q", source.rows + 1)
    source.add_output("seq_lens", source.rows, either=True)
    source.add_output("position_ids", source.num_tokens, either=True)
    if ledger_len is not None:
        source.add_output("input_ids", source.num_tokens, either=True)
    if known:
        source.add_output("num_draft_tokens", source.rows)
    source.add_slot_mapping()
    return call


def _add_acceptance(source: Source, most_drafts: int | None) -> None:
    """What the two ways of acceptance share. `most_drafts` is None where there is no limit."""
    call, rng, rows = source.call, source.rng, source.rows
    del call["page_size"]
    if source.given():
        upper = [max(q - 1, 0) for q in source.query_lens]
        if most_drafts is not None:
            upper = [min(u, most_drafts) for u in upper]
        drafted = [u if source.chance(0.5) else source.value(0, u, WILD32) for u in upper]
        call["num_draft_tokens"] = source.tensor(drafted)
    if source.given():
        positions = [source.value(0, 50) for _ in range(source.num_tokens)]
        call["position_ids"] = source.tensor(positions, either=True)
        source.add_output("last_position_ids", rows, either=True)
    source.add_pad_token()
    with_state = source.given()
    if with_state or source.given():
        ledger_len = rng.randint(0, 12)
        lengths, known = [], [source.value(0, ledger_len, WILD32) for _ in range(source.slots)]
        for b, s in enumerate(source.slot_of):
            q = source.query_lens[b]
            length = q + rng.randint(0, max(ledger_len - q, 0) + 1)
            if source.chance(source.noise):
                length = q - 1
            lengths.append(0 if source.chance(0.05) else source.value(length, length))
            if s is not None and source.chance(0.8):
                known[s] = source.value(length - q, length + 1, WILD32)
        call["seq_lens"] = source.tensor(lengths, either=True)
    if with_state:
        ids = [[source.token() + 10 for _ in range(ledger_len)] for _ in range(source.slots)]
        call["known_lens"] = source.tensor(known)
        committed = [source.value(0, 12, WILD32) for _ in range(source.slots)]
        call["committed_lens"] = source.tensor(committed)
        call["tokens"] = source.table(ids, ledger_len, either=True)
        if source.given():
            drafts = [source.value(0, 4, WILD32) for _ in range(source.slots)]
            call["num_drafts"] = source.tensor(drafts)
    source.add_output("num_accepted", rows, either=True)
    source.add_output("num_rejected", rows)
    source.add_output("num_sampled", rows, either=True)
    source.add_output("next_tokens", rows, either=True)
    source.add_output("token_indices", rows, either=True)
    if "seq_lens" in call:
        source.add_output("seq_lens_out", rows, either=True)
    if "input_ids" in call:
        source.add_output("draft_input_ids", source.num_tokens, either=True)


@st.composite
def accept_greedy_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `accept_greedy`."""
    source = Source(draw)
    call, rng = source.call, source.rng
    source.add_rows()
    source.add_query_tokens()
    targets = [source.token() for _ in range(source.num_tokens)]
    inputs = [source.token() for _ in range(source.num_tokens)]
    for t in range(1, source.num_tokens):
        if source.chance(0.6):
            inputs[t] = targets[t - 1]
    call["target_tokens"] = source.tensor(targets, either=True)
    call["input_ids"] = source.tensor(inputs, either=True)
    most_drafts = None
    if source.given():
        most_drafts = rng.randint(0, 4)
        call["accepted_tokens"] = source.output(source.rows, most_drafts + 1, either=True)
    _add_acceptance(source, most_drafts)
    by_row = {"row_to_slot", "cu_seqlens_q", "num_draft_tokens", "accepted_tokens", "seq_lens"}
    if not by_row & call.keys():
        call["num_accepted"] = source.output(source.rows, either=True)  # something must tell B
    return call


def _sampled_tokens(source: Source, width: int) -> Tensor:
    rng = source.rng
    sampled = []
    for _ in range(source.rows):
        valid = rng.randint(0, width)
        ids = [source.token() for _ in range(valid)]
        sampled.append(ids + [rng.choice((-1, -1, 3)) for _ in range(width - valid)])
    return source.table(sampled, width, either=True)


@st.composite
def accept_sampled_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `accept_sampled`."""
    source = Source(draw)
    call, rng = source.call, source.rng
    source.add_rows()
    source.add_query_tokens()
    call["vocab_size"] = rng.choice((3, 3, 3, 1, 32000, INT32_MAX))
    most_drafts = rng.randint(0, 4)
    call["sampled_tokens"] = _sampled_tokens(source, most_drafts + 1)
    if source.given():
        ids = [source.token() for _ in range(source.num_tokens)]
        call["input_ids"] = source.tensor(ids, either=True)
    if source.given():
        call["accepted_tokens"] = source.output(source.rows, most_drafts + 1, either=True)
    _add_acceptance(source, most_drafts)
    return call


@st.composite
def count_sampled_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `count_sampled`."""
    source = Source(draw, repeated_slots=True)
    call, rng, rows = source.call, source.rng, source.rows
    del call["page_size"]
    source.add_rows()
    call["vocab_size"] = rng.choice((3, 3, 3, 1, 32000, INT32_MAX, 2**40))
    call["sampled_tokens"] = _sampled_tokens(source, rng.choice((1, 2, 3, 4, 5, 0)))
    if source.given():
        call["discarded"] = source.flags(rows, 0.3)
    if source.given():
        call["backup_tokens"] = source.tensor([source.token() for _ in range(rows)], either=True)
    source.add_pad_token()
    source.add_output("num_sampled", rows, either=True)
    source.add_output("next_tokens", rows, either=True)
    return call


@st.composite
def locate_sampled_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `locate_sampled`."""
    source = Source(draw, repeated_slots=True)
    call, rng, rows = source.call, source.rng, source.rows
    del call["page_size"]
    source.add_rows()
    drafts, cu_drafts, cu = [], [0], [rng.choice((0, 0, 0, 1))]
    for _ in range(rows):
        drafts.append(rng.choice((0, 0, 1, 2, 3, 4)))
        cu_drafts.append(cu_drafts[-1] + drafts[-1])
        # A row without tokens has no draft either.
        q = 0 if source.chance(0.1) and not drafts[-1] else drafts[-1] + rng.choice((1, 1, 1, 2, 5))
        cu.append(cu[-1] + q)
    if source.chance(4 * source.noise):
        cu[rng.randint(0, rows)] = source.value(0, cu[-1])
    told = [source.value(n, n, WILD32) for n in cu_drafts[1:]]
    call["num_sampled"] = source.tensor([source.value(0, n + 1) for n in drafts], either=True)
    call["cu_num_draft_tokens"] = source.tensor(told)
    call["cu_seqlens_q"] = source.tensor(cu)
    source.add_output("num_rejected", rows)
    source.add_output("token_indices", rows)
    return call


@st.composite
def keep_last_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `keep_last`."""
    source = Source(draw)
    source.by_slot, source.slots = False, source.rows  # it has no slots
    call, rng, rows = source.call, source.rng, source.rows
    del call["page_size"]
    source.add_rows()
    source.add_query_tokens()
    if "cu_seqlens_q" not in call or source.chance(0.3):  # so few tokens that they move right
        query = source.query_lens = [rng.choice((0, 0, 1, 1, 2)) for _ in range(rows)]
        call["cu_seqlens_q"] = source.tensor([sum(query[:b]) for b in range(rows + 1)])
        source.num_tokens = sum(query)
    tokens = max(source.num_tokens, rows)
    lengths = [source.value(q, q + rng.choice((0, 30))) for q in source.query_lens]
    call["seq_lens"] = source.tensor([0 if source.chance(0.1) else n for n in lengths], either=True)
    if source.given():
        ids = [source.value(10 + t, 10 + t) for t in range(tokens)]
        call["input_ids"] = source.tensor(ids, either=True)
    source.add_pad_token()
    source.add_output("position_ids", tokens, either=True)
    source.add_output("query_lens", rows)
    source.add_output("cached_lens", rows)
    if source.given():
        source.call["use_initial_states"] = poisoned(rows, dtype=torch.bool)
    return call


@st.composite
def map_slots_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `map_slots`."""
    source = Source(draw, repeated_slots=True)
    source.allocation = draw(st.sampled_from(ALLOCATIONS[:-1]))  # it needs one
    call, rng = source.call, source.rng
    source.add_rows()
    source.add_pages()
    source.add_query_tokens()
    positions: list[int] = []
    for b, q in enumerate(source.query_lens):
        first = source.length(source.row_capacity(b), low=q) - q
        positions += [source.value(first + j, first + j) for j in range(q)]
    positions = positions[: source.num_tokens]
    positions += [source.position() for _ in range(source.num_tokens - len(positions))]
    call["position_ids"] = source.tensor(positions, either=True)
    call["slot_mapping"] = source.slots_of_tokens()
    if source.given():
        call["pad_slot"] = rng.choice((0, -2, 2**62, -(2**63)))
    return call


@st.composite
def draft_lists_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `draft_lists`."""
    source = Source(draw, repeated_slots=True)
    call, rng, rows = source.call, source.rng, source.rows
    source.add_rows()
    source.add_pages()
    source.add_padding()
    steps = call["num_steps"] = rng.choice((1, 2, 3, 3, 4, 9))
    lengths = []
    for b in range(rows):
        ahead = rng.randint(0, steps)  # often one of the steps is the first without room
        lengths.append(source.length(source.row_capacity(b), low=ahead) - ahead)
    call["seq_lens"] = source.tensor(lengths, either=True)
    source.add_output("position_ids", rows, either=True)
    source.add_output("last_page_len", steps, rows)
    source.add_output("kv_indptr", steps, rows + 1)
    if source.allocation != "none":
        if source.given():
            call["kv_indices"] = source.output(steps, source.kv_capacity())
        if source.given():
            call["slot_mapping"] = poisoned(rows * steps, dtype=torch.int64)
    return call


@st.composite
def draft_step_calls(draw: Callable[[Any], Any]) -> Call:
    """Arguments of `draft_step`."""
    source = Source(draw)
    call, rng, rows = source.call, source.rng, source.rows
    source.add_rows()
    source.add_pages()
    source.num_tokens = rows + rng.choice((0, 0, 1, 3))
    source.add_layout()

    if source.chance(0.2):
        call["last"] = True
    if source.chance(0.4):
        call["shift"] = 0
    if source.chance(0.6):
        call["draft_index"] = rng.choice((1, 2, 5))
        if source.chance(source.noise):
            call["draft_index"] = INT32_MAX - 1
    if source.given():
        call["max_rejected"] = rng.choice((3, 1, 0, INT32_MAX, 2**40))
    rejected = [0] * rows
    if source.given():
        rejected = [source.value(0, 3, WILD32) for _ in range(rows)]
        call["num_rejected"] = source.tensor(rejected)

    ledger_len = rng.randint(0, 20)
    known = [source.value(0, ledger_len, WILD32) for _ in range(source.slots)]
    lengths = []
    for b, s in enumerate(source.slot_of):
        dice = rng.random()
        if dice < 0.1:
            kept = 0
        elif dice < 0.5:  # the draft is one that the ledger takes
            kept = rng.randint(1, ledger_len + 1)
        else:
            kept = source.length(source.row_capacity(b), low=1) - 1
        plain = 0 <= rejected[b] < 2**31
        lengths.append(kept + rejected[b] if kept > 0 and plain else kept)
        if s is not None and source.chance(0.8):
            known[s] = kept + call.get("shift", 1) - call.get("draft_index", 0)
            known[s] = source.value(known[s], known[s], WILD32)
    call["seq_lens"] = source.tensor(lengths, either=True)

    source.add_pad_token()
    if source.given():
        call["draft_tokens"] = source.tensor([source.token() for _ in range(rows)], either=True)
        source.add_output("input_ids", source.num_tokens, either=True)
        if source.given():
            ids = [[source.token() + 10 for _ in range(ledger_len)] for _ in range(source.slots)]
            call["tokens"] = source.table(ids, ledger_len, either=True)
            call["known_lens"] = source.tensor(known)
            drafts = [source.value(0, 4, WILD32) for _ in range(source.slots)]
            call["num_drafts"] = source.tensor(drafts)
    if source.given():
        written = [source.value(0, 12, WILD32) for _ in range(source.slots)]
        call["written_lens"] = source.tensor(written)
    if source.given() and source.chance(0.5):
        call["seq_lens_out"] = source.output(rows, either=True)
    if source.given():
        positions = [source.position() for _ in range(source.num_tokens)]
        call["position_ids"] = source.tensor(positions, either=True)
        if source.chance(0.5):
            source.add_output("position_ids_out", source.num_tokens, either=True)
    source.add_slot_mapping()
    return call
