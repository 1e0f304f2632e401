"""Random models of a few thousand weights, and heads for them, as folders and in memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specmeta.models.eagle3 import Eagle3Config, Eagle3Head

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


def config(*, layers: int = 3, **changes: Any) -> LlamaConfig:
    """A Llama whose query heads share key/value heads."""
    settings = {
        "vocab_size": len(LETTERS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 160,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaConfig(**settings | changes)


def target(*, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama whose next token depends on its whole context."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the usual initialisation leaves attention next to nothing
                parameter.mul_(8)
    return model


def head(*, seed: int = 1, **changes: Any) -> Eagle3Head:
    """A random EAGLE-3 head, whose drafts are almost always wrong."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "layer": config(layers=1),
        "draft_vocab_size": 20,
        "target_hidden_size": 32,
        "aux_layer_ids": (0, 1, 2),
    }
    model = Eagle3Head(Eagle3Config(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    if "draft_vocab_size" not in changes:
        model.set_draft_vocab(torch.arange(20) + 7)
    return model


def train(head: Eagle3Head, target: LlamaForCausalLM, texts: list[list[int]]) -> None:
    """Teach a head of the whole vocabulary some texts of its target, all of one length.

    Enough that many of its drafts stand, and many don't.
    """
    ids = torch.tensor(texts)
    aux_ids = head.config.resolve_aux_layer_ids(target.config.num_hidden_layers)
    with torch.no_grad():
        states = target(ids, use_cache=False, output_hidden_states=True).hidden_states
        aux = torch.cat([states[index] for index in aux_ids], dim=-1)[:, :-2]
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    positions = torch.arange(ids.shape[1] - 2)[None]
    for _ in range(60):
        hidden = head(head.embed_tokens(ids[:, 1:-1]), head.combine_aux(aux), positions)
        loss = nn.functional.cross_entropy(head.logits(hidden).flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.requires_grad_(False)


class BigramHead(nn.Module):
    """Stands in for a head: drafts what most often followed the last token in given texts.

    Texts of random models soon go in circles, so that many of its drafts stand, and many don't.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__()
        size = len(LETTERS)
        counts = torch.zeros(size, size)
        for text in texts:
            for token, following in itertools.pairwise(text):
                counts[token, following] += 1
        self.embed_tokens = nn.Embedding.from_pretrained(counts)
        self.fc = nn.Linear(1, 1)
        self.config = SimpleNamespace(layer=config(layers=1), resolve_aux_layer_ids=lambda _: [0])

    def combine_aux(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def forward(self, embeds: torch.Tensor, *_: torch.Tensor, **__: Any) -> torch.Tensor:
        return embeds

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids


def tokenizer(characters: str = LETTERS) -> PreTrainedTokenizerFast:
    """One token a character."""
    vocab = {character: i for i, character in enumerate(characters)}
    letters = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, clean_up_tokenization_spaces=False)


def save(folder: Path, *, end: int | None = None) -> Path:
    """Write a model folder with a head in it."""
    model = target()
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    head().save_pretrained(folder / "draft")
    return folder
