"""Parse a PTX module into kernels of resolved instructions.

Names are resolved in the scopes of their braces: registers become numbered registers of a kind,
labels the index of the instruction behind them, variables offsets in their state space. Text that
cannot be parsed raises ValueError with its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from emulator.operands import (
    SIZES,
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Target,
    TensorAddress,
    Vector,
)
from emulator.text import Statement, split_commas, statements

SHARED_START = 1024  # the first bytes of shared memory are reserved
_KINDS = {"pred": "pred", "b128": "b128"} | {
    name: f"b{8 * size}" for name, size in SIZES.items() if size in (2, 4, 8)
}
_IMMEDIATE = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)[uU]?$"
)
_NAME = re.compile(r"[A-Za-z_$%][\w$.]*$")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+)?(?:\.(?:global|const|local|shared)\s+)?"
    r"(?:\.align\s+\d+\s+)?([\w$%]+)\s*(?:\[(\d+)\])?$"
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(global|const|shared|local)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$%]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_OFFSET = re.compile(r"(.*?)\s*([+-])\s*(-?(?:0[xX][0-9a-fA-F]+|\d+))$", re.DOTALL)


@dataclass
class Parameter:
    """A kernel parameter: where it lies in the parameter block."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """A kernel: parameters, instructions, and the memory that it declares."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: frozenset[int] = frozenset()
    registers: dict[str, int] = field(default_factory=dict)  # kind -> how many
    shared_bytes: int = 0  # static, without the reserved bytes
    local_bytes: int = 0
    block: tuple[int, int, int] | None = None  # .reqntid
    cluster: tuple[int, int, int] | None = None  # .reqnctapercluster

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter block."""
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass
class Module:
    """All kernels of a text, its module variables (name -> bytes) and source files (by number)."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> Module:
    """Parse a module.

    Raises
    ------
    ValueError
        A statement that is not understood; the message has its line and text.
    """
    module = Module()
    shared: list[tuple[str, int, int]] = []  # of the module: name, alignment, size
    body: list[Statement] = []
    header: Statement | None = None
    depth = 0
    for item in statements(text):
        if item.kind == "header":
            header, body, depth = item, [], 0
        elif header is not None:
            depth += {"open": 1, "close": -1}.get(item.kind, 0)
            body.append(item)
            if item.kind == "close" and depth == 0:
                if ".entry" in header.text:
                    kernel = _KernelParser(module, shared, header).parse(body[1:-1])
                    module.kernels[kernel.name] = kernel
                header = None
        elif match := re.match(r'\.file\s+(\d+)\s+"([^"]*)"', item.text):
            module.files[match[1]] = match[2].rsplit("/", 1)[-1]
        elif _VARIABLE.match(item.text):
            space, alignment, size, name, value = variable(item)
            if space == "shared":
                shared.append((name, alignment, size))
            else:
                module.variables[name] = value
    return module


def variable(item: Statement) -> tuple[str, int, int, str, bytes]:
    """Return (space, alignment, size, name, initial bytes) of a declaration."""
    match = _VARIABLE.match(item.text)
    if match is None:
        raise ValueError(f"line {item.line}: cannot parse variable {item.text!r}")
    space, alignment, kind, name, dims, value = match.groups()
    unit = SIZES[kind]
    size = unit
    for extent in re.findall(r"\[(\d*)\]", dims):
        size *= int(extent or 0)
    data = bytearray(size)
    for i, part in enumerate(re.findall(r"[^{},\s]+", value or "")):
        if not _IMMEDIATE.match(part):
            raise ValueError(f"line {item.line}: cannot parse initial value {part!r}")
        bits = immediate_bits(part, kind) & ((1 << 8 * unit) - 1)
        data[i * unit : (i + 1) * unit] = bits.to_bytes(unit, "little")
    return space, int(alignment or unit), size, name, bytes(data)


def immediate_bits(text: str, kind: str) -> int:
    """Return the bits of an immediate of a type; integers may be negative."""
    import struct

    negative = text.startswith("-")
    digits = text.lstrip("+-").rstrip("uU")
    if digits[:2] in ("0f", "0F") and len(digits) == 10:
        bits = int(digits[2:], 16) ^ (negative << 31)
        if kind == "f64":
            (value,) = struct.unpack("<f", struct.pack("<I", bits))
            return struct.unpack("<Q", struct.pack("<d", value))[0]
        return bits
    if digits[:2] in ("0d", "0D") and len(digits) == 18:
        bits = int(digits[2:], 16) ^ (negative << 63)
        if kind == "f32":
            (value,) = struct.unpack("<d", struct.pack("<Q", bits))
            return struct.unpack("<I", struct.pack("<f", value))[0]
        return bits
    if re.search(r"[.eE]", digits) and not digits.lower().startswith("0x"):
        value = -float(digits) if negative else float(digits)
        code = "d" if kind == "f64" else "f"
        return int.from_bytes(struct.pack("<" + code, value), "little")
    value = int(digits, 16) if digits[:2] in ("0x", "0X") else int(digits)
    return -value if negative else value


