"""Fake kernels: what a traced call checks.

The operators return nothing and write in place, so tracing needs no result from them. Dtypes,
ranks and sizes are checked against the library's own table (the one that its real kernels check),
so that a wrong tensor fails while a model is traced or exported and not in its first run. What one
argument asks of another is left to the real kernels.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from specmeta import _library

_DTYPES = {
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "either": (torch.int32, torch.int64),
}


def _dims(shape: str) -> list[tuple[str, int]]:
    """``"B+1"`` -> ``[("B", 1)]``."""
    return [(dim[0], 1 if dim.endswith("+1") else 0) for dim in shape.split(",")]


def _make(operator: str, arguments: list[_library.Argument]) -> Any:
    names = [a.name for a in arguments]
    tensors = [(a.name, a.dtype, a.shape, _dims(a.shape)) for a in arguments if a.kind == "tensor"]

    def fake(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        sizes: dict[str, tuple[Any, str]] = {}
        for name, dtype, shape, dims in tensors:
            tensor = given.get(name)
            if tensor is None:
                continue
            if tensor.dtype not in _DTYPES[dtype]:
                expected = " or ".join(str(d).removeprefix("torch.") for d in _DTYPES[dtype])
                dtype_name = str(tensor.dtype).removeprefix("torch.")
                raise RuntimeError(
                    f"specmeta.{operator}: {name}: expected dtype {expected}, got {dtype_name}"
                )
            got = list(tensor.shape)
            if len(got) != len(dims):
                raise RuntimeError(
                    f"specmeta.{operator}: {name}: expected shape [{shape}], got {got}"
                )
            for n, (symbol, plus) in zip(got, dims, strict=True):
                if symbol == "Z":  # S + 1 or B: the real kernel's business
                    continue
                size, origin = sizes.setdefault(symbol, (1 if symbol == "1" else n - plus, name))
                if n != size + plus:
                    known = "" if symbol == "1" else f" with {symbol} = {size} as in {origin}"
                    raise RuntimeError(
                        f"specmeta.{operator}: {name}: expected shape [{shape}]{known}, got {got}"
                    )

    return fake


def register() -> None:
    """Register the fake kernel of every operator."""
    operators: dict[str, list[_library.Argument]] = defaultdict(list)
    for argument in _library.schema():
        operators[argument.operator].append(argument)
    for operator, arguments in operators.items():
        torch.library.register_fake(f"specmeta::{operator}", _make(operator, arguments))
