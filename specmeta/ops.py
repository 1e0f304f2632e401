"""The operations, as typed calls of ``torch.ops.specmeta``.

Every operation is one kernel launch, reads counts and lengths on the device, allocates nothing and
returns nothing: it writes into the tensors given to it, so it may be captured into a CUDA graph.
Every output is optional. Sizes are the tensors' own: B rows, S slots, T tokens, P pages a slot, C
entries of ``kv_indices``, M the width of ``block_table``, L the width of the ledger, K drafts a
row. Two-dimensional tensors may be slices with any row stride; all others are contiguous.

A wrong *value* is never obeyed and is reported in ``status``; a wrong *tensor* (dtype, shape,
device, layout, shared memory) raises ``RuntimeError`` with the argument, what was expected and what
came, before anything is written. A bool, a tensor or an array is no integer, not even of one
element: it would be read back, and frozen by capture. The rules are those of ``docs/contract.md``.

The operators take the arguments of these functions in another order: give them by name. One
differs: an operator has a type for each argument, so an integer ``num_rows`` is ``num_rows_int``
there. Writes are not seen by autograd: do not let an operation change token ids that a backward
pass still needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from specmeta import _fakes, _library
from specmeta._environment import check_device
from specmeta._integers import check_integer, to_integer

_library.load()
_fakes.register()

# No integer has a gradient, so torch's autograd need not look at a call.
_autograd = torch.library.Library("specmeta", "IMPL")
for _name in _library.schema():
    _autograd.impl(_name, torch.library.fallthrough_kernel, "Autograd")

# What an operator calls. Dynamo can't trace it and is given the operator itself. Torch takes time
# for every argument that is no tensor, None too: the table's last are left out where none is given.
_advance = torch.ops.specmeta.advance.default._op
_stage = torch.ops.specmeta.stage.default._op
_accept_greedy = torch.ops.specmeta.accept_greedy.default._op
_accept_sampled = torch.ops.specmeta.accept_sampled.default._op
_count_sampled = torch.ops.specmeta.count_sampled.default._op
_locate_sampled = torch.ops.specmeta.locate_sampled.default._op
_keep_last = torch.ops.specmeta.keep_last.default._op
_draft_lists = torch.ops.specmeta.draft_lists.default._op
_map_slots = torch.ops.specmeta.map_slots.default._op
_draft_step = torch.ops.specmeta.draft_step.default._op


# Torch would take a tensor of one element for an integer, of floats even: what is of another type
# than these is looked at. Defaults are told by identity, which Python gives to small integers: that
# is quicker than to compare them, and takes nothing else for them.
_PLAIN = frozenset({int, type(None)})
_ZERO, _NO_SLOT = 0, -1


def _check_types(operator: str, given: dict[str, Any]) -> None:
    """Name the argument that torch can't pass on; its own error is the whole schema.

    Or that can't be compared with a default: a NumPy array raises ValueError then.
    """
    if not isinstance(given["num_rows"], Tensor):
        given = given | {"num_rows": None, "num_rows_int": given["num_rows"]}
    for argument in _library.schema()[operator]:
        value = given.get(argument.name)
        may_be_none = argument.kind == "tensor" and not argument.required
        if value is None and (may_be_none or argument.default == "None"):
            continue
        got = type(value).__qualname__
        if argument.kind == "tensor":
            is_right, expected = isinstance(value, Tensor), "a tensor"
            if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
                got += " (specmeta.cupy takes arrays)"
        elif argument.kind == "bool":
            is_right, expected = _is_bool(value), "a bool"
        else:
            number = value if isinstance(value, torch.SymInt) else to_integer(value)
            is_right, expected = number is not None, "an integer"
            if argument.name == "num_rows_int":
                expected = "a tensor or an integer"
            if number is not None and not -(2**63) <= number < 2**63:
                is_right, expected = False, f"an integer in [{argument.low}, {argument.high}]"
                got = str(number)
        if not is_right:
            name = argument.name.removesuffix("_int")
            raise RuntimeError(
                f"specmeta.{operator}: {name}: expected {expected}, got {got}"
            ) from None


# Any number, as torch takes them; but no tensor, as with integers.
def _is_bool(value: Any) -> bool:
    is_array = hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    return hasattr(value, "__bool__") and value is not None and not is_array


def workspace(rows: int, *, num_steps: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Return scratch memory through which the blocks of a launch on a GPU share its work.

    The CPU needs none. Every launch leaves it ready for the next one of any operation, so launches
    that come one after the other share one; those that may run at the same time, on two streams,
    need one each. :func:`draft_lists` shares its own with launches of as many steps only.

    Parameters
    ----------
    rows : int
        Most rows of a launch, B.
    num_steps : int, default 1
        For :func:`draft_lists`, its steps.
    device : torch.device or str

    Returns
    -------
    Tensor
        int64 [X], zero.

    Raises
    ------
    ValueError
        `rows` or `num_steps` is no integer, negative or too large, or `device` is none.
    """
    rows = check_integer("rows", rows, low=0, high=2**31 - 2)
    num_steps = check_integer("num_steps", num_steps, low=1, high=2**16 - 1)
    words = _library.workspace_words(rows, num_steps)
    return torch.zeros(words, dtype=torch.int64, device=check_device(device))


