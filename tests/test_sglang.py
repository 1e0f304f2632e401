"""SGLang's adapter against a plain model of the engine's way, and the faults its users met."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import operators
from plain_attention import attend
from torch import Tensor

from specmeta import Status
from specmeta.graph import capture
from specmeta.integrations import sglang
from specmeta.integrations.sglang import Chains
from specmeta.testing import POISON

DOCS = Path(__file__).parent.parent / "docs" / "sglang.md"
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
        "end_offset": poison(bs, device=device),
        "kv_indptr": poison(bs + 1, device=device, dtype=torch.int32),
        "kv_indices": poison(capacity, device=device, dtype=torch.int32),
    }


def expected_extend(
    pool: Tensor, indices: list[int], lens: list[int], live: int, width: int, capacity: int
) -> dict[str, list[int]]:
    table = pool.tolist()
    want: dict[str, list[int]] = {
        name: [] for name in ("out_cache_loc", "positions", "kv_lens", "end_offset", "kv_indices")
    }
    want["kv_indptr"] = [0]
    for row, (index, length) in enumerate(zip(indices, lens, strict=True)):
        if row < live and index >= 0 and length > 0:
            want["out_cache_loc"] += table[index][length : length + width]
            want["positions"] += range(length, length + width)
            want["kv_lens"].append(length + width)
            want["end_offset"].append(length + width)
            want["kv_indices"] += table[index][: length + width]
        else:
            want["out_cache_loc"] += [0] * width
            want["positions"] += [0] * width
            want["kv_lens"].append(1)
            want["end_offset"].append(0)
            want["kv_indices"].append(0)
        want["kv_indptr"].append(len(want["kv_indices"]))
    want["kv_indices"] += [0] * (capacity - len(want["kv_indices"]))
    return want


def draft_buffers(bs: int, steps: int, capacity: int, device: str) -> dict[str, Tensor]:
    """Make what the draft loop reads; the lists are slices of those for two rows more."""
    indptr = poison(steps, bs + 3, device=device, dtype=torch.int32)
    indices = poison(steps, capacity + 5, device=device, dtype=torch.int32)
    return {
        "out_cache_loc": poison(bs * steps, device=device),
        "positions": poison(bs, device=device),
        "kv_indptr": indptr[:, : bs + 1],
        "kv_indices": indices[:, :capacity],
    }


def expected_draft(
    pool: Tensor, indices: list[int], lens: list[int], live: int, steps: int, capacity: int
) -> dict[str, list[Any]]:
    table = pool.tolist()
    want: dict[str, list[Any]] = {"out_cache_loc": [], "positions": []}
    lists: list[list[int]] = [[] for _ in range(steps)]
    indptr = [[0] for _ in range(steps)]
    for row, (index, length) in enumerate(zip(indices, lens, strict=True)):
        real = row < live and index >= 0 and length > 0
        want["out_cache_loc"] += table[index][length : length + steps] if real else [0] * steps
        want["positions"].append(length if real else 0)
        for step in range(steps):
            lists[step] += table[index][: length + step + 1] if real else [0]
            indptr[step].append(len(lists[step]))
    want["kv_indptr"] = indptr
    want["kv_indices"] = [slots + [0] * (capacity - len(slots)) for slots in lists]
    return want


def commit_buffers(bs: int, width: int, device: str) -> dict[str, Tensor]:
    """Make what a verify pass leaves, of the engine's types."""
    return {
        "accept_lens": poison(bs, device=device, dtype=torch.int32),
        "num_correct_drafts": poison(bs, device=device, dtype=torch.int32),
        "new_seq_lens": poison(bs, device=device),
        "bonus_tokens": poison(bs, device=device, dtype=torch.int32),
        "select_index": poison(bs, device=device),
        "predict": poison(bs * width, device=device),
    }


