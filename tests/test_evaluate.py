"""`specmeta eval`: the statistics, the file, what counts as right, and the command."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_metadata
import pytest
import tiny_models
import torch

from specmeta import BatchMetadata, cli, generate, models
from specmeta.evaluate import Example, FileError, HypothesisTest, is_right, read_examples
from specmeta.serving import engine as engine_module
from specmeta.serving import step as step_module

PROMPTS = ["q", "hello", "the quick brown fox jumps", "twelve chars"]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def words(folder: Path) -> list[str]:
    """By prompt: a word of its text."""
    model = models.load(str(folder))
    result = generate.generate(
        model, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=0, captured=False
    )
    return [re.findall(r"\w+", text.text)[0] for text in result.texts]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: dict[str, Any] | str | bytes) -> Path:
        encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
        file = tmp_path / "file.jsonl"
        file.write_bytes(b"\n".join(e.encode() if isinstance(e, str) else e for e in encoded))
        return file

    return write


def ask(answers: list[str], prompts: list[str] = PROMPTS) -> list[dict[str, Any]]:
    return [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]


def run(folder: Path, file: Path, *arguments: str) -> int:
    settings = ["--model", str(folder), "--max-new-tokens", str(NEW_TOKENS), "-k", "2"]
    return cli.main(["eval", str(file), *settings, *arguments])


# Statistics.


def test_theta_and_threshold() -> None:
    test = HypothesisTest(num_lines=1319, reference=74.2)
    assert (test.alpha, test.beta, test.sigma) == (0.05, 0.20, 50)
    assert f"{test.theta:.3f}" == "4.841"
    assert f"{test.threshold:.3f}" == "70.997"


def test_how_many_lines_it_takes() -> None:
    for lines in (4, 1319):
        assert HypothesisTest(lines, 50).lines_for(10) == 310
    assert HypothesisTest(310, 50).theta <= 10 < HypothesisTest(309, 50).theta


def test_what_they_depend_on() -> None:
    test = HypothesisTest(num_lines=100, reference=50)
    assert HypothesisTest(num_lines=400, reference=50).theta == pytest.approx(test.theta / 2)
    assert HypothesisTest(100, 60).threshold == pytest.approx(test.threshold + 10)
    assert HypothesisTest(100, 60).theta == test.theta
    assert HypothesisTest(100, 50, sigma=25).theta == pytest.approx(test.theta / 2)
    # Even odds of finding a loss, z = 0: the loss that just fails.
    even = HypothesisTest(100, 50, beta=0.5)
    assert even.theta == pytest.approx(even.reference - even.threshold)
    assert HypothesisTest(100, 50, alpha=0.5).threshold == pytest.approx(50)


# What is right.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris", "Paris"),
        ("It's PARIS, of course.", "paris"),
        ("in the straße", "STRASSE"),
        ("It is 42.", "42"),
        ("(42)", "42"),
        ("42, 43", "42"),
        ("$42", "42"),
        ("1,000 of them", "1,000"),
        ("3.14159", "3.14159"),
        ("New\n York", "new york"),
        ("a+b", "a+b"),
        ("what? (yes)", "(yes)"),
        ("naïve", "Naïve"),
    ],
)
def test_right(text: str, answer: str) -> None:
    assert is_right(text, [answer])
    assert is_right(text, ["nothing of the kind", answer])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "Paris"),
        ("Parisian", "Paris"),
        ("inparis", "Paris"),
        ("142", "42"),
        ("420", "42"),
        ("42.5", "42"),
        ("3.42", "42"),
        ("42,000", "42"),
        ("a_42", "42"),
        ("aab", "a+b"),
        ("axb", "a.b"),
        ("NewYork", "New York"),
        ("York New", "New York"),
        ("naïves", "naïve"),
    ],
)
def test_wrong(text: str, answer: str) -> None:
    assert not is_right(text, [answer])
    assert not is_right(text, [answer, "nothing of the kind"])


# The file.


def test_lines_of_a_file(write: Callable[..., Path]) -> None:
    file = write(
        b"\xef\xbb\xbf" + json.dumps({"prompt": "a", "answer": "b"}).encode(),
        "",
        '{"answer": ["c", "d"], "prompt": "two\\u2028lines\\n", "id": 3}\r',
        " \r",
        '{"prompt": "", "answer": "caf\u00e9"}',
        "",
    )
    assert read_examples(file) == [
        Example(1, "a", ("b",)),
        Example(3, "two\u2028lines\n", ("c", "d")),
        Example(5, "", ("caf\u00e9",)),
    ]


ANSWER = "answer: expected a string that isn't blank, or a list of them, got "
BAD_LINES: dict[str, tuple[str | bytes, str]] = {
    "not JSON": ("{'prompt': 'a'}", "no JSON: Expecting property name .*, column 2"),
    "text": ("What is it?", "no JSON: Expecting value, column 1"),
    "two objects": ('{"prompt": "a", "answer": "b"} {}', "no JSON: Extra data, column 32"),
    "deep": ("[" * 100_000, "no JSON: .*recursion"),
    "not UTF-8": (b'{"prompt": "caf\xe9"}', "no JSON: 'utf-8' codec .* position 15"),
    "list": ('["a", "b"]', "expected an object with prompt and answer"),
    "no prompt": ('{"answer": "b"}', "prompt: missing"),
    "no answer": ('{"prompt": "a", "anwser": "b"}', "answer: missing"),
    "null prompt": ('{"prompt": null, "answer": "b"}', "prompt: expected a string, got null"),
    "prompts": ('{"prompt": ["a"], "answer": "b"}', r'prompt: expected a string, got \["a"\]'),
    "number": ('{"prompt": "a", "answer": 42}', ANSWER + "42"),
    "blank": ('{"prompt": "a", "answer": " "}', ANSWER + '" "'),
    "no answers": ('{"prompt": "a", "answer": []}', ANSWER + r"\[\]"),
    "numbers": ('{"prompt": "a", "answer": ["b", 4]}', ANSWER + r'\["b", 4\]'),
    "blank ones": ('{"prompt": "a", "answer": ["b", ""]}', ANSWER + r'\["b", ""\]'),
    "long": ('{"prompt": "a", "answer": [%s0]}' % ("9, " * 50), ANSWER + r"\[9, .{50,55}\.\.\."),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_lines(line: str | bytes, message: str, write: Callable[..., Path]) -> None:
    file = write(*ask(PROMPTS), "", line)
    with pytest.raises(FileError) as error:
        read_examples(file)
    assert re.fullmatch(f"{re.escape(str(file))}, line 6: {message}.*", str(error.value))


def test_files_without_lines(write: Callable[..., Path]) -> None:
    for lines in ([], ["", " "]):
        with pytest.raises(FileError, match=r"file.jsonl: no lines"):
            read_examples(write(*lines))


# The command.

WARNING = (
    "specmeta eval: warning: lines: 4, which find no loss below 87.9 percent: 310 find one of 10\n"
)


def test_no_warning_where_lines_are_enough(
    folder: Path,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(HypothesisTest, "theta", 10.0)
    assert run(folder, write(*ask(PROMPTS)), "--reference", "0") == 0
    assert capsys.readouterr().err == ""


def test_table(
    folder: Path,
    words: list[str],
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(*ask([words[0], words[1].upper(), "zz9", words[3]]))
    assert run(folder, file) == 0
    out, err = capsys.readouterr()
    assert err == WARNING
    for pattern in (
        r"run on +│ +cpu, fp32, threads: 1 ",
        r"lines +│ +4 ",
        r"tokens a pass +│ +\d\.\d\d ",
        r"acceptance +│ +\d+\.\d\d% \(\d+/\d+ tokens\) ",
        r"alpha, beta, sigma +│ +0\.05, 0\.20, 50 ",
        r"reference \(plain greedy decoding\) +│ +75\.000 ",
        r"theta +│ +87\.910 ",
        r"threshold +│ +16\.846 ",
        r"accuracy +│ +75\.000 ",
        r"passed +│ +yes ",
    ):
        assert re.search(pattern, out), pattern


def test_json(
    folder: Path,
    words: list[str],
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(*ask(["zz9", words[1], "zz9", words[3]]), "")
    assert run(folder, file, "--reference", "99.5", "--json") == 0
    out, err = capsys.readouterr()
    assert err == WARNING
    report = json.loads(out)
    assert [line["right"] for line in report["lines"]] == [False, True, False, True]
    assert [line["line"] for line in report["lines"]] == [1, 2, 3, 4]
    assert words[2] in report["lines"][2]["text"]
    assert report["accuracy"] == 50
    assert report["reference"] == 99.5
    assert report["reference_is_plain_greedy"] is False
    test = HypothesisTest(4, 99.5)
    assert (report["theta"], report["threshold"]) == (test.theta, test.threshold)
    assert report["passed"] is True
    # What the same prompts give elsewhere.
    result = generate.generate(
        models.load(str(folder)), PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=2, captured=False
    )
    assert (report["accepted"], report["drafted"]) == (result.accepted, result.drafted)
    assert report["tokens_per_pass"] == result.tokens_per_pass


def test_at_the_threshold(
    folder: Path, words: list[str], write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(*ask([words[0], "zz9", "zz9", "zz9"]))
    for threshold, code in ((25.0, 0), (25.001, 1)):
        monkeypatch.setattr(HypothesisTest, "threshold", threshold)
        assert run(folder, file, "--reference", "50") == code


def test_a_spoilt_text_fails_the_test(
    folder: Path,
    words: list[str],
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Nobody tells the command how good the model is: it finds that out without speculation.
    file = write(*ask(words))

    class Silent(engine_module.Engine):
        def run(self) -> None:
            super().run()
            for request in self.requests:
                request.token_ids = []

        def submit(self, *args: Any, **settings: Any) -> Any:
            request = super().submit(*args, **settings)
            self.requests = [*getattr(self, "requests", []), request]
            return request

    monkeypatch.setattr(engine_module, "Engine", Silent)
    assert run(folder, file, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["accuracy"], report["reference"], report["passed"]) == (0, 100, False)
    assert report["reference_is_plain_greedy"] is True
    assert report["threshold"] > 0
    assert run(folder, file) == 1
    assert re.search(r"passed +│ +no ", capsys.readouterr().out)


def test_a_text_that_ends_with_an_error(
    folder: Path, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_tokens(batch: BatchMetadata, target_tokens: Any) -> None:
        broken_metadata._accept_greedy(batch, target_tokens)
        batch.accepted_tokens.fill_(-1)

    monkeypatch.setattr(BatchMetadata, "accept_greedy", without_tokens)
    with pytest.raises(RuntimeError, match="tokens that came out: expected at least one"):
        run(folder, write(*ask(PROMPTS)))


def test_more_lines_than_rows(
    folder: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [PROMPTS[i % 4] + "x" * i for i in range(19)]
    file = write(*ask(["zz9"] * 19, prompts))
    settings = ["--max-new-tokens", "3", "--reference", "0", "--json"]
    assert run(folder, file, *settings) == 0
    report = json.loads(capsys.readouterr().out)
    assert [len(line["text"]) for line in report["lines"]] == [3] * 19


def test_chat_models(
    folder: Path,
    tmp_path: Path,
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }} so ")
    texts = []
    for prompt, options in (("hello", []), ("hello so ", ["--raw"]), ("hello", ["--raw"])):
        file = write(*ask(["zz9"], [prompt]))
        assert run(copy, file, "--reference", "0", "--json", *options) == 0
        texts.append(json.loads(capsys.readouterr().out)["lines"][0]["text"])
    assert texts[0] == texts[1] != texts[2]


def test_without_drafts(
    folder: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, write(*ask(PROMPTS)), "-k", "0", "--reference", "0") == 0
    assert re.search(r"acceptance +│ +- ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "drafter"),
    [
        ([], "one-model Eagle"),
        (["--two-model"], "two-model Eagle"),
        (["--draft-model", "FOLDER"], "two-model Llama: FOLDER"),
        (["-k", "0"], "none"),
    ],
)
def test_every_drafter(
    folder: Path,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    drafter: str,
) -> None:
    drafts: list[models.Model | None] = []
    engine_class = engine_module.Engine

    def make_engine(model: models.Model, **settings: Any) -> engine_module.Engine:
        drafts.append(settings["draft"])
        return engine_class(model, **settings)

    monkeypatch.setattr(engine_module, "Engine", make_engine)
    arguments = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    file = write(*ask(["zz9"] * 4))
    assert run(folder, file, *arguments, "--reference", "0", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    plain = generate.generate(
        models.load(str(folder)), PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=0, captured=False
    )
    assert [line["text"] for line in report["lines"]] == [text.text for text in plain.texts]
    assert report["two_model"] is ("--two-model" in arguments)
    with_llama = "--draft-model" in arguments
    assert report["draft_model"] == (str(folder) if with_llama else None)
    assert [draft is not None for draft in drafts] == [with_llama]
    if with_llama:  # a drafter that is the model itself is always right
        assert report["accepted"] == report["drafted"] != [0, 0]
    assert run(folder, file, *arguments, "--reference", "0") == 0
    out = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    assert "drafter" + drafter.replace("FOLDER", str(folder)).replace(" ", "") in out


@pytest.mark.parametrize("owner", [step_module, engine_module.Engine])
def test_lack_of_memory(
    owner: Any,
    folder: Path,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def allocate(*_: object, **__: object) -> torch.Tensor:
        return torch.zeros(2**51)  # no machine has an address for it

    monkeypatch.setattr(owner, "KVCache" if owner is step_module else "step", allocate)
    with pytest.raises(SystemExit, match="2"):
        run(folder, write(*ask(PROMPTS)))
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch("specmeta eval: not enough memory: .*allocate .*\n", err)


def test_a_draft_model_of_another_vocabulary(
    folder: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(folder, write(*ask(PROMPTS)), "--draft-model", "austen")
    assert capsys.readouterr().err == (
        "specmeta eval: draft: expected the target's vocabulary of 29, got 1024\n"
    )


def test_a_prompt_too_long_for_the_draft_model(
    folder: Path, tmp_path: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    shutil.copytree(folder, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    file = write(*ask(["a", "a"], ["a", "a" * 70]))
    with pytest.raises(SystemExit, match="2"):
        run(folder, file, "--draft-model", str(short))
    assert capsys.readouterr().err == (
        f"specmeta eval: {file}, line 2: a prompt of 70 tokens and 12 new ones: the limit is 60\n"
    )


BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "bronte"], "no model 'bronte'"),
    "draft model": (["--draft-model", "bronte"], "no model 'bronte'"),
    "two drafters": (
        ["--two-model", "--draft-model", "austen"],
        "argument --draft-model: not allowed with argument --two-model",
    ),
    "draft": (["--draft", "nowhere"], "draft head: nowhere"),
    "reference": (["--reference", "101"], r"reference: expected percent, 0 \.\. 100, got 101"),
    "negative": (["--reference", "-0.1"], r"reference: expected percent, 0 \.\. 100, got -0.1"),
    "nan": (["--reference", "nan"], r"reference: expected percent, 0 \.\. 100, got nan"),
    "new tokens": (["--max-new-tokens", "0"], r"max_new_tokens: expected 1 \.\. 160, got 0"),
    "drafts": (["-k", "65"], r"num_drafts: expected 0 \.\. 64, got 65"),
    "less": (["-k", "-1"], r"num_drafts: expected 0 \.\. 64, got -1"),
    "page": (["--page-size", "0"], r"page_size: expected 1 \.\. 160, got 0"),
    "threads": (["--threads", "0"], r"threads: expected 1 \.\. "),
    "device": (["--device", "abacus"], "device: expected cpu, cuda or cuda:N, got 'abacus'"),
    "another file": (["other.jsonl"], "unrecognized arguments: other.jsonl"),
}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Engine", None)
    monkeypatch.setattr(generate, "plain_greedy", None)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line(
    folder: Path,
    arguments: list[str],
    message: str,
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(folder, write(*ask(PROMPTS)), *arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"specmeta eval: {message}.*\n", err)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a"}, "answer: missing"),
        ({"prompt": "", "answer": "a"}, "a prompt is empty"),
        ({"prompt": "a\udcff", "answer": "a"}, "a prompt isn't valid Unicode: "),
        (
            {"prompt": "a" * 149, "answer": "a"},
            "a prompt of 149 tokens and 12 new ones: the model has 160 positions",
        ),
    ],
)
def test_a_bad_line_before_anything_is_run(
    folder: Path,
    line: dict[str, str],
    message: str,
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(*ask(PROMPTS), line)
    with pytest.raises(SystemExit, match="2"):
        run(folder, file)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"specmeta eval: {file}, line 5: {message}")
    assert err.count("\n") == 1


def test_a_file_that_is_not_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(SystemExit, match="2"):
            run(folder, file)
        err = capsys.readouterr().err
        reason = "Is a directory" if file == tmp_path else "No such file or directory"
        assert err == f"specmeta eval: {file}: {reason}\n"


def test_at_the_models_last_position(
    folder: Path, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(*ask(["zz9"], ["a" * (160 - NEW_TOKENS)]))
    assert run(folder, file, "--reference", "0", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["lines"][0]["text"]) == NEW_TOKENS


def test_a_model_without_a_head(
    folder: Path,
    tmp_path: Path,
    write: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone, ignore=shutil.ignore_patterns("draft"))
    for options, message in (
        ([], "num_drafts: expected 0 without a head, got 2"),
        (["--two-model"], f"two_model: {alone} has no draft head"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(alone, write(*ask(PROMPTS)), *options)
        assert capsys.readouterr().err == f"specmeta eval: {message}\n"


@pytest.mark.parametrize("package", ["transformers", "safetensors", "rich"])
def test_a_missing_package_is_one_line(
    package: str,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["eval", str(write(*ask(PROMPTS)))])
    expected = f"specmeta eval: {package} is missing: pip install 'specmeta[generate]'\n"
    assert capsys.readouterr().err == expected


def test_progress_on_a_terminal(
    folder: Path,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert run(folder, write(*ask(PROMPTS)), "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["passed"] is True
    for name in ("speculative", "plain greedy"):
        assert re.search(rf"{name}.*4/4", err), name
