"""The rows of a call, for those who look at its copies on the CPU afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specmeta.cases import arguments_of
from specmeta.observe import Call

__all__ = ["Difference", "Requests", "Rows", "owner", "table_of"]


@dataclass(frozen=True)
class Difference:
    """An element that isn't as it should be.

    Attributes
    ----------
    field : str
        With its index, such as ``slot_mapping[5]``.
    expected, got : str
    row, slot : int or None
        Those that it belongs to.
    more : int
        How many other elements differ, where they were counted.
    """

    field: str
    expected: str
    got: str
    row: int | None = None
    slot: int | None = None
    more: int = 0

    def __str__(self) -> str:
        """Say it in one line."""
        of = owner(self.row, self.slot)
        more = f"; {self.more} more differ" if self.more else ""
        return f"{self.field}{of}: expected {self.expected}, got {self.got}{more}"


def owner(row: int | None, slot: int | None) -> str:
    """Return `` (row 1, slot 2)``, as far as they are known."""
    places = (("row", row), ("slot", slot))
    of = ", ".join(f"{name} {number}" for name, number in places if number is not None)
    return f" ({of})" if of else ""


def table_of(call: Call) -> int:
    """Return the address of the tensor that holds the page ids, 0 without one."""
    return call.addresses.get("page_table", call.addresses.get("alloc_pages", 0))


class Requests:
    """Which request each slot has, by number, in the order in which they began.

    Attributes
    ----------
    by_slot : dict
    told : bool
        Whether somebody tells which slots have new requests. Where nobody does, a row that starts
        at 0 has one, and one with other pages.
    """

    def __init__(self) -> None:
        self.by_slot: dict[int, int] = {}
        self.told = False
        self._count = 0

    def assigned(self, slot: int) -> None:
        """Note that a slot has a new request."""
        self.told = True
        self.begin(slot)

    def seen(self, slot: int, start: int, *, others: bool = False) -> None:
        """Note where a row's tokens start, and whether its slot uses other pages than before.

        A trace doesn't say the latter: there a request that moves to other pages stays the same.
        """
        if slot not in self.by_slot or (not self.told and (others or start == 0)):
            self.begin(slot)

    def begin(self, slot: int) -> None:
        """Give a slot the next number."""
        self.by_slot[slot] = self._count
        self._count += 1


class Rows:
    """The live rows of a call, once it's done.

    Attributes
    ----------
    live : range
    slot : list of int or None
        By row; None where the row has none.
    tokens : list of range
        By row, its query tokens; none from the first pair on that cannot be right.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        tensors = call.before | call.after
        self.arguments = arguments_of(call.operator)
        size = next(
            (
                tensor.shape[-1] - self.arguments[name].shape.endswith("+1")
                for name, tensor in tensors.items()
                if self.arguments[name].shape.split(",")[-1] in ("B", "B+1")
            ),
            0,
        )
        given = tensors.get("num_rows", call.values.get("num_rows", size))
        self.live = range(max(0, min(int(given), size)))
        slots = tensors["row_to_slot"].tolist() if "row_to_slot" in tensors else self.live
        self.slot: list[int | None] = [s if s >= 0 else None for s in slots[: len(self.live)]]
        cu = (
            [*range(size + 1)]
            if "cu_seqlens_q" not in tensors
            else tensors["cu_seqlens_q"].tolist()
        )
        num_tokens = next(
            (
                len(tensor)
                for symbol in ("T", "U")
                for name, tensor in tensors.items()
                if self.arguments[name].shape == symbol
            ),
            2**31 - 1,
        )
        self.tokens = []
        is_right = True
        for b in self.live:
            is_right = is_right and 0 <= cu[b] <= cu[b + 1] <= num_tokens
            self.tokens.append(range(cu[b], cu[b + 1]) if is_right else range(0))
        if call.operator == "draft_lists":  # a row's slots of all steps stand together
            steps = int(call.values["num_steps"])
            self.tokens = [range(b * steps, (b + 1) * steps) for b in self.live]

    def locate(self, name: str, index: tuple[int, ...]) -> tuple[int | None, int | None]:
        """Return the row and the slot that an element belongs to."""
        row = slot = None
        for dim, i in zip(self.arguments[name].shape.split(","), index, strict=True):
            if dim in ("B", "B+1"):
                row = max(i - (dim == "B+1"), 0)
            elif dim == "S" or (dim == "Z" and "row_to_slot" in self.call.before):
                slot = i
            elif dim == "Z":
                row = i
            elif dim in ("T", "U"):
                row = next((b for b in self.live if i in self.tokens[b]), None)
            elif dim == "C" and "kv_indptr" in self.call.after:
                indptr = self.call.after["kv_indptr"][index[:-1]].tolist()
                row = next((b for b in self.live if indptr[b] <= i < indptr[b + 1]), None)
        if slot is None and row is not None and row in self.live:
            slot = self.slot[row]
        elif row is None and slot in self.slot:
            row = self.slot.index(slot)
        return row, slot

    def difference(
        self, name: str, index: tuple[int, ...], want: Tensor, got: Tensor
    ) -> Difference:
        """Return that two tensors differ in an element."""
        field = f"{name}[{', '.join(map(str, index))}]"
        values = str(want[index].item()), str(got[index].item())
        return Difference(field, *values, *self.locate(name, index))
