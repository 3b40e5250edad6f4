"""Whether an output is right: whole rows of keys for query blocks chosen at random, in float64.

The budget is the package's own (CONTRIBUTING.md, "How a result is judged"): twice the error of the
same arithmetic without tiling, plus 1e-5 and 1e-6 * max |score| * max |V|.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten import BlockSelection
from sparse_atten.contracts import Layout, Options
from sparse_atten.definition import attend_densely

SAMPLED_BLOCKS = 12


class Verdict(NamedTuple):
    """The largest error of the sampled rows, and what it may be."""

    max_error: float
    budget: float
    num_queries: int

    @property
    def right(self) -> bool:
        """Whether the error is within the budget; a NaN is not."""
        return self.max_error <= self.budget


def judge(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    selection: BlockSelection,
    *,
    blocks: int = SAMPLED_BLOCKS,
    seed: int = 0,
) -> Verdict:
    """Compare some query blocks of an output with the definition.

    Parameters
    ----------
    out : Tensor
        In q's order of dims. Only valid queries are looked at.
    inputs : (q, k, v)
        In the order of dims that the selection names.
    selection : BlockSelection
        With `dense_rows` for attention to everything. Duplicate ids are not expected.
    blocks : int
        Query blocks to sample, of all heads together.
    seed : int
        Of the choice of blocks.
    """
    if selection.layout == "bshd":
        out, *inputs = (x.transpose(1, 2) for x in (out, *inputs))  # type: ignore[assignment]
    q, k, v = inputs
    options = Options(softmax_scale=1 / math.sqrt(q.shape[-1]))
    group = q.shape[1] // k.shape[1]
    worst = rounded_worst = allowance = 0.0
    num_queries = 0
    for batch, head, block in _sample(selection.q2k_counts.shape, blocks, seed):
        rows = _valid_rows(selection, block, q.shape[2])
        seen = _seen_keys(selection, (batch, head, block), k.shape[2])
        some = (q[batch, head, rows], k[batch, head // group], v[batch, head // group])
        seen = seen.expand(some[0].shape[0], -1)
        exact = attend_densely(*(x[None, None] for x in (*some, seen)), options).out[0, 0]
        rounded, slack = untiled(*some, seen[0] > 0, options.softmax_scale)
        worst = larger(worst, distance(out[batch, head, rows], exact))
        rounded_worst = larger(rounded_worst, distance(rounded, exact))
        allowance = max(allowance, slack)
        num_queries += seen.shape[0]
    return Verdict(worst, 2 * rounded_worst + 1e-5 + 1e-6 * allowance, num_queries)


def every_key(q: Tensor, *, layout: Layout, block_size: int = 128) -> BlockSelection:
    """Return the selection that is dense attention."""
    heads, queries = (q.shape[1], q.shape[2]) if layout == "bhsd" else (q.shape[2], q.shape[1])
    rows = -(-queries // block_size)
    ids = torch.empty(q.shape[0], heads, rows, 0, dtype=torch.int32, device=q.device)
    counts = torch.zeros(ids.shape[:3], dtype=torch.int32, device=q.device)
    return BlockSelection(ids, counts, layout=layout, block_size=block_size, dense_rows=rows)


def _sample(shape: torch.Size, blocks: int, seed: int) -> list[tuple[int, int, int]]:
    """Pick (batch, head, block) triples; the first and the last block are always among them."""
    total = math.prod(shape)
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:blocks].tolist()
    flat = sorted({0, total - 1, *chosen})
    return [(i // (shape[1] * shape[2]), i // shape[2] % shape[1], i % shape[2]) for i in flat]


def _valid_rows(selection: BlockSelection, block: int, num_queries: int) -> slice:
    start = block * selection.block_size
    size = selection.block_size
    if selection.q_block_sizes is not None:
        size = int(selection.q_block_sizes[block])
    return slice(start, min(start + size, num_queries))


def _seen_keys(selection: BlockSelection, row: tuple[int, int, int], num_keys: int) -> Tensor:
    """Which keys the queries of a row see, float64 [Skv] of 0 and 1."""
    size, device = selection.block_size, selection.q2k_counts.device
    num_blocks = -(-num_keys // size)
    kept = torch.zeros(num_blocks, dtype=torch.bool, device=device)
    if row[2] < selection.dense_rows:
        kept[:] = True
    else:
        kept[selection.q2k_indices[row][: int(selection.q2k_counts[row])].long()] = True
    sizes = torch.full((num_blocks,), size, device=device)
    if selection.kv_block_sizes is not None:
        sizes = selection.kv_block_sizes.expand(row[0] + 1, -1)[row[0]]
    valid = torch.arange(size, device=device) < sizes[:, None]
    return (valid & kept[:, None]).flatten()[:num_keys].double()


def untiled(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, float]:
    """Attend in float32 with P and the output in q's dtype; also max |score| * max |V|."""
    keys, values = k[visible].float(), v[visible].float()
    scores = scale * (q.float() @ keys.T)
    if values.numel() == 0 or q.numel() == 0:
        return torch.zeros_like(q), 0.0
    weights = scores.softmax(-1).to(q.dtype).float()
    return (weights @ values).to(q.dtype), float(scores.abs().max() * values.abs().max())


def distance(got: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference, in float64."""
    return float((got.double() - wanted).abs().max()) if got.numel() else 0.0


def larger(a: float, b: float) -> float:
    """Return the larger one, or NaN if one is."""
    return b if b != b or b > a else a
