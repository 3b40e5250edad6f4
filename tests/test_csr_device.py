"""csr.cu against the torch reference: under a PTX emulator, and on a GPU where there is one."""

from __future__ import annotations

import re
import struct

import pytest
import torch
from device_cases import (
    CASES,
    CSR_TENSORS,
    assert_gaps_untouched,
    assert_same,
    emulated,
    int32,
    offsets,
    on_cuda,
    packed,
    ptx_of,
    random_tables,
    tables_of,
)
from emulation import SCHEDULES

from sparse_atten.csr import build_k2q_csr, device, preload, transpose_block_lists
from sparse_atten.csr.build import csr_of
from sparse_atten.csr.device import (
    SIGNATURES,
    Tables,
    _plan,
    csr_on_device,
    lists_on_device,
    lists_steps,
    program,
)
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")
THREE_PASSES = "three_passes"


def test_kernels_fit():
    """On one target; the schedule's tests compile the same text for the others."""
    resources = program(False).compile((9, 0)).resources
    assert set(resources) == set(SIGNATURES)
    for name, kernel in resources.items():
        assert kernel.spill_bytes == kernel.stack_bytes == 0, name
        assert kernel.registers <= 64, name
        assert kernel.shared_bytes <= 48 << 10, name


def test_signatures_are_those_of_the_kernels():
    sizes = {"u64": 8, "s64": 8, "u32": 4, "s32": 4, "b64": 8, "b32": 4, "f32": 4}
    ptx = ptx_of(program(False))
    for name, signature in SIGNATURES.items():
        head = re.search(rf"\.entry {name}\((.*?)\)", ptx, re.S).group(1)
        types = re.findall(r"\.param \.(\w+)", head)
        assert [sizes[t] for t in types] == [struct.calcsize(c) for c in signature], name


def emulate(tables, schedule, is_wide=False):
    with emulated(program(is_wide), schedule) as bind:
        csr = csr_on_device(tables, bind, is_wide=is_wide)
    assert_gaps_untouched(csr)
    return csr


@pytest.mark.parametrize("name", [name for name in CASES if name != THREE_PASSES])
def test_emulated_csr_equals_the_reference(name):
    tables = tables_of(name)
    expected = csr_of(tables)
    for schedule in (SCHEDULES[2], SCHEDULES[(0, 1, 3, 4)[len(name) % 4]]):
        assert_same(emulate(tables, schedule), expected, CSR_TENSORS)


@pytest.mark.parametrize("seed", range(12))
def test_emulated_csr_of_random_tables(seed):
    tables = random_tables(seed)
    found = emulate(tables, SCHEDULES[seed % len(SCHEDULES)])
    assert_same(found, csr_of(tables), CSR_TENSORS)


@pytest.mark.parametrize("name", ["one_hot_block", "two_passes", "wild_ids", "edge_lengths_k3"])
def test_emulated_csr_with_wide_slots(name):
    tables = tables_of(name)
    found = emulate(tables, SCHEDULES[2], is_wide=True)
    assert found.row_ptr.dtype == found.edge_ids.dtype == torch.int64
    assert_same(found, csr_of(tables), CSR_TENSORS)


def test_emulated_csr_in_three_passes(monkeypatch):
    """Over digits of 4 bits; with those of 10 a million rows take as many, as run on a GPU."""
    monkeypatch.setattr(device, "MAX_DIGIT_BITS", 4)
    tables = tables_of("two_passes")
    shape = tuple(tables.q2k_indices.shape)
    assert _plan(shape, tables.num_rows, 3, 0, False).passes == 3
    assert_same(emulate(tables, SCHEDULES[2]), csr_of(tables), CSR_TENSORS)


