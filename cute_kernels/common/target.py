"""The GPU that a kernel is built for or runs on: the one place that asks the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled and planned for.

    Parameters
    ----------
    arch : str
        What the compiler is told, with the suffix of the architecture-specific features.
    num_sms : int
        Multiprocessors; bounds the grid of a statically scheduled persistent kernel.
    """

    arch: str = "sm_100a"
    num_sms: int = 148

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability."""
        digits = self.arch.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    @property
    def smem_limit(self) -> int:
        """Dynamic shared memory that a CTA can have, bytes (227 KiB on sm_90 to sm_103)."""
        return 227 * 1024

    @property
    def registers(self) -> int:
        """32-bit registers of a multiprocessor."""
        return 65536

    @property
    def tmem_columns(self) -> int:
        """32-bit columns of tensor memory, 0 where there is none."""
        return 512 if self.arch.startswith("sm_10") else 0


@dataclass(frozen=True)
class Product:
    """A GPU with the figures of its data sheet.

    Parameters
    ----------
    name : str
    target : Target
    tensor_flops : float
        Dense bf16 / fp16 tensor-core rate, FLOP/s.
    bandwidth : float
        Device-memory bandwidth, bytes/s.
    """

    name: str
    target: Target
    tensor_flops: float
    bandwidth: float


H200 = Product("H200", Target("sm_90a", 132), 989e12, 4.8e12)
B200 = Product("B200", Target("sm_100a", 148), 2250e12, 8.0e12)
B300 = Product("B300", Target("sm_103a", 148), 2500e12, 8.0e12)
PRODUCTS = {product.name: product for product in (H200, B200, B300)}


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for any other device."""
    target = target_of(device)
    return None if target is None else target.capability


def target_of(device: torch.device) -> Target | None:
    """Ask a CUDA device what it is; None for any other device."""
    return _ask(device) if device.type == "cuda" else None


def product_of(device: torch.device) -> Product | None:
    """Figures of the device's architecture; None where none are known."""
    target = target_of(device)
    return next((p for p in PRODUCTS.values() if target and p.target.arch == target.arch), None)


@cache
def _ask(device: torch.device) -> Target:
    properties = torch.cuda.get_device_properties(device)
    return Target(f"sm_{properties.major}{properties.minor}a", properties.multi_processor_count)