def advance(
    num_accepted: Tensor | None,
    seq_lens: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    max_accepted: int | None = None,
    seq_len_bias: int = 0,
    position_bias: int = 0,
    count_index: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    cu_seqlens_q: Tensor | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_seq_len: int = 0,
    position_ids: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    position_ids_out: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    padded_seq_lens: Tensor | None = None,
    pages_per_seq: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Fast-forward or rewind rows that were staged before ``num_accepted`` was known.

    Each row with a length moves by ``c + seq_len_bias`` and its positions by ``c +
    position_bias``, where ``c`` is the row's count. Used pages, slots and the rest follow from the
    new length. A row that cannot be right is emptied and flagged, its neighbours go on. See the
    contract, section "advance".

    Parameters
    ----------
    num_accepted : int32 or int64 [N] or None
        Accepted drafts, without the bonus token; or any increments, negative to rewind. None: 0 for
        each row.
    seq_lens : int32 or int64 [B], updated unless `seq_lens_out` is given
        Tokens that attention reads for the row, query tokens included; 0 = empty row.
    page_size : int
        Tokens a page.
    max_seq_len : int, optional
        No length may pass it. Absent: 2**31 - 1.
    max_accepted : int, optional
        Counts outside [0, max_accepted] are clamped and flagged (BAD_COUNT).
    seq_len_bias : int, default 0
        Added to every count for the length: how the engine staged the unknown outcome.
    position_bias : int, default 0
        The same for the positions.
    count_index : int32 or int64 [B], optional
        Which count is the row's, -1 for none (a context row). Absent: the row's slot.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    cu_seqlens_q : int32 [B+1], optional
        Row b has the query tokens t in [cu[b], cu[b+1]). Absent: one token a row.
    page_table : int32 [S, P], optional
        The pages reserved for each slot, in order.
    num_pages : int32 [S], optional
        How many of them there are. Absent: those before the first negative id.
    alloc_pages : int32 [A], optional
        The reserved pages as a ragged list, in place of `page_table`.
    alloc_indptr : int32 [S+1], optional
        Where each slot's part of `alloc_pages` begins.
    pad_page : int, default 0
        What fills unused places of the page lists. It must belong to no sequence.
    pad_slot : int, default -1
        What `slot_mapping` holds for tokens that are not written.
    pad_seq_len : 0 or 1, default 0
        With 1 an empty row lists one `pad_page` and `padded_seq_lens` is at least 1.
    position_ids : int32 or int64 [T], updated unless `position_ids_out` is given, optional
        Positions of the query tokens.
    seq_lens_out : int32 or int64 [B], written, optional
        Takes the new lengths in place of `seq_lens`.
    position_ids_out : int32 or int64 [T], written, optional
        Takes the new positions in place of `position_ids`; without that, the cache indices.
    cached_lens : int32 [B], written, optional
        The cache index of the row's first query token.
    use_initial_states : bool [B], written, optional
        Whether that is above 0: a recurrent layer then goes on from its cached state.
    padded_seq_lens : int32 or int64 [B], written, optional
        `max(seq_lens, pad_seq_len)`.
    pages_per_seq : int32 [B], written, optional
        Used pages.
    last_page_len : int32 [B], written, optional
        Tokens in the last used page.
    kv_indptr : int32 [B+1], written, optional
        Where each row's used pages begin in `kv_indices`.
    kv_indices : int32 [C], written, optional
        The used pages of all rows, then `pad_page`. Too small: the rows that do not fit are emptied
        (OVERFLOW).
    block_table : int32 [B, M], written, optional
        The used pages by row, then `pad_page`. M also limits the length.
    slot_mapping : int64 [U], written, optional
        Where the KV of each query token is stored: `page * page_size + offset`. U is T or more;
        what is behind the T tokens is padding.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> seq_lens, positions = torch.tensor([33], dtype=torch.int32), torch.tensor([32])
    >>> slots = torch.empty(1, dtype=torch.int64)
    >>> specmeta.advance(
    ...     torch.tensor([2], dtype=torch.int32), seq_lens, page_size=32, position_ids=positions,
    ...     page_table=torch.tensor([[5, 9]], dtype=torch.int32), slot_mapping=slots,
    ... )
    >>> seq_lens.item(), positions.item(), slots.item()
    (35, 34, 290)
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    common = (
        seq_lens,
        page_size,
        num_accepted,
        row_to_slot,
        num_rows if is_tensor else None,
        cu_seqlens_q,
        max_seq_len,
        page_table,
        num_pages,
        position_ids,
        slot_mapping,
        kv_indptr,
        kv_indices,
        last_page_len,
        block_table,
        cached_lens,
        padded_seq_lens,
        pages_per_seq,
        status,
        workspace,
    )
    try:
        if (
            not is_dynamo_compiling()
            and is_tensor
            and type(page_size) is int
            and (max_seq_len is None or type(max_seq_len) is int)
            and max_accepted is None
            and alloc_pages
            is alloc_indptr
            is count_index
            is seq_lens_out
            is position_ids_out
            is use_initial_states
            is None
            and seq_len_bias is position_bias is pad_page is pad_seq_len is _ZERO
            and pad_slot is _NO_SLOT
        ):
            _advance(*common)
            return
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (
            number,
            page_size,
            max_seq_len,
            max_accepted,
            seq_len_bias,
            position_bias,
            pad_page,
            pad_slot,
            pad_seq_len,
        )
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("advance", locals())
        call = torch.ops.specmeta.advance.default if compiling else _advance
        call(
            *common,
            alloc_pages,
            alloc_indptr,
            count_index,
            max_accepted,
            seq_lens_out,
            position_ids_out,
            use_initial_states,
            number,
            seq_len_bias,
            position_bias,
            pad_slot,
            pad_page,
            pad_seq_len,
        )
    except (RuntimeError, ValueError):
        _check_types("advance", locals())
        raise


def stage(
    committed_lens: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    limit_lens: Tensor | None = None,
    known_lens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    query_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_token: int = 0,
    pad_seq_len: int = 0,
    cu_seqlens_q: Tensor | None = None,
    seq_lens: Tensor | None = None,
    position_ids: Tensor | None = None,
    input_ids: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    padded_seq_lens: Tensor | None = None,
    pages_per_seq: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Lay out the rows of a step from the state by slot: the first node of an iteration.

    Row b gets ``q`` query tokens behind the ``c`` committed ones of its slot: what ``query_lens``
    asks for, at most what the ledger knows or has drafted, at most the room in pages, ledger and
    token buffer. See the contract, section "stage".

    Parameters
    ----------
    committed_lens : int32 [S]
        Tokens whose KV is final.
    page_size : int
        Tokens a page.
    max_seq_len : int, optional
        No length may pass it. Absent: 2**31 - 1.
    limit_lens : int32 [S], optional
        A draft model's cache counts only as far as this (the target's `committed_lens`).
    known_lens : int32 [S], optional
        Tokens of the ledger that are certain. This or `query_lens` is needed.
    num_drafts : int32 [S], optional
        Drafts that stand behind them. Absent: none.
    query_lens : int32 [B], optional
        The most query tokens for each row.
    tokens : int32 or int64 [S, L], optional
        The ledger: token ids of prompt, output and drafts.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    page_table : int32 [S, P], optional
        The pages reserved for each slot, in order.
    num_pages : int32 [S], optional
        How many of them there are. Absent: those before the first negative id.
    alloc_pages : int32 [A], optional
        The reserved pages as a ragged list, in place of `page_table`.
    alloc_indptr : int32 [S+1], optional
        Where each slot's part of `alloc_pages` begins.
    pad_page : int, default 0
        What fills unused places of the page lists. It must belong to no sequence.
    pad_slot : int, default -1
        What `slot_mapping` holds for tokens that are not written.
    pad_token : int, default 0
        The token id of padding.
    pad_seq_len : 0 or 1, default 0
        With 1 an empty row lists one `pad_page` and `padded_seq_lens` is at least 1.
    cu_seqlens_q : int32 [B+1], written, optional
        Running sum of the rows' query tokens.
    seq_lens : int32 or int64 [B], written, optional
        `c + q`, 0 for an empty row.
    position_ids : int32 or int64 [T], written, optional
        `c + j` for query token j.
    input_ids : int32 or int64 [T], written, optional
        The query tokens, from the ledger.
    num_draft_tokens : int32 [B], written, optional
        How many of the row's query tokens are drafts.
    cached_lens : int32 [B], written, optional
        The cache index of the row's first query token.
    use_initial_states : bool [B], written, optional
        Whether that is above 0: a recurrent layer then goes on from its cached state.
    padded_seq_lens : int32 or int64 [B], written, optional
        `max(seq_lens, pad_seq_len)`.
    pages_per_seq : int32 [B], written, optional
        Used pages.
    last_page_len : int32 [B], written, optional
        Tokens in the last used page.
    kv_indptr : int32 [B+1], written, optional
        Where each row's used pages begin in `kv_indices`.
    kv_indices : int32 [C], written, optional
        The used pages of all rows, then `pad_page`. Too small: the rows that do not fit are emptied
        (OVERFLOW).
    block_table : int32 [B, M], written, optional
        The used pages by row, then `pad_page`. M also limits the length.
    slot_mapping : int64 [U], written, optional
        Where the KV of each query token is stored: `page * page_size + offset`. U is T or more;
        what is behind the T tokens is padding.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> seq_lens, cu = torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    >>> specmeta.stage(
    ...     i32(4, 0), known_lens=i32(5, 6), num_drafts=i32(2, 0), query_lens=i32(9, 3),
    ...     page_size=4, page_table=i32(1, 2, 3, 4).view(2, 2), seq_lens=seq_lens, cu_seqlens_q=cu,
    ... )
    >>> seq_lens.tolist(), cu.tolist()
    ([7, 3], [0, 3, 6])
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    common = (
        committed_lens,
        page_size,
        row_to_slot,
        num_rows if is_tensor else None,
        max_seq_len,
        page_table,
        num_pages,
        limit_lens,
        known_lens,
        num_drafts,
        query_lens,
        tokens,
        cu_seqlens_q,
        seq_lens,
        position_ids,
        input_ids,
        num_draft_tokens,
        slot_mapping,
        kv_indptr,
        kv_indices,
        last_page_len,
        block_table,
        cached_lens,
        padded_seq_lens,
        pages_per_seq,
        status,
        workspace,
    )
    try:
        if (
            not is_dynamo_compiling()
            and is_tensor
            and type(page_size) is int
            and (max_seq_len is None or type(max_seq_len) is int)
            and alloc_pages is alloc_indptr is use_initial_states is None
            and pad_token is pad_page is pad_seq_len is _ZERO
            and pad_slot is _NO_SLOT
        ):
            _stage(*common)
            return
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number, page_size, max_seq_len, pad_page, pad_slot, pad_token, pad_seq_len)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("stage", locals())
        call = torch.ops.specmeta.stage.default if compiling else _stage
        call(
            *common,
            alloc_pages,
            alloc_indptr,
            use_initial_states,
            number,
            pad_token,
            pad_slot,
            pad_page,
            pad_seq_len,
        )
    except (RuntimeError, ValueError):
        _check_types("stage", locals())
        raise


