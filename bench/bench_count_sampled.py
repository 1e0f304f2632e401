"""count_sampled: how many ids a rejection sampler left, before the next step's rows are known."""

from __future__ import annotations

import torch

from bench import layout
from bench.accept import VOCAB_SIZE, draw_samples
from bench.common import BY_ROW_SWEEPS, Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make samples, one row in eight a chunk of a longer prompt."""
    draw = Draw(work, device)
    rows = work.rows
    inputs = {
        "discarded": draw.integers(0, 7, rows) == 0,
        "backup_tokens": draw.integers(0, VOCAB_SIZE - 1, rows).long(),
        "num_rows": torch.tensor([rows], dtype=torch.int32),
    }
    outputs = {
        "num_sampled": torch.empty(rows, dtype=torch.int32),
        "next_tokens": torch.empty(rows, dtype=torch.int64),
    }
    return Case(
        inputs={**draw_samples(draw), **draw.put(inputs)},
        state=draw.put({"status": torch.zeros(rows, dtype=torch.int32)}),
        outputs=draw.put(outputs),
    )


def host_loop(a: Arguments) -> Step:
    """Read the device once a row: what the sampler gave."""
    sampled, vocab_size, live = a["sampled_tokens"], a["vocab_size"], int(a["num_rows"])
    discarded, backups = a["discarded"].tolist(), a["backup_tokens"].tolist()

    def step() -> None:
        counts, next_tokens = [], []
        for b in range(live):
            count, next_token = 0, backups[b]
            for token in sampled[b].tolist():
                if discarded[b] or not 0 <= token < vocab_size:
                    break
                count, next_token = count + 1, token
            counts.append(count)
            next_tokens.append(next_token)
        layout.send(counts, a["num_sampled"])
        layout.send(next_tokens, a["next_tokens"])

    return step


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    rows = torch.arange(len(a["discarded"]), device=a["num_rows"].device)

    def step() -> None:
        sampled, is_padding = a["sampled_tokens"], rows >= a["num_rows"]
        stands = (sampled >= 0) & (sampled < a["vocab_size"])
        counts = stands.int().cumprod(1).sum(1, dtype=torch.int32)
        counts = counts.masked_fill(a["discarded"] | is_padding, 0)
        last = sampled.gather(1, (counts - 1).clamp(min=0).long()[:, None])[:, 0]
        next_tokens = torch.where(counts > 0, last, a["backup_tokens"])
        a["num_sampled"].copy_(counts)
        a["next_tokens"].copy_(next_tokens.masked_fill(is_padding, 0))

    return step


def per_row_triton(a: Arguments) -> Step:
    """Launch one kernel."""
    from bench import triton_kernels as kernels

    rows, width = a["sampled_tokens"].shape

    def step() -> None:
        kernels.count_rows[(rows,)](
            a["sampled_tokens"],
            a["discarded"],
            a["backup_tokens"],
            a["num_rows"],
            a["num_sampled"],
            a["next_tokens"],
            a["vocab_size"],
            WIDTH=width,
            BLOCK=kernels.next_power_of_2(width),
        )

    return step


OPERATION = Operation(
    name="count_sampled",
    function="count_sampled",
    sweeps=BY_ROW_SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=per_row_triton,
)
