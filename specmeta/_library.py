"""Finds and loads the operator library, which registers ``torch.ops.specmeta.*``."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch

from specmeta._schema import Argument, parse

__all__ = ["PATH", "Argument", "BuildInfo", "build_info", "load", "schema", "workspace_words"]

PATH = Path(__file__).with_name("libspecmeta.so")


class BuildInfo(NamedTuple):
    """How the library was built; the last two are empty without CUDA kernels."""

    compiler: str
    cuda: str
    architectures: str


def _text(function: str) -> str:
    call = getattr(ctypes.CDLL(str(PATH)), function)
    call.restype = ctypes.c_char_p
    return str(call().decode())


def schema() -> dict[str, list[Argument]]:
    """Return the arguments by operator, in order."""
    return parse(_text("specmeta_schema"))


def build_info() -> BuildInfo:
    """Return how the library was built."""
    return BuildInfo(*_text("specmeta_build_info").split("\t"))


def workspace_words(rows: int, steps: int) -> int:
    """Return how many int64 the scratch memory of a launch of so many rows and steps has."""
    call = ctypes.CDLL(str(PATH)).specmeta_workspace_words
    call.restype = ctypes.c_longlong
    return int(call(ctypes.c_int(rows), ctypes.c_int(steps)))


def load() -> None:
    """Load the library into torch.

    Raises
    ------
    ImportError
        The library was not built, or cannot be loaded.
    """
    if not PATH.exists():
        raise ImportError(
            f"specmeta: {PATH.name} is not beside the package: build it with "
            "`pip install --no-build-isolation -e .` (or `make build`)"
        )
    try:
        torch.ops.load_library(str(PATH))
    except OSError as error:
        raise ImportError(f"specmeta: cannot load {PATH.name}: {error}") from error