def expected_commit(
    rows: list[bool], lens: list[int], drafts: list[int], targets: list[int], width: int
) -> dict[str, list[int]]:
    """Walk each real row's chain as the engine's verification does, then what follows from it."""
    want: dict[str, list[int]] = {
        name: []
        for name in (
            *("accept_lens", "num_correct_drafts", "new_seq_lens"),
            *("bonus_tokens", "select_index"),
        )
    }
    want["predict"] = [0] * len(drafts)
    for row, real in enumerate(rows):
        first = row * width
        accept = 0
        while real:
            at = first + accept
            want["predict"][at] = targets[at]
            accept += 1
            if accept == width or drafts[at + 1] != targets[at]:
                break
        last = first + max(accept - 1, 0)
        want["accept_lens"].append(accept)
        want["num_correct_drafts"].append(max(accept - 1, 0))
        want["new_seq_lens"].append(lens[row] + accept if real else 0)
        want["bonus_tokens"].append(want["predict"][last])
        want["select_index"].append(last)
    return want


def chain_of(targets: list[int], width: int, rng: random.Random) -> list[int]:
    """Draft tokens of which often the first few are what the target says."""
    drafts = [rng.randint(0, 9) for _ in targets]
    for t in range(1, len(drafts)):
        if t % width and rng.random() < 0.7:
            drafts[t] = targets[t - 1]
    return drafts


def check(buffers: dict[str, Tensor], want: dict[str, list[Any]]) -> None:
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == want


