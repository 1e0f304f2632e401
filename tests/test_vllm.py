"""vLLM's engine serves the built-in models with their heads, and a pair of models.

`make test-vllm` runs these. Engines run one at a time, each in a process of vLLM's environment,
whose Python is named by SPECMETA_VLLM_PYTHON; specmeta's own serving loop runs here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specmeta import models
from specmeta.generate import Generation, generate

PYTHON = os.environ.get("SPECMETA_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs vLLM: make test-vllm")

SERVE = Path(__file__).with_name("vllm_serve.py")
NUM_DRAFTS, NEW_TOKENS = 4, 64
PROMPTS = {
    "austen": [
        "It was a fine morning in May, and",
        "She had not been long in the room when",
        "Mr. Darcy looked at her with",
        "The letter which Emma received from her sister",
        "The carriage had scarcely stopped before",
        "I have always been of opinion that",
        "There was nothing in the world so",
        "Captain Wentworth was walking towards",
    ],
    "smollm2": [
        "What is the capital of France?",
        "Why is the sky blue in the daytime and red at sunset?",
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        "Write a Python function that returns the largest number in a list.",
        "What is 15 percent of 80?",
        "What are the main steps in baking bread?",
        "Write a polite email asking for a refund.",
        "Should schools start later in the morning? Give both sides.",
    ],
}
# Points by which the shares of accepted drafts may differ.
TOLERANCE = 3.0


@dataclass
class Served:
    """What came of a run of vLLM; `accepted` is by position in the draft."""

    token_ids: list[list[int]]
    passes: int
    drafted: int
    accepted: list[int]


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Run vLLM over the prompts of a generation."""

    def run(name: str, own: Generation, **engine: Any) -> Served:
        job = {
            "engine": {"model": str(models.resolve(name)), **engine},
            "prompts": [text.prompt_ids for text in own.texts],
            "max_new_tokens": NEW_TOKENS,
        }
        path = tmp_path / "result.json"
        process = subprocess.run(
            [PYTHON, SERVE, path],
            input=json.dumps(job),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.returncode == 0, process.stdout[-5000:]
        return Served(**json.loads(path.read_text()))

    return run


@pytest.fixture(scope="module")
def own() -> Callable[[str], Generation]:
    """Run specmeta's own loop over a model's prompts, once a model."""
    generations: dict[str, Generation] = {}

    def run(name: str) -> Generation:
        if name not in generations:
            generations[name] = generate(
                models.load(name), PROMPTS[name], max_new_tokens=NEW_TOKENS, num_drafts=NUM_DRAFTS
            )
        return generations[name]

    return run


def eagle3(name: str) -> dict[str, Any]:
    folder = Path(models.__file__).parent / name / "draft"
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}


@pytest.mark.parametrize("name", PROMPTS)
def test_head(name: str, own: Callable[[str], Generation], serve: Serve) -> None:
    expected = own(name)
    plain = serve(name, expected)
    served = serve(name, expected, speculative_config=eagle3(name))
    assert served.token_ids == plain.token_ids
    assert served.token_ids == [text.token_ids for text in expected.texts]
    assert served.drafted == NUM_DRAFTS * served.passes
    for position, accepted in enumerate(served.accepted):
        share = 100 * accepted / served.passes
        ours = 100 * expected.accepted[position] / expected.drafted[position]
        assert share == pytest.approx(ours, abs=TOLERANCE), position


def test_tensor_parallel(own: Callable[[str], Generation], serve: Serve) -> None:
    expected = own("austen")
    served = serve(
        "austen",
        expected,
        speculative_config=eagle3("austen"),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert served.token_ids == [text.token_ids for text in expected.texts]
    assert 0 < sum(served.accepted) < served.drafted


def test_draft_model(tmp_path: Path, own: Callable[[str], Generation], serve: Serve) -> None:
    expected = own("austen")
    draft = truncate(models.resolve("austen"), tmp_path / "draft", layers=3)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    served = serve("austen", expected, speculative_config=config)
    assert served.token_ids == [text.token_ids for text in expected.texts]
    assert 0 < sum(served.accepted) < served.drafted


def truncate(folder: Path, out: Path, *, layers: int) -> Path:
    """Write a model of another's first layers: it drafts, now and then right."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folder / name).read_bytes())
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
