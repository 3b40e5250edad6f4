"""Branches, exit, and instructions that change nothing here."""

from __future__ import annotations

import numpy as np

from emulator.errors import EmulatorError
from emulator.link import Link, Step, op
from emulator.operands import Operand


@op(r"bra(\.uni)?", ends=True)
def branch(c: Link, m, target: Operand) -> Step | int:
    """Go to the label, or split the lanes."""
    instruction, group = c.instruction, c.group
    taken, following = target.index, instruction.index + 1
    if instruction.guard is None:
        return taken
    mask = c.mask
    if not c.masked:
        lanes = c.lanes

        def run_full() -> int:
            count = np.count_nonzero(mask)
            if count == lanes:
                return taken
            return following if count == 0 else group.diverge(mask, taken, following)

        return run_full

    def run() -> int:
        count = np.count_nonzero(mask)
        if count == group.current.count:
            return taken
        return following if count == 0 else group.diverge(mask, taken, following)

    return run


@op(r"brx\.idx(\.uni)?", ends=True)
def branch_indexed(c: Link, m, index: Operand) -> Step:
    """Go to a label of the table; one target at a time leaves, the rest tries again."""
    group, targets, value = c.group, c.instruction.targets, c.read(index, "u32")
    here = c.instruction.index
    if c.instruction.guard is not None:
        raise c.unknown("a guarded brx is not modelled")

    def run() -> int:
        mask = group.current.mask
        first = int(value[int(mask.argmax())])
        taken = mask & (value == first)
        if int(np.count_nonzero(taken)) == group.current.count:
            return targets[first]
        return group.diverge(taken, targets[first], here)

    return run


@op(r"ret(\.uni)?|exit", ends=True)
def leave(c: Link, m) -> Step:
    """End the lanes."""
    group, following = c.group, c.instruction.index + 1
    guarded = c.instruction.guard is not None
    mask = c.mask

    def run() -> int:
        if guarded and not mask.any():
            return following
        return group.exit(mask if guarded else None, following)

    return run


@op(
    r"nop|prefetch\.tensormap|prefetch\.(global\.)?L[12]|griddepcontrol\.(wait|launch_dependents)"
    r"|nanosleep\.u32|discard\.global\.L2|prefetchu\.L1"
)
def nothing(c: Link, m, *operands: Operand) -> Step:
    """Hints, and what a single launch does not need."""
    return _nothing


def _nothing() -> None:
    return None


@op(r"trap|brkpt", ends=True)
def trap(c: Link, m) -> Step:
    """Report that the kernel gave up."""
    mask, following = c.mask, c.instruction.index + 1

    def run() -> int:
        if mask is not None and not mask.any():
            return following
        raise EmulatorError("trap", "the kernel gave up")

    return run
