"""Draw the pictures of docs/pictures.md: what the reference implementation says, not what we say.

    python tools/draw_contract.py      # writes docs/images/*.svg

`tests/test_pictures.py` draws them anew and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from specmeta import reference
from specmeta.status import Status

IMAGES = Path(__file__).parent.parent / "docs/images"

# The kinds of cells: fill and edge, on light and on dark ground.
COLOURS = {
    "final": ("#cfe0f3", "#6f94bf", "#24405e", "#6f94bf"),
    "known": ("#d5ecd4", "#6aa568", "#27492a", "#6aa568"),
    "draft": ("#fdebc3", "#c79a3a", "#54431b", "#c79a3a"),
    "wrong": ("#f6d3d0", "#c0655c", "#5b2a27", "#d0776e"),
    "free": ("#ffffff", "#b8bcc2", "#17191c", "#565b62"),
}
CELL, ROW = 38, 24


def _style() -> str:
    def rules(first: int, text: str, faint: str, ground: str) -> str:
        kinds = (
            f".{kind}{{fill:{colours[first]};stroke:{colours[first + 1]}}}"
            for kind, colours in COLOURS.items()
        )
        return (
            f"text{{fill:{text}}}.faint{{fill:{faint}}}.ground{{fill:{ground}}}"
            f".line{{stroke:{faint};fill:none}}{''.join(kinds)}"
        )

    light = rules(0, "#1c1e21", "#6a6f76", "#ffffff")
    dark = rules(2, "#e6e7e9", "#a0a5ac", "#131416")
    return (
        "text{font:13px ui-monospace,Menlo,Consolas,monospace}.middle{text-anchor:middle}"
        ".end{text-anchor:end}.head{font-weight:bold}.free{stroke-dasharray:3 2}"
        f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )


class Picture:
    """An SVG that grows downwards."""

    def __init__(self, width: int, title: str) -> None:
        self.width, self.title = width, title
        self.y = 12
        self._parts: list[str] = []

    def text(self, x: float, text: object, kind: str = "") -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{self.y + 16:g}" class="{kind}">{escape(str(text))}</text>'
        )

    def cell(self, x: float, text: object, kind: str, width: float = CELL) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{self.y:g}" width="{width:g}" height="{ROW}" class="{kind}"/>'
        )
        self.text(x + width / 2, text, "middle")

    def cells(self, x: float, texts: Sequence[object], kinds: Sequence[str]) -> None:
        for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
            self.cell(x + i * CELL, text, kind)

    def numbers(self, x: float, name: str, values: Sequence[object], faint: bool = False) -> None:
        """A line of values, each in the middle of a cell's width."""
        self.text(x - 12, name, "end faint" if faint else "end")
        for i, value in enumerate(values):
            self.text(x + (i + 0.5) * CELL, value, "middle faint" if faint else "middle")
        self.down(20)

    def bar(self, x: float, height: float) -> None:
        """A boundary between cells."""
        self._parts.append(
            f'<path d="M{x:g} {self.y - 3:g}v{height:g}" class="line" stroke-width="2"/>'
        )

    def down(self, by: float = ROW + 8) -> None:
        self.y += int(by)

    def head(self, text: str) -> None:
        self.text(16, text, "head")
        self.down(28)

    def legend(self, **kinds: str) -> None:
        self.down(4)
        x = 16.0
        for kind, text in kinds.items():
            self.cell(x, "", kind, 18)
            self.text(x + 26, text, "faint")
            x += 26 + 8 * len(text) + 28
        self.down()

    def svg(self) -> str:
        height = self.y + 8
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>{_style()}</style>\n"
            f'<rect width="100%" height="100%" rx="6" class="ground"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def flags(word: torch.Tensor) -> str:
    return Status.words(int(word)) if word else ""


# --- A step of four rows: stage, accept_greedy, draft_step ---------------------------------------

PAGE_SIZE, WIDTH = 4, 14
PAGES = {0: [1, 2, 3], 2: [4, 9, 7], 3: [6, 5, 8]}


