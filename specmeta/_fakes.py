"""Fake kernels: what a traced call checks.

The operators return nothing and write in place, so tracing needs no result from them. Dtypes,
devices, ranks, sizes and integers are checked against the library's own table (the one that its
real kernels check), so that a wrong argument fails while a model is traced or exported and not in
its first run. What one argument asks of another is left to the real kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from specmeta import _library

_DTYPES = {
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "either": (torch.int32, torch.int64),
    "bool": (torch.bool,),
}


def _dims(shape: str) -> list[tuple[str, int]]:
    """``"B+1"`` -> ``[("B", 1)]``."""
    return [(dim[0], 1 if dim.endswith("+1") else 0) for dim in shape.split(",")]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _make(operator: str, arguments: list[_library.Argument]) -> Any:
    names = [a.name for a in arguments]
    dims = {a.name: _dims(a.shape) for a in arguments if a.kind == "tensor"}

    def fail(name: str, expected: str, got: object) -> None:
        raise RuntimeError(f"specmeta.{operator}: {name}: expected {expected}, got {got}")

    def fake(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        sizes: dict[str, tuple[Any, str]] = {}
        first: tuple[torch.device, str] | None = None
        for argument in arguments:
            name, value = argument.name, given.get(argument.name)
            if value is None or argument.kind == "bool":
                continue
            if argument.kind == "int":
                # A size that is only known at run time is checked there.
                if isinstance(value, int) and not argument.low <= value <= argument.high:
                    fail(name, f"an integer in [{argument.low}, {argument.high}]", value)
                continue
            if value.dtype not in _DTYPES[argument.dtype]:
                expected = " or ".join(map(_name, _DTYPES[argument.dtype]))
                fail(name, f"dtype {expected}", _name(value.dtype))
            first = first or (value.device, name)
            if value.device != first[0]:
                fail(name, f"a tensor on {first[0]} as {first[1]}", value.device)
            got = list(value.shape)
            if len(got) != len(dims[name]):
                fail(name, f"shape [{argument.shape}]", got)
            for n, (symbol, plus) in zip(got, dims[name], strict=True):
                if symbol == "Z":  # S + 1 or B: the real kernel's business
                    continue
                if symbol not in sizes and n < plus:
                    fail(name, f"shape [{argument.shape}]: at least one element", got)
                size, origin = sizes.setdefault(symbol, (1 if symbol == "1" else n - plus, name))
                if n != size + plus:
                    known = "" if symbol == "1" else f" with {symbol} = {size} as in {origin}"
                    fail(name, f"shape [{argument.shape}]{known}", got)

    return fake


def register() -> None:
    """Register the fake kernel of every operator."""
    for operator, arguments in _library.schema().items():
        torch.library.register_fake(f"specmeta::{operator}", _make(operator, arguments))
