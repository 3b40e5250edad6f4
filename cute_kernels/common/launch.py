"""What a launch is, as data: a kernel's grid, shared memory and parameters, without a GPU.

A kernel's `launch_plan` computes one from the same values that its host function is given, so that
an emulator or a static checker can bind the compiled text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorMap:
    """A tiled TMA descriptor with 128-byte swizzle, dims innermost first.

    Parameters
    ----------
    address : int
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

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


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
        float, or None where the kernel does not read the parameter.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    parameters: tuple[TensorMap | int | float | None, ...]