def i64(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_extend(width: int, device: str) -> None:
    rng = random.Random(width)
    pool = make_pool(width, device)
    before = pool.clone()
    chains = Chains(pool, max_bs=6, num_steps=3, num_draft_tokens=width)
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
    chains = Chains(pool, max_bs=3, num_steps=3, num_draft_tokens=4, allocated_lens=allocated)
    status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
    for length, fits in ((9, True), (10, False)):
        buffers = extend_buffers(3, 4, 120, device)
        lens = [3, length, 5]
        chains.extend(i64([4, 2, 1], device), i64(lens, device), status=status, **buffers)
        indices = [4, 2 if fits else -1, 1]
        check(buffers, expected_extend(pool, indices, lens, 3, 4, 120))
    assert status.tolist() == [0, 0, Status.OVERFLOW, 0, 0, 0, 0, 0]


def test_lengths_of_zero_and_below(device: str) -> None:
    """A row of 0 is padding, so one that was emptied stays so; what is below is flagged as well."""
    pool = make_pool(0, device)
    chains = Chains(pool, max_bs=3, num_steps=2, num_draft_tokens=3)
    rows, lens = [4, 2, 1], [0, -1, 6]
    status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
    extended, drafted = extend_buffers(3, 3, 120, device), draft_buffers(3, 2, 120, device)
    chains.extend(i64(rows, device), i64(lens, device), status=status, **extended)
    check(extended, expected_extend(pool, [-1, -1, 1], lens, 3, 3, 120))
    assert status.tolist() == [0, 0, Status.BAD_COUNT, 0, 0, 0, 0, 0]
    chains.draft(i64(rows, device), i64(lens, device), status=status.zero_(), **drafted)
    check(drafted, expected_draft(pool, [-1, -1, 1], lens, 3, 2, 120))
    assert status.tolist() == [0, 0, Status.BAD_COUNT, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_view_of_the_engines_kv_indices(missing: int, device: str) -> None:
    """Only the view is written; with a column too few, the last row is padding where it counts."""
    pool, lens, steps, width = make_pool(5, device), [7, 12], 3, 4
    chains = Chains(pool, max_bs=8, num_steps=steps, num_draft_tokens=width)
    indices = i64([3, 6], device)
    status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
    engines = poison(steps, 8 * MAX_LEN, device=device, dtype=torch.int32)
    bound = sum(lens) + 2 * steps - missing
    drafted = draft_buffers(2, steps, 0, device) | {"kv_indices": engines[:, :bound]}
    chains.draft(indices, i64(lens, device), status=status, **drafted)
    want = expected_draft(pool, [3, 6], lens, 2, steps, bound)
    if missing:
        cut = expected_draft(pool, [3, -1], lens, 2, steps, bound)
        want["out_cache_loc"][-1] = 0
        for name in ("kv_indptr", "kv_indices"):
            want[name][-1] = cut[name][-1]
    check(drafted, want)
    assert (engines[:, bound:] == POISON).all()

    engines = poison(8 * MAX_LEN, device=device, dtype=torch.int32)
    bound = sum(lens) + 2 * width - missing
    extended = extend_buffers(2, width, 0, device) | {"kv_indices": engines[:bound]}
    chains.extend(indices, i64(lens, device), status=status, **extended)
    check(extended, expected_extend(pool, [3, -1 if missing else 6], lens, 2, width, bound))
    assert (engines[bound:] == POISON).all()
    assert status.tolist() == [0, 0, 0, 0, 0, 0, missing * Status.OVERFLOW, 0]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_draft(steps: int, device: str) -> None:
    rng = random.Random(steps)
    pool = make_pool(steps, device)
    before = pool.clone()
    chains = Chains(pool, max_bs=6, num_steps=steps, num_draft_tokens=steps + 1)
    for _ in range(40):
        bs = rng.randint(1, 6)
        live = rng.randint(0, bs)
        indices = [rng.choice([-1, *range(REQUESTS)]) for _ in range(bs)]
        lens = [rng.randint(0, MAX_LEN - steps) for _ in range(bs)]
        capacity = bs * MAX_LEN
        buffers = draft_buffers(bs, steps, capacity, device)
        status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
        num_rows = torch.tensor([live], dtype=torch.int32, device=device)
        chains.draft(
            i64(indices, device), i64(lens, device), num_rows=num_rows, status=status, **buffers
        )
        check(buffers, expected_draft(pool, indices, lens, live, steps, capacity))
        assert not status.any()
    assert torch.equal(pool, before)


def test_draft_past_what_was_allocated(device: str) -> None:
    """Two of three steps have room: in the third the row is padding, its neighbours go on."""
    pool = make_pool(0, device)
    allocated = torch.tensor([40, 40, 13, 40, 40, 40, 40], dtype=torch.int32, device=device)
    chains = Chains(pool, max_bs=3, num_steps=3, num_draft_tokens=4, allocated_lens=allocated)
    status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
    buffers = draft_buffers(3, 3, 120, device)
    indices, lens = [4, 2, 1], [3, 11, 5]
    chains.draft(i64(indices, device), i64(lens, device), status=status, **buffers)
    want = expected_draft(pool, indices, lens, 3, 3, 120)
    want["out_cache_loc"][5] = 0
    emptied = expected_draft(pool, [4, -1, 1], lens, 3, 3, 120)
    for name in ("kv_indptr", "kv_indices"):
        want[name][2] = emptied[name][2]
    check(buffers, want)
    assert status.tolist() == [0, 0, Status.OVERFLOW, 0, 0, 0, 0, 0]


def verify(chains: Chains, indices: Tensor, lens: Tensor, **rows: Any) -> Tensor:
    """Lay out a verify pass, and return what `commit` takes from it."""
    tokens, end_offset = len(indices) * int(chains.qo_indptr[1]), torch.empty_like(lens)
    out_cache_loc = torch.empty(tokens, dtype=torch.int64, device=lens.device)
    chains.extend(indices, lens, out_cache_loc=out_cache_loc, end_offset=end_offset, **rows)
    return end_offset


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_commit(width: int, device: str) -> None:
    rng = random.Random(width)
    pool = make_pool(width, device)
    chains = Chains(pool, max_bs=6, num_steps=3, num_draft_tokens=width)
    for _ in range(40):
        bs = rng.randint(1, 6)
        live = rng.randint(0, bs)
        indices = [rng.choice([-1, *range(REQUESTS)]) for _ in range(bs)]
        lens = [rng.randint(0, MAX_LEN - width) for _ in range(bs)]
        targets = [rng.randint(0, 9) for _ in range(bs * width)]
        drafts = chain_of(targets, width, rng)
        num_rows = torch.tensor([live], dtype=torch.int32, device=device)
        rows = {
            "num_rows": num_rows,
            "status": torch.zeros(REQUESTS + 1, dtype=torch.int32).to(device),
        }
        row_indices = i64(indices, device)
        end_offset = verify(chains, row_indices, i64(lens, device), **rows)
        buffers = commit_buffers(bs, width, device)
        ids = i64(drafts, device), i64(targets, device)
        chains.commit(row_indices, end_offset, *ids, **rows, **buffers)
        real = [row < live and indices[row] >= 0 and lens[row] > 0 for row in range(len(indices))]
        check(buffers, expected_commit(real, lens, drafts, targets, width))
        assert not rows["status"].any()


def test_commit_after_sampling(device: str) -> None:
    """The sampler's own `predict`, which is 0 behind the bonus token, gives the sampler's count."""
    chains = Chains(make_pool(4, device), max_bs=2, num_steps=3, num_draft_tokens=4)
    indices = i64([3, 5], device)
    end_offset = verify(chains, indices, i64([9, 6], device))
    drafts = [4, 7, 7, 8, 2, 9, 1, 3]
    predict = [7, 7, 5, 0, 6, 0, 0, 0]  # two drafts and another token than 8; one other than 9
    buffers = commit_buffers(2, 4, device)
    chains.commit(indices, end_offset, i64(drafts, device), i64(predict, device), **buffers)
    check(
        buffers,
        {
            "accept_lens": [3, 1],
            "num_correct_drafts": [2, 0],
            "new_seq_lens": [12, 7],
            "bonus_tokens": [5, 6],
            "select_index": [2, 4],
            "predict": predict,
        },
    )


@pytest.mark.parametrize("width", [1, 4])
def test_commit_of_a_row_that_was_emptied(width: int, device: str) -> None:
    """Nothing of it was verified, so nothing is committed; its neighbour goes on."""
    pool = make_pool(0, device)
    allocated = torch.full((REQUESTS,), 8, dtype=torch.int32, device=device)
    chains = Chains(pool, max_bs=2, num_steps=3, num_draft_tokens=width, allocated_lens=allocated)
    status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
    indices, lens, tokens = [4, 2], [8, 1], [5] * (2 * width)
    end_offset = verify(chains, i64(indices, device), i64(lens, device), status=status)
    buffers = commit_buffers(2, width, device)
    ids = i64(tokens, device)
    chains.commit(i64(indices, device), end_offset, ids, ids, status=status, **buffers)
    check(buffers, expected_commit([False, True], lens, tokens, tokens, width))
    assert status.tolist() == [0, 0, 0, 0, Status.OVERFLOW, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_commit_after_another_pass(dtype: torch.dtype, device: str) -> None:
    """What runs between the verify pass and `commit` doesn't change what is committed."""
    chains = Chains(make_pool(0, device), max_bs=2, num_steps=3, num_draft_tokens=2)
    indices, lens, tokens = i64([4, 2], device), [9, 3], [5, 5, 5, 6]
    end_offset = verify(chains, indices, i64(lens, device).to(dtype))
    verify(chains, i64([2, -1], device), i64([30, 1], device))
    buffers, ids = commit_buffers(2, 2, device), i64(tokens, device)
    chains.commit(indices, end_offset, ids, ids, **buffers)
    check(buffers, expected_commit([True] * 2, lens, tokens, tokens, 2))


# --- Attention over a batch with padding ----------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def plain_attention(
    query: Tensor, cache: Tensor, qo_indptr: Tensor, buffers: dict[str, Tensor]
) -> Tensor:
    """Attend over `cache` [slots, 2, KV_H, D] as the lists say."""
    starts, ends = qo_indptr.tolist(), buffers["kv_indptr"].tolist()
    output = torch.empty_like(query)
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        keys, values = cache[buffers["kv_indices"][begin:end].long()].unbind(1)
        tokens = slice(starts[row], starts[row + 1])
        output[tokens] = attend(query[tokens], keys, values)
    return output


def flashinfers_attention(
    query: Tensor, cache: Tensor, qo_indptr: Tensor, buffers: dict[str, Tensor]
) -> Tensor:
    """Do the same with FlashInfer, whose pages hold one token here."""
    import flashinfer

    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        qo_indptr,
        buffers["kv_indptr"],
        buffers["kv_indices"],
        torch.ones_like(qo_indptr[1:]),
        *(HEADS, KV_HEADS, HEAD_DIM, 1),
        causal=True,
        q_data_type=query.dtype,
    )
    output: Tensor = wrapper.run(query, cache[:, :, None])
    return output


@pytest.mark.parametrize("bad", [0.5, torch.nan])
@pytest.mark.parametrize(
    ("device", "real"), [("cpu", False), ("cuda", False), ("cuda", True)], ids=str
)
def test_attention_with_padded_rows(bad: float, device: str, real: bool) -> None:
    """What padded tokens compute and store, NaN too, changes nothing for the rows beside them."""
    if real:
        pytest.importorskip("flashinfer", reason="no FlashInfer")
    attention = flashinfers_attention if real else plain_attention
    dtype, width = torch.float16 if real else torch.float32, 4
    torch.manual_seed(0)
    pool = make_pool(6, device)
    chains = Chains(pool, max_bs=5, num_steps=3, num_draft_tokens=width)
    requests, lens = [3, -1, 5, 2, 2], [17, 1, 2, 9, 30]
    buffers = extend_buffers(5, width, 200, device)
    chains.extend(i64(requests, device), i64(lens, device), num_rows=3, **buffers)
    cached = torch.randn(REQUESTS * MAX_LEN + 1, 2, KV_HEADS, HEAD_DIM, device=device).to(dtype)
    new = torch.randn(5 * width, 2, KV_HEADS, HEAD_DIM, device=device).to(dtype)
    query = torch.randn(5 * width, HEADS, HEAD_DIM, device=device).to(dtype)
    padding = torch.tensor([False, True, False, True, True], device=device)
    padding = padding.repeat_interleave(width)
    query[padding], new[padding] = bad, bad

    cache = cached.clone()
    cache[buffers["out_cache_loc"]] = new  # a layer stores its tokens, then attends
    output = attention(query, cache, chains.qo_indptr, buffers)

    for row in (0, 2):
        tokens = slice(row * width, (row + 1) * width)
        prefix = cached[pool[requests[row], : lens[row]].long()]
        keys, values = torch.cat([prefix, new[tokens]]).float().unbind(1)
        torch.testing.assert_close(
            output[tokens].float(),
            attend(query[tokens].float(), keys, values),
            rtol=4e-3 if real else 1e-5,
            atol=4e-3 if real else 1e-5,
        )
    if real and bad != bad:
        return  # which of them FlashInfer then makes NaN doesn't matter
    # A padded row has one key: its last token sees it, those before see nothing.
    padded = output[padding].view(3, width, HEADS, HEAD_DIM)
    assert (padded[:, :-1] == 0).all()
    torch.testing.assert_close(padded[:, -1], torch.full_like(padded[:, -1], bad), equal_nan=True)


# --- Faults that users met ----------------------------------------------------------------------


def test_sglang_10892_padding_keeps_nothing(device: str) -> None:
    """What stands in padded rows, from a larger batch or from nowhere, reaches no output."""
    pool = make_pool(1, device)
    chains = Chains(pool, max_bs=4, num_steps=3, num_draft_tokens=3)
    buffers = extend_buffers(4, 3, 160, device)
    chains.extend(i64([3, 1, 6, 2], device), i64([20, 30, 10, 9], device), **buffers)
    indices, lens = [5, 2**40, -(2**40), 6], [7, POISON, -POISON, 2**62]
    status = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
    rows = {"num_rows": 1, "status": status}
    row_indices, row_lens = i64(indices, device), i64(lens, device)
    chains.extend(row_indices, row_lens, **rows, **buffers)
    check(buffers, expected_extend(pool, indices, lens, 1, 3, 160))
    end_offset = buffers["end_offset"]

    buffers = draft_buffers(4, 3, 160, device)
    chains.draft(row_indices, row_lens, **rows, **buffers)
    check(buffers, expected_draft(pool, indices, lens, 1, 3, 160))

    drafts, targets = [1, 2, 3, *[POISON] * 9], [2, 3, 4, *[-POISON] * 9]
    buffers = commit_buffers(4, 3, device)
    ids = i64(drafts, device), i64(targets, device)
    chains.commit(row_indices, end_offset, *ids, **rows, **buffers)
    check(buffers, expected_commit([True] + [False] * 3, lens, drafts, targets, 3))
    assert not status.any()


def test_sglang_9344_slots_and_rows_are_64_bit() -> None:
    """Rows of the table lie more than 2^31 entries apart, slots go up to the last int32."""
    stride = 2**31 + 64
    storage = torch.empty(stride + 8, dtype=torch.int32)  # only what is touched takes memory
    pool = storage.as_strided((2, 8), (stride, 1))
    pool[0] = torch.arange(8)
    pool[1] = 2**31 - 1 - torch.arange(8)
    chains = Chains(pool, max_bs=2, num_steps=3, num_draft_tokens=2)
    indices, lens = i64([1, 0], "cpu"), i64([3, 5], "cpu")
    buffers = extend_buffers(2, 2, 16, "cpu")
    chains.extend(indices, lens, **buffers)
    assert buffers["out_cache_loc"].dtype == torch.int64
    check(buffers, expected_extend(pool, [1, 0], [3, 5], 2, 2, 16))
    buffers = draft_buffers(2, 3, 16, "cpu")
    chains.draft(indices, lens, **buffers)
    check(buffers, expected_draft(pool, [1, 0], [3, 5], 2, 3, 16))


def test_sglang_27545_queries_stride_by_their_own_number(device: str) -> None:
    """Draft steps and draft tokens differ: rows are as far apart as they have tokens."""
    pool = make_pool(2, device)
    chains = Chains(pool, max_bs=3, num_steps=3, num_draft_tokens=5)
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
    chains = Chains(pool, max_bs=3, num_steps=3, num_draft_tokens=4)
    drafted, extended = draft_buffers(3, 3, 120, device), extend_buffers(3, 4, 120, device)
    committed = commit_buffers(3, 4, device)
    indices, lens = i64([0, 0, 0], device), i64([1, 1, 1], device)
    drafts, targets = i64([0] * 12, device), i64([0] * 12, device)
    num_rows = torch.zeros(1, dtype=torch.int32, device=device)

    def step() -> None:
        chains.draft(indices, lens, num_rows=num_rows, **drafted)
        chains.extend(indices, lens, num_rows=num_rows, **extended)
        end_offset = extended["end_offset"]
        chains.commit(indices, end_offset, drafts, targets, num_rows=num_rows, **committed)

    graph = capture(step, num_rows=num_rows)
    rng = random.Random(27689)
    for live, new_indices, new_lens in ((3, [5, 1, 2], [9, 30, 4]), (1, [4, 1, 2], [2, 30, 4])):
        chosen = [rng.randint(0, 9) for _ in range(12)]
        ids = chain_of(chosen, 4, rng)
        for tensor, values in (
            (indices, new_indices),
            (lens, new_lens),
            (drafts, ids),
            (targets, chosen),
        ):
            tensor.copy_(i64(values, device))
        num_rows.fill_(live)
        graph.replay()
        check(drafted, expected_draft(pool, new_indices, new_lens, live, 3, 120))
        check(extended, expected_extend(pool, new_indices, new_lens, live, 4, 120))
        real = [row < live for row in range(3)]
        check(committed, expected_commit(real, new_lens, ids, chosen, 4))


# --- Arguments, launches -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 4}, "topk: expected 1, since drafts are chains here, got 4"),
        ({"max_bs": -1}, r"max_bs: expected an integer in .*, got -1"),
        ({"max_bs": None}, "max_bs: expected an integer, got None"),
        ({"num_steps": 0}, r"num_steps: expected an integer in .*, got 0"),
        ({"num_steps": 1.5}, "num_steps: expected an integer, got 1.5"),
        ({"num_draft_tokens": 0}, r"num_draft_tokens: expected an integer in .*, got 0"),
        (
            {"max_bs": 2**16, "num_draft_tokens": 2**15},
            r"max_bs \* num_draft_tokens: expected below 2147483648, got 2147483648",
        ),
        ({"req_to_token": None}, "req_to_token: expected a tensor, got NoneType"),
        ({"req_to_token": torch.zeros(4).int()}, r"req_to_token: expected rank 2, got shape \[4\]"),
        (
            {"req_to_token": torch.zeros(4, 4).long()},
            "req_to_token: expected torch.int32, got torch.int64",
        ),
        ({"allocated_lens": [1]}, "allocated_lens: expected a tensor, got list"),
        ({"allocated_lens": torch.zeros(4)}, "allocated_lens: expected torch.int32, got torch.flo"),
        (
            {"allocated_lens": torch.zeros(1).int()},
            r"allocated_lens: expected \d+ entries, as req_to_token has rows, got 1",
        ),
    ],
)
def test_what_chains_refuse(changes: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "req_to_token": make_pool(0, "cpu"),
        "max_bs": 2,
        "num_steps": 2,
        "num_draft_tokens": 3,
    }
    with pytest.raises(ValueError, match=f"^{message}"):
        Chains(**(call | changes))


