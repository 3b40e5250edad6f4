"""Routing against sorted Python lists, and the worked examples of VSA."""

import math
import random
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten.topk import block_topk
from sparse_atten.vsa import VideoLayout, region_budget, route, route_scores

PROPERTY = settings(max_examples=50, deadline=None)
NAN, INF = math.nan, math.inf
# text 130, reference video of 4 tiles, image 60, audio 200, target video of 8 tiles
MIXED = VideoLayout.from_segments([130, (8, 4, 16), 60, 200, (8, 8, 16)])


def chosen(selection, row, batch=0, head=0):
    """Kept ids of a query block, in table order; a dense row keeps all."""
    if row < selection.dense_rows:
        return list(range(selection.kv_block_sizes.shape[0]))
    count = selection.q2k_counts[batch, head, row]
    return selection.q2k_indices[batch, head, row, :count].tolist()


def best(row, start, stop, budget):
    """Ids of the best scores in a region: largest first, ties to the lowest id."""
    ids = [i for i in range(start, stop) if row[i] > -INF]
    return sorted(ids, key=lambda i: (-row[i], i))[:budget]


def scores_of(layout, *rows, batch=1, heads=1):
    """Scores that are the same in all rows, or random without ties."""
    n = layout.num_blocks
    if rows:
        return torch.tensor(rows[0]).expand(batch, heads, n, n)
    return torch.randn(batch, heads, n, n, generator=torch.Generator().manual_seed(n))


def counts_to(n):
    """Videos of n tiles of 1 token."""
    return (1, 1, n)


@pytest.mark.parametrize(
    ("sparsity", "num_blocks", "budget"),
    [
        (0.75, 256, 64),
        (0.75, 4, 1),
        (0.75, 8, 2),
        (0.7, 10, 3),  # binary rounding gives 4
        (0.95, 20, 1),  # and here 2
        (0.85, 20, 3),
        (0.7, 1440, 432),
        (0, 10, 10),
        (0.0, 1, 1),
        (0.999, 3, 1),
        (0.5, 1, 1),
        (0.5, 3, 2),
        (1e-9, 5, 5),
        ("0.7", 10, 3),
        ("2/3", 3, 1),
        (Fraction(2, 3), 9, 3),
        (Decimal("0.70"), 10, 3),
        (np.float64(0.7), 10, 3),
        (np.float32(0.7), 10, 3),
    ],
)
def test_budgets_are_exact(sparsity, num_blocks, budget):
    assert region_budget(sparsity, num_blocks) == budget


