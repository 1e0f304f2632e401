"""`advance`: random arguments against the reference, and each rule by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from strategies import Call, advance_calls

import specmeta
from specmeta import Status, reference
from specmeta.testing import GUARD, POISON, Guarded, assert_equal, poisoned, run_both

Check = Callable[..., None]

TWO_ROWS: Call = {"seq_lens": [5, 3], "page_size": 4, "page_table": [[1, 2], [3, 4]]}


@pytest.mark.random
@given(call=advance_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.advance, reference.advance, call, device)


# --- Rule 1: state is recomputed, never patched


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 64])
def test_there_and_back_again(device: str, page_size: int) -> None:
    """Whatever the way, the lists are those of the length that was reached."""
    pages = torch.arange(1, 200, dtype=torch.int32).reshape(1, 199)
    run = Guarded(
        {
            "seq_lens": torch.tensor([5]),
            "page_table": pages,
            "kv_indices": poisoned(199),
            "kv_indptr": poisoned(2),
            "last_page_len": poisoned(1),
        },
        device,
    ).tensors
    length = 5
    for step in (1, 8, -3, 64, -64, 1, 1, -10, 7, 100, -105, 4):
        specmeta.advance(torch.tensor([step], device=device), page_size=page_size, **run)
        length += step
        used = -(-length // page_size)
        expected = list(range(1, used + 1)) + [0] * (199 - used)
        assert_equal("kv_indices", run["kv_indices"], torch.tensor(expected))
        assert run["kv_indptr"].tolist() == [0, used]
        assert run["last_page_len"].tolist() == [(length - 1) % page_size + 1]


def test_positions_from_the_lengths(check: Check) -> None:
    """Where no positions are given, a token's is its cache index: here of lengths staged by row."""
    check(
        "advance",
        {
            "num_accepted": None,
            "seq_lens": [5, 0, 9],
            "seq_len_bias": 3,
            "page_size": 4,
            "max_seq_len": 11,
            "cu_seqlens_q": [0, 3, 6, 9],
            "page_table": [[1, 2], [3, 4], [5, 6]],
        },
        {
            "seq_lens": [8, 0, 0],
            "position_ids_out": [5, 6, 7, 0, 0, 0, 0, 0, 0],
            "slot_mapping": [9, 10, 11, -1, -1, -1, -1, -1, -1],
            "status": [0, 0, 1],
        },
    )


def test_a_replay_gives_the_same_result(device: str) -> None:
    """With outputs elsewhere nothing that is read is written."""
    run = Guarded(
        {
            "num_accepted": torch.tensor([2, -1]),
            "seq_lens": torch.tensor([3, 6]),
            "position_ids": torch.tensor([2, 5]),
            "page_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
            "seq_lens_out": poisoned(2),
            "position_ids_out": poisoned(2),
        },
        device,
    )
    for _ in range(2):
        specmeta.advance(page_size=4, **run.tensors)
        assert run.tensors["seq_lens_out"].tolist() == [5, 5]
        assert run.tensors["position_ids_out"].tolist() == [4, 4]
    run.check_unchanged("seq_lens")
    run.check_unchanged("position_ids")


# --- Rule 2: no host


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize(("num_rows", "live"), [(-1, 0), (0, 0), (1, 1), (2, 2), (3, 2)])
def test_num_rows_is_clamped(device: str, num_rows: int, live: int, as_tensor: bool) -> None:
    given_rows = torch.tensor([num_rows], dtype=torch.int32) if as_tensor else num_rows
    call = {
        "num_accepted": torch.tensor([1, 1]),
        "seq_lens": torch.tensor([5, 3]),
        "num_rows": given_rows,
        "page_size": 4,
    }
    left = run_both(specmeta.advance, reference.advance, call, device)
    assert left["seq_lens"].tolist() == [6, 4][:live] + [0, 0][live:]