def test_emulated_sequences_permuted():
    generator = torch.Generator().manual_seed(3)
    q_lengths, k_lengths, order = [3, 500, 40], [300, 1280, 257], [2, 0, 1]
    lists = [torch.randint(-1, 3, (2, n, 4), generator=generator).int() for n in q_lengths]

    def rows(sequences):
        tables = Tables(
            torch.cat([lists[b] for b in sequences], dim=1),
            offsets([q_lengths[b] for b in sequences]),
            offsets([k_lengths[b] for b in sequences]),
            None,
            128,
            16,
        )
        csr = emulate(tables, SCHEDULES[1])
        return {
            (sequences[b], j): [
                csr.q_indices[h, csr.row_ptr[h, r] : csr.row_ptr[h, r + 1]].tolist()
                for h in range(2)
            ]
            for r, (b, j) in enumerate(csr.row_coords.tolist())
            if b >= 0
        }

    assert rows([0, 1, 2]) == rows(order)


def block_lists(seed, shape, num_kv):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, num_kv + 2, shape, generator=generator).int()
    ids[..., :1] = torch.where(ids[..., :1] > num_kv, 2**31 - 1, ids[..., :1])
    ids[..., -1:] = torch.where(ids[..., -1:] < 0, -(2**31), ids[..., -1:])
    counts = torch.randint(-1, shape[3] + 2, shape[:3], generator=generator).int()
    return ids, counts


LISTS = [
    ((1, 2, 70, 9), 50, 0),
    ((2, 3, 33, 5), 7, 20),
    ((1, 1, 1, 1), 1, 0),
    ((2, 1, 64, 3), 5000, 33),
    ((1, 1, 1100, 4), 40, 64),
    ((1, 2, 32, 0), 9, 32),
]


@pytest.mark.parametrize(("shape", "num_kv", "dense_rows"), LISTS)
def test_emulated_lists_equal_the_reference(shape, num_kv, dense_rows):
    ids, counts = block_lists(0, shape, num_kv)
    expected = transpose_block_lists(ids, counts, num_kv, dense_rows=dense_rows)
    strided = ids.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    for table, schedule in ((ids, SCHEDULES[2]), (strided, SCHEDULES[4])):
        with emulated(program(False), schedule) as bind:
            run = bind(lists_steps(table, counts, num_kv, dense_rows))
            found = lists_on_device(table, counts, num_kv, run)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_the_workspace_is_linear_in_slots_and_rows():
    for heads, num_queries, width in ((4, 8192, 16), (4, 2**20, 16), (1, 128, 16), (2, 2**25, 64)):
        for num_rows in (1, 64, 1000, 1280, 1281, 2**16, 2**20):
            slots, index = num_queries * width, 8 if num_queries * width >= 2**31 else 4
            plan = _plan((heads, num_queries, width), num_rows, 128, 0, index == 8)
            per_slot = index * 5 / 8 + 1 / 8 + (8 + index if num_rows > 1280 else 0)
            rest = heads * 3 * 1280 * index + 4 * num_rows + 16 * 129 + 512
            assert plan.num_bytes <= heads * slots * per_slot + rest


def test_other_tensors_take_the_reference():
    assert not runs_kernels(torch.zeros(2, dtype=torch.int32))
    assert not runs_kernels(torch.zeros(2, dtype=torch.int32, device="meta"))


def build(tables):
    """The public function; a capacity, which it does not take, goes past it."""
    if tables.key_capacity is not None:
        return csr_of(tables)
    return build_k2q_csr(
        *tables[:3],
        block_size=tables.block_size,
        seqused_k=tables.seqused_k,
        num_rows=tables.num_rows,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_csr_equals_the_reference(name):
    tables = tables_of(name)
    assert_same(build(on_cuda(tables)), csr_of(tables), CSR_TENSORS)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 4), (2, 3, 0), (2, 3, 2)])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_empty_tables(shape, num_rows):
    tables = Tables(
        torch.zeros(shape, dtype=torch.int32), int32([0, shape[1]]), int32([0, 9]), None, 128, 1
    )._replace(num_rows=num_rows)
    assert_same(build(on_cuda(tables)), csr_of(tables), CSR_TENSORS)


