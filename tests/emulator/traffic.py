"""Bytes that a launch moves to and from global memory.

What is asked for: the 32-byte sectors that a load, store or atomic of a warp touches, and the bytes
of a TMA box that lie inside the tensor, once for all CTAs that get them. An L1 that holds nothing
asks the L2 for as much. What is touched: bytes that the launch reads before it has written them,
and bytes that it writes. Each of them passes between L2 and memory at least once if the L2 is empty
before the launch and flushed after it, so their number is a lower bound on the traffic of HBM.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from emulator.group import Group
    from emulator.memory import Segment

SECTOR = 32


class Traffic:
    """The counts of a launch.

    Attributes
    ----------
    work : dict of int to Counter
        Warp id -> `global_ld_bytes` and `global_st_bytes` of its sectors, `tma_ld_bytes` and
        `tma_st_bytes` of its boxes. An atomic reads and writes.
    """

    def __init__(self) -> None:
        self.work: dict[int, Counter[str]] = {}
        self._touched: dict[Segment, tuple[np.ndarray, np.ndarray]] = {}

    def sectors(
        self, group: Group, lanes: np.ndarray, where: tuple[Segment, np.ndarray], size: int, *names
    ) -> None:
        """Count accesses of `size` bytes at offsets of a segment; `names` are "ld", "st" or both.

        No access crosses a sector: those of up to 32 bytes are aligned to their size.
        """
        segment, offsets = where
        sectors = (segment.start + offsets) // SECTOR
        for warp in group.warps_of(lanes):
            mine = len(np.unique(sectors[lanes // 32 == warp]))
            for name in names:
                self._add(group.first_warp + warp, f"global_{name}_bytes", SECTOR * mine)
        self._touch(segment, offsets, size, names)

    def box(self, warp: int, where: tuple[Segment, np.ndarray], size: int, *names: str) -> None:
        """Count elements of `size` bytes that a TMA box moves."""
        segment, offsets = where
        for name in names:
            self._add(warp, f"tma_{name}_bytes", size * len(offsets))
        self._touch(segment, offsets, size, names)

    def _add(self, warp: int, name: str, amount: int) -> None:
        self.work.setdefault(warp, Counter())[name] += amount

    def _touch(self, segment: Segment, offsets: np.ndarray, size: int, names: tuple) -> None:
        if segment not in self._touched:
            shape = len(segment.memory)
            self._touched[segment] = np.zeros(shape, bool), np.zeros(shape, bool)
        read, written = self._touched[segment]
        cells = offsets[:, None] + np.arange(size)
        if "ld" in names:
            read[cells] |= ~written[cells]
        if "st" in names:
            written[cells] = True

    def touched(self) -> tuple[int, int]:
        """Return the bytes that were read before they were written, and those that were written."""
        pairs = self._touched.values()
        return (
            sum(int(np.count_nonzero(read)) for read, _ in pairs),
            sum(int(np.count_nonzero(written)) for _, written in pairs),
        )
