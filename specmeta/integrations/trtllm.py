"""TensorRT-LLM: AutoDeploy's sequence metadata, and what PyExecutor's overlap scheduler adds.

Everything here is one launch, reads nothing back and works on plain tensors: TensorRT-LLM itself
is not imported. Functions whose name ends in ``_`` write into the tensors that they are given and
may be captured into a CUDA graph. Wrong values are never obeyed (a row that cannot be right is
emptied, its neighbours go on) and are reported in ``status``; see ``docs/contract.md``. What
differs from the originals is listed in ``docs/trtllm.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specmeta import Status, ops
from specmeta._integers import check_integer, check_integers
from specmeta.serving.ring import DownloadRing, Fetched

__all__ = [
    "HostTwins",
    "build_cache_loc_from_full",
    "increment_position_ids",
    "offset_from_previous_",
    "offset_pos_and_cache_",
    "offset_with_new_lens_",
    "switch_to_generate_",
]

_HOST = "_host"
# What `increment_position_ids` changes, and the output of `advance` that it is.
_OUTPUTS = {
    "last_page_len": "last_page_len",
    "pages_per_seq": "pages_per_seq",
    "cu_num_pages": "kv_indptr",
}


def build_cache_loc_from_full(
    full_cache_loc: Sequence[int] | Tensor,
    cu_allocated_pages: Sequence[int] | Tensor,
    pages_per_seq: Sequence[int] | Tensor,
    batch_size: int,
    *,
    out: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """List the pages in use: the first of each sequence's allocated ones.

    Without `out` the result is as long as the list, which the host must know: the arguments are
    then lists or CPU tensors, and a fault raises. With `out` nothing is read back, a fault is in
    `status`, and the tail of `out` is zeroed.

    Parameters
    ----------
    full_cache_loc : int32 [A], or sequence of int
        All allocated pages, by sequence.
    cu_allocated_pages : int32 [B+1], or sequence of int
        Where each sequence's part of them begins.
    pages_per_seq : int32 [B], or sequence of int; with `out` updated
        Pages in use. With `out`, a sequence that wants more than it has is set to 0, as are those
        from `batch_size` on.
    batch_size : int
        Sequences to list, at most B. Frozen by capture.
    out : int32 [C], written, optional
        Takes the list.
    status : int32 [B], updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`). With `out` only.
    workspace : int64 [X], updated, optional
        From :func:`specmeta.workspace`. With `out` only.

    Returns
    -------
    Tensor
        `out`, or int32 [sum(pages_per_seq)].

    Raises
    ------
    ValueError
        More sequences than there are. With `out`: `pages_per_seq` is no tensor. Without: `status`
        or `workspace`; a tensor that is not on the CPU, numbers that are no integers or no int32; a
        sequence that wants more pages than it has, fewer than none, or one of -1.
    RuntimeError
        A tensor that cannot be right; nothing has been written then.

    Examples
    --------
    >>> from specmeta.integrations import trtllm
    >>> trtllm.build_cache_loc_from_full([10, 11, 20, 21], [0, 2, 4], [1, 2], 2)
    tensor([10, 20, 21], dtype=torch.int32)
    """
    if out is not None:
        _check_tensor("pages_per_seq", pages_per_seq)
        batch_size = check_integer("batch_size", batch_size, low=0, high=len(pages_per_seq))
        # Pages of one token: a length is then a number of pages.
        ops.advance(
            None,
            cast(Tensor, pages_per_seq),
            page_size=1,
            num_rows=batch_size,
            alloc_pages=cast(Tensor, full_cache_loc),
            alloc_indptr=cast(Tensor, cu_allocated_pages),
            kv_indices=out,
            status=status,
            workspace=workspace,
        )
        return out

    if status is not None or workspace is not None:
        raise ValueError("status, workspace: expected out with them, got None")
    given = {
        "full_cache_loc": full_cache_loc,
        "cu_allocated_pages": cu_allocated_pages,
        "pages_per_seq": pages_per_seq,
    }
    tensors = []
    for name, values in given.items():
        if isinstance(values, Tensor):
            if values.device.type != "cpu":
                raise ValueError(
                    f"{name}: expected out, or a tensor on the CPU, got one on {values.device}: "
                    "how long the list is would have to be waited for"
                )
            values = values.tolist()
        integers = check_integers(name, values, low=-(2**31))
        tensors.append(torch.tensor(integers, dtype=torch.int32))
    full, indptr, used = tensors
    batch_size = check_integer("batch_size", batch_size, low=0, high=len(used))
    indptr, used = indptr[: batch_size + 1], used[:batch_size]
    wanted = used.tolist()
    out = torch.empty(min(sum(n for n in wanted if n > 0), len(full)), dtype=torch.int32)
    status = torch.zeros_like(used)
    build_cache_loc_from_full(full, indptr, used, batch_size, out=out, status=status)
    for b, bits in enumerate(status.tolist()):
        if bits:
            raise ValueError(
                f"pages_per_seq: expected 0 to the {indptr.diff().tolist()} allocated pages, all "
                f"of an id of at least 0, got {wanted}: {Status(bits)!r} at sequence {b}"
            )
    return out


def increment_position_ids(
    named_args: Mapping[str, Tensor],
    increment: Tensor,
    page_size: int,
    *,
    in_place: bool = False,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> dict[str, Tensor]:
    """Move each sequence by its increment, forward or back, with everything that follows from it.

    `position_ids` and `seq_len_with_cache` move; `last_page_len`, `pages_per_seq`, `cu_num_pages`
    and, where the allocation is given, `cache_loc` are written as far as they are there. Sequences
    from ``len(increment)`` on are padding: 0, and in `cu_num_pages` the total.

    Parameters
    ----------
    named_args : mapping of str to Tensor
        `position_ids` int64 [T] (or of two dimensions), `cu_seqlen` int32 [B+1],
        `seq_len_with_cache` int32 [B], and any of `last_page_len` [B], `pages_per_seq` [B],
        `cu_num_pages` [B+1], `cache_loc` [C] with `full_cache_loc` [A] and `cu_allocated_pages`
        [B+1], all int32. Not changed unless `in_place`.
    increment : int32 or int64 [batch_size]
        0 for a context request; tokens that came out, less one, for a generation request.
    page_size : int
        Tokens a page.
    in_place : bool, default False
        Write into the tensors of `named_args`, whose addresses stay, in place of new ones.
    status : int32 [B], updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`).
    workspace : int64 [X], updated, optional
        From :func:`specmeta.workspace`.

    Returns
    -------
    dict of str to Tensor
        All keys of `named_args`, but for the host twins (``*_host``) of what moves, be their
        device tensors there or not: nobody on the host knows their values yet. :class:`HostTwins`
        brings them. A new `cache_loc` is long enough for the whole allocation, and zero behind the
        pages in use.

    Raises
    ------
    ValueError
        A tensor that is needed is missing or none; more increments than sequences.
    RuntimeError
        A tensor that cannot be right; nothing has been written then.

    Examples
    --------
    >>> from specmeta.integrations import trtllm
    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> moved = trtllm.increment_position_ids(
    ...     {"position_ids": torch.tensor([31]), "cu_seqlen": i32(0, 1),
    ...      "seq_len_with_cache": i32(32), "cache_loc": i32(100),
    ...      "full_cache_loc": i32(100, 101), "cu_allocated_pages": i32(0, 2)},
    ...     i32(1), page_size=32,
    ... )
    >>> moved["position_ids"].tolist(), moved["cache_loc"].tolist()
    ([32], [100, 101])
    """
    if not isinstance(named_args, Mapping):
        raise ValueError(f"named_args: expected a mapping, got {named_args!r}")
    for name in ("position_ids", "cu_seqlen", "seq_len_with_cache"):
        if name not in named_args:
            raise ValueError(f"named_args: expected {name}, got {sorted(named_args)}")
        _check_tensor(name, named_args[name])
    num_rows = _num_rows("increment", increment, named_args["seq_len_with_cache"])
    full_cache_loc = named_args.get("full_cache_loc")
    cu_allocated_pages = named_args.get("cu_allocated_pages")
    with_pages = full_cache_loc is not None and cu_allocated_pages is not None
    moves = ["position_ids", "seq_len_with_cache", *_OUTPUTS]
    if with_pages:
        moves.append("cache_loc")
    changed = [name for name in moves if named_args.get(name) is not None]
    for name in ("full_cache_loc", *changed) if with_pages else changed:
        _check_tensor(name, named_args[name])
    stale = {name + _HOST for name in moves}

    result = {name: value for name, value in named_args.items() if name not in stale}
    if not in_place:
        for name in changed:
            result[name] = torch.empty_like(named_args[name])
        if "cache_loc" in changed and full_cache_loc is not None:
            size = max(len(named_args["cache_loc"]), len(full_cache_loc))
            result["cache_loc"] = named_args["cache_loc"].new_empty(size)

    outputs: dict[str, Any] = {_OUTPUTS[name]: result[name] for name in changed if name in _OUTPUTS}
    seq_lens = named_args["seq_len_with_cache"]
    ops.advance(
        increment,
        seq_lens,
        page_size=page_size,
        num_rows=num_rows,
        cu_seqlens_q=named_args["cu_seqlen"],
        alloc_pages=full_cache_loc if with_pages else None,
        alloc_indptr=cu_allocated_pages if with_pages else None,
        position_ids=_flat(named_args["position_ids"]),
        position_ids_out=None if in_place else _flat(result["position_ids"]),
        seq_lens_out=None if in_place else result["seq_len_with_cache"],
        kv_indices=result["cache_loc"] if "cache_loc" in changed else None,
        status=status,
        workspace=workspace,
        **outputs,
    )
    return result


def offset_pos_and_cache_(
    info: Any,
    offset: Tensor,
    *,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Move each sequence by its offset, forward or back, in the buffers of a `SequenceInfo`.

    Everything that depends on a length is written: `input_pos`, `position_ids`,
    `seq_len_with_cache`, `last_page_len`, `pages_per_seq`, `cu_num_pages`, `cache_loc` and
    `use_initial_states`. In the draft loop call :func:`switch_to_generate_` first.

    Parameters
    ----------
    info : object
        With the attributes `tokens_per_block`, `max_seq_len` (int), `position_ids` int64 [T],
        `cu_seqlen` int32 [B+1], `seq_len_with_cache` int32 [B], and any of `input_pos`,
        `last_page_len`, `pages_per_seq` [B], `cu_num_pages` [B+1], `cache_loc` [C] with
        `full_cache_loc` [A] and `cu_allocated_pages` [B+1], all int32, `use_initial_states`
        bool [B].
    offset : int32 or int64 [batch_size]
        Sequences from ``len(offset)`` on are padding.
    status : int32 [B], updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`).
    workspace : int64 [X], updated, optional
        From :func:`specmeta.workspace`.

    Raises
    ------
    AttributeError
        `info` lacks a buffer that is needed.
    ValueError
        More offsets than sequences, or no tensor of them.
    RuntimeError
        A tensor that cannot be right; nothing has been written then.
    """
    _advance(
        info,
        offset,
        num_rows=_num_rows("offset", offset, _needed(info, "seq_len_with_cache")),
        status=status,
        workspace=workspace,
    )


