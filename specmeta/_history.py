"""What must hold from one call of an operator to the next, for check mode.

All that is read here are the copies that :mod:`specmeta.observe` made, on the CPU and on a thread
of its own: nothing waits for a device, and the caller waits for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, TypeVar

from specmeta._rows import Difference, Requests, Rows, table_of
from specmeta.observe import Call

__all__ = ["History", "Recent"]

# Memory that is remembered. Engines that make tensors anew in each step would fill the host's.
MOST_RECENT = 256

_Written = tuple[int, int, int]  # by which request, in which slot and step
_Value = TypeVar("_Value")


class Recent(dict[Any, _Value]):
    """Makes what is missing, and forgets what nobody has asked for longest."""

    def __init__(self, make: Callable[[], _Value]) -> None:
        super().__init__()
        self._make = make

    def __getitem__(self, key: Any) -> _Value:
        """Return a value; it is now the last one to be forgotten."""
        value = self.pop(key) if key in self else self._make()
        self[key] = value
        return value

    def __setitem__(self, key: Any, value: _Value) -> None:
        super().__setitem__(key, value)
        if len(self) > MOST_RECENT:
            del self[next(iter(self))]


class Holders(Requests):
    """The requests whose pages stand in one table, and what they did with them.

    Attributes
    ----------
    given_back : set of int
        Pages that nobody holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given_back: set[int] = set()
        self._pages: dict[int, list[int]] = {}
        # By slot what its request was given, as far as all of that was told.
        self._given: dict[int, set[int]] = {}
        # By page who wrote it last, and when; by slot what its request last found there.
        self._writer: dict[int, _Written] = {}
        self._found: dict[int, dict[int, _Written | None]] = defaultdict(dict)
        self._end: dict[int, int] = {}

    def assigned(self, slot: int) -> None:
        """Note that a slot has a new request, without pages."""
        super().assigned(slot)
        self._given[slot] = set()

    def begin(self, slot: int) -> None:
        """Forget what the slot's request before found."""
        super().begin(slot)
        self._found.pop(slot, None)
        self._end.pop(slot, None)

    def added(self, slot: int, pages: list[int]) -> None:
        """Note that a slot has more pages, whatever the host has put into them."""
        self.given_back -= set(pages)
        if slot in self._given:
            self._given[slot] |= set(pages)
        for page in pages:
            self._found[slot].pop(page, None)

    def new(self, slot: int, page: int) -> bool:
        """Return whether a request has not used a page before."""
        return page not in self._found[slot]

    def hold(self, slot: int, pages: list[int], start: int) -> None:
        """Note which pages a slot uses now, and the cache index at which its tokens begin."""
        before = self._pages.get(slot, [])
        # A request's pages come and go at their end.
        others = any(old != new for old, new in zip(before, pages, strict=False))
        self.seen(slot, start, others=others)
        self.given_back -= set(pages) - set(before)
        for page in set(before) - set(pages):
            self._found[slot].pop(page, None)
        self._pages[slot] = pages

    def write(self, slot: int, pages: set[int], step: int) -> None:
        """Note that a request writes these pages."""
        self._writer |= dict.fromkeys(pages, (self.by_slot[slot], slot, step))

    def use(self, slot: int, pages: list[int]) -> Difference | None:
        """Note that a request reads all of these pages."""
        found = self._found[slot]
        wrong = None
        for page in pages:
            writer = self._writer.get(page)
            expected, got = "a page that the slot holds", ""
            if page in self.given_back:
                got = "given back"
            elif page not in (self._given.get(slot) or {page}):
                got = "another one"
            elif writer and writer[0] != self.by_slot[slot] and found.get(page, writer) != writer:
                expected = "what the request left there"
                got = f"what slot {writer[1]} wrote in step {writer[2]}"
            if got and wrong is None:
                wrong = Difference(f"page {page}", expected, got)
            found[page] = writer
        return wrong

    def reach(self, slot: int, start: int, end: int) -> int | None:
        """Note that a request's tokens from `start` to `end` are written.

        Return where it ended before, if `start` is behind that.
        """
        before = self._end.get(slot, start)
        self._end[slot] = max(before, end)
        return before if start > before else None


