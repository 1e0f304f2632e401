"""The emulator on small kernels: what they compute, and that its checks can fail."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from emulator.cubin import Kernel, load
from emulator.machine import Launch, MachineError, Schedule, Work, arena
from emulator.sass import UnknownInstructionError, decode

from tools.kernel_table import ARCHITECTURES, find_cuobjdump

THREADS = 64


VALUES = (0, 1, -1, 2, 5, 7, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**32 + 1)
VALUES += (2**63 - 1, -(2**63), -(2**32), 2**40, -(2**33) - 1)
Kernels = dict[str, Kernel]


def s64(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def u64(x: int) -> int:
    return x % 2**64


def s32(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def u32(x: int) -> int:
    return x % 2**32


def _inputs() -> tuple[list[int], list[int]]:
    """Two warps' worth of numbers: of all sizes, some of them equal."""
    draw = random.Random(3)

    def number() -> int:
        dice = draw.random()
        return draw.choice(VALUES) if dice < 0.5 else s64(draw.getrandbits(draw.randint(1, 64)))

    x = [number() for _ in range(THREADS)]
    return x, [a if draw.random() < 0.2 else number() for a in x]


X, Y = _inputs()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernels]:
    """The kernels for an architecture."""
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is None or find_cuobjdump() is None:
        pytest.skip("no nvcc, or no cuobjdump")
    folder = tmp_path_factory.mktemp("kernels")
    source = Path(__file__).parent / "emulator" / "small.cu"
    fatbin = folder / "small.fatbin"
    codes = [f"-gencode=arch={a.replace('sm', 'compute')},code={a}" for a in ARCHITECTURES]
    command = [nvcc, "-std=c++17", "-fatbin", "-t0", *codes, "-o", str(fatbin), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, Kernels] = {}

    def get(architecture: str) -> Kernels:
        if architecture not in made:
            found = load(fatbin, architecture, folder / architecture)
            made[architecture] = {k.removesuffix("_kernel"): v for k, v in found.items()}
        return made[architecture]

    return get


@pytest.fixture(params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest, built: Callable[[str], Kernels]) -> Kernels:
    return built(request.param)


def run(
    kernel: Kernel,
    x: Sequence[int] = X,
    y: Sequence[int] = Y,
    *,
    out: int = THREADS,
    n: int = 0,
    blocks: int = 1,
    zero: bool = False,
    schedule: Schedule | None = None,
    may_overlap: bool = False,
) -> tuple[list[int], Work]:
    """Launch a kernel; return the `out` numbers that it leaves. They are `zero` before, or not."""
    memory, starts = arena({"x": 8 * len(x), "y": 8 * len(y), "out": 8 * out})
    for name, values in (("x", x), ("y", y), ("out", [0] * out)):
        data = np.array(values, np.int64).view(np.uint8)
        memory.data[starts[name] :][: len(data)] = data
        memory.add(name, starts[name], len(data), True, name != "out" or zero)
    params = struct.pack("<3Qq", *(memory.base + starts[name] for name in ("x", "y", "out")), n)
    launch = Launch(kernel, (blocks, 1, 1), THREADS, params, memory, schedule, may_overlap)
    work = launch.run()
    return memory.data[starts["out"] :][: 8 * out].view(np.int64).tolist(), work


def _compare(x: int, y: int) -> int:
    bits = (
        *(x < y, x <= y, x == y, u64(x) < u64(y), u64(x) >= u64(y), s32(x) > s32(y)),
        *(u32(x) <= u32(y), x > 0 and y > 0, x != y or s32(y) < 5, x < 256, y > -2),
    )
    return sum(bit << k for k, bit in enumerate(bits))


def _minmax(x: int, y: int) -> int:
    low = min(x, y) ^ max(x, -5) ^ min(s32(x), s32(s32(y) + 3)) ^ max(u32(x), 9)
    return low ^ (max(s32(y), s32(x)) << 20)


def _shift(function: Callable[[int, int], int], width: int = 64) -> Callable[[int, int], int]:
    return lambda x, y: function(x, min(y & 255, width))


def _narrow(x: int, y: int) -> int:
    return (x + y + 128) % 256 - 128 + (x + y) % 2**16 + ((x ^ y) % 256 << 9)


