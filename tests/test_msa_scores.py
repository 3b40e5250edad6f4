"""Block-max scores against a loop over queries and keys."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten.msa import block_max_scores
from sparse_atten.msa.scores import BlockScorer, scorer_of


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths):
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def index_problem(
    q_lengths, k_lengths, *, heads=2, key_heads=1, dim=4, block=8, padding=0, seed=0,
    dtype=torch.float32,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    q_idx = torch.randn(sum(q_lengths) + padding, heads, dim, generator=generator).to(dtype)
    k_idx = torch.randn(sum(k_lengths), key_heads, dim, generator=generator).to(dtype)
    fields = {
        "cu_seqlens_q": offsets(q_lengths),
        "cu_seqlens_k": offsets(k_lengths),
        "max_seqlen_q": max(q_lengths, default=0),
        "max_seqlen_k": max(k_lengths, default=0),
        "block_size": block,
    }
    return q_idx, k_idx, fields


def paged(k_idx, fields, layout, *, spare=2):
    """Move the keys into shuffled pages; the rest of the pool is NaN."""
    block, ends = fields["block_size"], fields["cu_seqlens_k"].tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    blocks = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(blocks) + spare, generator=torch.Generator().manual_seed(5)).tolist()
    pool = torch.full((len(order), block, *k_idx.shape[1:]), math.nan, dtype=k_idx.dtype)
    table = torch.full((len(lengths), max(blocks, default=0)), -1, dtype=torch.int32)
    for b, count in enumerate(blocks):
        for j in range(count):
            page = table[b, j] = order.pop()
            rows = k_idx[ends[b] + j * block : min(ends[b] + (j + 1) * block, ends[b + 1])]
            pool[page, : rows.shape[0]] = rows
    fields = fields | {
        "cu_seqlens_k": None, "page_table": table, "seqused_k": int32(lengths), "kv_layout": layout,
    }  # fmt: skip
    return pool if layout == "nhd" else pool.transpose(1, 2).contiguous(), fields


def scores_by_loop(q_idx, k_idx, fields, *, causal, scale=None):
    """Float64 [Hidx, n, Tq], one query and one key at a time."""
    num_queries, heads, dim = q_idx.shape
    block, scale = fields["block_size"], scale or 1 / math.sqrt(dim)
    group = heads // k_idx.shape[1]
    num_blocks = -(-fields["max_seqlen_k"] // block)
    scores = torch.full((heads, num_blocks, num_queries), -math.inf, dtype=torch.float64)
    bounds = (pairwise(fields[name].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for (q_start, q_stop), (k_start, k_stop) in zip(*bounds, strict=True):
        hidden = (k_stop - k_start) - (q_stop - q_start)
        for i in range(q_stop - q_start):
            for j in range(k_stop - k_start):
                if causal and j > i + hidden:
                    continue
                for h in range(heads):
                    products = q_idx[q_start + i, h].double() * k_idx[k_start + j, h // group]
                    best = scores[h, j // block, q_start + i]
                    best.copy_(torch.maximum(best, scale * products.sum()))
    return scores


CASES = {
    "equal": ((9, 0, 8, 1), (9, 0, 8, 1)),
    "queries longer": ((12, 3, 7), (5, 0, 8)),
    "keys longer": ((2, 5, 0), (19, 16, 3)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_a_loop(case, causal):
    q_idx, k_idx, fields = index_problem(*CASES[case], padding=2)
    scores = block_max_scores(q_idx, k_idx, causal=causal, **fields)
    assert scores.dtype == torch.float32
    wanted = scores_by_loop(q_idx, k_idx, fields, causal=causal)
    torch.testing.assert_close(scores.double(), wanted, atol=1e-6, rtol=1e-6)


def test_scores_by_hand():
    # One head of one dim, blocks of 2, the last 3 of 5 positions as queries.
    q_idx = torch.tensor([1.0, -1.0, 2.0]).view(3, 1, 1)
    k_idx = torch.tensor([3.0, 1.0, -2.0, 4.0, 5.0]).view(5, 1, 1)
    fields = {"cu_seqlens_q": offsets([3]), "cu_seqlens_k": offsets([5]), "block_size": 2}
    fields |= {"max_seqlen_q": 3, "max_seqlen_k": 6}  # bounds may be larger
    scores = block_max_scores(q_idx, k_idx, scale=10, **fields)
    never = -math.inf
    assert scores[0].T.tolist() == [[30, -20, never], [-10, 20, never], [60, 80, 100]]
    dense = block_max_scores(q_idx, k_idx, causal=False, scale=10, **fields)
    assert dense[0].T.tolist() == [[30, 40, 50], [-10, 20, -50], [60, 80, 100]]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_batches(data):
    draw = data.draw
    pairs = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 12)), max_size=3))
    key_heads = draw(st.sampled_from([1, 2]))
    q_idx, k_idx, fields = index_problem(
        *([q for q, _ in pairs], [k for _, k in pairs]),
        heads=key_heads * draw(st.sampled_from([1, 3])),
        key_heads=key_heads,
        block=draw(st.sampled_from([1, 3, 8])),
        padding=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 99)),
    )
    causal = draw(st.booleans())
    wanted = scores_by_loop(q_idx, k_idx, fields, causal=causal)
    layout = draw(st.sampled_from([None, "hnd", "nhd"]))
    if layout:
        k_idx, fields = paged(k_idx, fields, layout)
    budget = draw(st.sampled_from([None, 1, 5000]))
    scores = block_max_scores(q_idx, k_idx, causal=causal, max_workspace_bytes=budget, **fields)
    torch.testing.assert_close(scores.double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("budget", [1, 3000, 10**6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", [None, "hnd"])
def test_padded_pieces_of_devices_give_the_same_scores(monkeypatch, layout, causal, budget):
    q_idx, k_idx, fields = index_problem((9, 0, 4, 1), (9, 6, 30, 0), padding=1)
    wanted = scores_by_loop(q_idx, k_idx, fields, causal=causal)
    if layout:
        k_idx, fields = paged(k_idx, fields, layout)
    monkeypatch.setattr(BlockScorer, "exact_pieces", BlockScorer.padded_pieces)
    scores = block_max_scores(q_idx, k_idx, causal=causal, max_workspace_bytes=budget, **fields)
    torch.testing.assert_close(scores.double(), wanted, atol=1e-6, rtol=1e-6)


def test_dtypes_accumulate_in_float32_or_float64():
    for dtype, tolerance in ((torch.bfloat16, 1e-5), (torch.float64, 1e-6)):
        q_idx, k_idx, fields = index_problem((9,), (20,), dtype=dtype, dim=64)
        scores = block_max_scores(q_idx, k_idx, **fields)
        wanted = scores_by_loop(q_idx, k_idx, fields, causal=True)
        torch.testing.assert_close(scores.double(), wanted, atol=tolerance, rtol=tolerance)


def test_nan_stays_with_the_queries_that_see_it():
    q_idx, k_idx, fields = index_problem((20, 5), (20, 5))
    wanted = block_max_scores(q_idx, k_idx, **fields)
    bad = k_idx.clone()
    bad[11] = math.nan  # position 11 of sequence 0: block 1
    scores = block_max_scores(q_idx, bad, **fields)
    sees = torch.zeros_like(scores, dtype=torch.bool)
    sees[:, 1, 11:20] = True
    assert scores[sees].isnan().all()
    assert torch.equal(scores[~sees], wanted[~sees])


def test_pages_outside_the_pool_hold_no_keys(monkeypatch):
    # Ids of a device tensor are not checked at the call.
    monkeypatch.setattr("sparse_atten.msa.scores.check", lambda *_: None)
    q_idx, k_idx, fields = index_problem((20,), (20,))
    whole = block_max_scores(q_idx, k_idx, **fields)
    pool, fields = paged(k_idx, fields, "hnd")
    for page in (-7, 10**6):
        fields["page_table"][0, 1] = page
        scores = block_max_scores(q_idx, pool, **fields)
        assert (scores[:, 1] == -math.inf).all()
        assert torch.equal(scores[:, ::2], whole[:, ::2])


def test_strided_inputs_and_shortened_sequences():
    q_idx, k_idx, fields = index_problem((6, 4), (20, 9), heads=4, key_heads=2)
    wanted = block_max_scores(q_idx, k_idx, **fields)
    q_idx = torch.stack((q_idx, q_idx), -1)[..., 0]
    k_idx = k_idx.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(block_max_scores(q_idx, k_idx, **fields), wanted)
    used = block_max_scores(q_idx, k_idx, seqused_k=int32([7, 9]), causal=False, **fields)
    assert (used[:, 1:, :6] == -math.inf).all()
    assert used[:, 0, :6].isfinite().all()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 9), (9, 0), (0, 0)])
def test_empty_problems(num_queries, num_keys):
    q_idx, k_idx, fields = index_problem((num_queries,), (num_keys,))
    scores = block_max_scores(q_idx, k_idx, **fields | {"max_seqlen_k": 9})
    assert scores.shape == (2, 2, num_queries)
    assert (scores == -math.inf).all()


def test_pieces_follow_the_workspace_and_the_diagonal():
    q_idx, k_idx, fields = index_problem((64,), (64,))
    options = {"causal": True, "scale": None}
    scorer = scorer_of(q_idx, k_idx, fields, **options, max_workspace_bytes=2 * 8 * 2 * 8 * 48)
    assert [piece.token.tolist() for piece in scorer.pieces()] == [
        list(range(start, start + 8)) for start in range(0, 64, 8)
    ]
    assert [piece.num_blocks for piece in scorer.pieces()] == list(range(1, 9))
    whole = scorer_of(q_idx, k_idx, fields, **options, max_workspace_bytes=None)
    assert len(list(whole.pieces())) == 1
    packed = dataclasses.replace(whole, max_bytes=2 * 8 * 2 * 16 * 48)
    assert [piece.token.shape[0] for piece in packed.padded_pieces()] == [16] * 4


@pytest.mark.parametrize("ambient", ["bfloat16 autocast", "float64 default"])
def test_settings_of_the_callers_program_change_nothing(ambient):
    q_idx, k_idx, fields = index_problem((40,), (40,), dim=64)
    wanted = block_max_scores(q_idx, k_idx, **fields)
    if ambient == "float64 default":
        torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient == "bfloat16 autocast"):
            scores = block_max_scores(q_idx, k_idx, **fields)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(scores, wanted)
    assert scores.dtype == torch.float32


def test_no_gradient_flows_through_scores():
    q_idx, k_idx, fields = index_problem((9,), (9,))
    assert not block_max_scores(q_idx.requires_grad_(), k_idx, **fields).requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_idx": [1.0]}, TypeError, "q_idx must be one of bfloat16, .*, got list"),
        ({"q_idx": torch.zeros(9, 4)}, ValueError, r"q_idx must be \[Tq, Hidx, d_idx\], got float"),
        ({"k_idx": torch.zeros(9, 1, 4).half()}, TypeError, "k_idx must have q_idx's dtype torch."),
        (
            {"k_idx": torch.zeros(9, 1, 5)},
            ValueError,
            r"k_idx must be \[Tk, Hk, d_idx\] with d_idx",
        ),
        (
            {"k_idx": torch.zeros(9, 3, 4)},
            ValueError,
            "k_idx must have a divisor of q_idx's 2 heads",
        ),
        ({"scale": 0.0}, ValueError, r"^scale must be a finite float > 0, got 0\.0"),
        ({"scale": "1"}, TypeError, "^scale must be a finite float > 0, got str '1'"),
        ({"causal": 1}, TypeError, "causal must be a bool, got int 1"),
        ({"max_workspace_bytes": 0}, ValueError, "max_workspace_bytes must be at least 1, got 0"),
        ({"max_seqlen_k": 8}, ValueError, "max_seqlen_k must be at least the length of every"),
        ({"cu_seqlens_q": int32([3, 9])}, ValueError, r"cu_seqlens_q\[0\] must be 0, got 3"),
        ({"cu_seqlens_k": int32([0, 10])}, ValueError, r"cu_seqlens_k\[-1\] must be at most the 9"),
        (
            {"cu_seqlens_k": None},
            ValueError,
            r"cu_seqlens_k must be int32 \[B \+ 1\] without a page",
        ),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    q_idx, k_idx, fields = index_problem((9,), (9,))
    arguments = {"q_idx": q_idx, "k_idx": k_idx, **fields} | change
    with pytest.raises(error, match=message):
        block_max_scores(**arguments)


def test_pages_must_hold_a_block():
    q_idx, k_idx, fields = index_problem((9,), (9,))
    pool, fields = paged(k_idx, fields, "nhd")
    with pytest.raises(NotImplementedError, match="k_idx has pages of 8 tokens for block_size 16"):
        block_max_scores(q_idx, pool, **fields | {"block_size": 16})
