"""Which KV blocks each query token attends to: the top-k stage of the index branch of MSA.

Source: MSA (arXiv 2606.13392), sections 3 and 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparse_atten.contracts import EMPTY, TokenSelection
from sparse_atten.cute_kernels.common.arguments import describe, expect_bool, expect_int
from sparse_atten.cute_kernels.msa_scores_arguments import QUERIES
from sparse_atten.msa.index_device import can_score, score_tokens, tokens_at_once
from sparse_atten.msa.scores import (
    BlockScorer,
    blank_selection,
    check_tables,
    last_seen,
    scorer_of,
)
from sparse_atten.sequences import sequences_of
from sparse_atten.topk import block_topk
from sparse_atten.topk.reference import MAX_K

_TOKEN_BYTES = 128  # of a query token: positions, limits, counts


def select_blocks(
    scores: Tensor,
    *,
    topk: int = 16,
    num_sink_blocks: int = 0,
    causal: bool = True,
    **fields: Any,
) -> TokenSelection:
    """Choose the best blocks of each query token, its local block and the sinks among them.

    Parameters
    ----------
    scores : Tensor, float32 [Hkv, n, Tq], with ``n = ceil(max_seqlen_k / block_size)``
        From `block_max_scores`: one score head for each KV head, whose query heads share the
        choice.
    topk : int, 1 to 512
        K, blocks of each query, forced ones included.
    num_sink_blocks : int
        The first so many blocks of a sequence are chosen whatever their scores. Less than `topk`,
        which keeps a slot for the local block.
    causal : bool
        Choose only among blocks with a key up to the query's own position (bottom-right); else
        among all blocks of its sequence.
    **fields
        The other fields of the selection, by name, as for `block_max_scores`.

    Returns
    -------
    TokenSelection
        `q2k_indices` int32 [Hkv, Tq, K]: ascending ids, then -1; all -1 where the query sees no
        key, and for padding tokens. The local block, which holds the query's own position, is
        always chosen; a query before the first key has none.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came.

    Notes
    -----
    Ties go to the lowest id; NaN and -inf are never chosen, unless forced. Nothing synchronises on
    a device. Workspace: some 50 bytes for each score, which `index_branch` bounds. Scores of Hq
    heads give lists of each head: ``q2k_indices.transpose(0, 1)`` is what
    `TokenSelection.from_head_indices` takes, and `check_selection` compares the heads of a group.
    """
    if not isinstance(scores, Tensor) or scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32 [Hkv, n, Tq], got {describe(scores)}")
    if scores.dim() != 3:
        raise ValueError(f"scores must be [Hkv, n, Tq], got {describe(scores)}")
    _check_choice(topk, num_sink_blocks, causal)
    num_heads, num_blocks, num_queries = scores.shape
    selection = blank_selection(scores, num_heads, num_queries, fields)
    paged = selection.page_table is not None
    # How many keys there are is not known here: as many as offsets and page ids can reach.
    check_tables(selection, scores, [2**31 - 1, selection.block_size] if paged else [2**31 - 1])
    expected = -(-selection.max_seqlen_k // selection.block_size)
    if num_blocks != expected:
        raise ValueError(
            f"scores must be [Hkv, n, Tq] with n = ceil(max_seqlen_k / block_size) = {expected}, "
            f"got {describe(scores)}"
        )
    position, num_keys = sequences_of(selection).align_queries(num_queries)
    limit = last_seen(position, num_keys, causal)
    choice = {"topk": topk, "num_sink_blocks": num_sink_blocks}
    ids = _choose(scores, position, limit, block_size=selection.block_size, **choice)
    return replace(selection, q2k_indices=ids)


def index_branch(
    q_idx: Tensor,
    k_idx: Tensor,
    *,
    topk: int = 16,
    num_sink_blocks: int = 0,
    causal: bool = True,
    scale: float | None = None,
    max_workspace_bytes: int | None = None,
    **fields: Any,
) -> TokenSelection:
    """Score and choose the blocks of each query token, without a tensor of all scores.

    Parameters
    ----------
    q_idx, k_idx, causal, scale, max_workspace_bytes, **fields
        As for `block_max_scores`, with Hidx = Hkv.
    topk, num_sink_blocks
        As for `select_blocks`.

    Returns
    -------
    TokenSelection
        What `select_blocks` returns for the scores of `block_max_scores`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for the two stages.

    Notes
    -----
    Nothing synchronises on a device. Where a kernel computes the scores, the call can be captured
    in a CUDA graph after a first one like it.
    """
    _check_choice(topk, num_sink_blocks, causal)
    scorer = scorer_of(
        q_idx, k_idx, fields, causal=causal, scale=scale, max_workspace_bytes=max_workspace_bytes
    )
    choice = {"topk": topk, "num_sink_blocks": num_sink_blocks}
    if can_score(scorer):
        return replace(scorer.selection, q2k_indices=_choose_by_kernel(scorer, **choice))
    block = scorer.selection.block_size
    shape = q_idx.shape[1], q_idx.shape[0], topk
    ids = torch.full(shape, EMPTY, dtype=torch.int32, device=q_idx.device)
    for piece in scorer.pieces():
        scores = scorer.score(piece)
        part = _choose(scores, piece.position, piece.limit, block_size=block, **choice)
        # Slots of no query lead to some token and hold -1 there, which changes no maximum.
        ids.scatter_reduce_(1, piece.token[:, None].expand_as(part), part, "amax")
    return replace(scorer.selection, q2k_indices=ids)


def _choose_by_kernel(scorer: BlockScorer, *, topk: int, num_sink_blocks: int) -> Tensor:
    """Ids int32 [Hidx, Tq, K], for as many tokens at a time as the workspace has room for."""
    num_queries, num_heads, _ = scorer.q.shape
    num_blocks = scorer.num_blocks
    token_bytes = 4 * num_heads * (num_blocks + topk + 1) + _TOKEN_BYTES
    step = max(1, min(num_queries, tokens_at_once(scorer), scorer.max_bytes // token_bytes))
    if QUERIES < step < num_queries:
        step -= step % QUERIES
    memory = scorer.q.new_empty(num_heads * num_blocks * step, dtype=torch.float32)
    ids = scorer.q.new_empty((num_heads, num_queries, topk), dtype=torch.int32)
    choice = {"topk": topk, "num_sink_blocks": num_sink_blocks}
    for start in range(0, num_queries, step):
        count = min(step, num_queries - start)
        # Where a token sees no key of a block, there may be anything: no such block is a candidate.
        scores = memory[: num_heads * num_blocks * count].view(num_heads, num_blocks, count)
        score_tokens(scorer, scores, start)
        position, num_keys = scorer.sequences.align_queries(count, start)
        limit = last_seen(position, num_keys, scorer.causal)
        ids[:, start : start + count] = _choose(
            scores, position, limit, block_size=scorer.selection.block_size, **choice
        )
    return ids


def _choose(
    scores: Tensor,
    position: Tensor,
    limit: Tensor,
    *,
    block_size: int,
    topk: int,
    num_sink_blocks: int,
) -> Tensor:
    """Ids int32 [H, T, K] for scores [H, n, T] of queries with these positions and limits [T]."""
    ids, _ = block_topk(
        scores,
        topk,
        dim=1,
        valid_counts=((limit + block_size) // block_size).to(torch.int32),
        local_blocks=(position // block_size).to(torch.int32),
        first_blocks=num_sink_blocks,
    )
    return ids


def _check_choice(topk: int, num_sink_blocks: int, causal: bool) -> None:
    expect_bool("causal", causal)
    expect_int("topk", topk, 1, MAX_K)
    expect_int("num_sink_blocks", num_sink_blocks, 0, topk - 1)
