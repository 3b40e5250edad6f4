"""Block means against sums over single tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten.vsa import VideoLayout, pool_blocks, route_scores

NAN = math.nan


def loop_means(x, sizes, block_size):
    """Means of [B, H, S, D] by plain Python sums in float64."""
    means = []
    for batch in x.double().tolist():
        for head in batch:
            for block, size in enumerate(sizes):
                tokens = head[block * block_size : block * block_size + size]
                columns = zip(*tokens, strict=True) if tokens else [()] * x.shape[3]
                means.append([math.fsum(column) / max(size, 1) for column in columns])
    return torch.tensor(means, dtype=torch.float64).view(*x.shape[:2], len(sizes), x.shape[3])


def test_means_and_score_of_the_worked_example():
    layout = VideoLayout.from_segments([(4, 4, 4)], tile=(4, 2, 2))
    q_of_t = torch.tensor([[2.0, 0], [0, 2], [2, 2], [0, 0]])
    k_of_t = torch.tensor([[1.0, 0], [1, 0], [3, 2], [3, 2]])
    q, k = (x[:, None, None].expand(4, 4, 4, 2).reshape(1, 1, 64, 2) for x in (q_of_t, k_of_t))
    q_mean, k_mean = pool_blocks(layout.pack(q), layout), pool_blocks(layout.pack(k), layout)
    assert q_mean[0, 0, 0].tolist() == [1, 1]
    assert k_mean[0, 0, 1].tolist() == [2, 1]
    assert route_scores(q_mean, k_mean)[0, 0, 0, 1].item() == pytest.approx(3 / math.sqrt(2))


def test_a_mean_hides_strong_matches_of_single_tokens():
    q, k = torch.tensor([10.0, -10]), torch.tensor([10.0, 10])
    sizes = torch.tensor([2])
    q_mean, k_mean = (pool_blocks(x.view(1, 1, 2, 1), sizes) for x in (q, k))
    assert route_scores(q_mean, k_mean).item() == 0
    assert torch.outer(q, k)[0].tolist() == [100, 100]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_means_over_true_lengths_equal_plain_sums(data):
    block_size = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(0, block_size), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(2, 2, len(sizes) * block_size, 3, generator=generator)
    expected = loop_means(x, sizes, block_size)
    means = pool_blocks(x, torch.tensor(sizes, dtype=torch.int32))
    swapped = pool_blocks(x.transpose(1, 2), torch.tensor(sizes), tensor_layout="bshd")
    for got in (means, swapped):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_padding_reaches_neither_means_nor_gradients():
    layout = VideoLayout.from_segments([5, (3, 2, 3)], tile=(2, 2, 2))
    tokens = torch.randn(1, 2, layout.num_tokens, 4)
    clean = layout.pack(tokens)
    for garbage in (NAN, math.inf, -math.inf, 3e38):
        dirty = clean.clone()
        dirty[:, :, layout.pack_map < 0] = garbage
        dirty.requires_grad_()
        means = pool_blocks(dirty, layout)
        assert torch.equal(means, pool_blocks(clean, layout))
        means.square().sum().backward()
        assert dirty.grad.isfinite().all()
        assert (dirty.grad[:, :, layout.pack_map < 0] == 0).all()


def test_a_block_of_size_0_has_mean_0():
    x = torch.full((1, 1, 4, 2), NAN)
    x[:, :, 2:] = 1
    assert pool_blocks(x, torch.tensor([0, 2])).tolist() == [[[[0, 0], [1, 1]]]]


def test_sizes_are_clamped_to_the_block():
    x = torch.tensor([1.0, 3, 5, 7]).view(1, 1, 4, 1)
    assert pool_blocks(x, torch.tensor([9, -3])).flatten().tolist() == [2, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    x = torch.full((1, 1, 256, 1), 60000.0, dtype=dtype)  # 256 of them overflow float16
    assert pool_blocks(x, torch.tensor([256])).item() == x[0, 0, 0, 0].item()
    ramp = torch.randn(1, 1, 256, 1).to(dtype)
    expected = math.fsum(ramp.double().flatten().tolist()) / 256
    assert pool_blocks(ramp, torch.tensor([256])).item() == pytest.approx(expected, abs=1e-6)


def test_float64_is_pooled_in_float64_and_differentiable():
    layout = VideoLayout.from_segments([3, (3, 2, 3)], tile=(2, 2, 2))
    x = torch.randn(1, 2, layout.num_slots, 2, dtype=torch.float64, requires_grad=True)
    assert pool_blocks(x, layout).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: pool_blocks(x, layout), x)


def test_no_blocks_have_no_means():
    x = torch.zeros(1, 2, 0, 4)
    assert pool_blocks(x, torch.zeros(0, dtype=torch.int32)).shape == (1, 2, 0, 4)
    assert pool_blocks(x, VideoLayout.from_segments([])).shape == (1, 2, 0, 4)


@pytest.mark.parametrize(
    ("x", "sizes", "error", "message"),
    [
        ([1.0], torch.tensor([1]), TypeError, "x must be a floating-point Tensor, got list"),
        (
            torch.zeros(1, 1, 4, 1, dtype=torch.int32),
            torch.tensor([4]),
            TypeError,
            r"x must be a floating-point Tensor, got int32 \[1, 1, 4, 1\]",
        ),
        (torch.zeros(1, 1, 4, 1), [4], TypeError, "block_sizes must be a VideoLayout or an int32"),
        (torch.zeros(1, 1, 4, 1), torch.tensor([4.0]), TypeError, r"block_sizes .* float32 \[1\]"),
        (torch.zeros(1, 1, 4, 1), torch.tensor([[4]]), ValueError, r"block_sizes .* int64 \[1, 1"),
        (torch.zeros(1, 1, 4, 1), torch.tensor([2, 1, 1]), ValueError, "a multiple of the 3 bl"),
        (torch.zeros(1, 1, 4, 1), torch.tensor([0] * 8), ValueError, "a multiple of the 8 blocks"),
        (torch.zeros(1, 1, 4, 1), torch.tensor([1])[:0], ValueError, "a multiple of the 0 blocks"),
        (torch.zeros(1, 4, 1), torch.tensor([4]), ValueError, r"x must be \[B, H, S, D\]"),
        (
            torch.zeros(1, 1, 4, 1, device="meta"),
            torch.tensor([4]),
            ValueError,
            "block_sizes must be on x's device meta, got int64",
        ),
        (
            torch.zeros(1, 1, 4, 1),
            VideoLayout.from_segments([(2, 2, 2)], tile=(2, 2, 2)),
            ValueError,
            r"x must be \[B, H, 8, D\]",
        ),
    ],
)
def test_wrong_arguments_are_named(x, sizes, error, message):
    with pytest.raises(error, match=message):
        pool_blocks(x, sizes)


def test_a_wrong_tensor_layout_is_named():
    with pytest.raises(ValueError, match="tensor_layout must be 'bhsd' or 'bshd', got 'bsd'"):
        pool_blocks(torch.zeros(1, 1, 4, 1), torch.tensor([4]), tensor_layout="bsd")