# What stage and draft_step leave for other operations, and which of them go on from it.
_LEFT = {"seq_lens": "for which {} listed the pages", "position_ids": "as {} left it"}
_GOES_ON = {
    "accept_greedy": ("seq_lens", "position_ids"),
    "accept_sampled": ("seq_lens", "position_ids"),
    "draft_step": ("seq_lens", "position_ids"),
    "draft_lists": ("seq_lens",),
}


class History:
    """What earlier calls left."""

    def __init__(self) -> None:
        self._tables: Recent[Holders] = Recent(Holders)
        # By the address of lengths or positions: what stage or draft_step left there.
        self._left: Recent[tuple[list[int], str]] = Recent(lambda: ([], ""))
        # By the address of `committed_lens` and slot: what accept_* left, and whose it was.
        self._committed: Recent[dict[int, int]] = Recent(dict)
        self._staged: Recent[dict[int, int]] = Recent(dict)

    def of(self, table: int) -> Holders:
        """Return the requests whose pages stand in the table at this address."""
        return self._tables[table]

    def wrong(self, call: Call, rows: Rows, step: int) -> Difference | None:
        """Return what doesn't fit to the calls before, if anything, and take this one in."""
        found = [
            *_repeated_slots(call, rows),
            *self._moved(call, rows),
            *self._pages(call, rows, step),
            *_broken_positions(call, rows),
        ]
        self._commit(call, rows)
        return found[0] if found else None

    def _moved(self, call: Call, rows: Rows) -> Iterator[Difference]:
        """Find lengths and positions other than those that the operation before left."""
        for name in _GOES_ON.get(call.operator, ()):
            left, by = self._left[call.addresses.get(name)]
            # A draft loop begins behind stage, or with lengths that the engine itself made.
            if not left or (by == "draft_step" and not call.values.get("draft_index")):
                continue
            now = call.before[name].tolist()
            for b in rows.live:
                for i in (b,) if name == "seq_lens" else rows.tokens[b]:
                    if i < min(len(left), len(now)) and now[i] != left[i]:
                        expected = f"{left[i]}, {_LEFT[name].format(by)}"
                        yield Difference(f"{name}[{i}]", expected, f"{now[i]}", b, rows.slot[b])
        for name in call.after:
            self._left.pop(call.addresses[name], None)
        if call.operator in ("stage", "draft_step") and not call.values.get("last"):
            for name in _LEFT:
                out = f"{name}_out" if f"{name}_out" in call.after else name
                if out in call.after:
                    self._left[call.addresses[out]] = (call.after[out].tolist(), call.operator)

    def _commit(self, call: Call, rows: Rows) -> None:
        if call.operator.startswith("accept") and "committed_lens" in call.after:
            committed = self._committed[call.addresses["committed_lens"]]
            for slot in rows.slot:
                if slot is not None and slot < len(call.after["committed_lens"]):
                    committed[slot] = int(call.after["committed_lens"][slot])

    def _pages(self, call: Call, rows: Rows, step: int) -> Iterator[Difference]:
        """Find pages that are not the request's own, and tokens that do not follow its others."""
        if call.operator not in ("stage", "advance", "draft_step") or call.values.get("last"):
            return  # the last draft_step leaves the layout alone
        if call.operator == "stage" and "cu_seqlens_q" not in call.after:
            return  # nothing says how many tokens a row has
        allocation = _Allocation(call)
        requests = self._tables[table_of(call)]
        tensors = call.before | call.after
        lens = tensors.get("seq_lens_out", tensors.get("seq_lens"))
        if lens is None:
            return
        ends = lens.tolist()
        of_row = {}
        writer: dict[int, tuple[int, int]] = {}  # the slot, and the place among its pages
        for b in rows.live:
            slot = rows.slot[b]
            if slot is not None and ends[b] > 0:
                start = ends[b] - len(rows.tokens[b])
                pages = allocation.pages(slot)
                written = allocation.written(pages, rows.tokens[b], start, ends[b])
                used = pages[: -(-ends[b] // allocation.page_size)]
                requests.hold(slot, used, start)
                requests.write(slot, written, step)
                writer |= {page: (slot, i) for i, page in enumerate(used) if page in written}
                of_row[b] = (slot, used, written, start)
        for b, (slot, used, written, start) in of_row.items():
            for i, page in enumerate(used):
                other, place = writer.get(page, (slot, i))
                # A new request may read the prefix that another one is just writing.
                joins = place == i and page not in written and requests.new(slot, page)
                if other != slot and not joins:
                    got = f"written by slot {other} in the same call"
                    yield Difference(f"page {page}", "one request's", got, b, slot)
            wrong = requests.use(slot, used)
            if wrong is not None:
                yield replace(wrong, row=b, slot=slot)
            yield from self._continuation(call, requests, b, slot, start, ends[b])

    def _continuation(
        self, call: Call, requests: Holders, row: int, slot: int, start: int, end: int
    ) -> Iterator[Difference]:
        before = requests.reach(slot, start, end)
        if before is not None and (requests.told or call.operator == "stage"):
            expected = f"at most {before}, where the request's tokens ended"
            yield Difference(f"cached_lens[{row}]", expected, f"{start}", row, slot)
        if call.operator == "stage" and "limit_lens" not in call.before:
            address = call.addresses["committed_lens"]
            left = self._committed[address].get(slot, start)
            same = self._staged[address].get(slot) == requests.by_slot[slot]
            if same and start != left:
                expected = f"{left}, as accept_* left it"
                yield Difference(f"committed_lens[{slot}]", expected, f"{start}", row, slot)
            self._staged[address][slot] = requests.by_slot[slot]


class _Allocation:
    """The pages that the host reserved, as a call found them."""

    def __init__(self, call: Call) -> None:
        self.page_size = int(call.values["page_size"])
        self._pad_slot = int(call.values.get("pad_slot", -1))
        self._call = call

    def pages(self, slot: int) -> list[int]:
        before = self._call.before
        if "alloc_pages" in before:
            first, end = before["alloc_indptr"][slot : slot + 2].tolist()
            return [page for page in before["alloc_pages"][first:end].tolist() if page >= 0]
        if "page_table" not in before:
            return []
        pages = before["page_table"][slot].tolist()
        if "num_pages" in before:
            return [page for page in pages[: int(before["num_pages"][slot])] if page >= 0]
        return [*takewhile(lambda page: page >= 0, pages)]

    def written(self, pages: list[int], tokens: range, start: int, end: int) -> set[int]:
        """Return the pages that the row's query tokens are written to."""
        slots = self._call.after.get("slot_mapping")
        if slots is None:
            return {*pages[max(start, 0) // self.page_size : -(-end // self.page_size)]}
        places = slots[tokens.start : tokens.stop].tolist()
        return {place // self.page_size for place in places if place != self._pad_slot}


def _repeated_slots(call: Call, rows: Rows) -> Iterator[Difference]:
    """Find rows that write the state of the same slot."""
    state = [name for name in call.after if rows.arguments[name].shape.startswith("S")]
    if state or call.operator == "stage":
        first: dict[int, int] = {}
        for b in rows.live:
            slot = rows.slot[b]
            if slot is not None and first.setdefault(slot, b) != b:
                got = f"{slot}, which is row {first[slot]}'s"
                yield Difference(f"row_to_slot[{b}]", "a slot of its own", got, b, slot)


def _broken_positions(call: Call, rows: Rows) -> Iterator[Difference]:
    """Find positions of a row that do not follow each other, up to the last that there is."""
    name = "position_ids_out" if "position_ids_out" in call.after else "position_ids"
    if call.operator != "advance" or name not in call.after:
        return
    positions = call.after[name].tolist()
    last = int(call.values.get("max_seq_len", 2**31 - 1)) - 1
    lens = call.after.get("seq_lens_out", call.after.get("seq_lens"))
    for b in rows.live:
        if lens is None or int(lens[b]) > 0:
            for one, other in pairwise(rows.tokens[b]):
                if positions[other] != min(positions[one] + 1, last):
                    expected = f"{positions[one] + 1}, behind {name}[{one}]"
                    got = f"{positions[other]}"
                    yield Difference(f"{name}[{other}]", expected, got, b, rows.slot[b])