def accept_greedy(
    target_tokens: Tensor,
    input_ids: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    position_ids: Tensor | None = None,
    seq_lens: Tensor | None = None,
    pad_token: int = 0,
    committed_lens: Tensor | None = None,
    known_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    num_accepted: Tensor | None = None,
    num_rejected: Tensor | None = None,
    num_sampled: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    next_tokens: Tensor | None = None,
    token_indices: Tensor | None = None,
    accepted_tokens: Tensor | None = None,
    draft_input_ids: Tensor | None = None,
    last_position_ids: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Accept the leading drafts that the target also chose, and commit them.

    Also makes the inputs of the draft pass. A chunk of a longer prompt only moves
    `committed_lens`. See the contract, section
    "accept_greedy, accept_sampled".

    Parameters
    ----------
    target_tokens : int32 or int64 [T]
        The target's choice after each query token.
    input_ids : int32 or int64 [T]
        The query tokens, drafts included.
    cu_seqlens_q : int32 [B+1], optional
        Row b has the query tokens t in [cu[b], cu[b+1]). Absent: one token a row.
    num_draft_tokens : int32 [B], optional
        How many of the row's last query tokens are drafts. Absent: all but the first.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    position_ids : int32 or int64 [T], optional
        Positions of the query tokens, for `last_position_ids`.
    seq_lens : int32 or int64 [B], optional
        The rows' lengths. `committed_lens`, `known_lens` and `tokens`, given together, need them.
    pad_token : int, default 0
        The token id of padding.
    committed_lens : int32 [S], updated, optional
        Tokens whose KV is final.
    known_lens : int32 [S], updated, optional
        Tokens of the ledger that are certain: one more than is committed.
    tokens : int32 or int64 [S, L], updated, optional
        The ledger, which takes the bonus token.
    num_drafts : int32 [S], updated, optional
        Set to 0: the drafts are decided.
    num_accepted : int32 or int64 [B], written, optional
        Accepted drafts, without the bonus token.
    num_rejected : int32 [B], written, optional
        The other drafts.
    num_sampled : int32 or int64 [B], written, optional
        What the step emitted: accepted drafts and the bonus token; 0 inside a prompt.
    seq_lens_out : int32 or int64 [B], written, optional
        What stands in the row's cache: `seq_lens` without the rejected drafts; without any of the
        row's tokens where nothing stands.
    next_tokens : int32 or int64 [B], written, optional
        The bonus token; inside a prompt the prompt's next token.
    token_indices : int32 or int64 [B], written, optional
        The query token that was accepted last: its hidden state leads the draft loop.
    accepted_tokens : int32 or int64 [B, K+1], written, optional
        What the step emitted, then -1. K limits the drafts of a row.
    draft_input_ids : int32 or int64 [T], written, optional
        The draft pass's inputs: `input_ids` shifted by one inside the row (Eagle).
    last_position_ids : int32 or int64 [B], written, optional
        `position_ids` at `token_indices`.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> num_accepted = torch.empty(1, dtype=torch.int32)
    >>> next_tokens = torch.empty(1, dtype=torch.int64)
    >>> specmeta.accept_greedy(
    ...     torch.tensor([5, 6, 7, 8]), torch.tensor([4, 5, 6, 9]),
    ...     cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32),
    ...     num_accepted=num_accepted, next_tokens=next_tokens,
    ... )
    >>> num_accepted.item(), next_tokens.item()
    (2, 7)
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    common = (
        target_tokens,
        input_ids,
        row_to_slot,
        num_rows if is_tensor else None,
        cu_seqlens_q,
        num_draft_tokens,
        position_ids,
        seq_lens,
        committed_lens,
        known_lens,
        tokens,
        num_drafts,
        num_accepted,
        num_rejected,
        next_tokens,
        token_indices,
        accepted_tokens,
        draft_input_ids,
        last_position_ids,
        status,
        workspace,
    )
    try:
        if (
            not is_dynamo_compiling()
            and is_tensor
            and num_sampled is seq_lens_out is None
            and pad_token is _ZERO
        ):
            _accept_greedy(*common)
            return
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number, pad_token)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("accept_greedy", locals())
        call = torch.ops.specmeta.accept_greedy.default if compiling else _accept_greedy
        call(
            *common,
            num_sampled,
            seq_lens_out,
            number,
            pad_token,
        )
    except (RuntimeError, ValueError):
        _check_types("accept_greedy", locals())
        raise


