"""The performance model of the Blackwell VSA kernel: its rules by hand, its counts on an emulator.

The timetables below are worked out on paper.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import emulation
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")
pytest.importorskip("rich", reason="the tool prints with rich")
sys.path.insert(0, str(Path(__file__).parents[1] / "perf"))

import sm100_model as model
import test_vsa_sm100 as kernel
from sm100_model import Replay, Spans

from sparse_atten.cute_kernels import vsa_sm100
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.vsa_arguments import arguments_of

NOTHING = Spans(*[0.0] * len(Spans._fields))


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("mov.b64", {"issued": 1, "work": 0}),
        ("bra.uni", {"issued": 1, "work": 1, "lanes": 0}),
        ("ex2.approx.ftz.f32", {"issued": 1, "work": 1, "ex2": 1}),
        ("fma.rn.f32x2", {"f32x2": 1, "lanes": 2, "cubic": 0}),
        ("add.rm.f32x2", {"f32x2": 1, "lanes": 2, "cubic": 2}),
        ("max.f32", {"lanes": 1, "max lanes": 1}),
        ("cvt.rn.bf16x2.f32", {"lanes": 1, "f32x2": 0}),
        ("mbarrier.arrive.shared.b64", {"work": 1, "lanes": 0}),
    ],
)
def test_classes_of_an_instruction(opcode: str, expected: dict[str, int]):
    found = model.classify(opcode)
    assert {name: found[name] for name in expected} == expected


def test_work_of_agents_is_in_the_units_of_the_model(monkeypatch: pytest.MonkeyPatch):
    amounts = Counter(
        issued=9,
        special=4,
        tmem_ld_bytes=32 * 128,
        tmem_st_bytes=16 * 128,
        mma_flop=3 * 2 * 128 * 128 * 16,
        operand_bytes=5,
        tma_bytes_in=7,
    )
    monkeypatch.setattr(model.counts, "work_of", lambda *_: {"mma": amounts})
    assert model.work_of(None, ()) == {
        "mma": {
            "issued": 9,
            "TMEM words loaded": 32,
            "TMEM words stored": 16,
            "MMA": 3,
            "SMEM operand bytes": 5,
            "TMA bytes in": 7,
        }
    }


def test_a_round_waits_for_its_softmax():
    spans = NOTHING._replace(
        qk=4, pv_head=3, pv_tail=1, maximum=1, exp_head=6, exp_tail=2, finish=5
    )
    # QK 0-4 and 4-8; exponentials of tile 0 5-11-13, of tile 1 13-19-21; PV 11-14-15 and 19-22-23.
    replay = Replay(spans, 1)
    assert replay.run() == 28
    starts = {(s.what, s.tile): s.start for s in replay.trace}
    assert starts["PV head", 0] == 11
    assert starts["PV tail", 0] == 14
    assert starts["PV head", 1] == 19


def test_fills_pass_one_by_one():
    spans = NOTHING._replace(qk=1, pv_head=1, fill=10)
    # Q0 K0 Q1 K1 V0 V1 land at 10, 20 .. 60; PV1 is over at 61 and its tile leaves until 71.
    assert Replay(spans, 1).run() == 71
    # K and V once for both: Q0 K0 Q1 V land at 10 .. 40, PV is over at 42.
    assert Replay(spans, 1, shared=1).run() == 52


def test_a_slot_is_filled_again_when_its_reader_is_done():
    spans = NOTHING._replace(qk=100, pv_head=100, fill=1)
    replay = Replay(spans, 1)
    replay.run()
    landed = {(s.what, s.tile): s.start for s in replay.trace if s.unit == "TMA"}
    assert landed["V", 0] == 4, "the third slot is free from the start"
    assert landed["V", 1] == 102, "the fourth tile waits for QK of tile 0, which ran from 2"


def test_bound_is_one_where_nothing_waits():
    spans = NOTHING._replace(qk=4, pv_head=3, pv_tail=1)
    assert model.bound(spans, 8) == (1.0, 1.0)
    slower = spans._replace(exp_head=5, exp_tail=2)
    assert model.bound(slower, 8)[1] > 1.0
    assert model.bound(slower, 8, early=True)[1] == 1.0


def test_exponentials_of_both_tiles_share_a_unit():
    spans = NOTHING._replace(exp_head=7, exp_tail=3)
    assert Replay(spans, 5, items=2).run() == 2 * 5 * 2 * 10


@pytest.mark.slow
def test_counts_and_bound_meet_their_aims():
    step, row = model.marginal(128)
    partial, _ = model.marginal(100)
    work = {role: amounts["work"] for role, amounts in step.items()}
    assert sum(work.values()) <= 2250
    assert work["softmax"] <= 2100
    assert model.total(partial, "work") <= 1.15 * sum(work.values())
    exact = {
        "MMA": 16,
        "TMEM words loaded": 512,
        "TMEM words stored": 256,
        "TMA bytes in": 2 * 32768,
        "SMEM operand bytes": 3 * 32768,
    }
    assert {name: model.total(step, name) for name in exact} == exact
    # 512 exponentials and an alpha for each of four warps, however they are computed.
    assert step["softmax"]["ex2"] + step["softmax"]["cubic"] == 516
    assert model.total(step, "f32x2") <= 704
    pair = model.count((4, 16))
    assert pair["mma"]["MMA"] == 16 * 20
    spans = model.spans_of(step, row, fills=False)
    assert all(model.bound(spans, length)[1] <= 1.03 for length in model.ROW_LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ragged sizes", "growing maxima"])
def test_sm103_gives_the_bits_of_sm100(name: str):
    call = kernel.make_call(next(case for case in kernel.CASES if case.name == name))
    bits = []
    for arch in ("sm_100a", "sm_103a"):
        target = Target(arch, num_sms=3)
        ptx = vsa_sm100.compile_offline(kernel.FULL, Target(arch)).ptx
        assert f".target {arch}" in ptx
        out = torch.full_like(call.q, torch.nan)
        lse = torch.full(call.q.shape[:3], torch.nan)
        arguments = arguments_of(
            call.q, call.k, call.v, out, call.selection, softmax_scale=call.softmax_scale, lse=lse
        )
        emulation.run(ptx, vsa_sm100.launch_plan(kernel.FULL, target, arguments))
        assert not out.isnan().any()
        bits.append(out.contiguous().view(torch.int16).numpy().tobytes() + lse.numpy().tobytes())
    assert bits[0] == bits[1]


def test_page_shows_the_tables_of_the_kernel():
    page = (Path(__file__).parents[1] / "docs" / "vsa_sm100.md").read_text()
    assert vsa_sm100.SCHEDULE.tables() in page
