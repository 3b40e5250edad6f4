"""Drop-in forms with the signatures of other packages, so that a caller changes an import.

    from sparse_atten.adapters import fastvideo_block_sparse_attn as block_sparse_attn_sm100a
    from sparse_atten.adapters import msa_sparse_atten_func as sparse_atten_func
    from sparse_atten.adapters import flashinfer_msa_sparse_attention as msa_sparse_attention

Each translates its arguments and calls `sparse_atten.sparse_atten_func`, whose checks, backends and
rules hold: strides are honoured, a query without keys gets output 0 and LSE -inf. An argument that
asks for something we lack raises NotImplementedError; none is dropped in silence.

Sources of the signatures: FastVideo (fastvideo-kernel, block_sparse_attn_sm100a); MSA
(fmha_sm100, sparse_atten_func); FlashInfer (flashinfer.msa_ops, msa_sparse_attention).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparse_atten.attention import sparse_atten_func
from sparse_atten.contracts import BlockSelection, TokenSelection
from sparse_atten.cute_kernels.common.arguments import (
    describe,
    expect_int,
    expect_positive,
    expect_table,
)
from sparse_atten.msa.reverse import lists_of_csr

_BLOCK = 128


def fastvideo_block_sparse_attn(  # noqa: PLR0917 - their positional arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_idx: Tensor,
    q2k_num: Tensor,
    variable_block_sizes: Tensor,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attend as FastVideo's ``block_sparse_attn_sm100a``.

    Parameters
    ----------
    q, k, v : Tensor [B, H, S, D]
        As for `sparse_atten_func` with layout "bhsd"; more query heads than KV heads are fine.
    q2k_idx : Tensor, int32 or int64 [B, H, Nq, K]
        Kept KV blocks. int64 is converted.
    q2k_num : Tensor, int32 or int64 [B, H, Nq]
        How many leading entries of each list count.
    variable_block_sizes : Tensor, int32 or int64 [Nkv]
        Valid keys in each KV block. A block has ``Skv / Nkv`` tokens.
    need_lse : bool
        Whether to return the LSE.

    Returns
    -------
    out : Tensor [B, H, S, D]
    lse : Tensor, float32 [B, H, S], or None
        Log-sum-exp in base 2 of the scaled scores, as FastVideo's; -inf for a query that sees no
        key (FastVideo leaves a large negative number).

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `sparse_atten_func`; ValueError where the blocks do not divide the keys evenly.

    Notes
    -----
    Padding queries are computed as others, as FastVideo does. Any Nq will do, odd ones too.
    """
    tables = {"q2k_idx": q2k_idx, "q2k_num": q2k_num, "variable_block_sizes": variable_block_sizes}
    ids, counts, sizes = (_as_int32(name, table) for name, table in tables.items())
    if not isinstance(k, Tensor) or k.dim() != 4:
        raise ValueError(f"k must be [B, H, S, D], got {describe(k)}")
    num_keys, num_blocks = k.shape[2], sizes.numel()
    if num_blocks == 0 or num_keys == 0 or num_keys % num_blocks:
        raise ValueError(
            f"variable_block_sizes must have a length that divides the {num_keys} keys, "
            f"got {describe(variable_block_sizes)}"
        )
    selection = BlockSelection(ids, counts, block_size=num_keys // num_blocks, kv_block_sizes=sizes)
    if not need_lse:
        return sparse_atten_func(q, k, v, selection), None
    out, lse = sparse_atten_func(q, k, v, selection, return_lse=True)
    return out, lse * math.log2(math.e)


def msa_sparse_atten_func(  # noqa: PLR0917 - their positional arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k2q_row_ptr: Tensor,
    k2q_q_indices: Tensor,
    topK: int,  # noqa: N803 - their name
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = _BLOCK,
    causal: bool = False,
    softmax_scale: float | None = None,
    lse_temperature_scale: float = 1.0,
    return_temperature_lse: bool = False,
    partial_dtype: torch.dtype = torch.bfloat16,
    return_softmax_lse: bool = False,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    schedule: object | None = None,
    usable_SM_count: int = -1,  # noqa: N803 - their name
    qk_dtype: torch.dtype | None = None,
    pv_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Attend as MSA's ``sparse_atten_func``, over the caller's k2q CSR.

    Parameters
    ----------
    q, k, v : Tensor
        q [Tq, Hq, D]; k and v [Tk, Hkv, D], or pools [pages, Hkv, blk_kv, D] with `page_table`.
    k2q_row_ptr : Tensor, int32 [Hkv, R + 1]
        Where the entries of each row begin. Rows are ordered as MSA's builder does: block 0 of all
        sequences that have one, then block 1, and so on; R may be larger than their number.
    k2q_q_indices : Tensor, int32 [Hkv, >= edges]
        Query tokens of each row, counted from the start of their sequence. MSA's kernel needs them
        ascending inside a row; here **any order** gives the same result.
    topK : int
        Most entries that name one query token; any number from 1.
    cu_seqlens_q, cu_seqlens_k : Tensor, int32 [B + 1]
        Offsets of queries and keys; with pages those of the keys give lengths only.
    max_seqlen_q, max_seqlen_k, causal, softmax_scale, page_table
        As in `TokenSelection` and `sparse_atten_func`; `blk_kv` is its `block_size`.
    seqused_k : Tensor, int32 [B], optional
        Keys of each sequence; None takes the lengths of `cu_seqlens_k`, with pages too.
    lse_temperature_scale : float
        Divisor of the scores in the temperature LSE: what `lse_temperature` is the inverse of.
    return_softmax_lse, return_temperature_lse : bool
        Also return the natural-log LSE, and the temperature LSE; the second needs the first.
    schedule : object, optional
        Not used: it decides the order of work, never a result, and we make our own.
    partial_dtype, usable_SM_count, qk_dtype, pv_dtype
        Only the defaults, or q's dtype.

    Returns
    -------
    Tensor, or a tuple of Tensors
        out [Tq, Hq, D] in q's dtype, with the LSEs, float32 [Tq, Hq].

    Raises
    ------
    TypeError, ValueError
        As `sparse_atten_func`. A CSR that contradicts itself (row pointers that decrease, a query
        outside its sequence, more than `topK` entries of a token, too few rows) raises ValueError
        on CPU tensors; on a device, where nothing is read back, it trips a device-side assertion.
    NotImplementedError
        An option that we lack.

    Notes
    -----
    The CSR is turned back into lists of blocks, in torch, at each call: two sorts' worth of time.
    `prepare` with the lists themselves is the fast way. Nothing synchronises.
    """
    _refuse_others("partial_dtype", partial_dtype, (torch.bfloat16, q.dtype))
    _refuse_others("usable_SM_count", usable_SM_count, (-1,))
    _refuse_others("qk_dtype", qk_dtype, (None, q.dtype))
    _refuse_others("pv_dtype", pv_dtype, (None, q.dtype))
    if return_temperature_lse and not return_softmax_lse:
        raise ValueError("return_softmax_lse must be True with return_temperature_lse, got False")
    expect_positive("lse_temperature_scale", lse_temperature_scale)
    expect_int("topK", topK, 1)
    expect_int("blk_kv", blk_kv, 1)
    expect_int("max_seqlen_k", max_seqlen_k, 0)
    q2k_indices = lists_of_csr(
        k2q_row_ptr,
        k2q_q_indices,
        width=topK,
        num_queries=q.shape[0],
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_blocks=-(-max_seqlen_k // blk_kv),
        block_size=blk_kv,
    )
    paged = page_table is not None
    if paged and seqused_k is None:
        seqused_k = cu_seqlens_k.diff()
    selection = TokenSelection(
        q2k_indices,
        cu_seqlens_q,
        None if paged else cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        block_size=blk_kv,
        page_table=page_table,
        seqused_k=seqused_k,
    )
    return sparse_atten_func(
        q,
        k,
        v,
        selection,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_softmax_lse,
        lse_temperature=1 / lse_temperature_scale if return_temperature_lse else None,
    )


def flashinfer_msa_sparse_attention(  # noqa: PLR0917 - their positional arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_softmax_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: int | Tensor | None = None,
    return_temperature_lse: bool = False,
    lse_temperature_scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Attend as FlashInfer's ``msa_sparse_attention``.

    Parameters
    ----------
    q, k, v : Tensor
        q [Tq, Hq, D]; k and v [Tk, Hkv, D], or pools [pages, Hkv, 128, D] with `page_table`.
    q2k_indices : Tensor, int32 [Hkv, Tq, K]
        As in `TokenSelection`: any order, -1 anywhere, any strides.
    cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, softmax_scale
        As in `TokenSelection` and `sparse_atten_func`. `cu_seqlens_k` is not read with pages.
    return_softmax_lse : bool
        Also return the natural-log LSE, float32 [Tq, Hq].
    return_temperature_lse : bool
        Return (out, lse, lse_t).
    lse_temperature_scale : float
        Factor of the scores in lse_t, as `lse_temperature`. (MSA's argument of this name divides.)
    k_scale, v_scale, k_global_scale, v_global_scale, q_offset
        Only None: keys and values are not quantised, and the last query is aligned with the last
        key.

    Returns
    -------
    Tensor, or a tuple of Tensors
        out [Tq, Hq, D] in q's dtype, with the LSEs that were asked for.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `sparse_atten_func`; NotImplementedError for an option that we lack.

    Notes
    -----
    Sequence lengths are bounded by what the host knows: Tq, and Tk or the pages of a sequence.
    """
    scales = {
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_global_scale": k_global_scale,
        "v_global_scale": v_global_scale,
        "q_offset": q_offset,
    }
    for name, given in scales.items():
        _refuse_others(name, given, (None,))
    expect_positive("lse_temperature_scale", lse_temperature_scale)
    paged = page_table is not None
    if page_table is not None:
        expect_table("page_table", page_table, ("B", "pages"))
    selection = TokenSelection(
        q2k_indices,
        cu_seqlens_q,
        None if paged else cu_seqlens_k,
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0] if page_table is None else page_table.shape[1] * _BLOCK,
        page_table=page_table,
        seqused_k=seqused_k,
    )
    return sparse_atten_func(
        q,
        k,
        v,
        selection,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_softmax_lse,
        lse_temperature=lse_temperature_scale if return_temperature_lse else None,
    )


def _as_int32(name: str, table: Any) -> Tensor:
    if not isinstance(table, Tensor) or table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {describe(table)}")
    return table.to(torch.int32)


def _refuse_others(name: str, given: object, supported: tuple[object, ...]) -> None:
    """Refuse a legal option that we lack."""
    if not any(given is known or given == known for known in supported):
        names = ", ".join(dict.fromkeys(map(str, supported)))
        got = describe(given) if isinstance(given, Tensor) else repr(given)
        raise NotImplementedError(f"{name} {got} is not supported (supported: {names})")
