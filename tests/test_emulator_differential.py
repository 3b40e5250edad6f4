"""The emulator against another one, where `SPARSE_ATTEN_EMULATOR` names a folder with it.

Without MMAs every output must be equal bit for bit; sums of MMAs may be rounded differently.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from typing import Any

import device_cases
import emulation
import emulator
import numpy as np
import pytest
import test_block_topk
import torch
from micro import kernel

VARIABLE = "SPARSE_ATTEN_EMULATOR"
pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no emulator to compare with"
)
_TYPES = {"bf16": 9, "fp16": 8, "f32": 4}  # the other's names of element types


@cache
def other() -> Any:
    sys.path.insert(0, os.environ[VARIABLE])
    return importlib.import_module("emu")


def run_other(ptx: str, plan: Any) -> dict[str, Any]:
    """Run a launch plan there."""
    parameters = [
        other().TensorMap(
            None,
            list(value.box),
            dims=list(value.dims),
            strides=list(value.strides),
            swizzle=value.swizzle,
            addr=value.address,
            ty=_TYPES[value.dtype],
            bits=16,
        )
        if hasattr(value, "box")
        else value
        for value in plan.parameters
    ]
    shape = plan.grid, plan.block, plan.smem_bytes
    return other().run_ptx(ptx, None, *shape, parameters, cluster=plan.cluster)


SOUP = """
mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d5, %d0; add.s64 %d7, %d5, %d1;
ld.global.u32 %r1, [%d6]; ld.global.u32 %r2, [%d7];
prmt.b32 %r3, %r1, %r2, 0x3715; lop3.b32 %r4, %r1, %r2, %r3, 0xE8;
shf.l.wrap.b32 %r5, %r3, %r4, %r1;
bfe.s32 %r6, %r5, 7, 11; bfi.b32 %r7, %r6, %r4, 3, 9; mad.hi.s32 %r8, %r7, %r1, %r2;
shfl.sync.bfly.b32 %r9|%p1, %r8, 5, 31, -1; shfl.sync.up.b32 %r10|%p2, %r9, 3, 0, -1;
selp.b32 %r11, %r9, %r10, %p2; vote.sync.ballot.b32 %r12, %p2, -1; and.b32 %r30, %r1, 7;
match.any.sync.b32 %r13, %r30, -1; redux.sync.add.s32 %r14, %r11, -1; popc.b32 %r15, %r13;
setp.lt.s32 %p3, %r1, 0; @%p3 bra NEGATIVE;
mul.lo.s32 %r16, %r15, %r14; rem.s32 %r16, %r16, 1001; bra.uni MEET;
NEGATIVE: div.s32 %r16, %r14, 37; xor.b32 %r16, %r16, %r12;
MEET: bar.warp.sync -1; cvt.rn.f32.s32 %r17, %r16; and.b32 %r31, %r1, 0x3FFFFFFF;
fma.rn.f32 %r18, %r31, %r17, %r17; add.rm.f32 %r19, %r18, %r31; cvt.rni.s32.f32 %r20, %r19;
cvt.rn.bf16x2.f32 %r21, %r18, %r19; add.s32 %r22, %r20, %r21; min.s32 %r23, %r22, %r16;
mov.u32 %r40, smem; and.b32 %r41, %r1, 60; add.u32 %r41, %r41, %r40;
setp.ge.u32 %p4, %r0, 16; @%p4 bra COUNT;
shl.b32 %r42, %r0, 2; add.u32 %r42, %r42, %r40; st.shared.u32 [%r42], 0;
COUNT: bar.sync 0; atom.shared.add.u32 %r43, [%r41], %r15; bar.sync 0;
ld.shared.u32 %r44, [%r41]; add.s32 %r23, %r23, %r44;
add.s64 %d8, %d5, %d2; st.global.u32 [%d8], %r23;
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_of_instructions(seed):
    draw = np.random.default_rng(seed)
    x, y = (torch.from_numpy(draw.integers(-(2**31), 2**31, 96, np.int32)) for _ in range(2))
    ours, theirs = torch.zeros(96, dtype=torch.int32), torch.zeros(96, dtype=torch.int32)
    text = kernel(SOUP, 3, target="sm_90a")
    emulator.launch(text, "k", 1, 96, 0, [x, y, ours], group=1 + 2 * (seed % 2), races=True)
    other().run_ptx(text, "k", 1, 96, 0, [x, y, theirs])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["rows_300_512", "long_1025_16", "rows_1000_97"])
def test_topk(name, monkeypatch):
    case = test_block_topk.CASES[name]
    monkeypatch.setattr(test_block_topk, "emulator", emulation.emulator)
    ours = test_block_topk.emulate(case, {"group": 32})
    monkeypatch.setattr(test_block_topk, "emulator", other)
    theirs = test_block_topk.emulate(case, {})
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["edge_lengths_k3", "wild_ids", "one_hot_block"])
def test_csr(name, monkeypatch):
    from sparse_atten.csr.device import csr_on_device, program

    def run(schedule: dict) -> Any:
        with device_cases.emulated(program(False), schedule) as launch:
            return csr_on_device(device_cases.tables_of(name), launch, is_wide=False)

    monkeypatch.setattr(device_cases, "emulator", emulation.emulator)
    ours = run({"group": 8})
    monkeypatch.setattr(device_cases, "emulator", other)
    theirs = run({})
    for field in device_cases.CSR_TENSORS:
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field


@pytest.mark.parametrize("name", ["odd Nq", "padding queries", "rescaled in every round"])
def test_sm100_kernel(name):
    kernel_test = importlib.import_module("test_vsa_sm100")

    case = next(c for c in kernel_test.CASES if c.name == name)
    call = kernel_test.make_call(case)
    exact, _ = kernel_test.oracle(call)
    results = []
    for run in (emulation.run, run_other):
        out, lse = torch.full_like(call.q, torch.nan), torch.full(call.q.shape[:3], torch.nan)
        arguments = kernel_test.arguments_of(
            call.q, call.k, call.v, out, call.selection, softmax_scale=call.softmax_scale, lse=lse
        )
        config = kernel_test.CONFIGS[case.config]
        plan = kernel_test.vsa_sm100.launch_plan(config, kernel_test.TARGET, arguments)
        run(kernel_test.compiled(case.config).ptx, plan)
        results.append((out, lse))
    (ours, our_lse), (theirs, their_lse) = results
    gap = (ours.double() - theirs.double()).abs().max()
    assert float(gap) <= kernel_test.budget(call, exact)
    finite = their_lse.isfinite()
    assert torch.equal(our_lse.isfinite(), finite)
    assert float((our_lse - their_lse)[finite].abs().max()) <= 1e-5
