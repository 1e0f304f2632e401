"""The operations on NumPy and CuPy arrays, and on what shares its memory, without torch."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import full_calls
import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import operators
from torch import Tensor

import specmeta
import specmeta.cupy
from bench import layout
from bench.__main__ import OPERATIONS as BENCHES
from bench.common import HEADLINE
from specmeta import _raw, _schema, ops, reference, testing

DOCS = Path(__file__).parent.parent / "docs/cupy.md"
OPERATIONS = [name for name in specmeta.cupy.__all__ if name != "workspace"]
TABLE = _schema.parse(_raw.schema())


def as_array(tensor: Tensor) -> Any:
    """A NumPy or CuPy array on the same memory."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    return pytest.importorskip("cupy").asarray(tensor)


def on_arrays(operation: str) -> Callable[..., None]:
    def call(**arguments: Any) -> None:
        arrays = {k: as_array(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        getattr(specmeta.cupy, operation)(**arrays)

    return call


def arrays_of(operation: str) -> dict[str, Any]:
    call = full_calls.calls()[operation]
    return {k: v.numpy() if isinstance(v, Tensor) else v for k, v in call.items()}


def _same_as_torch(operation: str, run: Callable[..., None], device: str) -> None:
    got, want = full_calls.calls()[operation], full_calls.calls()[operation]
    got = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in got.items()}
    run(**got)
    getattr(specmeta, operation)(**want)
    for name, tensor in want.items():
        if isinstance(tensor, Tensor):
            testing.assert_equal(name, got[name], tensor)


@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=100)
@given(data=st.data())
def test_random_calls(operation: str, device: str, data: st.DataObject) -> None:
    call = data.draw(getattr(strategies, f"{operation}_calls")())
    testing.run_both(on_arrays(operation), getattr(reference, operation), call, device)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_argument(operation: str, device: str) -> None:
    _same_as_torch(operation, on_arrays(operation), device)


def test_the_functions_are_those_of_ops() -> None:
    assert sorted({*OPERATIONS, "workspace"}) == sorted(specmeta.cupy.__all__)
    assert set(OPERATIONS) == TABLE.keys()
    for operation in OPERATIONS:
        ours, theirs = getattr(specmeta.cupy, operation), getattr(ops, operation)
        parameters = inspect.signature(theirs).parameters.values()
        bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
        assert list(inspect.signature(ours).parameters.values()) == bare
        described = inspect.getdoc(theirs).partition("\n\nExamples\n")[0]
        assert inspect.getdoc(ours) == described
        assert "Raises\n------\nRuntimeError" in described
        assert (ours.__name__, ours.__module__) == (operation, "specmeta.cupy")


# --- Other libraries' arrays ----------------------------------------------------------------------


class Shared:
    """An array that others see through DLPack alone, with or without versions."""

    def __init__(self, array: Any, versions: bool = True) -> None:
        self._array = array
        self._versions = versions

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **arguments: Any) -> Any:
        if arguments and not self._versions:
            raise TypeError("unexpected keyword")
        return self._array.__dlpack__(stream=stream, **arguments)


class Described:
    """An array that others see through its description alone."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize("share", [lambda t: t, Shared, lambda t: Shared(t, versions=False)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_dlpack_shares_memory(operation: str, share: Callable[[Tensor], Any]) -> None:
    def call(**arguments: Any) -> None:
        shared = {k: share(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        getattr(specmeta.cupy, operation)(**shared)

    _same_as_torch(operation, call, "cpu")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_slices(operation: str) -> None:
    """Rows of a matrix may have any distance."""
    for share in (lambda array: array, Described):
        sliced, call = arrays_of(operation), arrays_of(operation)
        for name, array in call.items():
            if getattr(array, "ndim", 0) == 2:
                wide = np.full((array.shape[0], array.shape[1] + 3), 77, array.dtype)
                wide[:, 1:-2] = array
                sliced[name] = wide[:, 1:-2]
        getattr(specmeta.cupy, operation)(**call)
        shared = {k: share(v) if isinstance(v, np.ndarray) else v for k, v in sliced.items()}
        getattr(specmeta.cupy, operation)(**shared)
        for name, array in call.items():
            assert np.array_equal(sliced[name], array), name


def test_rows_in_reverse() -> None:
    """What is only read may be, and what it shares with an output is still seen."""
    pages = np.arange(12, dtype=np.int32).reshape(3, 4)
    tables = []
    for page_table in (pages[::-1], pages[::-1].copy()):
        lens, block_table = np.array([5, 9, 3], np.int32), np.zeros((3, 4), np.int32)
        arguments = {"page_size": 4, "page_table": page_table, "block_table": block_table}
        specmeta.cupy.advance(None, lens, **arguments)
        tables.append(block_table.tolist())
    assert tables == [[[8, 9, 0, 0], [4, 5, 6, 0], [0, 0, 0, 0]]] * 2
    call = {"num_accepted": None, "seq_lens": lens, "page_size": 4, "page_table": pages[::-1]}
    for row in pages:
        shared = call | {"kv_indices": row, "kv_indptr": np.zeros(4, np.int32)}
        expected = "memory of its own, since it is written, got bytes shared with page_table"
        _refused("advance", shared, f"kv_indices: expected {expected}")


def test_no_rows() -> None:
    lens, status = np.empty(0, np.int32), np.empty(0, np.int32)
    for share in (lambda array: array, Described):
        specmeta.cupy.advance(None, share(lens), page_size=4, status=share(status))


def test_numbers() -> None:
    """Whatever is an integer will do; an array of one entry is the device's number of rows."""
    for num_rows in (1, np.int64(1), np.array([1], np.int32), np.array([1, 2], np.int32)[:1]):
        lens = np.array([33, 33], np.int32)
        counts = np.array([2, 2], np.int32)
        specmeta.cupy.advance(counts, lens, page_size=np.int16(32), num_rows=num_rows)
        assert lens.tolist() == [35, 0]
    for last in (True, 1, np.bool_(True), False, np.bool_(False)):
        lens = np.array([33], np.int32)
        specmeta.cupy.draft_step(lens, page_size=32, last=last)
        assert lens.tolist() == [33 if last else 34]


