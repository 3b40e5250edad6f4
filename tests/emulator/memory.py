"""Global, parameter and local memory: byte arrays at addresses, each access checked.

Generic addresses: shared memory, local memory and the parameter block lie in windows far above any
address of this process, global memory where the tensors are.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from emulator.errors import EmulatorError
from emulator.operands import Symbol

SHARED_BASE = 1 << 60
LOCAL_BASE = 1 << 61
PARAMETER_BASE = 1 << 62
_KNOWN: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_WINDOWS = (("param", PARAMETER_BASE), ("local", LOCAL_BASE), ("shared::cluster", SHARED_BASE))
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def window_of(address: int) -> tuple[str, int]:
    """Return the state space that a generic address points to, and where it begins."""
    return next((window for window in _WINDOWS if address >= window[1]), ("global", 0))


@dataclass(eq=False)
class Segment:
    """An object in global memory."""

    name: str
    base: int
    size: int
    memory: np.ndarray  # uint8, from `start`
    start: int  # base rounded down to 16
    written: np.ndarray | None = None  # bytes that the kernel wrote, where outputs are checked
    shadow: Any = None  # of the race detector
    views: dict[int, np.ndarray] = field(default_factory=dict)

    def view(self, unit: int) -> np.ndarray:
        """Return the memory as unsigned integers of `unit` bytes."""
        if unit not in self.views:
            length = len(self.memory) // unit * unit
            self.views[unit] = self.memory[:length].view(UNITS[unit])
        return self.views[unit]


def segment_at(name: str, base: int, size: int) -> Segment:
    """Make a segment of memory of this process."""
    start = base & ~15
    length = -(-(base + size - start) // 16) * 16
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(start))
    return Segment(name, base, size, raw, start)


class Memory:
    """All memory outside the CTAs."""

    def __init__(self, tensors: Iterable[torch.Tensor] | None, variables: dict[str, bytes]) -> None:
        self.starts: list[int] = []
        self.segments: list[Segment] = []
        # Every tensor of the process is legal: they are looked up when an address asks for one.
        self.generations = [0, -1, 1, 2] if tensors is None else []
        self.variables: dict[str, int] = {}
        self.on_new: Callable[[Segment], None] = lambda segment: None
        for i, tensor in enumerate(tensors or ()):
            self._add_storage(f"tensor {i} {tuple(tensor.shape)}", tensor)
        for name, data in variables.items():
            held = np.frombuffer(bytearray(data) + bytes(16), np.uint8)
            base = held.ctypes.data
            self.variables[name] = base
            segment = segment_at(f"variable {name}", base, len(data))
            segment.keep = held  # type: ignore[attr-defined]
            self._add(segment)

    def _add_storage(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and all(s.base != storage.data_ptr() for s in self.segments):
            self._add(segment_at(name, storage.data_ptr(), storage.nbytes()))

    def _add(self, segment: Segment) -> None:
        at = bisect.bisect_left(self.starts, segment.base)
        self.starts.insert(at, segment.base)
        self.segments.insert(at, segment)
        self.on_new(segment)

    def find(self, address: int) -> Segment | None:
        """Return the segment that holds an address."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at >= 0 and address < self.segments[at].base + self.segments[at].size:
            return self.segments[at]
        while self.generations:
            self._adopt(self.generations.pop(0))
            if (found := self.find(address)) is not None:
                return found
        return None

    def _adopt(self, generation: int) -> None:
        """Register live tensors: those that earlier launches met, then the collector's."""
        items = list(_KNOWN.values()) if generation < 0 else gc.get_objects(generation)
        for item in [x for x in items if type(x) is torch.Tensor]:
            if item.device.type == "cpu" and item.layout == torch.strided:
                self._add_storage(f"live tensor {tuple(item.shape)}", item)
                _KNOWN[id(item)] = item

    def segment_of(self, low: int, high: int) -> Segment:
        """Return the segment that holds the bytes low to high - 1."""
        segment = self.find(low)
        if segment is None or high > segment.base + segment.size:
            near = segment or self._nearest(low)
            place = f"; {near.name} ends {low - near.base - near.size} bytes before" if near else ""
            if segment:
                place = f": {segment.name} ends at byte {segment.size}, the access at "
                place += f"{high - segment.base}"
            raise EmulatorError("out of bounds", f"global address {low:#x}{place}")
        return segment

    def _nearest(self, address: int) -> Segment | None:
        at = bisect.bisect_right(self.starts, address) - 1
        return self.segments[at] if at >= 0 else None

    def symbol_address(self, symbol: Symbol) -> int:
        """Return the generic address of a variable or parameter."""
        if symbol.space == "param":
            return PARAMETER_BASE + symbol.offset
        if symbol.space == "local":
            return LOCAL_BASE + symbol.offset
        return self.variables[symbol.name] + symbol.offset

    # ---- access by lanes

    def split(self, addresses: np.ndarray, size: int) -> list[tuple[Segment, np.ndarray]]:
        """Return the segments that the accesses of `size` bytes fall in, with their places."""
        low, high = int(addresses.min()), int(addresses.max())
        if low % size or int(np.bitwise_or.reduce(addresses)) % size:
            raise EmulatorError("alignment", f"global addresses must be multiples of {size}")
        segment = self.find(low)
        if segment is not None and high + size <= segment.base + segment.size:
            return [(segment, np.arange(len(addresses)))]
        parts = []
        left = np.arange(len(addresses))
        while len(left):
            first = int(addresses[left[0]])
            segment = self.segment_of(first, first + size)
            inside = (addresses[left] >= np.uint64(segment.base)) & (
                addresses[left] <= np.uint64(segment.base + segment.size - size)
            )
            parts.append((segment, left[inside]))
            left = left[~inside]
        return parts
