"""The command line: output, exit codes, errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import broken_metadata
import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

import specmeta
from specmeta import BatchMetadata, _command, _generate, _library, cli, models
from specmeta.serving import scheduler


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
    for name in ("target passes", "tokens a pass", "acceptance by position"):
        assert name in table
    for how in ("with", "without"):
        assert re.search(rf"tokens/s {how} speculation +│ +\d+\.\d ", table)
    assert re.search(r"tokens +│ +12 ", table)
    assert re.search(r"identical to plain greedy decoding +│ +yes", table)


def test_no_drafts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is called speculation, and the prompts are run once."""
    assert run(folder, "--prompt", "hello", "-k", "0") == 0
    out = capsys.readouterr().out
    assert re.search(r"drafts a pass +│ +0 ", out)
    assert re.search(r"tokens/s without speculation +│ +\d+\.\d ", out)
    assert "with speculation" not in out


def test_a_chat_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }} so ")
    assert run(copy, "--prompt", "hello") == 0
    assert re.match(r"hello\n.{12}\n", capsys.readouterr().out)
    assert run(copy, "--prompt", "hello so ", "--raw") == 0
    assert re.match(r"hello so .{12}\n", capsys.readouterr().out)
    assert run(copy, "--prompt", "hello", "--prompt", "you") == 0
    assert re.match(r"\[1\] hello\n.{12}\s*\n\[2\] you\n.{12}", capsys.readouterr().out)


