"""`map_slots`: random arguments against the reference, and each rule by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from strategies import Call, map_slots_calls

import specmeta
from specmeta import reference
from specmeta.testing import run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1


@pytest.mark.random
@given(call=map_slots_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.map_slots, reference.map_slots, call, device)


def _rows_of_vllm(rng: random.Random) -> Call:
    """A block table with 0 or stale ids behind a row's blocks, and slots for the largest batch."""
    rows, page_size, width = rng.randint(1, 6), rng.choice((1, 3, 16)), rng.randint(1, 5)
    query = [rng.randint(1, min(4, width * page_size)) for _ in range(rows)]
    positions: list[int] = []
    for q in query:
        first = rng.randint(0, width * page_size - q)
        positions += range(first, first + q)
    blocks = [[rng.choice((0, rng.randint(1, 999))) for _ in range(width)] for _ in range(rows)]
    return {
        "position_ids": torch.tensor(positions),
        "slot_mapping": torch.zeros(len(positions) + rng.randint(0, 5), dtype=torch.int64),
        "cu_seqlens_q": torch.tensor(list(accumulate(query, initial=0)), dtype=torch.int32),
        "page_table": torch.tensor(blocks, dtype=torch.int32),
        "page_size": page_size,
        "status": torch.zeros(rows, dtype=torch.int32),
    }


