"""SGLang's adapter against a plain model of the engine's way, and the faults its users met."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from launches import operators
from torch import Tensor

from specmeta import Status
from specmeta.graph import capture
from specmeta.integrations import sglang
from specmeta.integrations.sglang import Chains
from specmeta.testing import POISON

REQUESTS, MAX_LEN = 7, 40


def make_pool(seed: int, device: str) -> Tensor:
    """Return a `req_to_token` whose slots are all different, dealt out of order."""
    slots = torch.randperm(REQUESTS * MAX_LEN, generator=torch.manual_seed(seed)) + 1
    return slots.view(REQUESTS, MAX_LEN).to(torch.int32).to(device)


def poison(*shape: int, device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=device)


def extend_buffers(bs: int, width: int, capacity: int, device: str) -> dict[str, Tensor]:
    return {
        "out_cache_loc": poison(bs * width, device=device),
        "positions": poison(bs * width, device=device),
        "kv_lens": poison(bs, device=device),
        "kv_indptr": poison(bs + 1, device=device, dtype=torch.int32),
        "kv_indices": poison(capacity, device=device, dtype=torch.int32),
    }


def expected_extend(
    pool: Tensor, indices: list[int], lens: list[int], live: int, width: int, capacity: int
) -> dict[str, list[int]]:
    table = pool.tolist()
    want: dict[str, list[int]] = {
        name: [] for name in ("out_cache_loc", "positions", "kv_lens", "kv_indices")
    }
    want["kv_indptr"] = [0]
    for row, (index, length) in enumerate(zip(indices, lens, strict=True)):
        if row < live and index >= 0:
            want["out_cache_loc"] += table[index][length : length + width]
            want["positions"] += range(length, length + width)
            want["kv_lens"].append(length + width)
            want["kv_indices"] += table[index][: length + width]
        else:
            want["out_cache_loc"] += [0] * width
            want["positions"] += [0] * width
            want["kv_lens"].append(1)
            want["kv_indices"].append(0)
        want["kv_indptr"].append(len(want["kv_indices"]))
    want["kv_indices"] += [0] * (capacity - len(want["kv_indices"]))
    return want


def check(buffers: dict[str, Tensor], want: dict[str, list[Any]]) -> None:
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == want


def i64(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_extend(width: int, device: str) -> None:
    rng = random.Random(width)
    pool = make_pool(width, device)
    before = pool.clone()
    chains = Chains(pool, max_bs=6, num_draft_tokens=width)
    for _ in range(40):
        bs = rng.randint(1, 6)
        live = rng.randint(0, bs)
        indices = [rng.choice([-1, *range(REQUESTS)]) for _ in range(bs)]
        lens = [rng.randint(0, MAX_LEN - width) for _ in range(bs)]
        capacity = bs * MAX_LEN
        buffers = extend_buffers(bs, width, capacity, device)
        status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
        num_rows = torch.tensor([live], dtype=torch.int32, device=device)
        chains.extend(
            i64(indices, device), i64(lens, device), num_rows=num_rows, status=status, **buffers
        )
        check(buffers, expected_extend(pool, indices, lens, live, width, capacity))
        assert not status.any()
    assert torch.equal(pool, before)


def test_extend_past_what_was_allocated(device: str) -> None:
    """The row is padding and flagged; its neighbours go on."""
    pool = make_pool(0, device)
    allocated = torch.tensor([40, 40, 13, 40, 40, 40, 40], dtype=torch.int32, device=device)
    chains = Chains(pool, max_bs=3, num_draft_tokens=4, allocated_lens=allocated)
    status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
    for length, fits in ((9, True), (10, False)):
        buffers = extend_buffers(3, 4, 120, device)
        lens = [3, length, 5]
        chains.extend(i64([4, 2, 1], device), i64(lens, device), status=status, **buffers)
        indices = [4, 2 if fits else -1, 1]
        check(buffers, expected_extend(pool, indices, lens, 3, 4, 120))
    assert status.tolist() == [0, 0, Status.OVERFLOW, 0, 0, 0, 0, 0]


# --- Faults that users met ----------------------------------------------------------------------


def test_sglang_10892_padding_keeps_nothing(device: str) -> None:
    """What stands in padded rows, from a larger batch or from nowhere, reaches no output."""
    pool = make_pool(1, device)
    chains = Chains(pool, max_bs=4, num_draft_tokens=3)
    buffers = extend_buffers(4, 3, 160, device)
    chains.extend(i64([3, 1, 6, 2], device), i64([20, 30, 10, 9], device), **buffers)
    indices, lens = [5, 2**40, -(2**40), 6], [7, POISON, -POISON, 2**62]
    chains.extend(i64(indices, device), i64(lens, device), num_rows=1, **buffers)
    check(buffers, expected_extend(pool, indices, lens, 1, 3, 160))


def test_sglang_9344_slots_and_rows_are_64_bit() -> None:
    """Rows of the table lie more than 2^31 entries apart, slots go up to the last int32."""
    stride = 2**31 + 64
    storage = torch.empty(stride + 8, dtype=torch.int32)  # only what is touched takes memory
    pool = storage.as_strided((2, 8), (stride, 1))
    pool[0] = torch.arange(8)
    pool[1] = 2**31 - 1 - torch.arange(8)
    buffers = extend_buffers(2, 2, 16, "cpu")
    Chains(pool, max_bs=2, num_draft_tokens=2).extend(
        i64([1, 0], "cpu"), i64([3, 5], "cpu"), **buffers
    )
    assert buffers["out_cache_loc"].dtype == torch.int64
    check(buffers, expected_extend(pool, [1, 0], [3, 5], 2, 2, 16))


def test_sglang_27545_queries_stride_by_their_own_number(device: str) -> None:
    """Draft steps and draft tokens differ: rows are as far apart as they have tokens."""
    pool = make_pool(2, device)
    chains = Chains(pool, max_bs=3, num_draft_tokens=5)
    assert chains.qo_indptr.tolist() == [0, 5, 10, 15]
    buffers = extend_buffers(3, 5, 120, device)
    chains.extend(i64([2, 0, 4], device), i64([8, 1, 30], device), num_rows=2, **buffers)
    starts = chains.qo_indptr.tolist()
    for row, (index, length) in enumerate([(2, 8), (0, 1)]):
        own = slice(starts[row], starts[row + 1])
        assert buffers["positions"][own].tolist() == list(range(length, length + 5))
        assert torch.equal(buffers["out_cache_loc"][own], pool[index, length : length + 5].long())


def test_sglang_27689_the_host_never_learns_a_length(device: str) -> None:
    """Captured with rows of no length; a replay follows lengths and row count on the device."""
    pool = make_pool(3, device)
    chains = Chains(pool, max_bs=3, num_draft_tokens=4)
    buffers = extend_buffers(3, 4, 120, device)
    indices, lens = i64([0, 0, 0], device), i64([1, 1, 1], device)
    num_rows = torch.zeros(1, dtype=torch.int32, device=device)
    graph = capture(
        lambda: chains.extend(indices, lens, num_rows=num_rows, **buffers), num_rows=num_rows
    )
    for live, new_indices, new_lens in ((3, [5, 1, 2], [9, 30, 4]), (1, [4, 1, 2], [2, 30, 4])):
        indices.copy_(i64(new_indices, device))
        lens.copy_(i64(new_lens, device))
        num_rows.fill_(live)
        graph.replay()
        check(buffers, expected_extend(pool, new_indices, new_lens, live, 4, 120))


# --- Arguments, launches -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 4}, "topk: expected 1, since drafts are chains here, got 4"),
        ({"max_bs": -1}, "max_bs: expected at least 0, got -1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: expected at least 1, got 0"),
    ],
)
def test_numbers_that_raise(changes: dict[str, int], message: str) -> None:
    sizes: dict[str, Any] = {"max_bs": 2, "num_draft_tokens": 3}
    with pytest.raises(ValueError, match=message):
        Chains(make_pool(0, "cpu"), **(sizes | changes))


@pytest.mark.parametrize("name", ["out_cache_loc", "positions", "kv_lens", "kv_indptr"])
def test_a_wrong_size_raises_and_writes_nothing(name: str) -> None:
    chains = Chains(make_pool(0, "cpu"), max_bs=2, num_draft_tokens=3)
    buffers = extend_buffers(2, 3, 80, "cpu")
    buffers[name] = buffers[name][:-1]
    with pytest.raises(RuntimeError):
        chains.extend(i64([1, 2], "cpu"), i64([4, 5], "cpu"), **buffers)
    assert all((buffer == POISON).all() for buffer in buffers.values())


def test_each_call_is_one_operator() -> None:
    chains = Chains(make_pool(0, "cpu"), max_bs=2, num_draft_tokens=3)
    buffers = extend_buffers(2, 3, 80, "cpu")
    indices, lens = i64([1, 2], "cpu"), i64([4, 5], "cpu")
    assert operators(lambda: chains.extend(indices, lens, **buffers)) == ["specmeta::advance"]


def test_docstrings() -> None:
    import doctest

    import specmeta

    result = doctest.testmod(sglang, extraglobs={"specmeta": specmeta, "torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
