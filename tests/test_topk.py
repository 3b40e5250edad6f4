"""block_topk against a plain Python selection, row by row."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten.topk import block_topk

NAN, INF = math.nan, math.inf
TINY = 2.0**-149  # the smallest float32 denormal
POOL = [
    -INF,
    -3.5,
    -1.0,
    -2 * TINY,
    -TINY,
    -0.0,
    0.0,
    TINY,
    2 * TINY,
    1.0,
    1.0000001,
    7.0,
    INF,
    NAN,
]
PROPERTY = settings(max_examples=60, deadline=None)


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def best(row, candidates, budget):
    """Ids of the best scores: largest first, then the lowest id; NaN and -inf are nobody's best."""
    ranked = sorted((-row[i], i) for i in candidates if row[i] > -INF)
    return [i for _, i in ranked[:budget]]


def choose(row, k, *, valid=None, local=-1, first=0, last=0):
    """What a row must give, by lists: forced ids in their order, then the best of the others."""
    valid = len(row) if valid is None else max(0, min(valid, len(row)))
    forced = [i for i in range(valid) if i < first or i >= valid - last]
    if 0 <= local < valid and local not in forced:
        forced.append(local)
    others = sorted(set(range(valid)) - set(forced))
    return sorted((forced + best(row, others, k))[:k])


def choose_in_regions(row, regions, keep_spans, valid=None):
    valid = len(row) if valid is None else max(0, min(valid, len(row)))
    chosen = [i for start, stop in keep_spans for i in range(start, stop) if i < valid]
    for start, stop, budget in regions:
        chosen += best(row, range(start, min(stop, valid)), budget)
    return sorted(chosen)


def assert_rows(result, expected, width):
    """Compare with one expected list of ids per row, rows in flat order."""
    indices, counts = result
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.shape == (*counts.shape, width)
    rows = [ids + [-1] * (width - len(ids)) for ids in expected]
    assert indices.reshape(len(rows), width).tolist() == rows
    assert counts.flatten().tolist() == [len(ids) for ids in expected]


scores_of_rows = st.integers(0, 12).flatmap(
    lambda n: st.lists(
        st.lists(
            st.one_of(st.sampled_from(POOL), st.floats(width=32)).map(float32),
            min_size=n,
            max_size=n,
        ),
        min_size=1,
        max_size=4,
    )
)


@PROPERTY
@given(scores_of_rows, st.integers(1, 16), st.data())
def test_every_row_equals_the_plain_selection(rows, k, data):
    n = len(rows[0])
    position = st.integers(-2, n + 2)
    valid = data.draw(st.none() | st.lists(position, min_size=len(rows), max_size=len(rows)))
    local = data.draw(st.none() | st.lists(position, min_size=len(rows), max_size=len(rows)))
    first, last = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    result = block_topk(
        torch.tensor(rows),
        k,
        valid_counts=None if valid is None else int32(valid),
        local_blocks=None if local is None else int32(local),
        first_blocks=first,
        last_blocks=last,
    )
    expected = [
        choose(
            row,
            k,
            valid=None if valid is None else valid[i],
            local=-1 if local is None else local[i],
            first=first,
            last=last,
        )
        for i, row in enumerate(rows)
    ]
    assert_rows(result, expected, k)


@PROPERTY
@given(scores_of_rows, st.data())
def test_regions_equal_the_plain_selection(rows, data):
    n = len(rows[0])
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=8)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    spans = data.draw(st.permutations(spans))
    whole = data.draw(st.integers(0, len(spans)))
    kept = spans[:whole]
    regions = [(*span, data.draw(st.integers(1, 6))) for span in spans[whole:]]
    valid = data.draw(
        st.none() | st.lists(st.integers(-1, n + 1), min_size=len(rows), max_size=len(rows))
    )
    result = block_topk(
        torch.tensor(rows).reshape(len(rows), n),
        valid_counts=None if valid is None else int32(valid),
        regions=regions,
        keep_spans=kept,
    )
    width = sum(budget for *_, budget in regions) + sum(stop - start for start, stop in kept)
    expected = [
        choose_in_regions(row, regions, kept, None if valid is None else valid[i])
        for i, row in enumerate(rows)
    ]
    assert_rows(result, expected, width)


