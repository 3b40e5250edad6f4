"""A small SM90 GEMM in PTX with what such kernels have, and its launch on the emulator.

Warp 0 copies tiles of A and B by TMA into two stages; warps 4-7 multiply them by wgmma, keep one
group in flight, and store the result through stmatrix, swizzled shared memory and TMA.
"""

from __future__ import annotations

from typing import NamedTuple

import emulator
import torch
from emulator.peers import TensorMap

ROWS, K, STAGES = 64, 256, 2
STEP = 64  # K of a stage
A_BYTES = ROWS * STEP * 2
_SWIZZLE_128 = 1 << 62
_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


class Shape(NamedTuple):
    """Columns, element type, whether B is contiguous along N, and whether A is in registers."""

    columns: int = 64
    kind: str = "bf16"
    n_major: bool = False
    registers: bool = False


def _descriptor(stride: int, leading: int = 0) -> int:
    return _SWIZZLE_128 | (stride >> 4) << 32 | (leading >> 4) << 16


def _vector(letter: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{first + i}" for i in range(count)) + "}"


def _load_fragments(first: int) -> list[str]:
    """Load a stage of A into 16 registers: four matrices for each step along K."""
    return [
        f"add.u32 %r40, %r33, {2 * k}; xor.b32 %r40, %r40, %r34; shl.b32 %r40, %r40, 4;\n"
        "add.u32 %r40, %r40, %r15; add.u32 %r40, %r40, %r32;\n"
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_vector('r', first + 4 * k, 4)}, [%r40];"
        for k in range(STEP // 16)
    ]


