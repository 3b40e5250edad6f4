"""The work schedule against plain Python lists, and its capacity against every distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten.csr import build_k2q_csr, row_bound
from sparse_atten.scheduler import build_schedule, target_q_per_cta, work_capacity

PROPERTY = settings(max_examples=80, deadline=None)


def int32(values, shape=None):
    tensor = torch.tensor(values, dtype=torch.int32)
    return tensor if shape is None else tensor.reshape(shape)


def offsets(lengths):
    """cu_seqlens of a list of lengths."""
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def plain_schedule(table, q_lengths, k_lengths, target, q_tok):
    """What a schedule must hold, from the lists of the queries alone.

    Returns the items, heaviest first, and {(head, token): the lanes that give a partial}.
    """
    owners = [b for b, length in enumerate(q_lengths) for _ in range(length)]
    coords = [(b, j) for b, length in enumerate(k_lengths) for j in range(-(-length // 128))]
    items, lanes = [], {}
    for h, lists in enumerate(table):
        entries = dict.fromkeys(coords, 0)
        for token, b in enumerate(owners):
            lanes[h, token] = [i for i, block in enumerate(lists[token]) if (b, block) in entries]
            for lane in lanes[h, token]:
                entries[b, lists[token][lane]] += 1
        for row, coord in enumerate(coords):
            count = entries[coord]
            items += [
                [h, row, begin, min(target, count - begin), *coord]
                for begin in range(0, count, target)
            ]
    items.sort(key=lambda item: (-math.ceil(item[3] / q_tok), item[:3]))
    return items, lanes


def assert_schedule(schedule, csr, expected, num_queries, width):
    items, lanes = expected
    heads = csr.row_ptr.shape[0]
    for tensor in (schedule.work_items, schedule.split_slot, schedule.split_counts):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    capacity = schedule.work_items.shape[0]
    assert len(items) <= capacity
    assert schedule.num_items.dtype == torch.int32
    assert schedule.num_items.tolist() == [len(items)]
    assert schedule.work_items.tolist() == items + [[-1] * 6] * (capacity - len(items))

    assert schedule.split_counts.shape == (num_queries, heads)
    assert schedule.split_counts.tolist() == [
        [len(lanes.get((h, token), [])) for h in range(heads)] for token in range(num_queries)
    ]
    assert schedule.split_slot.shape == csr.edge_ids.shape
    for h in range(heads):
        slots = [
            lanes[h, edge // width].index(edge % width) if edge >= 0 else -1
            for edge in csr.edge_ids[h].tolist()
        ]
        assert schedule.split_slot[h].tolist() == slots


def assert_covered_once(schedule, csr):
    """Every entry lies in one item of its own row and head, and no partial slot is taken twice."""
    covered = [[0] * csr.q_indices.shape[1] for _ in range(csr.row_ptr.shape[0])]
    for h, row, begin, count, b, j in schedule.work_items[: schedule.num_items.item()].tolist():
        start, stop = csr.row_ptr[h, row : row + 2].tolist()
        assert 0 < count <= schedule.target_q_per_cta
        assert begin + count <= stop - start
        assert csr.row_coords[row].tolist() == [b, j]
        for entry in range(start + begin, start + begin + count):
            covered[h][entry] += 1
    for h, counts in enumerate(covered):
        edges = csr.row_ptr[h, -1].item()
        assert counts == [1] * edges + [0] * (len(counts) - edges)
        taken = list(
            zip(
                (csr.edge_ids[h, :edges] // max(csr.table_width, 1)).tolist(),
                schedule.split_slot[h, :edges].tolist(),
                strict=True,
            )
        )
        assert len(set(taken)) == edges
        counts_of = schedule.split_counts[:, h].tolist()
        assert all(0 <= slot < counts_of[token] for token, slot in taken)


@st.composite
def batches(draw):
    """A packed batch of several sequences, some with one block that most queries choose."""
    k_lengths = draw(st.lists(st.sampled_from([0, 1, 127, 128, 129, 400]), max_size=4))
    q_lengths = [draw(st.sampled_from([0, 1, 3, 20])) for _ in k_lengths]
    num_queries = sum(q_lengths) + draw(st.integers(0, 2))
    heads, width = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    random = draw(st.randoms(use_true_random=False))
    pool = draw(st.sampled_from([[-1, 0, 1, 2, 3], [0], [-1, 0, 0, 0, 1], [-7, -1, 0, 9]]))
    table = [
        [[random.choice(pool) for _ in range(width)] for _ in range(num_queries)]
        for _ in range(heads)
    ]
    return table, q_lengths, k_lengths, (heads, num_queries, width)


@PROPERTY
@given(batches(), st.sampled_from([1, 3, 16, 64, 128, 200]), st.sampled_from([1, 2, 148]))
def test_schedule_equals_plain_lists(batch, group, num_sms):
    table, q_lengths, k_lengths, shape = batch
    heads, num_queries, width = shape
    csr = build_k2q_csr(
        int32(table, shape),
        offsets(q_lengths),
        offsets(k_lengths),
        num_rows=row_bound(len(k_lengths), total_k=sum(k_lengths)),
    )
    schedule = build_schedule(csr, num_q_heads=heads * group, num_sms=num_sms)
    q_tok = max(1, 128 // group) if heads else 128
    target = schedule.target_q_per_cta
    assert target % q_tok == 0
    expected = plain_schedule(table, q_lengths, k_lengths, target, q_tok)
    assert_schedule(schedule, csr, expected, num_queries, width)
    assert_covered_once(schedule, csr)


def test_a_hot_row_is_split():
    q2k = torch.full((2, 1000, 4), -1, dtype=torch.int32)
    q2k[..., 2] = 3
    q2k[1, :5, 0] = 1
    csr = build_k2q_csr(q2k, int32([0, 1000]), int32([0, 1000]), num_rows=8)
    schedule = build_schedule(csr, num_q_heads=32, num_sms=10)
    assert schedule.target_q_per_cta == 104
    sizes = [104] * 9 + [64]
    items = [[h, 3, 104 * i, size, 0, 3] for h in range(2) for i, size in enumerate(sizes)]
    full, tails = [item for item in items if item[3] == 104], [items[9], items[19]]
    count = schedule.num_items.item()
    assert schedule.work_items[:count].tolist() == [*full, *tails, [1, 1, 0, 5, 0, 1]]
    assert schedule.split_counts[4].tolist() == [1, 2]
    assert schedule.split_counts[5].tolist() == [1, 1]
    assert_covered_once(schedule, csr)


def test_weights_are_tiles_and_ties_follow_head_row_and_begin():
    q2k = int32([[[2]] * 9 + [[0]] * 16 + [[1]] * 8, [[2]] * 17 + [[1]] * 16])
    csr = build_k2q_csr(q2k, int32([0, 33]), int32([0, 384]), num_rows=3)
    schedule = build_schedule(csr, num_q_heads=32, num_sms=2)
    assert schedule.target_q_per_cta == 32
    items = schedule.work_items[: schedule.num_items.item()].tolist()
    assert [item[:4] for item in items] == [
        [1, 2, 0, 17],
        [0, 0, 0, 16],
        [0, 2, 0, 9],
        [1, 1, 0, 16],
        [0, 1, 0, 8],
    ]


def test_the_worked_example():
    q2k = int32([[[0, 1], [0, 2], [1, 2], [2, 3]]])
    csr = build_k2q_csr(q2k, int32([0, 4]), int32([0, 512]), num_rows=4)
    schedule = build_schedule(csr, num_q_heads=16, num_sms=132)
    assert schedule.target_q_per_cta == 8
    assert schedule.work_items.tolist() == [
        [0, 0, 0, 2, 0, 0],
        [0, 1, 0, 2, 0, 1],
        [0, 2, 0, 3, 0, 2],
        [0, 3, 0, 1, 0, 3],
    ]
    assert schedule.split_slot.tolist() == [[0, 0, 1, 0, 1, 1, 0, 1]]
    assert schedule.split_counts.tolist() == [[2], [2], [2], [2]]


def test_slots_have_no_holes_where_edges_are_dropped():
    q2k = int32([[[-1, 7, 1, 99, 0], [-9, 0, 0, -1, 1]]])
    csr = build_k2q_csr(q2k, int32([0, 2]), int32([0, 256]), num_rows=2)
    schedule = build_schedule(csr, num_q_heads=1, num_sms=1)
    assert csr.edge_ids.tolist() == [[4, 6, 7, 2, 9, -1, -1, -1, -1, -1]]
    assert schedule.split_slot.tolist() == [[1, 0, 1, 0, 2, -1, -1, -1, -1, -1]]
    assert schedule.split_counts.tolist() == [[2], [3]]


def test_many_short_sequences():
    lengths, keys = [1 + b % 2 for b in range(512)], [1 + b % 129 for b in range(512)]
    shape = (2, sum(lengths), 2)
    table = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(0)).tolist()
    num_rows = row_bound(512, max_seqlen_k=129)
    csr = build_k2q_csr(int32(table), offsets(lengths), seqused_k=int32(keys), num_rows=num_rows)
    schedule = build_schedule(csr, num_q_heads=32, num_sms=148)
    expected = plain_schedule(table, lengths, keys, schedule.target_q_per_cta, 8)
    assert_schedule(schedule, csr, expected, *shape[1:])


def test_rows_that_were_dropped_make_no_items():
    q2k = int32([[[0, 1], [1, 2]]])
    csr = build_k2q_csr(q2k, int32([0, 2]), int32([0, 384]), num_rows=2)
    schedule = build_schedule(csr, num_q_heads=1, num_sms=1)
    items, _ = plain_schedule([[[0, 1], [1, -1]]], [2], [384], schedule.target_q_per_cta, 128)
    assert schedule.work_items[: schedule.num_items.item()].tolist() == items
    assert schedule.split_counts.tolist() == [[2], [1]]


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 4), (2, 3, 0), (2, 3, 2)])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_empty_schedules(shape, num_rows):
    q2k = torch.full(shape, -1, dtype=torch.int32)
    csr = build_k2q_csr(q2k, int32([0, shape[1]]), int32([0, 256]), num_rows=num_rows)
    schedule = build_schedule(csr, num_q_heads=4 * shape[0], num_sms=4)
    empty = ([], {})
    assert_schedule(schedule, csr, empty, *shape[1:])


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 200), min_size=1, max_size=12),
    st.integers(0, 300),
    st.integers(0, 5),
)
def test_no_distribution_of_entries_exceeds_the_capacity(target, lengths, spare, empty_rows):
    items = sum(math.ceil(length / target) for length in lengths)
    capacity = work_capacity(
        num_kv_heads=1,
        num_rows=len(lengths) + empty_rows,
        num_slots=sum(lengths) + spare,
        target=target,
    )
    assert items <= capacity


@given(st.integers(1, 30), st.integers(0, 9), st.integers(1, 9), st.integers(1, 3))
def test_the_capacity_is_reached(target, full_items, rows, heads):
    num_slots = full_items * target + rows  # one row of full items, one entry more in every row
    items = full_items + rows
    shapes = {"num_kv_heads": heads, "num_rows": rows, "num_slots": num_slots}
    assert work_capacity(**shapes, target=target) == heads * items


def test_a_row_for_each_slot_needs_an_item_for_each_slot():
    shapes = {"num_kv_heads": 3, "num_slots": 50, "target": 8}
    assert work_capacity(num_rows=50, **shapes) == work_capacity(num_rows=10**6, **shapes) == 150


@given(
    st.integers(0, 10**6),
    st.integers(0, 64),
    st.integers(1, 8),
    st.integers(1, 256),
    st.integers(1, 200),
)
def test_the_target_keeps_its_promises(num_queries, width, heads, group, num_sms):
    target = target_q_per_cta(
        num_queries=num_queries,
        table_width=width,
        num_q_heads=heads * group,
        num_kv_heads=heads,
        num_sms=num_sms,
    )
    q_tok = max(1, 128 // group)
    tiles = target // q_tok
    assert target == tiles * q_tok
    assert 1 <= tiles <= 128
    edges = num_queries * width * heads
    if tiles > 4:  # at least about 8 full items for each SM
        assert edges > (tiles - 1) * q_tok * 8 * num_sms
    if tiles > 1:  # as many full items as SMs
        assert edges > (tiles - 1) * q_tok * num_sms
    if tiles < 4:  # only where more tiles would leave an SM idle
        assert edges <= tiles * q_tok * num_sms
    if tiles < 128:
        assert edges <= tiles * q_tok * 8 * num_sms


def test_the_target_of_common_shapes():
    shapes = {"table_width": 16, "num_q_heads": 64, "num_kv_heads": 4, "num_sms": 148}
    targets = [target_q_per_cta(num_queries=n, **shapes) for n in (0, 128, 8192, 32768, 2**20)]
    assert targets == [8, 32, 448, 1024, 1024]


def test_no_value_is_read_on_the_host():
    q2k = torch.empty(2, 9, 4, dtype=torch.int32, device="meta")
    offset = torch.empty(4, dtype=torch.int32, device="meta")
    csr = build_k2q_csr(q2k, offset, offset, num_rows=5)
    schedule = build_schedule(csr, num_q_heads=8, num_sms=2)
    assert schedule.split_slot.shape == (2, 36)
    assert schedule.split_counts.shape == (9, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu_without_a_synchronisation():
    generator = torch.Generator().manual_seed(0)
    q2k = torch.randint(-1, 9, (2, 700, 16), generator=generator, dtype=torch.int32)
    arguments = (q2k, int32([0, 300, 300, 690]), int32([0, 1000, 1129, 1900]))
    on_device = [tensor.cuda() for tensor in arguments]
    torch.cuda.set_sync_debug_mode("error")
    try:
        csr = build_k2q_csr(*on_device, num_rows=17)
        schedule = build_schedule(csr, num_q_heads=32, num_sms=132)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference = build_k2q_csr(*arguments, num_rows=17)
    expected = build_schedule(reference, num_q_heads=32, num_sms=132)
    for name in ("work_items", "num_items", "split_slot", "split_counts"):
        assert torch.equal(getattr(schedule, name).cpu(), getattr(expected, name)), name


CSR = build_k2q_csr(
    torch.zeros(2, 4, 3, dtype=torch.int32), int32([0, 4]), int32([0, 9]), num_rows=1
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"csr": None}, TypeError, r"csr must be a K2QCSR, got NoneType None"),
        (
            {"num_q_heads": 7},
            ValueError,
            r"num_q_heads must be a multiple of the 2 KV heads, got 7",
        ),
        ({"num_q_heads": -2}, ValueError, r"num_q_heads must be at least 0, got -2"),
        ({"num_q_heads": 8.0}, TypeError, r"num_q_heads must be an int, got float 8.0"),
        ({"num_sms": 0}, ValueError, r"num_sms must be at least 1, got 0"),
        ({"num_sms": None}, TypeError, r"num_sms must be an int, got NoneType None"),
    ],
)
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        build_schedule(**{"csr": CSR, "num_q_heads": 8, "num_sms": 4, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_queries": -1}, r"num_queries must be at least 0, got -1"),
        ({"table_width": -1}, r"table_width must be at least 0, got -1"),
        ({"num_kv_heads": 0}, r"num_q_heads must be a multiple of the 0 KV heads, got 8"),
    ],
)
def test_the_target_names_a_wrong_argument(change, message):
    shapes = {
        "num_queries": 1,
        "table_width": 1,
        "num_q_heads": 8,
        "num_kv_heads": 2,
        "num_sms": 1,
    }
    with pytest.raises(ValueError, match=message):
        target_q_per_cta(**{**shapes, **change})


@pytest.mark.parametrize("name", ["num_kv_heads", "num_rows", "num_slots", "target"])
def test_the_capacity_names_a_wrong_argument(name):
    shapes = {"num_kv_heads": 1, "num_rows": 1, "num_slots": 1, "target": 1}
    with pytest.raises(ValueError, match=rf"{name} must be at least [01], got -1"):
        work_capacity(**{**shapes, name: -1})
