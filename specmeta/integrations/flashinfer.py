"""FlashInfer: a batch that writes into the buffers of a wrapper.

A wrapper made with ``use_cuda_graph=True`` keeps the tensors that its caller gave it for the page
lists, and its kernels read them at every run. `bind` makes them the buffers of a
:class:`specmeta.BatchMetadata`, so that every ``stage``, ``draft_step`` and ``advance`` leaves them
right, at any page size, inside a captured graph. ``plan`` is called once, before the capture, with
what `plan_bounds` returns: host tensors that hold for every length. `decode_arguments` serves the
functions that have no plan. ``docs/flashinfer.md`` says what a plan may be made once for.

FlashInfer is not imported here: a wrapper is anything that has its attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmeta._integers import check_integer
from specmeta.batch import BatchMetadata

__all__ = ["bind", "decode_arguments", "outputs", "plan_bounds"]

# What operations call the tensors, and where the wrappers keep them.
_BUFFERS = {
    "kv_indptr": "_paged_kv_indptr_buf",
    "kv_indices": "_paged_kv_indices_buf",
    "last_page_len": "_paged_kv_last_page_len_buf",
}


def outputs(wrapper: Any) -> dict[str, Tensor]:
    """Return a wrapper's page lists under the names of an operation's outputs.

    For engines that call the operations themselves: ``specmeta.advance(..., **outputs(wrapper))``.

    Parameters
    ----------
    wrapper
        A ``BatchDecodeWithPagedKVCacheWrapper`` or ``BatchPrefillWithPagedKVCacheWrapper`` with
        ``use_cuda_graph=True``.

    Returns
    -------
    dict
        ``kv_indptr`` int32 [B+1], ``kv_indices`` int32 [C] and ``last_page_len`` int32 [B]: the
        caller's own tensors, not copies.

    Raises
    ------
    ValueError
        The wrapper has no such tensors, or they are not int32.

    Examples
    --------
    >>> class Wrapper:  # stands for one of FlashInfer's
    ...     _paged_kv_indptr_buf = torch.zeros(2, dtype=torch.int32)
    ...     _paged_kv_indices_buf = torch.zeros(3, dtype=torch.int32)
    ...     _paged_kv_last_page_len_buf = torch.zeros(1, dtype=torch.int32)
    >>> specmeta.advance(
    ...     torch.tensor([2]), torch.tensor([3]), page_size=4,
    ...     page_table=torch.tensor([[5, 6, 7]], dtype=torch.int32), **outputs(Wrapper),
    ... )
    >>> Wrapper._paged_kv_indices_buf.tolist(), Wrapper._paged_kv_last_page_len_buf.tolist()
    ([5, 6, 0], [1])
    """
    return {name: _buffer(wrapper, attribute) for name, attribute in _BUFFERS.items()}


def bind(batch: BatchMetadata, wrapper: Any, *, with_qo_indptr: bool = False) -> None:
    """Make a wrapper's page lists the buffers of a batch.

    ``batch.kv_indptr``, ``batch.kv_indices`` and ``batch.last_page_len`` are the wrapper's tensors
    from then on; the batch's own are dropped. Wrappers that are given the same three tensors
    (FlashInfer allows it) all see every update: bind one of them. Bind before anything is captured.
    Views that ``batch.first_rows(n)`` gave before have the wrapper's tensors too; for a wrapper
    with fewer rows, bind the view: it then keeps that wrapper's.

    Parameters
    ----------
    batch : BatchMetadata
        Changed as above.
    wrapper
        See `outputs`.
    with_qo_indptr : bool
        Bind ``qo_indptr`` as well, which becomes ``batch.cu_seqlens_q``: for a prefill wrapper
        whose rows have the step's query tokens. A decode wrapper has one query a row, and what it
        keeps under that name is its own.

    Raises
    ------
    ValueError
        The wrapper has another number of rows, or lives on another device, or a tensor is not
        contiguous, or it has no room for the pad pages of a batch made with ``pad_seq_len=1``, or
        `outputs` raises; the batch is unchanged then.
    """
    _check_batch(batch)
    tensors = outputs(wrapper)
    if with_qo_indptr:
        tensors["cu_seqlens_q"] = _buffer(wrapper, "_qo_indptr_buf")
    least = batch.max_rows * batch._pads["pad_seq_len"]
    capacity = tensors["kv_indices"].numel()
    if capacity < least:  # a row without tokens lists a page too
        raise ValueError(f"wrapper: expected a kv_indices of at least {least}, got {capacity}")
    try:
        batch.replace_buffers(**tensors)
    except ValueError as error:
        raise ValueError(f"wrapper: {error}") from error


def plan_bounds(batch: BatchMetadata, *, query_len: int | None = None) -> tuple[Tensor, ...]:
    """Return what ``plan`` takes first, so that it holds for every length that the batch allows.

    Every row has ``max_pages`` full pages here. ``plan`` copies this into the wrapper's tensors,
    where the next update replaces it. Plan with ``disable_split_kv=True`` and the backend
    ``"fa2"``, a decode wrapper with ``use_tensor_cores=True``: only then is nothing of it left in
    what the kernels read.

    Parameters
    ----------
    batch : BatchMetadata
    query_len : int, optional
        Query tokens of every row, for a prefill wrapper. Absent: a decode wrapper.

    Returns
    -------
    tuple of Tensor
        On the CPU, int32: ``indptr`` [B+1], ``indices`` [0] and ``last_page_len`` [B]; with
        `query_len`, ``qo_indptr`` [B+1] before them.

    Raises
    ------
    ValueError
        `query_len` is no integer or below 1, or a sum is past 2**31 - 1.

    Examples
    --------
    >>> batch = specmeta.BatchMetadata(
    ...     max_rows=2, max_slots=2, max_tokens=6, max_pages=3, page_size=4, max_seq_len=12,
    ...     max_draft_len=2,
    ... )
    >>> [bound.tolist() for bound in plan_bounds(batch, query_len=3)]
    [[0, 3, 6], [0, 3, 6], [], [4, 4]]
    """
    _check_batch(batch)
    if query_len is not None:
        query_len = check_integer("query_len", query_len, low=1)
    most = batch.max_rows * max(batch.max_pages, query_len or 0)
    if most >= 2**31:
        raise ValueError(f"batch: expected sums up to {2**31 - 1}, got {most}")
    ends = torch.arange(batch.max_rows + 1, dtype=torch.int32)
    pages = (
        ends * batch.max_pages,
        torch.empty(0, dtype=torch.int32),
        torch.full((batch.max_rows,), batch.page_size, dtype=torch.int32),
    )
    return pages if query_len is None else (ends * query_len, *pages)


def decode_arguments(
    batch: BatchMetadata, *, max_query_len: int | None = None
) -> dict[str, Tensor | int]:
    """Return the metadata arguments of ``trtllm_batch_decode_with_kv_cache``, which has no plan.

    All tensors are the batch's own, at their fixed addresses, and the numbers are upper bounds: a
    captured call stays right for every replay. Rows without tokens have length 1 and read the pad
    page if the batch was made with ``pad_seq_len=1``, which these kernels need.

    Parameters
    ----------
    batch : BatchMetadata
        Made with ``pad_seq_len=1``.
    max_query_len : int, optional
        The most query tokens of a row; rows may have fewer. Only the function's ``trtllm-gen``
        backend takes that. Absent: one each, as in a draft pass.

    Returns
    -------
    dict
        ``block_tables`` int32 [B, P], ``seq_lens`` int32 [B], ``max_seq_len``; with `max_query_len`
        also ``max_q_len``, ``cum_seq_lens_q`` int32 [B+1] and ``q_len_per_req=None``.

    Raises
    ------
    ValueError
        The batch has no block table, or was made with ``pad_seq_len=0``; `max_query_len` is no
        integer or below 1.

    Examples
    --------
    >>> batch = specmeta.BatchMetadata(
    ...     max_rows=2, max_slots=2, max_tokens=6, max_pages=3, page_size=4, max_seq_len=12,
    ...     max_draft_len=2, pad_seq_len=1,
    ... )
    >>> batch.stage()
    >>> arguments = decode_arguments(batch)
    >>> arguments["seq_lens"].tolist(), arguments["max_seq_len"]
    ([1, 1], 12)
    """
    _check_batch(batch)
    if max_query_len is not None:
        max_query_len = check_integer("max_query_len", max_query_len, low=1)
    if batch.block_table is None:
        raise ValueError("batch: expected one with a block table, got with_block_table=False")
    if batch._pads["pad_seq_len"] != 1:
        raise ValueError("batch: expected one made with pad_seq_len=1, got 0")
    arguments: dict[str, Any] = {
        "block_tables": batch.block_table,
        "seq_lens": batch.padded_seq_lens,
        "max_seq_len": batch.max_seq_len,
    }
    if max_query_len is not None:
        arguments |= {
            "q_len_per_req": None,
            "max_q_len": max_query_len,
            "cum_seq_lens_q": batch.cu_seqlens_q,
        }
    return arguments


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, BatchMetadata):
        raise ValueError(f"batch: expected a BatchMetadata, got {batch!r}")


def _buffer(wrapper: Any, attribute: str) -> Tensor:
    tensor = getattr(wrapper, attribute, None)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"wrapper: expected one with use_cuda_graph=True, got no {attribute}")
    if tensor.dtype != torch.int32:
        raise ValueError(f"wrapper: expected an int32 {attribute}, got {tensor.dtype}")
    return tensor
