"""KV-outer attention in plain torch: what the device kernels K1 and K2 must equal.

K1 walks the work items of a schedule: it loads one KV block, attends to it from the query tokens
that chose it, and stores a normalised partial output and its LSE in a slot of the query's own. A
selection that was prepared in chunks of query tokens is handled chunk by chunk. K2 merges the
partials of each query, which is exact:

    w_s = exp(lse_s - max lse)        out = sum w_s out_s / sum w_s        lse = log sum exp(lse_s)

Sources: MSA (arXiv 2606.13392), section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_atten.attention import check
from sparse_atten.contracts import TokenSelection, options_of
from sparse_atten.cute_kernels.common.arguments import describe, expect_int
from sparse_atten.preparation import PreparedSelection
from sparse_atten.reference import accumulator_dtype, without_autocast
from sparse_atten.sequences import sequences_of

_NEVER = float("-inf")


@torch.no_grad()
def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: PreparedSelection,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature: float | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Attend block by block (K1): a partial result for each query and each of its KV blocks.

    Parameters
    ----------
    q, k, v : Tensor
        q [Tq, Hq, D], k and v [Tk, Hkv, D] or paged pools, as for `sparse_atten_func`.
    prepared : PreparedSelection
        From `prepare`, for tensors of these shapes.
    causal : bool
        Also hide the keys after the query, by real positions (bottom-right).
    softmax_scale : float, optional
        Finite and positive; None is 1 / sqrt(D).
    lse_temperature : float, optional
        Also return the partial log-sum-exps of ``lse_temperature * softmax_scale * s``.
    chunk : int
        Which of the chunks of query tokens that were prepared; Tq below is the number of its own.

    Returns
    -------
    o_partial : Tensor, float32 (float64 for float64 q) [K, Tq, Hq, Dv]
        Normalised over the keys of one block. 0 where the query sees no key of the block. Slots
        that no work item writes hold NaN.
    lse_partial : Tensor, o_partial's dtype [K, Tq, Hq]
        Natural log-sum-exp of the scaled scores; -inf where the query sees no key of the block.
    lse_t_partial : Tensor, likewise
        Only with `lse_temperature`.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.

    Notes
    -----
    A Python loop over work items, which reads the schedule on the host. Keys and values that a
    query does not see never reach its result, whatever they hold. No gradients.
    """
    if not isinstance(prepared, PreparedSelection):
        raise TypeError(f"prepared must be what prepare() returned, got {describe(prepared)}")
    options = options_of(
        q,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=True,
    )
    expect_int("chunk", chunk, 0, len(prepared.chunks) - 1)
    selection, part = prepared.selection, prepared.chunks[chunk]
    csr, schedule, first_token = part.csr, part.schedule, part.first_token
    problem = check(q, k, v, selection, options)
    sequences = sequences_of(selection, problem.num_keys)
    group, block = problem.group_size, selection.block_size

    dtype = accumulator_dtype(q)
    shape = (csr.table_width, part.num_tokens, problem.num_q_heads)
    nothing = torch.full(shape, float("nan"), dtype=dtype, device=q.device)
    o_partial = nothing[..., None].repeat(1, 1, 1, problem.value_dim)
    lse_partial, lse_t_partial = nothing.clone(), nothing.clone()

    items = schedule.work_items[: int(schedule.num_items)].tolist()
    for kv_head, row, q_begin, q_count, batch, kv_block in items:
        first = int(csr.row_ptr[kv_head, row]) + q_begin
        entries = slice(first, first + q_count)
        local = csr.q_indices[kv_head, entries].long()
        slot = schedule.split_slot[kv_head, entries].long()
        num_queries, num_keys = int(sequences.q_length[batch]), int(sequences.k_length[batch])
        where = {"batch": batch, "kv_block": kv_block, "start": int(sequences.k_start[batch])}
        left = num_keys - kv_block * block
        keys, values = (
            _load_block(x, selection, kv_head, **where)[:left].to(dtype) for x in (k, v)
        )

        token = max(int(sequences.q_start[batch]), first_token) + local
        heads = slice(kv_head * group, (kv_head + 1) * group)
        queries = q[token, heads].to(dtype)  # [q_count, G, D]
        with without_autocast(q):
            scores = options.softmax_scale * (queries @ keys.T)
        position = kv_block * block + torch.arange(keys.shape[0], device=q.device)
        shift = num_keys - num_queries - int(sequences.q_start[batch])
        last_key = token + shift if causal else local.new_full((1,), num_keys)
        seen = (position <= last_key[:, None])[:, None]  # [q_count or 1, 1, L]

        place = (slot, token - first_token, heads)
        o_partial[place] = _average(scores, seen, values)
        lse_partial[place] = scores.masked_fill(~seen, _NEVER).logsumexp(-1)
        if lse_temperature is not None:
            warm = (lse_temperature * scores).masked_fill(~seen, _NEVER)
            lse_t_partial[place] = warm.logsumexp(-1)
    if lse_temperature is not None:
        return o_partial, lse_partial, lse_t_partial
    return o_partial, lse_partial


