"""Several tensors in one allocation, each made when it is first read.

Making a tensor costs the host microseconds, an allocation more. A call with many outputs makes one
allocation, and a record of them that knows where each lies; kernels take addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; what a GPU's allocations have at least

R = TypeVar("R", bound="Record")


class Part(NamedTuple):
    """Where a contiguous tensor lies in an allocation, from byte `offset` to before `end`."""

    offset: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, allocation: Tensor) -> Tensor:
        """Return the tensor; the allocation is int32, of `words` of all its parts."""
        typed = allocation if self.dtype == torch.int32 else allocation.view(self.dtype)
        start = typed.storage_offset() + self.offset // self.dtype.itemsize
        return typed.as_strided(self.shape, self.strides, start)


def lay_out(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], start: int = 0
) -> dict[str, Part]:
    """Place tensors of given shapes and dtypes one after another, from a byte on."""
    parts = {}
    for name, (shape, dtype) in tensors.items():
        offset = -(-start // ALIGNMENT) * ALIGNMENT
        start = offset + prod(shape) * dtype.itemsize
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        parts[name] = Part(offset, start, shape, strides, dtype)
    return parts


def words(parts: Mapping[str, Part]) -> int:
    """int32 words of an allocation of these parts; a whole number of all dtypes."""
    return -(-max((part.end for part in parts.values()), default=0) // 8) * 2


class Record:
    """Base of dataclasses whose tensors may lie in one allocation."""

    @classmethod
    def in_parts(
        cls: type[R], allocation: Tensor, parts: Mapping[str, Part], fields: Mapping[str, Any]
    ) -> R:
        """Make an instance whose tensors are parts of an allocation; `fields` are the others."""
        made = object.__new__(cls)
        made.__dict__.update(fields, _allocation=allocation, _parts=parts)
        return made

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Make a tensor on its first use; Python asks here for what an instance lacks."""
            part = self.__dict__.get("_parts", {}).get(name)
            if part is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            tensor = self.__dict__[name] = part.of(self.__dict__["_allocation"])
            return tensor
