"""`specmeta.inspect`: a batch's state as a table, for a terminal or a notebook."""

from __future__ import annotations

import io
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specmeta._environment import how_to_install
from specmeta._notes import show
from specmeta.batch import BatchMetadata
from specmeta.graph import check_host
from specmeta.status import Status

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["BatchTable", "inspect"]

MOST_PAGES = 6  # ids of a list
MOST_RUNS = 4  # of positions or write slots
WIDTH = 160  # where no terminal says how wide it is


class BatchTable:
    """What a batch held when it was read: a renderable of rich, and a text.

    A REPL, a debugger and ``print`` show the text, a notebook and rich's ``print`` a table with
    colours.

    Attributes
    ----------
    faults : list of str
        What is inconsistent, a sentence each.
    """

    def __init__(self, group: Group, faults: list[str]) -> None:
        self._group = group
        self.faults = faults

    def __rich__(self) -> Group:
        """Return what rich renders."""
        return self._group

    def __repr__(self) -> str:
        """Return the table as text."""
        from rich.console import Console

        file = io.StringIO()
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        Console(file=file, width=width, highlight=False, force_terminal=False).print(self._group)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _repr_mimebundle_(
        self, include: Iterable[str] = (), exclude: Iterable[str] = (), **options: Any
    ) -> dict[str, str]:
        from rich.jupyter import JupyterMixin

        return JupyterMixin._repr_mimebundle_(self, include, exclude, **options)  # type: ignore[arg-type]


def inspect(batch: BatchMetadata) -> BatchTable:
    """Show a batch: its rows, its slots, and what is wrong with them.

    Reads the device: it waits for all that was launched, and can't stand in a captured step.

    Parameters
    ----------
    batch : BatchMetadata
        Not changed. A view (``first_rows``) shows its rows; a drafter's batch takes its ledger's
        lengths.

    Returns
    -------
    BatchTable
        Shows itself in a REPL and a notebook; in a program, print it. Values are those of the
        call, whatever happens to the batch later.

    Raises
    ------
    CaptureError
        Inside a capture.
    ImportError
        Without rich, which the extra ``debug`` brings.
    ValueError
        `batch` is none.

    Examples
    --------
    >>> batch = specmeta.BatchMetadata(
    ...     max_rows=1, max_slots=2, max_tokens=4, max_pages=2, page_size=4, max_seq_len=8,
    ...     max_draft_len=1,
    ... )
    >>> batch.assign(1, [5, 6, 7], pages=[3, 4])
    >>> batch.set_rows([1], [4])
    >>> batch.stage()
    >>> specmeta.inspect(batch)
    BatchMetadata on cpu: rows 1 of 1, slots 1 of 2, tokens 4, page_size 4, max_seq_len 8, drafts 1
    row  slot  known  cached  query  seq_len  drafts  accepted  pages   last page  next
    ───────────────────────────────────────────────────────────────────────────────────
      0     1      3       0      3        3       0         0  3               3     0
    <BLANKLINE>
    row  tokens  positions  write slots
    ───────────────────────────────────
      0    0..2       0..2  12..14
    <BLANKLINE>
    slot  known  committed  drafts  written  pages   status
    ───────────────────────────────────────────────────────
       1      3          0       0        0  3 4     -
    unused slots: 0
    """
    if not isinstance(batch, BatchMetadata):
        raise ValueError(f"batch: expected a BatchMetadata, got {batch!r}")
    try:
        from rich.console import Group
        from rich.text import Text
    except ImportError as error:
        raise ImportError(f"specmeta.inspect needs rich: {how_to_install('debug')}") from error
    state = _State(batch)
    faults = [*state.row_faults(), *state.token_faults(), *state.slot_faults()]
    head = Text("BatchMetadata", style="bold").append(f" {state.describe()}", "not bold")
    parts: list[Any] = [head, _row_table(state)]
    parts += _unused("rows", batch.max_rows, state.rows)
    if any(map(state.query, state.rows)):
        parts += [Text(), _token_table(state)]
    parts += [Text(), _slot_table(state)]
    parts += _unused("slots", batch.max_slots, state.slots)
    if faults:
        parts += [Text(), *(Text(f"! {fault}", style="bold red") for fault in faults)]
    return BatchTable(Group(*parts), faults)


