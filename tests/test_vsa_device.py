"""The backends of a BlockSelection: chosen by the GPU; from a video to its output, emulated."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import emulation
import pytest
import torch
from cases import BlockCase
from compare import assert_matches_definition

from sparse_atten import attention, contracts, explain, preload, sparse_atten_func
from sparse_atten.cute_kernels.common.memo import Memo
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.reference import Result
from sparse_atten.vsa import VideoLayout, device, video_sparse_attention

CASE = BlockCase(
    "sm100",
    heads=(4, 2),
    lengths=(300, 500),
    head_dims=(128, 128),
    block=128,
    kv_sizes="vector",
    pad_queries=True,
    layout="bshd",
    dtype=torch.bfloat16,
)


TARGETS = {"sm100": Target("sm_100a", 4), "sm90": Target("sm_90a", 4)}


@pytest.fixture(params=TARGETS)
def backend(request, monkeypatch):
    """CPU tensors count as those of a GPU, and launches go to the emulator, which counts them."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")
    target = TARGETS[request.param]
    for module in (contracts, device):
        monkeypatch.setattr(module, "target_of", lambda _: target)
    launches: list = []
    queue = torch.zeros(1, dtype=torch.int32)

    def planned(module, config, target, _, arguments):
        kernel = import_module(module)
        plan = kernel.launch_plan(config, target, arguments)
        text = kernel.compile_offline(config, target).ptx

        def launch(*addresses):
            launches.append(emulation.run(text, plan.bind(addresses), seed=len(launches)))
            assert not queue.any(), "a launch left its counter behind"

        return launch

    monkeypatch.setattr(device, "planned", planned)
    monkeypatch.setattr(device, "_launches", Memo())
    monkeypatch.setattr(device, "_queue", lambda _: queue.data_ptr())
    return SimpleNamespace(name=request.param, launches=launches)


def test_a_call_runs_on_the_kernel_and_matches_the_definition(backend):
    inputs, selection, options = CASE.build()
    out, lse = sparse_atten_func(*inputs, selection, return_lse=True)
    assert len(backend.launches) == 1
    assert_matches_definition(Result(out, lse, None), inputs, selection, options)


def test_out_is_written_through_its_strides(backend):
    (q, k, v), selection, options = CASE.build()
    buffer = torch.full((*q.shape[:3], 256), 7.0, dtype=q.dtype)
    out = sparse_atten_func(q, k, v, selection, out=buffer[..., :128], backend=backend.name)
    assert out.data_ptr() == buffer.data_ptr()
    lse = sparse_atten_func(q, k, v, selection, return_lse=True)[1]
    assert_matches_definition(Result(out, lse, None), (q, k, v), selection, options)
    assert (buffer[..., 128:] == 7).all()


def test_a_video_goes_from_pixels_order_to_its_output(backend):
    layout = VideoLayout.from_segments([20, (5, 6, 9)], tile=(4, 4, 8))
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, layout.num_tokens, 128, generator=make).bfloat16() for _ in range(3)
    )
    gate = torch.rand(1, 1, layout.num_tokens, 1, generator=make).bfloat16()
    arguments = {"sparsity": 0.5, "gate": gate}
    got = video_sparse_attention(q, k, v, layout, backend=backend.name, **arguments)
    assert len(backend.launches) == 1
    exact = video_sparse_attention(
        q.double(), k.double(), v.double(), layout, backend="reference", sparsity=0.5, gate=gate
    )
    rounded = video_sparse_attention(q, k, v, layout, backend="reference", **arguments)
    budget = 2 * (rounded.double() - exact).abs().max() + 1e-5
    assert (got.double() - exact).abs().max() <= 2 * budget  # P is rounded to bfloat16 as well


def test_offsets_past_2_to_the_31(backend):
    """Batch strides of 2^31 elements, of operands and tables; only the ends are touched."""
    far = 2**31
    (q, k, v), selection, options = replace(CASE, batch=2, layout="bhsd").build()
    sizes = [x[0].numel() for x in (q, k, v, q)]
    starts = [sum(sizes[:i]) for i in range(4)]
    memory = torch.empty(far + sum(sizes), dtype=q.dtype)
    operands = [
        memory.as_strided(x.shape, (far, *x.stride()[1:]), start).copy_(x)
        for x, start in zip((q, k, v, q), starts, strict=True)
    ]
    tables = {}
    numbers = torch.empty(far + 4096, dtype=torch.int32)
    for i, name in enumerate(("q2k_indices", "q2k_counts")):
        table = getattr(selection, name)
        tables[name] = numbers.as_strided(table.shape, (far, *table.stride()[1:]), 2048 * i)
        tables[name].copy_(table)
    distant = replace(selection, **tables)
    *inputs, out = operands
    _, lse = sparse_atten_func(*inputs, distant, out=out, return_lse=True, backend=backend.name)
    assert_matches_definition(Result(out, lse, None), (q, k, v), selection, options)


def test_empty_tensors_make_no_descriptor(backend):
    for lengths in ((0, 256), (256, 0)):
        case = replace(CASE, lengths=lengths, counts="zero", kv_sizes="full", pad_queries=False)
        (q, k, v), selection, _ = case.build()
        out, lse = sparse_atten_func(q, k, v, selection, return_lse=True, backend=backend.name)
        assert out.shape == q.shape
        assert (out == 0).all()
        assert (lse == float("-inf")).all()
    assert not backend.launches


