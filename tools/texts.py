"""Texts of a target as a draft head is trained on them and measured on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import LlamaForCausalLM

# Batches of this many are cut out of texts sorted by length, so that little of them is padding.
BATCHES_SORTED = 16


@dataclass
class Text:
    """A prompt with the target's greedy text after it, and what the target computed on the way.

    Attributes
    ----------
    ids : Tensor
        int64 [N].
    start : int
        Where the greedy text begins; what is before it is the prompt.
    states : Tensor
        float16 [N, (A + 1) * hidden]: at every position the target's A auxiliary hidden states
        side by side, then its last one, after the final norm. The last position has zeros: where
        a text ends, the target isn't run any more.
    """

    ids: Tensor
    start: int
    states: Tensor


@dataclass
class Batch:
    """Texts of several lengths, padded at the end.

    Attributes
    ----------
    ids : Tensor
        int64 [B, N].
    states : Tensor
        float32 [B, N, (A + 1) * hidden].
    weights : Tensor
        float32 [B, N]: 1 where the token behind the position is one of the greedy text, else 0.
    """

    ids: Tensor
    states: Tensor
    weights: Tensor


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Write texts such that a run stopped half-way through leaves no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save([(text.ids, text.start, text.states) for text in texts], partial)
    os.replace(partial, path)


def load_texts(path: Path) -> list[Text]:
    """Read what `save_texts` wrote."""
    return [Text(*fields) for fields in torch.load(path, weights_only=True)]


@torch.no_grad()
def greedy(
    target: LlamaForCausalLM,
    prompts: Sequence[Tensor],
    *,
    aux_layer_ids: tuple[int, ...],
    new_tokens: int,
    batch_size: int,
) -> Iterator[Text]:
    """Yield each prompt, int64 [P], with up to `new_tokens` tokens of greedy text after it.

    A text ends with the target's end token, unless its generation configuration has none.
    """
    end = target.generation_config.eos_token_id
    for first in tqdm(range(0, len(prompts), batch_size), desc="greedy texts", leave=False):
        rows = prompts[first : first + batch_size]
        padding = [max(map(len, rows)) - len(row) for row in rows]
        mask = [torch.ones_like(row) for row in rows]
        output = target.generate(
            pad_sequence(rows, batch_first=True, padding_side="left"),
            attention_mask=pad_sequence(mask, batch_first=True, padding_side="left"),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        for prompt, before, row in zip(rows, padding, output, strict=True):
            ids, start = row[before:], len(prompt)
            ends = (ids[start:] == end).nonzero() if end is not None else []
            if len(ends):
                ids = ids[: start + int(ends[0]) + 1]
            yield Text(ids, start, read_states(target, ids, aux_layer_ids))


@torch.no_grad()
def read_states(target: LlamaForCausalLM, ids: Tensor, aux_layer_ids: tuple[int, ...]) -> Tensor:
    """Return the `Text.states` of `ids`, int64 [N]."""
    output = target.model(ids[None], output_hidden_states=list(aux_layer_ids), use_cache=False)
    states = [output.hidden_states[i] for i in aux_layer_ids]
    states = torch.cat([*states, output.last_hidden_state], dim=-1)[0].half()
    states[-1] = 0
    return states


def batch_at(texts: Sequence[Text], step: int, *, size: int, seed: int) -> Batch:
    """Return training step `step`'s batch, which depends on `seed` and `step` alone."""
    per_epoch = len(texts) // size
    epoch, index = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(texts), generator=generator)[: per_epoch * size]
    by_length = [
        sorted(group, key=lambda i: len(texts[i].ids))
        for group in (part.tolist() for part in order.split(size * BATCHES_SORTED))
    ]
    chosen = torch.tensor(list(chain.from_iterable(by_length))).view(per_epoch, size)
    row = chosen[torch.randperm(per_epoch, generator=generator)[index]]
    return make_batch([texts[i] for i in row.tolist()])


def make_batch(texts: Sequence[Text]) -> Batch:
    """Pad texts to the longest."""
    weights = []
    for text in texts:
        weight = torch.zeros(len(text.ids))
        weight[text.start - 1 : -1] = 1
        weights.append(weight)
    return Batch(
        pad_sequence([text.ids for text in texts], batch_first=True),
        pad_sequence([text.states for text in texts], batch_first=True).float(),
        pad_sequence(weights, batch_first=True),
    )
