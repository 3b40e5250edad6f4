"""One VSA call as plain numbers: what the kernels and their launch plans start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparse_atten.cute_kernels.common.launch import TensorMap

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # queries of a Q block and keys of a KV block
HEAD_DIM = 128
MAX_GRID_YZ = 65535
_HALF_ROW = 64  # elements of a 128-byte swizzle row
_ITEM_BYTES = 2


@dataclass(frozen=True)
class Operand:
    """One of q, k, v and the output: its address, and strides in elements of batch, head, token."""

    address: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class Table:
    """An int32 table: its address, 0 where there is none, and its strides in elements."""

    address: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Arguments:
    """Addresses, shapes, strides and scalars of a call; `tensors` keeps the memory alive."""

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    indices: Table  # [B, Hq, Nq, K]
    counts: Table  # [B, Hq, Nq]
    kv_sizes: Table  # [B, Nkv]
    q_sizes: Table  # [Nq]
    lse_address: int  # float32 [B, Hq, Sq], contiguous
    queue_address: int  # int32 [1], 0 between launches: the counter of a kernel that draws items
    batch: int
    num_q_heads: int
    group_size: int
    num_queries: int
    num_keys: int
    table_width: int
    dense_rows: int
    scale_log2: float
    tensors: tuple = field(repr=False, compare=False)

    @property
    def num_q_blocks(self) -> int:
        """Q blocks of a head, Nq."""
        return -(-self.num_queries // BLOCK)

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of a head, Nkv."""
        return -(-self.num_keys // BLOCK)

    def at(self, addresses: Sequence[Any]) -> Arguments:
        """Return the call at other addresses, in the order of the fields that hold them."""
        names = ("q", "k", "v", "out", "indices", "counts", "kv_sizes", "q_sizes")
        places = zip(names, addresses, strict=False)
        moved = {name: replace(getattr(self, name), address=x) for name, x in places}
        return replace(self, **moved, lse_address=addresses[8], queue_address=addresses[9])

    @property
    def tables(self) -> tuple[Table, Table, Table, Table]:
        """The int32 tables, in the order of the kernel's parameters."""
        return (self.indices, self.counts, self.kv_sizes, self.q_sizes)

    @property
    def scalars(self) -> tuple[int, ...]:
        """The integers, in the order of the kernel's parameters."""
        return (
            self.batch,
            self.num_q_heads,
            self.group_size,
            self.num_queries,
            self.num_keys,
            self.table_width,
            self.dense_rows,
        )

    def grid(self, persistent: str, num_sms: int) -> tuple[int, int, int]:
        """Return one CTA for each work item, or "static" at most one for each multiprocessor.

        Raises
        ------
        NotImplementedError
            A grid cannot be that large.
        """
        pairs = (self.num_q_blocks + 1) // 2
        if persistent == "static":
            return (min(pairs * self.num_q_heads * self.batch, num_sms), 1, 1)
        for name, size in (("heads", self.num_q_heads), ("batch", self.batch)):
            if size > MAX_GRID_YZ:
                raise NotImplementedError(
                    f"{name} must be at most {MAX_GRID_YZ} without static scheduling, got {size}"
                )
        return (pairs, self.num_q_heads, self.batch)

    def kernel_parameters(self, dtype: str) -> tuple[TensorMap | int | float | None, ...]:
        """Return the parameters of the kernel, in order; None is the extents of a TMA tensor."""
        maps = (
            self.query_map(self.q, dtype),
            self.key_map(self.k, dtype),
            self.key_map(self.v, dtype),
            self.query_map(self.out, dtype),
        )
        return (
            *(x for tensor_map in maps for x in (tensor_map, None)),
            *(table.address for table in self.tables),
            self.lse_address,
            *(stride for table in self.tables for stride in table.strides),
            *self.scalars,
            self.scale_log2,
        )

    def query_map(self, operand: Operand, dtype: str) -> TensorMap:
        """Describe q or the output: rows past the last query read as 0 and are not written."""
        b, h, s = (stride * _ITEM_BYTES for stride in operand.strides)
        dims = (HEAD_DIM, self.num_queries, self.num_q_heads, self.batch)
        return TensorMap(operand.address, dtype, dims, (s, h, b), (_HALF_ROW, BLOCK, 1, 1))

    def key_map(self, operand: Operand, dtype: str) -> TensorMap:
        """Describe k or v with the row inside its block as a dim, so that row -1 reads as 0."""
        b, h, s = (stride * _ITEM_BYTES for stride in operand.strides)
        heads = self.num_q_heads // self.group_size
        dims = (HEAD_DIM, BLOCK, self.num_kv_blocks, heads, self.batch)
        strides = (s, s * BLOCK, h, b)
        return TensorMap(operand.address, dtype, dims, strides, (_HALF_ROW, BLOCK, 1, 1, 1))


_NOTHING = Operand(0, (0, 0, 0))
# A call without tensors: what a kernel is compiled with.
NO_ARGUMENTS = Arguments(
    q=_NOTHING,
    k=_NOTHING,
    v=_NOTHING,
    out=_NOTHING,
    indices=Table(0, (0,) * 4),
    counts=Table(0, (0,) * 3),
    kv_sizes=Table(0, (0,) * 2),
    q_sizes=Table(0, (0,)),
    lse_address=0,
    queue_address=0,
    batch=1,
    num_q_heads=1,
    group_size=1,
    num_queries=1,
    num_keys=1,
    table_width=1,
    dense_rows=0,
    scale_log2=1.0,
    tensors=(),
)


def arguments_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    selection: Any,
    *,
    softmax_scale: float,
    lse: Tensor | None = None,
    queue: Tensor | None = None,
) -> Arguments:
    """Take a validated call apart.

    Parameters
    ----------
    q, k, v, out : Tensor, bfloat16 or float16
        In the layout that `selection` names; strides are kept, nothing is copied.
    selection : BlockSelection
        Block size 128.
    softmax_scale : float
        Factor of the scores.
    lse : Tensor, float32 [B, Hq, Sq], contiguous, optional
        Where the natural-log LSE goes.
    queue : Tensor, int32 [1], optional
        A counter that is 0 between launches, for a kernel that draws work items.
    """
    head, token = (1, 2) if selection.layout == "bhsd" else (2, 1)

    def operand(tensor: Tensor) -> Operand:
        dims = (0, head, token)
        # A dim of size 1 has no stride, but a descriptor wants a multiple of 16 bytes.
        strides = tuple(tensor.stride(d) if tensor.shape[d] > 1 else HEAD_DIM for d in dims)
        return Operand(tensor.data_ptr(), (strides[0], strides[1], strides[2]))

    def table(tensor: Tensor | None, rank: int) -> Table:
        if tensor is None:
            return Table(0, (0,) * rank)
        missing = (0,) * (rank - tensor.dim())
        return Table(tensor.data_ptr(), (*missing, *tensor.stride()))

    sizes, rows = selection.kv_block_sizes, selection.q_block_sizes
    return Arguments(
        q=operand(q),
        k=operand(k),
        v=operand(v),
        out=operand(out),
        indices=table(selection.q2k_indices, 4),
        counts=table(selection.q2k_counts, 3),
        kv_sizes=table(sizes, 2),
        q_sizes=table(rows, 1),
        lse_address=0 if lse is None else lse.data_ptr(),
        queue_address=0 if queue is None else queue.data_ptr(),
        batch=q.shape[0],
        num_q_heads=q.shape[head],
        group_size=q.shape[head] // k.shape[head],
        num_queries=q.shape[token],
        num_keys=k.shape[token],
        table_width=selection.q2k_indices.shape[3],
        dense_rows=selection.dense_rows,
        scale_log2=softmax_scale * math.log2(math.e),
        tensors=(q, k, v, out, lse, queue, selection),
    )
