"""How a sequence of text, images, audio and videos is cut into blocks and laid out for attention.

Source: VSA (arXiv 2505.13389); mixed sequences follow the layout that FastVideo's H3 models use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from sparse_atten import packing
from sparse_atten.contracts import Layout, records_grad
from sparse_atten.cute_kernels.common.arguments import describe

Grid = tuple[int, int, int]
Segment = int | Grid

_CACHED_LAYOUTS = 64


@dataclass(frozen=True)
class VideoLayout:
    """Cut a token sequence into blocks whose tokens are neighbours, and say where each token goes.

    A dense segment is cut into consecutive runs of tokens, a video into 3-D tiles. A block never
    holds tokens of two segments. Blocks are numbered in packed order: first those of all dense
    segments (the prefix), then those of each video, both in segment order; the tiles of a video
    in (t, y, x) order, as are the tokens of a tile. Each block owns `block_size` slots of the
    packed sequence; its tokens fill the first of them, the rest is padding. Blocks at the edge of a
    video or at the end of a segment are smaller; none is empty.

    Make one with `from_segments`. Layouts are cached and shared: do not write to their tensors.
    Two layouts are equal if their segments and tiles are, on whatever device.

    Attributes
    ----------
    segments : tuple of int or (T, H, W)
        Tokens of each dense segment, token grid of each video, in the order of the sequence.
    tile : (int, int, int)
        Shape (bT, bH, bW) of a full video tile.
    device : torch.device
        Where the tensors below are.
    num_prefix_tiles : int
        Blocks of the dense segments; they come first.
    video_tile_spans : tuple of (int, int)
        Half-open range of block ids of each video.
    block_sizes : Tensor, int32 [num_blocks]
        Tokens in each block, 1 to `block_size`.
    pack_map : Tensor, int64 [num_slots]
        Token in each packed slot, -1 for padding.
    unpack_map : Tensor, int64 [num_tokens]
        Packed slot of each token.
    """

    segments: tuple[Segment, ...]
    tile: Grid
    device: torch.device = field(compare=False)
    num_prefix_tiles: int = field(compare=False, repr=False)
    video_tile_spans: tuple[tuple[int, int], ...] = field(compare=False, repr=False)
    block_sizes: Tensor = field(compare=False, repr=False)
    pack_map: Tensor = field(compare=False, repr=False)
    unpack_map: Tensor = field(compare=False, repr=False)

    @classmethod
    def from_segments(
        cls,
        segments: Sequence[int | Sequence[int]],
        tile: Sequence[int] = (4, 4, 8),
        device: torch.device | str = "cpu",
    ) -> VideoLayout:
        """Lay out a sequence of dense segments and videos.

        Parameters
        ----------
        segments : sequence of int or (T, H, W)
            In the order of the sequence: an int is a dense segment (text, image, audio) of so many
            tokens; a triple is a video's token grid, flattened with x fastest and t slowest. A
            dense segment of 0 tokens is legal (an empty prompt) and gets no block.
        tile : (int, int, int)
            Video tile (bT, bH, bW); its volume is the block size.
        device : torch.device or str
            Where the maps are to be.

        Raises
        ------
        TypeError
            A segment is neither an int nor a triple of ints, or the tile is no triple of ints.
        ValueError
            A number of tokens is negative, or a dim of a video or of the tile is below 1.
        """
        if not isinstance(segments, Sequence) or isinstance(segments, str):
            raise TypeError(
                "segments must be a sequence of token counts and (T, H, W) grids, "
                f"got {describe(segments)}"
            )
        checked = tuple(_segment(f"segments[{i}]", value) for i, value in enumerate(segments))
        # An empty tensor tells which device "cuda" means at present.
        where = torch.empty(0, device=device).device
        return _build(checked, _grid("tile", tile), where)

    @property
    def block_size(self) -> int:
        """Slots of a block: the volume of a full tile."""
        return math.prod(self.tile)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence."""
        return self.block_sizes.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence, padding not counted."""
        return self.unpack_map.shape[0]

    @property
    def num_slots(self) -> int:
        """Length of the packed sequence, padding included: num_blocks * block_size."""
        return self.pack_map.shape[0]

    @property
    def tiles(self) -> packing.Tiles:
        """The layout as the kernels of `sparse_atten.packing` take it."""
        return packing.Tiles(self.pack_map, self.block_sizes, self.block_size, self.num_tokens)

    def to(self, device: torch.device | str) -> VideoLayout:
        """Return the same layout with its tensors on another device."""
        return self.from_segments(self.segments, self.tile, device)

    def pack(self, x: Tensor, *, tensor_layout: Layout = "bhsd") -> Tensor:
        """Bring tokens into packed order; padding is zero. Differentiable.

        Parameters
        ----------
        x : Tensor, any dtype, [B, H, num_tokens, D], any strides
            Tokens in the order of the sequence; [B, num_tokens, H, D] for "bshd".
        tensor_layout : {"bhsd", "bshd"}
            Order of the dims.

        Returns
        -------
        Tensor, x's dtype, [B, H, num_slots, D] or [B, num_slots, H, D]

        Raises
        ------
        TypeError, ValueError
            `x` is not a 4-D tensor with `num_tokens` tokens on the layout's device.
        """
        dim = self.expect_tokens("x", x, tensor_layout, self.num_tokens)
        if not records_grad(x):
            moved = packing.pack_and_pool([x], self.tiles, row_dim=dim, num_pooled=0)
            if moved is not None:
                return moved[0][0]
        shape = list(x.shape)
        shape[dim] = self.num_slots
        packed = x.new_zeros(shape)
        packed[(slice(None),) * dim + (self.unpack_map,)] = x
        return packed

    def unpack(self, x: Tensor, *, tensor_layout: Layout = "bhsd") -> Tensor:
        """Bring packed tokens back into the order of the sequence, without padding. Differentiable.

        Parameters
        ----------
        x : Tensor, any dtype, [B, H, num_slots, D], any strides
            Tokens in packed order; [B, num_slots, H, D] for "bshd".
        tensor_layout : {"bhsd", "bshd"}
            Order of the dims.

        Returns
        -------
        Tensor, x's dtype, [B, H, num_tokens, D] or [B, num_tokens, H, D]

        Raises
        ------
        TypeError, ValueError
            `x` is not a 4-D tensor with `num_slots` tokens on the layout's device.
        """
        dim = self.expect_tokens("x", x, tensor_layout, self.num_slots)
        if not records_grad(x):
            moved = packing.unpack(x, self.tiles, row_dim=dim)
            if moved is not None:
                return moved
        return x.index_select(dim, self.unpack_map)

    def broadcast(self, x: Tensor, *, tensor_layout: Layout = "bhsd") -> Tensor:
        """Give every token the value of its block, in the order of the sequence. Differentiable.

        Parameters
        ----------
        x : Tensor, any dtype, [B, H, num_blocks, D], any strides
            One vector for each block; [B, num_blocks, H, D] for "bshd".
        tensor_layout : {"bhsd", "bshd"}
            Order of the dims.

        Returns
        -------
        Tensor, x's dtype, [B, H, num_tokens, D] or [B, num_tokens, H, D]

        Raises
        ------
        TypeError, ValueError
            `x` is not a 4-D tensor with `num_blocks` blocks on the layout's device.
        """
        dim = self.expect_tokens("x", x, tensor_layout, self.num_blocks)
        return x.index_select(dim, self.unpack_map // self.block_size)

    def expect_tokens(self, name: str, x: Any, tensor_layout: Layout, length: int) -> int:
        """Check a 4-D tensor whose sequence dim has `length`, and return which dim that is."""
        dim = sequence_dim(tensor_layout)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {describe(x)}")
        if x.dim() != 4 or x.shape[dim] != length:
            dims = f"[B, H, {length}, D]" if dim == 2 else f"[B, {length}, H, D]"
            raise ValueError(
                f"{name} must be {dims} for tensor_layout {tensor_layout!r}, got {describe(x)}"
            )
        if x.device != self.device:
            raise ValueError(
                f"{name} must be on the layout's device {self.device}, got {describe(x)}"
            )
        return dim


def sequence_dim(tensor_layout: Layout) -> int:
    """Return which dim of a 4-D tensor runs over the sequence; the heads are the other of 1, 2."""
    if tensor_layout not in ("bhsd", "bshd"):
        raise ValueError(f"tensor_layout must be 'bhsd' or 'bshd', got {tensor_layout!r}")
    return 2 if tensor_layout == "bhsd" else 1


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _build(segments: tuple[Segment, ...], tile: Grid, device: torch.device) -> VideoLayout:
    # A layout first made under inference_mode must serve training too.
    with torch.inference_mode(False):
        blocks, num_prefix_tiles, spans = _assign_blocks(segments, tile)
        block_size = math.prod(tile)
        num_blocks = spans[-1][1] if spans else num_prefix_tiles
        sizes = torch.bincount(blocks, minlength=num_blocks)

        # Sorted by block, tokens are in packed order: those of a block stay in sequence order,
        # which for a tile is (t, y, x).
        order = torch.argsort(blocks, stable=True)
        first = torch.cumsum(sizes, 0) - sizes
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device="cpu") - first[blocks[order]]
        unpack_map = blocks * block_size + rank
        pack_map = torch.full((num_blocks * block_size,), -1, dtype=torch.int64, device="cpu")
        pack_map[unpack_map] = torch.arange(len(order), device="cpu")

        check_maps(sizes, pack_map, unpack_map)
        return VideoLayout(
            segments=segments,
            tile=tile,
            device=device,
            num_prefix_tiles=num_prefix_tiles,
            video_tile_spans=spans,
            block_sizes=sizes.to(device, torch.int32),
            pack_map=pack_map.to(device),
            unpack_map=unpack_map.to(device),
        )


def _assign_blocks(
    segments: tuple[Segment, ...], tile: Grid
) -> tuple[Tensor, int, tuple[tuple[int, int], ...]]:
    """Return the block of each token, the number of prefix blocks, the block span of each video."""
    blocks = [torch.empty(0, dtype=torch.int64, device="cpu")] * len(segments)
    num_blocks = num_prefix_tiles = 0
    spans = []
    for i in sorted(range(len(segments)), key=lambda i: isinstance(segments[i], tuple)):
        segment = segments[i]
        if isinstance(segment, int):
            ids, count = _tile_ids((segment,), (math.prod(tile),))
            num_prefix_tiles += count
        else:
            ids, count = _tile_ids(segment, tile)
            spans.append((num_blocks, num_blocks + count))
        blocks[i] = ids + num_blocks
        num_blocks += count
    joined = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.int64, device="cpu")
    return joined, num_prefix_tiles, tuple(spans)


def _tile_ids(grid: tuple[int, ...], tile: tuple[int, ...]) -> tuple[Tensor, int]:
    """Return the tile of each point of a grid, both in row-major order, and how many tiles."""
    ids = torch.zeros((), dtype=torch.int64, device="cpu")
    count = 1
    for size, step in zip(grid, tile, strict=True):
        tiles = -(-size // step)
        ids = ids[..., None] * tiles + torch.arange(size, device="cpu") // step
        count *= tiles
    return ids.flatten(), count


def check_maps(block_sizes: Tensor, pack_map: Tensor, unpack_map: Tensor) -> None:
    """Check that the maps are inverse bijections between the tokens and the valid slots.

    Raises
    ------
    RuntimeError
        They are not; the message says which property fails. No input can cause this.
    """
    block_size = len(pack_map) // max(len(block_sizes), 1)
    slots = pack_map.view(len(block_sizes), block_size)
    valid = torch.arange(block_size, device="cpu") < block_sizes[:, None]
    tokens = torch.arange(len(unpack_map), device="cpu")
    in_range = (unpack_map >= 0) & (unpack_map < len(pack_map))
    properties = {
        f"block sizes are 1 to {block_size}": (block_sizes >= 1) & (block_sizes <= block_size),
        "block sizes sum to the number of tokens": block_sizes.sum() == len(unpack_map),
        "tokens fill the first slots of each block": (slots >= 0) == valid,
        "every token has a slot": in_range,
        "the maps are inverse": pack_map[unpack_map.where(in_range, 0)] == tokens,
    }
    for claim, holds in properties.items():
        if not holds.all():
            raise RuntimeError(f"internal error in VideoLayout: not true that {claim}")


def _segment(name: str, value: object) -> Segment:
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{name} must be at least 0 tokens, got {value}")
        return int(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _grid(name, value)
    raise TypeError(f"{name} must be a number of tokens or a (T, H, W) grid, got {describe(value)}")


def _grid(name: str, value: object) -> Grid:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a triple of ints, got {describe(value)}")
    if not all(isinstance(dim, Integral) and not isinstance(dim, bool) for dim in value):
        raise TypeError(f"{name} must be a triple of ints, got {value!r}")
    if len(value) != 3:
        raise ValueError(f"{name} must be a triple of ints, got {value!r}")
    if min(value) < 1:
        raise ValueError(f"{name} must have dims of at least 1, got {value!r}")
    return int(value[0]), int(value[1]), int(value[2])
