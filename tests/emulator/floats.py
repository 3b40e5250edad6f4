"""Floating-point arithmetic: float32, pairs of float32 in 64 bits, float64, special functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from emulator.integers import store_comparison
from emulator.link import Link, Step, op
from emulator.operands import Immediate, Operand, Register
from emulator.rounding import F32_TINY, exact_sum, flush, fma, rounded

_F64 = np.float64


def add(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Return a + b rounded once."""
    return a + b if mode == "rn" else rounded(exact_sum(a.astype(_F64), b.astype(_F64)), mode)


def subtract(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Return a - b rounded once."""
    return a - b if mode == "rn" else rounded(exact_sum(a.astype(_F64), -b.astype(_F64)), mode)


def multiply(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Return a * b rounded once."""
    if mode == "rn":
        return a * b
    product = np.multiply(a, b, dtype=_F64)
    return rounded((product, np.zeros_like(product)), mode)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """Return a * b + c rounded once."""
    if mode == "rn":
        return fma(a, b, c)
    return rounded(exact_sum(np.multiply(a, b, dtype=_F64), c.astype(_F64)), mode)


_ROUNDED = {"add": add, "sub": subtract, "mul": multiply, "fma": multiply_add, "mad": multiply_add}
_UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@op(
    r"(?P<f>add|sub|mul|fma|mad)(\.(?P<r>rn|rz|rm|rp))?(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.f32"
    r"(?P<x>x2)?"
)
def arithmetic(c: Link, m, d: Operand, *operands: Operand) -> Step:
    """One rounding; .ftz flushes operands and result, .sat clamps to 0..1 (NaN is 0)."""
    pairs = bool(m["x"])
    kind = "f32x2 lanes" if pairs else "f32"
    values = [_values(c, operand, pairs) for operand in operands]
    out = c.group.file.view(d.kind, d.index, kind) if pairs else c.write(d, kind)
    mode, name = m["r"] or "rn", m["f"]
    if len(operands) != (3 if name in ("fma", "mad") else 2):
        raise c.unknown("wrong number of operands")
    if mode == "rn" and name in _UFUNCS and not (m["ftz"] or m["sat"]) and not (pairs and c.masked):
        if c.mask is None:
            return partial(_UFUNCS[name], *values, out)
        if not pairs:
            return partial(_UFUNCS[name], *values, out, where=c.mask)
    function = _ROUNDED[name]

    def compute() -> np.ndarray:
        inputs = [flush(v) for v in values] if m["ftz"] else values
        result = function(*inputs, mode)
        if m["ftz"]:
            result = flush(result)
        return np.where(result > 0, np.minimum(result, 1), 0) if m["sat"] else result

    return c.assign(out, compute)


def _values(c: Link, operand: Operand, pairs: bool) -> np.ndarray:
    if not pairs:
        return c.read(operand, "f32")
    if isinstance(operand, Register):
        return c.group.file.view(operand.kind, operand.index, "f32x2 lanes")
    return c.read(operand, "b64").view(np.float32).reshape(c.lanes, 2)


@op(r"(?P<f>add|sub|mul|div)(\.rn)?\.f64|(?P<g>fma)\.rn\.f64")
def double(c: Link, m, d: Operand, *operands: Operand) -> Step:
    """float64 to nearest; fma is not modelled beyond two roundings, so it is refused."""
    if m["g"]:
        raise c.unknown("fma.f64 is not modelled")
    function = {**_UFUNCS, "div": np.divide}[m["f"]]
    return c.elementwise(function, c.write(d, "f64"), *(c.read(o, "f64") for o in operands))


@op(r"(?P<f>min|max)(?P<ftz>\.ftz)?(?P<nan>\.NaN)?\.(?P<t>f32|f64)")
def extreme(c: Link, m, d: Operand, *operands: Operand) -> Step:
    """Two or three operands; NaN is ignored, with .NaN it wins (as the canonical one)."""
    kind = m["t"]
    values = [c.read(o, kind) for o in operands]
    name = ("" if m["nan"] else "f") + m["f"]
    function = {"fmin": np.fmin, "fmax": np.fmax, "min": np.minimum, "max": np.maximum}[name]
    if len(values) == 2 and not m["ftz"] and not m["nan"]:
        return c.elementwise(function, c.write(d, kind), *values)

    def compute() -> np.ndarray:
        inputs = [flush(v) for v in values] if m["ftz"] else values
        result = function(inputs[0], inputs[1])
        for value in inputs[2:]:
            result = function(result, value)
        if m["nan"] and kind == "f32":
            bits = np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32))
            return bits.view(np.float32)
        return result

    return c.assign(c.write(d, kind), compute)


