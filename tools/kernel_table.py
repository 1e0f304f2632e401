"""What the compiler made of the kernels: the table in docs/kernels.md, and the rules they keep.

Run in the environment of ``make build``; no GPU is needed. The exit status is 1 where a kernel
breaks a rule or, without ``--write``, docs/kernels.md has another table.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "specmeta" / "libspecmeta.so"
DOCS = ROOT / "docs" / "kernels.md"

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# The kernel of each operator. A library has these and no others, each once.
KERNELS = {
    "advance": "advance",
    "stage": "stage",
    "accept_greedy": "accept",
    "accept_sampled": "accept",
    "count_sampled": "count_sampled",
    "locate_sampled": "locate_sampled",
    "keep_last": "keep_last",
    "draft_lists": "draft_lists",
    "map_slots": "map_slots",
    "draft_step": "draft_step",
}
# What a kernel may have at most, by field of Kernel.
RULES = {"registers": 48, "stack": 0, "local": 0, "spills": 0, "floating": 0, "calls": 0}

_RESOURCES = re.compile(r"Function (\S+):\s+REG:(\w+) STACK:(\w+) SHARED:(\w+) LOCAL:(\w+)")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+((?:@!?\w+ +)?([A-Z]\w*)([^;]*?))\s*;")
# On the vector or the uniform pipe. FSEL, a move of bits, is not among these.
_FLOATING = re.compile(
    r"U?(MUFU|I2FP?|F2IP?|F2FP?|FRND|FCHK|FSWZADD"
    r"|(FH?|D|H)(ADD|MUL|FMA)(2|32I|2_32I)?|[FDH](SETP?|MNMX)[23]?)"
)
_COLLECTIVE = {"REDUX", "SHFL", "VOTE"}
_BESIDE_COLLECTIVE = {"IMAD", "ISETP", "LOP3", "MOV", "SEL", "WARPSYNC"}
# A floating-point instruction in name only: -0 * 0 + constant moves the constant, any 32 bits.
_CONSTANT_MOVE = re.compile(
    r"HFMA2(\.MMA)? R\d+, -RZ, RZ(, [+-]?(\d[\de.+-]*|INF|[QS]?NAN) *){2}", re.ASCII
)
_COUNTED = {
    "barriers": {"BAR"},
    "loads": {"LDG", "LD", "LDGSTS"},
    "stores": {"STG", "ST"},
    "atomics": {"ATOMG", "ATOM", "REDG", "RED"},
}


class Kernel(NamedTuple):
    """One kernel on one architecture: figures of the compiler, then what is in its SASS.

    A figure is -1 where the compiler does not know it; `shared` is a block's bytes, `stack` and
    `local` a thread's. `loads`, `stores` and `atomics` count instructions on global memory. The
    last three have the instructions themselves, each with its address.
    """

    name: str
    architecture: str
    registers: int
    shared: int
    instructions: int
    barriers: int
    loads: int
    stores: int
    atomics: int
    stack: int
    local: int
    spills: tuple[str, ...]
    floating: tuple[str, ...]
    calls: tuple[str, ...]


def broken_rules(kernel: Kernel) -> dict[str, str]:
    """Return the rules that a kernel breaks, each with a line that says how."""
    broken = {}
    for rule, limit in RULES.items():
        value = getattr(kernel, rule)
        number = len(value) if isinstance(value, tuple) else value
        if not 0 <= number <= limit:
            where = f"{kernel.name} on {kernel.architecture}"
            broken[rule] = f"{where}: {rule}: expected at most {limit}, got {number}"
            if number > 0 and isinstance(value, tuple):
                broken[rule] += f": {'; '.join(value[:4])}{'; ...' * (number > 4)}"
    return broken


def wrong_names(kernels: Iterable[Kernel]) -> list[str]:
    """Return a line for each kernel of an architecture that is missing, unexpected or repeated."""
    count = Counter(kernel.name for kernel in kernels)
    expected = set(KERNELS.values())
    return [
        f"kernel {name}: expected {int(name in expected)}, got {count[name]}"
        for name in sorted(expected | set(count))
        if count[name] != (name in expected)
    ]


def short_name(mangled: str) -> str:
    """Return ``advance`` for ``_ZN...14advance_kernel...``; template arguments stay, mangled."""
    name, rest = mangled, ""
    if mangled.startswith("_Z"):
        nested = mangled.startswith("_ZN")
        rest = mangled[3 if nested else 2 :]
        while match := re.match(r"L?(\d+)", rest):
            end = match.end() + int(match[1])
            name, rest = rest[match.end() : end], rest[end:]
            if not nested:
                break
    return name.removesuffix("_kernel") + (rest if rest.startswith("I") else "")


def parse(resources: str, sass: str, architecture: str) -> list[Kernel]:
    """Return the kernels of one architecture from what cuobjdump prints.

    Parameters
    ----------
    resources, sass
        The output of ``cuobjdump --dump-resource-usage`` and of ``cuobjdump --dump-sass``.
    architecture
        Its name, as in ``ARCHITECTURES``.
    """
    usage = {name: figures for name, *figures in _RESOURCES.findall(resources)}
    kernels = []
    for body in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        mangled, *lines = body.splitlines()
        registers, stack, shared, local = (
            int(figure) if figure.isdigit() else -1 for figure in usage[mangled]
        )
        count: Counter[str] = Counter()
        spills, floating, calls, returns = [], [], [], []
        block: list[str] = []  # opcodes since the flow changed last
        for line in lines:
            if not re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
                continue
            match = _INSTRUCTION.match(line)
            if match is None:
                raise RuntimeError(f"not understood, in {mangled}: {line}")
            address, text, opcode, operands = match.groups()
            count[opcode] += 1
            instruction = f"0x{address} {' '.join(text.split())}"
            if opcode in {"LDL", "STL"}:
                spills.append(instruction)
            elif opcode == "CALL" and not operands.startswith(".REL"):
                calls.append(instruction)
            elif opcode == "RET":
                if not _is_collective(block):
                    returns.append(instruction)
            elif _FLOATING.fullmatch(opcode) and not _CONSTANT_MOVE.fullmatch(opcode + operands):
                floating.append(instruction)
            block = [] if opcode in {"BRA", "CALL", "EXIT", "RET"} else [*block, opcode]
        kernels.append(
            Kernel(
                name=short_name(mangled),
                architecture=architecture,
                registers=registers,
                shared=shared,
                stack=stack,
                local=local,
                instructions=sum(count.values()) - count["NOP"],
                **{key: sum(count[name] for name in names) for key, names in _COUNTED.items()},
                spills=tuple(spills),
                floating=tuple(floating),
                # CALL.REL alone is no call: ptxas leaves some loops with it. A subroutine returns.
                calls=(*calls, *returns),
            )
        )
    return kernels


def _is_collective(block: list[str]) -> bool:
    """Whether a subroutine is one of ptxas' own: one shuffle, vote or sum behind divergent code."""
    collective = [opcode for opcode in block if opcode in _COLLECTIVE]
    others = set(block) - _COLLECTIVE
    return len(collective) == 1 and "WARPSYNC" in others and others <= _BESIDE_COLLECTIVE