def adversarial_rows():
    generator = torch.Generator().manual_seed(0)

    def few_finite(n, finite):
        row = torch.full((n,), -INF)
        places = torch.randperm(n, generator=generator)[:finite]
        row[places] = torch.randn(finite, generator=generator)
        return row

    def clustered(n):
        row = 1 + 0.001 * torch.rand(n, generator=generator)
        row[torch.tensor([5, n // 2, n - 1])] = 3.0
        return row

    return {
        "all_equal": torch.ones(3000),
        "two_values": torch.randint(0, 2, (3000,), generator=generator).float(),
        "10_finite_of_2112": few_finite(2112, 10),
        "10_finite_of_4096": few_finite(4096, 10),
        "12_finite_of_8192": few_finite(8192, 12),
        "clustered": clustered(4096),
        "denormals": TINY * torch.randint(-40, 40, (2500,), generator=generator).float(),
        "signed_zeros": torch.tensor([-0.0, 0.0] * 1200),
        "nan_and_inf": torch.tensor([NAN, INF, -INF, 1.0, -NAN] * 500),
        "all_nan": torch.full((100,), NAN),
        "descending": torch.arange(4096, 0, -1).float(),
        "ascending": torch.arange(4096).float(),
        "random": torch.randn(4096, generator=generator),
    }


@pytest.mark.parametrize("k", [1, 16, 512])
@pytest.mark.parametrize("name", adversarial_rows())
def test_adversarial_rows(name, k):
    row = adversarial_rows()[name]
    assert_rows(block_topk(row, k), [choose(row.tolist(), k)], k)


def test_ties_go_to_the_lowest_id():
    assert block_topk(torch.tensor([0.0, -0.0, 0.0, -0.0]), 3)[0].tolist() == [0, 1, 2]
    assert block_topk(torch.tensor([2.0, 5.0, 5.0, 5.0]), 2)[0].tolist() == [1, 2]


def test_infinities_and_nan():
    row = torch.tensor([NAN, 1.0, INF, -INF, 3.0e38])
    assert block_topk(row, 2)[0].tolist() == [2, 4]
    assert block_topk(row, 5)[0].tolist() == [1, 2, 4, -1, -1]


def test_forced_blocks_are_kept_whatever_their_scores():
    row = torch.tensor([-INF, 9.0, 8.0, NAN, 7.0, NAN])
    kept, count = block_topk(row, 4, first_blocks=1, last_blocks=1, local_blocks=int32(3))
    assert kept.tolist() == [0, 1, 3, 5]
    assert count.item() == 4


def test_more_forced_than_k_keeps_low_ids_and_drops_the_local_block_first():
    row = torch.zeros(8)
    options = {"first_blocks": 2, "last_blocks": 2, "local_blocks": int32(3)}
    assert block_topk(row, 5, **options)[0].tolist() == [0, 1, 3, 6, 7]
    assert block_topk(row, 4, **options)[0].tolist() == [0, 1, 6, 7]
    assert block_topk(row, 3, **options)[0].tolist() == [0, 1, 6]


def test_a_block_forced_twice_stands_once():
    row = torch.tensor([1.0, 2.0, 3.0])
    kept, count = block_topk(row, 3, first_blocks=3, last_blocks=3, local_blocks=int32(1))
    assert kept.tolist() == [0, 1, 2]
    assert count.item() == 3


def test_last_blocks_count_from_the_valid_range():
    rows = torch.zeros(3, 6)
    kept, _ = block_topk(rows, 2, valid_counts=int32([6, 3, 1]), last_blocks=2)
    assert kept.tolist() == [[4, 5], [1, 2], [0, -1]]


@pytest.mark.parametrize("local", [-1, -(2**31), 4, 2**31 - 1])
def test_a_local_block_outside_the_valid_range_forces_nothing(local):
    row = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    kept, _ = block_topk(row, 2, valid_counts=int32(4), local_blocks=int32(local))
    assert kept.tolist() == [2, 3]


def test_huge_counts_force_all_valid_blocks():
    row = torch.tensor([1.0, NAN, 3.0])
    assert block_topk(row, 3, first_blocks=2**40)[0].tolist() == [0, 1, 2]
    valid = int32(2)
    assert block_topk(row, 3, last_blocks=2**40, valid_counts=valid)[0].tolist() == [0, 1, -1]


def test_msa_scores_are_taken_along_dim_1_with_a_bound_per_query():
    heads, blocks, queries, k = 2, 9, 7, 4
    scores = torch.randn(heads, blocks, queries, generator=torch.Generator().manual_seed(1))
    valid, local = torch.arange(queries) + 1, torch.arange(queries)
    result = block_topk(
        scores,
        k,
        dim=1,
        valid_counts=valid.to(torch.int32),
        local_blocks=local.to(torch.int32),
    )
    expected = [
        choose(scores[h, :, t].tolist(), k, valid=t + 1, local=t)
        for h in range(heads)
        for t in range(queries)
    ]
    assert result[0].shape == (heads, queries, k)
    assert_rows(result, expected, k)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -3, -4])
def test_any_dim_of_strided_scores(dim):
    storage = torch.randn(5, 4, 6, 8, generator=torch.Generator().manual_seed(2))
    scores = storage.permute(2, 0, 3, 1)[::2, 1:, ::3]
    assert not scores.is_contiguous()
    rows = scores.movedim(dim, -1)
    expected = [choose(row, 3) for row in rows.reshape(-1, rows.shape[-1]).tolist()]
    result = block_topk(scores, 3, dim=dim)
    assert result[1].shape == rows.shape[:-1]
    assert_rows(result, expected, 3)


def test_repeated_memory_is_read_as_it_stands():
    scores = torch.tensor([[1.0], [2.0]]).expand(2, 5)
    assert block_topk(scores, 2)[0].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 1), (2, 3)])
