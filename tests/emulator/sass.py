"""Machine code, decoded from what cuobjdump prints: each instruction, and what it computes.

An instruction becomes a function of a block and the lanes that execute it. Registers are arrays
[warps, 32], uniform registers [warps, 1], constants [1, 1]: numpy broadcasts between them. An
opcode, a modifier or an operand that is not known here is an error, never a guess.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

U32, U64, I32, I64 = np.uint32, np.uint64, np.int32, np.int64
MASK32, MASK64 = 2**32 - 1, 2**64 - 1
WARP = 32
PREDICATE = 256  # a predicate's number among the registers
Array = np.ndarray
Run = Callable[[Any, Array], Any]

_LINE = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[\dT]) +)?([A-Z]\w*)((?:\.\w+)*)([^;]*?)\s*;"
)
_REGISTER = re.compile(r"([-~!]?)(U?[RP]|B)(\d+|[ZT])((?:\.\w+)*)")
_CONSTANT = re.compile(r"([-~]?)c\[(0x\w+)\]\[(?:(U?R)(\d+|Z))?\+?(-?0x\w+)?\]")
_ADDRESS = re.compile(r"(?:desc\[UR\d+\])?\[(.*)\]")
_NAME = re.compile(r"SR\w+(\.[XYZ])?|U?PR")  # no value, but part of what an opcode does
_INTEGER = re.compile(r"-?0x[0-9a-f]+")


class UnknownInstructionError(Exception):
    """An instruction whose meaning is not known here."""


def constant(value: int, dtype: type = U32) -> Array:
    return np.array([[value]], dtype=dtype)


def join(low: Array, high: Array) -> Array:
    return low.astype(U64) | high.astype(U64) << U64(32)


class Operand:
    """A register, a constant or an immediate, with its sign."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kind, self.index, self.sign, self.suffix = "?", 0, "", ""
        self.bank, self.base = 0, None
        if _INTEGER.fullmatch(text):
            self.kind, self.index = "imm", int(text, 16)
        elif match := _REGISTER.fullmatch(text):
            self.sign, self.kind, number, self.suffix = match.groups()
            self.index = {"Z": 255, "T": 7}.get(number) or int("0" + number.strip("ZT"))
            self.suffix = self.suffix.replace(".reuse", "")
        elif match := _CONSTANT.fullmatch(text):
            self.kind, self.sign = "c", match[1]
            self.bank, self.index = int(match[2], 16), int(match[5] or "0", 16)
            if match[3] and match[4] != "Z":
                self.base = Operand(match[3] + match[4])

    @property
    def is_null(self) -> bool:
        return self.index == (7 if self.kind in ("P", "UP") else 255) and self.kind != "imm"

    def registers(self, words: int = 1) -> set[int]:
        """Those of a lane that it is about."""
        if self.kind == "R" and not self.is_null:
            return set(range(self.index, self.index + words))
        if self.kind == "P" and not self.is_null:
            return {PREDICATE + self.index}
        return self.base.registers() if self.base else set()

    def word(self, block: Any, offset: int = 0) -> Array:
        """A 32-bit word of it, without its sign."""
        assert self.base is None
        if self.kind == "imm":
            return constant(self.index >> 32 * offset & MASK32)
        if self.kind == "c":
            return block.constants(self.bank, self.index + 4 * offset, 4)
        if self.is_null:
            return constant(0)
        return (block.r if self.kind == "R" else block.ur)[self.index + offset]

    def get(self, block: Any) -> Array:
        value = self.word(block)
        if self.sign == "-":
            return U32(0) - value
        return ~value if self.sign == "~" else value

    def get64(self, block: Any) -> Array:
        value = join(self.word(block), self.word(block, 1))
        if self.sign == "-":
            return U64(0) - value
        return ~value if self.sign == "~" else value

    def addend(self, block: Any) -> Array:
        """What it adds to a sum with carries: -x is ~x + 1, which is 2^32 for 0."""
        value = self.word(block)
        if self.sign == "-":
            return (~value).astype(U64) + U64(1)
        return (~value if self.sign == "~" else value).astype(U64)

    def truth(self, block: Any) -> Array:
        value = (block.p if self.kind == "P" else block.up)[self.index]
        return ~value if self.sign == "!" else value

    def put(self, block: Any, lanes: Array, value: Array, offset: int = 0) -> None:
        """Write a word, or a truth value, of the given lanes (of a uniform one: of their warps)."""
        if self.is_null:
            return
        name = {"R": "r", "UR": "ur", "P": "p", "UP": "up"}[self.kind]
        where = lanes if self.kind in ("R", "P") else lanes.any(axis=1, keepdims=True)
        to = getattr(block, name)[self.index + offset]
        np.copyto(to, value.astype(to.dtype, copy=False), where=where)

    def put64(self, block: Any, lanes: Array, value: Array) -> None:
        self.put(block, lanes, value.astype(U32))
        self.put(block, lanes, (value >> U64(32)).astype(U32), 1)


