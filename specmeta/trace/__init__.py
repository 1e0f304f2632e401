"""Traces: a compact record of every step of a run, to look at, to search and to compare.

:func:`record` writes one while an engine runs, :func:`read` reads it back, and ``specmeta trace``
makes a page, a picture or a comparison of it. ``docs/trace.md`` describes the file.

Example
-------
>>> import specmeta.trace
>>> with specmeta.trace.record("run.jsonl.gz"):
...     graph.replay()
>>> trace = specmeta.trace.read("run.jsonl.gz")
>>> trace.num_steps, trace["accepted"].tolist()
(1, [3])
"""

from specmeta.trace.file import Trace, TraceError, read
from specmeta.trace.recorder import Recorder, record

__all__ = ["Recorder", "Trace", "TraceError", "read", "record"]
