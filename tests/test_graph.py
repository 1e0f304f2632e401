"""Capture and replay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specmeta import BatchMetadata
from specmeta.graph import CaptureError, capture


def test_replay_updates_the_tensors_in_place(device: str) -> None:
    live = torch.ones(1, dtype=torch.int32, device=device)
    state, table = torch.zeros(8, device=device), torch.zeros(4, 2, device=device)
    half = state[2:6]  # shares memory with state
    linear = torch.nn.Linear(8, 8, device=device)

    def step() -> None:
        state.view(2, 4)[0].add_(1)
        half.mul_(2)
        table.index_copy_(0, live.long(), linear(state[None])[:, :2])

    with torch.no_grad():
        for _ in range(3):
            step()
    expected = state.clone(), table.clone()
    state.zero_(), table.zero_()
    captured = capture(step, num_rows=live)
    if device == "cpu":
        assert not state.any(), "tracing updated a tensor"
        assert not table.any(), "tracing updated a tensor"
    state.zero_(), table.zero_()
    addresses = state.data_ptr(), table.data_ptr()
    for _ in range(3):
        captured.replay()
    assert torch.equal(state, expected[0])
    assert torch.equal(table, expected[1])
    assert (state.data_ptr(), table.data_ptr()) == addresses
    assert live.tolist() == [1]


def test_replays_read_new_values(device: str) -> None:
    live = torch.ones(1, dtype=torch.int32, device=device)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    captured = capture(lambda: total.add_(live), num_rows=live)
    total.zero_()
    for value in (3, 5):
        live.fill_(value)
        captured.replay()
    assert total.tolist() == [8]


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "index": lambda x: x[: x[0].long()],
    "tolist": lambda x: x.tolist(),
    "tolist of a result": lambda x: (x + 1).tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "print": lambda x: str(x),
    "format": lambda x: f"{x}",
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_host_read_fails_the_capture(read: Callable[[torch.Tensor], object]) -> None:
    state, live = torch.ones(4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)

    def step() -> None:
        state.add_(1)
        read(state)

    with pytest.raises(CaptureError, match="the step reads a value back to the host: "):
        capture(step, num_rows=live)
    assert state.tolist() == [1, 1, 1, 1]
    assert live.tolist() == [1]


def test_one_element_is_read_too() -> None:
    # Tracers tend to take tensors of one element for constants.
    live = torch.ones(1, dtype=torch.int32)
    with pytest.raises(CaptureError, match="host"):
        capture(lambda: live.add_(live.item()), num_rows=live)


def test_other_tensors_each_time() -> None:
    tensors = [torch.zeros(1), torch.zeros(1)]
    with pytest.raises(CaptureError, match="same tensors"):
        capture(lambda: tensors.pop().add_(1), num_rows=torch.zeros(1, dtype=torch.int32))


def test_constants_stay(device: str) -> None:
    live = torch.ones(1, dtype=torch.int32, device=device)
    total = torch.zeros(2, device=device)
    captured = capture(lambda: total.copy_(torch.arange(2, device=device) + 5), num_rows=live)
    total.zero_()
    captured.replay()
    assert total.tolist() == [5, 6]


def test_operations_in_a_capture(device: str) -> None:
    batch = BatchMetadata(
        max_rows=2,
        max_slots=2,
        max_tokens=6,
        max_pages=2,
        page_size=4,
        max_seq_len=8,
        max_draft_len=1,
        device=device,
    )
    batch.assign(1, [5, 6, 7], [2, 1])
    batch.set_rows([-1, 1], [4, 4])
    captured = capture(batch.stage, num_rows=batch.num_rows)
    captured.replay()
    assert batch.input_ids.tolist() == [5, 6, 7, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [8, 9, 10, -1, -1, -1]
    assert batch.num_rows.tolist() == [2]
    if device == "cpu":
        assert captured.trace is not None
        targets = [str(node.target) for node in captured.trace.graph.nodes]
        assert [t for t in targets if "specmeta" in t] == ["specmeta.stage.default"]


def _iterations(batch: BatchMetadata, *, captured: bool) -> list[dict[str, list[int]]]:
    """Run a counting model with two drafts, of which the second is wrong, and rewind at times."""
    device = batch.device
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    rewind = torch.zeros(4, dtype=torch.int32, device=device)

    def step() -> None:
        batch.stage()
        batch.accept_greedy(batch.input_ids + 1)
        drafts = batch.draft_input_ids[batch.token_indices] + 1
        batch.draft_step(drafts, index=0)
        batch.draft_step(drafts + 1 + wrong, index=1, last=True)
        batch.advance(rewind)

    run = capture(step, num_rows=batch.num_rows).replay if captured else step
    seen = []
    for i in range(8):
        batch.set_rows(
            [[2, 0], [0, -1, 2], [2, 3, 0]][i % 3], [[3, 2], [3, 3, 3], [2, 3, 1]][i % 3]
        )
        if i == 4:
            batch.assign(3, [50], [7])
        wrong.fill_(i % 2)
        rewind.fill_(-(i % 3 == 2))
        run()
        seen.append({k: v.tolist() for k, v in vars(batch).items() if isinstance(v, torch.Tensor)})
    return seen


def test_replays_follow_every_change(device: str) -> None:
    """Rows, slots, counts and drafts change between replays; every buffer is as in an eager run."""
    runs = []
    for captured in (False, True):
        batch = BatchMetadata(
            max_rows=3,
            max_slots=4,
            max_tokens=9,
            max_pages=3,
            page_size=4,
            max_seq_len=12,
            max_draft_len=2,
            device=device,
        )
        batch.assign(2, [10, 11, 12, 13], [1, 2, 3])
        batch.assign(0, [20], [4, 5, 6])
        runs.append(_iterations(batch, captured=captured))
    assert runs[0] == runs[1]
    assert runs[0][-1]["known_lens"][2] > 8


def test_sampled_tokens_in_a_capture(device: str) -> None:
    batch = BatchMetadata(
        max_rows=1,
        max_slots=1,
        max_tokens=2,
        max_pages=2,
        page_size=4,
        max_seq_len=8,
        max_draft_len=1,
        device=device,
    )
    batch.assign(0, [5], [1, 2])
    batch.set_rows([0], [2])
    sampled = torch.zeros(1, 2, dtype=torch.int64, device=device)

    def step() -> None:
        batch.stage()
        batch.accept_sampled(sampled, vocab_size=10)

    captured = capture(step, num_rows=batch.num_rows)
    for value in (6, -1, 7):  # the step in the middle is void
        sampled.copy_(torch.tensor([[value, -1]]))
        captured.replay()
    assert batch.tokens[0, :4].tolist() == [5, 6, 7, 0]


def test_a_step_keeps_no_tensor_of_its_own() -> None:
    live, out, made = torch.ones(1, dtype=torch.int32), torch.zeros(1), []

    def step() -> None:
        if not made:
            made.append(torch.zeros(1))
        out.add_(made[0])

    with pytest.raises(CaptureError, match=r"keeps a tensor that it made itself .*\[1\]"):
        capture(step, num_rows=live)


def test_a_step_that_raises_leaves_the_rows_alone(device: str) -> None:
    live = torch.ones(1, dtype=torch.int32, device=device)

    def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture(step, num_rows=live)
    assert live.tolist() == [1]
