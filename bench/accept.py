"""What the benches of acceptance share: samples, and all of accept_* but how drafts are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import layout
from bench.common import SWEEPS, Arguments, Case, Draw, Step, Work

# The cost doesn't depend on contexts or pages.
ACCEPT_SWEEPS = {name: SWEEPS[name] for name in ("headline", "works", "rows")}

VOCAB_SIZE = 32_000

Emit = Callable[[int, int, int], tuple[int, list[int]]]
"""``emit(b, base, nd)``: accepted drafts and what the step emits, the bonus token last."""


def make_case(work: Work, draw: Draw) -> Case:
    """Make rows that decode: a token that is certain, then drafts."""
    rows, tokens = work.rows, work.tokens
    contexts = draw.contexts()
    ids = draw.integers(0, 31_999, rows * tokens).long()
    starts = contexts.repeat_interleave(tokens).long()
    inputs = {
        "input_ids": ids,
        "num_draft_tokens": torch.full_like(contexts, tokens - 1),
        "position_ids": starts + torch.arange(rows * tokens) % tokens,
        "seq_lens": contexts + tokens,
        "row_to_slot": draw.permutation(rows),
    }
    slots = inputs["row_to_slot"]
    state = {
        "committed_lens": torch.empty_like(contexts).index_put_((slots,), contexts),
        "known_lens": torch.empty_like(contexts).index_put_((slots,), contexts + 1),
        "num_drafts": torch.full_like(contexts, tokens - 1),
        "status": torch.zeros(rows + 1, dtype=torch.int32),
    }
    ledger = draw.integers(0, 31_999, rows, work.max_context + tokens + 1)
    outputs = {
        "num_accepted": torch.empty_like(contexts),
        "num_rejected": torch.empty_like(contexts),
        "token_indices": torch.empty_like(contexts),
        "next_tokens": torch.empty(rows, dtype=torch.int64),
        "last_position_ids": torch.empty(rows, dtype=torch.int64),
        "accepted_tokens": torch.empty(rows, tokens, dtype=torch.int64),
        "draft_input_ids": torch.empty(rows * tokens, dtype=torch.int64),
    }
    return Case(
        inputs={**draw.put(inputs), **draw.rows()},
        state=draw.put(state),
        outputs=draw.put(outputs),
        ledger=draw.put({"tokens": ledger.long()}),
    )


def draw_samples(draw: Draw) -> Arguments:
    """Return what a sampler left: one token to all that fit in a row, each number as likely."""
    rows, tokens = draw.work.rows, draw.work.tokens
    sampled = draw.integers(0, VOCAB_SIZE - 1, rows, tokens).long()
    counts = draw.integers(1, tokens, rows)
    sampled[torch.arange(tokens) >= counts[:, None]] = -1
    return {**draw.put({"sampled_tokens": sampled}), "vocab_size": VOCAB_SIZE}


def host_loop(a: Arguments, emit: Emit) -> Step:
    """`emit` reads the device once a row. All else stands on the host already."""
    live = int(a["num_rows"])
    width, size = a["accepted_tokens"].shape[1], len(a["input_ids"])
    ids, ends = a["input_ids"].tolist(), a["cu_seqlens_q"].tolist()
    drafted, lens = a["num_draft_tokens"].tolist(), a["seq_lens"].tolist()
    positions, slots_by_row = a["position_ids"].tolist(), a["row_to_slot"].tolist()
    known, ledger = a["known_lens"].tolist(), a["tokens"].tolist()
    device = a["tokens"].device

    def step() -> None:
        by_row: dict[str, list[Any]] = {
            "num_accepted": [0] * len(lens),
            "num_rejected": [0] * len(lens),
            "next_tokens": [0] * len(lens),
            "token_indices": [min(max(end, 0), max(size - 1, 0)) for end in ends[:-1]],
            "last_position_ids": [0] * len(lens),
        }
        accepted_tokens = [[-1] * width for _ in lens]
        draft_input_ids = [0] * size
        slots, committed_lens, known_lens, next_ids = [], [], [], []
        for b, s in enumerate(slots_by_row[:live]):
            if lens[b] == 0 or ends[b] == ends[b + 1]:
                continue
            nd = drafted[b]
            base = ends[b + 1] - 1 - nd
            a_count, emitted = emit(b, base, nd)
            committed = lens[b] - (nd - a_count)
            if committed < known[s]:  # a chunk of a longer prompt
                next_id, new_known = ledger[s][committed], known[s]
            else:
                next_id, new_known = emitted[-1], committed + 1
                accepted_tokens[b][: len(emitted)] = emitted
            at = base + a_count
            by_row["num_accepted"][b] = a_count
            by_row["num_rejected"][b] = nd - a_count
            by_row["next_tokens"][b] = next_id
            by_row["token_indices"][b] = at
            by_row["last_position_ids"][b] = positions[at]
            draft_input_ids[ends[b] : at] = ids[ends[b] + 1 : at + 1]
            draft_input_ids[at] = next_id
            slots.append(s)
            committed_lens.append(committed)
            known_lens.append(new_known)
            next_ids.append(next_id)
        for name, values in by_row.items():
            layout.send(values, a[name])
        a["accepted_tokens"].copy_(torch.tensor(accepted_tokens))
        layout.send(draft_input_ids, a["draft_input_ids"])
        # All that is by slot, in one copy.
        changes = [slots, committed_lens, known_lens, next_ids]
        state = torch.tensor(changes, dtype=torch.int64).to(device)
        a["committed_lens"][state[0]] = state[1].int()
        a["known_lens"][state[0]] = state[2].int()
        a["tokens"][state[0], state[1]] = state[3]
        a["num_drafts"][state[0]] = 0

    return step


def rows_of(a: Arguments, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows are empty, and where the drafts of each begin: its query token before."""
    ends = a["cu_seqlens_q"]
    is_empty = (a["seq_lens"] == 0) | (ends[1:] == ends[:-1]) | (rows >= a["num_rows"])
    return is_empty, (ends[1:] - 1 - a["num_draft_tokens"]).clamp(min=0)


