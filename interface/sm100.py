"""The backend "sm100": validated calls with a BlockSelection on the kernel for Blackwell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_atten.contracts import BlockSelection, Options, Problem
from sparse_atten.cute_kernels.common.dsl import load_kernel
from sparse_atten.cute_kernels.common.target import Target, target_of
from sparse_atten.dispatch import Report
from sparse_atten.reference import Result
from sparse_atten.rows import rows_of

_KERNEL = "sparse_atten.cute_kernels.vsa_sm100"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MAX_GRID = 65535  # of dims y and z, which cluster launch control uses for heads and batch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    options: Options,
    *,
    out: Tensor | None = None,
    max_workspace_bytes: int | None = None,
) -> Result:
    """Run the kernel on the current stream of q's device; it needs no workspace."""
    from sparse_atten.cute_kernels import vsa_sm100
    from sparse_atten.cute_kernels.vsa_arguments import arguments_of

    head = 1 if selection.layout == "bhsd" else 2
    batch, num_heads, num_queries = q.shape[0], q.shape[head], q.shape[3 - head]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse_shape = (batch, num_heads, num_queries) if options.return_lse else (0,)
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:  # no descriptor of an empty tensor
        return Result(out.zero_(), lse.fill_(float("-inf")), None)
    config, target = config_of(q, selection, options), device_target(q)
    arguments = arguments_of(
        q,
        k,
        v,
        out,
        selection,
        softmax_scale=options.softmax_scale,
        lse=lse if options.return_lse else None,
    )
    kernel = load_kernel(_KERNEL, config, target)
    launch(kernel, vsa_sm100, config, target, arguments)
    return Result(out, lse, None)


def launch(kernel: Any, module: Any, config: Any, target: Target, arguments: Any) -> None:
    """Launch on the current stream of the device that holds the output."""
    device = arguments.tensors[0].device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        module.launch(kernel, config, target, arguments, stream=stream)


def preload(q: Tensor, selection: BlockSelection, options: Options) -> None:
    """Compile or load what `attention` would need, and launch nothing."""
    load_kernel(_KERNEL, config_of(q, selection, options), device_target(q))


def report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    problem: Problem,
    *,
    max_workspace_bytes: int | None = None,
) -> Report:
    """Say how the kernel would spread the call: work items, waves, rounds, resources."""
    from sparse_atten.cute_kernels.vsa_sm100 import SCHEDULE

    num_q_blocks = -(-problem.num_queries // problem.block_size)
    num_heads = problem.batch * problem.num_q_heads
    rounds = torch.zeros(num_heads * num_q_blocks, dtype=torch.long)
    rows = rows_of(q, k, v, selection)
    for lists in rows.lists():
        rounds[lists.rows.cpu()] = lists.live.sum(1).cpu()
    padded = torch.nn.functional.pad(rounds.view(num_heads, num_q_blocks), (0, num_q_blocks % 2))
    pairs = padded.view(-1, 2).sum(1)
    target = problem.target or Target()
    lines = {
        "work items": f"{pairs.numel():,} pairs of Q blocks, "
        f"{pairs.numel() / target.num_sms:.2f} waves of {target.num_sms} SMs",
        "rounds per pair": f"{float(pairs.float().mean()):.1f} mean, {int(pairs.max())} most"
        if pairs.numel()
        else "none",
        "shared memory": f"{SCHEDULE.smem_bytes:,} bytes of a CTA",
        "registers": ", ".join(f"{role.registers} {role.name}" for role in SCHEDULE.roles),
    }
    return Report(lines)


def config_of(q: Tensor, selection: BlockSelection, options: Options) -> Any:
    """Choose the kernel's Config for a validated call."""
    from sparse_atten.cute_kernels.vsa_sm100 import Config

    head = 1 if selection.layout == "bhsd" else 2
    fits = q.shape[0] <= _MAX_GRID and q.shape[head] <= _MAX_GRID
    return Config(
        dtype=DTYPES[q.dtype],
        return_lse=options.return_lse,
        kv_sizes=selection.kv_block_sizes is not None,
        q_sizes=selection.q_block_sizes is not None,
        persistent="clc" if fits else "static",
    )


def device_target(q: Tensor) -> Target:
    """Target of q's device."""
    target = target_of(q.device)
    if target is None:
        raise RuntimeError(f"the backend 'sm100' needs a CUDA device, got {q.device}")
    return target
