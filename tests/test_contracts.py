"""Every rule of the contract has a call that breaks it, and a message that names the argument."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from sparse_atten import BlockSelection, TokenSelection, sparse_atten_func

I32 = torch.int32


def block_call(**changes):
    """Make a legal call: B 1, Hq 4, Hkv 2, Sq 40, Skv 70, D 8, block 16, K 2; then change it."""
    q, k, v = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    fields = {
        "q2k_indices": torch.arange(2, dtype=I32).expand(1, 4, 3, 2),
        "q2k_counts": torch.full((1, 4, 3), 2, dtype=I32),
        "block_size": 16,
    }
    arguments = {"q": q, "k": k, "v": v}
    options = {}
    for name, value in changes.items():
        if name in arguments:
            arguments[name] = value
        elif name in BlockSelection.__dataclass_fields__:
            fields[name] = value
        else:
            options[name] = value
    return sparse_atten_func(*arguments.values(), BlockSelection(**fields), **options)


def token_call(**changes):
    """Make a legal call: 3 and 4 queries, 20 and 5 keys, Hq 4, Hkv 2, D 8, block 16."""
    arguments = {"q": torch.randn(7, 4, 8), "k": torch.randn(25, 2, 8), "v": torch.randn(25, 2, 8)}
    fields = {
        "q2k_indices": torch.zeros(2, 7, 1, dtype=I32),
        "cu_seqlens_q": torch.tensor([0, 3, 7], dtype=I32),
        "cu_seqlens_k": torch.tensor([0, 20, 25], dtype=I32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 20,
        "block_size": 16,
    }
    options = {}
    for name, value in changes.items():
        if name in arguments:
            arguments[name] = value
        elif name in TokenSelection.__dataclass_fields__:
            fields[name] = value
        else:
            options[name] = value
    return sparse_atten_func(*arguments.values(), TokenSelection(**fields), **options)


def paged_call(**changes):
    """Make a legal paged call: 4 pages of 16 tokens, HND."""
    fields = {
        "k": torch.randn(4, 2, 16, 8),
        "v": torch.randn(4, 2, 16, 8),
        "cu_seqlens_k": None,
        "page_table": torch.tensor([[3, 1], [0, 2]], dtype=I32),
        "seqused_k": torch.tensor([20, 5], dtype=I32),
    }
    return token_call(**{**fields, **changes})


def test_the_legal_calls_are_legal():
    assert block_call().shape == (1, 4, 40, 8)
    assert token_call().shape == (7, 4, 8)
    assert paged_call().shape == (7, 4, 8)


HALF = torch.float16
FP8 = torch.float8_e4m3fn
BLOCK_REFUSALS = [
    # classes and dtypes
    ({"q": [1.0]}, TypeError, "q must be a Tensor, got list"),
    ({"k": None}, TypeError, "k must be a Tensor, got NoneType"),
    ({"q": torch.zeros(1, 4, 40, 8, dtype=I32)}, TypeError, "q must be one of bfloat16, float16"),
    ({"v": torch.zeros(1, 2, 70, 8, dtype=HALF)}, TypeError, "v must have q's dtype torch.float32"),
    ({"k": torch.zeros(1, 2, 70, 8).to(FP8)}, NotImplementedError, "k is float8_e4m3fn [1, 2, 70"),
    (
        {"k": torch.zeros(1, 2, 70, 4, dtype=torch.uint8)},
        NotImplementedError,
        "quantised attention",
    ),
    ({"q2k_indices": torch.zeros(1, 4, 3, 2).long()}, TypeError, "got int64 [1, 4, 3, 2] on cpu"),
    ({"q2k_counts": torch.zeros(1, 4, 3)}, TypeError, "q2k_counts must be int32 [B, Hq, Nq]"),
    ({"kv_block_sizes": [16] * 5}, TypeError, "kv_block_sizes must be int32 [Nkv] = [5], got list"),
    ({"q_block_sizes": torch.zeros(3)}, TypeError, "q_block_sizes must be int32 [Nq] = [3]"),
    # ranks and shapes
    ({"q": torch.randn(())}, ValueError, "q must have 3 or 4 dims, got float32 [] on cpu"),
    ({"q": torch.randn(4, 40, 8)}, ValueError, "q must be [B, H, S, D] for layout 'bhsd', got"),
    ({"k": torch.randn(1, 2, 70)}, ValueError, "k must be [B, H, S, D] for layout 'bhsd'"),
    ({"k": torch.randn(2, 2, 70, 8)}, ValueError, "k must be [1, 2, 70, 8], got float32 [2, 2"),
    (
        {"k": torch.randn(1, 2, 70, 16)},
        ValueError,
        "k must be [1, 2, 70, 8], got float32 [1, 2, 70",
    ),
    ({"v": torch.randn(1, 2, 69, 8)}, ValueError, "v must be [1, 2, 70, 8], got"),
    ({"q": torch.randn(1, 3, 40, 8)}, ValueError, "q must have a multiple of k's 2 heads, got 3"),
    ({"q": torch.randn(1, 4, 40, 0)}, ValueError, "q must have a head dim of at least 1"),
    (
        {"q2k_indices": torch.zeros(1, 3, 4, 2, dtype=I32)},
        ValueError,
        "q2k_indices must be int32 [B, Hq, Nq, K] = [1, 4, 3, K], got int32 [1, 3, 4, 2]",
    ),
    (
        {"q2k_indices": torch.zeros(4, 3, 2, dtype=I32)},
        ValueError,
        "q2k_indices must be int32 [B, Hq, Nq, K] = [1, 4, 3, K], got int32 [4, 3, 2]",
    ),
    ({"q2k_counts": torch.zeros(1, 4, 4, dtype=I32)}, ValueError, "q2k_counts must be int32"),
    (
        {"kv_block_sizes": torch.zeros(4, dtype=I32)},
        ValueError,
        "kv_block_sizes must be int32 [Nkv] = [5], got int32 [4]",
    ),
    (
        {"kv_block_sizes": torch.zeros(2, 5, dtype=I32)},
        ValueError,
        "kv_block_sizes must be int32 [B, Nkv] = [1, 5], got int32 [2, 5]",
    ),
    (
        {"q_block_sizes": torch.zeros(1, 3, dtype=I32)},
        ValueError,
        "q_block_sizes must be int32 [Nq] = [3], got int32 [1, 3]",
    ),
    # devices
    ({"k": torch.randn(1, 2, 70, 8, device="meta")}, ValueError, "k must be on q's device cpu"),
    (
        {"q2k_counts": torch.zeros(1, 4, 3, dtype=I32, device="meta")},
        ValueError,
        "q2k_counts must be on q's device cpu, got int32 [1, 4, 3] on meta",
    ),
    # strides and alignment
    ({"q": torch.randn(1, 4, 8, 40).mT}, ValueError, "q must be contiguous in its last dim, got"),
    (
        {"k": torch.randn(1, 2, 70, 9)[..., :8]},
        ValueError,
        "k must have strides that are multiples of 16 bytes (4 elements), got strides (1260,",
    ),
    (
        {"v": torch.randn(1 + 2 * 70 * 8)[1:].view(1, 2, 70, 8)},
        ValueError,
        "v must start at a multiple of 16 bytes, got address 0x",
    ),
    # scalars
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be a finite float > 0, got 0.0"),
    ({"softmax_scale": -1}, ValueError, "softmax_scale must be a finite float > 0, got -1"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be a finite float > 0, got nan"),
    ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be a finite float > 0, got inf"),
    ({"softmax_scale": torch.ones(())}, TypeError, "softmax_scale must be a finite float > 0, got"),
    ({"softmax_scale": True}, TypeError, "softmax_scale must be a finite float > 0, got bool True"),
    ({"lse_temperature": 0.0}, ValueError, "lse_temperature must be a finite float > 0, got 0.0"),
    ({"causal": 1}, TypeError, "causal must be a bool, got int 1"),
    ({"return_lse": None}, TypeError, "return_lse must be a bool, got NoneType None"),
    ({"max_workspace_bytes": 0}, ValueError, "max_workspace_bytes must be at least 1, got 0"),
    ({"max_workspace_bytes": 1e6}, TypeError, "max_workspace_bytes must be an int, got float"),
    ({"layout": "sbhd"}, ValueError, "layout must be 'bhsd' or 'bshd', got 'sbhd'"),
    ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    ({"block_size": 16.0}, TypeError, "block_size must be an int, got float 16.0"),
    ({"dense_rows": -1}, ValueError, "dense_rows must be at least 0, got -1"),
    ({"dense_rows": 4}, ValueError, "dense_rows must be at most the 3 query blocks, got 4"),
    ({"dense_rows": True}, TypeError, "dense_rows must be an int, got bool True"),
    (
        {"backend": "cuda"},
        ValueError,
        "backend must be one of 'auto', 'sm100', 'sm90', 'reference'",
    ),
    # values of CPU tensors
    (
        {"q2k_counts": torch.full((1, 4, 3), 3, dtype=I32)},
        ValueError,
        "q2k_counts[0, 0, 0] must be in 0..2 (K), got 3",
    ),
    (
        {"q2k_indices": torch.full((1, 4, 3, 2), 5, dtype=I32)},
        ValueError,
        "q2k_indices[0, 0, 0, 0] must be in 0..4 (Nkv - 1), got 5",
    ),
    (
        {"q2k_indices": torch.full((1, 4, 3, 2), 1, dtype=I32)},
        ValueError,
        "q2k_indices[0, 0, 0] must list each block once, got block 1 twice",
    ),
    (
        {"kv_block_sizes": torch.full((5,), 16, dtype=I32)},
        ValueError,
        "kv_block_sizes[4] must be in 0..6, got 16",
    ),
    (
        {"q_block_sizes": torch.tensor([16, -1, 0], dtype=I32)},
        ValueError,
        "q_block_sizes[1] must be in 0..16, got -1",
    ),
    # out
    ({"out": torch.empty(1, 4, 40, 9)}, ValueError, "out must be [1, 4, 40, 8], got float32"),
    ({"out": torch.empty(1, 4, 40, 8, dtype=HALF)}, TypeError, "out must have q's dtype"),
    ({"out": torch.empty(1, 4, 40, 8, device="meta")}, ValueError, "out must be on q's device cpu"),
    (
        {"out": torch.empty(1, 1, 40, 8).expand(1, 4, 40, 8)},
        ValueError,
        "out must not repeat memory",
    ),
    ({"out": torch.empty(1, 4, 8, 40).mT}, ValueError, "out must be contiguous in its last dim"),
    ({"out": torch.empty(1, 4, 40, 8, requires_grad=True)}, ValueError, "out must be None where"),
    ({"out": "here"}, TypeError, "out must be a Tensor, got str 'here'"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), BLOCK_REFUSALS, ids=[m[:50] for *_, m in BLOCK_REFUSALS]
)
def test_block_refusals(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        block_call(**changes)


TOKEN_REFUSALS = [
    (token_call, {"q": torch.randn(1, 7, 4, 8)}, ValueError, "q must be [Tq, Hq, D], got float32"),
    (token_call, {"k": torch.randn(4, 2, 16, 8)}, ValueError, "k must be [Tk, Hkv, D] without a"),
    (token_call, {"v": torch.randn(24, 2, 8)}, ValueError, "v must be [25, 2, 8], got float32 [24"),
    (token_call, {"q": torch.randn(7, 5, 8)}, ValueError, "q must have a multiple of k's 2 heads"),
    (
        token_call,
        {"q2k_indices": torch.zeros(7, 2, 1, dtype=I32)},
        ValueError,
        "q2k_indices must be int32 [Hkv, Tq, K] = [2, 7, K], got int32 [7, 2, 1] on cpu",
    ),
    (token_call, {"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must be int32 [B + 1]"),
    (token_call, {"cu_seqlens_q": torch.zeros(0, dtype=I32)}, ValueError, "cu_seqlens_q must hold"),
    (
        token_call,
        {"cu_seqlens_k": torch.zeros(4, dtype=I32)},
        ValueError,
        "cu_seqlens_k must be int32 [B + 1] = [3], got int32 [4]",
    ),
    (token_call, {"cu_seqlens_k": None}, ValueError, "cu_seqlens_k must be int32 [B + 1] without"),
    (token_call, {"max_seqlen_q": 4.0}, TypeError, "max_seqlen_q must be an int, got float 4.0"),
    (token_call, {"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0, got -1"),
    (token_call, {"kv_layout": "hdn"}, ValueError, "kv_layout must be 'hnd' or 'nhd', got 'hdn'"),
    (
        token_call,
        {"seqused_k": torch.zeros(3, dtype=I32)},
        ValueError,
        "seqused_k must be int32 [B] = [2], got int32 [3]",
    ),
    (paged_call, {"k": torch.randn(64, 2, 8)}, ValueError, "k must be [pages, Hkv, block_size, D]"),
    (paged_call, {"seqused_k": None}, ValueError, "seqused_k must be int32 [B] with a page_table"),
    (
        paged_call,
        {"cu_seqlens_k": torch.zeros(3, dtype=I32)},
        ValueError,
        "cu_seqlens_k must be None with a page_table",
    ),
    (
        paged_call,
        {"page_table": torch.zeros(3, 2, dtype=I32)},
        ValueError,
        "page_table must be int32 [B, pages] = [2, pages], got int32 [3, 2]",
    ),
    (
        paged_call,
        {"k": torch.randn(4, 2, 32, 8), "v": torch.randn(4, 2, 32, 8)},
        NotImplementedError,
        "k has pages of 32 tokens for block_size 16 (kv_layout 'hnd')",
    ),
    # values of CPU tensors
    (
        token_call,
        {"cu_seqlens_q": torch.tensor([0, 5, 3], dtype=I32)},
        ValueError,
        "cu_seqlens_q[2] must be at least the offset before it, 5, got 3",
    ),
    (
        token_call,
        {"cu_seqlens_k": torch.tensor([1, 20, 25], dtype=I32)},
        ValueError,
        "cu_seqlens_k[0] must be 0, got 1",
    ),
    (
        token_call,
        {"cu_seqlens_k": torch.tensor([0, 20, 26], dtype=I32)},
        ValueError,
        "cu_seqlens_k[-1] must be at most the 25 tokens of the tensor, got 26",
    ),
    (
        token_call,
        {"max_seqlen_q": 3},
        ValueError,
        "max_seqlen_q must be at least the length of every sequence, got 3, but sequence 1 has 4",
    ),
    (token_call, {"max_seqlen_k": 19}, ValueError, "max_seqlen_k must be at least the length of"),
    (
        token_call,
        {"q2k_indices": torch.full((2, 7, 1), 1, dtype=I32)},
        ValueError,
        "q2k_indices[0, 3, 0] must be in 0..0 or -1, got 1",
    ),
    (
        token_call,
        {"q2k_indices": torch.full((2, 7, 1), -2, dtype=I32)},
        ValueError,
        "q2k_indices[0, 0, 0] must be in 0..1 or -1, got -2",
    ),
    (
        token_call,
        {"q2k_indices": torch.zeros(2, 7, 2, dtype=I32)},
        ValueError,
        "q2k_indices[0, 0] must list each block once, got block 0 twice",
    ),
    (
        token_call,
        {"seqused_k": torch.tensor([20, 6], dtype=I32)},
        ValueError,
        "seqused_k[1] must be in 0..5 (the sequence's keys), got 6",
    ),
    (
        paged_call,
        {"seqused_k": torch.tensor([33, 5], dtype=I32)},
        ValueError,
        "seqused_k[0] must be in 0..32 (pages * block_size), got 33",
    ),
    (
        paged_call,
        {"page_table": torch.tensor([[3, 4], [0, 2]], dtype=I32)},
        ValueError,
        "page_table[0, 1] must be in 0..3, got 4",
    ),
]


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    TOKEN_REFUSALS,
    ids=[m[:50] for *_, m in TOKEN_REFUSALS],
)
def test_token_refusals(call, changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(**changes)


def test_a_selection_of_another_class_is_refused():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match="selection must be a BlockSelection, a TokenSelection or"):
        sparse_atten_func(q, q, q, (1, 2))


def test_out_must_not_be_an_input():
    q = torch.randn(1, 4, 40, 8)
    with pytest.raises(ValueError, match="out must not overlap an input, got the memory of q"):
        block_call(q=q, out=q)


def test_unused_entries_may_hold_anything():
    """Ids behind the count, rows of dense blocks, pages past the length, tokens of no sequence."""
    wild = torch.full((1, 4, 3, 2), 99, dtype=I32)
    block_call(q2k_indices=wild, q2k_counts=torch.zeros(1, 4, 3, dtype=I32))
    block_call(q2k_indices=wild, q2k_counts=torch.full((1, 4, 3), 77, dtype=I32), dense_rows=3)
    paged_call(page_table=torch.tensor([[3, 1], [0, -9]], dtype=I32))
    indices = torch.zeros(2, 9, 1, dtype=I32)
    indices[:, 7:] = 42
    token_call(q=torch.randn(9, 4, 8), q2k_indices=indices)


def test_strides_that_carry_no_meaning_are_ignored():
    one = torch.randn(40 * 4 * 8).as_strided((1, 4, 40, 8), (7, 8, 32, 1))  # B == 1, stride 7
    block_call(q=one)
    repeated = torch.randn(1, 1, 1, 8).expand(1, 2, 70, 8)  # stride 0 on an input
    block_call(k=repeated, v=repeated)
    block_call(q=torch.randn(1, 4, 40, 5), k=torch.randn(1, 2, 70, 5), v=torch.randn(1, 2, 70, 3))


def test_from_head_indices_takes_the_first_head_of_each_group():
    indices = torch.arange(3 * 4 * 1, dtype=I32).view(3, 4, 1)
    offsets = torch.tensor([0, 3], dtype=I32)
    fields = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 3,
        "max_seqlen_k": 3,
    }
    selection = TokenSelection.from_head_indices(indices, 2, **fields)
    assert selection.q2k_indices[..., 0].tolist() == [[0, 4, 8], [2, 6, 10]]
    assert selection.q2k_indices.data_ptr() == indices.data_ptr()
    with pytest.raises(ValueError, match="num_kv_heads must divide the 4 heads of indices, got 3"):
        TokenSelection.from_head_indices(indices, 3, **fields)
    with pytest.raises(TypeError, match=re.escape("indices must be int32 [Tq, Hq, K], got int64")):
        TokenSelection.from_head_indices(indices.long(), 2, **fields)


def test_heads_of_a_group_must_agree():
    indices = torch.tensor([0, 1], dtype=I32).expand(3, 4, 2).clone()
    offsets = torch.tensor([0, 3], dtype=I32)
    keys = torch.tensor([0, 40], dtype=I32)
    q, k = torch.randn(3, 4, 8), torch.randn(40, 2, 8)

    def call():
        selection = TokenSelection.from_head_indices(
            indices,
            2,
            cu_seqlens_q=offsets,
            cu_seqlens_k=keys,
            max_seqlen_q=3,
            max_seqlen_k=40,
            block_size=16,
        )
        return sparse_atten_func(q, k, k, selection)

    call()
    indices[1, 3] = torch.tensor([1, 0])  # another order is the same set
    call()
    indices[2, 1] = torch.tensor([0, 2])
    message = re.escape("head_indices[2, 1] must list the blocks of its group's first head, got [0")
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_is_computed_after_a_refusal():
    out = torch.full((1, 4, 40, 8), 7.0)
    with pytest.raises(ValueError, match="q2k_counts"):
        block_call(out=out, q2k_counts=torch.full((1, 4, 3), 9, dtype=I32))
    assert (out == 7).all()


def test_fields_are_documented():
    for selection in (BlockSelection, TokenSelection):
        for name in selection.__dataclass_fields__:
            assert name in selection.__doc__


def test_selections_are_immutable():
    q2k = torch.zeros(1, 1, 1, 1, dtype=I32)
    selection = BlockSelection(q2k, q2k[..., 0])
    with pytest.raises(AttributeError):
        selection.block_size = 64
    assert replace(selection, block_size=64).block_size == 64