def finish(
    a: Arguments,
    tokens: Tensor,
    *,
    is_empty: Tensor,
    base: Tensor,
    accepted: Tensor,
    emitted: Tensor,
    bonus: Tensor,
) -> None:
    """Commit, and make the draft pass's inputs, in torch.

    Parameters
    ----------
    a : dict
        The call's arguments.
    tokens : Tensor
        int32 [T]: 0, 1, 2 and so on.
    is_empty, base : Tensor
        As `rows_of` gives them.
    accepted : Tensor
        [B]: drafts that stand.
    emitted : Tensor
        [B, K+1]: what the step emits, then -1.
    bonus : Tensor
        [B]: the last of it.
    """
    ends, slots, num_tokens = a["cu_seqlens_q"], a["row_to_slot"], len(tokens)
    accepted = accepted.masked_fill(is_empty, 0)
    rejected = (a["num_draft_tokens"] - accepted).masked_fill(is_empty, 0)
    committed = a["seq_lens"] - rejected
    known, ledger = a["known_lens"][slots], a["tokens"]
    column = committed.clamp(max=ledger.shape[1] - 1)
    stored = ledger[slots, column]
    is_chunk = committed < known
    next_ids = torch.where(is_chunk, stored, bonus).masked_fill(is_empty, 0)
    at = torch.where(is_empty, ends[:-1].clamp(max=num_tokens - 1), base + accepted)
    a["num_accepted"].copy_(accepted)
    a["num_rejected"].copy_(rejected)
    a["next_tokens"].copy_(next_ids)
    a["token_indices"].copy_(at)
    a["last_position_ids"].copy_(a["position_ids"][at].masked_fill(is_empty, 0))
    is_silent = (is_empty | is_chunk)[:, None]
    a["accepted_tokens"].copy_(emitted.masked_fill(is_silent, -1))
    row, is_past = layout.token_rows(ends[1:], tokens)
    shifted = a["input_ids"].roll(-1).where(tokens < at[row], next_ids[row])
    is_padding = is_past | is_empty[row] | (tokens > at[row])
    a["draft_input_ids"].copy_(shifted.masked_fill(is_padding, 0))
    # Nothing changes for a row that is empty: it writes what stands there.
    old = a["committed_lens"][slots]
    a["committed_lens"].index_put_((slots,), torch.where(is_empty, old, committed))
    new_known = torch.where(is_chunk | is_empty, known, committed + 1)
    a["known_lens"].index_put_((slots,), new_known)
    ledger.index_put_((slots, column), torch.where(is_empty, stored, next_ids))
    drafts = a["num_drafts"][slots]
    a["num_drafts"].index_put_((slots,), drafts.where(is_empty, 0))


def per_row_triton(a: Arguments) -> Step:
    """Launch two kernels: acceptance, then the draft pass's inputs."""
    from bench import triton_kernels as kernels

    rows, width = a["accepted_tokens"].shape
    num_tokens = len(a["input_ids"])
    is_sampled = "sampled_tokens" in a
    choices = a["sampled_tokens" if is_sampled else "target_tokens"]

    def step() -> None:
        kernels.accept_rows[(rows,)](
            choices,
            a["input_ids"],
            a["cu_seqlens_q"],
            a["num_draft_tokens"],
            a["position_ids"],
            a["seq_lens"],
            a["row_to_slot"],
            a["num_rows"],
            a["committed_lens"],
            a["known_lens"],
            a["num_drafts"],
            a["tokens"],
            a["tokens"].stride(0),
            a["num_accepted"],
            a["num_rejected"],
            a["next_tokens"],
            a["token_indices"],
            a["last_position_ids"],
            a["accepted_tokens"],
            num_tokens,
            a.get("vocab_size", 0),
            WIDTH=width,
            BLOCK=kernels.next_power_of_2(width),
            IS_SAMPLED=is_sampled,
        )
        kernels.draft_inputs[(rows + 1,)](
            a["input_ids"],
            a["cu_seqlens_q"],
            a["seq_lens"],
            a["num_rows"],
            a["token_indices"],
            a["next_tokens"],
            a["draft_input_ids"],
            rows,
            num_tokens,
            TILE=kernels.TILE,
        )

    return step
