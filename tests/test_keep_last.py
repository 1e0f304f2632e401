"""`keep_last`: random arguments against the reference, and each rule by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from strategies import Call, keep_last_calls

import specmeta
from specmeta import reference
from specmeta.testing import run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1


@pytest.mark.random
@given(call=keep_last_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.keep_last, reference.keep_last, call, device)


# --- Where the tokens go


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ([3, 2, 1], [12, 14, 15]),  # to the left
        ([1, 1, 1], [10, 11, 12]),  # nowhere
        ([0, 0, 0, 1, 1, 1], [0, 0, 0, 10, 11, 12]),  # to the right
        ([0, 0, 0, 2, 1, 1], [0, 0, 0, 11, 12, 13]),  # the first to where the last one stands
        ([3, 0, 0, 0, 1, 1], [12, 0, 0, 0, 13, 14]),  # both ways
        ([0, 0, 1, 4, 1], [0, 0, 10, 14, 15]),  # to the right first, then to the left
        ([1, 0, 1, 0, 0, 3, 0], [10, 0, 11, 0, 0, 14, 0]),
        ([0, 0, 0], [0, 0, 0]),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_the_last_token_of_each_row(
    check: Check, query: list[int], kept: list[int], first: int
) -> None:
    """Of ids that count from 10, of rows that have 20 tokens before theirs."""
    rows, tokens = len(query), max(sum(query), len(query)) + 1
    lens = [20 + q if q else 0 for q in query]
    cached = [max(n - 1, 0) for n in lens]
    check(
        "keep_last",
        {
            "cu_seqlens_q": [first + sum(query[:b]) for b in range(rows + 1)],
            "seq_lens": lens,
            "input_ids": [*([7] * first), *range(10, 10 + tokens)],
        },
        {
            "cu_seqlens_q": [*range(rows + 1)],
            "seq_lens": lens,
            "input_ids": kept + [0] * (first + tokens - rows),
            "position_ids": cached + [0] * (first + tokens - rows),
            "query_lens": [1] * rows,
            "cached_lens": cached,
            "use_initial_states": [n > 0 for n in cached],
            "status": [0] * rows,
        },
    )


@pytest.mark.parametrize("rows", [1, 1_024, 1_025, 5_000])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_move_over_many_tiles(device: str, rows: int, seed: int) -> None:
    """Runs of rows without a token, then of rows with several: to the right and to the left."""
    generator = torch.Generator().manual_seed(seed)
    run = torch.randint(0, 3, (rows // 500 + 1,), generator=generator).repeat_interleave(500)
    query = torch.randint(0, 3, (rows,), generator=generator) * run[:rows]
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), query.cumsum(0)]).int()
    tokens = max(rows, int(cu[-1]))
    call = {
        "cu_seqlens_q": cu,
        "seq_lens": (query * 2).int(),
        "input_ids": torch.arange(1, tokens + 1),
        "position_ids": torch.zeros(tokens, dtype=torch.int64),
    }
    left = run_both(specmeta.keep_last, reference.keep_last, call, device)
    want = torch.where(query > 0, cu[1:], 0)
    assert torch.equal(left["input_ids"][:rows], want.long())


def test_a_second_time_changes_nothing(device: str) -> None:
    call = {
        "cu_seqlens_q": torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        "seq_lens": torch.tensor([8, 0, 2]),
        "input_ids": torch.tensor([10, 11, 12, 13, 14]),
        "position_ids": torch.tensor([5, 6, 7, 0, 1]),
        "use_initial_states": torch.tensor([True, False, False]),
    }
    once = run_both(specmeta.keep_last, reference.keep_last, call, device)
    twice = run_both(specmeta.keep_last, reference.keep_last, once, device)
    assert all(torch.equal(twice[name], once[name]) for name in call)
    assert once["input_ids"].tolist() == [12, 0, 14, 0, 0]
    assert once["position_ids"].tolist() == [7, 0, 1, 0, 0]
    assert once["use_initial_states"].tolist() == [True, False, True]


def test_only_what_is_given_is_written(check: Check) -> None:
    """Without a tensor by token nothing is checked against their number."""
    check(
        "keep_last",
        {"cu_seqlens_q": [0, 300, 305], "seq_lens": [300, 8]},
        {"cu_seqlens_q": [0, 1, 2], "seq_lens": [300, 8]},
    )


# --- Empty rows


def test_a_row_without_a_token_or_a_length_is_empty(check: Check) -> None:
    """Nothing is wrong with it; the one token that it has from now on is padding."""
    check(
        "keep_last",
        {
            "cu_seqlens_q": [0, 2, 2, 4],
            "seq_lens": [0, 9, 6],
            "input_ids": [10, 11, 12, 13],
            "pad_token": 3,
        },
        {
            "cu_seqlens_q": [0, 1, 2, 3],
            "seq_lens": [0, 0, 6],
            "input_ids": [3, 3, 13, 3],
            "position_ids": [0, 0, 5, 0],
            "query_lens": [1, 1, 1],
            "cached_lens": [0, 0, 5],
            "use_initial_states": [False, False, True],
            "status": [0, 0, 0],
        },
    )


@pytest.mark.parametrize(
    ("live", "starts", "lens", "ids"),
    [
        (0, [0, 0, 0, 0], [0, 0, 0], [0, 0, 0, 0]),
        (-3, [0, 0, 0, 0], [0, 0, 0], [0, 0, 0, 0]),
        (2, [0, 1, 2, 2], [5, 4, 0], [11, 12, 0, 0]),
        (3, [0, 1, 2, 3], [5, 4, 3], [11, 12, 13, 0]),
        (INT32_MAX, [0, 1, 2, 3], [5, 4, 3], [11, 12, 13, 0]),
    ],
)
def test_rows_past_num_rows_are_padding(
    check: Check, live: int, starts: list[int], lens: list[int], ids: list[int]
) -> None:
    """They have no token, and the starts repeat."""
    check(
        "keep_last",
        {
            "cu_seqlens_q": [0, 2, 3, 4],
            "seq_lens": [5, 4, 3],
            "num_rows": live,
            "input_ids": [10, 11, 12, 13],
        },
        {
            "cu_seqlens_q": starts,
            "seq_lens": lens,
            "input_ids": ids,
            "query_lens": [int(b < live) for b in range(3)],
            "cached_lens": [max(n - 1, 0) for n in lens],
            "status": [0, 0, 0],
        },
    )


def test_what_is_past_num_rows_is_not_checked(check: Check) -> None:
    check(
        "keep_last",
        {
            "cu_seqlens_q": [0, 2, -5, 99],
            "seq_lens": [5, -1, -1],
            "num_rows": 1,
            "input_ids": [10, 11, 12],
        },
        {
            "cu_seqlens_q": [0, 1, 1, 1],
            "seq_lens": [5, 0, 0],
            "input_ids": [11, 0, 0],
            "status": [0, 0, 0],
        },
    )


# --- Wrong values


@pytest.mark.parametrize(
    "bad",
    [
        [0, 2, 1, 6],  # decreasing
        [0, 2, 7, 7],  # past the tokens
        [0, 2, -1, 6],
        [0, 2, INT32_MAX, 6],
        [0, 2, -(2**31), 6],
    ],
)
def test_behind_a_bad_pair_every_row_is_empty(check: Check, bad: list[int]) -> None:
    """The rows before it keep their tokens, and from now on all pairs are right."""
    check(
        "keep_last",
        {
            "cu_seqlens_q": bad,
            "seq_lens": [5, 5, 5],
            "input_ids": [10, 11, 12, 13, 14, 15],
            "pad_token": 3,
        },
        {
            "cu_seqlens_q": [0, 1, 2, 3],
            "seq_lens": [5, 0, 0],
            "input_ids": [11, 3, 3, 3, 3, 3],
            "position_ids": [4, 0, 0, 0, 0, 0],
            "query_lens": [1, 1, 1],
            "cached_lens": [4, 0, 0],
            "status": [0, 32, 32],
        },
    )


@pytest.mark.parametrize("first", [-1, -(2**31), 3])
def test_a_bad_first_pair_empties_all(check: Check, first: int) -> None:
    check(
        "keep_last",
        {"cu_seqlens_q": [first, 2, 4], "seq_lens": [5, 5], "input_ids": [10, 11, 12, 13]},
        {
            "cu_seqlens_q": [0, 1, 2],
            "seq_lens": [0, 0],
            "input_ids": [0, 0, 0, 0],
            "status": [32, 32],
        },
    )


def test_lengths(check: Check) -> None:
    """Negative, shorter than the row's tokens, as long as they are, the longest, and longer."""
    lens = [-1, -(2**62), 1, 2, 3, INT32_MAX, 2**62]
    rows = len(lens)
    check(
        "keep_last",
        {
            "cu_seqlens_q": [2 * b for b in range(rows + 1)],
            "seq_lens": lens,
            "input_ids": [*range(10, 10 + 2 * rows)],
        },
        {
            "cu_seqlens_q": [*range(rows + 1)],
            "seq_lens": [0, 0, 0, 2, 3, INT32_MAX, 0],
            "input_ids": [0, 0, 0, 17, 19, 21, 0] + [0] * rows,
            "position_ids": [0, 0, 0, 1, 2, INT32_MAX - 1, 0] + [0] * rows,
            "cached_lens": [0, 0, 0, 1, 2, INT32_MAX - 1, 0],
            "query_lens": [1] * rows,
            "use_initial_states": [False, False, False, True, True, True, False],
            "status": [4, 4, 2, 0, 0, 0, 1],
        },
    )


def test_status_is_sticky(device: str) -> None:
    call = {
        "cu_seqlens_q": torch.tensor([0, 2, 4], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 4]),
        "status": torch.tensor([8, 1], dtype=torch.int32),
    }
    left = run_both(specmeta.keep_last, reference.keep_last, call, device)
    assert left["status"].tolist() == [8 | 2, 1]


@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
def test_each_row_needs_a_place_for_its_token(name: str) -> None:
    call = {
        "cu_seqlens_q": torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 1, 1]),
        name: torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(RuntimeError, match=f"^specmeta.keep_last: {name}: expected at least B = 3"):
        specmeta.keep_last(**call)
    assert call["cu_seqlens_q"].tolist() == [0, 1, 1, 1]
