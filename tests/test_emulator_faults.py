"""Each kind of fault gives its own report; the kernel without a fault gives none.

The kernel multiplies two bf16 matrices with all that a Blackwell kernel has: a TMA ring of two
stages, tcgen05 MMAs, commits, tensor memory, an epilogue through shared memory and a TMA store.
"""

from __future__ import annotations

import ctypes
import gc
import platform

import emulator
import pytest
import torch
from emulator.peers import TensorMap
from micro import assemble, kernel, launch

ROWS, COLUMNS, K, STAGES = 128, 64, 192, 2
REGISTERS = ", ".join(f"%r{100 + i}" for i in range(64))
STORES = "\n".join(
    f"st.shared.v4.b32 [%r41+{16 * i}], "
    f"{{%r{100 + 4 * i}, %r{101 + 4 * i}, %r{102 + 4 * i}, %r{103 + 4 * i}}};"
    for i in range(16)
)
MMAS = "\n".join(
    f"""add.s64 %d20, %d10, {2 * i}; add.s64 %d21, %d11, {2 * i};
    tcgen05.mma.cta_group::1.kind::f16 [%r24], %d20, %d21, %r25, %p6; setp.eq.u32 %p6, %r0, %r0;"""
    for i in range(4)
)
GEMM = f""".version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 pa[128], .param .align 64 .b8 pb[128],
                  .param .align 64 .b8 pc[128])
.reqntid 128, 1, 1
{{
.reg .pred %p<10>; .reg .b32 %r<200>; .reg .b64 %d<30>;
mov.b64 %d0, pa; cvta.param.u64 %d0, %d0;
mov.b64 %d1, pb; cvta.param.u64 %d1, %d1;
mov.b64 %d2, pc; cvta.param.u64 %d2, %d2;
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5;
mov.u32 %r2, smem; add.u32 %r3, %r2, 49152;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mov.u32 %r5, 64;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+40], %r5;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
elect.sync %r4|%p2, -1;
@%p2 mbarrier.init.shared.b64 [%r3], 1;
@%p2 mbarrier.init.shared.b64 [%r3+8], 1;
@%p2 mbarrier.init.shared.b64 [%r3+16], 1;
@%p2 mbarrier.init.shared.b64 [%r3+24], 1;
@%p2 mbarrier.init.shared.b64 [%r3+32], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
setp.eq.u32 %p3, %r1, 1;
@%p3 bra MULTIPLY;
@%p1 bra FINISH;

elect.sync %r4|%p2, -1;
@!%p2 bra LOADED;
mov.u32 %r10, 0; mov.u32 %r17, 0;
LOAD:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; xor.b32 %r12, %r12, 1; and.b32 %r12, %r12, 1;
shl.b32 %r13, %r11, 3; add.u32 %r14, %r3, %r13;
FREE:
mbarrier.try_wait.parity.shared.b64 %p4, [%r14+16], %r12;
@!%p4 bra FREE;
mbarrier.arrive.expect_tx.shared.b64 _, [%r14], 24576;
mul.lo.u32 %r15, %r11, 24576; add.u32 %r15, %r15, %r2; shl.b32 %r16, %r10, 6;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r15], [%d0, {{%r16, %r17}}], [%r14];
add.u32 %r18, %r15, 16384;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r18], [%d1, {{%r16, %r17}}], [%r14];
add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, {K // 64};
@%p5 bra LOAD;
LOADED:
bar.warp.sync -1;
bra FINISH;

MULTIPLY:
ld.shared.u32 %r24, [%r3+40];
elect.sync %r4|%p2, -1;
@!%p2 bra MULTIPLIED;
mov.u32 %r10, 0; mov.u32 %r25, {1 << 4 | 1 << 7 | 1 << 10 | COLUMNS // 8 << 17 | ROWS // 16 << 24};
setp.ne.u32 %p6, %r0, %r0;
STEP:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
shl.b32 %r13, %r11, 3; add.u32 %r14, %r3, %r13;
FULL:
mbarrier.try_wait.parity.shared.b64 %p4, [%r14], %r12;
@!%p4 bra FULL;
mul.lo.u32 %r15, %r11, 24576; add.u32 %r15, %r15, %r2; shr.u32 %r15, %r15, 4;
cvt.u64.u32 %d10, %r15; add.s64 %d10, %d10, {0x4000404000010000};
add.s64 %d11, %d10, 1024;
{MMAS}
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r14+16];
add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, {K // 64};
@%p5 bra STEP;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3+32];
MULTIPLIED:
bar.warp.sync -1;

FINISH:
mov.u32 %r12, 0;
DONE:
mbarrier.try_wait.parity.shared.b64 %p4, [%r3+32], %r12;
@!%p4 bra DONE;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r30, [%r3+40];
shl.b32 %r31, %r1, 21; add.u32 %r31, %r31, %r30;
tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{REGISTERS}}}, [%r31];
tcgen05.wait::ld.sync.aligned;
shl.b32 %r40, %r0, 8; add.u32 %r41, %r40, %r2;
{STORES}
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync;
bar.sync 0;
@%p1 bra END;
elect.sync %r4|%p2, -1;
mov.u32 %r17, 0;
@%p2 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {{%r17, %r17}}], [%r2];
@%p2 cp.async.bulk.commit_group;
@%p2 cp.async.bulk.wait_group.read 0;
bar.warp.sync -1;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, %r5;
END:
ret;
}}
"""
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
MEMORIES = {"SharedMemory", "CellShadow", "GlobalShadow", "TensorMemory"}
LATE = {"async_delay": emulator.LATE}
# Name: what is replaced, by what, the kinds of report, and options of the run.
FAULTS = {
    "missing commit of the result": (f"{COMMIT} [%r3+32];", "", "deadlock", {}),
    "missing commit of a stage": (f"{COMMIT} [%r14+16];", "", "deadlock", {}),
    "missing wait for a full stage": (
        "@!%p4 bra FULL;",
        "",
        "race|uninitialised read|phase lag",
        {},
    ),
    "missing wait for data that comes late": (
        "@!%p4 bra FULL;",
        "",
        "uninitialised read|race|unfinished work",
        LATE,
    ),
    "missing wait for a free stage": ("@!%p4 bra FREE;", "", "race", {}),
    "missing wait for the result": ("@!%p4 bra DONE;", "", "race|uninitialised read", {}),
    "too many bytes expected": ("[%r14], 24576", "[%r14], 24592", "transaction bytes", {}),
    "too few bytes expected": (
        "[%r14], 24576",
        "[%r14], 16384",
        "transaction bytes|uninitialised read|race",
        {},
    ),
    "swapped phase": (
        "and.b32 %r12, %r12, 1;\nshl.b32 %r13, %r11, 3; add.u32 %r14, %r3, %r13;\nFULL:",
        "xor.b32 %r12, %r12, 1; and.b32 %r12, %r12, 1;\n"
        "shl.b32 %r13, %r11, 3; add.u32 %r14, %r3, %r13;\nFULL:",
        "race|deadlock|uninitialised read",
        {},
    ),
    "overlapping stages": ("%r11, 24576", "%r11, 16384", "race", {}),
    "missing proxy fence": ("fence.proxy.async.shared::cta;", "", "proxy fence", {}),
    "wrong quadrant": ("shl.b32 %r31, %r1, 21", "mov.u32 %r31, 0", "tensor memory", {}),
    "tensor memory leak": (
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, %r5;",
        "",
        "tensor memory",
        {},
    ),
    "double free": (
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, %r5;",
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, %r5;" * 2,
        "tensor memory",
        {},
    ),
    "box past shared memory": (
        "add.u32 %r18, %r15, 16384",
        "add.u32 %r18, %r15, 49152",
        "out of bounds",
        {},
    ),
    "box at an odd place": (
        "add.u32 %r18, %r15, 16384",
        "add.u32 %r18, %r15, 16448",
        "alignment",
        {},
    ),
    "unwritten output": (
        "@%p2 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group "
        "[%d2, {%r17, %r17}], [%r2];",
        "",
        "unwritten output",
        {},
    ),
    "store in flight at the end": (
        "@%p2 cp.async.bulk.wait_group.read 0;",
        "",
        "unfinished work",
        LATE,
    ),
    "missing fence after the wait": (
        "tcgen05.fence::after_thread_sync;",
        "",
        "tensor memory fence",
        {},
    ),
    "missing wait of the load": ("tcgen05.wait::ld.sync.aligned;", "", "unwaited load", {}),
    "barrier without init": ("@%p2 mbarrier.init.shared.b64 [%r3+32], 1;", "", "barrier", {}),
    "barrier initialised twice": (
        "@%p2 mbarrier.init.shared.b64 [%r3+32], 1;",
        "mbarrier.init.shared.b64 [%r3+32], 1;",
        "barrier",
        {},
    ),
    "one arrival too many": (
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r14], 24576;",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r14], 24576;"
        "mbarrier.arrive.shared.b64 _, [%r14];",
        "barrier",
        {},
    ),
    "aligned instruction in a branch": (
        "@!%p2 bra LOADED;",
        "@!%p2 bra LOADED; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "divergence",
        {},
    ),
    "wrong matrix descriptor": (
        str(0x4000404000010000),
        str(0x4000004000010000),
        "descriptor",
        {},
    ),
    "another allocation than the one in use": (
        "mov.u32 %r5, 64",
        "mov.u32 %r5, 32",
        "tensor memory",
        {},
    ),
}


