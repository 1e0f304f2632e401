"""The given cases: every result of an operation, exactly, from the operator and the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import OPERATIONS

import specmeta
from specmeta import reference
from specmeta.testing import load_case, run_case

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))
each_case = pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
each_index_dtype = pytest.mark.parametrize(
    "index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"]
)


def test_there_are_cases_of_every_operation() -> None:
    assert {load_case(path)["op"] for path in CASES} == set(OPERATIONS)


@each_case
@each_index_dtype
def test_operator(path: Path, index_dtype: torch.dtype, device: str) -> None:
    case = load_case(path)
    run_case(getattr(specmeta, case["op"]), case, device, index_dtype)


@each_case
@each_index_dtype
def test_reference(path: Path, index_dtype: torch.dtype) -> None:
    case = load_case(path)
    run_case(getattr(reference, case["op"]), case, index_dtype=index_dtype)