@pytest.mark.gpu
def test_fifty_runs_give_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    tables = packed(generator, [20_000, 12_768], [100_000, 28_000], heads=4)
    tables.q2k_indices[:, :, 3] = 5
    expected = csr_of(tables)
    tables = on_cuda(tables)
    for _ in range(50):
        assert_same(build(tables), expected, CSR_TENSORS)


@pytest.mark.gpu
def test_nothing_synchronises():
    tables = [on_cuda(tables_of(name)) for name in ("two_passes", "wild_ids")]
    preload("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for table in tables:
            build(table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wild_ids", "two_passes"])
def test_a_graph_follows_its_tables(name):
    preload("cuda")
    first, generator = tables_of(name), torch.Generator().manual_seed(9)
    tables = on_cuda(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        csr = build(tables)
    for _ in range(3):
        order = torch.randperm(first.q2k_indices.shape[1], generator=generator)
        shuffled = first.q2k_indices[:, order]
        tables.q2k_indices.copy_(shuffled)
        graph.replay()
        expected = csr_of(first._replace(q2k_indices=shuffled))
        assert_same(csr, expected, CSR_TENSORS)


@pytest.mark.gpu
def test_streams_do_not_disturb_each_other():
    names = ["wild_ids", "two_passes", "one_hot_block", "short_sequences"]
    expected = [csr_of(tables_of(name)) for name in names]
    tables = [on_cuda(tables_of(name)) for name in names]
    streams = [torch.cuda.Stream() for _ in names]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, table in zip(streams, tables, strict=True):
            with torch.cuda.stream(stream):
                found.append(build(table))
    torch.cuda.synchronize()
    for i, csr in enumerate(found):
        assert_same(csr, expected[i % len(names)], CSR_TENSORS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_need_not_be_current():
    tables = tables_of("wild_ids")
    moved = Tables(*(x.to("cuda:1") if isinstance(x, torch.Tensor) else x for x in tables))
    with torch.cuda.device(0):
        assert_same(build(moved), csr_of(tables), CSR_TENSORS)


@pytest.mark.gpu
def test_check_reports_what_the_device_counted():
    tables = tables_of("wild_ids")
    arguments = {"num_rows": tables.num_rows, "check": True}
    with pytest.raises(ValueError, match="bad edges in all") as expected:
        build_k2q_csr(*tables[:3], **arguments)
    with pytest.raises(ValueError, match="bad edges in all") as found:
        build_k2q_csr(*on_cuda(tables)[:3], **arguments)
    assert str(found.value) == str(expected.value)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "num_kv", "dense_rows"), [*LISTS, ((1, 24, 720, 72), 720, 3)])
def test_lists_equal_the_reference(shape, num_kv, dense_rows):
    ids, counts = block_lists(1, shape, num_kv)
    expected = transpose_block_lists(ids, counts, num_kv, dense_rows=dense_rows)
    found = transpose_block_lists(ids.cuda(), counts.cuda(), num_kv, dense_rows=dense_rows)
    assert torch.equal(found[0].cpu(), expected[0])
    assert torch.equal(found[1].cpu(), expected[1])


@pytest.mark.gpu
def test_more_than_two_to_the_31_slots():
    num_queries, width = 2**20, 2**11 + 1
    q2k = torch.full((1, num_queries, 1), -1, dtype=torch.int32, device="cuda")
    q2k[0, ::1000, 0] = 3
    table = q2k.expand(1, num_queries, width)
    offset = int32([0, num_queries]).cuda()
    csr = build_k2q_csr(table, offset, int32([0, 1000]).cuda(), num_rows=8)
    chosen = torch.arange(0, num_queries, 1000, device="cuda")
    edges = chosen[:, None] * width + torch.arange(width, device="cuda")
    assert csr.row_ptr.tolist() == [[0] * 4 + [edges.numel()] * 5]
    assert torch.equal(csr.edge_ids[0, : edges.numel()], edges.flatten())
    assert torch.equal(csr.q_indices[0, : edges.numel()], chosen.repeat_interleave(width).int())
    assert (csr.edge_ids[0, edges.numel() :] == -1).all()
