"""video_sparse_attention against masked attention over single tokens in sequence order, float64."""

import math
from fractions import Fraction

import pytest
import torch
from test_vsa_layout import MIXED, walk_blocks

from sparse_atten import sparse_atten_func
from sparse_atten.vsa import (
    VideoLayout,
    coarse_attention,
    pool_blocks,
    route,
    route_scores,
    video_sparse_attention,
)

NAN = math.nan
TEACHING = ([(4, 4, 4)], (4, 2, 2))
RAGGED = ([(5, 3, 4)], (4, 2, 2))
R2V = ([5, (3, 2, 4), 9, (2, 3, 3), 3, (3, 4, 3)], (2, 2, 2))


def inputs(layout, *, heads=4, kv_heads=2, head_dim=16, value_dim=16, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    return [torch.randn(batch, h, layout.num_tokens, d, generator=generator) for h, d in shapes]


def block_of_each_token(segments, tile):
    blocks = walk_blocks(segments, tile)
    owner = {token: block for block, tokens in enumerate(blocks) for token in tokens}
    return [owner[token] for token in range(len(owner))]


def choose_by_definition(q, k, segments, tile, sparsity):
    """Scores by plain means in sequence order, and for each (batch, head, block) the kept set."""
    blocks = walk_blocks(segments, tile)
    num_prefix = len(walk_blocks([s for s in segments if isinstance(s, int)], tile))
    spans, start = [], num_prefix
    for grid in (s for s in segments if not isinstance(s, int)):
        stop = start + len(walk_blocks([grid], tile))
        spans.append((start, stop))
        start = stop
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    q_mean, k_mean = (
        torch.stack([x[:, :, tokens].double().mean(2) for tokens in blocks], 2) for x in (q, k)
    )
    scores = torch.einsum("bhid,bhjd->bhij", q_mean, k_mean) / math.sqrt(q.shape[3])
    kept = {}
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i, row in enumerate(scores[b, h].tolist()):
                ids = set(range(num_prefix)) if i >= num_prefix else set(range(len(blocks)))
                for low, high in spans if i >= num_prefix else ():
                    budget = math.ceil((1 - Fraction(str(sparsity))) * (high - low))
                    ids |= set(sorted(range(low, high), key=lambda j: -row[j])[:budget])
                kept[b, h, i] = ids
    return scores, kept


def token_mask(kept, owner, batch, heads):
    """Which key each query sees, bool [B, H, S, S] in sequence order."""
    num_blocks = max(owner) + 1
    table = torch.zeros(batch, heads, num_blocks, num_blocks, dtype=torch.bool)
    for (b, h, i), ids in kept.items():
        table[b, h, i, list(ids)] = True
    return table[:, :, owner][..., owner]


def masked_attention(q, k, v, mask, *, scale=0.25, dtype=torch.float64):
    """Attention over an explicit mask, and its LSE."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    group = q.shape[1] // k.shape[1]
    logits = scale * q @ k.repeat_interleave(group, 1).transpose(2, 3)
    logits = logits.masked_fill(~mask, -math.inf)
    return logits.softmax(-1) @ v.repeat_interleave(group, 1), logits.logsumexp(-1)


def assert_within_budget(out, expected, comparison, *, inputs, scale=0.25):
    """At most twice the error of a plain run in the inputs' precision, plus rounding."""
    assert out.isfinite().all()
    q, k, v = inputs
    grouped = q.double().unflatten(1, (k.shape[1], -1))
    largest = (scale * grouped @ k.double()[:, :, None].transpose(3, 4)).abs().max()
    budget = 2 * (comparison.double() - expected).abs().max() + 1e-5
    budget += 1e-6 * largest * v.double().abs().max()
    error = (out.double() - expected).abs()
    worst = error.argmax().item()
    assert error.max() <= budget, f"{error.max()} > {budget} at flat index {worst}"


@pytest.mark.parametrize(("segments", "tile"), [TEACHING, RAGGED, R2V])
@pytest.mark.parametrize("sparsity", [0.5, 0.75])
@pytest.mark.parametrize("tensor_layout", ["bhsd", "bshd"])
def test_equals_masked_attention_in_sequence_order(segments, tile, sparsity, tensor_layout):
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = inputs(layout)
    scores, kept = choose_by_definition(q, k, segments, tile, sparsity)
    mask = token_mask(kept, block_of_each_token(segments, tile), *q.shape[:2])
    expected, expected_lse = masked_attention(q, k, v, mask)
    comparison, _ = masked_attention(q, k, v, mask, dtype=torch.float32)

    given = (q, k, v)
    if tensor_layout == "bshd":
        given = [x.transpose(1, 2).contiguous() for x in given]
    out, details = video_sparse_attention(
        *given, layout, sparsity=sparsity, tensor_layout=tensor_layout, return_details=True
    )
    if tensor_layout == "bshd":
        out = out.transpose(1, 2)
    assert out.shape == q.shape
    assert_within_budget(out, expected, comparison, inputs=(q, k, v))
    torch.testing.assert_close(details.lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(details.scores.double(), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("segments", "tile"), [TEACHING, RAGGED, R2V, ([40], (2, 2, 2))])
def test_all_blocks_kept_is_dense_attention(segments, tile):
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = inputs(layout, value_dim=24)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    expected, _ = masked_attention(q, k, v, everything)
    comparison, _ = masked_attention(q, k, v, everything, dtype=torch.float32)
    for policy in ("exempt", "compete") if len(layout.video_tile_spans) < 2 else ("exempt",):
        out = video_sparse_attention(q, k, v, layout, sparsity=0, policy=policy)
        assert_within_budget(out, expected, comparison, inputs=(q, k, v))


def test_mixed_sequence_with_its_128_token_blocks():
    layout = VideoLayout.from_segments(MIXED)
    q, k, v = inputs(layout, heads=1, kv_heads=1, head_dim=32, value_dim=32, batch=1)
    _, kept = choose_by_definition(q, k, MIXED, (4, 4, 8), 0.75)
    assert [len(kept[0, 0, i]) for i in range(17)] == [17] * 5 + [8] * 12
    mask = token_mask(kept, block_of_each_token(MIXED, (4, 4, 8)), 1, 1)
    scale = 1 / math.sqrt(32)
    expected, _ = masked_attention(q, k, v, mask, scale=scale)
    comparison, _ = masked_attention(q, k, v, mask, scale=scale, dtype=torch.float32)
    out = video_sparse_attention(q, k, v, layout, sparsity=0.75)
    assert_within_budget(out, expected, comparison, inputs=(q, k, v), scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1, 16])
def test_half_precision_and_large_logits(dtype, magnitude):
    segments, tile = R2V
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = ((magnitude * x).to(dtype) for x in inputs(layout))
    out, details = video_sparse_attention(q, k, v, layout, sparsity=0.5, return_details=True)
    assert out.dtype == dtype
    kept = kept_sets(details.selection)
    mask = token_mask(kept, block_of_each_token(segments, tile), *q.shape[:2])
    expected, _ = masked_attention(q, k, v, mask)
    group_v = v.repeat_interleave(2, 1)
    logits = 0.25 * q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3)
    weights = logits.masked_fill(~mask, -math.inf).softmax(-1).to(dtype)
    comparison = (weights.float() @ group_v.float()).to(dtype)
    assert_within_budget(out, expected, comparison, inputs=(q, k, v))