@op(r"(?P<f>neg|abs)(?P<ftz>\.ftz)?\.(?P<t>f32|f64)")
def sign(c: Link, m, d: Operand, a: Operand) -> Step:
    """Change the sign bit."""
    function = np.negative if m["f"] == "neg" else np.absolute
    value = c.read(a, m["t"])
    if not m["ftz"]:
        return c.elementwise(function, c.write(d, m["t"]), value)
    return c.assign(c.write(d, "f32"), lambda: flush(function(value)))


@op(r"copysign\.f32")
def copy_sign(c: Link, m, d: Operand, a: Operand, b: Operand) -> Step:
    """The sign of a with the size of b."""
    x, y = c.read(a, "f32"), c.read(b, "f32")
    return c.assign(c.write(d, "f32"), lambda: np.copysign(y, x))


_FUNCTIONS: dict[str, Callable] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@op(r"(?P<f>ex2|lg2|rcp|sqrt|rsqrt|sin|cos|tanh)\.approx(?P<ftz>\.ftz)?\.f32")
def approximate(c: Link, m, d: Operand, a: Operand) -> Step:
    """The exact value rounded: within the documented error of the approximation."""
    return _function(c, m, d, a)


@op(r"(?P<f>rcp|sqrt)\.rn(?P<ftz>\.ftz)?\.f32")
def correct(c: Link, m, d: Operand, a: Operand) -> Step:
    """Correctly rounded: float64 is wide enough for one rounding of these two."""
    return _function(c, m, d, a)


def _function(c: Link, m, d: Operand, a: Operand) -> Step:
    function, value = _FUNCTIONS[m["f"]], c.read(a, "f32")

    def compute() -> np.ndarray:
        result = function(value.astype(_F64)).astype(np.float32)
        if m["ftz"]:
            result[np.abs(result) < F32_TINY] *= np.float32(0)
        return result

    def flushed() -> np.ndarray:
        result = function(flush(value).astype(_F64)).astype(np.float32)
        return flush(result)

    # exp2 of a subnormal is 1 either way; the others see the difference.
    needs_flush = m["ftz"] and m["f"] != "ex2"
    return c.assign(c.write(d, "f32"), flushed if needs_flush else compute)


@op(r"div\.(?P<how>rn|full|approx)(?P<ftz>\.ftz)?\.f32")
def divide(c: Link, m, d: Operand, a: Operand, b: Operand) -> Step:
    """Correctly rounded, which the approximations allow."""
    x, y = c.read(a, "f32"), c.read(b, "f32")
    if not m["ftz"]:
        return c.elementwise(np.divide, c.write(d, "f32"), x, y)
    return c.assign(c.write(d, "f32"), lambda: flush(flush(x) / flush(y)))


_COMPARE: dict[str, Callable] = {
    "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


@op(
    r"setp\.(?P<f>eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(\.(?P<g>and|or|xor))?"
    r"(?P<ftz>\.ftz)?\.(?P<t>f32|f64)"
)
def compare(c: Link, m, d: Operand, a: Operand, b: Operand, third: Operand | None = None) -> Step:
    """Compare; the forms that end in u are true of NaN."""
    function, x, y = _COMPARE[m["f"]], c.read(a, m["t"]), c.read(b, m["t"])
    if m["ftz"] and not isinstance(b, Immediate):
        return store_comparison(c, m, d, lambda: function(flush(x), flush(y)), third)
    if m["ftz"]:
        return store_comparison(c, m, d, lambda: function(flush(x), y), third)
    return store_comparison(c, m, d, lambda: function(x, y), third)
