"""Calls every operation a few times, for a tool to watch.

``sizes``: small, odd and many-block sizes with wrong values among them, each call compared with the
reference. ``works``: one call of each at the size of W2, and a million page ids repacked.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import specmeta
from bench.common import Step, takes_workspace
from specmeta import reference, testing

OPERATIONS = reference.__all__
# Rows and page size: one block; the edges of a block's size and of a tile; several tiles.
SIZES = ((1, 1), (3, 4), (33, 48), (256, 16), (257, 16), (1_024, 16), (1_025, 1), (2_500, 16))
_PAGES, _DRAFTS, _VOCAB = 6, 4, 8


def make_call(operation: str, rows: int, page_size: int, *, seed: int = 0) -> dict[str, Any]:
    """Return random arguments of an operation, wrong values among them.

    Parameters
    ----------
    operation : str
        Its name.
    rows : int
        B, and S.
    page_size : int
        Tokens a page.
    seed : int
        Another one gives other values in tensors of the same shapes.

    Returns
    -------
    dict
        By name. Tensors are on the CPU; outputs are poisoned.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> Tensor:
        drawn = torch.randint(low, high + 1, shape, generator=generator)
        return drawn.to(torch.int32)

    out, ids = testing.poisoned, functools.partial(testing.poisoned, dtype=torch.int64)
    lens = random(0, 4 * page_size, rows)
    lens[::7] = 0
    query = torch.minimum(random(0, _DRAFTS + 1, rows), lens)
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), query.cumsum(0, dtype=torch.int32)])
    tokens = 3 * rows + 17  # too few for some rows, or padding behind them
    slots = torch.randperm(rows, generator=generator)
    slots[5::29] = -1
    slots[8::97] = rows + 3
    call: dict[str, Any] = {
        "row_to_slot": slots,
        "num_rows": torch.tensor([rows - rows // 50], dtype=torch.int32),
        "status": torch.zeros(rows + 1, dtype=torch.int32),
    }
    paged = {
        "page_size": page_size,
        "page_table": random(-1, 10**6, rows, _PAGES),
        "num_pages": random(0, _PAGES, rows),
        "cached_lens": out(rows),
        "last_page_len": out(rows),
        "kv_indptr": out(rows + 1),
        "kv_indices": out(2 * rows + 1),  # too few for some
        "block_table": out(rows, _PAGES - 1),
        "slot_mapping": ids(tokens),
    }
    sampled = random(-1, _VOCAB, rows, _DRAFTS + 1)
    if operation == "count_sampled":
        return call | {
            "sampled_tokens": sampled,
            "vocab_size": _VOCAB,
            "discarded": random(0, 3, rows) == 0,
            "backup_tokens": random(-1, _VOCAB, rows).long(),
            "num_sampled": out(rows),
            "next_tokens": ids(rows),
        }
    if operation == "locate_sampled":
        return call | {
            "num_sampled": random(-1, _DRAFTS + 2, rows),
            "cu_num_draft_tokens": (query - 1).clamp(min=0).cumsum(0, dtype=torch.int32),
            "cu_seqlens_q": ends,
            "num_rejected": out(rows),
            "token_indices": out(rows),
        }
    if operation == "keep_last":  # it has no slots
        return {
            "cu_seqlens_q": ends,
            "seq_lens": lens + random(-1, 1, rows),
            "num_rows": call["num_rows"],
            "input_ids": random(0, 999, tokens),
            "position_ids": ids(tokens),
            "query_lens": out(rows),
            "cached_lens": out(rows),
            "status": torch.zeros(rows, dtype=torch.int32),
        }
    if operation == "map_slots":
        return call | {
            "position_ids": random(-1, _PAGES * page_size, tokens).long(),
            "slot_mapping": ids(tokens + rows),
            "page_size": page_size,
            "cu_seqlens_q": ends,
            "page_table": paged["page_table"],
            "num_pages": paged["num_pages"],
        }
    if operation == "draft_lists":
        return call | {
            "seq_lens": lens,
            "num_steps": _DRAFTS,
            "page_size": page_size,
            "page_table": paged["page_table"],
            "num_pages": paged["num_pages"],
            "position_ids": ids(rows),
            "last_page_len": out(_DRAFTS, rows),
            "kv_indptr": out(_DRAFTS, rows + 1),
            "kv_indices": out(_DRAFTS, 2 * rows + 1),  # too few for some
            "slot_mapping": ids(_DRAFTS * rows),
        }
    ledger = random(0, 999, rows, _PAGES * page_size + 8)
    if operation == "advance":
        return call | paged | {
            "num_accepted": random(-3, 8, rows),
            "seq_lens": lens,
            "cu_seqlens_q": ends,
            "position_ids": random(0, 99, tokens).long(),
        }  # fmt: skip
    if operation == "stage":
        return call | paged | {
            "committed_lens": lens,
            "known_lens": lens + random(0, 5, rows),
            "num_drafts": random(0, _DRAFTS, rows),
            "query_lens": random(0, _DRAFTS + 1, rows),
            "tokens": ledger,
            "cu_seqlens_q": out(rows + 1),
            "seq_lens": out(rows),
            "position_ids": ids(tokens),
            "input_ids": ids(tokens),
            "num_draft_tokens": out(rows),
        }  # fmt: skip
    if operation == "draft_step":
        return call | paged | {
            "seq_lens": lens,
            "position_ids": random(0, 99, tokens).long(),
            "num_rejected": random(-1, 2, rows),
            "draft_tokens": random(0, 999, rows),
            "known_lens": lens.clone(),
            "num_drafts": random(0, 1, rows),
            "written_lens": random(0, 1, rows),
            "tokens": ledger,
            "input_ids": ids(tokens),
        }  # fmt: skip
    call |= {
        "input_ids": random(-1, 2, tokens).long(),
        "cu_seqlens_q": ends,
        "position_ids": random(0, 99, tokens).long(),
        "seq_lens": lens,
        "committed_lens": lens - query,
        "known_lens": lens - query + random(0, 6, rows),
        "tokens": ledger,
        "num_drafts": random(0, _DRAFTS, rows),
        "num_accepted": out(rows),
        "num_rejected": out(rows),
        "num_sampled": out(rows),
        "seq_lens_out": out(rows),
        "next_tokens": ids(rows),
        "token_indices": out(rows),
        "accepted_tokens": ids(rows, _DRAFTS + 1),
        "draft_input_ids": ids(tokens),
        "last_position_ids": ids(rows),
    }
    if operation == "accept_greedy":
        return call | {"target_tokens": random(-1, 2, tokens)}
    return call | {"sampled_tokens": sampled, "vocab_size": _VOCAB}


def drive_sizes(device: torch.device) -> int:
    """Compare every operation with its reference; return how many calls there were.

    All that the device reads comes by copies: no kernel runs but the operations' own. Each tensor
    is an allocation of its own, where a sanitizer has torch ask for each. All launches of as many
    steps share one workspace, which each must leave ready for the next, of whatever size.
    """
    count = 0
    most_rows = max(rows for rows, _ in SIZES)
    workspaces = {k: specmeta.workspace(most_rows, num_steps=k).to(device) for k in (1, _DRAFTS)}
    for operation in OPERATIONS:
        for seed, (rows, page_size) in enumerate(SIZES):
            call = make_call(operation, rows, page_size, seed=seed)
            expected = {name: copy.deepcopy(value) for name, value in call.items()}
            getattr(reference, operation)(**expected)
            workspace = workspaces[call.get("num_steps", 1)]
            for scratch in (None, workspace, workspace):
                more = {"workspace": scratch} if takes_workspace(operation) else {}
                # Said before, so that a call that never ends is the last one in the log.
                print(f"{operation}, {rows} rows, workspace: {scratch is not None}", flush=True)
                got = {
                    name: value.to(device, copy=True) if isinstance(value, Tensor) else value
                    for name, value in call.items()
                }
                getattr(specmeta, operation)(**got, **more)
                for name, value in got.items():
                    if isinstance(value, Tensor):
                        testing.assert_equal(f"{operation}: {name}", value, expected[name])
                count += 1
    return count


def drive_works(device: torch.device) -> int:
    """Call every operation once at a large size; return how many calls there were."""
    count = 0
    for call in _works(device):
        call()
        count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count


def _works(device: torch.device) -> Iterator[Step]:
    from bench.__main__ import OPERATIONS as BENCHES

    for bench in BENCHES.values():
        works = {work.name: work for works in bench.sweeps.values() for work in works}
        work = next(works[name] for name in ("W2", "1,048,576", "8,192") if name in works)
        yield bench.ours(bench.make_case(work, device).fresh())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two; a difference raises AssertionError."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check.drive", description=__doc__)
    parser.add_argument("what", choices=("sizes", "works"))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    drive = {"sizes": drive_sizes, "works": drive_works}[args.what]
    print(f"{drive(torch.device(args.device))} calls")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
