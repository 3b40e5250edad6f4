"""The backends "sm90" and "sm100" for a TokenSelection: K1 and K2 for each chunk of queries.

K1 leaves a partial result for each query and each of its KV blocks in a workspace, which K2 merges
at once; K2 is a programmatic dependent of K1. Chunks follow one another in the same workspace.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparse_atten.contracts import Options, TokenSelection
from sparse_atten.cute_kernels import msa_arguments, msa_k2_arguments
from sparse_atten.cute_kernels.common.dsl import load_kernel
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels
from sparse_atten.cute_kernels.common.planned import PlannedLaunch
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.msa_arguments import Partials
from sparse_atten.preparation import (
    PreparedSelection,
    QueryChunk,
    partial_bytes,
    prepare,
    selection_of,
)
from sparse_atten.reference import Result
from sparse_atten.scheduler.device import preload as preload_preparation
from sparse_atten.vsa.device import DTYPES, device_target

_K1 = {
    9: "sparse_atten.cute_kernels.msa_k1_sm90",
    10: "sparse_atten.cute_kernels.msa_k1_sm100",
}
_K2 = "sparse_atten.cute_kernels.msa_k2"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: TokenSelection | PreparedSelection,
    options: Options,
    *,
    out: Tensor | None = None,
    max_workspace_bytes: int | None = None,
) -> Result:
    """Run the kernels on the current stream of q's device.

    Raises
    ------
    ValueError
        `selection` was prepared for tensors of other shapes, or its chunks pass
        `max_workspace_bytes`.
    """
    num_queries, num_heads, _ = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((num_queries, num_heads), dtype=torch.float32)
    lse_t = None if options.lse_temperature is None else torch.empty_like(lse)
    result = Result(out, lse, lse_t)
    if q.numel() == 0 or k.numel() == 0 or selection_of(selection).q2k_indices.shape[2] == 0:
        for x in (lse, lse_t):  # no descriptor of an empty tensor
            if x is not None:
                x.fill_(float("-inf"))
        return result._replace(out=out.zero_())
    prepared = _prepared(q, k, selection, max_workspace_bytes)
    workspace = _workspace(q, prepared, options)
    for chunk in prepared.chunks:
        partials = _partials(workspace, q, chunk)
        attend_blocks((q, k, v), prepared, chunk, options, partials)
        merge(partials, chunk, result)
    return result


def attend_blocks(
    inputs: tuple[Tensor, Tensor, Tensor],
    prepared: PreparedSelection,
    chunk: QueryChunk,
    options: Options,
    partials: Partials,
) -> None:
    """Launch K1: the partial results of a chunk."""
    arguments = msa_arguments.arguments_of(
        *inputs,
        partials,
        prepared.selection,
        csr=chunk.csr,
        schedule=chunk.schedule,
        softmax_scale=options.softmax_scale,
        lse_temperature=options.lse_temperature,
        first_token=chunk.first_token,
    )
    config = _k1_config(inputs[0], prepared.selection, options)
    if arguments.capacity:
        launch(_k1(device_target(inputs[0])), config, inputs[0], arguments)


def merge(partials: Partials, chunk: QueryChunk, result: Result) -> None:
    """Launch K2: merge the partial results of a chunk into its part of the result."""
    out, lse = result.out[chunk.tokens], result.lse[chunk.tokens]
    lse_t = None if result.lse_t is None else result.lse_t[chunk.tokens]
    arguments = msa_k2_arguments.arguments_of(
        partials.o,
        partials.lse,
        chunk.schedule.split_counts,
        out,
        lse=lse,
        lse_t_partial=partials.lse_t,
        lse_t=lse_t,
    )
    config = _k2_config(out, partials.o.shape[0], temperature=lse_t is not None)
    launch(_K2, config, out, arguments)


def launch(module: str, config: Any, x: Tensor, arguments: Any) -> None:
    """Launch a kernel on the current stream of x's device."""
    target = device_target(x)
    plan = import_module(module).launch_plan(config, target, arguments)
    PlannedLaunch(load_kernel(module, config, target, x.device), plan)()


def preload(q: Tensor, selection: TokenSelection, options: Options) -> None:
    """Compile or load what `attention` would need, and launch nothing."""
    target = device_target(q)
    width = selection.q2k_indices.shape[2]
    load_kernel(_k1(target), _k1_config(q, selection, options), target, q.device)
    config = _k2_config(q, width, temperature=options.lse_temperature is not None)
    load_kernel(_K2, config, target, q.device)
    if runs_kernels(q):
        preload_preparation(q.device)


def _k1(target: Target) -> str:
    return _K1[target.capability[0]]


def _k1_config(q: Tensor, selection: TokenSelection, options: Options) -> Any:
    return import_module(_k1(device_target(q))).Config(
        dtype=DTYPES[q.dtype],
        group_size=q.shape[1] // selection.q2k_indices.shape[0],
        causal=options.causal,
        paged=selection.page_table is not None,
        temperature=options.lse_temperature is not None,
    )


def _k2_config(out: Tensor, width: int, *, temperature: bool) -> Any:
    from sparse_atten.cute_kernels.msa_k2 import config_for

    dtype = DTYPES[out.dtype]
    return config_for(width, partial=dtype, out=dtype, temperature=temperature, programmatic=True)


def _prepared(
    q: Tensor,
    k: Tensor,
    selection: TokenSelection | PreparedSelection,
    max_workspace_bytes: int | None,
) -> PreparedSelection:
    """Prepare the selection, or check that it was prepared for this call."""
    if not isinstance(selection, PreparedSelection):
        return prepare(
            selection,
            q,
            k,
            num_sms=device_target(q).num_sms,
            max_workspace_bytes=max_workspace_bytes,
        )
    flat = selection.selection.page_table is None
    num_keys = k.shape[0] * (1 if flat else selection.selection.block_size)
    wanted, got = (selection.num_q_heads, selection.num_keys), (q.shape[1], num_keys)
    if got != wanted:
        raise ValueError(
            f"selection was prepared for {wanted[0]} query heads and {wanted[1]} keys, "
            f"got tensors of {got[0]} and {got[1]}"
        )
    largest = max(chunk.num_tokens for chunk in selection.chunks)
    needed = largest * partial_bytes(q, selection.selection.q2k_indices.shape[2])
    if max_workspace_bytes is not None and largest > 1 and needed > max_workspace_bytes:
        raise ValueError(
            f"max_workspace_bytes must be at least the {needed} that selection was prepared for, "
            f"got {max_workspace_bytes}: give it to prepare()"
        )
    return selection


def _workspace(q: Tensor, prepared: PreparedSelection, options: Options) -> Partials:
    """Flat memory for the partial results of the largest chunk."""
    largest = max(chunk.num_tokens for chunk in prepared.chunks)
    rows = prepared.selection.q2k_indices.shape[2] * largest * q.shape[1]
    lse = q.new_empty(rows, dtype=torch.float32)
    lse_t = None if options.lse_temperature is None else torch.empty_like(lse)
    return Partials(q.new_empty(rows * q.shape[2]), lse, lse_t)


def _partials(workspace: Partials, q: Tensor, chunk: QueryChunk) -> Partials:
    """See the workspace as the partial results of a chunk."""
    shape = (chunk.csr.table_width, chunk.num_tokens, q.shape[1])
    rows = shape[0] * shape[1] * shape[2]
    lse, lse_t = (
        None if x is None else x[:rows].view(shape) for x in (workspace.lse, workspace.lse_t)
    )
    assert lse is not None
    return Partials(workspace.o[: rows * q.shape[2]].view(*shape, q.shape[2]), lse, lse_t)
