"""The definition: attention over an explicit mask in float64, for small inputs.

Nothing here is blocked, gathered or online, so that it shares no idea with what it judges. A
selection becomes a matrix that says how many times each query sees each key; the logits of a key
that is listed several times grow by the logarithm of that number. Memory and time are those of the
whole score matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from sparse_atten.contracts import BlockSelection, Options, Selection, TokenSelection
from sparse_atten.reference import Result

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Options], Result]


def attend_densely(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: Options) -> Result:
    """Attend over [B, H, S, D] tensors in float64, weighting each key by how often it is seen."""
    q, k, v = q.double(), k.double(), v.double()
    scores = options.softmax_scale * (q @ k.transpose(-1, -2))
    visible = seen > 0
    logits = (scores + seen.log()).masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0).softmax(-1).masked_fill(~visible, 0)

    finite = v.isfinite()
    out = weights @ v.masked_fill(~finite, 0)
    poisoned = visible.double() @ (~finite).double() > 0
    out = out.masked_fill(poisoned, float("nan"))
    lse_t = None
    if options.lse_temperature is not None:
        warm = options.lse_temperature * scores + seen.log()
        lse_t = warm.masked_fill(~visible, float("-inf")).logsumexp(-1)
    return Result(out, logits.logsumexp(-1), lse_t)


def define_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    options: Options,
    *,
    attend: Attend = attend_densely,
) -> Result:
    """Attend as defined; arguments as validated by `contracts.validate`, results in float64.

    A query that sees a non-finite key or value gets a non-finite output; what it does not see has
    no effect, whatever it holds. A query that sees nothing gets output 0 and LSE -inf.

    `attend` is what happens once the mask is known: a test may put the arithmetic of another
    precision in its place.
    """
    if isinstance(selection, BlockSelection):
        return _define_blocks((q, k, v), selection, options, attend)
    return _define_tokens((q, k, v), selection, options, attend)


def block_visibility(
    q: Tensor, k: Tensor, selection: BlockSelection, *, causal: bool = False
) -> Tensor:
    """Count how many times each query sees each key, float64 [B, Hq, Sq, Skv]."""
    seq = 2 if selection.layout == "bhsd" else 1
    num_queries, num_keys, block = q.shape[seq], k.shape[seq], selection.block_size
    batch, heads, num_q_blocks, width = selection.q2k_indices.shape
    num_kv_blocks = -(-num_keys // block)
    lists = torch.zeros(batch, heads, num_q_blocks, num_kv_blocks, dtype=torch.float64)
    ids, counts = selection.q2k_indices.cpu(), selection.q2k_counts.cpu()
    for slot in range(width):
        chosen = ids[..., slot : slot + 1].long()
        counted = (slot < counts)[..., None] & (chosen >= 0) & (chosen < num_kv_blocks)
        if num_kv_blocks:
            lists.scatter_add_(3, chosen.clamp(0, num_kv_blocks - 1), counted.double())
    lists[:, :, : selection.dense_rows] = 1

    q_valid = _valid_tokens(selection.q_block_sizes, num_queries, block)
    kv_valid = _valid_tokens(selection.kv_block_sizes, num_keys, block).expand(batch, num_keys)
    seen = lists.repeat_interleave(block, 2)[:, :, :num_queries]
    seen = seen.repeat_interleave(block, 3)[..., :num_keys]
    seen = seen * q_valid[:, None] * kv_valid[:, None, None]
    if causal:
        q_position = q_valid.cumsum(0) - 1
        kv_position = kv_valid.cumsum(1) - 1
        shift = kv_valid.sum(1) - q_valid.sum()
        visible = kv_position[:, None] <= q_position[:, None] + shift[:, None, None]
        seen = seen * visible[:, None]
    return seen


def _valid_tokens(sizes: Tensor | None, length: int, block: int) -> Tensor:
    """Which tokens of each block are valid, bool [..., length]."""
    token = torch.arange(length)
    if sizes is None:
        return torch.ones(length, dtype=torch.bool)
    return token % block < sizes.cpu()[..., token // block]


def _define_blocks(
    inputs: tuple[Tensor, ...], selection: BlockSelection, options: Options, attend: Attend
) -> Result:
    q, k, v = inputs
    seen = block_visibility(q, k, selection, causal=options.causal).to(q.device)
    if selection.layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    result = attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), seen, options)
    if selection.layout == "bshd":
        result = result._replace(out=result.out.transpose(1, 2))
    return result


def _define_tokens(
    inputs: tuple[Tensor, ...], selection: TokenSelection, options: Options, attend: Attend
) -> Result:
    q, k, v = inputs
    num_tokens, heads, _ = q.shape
    block = selection.block_size
    out = q.new_zeros(num_tokens, heads, v.shape[-1], dtype=torch.float64)
    lse = q.new_full((num_tokens, heads), float("-inf"), dtype=torch.float64)
    lse_t = lse.clone()
    bounds = selection.cu_seqlens_q.tolist()
    for sequence, (start, stop) in enumerate(pairwise(bounds)):
        keys, values = (_sequence_kv(x, selection, sequence) for x in (k, v))
        num_queries, num_keys = stop - start, keys.shape[0]
        num_blocks = -(-num_keys // block)
        group = heads // max(keys.shape[1], 1)
        seen = torch.zeros(keys.shape[1], num_queries, num_keys, dtype=torch.float64)
        for head in range(keys.shape[1]):
            lists = selection.q2k_indices[head, start:stop].tolist()
            for row, chosen in enumerate(lists):
                for b in chosen:
                    if 0 <= b < num_blocks:
                        seen[head, row, b * block : (b + 1) * block] += 1
        if options.causal:
            last_key = torch.arange(num_queries)[:, None] + num_keys - num_queries
            seen = seen * (torch.arange(num_keys) <= last_key)
        part = attend(
            q[start:stop].transpose(0, 1)[None],
            keys.transpose(0, 1).repeat_interleave(group, 0)[None],
            values.transpose(0, 1).repeat_interleave(group, 0)[None],
            seen.repeat_interleave(group, 0)[None].to(q.device),
            options,
        )
        out[start:stop] = part.out[0].transpose(0, 1)
        lse[start:stop] = part.lse[0].transpose(0, 1)
        if part.lse_t is not None:
            lse_t[start:stop] = part.lse_t[0].transpose(0, 1)
    return Result(out, lse, lse_t if options.lse_temperature is not None else None)


def _sequence_kv(pool: Tensor, selection: TokenSelection, sequence: int) -> Tensor:
    """Keys or values of one sequence, [length, Hkv, D]."""
    used = selection.seqused_k
    if selection.page_table is None:
        assert selection.cu_seqlens_k is not None
        start, stop = selection.cu_seqlens_k[sequence : sequence + 2].tolist()
        length = stop - start if used is None else min(int(used[sequence]), stop - start)
        return pool[start : start + length]
    assert used is not None
    if selection.kv_layout == "hnd":
        pool = pool.transpose(1, 2)
    length = int(used[sequence])
    pages = selection.page_table[sequence, : -(-length // selection.block_size)].long()
    return pool[pages].flatten(0, 1)[:length]
