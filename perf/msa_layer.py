"""Shapes of the MSA benchmark, their tensors, and what a choice of blocks amounts to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from sparse_atten import TokenSelection
from sparse_atten.msa import index_branch

BLOCK = 128
HEAD_DIM = 128  # of the attention and of the index branch
CORRELATED_TOKENS = 512  # between the points that smooth index queries go through
FIELD = 8.0  # of those points; the noise of a token has 1


@dataclass(frozen=True)
class Case:
    """One causal sequence.

    Parameters
    ----------
    tokens : int
        Queries, and keys.
    kind : {"random", "smooth"}
        Index queries that are noise, whose choice is uniform; or that change slowly from token to
        token, so that neighbours choose much the same blocks.
    heads : (int, int)
        Query heads and KV heads.
    topk : int
        Blocks of a token.
    """

    tokens: int
    kind: str = "random"
    heads: tuple[int, int] = (64, 4)
    topk: int = 16

    @property
    def name(self) -> str:
        """Heads x tokens, blocks, kind."""
        return f"{self.heads[0]}:{self.heads[1]}x{self.tokens}-k{self.topk}-{self.kind}"


@dataclass(frozen=True, eq=False)
class Layer:
    """Tensors of a case, bf16, packed; one index key head serves all."""

    q: Tensor  # [S, Hq, D]
    k: Tensor  # [S, Hkv, D]
    v: Tensor
    q_idx: Tensor  # [S, Hkv, D]
    k_idx: Tensor  # [S, 1, D]
    topk: int

    @property
    def tokens(self) -> int:
        """Queries, and keys."""
        return self.q.shape[0]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the attention."""
        return self.q, self.k, self.v

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Fields of a selection; made once, for a graph copies nothing from the host."""
        offsets = torch.tensor([0, self.tokens], dtype=torch.int32, device=self.q.device)
        return {
            "cu_seqlens_q": offsets,
            "cu_seqlens_k": offsets,
            "max_seqlen_q": self.tokens,
            "max_seqlen_k": self.tokens,
            "block_size": BLOCK,
        }

    def select(self) -> TokenSelection:
        """Choose the blocks by the index branch."""
        return index_branch(self.q_idx, self.k_idx, topk=self.topk, **self.fields)


def draw_layer(case: Case, generator: torch.Generator) -> Layer:
    """Draw the tensors on the generator's device."""
    num_heads, num_kv_heads = case.heads
    device = generator.device

    def noise(heads: int) -> Tensor:
        empty = torch.empty(case.tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        return empty.normal_(generator=generator)

    q, k, v = noise(num_heads), noise(num_kv_heads), noise(num_kv_heads)
    q_idx, k_idx = noise(num_kv_heads), noise(1)
    if case.kind == "smooth":
        points = torch.empty(
            1, num_kv_heads * HEAD_DIM, 2 + case.tokens // CORRELATED_TOKENS, device=device
        ).normal_(0, FIELD, generator=generator)
        path = interpolate(points, size=case.tokens, mode="linear", align_corners=True)
        q_idx += path[0].T.unflatten(1, (num_kv_heads, HEAD_DIM))
    return Layer(q, k, v, q_idx, k_idx, case.topk)


class Work(NamedTuple):
    """What a choice amounts to."""

    edges: int  # of a token, a KV head and a chosen block that holds a key it sees
    keys: int  # that they see in those blocks: of the local one those up to the token's own
    overlap: float  # mean share of a token's blocks that the token before it chose too


def measure_choice(lists: Tensor) -> Work:
    """Count a causal choice, int32 [Hkv, S, K] with -1 in unused slots."""
    token = torch.arange(lists.shape[1], device=lists.device)[:, None]
    seen = (token + 1 - BLOCK * lists).clamp(0, BLOCK).masked_fill(lists < 0, 0)
    both = (lists[:, 1:, :, None] == lists[:, :-1, None, :]) & (lists[:, 1:, :, None] >= 0)
    shares = both.any(3).sum(2) / (lists[:, 1:] >= 0).sum(2).clamp(min=1)
    overlap = float(shares.mean()) if shares.numel() else 1.0
    return Work(int((seen > 0).sum()), int(seen.sum()), overlap)
