"""What the emulator counts, against counts by hand."""

from __future__ import annotations

import sys
from collections import Counter

import emulator
import pytest
import torch
from emulator import __main__ as entry
from emulator.counts import RATES, Cost, classify, clocks, comparison, work_of
from emulator.peers import TensorMap
from micro import assemble, kernel, launch

# Two warps: thread i reads word i and word 0 and writes word 3 i.
WORDS = """
shl.b32 %r1, %r0, 2; cvt.u64.u32 %d2, %r1; add.s64 %d2, %d2, %d0;
ld.global.u32 %r2, [%d2]; ld.global.u32 %r3, [%d0];
add.u32 %r2, %r2, %r3; mul.lo.u32 %r4, %r1, 3; cvt.u64.u32 %d3, %r4; add.s64 %d3, %d3, %d1;
st.global.u32 [%d3], %r2; ld.global.u32 %r5, [%d3];
"""


def aligned(words: int) -> torch.Tensor:
    """Return zeros whose memory starts at a sector."""
    room = torch.zeros(words + 8, dtype=torch.int32)
    skip = -room.data_ptr() % 32 // 4
    return room[skip : skip + words]


def test_global_memory_by_hand():
    x, y = aligned(64), aligned(192)
    result = launch(kernel(WORDS, 2), [x, y], block=64, counts=True)
    # A warp: 128 bytes in 4 sectors, one sector for word 0, 384 bytes in 12 sectors there and back.
    one = {"global_ld_bytes": 32 * (4 + 1 + 12), "global_st_bytes": 32 * 12}
    assert result.traffic.work == {0: one, 1: one}
    # 64 words are read; those written are read back, which needs no memory.
    assert result.traffic.touched() == (64 * 4, 64 * 4)


def test_atomics_read_and_write():
    x = aligned(8)
    text = kernel("atom.global.add.u32 %r1, [%d0], 1; red.global.add.u32 [%d0], 1;", 1)
    result = launch(text, [x], counts=True)
    assert result.traffic.work == {0: {"global_ld_bytes": 64, "global_st_bytes": 64}}
    assert result.traffic.touched() == (4, 4)
    assert int(x[0]) == 64


