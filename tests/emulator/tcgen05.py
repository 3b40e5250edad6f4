"""tcgen05 instructions of a warp: allocation, loads and stores, waits, fences, commit."""

from __future__ import annotations

import numpy as np

from emulator.errors import EmulatorError
from emulator.group import Wait
from emulator.link import Link, Step, op
from emulator.operands import Operand
from emulator.shared import OFFSET_MASK, RANK_SHIFT
from emulator.spaces import Access
from emulator.tmem import TensorMemory, cells_of, fragment

UNREAD = np.uint32(0x7FA5A5A5)  # what a loaded register holds before tcgen05.wait::ld (strict)


def memory_of(group, pair: str | None = None) -> TensorMemory:
    """Return the tensor memory of a group's CTA, and check that one cta_group is used."""
    cta = group.cta
    if cta.tmem is None:
        cta.tmem = TensorMemory(cta)
        if group.machine.races is not None:
            group.machine.races.watch_tmem(cta.tmem)
    if pair is not None:
        cta.tmem.pair = cta.tmem.pair or int(pair)
        if cta.tmem.pair != int(pair):
            raise EmulatorError("tensor memory", "a kernel must use one cta_group for all tcgen05")
    return cta.tmem


@op(
    r"tcgen05\.alloc\.cta_group::(?P<g>[12])\.sync\.aligned(\.shared::cta)?\.b32",
    ends=True,
    converges=True,
)
def allocate(c: Link, m, target: Operand, columns: Operand) -> Step:
    """Reserve columns and write their address to shared memory; waits while there are none.

    A pair of CTAs reserves together: the first one waits for its peer.
    """
    address, count, group = c.address(target), c.scalar(columns, "u32"), c.group
    here = c.instruction.index
    generic = address().dtype == np.uint64
    access = Access(group, "generic" if generic else "shared", "plain")

    def run() -> int:
        lanes = np.arange(c.lanes) if c.mask is None else np.flatnonzero(c.mask)
        if not len(lanes):
            return here + 1
        memory = memory_of(group, m["g"])
        start = memory.allocate(count()) if memory.unpaired is None else memory.unpaired
        if start is None:
            free = count()

            def ready() -> bool:
                return any(not memory.owned[at : at + free].any() for at in range(0, 512, free))

            return group.block(
                Wait(ready, lambda: f"{free} columns; allocated are {memory.allocated}"), here
            )
        memory.unpaired = None if memory.is_paired() else start
        if memory.unpaired is not None:
            return group.block(Wait(memory.is_paired, lambda: "the peer's tcgen05.alloc"), here)
        access.store(address()[lanes[:1]], lanes[:1], np.array([[start]], np.uint32))
        return here + 1

    return run


@op(r"tcgen05\.dealloc\.cta_group::(?P<g>[12])\.sync\.aligned\.b32", converges=True)
def deallocate(c: Link, m, address: Operand, columns: Operand) -> Step:
    """End an allocation."""
    start, count, group, mask = c.scalar(address, "u32"), c.scalar(columns, "u32"), c.group, c.mask

    def run() -> None:
        if mask is None or mask.any():
            memory = memory_of(group, m["g"])
            if group.machine.races is not None:
                group.machine.races.free_tmem(group, memory, start(), count())
            memory.free(start(), count())

    return run


@op(r"tcgen05\.relinquish_alloc_permit\.cta_group::(?P<g>[12])\.sync\.aligned", converges=True)
def relinquish(c: Link, m) -> Step:
    """Allow no more allocations."""
    group, mask = c.group, c.mask

    def run() -> None:
        if mask is None or mask.any():
            memory_of(group, m["g"]).may_allocate = False

    return run


# ---- loads and stores

_SHAPE = r"(?P<shape>32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(?P<n>1|2|4|8|16|32|64|128)"


