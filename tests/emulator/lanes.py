"""Instructions across the lanes of a warp: shuffles, votes, matches, reductions, elect."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emulator.errors import EmulatorError
from emulator.link import Link, Step, op
from emulator.operands import Immediate, Operand, Pair, Sink

_ALL = 0xFFFFFFFF


def _sets(c: Link, members: Operand) -> Callable[[], list[np.ndarray]]:
    """Return a function for the lanes that run, apart by member mask; they are those of the mask.

    Each of its results has, of every warp, the lanes of one mask.
    """
    group, mask = c.group, c.mask
    everyone = isinstance(members, Immediate) and int(members.text, 0) & _ALL == _ALL
    whole = [np.ones(c.lanes, bool)]
    if everyone and mask is None:
        return lambda: whole
    named = c.read(members, "u32")
    bit = np.uint32(1) << (np.arange(c.lanes) % 32).astype(np.uint32)

    def sets() -> list[np.ndarray]:
        running = whole[0] if mask is None else mask
        if everyone and len(group.fragments) == 1 and c.instruction.guard is None:
            return [running]
        if (running & ((named & bit) == 0)).any():
            raise EmulatorError("divergence", "a lane runs that its member mask leaves out")
        live, found = group.live_lanes(), []
        for warp in np.flatnonzero(running.reshape(-1, 32).any(1)).tolist():
            lanes = slice(32 * warp, 32 * warp + 32)
            for number, name in enumerate(np.unique(named[lanes][running[lanes]])):
                if number == len(found):
                    found.append(np.zeros(c.lanes, bool))
                found[number][lanes] = running[lanes] & (named[lanes] == name)
                if ((name & bit[lanes] != 0) & live[lanes] & ~found[number][lanes]).any():
                    raise EmulatorError(
                        "divergence", f"lanes of the member mask {int(name):#x} are elsewhere"
                    )
        return found or [running]

    return sets


def _by_set(
    c: Link, members: Operand, compute: Callable[[np.ndarray], np.ndarray]
) -> Callable[[], np.ndarray]:
    """Return a function that computes a result for each set of lanes that name each other."""
    sets = _sets(c, members)

    def run() -> np.ndarray:
        first, *others = sets()
        result = compute(first)
        for running in others:
            result = np.where(running, compute(running), result)
        return result

    return run


def _running(c: Link) -> np.ndarray:
    return np.ones(c.lanes, bool) if c.mask is None else c.mask


@op(r"shfl\.sync\.(?P<f>up|down|bfly|idx)\.b32", converges=True)
def shuffle(
    c: Link, m, d: Operand, a: Operand, offset: Operand, clamp: Operand, members: Operand
) -> Step:
    """Read another lane's value inside a segment; p tells whether there is one."""
    value, by, bound = c.read(a, "u32"), c.read(offset, "u32"), c.read(clamp, "u32")
    out = c.write(d.first if isinstance(d, Pair) else d, "u32")
    found = c.write(d.second, "pred") if isinstance(d, Pair) else None
    sets, mask = _sets(c, members), c.mask
    lane = (np.arange(c.lanes) % 32).astype(np.int64)
    warp = np.arange(c.lanes) // 32 * 32

    def source() -> tuple[np.ndarray, np.ndarray]:
        segment = (bound >> np.uint32(8)).astype(np.int64) & 31
        limit = bound.astype(np.int64) & 31
        highest = (lane & segment) | (limit & ~segment)
        lowest = lane & segment
        step = by.astype(np.int64) & 31
        if m["f"] == "up":
            at = lane - step
            return at, at >= highest
        if m["f"] == "idx":
            at = lowest | (step & ~segment)
        else:
            at = lane + step if m["f"] == "down" else lane ^ step
        return at, at <= highest

    static = all(isinstance(o, Immediate) for o in (offset, clamp))
    known = source() if static else None

    def run() -> None:
        sets()
        at, valid = known if known is not None else source()
        result = value[warp + np.where(valid, at, lane)]
        if mask is None:
            out[...] = result
            if found is not None:
                found[...] = valid
        else:
            np.copyto(out, result, where=mask)
            if found is not None:
                np.copyto(found, valid, where=mask)

    return run


