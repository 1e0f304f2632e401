"""Tools to test the operators with: guarded tensors, exact comparison, and runs of cases.

A tensor of a batch is written by many launches and read by engines that trust every element of
it, so a test asks for three things: the right elements, defined elements everywhere (outputs are
poisoned first), and not one byte outside.

Examples
--------
>>> import torch, specmeta
>>> from specmeta import reference, testing
>>> arguments = {"num_accepted": torch.tensor([1]), "seq_lens": torch.tensor([32]),
...              "page_size": 32, "page_table": torch.tensor([[5, 6]], dtype=torch.int32)}
>>> testing.run_both(specmeta.advance, reference.advance, arguments)["seq_lens"].tolist()
[33]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specmeta.cases import Case

__all__ = ["Guarded", "assert_equal", "poisoned", "poisoned_like", "run_both", "run_case"]

POISON = 0x7B7B7B7B
"""What outputs hold before a run: as a length, page, slot or position it is wrong everywhere."""

GUARD = 0x5A5A5A5A
"""What stands between the tensors of a `Guarded`."""

GUARD_ELEMENTS = 7  # odd, so that the tensors start on every alignment that their dtype allows


def poisoned(*shape: int, dtype: torch.dtype = torch.int32, gap: int = 0) -> Tensor:
    """Make an output that no run has written yet.

    Parameters
    ----------
    shape
        Sizes; one or two.
    dtype
        torch.int32 or torch.int64; torch.bool, whose poison is True.
    gap
        Elements between two rows of a 2-D tensor that do not belong to it.
    """
    filled = torch.full((*shape[:-1], shape[-1] + gap), POISON, dtype=dtype)
    return filled[..., : shape[-1]]


def poisoned_like(tensor: Tensor) -> Tensor:
    """Make a poisoned tensor with the shape, the dtype and the gaps of another."""
    return poisoned(*tensor.shape, dtype=tensor.dtype, gap=gap_of(tensor))


def gap_of(tensor: Tensor) -> int:
    """Return how many elements of other memory stand between the rows of a tensor."""
    if tensor.dim() != 2 or len(tensor) < 2:
        return 0
    return max(tensor.stride(0) - tensor.shape[1], 0)


def assert_equal(name: str, got: Tensor, want: Tensor) -> None:
    """Check that two tensors have the same shape and the same elements.

    Parameters
    ----------
    name
        What the message calls the tensor.
    got, want
        Tensors of integers or truth values, on any device. Their dtypes may differ.

    Raises
    ------
    AssertionError
        Names the first element that differs, both its values, and how many differ.
    """
    got, want = got.detach().cpu().to(torch.int64), want.detach().cpu().to(torch.int64)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if torch.equal(got, want):
        return
    places = (got != want).nonzero()
    first = tuple(places[0].tolist())
    where = ", ".join(str(i) for i in first)
    raise AssertionError(
        f"{name}[{where}] is {got[first].item()}, expected {want[first].item()} "
        f"({len(places)} of {got.numel()} elements differ)\n"
        f"  got      {_shown(got)}\n  expected {_shown(want)}"
    )


def _shown(tensor: Tensor) -> str:
    text = str(tensor.tolist())
    return text if len(text) <= 400 else text[:400] + " ..."


class Guarded:
    """Copies of tensors on one device, laid out with guard elements around each.

    There is one buffer for each dtype, so that a copy to a device, and a comparison of everything
    with everything, costs as little for thirty tensors as for one. Row strides are kept, and so is
    what stands between the rows.

    Parameters
    ----------
    tensors
        Tensors of integers or truth values, of one or two dimensions, by name.
    device
        Where the copies live.

    Attributes
    ----------
    tensors
        The copies, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        self._initial: dict[torch.dtype, Tensor] = {}
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._places: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}

        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        ends: dict[torch.dtype, int] = {}
        for name, tensor in tensors.items():
            flat = stretch(tensor)
            guard = torch.full((GUARD_ELEMENTS,), GUARD, dtype=tensor.dtype)
            by_dtype.setdefault(tensor.dtype, [guard]).extend((flat, guard))
            start = ends.get(tensor.dtype, GUARD_ELEMENTS)
            self._places[name] = start
            ends[tensor.dtype] = start + len(flat) + GUARD_ELEMENTS
        for dtype, parts in by_dtype.items():
            self._initial[dtype] = torch.cat(parts)
            # A clone even where the device is the same: the initial contents stay what they are.
            self._buffers[dtype] = self._initial[dtype].clone().to(device)
        for name, tensor in tensors.items():
            buffer = self._buffers[tensor.dtype]
            self.tensors[name] = buffer.as_strided(
                tensor.shape, tensor.stride(), self._places[name]
            )

    def assert_equal(self, want: Guarded) -> None:
        """Check that every tensor equals its twin, and every byte between them too."""
        same = all(
            torch.equal(buffer.cpu(), want._buffers[dtype].cpu())
            for dtype, buffer in self._buffers.items()
        )
        if not same:
            for name, tensor in self.tensors.items():
                assert_equal(name, tensor, want.tensors[name])
            self.check_guards()
            want.check_guards()

    def check_guards(self) -> None:
        """Raise AssertionError where something was written between the tensors or their rows."""
        for dtype, buffer in self._buffers.items():
            changed = buffer.cpu() != self._initial[dtype]
            for name, tensor in self.tensors.items():
                if tensor.dtype == dtype:
                    changed[self._elements(name)] = False
            if changed.any():
                place = int(changed.nonzero()[0])
                near = min(
                    (name for name, t in self.tensors.items() if t.dtype == dtype),
                    key=lambda name: abs(self._places[name] - place),
                )
                offset = place - self._places[near]
                raise AssertionError(
                    f"written outside: {buffer[place].item()} at element {offset} from the start "
                    f"of {near} {tuple(self.tensors[near].shape)}"
                )

    def check_unchanged(self, name: str) -> None:
        """Check that a tensor still holds what it was made with."""
        tensor = self.tensors[name]
        before = self._initial[tensor.dtype].as_strided(
            tensor.shape, tensor.stride(), self._places[name]
        )
        assert_equal(f"{name} (an input)", tensor, before)

    def _elements(self, name: str) -> Tensor:
        """Where a tensor's elements stand in its buffer."""
        tensor = self.tensors[name]
        elements = torch.tensor(self._places[name])
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements = elements.unsqueeze(-1) + torch.arange(size) * stride
        return elements.flatten()


