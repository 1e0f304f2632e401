"""What a program says where a device's memory isn't enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specmeta.serving.request import RequestError

__all__ = ["refuse_lack_of_memory"]

# What torch says where the CPU's memory isn't enough: only a GPU's has an error of its own type.
LACK_OF_MEMORY = re.compile("DefaultCPUAllocator|Storage size calculation overflowed")


@contextmanager
def refuse_lack_of_memory() -> Iterator[None]:
    """Turn failed allocations into a `RequestError`, one line long.

    Raises
    ------
    RequestError
        Not enough memory; the message says what was asked for.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError) and (
            not LACK_OF_MEMORY.search(str(error))
        ):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RequestError(f"not enough memory: {reason}") from error
