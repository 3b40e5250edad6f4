"""Instructions that synchronise warps: barriers, fences, register counts."""

from __future__ import annotations

import numpy as np

from emulator.errors import EmulatorError
from emulator.group import Wait
from emulator.link import Link, Step, op
from emulator.operands import Operand

# ---- warps


@op(r"bar\.warp\.sync", converges=True)
def warp_barrier(c: Link, m, members: Operand) -> Step:
    """The lanes have met when they run this together; their memory is ordered."""
    return _nothing


def _nothing() -> None:
    return None


@op(r"(bar|barrier)(\.cta)?\.(?P<f>sync|arrive)(?P<aligned>\.aligned)?", ends=True, converges=True)
def named_barrier(c: Link, m, number: Operand, threads: Operand | None = None) -> Step:
    """Arrive with whole warps; sync also waits."""
    which = c.read(number, "u32")
    counts = c.read(threads, "u32") if threads is not None else None
    group, following = c.group, c.instruction.index + 1

    def arrive(index: int, count: int | None, warps: list[int]) -> Wait:
        if index > 15:
            raise EmulatorError("barrier", f"barrier {index} of 16")
        if count is not None and count % 32:
            raise EmulatorError("barrier", f"{count} threads are no multiple of a warp")
        barrier = group.cta.barrier(index)
        races = group.machine.races
        if races is not None:
            races.release(group, warps, barrier)
        generation = barrier.arrive(len(warps), None if count is None else count // 32)
        return Wait(
            lambda: barrier.generation != generation,
            barrier.state,
            after=_acquire(races, group, warps, barrier),
        )

    def run() -> int:
        running = group.current.mask if c.mask is None else c.mask
        parts: dict[tuple[int, int | None], list[int]] = {}
        for warp in c.active_warps():
            lane = 32 * warp + int(running[32 * warp : 32 * warp + 32].argmax())
            key = (int(which[lane]), None if counts is None else int(counts[lane]))
            parts.setdefault(key, []).append(warp)
        waits = [(warps, arrive(*key, warps)) for key, warps in parts.items()]
        if m["f"] == "arrive" or not waits:
            return following
        if group.num_warps == 1:
            return group.block(waits[0][1], following, after=waits[0][1].after)
        return group.block_parts(
            [(running & np.isin(group.lane_warp, warps), wait) for warps, wait in waits], following
        )

    return run


@op(
    r"(bar|barrier)(\.cta)?\.red(\.aligned)?\.(?P<f>and|or|popc)\.(?P<t>pred|u32)",
    ends=True,
    converges=True,
)
def reducing_barrier(c: Link, m, d: Operand, number: Operand, *rest: Operand) -> Step:
    """A barrier that combines a predicate of all threads."""
    *threads, value = rest
    which, votes, group = c.scalar(number, "u32"), c.predicate(value), c.group
    count = c.scalar(threads[0], "u32") if threads else None
    out, following = c.write(d, m["t"]), c.instruction.index + 1

    def run() -> int:
        warps = c.active_warps()
        if not warps:
            return following
        running = group.live_lanes() if c.mask is None else c.mask.copy()
        barrier = group.cta.barrier(which())
        races = group.machine.races
        if races is not None:
            races.release(group, warps, barrier)
        tally = barrier.tally.setdefault(barrier.generation, [0, 0])
        tally[0] += int(np.count_nonzero(votes() & running))
        tally[1] += int(np.count_nonzero(running))
        generation = barrier.arrive(len(warps), None if count is None else count() // 32)

        def finish() -> None:
            if races is not None:
                races.acquire(group, warps, barrier)
            yes, total = tally
            result = {"and": yes == total, "or": yes > 0, "popc": yes}[m["f"]]
            np.copyto(out, out.dtype.type(result), where=running)

        return group.block(
            Wait(lambda: barrier.generation != generation, barrier.state), following, after=finish
        )

    return run


def _acquire(races, group, warps, holder):
    if races is None:
        return None
    return lambda: races.acquire(group, warps, holder)


@op(r"barrier\.cluster\.arrive(?P<sem>\.(release|relaxed))?(?P<aligned>\.aligned)?", converges=True)
def cluster_arrive(c: Link, m) -> Step:
    """Arrive for the cluster."""
    group, mask, releases = c.group, c.mask, m["sem"] != ".relaxed"

    def run() -> None:
        lanes = c.lanes if mask is None else int(np.count_nonzero(mask))
        if not lanes:
            return
        barrier = group.cta.cluster.barrier
        races = group.machine.races
        if races is not None and releases:
            races.release(group, c.active_warps(), barrier)
        group.cluster_generation = barrier.arrive(lanes)

    return run


@op(r"barrier\.cluster\.wait(?P<sem>\.acquire)?(?P<aligned>\.aligned)?", ends=True, converges=True)
def cluster_wait(c: Link, m) -> Step:
    """Wait for the cluster."""
    group, mask, following = c.group, c.mask, c.instruction.index + 1

    def run() -> int:
        if mask is not None and not mask.any():
            return following
        warps = c.active_warps()
        barrier, generation = group.cta.cluster.barrier, group.cluster_generation
        races = group.machine.races
        return group.block(
            Wait(lambda: barrier.generation != generation, barrier.state),
            following,
            after=_acquire(races, group, warps, barrier),
        )

    return run


# ---- fences and register counts


@op(r"fence\.mbarrier_init\.release\.cluster")
def fence_init(c: Link, m) -> Step:
    """Publish new mbarriers; they exist for all at once here."""
    return _nothing


@op(r"fence\.proxy\.async(\.(global|shared(::(cta|cluster))?))?|fence\.proxy\.alias")
def fence_proxy(c: Link, m) -> Step:
    """Publish generic accesses to the async proxy."""
    group = c.group

    def run() -> None:
        if group.machine.races is not None:
            group.machine.races.fence_proxy(group, c.active_warps())

    return run


@op(r"setmaxnreg\.(?P<f>inc|dec)\.sync\.aligned\.u32", converges=True)
def set_registers(c: Link, m, number: Operand) -> Step:
    """Ask for registers; those of all warps of the CTA must fit the register file."""
    count, group = int(number.text, 0), c.group
    if count % 8 or not 24 <= count <= 256:
        raise c.unknown("register counts are multiples of 8 in 24..256")

    def run() -> None:
        cta = group.cta
        for warp in c.active_warps():
            cta.registers[group.first_warp + warp] = count
        if 32 * sum(cta.registers.values()) > 65536:
            raise EmulatorError("registers", f"{cta.registers} exceed 65536 registers")

    return run