def test_rows_past_num_rows_are_not_checked(check: Check) -> None:
    """Neither their slot, nor their tokens, nor their length, nor their count."""
    check(
        "advance",
        {
            "num_accepted": [1],
            "seq_lens": [5, -3, 7],
            "row_to_slot": [0, 9, 0],
            "cu_seqlens_q": [0, 1, 99, -5],
            "num_rows": 1,
            "page_size": 4,
            "page_table": [[1, 2]],
        },
        {"seq_lens": [6, 0, 0], "cached_lens": [5, 0, 0], "status": [0, 0]},
    )


# --- Rule 3: nothing outside, 64-bit sums


def test_counts_and_lengths_are_read_clamped(check: Check) -> None:
    """Both to 2^40, so that neither of them wraps around to a plausible length."""
    check(
        "advance",
        {
            "num_accepted": [5 - 2**40, 2**62, -(2**63), 2**63 - 1],
            "seq_lens": [2**50, 2**62, 3, -(2**63)],
            "page_size": 4,
        },
        {"seq_lens": [5, 0, 0, 0], "status": [0, 1, 2, 4]},
    )


def test_the_largest_length(check: Check) -> None:
    check(
        "advance",
        {"num_accepted": [1, 2], "seq_lens": [2**31 - 2, 2**31 - 2], "page_size": 1},
        {
            "seq_lens": [2**31 - 1, 0],
            "cached_lens": [2**31 - 2, 0],
            "pages_per_seq": [2**31 - 1, 0],
            "kv_indptr": [0, 2**31 - 1, 2**31 - 1],
            "status": [0, 1],
        },
    )


def test_a_sum_of_pages_past_int32_saturates(check: Check) -> None:
    check(
        "advance",
        {"num_accepted": [0, 0], "seq_lens": [2**31 - 1, 7], "page_size": 1},
        {"kv_indptr": [0, 2**31 - 1, 2**31 - 1], "pages_per_seq": [2**31 - 1, 7], "status": [0, 0]},
    )


def test_the_largest_page(check: Check) -> None:
    """The last slot of the last page of the largest size: 64-bit."""
    last = 2**31 - 1
    check(
        "advance",
        {
            "num_accepted": [1],
            "seq_lens": [last - 1],
            "page_size": last,
            "page_table": [[last]],
        },
        {
            "seq_lens": [last],
            "slot_mapping": [last * last + last - 1],
            "last_page_len": [last],
            "status": [0],
        },
    )


@pytest.mark.parametrize("negative", [-1, -(2**31)])
def test_positions_are_clamped_at_both_ends(check: Check, negative: int) -> None:
    check(
        "advance",
        {
            "num_accepted": [2, 2, 2, 2],
            "seq_lens": [3, 3, 3, 3],
            "max_seq_len": 8,
            "page_size": 4,
            "position_ids": [5, 6, negative - 2, 2**63 - 1],
        },
        {"position_ids": [7, 7, 0, 7], "seq_lens": [5, 5, 5, 5], "status": [0, 0, 0, 0]},
    )


def test_positions_without_max_seq_len_end_below_int32_max(check: Check) -> None:
    check(
        "advance",
        {"num_accepted": [0], "seq_lens": [1], "page_size": 4, "position_ids": [2**40]},
        {"position_ids": [2**31 - 2], "seq_lens": [1]},
    )


@pytest.mark.parametrize(
    ("count", "position", "want"),
    [
        (-(2**35), 2**35 + 6, 6),
        (2**35, 5 - 2**35, 5),
        (2**31, -3, 2**31 - 3),
        (-(2**31) - 1, 2**31 + 5, 4),
    ],
)
@pytest.mark.parametrize("how", ["by slot", "by index", "bias", "clamped"])
def test_positions_move_by_more_than_32_bits(
    check: Check, how: str, count: int, position: int, want: int
) -> None:
    counts: dict[str, Call] = {
        "by slot": {"num_accepted": [count]},
        "by index": {"num_accepted": [9, count], "count_index": [1]},
        "bias": {"num_accepted": None, "position_bias": count},
        "clamped": {"num_accepted": [7], "max_accepted": 1, "position_bias": count - 1},
    }
    bias = {"by slot": -count, "by index": -count, "bias": 0, "clamped": -1}[how]
    check(
        "advance",
        counts[how]
        | {"seq_lens": [7], "seq_len_bias": bias, "position_ids": [position], "page_size": 4},
        {"position_ids": [want], "seq_lens": [7]},
    )


