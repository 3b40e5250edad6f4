"""Video tokens to pack and unpack: cases, what torch makes of them, and checks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_atten.packing import move
from sparse_atten.vsa import VideoLayout, pool_blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")
ROW_DIM = {"bhsd": 2, "bshd": 1}


class Case(NamedTuple):
    """Segments and tile, then the tensor: batch, heads, head dim, dtype, layout, how it is made."""

    segments: tuple
    tile: tuple[int, int, int] = (4, 4, 8)
    batch: int = 1
    heads: int = 2
    head_dim: int = 128
    dtype: torch.dtype = BF16
    layout: str = "bhsd"
    view: str = "plain"


MIXED = (77, (3, 6, 9), 3)
SMALL = (5, (3, 2, 4), 9, (2, 3, 3))
CASES = {
    "video": Case(((5, 6, 9),)),
    "two_videos": Case((77, (1, 6, 9), 3, (4, 5, 17)), heads=1, dtype=FP16),
    "video_bshd": Case(((5, 6, 9),), layout="bshd", dtype=FP16),
    "mixed": Case(MIXED, dtype=FP16),
    "mixed_bshd": Case(MIXED, layout="bshd", heads=3),
    "narrow": Case(MIXED, head_dim=64, batch=2),
    "narrow_bshd": Case(MIXED, head_dim=64, layout="bshd", dtype=FP16),
    "text_only": Case((300,)),
    "one_token": Case((1,), batch=2, heads=1),
    "blocks_of_one_token": Case(SMALL, tile=(1, 1, 1)),
    "blocks_of_8": Case(SMALL, tile=(2, 2, 2), batch=2, heads=2, dtype=FP16),
    "blocks_of_27": Case(SMALL, tile=(3, 3, 3), heads=1, layout="bshd"),
    "blocks_of_65": Case((130, (1, 13, 9)), tile=(1, 13, 5), head_dim=64),
    "blocks_of_256": Case(((5, 9, 9), 300), tile=(4, 8, 8), heads=1, dtype=FP16),
    "joint_projection": Case(SMALL, tile=(2, 2, 2), batch=2, view="joint"),
    "joint_projection_bshd": Case(SMALL, tile=(2, 2, 2), batch=2, layout="bshd", view="joint"),
    "shared_by_heads": Case(SMALL, tile=(2, 2, 2), heads=4, view="expanded"),
    "odd_strides_of_single_dims": Case(SMALL, tile=(2, 2, 2), heads=1, view="single"),
    "no_batch": Case(SMALL, tile=(2, 2, 2), batch=0),
    "no_token": Case((), layout="bshd"),
}


def layout_of(case, device="cpu"):
    return VideoLayout.from_segments(case.segments, case.tile, device)


def tiles_of(layout):
    return move.Tiles(layout.pack_map, layout.block_sizes, layout.block_size, layout.num_tokens)


def tensor_of(case, *, exact=False, seed=0):
    """Tokens of a case. Exact: sums of a block have no rounding errors, in any order."""
    generator = torch.Generator().manual_seed(seed)
    rows = layout_of(case).num_tokens
    shape = [case.batch, case.heads, rows, case.head_dim]
    if case.layout == "bshd":
        shape = [case.batch, rows, case.heads, case.head_dim]

    def draw(*size):
        if exact:
            return (torch.randint(-16, 17, size, generator=generator) / 8).to(case.dtype)
        return torch.randn(size, generator=generator).to(case.dtype)

    if case.view == "joint":
        joint = draw(case.batch, rows, 3, case.heads, case.head_dim)
        return joint[:, :, 1] if case.layout == "bshd" else joint[:, :, 1].transpose(1, 2)
    if case.view == "expanded":
        return draw(case.batch, 1, rows, case.head_dim).expand(shape)
    x = draw(*shape)
    if case.view == "single":
        x = x.as_strided(x.shape, (3, 5, case.head_dim, 1))
    return x


def assert_bits(found, expected):
    """Equal, NaN where NaN is expected."""
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def assert_means(found, x, layout, case):
    """Within the rounding errors of float32 sums in any order of so many steps."""
    packed = layout.pack(x.double(), tensor_layout=case.layout)
    expected = pool_blocks(packed, layout, tensor_layout=case.layout)
    sizes = pool_blocks(packed.abs(), layout, tensor_layout=case.layout)
    # A thread's rows one by one, then lanes of a warp, then warps, then the division.
    steps = -(-layout.block_size // (2048 // case.head_dim)) + 2 + 8 + 1
    error = (found.cpu().double() - expected).abs()
    assert found.dtype == FP32
    assert (error <= 1.01 * steps * 2.0**-24 * sizes).all(), (error / sizes).max()


def check_pack(case, x, layout, found):
    (packed,), (means,) = found
    expected = layout.pack(x, tensor_layout=case.layout)
    assert packed.is_contiguous()
    assert torch.equal(packed.cpu().view(torch.int16), expected.view(torch.int16))
    assert means.is_contiguous()
    assert_means(means, x, layout, case)


def poisoned_slots(case, layout, *, seed=1):
    """A packed tensor of a case whose padding is NaN."""
    packed = layout.pack(tensor_of(case, seed=seed), tensor_layout=case.layout)
    padding = (slice(None),) * ROW_DIM[case.layout] + (layout.pack_map < 0,)
    packed[padding] = NAN
    return packed


# Dims as letters; 1 stands for a dim of size 1.
GATES = {"full": "bhsd", "vector": "d", "token": "b1s1", "head": "1h11", "scalar": ""}


def gate_of(case, kind, dtype, layout):
    generator = torch.Generator().manual_seed(3)
    sizes = case.batch, case.heads, layout.num_tokens, case.head_dim
    full = dict(zip("bhsd", sizes, strict=True))
    shape = [full.get(letter, 1) for letter in GATES[kind]]
    gate = torch.randn(shape, generator=generator).to(dtype)
    return gate.transpose(1, 2).contiguous() if case.layout == "bshd" and len(shape) == 4 else gate


def gated_by_torch(case, packed, gate, coarse, layout):
    out = layout.unpack(packed, tensor_layout=case.layout)
    if case.layout == "bshd":
        coarse = coarse.transpose(1, 2)
    coarse = layout.broadcast(coarse, tensor_layout=case.layout)
    return (out + gate * coarse).to(out.dtype)


def coarse_of(case, layout):
    shape = case.batch, case.heads, layout.num_blocks, case.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))