def test_several_prompts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"second one\n\nthird\n")
    assert run(folder, "--prompt", "first", "--prompts", str(file)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for index, prompt in enumerate(("first", "second one", "third"), 1):
        assert re.search(rf"^\[{index}\] {prompt}.{{12}}\s*$", out, re.MULTILINE)
    assert re.search(r"tokens +│ +36 ", out)


def test_lines_of_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\x0cpage\r\n \r\ntwo\u2028lines\rhere\n\x85last".encode())
    assert run(folder, "--prompts", str(file), "-k", "0", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    prompts = [text["prompt"] for text in report["texts"]]
    assert prompts == ["one\x0cpage", "two\u2028lines\rhere", "\x85last"]


def test_json(folder: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    arguments = ["--prompt", "hello", "--prompt", "world", "-k", "3", "--json", "--device", device]
    assert run(folder, *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert [text["prompt"] for text in report["texts"]] == ["hello", "world"]
    assert [len(text["token_ids"]) for text in report["texts"]] == [12, 12]
    assert report["identical"] is True
    assert report["device"] == device
    assert report["tokens"] == 24
    assert len(report["accepted"]) == len(report["drafted"]) == report["num_drafts"] == 3
    assert report["tokens_per_second"] > 0
    assert report["tokens_per_second_without_speculation"] > 0


def test_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    arguments = ["generate", "--model", str(folder), "--prompt", "a", "--max-new-tokens", "2"]
    for options, threads in (([], 1), (["--threads", "3"], 3)):
        assert cli.main([*arguments, "--json", *options]) == 0
        assert chosen.pop() == threads
        assert json.loads(capsys.readouterr().out)["threads"] == threads


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
    monkeypatch.setattr(scheduler, "_find_fault", lambda *_: "")  # it would notice
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
    "missing file": (
        ["--prompts", "missing.txt"],
        "prompts: missing.txt: No such file or directory\n",
    ),
    "long prompt": (["--prompt", "a" * 200], "the model has 160 positions"),
    "not Unicode": (["--prompt", "a\udcff"], "a prompt isn't valid Unicode"),
    "drafts": (["--prompt", "a", "-k", "160"], "num_drafts: expected 0 .. 64, got 160"),
    "not a number": (["--prompt", "a", "-k", "x"], "invalid int value: 'x'"),
    "new tokens": (
        ["--prompt", "a", "--max-new-tokens", "0"],
        "max_new_tokens: expected 1 .. 160, got 0",
    ),
    "page size": (["--prompt", "a", "--page-size", "161"], "page_size: expected 1 .. 160"),
    "no threads": (["--prompt", "a", "--threads", "0"], "threads: expected 1 .. "),
    "threads": (
        ["--prompt", "a", "--threads", str(10**9)],
        f"threads: expected 1 .. {os.cpu_count()}, got 1000000000",
    ),
    "device": (
        ["--prompt", "a", "--device", "abacus"],
        "device: expected cpu, cuda or cuda:N, got 'abacus'",
    ),
    "meta": (["--prompt", "a", "--device", "meta"], "device: expected cpu, cuda or cuda:N"),
    "cpu:0": (["--prompt", "a", "--device", "cpu:0"], "device: expected cpu, cuda or cuda:N"),
    "dtype": (["--prompt", "a", "--dtype", "fp8"], "invalid choice: 'fp8'"),
    "model": (["--prompt", "a", "--model", "bronte"], "no model 'bronte': expected a directory"),
    "draft": (["--prompt", "a", "--draft", "nowhere"], "nowhere/config.json: no such file"),
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


@pytest.mark.parametrize(
    ("torch_cuda", "gpus", "kernels", "message"),
    [
        (None, 0, "13.0", "cuda:1: this torch has no CUDA"),
        ("13.0", 0, "13.0", "cuda:1: GPUs that torch can use: 0"),
        ("13.0", 1, "13.0", "cuda:1: GPUs that torch can use: 1"),
        ("13.0", 2, "", "cuda:1: the library has no CUDA kernels: SPECMETA_CUDA=1 make build"),
    ],
)
def test_cuda_that_cannot_be_used(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    torch_cuda: str | None,
    gpus: int,
    kernels: str,
    message: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(_library, "build_info", lambda: _library.BuildInfo("gcc", kernels, ""))
    with pytest.raises(SystemExit) as exit_:
        run(folder, "--prompt", "a", "--device", "cuda:1")
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"specmeta generate: device: {message}")


def test_a_file_that_is_not_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(SystemExit) as exit_:
        run(folder, "--prompts", str(file))
    assert exit_.value.code == 2
    assert f"{file}: 'utf-8' codec" in capsys.readouterr().err


def test_a_file_without_prompts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\n \n")
    with pytest.raises(SystemExit):
        run(folder, "--prompts", str(file))
    assert capsys.readouterr().err == f"specmeta generate: prompts: {file}: no prompts in it\n"


def test_undecodable_bytes(folder: Path) -> None:
    command = [sys.executable, "-m", "specmeta", "generate", "--model", str(folder), "--prompt"]
    result = subprocess.run([*command, b"caf\xe9"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch("specmeta generate: a prompt isn't valid Unicode: .*\n", result.stderr)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    assert capsys.readouterr().out.startswith("specmeta ")


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)
    for arguments in ([], ["sing"], *([command, "--sing"] for command in cli.COMMANDS)):
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


def edit_layer(folder: Path, **changes: Any) -> None:
    path = folder / "draft/config.json"
    layer = json.loads(path.read_text())["transformer_layer_config"]
    edit(path, transformer_layer_config=layer | changes)


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
    "deep config": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        "no config.json that can be read: RecursionError",
    ),
    "config's types": (lambda f: edit(f / "config.json", hidden_size="x"), "'hidden_size'"),
    "no heads": (lambda f: edit(f / "config.json", num_attention_heads=0), "ZeroDivisionError"),
    "activation": (lambda f: edit(f / "config.json", hidden_act="x"), "KeyError: 'x'"),
    "dtype": (lambda f: edit(f / "config.json", dtype="float99"), "AttributeError: .*'float99'"),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "generation_config.json",
    ),
    "generation config": (lambda f: (f / "generation_config.json").write_text("[]"), "TypeError"),
    "end": (
        lambda f: edit(f / "generation_config.json", eos_token_id="x"),
        "eos_token_id: expected an id or a list of ids, got 'x'",
    ),
    "ends": (
        lambda f: edit(f / "generation_config.json", eos_token_id=[1, True]),
        r"eos_token_id: expected an id or a list of ids, got \[1, True\]",
    ),
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
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "no tokenizer: KeyError: ",
    ),
    "another's tokenizer": (
        lambda f: tiny_models.tokenizer(tiny_models.LETTERS + "!").save_pretrained(f),
        "the tokenizer doesn't fit the model: expected ids below 29, got 29",
    ),
    "head's activation": (lambda f: edit_layer(f, hidden_act="x"), "draft head: .*: KeyError: 'x'"),
    "broken head": (
        lambda f: (f / "draft/model.safetensors").write_bytes(b"x" * 99),
        "draft head: .*SafetensorError",
    ),
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
    with pytest.raises(models.ModelError, match=message) as error:
        models.load(str(copy))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("transformer_layer_config", [], "expected an object, got []"),
        ("transformer_layer_config", None, "expected an object, got None"),
        ("speculators_config", 3, "expected an object, got 3"),
        ("eagle_config", "x", "expected an object, got 'x'"),
        ("draft_vocab_size", "x", "expected a positive integer, got 'x'"),
        ("draft_vocab_size", 0, "expected a positive integer, got 0"),
        ("draft_vocab_size", 2.0, "expected a positive integer, got 2.0"),
        ("target_hidden_size", True, "expected a positive integer, got True"),
        ("eagle_aux_hidden_state_layer_ids", 3, "expected a list of integers, got 3"),
        ("eagle_aux_hidden_state_layer_ids", [0, "1"], "expected a list of integers, got [0, '1']"),
        ("hidden_size", None, "expected a positive integer, got None"),
        ("model_type", "mistral", "expected 'llama', got 'mistral'"),
        ("num_hidden_layers", 2, "expected 1, got 2"),
        ("proposal_methods", [1], "expected a list of objects, got [1]"),
        ("architectures", "x", "expected a list of strings, got 'x'"),
    ],
)
def test_a_heads_config(
    folder: Path, tmp_path: Path, key: str, value: object, message: str
) -> None:
    config = json.loads((folder / "draft/config.json").read_text())
    owners = {
        "hidden_size": config["transformer_layer_config"],
        "model_type": config["transformer_layer_config"],
        "num_hidden_layers": config["transformer_layer_config"],
        "proposal_methods": config["speculators_config"],
        "architectures": config["speculators_config"]["verifier"],
    }
    owners.get(key, config)[key] = value
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(models.ModelError) as error:
        models.load(str(folder), str(tmp_path))
    assert str(error.value).endswith(f"{file}: {key}: {message}")