class Step:
    """Three requests in four rows: one behind its prompt, one in it, an empty row, one draft."""

    def __init__(self) -> None:
        self.tokens = zeros(4, WIDTH)
        for s, ids in {
            0: [11, 12, 13, 14, 15, 16, 17],
            2: [21, 22, 23, 24, 25, 26, 27, 28],
            3: [31, 32, 33, 34],
        }.items():
            self.tokens[s, : len(ids)] = ints(*ids)
        self.committed_lens, self.known_lens = ints(2, 0, 4, 2), ints(7, 0, 5, 3)
        self.num_drafts, self.written_lens = ints(0, 0, 3, 1), zeros(4)
        self.page_table = torch.full((4, 3), -1, dtype=torch.int32)
        for s, pages in PAGES.items():
            self.page_table[s] = ints(*pages)
        self.row_to_slot = ints(2, 0, -1, 3)
        self.query_lens = ints(4, 3, 4, 4)
        self.cu_seqlens_q, self.seq_lens, self.cached_lens = zeros(5), zeros(4), zeros(4)
        self.num_draft_tokens, self.pages_per_seq = zeros(4), zeros(4)
        self.position_ids, self.input_ids = zeros(11), zeros(11)
        self.slot_mapping = torch.zeros(11, dtype=torch.int64)
        self.pages: dict[str, Any] = {"page_size": PAGE_SIZE, "page_table": self.page_table}
        reference.stage(
            self.committed_lens,
            known_lens=self.known_lens,
            num_drafts=self.num_drafts,
            query_lens=self.query_lens,
            tokens=self.tokens,
            row_to_slot=self.row_to_slot,
            cu_seqlens_q=self.cu_seqlens_q,
            seq_lens=self.seq_lens,
            cached_lens=self.cached_lens,
            num_draft_tokens=self.num_draft_tokens,
            position_ids=self.position_ids,
            input_ids=self.input_ids,
            slot_mapping=self.slot_mapping,
            **self.pages,
        )

    def accept(self) -> None:
        # What the target says: two of the three drafts of row 0 stand, that of row 3 doesn't.
        self.target_tokens = ints(26, 27, 29, 30, 14, 15, 16, 39, 40, 0, 0)
        self.num_accepted, self.num_rejected, self.next_tokens = zeros(4), zeros(4), zeros(4)
        self.token_indices, self.draft_input_ids = zeros(4), zeros(11)
        self.draft_position_ids = zeros(4)
        reference.accept_greedy(
            self.target_tokens,
            self.input_ids,
            cu_seqlens_q=self.cu_seqlens_q,
            num_draft_tokens=self.num_draft_tokens,
            row_to_slot=self.row_to_slot,
            seq_lens=self.seq_lens,
            position_ids=self.position_ids,
            committed_lens=self.committed_lens,
            known_lens=self.known_lens,
            tokens=self.tokens,
            num_drafts=self.num_drafts,
            num_accepted=self.num_accepted,
            num_rejected=self.num_rejected,
            next_tokens=self.next_tokens,
            token_indices=self.token_indices,
            draft_input_ids=self.draft_input_ids,
            last_position_ids=self.draft_position_ids,
        )

    def draft(self, index: int, drafts: torch.Tensor, *, last: bool) -> None:
        self.draft_slot_mapping = torch.zeros(4, dtype=torch.int64)
        reference.draft_step(
            self.seq_lens,
            position_ids=self.draft_position_ids,
            num_rejected=self.num_rejected if index == 0 else None,
            draft_tokens=drafts,
            draft_index=index,
            shift=1,
            last=last,
            row_to_slot=self.row_to_slot,
            known_lens=self.known_lens,
            num_drafts=self.num_drafts,
            written_lens=self.written_lens,
            tokens=self.tokens,
            pages_per_seq=self.pages_per_seq,
            slot_mapping=self.draft_slot_mapping,
            **self.pages,
        )

    def kinds(self, s: int) -> list[str]:
        """What each token of a slot's ledger is."""
        committed, known = int(self.committed_lens[s]), int(self.known_lens[s])
        ends = (committed, known, known + int(self.num_drafts[s]))
        return [
            next(
                (k for k, end in zip(("final", "known", "draft"), ends, strict=True) if i < end), ""
            )
            for i in range(WIDTH)
        ]

    def ledger(self, picture: Picture, s: int, x: float) -> None:
        picture.text(x - 12, f"slot {s}", "end")
        for i, kind in enumerate(self.kinds(s)):
            picture.cell(x + i * CELL, int(self.tokens[s, i]) if kind else "", kind or "free")
        picture.down()