class Address:
    """[register + uniform register + offset], 64-bit where one of them is."""

    def __init__(self, text: str) -> None:
        self.parts: list[tuple[Operand, int, bool]] = []
        self.offset = 0
        for part in text.replace("+-", "+ -").split("+"):
            operand = Operand(part.strip().replace(".reuse", ""))
            if operand.kind == "imm":
                self.offset += operand.index
                continue
            scale = re.fullmatch(r"\.X(4|8|16)", operand.suffix)
            if operand.kind not in ("R", "UR") or not (
                scale or operand.suffix in ("", ".64", ".U32")
            ):
                raise UnknownInstructionError(f"address [{text}]")
            self.parts.append((operand, int(scale[1]) if scale else 1, operand.suffix == ".64"))
        self.is_wide = any(wide for _, _, wide in self.parts) or ".U32" in text

    def registers(self) -> set[int]:
        return set().union(*(o.registers(1 + wide) for o, _, wide in self.parts))

    def get(self, block: Any) -> Array:
        total = constant(self.offset & MASK64, U64)
        for operand, scale, wide in self.parts:
            wide |= self.is_wide and operand.kind == "UR"
            value = operand.get64(block) if wide else operand.get(block).astype(U64)
            total = total + value * U64(scale)
        return total if self.is_wide else total & U64(MASK32)


class Instruction:
    """One instruction. `run(block, lanes)` does it; `control` names what changes the flow."""

    def __init__(self, match: re.Match[str]) -> None:
        address, guard, self.name, mods, rest = match.groups()
        self.address = int(address, 16)
        self.text = " ".join(match[0].split("*/", 1)[1].rstrip(";").split())
        self.opcode = self.name + mods
        self.guard = Operand(guard) if guard else None
        self.mods = mods.split(".")[1:]
        self.args: list[Any] = []
        self.texts = [part.strip() for part in rest.split(",")] if rest.strip() else []
        for text in self.texts:
            address_match = _ADDRESS.fullmatch(text)
            if address_match and not text.startswith("c["):
                self.args.append(Address(address_match[1]))
            else:
                self.args.append(Operand(text.replace(".reuse", "")))
        self.control = ""
        self.strong = False  # an access that others may see in between
        self.uses: set[int] = set()  # registers of a lane, read or written
        maker = _OPCODES.get(self.name) or _OPCODES.get(self.name.removeprefix("U"))
        if maker is None:
            raise UnknownInstructionError(f"0x{self.address:x} {self.text}: opcode")
        try:
            self.run: Run = maker(self)
        except (UnknownInstructionError, IndexError, KeyError, ValueError) as error:
            raise UnknownInstructionError(f"0x{self.address:x} {self.text}: {error!r}") from error
        if self.mods:
            raise UnknownInstructionError(f"0x{self.address:x} {self.text}: .{self.mods[0]}")
        for arg in self.args:
            unread = isinstance(arg, Operand) and (
                arg.suffix or (arg.kind == "?" and not _NAME.fullmatch(arg.text))
            )
            if unread:
                raise UnknownInstructionError(f"0x{self.address:x} {self.text}: {arg.text}")
        for operand in filter(None, (self.guard, *self.args)):
            self.uses |= operand.registers()

    def take(self, *names: str) -> str:
        """Remove the modifier that is one of these, and return it."""
        for name in names:
            if name in self.mods:
                self.mods.remove(name)
                return name
        return ""

    def wide(self, *operands: Operand, words: int = 2) -> None:
        """Note that an operand is several registers."""
        for operand in operands:
            self.uses |= operand.registers(words)

    def target(self) -> int:
        """The operand, last, that is a place in the code."""
        return int(self.texts[-1], 16) // 16

    def expect(self, condition: bool, what: str = "operands") -> None:
        if not condition:
            raise UnknownInstructionError(what)


def decode(lines: list[str]) -> list[Instruction]:
    """The instructions of one kernel, from the lines of cuobjdump."""
    code: list[Instruction] = []
    for line in lines:
        if not re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            continue
        match = _LINE.match(line)
        if match is None:
            raise UnknownInstructionError(line.strip())
        code.append(Instruction(match))
        if code[-1].address != 16 * (len(code) - 1):
            raise UnknownInstructionError(f"{line.strip()}: not at its place")
        if ".CAST" in code[-1].opcode:
            # The value that a compare-and-store loop begins with may be anyone's.
            for before in code[-8:]:
                before.strong |= before.name == "LDS" and code[-1].texts[2] == before.texts[0]
    return code