@pytest.mark.parametrize("seed", range(100))
def test_agrees_with_vllm(device: str, seed: int) -> None:
    """The block table's entry for the position, and -1 behind the scheduled tokens."""
    call = _rows_of_vllm(random.Random(seed))
    cu, page_size = call["cu_seqlens_q"].tolist(), call["page_size"]
    want = [-1] * len(call["slot_mapping"])
    for b, blocks in enumerate(call["page_table"].tolist()):
        for t in range(cu[b], cu[b + 1]):
            position = int(call["position_ids"][t])
            want[t] = blocks[position // page_size] * page_size + position % page_size
    left = run_both(specmeta.map_slots, reference.map_slots, call, device)
    assert left["slot_mapping"].tolist() == want
    assert not left["status"].any()


def test_one_token_a_row(check: Check) -> None:
    check(
        "map_slots",
        {"position_ids": [0, 7, 4], "page_table": [[5, 6], [7, 8], [9, 1]], "page_size": 4},
        {"slot_mapping": [20, 35, 4], "status": [0, 0, 0]},
    )


def test_positions_need_no_order(check: Check) -> None:
    """A tree of drafts: two tokens stand at the same place."""
    check(
        "map_slots",
        {
            "position_ids": [5, 3, 3, 4],
            "cu_seqlens_q": [0, 4],
            "page_table": [[5, 6]],
            "page_size": 4,
        },
        {"slot_mapping": [25, 23, 23, 24]},
    )


@pytest.mark.parametrize(
    ("limit", "capacity"),
    [
        ({"page_table": [[1, 2]]}, 8),
        ({"page_table": [[1, 2, -1, 3]]}, 8),
        ({"page_table": [[1, 2]], "num_pages": [1]}, 4),
        ({"page_table": [[1, 2]], "max_seq_len": 7}, 7),
        ({"page_table": [[1, 2]], "max_seq_len": 9}, 8),
        ({"alloc_pages": [0, 1, 2, 9], "alloc_indptr": [1, 3]}, 8),
    ],
)
def test_the_capacity(check: Check, limit: Call, capacity: int) -> None:
    """A token past it has no slot; its neighbours have."""
    last = capacity - 1
    slot = 4 * (1 + last // 4) + last % 4
    check(
        "map_slots",
        {
            "position_ids": [last, capacity, INT32_MAX, 0],
            "cu_seqlens_q": [0, 4],
            "page_size": 4,
            **limit,
        },
        {"slot_mapping": [slot, -1, -1, 4], "status": [1]},
    )


def test_negative_positions(check: Check) -> None:
    check(
        "map_slots",
        {
            "position_ids": [1, -1, 2, -(2**63)],
            "cu_seqlens_q": [0, 2, 3, 4],
            "page_table": [[5], [6], [7]],
            "page_size": 4,
            "pad_slot": -3,
        },
        {"slot_mapping": [21, -3, 26, -3], "status": [4, 0, 4]},
    )


def test_negative_ids_have_no_slot(check: Check) -> None:
    """Only those are reported that hold a token."""
    check(
        "map_slots",
        {
            "position_ids": [3, 4, 8, 3, 8],
            "cu_seqlens_q": [0, 3, 5],
            "page_table": [[5, -2, 6], [7, -2, 8]],
            "num_pages": [3, 3],
            "page_size": 4,
        },
        {"slot_mapping": [23, -1, 24, 31, 32], "status": [16, 0]},
    )


@pytest.mark.parametrize(("count", "slots", "status"), [(3, [4, 8], 4), (-1, [-1, -1], 5)])
def test_page_counts_are_clamped(check: Check, count: int, slots: list[int], status: int) -> None:
    check(
        "map_slots",
        {
            "position_ids": [0, 4],
            "cu_seqlens_q": [0, 2],
            "page_table": [[1, 2]],
            "num_pages": [count],
            "page_size": 4,
        },
        {"slot_mapping": slots, "status": [status]},
    )


def test_a_ragged_allocation(check: Check) -> None:
    """Each slot has its part; a pair that cannot be is no pages at all."""
    check(
        "map_slots",
        {
            "position_ids": [5, 1, 0, 0],
            "row_to_slot": [1, 0, 2, 3],
            "alloc_pages": [5, 6, 7, 8],
            "alloc_indptr": [0, 1, 4, 3, 5],
            "page_size": 4,
        },
        {"slot_mapping": [29, 21, -1, -1], "status": [0, 0, 33, 33, 0]},
    )


def test_slots_of_64_bits(check: Check) -> None:
    check(
        "map_slots",
        {
            "position_ids": [INT32_MAX - 1, 3],
            "cu_seqlens_q": [0, 1, 2],
            "page_table": [[INT32_MAX], [2]],
            "page_size": INT32_MAX,
        },
        {"slot_mapping": [INT32_MAX**2 + INT32_MAX - 1, 2 * INT32_MAX + 3], "status": [0, 0]},
    )


def test_a_position_past_int32(device: str) -> None:
    call = {
        "position_ids": torch.tensor([2**32 + 1, 2**62]),
        "page_table": torch.tensor([[1], [2]], dtype=torch.int32),
        "page_size": INT32_MAX,
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        "status": torch.zeros(2, dtype=torch.int32),
    }
    left = run_both(specmeta.map_slots, reference.map_slots, call, device)
    assert (left["slot_mapping"].tolist(), left["status"].tolist()) == ([-1, -1], [1, 1])


def test_tails_are_padding(check: Check) -> None:
    """Before the first row, behind the last token, and behind the tensors by token."""
    check(
        "map_slots",
        {
            "position_ids": [1, 1, 2, -9],
            "cu_seqlens_q": [1, 3],
            "page_table": [[5]],
            "page_size": 4,
            "pad_slot": -2,
        },
        {"slot_mapping": [-2, 21, 22, -2, -2, -2], "status": [0]},
    )


def test_empty_rows(check: Check) -> None:
    """No slot, a slot that doesn't exist, past num_rows, behind a bad pair."""
    check(
        "map_slots",
        {
            "position_ids": [1] * 7,
            "cu_seqlens_q": [0, 1, 2, 3, 4, 9, 9],
            "row_to_slot": [1, -1, 7, 0, 1, 0],
            "num_rows": 5,
            "page_table": [[5], [6]],
            "page_size": 4,
        },
        {"slot_mapping": [25, -1, -1, 21, -1, -1, -1], "status": [0, 32, 8]},
    )


def test_the_tokens_are_those_of_the_positions(check: Check) -> None:
    """A pair that slot_mapping would hold is bad none the less."""
    check(
        "map_slots",
        {
            "position_ids": [1, 2],
            "cu_seqlens_q": [0, 1, 3],
            "page_table": [[5], [6]],
            "page_size": 4,
        },
        {"slot_mapping": [21, -1, -1, -1], "status": [0, 32]},
    )


def test_a_slot_may_stand_in_two_rows(check: Check) -> None:
    check(
        "map_slots",
        {"position_ids": [1, 2], "row_to_slot": [1, 1], "page_table": [[5], [6]], "page_size": 4},
        {"slot_mapping": [25, 26], "status": [0, 0, 0]},
    )
