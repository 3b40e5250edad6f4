"""Block top-k: one function; kernels on NVIDIA GPUs, the torch reference elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from sparse_atten.cute_kernels.common.nvrtc import Kernel, runs_kernels
from sparse_atten.topk.plan import (
    CONFIGS,
    MAX_BLOCKS,
    SIGNATURES,
    Config,
    Launch,
    make_plan,
    program,
)
from sparse_atten.topk.reference import Request, check_request, largest_blocks


def block_topk(
    scores: Tensor,
    k: int | None = None,
    *,
    dim: int = -1,
    valid_counts: Tensor | None = None,
    local_blocks: Tensor | None = None,
    first_blocks: int = 0,
    last_blocks: int = 0,
    regions: Sequence[tuple[int, int, int]] | None = None,
    keep_spans: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor]:
    """Choose the blocks with the largest scores in each row.

    A row is what remains of `scores` when `dim`, the axis of its n blocks, is taken out. Exactly
    one of `k` and `regions` is given: the k best blocks of the whole row, or the best of each
    region.

    Parameters
    ----------
    scores : Tensor, float32, at least one dim, any strides
        Scores of the blocks. Equal scores go to the lowest id, and -0.0 equals +0.0. +inf is the
        largest score. NaN and -inf are never chosen, unless the block is forced. No gradient
        flows through the choice.
    k : int, 1 to 512, optional
        Blocks to choose in each row. More than n is allowed.
    dim : int
        The axis of the blocks. Block-max scores [H, n, Tq] need ``dim=1`` and no transposed copy.
    valid_counts : Tensor, int32, broadcastable to the rows, optional
        Only blocks with an id below the row's count are candidates (the causal bound), whether
        scored, forced or in a kept span. Clamped to [0, n]; None means n.
    local_blocks : Tensor, int32, broadcastable to the rows, optional
        One more block to force in each row. A negative id, or one at or past the valid count,
        forces nothing.
    first_blocks, last_blocks : int
        Force so many blocks at the start and at the end of each row's valid range.
    regions : sequence of (start, stop, budget), optional
        Choose up to `budget` (1 to 512) blocks among the ids of each half-open span, on its own.
    keep_spans : sequence of (start, stop)
        With `regions`: half-open spans of ids that are all chosen, whatever their scores.

    Returns
    -------
    indices : Tensor, int32 [*rows, width]
        Ids of the chosen blocks, ascending, then -1. The width is k, or the sum of the budgets
        and of the lengths of the kept spans.
    counts : Tensor, int32 [*rows]
        How many were chosen. 0 where there is no candidate.

    Raises
    ------
    TypeError
        An argument has the wrong class or dtype.
    ValueError
        Not exactly one of `k` and `regions`; a number out of its range; a shape that does not
        broadcast; a region or span outside [0, n) or overlapping another.
    NotImplementedError
        `regions` together with forced first, last or local blocks.

    Notes
    -----
    Forced blocks are chosen whatever their scores, count towards k and never appear twice. Where
    more are forced than k, the first and last blocks go by ascending id, the local one last.
    Nothing is read on the host.

    CUDA tensors on a GPU of compute capability 9.0 or newer take the kernels of topk.cu, whose
    results equal the reference's bit for bit: no copy of the scores and no workspace, but 8 * k
    bytes for each part of a row, 264 parts at most, where few rows have more than 8192 blocks.
    They can be captured in a CUDA graph after `preload` or a first call. Others take the torch
    reference, with the workspace of a sort.

    Sources: MSA (arXiv 2606.13392) for forced local blocks, VSA (arXiv 2505.13389) for regions.
    """
    request = check_request(
        scores,
        k,
        dim=dim,
        valid_counts=valid_counts,
        local_blocks=local_blocks,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
        regions=regions,
        keep_spans=keep_spans,
    )
    choose = _launch_kernels if _has_kernels(scores, request) else largest_blocks
    return choose(
        scores,
        request,
        valid_counts=valid_counts,
        local_blocks=local_blocks,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
    )


def preload(device: torch.device | str | int) -> None:
    """Compile and load every kernel of `block_topk` for a CUDA device.

    A CUDA graph capture needs it, or one call like the captured one before. Compiling takes some
    seconds, once a machine: the disk cache keeps the results.
    """
    for config in CONFIGS:
        program(config).preload(device)


def _has_kernels(scores: Tensor, request: Request) -> bool:
    return runs_kernels(scores) and scores.shape[request.dim] <= MAX_BLOCKS


def _launch_kernels(
    scores: Tensor,
    request: Request,
    *,
    valid_counts: Tensor | None,
    local_blocks: Tensor | None,
    first_blocks: int,
    last_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Run the kernels on checked arguments."""
    device = scores.device
    shape = tuple(scores.shape)
    rows = shape[: request.dim] + shape[request.dim + 1 :]
    indices = torch.empty((*rows, request.width), dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    if counts.numel() == 0:
        return indices, counts
    plan = make_plan(
        request,
        shape,
        scores.stride(),
        valid=_layout(valid_counts),
        local=_layout(local_blocks),
        first_blocks=first_blocks,
        last_blocks=last_blocks,
    )
    workspace = None
    if plan.workspace_bytes:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    tensors = (scores, valid_counts, local_blocks, indices, counts, workspace)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    for launch in plan.launches:
        kernel = _kernel(launch.config, launch.kernel, device)
        values = kernel_arguments(launch, pointers, request.width)
        kernel(launch.grid, launch.block, *values, shared_bytes=launch.shared_bytes)
    return indices, counts


def kernel_arguments(
    launch: Launch, pointers: Sequence[int], width: int
) -> tuple[int | bytes, ...]:
    """Parameters of a launch, in order.

    Parameters
    ----------
    launch : Launch
        From `make_plan`.
    pointers : sequence of int
        Addresses of scores, valid counts, local blocks, indices, counts and workspace; 0 = none.
    width : int
        Slots of a row.
    """
    scores, valid, local, indices, counts, workspace = pointers
    if any(launch.offsets):
        by_score, by_valid, by_local, by_row = launch.offsets
        scores += 4 * by_score
        valid += 4 * by_valid
        local += 4 * by_local
        indices += 4 * by_row * width
        counts += 4 * by_row
    if launch.kernel == "block_topk_parts":
        return scores, valid, local, workspace, launch.plan, *launch.scalars
    if launch.kernel == "block_topk_merge":
        return workspace, indices, counts, launch.plan, *launch.scalars
    return scores, valid, local, indices, counts, launch.plan, *launch.scalars


def _layout(tensor: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.stride())


@cache
def _kernel(config: Config, name: str, device: torch.device) -> Kernel:
    most_shared = config.shared_bytes()
    return program(config).kernel(name, SIGNATURES[name], device, shared_bytes=most_shared)
