"""The index branch of MSA: block-max scores of index queries and keys, and the blocks they choose.

    S[t, j] = scale * q_idx[t] . k_idx[j]
    M[b, t] = the largest S[t, j] among the keys j of block b that token t sees

The choice needs no exponentials, for softmax keeps the order. `block_max_scores` and
`select_blocks` are its two stages; `index_branch` does both for some queries at a time, so that M,
128 GiB at a million tokens, never exists as a whole.

Source: MSA (arXiv 2606.13392), sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_atten.attention import check
from sparse_atten.contracts import DTYPES, Options, TokenSelection
from sparse_atten.cute_kernels.common.arguments import (
    describe,
    expect_bool,
    expect_int,
    expect_positive,
)
from sparse_atten.msa.index_device import can_score, score_tokens, tokens_at_once
from sparse_atten.reference import accumulator_dtype, without_autocast, workspace_bytes
from sparse_atten.sequences import Sequences, sequences_of

_TOPK_BYTES = 48  # of block_topk for each score: keys of 4 and ids of 8 bytes, a few times over
_PAIR_BYTES = 16  # of a query and a key, for all heads: positions and the mask
_NEVER = float("-inf")


def block_max_scores(
    q_idx: Tensor,
    k_idx: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    max_workspace_bytes: int | None = None,
    **fields: Any,
) -> Tensor:
    """Score each KV block for each query token: the largest score among the keys that it sees.

    Parameters
    ----------
    q_idx : Tensor, bfloat16, float16, float32 or float64 [Tq, Hidx, d_idx], any strides
        Index queries.
    k_idx : Tensor, q_idx's dtype [Tk, Hk, d_idx], any strides
        Index keys; Hk divides Hidx, and one key head may serve all. Paged: a pool
        [pages, Hk, block_size, d_idx], or [pages, block_size, Hk, d_idx] for kv_layout "nhd".
    causal : bool
        Hide the keys after the query, by real positions (bottom-right).
    scale : float, optional
        Finite and positive; None is 1 / sqrt(d_idx).
    max_workspace_bytes : int, optional
        Bound on temporary memory beyond the output, in bytes, as far as one query and one block
        allow. None: 32 MiB on a CPU, 1 GiB on a device.
    **fields
        Fields of `TokenSelection`, by name: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        block_size, and for paged keys page_table, seqused_k, kv_layout.

    Returns
    -------
    Tensor, float32 [Hidx, n, Tq], with ``n = ceil(max_seqlen_k / block_size)``
        -inf where the query sees no key of the block, and for padding tokens. NaN where it sees a
        key whose score is NaN; keys that it does not see have no effect, whatever they hold.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        An argument breaks the contract; the message names it, what was expected and what came.

    Notes
    -----
    No gradient flows through the scores. On Hopper a kernel takes bfloat16 and float16 with d_idx
    64 or 128, blocks of 128 and rows at multiples of 16 bytes, outside torch.compile; it needs no
    workspace and skips what no query sees. Elsewhere on a device lengths are not read on the host:
    each sequence costs ``max_seqlen_q * max_seqlen_k`` scores. On a CPU it costs its own.
    """
    scorer = scorer_of(
        q_idx, k_idx, fields, causal=causal, scale=scale, max_workspace_bytes=max_workspace_bytes
    )
    shape = q_idx.shape[1], scorer.num_blocks, q_idx.shape[0]
    scores = torch.full(shape, _NEVER, dtype=torch.float32, device=q_idx.device)
    if can_score(scorer):
        step = tokens_at_once(scorer)
        for start in range(0, shape[2], step):
            score_tokens(scorer, scores[:, :, start : start + step], start)
        return scores
    for piece in scorer.pieces():
        part = scorer.score(piece)
        # Slots of no query lead to some token and hold -inf there, which changes no maximum.
        scores.scatter_reduce_(2, piece.token.expand_as(part), part, "amax")
    return scores


class Piece(NamedTuple):
    """Some queries of S sequences, C of each; slots past the end of a sequence see no key."""

    sequence: Tensor  # int64 [S]
    token: Tensor  # int64 [S * C]; where slots past the end lead is some token
    position: Tensor  # int64 [S * C], bottom-right aligned
    limit: Tensor  # int64 [S * C]; position of the last key that is seen, -1 for none
    num_blocks: int  # blocks from here on no query of the piece sees


@dataclass(frozen=True, eq=False)
class BlockScorer:
    """Checked arguments of a scoring call."""

    q: Tensor  # [Tq, Hidx, d]
    k: Tensor  # [Tk, Hk, d] or a pool
    selection: TokenSelection  # without ids
    sequences: Sequences
    causal: bool
    scale: float
    max_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest sequence: n."""
        return -(-self.selection.max_seqlen_k // self.selection.block_size)

    def pieces(self) -> Iterator[Piece]:
        """Cut the queries so that the scores of a piece and a top-k of them fit the workspace."""
        if self.q.numel() == 0 or self.k.numel() == 0:
            return iter(())
        return self.exact_pieces() if self.q.device.type == "cpu" else self.padded_pieces()

    def exact_pieces(self) -> Iterator[Piece]:
        """Pieces of one sequence, with no more blocks than they see; reads lengths on the host."""
        lengths = self.sequences.q_length.tolist(), self.sequences.k_length.tolist()
        step = self._queries_at_once()
        for b, (num_q, num_k) in enumerate(zip(*lengths, strict=True)):
            for start in range(0, num_q, step):
                stop = min(start + step, num_q)
                seen = stop + num_k - num_q if self.causal else num_k
                blocks = max(0, -(-seen // self.selection.block_size))
                yield self._piece(slice(b, b + 1), slice(start, stop), blocks)

    def padded_pieces(self) -> Iterator[Piece]:
        """Pieces of several sequences, as if all had the greatest length."""
        at_once = self._queries_at_once()
        longest = max(1, min(self.selection.max_seqlen_q, self.q.shape[0]))
        step = min(at_once, longest)
        together = at_once // step
        for first in range(0, self.sequences.q_start.shape[0], together):
            for start in range(0, longest, step):
                queries = slice(start, min(start + step, longest))
                yield self._piece(slice(first, first + together), queries, self.num_blocks)

    def _queries_at_once(self) -> int:
        scores_of_a_query = self.q.shape[1] * max(1, self.num_blocks)
        return max(1, self.max_bytes // 2 // (scores_of_a_query * _TOPK_BYTES))

    def _piece(self, which: slice, queries: slice, num_blocks: int) -> Piece:
        extents = self.sequences
        local = torch.arange(queries.start, queries.stop, device=self.q.device)
        num_q, num_k = extents.q_length[which, None], extents.k_length[which, None]
        missing = local >= num_q
        position = (local + num_k - num_q).masked_fill(missing, -1).flatten()
        limit = last_seen(position, num_k.masked_fill(missing, 0).flatten(), self.causal)
        token = (local + extents.q_start[which, None]).clamp(max=self.q.shape[0] - 1).flatten()
        sequence = torch.arange(extents.q_start.shape[0], device=self.q.device)[which]
        num_blocks = min(num_blocks, self.num_blocks)
        if self.selection.page_table is not None:
            num_blocks = min(num_blocks, self.selection.page_table.shape[1])
        return Piece(sequence, token, position, limit, num_blocks)

    def score(self, piece: Piece) -> Tensor:
        """Block-max scores of a piece, float32 [Hidx, n, S * C]."""
        num_heads, head_dim = self.q.shape[1:]
        num_sequences, num_slots = piece.sequence.shape[0], piece.token.shape[0]
        block = self.selection.block_size
        dtype = accumulator_dtype(self.q)
        queries = (self.q[piece.token].to(dtype) * self.scale).view(
            num_sequences, num_slots // num_sequences, num_heads, head_dim
        )
        limit = piece.limit.view(num_sequences, 1, -1, 1)
        scores = queries.new_full(
            (num_heads, self.num_blocks, num_slots), _NEVER, dtype=torch.float32
        )

        pairs = num_slots * (num_heads * (dtype.itemsize + 4) + _PAIR_BYTES)
        keys = num_sequences * self.k.shape[_head_axis(self.selection)] * head_dim
        per_block = block * (pairs + keys * (self.k.element_size() + 2 * dtype.itemsize))
        step = max(1, self.max_bytes // 2 // max(per_block, 1))
        for start in range(0, piece.num_blocks, step):
            ids = torch.arange(start, min(start + step, piece.num_blocks), device=self.q.device)
            k, position = self._keys(piece.sequence, ids)
            k = k.to(dtype).permute(0, 2, 3, 1)  # [S, Hk, d, L]
            grouped = queries.unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)
            with without_autocast(k):
                products = grouped.flatten(2, 3) @ k
            products = products.view(num_sequences, num_heads, -1, k.shape[3])
            products.masked_fill_(position[:, None, None] > limit, _NEVER)
            best = products.unflatten(3, (-1, block)).amax(4)  # [S, Hidx, C, blocks]
            scores[:, start : start + ids.shape[0]] = best.permute(1, 3, 0, 2).flatten(2)
        return scores

    def _keys(self, sequence: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of the same blocks of some sequences, [S, L, Hk, d], and their positions [S, L].

        Where there is no key, the position is past every limit.
        """
        block, pages = self.selection.block_size, self.selection.page_table
        slot = torch.arange(block, device=ids.device)
        position = (ids[:, None] * block + slot).expand(sequence.shape[0], -1, -1)
        exists = position < self.sequences.k_length[sequence, None, None]
        if pages is None:
            token = position + self.sequences.k_start[sequence, None, None]
            k = self.k[token.clamp(max=self.k.shape[0] - 1)]  # [S, blocks, block_size, Hk, d]
        else:
            page = pages[sequence[:, None], ids].long()
            exists = exists & ((page >= 0) & (page < self.k.shape[0]))[..., None]
            k = self.k[page.clamp(0, self.k.shape[0] - 1)]
            k = k if self.selection.kv_layout == "nhd" else k.transpose(2, 3)
        nowhere = torch.iinfo(torch.int64).max
        return k.flatten(1, 2), position.masked_fill(~exists, nowhere).flatten(1)


def last_seen(position: Tensor, num_keys: Tensor, causal: bool) -> Tensor:
    """Position of the last key that a query sees, -1 for none."""
    last = num_keys - 1
    return torch.minimum(position, last).clamp(min=-1) if causal else last


def scorer_of(
    q_idx: Tensor,
    k_idx: Tensor,
    fields: dict[str, Any],
    *,
    causal: bool,
    scale: float | None,
    max_workspace_bytes: int | None,
) -> BlockScorer:
    """Check the arguments of a scoring call."""
    for name, x in (("q_idx", q_idx), ("k_idx", k_idx)):
        if not isinstance(x, Tensor) or x.dtype not in DTYPES:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must be one of {supported}, got {describe(x)}")
    if q_idx.dim() != 3 or q_idx.shape[2] == 0:
        raise ValueError(f"q_idx must be [Tq, Hidx, d_idx], got {describe(q_idx)}")
    if k_idx.dtype != q_idx.dtype:
        raise TypeError(f"k_idx must have q_idx's dtype {q_idx.dtype}, got {describe(k_idx)}")
    if k_idx.device != q_idx.device:
        raise ValueError(f"k_idx must be on q_idx's device {q_idx.device}, got {describe(k_idx)}")
    num_queries, num_heads, head_dim = q_idx.shape
    selection = blank_selection(q_idx, num_heads, num_queries, fields)
    _check_keys(k_idx, selection, num_heads, head_dim)
    rows = [size for dim, size in enumerate(k_idx.shape[:-1]) if dim != _head_axis(selection)]
    check_tables(selection, q_idx, rows)
    expect_bool("causal", causal)
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    else:
        expect_positive("scale", scale)
    if max_workspace_bytes is not None:
        expect_int("max_workspace_bytes", max_workspace_bytes, 1)
    return BlockScorer(
        q_idx.detach(),
        k_idx.detach(),
        selection,
        sequences_of(selection, k_idx.shape[0]),
        causal=causal,
        scale=float(scale),
        max_bytes=workspace_bytes(q_idx, max_workspace_bytes),
    )


def _check_keys(k_idx: Tensor, selection: TokenSelection, num_heads: int, head_dim: int) -> None:
    paged = selection.page_table is not None
    dims = ["Tk", "Hk", "d_idx"]
    if paged:
        dims = ["pages", "Hk", "block_size", "d_idx"]
        if selection.kv_layout == "nhd":
            dims = ["pages", "block_size", "Hk", "d_idx"]
    if k_idx.dim() != len(dims) or k_idx.shape[-1] != head_dim:
        raise ValueError(
            f"k_idx must be [{', '.join(dims)}] with d_idx = {head_dim} "
            f"{'with' if paged else 'without'} a page_table, got {describe(k_idx)}"
        )
    sizes = dict(zip(dims, k_idx.shape, strict=True))
    if num_heads and (sizes["Hk"] == 0 or num_heads % sizes["Hk"]):
        raise ValueError(
            f"k_idx must have a divisor of q_idx's {num_heads} heads, got {sizes['Hk']} heads"
        )
    if paged and sizes["block_size"] != selection.block_size:
        raise NotImplementedError(
            f"k_idx has pages of {sizes['block_size']} tokens for block_size "
            f"{selection.block_size}; supported: page size == block_size"
        )


def _head_axis(selection: TokenSelection) -> int:
    """Which dim of the index keys is the head."""
    return 2 if selection.page_table is not None and selection.kv_layout == "nhd" else 1


def blank_selection(
    like: Tensor, num_heads: int, num_queries: int, fields: dict[str, Any]
) -> TokenSelection:
    """Make a selection that has everything but ids."""
    no_ids = like.new_empty(num_heads, num_queries, 0, dtype=torch.int32)
    return TokenSelection(no_ids, **{"cu_seqlens_k": None, **fields})


def check_tables(selection: TokenSelection, like: Tensor, rows: list[int]) -> None:
    """Check offsets, lengths and pages as at every attention call, on stand-ins for q and k.

    `rows` is [Tk], or [pages, page size]; the stand-ins have a head dim of 1 and no memory.
    """
    num_heads, num_queries, _ = selection.q2k_indices.shape
    stand_in = like.new_empty(1, dtype=torch.float32)
    axis = _head_axis(selection)
    k = stand_in.expand(*rows[:axis], num_heads, *rows[axis:], 1)
    check(stand_in.expand(num_queries, num_heads, 1), k, k, selection, Options())
