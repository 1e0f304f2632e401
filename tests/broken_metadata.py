"""The faults that specmeta is there to prevent, to show that the checks see them.

Each function takes the place of ``BatchMetadata.accept_greedy``. Rows must be slots.
"""

from __future__ import annotations

import torch

from specmeta import BatchMetadata

_accept_greedy = BatchMetadata.accept_greedy


def without_commit(batch: BatchMetadata, target_tokens: torch.Tensor) -> None:
    """Hand out the accepted tokens, but leave lengths and positions as if no draft had stood."""
    _accept_greedy(batch, target_tokens)
    accepted = batch.num_accepted
    for lens in (batch.committed_lens, batch.known_lens, batch.seq_lens, batch.draft_position_ids):
        lens -= accepted
    last = (batch.known_lens[:, None] - 1).clamp(min=0).long()
    emitted = batch.accepted_tokens[:, :1] >= 0  # not in the middle of a prompt
    old = batch.tokens.gather(1, last)
    batch.tokens.scatter_(1, last, torch.where(emitted, batch.next_tokens[:, None], old))


def without_rewind(batch: BatchMetadata, target_tokens: torch.Tensor) -> None:
    """Commit, but let the draft passes go on behind the rejected tokens."""
    _accept_greedy(batch, target_tokens)
    batch.num_rejected.zero_()
