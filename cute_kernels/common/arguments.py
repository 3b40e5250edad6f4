"""Checks of arguments that every layer makes, with one form of message: name, expected, got."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def describe(value: object) -> str:
    """Name what was passed, for an error message."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def expect_bool(name: str, value: object) -> None:
    """Check a flag."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {describe(value)}")


def expect_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Check a host int; torch.SymInt is what a compiled graph with dynamic shapes passes."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name} must be {wanted}, got {value}")


def expect_positive(name: str, value: object) -> None:
    """Check a finite float > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a finite float > 0, got {describe(value)}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite float > 0, got {value!r}")


def expect_table(
    name: str,
    table: object,
    dims: tuple[str, ...],
    *,
    shape: tuple[int | None, ...] | None = None,
    like: tuple[str, Tensor] | None = None,
) -> None:
    """Check an int32 tensor.

    Parameters
    ----------
    dims : tuple of str
        Names of its dims.
    shape : tuple of int or None, optional
        Their sizes; None leaves one of them, or all, free.
    like : (str, Tensor), optional
        Name and tensor whose device it must share.
    """
    is_table = isinstance(table, Tensor) and table.dtype == torch.int32
    if isinstance(table, Tensor) and is_table and _fits(table, dims, shape):
        if like is not None and table.device != like[1].device:
            raise ValueError(
                f"{name} must be on {like[0]}'s device {like[1].device}, got {describe(table)}"
            )
        return
    wanted = f"int32 [{', '.join(dims)}]"
    if shape is not None:
        sizes = (dim if size is None else str(size) for dim, size in zip(dims, shape, strict=True))
        wanted += f" = [{', '.join(sizes)}]"
    error = ValueError if is_table else TypeError
    raise error(f"{name} must be {wanted}, got {describe(table)}")


def _fits(table: Tensor, dims: tuple[str, ...], shape: tuple[int | None, ...] | None) -> bool:
    if table.dim() != len(dims):
        return False
    return shape is None or all(
        want in (None, got) for want, got in zip(shape, table.shape, strict=True)
    )