LEDGER = {"final": "committed: KV is final", "known": "known: certain", "draft": "draft"}


def draw_stage() -> Picture:
    step, x = Step(), 180
    picture = Picture(x + WIDTH * CELL + 24, "stage: rows from the slots' state")
    picture.head("By slot: the ledger, tokens[S, L]")
    for s in range(4):
        step.ledger(picture, s, x)
    picture.legend(**LEDGER, free="empty")
    picture.down(8)
    picture.head("By row: what stage writes")
    picture.numbers(x, "row", range(4), faint=True)
    for name in ("row_to_slot", "query_lens", "cached_lens", "seq_lens", "num_draft_tokens"):
        picture.numbers(x, name, getattr(step, name).tolist())
    picture.down(16)
    picture.text(x - 24, "cu_seqlens_q", "end")
    for value in sorted(set(step.cu_seqlens_q.tolist())):
        picture.text(x + value * CELL, value, "middle")
    picture.down(24)
    for value in step.cu_seqlens_q.tolist():
        picture.bar(x + value * CELL, 72)
    kinds = ["free"] * len(step.input_ids)
    for b, s in enumerate(step.row_to_slot.tolist()):
        first, end = step.cu_seqlens_q[b : b + 2].tolist()
        for t in range(first, end):
            kinds[t] = step.kinds(s)[int(step.position_ids[t])]
    picture.text(x - 12, "input_ids", "end")
    picture.cells(x, step.input_ids.tolist(), kinds)
    picture.down()
    picture.numbers(x, "position_ids", step.position_ids.tolist())
    picture.numbers(x, "slot_mapping", step.slot_mapping.tolist())
    picture.down(4)
    pages = ", ".join(f"slot {s}: {' '.join(map(str, ids))}" for s, ids in PAGES.items())
    picture.text(16, f"pages of {PAGE_SIZE} tokens, {pages}", "faint")
    picture.down(22)
    return picture


def draw_accept() -> Picture:
    step, x = Step(), 230
    before = {s: (step.committed_lens[s].item(), step.known_lens[s].item()) for s in PAGES}
    step.accept()
    picture = Picture(x + WIDTH * CELL + 24, "accept_greedy: which drafts stand")
    picture.head("A draft stands if it is what the target says behind the token before it")
    for b, s in enumerate(step.row_to_slot.tolist()):
        if s < 0:
            continue
        first, end = step.cu_seqlens_q[b : b + 2].tolist()
        drafts, accepted = int(step.num_draft_tokens[b]), int(step.num_accepted[b])
        certain = end - first - drafts
        kinds = ["final"] * certain + ["known"] * accepted + ["wrong"] * (drafts - accepted)
        picture.text(x - 12, f"row {b}, slot {s}: input_ids", "end")
        picture.cells(x, step.input_ids[first:end].tolist(), kinds)
        emitted = int(step.known_lens[s]) > before[s][1]
        if emitted:
            picture.text(x + 5 * CELL, f"num_accepted {accepted}, next {int(step.next_tokens[b])}")
        else:
            picture.text(x + 5 * CELL, "a chunk of the prompt: nothing comes out")
        picture.down(ROW + 2)
        picture.text(x - 12, "target_tokens", "end")
        for j, target in enumerate(step.target_tokens[first:end].tolist()):
            at = first + j == int(step.token_indices[b]) and emitted
            picture.text(x + (j + 0.5) * CELL, target, "middle head" if at else "middle faint")
        committed, known = int(step.committed_lens[s]), int(step.known_lens[s])
        state = f"committed {before[s][0]} to {committed}, known {before[s][1]} to {known}"
        picture.text(x + 5 * CELL, state, "faint")
        picture.down(30)
    picture.legend(final="certain before", known="accepted", wrong="rejected")
    picture.text(16, "bold: the token at token_indices, from which the row goes on", "faint")
    picture.down(34)
    picture.head("By slot, afterwards")
    for s in PAGES:
        step.ledger(picture, s, x)
    picture.legend(**LEDGER, free="empty (drafts are gone)")
    return picture


