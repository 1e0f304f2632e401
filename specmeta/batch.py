"""The persistent buffers of a batch and its slots, and the operations over them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from specmeta import observe, ops
from specmeta._environment import check_device
from specmeta._integers import check_integer, check_integers
from specmeta.graph import check_host
from specmeta.serving.ring import UploadRing

# What the host may have under way before it waits. A step of many rows takes a few kilobytes, and
# each of the buffers also holds the longest prompt.
_UPLOAD_BUFFERS = 4
_UPLOAD_BYTES = 2**16
# Buffers by row that have B + 1 entries; all others by row have B.
_BY_ROW_AND_END = ("kv_indptr", "cu_seqlens_q")
_BY_ROW = (
    "row_to_slot",
    "query_lens",
    "seq_lens",
    "cached_lens",
    "padded_seq_lens",
    "pages_per_seq",
    "last_page_len",
    "block_table",
    "num_draft_tokens",
    "num_accepted",
    "num_rejected",
    "next_tokens",
    "token_indices",
    "accepted_tokens",
    "draft_ids",
    "draft_position_ids",
    "draft_slot_mapping",
)


def _first_rows(name: str, buffer: Any, count: int) -> Any:
    """Return what a view of ``count`` rows has of a buffer, None where there is none."""
    if buffer is None or name not in (*_BY_ROW, *_BY_ROW_AND_END):
        return buffer
    part = buffer[: count + (name in _BY_ROW_AND_END)]
    torch._dynamo.mark_static_address(part)
    return part


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _host_method(
    method: Callable[Concatenate[BatchMetadata, _P], _R],
) -> Callable[Concatenate[BatchMetadata, _P], _R]:
    """Refuse a method inside a captured step: its checks and copies belong between replays."""

    @functools.wraps(method)
    def checked(batch: BatchMetadata, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        check_host(method.__name__)
        return method(batch, *args, **kwargs)

    return checked


def _address(buffer: Tensor | None) -> int | None:
    return None if buffer is None else buffer.data_ptr()


class BatchMetadata:
    """Every buffer that the metadata of a batch needs, at an address that never changes.

    A request owns a *slot* from its prompt to its release; a *row* is a place in one launch, and
    ``row_to_slot`` says which slot it carries. The device methods (:meth:`stage`,
    :meth:`accept_greedy`, :meth:`accept_sampled`, :meth:`draft_step`, :meth:`advance`) are one
    launch each (a draft model's first :meth:`draft_step` is two) and may be captured into a CUDA
    graph. The host methods (:meth:`assign`, :meth:`add_pages`, :meth:`drop_pages`,
    :meth:`release`, :meth:`set_rows`, :meth:`set_query_lens`) are copies in the order of the
    current stream: call them between replays, always on the same stream. Inside a captured step
    they raise :class:`specmeta.graph.CaptureError`. Nothing here reads the device.

    The buffers are marked as static addresses for ``torch.compile``, so that
    ``mode="reduce-overhead"`` captures them in place instead of copying them for every call.

    Parameters
    ----------
    max_rows : int
        B, the rows of a launch.
    max_slots : int
        S, the requests that may be alive at once.
    max_tokens : int
        T, the query tokens of a launch.
    max_pages : int
        P, the pages that a slot can hold; also the width of ``block_table``.
    page_size : int
        Tokens a page.
    max_seq_len : int
        No length may pass it.
    max_draft_len : int
        K, drafts a row; 0 for plain decoding.
    ledger_len : int, optional
        L, token ids a slot. Default: ``max_seq_len + max_draft_len + 1``, so that pages end before
        the ledger does.
    kv_capacity : int, optional
        Entries of ``kv_indices``, where they are written. Default: ``max_rows * max_pages``.
    with_kv_indices, with_block_table : bool
        Which lists of pages are written. Attention reads one of them: leave the other out.
    device : torch.device or str
    index_dtype : torch.dtype
        int64 or int32, for token ids, positions and ``row_to_slot``, as far as they are the
        batch's own.
    pad_page, pad_slot, pad_token, pad_seq_len : int
        As in :func:`specmeta.stage`.
    ledger : BatchMetadata, optional
        The target's batch, for a drafter that has pages of its own, and as many rows and slots.
        ``tokens``, ``known_lens``, ``num_drafts``, ``row_to_slot`` and ``num_rows`` are then the
        target's own, and :meth:`stage` continues where the draft's cache ends, as far as the target
        has committed.
    eagle : bool
        Whether that drafter is an Eagle head, not a draft model. It reads the target's tokens
        shifted by one, as far as the target has committed them: there it has hidden states, at
        the same index. What it writes behind that, from its own hidden states, it writes anew
        once the target has some. ``query_lens``, too, are the target's own.

    Attributes
    ----------
    row_to_slot : index_dtype [B]
    query_lens : int32 [B]
    num_rows : int32 [1]
    seq_lens, cached_lens, padded_seq_lens, pages_per_seq, last_page_len : int32 [B]
    kv_indptr, cu_seqlens_q : int32 [B+1]
    kv_indices : int32 [C], or None
    block_table : int32 [B, P], or None
    num_draft_tokens, num_accepted, num_rejected, token_indices : int32 [B]
    next_tokens : index_dtype [B]
    accepted_tokens : index_dtype [B, K+1]
    input_ids, position_ids, draft_input_ids : index_dtype [T]
    slot_mapping : int64 [T]
    draft_ids, draft_position_ids : index_dtype [B]
        Inputs of the draft loop's next pass, one token a row.
    draft_slot_mapping : int64 [B]
    page_table : int32 [S, P]
    num_pages, known_lens, committed_lens, num_drafts, written_lens : int32 [S]
    tokens : index_dtype [S, L]
    status : int32 [S+1]
    workspace : int64 [X] or None
        On a GPU: see :func:`specmeta.workspace`.

    Raises
    ------
    ValueError
        A size is no integer or out of range, or does not fit the ledger's; another argument
        cannot be what it stands for.

    Examples
    --------
    >>> batch = specmeta.BatchMetadata(
    ...     max_rows=1, max_slots=1, max_tokens=4, max_pages=2, page_size=4, max_seq_len=8,
    ...     max_draft_len=1,
    ... )
    >>> batch.assign(0, [5, 6, 7], pages=[1, 2])
    >>> batch.set_rows([0], [4])
    >>> batch.stage()
    >>> batch.input_ids.tolist(), batch.slot_mapping.tolist()
    ([5, 6, 7, 0], [4, 5, 6, -1])
    >>> batch.accept_greedy(torch.tensor([6, 7, 8, 0]))
    >>> batch.next_tokens.tolist(), batch.committed_lens.tolist(), batch.known_lens.tolist()
    ([8], [3], [4])
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_slots: int,
        max_tokens: int,
        max_pages: int,
        page_size: int,
        max_seq_len: int,
        max_draft_len: int,
        ledger_len: int | None = None,
        kv_capacity: int | None = None,
        with_kv_indices: bool = True,
        with_block_table: bool = True,
        device: torch.device | str = "cpu",
        index_dtype: torch.dtype = torch.int64,
        pad_page: int = 0,
        pad_slot: int = -1,
        pad_token: int = 0,
        pad_seq_len: int = 0,
        ledger: BatchMetadata | None = None,
        eagle: bool = False,
    ) -> None:
        max_rows = check_integer("max_rows", max_rows, low=0)
        max_slots = check_integer("max_slots", max_slots, low=0)
        max_tokens = check_integer("max_tokens", max_tokens, low=0)
        max_pages = check_integer("max_pages", max_pages, low=0)
        page_size = check_integer("page_size", page_size, low=1)
        max_seq_len = check_integer("max_seq_len", max_seq_len, low=1)
        max_draft_len = check_integer("max_draft_len", max_draft_len, low=0)
        pad_page = check_integer("pad_page", pad_page, low=-(2**31))
        pad_token = check_integer("pad_token", pad_token, low=-(2**31))
        pad_slot = check_integer("pad_slot", pad_slot, low=-(2**63), high=2**63 - 1)
        pad_seq_len = check_integer("pad_seq_len", pad_seq_len, low=0, high=1)
        if ledger_len is not None:
            ledger_len = check_integer("ledger_len", ledger_len, low=0)
        if kv_capacity is not None:
            kv_capacity = check_integer("kv_capacity", kv_capacity, low=0)
            if not with_kv_indices:
                raise ValueError(
                    f"kv_capacity: expected none with with_kv_indices=False, got {kv_capacity}"
                )
        for name, flag in (
            ("with_kv_indices", with_kv_indices),
            ("with_block_table", with_block_table),
            ("eagle", eagle),
        ):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}: expected a bool, got {flag!r}")
        if index_dtype not in (torch.int32, torch.int64):
            raise ValueError(f"index_dtype: expected int32 or int64, got {index_dtype}")
        if eagle and ledger is None:
            raise ValueError("eagle: expected a ledger, the target's batch")
        if ledger is not None:
            if not isinstance(ledger, BatchMetadata):
                raise ValueError(f"ledger: expected a BatchMetadata, got {ledger!r}")
            if ledger._target is not None:
                raise ValueError("ledger: expected a target's batch, got a drafter's")
            if max_slots != ledger.max_slots:
                raise ValueError(
                    f"max_slots: expected the ledger's {ledger.max_slots}, got {max_slots}"
                )
            if max_rows != ledger.max_rows:
                raise ValueError(
                    f"max_rows: expected the ledger's {ledger.max_rows}, got {max_rows}"
                )
            # The target would take those behind its own for tokens that are certain.
            if max_draft_len > ledger.max_draft_len:
                raise ValueError(
                    f"max_draft_len: expected at most the ledger's {ledger.max_draft_len}, "
                    f"got {max_draft_len}"
                )
            if ledger_len is not None:
                raise ValueError(f"ledger_len: expected none beside a ledger, got {ledger_len}")
        self.device = check_device(device)
        if ledger is not None:
            # With an index, where `device` is "cuda".
            expected, got = ledger.seq_lens.device, torch.empty(0, device=self.device).device
            if got != expected:
                raise ValueError(f"device: expected the ledger's {expected}, got {got}")
        self.max_rows: int = max_rows
        self.max_slots: int = max_slots
        self.max_tokens = max_tokens
        self.max_pages = max_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.max_draft_len: int = max_draft_len
        self._pads = {"pad_page": pad_page, "pad_slot": pad_slot, "pad_seq_len": pad_seq_len}
        self._pad_token = pad_token
        self._target: BatchMetadata | None = ledger
        self._eagle = eagle
        self._views: dict[int, BatchMetadata] = {}
        # As the host gave them; None: nobody has the slot.
        self._pages_of: list[list[int] | None] = [None] * max_slots

        def buffer(*shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> Tensor:
            tensor = torch.full(shape, fill, dtype=dtype, device=self.device)
            torch._dynamo.mark_static_address(tensor)
            return tensor

        rows, slots, tokens = max_rows, max_slots, max_tokens
        self.query_lens = buffer(rows)
        self.seq_lens: Tensor = buffer(rows)
        self.cached_lens = buffer(rows)
        self.padded_seq_lens = buffer(rows)
        self.pages_per_seq = buffer(rows)
        self.last_page_len = buffer(rows)
        self.kv_indptr = buffer(rows + 1)
        capacity = rows * max_pages if kv_capacity is None else kv_capacity
        self.kv_indices: Any = buffer(capacity, fill=pad_page) if with_kv_indices else None
        self.block_table: Any = buffer(rows, max_pages, fill=pad_page) if with_block_table else None
        self.cu_seqlens_q = buffer(rows + 1)
        self.num_draft_tokens = buffer(rows)
        self.num_accepted = buffer(rows)
        self.num_rejected = buffer(rows)
        self.next_tokens = buffer(rows, dtype=index_dtype)
        self.token_indices = buffer(rows)
        self.accepted_tokens = buffer(rows, max_draft_len + 1, dtype=index_dtype, fill=-1)
        self.input_ids = buffer(tokens, dtype=index_dtype)
        self.position_ids = buffer(tokens, dtype=index_dtype)
        self.slot_mapping = buffer(tokens, dtype=torch.int64, fill=pad_slot)
        self.draft_input_ids = buffer(tokens, dtype=index_dtype)
        self.draft_ids = buffer(rows, dtype=index_dtype)
        self.draft_position_ids = buffer(rows, dtype=index_dtype)
        self.draft_slot_mapping = buffer(rows, dtype=torch.int64, fill=pad_slot)
        self.page_table = buffer(slots, max_pages, fill=-1)
        self.num_pages = buffer(slots)
        self.committed_lens = buffer(slots)
        self.written_lens = buffer(slots)
        self.status = buffer(slots + 1)
        self.workspace = None
        if self.device.type == "cuda":
            self.workspace = ops.workspace(rows, device=self.device)
            torch._dynamo.mark_static_address(self.workspace)
        if ledger is None:
            self.row_to_slot = buffer(rows, dtype=index_dtype, fill=-1)
            self.num_rows = buffer(1)
            self.known_lens = buffer(slots)
            self.num_drafts = buffer(slots)
            width = max_seq_len + max_draft_len + 1 if ledger_len is None else ledger_len
            self.tokens = buffer(slots, width, dtype=index_dtype)
        else:
            self.row_to_slot = ledger.row_to_slot
            self.num_rows = ledger.num_rows
            self.known_lens = ledger.known_lens
            self.num_drafts = ledger.num_drafts
            self.tokens = ledger.tokens
            if eagle:
                self.query_lens = ledger.query_lens
        longest = max(rows, max_pages, self.tokens.shape[1] if ledger is None else 0)
        self._uploads = UploadRing(
            _UPLOAD_BUFFERS, max(8 * longest, _UPLOAD_BYTES), device=self.device
        )

    def first_rows(self, count: int) -> BatchMetadata:
        """Return the same batch, seen through its first rows: for a launch that has fewer.

        Everything by slot and by token is shared, ``num_rows`` too, and what stands by row is
        another view of the same memory. Rows are set on the whole batch. Ask before a capture for
        what it uses: inside, a new view raises, since it would be the capture's own.

        Parameters
        ----------
        count : int
            At most ``max_rows``.

        Returns
        -------
        BatchMetadata
            The same object for the same count.
        """
        count = check_integer("count", count, low=0, high=self.max_rows)
        if count == self.max_rows:
            return self
        if count not in self._views:
            check_host("first_rows")
            view = copy.copy(self)
            view.max_rows = count
            view._views = {}
            for name in (*_BY_ROW, *_BY_ROW_AND_END):
                setattr(view, name, _first_rows(name, getattr(self, name), count))
            self._views[count] = view
        return self._views[count]

    @_host_method
    def replace_buffers(self, /, **buffers: Tensor) -> None:
        """Take other tensors in place of buffers, such as an attention library's own.

        What :meth:`first_rows` returned before follows, but for a view that was itself given other
        tensors. Replace before a capture: a graph keeps what it was captured with; and before a
        drafter's batch is made over this one: that keeps what it took of its target.

        Parameters
        ----------
        **buffers : Tensor
            By the name of the attribute, with its shape (``kv_indices`` may have another C) and
            dtype, on the same device. Nothing is copied. A list of pages that was left out is
            written from then on.

        Raises
        ------
        ValueError
            The batch has no buffer of that name of its own, or one of them is no such tensor; none
            has been replaced then.
        """
        for name, buffer in buffers.items():
            self._check_buffer(name, buffer)
        for name, buffer in buffers.items():
            old = getattr(self, name)
            torch._dynamo.mark_static_address(buffer)
            setattr(self, name, buffer)
            for count, view in self._views.items():
                if _address(getattr(view, name)) == _address(old):
                    view.replace_buffers(**{name: _first_rows(name, buffer, count)})

    def _check_buffer(self, name: str, buffer: Any) -> None:
        # Not whether it's there: a batch may have been made without its lists of pages.
        is_list = name in ("kv_indices", "block_table")
        old = self.kv_indptr if is_list else getattr(self, name, None)
        if not isinstance(old, Tensor):
            raise ValueError(f"{name}: expected the name of a buffer that the batch has")
        if self._target is not None and old is getattr(self._target, name):
            raise ValueError(f"{name}: expected a buffer of the batch's own, got its target's")
        if not isinstance(buffer, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(buffer).__qualname__}")
        shape = list(old.shape)
        if is_list:
            pages = [self.max_rows, self.max_pages]
            shape = [buffer.numel()] if name == "kv_indices" else pages
        device = self.seq_lens.device  # with an index, where the batch has "cuda"
        for what, expected, got in (
            ("shape", shape, list(buffer.shape)),
            ("dtype", old.dtype, buffer.dtype),
            ("device", device, buffer.device),
        ):
            if got != expected:
                raise ValueError(f"{name}: expected {what} {expected}, got {got}")
        if buffer.shape[-1] > 1 and buffer.stride(-1) != 1:
            raise ValueError(f"{name}: expected contiguous rows, got strides {buffer.stride()}")

    # The device's part.

    def _rows(self) -> dict[str, Any]:
        return {
            "row_to_slot": self.row_to_slot,
            "num_rows": self.num_rows,
            "status": self.status,
            "workspace": self.workspace,
        }

    def _pages(self) -> dict[str, Any]:
        return {
            "page_size": self.page_size,
            "max_seq_len": self.max_seq_len,
            "page_table": self.page_table,
            "num_pages": self.num_pages,
            **self._pads,
        }

    def _layout(self) -> dict[str, Any]:
        return {
            "cached_lens": self.cached_lens,
            "padded_seq_lens": self.padded_seq_lens,
            "pages_per_seq": self.pages_per_seq,
            "last_page_len": self.last_page_len,
            "kv_indptr": self.kv_indptr,
            "kv_indices": self.kv_indices,
            "block_table": self.block_table,
        }

    def stage(self, num_tokens: int | None = None) -> None:
        """Lay out the step of the rows in ``row_to_slot``.

        A row takes at most ``query_lens`` of its slot's tokens, prompt and drafts alike.
        Writes ``seq_lens``, ``cu_seqlens_q``, ``input_ids``, ``position_ids``, ``slot_mapping``,
        ``num_draft_tokens`` and the page lists.

        Parameters
        ----------
        num_tokens : int, optional
            The launch uses only this many of the T tokens (frozen by capture).
        """
        target, n = self._target, self._num_tokens(num_tokens)
        known_lens, tokens = self.known_lens, self.tokens
        if target is not None and self._eagle:
            # At index p it reads token p + 1, and a hidden state that committed tokens have.
            known_lens, tokens = target.committed_lens, self.tokens[:, 1:]
        ops.stage(
            self.committed_lens if target is None else self.written_lens,
            limit_lens=None if target is None else target.committed_lens,
            known_lens=known_lens,
            # A drafter of its own reads what is certain and makes its own drafts.
            num_drafts=self.num_drafts if target is None else None,
            query_lens=self.query_lens,
            tokens=tokens,
            cu_seqlens_q=self.cu_seqlens_q,
            seq_lens=self.seq_lens,
            position_ids=self.position_ids[:n],
            input_ids=self.input_ids[:n],
            num_draft_tokens=self.num_draft_tokens,
            slot_mapping=self.slot_mapping[:n],
            pad_token=self._pad_token,
            **self._rows(),
            **self._pages(),
            **self._layout(),
        )

    def _num_tokens(self, num_tokens: int | None) -> int:
        if num_tokens is None:
            return self.max_tokens
        return check_integer("num_tokens", num_tokens, low=0, high=self.max_tokens)

    def _accept(self, n: int) -> dict[str, Any]:
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "num_draft_tokens": self.num_draft_tokens,
            "position_ids": self.position_ids[:n],
            "seq_lens": self.seq_lens,
            "pad_token": self._pad_token,
            "committed_lens": self.committed_lens,
            "known_lens": self.known_lens,
            "tokens": self.tokens,
            "num_drafts": self.num_drafts,
            "num_accepted": self.num_accepted,
            "num_rejected": self.num_rejected,
            "next_tokens": self.next_tokens,
            "token_indices": self.token_indices,
            "accepted_tokens": self.accepted_tokens,
            "draft_input_ids": self.draft_input_ids[:n],
            "last_position_ids": self.draft_position_ids,
            **self._rows(),
        }

    def accept_greedy(self, target_tokens: Tensor) -> None:
        """Accept the leading drafts that the target also chose, and commit them.

        Also makes the inputs of the draft pass.
        Writes ``num_accepted``, ``num_rejected``, ``next_tokens``, ``accepted_tokens``,
        ``token_indices``, ``draft_input_ids`` and ``draft_position_ids``; moves
        ``committed_lens``, ``known_lens`` and ``tokens``.

        Parameters
        ----------
        target_tokens : int32 or int64 [n]
            The target's choice after each of the n tokens that were staged.

        Raises
        ------
        ValueError
            It is no tensor, or has more dimensions than one, or more tokens than the batch.
        """
        if not isinstance(target_tokens, Tensor):
            got = type(target_tokens).__qualname__
            raise ValueError(f"target_tokens: expected a tensor, got {got}")
        n = target_tokens.numel()
        if target_tokens.dim() != 1 or n > self.max_tokens:
            raise ValueError(
                f"target_tokens: expected one dimension of at most {self.max_tokens} tokens, "
                f"got shape {list(target_tokens.shape)}"
            )
        ops.accept_greedy(target_tokens, self.input_ids[:n], **self._accept(n))

    def accept_sampled(
        self, sampled_tokens: Tensor, *, vocab_size: int, num_tokens: int | None = None
    ) -> None:
        """Commit what a rejection sampler let through; writes what :meth:`accept_greedy` does.

        Parameters
        ----------
        sampled_tokens : int32 or int64 [B, K+1]
            The sampler's output, -1 behind it.
        vocab_size : int
            Ids outside [0, vocab_size) end a row.
        num_tokens : int, optional
            As in :meth:`stage`.
        """
        n = self._num_tokens(num_tokens)
        ops.accept_sampled(
            sampled_tokens,
            vocab_size=vocab_size,
            input_ids=self.input_ids[:n],
            **self._accept(n),
        )

    def draft_step(self, draft_tokens: Tensor, *, index: int, last: bool = False) -> None:
        """Record draft ``index`` of every row and move the rows to their next draft position.

        The first step of a loop also takes the rejected drafts off the lengths. Writes
        ``seq_lens``, ``draft_ids``, ``draft_position_ids``, ``draft_slot_mapping`` and the page
        lists; ``tokens``, ``num_drafts`` and ``written_lens`` by slot. A draft that does not follow
        the one before it, since an index was left out, is not recorded: ``num_drafts`` stays.

        Parameters
        ----------
        draft_tokens : int32 or int64 [B]
        index : int
            Which draft of the loop, from 0, below ``max_draft_len`` (frozen by capture).
        last : bool
            Record only: there is no pass behind it.

        Raises
        ------
        ValueError
            The batch has no draft of that index.
        """
        index = check_integer("index", index, low=0)
        if index >= self.max_draft_len:
            raise ValueError(
                f"index: expected less than max_draft_len {self.max_draft_len}, got {index}"
            )
        # In the target's own batch, Eagle ran all verified tokens. A drafter with pages of its own
        # ran only what is certain, and no acceptance has told it where its rows ended.
        own, first = self._target is not None, index == 0
        if own and first:
            torch.sub(self.seq_lens, 1, out=self.draft_position_ids)
        # What Eagle's later passes write comes of its own hidden states: it doesn't count.
        writes = first or not self._eagle
        ops.draft_step(
            self.seq_lens,
            position_ids=self.draft_position_ids,
            num_rejected=self.num_rejected if first and not own else None,
            draft_tokens=draft_tokens,
            draft_index=index,
            shift=0 if own and not self._eagle else 1,
            last=last,
            known_lens=self.known_lens,
            num_drafts=self.num_drafts,
            written_lens=self.written_lens if writes else None,
            tokens=self.tokens,
            input_ids=self.draft_ids,
            slot_mapping=self.draft_slot_mapping,
            pad_token=self._pad_token,
            **self._rows(),
            **self._pages(),
            **self._layout(),
        )

    def advance(
        self,
        num_accepted: Tensor,
        *,
        count_index: Tensor | None = None,
        max_accepted: int | None = None,
        seq_len_bias: int = 0,
        position_bias: int = 0,
    ) -> None:
        """Move staged rows by counts that became known after staging.

        Updates ``seq_lens`` and ``position_ids`` and what follows from them. The parameters are
        those of :func:`specmeta.advance`.

        Parameters
        ----------
        num_accepted : int32 or int64 [N]
            By slot, or as ``count_index`` says.
        count_index : int32 or int64 [B], optional
            Needed with the batch's own ``num_accepted``, which stands by row.
        max_accepted : int, optional
        seq_len_bias, position_bias : int

        Raises
        ------
        ValueError
            It is needed and absent.
        """
        if num_accepted is self.num_accepted and count_index is None:
            raise ValueError(
                "count_index: expected the row of each count, since the batch's own num_accepted "
                "stands by row, got None"
            )
        ops.advance(
            num_accepted,
            self.seq_lens,
            count_index=count_index,
            max_accepted=max_accepted,
            seq_len_bias=seq_len_bias,
            position_bias=position_bias,
            cu_seqlens_q=self.cu_seqlens_q,
            position_ids=self.position_ids,
            slot_mapping=self.slot_mapping,
            **self._rows(),
            **self._pages(),
            **self._layout(),
        )

    # The host's part. Everything is checked before anything is written.

    def _check_slot(self, slot: int) -> int:
        return check_integer("slot", slot, low=0, high=self.max_slots - 1)

    def _held_pages(self, slot: int) -> list[int]:
        held = self._pages_of[slot]
        if held is None:
            raise ValueError(f"slot: expected one that is assigned, got {slot}")
        return held

    def _check_pages(self, pages: Sequence[int], held: list[int]) -> list[int]:
        new = check_integers("pages", pages, low=0)
        most = self.max_pages
        if len(held) + len(new) > most:
            raise ValueError(f"pages: expected at most {most}, got {len(held)} + {len(new)}")
        if self._pads["pad_page"] in new:
            raise ValueError(f"pages: expected no pad_page {self._pads['pad_page']}, got {new}")
        if len({*held, *new}) < len(held) + len(new):
            raise ValueError(f"pages: expected each once, got {[*held, *new]}")
        return new

    def _give_back(self, pages: list[int]) -> None:
        """Tell observers of pages that a slot gave up, but for those that another one holds."""
        if pages and observe.active():
            held = {page for pages_of in self._pages_of for page in pages_of or []}
            observe.pages_given_back(self.page_table, [p for p in pages if p not in held])

    def _put_pages(self, slot: int, pages: list[int]) -> None:
        held = self._held_pages(slot)
        begin = len(held)
        held += pages
        self._uploads.send(pages, self.page_table[slot, begin : begin + len(pages)])
        self.num_pages[slot].fill_(begin + len(pages))
        observe.pages_added(self.page_table, slot, pages)

    @_host_method
    def assign(self, slot: int, prompt: Sequence[int], pages: Sequence[int]) -> None:
        """Give a slot a prompt and pages. What the slot held before is gone, its status too.

        Parameters
        ----------
        slot : int
        prompt : sequence of int
            Token ids, at least one. A draft model's batch takes the target's: pass an empty one
            there.
        pages : sequence of int
            Page ids in order, each once, none of them ``pad_page``.

        Raises
        ------
        ValueError
            The slot does not exist, or prompt or pages do not fit it; nothing has been changed
            then.
        """
        slot = self._check_slot(slot)
        tokens = check_integers("prompt", prompt, low=0, high=torch.iinfo(self.tokens.dtype).max)
        most = min(self.tokens.shape[1], self.max_seq_len)
        if self._target is None and not 1 <= len(tokens) <= most:
            raise ValueError(f"prompt: expected 1 to {most} tokens, got {len(tokens)}")
        if self._target is not None and tokens:
            raise ValueError("prompt: a draft model reads the target's, expected none")
        new_pages = self._check_pages(pages, held=[])
        held, self._pages_of[slot] = self._pages_of[slot], []
        self._give_back(held or [])
        if self._target is None:
            self._uploads.send(tokens, self.tokens[slot, : len(tokens)])
            self.known_lens[slot].fill_(len(tokens))
            self.num_drafts[slot].zero_()
        for buffer in (self.committed_lens, self.written_lens, self.status):
            buffer[slot].zero_()
        observe.assigned(self.page_table, slot)
        self._put_pages(slot, new_pages)

    @_host_method
    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot more pages behind those that it has.

        Parameters
        ----------
        slot : int
        pages : sequence of int

        Raises
        ------
        ValueError
            The slot is not assigned, or they do not fit; nothing has been changed then.
        """
        slot = self._check_slot(slot)
        self._put_pages(slot, self._check_pages(pages, self._held_pages(slot)))

    @_host_method
    def drop_pages(self, slot: int, keep: int) -> list[int]:
        """Take pages off a slot's end.

        Parameters
        ----------
        slot : int
        keep : int
            How many of the slot's first pages stay.

        Returns
        -------
        list of int
            The others. They may be given away once the launches already queued are done.

        Raises
        ------
        ValueError
            The slot is not assigned, or holds fewer pages; nothing has been changed then.
        """
        slot = self._check_slot(slot)
        held = self._held_pages(slot)
        keep = check_integer("keep", keep, low=0, high=len(held))
        dropped = held[keep:]
        del held[keep:]
        self._give_back(dropped)
        self.num_pages[slot].fill_(keep)
        self.page_table[slot, keep:].fill_(-1)
        return dropped

    @_host_method
    def release(self, slot: int) -> None:
        """Empty a slot, and clear its status.

        Its pages may be given away once the launches already queued are done.

        Parameters
        ----------
        slot : int

        Raises
        ------
        ValueError
            The slot does not exist.
        """
        slot = self._check_slot(slot)
        held, self._pages_of[slot] = self._pages_of[slot], None
        self._give_back(held or [])
        state = [self.num_pages, self.committed_lens, self.written_lens, self.status]
        if self._target is None:
            state += [self.known_lens, self.num_drafts]
        for buffer in state:
            buffer[slot].zero_()
        self.page_table[slot].fill_(-1)

    @_host_method
    def set_rows(self, slots: Sequence[int], query_lens: Sequence[int]) -> None:
        """Say which slot each row carries (-1: none) and how many query tokens it may take.

        Rows behind them are padding. The row of a slot that nobody has is empty until it is
        assigned: an engine whose rows are its slots sets them once.

        Parameters
        ----------
        slots : sequence of int
            By row, at most B; each at most once, but for -1.
        query_lens : sequence of int
            As many, each at least 0.

        Raises
        ------
        ValueError
            More rows than the batch has, a slot twice or outside the table, lists of unequal
            length, or a negative length; a drafter's batch, which has its target's rows. Nothing
            has been changed then.
        """
        if self._target is not None:
            raise ValueError("slots: a draft model has its target's rows; use set_query_lens")
        rows = self.max_rows
        carried = check_integers("slots", slots, low=-1, high=self.max_slots - 1)
        lens = check_integers("query_lens", query_lens, low=0)
        taken = [slot for slot in carried if slot != -1]
        if len(set(taken)) < len(taken):
            raise ValueError(f"slots: a slot may stand in one row only, got {carried}")
        if len(carried) > rows or len(carried) != len(lens):
            raise ValueError(
                f"slots, query_lens: expected as many of each, at most {rows}, "
                f"got {len(carried)} and {len(lens)}"
            )
        self.set_query_lens(lens)
        self._uploads.send([*carried, *[-1] * (rows - len(carried))], self.row_to_slot)
        self.num_rows.fill_(len(carried))

    @_host_method
    def set_query_lens(self, query_lens: Sequence[int]) -> None:
        """Say how many query tokens each row may take; rows behind them take none.

        Parameters
        ----------
        query_lens : sequence of int
            By row, at most B, each at least 0.

        Raises
        ------
        ValueError
            More rows than the batch has, or a negative length; an Eagle head's batch, which has its
            target's. Nothing has been changed then.
        """
        if self._eagle:
            raise ValueError("query_lens: Eagle has its target's")
        rows = self.max_rows
        lens = check_integers("query_lens", query_lens, low=0)
        if len(lens) > rows:
            raise ValueError(f"query_lens: expected at most {rows}, got {len(lens)}")
        self._uploads.send([*lens, *[0] * (rows - len(lens))], self.query_lens)
