"""schedule.cu against the torch reference: under a PTX emulator, and on a GPU."""

from __future__ import annotations

import dataclasses
import re
import struct

import pytest
import torch
from device_cases import (
    CASES,
    CSR_TENSORS,
    SCHEDULE_TENSORS,
    assert_gaps_untouched,
    assert_same,
    emulated,
    int32,
    on_cuda,
    packed,
    ptx_of,
    random_tables,
    tables_of,
)
from emulation import SCHEDULES, emulator

from sparse_atten.csr import build_k2q_csr
from sparse_atten.csr import device as csr_device
from sparse_atten.csr.build import csr_of
from sparse_atten.csr.device import Tables
from sparse_atten.scheduler import build_csr_and_schedule, build_schedule, device, preload
from sparse_atten.scheduler.device import (
    MAX_GROUPS,
    SIGNATURES,
    _split,
    csr_and_schedule_on_device,
    program,
    schedule_on_device,
)
from sparse_atten.scheduler.reference import Splitting, schedule_of, splitting_of

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")

BIG = ("three_passes",)
SPLITS = ((16, 4), (1, 1), (128, 148), (40, 2))  # heads of a group, SMs
ONE_SEQUENCE = (int32([0, 1600]), int32([0, 1000]))


def splitting(tables, group, num_sms):
    shape = tuple(tables.q2k_indices.shape)
    return splitting_of(
        shape, num_rows=tables.num_rows, num_q_heads=shape[0] * group, num_sms=num_sms
    )


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("is_wide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_fit(capability, is_wide):
    resources = program(is_wide).compile(capability).resources
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


def check_fused(tables, split, schedule, is_wide=False):
    expected = csr_of(tables)
    with emulated(program(is_wide), schedule) as bind:
        csr, found = csr_and_schedule_on_device(tables, split, bind, is_wide=is_wide)
    assert_gaps_untouched(csr, found)
    assert_same(csr, expected, CSR_TENSORS)
    assert_same(found, schedule_of(expected, split), SCHEDULE_TENSORS)
    assert found.target_q_per_cta == split.target


def check_alone(tables, split, schedule, is_wide=False):
    csr = csr_of(tables)
    if is_wide:
        csr = dataclasses.replace(csr, row_ptr=csr.row_ptr.long(), edge_ids=csr.edge_ids.long())
    with emulated(program(is_wide), schedule) as bind:
        found = schedule_on_device(csr, split, bind)
    assert_gaps_untouched(found)
    assert_same(found, schedule_of(csr, split), SCHEDULE_TENSORS)


@pytest.mark.parametrize("name", [name for name in CASES if name not in BIG])
def test_emulated_schedule_equals_the_reference(name):
    tables = tables_of(name)
    check_fused(tables, splitting(tables, *SPLITS[len(name) % 4]), SCHEDULES[len(name) % 5])
    check_alone(tables, splitting(tables, *SPLITS[-len(name) % 4]), SCHEDULES[2])


@pytest.mark.parametrize("seed", range(12))
def test_emulated_schedule_of_random_tables(seed):
    tables = random_tables(100 + seed)
    check_fused(tables, splitting(tables, *SPLITS[seed % 4]), SCHEDULES[seed % 5])
    check_alone(tables, splitting(tables, *SPLITS[(seed + 1) % 4]), SCHEDULES[(seed + 2) % 5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_hot_block", "two_passes", "wild_ids"])
def test_emulated_schedule_with_wide_slots(name):
    tables = tables_of(name)
    check_fused(tables, splitting(tables, 16, 4), SCHEDULES[2], is_wide=True)
    check_alone(tables, splitting(tables, 16, 4), SCHEDULES[4], is_wide=True)


def test_emulated_schedule_of_groups_of_many_rows(monkeypatch):
    """Of two groups, after three passes over digits of 4 bits: like a million rows on a GPU."""
    monkeypatch.setattr(csr_device, "MAX_DIGIT_BITS", 4)
    monkeypatch.setattr(device, "MAX_GROUPS", 2)
    tables = tables_of("two_passes")
    assert _split(tables.num_rows, splitting(tables, 16, 4))[0][4] > device.STEP_ROWS
    check_fused(tables, splitting(tables, 16, 4), SCHEDULES[2])
    check_alone(tables, splitting(tables, 128, 4), SCHEDULES[1])


@pytest.mark.parametrize("target", [1, 3, 50, 128])
def test_emulated_weights_of_every_size(target):
    """Rows of 0 to 130 entries, so that every bucket has items, full ones and last ones."""
    lists = torch.full((2, 131, 131), -1, dtype=torch.int32)
    for row in range(131):
        lists[0, :row, row] = row
        lists[1, : 130 - row, row] = row
    tables = Tables(lists, int32([0, 131]), int32([0, 131 * 128]), None, 128, 131)
    csr = csr_of(tables)
    slots = lists.shape[1] * lists.shape[2]
    split = Splitting(target, 1, 2 * (slots + 131 * (target - 1)) // target)
    check_fused(tables, split, SCHEDULES[2])
    with emulated(program(False), SCHEDULES[4]) as bind:
        found = schedule_on_device(csr, split, bind)
    assert_same(found, schedule_of(csr, split), SCHEDULE_TENSORS)


def test_emulated_overflow_traps_before_it_writes():
    tables = tables_of("one_hot_block")
    csr = csr_of(tables)
    split = splitting(tables, 16, 4)
    needed = schedule_of(csr, split).num_items.item()
    with emulated(program(False), {}) as bind:
        schedule_on_device(csr, split._replace(capacity=needed), bind)
        with pytest.raises(emulator().EmuError, match="trap"):
            schedule_on_device(csr, split._replace(capacity=needed - 1), bind)


@pytest.mark.parametrize("rows", [1, 1024, 1025, 2**18, 2**18 + 1, 2**26 + 3])
def test_groups_cover_the_rows(rows):
    (*_, groups, rows_per_group), same = _split(rows, Splitting(8, 8, 1))
    assert groups == same <= MAX_GROUPS
    assert (groups - 1) * rows_per_group < rows <= groups * rows_per_group
    assert rows_per_group % 1024 == 0


@pytest.mark.parametrize("name", list(CASES))
def test_both_at_once_equal_one_after_the_other(name):
    tables = tables_of(name)
    csr, schedule = both(tables)
    expected = csr_of(tables)
    assert_same(csr, expected, CSR_TENSORS)
    heads = tables.q2k_indices.shape[0]
    alone = build_schedule(expected, num_q_heads=16 * heads, num_sms=4)
    assert_same(schedule, alone, SCHEDULE_TENSORS)


def both(tables, group=16, num_sms=4):
    return build_csr_and_schedule(
        *tables[:3],
        num_q_heads=group * tables.q2k_indices.shape[0],
        num_sms=num_sms,
        num_rows=tables.num_rows,
        block_size=tables.block_size,
        seqused_k=tables.seqused_k,
        key_capacity=tables.key_capacity,
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key_capacity": -1}, ValueError, r"key_capacity must be at least 0, got -1"),
        ({"key_capacity": 1.0}, TypeError, r"key_capacity must be an int, got float 1.0"),
        ({"num_sms": 0}, ValueError, r"num_sms must be at least 1, got 0"),
        ({"num_rows": -1}, ValueError, r"num_rows must be in 0..2147483647, got -1"),
        ({"block_size": 0}, ValueError, r"block_size must be at least 1, got 0"),
        ({"num_q_heads": 3}, ValueError, r"num_q_heads must be a multiple of the 2 KV heads"),
        ({"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q must be int32 \[B \+ 1\], got None"),
    ],
)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {
        "q2k_indices": torch.zeros(2, 1600, 3, dtype=torch.int32),
        "cu_seqlens_q": ONE_SEQUENCE[0],
        "cu_seqlens_k": ONE_SEQUENCE[1],
        "num_q_heads": 32,
        "num_sms": 4,
        "num_rows": 8,
    }
    with pytest.raises(error, match=message):
        build_csr_and_schedule(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_schedule_equals_the_reference(name):
    tables = tables_of(name)
    group, num_sms = SPLITS[len(name) % 4]
    expected = both(tables, group, num_sms)
    csr, schedule = both(on_cuda(tables), group, num_sms)
    assert_same(csr, expected[0], CSR_TENSORS)
    assert_same(schedule, expected[1], SCHEDULE_TENSORS)
    heads = tables.q2k_indices.shape[0]
    alone = build_schedule(csr, num_q_heads=group * heads, num_sms=num_sms)
    assert_same(alone, expected[1], SCHEDULE_TENSORS)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 4), (2, 3, 0), (2, 3, 2)])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_empty_schedules(shape, num_rows):
    ids = torch.full(shape, -1, dtype=torch.int32)
    tables = Tables(ids, int32([0, shape[1]]), int32([0, 256]), None, 128, num_rows)
    expected, (csr, schedule) = both(tables), both(on_cuda(tables))
    assert_same(csr, expected[0], CSR_TENSORS)
    assert_same(schedule, expected[1], SCHEDULE_TENSORS)
    alone = build_schedule(csr, num_q_heads=16 * shape[0], num_sms=4)
    assert_same(alone, expected[1], SCHEDULE_TENSORS)


def large(generator):
    tables = packed(generator, [20_000, 12_768], [100_000, 28_000], heads=4)
    tables.q2k_indices[:, :, 3] = 5
    return tables


@pytest.mark.gpu
def test_fifty_runs_give_the_same_bits():
    tables = large(torch.Generator().manual_seed(0))
    expected, tables = both(tables, num_sms=132), on_cuda(tables)
    for _ in range(50):
        csr, schedule = both(tables, num_sms=132)
        assert_same(csr, expected[0], CSR_TENSORS)
        assert_same(schedule, expected[1], SCHEDULE_TENSORS)
        alone = build_schedule(csr, num_q_heads=64, num_sms=132)
        assert_same(alone, expected[1], SCHEDULE_TENSORS)


@pytest.mark.gpu
def test_nothing_synchronises():
    tables = [on_cuda(tables_of(name)) for name in ("two_passes", "wild_ids")]
    preload("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for table in tables:
            csr, _ = both(table)
            build_schedule(csr, num_q_heads=32, num_sms=4)
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
        csr, schedule = both(tables)
        alone = build_schedule(csr, num_q_heads=32, num_sms=4)
    for _ in range(3):
        order = torch.randperm(first.q2k_indices.shape[1], generator=generator)
        shuffled = first._replace(q2k_indices=first.q2k_indices[:, order])
        tables.q2k_indices.copy_(shuffled.q2k_indices)
        graph.replay()
        expected = both(shuffled)
        assert_same(csr, expected[0], CSR_TENSORS)
        for found in (schedule, alone):
            assert_same(found, expected[1], SCHEDULE_TENSORS)


@pytest.mark.gpu
def test_streams_do_not_disturb_each_other():
    names = ["wild_ids", "two_passes", "one_hot_block", "short_sequences"]
    expected = [both(tables_of(name)) for name in names]
    tables = [on_cuda(tables_of(name)) for name in names]
    streams = [torch.cuda.Stream() for _ in names]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, table in zip(streams, tables, strict=True):
            with torch.cuda.stream(stream):
                found.append(both(table))
    torch.cuda.synchronize()
    for i, (csr, schedule) in enumerate(found):
        assert_same(csr, expected[i % len(names)][0], CSR_TENSORS)
        assert_same(schedule, expected[i % len(names)][1], SCHEDULE_TENSORS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_need_not_be_current():
    tables = tables_of("wild_ids")
    moved = Tables(*(x.to("cuda:1") if isinstance(x, torch.Tensor) else x for x in tables))
    with torch.cuda.device(0):
        csr, schedule = both(moved)
    expected = both(tables)
    assert_same(csr, expected[0], CSR_TENSORS)
    assert_same(schedule, expected[1], SCHEDULE_TENSORS)


@pytest.mark.gpu
def test_the_two_functions_equal_the_fused_one():
    tables = on_cuda(large(torch.Generator().manual_seed(1)))
    csr = build_k2q_csr(*tables[:3], num_rows=tables.num_rows)
    schedule = build_schedule(csr, num_q_heads=64, num_sms=132)
    fused = both(tables, num_sms=132)
    assert_same(fused[0], csr, CSR_TENSORS)
    assert_same(fused[1], schedule, SCHEDULE_TENSORS)
