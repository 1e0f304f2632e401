"""Paged attention for ``transformers`` models, fed by the metadata that specmeta writes.

The attention function is registered as ``"specmeta_paged"``. The tokens of all rows stand in one
flat dimension: a model is called with ``[1, T]`` inputs, ``use_cache=False`` and
``paged=PagedPass(...)``, which every layer's attention receives as a keyword argument. All shapes
are static and nothing is read back to the host, so a forward pass can be captured.

It is there to show the metadata at work on any device, not for speed: in every layer it gathers
the whole width of the block table, used or not, into contiguous keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig

__all__ = ["ATTENTION_NAME", "KVCache", "PagedPass", "paged_attention"]

ATTENTION_NAME = "specmeta_paged"


class KVCache:
    """The paged keys and values of a model's layers.

    Parameters
    ----------
    config : LlamaConfig
        The model's configuration: number of layers, heads, head size.
    num_pages : int
        Number of pages, the reserved page 0 included.
    page_size : int
        Tokens a page.
    dtype : torch.dtype
        Type of keys and values.
    device : torch.device or str
        Where they stand.

    Attributes
    ----------
    keys, values : list of Tensor
        One a layer: [num_pages * page_size, kv_heads, head_dim]. A token stands at its slot
        mapping.
    page_size : int
        Tokens a page.
    groups : int
        Query heads a key/value head.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (num_pages * page_size, kv_heads, head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.page_size = page_size
        self.groups = heads // kv_heads


class PagedPass:
    """What one forward pass reads and writes in a paged cache.

    Everything that the layers share is computed once, on the device, when this is constructed:
    construct it inside the step, after the operation that wrote the metadata.

    Parameters
    ----------
    cache : KVCache
        The model's cache; its layers are updated in place.
    slot_mapping : Tensor
        int64 [T]: where each token's key and value go. Padding tokens need a valid slot, one
        that belongs to no sequence: 0, in the reserved page 0 (``pad_slot=0``).
    block_table : Tensor
        int32 [B, M]: used pages by row, then padding (0).
    seq_lens : Tensor
        int32 or int64 [B]: tokens to attend to, those of this pass included; 0 = empty row.
    cu_seqlens_q : Tensor, optional
        int32 [B + 1]: the tokens of row b are cu[b] .. cu[b + 1] - 1. Absent: one token a row.
    max_query_len : int
        No row has more tokens in this pass. A larger row is computed wrongly, silently.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor | None = None,
        max_query_len: int = 1,
    ) -> None:
        device = slot_mapping.device
        rows, tokens = len(block_table), len(slot_mapping)
        self.cache = cache
        self.slot_mapping = slot_mapping
        self.pages = block_table.flatten()
        self.grid = (rows, max_query_len)

        if cu_seqlens_q is None:
            cu_seqlens_q = torch.arange(rows + 1, device=device)
        cu = cu_seqlens_q.long()
        offset = torch.arange(max_query_len, device=device)
        # [B * Q]: the flat token at each place of the [B, Q] grid; places behind a row's last
        # token repeat some other token, and nobody reads what they give.
        self.to_grid = (cu[:-1, None] + offset).clamp(max=tokens - 1).flatten()
        # [T]: the place on the grid of each flat token. Padding tokens share others' places.
        token = torch.arange(tokens, device=device)
        row = torch.searchsorted(cu[1:], token, right=True).clamp(max=rows - 1)
        column = (token - cu[row]).clamp(0, max_query_len - 1)
        self.from_grid = row * max_query_len + column

        # A query sees the cache up to its own index. No query may see nothing at all: that makes
        # NaN, which would reach the padding page and from there all rows. An empty row has no
        # index (-1 where each row has one token); its queries see the padding page's first one.
        first = seq_lens.long() - cu.diff()
        own = (first[:, None] + offset).clamp(min=0).repeat(1, cache.groups)
        index = torch.arange(block_table.shape[1] * cache.page_size, device=device)
        # bool [B, 1, G * Q, M * page_size]
        self.mask = (index <= own[:, :, None])[:, None]
        # bool [B, M * page_size, 1, 1]: what belongs to no token of the row. A page comes as its
        # last owner left it, and a weight of zero doesn't make a NaN harmless.
        self.is_unused = (index >= seq_lens[:, None])[:, :, None, None]


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    paged: PagedPass,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write a layer's new keys and values into the cache, and attend to the cache.

    Parameters
    ----------
    module : nn.Module
        The attention layer; its ``layer_idx`` chooses the cache's layer.
    query : Tensor
        [1, heads, T, head_dim].
    key, value : Tensor
        [1, kv_heads, T, head_dim].
    attention_mask : None
        Not used: the mask follows from `paged`.
    scaling : float, optional
        Factor on the scores; default ``head_dim ** -0.5``.
    paged : PagedPass
        What to read and write; the caches in it are updated in place.
    **kwargs
        Whatever else ``transformers`` hands to attention functions; ignored.

    Returns
    -------
    Tensor
        [1, T, heads, head_dim], of the query's dtype.
    None
        In place of attention weights.
    """
    cache, layer = paged.cache, int(module.layer_idx)  # type: ignore[arg-type]
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads, (rows, columns) = key.shape[1], paged.grid
    keys, values = cache.keys[layer], cache.values[layer]
    keys.index_copy_(0, paged.slot_mapping, key[0].transpose(0, 1))
    values.index_copy_(0, paged.slot_mapping, value[0].transpose(0, 1))

    def gather(tokens: Tensor) -> Tensor:
        """[kv_heads, M * page_size] of each row, out of its pages."""
        pages = tokens.view(-1, cache.page_size, kv_heads, head_dim).index_select(0, paged.pages)
        own = pages.view(rows, -1, kv_heads, head_dim).masked_fill_(paged.is_unused, 0)
        return own.transpose(1, 2)

    # The query heads that share a key/value head stand side by side as more queries of it:
    # [B, kv_heads, G * Q, head_dim]. No key or value is repeated.
    grid = query[0].transpose(0, 1).index_select(0, paged.to_grid)
    grid = grid.view(rows, columns, heads, head_dim).transpose(1, 2)
    attended = scaled_dot_product_attention(
        grid.reshape(rows, kv_heads, -1, head_dim),
        gather(keys),
        gather(values),
        attn_mask=paged.mask,
        scale=scaling,
    )
    attended = attended.reshape(rows, heads, columns, head_dim).transpose(1, 2)
    flat = attended.reshape(rows * columns, heads, head_dim)
    return flat.index_select(0, paged.from_grid)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
