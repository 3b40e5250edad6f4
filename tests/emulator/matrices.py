"""ldmatrix and stmatrix: matrices of 8 x 8 halves between shared memory and a warp's registers.

Lane 8 i + j has the address of row j of matrix i. Register i of lane t holds two halves of it, at
row t / 4, columns 2 (t % 4) and the next; transposed, rows and columns change places.
"""

from __future__ import annotations

import numpy as np

from emulator.errors import EmulatorError
from emulator.link import Link, Step, op
from emulator.operands import Operand, Register
from emulator.spaces import Access

_MATRIX = r"\.sync\.aligned\.m8n8\.x(?P<x>[124])(?P<trans>\.trans)?\.shared(::cta)?\.b16"
_LANE = np.arange(32)
_MAJOR, _MINOR = _LANE >> 2, 2 * (_LANE & 3)


@op(rf"stmatrix{_MATRIX}", converges=True)
def store_matrix(c: Link, m, target: Operand, source: Operand) -> Step:
    """Store matrices."""
    return _matrix(c, m, target, source, stores=True)


@op(rf"ldmatrix{_MATRIX}", converges=True)
def load_matrix(c: Link, m, d: Operand, source: Operand) -> Step:
    """Load matrices."""
    return _matrix(c, m, source, d, stores=False)


def _places(own: np.ndarray, matrix: int, *, transposed: bool) -> np.ndarray:
    """Return the addresses of each lane's accesses: a word, or two halves in two rows."""
    rows = own[8 * matrix : 8 * matrix + 8]
    if transposed:
        return np.stack([rows[_MINOR], rows[_MINOR + 1]]) + 2 * _MAJOR
    return (rows[_MAJOR] + 2 * _MINOR)[None, :]


def _matrix(c: Link, m, target: Operand, registers: Operand, *, stores: bool) -> Step:
    items, count, transposed = c.items(registers), int(m["x"]), bool(m["trans"])
    if len(items) != count or any(not isinstance(x, Register) for x in items):
        raise c.unknown(f"{count} registers are expected")
    address, unit = c.address(target), 2 if transposed else 4
    values = [c.read(x, "u32") for x in items]
    access = Access(c.group, "shared", "plain")

    def run() -> None:
        for warp in c.active_warps():
            lanes = np.arange(32 * warp, 32 * warp + 32)
            own = address()[lanes]
            if (own[: 8 * count] % 16).any():
                raise EmulatorError("alignment", "matrix rows must be multiples of 16 bytes")
            for matrix, value in enumerate(values):
                places = _places(own, matrix, transposed=transposed)
                halves = value[lanes].view(f"u{unit}").reshape(32, -1)
                for half, where in enumerate(places):
                    if stores:
                        access.store(where, lanes, halves[:, half : half + 1].copy())
                    else:
                        halves[:, half] = access.load(where, lanes, unit, 1)[:, 0]
                if not stores:
                    value[lanes] = halves.view(np.uint32)[:, 0]

    return run