def test_nothing_is_kept() -> None:
    """Each capsule gives its array back, also where a later argument is wrong."""
    lens = np.array([33], np.int32)
    before = sys.getrefcount(lens)
    for status in (None, np.zeros(1, np.int32), np.zeros(2, np.int32), [0]):
        with contextlib.suppress(RuntimeError):
            specmeta.cupy.advance(None, lens, page_size=4, status=status)
        assert sys.getrefcount(lens) == before


def test_other_threads_go_on() -> None:
    lens, counts = np.ones((2, 2_000_000), np.int32)
    begun, ended = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        specmeta.cupy.advance(counts, lens, page_size=4)
        ended.set()

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    seen = 0
    while not ended.wait(1e-3):
        seen += 1
    thread.join()
    assert seen > 2
    assert (lens == 2).all()


def test_no_stream_waits_for_another() -> None:
    """A capture would not survive what a producer does to make one wait."""
    asked: list[dict[str, Any]] = []

    def export(**arguments: Any) -> None:
        asked.append(arguments)
        raise BufferError("seen")

    for device, stream in ((1, None), (2, -1), (3, None), (13, -1)):
        array = SimpleNamespace(__dlpack__=export, __dlpack_device__=lambda d=device: (d, 0))
        with pytest.raises(
            RuntimeError, match="DLPack 1 can share, on a CPU or a CUDA GPU, got seen"
        ):
            specmeta.cupy.advance(None, array, page_size=4)
        assert asked.pop() == {"stream": stream, "max_version": (1, 0), "copy": False}


def test_the_stream_is_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {1: SimpleNamespace(ptr=77)}
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=streams.__getitem__))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_raw, "call", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(_raw, "cuda_device", lambda memory: 1)
    interface = {"data": (64, False), "shape": (1,), "typestr": "<i4", "version": 3}
    array = SimpleNamespace(__cuda_array_interface__=interface)
    specmeta.cupy.advance(None, array, page_size=4)
    specmeta.cupy.advance(None, np.zeros(1, np.int32), page_size=4)
    assert [stream for _, _, stream in calls] == [77, 0]
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="arrays on a GPU need CuPy"):
        specmeta.cupy.advance(None, array, page_size=4)


