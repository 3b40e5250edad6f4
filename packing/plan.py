"""Which kernels of tiles.cu take a tensor, and their launches as data.

Nothing here needs a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from sparse_atten.cute_kernels.common.nvrtc import Program
from sparse_atten.cute_kernels.common.steps import Address, Step

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)
ALIGNMENT = 16  # bytes that a thread moves at once

_PLAN = struct.Struct("@6q2I3i0q")
_GATE = struct.Struct("@3q")
_THREADS = 256
_MAX_GRID = 2**31 - 1
_MAX_TOKENS = 2**31 - 1
_MAX_BLOCK_SIZE = 2**30

SIGNATURES = {
    "pack": f"PPPPP{_PLAN.size}s",
    "unpack": f"PPP{_PLAN.size}s",
    **{
        f"unpack_gated{kind}": f"PPPPP{_PLAN.size}s{_GATE.size}s"
        for kind in ("", "_rows", "_float", "_float_rows")
    },
}


class Config(NamedTuple):
    """The constants that tiles.cu is compiled with.

    Attributes
    ----------
    dtype : {"bf16", "fp16"}
        Of the tokens.
    head_dim : int
        One of `HEAD_DIMS`.
    """

    dtype: str
    head_dim: int


CONFIGS = tuple(Config(dtype, dim) for dtype in DTYPES.values() for dim in HEAD_DIMS)


@cache
def program(config: Config) -> Program:
    """tiles.cu with the constants of a config."""
    path = Path(__file__).with_name("tiles.cu")
    return Program.read(path, BF16=int(config.dtype == "bf16"), HEAD_DIM=config.head_dim)


class Blocks(NamedTuple):
    """Numbers of a packed sequence: blocks, slots of a block, tokens."""

    num_blocks: int
    block_size: int
    num_tokens: int

    @property
    def num_slots(self) -> int:
        """Rows of the packed sequence."""
        return self.num_blocks * self.block_size


class Tensor4(NamedTuple):
    """Layout of a [B, H, S, D] or [B, S, H, D] tensor; `row_dim` is the dim of S, 2 or 1."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    row_dim: int

    @classmethod
    def of(cls, x: torch.Tensor, row_dim: int) -> Tensor4:
        """Return the layout of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, row_dim)

    @property
    def num_heads(self) -> int:
        """H."""
        return self.shape[3 - self.row_dim]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.shape[3]

    @property
    def steps(self) -> tuple[int, int, int]:
        """Strides of batch, head and row in elements; 0 for a dim of size 1."""
        batch, head, row = (
            0 if self.shape[dim] == 1 else self.strides[dim]
            for dim in (0, 3 - self.row_dim, self.row_dim)
        )
        return batch, head, row

    def with_rows(self, num_rows: int) -> tuple[int, ...]:
        """Return the shape with another S."""
        return (*self.shape[: self.row_dim], num_rows, *self.shape[self.row_dim + 1 :])

    def summary_shape(self, blocks: Blocks) -> tuple[int, int, int, int]:
        """Return the shape of what has one row for each block: [B, H, N, D]."""
        return self.shape[0], self.num_heads, blocks.num_blocks, self.head_dim

    def contiguous(self, num_rows: int) -> Tensor4:
        """Return the layout of a contiguous tensor of this shape, with another S."""
        shape = self.with_rows(num_rows)
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(4))
        return Tensor4(shape, strides, self.dtype, self.row_dim)


def takes(x: Tensor4, blocks: Blocks, gate: Tensor4 | None = None) -> bool:
    """Whether the kernels take tokens or slots, with a gate that is expanded to the tokens."""
    if x.dtype not in DTYPES or x.head_dim not in HEAD_DIMS or not _is_aligned(x):
        return False
    items = x.shape[0] * x.num_heads * blocks.num_blocks
    if items > _MAX_GRID or blocks.num_tokens > _MAX_TOKENS or blocks.block_size > _MAX_BLOCK_SIZE:
        return False
    if gate is None:
        return True
    return gate.dtype in (x.dtype, torch.float32) and (gate.strides[3] == 0 or _is_aligned(gate))


def config_of(x: Tensor4) -> Config:
    """Return the config for a tensor that the kernels take."""
    return Config(DTYPES[x.dtype], x.head_dim)


def pack_step(video: Tensor4, blocks: Blocks, addresses: Sequence[Address | int]) -> Step:
    """Pack one tensor.

    Parameters
    ----------
    video : Tensor4
        The tokens; the packed tensor is contiguous.
    blocks : Blocks
        How they are cut.
    addresses : sequence of 5
        Tokens, packed tensor, means or 0, the layout's pack map, block sizes.
    """
    packed = video.contiguous(blocks.num_slots)
    return _step("pack", (video, packed), blocks, addresses)


def unpack_step(
    packed: Tensor4, blocks: Blocks, gate: Tensor4 | None, addresses: Sequence[Address | int]
) -> Step:
    """Unpack one tensor, and add the gated coarse branch.

    Parameters
    ----------
    packed : Tensor4
        The slots; the unpacked tensor is contiguous.
    blocks : Blocks
        How the tokens are cut.
    gate : Tensor4 or None
        The gate, expanded to the unpacked tensor.
    addresses : sequence of 3, or of 5 with a gate
        Packed tensor, unpacked tensor, with a gate the gate and the coarse rows; the pack map.
    """
    video = packed.contiguous(blocks.num_tokens)
    if gate is None:
        return _step("unpack", (video, packed), blocks, addresses)
    is_float = "_float" if gate.dtype == torch.float32 else ""
    is_row = "_rows" if gate.strides[3] == 0 else ""
    step = _step(f"unpack_gated{is_float}{is_row}", (video, packed), blocks, addresses)
    return step._replace(arguments=(*step.arguments, _GATE.pack(*gate.steps)))


def _step(
    kernel: str,
    tensors: tuple[Tensor4, Tensor4],
    blocks: Blocks,
    addresses: Sequence[Address | int],
) -> Step:
    video, packed = tensors
    # Thread blocks that run together read adjacent memory: heads first where they are adjacent.
    heads_first = video.steps[1] < video.steps[2]
    plan = _PLAN.pack(
        *video.steps,
        *packed.steps,
        video.num_heads,
        blocks.num_blocks,
        blocks.num_tokens,
        blocks.block_size,
        heads_first,
    )
    grid = video.shape[0] * video.num_heads * blocks.num_blocks
    return Step(kernel, (grid, 1, 1), (_THREADS, 1, 1), (*addresses, plan))


def _is_aligned(x: Tensor4) -> bool:
    return x.strides[3] == 1 and all(step * x.dtype.itemsize % ALIGNMENT == 0 for step in x.steps)
