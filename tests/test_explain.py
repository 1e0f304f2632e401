"""`specmeta explain`: every case, what it says of each rule, pasted arrays, errors, exit codes."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
from conftest import OPERATIONS
from hypothesis import given, settings
from hypothesis import strategies as st

import specmeta
from specmeta import Status, _paste, cli, explain, reference
from specmeta import cases as case_files
from specmeta._notes import collect, collected
from specmeta.cases import Case, CaseError, load_case, parse

HERE = Path(__file__).parent
CASES = sorted((HERE / "cases").glob("*.json"))
EXAMPLES = 60  # random calls of each operation

ADVANCE = {
    "op": "advance",
    "args": {
        "seq_lens": [16, 10],
        "num_accepted": [3, 9],
        "page_size": 4,
        "seq_len_bias": -1,
        "max_accepted": 4,
        "page_table": [[5, 9, 2, 7, 8], [1, 3, 4, -1, -1]],
        "status": [0, 0],
    },
}


def said(op: str, **args: Any) -> list[str]:
    """What is said of a call, with the bits."""
    notes = explain.explain(parse({"op": op, "args": args})).notes
    return [f"{Status.words(note.bit)} " * (note.bit > 0) + str(note) for note in notes]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["explain", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(path))
    assert (code, err) == (0, "")
    assert out.endswith("reference: as what the file expects\noperator: as what the file expects\n")
    case = load_case(path)
    rows = len(explain.explain(case).slots)
    blocks = re.split(r"^row (\d+)", out.split("\nresult")[0], flags=re.MULTILINE)[1:]
    assert [int(b) for b in blocks[::2]] == list(range(rows))
    assert all("(contract: " in block for block in blocks[1::2])
    assert "\x1b" not in out
    # Each bit that the call set is said, in words, at the rows that set it.
    if "status" in case.expect:
        before = case.args.get("status", torch.zeros_like(case.expect["status"]))
        new = {bit for word in (case.expect["status"] & ~before).tolist() for bit in Status(word)}
        said = {Status[name] for name in re.findall(r"^  ([A-Z_]+): ", out, re.MULTILINE)}
        assert said == new


@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_random_calls(op: str, data: st.DataObject) -> None:
    """What is flagged is what `status` says, and every row has its reason."""
    call = data.draw(getattr(strategies, f"{op}_calls")())
    call.setdefault("num_accepted", None) if op == "advance" else None
    known = case_files.arguments_of(op)
    case = Case(op, {name: value for name, value in call.items() if name in known}, {})
    explanation = explain.explain(case)
    assert explanation.operator is None
    slots = explanation.slots
    assert {note.row for note in explanation.notes} <= set(range(len(slots)))
    assert all(str(note) for note in explanation.notes)
    if "status" in call:
        words = call["status"].tolist()
        for note in explanation.notes:
            slot = slots[note.row]
            words[-1 if slot is None else slot] |= note.bit
        assert words == explanation.results["status"].tolist()
    list(explain._render(explanation, explain._choose_rows(explanation)))


def test_sections_are_those_of_the_contract() -> None:
    contract = (HERE.parent / "docs" / "contract.md").read_text()
    words = re.findall(r"^\| `?([a-z_ ]+)", contract, re.MULTILINE)
    words += ["cu_seqlens_q", "num_rows", "slot_mapping", "seq_lens", "slot"]
    heads = [
        name
        for line in re.findall(r"^## (.+?):", contract, re.MULTILINE)
        for name in line.split(", ")
    ]
    known = {*(word.strip() for word in words), *heads, "accept_*"}
    known |= {f"rule {n}" for n in re.findall(r"^(\d)\. \*\*", contract, re.MULTILINE)}
    source = Path(reference.__file__).read_text()
    sections = re.findall(r'\.note\(b, "([^"]+)"', source) + re.findall(
        r'section="([^"]+)"', source
    )
    assert len(sections) > 30
    assert {*sections} - {"rule 5"} <= known, {*sections} - known


FAULTS = [
    (
        "advance",
        {"seq_lens": [3], "num_accepted": [6], "page_size": 4, "page_table": [[5, 9]]},
        "OVERFLOW length 3 + 6 = 9, above capacity 8: emptied (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [9], "num_accepted": [-9], "page_size": 4},
        "UNDERFLOW length 9 + -9 = 0, below q = 1: emptied (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [9], "num_accepted": [7], "page_size": 4, "max_accepted": 4},
        "BAD_COUNT num_accepted[0] = 7 outside [0, 4]: read as 4 (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [-9], "page_size": 4},
        "BAD_COUNT seq_lens[0] = -9 is negative: emptied (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [9], "num_accepted": [7], "page_size": 4, "count_index": [3]},
        "BAD_SLOT count 3 of 1: the row stands still (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [9], "page_size": 4, "row_to_slot": [2], "page_table": [[5, 9, 2]]},
        "BAD_SLOT row_to_slot[0] = 2, of 1 slots: empty (contract: rule 5)",
    ),
    (
        "advance",
        {
            "seq_lens": [9],
            "page_size": 4,
            "page_table": [[5, -7, 2]],
            "num_pages": [3],
            "kv_indices": [0, 0, 0],
        },
        "BAD_PAGE a negative id among used pages: 5 -7 2 (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [9], "page_size": 4, "page_table": [[5, 7, 2]], "num_pages": [8]},
        "BAD_COUNT num_pages[0] = 8 outside [0, 3]: read as 3 (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [9], "page_size": 4, "alloc_pages": [5, 7, 2], "alloc_indptr": [2, 1]},
        "BAD_INDPTR alloc_indptr[0:2] = 2 1 is a bad pair, A = 3: no pages (contract: rule 5)",
    ),
    (
        "advance",
        {"seq_lens": [9], "page_size": 4, "cu_seqlens_q": [0, 3], "position_ids": [7, 8]},
        "BAD_INDPTR cu_seqlens_q[0:2] = 0 3 is a bad pair or behind one, T = 2: emptied "
        "(contract: rule 5)",
    ),
    (
        "advance",
        {
            "seq_lens": [9, 3],
            "page_size": 4,
            "page_table": [[5, 7, 2], [1, 3, 4]],
            "kv_indices": [0, 0, 0],
        },
        "OVERFLOW kv_indices holds 3 pages, 4 are needed up to this row: emptied "
        "(contract: rule 6)",
    ),
    (
        "stage",
        {"committed_lens": [4], "query_lens": [6], "page_size": 4, "page_table": [[5, 9]]},
        "OVERFLOW 6 query tokens, room for 4: pages (contract: rule 5)",
    ),
    (
        "stage",
        {"committed_lens": [4], "query_lens": [6], "page_size": 4, "tokens": [[7] * 9]},
        "OVERFLOW 6 query tokens, room for 5: ledger (contract: rule 5)",
    ),
    (
        "stage",
        {
            "committed_lens": [4],
            "query_lens": [6],
            "page_size": 4,
            "input_ids": [0, 0],
            "tokens": [[7] * 9],
        },
        "OVERFLOW 6 query tokens, room for 2: token buffer (contract: rule 5)",
    ),
    (
        "stage",
        {"committed_lens": [4], "query_lens": [-1], "page_size": 4},
        "BAD_COUNT negative among c = 4, num_drafts = 0, query_lens = -1: emptied "
        "(contract: rule 5)",
    ),
    (
        "accept_greedy",
        {
            "target_tokens": [1, 2],
            "input_ids": [1, 2],
            "cu_seqlens_q": [0, 2],
            "num_draft_tokens": [2],
        },
        "BAD_COUNT num_draft_tokens[0] = 2 outside [0, 1]: read as 1 (contract: rule 5)",
    ),
    (
        "accept_greedy",
        {"target_tokens": [1, 2], "input_ids": [1, 2], "cu_seqlens_q": [0, 2], "seq_lens": [1]},
        "UNDERFLOW seq_lens[0] = 1, below q = 2: emptied (contract: rule 5)",
    ),
    (
        "accept_greedy",
        {
            "target_tokens": [8],
            "input_ids": [7],
            "cu_seqlens_q": [0, 1],
            "seq_lens": [2],
            "committed_lens": [1],
            "known_lens": [2],
            "tokens": [[6, 7]],
        },
        "OVERFLOW tokens[0, 2] is past its 2 places: 8 is not stored (contract: rule 5)",
    ),
    (
        "accept_sampled",
        {"sampled_tokens": [[-1, -1]], "vocab_size": 9, "cu_seqlens_q": [0, 2]},
        "BAD_COUNT no valid id: the step is void, next = pad_token (contract: rule 5)",
    ),
    (
        "count_sampled",
        {"sampled_tokens": [[9, 1]], "vocab_size": 9},
        "BAD_COUNT no valid id: next = pad_token (contract: rule 5)",
    ),
    (
        "locate_sampled",
        {"num_sampled": [4], "cu_num_draft_tokens": [2], "cu_seqlens_q": [0, 3]},
        "BAD_COUNT num_sampled[0] = 4 outside [0, 3]: clamped (contract: rule 5)",
    ),
    (
        "locate_sampled",
        {"num_sampled": [1], "cu_num_draft_tokens": [3], "cu_seqlens_q": [0, 3]},
        "BAD_COUNT 3 drafts, outside [0, 2]: read as 2 (contract: rule 5)",
    ),
    (
        "keep_last",
        {"cu_seqlens_q": [0, 3], "seq_lens": [2]},
        "UNDERFLOW seq_lens[0] = 2, below q = 3: emptied (contract: rule 5)",
    ),
    (
        "keep_last",
        {"cu_seqlens_q": [0, 3], "seq_lens": [2**31]},
        "OVERFLOW seq_lens[0] = 2147483648 > 2^31 - 1: emptied (contract: rule 5)",
    ),
    (
        "map_slots",
        {"position_ids": [-1], "slot_mapping": [0], "page_size": 4, "page_table": [[5]]},
        "BAD_COUNT position_ids[0] = -1 is negative: pad_slot (contract: rule 5)",
    ),
    (
        "map_slots",
        {"position_ids": [4], "slot_mapping": [0], "page_size": 4, "page_table": [[5]]},
        "OVERFLOW position_ids[0] = 4, not below capacity 4: pad_slot (contract: rule 5)",
    ),
    (
        "map_slots",
        {
            "position_ids": [3],
            "slot_mapping": [0],
            "page_size": 4,
            "page_table": [[-5]],
            "num_pages": [1],
        },
        "BAD_PAGE position_ids[0] = 3 is in page -5: pad_slot (contract: rule 5)",
    ),
    (
        "draft_lists",
        {"seq_lens": [3], "page_size": 4, "num_steps": 2, "page_table": [[5]]},
        "OVERFLOW step 1: length 5, above capacity 4: empty in this step (contract: rule 5)",
    ),
    (
        "draft_step",
        {"seq_lens": [3], "page_size": 4, "num_rejected": [3]},
        "BAD_COUNT num_rejected[0] = 3 outside [0, 2]: read as 2 (contract: rule 5)",
    ),
    (
        "draft_step",
        {"seq_lens": [4], "page_size": 4, "page_table": [[5]]},
        "OVERFLOW length 4 + 1, above capacity 4: emptied, drafts no more (contract: rule 5)",
    ),
]
# What is said of rows that are right: (operation, arguments, all that is said).
RIGHT = [
    (
        "advance",
        {
            "seq_lens": [16],
            "num_accepted": [3],
            "seq_len_bias": -4,
            "page_size": 8,
            "row_to_slot": [1],
            "cu_seqlens_q": [0, 5],
            "page_table": [[1, 1, 1], [5, 9, 2]],
            "count_index": [0],
            "position_ids": [0] * 5,
            "slot_mapping": [0] * 5,
        },
        [
            "row_to_slot[0] = 1 (contract: slot)",
            "tokens [0, 5): q = 5 (contract: cu_seqlens_q)",
            "allocated pages: 5 9 2; page_size 8, length limit 2147483647: capacity 24 "
            "(contract: allocated pages)",
            "num_accepted[0] = 3, + seq_len_bias -4 = -1 (contract: advance)",
            "length 16 + -1 = 15: at least q = 5, at most capacity 24 (contract: advance)",
            "length 15, cached 10: used pages 2, kv_indptr 0 to 2, their ids 5 9 "
            "(contract: used pages)",
            "cache indices [10, 15) are in slots 74 75 76 77 78 (contract: slot_mapping)",
            "position_ids[0:5] = 3 3 3 3 3 (contract: advance)",
        ],
    ),
    (
        "stage",
        {
            "committed_lens": [4],
            "limit_lens": [9],
            "known_lens": [5],
            "num_drafts": [2],
            "query_lens": [9],
            "page_size": 4,
            "tokens": [[11, 12, 13, 14, 15, 16, 17, 18]],
            "input_ids": [0] * 4,
        },
        [
            "c = 4 (committed_lens 4, limit_lens 9), num_drafts 2 (contract: stage)",
            "query_lens[0] = 9 (contract: stage)",
            "known_lens[0] - c + num_drafts = 5 - 4 + 2, at least 0: 3 (contract: stage)",
            "allocated pages: not given; page_size 4, length limit 2147483647: capacity "
            "2147483647 (contract: allocated pages)",
            "tokens [0, 3): q = 3, 2 of them drafts; length 4 + 3 = 7 (contract: stage)",
            "length 7, cached 4: used pages 2, kv_indptr 0 to 2, their ids not given "
            "(contract: used pages)",
            "input_ids = tokens[0, 4:7] = 15 16 17 (contract: stage)",
        ],
    ),
    (
        "accept_greedy",
        {
            "target_tokens": [8, 99, 5],
            "input_ids": [7, 8, 9],
            "cu_seqlens_q": [0, 3],
            "seq_lens": [6],
            "committed_lens": [3],
            "known_lens": [4],
            "num_drafts": [2],
            "tokens": [[1, 2, 3, 7, 8, 9, 0]],
        },
        [
            "tokens [0, 3): q = 3 (contract: cu_seqlens_q)",
            "drafts: 2, behind token 0 (contract: accept_*)",
            "drafts confirmed: 8 (contract: accept_greedy)",
            "draft 1 is 9, the target says 99: rejected (contract: accept_greedy)",
            "committed_lens[0] = 6 - 1 = 5, known_lens[0] = 6 (contract: accept_*)",
            "tokens[0, 5] = 99 (contract: accept_*)",
            "1 accepted, 1 rejected, next 99, token index 1 (contract: accept_*)",
        ],
    ),
    (
        "accept_sampled",
        {
            "sampled_tokens": [[5, -1]],
            "vocab_size": 9,
            "cu_seqlens_q": [0, 2],
            "seq_lens": [2],
            "committed_lens": [0],
            "known_lens": [4],
            "tokens": [[1, 2, 3, 4]],
        },
        [
            "tokens [0, 2): q = 2 (contract: cu_seqlens_q)",
            "drafts: 1, behind token 0 (contract: accept_*)",
            "sampled_tokens[0, :2] = 5 -1: 1 valid (contract: accept_sampled)",
            "committed 1 < known_lens[0] = 4: a chunk of a prompt, which emits nothing "
            "(contract: accept_*)",
            "next = tokens[0, 1] = 2 (contract: accept_*)",
            "0 accepted, 1 rejected, next 2, token index 0 (contract: accept_*)",
        ],
    ),
    (
        "count_sampled",
        {
            "sampled_tokens": [[5, -1], [5, 6], [-1, 1]],
            "vocab_size": 9,
            "num_rows": 3,
            "discarded": [False, True, False],
            "backup_tokens": [1, 2, 3],
        },
        [
            "sampled_tokens[0] = 5 -1: 1 valid (contract: count_sampled)",
            "discarded[1]: nothing counts (contract: count_sampled)",
            "next = backup_tokens[1] = 2 (contract: count_sampled)",
            "sampled_tokens[2] = -1 1: 0 valid (contract: count_sampled)",
            "next = backup_tokens[2] = 3 (contract: count_sampled)",
        ],
    ),
    (
        "locate_sampled",
        {"num_sampled": [2], "cu_num_draft_tokens": [3], "cu_seqlens_q": [0, 4]},
        [
            "tokens [0, 4): q = 4 (contract: cu_seqlens_q)",
            "2 of 3 drafts rejected: token index 1 (contract: locate_sampled)",
        ],
    ),
    (
        "keep_last",
        {"cu_seqlens_q": [0, 3, 3], "seq_lens": [7, 4], "num_rows": 2},
        [
            "tokens [0, 3): q = 3 (contract: cu_seqlens_q)",
            "tokens [3, 3): q = 0 (contract: cu_seqlens_q)",
            "token 2 is kept: cached 6 (contract: keep_last)",
            "q = 0: empty (contract: keep_last)",
        ],
    ),
    (
        "map_slots",
        {
            "position_ids": [3, 4],
            "slot_mapping": [0] * 3,
            "page_size": 4,
            "max_seq_len": 7,
            "cu_seqlens_q": [0, 2],
            "page_table": [[5, 9]],
        },
        [
            "tokens [0, 2): q = 2 (contract: cu_seqlens_q)",
            "allocated pages: 5 9; page_size 4, length limit 7: capacity 7 "
            "(contract: allocated pages)",
            "positions 3 4 are in slots 23 36 (contract: map_slots)",
        ],
    ),
    (
        "draft_lists",
        {
            "seq_lens": [4, 0],
            "page_size": 4,
            "num_steps": 1,
            "row_to_slot": [0, -1],
            "page_table": [[5, 9]],
            "pad_seq_len": 1,
            "num_rows": [2],
        },
        [
            "row_to_slot[0] = 0 (contract: slot)",
            "row_to_slot[1] = -1: empty (contract: slot)",
            "tokens [0, 1): q = 1 (contract: cu_seqlens_q)",
            "allocated pages: 5 9; page_size 4, length limit 2147483647: capacity 8 "
            "(contract: allocated pages)",
            "step 0: length 5 (contract: draft_lists)",
            "length 5, cached 4: used pages 2, kv_indptr 0 to 2, their ids 5 9 "
            "(contract: used pages)",
            "an empty row lists pad_page, 0 (contract: rule 4)",
        ],
    ),
    (
        "draft_step",
        {
            "seq_lens": [6, 6, 0],
            "page_size": 4,
            "num_rejected": [2, 0, 0],
            "num_rows": 3,
            "draft_tokens": [51, 52, 53],
            "known_lens": [5, 9, 0],
            "num_drafts": [0, 0, 0],
            "tokens": [[1] * 9] * 3,
            "written_lens": [0, 0, 0],
            "last": True,
        },
        [
            "tokens [0, 1): q = 1 (contract: cu_seqlens_q)",
            "tokens [1, 2): q = 1 (contract: cu_seqlens_q)",
            "tokens [2, 3): q = 1 (contract: cu_seqlens_q)",
            "allocated pages: not given; page_size 4, length limit 2147483647: capacity "
            "2147483647 (contract: allocated pages)",
            "kept = 6 - 2 rejected = 4 (contract: draft_step)",
            "tokens[0, 5] = 51, num_drafts[0] = 1 (contract: draft_step)",
            "written_lens[0] = 4 (contract: draft_step)",
            "last: the row stays as it is (contract: draft_step)",
            "allocated pages: not given; page_size 4, length limit 2147483647: capacity "
            "2147483647 (contract: allocated pages)",
            "kept = 6 - 0 rejected = 6 (contract: draft_step)",
            "known_lens[1] = 9 + 0 is not 6 + shift 1: mid-prompt, no draft (contract: draft_step)",
            "written_lens[1] = 6 (contract: draft_step)",
            "last: the row stays as it is (contract: draft_step)",
            "seq_lens[2] = 0: empty (contract: seq_lens)",
        ],
    ),
]


@pytest.mark.parametrize(("op", "args", "note"), FAULTS, ids=[note[:40] for *_, note in FAULTS])
def test_faults(op: str, args: dict[str, Any], note: str) -> None:
    assert next(n for n in said(op, **args) if n.split()[0] in Status.__members__) == note


@pytest.mark.parametrize(("op", "args", "notes"), RIGHT, ids=[op for op, *_ in RIGHT])
def test_what_is_said_of_a_right_row(op: str, args: dict[str, Any], notes: list[str]) -> None:
    assert said(op, **args) == notes


def test_the_examples_have_every_operation_and_every_bit() -> None:
    assert {op for op, *_ in RIGHT} == {op for op, *_ in FAULTS} == set(OPERATIONS)
    assert {note.split()[0] for *_, note in FAULTS} == set(Status.__members__)


def test_padding_and_context_rows() -> None:
    notes = said(
        "advance",
        seq_lens=[5, 0, 9],
        num_accepted=[2],
        count_index=[-1, 0, 0],
        page_size=4,
        num_rows=2,
    )
    assert "not below num_rows = 2: padding (contract: num_rows)" in notes
    assert "count_index[0] = -1: a context row, which stands still (contract: advance)" in notes
    assert "seq_lens[1] = 0: empty (contract: seq_lens)" in notes


def test_long_lists_are_cut() -> None:
    (note,) = (
        n
        for n in said("advance", seq_lens=[9], page_size=4, page_table=[[*range(1, 41)]])
        if n.startswith("allocated")
    )
    assert note.startswith("allocated pages: 1 2 3 4 5 6 7 8 9 10 11 12 … (40); page_size")


def test_nothing_is_noted_where_nobody_listens() -> None:
    args = {"seq_lens": torch.tensor([3]), "page_size": 4, "num_accepted": None}
    assert collected() is None
    with collect() as notes:
        reference.advance(**args)
        assert collected() is notes
    count = len(notes.notes)
    assert count > 0
    assert collected() is None
    reference.advance(**args)
    assert len(notes.notes) == count


# --- What the file holds


PASTED = """
# from a bug report
op = advance
seq_lens: tensor([16,
        10], device='cuda:0', dtype=torch.int32)
