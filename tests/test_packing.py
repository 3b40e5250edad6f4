"""tiles.cu against torch under a PTX emulator; test_packing_gpu.py has what needs a GPU."""

from __future__ import annotations

import re
import struct
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from emulation import SCHEDULES, emulator
from packing_cases import (
    BF16,
    CASES,
    FP16,
    FP32,
    GATES,
    INF,
    NAN,
    ROW_DIM,
    SMALL,
    Case,
    assert_bits,
    assert_means,
    check_pack,
    coarse_of,
    gate_of,
    gated_by_torch,
    layout_of,
    poisoned_slots,
    tensor_of,
    tiles_of,
)

from sparse_atten.packing import move, pack_and_pool, plan, unpack
from sparse_atten.vsa import pool_blocks, video_sparse_attention

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")


@contextmanager
def emulated(schedule=SCHEDULES[0]):
    """Launch on an emulator; outputs are poisoned and lie between guards."""
    emu, launched, memory = emulator(), [], []
    options = {**schedule, "races": True}

    def allocate(like, shape, dtype=None):
        dtype = dtype or like.dtype
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory.append(torch.full((num_bytes + 256,), 0xA5, dtype=torch.uint8))
        inside = memory[-1][128 : 128 + num_bytes]
        inside.fill_(0xFF)  # NaN of every dtype
        return inside.view(dtype).view(tuple(shape))

    def launches(texts, steps):
        def run(*bases):
            for text, step in zip(texts, steps, strict=True):
                shape = step.grid, step.block, step.shared_bytes
                result = emu.run_ptx(text, step.kernel, *shape, step.values(bases), **options)
                assert not result["warnings"], result["warnings"]
                launched.append(step.kernel)

        return run

    move._PACKS.clear()
    move._UNPACKS.clear()
    with (
        mock.patch.object(move, "runs_kernels", lambda x: type(x) is torch.Tensor),
        mock.patch.object(move, "_kernel", lambda config, *_: ptx_of(config)),
        mock.patch.object(move, "Launches", launches),
        mock.patch.object(torch.Tensor, "new_empty", allocate),
    ):
        yield launched
    move._PACKS.clear()
    move._UNPACKS.clear()
    for block in memory:
        assert (block[:128] == 0xA5).all()
        assert (block[-128:] == 0xA5).all()


PTX: dict[plan.Config, str] = {}


def ptx_of(config):
    if config not in PTX:
        PTX[config] = plan.program(config).compile((9, 0)).ptx
    return PTX[config]


def check_packed(case, schedule):
    layout, x = layout_of(case), tensor_of(case)
    with emulated(schedule):
        found = pack_and_pool([x], tiles_of(layout), row_dim=ROW_DIM[case.layout], num_pooled=1)
    check_pack(case, x, layout, found)


@pytest.mark.parametrize("name", CASES)
def test_emulated_pack_equals_torch(name):
    check_packed(CASES[name], SCHEDULES[len(name) % len(SCHEDULES)])


@pytest.mark.parametrize("name", ["mixed", "narrow_bshd", "blocks_of_27", "blocks_of_256"])
def test_emulated_means_of_exact_sums_have_the_bits_of_torch(name):
    case = CASES[name]
    layout, x = layout_of(case), tensor_of(case, exact=True)
    packed = layout.pack(x, tensor_layout=case.layout)
    expected = pool_blocks(packed, layout, tensor_layout=case.layout)
    with emulated():
        _, (means,) = pack_and_pool(
            [x], tiles_of(layout), row_dim=ROW_DIM[case.layout], num_pooled=1
        )
    assert torch.equal(means, expected)


def test_emulated_inputs_of_several_heads_and_head_dims():
    case = CASES["blocks_of_8"]._replace(batch=1)
    layout, tiles = layout_of(case), tiles_of(layout_of(case))
    others = [case._replace(heads=1), case._replace(heads=1, head_dim=64)]
    x = [tensor_of(c, seed=i) for i, c in enumerate([case, *others])]
    with emulated() as launched:
        packed, means = pack_and_pool(x, tiles, row_dim=2, num_pooled=2)
    assert launched == ["pack"] * 3
    assert len(means) == 2
    for i, c in enumerate([case, *others]):
        assert_bits(packed[i], layout.pack(x[i]))
        if i < 2:
            assert_means(means[i], x[i], layout, c)


