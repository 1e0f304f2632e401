"""The pictures of the contract are what the reference implementation says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from draw_contract import IMAGES, PICTURES, Picture


@pytest.mark.parametrize(("name", "draw"), PICTURES.items())
def test_pictures(name: str, draw: Callable[[], Picture]) -> None:
    svg = draw().svg()
    ElementTree.fromstring(svg)
    assert svg == (IMAGES / f"{name}.svg").read_text(), "run python tools/draw_contract.py"


def test_all_pictures_are_shown() -> None:
    page = (IMAGES.parent / "pictures.md").read_text()
    assert [path.stem for path in IMAGES.glob("*.svg") if f"images/{path.name})" not in page] == []