num_accepted=tensor([3, 9], device='cuda:0')
page_size = 4,
seq_len_bias: -1
max_accepted = 4
page_table = array([[ 5,  9,  2,  7,  8],
       [ 1,  3,  4, -1, -1]], dtype=int32)
status = [0, 0]
"""


def test_every_form_is_the_same_call() -> None:
    case = parse(ADVANCE)
    flat = {"op": "advance", **ADVANCE["args"]}  # type: ignore[dict-item]
    for text in (json.dumps(ADVANCE), json.dumps(flat), PASTED):
        read = _paste.read_call(text, source="file")
        assert read.operator == "advance"
        assert read.args.keys() == case.args.keys()
        for name, value in case.args.items():
            assert torch.equal(torch.as_tensor(read.args[name]), torch.as_tensor(value)), name
    pasted = _paste.read_call(PASTED, source="file")
    assert pasted.args["seq_lens"].dtype == torch.int32
    assert pasted.args["num_accepted"].dtype == torch.int64
    without = PASTED.replace("op = advance\n", "")
    assert _paste.read_call(without, source="file", operator="advance").operator == "advance"


def test_comments_and_scalars_that_print_their_type() -> None:
    text = """op = advance  # (the second step
seq_lens = [np.int64(16), np.int32(-10)]  # [by row
page_size = tensor(4, device='cuda:0')
use_initial_states = [np.True_, tensor(False)]
position_ids = [tensor(3), # row 0)
    4]