@PROPERTY
@given(st.integers(0, 999), st.integers(1, 3000))
def test_budgets_equal_integer_arithmetic(thousandths, num_blocks):
    expected = max(1, -(-(1000 - thousandths) * num_blocks // 1000))
    assert region_budget(thousandths / 1000, num_blocks) == expected
    assert region_budget(Decimal(thousandths) / 1000, num_blocks) == expected


@pytest.mark.parametrize(
    ("sparsity", "num_blocks", "error", "message"),
    [
        (1.0, 4, ValueError, "sparsity must be at least 0 and below 1, got float 1.0"),
        (-0.1, 4, ValueError, "sparsity must be at least 0 and below 1, got float -0.1"),
        (NAN, 4, ValueError, "sparsity must be .*, got float nan"),
        (INF, 4, ValueError, "sparsity must be .*, got float inf"),
        ("most", 4, ValueError, "sparsity must be .*, got str 'most'"),
        ("1/0", 4, ValueError, "sparsity must be .*, got str '1/0'"),
        (True, 4, TypeError, "sparsity must be a number, got bool True"),
        (None, 4, TypeError, "sparsity must be a number, got NoneType None"),
        (torch.tensor(0.5), 4, TypeError, "sparsity must be a number, got float32"),
        (0.5, 0, ValueError, "num_blocks must be at least 1, got 0"),
        (0.5, 2.0, TypeError, "num_blocks must be an int, got float 2.0"),
        (0.5, True, TypeError, "num_blocks must be an int, got bool True"),
    ],
)
def test_wrong_budget_arguments_are_named(sparsity, num_blocks, error, message):
    with pytest.raises(error, match=message):
        region_budget(sparsity, num_blocks)


def test_scores_are_mean_logits_of_the_token_pairs():
    batch, heads, kv_heads, n, m, d = 2, 4, 2, 3, 5, 8
    q = torch.randn(batch, heads, n, m, d, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, n + 1, m, d, dtype=torch.float64)
    scores = route_scores(q.mean(3), k.mean(3))
    assert scores.shape == (batch, heads, n, n + 1)
    for b, h, i, j in np.ndindex(*scores.shape):
        logits = q[b, h, i] @ k[b, h // 2, j].T / math.sqrt(d)
        torch.testing.assert_close(scores[b, h, i, j], logits.mean())
    torch.testing.assert_close(
        route_scores(q.mean(3), k.mean(3), softmax_scale=2.0), scores * 2 * math.sqrt(d)
    )
    single = route_scores(q.mean(3).float(), k.mean(3).float())
    assert single.dtype == torch.float32


@pytest.mark.parametrize(
    ("q_mean", "k_mean", "error", "message"),
    [
        (torch.zeros(1, 2, 3, 4).half(), torch.zeros(1, 2, 3, 4), TypeError, "q_mean must be fl"),
        (torch.zeros(1, 2, 3, 4), [0.0], TypeError, "k_mean must be float32 or float64, got list"),
        (torch.zeros(2, 3, 4), torch.zeros(1, 2, 3, 4), ValueError, r"q_mean must be \[B, H, N, D"),
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4).double(), TypeError, "q_mean's dtype"),
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5), ValueError, r"\[1, Hkv, Nkv, 4\] on"),
        (torch.zeros(2, 2, 3, 4), torch.zeros(1, 2, 3, 4), ValueError, r"\[2, Hkv, Nkv, 4\] on"),
        (torch.zeros(1, 3, 3, 4), torch.zeros(1, 2, 3, 4), ValueError, "multiple of k_mean's 2 h"),
        (torch.zeros(1, 2, 3, 4), torch.zeros(1, 0, 3, 4), ValueError, "multiple of k_mean's 0 h"),
    ],
)
def test_wrong_means_are_named(q_mean, k_mean, error, message):
    with pytest.raises(error, match=message):
        route_scores(q_mean, k_mean)


def test_the_two_best_of_four_blocks():
    layout = VideoLayout.from_segments([(4, 4, 4)], tile=(4, 2, 2))
    selection = route(scores_of(layout, [0.2, 3.1, -0.5, 2.4]), layout, sparsity=0.5)
    assert selection.q2k_indices[0, 0, 0].tolist() == [1, 3]
    assert selection.q2k_counts[0, 0].tolist() == [2] * 4
    assert selection.q2k_indices.dtype == selection.q2k_counts.dtype == torch.int32
    assert (selection.dense_rows, selection.block_size) == (0, 16)


def test_pairs_computed_in_the_4x4x4_example():
    layout = VideoLayout.from_segments([(4, 4, 4)], tile=(4, 2, 2))
    selection = route(scores_of(layout), layout, sparsity=0.5)
    dense = layout.num_tokens**2
    routing = layout.num_blocks**2
    sparse = int(selection.q2k_counts.sum()) * layout.block_size**2
    assert (dense, routing, sparse) == (4096, 16, 2048)


