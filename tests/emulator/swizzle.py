"""Matrices in shared memory: swizzles, and where a matrix descriptor says that elements lie.

Swizzles permute 16-byte units by XOR on absolute shared addresses, after the linear address is
formed, so that a step along K inside a swizzled row is a plain addition. Sources: PTX ISA, tensor
core matrix descriptors and canonical layouts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from emulator.errors import EmulatorError

PERIOD = 1024  # bytes after which every swizzle repeats


def swizzled(addresses: np.ndarray, width: int) -> np.ndarray:
    """Permute byte addresses under a swizzle of 0 (none), 32, 64 or 128 bytes."""
    if width == 0:
        return addresses
    return addresses ^ ((addresses >> 3) & (width - 16))


class Matrix(NamedTuple):
    """A matrix descriptor, decoded: bytes, swizzle width, and strides in bytes."""

    start: int
    leading: int
    stride: int
    width: int


_WIDTHS_SM100 = {0: 0, 2: 128, 4: 64, 6: 32}
_WIDTHS_SM90 = {0: 0, 1: 128, 2: 64, 3: 32}


def decode(descriptor: int, *, wgmma: bool = False) -> Matrix:
    """Decode the 64 bits of a tcgen05 or wgmma matrix descriptor.

    Raises
    ------
    EmulatorError
        A field is illegal, or stands for a form that is not modelled.
    """
    if wgmma:
        layout, fixed, reserved = descriptor >> 62 & 3, 0, descriptor >> 52 & 0x3FF
        widths = _WIDTHS_SM90
    else:
        layout, fixed = descriptor >> 61 & 7, descriptor >> 46 & 7
        reserved, widths = descriptor >> 52 & 0x1FF, _WIDTHS_SM100
        if fixed != 1:
            raise EmulatorError(
                "descriptor", f"{descriptor:#018x}: bits 46-48 must be 1, got {fixed}"
            )
    if reserved or descriptor >> 14 & 3 or descriptor >> 30 & 3:
        raise EmulatorError("descriptor", f"{descriptor:#018x}: reserved bits are set")
    if layout not in widths:
        raise EmulatorError("descriptor", f"{descriptor:#018x}: layout {layout} is not modelled")
    if descriptor >> 49 & 7:
        raise EmulatorError("descriptor", f"{descriptor:#018x}: a base offset is not modelled")
    return Matrix(
        (descriptor & 0x3FFF) << 4,
        (descriptor >> 16 & 0x3FFF) << 4,
        (descriptor >> 32 & 0x3FFF) << 4,
        widths[layout],
    )


@functools.lru_cache(maxsize=1024)
def _places(
    matrix: Matrix, rows: int, columns: int, element: int, *, transposed: bool
) -> np.ndarray:
    """Return the swizzled byte addresses [rows, columns] for a start inside one period."""
    row = np.arange(rows)[:, None]
    column = np.arange(columns)[None, :]
    width = matrix.width
    if not transposed:  # K-major: a row of the swizzle's width is contiguous along K
        byte = column * element
        if width:
            linear = row % 8 * width + row // 8 * matrix.stride + byte
        else:
            linear = row % 8 * 16 + row // 8 * matrix.stride
            linear = linear + byte // 16 * matrix.leading + byte % 16
    else:  # MN-major: contiguous along the rows
        byte = row * element
        if width:
            linear = byte % width + byte // width * matrix.leading
            linear = linear + column % 8 * width + column // 8 * matrix.stride
        else:
            linear = byte % 16 + byte // 16 * matrix.stride
            linear = linear + column % 8 * 16 + column // 8 * matrix.leading
    return swizzled(linear + matrix.start, width)


@functools.lru_cache(maxsize=1024)
def _units(matrix: Matrix, rows: int, columns: int, *, transposed: bool) -> np.ndarray:
    """Return the 16-byte units of a matrix of 16-bit elements, for a start inside one period."""
    return np.unique(_places(matrix, rows, columns, 2, transposed=transposed) & ~15)


def units_of(matrix: Matrix, rows: int, columns: int, *, transposed: bool) -> np.ndarray:
    """Return the addresses of the 16-byte units that 16-bit elements [rows, columns] fill."""
    base = matrix.start & ~(PERIOD - 1)
    inside = matrix._replace(start=matrix.start - base)
    return _units(inside, rows, columns, transposed=transposed) + base


def addresses(
    matrix: Matrix, rows: int, columns: int, *, transposed: bool, element: int = 2
) -> np.ndarray:
    """Return the byte addresses of the elements [rows, columns] (columns run along K)."""
    base = matrix.start & ~(PERIOD - 1)
    inside = matrix._replace(start=matrix.start - base)
    return _places(inside, rows, columns, element, transposed=transposed) + base
