"""Run launches on the project's PTX emulator, as the kernel tests want it.

`SCHEDULES` and `schedules()` are option sets that order warps and asynchronous work in hostile
ways; the emulator itself is the package `emulator` beside this file.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import emulator as _emulator

from sparse_atten.cute_kernels.common.launch import LaunchPlan

_STRICT: dict[str, Any] = {"profile": "strict", "races": True}
# For CUDA C++: warp order and slices vary with the seed; descending serves the lanes of an atomic
# from the last to the first; warps in a group take their turns together. The third, which all cases
# run in, watches for races.
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"group": 32},
    {"seed": 3, "slice": 5, "group": 8},
    {"seed": 5, "slice": 3, "descending": True, "group": 16, **_STRICT},
    {"seed": 6, "starve": 0xFF, "group": 8},
    {"seed": 7, "starve": 0xFF00, "descending": True, "resident": 1, "group": 8},
)


class _Adapter:
    """The interface that the tests of CUDA modules call."""

    SCHEDULES = _emulator.SCHEDULES
    EmuError = _emulator.EmulatorError

    @staticmethod
    def run_ptx(  # noqa: PLR0917
        ptx: str,
        kernel: str | None,
        grid: Any,
        block: Any,
        smem: int,
        params: list[Any],
        **options: Any,
    ) -> dict[str, Any]:
        """Launch; returns statistics."""
        return _statistics(_emulator.launch(ptx, kernel, grid, block, smem, params, **options))


def emulator() -> type[_Adapter]:
    """Return an object with `run_ptx`."""
    return _Adapter


def schedules() -> list[dict[str, Any]]:
    """Return the option sets for SM100 kernels: strict, with the race detector."""
    return [{**schedule, **_STRICT} for schedule in _emulator.SCHEDULES]


def sample() -> list[dict[str, Any]]:
    """Return two of `schedules()` for tests that run often.

    One lets asynchronous work linger and changes warps every few blocks; one starves half of the
    warps, four of which share their turns.
    """
    _, _, _, lingering, *_, starving = schedules()
    return [lingering, {**starving, "group": 4}]


def run(ptx: str, plan: LaunchPlan, **options: Any) -> dict[str, Any]:
    """Execute a plan; returns statistics, and raises on any fault or deadlock."""
    return _statistics(_emulator.run(ptx, plan, **options))


def issued(ptx: str, plan: LaunchPlan) -> Counter[int]:
    """Count the instructions that each warp of the CTAs issues, a wait once and moves never."""
    work: Counter[int] = Counter()
    for instruction, times in _emulator.run(ptx, plan, counts=True).issued():
        if not instruction.opcode.startswith(("mov", "cvta")):
            for warp, count in enumerate(times.tolist()):
                work[warp] += count
    return work


def _statistics(result: _emulator.Result) -> dict[str, Any]:
    return {
        "warnings": list(result.findings),
        "mma": result.mma,
        "tma": result.tma,
        "warp_ins": result.warp_instructions,
        "result": result,
    }