def test_mixed_sequence_keeps_8_blocks_for_video_and_17_for_context():
    selection = route(scores_of(MIXED, heads=3), MIXED, sparsity=0.75)
    assert selection.dense_rows == 5
    assert selection.q2k_indices.shape == (1, 3, 17, 8)  # never the full width
    assert (selection.q2k_indices[:, :, :5] == -1).all()
    assert (selection.q2k_counts[:, :, :5] == 0).all()
    for head in range(3):
        assert [len(chosen(selection, row, head=head)) for row in range(17)] == [17] * 5 + [8] * 12
        for row in range(5, 17):
            ids = chosen(selection, row, head=head)
            assert ids[:5] == [0, 1, 2, 3, 4]
            assert sum(5 <= i < 9 for i in ids) == 1
            assert sum(9 <= i < 17 for i in ids) == 2
    assert selection.kv_block_sizes is MIXED.block_sizes
    assert selection.q_block_sizes is MIXED.block_sizes


def test_r2v_row_with_two_references():
    layout = VideoLayout.from_segments([2, *map(counts_to, (3, 3, 4))], tile=(1, 1, 1))
    #             C0 C1  R0 R1 R2   S0 S1 S2   O0 O1 O2 O3
    row_o1 = [0.0, 0, 0.1, 0.9, 0.2, 0.3, 0.1, 0.8, 0.7, 0.2, 0.1, 0.9]
    selection = route(
        scores_of(layout, row_o1), layout, sparsity=["2/3", Fraction(2, 3), 0.5], policy="exempt"
    )
    assert chosen(selection, row=9) == [0, 1, 3, 7, 8, 11]  # C0 C1, R1, S2, O0 and O3


def test_a_target_video_never_takes_the_quota_of_a_reference():
    layout = VideoLayout.from_segments([1, counts_to(4), counts_to(8)], tile=(1, 1, 1))
    scores = scores_of(layout).clone()
    scores[..., 5:] += 1000
    selection = route(scores, layout, sparsity=0.5)
    for row in range(1, 13):
        ids = chosen(selection, row)
        assert sum(1 <= i < 5 for i in ids) == 2
        assert sum(5 <= i < 13 for i in ids) == 4
    lowered = scores.clone()
    lowered[..., 5:] -= 2000
    assert torch.equal(route(lowered, layout, sparsity=0.5).q2k_indices, selection.q2k_indices)


def test_each_video_may_have_its_own_sparsity():
    selection = route(scores_of(MIXED), MIXED, sparsity=[0.5, 0.75])
    assert selection.q2k_indices.shape[3] == 5 + 2 + 2
    whole_reference = route(scores_of(MIXED), MIXED, sparsity=(0, 0.75))
    for row in range(5, 17):
        assert chosen(whole_reference, row)[:9] == list(range(9))
        assert len(chosen(whole_reference, row)) == 9 + 2


def test_compete_keeps_as_many_but_lets_the_prefix_lose():
    layout = VideoLayout.from_segments([3, counts_to(8)], tile=(1, 1, 1))
    scores = scores_of(layout).clone()
    scores[..., :2] = -50  # the third prefix block wins, the first two lose
    scores[..., 2] = 50
    compete = route(scores, layout, sparsity=0.75, policy="compete")
    exempt = route(scores, layout, sparsity=0.75)
    assert compete.dense_rows == exempt.dense_rows == 3
    for row in range(3, 11):
        ids = chosen(compete, row)
        assert len(ids) == len(chosen(exempt, row)) == 3 + 2
        assert ids == sorted(best(scores[0, 0, row].tolist(), 0, 11, 5))
        assert {0, 1}.isdisjoint(ids)
        assert 2 in ids