def test_row_options_broadcast(shape):
    scores = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(3))
    valid = torch.arange(1, math.prod(shape) + 1, dtype=torch.int32).reshape(shape)
    full = valid.expand(2, 3)
    expected = [
        choose(scores[i, j].tolist(), 4, valid=int(full[i, j]), local=int(full[i, j]) - 1)
        for i in range(2)
        for j in range(3)
    ]
    assert_rows(block_topk(scores, 4, valid_counts=valid, local_blocks=valid - 1), expected, 4)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5), (3, 0, 4)])
def test_empty_scores(shape):
    kept, counts = block_topk(torch.empty(shape), 4, first_blocks=1, last_blocks=1)
    assert kept.shape == (*shape[:-1], 4)
    assert (kept == -1).all()
    assert counts.shape == shape[:-1]
    assert (counts == 0).all()


def test_k_may_exceed_the_blocks():
    kept, count = block_topk(torch.tensor([1.0, 2.0]), 512)
    assert kept.tolist() == [0, 1] + [-1] * 510
    assert count.item() == 2


def test_the_ids_of_regions_are_packed_in_ascending_order():
    row = torch.tensor([5.0, NAN, 1.0, 2.0, 3.0, NAN, 9.0, 8.0, 7.0])
    kept, count = block_topk(row, regions=[(6, 9, 2), (1, 5, 3)], keep_spans=[(5, 6), (0, 1)])
    assert kept.tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert count.item() == 7
    assert block_topk(row, regions=[(1, 3, 2)], keep_spans=[(5, 6)])[0].tolist() == [2, 5, -1]


