"""A warpgroup's tile of scores in registers, as wgmma leaves it: 64 rows, two of them in a thread.

A row lies in the four neighbouring lanes of a quad, each with every fourth pair of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from sparse_atten.cute_kernels.common import ptx

COLUMNS = 128


def columns(r: int) -> list[int]:
    """List this thread's elements of its row r, 0 or 1, of an accumulator."""
    return [4 * n + 2 * r + c for n in range(COLUMNS // 8) for c in range(2)]


def over_quad(combine: Callable[[Float32, Float32], Any], value: Float32) -> Float32:
    """Combine what the four lanes of a row hold; each gets the result."""
    for offset in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


def pack(s: Any, p: Any, dtype: type) -> None:
    """Round P, in S's place, to the operand of the next MMA: both hold a row in one order."""
    words = cute.recast_tensor(p, Int32)
    for i in range(cute.size(words)):
        words[i] = ptx.pack(s[2 * i], s[2 * i + 1], dtype)


@cute.jit
def reciprocal(total: Float32) -> Float32:
    """Return 1 / total, 0 for 0."""
    factor = Float32(0.0)
    if total != 0.0:
        factor = cute.arch.rcp_approx(total)
    return factor
