"""tiles.cu against torch on a GPU; test_packing.py has what needs none."""

from __future__ import annotations

import threading

import pytest
import torch
from packing_cases import (
    BF16,
    CASES,
    FP32,
    GATES,
    ROW_DIM,
    Case,
    assert_bits,
    check_pack,
    coarse_of,
    gate_of,
    gated_by_torch,
    layout_of,
    poisoned_slots,
    tensor_of,
    tiles_of,
)

from sparse_atten.packing import pack_and_pool, preload, unpack

pytestmark = pytest.mark.gpu


def on_cuda(x):
    """The same tensor on the GPU; strides are kept."""
    storage = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return storage if 0 in x.shape else _filled(storage, x)


def _filled(storage, x):
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    storage.as_strided((extent,), (1,)).copy_(x.as_strided((extent,), (1,)))
    return storage


@pytest.mark.parametrize("name", CASES)
def test_pack_equals_torch(name):
    case = CASES[name]
    x, tiles = tensor_of(case), tiles_of(layout_of(case, "cuda"))
    found = pack_and_pool([on_cuda(x)], tiles, row_dim=ROW_DIM[case.layout], num_pooled=1)
    check_pack(case, x, layout_of(case), found)


@pytest.mark.parametrize("name", CASES)
def test_unpack_equals_torch(name):
    case = CASES[name]
    layout = layout_of(case)
    tiles, row_dim = tiles_of(layout_of(case, "cuda")), ROW_DIM[case.layout]
    packed, coarse = poisoned_slots(case, layout), coarse_of(case, layout)
    assert_bits(
        unpack(packed.cuda(), tiles, row_dim=row_dim),
        layout.unpack(packed, tensor_layout=case.layout),
    )
    for kind in GATES:
        for dtype in (case.dtype, FP32):
            gate = gate_of(case, kind, dtype, layout)
            gated = gate.cuda(), coarse.cuda()
            found = unpack(packed.cuda(), tiles, row_dim=row_dim, gated=gated)
            assert_bits(found, gated_by_torch(case, packed, gate, coarse, layout))


WAN = Case(((21, 45, 80),), heads=4)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_fifty_runs_at_full_length_give_the_same_bits(layout):
    case = WAN._replace(layout=layout)
    where, row_dim = layout_of(case, "cuda"), ROW_DIM[layout]
    x, tiles = tensor_of(case).cuda(), tiles_of(where)
    (packed,), (means,) = pack_and_pool([x], tiles, row_dim=row_dim, num_pooled=1)
    check_pack(case, x.cpu(), layout_of(case), ([packed], [means]))
    assert torch.equal(unpack(packed, tiles, row_dim=row_dim), x)
    for _ in range(50):
        again, means_again = pack_and_pool([x], tiles, row_dim=row_dim, num_pooled=1)
        assert torch.equal(again[0], packed)
        assert torch.equal(means_again[0], means)


def test_a_graph_follows_its_tensors_and_nothing_synchronises():
    case = CASES["mixed"]
    layout, where = layout_of(case), layout_of(case, "cuda")
    tiles = tiles_of(where)
    preload("cuda")
    x, gate = tensor_of(case).cuda(), gate_of(case, "full", case.dtype, layout).cuda()
    coarse = coarse_of(case, layout).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (packed,), (means,) = pack_and_pool([x], tiles, row_dim=2, num_pooled=1)
        out = unpack(packed, tiles, row_dim=2, gated=(gate, coarse))
    for seed in range(3):
        new = tensor_of(case, seed=seed)
        x.copy_(new)
        graph.replay()
        check_pack(case, new, layout, ([packed], [means]))
        assert_bits(out, gated_by_torch(case, packed.cpu(), gate.cpu(), coarse.cpu(), layout))
    torch.cuda.set_sync_debug_mode("error")
    try:
        pack_and_pool([x], tiles, row_dim=2, num_pooled=1)
        unpack(packed, tiles, row_dim=2, gated=(gate, coarse))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_and_threads_do_not_disturb_each_other():
    cases = [CASES[name] for name in ("mixed", "narrow", "video", "blocks_of_256")]
    inputs = [tensor_of(case) for case in cases]
    moved = [x.cuda() for x in inputs]
    tiles = [tiles_of(layout_of(case, "cuda")) for case in cases]
    torch.cuda.synchronize()
    found = [[] for _ in cases]

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                found[i].append(pack_and_pool([moved[i]], tiles[i], row_dim=2, num_pooled=1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for case, x, results in zip(cases, inputs, found, strict=True):
        assert len(results) == 30
        for result in results:
            check_pack(case, x, layout_of(case), result)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_need_not_be_current():
    case = CASES["mixed"]
    x, tiles = tensor_of(case), tiles_of(layout_of(case, "cuda:1"))
    with torch.cuda.device(0):
        found = pack_and_pool([x.to("cuda:1")], tiles, row_dim=2, num_pooled=1)
        back = unpack(found[0][0], tiles, row_dim=2)
    check_pack(case, x, layout_of(case), found)
    assert_bits(back, x)


def test_offsets_past_two_to_the_31_elements():
    case = Case(((21, 45, 80),), heads=2)
    where, x = layout_of(case, "cuda"), tensor_of(case).cuda()
    far = torch.empty(2**31 + 2**25, dtype=BF16, device="cuda")
    view = far.as_strided(x.shape, (0, 2**31 + 8, 136, 1))
    view.copy_(x)
    tiles = tiles_of(where)
    (packed,), (means,) = pack_and_pool([view], tiles, row_dim=2, num_pooled=1)
    check_pack(case, x.cpu(), layout_of(case), ([packed], [means]))
    slots = far.as_strided(packed.shape, (0, 2**31 + 8, 136, 1))
    slots.copy_(packed)
    assert torch.equal(unpack(slots, tiles, row_dim=2), x)


def test_more_than_two_to_the_31_elements():
    """Wan at 720p with a batch of 6: each packed tensor has 2.8e9 elements."""
    case = WAN._replace(heads=40, batch=6)
    where = layout_of(case, "cuda")
    tiles = tiles_of(where)
    shape = (case.batch, case.heads, where.num_tokens, case.head_dim)
    x = torch.randn(shape, dtype=BF16, device="cuda")
    (packed,), (means,) = pack_and_pool([x], tiles, row_dim=2, num_pooled=1)
    last = packed[-1:, -2:].contiguous(), means[-1:, -2:].contiguous()
    check_pack(case, x[-1:, -2:].cpu(), layout_of(case), ([last[0]], [last[1]]))
    assert torch.equal(unpack(packed, tiles, row_dim=2), x)
