"""The documentation's examples run, and what it names is there."""

from __future__ import annotations

import doctest
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specmeta
from specmeta import (
    batch,
    cases,
    checking,
    cli,
    generate,
    graph,
    observe,
    ops,
    reference,
    status,
    trace,
)
from specmeta.serving import engine, pages

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What needs more than this process: where each is tested.
TESTED_ELSEWHERE = {
    "vllm.md": "test_vllm.py",  # an environment of its own
    "models.md": "test_eagle3.py",  # a model in the folder
    # A text of another length each time, here; ranks, test_parallel.py; a server, test_server.py.
    "serving.md": "test_docs.py",
}

EXAMPLE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)


def examples(page: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the code and the output of each example.

    The output is the box behind the code, else the comments behind what prints.
    """
    text = page.read_text()
    for match in EXAMPLE.finditer(text):
        comments = re.findall(r"^ *print\(.*\) +# (.*)\n", match["code"], re.MULTILINE)
        output = match["output"] or "".join(f"{comment}\n" for comment in comments)
        yield text[: match.start("code")].count("\n"), match["code"], output


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.name not in TESTED_ELSEWHERE and any(examples(p))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_examples(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's examples run one after another, in one namespace."""
    monkeypatch.setenv("COLUMNS", "100")  # of a terminal, which tables fill
    names: dict[str, Any] = {}
    for line, code, output in examples(page):
        exec(compile("\n" * line + code, page, "exec"), names)  # with the page's line numbers
        assert capsys.readouterr().out == output, f"{page.name}:{line}"


def test_examples_tested_elsewhere() -> None:
    for page, test in TESTED_ELSEWHERE.items():
        assert any(examples(ROOT / "docs" / page))
        assert f'{page}"' in (Path(__file__).parent / test).read_text(), page


def test_serving_example(capsys: pytest.CaptureFixture[str]) -> None:
    _, code, _ = next(examples(ROOT / "docs/serving.md"))
    exec(code, {})
    assert re.search(r" \d+\n$", capsys.readouterr().out)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```\n", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a forge, and the site, call the page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if ":" in target:
            assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/\S*)?", target), target
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:specmeta|tests|csrc|tools|docs)/[^`<> ]+)`", prose(page)):
        assert any(ROOT.glob(name)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a page says to type has a target, a command and options of these names."""
    makefile = (ROOT / "Makefile").read_text()
    for line in re.findall(
        r"^(?:    )?((?:\.venv/bin/)?specmeta .*|make .*)$", page.read_text(), re.M
    ):
        program, name, *words = line.partition(" #")[0].split()
        if program == "make":
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), line
            continue
        assert name in cli.COMMANDS, line
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        known = re.findall(r"--?[\w-]+", capsys.readouterr().out)
        assert [word for word in words if word.startswith("-") and word not in known] == [], line


MODULES = [
    batch,
    cases,
    checking,
    engine,
    generate,
    graph,
    observe,
    ops,
    pages,
    reference,
    status,
    trace,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_docstrings(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what an example writes
    names = {"specmeta": specmeta, "torch": torch}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


def test_public_names_are_documented() -> None:
    reference = (ROOT / "docs/reference/specmeta.md").read_text()
    for name in specmeta.__all__:
        assert getattr(specmeta, name).__doc__, name
        assert re.search(rf"::  *{name}$", reference, re.MULTILINE), name


def test_dir_shows_public_names_and_modules() -> None:
    modules = {module.name for module in pkgutil.iter_modules(specmeta.__path__)}
    shown = {name for name in dir(specmeta) if not name.startswith("_")}
    assert shown - modules == set(specmeta.__all__)
