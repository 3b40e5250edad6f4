"""Tensor memory: 128 lanes by 512 columns of 32 bits, its allocations, and fragments of a warp."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from emulator.errors import EmulatorError

LANES, COLUMNS = 128, 512
CELL_LANES = 16  # lanes that loads, stores and MMAs reach together
NUM_CELLS = LANES // CELL_LANES * COLUMNS


class TensorMemory:
    """The tensor memory of an SM, for the one CTA that runs there."""

    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.words = np.full((LANES, COLUMNS), 0x7FA5A5A5, np.uint32)
        self.valid = np.zeros((LANES, COLUMNS), bool)
        self.allocated: dict[int, int] = {}  # first column -> columns
        self.owned = np.zeros(COLUMNS, bool)
        self.may_allocate = True
        self.allocations = 0  # so far
        self.unpaired: int | None = None  # an allocation that the peer has not performed yet
        self.pair: int | None = None  # cta_group of all tcgen05 instructions
        self.shadow: Any = None

    def allocate(self, columns: int) -> int | None:
        """Return the first column of a new allocation; None: no room now."""
        if columns not in (32, 64, 128, 256, 512):
            raise EmulatorError(
                "tensor memory", f"allocations are a power of two in 32..512, got {columns}"
            )
        if not self.may_allocate:
            raise EmulatorError("tensor memory", "alloc after relinquish_alloc_permit")
        for start in range(0, COLUMNS, columns):
            if not self.owned[start : start + columns].any():
                self.owned[start : start + columns] = True
                self.allocated[start] = columns
                self.allocations += 1
                self.valid[:, start : start + columns] = False
                self.words[:, start : start + columns] = 0x7FA5A5A5
                return start
        return None

    def is_paired(self) -> bool:
        """Say whether the peer CTA has performed as many allocations, or there is none."""
        if self.pair != 2:
            return True
        peer = self.cta.cluster.ctas[self.cta.rank ^ 1].tmem
        return peer is not None and peer.allocations >= self.allocations

    def free(self, address: int, columns: int) -> None:
        """End an allocation."""
        if self.allocated.get(address) != columns:
            raise EmulatorError(
                "tensor memory",
                f"dealloc of {columns} columns at {address:#x}; allocated are {self.allocated}",
            )
        del self.allocated[address]
        self.owned[address : address + columns] = False

    def close(self) -> None:
        """Check that nothing is left at the end of the kernel."""
        if self.allocated:
            raise EmulatorError(
                "tensor memory", f"CTA {self.cta.index} ends without dealloc of {self.allocated}"
            )

    def check(self, column: int, count: int) -> None:
        """Raise where columns are outside all allocations."""
        inside = column >= 0 and column + count <= COLUMNS
        if not inside or not self.owned[column : column + count].all():
            raise EmulatorError(
                "tensor memory",
                f"columns {column} to {column + count - 1}; allocated are {self.allocated}",
            )

    def check_valid(self, lanes: slice, columns: slice) -> None:
        """Raise where a cell was never written."""
        good = self.valid[lanes, columns]
        if not good.all():
            lane, column = (int(i) for i in np.argwhere(~good)[0])
            raise EmulatorError(
                "uninitialised read",
                f"tensor memory lane {lane + (lanes.start or 0)}, column {column + columns.start}",
            )


def cells_of(lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the cells of the race detector that some lanes and columns lie in, each once."""
    return np.unique(lanes // CELL_LANES * COLUMNS + columns)


@functools.cache
def column_cells(rows: int, column: int, count: int) -> np.ndarray:
    """Return the cells of columns of a matrix of 128 rows, or of 64: 16 of each 32 lanes."""
    lanes = np.arange(0, LANES, CELL_LANES * LANES // rows)
    return cells_of(lanes[:, None], np.arange(column, column + count))


@functools.cache
def fragment(shape: str, repeat: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lane and column of register r of thread t: arrays [registers, 32] (PTX ISA tables)."""
    counts = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
    r = np.arange(counts[shape] * repeat)[:, None]
    t = np.arange(32)[None, :]
    lane, column = {
        "32x32b": (t + 0 * r, r + 0 * t),
        "16x64b": ((t >> 2) + 8 * (t & 1) + 0 * r, 2 * r + (t >> 1 & 1)),
        "16x128b": ((t >> 2) + 8 * (r & 1), (t & 3) + 4 * (r >> 1)),
        "16x256b": ((t >> 2) + 8 * (r >> 1 & 1), 2 * (t & 3) + (r & 1) + 8 * (r >> 2)),
        "16x32bx2": ((t & 15) + 0 * r, r + 0 * t),  # lanes 16-31: at the half's own column
    }[shape]
    return lane, column
