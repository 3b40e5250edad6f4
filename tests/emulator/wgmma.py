"""wgmma: the warpgroup's MMA of sm_90, warp by warp, with its fences and groups.

Each warp of a warpgroup owns 16 of the 64 rows, so its part is computed alone. The operands are
read, accumulators included, some time before the wait for the group ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.convert import from_bf16, from_f16
from emulator.errors import EmulatorError
from emulator.hazards import words
from emulator.link import Link, Step, op
from emulator.mma import accumulate
from emulator.operands import Operand, Vector
from emulator.swizzle import Matrix, addresses, decode

_ROWS = 64


def accumulator(registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row (of a warp's 16) and column of register r of thread t: [registers, 32]."""
    r, t = np.arange(registers)[:, None], np.arange(32)[None, :]
    return (t >> 2) + 8 * (r >> 1 & 1), 8 * (r >> 2) + 2 * (t & 3) + (r & 1)


def operand_a() -> tuple[np.ndarray, np.ndarray]:
    """Return row and first column (K) of the pair in register r of thread t: [4, 32]."""
    r, t = np.arange(4)[:, None], np.arange(32)[None, :]
    return (t >> 2) + 8 * (r & 1), 2 * (t & 3) + 8 * (r >> 1)


class _Part:
    """What one warp computes."""

    def __init__(self, c: Link, m, d: list, a: list | None) -> None:
        self.group = c.group
        self.n = int(m["n"])
        self.kind = m["a"]
        self.out = d
        self.a_rows = a
        self.trans = (0, 0)
        self.signs = (1, 1)

    def widen(self, bits: np.ndarray) -> np.ndarray:
        return (from_bf16 if self.kind == "bf16" else from_f16)(bits).astype(np.float64)

    def matrix(self, matrix: Matrix, rows: int, which: int, clock) -> np.ndarray:
        shared = self.group.cta.shared
        places = addresses(matrix, rows, 16, transposed=bool(self.trans[which]))
        if int(places.max()) + 2 > shared.size:
            shared.check_range(int(places.min()), int(places.max()) + 2)
        shared.check_valid(places >> 1, 2)
        if shared.shadow is not None:
            shared.shadow.read_async(clock, places.reshape(-1), 2)
        return self.widen(shared.views[2][places >> 1]) * self.signs[which]

    def perform(self, warp: int, first: Matrix | None, second: Matrix, adds: bool, clock) -> None:
        lanes = slice(32 * warp, 32 * warp + 32)
        if first is None:
            row, column = operand_a()
            a = np.zeros((16, 16))
            for i, register in enumerate(self.a_rows):
                halves = np.ascontiguousarray(register[lanes]).view(np.uint16).reshape(32, 2)
                for half in range(2):
                    a[row[i], column[i] + half] = self.widen(halves[:, half])
            a *= self.signs[0]
        else:
            place = 16 * ((self.group.first_warp + warp) % 4)
            a = self.matrix(first, _ROWS, 0, clock)[place : place + 16]
        b = self.matrix(second, self.n, 1, clock)
        row, column = accumulator(len(self.out))
        old = None
        if adds:
            old = np.empty((16, self.n), np.float32)
            for i, register in enumerate(self.out):
                old[row[i], column[i]] = register[lanes]
        truncate = self.group.machine.options.truncate
        new = accumulate(a, b, old, truncate=truncate)
        for i, register in enumerate(self.out):
            register[lanes] = new[row[i], column[i]]


@op(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<a>f16|bf16)\.(?P<b>f16|bf16)",
    converges=True,
)
def multiply(c: Link, m, d: Vector, a: Operand, b: Operand, adds: Operand, *flags: Operand) -> Step:
    """D = A B + D; A in registers or shared memory, B in shared memory."""
    if m["a"] != m["b"]:
        raise c.unknown("A and B have different types")
    group, predicate = c.group, c.predicate(adds)
    shape, result, inputs = f"m64n{m['n']}k16", words((d,)), words((a,))
    in_registers = isinstance(a, Vector)
    outs = [c.write(item, "f32") for item in d.items]
    part = _Part(c, m, outs, [c.read(x, "u32") for x in a.items] if in_registers else None)
    if len(outs) != part.n // 2:
        raise c.unknown(f"{part.n // 2} accumulators expected, got {len(outs)}")
    values = [int(flag.text, 0) for flag in flags]
    part.signs = (values[0], values[1])
    part.trans = (0, values[2]) if in_registers else (values[2], values[3])
    first = None if in_registers else c.read(a, "u64")
    second = c.read(b, "u64")

    def run() -> None:
        machine = group.machine
        for warp in c.active_warps():
            lane = 32 * warp
            add = bool(predicate()[lane])
            for operand in (first, second):
                if operand is not None and (operand[lane : lane + 32] != operand[lane]).any():
                    raise EmulatorError("descriptor", "the lanes have different descriptors")
            _follow(c, warp, second[lane], add, None if first is None else first[lane])
            group.flights[warp].check(shape, result, inputs)
            matrices = (
                None if first is None else decode(int(first[lane]), wgmma=True),
                decode(int(second[lane]), wgmma=True),
            )
            if (group.first_warp + warp) % 4 == 0:
                machine.agents.mma += 1
                rows = part.n + (0 if in_registers else _ROWS)
                machine.agents.note(
                    group, lane, mma_flop=2 * _ROWS * part.n * 16, operand_bytes=rows * 32
                )
            pipe = ("wgmma", group.actor(warp))
            lanes = np.zeros(c.lanes, bool)
            lanes[lane : lane + 32] = True
            clock = machine.races.issue_mma(group, lanes, pipe) if machine.races else None
            piece = machine.agents.issue(
                group,
                c.instruction,
                "wgmma.mma_async",
                lambda w=warp, x=matrices, add=add, k=clock: part.perform(w, *x, add, k),
                pipe=pipe,
            )
            piece.clock = clock
            group.flights[warp].add(piece, shape, result, inputs)

    return run


def _follow(c: Link, warp: int, *operands: Any) -> None:
    what = (c.instruction.index, *operands)
    c.group.cta.follow_wgmma(c.group.first_warp + warp, what)


@op(r"wgmma\.fence\.sync\.aligned", converges=True)
def fence(c: Link, m) -> Step:
    """Order registers with the MMAs that follow."""
    group = c.group

    def run() -> None:
        for warp in c.active_warps():
            _follow(c, warp)
            group.flights[warp].fence()

    return run


@op(r"wgmma\.commit_group\.sync\.aligned", converges=True)
def commit(c: Link, m) -> Step:
    """Close the group."""
    group = c.group

    def run() -> None:
        for warp in c.active_warps():
            _follow(c, warp)
            group.flights[warp].commit()

    return run


@op(r"wgmma\.wait_group\.sync\.aligned", converges=True)
def wait(c: Link, m, number: Operand) -> Step:
    """Complete all but the latest groups."""
    group, left = c.group, int(number.text, 0)

    def run() -> None:
        for warp in c.active_warps():
            _follow(c, warp)
            for piece in group.flights[warp].wait(left):
                group.machine.agents.force(piece)
                if group.machine.races is not None:
                    lanes = np.zeros(c.lanes, bool)
                    lanes[32 * warp : 32 * warp + 32] = True
                    group.machine.races.join(group, lanes, piece.clock)

    return run