"""
    args = _paste.read_call(text, source="file").args
    assert args["seq_lens"].tolist() == [16, -10]
    assert args["page_size"] == 4
    assert args["use_initial_states"].tolist() == [True, False]
    assert args["position_ids"].tolist() == [3, 4]


def test_a_long_tensor_is_read_at_once() -> None:
    pages = torch.arange(100_000, dtype=torch.int32)
    lines = "\n".join(map(str, pages.tolist())).replace("\n", ",\n")
    text = f"op = advance\nseq_lens = [1]\npage_size = 4\nalloc_pages = tensor([{lines}])\n"
    case = _paste.read_call(text, source="file")
    assert torch.equal(case.args["alloc_pages"], pages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_lens = [3]", "op: missing: write `op = advance`, or say --op advance"),
        ("op = advanc", "op: expected one of .*, got 'advanc'; did you mean advance?"),
        ("op = advance\nseq_len = [3]", "args: expected .*'seq_len'; did you mean seq_lens?"),
        ("op = advance\nseq_lens = [3, 4", "seq_lens: expected a number, a list, .* got '\\[3, 4'"),
        ("op = advance\nseq_lens = [3 4]", "seq_lens: expected a number, a list"),
        ("op = advance\nseq_lens = open('x')", "seq_lens: expected a number, a list"),
        ("op = advance\nseq_lens = tensor()", "seq_lens: expected a number, a list"),
        ("op = advance\nseq_lens = tensor([1, 2, ..., 9])", "seq_lens: shortened (...)"),
        ("op = advance\nseq_lens = [1.5]", "args.seq_lens: expected an integer, got 1.5"),
        ("op = advance\nwhat is this", "line 2: expected `name = value`, got 'what is this'"),
        ("op = advance\nseq_lens = [1]\nseq_lens = [2]", "seq_lens: given a second time in line 3"),
        ("op = advance\nseq_lens = [1]", "args: expected page_size, which advance needs"),
        ('{"op": "advance",', "expected JSON"),
        ('{"op": "advance", "seq_lens": [3], "seq_lens": [4]}', "seq_lens: given a second time"),
        ("[1]", "the file: expected an object, got \\[1\\]"),
        ("", "op: missing"),
        (
            "op = advance\nseq_lens = [1]\npage_size = 4\ncu_seqlens_q = [0]",
            "cu_seqlens_q",  # the operator's own check
        ),
    ],
)
def test_bad_input(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.txt"
    file.write_text(text)
    code, out, err = run(capsys, str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"specmeta explain: {file}: ")
    pattern = message.replace("(...)", r"\(\.\.\.\)").replace("?", r"\?")
    assert re.search(pattern, err), err
    assert err.count("\n") == 1


def test_bad_files_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, str(tmp_path / "none"))[::2] == (
        2,
        f"specmeta explain: {tmp_path / 'none'}: No such file or directory\n",
    )
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert "expected text in UTF-8" in run(capsys, str(tmp_path / "bytes"))[2]
    assert run(capsys, str(CASES[0]), "--row", "99")[0] == 2
    assert "invalid choice" in run(capsys, str(CASES[0]), "--op", "none")[2]
    assert "op: expected stage (--op), got" in run(capsys, str(CASES[0]), "--op", "stage")[2]


# --- Exit codes, rows, pipes


def test_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({**ADVANCE, "expect": {"seq_lens": [18, 14]}}))
    code, out, _ = run(capsys, str(file))
    assert code == 1
    assert "row 1  OVERFLOW, BAD_COUNT  differs\n" in out
    for name in ("reference", "operator"):
        line = f"{name}: seq_lens[1] (row 1, slot 1): expected 14, got 0; 1 more differ\n"
        assert line in out

    file.write_text(json.dumps(ADVANCE))
    code, out, _ = run(capsys, str(file))
    assert (code, out.splitlines()[-1]) == (0, "operator: as the reference")

    def broken(num_accepted: Any, seq_lens: torch.Tensor, **rest: Any) -> None:
        reference.advance(num_accepted, seq_lens, **rest)
        seq_lens[0] += 1

    monkeypatch.setattr(specmeta, "advance", broken)
    code, out, _ = run(capsys, str(file))
    assert code == 1
    assert out.endswith("operator: seq_lens[0] (row 0, slot 0): expected 18, got 19\n")


def test_the_row_of_a_slot_of_draft_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"seq_lens": [1, 2, 3], "page_size": 4, "num_steps": 2, "page_table": [[5], [9], [2]]}
    file = tmp_path / "case.json"
    expect = {"slot_mapping": [21, 22, 38, 39, 11, 7]}
    file.write_text(json.dumps({"op": "draft_lists", "args": args, "expect": expect}))
    code, out, _ = run(capsys, str(file))
    assert code == 1
    assert "operator: slot_mapping[5] (row 2, slot 2): expected 7, got -1\n" in out
    assert re.search(r"^slot_mapping +21 22 +38 39 +11 -1", out, re.MULTILINE)


def many_rows(tmp_path: Path, rows: int) -> Path:
    lengths = [8] * rows
    lengths[rows - 2] = -3
    args = {"seq_lens": lengths, "page_size": 4, "pages_per_seq": [0] * rows}
    file = tmp_path / "many.json"
    file.write_text(json.dumps({"op": "advance", **args, "expect": {}}))
    return file


def test_many_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = many_rows(tmp_path, 100)
    code, out, _ = run(capsys, str(file))
    shown = [int(b) for b in re.findall(r"^row (\d+)", out, re.MULTILINE)]
    assert (code, shown) == (0, [*range(15), 98])
    assert "… 84 of 100 rows are not shown; --row B shows a row" in out
    _, out, _ = run(capsys, str(file), "--row", "98", "--row", "40")
    assert re.findall(r"^row (\d+)", out, re.MULTILINE) == ["98", "40"]
    table = out[out.index("\nresult") :]
    assert re.search(
        r"\nresult +row 98 +row 40\n─+\nseq_lens +0 +8 *\npages_per_seq +0 +2 *\n", table
    )


def specmeta_process(arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", arguments, sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_pipes(tmp_path: Path) -> None:
    file = many_rows(tmp_path, 3000)
    rows = " ".join(f"--row {b}" for b in range(2000))  # more than a pipe holds
    done = specmeta_process(f'"$0" -m specmeta explain - {rows} < {file} | head -1')
    assert (done.stdout, done.stderr) == ("advance  rows: 3000\n", "")


def test_colours_where_there_is_a_terminal() -> None:
    done = specmeta_process(f'"$0" -m specmeta explain {CASES[0]}', FORCE_COLOR="1", TERM="xterm")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b[1m" in done.stdout


def test_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    code, _, err = run(capsys, str(CASES[0]))
    assert (code, err) == (
        2,
        "specmeta explain: rich is missing: pip install 'specmeta[debug]'\n",
    )


def test_docstring_and_status_words() -> None:
    for module in (explain, specmeta.status):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
    assert Status.words(-8) == "BAD_SLOT, BAD_PAGE, BAD_INDPTR, -64"


def test_errors_are_of_one_kind() -> None:
    case = parse({"op": "advance", "args": {"seq_lens": [1], "page_size": 0}})
    with pytest.raises(CaseError, match="page_size"):
        explain.explain(case)