def stretch(tensor: Tensor) -> Tensor:
    """Give the storage from a tensor's first element to its last, gaps between them included."""
    if tensor.numel() == 0:
        return tensor.new_empty(0)
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.as_strided((last + 1,), (1,))


def run_both(
    fn: Callable[..., None],
    reference_fn: Callable[..., None],
    kwargs: Mapping[str, Any],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Run an operation and its reference on copies of the same arguments, and compare everything.

    Parameters
    ----------
    fn
        The operation. It gets its tensors on `device`.
    reference_fn
        What it should do. It gets CPU tensors.
    kwargs
        Arguments by name, tensors on the CPU. They keep their values; None means absent.
    device
        Where `fn` runs.

    Returns
    -------
    dict
        What the reference left in each tensor.

    Raises
    ------
    AssertionError
        A tensor differs, mutated or not, or a byte around one of them.
    """
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
    values = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}
    got, want = Guarded(tensors, device), Guarded(tensors)
    reference_fn(**values, **want.tensors)
    fn(**values, **got.tensors)
    got.assert_equal(want)
    return want.tensors


def run_case(
    fn: Callable[..., None], case: Case, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Run an operation on a case's arguments and compare all that it leaves with `case.expect`.

    Every output that is an argument too is updated in place, and every other one is poisoned
    first. The arguments that are not expected to change must keep their values.

    Parameters
    ----------
    fn
        The operation, or its reference.
    case
        See :mod:`specmeta.cases`.
    device
        Where it runs.

    Returns
    -------
    dict
        What it left in each tensor.

    Raises
    ------
    AssertionError
        An output differs, an input changed, or something was written outside.
    """
    run = Guarded(case.tensors(), device)
    fn(**case.numbers, **run.tensors)
    for name in run.tensors:
        if name in case.expect:
            assert_equal(name, run.tensors[name], case.expect[name])
        else:
            run.check_unchanged(name)
    run.check_guards()
    return run.tensors
