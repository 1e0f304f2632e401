"""One call of every operation with all arguments that may stand together, to test calls with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import specmeta

B, S, T, P, K, LEDGER = 3, 4, 8, 5, 2, 24


def _i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _layout(tokens: int) -> dict[str, Tensor]:
    return {
        "cached_lens": torch.zeros(B, dtype=torch.int32),
        "use_initial_states": torch.zeros(B, dtype=torch.bool),
        "padded_seq_lens": torch.zeros(B, dtype=torch.int32),
        "pages_per_seq": torch.zeros(B, dtype=torch.int32),
        "last_page_len": torch.zeros(B, dtype=torch.int32),
        "kv_indptr": torch.zeros(B + 1, dtype=torch.int32),
        "kv_indices": torch.zeros(B * P, dtype=torch.int32),
        "block_table": torch.zeros(B, P, dtype=torch.int32),
        "slot_mapping": torch.zeros(tokens + 2, dtype=torch.int64),
        "status": torch.zeros(S + 1, dtype=torch.int32),
    }


def _rows() -> dict[str, Tensor]:
    return {
        "row_to_slot": torch.tensor([2, -1, 0]),
        "num_rows": _i32(B),
        "workspace": specmeta.workspace(B),
    }


def _pages() -> dict[str, Any]:
    return {
        "page_size": 4,
        "max_seq_len": 20,
        "page_table": torch.arange(1, S * P + 1, dtype=torch.int32).view(S, P),
        "num_pages": _i32(*[P] * S),
        "pad_slot": -1,
    }


def _padding() -> dict[str, int]:
    return {"pad_page": 0, "pad_seq_len": 0}


def _ledger() -> Tensor:
    return torch.arange(S * LEDGER).view(S, LEDGER)


def _acceptance() -> dict[str, Any]:
    return {
        "input_ids": torch.tensor([4, 5, 6, 7, 8, 9, 0, 0]),
        "cu_seqlens_q": _i32(0, 3, 3, 6),
        "num_draft_tokens": _i32(2, 0, 2),
        "position_ids": torch.tensor([4, 5, 6, 7, 8, 9, 0, 0]),
        "seq_lens": _i32(7, 0, 10),
        "pad_token": 0,
        "committed_lens": _i32(7, 0, 4, 0),
        "known_lens": _i32(8, 0, 5, 0),
        "tokens": _ledger(),
        "num_drafts": _i32(2, 0, 2, 0),
        "num_accepted": torch.zeros(B, dtype=torch.int32),
        "num_rejected": torch.zeros(B, dtype=torch.int32),
        "num_sampled": torch.zeros(B, dtype=torch.int32),
        "seq_lens_out": torch.zeros(B, dtype=torch.int32),
        "next_tokens": torch.zeros(B, dtype=torch.int64),
        "token_indices": torch.zeros(B, dtype=torch.int32),
        "accepted_tokens": torch.zeros(B, K + 1, dtype=torch.int64),
        "draft_input_ids": torch.zeros(T, dtype=torch.int64),
        "last_position_ids": torch.zeros(B, dtype=torch.int64),
        "status": torch.zeros(S + 1, dtype=torch.int32),
        **_rows(),
    }


def calls() -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of each operation; every tensor is new."""
    return {
        "advance": {
            "num_accepted": _i32(1, 0, 2, 0),
            "seq_lens": _i32(7, 0, 10),
            "max_accepted": 2,
            "seq_len_bias": 0,
            "position_bias": 0,
            "count_index": _i32(2, -1, 0),
            "cu_seqlens_q": _i32(0, 3, 3, 6),
            "position_ids": torch.tensor([4, 5, 6, 7, 8, 9, 0, 0]),
            **_rows(),
            **_pages(),
            **_padding(),
            **_layout(T),
        },
        "stage": {
            "committed_lens": _i32(7, 0, 4, 0),
            "limit_lens": _i32(7, 0, 4, 0),
            "known_lens": _i32(8, 0, 5, 0),
            "num_drafts": _i32(2, 0, 2, 0),
            "query_lens": _i32(3, 3, 3),
            "tokens": _ledger(),
            "pad_token": 0,
            "cu_seqlens_q": torch.zeros(B + 1, dtype=torch.int32),
            "seq_lens": torch.zeros(B, dtype=torch.int32),
            "position_ids": torch.zeros(T, dtype=torch.int64),
            "input_ids": torch.zeros(T, dtype=torch.int64),
            "num_draft_tokens": torch.zeros(B, dtype=torch.int32),
            **_rows(),
            **_pages(),
            **_padding(),
            **_layout(T),
        },
        "accept_greedy": {
            "target_tokens": torch.tensor([5, 6, 1, 8, 2, 3, 0, 0]),
            **_acceptance(),
        },
        "accept_sampled": {
            "sampled_tokens": torch.tensor([[5, 6, 1], [-1, -1, -1], [8, 2, -1]]),
            "vocab_size": 1000,
            **_acceptance(),
        },
        "count_sampled": {
            "sampled_tokens": torch.tensor([[5, 6, 1], [-1, -1, -1], [8, 2, -1]]),
            "vocab_size": 1000,
            "discarded": torch.tensor([False, False, True]),
            "backup_tokens": torch.tensor([3, 3, 3]),
            "pad_token": 0,
            "num_sampled": torch.zeros(B, dtype=torch.int32),
            "next_tokens": torch.zeros(B, dtype=torch.int64),
            "status": torch.zeros(S + 1, dtype=torch.int32),
            **_rows(),
        },
        "locate_sampled": {
            "num_sampled": _i32(2, 0, 3),
            "cu_num_draft_tokens": _i32(2, 2, 4),
            "cu_seqlens_q": _i32(0, 3, 3, 6),
            "num_rejected": torch.zeros(B, dtype=torch.int32),
            "token_indices": torch.zeros(B, dtype=torch.int32),
            "status": torch.zeros(S + 1, dtype=torch.int32),
            **_rows(),
        },
        "keep_last": {
            "cu_seqlens_q": _i32(0, 3, 3, 6),
            "seq_lens": _i32(7, 4, 10),
            "num_rows": _i32(B),
            "pad_token": 0,
            "input_ids": torch.tensor([4, 5, 6, 7, 8, 9, 0, 0]),
            "position_ids": torch.tensor([4, 5, 6, 7, 8, 9, 0, 0]),
            "query_lens": torch.zeros(B, dtype=torch.int32),
            "cached_lens": torch.zeros(B, dtype=torch.int32),
            "use_initial_states": torch.zeros(B, dtype=torch.bool),
            "status": torch.zeros(B, dtype=torch.int32),
        },
        "map_slots": {
            "position_ids": torch.tensor([4, 5, 6, 7, 8, 9, 0, 0]),
            "slot_mapping": torch.zeros(T + 2, dtype=torch.int64),
            "cu_seqlens_q": _i32(0, 3, 3, 6),
            "status": torch.zeros(S + 1, dtype=torch.int32),
            **_rows(),
            **_pages(),
        },
        "draft_lists": {
            "seq_lens": _i32(7, 0, 10),
            "num_steps": K,
            "position_ids": torch.zeros(B, dtype=torch.int64),
            "last_page_len": torch.zeros(K, B, dtype=torch.int32),
            "kv_indptr": torch.zeros(K, B + 1, dtype=torch.int32),
            "kv_indices": torch.zeros(K, B * P, dtype=torch.int32),
            "slot_mapping": torch.zeros(B * K, dtype=torch.int64),
            "status": torch.zeros(S + 1, dtype=torch.int32),
            **_rows(),
            **_pages(),
            **_padding(),
            "workspace": specmeta.workspace(B, num_steps=K),
        },
        "draft_step": {
            "seq_lens": _i32(7, 0, 10),
            "position_ids": torch.tensor([6, 0, 9]),
            "num_rejected": _i32(1, 0, 0),
            "max_rejected": 2,
            "draft_tokens": torch.tensor([70, 71, 72]),
            "draft_index": 0,
            "shift": 1,
            "last": False,
            "known_lens": _i32(11, 0, 7, 0),
            "num_drafts": _i32(0, 0, 0, 0),
            "written_lens": _i32(0, 0, 0, 0),
            "tokens": _ledger(),
            "input_ids": torch.zeros(B, dtype=torch.int64),
            "pad_token": 0,
            **_rows(),
            **_pages(),
            **_padding(),
            **_layout(B),
        },
    }
