"""Block top-k in plain torch: the definition that device kernels must equal bit for bit.

Every block of a row gets one int32 key, so that "the k largest keys, ties to the lowest id" is the
whole rule:

====================  ========================================================================
key                   block
====================  ========================================================================
2^31 - 1              forced: among the first or last blocks, or in a kept span
2^31 - 2              forced: the row's local block
1 - m .. m            scored; keys order as the scores do, -0.0 and +0.0 share the key 0, and
                      +inf has the largest, m = 0x7F800000
-2^31                 never chosen: a score of NaN or -inf, or a block past the valid count
====================  ========================================================================

Only NaN has bits beyond those of +inf and -inf, so the other keys are free. Keys are made from
bits: denormals are told apart even where arithmetic flushes them to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

EMPTY = -1  # the id of an unused slot
MAX_K = 512

_INF_BITS = 0x7F800000
_NEVER = -(2**31)
_FORCED_LOCAL = 2**31 - 2
_FORCED = 2**31 - 1


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
    Nothing is read on the host. The workspace is that of a sort: keys of 4 and ids of 8 bytes for
    each score, a few times over.

    Sources: MSA (arXiv 2606.13392) for forced local blocks, VSA (arXiv 2505.13389) for regions.
    """
    dim = _check_scores(scores, dim)
    num_blocks = scores.shape[dim]
    spans = _check_spans(num_blocks, k, regions, keep_spans)
    _check_forced(regions, local_blocks, first_blocks, last_blocks)

    by_row = scores.detach().movedim(dim, -1)
    rows = by_row.shape[:-1]
    ids = torch.arange(num_blocks, device=scores.device)
    valid: Tensor | int = num_blocks
    if valid_counts is not None:
        _check_per_row("valid_counts", valid_counts, rows, scores.device)
        valid = valid_counts.clamp(0, num_blocks).unsqueeze(-1)

    keys = _score_keys(by_row)
    if local_blocks is not None:
        _check_per_row("local_blocks", local_blocks, rows, scores.device)
        keys = keys.masked_fill(ids == local_blocks.unsqueeze(-1), _FORCED_LOCAL)
    keys = keys.masked_fill((ids < first_blocks) | (ids + last_blocks >= valid), _FORCED)
    for start, stop in keep_spans:
        keys = keys.masked_fill((ids >= start) & (ids < stop), _FORCED)
    keys = keys.masked_fill(ids >= valid, _NEVER)

    chosen = [_largest(keys, start, stop, budget) for start, stop, budget in spans]
    width = sum(budget for _, _, budget in spans)
    slots = torch.full((*rows, width), num_blocks, device=scores.device)
    if chosen:
        packed = torch.cat(chosen, dim=-1).sort(dim=-1).values
        slots[..., : packed.shape[-1]] = packed
    unused = slots == num_blocks
    indices = slots.masked_fill(unused, EMPTY).to(torch.int32)
    return indices, (~unused).sum(dim=-1, dtype=torch.int32)


def _score_keys(scores: Tensor) -> Tensor:
    """Int32 keys in the order of the scores, from sign and magnitude of their bits."""
    bits = scores.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = torch.where(bits < 0, -magnitude, magnitude)
    return keys.masked_fill((magnitude > _INF_BITS) | (keys == -_INF_BITS), _NEVER)


def _largest(keys: Tensor, start: int, stop: int, budget: int) -> Tensor:
    """Ids of the largest keys among start to stop - 1, by rank; n where too few can be chosen."""
    ranked = keys[..., start:stop].sort(dim=-1, descending=True, stable=True)
    best, ids = ranked.values[..., :budget], ranked.indices[..., :budget] + start
    return ids.masked_fill(best == _NEVER, keys.shape[-1])


def _check_scores(scores: Tensor, dim: int) -> int:
    """Check the scores and return the axis of the blocks, counted from 0."""
    if not isinstance(scores, Tensor) or scores.dtype != torch.float32:
        raise TypeError(f"scores must be a float32 Tensor, got {_describe(scores)}")
    rank = scores.dim()
    if rank == 0:
        raise ValueError(f"scores must have at least one dim, got {_describe(scores)}")
    _check_int("dim", dim, -rank, rank - 1)
    return dim % rank


def _check_spans(
    num_blocks: int,
    k: int | None,
    regions: Sequence[tuple[int, int, int]] | None,
    keep_spans: Sequence[tuple[int, int]],
) -> list[tuple[int, int, int]]:
    """Return (start, stop, budget) of all regions and kept spans; for k, one region of all ids."""
    if regions is None:
        if k is None:
            raise ValueError("exactly one of k and regions must be given, got neither")
        _check_int("k", k, 1, MAX_K)
        if keep_spans:
            raise ValueError(f"keep_spans must be empty without regions, got {keep_spans!r}")
        return [(0, num_blocks, k)]
    if k is not None:
        raise ValueError("exactly one of k and regions must be given, got both")
    spans = []
    for i, region in enumerate(regions):
        start, stop = _check_span(f"regions[{i}]", region, "(start, stop, budget)", num_blocks)
        _check_int(f"budget of regions[{i}]", region[2], 1, MAX_K)
        spans.append((start, stop, region[2]))
    for i, span in enumerate(keep_spans):
        start, stop = _check_span(f"keep_spans[{i}]", span, "(start, stop)", num_blocks)
        spans.append((start, stop, stop - start))
    for left, right in pairwise(sorted(span for span in spans if span[0] < span[1])):
        if right[0] < left[1]:
            raise ValueError(
                f"regions and keep_spans must not overlap, got {left[:2]} and {right[:2]}"
            )
    return spans


def _check_span(name: str, span: tuple[int, ...], fields: str, num_blocks: int) -> tuple[int, int]:
    if not isinstance(span, (tuple, list)) or len(span) != fields.count(",") + 1:
        raise TypeError(f"{name} must be {fields}, got {span!r}")
    start, stop = span[:2]
    _check_int(f"start of {name}", start, 0, num_blocks)
    _check_int(f"stop of {name}", stop, start, num_blocks)
    return start, stop


def _check_forced(
    regions: object, local_blocks: Tensor | None, first_blocks: int, last_blocks: int
) -> None:
    _check_int("first_blocks", first_blocks, 0, None)
    _check_int("last_blocks", last_blocks, 0, None)
    if regions is not None and (local_blocks is not None or first_blocks or last_blocks):
        raise NotImplementedError(
            "regions with first_blocks, last_blocks or local_blocks are not supported; "
            "supported: k with forced blocks, regions with keep_spans"
        )


def _check_per_row(name: str, tensor: Tensor, rows: torch.Size, device: torch.device) -> None:
    wanted = f"int32, broadcastable to the rows {list(rows)}"
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be {wanted}, got {_describe(tensor)}")
    sizes = zip(reversed(tensor.shape), reversed(rows), strict=False)
    if tensor.dim() > len(rows) or any(size not in (1, row) for size, row in sizes):
        raise ValueError(f"{name} must be {wanted}, got {_describe(tensor)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on scores' device {device}, got {_describe(tensor)}")


def _check_int(name: str, value: object, least: int, most: int | None) -> None:
    # torch.SymInt is what a compiled graph with dynamic shapes passes.
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {_describe(value)}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name} must be {wanted}, got {value}")


def _describe(value: object) -> str:
    """Name what was passed, for an error message."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"
