"""Attention of each token to a run of keys that ends with it, in chunks of queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.contracts import records_grad
from sparse_atten.reference import accumulator_dtype, without_autocast

_LEAST_QUERIES = 64  # queries of a chunk under a short window, where the workspace allows


class Chunk(NamedTuple):
    """What some tokens found among L keys that hold all they see."""

    token: Tensor  # int64 [C]
    out: Tensor  # [B, C, HQ, V]
    weights: Tensor  # [B, C, H, L], summed over the query heads of a group; not differentiable
    seen: Tensor  # bool [C, L]


def attend_behind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stride: int,
    window: int | None,
    scale: float,
    max_bytes: int,
) -> Iterator[Chunk]:
    """Attend from token t to the last `window` of its ``(t + 1) // stride`` keys (None: to all)."""
    batch, num_tokens, num_heads = q.shape[:3]
    num_keys = k.shape[1]
    reach = num_keys if window is None else min(window, num_keys)
    most = num_tokens if window is None else max(reach, _LEAST_QUERIES)
    widest = num_keys if window is None else min(num_keys, reach + most)
    per_query = batch * num_heads * max(widest, 1) * (3 * accumulator_dtype(q).itemsize + 1)
    step = max(1, min(most, max_bytes // max(per_query, 1)))
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        token = torch.arange(start, stop, device=q.device)
        first = max(0, (start + 1) // stride - reach)
        keys = slice(first, stop // stride)
        end = (token + 1) // stride - first
        begin = (end - reach).clamp(min=0)
        inputs = q[:, start:stop], k[:, keys], v[:, keys], begin, end
        if records_grad(q, k, v):
            from torch.utils.checkpoint import checkpoint  # slow to import

            out, weights = checkpoint(
                _attend_range, *inputs, scale=scale, use_reentrant=False, preserve_rng_state=False
            )
        else:
            out, weights = _attend_range(*inputs, scale=scale)
        slot = torch.arange(k[:, keys].shape[1], device=q.device)
        seen = (slot >= begin[:, None]) & (slot < end[:, None])
        yield Chunk(token, out, weights, seen)


def _attend_range(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from query c to the keys begin[c] to end[c] - 1; output and summed weights."""
    dtype = accumulator_dtype(q)
    num_queries, num_kv_heads, num_keys = q.shape[1], k.shape[2], k.shape[1]
    slot = torch.arange(num_keys, device=q.device)
    seen = (slot >= begin[:, None]) & (slot < end[:, None])
    empty = (end <= begin)[:, None]

    queries = q.to(dtype).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4) * scale
    keys, values = (x.to(dtype).transpose(1, 2) for x in (k, v))  # [B, H, L, D]
    with without_autocast(q):
        scores = queries.flatten(2, 3) @ keys.transpose(2, 3)
    scores = scores.unflatten(2, (-1, num_queries))  # [B, H, G, C, L]
    scores = scores.masked_fill_(~seen, float("-inf")).masked_fill_(empty, 0)
    weights = scores.softmax(-1).masked_fill(~seen, 0)

    # 0 * NaN would spread what a query does not see: non-finite values go in by range instead.
    absent = ~values.isfinite()
    with without_autocast(q):
        out = weights.flatten(2, 3) @ values.masked_fill(absent, 0)
    found = torch.nn.functional.pad(absent.cumsum(2, dtype=torch.int32), (0, 0, 1, 0))
    poisoned = found[:, :, end] > found[:, :, begin]
    out = out.unflatten(2, (-1, num_queries)).masked_fill(poisoned[:, :, None], float("nan"))
    summed = weights.detach().sum(2).transpose(1, 2)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), summed
