"""The lists of KV blocks that a k2q CSR in MSA's order of rows was made of."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_atten.contracts import EMPTY
from sparse_atten.cute_kernels.common.arguments import describe, expect_table


def lists_of_csr(
    row_ptr: Tensor,
    q_indices: Tensor,
    *,
    width: int,
    num_queries: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_blocks: int,
    block_size: int,
) -> Tensor:
    """Turn a k2q CSR back into the KV blocks of each query token.

    Parameters
    ----------
    row_ptr : Tensor, int32 [Hkv, R + 1]
        Where the entries of each row begin: block 0 of all sequences that have one, then block 1,
        and so on.
    q_indices : Tensor, int32 [Hkv, >= edges]
        Query tokens of each row, counted from the start of their sequence, in any order.
    width : int
        K, the most entries that name one token.
    num_queries : int
        Tq.
    cu_seqlens_q, cu_seqlens_k : Tensor, int32 [B + 1]
        Offsets of queries and keys.
    max_blocks : int
        A bound on the KV blocks of a sequence.
    block_size : int
        Keys in a block.

    Returns
    -------
    Tensor, int32 [Hkv, Tq, K]
        Ascending ids, then -1.

    Raises
    ------
    TypeError, ValueError
        A tensor has a wrong dtype or shape; ValueError on CPU tensors where the CSR contradicts
        itself. On a device that trips an assertion there, since nothing is read back.
    """
    expect_table("k2q_row_ptr", row_ptr, ("Hkv", "R + 1"))
    heads, num_rows = row_ptr.shape[0], row_ptr.shape[1] - 1
    like = ("k2q_row_ptr", row_ptr)
    expect_table("k2q_q_indices", q_indices, ("Hkv", "E"), shape=(heads, None), like=like)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        expect_table(name, offsets, ("B + 1",), like=like)
    if num_rows < 0 or cu_seqlens_q.shape != cu_seqlens_k.shape or not cu_seqlens_q.shape[0]:
        raise ValueError(
            "k2q_row_ptr must be int32 [Hkv, R + 1], and cu_seqlens_q and cu_seqlens_k int32 "
            f"[B + 1], got {', '.join(map(describe, (row_ptr, cu_seqlens_q, cu_seqlens_k)))}"
        )
    batch, block, rows_exist = _rows(cu_seqlens_k, num_rows, max_blocks, block_size)
    # A sequence without queries stands at the end, for rows of no sequence.
    q_start = cu_seqlens_q.long()
    q_length = torch.nn.functional.pad(cu_seqlens_q.diff().long(), (0, 1))

    entry = torch.arange(q_indices.shape[1], device=row_ptr.device).expand(heads, -1).contiguous()
    row = torch.searchsorted(row_ptr.long(), entry, right=True) - 1  # [Hkv, E]
    used = (row >= 0) & (row < num_rows)
    row = row.clamp(0, num_rows)
    local, owner = q_indices.long(), batch[row]
    inside = (local >= 0) & (local < q_length[owner])
    token = torch.where(used & inside, q_start[owner] + local, num_queries)

    ordered, order = token.sort(dim=1, stable=True)  # by token, then by row
    rank = torch.arange(entry.shape[1], device=token.device) - torch.searchsorted(ordered, ordered)
    kept = (ordered < num_queries) & (rank < width)
    place = torch.where(kept, ordered * width + rank, num_queries * width)
    size = (heads, num_queries * width + 1)  # the last is for what is not kept
    lists = torch.full(size, EMPTY, dtype=torch.int32, device=token.device)
    lists.scatter_(1, place, block[row].gather(1, order))
    starts, ends = row_ptr[:, 0], row_ptr[:, -1]
    ordered_rows = (starts == 0).all() & (row_ptr.diff() >= 0).all()
    _expect(
        {
            "k2q_row_ptr must start at 0, not decrease, and end within k2q_q_indices": (
                ordered_rows & (ends <= q_indices.shape[1]).all()
            ),
            "k2q_row_ptr must have a row for each KV block of each sequence": rows_exist,
            "k2q_q_indices must be tokens of the row's sequence": (inside | ~used).all(),
            f"k2q_q_indices must name a token at most topK = {width} times": (
                (rank < width) | (ordered == num_queries)
            ).all(),
        }
    )
    return lists[:, :-1].unflatten(1, (num_queries, width))


def _rows(
    cu_seqlens_k: Tensor, num_rows: int, max_blocks: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence and KV block of each row, and whether all blocks have a row.

    Rows of no sequence, and one more at the end, belong to sequence B and block -1.
    """
    lengths = (cu_seqlens_k.diff() + block_size - 1) // block_size  # [B], in blocks
    device, num_sequences = lengths.device, lengths.shape[0]
    shape = (max_blocks, num_sequences)
    level = torch.arange(max_blocks, device=device)[:, None].expand(shape).flatten()
    sequence = torch.arange(num_sequences, device=device).expand(shape).flatten()
    exists = level < lengths[sequence]
    row = torch.where(exists, exists.cumsum(0) - 1, num_rows).clamp(max=num_rows)
    batch = torch.full((num_rows + 1,), num_sequences, device=device).scatter_(0, row, sequence)
    block = torch.full((num_rows + 1,), EMPTY, device=device).scatter_(0, row, level)
    batch[-1], block[-1] = num_sequences, EMPTY
    enough = (exists.sum() <= num_rows) & (lengths <= max_blocks).all()
    return batch, block.int(), enough


def _expect(conditions: dict[str, Tensor]) -> None:
    """Raise ValueError for the first condition that fails; on a device trip an assertion there."""
    for message, holds in conditions.items():
        if holds.device.type != "cpu":
            torch._assert_async(holds, message)
        elif not bool(holds):
            raise ValueError(message)
