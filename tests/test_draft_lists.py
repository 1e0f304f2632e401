"""`draft_lists`: random arguments against the reference, each rule, and `draft_step` repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from strategies import Call, draft_lists_calls
from torch import Tensor

import specmeta
from specmeta import Status, reference
from specmeta.testing import poisoned, run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1

# Two rows of two pages of four tokens each.
PAGES: Call = {"page_size": 4, "page_table": [[5, 9], [2, 7]]}


@pytest.mark.random
@given(call=draft_lists_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.draft_lists, reference.draft_lists, call, device)


# --- One launch, or a launch a step


def steps_one_after_the_other(call: Call, device: str) -> dict[str, Tensor]:
    """Return what K calls of `draft_step` leave, in the shapes of `draft_lists`."""
    left = {
        name: value.to(device, copy=True) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
    steps = left.pop("num_steps")
    positions = left["seq_lens"] - 1
    names = {"kv_indptr", "kv_indices", "last_page_len", "slot_mapping"} & left.keys()
    rows = {name: left.pop(name) for name in names}
    rows["position_ids"] = left.pop("position_ids")
    slots = rows["slot_mapping"].view(-1, steps) if "slot_mapping" in rows else None
    for k in range(steps):
        row = {name: rows[name][k] for name in names - {"slot_mapping"}}
        if slots is not None:
            row["slot_mapping"] = torch.zeros(len(slots), dtype=torch.int64, device=device)
        specmeta.draft_step(**left, **row, position_ids=positions, draft_index=k)
        if slots is not None:
            slots[:, k] = row["slot_mapping"]
        if k == 0:
            rows["position_ids"].copy_(positions)
    if "status" in left:
        rows["status"] = left["status"]
    return rows


@settings(max_examples=400)
@given(call=draft_lists_calls())
def test_draft_steps_one_after_the_other_leave_the_same(device: str, call: Call) -> None:
    rows, steps = len(call["seq_lens"]), call["num_steps"]
    call["position_ids"] = poisoned(rows, dtype=torch.int64)
    if "kv_indices" in call:  # with room for everything: else see below
        pages = call["page_table"].shape[1] if "page_table" in call else len(call["alloc_pages"])
        call["kv_indices"] = poisoned(steps, rows * max(pages, 1))
    got = {k: v.to(device, copy=True) if isinstance(v, Tensor) else v for k, v in call.items()}
    specmeta.draft_lists(**got)
    for name, want in steps_one_after_the_other(call, device).items():
        assert torch.equal(got[name], want), name


def test_a_row_that_was_cut_comes_back_where_another_stops(check: Check) -> None:
    """Here the steps know nothing of each other, while `draft_step` would leave row 1 empty."""
    check(
        "draft_lists",
        {**PAGES, "seq_lens": [7, 2], "num_steps": 2, "kv_capacity": 2},
        {
            "kv_indptr": [[0, 2, 2], [0, 0, 1]],
            "kv_indices": [[5, 9], [2, 0]],
            "last_page_len": [[4, 0], [0, 4]],
            "slot_mapping": [39, -1, -1, 11],
            "position_ids": [7, 0],
            "status": [1, 1],
        },
    )


# --- The lists


def test_each_step_has_a_token_more(check: Check) -> None:
    """Row 0 crosses a page in its second step; slots stand row by row."""
    check(
        "draft_lists",
        {**PAGES, "seq_lens": [3, 5], "num_steps": 3, "kv_capacity": 5},
        {
            "kv_indptr": [[0, 1, 3], [0, 2, 4], [0, 2, 4]],
            "kv_indices": [[5, 2, 7, 0, 0], [5, 9, 2, 7, 0], [5, 9, 2, 7, 0]],
            "last_page_len": [[4, 2], [1, 3], [2, 4]],
            "slot_mapping": [23, 36, 37, 29, 30, 31],
            "position_ids": [3, 5],
            "status": [0, 0],
        },
    )


@pytest.mark.parametrize(
    ("limit", "capacity"),
    [
        ({"page_table": [[1, 2]]}, 8),
        ({"page_table": [[1, 2]], "num_pages": [1]}, 4),
        ({"page_table": [[1, -1]]}, 4),
        ({"page_table": [[1, 2]], "max_seq_len": 7}, 7),
        ({"alloc_pages": [1, 2], "alloc_indptr": [0, 2]}, 8),
        ({"max_seq_len": 7}, 7),
    ],
)
def test_a_row_is_empty_from_the_step_past_its_capacity_on(
    check: Check, limit: Call, capacity: int
) -> None:
    """The position is that of the first step, which may have room where a later one has not."""
    for room in (0, 1, 2, 3):
        length = capacity - room
        lens = [length + k + 1 if k < room else 0 for k in range(3)]
        check(
            "draft_lists",
            {"seq_lens": [length], "num_steps": 3, "page_size": 4, **limit},
            {
                "last_page_len": [[(n - 1) % 4 + 1 if n else 0] for n in lens],
                "kv_indptr": [[0, -(-n // 4)] for n in lens],
                "position_ids": [length if room else 0],
                "status": [int(Status.OVERFLOW) if room < 3 else 0],
            },
        )


def test_rows_that_are_empty_in_all_steps(check: Check) -> None:
    """Length 0 or negative, no slot, past num_rows; what the others have stands between them."""
    check(
        "draft_lists",
        {
            "seq_lens": [0, -1, 5, 1, 5],
            "row_to_slot": [0, 1, -1, 3, 2],
            "num_rows": 4,
            "num_steps": 2,
            "page_size": 4,
            "page_table": [[5], [6], [7], [8]],
            "pad_page": 99,
            "pad_slot": -7,
            "kv_capacity": 2,
        },
        {
            "kv_indptr": [[0, 0, 0, 0, 1, 1]] * 2,
            "kv_indices": [[8, 99]] * 2,
            "last_page_len": [[0, 0, 0, 2, 0], [0, 0, 0, 3, 0]],
            "slot_mapping": [-7] * 6 + [33, 34] + [-7] * 2,
            "position_ids": [0, 0, 0, 1, 0],
            "status": [0, 4, 0, 0, 0],
        },
    )


def test_pad_seq_len_lists_a_pad_page_in_every_empty_row(check: Check) -> None:
    """Where a row stops, its page gives way to the pad page."""
    check(
        "draft_lists",
        {
            **PAGES,
            "seq_lens": [0, 7],
            "num_steps": 2,
            "pad_page": 99,
            "pad_seq_len": 1,
            "kv_capacity": 4,
        },
        {
            "kv_indptr": [[0, 1, 3], [0, 1, 2]],
            "kv_indices": [[99, 2, 7, 99], [99, 99, 99, 99]],
            "last_page_len": [[1, 4], [1, 1]],
            "slot_mapping": [-1, -1, 31, -1],
            "position_ids": [0, 7],
            "status": [0, 1],
        },
    )


def test_faults_of_slots_and_pages(check: Check) -> None:
    """A slot outside the table; more pages told than there are; a negative id among the used."""
    check(
        "draft_lists",
        {
            "seq_lens": [3, 7, 4],
            "row_to_slot": [3, 0, 1],
            "num_steps": 2,
            "page_size": 4,
            "page_table": [[5, 9], [2, -3], [0, 0]],
            "num_pages": [3, 2, 2],
            "pad_page": 99,
            "kv_capacity": 5,
        },
        {
            "kv_indptr": [[0, 0, 2, 4], [0, 0, 0, 2]],
            "kv_indices": [[5, 9, 2, 99, 99], [2, 99, 99, 99, 99]],
            "slot_mapping": [-1, -1, 39, -1, -1, -1],
            "status": [int(Status.BAD_COUNT | Status.OVERFLOW), 16, 0, 8],
        },
    )


def test_lengths_from_nowhere(check: Check) -> None:
    check(
        "draft_lists",
        {"seq_lens": [INT32_MAX - 2, 2**62, -(2**62)], "num_steps": 3, "page_size": 64},
        {
            "last_page_len": [[62, 0, 0], [63, 0, 0], [0, 0, 0]],
            "position_ids": [INT32_MAX - 2, 0, 0],
            "status": [1, 1, 4],
        },
    )


def test_no_live_row_no_change(check: Check) -> None:
    """With num_rows = 0 nothing indexed by slot changes, however bad the values are."""
    check(
        "draft_lists",
        {**PAGES, "seq_lens": [-5, 2**40], "num_rows": 0, "num_steps": 1, "kv_capacity": 1},
        {"kv_indptr": [[0, 0, 0]], "kv_indices": [[0]], "position_ids": [0, 0], "status": [0, 0]},
    )


# --- Arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 3}, r"kv_indptr: expected num_steps = 3 rows, got 2$"),
        (
            {"slot_mapping": torch.zeros(5, dtype=torch.int64)},
            r"slot_mapping: expected B \* num_steps = 4 entries, got 5$",
        ),
        (
            {"pad_seq_len": 1, "kv_indices": torch.zeros(2, 1, dtype=torch.int32)},
            "kv_indices: expected at least B = 2 entries with pad_seq_len 1, got 1$",
        ),
        ({"num_steps": 0}, r"num_steps: expected an integer in \[1, 65535\], got 0$"),
        (
            {"page_table": None},
            r"page_table: expected a tensor \(or alloc_pages\), since kv_indices is given",
        ),
        (
            {"workspace": specmeta.workspace(2)},
            rf"workspace: expected at least {specmeta.workspace(2, num_steps=2).numel()} entries",
        ),
    ],
)
def test_arguments_that_raise(changes: dict[str, Any], message: str) -> None:
    outputs = {
        "kv_indptr": poisoned(2, 3),
        "kv_indices": poisoned(2, 4),
        "slot_mapping": poisoned(4, dtype=torch.int64),
    }
    call: dict[str, Any] = {
        "seq_lens": torch.tensor([3, 5]),
        "num_steps": 2,
        "page_size": 4,
        "page_table": torch.tensor([[5, 9], [2, 7]], dtype=torch.int32),
        **outputs,
        **changes,
    }
    before = {name: call[name].clone() for name in outputs}
    with pytest.raises(RuntimeError, match=rf"^specmeta\.draft_lists: {message}"):
        specmeta.draft_lists(**call)
    assert all(torch.equal(call[name], before[name]) for name in outputs)


@pytest.mark.parametrize("num_steps", [0, 2**16])
def test_workspaces_that_raise(num_steps: int) -> None:
    message = rf"^num_steps: expected an integer in \[1, 65535\], got {num_steps}$"
    with pytest.raises(ValueError, match=message):
        specmeta.workspace(2, num_steps=num_steps)
