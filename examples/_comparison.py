"""Sparse attention against dense attention and against the oracle: what is measured, and how.

Two gaps that are never mixed up: against the float64 oracle on the same selection stands the error
of the implementation, against dense attention what dropping blocks costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparse_atten import BlockSelection, Explanation
from sparse_atten.contracts import Options
from sparse_atten.definition import define_attention

CHECKED_BLOCKS = 12  # query blocks that the oracle recomputes at each sparsity
QUERIES_AT_ONCE = 512  # while the spread of dense attention is found


class Attended(NamedTuple):
    """What the stages of sparse attention leave behind; all but `out` is in packed order."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    selection: BlockSelection
    packed_out: Tensor
    packed_lse: Tensor
    out: Tensor  # in the order of the sequence


class Dense(NamedTuple):
    """Dense attention over the same queries, keys and values, in the order of the sequence."""

    out: Tensor
    lse: Tensor  # float32 [1, heads, tokens]
    effective_keys: Tensor  # 1 / sum(p^2) of each query, likewise


@dataclass(frozen=True)
class Row:
    """One sparsity of the tables and pictures; errors are relative L2 norms."""

    sparsity: str
    explanation: Explanation
    coverage: float  # share of the dense probability that lies on kept keys, mean over queries
    coverage_p10: float
    output_error: float  # against dense attention, all queries
    implementation_error: float  # against the oracle of the same selection, a sample of queries
    seconds: dict[str, float]  # by stage
    dense_seconds: float  # of torch's SDPA, run in turns with the stages
    selection: BlockSelection
    scores: Tensor

    @property
    def total_seconds(self) -> float:
        """Time of all stages."""
        return sum(self.seconds.values())


class Stopwatch:
    """Wall-clock time of named stages; the fastest, where one runs several times."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._wait: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the body of a `with` statement."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        took = time.perf_counter() - start
        self.seconds[stage] = min(took, self.seconds.get(stage, took))


def attend_densely(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Dense:
    """Attend to every key with torch's SDPA, and find each query's LSE and spread."""
    out = scaled_dot_product_attention(q, k, v, scale=scale)
    lse, effective_keys = [], []
    for queries in q.float().split(QUERIES_AT_ONCE, dim=2):
        logits = scale * (queries @ k.float().transpose(2, 3))
        lse.append(logits.logsumexp(-1))
        effective_keys.append((2 * lse[-1] - (2 * logits).logsumexp(-1)).exp())
    return Dense(out, torch.cat(lse, 2), torch.cat(effective_keys, 2))


def coverage(attended: Attended, dense: Dense, unpack_map: Tensor) -> Tensor:
    """Share of each query's dense probability that lies on the keys it kept, [1, heads, tokens]."""
    return (attended.packed_lse.index_select(2, unpack_map) - dense.lse).exp()


def implementation_error(attended: Attended, *, scale: float, seed: int) -> float:
    """Recompute a sample of query blocks by definition, in float64, on the same selection."""
    selection = attended.selection
    _, heads, num_blocks, _ = selection.q2k_indices.shape
    last = heads * num_blocks - 1  # ragged, if any block is
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randperm(last, generator=generator)[: CHECKED_BLOCKS - 1]
    got, wanted = [], []
    for place in [*sample.tolist(), last]:
        head, block = divmod(place, num_blocks)
        one_head, rows = slice(head, head + 1), slice(block, block + 1)
        slots = slice(block * selection.block_size, (block + 1) * selection.block_size)
        assert selection.q_block_sizes is not None
        part = BlockSelection(
            selection.q2k_indices[:, one_head, rows],
            selection.q2k_counts[:, one_head, rows],
            block_size=selection.block_size,
            kv_block_sizes=selection.kv_block_sizes,
            q_block_sizes=selection.q_block_sizes[rows],
            dense_rows=int(block < selection.dense_rows),
        )
        q, k, v = (x[:, one_head] for x in (attended.q, attended.k, attended.v))
        options = Options(softmax_scale=scale)
        wanted.append(define_attention(q[:, :, slots], k, v, part, options).out)
        got.append(attended.packed_out[:, one_head, slots])
    return relative_error(torch.cat(got), torch.cat(wanted))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Relative L2 norm of the difference, computed in float64."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
