"""Launch a kernel: bind its parameters, run its CTAs, and report."""

from __future__ import annotations

import functools
import gc
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import emulator.instructions  # noqa: F401  (registers the handlers)
from emulator.errors import EmulatorError
from emulator.machine import Machine, Parameters
from emulator.memory import PARAMETER_BASE, Memory
from emulator.options import Options
from emulator.parser import Kernel, Module, parse
from emulator.program import Program
from emulator.traffic import Traffic

MAX_SHARED = 227 * 1024  # with the reserved bytes


@dataclass(frozen=True)
class Result:
    """What a run did.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    executed : dict of int to array
        First instruction of a basic block -> how often each warp id ran the block.
    mma, tma, ctas : int
        MMA instructions, TMA boxes, CTAs that started (cancelled launches are none).
    findings : tuple of str
        What is suspicious but no fault.
    agent_work : dict of int to Counter
        Warp id -> FLOP and bytes of the MMAs and boxes that it asked for.
    program : Program
        The text that ran, for counts.
    traffic : Traffic or None
        Bytes of global memory; None without the option `counts`.
    """

    kernel: str
    executed: dict[int, np.ndarray]
    mma: int
    tma: int
    ctas: int
    findings: tuple[str, ...]
    agent_work: dict[int, Counter[str]]
    program: Program
    traffic: Traffic | None

    @property
    def warp_instructions(self) -> int:
        """Instructions that the warps issued."""
        return sum(
            int(times.sum()) * len(self.program.block_at(start).instructions)
            for start, times in self.executed.items()
        )

    def issued(self) -> list[tuple[Any, np.ndarray]]:
        """Return each instruction that ran, with how often each warp id issued it."""
        rows = []
        for start, times in sorted(self.executed.items()):
            rows += [(i, times) for i in self.program.block_at(start).instructions]
        return rows


@functools.lru_cache(maxsize=4)  # a large kernel takes hundreds of MB, and every mutant is one
def _module(ptx: str) -> Module:
    return parse(ptx)


@functools.lru_cache(maxsize=4)
def program_of(ptx: str, kernel: str | None = None) -> Program:
    """Return a kernel of a text, ready to run; its name may be left out where there is one.

    Raises
    ------
    ValueError
        The text cannot be parsed, or has no such kernel.
    """
    module = _module(ptx)
    names = list(module.kernels)
    if kernel is None:
        if len(names) != 1:
            raise ValueError(f"kernel must be one of {names}, got None")
        kernel = names[0]
    if kernel not in module.kernels:
        raise ValueError(f"kernel must be one of {names}, got {kernel!r}")
    return Program(module, module.kernels[kernel])


def run(ptx: str, plan: Any, **options: Any) -> Result:
    """Run a `LaunchPlan`; see `launch`."""
    return launch(
        ptx,
        options.pop("kernel", None),
        plan.grid,
        plan.block,
        plan.smem_bytes,
        plan.parameters,
        cluster=plan.cluster,
        **options,
    )


