"""Shapes and masks of the VSA benchmark, and what a mask amounts to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten import BlockSelection
from sparse_atten.contracts import Layout
from sparse_atten.vsa import VideoLayout, route

BLOCK = 128
HEAD_DIM = 128
REACH = 0.5  # of a local mask: logits fall by 1 over this many times the number of kept blocks
PERSISTENCE = 0.98  # of a routed mask: correlation of the scores of neighbouring query blocks
PARTIAL_SHARE = 0.25  # of blocks with ragged sizes

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One shape and kind of mask.

    Parameters
    ----------
    heads : (int, int)
        Query heads and KV heads.
    tokens : int
        Queries, and keys.
    kept : int
        KV blocks that a query block keeps, in the mean.
    mask : {"random", "local", "routed"}
        Uniform; mostly near the diagonal; scores that change slowly from one query block to the
        next, as those of a video do.
    counts : {"fixed", "random"}
        The same number of blocks in each row, or 1 to 2 * kept - 1.
    sizes : {"full", "ragged"}
        Whether a quarter of the blocks (of queries and of keys) is partly padding.
    """

    heads: tuple[int, int]
    tokens: int
    kept: int
    mask: str = "random"
    counts: str = "fixed"
    sizes: str = "full"

    @property
    def blocks(self) -> int:
        """Blocks of the sequence."""
        return -(-self.tokens // BLOCK)

    @property
    def name(self) -> str:
        """Heads x tokens, kept blocks, kind."""
        parts = [heads_and_tokens(self.heads, self.tokens), f"{self.kept}of{self.blocks}"]
        parts += [self.mask]
        parts += ["counts"] * (self.counts == "random") + ["sizes"] * (self.sizes == "ragged")
        return "-".join(parts)

    def select(self, generator: torch.Generator, layout: Layout) -> BlockSelection:
        """Draw the mask on the generator's device."""
        scores = draw_scores(self.mask, self.heads[0], self.blocks, self.kept, generator)
        most, counts = self.kept, None
        if self.counts == "random":
            most = min(2 * self.kept - 1, self.blocks)
            counts = torch.randint(
                1, most + 1, scores.shape[:3], generator=generator, device=generator.device
            ).int()
        ids, counts = best_blocks(scores, most, counts)
        sizes = None
        if self.sizes == "ragged":
            sizes = draw_sizes(self.tokens, generator)
        return BlockSelection(ids, counts, layout=layout, kv_block_sizes=sizes, q_block_sizes=sizes)


@dataclass(frozen=True)
class VideoCase:
    """A mixed sequence with a dense prefix: text, reference video, image, audio, target video.

    Parameters
    ----------
    heads : (int, int)
        Query heads and KV heads.
    segments : tuple
        As for `VideoLayout.from_segments`.
    sparsity : float
        Share of each video's blocks that a video query drops.
    """

    heads: tuple[int, int]
    segments: tuple[int | tuple[int, int, int], ...]
    sparsity: float
    mask = "routed"
    counts = "prefix"
    sizes = "ragged"

    @property
    def layout(self) -> VideoLayout:
        """The blocks, on the CPU."""
        return VideoLayout.from_segments(self.segments)

    @property
    def tokens(self) -> int:
        """Slots of the packed sequence."""
        return self.layout.num_slots

    @property
    def blocks(self) -> int:
        """Blocks of the sequence."""
        return self.layout.num_blocks

    @property
    def kept(self) -> int:
        """KV blocks that a video query keeps."""
        spans = self.layout.video_tile_spans
        budgets = [math.ceil((1 - self.sparsity) * (stop - start)) for start, stop in spans]
        return self.layout.num_prefix_tiles + sum(budgets)

    @property
    def name(self) -> str:
        """Heads x tokens, kept blocks, kind."""
        prefix = self.layout.num_prefix_tiles
        first = heads_and_tokens(self.heads, self.tokens)
        return f"{first}-{self.kept}of{self.blocks}-prefix{prefix}"

    def select(self, generator: torch.Generator, layout: Layout) -> BlockSelection:
        """Route slowly changing scores on the generator's device."""
        scores = draw_scores(self.mask, self.heads[0], self.blocks, self.kept, generator)
        placed = self.layout.to(generator.device)
        return route(scores, placed, sparsity=self.sparsity, tensor_layout=layout)


def heads_and_tokens(heads: tuple[int, int], tokens: int) -> str:
    """Name a shape; KV heads only where they differ."""
    kv = "" if heads[0] == heads[1] else f":{heads[1]}"
    return f"{heads[0]}{kv}x{tokens}"


def draw_scores(
    mask: str, heads: int, blocks: int, kept: int, generator: torch.Generator
) -> Tensor:
    """Scores whose largest entries are the mask, float32 [1, heads, blocks, blocks]."""
    shape, device = (1, heads, blocks, blocks), generator.device
    if mask == "routed":
        scores = torch.empty(shape, device=device).normal_(generator=generator)
        for row in range(1, blocks):
            scores[:, :, row] *= math.sqrt(1 - PERSISTENCE**2)
            scores[:, :, row] += PERSISTENCE * scores[:, :, row - 1]
        return scores
    scores = torch.empty(shape, device=device).exponential_(generator=generator).log_().neg_()
    if mask == "local":
        place = torch.arange(blocks, device=device)
        scores -= (place - place[:, None]).abs() / (REACH * kept)
    return scores


def best_blocks(scores: Tensor, most: int, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids of the best blocks of each row, ascending, -1 after them; and how many there are."""
    ids = scores.topk(most, dim=-1).indices.int()
    if counts is None:
        counts = torch.full(ids.shape[:3], most, dtype=torch.int32, device=ids.device)
    absent = torch.arange(most, device=ids.device) >= counts[..., None]
    ids = ids.masked_fill_(absent, scores.shape[-1]).sort(dim=-1).values
    return ids.masked_fill_(absent, -1), counts


def draw_sizes(tokens: int, generator: torch.Generator) -> Tensor:
    """Valid tokens of each block, int32 [N]: some hold 1 to 127, the others what there is."""
    starts = torch.arange(0, tokens, BLOCK, device=generator.device)
    blocks = starts.shape
    partial = torch.rand(blocks, generator=generator, device=generator.device) < PARTIAL_SHARE
    some = torch.randint(1, BLOCK, blocks, generator=generator, device=generator.device)
    return torch.where(partial, some, BLOCK).minimum(tokens - starts).int()


class Work(NamedTuple):
    """What a mask amounts to."""

    pairs: int  # of a valid query and a valid key that it sees
    tiles: int  # of a query block and a KV block that it keeps
    valid_tokens: int  # keys, of one sequence
    overlap: float  # mean share of a row's blocks that the row before it keeps too


def measure_work(selection: BlockSelection, tokens: int) -> Work:
    """Count the pairs and tiles of a mask over as many queries as keys."""
    ids, counts = explicit_lists(selection, tokens)
    sizes = block_sizes(selection, tokens)
    kept = torch.arange(ids.shape[3], device=ids.device) < counts[..., None]
    keys = (sizes[ids.clamp(min=0).long()] * kept).sum(-1)  # [B, H, Nq]
    table = torch.zeros(*counts.shape, len(sizes) + 1, dtype=torch.bool, device=ids.device)
    table.scatter_(3, ids.masked_fill(~kept, len(sizes)).long(), value=True)
    table = table[..., :-1]
    shared = (table[:, :, 1:] & table[:, :, :-1]).sum(-1) / counts[:, :, 1:].clamp(min=1)
    return Work(
        pairs=int((keys * sizes).sum()),
        tiles=int(counts.sum()),
        valid_tokens=int(sizes.sum()),
        overlap=float(shared.float().mean()) if shared.numel() else 1.0,
    )


def block_sizes(selection: BlockSelection, tokens: int) -> Tensor:
    """Valid tokens of each block, int64 [N]."""
    size, device = selection.block_size, selection.q2k_counts.device
    starts = torch.arange(0, tokens, size, device=device)
    left = (tokens - starts).clamp(max=size)
    return (
        left if selection.kv_block_sizes is None else selection.kv_block_sizes.long().minimum(left)
    )


def explicit_lists(selection: BlockSelection, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and counts with the dense rows written out, for those who have no such rows."""
    ids, counts, dense = selection.q2k_indices, selection.q2k_counts, selection.dense_rows
    if not dense:
        return ids, counts
    blocks = -(-tokens // selection.block_size)
    wide = ids.new_full((*ids.shape[:3], blocks), -1)
    wide[..., : ids.shape[3]] = ids
    wide[:, :, :dense] = torch.arange(blocks, dtype=torch.int32, device=ids.device)
    counts = counts.clone()
    counts[:, :, :dense] = blocks
    return wide, counts


def draw_inputs(
    case: Case | VideoCase, dtype: torch.dtype, layout: Layout, generator: torch.Generator
) -> Inputs:
    """Normal q, k and v of a case, contiguous in the order of dims asked for."""
    q_heads, kv_heads = case.heads
    tensors = []
    for heads in (q_heads, kv_heads, kv_heads):
        dims = (heads, case.tokens) if layout == "bhsd" else (case.tokens, heads)
        empty = torch.empty(1, *dims, HEAD_DIM, dtype=dtype, device=generator.device)
        tensors.append(empty.normal_(generator=generator))
    return tensors[0], tensors[1], tensors[2]


H24, H12, H8, H40, H56 = (24, 24), (12, 12), (8, 8), (40, 40), (56, 56)
QUICK = (
    Case(H8, 8192, 16),
    Case(H24, 32768, 32),
    Case(H24, 32768, 32, counts="random"),
)
CASES = (
    Case(H24, 32768, 32),
    Case(H24, 32768, 32, mask="local"),
    Case(H24, 32768, 32, mask="routed"),
    Case(H24, 32768, 32, counts="random"),
    Case(H24, 32768, 32, sizes="ragged"),
    Case(H24, 32768, 64),
    Case(H12, 16384, 16),
    Case(H8, 8192, 16),
    Case((32, 4), 32768, 32, mask="routed"),
    # The 17 blocks of VSA's worked example, 16 times: text, reference, image, audio, target.
    VideoCase(H24, (2080, (8, 16, 64), 960, 3200, (16, 32, 32)), 0.75),
    Case(H40, 92160, 72),
    Case(H40, 92160, 72, mask="local"),
    Case(H40, 92160, 72, mask="routed"),
    Case(H56, 110592, 86, mask="routed"),
)
# Sparsity x length x kind of mask, the shorter ones first.
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
SWEEP = tuple(
    Case(H24, tokens, max(1, round((1 - sparsity) * tokens / BLOCK)), mask=mask)
    for tokens in (8192, 16384, 32768, 65536)
    for mask in ("random", "routed")
    for sparsity in SPARSITIES
)
