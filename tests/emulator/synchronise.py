"""Instructions that synchronise: barriers, mbarriers, fences, register counts."""

from __future__ import annotations

import numpy as np

from emulator.barriers import MAX_COUNT, MBarrier
from emulator.errors import EmulatorError
from emulator.group import Wait
from emulator.link import Link, Step, op
from emulator.operands import Operand, Sink

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
    which = c.scalar(number, "u32")
    count = c.scalar(threads, "u32") if threads is not None else None
    group, following, mask = c.group, c.instruction.index + 1, c.mask

    def run() -> int:
        warps = c.active_warps()
        if not warps:
            return following
        if which() > 15:
            raise EmulatorError("barrier", f"barrier {which()} of 16")
        total = None if count is None else count()
        if total is not None and total % 32:
            raise EmulatorError("barrier", f"{total} threads are no multiple of a warp")
        barrier = group.cta.barrier(which())
        races = group.machine.races
        if races is not None:
            races.release(group, warps, barrier)
        generation = barrier.arrive(len(warps), None if total is None else total // 32)
        if m["f"] == "arrive":
            return following

        def ready() -> bool:
            return barrier.generation != generation

        if races is None and ready():
            return following
        return group.block(
            Wait(ready, barrier.state), following, after=_acquire(races, group, warps, barrier)
        )

    del mask
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
    group, following = c.group, c.instruction.index + 1

    def run() -> int:
        warps = c.active_warps()
        barrier, generation = group.cta.cluster.barrier, group.cluster_generation
        races = group.machine.races
        return group.block(
            Wait(lambda: barrier.generation != generation, barrier.state),
            following,
            after=_acquire(races, group, warps, barrier),
        )

    return run


# ---- mbarriers

_SCOPE = r"(\.(cta|cluster))?"
_WINDOW = r"(\.shared(::(cta|cluster))?)?"


def _each(c: Link, target: Operand):
    """Return a function that yields (barrier, lanes) for the addresses of the lanes that run."""
    address, mask, group = c.address(target), c.mask, c.group

    def each() -> list[tuple[MBarrier, np.ndarray]]:
        lanes = np.arange(c.lanes) if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return []
        addresses = address()[lanes]
        if (addresses == addresses[0]).all():
            return [(group.cta.mbarrier(int(addresses[0])), lanes)]
        return [(group.cta.mbarrier(int(a)), lanes[addresses == a]) for a in np.unique(addresses)]

    return each


@op(rf"mbarrier\.init{_WINDOW}\.b64")
def init(c: Link, m, target: Operand, count: Operand) -> Step:
    """Make an mbarrier."""
    address, number, mask, group = c.address(target), c.read(count, "u32"), c.mask, c.group

    def run() -> None:
        lanes = np.arange(c.lanes) if mask is None else np.flatnonzero(mask)
        for lane in lanes.tolist():
            group.cta.init_mbarrier(int(address()[lane]), int(number[lane]))

    return run


@op(rf"mbarrier\.inval{_WINDOW}\.b64")
def invalidate(c: Link, m, target: Operand) -> Step:
    """End an mbarrier's life."""
    each, group = _each(c, target), c.group

    def run() -> None:
        for barrier, _ in each():
            group.cta.mbarriers.pop(barrier.offset)

    return run


@op(
    rf"mbarrier\.arrive(?P<tx>\.expect_tx)?(?P<drop>\.drop)?(\.(release|relaxed))?{_SCOPE}{_WINDOW}"
    r"\.b64"
)
def arrive(c: Link, m, *operands: Operand) -> Step:
    """Arrive; with expect_tx also expect bytes. A state is returned for a local barrier."""
    if m["drop"]:
        raise c.unknown("arrive.drop is not modelled")
    rest = list(operands)
    state = None if type(rest[0]).__name__ == "Address" else rest.pop(0)
    each = _each(c, rest.pop(0))
    amount = c.read(rest.pop(0), "u32") if rest else None
    out = c.write(state, "u64") if state is not None and not isinstance(state, Sink) else None
    group, has_bytes = c.group, bool(m["tx"])

    def run() -> None:
        races = group.machine.races
        for barrier, lanes in each():
            if out is not None:
                out[lanes] = barrier.phase
            if races is not None:
                races.release(group, np.unique(lanes // 32).tolist(), barrier)
            total = len(lanes) if amount is None else int(amount[lanes].sum(dtype=np.uint64))
            if has_bytes:
                barrier.expect(total)
                total = len(lanes)
            barrier.arrive(total, group.name(int(lanes[0]) // 32))

    return run


@op(rf"mbarrier\.expect_tx(\.relaxed)?{_SCOPE}{_WINDOW}\.b64")
def expect(c: Link, m, target: Operand, amount: Operand) -> Step:
    """Expect bytes without arriving."""
    each, number = _each(c, target), c.read(amount, "u32")

    def run() -> None:
        for barrier, lanes in each():
            barrier.expect(int(number[lanes].sum(dtype=np.uint64)))

    return run


@op(rf"mbarrier\.complete_tx(\.relaxed)?{_SCOPE}{_WINDOW}\.b64")
def complete(c: Link, m, target: Operand, amount: Operand) -> Step:
    """Count bytes as arrived."""
    each, number, group = _each(c, target), c.read(amount, "u32"), c.group

    def run() -> None:
        for barrier, lanes in each():
            total = int(number[lanes].sum(dtype=np.uint64))
            barrier.complete(total, group.name(int(lanes[0]) // 32))

    return run


@op(
    rf"mbarrier\.(?P<f>try_wait|test_wait)(?P<parity>\.parity)?(\.(acquire|relaxed))?{_SCOPE}"
    rf"{_WINDOW}\.b64",
    ends=True,
)
def wait(
    c: Link, m, d: Operand, target: Operand, state: Operand, hint: Operand | None = None
) -> Step:
    """Ask whether a phase is complete; try_wait stands still until it is."""
    each, out = _each(c, target), c.write(d, "pred")
    phase = c.read(state, "u32" if m["parity"] else "u64")
    group, here, tries, by_parity = c.group, c.instruction.index, m["f"] == "try_wait", m["parity"]

    def passed(barrier: MBarrier, value: int) -> bool:
        return barrier.passed(value) if by_parity else barrier.phase != value

    def run() -> int:
        waiting = []
        for barrier, lanes in each():
            values = phase[lanes]
            for value in np.unique(values).tolist() if len(lanes) > 1 else values.tolist():
                those = lanes if (values == value).all() else lanes[values == value]
                waiting.append((barrier, value, those))
        open_ = [passed(barrier, value) for barrier, value, _ in waiting]
        if tries and not all(open_) and not group.peek_fails and here in group.tried:
            group.tried.discard(here)

            def ready() -> bool:
                return all(passed(barrier, value) for barrier, value, _ in waiting)

            def describe() -> str:
                return "; ".join(
                    f"{'parity' if by_parity else 'state'} {value} of {barrier.state()}"
                    for barrier, value, _ in waiting
                    if not passed(barrier, value)
                )

            if by_parity:
                _check_lag(group, waiting)
            held = [barrier for barrier, value, _ in waiting if not passed(barrier, value)]
            return group.block(Wait(ready, describe, peek=True, barriers=held), here)
        group.peek_fails = False
        if not all(open_):  # the first try reports failure: code that ignores it goes wrong
            group.tried.add(here)
        for (barrier, value, lanes), is_open in zip(waiting, open_, strict=True):
            out[lanes] = is_open
            if is_open:
                _observe(group, barrier, value, lanes, by_parity=bool(by_parity))
        return here + 1

    return run


def _observe(group, barrier: MBarrier, value: int, lanes: np.ndarray, *, by_parity: bool) -> None:
    races = group.machine.races
    warps = np.unique(lanes // 32).tolist()
    if races is not None:
        races.acquire(group, warps, barrier)
    if by_parity:
        for warp in warps:
            barrier.seen[group.actor(warp)] = barrier.phase


def _check_lag(group, waiting: list) -> None:
    """A warp that would pass a phase later than the one it asks for waits two phases behind."""
    for barrier, value, lanes in waiting:
        for warp in np.unique(lanes // 32).tolist():
            seen = barrier.seen.get(group.actor(warp))
            wanted = None if seen is None else seen + 1
            # The next phase of that parity, after what the warp has seen, may be complete already.
            if wanted is not None and (wanted - 1) & 1 == value & 1 and barrier.phase >= wanted + 1:
                raise EmulatorError(
                    "phase lag",
                    f"{group.name(warp)} waits for parity {value} after {seen} phases of "
                    f"{barrier.state()}",
                )


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


__all__ = ["MAX_COUNT"]