# --- Rule 4: every element of an output is defined


def test_no_rows(check: Check) -> None:
    check(
        "advance",
        {
            "num_accepted": [],
            "seq_lens": [],
            "page_size": 4,
            "alloc_pages": [],
            "alloc_indptr": [0],
            "position_ids": [7, 8],
            "pad_page": 5,
        },
        {
            "kv_indptr": [0],
            "kv_indices": [5, 5],
            "slot_mapping": [-1, -1],
            "position_ids": [0, 0],
            "seq_lens": [],
            "status": [],
        },
    )


def test_tokens_of_no_row_are_padding(check: Check) -> None:
    """In front of the first row, of an empty row, and behind the last."""
    check(
        "advance",
        {
            "num_accepted": [0, 0, 0],
            "seq_lens": [4, 0, 2],
            "cu_seqlens_q": [1, 3, 5, 6],
            "page_size": 4,
            "page_table": [[1], [2], [3]],
            "position_ids": [9, 2, 3, 9, 9, 1, 9, 9],
            "pad_slot": -7,
        },
        {
            "position_ids": [0, 2, 3, 0, 0, 1, 0, 0],
            "slot_mapping": [-7, 6, 7, -7, -7, 13, -7, -7],
            "cached_lens": [2, 0, 1],
            "status": [0, 0, 0],
        },
    )


def test_a_row_without_query_tokens_keeps_its_length(check: Check) -> None:
    check(
        "advance",
        {
            "num_accepted": [1, -3],
            "seq_lens": [4, 3],
            "cu_seqlens_q": [0, 0, 0],
            "page_size": 4,
            "page_table": [[1, 2], [3, 4]],
        },
        {
            "seq_lens": [5, 0],
            "cached_lens": [5, 0],
            "kv_indices": [1, 2],
            "kv_indptr": [0, 2, 2],
            "last_page_len": [1, 0],
            "status": [0, 0],
        },
    )


def test_slot_mapping_may_be_longer_than_the_tokens(check: Check) -> None:
    """An engine's buffer for the largest batch: what is behind the tokens is padding."""
    check(
        "advance",
        {
            "num_accepted": [1, 0],
            "seq_lens": [3, 2],
            "position_ids": [2, 0, 1],
            "cu_seqlens_q": [0, 1, 3],
            "page_size": 4,
            "page_table": [[1], [2]],
            "pad_slot": -2,
        },
        {
            "seq_lens": [4, 2],
            "position_ids": [3, 0, 1],
            "slot_mapping": [7, 8, 9, -2, -2, -2],
            "status": [0, 0],
        },
    )


def test_the_tokens_are_those_of_the_other_tensors(check: Check) -> None:
    """A pair that a longer slot_mapping would hold is bad none the less."""
    check(
        "advance",
        {
            "num_accepted": [0],
            "seq_lens": [3],
            "position_ids": [1, 2],
            "cu_seqlens_q": [0, 3],
            "page_size": 4,
            "page_table": [[1]],
        },
        {"seq_lens": [0], "position_ids": [0, 0], "slot_mapping": [-1] * 4, "status": [32]},
    )


def test_initial_states_are_used_where_something_is_cached(check: Check) -> None:
    """A first chunk starts a recurrent state anew; no query tokens at all, an empty row."""
    check(
        "advance",
        {
            "num_accepted": [0] * 5,
            "seq_lens": [3, 3, 3, 0, 99],
            "cu_seqlens_q": [0, 3, 5, 5, 6, 7],
            "page_size": 4,
            "max_seq_len": 16,
        },
        {
            "seq_lens": [3, 3, 3, 0, 0],
            "cached_lens": [0, 1, 3, 0, 0],
            "use_initial_states": [False, True, True, False, False],
        },
    )


