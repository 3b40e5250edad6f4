"""VideoLayout against tiles that are walked token by token, and the worked examples of VSA."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten.vsa import VideoLayout
from sparse_atten.vsa.layout import check_maps

PROPERTY = settings(max_examples=60, deadline=None)
MIXED = [130, (8, 4, 16), 60, 200, (8, 8, 16)]  # text, reference video, image, audio, target video

small_grids = st.tuples(*[st.integers(1, 6)] * 3)
segment_lists = st.lists(st.integers(0, 30) | small_grids, max_size=5)
tiles = st.tuples(*[st.integers(1, 4)] * 3)


def walk_blocks(segments, tile):
    """Tokens of every block in packed order, found by walking over the tiles of each segment."""
    bt, bh, bw = tile
    prefix, videos, token = [], [], 0
    for segment in segments:
        if isinstance(segment, int):
            tokens = list(range(token, token + segment))
            step = bt * bh * bw
            prefix += [tokens[i : i + step] for i in range(0, segment, step)]
            token += segment
            continue
        frames, rows, columns = segment
        videos += [
            [
                token + (t * rows + y) * columns + x
                for t in range(t0, min(t0 + bt, frames))
                for y in range(y0, min(y0 + bh, rows))
                for x in range(x0, min(x0 + bw, columns))
            ]
            for t0 in range(0, frames, bt)
            for y0 in range(0, rows, bh)
            for x0 in range(0, columns, bw)
        ]
        token += frames * rows * columns
    return prefix + videos


def slots_of(layout, block):
    start = block * layout.block_size
    return layout.pack_map[start : start + layout.block_size].tolist()


def test_four_tiles_of_the_4x4x4_grid():
    layout = VideoLayout.from_segments([(4, 4, 4)], tile=(4, 2, 2))
    a, b, c, d = (slots_of(layout, block) for block in range(4))
    assert a == [0, 1, 4, 5, 16, 17, 20, 21, 32, 33, 36, 37, 48, 49, 52, 53]
    assert b == [2, 3, 6, 7, 18, 19, 22, 23, 34, 35, 38, 39, 50, 51, 54, 55]
    assert c == [8, 9, 12, 13, 24, 25, 28, 29, 40, 41, 44, 45, 56, 57, 60, 61]
    assert d == [10, 11, 14, 15, 26, 27, 30, 31, 42, 43, 46, 47, 58, 59, 62, 63]
    assert layout.block_sizes.tolist() == [16] * 4
    assert (layout.num_blocks, layout.block_size, layout.num_tokens) == (4, 16, 64)


def test_packed_order_and_its_inverse():
    layout = VideoLayout.from_segments([(4, 4, 4)], tile=(4, 2, 2))
    x = torch.arange(64.0).view(1, 1, 64, 1)
    packed = layout.pack(x)
    assert packed[0, 0, :16, 0].tolist() == slots_of(layout, 0)
    assert packed[0, 0, 2, 0] == 4  # packed position 2 holds token 4 ...
    assert layout.unpack_map[4] == 2  # ... and goes back to it
    assert torch.equal(layout.unpack(packed), x)


def test_connections_from_a_to_b_are_contiguous_once_packed():
    layout = VideoLayout.from_segments([(4, 4, 4)], tile=(4, 2, 2))
    queries, keys = slots_of(layout, 0), slots_of(layout, 1)
    assert {0, 1, 4, 5} <= set(queries)
    assert {2, 3, 6, 7} <= set(keys)
    linked = torch.zeros(64, 64, dtype=torch.bool)
    for query in queries:
        linked[query, keys] = True
    packed = linked[layout.pack_map][:, layout.pack_map]
    assert packed[:16, 16:32].all()
    assert packed.sum() == 16 * 16


def test_ragged_edges_of_the_5x3x4_grid():
    layout = VideoLayout.from_segments([(5, 3, 4)], tile=(4, 2, 2))
    assert layout.block_sizes.tolist() == [16, 16, 8, 8, 4, 4, 2, 2]
    assert slots_of(layout, 6) == [56, 57] + [-1] * 14  # t = 4, y = 2, x = 0 and 1
    assert layout.num_tokens == 60
    assert layout.num_slots == 128


def test_segment_table_of_a_mixed_sequence():
    layout = VideoLayout.from_segments(MIXED, tile=(4, 4, 8))
    assert layout.block_size == 128
    assert layout.num_prefix_tiles == 5
    assert layout.video_tile_spans == ((5, 9), (9, 17))
    assert layout.block_sizes.tolist() == [128, 2, 60, 128, 72] + [128] * 12
    assert layout.num_tokens == 1926
    assert layout.num_blocks == 17
    assert layout.num_slots == 17 * 128 == 2176
    assert slots_of(layout, 2)[:3] == [130 + 512, 130 + 513, 130 + 514]  # the image, in block 2
    assert layout.unpack_map[130 + 512] == 2 * 128


@PROPERTY
@given(segment_lists, tiles)
def test_blocks_are_those_of_a_walk_over_the_tiles(segments, tile):
    layout = VideoLayout.from_segments(segments, tile)
    expected = walk_blocks(segments, tile)
    assert layout.num_blocks == len(expected)
    assert layout.block_sizes.tolist() == [len(tokens) for tokens in expected]
    for block, tokens in enumerate(expected):
        padding = [-1] * (layout.block_size - len(tokens))
        assert slots_of(layout, block) == tokens + padding
    counts = [-(-s // layout.block_size) for s in segments if isinstance(s, int)]
    assert layout.num_prefix_tiles == sum(counts)
    for (start, stop), grid in zip(
        layout.video_tile_spans, (s for s in segments if not isinstance(s, int)), strict=True
    ):
        assert sum(map(len, expected[start:stop])) == np.prod(grid)


@PROPERTY
@given(segment_lists, tiles, st.sampled_from(["bhsd", "bshd"]))
def test_pack_then_unpack_is_the_identity(segments, tile, tensor_layout):
    layout = VideoLayout.from_segments(segments, tile)
    x = torch.randn(2, 3, layout.num_tokens, 2)
    if tensor_layout == "bshd":
        x = x.transpose(1, 2)  # strides of a transposed view
    packed = layout.pack(x, tensor_layout=tensor_layout)
    assert torch.equal(layout.unpack(packed, tensor_layout=tensor_layout), x)
    by_slot = packed if tensor_layout == "bhsd" else packed.transpose(1, 2)
    assert by_slot.shape == (2, 3, layout.num_slots, 2)
    assert (by_slot[:, :, layout.pack_map < 0] == 0).all()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_any_dtype_is_packed_exactly(dtype):
    layout = VideoLayout.from_segments([3, (2, 3, 5)], tile=(2, 2, 2))
    x = (torch.arange(layout.num_tokens * 2) % 2).view(1, 1, -1, 2).to(dtype)
    packed = layout.pack(x)
    assert packed.dtype == dtype
    back = layout.unpack(packed)
    assert back.tolist() == x.tolist()


def test_broadcast_gives_tokens_the_value_of_their_block():
    segments, tile = [5, (3, 2, 3), 1], (2, 2, 2)
    layout = VideoLayout.from_segments(segments, tile)
    values = torch.arange(1.0, layout.num_blocks + 1).view(1, 1, -1, 1)
    spread = layout.broadcast(values).flatten().tolist()
    swapped = layout.broadcast(values.transpose(1, 2), tensor_layout="bshd")
    assert swapped.shape == (1, layout.num_tokens, 1, 1)
    assert swapped.flatten().tolist() == spread
    for block, tokens in enumerate(walk_blocks(segments, tile)):
        assert {spread[token] for token in tokens} == {block + 1.0}


def test_gradients_follow_the_maps():
    layout = VideoLayout.from_segments([3, (3, 2, 3)], tile=(2, 2, 2))
    x = torch.randn(1, 2, layout.num_tokens, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(1, 2, layout.num_slots, 2, dtype=torch.float64, requires_grad=True)
    z = torch.randn(1, 2, layout.num_blocks, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layout.pack, x)
    assert torch.autograd.gradcheck(layout.unpack, y)
    assert torch.autograd.gradcheck(layout.broadcast, z)


def test_an_empty_prompt_has_no_block():
    layout = VideoLayout.from_segments([0, (4, 4, 8)])
    assert layout.num_prefix_tiles == 0
    assert layout.video_tile_spans == ((0, 1),)
    assert layout.num_tokens == 128


@pytest.mark.parametrize("segments", [[], [0], [0, 0]])
def test_a_sequence_without_tokens_is_empty(segments):
    layout = VideoLayout.from_segments(segments)
    assert (layout.num_tokens, layout.num_blocks, layout.num_slots) == (0, 0, 0)
    assert layout.video_tile_spans == ()
    assert layout.pack(torch.randn(1, 2, 0, 4)).shape == (1, 2, 0, 4)


def test_layouts_are_cached_and_compared_by_geometry():
    layout = VideoLayout.from_segments([7, (3, 4, 5)], tile=(2, 2, 2))
    same = VideoLayout.from_segments((np.int64(7), torch.Size([3, 4, 5])), tile=[2, 2, 2])
    assert same is layout
    other_device = layout.to("meta")
    assert other_device == layout
    assert hash(other_device) == hash(layout)
    assert other_device.block_sizes.device.type == "meta"
    assert VideoLayout.from_segments([7, (3, 4, 5)], tile=(2, 2, 4)) != layout
    assert VideoLayout.from_segments([7, (3, 5, 4)], tile=(2, 2, 2)) != layout
    assert "block_sizes" not in repr(layout)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tile = (1, 1, 1)


def test_maps_have_the_promised_dtypes():
    layout = VideoLayout.from_segments([7, (3, 4, 5)])
    assert layout.block_sizes.dtype == torch.int32
    assert layout.pack_map.dtype == layout.unpack_map.dtype == torch.int64


def test_a_layout_made_under_inference_mode_serves_training():
    with torch.inference_mode():
        layout = VideoLayout.from_segments([11, (3, 4, 7)], tile=(2, 3, 2))
    x = torch.randn(1, 1, layout.num_tokens, 2, requires_grad=True)
    layout.unpack(layout.pack(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_default_device_does_not_move_the_maps():
    with torch.device("meta"):
        layout = VideoLayout.from_segments([13, (3, 4, 7)], tile=(2, 3, 1))
    assert layout.block_sizes.sum() == layout.num_tokens == 97


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        (5, TypeError, r"segments must be a sequence of token counts .*, got int 5"),
        ("130", TypeError, r"segments must be a sequence .*, got str '130'"),
        ([1, 2.0], TypeError, r"segments\[1\] must be a number of tokens or a \(T, H, W\) grid"),
        ([True], TypeError, r"segments\[0\] must be a number of tokens .*, got bool True"),
        (["abc"], TypeError, r"segments\[0\] must be a number of tokens .*, got str 'abc'"),
        ([3, -1], ValueError, r"segments\[1\] must be at least 0 tokens, got -1"),
        ([(4, 4)], ValueError, r"segments\[0\] must be a triple of ints, got \(4, 4\)"),
        ([(4, 4.0, 4)], TypeError, r"segments\[0\] must be a triple of ints, got \(4, 4.0, 4\)"),
        ([(4, True, 4)], TypeError, r"segments\[0\] must be a triple of ints"),
        ([9, (4, 0, 4)], ValueError, r"segments\[1\] must have dims of at least 1, got \(4, 0"),
    ],
)
def test_wrong_segments_are_named(segments, error, message):
    with pytest.raises(error, match=message):
        VideoLayout.from_segments(segments)


@pytest.mark.parametrize(
    ("tile", "error", "message"),
    [
        (64, TypeError, r"tile must be a triple of ints, got int 64"),
        ((4, 4), ValueError, r"tile must be a triple of ints, got \(4, 4\)"),
        ((4, 4, 8.0), TypeError, r"tile must be a triple of ints"),
        ((4, 0, 8), ValueError, r"tile must have dims of at least 1, got \(4, 0, 8\)"),
    ],
)
def test_a_wrong_tile_is_named(tile, error, message):
    with pytest.raises(error, match=message):
        VideoLayout.from_segments([(4, 4, 4)], tile=tile)


def test_tensors_of_other_shapes_are_refused():
    layout = VideoLayout.from_segments([3, (2, 2, 2)], tile=(2, 2, 2))
    with pytest.raises(TypeError, match="x must be a Tensor, got list"):
        layout.pack([1, 2, 3])
    with pytest.raises(ValueError, match=r"x must be \[B, H, 11, D\] .* got float32 \[1, 2, 12, 4"):
        layout.pack(torch.zeros(1, 2, 12, 4))
    with pytest.raises(ValueError, match=r"x must be \[B, 11, H, D\] for tensor_layout 'bshd'"):
        layout.pack(torch.zeros(1, 2, 11, 4), tensor_layout="bshd")
    with pytest.raises(ValueError, match=r"x must be \[B, H, 16, D\] .* got float32 \[1, 2, 11, 4"):
        layout.unpack(torch.zeros(1, 2, 11, 4))
    with pytest.raises(ValueError, match=r"x must be \[B, H, 2, D\] .* got float32 \[2, 4\]"):
        layout.broadcast(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="tensor_layout must be 'bhsd' or 'bshd', got 'sbhd'"):
        layout.pack(torch.zeros(1, 2, 11, 4), tensor_layout="sbhd")
    with pytest.raises(ValueError, match=r"x must be on the layout's device cpu, got .* on meta"):
        layout.pack(torch.zeros(1, 2, 11, 4, device="meta"))


@pytest.mark.parametrize(
    ("sizes", "pack_map", "unpack_map", "claim"),
    [
        ([3, 1], [0, 1, -1, -1], [0, 1], "block sizes are 1 to 2"),
        ([2, 0], [0, 1, -1, -1], [0, 1], "block sizes are 1 to 2"),
        ([2, 1], [0, 1, 2, -1], [0, 1], "sum to the number of tokens"),
        ([1, 1], [-1, 0, 1, -1], [1, 2], "tokens fill the first slots"),
        ([2, 1], [0, 1, 2, -1], [0, 1, 4], "every token has a slot"),
        ([2, 1], [0, 0, 2, -1], [0, 0, 2], "the maps are inverse"),
    ],
)
def test_maps_that_are_no_bijections_are_internal_errors(sizes, pack_map, unpack_map, claim):
    maps = (torch.tensor(values) for values in (sizes, pack_map, unpack_map))
    with pytest.raises(RuntimeError, match=f"internal error in VideoLayout: .*{claim}"):
        check_maps(*maps)