class _Fragment:
    """The cells that a warp's registers stand for."""

    def __init__(self, c: Link, m, target: Operand, registers: Operand, split: tuple) -> None:
        self.group = c.group
        self.shape, self.repeat = m["shape"], int(m["n"])
        self.lane, self.column = fragment(self.shape, self.repeat)
        self.address = c.address(target)
        self.split = int(split[0].text, 0) if split else 0
        self.width = int(self.column.max()) + 1
        self.items = c.items(registers)
        if len(self.items) != len(self.lane) or bool(split) != (self.shape == "16x32bx2"):
            raise c.unknown(f"{len(self.lane)} registers expected, got {len(self.items)}")
        self.plain = self.shape == "32x32b"
        self.known: dict[tuple[int, int], np.ndarray] = {}

    def place(self, warp: int) -> tuple[TensorMemory, int, int]:
        """Return the memory, first lane and first column of a warp's access."""
        group = self.group
        memory = memory_of(group)
        address = int(self.address()[32 * warp])
        lane, column = address >> 16, address & 0xFFFF
        quadrant = 32 * ((group.first_warp + warp) % 4)
        allowed = (quadrant,) if self.plain else (quadrant, quadrant + 16)
        if lane not in allowed:
            raise EmulatorError(
                "tensor memory",
                f"{group.name(warp)} reaches lanes {quadrant} to {quadrant + 31}, not {lane}",
            )
        memory.check(column, self.width)
        if self.split:
            memory.check(column + self.split, self.width)
        return memory, lane, column

    def cells(self, lane: int, column: int) -> tuple[np.ndarray, np.ndarray]:
        """Return lanes and columns [registers, 32]."""
        columns = self.column + column
        if self.split:
            columns = columns + np.where(np.arange(32) >= 16, self.split, 0)
        return self.lane + lane, columns

    def watched(self, lane: int, column: int) -> np.ndarray:
        """Return the cells of the race detector."""
        if (lane, column) not in self.known:
            self.known[lane, column] = cells_of(*self.cells(lane, column))
        return self.known[lane, column]

    def read(self, warp: int) -> np.ndarray:
        """Return [registers, 32]."""
        memory, lane, column = self.place(warp)
        if memory.shadow is not None:
            memory.shadow.load(self.group, warp, self.watched(lane, column))
        if self.plain:
            lanes, columns = slice(lane, lane + 32), slice(column, column + self.width)
            memory.check_valid(lanes, columns)
            return memory.words[lanes, columns].T
        at = self.cells(lane, column)
        if not memory.valid[at].all():
            raise EmulatorError("uninitialised read", f"tensor memory near column {column}")
        return memory.words[at]

    def write(self, memory: TensorMemory, lane: int, column: int, values: np.ndarray) -> None:
        """Store [registers, 32]."""
        at = self.cells(lane, column)
        memory.words[at] = values
        memory.valid[at] = True


@op(rf"tcgen05\.ld\.sync\.aligned\.{_SHAPE}(?P<pack>\.pack::16b)?\.b32", converges=True)
def load(c: Link, m, registers: Operand, target: Operand, *split: Operand) -> Step:
    """Read a fragment; under strict it lands in the registers at tcgen05.wait::ld."""
    if m["pack"]:
        raise c.unknown("pack::16b is not modelled")
    cells, group = _Fragment(c, m, target, registers, split), c.group
    outs = [c.write(item, "u32") for item in cells.items]
    strict = group.machine.options.profile == "strict"

    def run() -> None:
        for warp in c.active_warps():
            values = cells.read(warp)
            lanes = slice(32 * warp, 32 * warp + 32)
            if strict:
                group.pending.setdefault(("loads", warp), []).append((outs, values.copy()))
                for out in outs:
                    out[lanes] = UNREAD
            else:
                for out, row in zip(outs, values, strict=True):
                    out[lanes] = row

    return run


