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
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.cute_kernels.common.arguments import describe, expect_int

EMPTY = -1  # the id of an unused slot
MAX_K = 512

_INF_BITS = 0x7F800000
_NEVER = -(2**31)
_FORCED_LOCAL = 2**31 - 2
_FORCED = 2**31 - 1


class Request(NamedTuple):
    """Checked arguments that say which blocks compete for what.

    Attributes
    ----------
    dim : int
        The axis of the blocks, from 0.
    spans : tuple of (start, stop, budget)
        Regions, then kept spans, as given; for k one region of all ids.
    num_kept : int
        How many of the spans, the last ones, are kept whole.
    """

    dim: int
    spans: tuple[tuple[int, int, int], ...]
    num_kept: int

    @property
    def width(self) -> int:
        """Slots of a row."""
        return sum(budget for _, _, budget in self.spans)


def check_request(
    scores: Tensor,
    k: int | None,
    *,
    dim: int,
    valid_counts: Tensor | None,
    local_blocks: Tensor | None,
    first_blocks: int,
    last_blocks: int,
    regions: Sequence[tuple[int, int, int]] | None,
    keep_spans: Sequence[tuple[int, int]],
) -> Request:
    """Check the arguments of `block_topk`; it states their meaning and the errors."""
    dim = _check_scores(scores, dim)
    spans = _check_spans(scores.shape[dim], k, regions, keep_spans)
    _check_forced(regions, local_blocks, first_blocks, last_blocks)
    rows = scores.shape[:dim] + scores.shape[dim + 1 :]
    if valid_counts is not None:
        _check_per_row("valid_counts", valid_counts, rows, scores.device)
    if local_blocks is not None:
        _check_per_row("local_blocks", local_blocks, rows, scores.device)
    return Request(dim, tuple(spans), len(keep_spans))


def largest_blocks(
    scores: Tensor,
    request: Request,
    *,
    valid_counts: Tensor | None = None,
    local_blocks: Tensor | None = None,
    first_blocks: int = 0,
    last_blocks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Do what `block_topk` states, for checked arguments, with torch's sort.

    The workspace is that of a sort: keys of 4 and ids of 8 bytes for each score, a few times over.
    """
    by_row = scores.detach().movedim(request.dim, -1)
    *rows, num_blocks = by_row.shape
    ids = torch.arange(num_blocks, device=scores.device)
    valid: Tensor | int = num_blocks
    if valid_counts is not None:
        valid = valid_counts.clamp(0, num_blocks).unsqueeze(-1)

    keys = _score_keys(by_row)
    if local_blocks is not None:
        keys = keys.masked_fill(ids == local_blocks.unsqueeze(-1), _FORCED_LOCAL)
    keys = keys.masked_fill((ids < first_blocks) | (ids + last_blocks >= valid), _FORCED)
    for start, stop, _ in request.spans[len(request.spans) - request.num_kept :]:
        keys = keys.masked_fill((ids >= start) & (ids < stop), _FORCED)
    keys = keys.masked_fill(ids >= valid, _NEVER)

    chosen = [_largest(keys, start, stop, budget) for start, stop, budget in request.spans]
    slots = torch.full((*rows, request.width), num_blocks, device=scores.device)
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
        raise TypeError(f"scores must be a float32 Tensor, got {describe(scores)}")
    rank = scores.dim()
    if rank == 0:
        raise ValueError(f"scores must have at least one dim, got {describe(scores)}")
    expect_int("dim", dim, -rank, rank - 1)
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
        expect_int("k", k, 1, MAX_K)
        if keep_spans:
            raise ValueError(f"keep_spans must be empty without regions, got {keep_spans!r}")
        return [(0, num_blocks, k)]
    if k is not None:
        raise ValueError("exactly one of k and regions must be given, got both")
    spans = []
    for i, region in enumerate(regions):
        start, stop = _check_span(f"regions[{i}]", region, "(start, stop, budget)", num_blocks)
        expect_int(f"budget of regions[{i}]", region[2], 1, MAX_K)
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
    expect_int(f"start of {name}", start, 0, num_blocks)
    expect_int(f"stop of {name}", stop, start, num_blocks)
    return start, stop


def _check_forced(
    regions: object, local_blocks: Tensor | None, first_blocks: int, last_blocks: int
) -> None:
    expect_int("first_blocks", first_blocks, 0, None)
    expect_int("last_blocks", last_blocks, 0, None)
    if regions is not None and (local_blocks is not None or first_blocks or last_blocks):
        raise NotImplementedError(
            "regions with first_blocks, last_blocks or local_blocks are not supported; "
            "supported: k with forced blocks, regions with keep_spans"
        )


def _check_per_row(name: str, tensor: Tensor, rows: torch.Size, device: torch.device) -> None:
    def refusal() -> str:
        wanted = f"int32, broadcastable to the rows {list(rows)}"
        return f"{name} must be {wanted}, got {describe(tensor)}"

    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
        raise TypeError(refusal())
    sizes = zip(reversed(tensor.shape), reversed(rows), strict=False)
    if tensor.dim() > len(rows) or any(size not in (1, row) for size, row in sizes):
        raise ValueError(refusal())
    if tensor.device != device:
        raise ValueError(f"{name} must be on scores' device {device}, got {describe(tensor)}")
