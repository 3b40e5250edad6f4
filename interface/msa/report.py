"""What `explain` says of the KV-outer kernels: workspace, traffic, and whether they are the thing.

KV-outer writes and reads a partial result for each query, head and chosen block. Dense causal
attention does not, so that on short sequences, where a query keeps much of what it may see, it is
faster. The comparison is a model from data-sheet figures, and changes nothing that is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_atten.contracts import Problem, TokenSelection
from sparse_atten.cute_kernels.common.target import B200, PRODUCTS, Product
from sparse_atten.dispatch import Report
from sparse_atten.preparation import (
    PARTIALS_BYTES,
    PreparedSelection,
    partial_bytes,
    prepare,
)
from sparse_atten.sequences import sequences_of

_TILE = 128  # queries of a tile (tokens times the heads of a group), and keys of a block
_LSE_BYTES = 4


@dataclass(frozen=True)
class _Traffic:
    """Bytes that the two kernels move, and tiles that the first one computes."""

    partials: int  # written by K1, and read again by K2
    keys: int  # K and V, for each work item once
    queries: int  # for each edge once
    outputs: int
    tiles: int

    def seconds(self, problem: Problem, product: Product) -> float:
        """Model both kernels, one after the other; queries are read from the L2 cache."""
        flops = self.tiles * 2 * _TILE * _TILE * (problem.head_dim + problem.value_dim)
        moved = (self.partials + self.keys) / product.bandwidth
        k1 = max(flops / product.tensor_flops, moved)
        return k1 + (self.partials + self.outputs) / product.bandwidth


def report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: TokenSelection | PreparedSelection,
    problem: Problem,
    *,
    max_workspace_bytes: int | None = None,
) -> Report:
    """Say how the kernels would spread the call, what they move, and where dense is faster."""
    product = next((p for p in PRODUCTS.values() if p.target == problem.target), B200)
    if isinstance(selection, PreparedSelection):
        prepared, selection = selection, selection.selection
    else:
        sms = product.target.num_sms if problem.target is None else problem.target.num_sms
        prepared = prepare(selection, q, k, num_sms=sms, max_workspace_bytes=max_workspace_bytes)
    traffic = _traffic(q, prepared, problem)
    largest = max(chunk.num_tokens for chunk in prepared.chunks)
    bound = PARTIALS_BYTES if max_workspace_bytes is None else max_workspace_bytes
    items = sum(int(chunk.schedule.num_items) for chunk in prepared.chunks)
    lines = {
        "query chunks": f"{len(prepared.chunks)}, of at most {largest:,} tokens, "
        f"for a workspace of {bound:,} bytes",
        "work items": f"{items:,} of one KV block each, {traffic.tiles:,} tiles",
        "partials": f"{traffic.partials:,} bytes, written by K1 and read by K2",
        "K1 reads": f"{traffic.keys:,} bytes of K and V, {traffic.queries:,} of Q",
        "against dense": _against_dense(traffic, problem, selection, product),
    }
    if selection.max_seqlen_q * problem.group_size < _TILE:
        lines["short queries"] = (
            f"at most {selection.max_seqlen_q} tokens of a sequence: there is no "
            "decode kernel yet, and tiles stay mostly empty"
        )
    return Report(lines, largest * partial_bytes(q, problem.table_width))


def _traffic(q: Tensor, prepared: PreparedSelection, problem: Problem) -> _Traffic:
    """Count what the work items of all chunks read, compute and write."""
    edges = tiles = items = 0
    tokens_of_tile = max(1, _TILE // max(problem.group_size, 1))
    for chunk in prepared.chunks:
        work = chunk.schedule.work_items[: int(chunk.schedule.num_items), 3].long()
        edges += int(work.sum())
        tiles += int(((work + tokens_of_tile - 1) // tokens_of_tile).sum())
        items += work.numel()
    size = q.element_size()
    block = problem.block_size * (problem.head_dim + problem.value_dim) * size
    row = problem.value_dim * size + _LSE_BYTES * (1 + problem.lse_temperature)
    return _Traffic(
        partials=edges * problem.group_size * row,
        keys=items * block,
        queries=edges * problem.group_size * problem.head_dim * size,
        outputs=problem.num_queries * problem.num_q_heads * row,
        tiles=tiles,
    )


def _against_dense(
    traffic: _Traffic, problem: Problem, selection: TokenSelection, product: Product
) -> str:
    """Compare with dense attention at the same rates."""
    pairs = _dense_pairs(selection, problem)
    flops = 2 * pairs * problem.num_q_heads * (problem.head_dim + problem.value_dim)
    dense, sparse = flops / product.tensor_flops, traffic.seconds(problem, product)
    kind = "causal dense" if problem.causal else "dense"
    verdict = f"{kind} attention is the faster one" if dense < sparse else "KV-outer is faster"
    return (
        f"{verdict}: modelled {dense * 1e6:,.1f} us {kind}, {sparse * 1e6:,.1f} us KV-outer "
        f"on {product.name}; this call computes KV-outer"
    )


def _dense_pairs(selection: TokenSelection, problem: Problem) -> int:
    """Pairs of query token and key that dense attention computes."""
    extents = sequences_of(selection, None if problem.paged else problem.num_keys)
    position, num_keys = extents.align_queries(problem.num_queries)
    seen = torch.minimum((position + 1).clamp(min=0), num_keys) if problem.causal else num_keys
    return int(seen.sum())
