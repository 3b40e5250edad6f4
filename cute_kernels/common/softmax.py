"""One row of scores in one thread's registers: its maximum, and its exponentials as packed P."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from sparse_atten.cute_kernels.common import ptx

FLOOR = -3.4e38  # a maximum before any key: finite, so that no difference of maxima is NaN
_CHAINS = 4  # independent chains of maxima


def row_max(scores: list[Float32]) -> Float32:
    """Return the largest score, at least `FLOOR`; a NaN is passed over."""
    best = [Float32(FLOOR)] * _CHAINS
    for i in range(0, len(scores), 2):
        chain = i // 2 % _CHAINS
        best[chain] = ptx.max3(best[chain], scores[i], scores[i + 1])
    return cute.arch.fmax(ptx.max3(*best[:3]), best[3])


def row_max2(scores: list[Float32]) -> Float32:
    """Return the largest score, at least `FLOOR`, two inputs at a time; a NaN is passed over."""
    best = [Float32(FLOOR)] * 2
    for i, score in enumerate(scores):
        best[i % 2] = cute.arch.fmax(best[i % 2], score)
    return cute.arch.fmax(best[0], best[1])


@cute.jit
def mask_lead(lanes: Int32, column: cutlass.Constexpr, lead: Int32) -> None:
    """Overwrite the first `lead` scores of 32 rows in tensor memory with -inf, from `column`."""
    minus_inf = [-Float32.inf] * 16
    address = lanes
    end = lanes + lead
    while address + 16 <= end:
        ptx.tmem_store(address, column, minus_inf)
        address += 16
    for width in (8, 4, 2, 1):
        if (lead & width) != 0:
            ptx.tmem_store(address, column, minus_inf[:width])
            address += width
    cute.arch.fence_view_async_tmem_store()


def exponentials(
    scores: list[Float32], scale: Float32, m_log2: Float32, sums: tuple, *, cubic: list[bool]
) -> tuple[list[Float32], tuple]:
    """Return 2^(scores * scale - m_log2), and `sums` with the two halves of each pair added.

    Parameters
    ----------
    scores : list of Float32
        Raw scores.
    scale, m_log2 : Float32
        softmax_scale * log2(e), and the row's reference maximum in the log2 domain.
    sums : (Float32, Float32)
        Partial row sums, taken before P is rounded.
    cubic : list of bool
        For each pair of columns whether the FMA pipe computes it.
    """
    values: list[Float32] = []
    for i in range(0, len(scores), 2):
        pair = (scores[i], scores[i + 1])
        x = cute.arch.fma_packed_f32x2(pair, (scale, scale), (-m_log2, -m_log2))
        p = ptx.exp2_cubic(*x) if cubic[i // 2] else (ptx.exp2(x[0]), ptx.exp2(x[1]))
        sums = cute.arch.add_packed_f32x2(sums, p)
        values += p
    return values, sums


def scaled(values: list[Float32], factor: Float32) -> list[Float32]:
    """Multiply values by one factor, two at a time."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return [x for pair in pairs for x in cute.arch.mul_packed_f32x2(pair, (factor, factor))]


def packed(values: list[Float32], dtype: type) -> list[Int32]:
    """Round values to `dtype`, two in a word."""
    return [ptx.pack(a, b, dtype) for a, b in zip(values[::2], values[1::2], strict=True)]
