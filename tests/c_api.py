"""The C library without its header: structs as the table of arguments describes them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import specmeta
from specmeta import _library

TABLE = _library.schema()
OPERATIONS = list(TABLE)

LIBRARY = ctypes.CDLL(specmeta.get_library())
LIBRARY.specmeta_workspace_size.restype = ctypes.c_int64
LIBRARY.specmeta_workspace_size.argtypes = [ctypes.c_int64] * 2

OK, INVALID_ARGUMENT, CUDA_ERROR = 0, 1, 2
CPU, ABI_VERSION, NONE = -1, 2, -(2**63)
DTYPES = {torch.int32: 1, torch.int64: 2, torch.bool: 3}
NO_TENSOR = bytes(48)


def tensor_bytes(tensor: Tensor) -> bytes:
    shape, strides = [*tensor.shape, 0, 0][:2], [*tensor.stride(), 0, 0][:2]
    head = (tensor.data_ptr(), DTYPES[tensor.dtype], tensor.dim())
    return struct.pack("=Qiiqqqq", *head, *shape, *strides)


def default(argument: _library.Argument) -> int:
    words = {"None": NONE, "False": 0, "": 0}
    return words[argument.default] if argument.default in words else int(argument.default)


def struct_bytes(operation: str, given: dict[str, Any]) -> bytes:
    """A struct as the table describes it."""
    members = b""
    for argument in TABLE[operation]:
        value = given.get(argument.name)
        if argument.kind != "tensor":
            members += struct.pack("=q", default(argument) if value is None else value)
        elif isinstance(value, Tensor):
            members += tensor_bytes(value)
        else:
            members += NO_TENSOR if value is None else value
    return struct.pack("=II", 8 + len(members), ABI_VERSION) + members


def call(
    operation: str,
    args: bytes | None,
    device: int = CPU,
    room: int = 512,
    library: ctypes.CDLL = LIBRARY,
) -> tuple[int, str]:
    error = ctypes.create_string_buffer(b"?" * room, room)
    function = getattr(library, f"specmeta_{operation}")
    code = function(args, device, None, error, ctypes.c_size_t(room))
    return code, error.value.decode()


def in_c(operation: str, device: int = CPU, library: ctypes.CDLL = LIBRARY) -> Callable[..., None]:
    def run(**arguments: Any) -> None:
        if isinstance(arguments.get("num_rows"), int):
            arguments["num_rows_int"] = arguments.pop("num_rows")
        args = struct_bytes(operation, arguments)
        code, error = call(operation, args, device, library=library)
        if code != OK:
            raise RuntimeError(error)
        assert error == ""

    return run