def offset_with_new_lens_(
    info: Any,
    new_lens: Tensor,
    gather_slot_idx: Tensor,
    *,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Correct sequences that were staged as if one token had come out of the step before.

    Each moves by ``new_lens[gather_slot_idx[b]] - 1``; context requests stay.

    Parameters
    ----------
    info : object
        As for :func:`offset_pos_and_cache_`.
    new_lens : int32 or int64 [N]
        Tokens that came out of the step before, the bonus token included.
    gather_slot_idx : int32 or int64 [B]
        Where each sequence's number stands in `new_lens`; -1 for a context request and any other
        that was not in that step: it stays. One entry a row, where AutoDeploy's own list has none
        for context requests.
    status : int32 [B], updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`).
    workspace : int64 [X], updated, optional
        From :func:`specmeta.workspace`.

    Raises
    ------
    AttributeError
        `info` lacks a buffer that is needed.
    ValueError
        `gather_slot_idx` is no tensor.
    RuntimeError
        A tensor that cannot be right; nothing has been written then.
    """
    _check_tensor("gather_slot_idx", gather_slot_idx)
    _advance(
        info,
        new_lens,
        count_index=gather_slot_idx,
        seq_len_bias=-1,
        position_bias=-1,
        status=status,
        workspace=workspace,
    )


def _needed(info: Any, name: str) -> Tensor:
    buffer = getattr(info, name, None)
    if not isinstance(buffer, Tensor):
        raise AttributeError(f"info: expected a tensor {name}, got {type(buffer).__qualname__}")
    return buffer


def _advance(info: Any, counts: Tensor, **how: Any) -> None:
    full_cache_loc = getattr(info, "full_cache_loc", None)
    cu_allocated_pages = getattr(info, "cu_allocated_pages", None)
    cache_loc = getattr(info, "cache_loc", None)
    given = [x is not None for x in (full_cache_loc, cu_allocated_pages)]
    if not all(given) and (any(given) or cache_loc is not None):
        raise AttributeError(
            "info: expected full_cache_loc and cu_allocated_pages, from which cache_loc is made"
        )
    ops.advance(
        counts,
        _needed(info, "seq_len_with_cache"),
        page_size=info.tokens_per_block,
        max_seq_len=info.max_seq_len,
        cu_seqlens_q=_needed(info, "cu_seqlen"),
        alloc_pages=full_cache_loc,
        alloc_indptr=cu_allocated_pages,
        position_ids=_flat(_needed(info, "position_ids")),
        cached_lens=getattr(info, "input_pos", None),
        pages_per_seq=getattr(info, "pages_per_seq", None),
        last_page_len=getattr(info, "last_page_len", None),
        kv_indptr=getattr(info, "cu_num_pages", None),
        kv_indices=cache_loc,
        use_initial_states=getattr(info, "use_initial_states", None),
        **how,
    )


def switch_to_generate_(info: Any, *, status: Tensor | None = None) -> None:
    """Leave each sequence its last token, in the buffers of a `SequenceInfo`.

    The batch then is one of decode requests: `input_ids`, `position_ids`, `input_pos`,
    `cu_seqlen`, `seq_len` and `use_initial_states` are written, the first two with 0 behind the
    batch. Lengths and pages stay. A batch that has one token a sequence stays as it is.

    Parameters
    ----------
    info : object
        With the attributes `cu_seqlen` int32 [B+1], `seq_len_with_cache` int32 [B], and any of
        `input_ids` int32 or int64, `position_ids` int64 [T], `input_pos`, `seq_len` int32 [B],
        `use_initial_states` bool [B].
    status : int32 [B], updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`).

    Raises
    ------
    AttributeError
        `info` lacks a buffer that is needed.
    RuntimeError
        A tensor that cannot be right; nothing has been written then.
    """
    ops.keep_last(
        _needed(info, "cu_seqlen"),
        _needed(info, "seq_len_with_cache"),
        input_ids=_flat(getattr(info, "input_ids", None)),
        position_ids=_flat(getattr(info, "position_ids", None)),
        query_lens=getattr(info, "seq_len", None),
        cached_lens=getattr(info, "input_pos", None),
        use_initial_states=getattr(info, "use_initial_states", None),
        status=status,
    )


def offset_from_previous_(
    position_ids: Tensor,
    kv_lens_cuda: Tensor,
    new_tokens_lens: Tensor,
    previous_batch_indices: Tensor,
    *,
    cu_seqlens_q: Tensor,
    tokens_per_gen_step: int,
    num_rows: Tensor | int | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Correct what PyExecutor staged before it knew the step before.

    Its positions stand as if no token had come out, its KV lengths as if all had: positions move
    by ``n``, lengths by ``n - tokens_per_gen_step``. `kv_lens_cuda` keeps its address, so views of
    it stay valid.

    Parameters
    ----------
    position_ids : int32 or int64 [T], or of two dimensions; updated
        Positions of the query tokens.
    kv_lens_cuda : int32 [B], updated
        Tokens that attention reads for each request, query tokens included.
    new_tokens_lens : int32 or int64 [N]
        Tokens that came out of the step before, the bonus token included.
    previous_batch_indices : int32 or int64 [B]
        Where each request's number stands in `new_tokens_lens`; -1 for a request that was not in
        that step (a context request, a dummy): it stays. One entry a row, where PyExecutor's own
        buffer has none for these.
    cu_seqlens_q : int32 [B+1]
        Where each request's query tokens begin.
    tokens_per_gen_step : int
        Query tokens of a generation request, K + 1. Frozen by capture.
    num_rows : int32 [1] tensor or int, optional
        Live requests; those past it are padding. An int is frozen by capture. Absent: all.
    status : int32 [B], updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`).
    workspace : int64 [X], updated, optional
        From :func:`specmeta.workspace`.

    Raises
    ------
    RuntimeError
        A tensor that cannot be right; nothing has been written then.
    ValueError
        One that is needed is none, or `tokens_per_gen_step` is no integer above 0.

    Examples
    --------
    >>> from specmeta.integrations import trtllm
    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> positions, kv_lens = i32(10, 11, 12), i32(16)  # 10 tokens cached, 3 + 3 to come
    >>> trtllm.offset_from_previous_(
    ...     positions, kv_lens, i32(2), i32(0), cu_seqlens_q=i32(0, 3), tokens_per_gen_step=3
    ... )
    >>> positions.tolist(), kv_lens.tolist()
    ([12, 13, 14], [15])
    """
    for name, tensor in (
        ("position_ids", position_ids),
        ("previous_batch_indices", previous_batch_indices),
        ("cu_seqlens_q", cu_seqlens_q),
    ):
        _check_tensor(name, tensor)
    tokens_per_gen_step = check_integer("tokens_per_gen_step", tokens_per_gen_step, low=1)
    ops.advance(
        new_tokens_lens,
        kv_lens_cuda,
        # No page list is written: PyExecutor's tables hold all allocated pages of a request.
        page_size=1,
        count_index=previous_batch_indices,
        max_accepted=tokens_per_gen_step,
        seq_len_bias=-tokens_per_gen_step,
        num_rows=num_rows,
        cu_seqlens_q=cu_seqlens_q,
        position_ids=_flat(position_ids),
        status=status,
        workspace=workspace,
    )


