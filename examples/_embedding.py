"""A fixed embedding of a clip's pixels as queries, keys and values. No trained model is involved.

Queries and keys are Fourier features, sines and cosines of projections, which turn closeness into a
dot product. One part of each vector comes from random projections of the token's pixels, so that
patches that look alike point alike; the other from its position (t, y, x), so that neighbours do.
Both parts have length 1 before head h weighs their squares by `content_shares`: the first heads
look for what looks alike, the last for what is near. The queries and keys of a head use related,
not equal, projections of the pixels; values are linear projections of them.

A logit is TEMPERATURE times a cosine. At 16 attention is neither uniform nor one-hot: a query
spreads over about 200 of the 8,835 keys of the default clip and grid.
"""

from __future__ import annotations

import math

import torch
from _clip import DemoError, Grid
from torch import Tensor

HEAD_DIM = 128
TEMPERATURE = 16.0  # the softmax scale: all queries and keys have length 1
MISMATCH = 0.5  # weight of what a query's projections do not share with its head's keys
BANDWIDTH = 0.6  # distance, in standard deviations of the pixels, at which patches look different
FREQUENCIES = 10  # of position, for each axis
WAVELENGTHS = (8.0, 256.0)  # tokens; the shortest and the longest, geometrically spaced


def embed(patches: Tensor, grid: Grid, *, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embed the patches of a grid as q, k and v, float32 [1, heads, T * H * W, HEAD_DIM].

    The same patches, heads and seed give the same tensors. Raises `DemoError` where all patches
    are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    position = position_features(grid)
    content = patches - patches.mean(0)
    deviation = content.std()
    if deviation < 1e-6:
        raise DemoError("all tokens of the clip look the same; there is nothing to attend to")
    content /= deviation * math.sqrt(content.shape[1])

    frequencies = (HEAD_DIM - position.shape[1]) // 2

    def random_map(width: int) -> Tensor:
        return torch.randn(content.shape[1], width, generator=generator)

    def look_and_place(content_map: Tensor, share: float) -> Tensor:
        look = fourier_features(content @ content_map / BANDWIDTH)
        return torch.cat([math.sqrt(share) * look, math.sqrt(1 - share) * position], -1)

    q, k, v = torch.empty(3, 1, heads, patches.shape[0], HEAD_DIM)
    for head, share in enumerate(content_shares(heads)):
        key_map = random_map(frequencies)
        query_map = key_map + MISMATCH * random_map(frequencies)
        q[0, head] = look_and_place(query_map, share)
        k[0, head] = look_and_place(key_map, share)
        v[0, head] = content @ random_map(HEAD_DIM)
    return q, k, v


def content_shares(heads: int) -> list[float]:
    """Weight of the content in each head, from 3/4 down to 1/4; the rest is the position's."""
    return torch.linspace(0.75, 0.25, heads).tolist()


def position_features(grid: Grid) -> Tensor:
    """Fourier features of each token's (t, y, x), [T * H * W, 6 * FREQUENCIES]."""
    shortest, longest = map(math.log, WAVELENGTHS)
    wavelengths = torch.linspace(shortest, longest, FREQUENCIES).exp()
    places = torch.cartesian_prod(*(torch.arange(size) for size in grid))
    return fourier_features((places[:, :, None] * (2 * math.pi / wavelengths)).flatten(1))


def fourier_features(angles: Tensor) -> Tensor:
    """Sines and cosines of angles [N, F] as unit vectors [N, 2 * F]."""
    return torch.cat([angles.sin(), angles.cos()], -1) / math.sqrt(angles.shape[1])
