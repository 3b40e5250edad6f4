"""One partial-attention call (MSA, K1) as plain numbers: what a kernel and its plan start from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.cute_kernels.common.launch import TensorMap

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # keys of a KV block
HEAD_DIM = 128
GROUP_SIZES = (1, 2, 4, 8, 16)
SWIZZLE_BYTES = 128
MAX_SLOTS = 1 << 23  # slots of a query's list: a slot shares a word with a number of keys
_ITEM_BYTES = 2
_ROW_BYTES = HEAD_DIM * _ITEM_BYTES


class Operand(NamedTuple):
    """A tensor whose last dim is contiguous: its address, and its other strides in elements."""

    address: int
    strides: tuple[int, ...]


class Partials(NamedTuple):
    """Where the partial results of a chunk of query tokens go; all contiguous."""

    o: Tensor  # [K, chunk, Hq, D], q's dtype or float32
    lse: Tensor  # float32 [K, chunk, Hq]
    lse_t: Tensor | None = None  # likewise


@dataclass(frozen=True)
class Arguments:
    """Addresses, shapes, strides and scalars of a call; `tensors` keeps the memory alive.

    Flat keys are one outer block of `key_rows` = Tk rows, paged ones `key_outer` pages of 128.
    """

    q: Operand  # strides of token, head
    k: Operand  # strides of row, outer block, head
    v: Operand
    o_partial: int
    addresses: tuple[int, ...]  # of the tables and LSEs, in the order of the kernel's parameters
    strides: tuple[int, ...]  # of cu_seqlens_q, cu_seqlens_k, seqused_k, page_table
    capacity: int  # work items that the schedule has room for
    num_rows: int
    num_entries: int  # of a KV head's CSR
    num_queries: int  # Tq
    num_q_heads: int
    group_size: int
    batch: int
    key_rows: int
    key_outer: int
    num_kv_blocks: int  # most KV blocks of a sequence
    first_token: int
    chunk: int
    num_slots: int  # K
    scale_log2: float
    scale_t_log2: float
    tensors: tuple = field(repr=False, compare=False)

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.num_q_heads // self.group_size

    @property
    def scalars(self) -> tuple[int, ...]:
        """The integers, in the order of the kernel's parameters."""
        return (
            self.capacity,
            self.num_rows,
            self.num_entries,
            self.num_queries,
            self.num_q_heads,
            self.batch,
            self.key_rows,
            self.key_outer,
            self.num_kv_blocks,
            self.first_token,
            self.chunk,
            self.num_slots,
        )

    def grid(self, persistent: str, num_sms: int) -> tuple[int, int, int]:
        """Return one CTA for each possible work item, or "static" at most one for each SM."""
        return (min(self.capacity, num_sms) if persistent == "static" else self.capacity, 1, 1)

    def kernel_parameters(
        self, dtype: str, *, fp32_partials: bool
    ) -> tuple[TensorMap | int | float | None, ...]:
        """Return the parameters of the kernel, in order; None is the extents of a TMA tensor."""
        maps = (
            self.query_map(dtype),
            self.key_map(self.k, dtype),
            self.key_map(self.v, dtype),
            self.partial_map("fp32" if fp32_partials else dtype),
        )
        return (
            *(x for tensor_map in maps for x in (tensor_map, None)),
            *self.addresses,
            *self.strides,
            *self.scalars,
            self.scale_log2,
            self.scale_t_log2,
        )

    def query_map(self, dtype: str) -> TensorMap:
        """Describe q: a box is half of the rows that one token has in a tile."""
        token, head = (stride * _ITEM_BYTES for stride in self.q.strides)
        dims = (HEAD_DIM, self.num_q_heads, self.num_queries)
        box = (SWIZZLE_BYTES // _ITEM_BYTES, self.group_size, 1)
        return TensorMap(self.q.address, dtype, dims, (head, token), box)

    def key_map(self, operand: Operand, dtype: str) -> TensorMap:
        """Describe k or v: rows outside their outer block read as 0."""
        strides = tuple(stride * _ITEM_BYTES for stride in operand.strides)
        dims = (HEAD_DIM, self.key_rows, self.key_outer, self.num_kv_heads)
        box = (SWIZZLE_BYTES // _ITEM_BYTES, BLOCK, 1, 1)
        return TensorMap(operand.address, dtype, dims, strides, box)

    def partial_map(self, dtype: str) -> TensorMap:
        """Describe o_partial: a box is 128 bytes of the rows of one token."""
        item = 4 if dtype == "fp32" else _ITEM_BYTES
        row = HEAD_DIM * item
        dims = (HEAD_DIM, self.num_q_heads, self.chunk, self.num_slots)
        strides = (row, row * self.num_q_heads, row * self.num_q_heads * self.chunk)
        box = (SWIZZLE_BYTES // item, self.group_size, 1, 1)
        return TensorMap(self.o_partial, dtype, dims, strides, box)


# A call without tensors: what a kernel is compiled with.
NO_ARGUMENTS = Arguments(
    q=Operand(0, (0, 0)),
    k=Operand(0, (0, 0, 0)),
    v=Operand(0, (0, 0, 0)),
    o_partial=0,
    addresses=(0,) * 11,
    strides=(0,) * 5,
    capacity=1,
    num_rows=1,
    num_entries=1,
    num_queries=1,
    num_q_heads=1,
    group_size=1,
    batch=1,
    key_rows=1,
    key_outer=1,
    num_kv_blocks=1,
    first_token=0,
    chunk=1,
    num_slots=1,
    scale_log2=1.0,
    scale_t_log2=1.0,
    tensors=(),
)


def arguments_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    partials: Partials,
    selection: Any,
    *,
    csr: Any,
    schedule: Any,
    softmax_scale: float,
    lse_temperature: float | None = None,
    first_token: int = 0,
) -> Arguments:
    """Take a validated call apart.

    Parameters
    ----------
    q : Tensor, bfloat16 or float16 [Tq, Hq, D]
        All query tokens, also where the call is about a chunk of them.
    k, v : Tensor
        [Tk, Hkv, D], or pools [pages, Hkv, 128, D] ("hnd") or [pages, 128, Hkv, D] ("nhd").
        Strides are kept, nothing is copied.
    partials : Partials
        Outputs of the chunk, `chunk` query tokens from `first_token`.
    selection : TokenSelection
        Lengths, page table and layout; its `q2k_indices` are not read.
    csr, schedule : K2QCSR, Schedule
        Of the chunk. An entry counts query tokens from the first of its sequence in the chunk.
    softmax_scale, lse_temperature : float
        Factor of the scores, and what it is multiplied by for `partials.lse_t`.
    first_token : int
        First query token of the chunk.

    Raises
    ------
    NotImplementedError
        The CSR has 64-bit row pointers, the group size is none of 1, 2, 4, 8, 16, or K is 2^23 or
        more.
    ValueError
        A table of the CSR or of the schedule, or a partial, is not contiguous.
    """
    outer = selection.page_table is not None
    group_size = q.shape[1] // k.shape[2 if outer and selection.kv_layout == "nhd" else 1]
    _check_limits(group_size, csr, partials.o.shape[0])
    tables = {
        "work_items": schedule.work_items,
        "num_items": schedule.num_items,
        "row_ptr": csr.row_ptr,
        "q_indices": csr.q_indices,
        "split_slot": schedule.split_slot,
    }
    for name, tensor in (*tables.items(), *partials._asdict().items()):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got {describe(tensor)} with strides {tensor.stride()}"
            )
    lengths = (selection.cu_seqlens_q, selection.cu_seqlens_k, selection.seqused_k)
    sources = (*tables.values(), *lengths, selection.page_table, partials.lse, partials.lse_t)
    pages = (0, 0) if selection.page_table is None else selection.page_table.stride()
    scale_log2 = softmax_scale * math.log2(math.e)
    return Arguments(
        q=_operand(q, (0, 1), q),
        k=_key_operand(k, selection, q),
        v=_key_operand(v, selection, q),
        o_partial=partials.o.data_ptr(),
        addresses=tuple(0 if tensor is None else tensor.data_ptr() for tensor in sources),
        strides=(*(0 if x is None else x.stride(0) for x in lengths), *pages),
        capacity=schedule.work_items.shape[0],
        num_rows=csr.row_ptr.shape[1] - 1,
        num_entries=csr.q_indices.shape[1],
        num_queries=q.shape[0],
        num_q_heads=q.shape[1],
        group_size=group_size,
        batch=selection.cu_seqlens_q.shape[0] - 1,
        key_rows=BLOCK if outer else max(k.shape[0], 1),
        key_outer=max(k.shape[0], 1) if outer else 1,
        num_kv_blocks=selection.page_table.shape[1] if outer else -(-k.shape[0] // BLOCK),
        first_token=first_token,
        chunk=partials.o.shape[1],
        num_slots=partials.o.shape[0],
        scale_log2=scale_log2,
        scale_t_log2=scale_log2 * (1.0 if lse_temperature is None else lse_temperature),
        tensors=(q, k, v, partials, selection, csr, schedule),
    )


def _check_limits(group_size: int, csr: Any, num_slots: int) -> None:
    if group_size not in GROUP_SIZES:
        raise NotImplementedError(f"Hq / Hkv must be one of {GROUP_SIZES}, got {group_size}")
    if csr.row_ptr.element_size() != 4:
        raise NotImplementedError(
            "row_ptr must be int32, as for fewer than 2^31 slots of the table, got "
            f"{describe(csr.row_ptr)}"
        )
    if num_slots >= MAX_SLOTS:
        raise NotImplementedError(f"K must be less than {MAX_SLOTS}, got {num_slots}")


def _key_operand(tensor: Tensor, selection: Any, q: Tensor) -> Operand:
    """Strides of row, outer block and head of flat keys or of a pool."""
    if selection.page_table is None:
        address, (row, head) = _operand(tensor, (0, 1), q)
        return Operand(address, (row, HEAD_DIM, head))
    return _operand(tensor, (1, 0, 2) if selection.kv_layout == "nhd" else (2, 0, 1), q)


def _operand(tensor: Tensor, dims: tuple[int, ...], stand_in: Tensor) -> Operand:
    """Address and strides; an empty tensor, which is not read, gets the address of another."""
    # A dim of size 1 has no stride, but a descriptor wants a multiple of 16 bytes.
    strides = tuple(tensor.stride(d) if tensor.shape[d] > 1 else HEAD_DIM for d in dims)
    return Operand(tensor.data_ptr() or stand_in.data_ptr(), strides)
