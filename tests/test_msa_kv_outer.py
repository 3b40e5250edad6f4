"""K1 and K2: merged partials against the direct form, the definition, and plain Python."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten import TokenSelection, sparse_atten_func
from sparse_atten.contracts import options_of, validate
from sparse_atten.definition import define_attention
from sparse_atten.msa import kv_outer, merge_partials, partial_attention
from sparse_atten.preparation import prepare

LENGTHS = (1, 127, 128, 129, 400, 0)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths):
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def random_ids(lengths, heads, width, generator, *, keep=0.8):
    """Distinct blocks of each token in any order, with -1 anywhere; [heads, Tq, width]."""
    rows = []
    for num_queries, num_blocks in lengths:
        noise = torch.rand(heads, num_queries, num_blocks, generator=generator)
        ids = torch.nn.functional.pad(noise.argsort(-1), (0, width), value=-1)[..., :width]
        dropped = torch.rand(ids.shape, generator=generator) > keep
        order = torch.rand(ids.shape, generator=generator).argsort(-1)
        rows.append(ids.masked_fill(dropped, -1).gather(-1, order))
    return torch.cat(rows, 1).to(torch.int32)


def flat_problem(
    q_lengths, k_lengths, *, group, heads=2, width=4, block=128, dim=16, value_dim=16,
    dtype=torch.float32, padding=0, seed=0,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    blocks = [-(-length // block) for length in k_lengths]
    ids = random_ids(list(zip(q_lengths, blocks, strict=True)), heads, width, generator)
    ids = torch.nn.functional.pad(ids, (0, 0, 0, padding), value=5)  # padding ids are not read
    selection = TokenSelection(
        ids, offsets(q_lengths), offsets(k_lengths), max(q_lengths), max(k_lengths),
        block_size=block,
    )  # fmt: skip
    num_queries, num_keys = sum(q_lengths) + padding, sum(k_lengths)
    q = randn(num_queries, heads * group, dim)
    return q, randn(num_keys, heads, dim), randn(num_keys, heads, value_dim), selection


def paged(q, k, v, selection, layout):
    """Move flat keys and values into shuffled pages; the rest of the pools is NaN."""
    block = selection.block_size
    lengths = selection.cu_seqlens_k.diff().tolist()
    starts = selection.cu_seqlens_k.tolist()
    blocks = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    pools = []
    for x in (k, v):
        pool = torch.full((len(order), block, *x.shape[1:]), math.nan, dtype=x.dtype)
        pages = iter(order)
        for b, count in enumerate(blocks):
            for j in range(count):
                page = table[b, j] = next(pages)
                rows = x[starts[b] + j * block : starts[b] + min((j + 1) * block, lengths[b])]
                pool[page, : rows.shape[0]] = rows
        pools.append(pool if layout == "nhd" else pool.transpose(1, 2).contiguous())
    selection = dataclasses.replace(
        selection, cu_seqlens_k=None, page_table=table, seqused_k=int32(lengths), kv_layout=layout
    )
    return q, *pools, selection


def merged(q, k, v, selection, *, num_sms=148, **options):
    prepared = prepare(selection, q, k, num_sms=num_sms)
    o_partial, lse_partial, *rest = partial_attention(q, k, v, prepared, **options)
    more = {"lse_t_partial": rest[0]} if rest else {}
    return merge_partials(o_partial, lse_partial, prepared.schedule.split_counts, **more)


def assert_equal_everywhere(problem, *, causal, tolerance=1e-5, **more):
    """K2 over K1 equals the definition and the direct form."""
    got = merged(*problem, causal=causal, **more)
    more.pop("num_sms", None)
    warm = more.get("lse_temperature")
    direct = sparse_atten_func(*problem, causal=causal, return_lse=True, **more)
    options = options_of(
        problem[0], causal=causal, softmax_scale=more.get("softmax_scale"),
        lse_temperature=warm, return_lse=True,
    )  # fmt: skip
    defined = define_attention(*problem, options)
    for x, y, z in zip(got, direct, defined, strict=False):
        torch.testing.assert_close(x.double(), z, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(x.double(), y.double(), atol=1e-5, rtol=1e-5)
    assert len(got) == (3 if warm else 2)


BATCHES = {
    "equal": (LENGTHS, LENGTHS),
    "queries longer": ((3, 200, 0, 7, 130, 20), (1, 127, 128, 0, 129, 3)),
    "keys longer": ((1, 1, 60, 5, 30, 0), (1, 127, 400, 128, 129, 2)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block", [16, 128])
def test_merged_partials_equal_the_definition(batch, causal, block):
    problem = flat_problem(*BATCHES[batch], group=2, block=block, padding=2)
    assert_equal_everywhere(problem, causal=causal)


@pytest.mark.parametrize("group", [1, 2, 4, 16])
def test_group_sizes(group):
    problem = flat_problem((129, 0, 40), (129, 30, 100), group=group, block=32, width=3)
    assert_equal_everywhere(problem, causal=True)


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("causal", [False, True])
def test_paged_keys_in_shuffled_pages(layout, causal):
    flat = flat_problem((3, 60, 9, 1), (40, 33, 0, 64), group=2, block=16, padding=1)
    problem = paged(*flat, layout)
    assert_equal_everywhere(problem, causal=causal)
    for x, y in zip(merged(*problem, causal=causal), merged(*flat, causal=causal), strict=True):
        assert torch.equal(x, y)


def test_temperature_lse_scale_and_value_dim():
    problem = flat_problem((70, 9), (70, 90), group=2, block=16, value_dim=8)
    assert_equal_everywhere(problem, causal=True, lse_temperature=0.5, softmax_scale=0.7)


def test_float64_stays_float64():
    problem = flat_problem((50,), (70,), group=2, block=16, dtype=torch.float64)
    out, lse = merged(*problem, causal=True)
    options = options_of(
        problem[0], causal=True, softmax_scale=None, lse_temperature=None, return_lse=True
    )
    defined = define_attention(*problem, options)
    torch.testing.assert_close(out, defined.out, atol=1e-13, rtol=0)
    torch.testing.assert_close(lse, defined.lse, atol=1e-13, rtol=0)


def test_bfloat16_is_accumulated_in_float32():
    problem = flat_problem((50,), (70,), group=2, block=16, dtype=torch.bfloat16)
    prepared = prepare(problem[3], problem[0], problem[1])
    o_partial, lse_partial = partial_attention(*problem[:3], prepared)
    assert o_partial.dtype == lse_partial.dtype == torch.float32
    out, _ = merge_partials(
        o_partial, lse_partial, prepared.schedule.split_counts, dtype=torch.bfloat16
    )
    wanted = sparse_atten_func(*problem)
    torch.testing.assert_close(out, wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("ambient", ["bfloat16 autocast", "float64 default"])
def test_settings_of_the_callers_program_change_nothing(ambient):
    problem = flat_problem((50,), (70,), group=2, block=16)
    wanted = merged(*problem, causal=True)
    if ambient == "float64 default":
        torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient == "bfloat16 autocast"):
            got = merged(*problem, causal=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("num_sms", [1, 4, 10_000])
def test_hot_block_is_split_over_items(num_sms):
    q, k, v, selection = flat_problem((300,), (60,), group=16, heads=1, block=16, width=3)
    ids = torch.full_like(selection.q2k_indices, -1)
    ids[0, :, 2] = 1  # chosen by all
    ids[0, ::7, 0] = 3
    selection = dataclasses.replace(selection, q2k_indices=ids)
    prepared = prepare(selection, q, k, num_sms=num_sms)
    items = prepared.schedule.work_items[: prepared.schedule.num_items]
    hot = int((items[:, 5] == 1).sum())
    assert hot == -(-300 // prepared.schedule.target_q_per_cta)
    assert hot > 1
    assert_equal_everywhere((q, k, v, selection), causal=False, num_sms=num_sms)


@pytest.mark.parametrize("tokens", [1, 7, 40, 64])
@pytest.mark.parametrize("layout", [None, "nhd"])
def test_chunks_hold_the_partials_of_their_tokens(tokens, layout):
    lengths = (30, 1, 0, 61), (70, 9, 16, 40)
    problem = flat_problem(*lengths, group=2, block=16, padding=3, dtype=torch.float64)
    if layout:
        problem = paged(*problem, layout)
    q, k, v, selection = problem
    bound = tokens * selection.q2k_indices.shape[2] * q.shape[1] * (8 * q.shape[2] + 8)
    prepared = prepare(selection, q, k, max_workspace_bytes=bound)
    assert len(prepared.chunks) == -(-95 // tokens)
    assert max(chunk.num_tokens for chunk in prepared.chunks) <= tokens
    options = {"causal": True, "lse_temperature": 0.5}
    whole = partial_attention(q, k, v, prepare(selection, q, k), **options)
    parts = [
        partial_attention(q, k, v, prepared, chunk=i, **options)
        for i in range(len(prepared.chunks))
    ]
    for wanted, *got in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat(got, 1), wanted, equal_nan=True)
    counts = [chunk.schedule.split_counts for chunk in prepared.chunks]
    assert torch.equal(torch.cat(counts), prepare(selection, q, k).schedule.split_counts)
    with pytest.raises(ValueError, match=rf"chunk must be in 0\.\.{len(parts) - 1}, got"):
        partial_attention(q, k, v, prepared, chunk=len(parts))


def test_partials_by_hand():
    # Two blocks of one key each, one head: a partial is the value itself, its LSE the score.
    q, k = torch.tensor([[[2.0]], [[3.0]]]), torch.tensor([[[1.0]], [[5.0]]])
    v = torch.tensor([[[7.0]], [[11.0]]])
    selection = TokenSelection(
        int32([[[1, 0], [-1, 1]]]), int32([0, 2]), int32([0, 2]), 2, 2, block_size=1
    )
    prepared = prepare(selection, q, k)
    o_partial, lse_partial = partial_attention(q, k, v, prepared, causal=True)
    # Token 0 does not see block 1, which stands first in its list; token 1 has one partial.
    assert o_partial[:, :, 0, 0].nan_to_num(-1).tolist() == [[0, 11], [7, -1]]
    assert lse_partial[:, :, 0].nan_to_num(-1, neginf=-9).tolist() == [[-9, 15], [2, -1]]
    out, lse = merge_partials(o_partial, lse_partial, prepared.schedule.split_counts)
    assert out.flatten().tolist() == [7, 11]
    assert lse.flatten().tolist() == [2, 15]


def test_what_is_not_seen_has_no_effect():
    q, k, v, selection = flat_problem((40, 5), (40, 20), group=2, block=16)
    wanted = merged(q, k, v, selection, causal=True)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[39], bad_v[39] = math.nan, math.inf  # causal: the last query of sequence 0 alone sees it
    got = merged(q, bad_k, bad_v, selection, causal=True)
    assert all(torch.equal(x[:39], y[:39]) for x, y in zip(got, wanted, strict=True))
    assert all(torch.equal(x[40:], y[40:]) for x, y in zip(got, wanted, strict=True))
    sees = (selection.q2k_indices[:, 39] == 2).any(-1)
    assert sees.any()
    assert not got[0][39].unflatten(0, (2, 2))[sees].isfinite().any()


def test_pages_outside_the_pool_hold_nothing(monkeypatch):
    # Ids of a device tensor are not checked at the call.
    monkeypatch.setattr(kv_outer, "check", validate)
    q, k, v, selection = paged(*flat_problem((6,), (64,), group=1, block=16), "hnd")
    prepared = prepare(selection, q, k)
    whole = partial_attention(q, k, v, prepared)
    selection.page_table[0, 1] = 10**6
    holed = partial_attention(q, k, v, prepared)
    lists = prepared.selection.q2k_indices
    for head in range(2):
        for token in range(6):
            for slot, block in enumerate([b for b in lists[head, token].tolist() if b >= 0]):
                got, wanted = ([x[slot, token, head] for x in pair] for pair in (holed, whole))
                if block == 1:
                    wanted = [torch.zeros(16), torch.tensor(-math.inf)]
                assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_batches(data):
    draw = data.draw
    block = draw(st.sampled_from([1, 4, 16]), "block")
    lengths = st.integers(0, 30) if block > 1 else st.integers(0, 6)
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4), "lengths")
    problem = flat_problem(
        *zip(*pairs, strict=True),
        group=draw(st.sampled_from([1, 2, 3, 8]), "group"),
        heads=draw(st.integers(1, 3), "heads"),
        width=draw(st.integers(0, 5), "width"),
        block=block,
        padding=draw(st.integers(0, 2), "padding"),
        seed=draw(st.integers(0, 999), "seed"),
    )
    if draw(st.booleans(), "paged"):
        problem = paged(*problem, draw(st.sampled_from(["hnd", "nhd"]), "layout"))
    num_sms = draw(st.sampled_from([1, 148]), "num_sms")
    assert_equal_everywhere(problem, causal=draw(st.booleans(), "causal"), num_sms=num_sms)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 4), st.integers(0, 3), st.sampled_from([1, 3]), st.integers(0, 999))
def test_merge_equals_a_loop_in_python(width, heads, group, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (width, 5, heads * group)
    o_partial = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
    lse_partial = torch.randn(shape, generator=generator, dtype=torch.float64) * 30
    lse_partial.masked_fill_(torch.rand(shape, generator=generator) < 0.3, -math.inf)
    counts = torch.randint(-1, width + 2, (5, heads), generator=generator, dtype=torch.int32)
    live = torch.zeros(shape, dtype=torch.bool)
    for token in range(5):
        for head in range(heads * group):
            live[: max(0, int(counts[token, head // group])), token, head] = True
    o_partial[~live] = math.nan  # slots after the count are never read
    lse_partial[~live] = math.nan

    out, lse = merge_partials(o_partial, lse_partial, counts)
    for token in range(5):
        for head in range(heads * group):
            used = [s for s in range(width) if live[s, token, head]]
            total = sum(math.exp(lse_partial[s, token, head]) for s in used)
            if total == 0:
                assert out[token, head].tolist() == [0, 0]
                assert lse[token, head] == -math.inf
                continue
            terms = [
                math.exp(lse_partial[s, token, head]) * o_partial[s, token, head] for s in used
            ]
            torch.testing.assert_close(out[token, head], sum(terms) / total)
            assert math.isclose(lse[token, head], math.log(total), rel_tol=1e-12, abs_tol=1e-12)


def test_merge_survives_lses_of_any_size():
    # exp(lse_s - lse) would inherit the rounding of lse, 5e-4 at 1e4: weights that sum to 0.9998.
    lse_partial = torch.tensor([[[1e4, -1e4, 88.0]], [[1e4, -1e4, -math.inf]]])
    o_partial = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 3, 4)
    out, lse = merge_partials(o_partial, lse_partial, int32([[2]]))
    assert out[0, :, 0].tolist() == [2, 2, 1]
    torch.testing.assert_close(lse[0], torch.tensor([1e4 + math.log(2), math.log(2) - 1e4, 88]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"o": torch.zeros(2, 3, 4)}, ValueError, r"o_partial must be \[K, Tq, Hq, D\], got"),
        ({"o": int32([1])}, TypeError, "o_partial must be a floating-point Tensor, got int32"),
        ({"lse": torch.zeros(2, 3, 5)}, ValueError, r"lse_partial must be .* = \[2, 3, 4\], got"),
        ({"lse": torch.zeros(2, 3, 4).half()}, TypeError, "lse_partial must be float32 or float64"),
        ({"counts": torch.zeros(3, 2)}, TypeError, r"split_counts must be int32 .*, got float32"),
        ({"counts": int32([[1, 1, 1]] * 3)}, ValueError, "Hkv a divisor of 4, got int32"),
        (
            {"counts": int32([[1, 1]] * 4)},
            ValueError,
            r"split_counts must be int32 .* = \[3, Hkv\]",
        ),
    ],
)
def test_merge_names_what_is_wrong(change, error, message):
    good = {
        "o": torch.zeros(2, 3, 4, 8),
        "lse": torch.zeros(2, 3, 4),
        "counts": int32([[1, 1]] * 3),
    }
    with pytest.raises(error, match=message):
        merge_partials(*(good | change).values())


def test_k1_wants_a_prepared_selection_of_its_tensors():
    q, k, v, selection = flat_problem((6,), (32,), group=1, block=16)
    with pytest.raises(TypeError, match=r"prepared must be what prepare\(\) returned, got"):
        partial_attention(q, k, v, selection)
    with pytest.raises(ValueError, match=r"q2k_indices must be int32 \[Hkv, Tq, K\] = \[2, 5, K\]"):
        partial_attention(q[:5], k, v, prepare(selection, q, k))
