"""Integer arithmetic, logic, shifts, bit fields, comparisons and selection."""

from __future__ import annotations

from functools import partial

import numpy as np

from emulator.link import Link, Step, op
from emulator.operands import Immediate, Operand, Pair
from emulator.registers import DTYPES

_SIMPLE = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _bits(type_name: str) -> int:
    return 8 * np.dtype(DTYPES[type_name]).itemsize


@op(r"(?P<f>add|sub|mul\.lo)\.(?P<t>[us](16|32|64))|(?P<g>min|max)\.(?P<u>[us](16|32|64))")
def simple(c: Link, m, d: Operand, a: Operand, b: Operand) -> Step:
    """Wrap, or compare."""
    kind = m["t"] or m["u"]
    return c.elementwise(
        _SIMPLE[m["f"] or m["g"]], c.write(d, kind), c.read(a, kind), c.read(b, kind)
    )


@op(r"(?P<f>min|max)\.relu\.(?P<t>s32)")
def relu(c: Link, m, d: Operand, a: Operand, b: Operand) -> Step:
    """The smaller or larger one, and 0 where that is negative."""
    x, y, function = c.read(a, m["t"]), c.read(b, m["t"]), _SIMPLE[m["f"]]
    return c.assign(c.write(d, m["t"]), lambda: np.maximum(function(x, y), 0))


@op(r"(?P<f>and|or|xor)\.(?P<t>b16|b32|b64|pred)")
def logic(c: Link, m, d: Operand, a: Operand, b: Operand) -> Step:
    """Bit by bit; predicates may be negated."""
    if m["t"] != "pred":
        return c.elementwise(
            _SIMPLE[m["f"]], c.write(d, m["t"]), c.read(a, m["t"]), c.read(b, m["t"])
        )
    x, y, function = c.predicate(a), c.predicate(b), _COMBINE[m["f"]]
    return c.assign(c.write(d, "pred"), lambda: function(x(), y()))


@op(r"not\.(?P<t>b16|b32|b64|pred)")
def invert(c: Link, m, d: Operand, a: Operand) -> Step:
    """Complement."""
    function = np.logical_not if m["t"] == "pred" else np.invert
    return c.elementwise(function, c.write(d, m["t"]), c.read(a, m["t"]))


@op(r"(?P<f>neg|abs)\.(?P<t>s(16|32|64))")
def sign(c: Link, m, d: Operand, a: Operand) -> Step:
    """Two's complement: the smallest number stays."""
    function = np.negative if m["f"] == "neg" else np.absolute
    return c.elementwise(function, c.write(d, m["t"]), c.read(a, m["t"]))


