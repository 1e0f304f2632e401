"""BatchMetadata: the buffers, the host's part, and an iteration through its methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specmeta import BatchMetadata


def _batch(device: str = "cpu", **changes: Any) -> BatchMetadata:
    sizes: dict[str, Any] = {
        "max_rows": 3,
        "max_slots": 4,
        "max_tokens": 9,
        "max_pages": 3,
        "page_size": 4,
        "max_seq_len": 12,
        "max_draft_len": 2,
        "device": device,
    }
    return BatchMetadata(**(sizes | changes))


def _buffers(batch: BatchMetadata) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def test_addresses_never_change(device: str) -> None:
    batch = _batch(device)
    before = {name: buffer.data_ptr() for name, buffer in _buffers(batch).items()}
    batch.assign(2, [1, 2, 3, 4, 5], [7, 8])
    batch.add_pages(2, [9])
    batch.set_rows([2, -1], [3, 0])
    batch.stage()
    batch.accept_greedy(torch.zeros(9, dtype=torch.int64, device=device))
    batch.draft_step(torch.zeros(3, dtype=torch.int64, device=device), index=0)
    batch.advance(torch.zeros(4, dtype=torch.int32, device=device))
    batch.release(2)
    assert {name: buffer.data_ptr() for name, buffer in _buffers(batch).items()} == before


def test_an_iteration(device: str) -> None:
    """A prompt of five in chunks of three, then two drafts of which one stands."""
    batch = _batch(device)
    batch.assign(2, [11, 12, 13, 14, 15], [7, 8])
    batch.set_rows([-1, 2], [3, 3])

    def target(*tokens: int) -> Tensor:
        return torch.tensor([*tokens, *[0] * (9 - len(tokens))], device=device)

    batch.stage()
    assert batch.seq_lens.tolist() == [0, 3, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 0, 3, 3]
    assert batch.input_ids.tolist() == [11, 12, 13, 0, 0, 0, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [28, 29, 30, *[-1] * 6]
    batch.accept_greedy(target(50, 51, 52))
    assert batch.accepted_tokens.tolist() == [[-1] * 3] * 3  # a chunk emits nothing
    assert batch.draft_input_ids.tolist()[:3] == [12, 13, 14]
    assert (batch.committed_lens[2], batch.known_lens[2]) == (3, 5)

    batch.stage()
    assert batch.input_ids.tolist()[:2] == [14, 15]
    batch.accept_greedy(target(53, 16))
    assert batch.accepted_tokens.tolist()[1] == [16, -1, -1]
    assert (batch.committed_lens[2], batch.known_lens[2]) == (5, 6)
    drafts = torch.tensor([0, 17, 0], device=device)
    batch.draft_step(drafts, index=0)
    assert batch.seq_lens.tolist() == [0, 6, 0]
    assert batch.draft_ids.tolist() == [0, 17, 0]
    assert batch.draft_position_ids.tolist() == [0, 5, 0]
    assert batch.draft_slot_mapping.tolist() == [-1, 33, -1]
    batch.draft_step(drafts + 1, index=1, last=True)
    assert batch.num_drafts.tolist() == [0, 0, 2, 0]

    batch.stage()
    assert batch.input_ids.tolist()[:3] == [16, 17, 18]
    assert batch.num_draft_tokens.tolist() == [0, 2, 0]
    batch.accept_greedy(target(17, 99, 98))
    assert batch.num_accepted.tolist() == [0, 1, 0]
    assert batch.tokens[2].tolist()[:8] == [11, 12, 13, 14, 15, 16, 17, 99]
    assert batch.status.tolist() == [0] * 5


def test_a_draft_model_shares_the_ledger(device: str) -> None:
    batch = _batch(device)
    draft = _batch(device, page_size=2, max_pages=6, ledger=batch)
    for name in ("tokens", "known_lens", "num_drafts", "row_to_slot", "num_rows"):
        assert getattr(draft, name) is getattr(batch, name)
    batch.assign(0, [1, 2, 3], [1])
    draft.assign(0, [], [5, 6, 7])
    batch.set_rows([0], [9])
    draft.set_query_lens([9])
    batch.stage()
    batch.accept_greedy(torch.tensor([0, 0, 4, 0, 0, 0, 0, 0, 0], device=device))
    draft.stage()
    assert draft.input_ids.tolist()[:5] == [1, 2, 3, 4, 0]  # all that is certain
    assert draft.slot_mapping.tolist()[:5] == [10, 11, 12, 13, -1]
    draft.draft_step(torch.tensor([5, 0, 0], device=device), index=0)
    assert draft.written_lens.tolist() == [4, 0, 0, 0]
    assert draft.seq_lens.tolist() == [5, 0, 0]
    assert draft.draft_position_ids.tolist() == [4, 0, 0]
    assert batch.num_drafts.tolist() == [1, 0, 0, 0]
    batch.written_lens.zero_()
    batch.committed_lens[0] = 2  # a cache that ran ahead counts as far as the target committed
    draft.stage()
    assert draft.cached_lens.tolist() == [2, 0, 0]


def test_sampled_tokens(device: str) -> None:
    batch = _batch(device)
    batch.assign(1, [5], [3])
    batch.set_rows([1], [1])
    batch.stage()
    sampled = torch.tensor([[6, -1, -1], [-1] * 3, [-1] * 3], device=device)
    batch.accept_sampled(sampled, vocab_size=10)
    assert batch.next_tokens.tolist() == [6, 0, 0]
    assert batch.known_lens.tolist() == [0, 2, 0, 0]


def test_advance_moves_what_was_staged(device: str) -> None:
    batch = _batch(device)
    batch.assign(1, [5, 6, 7], [3, 4])
    batch.set_rows([1], [3])
    batch.stage()
    batch.advance(torch.tensor([0, 2, 0, 0], dtype=torch.int32, device=device), position_bias=0)
    assert batch.seq_lens.tolist() == [5, 0, 0]
    assert batch.position_ids.tolist()[:4] == [2, 3, 4, 0]
    assert batch.slot_mapping.tolist()[:4] == [14, 15, 16, -1]


def test_counts_of_the_batch_stand_by_row(device: str) -> None:
    batch = _batch(device)
    for slot, page in ((0, 3), (2, 4)):
        batch.assign(slot, [5, 6, 7], [page, page + 2])
    batch.set_rows([2, 0], [3, 3])
    batch.stage()
    batch.num_accepted.copy_(torch.tensor([2, 1, 0]))
    for part in (batch, batch.first_rows(2)):
        with pytest.raises(ValueError, match=r"^count_index: expected .* by row, got None$"):
            part.advance(part.num_accepted)
    assert batch.seq_lens.tolist() == [3, 3, 0]
    index = torch.tensor([1, 0, -1], dtype=torch.int32, device=device)  # they have changed places
    batch.advance(batch.num_accepted, count_index=index)
    assert batch.seq_lens.tolist() == [4, 5, 0]


def test_the_row_of_a_free_slot_is_empty(device: str) -> None:
    batch = _batch(device)
    batch.set_rows([0, 1, 2], [3, 3, 3])
    lens = []
    for change in (lambda: None, lambda: batch.assign(1, [5], [3]), lambda: batch.release(1)):
        change()
        batch.stage()
        lens.append(batch.seq_lens.tolist())
    assert lens == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert batch.status.tolist() == [0] * 5


def test_release_and_reuse(device: str) -> None:
    batch = _batch(device)
    batch.assign(0, [1, 2, 3, 4, 5], [1, 2])
    batch.set_rows([0], [9])
    batch.stage()
    batch.accept_greedy(torch.ones(9, dtype=torch.int64, device=device))
    batch.status[0] = 4
    batch.release(0)
    assert not batch.status.any()
    batch.stage()
    assert batch.seq_lens.tolist() == [0, 0, 0]
    assert batch.page_table[0].tolist() == [-1] * 3
    batch.assign(0, [9], [2])
    batch.add_pages(0, [1])
    batch.stage()
    assert batch.slot_mapping.tolist()[:2] == [8, -1]
    assert batch.page_table[0].tolist()[:2] == [2, 1]


@pytest.mark.parametrize("left_out", ["kv_indices", "block_table"])
def test_one_list_is_enough(left_out: str, device: str) -> None:
    batches = [_batch(device), _batch(device, **{f"with_{left_out}": False})]
    for batch in batches:
        batch.assign(1, [1, 2, 3, 4, 5], [1, 2])
        batch.set_rows([1], [9])
        batch.first_rows(2).stage()
    both, one = (batch.first_rows(2) for batch in batches)
    assert getattr(one, left_out) is None
    for name in {"kv_indices", "block_table", "kv_indptr", "slot_mapping"} - {left_out}:
        assert torch.equal(getattr(one, name), getattr(both, name))


def test_an_eagle_head_with_pages_of_its_own(device: str) -> None:
    batch = _batch(device)
    draft = _batch(device, page_size=2, max_pages=6, ledger=batch, eagle=True)
    assert draft.query_lens is batch.query_lens
    batch.assign(2, [11, 12, 13, 14, 15], [1, 2])
    draft.assign(2, [], [5, 6, 7, 8])
    batch.set_rows([-1, 2], [3, 3])

    def target(*tokens: int) -> Tensor:
        return torch.tensor([*tokens, *[0] * (9 - len(tokens))], device=device)

    batch.stage()
    batch.accept_greedy(target(0, 0, 0))
    draft.stage()
    assert draft.input_ids.tolist() == [12, 13, 14, *[0] * 6]  # one token on
    assert draft.position_ids.tolist()[:3] == [0, 1, 2]
    assert draft.slot_mapping.tolist()[:4] == [10, 11, 12, -1]
    drafts = torch.tensor([0, 16, 0], device=device)
    draft.draft_step(drafts, index=0)  # in the middle of a prompt
    draft.draft_step(drafts, index=1, last=True)
    assert (batch.num_drafts[2], draft.written_lens[2]) == (0, 3)

    batch.stage()
    batch.accept_greedy(target(0, 16))
    draft.stage()
    assert draft.input_ids.tolist()[:3] == [15, 16, 0]
    assert draft.cached_lens.tolist() == [0, 3, 0]
    draft.draft_step(drafts + 1, index=0)
    assert draft.draft_position_ids.tolist() == [0, 5, 0]
    assert draft.draft_slot_mapping.tolist() == [-1, 15, -1]
    draft.draft_step(drafts + 2, index=1, last=True)
    assert batch.tokens[2].tolist()[:8] == [11, 12, 13, 14, 15, 16, 17, 18]
    assert (batch.num_drafts[2], draft.written_lens[2]) == (2, 5)

    batch.stage()
    batch.accept_greedy(target(17, 18, 19))  # both stand
    draft.stage()
    # All that were verified, those it had drafted too: now the target has hidden states for them.
    assert draft.cached_lens.tolist() == [0, 5, 0]
    assert draft.input_ids.tolist()[:4] == [17, 18, 19, 0]
    assert [*batch.status.tolist(), *draft.status.tolist()] == [0] * 10


def test_first_rows(device: str) -> None:
    sizes = {"max_slots": 7, "max_tokens": 11, "max_pages": 5}
    batch = _batch(device, **sizes)
    draft = _batch(device, page_size=2, **sizes | {"max_pages": 6}, ledger=batch, eagle=True)
    for whole in (batch, draft):
        part = whole.first_rows(2)
        assert part.max_rows == 2
        assert whole.first_rows(2) is part
        assert whole.first_rows(3) is whole
        assert part.first_rows(2) is part
        for name, buffer in _buffers(whole).items():
            view = getattr(part, name)
            assert view.data_ptr() == buffer.data_ptr(), name
            # Nothing else has 3 or 4 entries.
            expected = {3: 2, 4: 3}.get(len(buffer), len(buffer))
            assert len(view) == expected, name
    with pytest.raises(ValueError, match=r"count: expected an integer in \[0, 3\], got 4"):
        batch.first_rows(4)

    batch.assign(5, [1, 2, 3], [1])
    batch.set_rows([-1, 5], [3, 3])
    batch.seq_lens.fill_(99)
    batch.first_rows(2).stage()
    assert batch.seq_lens.tolist() == [0, 3, 99]
    assert batch.cu_seqlens_q.tolist() == [0, 0, 3, 0]
    batch.set_rows([-1, -1, 5], [3, 3, 3])  # more rows than the launch has
    batch.first_rows(2).stage()
    assert batch.seq_lens.tolist() == [0, 0, 99]


def test_pages_come_and_go(device: str) -> None:
    batch = _batch(device)
    batch.assign(1, [7] * 12, [5, 3, 8])
    batch.set_rows([1], [9])
    assert batch.drop_pages(1, 1) == [3, 8]
    batch.stage()
    assert batch.seq_lens.tolist() == [4, 0, 0]  # what has room
    assert batch.status.tolist() == [0, 1, 0, 0, 0]
    assert batch.page_table[1].tolist() == [5, -1, -1]
    batch.add_pages(1, [3])
    batch.stage()
    assert batch.kv_indices.tolist()[:3] == [5, 3, 0]
    assert batch.drop_pages(1, 2) == []
    assert batch.drop_pages(1, 0) == [5, 3]
    batch.stage()
    assert batch.seq_lens.tolist() == [0, 0, 0]
    batch.assign(1, [7], [2])
    assert batch.status.tolist() == [0] * 5  # what it held before is gone


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.assign(4, [1], [1]), r"slot: expected an integer in \[0, 3\], got 4"),
        (lambda b: b.assign(-1, [1], [1]), r"slot: expected an integer in \[0, 3\], got -1"),
        (lambda b: b.assign(0.5, [1], [1]), r"slot: expected an integer, got 0.5"),
        (lambda b: b.assign(0, [], [1]), "prompt: expected 1 to 12 tokens, got 0"),
        (lambda b: b.assign(0, [1] * 13, [1]), "prompt: expected 1 to 12 tokens, got 13"),
        (lambda b: b.assign(1, [1, -1], [1]), r"prompt: expected integers in .*, got -1"),
        (
            lambda b: b.assign(1, [2**63], [1]),
            r"prompt: expected integers in .*, got 9223372036854",
        ),
        (lambda b: b.assign(1, [1.5], [1]), r"prompt: expected integers, got \[1.5\]"),
        (lambda b: b.assign(1, "text", [1]), "prompt: expected integers, got 'text'"),
        (lambda b: b.assign(1, [None], [1]), "prompt: expected integers"),
        (lambda b: b.assign(1, torch.zeros(2, 2).int(), [1]), "prompt: expected integers"),
        (lambda b: b.assign(1, [1], [1, 2, 3, 4]), r"pages: expected at most 3, got 0 \+ 4"),
        (lambda b: b.assign(1, [1], [0]), r"pages: expected no pad_page 0, got \[0\]"),
        (lambda b: b.assign(1, [1], [-2]), r"pages: expected integers in .*, got -2"),
        (lambda b: b.assign(1, [1], [2**31]), r"pages: expected integers in .*, got 2147483648"),
        (lambda b: b.assign(1, [1], [3.7]), r"pages: expected integers, got \[3.7\]"),
        (lambda b: b.assign(1, [1], [3, 3]), r"pages: expected each once, got \[3, 3\]"),
        (lambda b: b.add_pages(1, [2]), r"pages: expected each once, got \[1, 2, 2\]"),
        (lambda b: b.add_pages(0, [4]), "slot: expected one that is assigned, got 0"),
        (lambda b: b.drop_pages(0, 0), "slot: expected one that is assigned, got 0"),
        (
            lambda b: b.accept_greedy(torch.zeros(2, 2, dtype=torch.int64)),
            r"target_tokens: expected one dimension of at most \d+ tokens, got shape \[2, 2\]",
        ),
        (
            lambda b: b.accept_greedy(torch.zeros(99, dtype=torch.int64)),
            r"target_tokens: expected .*, got shape \[99\]",
        ),
        (
            lambda b: b.draft_step(torch.zeros(3, dtype=torch.int64), index=b.max_draft_len),
            r"index: expected less than max_draft_len \d, got \d",
        ),
        (lambda b: b.draft_step(torch.zeros(3, dtype=torch.int64), index=-1), "index: .* got -1"),
        (lambda b: b.add_pages(1, [4, 5]), r"pages: expected at most 3, got 2 \+ 2"),
        (lambda b: b.add_pages(1, [2**31]), r"pages: expected integers in .*, got 2147483648"),
        (lambda b: b.drop_pages(1, 3), r"keep: expected an integer in \[0, 2\], got 3"),
        (lambda b: b.drop_pages(1, -1), r"keep: expected an integer in \[0, 2\], got -1"),
        (lambda b: b.drop_pages(4, 0), r"slot: expected an integer in \[0, 3\], got 4"),
        (lambda b: b.release(7), r"slot: expected an integer in \[0, 3\], got 7"),
        (lambda b: b.set_rows([0, 1, 2, 3], [1] * 4), "as many of each, at most 3, got 4 and 4"),
        (lambda b: b.set_rows([0], [1, 1]), "as many of each, at most 3, got 1 and 2"),
        (lambda b: b.set_rows([0, 0], [1, 1]), r"one row only, got \[0, 0\]"),
        (lambda b: b.set_rows(torch.tensor([0, 0]), [1, 1]), r"one row only, got \[0, 0\]"),
        (lambda b: b.set_rows([0, 0.5], [1, 1]), "slots: expected integers"),
        (lambda b: b.set_rows([-2], [1]), r"slots: expected integers in \[-1, 3\], got -2"),
        (lambda b: b.set_rows([0], [-1]), r"query_lens: expected integers in .*, got -1"),
        (
            lambda b: b.set_rows([0], [2**31]),
            r"query_lens: expected integers in .*, got 2147483648",
        ),
        (lambda b: b.set_query_lens([1] * 4), "query_lens: expected at most 3, got 4"),
        (lambda b: _batch(ledger=b).assign(0, [1], [1]), "a draft model reads the target's"),
        (lambda b: _batch(ledger=b).set_rows([0], [1]), "a draft model has its target's rows"),
        (lambda b: _batch(ledger=b, eagle=True).set_query_lens([1]), "Eagle has its target's"),
        (
            lambda b: b.stage(num_tokens=-1),
            r"num_tokens: expected an integer in \[0, 9\], got -1",
        ),
        (
            lambda b: b.stage(num_tokens=10),
            r"num_tokens: expected an integer in \[0, 9\], got 10",
        ),
        # No sequence, no integer, no tensor.
        (lambda b: b.set_rows([1], 4), "^query_lens: expected integers, got 4$"),
        (lambda b: b.set_rows(1, [4]), "^slots: expected integers, got 1$"),
        (lambda b: b.set_rows([1], None), "^query_lens: expected integers, got None$"),
        (lambda b: b.set_query_lens(4), "^query_lens: expected integers, got 4$"),
        (lambda b: b.assign(1, 5, [1]), "^prompt: expected integers, got 5$"),
        (lambda b: b.assign(1, [5], 1), "^pages: expected integers, got 1$"),
        (lambda b: b.add_pages(1, 3), "^pages: expected integers, got 3$"),
        (lambda b: b.drop_pages(1, None), r"^keep: expected an integer, got None$"),
        (lambda b: b.release([1]), r"^slot: expected an integer, got \[1\]$"),
        (lambda b: b.first_rows("2"), r"^count: expected an integer, got '2'$"),
        (lambda b: b.stage("9"), r"^num_tokens: expected an integer, got '9'$"),
        (
            lambda b: b.accept_sampled(b.accepted_tokens, vocab_size=9, num_tokens=1.5),
            r"^num_tokens: expected an integer, got 1.5$",
        ),
        (
            lambda b: b.draft_step(b.next_tokens, index=None),
            r"^index: expected an integer, got None$",
        ),
        (lambda b: b.accept_greedy([1, 2]), "^target_tokens: expected a tensor, got list$"),
    ],
)
def test_errors_change_nothing(call: Any, message: str) -> None:
    batch = _batch()
    batch.assign(1, [7, 8], [1, 2])
    batch.set_rows([1], [2])
    before = {name: buffer.clone() for name, buffer in _buffers(batch).items()}
    with pytest.raises(ValueError, match=message):
        call(batch)
    for name, buffer in _buffers(batch).items():
        assert torch.equal(buffer, before[name]), name
    batch.add_pages(1, [3])
    assert batch.page_table[1].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size: expected an integer in .*, got 0"),
        ({"max_rows": -1}, "max_rows: expected an integer in .*, got -1"),
        ({"max_draft_len": -1}, "max_draft_len: expected an integer in .*, got -1"),
        ({"max_pages": 1.5}, r"max_pages: expected an integer, got 1.5"),
        ({"ledger_len": -1}, "ledger_len: expected an integer in .*, got -1"),
        ({"kv_capacity": -1}, "kv_capacity: expected an integer in .*, got -1"),
        ({"kv_capacity": 1.5}, r"kv_capacity: expected an integer, got 1.5"),
        ({"pad_seq_len": 2}, r"pad_seq_len: expected an integer in \[0, 1\], got 2"),
        ({"pad_seq_len": 1.0}, r"pad_seq_len: expected an integer, got 1.0"),
        ({"index_dtype": torch.int16}, "index_dtype: expected int32 or int64, got torch.int16"),
        ({"ledger": _batch(max_slots=5)}, "max_slots: expected the ledger's 5, got 4"),
        (
            {"ledger": _batch(max_draft_len=1)},
            "max_draft_len: expected at most the ledger's 1, got 2",
        ),
        ({"eagle": True}, "eagle: expected a ledger, the target's batch"),
        ({"ledger": _batch(), "ledger_len": 9}, "ledger_len: expected none beside a ledger, got 9"),
        ({"ledger": 5}, "ledger: expected a BatchMetadata, got 5"),
        ({"ledger": _batch(max_rows=2)}, "max_rows: expected the ledger's 2, got 3"),
        ({"ledger": _batch(device="meta")}, "device: expected the ledger's meta, got cpu"),
        ({"ledger": _batch(ledger=_batch())}, "ledger: expected a target's batch, got a drafter's"),
        (
            {"with_kv_indices": False, "kv_capacity": 9},
            "kv_capacity: expected none with with_kv_indices=False, got 9",
        ),
        ({"with_kv_indices": torch.zeros(9)}, "with_kv_indices: expected a bool, got tensor"),
        ({"with_block_table": None}, "with_block_table: expected a bool, got None"),
        ({"eagle": "no"}, "eagle: expected a bool, got 'no'"),
        ({"device": None}, "device: expected a torch.device or its name, got None"),
        ({"device": "gpu"}, "device: expected a torch.device or its name, got 'gpu'"),
        ({"max_rows": True}, "max_rows: expected an integer, got True"),
        ({"page_size": torch.tensor(4)}, r"page_size: expected an integer, got tensor\(4\)"),
        ({"page_size": np.array(4)}, r"page_size: expected an integer, got array\(4\)"),
        ({"max_rows": None}, r"max_rows: expected an integer, got None"),
        ({"pad_page": "0"}, r"pad_page: expected an integer, got '0'"),
        ({"pad_slot": 0.5}, r"pad_slot: expected an integer, got 0.5"),
        ({"pad_token": None}, r"pad_token: expected an integer, got None"),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _batch(**changes)


def test_sizes_become_ints() -> None:
    sizes = ("max_rows", "max_slots", "max_tokens", "max_pages", "page_size", "max_seq_len")
    batch = _batch(**{name: np.int64(4) for name in sizes})
    assert {type(getattr(batch, name)) for name in sizes} == {int}


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({"block_table": torch.zeros(3, 4).int()}, r"shape \[3, 3\], got \[3, 4\]"),
        ({"block_table": torch.zeros(9).int()}, r"shape \[3, 3\], got \[9\]"),
        ({"kv_indices": torch.zeros(3, 3).int()}, r"shape \[9\], got \[3, 3\]"),
        ({"seq_lens": torch.zeros(3).long()}, "dtype torch.int32, got torch.int64"),
        ({"tokens": torch.zeros(4, 15, device="meta").long()}, "device cpu, got meta"),
        ({"seq_lens": torch.zeros(6).int()[::2]}, r"contiguous rows, got strides \(2,\)"),
        ({"page_table": torch.zeros(3, 4).int().T}, r"contiguous rows, got strides \(1, 4\)"),
        ({"seq_lens": [0, 0, 0]}, "a tensor, got list"),
        ({"seq_lens": None}, "a tensor, got NoneType"),
        ({"foo": torch.zeros(3)}, "the name of a buffer that the batch has"),
        ({"max_rows": torch.zeros(3)}, "the name of a buffer that the batch has"),
        ({"stage": torch.zeros(3)}, "the name of a buffer that the batch has"),
    ],
)
def test_replace_buffers_takes_all_or_none(buffers: dict[str, Any], message: str) -> None:
    batch = _batch()
    view = batch.first_rows(2)
    before = _buffers(batch), _buffers(view)
    (name,) = buffers
    with pytest.raises(ValueError, match=f"^{name}: expected {message}$"):
        batch.replace_buffers(cached_lens=torch.zeros(3).int(), **buffers)
    for buffer, old in zip((_buffers(batch), _buffers(view)), before, strict=True):
        assert buffer.keys() == old.keys()
        assert all(buffer[key] is old[key] for key in old)


def test_a_drafter_keeps_what_is_its_targets() -> None:
    batch = _batch()
    drafter = _batch(ledger=batch, eagle=True)
    for name in ("tokens", "known_lens", "num_drafts", "row_to_slot", "num_rows", "query_lens"):
        buffer = getattr(batch, name).clone()
        message = f"^{name}: expected a buffer of the batch's own, got its target's$"
        with pytest.raises(ValueError, match=message):
            drafter.replace_buffers(**{name: buffer})
        assert getattr(drafter, name) is getattr(batch, name)
    query_lens = torch.zeros(3).int()
    _batch(ledger=batch).replace_buffers(query_lens=query_lens)  # a draft model has its own


def test_a_list_that_was_left_out_is_written_in_a_buffer_given_later() -> None:
    batch = _batch(with_kv_indices=False, with_block_table=False)
    with pytest.raises(ValueError, match=r"^block_table: expected shape \[3, 3\], got \[9\]$"):
        batch.replace_buffers(block_table=torch.zeros(9).int())
    with pytest.raises(ValueError, match=r"^kv_indices: expected dtype torch.int32, got torch.in"):
        batch.replace_buffers(kv_indices=torch.zeros(9).long())
    assert batch.kv_indices is batch.block_table is None
    batch.replace_buffers(kv_indices=torch.zeros(9).int(), block_table=torch.zeros(3, 3).int())
    batch.assign(1, [5, 6, 7, 8, 9], [2, 3])
    batch.set_rows([1], [5])
    batch.stage()
    assert batch.kv_indices.tolist() == [2, 3, *[0] * 7]
    assert batch.block_table[0].tolist() == [2, 3, 0]


def test_replaced_buffers_are_written() -> None:
    batch = _batch()
    wide, longer = torch.zeros(3, 8).int(), torch.zeros(20).int()
    batch.replace_buffers(block_table=wide[:, 2:5], kv_indices=longer)
    batch.assign(1, [5, 6, 7, 8, 9], [2, 3])
    batch.set_rows([1], [5])
    batch.stage()
    assert wide[0].tolist() == [0, 0, 2, 3, 0, 0, 0, 0]
    assert longer[:3].tolist() == [2, 3, 0]