def _multiply(shape: Shape, step: int) -> str:
    """Multiply stage `step`; the address of its A is in %r15, of its B in %r16."""
    stride_b, leading_b = 1024, 8192 if shape.n_major else 0
    fragments = 100 + 16 * (step % 2)
    lines = _load_fragments(fragments) if shape.registers else []
    lines.append(
        "shr.u32 %r17, %r15, 4; cvt.u64.u32 %d10, %r17; "
        f"or.b64 %d10, %d10, {_descriptor(1024)};\n"
        "shr.u32 %r17, %r16, 4; cvt.u64.u32 %d11, %r17; "
        f"or.b64 %d11, %d11, {_descriptor(stride_b, leading_b)};\n"
        "wgmma.fence.sync.aligned;"
    )
    along_k = 16 * 128 if shape.n_major else 32
    for k in range(STEP // 16):
        a = _vector("r", fragments + 4 * k, 4) if shape.registers else "%d12"
        flags = (
            f"1, 1, {int(shape.n_major)}" if shape.registers else f"1, 1, 0, {int(shape.n_major)}"
        )
        lines.append(
            f"add.s64 %d12, %d10, {2 * k}; add.s64 %d13, %d11, {along_k // 16 * k};\n"
            f"setp.ne.u32 %p5, {step + k}, 0;\n"
            f"wgmma.mma_async.sync.aligned.m64n{shape.columns}k16.f32.{shape.kind}.{shape.kind} "
            f"{_vector('f', 0, shape.columns // 2)}, {a}, %d13, %p5, {flags};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    return "\n".join(lines)


def _consume(shape: Shape, stage_bytes: int) -> str:
    lines = []
    for step in range(K // STEP):
        stage = step % STAGES
        lines.append(
            f"mov.u32 %r12, {step // STAGES & 1};\n"
            f"FULL{step}: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3+{8 * stage}], %r12;\n"
            f"@!%p4 bra FULL{step};\n"
            f"add.u32 %r15, %r2, {stage * stage_bytes}; add.u32 %r16, %r15, {A_BYTES};\n"
            + _multiply(shape, step)
        )
        if step:
            lines.append(
                "wgmma.wait_group.sync.aligned 1;\n"
                f"@%p7 mbarrier.arrive.shared::cta.b64 _, [%r3+{16 + 8 * (1 - stage)}];"
            )
    return "\n".join(lines)


def _epilogue(shape: Shape) -> str:
    convert = [
        f"cvt.rn.{shape.kind}x2.f32 %r{100 + pair}, %f{2 * pair + 1}, %f{2 * pair};"
        for pair in range(shape.columns // 4)
    ]
    keep = [  # 16 columns each
        f"add.u32 %r40, %r33, {block % 8}; xor.b32 %r40, %r40, %r34; shl.b32 %r40, %r40, 4;\n"
        f"add.u32 %r40, %r40, %r31; add.u32 %r40, %r40, {block // 8 * 8192};\n"
        "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 "
        f"[%r40], {_vector('r', 100 + 2 * block, 4)};"
        for block in range(0, shape.columns // 8, 2)
    ]
    store = [
        f"mov.u32 %r17, {64 * chunk}; mov.u32 %r18, 0; add.u32 %r19, %r30, {8192 * chunk};\n"
        "@%p2 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group "
        "[%d2, {%r17, %r18}], [%r19];"
        for chunk in range(shape.columns // 64)
    ]
    return "\n".join(
        [
            "wgmma.wait_group.sync.aligned 0;",
            *convert,
            *keep,
            "fence.proxy.async.shared::cta;",
            "bar.sync 1, 128;",
            "setp.ne.u32 %p6, %r1, 4;",
            "@%p6 bra END;",
            "elect.sync %r4|%p2, -1;",
            *store,
            "@%p2 cp.async.bulk.commit_group;",
            "@%p2 cp.async.bulk.wait_group 0;",
        ]
    )


def text(shape: Shape) -> str:
    """Return the PTX; parameters are the maps of A, B and the result."""
    b_bytes = shape.columns * STEP * 2
    stage = A_BYTES + b_bytes
    load_b = "\n".join(
        f"add.u32 %r18, %r15, {A_BYTES + 8192 * i}; mov.u32 %r19, {64 * i};\n"
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[%r18], [%d1, {{{'%r19, %r16' if shape.n_major else '%r16, %r19'}}}], [%r14];"
        for i in range(shape.columns // 64)
    )
    return f""".version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 pa[128], .param .align 64 .b8 pb[128],
                  .param .align 64 .b8 pc[128])
.reqntid 256, 1, 1
{{
.reg .pred %p<10>; .reg .b32 %r<200>; .reg .f32 %f<64>; .reg .b64 %d<30>;
mov.b64 %d0, pa; cvta.param.u64 %d0, %d0;
mov.b64 %d1, pb; cvta.param.u64 %d1, %d1;
mov.b64 %d2, pc; cvta.param.u64 %d2, %d2;
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5;
mov.u32 %r2, smem; add.u32 %r30, %r2, {STAGES * stage};
add.u32 %r3, %r30, {ROWS * shape.columns * 2};
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3+8], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3+16], 4;
@%p1 mbarrier.init.shared::cta.b64 [%r3+24], 4;
fence.mbarrier_init.release.cluster;
griddepcontrol.wait;
bar.sync 0;
setp.ge.u32 %p3, %r1, 4;
@%p3 bra MULTIPLY;
setmaxnreg.dec.sync.aligned.u32 40;
setp.ne.u32 %p6, %r1, 0;
@%p6 bra END;
elect.sync %r4|%p2, -1;
@!%p2 bra END;
mov.u32 %r10, 0;
LOAD:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r12, %r12, 1;
shl.b32 %r13, %r11, 3; add.u32 %r14, %r3, %r13;
FREE:
mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r14+16], %r12;
@!%p4 bra FREE;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r14], {stage};
mad.lo.u32 %r15, %r11, {stage}, %r2; shl.b32 %r16, %r10, 6; mov.u32 %r17, 0;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r15], [%d0, {{%r16, %r17}}], [%r14];
{load_b}
add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, {K // STEP};
@%p5 bra LOAD;
bra END;

MULTIPLY:
setmaxnreg.inc.sync.aligned.u32 232;
and.b32 %r20, %r0, 31; setp.eq.u32 %p7, %r20, 0;
and.b32 %r21, %r1, 3; shl.b32 %r22, %r21, 4;
and.b32 %r23, %r20, 15; add.u32 %r24, %r22, %r23;
shl.b32 %r32, %r24, 7; add.u32 %r31, %r30, %r32;
shr.u32 %r33, %r20, 4; and.b32 %r34, %r24, 7;
{_consume(shape, stage)}
{_epilogue(shape)}
END:
ret;
}}
"""


def run(ptx: str, shape: Shape, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Run it; returns the result and its exact value."""
    generator = torch.Generator().manual_seed(0)
    dtype, columns = _DTYPES[shape.kind], shape.columns
    a = torch.randn(ROWS, K, generator=generator).to(dtype)
    b = torch.randn(columns, K, generator=generator).to(dtype)
    stored = b.T.contiguous() if shape.n_major else b
    c = torch.full((ROWS, columns), float("nan"), dtype=dtype)
    name = {"bf16": "bf16", "f16": "fp16"}[shape.kind]

    def tile_map(tensor: torch.Tensor) -> TensorMap:
        rows, width = tensor.shape
        return TensorMap(tensor.data_ptr(), name, (width, rows), (2 * width,), (64, 64), 128)

    emulator.launch(
        ptx,
        "k",
        1,
        256,
        STAGES * (A_BYTES + columns * STEP * 2) + ROWS * columns * 2 + 32,
        [tile_map(x) for x in (a, stored, c)],
        tensors=[a, stored, c],
        outputs=[c],
        **{"races": True, "profile": "strict", **options},
    )
    return c, a.double() @ b.double().T
