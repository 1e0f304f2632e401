"""Attention of one row in plain torch, for tests that compare with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from the last tokens of a row [q, H, D] to all of it [n, KV_H, D], causally.

    Where there are more queries than keys, the first of them see nothing and get 0, as in
    FlashInfer.
    """
    q, n = len(query), len(keys)
    group = query.shape[1] // keys.shape[1]
    output = torch.zeros_like(query)
    for j in range(max(q - n, 0), q):
        seen = n - q + j + 1
        output[j] = scaled_dot_product_attention(
            query[j, :, None],
            keys[:seen].transpose(0, 1).repeat_interleave(group, 0),
            values[:seen].transpose(0, 1).repeat_interleave(group, 0),
        )[:, 0]
    return output
