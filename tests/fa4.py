"""FlashAttention-4's forward: compiled without a GPU, launched on the emulator.

Usage: python fa4.py VARIANT FOLDER (the fields of a Variant as JSON) writes kernel.ptx and
kernel.mlir to the folder. Its launch parameters follow its host functions as the intermediate code
shows them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
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


class Variant(NamedTuple):
    """What a kernel is compiled for: shapes are dynamic, but a few things follow from them.

    Parameters
    ----------
    arch : int
        100 (sm_100a) or 90 (sm_90a).
    causal : bool
    tokens : int
        Long non-causal sequences get a kernel for pairs of CTAs.
    group : int
        Heads of q for each head of k and v.
    sparse : bool
        Each block of queries attends to a list of blocks of 128 keys.
    """

    arch: int
    causal: bool = False
    tokens: int = 256
    group: int = 1
    sparse: bool = False


@functools.cache
def compiled(variant: Variant) -> Kernel:
    """Compile in a process of its own.

    Raises
    ------
    RuntimeError
        The compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = f"sm_{variant.arch}a"
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": name,
            "CUTE_DSL_KEEP": "ir,ptx",
            "CUTE_DSL_DUMP_DIR": folder,
            "FLASH_ATTENTION_FAKE_TENSOR": "1",
            "FLASH_ATTENTION_CUTE_DSL_ARCH": name,
            "FLASH_ATTENTION_ARCH": f"sm_{variant.arch}",
            "FLASH_ATTENTION_NUM_SMS": "148",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        }
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(variant), folder],
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


def _child(variant: Variant, folder: Path) -> None:
    import cutlass.utils
    from cutlass import cute
    from torch._subclasses.fake_tensor import FakeTensorMode

    cutlass.utils.HardwareInfo = _Hardware
    from flash_attn.cute import block_sparsity, interface

    made: list[Kernel] = []
    interface._get_device_capability = lambda *args, **kwargs: variant.arch // 10
    interface.cute.compile = _Recorder(cute.compile, made)
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch, heads = 1, 2
        shapes = [
            (batch, variant.tokens, n, HEAD_DIM) for n in (heads * variant.group, heads, heads)
        ]
        q, k, v = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes)
        options = {}
        if variant.sparse:
            rows = -(-variant.tokens // query_block(variant))
            lists = (batch, q.shape[2], rows)
            counts, indices = (
                torch.empty(s, dtype=torch.int32, device="cuda") for s in (lists, (*lists, 2))
            )
            options["block_sparse_tensors"] = block_sparsity.BlockSparseTensorsTorch(
                counts, indices, counts, indices, block_size=(query_block(variant), 128)
            )
        interface._flash_attn_fwd(q, k, v, _arch=variant.arch, causal=variant.causal, **options)
    (folder / "kernel.ptx").write_text(made[0].ptx)
    (folder / "kernel.mlir").write_text(made[0].mlir)


def query_block(variant: Variant) -> int:
    """Return how many queries share a list of key blocks: those of a CTA."""
    return 256 if variant.arch == 100 and variant.tokens > 128 else 128


class Launch(NamedTuple):
    """Grid, block, parameters and cluster."""

    grid: tuple[int, ...]
    block: int
    parameters: list[Any]
    cluster: tuple[int, ...] = (1, 1, 1)


def launch_of(
    variant: Variant, kernel: Kernel, tensors: tuple, lists: tuple[torch.Tensor, ...] = ()
) -> Launch:
    """Bind q, k, v and the output, each [B, S, H, D].

    `lists` are, for a sparse variant, counts [B, H, M] and indices [B, H, M, N] of the key blocks
    of each query block: those under a mask, then those without one.
    """
    from emulator.peers import fast_divisor, packed, tensor_maps

    batch, queries, _, width = tensors[0].shape
    keys, heads = tensors[1].shape[1:3]
    packs = variant.group > 1  # heads of one group are rows of one tile
    views = [_view(variant, t, operand) for operand, t in zip("qkvo", tensors, strict=True)]
    maps = [spec.bind(view) for spec, view in zip(tensor_maps(kernel.mlir), views, strict=True)]
    pair = 2 if "tcgen05.mma.cta_group::2" in kernel.ptx else 1
    blocks = -(-queries * variant.group // (256 * pair if variant.arch == 100 else 128))
    total = blocks * heads * batch
    scale = math.log2(math.e) / math.sqrt(width)
    extents = [_extents(variant, t, operand) for operand, t in zip("qkvo", tensors, strict=True)]
    values: list[Any] = [*(packed(*e) for e in extents), *maps, scale]
    values += [_memref(t) for t in lists] + [None, None]
    last = [fast_divisor(variant.group), variant.group] if packs and variant.arch == 100 else []
    if variant.causal:
        one = keys * 2 * width * 2  # bytes of K and V of a head
        swizzle = 1 if one > L2_BYTES else 1 << ((L2_BYTES // one).bit_length() - 1)
        quotient, rest = divmod(heads * batch, swizzle)
        values += [total, 1] if variant.arch == 100 else [total]
        values += [blocks, heads, batch, swizzle, fast_divisor(heads), heads]
        values += [fast_divisor(swizzle), swizzle, fast_divisor(swizzle * blocks), swizzle * blocks]
        values += [fast_divisor(max(rest, 1)), max(rest, 1), quotient, fast_divisor(1), 1]
        values += [1] if variant.arch == 100 else []
        return Launch((total,), 512 if variant.arch == 100 else 384, values + last)
    if variant.arch == 100:
        values += [fast_divisor(blocks), blocks, fast_divisor(heads), heads, total, 1]
        return Launch((total * pair,), 512, values + last, (pair, 1, 1))
    values += [blocks, heads, batch, fast_divisor(1), 1]
    return Launch((blocks, heads, batch), 384, values + last)


def _view(variant: Variant, tensor: torch.Tensor, operand: str) -> torch.Tensor:
    """Return a tensor in the order of the modes of its map."""
    if operand in "qo" and variant.group > 1:
        if variant.arch == 90:  # all heads are one dim
            return tensor.permute(2, 1, 3, 0)
        return tensor.unflatten(2, (-1, variant.group)).permute(3, 1, 4, 2, 0)
    if operand == "v" and variant.arch == 100:
        return tensor.permute(3, 1, 2, 0)
    return tensor.permute(1, 3, 2, 0)


def _extents(variant: Variant, tensor: torch.Tensor, operand: str) -> tuple[int, ...]:
    """Return the dynamic extents of the tensor that the kernel sees."""
    batch, tokens, heads, width = tensor.shape
    if operand in "qo":
        heads //= variant.group
    if operand == "v" and variant.arch == 100:
        return (width, tokens, heads, batch)
    return (tokens, width, heads, batch)


def _memref(tensor: torch.Tensor) -> bytes:
    """Pack a tensor whose last dim is contiguous: address, extents, other strides."""
    extents = struct.pack(f"<{tensor.dim()}i", *tensor.shape)
    strides = struct.pack(f"<{tensor.dim() - 1}q", *tensor.stride()[:-1])
    return struct.pack("<q", tensor.data_ptr()) + extents + bytes(-len(extents) % 8) + strides


if __name__ == "__main__":
    _child(Variant(*json.loads(sys.argv[1])), Path(sys.argv[2]))
