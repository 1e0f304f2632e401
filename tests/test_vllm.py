"""vLLM's engine serves the built-in models with their heads, and a pair of models.

`make test-vllm` runs these. Engines run one at a time, each in a process of vLLM's environment,
whose Python is named by SPECMETA_VLLM_PYTHON; specmeta's own serving loop runs here.
"""

from __future__ import annotations

import json
import os
import re
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
KERNELS = Path(__file__).with_name("vllm_kernels.py")
DOCS = Path(__file__).parent.parent / "docs" / "vllm.md"
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
    """What came of a run of vLLM.

    `accepted` is by position in the draft. `calls` says for each rank how often the metadata
    kernels were called: those of "specmeta" and the engine's own, "_C".
    """

    token_ids: list[list[int]]
    passes: int
    drafted: int
    accepted: list[int]
    calls: list[dict[str, dict[str, int]]]


Serve = Callable[..., Served]


def in_vllm(*command: str | Path, plugin: bool = True, stdin: str = "") -> str:
    """Run Python in vLLM's environment, and return what it printed."""
    process = subprocess.run(
        [PYTHON, *command],
        input=stdin,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SPECMETA_VLLM": str(int(plugin))},
        cwd=SERVE.parent,  # not where the package's source is
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-5000:]
    return process.stdout


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Run vLLM over prompts, with the plugin or without."""

    def run(
        name: str,
        prompts: list[list[int]],
        *,
        plugin: bool = True,
        max_new_tokens: int = NEW_TOKENS,
        **engine: Any,
    ) -> Served:
        job = {
            "engine": {"model": str(models.resolve(name)), "max_model_len": 512, **engine},
            "prompts": prompts,
            "max_new_tokens": max_new_tokens,
        }
        path = tmp_path / "result.json"
        in_vllm(SERVE, path, plugin=plugin, stdin=json.dumps(job))
        return Served(**json.loads(path.read_text()))

    return run


@pytest.fixture
def serve_both(serve: Serve) -> Serve:
    """Run vLLM twice: the plugin changes nothing but who was called. Return the run with it."""

    def run(*args: Any, num_ranks: int = 1, **job: Any) -> Served:
        ours, engines = (serve(*args, plugin=plugin, **job) for plugin in (True, False))
        calls = ours.calls[0]["specmeta"]
        assert ours.calls == [{"specmeta": calls}] * num_ranks
        assert engines.calls == [{"_C": calls}] * num_ranks
        engines.calls = ours.calls
        assert ours == engines
        return ours

    return run


def check_calls(served: Served, *, num_drafts: int = NUM_DRAFTS) -> None:
    """Check that every pass of the target called each kernel once, the draft loop's K - 1 times."""
    calls = served.calls[0]["specmeta"]
    expected = dict.fromkeys(("slots", "next_token", "inputs"), calls["slots"])
    if num_drafts > 1:
        expected["step"] = (num_drafts - 1) * calls["slots"]
    assert calls == expected


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


def eagle3(name: str, num_drafts: int = NUM_DRAFTS) -> dict[str, Any]:
    folder = Path(models.__file__).parent / name / "draft"
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": num_drafts}


def prompts_of(generation: Generation) -> list[list[int]]:
    return [text.prompt_ids for text in generation.texts]


def tokens_of(generation: Generation) -> list[list[int]]:
    return [text.token_ids for text in generation.texts]


@pytest.mark.parametrize("name", PROMPTS)
def test_head(name: str, own: Callable[[str], Generation], serve: Serve, serve_both: Serve) -> None:
    expected = own(name)
    plain = serve(name, prompts_of(expected))
    assert plain.calls[0]["specmeta"].keys() == {"slots"}
    served = serve_both(name, prompts_of(expected), speculative_config=eagle3(name))
    assert served.token_ids == plain.token_ids
    assert served.token_ids == tokens_of(expected)
    check_calls(served)
    assert served.drafted == NUM_DRAFTS * served.passes
    for position, accepted in enumerate(served.accepted):
        share = 100 * accepted / served.passes
        ours = 100 * expected.accepted[position] / expected.drafted[position]
        assert share == pytest.approx(ours, abs=TOLERANCE), position


def test_tensor_parallel(own: Callable[[str], Generation], serve_both: Serve) -> None:
    expected = own("austen")
    served = serve_both(
        "austen",
        prompts_of(expected),
        speculative_config=eagle3("austen"),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        num_ranks=2,
    )
    assert served.token_ids == tokens_of(expected)
    assert 0 < sum(served.accepted) < served.drafted
    check_calls(served)


def test_draft_model(tmp_path: Path, own: Callable[[str], Generation], serve_both: Serve) -> None:
    expected = own("austen")
    draft = truncate(models.resolve("austen"), tmp_path / "draft", layers=3)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    served = serve_both("austen", prompts_of(expected), speculative_config=config)
    assert served.token_ids == tokens_of(expected)
    assert 0 < sum(served.accepted) < served.drafted
    check_calls(served)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"num_drafts": 1}, id="one-draft"),
        pytest.param({"max_num_seqs": 4}, id="requests-that-wait"),
        # Prompts in chunks: what is sampled behind all but the last is discarded.
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 8}, id="chunks"),
        pytest.param({"block_size": 32}, id="small-blocks"),
    ],
)
def test_settings(
    engine: dict[str, Any], own: Callable[[str], Generation], serve_both: Serve
) -> None:
    expected = own("austen")
    num_drafts = engine.get("num_drafts", NUM_DRAFTS)
    served = serve_both(
        "austen",
        prompts_of(expected),
        speculative_config=eagle3("austen", num_drafts),
        max_new_tokens=24,
        **{name: value for name, value in engine.items() if name != "num_drafts"},
    )
    assert served.token_ids == [tokens[:24] for tokens in tokens_of(expected)]
    check_calls(served, num_drafts=num_drafts)
    if "max_num_batched_tokens" in engine:
        assert sum(map(len, prompts_of(expected))) > 2 * engine["max_num_batched_tokens"]


def test_up_to_the_limit(own: Callable[[str], Generation], serve_both: Serve) -> None:
    # Of each text a part that ends some tokens before the limit; two at a time.
    limit, expected, left = 48, own("austen"), range(3, 25, 3)
    texts = [(text.prompt_ids + text.token_ids)[:limit] for text in expected.texts]
    served = serve_both(
        "austen",
        [text[:-count] for text, count in zip(texts, left, strict=True)],
        speculative_config=eagle3("austen"),
        max_model_len=limit,
        max_num_seqs=2,
    )
    assert served.token_ids == [text[-count:] for text, count in zip(texts, left, strict=True)]
    # The engine does not draft where a draft could pass the limit.
    calls = served.calls[0]["specmeta"]
    assert 0 < calls["step"] < (NUM_DRAFTS - 1) * calls["slots"]


def test_kernels() -> None:
    """The plugin's kernels beside the engine's, in vLLM's environment."""
    in_vllm(
        "-m", "pytest", "-q", "-W", "default", "--noconftest", "-p", "no:cacheprovider", KERNELS
    )


def test_docs_example(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    expected = re.findall(r"^ *print.*  # (.*)$", blocks[0], re.MULTILINE)
    assert expected
    assert [line for line in in_vllm(script).splitlines() if line in expected] == expected


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
