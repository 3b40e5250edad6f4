"""A functional emulator of NVIDIA PTX (sm_90a, sm_100a): a test instrument, never a way to run.

It executes the PTX text that CuTe-DSL or NVRTC produced, unmodified, on tensors of this process,
over hostile schedules, and reports deadlocks, races, bad addresses and missing synchronisation.

    result = run(ptx, plan, kernel=None, tensors=None, **options)
    result = launch(ptx, kernel, grid, block, smem_bytes, parameters,
                    cluster=(1, 1, 1), tensors=None, **options)

`plan` is a `LaunchPlan`. A parameter is a `TensorMap`, an int (an address, too), a float, bytes,
None (zeros), or a CPU tensor (its address). `tensors` are the CPU tensors that the kernel may
touch: any other address is out of bounds. Without them every live CPU tensor of the process is
legal. Options are the fields of `Options`; `SCHEDULES` holds option sets that order warps and
asynchronous work in hostile ways. A fault raises `EmulatorError`, whose `kind` is one of
`errors.KINDS`; softer findings are in `Result.findings`.
"""

from __future__ import annotations

from emulator.errors import KINDS, EmulatorError
from emulator.launch import Result, launch, program_of, run
from emulator.options import LATE, SCHEDULES, Options

__all__ = [
    "KINDS",
    "LATE",
    "SCHEDULES",
    "EmulatorError",
    "Options",
    "Result",
    "launch",
    "program_of",
    "run",
]