def find_cuobjdump() -> str | None:
    """Return the path of cuobjdump: the one among the interpreter's packages, or one on PATH."""
    nvidia = find_spec("nvidia")
    places = (nvidia.submodule_search_locations if nvidia else None) or ()
    wheels = [str(path) for place in places for path in sorted(Path(place).glob("cu*/bin"))]
    path = os.pathsep.join([*wheels, os.environ.get("PATH", os.defpath)])
    return shutil.which("cuobjdump", path=path)


def measure(library: Path, architectures: Sequence[str] = ARCHITECTURES) -> list[Kernel]:
    """Return the kernels of a library in the order of ``KERNELS``, then by architecture.

    Raises
    ------
    RuntimeError
        cuobjdump is missing or fails, as it does without nvdisasm or on a library without kernels.
    """
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise RuntimeError(
            "cuobjdump is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )

    def dump(what: str, architecture: str) -> str:
        command = [cuobjdump, f"--dump-{what}", "-arch", architecture, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def kernels(arch: str) -> list[Kernel]:
        return parse(dump("resource-usage", arch), dump("sass", arch), arch)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = [kernel for part in threads.map(kernels, architectures) for kernel in part]
    order = list(KERNELS.values())
    return sorted(found, key=lambda k: order.index(k.name) if k.name in order else len(order))


def nvcc_version(library: Path) -> str:
    """Return the version of the nvcc that built a library, from its build info (see csrc/torch)."""
    info = re.search(rb"\t(\d+\.\d+\.\d+)\t\d[\da-z -]*\0", library.read_bytes())
    return info[1].decode() if info else "unknown"


def table(kernels: Iterable[Kernel], version: str) -> str:
    """Return the kernel table of docs/kernels.md."""
    columns = [name for name in Kernel._fields if name not in {"name", "architecture"}]
    lines = [
        f"Compiled by nvcc {version}.",
        "",
        f"| kernel | architecture | {' | '.join(columns)} |",
        "|---|---|" + "--:|" * len(columns),
    ]
    for kernel in kernels:
        values = (getattr(kernel, name) for name in columns)
        figures = [len(value) if isinstance(value, tuple) else value for value in values]
        row = (kernel.name, kernel.architecture, *(f"{figure:,}" for figure in figures))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def documented(name: str) -> tuple[str, str, str]:
    """Return docs/kernels.md before, in and after what stands between the markers of a name."""
    first, last = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, begin, rest = DOCS.read_text().partition(first)
    inside, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{DOCS}: the lines {first.strip()} and {last.strip()} are missing")
    return before + begin, inside, end + after


def document(name: str, made: str, write: bool) -> list[str]:
    """Write a table to docs/kernels.md, or print it; return a line where another one is there."""
    before, inside, after = documented(name)
    if write:
        DOCS.write_text(before + made + after)
        return []
    print(made, end="")
    if inside == made:
        return []
    return [f"docs/kernels.md has another {name}: run {sys.argv[0]} --write"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--library", type=Path, default=LIBRARY, help="default: the installed one")
    parser.add_argument("--write", action="store_true", help="write the table to docs/kernels.md")
    options = parser.parse_args(arguments)
    try:
        kernels = measure(options.library)
    except RuntimeError as error:
        sys.exit(f"kernel_table: {error}")
    made = table(kernels, nvcc_version(options.library))
    wrong = [line for kernel in kernels for line in broken_rules(kernel).values()]
    for architecture in ARCHITECTURES:
        names = wrong_names(kernel for kernel in kernels if kernel.architecture == architecture)
        wrong += [f"{architecture}: {line}" for line in names]
    wrong += document("kernel table", made, options.write)
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