def draw_draft_step() -> Picture:
    step, x = Step(), 180
    step.accept()
    b, s, num_drafts = 0, 2, 3
    picture = Picture(x + WIDTH * CELL + 24, "draft_step: lengths in a draft loop")
    picture.head(
        f"Row {b} (slot {s}) by cache index, in the passes of an Eagle head, K = {num_drafts}"
    )
    picture.numbers(x, "cache index", range(WIDTH - 2), faint=True)

    def show(name: str, length: int, kinds: dict[int, str], note: str) -> None:
        picture.text(x - 12, name, "end")
        for i in range(WIDTH - 2):
            kind = "final" if i < length else "free"
            picture.cell(x + i * CELL, "", kinds.get(i, kind))
        picture.down(ROW + 2)
        picture.text(x, note, "faint")
        picture.down(28)

    length, query = int(step.seq_lens[b]), int(step.cu_seqlens_q[b + 1] - step.cu_seqlens_q[b])
    rejected = int(step.num_rejected[b])
    kinds = dict.fromkeys(range(length - query, length), "known")
    kinds |= dict.fromkeys(range(length - rejected, length), "wrong")
    note = f"seq_lens {length}: {query} query tokens, num_rejected {rejected}"
    show("verified", length, kinds, note)
    for k in range(num_drafts):
        last = k == num_drafts - 1
        before = int(step.seq_lens[b])
        step.draft(k, ints(51 + k, 0, 0, 71 + k), last=last)
        length = int(step.seq_lens[b])
        note = f"draft {k} to tokens[{s}, {int(step.known_lens[s]) + k}]; "
        if last:
            show(f"draft_step {k}", length, {}, note + f"last: seq_lens stays {length}")
            continue
        note += f"seq_lens {before} to {length}, {int(step.pages_per_seq[b])} pages, "
        note += (
            f"position {int(step.draft_position_ids[b])}, slot {int(step.draft_slot_mapping[b])}"
        )
        show(f"draft_step {k}", length, {length - 1: "draft"}, note)
    picture.legend(
        final="in the cache",
        known="accepted",
        wrong="rejected: written over",
        draft="the next pass",
    )
    picture.down(8)
    picture.head("By slot, afterwards: the drafts of the next step")
    for s in PAGES:
        step.ledger(picture, s, x)
    return picture


# --- Pages ---------------------------------------------------------------------------------------