def test_a_heads_config_is_an_object(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(models.ModelError, match=r"config.json: expected an object, got \[\]"):
        models.load(str(folder), str(tmp_path))


def test_a_name_that_cannot_be_a_path() -> None:
    with pytest.raises(models.ModelError, match="File name too long"):
        models.load("x" * 5000)


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


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_generate, "main", interrupt)
    assert cli.main(["generate", "--prompt", "a"]) == 130


# A piece at a time, at once by rich, at the end by print, and by argparse, which ignores errors.
WRITERS = {
    "generate": ["generate", "--prompt", "a", "--max-new-tokens", "4"],
    "explain": ["explain", str(Path(__file__).parent / "cases" / "corrupt_counts.json")],
    "doctor": ["doctor"],
    "help": ["--help"],
}


@pytest.mark.parametrize("arguments", WRITERS.values(), ids=WRITERS.keys())
@pytest.mark.parametrize(
    ("output", "code", "message"),
    [("a closed pipe", 141, ""), ("/dev/full", 2, "specmeta: No space left on device\n")],
)
def test_an_output_that_takes_nothing(
    arguments: list[str], output: str, code: int, message: str
) -> None:
    if output == "/dev/full":
        file = os.open(output, os.O_WRONLY)
    else:
        reading, file = os.pipe()
        os.close(reading)
    command = [sys.executable, "-m", "specmeta", *arguments]
    # Unbuffered, argparse would hide it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, env=env
    )
    os.close(file)
    assert (result.returncode, result.stderr) == (code, message)


def test_errors_that_nobody_reads() -> None:
    reading, file = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "specmeta", "sing"]
    assert subprocess.run(command, stdout=file, stderr=file, check=False).returncode == 2
    os.close(file)


def test_other_errors_of_files_stay_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_generate, "main", fail)
    with pytest.raises(PermissionError):
        cli.main(["generate"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"specmeta {specmeta.__version__}\n"


@pytest.mark.parametrize("package", ["transformers", "safetensors", "rich"])
def test_a_missing_package_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "--prompt", "a"])
    expected = f"specmeta generate: {package} is missing: pip install 'specmeta[generate]'\n"
    assert capsys.readouterr().err == expected


def test_arguments_of_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    for arguments, message in (
        ({"device": "cuda"}, "device: cuda: this torch has no CUDA: install a CUDA build of torch"),
        ({"device": torch.device("cuda", 1)}, "device: cuda:1: this torch has no CUDA"),
        ({"device": "abacus"}, "device: expected cpu, cuda or cuda:N, got 'abacus'"),
        ({"dtype": "float32"}, "dtype: expected a torch.dtype of floating point, got 'float32'"),
        ({"dtype": torch.int8}, "dtype: .* got torch.int8"),
    ):
        with pytest.raises(models.ModelError, match=message):
            models.load(str(folder), **arguments)
    with pytest.raises(models.ModelError, match=r"model: expected what .* returns, got str"):
        specmeta.generate.generate("austen", ["a"])  # type: ignore[arg-type]


def test_the_library_keeps_transformers_quiet(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logging = transformers.utils.logging
    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.enable_progress_bar()
    logging.set_verbosity_warning()
    logging.enable_propagation()
    try:
        model = models.load(str(folder))
        assert logging.is_progress_bar_enabled()  # the user's setting
        model.tokenizer.model_max_length = 10
        with pytest.raises(specmeta.generate.RequestError, match="positions"):
            specmeta.generate.generate(model, ["a" * 200])
    finally:
        logging.disable_propagation()
        logging.set_verbosity(verbosity)
        if not enabled:
            logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_lines_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_command, "LINE_SECONDS", 0.01)
    with _command.progress_bar() as progress:
        task = progress.add_task("shapes")
        progress.update(task, completed=3, total=20)
        deadline = time.monotonic() + 20
        err = ""
        while "\n" not in err and time.monotonic() < deadline:
            time.sleep(0.01)
            err += capsys.readouterr().err
    assert re.match(r"shapes: 3 of 20, \d+ s\n", err)
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
