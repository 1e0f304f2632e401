"""SGLang: what its speculative steps need around each pass, one launch a pass, for chains.

SGLang keeps one KV slot a token in ``req_to_token``, which is a page table of page size 1. Its
lengths are by row, int64, and count the tokens that have KV; the bonus token of the last step comes
behind them. `Chains` makes from both what the draft passes, the verify pass and the draft's extend
pass read, in the engine's own tensors, and what a verify pass leaves. Nothing waits for the device.

A row that carries no request (past ``num_rows``, or with the index -1) is padding wherever it
stands, whatever its length says: it has length 1, reads page 0, and its tokens have location 0 and
position 0, as SGLang's graph runners expect. Nothing of it is accepted.

``docs/sglang.md`` sets the engine's names beside those of the operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmeta import ops
from specmeta._integers import check_integer

__all__ = ["Chains"]

# A row without a request, as the graph runners pad: length 1, page 0, location 0.
_PADDING: dict[str, Any] = {"pad_page": 0, "pad_slot": 0, "pad_seq_len": 1}


class Chains:
    """The launches of SGLang's speculative steps, where every request drafts one chain.

    It owns what is the same for all steps, and scratch space; everything else is the engine's, what
    `commit` takes from `extend` too. The methods may be captured, and a replay reads the tensors
    that were given. All calls and replays of an object belong on one stream: one object a stream.

    Parameters
    ----------
    req_to_token : int32 [requests, max_len]
        The KV slot of each token. It is only read.
    max_bs : int
        Most rows of a launch.
    num_steps : int
        K, the draft steps (``speculative_num_steps``).
    num_draft_tokens : int
        W, the query tokens of a row in a verify or extend pass: the bonus token and its drafts.
    allocated_lens : int32 [requests], optional
        How many entries of ``req_to_token`` each request has been given (``kv_allocated_len``). A
        row that would go past them is emptied, and flagged in ``status``. Absent: all of them.
    topk : int, default 1
        ``speculative_eagle_topk``. Only 1: with more, a request's drafts are a tree, in which a
        token does not see all that stands before it. That needs a list of pages for each branch, a
        mask for the verify pass, and a copy of the accepted branch's KV to where the prefix ends;
        no operation here makes them.

    Attributes
    ----------
    qo_indptr : int32 [max_bs+1]
        Where each row's query tokens begin: W apart. Use its first B+1 entries.

    Raises
    ------
    ValueError
        `topk` is not 1, a number is none or out of range, or a tensor is no such one.

    Examples
    --------
    >>> pool = torch.tensor([[0] * 6, [11, 12, 13, 14, 15, 16]], dtype=torch.int32)
    >>> chains = Chains(pool, max_bs=2, num_steps=2, num_draft_tokens=3)
    >>> out_cache_loc, positions = torch.empty(2, 6, dtype=torch.int64)
    >>> end_offset, accept_lens, new_seq_lens = torch.empty(3, 2, dtype=torch.int64)
    >>> chains.extend(
    ...     torch.tensor([1, 0]), torch.tensor([2, 1]), num_rows=1,
    ...     out_cache_loc=out_cache_loc, positions=positions, end_offset=end_offset,
    ... )
    >>> out_cache_loc.tolist(), positions.tolist(), end_offset.tolist()
    ([13, 14, 15, 0, 0, 0], [2, 3, 4, 0, 0, 0], [5, 0])
    >>> chains.commit(
    ...     torch.tensor([1, 0]), end_offset,
    ...     torch.tensor([7, 8, 9, 0, 0, 0]), torch.tensor([8, 5, 6, 0, 0, 0]), num_rows=1,
    ...     accept_lens=accept_lens, new_seq_lens=new_seq_lens,
    ... )
    >>> accept_lens.tolist(), new_seq_lens.tolist()
    ([2, 0], [4, 0])
    """

    def __init__(
        self,
        req_to_token: Tensor,
        *,
        max_bs: int,
        num_steps: int,
        num_draft_tokens: int,
        allocated_lens: Tensor | None = None,
        topk: int = 1,
    ) -> None:
        if topk != 1:
            raise ValueError(f"topk: expected 1, since drafts are chains here, got {topk}")
        max_bs = check_integer("max_bs", max_bs, low=0)
        num_steps = check_integer("num_steps", num_steps, low=1, high=2**16 - 1)
        num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, low=1)
        if max_bs * num_draft_tokens >= 2**31:
            got = max_bs * num_draft_tokens
            raise ValueError(f"max_bs * num_draft_tokens: expected below {2**31}, got {got}")
        _check("req_to_token", req_to_token, dims=2, dtype=torch.int32)
        if allocated_lens is not None:
            _check("allocated_lens", allocated_lens, dims=1, dtype=torch.int32)
            if len(allocated_lens) != len(req_to_token):
                expected = f"{len(req_to_token)} entries, as req_to_token has rows"
                raise ValueError(f"allocated_lens: expected {expected}, got {len(allocated_lens)}")
        device, width = req_to_token.device, num_draft_tokens
        rows = torch.arange(max_bs + 1, dtype=torch.int32, device=device)
        if allocated_lens is None:  # unused entries aren't negative, so no end is looked for
            requests, max_len = req_to_token.shape
            allocated_lens = rows.new_full((requests,), max_len)
        self._pool: dict[str, Any] = {
            "page_table": req_to_token,
            "num_pages": allocated_lens,
            "page_size": 1,
        }
        self._max_bs = max_bs
        self._num_steps = num_steps
        self._width = width
        self.qo_indptr = rows * width
        # Where `extend` writes lengths that the caller doesn't ask for, so that the engine's stay.
        self._scratch_lens = torch.empty(max_bs, dtype=torch.int64, device=device)
        self._workspace = self._draft_workspace = None
        if device.type == "cuda":
            self._workspace = ops.workspace(max_bs, device=device)
            self._draft_workspace = ops.workspace(max_bs, num_steps=num_steps, device=device)

    def draft(
        self,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        *,
        num_rows: Tensor | int | None = None,
        out_cache_loc: Tensor,
        positions: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        status: Tensor | None = None,
    ) -> None:
        """Lay out the K passes of the draft loop, of one token a row each.

        Parameters
        ----------
        req_pool_indices : int32 or int64 [B]
            The request of each row, -1 for none. B is at most ``max_bs``.
        seq_lens : int32 or int64 [B]
            Tokens of each row that have KV; a row of 0 is padding, a negative one too (BAD_COUNT).
            Of rows that are padding, it is not read.
        num_rows : int32 [1] tensor or int, optional
            Rows that carry requests (``raw_bs``); those behind are padding. An int is frozen by
            capture. Absent: all B.
        out_cache_loc : int64 [B*K], written
            Where the KV of row b's token in step k goes, at ``b * K + k``.
        positions : int32 or int64 [B], written, optional
            ``seq_lens``: the position of the first step's token. The engine counts on from there.
        kv_indptr : int32 [K, B+1], written, optional
        kv_indices : int32 [K, C], written, optional
            The slots that attention reads in each step, row after row, then 0 up to its end: of the
            engine's own buffer, pass the columns that these rows can need, ``kv_indices[:,
            :bound]``. Its rows may have any stride. Too small: the rows that do not fit are padding
            in that step (OVERFLOW).
        status : int32 [requests+1], updated, optional
            Faults are OR-ed in (:class:`specmeta.Status`).

        Raises
        ------
        ValueError
            There are more rows than ``max_bs``, or a tensor is missing.
        RuntimeError
            A tensor that cannot be right; nothing has been written then.
        """
        self._count_rows(req_pool_indices)
        _check("out_cache_loc", out_cache_loc, dims=1)
        ops.draft_lists(
            seq_lens,
            num_steps=self._num_steps,
            row_to_slot=req_pool_indices,
            num_rows=num_rows,
            slot_mapping=out_cache_loc,
            position_ids=positions,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            status=status,
            workspace=self._draft_workspace,
            **self._pool,
            **_PADDING,
        )

    def extend(
        self,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        *,
        num_rows: Tensor | int | None = None,
        out_cache_loc: Tensor,
        positions: Tensor | None = None,
        kv_lens: Tensor | None = None,
        end_offset: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        status: Tensor | None = None,
    ) -> None:
        """Lay out a pass of W tokens a row behind the cached ones: verify, or the draft's extend.

        Parameters
        ----------
        req_pool_indices : int32 or int64 [B]
            The request of each row, -1 for none. B is at most ``max_bs``.
        seq_lens : int32 or int64 [B]
            Tokens of each row that have KV; a row of 0 is padding. Of rows that are padding, it is
            not read.
        num_rows : int32 [1] tensor or int, optional
            Rows that carry requests (``raw_bs``); those behind are padding. An int is frozen by
            capture. Absent: all B.
        out_cache_loc : int64 [B*W], written
            Where the KV of each query token goes.
        positions : int32 or int64 [B*W], written, optional
        kv_lens : int32 or int64 [B], written, optional
            ``seq_lens + W``, 1 for padding: what attention reads. So a row that is padding has more
            queries than keys.
        end_offset : int32 or int64 [B], written, optional
            ``seq_lens + W``, 0 for padding: what `commit` takes. Keep it until then.
        kv_indptr : int32 [B+1], written, optional
        kv_indices : int32 [C], written, optional
            The slots that attention reads, row after row, then 0 up to its end: pass
            ``kv_indices[:bound]``, as in `draft`. Too small: the rows that do not fit are padding
            (OVERFLOW).
        status : int32 [requests+1], updated, optional
            Faults are OR-ed in (:class:`specmeta.Status`).

        Raises
        ------
        ValueError
            There are more rows than ``max_bs``, a tensor is missing, or ``out_cache_loc`` or
            ``positions`` has another length.
        RuntimeError
            A tensor that cannot be right; nothing has been written then.
        """
        bs = self._count_rows(req_pool_indices)
        by_token = {"out_cache_loc": out_cache_loc}
        if positions is not None:
            by_token["positions"] = positions
        for name, tensor in by_token.items():
            _check(name, tensor, dims=1)
            if len(tensor) != bs * self._width:
                expected = f"B * W = {bs * self._width} entries"
                raise ValueError(f"{name}: expected {expected}, got {len(tensor)}")
        ops.advance(
            None,
            seq_lens,
            seq_len_bias=self._width,
            row_to_slot=req_pool_indices,
            num_rows=num_rows,
            cu_seqlens_q=self.qo_indptr[: bs + 1],
            seq_lens_out=self._scratch_lens[:bs] if end_offset is None else end_offset,
            position_ids_out=positions,
            slot_mapping=out_cache_loc,
            padded_seq_lens=kv_lens,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            status=status,
            workspace=self._workspace,
            **self._pool,
            **_PADDING,
        )

    def commit(
        self,
        req_pool_indices: Tensor,
        end_offset: Tensor,
        draft_token: Tensor,
        target_predict: Tensor,
        *,
        num_rows: Tensor | int | None = None,
        accept_lens: Tensor | None = None,
        num_correct_drafts: Tensor | None = None,
        new_seq_lens: Tensor | None = None,
        bonus_tokens: Tensor | None = None,
        select_index: Tensor | None = None,
        predict: Tensor | None = None,
        status: Tensor | None = None,
    ) -> None:
        """Accept the leading drafts that the target also chose: what the verify pass leaves.

        Parameters
        ----------
        req_pool_indices : int32 or int64 [B]
            The request of each row, -1 for none.
        end_offset : int32 or int64 [B]
            What `extend` wrote for the verify pass. A row that was emptied there has 0, and is
            padding here.
        draft_token : int32 or int64 [B*W]
            The query tokens of the verify pass.
        target_predict : int32 or int64 [B*W]
            The target's choice after each of them. With sampling, what the sampler left in
            ``predict``: the count is its own, as long as it never draws a draft that it rejected.
        num_rows : int32 [1] tensor or int, optional
            Rows that carry requests (``raw_bs``). Absent: all B.
        accept_lens : int32 or int64 [B], written, optional
            Accepted drafts and the bonus token; 0 for padding.
        num_correct_drafts : int32 or int64 [B], written, optional
            Accepted drafts.
        new_seq_lens : int32 or int64 [B], written, optional
            ``seq_lens + accept_lens``, of the lengths that `extend` was given; 0 for padding.
        bonus_tokens : int32 or int64 [B], written, optional
            0 for padding.
        select_index : int32 or int64 [B], written, optional
            The query token that was accepted last, ``b * W + accept_lens - 1``; the row's first
            one for padding.
        predict : int32 or int64 [B*W], written, optional
            The accepted tokens, each where its draft's predecessor stands, then the bonus token,
            then 0: the input ids of the draft's extend pass.
        status : int32 [requests+1], updated, optional
            Faults are OR-ed in (:class:`specmeta.Status`).

        Raises
        ------
        ValueError
            There are more rows than ``max_bs``, or a tensor is missing.
        RuntimeError
            A tensor that cannot be right; nothing has been written then.
        """
        bs = self._count_rows(req_pool_indices)
        ops.accept_greedy(
            target_predict,
            draft_token,
            cu_seqlens_q=self.qo_indptr[: bs + 1],
            row_to_slot=req_pool_indices,
            num_rows=num_rows,
            seq_lens=end_offset,
            num_accepted=num_correct_drafts,
            num_sampled=accept_lens,
            seq_lens_out=new_seq_lens,
            next_tokens=bonus_tokens,
            token_indices=select_index,
            draft_input_ids=predict,
            status=status,
            workspace=self._workspace,
        )

    def _count_rows(self, req_pool_indices: Tensor) -> int:
        _check("req_pool_indices", req_pool_indices, dims=1)
        bs = len(req_pool_indices)
        if bs > self._max_bs:
            raise ValueError(
                f"req_pool_indices: expected at most max_bs = {self._max_bs}, got {bs}"
            )
        return bs


def _check(name: str, tensor: Any, *, dims: int, dtype: torch.dtype | None = None) -> None:
    """Refuse what is read before the operators, which check the rest, see it."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__qualname__}")
    if tensor.dim() != dims:
        raise ValueError(f"{name}: expected rank {dims}, got shape {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")
