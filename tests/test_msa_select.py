"""The chosen blocks against sorting in Python, and both forms of the index branch."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_atten import TokenSelection, check_selection
from sparse_atten.msa import block_max_scores, index_branch, select_blocks
from sparse_atten.msa.scores import BlockScorer


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths):
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def fields_of(q_lengths, k_lengths, block):
    return {
        "cu_seqlens_q": offsets(q_lengths),
        "cu_seqlens_k": offsets(k_lengths),
        "max_seqlen_q": max(q_lengths, default=0),
        "max_seqlen_k": max(k_lengths, default=0),
        "block_size": block,
    }


def choose_by_sorting(scores, q_lengths, k_lengths, *, block, topk, sinks, causal):
    """Lists of each head and token."""
    heads, _, num_queries = scores.shape
    lists = [[[] for _ in range(num_queries)] for _ in range(heads)]
    token = 0
    for num_q, num_k in zip(q_lengths, k_lengths, strict=True):
        for i in range(num_q):
            position = i + num_k - num_q
            visible = [j for j in range(num_k) if not causal or j <= position]
            blocks = sorted({j // block for j in visible})
            own = [position // block] if position >= 0 and position // block in blocks else []
            for h in range(heads):
                forced = list(dict.fromkeys([b for b in blocks if b < sinks] + own))
                others = [
                    b for b in blocks
                    if b not in forced and scores[h, b, token] > -math.inf
                ]  # fmt: skip
                others.sort(key=lambda b, h=h, t=token: (-float(scores[h, b, t]), b))
                lists[h][token] = sorted((forced + others)[:topk])
            token += 1
    return lists


def assert_lists(selection, lists, topk):
    padded = [[ids + [-1] * (topk - len(ids)) for ids in head] for head in lists]
    assert selection.q2k_indices.dtype == torch.int32
    assert selection.q2k_indices.tolist() == padded


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_choice_equals_sorting(data):
    draw = data.draw
    pairs = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 20)), max_size=3))
    q_lengths, k_lengths = [q for q, _ in pairs], [k for _, k in pairs]
    block, heads = draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 2))
    topk = draw(st.integers(1, 6))
    sinks, causal = draw(st.integers(0, topk - 1)), draw(st.booleans())
    padding = draw(st.integers(0, 2))
    fields = fields_of(q_lengths, k_lengths, block)
    num_blocks = -(-fields["max_seqlen_k"] // block)
    shape = heads, num_blocks, sum(q_lengths) + padding
    # Few distinct values: ties, -inf and NaN.
    values = torch.tensor([0.0, 1.0, -2.0, -math.inf, math.nan, math.inf])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    scores = values[torch.randint(0, 6, shape, generator=generator)]

    selection = select_blocks(scores, topk=topk, num_sink_blocks=sinks, causal=causal, **fields)
    lists = choose_by_sorting(
        scores, q_lengths, k_lengths, block=block, topk=topk, sinks=sinks, causal=causal
    )
    assert_lists(selection, [[*head[: shape[2]]] for head in lists], topk)


def test_each_query_has_its_own_local_block():
    # The last position of a sequence is that of its last query, however many keys come before.
    fields = fields_of((40, 3, 6), (40, 35, 4), 8)
    scores = torch.zeros(1, 5, 49)
    selection = select_blocks(scores, topk=1, **fields)
    lists = selection.q2k_indices[0, :, 0].tolist()
    assert lists[:40] == [i // 8 for i in range(40)]
    assert lists[40:43] == [4, 4, 4]  # positions 32, 33, 34
    assert lists[43:] == [-1, -1, 0, 0, 0, 0]  # the first two come before the first key


def test_without_a_causal_bound_later_blocks_may_be_chosen():
    fields = fields_of((2,), (24,), 8)
    scores = torch.tensor([1.0, 5.0, 3.0]).view(1, 3, 1).expand(1, 3, 2)
    ids = select_blocks(scores, topk=2, causal=False, **fields).q2k_indices
    assert ids[0].tolist() == [[1, 2], [1, 2]]
    longer = fields_of((20,), (8,), 8)  # 12 queries before the first key see it, but are not in it
    ids = select_blocks(torch.full((1, 1, 20), math.nan), topk=1, causal=False, **longer)
    assert ids.q2k_indices[0, :, 0].tolist() == [-1] * 12 + [0] * 8


def test_sinks_and_the_local_block_take_slots_of_topk():
    fields = fields_of((64,), (64,), 8)
    scores = torch.arange(8.0).view(1, 8, 1).expand(1, 8, 64)
    ids = select_blocks(scores, topk=3, num_sink_blocks=2, **fields).q2k_indices[0]
    assert ids[63].tolist() == [0, 1, 7]
    assert ids[20].tolist() == [0, 1, 2]
    assert ids[3].tolist() == [0, -1, -1]


def test_scores_of_query_heads_make_lists_for_each_head():
    fields = fields_of((20,), (20,), 4)
    scores = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(0))
    by_head = select_blocks(scores.repeat_interleave(3, 0), topk=2, **fields)
    indices = by_head.q2k_indices.transpose(0, 1)
    grouped = TokenSelection.from_head_indices(indices, 2, **fields)
    assert torch.equal(grouped.q2k_indices, select_blocks(scores, topk=2, **fields).q2k_indices)
    q, k = torch.randn(20, 6, 8), torch.randn(20, 2, 8)
    check_selection(q, k, k, grouped)
    indices = indices.clone()
    indices[17, 4] = int32([0, 1])  # the first head of its group is 3
    disagreeing = TokenSelection.from_head_indices(indices, 2, **fields)
    assert torch.equal(disagreeing.q2k_indices, grouped.q2k_indices)
    with pytest.raises(ValueError, match=r"head_indices\[17, 4\] must list the blocks of its"):
        check_selection(q, k, k, disagreeing)


def random_index(q_lengths, k_lengths, heads=2):
    generator = torch.Generator().manual_seed(1)
    q_idx = torch.randn(sum(q_lengths) + 1, heads, 8, generator=generator)
    return q_idx, torch.randn(sum(k_lengths), 1, 8, generator=generator)


@pytest.mark.parametrize("budget", [1, 4000, None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_index_branch_equals_its_two_stages(monkeypatch, padded, causal, budget):
    lengths = (50, 0, 3, 7), (50, 9, 70, 4)
    q_idx, k_idx = random_index(*lengths)
    fields = fields_of(*lengths, 8)
    scores = block_max_scores(q_idx, k_idx, causal=causal, **fields)
    options = {"topk": 3, "num_sink_blocks": 1, "causal": causal}
    wanted = select_blocks(scores, **options, **fields)
    if padded:  # as on a device
        monkeypatch.setattr(BlockScorer, "exact_pieces", BlockScorer.padded_pieces)
    got = index_branch(q_idx, k_idx, **options, max_workspace_bytes=budget, **fields)
    assert torch.equal(got.q2k_indices, wanted.q2k_indices)
    assert dataclasses.replace(got, q2k_indices=q_idx).__dict__ == (
        dataclasses.replace(wanted, q2k_indices=q_idx).__dict__
    )


def test_index_branch_of_paged_keys():
    lengths = (5, 9), (30, 9)
    q_idx, k_idx = random_index(*lengths)
    flat = fields_of(*lengths, 8)
    wanted = index_branch(q_idx, k_idx, topk=2, **flat)
    pool = torch.full((7, 8, 1, 8), math.nan)
    table = int32([[6, 1, 4, 0], [2, 5, -1, -1]])
    for j in range(4):
        pool[table[0, j], : 30 - 8 * j] = k_idx[8 * j : min(8 * j + 8, 30)]
    for j in range(2):
        pool[table[1, j], : 9 - 8 * j] = k_idx[30 + 8 * j : 30 + min(8 * j + 8, 9)]
    pages = {"cu_seqlens_k": None, "page_table": table, "seqused_k": int32([30, 9])}
    hnd = index_branch(q_idx, pool.transpose(1, 2), topk=2, **flat | pages)
    nhd = index_branch(q_idx, pool, topk=2, kv_layout="nhd", **flat | pages)
    assert torch.equal(hnd.q2k_indices, wanted.q2k_indices)
    assert torch.equal(nhd.q2k_indices, wanted.q2k_indices)
    assert (hnd.kv_layout, nhd.kv_layout) == ("hnd", "nhd")
    assert nhd.page_table is table
    scores = block_max_scores(q_idx, pool, kv_layout="nhd", **flat | pages)
    stages = select_blocks(scores, topk=2, kv_layout="nhd", **flat | pages)
    assert torch.equal(stages.q2k_indices, wanted.q2k_indices)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.num_bytes = max(self.num_bytes, x.untyped_storage().nbytes())
        return result


def test_index_branch_never_holds_all_scores():
    q_idx, k_idx = random_index((700,), (700,))
    fields = fields_of((700,), (700,), 2)
    with Largest() as largest:
        index_branch(q_idx, k_idx, topk=3, max_workspace_bytes=200_000, **fields)
    assert largest.num_bytes <= 200_000
    with Largest() as largest:
        index_branch(q_idx, k_idx, topk=3, **fields)
    assert largest.num_bytes >= 2 * 350 * 700 * 4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": torch.zeros(2, 3, 9).double()}, TypeError, r"scores must be float32 \[Hkv, n,"),
        ({"scores": torch.zeros(3, 9)}, ValueError, r"scores must be \[Hkv, n, Tq\], got float32"),
        ({"scores": torch.zeros(2, 4, 9)}, ValueError, r"n = ceil\(max_seqlen_k .* = 3, got float"),
        ({"topk": 0}, ValueError, "topk must be in 1..512, got 0"),
        (
            {"topk": 2, "num_sink_blocks": 2},
            ValueError,
            r"num_sink_blocks must be in 0\.\.1, got 2",
        ),
        ({"causal": None}, TypeError, "causal must be a bool, got NoneType None"),
        ({"cu_seqlens_q": int32([0, 10])}, ValueError, r"cu_seqlens_q\[-1\] must be at most the 9"),
        ({"seqused_k": int32([21])}, ValueError, r"seqused_k\[0\] must be in 0\.\.20"),
        ({"page_size": 8}, TypeError, "unexpected keyword argument 'page_size'"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"scores": torch.zeros(2, 3, 9), **fields_of((9,), (20,), 8)} | change
    with pytest.raises(error, match=message):
        select_blocks(**arguments)
