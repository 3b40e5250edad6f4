"""Running PTX on the CPU, where an emulator is at hand.

The environment variable SPARSE_ATTEN_EMULATOR names a folder that holds a package `emu`, whose
`run_ptx(ptx, kernel, grid, block, shared_bytes, parameters, **schedule)` executes a launch on the
memory of this process. Without it the emulation tests skip.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

import pytest

# Warp order and slices vary with the seed; dbg=4 serves the lanes of an atomic in descending order.
SCHEDULES = (
    {},
    {"seed": 3, "slice": 50},
    {"seed": 5, "slice": 30, "dbg": 4},
    {"seed": 6, "starve": 0xF},
    {"seed": 7, "starve": 0xFFFE, "dbg": 4, "resident": 1},
)


def emulator() -> ModuleType:
    """Return the emulator, or skip the test."""
    folder = os.environ.get("SPARSE_ATTEN_EMULATOR")
    if not folder:
        pytest.skip("SPARSE_ATTEN_EMULATOR names no PTX emulator")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("emu")
