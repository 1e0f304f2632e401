"""How fast a million page ids are repacked, beside plain copies.

``share_of_large_copy`` is against the bandwidth of a copy that's much larger than L2;
``share_of_same_copy`` against a copy of as many bytes, which takes the same launch.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import bench_repack, timing
from bench.common import Step
from specmeta.graph import capture

_LARGE_BYTES = 2**31
_SECONDS = 0.5  # a measurement
_COPIES = 10  # of a call in a graph


def measure(
    device: torch.device,
    *,
    pages: int = 2**20,
    large: int = _LARGE_BYTES,
    seconds: float = _SECONDS,
) -> dict[str, Any]:
    """Measure. A bandwidth counts bytes read and bytes written.

    Parameters
    ----------
    device : torch.device
    pages : int
        Page ids: one of the sizes of the bench ``repack``.
    large : int
        Bytes of the large copy.
    seconds : float
        How long a measurement goes on.

    Returns
    -------
    dict
        ``large_copy_gb_s``, and ``warm`` and ``cold``: what ``ours`` and a ``same_copy`` take in a
        graph, and the shares.
    """
    (work,) = (w for w in bench_repack.SWEEPS["pages"] if w.name == f"{pages:,}")
    case = bench_repack.make_case(work, device)
    arguments = case.fresh()
    num_rows = arguments["num_rows"]
    ids = arguments["kv_indices"]
    listed = case.inputs["page_table"].flatten()[: ids.numel()].contiguous()
    target = torch.empty_like(listed)
    moved = 2 * pages * ids.element_size()
    ours = bench_repack.OPERATION.ours(arguments)

    def same_copy() -> None:
        target.copy_(listed)

    flush = timing.flush_buffer(device) if device.type == "cuda" else None
    large_copy = _copy_bandwidth(device, large, seconds)
    found: dict[str, Any] = {"pages": pages, "large_copy_gb_s": large_copy}
    for kind, calls in (("warm", _COPIES), ("cold", 1)):
        # Lengths don't change, so that each call of a graph does the same work.
        us = {
            name: _time(
                capture(functools.partial(_repeat, step, calls), num_rows=num_rows).replay,
                device,
                flush=flush if kind == "cold" else None,
                seconds=seconds,
                calls=calls,
                reset=functools.partial(case.reset, arguments),
            )
            for name, step in (("ours", ours), ("same_copy", same_copy))
        }
        found[kind] = {
            "ours_us": us["ours"],
            "same_copy_us": us["same_copy"],
            "ours_gb_s": moved / us["ours"] / 1e3,
            "share_of_large_copy": moved / us["ours"] / 1e3 / large_copy,
            "share_of_same_copy": us["same_copy"] / us["ours"],
        }
    return found


def _copy_bandwidth(device: torch.device, size: int, seconds: float) -> float:
    """Return GB/s, read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * size / _time(copy, device, flush=None, seconds=seconds) / 1e3


def _repeat(step: Step, calls: int) -> None:
    for _ in range(calls):
        step()


def _nothing() -> None:
    pass


def _time(
    step: Step,
    device: torch.device,
    *,
    flush: Tensor | None,
    seconds: float,
    calls: int = 1,
    reset: Step = _nothing,
) -> float:
    """Return the median, in microseconds a call."""
    if device.type == "cuda":
        timed = timing.on_cuda(step, reset, seconds=seconds, flush=flush, calls=calls)
        return timed.median_us
    return timing.on_cpu([(step, reset)], seconds=seconds)[0].median_us / calls


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check.targets", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="file")
    args = parser.parse_args(argv)
    with torch.no_grad():
        found = measure(torch.device(args.device))
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