class _KernelParser:
    def __init__(
        self, module: Module, shared: list[tuple[str, int, int]], header: Statement
    ) -> None:
        match = re.search(r"\.entry\s+([\w$%]+)\s*(?:\((.*?)\))?(.*)$", header.text, re.DOTALL)
        if match is None:
            raise ValueError(f"line {header.line}: cannot parse {header.text[:80]!r}")
        self.kernel = Kernel(match[1])
        self.module = module
        self.source = ""
        self.scopes: list[dict[str, object]] = [{}]
        self.ranges: list[dict[str, tuple[str, int]]] = [{}]
        self.dynamic: list[str] = []
        offset = 0
        for text in split_commas(match[2] or ""):
            offset = self._parameter(text, offset, header.line)
        for name, extents in re.findall(r"\.(reqntid|reqnctapercluster)\s+([\d, ]+)", match[3]):
            dims = [int(x) for x in extents.split(",")]
            value = (*dims, 1, 1)[:3]
            setattr(self.kernel, "block" if name == "reqntid" else "cluster", value)
        for name, alignment, size in shared:
            self._shared(name, alignment, size)

    def _parameter(self, text: str, offset: int, line: int) -> int:
        match = _PARAMETER.match(text.strip())
        if match is None:
            raise ValueError(f"line {line}: cannot parse parameter {text!r}")
        unit = SIZES[match[2]]
        alignment = int(match[1] or unit)
        offset = -(-offset // alignment) * alignment
        size = unit * int(match[4] or 1)
        self.kernel.parameters.append(Parameter(match[3], offset, size))
        self.scopes[0][match[3]] = Symbol(match[3], "param", offset)
        return offset + size

    def _shared(self, name: str, alignment: int, size: int) -> None:
        if size == 0:  # dynamic: after all static memory
            self.dynamic.append((name, alignment))
            return
        start = -(-self.kernel.shared_bytes // alignment) * alignment
        self.scopes[0][name] = Symbol(name, "shared", SHARED_START + start)
        self.kernel.shared_bytes = start + size

    # ---- statements

    def parse(self, body: list[Statement]) -> Kernel:
        """Resolve the statements of the body."""
        self._declare(body)
        scope_of_label = self._labels(body)
        path, counter, count = [0], 0, 0
        for item in body:
            if item.kind == "open":
                counter += 1
                path.append(counter)
                self.scopes.append({})
                self.ranges.append({})
            elif item.kind == "close":
                path.pop()
                self.scopes.pop()
                self.ranges.pop()
            elif item.kind == "statement":
                if item.text.startswith("."):
                    self._directive(item)
                    continue
                self.resolve_label = lambda name, path=tuple(path): _find(
                    scope_of_label, path, name
                )
                self.kernel.instructions.append(self._instruction(item, count))
                count += 1
        self.kernel.labels = frozenset(scope_of_label.values())
        return self.kernel

    def _declare(self, body: list[Statement]) -> None:
        """Place static shared memory first, so that dynamic memory is known to follow it."""
        for item in body:
            if item.kind == "statement" and item.text.startswith(".shared"):
                _, alignment, size, name, _ = variable(item)
                self._shared(name, alignment, size)
        for name, alignment in self.dynamic:
            start = SHARED_START + self.kernel.shared_bytes
            start = -(-start // alignment) * alignment
            self.scopes[0][name] = Symbol(name, "shared", start)
            self.kernel.shared_bytes = start - SHARED_START

    def _labels(self, body: list[Statement]) -> dict[tuple[tuple[int, ...], str], int]:
        found: dict[tuple[tuple[int, ...], str], int] = {}
        path, counter, count = [0], 0, 0
        self.tables: dict[str, tuple[str, ...]] = {}
        label = ""
        for item in body:
            if item.kind == "open":
                counter += 1
                path.append(counter)
            elif item.kind == "close":
                path.pop()
            elif item.kind == "label":
                label = item.text
                found[tuple(path), label] = count
            elif item.text.startswith(".branchtargets"):
                self.tables[label] = tuple(split_commas(item.text.split(None, 1)[1]))
            elif not item.text.startswith("."):
                count += 1
        return found

    def _directive(self, item: Statement) -> None:
        text = item.text
        if text.startswith(".reg"):
            self._registers(item)
        elif text.startswith(".loc") and not text.startswith(".local"):
            fields = text.split()
            self.source = f"{fields[1]}:{fields[2].rstrip(',')}"
        elif text.startswith(".local"):
            _, alignment, size, name, _ = variable(item)
            start = -(-self.kernel.local_bytes // alignment) * alignment
            self.scopes[-1][name] = Symbol(name, "local", start)
            self.kernel.local_bytes = start + size
        elif not text.startswith((".shared", ".pragma", ".branchtargets")):
            raise ValueError(f"line {item.line}: unknown directive {text!r}")

    def _registers(self, item: Statement) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", item.text, re.DOTALL)
        if match is None or match[1] not in _KINDS:
            raise ValueError(f"line {item.line}: cannot parse registers {item.text!r}")
        kind = _KINDS[match[1]]
        for name in split_commas(match[2]):
            numbered = re.match(r"([\w$%]+)<(\d+)>$", name)
            if numbered:
                self.ranges[-1][numbered[1]] = (kind, int(numbered[2]))
            else:
                self.scopes[-1][name] = self._new_register(kind, name)

    def _new_register(self, kind: str, name: str) -> Register:
        index = self.kernel.registers.get(kind, 0)
        self.kernel.registers[kind] = index + 1
        return Register(kind, index, name)

    # ---- instructions

    def _instruction(self, item: Statement, index: int) -> Instruction:
        text = " ".join(item.text.split())
        match = re.match(r"(?:@(!?)\s*([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
        if match is None:
            raise ValueError(f"line {item.line}: cannot parse {text!r}")
        guard = None
        if match[2]:
            guard = self._operand(match[2], item)
            if not isinstance(guard, Register) or guard.kind != "pred":
                raise ValueError(f"line {item.line}: the guard of {text!r} is no predicate")
        targets: tuple[int, ...] = ()
        opcode, rest = match[3], match[4]
        if opcode.startswith(("bra", "brx")):
            *values, label = split_commas(rest)
            if opcode.startswith("brx"):
                targets = tuple(self.resolve_label(name) for name in self.tables[label])
                operands = tuple(self._operand(part, item) for part in values)
            else:
                operands = (Target(label, self.resolve_label(label)),)
        else:
            operands = tuple(self._operand(part, item) for part in split_commas(rest))
        return Instruction(
            index, opcode, guard, match[1] == "!", operands, item.line, text, self.source, targets
        )

    def _operand(self, text: str, item: Statement) -> Operand:
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vector(tuple(self._operand(x, item) for x in split_commas(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip(), item)
        if text.startswith("!"):
            return Not(self._operand(text[1:].strip(), item))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), item), self._operand(second.strip(), item))
        if _IMMEDIATE.match(text):
            return Immediate(text)
        if (found := self._name(text)) is not None:
            return found
        match = _OFFSET.match(text)
        if match and isinstance(symbol := self._name(match[1]), Symbol):
            offset = int(match[3], 0) * (-1 if match[2] == "-" else 1)
            return Symbol(symbol.name, symbol.space, symbol.offset + offset)
        raise ValueError(f"line {item.line}: unknown operand {text!r} in {item.text!r}")

    def _address(self, text: str, item: Statement) -> Operand:
        parts = split_commas(text)
        if len(parts) > 1 and parts[1].startswith("{"):
            coordinates = self._operand(parts[1], item)
            return TensorAddress(self._operand(parts[0], item), coordinates.items)
        offset = 0
        match = _OFFSET.match(text)
        if match and match[1]:
            text, sign, digits = match.groups()
            offset = int(digits, 0) * (-1 if sign == "-" else 1)
        return Address(self._operand(text, item), offset)

    def _name(self, name: str) -> Operand | None:
        if not _NAME.match(name):
            return None
        numbered = re.match(r"([\w$%]*?[A-Za-z_$%])(\d+)$", name)
        for scope, ranges in zip(reversed(self.scopes), reversed(self.ranges), strict=True):
            if name in scope:
                return scope[name]
            if numbered and numbered[1] in ranges:
                kind, count = ranges[numbered[1]]
                if int(numbered[2]) < count:
                    scope[name] = self._new_register(kind, name)
                    return scope[name]
        if name in self.module.variables:
            return Symbol(name, "global", 0)
        if name == "WARP_SZ":
            return Immediate("32")
        return Special(name) if name.startswith("%") else None


def _find(labels: dict, path: tuple[int, ...], name: str) -> int:
    for depth in range(len(path), 0, -1):
        if (path[:depth], name) in labels:
            return labels[path[:depth], name]
    raise ValueError(f"unknown label {name!r}")
