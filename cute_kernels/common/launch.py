"""What a launch is, as data: a kernel's grid, shared memory and parameters, without a GPU.

A kernel's `launch_plan` computes one from plain values. planned.py launches it; an emulator or a
static checker binds the compiled text to the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparse_atten.cute_kernels.common.steps import Address


@dataclass(frozen=True)
class View:
    """A tensor: its address, 0 where there is none, and its strides in elements."""

    address: Any  # an int, or the `Address` that each call gives
    strides: tuple[int, ...]


@dataclass(frozen=True)
class TensorMap:
    """A tiled TMA descriptor with 128-byte swizzle, dims innermost first.

    Parameters
    ----------
    address : int or Address
        Global address of element 0.
    dtype : str
        "bf16", "fp16" or "fp32".
    dims : tuple of int
        Extents in elements.
    strides : tuple of int
        Bytes between neighbours along every dim but the innermost, which is contiguous.
    box : tuple of int
        Elements that one instruction moves along each dim.
    """

    address: int | Address
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128

    def bind(self, bases: Sequence[int]) -> TensorMap:
        """Put the addresses of a call in."""
        address = self.address
        return replace(self, address=address.of(bases)) if isinstance(address, Address) else self


@dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    Parameters
    ----------
    grid, block, cluster : tuple of 3 int
    smem_bytes : int
        Dynamic shared memory of a CTA.
    parameters : tuple
        One value for each kernel parameter, in order: a `TensorMap`, an int (an address, too), a
        float, or None where the kernel does not read the parameter. An address that each call gives
        is an `Address`.
    programmatic : bool
        The launch may begin before the one ahead of it in the stream is over (griddepcontrol).
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    parameters: tuple[TensorMap | Address | int | float | None, ...]
    programmatic: bool = False

    def bind(self, bases: Sequence[int]) -> LaunchPlan:
        """Put the addresses of a call in."""
        values = (
            value.of(bases)
            if isinstance(value, Address)
            else value.bind(bases)
            if isinstance(value, TensorMap)
            else value
            for value in self.parameters
        )
        return replace(self, parameters=tuple(values))