def kept_sets(selection):
    """Kept ids of each (batch, head, query block) of a selection."""
    num_blocks = selection.kv_block_sizes.shape[0]
    kept = {}
    for b, heads in enumerate(selection.q2k_indices.tolist()):
        for h, rows in enumerate(heads):
            for i, ids in enumerate(rows):
                count = selection.q2k_counts[b, h, i]
                kept[b, h, i] = set(ids[:count])
                if i < selection.dense_rows:
                    kept[b, h, i] = set(range(num_blocks))
    return kept


def test_one_softmax_over_the_union_of_prefix_and_videos():
    segments, tile = [2, (1, 1, 4), (1, 1, 4)], (1, 1, 1)
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = inputs(layout, heads=1, kv_heads=1, batch=1)
    out, details = video_sparse_attention(q, k, v, layout, sparsity=0.5, return_details=True)
    query = 9
    groups = [
        sorted(i for i in kept_sets(details.selection)[0, 0, query] if i in span)
        for span in (range(2), range(2, 6), range(6, 10))
    ]
    assert [len(group) for group in groups] == [2, 2, 2]
    logits = (q[0, 0, query].double() @ k[0, 0].double().T) / 4
    lses = torch.stack([logits[group].logsumexp(0) for group in groups])
    parts = torch.stack([logits[g].softmax(0) @ v[0, 0, g].double() for g in groups])
    merged = lses.softmax(0) @ parts
    torch.testing.assert_close(out[0, 0, query].double(), merged, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        details.lse[0, 0, query].double(), lses.logsumexp(0), rtol=1e-5, atol=1e-5
    )
    assert (parts.sum(0) - merged).abs().max() > 0.1  # one softmax for each group differs