def accept_sampled(
    sampled_tokens: Tensor,
    *,
    vocab_size: int,
    input_ids: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    position_ids: Tensor | None = None,
    seq_lens: Tensor | None = None,
    pad_token: int = 0,
    committed_lens: Tensor | None = None,
    known_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    num_accepted: Tensor | None = None,
    num_rejected: Tensor | None = None,
    num_sampled: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    next_tokens: Tensor | None = None,
    token_indices: Tensor | None = None,
    accepted_tokens: Tensor | None = None,
    draft_input_ids: Tensor | None = None,
    last_position_ids: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Commit what a rejection sampler let through.

    The leading ids of each row of `sampled_tokens` that are inside the vocabulary count; the last
    of them is the bonus token. A row without any is void (BAD_COUNT): its step can be tried again.
    See the contract, section "accept_greedy, accept_sampled".

    Parameters
    ----------
    sampled_tokens : int32 or int64 [B, K+1]
        The sampler's output, -1 behind it.
    vocab_size : int
        Ids outside [0, vocab_size) end a row.
    input_ids : int32 or int64 [T], optional
        The query tokens, for `draft_input_ids`.
    cu_seqlens_q : int32 [B+1], optional
        Row b has the query tokens t in [cu[b], cu[b+1]). Absent: one token a row.
    num_draft_tokens : int32 [B], optional
        How many of the row's last query tokens are drafts. Absent: all but the first.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    position_ids : int32 or int64 [T], optional
        Positions of the query tokens, for `last_position_ids`.
    seq_lens : int32 or int64 [B], optional
        The rows' lengths. `committed_lens`, `known_lens` and `tokens`, given together, need them.
    pad_token : int, default 0
        The token id of padding.
    committed_lens : int32 [S], updated, optional
        Tokens whose KV is final.
    known_lens : int32 [S], updated, optional
        Tokens of the ledger that are certain: one more than is committed.
    tokens : int32 or int64 [S, L], updated, optional
        The ledger, which takes the bonus token.
    num_drafts : int32 [S], updated, optional
        Set to 0: the drafts are decided.
    num_accepted : int32 or int64 [B], written, optional
        Accepted drafts, without the bonus token.
    num_rejected : int32 [B], written, optional
        The other drafts.
    num_sampled : int32 or int64 [B], written, optional
        What the step emitted: accepted drafts and the bonus token; 0 inside a prompt.
    seq_lens_out : int32 or int64 [B], written, optional
        What stands in the row's cache: `seq_lens` without the rejected drafts; without any of the
        row's tokens where nothing stands.
    next_tokens : int32 or int64 [B], written, optional
        The bonus token; inside a prompt the prompt's next token.
    token_indices : int32 or int64 [B], written, optional
        The query token that was accepted last: its hidden state leads the draft loop.
    accepted_tokens : int32 or int64 [B, K+1], written, optional
        What the step emitted, then -1. K limits the drafts of a row.
    draft_input_ids : int32 or int64 [T], written, optional
        The draft pass's inputs: `input_ids` shifted by one inside the row (Eagle).
    last_position_ids : int32 or int64 [B], written, optional
        `position_ids` at `token_indices`.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> num_accepted = torch.empty(1, dtype=torch.int32)
    >>> specmeta.accept_sampled(
    ...     torch.tensor([[5, 6, -1]]), vocab_size=32000,
    ...     cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32), num_accepted=num_accepted,
    ... )
    >>> num_accepted.item()
    1
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    common = (
        sampled_tokens,
        vocab_size,
        row_to_slot,
        num_rows if is_tensor else None,
        input_ids,
        cu_seqlens_q,
        num_draft_tokens,
        position_ids,
        seq_lens,
        committed_lens,
        known_lens,
        tokens,
        num_drafts,
        num_accepted,
        num_rejected,
        next_tokens,
        token_indices,
        accepted_tokens,
        draft_input_ids,
        last_position_ids,
        status,
        workspace,
    )
    try:
        if (
            not is_dynamo_compiling()
            and is_tensor
            and type(vocab_size) is int
            and num_sampled is seq_lens_out is None
            and pad_token is _ZERO
        ):
            _accept_sampled(*common)
            return
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number, vocab_size, pad_token)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("accept_sampled", locals())
        call = torch.ops.specmeta.accept_sampled.default if compiling else _accept_sampled
        call(
            *common,
            num_sampled,
            seq_lens_out,
            number,
            pad_token,
        )
    except (RuntimeError, ValueError):
        _check_types("accept_sampled", locals())
        raise


