"""The k2q CSR and the transposed block lists against plain Python lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten.csr import build_k2q_csr, row_bound, transpose_block_lists

PROPERTY = settings(max_examples=80, deadline=None)
LENGTHS = [0, 1, 2, 7, 8, 9, 127, 128, 129, 300]


def int32(values, shape=None):
    tensor = torch.tensor(values, dtype=torch.int32)
    return tensor if shape is None else tensor.reshape(shape)


def offsets(lengths):
    """cu_seqlens of a list of lengths."""
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def csr_of_lists(table, q_lengths, k_lengths, block_size, num_rows):
    """What the CSR must hold, by appending to one list per row.

    `table` is [Hkv][Tq][K]; query tokens past the sequences are padding. Returns, for each head,
    the rows of (local query, token, lane), then the coordinates of the rows and the bad edges.
    """
    coords = [(b, j) for b, length in enumerate(k_lengths) for j in range(-(-length // block_size))]
    row_of = {coord: row for row, coord in enumerate(coords)}
    owners = [(b, local) for b, length in enumerate(q_lengths) for local in range(length)]
    heads, bad = [], []
    for h, lists in enumerate(table):
        rows = [[] for _ in range(num_rows)]
        for token, (b, local) in enumerate(owners):
            for lane, block in enumerate(lists[token]):
                row = row_of.get((b, block), num_rows)
                if row < num_rows:
                    rows[row].append((local, token, lane))
                elif block != -1:
                    bad.append((h, token, lane))
        heads.append(rows)
    coords = (coords + [(-1, -1)] * num_rows)[:num_rows]
    return heads, coords, bad


def assert_csr(csr, expected, num_queries, width):
    heads, coords, bad = expected
    slots = num_queries * width
    for tensor in (csr.row_ptr, csr.q_indices, csr.edge_ids, csr.row_coords):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert csr.num_bad_edges.dtype == torch.int64
    assert csr.num_bad_edges.tolist() == [len(bad)]
    assert (csr.num_queries, csr.table_width) == (num_queries, width)
    assert csr.row_coords.shape == (len(coords), 2)
    assert csr.row_coords.tolist() == [list(coord) for coord in coords]
    assert csr.row_ptr.shape == (len(heads), len(coords) + 1)
    assert csr.q_indices.shape == csr.edge_ids.shape == (len(heads), slots)
    for h, rows in enumerate(heads):
        edges = [edge for row in rows for edge in row]
        tail = [-1] * (slots - len(edges))
        assert csr.row_ptr[h].tolist() == [
            sum(len(row) for row in rows[:r]) for r in range(len(rows) + 1)
        ]
        assert csr.q_indices[h].tolist() == [local for local, _, _ in edges] + tail
        assert csr.edge_ids[h].tolist() == [t * width + lane for _, t, lane in edges] + tail


@st.composite
def batches(draw):
    """A packed batch with lists that hold -1, duplicates and ids of no block."""
    block_size = draw(st.sampled_from([1, 2, 8, 128]))
    k_lengths = draw(st.lists(st.sampled_from(LENGTHS), max_size=5))
    if block_size == 1:
        k_lengths = [min(length, 9) for length in k_lengths]
    q_lengths = [draw(st.integers(0, 5)) for _ in k_lengths]
    padding = draw(st.integers(0, 2))
    heads, width = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    num_queries = sum(q_lengths) + padding
    most = max([-(-length // block_size) for length in k_lengths], default=0)
    wild = st.sampled_from([-(2**31), -7, -2, most, most + 1, 2**31 - 1])
    ids = st.one_of(st.just(-1), st.integers(0, max(most - 1, 0)), wild)
    if draw(st.booleans()):
        ids = st.one_of(st.just(-1), st.just(0), st.integers(0, min(most, 1)))
    lists = st.lists(ids, min_size=width, max_size=width)
    table = [[draw(lists) for _ in range(num_queries)] for _ in range(heads)]
    rows = sum(-(-length // block_size) for length in k_lengths)
    num_rows = draw(st.sampled_from([rows, rows + 3, max(rows - 2, 0), 0]))
    return table, q_lengths, k_lengths, block_size, num_rows, (heads, num_queries, width)


@PROPERTY
@given(batches(), st.sampled_from(["flat", "shortened", "paged"]), st.booleans(), st.data())
def test_csr_equals_plain_lists(batch, kind, strided, data):
    table, q_lengths, k_lengths, block_size, num_rows, shape = batch
    q2k = int32(table, shape)
    if strided:
        q2k = q2k.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    cu_seqlens_k, seqused_k, used = offsets(k_lengths), None, k_lengths
    if kind != "flat":
        some = st.integers(-3, 300) if kind == "shortened" else st.just(None)
        used = [
            length if cut is None else min(length, max(cut, 0))
            for length, cut in ((length, data.draw(some)) for length in k_lengths)
        ]
        seqused_k = int32(used)
    if kind == "paged":
        cu_seqlens_k = None
    csr = build_k2q_csr(
        q2k,
        offsets(q_lengths),
        cu_seqlens_k,
        block_size=block_size,
        seqused_k=seqused_k,
        num_rows=num_rows,
    )
    expected = csr_of_lists(table, q_lengths, used, block_size, num_rows)
    assert_csr(csr, expected, *shape[1:])


@PROPERTY
@given(batches())
def test_check_names_the_first_bad_edge(batch):
    table, q_lengths, k_lengths, block_size, num_rows, shape = batch
    *_, bad = csr_of_lists(table, q_lengths, k_lengths, block_size, num_rows)
    arguments = (int32(table, shape), offsets(q_lengths), offsets(k_lengths))
    options = {"block_size": block_size, "num_rows": num_rows, "check": True}
    if not bad:
        assert build_k2q_csr(*arguments, **options).num_bad_edges.item() == 0
        return
    h, token, lane = bad[0]
    message = rf"q2k_indices\[{h}, {token}, {lane}\].*\({len(bad)} bad edges in all\)"
    with pytest.raises(ValueError, match=message):
        build_k2q_csr(*arguments, **options)


def test_the_worked_example():
    q2k = int32([[[0, 1], [0, 2], [1, 2], [2, 3]]])
    csr = build_k2q_csr(q2k, int32([0, 4]), int32([0, 512]), num_rows=4, check=True)
    assert csr.row_ptr.tolist() == [[0, 2, 4, 7, 8]]
    assert csr.q_indices.tolist() == [[0, 1, 0, 2, 1, 2, 3, 3]]
    assert csr.edge_ids.tolist() == [[0, 2, 1, 4, 3, 5, 6, 7]]
    assert csr.row_coords.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]


def test_one_hot_block_holds_every_query_in_order():
    q2k = torch.full((2, 1000, 3), -1, dtype=torch.int32)
    q2k[..., 1] = 5
    csr = build_k2q_csr(q2k, int32([0, 1000]), int32([0, 1000]), num_rows=8)
    assert csr.row_ptr.tolist() == [[0] * 6 + [1000] * 3] * 2
    assert csr.q_indices[:, :1000].tolist() == [list(range(1000))] * 2


def test_a_repeated_block_gives_an_entry_for_each_lane():
    csr = build_k2q_csr(int32([[[1, -1, 1, 1]]]), int32([0, 1]), int32([0, 200]), num_rows=2)
    assert csr.row_ptr.tolist() == [[0, 0, 3]]
    assert csr.q_indices.tolist() == [[0, 0, 0, -1]]
    assert csr.edge_ids.tolist() == [[0, 2, 3, -1]]


def test_many_short_sequences():
    lengths = [(7 * b) % 3 for b in range(512)]
    keys = [(5 * b) % 130 for b in range(512)]
    table = [[[b % 2, -1, 0] for b, length in enumerate(lengths) for _ in range(length)]]
    shape = (1, sum(lengths), 3)
    num_rows = row_bound(512, total_k=sum(keys))
    csr = build_k2q_csr(int32(table, shape), offsets(lengths), offsets(keys), num_rows=num_rows)
    assert_csr(csr, csr_of_lists(table, lengths, keys, 128, num_rows), *shape[1:])


def test_padding_tokens_own_no_edges_and_are_not_counted():
    q2k = int32([[[0], [99], [0], [-5]]])
    csr = build_k2q_csr(q2k, int32([1, 1, 3]), int32([0, 128, 256]), num_rows=2)
    assert csr.num_bad_edges.tolist() == [1]
    assert csr.q_indices.tolist() == [[1, -1, -1, -1]]
    assert csr.row_ptr.tolist() == [[0, 0, 1]]


def test_offsets_out_of_order_or_range_are_clamped():
    q2k = torch.zeros(1, 6, 1, dtype=torch.int32)
    csr = build_k2q_csr(q2k, int32([-9, 4, 2, 99]), int32([0, 128, 100, 228]), num_rows=9)
    assert csr.row_coords[:3].tolist() == [[0, 0], [2, 0], [-1, -1]]
    assert csr.row_ptr[0, :3].tolist() == [0, 4, 6]
    assert csr.q_indices.tolist() == [[0, 1, 2, 3, 0, 1]]


def test_extreme_lengths_neither_overflow_nor_leave_the_rows():
    q2k = int32([[[2**24 - 1], [0], [2**24]]])
    lengths = int32([2**31 - 1, -(2**31), 2**31 - 1])
    csr = build_k2q_csr(q2k, int32([0, 1, 2, 3]), seqused_k=lengths, num_rows=3)
    assert csr.num_bad_edges.tolist() == [3]
    assert csr.row_coords.tolist() == [[0, 0], [0, 1], [0, 2]]
    assert csr.q_indices.tolist() == [[-1, -1, -1]]


def test_the_order_of_sequences_moves_rows_only():
    generator = torch.Generator().manual_seed(0)
    q_lengths, k_lengths, order = [3, 5, 4], [300, 128, 257], [2, 0, 1]
    lists = [torch.randint(-1, 3, (2, length, 4), generator=generator) for length in q_lengths]

    def rows(sequence_order):
        csr = build_k2q_csr(
            torch.cat([lists[b] for b in sequence_order], dim=1).to(torch.int32),
            offsets([q_lengths[b] for b in sequence_order]),
            offsets([k_lengths[b] for b in sequence_order]),
            num_rows=7,
        )
        found = {}
        for r, (b, j) in enumerate(csr.row_coords.tolist()):
            spans = [csr.row_ptr[h, r : r + 2].tolist() for h in range(2)]
            found[sequence_order[b], j] = [
                csr.q_indices[h, start:stop].tolist() for h, (start, stop) in enumerate(spans)
            ]
        return found

    assert rows([0, 1, 2]) == rows(order)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_empty_tables(shape, num_rows):
    q2k = torch.zeros(shape, dtype=torch.int32)
    csr = build_k2q_csr(q2k, int32([0, shape[1]]), int32([0, 256]), num_rows=num_rows, check=False)
    table = q2k.tolist() if shape[0] else []
    assert_csr(csr, csr_of_lists(table, [shape[1]], [256], 128, num_rows), *shape[1:])


def test_no_sequence_leaves_every_token_padding():
    csr = build_k2q_csr(int32([[[0], [4]]]), int32([0]), int32([0]), num_rows=2)
    assert_csr(csr, csr_of_lists([[[0], [4]]], [], [], 128, 2), 2, 1)


def test_no_value_is_read_on_the_host():
    q2k = torch.empty(2, 9, 4, dtype=torch.int32, device="meta")
    offset = torch.empty(4, dtype=torch.int32, device="meta")
    used = torch.empty(3, dtype=torch.int32, device="meta")
    csr = build_k2q_csr(q2k, offset, offset, seqused_k=used, num_rows=5)
    assert csr.row_ptr.shape == (2, 6)
    assert csr.q_indices.shape == (2, 36)
    lists = torch.empty(1, 2, 3, 4, dtype=torch.int32, device="meta")
    indices, counts = transpose_block_lists(lists, lists[..., 0], 7)
    assert indices.shape == (1, 2, 7, 3)
    assert counts.shape == (1, 2, 7)


def test_offsets_pass_32_bits_where_the_edges_do():
    q2k = torch.empty(1, 2**20, 2**11, dtype=torch.int32, device="meta")
    offset = torch.empty(2, dtype=torch.int32, device="meta")
    csr = build_k2q_csr(q2k, offset, offset, num_rows=5)
    assert csr.row_ptr.dtype == csr.edge_ids.dtype == torch.int64
    assert csr.q_indices.dtype == torch.int32


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
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = build_k2q_csr(*arguments, num_rows=17)
    for name in ("row_ptr", "q_indices", "edge_ids", "row_coords", "num_bad_edges"):
        assert torch.equal(getattr(csr, name).cpu(), getattr(expected, name)), name


@given(st.lists(st.integers(0, 500), max_size=8), st.integers(1, 200))
def test_row_bound_suffices(lengths, block_size):
    rows = sum(-(-length // block_size) for length in lengths)
    assert row_bound(len(lengths), block_size, total_k=sum(lengths)) >= rows
    assert row_bound(len(lengths), block_size, max_seqlen_k=max(lengths, default=0)) >= rows


def test_row_bound_is_the_formula():
    assert row_bound(3, total_k=1000) == 1000 // 128 + 3
    assert row_bound(3, 64, max_seqlen_k=129) == 9
    assert row_bound(0, total_k=0) == row_bound(4, max_seqlen_k=0) == 0


@PROPERTY
@given(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 5), st.integers(0, 4)),
    st.integers(0, 5),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_transposed_lists_equal_plain_lists(shape, num_kv_blocks, dense_rows, random):
    batch, heads, num_q_blocks, width = shape
    dense_rows = min(dense_rows, num_q_blocks)
    pool = [*range(-2, num_kv_blocks + 2), -(2**31), 2**31 - 1]
    table = torch.tensor(
        [random.choice(pool) for _ in range(batch * heads * num_q_blocks * width)],
        dtype=torch.int32,
    ).reshape(shape)
    counts = int32(
        [random.choice([-1, 0, 1, width, width + 1]) for _ in range(batch * heads * num_q_blocks)],
        shape[:3],
    )
    indices, k2q_counts = transpose_block_lists(table, counts, num_kv_blocks, dense_rows=dense_rows)
    assert indices.dtype == k2q_counts.dtype == torch.int32
    assert indices.shape == (batch, heads, num_kv_blocks, num_q_blocks)
    assert indices.is_contiguous()
    assert k2q_counts.shape == (batch, heads, num_kv_blocks)
    for b in range(batch):
        for h in range(heads):
            for j in range(num_kv_blocks):
                chosen = [
                    i
                    for i in range(num_q_blocks)
                    if i < dense_rows or j in table[b, h, i, : max(counts[b, h, i], 0)].tolist()
                ]
                assert k2q_counts[b, h, j].item() == len(chosen)
                tail = [-1] * (num_q_blocks - len(chosen))
                assert indices[b, h, j].tolist() == chosen + tail


TABLE = torch.zeros(2, 4, 3, dtype=torch.int32)
REFUSED = [
    ({"q2k_indices": TABLE.long()}, TypeError, r"q2k_indices must be int32 \[Hkv, Tq, K\], got in"),
    ({"q2k_indices": TABLE[0]}, ValueError, r"q2k_indices must be .*, got int32 \[4, 3\] on cpu"),
    ({"cu_seqlens_q": [0, 4]}, TypeError, r"cu_seqlens_q must be int32 \[B \+ 1\], got list"),
    ({"cu_seqlens_q": int32([])}, ValueError, r"cu_seqlens_q must hold at least one offset"),
    (
        {"cu_seqlens_q": int32([0, 4]).to("meta")},
        ValueError,
        r"cu_seqlens_q must be on q2k_indices's device cpu, got int32 \[2\] on meta",
    ),
    (
        {"cu_seqlens_k": int32([0, 1, 2])},
        ValueError,
        r"cu_seqlens_k must be int32 \[B \+ 1\] = \[2\], got int32 \[3\] on cpu",
    ),
    (
        {"cu_seqlens_k": None},
        ValueError,
        r"seqused_k must be int32 \[B\] = \[1\] without cu_seqlens_k, got None",
    ),
    ({"seqused_k": torch.ones(1)}, TypeError, r"seqused_k must be .*, got float32 \[1\] on cpu"),
    ({"seqused_k": int32([1, 2])}, ValueError, r"seqused_k must be int32 \[B\] = \[1\], got int32"),
    ({"block_size": 0}, ValueError, r"block_size must be at least 1, got 0"),
    ({"num_rows": -1}, ValueError, r"num_rows must be in 0..2147483647, got -1"),
    ({"num_rows": 2**31}, ValueError, r"num_rows must be in 0..2147483647, got 2147483648"),
    ({"num_rows": 2.0}, TypeError, r"num_rows must be an int, got float 2.0"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {
        "q2k_indices": TABLE,
        "cu_seqlens_q": int32([0, 4]),
        "cu_seqlens_k": int32([0, 256]),
        "num_rows": 2,
    }
    with pytest.raises(error, match=message):
        build_k2q_csr(**{**arguments, **change})


def test_check_tells_a_wrong_id_from_too_few_rows():
    arguments = (int32([[[-1, 1], [0, 4]]]), int32([0, 2]), int32([0, 256]))
    with pytest.raises(
        ValueError,
        match=r"q2k_indices\[0, 1, 1\] must be -1 or one of the 2 KV blocks of sequence 0, got 4 "
        r"\(1 bad edges in all\)",
    ):
        build_k2q_csr(*arguments, num_rows=2, check=True)
    with pytest.raises(
        ValueError,
        match=r"num_rows must be at least the 2 KV blocks of all sequences, got 1: "
        r"q2k_indices\[0, 0, 1\] = 1 of sequence 0 has no row \(2 bad edges in all\)",
    ):
        build_k2q_csr(*arguments, num_rows=1, check=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch": -1, "total_k": 5}, ValueError, r"batch must be at least 0, got -1"),
        ({"batch": 1, "total_k": -5}, ValueError, r"total_k must be at least 0, got -5"),
        ({"batch": 1, "max_seqlen_k": 1.5}, TypeError, r"max_seqlen_k must be an int, got float"),
        ({"batch": 1, "block_size": 0, "total_k": 5}, ValueError, r"block_size must be at least 1"),
        ({"batch": 1}, ValueError, r"got total_k None and max_seqlen_k None"),
        ({"batch": 1, "total_k": 1, "max_seqlen_k": 2}, ValueError, r"exactly one of total_k and"),
    ],
)
def test_row_bound_names_a_wrong_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        row_bound(**arguments)


LISTS = torch.zeros(1, 2, 3, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q2k_indices": LISTS[0]}, ValueError, r"q2k_indices must be int32 \[B, H, Nq, K\], got"),
        ({"q2k_indices": LISTS.float()}, TypeError, r"q2k_indices must be int32"),
        (
            {"q2k_counts": LISTS[0, ..., 0]},
            ValueError,
            r"q2k_counts must be int32 \[B, H, Nq\] = \[1, 2, 3\], got int32 \[2, 3\] on cpu",
        ),
        ({"num_kv_blocks": -1}, ValueError, r"num_kv_blocks must be at least 0, got -1"),
        ({"dense_rows": 4}, ValueError, r"dense_rows must be in 0..3, got 4"),
    ],
)
def test_transpose_names_a_wrong_argument(change, error, message):
    arguments = {"q2k_indices": LISTS, "q2k_counts": LISTS[..., 0], "num_kv_blocks": 5}
    with pytest.raises(error, match=message):
        transpose_block_lists(**{**arguments, **change})
