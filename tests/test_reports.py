"""The page of public bug reports: every report has a rule of the contract and a case or test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/reports.md").read_text()
LINK = r"\[`?([^]`]+)`?\]\(([^)]+)\)"
ROWS = re.findall(rf"^\| {LINK} \| ([^|]+) \| {LINK} \| {LINK} \|$", PAGE, re.MULTILINE)
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[2]} {row[0]}")


def test_the_table_is_what_the_text_tells() -> None:
    lines = re.findall(r"^\| \[", PAGE, re.MULTILINE)
    entries = re.findall(r"^- \*\*(.+?)\*\*: ", PAGE, re.MULTILINE)
    assert len(ROWS) == len(lines) >= 12
    assert [f"{engine} {number}" for number, _, engine, *_ in ROWS] == entries
    assert len(set(entries)) == len(entries)


@each_row
def test_report(row: tuple[str, ...]) -> None:
    number, url, engine, _, rule, name, place = row
    assert re.fullmatch(rf"https://github\.com/[\w-]+/[\w.-]+/(issues|pull)/{number}", url)
    repositories = {u.rsplit("/", 2)[0] for _, u, e, *_ in ROWS if e == engine}
    assert len(repositories) == 1, "an engine with two repositories"

    # That what is linked exists is tested for all pages (test_docs.py).
    assert rule.startswith("contract.md#")

    target = ROOT / "docs" / place
    if target.suffix == ".json":
        assert target.stem == name
        assert target.parent.resolve() == ROOT / "tests/cases"
    else:
        assert f"\ndef {name}(" in target.read_text()
