"""The GPU that a kernel is built for or runs on: the one place that asks the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Target:
    """An architecture and the figures that planning needs.

    Attributes
    ----------
    name : str
        The product whose figures these are.
    capability : (int, int)
        CUDA compute capability.
    sm_count : int
        Streaming multiprocessors.
    tensor_flops : float
        Dense bf16 / fp16 tensor-core rate from the data sheet, FLOP/s.
    bandwidth : float
        Device-memory bandwidth from the data sheet, bytes/s.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    tensor_flops: float
    bandwidth: float


H200 = Target("H200", (9, 0), 132, 989e12, 4.8e12)
B200 = Target("B200", (10, 0), 148, 2250e12, 8.0e12)
B300 = Target("B300", (10, 3), 148, 2500e12, 8.0e12)
TARGETS = {target.name: target for target in (H200, B200, B300)}


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for any other device."""
    if device.type != "cuda":
        return None
    return _properties(device)[0]


def device_sm_count(device: torch.device) -> int | None:
    """Streaming multiprocessors of a CUDA device; None for any other device."""
    if device.type != "cuda":
        return None
    return _properties(device)[1]


def target_of(device: torch.device) -> Target | None:
    """Figures of the device's architecture; None where none are known."""
    capability = device_capability(device)
    return next((t for t in TARGETS.values() if t.capability == capability), None)


@cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
