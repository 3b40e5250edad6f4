"""Launches as data, and what runs them often at little cost to the host.

A `Step` is one launch without its addresses. `Launches` lays steps out for the driver once; a call
gives addresses alone:

    step = Step("scale", grid, block, (Address(0), Address(1), x.numel(), 0.5))
    launches = Launches([PROGRAM.kernel("scale", "PPqf", x.device)], [step])
    launches(x.data_ptr(), y.data_ptr())
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from sparse_atten.cute_kernels.common.nvrtc import Kernel


class Address(NamedTuple):
    """A pointer parameter: one of the addresses that a call gives, and bytes to add to it."""

    base: int
    offset: int = 0

    def of(self, bases: Sequence[int]) -> int:
        """Return the address, where a call gives these."""
        return bases[self.base] + self.offset


class Step(NamedTuple):
    """One launch as data.

    Attributes
    ----------
    kernel : str
        The kernel's name.
    grid, block : (int, int, int)
        Thread blocks and threads.
    arguments : tuple
        In the order of the kernel's signature: a number, the bytes of a struct, or an `Address`.
    shared_bytes : int
        Dynamic shared memory.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[float | bytes | Address, ...]
    shared_bytes: int = 0

    def values(self, bases: Sequence[int]) -> list[float | bytes]:
        """Return the arguments of a call that gives these addresses."""
        return [
            value.of(bases) if isinstance(value, Address) else value for value in self.arguments
        ]


class Launches:
    """Launches that are laid out once; a call stores its addresses and launches them in order.

    All run on torch's current stream of the kernels' device. Safe among threads.

    The driver takes a parameter as the place where its value stands. So each distinct address of
    all launches has one slot, which a call writes, and each other argument one, which is written
    once.

    Parameters
    ----------
    kernels : sequence of Kernel
        The kernel of each launch, all of one device.
    steps : sequence of Step
        The launches.
    """

    def __init__(self, kernels: Sequence[Kernel], steps: Sequence[Step]) -> None:
        from cuda.bindings import driver

        self._index, self._context = kernels[0].index, kernels[0].context
        self._steps = tuple(steps)
        slots: dict[Address, int] = {}
        image = bytearray(8 * sum(len(step.arguments) for step in steps))
        places: list[int] = []
        for kernel, step in zip(kernels, steps, strict=True):
            image.extend(bytes(-len(image) % 16))
            start = len(image)
            values: list[float | bytes] = []
            for offset, value in zip(kernel.offsets, step.arguments, strict=True):
                if isinstance(value, Address):
                    places.append(8 * slots.setdefault(value, len(slots)))
                    values.append(0)
                else:
                    places.append(start + offset)
                    values.append(value)
            image.extend(kernel.layout.pack(*values))
        self._addresses = tuple(slots)
        self._pack = struct.Struct(f"@{len(slots)}P").pack_into
        self._values = ctypes.create_string_buffer(bytes(image))
        base = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * len(places))(*[base + i for i in places])

        parameters = ctypes.addressof(self._parameters)
        self._launches = []
        for kernel, step in zip(kernels, steps, strict=True):
            launch = partial(
                driver.cuLaunchKernel, kernel.function, *step.grid, *step.block, step.shared_bytes
            )
            self._launches.append((launch, parameters))
            parameters += 8 * len(step.arguments)
        self._lock = threading.Lock()

    def __call__(self, *bases: int) -> None:
        """Launch all; `Address.base` counts the addresses that are given here."""
        if torch.cuda.current_device() == self._index:
            self._launch(bases)
        else:
            with torch.cuda.device(self._index):
                self._launch(bases)

    def _launch(self, bases: Sequence[int]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        addresses = [bases[base] + offset for base, offset in self._addresses]
        with self._lock:
            self._pack(self._values, 0, *addresses)
            for i, (launch, parameters) in enumerate(self._launches):
                (status,) = launch(stream, parameters, 0)
                if status:
                    self._launch_again(i, stream, status)

    def _launch_again(self, i: int, stream: int, status: Any) -> None:
        """Launch in a thread that has not touched the device before; else raise."""
        from cuda.bindings import driver

        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            driver.cuCtxSetCurrent(self._context)
            launch, parameters = self._launches[i]
            (status,) = launch(stream, parameters, 0)
        if status:
            kernel, grid, block, _, shared_bytes = self._steps[i]
            raise RuntimeError(
                f"launch of {kernel} with grid {grid}, block {block}, {shared_bytes} bytes of "
                f"dynamic shared memory: {status.name}"
            )
