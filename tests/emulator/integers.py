"""Integer arithmetic, logic, shifts, comparisons, selection and moves."""

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


def width(type_name: str) -> int:
    """Return the bits of a type."""
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
    return f"{type_name[0]}{2 * width(type_name)}"


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
    kind, bits = m["t"], width(m["t"])
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


@op(r"setp\.(?P<f>eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(\.(?P<g>and|or|xor))?\.(?P<t>[usb](16|32|64))")
def compare(c: Link, m, d: Operand, a: Operand, b: Operand, third: Operand | None = None) -> Step:
    """Compare integers, and combine with a predicate; p|q also stores the complement."""
    kind = m["t"]
    if m["f"] in ("lo", "ls", "hi", "hs"):
        kind = f"u{width(kind)}"
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
