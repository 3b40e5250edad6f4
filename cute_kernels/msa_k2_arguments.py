"""One merge of partials as plain numbers: what K2 and its launch plan start from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparse_atten.cute_kernels.common.launch import View

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM = 128
_MAX_ROWS = 2**31 - 1 - 2**24  # a row index of 32 bits, with room for the steps of a grid


@dataclass(frozen=True)
class Arguments:
    """Addresses, strides and sizes of a merge; `tensors` keeps the memory alive."""

    o_partial: View  # [K, Tq, Hq, D]
    lse_partial: View  # float32 [K, Tq, Hq]
    lse_t_partial: View
    counts: View  # int32 [Tq, Hkv]
    out: View  # [Tq, Hq, D]
    lse: View  # float32 [Tq, Hq]
    lse_t: View
    num_rows: int  # Tq * Hq
    num_heads: int
    group_size: int
    width: int  # K
    tensors: tuple = field(repr=False, compare=False)

    @property
    def views(self) -> tuple[View, ...]:
        """The tensors, in the order of the kernel's parameters."""
        partials = (self.o_partial, self.lse_partial, self.lse_t_partial)
        return (*partials, self.counts, self.out, self.lse, self.lse_t)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, in the order of the kernel's parameters."""
        return (self.num_rows, self.num_heads, self.group_size, self.width)

    def kernel_parameters(self) -> tuple[int, ...]:
        """Return the parameters of the kernel, in order."""
        strides = (stride for view in self.views for stride in view.strides)
        return (*(view.address for view in self.views), *strides, *self.sizes)


_RANKS = {
    "o_partial": 3,
    "lse_partial": 3,
    "lse_t_partial": 3,
    "counts": 2,
    "out": 2,
    "lse": 2,
    "lse_t": 2,
}
# A merge without tensors: what a kernel is compiled with.
NO_ARGUMENTS = Arguments(
    **{name: View(0, (0,) * rank) for name, rank in _RANKS.items()},
    num_rows=1,
    num_heads=1,
    group_size=1,
    width=1,
    tensors=(),
)


def arguments_of(
    o_partial: Tensor,
    lse_partial: Tensor,
    split_counts: Tensor,
    out: Tensor,
    *,
    lse: Tensor,
    lse_t_partial: Tensor | None = None,
    lse_t: Tensor | None = None,
) -> Arguments:
    """Take a merge apart. Strides are kept, nothing is copied.

    Parameters
    ----------
    o_partial : Tensor, bfloat16, float16 or float32 [K, Tq, Hq, 128]
        Rows are contiguous and start at multiples of 16 bytes.
    lse_partial : Tensor, float32 [K, Tq, Hq]
    split_counts : Tensor, int32 [Tq, Hkv]
    out : Tensor, bfloat16, float16 or float32 [Tq, Hq, 128]
        Rows as those of `o_partial`.
    lse : Tensor, float32 [Tq, Hq]
    lse_t_partial, lse_t : Tensor, float32 [K, Tq, Hq] and [Tq, Hq], optional
        Both or none.

    Raises
    ------
    ValueError
        A row of `o_partial` or `out` is not contiguous, or not aligned.
    NotImplementedError
        Another head dim than 128, or Tq * Hq beyond 2^31.
    """
    width, num_queries, num_heads, head_dim = o_partial.shape
    if head_dim != HEAD_DIM:
        raise NotImplementedError(f"o_partial must have head dim {HEAD_DIM}, got {head_dim}")
    if num_queries * num_heads > _MAX_ROWS:
        raise NotImplementedError(
            f"Tq * Hq must be at most {_MAX_ROWS}, got {num_queries * num_heads}"
        )
    for name, rows in (("o_partial", o_partial), ("out", out)):
        _expect_rows(name, rows)
    given = {
        "o_partial": o_partial,
        "lse_partial": lse_partial,
        "lse_t_partial": lse_t_partial,
        "counts": split_counts,
        "out": out,
        "lse": lse,
        "lse_t": lse_t,
    }
    views = {
        name: View(0, (0,) * rank)
        if (tensor := given[name]) is None
        else View(tensor.data_ptr(), tensor.stride()[:rank])
        for name, rank in _RANKS.items()
    }
    return Arguments(
        **views,
        num_rows=num_queries * num_heads,
        num_heads=num_heads,
        group_size=num_heads // split_counts.shape[1],
        width=width,
        tensors=tuple(given.values()),
    )


def _expect_rows(name: str, tensor: Tensor) -> None:
    """Check that rows are contiguous and aligned to 16 bytes; dims of size 1 have no stride."""
    unit = 16 // tensor.element_size()
    strides = [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if tensor.numel() and (
        strides[-1] != 1 or any(s % unit for s in strides[:-1]) or tensor.data_ptr() % 16
    ):
        raise ValueError(
            f"{name} must have contiguous rows that start at multiples of 16 bytes, got strides "
            f"{tuple(tensor.stride())} at address {tensor.data_ptr():#x}"
        )
