"""The attention entry as a torch.library op, for torch.compile.

The op takes a selection apart, for an op's arguments are tensors and scalars only, and hands it to
the eager path, which checks and dispatches as always. Its fake runs the checks that need no values.
Gradients come from the reference backend, run again in the backward pass. Eager calls do not come
here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_atten.contracts import (
    BlockSelection,
    Options,
    Selection,
    TokenSelection,
    records_grad,
    validate,
)
from sparse_atten.reference import Result, reference_backward, workspace_bytes

# The fields of the selections that an op's arguments carry.
_BLOCK_TABLES = ("q2k_indices", "q2k_counts", "kv_block_sizes", "q_block_sizes")
_BLOCK_NUMBERS = ("block_size", "dense_rows")
_TOKEN_TABLES = (
    "q2k_indices",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table",
    "seqused_k",
    "head_indices",
)
_TOKEN_NUMBERS = ("block_size", "max_seqlen_q", "max_seqlen_k")


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    options: Options,
    *,
    backend: str,
    max_workspace_bytes: int | None,
) -> Result:
    """Call the op from code that is being compiled."""
    names, numbers, layout = (
        (_BLOCK_TABLES, _BLOCK_NUMBERS, "layout")
        if isinstance(selection, BlockSelection)
        else (_TOKEN_TABLES, _TOKEN_NUMBERS, "kv_layout")
    )
    present = [name for name in names if getattr(selection, name) is not None]
    needs_grad = records_grad(q, k, v)
    out, lse, lse_t = attention(
        q,
        k,
        v,
        [getattr(selection, name) for name in present],
        names=" ".join(present),
        numbers=[getattr(selection, name) for name in numbers],
        layout=getattr(selection, layout),
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        lse_temperature=options.lse_temperature,
        return_lse=options.return_lse or needs_grad,  # the backward pass starts from the LSE
        backend=backend,
        max_workspace_bytes=max_workspace_bytes,
        needs_grad=needs_grad,
    )
    return Result(out, lse, lse_t if options.lse_temperature is not None else None)


def _rebuild(
    tables: list[Tensor], *, names: str, numbers: list[int], layout: str, **scalars: Any
) -> tuple[Selection, Options]:
    """Put the selection and the options together again."""
    fields: dict[str, Any] = dict(zip(names.split(), tables, strict=True))
    selection: Selection
    if layout in ("hnd", "nhd"):
        fields |= {"kv_layout": layout, **dict(zip(_TOKEN_NUMBERS, numbers, strict=True))}
        selection = TokenSelection(**{"cu_seqlens_k": None, **fields})
    else:
        fields |= {"layout": layout, **dict(zip(_BLOCK_NUMBERS, numbers, strict=True))}
        selection = BlockSelection(**fields)
    return selection, Options(**scalars)


@torch.library.custom_op("sparse_atten::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    *,
    names: str,
    numbers: list[int],
    layout: str,
    causal: bool,
    softmax_scale: float,
    lse_temperature: float | None,
    return_lse: bool,
    backend: str,
    max_workspace_bytes: int | None,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `sparse_atten_func`; an LSE that was not asked for is an empty tensor."""
    from sparse_atten.attention import run

    selection, options = _rebuild(
        tables,
        names=names,
        numbers=numbers,
        layout=layout,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=return_lse,
    )
    result = run(
        q,
        k,
        v,
        selection,
        options,
        backend=backend,
        max_workspace_bytes=max_workspace_bytes,
        needs_grad=needs_grad,
    )
    nothing = q.new_empty(0, dtype=torch.float32)
    wants_lse = return_lse or lse_temperature is not None
    return (
        result.out,
        result.lse if wants_lse else nothing,
        nothing.clone() if result.lse_t is None else result.lse_t,
    )


@attention.register_fake
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    *,
    layout: str,
    backend: str,
    max_workspace_bytes: int | None,
    needs_grad: bool,
    **scalars: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    selection, options = _rebuild(tables, layout=layout, **scalars)
    validate(q, k, v, selection, options)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = q.shape[:-1]
    if layout == "bshd":
        lse_shape = torch.Size((q.shape[0], q.shape[2], q.shape[1]))
    nothing = torch.Size((0,))
    warm = options.lse_temperature is not None
    wanted = (lse_shape if options.return_lse or warm else nothing, lse_shape if warm else nothing)
    lse, lse_t = (q.new_empty(shape, dtype=torch.float32) for shape in wanted)
    return out, lse, lse_t


@torch.library.custom_op("sparse_atten::attention_backward", mutates_args=())
def attention_backward(
    inputs: list[Tensor],
    result: list[Tensor],
    grads: list[Tensor],
    tables: list[Tensor],
    *,
    names: str,
    numbers: list[int],
    layout: str,
    causal: bool,
    softmax_scale: float,
    lse_temperature: float | None,
    return_lse: bool,
    max_workspace_bytes: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; see `reference_backward`."""
    selection, options = _rebuild(
        tables,
        names=names,
        numbers=numbers,
        layout=layout,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=return_lse,
    )
    q, k, v = inputs
    call = selection, options, workspace_bytes(q, max_workspace_bytes)
    return reference_backward((q, k, v), Result(*result), Result(*grads), call)


@attention_backward.register_fake
def _attention_backward_fake(
    inputs: list[Tensor], *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    q, k, v, tables = inputs
    ctx.save_for_backward(q, k, v, *output, *tables)
    forward_only = ("backend", "needs_grad")
    ctx.scalars = {name: x for name, x in keyword_only_inputs.items() if name not in forward_only}


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    inputs, result, tables = saved[:3], saved[3:6], saved[6:]
    gradients = attention_backward(inputs, result, list(grads), tables, **ctx.scalars)
    return *gradients, [None] * len(tables)


attention.register_autograd(_backward, setup_context=_setup_context)
