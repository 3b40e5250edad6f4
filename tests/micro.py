"""Small PTX kernels for the emulator's tests; ptxas checks their syntax where it is installed."""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import Any

import emulator
import numpy as np
import torch

_HEAD = """.version 8.8
.target {target}
.address_size 64
.visible .entry k({parameters})
{{
.reg .pred %p<40>; .reg .b16 %h<40>; .reg .b32 %r<200>; .reg .b64 %d<100>; .reg .b128 %q<4>;
.shared .align 1024 .b8 smem[{shared}];
"""


@functools.cache
def assemble(ptx: str, target: str) -> None:
    """Let ptxas read a text, where there is one."""
    tool = shutil.which("ptxas")
    if tool:
        done = subprocess.run(
            [tool, f"-arch={target}", "-o", "/dev/null", "-"],
            input=ptx.encode(),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()


def kernel(body: str, parameters: int, *, target: str = "sm_100a", shared: int = 4096) -> str:
    """Return a module: parameters are 64-bit and lie in %d0, %d1, ...; %r0 is the thread."""
    names = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    text = _HEAD.format(target=target, parameters=names, shared=shared)
    text += "".join(f"ld.param.u64 %d{i}, [p{i}];\n" for i in range(parameters))
    text += "mov.u32 %r0, %tid.x;\n" + body + "\nret;\n}\n"
    assemble(text, target)
    return text


def launch(ptx: str, values: list[Any], *, block: int = 32, **options: Any) -> emulator.Result:
    """Run one CTA on tensors and numbers."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return emulator.launch(ptx, "k", 1, block, 0, values, tensors=tensors, **options)


def lanewise(line: str, inputs: list[np.ndarray], out: type, **options: Any) -> np.ndarray:
    """Run one instruction on every element; $d, $a, $b, $c stand for its operands.

    Inputs are numbers of 2, 4 or 8 bytes, as many as there are threads in a few warps.
    """
    registers = {2: ("h", "u16"), 4: ("r", "u32"), 8: ("d", "u64")}
    count = -(-len(inputs[0]) // 32) * 32
    arrays = [np.resize(x, count) for x in inputs]
    result = np.zeros(count, out)
    body, places = "", {}
    for i, array in enumerate([*arrays, result]):
        letter, kind = registers[array.itemsize]
        places["abcd"[i] if i < len(arrays) else "d"] = f"%{letter}{i + 20}"
        body += f"mul.wide.u32 %d{i + 10}, %r0, {array.itemsize};\n"
        body += f"add.s64 %d{i + 10}, %d{i + 10}, %d{i};\n"
        if i < len(arrays):
            body += f"ld.global.{kind} %{letter}{i + 20}, [%d{i + 10}];\n"
    for name, register in places.items():
        line = line.replace(f"${name}", register)
    letter, kind = registers[result.itemsize]
    last = len(arrays)
    body += line + f"\nst.global.{kind} [%d{last + 10}], %{letter}{last + 20};"
    tensors = [torch.from_numpy(x.view(f"i{x.itemsize}").copy()) for x in [*arrays, result]]
    launch(kernel(body, len(tensors)), tensors, block=count, **options)
    return tensors[-1].numpy().view(out)[: len(inputs[0])]
