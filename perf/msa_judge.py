"""Whether an MSA layer is right: tokens chosen at random, all their heads and keys, in float64.

Outputs have the budget of `perf.judge`. A choice of blocks must be the best one but for the
rounding of float32 sums: d_idx * 2^-23 of scale * |q| * |k|, twice what sums of exact products may
err.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perf.judge import Verdict, distance, larger, untiled
from perf.msa_layer import BLOCK, Layer
from sparse_atten.contracts import Options
from sparse_atten.definition import attend_densely

SAMPLED_TOKENS = 12


def judge_tokens(
    out: Tensor, layer: Layer, lists: Tensor | None, *, tokens: int = SAMPLED_TOKENS, seed: int = 0
) -> Verdict:
    """Compare some tokens of a causal output with the definition.

    Parameters
    ----------
    out : Tensor [S, Hq, D]
    layer : Layer
    lists : Tensor or None, int32 [Hkv, S, K]
        Blocks of each token, -1 in unused slots; None is every block.
    tokens, seed : int
        How many tokens, and of their choice. The first and the last are always among them, and
        those on both sides of the first edge of a block.
    """
    scale, group = 1 / math.sqrt(layer.q.shape[-1]), layer.group
    worst = rounded_worst = allowance = 0.0
    sample = sampled_tokens(layer.tokens, tokens, seed)
    for token in sample:
        for head in range(layer.k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            keys = slice(0, token + 1)
            some = layer.q[token, heads], layer.k[keys, head], layer.v[keys, head]
            seen = _seen(lists, head, token, out.device)
            given = *some, seen.double().expand(group, -1)
            exact = attend_densely(
                *(x[None, None] for x in given), Options(softmax_scale=scale)
            ).out[0, 0]
            rounded, slack = untiled(*some, seen, scale)
            worst = larger(worst, distance(out[token, heads], exact))
            rounded_worst = larger(rounded_worst, distance(rounded, exact))
            allowance = max(allowance, slack)
    return Verdict(worst, 2 * rounded_worst + 1e-5 + 1e-6 * allowance, len(sample))


def wrong_choice(
    lists: Tensor, layer: Layer, *, tokens: int = SAMPLED_TOKENS, seed: int = 0
) -> str | None:
    """Say what is wrong with a choice of blocks, int32 [Hkv, S, K]; None if it is right."""
    scale = 1 / math.sqrt(layer.q_idx.shape[-1])
    for token in sampled_tokens(layer.tokens, tokens, seed):
        keys = layer.k_idx[: token + 1, 0].double()
        local = token // BLOCK
        for head in range(lists.shape[0]):
            where = f"token {token}, KV head {head}"
            row = lists[head, token].tolist()
            ids = [i for i in row if i >= 0]
            if row != ids + [-1] * (len(row) - len(ids)) or ids != sorted(set(ids)):
                return f"{where}: ids {row} are not ascending, then -1"
            if len(ids) != min(layer.topk, local + 1) or ids[-1] != local:
                return f"{where}: blocks {ids} are not {layer.topk} up to the local one, {local}"
            query = layer.q_idx[token, head].double()
            scores = torch.full(((local + 1) * BLOCK,), -math.inf, dtype=torch.float64)
            scores[: token + 1] = (scale * (keys @ query)).cpu()
            best = scores.view(-1, BLOCK).amax(1).tolist()
            slack = len(query) * 2**-23 * scale * float(query.norm() * keys.norm(dim=1).max())
            passed_over = [best[i] for i in range(local) if i not in ids]
            if (
                passed_over
                and max(passed_over) > min((best[i] for i in ids[:-1]), default=math.inf) + slack
            ):
                return f"{where}: a block that was passed over has a better score than one of {ids}"
    return None


def sampled_tokens(count: int, tokens: int, seed: int) -> list[int]:
    """Tokens at random, and those at edges."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:tokens]
    edges = {0, BLOCK - 1, BLOCK, count - 1}
    return sorted({*chosen.tolist(), *(i for i in edges if i < count)})


def _seen(lists: Tensor | None, head: int, token: int, device: torch.device) -> Tensor:
    """Which keys up to its own a token sees, bool [token + 1]."""
    if lists is None:
        return torch.ones(token + 1, dtype=torch.bool, device=device)
    blocks = torch.zeros(token // BLOCK + 1, dtype=torch.bool)
    for block in lists[head, token].tolist():
        if 0 <= block <= token // BLOCK:
            blocks[block] = True
    return blocks.repeat_interleave(BLOCK)[: token + 1].to(device)
