"""``python -m specmeta doctor``: what was built, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Sequence

import torch

from specmeta import _library


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_works() -> bool:
    """Run one operation for real: 33 tokens and two accepted drafts make 35."""
    seq_lens = torch.tensor([33], dtype=torch.int32)
    torch.ops.specmeta.advance(torch.tensor([2], dtype=torch.int32), seq_lens, 32)
    return seq_lens.item() == 35  # a CPU tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 where everything that this machine can use is there."""
    del argv  # no options
    missing: list[str] = []
    print(f"specmeta      {_version('specmeta') or 'not installed'}")
    print(f"Python        {platform.python_version()} on {platform.machine()}")
    print(f"torch         {torch.__version__} (CUDA {torch.version.cuda or 'none'})")

    try:
        _library.load()
        build = _library.build_info()
    except ImportError as error:
        print(f"library       missing: {error}")
        return 1
    print(
        f"library       {_library.PATH.name}, compiler {build.compiler}, stable ABI of torch 2.10"
    )
    works = _cpu_works()
    print(f"CPU kernels   {'working' if works else 'WRONG RESULTS'}")
    if not works:
        missing.append(
            "the CPU kernels give wrong results: please report this with the lines above"
        )

    if build.cuda:
        print(f"CUDA kernels  built with CUDA {build.cuda} for sm {build.architectures}")
    else:
        print("CUDA kernels  not built")
    nvcc = shutil.which("nvcc")
    print(f"nvcc          {'found' if nvcc else 'not found'}")
    if nvcc and not build.cuda:
        missing.append("nvcc is there, the CUDA kernels are not: SPECMETA_CUDA=1 make build")
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        print(f"GPU           {name}, sm {capability[0]}{capability[1]}")
        if not build.cuda:
            missing.append(
                "the GPU cannot be used: install a CUDA toolkit of 12.8 or later, then rebuild "
                "with SPECMETA_CUDA=1 make build"
            )
    else:
        print("GPU           none that torch can use")
        if build.cuda and torch.version.cuda is None:
            missing.append("this torch has no CUDA: with a GPU, install a CUDA build of torch")

    for package, purpose in {
        "transformers": "generate",
        "safetensors": "generate",
        "rich": "generate",
    }.items():
        version = _version(package)
        print(f"{package:<13} {version or 'not installed'}")
        if version is None:
            missing.append(f"{package} for `specmeta {purpose}`: pip install 'specmeta[generate]'")

    print("\nmissing: nothing" if not missing else "\nmissing:")
    for line in missing:
        print(f"  - {line}")
    return 0 if works and not (torch.cuda.is_available() and not build.cuda) else 1
