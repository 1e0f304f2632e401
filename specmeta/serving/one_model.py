"""One step of one-model speculative decoding: target, acceptance and the drafts of an EAGLE-3 head.

The step launches ``K + 2`` of specmeta's operations (K drafts; the contract, *An iteration with K
drafts*), has static shapes and reads nothing back to the host, so that it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specmeta.batch import BatchMetadata
from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.attention import KVCache, PagedPass

__all__ = ["OneModelStep"]


class OneModelStep:
    """The captured part of an engine: its buffers, and the step that works on them.

    Prompts and drafts go through the same step; only its static number of tokens differs.

    Parameters
    ----------
    target : LlamaForCausalLM
        The model, with ``"specmeta_paged"`` attention.
    head : Eagle3Head, optional
        Its draft head, likewise. Not needed, and not looked at, without drafts.
    rows : int
        Batch size, which is the number of slots too.
    num_drafts : int
        Drafts a row and step, K; 0 = plain greedy decoding.
    max_query_len : int
        Tokens a row that the largest step has; at least ``num_drafts + 1``.
    page_size : int
        Tokens a page.
    num_pages : int
        Pages of the cache, the reserved page 0 included.
    max_pages : int
        Most pages a row.

    Attributes
    ----------
    batch : BatchMetadata
        The buffers that specmeta's operations read and write.
    outcome : Tensor
        int64 [rows, K + 2]: what the host wants to know of a step, by row: the number of drafts
        verified, then the tokens that came out, then -1.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        head: Eagle3Head | None,
        *,
        rows: int,
        num_drafts: int,
        max_query_len: int,
        page_size: int,
        num_pages: int,
        max_pages: int,
    ) -> None:
        if num_drafts > 0 and head is None:
            raise ValueError(f"num_drafts: expected 0 without a head, got {num_drafts}")
        if max_query_len <= num_drafts:
            raise ValueError(
                f"max_query_len: expected at least {num_drafts + 1}, got {max_query_len}"
            )
        self.target = target
        self.head = head
        self.rows = rows
        self.num_drafts = num_drafts
        self.batch = BatchMetadata(
            max_rows=rows,
            max_slots=rows,
            max_tokens=rows * max_query_len,
            max_pages=max_pages,
            page_size=page_size,
            max_seq_len=min(target.config.max_position_embeddings, max_pages * page_size),
            max_draft_len=num_drafts,
            device=target.device,
            # Padding tokens write their keys and values into page 0: no write has to be masked.
            pad_slot=0,
        )
        self.outcome = torch.full(
            (rows, num_drafts + 2), -1, dtype=torch.int64, device=target.device
        )

        def cache(config: LlamaConfig, dtype: torch.dtype) -> KVCache:
            return KVCache(
                config, num_pages=num_pages, page_size=page_size, dtype=dtype, device=target.device
            )

        self.target_cache = cache(target.config, target.dtype)
        # Head and target share the page table: a token has one slot, in both caches.
        if num_drafts > 0:
            assert head is not None
            self.head_cache = cache(head.config.layer, head.fc.weight.dtype)

    def run(self, query_len: int) -> None:
        """Run the step on the first ``rows * query_len`` places of the buffers.

        Parameters
        ----------
        query_len : int
            No row has more tokens in this step (``query_lens`` of the batch sees to that):
            the prompt chunk, or ``num_drafts + 1``.
        """
        batch, num_tokens = self.batch, self.rows * query_len
        batch.stage(num_tokens=num_tokens)
        position_ids = batch.position_ids[None, :num_tokens]
        aux_ids = self._aux_layer_ids()
        # Given a list, transformers keeps the hidden states of these indices alone, each at its
        # own place of `hidden_states`; the other places hold None.
        output = self.target.model(
            input_ids=batch.input_ids[None, :num_tokens],
            position_ids=position_ids,
            use_cache=False,
            output_hidden_states=aux_ids,
            paged=self._verify_pass(self.target_cache, query_len),
        )
        logits = self.target.lm_head(output.last_hidden_state[0])
        batch.accept_greedy(logits.argmax(-1))
        self.outcome[:, 0] = batch.num_draft_tokens
        self.outcome[:, 1:] = batch.accepted_tokens
        if self.num_drafts > 0:
            aux = torch.cat([output.hidden_states[index] for index in aux_ids], dim=-1)
            self._draft(aux, position_ids, query_len)

    def _draft(self, aux: Tensor, position_ids: Tensor, query_len: int) -> None:
        """Run the head over the verified tokens, then K - 1 times over one token a row."""
        batch, head = self.batch, self.head
        assert head is not None
        num_tokens = self.rows * query_len
        hidden = head(
            head.embed_tokens(batch.draft_input_ids[None, :num_tokens]),
            head.combine_aux(aux),
            position_ids,
            paged=self._verify_pass(self.head_cache, query_len),
        )
        hidden = hidden.index_select(1, batch.token_indices)
        for index in range(self.num_drafts):
            draft_ids = head.to_target_ids(head.logits(hidden[0]).argmax(-1))
            last = index == self.num_drafts - 1
            batch.draft_step(draft_ids, index=index, last=last)
            if not last:
                hidden = head(
                    head.embed_tokens(batch.draft_ids[None]),
                    hidden,
                    batch.draft_position_ids[None],
                    paged=PagedPass(
                        self.head_cache,
                        slot_mapping=batch.draft_slot_mapping,
                        block_table=batch.block_table,
                        seq_lens=batch.seq_lens,
                    ),
                )

    def _verify_pass(self, cache: KVCache, query_len: int) -> PagedPass:
        """Return a pass over the tokens that `stage` staged."""
        batch = self.batch
        return PagedPass(
            cache,
            slot_mapping=batch.slot_mapping[: self.rows * query_len],
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_query_len=query_len,
        )

    def _aux_layer_ids(self) -> list[int]:
        if self.num_drafts == 0:
            return []
        assert self.head is not None
        return list(self.head.config.resolve_aux_layer_ids(self.target.config.num_hidden_layers))
