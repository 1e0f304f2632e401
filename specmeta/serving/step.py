"""What the steps of both kinds of speculative decoding share: the target's part, and the drafts.

A step has static shapes and reads nothing back to the host, so that it can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from specmeta.batch import BatchMetadata
from specmeta.graph import capture
from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.attention import KVCache, PagedPass
from specmeta.serving.parallel import from_rank_0, group_of
from specmeta.serving.sampling import SamplingState, sample_places, verified_places

__all__ = ["Drafter", "Shape", "Step", "verify_pass"]


@dataclass(frozen=True)
class Shape:
    """The static sizes of a launch.

    Attributes
    ----------
    rows : int
        B: the first rows of the batch. Those behind the live ones are empty.
    num_tokens : int
        T, query tokens of all rows together.
    query_len : int
        No row has more tokens (``query_lens`` of the batch sees to that).
    """

    rows: int
    num_tokens: int
    query_len: int


def verify_pass(batch: BatchMetadata, cache: KVCache, shape: Shape) -> PagedPass:
    """Return a pass over the tokens that `batch` has staged, through its own pages."""
    return PagedPass(
        cache,
        slot_mapping=batch.slot_mapping[: shape.num_tokens],
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_query_len=shape.query_len,
    )


def _by_row(batch: BatchMetadata, by_slot: Tensor) -> Tensor:
    """Return the value of each row's slot; 0 for a row without one [B]."""
    slots = batch.row_to_slot.long()
    is_valid = (slots >= 0) & (slots < batch.max_slots)
    return by_slot[slots.where(is_valid, 0)].where(is_valid, 0)


def _status(batch: BatchMetadata) -> Tensor:
    """Return the status of each row's slot, int32 [B]."""
    slots = batch.row_to_slot
    is_bad = (slots < -1) | (slots >= batch.max_slots)
    # Rows of a slot that doesn't exist are reported behind the last one.
    return torch.where(is_bad, batch.status[-1], _by_row(batch, batch.status))


