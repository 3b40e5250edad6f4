"""`video_sparse_attention`: pack, pool, route, attend and unpack in one call.

Each stage is public, so that it can be timed, shown or replaced: `pack_and_pool`, `route_scores`,
`route`, `sparse_atten.sparse_atten_func`, `VideoLayout.unpack`; with a coarse branch
`coarse_attention` and `unpack_gated` instead of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.attention import sparse_atten_func
from sparse_atten.contracts import DTYPES, BlockSelection, Layout, options_of
from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.reference import without_autocast
from sparse_atten.vsa.fused import expect_gate, pack_and_pool, unpack_gated
from sparse_atten.vsa.layout import VideoLayout, sequence_dim
from sparse_atten.vsa.route import Policy, Sparsity, expect_blocks, route, route_scores


class VideoAttentionDetails(NamedTuple):
    """What `video_sparse_attention` found on its way."""

    selection: BlockSelection  # over packed blocks
    scores: Tensor  # float32 (float64 for float64 q) [B, Hq, num_blocks, num_blocks]
    lse: Tensor  # float32 [B, Hq, num_tokens], natural log, of the kept keys; sequence order


def video_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: VideoLayout,
    *,
    sparsity: Sparsity | Sequence[Sparsity],
    policy: Policy = "exempt",
    gate: Tensor | None = None,
    softmax_scale: float | None = None,
    tensor_layout: Layout = "bhsd",
    return_details: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, VideoAttentionDetails]:
    """Bidirectional attention in which each block of video queries sees its best KV blocks only.

    ``softmax(softmax_scale * q k^T) v`` with one softmax over all kept keys, plus
    ``gate * softmax(E) mean(v)``, the coarse branch, if there is a gate. E, the scores of
    `route_scores`, chooses the blocks. Differentiable on the reference backend; no gradient flows
    through the choice.

    Parameters
    ----------
    q : Tensor, bfloat16, float16, float32 or float64, [B, Hq, num_tokens, D], any strides
        In the order of the sequence, positions already encoded. [B, num_tokens, Hq, D] for "bshd".
    k, v : Tensor, q's dtype, [B, Hkv, num_tokens, D], any strides
        Likewise; Hkv divides Hq, and v may have a head dim of its own.
    layout : VideoLayout
        How the sequence is cut into blocks.
    sparsity : float, int, str, Fraction, Decimal, or a sequence of them
        Share of each video's blocks that a video query drops, for all videos or for each.
    policy : {"exempt", "compete"}
        Whether video queries keep the whole prefix (see `route`).
    gate : Tensor, floating point, broadcastable to the output, optional
        Weight of the coarse branch, in the order of the sequence. None: no coarse branch.
    softmax_scale : float, optional
        Finite and positive, of all three softmax arguments: attention, scores, coarse branch.
        None: 1 / sqrt(D).
    tensor_layout : {"bhsd", "bshd"}
        Order of the dims of q, k, v, gate and the output.
    return_details : bool
        Also return the selection, the scores and the LSE.
    backend : str
        As for `sparse_atten_func`; routing and the coarse branch do not depend on it.

    Returns
    -------
    Tensor, or (Tensor, VideoAttentionDetails)
        The output in the order of the sequence, q's dtype, q's shape with v's head dim.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.
    NotImplementedError
        The backend asked for cannot run the call, or a budget is beyond what `route` supports.

    Notes
    -----
    Workspace: packed copies of q, k, v and the output, and num_blocks^2 scores for each head.
    Nothing synchronises; a CUDA graph can capture a call like one before.
    Source: VSA (arXiv 2505.13389).
    """
    _check_inputs(q, k, v, layout, tensor_layout)
    if gate is not None:
        expect_gate(gate, ("q", q), [*q.shape[:3], v.shape[3]])
    scale = options_of(
        q, causal=False, softmax_scale=softmax_scale, lse_temperature=None, return_lse=True
    ).softmax_scale

    (q, k, v), means = pack_and_pool(
        (q, k, v), layout, num_pooled=2 if gate is None else 3, tensor_layout=tensor_layout
    )
    # Without a coarse branch nothing of the scores reaches the output but the choice.
    with torch.no_grad() if gate is None else nullcontext():
        scores = route_scores(means[0], means[1], softmax_scale=scale)
    selection = route(scores, layout, sparsity=sparsity, policy=policy, tensor_layout=tensor_layout)
    packed_out, packed_lse = sparse_atten_func(
        q, k, v, selection, softmax_scale=scale, return_lse=True, backend=backend
    )
    if gate is None:
        out = layout.unpack(packed_out, tensor_layout=tensor_layout)
    else:
        coarse = coarse_attention(scores, means[2], layout.block_sizes)
        out = unpack_gated(packed_out, gate, coarse, layout, tensor_layout=tensor_layout)
    if not return_details:
        return out
    lse = packed_lse.index_select(2, layout.unpack_map)
    return out, VideoAttentionDetails(selection, scores.detach(), lse)


def coarse_attention(scores: Tensor, v_mean: Tensor, block_sizes: Tensor) -> Tensor:
    """Attend over whole blocks: softmax(scores) v_mean. Differentiable.

    Parameters
    ----------
    scores : Tensor, float32 or float64 [B, Hq, Nq, Nkv]
        From `route_scores`.
    v_mean : Tensor, scores' dtype [B, Hkv, Nkv, D]
        Block means of the values; Hkv divides Hq.
    block_sizes : Tensor, int32 or int64 [Nkv]
        Tokens of each KV block; blocks of size 0 are left out, whatever v_mean holds for them.

    Returns
    -------
    Tensor, scores' dtype [B, Hq, Nq, D]
        One vector for each query block; 0 where all KV blocks are empty.

    Raises
    ------
    TypeError, ValueError
        Wrong dtypes, shapes or devices.
    """
    expect_blocks(("scores", scores), ("v_mean", v_mean), "have 4 dims")
    batch, heads, num_q_blocks, num_kv_blocks = scores.shape
    kv_heads = v_mean.shape[1]
    if v_mean.dtype != scores.dtype:
        raise TypeError(f"v_mean must have scores' dtype {scores.dtype}, got {describe(v_mean)}")
    if (v_mean.shape[0], v_mean.shape[2], v_mean.device) != (batch, num_kv_blocks, scores.device):
        raise ValueError(
            f"v_mean must be [{batch}, Hkv, {num_kv_blocks}, D] on {scores.device}, "
            f"got {describe(v_mean)}"
        )
    if tuple(block_sizes.shape) != (num_kv_blocks,) or block_sizes.device != scores.device:
        raise ValueError(
            f"block_sizes must be [{num_kv_blocks}] on {scores.device}, got {describe(block_sizes)}"
        )
    absent = block_sizes == 0
    # The lowest finite number instead of -inf: a row without any block has weights, all of zeros.
    lowest = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(absent, lowest).softmax(-1)
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads * num_q_blocks, num_kv_blocks)
    with without_autocast(scores):
        coarse = grouped @ v_mean.masked_fill(absent[:, None], 0)
    return coarse.reshape(batch, heads, num_q_blocks, v_mean.shape[3])


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, layout: VideoLayout, tensor_layout: Layout
) -> None:
    """Check what packing and pooling rely on; the rest is checked on the packed tensors."""
    if not isinstance(layout, VideoLayout):
        raise TypeError(f"layout must be a VideoLayout, got {describe(layout)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        layout.expect_tokens(name, x, tensor_layout, layout.num_tokens)
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must be q's dtype, one of {supported}, got {describe(x)}")
    head = 3 - sequence_dim(tensor_layout)
    heads, kv_heads = q.shape[head], k.shape[head]
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ValueError(
            f"k must have the batch and head dim of q, {describe(q)}, got {describe(k)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must have the batch and heads of k, {describe(k)}, got {describe(v)}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads, got {heads} heads")
