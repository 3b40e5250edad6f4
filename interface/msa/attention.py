"""`minimax_sparse_attention`: index branch and main branch of an MSA layer in one call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_atten.attention import sparse_atten_func
from sparse_atten.contracts import KVLayout
from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.msa.select import index_branch


def minimax_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    topk: int = 16,
    block_size: int = 128,
    num_sink_blocks: int = 0,
    causal: bool = True,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    kv_layout: KVLayout = "hnd",
    return_lse: bool = False,
    backend: str = "auto",
    max_workspace_bytes: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Attend from each query token to the KV blocks that its index query scores highest.

    Parameters
    ----------
    q : Tensor, bfloat16, float16, float32 or float64 [Tq, Hq, D]
        Queries of all sequences, packed.
    k, v : Tensor, q's dtype [Tk, Hkv, D], or paged pools
        As for `sparse_atten_func` with a `TokenSelection`.
    q_idx : Tensor [Tq, Hkv, d_idx]
        Index queries: one head for each KV head, whose query heads share the choice.
    k_idx : Tensor, q_idx's dtype [Tk, Hk, d_idx], or a paged pool
        Index keys; Hk is 1 in the paper, and any divisor of Hkv here. Paged index keys lie in the
        pages of k and v.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table, seqused_k, kv_layout
        As in `TokenSelection`.
    topk : int, 1 to 512
        Blocks of each query; its local block and the sinks take their slots first.
    block_size : int
        Tokens in a KV block.
    num_sink_blocks : int
        First blocks of each sequence that are always chosen; less than `topk`.
    causal : bool
        Hide the keys after the query, by real positions (bottom-right).
    softmax_scale, index_scale : float, optional
        Of the attention and of the index scores; None is 1 / sqrt(D) and 1 / sqrt(d_idx).
    return_lse : bool
        Also return the natural log-sum-exp over the chosen keys, float32 [Tq, Hq].
    backend : str
        As for `sparse_atten_func`; the index branch does not depend on it.
    max_workspace_bytes : int, optional
        Bound on temporary memory of each stage, in bytes.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        The output [Tq, Hq, Dv] in q's dtype, and the LSE. A query that sees no key, or is padding,
        gets output 0 and LSE -inf.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.
    NotImplementedError
        The backend asked for cannot run the call.

    Notes
    -----
    Differentiable in q, k and v on the reference backend; no gradient flows to q_idx and k_idx,
    whose training signal is a loss of its own (MSA (arXiv 2606.13392), section 3). The stages are
    public: `index_branch`, or `block_max_scores` and `select_blocks`; `prepare`; and
    `sparse_atten_func`.
    """
    _check_heads(k, q_idx, 2 if page_table is not None and kv_layout == "nhd" else 1)
    selection = index_branch(
        q_idx,
        k_idx,
        topk=topk,
        num_sink_blocks=num_sink_blocks,
        causal=causal,
        scale=index_scale,
        max_workspace_bytes=max_workspace_bytes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_size=block_size,
        page_table=page_table,
        seqused_k=seqused_k,
        kv_layout=kv_layout,
    )
    return sparse_atten_func(
        q,
        k,
        v,
        selection,
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
        backend=backend,
        max_workspace_bytes=max_workspace_bytes,
    )


def minimax_flops(
    num_tokens: int,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int = 128,
    index_dim: int = 128,
    topk: int = 16,
    block_size: int = 128,
) -> tuple[int, int]:
    """Count the FLOPs of dense causal attention and of MSA over one sequence.

    Parameters
    ----------
    num_tokens : int
        N, queries and keys.
    num_q_heads, num_kv_heads, head_dim, index_dim, topk, block_size : int
        Hq, Hkv, D, d_idx, k and B.

    Returns
    -------
    dense : int
        ``2 * Hq * D * N^2``: scores and outputs over the causal half.
    sparse : int
        ``Hkv * d_idx * N^2 + 4 * Hq * D * N * k * B``: index scores over the causal half, then
        attention to k whole blocks.

    Notes
    -----
    Equation (12) of MSA (arXiv 2606.13392). At short lengths k blocks are more than there are, and
    `sparse` overstates.
    """
    dense = 2 * num_q_heads * head_dim * num_tokens**2
    index = num_kv_heads * index_dim * num_tokens**2
    return dense, index + 4 * num_q_heads * head_dim * num_tokens * topk * block_size


def _check_heads(k: Any, q_idx: Any, head: int) -> None:
    """Check that each KV head has its index head; all else is checked by the stages."""
    if isinstance(k, Tensor) and isinstance(q_idx, Tensor) and k.dim() > head and q_idx.dim() == 3:
        num_kv_heads = k.shape[head]
        if q_idx.shape[1] != num_kv_heads:
            raise ValueError(
                f"q_idx must be [Tq, Hkv, d_idx] with k's {num_kv_heads} heads, "
                f"got {describe(q_idx)}"
            )
