"""The Hopper VSA kernel: what the compiler made of it, and its numbers on an emulator and a GPU.

Cases and oracle are those of the Blackwell kernel.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from machine_code import assert_describes, assert_fits, opcodes
from test_vsa_sm100 import CASES, CONFIGS, Case, make_call, prepared, run_case

from sparse_atten import BlockSelection, preload, sparse_atten_func
from sparse_atten.cute_kernels import vsa_sm90
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.vsa_arguments import arguments_of

TARGET = Target("sm_90a", 132)
FULL = vsa_sm90.Config(return_lse=True, kv_sizes=True, q_sizes=True)
QUICK = {"ragged sizes", "padding queries", "alternating empty", "growing maxima, many items"}
# Cases of what only the Blackwell kernel has.
OWN = [case for case in CASES if CONFIGS[case.config].cubic_pairs == 2]


def config_for(case: Case) -> vsa_sm90.Config:
    theirs = CONFIGS[case.config]
    return vsa_sm90.Config(
        dtype=theirs.dtype,
        return_lse=theirs.return_lse,
        kv_sizes=theirs.kv_sizes,
        q_sizes=theirs.q_sizes,
        rescale_threshold=theirs.rescale_threshold,
    )


def compiled(config: vsa_sm90.Config) -> Any:
    return vsa_sm90.compile_offline(config, TARGET)


def check(case: Case, schedules: list) -> None:
    config = config_for(case)
    text = compiled(config).ptx
    run_case(case, schedules, text, (vsa_sm90, config, Target("sm_90a", case.num_sms)))


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_compiled_kernel_fits(dtype: str):
    assert_fits(dtype, compiled(replace(FULL, dtype=dtype)), vsa_sm90.SCHEDULE)


def test_sass_overlaps_its_mmas(tmp_path: Path):
    """No spills; and where ptxas serialises wgmma, every one would have a wait of its own."""
    found = opcodes(compiled(FULL).cubin, tmp_path)
    assert sum(opcode.startswith("HGMMA") for opcode in found) == 4 * 8
    assert sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in found) == 4
    assert not {"STL", "LDL"} & {opcode.split(".")[0] for opcode in found}


def test_plan_has_the_parameters_and_boxes_of_the_kernel():
    call = make_call(Case("any"))
    arguments = arguments_of(call.q, call.k, call.v, call.q, call.selection, softmax_scale=1.0)
    plan = vsa_sm90.launch_plan(FULL, TARGET, arguments)
    assert_describes(plan, compiled(FULL))
    assert plan.grid == (4, 1, 1)


def test_tables_fit_the_target():
    vsa_sm90.SCHEDULE.check(TARGET)
    assert "kv_empty     x5    8 arrivals  consumer0 + consumer1 -> load" in (
        vsa_sm90.SCHEDULE.tables()
    )


@pytest.mark.parametrize("field", [{"dtype": "fp8"}, {"rescale_threshold": 9.0}])
def test_config_refuses(field: dict):
    with pytest.raises(ValueError, match=next(iter(field))):
        vsa_sm90.Config(**field).check()


@pytest.mark.parametrize("case", [c for c in OWN if c.name in QUICK], ids=lambda case: case.name)
def test_numbers(case: Case):
    check(replace(case, residents=case.residents[:1]), emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_numbers_of_all_cases(case: Case):
    check(case, emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in OWN if c.name in QUICK], ids=lambda case: case.name)
def test_numbers_in_every_schedule(case: Case):
    check(case, emulation.schedules())


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_numbers_on_a_gpu(case: Case):
    call, exact, exact_lse, allowed, _ = prepared(case)
    given = call.selection
    tables = ("q2k_indices", "q2k_counts", "kv_block_sizes", "q_block_sizes")
    selection = replace(given, **{name: on_gpu(getattr(given, name)) for name in tables})
    inputs = [on_gpu(x) for x in (call.q, call.k, call.v)]
    first = None
    for _ in range(3):
        poison = torch.full(
            (64 << 20,), math.nan, device="cuda"
        )  # what the allocator hands out next
        del poison
        out, lse = sparse_atten_func(
            *inputs,
            selection,
            softmax_scale=call.softmax_scale,
            return_lse=True,
            backend="sm90",
        )
        error = float((out.cpu().double() - exact).abs().max())
        assert error <= allowed, f"off by {error:.3e} > {allowed:.3e}"
        empty = exact_lse == -math.inf
        assert torch.equal(lse.cpu() == -math.inf, empty)
        gap = (lse.cpu().double() - exact_lse)[~empty].abs()
        assert bool((gap <= 1e-3 + 1e-6 * exact_lse[~empty].abs()).all())
        bits = out.view(torch.int16), lse.view(torch.int32)
        first = first or bits
        assert all(torch.equal(x, y) for x, y in zip(bits, first, strict=True))


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """Copy with the strides as they are."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return copy.copy_(x)


