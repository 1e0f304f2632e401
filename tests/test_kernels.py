"""The compiled kernels keep their rules, and docs/kernels.md has their table. No GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specmeta import _library

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import kernel_table
from kernel_table import ARCHITECTURES, KERNELS, RULES, Kernel, broken_rules, parse

BAD_KERNELS = """
extern "C" __global__ void good_kernel(unsigned* x, unsigned long long y) {
  x[threadIdx.x] = static_cast<unsigned>(__umul64hi(x[threadIdx.x], y));
  atomicOr(x, 1);
}
extern "C" __global__ void float_kernel(float* x) { x[threadIdx.x] *= 1.5f; }
extern "C" __global__ void double_kernel(double* x) { x[threadIdx.x] *= 1.5; }
extern "C" __global__ void convert_kernel(long long* x, float* y) { *y = *x; }
extern "C" __global__ void divide32_kernel(unsigned* x, unsigned y) { x[threadIdx.x] /= y; }
extern "C" __global__ void divide64_kernel(long long* x, long long y) { x[threadIdx.x] /= y; }
extern "C" __global__ void registers_kernel(int* x) {
  int a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 32 + a[63 - i]] = a[i];
}
extern "C" __global__ void __maxnreg__(32) spill_kernel(int* x) {
  int a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 32 + a[63 - i]] = a[i];
}
extern "C" __global__ void array_kernel(int* x, int n) {
  int a[32];
  for (int i = 0; i < 32; ++i) a[i] = x[i * 32 + threadIdx.x];
  for (int i = 0; i < n; ++i) x[i] = a[x[i] & 31];
}
"""
BROKEN = {
    "good": set(),
    "float": {"floating"},
    "double": {"floating"},
    "convert": {"floating"},
    "divide32": {"floating"},
    "divide64": {"floating", "calls"},
    "registers": {"registers"},
    "spill": {"stack", "spills"},
    "array": {"stack", "spills"},
}


def _parsed(*instructions: str, resources: str = "REG:8 STACK:0 SHARED:0 LOCAL:0") -> Kernel:
    lines = [f"        /*{16 * i:04x}*/ {text} ; /* 0x0 */" for i, text in enumerate(instructions)]
    sass = "\t\tFunction : stage_kernel\n" + "\n                /* 0x0 */\n".join(lines)
    (kernel,) = parse(f" Function stage_kernel:\n  {resources} TEXTURE:0\n", sass, "sm_90")
    return kernel


@pytest.mark.parametrize(
    "instruction",
    [
        "MUFU.RCP R0, R0",
        "I2F.U32.RP R6, UR6",
        "@!P0 I2F.S64 R7, R2",
        "I2FP.F32.U32 R2, R2",
        "UI2F.U32.RP UR4, UR5",
        "@!UP0 UI2FP.F32.S32 UR4, UR5",
        "F2I.FTZ.U32.TRUNC.NTZ R5, R4",
        "F2F.F64.F32 R2, R4",
        "FADD R5, R0, R1",
        "FADD2 R4, R4.F32x2.HI_LO, R6.F32x2.HI_LO",
        "@P1 FMUL R5, R0, 1.5",
        "FFMA R1, R2, R3, R4",
        "FMUL32I R1, R2, 1.5",
        "FSETP.GT.AND P0, PT, R2, RZ, PT",
        "UFADD UR4, UR4, UR5",
        "DADD R4, R4, 1",
        "DMUL R4, R4, 1.5",
        "DFMA R4, R4, R6, R8",
        "DSETP.GT.AND P0, PT, R2, R4, PT",
        "HADD2.F32 R2, -RZ, R3.H0_H0",
        "HMUL2 R2, R3, R4",
        "HFMA2 R2, R3, R4, R5",
        "HFMA2.MMA R2, -RZ, RZ, R3",
        "HFMA2 R2, -RZ, R4, 0, 0",
        "HFMA2.BF16_V2 R2, R3, 1, 1, RZ",
    ],
)
def test_floating_point_is_found(instruction: str) -> None:
    kernel = _parsed("IMAD.MOV.U32 R3, RZ, RZ, 0x4", instruction, "EXIT")
    assert kernel.floating == (f"0x0010 {instruction}",)
    assert broken_rules(kernel) == {
        "floating": f"stage on sm_90: floating: expected at most 0, got 1: 0x0010 {instruction}"
    }


@pytest.mark.parametrize(
    "instruction",
    [
        "HFMA2.MMA R23, -RZ, RZ, 0, 5.9604644775390625e-08",
        "HFMA2 R9, -RZ, RZ, +INF , -INF ",
        "@P0 HFMA2 R17, -RZ, RZ, -0.0 , 0",
        "HFMA2 R15, -RZ, RZ, 1.12056732177734375e-05, 679",
        "IMAD.WIDE.U32 R2, R2, 0x4, R4",
        "FLO.U32 R2, R3",
        "SHF.R.U32.HI R5, RZ, 0x1f, R4",
        "@P0 CALL.REL.NOINC 0x3e20",
        "LDS.64 R2, [R3]",
    ],
)
def test_what_is_allowed_is_not_reported(instruction: str) -> None:
    assert broken_rules(_parsed(instruction, "EXIT")) == {}


def test_local_memory_and_calls_are_found() -> None:
    kernel = _parsed("@P0 STL.128 [R1+0x10], R4", "LDL.LU R4, [R1]", "CALL.REL.NOINC 0x70", "EXIT")
    assert kernel.spills == ("0x0000 @P0 STL.128 [R1+0x10], R4", "0x0010 LDL.LU R4, [R1]")
    assert set(broken_rules(kernel)) == {"spills"}
    assert _parsed("RET.REL.NODEC R4 0x0").calls == ("0x0000 RET.REL.NODEC R4 0x0",)
    sync, back = "WARPSYNC R17", "RET.REL.NODEC R12 0x0"
    shuffle = (sync, "SHFL.UP P2, R29, R27, R29, R42", "IMAD.MOV.U32 R27, RZ, RZ, 0x0")
    vote = (sync, "VOTE.ANY R6, PT, !P2", "LOP3.LUT R11, R6, R11, RZ, 0xc0, !PT")
    for collective in (shuffle, vote):
        assert _parsed("BRA 0x10", *collective, back).calls == ()
        for other in ("BRA 0x20", "IADD3 R5, R5, 0x1, RZ", "VOTE.ANY R6, PT, !P2"):
            assert len(_parsed(*collective, other, back).calls) == 1
        assert len(_parsed(*collective[1:], back).calls) == 1  # no lane is waited for
    assert _parsed("CALL.ABS.NOINC R8").calls == ("0x0000 CALL.ABS.NOINC R8",)


@pytest.mark.parametrize(
    ("resources", "rules"),
    [
        ("REG:48 STACK:0 SHARED:9 LOCAL:0", set()),
        ("REG:49 STACK:0 SHARED:9 LOCAL:0", {"registers"}),
        ("REG:48 STACK:8 SHARED:9 LOCAL:4", {"stack", "local"}),
        ("REG:48 STACK:UNKNOWN SHARED:9 LOCAL:0", {"stack"}),
    ],
)
def test_resources(resources: str, rules: set[str]) -> None:
    assert set(broken_rules(_parsed("EXIT", resources=resources))) == rules


def test_counts() -> None:
    kernel = _parsed(
        *("LDG.E.64 R2, desc[UR8][R2.64]", "@P0 LD.E R4, [R2.64]", "LDC R1, c[0x0][0x28]"),
        *("STG.E desc[UR8][R2.64], R4", "STS [R2], R4", "BAR.SYNC.DEFER_BLOCKING 0x0"),
        *("REDG.E.OR.STRONG.GPU desc[UR8][R2.64], R4", "ATOMS.ADD RZ, [R2], R4", "EXIT", "NOP"),
    )
    assert (kernel.loads, kernel.stores, kernel.atomics, kernel.barriers) == (2, 1, 1, 1)
    assert kernel.instructions == 9


def test_an_unknown_line_is_no_instruction_left_out() -> None:
    with pytest.raises(RuntimeError, match=r"not understood.*\?\?\?"):
        _parsed("???")


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (
            "_ZN8specmeta4cuda29_GLOBAL__N__1_10_advance_cu_214advance_kernelENS_13AdvanceParamsE",
            "advance",
        ),
        (
            "_ZN8specmeta4cuda12stage_kernelILb1EEEvNS_11StageParamsE",
            "stageILb1EEEvNS_11StageParamsE",
        ),
        ("_ZL12stage_kernel11StageParams", "stage"),
        ("accept_kernel", "accept"),
    ],
)
def test_short_name(mangled: str, name: str) -> None:
    assert kernel_table.short_name(mangled) == name


def test_missing_unexpected_and_repeated_kernels_are_found() -> None:
    stage = _parsed("EXIT")
    names = [*sorted(set(kernel_table.KERNELS.values()) - {"draft_step"}), "advance", "other"]
    assert kernel_table.wrong_names(stage._replace(name=name) for name in names) == [
        "kernel advance: expected 1, got 2",
        "kernel draft_step: expected 1, got 0",
        "kernel other: expected 0, got 1",
    ]


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    found = kernel_table.find_cuobjdump()
    if found is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


@pytest.fixture(scope="module")
def bad_kernels(cuobjdump: str, tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is None:
        pytest.skip("no nvcc")
    folder = tmp_path_factory.mktemp("bad_kernels")
    source, fatbin = folder / "bad.cu", folder / "bad.fatbin"
    source.write_text(BAD_KERNELS)
    codes = [f"-gencode=arch={a.replace('sm', 'compute')},code={a}" for a in ARCHITECTURES]
    command = [nvcc, "-fatbin", "-t0", *codes, "-o", str(fatbin), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return kernel_table.measure(fatbin)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BROKEN)
def test_bad_kernels_are_caught(bad_kernels: list[Kernel], architecture: str, name: str) -> None:
    place = (name, architecture)
    (kernel,) = (k for k in bad_kernels if (k.name, k.architecture) == place)
    assert set(broken_rules(kernel)) == BROKEN[name]


@pytest.fixture(scope="module")
def built() -> list[str]:
    """Those of `ARCHITECTURES` that the library was built for."""
    info = _library.build_info()
    if not info.cuda:
        pytest.skip("the library was built without CUDA kernels")
    names = {f"sm_{text.removesuffix('-real')}" for text in info.architectures.split()}
    return [architecture for architecture in ARCHITECTURES if architecture in names]


@pytest.fixture(scope="module")
def kernels(cuobjdump: str, built: list[str]) -> list[Kernel]:
    return kernel_table.measure(_library.PATH, built)


@pytest.fixture(params=ARCHITECTURES)
def of_one(request: pytest.FixtureRequest, built: list[str], kernels: list[Kernel]) -> list[Kernel]:
    """The library's kernels for one architecture."""
    if request.param not in built:
        pytest.skip(f"the library was not built for {request.param}")
    return [kernel for kernel in kernels if kernel.architecture == request.param]


def test_one_kernel_an_operator(of_one: list[Kernel]) -> None:
    assert _library.schema().keys() == set(KERNELS)
    wrong = kernel_table.wrong_names(of_one)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("rule", RULES)
def test_rule(of_one: list[Kernel], rule: str) -> None:
    lines = [line for kernel in of_one if (line := broken_rules(kernel).get(rule))]
    assert not lines, "\n" + "\n".join(lines)


def test_docs_have_the_table(built: list[str], kernels: list[Kernel]) -> None:
    version = kernel_table.nvcc_version(_library.PATH)
    assert version == _library.build_info().cuda
    documented = kernel_table.documented("kernel table")[1].splitlines()
    made = kernel_table.table(kernels, version).splitlines()
    if documented and documented[0] != made[0]:
        pytest.skip(f"docs/kernels.md: {documented[0]} Here: {made[0]}")
    others = [f"| {name} |" for name in ARCHITECTURES if name not in built]
    documented = [line for line in documented if not any(other in line for other in others)]
    assert documented == made, "run tools/kernel_table.py --write"
