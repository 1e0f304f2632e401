"""Builds the libraries with CMake and ninja; the rest is in pyproject.toml."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Drives CMakeLists.txt, which installs all libraries; setuptools hears of one of them."""

    def build_extension(self, ext: Extension) -> None:
        torch = importlib.util.find_spec("torch")
        if torch is None or torch.origin is None:
            raise SystemExit("specmeta: install torch first, then use --no-build-isolation")
        if importlib.util.find_spec("pybind11") is None:
            raise SystemExit("specmeta: pybind11 is missing: pip install pybind11")
        if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            raise SystemExit("specmeta: Python's headers are missing: python3-dev (Debian, Ubuntu)")
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                raise SystemExit(f"specmeta: {tool} is missing: pip install cmake ninja")
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = ROOT / "build" / "cmake"
        more = os.environ.get("CMAKE_ARGS", "")
        known = build / "cmake_args.txt"
        if known.exists() and known.read_text() != more:
            shutil.rmtree(build)  # CMake would remember what it was told before
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_INSTALL_PREFIX={target}",
            f"-DSPECMETA_PYTHON={sys.executable}",
            f"-DSPECMETA_TORCH={Path(torch.origin).parent}",
            f"-DSPECMETA_CUDA={os.environ.get('SPECMETA_CUDA', 'auto')}",
            *shlex.split(more),
        ]  # fmt: skip
        build.mkdir(parents=True, exist_ok=True)
        known.write_text(more)
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "install"], check=True)

    def copy_extensions_to_source(self) -> None:
        """Copy all libraries: an editable install would get the one that setuptools knows."""
        for library in (Path(self.build_lib) / "specmeta").glob("*.so"):
            self.copy_file(str(library), str(ROOT / "specmeta" / library.name))

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


setup(
    ext_modules=[Extension("specmeta.libspecmeta", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
