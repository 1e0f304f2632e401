"""The C++ tests: configures, builds and runs them under ctest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cpp"


def _tool(name: str) -> str:
    """A program that came with the interpreter's packages, or else one on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.fail(f"{name} is missing: pip install cmake ninja", pytrace=False)
    return found


def _run(*command: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}", pytrace=False)
    return done.stdout


def test_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    cmake, ctest, ninja = _tool("cmake"), _tool("ctest"), _tool("ninja")
    jobs = str(os.cpu_count() or 1)
    _run(
        *(cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DSPECMETA_TESTS=ON", "-DSPECMETA_CUDA=0"),
        "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
    )
    _run(cmake, "--build", str(BUILD), "--parallel", jobs)
    output = _run(ctest, "--test-dir", str(BUILD), "--output-on-failure", "--parallel", jobs)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    passed = next(i for i, line in enumerate(lines) if "tests passed" in line)
    with capsys.disabled():  # the closing lines; tests that did not run stand there too
        for line in lines[passed:]:
            print(f"\nctest: {line}", end="")
