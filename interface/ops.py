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


def call(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, options: Options, *, backend: str
) -> Result:
    """Call the op from code that is being compiled."""
    if isinstance(selection, BlockSelection):
        tables = [
            selection.q2k_indices,
            selection.q2k_counts,
            selection.kv_block_sizes,
            selection.q_block_sizes,
        ]
        numbers = [selection.block_size, selection.dense_rows]
        layout: str = selection.layout
    else:
        tables = [
            selection.q2k_indices,
            selection.cu_seqlens_q,
            selection.cu_seqlens_k,
            selection.page_table,
            selection.seqused_k,
            selection.head_indices,
        ]
        numbers = [selection.block_size, selection.max_seqlen_q, selection.max_seqlen_k]
        layout = selection.kv_layout
    needs_grad = records_grad(q, k, v)
    out, lse, lse_t = attention(
        q,
        k,
        v,
        tables,
        numbers=numbers,
        layout=layout,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        lse_temperature=options.lse_temperature,
        return_lse=options.return_lse or needs_grad,  # the backward pass starts from the LSE
        backend=backend,
        needs_grad=needs_grad,
    )
    return Result(out, lse, lse_t if options.lse_temperature is not None else None)


def _rebuild(
    tables: list[Tensor | None], numbers: list[int], layout: str, **scalars: Any
) -> tuple[Selection, Options]:
    """Put the selection and the options together again."""
    fields: Any = tables  # which of them may be None is the selection's affair
    selection: Selection
    if layout in ("hnd", "nhd"):
        indices, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, head_indices = fields
        block_size, max_seqlen_q, max_seqlen_k = numbers
        selection = TokenSelection(
            indices,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            block_size=block_size,
            page_table=page_table,
            seqused_k=seqused_k,
            kv_layout="hnd" if layout == "hnd" else "nhd",
            head_indices=head_indices,
        )
    else:
        indices, counts, kv_block_sizes, q_block_sizes = fields
        block_size, dense_rows = numbers
        selection = BlockSelection(
            indices,
            counts,
            layout="bhsd" if layout == "bhsd" else "bshd",
            block_size=block_size,
            kv_block_sizes=kv_block_sizes,
            q_block_sizes=q_block_sizes,
            dense_rows=dense_rows,
        )
    return selection, Options(**scalars)


@torch.library.custom_op("sparse_atten::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor | None],
    *,
    numbers: list[int],
    layout: str,
    causal: bool,
    softmax_scale: float,
    lse_temperature: float | None,
    return_lse: bool,
    backend: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `sparse_atten_func`; an LSE that was not asked for is an empty tensor."""
    from sparse_atten.attention import run

    selection, options = _rebuild(
        tables,
        numbers,
        layout,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=return_lse,
    )
    result = run(q, k, v, selection, options, backend=backend, needs_grad=needs_grad)
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
    tables: list[Tensor | None],
    *,
    numbers: list[int],
    layout: str,
    backend: str,
    needs_grad: bool,
    **scalars: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    selection, options = _rebuild(tables, numbers, layout, **scalars)
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
    tables: list[Tensor | None],
    *,
    numbers: list[int],
    layout: str,
    causal: bool,
    softmax_scale: float,
    lse_temperature: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; see `reference_backward`."""
    selection, options = _rebuild(
        tables,
        numbers,
        layout,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=return_lse,
    )
    q, k, v = inputs
    call = selection, options, workspace_bytes(q, None)
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


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    saved = list(ctx.saved_tensors)
    inputs, result, tables = saved[:3], saved[3:6], saved[6:]
    return *attention_backward(inputs, result, list(grads), tables, **ctx.scalars), None


attention.register_autograd(_backward, setup_context=_setup_context)