def count_sampled(
    sampled_tokens: Tensor,
    *,
    vocab_size: int,
    discarded: Tensor | None = None,
    backup_tokens: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    pad_token: int = 0,
    num_sampled: Tensor | None = None,
    next_tokens: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Count the ids that a sampler left in each row, and take the last one.

    With :func:`locate_sampled` the two halves of :func:`accept_sampled`, without its state, for
    engines that ask in two places (vLLM's `prepare_next_token_ids_padded` and
    `prepare_inputs_padded`). See the contract, section "count_sampled, locate_sampled".

    Parameters
    ----------
    sampled_tokens : int32 or int64 [B, W]
        What the sampler emitted: accepted drafts and the bonus token, then ids outside the
        vocabulary.
    vocab_size : int
        Ids outside [0, vocab_size) end the row.
    discarded : bool [B], optional
        Rows whose ids do not count: chunks of a longer prompt.
    backup_tokens : int32 or int64 [B], optional
        The next token of a row in which no id counts.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    pad_token : int, default 0
        The next token of an empty row, and of a row that has no other.
    num_sampled : int32 or int64 [B], written, optional
        Ids at the beginning of the row: accepted drafts and the bonus token.
    next_tokens : int32 or int64 [B], written, optional
        The last of these ids; always one of the vocabulary, or `pad_token`.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> num_sampled, next_tokens = torch.empty(2, dtype=torch.int32), torch.empty(2).int()
    >>> specmeta.count_sampled(
    ...     torch.tensor([[5, 6, -1], [7, -1, -1]]), vocab_size=32000,
    ...     discarded=torch.tensor([False, True]), backup_tokens=torch.tensor([8, 9]),
    ...     num_sampled=num_sampled, next_tokens=next_tokens,
    ... )
    >>> num_sampled.tolist(), next_tokens.tolist()
    ([2, 0], [6, 9])
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    try:
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number, vocab_size, pad_token)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("count_sampled", locals())
        call = torch.ops.specmeta.count_sampled.default if compiling else _count_sampled
        call(
            sampled_tokens,
            vocab_size,
            row_to_slot,
            num_rows if is_tensor else None,
            discarded,
            backup_tokens,
            num_sampled,
            next_tokens,
            status,
            workspace,
            number,
            pad_token,
        )
    except RuntimeError:
        _check_types("count_sampled", locals())
        raise