@pytest.mark.parametrize("lengths", [(0, 256), (256, 0)])
def test_explain_of_an_empty_call(lengths):
    """Found: without query blocks the rounds of a pair could not be grouped."""
    pytest.importorskip("cutlass", reason="without nvidia-cutlass-dsl the backend is passed over")
    case = replace(CASE, lengths=lengths, counts="zero", kv_sizes="full", pad_queries=False)
    (q, k, v), selection, _ = case.build()
    found = explain(q, k, v, selection, target="B200")
    assert (found.backend, found.tiles, found.pairs) == ("sm100", 0, 0)


def test_explain_reports_the_kernel_for_a_named_product():
    pytest.importorskip("cutlass", reason="without nvidia-cutlass-dsl the backend is passed over")
    (q, k, v), selection, _ = CASE.build()
    found = explain(q, k, v, selection, target="B200")
    assert found.backend == "sm100"
    assert found.workspace_bytes == 0
    assert found.kernel["work items"] == "8 of 2 Q blocks, 0.05 waves of 148 SMs"
    assert set(found.kernel) == {"work items", "rounds per item", "shared memory", "registers"}
    most = int(re.search(r"(\d+) most", found.kernel["rounds per item"]).group(1))
    assert 0 < most <= 6
    assert "rounds per item" in str(found)
    assert explain(q, k, v, selection).backend == "reference"
    hopper = explain(q, k, v, selection, target="H200")
    assert hopper.backend == "sm90"
    assert hopper.kernel["work items"] == "12 of 1 Q block, 0.09 waves of 132 SMs"
    assert hopper.passed_over["sm100"] == ["device capability (9, 0) (supported: (10, 0), (10, 3))"]


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"dtype": torch.float32}, {}, "dtype torch.float32"),
        ({"head_dims": (64, 64)}, {}, "head dim of q and k 64 (supported: 128)"),
        ({"block": 64}, {}, "block size 64 (supported: 128)"),
        ({}, {"causal": True}, "causal True (supported: False)"),
        ({}, {"lse_temperature": 0.5}, "lse_temperature True (supported: False)"),
    ],
)
def test_what_the_kernel_lacks_is_refused_by_name(changes, options, reason):
    (q, k, v), selection, _ = replace(CASE, **changes).build()
    with pytest.raises(NotImplementedError, match=re.escape(f"sm100: {reason}")):
        explain(q, k, v, selection, target="B200", backend="sm100", **options)


@pytest.mark.parametrize(("name", "supported"), [("sm100", "(10, 0), (10, 3)"), ("sm90", "(9, 0)")])
def test_without_its_gpu_a_backend_is_refused(name, supported):
    (q, k, v), selection, _ = CASE.build()
    message = re.escape(f"{name}: device capability None (supported: {supported})")
    with pytest.raises(NotImplementedError, match=message):
        sparse_atten_func(q, k, v, selection, backend=name)


@pytest.mark.parametrize(
    ("name", "arch"), [("sm100", "sm_100a"), ("sm100", "sm_103a"), ("sm90", "sm_90a")]
)
def test_preload_names_the_backend_that_is_ready(monkeypatch, name, arch):
    (q, k, v), selection, _ = CASE.build()
    assert preload(q, k, v, selection) == "reference"
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    loaded = []
    for module in (contracts, device):
        monkeypatch.setattr(module, "target_of", lambda _: Target(arch, 4))
    monkeypatch.setattr(device, "load_kernel", lambda *key: loaded.append(key))
    assert preload(q, k, v, selection, return_lse=True) == name
    ((module, config, target, _),) = loaded
    assert module == f"sparse_atten.cute_kernels.vsa_{name}"
    assert (config.dtype, config.return_lse, config.kv_sizes) == ("bf16", True, True)
    assert target.arch == arch


def test_a_launch_is_laid_out_once_for_a_layout(backend):
    inputs, selection, options = CASE.build()
    for _ in range(2):
        moved = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
        for x, y in zip(moved, inputs, strict=True):
            x.copy_(y)
        out, lse = sparse_atten_func(*moved, selection, return_lse=True)
        assert_matches_definition(Result(out, lse, None), inputs, selection, options)
    assert len(device._launches) == 1
    sparse_atten_func(*inputs, selection, return_lse=True, softmax_scale=0.25)
    assert len(device._launches) == 2


def test_a_layout_passes_its_checks_once(backend, monkeypatch):
    """What does not depend on the layout is checked again: addresses, overlap, gradients."""
    (q, k, v), selection, _ = CASE.build()
    monkeypatch.setattr(attention, "runs_kernels", lambda x: type(x) is torch.Tensor)
    monkeypatch.setattr(attention, "_passed", Memo())
    checks = []
    validate = attention.validate
    monkeypatch.setattr(attention, "validate", lambda *x: checks.append(1) or validate(*x))
    outs = [sparse_atten_func(x, k, v, selection, backend=backend.name) for x in (q, q.clone())]
    assert len(checks) == 1
    assert torch.equal(*outs)
    sparse_atten_func(q, k, v, selection, backend=backend.name, return_lse=True)
    assert len(checks) == 2
    buffer = torch.empty(q.numel() + 1, dtype=q.dtype)
    shifted = buffer[1:].view(q.shape)
    with pytest.raises(ValueError, match="q must start at a multiple of 16 bytes"):
        sparse_atten_func(shifted, k, v, selection, backend=backend.name)
    sparse_atten_func(q, k, v, selection, backend=backend.name, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="out must not overlap an input"):
        sparse_atten_func(q, k, v, selection, backend=backend.name, out=q)
    with pytest.raises(NotImplementedError, match="gradients"):
        sparse_atten_func(q.requires_grad_(), k, v, selection, backend=backend.name)
