"""Sampling on the device, with random numbers that are a function of seed and position alone.

There is one uniform number a token of a text, made by an integer hash, and a token is chosen by
inverting the distribution at that number. So a text follows from its prompt, its settings and its
seed: neither its neighbours in the batch, nor drafts, nor preemption change it.

Drafts are chosen without chance. To accept draft d where the sample at its place equals d is then
exact rejection sampling: it stands with probability p(d), and what stands otherwise is distributed
as p is without d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmeta.batch import BatchMetadata
from specmeta.serving.request import SamplingParams, check_integer

__all__ = ["SamplingState", "sample", "sample_places", "uniform", "verified_places"]

# SplitMix64 (Steele, Lea, Flood 2014): the step between two states, and the finaliser.
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_FLOAT32 = torch.finfo(torch.float32)


class SamplingState:
    """How each slot's tokens are chosen.

    Parameters
    ----------
    max_slots : int
        S, the requests that may be alive at once.
    device : torch.device or str

    Attributes
    ----------
    temperature : float32 [S]
        0: the most probable token.
    top_p : float32 [S]
        Only the most probable tokens are chosen from: the fewest that have this much of the
        probability together.
    seed : int64 [S]
    """

    def __init__(self, max_slots: int, *, device: torch.device | str = "cpu") -> None:
        self.temperature = torch.zeros(max_slots, device=device)
        self.top_p = torch.ones(max_slots, device=device)
        self.seed = torch.zeros(max_slots, dtype=torch.int64, device=device)

    def set(self, slot: int, params: SamplingParams) -> None:
        """Say how a slot's tokens are chosen, in the order of the current stream.

        Parameters
        ----------
        slot : int
        params : SamplingParams

        Raises
        ------
        ValueError
            There is no such slot.
        """
        slot = check_integer("slot", slot, 0, len(self.seed) - 1)
        # Of what float32 can't hold, the nearest: the text is the same.
        self.temperature[slot].fill_(min(params.temperature, _FLOAT32.max))
        self.top_p[slot].fill_(max(params.top_p, _FLOAT32.tiny))
        self.seed[slot].fill_(params.seed)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift zeros in from the left: torch's own shift repeats the sign."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _mix(x: Tensor) -> Tensor:
    for bits, factor in _MIX:
        x = (x ^ _shift_right(x, bits)) * _signed(factor)
    return x ^ _shift_right(x, _LAST_SHIFT)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return the random number of a text's position: the same wherever and whenever it's asked for.

    Parameters
    ----------
    seed, position : int64 [...]

    Returns
    -------
    float64 [...]
        In [0, 1), a multiple of 2^-53: SplitMix64, begun at a hash of the seed.
    """
    state = _mix(seed + _signed(_STEP)) + (position + 1) * _signed(_STEP)
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def sample(
    logits: Tensor, *, temperature: Tensor, top_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """Choose a token from each row of logits.

    Parameters
    ----------
    logits : floating [N, V]
    temperature, top_p : float32 [N]
        As in `SamplingState`.
    seed, position : int64 [N]
        What the row's random number is made of.

    Returns
    -------
    int64 [N]
        Nothing is read back to the host, and no other row has an influence.
    """
    is_greedy = temperature <= 0
    scale = temperature.masked_fill(is_greedy, 1.0).double()
    # Greedy rows choose from their own logits: the float64 ones may have no ties where these do.
    greedy = logits.argmax(-1)
    p = (logits.double() / scale[:, None]).softmax(-1)
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    # Without a limit none is left out, whatever the sum has been rounded to.
    in_nucleus = (before < top_p.double()[:, None]) | (top_p >= 1)[:, None]
    in_nucleus = torch.zeros_like(in_nucleus).scatter(-1, order, in_nucleus)
    # In the vocabulary's order, so that a rounding error moves no token but at its own borders.
    p = p * in_nucleus
    total = p.cumsum(-1)
    is_behind = total > uniform(seed, position)[:, None] * total[:, -1:]
    # The first one. A parallel sum needn't grow where p is 0.
    sampled = (is_behind & (p > 0)).int().argmax(-1)
    return torch.where(is_greedy, greedy, sampled)


def verified_places(batch: BatchMetadata, num_tokens: int) -> Tensor:
    """Return where the tokens stand behind which a step may emit one.

    Parameters
    ----------
    batch : BatchMetadata
        Staged.
    num_tokens : int
        Query tokens of the launch.

    Returns
    -------
    int64 [B, K+1]
        Flat indices: a row's last certain token, then its drafts. Places behind a row's last
        token, and those of an empty row, are some other token's.
    """
    count = batch.max_draft_len + 1
    first = batch.cu_seqlens_q[1:].long() - 1 - batch.num_draft_tokens
    places = first[:, None] + torch.arange(count, device=first.device)
    return places.clamp(0, num_tokens - 1)


def sample_places(
    batch: BatchMetadata, logits: Tensor, places: Tensor, state: SamplingState
) -> Tensor:
    """Return what to hand to `BatchMetadata.accept_sampled`.

    Parameters
    ----------
    batch : BatchMetadata
        Staged.
    logits : floating [B * (K+1), V]
        The target's, at `places`.
    places : int64 [B, K+1]
        From `verified_places`.
    state : SamplingState

    Returns
    -------
    int64 [B, K+1]
        The samples up to and including the first that isn't the draft behind it, then -1.
    """
    slots = batch.row_to_slot.long().clamp(0, batch.max_slots - 1)
    slots = slots[:, None].expand_as(places).flatten()
    flat = places.flatten()
    samples = sample(
        logits,
        temperature=state.temperature[slots],
        top_p=state.top_p[slots],
        seed=state.seed[slots],
        position=batch.position_ids.long()[flat],
    ).view_as(places)
    drafts = batch.input_ids.long()[places[:, 1:]]
    stands = (drafts == samples[:, :-1]).long().cumprod(-1).bool()
    # Places behind a row's drafts are the operation's to leave out.
    return torch.cat([samples[:, :1], samples[:, 1:].masked_fill(~stands, -1)], dim=1)
