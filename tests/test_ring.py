"""The rings of host buffers: none is touched while a queued copy still needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specmeta import BatchMetadata
from specmeta.serving.ring import DownloadRing, Event, UploadRing

CPU = torch.device("cpu")


class Stream:
    """A device that does nothing until somebody waits."""

    def __init__(self) -> None:
        self.queue: list[Any] = []  # copies, and the events recorded between them
        self.waits = 0

    def run_to(self, event: LateEvent) -> None:
        """Do what is queued up to where `event` was recorded last."""
        while any(entry is event for entry in self.queue):
            entry = self.queue.pop(0)
            if not isinstance(entry, LateEvent):
                entry()

    def run(self) -> None:
        for entry in self.queue:
            if not isinstance(entry, LateEvent):
                entry()
        self.queue.clear()


class LateEvent(Event):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.stream.queue = [entry for entry in self.stream.queue if entry is not self]
        self.stream.queue.append(self)

    def query(self) -> bool:
        return all(entry is not self for entry in self.stream.queue)

    def synchronize(self) -> None:
        self.stream.waits += 1
        self.stream.run_to(self)


class LateTensor(torch.Tensor):
    """A tensor of such a device: what is copied out of a buffer is what stands there then."""

    stream: Stream

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> LateTensor:
        assert non_blocking
        self.stream.queue.append(lambda: torch.Tensor.copy_(self, source))
        return self


def late_zeros(stream: Stream, *shape: int) -> LateTensor:
    tensor = torch.zeros(shape, dtype=torch.int32).as_subclass(LateTensor)
    tensor.stream = stream
    return tensor


def test_a_queued_copy_reads_what_was_sent() -> None:
    stream = Stream()
    ring = UploadRing(3, 32, device=CPU, make_event=lambda: LateEvent(stream))
    tensors = [late_zeros(stream, 1 + i % 5) for i in range(40)]
    for i, tensor in enumerate(tensors):
        ring.send([i] * len(tensor), tensor)
    assert stream.waits > 5
    stream.run()
    for i, tensor in enumerate(tensors):
        assert tensor.tolist() == [i] * len(tensor)


def test_it_waits_only_for_a_buffer_that_is_needed() -> None:
    stream = Stream()
    ring = UploadRing(3, 32, device=CPU, make_event=lambda: LateEvent(stream))
    for _ in range(3 * 4):  # copies of 8 bytes
        ring.send([1, 2], late_zeros(stream, 2))
    assert stream.waits == 0
    ring.send([1, 2], late_zeros(stream, 2))
    assert stream.waits == 1
    stream.run()
    for _ in range(3 * 4 - 1):
        ring.send([1, 2], late_zeros(stream, 2))
    assert stream.waits == 1
    with pytest.raises(ValueError, match="expected at most 32 bytes a copy, got 36"):
        ring.send([0] * 9, late_zeros(stream, 9))
    with pytest.raises(ValueError, match=r"^values: expected 2, got 1$"):
        ring.send([1], late_zeros(stream, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_types_share_a_buffer(dtype: torch.dtype, device: str) -> None:
    ring = UploadRing(2, 64, device=torch.device(device))
    other = torch.zeros(1, dtype=torch.int32, device=device)
    for values in ([1, 2, 3], [], [2**20], [7] * 8):
        to = torch.zeros(len(values), dtype=dtype, device=device)
        ring.send([5], other)
        ring.send(values, to)
        assert to.tolist() == values
        assert other.tolist() == [5]


def test_a_batch_sends_through_its_ring() -> None:
    stream = Stream()
    batch = BatchMetadata(
        max_rows=2,
        max_slots=2,
        max_tokens=4,
        max_pages=2,
        page_size=4,
        max_seq_len=8,
        max_draft_len=1,
    )
    batch._uploads = UploadRing(2, 64, device=CPU, make_event=lambda: LateEvent(stream))
    batch.row_to_slot = late_zeros(stream, 2)
    batch.query_lens = late_zeros(stream, 2)
    seen = []
    for i in range(9):
        batch.set_rows([i % 2], [i])
        stream.queue.append(lambda: seen.append(batch.query_lens.tolist()))
    assert stream.waits > 0
    stream.run()
    assert seen == [[i, 0] for i in range(9)]


def test_an_unread_buffer_is_not_filled_again() -> None:
    ring = DownloadRing(2, 16, device=CPU)
    source = torch.tensor([1, 2])
    first = ring.fetch(source)
    second = ring.fetch(source.add_(10))
    with pytest.raises(RuntimeError, match="all 2 buffers of the ring are unread"):
        ring.fetch(source.add_(10))
    assert first.is_ready
    assert first.read().tolist() == [1, 2]
    third = ring.fetch(source)
    assert second.read().tolist() == [11, 12]
    assert third.read().tolist() == [21, 22]
    with pytest.raises(RuntimeError, match="read already"):
        first.read()
    with pytest.raises(ValueError, match="expected at most 16 bytes a copy, got 24"):
        ring.fetch(torch.zeros(3, dtype=torch.int64))


def test_what_was_read_stays() -> None:
    ring = DownloadRing(1, 16, device=CPU)
    values = ring.fetch(torch.tensor([1, 2])).read()
    ring.fetch(torch.tensor([3, 4]))
    assert values.tolist() == [1, 2]


def test_a_download_is_read_once_its_event_has_passed() -> None:
    stream = Stream()
    ring = DownloadRing(2, 16, device=CPU, make_event=lambda: LateEvent(stream))
    fetched = ring.fetch(torch.tensor([1, 2]))
    view = fetched._view
    assert view is not None
    arrived = view.clone()
    view.fill_(-1)  # it hasn't come yet
    stream.queue.insert(0, lambda: view.copy_(arrived))
    assert not fetched.is_ready
    assert fetched.read().tolist() == [1, 2]
    assert stream.waits == 1
    assert fetched.is_ready


def test_downloads_keep_shape_and_type(device: str) -> None:
    ring = DownloadRing(3, 64, device=torch.device(device))
    source = torch.arange(12, device=device).view(3, 4)
    for rows in (1, 3, 2, 3):
        fetched = ring.fetch(source[:rows, :2])
        source += 1
        values = fetched.read()
        assert torch.equal(values, (source[:rows, :2] - 1).cpu())
        assert values.dtype == torch.int64
