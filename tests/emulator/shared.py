"""Shared memory of a CTA: bytes, which of them have been written, and typed views."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.errors import EmulatorError
from emulator.memory import UNITS
from emulator.parser import SHARED_START

RANK_SHIFT = 24  # an address in the cluster's window has the CTA's rank above its offset
OFFSET_MASK = (1 << RANK_SHIFT) - 1
_VALID = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class SharedMemory:
    """Bytes from 0; the first `SHARED_START` are reserved."""

    def __init__(self, size: int) -> None:
        self.size = SHARED_START + size
        self.bytes = np.full(-(-self.size // 16) * 16, 0xA5, np.uint8)
        self.valid = np.zeros(len(self.bytes), bool)
        self.views = {unit: self.bytes.view(t) for unit, t in UNITS.items()}
        self.valid_views = {unit: self.valid.view(t) for unit, t in UNITS.items()}
        self.shadow: Any = None

    def check_range(self, low: int, high: int) -> None:
        """Raise where the bytes low to high - 1 are not all usable."""
        if low < SHARED_START or high > self.size:
            raise EmulatorError(
                "out of bounds",
                f"shared bytes {low} to {high - 1}; usable are {SHARED_START} to {self.size - 1}",
            )

    def check_access(self, offsets: np.ndarray, size: int) -> None:
        """Raise where an access of `size` bytes is misaligned or outside."""
        if int(np.bitwise_or.reduce(offsets)) % size:
            worst = int(offsets[(offsets % size).argmax()])
            raise EmulatorError(
                "alignment", f"shared address {worst:#x} is no multiple of {size} bytes"
            )
        low, high = int(offsets.min()), int(offsets.max()) + size
        if low < SHARED_START or high > self.size:
            self.check_range(low, high)

    def places(self, offsets: np.ndarray, unit: int, count: int) -> np.ndarray:
        """Return indices into the view of `unit` bytes: one row of `count` for each offset."""
        first = (offsets // offsets.dtype.type(unit)).astype(np.intp)
        return first[:, None] + np.arange(count) if count > 1 else first[:, None]

    def gather(self, offsets: np.ndarray, unit: int, count: int) -> np.ndarray:
        """Read `count` units at each offset: [lanes, count]."""
        self.check_access(offsets, unit * count)
        places = self.places(offsets, unit, count)
        self.check_valid(places, unit)
        return self.views[unit][places]

    def check_valid(self, places: np.ndarray, unit: int) -> None:
        """Raise where a unit has a byte that nothing has written."""
        good = self.valid_views[unit][places] == _VALID[unit]
        if not good.all():
            place = int(np.atleast_1d(places)[~np.atleast_1d(good)][0]) * unit
            raise EmulatorError("uninitialised read", f"shared address {place:#x}")

    def scatter(self, offsets: np.ndarray, unit: int, values: np.ndarray) -> None:
        """Write [lanes, count] units."""
        self.check_access(offsets, unit * values.shape[1])
        places = self.places(offsets, unit, values.shape[1])
        self.views[unit][places] = values
        self.valid_views[unit][places] = _VALID[unit]
