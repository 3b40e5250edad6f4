"""`minimax_sparse_attention` against its stages and dense attention; the complexity equation."""

import math

import pytest
import torch

from sparse_atten import TokenSelection, sparse_atten_func
from sparse_atten.msa import (
    index_branch,
    merge_partials,
    minimax_flops,
    minimax_sparse_attention,
    partial_attention,
)
from sparse_atten.preparation import prepare


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths):
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def layer(q_lengths, k_lengths, *, group=2, heads=2, padding=0):
    generator = torch.Generator().manual_seed(7)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    num_queries, num_keys = sum(q_lengths) + padding, sum(k_lengths)
    tensors = (
        randn(num_queries, heads * group, 16), randn(num_keys, heads, 16),
        randn(num_keys, heads, 8), randn(num_queries, heads, 4), randn(num_keys, 1, 4),
    )  # fmt: skip
    fields = {
        "cu_seqlens_q": offsets(q_lengths),
        "cu_seqlens_k": offsets(k_lengths),
        "max_seqlen_q": max(q_lengths),
        "max_seqlen_k": max(k_lengths),
    }
    return tensors, fields


def dense(q, k, v, q_lengths, k_lengths, *, causal):
    """Attention of each sequence over all its keys, one query token at a time, in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    q_start = k_start = 0
    for num_q, num_k in zip(q_lengths, k_lengths, strict=True):
        for i in range(num_q):
            last = i + num_k - num_q + 1 if causal else num_k
            for h in range(q.shape[1]) if last > 0 else ():
                keys = k[k_start : k_start + last, h // group].double()
                scores = keys @ q[q_start + i, h].double() / math.sqrt(q.shape[2])
                lse[q_start + i, h] = scores.logsumexp(0)
                weights = scores.softmax(0)
                out[q_start + i, h] = weights @ v[k_start : k_start + last, h // group].double()
        q_start, k_start = q_start + num_q, k_start + num_k
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths", [((40, 0, 9), (40, 0, 9)), ((30, 5), (8, 20)), ((3, 7), (33, 16))]
)
def test_enough_blocks_give_dense_attention(lengths, causal):
    tensors, fields = layer(*lengths, padding=1)
    out, lse = minimax_sparse_attention(
        *tensors, **fields, topk=5, block_size=8, causal=causal, return_lse=True
    )
    wanted = dense(*tensors[:3], *lengths, causal=causal)
    torch.testing.assert_close(out.double(), wanted[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_one_call_equals_its_stages(causal):
    tensors, fields = layer((60, 2, 11), (60, 50, 4), padding=2)
    q, k, v, q_idx, k_idx = tensors
    options = {"topk": 2, "num_sink_blocks": 1, "block_size": 8, "causal": causal}
    out, lse = minimax_sparse_attention(
        *tensors, **fields, **options, softmax_scale=0.3, index_scale=2.0, return_lse=True,
        max_workspace_bytes=10_000,
    )  # fmt: skip
    selection = index_branch(q_idx, k_idx, scale=2.0, **fields, **options)
    direct = sparse_atten_func(
        q, k, v, selection, causal=causal, softmax_scale=0.3, return_lse=True
    )
    torch.testing.assert_close(out, direct[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, direct[1], atol=1e-6, rtol=1e-5)
    prepared = prepare(selection, q, k)
    partials = partial_attention(q, k, v, prepared, causal=causal, softmax_scale=0.3)
    for x, y in zip(merge_partials(*partials, prepared.schedule.split_counts), direct, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
    whole = minimax_sparse_attention(*tensors, **fields, topk=9, block_size=8, causal=causal)
    assert not torch.allclose(out, whole, atol=1e-3)  # the choice did leave something out


def test_paged_pools_and_index_keys_share_their_pages():
    tensors, fields = layer((9, 4), (24, 16))
    q, k, v, q_idx, k_idx = tensors
    table = int32([[3, 0, 4], [1, 2, -1]])
    order = torch.tensor([1, 3, 4, 0, 2])  # flat block of each page
    pools = [x.unflatten(0, (5, 8))[order] for x in (k, v, k_idx)]
    paged = fields | {"cu_seqlens_k": None, "page_table": table, "seqused_k": int32([24, 16])}
    wanted = minimax_sparse_attention(*tensors, **fields, topk=2, block_size=8)
    nhd = minimax_sparse_attention(
        q, *pools[:2], q_idx, pools[2], **paged, topk=2, block_size=8, kv_layout="nhd"
    )
    torch.testing.assert_close(nhd, wanted)
    pools = [x.transpose(1, 2) for x in pools]
    hnd = minimax_sparse_attention(q, *pools[:2], q_idx, pools[2], **paged, topk=2, block_size=8)
    torch.testing.assert_close(hnd, wanted)


def test_gradients_are_those_of_dense_attention_where_all_is_kept():
    tensors, fields = layer((12, 5), (12, 9))
    q, k, v, q_idx, k_idx = (x.double().requires_grad_() for x in tensors)
    out = minimax_sparse_attention(q, k, v, q_idx, k_idx, **fields, topk=3, block_size=4)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    got = torch.autograd.grad(out, (q, k, v, q_idx), pull, allow_unused=True)
    wanted = torch.autograd.grad(dense(q, k, v, (12, 5), (12, 9), causal=True)[0], (q, k, v), pull)
    assert got[3] is None
    for x, y in zip(got, wanted, strict=False):  # as exact as the float32 LSE that is kept
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def test_nothing_is_read_on_the_host_of_a_device():
    # Meta tensors hold no values: whatever needs one raises.
    tensors, fields = layer((30, 2), (30, 50), padding=1)
    options = {"topk": 2, "block_size": 8, "return_lse": True}
    wanted = minimax_sparse_attention(*tensors, **fields, **options)
    tensors = [x.to("meta") for x in tensors]
    fields = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in fields.items()
    }
    for got, like in zip(
        minimax_sparse_attention(*tensors, **fields, **options), wanted, strict=True
    ):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)


def test_first_head_of_a_group_speaks_and_others_must_agree():
    tensors, fields = layer((12,), (12,))
    q, k, v = tensors[:3]
    indices = torch.arange(12 * 4, dtype=torch.int32).view(12, 4, 1) % 3
    selection = TokenSelection.from_head_indices(indices, 2, block_size=4, **fields)
    assert torch.equal(selection.q2k_indices[0], indices[:, 0])
    assert torch.equal(selection.q2k_indices[1], indices[:, 2])
    with pytest.raises(ValueError, match=r"head_indices\[0, 1\] must list the blocks of its group"):
        sparse_atten_func(q, k, v, selection)


def test_token_major_ids_are_refused():
    tensors, fields = layer((12,), (12,))
    ids = torch.zeros(12, 2, 1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"q2k_indices must be int32 \[Hkv, Tq, K\] = \[2, 12, K\]"
    ):
        sparse_atten_func(*tensors[:3], TokenSelection(ids, block_size=4, **fields))


def test_each_kv_head_needs_an_index_head():
    (q, k, v, q_idx, k_idx), fields = layer((12,), (12,))
    with pytest.raises(ValueError, match=r"q_idx must be \[Tq, Hkv, d_idx\] with k's 2 heads, got"):
        minimax_sparse_attention(q, k, v, q_idx.repeat(1, 2, 1), k_idx, **fields)


def test_complexity_of_the_paper():
    # Equation (12) for the 109B model (64 query and 4 KV heads, all dims 128): the paper states a
    # 28.4-fold reduction at a million tokens.
    def ratio(num_tokens):
        full, sparse = minimax_flops(num_tokens, num_q_heads=64, num_kv_heads=4)
        return full / sparse

    assert minimax_flops(1, num_q_heads=64, num_kv_heads=4) == (
        16384,
        512 + 4 * 64 * 128 * 16 * 128,
    )
    assert round(ratio(2**20), 1) == 28.4
    assert ratio(4096) < 1 < ratio(8192)
    assert ratio(2**40) == pytest.approx(2 * 64 / 4, rel=1e-3)  # what remains is the index branch
