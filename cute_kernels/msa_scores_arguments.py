"""One call of MSA's index scores as plain numbers: what the kernel and its plan start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparse_atten.cute_kernels.common.launch import TensorMap, View

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # keys of a KV block
QUERIES = 256  # of a work item
HEAD_DIMS = (64, 128)
MAX_ROUNDS = (1 << 31) - 1  # query tiles x heads x KV blocks of a launch
_HALF_ROW = 64  # elements of a 128-byte swizzle row
_ITEM_BYTES = 2
_ALIGNED = 8  # elements of 16 bytes


@dataclass(frozen=True)
class Arguments:
    """Addresses, shapes, strides and scalars of a call; `tensors` keeps the memory alive.

    Flat keys are one outer block of `key_rows` = Tk rows, paged ones `key_outer` pages of 128.
    """

    q: View  # strides of token, head
    k: View  # strides of row, outer block, head
    cu_seqlens_q: View
    cu_seqlens_k: View
    seqused_k: View
    page_table: View
    scores: View  # float32 [Hidx, n, num_tokens]: strides of head, block
    bounds: Any  # address of int32 [2, num_tokens], contiguous; 0 for none
    batch: int
    num_queries: int  # Tq
    key_rows: int
    key_outer: int
    num_heads: int  # Hidx
    group_size: int  # Hidx / Hk
    num_blocks: int  # that scores has room for, and a page table
    first_token: int
    num_tokens: int  # that are scored, from `first_token`
    causal: int
    scale: float
    head_dim: int
    tensors: tuple = field(repr=False, compare=False)

    @property
    def views(self) -> tuple[View, ...]:
        """The tables and the output, in the order of the kernel's parameters."""
        lengths = (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k)
        return (*lengths, self.page_table, self.scores)

    @property
    def scalars(self) -> tuple[int, ...]:
        """The integers, in the order of the kernel's parameters."""
        return (
            self.batch,
            self.num_queries,
            self.key_rows,
            self.key_outer,
            self.num_heads,
            self.group_size,
            self.num_blocks,
            self.first_token,
            self.num_tokens,
            self.causal,
        )

    @property
    def most_rounds(self) -> int:
        """Bound on the number of query tiles times KV blocks that a launch computes."""
        tiles = self.num_tokens // QUERIES + self.batch
        return tiles * self.num_blocks * self.num_heads

    def at(self, addresses: Sequence[Any]) -> Arguments:
        """Return the call at other addresses, in the order of the fields that hold them."""
        names = ("q", "k", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "scores")
        *places, bounds = addresses
        moved = {
            name: replace(getattr(self, name), address=address)
            for name, address in zip(names, places, strict=True)
        }
        return replace(self, **moved, bounds=bounds)

    def kernel_parameters(self, dtype: str) -> tuple[Any, ...]:
        """Return the parameters of the kernel, in order; None is the extents of a TMA tensor."""
        return (
            *(x for tensor_map in self._maps(dtype) for x in (tensor_map, None)),
            *(view.address for view in self.views),
            self.bounds,
            *(stride for view in self.views for stride in view.strides),
            *self.scalars,
            self.scale,
        )

    def _maps(self, dtype: str) -> tuple[TensorMap, TensorMap]:
        """Describe q and k: rows outside the tensor or the page read as 0."""
        queries = (self.head_dim, self.num_queries, self.num_heads)
        heads = self.num_heads // self.group_size
        keys = (self.head_dim, self.key_rows, self.key_outer, heads)
        made = []
        for view, dims in ((self.q, queries), (self.k, keys)):
            strides = tuple(stride * _ITEM_BYTES for stride in view.strides)
            box = (_HALF_ROW, BLOCK, *(1 for _ in dims[2:]))
            made.append(TensorMap(view.address, dtype, dims, strides, box))
        return made[0], made[1]


