"""The backends "sm90" and "sm100" for a TokenSelection: whole calls, chunks and paging included.

Both kernels run on the emulator. On a Hopper GPU the calls run as they are; on others the reference
K1 stands in for K1.
"""

from __future__ import annotations

import dataclasses
import math
import re
from importlib import import_module

import emulation
import pytest
import torch
from cases import TokenCase
from compare import assert_matches_definition

from sparse_atten import (
    contracts,
    explain,
    preload,
    preparation,
    prepare,
    sparse_atten_func,
)
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.msa import device, minimax_sparse_attention, partial_attention
from sparse_atten.reference import Result
from sparse_atten.vsa import device as vsa_device

CASE = TokenCase(
    "sm100",
    queries=(70, 1, 0, 130),
    keys=(300, 129, 5, 256),
    heads=(8, 2),
    head_dims=(128, 128),
    block=128,
    dtype=torch.bfloat16,
    spare_queries=3,
)


def reference_k1(inputs, prepared, chunk, options, partials):
    """Fill the partials of a chunk as K1 does."""
    index = prepared.chunks.index(chunk)
    more = {"softmax_scale": options.softmax_scale, "lse_temperature": options.lse_temperature}
    filled = partial_attention(*inputs, prepared, causal=options.causal, chunk=index, **more)
    for target, values in zip(partials, filled, strict=False):
        target.copy_(values)


@pytest.fixture
def blackwell(monkeypatch):
    """CPU tensors count as those of a B200, and launches go to the emulator."""
    return emulate(monkeypatch, Target("sm_100a", 4))


@pytest.fixture
def hopper(monkeypatch):
    """CPU tensors count as those of an H200, and launches go to the emulator."""
    return emulate(monkeypatch, Target("sm_90a", 4))


