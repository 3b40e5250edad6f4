"""`sparse_atten_func`: the one attention entry, whatever the selection and the backend."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from sparse_atten import ops
from sparse_atten.checks import check_values
from sparse_atten.contracts import (
    ALIGNMENT,
    BlockSelection,
    Options,
    Problem,
    Selection,
    expect_aligned,
    options_of,
    validate,
    validate_out,
)
from sparse_atten.cute_kernels.common.arguments import expect_int
from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels
from sparse_atten.dispatch import AUTO, Backend, choose, load
from sparse_atten.preparation import PreparedSelection, selection_of
from sparse_atten.reference import Result

# The backend of each call that passed its checks, by what they read.
_passed: Memo[Backend] = Memo()


@overload
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | PreparedSelection,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[False] = ...,
    lse_temperature: None = ...,
    out: Tensor | None = ...,
    backend: str = ...,
    max_workspace_bytes: int | None = ...,
) -> Tensor: ...
@overload
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | PreparedSelection,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: Literal[True],
    lse_temperature: None = ...,
    out: Tensor | None = ...,
    backend: str = ...,
    max_workspace_bytes: int | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | PreparedSelection,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_lse: bool = ...,
    lse_temperature: float | None = ...,
    out: Tensor | None = ...,
    backend: str = ...,
    max_workspace_bytes: int | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | PreparedSelection,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    lse_temperature: float | None = None,
    out: Tensor | None = None,
    backend: str = AUTO,
    max_workspace_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Attention over selected KV blocks: ``softmax(softmax_scale * q k^T) v`` on what is kept.

    Parameters
    ----------
    q, k, v : Tensor, bfloat16, float16, float32 or float64
        With a `BlockSelection`: q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D], or [B, S, H, D] for
        layout "bshd". With a `TokenSelection`: q [Tq, Hq, D], k and v [Tk, Hkv, D] or paged pools.
        Hkv divides Hq. Strides are honoured and nothing is copied: the last dim is contiguous,
        base addresses and other strides are multiples of 16 bytes (where a row of D elements is).
        v may have a head dim of its own.
    selection : BlockSelection, TokenSelection or PreparedSelection
        Which keys each query sees.
    causal : bool
        Also hide the keys after the query. Positions count valid tokens, and the last query is
        aligned with the last key (bottom-right).
    softmax_scale : float, optional
        Finite and positive; None is 1 / sqrt(D).
    return_lse : bool
        Also return the log-sum-exp of the scaled scores: float32, natural logarithm, [B, Hq, Sq]
        for both layouts of a `BlockSelection`, [Tq, Hq] for a `TokenSelection`.
    lse_temperature : float, optional
        Return (out, lse, lse_t) with ``lse_t = log sum exp(lse_temperature * softmax_scale * s)``.
    out : Tensor, optional
        Where to write the output; q's shape with v's head dim, q's dtype; overlaps no input.
    backend : str
        "auto" takes the first backend that is capable of the call (`explain` says which and why);
        a named one never falls back.
    max_workspace_bytes : int, optional
        Bound on temporary memory, in bytes, as far as one row of the selection allows; None leaves
        it to the backend (reference: 32 MiB on a CPU, 1 GiB on a device; sm100 with a
        `TokenSelection`: 4 GiB of partial results). What is prepared already has its bound.

    Returns
    -------
    Tensor, or a tuple of Tensors
        The output in q's layout and dtype, with the LSEs that were asked for. A query that sees no
        key, or is padding, gets output 0 and LSE -inf.

    Raises
    ------
    TypeError, ValueError
        An argument breaks the contract; the message names it, what was expected and what came. The
        integers inside CPU selections are checked as by `check_selection`.
    NotImplementedError
        No backend, or not the one asked for, can run this legal call.

    Notes
    -----
    Integers in device tensors are not read on the host: ids, counts, sizes, lengths and pages
    outside their range are clamped or ignored, never followed. Nothing synchronises. A compiled
    graph (torch.compile) takes the selection out of a `PreparedSelection` and prepares it again.
    """
    options = options_of(
        q,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=return_lse,
    )
    if torch.compiler.is_compiling():
        result = ops.call(
            q,
            k,
            v,
            selection_of(selection),
            options,
            backend=backend,
            max_workspace_bytes=max_workspace_bytes,
        )
        if out is not None:
            result = result._replace(out=out.copy_(result.out))
    else:
        result = run(
            q,
            k,
            v,
            selection,
            options,
            out=out,
            backend=backend,
            max_workspace_bytes=max_workspace_bytes,
        )
    if result.lse_t is not None:
        return result.out, result.lse, result.lse_t
    return (result.out, result.lse) if return_lse else result.out


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | PreparedSelection,
    options: Options,
    *,
    out: Tensor | None = None,
    backend: str = AUTO,
    max_workspace_bytes: int | None = None,
    needs_grad: bool = False,
) -> Result:
    """Check one call in full, choose its backend and run it.

    `needs_grad` says that gradients are recorded above this call, where the tensors cannot tell.
    """
    key = _key((q, k, v), selection, out, (options, backend, max_workspace_bytes, needs_grad))
    chosen = None if key is None else _passed.find(key)
    if chosen is not None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            expect_aligned(q=q, k=k, v=v)
    else:
        problem = check(q, k, v, selection_of(selection), options)
        if needs_grad:
            problem = replace(problem, needs_grad=True)
        if out is not None:
            validate_out(out, output_shape(q, v), q, problem.needs_grad)
        if max_workspace_bytes is not None:
            expect_int("max_workspace_bytes", max_workspace_bytes, 1)
        chosen = choose(problem, backend).backend
        if key is not None:
            _passed.keep(key, chosen)
    if out is not None:
        expect_aligned(out=out)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if out.numel() and out.data_ptr() == x.data_ptr():
                raise ValueError(f"out must not overlap an input, got the memory of {name}")
    given = selection if chosen.takes_prepared else selection_of(selection)
    attend = chosen.load()
    known = {"key": key} if chosen.takes_key else {}
    return attend(
        q, k, v, given, options, out=out, max_workspace_bytes=max_workspace_bytes, **known
    )


