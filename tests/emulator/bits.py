"""Bits of integers: counts, fields, permutations, tables."""

from __future__ import annotations

from functools import partial

import numpy as np

from emulator.integers import width
from emulator.link import Link, Step, op
from emulator.operands import Operand


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
    x, bits = c.read(a, m["t"]), width(m["t"])
    return c.assign(c.write(d, "u32"), lambda: (bits - 1 - leading(x)).astype(np.uint32))


@op(r"bfind(?P<shift>\.shiftamt)?\.(?P<t>[us](32|64))")
def find_bit(c: Link, m, d: Operand, a: Operand) -> Step:
    """The highest bit that is set; for negative numbers, that is not."""
    x, bits = c.read(a, m["t"]), width(m["t"])

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
    bits = width(m["t"])
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
    bits = width(m["t"])

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
