"""Run a launch plan on a PTX emulator that the environment names; tests skip without one.

``SPARSE_ATTEN_EMULATOR`` is a folder that holds a Python package `emu` with `run_ptx`, `TensorMap`
and `SCHEDULES`.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from typing import Any

import pytest

from sparse_atten.cute_kernels.common.launch import LaunchPlan, TensorMap

VARIABLE = "SPARSE_ATTEN_EMULATOR"
_TYPES = {"bf16": 9, "fp16": 8}  # the emulator's names of element types


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
    return emulator().SCHEDULES


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
        bits=16,
    )
