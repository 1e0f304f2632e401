"""Capture and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize("device", ["cuda"])
def test_graphs_share_the_memory_of_a_pool(device: str) -> None:
    live = torch.ones(1, dtype=torch.int32, device=device)
    total = torch.zeros(2**20, dtype=torch.int64, device=device)
    pool = torch.cuda.graph_pool_handle()

    def double_plus_one() -> None:
        total.add_((total + 1) * live)

    first = capture(double_plus_one, num_rows=live, pool=pool)
    reserved = torch.cuda.memory_reserved()
    second = capture(double_plus_one, num_rows=live, pool=pool)
    assert torch.cuda.memory_reserved() == reserved
    total.zero_()
    first.replay(), second.replay()
    assert (total == 3).all()


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


def _small_batch(device: str) -> BatchMetadata:
    return BatchMetadata(
        max_rows=2,
        max_slots=2,
        max_tokens=6,
        max_pages=2,
        page_size=4,
        max_seq_len=8,
        max_draft_len=1,
        device=device,
    )


def test_constants_stay(device: str) -> None:
    live = torch.ones(1, dtype=torch.int32, device=device)
    total = torch.zeros(2, device=device)
    captured = capture(lambda: total.copy_(torch.arange(2, device=device) + 5), num_rows=live)
    total.zero_()
    captured.replay()
    assert total.tolist() == [5, 6]


def test_operations_in_a_capture(device: str) -> None:
    batch = _small_batch(device)
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


@pytest.mark.parametrize("num_rows", [1, None, [1], np.ones(1, dtype=np.int32)])
def test_num_rows_is_a_tensor(num_rows: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^num_rows: expected an int32 tensor of one element, got"
    ):
        capture(lambda: None, num_rows=num_rows)


def test_what_cannot_be_called() -> None:
    with pytest.raises(ValueError, match=r"^step: expected a function, got None$"):
        capture(None, num_rows=torch.ones(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("num_rows", "got"),
    [
        (torch.ones(1, dtype=torch.int64), r"torch.int64 of shape \[1\]"),
        (torch.ones(2, dtype=torch.int32), r"torch.int32 of shape \[2\]"),
        (torch.ones((), dtype=torch.int32), r"torch.int32 of shape \[\]"),
    ],
)
def test_num_rows_is_one_int32(num_rows: torch.Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^num_rows: expected .*, got {got}$"):
        capture(lambda: None, num_rows=num_rows)


HOST_METHODS: dict[str, Callable[[BatchMetadata], object]] = {
    "assign": lambda batch: batch.assign(0, [5, 6], [2]),
    "add_pages": lambda batch: batch.add_pages(1, [2]),
    "drop_pages": lambda batch: batch.drop_pages(1, 0),
    "release": lambda batch: batch.release(1),
    "set_rows": lambda batch: batch.set_rows([-1], [1]),
    "set_query_lens": lambda batch: batch.set_query_lens([1]),
    "replace_buffers": lambda batch: batch.replace_buffers(seq_lens=batch.seq_lens.clone()),
    "first_rows": lambda batch: batch.first_rows(1),
}
DEVICE_METHODS = {"stage", "accept_greedy", "accept_sampled", "draft_step", "advance"}


def test_each_method_is_the_hosts_or_the_devices() -> None:
    methods = {n for n, m in vars(BatchMetadata).items() if callable(m) and not n.startswith("_")}
    assert methods == HOST_METHODS.keys() | DEVICE_METHODS


def test_a_capture_has_no_place_in_another(device: str) -> None:
    batch = _small_batch(device)

    def step() -> None:
        capture(batch.stage, num_rows=batch.num_rows)

    message = "^capture: expected a call between replays, got one inside a captured step$"
    with pytest.raises(CaptureError, match=message):
        capture(step, num_rows=batch.num_rows)
    step()


@pytest.mark.parametrize("name", HOST_METHODS)
@pytest.mark.parametrize(("by_hand", "device"), [(False, "cpu"), (False, "cuda"), (True, "cuda")])
def test_host_methods_have_no_place_in_a_capture(name: str, by_hand: bool, device: str) -> None:
    batch = _small_batch(device)
    batch.assign(1, [7, 8], [1])
    batch.set_rows([1], [2])
    before = {k: v.clone() for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    addresses = {k: getattr(batch, k).data_ptr() for k in before}

    def step() -> None:
        batch.stage()
        HOST_METHODS[name](batch)

    def capture_it() -> None:
        if by_hand:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                step()
        else:
            capture(step, num_rows=batch.num_rows)

    message = f"^{name}: expected a call between replays, got one inside a captured step$"
    with pytest.raises(CaptureError, match=message):
        capture_it()
    for key in ("page_table", "num_pages", "tokens", "known_lens", "row_to_slot", "query_lens"):
        assert torch.equal(getattr(batch, key), before[key]), key
    assert {k: getattr(batch, k).data_ptr() for k in before} == addresses
    HOST_METHODS[name](batch)  # and behind it, it works


def test_views_made_before_are_found_in_a_capture(device: str) -> None:
    batch = _small_batch(device)
    view = batch.first_rows(1)
    seen = []
    capture(lambda: seen.append(batch.first_rows(1)), num_rows=batch.num_rows)
    assert all(found is view for found in seen)
