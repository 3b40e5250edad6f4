"""TMA boxes against plain loops: bounds, strides, swizzles, multicast, stores."""

from __future__ import annotations

import itertools

import emulator
import numpy as np
import pytest
import torch
from emulator.peers import TensorMap
from micro import assemble

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .align 64 .b8 pm[128], .param .u64 po, .param .u32 px, .param .u32 py)
{{
.reg .pred %p<10>; .reg .b32 %r<60>; .reg .b64 %d<20>; .reg .b16 %h<4>;
.shared .align 1024 .b8 smem[16384];
mov.b64 %d0, pm; cvta.param.u64 %d0, %d0; ld.param.u64 %d1, [po];
ld.param.u32 %r1, [px]; ld.param.u32 %r2, [py];
mov.u32 %r0, %tid.x; mov.u32 %r3, smem; add.u32 %r4, %r3, 8192; mov.u32 %r5, %cluster_ctarank;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {num_bytes};
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
setp.eq.and.u32 %p2, %r5, 0, %p1; mov.b16 %h1, 3; mov.u32 %r9, 1;
{load}
mov.u32 %r6, 0;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r4], %r6; @!%p3 bra WAIT;
mov.u32 %r7, %r0;
COPY: shl.b32 %r8, %r7, 2; add.u32 %r10, %r8, %r3; ld.shared.u32 %r11, [%r10];
mad.lo.u32 %r12, %r5, {num_bytes}, %r8; cvt.u64.u32 %d2, %r12; add.s64 %d2, %d2, %d1;
st.global.u32 [%d2], %r11; add.u32 %r7, %r7, 32; setp.lt.u32 %p4, %r7, {words};
@%p4 bra COPY;
ret;
}}
"""
PLAIN = """@%p1 cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
[%r3], [%d0, {%r1, %r2, %r9}], [%r4];"""
CAST = """@%p2 cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
.multicast::cluster [%r3], [%d0, {%r1, %r2, %r9}], [%r4], %h1;"""


def place(address: int, swizzle: int) -> int:
    """Where a byte goes: the 16-byte unit of a row is XORed with the number of the 128-byte line.

    The pattern repeats after 256, 512 or 1024 bytes, that is after 2, 4 or 8 lines.
    """
    if swizzle == 0:
        return address
    units = swizzle // 16
    line, unit = address // 128, address // 16 % units
    return address // swizzle * swizzle + (unit ^ line % units) * 16 + address % 16


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("corner", [(0, 0), (-3, -2), (20, 5), (1000, 0)])
@pytest.mark.parametrize("cast", [False, True])
def test_loads(swizzle, corner, cast):
    columns = swizzle // 2 or 32
    box = (columns, 8, 2)
    storage = torch.arange(2 * 3 * 11 * 40).to(torch.int16).view(torch.bfloat16)
    tensor = storage.reshape(6, 11, 40)[::2, :, :33]
    source = TensorMap(tensor.data_ptr(), "bf16", (33, 11, 3), (80, 2 * 11 * 80), box, swizzle)
    num_bytes = 2 * columns * 8 * 2
    text = HEAD.format(load=CAST if cast else PLAIN, num_bytes=num_bytes, words=num_bytes // 4)
    text = text.replace("bytes\n.multi", "bytes.multi")
    assemble(text, "sm_100a")
    ctas = 2 if cast else 1
    out = torch.zeros(ctas * num_bytes // 2, dtype=torch.int16)
    result = emulator.launch(
        text,
        "k",
        ctas,
        32,
        0,
        [source, out, *corner],
        cluster=(ctas, 1, 1),
        tensors=[storage, out],
        races=True,
        async_delay=3,
        seed=1,
    )
    assert result.tma == 1
    want = np.zeros(num_bytes // 2, np.int16)
    for z, y, x in itertools.product(range(2), range(8), range(columns)):
        at = (1 + z, corner[1] + y, corner[0] + x)
        inside = all(0 <= i < extent for i, extent in zip(at, (3, 11, 33), strict=True))
        address = 2 * ((z * 8 + y) * columns + x)
        want[place(address, swizzle) // 2] = tensor.view(torch.int16)[at] if inside else 0
    for cta in range(ctas):
        assert out[cta * len(want) : (cta + 1) * len(want)].tolist() == want.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (24, 8, 2), "swizzle": 32}, "wider than the swizzle"),
        ({"box": (4, 8, 2)}, "no multiple of 16"),
        ({"strides": (72, 1760)}, "strides"),
        ({"box": (32, 8)}, "box of another rank"),
    ],
)
def test_maps_that_are_refused(change, message):
    tensor = torch.zeros(3, 11, 40, dtype=torch.bfloat16)
    fields = {"strides": (80, 880), "box": (32, 8, 2), "swizzle": 64, **change}
    source = TensorMap(tensor.data_ptr(), "bf16", (33, 11, 3), **fields)
    text = HEAD.format(load=PLAIN, num_bytes=1024, words=256)
    out = torch.zeros(512, dtype=torch.int16)
    with pytest.raises(emulator.EmulatorError, match=message):
        emulator.launch(text, "k", 1, 32, 0, [source, out, 0, 0], tensors=[tensor, out])
