"""Engines of every kind over tiny float64 models, and what their texts have to be."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import Any

import tiny_models
import torch
from transformers import LlamaForCausalLM

from specmeta.models import Model
from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.attention import ATTENTION_NAME
from specmeta.serving.engine import Engine
from specmeta.serving.request import Request
from specmeta.serving.sampling import sample

VOCAB = len(tiny_models.LETTERS)
MAX_SEQ_LEN = 64
NUM_DRAFTS = 3
# What drafts, and how: `Engine`'s arguments.
KINDS = ("plain", "one-model", "two-model eagle", "two-model llama")


@dataclass(frozen=True)
class World:
    """A model with a head that it taught, a Llama that mostly agrees with it, and its twin.

    The twin has the attention of ``transformers``, no cache and no pages. The head has read
    `texts`: behind a beginning of one of them, many of its drafts stand, and many don't.
    """

    model: Model
    draft: Model
    twin: LlamaForCausalLM
    texts: list[list[int]]

    def prompt(self, rng: random.Random, most: int = 20) -> list[int]:
        """The beginning of a text, or now and then something else."""
        length = rng.randint(1, most)
        if rng.random() < 0.2:
            return [rng.randrange(VOCAB) for _ in range(length)]
        return rng.choice(self.texts)[:length]

    def with_ends(self, *end_ids: int) -> World:
        """The same models with other end tokens."""
        model, draft = (replace(m, end_ids=frozenset(end_ids)) for m in (self.model, self.draft))
        return replace(self, model=model, draft=draft)

    def engine(self, kind: str, **changes: Any) -> Engine:
        """An engine with room for a few requests, whose pages don't divide the chunks."""
        settings: dict[str, Any] = {
            "num_drafts": NUM_DRAFTS,
            "max_rows": 3,
            "max_tokens": 14,
            "prompt_chunk": 5,
            "page_size": 4,
            "num_pages": 80,
            "max_seq_len": MAX_SEQ_LEN,
            "captured": False,
        }
        settings |= {
            "plain": {"num_drafts": 0},
            "one-model": {},
            "two-model eagle": {"two_model": True, "draft_page_size": 3},
            "two-model llama": {"draft": self.draft, "draft_page_size": 7},
        }[kind]
        return Engine(self.model, **settings | changes)

    @torch.no_grad()
    def check(self, request: Request) -> None:
        """Check a text that has ended: it's what the request alone would have got.

        The twin reads it in one pass: each token must be the twin's choice after those before it.
        """
        prompt, tokens, params = request.prompt_ids, request.token_ids, request.params
        if tokens:
            ids = torch.tensor([prompt + tokens[:-1]], device=self.twin.device)
            places = torch.arange(len(prompt) - 1, ids.shape[1], device=ids.device)
            count = len(places)
            expected = sample(
                self.twin(ids, use_cache=False).logits[0, places],
                temperature=torch.full([count], params.temperature, device=ids.device),
                top_p=torch.full([count], params.top_p, device=ids.device),
                seed=torch.full([count], params.seed, device=ids.device),
                position=places,
            )
            assert tokens == expected.tolist(), request
        text = self.decode(tokens)
        ended = [not params.ignore_end and token in self.model.end_ids for token in tokens]
        stopped = [text.index(stop) for stop in params.stop if stop in text]
        assert not any(ended[:-1])
        if request.finish == "stop":
            assert request.text == text[: min(stopped)]
            without_last = self.decode(tokens[:-1])
            assert not any(stop in without_last for stop in params.stop)
            return
        assert not stopped
        assert request.text == text
        if request.finish == "end":
            assert ended[-1]
        elif request.finish == "length":
            assert len(tokens) == params.max_new_tokens
            assert not any(ended)
        else:
            assert request.finish == "cancelled"
            assert len(tokens) < params.max_new_tokens

    def decode(self, tokens: list[int]) -> str:
        return str(self.model.tokenizer.decode(tokens, skip_special_tokens=True))


@functools.cache
def make_world(device: str = "cpu") -> World:
    """Return the same models each time."""
    twin, target, other = (tiny_models.target().double() for _ in range(3))
    head = tiny_models.head(draft_vocab_size=VOCAB).double()
    rng, texts = random.Random(3), []
    for _ in range(8):
        text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        texts.append((text + greedy(twin, text, 50))[:50])
    tiny_models.train(head, twin, texts)
    torch.manual_seed(0)
    with torch.no_grad():  # now and then it disagrees
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    for model in (twin, head, target, other):
        model.to(device)
    tokenizer = tiny_models.tokenizer()
    model = Model("tiny", paged(target), paged(head), tokenizer, frozenset())
    return World(model, Model("other", paged(other), None, tokenizer, frozenset()), twin, texts)


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Decode with no cache."""
    ids = torch.tensor([prompt], device=model.device)
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def paged(model: Any) -> Any:
    if isinstance(model, Eagle3Head):
        model.config.layer._attn_implementation = ATTENTION_NAME
    else:
        model.set_attn_implementation(ATTENTION_NAME)
    return model


def check_no_trace(engine: Engine) -> None:
    """Check that all is as it was before the first request."""
    scheduler = engine._scheduler
    for left in ("running", "leaving", "waiting", "vacated"):
        assert not getattr(scheduler, left)
    assert not engine._launched
    assert not engine._to_tell
    assert len(set(scheduler._free_slots)) == engine._step.batch.max_slots
    for pool in scheduler.pools:
        assert sorted(pool._free) == list(range(1, pool.num_pages))
    assert engine.stats.pages_in_use == [0] * len(scheduler.pools)
    for batch in engine._batches:
        for zero in (
            batch.known_lens,
            batch.committed_lens,
            batch.written_lens,
            batch.num_drafts,
            batch.num_pages,
            batch.status,
        ):
            assert not zero.any()
        assert (batch.page_table == -1).all()