def test_emulated_non_finite_tokens_stay_in_their_blocks():
    case = CASES["blocks_of_8"]
    layout, x = layout_of(case), tensor_of(case)
    x[:, :, 7], x[:, :, 20, 5], x[:, 1, 30] = NAN, INF, -INF
    with emulated():
        (packed,), (means,) = pack_and_pool([x], tiles_of(layout), row_dim=2, num_pooled=1)
    assert_bits(packed, layout.pack(x))
    expected = pool_blocks(layout.pack(x), layout)
    assert torch.equal(means.isnan(), expected.isnan())
    assert torch.equal(means.isinf(), expected.isinf())
    assert (packed[:, :, layout.pack_map < 0] == 0).all()


def check_unpacked(case, schedule):
    layout = layout_of(case)
    packed = poisoned_slots(case, layout)
    with emulated(schedule):
        found = unpack(packed, tiles_of(layout), row_dim=ROW_DIM[case.layout])
    assert found.is_contiguous()
    assert_bits(found, layout.unpack(packed, tensor_layout=case.layout))


@pytest.mark.parametrize("name", CASES)
def test_emulated_unpack_equals_torch(name):
    check_unpacked(CASES[name], SCHEDULES[len(name) % len(SCHEDULES)])


GATED = ("mixed", "narrow_bshd", "blocks_of_8", "blocks_of_65")


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("name", GATED)
def test_emulated_gated_unpack_has_the_bits_of_torch(name, kind, is_float):
    check_gated(CASES[name], kind, SCHEDULES[len(kind) % len(SCHEDULES)], is_float=is_float)


def check_gated(case, kind, schedule, *, is_float):
    layout = layout_of(case)
    packed, coarse = poisoned_slots(case, layout), coarse_of(case, layout)
    gate = gate_of(case, kind, FP32 if is_float else case.dtype, layout)
    with emulated(schedule) as launched:
        found = unpack(packed, tiles_of(layout), row_dim=ROW_DIM[case.layout], gated=(gate, coarse))
    assert len(launched) == 1
    assert_bits(found, gated_by_torch(case, packed, gate, coarse, layout))


def test_emulated_gates_and_coarse_rows_may_be_extreme():
    case = CASES["blocks_of_8"]
    layout = layout_of(case)
    packed, coarse = poisoned_slots(case, layout), coarse_of(case, layout)
    gate = gate_of(case, "full", case.dtype, layout)
    gate[:, :, 3], gate[:, :, 9], gate[:, :, 11, ::2] = NAN, 6e4, 0
    coarse[:, :, 0], coarse[:, 0, 2], coarse[:, :, 3] = 3e38, INF, 1e-42
    with emulated():
        found = unpack(packed, tiles_of(layout), row_dim=2, gated=(gate, coarse))
    assert_bits(found, gated_by_torch(case, packed, gate, coarse, layout))


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_emulated_gates_of_one_value_may_lie_anywhere(dtype):
    case = CASES["blocks_of_8"]._replace(batch=1)
    layout = layout_of(case)
    packed, coarse = poisoned_slots(case, layout), coarse_of(case, layout)
    for gate in (torch.randn(5).to(dtype)[3], off_by(torch.randn(2, 1, 1).to(dtype), 1)):
        with emulated() as launched:
            found = unpack(packed, tiles_of(layout), row_dim=2, gated=(gate, coarse))
        assert len(launched) == 1
        assert_bits(found, gated_by_torch(case, packed, gate, coarse, layout))


