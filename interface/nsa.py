"""Native sparse attention (NSA): selected, sliding-window and compressed branches, gated.

Causal self-attention of T tokens, each branch over its own keys of token t:

==============  ==================================================================================
compressed      means of the complete blocks up to t, ``(t + 1) // block_size`` of them
selected        the tokens of chosen blocks, up to t
sliding window  the last `window_size` tokens, t among them
==============  ==================================================================================

The weights of the compressed branch also score the blocks that `nsa_select_blocks` chooses from.
Blocks to compress and blocks to select are the same here. Softmax and products are float32 (float64
for float64 inputs). Source: NSA (arXiv 2502.11089).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sparse_atten.attention import sparse_atten_func
from sparse_atten.behind import Chunk, attend_behind
from sparse_atten.contracts import DTYPES, EMPTY, TokenSelection, options_of
from sparse_atten.cute_kernels.common.arguments import describe, expect_int
from sparse_atten.reference import accumulator_dtype, workspace_bytes
from sparse_atten.topk import block_topk
from sparse_atten.topk.reference import MAX_K

_NEVER = float("-inf")


def nsa_selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_counts: Tensor | int | None = None,
    *,
    block_size: int = 64,
    head_first: bool = False,
    softmax_scale: float | None = None,
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
) -> Tensor:
    """Causal attention to the tokens of chosen blocks.

    Parameters
    ----------
    q : Tensor, bfloat16, float16, float32 or float64 [B, T, HQ, K]
        Queries.
    k : Tensor, q's dtype [B, T, H, K]
        Keys; H divides HQ.
    v : Tensor, q's dtype [B, T, H, V]
        Values; V may differ from K.
    block_indices : Tensor, int32 or int64 [B, T, H, S], any strides
        Blocks of each token, shared by the query heads of a group, each block once. Ids that are
        not blocks, -1 and T among them, are unused slots and may stand anywhere; so do blocks after
        the token add nothing.
    block_counts : Tensor, int32 or int64 [B, T, H], or int, optional
        How many leading slots count, 0 to S. None is S.
    block_size : int
        Tokens in a block.
    head_first : bool
        Heads stand before tokens: [B, HQ, T, K], [B, H, T, V], [B, H, T, S], [B, H, T].
    softmax_scale : float, optional
        Finite and positive; None is 1 / sqrt(K).
    backend, max_workspace_bytes
        As for `sparse_atten_func`.

    Returns
    -------
    Tensor, q's dtype [B, T, HQ, V], or [B, HQ, T, V]
        0 for a token without a visible key.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.
    NotImplementedError
        The backend asked for cannot run the call.

    Notes
    -----
    k and v are not copied: they are seen as B * T tokens of H heads or, where heads come first in
    memory, as B * H sequences of one head; strides that allow neither are refused. Differentiable
    on the reference backend.
    """
    q, k, v = _token_first(q, k, v, head_first)
    batch, num_tokens, num_heads = q.shape[:3]
    num_kv_heads, value_dim = k.shape[2], v.shape[3]
    expect_int("block_size", block_size, 1)
    ids = _block_table(block_indices, block_counts, k, block_size, head_first)

    merged = _merge_dims((k, v), 2)
    by_token = merged is not None
    if merged is not None:
        keys, values = merged
        q, table, num_sequences = q.flatten(0, 1), ids.flatten(0, 1).transpose(0, 1), batch
    else:
        # Heads come first in memory: each KV head of a batch entry is a sequence of its own.
        merged = _merge_dims((k.transpose(1, 2), v.transpose(1, 2)), 3)
        if merged is None:
            raise ValueError(
                "k and v must be views of B * T tokens or of B * H * T tokens, such as contiguous "
                f"tensors are, got strides {k.stride()} and {v.stride()} for B, T, H, D"
            )
        keys, values = (x.unsqueeze(1) for x in merged)
        q = q.unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 2)
        table = ids.transpose(1, 2).flatten(0, 2)[None]
        num_sequences = batch * num_kv_heads
    ends = torch.arange(num_sequences + 1, dtype=torch.int32, device=q.device) * num_tokens
    selection = TokenSelection(table, ends, ends, num_tokens, num_tokens, block_size=block_size)
    out = sparse_atten_func(
        q,
        keys,
        values,
        selection,
        causal=True,
        softmax_scale=softmax_scale,
        backend=backend,
        max_workspace_bytes=max_workspace_bytes,
    )
    if by_token:
        out = out.view(batch, num_tokens, num_heads, value_dim)
    else:
        grouped = out.view(batch, num_kv_heads, num_tokens, -1, value_dim)
        out = grouped.transpose(1, 2).flatten(2, 3)
    return out.transpose(1, 2) if head_first else out


def nsa_sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: int = 512,
    head_first: bool = False,
    softmax_scale: float | None = None,
    max_workspace_bytes: int | None = None,
) -> Tensor:
    """Attention of each token to the last `window_size` tokens, itself among them.

    Parameters
    ----------
    q, k, v, head_first, softmax_scale
        As for `nsa_selected_attention`; any strides.
    window_size : int
        Keys that a token sees, at least 1.
    max_workspace_bytes : int, optional
        Bound on temporary memory, in bytes, as far as one query of all heads allows. None: 32 MiB
        on a CPU, 1 GiB on a device.

    Returns
    -------
    Tensor, q's dtype [B, T, HQ, V], or [B, HQ, T, V]

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.

    Notes
    -----
    Differentiable; the backward pass computes each chunk of queries again.
    """
    q, k, v = _token_first(q, k, v, head_first)
    expect_int("window_size", window_size, 1)
    scale = _scale(q, softmax_scale)
    max_bytes = _max_bytes(q, max_workspace_bytes)
    chunks = attend_behind(q, k, v, stride=1, window=window_size, scale=scale, max_bytes=max_bytes)
    return _join([chunk.out for chunk in chunks], q, v, head_first)


def nsa_compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int = 64,
    head_first: bool = False,
    softmax_scale: float | None = None,
    return_scores: bool = False,
    max_workspace_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each token to the means of the blocks that are complete with it.

    Parameters
    ----------
    q, k, v, head_first, softmax_scale
        As for `nsa_selected_attention`; any strides.
    block_size : int
        Tokens that are averaged, keys and values alike. Token t sees ``(t + 1) // block_size``
        blocks.
    return_scores : bool
        Also return what `nsa_select_blocks` takes.
    max_workspace_bytes : int, optional
        As for `nsa_sliding_window_attention`; the means of keys and values come on top.

    Returns
    -------
    out : Tensor, q's dtype [B, T, HQ, V], or [B, HQ, T, V]
        0 for the first ``block_size - 1`` tokens, which see no block.
    scores : Tensor, float32 [B, T, H, ceil(T / block_size)], or [B, H, T, ...]
        Only with `return_scores`: softmax weights of each block, summed over the query heads of a
        group; -inf for blocks that the token does not see. No gradient flows through them.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.

    Notes
    -----
    Differentiable; the backward pass computes each chunk of queries again.
    """
    q, k, v = _token_first(q, k, v, head_first)
    expect_int("block_size", block_size, 1)
    num_blocks = -(-q.shape[1] // block_size)
    outs, scores = [], []
    chunks = _compress(
        q,
        k,
        v,
        block_size=block_size,
        softmax_scale=softmax_scale,
        max_workspace_bytes=max_workspace_bytes,
    )
    for chunk in chunks:
        outs.append(chunk.out)
        if return_scores:
            scores.append(_importance(chunk, num_blocks))
    out = _join(outs, q, v, head_first)
    if not return_scores:
        return out
    nothing = q.new_empty(q.shape[0], 0, k.shape[2], num_blocks, dtype=torch.float32)
    all_scores = torch.cat([nothing, *scores], 1)
    return out, all_scores.transpose(1, 2) if head_first else all_scores


def nsa_select_blocks(
    scores: Tensor,
    *,
    num_selected: int = 16,
    num_first: int = 1,
    num_local: int = 2,
    block_size: int = 64,
    head_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the blocks of each token: the first, the local and the best-scoring ones.

    Parameters
    ----------
    scores : Tensor, float32 [B, T, H, n], with ``n = ceil(T / block_size)``
        From `nsa_compressed_attention`; [B, H, T, n] for `head_first`.
    num_selected : int, 1 to 512
        S, blocks of each token, forced ones included.
    num_first, num_local : int
        Blocks at the start of the sequence, and blocks up to the token's own (which it sees in
        part), that are always chosen. Together at most `num_selected`.
    block_size : int
        Tokens in a block.
    head_first : bool
        Heads stand before tokens, in the results too.

    Returns
    -------
    block_indices : Tensor, int32 [B, T, H, S], or [B, H, T, S]
        Ascending ids, then -1.
    block_counts : Tensor, int32 [B, T, H], or [B, H, T]
        How many were chosen.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.

    Notes
    -----
    Ties go to the lowest id; NaN and -inf are never chosen, unless forced.
    """
    dims = "[B, H, T, n]" if head_first else "[B, T, H, n]"
    if not isinstance(scores, Tensor) or scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32 {dims}, got {describe(scores)}")
    expect_int("block_size", block_size, 1)
    _check_choice(num_selected, num_first, num_local)
    axis = 2 if head_first else 1
    if scores.dim() != 4 or scores.shape[3] != -(-scores.shape[axis] // block_size):
        raise ValueError(
            f"scores must be {dims} with n = ceil(T / {block_size}), got {describe(scores)}"
        )
    token = torch.arange(scores.shape[axis], device=scores.device)
    if not head_first:
        token = token[:, None]
    forced = {"first_blocks": num_first, "last_blocks": num_local}
    return _select(scores, token, block_size, num_selected, forced)


def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: tuple[Tensor, Tensor, Tensor],
    block_size: int = 64,
    num_selected: int = 16,
    num_first: int = 1,
    num_local: int = 2,
    window_size: int = 512,
    head_first: bool = False,
    softmax_scale: float | None = None,
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
) -> Tensor:
    """Gated sum of the three branches; the compressed branch chooses the selected blocks.

    Parameters
    ----------
    q, k, v, block_size, head_first, softmax_scale
        As for `nsa_selected_attention`, for all branches.
    gates : (Tensor, Tensor, Tensor), floating point [B, T, HQ], or [B, HQ, T]
        Weights of the compressed, the selected and the sliding-window branch.
    num_selected, num_first, num_local
        As for `nsa_select_blocks`.
    window_size
        As for `nsa_sliding_window_attention`.
    backend
        As for `sparse_atten_func`: of the selected branch.
    max_workspace_bytes : int, optional
        Bound on temporary memory of each branch, in bytes; the scores of all blocks never exist as
        a whole.

    Returns
    -------
    Tensor, q's dtype [B, T, HQ, V], or [B, HQ, T, V]

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for the branches.

    Notes
    -----
    Differentiable on the reference backend, in the gates too; no gradient flows through the choice.
    """
    q, k, v = _token_first(q, k, v, head_first)
    expect_int("block_size", block_size, 1)
    _check_choice(num_selected, num_first, num_local)
    _check_gates(gates, q, head_first)
    num_blocks = -(-q.shape[1] // block_size)
    forced = {"first_blocks": num_first, "last_blocks": num_local}
    outs, ids = [], [q.new_empty(q.shape[0], 0, k.shape[2], num_selected, dtype=torch.int32)]
    common: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "max_workspace_bytes": max_workspace_bytes,
    }
    for chunk in _compress(q, k, v, block_size=block_size, **common):
        outs.append(chunk.out)
        scores = _importance(chunk, num_blocks)
        ids.append(_select(scores, chunk.token[:, None], block_size, num_selected, forced)[0])

    branches = (
        _join(outs, q, v, head_first=False),
        nsa_selected_attention(
            q, k, v, torch.cat(ids, 1), block_size=block_size, backend=backend, **common
        ),
        nsa_sliding_window_attention(q, k, v, window_size=window_size, **common),
    )
    dtype = accumulator_dtype(q)
    out = torch.zeros_like(branches[0], dtype=dtype)
    for gate, branch in zip(gates, branches, strict=True):
        weight = gate.transpose(1, 2) if head_first else gate
        out = out + weight[..., None].to(dtype) * branch.to(dtype)
    out = out.to(q.dtype)
    return out.transpose(1, 2) if head_first else out


def _compress(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    softmax_scale: float | None,
    max_workspace_bytes: int | None,
) -> Iterator[Chunk]:
    """Attend to the means of complete blocks."""
    num_blocks = k.shape[1] // block_size
    k, v = (
        x[:, : num_blocks * block_size]
        .unflatten(1, (num_blocks, block_size))
        .mean(2, dtype=accumulator_dtype(x))
        for x in (k, v)
    )
    scale, max_bytes = _scale(q, softmax_scale), _max_bytes(q, max_workspace_bytes)
    return attend_behind(q, k, v, stride=block_size, window=None, scale=scale, max_bytes=max_bytes)


def _importance(chunk: Chunk, num_blocks: int) -> Tensor:
    """Scores of all blocks for the tokens of a chunk, float32 [B, C, H, n]."""
    scores = chunk.weights.masked_fill(~chunk.seen[:, None], _NEVER).float()
    missing = num_blocks - scores.shape[3]
    return torch.nn.functional.pad(scores, (0, missing), value=_NEVER)


def _select(
    scores: Tensor, token: Tensor, block_size: int, num_selected: int, forced: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    begun = (token // block_size + 1).to(torch.int32)  # blocks with a key up to the token
    return block_topk(scores, num_selected, valid_counts=begun, **forced)


def _join(outs: list[Tensor], q: Tensor, v: Tensor, head_first: bool) -> Tensor:
    nothing = q.new_empty(q.shape[0], 0, q.shape[2], v.shape[3])
    out = torch.cat([nothing, *(out.to(q.dtype) for out in outs)], 1)
    return out.transpose(1, 2) if head_first else out


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return options_of(
        q, causal=True, softmax_scale=softmax_scale, lse_temperature=None, return_lse=False
    ).softmax_scale


def _max_bytes(q: Tensor, max_workspace_bytes: int | None) -> int:
    if max_workspace_bytes is not None:
        expect_int("max_workspace_bytes", max_workspace_bytes, 1)
    return workspace_bytes(q, max_workspace_bytes)


def _merge_dims(tensors: tuple[Tensor, ...], dims: int) -> list[Tensor] | None:
    """Merge the leading dims without a copy; None where strides do not allow it."""
    try:
        return [x.view(math.prod(x.shape[:dims]), *x.shape[dims:]) for x in tensors]
    except RuntimeError:
        return None


def _token_first(
    q: Tensor, k: Tensor, v: Tensor, head_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Check q, k and v and see them as [B, T, H, D]."""
    if not isinstance(head_first, bool):
        raise TypeError(f"head_first must be a bool, got {describe(head_first)}")
    dims = "[B, H, T, D]" if head_first else "[B, T, H, D]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.dtype != q.dtype:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must be q's dtype, one of {supported}, got {describe(x)}")
        if x.dim() != 4 or x.shape[3] == 0:
            raise ValueError(f"{name} must be {dims}, got {describe(x)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {describe(x)}")
    if head_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]):
        batch, tokens, _, dim = q.shape
        raise ValueError(
            f"k must have q's B = {batch}, T = {tokens} and D = {dim} in {dims}, "
            f"got {list(k.transpose(1, 2).shape if head_first else k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must have k's B, T and H in {dims}, "
            f"got {list(v.transpose(1, 2).shape if head_first else v.shape)}"
        )
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q must have a multiple of k's {num_kv_heads} heads, got {num_heads} heads"
        )
    return q, k, v


