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

EMPTY = -1  # marks unused slots, entries and rows

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class K2QCSR:
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


def row_bound(
    batch: int,
    block_size: int = 128,
    *,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
) -> int:
    """Bound the number of rows of a batch from what the host knows.

    Flat KV: ``total_k // block_size + batch``, since each sequence has at most one block that is
    not full. Paged KV: ``batch * ceil(max_seqlen_k / block_size)``.

    Parameters
    ----------
    batch : int
        Number of sequences.
    block_size : int
        Tokens in a KV block.
    total_k : int, optional
        Flat KV: tokens of all sequences.
    max_seqlen_k : int, optional
        Paged KV: bound of each sequence's length. Exactly one of the two is given.

    Returns
    -------
    int
        What `build_k2q_csr` takes as `num_rows`.

    Raises
    ------
    TypeError, ValueError
        A number is no int or is negative, or not exactly one of the lengths is given.
    """
    expect_int("batch", batch, 0)
    expect_int("block_size", block_size, 1)
    if total_k is not None and max_seqlen_k is None:
        expect_int("total_k", total_k, 0)
        return total_k // block_size + batch
    if max_seqlen_k is not None and total_k is None:
        expect_int("max_seqlen_k", max_seqlen_k, 0)
        return batch * -(-max_seqlen_k // block_size)
    raise ValueError(
        "exactly one of total_k and max_seqlen_k must be given, "
        f"got total_k {total_k} and max_seqlen_k {max_seqlen_k}"
    )


def build_k2q_csr(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    block_size: int = 128,
    seqused_k: Tensor | None = None,
    num_rows: int,
    check: bool = False,
) -> K2QCSR:
    """Turn the KV blocks of each query token into the query tokens of each KV block.

    Parameters
    ----------
    q2k_indices : Tensor, int32 [Hkv, Tq, K], any strides
        Chosen KV blocks of each query token, counted from the start of the token's own sequence,
        in any order. -1 is an unused slot and may stand anywhere.
    cu_seqlens_q : Tensor, int32 [B + 1]
        Sequence b owns the query tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. Offsets are
        clamped to [0, Tq], and one that decreases counts as its predecessor. Tokens before the
        first and from the last offset on are padding: their ids are not read and not counted.
    cu_seqlens_k : Tensor, int32 [B + 1], optional
        The same for keys. None: lengths come from `seqused_k` alone (paged KV).
    block_size : int
        Keys in a KV block.
    seqused_k : Tensor, int32 [B], optional
        Keys of each sequence; shortens those of `cu_seqlens_k`. Negative lengths count as 0.
    num_rows : int
        R, the rows to make room for; `row_bound` gives a sufficient number.
    check : bool
        Read `num_bad_edges` on the host, which synchronises, and refuse bad edges.

    Returns
    -------
    K2QCSR
        Edges that cannot be placed are dropped and counted in `num_bad_edges`; no value of any
        input leads outside a tensor. Every id of a list counts, repeated ones too.

    Raises
    ------
    TypeError
        An argument has the wrong class or dtype.
    ValueError
        An argument has a wrong shape, device or value. With `check`, there are bad edges; the
        message names the first one, by head, token and lane, and how many there are.

    Notes
    -----
    Deterministic, and without a synchronisation unless `check`. Memory is linear in edges + rows.
    The reverse index is that of MSA (arXiv 2606.13392), section 4.
    """
    lengths = _check_tables(q2k_indices, cu_seqlens_q, cu_seqlens_k, seqused_k)
    expect_int("block_size", block_size, 1)
    expect_int("num_rows", num_rows, 0, _INT32_MAX)
    num_kv_heads, num_queries, width = q2k_indices.shape
    num_slots = num_queries * width
    wide = torch.int64 if num_slots > _INT32_MAX else torch.int32
    row_map = _map_rows(cu_seqlens_q, lengths, num_queries, block_size)

    sequence, local = _locate_queries(row_map, num_queries)
    exists = (q2k_indices >= 0) & (q2k_indices < row_map.num_blocks[sequence].unsqueeze(-1))
    row = row_map.row_start[sequence].unsqueeze(-1) + q2k_indices
    placed = exists & (row < num_rows)
    is_padding = (sequence == lengths.shape[0]).unsqueeze(-1)
    bad = ~placed & (q2k_indices != EMPTY) & ~is_padding

    row = row.masked_fill(~placed, num_rows).reshape(num_kv_heads, num_slots).contiguous()
    rows, edges = row.sort(dim=1, stable=True)
    bounds = torch.arange(num_rows + 1, device=row.device).repeat(num_kv_heads, 1)
    unused = rows == num_rows
    q_indices = local[edges // max(width, 1)].masked_fill(unused, EMPTY)
    csr = K2QCSR(
        row_ptr=torch.searchsorted(rows, bounds).to(wide),
        q_indices=q_indices.to(torch.int32),
        edge_ids=edges.masked_fill(unused, EMPTY).to(wide),
        row_coords=_row_coords(row_map, num_rows),
        num_bad_edges=bad.sum().reshape(1),
        num_queries=num_queries,
        table_width=width,
    )
    if check and csr.num_bad_edges.item():
        _refuse_bad_edges(q2k_indices, bad, row_map, sequence, num_rows)
    return csr


def transpose_block_lists(
    q2k_indices: Tensor,
    q2k_counts: Tensor,
    num_kv_blocks: int,
    *,
    dense_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Turn the KV blocks of each query block into the query blocks of each KV block.

    Parameters
    ----------
    q2k_indices : Tensor, int32 [B, H, Nq, K], any strides
        Ids of the chosen KV blocks, in any order.
    q2k_counts : Tensor, int32 [B, H, Nq], any strides
        How many leading ids of each list count, clamped to [0, K].
    num_kv_blocks : int
        Nkv. Ids outside 0 to Nkv - 1 are ignored.
    dense_rows : int
        The first so many query blocks chose every KV block; their lists are not read.

    Returns
    -------
    k2q_indices : Tensor, int32 [B, H, Nkv, Nq]
        Ids of the query blocks that chose each KV block, ascending, then -1. A query block stands
        once, even where its list repeats the KV block.
    k2q_counts : Tensor, int32 [B, H, Nkv]
        How many there are.

    Raises
    ------
    TypeError
        An argument has the wrong class or dtype.
    ValueError
        An argument has a wrong shape, device or value.
    """
    _expect_table("q2k_indices", q2k_indices, ("B", "H", "Nq", "K"), None, None)
    shape, width = q2k_indices.shape[:3], q2k_indices.shape[3]
    _expect_table("q2k_counts", q2k_counts, ("B", "H", "Nq"), shape, q2k_indices.device)
    expect_int("num_kv_blocks", num_kv_blocks, 0)
    num_q_blocks = shape[2]
    expect_int("dense_rows", dense_rows, 0, num_q_blocks)

    lane = torch.arange(width, device=q2k_indices.device)
    is_block = (q2k_indices >= 0) & (q2k_indices < num_kv_blocks)
    listed = is_block & (lane < q2k_counts.unsqueeze(-1))
    kv_block = q2k_indices.masked_fill(~listed, num_kv_blocks).to(torch.int64)
    chosen = torch.zeros(
        (*shape, num_kv_blocks + 1), dtype=torch.bool, device=q2k_indices.device
    ).scatter_(3, kv_block, True)
    chosen[:, :, :dense_rows] = True
    chosen = chosen[..., :num_kv_blocks].transpose(2, 3)

    q_block = torch.arange(num_q_blocks, dtype=torch.int32, device=q2k_indices.device)
    packed = torch.where(chosen, q_block, num_q_blocks).sort(dim=3).values
    k2q_indices = packed.masked_fill(packed == num_q_blocks, EMPTY)
    return k2q_indices, chosen.sum(dim=3, dtype=torch.int32)


def expect_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Check a host int; torch.SymInt is what a compiled graph with dynamic shapes passes."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name} must be {wanted}, got {value}")


def describe(value: object) -> str:
    """Name what was passed, for an error message."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


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


def _row_coords(row_map: _RowMap, num_rows: int) -> Tensor:
    """(batch, kv_block) of each row, int32 [R, 2]; (-1, -1) after the last row in use."""
    row = torch.arange(num_rows, device=row_map.row_start.device)
    batch = torch.searchsorted(row_map.row_start[1:], row, right=True)
    coords = torch.stack((batch, row - row_map.row_start[batch]), dim=1)
    return coords.masked_fill((row >= row_map.row_start[-1]).unsqueeze(1), EMPTY).to(torch.int32)


def _refuse_bad_edges(
    q2k_indices: Tensor, bad: Tensor, row_map: _RowMap, sequence: Tensor, num_rows: int
) -> None:
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


def _check_tables(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
) -> Tensor:
    """Check the tensors of a token selection; return its key lengths, int64 [B], at least 0."""
    _expect_table("q2k_indices", q2k_indices, ("Hkv", "Tq", "K"), None, None)
    device = q2k_indices.device
    _expect_table("cu_seqlens_q", cu_seqlens_q, ("B + 1",), None, device)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q must hold at least one offset, got int32 [0]")
    if seqused_k is not None:
        _expect_table("seqused_k", seqused_k, ("B",), (batch,), device)
    if cu_seqlens_k is not None:
        _expect_table("cu_seqlens_k", cu_seqlens_k, ("B + 1",), (batch + 1,), device)
        lengths = cu_seqlens_k.to(torch.int64).diff()
        if seqused_k is not None:
            lengths = torch.minimum(lengths, seqused_k)
    elif seqused_k is not None:
        lengths = seqused_k.to(torch.int64)
    else:
        raise ValueError(f"seqused_k must be int32 [B] = [{batch}] without cu_seqlens_k, got None")
    return lengths.clamp(min=0)


def _expect_table(
    name: str,
    table: object,
    dims: tuple[str, ...],
    shape: tuple[int, ...] | None,
    device: torch.device | None,
) -> None:
    """Check an int32 tensor; `shape` None leaves its sizes free."""
    wanted = f"int32 [{', '.join(dims)}]"
    if shape is not None:
        wanted += f" = {list(shape)}"
    if not isinstance(table, Tensor) or table.dtype != torch.int32:
        raise TypeError(f"{name} must be {wanted}, got {describe(table)}")
    if table.dim() != len(dims) or (shape is not None and tuple(table.shape) != tuple(shape)):
        raise ValueError(f"{name} must be {wanted}, got {describe(table)}")
    if device is not None and table.device != device:
        raise ValueError(f"{name} must be on q2k_indices' device {device}, got {describe(table)}")