class HostTwins:
    """Copies of device tensors for the host (``*_host``), one set for each step.

    A set has pinned memory of its own until it is read, so no later step writes into what the
    host is about to read, and queueing a set never waits. Outside captured work only.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        What is to be copied: names, largest sizes, and the device.
    depth : int, default 2
        Sets that may be under way or unread.

    Examples
    --------
    >>> from specmeta.integrations import trtllm
    >>> info = {"input_pos": torch.tensor([7, 8])}
    >>> twins = trtllm.HostTwins(info)
    >>> twins.fetch(info)
    >>> _ = info["input_pos"].add_(1)  # the next step
    >>> twins.read()
    {'input_pos_host': tensor([7, 8])}
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, depth: int = 2) -> None:
        if not isinstance(tensors, Mapping) or not tensors:
            raise ValueError(f"tensors: expected names and tensors, got {tensors!r}")
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        depth = check_integer("depth", depth, low=1)
        self._sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        self._device = next(iter(tensors.values())).device
        self._depth = depth
        self._ring = DownloadRing(
            depth * len(tensors),
            max(self._sizes.values()),
            device=self._device,
        )
        self._sets: deque[dict[str, Fetched]] = deque()

    def fetch(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue the copies of a step's tensors behind the work that made them.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            At least the names given at the start; others are left alone.

        Raises
        ------
        RuntimeError
            `depth` sets have not been read.
        ValueError
            A tensor is missing, larger than it was at the start, or on another device; nothing is
            queued.
        """
        if len(self._sets) == self._depth:
            raise RuntimeError(f"all {self._depth} sets are unread")
        for name, size in self._sizes.items():
            _check_tensor(name, tensors.get(name))
            if tensors[name].nbytes > size:
                raise ValueError(
                    f"{name}: expected at most {size} bytes, got {tensors[name].nbytes}"
                )
            if tensors[name].device != self._device:
                raise ValueError(f"{name}: expected {self._device}, got {tensors[name].device}")
        self._sets.append({name: self._ring.fetch(tensors[name]) for name in self._sizes})

    @property
    def is_ready(self) -> bool:
        """Whether the oldest unread set has come, so that `read` returns without waiting."""
        return bool(self._sets) and all(copy.is_ready for copy in self._sets[0].values())

    def read(self) -> dict[str, Tensor]:
        """Return the oldest unread set by its names on the host, once it has come.

        Raises
        ------
        RuntimeError
            None is under way.
        """
        if not self._sets:
            raise RuntimeError("no set is under way")
        return {name + _HOST: copy.read() for name, copy in self._sets.popleft().items()}


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__qualname__}")


def _num_rows(name: str, counts: Tensor, lens: Tensor) -> int | None:
    for what, tensor in ((name, counts), ("seq_len_with_cache", lens)):
        _check_tensor(what, tensor)
        if tensor.dim() != 1:
            raise ValueError(f"{what}: expected one dimension, got shape {list(tensor.shape)}")
    if len(counts) > len(lens):
        raise ValueError(
            f"{name}: expected at most the {len(lens)} sequences of seq_len_with_cache, "
            f"got {len(counts)}"
        )
    return None if len(counts) == len(lens) else len(counts)


def _flat(by_token: Any) -> Any:
    """View a tensor by token of the shape [1, T] or [B, 1] as [T]; pass on anything else."""
    is_flat = not isinstance(by_token, Tensor) or by_token.dim() == 1
    return by_token if is_flat else by_token.view(-1)
