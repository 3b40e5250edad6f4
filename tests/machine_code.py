"""What tests ask of every compiled kernel: that it fits, and that its launch plan describes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from compile_kernels import EXPECTED_WARNINGS

from sparse_atten.cute_kernels.common.launch import LaunchPlan, TensorMap
from sparse_atten.cute_kernels.common.offline import Compiled
from sparse_atten.cute_kernels.common.schedule import Schedule


def assert_fits(name: str, made: Compiled, schedule: Schedule) -> None:
    """Print what a kernel takes; it must not spill, and must fit a multiprocessor."""
    print(
        f"{name}: {made.registers} registers at launch, {made.stack_bytes} bytes of stack, "
        f"{schedule.smem_bytes} bytes of shared memory, {len(made.ptx)} bytes of PTX"
    )
    assert {"C1"} <= made.warnings <= EXPECTED_WARNINGS.keys()
    assert made.stack_bytes == 0, "spills or local memory"
    assert made.registers * schedule.threads <= 65536
    assert schedule.smem_bytes <= 232_448
    assert ".local" not in made.ptx


def opcodes(cubin: bytes, folder: Path) -> list[str]:
    """Disassemble; opcodes with their modifiers."""
    tools = [t for f in sys.path for t in Path(f).glob("nvidia/*/bin/nvdisasm")]
    if not tools:
        pytest.skip("needs nvidia-cuda-nvdisasm")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([tools[0], "-c", file], check=True, capture_output=True).stdout.decode()
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)", text)


def assert_describes(plan: LaunchPlan, made: Compiled) -> None:
    """A plan has the parameters, the TMA boxes and the threads of the text."""
    head = made.ptx.split(")")[0]
    sizes = [int(n or 0) for n in re.findall(r"\.param [^\n]*?(?:\[(\d+)\])?,?\n", head)]
    assert len(sizes) == len(plan.parameters)
    assert [n == 128 for n in sizes] == [isinstance(p, TensorMap) for p in plan.parameters]
    assert f".reqntid {plan.block[0]}, 1, 1" in made.ptx
    bases = re.findall(r'make_non_exec_tiled_tma.*?tma_gbasis = <"\(([\d,()]*)\):', made.ir)
    boxes = [tuple(int(n) for n in re.findall(r"\d+", basis)) for basis in bases]
    assert boxes == [p.box for p in plan.parameters if isinstance(p, TensorMap)]
