"""`count_sampled`: random arguments against the reference, and each rule by name."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from strategies import Call, count_sampled_calls

import specmeta
from specmeta import reference
from specmeta.testing import run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1


@pytest.mark.random
@given(call=count_sampled_calls())
def test_random_arguments(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.count_sampled, reference.count_sampled, call, device)


def _rows_of_vllm(rng: random.Random) -> Call:
    """What its rejection sampler leaves: ids, at times one outside the vocabulary, then -1."""
    vocab_size, width = 20, rng.randint(1, 5)
    table = []
    for _ in range(rng.randint(1, 8)):
        ids = [rng.randint(0, vocab_size - 1) for _ in range(rng.randint(0, width))]
        if len(ids) < width and rng.random() < 0.2:
            ids.append(vocab_size + rng.randint(0, 3))
        table.append(ids + [-1] * (width - len(ids)))
    return {
        "sampled_tokens": torch.tensor(table, dtype=torch.int32),
        "vocab_size": vocab_size,
        "discarded": torch.tensor([rng.random() < 0.3 for _ in table]),
        "backup_tokens": torch.tensor([rng.randint(0, vocab_size - 1) for _ in table]).int(),
    }


@pytest.mark.parametrize("seed", range(100))
def test_agrees_with_vllm(device: str, seed: int) -> None:
    """It counts all ids that are not -1 and below the vocabulary's size, wherever they stand."""
    call = _rows_of_vllm(random.Random(seed))
    num_sampled, next_tokens = [], []
    ids_of_rows = call["sampled_tokens"].tolist()
    for b, ids in enumerate(ids_of_rows):
        valid = [i for i in ids if i != -1 and i < call["vocab_size"]]
        if call["discarded"][b]:
            valid = []
        num_sampled.append(len(valid))
        next_tokens.append(valid[-1] if valid else int(call["backup_tokens"][b]))
    outputs = {
        "num_sampled": torch.zeros(len(ids_of_rows), dtype=torch.int32),
        "next_tokens": torch.zeros(len(ids_of_rows), dtype=torch.int32),
        "status": torch.zeros(len(ids_of_rows), dtype=torch.int32),
    }
    left = run_both(specmeta.count_sampled, reference.count_sampled, call | outputs, device)
    assert left["num_sampled"].tolist() == num_sampled
    assert left["next_tokens"].tolist() == next_tokens
    assert not left["status"].any()


@pytest.mark.parametrize(
    ("ids", "count", "last"),
    [
        ([5, 6, 7], 3, 7),
        ([5, 6, -1], 2, 6),
        ([5, -1, -1], 1, 5),
        ([5, -1, 7], 1, 5),  # what stands behind the end is nobody's
        ([5, 100, -1], 1, 5),  # a token outside the vocabulary is not accepted (vLLM 46533)
        ([5, 100, 7], 1, 5),
        ([5, -7, 7], 1, 5),
        ([0, 99, INT32_MAX], 2, 99),
    ],
)
def test_leading_ids_count(check: Check, ids: list[int], count: int, last: int) -> None:
    check(
        "count_sampled",
        {"sampled_tokens": [ids], "vocab_size": 100},
        {"num_sampled": [count], "next_tokens": [last], "status": [0]},
    )


def test_discarded_rows(check: Check) -> None:
    """A chunk of a prompt: its ids don't count, and that is no fault."""
    check(
        "count_sampled",
        {
            "sampled_tokens": [[5, 6], [5, 6], [5, -1], [5, -1]],
            "vocab_size": 100,
            "discarded": [True, False, True, False],
            "backup_tokens": [7, 7, -1, -1],
            "pad_token": 3,
        },
        {"num_sampled": [0, 2, 0, 1], "next_tokens": [7, 6, 3, 5], "status": [0, 0, 0, 0]},
    )


def test_a_void_row_without_a_token_to_go_on_from_is_flagged(check: Check) -> None:
    check(
        "count_sampled",
        {
            "sampled_tokens": [[-1, 5], [100, -1], [-1, -1]],
            "vocab_size": 100,
            "row_to_slot": [2, 0, 1],
            "pad_token": 3,
        },
        {"num_sampled": [0, 0, 0], "next_tokens": [3, 3, 3], "status": [4, 4, 4, 0]},
    )


@pytest.mark.parametrize(
    ("backup", "last", "status"),
    [(0, 0, 0), (99, 99, 0), (100, 3, 4), (-1, 3, 4), (2**40, 3, 4), (-(2**63), 3, 4)],
)
def test_backup_tokens_are_of_the_vocabulary(
    device: str, backup: int, last: int, status: int
) -> None:
    """The next token goes into an embedding."""
    call = {
        "sampled_tokens": torch.tensor([[-1, -1]]),
        "vocab_size": 100,
        "backup_tokens": torch.tensor([backup]),
        "pad_token": 3,
        "next_tokens": torch.zeros(1, dtype=torch.int64),
        "status": torch.zeros(1, dtype=torch.int32),
    }
    left = run_both(specmeta.count_sampled, reference.count_sampled, call, device)
    assert (left["next_tokens"].tolist(), left["status"].tolist()) == ([last], [status])


def test_empty_rows(check: Check) -> None:
    """No slot, a slot that doesn't exist, past num_rows: not even the backup token."""
    check(
        "count_sampled",
        {
            "sampled_tokens": [[5, 6]] * 4,
            "vocab_size": 100,
            "backup_tokens": [7] * 4,
            "row_to_slot": [1, -1, 9, 0],
            "num_rows": 3,
            "pad_token": 3,
        },
        {"num_sampled": [2, 0, 0, 0], "next_tokens": [6, 3, 3, 3], "status": [0, 0, 8]},
    )


def test_a_row_without_columns(device: str) -> None:
    call = {
        "sampled_tokens": torch.zeros(1, 0, dtype=torch.int64),
        "vocab_size": 100,
        "backup_tokens": torch.tensor([7]),
        "num_sampled": torch.ones(1, dtype=torch.int64),
        "next_tokens": torch.zeros(1, dtype=torch.int64),
    }
    left = run_both(specmeta.count_sampled, reference.count_sampled, call, device)
    assert (left["num_sampled"].tolist(), left["next_tokens"].tolist()) == ([0], [7])


def test_an_id_saturates_in_a_narrow_output(device: str) -> None:
    call = {
        "sampled_tokens": torch.tensor([[2**40]]),
        "vocab_size": 2**41,
        "next_tokens": torch.zeros(1, dtype=torch.int32),
    }
    left = run_both(specmeta.count_sampled, reference.count_sampled, call, device)
    assert left["next_tokens"].tolist() == [INT32_MAX]