# A call without tensors: what a kernel is compiled with.
NO_ARGUMENTS = Arguments(
    q=View(0, (0, 0)),
    k=View(0, (0, 0, 0)),
    cu_seqlens_q=View(0, (0,)),
    cu_seqlens_k=View(0, (0,)),
    seqused_k=View(0, (0,)),
    page_table=View(0, (0, 0)),
    scores=View(0, (0, 0)),
    bounds=0,
    batch=1,
    num_queries=1,
    key_rows=1,
    key_outer=1,
    num_heads=1,
    group_size=1,
    num_blocks=1,
    first_token=0,
    num_tokens=1,
    causal=1,
    scale=1.0,
    head_dim=128,
    tensors=(),
)


def arguments_of(
    q_idx: Tensor,
    k_idx: Tensor,
    scores: Tensor,
    selection: Any,
    *,
    causal: bool,
    scale: float,
    first_token: int = 0,
    bounds: Tensor | None = None,
) -> Arguments:
    """Take a validated call apart.

    Parameters
    ----------
    q_idx : Tensor, bfloat16 or float16 [Tq, Hidx, d_idx]
        All query tokens, also where the call is about a chunk of them.
    k_idx : Tensor, q_idx's dtype
        [Tk, Hk, d_idx], or a pool [pages, Hk, 128, d_idx] ("hnd") or [pages, 128, Hk, d_idx]
        ("nhd"). Strides are kept, nothing is copied.
    scores : Tensor, float32 [Hidx, n, chunk]
        The output, of `chunk` query tokens from `first_token`; tokens are adjacent in memory.
    selection : TokenSelection
        Lengths, page table and layout; its `q2k_indices` are not read.
    bounds : Tensor, int32 [2, chunk], contiguous, optional
        For each token of a sequence, the number of blocks up to the last one that it sees, and the
        block of its position.
    """
    pages = selection.page_table
    paged = pages is not None
    if paged:
        row, outer, head = (1, 0, 2) if selection.kv_layout == "nhd" else (2, 0, 1)
    else:
        row, outer, head = 0, -1, 1
    num_blocks = scores.shape[1]
    return Arguments(
        q=View(q_idx.data_ptr(), _strides(q_idx, (0, 1))),
        k=View(k_idx.data_ptr(), _strides(k_idx, (row, outer, head))),
        cu_seqlens_q=_table(selection.cu_seqlens_q, 1),
        cu_seqlens_k=_table(None if paged else selection.cu_seqlens_k, 1),
        seqused_k=_table(selection.seqused_k, 1),
        page_table=_table(pages, 2),
        scores=View(scores.data_ptr(), scores.stride()[:2]),
        bounds=0 if bounds is None else bounds.data_ptr(),
        batch=selection.cu_seqlens_q.shape[0] - 1,
        num_queries=q_idx.shape[0],
        key_rows=k_idx.shape[row],
        key_outer=k_idx.shape[0] if paged else 1,
        num_heads=q_idx.shape[1],
        group_size=q_idx.shape[1] // k_idx.shape[head],
        num_blocks=min(num_blocks, pages.shape[1]) if paged else num_blocks,
        first_token=first_token,
        num_tokens=scores.shape[2],
        causal=int(causal),
        scale=scale,
        head_dim=q_idx.shape[2],
        tensors=(q_idx, k_idx, scores, bounds, selection),
    )


def most_tokens(batch: int, num_heads: int, num_blocks: int) -> int:
    """Return how many query tokens a launch can take, 0 if not even one."""
    return max(0, MAX_ROUNDS // (num_heads * num_blocks) - batch) * QUERIES


def is_aligned(tensor: Tensor) -> bool:
    """Whether TMA can read the tensor: rows are contiguous and start at multiples of 16 bytes."""
    steps = [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    *outer, last = steps or [1]
    return (
        tensor.data_ptr() % 16 == 0
        and last == 1
        and all(step % _ALIGNED == 0 and step < 1 << 39 for step in outer)
    )


def _strides(tensor: Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of some dims; one of size 1, or that is not there, wants a multiple of 16 bytes."""
    return tuple(tensor.stride(d) if d >= 0 and tensor.shape[d] > 1 else _ALIGNED for d in dims)


def _table(tensor: Tensor | None, rank: int) -> View:
    if tensor is None:
        return View(0, (0,) * rank)
    return View(tensor.data_ptr(), tensor.stride())