def _quotient(a: int, b: int) -> int:
    return abs(a) // b * (1 if a > 0 else -1)


ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "add3": lambda x, y: x + y + (y - 1) - (x >> 3),
    "mul": lambda x, y: x * y,
    "wide": lambda x, y: s32(x) * s32(y) + x,
    "uwide": lambda x, y: u32(x) * u32(y) + y,
    "mulhi": lambda x, y: u32(x) * u32(y) >> 32,
    "shl": lambda x, y: x << (y & 63),
    "sar": lambda x, y: x >> (y & 63),
    "shr": lambda x, y: u64(x) >> (y & 63),
    "shl_all": _shift(lambda x, n: x << n),
    "sar_all": _shift(lambda x, n: x >> n),
    "shr_all": _shift(lambda x, n: u64(x) >> n),
    "shl32": _shift(lambda x, n: s32(x << n), 32),
    "sar32": _shift(lambda x, n: s32(x) >> n, 32),
    "shift3": lambda x, y: (x << 3) + y - (y << 35),
    "logic": lambda x, y: ((x & y) ^ (~x | 0xFF00FF)) + ((x | y) & ~y),
    "select": lambda x, y: x - 1 if x < y else 3 if y == 7 else y,
    "compare": _compare,
    "minmax": _minmax,
    "narrow": _narrow,
    "bits": lambda x, y: u32(x).bit_length() - 1 + (u32(y).bit_count() << 8),
    "divide": lambda x, y: s64(u32(u32(x) // 7 + s32(_quotient(s32(y), 48) * 3))),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str, kernels: Kernels) -> None:
    for shift in range(0, THREADS, 7):
        y = Y[shift:] + Y[:shift]
        got, _ = run(kernels[name], X, y)
        assert got == [s64(ARITHMETIC[name](a, b)) for a, b in zip(X, y, strict=True)]


def _bytes(x: int, y: int) -> int:
    mirrored = u64(x).to_bytes(8, "big")
    total = bytes(
        (a + b) % 256 for a, b in zip(mirrored, u64(y).to_bytes(8, "little"), strict=True)
    )
    return int.from_bytes(total, "little", signed=True)


def test_bytes_and_vectors(kernels: Kernels) -> None:
    assert run(kernels["bytes"])[0] == [_bytes(a, b) for a, b in zip(X, Y, strict=True)]
    want = [X[i + 1] if i % 2 == 0 else s64(X[i - 1] + Y[i - 1]) for i in range(THREADS)]
    assert run(kernels["vector"])[0] == want
    got = run(kernels["sectors"])[0]
    for i in range(0, THREADS, 4):
        assert got[i : i + 4] == [s64(X[i] - Y[i]), X[i + 2], X[i + 3], s64(X[i + 1] - X[i])]


def test_grid(kernels: Kernels) -> None:
    got, work = run(kernels["grid"], X * 2, Y * 2, out=128, blocks=2)
    assert got == [i // 64 + 200 + 640_000 + i % 32 for i in range(128)]
    assert work.blocks == 2


def _shuffled(i: int) -> int:
    warp, lane = i & 32, i & 31
    up = X[i - 3] if lane >= 3 else X[i]
    down = Y[i + 5] if lane < 27 else Y[i]
    value = s64(up + down) ^ X[i ^ 9]
    return value + s32(Y[warp | X[i] & 31]) + (i & ~7 | 2)


def test_between_lanes(kernels: Kernels) -> None:
    assert run(kernels["shuffle"])[0] == [s64(_shuffled(i)) for i in range(THREADS)]
    less = [a < b for a, b in zip(X, Y, strict=True)]
    same = [a == b for a, b in zip(X, Y, strict=True)]

    def vote(i: int) -> int:
        lanes = range(i & 32, (i & 32) + 32)
        ballot = sum(less[k] << k % 32 for k in lanes)
        return ballot + (any(same[k] for k in lanes) << 32) + ((i < 32) << 33)

    assert run(kernels["vote"])[0] == [vote(i) for i in range(THREADS)]
    total = int(any(same)) + 2 + 4 * sum(less)
    assert run(kernels["barrier"], schedule=Schedule(seed=1))[0] == [total] * THREADS


def _diverged(x: int, y: int) -> int:
    total = 0
    for k in range(x & 15):
        if k == y & 7:
            continue
        if k > 9 and y & 8:
            break
        total += k * x if k % 3 == 0 else y - k
    return s64(total)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_divergence(seed: int | None, kernels: Kernels) -> None:
    got, _ = run(kernels["diverge"], schedule=Schedule(seed))
    assert got == [_diverged(X[i ^ 1], Y[i ^ 1]) for i in range(THREADS)]


def test_sums_over_a_warp(kernels: Kernels) -> None:
    want = []
    for warp in range(THREADS // 32):
        lanes = slice(32 * warp, 32 * warp + 32)
        some = sum(Y[lanes][: 7 * (warp + 1)])
        want += [s64(s32(s32(sum(X[lanes])) + s32(some)))] * 32
    assert run(kernels["warp_sum"])[0] == want


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_shared_memory(seed: int | None, kernels: Kernels) -> None:
    got, _ = run(kernels["shared_sum"], schedule=Schedule(seed))
    rest = sum(Y) + min((x & 0xFFFF) - 100 for x in X)
    assert got == [s64(X[63 - i] + rest) for i in range(THREADS)]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_atomics(seed: int | None, kernels: Kernels) -> None:
    got, _ = run(
        kernels["atomics"], X * 3, Y * 3, out=300, blocks=3, zero=True, schedule=Schedule(seed)
    )
    every = 0
    for x in X:
        every |= u32(x)
    assert got[:3] == [every, s64(3 * sum(Y)), 288]
    assert (got[3:].count(5), got[3], got.count(0)) == (192, 5, 300 - 3 - 192)


@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(1), Schedule(2), Schedule(3, resident=2)]
)
def test_blocks_in_a_chain(schedule: Schedule, kernels: Kernels) -> None:
    x, y = list(range(256)), [7 * i for i in range(256)]
    # A random order of more blocks than run at a time would not end.
    schedule = Schedule() if schedule.resident < 4 else schedule
    got, _ = run(kernels["chain"], x, y, out=356, blocks=4, zero=True, schedule=schedule)
    before = [0, 1, 66, 195]
    assert got[64:67] == before[1:]
    assert got[100:] == [before[i // 64] + y[i] for i in range(256)]


# --- Counts ---------------------------------------------------------------------------------------


def test_dependent_loads(kernels: Kernels) -> None:
    ring = [(i + 1) % THREADS for i in range(THREADS)]
    for n in (1, 2, 5, 8):
        got, work = run(kernels["chase"], ring, n=n)
        assert got == [s64((i + n) % THREADS + Y[i] + ring[i]) for i in range(THREADS)]
        assert work.dependent_loads in (n, n + 1)  # x and y may stand before the loop
    assert run(kernels["at_once"])[1].dependent_loads == 1


def test_polls_count_once(kernels: Kernels) -> None:
    x = list(range(256))
    for seed in (None, 1, 2, 3):
        _, work = run(kernels["chain"], x, x, out=356, blocks=4, zero=True, schedule=Schedule(seed))
        assert work.dependent_loads == 7


def test_sectors(kernels: Kernels) -> None:
    _, work = run(kernels["add"])
    assert work.read_issued == work.read == {"x": 16, "y": 16}
    assert work.written_issued == work.written == {"out": 16}
    _, work = run(kernels["at_once"])
    assert (work.read_issued["x"], work.read["x"]) == (48, 16)
    assert work.instructions["EXIT"] == 2  # two warps


# --- What is wrong is found -----------------------------------------------------------------------

WRONG: dict[str, tuple[str, dict[str, object]]] = {
    "outside": ("an access outside .*outside", {"x": [1000] * 64, "n": 64}),
    "between": ("an access outside .*", {"n": 62}),
    "misaligned": ("thread 5: an access not aligned", {}),
    "unwritten": ("thread 9: a read of what was never written", {}),
    "unwritten_shared": ("thread 60: a read of what was never written", {}),
    "no_barrier": ("LDS.* a data race", {}),
    "no_second_barrier": ("STS.* a data race", {"n": 2}),
    "race_of_warps": ("a data race|two lanes", {"out": 64}),
    "race_of_lanes": ("two lanes write different values", {}),
    "race_of_blocks": ("a data race", {"blocks": 2, "x": X * 2, "y": Y * 2}),
    "race_with_a_reader": (
        "a data race",
        {"blocks": 2, "x": X * 2, "y": Y * 2, "out": 256, "zero": True},
    ),
    "no_release": ("a data race", {"blocks": 2, "x": X * 2, "y": Y * 2, "zero": True}),
    "no_acquire": ("a data race", {"blocks": 2, "x": X * 2, "y": Y * 2, "zero": True}),
    "deadlock": ("deadlock\n.*block 0, waits at .*(WARPSYNC|BAR.SYNC)", {}),
    "no_end": ("no end\n.*block 0, runs at", {"zero": True}),
    "inactive_lane": ("a lane reads from one that does not take part", {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, kernels: Kernels) -> None:
    message, arguments = WRONG[name]
    with pytest.raises(MachineError, match=f"(?s){name}_kernel: .*{message}"):
        run(kernels[name], schedule=Schedule(limit=20_000), **arguments)


def test_launches_that_overlap(kernels: Kernels) -> None:
    with pytest.raises(MachineError, match="before the launch before has ended: an access"):
        run(kernels["add"], may_overlap=True)
    if any(instruction.name == "ACQBULK" for instruction in kernels["waits"].code):
        run(kernels["waits"], may_overlap=True)


def test_two_barriers_are_enough(kernels: Kernels) -> None:
    """What is wrong in the second round is no error in the first."""
    got, _ = run(kernels["no_second_barrier"], n=1)
    assert got == [s64(X[63 - i] + Y[i]) for i in range(THREADS)]


def test_unknown_instructions(kernels: Kernels) -> None:
    with pytest.raises(UnknownInstructionError, match=r"0x[0-9a-f]+ .*(F2I|I2F|MUFU)"):
        run(kernels["unknown"])


@pytest.mark.parametrize(
    "text",
    [
        "IADD3.SAT R1, R2, R3, R4",
        "FADD R1, R2, R3",
        "SHFL R1, R2",
        "LDG.E.STRONG.SYS R1, [R2.64]",
        "MOV R1, R2.H1",
        "BAR.SYNC 0x1",
        "IADD3 R1, R2, R3, |R4|",
        "???",
    ],
)
def test_unknown_text(text: str) -> None:
    assert len(decode(["        /*0000*/ MOV R1, R2 ; /* 0x0 */"])) == 1
    with pytest.raises(UnknownInstructionError):
        decode([f"        /*0000*/ {text} ; /* 0x0 */"])