def test_valid_counts_bound_regions_and_kept_spans():
    row = torch.arange(10.0)
    spans = {"regions": [(0, 4, 2), (6, 10, 2)], "keep_spans": [(4, 6)]}
    kept, _ = block_topk(row.expand(3, 10), valid_counts=int32([8, 5, 3]), **spans)
    assert kept.tolist() == [[2, 3, 4, 5, 6, 7], [2, 3, 4, -1, -1, -1], [1, 2, -1, -1, -1, -1]]


def test_an_empty_span_overlaps_nothing_and_keeps_its_budget():
    row = torch.arange(6.0)
    kept, count = block_topk(row, regions=[(0, 6, 1), (3, 3, 2)], keep_spans=[(2, 2)])
    assert kept.tolist() == [5, -1, -1]
    assert count.item() == 1


def test_no_region_chooses_nothing():
    kept, counts = block_topk(torch.zeros(3, 4), regions=[])
    assert kept.shape == (3, 0)
    assert counts.tolist() == [0, 0, 0]


def test_scores_that_record_a_gradient_are_accepted_and_not_changed():
    scores = torch.tensor([3.0, -0.0, NAN], requires_grad=True)
    kept, _ = block_topk(scores, 2)
    assert kept.tolist() == [0, 1]
    assert not kept.requires_grad
    assert scores.detach().view(torch.int32).tolist()[:2] == [0x40400000, -(2**31)]