def _block_table(
    block_indices: Tensor,
    block_counts: Tensor | int | None,
    k: Tensor,
    block_size: int,
    head_first: bool,
) -> Tensor:
    """Ids int32 [B, T, H, S], with -1 in every slot that is unused."""
    rows: list[int | None] = list(k.shape[:3])
    dims = "[B, T, H, S]"
    if head_first:
        rows[1], rows[2], dims = rows[2], rows[1], "[B, H, T, S]"
    _expect_ids("block_indices", block_indices, dims, [*rows, None], k.device)
    width = block_indices.shape[3]
    unused = (block_indices < 0) | (block_indices >= -(-k.shape[1] // block_size))
    if isinstance(block_counts, Tensor):
        _expect_ids("block_counts", block_counts, dims.replace(", S", ""), rows, k.device)
        if k.device.type == "cpu":
            _refuse_counts(block_counts, width)
        unused |= torch.arange(width, device=k.device) >= block_counts[..., None]
    elif block_counts is not None:
        expect_int("block_counts", block_counts, 0, width)
        unused[..., block_counts:] = True
    ids = block_indices.masked_fill(unused, EMPTY).to(torch.int32)
    if k.device.type == "cpu":
        _refuse_duplicates(ids)
    return ids.transpose(1, 2) if head_first else ids


def _expect_ids(
    name: str, ids: object, dims: str, shape: list[int | None], device: torch.device
) -> None:
    sizes = "[" + ", ".join("S" if size is None else str(size) for size in shape) + "]"
    wanted = f"{name} must be int32 or int64 {dims} = {sizes}"
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{wanted}, got {describe(ids)}")
    if ids.dim() != len(shape) or any(
        size not in (None, got) for size, got in zip(shape, ids.shape, strict=True)
    ):
        raise ValueError(f"{wanted}, got {describe(ids)}")
    if ids.device != device:
        raise ValueError(f"{name} must be on q's device {device}, got {describe(ids)}")


def _refuse_counts(counts: Tensor, width: int) -> None:
    bad = ((counts < 0) | (counts > width)).nonzero().tolist()
    if bad:
        count = int(counts[tuple(bad[0])])
        place = ", ".join(map(str, bad[0]))
        raise ValueError(f"block_counts[{place}] must be in 0..{width} (S), got {count}")


def _refuse_duplicates(ids: Tensor) -> None:
    ordered = ids.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != EMPTY)
    bad = repeated.nonzero().tolist()
    if bad:
        block = int(ordered[tuple(bad[0])])
        place = ", ".join(map(str, bad[0][:-1]))
        raise ValueError(
            f"block_indices[{place}] must list each block once, got block {block} twice"
        )


def _check_choice(num_selected: int, num_first: int, num_local: int) -> None:
    expect_int("num_selected", num_selected, 1, MAX_K)
    expect_int("num_first", num_first, 0)
    expect_int("num_local", num_local, 0)
    if num_first + num_local > num_selected:
        raise ValueError(
            f"num_first + num_local must be at most num_selected {num_selected}, "
            f"got {num_first} + {num_local}"
        )


def _check_gates(gates: object, q: Tensor, head_first: bool) -> None:
    if not isinstance(gates, (tuple, list)) or len(gates) != 3:
        raise TypeError(
            "gates must be three Tensors (compressed, selected, sliding window), "
            f"got {describe(gates)}"
        )
    batch, num_tokens, num_heads = q.shape[:3]
    shape = (batch, num_heads, num_tokens) if head_first else (batch, num_tokens, num_heads)
    for i, gate in enumerate(gates):
        if not isinstance(gate, Tensor) or not gate.is_floating_point():
            raise TypeError(f"gates[{i}] must be a floating-point Tensor, got {describe(gate)}")
        if gate.shape != shape or gate.device != q.device:
            raise ValueError(
                f"gates[{i}] must be {list(shape)} on {q.device}, got {describe(gate)}"
            )
