"""`specmeta.inspect`: what it shows, what it finds wrong, where it refuses."""

from __future__ import annotations

import doctest
import io
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

import specmeta
from specmeta import BatchMetadata, Status, display
from specmeta.graph import CaptureError, capture

K = 3


def count_up(ids: torch.Tensor) -> torch.Tensor:
    return (ids + 1) % 100


def make_batch(**settings: Any) -> BatchMetadata:
    sizes = {
        "max_rows": 4,
        "max_slots": 6,
        "max_tokens": 16,
        "max_pages": 8,
        "page_size": 4,
        "max_seq_len": 32,
        "max_draft_len": K,
    }
    return BatchMetadata(**{**sizes, **settings})


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def batch() -> BatchMetadata:
    """Two requests after their prompts' first chunks, with an empty row between them."""
    made = make_batch()
    made.assign(2, prompt=[7, 8, 9], pages=[1, 2, 3, 4])
    made.assign(5, prompt=[*range(9)], pages=[*range(9, 17)])
    made.set_rows([2, -1, 5], query_lens=[K + 1, 0, 4])
    made.stage()
    made.accept_greedy(count_up(made.input_ids))
    return made


def test_rows_and_slots(batch: BatchMetadata) -> None:
    assert (
        str(specmeta.inspect(batch))
        == """\
BatchMetadata on cpu: rows 2 of 4, slots 2 of 6, tokens 16, page_size 4, max_seq_len 32, drafts 3
row  slot  known  cached  query  seq_len  drafts  accepted  pages   last page  next
───────────────────────────────────────────────────────────────────────────────────
  0     2      4       0      3        3       0         0  1               3    10
  2     5      9       0      4        4       0         0  9               4     4
unused rows: 1 3

row  tokens  positions  write slots
───────────────────────────────────
  0    0..2       0..2  4..6
  2    3..6       0..3  36..39

slot  known  committed  drafts  written  pages                   status
───────────────────────────────────────────────────────────────────────
   2      4          3       0        0  1 2 3 4                 -
   5      9          4       0        0  9 10 11 12 13 14 … (8)  -
unused slots: 0..1 3..4"""
    )


def test_docstring() -> None:
    result = doctest.testmod(display, extraglobs={"specmeta": specmeta})
    assert result.attempted > 0
    assert result.failed == 0