def test_pad_seq_len_lists_a_pad_page_in_every_empty_row(check: Check) -> None:
    """The row of length 0, the overflowing row and the row past num_rows."""
    check(
        "advance",
        {
            "num_accepted": [1, 0, 9, 1],
            "seq_lens": [4, 0, 4, 4],
            "num_rows": 3,
            "page_size": 4,
            "pad_seq_len": 1,
            "pad_page": 88,
            "page_table": [[1, 2], [3, 4], [5, 6], [7, 8]],
        },
        {
            "kv_indptr": [0, 2, 3, 4, 5],
            "kv_indices": [1, 2, 88, 88, 88, 88],
            "block_table": [[1, 2, 88], [88, 88, 88], [88, 88, 88], [88, 88, 88]],
            "pages_per_seq": [2, 1, 1, 1],
            "last_page_len": [1, 1, 1, 1],
            "padded_seq_lens": [5, 1, 1, 1],
            "seq_lens": [5, 0, 0, 0],
            "cached_lens": [4, 0, 0, 0],
            "status": [0, 0, 1, 0],
        },
    )


# --- Rule 5: a wrong value is never obeyed, and is reported


def test_status_is_sticky(check: Check) -> None:
    check(
        "advance",
        {**TWO_ROWS, "num_accepted": [9, 0], "status": [64, 8]},
        {"seq_lens": [0, 3], "status": [65, 8]},
    )


def test_a_bad_slot_is_reported_behind_the_slots(check: Check) -> None:
    """-1 says that the row is empty and is no fault."""
    check(
        "advance",
        {
            "num_accepted": [1, 1],
            "seq_lens": [3, 3, 3, 3, 3],
            "row_to_slot": [-1, 1, 2, -2, 2**40],
            "page_size": 4,
            "page_table": [[1], [2]],
        },
        {
            "seq_lens": [0, 4, 0, 0, 0],
            "kv_indices": [2],
            "status": [0, 0, int(Status.BAD_SLOT)],
        },
    )


@pytest.mark.parametrize(
    ("cu", "first_bad"),
    [
        ([0, 1, 2, 3], 3),
        ([-1, 1, 2, 3], 0),
        ([0, 1, 0, 3], 1),
        ([0, 1, 9, 3], 1),
        ([0, 1, 2, 4], 2),
        ([2**31 - 1, -(2**31), 2, 3], 0),
    ],
)
def test_from_a_bad_pair_on_every_live_row_is_empty(
    check: Check, cu: list[int], first_bad: int
) -> None:
    flagged = [0 if b < first_bad else int(Status.BAD_INDPTR) for b in range(3)]
    kept = [3 if b < first_bad else 0 for b in range(3)]
    check(
        "advance",
        {
            "num_accepted": [1, 1, 1],
            "seq_lens": [2, 2, 2],
            "cu_seqlens_q": cu,
            "page_size": 4,
            "page_table": [[1], [2], [3]],
            "position_ids": [1, 1, 1],
        },
        {
            "seq_lens": kept,
            "position_ids": [2 if length else 0 for length in kept],
            "slot_mapping": [4 * (b + 1) + 2 if length else -1 for b, length in enumerate(kept)],
            "status": flagged,
        },
    )


def test_a_bad_pair_is_seen_in_rows_without_a_slot_or_length(check: Check) -> None:
    """Rows without a slot report it behind the slots; a bad slot is reported as well."""
    check(
        "advance",
        {
            "num_accepted": [1, 1, 1],
            "seq_lens": [2, 2, 2, 0],
            "row_to_slot": [2, -1, 7, 0],
            "cu_seqlens_q": [0, 1, 0, 2, 3],
            "page_size": 4,
            "page_table": [[1], [2], [3]],
        },
        {
            "seq_lens": [3, 0, 0, 0],
            "status": [32, 0, 0, 32 | 8],
        },
    )


def test_an_empty_row_is_not_checked_further(check: Check) -> None:
    """A length of 0, or a negative one: not its number of pages, nor its count."""
    check(
        "advance",
        {
            "num_accepted": [-5, -5, -5],
            "seq_lens": [0, -1, 3],
            "max_accepted": 4,
            "page_size": 4,
            "page_table": [[1, 2], [3, 4], [5, 6]],
            "num_pages": [-1, -1, 3],
        },
        {"seq_lens": [0, 0, 3], "kv_indices": [5], "status": [0, 4, 4]},
    )