_OPCODES: dict[str, Callable[[Instruction], Run]] = {}


def opcode(*names: str) -> Callable[[Callable[[Instruction], Run]], Callable[[Instruction], Run]]:
    """Register what decodes an opcode; a uniform one, U before it, is the same."""

    def register(maker: Callable[[Instruction], Run]) -> Callable[[Instruction], Run]:
        _OPCODES.update(dict.fromkeys(names, maker))
        return maker

    return register


def _predicates(args: list[Operand], first: int) -> list[Operand]:
    """The predicates that stand in a row from `first` on."""
    last = first
    while last < len(args) and args[last].kind in ("P", "UP"):
        last += 1
    return args[first:last]


# --- Moves ----------------------------------------------------------------------------------------


@opcode("MOV")
def _mov(i: Instruction) -> Run:
    d, a = i.args[:2]
    if i.take("64"):
        i.wide(d, a)
        if a.kind == "imm":
            a.index &= MASK64
        return lambda b, m: d.put64(b, m, a.get64(b))
    i.expect(len(i.args) == 2 or i.texts[2] == "0xf")
    return lambda b, m: d.put(b, m, a.get(b))


@opcode("HFMA2")
def _hfma2(i: Instruction) -> Run:
    """-0 * 0 + constant, which moves two halves: the high one comes first."""
    i.take("MMA")
    i.expect(i.texts[1:3] == ["-RZ", "RZ"])
    halves = [struct.unpack("<H", struct.pack("<e", _half(text)))[0] for text in i.texts[3:]]
    i.expect(len(halves) == 2)
    value, d = constant(halves[0] << 16 | halves[1]), i.args[0]
    i.args = [d]
    return lambda b, m: d.put(b, m, value)


def _half(text: str) -> float:
    if "NAN" in text:
        raise UnknownInstructionError("which NaN")
    return float(text.replace("INF", "inf").replace(" ", ""))


@opcode("SEL")
def _sel(i: Instruction) -> Run:
    d, a, c, p = i.args
    if i.take("64"):
        i.wide(d, a, c)
        return lambda b, m: d.put64(b, m, np.where(p.truth(b), a.get64(b), c.get64(b)))
    return lambda b, m: d.put(b, m, np.where(p.truth(b), a.get(b), c.get(b)))


@opcode("PRMT")
def _prmt(i: Instruction) -> Run:
    d, a, selector, c = i.args

    def run(b: Any, m: Array) -> None:
        eight, s = join(a.get(b), c.get(b)), selector.get(b)
        total = constant(0)
        for k in range(4):
            nibble = s >> U32(4 * k)
            byte = (eight >> ((nibble & U32(7)) * U32(8)).astype(U64)).astype(U32) & U32(255)
            sign = np.where(byte & U32(128), U32(255), U32(0))
            total = total | np.where(nibble & U32(8), sign, byte) << U32(8 * k)
        d.put(b, m, total)

    return run


@opcode("P2R", "UP2UR")
def _p2r(i: Instruction) -> Run:
    d, _, a, mask = i.args
    i.expect(i.texts[1] in ("PR", "UPR") and mask.kind == "imm" and mask.index < 128)
    wanted = [k for k in range(7) if mask.index >> k & 1]
    if i.texts[1] == "PR":
        i.uses |= {PREDICATE + k for k in wanted}

    def run(b: Any, m: Array) -> None:
        value = a.get(b) & U32(~mask.index & MASK32)
        for k in wanted:
            value = value | (b.p if i.texts[1] == "PR" else b.up)[k].astype(U32) << U32(k)
        d.put(b, m, value)

    return run


@opcode("R2UR")
def _r2ur(i: Instruction) -> Run:
    """Lanes that disagree would leave it open whose value it is."""
    d, a = i.args

    def run(b: Any, m: Array) -> None:
        value = np.broadcast_to(a.get(b), m.shape)
        first = np.take_along_axis(value, m.argmax(axis=1)[:, None], axis=1)
        if (m & (value != first)).any():
            b.fail("the lanes of a warp have different values")
        d.put(b, m, first)

    return run


SPECIAL = ("SR_TID.X", "SR_LANEID", "SR_LTMASK", "SR_CTAID.X", "SR_CTAID.Y", "SR_CgaCtaId")


