"""Block top-k: one function; kernels on NVIDIA GPUs, the torch reference elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import Kernel, runs_kernels
from sparse_atten.cute_kernels.common.steps import Address, Launches, Step
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

# What the addresses of a step count from.
_SCORES, _VALID, _LOCAL, _INDICES, _COUNTS, _WORKSPACE = range(6)


class _Call(NamedTuple):
    """What kernels need for a call but its addresses."""

    indices_shape: tuple[int, ...]
    counts_shape: tuple[int, ...]
    workspace_bytes: int
    run: Callable[..., None] | None  # None where there are no rows


_CALLS: Memo[_Call] = Memo()


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

    CUDA tensors on a GPU of compute capability 9.0 or newer take the kernels of topk/*.cu, whose
    results equal the reference's bit for bit: no copy of the scores and no workspace, but 8 * k
    bytes for each part of a row, 264 parts at most, where few rows have more than 8192 blocks.
    They can be captured in a CUDA graph after `preload` or a first call. Others take the torch
    reference, with the workspace of a sort.

    Sources: MSA (arXiv 2606.13392) for forced local blocks, VSA (arXiv 2505.13389) for regions.
    """

    def check() -> Request:
        return check_request(
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

    if runs_kernels(scores):
        # A list of spans is no key, what the checks make of it is.
        request = None if regions is None and keep_spans == () else check()
        numbers = k, dim, first_blocks, last_blocks
        key = key_of(scores, valid_counts, local_blocks, *numbers, request)
        call = _CALLS.find(key)
        if call is None:
            request = check()
            if scores.shape[request.dim] <= MAX_BLOCKS:
                tables, forced = (valid_counts, local_blocks), (first_blocks, last_blocks)
                call = _CALLS.keep(key, _call_of(scores, request, tables, forced))
        if call is not None:
            return _launch_kernels(call, scores, valid_counts, local_blocks)
    return largest_blocks(
        scores,
        check(),
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


def step_of(launch: Launch, width: int) -> Step:
    """Turn a launch into a step.

    A call gives addresses of scores, valid counts, local blocks, indices, counts and workspace.

    Parameters
    ----------
    launch : Launch
        From `make_plan`.
    width : int
        Slots of a row.
    """
    by_score, by_valid, by_local, by_row = launch.offsets
    scores = Address(_SCORES, 4 * by_score)
    valid = Address(_VALID, 4 * by_valid)
    local = Address(_LOCAL, 4 * by_local)
    outputs = Address(_INDICES, 4 * by_row * width), Address(_COUNTS, 4 * by_row)
    workspace = Address(_WORKSPACE)
    tensors: tuple[Address, ...] = (scores, valid, local, *outputs)
    if launch.kernel == "block_topk_parts":
        tensors = (scores, valid, local, workspace)
    elif launch.kernel == "block_topk_merge":
        tensors = (workspace, *outputs)
    arguments: tuple[Address | bytes | int, ...] = (*tensors, launch.plan, *launch.scalars)
    return Step(launch.kernel, launch.grid, launch.block, arguments, launch.shared_bytes)


def _call_of(
    scores: Tensor,
    request: Request,
    tables: tuple[Tensor | None, Tensor | None],
    forced: tuple[int, int],
) -> _Call:
    """Plan a checked call, and lay out its launches."""
    shape = tuple(scores.shape)
    rows = shape[: request.dim] + shape[request.dim + 1 :]
    if not prod(rows):
        return _Call((*rows, request.width), rows, 0, None)
    valid, local = map(_layout, tables)
    plan = make_plan(
        request,
        shape,
        scores.stride(),
        valid=valid,
        local=local,
        first_blocks=forced[0],
        last_blocks=forced[1],
    )
    kernels = [_kernel(launch.config, launch.kernel, scores.device) for launch in plan.launches]
    run = Launches(kernels, [step_of(launch, request.width) for launch in plan.launches])
    return _Call((*rows, request.width), rows, plan.workspace_bytes, run)


def _launch_kernels(
    call: _Call, scores: Tensor, valid: Tensor | None, local: Tensor | None
) -> tuple[Tensor, Tensor]:
    indices_shape, counts_shape, workspace_bytes, run = call
    device = scores.device
    indices = torch.empty(indices_shape, dtype=torch.int32, device=device)
    counts = torch.empty(counts_shape, dtype=torch.int32, device=device)
    workspace = None
    if workspace_bytes:
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
    if run is not None:
        tensors = scores, valid, local, indices, counts, workspace
        run(*[0 if x is None else x.data_ptr() for x in tensors])
    return indices, counts


def _layout(tensor: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.stride())


@cache
def _kernel(config: Config, name: str, device: torch.device) -> Kernel:
    most_shared = config.shared_bytes()
    return program(config).kernel(name, SIGNATURES[name], device, shared_bytes=most_shared)
