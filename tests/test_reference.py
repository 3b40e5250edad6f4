"""The gathered form agrees with the definition, keeps unseen bits out, and differentiates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BLOCK_CASES, TOKEN_CASES, BlockCase, TokenCase
from compare import assert_matches_definition
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten import BlockSelection, sparse_atten_func
from sparse_atten.contracts import Options, validate
from sparse_atten.definition import block_visibility, define_attention
from sparse_atten.reference import Result, reference_attention

CASES = BLOCK_CASES + TOKEN_CASES
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case).__name__}-{case.name}")
@pytest.mark.parametrize("workspace", [None, 1], ids=["whole", "smallest-chunks"])
def test_matches_the_definition(case, workspace):
    inputs, selection, options = case.build()
    validate(*inputs, selection, options)
    result = reference_attention(*inputs, selection, options, max_workspace_bytes=workspace)
    assert result.out.is_contiguous()
    assert_matches_definition(result, inputs, selection, options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case).__name__}-{case.name}")
def test_matches_the_definition_on_a_gpu(case):
    inputs, selection, options = case.build()
    moved = {name: x.cuda() for name, x in vars(selection).items() if isinstance(x, torch.Tensor)}
    result = reference_attention(*(x.cuda() for x in inputs), replace(selection, **moved), options)
    on_cpu = Result(*(None if x is None else x.cpu() for x in result))
    assert_matches_definition(on_cpu, inputs, selection, options)


def test_an_empty_row_gives_zero_and_minus_infinity():
    (q, k, v), selection, _ = BY_NAME["nothing"].build()
    out, lse, warm = sparse_atten_func(q, k, v, selection, lse_temperature=2.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == float("-inf")).all()
    assert (warm == float("-inf")).all()


def test_padded_queries_are_zero_even_where_they_hold_nan():
    (q, k, v), selection, options = BY_NAME["padded-queries"].build()
    padding = torch.arange(q.shape[2]) % 16 >= selection.q_block_sizes[torch.arange(64) // 16]
    assert padding.any()
    q[:, :, padding] = float("nan")
    result = reference_attention(q, k, v, selection, options)
    assert (result.out[:, :, padding] == 0).all()
    assert (result.lse[:, :, padding] == float("-inf")).all()
    assert result.out.isfinite().all()


@pytest.mark.parametrize("filler", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["random-counts", "alternating-empty-rows", "causal-sizes"])
def test_a_query_that_sees_nothing_is_zero_whatever_it_holds(name, filler):
    """Found: adding the mask to the scores let the NaN of a query without keys through."""
    (q, k, v), selection, options = BY_NAME[name].build()
    empty = block_visibility(q, k, selection, causal=options.causal).sum(-1) == 0
    assert empty.any()
    q[empty] = filler
    result = reference_attention(q, k, v, selection, options)
    assert_matches_definition(result, (q, k, v), selection, options)
    assert (result.out[empty] == 0).all()


@pytest.mark.parametrize("filler", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["sizes-per-batch", "random-counts", "causal-sizes"])
def test_unseen_keys_never_reach_the_output_of_blocks(name, filler):
    """Found: a causal key that only padded queries saw was not zeroed, and 0 * NaN spread."""
    inputs, selection, options = BY_NAME[name].build()
    q, k, v = inputs
    clean = reference_attention(q, k, v, selection, options)
    seen = block_visibility(q, k, selection, causal=options.causal).sum((2,)) > 0  # [B, Hq, Skv]
    unseen = ~seen.unflatten(1, (k.shape[1], -1)).any(2)
    assert unseen.any()
    k[unseen] = filler
    v[unseen] = filler
    poisoned = reference_attention(q, k, v, selection, options)
    assert torch.equal(clean.out, poisoned.out)
    assert torch.equal(clean.lse, poisoned.lse)
    gradients = _gradients((q, k, v), selection, options)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("paging", ["flat", "hnd", "nhd"])
def test_unseen_keys_never_reach_the_output_of_tokens(paging):
    case = TokenCase("poison", queries=(7, 9), keys=(37, 23), paging=paging, width=1, heads=(1, 1))
    (q, k, v), selection, options = case.build()
    clean = reference_attention(q, k, v, selection, options)
    tables = selection.page_table
    seen = torch.zeros(k.shape[0], dtype=torch.bool)
    if paging != "flat":
        seen = torch.zeros(k.shape[0], case.block, dtype=torch.bool)
    for b, (start, stop) in enumerate(((0, 7), (7, 16))):
        length = case.keys[b]
        for t in range(start, stop):
            for j in selection.q2k_indices[0, t].tolist():
                last = min((j + 1) * case.block, length, t - start + length - (stop - start) + 1)
                for key in range(j * case.block, last) if j >= 0 else ():
                    if paging == "flat":
                        seen[key + (0, case.keys[0])[b]] = True
                    else:
                        seen[tables[b, key // case.block], key % case.block] = True
    if paging == "hnd":
        seen = seen[:, None, :]
    k.masked_fill_(~seen[..., None] if paging == "hnd" else ~seen[..., None, None], float("nan"))
    v.masked_fill_(~seen[..., None] if paging == "hnd" else ~seen[..., None, None], float("inf"))
    assert k.isnan().any()
    poisoned = reference_attention(q, k, v, selection, options)
    assert torch.equal(clean.out, poisoned.out)
    assert torch.equal(clean.lse, poisoned.lse)


def test_a_seen_nan_stays_in_the_queries_that_see_it():
    inputs, selection, options = BY_NAME["random-counts"].build()
    q, k, v = inputs
    v[0, 0, 5, 3] = float("nan")
    result = reference_attention(q, k, v, selection, options)
    assert_matches_definition(result, (q, k, v), selection, options)
    assert result.out.isnan().any()
    assert result.out.isfinite().any()


@pytest.mark.parametrize("field", ["q2k_indices", "q2k_counts", "kv_block_sizes", "q_block_sizes"])
@pytest.mark.parametrize("value", [-(2**31), -1, 4, 1000, 2**31 - 1])
def test_no_value_of_a_block_table_is_followed(field, value):
    """Every integer is clamped or ignored: the result is that of the clamped table."""
    case = replace(BY_NAME["padded-queries"], lengths=(64, 64), width=4)
    (q, k, v), selection, options = case.build()
    selection = replace(selection, q2k_counts=torch.full_like(selection.q2k_counts, 4))
    table = getattr(selection, field).clone()
    wild = table.clone()
    wild.view(-1)[::3] = value
    high = {"q2k_indices": 3, "q2k_counts": 4}.get(field, 16)
    tame = wild.clamp(0, high)
    counts = selection.q2k_counts
    expected = replace(selection, **{field: tame})
    if field == "q2k_indices" and value != tame.view(-1)[0]:
        # An ignored id is a slot that does not count: move it behind the ones that do.
        order = (wild != tame).int().argsort(dim=-1, stable=True)
        counts = counts - (wild != tame).sum(-1).int()
        expected = replace(expected, q2k_indices=tame.gather(-1, order), q2k_counts=counts)
    got = reference_attention(q, k, v, replace(selection, **{field: wild}), options)
    assert_matches_definition(got, (q, k, v), expected, options)


@pytest.mark.parametrize("value", [-(2**31), -2, 3, 99, 2**31 - 1])
@pytest.mark.parametrize("paging", ["flat", "hnd", "nhd"])
def test_no_value_of_a_token_table_is_followed(paging, value):
    (q, k, v), selection, options = replace(BY_NAME["causal"], paging=paging).build()
    wild = selection.q2k_indices.clone()
    wild[0, ::4, 0] = value
    tame = torch.where(wild == value, -1, wild) if value != 3 else wild
    got = reference_attention(q, k, v, replace(selection, q2k_indices=wild), options)
    expected = replace(selection, q2k_indices=tame)
    assert_matches_definition(got, (q, k, v), expected, options)
    if paging == "flat":
        for field in ("cu_seqlens_q", "cu_seqlens_k"):
            offsets = getattr(selection, field).clone()
            offsets[1] = value
            result = reference_attention(q, k, v, replace(selection, **{field: offsets}), options)
            assert result.out.isfinite().all()
    else:
        pages = selection.page_table.clone()
        pages[0, 0] = value if value != 3 else k.shape[0]
        result = reference_attention(q, k, v, replace(selection, page_table=pages), options)
        ids = selection.q2k_indices
        dropped = ids.masked_fill(ids == 0, -1)
        dropped[:, 20:] = ids[:, 20:]  # only the first sequence lost its first page
        expected = replace(selection, q2k_indices=dropped)
        assert_matches_definition(result, (q, k, v), expected, options)


def _gradients(inputs, selection, options, attend=reference_attention):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = attend(*leaves, selection, options)
    weights = torch.Generator().manual_seed(3)
    loss = sum(0 * x.double().sum() for x in leaves)
    for x in result:
        if x is not None:
            seen = x.masked_fill(x.isinf(), 0)
            loss = loss + (seen.double() * torch.rand(x.shape, generator=weights)).sum()
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


GRADIENT_CASES = (
    "random-counts",
    "nothing",
    "padded-queries",
    "causal-sizes",
    "gqa-4",
    "mqa",
    "dense-prefix",
    "value-dim",
    "duplicates",
    "no-keys",
)


@pytest.mark.parametrize("name", GRADIENT_CASES)
@pytest.mark.parametrize("workspace", [None, 1], ids=["whole", "smallest-chunks"])
def test_gradients_are_those_of_the_definition(name, workspace):
    inputs, selection, options = replace(BY_NAME[name], dtype=torch.float64).build()
    options = options._replace(lse_temperature=0.7)

    def attend(*arguments):
        return reference_attention(*arguments, max_workspace_bytes=workspace)

    got = _gradients(inputs, selection, options, attend)
    want = _gradients(inputs, selection, options, define_attention)
    for gradient, expected in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda case: case.name)
def test_token_gradients_are_those_of_the_definition(case):
    inputs, selection, options = replace(case, dtype=torch.float64, scale=1.0).build()
    got = _gradients(inputs, selection, options)
    want = _gradients(inputs, selection, options, define_attention)
    for gradient, expected in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_gradcheck():
    case = BlockCase(
        "tiny", lengths=(5, 7), block=4, width=2, head_dims=(3, 2), dtype=torch.float64
    )
    (q, k, v), selection, options = case.build()
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, k, v: reference_attention(q, k, v, selection, options).out, inputs
    )


block_cases = st.builds(
    BlockCase,
    name=st.just("random"),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    head_dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block=st.integers(1, 17),
    width=st.integers(0, 4),
    counts=st.sampled_from(["all", "random", "one", "alternate"]),
    kv_sizes=st.sampled_from(["full", "vector", "matrix", "zero-first"]),
    pad_queries=st.booleans(),
    layout=st.sampled_from(["bhsd", "bshd"]),
    causal=st.booleans(),
    duplicates=st.booleans(),
)
token_cases = st.builds(
    TokenCase,
    name=st.just("random"),
    queries=st.lists(st.integers(0, 12), min_size=3, max_size=3).map(tuple),
    keys=st.lists(st.integers(0, 40), min_size=3, max_size=3).map(tuple),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    block=st.integers(1, 17),
    width=st.integers(0, 4),
    causal=st.booleans(),
    paging=st.sampled_from(["flat", "hnd", "nhd"]),
    used=st.booleans(),
    spare_queries=st.integers(0, 3),
    duplicates=st.booleans(),
)


@given(case=st.one_of(block_cases, token_cases), seed=st.integers(0, 2**16))
@settings(max_examples=80, deadline=None)
def test_random_cases_match_the_definition(case, seed):
    case = replace(case, width=min(case.width, 1) if "one" in repr(case) else case.width)
    if isinstance(case, BlockCase) and case.counts == "one" and case.width == 0:
        case = replace(case, counts="all")
    inputs, selection, options = case.build(seed)
    result = reference_attention(*inputs, selection, options)
    assert_matches_definition(result, inputs, selection, options)


@given(seed=st.integers(0, 2**16), causal=st.booleans())
@settings(max_examples=30, deadline=None)
def test_permuting_ids_changes_nothing(seed, causal):
    case = BlockCase("permute", width=4, counts="all", causal=causal, dtype=torch.float64)
    (q, k, v), selection, options = case.build(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    shuffled = replace(selection, q2k_indices=selection.q2k_indices[..., order])
    result = reference_attention(q, k, v, selection, options)
    other = reference_attention(q, k, v, shuffled, options)
    torch.testing.assert_close(result.out, other.out, rtol=1e-12, atol=1e-12)


@given(
    seed=st.integers(0, 2**16),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    causal=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_all_blocks_kept_equals_dense_attention(seed, lengths, causal):
    num_kv = -(-lengths[1] // 16)
    case = BlockCase("dense", lengths=lengths, width=num_kv, counts="all", dtype=torch.float64)
    (q, k, v), selection, options = case.build(seed)
    mask = torch.ones(lengths, dtype=torch.bool)
    if causal:
        mask = mask.tril(lengths[1] - lengths[0])
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rows = mask.any(-1)  # torch's result for a row that sees nothing is not 0 in every version
    result = reference_attention(q, k, v, selection, options._replace(causal=causal))
    torch.testing.assert_close(result.out[:, :, rows], dense[:, :, rows], rtol=1e-10, atol=1e-10)
    assert (result.out[:, :, ~rows] == 0).all()


@given(seed=st.integers(0, 2**16), split=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_splitting_the_blocks_and_merging_by_lse_equals_the_whole(seed, split):
    case = BlockCase("split", width=5, counts="all", lengths=(48, 80), dtype=torch.float64)
    (q, k, v), selection, options = case.build(seed)
    whole = reference_attention(q, k, v, selection, options)
    parts = [
        reference_attention(
            q,
            k,
            v,
            BlockSelection(
                selection.q2k_indices[..., ids],
                torch.full_like(selection.q2k_counts, ids.stop - ids.start),
                block_size=16,
            ),
            options,
        )
        for ids in (slice(0, split), slice(split, 5))
    ]
    lse = torch.stack([part.lse.double() for part in parts])
    weights = (lse - lse.logsumexp(0)).exp()
    merged = sum(w[..., None] * part.out for w, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(merged, whole.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.logsumexp(0).float(), whole.lse)


def test_the_definition_by_hand():
    """Two queries, three keys, blocks of 2: each probability can be checked on paper."""
    q = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    k = torch.tensor([0.0, 1.0, 2.0]).view(1, 1, 3, 1)
    v = torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3, 1)
    ids = torch.tensor([[[[1, 0]]]], dtype=torch.int32)
    selection = BlockSelection(ids, torch.ones(1, 1, 1, dtype=torch.int32), block_size=2)
    options = Options(softmax_scale=1.0)
    result = define_attention(q, k, v, selection, options)
    assert result.out.flatten().tolist() == [100.0, 100.0]
    assert result.lse.flatten().tolist() == [2.0, 0.0]
    both = replace(selection, q2k_counts=torch.full((1, 1, 1), 2, dtype=torch.int32))
    result = define_attention(q, k, v, both, options)
    e = 2.718281828459045
    first = (1 + 10 * e + 100 * e**2) / (1 + e + e**2)
    torch.testing.assert_close(result.out.flatten()[0].item(), first)
    torch.testing.assert_close(result.out.flatten()[1].item(), 37.0)
    # Block 1 listed twice counts twice: key 2 has weight 2 against keys 0 and 1.
    twice = torch.tensor([[[[1, 0, 1]]]], dtype=torch.int32)
    three = BlockSelection(twice, torch.full((1, 1, 1), 3, dtype=torch.int32), block_size=2)
    result = define_attention(q, k, v, three, options)
    torch.testing.assert_close(result.out.flatten()[1].item(), (1 + 10 + 200) / 4)


def test_workspace_follows_the_bound():
    """With a small bound the gathered tensors never exceed it, whatever the length of the rows."""
    case = BlockCase("long", lengths=(64, 4096), width=256, counts="all")
    (q, k, v), selection, options = case.build()
    largest = 0
    original = torch.Tensor.__getitem__

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if (
                func is original
                and isinstance(result, torch.Tensor)
                and args[0].is_floating_point()
            ):
                largest = max(largest, result.numel() * result.element_size())
            return result

    bound = 1 << 20
    with Watch():
        reference_attention(q, k, v, selection, options, max_workspace_bytes=bound)
    assert 0 < largest <= bound