TMA = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .align 64 .b8 pm[128], .param .align 64 .b8 po[128])
{
.reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %d<4>; .shared .align 1024 .b8 smem[4096];
mov.b64 %d0, pm; cvta.param.u64 %d0, %d0; mov.b64 %d1, po; cvta.param.u64 %d1, %d1;
mov.u32 %r0, %tid.x; mov.u32 %r3, smem; add.u32 %r4, %r3, 2048; setp.eq.u32 %p1, %r0, 0;
@!%p1 bra WAIT;
mbarrier.init.shared.b64 [%r4], 1; mov.u32 %r1, 0; mov.u32 %r2, 6;
mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 512;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
[%r3], [%d0, {%r1, %r2}], [%r4];
WAIT: bar.sync 0; mov.u32 %r6, 0;
AGAIN: mbarrier.try_wait.parity.shared.b64 %p3, [%r4], %r6; @!%p3 bra AGAIN;
@!%p1 bra END;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {%r1, %r1}], [%r3];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END: ret;
}
"""


def maps() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[TensorMap, TensorMap]]:
    """Return two matrices of 8 rows of 64 bytes, and maps with boxes of 8 rows."""
    tensors = torch.ones(8, 16), torch.zeros(8, 16)
    made = tuple(TensorMap(x.data_ptr(), "f32", (16, 8), (64,), (16, 8), 0) for x in tensors)
    return tensors, made


@pytest.mark.parametrize("schedule", [{}, {"async_delay": emulator.LATE}])
def test_boxes_by_hand_and_waits_once(schedule):
    """The box at row 6 has 2 rows inside; the store writes all 8, of zeros where none was."""
    assemble(TMA, "sm_100a")
    tensors, made = maps()
    result = emulator.launch(TMA, "k", 1, 32, 0, made, tensors=tensors, counts=True, **schedule)
    assert result.traffic.work == {0: {"tma_ld_bytes": 2 * 64, "tma_st_bytes": 8 * 64}}
    assert result.traffic.touched() == (2 * 64, 8 * 64)
    assert result.agent_work[0] == {"tma_bytes_in": 512, "tma_bytes_out": 512}
    waits = [n for i, n in result.issued() if i.opcode.startswith("mbarrier.try_wait")]
    assert [n.tolist() for n in waits] == [[1]]


def test_what_an_opcode_amounts_to():
    expected = {
        "mov.b64": {"issued": 1},
        "bra.uni": {"issued": 1, "work": 1},
        "ex2.approx.ftz.f32": {"issued": 1, "work": 1, "special": 1, "ex2": 1},
        "rcp.approx.ftz.f32": {"issued": 1, "work": 1, "special": 1},
        "fma.rn.f32x2": {"issued": 1, "work": 1, "lanes": 2},
        "max.f32": {"issued": 1, "work": 1, "lanes": 1},
        "ld.shared.v4.b32": {"issued": 1, "work": 1, "shared_ld_bytes": 512},
        "st.shared.b16": {"issued": 1, "work": 1, "shared_st_bytes": 64},
        "tcgen05.ld.sync.aligned.32x32b.x32.b32": {"tmem_ld_bytes": 4096, "issued": 1, "work": 1},
    }
    assert {opcode: +classify(opcode) for opcode in expected} == expected


def test_costs():
    x, y = aligned(64), aligned(192)
    result = launch(kernel(WORDS, 2), [x, y], block=64, counts=True)
    roles = {"first": range(1), "second": range(1, 2)}
    work = work_of(result, roles)
    assert work["first"] == work["second"]
    lanes = 7  # shl, mul, add of the sum, and cvt and add for both addresses
    assert work["first"]["lanes"] == lanes
    units = clocks(work, (256, 256))
    assert units["lanes"] == 2 * 32 * lanes / RATES["lanes"]
    assert units["L2"] == 2 * 32 * (17 + 12) / RATES["L2"]
    assert units["HBM"] == 512 / RATES["HBM"]
    half = Cost.of(result, roles, 2)
    assert half.touched == (128, 128)
    assert half.work["first"]["lanes"] == lanes / 2
    assert half.bound() == (units["L2"] / 2, "L2")
    assert "128 read, 128 written" in half.table()
    assert comparison({"k": half}).splitlines()[1].split()[0] == "k"


def test_a_run_that_did_not_count_is_refused():
    result = launch(kernel(WORDS, 2), [aligned(64), aligned(192)], block=64)
    with pytest.raises(ValueError, match="counts=True"):
        work_of(result)


def test_the_command_prints_a_table_and_a_row_for_each_kernel(monkeypatch, capsys):
    cost = Cost({"all": Counter(issued=9, work=8, mma_flop=7 * RATES["MMA"])}, (RATES["HBM"], 0))
    monkeypatch.setattr(entry, "COSTS", {"ours": lambda: cost})
    monkeypatch.setattr(sys, "argv", ["emulator"])
    entry.main()
    lines = capsys.readouterr().out.splitlines()
    assert "bound (model): 7 clocks, by MMA" in lines
    # issued, work; MMA, ex2, lanes, issue, SMEM operands and fills, L2, HBM; bound.
    numbers = (9, 8, 7, 0, 0, 2, 0, 0, 0, 1, 7)
    assert lines[-1].split() == ["ours", *map(str, numbers)]
    monkeypatch.setattr(sys, "argv", ["emulator", "theirs"])
    with pytest.raises(SystemExit):
        entry.main()
    assert "got ['theirs']" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vsa", "k1"])
def test_a_tile_step_of_our_kernels(name):
    """Two products of 128 x 128 x 128, and what they read and write at the least."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")
    cost = entry.COSTS[name]()
    units = clocks(cost.work, cost.touched)
    assert units["MMA"] == 1024
    matrix = 128 * 128 * 2
    rows = {"vsa": (2 + 2 * 8) / 16, "k1": (16 + 2) / 16}[name]  # Q, K and V for a tile step
    tables = cost.touched[0] - rows * matrix
    assert 0 <= tables < 512
    assert cost.touched[1] >= {"vsa": 2 / 16, "k1": 1}[name] * matrix