def test_scale_is_that_of_attention_scores_and_coarse_branch():
    segments, tile = R2V
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = inputs(layout)
    gate = torch.full((), 0.5)
    warm = video_sparse_attention(
        q, k, v, layout, sparsity=0.5, softmax_scale=1.0, gate=gate, return_details=True
    )
    same = video_sparse_attention(
        4 * q,
        k,
        v,
        layout,
        sparsity=0.5,
        gate=gate,
        return_details=True,  # 4 = sqrt(head dim)
    )
    torch.testing.assert_close(warm[0], same[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(warm[1].scores, same[1].scores, rtol=1e-5, atol=1e-5)
    plain = video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=gate, return_details=True)
    assert kept_sets(plain[1].selection) == kept_sets(warm[1].selection)
    assert (plain[0] - warm[0]).abs().max() > 0.01


def coarse_by_definition(q, k, v, segments, tile):
    """softmax(E) mean(v) of each token's block, by plain means in sequence order."""
    scores, _ = choose_by_definition(q, k, segments, tile, 0.5)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1).double()
    v_mean = torch.stack([v[:, :, tokens].mean(2) for tokens in walk_blocks(segments, tile)], 2)
    return (scores.softmax(-1) @ v_mean)[:, :, block_of_each_token(segments, tile)]


@pytest.mark.parametrize("gate_shape", [(), (2, 4, None, 24), (1, 4, 1, 1), (2, 1, None, 1), (24,)])
@pytest.mark.parametrize("tensor_layout", ["bhsd", "bshd"])
def test_coarse_branch_is_added_with_its_gate(gate_shape, tensor_layout):
    segments, tile = R2V
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = inputs(layout, value_dim=24)
    gate = torch.randn([layout.num_tokens if size is None else size for size in gate_shape])
    sparse = video_sparse_attention(q, k, v, layout, sparsity=0.5)
    expected = sparse.double() + gate.double() * coarse_by_definition(q, k, v, segments, tile)
    if tensor_layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        gate = gate.transpose(1, 2) if gate.dim() == 4 else gate
    out = video_sparse_attention(
        q, k, v, layout, sparsity=0.5, gate=gate, tensor_layout=tensor_layout
    )
    if tensor_layout == "bshd":
        out = out.transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_gate_of_zero_changes_nothing_and_the_output_keeps_its_dtype():
    layout = VideoLayout.from_segments(*RAGGED)
    q, k, v = (x.bfloat16() for x in inputs(layout))
    plain = video_sparse_attention(q, k, v, layout, sparsity=0.5)
    gated = video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=torch.zeros(1))
    assert gated.dtype == torch.bfloat16
    assert torch.equal(gated, plain)


