"""accept_greedy: drafts that the target also chose."""

from __future__ import annotations

import torch

from bench import accept
from bench.common import Arguments, Case, Draw, Operation, Step, Work


def make_case(work: Work, device: torch.device) -> Case:
    """Make targets that agree with two drafts of three."""
    draw = Draw(work, device)
    case = accept.make_case(work, draw)
    drafts = case.inputs["input_ids"].cpu().roll(-1)
    agrees = draw.integers(0, 2, len(drafts)) > 0
    case.inputs.update(draw.put({"target_tokens": torch.where(agrees, drafts, 32_000)}))
    return case


def host_loop(a: Arguments) -> Step:
    """Read the device once a row: the target's tokens."""
    targets, ids = a["target_tokens"], a["input_ids"].tolist()

    def emit(b: int, base: int, nd: int) -> tuple[int, list[int]]:
        chosen = targets[base : base + nd + 1].tolist()
        count = 0
        while count < nd and 0 <= ids[base + count + 1] == chosen[count]:
            count += 1
        return count, chosen[: count + 1]

    return accept.host_loop(a, emit)


def vectorised(a: Arguments) -> Step:
    """Work on whole tensors, without a host read."""
    device = a["num_rows"].device
    rows = torch.arange(len(a["seq_lens"]), device=device)
    tokens = torch.arange(len(a["input_ids"]), dtype=torch.int32, device=device)
    columns = torch.arange(a["accepted_tokens"].shape[1], dtype=torch.int32, device=device)

    def step() -> None:
        targets, ids = a["target_tokens"], a["input_ids"]
        is_empty, base = accept.rows_of(a, rows)
        places = (base[:, None] + columns).clamp(max=len(tokens) - 1)
        chosen = targets[places]
        draft = ids[(places + 1).clamp(max=len(tokens) - 1)]
        stands = (draft >= 0) & (draft == chosen) & (columns < a["num_draft_tokens"][:, None])
        accepted = stands.int().cumprod(1).sum(1, dtype=torch.int32)
        accept.finish(
            a,
            tokens,
            is_empty=is_empty,
            base=base,
            accepted=accepted,
            emitted=chosen.masked_fill(columns > accepted[:, None], -1),
            bonus=chosen.gather(1, accepted[:, None].long())[:, 0],
        )

    return step


OPERATION = Operation(
    name="accept_greedy",
    function="accept_greedy",
    sweeps=accept.ACCEPT_SWEEPS,
    make_case=make_case,
    host_loop=host_loop,
    vectorised=vectorised,
    per_row_triton=accept.per_row_triton,
)
