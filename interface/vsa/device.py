"""The backends "sm90" and "sm100" for a BlockSelection: a kernel for Hopper and one for Blackwell.

A launch is laid out once for tensors of some shapes and strides; later calls give addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparse_atten.contracts import BlockSelection, Options, Problem
from sparse_atten.cute_kernels.common.counters import counter
from sparse_atten.cute_kernels.common.dsl import load_kernel
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.planned import PlannedLaunch
from sparse_atten.cute_kernels.common.steps import Address
from sparse_atten.cute_kernels.common.target import Target, target_of
from sparse_atten.cute_kernels.vsa_arguments import arguments_of
from sparse_atten.dispatch import Report
from sparse_atten.reference import Result
from sparse_atten.rows import rows_of

_KERNELS = {
    9: "sparse_atten.cute_kernels.vsa_sm90",
    10: "sparse_atten.cute_kernels.vsa_sm100",
}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MAX_GRID = 65535  # of dims y and z, which cluster launch control uses for heads and batch
_launches: Memo[Callable[..., None]] = Memo()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    options: Options,
    *,
    out: Tensor | None = None,
    max_workspace_bytes: int | None = None,
    key: Hashable | None = None,
) -> Result:
    """Run the kernel on the current stream of q's device; it needs no workspace."""
    head = 1 if selection.layout == "bhsd" else 2
    batch, num_heads, num_queries = q.shape[0], q.shape[head], q.shape[3 - head]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse_shape = (batch, num_heads, num_queries) if options.return_lse else (0,)
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:  # no descriptor of an empty tensor
        return Result(out.zero_(), lse.fill_(float("-inf")), None)
    tables = (
        selection.q2k_indices,
        selection.q2k_counts,
        selection.kv_block_sizes,
        selection.q_block_sizes,
    )
    tensors = (q, k, v, out, *tables)
    key = key or key_of(*tensors, selection.layout, selection.dense_rows, options)
    launch = _launches.find(key)
    if launch is None:
        launch = _launches.keep(key, _laid_out((q, k, v, out), selection, options))
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    launch(*addresses, lse.data_ptr() if options.return_lse else 0, _queue(q))
    return Result(out, lse, None)


def _laid_out(
    operands: tuple[Tensor, Tensor, Tensor, Tensor], selection: BlockSelection, options: Options
) -> Callable[..., None]:
    """Lay a launch out for tensors of these shapes and strides, wherever they are."""
    q = operands[0]
    config, target = config_of(q, selection, options), device_target(q)
    arguments = arguments_of(*operands, selection, softmax_scale=options.softmax_scale)
    places = [Address(number) for number in range(10)]
    return planned(_kernel(target), config, target, q.device, arguments.at(places))


def planned(
    module: str, config: Any, target: Target, device: torch.device, arguments: Any
) -> Callable[..., None]:
    """Load a kernel and lay out its launch."""
    plan: LaunchPlan = import_module(module).launch_plan(config, target, arguments)
    return PlannedLaunch(load_kernel(module, config, target, device), plan)


def _queue(q: Tensor) -> int:
    """Return the counter that a kernel draws work items from."""
    return counter(q.device) if q.is_cuda else 0


def _kernel(target: Target) -> str:
    return _KERNELS[target.capability[0]]


def preload(q: Tensor, selection: BlockSelection, options: Options) -> None:
    """Compile or load what `attention` would need, and launch nothing."""
    target = device_target(q)
    load_kernel(_kernel(target), config_of(q, selection, options), target, q.device)
    _queue(q)


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
    target = problem.target or Target()
    kernel = import_module(_kernel(target))
    blocks = kernel.Q_BLOCKS
    num_q_blocks = -(-problem.num_queries // problem.block_size)
    num_heads = problem.batch * problem.num_q_heads
    rounds = torch.zeros(num_heads * num_q_blocks, dtype=torch.long)
    rows = rows_of(q, k, v, selection)
    for lists in rows.lists():
        rounds[lists.rows.cpu()] = lists.live.sum(1).cpu()
    last = (0, -num_q_blocks % blocks)
    items = torch.nn.functional.pad(rounds.view(num_heads, num_q_blocks), last)
    items = items.view(-1, blocks).sum(1)
    lines = {
        "work items": f"{items.numel():,} of {blocks} Q block{'s' * (blocks > 1)}, "
        f"{items.numel() / target.num_sms:.2f} waves of {target.num_sms} SMs",
        "rounds per item": f"{float(items.float().mean()):.1f} mean, {int(items.max())} most"
        if items.numel()
        else "none",
        "shared memory": f"{kernel.SCHEDULE.smem_bytes:,} bytes of a CTA",
        "registers": ", ".join(f"{role.registers} {role.name}" for role in kernel.SCHEDULE.roles),
    }
    return Report(lines)


def config_of(q: Tensor, selection: BlockSelection, options: Options) -> Any:
    """Choose the kernel's Config for a validated call."""
    kernel = import_module(_kernel(device_target(q)))
    fields: dict[str, Any] = {
        "dtype": DTYPES[q.dtype],
        "return_lse": options.return_lse,
        "kv_sizes": selection.kv_block_sizes is not None,
        "q_sizes": selection.q_block_sizes is not None,
    }
    head = 1 if selection.layout == "bhsd" else 2
    if max(q.shape[0], q.shape[head]) > _MAX_GRID:
        fields |= kernel.WIDE
    return kernel.Config(**fields)


def device_target(x: Tensor) -> Target:
    """Target of a tensor's device."""
    target = target_of(x.device)
    if target is None:
        raise RuntimeError(f"the kernels need a CUDA device, got {x.device}")
    return target
