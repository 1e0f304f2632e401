"""The documentation runs: the README's example, and those of the docstrings."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import specmeta
from specmeta import batch, generate, graph, ops
from specmeta.serving import engine, pages

ROOT = Path(__file__).parent.parent


def test_readme_example(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(blocks[0], {})
    expected = re.search(r"# (\[[\d, ]+\])\n$", blocks[0])
    assert expected
    assert capsys.readouterr().out.strip() == expected[1]


def test_serving_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/serving.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})
    assert re.search(r" \d+\n$", capsys.readouterr().out)


def test_pages_with_examples_have_a_test() -> None:
    tests = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    runs = [text for text in tests if "```python" in text]
    for page in (ROOT / "docs").glob("*.md"):
        if "```python" in page.read_text():
            assert any(f'{page.name}"' in text for text in runs), page.name


def test_links() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert ":" in target or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("module", [batch, engine, generate, graph, ops, pages])
def test_docstrings(module: Any) -> None:
    names = {"specmeta": specmeta, "torch": torch}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


def test_public_names_are_documented() -> None:
    for name in specmeta.__all__:
        assert getattr(specmeta, name).__doc__, name
