"""Rings of host buffers, through which host and device exchange numbers without waiting.

A buffer that a queued copy still reads or writes must not be touched. Each one therefore has an
event, recorded behind its copies, and is filled again only once the event has passed. On the CPU
a copy is done when it returns, and the events have always passed; the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["DownloadRing", "Event", "Fetched", "UploadRing"]

_ALIGNMENT = 8  # bytes: no element is larger


class Event:
    """A point in the order of a device's work; on the CPU, where nothing is queued, always past."""

    def record(self) -> None:
        """Place the event behind all work that is queued now."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""
        return True

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""


class _CudaEvent(Event):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class _Buffer:
    def __init__(self, num_bytes: int, event: Event, *, pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.event = event
        self.used = 0  # bytes, of an upload
        self.unread = False  # a download that nobody has read

    def view(self, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[begin : begin + size].view(dtype).view(shape)


class _Ring:
    """Buffers that are used in turn.

    Parameters
    ----------
    count : int
        Number of buffers.
    num_bytes : int
        Size of each.
    device : torch.device
        The other end of the copies. All of them are queued on one stream, the current one.
    make_event : callable, optional
        Makes a buffer's event. Default: what the device needs.
    """

    def __init__(
        self,
        count: int,
        num_bytes: int,
        *,
        device: torch.device,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        pinned = device.type == "cuda"
        if make_event is None:
            make_event = (lambda: _CudaEvent(device)) if pinned else Event
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._num_bytes = size
        self._buffers = [_Buffer(size, make_event(), pinned=pinned) for _ in range(count)]
        self._index = 0

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._num_bytes:
            raise ValueError(f"expected at most {self._num_bytes} bytes a copy, got {num_bytes}")

    def _advance(self) -> _Buffer:
        """Go on to the next buffer, and wait where a copy still needs it."""
        index = (self._index + 1) % len(self._buffers)
        buffer = self._buffers[index]
        if buffer.unread:
            raise RuntimeError(f"all {len(self._buffers)} buffers of the ring are unread")
        if not buffer.event.query():
            buffer.event.synchronize()
        self._index = index
        return buffer


class UploadRing(_Ring):
    """Sends numbers to the device.

    Many small copies share a buffer: the host waits only where all buffers have been filled since
    the oldest one's copies were queued.

    Examples
    --------
    >>> ring, lens = UploadRing(2, 64, device=torch.device("cpu")), torch.zeros(3)
    >>> ring.send([4, 5], lens[1:])
    >>> lens
    tensor([0., 4., 5.])
    """

    def send(self, values: Sequence[int], to: Tensor) -> None:
        """Copy host integers into a tensor of the same length, in the order of the stream.

        Parameters
        ----------
        values : sequence of int
        to : Tensor
            Written once the work queued before is done.

        Raises
        ------
        ValueError
            It has another length, or they are more than a buffer holds; nothing is queued then.
        """
        if len(values) != len(to):  # a single one would be written everywhere
            raise ValueError(f"values: expected {len(to)}, got {len(values)}")
        size = len(values) * to.dtype.itemsize
        self._check_size(size)
        buffer = self._buffers[self._index]
        if buffer.used + size > self._num_bytes:
            buffer = self._advance()
            buffer.used = 0
        source = buffer.view(buffer.used, to.dtype, [len(values)])
        source.copy_(torch.tensor(values, dtype=to.dtype))
        to.copy_(source, non_blocking=True)
        buffer.event.record()
        buffer.used += -(-size // _ALIGNMENT) * _ALIGNMENT


class Fetched:
    """A tensor on its way to the host, in a buffer of a ring that is its own until it is read."""

    def __init__(self, buffer: _Buffer, view: Tensor) -> None:
        self._buffer = buffer
        self._view: Tensor | None = view

    @property
    def is_ready(self) -> bool:
        """Whether `read` returns, or would have returned, without waiting."""
        return self._view is None or self._buffer.event.query()

    def read(self) -> Tensor:
        """Wait until the tensor has come, return it on the host, and free the buffer.

        Raises
        ------
        RuntimeError
            It has been read already: the buffer may hold something else by now.
        """
        if self._view is None:
            raise RuntimeError("read already")
        if not self._buffer.event.query():
            self._buffer.event.synchronize()
        values = self._view.clone()
        self._view = None
        self._buffer.unread = False
        return values


class DownloadRing(_Ring):
    """Brings tensors from the device, each in a buffer of its own.

    Examples
    --------
    >>> ring, counts = DownloadRing(2, 64, device=torch.device("cpu")), torch.tensor([3, 4])
    >>> fetched = ring.fetch(counts)
    >>> _ = counts.zero_()  # queued behind the copy
    >>> fetched.read()
    tensor([3, 4])
    """

    def fetch(self, source: Tensor) -> Fetched:
        """Queue a copy of a tensor to the host.

        Parameters
        ----------
        source : Tensor
            Read once the work queued before is done.

        Raises
        ------
        RuntimeError
            Every buffer holds a tensor that hasn't been read.
        """
        self._check_size(source.numel() * source.dtype.itemsize)
        buffer = self._advance()
        view = buffer.view(0, source.dtype, source.shape)
        view.copy_(source, non_blocking=True)
        buffer.event.record()
        buffer.unread = True
        return Fetched(buffer, view)