def run_gemm(text: str, *, dims: tuple[int, int] = (K, ROWS), **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(ROWS, K, generator=generator).bfloat16()
    b = torch.randn(COLUMNS, K, generator=generator).bfloat16()
    c = torch.full((ROWS, COLUMNS), float("nan"))
    maps = [
        TensorMap(a.data_ptr(), "bf16", dims, (2 * K,), (64, ROWS), 128),
        TensorMap(b.data_ptr(), "bf16", (K, COLUMNS), (2 * K,), (64, COLUMNS), 128),
        TensorMap(c.data_ptr(), "f32", (COLUMNS, ROWS), (4 * COLUMNS,), (COLUMNS, ROWS), 0),
    ]
    emulator.launch(
        text,
        "k",
        1,
        128,
        49152 + 64,
        maps,
        tensors=[a, b, c],
        outputs=[c],
        **{"races": True, "profile": "strict", **options},
    )
    assert torch.allclose(c.double(), a.double() @ b.double().T, rtol=1e-6, atol=1e-5)
    return c


def test_the_text_is_ptx():
    assemble(GEMM, "sm_100a")


@pytest.mark.parametrize("schedule", emulator.SCHEDULES[:6] + emulator.SCHEDULES[-2:], ids=str)
@pytest.mark.parametrize("group", [1, 4])
def test_without_a_fault_there_is_no_report(schedule, group):
    run_gemm(GEMM, group=group, **schedule)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_report(name):
    old, new, kinds, options = FAULTS[name]
    text = GEMM.replace(old, new)
    assert text != GEMM, "the fault changes nothing"
    with pytest.raises(emulator.EmulatorError) as raised:
        run_gemm(text, **options)
    print(raised.value)
    assert raised.value.kind in kinds.split("|"), raised.value
    if raised.value.kind not in ("unwritten output", "tensor memory", "transaction bytes"):
        assert raised.value.where.line > 10


def test_a_map_larger_than_its_tensor():
    with pytest.raises(emulator.EmulatorError, match="out of bounds: TMA box"):
        run_gemm(GEMM.replace("{%r16, %r17}], [%r14]", "{%r16, %r10}], [%r14]", 1), dims=(K, 500))


def test_a_missing_fence_is_no_fault_in_practice():
    run_gemm(GEMM.replace("tcgen05.fence::after_thread_sync;", ""), profile="practice")


def test_truncated_sums_differ_but_little():
    exact, truncated = run_gemm(GEMM), run_gemm(GEMM, truncate=True)
    assert not torch.equal(exact, truncated)


def test_a_deadlock_names_what_each_warp_awaits():
    text = GEMM.replace(f"{COMMIT} [%r3+32];", "")
    with pytest.raises(emulator.EmulatorError) as raised:
        run_gemm(text)
    report = str(raised.value)
    for part in ("warp 0", "warp 3", "phase 0 (parity 0)", "1 of 1 arrivals pending, tx 0"):
        assert part in report


def expect(kind: str, text: str, values: list, **options) -> None:
    with pytest.raises(emulator.EmulatorError) as raised:
        launch(text, values, races=True, **options)
    assert raised.value.kind == kind, raised.value


def test_a_report_names_the_source_line():
    text = kernel("st.global.u32 [%d0+4], %r0;", 1).replace("st.g", ".loc 1 42 7\nst.g")
    text += '.file 1 "/somewhere/kernel.py"\n'
    assemble(text, "sm_100a")
    with pytest.raises(emulator.EmulatorError, match=r"st\.global.* \(kernel\.py:42\)"):
        launch(text, [torch.zeros(1, dtype=torch.int32)])


def test_global_faults():
    out = torch.zeros(32, dtype=torch.int32)
    at = "mul.wide.u32 %d5, %r0, 4; add.s64 %d5, %d5, %d0;"
    expect("out of bounds", kernel(at + "st.global.u32 [%d5+4], %r0;", 1), [out])
    expect("alignment", kernel(at + "st.global.u32 [%d5+2], %r0;", 1), [out])
    expect("out of bounds", kernel("mov.u64 %d5, 64; ld.global.u32 %r1, [%d5];", 1), [out])
    text = kernel("st.global.u32 [%d0], %r0;", 1)
    expect("race", text, [out], block=64)
    launch(text, [out])  # lanes of one warp are not told apart


def test_shared_faults():
    at = "mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1;"
    expect("uninitialised read", kernel(at + "ld.shared.u32 %r3, [%r2];", 0), [])
    expect("out of bounds", kernel(at + "st.shared.u32 [%r2+4096], %r0;", 0), [])
    expect("out of bounds", kernel(at + "st.shared.u32 [%r2+-256], %r0;", 0), [])
    store = "st.shared.u32 [%r2], %r0;"
    swap = (
        at
        + store
        + " bar.sync 0; "
        + store
        + " {} xor.b32 %r2, %r2, 128; ld.shared.u32 %r3, [%r2];"
    )
    expect("race", kernel(swap.format(""), 0), [], block=64)
    launch(kernel(swap.format("bar.sync 0;"), 0), [], block=64, races=True)


def test_atomics_do_not_race_and_fences_publish():
    count, data = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = """setp.ne.u32 %p1, %r0, 0; @%p1 bra OTHER;
    st.global.u32 [%d1], 5; {release} atom.global.add.u32 %r5, [%d0], 1; bra END;
    OTHER: setp.ne.u32 %p2, %r0, 32; @%p2 bra END;
    SPIN: ld.volatile.global.u32 %r6, [%d0]; setp.eq.u32 %p3, %r6, 0; @%p3 bra SPIN;
    {acquire} ld.global.u32 %r7, [%d1];
    END: """
    fence = "membar.gl;"
    for release, acquire in ((fence, fence), (fence, ""), ("", fence)):
        count.zero_()
        text = kernel(body.format(release=release, acquire=acquire), 2)
        if release and acquire:
            launch(text, [count, data], block=64, races=True)
        else:
            expect("race", text, [count, data], block=64)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="maps memory below 4 GiB as x86-64 can")
