"""The recorder: makes steps of the calls that an observer sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmeta import observe
from specmeta._rows import Requests, Rows, table_of
from specmeta.trace.writer import FORMAT, VERSION, Writer

__all__ = ["Recorder", "RecordingError", "record"]

_MOST = 2**31 - 1


class RecordingError(RuntimeError):
    """A recorder failed: the message says why. What it wrote before stays in the file."""


class Recorder(observe.Observer):
    """Writes a trace of one batch: the first whose `stage` (or `advance`) is seen.

    A step begins at each of these calls, ends where the next one begins, and takes in what the
    `accept_*` between them says. A drafter's own `stage` (with `limit_lens`) makes no steps, nor
    does a call without live rows. An engine that calls neither `stage` nor `advance` leaves none.

    Parameters
    ----------
    path : str or Path
        A new file, compressed where the name ends with ``.gz``.

    Raises
    ------
    OSError
        The file can't be made.
    """

    def __init__(self, path: str | Path) -> None:
        self._writer = Writer(path)
        # What begins steps: the operator, and an address that other batches don't have.
        self._begins: tuple[str, int] | None = None
        self._step: _Step | None = None
        self._num_steps = 0
        self._num_slots: int | None = None  # as the header says
        # By page table: other batches have others.
        self._requests: dict[int, Requests] = defaultdict(Requests)
        self._decoding: set[int] = set()  # requests that something has come out of
        self._pages = _Allocation()

    def assigned(self, table: int, slot: int) -> None:
        """Begin a new request in a slot."""
        self._requests[table].assigned(slot)

    def called(self, call: observe.Call) -> None:
        """Take in a call."""
        if self._begins_step(call):
            self._end_step()
            self._begin_step(call)
        elif self._step is not None:
            if call.operator.startswith("accept_"):
                self._step.accept(call)
            self._step.read_status(call)

    def close(self) -> None:
        """Write the last step, unless the recorder failed in it, and end the file."""
        try:
            if self.error is None:
                self._end_step()
        finally:
            self._writer.close()

    def _begins_step(self, call: observe.Call) -> bool:
        if call.operator == "stage" and "limit_lens" not in call.before:
            begins = "stage", call.addresses["committed_lens"]
        elif call.operator == "advance":
            begins = "advance", table_of(call) or call.addresses["seq_lens"]
        else:
            return False
        if self._begins is None:
            self._begins = begins
        return begins == self._begins

    def _begin_step(self, call: observe.Call) -> None:
        requests = self._requests[table_of(call)]
        step = _Step(call, requests, self._decoding, self._num_slots)
        if not step.columns["slot"]:
            return
        if self._num_slots is None:
            self._num_slots = step.num_slots
            sizes = {"page_size": call.values["page_size"], "num_slots": step.num_slots}
            self._writer.write({"format": FORMAT, "version": VERSION, **sizes})
        changes = self._pages.changes(call, requests)
        if changes:
            step.columns["pages"] = changes
        self._step = step

    def _end_step(self) -> None:
        if self._step is not None:
            self._writer.write({"step": self._num_steps, **self._step.columns})
            self._num_steps += 1
            self._step = None


@contextmanager
def record(path: str | Path) -> Iterator[Recorder]:
    """Record a trace of what runs inside.

    Parameters
    ----------
    path : str or Path
        A new file, compressed where the name ends with ``.gz``.

    Yields
    ------
    Recorder

    Raises
    ------
    OSError
        The file can't be made.
    RecordingError
        At the end, unless what ran inside raised an error of its own: not all was recorded. What
        was stays in the file.
    """
    recorder = Recorder(path)
    observe.add(recorder)
    failed = False
    try:
        yield recorder
    except Exception:
        failed = True
        raise
    finally:
        observe.remove(recorder)
        try:
            recorder.close()
        except OSError as error:
            recorder.error = recorder.error or error
        cause = recorder.error
        if cause is not None and not failed:
            message = f"{path}: not all was recorded: {type(cause).__name__}: {cause}"
            raise RecordingError(message) from cause


class _Allocation:
    """The pages of each slot, as the file says it so far."""

    def __init__(self) -> None:
        self._pages: dict[int, tuple[int, list[int]]] = {}
        self._table: Tensor | None = None

    def changes(self, call: observe.Call, requests: Requests) -> list[list[Any]]:
        """Return what has changed, as ``[slot, request, keep, pages]``: the first `keep` stay."""
        changes = []
        for slot, pages in sorted(self._allocated(call, requests).items()):
            request = requests.by_slot.get(slot, -1)
            had, old = self._pages.get(slot, (-1, []))
            if pages == old and (not pages or request == had):
                continue
            keep = _common(old, pages) if request == had else 0
            changes.append([slot, request, keep, pages[keep:]])
            self._pages[slot] = request, pages
        return changes

    def _allocated(self, call: observe.Call, requests: Requests) -> dict[int, list[int]]:
        """Return the pages of all slots that may have others than before."""
        table, counts = call.before.get("page_table"), call.before.get("num_pages")
        if table is None:
            if "alloc_pages" not in call.before:
                return {}
            pages, ends = call.before["alloc_pages"].tolist(), call.before["alloc_indptr"].tolist()
            pairs = pairwise(ends)
            return {
                slot: [max(page, -1) for page in pages[max(a, 0) : max(b, 0)]]
                for slot, (a, b) in enumerate(pairs)
            }
        if counts is None:
            counts = (table >= 0).int().cumprod(1).sum(1)
        places = torch.arange(table.shape[1])
        # An id that is no page stays in its place, as -1.
        table = torch.where(places < counts[:, None], table, -1).clamp(min=-1)
        new = {slot for slot, r in requests.by_slot.items() if r != self._pages.get(slot, (-1,))[0]}
        if self._table is None or table.shape != self._table.shape:
            new.update(range(len(table)))
        else:
            new.update((table != self._table).any(1).nonzero().flatten().tolist())
        self._table = table
        lens = counts.clamp(0, table.shape[1]).tolist()
        return {slot: table[slot, : lens[slot]].tolist() for slot in new if slot < len(table)}


def _common(old: list[int], new: list[int]) -> int:
    """Return how many of the first items are the same."""
    for index, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            return index
    return min(len(old), len(new))


class _Step:
    """A step that is under way, in columns by row."""

    def __init__(
        self, call: observe.Call, requests: Requests, decoding: set[int], num_slots: int | None
    ) -> None:
        before, after = call.before, call.after
        if call.operator == "stage" and not {"seq_lens", "cu_seqlens_q"} <= after.keys():
            raise ValueError("stage: a trace needs seq_lens and cu_seqlens_q")
        seq_lens = after["seq_lens_out" if "seq_lens_out" in after else "seq_lens"]
        rows = Rows(call)
        self.count = count = len(rows.live)
        self.num_slots = _num_slots(call, len(seq_lens)) if num_slots is None else num_slots
        self._committed = call.addresses.get("committed_lens")
        self._status = _status(call)
        self._decoding = decoding
        lens = _lengths(seq_lens, count)
        self._end = [tokens.stop for tokens in rows.tokens]
        # The tokens of a row that was emptied are padding.
        query = [len(tokens) if n else 0 for tokens, n in zip(rows.tokens, lens, strict=True)]
        page_size = call.values["page_size"]
        used = after.get("pages_per_seq")
        columns: dict[str, list[Any]] = {
            # -1: none, and what is outside the table.
            "slot": [-1 if s is None or s >= self.num_slots else s for s in rows.slot],
            "request": [],
            "cached_len": [n - q for n, q in zip(lens, query, strict=True)],
            "query_len": query,
            "prompt_len": [0] * count,
            "seq_len": lens,
            "used_pages": [
                # With pad_seq_len, an empty row lists a page that isn't its own.
                0 if not n else -(-n // page_size) if used is None else int(used[row])
                for row, n in enumerate(lens)
            ],
            "status": [0] * count,
        }
        self.columns = columns
        if call.operator == "advance":
            columns["staged_len"] = _lengths(before["seq_lens"], count)
        staged = columns.get("staged_len", lens)
        for slot, n, was, tokens in zip(columns["slot"], lens, staged, rows.tokens, strict=True):
            if slot >= 0 and was > 0:
                requests.seen(slot, (n or was) - len(tokens))  # an emptied row: as it was staged
        columns["request"] = [requests.by_slot.get(slot, -1) for slot in columns["slot"]]
        if call.operator == "advance":
            self._read_counts(call)
        else:
            self._read_drafts(after)
        self.read_status(call)

    def _read_drafts(self, after: dict[str, Tensor]) -> None:
        columns = self.columns
        drafts = [0] * self.count
        if "num_draft_tokens" in after:
            drafts = columns["drafts"] = after["num_draft_tokens"][: self.count].tolist()
            if "input_ids" in after:
                ids = after["input_ids"].tolist()
                pairs = zip(self._end, drafts, strict=True)
                columns["draft_tokens"] = [ids[end - n : end] for end, n in pairs]
        for row, request in enumerate(columns["request"]):
            if request not in self._decoding:
                columns["prompt_len"][row] = columns["query_len"][row] - drafts[row]

    def _read_counts(self, call: observe.Call) -> None:
        """Read what `advance` was given: the outcome of the pass before."""
        columns = self.columns
        if "num_accepted" not in call.before:
            return
        counts, bias = call.before["num_accepted"].tolist(), call.values.get("position_bias", 0)
        index = columns["slot"]
        if "count_index" in call.before:
            index = call.before["count_index"][: self.count].tolist()
            for row, k in enumerate(index):
                if k < 0:  # a context row
                    columns["prompt_len"][row] = columns["query_len"][row]
        columns["accepted"] = [
            min(max(counts[k] + bias, 0), _MOST) if 0 <= k < len(counts) else 0 for k in index
        ]
        self._decoding.update(
            request
            for request, k, n in zip(columns["request"], index, columns["seq_len"], strict=True)
            if k >= 0 and n > 0
        )

    def accept(self, call: observe.Call) -> None:
        """Take in what came out, unless it's another batch's."""
        columns, before, after = self.columns, call.before, call.after
        by_row = ("num_draft_tokens", "num_accepted", "num_rejected", "accepted_tokens")
        rows = [len(tensor) for name, tensor in {**before, **after}.items() if name in by_row]
        committed = call.addresses.get("committed_lens", self._committed)
        if committed != self._committed or min(rows, default=0) < self.count:
            return
        most = [max(q - 1, 0) for q in columns["query_len"]]
        drafts = columns["drafts"] = most
        if "num_draft_tokens" in before:
            given = before["num_draft_tokens"][: self.count].tolist()
            drafts = columns["drafts"] = [
                min(max(d, 0), n) for d, n in zip(given, most, strict=True)
            ]
        if "num_accepted" in after:
            accepted = after["num_accepted"][: self.count].tolist()
        elif "num_rejected" in after:
            rejected = after["num_rejected"][: self.count].tolist()
            accepted = [d - r for d, r in zip(drafts, rejected, strict=True)]
        elif "accepted_tokens" in after:
            ids = after["accepted_tokens"][: self.count]
            accepted = ((ids >= 0).sum(1) - 1).clamp(0).tolist()
        else:
            return
        columns["accepted"] = accepted
        columns["committed_len"] = [
            n - d + a for n, d, a in zip(columns["seq_len"], drafts, accepted, strict=True)
        ]
        if "committed_lens" in after:
            by_slot = _lengths(after["committed_lens"], self.num_slots)
            columns["committed_len"] = [
                by_slot[slot] if slot >= 0 else 0 for slot in columns["slot"]
            ]
        columns["emitted"] = self._find_emitted(call)
        pairs = zip(columns["request"], columns["emitted"], strict=True)
        self._decoding.update(request for request, ids in pairs if ids)

    def _find_emitted(self, call: observe.Call) -> list[list[int]]:
        columns = self.columns
        if "accepted_tokens" in call.after:
            lists = call.after["accepted_tokens"][: self.count].tolist()
            return [ids[: ids.index(-1)] if -1 in ids else ids for ids in lists]
        rows = zip(self._end, columns["drafts"], columns["accepted"], strict=True)
        if "sampled_tokens" in call.before:
            most = call.values["vocab_size"]
            lists = call.before["sampled_tokens"].tolist()
            lists = [ids[: a + 1] for ids, (_, _, a) in zip(lists, rows, strict=False)]
            emitted = [[i for i in ids if 0 <= i < most] for ids in lists]
        else:
            ids = call.before["target_tokens"].tolist()
            emitted = [ids[end - 1 - d : end - d + a] for end, d, a in rows]
        known = call.before.get("known_lens")
        for row, slot in enumerate(columns["slot"]):
            is_empty = columns["query_len"][row] == 0 or slot < 0
            if is_empty or (known is not None and columns["committed_len"][row] < int(known[slot])):
                emitted[row] = []
        return emitted

    def read_status(self, call: observe.Call) -> None:
        """Take in the bits that stand in `status` behind a call."""
        if self._status is not None and _status(call) == self._status:
            bits = call.after["status"].tolist()
            for row, slot in enumerate(self.columns["slot"]):
                # The last entry is for rows without a slot.
                self.columns["status"][row] |= bits[slot] & _MOST


def _lengths(tensor: Tensor, count: int) -> list[int]:
    """Return lengths as an engine may have left them, as numbers that are some."""
    return tensor[:count].clamp(0, _MOST).tolist()


def _status(call: observe.Call) -> tuple[int, int] | None:
    """Return where the call's status lies, and its length: by row and by slot it has another."""
    return (call.addresses["status"], len(call.after["status"])) if "status" in call.after else None


def _num_slots(call: observe.Call, rows: int) -> int:
    for name, end in (("committed_lens", 0), ("page_table", 0), ("alloc_indptr", 1), ("status", 1)):
        if name in call.before and (name != "status" or "row_to_slot" in call.before):
            return len(call.before[name]) - end
    return rows