def test_blocks_of_size_0_take_no_part_in_the_coarse_softmax():
    scores = torch.randn(1, 4, 3, 5)
    v_mean = torch.randn(1, 2, 5, 6)
    sizes = torch.tensor([3, 0, 2, 0, 1], dtype=torch.int32)
    present = [0, 2, 4]
    expected = torch.stack(
        [scores[0, h][:, present].softmax(-1) @ v_mean[0, h // 2, present] for h in range(4)]
    )
    scores[..., 1], v_mean[:, :, 1] = 1e30, NAN
    scores[..., 3], v_mean[:, :, 3] = NAN, math.inf
    torch.testing.assert_close(coarse_attention(scores, v_mean, sizes)[0], expected)
    nothing = coarse_attention(scores, v_mean, torch.zeros(5, dtype=torch.int32))
    assert torch.equal(nothing, torch.zeros(1, 4, 3, 6))


@pytest.mark.parametrize(
    ("scores", "v_mean", "sizes", "error", "message"),
    [
        ((1, 2, 3, 3), (1, 2, 3), 3, ValueError, r"v_mean must have 4 dims, got float32 \[1, 2, 3"),
        ((1, 2, 3, 3), (1, 2, 4, 8), 3, ValueError, r"v_mean must be \[1, Hkv, 3, D\] on cpu, got"),
        ((1, 3, 3, 3), (1, 2, 3, 8), 3, ValueError, "scores must have a multiple of v_mean's 2 he"),
        ((1, 2, 3, 3), (1, 2, 3, 8), 4, ValueError, r"block_sizes must be \[3\] on cpu, got int64"),
    ],
)
def test_wrong_coarse_arguments_are_named(scores, v_mean, sizes, error, message):
    with pytest.raises(error, match=message):
        coarse_attention(torch.zeros(scores), torch.zeros(v_mean), torch.ones(sizes).long())
    with pytest.raises(TypeError, match="scores must be float32 or float64, got float16"):
        coarse_attention(torch.zeros(scores).half(), torch.zeros(v_mean), torch.ones(sizes))
    with pytest.raises(TypeError, match=r"v_mean must have scores' dtype torch.float64, got"):
        coarse_attention(
            torch.zeros(1, 2, 3, 3).double(), torch.zeros(1, 2, 3, 8), torch.ones(3).long()
        )


def test_the_stages_one_by_one_give_the_same_output():
    segments, tile = R2V
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = inputs(layout)
    packed = [layout.pack(x) for x in (q, k, v)]
    q_mean, k_mean, v_mean = (pool_blocks(x, layout) for x in packed)
    scores = route_scores(q_mean, k_mean)
    selection = route(scores, layout, sparsity=0.5)
    out = layout.unpack(sparse_atten_func(*packed, selection))
    out = out + layout.broadcast(coarse_attention(scores, v_mean, layout.block_sizes))
    whole = video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=torch.ones(()))
    torch.testing.assert_close(out, whole)


@pytest.mark.parametrize("with_gate", [False, True])
def test_gradients_are_those_of_masked_attention(with_gate):
    segments, tile = R2V
    layout = VideoLayout.from_segments(segments, tile)
    q, k, v = (x.double().requires_grad_() for x in inputs(layout, value_dim=8))
    leaves = [q, k, v]
    gate = None
    if with_gate:
        gate = torch.randn(2, 4, layout.num_tokens, 1, dtype=torch.float64, requires_grad=True)
        leaves.append(gate)
    out, details = video_sparse_attention(
        q, k, v, layout, sparsity=0.5, gate=gate, return_details=True
    )
    weight = torch.randn(out.shape, dtype=torch.float64)
    grads = torch.autograd.grad((out * weight).sum(), leaves)

    mask = token_mask(
        kept_sets(details.selection), block_of_each_token(segments, tile), *q.shape[:2]
    )
    expected, _ = masked_attention(q, k, v, mask)
    if with_gate:
        expected = expected + gate * coarse_by_definition(q, k, v, segments, tile)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for got, wanted in zip(
        grads, torch.autograd.grad((expected * weight).sum(), leaves), strict=True
    ):
        # The backward pass starts from the LSE, whose float32 rounding the probabilities inherit.
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_views_of_a_joint_projection_are_accepted_and_left_alone():
    layout = VideoLayout.from_segments(*RAGGED)
    joint = torch.randn(2, layout.num_tokens, 3, 4, 16)
    before = joint.clone()
    views = [joint[:, :, i].transpose(1, 2) for i in range(3)]
    out = video_sparse_attention(*views, layout, sparsity=0.5)
    copies = [view.contiguous() for view in views]
    torch.testing.assert_close(out, video_sparse_attention(*copies, layout, sparsity=0.5))
    assert torch.equal(joint, before)


@pytest.mark.parametrize("segments", [[], [0], [5], [(1, 1, 1)]])
@pytest.mark.parametrize("batch", [0, 1])
def test_tiny_and_empty_sequences(segments, batch):
    layout = VideoLayout.from_segments(segments, tile=(2, 2, 2))
    q, k, v = inputs(layout, batch=batch)
    out = video_sparse_attention(q, k, v, layout, sparsity=0.9, gate=torch.ones(()))
    assert out.shape == q.shape
    assert out.isfinite().all()


def test_it_compiles_without_a_graph_break():
    layout = VideoLayout.from_segments(*R2V)
    q, k, v = inputs(layout)
    gate = torch.full((), 0.5)

    def attend(q, k, v, gate):
        return video_sparse_attention(q, k, v, layout, sparsity=0.7, gate=gate)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, gate), attend(q, k, v, gate))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layout": [5]}, TypeError, r"layout must be a VideoLayout, got list \[5\]"),
        ({"q": None}, TypeError, "q must be a Tensor, got NoneType None"),
        (
            {"q": (2, 4, 65, 16)},
            ValueError,
            r"q must be \[B, H, 60, D\] .*, got float32 \[2, 4, 65",
        ),
        ({"k": (2, 60, 2, 16)}, ValueError, r"k must be \[B, H, 60, D\] for tensor_layout 'bhsd'"),
        ({"v": (60, 16)}, ValueError, r"v must be \[B, H, 60, D\] .*, got float32 \[60, 16\]"),
        ({"k": (2, 2, 60, 8)}, ValueError, "k must have the batch and head dim of q, "),
        ({"k": (1, 2, 60, 16)}, ValueError, "k must have the batch and head dim of q, "),
        ({"v": (2, 1, 60, 16)}, ValueError, "v must have the batch and heads of k, "),
        ({"q": (2, 3, 60, 16)}, ValueError, "q must have a multiple of k's 2 heads, got 3 heads"),
        ({"q": torch.zeros(2, 4, 60, 16).int()}, TypeError, "q must be q's dtype, .* got int32"),
        ({"v": torch.zeros(2, 2, 60, 16).half()}, TypeError, "v must be q's dtype, .* got float16"),
        (
            {"k": torch.zeros(2, 2, 60, 16, device="meta")},
            ValueError,
            "k must be on the layout's device cpu, got float32 .* on meta",
        ),
        ({"gate": 0.5}, TypeError, "gate must be a floating-point Tensor or None, got float 0.5"),
        ({"gate": (2, 4, 61, 1)}, ValueError, r"gate must be broadcastable to \[2, 4, 60, 16\]"),
        ({"gate": (1, 2, 4, 60, 16)}, ValueError, r"gate must be broadcastable to \[2, 4, 60, 16"),
        ({"gate": torch.zeros((), device="meta")}, ValueError, "gate must be on q's device cpu"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be a finite float > 0, got 0.0"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a finite float > 0, got str"),
        ({"sparsity": 1.0}, ValueError, "sparsity must be at least 0 and below 1, got float 1.0"),
        ({"policy": "all"}, ValueError, "policy must be 'exempt' or 'compete', got 'all'"),
        ({"tensor_layout": "bs"}, ValueError, "tensor_layout must be 'bhsd' or 'bshd', got 'bs'"),
        ({"backend": "fast"}, ValueError, "backend must be one of .*, got 'fast'"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {
        "q": (2, 4, 60, 16),
        "k": (2, 2, 60, 16),
        "v": (2, 2, 60, 16),
        "layout": VideoLayout.from_segments(*RAGGED),
        "sparsity": 0.5,
    } | change
    for name in ("q", "k", "v", "gate"):
        if isinstance(arguments.get(name), tuple):
            arguments[name] = torch.zeros(arguments[name])
    with pytest.raises(error, match=message):
        video_sparse_attention(**arguments)