def _key(
    inputs: tuple[Tensor, ...], selection: object, out: Tensor | None, rest: tuple
) -> Hashable | None:
    """All that the checks of a call on a GPU read but addresses; None where they always run."""
    given = inputs if out is None else (*inputs, out)
    if type(selection) is not BlockSelection or not all(map(runs_kernels, given)):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return None
    return key_of(*inputs, out, *vars(selection).values(), *rest)


def check(q: Tensor, k: Tensor, v: Tensor, selection: Selection, options: Options) -> Problem:
    """Run the checks of every call; those of values only where they cost no synchronisation."""
    problem = validate(q, k, v, selection, options)
    expect_aligned(q=q, k=k, v=v)
    if problem.device.type == "cpu":
        check_values(selection, problem)
    return problem


def check_selection(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | PreparedSelection
) -> None:
    """Check the integers of a selection, on any device.

    Parameters
    ----------
    q, k, v, selection
        As for `sparse_atten_func`.

    Raises
    ------
    TypeError, ValueError
        The contract of shapes and dtypes is broken, or a value is: the message names the first bad
        entry. Checked are counts, ids (range, duplicates), block sizes, cumulative lengths and
        their bounds, used lengths, page ids, and that the heads of a GQA group agree.

    Notes
    -----
    Synchronises with the device. `sparse_atten_func` runs the same checks by itself on CPU tensors.
    """
    selection = selection_of(selection)
    check_values(selection, validate(q, k, v, selection, Options()))


def preload(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | PreparedSelection,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    lse_temperature: float | None = None,
    backend: str = AUTO,
) -> str:
    """Compile or load what a call with the same arguments needs, without running it.

    A kernel's first use compiles it, which takes seconds, or loads it from the disk cache. That
    cannot happen while a CUDA graph is captured: preload before. Kernels depend on dtypes and
    options, not on shapes, so that tensors of any size serve.

    Parameters
    ----------
    q, k, v, selection, causal, softmax_scale, return_lse, lse_temperature, backend
        As for `sparse_atten_func`.

    Returns
    -------
    str
        The backend that is ready; "reference" needs no preparation.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `sparse_atten_func`.
    """
    selection = selection_of(selection)
    options = options_of(
        q,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=return_lse,
    )
    chosen = choose(check(q, k, v, selection, options), backend).backend
    if chosen.preload is not None:
        load(chosen.preload)(q, selection, options)
    return chosen.name


def output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Shape of the output: q's, with v's head dim."""
    return (*q.shape[:-1], v.shape[-1])
