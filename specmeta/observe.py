"""See every call of an operator, as it found its tensors and as it left them.

While somebody observes, each operator's kernel stands behind one that copies the arguments before
and after the call; the copies go to a thread that shows them to the observers, in the order of the
calls. So a call is seen whoever makes it: Python, ``torch.ops``, a compiled model, a replayed
trace. While nobody does, the kernels stand alone, and a call costs what it always did.
The first observer that comes, and the last one that goes, change torch's table of kernels, which
has no lock against calls: let no other thread call an operator meanwhile, it could crash.

On a GPU the copies are asynchronous, and the thread waits for them, not the caller. What a captured
CUDA graph does is seen if it was captured while somebody observed: the copies are then part of the
graph. :func:`specmeta.graph.capture` sees to it; other captures stand in :func:`captured`.

What the host does to slots and pages is told by :class:`specmeta.BatchMetadata`; an engine that
keeps its own tables tells it with :func:`assigned`, :func:`pages_added` and
:func:`pages_given_back`.

Examples
--------
>>> import torch, specmeta
>>> from specmeta import observe
>>> class Lengths(observe.Observer):
...     def called(self, call):
...         self.seen = call.operator, call.before["seq_lens"], call.after["seq_lens"]
>>> lengths = Lengths()
>>> observe.add(lengths)
>>> specmeta.advance(torch.tensor([2]), torch.tensor([33]), page_size=32)
>>> observe.remove(lengths)
>>> lengths.seen
('advance', tensor([33]), tensor([35]))
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from specmeta import _library
from specmeta.testing import gap_of

__all__ = [
    "Call",
    "CapturedCalls",
    "Observer",
    "active",
    "add",
    "assigned",
    "captured",
    "pages_added",
    "pages_given_back",
    "remove",
]

# Calls that may wait for the observers before the caller does. Each holds a copy of all of its
# tensors, and those of many long requests are large.
_WAITING = 16

_log = logging.getLogger("specmeta")


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes
    ----------
    operator : str
    values : dict
        The Python numbers among the arguments, by name, as far as they were given.
    before : dict
        By name, a copy on the CPU of every tensor as the call found it, but for ``workspace``.
    after : dict
        The same for those that it may write, as it left them.
    addresses : dict
        By name, which memory the tensor is: a number that no other memory has ever had.
    gaps : dict
        By name, how many elements of other memory stood between the rows of a two-dimensional
        tensor. The copies have none.
    """

    operator: str
    values: dict[str, int | bool]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    addresses: dict[str, int]
    gaps: dict[str, int]


class Observer:
    """What an observer is told, in order, on a thread of its own. The base class ignores it.

    ``table`` is the address (as in :attr:`Call.addresses`) of the tensor that holds the page ids,
    ``page_table`` or ``alloc_pages``: pages of two tables have nothing to do with each other.

    Attributes
    ----------
    error : BaseException or None
        What it raised. It has not been shown anything since.
    """

    error: BaseException | None = None

    def called(self, call: Call) -> None:
        """See a call that is done."""

    def assigned(self, table: int, slot: int) -> None:
        """Note that a slot has a new request, and no pages yet."""

    def pages_added(self, table: int, slot: int, pages: list[int]) -> None:
        """Note that a slot has more pages."""

    def pages_given_back(self, table: int, pages: list[int]) -> None:
        """Note that nobody holds these pages any longer."""


class CapturedCalls:
    """The calls inside a captured CUDA graph."""

    def __init__(self) -> None:
        self._calls: list[_Copies] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._calls)

    def replayed(self) -> None:
        """Show what the replay that was just launched did, on the current stream."""
        if active():
            for copies in self._calls:
                _show(copies.fetch())


# Guards what follows; the tuple itself is replaced, never changed.
_lock = threading.RLock()
_observers: tuple[Observer, ...] = ()
_taps: Any = None
_thread: threading.Thread | None = None
_events: queue.Queue[Callable[[], None]] = queue.Queue(_WAITING)
_capturing: CapturedCalls | None = None


