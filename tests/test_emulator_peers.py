"""Others' kernels, known to be right on silicon, on the emulator: FlashAttention-4's forward.

Its SM90 kernels also run on the GPU, where there is one, on the same inputs.
"""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

import emulator
import fa4
import pytest
import torch
from fa4 import Variant

pytestmark = [
    pytest.mark.slow,  # compiling one takes half a minute
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4 to compile"
    ),
]
SCHEDULES = [emulator.SCHEDULES[i] for i in (0, 1, 3, 4, 5, 7, 14, 18)]
KEY_BLOCK = 128


class Inputs(NamedTuple):
    """q, k, v and an output of NaN, each [B, S, H, D], and the lists of a sparse variant."""

    tensors: tuple[torch.Tensor, ...]
    lists: tuple[torch.Tensor, ...]
    shown: torch.Tensor  # bool [B, H, S, T]: what each query attends to


def draw(variant: Variant, queries: int, keys: int) -> Inputs:
    """Draw operands; keys past the last whole block are in the lists of masked blocks."""
    generator = torch.Generator().manual_seed(1)
    heads = (2 * variant.group, 2, 2)
    q, k, v = (
        torch.randn(1, n, h, fa4.HEAD_DIM, generator=generator).bfloat16()
        for n, h in zip((queries, keys, keys), heads, strict=True)
    )
    shown = torch.ones(1, heads[0], queries, keys, dtype=torch.bool)
    lists: tuple[torch.Tensor, ...] = ()
    if variant.sparse:
        block = fa4.query_block(variant)
        rows, columns = -(-queries // block), -(-keys // KEY_BLOCK)
        chosen = torch.rand(1, heads[0], rows, columns, generator=generator) < 0.6
        chosen[0, 0, 0] = False
        chosen[0, 1, -1] = True
        masked = torch.rand(chosen.shape, generator=generator) < 0.4
        masked[..., keys // KEY_BLOCK :] = True
        lists = (*listed(chosen & masked), *listed(chosen & ~masked))
        shown = chosen.repeat_interleave(block, 2).repeat_interleave(KEY_BLOCK, 3)
        shown = shown[:, :, :queries, :keys]
    if variant.causal:
        shown = shown & ~torch.ones_like(shown).triu(keys - queries + 1)
    return Inputs((q, k, v, torch.full_like(q, math.nan)), lists, shown)


def listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts [B, H, M] and indices [B, H, M, N]; what follows the lists is far outside."""
    indices = torch.full(chosen.shape, 1 << 20, dtype=torch.int32)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in chosen.shape[:-1])).tolist():
        blocks = chosen[tuple(place)].nonzero()[:, 0]
        indices[(*place, slice(len(blocks)))] = blocks.int()
    return chosen.sum(-1, dtype=torch.int32), indices


def softmax_of(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [B, H, S, T], 0 where a query has no key."""
    q, k, *_ = (t.to(dtype) for t in inputs.tensors)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(fa4.HEAD_DIM)
    return scores.masked_fill(~inputs.shown, -math.inf).softmax(-1).nan_to_num(0)


def heaviest(inputs: Inputs) -> torch.Tensor:
    """Return the largest weight of each query: [B, S, H, 1]."""
    return softmax_of(inputs, torch.float64).amax(-1).transpose(1, 2).unsqueeze(-1)


def attention(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Attention, 0 where a query has no key; with a narrow dtype, P is rounded to bf16."""
    weights = softmax_of(inputs, dtype)
    q, _, v, _ = (t.to(dtype) for t in inputs.tensors)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    if dtype == torch.float32:
        weights = weights.bfloat16().float()
    return torch.einsum("bhst,bthd->bshd", weights, v)


def allowance(inputs: Inputs) -> float:
    """Return twice the error of a plain float32 computation, and a little."""
    q, _, v, _ = inputs.tensors
    exact = attention(inputs, torch.float64)
    plain = attention(inputs, torch.float32).bfloat16().double()
    largest = float(v.abs().max()) * float(q.double().norm(dim=-1).max())
    return 2 * float((plain - exact).abs().max()) + 1e-5 + 1e-6 * largest


def emulate(variant: Variant, inputs: Inputs, **options) -> emulator.Result:
    """Fill the output."""
    kernel = fa4.compiled(variant)
    inputs.tensors[3].fill_(math.nan)
    made = fa4.launch_of(variant, kernel, inputs.tensors, inputs.lists)
    return emulator.launch(
        kernel.ptx,
        None,
        made.grid,
        made.block,
        227 * 1024 - emulator.program_of(kernel.ptx).kernel.shared_bytes,
        made.parameters,
        cluster=made.cluster,
        tensors=(*inputs.tensors, *inputs.lists),
        outputs=(inputs.tensors[3],),
        races=True,
        **options,
    )


CASES = [
    *((Variant(arch, causal), 256, 384, 8) for arch in (100, 90) for causal in (False, True)),
    (Variant(100, tokens=1024), 1024, 640, 2),  # pairs of CTAs: clusters, multicast commits
    *(
        (Variant(arch, causal, group=2), 200, 384, 2)
        for arch in (100, 90)
        for causal in (False, True)
    ),
    *((Variant(arch, sparse=True), 400, 500, 3) for arch in (100, 90)),
]


@pytest.mark.parametrize(("variant", "queries", "keys", "schedules"), CASES)
def test_forward_equals_the_oracle_in_every_schedule(variant, queries, keys, schedules):
    text = fa4.compiled(variant).ptx
    pairs = variant == Variant(100, tokens=1024) or variant == Variant(100, group=2)
    assert ("tcgen05.mma.cta_group::2" in text) == pairs
    inputs = draw(variant, queries, keys)
    exact, allowed = attention(inputs, torch.float64), allowance(inputs)
    out = inputs.tensors[3]
    patterns = set()
    for schedule in SCHEDULES[8 - schedules :]:
        result = emulate(variant, inputs, **schedule)
        assert float((out.double() - exact).abs().max()) <= allowed, schedule
        patterns.add(out.view(torch.int16).numpy().tobytes())
        if queries == 256:
            steps = result.mma / (16 if variant.arch == 100 else 32)
            assert steps == (12 if not variant.causal or variant.arch == 100 else 10)
    assert len(patterns) == 1, "the output depends on the schedule"


DEVICE_CASES = [
    Variant(90),
    Variant(90, causal=True),
    Variant(90, causal=True, group=2),
    Variant(90, sparse=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", DEVICE_CASES)
def test_the_device_agrees_to_rounding(variant):
    """P is rounded to bf16 in both; sums and ex2 differ in their last bits."""
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"needs an SM90 GPU, this device has compute capability {capability}")
    inputs = draw(variant, 200, 300)
    emulate(variant, inputs, group=4)
    emulated = inputs.tensors[3].double()
    on_device = run_on_device(variant, inputs).double()
    exact, allowed = attention(inputs, torch.float64), allowance(inputs)
    difference = (on_device - emulated).abs()
    print(
        f"{variant}: device - emulated {float(difference.max()):.2e}, "
        f"device - exact {float((on_device - exact).abs().max()):.2e}, "
        f"emulated - exact {float((emulated - exact).abs().max()):.2e}, allowed {allowed:.2e}, "
        f"equal bits {float((difference == 0).double().mean()):.4f}"
    )
    assert float((emulated - exact).abs().max()) <= allowed
    assert float((on_device - exact).abs().max()) <= allowed
    # Outputs round to neighbours, and an ex2 that differs may round two heavy weights of P apart.
    unit = 2.0**-7 * torch.maximum(on_device.abs(), emulated.abs())
    weights = 2.0**-7 * heaviest(inputs) * float(inputs.tensors[2].abs().max())
    assert (difference <= unit + weights).all()
    assert float(difference.mean()) <= 2.0**-10 * float(exact.abs().mean())


def run_on_device(variant: Variant, inputs: Inputs) -> torch.Tensor:
    """Run its own entry point on copies of the inputs."""
    from flash_attn.cute import block_sparsity, interface

    q, k, v = (t.cuda() for t in inputs.tensors[:3])
    options = {}
    if variant.sparse:
        lists = (t.cuda() for t in inputs.lists)
        block = (fa4.query_block(variant), KEY_BLOCK)
        options["block_sparse_tensors"] = block_sparsity.BlockSparseTensorsTorch(
            *lists, block_size=block
        )
    return interface._flash_attn_fwd(q, k, v, causal=variant.causal, **options)[0].cpu()
