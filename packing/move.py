"""Pack and pool, unpack and gate: calls of the kernels of tiles.cu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import Kernel, runs_kernels
from sparse_atten.cute_kernels.common.steps import Address, Launches, Step
from sparse_atten.packing.plan import (
    ALIGNMENT,
    CONFIGS,
    SIGNATURES,
    Blocks,
    Config,
    Tensor4,
    config_of,
    pack_step,
    program,
    takes,
    unpack_step,
)


class Tiles(NamedTuple):
    """How a sequence is cut into blocks.

    Attributes
    ----------
    pack_map : Tensor, int64 [N * block_size]
        Token in each slot; ids outside 0 to num_tokens - 1 are padding.
    sizes : Tensor, int32 [N]
        Tokens in each block.
    block_size, num_tokens : int
        Slots of a block, and tokens of the sequence.
    """

    pack_map: Tensor
    sizes: Tensor
    block_size: int
    num_tokens: int

    @property
    def blocks(self) -> Blocks:
        """Their numbers."""
        return Blocks(self.sizes.shape[0], self.block_size, self.num_tokens)


class _Pack(NamedTuple):
    """What `pack_and_pool` needs but addresses."""

    shapes: list[tuple[int, ...]]
    mean_shapes: list[tuple[int, ...]]
    run: Callable[..., None] | None  # None where there is nothing to move


class _Unpack(NamedTuple):
    """What `unpack` needs but addresses."""

    shape: tuple[int, ...]
    run: Callable[..., None] | None


_PACKS: Memo[_Pack] = Memo()
_UNPACKS: Memo[_Unpack] = Memo()


def pack_and_pool(
    tensors: Sequence[Tensor], tiles: Tiles, *, row_dim: int, num_pooled: int
) -> tuple[list[Tensor], list[Tensor]] | None:
    """Bring tokens into packed order and average each block, in one pass over each tensor.

    Parameters
    ----------
    tensors : sequence of Tensor [B, H, num_tokens, D] or [B, num_tokens, H, D]
        On the device of `tiles`; each has H and D of its own.
    tiles : Tiles
        How the sequence is cut.
    row_dim : {2, 1}
        Which dim of the tensors has the tokens.
    num_pooled : int
        The first so many tensors are averaged.

    Returns
    -------
    (packed, means), or None
        Contiguous packed tensors with zeros in padding, and float32 means [B, H, N, D]. None where
        the kernels do not take the call: they take plain bfloat16 and float16 CUDA tensors with
        D = 64 or 128, contiguous in it, the other strides and the addresses multiples of 16 bytes.
        Nothing is recorded for a gradient.
    """
    if not all(runs_kernels(x) for x in tensors):
        return None
    addresses = [x.data_ptr() for x in tensors]
    if any(address % ALIGNMENT for address in addresses):
        return None
    blocks = tiles.blocks
    key = key_of(*tensors, *blocks, row_dim, num_pooled)
    call = _PACKS.find(key)
    if call is None:
        layouts = [Tensor4.of(x, row_dim) for x in tensors]
        for i, (x, layout) in enumerate(zip(tensors, layouts, strict=True)):
            _expect_shape(f"tensors[{i}]", x, layout.with_rows(blocks.num_tokens))
        if not all(takes(x, blocks) for x in layouts):
            return None
        call = _PACKS.keep(key, _pack_call(layouts, blocks, num_pooled, tensors[0].device))
    shapes, mean_shapes, run = call
    packed = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
    means = [tensors[0].new_empty(shape, dtype=torch.float32) for shape in mean_shapes]
    if run is not None:
        outputs = [x.data_ptr() for x in (*packed, *means)]
        run(tiles.pack_map.data_ptr(), tiles.sizes.data_ptr(), *addresses, *outputs)
    return packed, means


def unpack(
    packed: Tensor, tiles: Tiles, *, row_dim: int, gated: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    """Bring packed tokens back into the order of the sequence, and add gate * coarse.

    Parameters
    ----------
    packed : Tensor [B, H, N * block_size, D] or [B, N * block_size, H, D]
        On the device of `tiles`; padding may hold anything.
    tiles : Tiles
        How the sequence is cut.
    row_dim : {2, 1}
        Which dim of `packed` has the slots.
    gated : (Tensor, Tensor), optional
        The gate, broadcastable to the output, and the coarse branch, [B, H, N, D].

    Returns
    -------
    Tensor or None
        [B, H, num_tokens, D] or [B, num_tokens, H, D], contiguous; None where the kernels do not
        take the call, see `pack_and_pool`. They take a gate of the dtype of `packed` or float32,
        with one value for all of D or aligned likewise, and a contiguous float32 coarse branch.
        Product and sum are float32, each rounded.
        Nothing is recorded for a gradient.
    """
    given = [packed, *(gated or ())]
    vectors = [x for x in given if x.shape[-1:] not in ((), (1,))]
    if not runs_kernels(packed) or any(x.data_ptr() % ALIGNMENT for x in vectors):
        return None
    blocks = tiles.blocks
    key = key_of(*given, *blocks, row_dim)
    call = _UNPACKS.find(key)
    if call is None:
        layout, gate_layout = Tensor4.of(packed, row_dim), None
        _expect_shape("packed", packed, layout.with_rows(blocks.num_slots))
        if gated is not None:
            gate, coarse = gated
            gate_layout = Tensor4.of(gate.expand(layout.with_rows(blocks.num_tokens)), row_dim)
            if coarse.dtype != torch.float32 or not coarse.is_contiguous():
                return None
            _expect_shape("coarse", coarse, layout.summary_shape(blocks))
        if not takes(layout, blocks, gate_layout):
            return None
        call = _UNPACKS.keep(key, _unpack_call(layout, blocks, gate_layout, packed.device))
    out = packed.new_empty(call.shape)
    if call.run is not None:
        call.run(tiles.pack_map.data_ptr(), out.data_ptr(), *[x.data_ptr() for x in given])
    return out


def preload(device: torch.device | str | int) -> None:
    """Compile and load every kernel for a CUDA device, so that a CUDA graph can capture them.

    Compiling takes some seconds, once a machine: the disk cache keeps the results.
    """
    for config in CONFIGS:
        program(config).preload(device)


def _pack_call(
    layouts: Sequence[Tensor4], blocks: Blocks, num_pooled: int, device: torch.device
) -> _Pack:
    count = len(layouts)
    steps = []
    for i, layout in enumerate(layouts):
        mean = Address(2 + 2 * count + i) if i < num_pooled else 0
        addresses = (Address(2 + i), Address(2 + count + i), mean, Address(0), Address(1))
        steps.append(pack_step(layout, blocks, addresses))
    return _Pack(
        [layout.with_rows(blocks.num_slots) for layout in layouts],
        [layout.summary_shape(blocks) for layout in layouts[:num_pooled]],
        _runner(layouts, steps, device),
    )


def _unpack_call(
    packed: Tensor4, blocks: Blocks, gate: Tensor4 | None, device: torch.device
) -> _Unpack:
    inputs = (Address(3), Address(4)) if gate is not None else ()
    addresses = (Address(2), Address(1), *inputs, Address(0))
    step = unpack_step(packed, blocks, gate, addresses)
    return _Unpack(packed.with_rows(blocks.num_tokens), _runner([packed], [step], device))


def _runner(
    layouts: Sequence[Tensor4], steps: Sequence[Step], device: torch.device
) -> Callable[..., None] | None:
    """Lay out the launches that have something to do."""
    busy = [(config_of(x), step) for x, step in zip(layouts, steps, strict=True) if step.grid[0]]
    if not busy:
        return None
    kernels = [_kernel(config, step.kernel, device) for config, step in busy]
    return Launches(kernels, [step for _, step in busy])


def _expect_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {describe(x)}")


@cache
def _kernel(config: Config, name: str, device: torch.device) -> Kernel:
    return program(config).kernel(name, SIGNATURES[name], device)