def random_call(seed: int, *, heads: int = 4, tokens: int = 4096, kept: int = 12):
    """Return q, k, v [1, H, S, D] and a selection on the GPU."""
    make = torch.Generator(device="cuda").manual_seed(seed)
    inputs = [
        torch.randn(1, heads, tokens, 128, device="cuda", generator=make).bfloat16()
        for _ in range(3)
    ]
    blocks = tokens // 128
    order = torch.rand(1, heads, blocks, blocks, device="cuda", generator=make)
    table = order.topk(kept).indices.int()
    counts = torch.randint(
        0, kept + 1, table.shape[:3], device="cuda", generator=make, dtype=torch.int32
    )
    return inputs, BlockSelection(table, counts)


def definition(inputs: list, selection: BlockSelection) -> torch.Tensor:
    """Attention in float64 by its definition, over whole blocks."""
    q, k, v = (x.double() for x in inputs)
    table = selection.q2k_indices.long()
    taken = torch.arange(table.shape[-1], device=q.device) < selection.q2k_counts[..., None]
    blocks = torch.zeros(*table.shape[:3], k.shape[2] // 128, dtype=torch.bool, device=q.device)
    blocks.scatter_(-1, table, taken)
    seen = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)
    scores = (q @ k.mT / math.sqrt(128)).masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.gpu(9, 0)
def test_300_repeats_are_bitwise_equal():
    inputs, selection = random_call(0)
    first = sparse_atten_func(*inputs, selection, backend="sm90")
    assert (first.double() - definition(inputs, selection)).abs().max() < 0.01
    for repeat in range(300):
        out = torch.full_like(first, (math.nan, 7.0)[repeat % 2])
        sparse_atten_func(*inputs, selection, out=out, backend="sm90")
        assert torch.equal(out.view(torch.int16), first.view(torch.int16))


@pytest.mark.gpu(9, 0)
def test_a_graph_replays_with_other_lists():
    inputs, selection = random_call(1)
    preload(*inputs, selection, backend="sm90")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [sparse_atten_func(*inputs, selection, backend="sm90") for _ in range(2)]
    for seed in range(2, 6):
        others, other = random_call(seed)
        for x, y in zip(inputs, others, strict=True):
            x.copy_(y)
        selection.q2k_indices.copy_(other.q2k_indices)
        selection.q2k_counts.copy_(other.q2k_counts)
        eager = sparse_atten_func(*others, other, backend="sm90")
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, eager) for out in outs)


@pytest.mark.gpu(9, 0)
def test_streams_do_not_disturb_each_other():
    calls = [random_call(seed) for seed in range(4)]
    expected = [sparse_atten_func(*inputs, s, backend="sm90") for inputs, s in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(20):
        outs = []
        for stream, (inputs, selection) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                outs.append(sparse_atten_func(*inputs, selection, backend="sm90"))
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))


@pytest.mark.gpu(9, 0)
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs, selection = random_call(0)
    first = sparse_atten_func(*inputs, selection, backend="sm90")
    there = [x.to("cuda:1") for x in inputs]
    tables = (selection.q2k_indices.to("cuda:1"), selection.q2k_counts.to("cuda:1"))
    second = sparse_atten_func(*there, BlockSelection(*tables), backend="sm90")
    assert second.device.index == 1
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.gpu(9, 0)
def test_a_compiled_call_is_one_graph():
    inputs, selection = random_call(0)

    @torch.compile(fullgraph=True)
    def call(q, k, v, table, counts):
        return sparse_atten_func(q, k, v, BlockSelection(table, counts), backend="sm90") * 2

    out = call(*inputs, selection.q2k_indices, selection.q2k_counts)
    assert torch.equal(out, sparse_atten_func(*inputs, selection, backend="sm90") * 2)


@pytest.mark.gpu(9, 0)
def test_offsets_past_2_to_the_31_on_a_gpu():
    """Batch strides of 2^31 elements, for operands and output, and a broadcast K and V."""
    far = 2**31
    inputs, selection = random_call(0, heads=2, tokens=1024, kept=4)
    expected = sparse_atten_func(*inputs, selection, backend="sm90")
    size = inputs[0].numel()
    memory = torch.empty(far + 2 * size, dtype=torch.bfloat16, device="cuda")
    shape, strides = (2, *inputs[0].shape[1:]), (far, *inputs[0].stride()[1:])
    q, out = (memory.as_strided(shape, strides, start) for start in (0, size))
    q.copy_(inputs[0].expand(shape))
    k, v = (x.expand(shape) for x in inputs[1:])
    tables = [x.expand(2, *x.shape[1:]) for x in (selection.q2k_indices, selection.q2k_counts)]
    sparse_atten_func(q, k, v, BlockSelection(*tables), out=out, backend="sm90")
    assert all(torch.equal(part, expected[0]) for part in out)