@opcode("S2R", "S2UR", "CS2R")
def _s2r(i: Instruction) -> Run:
    d, name = i.args[0], i.texts[1]
    if i.name == "CS2R":
        i.expect(name == "SRZ")
        if i.take("32"):
            return lambda b, m: d.put(b, m, constant(0))
        i.wide(d)
        return lambda b, m: d.put64(b, m, constant(0, U64))
    i.expect(name in SPECIAL, name)
    return lambda b, m: d.put(b, m, b.special[name])


@opcode("LDC", "LDCU")
def _ldc(i: Instruction) -> Run:
    d, a = i.args
    i.expect(a.kind == "c")
    size = {"": 4, "U8": 1, "U16": 2, "64": 8, "128": 16}[i.take("U8", "U16", "64", "128")]
    i.wide(d, words=max(size // 4, 1))

    def run(b: Any, m: Array) -> None:
        where: Any = a.index
        if a.base is not None:
            rows = m if d.kind == "R" else m.any(axis=1, keepdims=True)
            where = a.base.get(b).astype(I32).astype(I64) + a.index
            where = np.where(rows, where, where[rows][0])
        for k in range(max(size // 4, 1)):
            d.put(b, m, b.constants(a.bank, where + 4 * k, min(size, 4)), k)

    return run


# --- Arithmetic -----------------------------------------------------------------------------------


@opcode("IADD3")
def _iadd3(i: Instruction) -> Run:
    """A sum of three, with as many carries out as it has, each of them 1; .X adds two carries."""
    d, carries = i.args[0], _predicates(i.args, 1)
    a, c, e = terms = i.args[1 + len(carries) : 4 + len(carries)]
    ins = i.args[4 + len(carries) :]
    extended = bool(i.take("X"))
    i.expect(len(ins) == (2 if extended else 0) and len(carries) <= 2)
    if i.take("64"):
        i.expect(
            not extended and all(t.sign == "" for t in terms) and all(p.is_null for p in carries)
        )
        i.wide(d, *terms)
        return lambda b, m: d.put64(b, m, a.get64(b) + c.get64(b) + e.get64(b))
    i.expect(not (extended and any(t.sign == "-" for t in terms)))
    wanted = [p for p in carries if not p.is_null]
    if not wanted and not extended:
        return lambda b, m: d.put(b, m, a.get(b) + c.get(b) + e.get(b))

    def run(b: Any, m: Array) -> None:
        total = a.addend(b) + c.addend(b) + e.addend(b)
        for p in ins:
            total = total + p.truth(b)
        carry = total >> U64(32)
        if wanted and (np.broadcast_to(carry, m.shape)[m] > len(wanted)).any():
            b.fail("more carries than there are predicates for them")
        for k, p in enumerate(wanted):
            p.put(b, m, carry > U64(k))
        d.put(b, m, total.astype(U32))

    return run


@opcode("IADD")
def _iadd(i: Instruction) -> Run:
    d, a, c = i.args
    i.expect(bool(i.take("64")))
    i.wide(d, a, c)
    return lambda b, m: d.put64(b, m, a.get64(b) + c.get64(b))


@opcode("VIADD")
def _viadd(i: Instruction) -> Run:
    d, a, c = i.args
    return lambda b, m: d.put(b, m, a.get(b) + c.get(b))


@opcode("IMAD")
def _imad(i: Instruction) -> Run:
    d, a, c, e = i.args[:4]
    kind, unsigned = i.take("WIDE", "MOV", "IADD", "SHL", "HI"), i.take("U32")
    extended = bool(i.take("X"))
    i.expect(len(i.args) == 4 + extended)
    if kind in ("WIDE", "HI"):
        i.expect(not extended and a.sign == c.sign == "")
        i.wide(e)
        signed = U32 if unsigned else I32

        def product(b: Any) -> Array:
            x, y = (t.get(b).astype(signed).astype(I64).astype(U64) for t in (a, c))
            return x * y + e.get64(b)

        if kind == "HI":
            return lambda b, m: d.put(b, m, product(b) >> U64(32))
        i.wide(d)
        return lambda b, m: d.put64(b, m, product(b))
    if extended:
        i.expect(e.sign != "-")
        return lambda b, m: d.put(b, m, a.get(b) * c.get(b) + e.get(b) + i.args[4].truth(b))
    return lambda b, m: d.put(b, m, a.get(b) * c.get(b) + e.get(b))


@opcode("LEA")
def _lea(i: Instruction) -> Run:
    """A shifted value, or with .HI the high word of a shifted pair, and another one."""
    d, carries = i.args[0], _predicates(i.args, 1)
    rest = i.args[1 + len(carries) :]
    high, extended, signed = (bool(i.take(name)) for name in ("HI", "X", "SX32"))
    a, c = rest[:2]
    minus = a.sign == "-"  # of the shifted value, as in a sum with carries
    i.expect(len(carries) <= 1 and not (minus and high) and not (extended and c.sign == "-"))
    upper = rest[2] if high and not signed else None
    shift = rest[3 if upper else 2]
    carry_in = rest[-1] if extended else None
    i.expect(
        len(rest) == 3 + bool(upper) + extended
        and shift.kind == "imm"
        and not (signed and not high)
    )
    n = U64(shift.index)

    def run(b: Any, m: Array) -> None:
        value = a.word(b) if minus else a.get(b)
        if not high:
            part = value << U32(shift.index)
            if minus:
                part = (~part).astype(U64) + U64(1)
        else:
            top = upper.get(b) if upper else (value.astype(I32) >> 31).astype(U32)
            part = join(value, top) << n >> U64(32)
        total = part.astype(U64) + c.addend(b)
        if carry_in is not None:
            total = total + carry_in.truth(b)
        for p in carries:
            p.put(b, m, total >> U64(32) != 0)
        d.put(b, m, total.astype(U32))

    return run


@opcode("SHF")
def _shf(i: Instruction) -> Run:
    """A shift of a pair, c above a; amounts past its width give what is left: nothing, or signs."""
    d, a, shift, c = i.args
    direction, kind, high = i.take("L", "R"), i.take("U32", "S32", "U64", "S64"), i.take("HI")
    width = 64 if kind in ("U64", "S64") else 32
    form = (direction, kind, high)
    i.expect(form in _SHIFTS)
    if width == 32:
        i.expect((c if direction == "L" else a).is_null)
    else:
        i.expect(direction == "R" or bool(high))

    def run(b: Any, m: Array) -> None:
        s = shift.get(b)
        most = width - 1 if kind in ("S32", "S64") else width
        n = np.minimum(s, U32(most)).astype(U64)
        if width == 32:
            value = (a if direction == "L" else c).get(b)
            value = value.astype(I32).astype(I64) if kind == "S32" else value.astype(U64)
        else:
            value = join(a.get(b), c.get(b))
            value = value.astype(I64) if kind == "S64" else value
        if direction == "R":
            moved = np.right_shift(value, np.minimum(n, U64(63)).astype(value.dtype))
        else:
            moved = np.left_shift(value, np.minimum(n, U64(63)))
        result = np.where(n > U64(63), value.dtype.type(0), moved).astype(U64)
        d.put(b, m, (result >> U64(32) if direction == "L" and high else result).astype(U32))

    return run


_SHIFTS = {
    ("L", "U32", ""), ("R", "U32", "HI"), ("R", "S32", "HI"),
    ("L", "U64", "HI"), ("R", "U64", ""), ("R", "S64", ""),
}  # fmt: skip


@opcode("LOP3")
def _lop3(i: Instruction) -> Run:
    i.expect(bool(i.take("LUT")))
    outs, rest = _predicates(i.args, 0), i.args[len(_predicates(i.args, 0)) :]
    d, a, c, e, table, p = rest
    function = _logic(table.index)

    def run(b: Any, m: Array) -> None:
        value = function(a.get(b), c.get(b), e.get(b))
        d.put(b, m, value)
        for out in outs:
            out.put(b, m, (value != 0) | p.truth(b))

    return run


@opcode("PLOP3")
def _plop3(i: Instruction) -> Run:
    i.expect(bool(i.take("LUT")))
    d, d2, a, c, e, table, table2 = i.args
    first, second = _logic(table.index), _logic(table2.index)

    def run(b: Any, m: Array) -> None:
        values = a.truth(b), c.truth(b), e.truth(b)
        one, two = first(*values), second(*values)
        d.put(b, m, one)
        d2.put(b, m, two)

    return run


def _logic(table: int) -> Callable[[Array, Array, Array], Array]:
    """Any function of three bits, by its truth table: bit 4a + 2b + c."""

    def function(a: Array, b: Array, c: Array) -> Array:
        total = a & ~a
        for k in range(8):
            if table >> k & 1:
                total = total | (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        return total

    return function


_TYPES = {"": I32, "S32": I32, "U32": U32, "S64": I64, "U64": U64}


def _typed(kind: str, b: Any, *operands: Operand) -> list[Array]:
    """Values as what a comparison takes them for."""
    is_wide = kind.endswith("64")
    return [(o.get64(b) if is_wide else o.get(b)).astype(_TYPES[kind]) for o in operands]


def _lower(p: Operand, b: Any, x: Array, y: Array) -> Array:
    return np.where(p.truth(b), np.minimum(x, y), np.maximum(x, y))


@opcode("VIMNMX", "IMNMX")
def _minmax(i: Instruction) -> Run:
    """The lower where the last predicate holds, else the higher."""
    kind = i.take("U32", "S32", "S64", "U64")
    if kind.endswith("64"):
        low, high, d, a, c, p, other = i.args
        i.expect(low.is_null and high.is_null and other.text in ("!PT", "!UPT"))
        i.wide(d, a, c)
        return lambda b, m: d.put64(b, m, _lower(p, b, *_typed(kind, b, a, c)).astype(U64))
    d, outs = i.args[0], _predicates(i.args, 1)
    a, c, p = i.args[1 + len(outs) :]
    i.expect(all(out.is_null for out in outs))
    return lambda b, m: d.put(b, m, _lower(p, b, *_typed(kind, b, a, c)))


@opcode("VIADDMNMX")
def _add_minmax(i: Instruction) -> Run:
    d, a, c, e, p = i.args
    kind = i.take("U32")

    def run(b: Any, m: Array) -> None:
        x, y, z = _typed(kind, b, a, c, e)
        d.put(b, m, _lower(p, b, x + y, z))

    return run


@opcode("FLO")
def _flo(i: Instruction) -> Run:
    """The place of the highest bit that is set."""
    i.expect(bool(i.take("U32")))
    d, a = i.args

    def run(b: Any, m: Array) -> None:
        value = a.get(b)
        place = np.zeros(value.shape, U32) - U32(1)
        for k in range(32):
            place = np.where(value >> U32(k) & U32(1), U32(k), place)
        d.put(b, m, place)

    return run


@opcode("POPC")
def _popc(i: Instruction) -> Run:
    d, a = i.args
    return lambda b, m: d.put(b, m, sum((a.get(b) >> U32(k)) & U32(1) for k in range(32)))


# --- Comparisons ----------------------------------------------------------------------------------

_COMPARE = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal,
}  # fmt: skip
_COMBINE = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


@opcode("ISETP")
def _isetp(i: Instruction) -> Run:
    """A comparison and a predicate; .EX: of high words, and where equal the last predicate."""
    compare, combine = _COMPARE[i.take(*_COMPARE)], _COMBINE[i.take(*_COMBINE)]
    kind, extended = i.take("U32", "S64", "U64"), bool(i.take("EX"))
    d, d2, a, c, p = i.args[:5]
    i.expect(len(i.args) == 5 + extended and not (extended and kind.endswith("64")))
    if kind.endswith("64"):
        i.wide(a, c)

    def run(b: Any, m: Array) -> None:
        x, y = _typed(kind, b, a, c)
        result = compare(x, y)
        if extended:
            result = np.where(x == y, i.args[5].truth(b), result)
        with_p = p.truth(b)
        one, two = combine(result, with_p), combine(~result, with_p)
        d.put(b, m, one)
        d2.put(b, m, two)

    return run


# --- Between the lanes of a warp ------------------------------------------------------------------


@opcode("SHFL")
def _shfl(i: Instruction) -> Run:
    mode = i.take("UP", "DOWN", "BFLY", "IDX")
    i.expect(bool(mode))
    p, d, a, offset, clamp = i.args
    lane = np.arange(WARP, dtype=I64)[None, :]

    def run(b: Any, m: Array) -> None:
        c, by = clamp.get(b).astype(I64), offset.get(b).astype(I64) & 31
        segment = c >> 8 & 31
        low, last = lane & segment, (lane & segment) | (c & 31 & ~segment)
        source = {
            "UP": lane - by,
            "DOWN": lane + by,
            "BFLY": lane ^ by,
            "IDX": low | (by & ~segment),
        }[mode]
        inside = source >= last if mode == "UP" else source <= last
        source = np.broadcast_to(np.where(inside, source, lane), m.shape)
        if (m & ~np.take_along_axis(m, source, axis=1)).any():
            b.fail("a lane reads from one that does not take part")
        value = np.take_along_axis(np.broadcast_to(a.get(b), m.shape), source, axis=1)
        d.put(b, m, value)
        p.put(b, m, np.broadcast_to(inside, m.shape))

    return run


@opcode("VOTE", "VOTEU")
def _vote(i: Instruction) -> Run:
    mode = i.take("ANY", "ALL")
    i.expect(bool(mode))
    *outs, p = i.args

    def run(b: Any, m: Array) -> None:
        votes = np.broadcast_to(p.truth(b), m.shape) & m
        bits = (votes * (U32(1) << np.arange(WARP, dtype=U32))).sum(axis=1, keepdims=True)
        holds = (
            votes.any(axis=1, keepdims=True)
            if mode == "ANY"
            else (votes == m).all(axis=1, keepdims=True)
        )
        for out in outs:
            out.put(b, m, bits if out.kind in ("R", "UR") else holds)

    return run


@opcode("REDUX", "CREDUX")
def _redux(i: Instruction) -> Run:
    kind = i.take("MIN", "OR", "SUM"), i.take("S32")
    d, a = i.args
    i.expect(kind in (("MIN", "S32"), ("OR", ""), ("SUM", ""), ("SUM", "S32")))

    def run(b: Any, m: Array) -> None:
        value = a.get(b)
        if kind[0] == "OR":
            d.put(b, m, np.bitwise_or.reduce(np.where(m, value, U32(0)), axis=1, keepdims=True))
        elif kind[0] == "SUM":
            d.put(b, m, np.where(m, value, U32(0)).sum(axis=1, keepdims=True, dtype=U32))
        else:
            low = np.where(m, value.astype(I32), np.iinfo(I32).max)
            d.put(b, m, low.min(axis=1, keepdims=True))

    return run


# --- Memory: the block does it --------------------------------------------------------------------


def _access(i: Instruction, *more: str) -> int:
    """The bytes of an access; notes whether it is a strong one."""
    i.take("E")
    i.strong = i.take("STRONG") == "STRONG"
    i.expect(not i.strong or i.take("GPU") == "GPU")
    return {"U8": 1, "": 4, "64": 8, "128": 16, "256": 32}[i.take("U8", "64", "128", *more)]


@opcode("LDG", "LD", "LDS")
def _load(i: Instruction) -> Run:
    size = _access(i, "256")
    wanted = 0xFF
    if size == 32:
        *outs, at = i.args[:3]
        i.expect(i.take("ENL2") == "ENL2" and len(i.args) in (3, 4))
        outs = outs[::-1]  # the second has what comes first
        if len(i.args) == 4:  # which words: they stand close together in the registers
            i.expect(i.args[3].kind == "imm")
            wanted = i.args[3].index
    else:
        *outs, at = i.args
        i.expect(len(outs) == 1)
    each = max(size // 4, 1) // len(outs)
    i.wide(*outs, words=each)
    space = "shared" if i.name == "LDS" else "global"
    places = [
        (word, d, place)
        for k, d in enumerate(outs)
        for place, word in enumerate(w for w in range(k * each, (k + 1) * each) if wanted >> w & 1)
    ]

    def run(b: Any, m: Array) -> None:
        values = b.load(space, at.get(b), size, m, i.strong)
        for word, d, place in places:
            d.put(b, m, values[word], place)
        if space == "global":
            b.later({d.index + place for _, d, place in places if not d.is_null}, m)

    return run


@opcode("STG", "ST", "STS")
def _store(i: Instruction) -> Run:
    at, value = i.args
    size = _access(i)
    words = max(size // 4, 1)
    i.wide(value, words=words)
    space = "shared" if i.name == "STS" else "global"
    return lambda b, m: b.store(
        space, at.get(b), [value.word(b, k) for k in range(words)], size, m, i.strong
    )


def _add64(old: int, new: int) -> int:
    return old + new & MASK64


def _or32(old: int, new: int) -> int:
    return old | new


def _min_s32(old: int, new: int) -> int:
    return min(old, new, key=lambda x: x ^ 2**31)


@opcode("ATOM", "ATOMG", "RED", "REDG", "ATOMS")
def _atomic(i: Instruction) -> Run:
    """The predicate, first, says that the address was one of global memory."""
    shared = i.name == "ATOMS"
    has_result = not i.name.startswith("RED")
    outs = [arg for arg in i.args[:2] if isinstance(arg, Operand)] if has_result else []
    at, *values = i.args[len(outs) :]
    if i.take("CAST"):
        i.expect(shared and i.take("SPIN") == "SPIN" and i.take("64") == "64" and len(values) == 2)
        i.wide(*values)
        (d,) = outs
        if d.kind == "R":
            i.wide(d)

        def cast(b: Any, m: Array) -> None:
            """Compare and store; what comes back is whether it was done."""
            compare, new = (value.get64(b) for value in values)
            done = b.compare_and_store(at.get(b), compare, new, m)
            d.put(b, m, done)
            if d.kind == "R":
                d.put(b, m, constant(0), 1)

        return cast
    kind = i.take("ADD", "OR", "MIN"), i.take("64", "S32")
    if not shared:
        i.expect(i.take("E") == "E" and i.take("STRONG") == "STRONG" and i.take("GPU") == "GPU")
    function = {("ADD", "64"): _add64, ("OR", ""): _or32, ("MIN", "S32"): _min_s32}[kind]
    (value,) = values
    size = 8 if kind[1] == "64" else 4
    d = outs[-1] if outs else None
    i.wide(*outs[-1:], value, words=size // 4)

    def run(b: Any, m: Array) -> None:
        new = value.get64(b) if size == 8 else value.get(b)
        old = b.atomic("shared" if shared else "global", at.get(b), new, size, function, m)
        if d is not None:
            (d.put64 if size == 8 else d.put)(b, m, old)
            for p in outs[:-1]:
                p.put(b, m, constant(1, bool))
            if not shared:
                b.later(d.registers(size // 4) | outs[0].registers(), m)

    return run


@opcode("QSPC")
def _qspc(i: Instruction) -> Run:
    """Does a generic address lie in shared memory? No pointer here does."""
    i.expect(i.take("E") == "E" and i.take("S") == "S" and i.args[1].is_null)
    return lambda b, m: i.args[0].put(b, m, constant(0, bool))


# --- Order and flow: the block does it ------------------------------------------------------------


@opcode("ACQBULK")
def _acqbulk(i: Instruction) -> Run:
    i.expect(not i.args)

    def run(b: Any, m: Array) -> None:
        b.waited |= m.any(axis=1)

    return run


@opcode("NOP", "PREEXIT", "ERRBAR", "CGAERRBAR", "ENDCOLLECTIVE", "YIELD")
def _nothing(i: Instruction) -> Run:
    i.expect(not i.args)
    return lambda b, m: None


@opcode("MEMBAR")
def _membar(i: Instruction) -> Run:
    i.expect(i.take("ALL", "SC") != "" and i.take("GPU") == "GPU")
    return lambda b, m: b.fence(m)


@opcode("CCTL")
def _cctl(i: Instruction) -> Run:
    i.expect(i.take("IVALL") == "IVALL")
    return lambda b, m: b.acquire(m)


@opcode("B2R")
def _b2r(i: Instruction) -> Run:
    """The result of the last barrier that had one."""
    i.expect(i.take("RESULT") == "RESULT")
    d, *p = i.args

    def run(b: Any, m: Array) -> None:
        d.put(b, m, constant(b.barrier_result))
        for out in p:
            out.put(b, m, constant(b.barrier_result != 0, bool))

    return run


@opcode("BSSY")
def _bssy(i: Instruction) -> Run:
    i.take("RECONVERGENT", "RELIABLE")
    index, target = i.args[0].index, i.target()
    i.expect(i.args[0].kind == "B")

    def run(b: Any, m: Array) -> None:
        b.member[index][m] = target

    return run


@opcode("BSYNC", "BREAK", "BAR", "EXIT", "NANOSLEEP", "WARPSYNC", "BRA", "CALL", "RET")
def _flow(i: Instruction) -> Run:
    """See Block._flow in machine.py, which knows these by `control`."""
    i.control = i.name
    if i.name in ("BSYNC", "BREAK"):
        i.take("RECONVERGENT", "RELIABLE")
        i.expect(i.args[-1].kind == "B")
    elif i.name == "BAR":
        i.take("DEFER_BLOCKING")
        i.control += "." + (i.take("SYNC") or i.take("RED") + "." + i.take("OR", "AND", "POPC"))
        i.expect(i.texts[0] == "0x0" and len(i.args) == 1 + ("RED" in i.control))
        i.expect(i.control in ("BAR.SYNC", "BAR.RED.OR", "BAR.RED.AND", "BAR.RED.POPC"))
    elif i.name == "WARPSYNC":
        i.take("ALL", "COLLECTIVE", "EXCLUSIVE")
    elif i.name == "BRA":
        kind = i.take("DIV", "CONV", "U")
        i.control += f".{kind}" if kind in ("DIV", "CONV") else ""
    elif i.name == "CALL":
        i.expect(i.take("REL") == "REL" and i.take("NOINC") == "NOINC")
        i.control = "BRA"
    elif i.name == "RET":
        i.expect(i.take("REL") == "REL" and i.take("NODEC") == "NODEC")
        parts = i.texts[0].split()
        i.args = [Operand(parts[0])]
        i.expect(parts[1:] == ["0x0"])
        i.wide(i.args[0])
    return lambda b, m: None
