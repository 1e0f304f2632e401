"""On a GPU only: many replays, two streams, many blocks, and no wait of the host."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import specmeta
from bench.__main__ import OPERATIONS as BENCHES
from bench.common import Work, takes_workspace
from bench.gpu_check.drive import OPERATIONS, make_call
from specmeta import BatchMetadata, reference, testing
from specmeta.graph import capture
from specmeta.testing import Guarded

pytestmark = pytest.mark.parametrize("device", ["cuda"])

REPLAYS, EVERY = 10_000, 500  # everything is compared on the host each EVERY replays
VARIANTS = 4  # of the inputs
MOST_ROWS = 20_000


@contextlib.contextmanager
def waits_forbidden(device: str) -> Iterator[None]:
    """Raise where the host waits for the device."""
    if device == "cpu":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it's a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def split(call: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in call.items() if name not in tensors}


class Replayed:
    """A captured call whose tensors are other calls' before each replay.

    On the device all bytes, those around the tensors too, are compared after each replay.
    """

    def __init__(self, operation: str, rows: int, device: str, *, with_workspace: bool) -> None:
        calls = [make_call(operation, rows, 16, seed=seed) for seed in range(VARIANTS)]
        values = split(calls[0])[1]
        self._tensors = Guarded(split(calls[0])[0], device)
        self._before = [Guarded(split(call)[0], device)._buffers for call in calls]
        self._expected = []
        for call in calls:
            expected = Guarded(split(call)[0])
            getattr(reference, operation)(**values, **expected.tensors)
            self._expected.append(expected)
        self._after = [
            {dtype: buffer.to(device) for dtype, buffer in expected._buffers.items()}
            for expected in self._expected
        ]
        scratch = {}
        if with_workspace and takes_workspace(operation):
            steps = values.get("num_steps", 1)
            scratch["workspace"] = specmeta.workspace(rows, num_steps=steps, device=device)
        self.call = functools.partial(
            getattr(specmeta, operation), **values, **self._tensors.tensors, **scratch
        )
        self.run: Callable[[], None] = capture(
            self.call, num_rows=self._tensors.tensors["num_rows"]
        ).replay
        self.wrong = torch.zeros(1, dtype=torch.int64, device=device)

    def replay(self, index: int) -> None:
        variant = index % VARIANTS
        for dtype, buffer in self._tensors._buffers.items():
            buffer.copy_(self._before[variant][dtype])
        self.run()
        for dtype, buffer in self._tensors._buffers.items():
            self.wrong.add_((buffer != self._after[variant][dtype]).sum())

    def check(self, index: int) -> None:
        """Compare what the last replay left, and what the device has found."""
        self._tensors.assert_equal(self._expected[index % VARIANTS])
        assert self.wrong.item() == 0, f"elements that differed, by replay {index}"


@pytest.mark.parametrize(("rows", "with_workspace"), [(5, False), (1_300, True)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_replays(operation: str, rows: int, with_workspace: bool, device: str) -> None:
    call = Replayed(operation, rows, device, with_workspace=with_workspace)
    for start in range(0, REPLAYS, EVERY):
        with waits_forbidden(device):
            for index in range(start, start + EVERY):
                call.replay(index)
        call.check(start + EVERY - 1)


@pytest.mark.parametrize(
    "pair",
    [
        ("advance", "stage"),
        ("draft_step", "draft_step"),
        ("accept_greedy", "accept_sampled"),
        ("locate_sampled", "map_slots"),
        ("draft_lists", "draft_lists"),
    ],
    ids=" and ".join,
)
def test_two_streams(pair: tuple[str, str], device: str) -> None:
    """Graphs of many blocks that run at the same time, each with a workspace of its own."""
    calls = [Replayed(operation, 2_100, device, with_workspace=True) for operation in pair]
    streams: list[contextlib.AbstractContextManager[Any]] = [contextlib.nullcontext()] * 2
    if device == "cuda":
        torch.cuda.synchronize()
        streams = [torch.cuda.stream(torch.cuda.Stream()) for _ in pair]
    replays = REPLAYS // 5
    with waits_forbidden(device):
        for index in range(replays):
            for call, stream in zip(calls, streams, strict=True):
                with stream:
                    call.replay(index)
    if device == "cuda":
        torch.cuda.synchronize()
    for call in calls:
        call.check(replays - 1)


@pytest.fixture(scope="module")
def shared() -> dict[int, Tensor]:
    """One workspace for launches of any operation and size, one after the other, by steps."""
    return {}


@pytest.mark.parametrize("rows", [1, 2, 31, 1_023, 1_024, 1_025, 4_097, MOST_ROWS])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows(operation: str, rows: int, device: str, shared: dict[int, Tensor]) -> None:
    call = make_call(operation, rows, 1 if rows % 2 else 48, seed=rows)
    steps = call.get("num_steps", 1)
    if steps not in shared:
        shared[steps] = specmeta.workspace(MOST_ROWS, num_steps=steps, device=device)
    scratch = {"workspace": shared[steps]} if takes_workspace(operation) else {}
    tensors, values = split(call)
    expected = Guarded(tensors)
    getattr(reference, operation)(**values, **expected.tensors)
    for more in ({}, scratch, scratch):
        got = Guarded(tensors, device)
        getattr(specmeta, operation)(**values, **got.tensors, **more)
        got.assert_equal(expected)


@pytest.mark.parametrize(
    "work",
    [
        Work("one row of half of the pages", 16, 5, 30_000, 40_000, 1, first=600_000),
        Work("many rows", 3_000, 5, 300, 400, 1),
    ],
    ids=lambda work: work.name,
)
@pytest.mark.parametrize("operation", ["advance", "stage", "draft_step"])
def test_a_million_pages(operation: str, work: Work, device: str) -> None:
    """What the CPU's operator does, with and without a workspace."""
    bench = BENCHES[operation]
    case = bench.make_case(work, torch.device("cpu"))
    expected = case.fresh()
    bench.ours(expected)()
    assert expected["kv_indptr"][-1] > 950_000
    for with_workspace in (False, True):
        tensors, values = split(case.fresh())
        got = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        workspace = specmeta.workspace(work.rows, device=device) if with_workspace else None
        getattr(specmeta, operation)(**got, **values, workspace=workspace)
        for name in (*case.state, *case.outputs, *case.ledger):
            testing.assert_equal(name, got[name], expected[name])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_call_waits(operation: str, device: str) -> None:
    call = Replayed(operation, 40, device, with_workspace=True)
    with waits_forbidden(device):
        for _ in range(100):
            call.call()
            call.run()


