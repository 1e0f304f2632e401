"""What counts as an integer of the host, and those that go into a tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["check_integer", "check_integers", "to_integer"]


def to_integer(value: Any) -> int | None:
    """Return an integer as an int, and None for anything else, bools among it.

    A tensor or an array is none, whatever it holds: it would have to be read back, and a captured
    call would keep what it held then.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: Any, *, low: int, high: int = 2**31 - 1) -> int:
    """Return a host integer, or raise."""
    integer = to_integer(value)
    if integer is None:
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    if not low <= integer <= high:
        raise ValueError(f"{name}: expected an integer in [{low}, {high}], got {integer}")
    return integer


def check_integers(
    name: str, values: Iterable[Any], *, low: int, high: int = 2**31 - 1
) -> list[int]:
    """Return host integers, or raise: nothing may be written before all of them are known good."""
    try:
        # A tensor or an array may be the sequence: the host reads it, between steps.
        maybe = [to_integer(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError as error:
        raise ValueError(f"{name}: expected integers, got {values!r}") from error
    integers = [value for value in maybe if value is not None]
    if len(integers) < len(maybe):
        raise ValueError(f"{name}: expected integers, got {values!r}")
    for value in integers:
        if not low <= value <= high:
            raise ValueError(f"{name}: expected integers in [{low}, {high}], got {value}")
    return integers
