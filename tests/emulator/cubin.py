"""Kernels in machine code: taken out of a library, decoded, with what a launch has to set up.

cuobjdump unpacks and disassembles them; sizes, literals and the constant banks are in the ELF file.
"""

from __future__ import annotations

import re
import struct
import subprocess
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emulator.sass import Array, Instruction, decode
from tools.kernel_table import find_cuobjdump


class Layout(NamedTuple):
    """Where an architecture keeps what in constant bank 0, and where its shared memory begins."""

    params: int
    block: int
    grid: int
    stack: int
    descriptor: int
    shared: int


LAYOUTS = {
    "sm_80": Layout(0x160, 0x0, 0xC, 0x28, 0x118, 0),
    "sm_90": Layout(0x210, 0x0, 0xC, 0x28, 0x208, 0x400),
    "sm_100": Layout(0x380, 0x360, 0x370, 0x37C, 0x358, 0x400),
    "sm_120": Layout(0x380, 0x360, 0x370, 0x37C, 0x358, 0x400),
}


class Kernel:
    """A kernel of one architecture.

    Parameters
    ----------
    name
        As the linker knows it.
    lines
        What cuobjdump prints of it.
    sections
        The contents, or where there are none the size, of the file's sections by name.
    """

    def __init__(
        self, name: str, architecture: str, lines: list[str], sections: dict[str, bytes | int]
    ) -> None:
        self.name, self._lines, self._sections = name, lines, sections
        self.layout = LAYOUTS[architecture]
        self.params_size = len(self._section("constant0")) - self.layout.params
        shared = sections.get(f".nv.shared.{name}", 0)
        self.shared_begin = self.layout.shared
        self.shared_end = max(shared if isinstance(shared, int) else len(shared), self.shared_begin)

    def _section(self, kind: str) -> bytes:
        data = self._sections.get(f".nv.{kind}.{self.name}", b"")
        return data if isinstance(data, bytes) else bytes(data)

    @cached_property
    def code(self) -> list[Instruction]:
        return decode(self._lines)

    @cached_property
    def registers(self) -> int:
        return 1 + max(r for i in self.code for r in (*i.uses, 0) if r < 255)

    def constant_banks(
        self, grid: tuple[int, int, int], threads: int, params: bytes
    ) -> dict[int, tuple[Array, Array]]:
        """By number: the bytes, and which of them are known."""
        layout = self.layout
        bank = np.zeros(layout.params + len(params), np.uint8)
        known = np.zeros(len(bank), bool)
        for start, data in (
            (layout.params, params),
            (layout.block, struct.pack("<3I", threads, 1, 1)),
            (layout.grid, struct.pack("<3I", *grid)),
            (layout.stack, bytes(4)),
            (layout.descriptor, bytes(8)),
        ):
            bank[start : start + len(data)] = np.frombuffer(data, np.uint8)
            known[start : start + len(data)] = True
        banks = {0: (bank, known)}
        if literals := self._section("constant2"):
            banks[2] = np.frombuffer(literals, np.uint8), np.ones(len(literals), bool)
        return banks


def _sections(cubin: bytes) -> dict[str, bytes | int]:
    """The sections of an ELF file of 64 bits; of one without contents, its size."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + entry * k) for k in range(count)]
    text = cubin[headers[names][4] :]
    found: dict[str, bytes | int] = {}
    for name, kind, _, _, offset, size in headers:
        label = text[name : text.index(b"\0", name)].decode()
        found[label] = size if kind == 8 else cubin[offset : offset + size]
    return found


def load(library: Path, architecture: str, folder: Path) -> dict[str, Kernel]:
    """The kernels of a library (or of a cubin) for an architecture, by the linker's name.

    `folder` is where to unpack it.
    """
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise RuntimeError("cuobjdump is missing")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [cuobjdump, *arguments], capture_output=True, text=True, check=True, cwd=folder
        )
        return done.stdout

    if library.suffix == ".cubin":
        cubins = [library]
    else:
        folder.mkdir(parents=True, exist_ok=True)
        run("-xelf", f".{architecture}.", str(library))
        cubins = sorted(folder.glob(f"*.{architecture}.*cubin"))
    kernels = {}
    for cubin in cubins:
        sections = _sections(cubin.read_bytes())
        for body in re.split(
            r"^\s*Function : ", run("--dump-sass", str(cubin)), flags=re.MULTILINE
        )[1:]:
            name, *lines = body.splitlines()
            kernels[name] = Kernel(name, architecture, lines, sections)
    return kernels