class _State:
    """A batch's buffers, read once.

    Attributes
    ----------
    live : range
        The rows of the launch.
    rows, slots : list of int
        Those in use.
    """

    def __init__(self, batch: BatchMetadata) -> None:
        self.batch = batch
        self.drafter = batch._target is not None
        ledger = batch if batch._target is None else batch._target
        check_host("specmeta.inspect")
        self.row_to_slot: list[int] = batch.row_to_slot.tolist()
        self.num_rows = int(batch.num_rows.tolist()[0])
        self.seq_lens: list[int] = batch.seq_lens.tolist()
        self.cached_lens: list[int] = batch.cached_lens.tolist()
        self.cu_seqlens_q: list[int] = batch.cu_seqlens_q.tolist()
        self.position_ids: list[int] = batch.position_ids.tolist()
        self.slot_mapping: list[int] = batch.slot_mapping.tolist()
        self.draft_position_ids: list[int] = batch.draft_position_ids.tolist()
        self.num_draft_tokens: list[int] = batch.num_draft_tokens.tolist()
        self.num_accepted: list[int] = batch.num_accepted.tolist()
        self.next_tokens: list[int] = batch.next_tokens.tolist()
        self.pages_per_seq: list[int] = batch.pages_per_seq.tolist()
        self.last_page_len: list[int] = batch.last_page_len.tolist()
        self.kv_indptr: list[int] = batch.kv_indptr.tolist()
        self.lists: dict[str, list[Any]] = {
            name: buffer.tolist()
            for name in ("kv_indices", "block_table")
            if (buffer := getattr(batch, name)) is not None
        }
        self.known: list[int] = ledger.known_lens.tolist()
        self.committed: list[int] = ledger.committed_lens.tolist()
        self.num_drafts: list[int] = ledger.num_drafts.tolist()
        self.written: list[int] = batch.written_lens.tolist()
        self.status: list[int] = batch.status.tolist()
        self.num_pages: list[int] = batch.num_pages.tolist()
        self.pages: list[list[int]] = [
            ids[: max(n, 0)]
            for ids, n in zip(batch.page_table.tolist(), self.num_pages, strict=True)
        ]
        self.live = range(min(max(self.num_rows, 0), batch.max_rows))
        self.rows = [b for b in self.live if self.row_to_slot[b] != -1]
        carried = {self.row_to_slot[b] for b in self.rows}
        self.slots = [
            s
            for s in range(batch.max_slots)
            if s in carried
            or self.pages[s]
            or self.num_pages[s]
            or self.known[s]
            or self.written[s]
            or self.status[s]
        ]

    def describe(self) -> str:
        batch = self.batch
        kind = "" if not self.drafter else "of Eagle, " if batch._eagle else "of a draft model, "
        return (
            f"{kind}on {batch.device}: rows {len(self.rows)} of {batch.max_rows}, "
            f"slots {len(self.slots)} of {batch.max_slots}, tokens {batch.max_tokens}, "
            f"page_size {batch.page_size}, max_seq_len {batch.max_seq_len}, "
            f"drafts {batch.max_draft_len}"
        )

    def slot(self, b: int) -> int | None:
        """Return the slot of a row, None where it isn't one."""
        s = self.row_to_slot[b]
        return s if 0 <= s < self.batch.max_slots else None

    def used(self, b: int) -> int:
        """Return how many pages the length of a row makes it use."""
        return -(-max(self.seq_lens[b], 0) // self.batch.page_size)

    def query(self, b: int) -> int:
        """Return how many query tokens a row has."""
        return self.cu_seqlens_q[b + 1] - self.cu_seqlens_q[b]

    def of_tokens(self, values: list[int], b: int) -> list[int]:
        """Return what a list by token has for the tokens of a row."""
        return values[max(self.cu_seqlens_q[b], 0) : max(self.cu_seqlens_q[b + 1], 0)]

    def write_slot(self, s: int, index: int) -> int:
        """Return where a slot's pages have a cache index."""
        i, offset = divmod(index, self.batch.page_size)
        page = self.pages[s][i] if i < len(self.pages[s]) else -1
        return self.batch._pads["pad_slot"] if page < 0 else page * self.batch.page_size + offset

    def listed(self, name: str, b: int) -> list[int]:
        """Return the page ids that `kv_indices` or `block_table` has for a row."""
        if name == "kv_indices":
            return list(self.lists[name][max(self.kv_indptr[b], 0) : max(self.kv_indptr[b + 1], 0)])
        return list(self.lists[name][b][: self.used(b)])

    def row_faults(self) -> Iterator[str]:
        """Yield what is wrong with the rows."""
        page_size, pad_page = self.batch.page_size, self.batch._pads["pad_page"]
        row_of: dict[int, int] = {}
        for b in self.rows:
            s, length = self.slot(b), self.seq_lens[b]
            if s is None:
                yield f"row {b}: slot {self.row_to_slot[b]} of {self.batch.max_slots}"
                continue
            if s in row_of:
                yield f"row {b}: slot {s} stands in row {row_of[s]} too"
            row_of[s] = b
            if length < 0 or not 0 <= self.cached_lens[b] <= length:
                yield f"row {b}: cached {self.cached_lens[b]}, seq_len {length}"
            if length <= 0:
                continue
            used = self.used(b)
            end = (length - 1) % page_size + 1
            for name, got, expected in (
                ("pages_per_seq", self.pages_per_seq[b], used),
                ("last_page_len", self.last_page_len[b], end),
                ("kv_indptr's part", self.kv_indptr[b + 1] - self.kv_indptr[b], used),
            ):
                if got != expected:
                    yield (
                        f"row {b}: {name} is {got}, seq_len {length} and page_size {page_size} "
                        f"make {expected}"
                    )
            own = [pad_page if page < 0 else page for page in self.pages[s][:used]]
            for name in self.lists:
                if (listed := self.listed(name, b)) != own:
                    yield (
                        f"row {b}: {name} has pages {show(listed, MOST_PAGES)}, slot {s} has "
                        f"{show(own, MOST_PAGES)} (right only if the row is not staged yet)"
                    )

    def token_faults(self) -> Iterator[str]:
        """Yield what is wrong with the tokens of the rows."""
        num_tokens, last = self.batch.max_tokens, self.batch.max_seq_len - 1
        for b in self.live:
            begin, end = self.cu_seqlens_q[b : b + 2]
            if not 0 <= begin <= end <= num_tokens:
                yield f"row {b}: cu_seqlens_q goes from {begin} to {end}, of {num_tokens} tokens"
                continue
            s, length, cached, query = (
                self.slot(b),
                self.seq_lens[b],
                self.cached_lens[b],
                end - begin,
            )
            if s is None or not 0 <= cached <= length or length == 0:
                continue  # has no tokens, or row_faults has said so
            # A draft loop moves the row to one token of its own and leaves these as they were. It
            # can't be told from a row of one token whose positions have come to the same.
            if (
                self.batch.max_draft_len > 0
                and length - cached == 1
                and (query != 1 or self.draft_position_ids[b] == cached)
            ):
                continue
            if cached + query != length:
                yield f"row {b}: cached {cached} and query {query}, seq_len {length}"
                continue
            positions = self.of_tokens(self.position_ids, b)
            if positions != list(range(cached, length)):
                # `advance` moves all of them alike, but stops at the ends.
                alike = all(y == x + 1 or x == y in (0, last) for x, y in pairwise(positions))
                yield f"row {b}: position_ids {_runs(positions)}, cached {cached}" + (
                    " (right only if advance moves positions otherwise than lengths)"
                    if alike
                    else ""
                )
            got = self.of_tokens(self.slot_mapping, b)
            own = [self.write_slot(s, index) for index in range(cached, length)]
            if got != own:
                yield (
                    f"row {b}: slot_mapping {_runs(got)}, the pages of slot {s} make {_runs(own)} "
                    "(right only if the row is not staged yet)"
                )

    def slot_faults(self) -> Iterator[str]:
        """Yield what is wrong with the slots."""
        batch, ledger_len = self.batch, self.batch.tokens.shape[1]
        holders: dict[int, list[int]] = defaultdict(list)
        for s in self.slots:
            pages = self.pages[s]
            if not 0 <= self.num_pages[s] <= batch.max_pages:
                yield f"slot {s}: num_pages {self.num_pages[s]}, of at most {batch.max_pages}"
            for page in pages:
                holders[page].append(s)
            if any(page < 0 for page in pages):
                yield f"slot {s}: a negative id among its pages {show(pages, MOST_PAGES)}"
            if batch._pads["pad_page"] in pages:
                yield f"slot {s}: holds pad_page {batch._pads['pad_page']}"
            known, committed, drafts = self.known[s], self.committed[s], self.num_drafts[s]
            if not 0 <= committed <= known <= known + drafts <= ledger_len:
                yield (
                    f"slot {s}: committed {committed}, known {known}, drafts {drafts}: not in "
                    f"order, or past the ledger's {ledger_len}"
                )
            held = self.written[s] if self.drafter else committed
            if held > len(pages) * batch.page_size:
                yield f"slot {s}: {held} tokens are in {len(pages)} pages of {batch.page_size}"
        for page, slots in sorted(holders.items()):
            if len(slots) > 1:
                yield f"page {page}: in slots {show(slots)} (right only if none of them writes it)"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    # Narrow enough for a terminal of 80 columns.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        if name in ("pages", "status", "write slots"):
            table.add_column(name, min_width=6)
        else:
            table.add_column(name, justify="right", no_wrap=" " not in name)
    return table


def _row_table(state: _State) -> Table:
    counts = () if state.drafter else ("drafts", "accepted")
    columns = ["row", "slot", "known", "cached", "query", "seq_len", *counts, "pages", "last page"]
    table = _table(*columns, *(() if state.drafter else ("next",)))
    for b in state.rows:
        s = state.slot(b)
        cells: list[object] = [
            b,
            state.row_to_slot[b],
            "-" if s is None else state.known[s],
            state.cached_lens[b],
            state.query(b),
            state.seq_lens[b],
        ]
        if not state.drafter:
            cells += [state.num_draft_tokens[b], state.num_accepted[b]]
        pages = next((state.listed(name, b) for name in state.lists), None)
        cells += [show(pages, MOST_PAGES), state.last_page_len[b]]
        if not state.drafter:
            cells.append(state.next_tokens[b])
        table.add_row(*map(str, cells))
    return table


def _token_table(state: _State) -> Table:
    table = _table("row", "tokens", "positions", "write slots")
    for b in filter(state.query, state.rows):
        table.add_row(
            str(b),
            _runs(state.of_tokens(list(range(state.batch.max_tokens)), b)),
            _runs(state.of_tokens(state.position_ids, b)),
            _runs(state.of_tokens(state.slot_mapping, b)),
        )
    return table


def _slot_table(state: _State) -> Table:
    from rich.text import Text

    table = _table("slot", "known", "committed", "drafts", "written", "pages", "status")
    for s in state.slots:
        numbers = (s, state.known[s], state.committed[s], state.num_drafts[s], state.written[s])
        table.add_row(
            *map(str, numbers),
            show(state.pages[s], MOST_PAGES),
            Text(Status.words(state.status[s]), style="red" if state.status[s] else ""),
        )
    if state.status[-1]:
        words = Text(Status.words(state.status[-1]), style="red")
        table.add_row(*"-----", "rows without a slot", words)
    return table


def _runs(values: Iterable[int]) -> str:
    """Return integers as text, those that follow each other as their ends."""
    runs: list[list[int]] = []
    for i in values:
        if runs and runs[-1][-1] == i - 1:
            runs[-1] = [runs[-1][0], i]
        else:
            runs.append([i])
    return show(["..".join(map(str, run)) for run in runs], MOST_RUNS)


def _unused(what: str, count: int, used: list[int]) -> list[Any]:
    """Fold those that are not used into one line."""
    from rich.text import Text

    unused = sorted(set(range(count)) - set(used))
    return [Text(f"unused {what}: {_runs(unused)}", style="dim")] if unused else []
