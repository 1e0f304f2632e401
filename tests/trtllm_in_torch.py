"""TensorRT-LLM's way to keep its sequence metadata, in plain torch: what the adapter replaces.

A rewrite of what the originals do (TensorRT-LLM, 2026: AutoDeploy's `sequence_metadata_utils` and
`SequenceInfo`, PyExecutor's model engine), to be compared with and to be counted: as many kernels
and reads as there, or fewer. A kernel of their own there is an operator of its own here.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor


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
    """The pages in use. Read: where the allocation ends, and three numbers of each sequence."""
    assert cu[batch_size].item() <= len(full)
    spans = [(cu[b].item(), cu[b + 1].item(), used[b].item()) for b in range(batch_size)]
    assert all(wanted <= end - begin for begin, end, wanted in spans)
    return torch.cat([full[begin : begin + wanted] for begin, _, wanted in spans])


def _num_pages(lens: Tensor, page_size: int) -> Tensor:
    return (lens - 1) // page_size + 1


def increment_position_ids(
    args: dict[str, Tensor], increment: Tensor, page_size: int
) -> dict[str, Tensor]:
    """The out-of-place update, with an allocation: all of `args` are there, of the batch's size."""
    moved = ("position_ids", "seq_len_with_cache", "cache_loc")
    moved += ("cu_num_pages", "pages_per_seq", "last_page_len")
    new = args | {name: args[name].clone() for name in moved}
    lens = new["seq_len_with_cache"].add_(increment)
    num_pages = _num_pages(lens, page_size)
    gained = num_pages - _num_pages(args["seq_len_with_cache"], page_size)
    new["pages_per_seq"].add_(gained)
    assert (new["pages_per_seq"] <= args["cu_allocated_pages"].diff()).all()
    new["cu_num_pages"][1:].add_(gained.cumsum(0))
    if (gained != 0).any():
        assert (num_pages > 0).all()
        pages = build_cache_loc(
            args["full_cache_loc"], args["cu_allocated_pages"], new["pages_per_seq"], len(lens)
        )
        new["cache_loc"][: len(pages)].copy_(pages)
        new["cache_loc"][len(pages) :].zero_()
    new["last_page_len"].copy_((lens - 1) % page_size + 1)
    new["position_ids"].add_(increment.repeat_interleave(args["cu_seqlen"].diff()))
    return new


def offset_pos_and_cache_(info: SimpleNamespace, offset: Tensor) -> None:
    """The in-place update, with a spare page for each sequence."""
    by_token = offset.repeat_interleave(info.seq_len.long())
    info.position_ids[: info.total].add_(by_token)
    for lens in (info.seq_len_with_cache, info.input_pos, info.last_page_len):
        lens.add_(offset)
    info.use_initial_states.copy_(info.input_pos > 0)
    over, under = info.last_page_len > info.tokens_per_block, info.last_page_len <= 0
    torch.ops.trtllm_in_torch.adjust_pages(
        info.cache_loc, info.cu_num_pages, info.extra_page_per_seq, over.int() - under.int()
    )
    info.last_page_len.sub_(1).remainder_(info.tokens_per_block).add_(1)


def offset_with_new_lens_(
    info: SimpleNamespace, new_lens: Tensor, gather_slot_idx: Tensor, num_prefill: int
) -> None:
    offset = torch.zeros_like(info.input_pos)
    offset[num_prefill:].copy_(new_lens[gather_slot_idx] - 1)
    offset_pos_and_cache_(info, offset)


def switch_to_generate_(info: SimpleNamespace) -> None:
    n = len(info.seq_len)
    info.input_pos.add_(info.seq_len - 1)
    info.position_ids[:n].copy_(info.input_pos)
    info.use_initial_states.copy_(info.input_pos > 0)
    last = (info.cu_seqlen[1:] - 1).long()
    info.input_ids[:n].copy_(info.input_ids[last])
    info.seq_len.fill_(1)
    info.cu_seqlen.copy_(torch.arange(n + 1, dtype=torch.int32))
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
    position_ids.add_(buffers.pos_offsets)
    kv_lens.add_(buffers.kv_offsets)
