"""A toy engine made only of the operations: it notices every wrong length, page, slot or shift.

Its models have no weights. Their paged caches are plain tensors that hold, at the index that
`slot_mapping` names, the token and the position that were written there. Attention gathers what a
row's page list and length say, and the next token is a hash of all that was gathered. So the text
is the greedy one only if every element that was written and read is the right one, and a plain
Python loop over the true sequence (`Greedy`) says what the greedy text is.

`ToyEngine` runs one schedule, drawn from a seed: requests come, get slots and pages, are fed in
chunks, drafted for, verified, cut at their end, and leave; slots and pages are used again at once.
The drafts come from an Eagle head (one model, a second cache over the same pages, inputs shifted by
one) or from a draft model with pages of its own. Three things are checked at every step:

- what was emitted continues the greedy text;
- each draft pass has read exactly the tokens, positions (and hidden states) that it should;
- the ledger, lengths and status by slot are those of the bookkeeping in `Side.expect_...`.

Pages without an owner stay poisoned, which is looked at whenever pages change hands.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import specmeta
from specmeta import batch as batch_module

VOCAB = 50
END = 3  # ends a text
MASK = 2**63 - 1
POISON = -7_777_777  # what a cache holds where nothing was written
GARBAGE = 0x7B7B7B7B  # what an output holds before it is written
MOST_STEPS = 600
OVERFLOW, BAD_COUNT = int(specmeta.Status.OVERFLOW), int(specmeta.Status.BAD_COUNT)

LAYOUT = (
    "cached_lens",
    "padded_seq_lens",
    "pages_per_seq",
    "last_page_len",
    "kv_indptr",
    "kv_indices",
    "block_table",
)
READERS = {  # what three kinds of attention kernels take to find a row's tokens
    "list": ("kv_indptr", "kv_indices", "last_page_len"),
    "table": ("block_table",),
    "cached": ("cached_lens", "pages_per_seq", "kv_indptr", "kv_indices"),
}


def require(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def require_equal(what: str, got: object, want: object) -> None:
    if got != want:
        raise AssertionError(f"{what}\n  is       {got}\n  expected {want}")


@contextmanager
def using(ops: Any) -> Iterator[None]:
    """Run engines on other operations: the reference, or broken ones."""
    with mock.patch.object(batch_module, "ops", ops):
        yield


# --- The models --------------------------------------------------------------------------------


def mix(state: int, token: int, position: int) -> int:
    """The model's state after one more token."""
    state ^= (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F) & MASK
    state = (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ (state >> 32)


def choose(state: int) -> int:
    """The model's next token."""
    return (state * 0x94D049BB133111EB & MASK) // 2**33 % VOCAB


class Greedy:
    """The true sequence: a prompt, its greedy text, and the target's state after each token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        self._states: list[int] = []
        self._state = 0

    def _extend(self, length: int) -> None:
        while len(self._states) < length:
            i = len(self._states)
            self._state = mix(self._state, self._tokens[i], i)
            self._states.append(self._state)
            if i + 1 == len(self._tokens):
                self._tokens.append(choose(self._state))

    def tokens(self, end: int, begin: int = 0) -> list[int]:
        self._extend(end)
        return self._tokens[begin:end]

    def states(self, end: int) -> list[int]:
        self._extend(end)
        return self._states[:end]


def draft_token(right: int, read: Sequence[Sequence[int]], skill: int) -> int:
    """A draft: the target's own choice, unless a hash of everything that was read is unlucky."""
    luck = hash(tuple(map(tuple, read))) & MASK
    return right if luck % 100 < skill else luck // 100 % VOCAB


def run_eagle(read: Sequence[Sequence[int]], skill: int) -> tuple[int, int]:
    """Draft and hidden state of the Eagle head, which read (next token, position, target state).

    The newest target state and the token behind it tell what the target will say.
    """
    token, position, state = read[-1]
    hidden = mix(state, token, position + 1)
    return draft_token(choose(hidden), read, skill), hidden


def run_draft_model(read: Sequence[Sequence[int]], skill: int) -> tuple[int, int]:
    """Draft (and no hidden state) of the draft model, which read (token, position)."""
    state = 0
    for token, position in read:
        state = mix(state, token, position)
    return draft_token(choose(state), read, skill), 0


# --- The batch, through plain operations -------------------------------------------------------


class RawBatch(specmeta.BatchMetadata):
    """The same buffers and the plain operations over them, in the other ways of using them.

    Random dtypes, row strides and outputs; pages padded with and without a count, or ragged;
    `row_to_slot` absent, or the batch's own; results out of place; rows moved by `advance`. Outputs
    are filled with garbage before they are written.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        outputs: Sequence[str],
        identity: bool,
        own_rows: bool,
        width: int,
        unused: Sequence[str],
        **sizes: Any,
    ) -> None:
        target = sizes["ledger"]
        if target is not None and own_rows:  # a drafter's BatchMetadata has its target's
            super().__init__(**sizes | {"ledger": None})
            self._target = target
            self.known_lens, self.num_drafts = target.known_lens, target.num_drafts
            self.tokens = target.tokens
        else:
            super().__init__(**sizes)
        self.outputs = outputs
        self.identity = identity
        self.own_rows = own_rows or target is None
        self.unused = unused
        self.pages_by = rng.choice(("count", "search", "list"))
        self.moves_by = rng.choice(("draft_step", "draft_step", "advance"))
        self.out_of_place = rng.random() < 0.3
        self.int_rows = rng.random() < 0.3
        self.max_rejected = rng.choice((None, self.max_draft_len))
        self._rng = rng
        rows, slots = self.query_lens.shape[0], self.page_table.shape[0]

        def either(tensor: Tensor) -> Tensor:
            return tensor.to(rng.choice((torch.int32, torch.int64)))

        def strided(tensor: Tensor) -> Tensor:
            gap = rng.choice((0, 3))
            wide = torch.full((tensor.shape[0], tensor.shape[1] + gap), GARBAGE, dtype=tensor.dtype)
            return wide.to(self.device)[:, : tensor.shape[1]].copy_(tensor)

        for name in (
            *("seq_lens", "padded_seq_lens", "num_accepted", "next_tokens", "accepted_tokens"),
            *("input_ids", "position_ids", "draft_input_ids"),
        ):
            setattr(self, name, either(getattr(self, name)))
        tokens = rows + rng.choice((0, 2))  # the draft loop's buffers may be longer than its rows
        self.draft_ids = either(self.draft_ids.new_zeros(tokens))
        self.draft_position_ids = either(self.draft_ids.new_zeros(tokens))
        self.draft_slot_mapping = self.draft_slot_mapping.new_zeros(tokens)
        self.spare_seq_lens = either(self.seq_lens.clone())
        self.spare_position_ids = either(self.draft_position_ids.clone())
        self.block_table = strided(self.block_table[:, :width])
        self.page_table = strided(self.page_table)
        self.accepted_tokens = strided(self.accepted_tokens)
        self.alloc_pages = self.page_table.new_zeros(slots * self.page_table.shape[1] + 2)
        self.alloc_indptr = self.page_table.new_zeros(slots + 1)
        self.count_index = torch.arange(rows, dtype=torch.int32, device=self.device)
        if target is None:
            self.tokens = strided(either(self.tokens))
        if self.own_rows:
            self.row_to_slot = either(self.row_to_slot.new_full((rows,), -1))
            self.num_rows = self.num_rows.clone()
        self.live = 0

    def set_rows(self, slots: Sequence[int], query_lens: Sequence[int]) -> None:
        self.live = len(slots)
        if self._target is None:
            super().set_rows(slots, query_lens)
            return
        self.set_query_lens(query_lens)
        if self.own_rows:
            self._uploads.send(slots, self.row_to_slot[: len(slots)])
            self.num_rows.fill_(len(slots))

    def _put_pages(self, slot: int, pages: list[int]) -> None:
        super()._put_pages(slot, pages)
        self._hide_pages(slot)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._hide_pages(slot)

    def _hide_pages(self, slot: int) -> None:
        """Put other things where no operation may look, and the ragged list into place."""
        count, width = len(self._pages_of[slot] or []), self.page_table.shape[1]
        if self.pages_by == "count" and count < width:
            ids = [self._rng.choice((-1, 1, GARBAGE)) for _ in range(width - count)]
            self._uploads.send(ids, self.page_table[slot, count:])
        if self.pages_by == "list":
            begin = self._rng.randrange(3)
            ids, ends = [GARBAGE] * begin, [begin]
            for s in range(self.page_table.shape[0]):
                ids += self._pages_of[s] or []
                ends.append(len(ids))
            self._uploads.send(ids, self.alloc_pages[: len(ids)])
            self._uploads.send(ends, self.alloc_indptr)

    def _pages(self) -> dict[str, Any]:
        pages = super()._pages()
        if self.pages_by != "count":
            del pages["num_pages"]
        if self.pages_by == "list":
            del pages["page_table"]
            pages.update(alloc_pages=self.alloc_pages, alloc_indptr=self.alloc_indptr)
        return pages

    def _rows(self) -> dict[str, Any]:
        rows = {"num_rows": self.live if self.int_rows else self.num_rows, "status": self.status}
        if self.identity:
            return {**rows, "status": self.status[:-1]}
        return {**rows, "row_to_slot": self.row_to_slot}

    def _layout(self) -> dict[str, Any]:
        return {name: self._garbage(getattr(self, name)) for name in self.outputs}

    @staticmethod
    def _garbage(tensor: Tensor) -> Tensor:
        return tensor.fill_(GARBAGE)

    def stage(self, num_tokens: int | None = None) -> None:
        target = self._target
        by_token = (self.position_ids, self.input_ids, self.slot_mapping)
        position_ids, input_ids, slot_mapping = (self._garbage(t)[:num_tokens] for t in by_token)
        batch_module.ops.stage(
            self.committed_lens if target is None else self.written_lens,
            limit_lens=None if target is None else target.committed_lens,
            known_lens=self.known_lens,
            num_drafts=self.num_drafts if target is None else None,
            query_lens=self.query_lens,
            tokens=self.tokens,
            cu_seqlens_q=self._garbage(self.cu_seqlens_q),
            seq_lens=self._garbage(self.seq_lens),
            num_draft_tokens=self._garbage(self.num_draft_tokens),
            position_ids=position_ids,
            input_ids=input_ids,
            slot_mapping=slot_mapping,
            pad_token=self._pad_token,
            **self._rows(),
            **self._pages(),
            **self._layout(),
        )

    def _accept(self, num_tokens: int | None) -> dict[str, Any]:
        accept = super()._accept(num_tokens)
        accept["last_position_ids"] = self.draft_position_ids[: self.query_lens.shape[0]]
        for name in (
            *("num_accepted", "num_rejected", "next_tokens", "token_indices"),
            *("accepted_tokens", "draft_input_ids", "last_position_ids"),
        ):
            self._garbage(accept[name])
        return {name: value for name, value in accept.items() if name not in self.unused}

    def _record(self, draft_tokens: Tensor | None, index: int) -> dict[str, Any]:
        eagle = self._target is None
        record = {
            "max_rejected": self.max_rejected,
            "num_rejected": self.num_rejected if eagle and index == 0 else None,
            "draft_index": index,
            "shift": 1 if eagle else 0,
            "written_lens": self.written_lens,
            **self._rows(),
            **self._pages(),
        }
        if draft_tokens is not None:
            record.update(
                draft_tokens=draft_tokens,
                known_lens=self.known_lens,
                num_drafts=self.num_drafts,
                tokens=self.tokens,
            )
        return record

    def record_written(self) -> None:
        """A draft pass without drafts: only say what its cache holds."""
        batch_module.ops.draft_step(self.seq_lens, last=True, **self._record(None, 0))

    def draft_step(self, draft_tokens: Tensor, *, index: int, last: bool = False) -> None:
        if self.moves_by == "advance":
            self._record_and_advance(draft_tokens, index, last)
            return
        swap = self.out_of_place and not last
        batch_module.ops.draft_step(
            self.seq_lens,
            position_ids=self.draft_position_ids,
            seq_lens_out=self._garbage(self.spare_seq_lens) if swap else None,
            position_ids_out=self._garbage(self.spare_position_ids) if swap else None,
            input_ids=self._garbage(self.draft_ids),
            slot_mapping=self._garbage(self.draft_slot_mapping),
            last=last,
            pad_token=self._pad_token,
            **self._record(draft_tokens, index),
            **self._layout(),
        )
        if swap:
            self.seq_lens, self.spare_seq_lens = self.spare_seq_lens, self.seq_lens
            self.draft_position_ids, self.spare_position_ids = (
                self.spare_position_ids,
                self.draft_position_ids,
            )

    def _record_and_advance(self, draft_tokens: Tensor, index: int, last: bool) -> None:
        """The same step in two launches: a record, then a move of `1 - rejected`."""
        rows = self.query_lens.shape[0]
        batch_module.ops.draft_step(self.seq_lens, last=True, **self._record(draft_tokens, index))
        if last:
            return
        counts = torch.zeros_like(self.num_rejected)
        if self._target is None and index == 0:
            counts = -self.num_rejected
            put_last_positions(self)
        batch_module.ops.advance(
            counts,
            self.seq_lens,
            seq_len_bias=1,
            position_bias=1,
            count_index=self.count_index,
            position_ids=self.draft_position_ids,
            slot_mapping=self._garbage(self.draft_slot_mapping),
            **self._rows(),
            **self._pages(),
            **self._layout(),
        )
        self._garbage(self.draft_ids)[:rows].copy_(draft_tokens)


def put_last_positions(batch: specmeta.BatchMetadata) -> None:
    """Let the draft loop begin at the last query token of every row."""
    last = (batch.cu_seqlens_q[1:].long() - 1).clamp(min=0)
    batch.draft_position_ids[: last.shape[0]].copy_(batch.position_ids[last])


# --- What one model has, and what its batch must say -------------------------------------------


@dataclass
class Request:
    """A request, and what the ledger must say about it."""

    greedy: Greedy
    prompt_len: int
    want: int
    known: int
    committed: int = 0
    written: int = 0
    drafts: list[int] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  # what of it the host has read


@dataclass
class Row:
    """A live row of a step, as it must be."""

    request: Request
    slot: int
    q: int
    drafts: int
    length: int
    rejected: int = 0
    read: list[tuple[int, ...]] = field(default_factory=list)  # what its draft pass must read


class Side:
    """The target's part or the draft model's: its batch, its pages, its caches, its rows."""

    def __init__(
        self,
        rng: random.Random,
        batch: specmeta.BatchMetadata,
        requests: dict[int, Request],
        counts: Counter[str],
        *,
        reader: str,
        pads: dict[str, int],
        cache_pages: int,
        entries: Sequence[int],
        commits: bool,
        drafts: bool,
    ) -> None:
        self.rng = rng
        self.batch = batch
        self.requests = requests
        self.counts = counts
        self.reader = reader
        self.commits, self.drafts = commits, drafts  # is it the target's, is it the drafter's
        self.pad_page, self.pad_slot = pads["pad_page"], pads["pad_slot"]
        self.pad_token, self.pad_seq_len = pads["pad_token"], pads["pad_seq_len"]
        self.outputs = batch.outputs if isinstance(batch, RawBatch) else LAYOUT
        self.identity = isinstance(batch, RawBatch) and batch.identity
        self.page_size = batch.page_size
        self.max_rows, self.max_tokens = batch.query_lens.shape[0], batch.input_ids.shape[0]
        self.free = [page for page in range(cache_pages) if page != self.pad_page]
        rng.shuffle(self.free)
        self.pages: dict[int, list[int]] = {}  # by slot
        self.most: dict[int, int] = {}  # pages that the host will give to a slot
        self.caches = [
            torch.full(
                (cache_pages * self.page_size, n), POISON, dtype=torch.int64, device=batch.device
            )
            for n in entries
        ]
        self.slots: list[int] = []
        self.queries: list[int] = []
        self.rows: list[Row | None] = []
        self.flags = [0] * batch.status.shape[0]

    # Pages.

    def take(self, count: int) -> list[int]:
        """Free pages, often those that were given back last."""
        pages = []
        for _ in range(count):
            last = len(self.free) - 1
            pages.append(
                self.free.pop(last if self.rng.random() < 0.7 else self.rng.randint(0, last))
            )
        self.require_poison(pages)
        return pages

    def give_back(self, slot: int) -> None:
        pages = self.pages.pop(slot)
        for cache in self.caches:
            for page in pages:
                cache[page * self.page_size : (page + 1) * self.page_size] = POISON
        self.free += pages
        del self.most[slot]
        self.batch.release(slot)
        self.flags[slot] = 0

    def require_poison(self, pages: Sequence[int]) -> None:
        for cache in self.caches:
            by_page = cache.view(-1, self.page_size * cache.shape[1])
            if pages and not bool((by_page[pages] == POISON).all()):
                raise AssertionError(f"something was written to a page without owner: {pages}")

    def limit(self) -> int:
        limit = self.batch.max_seq_len
        if "block_table" in self.outputs:
            limit = min(limit, self.batch.block_table.shape[1] * self.page_size)
        return limit

    def capacity(self, slot: int) -> int:
        return min(len(self.pages[slot]) * self.page_size, self.limit())

    def last_capacity(self, slot: int) -> int:
        """What the capacity will be when the host has given all pages."""
        return min(self.most[slot] * self.page_size, self.limit())

    # Rows.

    def set_rows(self, slots: list[int], queries: list[int]) -> None:
        """Live rows, and stale garbage behind them."""
        self.slots, self.queries = slots, queries
        batch, behind = self.batch, self.max_rows - len(slots)
        if batch._target is None or isinstance(batch, RawBatch):
            batch.set_rows(slots, queries)
        else:
            batch.set_query_lens(queries)
        if behind and self.rng.random() < 0.7:
            device = batch.device
            stale = [self.rng.choice((0, -1, -9, GARBAGE)) for _ in range(behind)]
            batch.query_lens[len(slots) :] = torch.tensor(stale, device=device)
            stale = [self.rng.choice((0, -1, -9, GARBAGE)) for _ in range(behind)]
            batch.row_to_slot[len(slots) :] = torch.tensor(stale, device=device)

    def flag(self, slot: int, bit: int) -> None:
        self.flags[slot] |= bit
        self.counts["overflow" if bit == OVERFLOW else "bad count"] += 1

    def expect_stage(self, num_tokens: int) -> None:
        ledger_len = self.batch.tokens.shape[1]
        used = 0
        self.rows = [None] * self.max_rows
        for b, (slot, query) in enumerate(zip(self.slots, self.queries, strict=True)):
            request = self.requests.get(slot)
            if request is None:
                continue
            c = request.committed
            there = request.known + len(request.drafts)
            if not self.commits:
                c, there = min(request.written, c), request.known
            want = min(query, max(there - c, 0))
            room = max(min(self.capacity(slot), ledger_len) - c, 0)
            q = min(want, room, num_tokens - used)
            if q < want:
                self.flag(slot, OVERFLOW)
                self.counts["stage cut"] += 1
            drafts = max(q - max(request.known - c, 0), 0)
            self.rows[b] = Row(request, slot, q, drafts, c + q if q else 0)
            used += q
        self.expect_cut()

    def expect_cut(self) -> None:
        """Where `kv_indices` ends, rows are emptied."""
        if "kv_indices" not in self.outputs:
            return
        listed, cut, size = 0, False, self.batch.kv_indices.shape[0]
        for b, row in enumerate(self.rows):
            length = row.length if row else 0
            listed += -(-length // self.page_size) if length else self.pad_seq_len
            cut = cut or listed + self.pad_seq_len * (self.max_rows - 1 - b) > size
            if cut and row and length:
                row.length = 0
                self.flag(row.slot, OVERFLOW)
                self.counts["list cut"] += 1

    def expect_accept(self, void: set[int]) -> list[list[int]]:
        """What every row must emit; moves its request on."""
        ledger_len = self.batch.tokens.shape[1]
        emitted: list[list[int]] = [[] for _ in self.rows]
        for b, row in enumerate(self.rows):
            if not row or row.length == 0:
                continue
            request, known = row.request, row.request.known
            true = request.greedy.tokens(known + row.drafts + 1, known)
            a = 0
            while b not in void and a < row.drafts and request.drafts[a] == true[a]:
                a += 1
            row.rejected = row.drafts - a
            committed = row.length - row.rejected
            after = request.greedy.tokens(committed + 1)[committed]
            if committed < known:  # a chunk
                request.committed = committed
                self.counts["chunk"] += 1
                self.counts["chunk with drafts"] += bool(request.drafts)
            elif b in void:
                self.flag(row.slot, BAD_COUNT)
                after = self.pad_token
            else:
                emitted[b] = true[: a + 1]
                request.committed = committed
                request.known = min(committed + 1, ledger_len)
                if committed >= ledger_len:
                    self.flag(row.slot, OVERFLOW)
                    self.counts["ledger full"] += 1
                self.counts["accepted"] += a
                self.counts["rejected"] += row.rejected
                self.counts["fewer verified"] += 0 < row.drafts < len(request.drafts)
                self.counts["drafts beside prompt"] += row.drafts > 0 and row.q - row.drafts > 1
            request.drafts = []
            inputs = [*request.greedy.tokens(committed)[1:], after]
            states = request.greedy.states(committed)
            row.read = list(zip(inputs, range(committed), states, strict=True))
        return emitted

    def expect_draft_pass(self) -> None:
        """What the draft model's first pass must read."""
        for row in self.rows:
            if row and row.length:
                tokens = row.request.greedy.tokens(row.length)
                row.read = list(zip(tokens, range(row.length), strict=True))
                self.counts["catching up"] += row.length < row.request.known

    def expect_draft_step(
        self, drafts: Sequence[int], index: int, *, shift: int, last: bool
    ) -> None:
        ledger_len = self.batch.tokens.shape[1]
        for b, row in enumerate(self.rows):
            if not row or row.length == 0:
                continue
            request = row.request
            kept = row.length - (row.rejected if index == 0 else 0)
            place = request.known + index
            drafting = place == kept + shift  # not in the middle of the prompt
            if drafting and place < ledger_len:
                request.drafts = [*request.drafts[:index], drafts[b]]
            request.written = kept if drafting else kept - index
            if last:
                continue
            row.length = kept + 1
            if row.length > self.capacity(row.slot):
                row.length = 0
                self.flag(row.slot, OVERFLOW)
                self.counts["drafting stopped"] += 1
        if not last:
            self.expect_cut()

    def check_state(self) -> None:
        batch, ledger = self.batch, self.batch.tokens.tolist()
        written = batch.written_lens.tolist()
        lengths = (
            batch.committed_lens.tolist(),
            batch.known_lens.tolist(),
            batch.num_drafts.tolist(),
        )
        for slot, row in enumerate(ledger):
            request = self.requests.get(slot)
            got = (*(values[slot] for values in lengths), written[slot])
            if request is None:
                require_equal(f"the lengths of the empty slot {slot}", got, (0, 0, 0, 0))
                continue
            committed = request.committed if self.commits else 0
            wrote = request.written if self.drafts else 0
            want = (committed, request.known, len(request.drafts), wrote)
            require_equal(f"slot {slot}: committed, known, drafts, written", got, want)
            tokens = request.greedy.tokens(request.known) + request.drafts
            require_equal(f"slot {slot}: tokens", row[: len(tokens)], tokens)
        require_equal("status", batch.status.tolist(), self.flags)
        if self.rng.random() < 0.5:
            batch.status.zero_()
            self.flags = [0] * len(self.flags)

    # Attention.

    def run_pass(
        self,
        cache: Tensor,
        slot_mapping: Tensor,
        values: Sequence[tuple[int, ...]],
        cu: Sequence[int],
    ) -> list[list[list[int]]]:
        """Write all tokens of a pass, then read each row as attention does."""
        mapping = slot_mapping.tolist()
        require_equal("query tokens", sorted(cu), list(cu))
        require(cu[0] >= 0 and cu[-1] <= len(mapping), f"query tokens outside the buffer: {cu}")
        owner = [-1] * len(mapping)
        for b, slot in enumerate(self.slots):
            owner[cu[b] : cu[b + 1]] = [slot] * (cu[b + 1] - cu[b])
        tokens = [t for t, place in enumerate(mapping) if place != self.pad_slot]
        for t in tokens:
            page, slot = mapping[t] // self.page_size, owner[t]
            if page not in self.pages.get(slot, ()):
                raise AssertionError(
                    f"token {t} of slot {slot} is written to the foreign page {page}"
                )
        places = [mapping[t] for t in tokens]
        require(len(set(places)) == len(places), f"two tokens are written to one place: {mapping}")
        if self.pad_slot >= 0 and len(tokens) < len(mapping):
            t = next(t for t, place in enumerate(mapping) if place == self.pad_slot)
            tokens, places = [*tokens, t], [*places, self.pad_slot]
        if tokens:
            device = cache.device
            written = torch.tensor([values[t] for t in tokens], device=device)
            cache[torch.tensor(places, device=device)] = written

        rows = self.read_places(cu)
        flat = [place for row in rows for place in row]
        held: list[list[int]] = cache[
            torch.tensor(flat, dtype=torch.int64, device=cache.device)
        ].tolist()
        begin, read = 0, []
        for row in rows:
            read.append(held[begin : begin + len(row)])
            begin += len(row)
        return read

    def read_places(self, cu: Sequence[int]) -> list[list[int]]:
        """Where the tokens of each row are, found as one kind of attention kernel does."""
        batch, size = self.batch, self.page_size
        rows = range(self.max_rows)
        if self.reader == "table":
            lists = batch.block_table.tolist()
            padded = "padded_seq_lens" in self.outputs
            lengths = (batch.padded_seq_lens if padded else batch.seq_lens).tolist()
        else:
            ends, ids = batch.kv_indptr.tolist(), batch.kv_indices.tolist()
            require_equal("kv_indptr", sorted(ends), ends)
            require(ends[0] == 0 and ends[-1] <= len(ids), f"kv_indptr outside kv_indices: {ends}")
            if self.reader == "list":
                lists = [ids[ends[b] : ends[b + 1]] for b in rows]
                last = batch.last_page_len.tolist()
                lengths = [(len(lists[b]) - 1) * size + last[b] if lists[b] else 0 for b in rows]
            else:
                cached, pages = batch.cached_lens.tolist(), batch.pages_per_seq.tolist()
                lists = [ids[ends[b] : ends[b] + pages[b]] for b in rows]
                lengths = [min(cached[b] + cu[b + 1] - cu[b], pages[b] * size) for b in rows]
        places = []
        most = self.caches[0].shape[0] // size
        for pages, length in zip(lists, lengths, strict=True):
            used = pages[: -(-length // size)]
            require(0 <= length <= len(pages) * size, f"{length} tokens in the pages {pages}")
            require(all(0 <= page < most for page in used), f"no such page: {used}")
            row = [page * size + offset for page in used for offset in range(size)]
            places.append(row[:length])
        return places


# --- The engine --------------------------------------------------------------------------------


class ToyEngine:
    """One schedule, drawn from a seed.

    Parameters
    ----------
    seed
        What the schedule is drawn from.
    kind
        "one model" (Eagle) or "two models".
    device
        Where batch and caches live.
    trace
        Keep every buffer after every operation, in `trace`.
    """

    def __init__(
        self, seed: int, kind: str, device: torch.device | str = "cpu", trace: bool = False
    ) -> None:
        self.rng = rng = random.Random(f"{kind} {seed}")
        self.name = f"schedule {seed}, {kind}"
        self.device = torch.device(device)
        self.eagle = kind == "one model"
        self.trace: list[dict[str, list[Any]]] | None = [] if trace else None
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.requests: dict[int, Request] = {}
        self.max_drafts = rng.choice((0, 1, 2, 3, 3, 4, 5))
        self.skill = rng.choice((0, 40, 70, 95, 100))
        self.sampled = rng.random() < 0.4
        self.lag = rng.randrange(2)  # steps that the host is behind
        self.chunk = rng.choice((1, 3, 8, 99))
        self.busy = rng.choice((0.5, 0.9, 1.0))
        self.num_slots = rng.randint(1, 6)
        max_seq_len = 64 if rng.random() < 0.7 else rng.randint(4, 30)
        ledger_len = max_seq_len + self.max_drafts + 1
        if rng.random() < 0.2:
            ledger_len = rng.randint(8, 30)
        self.settle = rng.random() < 0.5  # rows may be left out of the draft model's steps

        most = min(rng.choice((6, 20)), ledger_len, max_seq_len)
        self.waiting = [
            (rng.randint(1, most), rng.randint(1, rng.choice((8, 25))))
            for _ in range(rng.randint(1, 4))
        ]
        self.target = self._side(None, max_seq_len, ledger_len)
        if not self.eagle:
            self.draft = self._side(self.target, max_seq_len, ledger_len)

    def _side(self, target: Side | None, max_seq_len: int, ledger_len: int) -> Side:
        rng = self.rng
        free = target is None or self.settle
        raw = rng.random() < 0.5
        own_rows = target is None or (raw and rng.random() < 0.5)
        identity = raw and own_rows and rng.random() < 0.2
        least = 1 if target is None else target.max_rows
        rows = rng.randint(least, max(5, least)) if own_rows else least
        if identity:
            rows = self.num_slots
        page_size = rng.choice([n for n in range(1, 9) if not target or n != target.page_size])
        longest = max(map(sum, self.waiting)) + self.max_drafts
        most = -(-longest // page_size)  # no row needs more pages
        pages = most + rng.choice((0, 0, 2))
        cache_pages = self.num_slots * pages + 3
        tokens = rows * longest  # all that can be staged
        if free and rng.random() < 0.4:
            tokens = rng.randint(1, 16)
        pads = {
            "pad_page": rng.choice((0, 0, rng.randrange(cache_pages))),
            "pad_token": rng.choice((0, 0, 7)),
            "pad_seq_len": rng.randrange(2),
        }
        place = pads["pad_page"] * page_size + rng.randrange(page_size)
        pads["pad_slot"] = rng.choice((-1, -1, place))
        kv_capacity = rows * pages + rows
        if free and rng.random() < 0.2:
            kv_capacity = most + rows * pads["pad_seq_len"] + rng.randint(0, 2)
        sizes: dict[str, Any] = {
            "max_rows": rows,
            "max_slots": self.num_slots,
            "max_tokens": tokens,
            "max_pages": pages,
            "page_size": page_size,
            "max_seq_len": max_seq_len,
            "max_draft_len": self.max_drafts,
            "ledger_len": ledger_len if target is None else None,
            "kv_capacity": kv_capacity,
            "device": self.device,
            "index_dtype": rng.choice((torch.int32, torch.int64)),
            "ledger": target.batch if target else None,
            **pads,
        }
        reader = rng.choice(tuple(READERS))
        batch: specmeta.BatchMetadata
        if raw:
            outputs = [n for n in LAYOUT if n in READERS[reader] or rng.random() < 0.3]
            width = rng.choice((pages, pages, rng.randint(1, pages)))
            unused = ["num_accepted", "next_tokens"]
            if not self.eagle:
                unused += ["num_rejected", "token_indices", "draft_input_ids", "last_position_ids"]
            batch = RawBatch(
                rng,
                outputs=outputs,
                identity=identity,
                own_rows=own_rows,
                width=width,
                unused=[name for name in unused if rng.random() < 0.5],
                **sizes,
            )
        else:
            batch = specmeta.BatchMetadata(**sizes)
        # The Eagle head's cache has the target's pages, and the target's states in it.
        entries = [2] if target or not self.eagle else [2, 3]
        return Side(
            rng,
            batch,
            self.requests,
            self.counts,
            reader=reader,
            pads=pads,
            cache_pages=cache_pages,
            entries=entries,
            commits=target is None,
            drafts=self.eagle or target is not None,
        )

    @property
    def sides(self) -> list[Side]:
        return [self.target] if self.eagle else [self.target, self.draft]

    def run(self) -> Counter[str]:
        """Run the schedule to its end; count what happened in it."""
        try:
            while self.waiting or self.requests:
                self._step()
                self.steps += 1
                require(self.steps < MOST_STEPS, "the texts do not end")
            for side in self.sides:
                side.require_poison(side.free)
                if side.pad_slot < 0:
                    side.require_poison([side.pad_page])
        except AssertionError as error:
            raise AssertionError(f"{self.name}, step {self.steps}: {error}") from error
        self.counts["steps"] += self.steps
        return self.counts

    # The host.

    def _step(self) -> None:
        rng = self.rng
        self._admit()
        self._grow()
        ready = [slot for slot in self.requests if rng.random() < self.busy]
        rng.shuffle(ready)
        drafts = self.max_drafts if rng.random() < 0.6 else rng.randint(0, self.max_drafts)
        self._put_rows(self.target, {slot: self._query() for slot in ready[: self.target.max_rows]})
        states = self._run_target()
        if self.eagle:
            self._eagle(states, drafts)
        else:
            self._draft_model(drafts)
        for side in self.sides:
            side.check_state()
        self._leave()

    def _query(self) -> int:
        """How many tokens a row may take: a chunk, or some drafts, or none."""
        rng = self.rng
        return rng.choice((99, rng.randint(1, self.chunk), rng.randint(0, 3), self.max_drafts + 1))

    def _admit(self) -> None:
        rng = self.rng
        empty = [slot for slot in range(self.num_slots) if slot not in self.requests]
        rng.shuffle(empty)
        while self.waiting and empty and rng.random() < 0.6:
            slot = empty.pop()
            prompt_len, want = self.waiting.pop()
            prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
            request = Request(Greedy(prompt), prompt_len, want, known=prompt_len)
            self.requests[slot] = request
            for side in self.sides:
                length = prompt_len + want + self.max_drafts
                if rng.random() < 0.2:  # too few pages for the text: it ends where they do
                    length = rng.randint(1, length)
                table = side.batch.page_table.shape[1]
                side.most[slot] = min(-(-length // side.page_size), table)
                pages = side.take(rng.choice((side.most[slot], rng.randint(0, side.most[slot]))))
                side.pages[slot] = pages
                side.batch.assign(slot, prompt if side is self.target else [], pages)
            self._look_up(slot, request)
            self.counts["admitted"] += 1

    def _look_up(self, slot: int, request: Request) -> None:
        """Drafts that the host knows before the first step, right and wrong ones."""
        rng, batch = self.rng, self.target.batch
        count = min(rng.randint(0, self.max_drafts), batch.tokens.shape[1] - request.known)
        if count and rng.random() < 0.3:
            end = request.known + count
            request.drafts = request.greedy.tokens(end, request.known)
            if rng.random() < 0.5:
                request.drafts[rng.randrange(count)] = rng.randrange(VOCAB)
            drafts = torch.tensor(request.drafts, device=self.device)
            batch.tokens[slot, request.known : end] = drafts
            batch.num_drafts[slot] = count

    def _grow(self) -> None:
        """More pages for some requests, in time or too late."""
        for side in self.sides:
            for slot, pages in side.pages.items():
                missing = side.most[slot] - len(pages)
                if missing > 0 and self.rng.random() < 0.4:
                    more = side.take(self.rng.randint(1, missing))
                    side.batch.add_pages(slot, more)
                    pages += more

    def _put_rows(self, side: Side, queries: dict[int, int]) -> None:
        """Rows in a new order, empty ones between them."""
        rng = self.rng
        if side.identity:
            live = rng.randint(1 + max(queries, default=-1), side.max_rows)
            slots = list(range(live))
            side.set_rows(slots, [queries.get(slot, 0) for slot in slots])
            return
        slots = list(queries)
        holes = rng.randint(0, side.max_rows - len(slots))
        unused = [s for s in range(self.num_slots) if s not in self.requests]
        slots += [unused.pop() if unused and rng.random() < 0.3 else -1 for _ in range(holes)]
        rng.shuffle(slots)
        side.set_rows(slots, [queries.get(slot, rng.randrange(9)) for slot in slots])

    def _leave(self) -> None:
        """Read the texts, a step late or at once; cut them and let their requests go."""
        for slot, request in list(self.requests.items()):
            seen, request.seen = request.seen, list(request.text)
            if not self.lag:
                seen = request.seen
            limit = min(self.target.last_capacity(slot), self.target.batch.tokens.shape[1])
            stuck = request.committed >= limit
            if len(seen) < request.want and END not in seen and not stuck:
                continue
            most = max(limit + 1 - request.prompt_len, 0)
            true = request.greedy.tokens(request.prompt_len + most, request.prompt_len)
            if stuck:
                require_equal(f"slot {slot}: all of the text", request.text, true)
                self.counts["to the limit"] += 1
            text = cut(request.text, request.want)
            require_equal(f"slot {slot}: the text", text, cut(true, request.want))
            self.counts["past the end"] += len(request.text) > len(text)
            self.counts["texts"] += 1
            self.counts["tokens"] += len(text)
            for side in self.sides:
                side.give_back(slot)
            del self.requests[slot]

    # The device.

    def _after(self, op: str, side: Side) -> None:
        if self.trace is not None:
            buffers = {k: v.tolist() for k, v in vars(side.batch).items() if isinstance(v, Tensor)}
            self.trace.append({"op": [op], **buffers})

    def _tensor(self, values: Any) -> Tensor:
        dtype = self.rng.choice((torch.int32, torch.int64))
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _run_target(self) -> list[int]:
        """Stage, the target's pass, acceptance. Returns the target's states by token."""
        rng, side = self.rng, self.target
        batch = side.batch
        n = side.max_tokens if rng.random() < 0.8 else rng.randint(1, side.max_tokens)
        batch.stage(n)
        self._after("stage", side)
        side.expect_stage(n)

        cu = batch.cu_seqlens_q.tolist()
        values = list(
            zip(batch.input_ids[:n].tolist(), batch.position_ids[:n].tolist(), strict=True)
        )
        read = side.run_pass(side.caches[0], batch.slot_mapping[:n], values, cu)
        states = [0] * n
        targets = [rng.randrange(-1, VOCAB)] * n
        for b, held in enumerate(read):
            state, first = 0, len(held) - (cu[b + 1] - cu[b])
            for i, (token, position) in enumerate(held):
                state = mix(state, token, position)
                if i >= first >= 0:
                    states[cu[b] + i - first] = state
                    targets[cu[b] + i - first] = choose(state)

        void: set[int] = set()
        if self.sampled:
            sampled = self._sample(targets, values, cu, void)
            batch.accept_sampled(self._tensor(sampled), vocab_size=VOCAB, num_tokens=n)
        else:
            batch.accept_greedy(self._tensor(targets))
        self._after("accept", side)
        emitted = side.expect_accept(void)
        for b, (row, ids) in enumerate(zip(side.rows, batch.accepted_tokens.tolist(), strict=True)):
            count = ids.index(-1) if -1 in ids else len(ids)
            require_equal(f"row {b}: behind what was emitted", set(ids[count:]) - {-1}, set())
            if row:
                request, got = row.request, ids[:count]
                request.text += got
                length = request.prompt_len + len(request.text)
                true = request.greedy.tokens(length, request.prompt_len)
                require_equal(f"slot {row.slot}: the text so far", request.text, true)
                require_equal(f"row {b}: emitted", got, emitted[b])
            else:
                require_equal(f"row {b}, which is empty: emitted", count, 0)
        return states

    def _sample(
        self,
        targets: Sequence[int],
        values: Sequence[tuple[int, ...]],
        cu: Sequence[int],
        void: set[int],
    ) -> list[list[int]]:
        """What a rejection sampler would say; now and then it fails for a row."""
        width = self.max_drafts + 1
        drafted = self.target.batch.num_draft_tokens.tolist()
        sampled = [[self.rng.randrange(-1, VOCAB)] * width for _ in drafted]
        for b, nd in enumerate(drafted):
            base = cu[b + 1] - 1 - nd
            if cu[b + 1] == cu[b]:
                continue
            require(0 <= nd <= self.max_drafts and base >= cu[b], f"row {b}: {nd} drafts")
            ids = [targets[base]]
            for j in range(nd):
                if values[base + j + 1][0] != targets[base + j]:
                    break
                ids.append(targets[base + j + 1])
            if self.rng.random() < 0.05:
                void.add(b)
                ids = []
            sampled[b] = (ids + [-1] * width)[:width]
        return sampled

    def _eagle(self, states: Sequence[int], drafts: int) -> None:
        side, batch, n = self.target, self.target.batch, len(states)
        cu, last = batch.cu_seqlens_q.tolist(), batch.token_indices.tolist()
        inputs, positions = batch.draft_input_ids[:n].tolist(), batch.position_ids[:n].tolist()
        values = list(zip(inputs, positions, states, strict=True))
        read = side.run_pass(side.caches[1], batch.slot_mapping[:n], values, cu)
        for b, held in enumerate(read):  # what the last accepted token sees
            read[b] = held[: max(len(held) - (cu[b + 1] - 1 - last[b]), 0)]
        self._draft_loop(side, read, drafts)

    def _draft_model(self, drafts: int) -> None:
        """The draft model's graph, or its host's decision not to run it."""
        side, batch = self.draft, self.draft.batch
        if self.settle:
            self._settle()
            if drafts == 0 and self.rng.random() < 0.5:
                return
        self._put_draft_rows()

        n = side.max_tokens
        batch.stage(n)
        self._after("stage", side)
        side.expect_stage(n)
        if isinstance(batch, RawBatch):  # BatchMetadata.draft_step finds them itself
            put_last_positions(batch)
        cu = batch.cu_seqlens_q.tolist()
        values = list(zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True))
        read = side.run_pass(side.caches[0], batch.slot_mapping, values, cu)
        side.expect_draft_pass()
        if drafts == 0 and isinstance(batch, RawBatch) and self.rng.random() < 0.5:
            batch.record_written()
            for row in side.rows:
                if row and row.length:
                    row.request.written = row.length
        self._draft_loop(side, read, drafts)

    def _settle(self) -> None:
        """Take rejected drafts off what the draft model's cache holds.

        `written_lens` counts drafts that are not decided yet. `limit_lens` takes off those that
        were rejected, but only until the target commits more: no row that the target ran may be
        left out of the draft model's next pass. A host that does leave rows out, or lets the draft
        model rest, has to do this behind every acceptance.
        """
        written = self.draft.batch.written_lens
        torch.minimum(written, self.target.batch.committed_lens, out=written)
        for request in self.requests.values():
            request.written = min(request.written, request.committed)

    def _put_draft_rows(self) -> None:
        """The draft model's rows: those of the target, or its own in another order."""
        rng, side, target = self.rng, self.draft, self.target
        shared = side.batch.row_to_slot is target.batch.row_to_slot
        slots = [slot for slot in target.slots if slot in self.requests]
        if not shared:
            slots += [slot for slot in self.requests if slot not in slots]
            if self.settle:
                rng.shuffle(slots)
        queries = {}
        for slot in slots[: side.max_rows]:
            queries[slot] = rng.choice((99, 1, rng.randint(1, 8)))
            if self.settle and rng.random() < 0.1:
                queries[slot] = 0
        if shared:
            side.set_rows(target.slots, [queries.get(slot, 9) for slot in target.slots])
        else:
            self._put_rows(side, queries)

    def _draft_loop(self, side: Side, read: list[list[list[int]]], drafts: int) -> None:
        """Draft, record, step, run; each pass must have read what it should."""
        rng, batch, cache = self.rng, side.batch, side.caches[-1]
        model = run_eagle if self.eagle else run_draft_model
        alone = range(side.max_rows + 1)  # one query token a row
        for index in range(drafts + 1):
            ids, hidden = [rng.randrange(VOCAB)] * side.max_rows, [0] * side.max_rows
            for b, row in enumerate(side.rows):
                if row and row.length:
                    got = [tuple(entry) for entry in read[b]]
                    require_equal(f"row {b}: what draft pass {index} read", got, row.read)
                    ids[b], hidden[b] = model(got, self.skill)
            if index == drafts:
                break
            last = index == drafts - 1 and rng.random() < 0.9
            batch.draft_step(self._tensor(ids), index=index, last=last)
            self._after("draft_step", side)
            side.expect_draft_step(ids, index, shift=1 if self.eagle else 0, last=last)
            if last:
                break
            for b, row in enumerate(side.rows):
                if row and row.length:
                    entry = (ids[b], len(row.read), hidden[b])
                    row.read.append(entry if self.eagle else entry[:2])
            tokens, positions = batch.draft_ids.tolist(), batch.draft_position_ids.tolist()
            states = [*hidden, *[0] * (len(tokens) - len(hidden))]
            values: list[tuple[int, ...]] = list(zip(tokens, positions, strict=True))
            if self.eagle:
                values = list(zip(tokens, positions, states, strict=True))
            read = side.run_pass(cache, batch.draft_slot_mapping, values, alone)


def cut(text: Sequence[int], want: int) -> list[int]:
    """The text that the host gives out: no longer than wanted, and to its end token."""
    text = list(text[:want])
    return text[: text.index(END) + 1] if END in text else text