def emulate(monkeypatch, target):
    """Let CPU tensors be of the target; returns the list of the kernels that will be launched."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")
    for module in (contracts, preparation, vsa_device):
        monkeypatch.setattr(module, "target_of", lambda _: target)
    launches = []

    def launch(name, config, x, arguments):
        module = import_module(name)
        plan = module.launch_plan(config, target, arguments)
        compiled = module.compile_offline(config, target)
        emulation.run(compiled.ptx, plan, seed=len(launches))
        launches.append(name.rpartition(".")[2])

    monkeypatch.setattr(device, "launch", launch)
    return launches


def bytes_of(q, width, tokens):
    """A bound on the workspace that so many tokens fit exactly."""
    return tokens * width * q.shape[1] * (q.shape[2] * q.element_size() + 8)


CASES = (
    CASE,
    dataclasses.replace(CASE, name="bidirectional", causal=False, temperature=0.5),
    dataclasses.replace(CASE, name="hnd", paging="hnd", width=3, dtype=torch.float16),
    dataclasses.replace(CASE, name="nhd", paging="nhd", heads=(16, 1), keep=0.5),
    dataclasses.replace(CASE, name="more queries", queries=(200, 40), keys=(130, 20)),
    dataclasses.replace(CASE, name="used keys", used=True, heads=(2, 2)),
    dataclasses.replace(CASE, name="nothing", keep=-1.0),
    dataclasses.replace(CASE, name="scale 16", scale=16.0),
    dataclasses.replace(CASE, name="decode", queries=(1, 1, 1, 1), spare_queries=0),
)
QUICK = {"sm100", "scale 16", "decode"}  # of one Config; each more takes a compilation


@pytest.mark.parametrize("tokens", [None, 64])
@pytest.mark.parametrize(
    "case",
    [case if case.name in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_a_call_runs_on_the_kernels_and_matches_the_definition(blackwell, case, tokens):
    inputs, selection, options = case.build()
    bound = None if tokens is None else bytes_of(inputs[0], case.width, tokens)
    result = sparse_atten_func(
        *inputs,
        selection,
        causal=case.causal,
        return_lse=True,
        lse_temperature=case.temperature,
        max_workspace_bytes=bound,
        backend="sm100",
    )
    num_queries = inputs[0].shape[0]
    chunks = 1 if tokens is None else -(-num_queries // tokens)
    assert blackwell == ["msa_k1_sm100", "msa_k2"] * chunks
    padded = Result(*result, *[None] * (3 - len(result)))
    assert_matches_definition(padded, inputs, selection, options)


@pytest.mark.parametrize("tokens", [None, 64])
def test_a_call_runs_on_the_hopper_kernels(hopper, tokens):
    inputs, selection, options = CASE.build()
    bound = None if tokens is None else bytes_of(inputs[0], CASE.width, tokens)
    result = sparse_atten_func(
        *inputs, selection, causal=True, return_lse=True, max_workspace_bytes=bound, backend="sm90"
    )
    chunks = 1 if tokens is None else -(-inputs[0].shape[0] // tokens)
    assert hopper == ["msa_k1_sm90", "msa_k2"] * chunks
    assert_matches_definition(Result(*result, None), inputs, selection, options)


def test_chunks_give_what_one_chunk_gives(blackwell):
    inputs, selection, _ = CASE.build()
    whole = sparse_atten_func(*inputs, selection, causal=True, return_lse=True)
    for tokens in (37, 70):
        bound = bytes_of(inputs[0], CASE.width, tokens)
        prepared = prepare(selection, *inputs[:2], max_workspace_bytes=bound)
        parts = sparse_atten_func(*inputs, prepared, causal=True, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(whole, parts, strict=True))


def test_out_is_written_through_its_strides(blackwell):
    (q, k, v), selection, options = CASE.build()
    buffer = torch.full((*q.shape[:2], 256), 7.0, dtype=q.dtype)
    bound = bytes_of(q, CASE.width, 100)
    out = sparse_atten_func(
        q, k, v, selection, causal=True, out=buffer[..., :128], max_workspace_bytes=bound
    )
    assert out.data_ptr() == buffer.data_ptr()
    assert (buffer[..., 128:] == 7).all()
    lse = sparse_atten_func(q, k, v, selection, causal=True, return_lse=True)[1]
    assert_matches_definition(Result(out, lse, None), (q, k, v), selection, options)


def test_minimax_attention_end_to_end(blackwell):
    make = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 150, 420], dtype=torch.int32)
    q, k, v, q_idx, k_idx = (
        torch.randn(420, heads, dim, generator=make).bfloat16()
        for heads, dim in ((8, 128), (2, 128), (2, 128), (2, 32), (1, 32))
    )
    arguments = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "topk": 2}
    arguments |= {"max_seqlen_q": 270, "max_seqlen_k": 270}
    got = minimax_sparse_attention(q, k, v, q_idx, k_idx, backend="sm100", **arguments)
    assert blackwell == ["msa_k1_sm100", "msa_k2"]
    wide = (q.double(), k.double(), v.double())
    exact = minimax_sparse_attention(*wide, q_idx, k_idx, backend="reference", **arguments)
    rounded = minimax_sparse_attention(q, k, v, q_idx, k_idx, backend="reference", **arguments)
    budget = 2 * (rounded.double() - exact).abs().max() + 1e-5
    assert (got.double() - exact).abs().max() <= 2 * budget  # the partials are rounded as well


@pytest.mark.parametrize("change", [{"queries": (), "keys": ()}, {"keys": (0,) * 4}, {"width": 0}])
def test_empty_calls_launch_nothing(blackwell, change):
    case = dataclasses.replace(CASE, temperature=2.0, **change)
    (q, k, v), selection, _ = case.build()
    out, lse, lse_t = sparse_atten_func(
        q, k, v, selection, lse_temperature=2.0, return_lse=True, backend="sm100"
    )
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert (lse_t == float("-inf")).all()
    assert not blackwell


def test_a_prepared_selection_must_fit_the_call(blackwell):
    (q, k, v), selection, _ = CASE.build()
    prepared = prepare(selection, q, k, max_workspace_bytes=bytes_of(q, CASE.width, 80))
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 128)) for x in (k, v)]
    with pytest.raises(ValueError, match=r"for 8 query heads and 690 keys, got .* and 818"):
        sparse_atten_func(q, *longer, prepared)
    needed = bytes_of(q, CASE.width, 68)  # 204 tokens in 3 chunks
    message = f"max_workspace_bytes must be at least the {needed} that selection was prepared for"
    with pytest.raises(ValueError, match=message):
        sparse_atten_func(q, k, v, prepared, max_workspace_bytes=needed - 1)
    sparse_atten_func(q, k, v, prepared, causal=True, max_workspace_bytes=needed)


def test_explain_states_workspace_traffic_and_the_dense_alternative():
    pytest.importorskip("cutlass", reason="without nvidia-cutlass-dsl the backend is passed over")
    (q, k, v), selection, _ = CASE.build()
    bound = bytes_of(q, CASE.width, 80)
    found = explain(q, k, v, selection, causal=True, target="B200", max_workspace_bytes=bound)
    assert found.backend == "sm100"
    assert found.passed_over == {}
    assert found.workspace_bytes == bytes_of(q, CASE.width, 68)
    prepared = prepare(selection, q, k)
    edges = int(prepared.csr.row_ptr[:, -1].sum())
    assert found.kernel["query chunks"].startswith("3, of at most 68 tokens")
    assert found.kernel["partials"].startswith(f"{edges * 4 * (256 + 4):,} bytes")
    assert "causal dense attention is the faster one" in found.kernel["against dense"]
    assert "this call computes KV-outer" in str(found)
    assert "short queries" not in found.kernel
    again = explain(q, k, v, prepared, causal=True, target="B200")
    assert again.kernel["query chunks"].startswith("1, of at most 204 tokens")


def test_explain_says_where_kv_outer_is_faster_and_where_queries_are_short():
    pytest.importorskip("cutlass", reason="without nvidia-cutlass-dsl the backend is passed over")
    case = dataclasses.replace(
        CASE, queries=(1,), keys=(40_000,), width=1, keep=1.1, spare_queries=0, heads=(16, 1)
    )
    (q, k, v), selection, _ = case.build()
    found = explain(q, k, v, selection, causal=True, target="B300")
    assert found.kernel["against dense"].startswith("KV-outer is faster")
    assert "on B300" in found.kernel["against dense"]
    assert "no decode kernel yet" in found.kernel["short queries"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"head_dims": (64, 64)}, "head dim of q and k 64 (supported: 128)"),
        ({"block": 64}, "block size 64 (supported: 128)"),
        ({"heads": (6, 2)}, "query heads per KV head 3 (supported: 1, 2, 4, 8, 16)"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(changes, reason):
    (q, k, v), selection, _ = dataclasses.replace(CASE, **changes).build()
    with pytest.raises(NotImplementedError, match=re.escape(f"sm100: {reason}")):
        explain(q, k, v, selection, target="B200", backend="sm100")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_quantised_keys_are_refused_by_name(dtype):
    (q, k, v), selection, _ = CASE.build()
    k, v = (torch.zeros(x.shape, dtype=torch.uint8).view(dtype) for x in (k, v))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(NotImplementedError, match=rf"k is {name} .* supported: bfloat16, float16"):
        sparse_atten_func(q, k, v, selection)


def test_gradients_are_refused():
    (q, k, v), selection, _ = CASE.build()
    with pytest.raises(NotImplementedError, match=r"gradients \(forward only\)"):
        explain(q.requires_grad_(), k, v, selection, target="B200", backend="sm100")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_pipeline_on_a_gpu_with_the_reference_k1(monkeypatch, case, tokens):
    """CSR, schedule and K2 run on the GPU, whatever its architecture."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")
    monkeypatch.setattr(device, "attend_blocks", reference_k1)
    run_on_gpu(case, tokens)


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("tokens", [None, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_on_a_hopper_gpu(case, tokens):
    run_on_gpu(case, tokens)


def run_on_gpu(case, tokens):
    """Compare a call on the GPU with the definition."""
    inputs, selection, options = case.build()
    moved = [x.cuda() for x in inputs]
    bound = None if tokens is None else bytes_of(inputs[0], case.width, tokens)
    result = device.attention(*moved, on_gpu(selection), options, max_workspace_bytes=bound)
    back = Result(*(None if x is None else x.cpu() for x in result))
    assert_matches_definition(back, inputs, selection, options)


def on_gpu(selection):
    """Move the tables of a selection."""
    tables = {
        name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in vars(selection).items()
    }
    return dataclasses.replace(selection, **tables)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, 64])