def locate_sampled(
    num_sampled: Tensor,
    cu_num_draft_tokens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    num_rejected: Tensor | None = None,
    token_indices: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Find the query token that was accepted last, from the counts of :func:`count_sampled`.

    See the contract, section "count_sampled, locate_sampled".

    Parameters
    ----------
    num_sampled : int32 or int64 [B]
        Accepted drafts and the bonus token; 0 for a row in which no id counts.
    cu_num_draft_tokens : int32 [B]
        Running sum of the rows' drafts, the row's own included: vLLM's, without a leading 0.
    cu_seqlens_q : int32 [B+1]
        Row b has the query tokens t in [cu[b], cu[b+1]); its last ones are the drafts.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    num_rejected : int32 [B], written, optional
        Drafts that do not stand.
    token_indices : int32 [B], written, optional
        The query token that was accepted last. Never negative.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> token_indices, num_rejected = i32(0, 0), i32(0, 0)
    >>> specmeta.locate_sampled(
    ...     i32(2, 0), i32(3, 3), i32(0, 4, 9),
    ...     token_indices=token_indices, num_rejected=num_rejected,
    ... )
    >>> token_indices.tolist(), num_rejected.tolist()
    ([1, 8], [2, 0])
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    try:
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number,)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("locate_sampled", locals())
        call = torch.ops.specmeta.locate_sampled.default if compiling else _locate_sampled
        call(
            num_sampled,
            cu_num_draft_tokens,
            cu_seqlens_q,
            row_to_slot,
            num_rows if is_tensor else None,
            num_rejected,
            token_indices,
            status,
            workspace,
            number,
        )
    except RuntimeError:
        _check_types("locate_sampled", locals())
        raise


