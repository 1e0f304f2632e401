"""Tensor parallelism: the heads and the MLP columns of a target, spread over a process group.

Every rank runs an engine of its own on its share of the target: a scheduler, all metadata, the
drafter, and the keys and values of its own heads. **Rank 0 decides**: what is chosen, a token of
the target or a draft, is broadcast on the device before it's used. So every rank computes the same
counts from the same tokens, and its metadata are the same bit for bit, even where the ranks' logits
are not.

These are functional collectives: a trace keeps them and the wait behind them, which it doesn't do
for those of ``torch.distributed`` itself.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from transformers import LlamaForCausalLM

__all__ = ["from_rank_0", "group_of", "parallelize"]

_GROUP = "specmeta_group"


def parallelize(target: LlamaForCausalLM, group: dist.ProcessGroup) -> None:
    """Keep this rank's share of a model, and add the ranks' results up where they are needed.

    The embedding, the norms and ``lm_head`` stay whole. The configuration then has the numbers of
    this rank's own heads, so that caches made for the model hold no others.

    Parameters
    ----------
    target : LlamaForCausalLM
        The same weights on every rank; changed in place. It can't be saved or trained afterwards.
    group : ProcessGroup
        The ranks, which all call this.

    Raises
    ------
    ValueError
        Something can't be divided by the number of ranks; nothing has been changed then.
    """
    config, size, rank = target.config, group.size(), group.rank()
    divided = "num_attention_heads", "num_key_value_heads", "intermediate_size"
    for name in divided:
        if getattr(config, name) % size:
            raise ValueError(
                f"{name}: expected a multiple of the {size} ranks, got {getattr(config, name)}"
            )

    def keep(linear: nn.Linear, dim: int) -> None:
        for name, parameter in linear.named_parameters():
            if parameter.ndim > dim:
                # A copy: a view would keep the other ranks' shares alive.
                share = parameter.detach().chunk(size, dim)[rank].clone()
                setattr(linear, name, nn.Parameter(share, requires_grad=False))
        linear.out_features, linear.in_features = linear.weight.shape

    def add_up(linear: nn.Linear, _: object, output: Tensor) -> Tensor:
        total: Tensor = functional.wait_tensor(functional.all_reduce(output, "sum", group))
        return total

    for layer in target.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            keep(linear, 0)
        for linear in (mlp.gate_proj, mlp.up_proj):
            keep(linear, 0)
        for linear in (attention.o_proj, mlp.down_proj):
            keep(linear, 1)
            if linear.bias is not None and rank != 0:
                linear.bias = None  # added once, by rank 0
            linear.register_forward_hook(add_up)
    for name in divided:
        setattr(config, name, getattr(config, name) // size)
    setattr(target, _GROUP, group)


def group_of(target: LlamaForCausalLM) -> dist.ProcessGroup | None:
    """Return the ranks that a target is spread over; None: it's whole."""
    group: dist.ProcessGroup | None = getattr(target, _GROUP, None)
    return group


def from_rank_0(tokens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return what rank 0 has chosen, on every rank.

    Parameters
    ----------
    tokens : Tensor
        What this rank has chosen; the same shape and dtype on every rank.
    group : ProcessGroup or None
        None: there is one rank.
    """
    if group is None:
        return tokens
    chosen: Tensor = functional.wait_tensor(functional.broadcast(tokens, 0, group))
    return chosen
