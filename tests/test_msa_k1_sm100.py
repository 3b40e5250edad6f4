"""The Blackwell MSA partial-attention kernel: what the compiler made of it, and its numbers.

Nothing here has run on a GPU: the numbers are those of an emulator. The oracle is the definition in
float64, one edge at a time, from the table of block lists.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from msa_k1_cases import LENGTHS, Call, Case, edges, make_call, oracle

from sparse_atten.cute_kernels import msa_k1_sm100
from sparse_atten.cute_kernels.common.launch import TensorMap
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.msa_arguments import Partials
from sparse_atten.msa import partial_attention
from sparse_atten.preparation import PreparedSelection

TARGET = Target("sm_100a")
LONGER_Q = ((3, 200, 0, 7, 130, 20), (1, 127, 128, 0, 129, 3))
LONGER_K = ((1, 1, 60, 5, 30, 0), (1, 127, 400, 128, 129, 2))

CASES = [
    Case("lengths"),
    Case("lengths, causal", causal=True),
    Case("queries longer", *LONGER_Q, causal=True, padding=3),
    Case("keys longer", *LONGER_K, causal=True, kv_heads=2),
    Case("G 8", group=8, causal=True),
    Case("G 4", group=4, kv_heads=2),
    Case("G 4, causal", group=4, causal=True),
    Case("G 2", group=2, causal=True, kv_heads=2),
    Case("G 1", group=1, kv_heads=2),
    Case("G 1, causal", group=1, causal=True),
    Case("K 1", width=1, causal=True),
    Case("K 8", (90, 5), (1300, 600), width=8, causal=True),
    Case("K 7", (40, 5), (1300, 600), width=7),
    Case("K 16", (30, 5), (2100, 600), width=16, causal=True),
    Case("K 32", (20, 5), (4200, 600), width=32, causal=True, group=8),
    Case("local blocks", (300, 40), (300, 170), causal=True, ids="local"),
    Case("hot block, split", (400,), (300,), ids="hot", num_sms=4, residents=(1, 2)),
    Case("hot block, one item", (400,), (300,), ids="hot", num_sms=1, residents=(1,)),
    Case("nobody chose", ids="none"),
    Case("repeated ids", ids="repeated", causal=True),
    Case("used", used=(1, 100, 3, 129, 200, 0), spoil=True),
    Case("used, causal", used=(1, 127, 90, 0, 300, 0), spoil=True, causal=True),
    Case("pages hnd", layout="hnd", causal=True),
    Case("pages nhd", layout="nhd", kv_heads=2, group=8),
    Case("lost pages", layout="hnd", lost_pages=True, causal=True),
    Case("strides", *LONGER_Q, strided=True, kv_heads=2, group=8, causal=True),
    Case("strides of pages", *LONGER_K, strided=True, layout="nhd", kv_heads=2, causal=True),
    Case("scale 16", (64, 20), (300, 170), scale=16.0),
    Case("scale 100", (64, 20), (300, 170), scale=100.0, causal=True),
    Case("own softmax scale", (64, 20), (300, 170), softmax_scale=0.5),
    Case("fp16", dtype="fp16", causal=True),
    Case("fp32 partials", fp32=True, causal=True),
    Case("fp32 partials, G 1", fp32=True, group=1),
    Case("temperature", temperature=0.5, causal=True),
    Case("chunk", LENGTHS, LENGTHS, chunk=(200, 300), causal=True),
    Case("chunk of one sequence", (300, 20), (300, 200), chunk=(100, 150), group=4, causal=True),
    Case("static grid", persistent="static", num_sms=4, residents=(4,)),
    Case("many items, one CTA", residents=(1,), num_sms=1000, causal=True),
]
QUICK = {
    "lengths",
    "queries longer",
    "G 4, causal",
    "G 1",
    "hot block, split",
    "used, causal",
    "lost pages",
    "fp32 partials",
    "chunk",
    "static grid",
}


def compiled(config: msa_k1_sm100.Config, target: Target = TARGET) -> Any:
    return msa_k1_sm100.compile_offline(config, target)


def run(call: Call, partials: Partials, **options: Any) -> dict[str, Any]:
    """Execute the kernel on the emulator; on a static grid with several items for each CTA."""
    target = Target("sm_100a", num_sms=3)
    plan = msa_k1_sm100.launch_plan(call.case.config, target, call.arguments(partials))
    return emulation.run(compiled(call.case.config).ptx, plan, **options)


def check(case: Case, schedules: list[dict[str, int]]) -> None:
    """Run a case in every schedule and residency; compare with the oracle and among themselves."""
    call = make_call(case)
    exact, plain = oracle(call), oracle(call, "plain")
    patterns = set()
    for resident, schedule in itertools.product(case.residents, schedules):
        partials = call.partials()
        stats = run(call, partials, resident=resident, **schedule)
        assert stats["warnings"] == []
        compare(call, partials, exact, plain)
        patterns.add(
            b"".join(x.view(torch.uint8).numpy().tobytes() for x in partials if x is not None)
        )
    assert len(patterns) == 1, "the output depends on the schedule"


def compare(call: Call, partials: Partials, exact: tuple, plain: tuple) -> None:
    """What an edge writes is as exact as the formats allow; nothing else is written."""
    written = ~exact[1].isnan()
    o, lse, lse_t = partials
    assert bool(o[~written].isnan().all()), "a slot was written that no edge names"
    assert not bool(o[written].isnan().any())
    if not written.any():
        return
    largest = float((exact[0][written].abs()).max())
    allowed = 2 * float((plain[0] - exact[0])[written].abs().max()) + 1e-5 + 1e-6 * largest
    error = (o.double() - exact[0]).nan_to_num(0).abs()
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert float(error.max()) <= allowed, f"off by {error.max():.3e} > {allowed:.3e} at {worst}"
    for got, wanted in ((lse, exact[1]), (lse_t, exact[2])):
        if got is None:
            continue
        assert torch.equal(got.isnan(), ~written)
        assert torch.equal(got == -math.inf, wanted == -math.inf)
        seen = written & (wanted != -math.inf)
        gap = (got.double() - wanted)[seen].abs()
        assert bool((gap <= 2e-5 + 1e-6 * wanted[seen].abs()).all()), float(gap.max())
    assert bool((o[written & (exact[1] == -math.inf)] == 0).all())


@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda case: case.name)
def test_numbers(case: Case):
    chosen = emulation.schedules()
    check(case, [chosen[0], chosen[3], chosen[19]])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_in_every_schedule(case: Case):
    check(case, emulation.schedules())
