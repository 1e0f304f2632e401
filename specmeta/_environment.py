"""What the machine has: optional packages, devices, files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["EXTRAS", "check_device", "find_device", "how_to_install", "os_reason"]

# By extra of the package: what it adds. What runs a model needs "generate" as well.
EXTRAS = {
    "generate": ("rich", "safetensors", "transformers"),
    "serve": ("prometheus_client", "pydantic", "starlette", "uvicorn"),
    "debug": ("matplotlib", "numpy", "rich"),
    "smollm2": ("accelerate", "gguf", "pip"),
}


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra to the installed package."""
    return f"pip install 'specmeta[{extra}]'"


def check_device(device: Any) -> torch.device:
    """Return what torch takes for a device; raise ValueError for anything else."""
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: expected a torch.device or its name, got {device!r}") from error


def find_device(name: str) -> torch.device:
    """Return the device `name`; raise ValueError where it can't be used, and say why."""
    match = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", name)
    if match is None:
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {name!r}")

    import torch

    from specmeta import _library

    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ValueError(f"device: {name}: this torch has no CUDA: install a CUDA build of torch")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"device: {name}: GPUs that torch can use: {count}")
    if not _library.build_info().cuda:
        raise ValueError(
            f"device: {name}: the library has no CUDA kernels: SPECMETA_CUDA=1 make build"
        )
    return torch.device("cuda", index)


def os_reason(error: OSError) -> str:
    """Return what the system says of a file, without the error's number."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
