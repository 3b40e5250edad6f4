"""What a call needs but its addresses, remembered by all that its checks read.

A call whose shapes, strides, dtypes, devices and numbers are those of an earlier call that passed
its checks passes them too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from torch import Tensor

_MOST = 1024  # entries
T = TypeVar("T")


class Memo(dict[Hashable, T]):
    """Values by key; forgets all of them when it is full."""

    def find(self, key: Hashable) -> T | None:
        """Return what was kept; None where nothing was, or where a part of the key has no hash."""
        try:
            return self.get(key)
        except TypeError:
            return None

    def keep(self, key: Hashable, value: T) -> T:
        """Remember a value, and return it."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = value
        return value


def key_of(*arguments: object) -> Hashable:
    """All that checks read of arguments: layouts of tensors; of other values, their types too.

    True, 1 and 1.0 are equal, yet checks tell them apart.
    """
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (x, type(x))
            for x in arguments
        ]
    )
