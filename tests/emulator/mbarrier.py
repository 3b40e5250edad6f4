"""Instructions on mbarriers: init, arrivals, bytes, and waits for a phase."""

from __future__ import annotations

import numpy as np

from emulator.barriers import MBarrier
from emulator.errors import EmulatorError
from emulator.group import Wait
from emulator.link import Link, Step, op
from emulator.operands import Operand, Sink

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
                warps = np.unique(lanes // 32).tolist()
                races.note_arrivals(group, warps, barrier)
                races.release(group, warps, barrier)
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
    """A warp that would pass a phase later than the one it asks for waits two phases behind.

    It may skip phases of which it knows otherwise that they are complete: the race detector tells.
    """
    races = group.machine.races
    if races is None:
        return
    for barrier, value, lanes in waiting:
        for warp in np.unique(lanes // 32).tolist():
            seen = barrier.seen.get(group.actor(warp))
            if seen is None:
                continue
            seen = max(seen, races.phases_known(group, warp, barrier))
            # The next phase of that parity, after what the warp has seen, may be complete already.
            if seen & 1 == value & 1 and barrier.phase >= seen + 2:
                raise EmulatorError(
                    "phase lag",
                    f"{group.name(warp)} waits for parity {value} after {seen} phases of "
                    f"{barrier.state()}",
                )