@pytest.mark.parametrize(("num_pages", "fits"), [(-1, 0), (-(2**31), 0), (3, 2), (2**31 - 1, 2)])
def test_a_wrong_number_of_pages_is_clamped(check: Check, num_pages: int, fits: int) -> None:
    check(
        "advance",
        {
            "num_accepted": [0],
            "seq_lens": [8],
            "page_size": 4,
            "page_table": [[1, 2]],
            "num_pages": [num_pages],
        },
        {
            "seq_lens": [8 if fits else 0],
            "kv_indices": [1, 2] if fits else [0, 0],
            "status": [4 if fits else 4 | 1],
        },
    )


@pytest.mark.parametrize("pair", [(2, 1), (-1, 1), (0, 4), (2**31 - 1, -(2**31))])
def test_a_bad_allocation_pair_leaves_the_row_without_pages(
    check: Check, pair: tuple[int, int]
) -> None:
    """Only this row: the pages of the next are named by its own pair."""
    check(
        "advance",
        {
            "num_accepted": [0, 0, 0],
            "seq_lens": [3, 3],
            "row_to_slot": [0, 2],
            "page_size": 4,
            "alloc_pages": [7, 8, 9],
            "alloc_indptr": [*pair, 2, 3],
        },
        {
            "seq_lens": [0, 3],
            "kv_indices": [9],
            "status": [int(Status.BAD_INDPTR | Status.OVERFLOW), 0, 0, 0],
        },
    )


def test_a_row_rewound_to_nothing_needs_no_pages(check: Check) -> None:
    """A bad pair is reported, but 0 tokens fit into no pages."""
    check(
        "advance",
        {
            "num_accepted": [-3],
            "seq_lens": [3],
            "cu_seqlens_q": [0, 0],
            "page_size": 4,
            "alloc_pages": [],
            "alloc_indptr": [1, 0],
        },
        {"seq_lens": [0], "status": [int(Status.BAD_INDPTR)]},
    )


@pytest.mark.parametrize("index", [-2, 2, 2**31 - 1, -(2**31)])
def test_a_bad_count_index_leaves_the_row_alone(check: Check, index: int) -> None:
    """As a context row stands still: also no bias."""
    check(
        "advance",
        {
            **TWO_ROWS,
            "num_accepted": [2, 2],
            "count_index": [index, -1],
            "seq_len_bias": 1,
            "position_bias": 1,
            "position_ids": [4, 2],
        },
        {"seq_lens": [5, 3], "position_ids": [4, 2], "status": [int(Status.BAD_SLOT), 0]},
    )


def test_a_row_left_alone_is_checked_on(check: Check) -> None:
    check(
        "advance",
        {**TWO_ROWS, "num_accepted": [], "seq_lens": [9, 8], "count_index": [0, -1]},
        {"seq_lens": [0, 8], "status": [8 | 1, 0]},
    )


def test_a_slot_without_a_count_leaves_the_row_alone(check: Check) -> None:
    """Without `count_index` the slot is the index; the fault is the row's own."""
    check(
        "advance",
        {
            "num_accepted": [1],
            "seq_lens": [3, 3],
            "row_to_slot": [1, 0],
            "page_size": 4,
            "page_table": [[1], [2]],
        },
        {"seq_lens": [3, 4], "status": [0, 8, 0]},
    )


def test_a_length_that_is_its_query_is_the_least(check: Check) -> None:
    """Below it: UNDERFLOW, and not one token less than that is kept."""
    check(
        "advance",
        {
            "num_accepted": [-2, -3, -9],
            "seq_lens": [5, 5, 5],
            "cu_seqlens_q": [0, 3, 6, 6],
            "page_size": 4,
            "position_ids": [2, 3, 4, 2, 3, 4],
        },
        {
            "seq_lens": [3, 0, 0],
            "cached_lens": [0, 0, 0],
            "position_ids": [0, 1, 2, 0, 0, 0],
            "status": [0, 2, 2],
        },
    )


