"""Which KV blocks each query block keeps: block scores, exact budgets, top-k in each region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from sparse_atten.contracts import BlockSelection, Layout
from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.reference import without_autocast
from sparse_atten.topk import block_topk
from sparse_atten.topk.reference import MAX_K
from sparse_atten.vsa.layout import VideoLayout, sequence_dim

Sparsity = float | str | Fraction | Decimal
Policy = Literal["exempt", "compete"]

_Region = tuple[int, int, int]  # start, stop, budget
_CACHED_BUDGETS = 1024


def region_budget(sparsity: Sparsity, num_blocks: int) -> int:
    """Count the blocks that a region keeps: max(1, min(ceil((1 - sparsity) * num_blocks), ...)).

    Parameters
    ----------
    sparsity : float, int, str, Fraction or Decimal
        Share to drop, 0 <= sparsity < 1. A float stands for the decimal that it prints, so that
        0.7 of 10 blocks keeps 3 and 0.95 of 20 keeps 1; binary rounding would keep one more.
    num_blocks : int
        Blocks of the region, at least 1.

    Returns
    -------
    int
        1 to `num_blocks`.

    Raises
    ------
    TypeError, ValueError
        `sparsity` is no such number, or `num_blocks` is below 1.
    """
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int):
        raise TypeError(f"num_blocks must be an int, got {describe(num_blocks)}")
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    return _budget("sparsity", sparsity, num_blocks)


def route_scores(q_mean: Tensor, k_mean: Tensor, *, softmax_scale: float | None = None) -> Tensor:
    """Score every pair of blocks: E = softmax_scale * q_mean k_mean^T. Differentiable.

    Parameters
    ----------
    q_mean : Tensor, float32 or float64 [B, Hq, Nq, D]
        Block means of the queries.
    k_mean : Tensor, q_mean's dtype [B, Hkv, Nkv, D]
        Block means of the keys; Hkv divides Hq.
    softmax_scale : float, optional
        None: 1 / sqrt(D). It does not change which blocks are the best, only the coarse branch.

    Returns
    -------
    Tensor, q_mean's dtype [B, Hq, Nq, Nkv]
        Row i, column j: the mean logit of the token pairs of query block i and KV block j.

    Raises
    ------
    TypeError, ValueError
        Wrong dtypes, shapes or devices.

    Notes
    -----
    Source: VSA (arXiv 2505.13389).
    """
    expect_blocks(("q_mean", q_mean), ("k_mean", k_mean), "be [B, H, N, D]")
    batch, heads, num_q_blocks, head_dim = q_mean.shape
    kv_heads = k_mean.shape[1]
    if k_mean.dtype != q_mean.dtype:
        raise TypeError(f"k_mean must have q_mean's dtype {q_mean.dtype}, got {describe(k_mean)}")
    if (k_mean.shape[0], k_mean.shape[3], k_mean.device) != (batch, head_dim, q_mean.device):
        raise ValueError(
            f"k_mean must be [{batch}, Hkv, Nkv, {head_dim}] on {q_mean.device}, "
            f"got {describe(k_mean)}"
        )
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim)
    # The heads of a GQA group stand below each other, so that no key is copied.
    rows = heads // kv_heads * num_q_blocks
    grouped = (q_mean * softmax_scale).reshape(batch, kv_heads, rows, head_dim)
    with without_autocast(q_mean):
        scores = grouped @ k_mean.transpose(2, 3)
    return scores.reshape(batch, heads, num_q_blocks, k_mean.shape[2])


def route(
    scores: Tensor,
    layout: VideoLayout,
    *,
    sparsity: Sparsity | Sequence[Sparsity],
    policy: Policy = "exempt",
    tensor_layout: Layout = "bhsd",
) -> BlockSelection:
    """Choose the KV blocks of every query block.

    Prefix queries see everything (`dense_rows`). Video queries, those of reference videos too,
    keep KV blocks by policy:

    - "exempt": the whole prefix, and of each video its own budget of best blocks. Scores of
      different videos never meet, so that the target video cannot take a reference's budget.
    - "compete": the best blocks of the whole sequence, prefix included, as many as "exempt" keeps.
      For one video at most.

    Parameters
    ----------
    scores : Tensor, float32 or float64 [B, Hq, num_blocks, num_blocks], any strides
        From `route_scores`. Equal scores (as float32) go to the lowest id; a score of NaN or -inf
        is never chosen, except where the budget is the whole region: it is kept, whatever the
        scores.
    layout : VideoLayout
        All its blocks hold tokens, so that no block of size 0 can be chosen.
    sparsity : float, int, str, Fraction, Decimal, or a sequence of them
        Share of the blocks to drop, for all videos or for each of `layout.video_tile_spans`; the
        budgets are `region_budget`'s.
    policy : {"exempt", "compete"}
        How prefix keys are treated.
    tensor_layout : {"bhsd", "bshd"}
        Order of the dims of the tensors that are to be attended.

    Returns
    -------
    BlockSelection
        Ids ascend. The table is as wide as the budget of a video query, and empty where nothing
        is dropped: then all rows are dense rows.

    Raises
    ------
    TypeError, ValueError
        Wrong scores, sparsity or policy; "compete" with several videos.
    NotImplementedError
        A budget above 512 that is not the whole region.
    """
    _check_scores(scores, layout)
    sequence_dim(tensor_layout)
    budgets = _budgets(layout, sparsity, policy)
    regions = [region for region in budgets if region[2] < region[1] - region[0]]
    kept: list[tuple[int, int]] = []
    dense_rows = layout.num_blocks
    if regions:
        dense_rows = layout.num_prefix_tiles
        kept = [region[:2] for region in budgets if region not in regions]
        if policy == "exempt" and layout.num_prefix_tiles:
            kept.append((0, layout.num_prefix_tiles))
    for start, stop, budget in regions:
        if budget > MAX_K:
            raise NotImplementedError(
                f"sparsity {sparsity!r} keeps {budget} of the {stop - start} blocks {start} to "
                f"{stop - 1}; supported: up to {MAX_K}, or all"
            )

    indices, counts = block_topk(scores.to(torch.float32), regions=regions, keep_spans=kept)
    if dense_rows:
        indices[:, :, :dense_rows].fill_(-1)
        counts[:, :, :dense_rows].zero_()
    return BlockSelection(
        indices,
        counts,
        layout=tensor_layout,
        block_size=layout.block_size,
        kv_block_sizes=layout.block_sizes,
        q_block_sizes=layout.block_sizes,
        dense_rows=dense_rows,
    )


def expect_blocks(queries: tuple[str, Tensor], keys: tuple[str, Tensor], rank: str) -> None:
    """Check two named float tensors of blocks: dtypes, ranks, heads of a GQA group."""
    for name, x in (queries, keys):
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, got {describe(x)}")
        if x.dim() != 4:
            raise ValueError(f"{name} must {rank}, got {describe(x)}")
    (q_name, q), (k_name, k) = queries, keys
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{q_name} must have a multiple of {k_name}'s {kv_heads} heads, got {heads}"
        )


def _check_scores(scores: Tensor, layout: VideoLayout) -> None:
    if not isinstance(layout, VideoLayout):
        raise TypeError(f"layout must be a VideoLayout, got {describe(layout)}")
    n = layout.num_blocks
    wanted = f"float32 or float64 [B, Hq, {n}, {n}]"
    if not isinstance(scores, Tensor) or scores.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scores must be {wanted}, got {describe(scores)}")
    if scores.dim() != 4 or tuple(scores.shape[2:]) != (n, n):
        raise ValueError(f"scores must be {wanted}, got {describe(scores)}")
    if scores.device != layout.device:
        raise ValueError(
            f"scores must be on the layout's device {layout.device}, got {describe(scores)}"
        )


def _budgets(
    layout: VideoLayout, sparsity: Sparsity | Sequence[Sparsity], policy: Policy
) -> list[_Region]:
    """Return the regions in which blocks compete for a budget."""
    if policy not in ("exempt", "compete"):
        raise ValueError(f"policy must be 'exempt' or 'compete', got {policy!r}")
    spans = layout.video_tile_spans
    if policy == "compete" and len(spans) > 1:
        raise ValueError(
            f"policy 'compete' needs a layout of at most 1 video, got {len(spans)}; "
            "'exempt' gives each video its own budget"
        )
    if isinstance(sparsity, Sequence) and not isinstance(sparsity, str):
        if len(sparsity) != len(spans):
            raise ValueError(
                f"sparsity must be one number or one for each of the {len(spans)} videos, "
                f"got {len(sparsity)}"
            )
        shares = [(f"sparsity[{i}]", share) for i, share in enumerate(sparsity)]
    else:
        _budget("sparsity", sparsity, 1)  # checked even where no video uses it
        shares = [("sparsity", sparsity)] * len(spans)
    budgets = [
        (start, stop, _budget(name, share, stop - start))
        for (start, stop), (name, share) in zip(spans, shares, strict=True)
    ]
    if policy == "compete":
        return [(0, stop, start + budget) for start, stop, budget in budgets]
    return budgets


def _budget(name: str, sparsity: object, num_blocks: int) -> int:
    """Compute a budget from the decimal that a sparsity prints."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (Real, Decimal, str)):
        raise TypeError(f"{name} must be a number, got {describe(sparsity)}")
    budget = _exact_budget(str(sparsity), num_blocks)
    if budget is None:
        raise ValueError(f"{name} must be at least 0 and below 1, got {describe(sparsity)}")
    return budget


@lru_cache(maxsize=_CACHED_BUDGETS)
def _exact_budget(sparsity: str, num_blocks: int) -> int | None:
    """Compute a budget; None for a sparsity out of range."""
    try:
        share = Fraction(sparsity)
    except (ValueError, ZeroDivisionError):
        return None
    if not 0 <= share < 1:
        return None
    return max(1, min(math.ceil((1 - share) * num_blocks), num_blocks))


# What torch.compiler.assume_constant_result sets; calling it would import all of the compiler.
_budget._dynamo_marked_constant = True  # type: ignore[attr-defined]
