"""The command line: output, exit codes, errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import broken_metadata
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from specmeta import BatchMetadata, cli, models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("tiny"))


def run(folder: Path, *arguments: str) -> int:
    return cli.main(
        ["generate", "--model", str(folder), "--max-new-tokens", "12", "--threads", "1", *arguments]
    )


def test_one_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--prompt", "hello", "-k", "2") == 0
    out, err = capsys.readouterr()
    assert err == ""
    text, table = out.split("\n", 1)
    assert re.fullmatch(r"hello.{12}", text)
    assert re.search(r"run on +│ +cpu, fp32, threads: 1 ", table)
    assert re.search(r"drafts a pass +│ +2 ", table)
    assert re.search(r"acceptance +│ +\d+\.\d\d% \(\d+/\d+ tokens\)", table)
    for name in ("target passes", "tokens a pass", "acceptance by position", "tokens/s without"):
        assert name in table
    assert re.search(r"tokens +│ +12 ", table)
    assert re.search(r"identical to plain greedy decoding +│ +yes", table)


def test_several_prompts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("second one\n\nthird\n")
    assert run(folder, "--prompt", "first", "--prompts", str(file)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for index, prompt in enumerate(("first", "second one", "third"), 1):
        assert re.search(rf"^\[{index}\] {prompt}.{{12}}\s*$", out, re.MULTILINE)
    assert re.search(r"tokens +│ +36 ", out)


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--prompt", "hello", "--prompt", "world", "-k", "3", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert [text["prompt"] for text in report["texts"]] == ["hello", "world"]
    assert [len(text["token_ids"]) for text in report["texts"]] == [12, 12]
    assert report["identical"] is True
    assert report["tokens"] == 24
    assert len(report["accepted"]) == len(report["drafted"]) == report["num_drafts"] == 3
    assert report["tokens_per_second"] > 0
    assert report["tokens_per_second_without_speculation"] > 0


def test_without_drafts_no_head_is_needed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone, ignore=shutil.ignore_patterns("draft"))
    assert run(alone, "--prompt", "hello", "-k", "0") == 0
    assert re.search(r"acceptance +│ +- ", capsys.readouterr().out)
    assert run(alone, "--prompt", "hello", "--draft", str(folder / "draft"), "-k", "1") == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_types_report(folder: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Whether texts agree then depends on the shapes of the matrix products: either is right.
    assert run(folder, "--prompt", "hello", "--dtype", dtype, "--json") == 0
    assert isinstance(json.loads(capsys.readouterr().out)["identical"], bool)


def test_a_wrong_text_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BatchMetadata, "accept_greedy", broken_metadata.without_commit)
    prompts = ["--prompt", "It is a truth", "--prompt", "She had been forced into prudence"]
    settings = ["--max-new-tokens", "32", "--threads", "1"]
    assert cli.main(["generate", *prompts, *settings]) == 1
    assert re.search(r"identical to plain greedy decoding +│ +no ", capsys.readouterr().out)
    # Lower precision reports it, too, but doesn't assert.
    assert cli.main(["generate", *prompts, *settings, "--dtype", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is False


BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "no prompts": ([], "no prompts: give --prompt TEXT or --prompts FILE"),
    "empty prompt": (["--prompt", ""], "a prompt is empty"),
    "missing file": (["--prompts", "missing.txt"], "missing.txt"),
    "long prompt": (["--prompt", "a" * 200], "the model has 160 positions"),
    "small cache": (["--prompt", "hello", "--max-pages", "1"], "the cache is too small"),
    "drafts": (["--prompt", "a", "-k", "-1"], "drafts: expected at least 0, got -1"),
    "not a number": (["--prompt", "a", "-k", "x"], "invalid int value: 'x'"),
    "new tokens": (["--prompt", "a", "--max-new-tokens", "0"], "new tokens"),
    "page size": (["--prompt", "a", "--page-size", "0"], "page size"),
    "threads": (["--prompt", "a", "--threads", "0"], "threads"),
    "device": (["--prompt", "a", "--device", "abacus"], "device"),
    "dtype": (["--prompt", "a", "--dtype", "fp8"], "invalid choice: 'fp8'"),
    "model": (["--prompt", "a", "--model", "bronte"], "no model 'bronte': expected a directory"),
    "draft": (["--prompt", "a", "--draft", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(folder, *arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("specmeta generate: ")
    assert err.count("\n") == 1


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)
    for arguments in ([], ["sing"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_as_a_module(folder: Path) -> None:
    arguments = ["--model", str(folder), "--prompt", "hello", "--max-new-tokens", "4", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "specmeta", "generate", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert json.loads(result.stdout)["identical"] is True


# Models that can't be used, and heads that don't fit.


def edit(path: Path, **changes: Any) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))


def edit_weights(path: Path, change: Any) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


BAD_MODELS: dict[str, tuple[Any, str]] = {
    "not a Llama": (
        lambda f: edit(f / "config.json", model_type="mistral"),
        "model_type: expected 'llama', got 'mistral'",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "no config.json that can"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights in safetensors"),
    "pickled": (pickle_weights, "pytorch_model.bin is pickled and isn't read"),
    "missing weights": (
        lambda f: edit_weights(f / "model.safetensors", lambda t: t.pop("model.norm.weight")),
        "the weights don't fit config.json.*model.norm.weight",
    ),
    "other shapes": (lambda f: edit(f / "config.json", intermediate_size=40), "mlp"),
    "broken weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
        "safetensors|header",
    ),
    "rope": (
        lambda f: edit(
            f / "config.json",
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
        "rope_type: expected one of .*, got 'dynamic'",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
    "no head config": (lambda f: (f / "draft/config.json").unlink(), "draft.config.json"),
    "pickled head": (lambda f: pickle_weights(f / "draft"), "safetensors only"),
    "head's shapes": (
        lambda f: edit_weights(f / "draft/model.safetensors", lambda t: t.pop("fc.weight")),
        "fc.weight: expected .*, got no tensor",
    ),
    "d2t": (
        lambda f: edit_weights(f / "draft/model.safetensors", lambda t: t["d2t"].fill_(15)),
        "d2t: expected ids of a vocabulary of 29, got 15 .. 34",
    ),
    "aux layers": (
        lambda f: edit(f / "draft/config.json", eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        r"eagle_aux_hidden_state_layer_ids: expected .* layers 0\.\.2, got \[0, 1, 3\]",
    ),
    "too many layers": (
        lambda f: edit(f / "draft/config.json", eagle_aux_hidden_state_layer_ids=[0, 1, 9]),
        r"eagle_aux_hidden_state_layer_ids: .*\[0, 1, 9\]",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_models_that_cannot_be_used(folder: Path, tmp_path: Path, spoil: Any, message: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    spoil(copy)
    with pytest.raises(models.ModelError, match=message):
        models.load(str(copy))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 64}, "hidden size of the target: expected 32, got 64"),
        (
            {"layer": tiny_models.config(layers=1, vocab_size=31)},
            "vocabulary size: expected 29, got 31",
        ),
    ],
)
def test_heads_of_other_models(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    tiny_models.head(**changes).save_pretrained(tmp_path)
    with pytest.raises(models.ModelError, match="the draft head doesn't fit the model: " + message):
        models.load(str(folder), str(tmp_path))


def test_no_code_of_a_folder_is_run(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "evil.py").write_text("raise SystemExit('run')")
    edit(
        copy / "config.json",
        auto_map={
            "AutoConfig": "evil.Config",
            "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": ["evil.Tokenizer", None],
        },
    )
    edit(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    assert models.load(str(copy)).end_ids == frozenset()
