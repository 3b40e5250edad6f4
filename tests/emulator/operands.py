"""Operands of an instruction, as the parser resolves them."""

from __future__ import annotations

from dataclasses import dataclass, field

# Kinds of registers and the bytes of a lane.
REGISTER_BYTES = {"pred": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16}
SIZES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}


@dataclass(frozen=True)
class Register:
    """A virtual register; `index` counts the registers of its kind."""

    kind: str
    index: int
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class Immediate:
    """A constant as written; its type is the instruction's."""

    text: str


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable or parameter: its state space and offset there.

    Shared offsets start after the reserved bytes; dynamic shared memory follows all static one.
    """

    name: str
    space: str
    offset: int


@dataclass(frozen=True)
class Address:
    """[base + offset]."""

    base: Operand
    offset: int


@dataclass(frozen=True)
class TensorAddress:
    """[map, {coordinates}]."""

    base: Operand
    coordinates: tuple[Operand, ...]


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """a | b: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """!p."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """_: a result that nobody wants."""


@dataclass(frozen=True)
class Target:
    """A label: the index of the instruction behind it."""

    label: str
    index: int


Operand = (
    Register
    | Immediate
    | Special
    | Symbol
    | Address
    | TensorAddress
    | Vector
    | Pair
    | Not
    | Sink
    | Target
)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode with all modifiers, guard, operands and places.

    `source` is "file number:line" of the latest .loc.
    """

    index: int
    opcode: str
    guard: Register | None
    guard_negated: bool
    operands: tuple[Operand, ...]
    line: int
    text: str
    source: str = ""
    targets: tuple[int, ...] = ()  # of brx.idx