def test_every_display_shows_the_same(
    batch: BatchMetadata, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    table = specmeta.inspect(batch)
    text = repr(table)
    sys.displayhook(table)  # what a REPL does
    assert capsys.readouterr().out == f"{text}\n"
    file = io.StringIO()
    Console(file=file, width=100).print(table)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == text.splitlines()
    bundle = table._repr_mimebundle_()
    assert "seq_len" in bundle["text/html"]
    assert "seq_len" in bundle["text/plain"]
    batch.seq_lens.fill_(30)
    assert repr(table) == text  # of the moment when it was read


def test_no_column_is_lost_on_80_columns(
    batch: BatchMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(specmeta.inspect(batch)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    head = next(line for line in lines if line.startswith("row"))
    assert head.split() == [
        "row", "slot", "known", "cached", "query", "seq_len", "drafts", "accepted", "pages",
        "page", "next",
    ]  # fmt: skip


def test_write_slots_of_a_long_row(batch: BatchMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    far = [2**28 - 2 * i for i in range(8)]
    batch = make_batch(max_tokens=32, max_seq_len=2**17)
    batch.assign(2, prompt=[*range(32)], pages=far)
    batch.set_rows([2], query_lens=[32])
    batch.stage()
    table = specmeta.inspect(batch)
    assert table.faults == []
    _, tokens, _ = str(table).split("\n\n")
    assert all(len(line) <= 80 for line in tokens.splitlines())
    slots = [f"{4 * page}..{4 * page + 3}" for page in far[:4]]
    row = "".join(tokens.splitlines()[2:])
    assert row.split() == ["0", "0..31", "0..31", *slots, "…", "(8)"]
    batch.set_rows([], [])
    assert "write slots" not in str(specmeta.inspect(batch))


@pytest.mark.parametrize("lists", ["both", "kv_indices", "block_table", "neither"])
def test_nothing_is_wrong_in_a_whole_run(lists: str) -> None:
    batch = make_batch(
        pad_seq_len=1,
        with_kv_indices=lists in ("both", "kv_indices"),
        with_block_table=lists in ("both", "block_table"),
    )
    assert specmeta.inspect(batch).faults == []
    batch.assign(2, prompt=[7, 8, 9], pages=[1, 2, 3])
    batch.assign(5, prompt=[*range(9)], pages=[*range(9, 17)])
    batch.set_rows([2, -1, 5], query_lens=[K + 1, 0, 4])
    for _ in range(8):
        batch.stage()
        assert specmeta.inspect(batch).faults == []
        batch.accept_greedy(count_up(batch.input_ids))
        assert specmeta.inspect(batch).faults == []
        drafts = count_up(batch.draft_input_ids[batch.token_indices])
        for k in range(K):
            batch.draft_step(drafts, index=k, last=k == K - 1)
            drafts = count_up(drafts)
            assert specmeta.inspect(batch).faults == []
    shown = str(specmeta.inspect(batch))
    assert "OVERFLOW" in shown  # the first request has filled its pages
    batch.release(2)
    batch.release(5)
    batch.set_rows([], [])
    assert "rows 0 of 4, slots 0 of 6" in str(specmeta.inspect(batch))


@pytest.mark.parametrize(
    ("name", "index", "value", "fault"),
    [
        ("pages_per_seq", (0,), 2, "row 0: pages_per_seq is 2, seq_len 3 and page_size 4 make 1"),
        ("last_page_len", (2,), 1, "row 2: last_page_len is 1, seq_len 4 and page_size 4 make 4"),
        ("kv_indptr", (4,), 5, None),  # of a padding row
        ("kv_indptr", (3,), 4, "row 2: kv_indptr's part is 3, seq_len 4 and page_size 4 make 1"),
        ("cu_seqlens_q", (0,), -1, "row 0: cu_seqlens_q goes from -1 to 3, of 16 tokens"),
        ("cu_seqlens_q", (2,), 1, "row 1: cu_seqlens_q goes from 3 to 1, of 16 tokens"),
        ("cu_seqlens_q", (3,), 2, "row 2: cu_seqlens_q goes from 3 to 2, of 16 tokens"),
        ("cu_seqlens_q", (3,), 17, "row 2: cu_seqlens_q goes from 3 to 17, of 16 tokens"),
        ("cu_seqlens_q", (3,), 6, "row 2: cached 0 and query 3, seq_len 4"),
        ("cu_seqlens_q", (4,), 2, None),  # of a padding row
        ("position_ids", (1,), 5, "row 0: position_ids 0 5 2, cached 0"),
        ("position_ids", (7,), 5, None),  # of a padding token
        (
            "position_ids",
            slice(3, 7),
            torch.arange(1, 5),
            "row 2: position_ids 1..4, cached 0 (right only if advance moves positions otherwise "
            "than lengths)",
        ),
        (
            "slot_mapping",
            (5,),
            4,
            "row 2: slot_mapping 36..37 4 39, the pages of slot 5 make 36..39 (right only if the "
            "row is not staged yet)",
        ),
        (
            "slot_mapping",
            (0,),
            -1,
            "row 0: slot_mapping -1 5..6, the pages of slot 2 make 4..6 (right only if the row is "
            "not staged yet)",
        ),
        ("cached_lens", (0,), 9, "row 0: cached 9, seq_len 3"),
        ("seq_lens", (0,), -3, "row 0: cached 0, seq_len -3"),
        ("row_to_slot", (0,), 6, "row 0: slot 6 of 6"),
        ("row_to_slot", (1,), 5, "row 2: slot 5 stands in row 1 too"),
        (
            "block_table",
            (0, 0),
            8,
            "row 0: block_table has pages 8, slot 2 has 1 (right only if the row is not staged "
            "yet)",
        ),
        (
            "kv_indices",
            (1,),
            8,
            "row 2: kv_indices has pages 8, slot 5 has 9 (right only if the row is not staged yet)",
        ),
        ("page_table", (5, 7), 1, "page 1: in slots 2 5 (right only if none of them writes it)"),
        ("page_table", (5, 7), 0, "slot 5: holds pad_page 0"),
        ("page_table", (5, 1), -4, "slot 5: a negative id among its pages 9 -4 11 12 13 14 … (8)"),
        ("num_pages", (2,), 9, "slot 2: num_pages 9, of at most 8"),
        (
            "committed_lens",
            (2,),
            5,
            "slot 2: committed 5, known 4, drafts 0: not in order, or past the ledger's 36",
        ),
        (
            "num_drafts",
            (2,),
            33,
            "slot 2: committed 3, known 4, drafts 33: not in order, or past the ledger's 36",
        ),
        ("num_pages", (5,), 0, "slot 5: 4 tokens are in 0 pages of 4"),
    ],
)
def test_what_is_wrong(
    batch: BatchMetadata, name: str, index: Any, value: int | torch.Tensor, fault: str | None
) -> None:
    assert specmeta.inspect(batch).faults == []
    getattr(batch, name)[index] = value
    table = specmeta.inspect(batch)
    if fault is None:
        assert table.faults == []
    else:
        assert fault in table.faults
        assert f"! {fault}"[:60] in str(table)


def test_one_line_for_one_fault(batch: BatchMetadata) -> None:
    batch.cached_lens[0] = 9
    assert specmeta.inspect(batch).faults == ["row 0: cached 9, seq_len 3"]
    batch.page_table[5, 1] = -4  # its tokens have pad_slot
    batch.stage()
    assert batch.slot_mapping[3:8].tolist() == [-1, -1, -1, -1, -1]
    assert specmeta.inspect(batch).faults == [
        "slot 5: a negative id among its pages 9 -4 11 12 13 14 … (8)"
    ]


@pytest.mark.parametrize("num_drafts", [0, K])
def test_rows_of_one_token(num_drafts: int) -> None:
    """A draft loop makes such rows look like staged ones, whose positions stand one behind."""
    batch = make_batch(max_draft_len=num_drafts)
    batch.assign(2, prompt=[7, 8], pages=[1, 2])
    batch.set_rows([2], query_lens=[1])
    for _ in range(4):
        batch.stage()
        assert specmeta.inspect(batch).faults == []
        batch.accept_greedy(count_up(batch.input_ids))
        assert specmeta.inspect(batch).faults == []
        for k in range(num_drafts):
            batch.draft_step(batch.next_tokens, index=k)
            assert specmeta.inspect(batch).faults == []
    batch.stage()
    batch.position_ids[0] = 9
    batch.slot_mapping[0] = 7
    faults = specmeta.inspect(batch).faults
    assert [fault.split(", ")[0] for fault in faults] == [
        "row 0: position_ids 9",
        "row 0: slot_mapping 7",
    ]
    if num_drafts == 0:  # no loop
        batch.draft_position_ids[0] = batch.cached_lens[0]
        assert len(specmeta.inspect(batch).faults) == 2


@pytest.mark.parametrize(("bias", "positions"), [(2, "3..5"), (-2, "0 0..1"), (99, "31 31 31")])
def test_positions_after_advance(batch: BatchMetadata, bias: int, positions: str) -> None:
    counts = torch.tensor([0, 0, 1, 0, 0, 0])
    batch.advance(counts)
    assert specmeta.inspect(batch).faults == []
    batch.advance(torch.zeros_like(counts), position_bias=bias)
    faults = specmeta.inspect(batch).faults
    assert len(faults) == 2
    assert faults[0] == (
        f"row 0: position_ids {positions}, cached 1 (right only if advance moves positions "
        "otherwise than lengths)"
    )
    batch.advance(torch.full_like(counts, 99))  # empties the rows, and their tokens
    assert specmeta.inspect(batch).faults == []


def test_status_in_words(batch: BatchMetadata) -> None:
    batch.status[5] = Status.OVERFLOW | Status.BAD_PAGE
    batch.status[6] = Status.BAD_SLOT
    lines = str(specmeta.inspect(batch)).splitlines()
    assert any(line.startswith("   5") and line.endswith("OVERFLOW, BAD_PAGE") for line in lines)
    assert any("rows without a slot" in line and line.endswith("BAD_SLOT") for line in lines)
    batch.num_pages[0] = 3  # a slot that nobody holds is shown where it isn't empty
    assert any(line.startswith("   0") for line in str(specmeta.inspect(batch)).splitlines())


def test_a_view_and_a_drafter(batch: BatchMetadata) -> None:
    view = str(specmeta.inspect(batch.first_rows(1)))
    assert "rows 1 of 1, slots 2 of 6" in view
    for eagle, kind in ((True, "of Eagle, on cpu"), (False, "of a draft model, on cpu")):
        drafter = make_batch(ledger=batch, eagle=eagle)
        drafter.assign(2, [], pages=[1])
        drafter.assign(5, [], pages=[2, 3])
        if not eagle:
            drafter.set_query_lens([4, 0, 4])
        drafter.stage()
        table = specmeta.inspect(drafter)
        assert table.faults == []
        text = str(table)
        assert kind in text
        assert "next" not in text
        slot = next(line for line in text.splitlines() if line.startswith("   5"))
        assert slot.split()[:5] == ["5", "9", "4", "0", "0"]  # the target's lengths
        drafter.written_lens[5] = 9
        assert specmeta.inspect(drafter).faults == ["slot 5: 9 tokens are in 2 pages of 4"]


def test_not_inside_a_capture(batch: BatchMetadata) -> None:
    with pytest.raises(CaptureError, match=r"^specmeta\.inspect: expected a call between replays"):
        capture(lambda: print(specmeta.inspect(batch)), num_rows=batch.num_rows)


@pytest.mark.parametrize("device", ["cuda"])
def test_not_inside_a_cuda_graph(device: str) -> None:
    batch = make_batch(device=device)
    assert "on cuda" in str(specmeta.inspect(batch))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.stage()
        with pytest.raises(CaptureError, match="between replays"):
            specmeta.inspect(batch)


def test_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match=r"^batch: expected a BatchMetadata, got None$"):
        specmeta.inspect(None)


def test_without_rich(batch: BatchMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"specmeta\.inspect needs rich: pip install .*debug"):
        specmeta.inspect(batch)