def test_a_serving_step(device: str) -> None:
    """A step of six launches, replayed beside an eager one on the CPU; requests come and go."""
    rows, slots, drafts = 5, 8, 3
    batches = [
        BatchMetadata(
            max_rows=rows,
            max_slots=slots,
            max_tokens=rows * (drafts + 1),
            max_pages=40,
            page_size=4,
            max_seq_len=160,
            max_draft_len=drafts,
            device=place,
        )
        for place in (device, "cpu")
    ]
    wrong = [torch.zeros(1, dtype=torch.int64, device=batch.device) for batch in batches]

    def step(batch: BatchMetadata, wrong: Tensor) -> None:
        batch.stage()
        batch.accept_greedy((3 * batch.input_ids + 1) % 97)
        ids = batch.next_tokens
        for k in range(drafts):
            ids = (3 * ids + 1) % 97
            # Some drafts are wrong, others in each step.
            batch.draft_step(
                torch.where((ids + k) % 5 == wrong, 98, ids), index=k, last=k == drafts - 1
            )

    runs = [
        capture(functools.partial(step, batches[0], wrong[0]), num_rows=batches[0].num_rows).replay,
        functools.partial(step, batches[1], wrong[1]),
    ]
    for index in range(REPLAYS):
        for batch, draft, run in zip(batches, wrong, runs, strict=True):
            if index % 4 == 0:  # a slot's text is over long before it's full
                slot = index // 4 % slots
                batch.assign(
                    slot, [index % 97, slot], pages=list(range(40 * slot + 1, 40 * slot + 41))
                )
                carried = [(slot + i) % slots for i in range(1 + index // 4 % rows)]
                batch.set_rows(carried, [1 + (index + i) % (drafts + 1) for i in carried])
            draft.fill_(index % 6)
            run()
        if (index + 1) % EVERY == 0:
            for name, tensor in vars(batches[1]).items():
                if isinstance(tensor, Tensor) and name != "workspace":
                    testing.assert_equal(name, getattr(batches[0], name), tensor)
            assert not batches[1].status.any()
            assert batches[1].known_lens.max() > 6