def keep_last(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    num_rows: Tensor | int | None = None,
    pad_token: int = 0,
    input_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    query_lens: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    status: Tensor | None = None,
) -> None:
    """Keep the last query token of each row, in place: rows of one token from then on.

    What follows a pass over whole prompts, where the next one takes a token a row (AutoDeploy's
    `switch_to_generate_`). See the contract, section "keep_last".

    Parameters
    ----------
    cu_seqlens_q : int32 [B+1], updated
        Row b has the query tokens t in [cu[b], cu[b+1]); afterwards the token b.
    seq_lens : int32 or int64 [B], updated
        Tokens that attention reads for the row, 0 for an empty one. They change only where a row is
        emptied.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    pad_token : int, default 0
        The token id of padding.
    input_ids : int32 or int64 [T], updated, optional
        The row's last token moves to place b. T is B or more.
    position_ids : int32 or int64 [T], written, optional
        `seq_lens - 1` at place b.
    query_lens : int32 [B], written, optional
        1 for each live row.
    cached_lens : int32 [B], written, optional
        `seq_lens - 1`.
    use_initial_states : bool [B], written, optional
        Whether that is above 0.
    status : int32 [B], updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`).

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> cu_seqlens_q = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> input_ids = torch.tensor([7, 8, 9, 4, 5])
    >>> specmeta.keep_last(
    ...     cu_seqlens_q, torch.tensor([3, 8], dtype=torch.int32), input_ids=input_ids
    ... )
    >>> cu_seqlens_q.tolist(), input_ids.tolist()
    ([0, 1, 2], [9, 5, 0, 0, 0])
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    try:
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number, pad_token)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("keep_last", locals())
        call = torch.ops.specmeta.keep_last.default if compiling else _keep_last
        call(
            cu_seqlens_q,
            seq_lens,
            num_rows if is_tensor else None,
            input_ids,
            position_ids,
            query_lens,
            cached_lens,
            use_initial_states,
            status,
            number,
            pad_token,
        )
    except RuntimeError:
        _check_types("keep_last", locals())
        raise


def draft_lists(
    seq_lens: Tensor,
    *,
    page_size: int,
    num_steps: int,
    max_seq_len: int | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_seq_len: int = 0,
    position_ids: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Write the page lists of all draft steps at once.

    Step k reads one token more than step k - 1, and a row has the same pages in all of them, so
    what :func:`draft_step` would leave one step after the other can be written before the first
    (SGLang plans its draft loop so). See the contract, section "draft_lists".

    Parameters
    ----------
    seq_lens : int32 or int64 [B]
        Tokens whose KV stands before the first step; 0 = empty row.
    page_size : int
        Tokens a page.
    num_steps : int
        K, from 1.
    max_seq_len : int, optional
        No length may pass it. Absent: 2**31 - 1.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    page_table : int32 [S, P], optional
        The pages reserved for each slot, in order.
    num_pages : int32 [S], optional
        How many of them there are. Absent: those before the first negative id.
    alloc_pages : int32 [A], optional
        The reserved pages as a ragged list, in place of `page_table`.
    alloc_indptr : int32 [S+1], optional
        Where each slot's part of `alloc_pages` begins.
    pad_page : int, default 0
        What fills unused places of the page lists. It must belong to no sequence.
    pad_slot : int, default -1
        What `slot_mapping` holds for tokens that are not written.
    pad_seq_len : 0 or 1, default 0
        With 1 an empty row lists one `pad_page`.
    position_ids : int32 or int64 [B], written, optional
        The position of the first step's token, `seq_lens`.
    last_page_len : int32 [K, B], written, optional
        Tokens in the last used page.
    kv_indptr : int32 [K, B+1], written, optional
        Where each row's used pages begin in the step's row of `kv_indices`.
    kv_indices : int32 [K, C], written, optional
        The used pages of all rows, then `pad_page`. Too small: the rows that do not fit are emptied
        in that step (OVERFLOW).
    slot_mapping : int64 [B*K], written, optional
        Where the KV of row b's token in step k is stored, at `b * K + k`.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace` with as many `num_steps`. Absent: on a GPU, one block does each step.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> kv_indptr = torch.empty(2, 2, dtype=torch.int32)
    >>> kv_indices = torch.empty(2, 3, dtype=torch.int32)
    >>> specmeta.draft_lists(
    ...     torch.tensor([3]), page_size=4, num_steps=2, kv_indptr=kv_indptr, kv_indices=kv_indices,
    ...     page_table=torch.tensor([[5, 9]], dtype=torch.int32),
    ... )
    >>> kv_indptr.tolist(), kv_indices.tolist()
    ([[0, 1], [0, 2]], [[5, 0, 0], [5, 9, 0]])
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    common = (
        seq_lens,
        page_size,
        num_steps,
        row_to_slot,
        num_rows if is_tensor else None,
        max_seq_len,
        page_table,
        num_pages,
        position_ids,
        slot_mapping,
        kv_indptr,
        kv_indices,
        last_page_len,
        status,
        workspace,
    )
    try:
        if (
            not is_dynamo_compiling()
            and is_tensor
            and type(page_size) is type(num_steps) is int
            and (max_seq_len is None or type(max_seq_len) is int)
            and alloc_pages is alloc_indptr is None
            and pad_page is pad_seq_len is _ZERO
            and pad_slot is _NO_SLOT
        ):
            _draft_lists(*common)
            return
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number, page_size, num_steps, max_seq_len, pad_page, pad_slot, pad_seq_len)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("draft_lists", locals())
        call = torch.ops.specmeta.draft_lists.default if compiling else _draft_lists
        call(
            *common,
            alloc_pages,
            alloc_indptr,
            number,
            pad_slot,
            pad_page,
            pad_seq_len,
        )
    except (RuntimeError, ValueError):
        _check_types("draft_lists", locals())
        raise


def map_slots(
    position_ids: Tensor,
    slot_mapping: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_slot: int = -1,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Say where the KV of each token goes, from its position.

    For engines that lay out positions themselves: a token stands at the cache index that its
    position says. See the contract, section "map_slots".

    Parameters
    ----------
    position_ids : int32 or int64 [T]
        Positions of the query tokens.
    slot_mapping : int64 [U], written
        `page * page_size + offset` for each query token, and `pad_slot` for all others. U is T or
        more.
    page_size : int
        Tokens a page.
    max_seq_len : int, optional
        Positions stay below it. Absent: 2**31 - 1.
    cu_seqlens_q : int32 [B+1], optional
        Row b has the query tokens t in [cu[b], cu[b+1]). Absent: one token a row.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    page_table : int32 [S, P], optional
        The pages reserved for each slot, in order.
    num_pages : int32 [S], optional
        How many of them there are. Absent: those before the first negative id.
    alloc_pages : int32 [A], optional
        The reserved pages as a ragged list, in place of `page_table`.
    alloc_indptr : int32 [S+1], optional
        Where each slot's part of `alloc_pages` begins.
    pad_slot : int, default -1
        What `slot_mapping` holds for tokens that are not written.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> slot_mapping = torch.empty(4, dtype=torch.int64)
    >>> specmeta.map_slots(
    ...     torch.tensor([3, 4]), slot_mapping, page_size=4,
    ...     cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
    ...     page_table=torch.tensor([[5, 9]], dtype=torch.int32),
    ... )
    >>> slot_mapping.tolist()
    [23, 36, -1, -1]
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    common = (
        position_ids,
        slot_mapping,
        page_size,
        row_to_slot,
        num_rows if is_tensor else None,
        cu_seqlens_q,
        max_seq_len,
        page_table,
        num_pages,
        status,
        workspace,
    )
    try:
        if (
            not is_dynamo_compiling()
            and is_tensor
            and type(page_size) is int
            and (max_seq_len is None or type(max_seq_len) is int)
            and alloc_pages is alloc_indptr is None
            and pad_slot is _NO_SLOT
        ):
            _map_slots(*common)
            return
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (number, page_size, max_seq_len, pad_slot)
        if not compiling and not _PLAIN.issuperset(map(type, numbers)):
            _check_types("map_slots", locals())
        call = torch.ops.specmeta.map_slots.default if compiling else _map_slots
        call(
            *common,
            alloc_pages,
            alloc_indptr,
            number,
            pad_slot,
        )
    except (RuntimeError, ValueError):
        _check_types("map_slots", locals())
        raise


def draft_step(
    seq_lens: Tensor,
    *,
    page_size: int,
    max_seq_len: int | None = None,
    position_ids: Tensor | None = None,
    num_rejected: Tensor | None = None,
    max_rejected: int | None = None,
    draft_tokens: Tensor | None = None,
    draft_index: int = 0,
    shift: int = 1,
    last: bool = False,
    row_to_slot: Tensor | None = None,
    num_rows: Tensor | int | None = None,
    page_table: Tensor | None = None,
    num_pages: Tensor | None = None,
    alloc_pages: Tensor | None = None,
    alloc_indptr: Tensor | None = None,
    pad_page: int = 0,
    pad_slot: int = -1,
    pad_token: int = 0,
    pad_seq_len: int = 0,
    known_lens: Tensor | None = None,
    num_drafts: Tensor | None = None,
    written_lens: Tensor | None = None,
    tokens: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    position_ids_out: Tensor | None = None,
    input_ids: Tensor | None = None,
    cached_lens: Tensor | None = None,
    use_initial_states: Tensor | None = None,
    padded_seq_lens: Tensor | None = None,
    pages_per_seq: Tensor | None = None,
    last_page_len: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    status: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Record draft k in the ledger and give each row the next position of the draft loop.

    One query token a row. The first step of a loop takes `num_rejected`, so that rejected tokens
    leave the length before the first draft position. A row without room stops drafting (OVERFLOW),
    its neighbours go on. See the contract, section "draft_step".

    Parameters
    ----------
    seq_lens : int32 or int64 [B], updated unless `seq_lens_out` is given
        Lengths that the pass before read; 0 = empty row.
    page_size : int
        Tokens a page.
    max_seq_len : int, optional
        No length may pass it. Absent: 2**31 - 1.
    position_ids : int32 or int64 [T], updated unless `position_ids_out` is given, optional
        Positions of the rows' last tokens, moved by one.
    num_rejected : int32 [B], optional
        Drafts to take off the length, in the first step after a verify pass.
    max_rejected : int, optional
        More than this is clamped and flagged (BAD_COUNT).
    draft_tokens : int32 or int64 [B], optional
        The drafts of this step.
    draft_index : int, default 0
        k, from 0.
    shift : 0 or 1, default 1
        1 for Eagle, whose inputs are shifted by one; 0 for a separate draft model.
    last : bool, default False
        Record only: no row moves, and nothing by row or by token is written.
    row_to_slot : int32 or int64 [B], optional
        The slot of each row, -1 for an empty row. Absent: slot = row.
    num_rows : int32 [1] tensor or int, optional
        Live rows, clamped to [0, B]; rows past it are padding. An int is frozen by capture. Absent:
        all.
    page_table : int32 [S, P], optional
        The pages reserved for each slot, in order.
    num_pages : int32 [S], optional
        How many of them there are. Absent: those before the first negative id.
    alloc_pages : int32 [A], optional
        The reserved pages as a ragged list, in place of `page_table`.
    alloc_indptr : int32 [S+1], optional
        Where each slot's part of `alloc_pages` begins.
    pad_page : int, default 0
        What fills unused places of the page lists. It must belong to no sequence.
    pad_slot : int, default -1
        What `slot_mapping` holds for tokens that are not written.
    pad_token : int, default 0
        The token id of padding.
    pad_seq_len : 0 or 1, default 0
        With 1 an empty row lists one `pad_page` and `padded_seq_lens` is at least 1.
    known_lens : int32 [S], optional
        Certain tokens of the ledger. It, `tokens` and `num_drafts` are given together.
    num_drafts : int32 [S], updated, optional
        Drafts behind them.
    written_lens : int32 [S], updated, optional
        What the draft's cache holds now.
    tokens : int32 or int64 [S, L], updated, optional
        The ledger, which takes the draft unless it was made in the middle of a prompt.
    seq_lens_out : int32 or int64 [B], written, optional
        Takes the new lengths in place of `seq_lens`.
    position_ids_out : int32 or int64 [T], written, optional
        Takes the new positions in place of `position_ids`.
    input_ids : int32 or int64 [T], written, optional
        The next pass's inputs: the drafts.
    cached_lens : int32 [B], written, optional
        The cache index of the row's first query token.
    use_initial_states : bool [B], written, optional
        Whether that is above 0: a recurrent layer then goes on from its cached state.
    padded_seq_lens : int32 or int64 [B], written, optional
        `max(seq_lens, pad_seq_len)`.
    pages_per_seq : int32 [B], written, optional
        Used pages.
    last_page_len : int32 [B], written, optional
        Tokens in the last used page.
    kv_indptr : int32 [B+1], written, optional
        Where each row's used pages begin in `kv_indices`.
    kv_indices : int32 [C], written, optional
        The used pages of all rows, then `pad_page`. Too small: the rows that do not fit are emptied
        (OVERFLOW).
    block_table : int32 [B, M], written, optional
        The used pages by row, then `pad_page`. M also limits the length.
    slot_mapping : int64 [U], written, optional
        Where the KV of each query token is stored: `page * page_size + offset`. U is T or more;
        what is behind the T tokens is padding.
    status : int32 [S+1], or [B] without `row_to_slot`, updated, optional
        Faults are OR-ed in (:class:`specmeta.Status`); the last entry is for rows without a valid
        slot.
    workspace : int64 [X], updated, optional
        From :func:`workspace`. Absent: on a GPU, one block does everything.

    Raises
    ------
    RuntimeError
        A tensor or a number that cannot be right; nothing has been written then.

    Examples
    --------
    >>> seq_lens, positions = torch.tensor([12], dtype=torch.int32), torch.tensor([9])
    >>> specmeta.draft_step(
    ...     seq_lens, page_size=4, position_ids=positions,
    ...     num_rejected=torch.tensor([2], dtype=torch.int32),
    ... )
    >>> seq_lens.item(), positions.item()
    (11, 10)
    """
    is_tensor = num_rows is None or isinstance(num_rows, Tensor)
    common = (
        seq_lens,
        page_size,
        row_to_slot,
        num_rows if is_tensor else None,
        max_seq_len,
        page_table,
        num_pages,
        num_rejected,
        draft_tokens,
        draft_index,
        shift,
        last,
        known_lens,
        num_drafts,
        written_lens,
        tokens,
        position_ids,
        input_ids,
        slot_mapping,
        kv_indptr,
        kv_indices,
        last_page_len,
        block_table,
        cached_lens,
        padded_seq_lens,
        pages_per_seq,
        status,
        workspace,
    )
    try:
        if (
            not is_dynamo_compiling()
            and is_tensor
            and type(page_size) is type(draft_index) is type(shift) is int
            and type(last) is bool
            and (max_seq_len is None or type(max_seq_len) is int)
            and max_rejected is None
            and alloc_pages
            is alloc_indptr
            is seq_lens_out
            is position_ids_out
            is use_initial_states
            is None
            and pad_token is pad_page is pad_seq_len is _ZERO
            and pad_slot is _NO_SLOT
        ):
            _draft_step(*common)
            return
        compiling, number = is_dynamo_compiling(), None if is_tensor else num_rows
        numbers = (
            number,
            page_size,
            max_seq_len,
            max_rejected,
            draft_index,
            shift,
            pad_page,
            pad_slot,
            pad_token,
            pad_seq_len,
        )
        if not compiling and not (_PLAIN.issuperset(map(type, numbers)) and type(last) is bool):
            _check_types("draft_step", locals())
        call = torch.ops.specmeta.draft_step.default if compiling else _draft_step
        call(
            *common,
            alloc_pages,
            alloc_indptr,
            max_rejected,
            seq_lens_out,
            position_ids_out,
            use_initial_states,
            number,
            pad_token,
            pad_slot,
            pad_page,
            pad_seq_len,
        )
    except (RuntimeError, ValueError):
        _check_types("draft_step", locals())
        raise
