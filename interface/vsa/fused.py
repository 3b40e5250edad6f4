"""The stages of VSA that go over the tokens, each in one pass: pack and pool, unpack and gate.

On CUDA devices kernels run them where no gradient is recorded (see `sparse_atten.packing` for the
tensors that they take); elsewhere torch does, in several passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from sparse_atten import packing
from sparse_atten.contracts import Layout, records_grad
from sparse_atten.cute_kernels.common.arguments import describe, expect_int
from sparse_atten.vsa.layout import VideoLayout
from sparse_atten.vsa.pool import pool_blocks


def pack_and_pool(
    tensors: Sequence[Tensor],
    layout: VideoLayout,
    *,
    num_pooled: int,
    tensor_layout: Layout = "bhsd",
) -> tuple[list[Tensor], list[Tensor]]:
    """Bring tokens into packed order, and average the blocks of the first tensors.

    Parameters
    ----------
    tensors : sequence of Tensor, [B, H, num_tokens, D], any strides
        Usually q, k and v; [B, num_tokens, H, D] for "bshd". Each has H and D of its own.
    layout : VideoLayout
        How the sequence is cut into blocks.
    num_pooled : int
        Tensors to average. Where it is not all of them, the means are for the choice of blocks
        only: no gradient flows through them.
    tensor_layout : {"bhsd", "bshd"}
        Order of the dims.

    Returns
    -------
    packed : list of Tensor
        As from `VideoLayout.pack`: padding is zero.
    means : list of Tensor
        As from `pool_blocks`, for the first `num_pooled` tensors. Kernels sum in another order than
        torch, both in float32.

    Raises
    ------
    TypeError, ValueError
        As for `VideoLayout.pack`; or `num_pooled` is no int from 0 to the number of tensors.
    """
    expect_int("num_pooled", num_pooled, 0, len(tensors))
    for i, x in enumerate(tensors):
        row_dim = layout.expect_tokens(f"tensors[{i}]", x, tensor_layout, layout.num_tokens)
    if tensors and not records_grad(*tensors):
        moved = packing.pack_and_pool(tensors, layout.tiles, row_dim=row_dim, num_pooled=num_pooled)
        if moved is not None:
            return moved
    packed = [layout.pack(x, tensor_layout=tensor_layout) for x in tensors]
    with torch.no_grad() if num_pooled < len(tensors) else nullcontext():
        means = [pool_blocks(x, layout, tensor_layout=tensor_layout) for x in packed[:num_pooled]]
    return packed, means


def unpack_gated(
    packed: Tensor,
    gate: Tensor,
    coarse: Tensor,
    layout: VideoLayout,
    *,
    tensor_layout: Layout = "bhsd",
) -> Tensor:
    """Restore the order of the sequence, and add gate * coarse. Differentiable.

    Parameters
    ----------
    packed : Tensor, floating point, [B, H, num_slots, D], any strides
        Packed tokens, [B, num_slots, H, D] for "bshd". Padding may hold anything.
    gate : Tensor, floating point, broadcastable to the output
        In the order of the sequence.
    coarse : Tensor, float32 or float64 [B, H, num_blocks, D]
        One vector for each block, whatever `tensor_layout`; see `coarse_attention`.
    layout : VideoLayout
        How the sequence is cut into blocks.
    tensor_layout : {"bhsd", "bshd"}
        Order of the dims of `packed`, `gate` and the output.

    Returns
    -------
    Tensor, dtype of `packed`, [B, H, num_tokens, D] or [B, num_tokens, H, D]
        Computed in the dtype of `coarse`, rounded once more at the end.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.
    """
    row_dim = layout.expect_tokens("packed", packed, tensor_layout, layout.num_slots)
    layout.expect_tokens("coarse", coarse, "bhsd", layout.num_blocks)
    out_shape = list(packed.shape)
    out_shape[row_dim] = layout.num_tokens
    expect_gate(gate, ("packed", packed), out_shape)
    wanted = [packed.shape[0], packed.shape[3 - row_dim], layout.num_blocks, packed.shape[3]]
    if list(coarse.shape) != wanted:
        raise ValueError(f"coarse must be {wanted}, got {describe(coarse)}")
    if not records_grad(packed, gate, coarse):
        moved = packing.unpack(packed, layout.tiles, row_dim=row_dim, gated=(gate, coarse))
        if moved is not None:
            return moved
    out = layout.unpack(packed, tensor_layout=tensor_layout)
    if row_dim == 1:
        coarse = coarse.transpose(1, 2)
    coarse = layout.broadcast(coarse, tensor_layout=tensor_layout)
    return (out + gate * coarse).to(out.dtype)


def expect_gate(gate: object, like: tuple[str, Tensor], out_shape: Sequence[int]) -> None:
    """Check a gate for an output of some shape, on the device of a named tensor."""
    if not isinstance(gate, Tensor) or not gate.is_floating_point():
        raise TypeError(f"gate must be a floating-point Tensor or None, got {describe(gate)}")
    sizes = zip(reversed(gate.shape), reversed(out_shape), strict=False)
    if gate.dim() > 4 or any(size not in (1, full) for size, full in sizes):
        raise ValueError(f"gate must be broadcastable to {out_shape}, got {describe(gate)}")
    name, x = like
    if gate.device != x.device:
        raise ValueError(f"gate must be on {name}'s device {x.device}, got {describe(gate)}")
