"""The device a kernel is compiled for: the one place that knows architectures and asks a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SMS_OF_B200 = 148


@dataclass(frozen=True)
class Target:
    """An architecture with its number of multiprocessors.

    Parameters
    ----------
    arch : str
        What the compiler is told, with the suffix of the architecture-specific features.
    num_sms : int
        Multiprocessors; bounds the grid of a statically scheduled persistent kernel.
    """

    arch: str = "sm_100a"
    num_sms: int = SMS_OF_B200

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


def target_of(device: torch.device) -> Target:
    """Ask a CUDA device what it is."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Target(f"sm_{major}{minor}a", sms)
