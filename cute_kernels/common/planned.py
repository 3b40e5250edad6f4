"""Launch compiled CuTe-DSL kernels as their plans say, through the driver.

What an emulator executes from a `LaunchPlan` is what is launched here: grid, shared memory, every
parameter, and TMA descriptors encoded from the same extents, strides and boxes. A `PlannedLaunch`
is laid out once for tensors of some shapes and strides; a call gives addresses alone.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from sparse_atten.cute_kernels.common.dsl import Function
from sparse_atten.cute_kernels.common.launch import LaunchPlan, TensorMap
from sparse_atten.cute_kernels.common.nvrtc import checked
from sparse_atten.cute_kernels.common.steps import Address

_MAP_BYTES = 128
_ALIGNMENT = 64  # of a TMA descriptor


class PlannedLaunch:
    """One launch that is laid out once; safe among threads.

    Parameters
    ----------
    function : Function
        The kernel, loaded on a device.
    plan : LaunchPlan
        Its launch; an address may be an `Address`, one of those that a call gives.
    """

    def __init__(self, function: Function, plan: LaunchPlan) -> None:
        self._function, self._plan = function, plan
        self._image, self._places = _lay_out(function.parameter_sizes, plan.parameters)
        base = ctypes.addressof(self._image)
        self._parameters = (ctypes.c_void_p * len(self._places))(*(base + x for x in self._places))
        self._bases: tuple[int, ...] | None = None
        self._maps: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *bases: int) -> None:
        """Launch on torch's current stream of the device; `Address.base` counts the addresses."""
        if torch.cuda.current_device() == self._function.index:
            self._launch(bases)
        else:
            with torch.cuda.device(self._function.index):
                self._launch(bases)

    def _launch(self, bases: tuple[int, ...]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._function.index)
        with self._lock:
            if bases != self._bases:
                self._write(bases)
                self._bases = bases
            self._function.launch(self._plan, stream, ctypes.addressof(self._parameters))

    def _write(self, bases: Sequence[int]) -> None:
        """Write what depends on addresses."""
        for i, (place, value) in enumerate(zip(self._places, self._plan.parameters, strict=True)):
            if isinstance(value, Address):
                struct.pack_into("P", self._image, place, value.of(bases))
            elif isinstance(value, TensorMap):
                self._write_map(i, place, value.bind(bases))

    def _write_map(self, i: int, place: int, value: TensorMap) -> None:
        from cuda.bindings import driver

        if i in self._maps:
            moved = driver.cuTensorMapReplaceAddress(self._maps[i], value.address)
            checked(moved, "a TMA descriptor")
        else:
            self._maps[i] = _encoded(value)
        start = ctypes.addressof(self._image) + place
        ctypes.memmove(start, self._maps[i].getPtr(), _MAP_BYTES)


def _lay_out(sizes: Sequence[int], values: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return memory for the parameters with all but addresses written, and where each begins."""
    if len(sizes) != len(values):
        raise RuntimeError(f"the kernel takes {len(sizes)} parameters, its plan has {len(values)}")
    places, end = [], 0
    for size in sizes:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + size
    memory = ctypes.create_string_buffer(end + _ALIGNMENT)
    skip = -ctypes.addressof(memory) % _ALIGNMENT
    image = (ctypes.c_char * end).from_buffer(memory, skip)
    codes = {4: "i", 8: "q"}
    for place, size, value in zip(places, sizes, values, strict=True):
        if isinstance(value, float):
            struct.pack_into("f", image, place, value)
        elif isinstance(value, int):
            struct.pack_into(codes[size], image, place, value)
    return image, places


def _encoded(value: TensorMap) -> Any:
    """Let the driver make a descriptor: zeros out of bounds, 128 bytes of L2 promotion."""
    from cuda.bindings import driver

    dtypes = {"bf16": "BFLOAT16", "fp16": "FLOAT16", "fp32": "FLOAT32"}
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtypes[value.dtype]}")
    swizzle = getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{value.swizzle}B")
    return checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            len(value.dims),
            value.address,
            [driver.cuuint64_t(x) for x in value.dims],
            [driver.cuuint64_t(x) for x in value.strides],
            [driver.cuuint32_t(x) for x in value.box],
            [driver.cuuint32_t(1)] * len(value.dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"a TMA descriptor for {value}",
    )
