"""The faults that specmeta is there to prevent, to show that the checks see them.

Each function takes the place of a method of ``BatchMetadata``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specmeta import BatchMetadata

_accept_greedy = BatchMetadata.accept_greedy
_stage = BatchMetadata.stage


def without_commit(batch: BatchMetadata, target_tokens: torch.Tensor) -> None:
    """Hand out the accepted tokens, but leave lengths and positions as if no draft had stood.

    So it is where the next step is launched before the count is known, and nothing corrects it.
    """
    _accept_greedy(batch, target_tokens)
    slots, accepted = batch.row_to_slot.long().clamp(min=0), batch.num_accepted
    for by_row in (batch.seq_lens, batch.draft_position_ids):
        by_row -= accepted
    for by_slot in (batch.committed_lens, batch.known_lens):
        by_slot.index_add_(0, slots, -accepted)
    emitted = batch.accepted_tokens[:, 0] >= 0  # not in the middle of a prompt
    # Rows that emit nothing write the ledger's last place, which is nobody's, to itself.
    last = torch.where(emitted, batch.known_lens[slots].long() - 1, batch.tokens.shape[1] - 1)
    old = batch.tokens[slots, last]
    batch.tokens[slots, last] = torch.where(emitted, batch.next_tokens, old)


def without_rewind(batch: BatchMetadata, target_tokens: torch.Tensor) -> None:
    """Commit, but let the draft passes go on behind the rejected tokens."""
    _accept_greedy(batch, target_tokens)
    batch.num_rejected.zero_()


def all_pages_are_used(batch: BatchMetadata, num_tokens: int | None = None) -> None:
    """List the pages that are reserved ahead, not only those that hold tokens."""
    _stage(batch, num_tokens)
    slots, live = batch.row_to_slot.long().clamp(min=0), batch.seq_lens > 0
    batch.pages_per_seq.copy_(torch.where(live, batch.num_pages[slots], 0))
    pages = batch.page_table[slots].clamp(min=0)
    batch.block_table.copy_(torch.where(live[:, None], pages, 0))


def pages_are_read_once() -> Callable[..., None]:
    """Return a `stage` that lists a slot's pages in its first step only."""
    lists: dict[int, torch.Tensor] = {}

    def stage(batch: BatchMetadata, num_tokens: int | None = None) -> None:
        _stage(batch, num_tokens)
        table = batch.page_table
        first_lists = lists.setdefault(table.data_ptr(), torch.zeros_like(table))
        for row, slot in enumerate(batch.row_to_slot.tolist()):
            if slot >= 0 and batch.seq_lens[row] > 0:
                if batch.cached_lens[row] == 0:
                    first_lists[slot] = batch.block_table[row]
                batch.block_table[row] = first_lists[slot]

    return stage
