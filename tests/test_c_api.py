"""The C library: its header beside the table, its results beside torch's operators, its errors."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import full_calls
import pytest
import strategies
import torch
from c_api import (
    ABI_VERSION,
    CPU,
    CUDA_ERROR,
    INVALID_ARGUMENT,
    LIBRARY,
    OK,
    OPERATIONS,
    TABLE,
    call,
    default,
    in_c,
    struct_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpp import ROOT, _run, _tool
from torch import Tensor

import specmeta
from specmeta import reference, testing
from tools import write_c_header

DOCS = ROOT / "docs/c.md"


# --- The header -----------------------------------------------------------------------------------


def test_the_header_is_the_table() -> None:
    """After a change of the table: python -m tools.write_c_header"""
    assert write_c_header.HEADER.read_text() == write_c_header.text()
    assert Path(specmeta.get_include(), "specmeta.h") == write_c_header.HEADER
    named = re.findall(r"SPECMETA_STATUS_(\w+) = (\d+)", write_c_header.text())
    assert named == [(status.name, str(status.value)) for status in specmeta.Status]


def compile_and_run(source: Path, standard: str, *flags: str) -> str:
    program = source.with_suffix("")
    compiler = "cc" if source.suffix == ".c" else "c++"
    _run(
        *(_tool(compiler), f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion"),
        *("-Werror", str(source), "-o", str(program), *flags),
    )
    return _run(str(program))


@pytest.mark.parametrize(("suffix", "standard"), [(".c", "c99"), (".cpp", "c++11")])
def test_layout_and_defaults(suffix: str, standard: str, tmp_path: Path) -> None:
    """What a compiler makes of the header: where each member stands, and its default."""
    lines, want = [], []
    for operation, arguments in TABLE.items():
        lines.append(f"specmeta_{operation}_args {operation} = specmeta_{operation}_init();")
        offset = 8
        for argument in arguments:
            member = f"{operation}.{argument.name}"
            is_tensor = argument.kind == "tensor"
            value = f"{member}.dtype" if is_tensor else member
            place = f"offsetof(specmeta_{operation}_args, {argument.name})"
            lines.append(f'printf("%d %lld\\n", (int){place}, (long long){value});')
            want.append(f"{offset} {0 if is_tensor else default(argument)}")
            offset += 48 if is_tensor else 8
        lines.append(f'printf("%d %d\\n", (int){operation}.struct_size, (int)sizeof {operation});')
        want.append(f"{offset} {offset}")
    source = tmp_path / f"layout{suffix}"
    text = "#include <specmeta.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n"
    source.write_text(text + "\n".join(lines) + "\nreturn 0;\n}\n")
    got = compile_and_run(source, standard, "-I", specmeta.get_include())
    assert got.splitlines() == want


def test_nothing_else_is_in_the_interface() -> None:
    listed = _run(_tool("nm"), "-D", "--defined-only", specmeta.get_library())
    exported = {line.split()[-1] for line in listed.splitlines()}
    assert exported == {f"specmeta_{name}" for name in (*OPERATIONS, "workspace_size")}
    needed = _run(_tool("readelf"), "-d", specmeta.get_library())
    assert "libstdc++" in needed
    assert not re.search(r"NEEDED.*(torch|python|cudart)", needed)


# --- Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=60)
@given(data=st.data())
def test_random_calls(operation: str, data: st.DataObject) -> None:
    arguments = data.draw(getattr(strategies, f"{operation}_calls")())
    testing.run_both(in_c(operation), getattr(reference, operation), arguments)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_argument(operation: str) -> None:
    got, want = full_calls.calls()[operation], full_calls.calls()[operation]
    in_c(operation)(**got)
    getattr(specmeta, operation)(**want)
    for name, tensor in want.items():
        if isinstance(tensor, Tensor):
            testing.assert_equal(name, got[name], tensor)


def test_workspace_size() -> None:
    for rows, steps in ((0, 1), (1, 1), (1000, 1), (1000, 7)):
        size = specmeta.workspace(rows, num_steps=steps).numel()
        assert LIBRARY.specmeta_workspace_size(rows, steps) == size
    for rows, steps in ((-1, 1), (2**31 - 1, 1), (1, 0), (1, 65536), (2**40, 1)):
        assert LIBRARY.specmeta_workspace_size(rows, steps) == -1


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_messages_are_those_of_torch(operation: str) -> None:
    compared = 0
    for argument in TABLE[operation]:
        good = full_calls.calls()[operation].get(argument.name)
        if not isinstance(good, Tensor):
            continue
        other = torch.int32 if good.dtype == torch.int64 else torch.int64
        wrong = [good.to(other), good[0], torch.cat([good] * 3), good[:0]]
        for tensor in [*wrong, torch.stack([good, good], -1)[..., 0]]:
            messages = []
            for run in (getattr(specmeta, operation), in_c(operation)):
                try:
                    run(**full_calls.calls()[operation] | {argument.name: tensor})
                    messages.append("")
                except RuntimeError as error:
                    messages.append(str(error))
            assert messages[0] == messages[1]
            compared += messages[1] != ""
    assert compared > 20


def _seq_lens(**changed: Any) -> bytes:
    fields = {"data": 64, "dtype": 1, "rank": 1, "shape": 1, "width": 0, "stride": 1, "other": 0}
    return struct.pack("=Qiiqqqq", *(fields | changed).values())


SIZES = r"expected sizes in \[0, 2147483646\]"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq_lens": None}, "seq_lens: expected a tensor, got None"),
        ({"page_size": None}, r"page_size: expected an integer in \[1, 2147483647\], got 0"),
        ({"pad_seq_len": 2}, r"pad_seq_len: expected an integer in \[0, 1\], got 2"),
        ({"seq_lens": _seq_lens(rank=3)}, "seq_lens: expected rank 1 or 2, got 3"),
        ({"seq_lens": _seq_lens(rank=-1)}, "seq_lens: expected rank 1 or 2, got -1"),
        ({"seq_lens": _seq_lens(rank=0)}, r"seq_lens: expected shape \[B\], got \[\]"),
        ({"seq_lens": _seq_lens(dtype=9)}, "seq_lens: expected dtype int32 or int64, got one .*"),
        ({"seq_lens": _seq_lens(data=0)}, "seq_lens: .* at least 4 bytes, got a null pointer"),
        ({"seq_lens": _seq_lens(data=66)}, "seq_lens: expected memory on a boundary of 4 bytes.*"),
        (
            {"seq_lens": _seq_lens(data=2**64 - 4)},
            rf"seq_lens: .* the address space, got strides \[1\] from address {2**64 - 4}",
        ),
        ({"seq_lens": _seq_lens(shape=-1)}, rf"seq_lens: {SIZES}, got \[-1\]"),
        ({"status": _seq_lens(shape=-(2**63))}, rf"status: {SIZES}, got \[{-(2**63)}\]"),
        ({"kv_indices": _seq_lens(shape=2**31 - 1)}, rf"kv_indices: {SIZES}, got \[{2**31 - 1}\]"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    lens = torch.tensor([33], dtype=torch.int32)
    args = struct_bytes("advance", {"seq_lens": lens, "page_size": 32} | given)
    code, error = call("advance", args)
    assert code == INVALID_ARGUMENT
    assert re.fullmatch(f"specmeta.advance: {message}", error), error
    assert lens.item() == 33


@pytest.mark.parametrize(
    ("data", "stride", "is_right"),
    [
        # Bytes from the address on are below 2**63. At address 2**62 there is no other memory.
        (2**62, 2**61 - 3, True),
        (2**62, 2**61 - 2, False),
        (2**62, 2**61, False),
        (2**62, 2**62, False),
        (2**62, 2**63 - 1, False),
        # The last byte in front of the end of all memory, or behind it.
        (2**64 - 64, 13, True),
        (2**64 - 64, 14, False),
        # In reverse: from the first byte of all memory on.
        (2**64 - 64, 16 - 2**60, True),
        (64, -16, True),
        (64, -17, False),
        (2**62, -(2**60) - 1, False),
        (2**62, -(2**61), False),
        (2**62, -(2**62), False),
        (2**62, -(2**63), False),
    ],
)
def test_distances_of_rows(data: int, stride: int, is_right: bool) -> None:
    lens = torch.tensor([33, 33], dtype=torch.int32)
    table = struct.pack("=Qiiqqqq", data, 1, 2, 2, 2, stride, 1)
    given = {"seq_lens": lens, "page_size": 32, "page_table": table, "num_rows_int": 0}
    code, error = call("advance", struct_bytes("advance", given))
    if is_right:
        assert (code, error) == (OK, "")
        assert lens.tolist() == [0, 0]  # of no rows, no pages are read
        return
    assert code == INVALID_ARGUMENT
    assert error == (
        "specmeta.advance: page_table: expected memory within the address space, "
        f"got strides [{stride}, 1] from address {data}"
    )
    assert lens.tolist() == [33, 33]


@pytest.mark.parametrize(("data", "stride"), [(64, 2**61 - 3), (2**62, -(2**60)), (64, 2**60)])
def test_far_rows_take_all_that_is_between(data: int, stride: int) -> None:
    lens = torch.tensor([33, 33], dtype=torch.int32)
    table = struct.pack("=Qiiqqqq", data, 1, 2, 2, 2, stride, 1)
    given = {"seq_lens": lens, "page_size": 32, "page_table": table, "num_rows_int": 0}
    code, error = call("advance", struct_bytes("advance", given))
    assert code == INVALID_ARGUMENT
    expected = "memory of its own, since it is written, got bytes shared with page_table"
    assert error == f"specmeta.advance: seq_lens: expected {expected}"
    assert lens.tolist() == [33, 33]


def test_other_versions() -> None:
    lens = torch.tensor([33], dtype=torch.int32)
    args = struct_bytes("advance", {"seq_lens": lens, "page_size": 32})
    for size, version in ((len(args) + 8, ABI_VERSION), (len(args), ABI_VERSION - 1), (0, 0)):
        code, error = call("advance", struct.pack("=II", size, version) + args[8:])
        assert code == INVALID_ARGUMENT
        assert error == (
            f"specmeta.advance: args: expected a struct of {len(args)} bytes and ABI version "
            f"{ABI_VERSION} from specmeta_advance_init(), got {size} bytes and version {version}"
        )
    assert call("advance", None) == (
        INVALID_ARGUMENT,
        "specmeta.advance: args: expected a struct, got a null pointer",
    )
    assert lens.item() == 33


def test_devices() -> None:
    lens = torch.tensor([33], dtype=torch.int32)
    args = struct_bytes("advance", {"seq_lens": lens, "page_size": 32})
    code, error = call("advance", args, device=-2)
    assert code == INVALID_ARGUMENT
    assert error.endswith("device: expected SPECMETA_CPU or a GPU's number, got -2")
    if not torch.cuda.is_available():
        code, error = call("advance", args, device=0)
        assert code == CUDA_ERROR
        assert re.match("specmeta: (CUDA: |the tensors are on a GPU, but the library)", error)
    assert lens.item() == 33


def test_texts_are_cut() -> None:
    args = struct_bytes("advance", {"page_size": 32})
    whole = call("advance", args)[1]
    assert call("advance", args, room=20) == (INVALID_ARGUMENT, whole[:19])
    assert call("advance", args, room=1) == (INVALID_ARGUMENT, "")
    for buffer, room in ((None, 512), (ctypes.create_string_buffer(b"?"), 0)):
        code = LIBRARY.specmeta_advance(args, CPU, None, buffer, ctypes.c_size_t(room))
        assert code == INVALID_ARGUMENT
        assert buffer is None or buffer.value == b"?"


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_a_gpu(operation: str, device: str) -> None:
    """On a stream of its own, inside a capture."""
    want = full_calls.calls()[operation]
    got = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in want.items()}
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    error = ctypes.create_string_buffer(512)
    function = getattr(LIBRARY, f"specmeta_{operation}")
    handle = ctypes.c_void_p(stream.cuda_stream)

    def run(tensors: dict[str, Any]) -> None:
        args = struct_bytes(operation, tensors)
        assert function(args, 0, handle, error, ctypes.c_size_t(512)) == OK, error.value

    # A first launch loads the kernel, which a capture may not stand.
    spare = {k: v.clone() if isinstance(v, Tensor) else v for k, v in got.items()}
    torch.cuda.synchronize()
    run(spare)
    with torch.cuda.graph(graph, stream=stream):
        run(got)
    graph.replay()
    getattr(specmeta, operation)(**want)
    for name, tensor in want.items():
        if isinstance(tensor, Tensor):
            testing.assert_equal(name, got[name], tensor)


# --- Without torch: CMake, and the page in docs/ --------------------------------------------------


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where plain CMake installs, as the page says."""
    build, prefix = ROOT / "build/c", tmp_path_factory.mktemp("prefix")
    _run(
        *(_tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DSPECMETA_CUDA=0"),
        f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
    )
    _run(_tool("cmake"), "--build", str(build))
    _run(_tool("cmake"), "--install", str(build), "--prefix", str(prefix))
    return prefix


@pytest.mark.parametrize(("suffix", "standard"), [(".c", "c99"), (".cpp", "c++17")])
def test_example(suffix: str, standard: str, prefix: Path, tmp_path: Path) -> None:
    (block,) = re.findall(rf"```{suffix[1:]}\n(.*?)```", DOCS.read_text(), re.DOTALL)
    source = tmp_path / f"example{suffix}"
    source.write_text(block)
    library = next(prefix.glob("lib*/libspecmeta_c.so")).parent
    flags = ["-I", str(prefix / "include"), "-L", str(library), "-lspecmeta_c"]
    got = compile_and_run(source, standard, *flags, f"-Wl,-rpath,{library}")
    printed = re.findall(r"(?:cout|printf).*; +(?:// |/\* )(.*?)(?: \*/)?$", block, re.MULTILINE)
    assert len(printed) >= 1
    assert got.split() == " ".join(printed).split()


def test_the_wheel_has_what_is_needed() -> None:
    """A subprocess that knows the package's directory alone can use the library."""
    code = (
        "import ctypes, sys; sys.modules['torch'] = None; import specmeta;"
        "print(ctypes.CDLL(specmeta.get_library()).specmeta_workspace_size(1, 1) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
