"""Pieces of SM90 kernels against plain loops: wgmma, matrices, st.async, barriers, queues."""

from __future__ import annotations

import itertools

import emulator
import numpy as np
import pytest
import torch
from emulator.peers import TensorMap
from micro import assemble, kernel, launch

COLUMNS, STEP = 32, 16


def raises(kinds: str, text: str, values: list, **options) -> None:
    with pytest.raises(emulator.EmulatorError) as raised:
        launch(text, values, races=True, **options)
    assert raised.value.kind in kinds.split("|"), raised.value


# ---- wgmma: where a descriptor says that elements lie


def strides(width: int, *, mn_major: bool) -> tuple[int, int]:
    """Return leading and stride byte offsets of a dense tile of 16 along K."""
    if width == 0:
        return 128, 256
    return (16 * width if mn_major else 0), 8 * width


def byte_of(mn: int, k: int, width: int, *, mn_major: bool) -> int:
    """Return where an element lies, from the canonical layouts of the PTX ISA."""
    leading, stride = strides(width, mn_major=mn_major)
    if width == 0:  # 8 x 8 matrices of 128 bytes, each row (or column) 16 bytes
        inner, outer = (mn, k) if mn_major else (k, mn)
        within = inner % 8 * 2 + outer % 8 * 16
        return within + mn // 8 * stride + k // 8 * leading
    if mn_major:
        inside, chunk = mn % (width // 2), mn // (width // 2)
        linear = inside * 2 + chunk * leading + k % 8 * width + k // 8 * stride
    else:
        linear = k * 2 + mn % 8 * width + mn // 8 * stride
    unit = linear >> 4 & 7
    line = linear >> 7 & (width // 16 - 1)
    return linear & ~0x70 | (unit ^ line) << 4


WGMMA = """ld.param.u64 %d0, [p0]; mul.wide.u32 %d5, %r0, 16; add.s64 %d5, %d5, %d0;
mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r1; mov.u32 %r3, 0;
COPY: ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d5];
st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
add.s64 %d5, %d5, 2048; add.u32 %r2, %r2, 2048; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 8;
@%p1 bra COPY; fence.proxy.async.shared::cta; bar.sync 0;
shr.u32 %r2, %r1, 4; cvt.u64.u32 %d5, %r2; add.s64 %d6, %d5, %d1;
add.s64 %d7, %d5, 512; add.s64 %d7, %d7, %d2;
{zero}
setp.ne.u64 %p2, %d4, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n32k16.f32.{kind}.{kind} {result}, %d6, %d7, %p2, {flags};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
shr.u32 %r2, %r0, 5; shl.b32 %r2, %r2, 4; and.b32 %r3, %r0, 31; shr.u32 %r4, %r3, 2;
add.u32 %r2, %r2, %r4; shl.b32 %r2, %r2, 7; and.b32 %r3, %r3, 3; shl.b32 %r3, %r3, 3;
add.u32 %r2, %r2, %r3; cvt.u64.u32 %d5, %r2; add.s64 %d5, %d5, %d3;
{store}"""


@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("majors", list(itertools.product((False, True), repeat=2)))
def test_wgmma(width, majors):
    kind = "bf16" if majors[0] else "f16"
    dtype = torch.bfloat16 if majors[0] else torch.float16
    signs, adds = (1, -1) if majors[1] else (1, 1), majors == (True, False)
    generator = torch.Generator().manual_seed(width)
    a, b = (torch.randn(n, STEP, generator=generator).to(dtype) for n in (64, COLUMNS))
    image = torch.zeros(8192, dtype=dtype)
    descriptors = []
    for place, (matrix, mn_major) in enumerate(zip((a, b), majors, strict=True)):
        for mn, k in itertools.product(range(len(matrix)), range(STEP)):
            at = 4096 * place + byte_of(mn, k, width, mn_major=mn_major) // 2
            image[at] = matrix[mn, k]
        leading, stride = strides(width, mn_major=mn_major)
        code = {0: 0, 128: 1, 64: 2, 32: 3}[width]
        descriptors.append(leading >> 4 << 16 | stride >> 4 << 32 | code << 62)
    store = "\n".join(
        f"st.global.u32 [%d5+{8 * (r >> 2) * 4 + (r >> 1 & 1) * 8 * COLUMNS * 4 + (r & 1) * 4}], "
        f"%r{100 + r};"
        for r in range(COLUMNS // 2)
    )
    body = WGMMA.format(
        kind=kind,
        zero="\n".join(f"mov.b32 %r{100 + r}, 0f3F800000;" for r in range(COLUMNS // 2)),
        result="{" + ", ".join(f"%r{100 + r}" for r in range(COLUMNS // 2)) + "}",
        flags=", ".join(map(str, (*signs, *(int(m) for m in majors)))),
        store=store,
    )
    text = kernel(body, 5, target="sm_90a", shared=16384)
    out = torch.zeros(64, COLUMNS)
    signed = [d - (1 << 64) if d >> 63 else d for d in descriptors]
    launch(text, [image, *signed, out, int(adds)], block=128, races=True, outputs=[out])
    exact = signs[0] * signs[1] * (a.double() @ b.double().T) + adds
    assert torch.allclose(out.double(), exact, rtol=1e-6, atol=1e-6)


# ---- ldmatrix and stmatrix


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices(count, stores, transposed):
    """Row j of matrix i lies at unit 37 (8 i + j) % 32 of 16 bytes."""
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    form = f".sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    near, far = (f"add.s64 %d5, %d{i}, %d4;" for i in (0, 1))
    words = range(count)
    fill = near + "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d5]; st.shared.v4.u32 [%r2], "
    head = "mov.u32 %r1, smem; shl.b32 %r3, %r0, 4; add.u32 %r2, %r1, %r3; cvt.u64.u32 %d4, %r3;"
    row = (
        "mul.lo.u32 %r8, %r0, 37; and.b32 %r8, %r8, 31; shl.b32 %r8, %r8, 4; add.u32 %r8, %r8, %r1;"
    )
    if stores:
        body = near + "".join(f"ld.global.u32 %r{10 + i}, [%d5+{4 * i}];" for i in words)
        body = head + row + "mov.u32 %r9, 0; st.shared.v4.u32 [%r2], {%r9, %r9, %r9, %r9};"
        body += "bar.warp.sync -1;" + near
        body += "".join(f"ld.global.u32 %r{10 + i}, [%d5+{4 * i}];" for i in words)
        body += f"stmatrix{form} [%r8], {{{registers}}}; bar.warp.sync -1;"
        body += "ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r2];" + far
        body += "st.global.v4.u32 [%d5], {%r4, %r5, %r6, %r7};"
    else:
        body = head + row + fill + "{%r4, %r5, %r6, %r7}; bar.warp.sync -1;"
        body += f"ldmatrix{form} {{{registers}}}, [%r8];" + far
        body += "".join(f"st.global.u32 [%d5+{4 * i}], %r{10 + i};" for i in words)
    given = torch.randint(-(2**15), 2**15, (256,), dtype=torch.int16)
    out = torch.zeros(256, dtype=torch.int16)
    launch(kernel(body, 2, target="sm_90a"), [given, out], races=True)
    want = np.zeros(256, np.int16)
    for i, t, half in itertools.product(range(count), range(32), range(2)):
        line, column = t // 4, 2 * (t % 4) + half
        if transposed:
            line, column = column, line
        in_memory = 37 * (8 * i + line) % 32 * 8 + column
        in_registers = 8 * t + 2 * i + half
        if stores:
            want[in_memory] = given[in_registers]
        else:
            want[in_registers] = given[in_memory]
    assert out.tolist() == want.tolist()


# ---- st.async

REMOTE = """mov.u32 %r1, smem; add.u32 %r2, %r1, 1024; mov.u32 %r3, %cluster_ctarank;
setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r2], 1;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {expected};
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r1, %r4;
mapa.shared::cluster.u32 %r6, %r2, {to};
shl.b32 %r7, %r0, 3; add.u32 %r5, %r5, %r7; mad.lo.u32 %r8, %r3, 100, %r0; add.u32 %r9, %r8, 1000;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r5], {{%r8, %r9}}, [%r6];
mov.u32 %r10, 0;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], %r10; {wait}
add.u32 %r11, %r1, %r7; ld.shared.v2.u32 {{%r12, %r13}}, [%r11];
mad.lo.u32 %r14, %r3, 256, %r7; cvt.u64.u32 %d5, %r14; add.s64 %d5, %d5, %d0;
st.global.v2.u32 [%d5], {{%r12, %r13}};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


def test_st_async():
    parts = {"expected": 256, "to": "%r4", "wait": "@!%p2 bra WAIT;"}
    out = torch.zeros(2, 32, 2, dtype=torch.int32)
    options = {"cluster": (2, 1, 1), "tensors": [out], "races": True}

    def run(**changes) -> None:
        text = kernel(REMOTE.format(**{**parts, **changes}), 1, target="sm_90a")
        for schedule in ({}, {"seed": 1, "async_delay": 5}, {"seed": 2, **LATE}):
            out.zero_()
            emulator.launch(text, "k", 2, 32, 0, [out], **options, **schedule)
            other = torch.tensor([100, 0])[:, None] + torch.arange(32)
            assert torch.equal(out, torch.stack([other, other + 1000], -1).int())

    run()
    for change, kinds in (
        ({"wait": ""}, "race|uninitialised read"),
        ({"expected": 248}, "transaction bytes|race|deadlock"),
        ({"expected": 264}, "transaction bytes|deadlock"),
        ({"to": "%r3"}, "barrier"),
    ):
        with pytest.raises(emulator.EmulatorError) as raised:
            run(**change)
        assert raised.value.kind in kinds.split("|"), raised.value


LATE = {"async_delay": emulator.LATE}

# ---- named barriers: one warp fills a buffer, another empties it, three times

HANDOVER = """mov.u32 %r1, smem; and.b32 %r2, %r0, 31; shl.b32 %r2, %r2, 2; add.u32 %r1, %r1, %r2;
mov.u32 %r3, 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra EMPTY;
FILL: {room} st.shared.u32 [%r1], %r3; {full}
add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 3; @%p2 bra FILL; bra END;
EMPTY: {free} mov.u32 %r5, 0;
NEXT: {await} ld.shared.u32 %r4, [%r1]; mad.lo.u32 %r5, %r5, 10, %r4; {again}
add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 3; @%p2 bra NEXT;
cvt.u64.u32 %d5, %r2; add.s64 %d5, %d5, %d0; st.global.u32 [%d5], %r5;
END:"""
PARTS = {
    "room": "barrier.cta.sync.aligned 2, 64;",
    "full": "bar.arrive 1, 64;",
    "free": "barrier.cta.arrive.aligned 2, 64;",
    "await": "bar.sync 1, 64;",
    "again": "setp.lt.u32 %p3, %r3, 2; @%p3 bar.arrive 2, 64;",
}


def test_named_barriers():
    out = torch.zeros(32, dtype=torch.int32)
    for schedule in ({}, {"seed": 1, "slice": 2}, {"starve": 1}, {"starve": 2}, {"group": 2}):
        out.zero_()
        text = kernel(HANDOVER.format(**PARTS), 1, target="sm_90a")
        launch(text, [out], block=64, races=True, **schedule)
        assert out.tolist() == [12] * 32
    for part, kinds in (
        ("room", "race|deadlock"),
        ("await", "race|uninitialised read"),
        ("full", "deadlock"),
        ("free", "deadlock"),
    ):
        text = kernel(HANDOVER.format(**{**PARTS, part: ""}), 1, target="sm_90a")
        raises(kinds, text, [out], block=64)


def test_a_waiter_learns_nothing_from_the_next_phase():
    """Warp 1 waits for phase 0 after warp 0 has arrived for phase 1, which is not complete."""
    body = """mov.u32 %r1, smem; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 2;
    bar.sync 0; setp.eq.u32 %p1, %r0, 32; setp.ge.u32 %p2, %r0, 32; setp.eq.u32 %p3, %r0, 0;
    @%p2 bra OTHER; {before}
    @%p3 mbarrier.arrive.shared.b64 _, [%r1]; {after}
    @%p3 mbarrier.arrive.shared.b64 _, [%r1]; bar.warp.sync -1; bra END;
    OTHER: @%p1 mbarrier.arrive.shared.b64 _, [%r1]; bar.warp.sync -1; mov.u32 %r2, 0;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r1], %r2; @!%p4 bra WAIT;
    ld.shared.u32 %r3, [%r1+64]; END:"""
    write = "st.shared.u32 [%r1+64], %r0; bar.warp.sync -1;"
    launch(kernel(body.format(before=write, after=""), 0), [], block=64, races=True)
    late = kernel(body.format(before="", after=write), 0)
    raises("race", late, [], block=64)


# ---- a queue of tiles in global memory, as a persistent kernel takes them

QUEUE = """mov.u32 %r1, smem; setp.eq.u32 %p1, %r0, 0;
TAKE: @%p1 atom.global.add.u32 %r2, [%d0], 1; @%p1 st.shared.u32 [%r1], %r2; bar.sync 0;
ld.shared.u32 %r3, [%r1]; {second} setp.ge.u32 %p2, %r3, 7; @%p2 bra END;
mad.lo.u32 %r4, %r3, 64, %r0; mul.wide.u32 %d5, %r4, 4; add.s64 %d5, %d5, %d1;
mov.u32 %r6, %ctaid.x; add.u32 %r6, %r6, 1; st.global.u32 [%d5], %r6; bra TAKE;
END:"""


def test_a_queue_gives_each_tile_to_one_cta():
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(7, 64, dtype=torch.int32)
    text = kernel(QUEUE.format(second="bar.sync 0;"), 2, target="sm_90a")
    takers = set()
    for seed in range(4):
        count.zero_()
        emulator.launch(
            text,
            "k",
            3,
            64,
            0,
            [count, out.zero_()],
            tensors=[count, out],
            outputs=[out],
            races=True,
            seed=seed,
            slice=4,
        )
        assert count.item() == 10
        assert (out == out[:, :1]).all()
        takers.add(tuple(out[:, 0].tolist()))
    assert len(takers) > 1, "the schedules give the tiles to the same CTAs"
    raises(
        "race", kernel(QUEUE.format(second=""), 2, target="sm_90a"), [count.zero_(), out], block=64
    )


# ---- TMA stores: shared memory may change once a group has been read

BULK = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .align 64 .b8 pm[128])
{{
.reg .pred %p<10>; .reg .b32 %r<60>; .reg .b64 %d<20>;
.shared .align 128 .b8 smem[2048];
mov.b64 %d0, pm; cvta.param.u64 %d0, %d0;
mov.u32 %r0, %tid.x; mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; setp.eq.u32 %p1, %r0, 0;
mov.u32 %r3, 0; mov.u32 %r9, 0;
NEXT: and.b32 %r4, %r3, 1; shl.b32 %r4, %r4, 10; add.u32 %r5, %r4, %r1; add.u32 %r6, %r5, %r2;
mad.lo.u32 %r7, %r3, 100, %r0; st.shared.u32 [%r6], %r7;
fence.proxy.async.shared::cta; bar.warp.sync -1;
@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d0, {{%r9, %r3}}], [%r5];
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read {left}; bar.warp.sync -1;
add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 5; @%p2 bra NEXT;
@%p1 cp.async.bulk.wait_group 0;
ret;
}}
"""


def test_bulk_groups():
    out = torch.zeros(5, 32, dtype=torch.int32)
    target = TensorMap(out.data_ptr(), "s32", (32, 5), (128,), (32, 1), 0)

    def run(left: int, **options) -> None:
        text = BULK.format(left=left)
        assemble(text, "sm_90a")
        emulator.launch(text, "k", 1, 32, 0, [target], tensors=[out.zero_()], races=True, **options)
        want = torch.arange(5, dtype=torch.int32)[:, None] * 100 + torch.arange(32)
        assert torch.equal(out, want)

    for left, schedule in itertools.product((0, 1), ({}, {"seed": 1, "async_delay": 3}, LATE)):
        run(left, **schedule)
    for schedule in ({}, LATE):
        with pytest.raises(emulator.EmulatorError, match="race"):
            run(2, **schedule)
