"""The emulator's tables against independent derivations.

Layouts are derived here from the canonical layouts of the PTX ISA as nested shapes and strides, and
fragments from the order of bits in a thread's index, not from the formulas of the emulator.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulator.errors import EmulatorError
from emulator.mma import accumulate, decode_shape
from emulator.swizzle import Matrix, addresses, decode, swizzled
from emulator.tmem import fragment
from emulator.wgmma import accumulator, operand_a


def layout(coordinate: int, shape: tuple, stride: tuple) -> int:
    """Offset of a coordinate in a nested layout: the first mode runs fastest."""
    offset = 0
    for extent, step in zip(shape, stride, strict=True):
        if isinstance(extent, tuple):
            inner = int(np.prod(extent))
            offset += layout(coordinate % inner, extent, step)
            coordinate //= inner
        else:
            offset += coordinate % extent * step
            coordinate //= extent
    return offset


def xor_swizzle(address: int, width: int) -> int:
    """Bits 4.. of an address are XORed with those from 7 on, as many as log2(width / 16)."""
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[width]
    for i in range(bits):
        if address >> (7 + i) & 1:
            address ^= 1 << (4 + i)
    return address


@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_swizzle(width):
    at = np.arange(0, 4096, 16)
    assert swizzled(at, width).tolist() == [xor_swizzle(int(a), width) for a in at]
    assert sorted(swizzled(at, width)) == at.tolist()


T = 8  # 16-bit elements in 16 bytes


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("start", [0x2000, 0x2020])
def test_k_major_layout(width, start):
    """((8, m), (T, w)) : ((w T, SBO), (1, T)) in elements."""
    units, sbo = width // 16, 8 * width
    matrix = Matrix(start, 16, sbo, width)
    found = addresses(matrix, 64, 16, transposed=False)
    for row, column in itertools.product(range(64), range(16)):
        element = layout(row, (8, 8), (units * T, sbo // 2)) + layout(column, (T, 2), (1, T))
        assert found[row, column] == xor_swizzle(start + 2 * element, width)


def test_k_major_layout_without_swizzle():
    """((8, m), (T, 2)) : ((T, SBO), (1, LBO))."""
    found = addresses(Matrix(0x400, 2048, 128, 0), 64, 16, transposed=False)
    for row, column in itertools.product(range(64), range(16)):
        element = layout(row, (8, 8), (T, 64)) + layout(column, (T, 2), (1, 1024))
        assert found[row, column] == 0x400 + 2 * element


@pytest.mark.parametrize("width", [32, 64, 128])
def test_mn_major_layout(width):
    """((T, w, m), (8, k)) : ((1, T, LBO), (w T, SBO))."""
    units, lbo, sbo = width // 16, 4096, 8 * width
    found = addresses(Matrix(0x1000, lbo, sbo, width), 128, 16, transposed=True)
    per_chunk = T * units
    for row, column in itertools.product(range(128), range(16)):
        element = layout(row, (T, units, 128 // per_chunk), (1, T, lbo // 2))
        element += layout(column, (8, 2), (units * T, sbo // 2))
        assert found[row, column] == xor_swizzle(0x1000 + 2 * element, width)


def test_mn_major_layout_without_swizzle():
    """((T, 1, m), (8, k)) : ((1, T, SBO), (T, LBO))."""
    found = addresses(Matrix(0x400, 256, 1024, 0), 64, 16, transposed=True)
    for row, column in itertools.product(range(64), range(16)):
        element = layout(row, (T, 8), (1, 512)) + layout(column, (8, 2), (T, 128))
        assert found[row, column] == 0x400 + 2 * element


def test_descriptor_fields():
    descriptor = 0x4000404000010000 | 0x12340 >> 4
    assert decode(descriptor) == Matrix(0x12340, 16, 1024, 128)
    assert decode(6 << 61 | 1 << 46 | 16 << 32 | 32 << 16 | 5) == Matrix(80, 512, 256, 32)
    assert decode(1 << 62 | 64 << 32 | 7, wgmma=True) == Matrix(112, 0, 1024, 128)


@pytest.mark.parametrize(
    "descriptor",
    [
        0x4000004000010000,  # version 0
        0x4002404000010000,  # a base offset
        0x2000404000010000,  # 128 bytes with 32-byte atoms
        0x4010404000010000,  # absolute leading dimension
    ],
)
def test_descriptors_that_are_refused(descriptor):
    with pytest.raises(EmulatorError, match="descriptor"):
        decode(descriptor)


def test_instruction_descriptor():
    shape = decode_shape(0x08400010, pair=False)
    assert (shape.m, shape.n, shape.formats) == (128, 256, (0, 0))
    shape = decode_shape(0x08210490 | 0x6000, pair=False)
    assert (shape.n, shape.formats, shape.transposed) == (128, (1, 1), (False, True))
    assert shape.negate == (True, True)
    for wrong in (0x08400000, 0x08400110, 0x04500010 | 1, 0x0C400010):
        with pytest.raises(EmulatorError, match="descriptor"):
            decode_shape(wrong, pair=False)


# Bits of (thread, register) that make up lane and column, lowest first: CUTLASS writes the same
# fragments as layouts of a thread-value pair. t0..t4 and r0.. are bits of thread and register.
FRAGMENTS = {
    "32x32b": ("t0 t1 t2 t3 t4", "r0 r1 r2 r3"),
    "16x64b": ("t2 t3 t4 t0", "t1 r0 r1 r2 r3"),
    "16x128b": ("t2 t3 t4 r0", "t0 t1 r1 r2 r3"),
    "16x256b": ("t2 t3 t4 r1", "r0 t0 t1 r2 r3"),
}


@pytest.mark.parametrize("shape", FRAGMENTS)
def test_fragments(shape):
    lane, column = fragment(shape, 4)
    for r, t in itertools.product(range(len(lane)), range(32)):
        bit = {f"t{i}": t >> i & 1 for i in range(5)} | {f"r{i}": r >> i & 1 for i in range(5)}
        want = [sum(bit[b] << i for i, b in enumerate(x.split())) for x in FRAGMENTS[shape]]
        assert [lane[r, t], column[r, t]] == want
    cells = set(zip(lane.ravel().tolist(), column.ravel().tolist(), strict=True))
    assert len(cells) == lane.size, "two registers stand for one cell"


def test_split_fragment():
    lane, column = fragment("16x32bx2", 4)
    assert lane[:, 5].tolist() == lane[:, 21].tolist() == [5] * 4
    assert column[:, 5].tolist() == [0, 1, 2, 3]


def test_wgmma_fragments():
    """Thread t holds rows t / 4 and t / 4 + 8, and pairs of columns from 2 (t % 4) on."""
    row, column = accumulator(64)
    owner = {(int(r), int(c)) for r, c in zip(row.ravel(), column.ravel(), strict=True)}
    assert owner == set(itertools.product(range(16), range(128)))
    assert (row[0, 5], column[0, 5]) == (1, 2)
    assert (row[2, 5], column[2, 5]) == (9, 2)
    assert (row[5, 7], column[5, 7]) == (1, 15)
    row, column = operand_a()
    cells = {(int(r), int(c)) for r, c in zip(row.ravel(), column.ravel(), strict=True)}
    assert cells == set(itertools.product(range(16), range(0, 16, 2)))
    assert (row[1, 0], column[1, 0], row[2, 0], column[2, 0]) == (8, 0, 0, 8)


def test_sums_are_exact_and_rounded_once():
    a = np.array([[2.0**12, 1.0, -(2.0**12), 2.0**-12]])
    b = np.array([[2.0**12, 1.0, 2.0**12, 2.0**-11]])
    d = np.array([[1.0]], np.float32)
    exact = 2.0 + 2.0**-23
    assert accumulate(a, b, d, truncate=False)[0, 0] == np.float32(exact)
    third = accumulate(np.array([[1.0, 2.0**-24]]), np.array([[1.0, 1.5]]), None, truncate=True)
    assert third[0, 0] == 1.0
    nearest = accumulate(np.array([[1.0, 2.0**-24]]), np.array([[1.0, 1.5]]), None, truncate=False)
    assert nearest[0, 0] == np.float32(1 + 2.0**-23)
