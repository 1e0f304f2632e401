"""A GPU that runs decoded kernels on host memory, and checks what a GPU would not.

The warps of a block that stand at the same instruction execute it together, as one operation of
numpy; that is a matter of speed. Each lane has its own place in the code, the lowest one goes
first, and BSYNC, WARPSYNC and barriers make lanes wait. What is wrong raises `MachineError`: an
access outside the tensors or not aligned, a read of what nobody wrote, a data race, a deadlock.

Not modelled: time, caches, and reorderings of memory (an access that could see one is a data
race, and found as that). Nor are races between the lanes of one warp, but for two that write one
place in the same instruction.

The longest chain of dependent loads counts so: a warp issues in order, and whatever uses a
register that a load of global memory or an atomic operation has yet to fill, waits for it; so
loads that are issued back to back count as one. A barrier waits for its last warp. A load of what
another warp wrote in this launch comes behind that, and one that repeats itself, as polls do,
counts once. What fences and stores take isn't counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.cubin import Kernel
from emulator.sass import I64, U32, WARP, Array, Instruction, join

FAR = 2**30  # no place in the code
SECTOR = 32
RED_ZONE = 64
SEVERAL = 63  # in a stamp, where one warp would stand


class MachineError(Exception):
    """What a kernel did wrong, and where."""


@dataclass
class Schedule:
    """Who runs when: at random with a seed, else each block as long as it does not sleep."""

    seed: int | None = None
    resident: int = 1024  # blocks at a time
    limit: int = 20_000_000  # warp instructions of a launch


@dataclass
class Work:
    """What a launch did. Sectors are counted by tensor."""

    name: str
    blocks: int
    instructions: Counter[str] = field(default_factory=Counter)  # of warps, by opcode
    read_issued: Counter[str] = field(default_factory=Counter)
    written_issued: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)  # distinct
    written: Counter[str] = field(default_factory=Counter)
    dependent_loads: int = 0
    most_instructions: int = 0  # of one block


class Shadow:
    """Who last read and wrote each word, to find data races.

    A stamp is 64 * epoch + warp + 1, where a block's epoch grows with each of its barriers. What a
    warp knows of a block is a stamp as well: it comes behind all earlier epochs, and in that epoch
    behind the one warp. Plain and atomic accesses are kept apart: two atomic ones are no race.
    """

    def __init__(self, words: int, blocks: int) -> None:
        self.wrote = np.zeros((2, words), np.int32)
        self.writer = np.zeros((2, words), np.int16)
        self.read = np.zeros((2, words, blocks), np.int32)

    def access(
        self, words: Array, block: int, stamps: Array, known: Array, write: bool, atomic: bool
    ) -> int | None:
        """Note an access; return the index of one that races, if there is one."""
        bad = np.zeros(len(words), bool)
        each = np.arange(len(words))
        for kind in (0,) if atomic else (0, 1):
            bad |= ~_ordered(self.wrote[kind, words], known[each, self.writer[kind, words]])
            if write:
                bad |= ~_ordered(self.read[kind, words], known).all(axis=1)
        kind = int(atomic)
        if write:
            self.wrote[kind, words], self.writer[kind, words] = stamps, block
            if not atomic:  # another warp in the same instruction
                bad |= self.wrote[kind, words] != stamps
        else:
            before = self.read[kind, words, block]
            self.read[kind, words, block] = stamps
            others = (before >> 6 == stamps >> 6) & (before != stamps)
            others |= self.read[kind, words, block] != stamps
            self.read[kind, words[others], block] = stamps[others] | SEVERAL
        return int(bad.argmax()) if bad.any() else None


def _ordered(stamps: Array, known: Array) -> Array:
    return (stamps >> 6 < known >> 6) | (stamps == known)


class Memory:
    """Named stretches of bytes with red zones between them, at an address of their own.

    Parameters
    ----------
    size
        Bytes, red zones included.
    base
        The address of the first; None: where it lies on the host.
    """

    def __init__(self, size: int, base: int | None = None) -> None:
        size = -(-size // 64) * 64
        whole = np.zeros(size + 64, np.uint8)
        self.data = whole[-whole.ctypes.data % 64 :][:size]
        self.base = self.data.ctypes.data if base is None else base
        self.words = self.data.view(U32)
        self.valid, self.known = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self.valid_words, self.known_words = self.valid.view(U32), self.known.view(U32)
        self.names: list[str] = ["outside"]
        self.owner = np.zeros(size // SECTOR + 1, np.int16)
        self.depth = np.zeros(size // 4, np.int32)  # of the last write in this launch
        self.shadow: Shadow

    def begin(self, blocks: int) -> None:
        """Begin a launch: what came before is in order."""
        self.depth[:] = 0
        # Bytes are kept behind the words.
        self.shadow = Shadow(len(self.words) + len(self.data), blocks)

    def add(self, name: str, start: int, size: int, valid: Array | bool, known: bool) -> None:
        """Name the stretch [start, start + size); `valid`, bytewise, may leave out some of it."""
        self.owner[start // SECTOR : (start + size - 1) // SECTOR + 1] = len(self.names)
        self.names.append(name)
        self.valid[start : start + size] = valid
        self.known[start : start + size] = known

    def where(self, offset: int) -> str:
        inside = 0 <= offset < len(self.data)
        name = self.names[self.owner[offset // SECTOR]] if inside else "outside"
        return f"address 0x{self.base + offset:x} ({name})"


class Launch:
    """One launch of a kernel on a grid: its blocks, in whatever order the schedule says.

    Where it `may_overlap` the launch before it, a warp has to wait for that one (ACQBULK, which is
    griddepcontrol.wait) before it touches global memory.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        params: bytes,
        memory: Memory,
        schedule: Schedule | None = None,
        may_overlap: bool = False,
    ) -> None:
        if threads % WARP or grid[2] != 1 or len(params) != kernel.params_size:
            raise ValueError(f"{kernel.name}: grid {grid}, {threads} threads, {len(params)} bytes")
        self.kernel, self.grid, self.threads, self.memory = kernel, grid, threads, memory
        self.schedule = schedule or Schedule()
        self.may_overlap = may_overlap
        self.num_blocks = grid[0] * grid[1]
        self.random = np.random.default_rng(self.schedule.seed)
        self.banks = kernel.constant_banks(grid, threads, params)
        self.cache: dict[tuple[int, int, int], Array] = {}
        self.counts = [0] * (len(kernel.code) + 1)
        self.issued = 0
        self.released: dict[int, Array] = {}  # by word: what its last releases know
        count = len(memory.names)
        self.read_issued, self.written_issued = np.zeros(count, int), np.zeros(count, int)
        self.seen = np.zeros((2, len(memory.owner)), bool)
        self.dependent_loads = self.most_instructions = 0
        self.running: list[Block] = []

    def run(self) -> Work:
        self.memory.begin(self.num_blocks)
        shuffled = self.schedule.seed is not None
        queue = list(
            self.random.permutation(self.num_blocks) if shuffled else range(self.num_blocks)
        )
        turn = 0
        while queue or self.running:
            while queue and len(self.running) < self.schedule.resident:
                self.running.append(Block(self, int(queue.pop(0))))
            turn = turn + 1
            if shuffled:
                speeds = np.cumsum([block.speed for block in self.running])
                turn = int(np.searchsorted(speeds, self.random.random() * speeds[-1]))
            block = self.running[turn % len(self.running)]
            before = self.issued
            block.turn(int(self.random.integers(1, 65)) if shuffled else FAR)
            block.issued += self.issued - before
            if not block.alive.any():
                self.running.remove(block)
                self.dependent_loads = max(self.dependent_loads, int(block.depth.max()))
                self.most_instructions = max(self.most_instructions, block.issued)
        return self.work()

    def work(self) -> Work:
        work = Work(self.kernel.name, self.num_blocks)
        work.dependent_loads = self.dependent_loads
        work.most_instructions = self.most_instructions
        for count, instruction in zip(self.counts, self.kernel.code, strict=False):
            work.instructions[instruction.opcode] += count
        names, owner = self.memory.names, self.memory.owner
        for counter, issued in (
            (work.read_issued, self.read_issued),
            (work.written_issued, self.written_issued),
        ):
            counter.update({name: int(n) for name, n in zip(names, issued, strict=True) if n})
        for counter, seen in ((work.read, self.seen[0]), (work.written, self.seen[1])):
            counter.update(names[k] for k in owner[seen])
        return work

    def places(self) -> str:
        """Where the warps stand that have not ended."""
        found: Counter[str] = Counter()
        for block in self.running:
            for warp, pcs in enumerate(block.pc):
                for pc in np.unique(pcs[block.alive[warp]]):
                    state = "runs" if block.runs[warp][pcs == pc].any() else "waits"
                    at = self.kernel.code[pc - (state == "waits" and block.barred[warp].any())]
                    found[f"block {block.index}, {state} at 0x{at.address:x} {at.text}"] += 1
        return "".join(f"\n  {place}: {n} warps" for place, n in sorted(found.items())[:40])


