"""Capture a step once, replay it many times.

On a GPU a captured step is a CUDA graph. On the CPU it's the step's trace: the list of operations
that it ran, recorded under fake tensors, replayed on the real ones. On both, a step in which the
host reads a value back fails the capture: a fake tensor has none, and CUDA refuses to wait.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from specmeta import observe

__all__ = ["CaptureError", "Captured", "capture"]

_WARM_UPS = 2

# These read memory without going through an operator, where fake tensors would notice.
_DIRECT_READS = (
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__repr__,
    Tensor.__format__,
)
# A constant that the step makes out of Python numbers passes here: it's no state of the step.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class CaptureError(RuntimeError):
    """A step that can't be captured; the message says why."""


class _ThisThread(threading.local):
    captures = False


_this_thread = _ThisThread()


@contextmanager
def _capturing() -> Iterator[None]:
    """Count what this thread runs inside as a capture, its rehearsals too."""
    _this_thread.captures = True
    try:
        yield
    finally:
        _this_thread.captures = False


def check_host(method: str) -> None:
    """Refuse a method of the host inside a captured step, specmeta's or anybody's CUDA graph.

    Raises
    ------
    CaptureError
        Replays would send what was sent then, or what stands in its place by now, and read nothing.
    """
    if _this_thread.captures or (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    ):
        raise CaptureError(
            f"{method}: expected a call between replays, got one inside a captured step"
        )


class Captured:
    """A captured step.

    Attributes
    ----------
    trace : GraphModule or None
        The step's operations, on the CPU. Its inputs are the persistent tensors that it touches.
    replay : callable
        ``replay()`` runs the step on what the tensors hold now.
    """

    def __init__(self, trace: GraphModule | None, replay: Callable[[], None]) -> None:
        self.trace = trace
        self.replay = replay


def capture(step: Callable[[], None], *, num_rows: Tensor, pool: Any = None) -> Captured:
    """Capture `step`.

    Parameters
    ----------
    step : callable
        Called without arguments, once for each of a few rehearsals, and its results are tensors
        updated in place. The tensors that it updates must exist already, and keep their
        addresses: replays go on to use them. Python numbers are frozen.
    num_rows : Tensor
        int32 [1]: the number of live rows that the step's operations read. It's zero during the
        warm-up, so that nothing indexed by slot changes (contract, rule 2), and gets its value
        back. Its device decides what a capture is.
    pool : optional
        CUDA graphs that never run at the same time can share the memory of what they compute on
        the way: ``torch.cuda.graph_pool_handle()``. Default: a pool of the graph's own.

    Returns
    -------
    Captured

    Raises
    ------
    CaptureError
        The step reads a value back to the host, has a shape that depends on one, keeps a tensor
        that it made itself (make the step's state before the capture), or calls a method of
        :class:`specmeta.BatchMetadata` that belongs to the host, or this function.
    ValueError
        `step` cannot be called, or `num_rows` is not such a tensor.

    Examples
    --------
    >>> import torch
    >>> from specmeta.graph import capture
    >>> count, live = torch.zeros(2), torch.ones(1, dtype=torch.int32)
    >>> step = capture(lambda: count.add_(live), num_rows=live)
    >>> step.replay(); step.replay(); count
    tensor([2., 2.])
    """
    check_host("capture")
    if not callable(step):
        raise ValueError(f"step: expected a function, got {step!r}")
    if not isinstance(num_rows, Tensor):
        raise ValueError(f"num_rows: expected an int32 tensor of one element, got {num_rows!r}")
    if num_rows.dtype != torch.int32 or num_rows.shape != (1,):
        raise ValueError(
            "num_rows: expected an int32 tensor of one element, "
            f"got {num_rows.dtype} of shape {list(num_rows.shape)}"
        )
    with torch.no_grad(), _capturing():
        if num_rows.is_cuda:
            return Captured(None, _cuda_graph(step, num_rows, pool))
        trace, tensors = _trace(step)

    def replay() -> None:
        with torch.no_grad():
            trace(*tensors)

    return Captured(trace, replay)


def _trace(step: Callable[[], None]) -> tuple[GraphModule, list[Tensor]]:
    """Trace `step` without touching a value; return the trace and the tensors it takes."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fake_mode:
            # Two rehearsals: the first finds the tensors, the second has them as inputs. A tensor
            # that is closed over but isn't an input would be updated for real while tracing.
            found = _Lift(fake_mode)
            with found, _ForbidDirectReads():
                step()

            def lifted_step(*inputs: Tensor) -> None:
                with _Lift(fake_mode, found.tensors, inputs), _ForbidDirectReads():
                    step()

            trace = make_fx(lifted_step, _allow_non_fake_inputs=True)(
                *(fake_mode.from_tensor(tensor) for tensor in found.tensors)
            )
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(f"the step reads a value back to the host: {error.func}") from error
    # A fake tensor that outlived the first rehearsal stands in the trace as a constant: a cache
    # that the step fills when it first runs, say. It would never hold a value.
    for name, value in trace.named_buffers():
        if isinstance(value, FakeTensor):
            raise CaptureError(
                f"the step keeps a tensor that it made itself ({name}: {list(value.shape)}, "
                f"{value.dtype}): make it before the capture"
            )
    return trace, found.tensors


class _Lift(TorchDispatchMode):
    """Puts a fake tensor in the place of every real one, and keeps a list of the real ones."""

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        tensors: list[Tensor] | None = None,
        inputs: tuple[Tensor, ...] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode
        self.complete = tensors is not None
        self.tensors = tensors if tensors is not None else []
        self.fakes = {id(t): fake for t, fake in zip(self.tensors, inputs, strict=True)}

    def lift(self, tensor: Tensor) -> Tensor:
        if self.fake_mode.is_our_fake(tensor):
            return tensor
        if id(tensor) not in self.fakes:
            if self.complete:
                raise CaptureError("the step doesn't use the same tensors each time it runs")
            self.tensors.append(tensor)
            self.fakes[id(tensor)] = self.fake_mode.from_tensor(tensor)
        return self.fakes[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LIFTS:
            args, kwargs = tree_map_only(Tensor, self.lift, (args, kwargs))
        return func(*args, **kwargs)


class _ForbidDirectReads(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DIRECT_READS:
            raise CaptureError(f"the step reads a value back to the host: Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all captures: torch reuses memory of a pool on the same one only."""
    return torch.cuda.Stream(device)


def _cuda_graph(step: Callable[[], None], num_rows: Tensor, pool: Any) -> Callable[[], None]:
    """Capture `step` into a CUDA graph, and return what replays it."""
    graph = torch.cuda.CUDAGraph()
    live = num_rows.clone()
    with torch.cuda.device(num_rows.device):
        stream = _capture_stream(num_rows.device)
        try:
            num_rows.zero_()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            with (
                observe.captured() as calls,
                torch.cuda.graph(graph, pool=pool, stream=stream),
            ):
                step()
        finally:
            num_rows.copy_(live)
    if not calls:
        return graph.replay

    def replay() -> None:
        graph.replay()
        calls.replayed()

    return replay
