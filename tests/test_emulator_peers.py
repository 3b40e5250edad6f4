"""Others' kernels, known to be right on silicon, on the emulator: FlashAttention-4's forward."""

from __future__ import annotations

import importlib.util
import math

import emulator
import fa4
import pytest
import torch

pytestmark = [
    pytest.mark.slow,  # compiling one takes half a minute
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4 to compile"
    ),
]
SCHEDULES = [emulator.SCHEDULES[i] for i in (0, 1, 3, 4, 5, 7, 14, 18)]


def operands(queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = (queries, keys, keys)
    made = [torch.randn(1, n, 2, 128, generator=generator).bfloat16() for n in shapes]
    return (*made, torch.full_like(made[0], math.nan))


def attention(q, k, v, *, causal: bool, dtype: torch.dtype) -> torch.Tensor:
    """Attention with bottom-right causal mask; with a narrow dtype, P is rounded to bf16."""
    scores = torch.einsum("bshd,bthd->bhst", q.to(dtype), k.to(dtype)) / math.sqrt(128)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(hidden.triu(k.shape[1] - q.shape[1] + 1), -math.inf)
    weights = scores.softmax(-1)
    if dtype == torch.float32:
        weights = weights.bfloat16().float()
    return torch.einsum("bhst,bthd->bshd", weights, v.to(dtype))


CASES = [
    *((arch, causal, 256, 384, 8) for arch in (100, 90) for causal in (False, True)),
    (100, False, 1024, 640, 2),  # pairs of CTAs: clusters, cta_group::2, multicast commits
]


@pytest.mark.parametrize(("arch", "causal", "queries", "keys", "schedules"), CASES)
def test_forward_equals_the_oracle_in_every_schedule(arch, causal, queries, keys, schedules):
    kernel = fa4.compiled(arch, causal, queries)
    assert ("tcgen05.mma.cta_group::2" in kernel.ptx) == (queries > 512)
    q, k, v, out = operands(queries, keys)
    exact = attention(q, k, v, causal=causal, dtype=torch.float64)
    plain = attention(q, k, v, causal=causal, dtype=torch.float32).bfloat16().double()
    largest = float(v.abs().max()) * float((q.double().norm(dim=-1)).max())
    allowed = 2 * float((plain - exact).abs().max()) + 1e-5 + 1e-6 * largest
    patterns = set()
    for schedule in SCHEDULES[8 - schedules :]:
        out.fill_(math.nan)
        made = fa4.launch_of(arch, causal, kernel, (q, k, v, out))
        shared = 227 * 1024 - emulator.program_of(kernel.ptx).kernel.shared_bytes
        result = emulator.launch(
            kernel.ptx,
            None,
            made.grid,
            made.block,
            shared,
            made.parameters,
            cluster=made.cluster,
            tensors=(q, k, v, out),
            outputs=(out,),
            races=True,
            **schedule,
        )
        assert float((out.double() - exact).abs().max()) <= allowed, schedule
        patterns.add(out.view(torch.int16).numpy().tobytes())
        if queries == 256:
            steps = result.mma / (16 if arch == 100 else 32)
            assert steps == (12 if not causal or arch == 100 else 10)
    assert len(patterns) == 1, "the output depends on the schedule"
