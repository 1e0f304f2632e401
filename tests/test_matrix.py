"""`specmeta matrix`: on a tiny model, what it runs, what it finds wrong, and what it prints."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import broken_metadata
import pytest
import tiny_models
import torch
from transformers import LlamaForCausalLM

from specmeta import BatchMetadata, cli, matrix, models
from specmeta.matrix import Result, WrongText, find_faults, first_layers
from specmeta.serving import engine as engine_module
from specmeta.serving import scheduler
from specmeta.serving import step as step_module
from specmeta.serving.attention import ATTENTION_NAME
from specmeta.serving.request import RequestError

NAMES = ["none", "one-model Eagle", "two-model Eagle", "two-model Llama"]
run = matrix.run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head knows some of its texts."""
    folder = tiny_models.save(tmp_path_factory.mktemp("tiny"))
    target, tokenizer = tiny_models.target(), tiny_models.tokenizer()
    texts = []
    for prompt in matrix.PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        mask = torch.ones_like(ids)
        output = target.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
        texts.append(output[0, -26:].tolist())
    head = tiny_models.head(draft_vocab_size=len(tiny_models.LETTERS))
    tiny_models.train(head, target, texts)
    head.save_pretrained(folder / "draft")
    return folder


@pytest.fixture
def model(folder: Path) -> models.Model:
    return models.load(str(folder))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command run few combinations."""
    few = functools.partial(run, captured=[False], batches=[4])
    monkeypatch.setattr(matrix, "run", few)


def test_all_texts_are_equal(model: models.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[dict[str, Any]] = []
    engine_class = engine_module.Engine

    def make_engine(model: models.Model, **settings: Any) -> engine_module.Engine:
        engines.append(settings)
        return engine_class(model, **settings)

    monkeypatch.setattr(engine_module, "Engine", make_engine)
    results = list(run(model, max_new_tokens=12, captured=[False], batches=[1, 16]))
    assert find_faults(results) == []
    assert [(r.drafter, r.overlap, r.batch) for r in results] == list(
        itertools.product(NAMES, [True, False], [1, 16])
    )
    assert {r.num_texts for r in results if r.batch == 1} == {4}
    assert {r.num_texts for r in results if r.batch == 16} == {16}
    for result in results:
        assert result.seconds > 0
        if result.drafter == "none":
            assert result.acceptance is None
            assert result.tokens_per_pass == 1
        else:
            assert result.acceptance is not None
            assert 0 < result.acceptance < 1
            assert len(result.drafted) == len(result.accepted) == 4
            assert result.tokens_per_pass > 1

    # What they ran as is what they say.
    assert [settings["overlap"] for settings in engines] == [True, False] * 4
    assert [settings["captured"] for settings in engines] == [False] * 8
    assert [settings["num_drafts"] for settings in engines] == [0] * 2 + [4] * 6
    assert [settings.get("two_model", False) for settings in engines] == [False] * 4 + [
        True,
        True,
        False,
        False,
    ]
    assert ["draft" in settings for settings in engines] == [False] * 6 + [True] * 2
    assert {(s["page_size"], s["draft_page_size"]) for s in engines} == {(16, 8)}


def test_captured(model: models.Model) -> None:
    # The first two drafters alone: a capture takes a second.
    all_results = run(model, max_new_tokens=4, captured=[True, False], batches=[1])
    results = list(itertools.islice(all_results, 8))
    assert find_faults(results) == []
    assert [r.captured for r in results] == [True, True, False, False] * 2
    assert [r.drafter for r in results[::4]] == NAMES[:2]
    captured = [r.accepted for r in results if r.captured]
    assert captured == [r.accepted for r in results if not r.captured]


def test_the_prompts_are_16_different_ones() -> None:
    assert len(set(matrix.PROMPTS)) == 16
    assert matrix.BATCHES == (1, 4, 16)


def test_first_layers(model: models.Model) -> None:
    small = first_layers(model).target
    assert isinstance(small, LlamaForCausalLM)
    assert len(small.model.layers) == small.config.num_hidden_layers == 1
    assert len(model.target.model.layers) == model.target.config.num_hidden_layers == 3
    weights = dict(model.target.named_parameters())
    for name, weight in small.named_parameters():
        assert weight.data_ptr() == weights[name].data_ptr(), name
    assert small.config._attn_implementation == ATTENTION_NAME
    # What it computes is what the model computes without its other layers.
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for llama in (small, model.target):
        llama.set_attn_implementation("sdpa")
    del model.target.model.layers[1:]
    with torch.no_grad():
        assert torch.equal(small(ids).logits, model.target(ids).logits)


@pytest.mark.usefixtures("short")
def test_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--model", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r" drafter +┃ overlap ┃ captured ┃ batch ┃ a pass ┃ acceptance ┃ equal ", out)
    assert "24 tokens a prompt" in re.sub(r"\s+", " ", out)
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [cell[0] for cell in cells] == [name for name in NAMES for _ in range(2)]
    assert [cell[1:4] for cell in cells] == [["on", "no", "4"], ["off", "no", "4"]] * 4
    assert [cell[4:6] for cell in cells[:2]] == [["1.00", "-"]] * 2
    assert all(re.fullmatch(r"\d\.\d\d", cell[4]) for cell in cells)
    assert all(re.fullmatch(r"\d+\.\d\d%", cell[5]) for cell in cells[2:])
    assert [cell[6] for cell in cells] == ["4/4"] * 8
    assert out.endswith("every text is that of plain greedy decoding\n")


@pytest.mark.usefixtures("short")
def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--model", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert report["faults"] == []
    assert report["max_new_tokens"] == {str(folder): 24}
    assert (report["page_size"], report["draft_page_size"]) == (16, 8)
    assert [c["drafter"] for c in report["combinations"][::2]] == NAMES
    last = report["combinations"][-1]
    assert last["seconds"] > 0
    assert last["acceptance"] == sum(last["accepted"]) / sum(last["drafted"])
    assert last["tokens_per_pass"] == 1 + sum(last["accepted"]) / last["target_passes"]


@pytest.mark.usefixtures("short")
def test_a_wrong_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BatchMetadata, "accept_greedy", broken_metadata.without_commit)
    monkeypatch.setattr(scheduler, "_find_fault", lambda *_: "")  # it would notice
    assert cli.main(["matrix", "--model", str(folder)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"│ one-model Eagle │ on .* │ +[0-3]/4 │", out)
    assert re.search(
        r"one-model Eagle, overlap, eager, batch 4: \d of 4 texts differ; "
        r"'.*': expected '.{24}', got '.*'\n",
        out,
    )
    assert cli.main(["matrix", "--model", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["faults"]
    wrong = [c for c in report["combinations"] if c["differences"]]
    assert {c["drafter"] for c in wrong} == set(NAMES[1:])


@pytest.mark.usefixtures("short")
def test_a_text_that_ends_with_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_tokens(batch: BatchMetadata, target_tokens: torch.Tensor) -> None:
        broken_metadata._accept_greedy(batch, target_tokens)
        batch.accepted_tokens.fill_(-1)

    monkeypatch.setattr(BatchMetadata, "accept_greedy", without_tokens)
    assert cli.main(["matrix", "--model", str(folder)]) == 1
    assert "got 'tokens that came out: expected at least one, got 0'" in capsys.readouterr().out


RESULT = Result(
    "tiny",
    "one-model Eagle",
    *(True, True, 4, 4),
    accepted=[3, 2],
    drafted=[5, 5],
    target_passes=5,
)


def test_faults() -> None:
    alone = replace(RESULT, overlap=False)
    others = [replace(r, captured=False, accepted=[3, 1]) for r in (RESULT, alone)]
    # Captured and eager, and batches of different sizes, need not accept the same drafts.
    assert find_faults([RESULT, alone, *others]) == []
    difference = WrongText("a", "b", "c")
    wrong = replace(RESULT, differences=[difference] * 2)
    assert find_faults([wrong, alone]) == [
        "tiny: one-model Eagle, overlap, captured, batch 4: 2 of 4 texts differ; "
        "'a': expected 'b', got 'c'"
    ]
    wrong = replace(alone, differences=[difference])
    assert len(find_faults([RESULT, wrong])) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"accepted": [2, 2]},
        {"accepted": [4, 1]},  # as many, at other positions
        {"drafted": [6, 5]},
        {"accepted": [4, 2]},  # more is as wrong as less
    ],
)
def test_overlap_must_not_change_the_acceptance(changes: dict[str, list[int]]) -> None:
    for changed, other in ((True, False), (False, True)):
        results = [replace(RESULT, overlap=changed, **changes), replace(RESULT, overlap=other)]
        (fault,) = find_faults(results)
        assert fault.startswith("tiny: one-model Eagle, overlap, captured, batch 4: accepted ")


def test_another_acceptance_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [RESULT, replace(RESULT, overlap=False, accepted=[4, 2])]
    monkeypatch.setattr(matrix, "run", lambda *_, **__: iter(results))
    assert cli.main(["matrix", "--model", str(folder)]) == 1
    assert "expected [4, 2] of [5, 5] as without overlap, got [3, 2] of [5, 5]" in re.sub(
        r"\s+", " ", capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["austen", "smollm2"])
def test_full(name: str, model: models.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    lengths: list[int] = []

    def load(name: str, device: torch.device) -> models.Model:
        loaded.append(name)
        return replace(model, name=name)

    def count(model: models.Model, max_new_tokens: int) -> list[Result]:
        lengths.append(max_new_tokens)
        return []

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(matrix, "run", count)
    assert cli.main(["matrix", "--full", "--model", name]) == 0
    assert loaded == (["austen", "smollm2"] if name == "austen" else ["smollm2"])
    assert lengths == ([128, 32] if name == "austen" else [32])


BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "bronte"], "no model 'bronte': expected a directory"),
    "threads": (["--threads", "0"], "threads: expected 1 .. "),
    "device": (["--device", "abacus"], "device: expected cpu, cuda or cuda:N, got 'abacus'"),
    "argument": (["file"], "unrecognized arguments: file"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["matrix", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"specmeta matrix: {message}")
    assert err.count("\n") == 1


def test_models_that_cannot_be_used(
    model: models.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=r"a prompt of 33 tokens and 128 new ones: .* has 160"):
        next(run(model, max_new_tokens=128))
    headless = replace(model, name="tiny", head=None)
    monkeypatch.setattr(models, "load", lambda *_, **__: headless)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["matrix"])
    assert capsys.readouterr().err == "specmeta matrix: tiny has no draft head\n"


@pytest.mark.parametrize("owner", [step_module, engine_module.Engine])
def test_lack_of_memory(
    owner: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def allocate(*_: object, **__: object) -> torch.Tensor:
        return torch.zeros(2**51)  # no machine has an address for it

    monkeypatch.setattr(owner, "KVCache" if owner is step_module else "step", allocate)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["matrix", "--model", str(folder)])
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch("specmeta matrix: not enough memory: .*allocate .*\n", err)


@pytest.mark.parametrize("package", ["transformers", "safetensors", "rich"])
def test_a_missing_package_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["matrix"])
    expected = f"specmeta matrix: {package} is missing: pip install 'specmeta[generate]'\n"
    assert capsys.readouterr().err == expected


def test_progress_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    results = [replace(RESULT, overlap=overlap) for overlap in (True, False)]
    monkeypatch.setattr(matrix, "run", lambda *_, **__: iter(results))
    assert cli.main(["matrix", "--model", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["faults"] == []
    assert "combinations" in err
    assert "2/48" in err