def draw_pages() -> Picture:
    pages, x = [5, 9, 2, 7], 150
    lens, indptr, indices, last = ints(7), zeros(2), zeros(4), zeros(1)
    picture = Picture(760, "advance: allocated and used pages")
    picture.head(f"page_size 4, allocated: {' '.join(map(str, pages))}")
    width = 4 * 17
    for i, page in enumerate(pages):
        picture.text(x + i * (width + 14), f"page {page}", "faint")
    picture.down(22)
    for moved in (0, 3, -2, 2, -6):
        reference.advance(
            ints(moved),
            lens,
            page_size=4,
            page_table=ints(pages),
            kv_indptr=indptr,
            kv_indices=indices,
            last_page_len=last,
        )
        length, used = int(lens), int(indptr[1])
        picture.text(16, f"{moved:+}: {length}" if moved else f"length {length}")
        for i in range(16):
            kind = "final" if i < length else "free"
            picture.cell(x + i // 4 * (width + 14) + i % 4 * 17, "", kind, 17)
        ids = " ".join(str(page) for page in indices[:used].tolist())
        picture.text(x + 4 * (width + 14) + 8, f"used {ids}, {int(last)} in the last")
        picture.down()
    picture.legend(final="a token's KV", free="free, or of the past: nobody reads it")
    return picture


def draw_cut() -> Picture:
    lens, capacity = [7, 9, 3, 6], 6
    table = ints([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12])
    x = 150
    picture = Picture(760, "kv_indices too small: the cut")
    for size, pad in ((8, 0), (capacity, 0), (capacity, 1)):
        seq_lens, indptr, indices, status = ints(*lens), zeros(5), zeros(size), zeros(4)
        reference.advance(
            None,
            seq_lens,
            page_size=4,
            page_table=table,
            pad_seq_len=pad,
            kv_indptr=indptr,
            kv_indices=indices,
            status=status,
        )
        picture.head(f"{size} entries, pad_seq_len {pad}")
        kinds = ["free"] * size
        for b in range(4):
            for i in range(int(indptr[b]), int(indptr[b + 1])):
                kinds[i] = ("final", "known")[b % 2] if seq_lens[b] > 0 else "free"
        picture.text(x - 12, "kv_indices", "end")
        picture.cells(x, indices.tolist(), kinds)
        picture.down()
        picture.text(x - 24, "kv_indptr", "end")
        for value in sorted(set(indptr.tolist())):
            picture.text(x + value * CELL, value, "middle")
        picture.down(22)
        for b in range(4):
            picture.text(x - 12, f"row {b}", "end faint")
            picture.text(x, f"length {lens[b]} to {int(seq_lens[b])}  {flags(status[b])}")
            picture.down(20)
        picture.down(10)
    return picture


# --- The order of checks -------------------------------------------------------------------------

# Each breaks one thing of a call of advance with one row.
FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "slot": lambda a: a["row_to_slot"].fill_(7),
    "cu_seqlens_q": lambda a: a["cu_seqlens_q"].copy_(ints(0, 9)),
    "length": lambda a: a["seq_lens"].fill_(-3),
    "num_pages": lambda a: a["num_pages"].fill_(99),
    "num_accepted": lambda a: a["num_accepted"].fill_(50),
    "max_seq_len": lambda a: a.update(max_seq_len=6),
    "kv_indices": lambda a: a.update(kv_indices=zeros(1)),
    "page id": lambda a: a["page_table"].copy_(ints([5, -9, 2])),
}


def break_row(faults: Sequence[str]) -> tuple[str, int]:
    """Return the flags and the length of a row of `advance` in which these are wrong."""
    arguments: dict[str, Any] = {
        "num_accepted": ints(1),
        "seq_lens": ints(6),
        "page_size": 4,
        "max_accepted": 3,
        "row_to_slot": ints(0),
        "cu_seqlens_q": ints(0, 2),
        "page_table": ints([5, 9, 2]),
        "num_pages": ints(3),
        "position_ids": ints(4, 5),
        "kv_indices": zeros(3),
        "status": zeros(2),
    }
    for fault in faults:
        FAULTS[fault](arguments)
    reference.advance(**arguments)
    return flags(arguments["status"].sum()), int(arguments["seq_lens"])


def draw_order() -> Picture:
    names, x, width = list(FAULTS), 150, 280
    picture = Picture(x + 2 * width + 32, "The order of checks")
    picture.head("A row of length 6 that moves by 1, and what is wrong with it")
    picture.text(x + width / 2, "this alone", "middle faint")
    picture.text(x + 8 + 1.5 * width, "this and all below", "middle faint")
    picture.down(22)
    for i, name in enumerate([*names, "nothing"]):
        picture.text(x - 12, name, "end")
        for j, faults in enumerate((names[i : i + 1], names[i:])):
            bits, length = break_row(faults)
            kind = "wrong" if length == 0 else "draft" if bits else "known"
            text = f"{bits or 'no flag'}, length {length}"
            picture.cell(x + j * (width + 8), text, kind, width)
        picture.down(ROW + 4)
    picture.legend(wrong="emptied: nothing further is looked at", draft="flagged, goes on")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "stage": draw_stage,
    "accept": draw_accept,
    "draft_step": draw_draft_step,
    "pages": draw_pages,
    "cut": draw_cut,
    "order": draw_order,
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