@pytest.mark.parametrize("method", ["draft", "extend", "commit"])
def test_requests_that_are_no_tensor_by_row(method: str) -> None:
    step = Step()
    for indices, got in (
        (None, "a tensor, got NoneType"),
        (torch.tensor(1), r"rank 1, got .*\[\]"),
    ):
        step.indices = indices
        with pytest.raises(ValueError, match=rf"^req_pool_indices: expected {got}$"):
            step.run(method)


@pytest.mark.parametrize(
    ("method", "name"), [("draft", "out_cache_loc"), ("extend", "out_cache_loc")]
)
def test_what_a_pass_must_be_given(method: str, name: str) -> None:
    step = Step()
    step.buffers[method][name] = None
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor, got NoneType$"):
        step.run(method)


def test_positions_that_are_no_tensor() -> None:
    step = Step()
    step.buffers["extend"]["positions"] = 3
    with pytest.raises(ValueError, match=r"^positions: expected a tensor, got int$"):
        step.run("extend")


class Step:
    """Two rows, and everything that the three methods take."""

    def __init__(self) -> None:
        self.pool = make_pool(0, "cpu")
        self.chains = Chains(self.pool, max_bs=2, num_steps=2, num_draft_tokens=3)
        self.indices, self.lens = i64([1, 2], "cpu"), i64([4, 5], "cpu")
        self.targets = i64([7, 8, 9, 5, 5, 5], "cpu")
        self.drafts = i64([1, 7, 8, 4, 6, 5], "cpu")
        self.end_offset = self.lens + 3
        self.buffers = {
            "draft": draft_buffers(2, 2, 80, "cpu"),
            "extend": extend_buffers(2, 3, 80, "cpu"),
            "commit": commit_buffers(2, 3, "cpu"),
        }

    def run(self, method: str) -> None:
        if method == "commit":
            inputs = self.end_offset, self.drafts, self.targets
        else:
            inputs = (self.lens,)
        getattr(self.chains, method)(self.indices, *inputs, **self.buffers[method])


