"""The given cases: every result of an operation, exactly, from the operator and the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import OPERATIONS

import specmeta
from specmeta import reference
from specmeta.cases import CaseError, load_case, parse, save_case
from specmeta.testing import run_case

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))
each_case = pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
each_index_dtype = pytest.mark.parametrize(
    "index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"]
)


def test_there_are_cases_of_every_operation() -> None:
    assert {load_case(path).operator for path in CASES} == set(OPERATIONS)


@each_case
@each_index_dtype
def test_operator(path: Path, index_dtype: torch.dtype, device: str) -> None:
    case = load_case(path, index_dtype=index_dtype)
    run_case(getattr(specmeta, case.operator), case, device)


@each_case
@each_index_dtype
def test_reference(path: Path, index_dtype: torch.dtype) -> None:
    case = load_case(path, index_dtype=index_dtype)
    run_case(getattr(reference, case.operator), case)


@each_case
def test_a_saved_case_is_the_same(path: Path, tmp_path: Path) -> None:
    case = load_case(path)
    outputs = {
        name: torch.zeros_like(value) if name == "status" else torch.full_like(value, 7)
        for name, value in case.expect.items()
    }
    saved = save_case(tmp_path, case.operator, outputs | case.args, name=case.name, why=case.why)
    again = load_case(saved)
    assert saved.name == f"{case.name}.json"
    assert (again.name, again.why, again.operator) == (case.name, case.why, case.operator)
    for name, value in case.args.items():
        # What an output held before may not have mattered, whatever it was.
        kept = again.args[name] if name in again.args else case.args[name]
        assert name in again.args or name in case.expect
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(value)), name
    for name, value in again.expect.items():
        assert torch.equal(value, case.expect.get(name, case.args.get(name))), name
    run_case(getattr(specmeta, case.operator), again)


def test_a_saved_case_keeps_dtypes_and_gaps_and_other_files(tmp_path: Path) -> None:
    table = torch.tensor([[1, 2, 9], [3, 4, 9]], dtype=torch.int32)[:, :2]
    args = {
        "num_accepted": torch.tensor([1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([4, 3]),
        "page_size": 4,
        "page_table": table,
        "status": torch.tensor([4, 0], dtype=torch.int32),
        "max_accepted": None,
    }
    first = save_case(tmp_path / "new", "advance", args, name="a", why="b")
    assert save_case(tmp_path / "new", "advance", args, name="a", why="b").name == "a_2.json"
    case = load_case(first)
    assert case.args["num_accepted"].dtype == torch.int32
    assert case.args["seq_lens"].dtype == torch.int64
    assert case.args["page_table"].stride() == (3, 1)
    assert case.args["status"].tolist() == [4, 0]
    run_case(specmeta.advance, case)
    assert args["seq_lens"].tolist() == [4, 3]


def test_a_call_without_counts_is_saved(tmp_path: Path) -> None:
    args = {"num_accepted": None, "seq_lens": torch.tensor([4]), "page_size": 4}
    case = load_case(save_case(tmp_path, "advance", args, name="a", why="b"))
    assert case.args["num_accepted"] is None
    run_case(specmeta.advance, case)


RIGHT = {"op": "advance", "args": {"seq_lens": [3], "page_size": 4}, "expect": {"seq_lens": [3]}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], r"the file: expected an object, got \[\]"),
        (
            {"op": "advanced"},
            "op: expected one of accept_greedy, .* got 'advanced'; did you mean advance\\?",
        ),
        ({"ops": "advance"}, "a field: expected one of name, .* got 'ops'"),
        ({"args": [1]}, r"args: expected an object, got \[1\]"),
        ({"why": 3}, "why: expected a text, got 3"),
        ({"args": {"page_size": 4}, "expect": {}}, "args: expected seq_lens, which advance needs"),
        (
            {"args": {"seq_len": [3]}},
            r"args: expected arguments of advance, got 'seq_len'; did you mean seq_lens\?",
        ),
        ({"args": {"seq_lens": 3}}, r"args.seq_lens: expected a list \[B\], got 3"),
        ({"args": {"seq_lens": [3.5]}}, "args.seq_lens: expected an integer, got 3.5"),
        ({"args": {"seq_lens": [True]}}, "args.seq_lens: expected an integer, got True"),
        (
            {"args": {"seq_lens": [2**63]}},
            "args.seq_lens: expected an int64, got 9223372036854775808",
        ),
        ({"args": {"cached_lens": [2**31]}}, "args.cached_lens: expected an int32, got 2147483648"),
        ({"args": {"page_table": [[1], 2]}}, "args.page_table: expected a list of lists"),
        (
            {"args": {"page_table": [[1], [2, 3]]}},
            "args.page_table: expected lists of the same length, 1",
        ),
        ({"args": {"page_size": "4"}}, "args.page_size: expected an integer, got '4'"),
        ({"args": {"use_initial_states": [1]}}, "args.use_initial_states: expected true or false"),
        (
            {"expect": {"num_accepted": [1]}},
            "expect: expected outputs of advance, got 'num_accepted'",
        ),
        (  # an argument, but not an output
            {"expect": {"page_table": [[1]]}},
            r"expect: expected outputs of advance, got 'page_table'; did you mean last_page_len\?",
        ),
        (
            {"dtypes": {"seq_lens": "int16"}},
            "dtypes.seq_lens: expected int32 or int64, got 'int16'",
        ),
        (
            {"gaps": {"page_size": -1, "seq_lens": -1}},
            "gaps.seq_lens: expected 0 to 67108864 elements in all",
        ),
        ({"args": {"num_tokens": "a"}}, "args.num_tokens: expected an integer, got 'a'"),
        ({"args": {"max_seq_len": 2**70}}, "args.max_seq_len: expected an int64, got 1180591"),
        ({"dtypes": {"seq_lens": []}}, r"dtypes.seq_lens: expected int32 or int64, got \[\]"),
        ({"gaps": {"seq_lens": 10**12}}, "gaps.seq_lens: expected 0 to 67108864 elements in all"),
        ({"expect": {"seq_lens": [3, 4]}}, r"expect.seq_lens: expected the shape of .* \[1\], got"),
        ({"gaps": {"nothing": 1}}, "gaps: expected arguments of advance, got 'nothing'"),
    ],
    ids=str,
)
def test_a_wrong_case_names_file_and_field(wrong: object, message: str) -> None:
    data: object = wrong
    if isinstance(wrong, dict):
        data = {**RIGHT, **wrong}
        if isinstance(wrong.get("args"), dict) and "page_size" not in wrong["args"]:
            data["args"] = {**RIGHT["args"], **wrong["args"]}
    with pytest.raises(CaseError, match=rf"^file\.json: {message}"):
        parse(data, source="file.json")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"missing\.json: No such file"):
        load_case(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_bytes(b'{"op": \xff')
    with pytest.raises(CaseError, match=r"bad\.json: expected JSON"):
        load_case(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{'op'")
    with pytest.raises(CaseError, match=r"bad\.json: expected JSON"):
        load_case(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text('{"op": "advance", "op": "stage"}')
    with pytest.raises(CaseError, match=r"bad\.json: op: given a second time"):
        load_case(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[" * 100_000)
    with pytest.raises(CaseError, match=r"bad\.json: expected JSON"):
        load_case(tmp_path / "bad.json")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(json.dumps(RIGHT), encoding="utf-8-sig")
    assert load_case(tmp_path / "case.json").operator == "advance"