@op(rf"tcgen05\.st\.sync\.aligned\.{_SHAPE}(?P<unpack>\.unpack::16b)?\.b32", converges=True)
def store(c: Link, m, target: Operand, *rest: Operand) -> Step:
    """Write a fragment, some time before tcgen05.wait::st ends."""
    if m["unpack"]:
        raise c.unknown("unpack::16b is not modelled")
    *split, registers = rest
    cells, group = _Fragment(c, m, target, registers, tuple(split)), c.group
    rows = [c.read(item, "u32") for item in cells.items]

    def run() -> None:
        for warp in c.active_warps():
            lanes = slice(32 * warp, 32 * warp + 32)
            values = np.stack([row[lanes] for row in rows])
            memory, lane, column = cells.place(warp)
            if memory.shadow is not None:
                memory.shadow.store(group, warp, cells.watched(lane, column))
            piece = group.machine.agents.issue(
                group,
                c.instruction,
                "tcgen05.st",
                lambda at=(memory, lane, column), values=values: cells.write(*at, values),
                pipe=("tcgen05.st", group.actor(warp)),
            )
            if not piece.done:
                group.pending.setdefault(("stores", warp), []).append(piece)

    return run


@op(r"tcgen05\.wait::(?P<f>ld|st)\.sync\.aligned", converges=True)
def wait(c: Link, m) -> Step:
    """Complete the warp's loads or stores."""
    group, is_load = c.group, m["f"] == "ld"

    def run() -> None:
        for warp in c.active_warps():
            lanes = slice(32 * warp, 32 * warp + 32)
            if is_load:
                for outs, values in group.pending.pop(("loads", warp), ()):
                    for out, row in zip(outs, values, strict=True):
                        out[lanes] = row
            else:
                for piece in group.pending.pop(("stores", warp), ()):
                    group.machine.agents.force(piece)
            if group.machine.races is not None:
                group.machine.races.wait_tmem(group, warp, loads=is_load)

    return run


# ---- fences and commit


@op(r"tcgen05\.fence::(?P<f>before|after)_thread_sync")
def fence(c: Link, m) -> Step:
    """Order the thread's tcgen05 accesses with a barrier before or after."""
    group, before = c.group, m["f"] == "before"

    def run() -> None:
        if group.machine.races is not None:
            group.machine.races.fence_tmem(group, c.active_warps(), before=before)

    return run


@op(
    r"tcgen05\.commit\.cta_group::(?P<g>[12])\.mbarrier::arrive::one(\.shared::cluster)?"
    r"(?P<cast>\.multicast::cluster)?\.b64"
)
def commit(c: Link, m, barrier: Operand, *ranks: Operand) -> Step:
    """Arrive on an mbarrier when the MMAs that the thread issued before are complete."""
    address, group = c.address(barrier), c.group
    if len(ranks) != bool(m["cast"]):
        raise c.unknown("wrong number of operands")
    mask_of = c.read(ranks[0], "u16") if ranks else None

    def run() -> None:
        lanes = np.arange(c.lanes) if c.mask is None else np.flatnonzero(c.mask)
        for lane in lanes.tolist():
            at = int(address()[lane])
            if mask_of is None:
                barriers = [group.cta.mbarrier(at)]
            else:
                barriers = [
                    group.cta.mbarrier(cta.rank << RANK_SHIFT | at & OFFSET_MASK)
                    for cta in group.cta.cluster.ctas
                    if int(mask_of[lane]) >> cta.rank & 1
                ]
            _issue_commit(c, barriers, m["g"])

    return run


def pipe_of(group, pair: str) -> tuple:
    """Name the queue of a CTA's MMAs; a pair of CTAs shares one."""
    cta = group.cta
    if pair == "2":
        cta = cta.cluster.ctas[cta.rank & ~1]
    return ("mma", cta.first_actor)


def _issue_commit(c: Link, barriers: list, pair: str) -> None:
    group, races = c.group, c.group.machine.races
    memory_of(group, pair)
    pipe = pipe_of(group, pair)
    clock = races.commit(group, pipe) if races is not None else None

    def perform() -> None:
        for barrier in barriers:
            if races is not None:
                races.publish(clock, barrier)
            barrier.arrive(1, f"tcgen05.commit of {group.name(0)}")

    piece = group.machine.agents.issue(group, c.instruction, "tcgen05.commit", perform, pipe=pipe)
    piece.arrives_alone = True
