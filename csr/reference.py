"""The q2k -> k2q transposition in plain torch: what device kernels must equal bit for bit.

A row is one KV block of one sequence, an edge is one entry of a query's list that names a block::

    query 0 -> blocks 0, 1        row 0 -> queries 0, 1
    query 1 -> blocks 0, 2        row 1 -> queries 0, 2
    query 2 -> blocks 1, 2        row 2 -> queries 1, 2, 3
    query 3 -> blocks 2, 3        row 3 -> queries 3

    row_ptr   [0, 2, 4, 7, 8]
    q_indices [0, 1, 0, 2, 1, 2, 3, 3]

The rows of sequence b follow those of b - 1, ``row(b, j) = row_start[b] + j``, where row_start is
the exclusive running sum of ``ceil(len_k / block_size)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.cute_kernels.common.parts import Record

EMPTY = -1  # marks unused slots, entries and rows

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class K2QCSR(Record):
    """For each KV head and KV block, the query tokens that chose the block.

    R is the number of rows that the caller made room for, E = Tq * K the number of slots of a
    head's table. Entries and rows that are not used are -1 and stand at the end.

    Parameters
    ----------
    row_ptr : Tensor, int32 [Hkv, R + 1]; int64 where E >= 2^31
        Where each row starts in `q_indices`; the last is the number of edges of the head.
    q_indices : Tensor, int32 [Hkv, E]
        Query ids counted from the start of their own sequence, ascending inside a row. A query
        that lists a block twice stands there twice.
    edge_ids : Tensor, int32 [Hkv, E]; int64 where E >= 2^31
        The slot that each entry came from: ``t * K + lane`` for entry `lane` of packed query token
        t. Ascending inside a row.
    row_coords : Tensor, int32 [R, 2]
        (batch, kv_block) of each row.
    num_bad_edges : Tensor, int64 [1]
        Edges that were dropped: neither -1 nor a block of the query's sequence, or a block whose
        row would pass R.
    num_queries : int
        Tq, padding tokens included.
    table_width : int
        K.
    """

    row_ptr: Tensor
    q_indices: Tensor
    edge_ids: Tensor
    row_coords: Tensor
    num_bad_edges: Tensor
    num_queries: int
    table_width: int


class _RowMap(NamedTuple):
    """Blocks and rows of each sequence; entry B stands for padding and owns nothing."""

    q_start: Tensor  # int64 [B + 1], clamped to [0, Tq] and non-decreasing
    num_blocks: Tensor  # int64 [B + 1], the last is 0
    row_start: Tensor  # int64 [B + 1], the last is the number of rows of all sequences


def key_lengths(
    cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, key_capacity: int | None = None
) -> Tensor:
    """Keys of each sequence, int64 [B], at least 0; not both tables are None.

    A capacity bounds what offsets, or without them lengths, may say: offsets are clamped to it and
    made non-decreasing.
    """
    if cu_seqlens_k is None:
        assert seqused_k is not None
        return seqused_k.to(torch.int64).clamp(0, key_capacity)
    offsets = cu_seqlens_k.to(torch.int64)
    if key_capacity is not None:
        offsets = offsets.clamp(0, key_capacity).cummax(dim=0).values
    lengths = offsets.diff()
    if seqused_k is not None:
        lengths = torch.minimum(lengths, seqused_k)
    return lengths.clamp(min=0)


def k2q_csr_of(
    q2k_indices: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, *, block_size: int, num_rows: int
) -> K2QCSR:
    """Build the CSR of checked tables; lengths are the keys of each sequence, int64 [B] >= 0."""
    num_kv_heads, num_queries, width = q2k_indices.shape
    num_slots = num_queries * width
    row_map = _map_rows(cu_seqlens_q, lengths, num_queries, block_size)
    sequence, local = _locate_queries(row_map, num_queries)
    row, bad = _rows_of_edges(q2k_indices, row_map, sequence, num_rows)

    row = row.reshape(num_kv_heads, num_slots).contiguous()
    rows, edges = row.sort(dim=1, stable=True)
    bounds = torch.arange(num_rows + 1, device=row.device).repeat(num_kv_heads, 1)
    unused = rows == num_rows
    q_indices = local[edges // max(width, 1)].masked_fill(unused, EMPTY)
    wide = torch.int64 if num_slots > INT32_MAX else torch.int32
    return K2QCSR(
        row_ptr=torch.searchsorted(rows, bounds).to(wide),
        q_indices=q_indices.to(torch.int32),
        edge_ids=edges.masked_fill(unused, EMPTY).to(wide),
        row_coords=_row_coords(row_map, num_rows),
        num_bad_edges=bad.sum().reshape(1),
        num_queries=num_queries,
        table_width=width,
    )


def refuse_bad_edges(
    q2k_indices: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, *, block_size: int, num_rows: int
) -> None:
    """Raise a ValueError that names the first bad edge; there is at least one."""
    num_queries = q2k_indices.shape[1]
    row_map = _map_rows(cu_seqlens_q, lengths, num_queries, block_size)
    sequence, _ = _locate_queries(row_map, num_queries)
    _, bad = _rows_of_edges(q2k_indices, row_map, sequence, num_rows)
    found = bad.nonzero()
    head, token, lane = found[0].tolist()
    block, owner = int(q2k_indices[head, token, lane]), int(sequence[token])
    num_blocks, total = int(row_map.num_blocks[owner]), int(row_map.row_start[-1])
    where = f"q2k_indices[{head}, {token}, {lane}]"
    if 0 <= block < num_blocks:
        raise ValueError(
            f"num_rows must be at least the {total} KV blocks of all sequences, got {num_rows}: "
            f"{where} = {block} of sequence {owner} has no row ({len(found)} bad edges in all)"
        )
    raise ValueError(
        f"{where} must be -1 or one of the {num_blocks} KV blocks of sequence {owner}, "
        f"got {block} ({len(found)} bad edges in all)"
    )


def transposed_lists_of(
    q2k_indices: Tensor, q2k_counts: Tensor, num_kv_blocks: int, dense_rows: int
) -> tuple[Tensor, Tensor]:
    """Transpose checked block lists; see `transpose_block_lists`."""
    *shape, num_q_blocks, width = q2k_indices.shape
    lane = torch.arange(width, device=q2k_indices.device)
    is_block = (q2k_indices >= 0) & (q2k_indices < num_kv_blocks)
    listed = is_block & (lane < q2k_counts.unsqueeze(-1))
    kv_block = q2k_indices.masked_fill(~listed, num_kv_blocks).to(torch.int64)
    chosen = torch.zeros(
        (*shape, num_q_blocks, num_kv_blocks + 1), dtype=torch.bool, device=q2k_indices.device
    ).scatter_(3, kv_block, True)
    chosen[:, :, :dense_rows] = True
    chosen = chosen[..., :num_kv_blocks].transpose(2, 3)

    q_block = torch.arange(num_q_blocks, dtype=torch.int32, device=q2k_indices.device)
    packed = torch.where(chosen, q_block, num_q_blocks).sort(dim=3).values
    k2q_indices = packed.masked_fill(packed == num_q_blocks, EMPTY)
    return k2q_indices, chosen.sum(dim=3, dtype=torch.int32)


def _map_rows(cu_seqlens_q: Tensor, lengths: Tensor, num_queries: int, block_size: int) -> _RowMap:
    q_start = cu_seqlens_q.to(torch.int64).clamp(0, num_queries).cummax(dim=0).values
    num_blocks = (lengths + block_size - 1) // block_size
    row_end = num_blocks.cumsum(dim=0)
    zero = row_end.new_zeros(1)
    return _RowMap(q_start, torch.cat((num_blocks, zero)), torch.cat((zero, row_end)))


def _locate_queries(row_map: _RowMap, num_queries: int) -> tuple[Tensor, Tensor]:
    """Sequence of each query token, B for padding, and its position in it; int64 [Tq]."""
    q_start = row_map.q_start
    batch = q_start.shape[0] - 1
    token = torch.arange(num_queries, device=q_start.device)
    sequence = torch.searchsorted(q_start, token, right=True) - 1
    sequence = sequence.masked_fill(sequence < 0, batch)
    return sequence, token - q_start[sequence]


def _rows_of_edges(
    q2k_indices: Tensor, row_map: _RowMap, sequence: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Row of each edge, num_rows where it has none, and which edges are bad; [Hkv, Tq, K]."""
    exists = (q2k_indices >= 0) & (q2k_indices < row_map.num_blocks[sequence].unsqueeze(-1))
    row = row_map.row_start[sequence].unsqueeze(-1) + q2k_indices
    placed = exists & (row < num_rows)
    is_padding = (sequence == row_map.num_blocks.shape[0] - 1).unsqueeze(-1)
    bad = ~placed & (q2k_indices != EMPTY) & ~is_padding
    return row.masked_fill(~placed, num_rows), bad


def _row_coords(row_map: _RowMap, num_rows: int) -> Tensor:
    """(batch, kv_block) of each row, int32 [R, 2]; (-1, -1) after the last row in use."""
    row = torch.arange(num_rows, device=row_map.row_start.device)
    batch = torch.searchsorted(row_map.row_start[1:], row, right=True)
    coords = torch.stack((batch, row - row_map.row_start[batch]), dim=1)
    return coords.masked_fill((row >= row_map.row_start[-1]).unsqueeze(1), EMPTY).to(torch.int32)
