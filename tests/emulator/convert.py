"""Conversions between types, and packed halves."""

from __future__ import annotations

import numpy as np

from emulator.link import Link, Step, op
from emulator.operands import Operand
from emulator.registers import DTYPES
from emulator.rounding import flush

_INT_MODES = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_INT = r"[us](?:8|16|32|64)"


def to_bf16(value: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Round float32 to bf16 bits (uint16): to nearest even, or towards zero."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    kept = bits >> np.uint32(16)
    if mode == "rn":
        kept &= np.uint32(1)
        kept += np.uint32(0x7FFF)
        kept += bits
        kept >>= np.uint32(16)
    result = kept.astype(np.uint16)
    missing = np.isnan(value)
    return np.where(missing, np.uint16(0x7FFF), result) if missing.any() else result


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Widen bf16 bits to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(value: np.ndarray) -> np.ndarray:
    """Round float32 to fp16 bits to nearest even; NaN becomes the canonical one."""
    result = value.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), result)


def from_f16(bits: np.ndarray) -> np.ndarray:
    """Widen fp16 bits to float32."""
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


@op(rf"cvt(?P<sat>\.sat)?\.(?P<d>{_INT})\.(?P<a>{_INT})")
def integer(c: Link, m, d: Operand, a: Operand) -> Step:
    """Extend or cut; the destination register may be wider than its type."""
    value = c.read(a, m["a"])
    if m["sat"]:
        info = np.iinfo(DTYPES[m["d"]])
        low, high = (
            max(info.min, np.iinfo(value.dtype).min),
            min(info.max, np.iinfo(value.dtype).max),
        )
        return _wider(c, d, m["d"], lambda: np.clip(value, low, high))
    return _wider(c, d, m["d"], lambda: value)


def _wider(c: Link, d: Operand, type_name: str, compute) -> Step:
    """Store an integer in a register that may be wider: it is extended by its own sign."""
    dtype = np.dtype(DTYPES[type_name])
    register = c.write(d, d.kind)
    if register.itemsize == dtype.itemsize:
        return c.assign(c.write(d, type_name), lambda: compute().astype(dtype))
    wide = c.write(d, f"{type_name[0]}{8 * register.itemsize}")
    return c.assign(wide, lambda: compute().astype(dtype).astype(wide.dtype))


@op(rf"cvt\.(?P<r>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<d>{_INT})\.(?P<a>f32|f64)")
def to_integer(c: Link, m, d: Operand, a: Operand) -> Step:
    """Round and clamp to the range; NaN becomes 0."""
    value, function = c.read(a, m["a"]), _INT_MODES[m["r"]]
    info = np.iinfo(DTYPES[m["d"]])

    def compute() -> np.ndarray:
        whole = function(value.astype(np.float64))
        inside = np.nan_to_num(np.clip(whole, float(info.min), float(info.max)), nan=0.0)
        # The largest 64-bit integers have no float64: clamp once more in integers.
        exact = np.where(inside >= float(info.max), 0.0, inside).astype(info.dtype)
        result = np.where(inside >= float(info.max), info.max, exact)
        return np.where(np.isnan(value), 0, result).astype(info.dtype)

    return _wider(c, d, m["d"], compute)


@op(rf"cvt\.rn\.(?P<d>f32|f64)\.(?P<a>{_INT})")
def to_float(c: Link, m, d: Operand, a: Operand) -> Step:
    """Round to nearest."""
    value, dtype = c.read(a, m["a"]), DTYPES[m["d"]]
    return c.assign(c.write(d, m["d"]), lambda: value.astype(dtype))


@op(r"cvt(\.(?P<r>rni|rzi|rmi|rpi))(?P<ftz>\.ftz)?\.f32\.f32")
def whole(c: Link, m, d: Operand, a: Operand) -> Step:
    """Round to an integer that stays a float."""
    value, function = c.read(a, "f32"), _INT_MODES[m["r"]]
    return c.assign(c.write(d, "f32"), lambda: function(flush(value) if m["ftz"] else value))


@op(r"cvt(?P<ftz>\.ftz)?\.sat\.f32\.f32")
def saturate(c: Link, m, d: Operand, a: Operand) -> Step:
    """Clamp to 0..1; NaN becomes 0."""
    value = c.read(a, "f32")

    def compute() -> np.ndarray:
        kept = np.nan_to_num(flush(value) if m["ftz"] else value, nan=0.0)
        return np.clip(kept, np.float32(0), np.float32(1))

    return c.assign(c.write(d, "f32"), compute)


@op(r"cvt(?P<ftz>\.ftz)?\.f32\.(?P<a>f16|bf16)")
def widen(c: Link, m, d: Operand, a: Operand) -> Step:
    """Exact."""
    value = c.read(a, "b16")
    function = from_f16 if m["a"] == "f16" else from_bf16
    return c.assign(c.write(d, "f32"), lambda: function(value))


@op(r"cvt\.f64\.f32")
def widen_double(c: Link, m, d: Operand, a: Operand) -> Step:
    """Exact."""
    value = c.read(a, "f32")
    return c.assign(c.write(d, "f64"), lambda: value.astype(np.float64))


@op(r"cvt\.rn(?P<ftz>\.ftz)?\.f32\.f64")
def narrow_double(c: Link, m, d: Operand, a: Operand) -> Step:
    """Round to nearest."""
    value = c.read(a, "f64")
    return c.assign(c.write(d, "f32"), lambda: value.astype(np.float32))


@op(r"cvt\.(?P<r>rn|rz)(?P<relu>\.relu)?\.(?P<d>f16|bf16)(?P<x>x2)?\.f32")
def narrow(c: Link, m, d: Operand, a: Operand, b: Operand | None = None) -> Step:
    """Round to 16 bits; of a pair, the first operand becomes the high half."""
    if m["r"] == "rz" and m["d"] == "f16":
        raise c.unknown("rz to f16 is not modelled")

    def half(value: np.ndarray) -> np.ndarray:
        if m["relu"]:
            value = np.where(value > 0, value, np.where(np.isnan(value), value, np.float32(0)))
        return to_f16(value) if m["d"] == "f16" else to_bf16(value, m["r"])

    high = c.read(a, "f32")
    if not m["x"]:
        return c.assign(c.write(d, "b16"), lambda: half(high))
    low = c.read(b, "f32")
    both = np.empty((2, c.lanes), np.float32)

    def compute() -> np.ndarray:
        both[0], both[1] = low, high
        halves = half(both).astype(np.uint32)
        halves[1] <<= np.uint32(16)
        return halves[0] | halves[1]

    return c.assign(c.write(d, "b32"), compute)