def test_emulated_known_calls_follow_their_tensors():
    case = CASES["blocks_of_8"]._replace(batch=1)
    layout = layout_of(case)
    tiles, gate = tiles_of(layout), gate_of(case, "head", FP32, layout)
    inputs = [(tensor_of(case, seed=i), gate + i, coarse_of(case, layout) + i) for i in range(3)]
    results = []
    with emulated() as launched:
        for x, weight, coarse in inputs:
            found = pack_and_pool([x], tiles, row_dim=2, num_pooled=1)
            packed = found[0][0]
            gated = unpack(packed, tiles, row_dim=2, gated=(weight, coarse))
            results.append((found, gated, unpack(packed, tiles, row_dim=2)))
        assert (len(move._PACKS), len(move._UNPACKS), len(launched)) == (1, 2, 9)
    for (x, weight, coarse), (found, gated, plain) in zip(inputs, results, strict=True):
        check_pack(case, x, layout, found)
        assert_bits(gated, gated_by_torch(case, found[0][0], weight, coarse, layout))
        assert_bits(plain, x)


@pytest.mark.parametrize("kind", [None, "full", "scalar"])
@pytest.mark.parametrize("tensor_layout", ["bhsd", "bshd"])
def test_emulated_video_attention_has_the_bits_of_torch(tensor_layout, kind):
    case = Case(SMALL, tile=(2, 2, 2), head_dim=64, layout=tensor_layout)
    layout = layout_of(case)
    cases = [case, case._replace(heads=1), case._replace(heads=1, head_dim=128)]
    q, k, v = (tensor_of(c, exact=True, seed=i).requires_grad_() for i, c in enumerate(cases))
    gate = None if kind is None else gate_of(cases[2]._replace(heads=2), kind, BF16, layout)

    def attend():
        return video_sparse_attention(
            *(q, k, v, layout),
            sparsity=0.5,
            gate=gate,
            tensor_layout=tensor_layout,
            return_details=True,
        )

    with torch.no_grad():
        expected, details = attend()
    with emulated() as launched:
        attend()
        assert launched == []  # torch runs what records a gradient
        with torch.no_grad():
            found, found_details = attend()
        assert launched == ["pack"] * 3 + [UNPACKS[kind]]
    assert torch.equal(found_details.scores, details.scores)
    assert torch.equal(found_details.selection.q2k_indices, details.selection.q2k_indices)
    assert_bits(found, expected)
    assert_bits(found_details.lse, details.lse)


UNPACKS = {None: "unpack", "full": "unpack_gated", "scalar": "unpack_gated_rows"}


@pytest.mark.parametrize("tensor_layout", ["bhsd", "bshd"])
def test_emulated_stages_have_the_bits_of_torch(tensor_layout):
    case = CASES["blocks_of_8"]._replace(layout=tensor_layout)
    layout, x = layout_of(case), tensor_of(case)
    packed = layout.pack(x, tensor_layout=tensor_layout)
    with emulated() as launched:
        assert_bits(layout.pack(x, tensor_layout=tensor_layout), packed)
        assert_bits(layout.unpack(packed, tensor_layout=tensor_layout), x)
        assert launched == ["pack", "unpack"]


def off_by(x, elements):
    """The same values at an address that is so many elements past a multiple of 16 bytes."""
    memory = torch.zeros(x.numel() + 16, dtype=x.dtype)
    start = -memory.data_ptr() // x.itemsize % (16 // x.itemsize) + elements
    view = memory[start : start + x.numel()].view(x.shape)
    return view.copy_(x)