@pytest.mark.parametrize(
    ("limit", "capacity"),
    [
        ({"page_table": [[1, 2, 3]]}, 12),
        ({"page_table": [[1, 2, -1]]}, 8),
        ({"page_table": [[1, 2, 3]], "num_pages": [1]}, 4),
        ({"page_table": [[1, 2, 3]], "max_seq_len": 10}, 10),
        ({"alloc_pages": [1, 2, 3], "alloc_indptr": [1, 3]}, 8),
        ({"alloc_pages": [1, 2, 3], "alloc_indptr": [0, 3], "max_seq_len": 11}, 11),
        ({"max_seq_len": 10}, 10),
    ],
)
def test_the_capacity(check: Check, limit: Call, capacity: int) -> None:
    for length, status in ((capacity, 0), (capacity + 1, 1)):
        check(
            "advance",
            {"num_accepted": [1], "seq_lens": [length - 1], "page_size": 4, **limit},
            {"seq_lens": [0 if status else length], "status": [status]},
        )


def test_the_block_table_is_a_limit_where_it_is_written(check: Check) -> None:
    call = {"num_accepted": [1], "seq_lens": [4], "page_size": 4, "page_table": [[1, 2]]}
    check("advance", call, {"seq_lens": [5], "status": [0]})
    check("advance", call, {"seq_lens": [0], "block_table": [[0]], "status": [1]})


def test_negative_ids_are_listed_as_padding(check: Check) -> None:
    """In every list, and their tokens have no slot; the row keeps its length and positions."""
    check(
        "advance",
        {
            "num_accepted": [0, 0],
            "seq_lens": [6, 2],
            "cu_seqlens_q": [0, 3, 5],
            "page_size": 4,
            "page_table": [[5, -3, -1], [6, -1, -1]],
            "num_pages": [3, 3],
            "position_ids": [3, 4, 5, 0, 1],
            "pad_page": 90,
        },
        {
            "seq_lens": [6, 2],
            "kv_indptr": [0, 2, 3],
            "kv_indices": [5, 90, 6],
            "block_table": [[5, 90, 90], [6, 90, 90]],
            "slot_mapping": [23, -1, -1, 24, 25],
            "position_ids": [3, 4, 5, 0, 1],
            "status": [int(Status.BAD_PAGE), 0],
        },
    )


@pytest.mark.parametrize(
    ("outputs", "status"),
    [
        ({}, [0, 0]),
        ({"slot_mapping": [5, -1]}, [0, 16]),
        ({"kv_indices": [0, 1, 2, 0]}, [16, 16]),
        ({"block_table": [[0, 1], [2, 0]]}, [16, 16]),
    ],
)
def test_a_negative_id_is_seen_where_an_output_needs_it(
    check: Check, outputs: Call, status: list[int]
) -> None:
    """`slot_mapping` alone needs only the pages of the query tokens."""
    call = {
        "num_accepted": [0, 0],
        "seq_lens": [6, 6],
        "page_size": 4,
        "page_table": [[-1, 1], [2, -1]],
        "num_pages": [2, 2],
    }
    check("advance", call, {**outputs, "seq_lens": [6, 6], "status": status})


def test_a_row_without_query_tokens_needs_no_page_for_slots(check: Check) -> None:
    check(
        "advance",
        {
            "num_accepted": [0],
            "seq_lens": [2],
            "cu_seqlens_q": [0, 0],
            "page_size": 4,
            "page_table": [[-1]],
            "num_pages": [1],
        },
        {"seq_lens": [2], "slot_mapping": [], "status": [0]},
    )


def test_a_negative_id_ends_a_page_table_without_counts(check: Check) -> None:
    """What stands behind it is never looked at."""
    check(
        "advance",
        {
            "num_accepted": [0, 0],
            "seq_lens": [4, 5],
            "page_size": 4,
            "page_table": [[1, -1, 2], [1, -5, 2]],
        },
        {"seq_lens": [4, 0], "kv_indices": [1], "status": [0, 1]},
    )


# --- Rule 6: a length is never shortened under its query tokens


