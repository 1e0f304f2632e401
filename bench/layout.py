"""The page lists and write slots, the way a user would write them: on the host, and in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.common import Arguments

# On the host: lists of Python integers.


def host_pages(tables: Sequence[Sequence[int]], lens: Sequence[int], size: int) -> list[list[int]]:
    """Return ``kv_indptr``, ``kv_indices`` and ``last_page_len``; `tables` is by row."""
    indptr, indices, last = [0], list[int](), []
    for table, length in zip(tables, lens, strict=True):
        indices += table[: -(-length // size)]
        indptr.append(len(indices))
        last.append((length - 1) % size + 1 if length else 0)
    return [indptr, indices, last]


def host_slots(table: Sequence[int], first: int, count: int, size: int) -> list[int]:
    """Return where the KV of `count` tokens goes, from cache index `first` on."""
    return [table[i // size] * size + i % size for i in range(first, first + count)]


def send(values: Sequence[int], to: Tensor, pad: int = 0) -> None:
    """Copy host integers to the device, and `pad` behind them."""
    to[: len(values)] = torch.tensor(values, dtype=to.dtype)
    to[len(values) :] = pad


# In torch.


def token_rows(ends: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Find the row of each token, or each page.

    Parameters
    ----------
    ends : Tensor
        int32 [B]: where each row ends.
    tokens : Tensor
        int32 [n]: 0, 1, 2 and so on.

    Returns
    -------
    Tensor, Tensor
        int64 [n], the last row for those past it; and whether they are past it.
    """
    if ends.is_cuda:
        rows = torch.searchsorted(ends, tokens, right=True)
    else:  # more operators, but a fourth of the time on a CPU
        marks = torch.zeros(len(tokens) + 1, dtype=torch.int32)
        marks.index_add_(0, ends, torch.ones_like(ends))
        rows = marks[:-1].cumsum(0)
    return rows.clamp(max=len(ends) - 1), rows >= len(ends)


def page_ids(a: Arguments, rows: Tensor, columns: Tensor) -> Tensor:
    """Look pages up; columns outside the table, those of padding, may give any page of the row."""
    table: Tensor = a["page_table"]
    slots = a["row_to_slot"].index_select(0, rows) if "row_to_slot" in a else rows
    places = slots * table.shape[1] + columns.clamp(0, table.shape[1] - 1)
    return table.view(-1).index_select(0, places)


def write_pages(a: Arguments, lens: Tensor, entries: Tensor) -> None:
    """Write ``kv_indptr``, ``kv_indices`` and ``last_page_len``.

    Parameters
    ----------
    a : dict
        The call's arguments.
    lens : Tensor
        int32 [B]: new lengths.
    entries : Tensor
        int32 [C]: 0, 1, 2 and so on.
    """
    size, indptr = a["page_size"], a["kv_indptr"]
    indptr[:1] = 0
    torch.cumsum((lens + (size - 1)) // size, 0, dtype=torch.int32, out=indptr[1:])
    rows, is_past = token_rows(indptr[1:], entries)
    pages = page_ids(a, rows, entries - indptr.index_select(0, rows))
    a["kv_indices"].copy_(pages.masked_fill_(is_past, 0))
    a["last_page_len"].copy_(((lens - 1) % size + 1).masked_fill(lens == 0, 0))


def slots_of(a: Arguments, rows: Tensor, index: Tensor, is_padding: Tensor) -> Tensor:
    """Return ``slot_mapping``: where each token's KV goes.

    Parameters
    ----------
    a : dict
        The call's arguments.
    rows : Tensor
        int64 [T]: the tokens' rows.
    index : Tensor
        int32 [T]: their cache indices.
    is_padding : Tensor
        bool [T]: which of them are none.
    """
    size: int = a["page_size"]
    places = page_ids(a, rows, index // size).long() * size + index % size
    return places.masked_fill_(is_padding, -1)
