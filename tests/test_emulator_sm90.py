"""What SM90 kernels use: wgmma and its rules, st.async, named barriers, queues, bulk groups."""

from __future__ import annotations

import emulator
import pytest
import sm90_gemm
import torch
from micro import assemble, kernel, launch
from sm90_gemm import Shape

SCHEDULES = [emulator.SCHEDULES[i] for i in (0, 1, 3, 4, 5, 6, 9)]
SHAPES = [
    Shape(),
    Shape(128, "f16"),
    Shape(128, "bf16", n_major=True),
    Shape(64, "bf16", registers=True),
    Shape(128, "bf16", n_major=True, registers=True),
]
LATE = {"async_delay": emulator.LATE}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm_equals_the_exact_product_in_every_schedule(shape):
    text = sm90_gemm.text(shape)
    assemble(text, "sm_90a")
    results = []
    for schedule in (*SCHEDULES, {"group": 4}, {"group": 8, "async_delay": 3, "seed": 1}):
        result, exact = sm90_gemm.run(text, shape, **schedule)
        half = 2.0**-8 if shape.kind == "bf16" else 2.0**-11  # of a unit in the last place
        assert torch.allclose(result.double(), exact, rtol=1.001 * half, atol=1e-4), schedule
        results.append(result)
    assert all(torch.equal(results[0], other) for other in results)


PLAIN, FRAGMENTS = Shape(), Shape(registers=True)
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT_ONE, WAIT_ALL = "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 0;"
BARRIER = "bar.sync 1, 128;"
TMA_STORE = (
    "@%p2 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {%r17, %r18}], [%r19];"
)
B_START = "shr.u32 %r17, %r16, 4;"
ARRIVE = "@%p7 mbarrier.arrive.shared::cta.b64 _,"
# Name: shape, what is replaced, by what, the kinds of report, options of the run.
FAULTS = {
    "no wgmma.fence": (PLAIN, FENCE, "", "wgmma registers", {}),
    "no fence after loading A": (FRAGMENTS, FENCE, "", "wgmma registers", {}),
    "an accumulator is read in flight": (
        PLAIN,
        COMMIT,
        f"{COMMIT} mov.b32 %r199, %f0;",
        "wgmma registers",
        {},
    ),
    "no wait before the epilogue": (PLAIN, WAIT_ALL, "", "wgmma registers", {}),
    "no commit": (PLAIN, COMMIT, "", "wgmma registers|race", {}),
    "a stage is freed before its wgmmas are waited for": (PLAIN, WAIT_ONE, "", "race", {}),
    "the same, asynchronous work late": (PLAIN, WAIT_ONE, "", "race", LATE),
    "the wait leaves one group too many": (
        PLAIN,
        WAIT_ONE,
        "wgmma.wait_group.sync.aligned 2;",
        "race",
        {},
    ),
    "no wait for a full stage": (PLAIN, "@!%p4 bra FULL1;", "", "race|uninitialised read", LATE),
    "no wait for a full stage that fragments are loaded from": (
        FRAGMENTS,
        "@!%p4 bra FULL1;",
        "",
        "race|uninitialised read",
        LATE,
    ),
    "no wait for a free stage": (PLAIN, "@!%p4 bra FREE;", "", "race", {}),
    "all lanes free a stage": (PLAIN, ARRIVE, ARRIVE.removeprefix("@%p7 "), "barrier", {}),
    "no proxy fence before the TMA store": (
        PLAIN,
        "fence.proxy.async.shared::cta;",
        "",
        "proxy fence",
        {},
    ),
    "no barrier before the TMA store": (PLAIN, BARRIER, "", "race|uninitialised read", {}),
    "the barrier counts another warp": (PLAIN, BARRIER, "bar.sync 1, 160;", "deadlock", {}),
    "no wait for the TMA store": (
        PLAIN,
        "@%p2 cp.async.bulk.wait_group 0;",
        "",
        "unfinished work",
        LATE,
    ),
    "no TMA store": (PLAIN, TMA_STORE, "", "unwritten output", {}),
    "a warp leaves before it multiplies": (
        PLAIN,
        "setmaxnreg.inc.sync.aligned.u32 232;",
        "setmaxnreg.inc.sync.aligned.u32 232; setp.eq.u32 %p6, %r1, 7; @%p6 bra END;",
        "divergence|deadlock",
        {},
    ),
    "a warp has another descriptor": (
        PLAIN,
        B_START,
        f"{B_START} shr.u32 %r18, %r1, 1; and.b32 %r18, %r18, 1; add.u32 %r17, %r17, %r18;",
        "divergence",
        {},
    ),
    "a lane has another descriptor": (
        PLAIN,
        B_START,
        f"{B_START} add.u32 %r17, %r17, %r20;",
        "descriptor",
        {},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_report(name):
    shape, old, new, kinds, options = FAULTS[name]
    text = sm90_gemm.text(shape)
    changed = text.replace(old, new)
    assert changed != text, "the fault changes nothing"
    with pytest.raises(emulator.EmulatorError) as raised:
        sm90_gemm.run(changed, shape, **options)
    print(raised.value)
    assert raised.value.kind in kinds.split("|"), raised.value


def test_fragments_of_a_wgmma_in_flight_are_not_overwritten():
    text = sm90_gemm.text(FRAGMENTS)
    for i in range(16):
        text = text.replace(f"%r{116 + i}", f"%r{100 + i}")
    with pytest.raises(
        emulator.EmulatorError, match=r"wgmma registers: %r\d+ and 3 more of a wgmma in flight"
    ):
        sm90_gemm.run(text, FRAGMENTS)
    waits = text.replace(COMMIT, f"{COMMIT} {WAIT_ALL}").replace(WAIT_ONE, "")
    sm90_gemm.run(waits, FRAGMENTS)


def test_wgmmas_of_one_shape_accumulate_without_a_fence():
    text = sm90_gemm.text(PLAIN)
    first, *rest = text.split(FENCE)
    sm90_gemm.run(first + FENCE + "".join(rest), PLAIN, **LATE)


@pytest.mark.parametrize("fence", ["", FENCE])
def test_wgmmas_of_two_shapes_need_a_fence(fence):
    """The second one adds to the first 8 of the 32 columns that the first one wrote."""
    wide, narrow = (_vector("r", 100, count) for count in (16, 4))
    end = "%d5, %d5, 1, 1, 1, 0, 0;"
    body = f"""mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r1; mov.u32 %r3, 0;
    st.shared.v4.b32 [%r2], {{%r3, %r3, %r3, %r3}}; fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r4, %r1, 4; cvt.u64.u32 %d5, %r4; or.b64 %d5, %d5, {128 >> 4 << 16 | 256 >> 4 << 32};
    {FENCE}
    wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {wide}, {end} {fence}
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {narrow}, {end}
    {COMMIT} {WAIT_ALL}"""
    text = kernel(body, 0, target="sm_90a")
    if fence:
        launch(text, [], block=128, races=True)
        return
    with pytest.raises(emulator.EmulatorError, match="after a wgmma of shape m64n32k16"):
        launch(text, [], block=128)


def _vector(letter: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{first + i}" for i in range(count)) + "}"
