"""One step of one-model speculative decoding: target, acceptance and the drafts of an EAGLE-3 head.

The step launches ``K + 2`` of specmeta's operations (K drafts; the contract, *An iteration with K
drafts*), all in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import LlamaForCausalLM

from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.step import Drafter, Shape, Step, verify_pass

__all__ = ["OneModelStep"]


class OneModelStep(Step):
    """Steps of a target whose head drafts in the same graph, over the same pages.

    Parameters
    ----------
    target : LlamaForCausalLM
        The model, with ``"specmeta_paged"`` attention.
    head : Eagle3Head, optional
        Its draft head, likewise. Not needed, and not looked at, without drafts.
    **settings
        As in `Step`.
    """

    def __init__(self, target: LlamaForCausalLM, head: Eagle3Head | None, **settings: Any) -> None:
        super().__init__(target, **settings)
        self.drafter: Drafter | None = None
        self._aux_ids: tuple[int, ...] = ()
        if self.num_drafts == 0:
            return
        if head is None:
            raise ValueError(f"num_drafts: expected 0 without a head, got {self.num_drafts}")
        # Head and target share the page table: a token has one slot, in both caches.
        self.drafter = Drafter(
            head,
            num_pages=settings["num_pages"],
            page_size=settings["page_size"],
            device=target.device,
        )
        self._aux_ids = tuple(head.config.resolve_aux_layer_ids(target.config.num_hidden_layers))

    def _parts(self, shape: Shape, sampling: bool) -> list[Callable[[], None]]:
        return [partial(self.run, shape, sampling=sampling)]

    def run(self, shape: Shape, *, sampling: bool = False) -> None:
        """Run a step as it stands, as `launches` captures it."""
        aux = self._verify(shape, sampling=sampling, aux_ids=self._aux_ids)
        if self.drafter is None:
            return
        # The head runs over all verified tokens, then K - 1 times over one token a row.
        batch, drafter = self.batch.first_rows(shape.rows), self.drafter
        hidden = drafter.forward(
            batch.draft_input_ids[: shape.num_tokens],
            drafter.combine_aux(aux),
            batch.position_ids[: shape.num_tokens],
            verify_pass(batch, drafter.cache, shape),
        )
        last = hidden.index_select(0, batch.token_indices)
        drafter.draft(batch, last, self.num_drafts, self.group)