def test_the_cut_empties_all_rows_behind(check: Check) -> None:
    """A short row behind the cut does not slip in; empty rows there are not flagged."""
    check(
        "advance",
        {
            "num_accepted": [0, 0, 0, 0, 0],
            "seq_lens": [4, 0, 9, 0, 1],
            "cu_seqlens_q": [0, 1, 1, 3, 3, 4],
            "page_size": 4,
            "page_table": [[1, -1, -1], [2, -1, -1], [3, 4, 5], [6, -1, -1], [7, -1, -1]],
            "position_ids": [3, 7, 8, 0],
            "pad_page": 9,
        },
        {
            "seq_lens": [4, 0, 0, 0, 0],
            "cached_lens": [3, 0, 0, 0, 0],
            "kv_indptr": [0, 1, 1, 1, 1, 1],
            "kv_indices": [1, 9, 9],
            "slot_mapping": [7, -1, -1, -1],
            "position_ids": [3, 0, 0, 0],
            "status": [0, 0, 1, 0, 1],
        },
    )


def test_the_cut_leaves_room_for_pad_pages(check: Check) -> None:
    check(
        "advance",
        {
            "num_accepted": [0, 0, 0],
            "seq_lens": [4, 8, 0],
            "page_size": 4,
            "pad_seq_len": 1,
            "pad_page": 9,
            "page_table": [[1, -1], [2, 3], [4, 5]],
        },
        {
            "kv_indices": [1, 9, 9],
            "kv_indptr": [0, 1, 2, 3],
            "seq_lens": [4, 0, 0],
            "last_page_len": [4, 1, 1],
            "status": [0, 1, 0],
        },
    )


def test_a_row_that_just_fits_is_kept(check: Check) -> None:
    check(
        "advance",
        {
            "num_accepted": [0, 0, 0],
            "seq_lens": [4, 8, 0],
            "page_size": 4,
            "pad_seq_len": 1,
            "pad_page": 9,
            "page_table": [[1, -1], [2, 3], [4, 5]],
        },
        {
            "kv_indices": [1, 2, 3, 9],
            "kv_indptr": [0, 1, 3, 4],
            "seq_lens": [4, 8, 0],
            "status": [0, 0, 0],
        },
    )


def test_a_row_that_is_cut_is_not_searched_for_negative_ids(check: Check) -> None:
    check(
        "advance",
        {
            "num_accepted": [0],
            "seq_lens": [8],
            "page_size": 4,
            "page_table": [[1, -1]],
            "num_pages": [2],
        },
        {"kv_indices": [0], "seq_lens": [0], "status": [1]},
    )


def test_a_slot_may_stand_in_several_rows(check: Check) -> None:
    check(
        "advance",
        {
            "num_accepted": [5, 1],
            "seq_lens": [3, 4, 9],
            "row_to_slot": [1, 1, 1],
            "page_size": 4,
            "page_table": [[1, 2], [3, 4]],
        },
        {
            "seq_lens": [4, 5, 0],
            "kv_indices": [3, 3, 4],
            "slot_mapping": [15, 16, -1],
            "status": [0, 1, 0],
        },
    )


# --- Tensors as they come


def test_a_row_stride_of_zero(device: str) -> None:
    """All slots read the one row of pages."""
    row = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    call = {
        "num_accepted": torch.tensor([1, 5]),
        "seq_lens": torch.tensor([4, 4]),
        "page_size": 4,
        "page_table": row.expand(2, 3),
        "kv_indices": poisoned(5),
    }
    left = run_both(specmeta.advance, reference.advance, call, device)
    assert left["kv_indices"].tolist() == [1, 2, 1, 2, 3]


def test_what_stands_between_rows_is_left_alone(device: str) -> None:
    wide = torch.full((2, 6), GUARD, dtype=torch.int32, device=device)
    wide[:, :3] = POISON
    specmeta.advance(
        torch.tensor([1, 5], device=device),
        torch.tensor([4, 4], device=device),
        page_size=4,
        page_table=torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32, device=device),
        block_table=wide[:, :3],
    )
    rest = [GUARD] * 3
    assert wide.tolist() == [[1, 2, 0, *rest], [4, 5, 6, *rest]]
