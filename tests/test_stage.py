"""`stage`: random arguments against the reference, and each rule by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from strategies import Call, stage_calls

import specmeta
from specmeta import Status, reference
from specmeta.testing import Guarded, assert_equal, poisoned, run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1


@pytest.mark.random
@given(call=stage_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.stage, reference.stage, call, device)


# --- The number of query tokens


@pytest.mark.parametrize(
    ("asked", "known", "drafts", "staged"),
    [
        (5, None, None, 5),  # as many as asked for
        (None, 7, None, 3),  # as many as are known
        (None, 7, 2, 5),  # and the drafts behind them
        (9, 7, 2, 5),
        (4, 7, 2, 4),
        (4, 4, 0, 0),  # nothing new
        (4, 1, 2, 0),  # the cache is ahead of the ledger
        (0, 7, 2, 0),
        (1, INT32_MAX, INT32_MAX, 1),
    ],
)
def test_query_tokens(
    check: Check, asked: int | None, known: int | None, drafts: int | None, staged: int
) -> None:
    args: Call = {"committed_lens": [4], "page_size": 4}
    args |= {} if asked is None else {"query_lens": [asked]}
    args |= {} if known is None else {"known_lens": [known]}
    args |= {} if drafts is None else {"num_drafts": [drafts]}
    expect = {
        "cu_seqlens_q": [0, staged],
        "seq_lens": [4 + staged if staged else 0],
        "cached_lens": [4 if staged else 0],
        "status": [0],
    }
    if known is not None:
        expect["num_draft_tokens"] = [max(staged - max(known - 4, 0), 0) if staged else 0]
    check("stage", args, expect)


def test_a_row_is_verified_only_behind_its_last_known_token(check: Check) -> None:
    """A chunk that ends before it has no drafts, though drafts stand in the ledger."""
    check(
        "stage",
        {
            "committed_lens": [0, 0, 0],
            "known_lens": [4, 4, 4],
            "num_drafts": [2, 2, 2],
            "query_lens": [3, 5, 9],
            "page_size": 4,
        },
        {"seq_lens": [3, 5, 6], "num_draft_tokens": [0, 1, 2], "status": [0, 0, 0]},
    )


@pytest.mark.parametrize(("limit", "start"), [(3, 3), (5, 5), (7, 5), (0, 0), (INT32_MAX, 5)])
def test_limit_lens_holds_back_a_cache_that_ran_ahead(check: Check, limit: int, start: int) -> None:
    check(
        "stage",
        {"committed_lens": [5], "limit_lens": [limit], "known_lens": [6], "page_size": 4},
        {"cached_lens": [start], "seq_lens": [6], "cu_seqlens_q": [0, 6 - start], "status": [0]},
    )


# --- Rule 5: faults


@pytest.mark.parametrize(
    "fault",
    [
        {"committed_lens": [-1, 1]},
        {"limit_lens": [-(2**31), 1]},
        {"query_lens": [-1, 2]},
        {"num_drafts": [-1, 0]},
    ],
)
def test_a_negative_count_empties_the_row(check: Check, fault: Call) -> None:
    """Before its pages are looked at."""
    args = {
        "committed_lens": [1, 1],
        "known_lens": [3, 3],
        "num_drafts": [0, 0],
        "query_lens": [2, 2],
        "limit_lens": [1, 1],
        "page_size": 4,
        "page_table": [[1, 2], [3, 4]],
        "num_pages": [9, 2],
    }
    check("stage", {**args, **fault}, {"seq_lens": [0, 3], "status": [int(Status.BAD_COUNT), 0]})


def test_pages_are_checked_though_nothing_is_to_be_done(check: Check) -> None:
    check(
        "stage",
        {
            "committed_lens": [3, 3],
            "query_lens": [0, 0],
            "page_size": 4,
            "page_table": [[1], [2]],
            "num_pages": [2, -1],
        },
        {"seq_lens": [0, 0], "status": [4, 4]},
    )


def test_a_bad_allocation_pair_leaves_no_room(check: Check) -> None:
    check(
        "stage",
        {
            "committed_lens": [0, 0, 0],
            "query_lens": [1, 0, 1],
            "page_size": 4,
            "alloc_pages": [7, 8],
            "alloc_indptr": [1, 0, -1, 2],
        },
        {"seq_lens": [0, 0, 0], "kv_indices": [0], "status": [32 | 1, 32, 32 | 1]},
    )


@pytest.mark.parametrize("slot", [2, -2, 2**40, -(2**63)])
def test_a_bad_slot_is_reported_behind_the_slots(check: Check, slot: int) -> None:
    check(
        "stage",
        {"committed_lens": [1, 2], "row_to_slot": [slot, 1], "query_lens": [1, 1], "page_size": 4},
        {"seq_lens": [0, 3], "cu_seqlens_q": [0, 0, 1], "status": [0, 0, 8]},
    )


@pytest.mark.parametrize(
    ("limit", "room"),
    [
        ({"page_table": [[1, 2]]}, 8),
        ({"page_table": [[1, -1]]}, 4),
        ({"page_table": [[1, 2]], "max_seq_len": 7}, 7),
        ({"alloc_pages": [1, 2], "alloc_indptr": [0, 1]}, 4),
        ({"max_seq_len": 6}, 6),
        ({"tokens": [[1, 2, 3, 4, 5]]}, 5),
        ({"tokens": [[1, 2, 3, 4, 5]], "max_seq_len": 4}, 4),
        ({"page_table": [[1, 2]], "tokens": [[]]}, 0),
    ],
)
def test_the_query_is_cut_at_the_room(check: Check, limit: Call, room: int) -> None:
    """Committed tokens stay; from one of them on, and beyond the room."""
    for committed in (1, room, room + 3):
        for asked in (0, 1, max(room - committed, 0), 99):
            staged = min(asked, max(room - committed, 0))
            check(
                "stage",
                {"committed_lens": [committed], "query_lens": [asked], "page_size": 4, **limit},
                {
                    "seq_lens": [committed + staged if staged else 0],
                    "cu_seqlens_q": [0, staged],
                    "status": [int(asked > staged)],
                },
            )


def test_the_block_table_is_a_limit_where_it_is_written(check: Check) -> None:
    check(
        "stage",
        {"committed_lens": [2], "query_lens": [9], "page_size": 4, "page_table": [[1, 2]]},
        {"seq_lens": [4], "block_table": [[1]], "status": [1]},
    )


def test_the_token_buffer_cuts_the_running_sum(check: Check) -> None:
    """The row in which it ends is short; rows behind are empty and flagged if they had tokens."""
    check(
        "stage",
        {
            "committed_lens": [5, 6, 7, 8],
            "query_lens": [2, 2, 0, 1],
            "page_size": 4,
            "num_tokens": 3,
        },
        {
            "cu_seqlens_q": [0, 2, 3, 3, 3],
            "seq_lens": [7, 7, 0, 0],
            "cached_lens": [5, 6, 0, 0],
            "position_ids": [5, 6, 6],
            "status": [0, 1, 0, 1],
        },
    )


def test_without_tensors_by_token_the_sum_is_cut_at_int32_max(check: Check) -> None:
    check(
        "stage",
        {"committed_lens": [1, 0, 0], "query_lens": [INT32_MAX - 1, 3, 1], "page_size": 4},
        {
            "cu_seqlens_q": [0, INT32_MAX - 1, INT32_MAX, INT32_MAX],
            "seq_lens": [INT32_MAX, 1, 0],
            "status": [0, 1, 1],
        },
    )


def test_negative_ids_have_no_slot(check: Check) -> None:
    """The row goes on: its ids and positions are right."""
    check(
        "stage",
        {
            "committed_lens": [3],
            "query_lens": [3],
            "tokens": [[10, 11, 12, 13, 14, 15]],
            "page_size": 4,
            "page_table": [[5, -2]],
            "num_pages": [2],
            "num_tokens": 4,
        },
        {
            "slot_mapping": [23, -1, -1, -1],
            "kv_indices": [5, 0],
            "input_ids": [13, 14, 15, 0],
            "position_ids": [3, 4, 5, 0],
            "status": [int(Status.BAD_PAGE)],
        },
    )


# --- Rules 4 and 6: the outputs


def test_rows_cut_off_keep_their_tokens_as_padding(check: Check) -> None:
    check(
        "stage",
        {
            "committed_lens": [3, 3, 3],
            "known_lens": [4, 4, 4],
            "num_drafts": [1, 1, 1],
            "tokens": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]],
            "page_size": 4,
            "page_table": [[1, 2], [3, 4], [5, 6]],
            "num_tokens": 6,
            "pad_token": 99,
        },
        {
            "kv_indices": [1, 2, 0],
            "kv_indptr": [0, 2, 2, 2],
            "cu_seqlens_q": [0, 2, 4, 6],
            "seq_lens": [5, 0, 0],
            "num_draft_tokens": [1, 0, 0],
            "position_ids": [3, 4, 0, 0, 0, 0],
            "input_ids": [4, 5, 99, 99, 99, 99],
            "slot_mapping": [7, 8, -1, -1, -1, -1],
            "status": [0, 1, 1],
        },
    )


def test_empty_rows_list_a_pad_page(check: Check) -> None:
    check(
        "stage",
        {
            "committed_lens": [3, 3],
            "row_to_slot": [-1, 1, 0],
            "query_lens": [1, 2, 1],
            "num_rows": 2,
            "page_size": 4,
            "pad_seq_len": 1,
            "pad_page": 77,
            "page_table": [[1, 2], [3, 4]],
            "num_tokens": 3,
        },
        {
            "cu_seqlens_q": [0, 0, 2, 2],
            "seq_lens": [0, 5, 0],
            "padded_seq_lens": [1, 5, 1],
            "cached_lens": [0, 3, 0],
            "pages_per_seq": [1, 2, 1],
            "last_page_len": [1, 1, 1],
            "kv_indptr": [0, 1, 3, 4],
            "kv_indices": [77, 3, 4, 77, 77],
            "block_table": [[77, 77], [3, 4], [77, 77]],
            "position_ids": [3, 4, 0],
            "slot_mapping": [15, 16, -1],
            "status": [0, 0, 0],
        },
    )


def test_ids_saturate_in_a_narrower_tensor(device: str) -> None:
    call = {
        "committed_lens": torch.tensor([0], dtype=torch.int32),
        "query_lens": torch.tensor([3], dtype=torch.int32),
        "tokens": torch.tensor([[2**31, -(2**31) - 1, 5]]),
        "input_ids": poisoned(3),
        "page_size": 4,
    }
    left = run_both(specmeta.stage, reference.stage, call, device)
    assert left["input_ids"].tolist() == [INT32_MAX, -(2**31), 5]


def test_rows_come_from_the_slots_where_nothing_else_tells(check: Check) -> None:
    check(
        "stage",
        {
            "committed_lens": [3, 4],
            "known_lens": [4, 6],
            "page_size": 4,
            "page_table": [[1], [2]],
        },
        {"kv_indices": [1, 0, 0], "slot_mapping": [7, -1, -1], "status": [0, 1]},
    )


def test_no_slots_and_no_tokens(check: Check) -> None:
    check(
        "stage",
        {"committed_lens": [], "row_to_slot": [0, -1], "query_lens": [1, 1], "page_size": 4},
        {
            "cu_seqlens_q": [0, 0, 0],
            "seq_lens": [0, 0],
            "position_ids": [],
            "status": [int(Status.BAD_SLOT)],
        },
    )


# --- Rules 1 and 2: nothing by slot changes


@pytest.mark.parametrize("num_rows", [0, 1])
def test_the_state_is_only_read(device: str, num_rows: int) -> None:
    state = {
        "committed_lens": torch.tensor([4, 2], dtype=torch.int32),
        "known_lens": torch.tensor([5, 3], dtype=torch.int32),
        "num_drafts": torch.tensor([2, 0], dtype=torch.int32),
        "tokens": torch.arange(16).reshape(2, 8),
        "page_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
    }
    rows = {"num_rows": torch.tensor([num_rows], dtype=torch.int32), "input_ids": poisoned(4)}
    run = Guarded(state | rows, device)
    for _ in range(2):
        specmeta.stage(page_size=4, **run.tensors)
        wanted = [4, 5, 6, 0] if num_rows else [0] * 4
        assert_equal("input_ids", run.tensors["input_ids"], torch.tensor(wanted))
    for name in state:
        run.check_unchanged(name)
    run.check_guards()


def test_without_query_lens_all_that_is_known_is_asked_for(check: Check) -> None:
    """Also where that is one more than any length can be."""
    check(
        "stage",
        {
            "committed_lens": [0, 0],
            "known_lens": [2**31 - 1, 2**31 - 1],
            "num_drafts": [0, 1],
            "page_size": 4,
        },
        {"seq_lens": [2**31 - 1, 0], "cu_seqlens_q": [0, 2**31 - 1, 2**31 - 1], "status": [0, 1]},
    )
