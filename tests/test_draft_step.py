"""`draft_step`: random arguments against the reference, and each rule by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from strategies import Call, draft_step_calls

import specmeta
from specmeta import Status, reference
from specmeta.testing import Guarded, run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1

# A row that ran its six known tokens and drafts the eighth.
LEDGER: Call = {
    "draft_tokens": [51],
    "known_lens": [6],
    "num_drafts": [0],
    "tokens": [[1, 2, 3, 4, 5, 6, 0, 0]],
}


@pytest.mark.random
@given(call=draft_step_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.draft_step, reference.draft_step, call, device)


# --- The step


def test_the_next_position_follows_the_given_one(check: Check) -> None:
    """Not the length: positions and cache places may differ."""
    check(
        "draft_step",
        {
            "seq_lens": [5, 5, 5],
            "position_ids": [9, 15, -7],
            "page_size": 4,
            "max_seq_len": 16,
            "num_rejected": [0, 1, 2],
        },
        {
            "seq_lens": [6, 5, 4],
            "cached_lens": [5, 4, 3],
            "position_ids": [10, 15, 0],
            "status": [0, 0, 0],
        },
    )


def test_tokens_behind_the_rows_are_padding(check: Check) -> None:
    check(
        "draft_step",
        {
            "seq_lens": [3, 0],
            "position_ids": [2, 7, 7, 7],
            "draft_tokens": [51, 52],
            "page_size": 4,
            "page_table": [[5], [6]],
            "pad_token": 9,
        },
        {
            "seq_lens": [4, 0],
            "position_ids": [3, 0, 0, 0],
            "input_ids": [51, 9, 9, 9],
            "slot_mapping": [23, -1, -1, -1],
            "status": [0, 0],
        },
    )


def test_outputs_elsewhere(check: Check) -> None:
    """The arguments keep their values then."""
    check(
        "draft_step",
        {"seq_lens": [3], "position_ids": [2], "page_size": 4},
        {"seq_lens_out": [4], "position_ids_out": [3]},
    )


@pytest.mark.parametrize(
    ("rejected", "r", "status"),
    [(0, 0, 0), (4, 4, 0), (5, 4, 4), (-1, 0, 4), (INT32_MAX, 4, 4), (-(2**31), 0, 4)],
)
def test_one_token_is_always_kept(check: Check, rejected: int, r: int, status: int) -> None:
    check(
        "draft_step",
        {"seq_lens": [5], "num_rejected": [rejected], "page_size": 4},
        {"seq_lens": [6 - r], "cached_lens": [5 - r], "status": [status]},
    )


@pytest.mark.parametrize(("rejected", "r", "status"), [(2, 2, 0), (3, 2, 4)])
def test_max_rejected(check: Check, rejected: int, r: int, status: int) -> None:
    check(
        "draft_step",
        {"seq_lens": [5], "num_rejected": [rejected], "max_rejected": 2, "page_size": 4},
        {"seq_lens": [6 - r], "status": [status]},
    )


@pytest.mark.parametrize(
    ("limit", "capacity"),
    [
        ({"page_table": [[1, 2]]}, 8),
        ({"page_table": [[1, 2]], "num_pages": [1]}, 4),
        ({"page_table": [[1, 2]], "max_seq_len": 7}, 7),
        ({"alloc_pages": [1, 2], "alloc_indptr": [0, 2]}, 8),
        ({"max_seq_len": 7}, 7),
    ],
)
def test_the_capacity(check: Check, limit: Call, capacity: int) -> None:
    """A row that reaches it stops drafting, and stays so."""
    for length, after, status in ((capacity - 1, capacity, 0), (capacity, 0, 1), (0, 0, 0)):
        check(
            "draft_step",
            {"seq_lens": [length], "page_size": 4, **limit},
            {"seq_lens": [after], "status": [status]},
        )


def test_the_block_table_is_a_limit_where_it_is_written(check: Check) -> None:
    check(
        "draft_step",
        {"seq_lens": [4], "page_size": 4, "page_table": [[1, 2]]},
        {"seq_lens": [0], "block_table": [[0]], "status": [1]},
    )


def test_the_largest_length(check: Check) -> None:
    check(
        "draft_step",
        {"seq_lens": [INT32_MAX - 1, INT32_MAX, 2**62], "written_lens": [0, 0, 0], "page_size": 64},
        {
            "seq_lens": [INT32_MAX, 0, 0],
            "written_lens": [INT32_MAX - 1, INT32_MAX, INT32_MAX],
            "status": [0, 1, 1],
        },
    )


def test_the_cut_empties_rows_but_not_what_was_recorded(check: Check) -> None:
    check(
        "draft_step",
        {
            "seq_lens": [6, 7],
            "draft_tokens": [51, 52],
            "known_lens": [6, 7],
            "num_drafts": [0, 0],
            "written_lens": [0, 0],
            "tokens": [[1, 2, 3, 4, 5, 6, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 0, 0]],
            "shift": 0,
            "page_size": 4,
            "page_table": [[1, 2], [3, 4]],
        },
        {
            "kv_indices": [1, 2, 0],
            "kv_indptr": [0, 2, 2],
            "seq_lens": [7, 0],
            "input_ids": [51, 0],
            "num_drafts": [1, 1],
            "written_lens": [6, 7],
            "tokens": [[1, 2, 3, 4, 5, 6, 51, 0, 0], [1, 2, 3, 4, 5, 6, 7, 52, 0]],
            "status": [0, 1],
        },
    )


def test_negative_ids_have_no_slot(check: Check) -> None:
    check(
        "draft_step",
        {
            "seq_lens": [4, 3],
            "draft_tokens": [51, 52],
            "page_size": 4,
            "page_table": [[1, -1], [-1, 2]],
            "num_pages": [2, 2],
        },
        {
            "seq_lens": [5, 4],
            "slot_mapping": [-1, -1],
            "input_ids": [51, 52],
            "status": [16, 16],
        },
    )


# --- The record


@pytest.mark.parametrize(
    ("shift", "index", "length", "recorded"),
    [
        (1, 0, 5, True),
        (1, 0, 6, False),
        (1, 0, 4, False),
        (0, 0, 6, True),
        (0, 0, 5, False),
        (1, 1, 6, True),
        (0, 1, 7, True),
        (1, 2, 7, False),  # would be the one behind the ledger
        (1, INT32_MAX - 1, 5, False),
    ],
)
def test_a_draft_is_recorded_where_it_follows(
    check: Check, shift: int, index: int, length: int, recorded: bool
) -> None:
    tokens = list(LEDGER["tokens"][0])
    if recorded:
        tokens[6 + index] = 51
    check(
        "draft_step",
        {**LEDGER, "seq_lens": [length], "shift": shift, "draft_index": index, "page_size": 4},
        {
            "tokens": [tokens],
            "num_drafts": [index + 1 if recorded else 0],
            "seq_lens": [length + 1],
            "status": [0],
        },
    )


def test_the_record_is_made_where_the_row_stops(check: Check) -> None:
    """The draft was made, only the next one has no room."""
    check(
        "draft_step",
        {**LEDGER, "seq_lens": [5], "written_lens": [0], "page_size": 4, "max_seq_len": 5},
        {
            "tokens": [[1, 2, 3, 4, 5, 6, 51, 0]],
            "num_drafts": [1],
            "written_lens": [5],
            "seq_lens": [0],
            "input_ids": [0],
            "status": [int(Status.OVERFLOW)],
        },
    )


def test_an_empty_row_records_nothing(check: Check) -> None:
    """Length 0 or negative, no slot, past num_rows."""
    check(
        "draft_step",
        {
            "seq_lens": [0, -1, 5, 5],
            "row_to_slot": [0, 1, -1, 3],
            "num_rows": 3,
            "draft_tokens": [51, 52, 53, 54],
            "known_lens": [0, 0, 6, 6],
            "num_drafts": [7, 7, 7, 7],
            "written_lens": [7, 7, 7, 7],
            "tokens": [[1] * 8] * 4,
            "shift": 0,
            "page_size": 4,
        },
        {
            "seq_lens": [0, 0, 0, 0],
            "num_drafts": [7, 7, 7, 7],
            "written_lens": [7, 7, 7, 7],
            "tokens": [[1] * 8] * 4,
            "status": [0, 4, 0, 0, 0],
        },
    )


def test_an_id_saturates_in_a_narrow_ledger(device: str) -> None:
    call = {
        "seq_lens": torch.tensor([1]),
        "draft_tokens": torch.tensor([2**40]),
        "known_lens": torch.tensor([2], dtype=torch.int32),
        "num_drafts": torch.tensor([0], dtype=torch.int32),
        "tokens": torch.zeros(1, 3, dtype=torch.int32),
        "page_size": 4,
    }
    left = run_both(specmeta.draft_step, reference.draft_step, call, device)
    assert left["tokens"].tolist() == [[0, 0, INT32_MAX]]


# --- The last step


def test_the_last_step_records_and_moves_no_row(device: str) -> None:
    """By-row and by-token tensors are left alone even where they are given."""
    rows = ("seq_lens", "position_ids", "input_ids", "kv_indptr", "kv_indices", "cached_lens")
    run = Guarded(
        {
            "seq_lens": torch.tensor([5]),
            "position_ids": torch.tensor([4]),
            "input_ids": torch.tensor([77]),
            "kv_indptr": torch.tensor([7, 8], dtype=torch.int32),
            "kv_indices": torch.tensor([7, 8], dtype=torch.int32),
            "cached_lens": torch.tensor([7], dtype=torch.int32),
            "page_table": torch.tensor([[1]], dtype=torch.int32),
            "draft_tokens": torch.tensor([51]),
            "known_lens": torch.tensor([6], dtype=torch.int32),
            "num_drafts": torch.tensor([0], dtype=torch.int32),
            "written_lens": torch.tensor([0], dtype=torch.int32),
            "tokens": torch.zeros(1, 8, dtype=torch.int32),
            "status": torch.zeros(1, dtype=torch.int32),
        },
        device,
    )
    specmeta.draft_step(page_size=4, last=True, **run.tensors)
    for name in (*rows, "page_table", "draft_tokens", "known_lens", "status"):
        run.check_unchanged(name)
    assert run.tensors["tokens"].tolist() == [[0, 0, 0, 0, 0, 0, 51, 0]]
    assert run.tensors["num_drafts"].tolist() == [1]
    assert run.tensors["written_lens"].tolist() == [5]
    run.check_guards()


def test_the_last_step_checks_up_to_the_counts(check: Check) -> None:
    """Slot, length, pages and counts; not the capacity, and not the ids."""
    check(
        "draft_step",
        {
            "seq_lens": [5, -5, 5, 5, 8],
            "row_to_slot": [9, 0, 1, 2, 3],
            "num_rejected": [9, 9, 0, 9, 0],
            "page_size": 4,
            "page_table": [[1, 1], [1, 1], [1, 1], [-1, 1]],
            "num_pages": [2, 3, 2, 2],
            "written_lens": [0, 0, 0, 0],
            "last": True,
        },
        {"written_lens": [0, 5, 1, 8], "status": [4, 4, 4, 0, 8]},
    )


# --- Rule 2: no host


def test_no_live_row_no_change(device: str) -> None:
    """With num_rows = 0 nothing indexed by slot changes."""
    run = Guarded(
        {
            "seq_lens": torch.tensor([5]),
            "num_rows": torch.zeros(1, dtype=torch.int32),
            "draft_tokens": torch.tensor([51]),
            "known_lens": torch.tensor([6], dtype=torch.int32),
            "num_drafts": torch.tensor([3], dtype=torch.int32),
            "written_lens": torch.tensor([4], dtype=torch.int32),
            "tokens": torch.zeros(1, 8, dtype=torch.int32),
            "status": torch.tensor([64], dtype=torch.int32),
        },
        device,
    )
    specmeta.draft_step(page_size=4, **run.tensors)
    assert run.tensors["seq_lens"].tolist() == [0]
    for name in ("num_drafts", "written_lens", "tokens", "known_lens", "status"):
        run.check_unchanged(name)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("known", "written"), [(9, 4), (4, 6)])
def test_written_lens_count_no_draft_of_the_middle_of_a_prompt(
    check: Check, shift: int, known: int, written: int
) -> None:
    """Four tokens of a prompt and two drafts are in the cache; of a prompt of nine, only four."""
    recorded = known == 4
    check(
        "draft_step",
        {
            "seq_lens": [6],
            "draft_tokens": [51],
            "draft_index": 2,
            "shift": shift,
            "last": True,
            "known_lens": [known + shift],
            "num_drafts": [0],
            "written_lens": [0],
            "tokens": [[0] * 16],
            "page_size": 4,
        },
        {
            "written_lens": [written],
            "num_drafts": [3 if recorded else 0],
            "tokens": [[51 if recorded and i == 6 + shift else 0 for i in range(16)]],
            "status": [0],
        },
    )
