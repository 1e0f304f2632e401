"""The operations without torch: on CuPy arrays, NumPy arrays, and what else shares its memory.

They are those of :mod:`specmeta.ops`, with the same arguments and the same rules, for arrays of any
library with ``__cuda_array_interface__``, ``__array_interface__`` or DLPack; none is copied. On a
GPU an operation is one launch on CuPy's current stream of the arrays' device: it waits for nothing,
and CuPy may capture it. As with every launch, what writes an array on another stream is for the
caller to order: no protocol is asked to wait. On the CPU an operation has returned when all is
written.

Neither torch nor, for arrays on the CPU, CuPy has to be installed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from specmeta import _schema
from specmeta._integers import check_integer, to_integer

try:
    from specmeta import _raw
except ImportError as error:
    raise ImportError(
        f"specmeta: the module _raw is not beside the package, or not for this Python: {error}"
    ) from error

__all__ = [
    "accept_greedy",
    "accept_sampled",
    "advance",
    "count_sampled",
    "draft_lists",
    "draft_step",
    "keep_last",
    "locate_sampled",
    "map_slots",
    "stage",
    "workspace",
]

_OPERATIONS = _schema.parse(_raw.schema())
_INDEX = {operation: index for index, operation in enumerate(_OPERATIONS)}

_CPU, _CUDA_HOST = 1, 3  # DLPack's numbers

_OPS = ast.parse(Path(__file__).with_name("ops.py").read_text(encoding="utf-8"))


def _define(operation: str) -> Callable[..., None]:
    """Make a function with the signature and the docstring of the one in ops.py."""
    (function,) = (
        node for node in _OPS.body if isinstance(node, ast.FunctionDef) and node.name == operation
    )
    text, _, _ = (ast.get_docstring(function) or "").partition("\nExamples\n")
    for argument in (*function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    function.returns = None
    function.body = ast.parse(f"_call({operation!r}, locals())").body
    module = ast.fix_missing_locations(ast.Module([function], []))
    namespace: dict[str, Any] = {"_call": _call, "__name__": __name__}
    exec(compile(module, f"<{__name__}>", "exec"), namespace)
    made: Callable[..., None] = namespace[operation]
    made.__doc__ = text.rstrip()
    return made


def _call(operation: str, given: dict[str, Any]) -> None:
    if isinstance(given.get("num_rows"), Integral):
        given["num_rows_int"] = given.pop("num_rows")
    values: list[Any] = []
    device = _raw.HOST
    for argument in _OPERATIONS[operation]:
        value = given.get(argument.name)
        if value is not None and argument.kind == "tensor":
            value = _tensor(argument, value)
            device = max(device, value.device)
        elif value is not None:
            value = _integer(argument, value)
        values.append(value)
    _raw.call(_INDEX[operation], values, 0 if device == _raw.HOST else _stream(device))


def _fail(argument: _schema.Argument, expected: str, got: str) -> NoReturn:
    message = f"{argument.name.removesuffix('_int')}: expected {expected}, got {got}"
    raise RuntimeError(f"specmeta.{argument.operator}: {message}")


def _integer(argument: _schema.Argument, value: Any) -> int:
    if argument.kind == "bool" and _kind(value) in ("bool", "numpy.bool", "numpy.bool_"):
        return int(value)
    number = to_integer(value)
    if number is None:
        _fail(argument, f"a{'n integer' if argument.kind == 'int' else ' bool'}", _kind(value))
    if not -(2**63) <= number < 2**63:
        _fail(argument, f"an integer in [{argument.low}, {argument.high}]", str(number))
    return number


def _tensor(argument: _schema.Argument, array: Any) -> _raw.Tensor:
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _described(argument, interface, _gpu(array, interface["data"][0]))
    expected, got = "an array or None", ""
    if hasattr(array, "__dlpack__"):
        try:
            return _raw.from_dlpack(_capsule(array))
        except (BufferError, ValueError) as error:  # torch: of a device that DLPack doesn't have
            expected = "an array that DLPack 1 can share, on a CPU or a CUDA GPU"
            got = str(error)
    # Slower, but NumPy describes more arrays than it shares: read-only ones before 2.1, any dtype.
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        return _described(argument, interface, _raw.HOST)
    _fail(argument, expected, got or _kind(array))


def _gpu(array: Any, memory: int) -> int:
    """Return the GPU that an array is on. The memory of an empty one is null, and on none."""
    if not memory and hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    return _raw.cuda_device(memory)  # of null: the current one


def _described(argument: _schema.Argument, interface: Any, device: int) -> _raw.Tensor:
    data, read_only = interface["data"]
    strides = interface.get("strides")
    dtype, item = _dtype(interface["typestr"])
    if strides is not None:
        if any(stride % item for stride in strides):
            _fail(argument, f"strides of whole elements ({item} bytes)", str(list(strides)))
        strides = [stride // item for stride in strides]
    return _raw.Tensor(data, interface["shape"], strides, dtype, device, read_only)


def _capsule(array: Any) -> Any:
    # -1: the producer must not make a stream wait, which a capture would not survive. On the CPU
    # there is no stream.
    stream = None if array.__dlpack_device__()[0] in (_CPU, _CUDA_HOST) else -1
    try:
        return array.__dlpack__(stream=stream, max_version=(1, 0), copy=False)
    except TypeError:  # it knows no versions, nor of copies
        return array.__dlpack__(stream=stream)


@functools.lru_cache
def _dtype(typestr: str) -> tuple[str, int]:
    """``"<i4"`` -> ``("int32", 4)``."""
    order, kind, size = typestr[0], typestr[1], typestr[2:]
    names = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
    if typestr == "|b1":
        return "bool", 1
    if order == ">" or kind not in names:
        return typestr, 1
    return f"{names[kind]}{8 * int(size)}", int(size)


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _stream(device: int) -> int:
    try:
        import cupy
    except ImportError as error:
        message = "specmeta.cupy: arrays on a GPU need CuPy, whose current stream they are used on"
        raise RuntimeError(message) from error
    return int(cupy.cuda.get_current_stream(device).ptr)


advance = _define("advance")
stage = _define("stage")
accept_greedy = _define("accept_greedy")
accept_sampled = _define("accept_sampled")
count_sampled = _define("count_sampled")
locate_sampled = _define("locate_sampled")
keep_last = _define("keep_last")
draft_lists = _define("draft_lists")
map_slots = _define("map_slots")
draft_step = _define("draft_step")


def workspace(rows: int, *, num_steps: int = 1, xp: ModuleType) -> Any:
    """Return scratch memory through which the blocks of a launch on a GPU share its work.

    See :func:`specmeta.workspace`: one for each stream that launches.

    Parameters
    ----------
    rows : int
        Most rows of a launch, B.
    num_steps : int, default 1
        For :func:`draft_lists`, its steps.
    xp : module
        ``cupy``, which makes it on its current device, or ``numpy``.

    Returns
    -------
    array
        int64 [X], zero.

    Raises
    ------
    ValueError
        `rows` or `num_steps` is no integer, negative or too large.
    """
    rows = check_integer("rows", rows, low=0, high=2**31 - 2)
    num_steps = check_integer("num_steps", num_steps, low=1, high=2**16 - 1)
    words = _raw.workspace_words(rows, num_steps)
    # It begins on a boundary of 32 bytes, which NumPy doesn't promise.
    memory = xp.zeros(words + 3, dtype=xp.int64)
    interface = getattr(memory, "__cuda_array_interface__", None) or memory.__array_interface__
    start = -interface["data"][0] % 32 // 8
    return memory[start : start + words]
