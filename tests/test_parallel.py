"""Tensor parallelism, with two processes on gloo: rank 0 decides, and all metadata are the same.

The processes are started once. Each goes through all scenarios and writes down what came of them,
and how its metadata stood after every step. The tests compare, also with one process alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import LlamaForCausalLM

from specmeta.models import Model, load
from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.attention import ATTENTION_NAME
from specmeta.serving.engine import Engine
from specmeta.serving.one_model import OneModelStep
from specmeta.serving.parallel import parallelize
from specmeta.serving.request import SamplingParams
from specmeta.serving.step import Shape, Step

RANKS = 2
NUM_DRAFTS = 2
NEW_TOKENS = 12
PROMPTS = ["so", "it is a truth", "b", "the dog", "a, b"]
ARRIVALS = [0, 0, 2, 3, 3]  # by step
SAMPLED, CANCELLED, CANCELLED_AT = 2, 3, 7

# How an engine is made, by scenario. To capture a step takes a second: only few are.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"num_drafts": 0},
    "one-model": {},
    "one-model, no overlap": {"overlap": False},
    "two-model": {"two_model": True},
    "two-model, captured": {"two_model": True, "max_rows": 1, "captured": True},
    "two-model, a Llama": {"llama": True},
}
# In these, all logits of rank 1 are wrong.
WRONG = ["one-model", "two-model, captured", "two-model, a Llama"]


def head() -> Eagle3Head:
    return tiny_models.head(draft_vocab_size=len(tiny_models.LETTERS)).double()


class Models:
    """A target, its head, and the whole model to draft; all float64, with paged attention."""

    def __init__(self, head_weights: dict[str, Tensor]) -> None:
        self.target = tiny_models.target().double()
        self.head = head()
        self.head.load_state_dict(head_weights)
        self.head.config.layer._attn_implementation = ATTENTION_NAME
        self.whole = tiny_models.target().double()
        for model in (self.target, self.whole):
            model.set_attn_implementation(ATTENTION_NAME)

    @contextmanager
    def wrong(self) -> Iterator[None]:
        """Turn all logits upside down."""
        handles = [
            model.lm_head.register_forward_hook(lambda _, __, logits: -logits)
            for model in (self.target, self.head, self.whole)
        ]
        yield
        for handle in handles:
            handle.remove()


@dataclass
class Result:
    """What came of a scenario: `states` holds all tensors of the metadata, after every step."""

    texts: list[list[int]]
    states: list[dict[str, Tensor]]
    accepted: list[int] | None = None
    num_preemptions: int = 0


def metadata(step: Step) -> dict[str, Tensor]:
    tensors = {"outcome": step.outcome.clone()}
    for kind, batch in ("target", step.batch), ("draft", step.draft_batch):
        if batch is not None:
            for name, value in vars(batch).items():
                if isinstance(value, Tensor):
                    tensors[f"{kind}.{name}"] = value.clone()
    return tensors


def serve(models: Models, *, llama: bool = False, **settings: Any) -> Result:
    """Serve all prompts through an engine, which has too few pages for two of the long texts."""
    tokenizer = tiny_models.tokenizer()
    settings = {
        "num_drafts": NUM_DRAFTS,
        "max_rows": 2,
        "prompt_chunk": 5,
        "page_size": 4,
        "num_pages": 10,
        "max_seq_len": 32,
        "captured": False,
        "draft": Model("", models.whole, None, tokenizer, frozenset()) if llama else None,
    } | settings
    model = Model("", models.target, models.head, tokenizer, frozenset())
    engine = Engine(model, **settings)
    requests, states = [], []
    is_busy, count = True, 0
    while is_busy:
        for i, arrival in enumerate(ARRIVALS):
            if arrival == count:
                params = SamplingParams(NEW_TOKENS, temperature=float(i == SAMPLED), seed=5)
                requests.append(engine.submit(PROMPTS[i], params))
        if count == CANCELLED_AT:
            engine.cancel(requests[CANCELLED])
        is_busy = engine.step()
        states.append(metadata(engine._step))
        count += 1
    assert [request.finish for request in requests] == [
        "cancelled" if i == CANCELLED else "length" for i in range(len(PROMPTS))
    ]
    texts = [request.token_ids for request in requests]
    return Result(texts, states, engine.stats.accepted, engine.stats.preemptions)


def run_steps(models: Models, *, captured: bool = False, decided: bool = True) -> Result:
    """Serve a prompt without an engine: ranks that differ, too, launch the same steps."""
    step = OneModelStep(
        models.target,
        models.head,
        max_rows=1,
        max_slots=1,
        max_tokens=NUM_DRAFTS + 1,
        max_seq_len=28,
        num_drafts=NUM_DRAFTS,
        page_size=4,
        num_pages=8,
        captured=captured,
    )
    if not decided:
        step.group = None
    step.batch.assign(0, tiny_models.tokenizer()(PROMPTS[0])["input_ids"], range(1, 8))
    step.batch.set_rows([0], [NUM_DRAFTS + 1])
    text: list[int] = []
    states = []
    for _ in range(NEW_TOKENS // (NUM_DRAFTS + 1)):
        for launch in step.launches(Shape(1, NUM_DRAFTS + 1, NUM_DRAFTS + 1)):
            launch()
        states.append(metadata(step))
        text += [token for token in step.outcome[0, 3:].tolist() if token >= 0]
    return Result([text], states)


def biased() -> LlamaForCausalLM:
    """A model whose projections all have biases."""
    model = tiny_models.target(attention_bias=True, mlp_bias=True).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


@torch.no_grad()
def logits(model: LlamaForCausalLM) -> Tensor:
    output: Tensor = model(torch.arange(20)[None], use_cache=False).logits
    return output


def run_rank(rank: int, folder: Path) -> None:
    """Go through all scenarios, in a process of its own."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    warnings.simplefilter("error")
    group = dist.group.WORLD
    models = Models(torch.load(folder / "head.pt"))
    parallelize(models.target, group)
    results: dict[str, Any] = {}
    for name, settings in ENGINES.items():
        with models.wrong() if rank == 1 and name in WRONG else nullcontext():
            results[name] = serve(models, **settings)
    with models.wrong() if rank == 1 else nullcontext():
        results["rank 0 decides"] = run_steps(models)
        results["rank 0 decides, captured"] = run_steps(models, captured=True)
        results["nobody decides"] = run_steps(models, decided=False)
    model = biased()
    parallelize(model, group)
    results["logits"] = logits(model)
    results["shapes"] = {name: tuple(value.shape) for name, value in model.named_parameters()}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def greedy_texts() -> list[list[int]]:
    target, tokenizer = tiny_models.target().double(), tiny_models.tokenizer()
    return [greedy(target, tokenizer(prompt)["input_ids"], 20) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def models(greedy_texts: list[list[int]]) -> Models:
    tokenizer, trained = tiny_models.tokenizer(), head()
    texts = [
        (tokenizer(prompt)["input_ids"] + text)[:20]
        for prompt, text in zip(PROMPTS, greedy_texts, strict=True)
    ]
    tiny_models.train(trained, tiny_models.target().double(), texts)
    return Models(trained.state_dict())


@pytest.fixture(scope="module")
def ranks(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has written down."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(models.head.state_dict(), folder / "head.pt")
    spawn(run_rank, (folder,), nprocs=RANKS)
    return [torch.load(folder / f"rank{i}.pt", weights_only=False) for i in range(RANKS)]


def assert_same(states: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(states) == len(expected)
    for count, (got, right) in enumerate(zip(states, expected, strict=True)):
        assert got.keys() == right.keys()
        for name in right:
            assert torch.equal(got[name], right[name]), f"step {count}: {name}"


@pytest.mark.parametrize("name", ENGINES)
def test_every_rank_does_what_one_alone_does(
    models: Models, ranks: list[dict[str, Any]], greedy_texts: list[list[int]], name: str
) -> None:
    """The same texts, the same acceptance, and the same metadata after every step."""
    alone = serve(models, **ENGINES[name] | {"captured": False})
    for i in {*range(len(PROMPTS))} - {SAMPLED, CANCELLED}:
        assert alone.texts[i] == greedy_texts[i][:NEW_TOKENS]
    assert alone.texts[SAMPLED] != greedy_texts[SAMPLED][:NEW_TOKENS]
    assert (alone.num_preemptions > 0) == ("max_rows" not in ENGINES[name])
    assert (sum(alone.accepted) > 0) == (name != "plain")
    assert len(alone.states[0]) > 30
    for rank in ranks:
        result = rank[name]
        assert result.texts == alone.texts
        assert result.accepted == alone.accepted
        assert result.num_preemptions == alone.num_preemptions
        assert_same(result.states, alone.states)


def test_rank_0_decides(models: Models, ranks: list[dict[str, Any]]) -> None:
    """Without it, a rank whose logits are wrong goes its own way."""
    alone = run_steps(models, decided=False)
    for rank in ranks:
        for name in "rank 0 decides", "rank 0 decides, captured":
            assert rank[name].texts == alone.texts
            assert_same(rank[name].states, alone.states)
    with pytest.raises(AssertionError, match="step 0: outcome"):
        assert_same(ranks[1]["nobody decides"].states, ranks[0]["nobody decides"].states)
    assert ranks[1]["nobody decides"].texts != alone.texts


def test_shares(ranks: list[dict[str, Any]]) -> None:
    """All ranks compute the whole model's logits, each from its own share."""
    whole = biased()
    for rank in ranks:
        torch.testing.assert_close(rank["logits"], logits(whole), rtol=1e-9, atol=1e-9)
        for name, parameter in whole.named_parameters():
            shape = list(parameter.shape)
            kind = name.split(".")[-2]
            if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                shape[0] //= RANKS
            elif kind in ("o_proj", "down_proj") and len(shape) == 2:
                shape[1] //= RANKS
            elif kind in ("o_proj", "down_proj") and rank is not ranks[0]:
                assert name not in rank["shapes"]  # a bias that rank 0 adds
                continue
            assert rank["shapes"][name] == tuple(shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 6, "hidden_size": 48}, "num_attention_heads: .* 4 ranks, got 6"),
        ({}, "num_key_value_heads: expected a multiple of the 4 ranks, got 2"),
        ({"num_key_value_heads": 4, "intermediate_size": 50}, "intermediate_size: .* got 50"),
    ],
)
def test_what_cannot_be_divided(changes: dict[str, int], message: str) -> None:
    model = tiny_models.target(**changes)
    before = {name: value.clone() for name, value in model.named_parameters()}
    config = model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        parallelize(model, SimpleNamespace(size=lambda: 4, rank=lambda: 0))  # type: ignore[arg-type]
    assert model.config.to_dict() == config
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent / "docs/serving.md"
    code = re.search(r"```python\n(# torchrun.*?)```", page.read_text(), re.DOTALL)
    assert code
    (tmp_path / "ranks.py").write_text(code[1])
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    result = subprocess.run(
        [*launch, "ranks.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    engine = Engine(load("austen"), num_pages=64)
    alone = engine.submit("It is a truth", SamplingParams(max_new_tokens=16))
    engine.run()
    assert result.stdout == f"{alone.text}\n"
