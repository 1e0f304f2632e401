"""What a launch executes, counted on the machine code: the table in docs/kernels.md.

Run in the environment of ``make build``; no GPU is needed. The kernels run in tests/emulator on
loads like those of tests/cpp/test_memory.cpp. These are counts, not times. The exit status is 1
where, without ``--write``, docs/kernels.md has another table.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from emulator import device  # noqa: E402
from emulator.machine import Work  # noqa: E402

import specmeta  # noqa: E402
from specmeta import testing  # noqa: E402
from tools import kernel_table  # noqa: E402

ARCHITECTURE = "sm_90"
TOKENS = 5  # a row


class Load(NamedTuple):
    """Rows of a batch; the context of one of them is `high` and of the others 1,000, if skewed."""

    name: str
    rows: int
    low: int
    high: int
    page_size: int
    is_skewed: bool = False


LOADS = (
    Load("W1", 256, 500, 1_000, 32),
    Load("W2", 256, 4_000, 8_000, 64),
    Load("W3", 8, 100_000, 128_000, 64),
    Load("W4", 256, 1_000, 128_000, 64, is_skewed=True),
)
OPERATIONS = ("stage", "advance", "map_slots", "draft_step")


class Result(NamedTuple):
    """One operation on one load; sectors are those of all tensors, the workspace's among them."""

    operation: str
    load: str
    work: Work


def _i32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def calls(load: Load) -> dict[str, dict[str, Any]]:
    """The arguments of each operation."""
    draw = random.Random(1)
    rows, tokens = load.rows, load.rows * TOKENS
    lens = [draw.randint(load.low, load.high) for _ in range(rows)]
    if load.is_skewed:
        lens = [load.high if b == rows // 3 else load.low for b in range(rows)]
    num_pages = [-(-n // load.page_size) for n in lens]
    width = 8
    while width * load.page_size < load.high:
        width *= 2
    table = [draw.randint(1, 2**20) for _ in range(rows * width)]
    positions = torch.tensor([n - TOKENS + j for n in lens for j in range(TOKENS)])
    cu = _i32(range(0, tokens + 1, TOKENS))
    pages = {
        "page_size": load.page_size,
        "page_table": _i32(table).view(rows, width),
        "num_pages": _i32(num_pages),
        "workspace": specmeta.workspace(rows),
    }
    layout = {
        "last_page_len": testing.poisoned(rows),
        "kv_indptr": testing.poisoned(rows + 1),
        "kv_indices": testing.poisoned(sum(num_pages)),
    }
    slots = {"slot_mapping": testing.poisoned(tokens, dtype=torch.int64)}
    rejected = [draw.randint(0, TOKENS - 1) for _ in range(rows)]
    return {
        "stage": pages
        | layout
        | slots
        | {
            "committed_lens": _i32([n - TOKENS for n in lens]),
            "query_lens": _i32([TOKENS] * rows),
            "cu_seqlens_q": testing.poisoned(rows + 1),
            "seq_lens": testing.poisoned(rows),
            "position_ids": testing.poisoned(tokens, dtype=torch.int64),
        },
        "advance": pages
        | layout
        | slots
        | {
            "num_accepted": torch.zeros(rows, dtype=torch.int32),
            "seq_lens": _i32(lens),
            "cu_seqlens_q": cu,
            "position_ids": positions,
        },
        "map_slots": pages | slots | {"position_ids": positions, "cu_seqlens_q": cu},
        "draft_step": pages
        | layout
        | {
            "slot_mapping": testing.poisoned(rows, dtype=torch.int64),
            "num_rejected": _i32(rejected),
            "seq_lens": _i32([n - 1 + r for n, r in zip(lens, rejected, strict=True)]),
            "draft_tokens": torch.zeros(rows, dtype=torch.int64),
            "position_ids": torch.zeros(rows, dtype=torch.int64),
            "input_ids": testing.poisoned(rows, dtype=torch.int64),
        },
    }


def run(gpu: device.Device, operation: str, load: Load) -> Result:
    """Count an operation on a load; what it computes is compared with the CPU's result."""
    got, want = calls(load)[operation], calls(load)[operation]
    gpu.operation(operation)(**got)
    getattr(specmeta, operation)(**want)
    for key, tensor in got.items():
        if isinstance(tensor, Tensor) and key != "workspace":
            testing.assert_equal(key, tensor, want[key])
    return Result(operation, load.name, gpu.works[-1])


def measure(gpu: device.Device) -> list[Result]:
    """Count each operation on each load."""
    return [run(gpu, operation, load) for operation in OPERATIONS for load in LOADS]


def table(results: Sequence[Result], version: str) -> str:
    """Return the work table of docs/kernels.md."""
    lines = [
        f"Compiled by nvcc {version}.",
        "",
        "| operation | work | blocks | warp instructions | of one block, at most "
        "| sectors read, issued / distinct | written, issued / distinct | dependent loads |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for operation, load, work in results:
        counters = (work.read_issued, work.read, work.written_issued, work.written)
        read, read_once, written, written_once = (sum(counter.values()) for counter in counters)
        lines.append(
            f"| {operation} | {load} | {work.blocks} | {sum(work.instructions.values()):,} "
            f"| {work.most_instructions:,} | {read:,} / {read_once:,} "
            f"| {written:,} / {written_once:,} | {work.dependent_loads} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="write the table to docs/kernels.md")
    group.add_argument("--blocks", type=int, help="only print, for launches of so many blocks")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = device.build(Path(folder))
            gpu = device.Device(library, ARCHITECTURE, Path(folder, ARCHITECTURE))
            gpu.blocks = options.blocks
            results = measure(gpu)
    except RuntimeError as error:
        sys.exit(f"kernel_work: {error}")
    made = table(results, kernel_table.nvcc_version(kernel_table.LIBRARY))
    if options.blocks:
        print(made, end="")
        return 0
    wrong = kernel_table.document("work table", made, options.write)
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