@PROPERTY
@given(st.data())
def test_exempt_rows_are_the_prefix_and_the_best_of_each_video(data):
    segments = data.draw(
        st.lists(st.integers(0, 5) | st.integers(1, 9).map(counts_to), min_size=1, max_size=5)
    )
    layout = VideoLayout.from_segments(segments, tile=(1, 1, 2))
    sparsities = [
        data.draw(st.integers(0, 99).map(lambda percent: percent / 100))
        for _ in layout.video_tile_spans
    ]
    n, source = layout.num_blocks, random.Random(data.draw(st.integers(0, 2**31)))
    ties = [[[source.randrange(4) / 2 for _ in range(n)] for _ in range(n)] for _ in range(2)]
    scores = torch.tensor(ties, dtype=torch.float32).view(1, 2, n, n)
    selection = route(scores, layout, sparsity=sparsities)
    for head in range(2):
        for row in range(n):
            expected = set(range(layout.num_prefix_tiles))
            for (start, stop), sparsity in zip(layout.video_tile_spans, sparsities, strict=True):
                budget = region_budget(sparsity, stop - start)
                expected |= set(best(ties[head][row], start, stop, budget))
            if row < layout.num_prefix_tiles:
                expected = set(range(n))
            assert chosen(selection, row, head=head) == sorted(expected)