def test_an_atomic_in_global_memory_orders_ctas_wherever_it_lies():
    """A heap below 4 GiB was once taken for shared memory: each CTA had an atomic of its own."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    reads_writes, private_anonymous_32bit = 0x3, 0x62
    low = libc.mmap(None, 4096, reads_writes, private_anonymous_32bit, -1, 0)
    assert 0 < low < 1 << 32
    memory = torch.frombuffer((ctypes.c_int32 * 2).from_address(low), dtype=torch.int32)
    body = """mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra OTHER;
    st.global.u32 [%d0+4], 5; membar.gl; atom.global.add.u32 %r5, [%d0], 1; bra END;
    OTHER: ld.volatile.global.u32 %r6, [%d0]; setp.eq.u32 %p3, %r6, 0; @%p3 bra OTHER;
    membar.gl; ld.global.u32 %r7, [%d0+4];
    END: """
    for text in (kernel(body, 1), kernel(body.replace(".global", ""), 1)):
        memory.zero_()
        emulator.launch(text, "k", 2, 32, 0, [memory], tensors=[memory], races=True)
        assert memory.tolist() == [32, 5]


def test_a_pair_of_ctas_allocates_tensor_memory_together():
    """FlashAttention-4's MMAs for a pair of CTAs once came before the second one's allocation."""
    allocate = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], %r2;"
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    body = f"""mov.u32 %r1, smem; mov.u32 %r2, 32; mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r3, 0;
    @%p1 bra ODD; {{first}} {{second}} bra FREE; ODD: {meet} {allocate}
    FREE: ld.shared.u32 %r4, [%r1]; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r4, %r2;"""
    together = kernel(body.format(first=meet, second=allocate), 0)
    late = kernel(body.format(first=allocate, second=meet), 0)
    emulator.launch(together, "k", 2, 32, 0, [], cluster=(2, 1, 1))
    with pytest.raises(emulator.EmulatorError, match=r"the peer's tcgen05\.alloc") as error:
        emulator.launch(late, "k", 2, 32, 0, [], cluster=(2, 1, 1))
    assert error.value.kind == "deadlock"


def test_a_launch_keeps_no_memory():
    """The memories of a launch once lived until the collector's next full run: 15 GB of them."""
    text = kernel("mov.u32 %r1, smem; st.shared.u32 [%r1], %r0;", 0)
    gc.collect()
    known = {id(x) for x in gc.get_objects()}
    launch(text, [], races=True)
    with pytest.raises(emulator.EmulatorError):
        launch(text.replace("[%r1]", "[%r1+8192]"), [], races=True)
    kept = [x for x in gc.get_objects() if type(x).__name__ in MEMORIES and id(x) not in known]
    assert kept == []


