"""Integers that the host gives, before they become a tensor's."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["check_integers"]


def check_integers(
    name: str, values: Iterable[Any], *, low: int, high: int = 2**31 - 1
) -> list[int]:
    """Return host integers, or raise: nothing may be written before all of them are known good."""
    try:
        integers = [operator.index(value) for value in values]
    except TypeError as error:
        raise ValueError(f"{name}: expected integers, got {values!r}") from error
    for value in integers:
        if not low <= value <= high:
            raise ValueError(f"{name}: expected integers in [{low}, {high}], got {value}")
    return integers