def test_a_video_alone_is_one_row_of_scores_without_kept_spans(monkeypatch):
    asked = []

    def spy(scores, **options):
        asked.append(options)
        return block_topk(scores, **options)

    monkeypatch.setattr(sys.modules["sparse_atten.vsa.route"], "block_topk", spy)
    layout = VideoLayout.from_segments([counts_to(10)], tile=(1, 1, 1))
    route(scores_of(layout), layout, sparsity=0.7)
    assert asked == [{"regions": [(0, 10, 3)], "keep_spans": []}]


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 500])
def test_routing_on_a_gpu_makes_no_mask_and_no_wide_table(prefix):
    layout = VideoLayout.from_segments([prefix, (21, 45, 80)], device="cuda")
    n = layout.num_blocks
    scores = torch.randn(1, 40, n, n, device="cuda")
    selection = route(scores, layout, sparsity=0.9)
    made = selection.q2k_indices.nbytes + selection.q2k_counts.nbytes
    del selection
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        selection = route(scores, layout, sparsity=0.9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before <= made + 4096
    on_cpu = route(scores[:, :2].cpu(), layout.to("cpu"), sparsity=0.9)
    assert torch.equal(selection.q2k_indices[:, :2].cpu(), on_cpu.q2k_indices)
    assert torch.equal(selection.q2k_counts[:, :2].cpu(), on_cpu.q2k_counts)


def test_unused_slots_are_empty_and_nan_or_minus_inf_is_never_chosen():
    layout = VideoLayout.from_segments([1, counts_to(6)], tile=(1, 1, 1))
    row = [NAN, NAN, -INF, 1.0, NAN, -INF, NAN]  # the prefix is kept whatever its score
    selection = route(scores_of(layout, row), layout, sparsity=0.5)
    assert selection.q2k_indices[0, 0, 1].tolist() == [0, 3, -1, -1]
    assert selection.q2k_counts[0, 0, 1] == 2


def test_a_region_without_sparsity_is_kept_whatever_its_scores():
    layout = VideoLayout.from_segments([1, counts_to(3), counts_to(4)], tile=(1, 1, 1))
    selection = route(scores_of(layout, [NAN] * 8), layout, sparsity=(0, 0.5))
    assert chosen(selection, row=1) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", ["exempt", "compete"])
@pytest.mark.parametrize("segments", [[5], [5, (2, 2, 3)], [(2, 2, 3)], [], [0]])
def test_without_sparsity_all_rows_are_dense_and_the_table_is_empty(segments, policy):
    layout = VideoLayout.from_segments(segments, tile=(1, 2, 2))
    selection = route(scores_of(layout, heads=2), layout, sparsity=0, policy=policy)
    n = layout.num_blocks
    assert selection.dense_rows == n
    assert selection.q2k_indices.shape == (1, 2, n, 0)
    assert selection.q2k_counts.tolist() == [[[0] * n] * 2]


def test_a_sequence_without_video_is_dense_at_any_sparsity():
    layout = VideoLayout.from_segments([300, 7])
    for sparsity in (0.9, []):
        assert route(scores_of(layout), layout, sparsity=sparsity).dense_rows == 4


def test_a_video_alone_has_no_dense_row():
    layout = VideoLayout.from_segments([(4, 4, 32)])
    selection = route(scores_of(layout), layout, sparsity=0.5)
    assert selection.dense_rows == 0
    for row in range(4):
        assert chosen(selection, row) == sorted(
            best(scores_of(layout)[0, 0, row].tolist(), 0, 4, 2)
        )


def test_double_scores_and_strides_do_not_change_the_choice():
    scores = scores_of(MIXED, batch=2, heads=2)
    selection = route(scores, MIXED, sparsity=0.75)
    assert torch.equal(
        route(scores.double(), MIXED, sparsity=0.75).q2k_indices, selection.q2k_indices
    )
    strided = scores.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(route(strided, MIXED, sparsity=0.75).q2k_indices, selection.q2k_indices)


def test_no_gradient_flows_through_the_choice():
    scores = scores_of(MIXED).clone().requires_grad_()
    assert not route(scores, MIXED, sparsity=0.75).q2k_indices.requires_grad


def test_the_tensor_layout_is_handed_on():
    assert route(scores_of(MIXED), MIXED, sparsity=0.5, tensor_layout="bshd").layout == "bshd"


def test_budgets_beyond_the_top_k_are_not_supported():
    layout = VideoLayout.from_segments([2, counts_to(1030)], tile=(1, 1, 1))
    scores = torch.zeros(1, 1, 1, 1032).expand(1, 1, 1032, 1032)
    message = "sparsity 0.5 keeps 515 of the 1030 blocks 2 to 1031; supported: up to 512, or all"
    with pytest.raises(NotImplementedError, match=message):
        route(scores, layout, sparsity=0.5)
    assert route(scores, layout, sparsity=0).dense_rows == 1032


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": [1.0]}, TypeError, r"scores must be float32 or float64 \[B, Hq, 17, 17\], got"),
        ({"scores": torch.zeros(1, 1, 17, 17).half()}, TypeError, r"got float16 \[1, 1, 17, 17\]"),
        ({"scores": torch.zeros(1, 17, 17)}, ValueError, r"scores must be .*, got float32 \[1, 17"),
        ({"scores": torch.zeros(1, 1, 16, 17)}, ValueError, r"got float32 \[1, 1, 16, 17\]"),
        (
            {"scores": torch.zeros(1, 1, 17, 17, device="meta")},
            ValueError,
            "scores must be on the layout's device cpu, got .* on meta",
        ),
        ({"layout": None}, TypeError, "layout must be a VideoLayout, got NoneType None"),
        ({"policy": "share"}, ValueError, "policy must be 'exempt' or 'compete', got 'share'"),
        ({"policy": "compete"}, ValueError, "policy 'compete' needs .* at most 1 video, got 2"),
        ({"sparsity": [0.5]}, ValueError, "one number or one for each of the 2 videos, got 1"),
        ({"sparsity": [0.5, 1.5]}, ValueError, r"sparsity\[1\] must be at least 0 and below 1"),
        ({"sparsity": [0.5, None]}, TypeError, r"sparsity\[1\] must be a number, got NoneType"),
        ({"sparsity": 1}, ValueError, "sparsity must be at least 0 and below 1, got int 1"),
        ({"tensor_layout": "sbhd"}, ValueError, "tensor_layout must be 'bhsd' or 'bshd', got 'sb"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {"scores": torch.zeros(1, 1, 17, 17), "layout": MIXED, "sparsity": 0.5} | change
    with pytest.raises(error, match=message):
        route(arguments.pop("scores"), arguments.pop("layout"), **arguments)


def test_sparsity_is_checked_even_without_a_video():
    layout = VideoLayout.from_segments([5])
    with pytest.raises(ValueError, match="sparsity must be at least 0 and below 1"):
        route(scores_of(layout), layout, sparsity=2)