@torch.no_grad()
def merge_partials(
    o_partial: Tensor,
    lse_partial: Tensor,
    split_counts: Tensor,
    *,
    lse_t_partial: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Merge the partials of each query (K2). Exact.

    Parameters
    ----------
    o_partial : Tensor, floating point [K, Tq, Hq, D]
        Partial outputs, each normalised over its own keys.
    lse_partial : Tensor, float32 or float64 [K, Tq, Hq]
        Their natural log-sum-exps. A partial with LSE -inf weighs nothing.
    split_counts : Tensor, int32 [Tq, Hkv]
        How many leading slots of each query and KV head hold partials; clamped to [0, K]. The
        slots after them are not read, and may hold anything.
    lse_t_partial : Tensor, lse_partial's dtype [K, Tq, Hq], optional
        Partial temperature log-sum-exps, merged likewise.
    dtype : torch.dtype, optional
        Of the output; None is that of `o_partial`.

    Returns
    -------
    out : Tensor [Tq, Hq, D]
        0 for a query without partials, or whose partials all have LSE -inf.
    lse : Tensor, lse_partial's dtype [Tq, Hq]
        -inf for such a query.
    lse_t : Tensor, likewise
        Only with `lse_t_partial`.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong dtype, rank or shape.
    """
    _check_partials(o_partial, lse_partial, split_counts, lse_t_partial)
    width, _, num_heads, _ = o_partial.shape
    group = num_heads // max(split_counts.shape[1], 1)
    slot = torch.arange(width, device=o_partial.device)[:, None, None]
    used = slot < split_counts.repeat_interleave(group, 1)  # [K, Tq, Hq]

    lses = lse_partial.masked_fill(~used, _NEVER)
    weighs = lses != _NEVER
    # Weights relative to the peak, divided by their sum: exp(lse_s - lse) would carry over the
    # rounding of lse, which grows with its size.
    peak = lses.masked_fill(~weighs, torch.finfo(lses.dtype).min).amax(0) if width else 0
    weights = (lses - peak).exp()
    total = weights.sum(0)
    out = o_partial.new_zeros(o_partial.shape[1:], dtype=lses.dtype)
    for s in range(width):
        part = o_partial[s].to(lses.dtype).masked_fill(~weighs[s, ..., None], 0)
        out += weights[s, ..., None] * part
    out /= total.masked_fill(total == 0, 1)[..., None]
    lse = lses.logsumexp(0)
    out = out.to(dtype or o_partial.dtype)
    if lse_t_partial is not None:
        return out, lse, lse_t_partial.masked_fill(~used, _NEVER).logsumexp(0)
    return out, lse


def _load_block(
    pool: Tensor, selection: TokenSelection, kv_head: int, *, batch: int, kv_block: int, start: int
) -> Tensor:
    """Keys or values of a block, [block_size, D]; none where its page lies outside the pool."""
    if selection.page_table is None:
        start += kv_block * selection.block_size
        return pool[start : start + selection.block_size, kv_head]
    page = int(selection.page_table[batch, kv_block])
    if not 0 <= page < pool.shape[0]:
        return pool.new_empty(0, pool.shape[-1])
    return pool[page, kv_head] if selection.kv_layout == "hnd" else pool[page, :, kv_head]


def _average(scores: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """Softmax average of the values [L, D] that are seen; a seen non-finite value gives NaN."""
    weights = scores.masked_fill(~seen, _NEVER).softmax(-1).masked_fill(~seen, 0)
    finite = values.isfinite()
    with without_autocast(values):
        average = weights @ values.masked_fill(~finite, 0)
        poisoned = seen.to(values.dtype) @ (~finite).to(values.dtype) > 0
    return average.masked_fill(poisoned, float("nan"))


def _check_partials(
    o_partial: Tensor, lse_partial: Tensor, split_counts: Tensor, lse_t_partial: Tensor | None
) -> None:
    if not isinstance(o_partial, Tensor) or not o_partial.is_floating_point():
        raise TypeError(f"o_partial must be a floating-point Tensor, got {describe(o_partial)}")
    if o_partial.dim() != 4:
        raise ValueError(f"o_partial must be [K, Tq, Hq, D], got {describe(o_partial)}")
    wide = (torch.float32, torch.float64)
    for name, lse in (("lse_partial", lse_partial), ("lse_t_partial", lse_t_partial)):
        if lse is None and name == "lse_t_partial":
            continue
        if not isinstance(lse, Tensor) or lse.dtype not in wide:
            raise TypeError(f"{name} must be float32 or float64, got {describe(lse)}")
        if lse.shape != o_partial.shape[:3]:
            shape = list(o_partial.shape[:3])
            raise ValueError(f"{name} must be [K, Tq, Hq] = {shape}, got {describe(lse)}")
    _, num_queries, num_heads, _ = o_partial.shape
    wanted = f"int32 [Tq, Hkv] = [{num_queries}, Hkv] with Hkv a divisor of {num_heads}"
    if not isinstance(split_counts, Tensor) or split_counts.dtype != torch.int32:
        raise TypeError(f"split_counts must be {wanted}, got {describe(split_counts)}")
    fits = split_counts.dim() == 2 and split_counts.shape[0] == num_queries
    if fits and num_heads:
        num_kv_heads = split_counts.shape[1]
        fits = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    if not fits:
        raise ValueError(f"split_counts must be {wanted}, got {describe(split_counts)}")
