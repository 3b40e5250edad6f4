"""The stages in one pass, as torch runs them; test_packing.py has the kernels."""

import pytest
import torch

from sparse_atten.vsa import VideoLayout, pack_and_pool, pool_blocks, unpack_gated

SEGMENTS, TILE = [5, (3, 2, 4), 9, (2, 3, 3)], (2, 2, 2)
NAN = float("nan")


def tokens(layout, heads, head_dim, *, seed=0, rows=None):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, rows or layout.num_tokens, head_dim, generator=generator)


@pytest.mark.parametrize("tensor_layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("num_pooled", [0, 2, 3])
def test_packing_and_pooling_equals_its_parts(tensor_layout, num_pooled):
    layout = VideoLayout.from_segments(SEGMENTS, TILE)
    x = [tokens(layout, heads, dim, seed=heads) for heads, dim in ((4, 16), (2, 16), (1, 8))]
    if tensor_layout == "bshd":
        x = [y.transpose(1, 2) for y in x]
    packed, means = pack_and_pool(x, layout, num_pooled=num_pooled, tensor_layout=tensor_layout)
    assert (len(packed), len(means)) == (3, num_pooled)
    for y, moved in zip(x, packed, strict=True):
        assert torch.equal(moved, layout.pack(y, tensor_layout=tensor_layout))
    for moved, mean in zip(packed, means, strict=False):
        assert torch.equal(mean, pool_blocks(moved, layout, tensor_layout=tensor_layout))


def test_no_gradient_flows_through_means_that_only_choose():
    layout = VideoLayout.from_segments(SEGMENTS, TILE)
    x = [tokens(layout, 2, 8).requires_grad_() for _ in range(3)]
    packed, means = pack_and_pool(x, layout, num_pooled=2)
    assert all(y.requires_grad for y in packed)
    assert not any(y.requires_grad for y in means)
    assert all(y.requires_grad for y in pack_and_pool(x, layout, num_pooled=3)[1])


@pytest.mark.parametrize("tensor_layout", ["bhsd", "bshd"])
def test_gated_unpacking_by_plain_loops(tensor_layout):
    layout = VideoLayout.from_segments(SEGMENTS, TILE)
    packed = tokens(layout, 3, 4, rows=layout.num_slots)
    packed[:, :, layout.pack_map < 0] = NAN
    gate, coarse = tokens(layout, 3, 1, seed=1), tokens(layout, 3, 4, rows=layout.num_blocks)
    expected = torch.empty(2, 3, layout.num_tokens, 4)
    for slot, token in enumerate(layout.pack_map.tolist()):
        if token >= 0:
            added = gate[:, :, token] * coarse[:, :, slot // layout.block_size]
            expected[:, :, token] = packed[:, :, slot] + added
    if tensor_layout == "bshd":
        packed, gate, expected = (x.transpose(1, 2) for x in (packed, gate, expected))
    found = unpack_gated(packed, gate, coarse, layout, tensor_layout=tensor_layout)
    torch.testing.assert_close(found, expected)


def test_gradients_of_gated_unpacking():
    layout = VideoLayout.from_segments([3, (2, 1, 3)], TILE)
    shapes = [
        (1, 2, layout.num_slots, 2),
        (1, 2, layout.num_tokens, 1),
        (1, 2, layout.num_blocks, 2),
    ]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda *x: unpack_gated(*x, layout), inputs)


LAYOUT = VideoLayout.from_segments(SEGMENTS, TILE)
GIVEN = {
    "packed": torch.zeros(2, 3, LAYOUT.num_slots, 4),
    "gate": torch.zeros(4),
    "coarse": torch.zeros(2, 3, LAYOUT.num_blocks, 4),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"packed": torch.zeros(2, 3, 7, 4)}, ValueError, r"packed must be \[B, H, 88, D\]"),
        ({"packed": None}, TypeError, "packed must be a Tensor, got NoneType None"),
        ({"gate": 0.5}, TypeError, "gate must be a floating-point Tensor or None, got float 0.5"),
        ({"gate": torch.zeros(3)}, ValueError, r"broadcastable to \[2, 3, 56, 4\], got float32"),
        (
            {"gate": torch.zeros(4, device="meta")},
            ValueError,
            "gate must be on packed's device cpu",
        ),
        ({"coarse": torch.zeros(2, 3, 12, 4)}, ValueError, r"coarse must be \[B, H, 11, D\]"),
        (
            {"coarse": torch.zeros(2, 1, 11, 4)},
            ValueError,
            r"coarse must be \[2, 3, 11, 4\], got fl",
        ),
    ],
)
def test_wrong_arguments_of_gated_unpacking_are_named(change, error, message):
    with pytest.raises(error, match=message):
        unpack_gated(*(GIVEN | change).values(), LAYOUT)


def test_wrong_arguments_of_packing_are_named():
    x = torch.zeros(2, 3, LAYOUT.num_tokens, 4)
    with pytest.raises(ValueError, match=r"tensors\[1\] must be \[B, H, 56, D\]"):
        pack_and_pool([x, x[:, :, 1:]], LAYOUT, num_pooled=1)
    with pytest.raises(ValueError, match=r"num_pooled must be in 0\.\.2, got 3"):
        pack_and_pool([x, x], LAYOUT, num_pooled=3)
    with pytest.raises(TypeError, match=r"num_pooled must be an int, got float 1\.0"):
        pack_and_pool([x, x], LAYOUT, num_pooled=1.0)