LAG = """mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; @!%p1 mbarrier.init.shared.b64 [%r1], 1;
    bar.sync 0; setp.lt.u32 %p2, %r0, 32; @%p2 bra WAIT;
    setp.eq.u32 %p3, %r0, 32; @%p3 mbarrier.arrive.shared.b64 _, [%r1];
    bar.sync 1, 64; @%p3 mbarrier.arrive.shared.b64 _, [%r1];
    @%p3 mbarrier.arrive.shared.b64 _, [%r1]; {known}
    {more} bra END;
    WAIT: mov.u32 %r5, 0; FIRST: mbarrier.try_wait.parity.shared.b64 %p4, [%r1], %r5;
    @!%p4 bra FIRST; bar.sync 1, 64; {known} mov.u32 %r5, 1;
    LAST: mbarrier.try_wait.parity.shared.b64 %p4, [%r1], %r5; @!%p4 bra LAST;
    END:"""


def test_a_waiter_two_phases_behind():
    expect("phase lag", kernel(LAG.format(known="", more=""), 0), [], block=64, starve=1)


def test_a_waiter_that_skips_phases_it_knows_of():
    """The softmax warps of MSA's partial attention do so; it once was reported as a lag."""
    more = "@%p3 mbarrier.arrive.shared.b64 _, [%r1];"
    text = kernel(LAG.format(known="bar.sync 2, 64;", more=more), 0)
    for starve in (0, 1, 2):
        launch(text, [], block=64, races=True, starve=starve)


def test_register_counts():
    body = "setmaxnreg.inc.sync.aligned.u32 {};"
    launch(kernel(body.format(248), 0), [], block=256)
    expect("registers", kernel(body.format(256), 0), [], block=288)


def test_too_many_blocks_are_endless():
    text = kernel("L: bra L;", 0)
    expect("endless", text, [], max_blocks=1000)


def test_barrier_misuse():
    expect(
        "barrier",
        kernel("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64; @!%p1 bar.sync 1, 96;", 0),
        [],
        block=64,
    )
    expect("deadlock", kernel("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 96;", 0), [], block=64)