def test_no_value_is_read_on_the_host():
    meta = torch.device("meta")
    bound = torch.empty(5, dtype=torch.int32, device=meta)
    scores = torch.empty(2, 9, 5, device=meta)
    options = {"valid_counts": bound, "local_blocks": bound, "first_blocks": 1, "last_blocks": 1}
    assert block_topk(scores, 4, dim=1, **options)[0].shape == (2, 5, 4)
    regions = block_topk(
        scores, dim=1, valid_counts=bound, regions=[(0, 4, 2)], keep_spans=[(5, 7)]
    )
    assert regions[0].shape == (2, 5, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", adversarial_rows())
def test_cuda_equals_cpu_without_a_synchronisation(name):
    row = adversarial_rows()[name]
    scores = torch.stack([row, row.flip(0), row.roll(7)])
    options = {"valid_counts": int32([row.numel(), 90, 60]), "local_blocks": int32([-1, 50, 3])}
    on_device = {key: value.cuda() for key, value in options.items()}
    device_scores = scores.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept, counts = block_topk(device_scores, 16, first_blocks=1, last_blocks=1, **on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = block_topk(scores, 16, first_blocks=1, last_blocks=1, **options)
    assert torch.equal(kept.cpu(), expected[0])
    assert torch.equal(counts.cpu(), expected[1])


ROWS = torch.zeros(2, 3, 6)
REFUSED = [
    ({"scores": [1.0]}, TypeError, r"scores must be a float32 Tensor, got list \[1.0\]"),
    (
        {"scores": ROWS.double()},
        TypeError,
        r"scores must be a float32 Tensor, got float64 \[2, 3, 6\] on cpu",
    ),
    (
        {"scores": torch.tensor(1.0)},
        ValueError,
        r"scores must have at least one dim, got float32 \[\]",
    ),
    ({"dim": 3}, ValueError, r"dim must be in -3..2, got 3"),
    ({"dim": -4}, ValueError, r"dim must be in -3..2, got -4"),
    ({"dim": 1.0}, TypeError, r"dim must be an int, got float 1.0"),
    ({"k": None}, ValueError, r"exactly one of k and regions must be given, got neither"),
    ({"regions": []}, ValueError, r"exactly one of k and regions must be given, got both"),
    ({"k": 0}, ValueError, r"k must be in 1..512, got 0"),
    ({"k": 513}, ValueError, r"k must be in 1..512, got 513"),
    ({"k": True}, TypeError, r"k must be an int, got bool True"),
    (
        {"keep_spans": [(0, 1)]},
        ValueError,
        r"keep_spans must be empty without regions, got \[\(0, 1\)\]",
    ),
    ({"first_blocks": -1}, ValueError, r"first_blocks must be at least 0, got -1"),
    ({"last_blocks": -1}, ValueError, r"last_blocks must be at least 0, got -1"),
    ({"last_blocks": None}, TypeError, r"last_blocks must be an int, got NoneType None"),
    (
        {"valid_counts": torch.zeros(2, 3)},
        TypeError,
        r"valid_counts must be int32, broadcastable to the rows \[2, 3\], got float32 \[2, 3\]",
    ),
    (
        {"valid_counts": int32([1, 2])},
        ValueError,
        r"valid_counts must be int32, broadcastable to the rows \[2, 3\], got int32 \[2\]",
    ),
    (
        {"local_blocks": 3},
        TypeError,
        r"local_blocks must be int32, broadcastable to the rows \[2, 3\], got int 3",
    ),
    (
        {"local_blocks": int32([[[1]]])},
        ValueError,
        r"local_blocks must be int32, broadcastable to the rows \[2, 3\], got int32 \[1, 1, 1\]",
    ),
    (
        {"local_blocks": torch.zeros(3, dtype=torch.int32, device="meta")},
        ValueError,
        r"local_blocks must be on scores' device cpu, got int32 \[3\] on meta",
    ),
    (
        {"regions": [(0, 3)]},
        TypeError,
        r"regions\[0\] must be \(start, stop, budget\), got \(0, 3\)",
    ),
    (
        {"regions": [(0, 1, 1), 3]},
        TypeError,
        r"regions\[1\] must be \(start, stop, budget\), got 3",
    ),
    ({"regions": [(-1, 3, 1)]}, ValueError, r"start of regions\[0\] must be in 0..6, got -1"),
    ({"regions": [(2, 7, 1)]}, ValueError, r"stop of regions\[0\] must be in 2..6, got 7"),
    ({"regions": [(3, 2, 1)]}, ValueError, r"stop of regions\[0\] must be in 3..6, got 2"),
    ({"regions": [(0, 3, 0)]}, ValueError, r"budget of regions\[0\] must be in 1..512, got 0"),
    ({"regions": [(0, 3, 513)]}, ValueError, r"budget of regions\[0\] must be in 1..512, got 513"),
    (
        {"regions": [(0, 3, 1.5)]},
        TypeError,
        r"budget of regions\[0\] must be an int, got float 1.5",
    ),
    (
        {"regions": [], "keep_spans": [(0, 1, 1)]},
        TypeError,
        r"keep_spans\[0\] must be \(start, stop\), got \(0, 1, 1\)",
    ),
    (
        {"regions": [], "keep_spans": [(0, 7)]},
        ValueError,
        r"stop of keep_spans\[0\] must be in 0..6, got 7",
    ),
    (
        {"regions": [(2, 5, 1)], "keep_spans": [(0, 3)]},
        ValueError,
        r"regions and keep_spans must not overlap, got \(0, 3\) and \(2, 5\)",
    ),
    (
        {"regions": [(0, 6, 1), (3, 4, 1)]},
        ValueError,
        r"regions and keep_spans must not overlap, got \(0, 6\) and \(3, 4\)",
    ),
    *(
        ({"regions": [(0, 6, 1)], **forced}, NotImplementedError, r"supported: k with forced")
        for forced in ({"first_blocks": 1}, {"last_blocks": 1}, {"local_blocks": int32(0)})
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {"scores": ROWS, "k": None if change.get("regions") else 2, **change}
    if "keep_spans" in change and "regions" in change:
        arguments["k"] = None
    with pytest.raises(error, match=message):
        block_topk(**arguments)
