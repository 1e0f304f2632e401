"""One step of two-model speculative decoding: the drafter has its own pages and its own graph.

The drafter is an EAGLE-3 head run as an engine of its own, or a separate Llama. The target's graph
ends with the acceptance, the drafter's begins with its own `stage`. They meet only in device
buffers: counts, tokens and Eagle's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specmeta.batch import BatchMetadata
from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.step import Drafter, Shape, Step, verify_pass

__all__ = ["TwoModelStep"]


class TwoModelStep(Step):
    """Steps of a target and of a drafter that has pages of its own.

    The drafter's graph runs in every step, behind the target's and on the same stream, also for
    rows whose drafts nobody wants: a cache that missed an acceptance would hold rejected tokens
    (the contract, *A draft model that skips steps*).

    Parameters
    ----------
    target : LlamaForCausalLM
        The model, with ``"specmeta_paged"`` attention.
    draft : Eagle3Head or LlamaForCausalLM
        The drafter, likewise: the target's head, or a model with the same vocabulary.
    draft_page_size : int
        Tokens a page of the drafter's cache.
    draft_num_pages : int
        Pages of the drafter's cache, the reserved page 0 included.
    **settings
        As in `Step`.
    """

    draft_batch: BatchMetadata

    def __init__(
        self,
        target: LlamaForCausalLM,
        draft: Eagle3Head | LlamaForCausalLM,
        *,
        draft_page_size: int,
        draft_num_pages: int,
        **settings: Any,
    ) -> None:
        super().__init__(target, **settings)
        self._is_eagle = not isinstance(draft, LlamaForCausalLM)
        self._aux_ids: tuple[int, ...] = ()
        batch = self.batch
        max_tokens = batch.max_tokens
        if isinstance(draft, LlamaForCausalLM):
            sizes = target.config.vocab_size, draft.config.vocab_size
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"draft: expected the target's vocabulary of {sizes[0]}, got {sizes[1]}"
                )
            # At the end of a prompt it reads one token more than the target: the one that came out.
            max_tokens += batch.max_rows
        else:
            self._aux_ids = tuple(
                draft.config.resolve_aux_layer_ids(target.config.num_hidden_layers)
            )
        self.draft_batch = BatchMetadata(
            max_rows=batch.max_rows,
            max_slots=batch.max_slots,
            max_tokens=max_tokens,
            max_pages=-(-batch.max_seq_len // draft_page_size),
            page_size=draft_page_size,
            max_seq_len=batch.max_seq_len,
            max_draft_len=self.num_drafts,
            with_kv_indices=False,
            device=batch.device,
            pad_slot=0,
            ledger=batch,
            eagle=self._is_eagle,
        )
        self.drafter = Drafter(
            draft, num_pages=draft_num_pages, page_size=draft_page_size, device=batch.device
        )
        # The hidden states on their way from one graph to the other, in the target's layout.
        width = len(self._aux_ids) * target.config.hidden_size
        self._aux = torch.zeros(batch.max_tokens, width, dtype=target.dtype, device=batch.device)

    def _parts(self, shape: Shape, sampling: bool) -> list[Callable[[], None]]:
        parts: list[Callable[[], None]] = [partial(self.run_target, shape, sampling=sampling)]
        if self.num_drafts > 0:
            parts.append(partial(self.run_draft, shape))
        return parts

    def run_target(self, shape: Shape, *, sampling: bool = False) -> None:
        """Run the target's part of a step as it stands."""
        aux = self._verify(shape, sampling=sampling, aux_ids=self._aux_ids)
        if self._is_eagle:
            self._aux[: shape.num_tokens] = aux

    def run_draft(self, shape: Shape) -> None:
        """Run the drafter's part of a step as it stands, behind the target's of this shape."""
        batch = self.draft_batch.first_rows(shape.rows)
        if not self._is_eagle:
            lens = self.batch.first_rows(shape.rows).query_lens
            torch.add(lens, 1, out=batch.query_lens)
            shape = Shape(shape.rows, shape.num_tokens + shape.rows, shape.query_len + 1)
        num_tokens = shape.num_tokens
        batch.stage(num_tokens=num_tokens)
        hidden = self.drafter.forward(
            batch.input_ids[:num_tokens],
            self._gather(shape) if self._is_eagle else None,
            batch.position_ids[:num_tokens],
            verify_pass(batch, self.drafter.cache, shape),
        )
        last = (batch.cu_seqlens_q[1:] - 1).clamp(min=0)
        hidden = hidden.index_select(0, last)
        self.drafter.draft(batch, hidden, self.num_drafts, self.group)

    def _gather(self, shape: Shape) -> Tensor:
        """Return Eagle's hidden states in the layout of its own tokens, [T, hidden]."""
        target = self.batch.first_rows(shape.rows)
        batch = self.draft_batch.first_rows(shape.rows)
        token = torch.arange(shape.num_tokens, device=batch.device)
        row = torch.searchsorted(batch.cu_seqlens_q[1:].long(), token, right=True)
        row = row.clamp(max=shape.rows - 1)
        # Both rows begin at the same token, where no step was left out; the target's is the longer.
        index = batch.position_ids[: shape.num_tokens] - target.cached_lens[row]
        index = (target.cu_seqlens_q[row] + index).clamp(0, shape.num_tokens - 1)
        return self.drafter.combine_aux(self._aux[: shape.num_tokens].index_select(0, index))
