"""vLLM: specmeta's operators in place of the engine's own metadata kernels.

Installing specmeta beside vLLM is enough: its entry point in the group ``vllm.general_plugins``
calls :func:`register` in every process of the engine. ``SPECMETA_VLLM=0`` leaves the engine as it
is. ``docs/vllm.md`` lists the kernels, and where the results differ.

Each kernel below has the parameter names of the one that it stands for, since the engine's
dispatcher passes arguments by these names. They read nothing back from the device, copy nothing,
and write into the engine's own buffers.
"""

# ruff: noqa: N803  (the engine's names)
from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import specmeta

__all__ = ["register"]

_logger = logging.getLogger("vllm.specmeta")  # vLLM shows what is below its own name


@functools.cache
def _num_pages(device: torch.device, rows: int, width: int) -> Tensor:
    """Pages a row has: all. The engine's tables are 0 behind a request's pages, or stale."""
    return torch.full((rows,), width, dtype=torch.int32, device=device)


@functools.cache
def _workspace(device: torch.device, rows: int) -> Tensor | None:
    """Scratch memory; one a device, since the engine launches its kernels on one stream."""
    return None if device.type == "cpu" else specmeta.workspace(rows, device=device)


def eagle_step_slot_mapping_metadata_kernel(
    positions_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    seq_lens_ptr: Tensor,
    out_clamped_positions_ptr: Tensor,
    out_slot_mapping_ptr: Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
    batch_size: int,
) -> None:
    """Give each row the next position of the draft loop: `draft_step`."""
    # From the second step on the engine passes one buffer as both.
    in_place = positions_ptr.data_ptr() == out_clamped_positions_ptr.data_ptr()
    rows, width = block_table_ptr.shape
    specmeta.draft_step(
        seq_lens_ptr,
        page_size=block_size,
        max_seq_len=max_model_len,
        position_ids=positions_ptr,
        position_ids_out=None if in_place else out_clamped_positions_ptr,
        page_table=block_table_ptr,
        num_pages=_num_pages(block_table_ptr.device, rows, width),
        slot_mapping=out_slot_mapping_ptr,
        pad_slot=PAD_ID,
    )


def eagle_prepare_next_token_padded_kernel(
    sampled_token_ids_ptr: Tensor,
    discard_request_mask_ptr: Tensor,
    backup_next_token_ids_ptr: Tensor,
    next_token_ids_ptr: Tensor,
    valid_sampled_tokens_count_ptr: Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride_sampled_token_ids: int,
    BLOCK_SIZE_TOKENS: int,
) -> None:
    """Count the ids that stand in each row, and take the last: `count_sampled`."""
    specmeta.count_sampled(
        sampled_token_ids_ptr,
        vocab_size=vocab_size,
        discarded=discard_request_mask_ptr[:num_reqs],
        backup_tokens=backup_next_token_ids_ptr[:num_reqs],
        num_sampled=valid_sampled_tokens_count_ptr,
        next_tokens=next_token_ids_ptr,
    )


def eagle_prepare_inputs_padded_kernel(
    cu_num_draft_tokens_ptr: Tensor,
    valid_sampled_tokens_count_ptr: Tensor,
    query_start_loc_gpu_ptr: Tensor,
    token_indices_to_sample_ptr: Tensor,
    num_rejected_tokens_gpu_ptr: Tensor,
    num_reqs: int,
) -> None:
    """Find the token of each row that was accepted last: `locate_sampled`."""
    specmeta.locate_sampled(
        valid_sampled_tokens_count_ptr,
        cu_num_draft_tokens_ptr,
        query_start_loc_gpu_ptr,
        token_indices=token_indices_to_sample_ptr,
        num_rejected=num_rejected_tokens_gpu_ptr,
    )


def compute_slot_mapping_kernel(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: Tensor,
    positions_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    slot_mapping_ptr: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Say where the KV of each token goes: `map_slots`."""
    rows, (most_rows, width) = len(query_start_loc_ptr) - 1, block_table_ptr.shape
    if TOTAL_CP_WORLD_SIZE > 1:  # a rank holds a part of each page: the engine's own
        _replaced[_SLOTS][(rows + 1,)](
            num_tokens,
            max_num_tokens,
            query_start_loc_ptr,
            positions_ptr,
            block_table_ptr,
            block_table_stride,
            slot_mapping_ptr,
            KV_CACHE_BLOCK_SIZE,
            TOTAL_CP_WORLD_SIZE,
            TOTAL_CP_RANK,
            CP_KV_CACHE_INTERLEAVE_SIZE,
            PAD_ID,
            BLOCK_SIZE,
        )
        return
    specmeta.map_slots(
        positions_ptr,
        slot_mapping_ptr,
        page_size=KV_CACHE_BLOCK_SIZE,
        cu_seqlens_q=query_start_loc_ptr,
        page_table=block_table_ptr[:rows],
        num_pages=_num_pages(block_table_ptr.device, most_rows, width)[:rows],
        pad_slot=PAD_ID,
        workspace=_workspace(block_table_ptr.device, most_rows),
    )


_UTILS = "vllm.v1.spec_decode.utils"
_SLOTS = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
_KERNELS: dict[str, Callable[..., None]] = {
    f"{_UTILS}.eagle_step_slot_mapping_metadata_kernel": eagle_step_slot_mapping_metadata_kernel,
    f"{_UTILS}.eagle_prepare_next_token_padded_kernel": eagle_prepare_next_token_padded_kernel,
    f"{_UTILS}.eagle_prepare_inputs_padded_kernel": eagle_prepare_inputs_padded_kernel,
    _SLOTS: compute_slot_mapping_kernel,
}
# What stood there before, by name.
_replaced: dict[str, Any] = {}
# Platforms that know of the kernels already.
_told: set[type] = set()


def _override() -> None:
    """Put the kernels into the engine's dispatcher, whatever is there."""
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.spec_decode import utils
    from vllm.v1.worker import block_table

    slots = block_table.ComputeSlotMappingKernel.kernel
    if getattr(slots, "func", None) is not compute_slot_mapping_kernel:  # a second engine's call
        _replaced[_SLOTS] = slots
    register_kernels(_KERNELS)
    # Nothing of ours is compiled while the engine runs, and its warm-up takes Triton kernels only.
    for owner in (
        utils._eagle_step_slot_mapping_metadata,
        utils._eagle_prepare_inputs_padded,
        utils._eagle_prepare_next_token_padded,
        block_table._COMPUTE_SLOT_MAPPING_KERNEL,
    ):
        owner.register_warmup = lambda *_args, **_kwargs: None
    _logger.info("specmeta %s in place of %d kernels", specmeta.__version__, len(_KERNELS))


def register() -> None:
    """Have every worker of vLLM use the operators, unless ``SPECMETA_VLLM`` is 0.

    vLLM calls this by the entry point, before a worker lets its platform replace kernels; the
    operators then replace the platform's too.

    Raises
    ------
    ValueError
        ``SPECMETA_VLLM`` is neither 0 nor 1.
    """
    wanted = os.environ.get("SPECMETA_VLLM", "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"SPECMETA_VLLM: expected 0 or 1, got {wanted!r}")
    if wanted == "0":
        return
    from vllm.platforms import current_platform

    platform = type(current_platform)
    before = getattr(platform, "register_triton_kernel_overrides", None)
    if before is None:
        _logger.warning("specmeta: this vLLM has no way to replace a kernel; it stays as it is")
        return
    if platform in _told:
        return
    _told.add(platform)

    def register_triton_kernel_overrides(_cls: type) -> None:
        before()
        _override()

    platform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)
