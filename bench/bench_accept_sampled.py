"""accept_sampled: what a rejection sampler let through."""

from __future__ import annotations

import torch

from bench import accept
from bench.common import Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make samples beside the rest."""
    draw = Draw(work, device)
    case = accept.make_case(work, draw)
    case.inputs.update(accept.draw_samples(draw))
    return case


def host_loop(a: Arguments) -> Step:
    """Read the device once a row: what the sampler gave."""
    sampled, vocab_size = a["sampled_tokens"], a["vocab_size"]

    def emit(b: int, base: int, nd: int) -> tuple[int, list[int]]:
        emitted = list[int]()
        for token in sampled[b].tolist()[: nd + 1]:
            if not 0 <= token < vocab_size:
                break
            emitted.append(token)
        return max(len(emitted) - 1, 0), emitted

    return accept.host_loop(a, emit)


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    device = a["num_rows"].device
    rows = torch.arange(len(a["seq_lens"]), device=device)
    tokens = torch.arange(len(a["input_ids"]), dtype=torch.int32, device=device)
    columns = torch.arange(a["accepted_tokens"].shape[1], dtype=torch.int32, device=device)

    def step() -> None:
        sampled = a["sampled_tokens"]
        is_empty, base = accept.rows_of(a, rows)
        stands = (sampled >= 0) & (sampled < a["vocab_size"])
        stands &= columns <= a["num_draft_tokens"][:, None]
        valid = stands.int().cumprod(1).sum(1, dtype=torch.int32)
        accepted = (valid - 1).clamp(min=0)
        accept.finish(
            a,
            tokens,
            is_empty=is_empty,
            base=base,
            accepted=accepted,
            emitted=sampled.masked_fill(columns >= valid[:, None], -1),
            bonus=sampled.gather(1, accepted[:, None].long())[:, 0],
        )

    return step


OPERATION = Operation(
    name="accept_sampled",
    function="accept_sampled",
    sweeps=accept.ACCEPT_SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=accept.per_row_triton,
)