def test_preparation_and_merge_are_captured_in_a_graph(monkeypatch, tokens):
    """A replay follows the ids that stand in the table then, and nothing synchronises."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

    def fill(inputs, prepared, chunk, options, partials):
        partials.o.fill_(1.0)
        partials.lse.zero_()

    monkeypatch.setattr(device, "attend_blocks", fill)
    inputs, selection, options = CASE.build()
    moved = [x.cuda() for x in inputs]
    selection = on_gpu(selection)
    bound = None if tokens is None else bytes_of(inputs[0], CASE.width, tokens)

    def call():
        return device.attention(*moved, selection, options, max_workspace_bytes=bound)

    call()  # kernels are compiled and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, _ = call()
    for share in (0.0, 0.5, 1.0):
        dropped = torch.rand(selection.q2k_indices.shape, device="cuda") < share
        selection.q2k_indices.masked_fill_(dropped, -1)
        graph.replay()
        counts = prepare(selection, *moved[:2]).schedule.split_counts.repeat_interleave(4, 1)
        assert torch.equal(out, (counts > 0)[..., None].expand_as(out).to(out.dtype))
        torch.testing.assert_close(lse, counts.float().log())


def test_preload_makes_both_kernels_ready(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (q, k, v), selection, _ = CASE.build()
    loaded = []
    for module in (contracts, vsa_device):
        monkeypatch.setattr(module, "target_of", lambda _: Target("sm_103a", 4))
    monkeypatch.setattr(device, "load_kernel", lambda *key: loaded.append(key))
    assert preload(q, k, v, selection, causal=True, lse_temperature=0.5) == "sm100"
    (k1, *_), (k2, config, target, _) = loaded
    assert k1 == "sparse_atten.cute_kernels.msa_k1_sm100"
    assert k2 == "sparse_atten.cute_kernels.msa_k2"
    assert (config.partial, config.out, config.temperature) == ("bf16", "bf16", True)
    assert config.programmatic
    assert target.arch == "sm_103a"


def random_call(seed, tokens=2048, heads=(32, 2), width=8):
    """Return q, k, v and a selection on the GPU: distinct visible blocks, the own one first."""
    make = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(tokens, n, 128, device="cuda", generator=make).bfloat16()
        for n in (heads[0], heads[1], heads[1])
    )
    own = torch.arange(tokens, device="cuda") // 128
    blocks = torch.arange(-(-tokens // 128), device="cuda")
    scores = torch.rand(heads[1], tokens, len(blocks), device="cuda", generator=make)
    scores = torch.where(blocks < own[:, None], scores, -1.0)
    scores = scores.scatter(2, own[None, :, None].expand(heads[1], -1, 1), 2.0)
    best, ids = scores.topk(min(width, len(blocks)))
    ids = torch.where(best >= 0, ids, -1).int()
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    return (q, k, v), contracts.TokenSelection(ids, offsets, offsets, tokens, tokens)


def definition(inputs, selection):
    """Attention in float64 by its definition, one sequence, causal."""
    q, k, v = (x.double().transpose(0, 1) for x in inputs)
    group, tokens = q.shape[0] // k.shape[0], q.shape[1]
    ids = selection.q2k_indices.long()
    chosen = torch.zeros(*ids.shape[:2], -(-tokens // 128) + 1, dtype=torch.bool, device=q.device)
    chosen.scatter_(2, ids, True)  # -1 would be refused: none is left below
    seen = chosen[..., :-1].repeat_interleave(128, 2)[..., :tokens].tril()
    seen = seen.repeat_interleave(group, 0)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = (q @ k.mT / 128**0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.gpu(9, 0)
def test_repeats_on_a_gpu_are_bitwise_equal():
    inputs, selection = random_call(0)
    shown = dataclasses.replace(
        selection,
        q2k_indices=torch.where(selection.q2k_indices < 0, 16, selection.q2k_indices),
    )
    first = sparse_atten_func(*inputs, selection, causal=True, backend="sm90")
    assert (first.double() - definition(inputs, shown)).abs().max() < 0.02
    for repeat in range(300):
        poison = torch.full((64 << 20,), (float("nan"), 7.0)[repeat % 2], device="cuda")
        del poison  # what the allocator hands out next
        out = torch.full_like(first, float("nan"))
        sparse_atten_func(*inputs, selection, causal=True, out=out, backend="sm90")
        assert torch.equal(out.view(torch.int16), first.view(torch.int16))


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("tokens", [None, 600])
def test_a_graph_replays_with_other_selections(tokens):
    inputs, selection = random_call(1)
    options = {"causal": True, "backend": "sm90"}
    if tokens is not None:
        options["max_workspace_bytes"] = bytes_of(inputs[0], 8, tokens)
    sparse_atten_func(*inputs, selection, **options)  # kernels are compiled and loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_atten_func(*inputs, selection, **options)
    for seed in range(2, 5):
        others, other = random_call(seed)
        for x, y in zip(inputs, others, strict=True):
            x.copy_(y)
        selection.q2k_indices.copy_(other.q2k_indices)
        eager = sparse_atten_func(*others, other, **options)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager)


@pytest.mark.gpu(9, 0)
def test_streams_do_not_disturb_each_other():
    calls = [random_call(seed) for seed in range(4)]
    run = [lambda x=x, s=s: sparse_atten_func(*x, s, causal=True, backend="sm90") for x, s in calls]
    expected = [call() for call in run]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        outs = []
        for stream, call in zip(streams, run, strict=True):
            with torch.cuda.stream(stream):
                outs.append(call())
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))


@pytest.mark.gpu(9, 0)
def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs, selection = random_call(0)
    first = sparse_atten_func(*inputs, selection, causal=True, backend="sm90")
    there = [x.to("cuda:1") for x in inputs]
    tables = {
        name: x.to("cuda:1") if isinstance(x, torch.Tensor) else x
        for name, x in vars(selection).items()
    }
    moved = dataclasses.replace(selection, **tables)
    second = sparse_atten_func(*there, moved, causal=True, backend="sm90")
    assert second.device.index == 1
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.gpu(9, 0)
def test_a_million_tokens():
    """All scores at once would take 128 GiB, all partials 256 GiB."""
    tokens, heads, kv_heads, dim = 1 << 20, 64, 4, 128
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads):
        x = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device="cuda")
        return x.normal_(generator=generator)

    q, k, v, q_idx, k_idx = (draw(n) for n in (heads, kv_heads, kv_heads, kv_heads, 1))
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = minimax_sparse_attention(
        *(q, k, v, q_idx, k_idx),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=tokens,
        max_seqlen_k=tokens,
        backend="sm90",
    )
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - out.nbytes < 5.5 * 2**30
    for token in (0, 127, 5000, tokens // 2 + 77, tokens - 1):
        for head in (0, kv_heads - 1):
            end, local = token + 1, token // 128
            scores = k_idx[:end, 0].double() @ q_idx[token, head].double()
            padded = torch.nn.functional.pad(scores, (0, -end % 128), value=-math.inf)
            best = padded.view(-1, 128).amax(1)
            best[local] = math.inf
            chosen = best.topk(min(16, len(best))).indices
            keys = (128 * chosen[:, None] + torch.arange(128, device="cuda")).flatten()
            keys = keys[keys < end]
            row = head * (heads // kv_heads)
            weights = (k[keys, head].double() @ q[token, row].double() / math.sqrt(dim)).softmax(0)
            expected = weights @ v[keys, head].double()
            torch.testing.assert_close(out[token, row].double(), expected, atol=2e-3, rtol=2**-8)
