"""The page of a trace: one HTML file with everything in it."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeta.status import Status
from specmeta.trace.file import OPTIONAL, REQUIRED, Trace
from specmeta.trace.totals import by_step, describe

__all__ = ["make_page"]

_TYPES = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)
_FOLDER = Path(__file__).parent


def make_page(trace: Trace) -> str:
    """Return the page as HTML.

    The columns travel as typed arrays, each of the smallest type that holds it, compressed; the
    page draws from them only what can be seen.
    """
    blob, arrays = _pack(_arrays(trace))
    meta = {
        "page_size": trace.page_size,
        "num_slots": trace.num_slots,
        "num_requests": trace.num_requests,
        "arrays": arrays,
        "status": {str(bit.name): int(bit) for bit in Status},
        "summary": describe(trace),
        "note": trace.note,
    }
    parts = {
        "title": html.escape(f"Trace of {Path(trace.path).name}"),
        "style": (_FOLDER / "page.css").read_text(),
        "script": (_FOLDER / "page.js").read_text(),
        # No "<" may end the script element.
        "meta": json.dumps(meta).replace("<", "\\u003c"),
        "data": base64.b64encode(gzip.compress(blob, compresslevel=4, mtime=0)).decode(),
    }
    page = (_FOLDER / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def _arrays(trace: Trace) -> Iterable[tuple[str, NDArray[Any]]]:
    yield "first", trace.first
    for name in (*REQUIRED, *OPTIONAL):
        yield name, trace[name]
    tokens, pages = trace.rewinds
    yield "rewound_tokens", tokens
    yield "rewound_pages", pages
    yield "new_faults", trace.new_faults
    for name in ("emitted", "draft_tokens"):
        lists = getattr(trace, name)
        yield f"{name}_count", np.diff(lists.first)
        # An id that is none is still to be seen, not to be known.
        yield name, lists.values.clip(-(2**31), 2**31 - 1)
    for name, values in by_step(trace)._asdict().items():
        yield f"step_{name}", values
    for name, values in trace.page_events._asdict().items():
        yield f"event_{name}", values


def _pack(arrays: Iterable[tuple[str, NDArray[Any]]]) -> tuple[bytes, list[dict[str, Any]]]:
    blob, places = bytearray(), []
    for name, values in arrays:
        low, high = values.min(initial=0), values.max(initial=0)
        for dtype in _TYPES:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                break
        blob += bytes(-len(blob) % 4)  # typed arrays begin at a multiple of their size
        places.append(
            {"name": name, "type": np.dtype(dtype).name, "at": len(blob), "length": len(values)}
        )
        blob += values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    return bytes(blob), places
