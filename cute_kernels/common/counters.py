"""Counters in device memory that kernels draw work items from, and leave at 0.

Launches on one stream follow one another, so a stream needs one counter. A launch that a CUDA graph
captures gets one of its own, since the graph may run beside the stream that it was captured on.
"""

from __future__ import annotations

import threading

import torch

_COUNT = 1 << 14  # counters of a block


class _Counters:
    """The counters of one device: blocks of zeros, and who has which."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._blocks: list[torch.Tensor] = []
        self._used = _COUNT
        self._of_stream: dict[int, int] = {}

    def of_stream(self, stream: int) -> int:
        if self._is_capturing():
            return self._of_capture()
        if stream not in self._of_stream:
            if self._used == _COUNT:
                self._blocks.append(torch.zeros(_COUNT, dtype=torch.int32, device=self._device))
                torch.cuda.current_stream(self._device).synchronize()  # other streams read it
                self._used = 0
            self._of_stream[stream] = self._next()
        return self._of_stream[stream]

    def _is_capturing(self) -> bool:
        if torch.cuda.current_device() == self._device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def _of_capture(self) -> int:
        if self._used < _COUNT:
            return self._next()
        # One of its own, which each replay sets to 0 first.
        self._blocks.insert(0, torch.zeros(1, dtype=torch.int32, device=self._device))
        return self._blocks[0].data_ptr()

    def _next(self) -> int:
        self._used += 1
        return self._blocks[-1].data_ptr() + 4 * (self._used - 1)


_counters: dict[int, _Counters] = {}
_lock = threading.Lock()


def counter(device: torch.device) -> int:
    """Return the address of the counter for a launch on the current stream of a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    with _lock:
        if index not in _counters:
            _counters[index] = _Counters(index)
        return _counters[index].of_stream(stream)