def test_the_gpu_of_an_empty_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is null, which says nothing: the current GPU may be another one."""
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda _: SimpleNamespace(ptr=1))
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    seen: list[list[int]] = []

    def see(_: int, values: list[Any], __: int) -> None:
        seen.append([value.device for value in values if isinstance(value, _raw.Tensor)])

    monkeypatch.setattr(_raw, "call", see)
    monkeypatch.setattr(_raw, "cuda_device", lambda memory: 1 if memory else 0)

    def array(memory: int, size: int, **more: Any) -> SimpleNamespace:
        interface = {"data": (memory, False), "shape": (size,), "typestr": "<i4", "version": 3}
        return SimpleNamespace(__cuda_array_interface__=interface, **more)

    lens, empty = array(64, 1), array(0, 0, __dlpack_device__=lambda: (2, 1))
    specmeta.cupy.advance(None, lens, page_size=4, kv_indices=empty)
    specmeta.cupy.advance(None, lens, page_size=4, kv_indices=array(0, 0))
    assert seen == [[1, 1], [1, 0]]  # nobody says where the last one is


def test_without_torch() -> None:
    """Nor CuPy, and the package says what is missing where it's needed."""
    code = """
import sys
sys.modules.update(torch=None, cupy=None)
import numpy as np
import specmeta, specmeta.cupy
lens = np.array([33], np.int32)
specmeta.cupy.advance(np.array([2], np.int32), lens, page_size=32)
print(lens[0], specmeta.Status(9), specmeta.get_include()[-7:])
try:
    specmeta.advance
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    missing = "specmeta: torch is missing: pip install torch (specmeta.cupy works without)"
    assert done.stdout.split("\n") == ["35 9 include", missing, ""]


@pytest.mark.parametrize("arguments", ["doctor", "generate --prompt a", "serve", "matrix"])
def test_the_commands_need_torch(arguments: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from specmeta.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    text = "specmeta: torch is missing: pip install torch (specmeta.cupy works without)\n"
    assert done.stderr == text


# --- Errors ---------------------------------------------------------------------------------------


def _refused(operation: str, call: dict[str, Any], pattern: str) -> None:
    """Check what is raised, and that no array has changed."""
    before = {k: v.copy() for k, v in call.items() if isinstance(v, np.ndarray)}
    with pytest.raises(RuntimeError, match=f"^specmeta.{operation}: {pattern}$"):
        getattr(specmeta.cupy, operation)(**call)
    for name, array in before.items():
        assert np.array_equal(call[name], array), name


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_messages_are_those_of_torch(operation: str) -> None:
    compared = 0
    for argument in (a for a in TABLE[operation] if a.kind == "tensor"):
        good = full_calls.calls()[operation].get(argument.name)
        if good is None:
            continue
        wrong: list[Any] = [good.float(), good.to(torch.int16), good[0], torch.cat([good] * 3)]
        wrong += [torch.stack([good, good], -1)[..., 0], good.unsqueeze(0), good[:0]]
        for tensor in [*wrong, None]:
            messages = []
            call = full_calls.calls()[operation] | {argument.name: tensor}
            for run in (getattr(ops, operation), on_arrays(operation)):
                try:
                    run(**call)
                    messages.append("")
                except RuntimeError as error:
                    messages.append(str(error))
            if tensor is not None or not argument.required:
                assert messages[0] == messages[1]
            compared += messages[1] != ""
    assert compared > 30


@pytest.mark.parametrize("operation", OPERATIONS)
def test_read_only_arrays(operation: str) -> None:
    for argument in (a for a in TABLE[operation] if a.kind == "tensor"):
        call = arrays_of(operation)
        if argument.name not in call:
            continue
        call[argument.name].flags.writeable = False
        for share in (lambda array: array, Described):
            shared = call | {argument.name: share(call[argument.name])}
            if argument.written:
                expected = "memory that may be written, got a read-only array"
                _refused(operation, shared, f"{argument.name}: expected {expected}")
            else:
                getattr(specmeta.cupy, operation)(**shared)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seq_lens", None, "a tensor, got None"),
        ("seq_lens", [33], "an array or None, got list"),
        ("seq_lens", np.array([33], ">i4"), "dtype int32 or int64, got >i4"),
        ("seq_lens", np.array([33], np.uint32), "dtype int32 or int64, got uint32"),
        ("seq_lens", np.array(["a"]), "dtype int32 or int64, got <U1"),
        ("seq_lens", Shared(np.array([33], np.float16)), "dtype int32 or int64, got float16"),
        ("seq_lens", np.zeros(5, np.int8)[1:].view(np.int32), "memory on a boundary of 4 bytes.*"),
        ("status", 0, "an array or None, got int"),
        ("count_index", np.zeros(2, [("a", "<i4"), ("b", "<i2")])["a"], "strides of whole .*"),
        ("seq_lens", torch.zeros(1, device="meta"), "an array that DLPack 1 can share.* meta.*"),
        ("num_rows", np.zeros(2, np.int32), r"shape \[1\], got \[2\]"),
        ("num_rows", 2**70, f"an integer in .*, got {2**70}"),
        ("page_size", None, "an integer, got None"),
        ("page_size", 4.0, "an integer, got float"),
        ("page_size", np.ones(2, np.int64), "an integer, got numpy.ndarray"),
        ("page_size", np.array(4), "an integer, got numpy.ndarray"),
        ("page_size", True, "an integer, got bool"),
        ("page_size", 2**70, f"an integer in .*, got {2**70}"),
        ("page_size", 0, r"an integer in \[1, 2147483647\], got 0"),
    ],
)
def test_wrong_arguments(name: str, value: Any, message: str) -> None:
    call = {"num_accepted": None, "seq_lens": np.array([33], np.int32), "page_size": 32}
    _refused("advance", call | {name: value}, f"{name}: expected {message}")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_none_is_no_number(operation: str) -> None:
    """But where it is the default."""
    for argument in (a for a in TABLE[operation] if a.kind != "tensor"):
        call = arrays_of(operation) | {argument.name.removesuffix("_int"): None}
        if argument.default == "None":
            getattr(specmeta.cupy, operation)(**call)
        else:
            expected = "a bool" if argument.kind == "bool" else "an integer"
            _refused(operation, call, f"{argument.name}: expected {expected}, got None")


def test_sizes_and_strides_that_cannot_be() -> None:
    lens = np.array([33, 33], np.int32)
    for shape, strides, message in (
        ((2, 4), (-(2**63), 4), r"memory within the address space, got strides \[-\d+, 1\] from.*"),
        ((2, 4), (2**63, 4), r"memory within the address space, got strides \[\d+, 1\] from.*"),
        ((2, 2**62), None, r"sizes in \[0, 2147483646\], got \[2, 4611686018427387904\]"),
        ((2**40, 2**40, 2**40), None, r"shape \[S,P\], got \[\d+, \d+, \d+\]"),
        ((2, -1), None, r"sizes in \[0, 2147483646\], got \[2, -1\]"),
    ):
        table = SimpleNamespace(
            __array_interface__={
                "data": (64, False),
                "shape": shape,
                "strides": strides,
                "typestr": "<i4",
            }
        )
        call = {"num_accepted": None, "seq_lens": lens, "page_size": 4, "page_table": table}
        _refused("advance", call, f"page_table: expected {message}")


def test_the_call_is_pythons_own() -> None:
    lens = np.array([33], np.int32)
    assert specmeta.cupy.advance.__code__.co_filename == "<specmeta.cupy>"  # no line of a file
    with pytest.raises(TypeError, match=r"advance\(\) missing 1 required .*: 'page_size'"):
        specmeta.cupy.advance(None, lens)
    with pytest.raises(TypeError, match="unexpected keyword argument 'pagesize'"):
        specmeta.cupy.advance(None, lens, page_size=4, pagesize=4)


def test_other_exports() -> None:
    array = SimpleNamespace(__dlpack_device__=lambda: (1, 0), __dlpack__=lambda **_: object())
    with pytest.raises(RuntimeError, match="GPU, got something else than a DLPack capsule"):
        specmeta.cupy.advance(None, array, page_size=4)


def test_workspace() -> None:
    for rows in (0, 1, 64, 1000):
        for steps in (1, 3):
            memory = specmeta.cupy.workspace(rows, num_steps=steps, xp=np)
            assert len(memory) == len(specmeta.workspace(rows, num_steps=steps))
            assert memory.dtype == np.int64
            assert memory.ctypes.data % 32 == 0
            assert not memory.any()
    with pytest.raises(ValueError, match=r"rows: expected an integer in .*, got -1$"):
        specmeta.cupy.workspace(-1, xp=np)
    with pytest.raises(ValueError, match=r"num_steps: expected an integer in .*, got 0$"):
        specmeta.cupy.workspace(1, num_steps=0, xp=np)
    with pytest.raises(ValueError, match=r"rows: expected an integer, got None$"):
        specmeta.cupy.workspace(None, xp=np)


# --- On a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_captured(operation: str, device: str) -> None:
    """Captured once on a side stream; replayed on what the arrays hold by then."""
    cupy = pytest.importorskip("cupy")
    want = full_calls.calls()[operation]
    arrays = {k: cupy.asarray(v.numpy()) if isinstance(v, Tensor) else v for k, v in want.items()}
    before = {k: v.copy() for k, v in arrays.items() if isinstance(v, cupy.ndarray)}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        getattr(specmeta.cupy, operation)(**arrays)
        graph = stream.end_capture()
        for name, array in before.items():
            assert (arrays[name] == array).all(), name
        for _ in range(2):
            for name, array in before.items():
                arrays[name][...] = array
            graph.launch(stream)
    stream.synchronize()
    getattr(specmeta, operation)(**want)
    for name, tensor in want.items():
        if isinstance(tensor, Tensor):
            assert np.array_equal(cupy.asnumpy(arrays[name]), tensor.numpy()), name


# --- Launches, and the page in docs/ --------------------------------------------------------------


def _token_rows_of_a_gpu(ends: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.searchsorted(ends, tokens, right=True)
    return rows.clamp(max=len(ends) - 1), rows >= len(ends)


@pytest.mark.parametrize("operation", [name for name in BENCHES if name in OPERATIONS])
def test_launches(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole-array way of the benches, which CuPy's users would write with CuPy's functions."""
    monkeypatch.setattr(layout, "token_rows", _token_rows_of_a_gpu)
    bench = BENCHES[operation]
    arguments = bench.make_case(HEADLINE, torch.device("cpu")).fresh()
    count = len(operators(bench.vectorised(arguments)))
    assert f"| `{operation}` | {count} | 1 |" in DOCS.read_text(), count