def launch(
    ptx: str,
    kernel: str | None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    smem_bytes: int,
    parameters: Sequence[Any],
    *,
    cluster: Sequence[int] | None = None,
    tensors: Iterable[torch.Tensor] | None = None,
    outputs: Iterable[torch.Tensor] = (),
    **options: Any,
) -> Result:
    """Execute a grid of a kernel.

    Parameters
    ----------
    ptx : str
        The text of a module.
    kernel : str or None
        A kernel of it; None: the only one.
    grid, block : int or sequence of up to 3 int
    smem_bytes : int
        Dynamic shared memory of a CTA.
    parameters : sequence
        A value for each parameter of the kernel.
    cluster : sequence of int, optional
        CTAs of a cluster; None: what the text requires, or 1.
    tensors : iterable of Tensor, optional
        All that the kernel may touch; None: every live CPU tensor.
    outputs : iterable of Tensor
        Each byte of their elements must be written.
    **options
        Fields of `Options`.

    Raises
    ------
    EmulatorError
        A fault of the kernel; its kind, place and report are in it.
    ValueError
        The launch is not legal.
    """
    program = program_of(ptx, kernel)
    dims = tuple(_three(x) for x in (grid, block, cluster or program.kernel.cluster or 1))
    _check(program.kernel, dims, smem_bytes, parameters)
    memory = Memory(tensors, program.module.variables)
    machine = Machine(program, dims, smem_bytes, memory, Options(**options))
    machine.parameters = Parameters(_parameter_block(program.kernel, parameters, machine))
    outputs = list(outputs)
    for tensor in outputs:
        segment = memory.segment_of(tensor.data_ptr(), tensor.data_ptr() + 1)
        if segment.written is None:
            segment.written = np.zeros(len(segment.memory), bool)
    collects = gc.isenabled()
    gc.disable()  # linked code is many objects without garbage: collecting takes most of the time
    try:
        with np.errstate(all="ignore"):
            machine.run()
        for tensor in outputs:
            _check_written(memory, tensor)
    finally:
        machine.drop()
        if collects:
            gc.enable()
    return Result(
        program.kernel.name,
        machine.executed,
        machine.agents.mma,
        machine.agents.tma,
        machine.num_ctas,
        tuple(machine.findings),
        machine.agents.work,
        program,
        machine.traffic,
    )


def _three(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return (*values, 1, 1)[:3]


def _check(kernel: Kernel, dims: tuple, smem_bytes: int, parameters: Sequence[Any]) -> None:
    grid, block, cluster = dims
    if len(parameters) != len(kernel.parameters):
        sizes = [p.size for p in kernel.parameters]
        raise ValueError(f"parameters must be {len(sizes)} of sizes {sizes}, got {len(parameters)}")
    if kernel.block is not None and block != kernel.block:
        raise ValueError(f"block must be {kernel.block} (.reqntid), got {block}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid must be a multiple of the cluster {cluster}, got {grid}")
    total = 1024 + kernel.shared_bytes + smem_bytes
    if total > MAX_SHARED + 1024:
        raise ValueError(f"shared memory must be at most {MAX_SHARED} bytes, got {total - 1024}")


def _parameter_block(kernel: Kernel, values: Sequence[Any], machine: Machine) -> bytes:
    data = bytearray(kernel.parameter_bytes)
    for value, parameter in zip(values, kernel.parameters, strict=True):
        if hasattr(value, "box"):
            machine.tensor_maps[PARAMETER_BASE + parameter.offset] = value
            continue
        raw = _bytes(value, parameter.size)
        if len(raw) > parameter.size:
            raise ValueError(f"{parameter.name} has {parameter.size} bytes, got {len(raw)}")
        data[parameter.offset : parameter.offset + len(raw)] = raw
    return bytes(data)


def _bytes(value: Any, size: int) -> bytes:
    if value is None:
        return bytes(size)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if isinstance(value, float):
        return struct.pack("<d" if size == 8 else "<f", value)
    if isinstance(value, int):
        return (value % (1 << 8 * min(size, 8))).to_bytes(min(size, 8), "little")
    raise TypeError(f"a parameter must be a map, number, bytes, tensor or None, got {value!r}")


def _check_written(memory: Memory, tensor: torch.Tensor) -> None:
    segment = memory.segment_of(tensor.data_ptr(), tensor.data_ptr() + 1)
    size = tensor.element_size()
    origin = tensor.data_ptr() - segment.start
    numbers = np.zeros(tuple(tensor.shape), np.int64)
    for axis, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = extent
        numbers += (np.arange(extent) * stride * size).reshape(shape)
    missing = np.zeros(numbers.shape, bool)
    for byte in range(size):
        missing |= ~segment.written[origin + numbers + byte]
    if missing.any():
        first = tuple(int(i) for i in np.argwhere(missing)[0])
        raise EmulatorError(
            "unwritten output",
            f"{int(missing.sum())} elements of {segment.name}, the first at {first}",
        )