def test_tensors_that_kernels_do_not_take():
    case = CASES["blocks_of_8"]
    layout = layout_of(case)
    tiles, x = tiles_of(layout), tensor_of(case)
    packed, coarse = layout.pack(x), coarse_of(case, layout)
    wide = torch.zeros(2, 2, layout.num_tokens, 132, dtype=FP16)
    refused = {
        "float32": x.float(),
        "float64": x.double(),
        "head dim": x[..., :96].contiguous(),
        "address": off_by(x, 1),
        "row stride": wide[..., :128],
        "element stride": x.transpose(2, 3).contiguous().transpose(2, 3),
    }
    with emulated() as launched:
        assert pack_and_pool([x], tiles, row_dim=2, num_pooled=0) is not None
        for name, other in refused.items():
            assert pack_and_pool([x, other], tiles, row_dim=2, num_pooled=2) is None, name
        gates = {
            "dtype": gate_of(case, "full", BF16, layout),
            "float64": gate_of(case, "full", torch.float64, layout),
            "address": off_by(gate_of(case, "full", FP16, layout), 4),
            "element stride": gate_of(case, "full", FP16, layout).transpose(2, 3).contiguous().mT,
        }
        for name, gate in gates.items():
            assert unpack(packed, tiles, row_dim=2, gated=(gate, coarse)) is None, name
        gate = gate_of(case, "full", FP16, layout)
        for other in (coarse.double(), coarse.mT.contiguous().mT):
            assert unpack(packed, tiles, row_dim=2, gated=(gate, other)) is None
        assert unpack(packed.float(), tiles, row_dim=2) is None
        assert launched == ["pack"]
    assert pack_and_pool([x], tiles, row_dim=2, num_pooled=1) is None  # on the CPU
    assert unpack(packed, tiles, row_dim=2) is None


def test_wrong_shapes_are_named():
    case = CASES["blocks_of_8"]
    layout = layout_of(case)
    tiles, x = tiles_of(layout), tensor_of(case)
    packed, coarse = layout.pack(x), coarse_of(case, layout)
    gate = torch.ones((), dtype=FP16)
    with emulated() as launched:
        with pytest.raises(
            ValueError, match=r"tensors\[1\] must be \[2, 2, 56, 128\], got float16"
        ):
            pack_and_pool([x, packed], tiles, row_dim=2, num_pooled=1)
        with pytest.raises(ValueError, match=r"packed must be \[2, 2, 88, 128\], got float16 \[2"):
            unpack(x, tiles, row_dim=2)
        with pytest.raises(ValueError, match=r"coarse must be \[2, 2, 11, 128\], got float32 \[2"):
            unpack(packed, tiles, row_dim=2, gated=(gate, coarse[:, :, 1:].contiguous()))
        assert launched == []


def test_emulated_ids_outside_the_tokens_are_padding():
    case = CASES["blocks_of_8"]._replace(batch=1)
    layout, x = layout_of(case), tensor_of(case)
    wild = layout.pack_map.clone()
    wild[2], wild[11], wild[12], wild[40] = layout.num_tokens, 2**40, -(2**63), 2**31
    tiles = tiles_of(layout)._replace(pack_map=wild)
    inside = (wild >= 0) & (wild < layout.num_tokens)
    expected = torch.where(inside[:, None], x[:, :, wild.where(inside, 0)], 0)
    with emulated():
        (packed,), _ = pack_and_pool([x], tiles, row_dim=2, num_pooled=1)
        out = unpack(packed, tiles, row_dim=2)
    assert_bits(packed, expected)
    reached = torch.zeros(layout.num_tokens, dtype=torch.bool)
    reached[wild[inside]] = True
    assert_bits(out[:, :, reached], x[:, :, reached])


def test_large_offsets_and_grids():
    blocks = plan.Blocks(720, 128, 75600)
    shape, strides = (3, 40, 75600, 128), (2**36, 2**31 + 8, 2**33, 1)
    video = plan.Tensor4(shape, strides, BF16, 2)
    assert plan.takes(video, blocks)
    step = plan.pack_step(video, blocks, (0,) * 5)
    slots = 720 * 128
    packed = (40 * slots * 128, slots * 128, 128)
    assert plan._PLAN.unpack(step.arguments[5]) == (
        *(2**36, 2**31 + 8, 2**33),
        *packed,
        *(40, 720, 75600, 128, True),
    )
    assert step.grid == (3 * 40 * 720, 1, 1)
    bshd = plan.Tensor4((3, 75600, 40, 128), (75600 * 5120, 5120, 128, 1), BF16, 1)
    assert plan._PLAN.unpack(plan.pack_step(bshd, blocks, (0,) * 5).arguments[5])[-1] == 1
    assert not plan.takes(video, plan.Blocks(2**25, 128, 75600))
    assert not plan.takes(video, plan.Blocks(720, 128, 2**31))
    assert not plan.takes(video, plan.Blocks(1, 2**30 + 1, 75600))