class Block:
    """A block: registers and places of its lanes [warps, 32], and what an instruction needs."""

    def __init__(self, launch: Launch, index: int) -> None:
        self.launch, self.index, self.code = launch, index, launch.kernel.code
        warps = launch.threads // WARP
        shape = (warps, WARP)
        # Registers and predicates hold anything at the start.
        self.r = launch.random.integers(0, 2**32, (launch.kernel.registers, *shape), np.uint32)
        self.ur = launch.random.integers(0, 2**32, (256, warps, 1), np.uint32)
        self.p = launch.random.integers(0, 2, (8, *shape)).astype(bool)
        self.up = launch.random.integers(0, 2, (8, warps, 1)).astype(bool)
        self.p[7], self.up[7] = True, True
        self.pc = np.zeros(shape, np.int32)
        self.alive, self.runs = np.ones(shape, bool), np.ones(shape, bool)
        self.barred = np.zeros(shape, bool)  # those that wait at a barrier
        self.member = np.zeros((16, *shape), np.int32)  # of B0 ..: a lane's BSSY, by its target
        self.votes = np.zeros(shape, bool)  # at a barrier
        self.barrier, self.barrier_result = "", 0
        self.here: Instruction = self.code[0]
        self.slept = False
        self.issued = 0  # warp instructions
        self.waited = np.full(warps, not launch.may_overlap)  # for the launch before
        self.speed = 0.1 ** launch.random.integers(0, 4)  # beside other blocks

        self.warp_of = np.repeat(np.arange(warps), WARP).reshape(shape)
        columns = launch.grid[0]
        self.special = {
            "SR_TID.X": np.arange(warps * WARP, dtype=U32).reshape(shape),
            "SR_LANEID": np.tile(np.arange(WARP, dtype=U32), (warps, 1)),
            "SR_LTMASK": np.tile((U32(1) << np.arange(WARP, dtype=U32)) - U32(1), (warps, 1)),
            "SR_CTAID.X": np.full((warps, 1), index % columns, U32),
            "SR_CTAID.Y": np.full((warps, 1), index // columns, U32),
            "SR_CgaCtaId": np.zeros((warps, 1), U32),
        }
        kernel = launch.kernel
        self.shared = Memory(kernel.shared_end + RED_ZONE, base=0)
        self.shared.add(
            "shared", kernel.shared_begin, kernel.shared_end - kernel.shared_begin, True, False
        )
        self.shared.begin(1)

        # What each warp knows of each block (see Shadow), what it knew at its last fence, and what
        # the words that it read since then know.
        blocks = launch.num_blocks
        self.clock = np.zeros((warps, blocks), np.int32)
        self.fenced, self.heard = np.zeros_like(self.clock), np.zeros_like(self.clock)
        self.epoch = 1
        self._set_own_clock()

        # The longest chain of loads behind each warp; of registers still on their way, the chain
        # behind what will be in them.
        self.depth = np.zeros(warps, np.int32)
        self.pending: dict[int, Array] = {}
        self.arrives = np.zeros(warps, np.int32)  # of the last load
        self.polled = np.zeros(shape, I64)
        self.polled_at = np.zeros(warps, np.int32)

    def fail(self, what: str, lanes: Array | None = None) -> None:
        """Raise: `what` happened at the current instruction."""
        who = f"block {self.index}"
        if lanes is not None and lanes.any():
            who += f", thread {int(np.flatnonzero(lanes)[0])}"
        at = f"0x{self.here.address:x} {self.here.text}"
        raise MachineError(f"{self.launch.kernel.name}: {at}: {who}: {what}")

    # --- Flow

    def turn(self, steps: int) -> None:
        """Run for so many steps, or until it ends or sleeps."""
        self.slept = False
        while steps > 0 and not self.slept:
            steps -= 1
            pcs = np.where(self.runs, self.pc, FAR)
            lowest = pcs.min(axis=1)
            pc = int(lowest.min())
            if pc == FAR:
                if self.alive.any():
                    raise MachineError(f"{self.launch.kernel.name}: deadlock{self.launch.places()}")
                return
            random = self.launch.random
            if self.launch.schedule.seed is not None and random.random() < 0.25:
                # Some of the warps at some place go ahead of the others.
                pc = int(random.choice(lowest[lowest < FAR]))
                chosen = (lowest == pc) & (random.random(len(lowest)) < 0.7)
                if not chosen.any():
                    continue
                pcs[~chosen] = FAR
            lanes = pcs == pc
            self._segment(pc, lanes, int(np.where(lanes, FAR, pcs).min()))

    def _segment(self, pc: int, lanes: Array, stop: int) -> None:
        """Let lanes run from `pc` on, together, until they part or meet others at `stop`."""
        launch, code, counts = self.launch, self.code, self.launch.counts
        rows = lanes.any(axis=1)
        n = int(rows.sum())
        while pc != stop:
            instruction = self.here = code[pc]
            counts[pc] += n
            launch.issued += n
            if launch.issued > launch.schedule.limit:
                raise MachineError(f"{launch.kernel.name}: no end{launch.places()}")
            active = lanes
            if instruction.guard is not None:
                active = lanes & instruction.guard.truth(self)
            if self.pending and not instruction.uses.isdisjoint(self.pending):
                self._stall(instruction.uses, rows)
            if instruction.control:
                target = self._flow(instruction, pc, lanes, active)
                if target is None:
                    return
                if not pc < target <= stop:
                    pc = target
                    break
                pc = target
            else:
                if active is lanes or active.any():
                    instruction.run(self, active)
                pc += 1
        self.pc[lanes] = pc

    def _flow(self, i: Instruction, pc: int, lanes: Array, active: Array) -> int | None:
        """Do what changes the flow: return where all go on, or None where they don't together."""
        kind = i.control
        if kind.startswith("BRA"):
            taken = active
            if kind != "BRA":
                bits = (lanes * (U32(1) << np.arange(WARP, dtype=U32))).sum(axis=1, keepdims=True)
                parted = bits.astype(U32) != i.args[0].get(self)
                if self.launch.schedule.seed is not None and kind == "BRA.DIV":
                    # The way for lanes that have parted is right for others as well.
                    parted = parted | (self.launch.random.random(parted.shape) < 0.2)
                taken = taken & (parted if kind == "BRA.DIV" else ~parted)
            for p in i.args[:-1] if kind == "BRA" else ():
                taken = taken & p.truth(self)
            if not taken.any():
                return pc + 1
            if (taken == lanes).all():
                return i.target()
            self.pc[lanes] = pc + 1
            self.pc[taken] = i.target()
            return None
        if kind == "BREAK":
            for p in i.args[:-1]:
                active = active & p.truth(self)
            self.member[i.args[-1].index][active] = 0
            self._meet()
            return pc + 1
        if kind == "RET":
            self.pc[lanes] = pc + 1
            self.pc[active] = (i.args[0].get(self) // U32(16))[active]
            return None
        if kind in ("BSYNC", "WARPSYNC"):
            self.pc[lanes] = pc + 1
            self.pc[active] = pc
            self.runs[active] = False
            self._meet()
            return pc + 1 if self.runs[lanes].all() else None
        self.pc[lanes] = pc + 1
        if kind == "NANOSLEEP":
            self.slept = True
        elif kind == "EXIT":
            self.alive[active] = self.runs[active] = False
            self._meet()
            self._arrive()
        else:
            if self.barred.any() and self.barrier != kind:
                self.fail(f"others wait at {self.barrier}", active)
            self.barrier = kind
            if "RED" in kind:
                np.copyto(self.votes, i.args[-1].truth(self), where=active)
            self.barred[active], self.runs[active] = True, False
            self._arrive()
        return None

    def _meet(self) -> None:
        """Let go the lanes whose BSYNC or WARPSYNC all have reached that it is for."""
        waiting = self.alive & ~self.runs & ~self.barred
        if not waiting.any():
            return
        for pc in np.unique(self.pc[waiting]):
            instruction = self.code[pc]
            arrived = waiting & (self.pc == pc)
            if instruction.name == "BSYNC":
                of = self.member[instruction.args[0].index]
                group = np.where(arrived, of, 0).max(axis=1, keepdims=True)
                if (arrived & (of != group)).any() or (arrived & (of == 0)).any():
                    self.fail("without its BSSY", arrived)
                needed = (of == group) & self.alive
            else:
                mask = (
                    instruction.args[0].get(self)
                    if instruction.args
                    else np.full((1, 1), 2**32 - 1, U32)
                )
                needed = self.alive & (mask >> np.arange(WARP, dtype=U32) & U32(1)).astype(bool)
            free = arrived & ~(needed & ~arrived).any(axis=1, keepdims=True)
            if instruction.name == "BSYNC":
                of[free] = 0
            self.runs[free] = True
            self.pc[free] = pc + 1

    def _arrive(self) -> None:
        """End the barrier, if all threads have come that are left."""
        if not self.barred.any() or (self.barred != self.alive).any():
            return
        if "RED" in self.barrier:
            votes = self.votes & self.alive
            self.barrier_result = {
                "POPC": int(votes.sum()),
                "OR": int(votes.any()),
                "AND": int((votes == self.alive).all()),
            }[self.barrier.rsplit(".", 1)[1]]
        self.runs |= self.barred
        self.barred[:] = False
        self.depth[:] = self.depth.max()
        self.clock[:] = self.clock.max(axis=0)
        self.epoch += 1
        self._set_own_clock()

    # --- Order between blocks

    def _set_own_clock(self) -> None:
        self.clock[:, self.index] = self.epoch << 6 | np.arange(1, len(self.clock) + 1)

    def acquire(self, lanes: Array) -> None:
        rows = lanes.any(axis=1)
        self.clock[rows] = np.maximum(self.clock[rows], self.heard[rows])
        self._set_own_clock()

    def fence(self, lanes: Array) -> None:
        self.acquire(lanes)
        rows = lanes.any(axis=1)
        self.fenced[rows] = self.clock[rows]

    def _hear(self, words: Array, warps: Array) -> None:
        for word, warp in zip(words.tolist(), warps.tolist(), strict=True):
            if word in self.launch.released:
                self.heard[warp] = np.maximum(self.heard[warp], self.launch.released[word])

    def _tell(self, words: Array, warps: Array) -> None:
        for word, warp in zip(words.tolist(), warps.tolist(), strict=True):
            before = self.launch.released.get(word, 0)
            self.launch.released[word] = np.maximum(before, self.fenced[warp])

    # --- Chains of loads

    def _stall(self, registers: set[int], rows: Array) -> None:
        for register in registers & self.pending.keys():
            arrives = self.pending[register]
            self.depth[rows] = np.maximum(self.depth, arrives)[rows]
            arrives[rows] = 0
            if not arrives.any():
                del self.pending[register]

    def later(self, registers: set[int], lanes: Array) -> None:
        """These registers hold the result of the last load, once it has arrived."""
        rows = lanes.any(axis=1)
        for register in registers:
            arrives = self.pending.setdefault(register, np.zeros(len(rows), np.int32))
            arrives[rows] = self.arrives[rows]

    # --- Memory

    def constants(self, bank: int, where: Any, size: int) -> Array:
        """A value of a constant bank, which is little-endian, at one or at many places."""
        if isinstance(where, int):
            key = (bank, where, size)
            if key not in self.launch.cache:
                self.launch.cache[key] = self._constants(bank, np.array([[where]]), size)
            return self.launch.cache[key]
        return self._constants(bank, where, size)

    def _constants(self, bank: int, where: Array, size: int) -> Array:
        data, known = self.launch.banks.get(bank, (np.zeros(0, np.uint8), np.zeros(0, bool)))
        if (where < 0).any() or (where + size > len(data)).any() or (where % size).any():
            self.fail(f"constant bank {bank} has nothing there")
        total = np.zeros(where.shape, U32)
        for k in range(size):
            if not known[where + k].all():
                self.fail(f"constant bank {bank} has nothing known there")
            total |= data[where + k].astype(U32) << U32(8 * k)
        return total

    def _touch(
        self, space: str, address: Array, size: int, lanes: Array, kind: str, atomic: bool = False
    ) -> tuple[Memory, Array, Array]:
        """Check an access, "r", "w" or "rw"; return the memory, and by lane first word and warp.

        Of an access to a byte, the first word is the byte instead.
        """
        write = "w" in kind
        memory = self.shared if space == "shared" else self.launch.memory
        offset = np.broadcast_to(address, lanes.shape)[lanes].astype(I64) - memory.base
        warps = self.warp_of[lanes]

        def check(bad: Array, what: str) -> None:
            if bad.any():
                thread = np.flatnonzero(lanes)[bad.argmax()]
                where = memory.where(int(offset[bad.argmax()]))
                self.fail(f"thread {thread}: {what} at {where}, {size} bytes")

        check((offset < 0) | (offset + size > len(memory.data)), "an access outside")
        check(offset % size != 0, "an access not aligned")
        stamps = self.epoch << 6 | warps + 1
        if space == "shared":
            known = stamps[:, None]
            block = 0
        else:
            known, block = self.clock[warps], self.index
        for k in range(max(size // 4, 1)):
            at = offset if size == 1 else (offset >> 2) + k
            valid, written = (
                (memory.valid, memory.known)
                if size == 1
                else (memory.valid_words, memory.known_words)
            )
            whole = 1 if size == 1 else 0x01010101
            check(valid[at] != whole, "an access outside")
            if "r" in kind:
                check(written[at] != whole, "a read of what was never written")
            else:
                written[at] = whole
            shadowed = at + len(memory.words) if size == 1 else at
            race = memory.shadow.access(shadowed, block, stamps, known, write, atomic)
            if race is not None:
                check(np.arange(len(at)) == race, "a data race")
        if space == "global":
            check(~self.waited[warps], "before the launch before has ended: an access")
            self._count(memory, offset // SECTOR, warps, write)
        return memory, offset if size == 1 else offset >> 2, warps

    def _count(self, memory: Memory, sectors: Array, warps: Array, write: bool) -> None:
        """Count sectors: once for each warp; an atomic operation with a result reads as well."""
        pairs = np.unique(warps << 40 | sectors) & (1 << 40) - 1
        by_tensor = np.bincount(memory.owner[pairs], minlength=len(memory.names))
        if not write or self.here.name.startswith("ATOM"):
            self.launch.read_issued += by_tensor
            self.launch.seen[0][sectors] = True
        if write:
            self.launch.written_issued += by_tensor
            self.launch.seen[1][sectors] = True

    def _arrival(
        self, memory: Memory, words: Array, count: int, warps: Array, issued: Array
    ) -> None:
        """Behind how long a chain the value of a load comes that was issued behind `issued`."""
        chain = issued.copy()
        for k in range(count):
            written = memory.depth[words + k]
            if written.any():
                np.maximum.at(chain, warps, written)
        self.arrives = chain + 1

    def load(
        self, space: str, address: Array, size: int, lanes: Array, strong: bool
    ) -> list[Array]:
        memory, at, warps = self._touch(space, address, size, lanes, "r", strong)
        results = []
        for k in range(max(size // 4, 1)):
            value = np.zeros(lanes.shape, U32)
            value[lanes] = memory.data[at] if size == 1 else memory.words[at + k]
            results.append(value)
        if space == "global":
            issued = self.depth
            if strong:
                issued = self._poll(address, lanes)
                self._hear(at, warps)
            words = at >> 2 if size == 1 else at
            self._arrival(memory, words, max(size // 4, 1), warps, issued)
        return results

    def _poll(self, address: Array, lanes: Array) -> Array:
        """When a load was issued; one that only repeats the last one counts as that."""
        address = np.broadcast_to(address, lanes.shape).astype(I64)
        fresh = (lanes & (address != self.polled)).any(axis=1)
        self.polled_at[fresh] = self.depth[fresh]
        self.polled = np.where(lanes, address, self.polled)
        return self.polled_at

    def store(
        self,
        space: str,
        address: Array,
        values: Sequence[Array],
        size: int,
        lanes: Array,
        strong: bool,
    ) -> None:
        memory, at, warps = self._touch(space, address, size, lanes, "w", strong)
        for k, value in enumerate(values):
            new = np.broadcast_to(value, lanes.shape)[lanes]
            if size == 1:
                new = new.astype(np.uint8)
            to = memory.data if size == 1 else memory.words
            to[at + k] = new
            if (to[at + k] != new).any():
                self.fail("two lanes write different values to one place", lanes)
            if space == "global":
                np.maximum.at(memory.depth, (at >> 2 if size == 1 else at) + k, self.depth[warps])
        if strong and space == "global":
            self._tell(at, warps)

    def atomic(
        self,
        space: str,
        address: Array,
        value: Array,
        size: int,
        function: Callable[[int, int], int],
        lanes: Array,
    ) -> Array:
        """Replace each lane's word by a function of it and a value; return what was there."""
        memory, at, warps = self._touch(space, address, size, lanes, "rw", True)
        words = memory.data.view(np.uint64 if size == 8 else U32)
        old = np.zeros(lanes.shape, words.dtype)
        before, new = [], np.broadcast_to(value, lanes.shape)[lanes].tolist()
        for place, x in zip((at // (size // 4)).tolist(), new, strict=True):
            before.append(int(words[place]))
            words[place] = function(before[-1], x)
        old[lanes] = np.array(before, words.dtype)
        if space == "global":
            self._arrival(memory, at, size // 4, warps, self.depth)
            for k in range(size // 4):
                np.maximum.at(memory.depth, at + k, self.depth[warps])
            self._hear(at, warps)
            self._tell(at, warps)
        return old

    def compare_and_store(self, address: Array, compare: Array, new: Array, lanes: Array) -> Array:
        """In shared memory, 64 bits wide, lane by lane; return which lanes' store was done."""
        memory, at, _ = self._touch("shared", address, 8, lanes, "rw", True)
        done = np.zeros(lanes.shape, bool)
        results = []
        for place, x, y in zip(at.tolist(), compare[lanes], new[lanes], strict=True):
            same = join(memory.words[place], memory.words[place + 1]) == x
            if same:
                memory.words[place], memory.words[place + 1] = (
                    y & np.uint64(2**32 - 1),
                    y >> np.uint64(32),
                )
            results.append(bool(same))
        done[lanes] = results
        return done


def arena(
    sizes: Mapping[str, int], shifts: Mapping[str, int] | None = None
) -> tuple[Memory, dict[str, int]]:
    """Memory with room for stretches of bytes, each on a sector's edge (or `shifts` behind one)."""
    starts, end = {}, RED_ZONE
    for name, size in sizes.items():
        starts[name] = end + (shifts or {}).get(name, 0)
        end = -(-(starts[name] + size + RED_ZONE) // SECTOR) * SECTOR
    return Memory(end), starts
