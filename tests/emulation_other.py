"""Run a launch plan on a PTX emulator that the environment names; tests skip without one.

``SPARSE_ATTEN_EMULATOR`` is a folder that holds a Python package `emu` with `run_ptx`, `TensorMap`
and `SCHEDULES`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest

from sparse_atten.cute_kernels.common.launch import LaunchPlan, TensorMap

VARIABLE = "SPARSE_ATTEN_EMULATOR"
# Reading tensor memory before its wait, a missing proxy fence and memory never written are errors.
_STRICT = {"dbg": 3, "strict_uninit": 1}
# For CUDA C++: warp order and slices vary with the seed; dbg=4 serves the lanes of an atomic in
# descending order.
SCHEDULES: tuple[dict[str, int], ...] = (
    {},
    {"seed": 3, "slice": 50},
    {"seed": 5, "slice": 30, "dbg": 4},
    {"seed": 6, "starve": 0xF},
    {"seed": 7, "starve": 0xFFFE, "dbg": 4, "resident": 1},
)
_TYPES = {"bf16": 9, "fp16": 8, "fp32": 4}  # the emulator's names of element types


@cache
def emulator() -> Any:
    """Import the emulator, or skip the calling test."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no emulator")
    sys.path.insert(0, folder)
    return importlib.import_module("emu")


def schedules() -> list[dict[str, int]]:
    """Return the option sets that order warps and asynchronous work in different ways."""
    return [{**schedule, **_STRICT} for schedule in emulator().SCHEDULES]


def run(ptx: str, plan: LaunchPlan, **options: Any) -> dict[str, Any]:
    """Execute a plan; returns the emulator's statistics, and raises on any fault or deadlock."""
    emu = emulator()
    parameters = [_parameter(emu, value) for value in plan.parameters]
    return emu.run_ptx(
        ptx,
        None,
        plan.grid,
        plan.block,
        plan.smem_bytes,
        parameters,
        cluster=plan.cluster,
        **options,
    )


def issued(ptx: str, plan: LaunchPlan) -> Counter[int]:
    """Count the instructions that each warp of the CTAs issues, leaving out moves."""
    counts, source = run(ptx, plan, profile=True)["prof"]
    work: Counter[int] = Counter()
    for place, (_, text) in enumerate(source):
        opcode = re.sub(r"^@!?\S+\s+", "", text.strip())
        if not opcode.startswith(("mov", "cvta")):
            for warp in range(32):
                work[warp] += counts[place * 32 + warp]
    return work


def _parameter(emu: Any, value: TensorMap | int | float | None) -> Any:
    if not isinstance(value, TensorMap):
        return value
    return emu.TensorMap(
        None,
        list(value.box),
        dims=list(value.dims),
        strides=list(value.strides),
        swizzle=value.swizzle,
        addr=value.address,
        ty=_TYPES[value.dtype],
        bits=32 if value.dtype == "fp32" else 16,
    )