OUTPUTS = [(method, name) for method, buffers in Step().buffers.items() for name in buffers]
OUTPUTS.remove(("extend", "kv_indices"))  # of any size


@pytest.mark.parametrize(("method", "name"), OUTPUTS)
def test_a_wrong_size_raises_and_writes_nothing(method: str, name: str) -> None:
    step = Step()
    buffers = step.buffers[method]
    buffers[name] = buffers[name][:-1]
    with pytest.raises((RuntimeError, ValueError), match=rf"^specmeta\.|^{name}: expected"):
        step.run(method)
    assert all((buffer == POISON).all() for buffer in buffers.values())


@pytest.mark.parametrize("method", ["draft", "extend", "commit"])
def test_more_rows_than_there_may_be(method: str) -> None:
    step = Step()
    rows = len(step.indices)
    step.chains = Chains(make_pool(0, "cpu"), max_bs=rows - 1, num_steps=2, num_draft_tokens=3)
    with pytest.raises(ValueError, match=f"expected at most max_bs = {rows - 1}, got {rows}"):
        step.run(method)
    assert all((buffer == POISON).all() for buffer in step.buffers[method].values())


def in_torch(step: Step, method: str) -> Callable[[], None]:
    """Do a method's work with torch's operators, of rows that are all real."""
    buffers = step.buffers[method]
    columns, first = torch.arange(MAX_LEN), torch.tensor([0, 3])

    def write_lists(table: Tensor, lens: Tensor, kv_indptr: Tensor, kv_indices: Tensor) -> None:
        kv_indptr[1:].copy_(lens.cumsum(0))
        slots = table[columns < lens[:, None]]  # the host waits for its size
        kv_indices[: len(slots)].copy_(slots)

    def draft() -> None:
        table = step.pool[step.indices]
        at = step.lens[:, None] + columns[:2]
        buffers["out_cache_loc"].view(2, 2).copy_(table.gather(1, at))
        buffers["positions"].copy_(step.lens)
        for k in range(2):
            write_lists(
                table, step.lens + (k + 1), buffers["kv_indptr"][k], buffers["kv_indices"][k]
            )

    def extend() -> None:
        table = step.pool[step.indices]
        at = step.lens[:, None] + columns[:3]
        buffers["out_cache_loc"].view(2, 3).copy_(table.gather(1, at))
        buffers["positions"].view(2, 3).copy_(at)
        lens = step.lens + 3
        buffers["kv_lens"].copy_(lens)
        write_lists(table, lens, buffers["kv_indptr"], buffers["kv_indices"])

    def commit() -> None:
        drafts, targets = step.drafts.view(2, 3), step.targets.view(2, 3)
        same = drafts[:, 1:] == targets[:, :-1]
        correct = same.cumprod(1).sum(1)
        accept = correct + 1
        buffers["num_correct_drafts"].copy_(correct)
        buffers["accept_lens"].copy_(accept)
        buffers["new_seq_lens"].copy_(step.lens + accept)
        last = first + correct
        buffers["select_index"].copy_(last)
        buffers["bonus_tokens"].copy_(step.targets[last])
        stands = columns[:3] <= correct[:, None]
        buffers["predict"].view(2, 3).copy_(torch.where(stands, targets, 0))

    return {"draft": draft, "extend": extend, "commit": commit}[method]


@pytest.mark.parametrize("method", ["draft", "extend", "commit"])
def test_launches(method: str) -> None:
    step = Step()
    step.buffers["extend"].pop("end_offset")  # torch's `commit` does without
    for buffer in step.buffers[method].values():
        buffer.zero_()
    in_torch_ops = operators(in_torch(step, method))
    in_torch_results = {name: buffer.clone() for name, buffer in step.buffers[method].items()}
    for buffer in step.buffers[method].values():
        buffer.fill_(POISON)
    ours = operators(lambda: step.run(method))
    check(step.buffers[method], {name: t.tolist() for name, t in in_torch_results.items()})
    operator = {"draft": "draft_lists", "extend": "advance", "commit": "accept_greedy"}[method]
    assert ours == [f"specmeta::{operator}"]
    row = rf"^\| `{method}` \|.*\| {len(in_torch_ops)} \| 1 \|$"
    assert re.search(row, DOCS.read_text(), re.MULTILINE), in_torch_ops


def test_docstrings() -> None:
    import doctest

    import specmeta

    result = doctest.testmod(sglang, extraglobs={"specmeta": specmeta, "torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
