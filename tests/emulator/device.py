"""The operations on an emulated GPU: the library's own host code, and its kernels' machine code.

The C library is linked with `runtime.cpp`, which hands each launch to Python: kernel, grid, bytes
of parameters. The tensors lie in one stretch of host memory, with red zones between them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from c_api import in_c
from torch import Tensor

from emulator.cubin import LAYOUTS, Kernel, load
from emulator.machine import Launch, Memory, Schedule, Work, arena
from specmeta.testing import POISON, stretch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cmake"
_ON_LAUNCH = ctypes.CFUNCTYPE(
    None,
    *(ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_bool),
    ctypes.c_void_p,
)


def find_nvcc() -> str | None:
    return shutil.which(os.environ.get("CUDACXX", "nvcc"))


def build(folder: Path) -> Path:
    """Link the C library with `runtime.cpp` in place of CUDA's runtime."""
    library = folder / "libspecmeta_emulated.so"
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc is missing")
    archives = [str(BUILD / f"libspecmeta_{name}.a") for name in ("call", "cuda", "cpu")]
    command = [
        *(nvcc, "-std=c++17", "-shared", "-cudart=none", "-Xcompiler=-fPIC"),
        *("-Xlinker=-z,defs,-Bsymbolic", "-o", str(library)),
        str(BUILD / "CMakeFiles/specmeta_c.dir/csrc/c/api.cpp.o"),
        str(Path(__file__).with_name("runtime.cpp")),
        *archives,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return library


class Device:
    """A GPU of one architecture.

    Parameters
    ----------
    library
        What `build` made.
    architecture
        Such as sm_90.
    folder
        Where to unpack its kernels.
    """

    def __init__(self, library: Path, architecture: str, folder: Path) -> None:
        self.kernels = load(library, architecture, folder)
        self.schedule = Schedule()
        self.blocks: int | None = None  # with a workspace: so many, whatever the host asks for
        self.works: list[Work] = []  # of all launches
        self.may_overlap = False  # the last launch, the one before it
        self._library = ctypes.CDLL(str(library))
        self._architecture = int(architecture.removeprefix("sm_"))
        self._number = list(LAYOUTS).index(architecture)  # the host remembers what a device can do
        self._launches: list[tuple[Kernel, tuple[int, int, int], int, bytes, bool]] = []
        self._callback = _ON_LAUNCH(self._on_launch)

    def _on_launch(
        self, name: bytes, grid: Any, threads: int, may_overlap: bool, params: int
    ) -> None:
        kernel = self.kernels[name.decode()]
        self.may_overlap = may_overlap
        held = ctypes.string_at(params, kernel.params_size)
        self._launches.append((kernel, (grid[0], grid[1], grid[2]), threads, held, may_overlap))

    def operation(self, name: str, shift: bool = False) -> Callable[..., None]:
        """An operation on CPU tensors, each copied to the GPU's memory and back.

        With `shift`, tensors begin on no other boundary than that of their elements.
        """
        function = in_c(name, device=self._number, library=self._library)

        def run(**arguments: Any) -> None:
            tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
            memory, placed = _place(tensors, shift)
            self._library.emulate(self._architecture, self._callback)
            self._launches.clear()
            function(**arguments | placed)
            for kernel, grid, threads, params, may_overlap in self._launches:
                if self.blocks is not None and arguments.get("workspace") is not None:
                    grid = (self.blocks, *grid[1:])
                launch = Launch(kernel, grid, threads, params, memory, self.schedule, may_overlap)
                self.works.append(launch.run())
            for key, tensor in placed.items():
                stretch(tensors[key]).copy_(stretch(tensor))

        return run


def _place(tensors: Mapping[str, Tensor], shift: bool) -> tuple[Memory, dict[str, Tensor]]:
    """Copies of tensors in the GPU's memory. What is poison all over has not been given."""
    stretches = {name: stretch(tensor) for name, tensor in tensors.items()}
    sizes = {name: t.numel() * t.element_size() for name, t in stretches.items()}
    shifts = {
        name: t.element_size() * (1 + k % 7) if shift and name != "workspace" else 0
        for k, (name, t) in enumerate(stretches.items())
    }
    memory, starts = arena(sizes, shifts)
    whole = torch.from_numpy(memory.data)
    placed = {}
    for name, tensor in tensors.items():
        start, size = starts[name], sizes[name]
        flat = whole[start : start + size].view(tensor.dtype)
        flat.copy_(stretches[name])
        placed[name] = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
        if size == 0:
            continue
        inside = torch.zeros(flat.numel(), dtype=torch.uint8)
        inside.as_strided(tensor.shape, tensor.stride()).fill_(1)
        is_poison = tensor.dtype != torch.bool and bool((tensor == POISON).all())
        valid = np.repeat(inside.numpy(), tensor.element_size())
        memory.add(name, start, size, valid, not is_poison)
    return memory, placed