def test_emulated_rows_far_apart():
    """Rows past 2^31 elements from the first; the memory between them is never touched."""
    case = CASES["blocks_of_8"]._replace(batch=1, heads=2)
    layout, x = layout_of(case), tensor_of(case)
    far = torch.empty(2**31 + 2**20, dtype=FP16)
    view = far.as_strided(x.shape, (0, 2**31 + 8, 136, 1))
    view.copy_(x)
    with emulated():
        found = pack_and_pool([view], tiles_of(layout), row_dim=2, num_pooled=1)
    check_pack(case, x, layout, found)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_emulated_means_do_not_depend_on_the_order_of_warps(schedule):
    case = CASES["blocks_of_65"]
    layout, x = layout_of(case), tensor_of(case)
    found = []
    for options in (SCHEDULES[0], schedule):
        with emulated(options):
            found.append(pack_and_pool([x], tiles_of(layout), row_dim=2, num_pooled=1))
    assert torch.equal(found[0][1][0], found[1][1][0])


def test_without_its_barrier_the_mean_is_a_race():
    case = CASES["one_token"]
    layout, x = layout_of(case), tensor_of(case)
    config = plan.config_of(plan.Tensor4.of(x, 2))
    text = ptx_of(config)
    assert len(re.findall(r"\bbar\.sync\s+0;", text)) == 1
    with (
        mock.patch.dict(PTX, {config: re.sub(r"\bbar\.sync\s+0;", "", text)}),
        emulated(),
        pytest.raises(Exception, match="race"),
    ):
        pack_and_pool([x], tiles_of(layout), row_dim=2, num_pooled=1)


@pytest.mark.parametrize(
    "capability",
    [(9, 0), *(pytest.param((10, minor), marks=pytest.mark.slow) for minor in (0, 3))],
    ids=str,
)
def test_kernels_fit(capability):
    for config in plan.CONFIGS:
        compiled = plan.program(config).compile(capability)
        assert "warning" not in compiled.log
        assert set(compiled.resources) == set(plan.SIGNATURES)
        for name, kernel in compiled.resources.items():
            assert kernel.spill_bytes == kernel.stack_bytes == 0, name
            assert kernel.registers <= 64, name  # four thread blocks of 256 on a multiprocessor
            shared = 4 * 8 * config.head_dim if name == "pack" else 0
            assert kernel.shared_bytes == shared, name


def test_rows_move_16_bytes_at_a_time():
    for config in plan.CONFIGS:
        for name in plan.SIGNATURES:
            body = ptx_of(config).split(f".entry {name}(")[1].split(".entry")[0]
            stores = set(re.findall(r"\b(st\.global\S*)", body))
            loads = set(re.findall(r"\b(ld\.global\S*)", body))
            means = {"st.global.f32"} if name == "pack" else set()
            assert stores == {"st.global.v4.u32"} | means, name
            assert "ld.global.nc.v4.u32" in loads, name


PARAMETER = r"\.param (?:\.align \d+ )?\.(\w+) \w+(?:\[(\d+)\])?"


def test_signatures_are_those_of_the_kernels():
    sizes = {"u64": 8, "s64": 8, "u32": 4, "s32": 4, "b64": 8, "b32": 4, "f32": 4}
    ptx = ptx_of(plan.CONFIGS[0])
    for name, signature in plan.SIGNATURES.items():
        head = ptx.split(f".entry {name}(")[1].split(")")[0]
        found = [
            int(array) if array else sizes[kind] for kind, array in re.findall(PARAMETER, head)
        ]
        codes = re.findall(r"\d*[a-zA-Z]", signature)
        assert found == [struct.calcsize(code) for code in codes], name
