"""Traces: a compact record of every step of a run, to look at, to search and to compare.

:func:`record` writes one while an engine runs, :func:`read` reads it back, and ``specmeta trace``
makes a page, a picture or a comparison of it. ``docs/trace.md`` describes the file. Recording needs
torch alone; reading and comparing need numpy.

Example
-------
>>> import specmeta.trace
>>> seq_lens = torch.tensor([33])
>>> with specmeta.trace.record("run.jsonl.gz"):
...     specmeta.advance(torch.tensor([2]), seq_lens, page_size=32)
>>> trace = specmeta.trace.read("run.jsonl.gz")
>>> trace.num_steps, trace["seq_len"].tolist(), trace["accepted"].tolist()
(1, [35], [2])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specmeta._environment import how_to_install
from specmeta.trace.recorder import Recorder, RecordingError, record

if TYPE_CHECKING:
    from specmeta.trace.comparison import compare
    from specmeta.trace.file import Trace, TraceError, read

__all__ = ["Recorder", "RecordingError", "Trace", "TraceError", "compare", "read", "record"]

# What needs numpy, and where it is.
_READING = {"Trace": "file", "TraceError": "file", "compare": "comparison", "read": "file"}


def __getattr__(name: str) -> Any:
    if name not in _READING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_READING[name]}")
    except ImportError as error:
        message = f"{__name__}.{name} needs numpy: {how_to_install('debug')}"
        raise ImportError(message) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*globals(), *_READING]
