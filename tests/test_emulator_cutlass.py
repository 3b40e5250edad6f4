"""CUTLASS's CuTe-DSL tutorial GEMMs and FMHA for Blackwell on the emulator, from a checkout."""

from __future__ import annotations

import math

import cutlass_examples
import emulator
import pytest
import torch
from cutlass_examples import EXAMPLES, FMHA, GEMM, VARIABLE
from emulator.peers import LaunchSpec, MapSpec, launches, packed

pytest.importorskip("cutlass", reason="compiling needs nvidia-cutlass-dsl")
pytestmark = [
    pytest.mark.slow,  # compiling and running one takes half a minute
    pytest.mark.skipif(
        not EXAMPLES.is_dir(), reason=f"{VARIABLE} names no checkout of NVIDIA/cutlass"
    ),
]
LATE = {"seed": 4, "async_delay": emulator.LATE}
SCHEDULES = ({}, LATE)


def launch(ptx: str, spec: LaunchSpec, values: list, tensors: list[torch.Tensor], **options):
    """Run a launch; the last tensor is the output."""
    tensors[-1].fill_(math.nan)
    return emulator.launch(
        ptx,
        None,
        spec.grid,
        spec.block,
        227 * 1024 - emulator.program_of(ptx).kernel.shared_bytes,
        values,
        tensors=tensors,
        outputs=tensors[-1:],
        races=True,
        **{"cluster": spec.cluster, **options},
    )


def sizes_of(ptx: str) -> list[int]:
    """Return the bytes of each parameter of a kernel."""
    return [parameter.size for parameter in emulator.program_of(ptx).kernel.parameters]


@pytest.mark.parametrize("number", ["0", "1", "2", "3", "3_1", "4", "5"])
def test_tutorial_gemm(number):
    """K-major A and B, float16, 512 x 512 x 256; the later ones multicast and are persistent."""
    ptx, mlir = cutlass_examples.compiled(f"gemm {number}")
    (spec,) = launches(mlir)
    m, n, k = GEMM
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator).half() for rows in (m, n))
    c = torch.zeros(m, n, dtype=torch.float16)
    loads = iter((a, b, a, b))  # kernels for two shapes of clusters have two maps of each
    maps = iter(
        [
            x.bind(next(loads) if x.kind == "load" else c)
            for x in spec.arguments
            if isinstance(x, MapSpec)
        ]
    )
    divisors = iter([x for x in spec.arguments if isinstance(x, bytes)])
    values = [
        {128: lambda: next(maps), 12: lambda: next(divisors), 8: lambda: c}.get(
            size, lambda: None
        )()
        for size in sizes_of(ptx)
    ]
    exact = a.double() @ b.double().T
    clusters = {spec.cluster, spec.preferred or spec.cluster}
    assert len(clusters) == (2 if number == "4" else 1)
    for cluster in clusters:
        for schedule in SCHEDULES:
            launch(ptx, spec, values, [a, b, c], cluster=cluster, **schedule)
            assert torch.allclose(c.double(), exact, rtol=1.001 * 2.0**-11, atol=1e-4)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_fmha(mask):
    """Two heads of k and v, each for two of q; the causal mask is aligned to the top left."""
    ptx, mlir = cutlass_examples.compiled(f"fmha {mask}")
    (spec,) = launches(mlir)
    batch, queries, keys, heads, group, width = FMHA.values()
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(batch, queries, heads, group, width, generator=generator).half()
    k, v = (torch.randn(batch, keys, heads, 1, width, generator=generator).half() for _ in "kv")
    out = torch.zeros_like(q)
    wide_k, wide_v = (x.expand(-1, -1, -1, group, -1) for x in (k, v))
    views = [q.permute(1, 4, 3, 2, 0), wide_k.permute(1, 4, 3, 2, 0), wide_v.permute(4, 1, 3, 2, 0)]
    views.append(out.permute(1, 4, 3, 2, 0))
    specs = [x for x in spec.arguments if isinstance(x, MapSpec)]
    maps = iter([x.bind(view) for x, view in zip(specs, views, strict=True)])
    numbers = iter([x for x in spec.arguments if isinstance(x, (int, float))])
    values, before = [], 0
    for size in sizes_of(ptx):
        if size == 128:
            values.append(next(maps))
        elif size == 4:  # the width after each map, then scales and the window
            values.append(packed(width) if before == 128 else next(numbers))
        else:
            values.append(None)
        before = size
    scores = torch.einsum("bshrd,bthrd->bhrst", q.double(), wide_k.double()) / math.sqrt(width)
    if mask == "causal":
        scores = scores.masked_fill(torch.ones(queries, keys).triu(1).bool(), -math.inf)
    exact = torch.einsum("bhrst,bthrd->bshrd", scores.softmax(-1), wide_v.double())
    rounded = torch.einsum(
        "bhrst,bthrd->bshrd", scores.float().softmax(-1).half().float(), wide_v.float()
    )
    allowed = 2 * float((rounded.half().double() - exact).abs().max()) + 1e-5
    for schedule in SCHEDULES:
        launch(ptx, spec, values, [q, k, v, out], **schedule)
        assert float((out.double() - exact).abs().max()) <= allowed
