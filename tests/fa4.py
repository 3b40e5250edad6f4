"""FlashAttention-4's dense forward: compiled without a GPU, launched on the emulator.

Usage: python fa4.py ARCH CAUSAL TOKENS FOLDER writes kernel.ptx and kernel.mlir to the folder. Its
launch parameters follow its host functions as the intermediate code shows them.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

HEAD_DIM = 128
L2_BYTES = 50 << 20  # what its scheduler of causal tiles takes for the size of L2


class Kernel(NamedTuple):
    """Text and intermediate code."""

    ptx: str
    mlir: str


@functools.cache
def compiled(arch: int, causal: bool, tokens: int = 256) -> Kernel:
    """Compile for sm_100a (100) or sm_90a (90), in a process of its own.

    Shapes are dynamic, but long non-causal sequences get a kernel for pairs of CTAs.

    Raises
    ------
    RuntimeError
        The compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = f"sm_{arch}a"
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": name,
            "CUTE_DSL_KEEP": "ir,ptx",
            "CUTE_DSL_DUMP_DIR": folder,
            "FLASH_ATTENTION_FAKE_TENSOR": "1",
            "FLASH_ATTENTION_CUTE_DSL_ARCH": name,
            "FLASH_ATTENTION_ARCH": f"sm_{arch}",
            "FLASH_ATTENTION_NUM_SMS": "148",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        }
        done = subprocess.run(
            [sys.executable, __file__, str(arch), str(int(causal)), str(tokens), folder],
            env=environment,
            cwd=folder,
            capture_output=True,
            check=False,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"compiling FlashAttention-4 failed:\n{done.stderr[-3000:]}")
        at = Path(folder)
        return Kernel((at / "kernel.ptx").read_text(), (at / "kernel.mlir").read_text())


class _Hardware:
    """Stands for the query of a device: only two numbers are asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_device_multiprocessor_count(self, *args: Any, **kwargs: Any) -> int:
        return 148

    def get_max_active_clusters(self, *args: Any, **kwargs: Any) -> int:
        return 148


class _Recorder:
    """Calls cute.compile and keeps what it made."""

    def __init__(self, compile_: Any, made: list) -> None:
        self.compile = compile_
        self.made = made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.compile(*args, **kwargs)
        self.made.append(Kernel(result.__ptx__.rstrip("\0"), str(result.__mlir__)))
        return result

    def __getitem__(self, options: Any) -> _Recorder:
        return _Recorder(self.compile[options], self.made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compile, name)


def _child(arch: int, causal: bool, tokens: int, folder: Path) -> None:
    import cutlass.utils
    from cutlass import cute
    from torch._subclasses.fake_tensor import FakeTensorMode

    cutlass.utils.HardwareInfo = _Hardware
    from flash_attn.cute import interface

    made: list[Kernel] = []
    interface._get_device_capability = lambda *args, **kwargs: arch // 10
    interface.cute.compile = _Recorder(cute.compile, made)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = (1, tokens, 2, HEAD_DIM)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        interface._flash_attn_fwd(q, k, v, _arch=arch, causal=causal)
    (folder / "kernel.ptx").write_text(made[0].ptx)
    (folder / "kernel.mlir").write_text(made[0].mlir)


class Launch(NamedTuple):
    """Grid, block, parameters and cluster."""

    grid: tuple[int, ...]
    block: int
    parameters: list[Any]
    cluster: tuple[int, ...] = (1, 1, 1)


def launch_of(arch: int, causal: bool, kernel: Kernel, tensors: tuple) -> Launch:
    """Bind q, k, v and the output, each [B, S, H, D]."""
    from emulator.peers import fast_divisor, packed, tensor_maps

    batch, queries, heads, width = tensors[0].shape
    keys = tensors[1].shape[1]
    orders = [(1, 3, 2, 0)] * 4
    if arch == 100:
        orders[2] = (3, 1, 2, 0)
    views = [t.permute(order) for t, order in zip(tensors, orders, strict=True)]
    maps = [spec.bind(view) for spec, view in zip(tensor_maps(kernel.mlir), views, strict=True)]
    pair = 2 if "tcgen05.mma.cta_group::2" in kernel.ptx else 1
    blocks = -(-queries // (256 * pair if arch == 100 else 128))
    total = blocks * heads * batch
    scale = math.log2(math.e) / math.sqrt(width)
    values: list[Any] = [*(packed(*view.shape) for view in views), *maps, scale, None, None]
    if causal:
        one = keys * 2 * width * 2  # bytes of K and V of a head
        swizzle = 1 if one > L2_BYTES else 1 << ((L2_BYTES // one).bit_length() - 1)
        quotient, rest = divmod(heads * batch, swizzle)
        values += [total, 1] if arch == 100 else [total]
        values += [blocks, heads, batch, swizzle, fast_divisor(heads), heads]
        values += [fast_divisor(swizzle), swizzle, fast_divisor(swizzle * blocks), swizzle * blocks]
        values += [fast_divisor(max(rest, 1)), max(rest, 1), quotient, fast_divisor(1), 1]
        values += [1] if arch == 100 else []
        return Launch((total,), 512 if arch == 100 else 384, values)
    if arch == 100:
        values += [fast_divisor(blocks), blocks, fast_divisor(heads), heads, total, 1]
        return Launch((total * pair,), 512, values, (pair, 1, 1))
    values += [blocks, heads, batch, fast_divisor(1), 1]
    return Launch((blocks, heads, batch), 384, values)


if __name__ == "__main__":
    _child(int(sys.argv[1]), bool(int(sys.argv[2])), int(sys.argv[3]), Path(sys.argv[4]))
