"""TensorRT-LLM's way to keep its sequence metadata, in plain torch: what the adapter replaces.

Written from what the originals are documented to do (TensorRT-LLM, 2026: AutoDeploy's
`sequence_metadata_utils` and `SequenceInfo`, PyExecutor's model engine), operator by operator, to
be compared with and to be counted. A kernel of their own there is an operator of its own here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

# Operators that start nothing on a device: views and allocations.
_FREE = {
    f"aten::{name}"
    for name in (
        "as_strided",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "new_empty",
        "select",
        "slice",
        "view",
    )
}
# These wait for a value; `repeat_interleave` for the length of what it makes.
_WAITS = {"aten::item", "aten::is_nonzero", "aten::repeat_interleave"}


def count(step: Callable[[], object]) -> tuple[list[str], int]:
    """Return the operators that a step calls, and how often it waits for a value among them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    called = [e.name for e in profile.events() if e.cpu_parent is None]
    called = [name for name in called if "::" in name and name not in _FREE]
    return called, sum(name in _WAITS for name in called)


def _adjust_pages(
    cache_loc: Tensor, cu_num_pages: Tensor, extra_page: Tensor, delta: Tensor
) -> None:
    """Give each sequence its spare page (1), or take its last one (-1). One kernel there."""
    pages: list[int] = []
    ends = [0]
    for b, change in enumerate(delta.tolist()):
        begin, end = cu_num_pages[b : b + 2].tolist()
        own = cache_loc[begin:end].tolist()
        own = [*own, int(extra_page[b])] if change > 0 else own[: len(own) + change]
        pages += own
        ends.append(len(pages))
    cache_loc[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    cu_num_pages[: len(ends)] = torch.tensor(ends, dtype=torch.int32)


_library = torch.library.Library("trtllm_in_torch", "DEF")
_library.define("adjust_pages(Tensor(a!) loc, Tensor(b!) cu, Tensor extra, Tensor delta) -> ()")
_library.impl("adjust_pages", _adjust_pages, "CPU")


def build_cache_loc(full: Tensor, cu: Tensor, used: Tensor, batch_size: int) -> Tensor:
    ends = [int(cu[b].item()) + int(used[b].item()) for b in range(batch_size)]
    return torch.cat([full[int(cu[b].item()) : ends[b]] for b in range(batch_size)])


def increment_position_ids(
    args: dict[str, Tensor], increment: Tensor, page_size: int
) -> dict[str, Tensor]:
    """The out-of-place update, with an allocation: all of `args` are there, of the batch's size."""
    n, new = len(increment), dict(args)
    cu = args["cu_seqlen"]
    by_token = torch.repeat_interleave(increment, cu[1:] - cu[:-1])
    new["position_ids"] = args["position_ids"].clone()
    new["position_ids"] += by_token
    old_lens = args["seq_len_with_cache"]
    lens = old_lens.clone()
    lens += increment
    new["seq_len_with_cache"] = lens
    new["last_page_len"] = args["last_page_len"].clone()
    new["last_page_len"].copy_((lens - 1) % page_size + 1)
    old_pages = (old_lens + page_size - 1) // page_size
    pages = (lens + page_size - 1) // page_size
    extra = pages - old_pages
    used = args["pages_per_seq"].clone()
    used += extra
    new["pages_per_seq"] = used
    cu_pages = args["cu_num_pages"].clone()
    ends = cu_pages[1:]
    ends += torch.cumsum(extra, 0)
    new["cu_num_pages"] = cu_pages
    allocated = args["cu_allocated_pages"]
    assert (used <= allocated[1:] - allocated[:-1]).all()
    if (pages != old_pages).any().item():
        assert (pages >= 1).all()
        built = build_cache_loc(args["full_cache_loc"], allocated, used, n)
        loc = args["cache_loc"].clone()
        loc[: len(built)].copy_(built)
        loc[len(built) :].zero_()
        new["cache_loc"] = loc
    return new


def offset_pos_and_cache_(info: SimpleNamespace, offset: Tensor) -> None:
    """The in-place update, with a spare page for each sequence."""
    info.input_pos += offset
    info.last_page_len += offset
    over, under = info.last_page_len > info.tokens_per_block, info.last_page_len <= 0
    torch.ops.trtllm_in_torch.adjust_pages(
        info.cache_loc, info.cu_num_pages, info.extra_page_per_seq, over.int() - under.int()
    )
    info.last_page_len -= 1
    info.last_page_len %= info.tokens_per_block
    info.last_page_len += 1
    position_ids = info.position_ids[: info.total]
    position_ids += torch.repeat_interleave(offset, info.seq_len.long())
    info.seq_len_with_cache += offset
    info.use_initial_states.copy_(info.input_pos > 0)


def offset_with_new_lens_(
    info: SimpleNamespace, new_lens: Tensor, gather_slot_idx: Tensor, num_prefill: int
) -> None:
    increment = torch.zeros(len(info.input_pos), dtype=torch.int32)
    increment[num_prefill:] = new_lens[gather_slot_idx] - 1
    offset_pos_and_cache_(info, increment)


def switch_to_generate_(info: SimpleNamespace) -> None:
    n = len(info.seq_len)
    ids = info.input_ids[(info.cu_seqlen[1:] - 1).long()]
    info.input_ids[:n].copy_(ids)
    info.input_pos += info.seq_len - 1
    info.cu_seqlen.copy_(torch.arange(n + 1, dtype=torch.int32))
    info.seq_len.fill_(1)
    info.position_ids[:n].copy_(info.input_pos)
    info.use_initial_states.copy_(info.input_pos > 0)
    info.total = n


def offset_from_previous_(
    position_ids: Tensor,
    kv_lens: Tensor,
    new_lens: Tensor,
    slots: Tensor,
    tokens_per_gen_step: int,
    buffers: SimpleNamespace,
) -> None:
    """PyExecutor, generation requests only: gather the offsets when staging, add them later."""
    buffers.pos_offsets.copy_(new_lens[buffers.slots_by_token])
    buffers.kv_offsets.copy_((new_lens - tokens_per_gen_step)[slots])
    position_ids += buffers.pos_offsets
    kv_lens += buffers.kv_offsets
