"""Writes the file of a trace, which ``docs/trace.md`` describes.

A step is written whole and sent to the system at once, so a crash leaves a file that can be read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "VERSION", "Writer"]

FORMAT = "specmeta trace"
VERSION = 1


class Writer:
    """Appends steps to a new file.

    Parameters
    ----------
    path : str or Path
        Ends with ``.gz``: compressed.

    Raises
    ------
    OSError
        The file can't be made.
    """

    def __init__(self, path: str | Path) -> None:
        self._raw = open(path, "wb")  # noqa: SIM115
        is_compressed = str(path).endswith(".gz")
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb") if is_compressed else self._raw

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line, and send it to the system."""
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        with self._raw:
            self._file.close()
