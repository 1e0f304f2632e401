"""Random walks: many operations, one after the other, on the same persistent buffers.

An engine's buffers outlive every call: the output of one is the input of the next, slots change
hands in between, and what a call does not write stays. A walk does the same to two twins of every
buffer, one written by the operators, the other by the reference, which must be equal after every
call, down to the bytes between and behind the tensors. Some walks go as an engine does, some call
anything in any order with any buffer that fits, and some also find their buffers corrupted.

A walk is sizes and a list of steps, each of them a name and two numbers that say all about it, so
that it can be replayed, printed, and shrunk by hypothesis. Nothing in it depends on results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from strategies import INT32_MAX, INT32_MIN, PAGE_SIZES, WILD64
from torch import Tensor

import specmeta
from specmeta import reference
from specmeta._library import Argument
from specmeta.cases import arguments_of
from specmeta.testing import GUARD, GUARD_ELEMENTS, POISON, assert_equal, gap_of

OPERATORS = reference.__all__
HOST_STEPS = ("assign", "release", "change_pages", "rewind", "set_rows")
ENGINE_STEPS = ("iterate", "overlap")
WILD_STEPS = ("restage", "resize", "change_dtype", "change_stride")
FAULTS = ("corrupt", "corrupt", "poison")
# By style: what a walk is made of.
STYLES = {
    "engine": (*ENGINE_STEPS, *ENGINE_STEPS, *HOST_STEPS),
    "wild": (*ENGINE_STEPS, *OPERATORS, *HOST_STEPS, *WILD_STEPS),
    "corrupted": (*ENGINE_STEPS, *OPERATORS, *HOST_STEPS, *WILD_STEPS, *FAULTS),
}
MAX_STEPS = 30
ALL_GIVEN = 3 * 2**48 - 1
MAX_LISTS = 9  # steps of draft_lists

# What an argument is not given without; before the dot, for which operation only. A copy of what
# docs/contract.md says under "Companions", which the schemas of the operators do not tell.
NEEDS = {
    "num_pages": ("page_table",),
    "alloc_pages": ("alloc_indptr",),
    "alloc_indptr": ("alloc_pages",),
    "count_index": ("num_accepted",),
    "max_accepted": ("num_accepted",),
    "seq_lens_out": ("seq_lens",),
    "last_position_ids": ("position_ids",),
    "draft_input_ids": ("input_ids",),
    "stage.num_drafts": ("known_lens",),
    "stage.num_draft_tokens": ("known_lens",),
    "stage.input_ids": ("tokens",),
    "draft_step.input_ids": ("draft_tokens",),
    "draft_step.position_ids_out": ("position_ids",),
    "draft_step.tokens": ("known_lens", "num_drafts", "draft_tokens"),
    "draft_step.known_lens": ("tokens",),
    "draft_step.num_drafts": ("tokens",),
    **{
        f"{operator}.{name}": needs
        for operator in ("accept_greedy", "accept_sampled")
        for name, needs in {
            "tokens": ("known_lens", "committed_lens", "seq_lens"),
            "known_lens": ("tokens",),
            "committed_lens": ("tokens",),
            "num_drafts": ("tokens",),
        }.items()
    },
}
NEED_PAGES = {"kv_indices", "block_table", "slot_mapping"}
BY_ROW = {"row_to_slot", "cu_seqlens_q", "num_draft_tokens", "accepted_tokens", "seq_lens"}
ONE_ROW_A_SLOT = {"stage", "accept_greedy", "accept_sampled", "draft_step"}

# By number: what it is in most calls, and what else it may be.
NUMBERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "pad_page": ((0,), (99999, -3, INT32_MAX, INT32_MIN)),
    "pad_slot": ((-1,), (0, -2, 2**62, -(2**63))),
    "pad_token": ((0,), (7, -1, INT32_MAX, INT32_MIN)),
    "pad_seq_len": ((0, 1), (0, 1)),
    "max_accepted": ((4, 8), (0, 1, INT32_MAX, 2**40)),
    "seq_len_bias": ((0, 1), (-1, -4, 3, 2**40, -(2**40), 2**31)),
    "position_bias": ((0, 1), (-1, -4, 3, 2**40, -(2**40), 2**31)),
    "max_rejected": ((3, 8), (0, 1, INT32_MAX, 2**40)),
    "draft_index": ((0, 1, 2), (5, INT32_MAX - 1)),
    "shift": ((1, 0), (1, 0)),
    "last": ((0, 0, 1), (0, 1)),
    "vocab_size": ((3, 100), (1, 32000, INT32_MAX, 2**40)),
    "num_steps": ((1, 2, 3), (4, MAX_LISTS)),
}

Step = tuple[str, int, int]
"""A name, which optional arguments are given, and a seed for all values.

