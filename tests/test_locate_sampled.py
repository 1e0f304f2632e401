"""`locate_sampled`: random arguments against the reference, and each rule by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from strategies import Call, locate_sampled_calls

import specmeta
from specmeta import reference
from specmeta.testing import run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1


@pytest.mark.random
@given(call=locate_sampled_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.locate_sampled, reference.locate_sampled, call, device)


def _rows_of_vllm(rng: random.Random) -> Call:
    """Decode rows with and without drafts, chunks of prompts, and void rows."""
    drafts = [rng.choice((0, 0, 1, 2, 3)) for _ in range(rng.randint(1, 8))]
    query = [n + 1 if n or rng.random() < 0.5 else rng.randint(1, 5) for n in drafts]
    sampled = [0 if rng.random() < 0.2 else rng.randint(1, n + 1) for n in drafts]

    def i32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "num_sampled": i32(sampled),
        "cu_num_draft_tokens": i32(list(accumulate(drafts))),
        "cu_seqlens_q": i32(list(accumulate(query, initial=0))),
    }


@pytest.mark.parametrize("seed", range(100))
def test_agrees_with_vllm(device: str, seed: int) -> None:
    """But for a void row with drafts: its index was one before the row (vLLM 48475)."""
    call = _rows_of_vllm(random.Random(seed))
    ends = call["cu_num_draft_tokens"].tolist()
    cu = call["cu_seqlens_q"].tolist()
    num_rejected, token_indices = [], []
    for b, sampled in enumerate(call["num_sampled"].tolist()):
        drafts = ends[b] - (ends[b - 1] if b > 0 else 0)
        rejected = drafts + 1 - sampled if drafts > 0 else 0
        if drafts > 0 and sampled == 0:
            rejected -= 1
        num_rejected.append(rejected)
        token_indices.append(cu[b + 1] - 1 - rejected)
    outputs = {
        name: torch.zeros(len(ends), dtype=torch.int32)
        for name in ("num_rejected", "token_indices", "status")
    }
    left = run_both(specmeta.locate_sampled, reference.locate_sampled, call | outputs, device)
    assert left["num_rejected"].tolist() == num_rejected
    assert left["token_indices"].tolist() == token_indices
    assert not left["status"].any()


@pytest.mark.parametrize(
    ("sampled", "rejected", "status"),
    [
        (4, 0, 0),
        (3, 1, 0),
        (1, 3, 0),
        (0, 3, 0),  # a void row: the index stays in it (vLLM 48475)
        (5, 0, 4),
        (-1, 3, 4),
        (2**62, 0, 4),
        (-(2**63), 3, 4),
    ],
)
def test_the_token_accepted_last(check: Check, sampled: int, rejected: int, status: int) -> None:
    """Three drafts behind two other tokens."""
    check(
        "locate_sampled",
        {"num_sampled": [sampled], "cu_num_draft_tokens": [3], "cu_seqlens_q": [0, 5]},
        {"num_rejected": [rejected], "token_indices": [4 - rejected], "status": [status]},
    )


def test_a_void_row_at_the_front_has_an_index_that_is_not_negative(check: Check) -> None:
    """-1 would take the last token of the batch (vLLM 48475)."""
    check(
        "locate_sampled",
        {"num_sampled": [0, 0], "cu_num_draft_tokens": [2, 4], "cu_seqlens_q": [0, 3, 6]},
        {"num_rejected": [2, 2], "token_indices": [0, 3], "status": [0, 0]},
    )


def test_rows_without_drafts(check: Check) -> None:
    """A chunk, whose ids don't count, a decode row, and one beside them that has drafts."""
    check(
        "locate_sampled",
        {
            "num_sampled": [0, 1, 1, 1],
            "cu_num_draft_tokens": [0, 0, 2, 2],
            "cu_seqlens_q": [0, 4, 5, 8, 10],
        },
        {"num_rejected": [0, 0, 2, 0], "token_indices": [3, 4, 5, 9], "status": [0] * 4},
    )


def test_drafts_that_cannot_be(check: Check) -> None:
    """A sum that falls, and more drafts than the row has tokens beside its first."""
    check(
        "locate_sampled",
        {
            "num_sampled": [1, 1, 2, 1],
            "cu_num_draft_tokens": [2, 1, 9, INT32_MAX],
            "cu_seqlens_q": [0, 3, 6, 9, 12],
        },
        {
            "num_rejected": [2, 0, 1, 2],
            "token_indices": [0, 5, 7, 9],
            "status": [0, 4, 4, 4],
        },
    )


def test_drafts_are_told_by_the_sums_of_neighbours(check: Check) -> None:
    """Also where the row before is empty: sums run over the whole batch."""
    check(
        "locate_sampled",
        {
            "num_sampled": [1, 1, 1],
            "cu_num_draft_tokens": [-(2**31), INT32_MAX, INT32_MAX],
            "cu_seqlens_q": [0, 3, 6, 9],
            "row_to_slot": [-1, 0, 1],
        },
        {"num_rejected": [0, 2, 0], "token_indices": [0, 3, 8], "status": [4, 0, 0]},
    )


def test_empty_rows(check: Check) -> None:
    """No tokens, no slot, past num_rows: the row's first place, and nothing rejected."""
    check(
        "locate_sampled",
        {
            "num_sampled": [1, 7, 7, 7, 7],
            "cu_num_draft_tokens": [2, 2, 4, 6, 8],
            "cu_seqlens_q": [0, 3, 3, 6, 9, 12],
            "row_to_slot": [0, 1, -1, 8, 2],
            "num_rows": 4,
        },
        {
            "num_rejected": [2, 0, 0, 0, 0],
            "token_indices": [0, 3, 3, 6, 9],
            "status": [0, 0, 0, 8],
        },
    )


def test_a_bad_pair_empties_what_is_behind_it(check: Check) -> None:
    check(
        "locate_sampled",
        {
            "num_sampled": [1, 1, 1, 1],
            "cu_num_draft_tokens": [1, 2, 3, 4],
            "cu_seqlens_q": [0, 2, -5, 6, 8],
        },
        {"num_rejected": [1, 0, 0, 0], "token_indices": [0, 2, 0, 6], "status": [0, 32, 32, 32]},
    )


def test_count_sampled_comes_first(device: str) -> None:
    """The two agree with accept_sampled, which does both."""
    generator = torch.Generator().manual_seed(0)
    rows, drafts = 40, 3

    def out(dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((rows,), 77, dtype=dtype, device=device)

    sampled = torch.randint(-1, 9, (rows, drafts + 1), generator=generator).to(device)
    cu = torch.arange(0, 4 * rows + 1, 4, dtype=torch.int32, device=device)
    want = {"num_rejected": out(), "token_indices": out(), "next_tokens": out(torch.int64)}
    specmeta.accept_sampled(sampled, vocab_size=8, cu_seqlens_q=cu, pad_token=5, **want)
    got = {"num_rejected": out(), "token_indices": out(), "next_tokens": out(torch.int64)}
    num_sampled, next_tokens = out(), got.pop("next_tokens")
    specmeta.count_sampled(
        sampled, vocab_size=8, pad_token=5, num_sampled=num_sampled, next_tokens=next_tokens
    )
    ends = torch.arange(3, 3 * rows + 1, 3, dtype=torch.int32, device=device)
    specmeta.locate_sampled(num_sampled, ends, cu, **got)
    for name, tensor in (got | {"next_tokens": next_tokens}).items():
        assert torch.equal(tensor, want[name]), name
    assert len(want["num_rejected"].unique()) == drafts + 1
