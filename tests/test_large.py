"""The largest batches that one block has to walk: many tiles, and skew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import OPERATIONS
from torch import Tensor

import specmeta
from specmeta import reference, testing

ROWS = 8_192


def _call(operation: str, page_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(page_size)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32, generator=generator)

    pages, width, ledger, drafts = 6, 5, 6 * page_size + 8, 4
    lens = random(0, 4 * page_size + 1, ROWS)
    lens[::7] = 0
    query = torch.minimum(random(0, drafts + 2, ROWS), lens)
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), query.cumsum(0, dtype=torch.int32)])
    tokens = int(cu[-1]) + 17  # with padding behind
    paged = {
        "page_size": page_size,
        "row_to_slot": torch.randperm(ROWS, generator=generator),
        "num_rows": ROWS - 100,
        "page_table": random(1, 10**6, ROWS, pages),
        "num_pages": random(0, pages + 1, ROWS),
        "cached_lens": torch.zeros(ROWS, dtype=torch.int32),
        "use_initial_states": torch.zeros(ROWS, dtype=torch.bool),
        "last_page_len": torch.zeros(ROWS, dtype=torch.int32),
        "kv_indptr": torch.zeros(ROWS + 1, dtype=torch.int32),
        "kv_indices": torch.zeros(2 * ROWS, dtype=torch.int32),  # too small for some
        "block_table": torch.zeros(ROWS, width, dtype=torch.int32),
        "slot_mapping": torch.zeros(tokens + 100, dtype=torch.int64),
        "status": torch.zeros(ROWS + 1, dtype=torch.int32),
    }
    positions = random(0, 100, tokens).long()
    ids = random(-1, 3, tokens)
    if operation == "advance":
        return paged | {
            "num_accepted": random(-3, 9, ROWS),
            "seq_lens": lens,
            "cu_seqlens_q": cu,
            "position_ids": positions,
        }
    if operation == "stage":
        return paged | {
            "committed_lens": lens,
            "known_lens": lens + random(0, 6, ROWS),
            "num_drafts": random(0, 5, ROWS),
            "query_lens": random(0, 6, ROWS),
            "tokens": random(0, 1000, ROWS, ledger),
            "cu_seqlens_q": torch.zeros(ROWS + 1, dtype=torch.int32),
            "seq_lens": torch.zeros(ROWS, dtype=torch.int32),
            "position_ids": positions,
            "input_ids": ids,
            "num_draft_tokens": torch.zeros(ROWS, dtype=torch.int32),
        }
    if operation == "draft_step":
        return paged | {
            "seq_lens": lens,
            "position_ids": positions,
            "num_rejected": random(0, 3, ROWS),
            "draft_tokens": random(0, 1000, ROWS),
            "known_lens": lens,
            "num_drafts": random(0, 2, ROWS),
            "written_lens": random(0, 2, ROWS),
            "tokens": random(0, 1000, ROWS, ledger),
            "input_ids": torch.zeros(tokens, dtype=torch.int64),
        }
    rows = {name: paged[name] for name in ("row_to_slot", "num_rows", "status")}
    sampled = random(-1, 9, ROWS, drafts + 1)
    if operation == "count_sampled":
        return rows | {
            "sampled_tokens": sampled,
            "vocab_size": 8,
            "discarded": random(0, 4, ROWS) == 0,
            "backup_tokens": random(-1, 9, ROWS),
            "num_sampled": torch.zeros(ROWS, dtype=torch.int32),
            "next_tokens": torch.zeros(ROWS, dtype=torch.int64),
        }
    if operation == "locate_sampled":
        return rows | {
            "num_sampled": random(0, drafts + 2, ROWS),
            "cu_num_draft_tokens": (query - 1).clamp(min=0).cumsum(0, dtype=torch.int32),
            "cu_seqlens_q": cu,
            "num_rejected": torch.zeros(ROWS, dtype=torch.int32),
            "token_indices": torch.zeros(ROWS, dtype=torch.int32),
        }
    if operation == "keep_last":
        few = torch.where(torch.arange(ROWS) % 2_000 < 1_500, query.clamp(max=1), query)
        return {
            "cu_seqlens_q": torch.cat([cu[:1], few.cumsum(0, dtype=torch.int32)]),
            "seq_lens": lens,
            "num_rows": ROWS - 100,
            "input_ids": ids,
            "position_ids": positions,
            "cached_lens": paged["cached_lens"],
            "status": torch.zeros(ROWS, dtype=torch.int32),
        }
    if operation == "map_slots":
        names = ("page_size", "page_table", "num_pages", "slot_mapping")
        return (
            rows
            | {name: paged[name] for name in names}
            | {"position_ids": random(-1, 6 * page_size + 2, tokens), "cu_seqlens_q": cu}
        )
    if operation == "draft_lists":
        names = ("page_size", "page_table", "num_pages")
        return (
            rows
            | {name: paged[name] for name in names}
            | {
                "seq_lens": lens,
                "num_steps": 3,
                "position_ids": torch.zeros(ROWS, dtype=torch.int64),
                "last_page_len": torch.zeros(3, ROWS, dtype=torch.int32),
                "kv_indptr": torch.zeros(3, ROWS + 1, dtype=torch.int32),
                "kv_indices": torch.zeros(3, 2 * ROWS, dtype=torch.int32),  # too small for some
                "slot_mapping": torch.zeros(3 * ROWS, dtype=torch.int64),
            }
        )
    call = {
        "input_ids": ids,
        "cu_seqlens_q": cu,
        "row_to_slot": paged["row_to_slot"],
        "position_ids": positions,
        "seq_lens": lens,
        "committed_lens": lens - query,
        "known_lens": (lens - query + random(0, 7, ROWS)).int(),
        "tokens": random(0, 1000, ROWS, ledger),
        "num_drafts": random(0, 5, ROWS),
        "num_accepted": torch.zeros(ROWS, dtype=torch.int32),
        "num_rejected": torch.zeros(ROWS, dtype=torch.int32),
        "num_sampled": torch.zeros(ROWS, dtype=torch.int32),
        "seq_lens_out": torch.zeros(ROWS, dtype=torch.int32),
        "next_tokens": torch.zeros(ROWS, dtype=torch.int64),
        "token_indices": torch.zeros(ROWS, dtype=torch.int32),
        "accepted_tokens": torch.zeros(ROWS, drafts + 1, dtype=torch.int64),
        "draft_input_ids": torch.zeros(tokens, dtype=torch.int64),
        "last_position_ids": torch.zeros(ROWS, dtype=torch.int64),
        "status": paged["status"],
    }
    if operation == "accept_greedy":
        return call | {"target_tokens": random(-1, 3, tokens)}
    return call | {"sampled_tokens": sampled, "vocab_size": 8}


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_rows(operation: str, page_size: int, device: str) -> None:
    call = _call(operation, page_size)
    want = {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.items()}
    getattr(reference, operation)(**want)
    got = {k: v.to(device, copy=True) if isinstance(v, Tensor) else v for k, v in call.items()}
    getattr(specmeta, operation)(**got)
    for name, tensor in got.items():
        if isinstance(tensor, Tensor):
            testing.assert_equal(name, tensor.cpu(), want[name])


@pytest.mark.parametrize("page_size", [1, 64])
def test_one_row_of_a_million_tokens(page_size: int, device: str) -> None:
    length, pages = 1_000_000, 1_000_000 // page_size + 1
    table = torch.randperm(4 * pages, dtype=torch.int32)[: 2 * pages].view(2, pages) + 1
    seq_lens = torch.tensor([length - 2, 3], dtype=torch.int32, device=device)
    indptr = torch.zeros(3, dtype=torch.int32, device=device)
    indices = torch.zeros(2 * pages, dtype=torch.int32, device=device)
    specmeta.advance(
        torch.tensor([2, 1], dtype=torch.int32, device=device), seq_lens, page_size=page_size,
        page_table=table.to(device), kv_indptr=indptr, kv_indices=indices,
    )  # fmt: skip
    first, second = -(-length // page_size), -(-4 // page_size)
    assert indptr.tolist() == [0, first, first + second]
    want = torch.cat([table[0, :first], table[1, :second]])
    assert torch.equal(indices[: first + second].cpu(), want)
    assert not indices[first + second :].any()