def product(a: np.ndarray, b: np.ndarray, part: str) -> np.ndarray:
    """Return a part of the double-width product: lo and hi as wide as the factors, or wide."""
    bits = 8 * a.itemsize
    if part == "lo":
        return a * b
    if bits < 64:
        kind = np.int64 if a.dtype.kind == "i" else np.uint64
        whole = a.astype(kind) * b.astype(kind)
        wide = {16: {"i": np.int32, "u": np.uint32}, 32: {"i": np.int64, "u": np.uint64}}
        return (whole >> kind(bits) if part == "hi" else whole).astype(
            a.dtype if part == "hi" else wide[bits][a.dtype.kind]
        )
    values = [(int(x) * int(y)) >> 64 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return np.array([v & (2**64 - 1) for v in values], np.uint64).view(a.dtype)


@op(r"mul\.(?P<p>hi|wide)\.(?P<t>[us](16|32|64))")
def multiply(c: Link, m, d: Operand, a: Operand, b: Operand) -> Step:
    """High half, or all of the product."""
    x, y = c.read(a, m["t"]), c.read(b, m["t"])
    out = _wide(m["t"]) if m["p"] == "wide" else m["t"]
    return c.assign(c.write(d, out), lambda: product(x, y, m["p"]))


@op(r"mad\.(?P<p>lo|hi|wide)\.(?P<t>[us](16|32|64))")
def multiply_add(c: Link, m, d: Operand, a: Operand, b: Operand, addend: Operand) -> Step:
    """A part of the product, plus an addend of the result's width."""
    x, y = c.read(a, m["t"]), c.read(b, m["t"])
    out = _wide(m["t"]) if m["p"] == "wide" else m["t"]
    z = c.read(addend, out)
    return c.assign(c.write(d, out), lambda: product(x, y, m["p"]) + z)


def _wide(type_name: str) -> str:
    return f"{type_name[0]}{2 * _bits(type_name)}"


def divide(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return quotient towards zero and remainder; dividing by 0 gives all ones and a."""
    if a.dtype.kind == "u":
        safe = np.where(b == 0, 1, b).astype(a.dtype)
        quotient = np.where(b == 0, np.invert(a.dtype.type(0)), a // safe)
    else:
        unsigned = np.dtype(f"u{a.itemsize}")
        x, y = np.absolute(a).view(unsigned), np.absolute(b).view(unsigned)
        size = (x // np.where(y == 0, 1, y).astype(unsigned)).view(a.dtype)
        quotient = np.where((a < 0) != (b < 0), -size, size)
        quotient = np.where(b == 0, a.dtype.type(-1), quotient)
    remainder = np.where(b == 0, a, a - quotient * b)
    return quotient.astype(a.dtype), remainder.astype(a.dtype)


@op(r"(?P<f>div|rem)\.(?P<t>[us](16|32|64))")
def division(c: Link, m, d: Operand, a: Operand, b: Operand) -> Step:
    """Quotient or remainder."""
    x, y, which = c.read(a, m["t"]), c.read(b, m["t"]), int(m["f"] == "rem")
    return c.assign(c.write(d, m["t"]), lambda: divide(x, y)[which])


@op(r"(?P<f>shl|shr)\.(?P<t>[usb](16|32|64))")
def shift(c: Link, m, d: Operand, a: Operand, amount: Operand) -> Step:
    """Amounts past the width shift everything out."""
    kind, bits = m["t"], _bits(m["t"])
    function = np.left_shift if m["f"] == "shl" else np.right_shift
    x, out = c.read(a, kind), c.write(d, kind)
    fill = bits - 1 if kind[0] == "s" and m["f"] == "shr" else None
    if isinstance(amount, Immediate) and 0 <= int(amount.text, 0) < bits:
        return c.elementwise(function, out, x, c.constant(amount.text, kind))
    by = c.read(amount, "u32")

    def compute() -> np.ndarray:
        inside = np.minimum(by, bits - 1).astype(x.dtype)
        value = function(x, inside)
        return value if fill is not None else np.where(by < bits, value, x.dtype.type(0))

    return c.assign(out, compute)


@op(r"shf\.(?P<f>[lr])\.(?P<mode>wrap|clamp)\.b32")
def funnel(c: Link, m, d: Operand, low: Operand, high: Operand, amount: Operand) -> Step:
    """Shift the 64 bits high:low; the left form returns the upper half, the right one the lower."""
    x, y, by = c.read(low, "u32"), c.read(high, "u32"), c.read(amount, "u32")

    def compute() -> np.ndarray:
        n = by & np.uint32(31) if m["mode"] == "wrap" else np.minimum(by, 32)
        both = y.astype(np.uint64) << np.uint64(32) | x
        if m["f"] == "r":
            return (both >> n.astype(np.uint64)).astype(np.uint32)
        shifted = np.where(n == 32, both << np.uint64(32), both << n.astype(np.uint64))
        return (shifted >> np.uint64(32)).astype(np.uint32)

    return c.assign(c.write(d, "u32"), compute)


@op(r"popc\.(?P<t>b32|b64)")
def population(c: Link, m, d: Operand, a: Operand) -> Step:
    """Bits that are set."""
    return (
        c.elementwise(np.bitwise_count, c.write(d, "u32"), c.read(a, m["t"]))
        if (c.mask is None)
        else c.assign(c.write(d, "u32"), partial(np.bitwise_count, c.read(a, m["t"])))
    )


def leading(value: np.ndarray) -> np.ndarray:
    """Return the position of the highest bit that is set, -1 for none."""
    x = value.astype(np.uint64)
    for step in (1, 2, 4, 8, 16, 32):
        x = x | x >> np.uint64(step)
    return np.bitwise_count(x).astype(np.int32) - 1


@op(r"clz\.(?P<t>b32|b64)")
def leading_zeros(c: Link, m, d: Operand, a: Operand) -> Step:
    """Zeros above the highest bit that is set."""
    x, bits = c.read(a, m["t"]), _bits(m["t"])
    return c.assign(c.write(d, "u32"), lambda: (bits - 1 - leading(x)).astype(np.uint32))


@op(r"bfind(?P<shift>\.shiftamt)?\.(?P<t>[us](32|64))")
def find_bit(c: Link, m, d: Operand, a: Operand) -> Step:
    """The highest bit that is set; for negative numbers, that is not."""
    x, bits = c.read(a, m["t"]), _bits(m["t"])

    def compute() -> np.ndarray:
        value = np.where(x < 0, ~x, x) if m["t"][0] == "s" else x
        at = leading(value.view(f"u{bits // 8}"))
        if m["shift"]:
            at = np.where(at < 0, -1, bits - 1 - at)
        return at.astype(np.int32).view(np.uint32)

    return c.assign(c.write(d, "u32"), compute)


@op(r"brev\.(?P<t>b32|b64)")
def reverse(c: Link, m, d: Operand, a: Operand) -> Step:
    """Reverse the bits."""
    x = c.read(a, m["t"])

    def compute() -> np.ndarray:
        octets = x.byteswap().view(np.uint8)
        return np.packbits(np.unpackbits(octets), bitorder="little").view(x.dtype)

    return c.assign(c.write(d, m["t"]), compute)


def _field(start: np.ndarray, length: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the shift and the mask of `length` bits (at most all)."""
    bits = 8 * dtype.itemsize
    n = np.minimum(length & np.uint32(0xFF), bits)
    ones = np.where(n >= bits, ~np.uint64(0), (np.uint64(1) << n.astype(np.uint64)) - np.uint64(1))
    return start & np.uint32(0xFF), ones


@op(r"bfe\.(?P<t>[us](32|64))")
def extract(c: Link, m, d: Operand, a: Operand, start: Operand, length: Operand) -> Step:
    """A bit field, sign extended for signed types."""
    bits = _bits(m["t"])
    x = c.read(a, f"u{bits}")
    at, n = c.read(start, "u32"), c.read(length, "u32")

    def compute() -> np.ndarray:
        shift_by, ones = _field(at, n, x.dtype)
        wide = x.astype(np.uint64)
        inside = np.minimum(shift_by, 63).astype(np.uint64)
        value = np.where(shift_by < bits, wide >> inside, np.uint64(0)) & ones
        if m["t"][0] == "s":  # the sign also stands for what lies past the highest bit
            left = np.uint64(bits) - np.minimum(shift_by, bits).astype(np.uint64)
            reach = np.where(left >= 64, ~np.uint64(0), (np.uint64(1) << left) - np.uint64(1))
            ones = ones & np.where(ones != 0, reach, ones)
            last = np.minimum(shift_by + (n & np.uint32(0xFF)), bits) - np.uint32(1)
            last = np.minimum(last, bits - 1).astype(np.uint64)
            negative = ((wide >> last) & np.uint64(1)).astype(bool) & (n & np.uint32(0xFF) != 0)
            value = np.where(negative, value | ~ones, value)
        return value.astype(x.dtype)

    return c.assign(c.write(d, f"u{bits}"), compute)


@op(r"bfi\.(?P<t>b32|b64)")
def insert(c: Link, m, d: Operand, a: Operand, b: Operand, start: Operand, length: Operand) -> Step:
    """B with a bit field of a at `start`."""
    x, y = c.read(a, m["t"]), c.read(b, m["t"])
    at, n = c.read(start, "u32"), c.read(length, "u32")
    bits = _bits(m["t"])

    def compute() -> np.ndarray:
        shift_by, ones = _field(at, n, x.dtype)
        inside = np.minimum(shift_by, 63).astype(np.uint64)
        place = np.where(shift_by < bits, ones << inside, np.uint64(0))
        value = (x.astype(np.uint64) << inside) & place
        return (value | (y.astype(np.uint64) & ~place)).astype(x.dtype)

    return c.assign(c.write(d, m["t"]), compute)


@op(r"prmt\.b32")
def permute(c: Link, m, d: Operand, a: Operand, b: Operand, selector: Operand) -> Step:
    """Pick four of eight bytes; bit 3 of a selector replicates the sign of its byte."""
    x, y, pick = c.read(a, "u32"), c.read(b, "u32"), c.read(selector, "u32")

    def compute() -> np.ndarray:
        both = (y.astype(np.uint64) << np.uint64(32)) | x
        octets = both.view(np.uint8).reshape(-1, 8)
        out = np.empty((len(x), 4), np.uint8)
        lanes = np.arange(len(x))
        for i in range(4):
            nibble = (pick >> np.uint32(4 * i)) & np.uint32(15)
            value = octets[lanes, nibble & np.uint32(7)]
            replicated = np.where(value & 0x80, 0xFF, 0).astype(np.uint8)
            out[:, i] = np.where(nibble & np.uint32(8), replicated, value)
        return out.view(np.uint32)[:, 0]

    return c.assign(c.write(d, "u32"), compute)


@op(r"lop3\.b32")
def lookup(c: Link, m, d: Operand, a: Operand, b: Operand, other: Operand, table: Operand) -> Step:
    """Any function of three bits, given by its table."""
    x, y, z = (c.read(o, "u32") for o in (a, b, other))
    rows = int(table.text, 0)

    def compute() -> np.ndarray:
        value = np.zeros_like(x)
        for row in range(8):
            if rows >> row & 1:
                value |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        return value

    return c.assign(c.write(d, "u32"), compute)


@op(r"setp\.(?P<f>eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(\.(?P<g>and|or|xor))?\.(?P<t>[usb](16|32|64))")
def compare(c: Link, m, d: Operand, a: Operand, b: Operand, third: Operand | None = None) -> Step:
    """Compare integers, and combine with a predicate; p|q also stores the complement."""
    kind = m["t"]
    if m["f"] in ("lo", "ls", "hi", "hs"):
        kind = f"u{_bits(kind)}"
    function, x, y = _COMPARE[m["f"]], c.read(a, kind), c.read(b, kind)
    if third is None and not isinstance(d, Pair):
        return c.elementwise(function, c.write(d, "pred"), x, y)
    return store_comparison(c, m, d, lambda: function(x, y), third)


def store_comparison(c: Link, m, d: Operand, compute, third: Operand | None) -> Step:
    """Store comparison op third, and its complement's combination where d is a pair."""
    first = d.first if isinstance(d, Pair) else d
    other = c.predicate(third) if third is not None else None
    combine = _COMBINE[m["g"]] if m["g"] else None
    if (combine is None) != (other is None):
        raise c.unknown("a combination needs a third operand")

    def both() -> tuple[np.ndarray, np.ndarray]:
        value = compute()
        if combine is None:
            return value, ~value
        extra = other()
        return combine(value, extra), combine(~value, extra)

    if not isinstance(d, Pair):
        return c.assign(c.write(first, "pred"), lambda: both()[0])
    outs = c.write(d.first, "pred"), c.write(d.second, "pred")
    mask = c.mask

    def run() -> None:
        for out, value in zip(outs, both(), strict=True):
            np.copyto(out, value, where=True if mask is None else mask)

    return run


@op(r"selp\.(?P<t>[usb](16|32|64)|f32|f64)")
def select(c: Link, m, d: Operand, a: Operand, b: Operand, p: Operand) -> Step:
    """A where p, else b."""
    x, y, choice = c.read(a, m["t"]), c.read(b, m["t"]), c.predicate(p)
    return c.assign(c.write(d, m["t"]), lambda: np.where(choice(), x, y))


@op(r"mov\.(?P<t>[usb](16|32|64)|f32|f64|pred)")
def move(c: Link, m, d: Operand, a: Operand) -> Step:
    """Copy, pack a vector into a register, or unpack one."""
    kind = m["t"]
    if hasattr(d, "items") or hasattr(a, "items"):
        return _pack(c, d, a)
    if kind[0] == "f":
        kind = "b32" if kind == "f32" else "b64"
        if isinstance(a, Immediate):
            return _fill(c, c.write(d, m["t"]), c.read(a, m["t"]))
    return _fill(c, c.write(d, kind), c.read(a, kind))


@op(r"mov\.b128")
def move_wide(c: Link, m, d: Operand, a: Operand) -> Step:
    """Pack or unpack two 64-bit words, or copy."""
    if hasattr(d, "items") or hasattr(a, "items"):
        return _pack(c, d, a)
    source = c.read(a, "b128")
    return c.assign(c.write(d, "b128"), lambda: source)


def _fill(c: Link, out: np.ndarray, value: np.ndarray) -> Step:
    if c.mask is None:
        return partial(np.copyto, out, value)
    return partial(np.copyto, out, value, where=c.mask)


def _pack(c: Link, d: Operand, a: Operand) -> Step:
    """Move between a register and a vector of its parts, low part first."""
    packs = hasattr(a, "items")
    parts, whole = (a.items, d) if packs else (d.items, a)
    bits = {"b32": 32, "b64": 64, "b128": 128}[whole.kind] // len(parts)
    row = c.read(whole, "b128" if whole.kind == "b128" else whole.kind)
    pieces = row.view(f"u{bits // 8}").reshape(c.lanes, len(parts))
    steps = []
    for i, part in enumerate(parts):
        piece = pieces[:, i]
        if packs:
            steps.append(_fill(c, piece, c.read(part, f"b{bits}")))
        elif type(part).__name__ != "Sink":
            steps.append(_fill(c, c.write(part, f"b{bits}"), piece))
    if len(steps) == 1:
        return steps[0]
    first, *rest = steps
    if len(rest) == 1:
        (second,) = rest

        def run_two() -> None:
            first()
            second()

        return run_two

    def run() -> None:
        for step in steps:
            step()

    return run
