"""What decides what is built, and how: CMake is configured, nothing is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cpp import ROOT, _tool


def _configure(build: Path, cuda: str, nvcc: Path, *more: str) -> tuple[int, str]:
    command = [_tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *more]
    command += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DSPECMETA_CUDA={cuda}"]
    environment = os.environ | {"CUDACXX": str(nvcc)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def old_nvcc(tmp_path: Path) -> Path:
    """An nvcc that tells an old version, and cannot compile for new architectures."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'test "$1" = --version && echo "Cuda compilation tools, release 11.5, V11.5.119" && exit\n'
        "exit 1\n"
    )
    nvcc.chmod(0o755)
    return nvcc


def test_an_old_nvcc_is_left_out(tmp_path: Path, old_nvcc: Path) -> None:
    code, output = _configure(tmp_path / "build", "auto", old_nvcc)
    assert code == 0, output
    assert "CUDA kernels: OFF" in output


def test_an_old_nvcc_is_not_enough(tmp_path: Path, old_nvcc: Path) -> None:
    code, output = _configure(tmp_path / "build", "1", old_nvcc)
    assert code != 0
    assert "SPECMETA_CUDA=1, but there is no nvcc of 12.8 or later" in output


def test_without_cuda_nvcc_is_not_asked(tmp_path: Path) -> None:
    code, output = _configure(tmp_path / "build", "0", tmp_path / "nowhere")
    assert code == 0, output
    assert "CUDA kernels: OFF" in output


def test_another_value_is_refused(tmp_path: Path, old_nvcc: Path) -> None:
    code, output = _configure(tmp_path / "build", "2", old_nvcc)
    assert code != 0
    assert "SPECMETA_CUDA is auto, 0 or 1, not 2" in output


def test_warnings_end_a_build_only_where_asked_for(tmp_path: Path) -> None:
    """Another compiler may warn of what this one doesn't."""
    for name, more in (("theirs", ()), ("ours", ("-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",))):
        build = tmp_path / name
        arguments = ("-DSPECMETA_TESTS=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *more)
        code, output = _configure(build, "0", tmp_path / "nowhere", *arguments)
        assert code == 0, output
        commands = (build / "compile_commands.json").read_text()
        assert commands.count(" -Wall ") > 10
        assert commands.count(" -Werror ") == (commands.count(" -Wall ") if more else 0)


def test_cmake_args_reach_cmake_and_are_not_kept(tmp_path: Path) -> None:
    cmake = tmp_path / "cmake"
    cmake.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
    cmake.chmod(0o755)
    (tmp_path / "ninja").symlink_to(cmake)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "specmeta"):
        (tmp_path / name).symlink_to(ROOT / name)
    cache = tmp_path / "build" / "cmake" / "CMakeCache.txt"

    def build(arguments: str) -> str:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "lib"]
        environment = os.environ | {"PATH": path, "CMAKE_ARGS": arguments}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
        configure, build = (tmp_path / "cmake.log").read_text().splitlines()[-2:]
        assert build.startswith("--build")
        return configure

    build("")
    cache.touch()
    assert build("").endswith("-DSPECMETA_CUDA=auto")
    assert cache.exists()
    arguments = build("-DCMAKE_CUDA_ARCHITECTURES='80;90' -DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    wanted = " -DCMAKE_CUDA_ARCHITECTURES=80;90 -DCMAKE_COMPILE_WARNING_AS_ERROR=ON"
    assert arguments.endswith(wanted)
    assert not cache.exists(), "what CMake remembers would go into the next build"
    cache.touch()
    build("")
    assert not cache.exists()


def test_torch_2_10_has_what_is_used_of_its_headers() -> None:
    """The torch at hand is a newer one, whose headers have more."""
    since_2_13 = "STABLE_TORCH_ERROR_CODE_CHECK"
    for source in sorted((ROOT / "csrc/torch").iterdir()):
        assert since_2_13 not in source.read_text(), source.name
