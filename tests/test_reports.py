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


def anchors(page: str) -> set[str]:
    """Give the anchors of a page's headings, named as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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

    page, anchor = rule.split("#")
    assert page == "contract.md"
    assert anchor in anchors((ROOT / "docs/contract.md").read_text())

    target = ROOT / "docs" / place
    if target.suffix == ".json":
        assert target.stem == name
        assert target.parent.resolve() == ROOT / "tests/cases"
        assert target.is_file()
    else:
        assert f"\ndef {name}(" in target.read_text()
