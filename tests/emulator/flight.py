"""What the wgmmas of a warp and of a warpgroup may do: registers in flight, and one text for all.

The rules of the PTX ISA: wgmma.fence stands between any access to a register and a wgmma that takes
it as an accumulator or as a part of A, unless both are wgmmas of one shape that accumulate there;
until wgmma.wait_group has waited for the group of a wgmma, nothing else touches its registers. An
instruction whose guard is false counts as an access here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emulator.errors import EmulatorError
from emulator.hazards import ordinary_words, registers
from emulator.operands import Instruction

if TYPE_CHECKING:
    from emulator.group import Group
    from emulator.link import Step
    from emulator.program import Program

EVERYTHING = -1


class Warpgroup:
    """Four warps that must run the same wgmma instructions, with the same descriptors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = [0] * 4  # instructions of each warp
        self.base = 0  # instructions that all have run
        self.ahead: deque[tuple] = deque()  # what follows them, by those that are ahead

    def follow(self, warp: int, what: tuple) -> None:
        """Compare a warp's next instruction, and its operands, with the others'."""
        position = self.counts[warp] - self.base
        if position == len(self.ahead):
            self.ahead.append(what)
        elif self.ahead[position] != what:
            raise EmulatorError("divergence", f"the warps of {self.name} run different wgmmas")
        self.counts[warp] += 1
        while min(self.counts) > self.base:
            self.base += 1
            self.ahead.popleft()

    def close(self) -> None:
        """Check that all warps have run all of them."""
        if self.ahead:
            counts = ", ".join(map(str, self.counts))
            raise EmulatorError(
                "divergence", f"the warps of {self.name} ran {counts} wgmma instructions"
            )


class Multiplication(NamedTuple):
    """A wgmma in flight: its piece of work, and bits for the registers of D and A."""

    piece: Any
    result: int
    inputs: int


class Flight:
    """The registers of one warp.

    Attributes
    ----------
    touched : int
        Registers that ordinary instructions accessed since the latest wgmma.fence.
    shapes : dict of str to int
        Accumulators of the wgmmas since then, by shape.
    busy : int
        Registers of the wgmmas that nothing has waited for.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.touched = EVERYTHING
        self.shapes: dict[str, int] = {}
        self.open: list[Multiplication] = []
        self.groups: list[list[Multiplication]] = []
        self.busy = 0

    def fence(self) -> None:
        """Order all accesses so far before the wgmmas that follow."""
        self.touched = 0
        self.shapes.clear()

    def check(self, shape: str, result: int, inputs: int) -> None:
        """Check that a wgmma may take these registers now."""
        if (result | inputs) & self.touched:
            raise EmulatorError(
                "wgmma registers",
                f"no wgmma.fence after an access to {self.names((result | inputs) & self.touched)}",
            )
        for other, accumulators in self.shapes.items():
            if other != shape and accumulators & result:
                raise EmulatorError(
                    "wgmma registers",
                    f"no wgmma.fence after a wgmma of shape {other} on "
                    f"{self.names(accumulators & result)}",
                )
        for work in self._all():
            clash = work.result & inputs | work.inputs & result
            if clash:
                raise EmulatorError("wgmma registers", f"{self.names(clash)} of a wgmma in flight")

    def add(self, piece: Any, shape: str, result: int, inputs: int) -> None:
        """Follow a wgmma."""
        self.shapes[shape] = self.shapes.get(shape, 0) | result
        self.open.append(Multiplication(piece, result, inputs))
        self.busy |= result | inputs

    def commit(self) -> None:
        """Close the group."""
        self.groups.append(self.open)
        self.open = []

    def wait(self, left: int) -> list[Any]:
        """Return the pieces of all groups but the latest, which are in flight no more."""
        count = max(0, len(self.groups) - left)
        done = [work.piece for group in self.groups[:count] for work in group]
        del self.groups[:count]
        self.busy = 0
        for work in self._all():
            self.busy |= work.result | work.inputs
        return done

    def names(self, mask: int) -> str:
        """Name the first of some registers."""
        first = next(
            register.name
            for instruction in self.program.kernel.instructions
            for register in registers(instruction.operands)
            if register.kind == "b32" and mask >> register.index & 1
        )
        return first if mask.bit_count() == 1 else f"{first} and {mask.bit_count() - 1} more"

    def _all(self) -> list[Multiplication]:
        return [work for group in (*self.groups, self.open) for work in group]


def watch(group: Group, instructions: tuple[Instruction, ...], steps: list[Step]) -> None:
    """Let a block note the registers that its ordinary instructions access."""
    masks = [ordinary_words(instruction) for instruction in instructions]
    mask = 0
    for one in masks:
        mask |= one
    if not mask:
        return
    first = next(place for place, one in enumerate(masks) if one)
    step = steps[first]

    def run() -> Any:
        flights = group.flights
        for warp in np.unique(group.lane_warp[group.current.mask]).tolist():
            flight = flights[warp]
            if flight.busy & mask:
                _report(group, flight, instructions, masks)
            flight.touched |= mask
        return step()

    steps[first] = run


def _report(group: Group, flight: Flight, instructions: tuple, masks: list[int]) -> None:
    place = next(place for place, mask in enumerate(masks) if mask & flight.busy)
    raise EmulatorError(
        "wgmma registers",
        f"{flight.names(masks[place] & flight.busy)} of a wgmma in flight",
        group.where(instructions[place]),
    )
