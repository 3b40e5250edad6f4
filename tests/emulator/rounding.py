"""Exact sums and products of float32 values, rounded once in any direction.

A value is a pair of float64 arrays (high, low) whose exact sum it is, low below half a unit of the
last place of high.
"""

from __future__ import annotations

import numpy as np

Exact = tuple[np.ndarray, np.ndarray]
_TIE_BITS = np.uint64((1 << 29) - 1)
_TIE = np.uint64(1 << 28)
_TINY = np.float64(2.0**-126)  # the smallest normal float32
F32_TINY = np.float32(2.0**-126)


def exact_sum(a: np.ndarray, b: np.ndarray) -> Exact:
    """Return a + b of float64 arrays without error."""
    high = a + b
    part = high - a
    low = (a - (high - part)) + (b - part)
    return high, np.where(np.isfinite(high), low, 0.0)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of float32 arrays, rounded to nearest even once."""
    product = np.multiply(a, b, dtype=np.float64)  # exact
    high = product + c
    bits = high.view(np.uint64) & _TIE_BITS
    size = np.abs(high)
    if not ((bits == _TIE) | ((size < _TINY) & (size > 0))).any():
        return high.astype(np.float32)
    return rounded(exact_sum(product, c.astype(np.float64)), "rn")


def rounded(value: Exact, mode: str) -> np.ndarray:
    """Round to float32: rn, rz, rm (down) or rp (up)."""
    high, low = value
    if mode == "rn":
        odd = (high.view(np.uint64) & np.uint64(1)) == 1
        direction = np.where(low > 0, np.inf, -np.inf)
        nudged = np.where((low != 0) & ~odd, np.nextafter(high, direction), high)
        return nudged.astype(np.float32)
    nearest = high.astype(np.float32)
    excess = (nearest.astype(np.float64) - high) - low  # > 0: nearest is above the exact value
    down = np.nextafter(nearest, np.float32(-np.inf))
    up = np.nextafter(nearest, np.float32(np.inf))
    lower = np.where(excess > 0, down, nearest)
    upper = np.where(excess < 0, up, nearest)
    if mode == "rm":
        return lower
    if mode == "rp":
        return upper
    return np.where(high + low < 0, upper, lower)


def flush(value: np.ndarray) -> np.ndarray:
    """Turn subnormal float32 values into zeros of the same sign."""
    return np.where(np.abs(value) < F32_TINY, np.copysign(np.float32(0), value), value)
