"""``specmeta doctor``: what was built, what is missing, and how to get it."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Sequence

import torch

import specmeta
from specmeta import _library
from specmeta._command import Parser
from specmeta._environment import EXTRAS, how_to_install

# By extra: what needs it.
USES = {
    "generate": "every command that runs a model",
    "serve": "`specmeta serve`",
    "debug": "`specmeta.inspect`, `specmeta explain` and `specmeta trace`",
    "smollm2": "`--model smollm2`",
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _works(device: str) -> bool:
    """Run one operation for real: 33 tokens and two accepted drafts make 35."""
    seq_lens = torch.tensor([33], dtype=torch.int32, device=device)
    counts = torch.tensor([2], dtype=torch.int32, device=device)
    torch.ops.specmeta.advance(seq_lens, 32, counts)
    return seq_lens.tolist() == [35]


def _check_others() -> list[str]:
    """Load what works without torch; return what cannot be."""
    missing = []
    for purpose, load in (
        ("specmeta.cupy", lambda: importlib.import_module("specmeta._raw")),
        ("C", lambda: ctypes.CDLL(specmeta.get_library())),
    ):
        try:
            load()
        except (ImportError, OSError) as error:
            missing.append(f"the library for {purpose}: {error}")
    print(f"without torch {'working' if not missing else 'missing'}")
    return missing


def _check_gpu(build: _library.BuildInfo) -> list[str]:
    """Print what there is of a GPU; return what keeps it from being used."""
    if not torch.cuda.is_available():
        print("GPU           none that torch can use")
        if build.cuda and torch.version.cuda is None:
            return ["this torch has no CUDA: with a GPU, install a CUDA build of torch"]
        return []
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f"GPU           {name}, sm {capability[0]}{capability[1]}")
    if not build.cuda:
        return [
            "the GPU cannot be used: install a CUDA toolkit of 12.8 or later, then rebuild "
            "with SPECMETA_CUDA=1 make build"
        ]
    try:
        works = _works("cuda")
    except RuntimeError as error:
        return [
            f"the CUDA kernels do not run: {str(error).splitlines()[0]} (the driver must know "
            f"CUDA {build.cuda}, and the GPU be one of those built for)"
        ]
    print(f"CUDA          {'working' if works else 'WRONG RESULTS'}")
    return [] if works else ["the CUDA kernels give wrong results: please report this"]


def main(argv: Sequence[str]) -> int:
    """Print the report; 0 where everything that this machine can use is there."""
    Parser(
        prog="specmeta doctor", description="Say what was built, what is missing, how to get it."
    ).parse_args(argv)
    print(f"specmeta      {specmeta.__version__}")
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
    missing: list[str] = []
    works = _works("cpu")
    print(f"CPU kernels   {'working' if works else 'WRONG RESULTS'}")
    if not works:
        missing.append("the CPU kernels give wrong results: please report this")
    architectures = build.architectures.replace("-real", "")
    built = f"built with CUDA {build.cuda} for sm {architectures}"
    print(f"CUDA kernels  {built if build.cuda else 'built without CUDA'}")
    missing += _check_others()
    nvcc = shutil.which("nvcc")
    print(f"nvcc          {'found' if nvcc else 'not found'}")
    gpu = _check_gpu(build)
    missing += gpu
    versions = {package: _version(package) for names in EXTRAS.values() for package in names}
    for package, version in versions.items():
        print(f"{package:<13} {version or 'not installed'}")
    for extra, packages in EXTRAS.items():
        lacking = [package for package in packages if versions[package] is None]
        if lacking:
            missing.append(f"{', '.join(lacking)} for {USES[extra]}: {how_to_install(extra)}")

    print("\nmissing: nothing" if not missing else "\nmissing:")
    for line in missing:
        print(f"  - {line}")
    return 1 if not works or (torch.cuda.is_available() and gpu) else 0
