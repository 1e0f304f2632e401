"""Seeing calls: whoever makes them, in order, and at no cost where nobody looks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import specmeta
from specmeta import observe
from specmeta.graph import capture
from specmeta.observe import Call


class Seen(observe.Observer):
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.told: list[tuple[Any, ...]] = []

    def called(self, call: Call) -> None:
        self.calls.append(call)

    def assigned(self, table: int, slot: int) -> None:
        self.told.append(("assigned", slot))

    def pages_added(self, table: int, slot: int, pages: list[int]) -> None:
        self.told.append(("added", slot, pages))

    def pages_given_back(self, table: int, pages: list[int]) -> None:
        self.told.append(("given back", pages))


@contextmanager
def seen() -> Iterator[Seen]:
    observer = Seen()
    observe.add(observer)
    try:
        yield observer
    finally:
        observe.remove(observer)


def lens(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def kernel() -> str:
    return torch._C._dispatch_dump("specmeta::advance")


def test_before_and_after(device: str) -> None:
    seq_lens, count, cached = (
        lens(33, device=device),
        lens(2, device=device),
        lens(0, device=device),
    )
    with seen() as observer:
        specmeta.advance(
            count, seq_lens, page_size=32, num_rows=1, cached_lens=cached,
            workspace=specmeta.workspace(1, device=device),
        )  # fmt: skip
    (call,) = observer.calls
    assert call.operator == "advance"
    assert {name: value.tolist() for name, value in call.before.items()} == {
        "seq_lens": [33],
        "num_accepted": [2],
        "cached_lens": [0],
    }
    assert {name: value.tolist() for name, value in call.after.items()} == {
        "seq_lens": [35],
        "cached_lens": [34],
    }
    assert call.values["page_size"] == 32
    assert call.values["num_rows"] == 1
    assert all(tensor.device.type == "cpu" for tensor in (call.before | call.after).values())
    assert len(set(call.addresses.values())) == 3


def test_calls_of_torch_and_of_a_compiled_function_and_of_a_trace() -> None:
    seq_lens, count, live = lens(33), lens(2), lens(1)

    def step() -> None:
        specmeta.advance(count, seq_lens, page_size=32, num_rows=live)

    trace = capture(step, num_rows=live)
    compiled = torch.compile(step, fullgraph=True)
    compiled()
    seq_lens.fill_(33)
    with seen() as observer:
        torch.ops.specmeta.advance(seq_lens, 32, num_accepted=count)
        with torch.inference_mode():
            compiled()
        compiled()
        trace.replay()
    assert [int(call.after["seq_lens"]) for call in observer.calls] == [35, 37, 39, 41]
    assert len({call.addresses["seq_lens"] for call in observer.calls}) == 1
    trace.replay()
    assert len(observer.calls) == 4


def test_nothing_stays_behind() -> None:
    before = kernel()
    with seen(), seen():
        specmeta.advance(lens(2), lens(33), page_size=32)
        assert kernel() != before
    assert kernel() == before
    assert not observe.active()


def test_a_wrong_call_still_raises_and_is_not_shown() -> None:
    with seen() as observer, pytest.raises(RuntimeError, match="page_size"):
        specmeta.advance(lens(2), lens(33), page_size=0)
    assert observer.calls == []


@pytest.mark.parametrize("error", [ValueError("a fault of its own"), SystemExit(3)], ids=repr)
def test_an_observer_that_fails_is_left_out(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(observe.Observer):
        def called(self, call: Call) -> None:
            raise error

    failing = Failing()
    observe.add(failing)
    with seen() as observer:
        for _ in range(2):
            specmeta.advance(lens(2), lens(33), page_size=32)
    observe.remove(failing)
    assert len(observer.calls) == 2
    assert caplog.text.count("an observer failed") == 1


def test_a_call_that_cannot_be_read_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Call:
        raise RuntimeError("CUDA error")

    with seen() as observer:
        with monkeypatch.context() as patch:
            patch.setattr(observe._Copies, "finish", lambda copies: fail)
            specmeta.advance(lens(2), lens(33), page_size=32)
        specmeta.advance(lens(2), lens(33), page_size=32)
    assert len(observer.calls) == 1
    assert caplog.text.count("a call can't be read") == 1


def test_an_observer_may_call_operators_and_remove_itself() -> None:
    class Once(Seen):
        def called(self, call: Call) -> None:
            super().called(call)
            specmeta.advance(lens(2), lens(33), page_size=32)
            observe.remove(self)

    once = Once()
    observe.add(once)
    with seen() as observer:
        for _ in range(3):
            specmeta.advance(lens(2), lens(33), page_size=32)
    assert (len(once.calls), len(observer.calls)) == (1, 3)


def test_gaps_between_rows() -> None:
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    with seen() as observer:
        specmeta.advance(None, lens(3, 3), page_size=4, page_table=table[:, 1:4])
    (call,) = observer.calls
    assert call.gaps == {"page_table": 7}
    assert call.before["page_table"].tolist() == table[:, 1:4].tolist()


def test_freed_memory_is_not_taken_for_the_same() -> None:
    addresses = []
    with seen() as observer:
        for _ in range(3000):
            specmeta.advance(lens(2), lens(33), page_size=32)
        kept = torch.zeros(4, dtype=torch.int32)
        for part in (kept[:1], kept[1:2], kept[:1]):
            specmeta.advance(None, part, page_size=32)
    addresses = [call.addresses["seq_lens"] for call in observer.calls]
    assert len(set(addresses[:3000])) == 3000
    assert addresses[-1] == addresses[-3] == addresses[-2] - 4


def test_what_the_host_does_is_told_in_order() -> None:
    batch = specmeta.BatchMetadata(
        max_rows=1, max_slots=2, max_tokens=4, max_pages=3, page_size=4, max_seq_len=12,
        max_draft_len=0,
    )  # fmt: skip
    with seen() as observer:
        batch.assign(0, [5], pages=[1, 2])
        batch.assign(1, [5], pages=[2])
        batch.add_pages(0, [3])
        batch.drop_pages(0, keep=1)
        batch.release(0)
        batch.assign(1, [6], pages=[2])
    assert observer.told == [
        ("assigned", 0),
        ("added", 0, [1, 2]),
        ("assigned", 1),
        ("added", 1, [2]),
        ("added", 0, [3]),
        ("given back", [3]),  # slot 1 holds page 2, too
        ("given back", [1]),
        ("given back", [2]),
        ("assigned", 1),
        ("added", 1, [2]),
    ]


@pytest.mark.parametrize("device", ["cuda"])
def test_a_captured_cuda_graph(device: str) -> None:
    seq_lens, count, live = (lens(n, device=device) for n in (33, 2, 1))

    def step() -> None:
        specmeta.advance(count, seq_lens, page_size=32, num_rows=live)

    with seen() as observer:
        graph = capture(step, num_rows=live)
        observer.calls.clear()
        for _ in range(3):
            graph.replay()
    assert [int(call.after["seq_lens"]) for call in observer.calls] == [35, 37, 39]


def test_a_capture_waits_for_the_observers() -> None:
    """Their thread waits for the GPU, which would break the capture."""
    with seen() as observer:
        show = observer.called

        def slowly(call: Call) -> None:
            time.sleep(0.2)
            show(call)

        observer.called = slowly  # type: ignore[method-assign]
        specmeta.advance(None, lens(3), page_size=4)
        with observe.captured():
            assert len(observer.calls) == 1


def run(program: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    run("""
import os, time, torch, specmeta
from specmeta import observe
class Count(observe.Observer):
    calls = 0
    def called(self, call):
        time.sleep(0.2)  # the first call waits while the process forks
        self.calls += 1
count = Count(); observe.add(count)
run = lambda: specmeta.advance(None, torch.tensor([3]), page_size=4)
run()
child = os.fork()
run()
observe.remove(count)
assert count.calls == 2, count.calls
if child: assert os.waitpid(child, 0)[1] == 0
""")


def test_there_is_no_thread_before_there_is_a_call() -> None:
    run("""
import threading, torch, specmeta
with specmeta.check(): pass
assert threading.active_count() == 1
""")
