"""Paged attention against attention over contiguous keys and values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_models
import torch
from torch.nn.functional import scaled_dot_product_attention

from specmeta import BatchMetadata
from specmeta.serving.attention import ATTENTION_NAME, KVCache, PagedPass, paged_attention

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Of each row: tokens in the cache already, and new ones. A row with neither is empty.
ROWS = [(7, 3), (0, 5), (0, 0), (12, 1), (4, 4)]
NUM_TOKENS = 5 * len(ROWS)


def make_batch(page_size: int, device: str) -> BatchMetadata:
    """Return a batch with `ROWS` staged; pages are dealt out of order, slots aren't rows."""
    most = -(-max(old + new for old, new in ROWS) // page_size)
    batch = BatchMetadata(
        max_rows=len(ROWS),
        max_slots=len(ROWS),
        max_tokens=NUM_TOKENS,
        max_pages=most + 1,
        page_size=page_size,
        max_seq_len=64,
        max_draft_len=0,
        pad_slot=0,
        device=device,
    )
    pages = list(range(len(ROWS) * most, 0, -1))
    slots = [3, 1, -1, 0, 4]
    for slot, (old, new) in zip(slots, ROWS, strict=True):
        if slot >= 0:
            batch.assign(slot, [1] * (old + new), pages[slot::5])
            batch.committed_lens[slot] = old
    batch.set_rows(slots, [5] * len(ROWS))
    batch.stage()
    return batch


def make_cache(batch: BatchMetadata, dtype: torch.dtype, device: str) -> KVCache:
    config = tiny_models.config(layers=2, num_attention_heads=4, num_key_value_heads=2)
    num_pages = 1 + int(batch.page_table.max())
    return KVCache(
        config, num_pages=num_pages, page_size=batch.page_size, dtype=dtype, device=device
    )


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_equals_contiguous_attention(page_size: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(page_size)
    batch = make_batch(page_size, device)
    cache = make_cache(batch, dtype, device)
    slots = [
        [pages[i // page_size] * page_size + i % page_size for i in range(old + new)]
        for pages, (old, new) in zip(batch.block_table.tolist(), ROWS, strict=True)
    ]
    for tensor in (*cache.keys, *cache.values):
        own = [slot for of_row in slots for slot in of_row]
        tensor.fill_(torch.nan)  # what isn't a row's own must not matter
        tensor[own] = torch.randn_like(tensor[own]) * 100
    query = torch.randn(1, 4, NUM_TOKENS, 8, dtype=dtype, device=device)
    key, value = torch.randn(2, 1, 2, NUM_TOKENS, 8, dtype=dtype, device=device)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    paged = PagedPass(
        cache,
        slot_mapping=batch.slot_mapping,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_query_len=5,
    )
    output, weights = paged_attention(
        SimpleNamespace(layer_idx=1), query, key, value, None, 0.5, paged=paged
    )
    assert weights is None
    assert output.shape == (1, NUM_TOKENS, 4, 8)
    assert output.dtype == dtype
    assert output.isfinite().all()

    cu = batch.cu_seqlens_q.tolist()
    written = set()
    for row, (old, new) in enumerate(ROWS):
        assert cu[row + 1] - cu[row] == new
        new_slots = slots[row][old:]
        written |= set(new_slots)
        tokens = slice(cu[row], cu[row + 1])
        assert torch.equal(cache.keys[1][new_slots], key[0, :, tokens].transpose(0, 1))
        assert torch.equal(cache.values[1][new_slots], value[0, :, tokens].transpose(0, 1))
        for j in range(new):
            seen = slots[row][: old + j + 1]
            expected = scaled_dot_product_attention(
                query[:, :, cu[row] + j, None],
                cache.keys[1][seen].transpose(0, 1)[None].repeat_interleave(2, dim=1),
                cache.values[1][seen].transpose(0, 1)[None].repeat_interleave(2, dim=1),
                scale=0.5,
            )[:, :, 0]
            torch.testing.assert_close(
                output[:, cu[row] + j],
                expected,
                rtol=TOLERANCES[dtype],
                atol=TOLERANCES[dtype] * 100,  # the values' size
            )
    # Nothing else is written: neither another layer nor another slot, page 0 apart.
    kept = [s for s in range(page_size, len(cache.keys[0])) if s not in written]
    for index, tensor in enumerate((*cache.keys, *cache.values)):
        rows = kept if index % 2 else slice(None)
        torch.testing.assert_close(
            tensor[rows], before[index][rows], rtol=0, atol=0, equal_nan=True
        )


def test_one_token_a_row_needs_no_offsets(device: str) -> None:
    torch.manual_seed(0)
    batch = make_batch(4, device)
    rows = len(ROWS)
    args = {
        "slot_mapping": torch.tensor([8, 4, 0, 17, 24], device=device),
        "block_table": batch.block_table,
        "seq_lens": torch.tensor([9, 2, 0, 13, 1], device=device),
    }
    query = torch.randn(1, 4, rows, 8, device=device)
    key, value = torch.randn(2, 1, 2, rows, 8, device=device)
    outputs = []
    for offsets in (None, torch.arange(rows + 1, dtype=torch.int32, device=device)):
        torch.manual_seed(1)
        cache = make_cache(batch, torch.float32, device)
        for tensor in (cache.keys[0], cache.values[0]):
            tensor.copy_(torch.randn(tensor.shape))
        paged = PagedPass(cache, cu_seqlens_q=offsets, **args)
        assert paged.mask.any(-1).all()  # a query that sees nothing makes NaN on some devices
        layer = SimpleNamespace(layer_idx=0)
        outputs.append(paged_attention(layer, query, key, value, None, paged=paged)[0])
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


def test_a_model_gives_the_logits_of_its_own_attention(device: str) -> None:
    model = tiny_models.target().to(device)
    ids = torch.randint(0, 20, (2, 11), generator=torch.manual_seed(0)).to(device)
    with torch.no_grad():
        expected = model(ids).logits
    batch = BatchMetadata(
        max_rows=2,
        max_slots=2,
        max_tokens=24,
        max_pages=3,
        page_size=4,
        max_seq_len=12,
        max_draft_len=0,
        pad_slot=0,
        device=device,
    )
    for slot in range(2):
        batch.assign(slot, ids[slot].tolist(), [3 * slot + 1, 3 * slot + 2, 3 * slot + 3])
    batch.set_rows([0, 1], [11, 11])
    batch.stage()
    cache = KVCache(model.config, num_pages=7, page_size=4, dtype=torch.float32, device=device)
    model.set_attn_implementation(ATTENTION_NAME)
    paged = PagedPass(
        cache,
        slot_mapping=batch.slot_mapping,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_query_len=11,
    )
    inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False, paged=paged).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[0, :22].view(2, 11, -1), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="paged"):
        model(**inputs, use_cache=False)