def add(observer: Observer) -> None:
    """Show an observer every call from now on.

    One that raises is not shown any more; its ``error`` says why, and is logged.
    """
    global _observers, _taps
    with _lock:
        if _taps is None:
            _taps = _tap()
        _observers = (*_observers, observer)


def remove(observer: Observer) -> None:
    """Wait until an observer has seen all calls made so far, and show it no more.

    An observer that removes one, on their own thread, does not wait.
    """
    global _taps
    try:
        _wait()
    finally:
        _drop(observer)
        with _lock:
            if not _observers and _taps is not None:
                _taps._destroy()
                _taps = None


def active() -> bool:
    """Return whether anybody observes."""
    return bool(_observers)


@contextmanager
def captured() -> Iterator[CapturedCalls]:
    """Keep the calls of a CUDA graph that is captured inside.

    Call :meth:`CapturedCalls.replayed` after each replay. They are none where nobody observes.
    Waits until the calls made before have been shown.
    """
    global _capturing
    _wait()  # a capture doesn't stand another thread that waits for the GPU
    calls = CapturedCalls()
    _capturing = calls
    try:
        yield calls
    finally:
        _capturing = None


def assigned(pages: Tensor, slot: int) -> None:
    """Report that a slot has a new request.

    Parameters
    ----------
    pages : Tensor
        The ``page_table`` or ``alloc_pages`` that the slot's pages stand in; only its address
        counts.
    slot : int
    """
    _tell(lambda observer, table: observer.assigned(table, slot), pages)


def pages_added(pages: Tensor, slot: int, ids: Sequence[int]) -> None:
    """Report that a slot has more pages; the parameters are those of :func:`assigned`."""
    _tell(lambda observer, table: observer.pages_added(table, slot, list(ids)), pages)


def pages_given_back(pages: Tensor, ids: Sequence[int]) -> None:
    """Report that nobody holds these pages any longer, from the next call on."""
    _tell(lambda observer, table: observer.pages_given_back(table, list(ids)), pages)


def _tell(tell: Callable[[Observer, int], None], pages: Tensor) -> None:
    if active():
        table = _address(pages)
        _put(lambda: _each(lambda observer: tell(observer, table)))


# By storage: a reference that does not keep it, and its number. Freed memory is used again, so an
# address alone would take one tensor for another.
_storages: dict[int, tuple[StorageWeakRef, int]] = {}
_numbers = itertools.count(1)


def _address(tensor: Tensor) -> int:
    reference = StorageWeakRef(tensor.untyped_storage())
    with _lock:
        known, number = _storages.get(reference.cdata, (reference, 0))
        if number == 0 or known.expired():
            number = next(_numbers)
            _storages[reference.cdata] = (reference, number)
            if number % 1024 == 0:
                for key in [key for key, (old, _) in _storages.items() if old.expired()]:
                    del _storages[key]
    return (number << 48) + int(tensor.storage_offset()) * tensor.element_size()


# --- The observers' thread.


def _put(event: Callable[[], None]) -> None:
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_work, name="specmeta observers", daemon=True)
            _thread.start()
    _events.put(event)


def _wait() -> None:
    """Wait until the thread has done all that was put so far, if there is one."""
    if _thread is not None and threading.current_thread() is not _thread:
        done = threading.Event()
        _put(done.set)
        done.wait()


def _start_anew() -> None:
    """Begin without a thread: a forked process has none, and its locks may be held for ever."""
    global _lock, _events, _thread
    _lock, _events, _thread = threading.RLock(), queue.Queue(_WAITING), None


# What waits is for the parent's thread.
os.register_at_fork(before=_wait, after_in_child=_start_anew)


def _work() -> None:
    while True:
        event = _events.get()
        try:
            event()
        except Exception:  # an error of the GPU: everybody waits for this thread, it must go on
            _log.exception("specmeta: a call can't be read and is not shown")


