"""EAGLE-3 checkpoints: the layouts in use make the same head."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from specmeta import models
from specmeta.models.eagle3 import Eagle3Config, Eagle3Head

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / "specmeta/models/smollm2/draft"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a head, in the layout of ``speculators``."""
    return tiny_models.save(tmp_path / "model")


def original_layout(folder: Path, *, aux_layer_ids: list[int] | None = None) -> Path:
    """Rewrite a model's head in the layout of EAGLE-3's authors, in safetensors."""
    draft = folder / "draft"
    tensors = load_file(draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    layer = config["transformer_layer_config"]
    layer |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20}
    if aux_layer_ids:
        layer["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": aux_layer_ids,
            "use_aux_hidden_state": True,
        }
    (draft / "config.json").write_text(json.dumps(layer))
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    del renamed["embed_tokens.weight"]
    save_file(renamed, draft / "model.safetensors")
    return draft


def logits(model: models.Model) -> torch.Tensor:
    """What the head makes of a few tokens of the target."""
    head = model.head
    assert head is not None
    head.config.layer._attn_implementation = "sdpa"
    model.target.set_attn_implementation("sdpa")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        states = model.target(ids, output_hidden_states=True).hidden_states
        chosen = head.config.resolve_aux_layer_ids(model.target.config.num_hidden_layers)
        hidden = head.combine_aux(torch.cat([states[i] for i in chosen], dim=-1))
        hidden = head(head.embed_tokens(ids + 1), hidden, torch.arange(8)[None])
        return head.logits(hidden)


def test_the_original_layout(folder: Path) -> None:
    # The target's embedding in its place: the original layout has none of its own.
    path = folder / "draft/model.safetensors"
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    save_file(load_file(path) | {"embed_tokens.weight": embedding}, path)
    expected = logits(models.load(str(folder)))
    # SGLang's ids name what comes out of a layer, ours and vLLM's what goes into it.
    original_layout(folder, aux_layer_ids=[-1, 0, 1])
    model = models.load(str(folder))
    assert model.head is not None
    assert model.head.config.aux_layer_ids == (0, 1, 2)
    assert model.head.config.norm_before_residual is False
    assert torch.equal(logits(model), expected)
    assert model.head.embed_tokens.weight.data_ptr() == (
        model.target.model.embed_tokens.weight.data_ptr()
    )


def test_the_embedding_may_be_left_out(folder: Path) -> None:
    head = Eagle3Head.from_pretrained(folder / "draft")
    head.save_pretrained(folder / "draft", embed_tokens=False)
    assert "embed_tokens.weight" not in load_file(folder / "draft/model.safetensors")
    model = models.load(str(folder))
    assert model.head is not None
    assert torch.equal(model.head.embed_tokens.weight, model.target.model.embed_tokens.weight)
    with pytest.raises(ValueError, match=r"embed_tokens.weight: expected .*, got no tensor"):
        Eagle3Head.from_pretrained(folder / "draft")


def test_t2d_may_be_left_out(folder: Path) -> None:
    path = folder / "draft/model.safetensors"
    tensors = load_file(path)
    expected = tensors.pop("t2d")
    save_file(tensors, path)
    assert torch.equal(Eagle3Head.from_pretrained(folder / "draft").t2d, expected)


def test_a_head_for_the_whole_vocabulary(folder: Path) -> None:
    size = len(tiny_models.LETTERS)
    head = tiny_models.head(draft_vocab_size=size)
    head.save_pretrained(folder / "draft")
    path = folder / "draft/model.safetensors"
    tensors = load_file(path)
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, path)
    loaded = Eagle3Head.from_pretrained(folder / "draft")
    assert torch.equal(loaded.to_target_ids(torch.arange(size)), torch.arange(size))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, (2, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, (2, 5, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [], "eagle_config": {}}, None),
        ({}, None),
    ],
)
def test_auxiliary_layers(tmp_path: Path, config: Any, expected: Any) -> None:
    layer = tiny_models.config(layers=1).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(layer | config))
    read = Eagle3Config.from_file(tmp_path / "config.json")
    assert read.aux_layer_ids == expected
    assert read.resolve_aux_layer_ids(12) == (expected or (2, 6, 9))


def test_pickled_weights_are_converted_as_documented(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = original_layout(folder, aux_layer_ids=[-1, 0, 1])
    expected = logits(models.load(str(folder)))
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(draft)
    exec(block, {})
    assert torch.equal(logits(models.load(str(folder))), expected)


def test_the_head_of_smollm2() -> None:
    """What its card says of it."""
    head = Eagle3Head.from_pretrained(SMOLLM2, embed_tokens=torch.zeros(49152, 576))
    stored = load_file(SMOLLM2 / "model.safetensors")
    assert (SMOLLM2 / "model.safetensors").stat().st_size <= 14_000_000
    assert "embed_tokens.weight" not in stored
    weights = [tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")]
    assert {tensor.dtype for tensor in weights} == {torch.float16}
    assert sum(tensor.numel() for tensor in weights) == 6_564_096
    assert all(tensor.isfinite().all() for tensor in weights)
    assert head.config.draft_vocab_size == 4096
    assert head.config.aux_layer_ids == (2, 15, 27)
    assert head.to_target_ids(torch.arange(4096)).unique().shape == (4096,)