@op(r"vote\.sync\.(?P<f>all|any|uni)\.pred", converges=True)
def vote(c: Link, m, d: Operand, a: Operand, members: Operand) -> Step:
    """Whether all, any or equally many lanes have the predicate."""
    value = c.predicate(a)

    def compute(running: np.ndarray) -> np.ndarray:
        votes, voters = value().reshape(-1, 32), running.reshape(-1, 32)
        some, every = (votes & voters).any(1), (votes | ~voters).all(1)
        result = {"any": some, "all": every, "uni": every | ~some}[m["f"]]
        return np.repeat(result, 32)

    return c.assign(c.write(d, "pred"), _by_set(c, members, compute))


def ballots(votes: np.ndarray) -> np.ndarray:
    """Pack the votes of each warp in a word, given to all its lanes."""
    words = np.packbits(votes, bitorder="little").view(np.uint32)
    return np.repeat(words, 32)


@op(r"vote\.sync\.ballot\.b32", converges=True)
def ballot(c: Link, m, d: Operand, a: Operand, members: Operand) -> Step:
    """A bit for each lane."""
    value = c.predicate(a)
    compute = _by_set(c, members, lambda running: ballots(value() & running))
    return c.assign(c.write(d, "u32"), compute)


@op(r"activemask\.b32")
def active_mask(c: Link, m, d: Operand) -> Step:
    """The lanes that run."""
    return c.assign(c.write(d, "u32"), lambda: ballots(_running(c)))


@op(r"match\.(?P<f>any|all)\.sync\.(?P<t>b32|b64)", converges=True)
def match(c: Link, m, d: Operand, a: Operand, members: Operand) -> Step:
    """The lanes with the same value; all: the whole mask or nothing."""
    value, sets = c.read(a, m["t"]), _sets(c, members)
    out = c.write(d.first if isinstance(d, Pair) else d, "u32")
    found = c.write(d.second, "pred") if isinstance(d, Pair) else None

    def run() -> None:
        for running in sets():
            warps = value.reshape(-1, 32)
            same = (warps[:, :, None] == warps[:, None, :]) & running.reshape(-1, 1, 32)
            words = np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1)
            whole = words == ballots(running)
            if m["f"] == "all":
                words = np.where(whole, words, np.uint32(0))
                if found is not None:
                    np.copyto(found, whole, where=running)
            np.copyto(out, words, where=running)

    return run


_REDUCTIONS = {
    "add": (np.add, 0),
    "and": (np.bitwise_and, -1),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
    "min": (np.minimum, None),
    "max": (np.maximum, None),
}


@op(r"redux\.sync\.(?P<f>add|min|max|and|or|xor)\.(?P<t>u32|s32|b32)", converges=True)
def reduce(c: Link, m, d: Operand, a: Operand, members: Operand) -> Step:
    """One value of all lanes."""
    value = c.read(a, m["t"])
    function, neutral = _REDUCTIONS[m["f"]]
    info = np.iinfo(value.dtype)
    if neutral is None:
        neutral = info.max if m["f"] == "min" else info.min
    neutral = np.array(neutral).astype(value.dtype)

    def compute(running: np.ndarray) -> np.ndarray:
        values = np.where(running, value, neutral).reshape(-1, 32)
        return np.repeat(function.reduce(values, axis=1, dtype=value.dtype), 32)

    return c.assign(c.write(d, m["t"]), _by_set(c, members, compute))


@op(r"elect\.sync", converges=True)
def elect(c: Link, m, d: Operand, members: Operand) -> Step:
    """One leader, the same for the same mask in a run; it varies with the seed."""
    sets, group = _sets(c, members), c.group
    if not isinstance(d, Pair):
        raise c.unknown("elect needs two results")
    name = c.write(d.first, "u32") if not isinstance(d.first, Sink) else None
    leads = c.write(d.second, "pred")
    lane = np.arange(c.lanes) % 32

    def run() -> None:
        for running in sets():
            chosen = np.repeat(
                [group.machine.leader(row) for row in running.reshape(-1, 32)], 32
            ).astype(np.uint32)
            np.copyto(leads, lane == chosen, where=running)
            if name is not None:
                np.copyto(name, chosen, where=running)

    return run
