"""Block means: what the router and the coarse branch see of queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_atten.contracts import Layout
from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.reference import accumulator_dtype
from sparse_atten.vsa.layout import VideoLayout, sequence_dim


def pool_blocks(
    x: Tensor, block_sizes: VideoLayout | Tensor, *, tensor_layout: Layout = "bhsd"
) -> Tensor:
    """Average the valid tokens of each block. Differentiable.

    Parameters
    ----------
    x : Tensor, floating point, [B, H, N * block_size, D], any strides
        Packed tokens; [B, N * block_size, H, D] for "bshd". Padding may hold anything, NaN too: it
        reaches neither the means nor, as a gradient, the input.
    block_sizes : VideoLayout or Tensor, int32 or int64 [N]
        Valid tokens at the start of each block; values are clamped to 0..block_size.
    tensor_layout : {"bhsd", "bshd"}
        Order of the dims of `x`.

    Returns
    -------
    Tensor, float32 (float64 for float64 `x`) [B, H, N, D]
        Means over the true lengths, summed in that precision; 0 for a block of size 0.

    Raises
    ------
    TypeError
        `x` is no floating-point tensor, or the sizes are neither a layout nor int32 or int64.
    ValueError
        A wrong rank, length or device.

    Notes
    -----
    Source: VSA (arXiv 2505.13389). A mean can hide strong matches: queries 10 and -10 average to 0.
    """
    dim = sequence_dim(tensor_layout)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point Tensor, got {describe(x)}")
    if isinstance(block_sizes, VideoLayout):
        block_sizes.expect_tokens("x", x, tensor_layout, block_sizes.num_slots)
        sizes, block_size = block_sizes.block_sizes, block_sizes.block_size
    else:
        sizes, block_size = block_sizes, _infer_block_size(x, block_sizes, dim)

    blocks = x.unflatten(dim, (sizes.shape[0], block_size))
    valid = torch.arange(block_size, device=x.device) < sizes[:, None]  # [N, block_size]
    valid = valid[..., None] if dim == 2 else valid[..., None, None]
    total = blocks.masked_fill(~valid, 0).sum(dim + 1, dtype=accumulator_dtype(x))
    if dim == 1:
        total = total.transpose(1, 2)
    return total / sizes.clamp(1, block_size)[:, None]


def _infer_block_size(x: Tensor, sizes: Tensor, dim: int) -> int:
    wanted = "a VideoLayout or an int32 or int64 Tensor [N]"
    if not isinstance(sizes, Tensor) or sizes.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block_sizes must be {wanted}, got {describe(sizes)}")
    if sizes.dim() != 1:
        raise ValueError(f"block_sizes must be {wanted}, got {describe(sizes)}")
    if sizes.device != x.device:
        raise ValueError(f"block_sizes must be on x's device {x.device}, got {describe(sizes)}")
    num_blocks = sizes.shape[0]
    length = x.shape[dim] if x.dim() == 4 else -1
    if length < num_blocks or length % max(num_blocks, 1) or (length and not num_blocks):
        dims = "[B, H, S, D]" if dim == 2 else "[B, S, H, D]"
        raise ValueError(
            f"x must be {dims} with S a multiple of the {num_blocks} blocks of block_sizes, "
            f"got {describe(x)}"
        )
    return length // max(num_blocks, 1)