class Drafter:
    """A draft model, and its cache.

    Parameters
    ----------
    model : Eagle3Head or LlamaForCausalLM
        With ``"specmeta_paged"`` attention.
    num_pages, page_size : int
        Of the cache, the reserved page 0 included.
    device : torch.device

    Attributes
    ----------
    cache : KVCache
    """

    def __init__(
        self,
        model: Eagle3Head | LlamaForCausalLM,
        *,
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.model = model
        if isinstance(model, LlamaForCausalLM):
            config, dtype = model.config, model.dtype
        else:
            config, dtype = model.config.layer, model.fc.weight.dtype
        self.cache = KVCache(
            config, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device
        )

    def forward(
        self, ids: Tensor, hidden: Tensor | None, position_ids: Tensor, paged: PagedPass
    ) -> Tensor:
        """Run the model.

        Parameters
        ----------
        ids, position_ids : int64 [n]
        hidden : Tensor, optional
            [n, hidden]: Eagle's hidden states, those of `combine_aux` or of an earlier pass.
        paged : PagedPass

        Returns
        -------
        Tensor
            [n, hidden].
        """
        ids, position_ids = ids[None], position_ids[None]
        output: Tensor
        if isinstance(self.model, LlamaForCausalLM):
            output = self.model.model(
                input_ids=ids, position_ids=position_ids, use_cache=False, paged=paged
            ).last_hidden_state
        else:
            assert hidden is not None
            embeds = self.model.embed_tokens(ids)
            output = self.model(embeds, hidden[None], position_ids, paged=paged)
        return output[0]

    def combine_aux(self, aux: Tensor) -> Tensor:
        """Combine hidden states of the target, [n, aux_count * hidden], into Eagle's own."""
        assert not isinstance(self.model, LlamaForCausalLM)
        combined: Tensor = self.model.combine_aux(aux)
        return combined

    def draft(
        self,
        batch: BatchMetadata,
        hidden: Tensor,
        num_drafts: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Make the drafts of all rows.

        Parameters
        ----------
        batch : BatchMetadata
            That of the drafter's own pages, after the pass over its staged tokens.
        hidden : Tensor
            [B, hidden]: what that pass gave at each row's last token.
        num_drafts : int
            K, at least 1.
        group : ProcessGroup or None
            Rank 0's drafts are every rank's.
        """
        for index in range(num_drafts):
            if isinstance(self.model, LlamaForCausalLM):
                draft_ids = self.model.lm_head(hidden).argmax(-1)
            else:
                draft_ids = self.model.to_target_ids(self.model.logits(hidden).argmax(-1))
            last = index == num_drafts - 1
            batch.draft_step(from_rank_0(draft_ids, group), index=index, last=last)
            if not last:
                paged = PagedPass(
                    self.cache,
                    slot_mapping=batch.draft_slot_mapping,
                    block_table=batch.block_table,
                    seq_lens=batch.seq_lens,
                )
                hidden = self.forward(batch.draft_ids, hidden, batch.draft_position_ids, paged)


class Step(ABC):
    """The device's part of an engine: its buffers, and the launches that work on them.

    Prompts and drafts go through the same step; only the static shape differs.

    Parameters
    ----------
    target : LlamaForCausalLM
        The model, with ``"specmeta_paged"`` attention.
    max_rows : int
        Most rows of a launch.
    max_slots : int
        Requests that may be alive at once.
    max_tokens : int
        Most query tokens of a launch.
    max_seq_len : int
        No text may be longer.
    num_drafts : int
        Drafts a row and step, K; 0 = plain decoding.
    page_size : int
        Tokens a page of the target's cache.
    num_pages : int
        Pages of the target's cache, the reserved page 0 included.
    captured : bool
        Whether launches are captured and replayed, or run as they stand.

    Attributes
    ----------
    batch : BatchMetadata
        The target's buffers.
    draft_batch : BatchMetadata or None
        The drafter's, where it has pages of its own.
    sampling : SamplingState
        How each slot's tokens are chosen, in launches with sampling.
    outcome : Tensor
        int64 [max_rows, K + 4]: what the host wants to know of a launch, by row: the status bits
        and ``committed_lens`` of its slot, the number of drafts verified, then the tokens that
        came out, then -1. Rows past the launch's own are left as they were.
    """

    draft_batch: BatchMetadata | None = None

    def __init__(
        self,
        target: LlamaForCausalLM,
        *,
        max_rows: int,
        max_slots: int,
        max_tokens: int,
        max_seq_len: int,
        num_drafts: int,
        page_size: int,
        num_pages: int,
        captured: bool = True,
    ) -> None:
        self.target = target
        self.num_drafts = num_drafts
        self.captured = captured
        self.group = group_of(target)
        self.batch = BatchMetadata(
            max_rows=max_rows,
            max_slots=max_slots,
            max_tokens=max_tokens,
            max_pages=-(-max_seq_len // page_size),
            page_size=page_size,
            max_seq_len=max_seq_len,
            max_draft_len=num_drafts,
            with_kv_indices=False,
            device=target.device,
            # Padding tokens write their keys and values into page 0: no write has to be masked.
            pad_slot=0,
        )
        self.sampling = SamplingState(max_slots, device=target.device)
        self.outcome = torch.full(
            (max_rows, num_drafts + 4), -1, dtype=torch.int64, device=target.device
        )
        self.target_cache = KVCache(
            target.config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=target.dtype,
            device=target.device,
        )
        self._launches: dict[tuple[Shape, bool], list[Callable[[], None]]] = {}
        # One for all graphs: only one runs at a time, and none leaves anything in it.
        self._pool = (
            torch.cuda.graph_pool_handle() if captured and target.device.type == "cuda" else None
        )

    def launches(self, shape: Shape, *, sampling: bool = False) -> list[Callable[[], None]]:
        """Return what runs a step, to be called in this order on one stream.

        Parameters
        ----------
        shape : Shape
            Captured the first time that it's asked for.
        sampling : bool
            Whether tokens are chosen as `sampling` says; else all are the most probable ones.

        Returns
        -------
        list of callable
            One a graph.
        """
        key = shape, sampling
        if key not in self._launches:
            for batch in (self.batch, self.draft_batch):
                if batch is not None:
                    batch.first_rows(shape.rows)  # made here, and found in the capture
            self._launches[key] = [self._prepare(part) for part in self._parts(shape, sampling)]
        return self._launches[key]

    def _prepare(self, part: Callable[[], None]) -> Callable[[], None]:
        if self.captured:
            return capture(part, num_rows=self.batch.num_rows, pool=self._pool).replay
        return torch.no_grad()(part)

    @abstractmethod
    def _parts(self, shape: Shape, sampling: bool) -> list[Callable[[], None]]:
        """Return the parts of a step that are graphs of their own."""

    def _verify(self, shape: Shape, *, sampling: bool, aux_ids: tuple[int, ...] = ()) -> Tensor:
        """Run the target over the next tokens, accept drafts, and tell the outcome.

        Parameters
        ----------
        shape : Shape
        sampling : bool
        aux_ids : tuple of int
            Which hidden states are wanted.

        Returns
        -------
        Tensor
            [T, len(aux_ids) * hidden]: the hidden states of a token side by side.
        """
        batch, num_tokens = self.batch.first_rows(shape.rows), shape.num_tokens
        batch.stage(num_tokens=num_tokens)
        output = self.target.model(
            input_ids=batch.input_ids[None, :num_tokens],
            position_ids=batch.position_ids[None, :num_tokens],
            use_cache=False,
            output_hidden_states=bool(aux_ids),
            paged=verify_pass(batch, self.target_cache, shape),
        )
        hidden: Tensor = output.last_hidden_state[0]
        if sampling:
            # A distribution is worth computing only where a token may come out.
            places = verified_places(batch, num_tokens)
            logits = self.target.lm_head(hidden.index_select(0, places.flatten()))
            samples = sample_places(batch, logits, places, self.sampling)
            samples = from_rank_0(samples, self.group)
            batch.accept_sampled(samples, vocab_size=logits.shape[-1], num_tokens=num_tokens)
        else:
            batch.accept_greedy(from_rank_0(self.target.lm_head(hidden).argmax(-1), self.group))
        outcome = self.outcome[: shape.rows]
        outcome[:, 0] = _status(batch)
        if self.draft_batch is not None:  # of the step before: this one's drafts are still to come
            outcome[:, 0] |= _status(self.draft_batch.first_rows(shape.rows))
        outcome[:, 1] = _by_row(batch, batch.committed_lens)
        outcome[:, 2] = batch.num_draft_tokens
        # A choice among logits that aren't numbers is none; the host takes it for a fault.
        is_finite = hidden.isfinite().all(-1).index_select(0, batch.token_indices)
        outcome[:, 3:] = batch.accepted_tokens.where(is_finite[:, None], -1)
        if not aux_ids:
            return hidden[:, :0]
        aux: Tensor = torch.cat([output.hidden_states[index][0] for index in aux_ids], dim=-1)
        return aux