The second is 3 * (their bits), or any number whose remainder by 3 is 2: all of them.
"""


@dataclass(frozen=True)
class Walk:
    """Sizes, and the steps that are made with them."""

    style: str = "engine"
    rows: int = 1
    slots: int = 1
    more_tokens: int = 0
    page_size: int = 4
    pages: int = 3
    kv_capacity: int = 3
    table_width: int = 3
    ledger: int = 12
    drafts: int = 2
    max_seq_len: int | None = None
    index_dtype: str = "int32"
    gap: int = 0
    seed: int = 0
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        head = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k != "steps")
        steps = "".join(f"\n    {step}," for step in self.steps)
        return f"Walk({head}, steps=({steps}\n))"


@st.composite
def walks(draw: Callable[[Any], Any], *, large: bool = False) -> Walk:
    """Draw a walk; a large one may need several blocks of a GPU."""
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    style = choose(*STYLES)
    rows = choose(1, 2, 3, 4, 5, 8, 0, *((300, 2100) if large else ()))
    pages = choose(3, 4, 6, 2, 1)
    # Sizes at which everything ends soon, or never begins.
    tight = choose(False, False, False, True)
    if tight:
        pages = choose(pages, 0)
    step = st.tuples(
        st.sampled_from(STYLES[style]),
        st.integers(0, ALL_GIVEN),
        st.integers(0, 2**32 - 1),
    )
    return Walk(
        style=style,
        rows=rows,
        slots=max(rows + (choose(0, -1) if tight else choose(0, 1, 3)), 0),
        more_tokens=choose(0, 1, 3) if tight else choose(9, 20),
        page_size=choose(*PAGE_SIZES),
        pages=pages,
        kv_capacity=choose(rows * pages, rows, 0) if tight else rows * (pages + 1),
        table_width=max(pages + (choose(0, -1) if tight else choose(0, 1)), 0),
        ledger=choose(12, 5, 0) if tight else choose(24, 40),
        drafts=choose(1, 0) if tight else choose(2, 3),
        max_seq_len=choose(None, 12, 7, 1) if tight else choose(None, 30),
        index_dtype=choose("int32", "int64"),
        gap=choose(0, 1, 3),
        seed=draw(st.integers(0, 2**32 - 1)),
        steps=tuple(draw(st.lists(step, min_size=choose(1, 15), max_size=MAX_STEPS))),
    )


class Buffer:
    """A tensor that lives as long as its walk, and its twin: alike before every call.

    Parameters
    ----------
    values
        One or two dimensions, on the CPU.
    gap
        Elements between two rows that belong to neither.
    guard
        Elements in front and behind. Without them the allocation ends where the tensor does, so
        that AddressSanitizer sees what is past it.
    device
        Where the operators' twin is.
    """

    def __init__(self, values: Tensor, *, gap: int, guard: int, device: str) -> None:
        width = values.shape[-1] + gap if values.dim() == 2 else 1
        length = max((len(values) - 1) * width + (values.shape[-1] if values.dim() == 2 else 1), 0)
        if values.numel() == 0:
            length = 0
        self.gap = gap
        strides = (width, 1) if values.dim() == 2 else (1,)
        self._want = torch.full((length + 2 * guard,), GUARD, dtype=values.dtype)
        self.want = self._want.as_strided(values.shape, strides, guard)
        self.want.copy_(values)
        self._got = self._want.clone().to(device)
        self.got = self._got.as_strided(values.shape, strides, guard)

    def write(self, place: Any, values: Any) -> None:
        """Let the host write the same into both."""
        if isinstance(values, list):
            info = torch.iinfo(self.want.dtype) if self.want.dtype != torch.bool else None
            if info:
                values = [max(info.min, min(v, info.max)) for v in values]
            values = torch.tensor(values, dtype=self.want.dtype)
        self.want[place] = values
        self.got[place] = self.want[place].to(self.got.device)

    def check(self, name: str) -> None:
        got = self._got.cpu()
        if not torch.equal(got, self._want):
            assert_equal(name, self.got, self.want)
            place = int((got != self._want).nonzero()[0]) - self.want.storage_offset()
            raise AssertionError(
                f"written outside: {name} {tuple(self.want.shape)}, stride "
                f"{tuple(self.want.stride())}, element {place} from its start"
            )


@dataclass
class Call:
    """A call that a walk is about to make; `got` and `want` are views of its buffers."""

    operator: str
    got: dict[str, Any] = field(default_factory=dict)
    want: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of the buffers, by argument
    refused: str = ""  # why it must raise


class Failure(AssertionError):  # noqa: N818
    """What went wrong in a walk.

    Attributes
    ----------
    number : int
        Of the call, counted from 0 in the whole walk.
    operator : str
    kind : str
        The same for what looks like the same fault.
    """

    def __init__(self, number: int, operator: str, kind: str, message: str) -> None:
        super().__init__(f"call {number}, {operator}: {message}")
        self.number, self.operator, self.kind = number, operator, f"{operator}: {kind}"
        self.message = message


def play(
    walk: Walk,
    operators: Mapping[str, Callable[..., None]] | None = None,
    *,
    device: str = "cpu",
    guarded: bool = True,
    report: Callable[[int, str], None] = lambda number, operator: None,
) -> int:
    """Make a walk.

    Parameters
    ----------
    walk
    operators
        By name, in place of specmeta's.
    device
        Where they run.
    guarded
        False where AddressSanitizer watches the ends of the tensors.
    report
        Is told before every call.

    Returns
    -------
    int
        How many calls were made.

    Raises
    ------
    Failure
        The twins differ, or a call raised, or did not where it should have.
    """
    operators = {name: getattr(specmeta, name) for name in OPERATORS} | dict(operators or {})
    world = World(walk, device=device, guarded=guarded)
    number = -1
    for number, call in enumerate(world.calls()):
        report(number, call.operator)
        try:
            if call.refused:
                try:
                    operators[call.operator](**call.got)
                except RuntimeError:
                    pass
                else:
                    raise AssertionError(f"did not raise: {call.refused}")
            else:
                getattr(reference, call.operator)(**call.want)
                operators[call.operator](**call.got, **world.scratch(call))
            world.check()
        except AssertionError as error:
            text = str(error)
            kind = text.split("[")[0].split(" ")[0] if "[" in text else text[:40]
            raise Failure(number, call.operator, kind, text) from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise Failure(number, call.operator, text[:60], text) from error
    return number + 1


def play_call(
    operator: str,
    args: Mapping[str, Any],
    operators: Mapping[str, Callable[..., None]] | None = None,
    *,
    device: str = "cpu",
    guarded: bool = True,
) -> None:
    """Make one call on copies of its arguments, as in a walk; AssertionError where twins differ."""
    buffers = {
        name: Buffer(
            value,
            gap=gap_of(value),
            guard=GUARD_ELEMENTS if guarded else 0,
            device=device,
        )
        for name, value in args.items()
        if isinstance(value, Tensor)
    }
    getattr(reference, operator)(**{**args, **{k: b.want for k, b in buffers.items()}})
    fn = (operators or {}).get(operator) or getattr(specmeta, operator)
    fn(**{**args, **{k: b.got for k, b in buffers.items()}})
    for name, buffer in buffers.items():
        buffer.check(name)


def call_at(walk: Walk, number: int) -> Call:
    """Return a call of a walk as it is about to be made; only the reference runs."""
    for i, call in enumerate(World(walk).calls()):
        if i == number:
            return call
        if not call.refused:
            getattr(reference, call.operator)(**call.want)
    raise IndexError(number)


@cache
def _uses() -> dict[tuple[str, int], list[Argument]]:
    """By name and number of dimensions: the arguments that a buffer serves."""
    uses: dict[tuple[str, int], list[Argument]] = {}
    for operator in OPERATORS:
        for argument in arguments_of(operator).values():
            if argument.kind == "tensor":
                rank = argument.shape.count(",") + 1
                uses.setdefault((argument.name, rank), []).append(argument)
    return uses


class World:
    """The buffers of a walk, and the steps that change them."""

    def __init__(self, walk: Walk, *, device: str = "cpu", guarded: bool = True) -> None:
        self.walk = walk
        self._device, self._guard = device, GUARD_ELEMENTS if guarded else 0
        self._noise = 0.03 if walk.style == "corrupted" else 0.0
        self._workspaces: dict[int, Tensor] = {}
        self._rows = walk.rows
        self.buffers: dict[str, Buffer] = {}
        rng = random.Random(walk.seed)
        full = self._sizes(walk.rows, walk.rows + walk.more_tokens)
        lists = {"K": MAX_LISTS, "T": walk.rows * MAX_LISTS}
        for (name, rank), arguments in _uses().items():
            shapes = [
                _shape(a, full | (lists if a.operator == "draft_lists" else {})) for a in arguments
            ]
            shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
            dtype = {
                "either": getattr(torch, walk.index_dtype),
                "int32": torch.int32,
                "int64": torch.int64,
                "bool": torch.bool,
            }[min((a.dtype for a in arguments), key=["int32", "int64", "bool", "either"].index)]
            fill = 0 if name == "status" else POISON
            values = torch.full(shape, fill, dtype=dtype)
            self._make(name if rank == 1 else f"{name}_2d", values, walk.gap if rank == 2 else 0)
        self._set("row_to_slot", list(range(walk.rows)))
        self._set("num_rows", [walk.rows])
        for s in range(walk.slots):
            self._assign_slot(s, rng)
        for name, _ in _uses():
            self._refresh(name, rng)

    def scratch(self, call: Call) -> dict[str, Tensor]:
        """Return the workspace: one for all launches of as many steps, as an engine has it."""
        if call.operator == "keep_last":
            return {}
        steps = call.got.get("num_steps", 1)
        if steps not in self._workspaces:
            self._workspaces[steps] = specmeta.workspace(
                self.walk.rows, num_steps=steps, device=self._device
            )
        return {"workspace": self._workspaces[steps]}

    def check(self) -> None:
        """Compare all twins."""
        for name, buffer in self.buffers.items():
            buffer.check(name.removesuffix("_2d"))

    def calls(self) -> Iterator[Call]:
        """Make the steps; yield every call that has to be made before it goes on."""
        for name, bits, seed in self.walk.steps:
            rng = random.Random(seed)
            if name in ENGINE_STEPS:
                yield from getattr(self, f"_{name}")(bits, rng)
            elif name in OPERATORS:
                yield self._call(name, bits, rng)
            else:
                getattr(self, f"_{name}")(rng)

    # --- Buffers

    def _make(self, name: str, values: Tensor, gap: int) -> None:
        self.buffers[name] = Buffer(values, gap=gap, guard=self._guard, device=self._device)

    def _set(self, name: str, values: Sequence[int]) -> None:
        """Write as much of a buffer as there is room for."""
        buffer = self.buffers[name]
        n = min(len(values), len(buffer.want))
        buffer.write(slice(0, n), list(values[:n]))

    def _read(self, name: str) -> list[Any]:
        values: list[Any] = self.buffers[name].want.tolist()
        return values

    def _sizes(self, rows: int, tokens: int) -> dict[str, int]:
        walk = self.walk
        return {
            "B": rows,
            "S": walk.slots,
            "T": tokens,
            "P": walk.pages,
            "C": walk.kv_capacity,
            "M": walk.table_width,
            "L": walk.ledger,
            "W": walk.drafts + 1,
            "N": max(walk.rows, walk.slots) + 1,
            "A": walk.slots * walk.pages + 1,
            "U": tokens + 2,
            "Z": walk.slots + 1,
            "1": 1,
        }

    def _refresh(self, name: str, rng: random.Random) -> None:
        """Let the host write what an argument would hold in an engine."""
        walk = self.walk
        most = walk.drafts
        values: Callable[[], int]
        if name in ("seq_lens", "cu_seqlens_q"):
            self._restage(rng)
            return
        if name in ("target_tokens", "draft_tokens", "backup_tokens", "sampled_tokens"):
            values = lambda: rng.choice((0, 1, 1, 1, 2, -1))  # noqa: E731
        elif name == "query_lens":
            values = lambda: rng.choice((0, 1, 1, 2, 3, most + 1, most + 1))  # noqa: E731
        elif name == "num_accepted":
            values = lambda: rng.choice((0, 1, 2, 3, -1, -3, -6))  # noqa: E731
        elif name in ("num_rejected", "num_draft_tokens"):
            values = lambda: rng.randint(0, most)  # noqa: E731
        elif name == "num_sampled":
            values = lambda: rng.randint(0, most + 1)  # noqa: E731
        elif name == "count_index":
            values = lambda: rng.randint(-1, max(walk.rows - 1, 0))  # noqa: E731
        elif name == "limit_lens":
            committed = self._read("committed_lens")
            self._set(name, [self._noisy(c + rng.randint(-2, 2), rng) for c in committed])
            return
        elif name == "cu_num_draft_tokens":
            total, ends = 0, []
            for _ in range(walk.rows):
                total += rng.randint(0, most)
                ends.append(self._noisy(total, rng))
            self._set(name, ends)
            return
        elif name == "discarded":
            self._set(name, [rng.random() < 0.3 for _ in range(walk.rows)])
            return
        else:
            return
        for key in (name, f"{name}_2d"):
            if key in self.buffers:
                buffer = self.buffers[key]
                made = [self._noisy(values(), rng) for _ in range(buffer.want.numel())]
                info = torch.iinfo(buffer.want.dtype)
                made = [max(info.min, min(v, info.max)) for v in made]
                shaped = torch.tensor(made, dtype=buffer.want.dtype).reshape(buffer.want.shape)
                buffer.write(slice(None), shaped)
        if name == "target_tokens":  # often as drafted
            inputs = self._read("input_ids")[: len(self.buffers[name].want)]
            for t in range(1, len(inputs)):
                if rng.random() < 0.6:
                    self.buffers[name].write(slice(t - 1, t), inputs[t : t + 1])

    def _noisy(self, value: int, rng: random.Random) -> int:
        return rng.choice(WILD64) if rng.random() < self._noise else value

    # --- What the host does between calls

    def _assign_slot(self, s: int, rng: random.Random) -> None:
        """Give a slot to another request: its prompt, its pages, nothing committed."""
        walk = self.walk
        prompt = min(rng.randint(1, 8), walk.ledger)
        for name, value in (
            ("committed_lens", 0),
            ("known_lens", prompt),
            ("num_drafts", 0),
            ("written_lens", 0),
        ):
            self._set_at(name, s, value)
        ids = [rng.choice((0, 1, 1, 2)) for _ in range(walk.ledger)]
        self.buffers["tokens_2d"].write(s, ids)
        self._set_pages(s, rng.randint(min(1, walk.pages), walk.pages), rng)

    def _set_pages(self, s: int, count: int, rng: random.Random) -> None:
        """Write the page table, what its count is, and the ragged list of all slots."""
        walk = self.walk
        behind = [rng.choice((-1, -1, 50, INT32_MIN)) for _ in range(walk.pages)]
        behind[:1] = [-1]
        ids = [rng.randint(1, 99) for _ in range(count)]
        if rng.random() < 0.05:
            ids = [INT32_MAX - i for i in ids]
        self.buffers["page_table_2d"].write(s, (ids + behind)[: walk.pages])
        self._set_at("num_pages", s, count)
        table, counts = self._read("page_table_2d"), self._read("num_pages")
        pages, ends = [], [0]
        for row, n in zip(table, counts, strict=True):
            pages.extend(row[: max(n, 0)])
            ends.append(len(pages))
        self._set("alloc_pages", pages)
        self._set("alloc_indptr", ends)

    def _slot(self, rng: random.Random) -> int | None:
        return rng.randrange(self.walk.slots) if self.walk.slots else None

    def _assign(self, rng: random.Random) -> None:
        s = self._slot(rng)
        if s is not None:
            self._assign_slot(s, rng)
            if self.walk.rows:
                row = rng.randrange(self.walk.rows)
                slots = [-1 if other == s else other for other in self._read("row_to_slot")]
                slots[row] = s
                self._set("row_to_slot", slots)
                self._set("status", [0] * (self.walk.slots + 1))

    def _release(self, rng: random.Random) -> None:
        """Take a row's slot away; sometimes its pages too."""
        if self.walk.rows:
            row = rng.randrange(self.walk.rows)
            s = self._read("row_to_slot")[row]
            self._set_at("row_to_slot", row, -1)
            if 0 <= s < self.walk.slots and rng.random() < 0.5:
                self._set_pages(s, 0, rng)

    def _change_pages(self, rng: random.Random) -> None:
        s = self._slot(rng)
        if s is not None:
            self._set_pages(s, rng.randint(0, self.walk.pages), rng)

    def _rewind(self, rng: random.Random) -> None:
        """Take tokens back: of a request, or of a row that is staged."""
        s = self._slot(rng)
        if s is not None:
            committed = max(self._read("committed_lens")[s] - rng.randint(1, 5), 0)
            known = max(self._read("known_lens")[s] - rng.randint(0, 5), committed)
            for name, value in (("committed_lens", committed), ("known_lens", known)):
                self._set_at(name, s, value)
            self._set_at("num_drafts", s, rng.choice((0, self.walk.drafts)))

    def _set_rows(self, rng: random.Random) -> None:
        """Another order of the slots, and another number of live rows."""
        walk = self.walk
        slots = list(range(walk.slots)) + [-1] * rng.choice((0, 0, 1))
        rng.shuffle(slots)
        self._set("row_to_slot", (slots + [-1] * walk.rows)[: walk.rows])
        live = rng.choice((walk.rows, walk.rows, walk.rows, rng.randint(0, walk.rows)))
        self._set("num_rows", [self._noisy(live, rng)])

    def _set_at(self, name: str, place: int, value: Any) -> None:
        self.buffers[name].write(slice(place, place + 1), [value])

    def _restage(self, rng: random.Random) -> None:
        """Lengths, query tokens and positions as an engine that keeps them would stage them."""
        walk = self.walk
        slots, counts = self._read("row_to_slot"), self._read("num_pages")
        lengths, ends = [], [rng.choice((0, 0, 0, 1))]
        positions = [0] * (walk.rows + walk.more_tokens)
        for b in range(walk.rows):
            s = slots[b] if rng.random() < 0.9 else b
            pages = counts[s] if 0 <= s < walk.slots else walk.pages
            capacity = min(max(pages, 0) * walk.page_size, walk.max_seq_len or INT32_MAX)
            q = rng.choice((0, 1, 1, 2, walk.drafts + 1))
            near = rng.choice((capacity, rng.randint(0, 4) * walk.page_size))
            length = max(near - rng.randint(0, 4), q) if rng.random() < 0.9 else 0
            lengths.append(self._noisy(length, rng))
            ends.append(ends[-1] + q)
            for t in range(min(ends[-2], len(positions)), min(ends[-1], len(positions))):
                positions[t] = length - ends[-1] + t
        self._set("seq_lens", lengths)
        self._set("cu_seqlens_q", [self._noisy(end, rng) for end in ends])
        self._set("position_ids", positions)

    # --- What an engine would rather not do

    def _resize(self, rng: random.Random) -> None:
        """The launches that follow are of another batch size."""
        self._rows = rng.choice((self.walk.rows, rng.randint(0, self.walk.rows)))

    def _buffer(self, rng: random.Random) -> tuple[str, Buffer]:
        name = rng.choice(sorted(self.buffers))
        return name, self.buffers[name]

    def _corrupt(self, rng: random.Random) -> None:
        """One element of anything becomes anything."""
        _, buffer = self._buffer(rng)
        if buffer.want.numel():
            flat = rng.randrange(buffer.want.numel())
            place = flat if buffer.want.dim() == 1 else divmod(flat, buffer.want.shape[1])
            info = torch.iinfo(buffer.want.dtype) if buffer.want.dtype != torch.bool else None
            value = rng.choice((*WILD64, rng.randint(-3, 30)))
            buffer.write(place, max(info.min, min(value, info.max)) if info else rng.random() < 0.5)

    def _poison(self, rng: random.Random) -> None:
        """A buffer holds nothing of this walk."""
        _, buffer = self._buffer(rng)
        buffer.write(slice(None), torch.full_like(buffer.want, rng.choice((POISON, -1, 0))))

    def _change_dtype(self, rng: random.Random) -> None:
        name, buffer = self._buffer(rng)
        if buffer.want.dtype == torch.int32:
            self._convert(name, torch.int64)
        elif buffer.want.dtype == torch.int64:
            self._convert(name, torch.int32)

    def _convert(self, name: str, dtype: torch.dtype) -> None:
        buffer = self.buffers[name]
        info, values = torch.iinfo(dtype), buffer.want.to(torch.int64)
        self._make(name, values.clamp(info.min, info.max).to(dtype), buffer.gap)

    def _change_stride(self, rng: random.Random) -> None:
        name, buffer = self._buffer(rng)
        if buffer.want.dim() == 2:
            self._make(name, buffer.want.clone(), rng.choice((0, 1, 3, 8)))

    # --- Calls

    def _iterate(self, bits: int, rng: random.Random) -> Iterator[Call]:
        """One iteration of a one-model engine: stage, accept, the draft loop."""
        walk = self.walk
        rows = {"row_to_slot", "num_rows", "status"}
        state = {"committed_lens", "known_lens", "num_drafts", "tokens"}
        pages, others = self._allocation(rng)
        staged = {"cu_seqlens_q", "seq_lens", "position_ids", "input_ids", "num_draft_tokens"}

        def call(operator: str, needed: set[str], **more: Any) -> Call:
            without = others | more.pop("without", set())
            return self._call(operator, bits, rng, needed, clean=True, without=without, **more)

        self._refresh("query_lens", rng)
        yield call("stage", {*rows, *state, *pages, *staged, "query_lens"})
        if rng.random() < 0.2:
            yield call("map_slots", {*rows, *pages, "cu_seqlens_q"})
        accept = rng.choice(("accept_greedy", "accept_greedy", "accept_sampled"))
        self._refresh("target_tokens" if accept == "accept_greedy" else "sampled_tokens", rng)
        counted = {"num_accepted", "num_rejected", "last_position_ids", "draft_input_ids"}
        yield call(accept, {*rows, *state, *staged, *counted})
        if rng.random() < 0.2:
            yield call("draft_lists", {*rows, *pages})
        drafts = rng.randint(0, walk.drafts)
        recorded = {"tokens", "known_lens", "num_drafts", "draft_tokens", "written_lens"}
        for k in range(drafts):
            self._refresh("draft_tokens", rng)
            yield call(
                "draft_step",
                {*rows, *pages, *recorded, "position_ids", "input_ids", "draft_index", "last"}
                | ({"num_rejected"} if k == 0 else set()),
                without=set() if k == 0 else {"num_rejected"},
                numbers={"draft_index": k, "last": k == drafts - 1, "shift": 1},
                bind={"position_ids": "last_position_ids", "input_ids": "next_tokens"},
            )

    def _overlap(self, bits: int, rng: random.Random) -> Iterator[Call]:
        """A step that the host staged before it knew the count, and what engines do around it."""
        rows = {"row_to_slot", "num_rows", "status"}
        pages, others = self._allocation(rng)
        others |= {"max_accepted"} if rng.random() < 0.7 else set()  # it stops a rewind
        staged = {"cu_seqlens_q", "seq_lens", "position_ids"}

        def call(operator: str, needed: set[str]) -> Call:
            return self._call(operator, bits, rng, needed, clean=True, without=others)

        if rng.random() < 0.3:
            for name in ("sampled_tokens", "discarded", "backup_tokens", "cu_num_draft_tokens"):
                self._refresh(name, rng)
            yield call("count_sampled", {*rows, "num_sampled", "next_tokens"})
            yield call("locate_sampled", {*rows, "num_rejected", "token_indices"})
        self._restage(rng)
        self._refresh("num_accepted", rng)
        yield call("advance", {*rows, *pages, *staged, "num_accepted"})
        if rng.random() < 0.3:
            yield call("keep_last", {*rows, "input_ids", "position_ids", "query_lens"})
            yield call("advance", {*rows, *pages, *staged, "num_accepted"})

    def _allocation(self, rng: random.Random) -> tuple[set[str], set[str]]:
        """Which arguments tell the pages of an engine, and which do not."""
        pages = {"page_table", "num_pages"}
        if rng.random() < 0.3:  # the table says where it ends
            pages = {"page_table"}
        elif rng.random() < 0.2:
            pages = {"alloc_pages", "alloc_indptr"}
        return pages, {"page_table", "num_pages", "alloc_pages", "alloc_indptr"} - pages

    def _call(
        self,
        operator: str,
        bits: int,
        rng: random.Random,
        needed: set[str] = frozenset(),  # type: ignore[assignment]
        *,
        clean: bool = False,
        numbers: Mapping[str, int] = {},
        bind: Mapping[str, str] = {},
        without: set[str] = frozenset(),  # type: ignore[assignment]
    ) -> Call:
        """Make the arguments of a call.

        `needed` are given, others as `bits` say, all as far as they may stand together. A clean
        call takes every argument from the buffer of its name.
        """
        known = arguments_of(operator)
        names = self._choose(operator, bits, rng, needed, without)
        sizes = self._sizes_of_call(names, operator, rng, clean)
        if bind:  # one token a row
            sizes["T"], sizes["U"] = sizes["B"], sizes["B"] + 2
        call = Call(operator)
        for name in sorted(names):
            argument = known[name]
            if argument.kind != "tensor" or (
                name == "num_rows" and not clean and rng.random() < 0.4
            ):
                value = numbers[name] if name in numbers else self._number(name, rng, clean)
                if name == "pad_seq_len" and sizes["C"] < sizes["B"]:
                    value = 0
                if name == "num_steps":
                    value = sizes["K"]
                call.got[name] = call.want[name] = bool(value) if argument.kind == "bool" else value
                continue
            call.names[name] = bind.get(name, name) if "," not in argument.shape else f"{name}_2d"
        if not clean:
            for name in sorted(call.names):
                if rng.random() < 0.5:
                    self._refresh(name, rng)
                if rng.random() < 0.08:
                    self._take_another(call, known[name], _shape(known[name], sizes), rng)
        if operator in ONE_ROW_A_SLOT and "row_to_slot" in call.names:
            self._part_slots(call.names["row_to_slot"], sizes["B"])
        for name, key in call.names.items():
            argument = known[name]
            wanted = {"int32": torch.int32, "int64": torch.int64}.get(argument.dtype)
            if wanted and self.buffers[key].want.dtype != wanted:
                self._convert(key, wanted)
            place = tuple(slice(0, n) for n in _shape(argument, sizes))
            call.got[name] = self.buffers[key].got[place]
            call.want[name] = self.buffers[key].want[place]
        if operator == "advance" and "num_accepted" not in names:
            call.got["num_accepted"] = call.want["num_accepted"] = None
        if not clean and rng.random() < 0.03:
            self._spoil(call, rng)
        return call

    def _choose(
        self, operator: str, bits: int, rng: random.Random, needed: set[str], without: set[str]
    ) -> set[str]:
        """Which arguments are given: those that may stand together."""
        known = arguments_of(operator)
        given = ALL_GIVEN if bits % 3 == 2 else bits // 3
        names = {name for i, name in enumerate(known) if given >> i & 1} | needed
        names = {name for name in names if name in known} - without
        required = {name for name, argument in known.items() if argument.required}
        names |= required
        if "alloc_pages" in names and "page_table" in names:
            names -= {"alloc_pages"} if needed or rng.random() < 0.7 else {"page_table"}
        while True:
            kept = {
                name
                for name in names
                if names.issuperset(NEEDS.get(f"{operator}.{name}", NEEDS.get(name, ())))
            }
            if not kept & {"page_table", "alloc_pages"} and operator != "map_slots":
                kept -= NEED_PAGES
            if kept == names:
                break
            names = kept
        if operator == "map_slots" and not names & {"alloc_pages", "page_table"}:
            names.add("page_table")
        if operator == "stage" and not names & {"known_lens", "query_lens"}:
            names.add("query_lens")
        if operator == "accept_greedy" and not names & BY_ROW:
            names.add("num_accepted")  # something must tell B
        # Without row_to_slot there are as many slots as rows.
        if "row_to_slot" in known and self._rows > self.walk.slots:
            names.add("row_to_slot")
        return names

    def _sizes_of_call(
        self, names: set[str], operator: str, rng: random.Random, clean: bool
    ) -> dict[str, int]:
        """The whole buffers, or the front of them."""
        walk = self.walk
        rows = self._rows
        tokens = rows + walk.more_tokens
        if not clean and rng.random() < 0.15:
            rows = rng.randint(0, rows)
            tokens = rng.randint(rows, tokens)
        sizes = self._sizes(rows, tokens)
        if not clean and rng.random() < 0.15:
            for size in ("P", "C", "M", "L", "A", "N"):
                sizes[size] = rng.randint(0, sizes[size])
            sizes["W"] = rng.randint(1, sizes["W"])
            sizes["U"] = rng.randint(tokens, sizes["U"])
        if "row_to_slot" not in names:
            sizes["S"] = rows
            sizes["Z"] = rows
        elif not clean and rng.random() < 0.1:
            sizes["S"] = rng.randint(0, walk.slots)
            sizes["Z"] = sizes["S"] + 1
        if operator == "draft_lists":
            sizes["K"] = self._number("num_steps", rng, clean)
            sizes["T"] = rows * sizes["K"]
        elif operator == "keep_last":
            sizes["Z"] = rows
        return sizes

    def _number(self, name: str, rng: random.Random, clean: bool) -> int:
        walk = self.walk
        wild = not clean and rng.random() < 0.1
        if name == "page_size":
            return rng.choice(PAGE_SIZES) if wild else walk.page_size
        if name == "max_seq_len":
            limit = walk.max_seq_len or INT32_MAX
            return rng.choice((1, 8, INT32_MAX)) if wild else limit
        if name == "num_rows":
            return rng.choice((*WILD64, 0)) if wild else rng.randint(0, self._rows)
        sane, other = NUMBERS[name]
        return rng.choice(other if wild else sane)

    def _take_another(
        self, call: Call, argument: Argument, shape: tuple[int, ...], rng: random.Random
    ) -> None:
        """Let a call have another buffer that fits in place of an argument's own."""
        fits = [
            key
            for key, buffer in sorted(self.buffers.items())
            if key not in call.names.values()
            and buffer.want.dim() == len(shape)
            and all(have >= n for have, n in zip(buffer.want.shape, shape, strict=True))
            and (buffer.want.dtype == torch.bool) == (argument.dtype == "bool")
        ]
        if fits:
            call.names[argument.name] = rng.choice(fits)

    def _part_slots(self, key: str, rows: int) -> None:
        """Let no slot stand in two rows: where it does, the contract leaves results open."""
        seen: set[int] = set()
        values = self._read(key)[:rows]
        for b, s in enumerate(values):
            if s in seen:
                values[b] = -1
            seen.add(s)
        self._set(key, values)

    def _spoil(self, call: Call, rng: random.Random) -> None:
        """Make a call that must be refused, with nothing written."""
        known = arguments_of(call.operator)
        tensors = {k: v for k, v in call.got.items() if isinstance(v, Tensor)}
        shared = [
            (a, b)
            for a in sorted(tensors)
            for b in sorted(tensors)
            if a != b and known[b].written and tensors[a].numel()
            if (tensors[a].shape, tensors[a].dtype) == (tensors[b].shape, tensors[b].dtype)
        ]
        if shared and rng.random() < 0.7:
            a, b = rng.choice(shared)
            call.got[b] = call.got[a]
            call.refused = f"{a} and {b} share memory"
        else:
            name = rng.choice(sorted(tensors))
            call.got[name] = call.got[name].unsqueeze(0).unsqueeze(0)
            call.refused = f"{name} has {call.got[name].dim()} dimensions"


def _shape(argument: Argument, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Give the sizes of an argument in a call."""
    return tuple(
        sizes[part.removesuffix("+1")] + part.endswith("+1") for part in argument.shape.split(",")
    )
