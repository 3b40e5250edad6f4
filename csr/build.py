"""The q2k -> k2q transposition: arguments checked once, then the device's kernels or torch."""

from __future__ import annotations

from torch import Tensor

from sparse_atten.csr.device import (
    Recipe,
    Run,
    Tables,
    bind_on,
    csr_by,
    csr_recipe,
    lists_on_device,
    lists_steps,
)
from sparse_atten.csr.reference import (
    INT32_MAX,
    K2QCSR,
    k2q_csr_of,
    key_lengths,
    refuse_bad_edges,
    transposed_lists_of,
)
from sparse_atten.cute_kernels.common.arguments import expect_int, expect_table
from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels

_CSR: Memo[tuple[Recipe, Run]] = Memo()
_LISTS: Memo[Run] = Memo()


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
        first and from the last offset on are padding: their ids are neither used nor counted.
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

    CUDA tensors on a GPU of compute capability 9.0 or newer take the kernels of csr.cu, whose
    results equal the reference's bit for bit: four launches up to 1280 rows, eight up to 2^20, for
    whose workspace see `build_csr_and_schedule`. They can be captured in a CUDA graph after
    `preload` or a first call. Others take the torch reference, with the workspace of a sort.
    """
    tables = Tables(q2k_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, block_size, num_rows)
    known = _CSR.find(key_of(*tables)) if runs_kernels(q2k_indices) else None
    if known is not None:
        csr = csr_by(*known, tables)
    else:
        check_tables(tables)
        csr = csr_of(tables)
    if check and csr.num_bad_edges.item():
        lengths = key_lengths(cu_seqlens_k, seqused_k)
        refuse_bad_edges(
            q2k_indices, cu_seqlens_q, lengths, block_size=block_size, num_rows=num_rows
        )
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

    Notes
    -----
    CUDA tensors on a GPU of compute capability 9.0 or newer take two kernels of csr.cu and a
    workspace of a bit for each entry of `k2q_indices`.
    """
    on_device = runs_kernels(q2k_indices)
    if on_device:
        key = key_of(q2k_indices, q2k_counts, num_kv_blocks, dense_rows)
        run = _LISTS.find(key)
        if run is not None:
            return lists_on_device(q2k_indices, q2k_counts, num_kv_blocks, run)
    expect_table("q2k_indices", q2k_indices, ("B", "H", "Nq", "K"))
    shape, like = tuple(q2k_indices.shape[:3]), ("q2k_indices", q2k_indices)
    expect_table("q2k_counts", q2k_counts, ("B", "H", "Nq"), shape=shape, like=like)
    expect_int("num_kv_blocks", num_kv_blocks, 0)
    num_q_blocks = shape[2]
    expect_int("dense_rows", dense_rows, 0, num_q_blocks)

    if on_device and num_kv_blocks and q2k_counts.numel():
        steps = lists_steps(q2k_indices, q2k_counts, num_kv_blocks, dense_rows)
        run = _LISTS.keep(key, bind_on(q2k_indices.device, False)(steps))
        return lists_on_device(q2k_indices, q2k_counts, num_kv_blocks, run)
    return transposed_lists_of(q2k_indices, q2k_counts, num_kv_blocks, dense_rows)


def csr_of(tables: Tables) -> K2QCSR:
    """Build the CSR of checked tables where they lie."""
    q2k, is_wide = tables.q2k_indices, tables.is_wide
    if runs_kernels(q2k) and q2k.numel() and tables.num_rows:
        recipe = csr_recipe(tables, is_wide)
        run = bind_on(q2k.device, is_wide)(recipe.steps)
        return csr_by(*_CSR.keep(key_of(*tables), (recipe, run)), tables)
    return k2q_csr_of(
        q2k,
        tables.cu_seqlens_q,
        key_lengths(tables.cu_seqlens_k, tables.seqused_k, tables.key_capacity),
        block_size=tables.block_size,
        num_rows=tables.num_rows,
    )


def check_tables(tables: Tables) -> None:
    """Check the tables of a token selection, and the numbers that go with them."""
    q2k_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, block_size, num_rows, capacity = tables
    expect_table("q2k_indices", q2k_indices, ("Hkv", "Tq", "K"))
    like = ("q2k_indices", q2k_indices)
    expect_table("cu_seqlens_q", cu_seqlens_q, ("B + 1",), like=like)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q must hold at least one offset, got int32 [0]")
    if seqused_k is not None:
        expect_table("seqused_k", seqused_k, ("B",), shape=(batch,), like=like)
    if cu_seqlens_k is not None:
        expect_table("cu_seqlens_k", cu_seqlens_k, ("B + 1",), shape=(batch + 1,), like=like)
    elif seqused_k is None:
        raise ValueError(f"seqused_k must be int32 [B] = [{batch}] without cu_seqlens_k, got None")
    expect_int("block_size", block_size, 1)
    expect_int("num_rows", num_rows, 0, INT32_MAX)
    if capacity is not None:
        expect_int("key_capacity", capacity, 0)
