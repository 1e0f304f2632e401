"""`accept_greedy`, `accept_sampled`: random arguments against the reference, and each rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from strategies import Call, accept_greedy_calls, accept_sampled_calls

import specmeta
from specmeta import Status, reference
from specmeta.testing import Guarded, poisoned, run_both

Check = Callable[..., None]

INT32_MAX = 2**31 - 1

# One row that verifies two drafts, and of them the first stands.
VERIFY: Call = {
    "target_tokens": [16, 99, 18],
    "input_ids": [15, 16, 17],
    "cu_seqlens_q": [0, 3],
    "num_draft_tokens": [2],
    "seq_lens": [7],
    "committed_lens": [4],
    "known_lens": [5],
    "num_drafts": [2],
    "tokens": [[11, 12, 13, 14, 15, 16, 17, 0]],
}

COMMITTED: Call = {
    "committed_lens": [6],
    "known_lens": [7],
    "num_drafts": [0],
    "tokens": [[11, 12, 13, 14, 15, 16, 99, 0]],
    "status": [0],
}


@pytest.mark.random
@given(call=accept_greedy_calls())
def test_random_greedy(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.accept_greedy, reference.accept_greedy, call, device)


@pytest.mark.random
@given(call=accept_sampled_calls())
def test_random_sampled(device: str, count_example: Callable[[], object], call: Call) -> None:
    count_example()
    run_both(specmeta.accept_sampled, reference.accept_sampled, call, device)


# --- How many drafts stand


@pytest.mark.parametrize(
    ("num_draft_tokens", "nd", "status"),
    [(2, 2, 0), (1, 1, 0), (0, 0, 0), (-1, 0, 4), (3, 2, 4), (-(2**31), 0, 4), (INT32_MAX, 2, 4)],
)
def test_num_draft_tokens_is_clamped(
    check: Check, num_draft_tokens: int, nd: int, status: int
) -> None:
    """The drafts are the last query tokens, and the first is never one."""
    check(
        "accept_greedy",
        {
            "target_tokens": [1, 2, 3],
            "input_ids": [0, 1, 2],
            "cu_seqlens_q": [0, 3],
            "num_draft_tokens": [num_draft_tokens],
        },
        {
            "num_accepted": [nd],
            "num_rejected": [0],
            "token_indices": [2],
            "next_tokens": [3],
            "status": [status],
        },
    )


def test_the_width_of_accepted_tokens_is_a_limit(check: Check) -> None:
    """With fewer places than query tokens the first tokens are context."""
    call = {"target_tokens": [1, 2, 3], "input_ids": [0, 1, 2], "cu_seqlens_q": [0, 3]}
    check("accept_greedy", call, {"num_accepted": [2], "status": [0]})
    check(
        "accept_greedy",
        {**call, "max_draft_len": 1},
        {"num_accepted": [1], "accepted_tokens": [[2, 3]], "status": [0]},
    )
    check(
        "accept_greedy",
        {**call, "max_draft_len": 0, "num_draft_tokens": [1]},
        {"num_accepted": [0], "accepted_tokens": [[3]], "status": [4]},
    )


def test_the_first_difference_ends_the_row(check: Check) -> None:
    """What agrees behind it does not count."""
    check(
        "accept_greedy",
        {
            "target_tokens": [1, 9, 3, 4, 5, 6, 7, 8],
            "input_ids": [0, 1, 2, 3, 9, 5, 6, 7],
            "cu_seqlens_q": [0, 4, 8],
            "max_draft_len": 3,
        },
        {
            "num_accepted": [1, 3],
            "num_rejected": [2, 0],
            "token_indices": [1, 7],
            "next_tokens": [9, 8],
            "accepted_tokens": [[1, 9, -1, -1], [5, 6, 7, 8]],
            "draft_input_ids": [1, 9, 0, 0, 5, 6, 7, 8],
            "status": [0, 0],
        },
    )


def test_ids_are_compared_in_64_bits(device: str) -> None:
    """2^32 + 1 is not 1, whatever the tensors' dtypes."""
    call = {
        "target_tokens": torch.tensor([2**32 + 1, 5]),
        "input_ids": torch.tensor([0, 1], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
        "num_accepted": poisoned(1),
        "next_tokens": poisoned(1),
        "accepted_tokens": poisoned(1, 2, dtype=torch.int64),
        "draft_input_ids": poisoned(2),
    }
    left = run_both(specmeta.accept_greedy, reference.accept_greedy, call, device)
    assert left["num_accepted"].tolist() == [0]
    assert left["next_tokens"].tolist() == [INT32_MAX]  # saturated
    assert left["accepted_tokens"].tolist() == [[2**32 + 1, -1]]
    assert left["draft_input_ids"].tolist() == [INT32_MAX, 0]


@pytest.mark.parametrize(
    ("sampled", "a", "following", "status"),
    [
        ([4, 5, 6], 2, 6, 0),
        ([4, 5, -1], 1, 5, 0),
        ([4, -1, 6], 0, 4, 0),
        ([4, 10, 6], 0, 4, 0),
        ([9, 0, 9], 2, 9, 0),
        ([-1, 5, 6], 0, 50, 4),
        ([10, 5, 6], 0, 50, 4),
        ([2**40, 5, 6], 0, 50, 4),
    ],
)
def test_sampled_ids_inside_the_vocabulary_stand(
    check: Check, sampled: list[int], a: int, following: int, status: int
) -> None:
    check(
        "accept_sampled",
        {
            "sampled_tokens": [sampled],
            "vocab_size": 10,
            "cu_seqlens_q": [0, 3],
            "pad_token": 50,
        },
        {
            "num_accepted": [a],
            "num_rejected": [2 - a],
            "token_indices": [a],
            "next_tokens": [following],
            "accepted_tokens": [[*sampled[: a + 1], -1, -1][:3] if not status else [-1] * 3],
            "status": [status],
        },
    )


def test_sampled_ids_behind_the_drafts_are_not_looked_at(check: Check) -> None:
    check(
        "accept_sampled",
        {
            "sampled_tokens": [[4, 5, 6], [4, 5, 6]],
            "vocab_size": 10,
            "cu_seqlens_q": [0, 2, 5],
            "num_draft_tokens": [1, 0],
        },
        {
            "num_accepted": [1, 0],
            "accepted_tokens": [[4, 5, -1], [4, -1, -1]],
            "token_indices": [1, 4],
            "status": [0, 0],
        },
    )


def test_one_token_a_row(check: Check) -> None:
    """Without `cu_seqlens_q` there are no drafts, and tokens behind the rows are padding."""
    check(
        "accept_greedy",
        {
            "target_tokens": [5, 6, 7],
            "input_ids": [1, 2, 3],
            "position_ids": [10, 20, 30],
            "row_to_slot": [0, -1],
        },
        {
            "next_tokens": [5, 0],
            "token_indices": [0, 1],
            "last_position_ids": [10, 0],
            "draft_input_ids": [5, 0, 0],
        },
    )


# --- What stands, for engines that keep the lengths themselves


def test_what_stands_of_a_row(check: Check) -> None:
    """Some drafts, all of them, none, and a row without drafts; no state is needed."""
    check(
        "accept_greedy",
        {
            "target_tokens": [1, 9, 3, 4, 5, 6, 9, 8, 9, 7],
            "input_ids": [0, 1, 2, 3, 4, 5, 3, 3, 3, 3],
            "cu_seqlens_q": [0, 3, 6, 9, 10],
            "seq_lens": [13, 3, 2**20, 1],
        },
        {
            "num_accepted": [1, 2, 0, 0],
            "num_sampled": [2, 3, 1, 1],
            "num_rejected": [1, 0, 2, 0],
            "seq_lens_out": [12, 3, 2**20 - 2, 1],
            "token_indices": [1, 5, 6, 9],
            "status": [0, 0, 0, 0],
        },
    )


def test_nothing_stands_of_an_empty_row(check: Check) -> None:
    """No slot, length 0 or below the query, no tokens, past num_rows."""
    check(
        "accept_greedy",
        {
            "target_tokens": [5, 6, 7, 8, 9, 5],
            "input_ids": [1, 5, 3, 4, 5, 6],
            "cu_seqlens_q": [0, 2, 3, 4, 6, 6, 6],
            "row_to_slot": [4, -1, 0, 1, 2, 3],
            "num_rows": 5,
            "seq_lens": [9, 9, 0, 1, 9, 9],
            "status": [0] * 6,
        },
        {
            "num_sampled": [2, 0, 0, 0, 0, 0],
            "seq_lens_out": [9, 0, 0, 0, 0, 0],
            "status": [0, int(Status.UNDERFLOW), 0, 0, 0, 0],
        },
    )


@pytest.mark.parametrize("state", [{}, {"committed_lens": [4], "known_lens": [5]}])
def test_a_void_step_leaves_none_of_its_tokens(check: Check, state: Call) -> None:
    """The length before the pass, so that the step can be tried again."""
    if state:
        state = {**state, "tokens": VERIFY["tokens"]}
    check(
        "accept_sampled",
        {
            "sampled_tokens": [[-1, 7, 7]],
            "vocab_size": 100,
            "cu_seqlens_q": [0, 3],
            "seq_lens": [7],
            **state,
        },
        {
            "num_sampled": [0],
            "num_accepted": [0],
            "num_rejected": [2],
            "seq_lens_out": [4],
            "status": [int(Status.BAD_COUNT)],
            **state,
        },
    )


def test_the_kept_length_is_the_committed_one(check: Check) -> None:
    check("accept_greedy", VERIFY, {"seq_lens_out": [6], "num_sampled": [2]} | COMMITTED)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes_of_what_stands(device: str, dtype: torch.dtype) -> None:
    """Each output may be of either type; a length that int32 does not hold saturates there."""
    call = {
        "target_tokens": torch.tensor([5, 6]),
        "input_ids": torch.tensor([1, 5]),
        "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([2**35]),
        "num_sampled": poisoned(1, dtype=dtype),
        "seq_lens_out": poisoned(1, dtype=dtype),
        "token_indices": poisoned(1, dtype=dtype),
    }
    left = run_both(specmeta.accept_greedy, reference.accept_greedy, call, device)
    assert left["num_sampled"].tolist() == [2]
    assert left["seq_lens_out"].tolist() == [min(2**35, torch.iinfo(dtype).max)]
    assert left["token_indices"].tolist() == [1]


# --- Empty rows


def test_the_index_of_padding_where_nothing_tells_the_tokens(check: Check) -> None:
    """It goes into a gather, so the last token is as far as it goes."""
    check(
        "accept_sampled",
        {
            "sampled_tokens": [[1], [2], [3]],
            "vocab_size": 9,
            "cu_seqlens_q": [0, 1, 2, 2],
            "num_rows": 2,
        },
        {"token_indices": [0, 1, 1], "next_tokens": [1, 2, 0]},
    )


def test_an_empty_row_has_valid_results(check: Check) -> None:
    """No slot, no tokens, length 0, past num_rows: an index inside the tokens, a valid id."""
    check(
        "accept_greedy",
        {
            "target_tokens": [5, 6, 7],
            "input_ids": [1, 2, 3],
            "cu_seqlens_q": [0, 1, 1, 2, 3, 99],
            "row_to_slot": [-1, 0, 1, 2, 3],
            "num_rows": 4,
            "num_draft_tokens": [9, 9, 9, 0, 9],
            "seq_lens": [1, 1, 0, 1, 1],
            "committed_lens": [0, 0, 0, 0],
            "known_lens": [1, 1, 1, 1],
            "tokens": [[1, 0], [1, 0], [1, 0], [1, 0]],
            "position_ids": [4, 5, 6],
            "pad_token": 50,
            "max_draft_len": 1,
        },
        {
            "num_accepted": [0, 0, 0, 0, 0],
            "num_rejected": [0, 0, 0, 0, 0],
            "next_tokens": [50, 50, 50, 7, 50],
            "token_indices": [0, 1, 1, 2, 2],
            "last_position_ids": [0, 0, 0, 6, 0],
            "accepted_tokens": [[-1, -1], [-1, -1], [-1, -1], [7, -1], [-1, -1]],
            "draft_input_ids": [50, 50, 7],
            "committed_lens": [0, 0, 1, 0],
            "known_lens": [1, 1, 2, 1],
            "tokens": [[1, 0], [1, 0], [1, 7], [1, 0]],
            "status": [0, 0, 0, 0, 0],
        },
    )


def test_no_tokens_at_all(check: Check) -> None:
    check(
        "accept_greedy",
        {"target_tokens": [], "input_ids": [], "cu_seqlens_q": [0, 0, 5]},
        {"token_indices": [0, 0], "next_tokens": [0, 0], "status": [0, int(Status.BAD_INDPTR)]},
    )


def test_a_bad_pair_where_nothing_tells_the_tokens(check: Check) -> None:
    """The last entry of cu_seqlens_q counts as their number for the index of padding."""
    check(
        "accept_sampled",
        {"sampled_tokens": [[5], [6]], "vocab_size": 10, "cu_seqlens_q": [INT32_MAX, 0, 1]},
        {"token_indices": [0, 0], "next_tokens": [0, 0], "status": [32, 32]},
    )


def test_from_a_bad_pair_on_every_live_row_is_empty(check: Check) -> None:
    """Their state is untouched, the index stays inside."""
    check(
        "accept_greedy",
        {
            "target_tokens": [5, 6, 7, 8],
            "input_ids": [1, 2, 3, 4],
            "cu_seqlens_q": [0, 1, -7, 3, 4],
            "num_rows": 3,
            "seq_lens": [1, 1, 1, 1],
            "committed_lens": [0, 0, 0, 0],
            "known_lens": [1, 1, 1, 1],
            "tokens": [[1, 0], [1, 0], [1, 0], [1, 0]],
        },
        {
            "next_tokens": [5, 0, 0, 0],
            "token_indices": [0, 1, 0, 3],
            "draft_input_ids": [5, 0, 0, 0],
            "committed_lens": [1, 0, 0, 0],
            "known_lens": [2, 1, 1, 1],
            "tokens": [[1, 5], [1, 0], [1, 0], [1, 0]],
            "status": [0, 32, 32, 0],
        },
    )


@pytest.mark.parametrize(
    ("length", "status"),
    [(3, 0), (2, 2), (1, 2), (0, 0), (-1, 4), (-(2**63), 4)],
)
def test_a_length_below_the_query_empties_the_row(check: Check, length: int, status: int) -> None:
    """Before the count is looked at."""
    moved = length == 3
    check(
        "accept_greedy",
        {
            **VERIFY,
            "seq_lens": [length],
            "known_lens": [1],
            "num_draft_tokens": [2 if moved else 9],
        },
        {
            "num_accepted": [1 if moved else 0],
            "committed_lens": [2 if moved else 4],
            "known_lens": [3 if moved else 1],
            "num_drafts": [0 if moved else 2],
            "tokens": [[11, 12, 99, 14, 15, 16, 17, 0] if moved else VERIFY["tokens"][0]],
            "status": [status],
        },
    )


def test_without_state_and_status_any_slot_is_one(check: Check) -> None:
    """Nothing tells S, and nothing is read at the slot."""
    check(
        "accept_greedy",
        {
            "target_tokens": [5, 6, 7, 8],
            "input_ids": [1, 2, 3, 4],
            "row_to_slot": [INT32_MAX, -1, -2, 2**50],
        },
        {"next_tokens": [5, 0, 0, 8]},
    )


@pytest.mark.parametrize("rows", [{"cu_seqlens_q": [0, 1, 2]}, {"status": [0, 0]}])
def test_what_tells_the_rows(check: Check, rows: Call) -> None:
    """Where nothing else does: the query's offsets, or `status` (slot = row)."""
    check(
        "accept_greedy",
        {"target_tokens": [5, 6], "input_ids": [1, 2], **rows},
        {"draft_input_ids": [5, 6]},
    )


def test_status_alone_tells_the_slots(check: Check) -> None:
    check(
        "accept_greedy",
        {"target_tokens": [5, 6], "input_ids": [1, 2], "row_to_slot": [1, 2], "status": [0] * 3},
        {"next_tokens": [5, 0], "status": [0, 0, int(Status.BAD_SLOT)]},
    )


# --- The state


def test_a_row_commits(check: Check) -> None:
    check("accept_greedy", VERIFY, COMMITTED)


def test_a_chunk_of_a_prompt_emits_nothing(check: Check) -> None:
    """One token short of the last known one: the next token is known."""
    check(
        "accept_greedy",
        {**VERIFY, "num_draft_tokens": [0], "known_lens": [8], "max_draft_len": 1},
        {
            "num_accepted": [0],
            "next_tokens": [0],
            "accepted_tokens": [[-1, -1]],
            "draft_input_ids": [16, 17, 0],
            "committed_lens": [7],
            "known_lens": [8],
            "num_drafts": [0],
            "tokens": VERIFY["tokens"],
            "status": [0],
        },
    )


def test_the_last_chunk_of_a_prompt_emits(check: Check) -> None:
    check(
        "accept_greedy",
        {**VERIFY, "num_draft_tokens": [0], "known_lens": [7], "max_draft_len": 1},
        {
            "next_tokens": [18],
            "accepted_tokens": [[18, -1]],
            "committed_lens": [7],
            "known_lens": [8],
            "num_drafts": [0],
            "tokens": [[11, 12, 13, 14, 15, 16, 17, 18]],
            "status": [0],
        },
    )


def test_a_chunk_whose_next_token_is_outside_the_ledger(check: Check) -> None:
    check(
        "accept_greedy",
        {**VERIFY, "seq_lens": [9], "known_lens": [99], "pad_token": 50},
        {
            "next_tokens": [50],
            "draft_input_ids": [16, 50, 50],
            "committed_lens": [8],
            "known_lens": [99],
            "num_drafts": [0],
            "tokens": VERIFY["tokens"],
            "status": [int(Status.OVERFLOW)],
        },
    )


def test_a_full_ledger_stores_nothing_and_the_row_idles(device: str) -> None:
    """`known_lens` stays at L, so that the next step finds no token to run."""
    run = Guarded(
        {
            "target_tokens": torch.tensor([5, 6]),
            "input_ids": torch.tensor([3, 5]),
            "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
            "seq_lens": torch.tensor([4]),
            "committed_lens": torch.tensor([2], dtype=torch.int32),
            "known_lens": torch.tensor([3], dtype=torch.int32),
            "tokens": torch.tensor([[1, 2, 3, 5]]),
            "next_tokens": poisoned(1),
            "status": torch.zeros(1, dtype=torch.int32),
        },
        device,
    )
    specmeta.accept_greedy(**run.tensors)
    left = {name: tensor.tolist() for name, tensor in run.tensors.items()}
    assert left["next_tokens"] == [6]
    assert (left["committed_lens"], left["known_lens"]) == ([4], [4])
    assert left["tokens"] == [[1, 2, 3, 5]]
    assert left["status"] == [int(Status.OVERFLOW)]
    run.check_guards()

    seq_lens = torch.full((1,), 7, device=device)
    specmeta.stage(
        run.tensors["committed_lens"],
        known_lens=run.tensors["known_lens"],
        tokens=run.tensors["tokens"],
        page_size=4,
        seq_lens=seq_lens,
        status=run.tensors["status"].zero_(),
    )
    assert seq_lens.tolist() == [0]
    assert run.tensors["status"].tolist() == [0]


def test_a_void_step_can_be_tried_again(check: Check) -> None:
    """No id came: the ledger keeps its values, only the drafts are gone."""
    state = {name: VERIFY[name] for name in ("seq_lens", "committed_lens", "known_lens", "tokens")}
    check(
        "accept_sampled",
        {
            **state,
            "num_drafts": [2],
            "sampled_tokens": [[-1, 7, 7]],
            "vocab_size": 100,
            "cu_seqlens_q": [0, 3],
            "input_ids": [15, 16, 17],
            "pad_token": 50,
        },
        {
            "num_accepted": [0],
            "num_rejected": [2],
            "next_tokens": [50],
            "draft_input_ids": [50, 50, 50],
            "accepted_tokens": [[-1, -1, -1]],
            "committed_lens": [4],
            "known_lens": [5],
            "num_drafts": [0],
            "tokens": VERIFY["tokens"],
            "status": [int(Status.BAD_COUNT)],
        },
    )


def test_a_chunk_needs_no_sampled_id(check: Check) -> None:
    check(
        "accept_sampled",
        {
            "sampled_tokens": [[-1]],
            "vocab_size": 100,
            "cu_seqlens_q": [0, 2],
            "input_ids": [21, 22],
            "seq_lens": [2],
            "committed_lens": [0],
            "known_lens": [4],
            "tokens": [[21, 22, 23, 24]],
        },
        {
            "next_tokens": [23],
            "accepted_tokens": [[-1]],
            "draft_input_ids": [22, 23],
            "committed_lens": [2],
            "known_lens": [4],
            "tokens": [[21, 22, 23, 24]],
            "status": [0],
        },
    )


def test_a_huge_length_saturates_in_the_state(check: Check) -> None:
    check(
        "accept_greedy",
        {**VERIFY, "seq_lens": [2**62]},
        {
            "committed_lens": [INT32_MAX],
            "known_lens": [8],
            "num_drafts": [0],
            "tokens": VERIFY["tokens"],
            "status": [int(Status.OVERFLOW)],
        },
    )


def test_no_live_row_no_change(device: str) -> None:
    """Rule 2: with num_rows = 0 nothing indexed by slot changes."""
    state = {name: torch.tensor(value) for name, value in VERIFY.items()}
    state = {
        name: t if name in ("target_tokens", "input_ids", "tokens", "seq_lens") else t.int()
        for name, t in state.items()
    }
    run = Guarded(
        {
            **state,
            "num_rows": torch.zeros(1, dtype=torch.int32),
            "status": torch.tensor([64], dtype=torch.int32),
        },
        device,
    )
    specmeta.accept_greedy(**run.tensors)
    for name in run.tensors:
        run.check_unchanged(name)


@pytest.mark.parametrize("slot", [INT32_MAX, 2**31, 2**63 - 1])
def test_any_slot_is_one_where_nothing_tells_how_many_there_are(slot: int) -> None:
    row_to_slot = torch.tensor([slot, -1])
    for accept in (specmeta.accept_greedy, reference.accept_greedy):
        next_tokens = torch.tensor([7, 7])
        accept(
            torch.tensor([5, 6]),
            torch.tensor([3, 3]),
            row_to_slot=row_to_slot,
            next_tokens=next_tokens,
        )
        assert next_tokens.tolist() == [5, 0]