def _each(show: Callable[[Observer], None]) -> None:
    for observer in _observers:
        try:
            show(observer)
        except BaseException as error:  # sys.exit() too, which would end only this thread
            _log.exception("specmeta: an observer failed and is not shown any more")
            observer.error = error
            _drop(observer)


def _show(call: Callable[[], Call]) -> None:
    # Made into a Call on the thread: on a GPU that waits for the copies.
    _put(lambda: _show_now(call()))


def _show_now(call: Call) -> None:
    _each(lambda observer: observer.called(call))


def _drop(observer: Observer) -> None:
    global _observers
    with _lock:
        _observers = tuple(other for other in _observers if other is not observer)


# --- The kernels in front of the operators' own.


def _tap() -> Any:
    """Put a kernel that copies in front of each; they go when what is returned is destroyed."""
    taps = torch.library.Library("specmeta", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator, arguments in _library.schema().items():
            for key in ("CPU", "CUDA"):
                name = f"specmeta::{operator}"
                if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                    kernel = torch.library.get_kernel(name, key)
                    tapped = _tapped(operator, arguments, kernel)
                    taps.impl(operator, tapped, key, with_keyset=True)
    return taps


def _tapped(operator: str, arguments: list[_library.Argument], kernel: Any) -> Callable[..., None]:
    def call(keyset: Any, *args: Any) -> None:
        if threading.current_thread() is _thread:  # an observer's own call
            kernel.call_boxed(keyset, *args)
            return
        given = {
            argument.name: value
            for argument, value in zip(arguments, args, strict=False)
            if value is not None and argument.name != "workspace"
        }
        written = [a.name for a in arguments if a.written and a.name in given]
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        with torch.no_grad():
            copies = _Copies(operator, given, tensors)
            copies.take(copies.before, tensors)
            kernel.call_boxed(keyset, *args)
            copies.take(copies.after, {name: tensors[name] for name in written})
        if not copies.in_graph:
            _show(copies.finish())
        elif _capturing is not None:
            _capturing._calls.append(copies)
        else:
            _log.warning(
                "specmeta: %s is captured into a CUDA graph outside specmeta.observe.captured(): "
                "its replays are not seen",
                operator,
            )

    return call


class _Copies:
    """The copies of one call's tensors: on the CPU, or on the device inside a captured graph."""

    def __init__(self, operator: str, given: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.operator = operator
        self.values = {name: value for name, value in given.items() if name not in tensors}
        if "num_rows_int" in self.values:
            self.values["num_rows"] = self.values.pop("num_rows_int")
        self.addresses = {name: _address(tensor) for name, tensor in tensors.items()}
        self.gaps = {name: gap for name, tensor in tensors.items() if (gap := gap_of(tensor))}
        # Not always the current one.
        self.gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        self.in_graph = False
        if self.gpu is not None:
            with torch.cuda.device(self.gpu):
                self.in_graph = torch.cuda.is_current_stream_capturing()
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}

    def take(self, into: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            into[name] = _to_host(tensor) if self.gpu and not self.in_graph else tensor.clone()

    def fetch(self) -> Callable[[], Call]:
        """Copy what a replay left on the device to the host."""
        fetched = _Copies(self.operator, {}, {})
        fetched.values, fetched.addresses = self.values, self.addresses
        fetched.gaps, fetched.gpu = self.gaps, self.gpu
        fetched.take(fetched.before, self.before)
        fetched.take(fetched.after, self.after)
        return fetched.finish()

    def finish(self) -> Callable[[], Call]:
        """Return what waits until the copies are there, and gives the call."""
        done = None
        if self.gpu is not None:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.gpu))

        def make() -> Call:
            if done is not None:
                done.synchronize()
            return Call(
                self.operator, self.values, self.before, self.after, self.addresses, self.gaps
            )

        return make


def _to_host(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
