"""Warps that execute: registers, fragments of lanes that diverged, and linked code.

A group is one warp, or several that share their turns. Its lanes start as one fragment; a branch
that splits them makes two. The fragment with the lowest instruction runs, and fragments merge where
they meet, so that code in the order of its text reconverges as early as it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from emulator.errors import EmulatorError, Where
from emulator.flight import Flight, watch
from emulator.hazards import unwaited_use
from emulator.link import HANDLED, Step, bind
from emulator.operands import Instruction, Symbol
from emulator.registers import DTYPES, RegisterFile
from emulator.special import special_values

if TYPE_CHECKING:
    from emulator.cta import Cta
    from emulator.program import Program


class Code(NamedTuple):
    """A linked basic block."""

    steps: tuple[Step, ...]
    end: Step | None  # decides where to go; None: to `following`
    following: int
    converges: bool
    size: int


@dataclass
class Wait:
    """Why a fragment stands still, and when it may go on.

    `peek` marks a try_wait, which may also report failure.
    """

    ready: Callable[[], bool]
    describe: Callable[[], str]
    peek: bool = False
    barriers: list = field(default_factory=list)
    after: Callable[[], None] | None = None  # run when the fragment goes on


@dataclass(eq=False)
class Fragment:
    """Lanes that execute together."""

    pc: int
    mask: np.ndarray
    count: int
    wait: Wait | None = None
    converging: bool = False


def _unwaited() -> None:
    raise EmulatorError("unwaited load", "a register of tcgen05.ld is used before tcgen05.wait::ld")


class Group:
    """The execution state of `num_warps` warps of one CTA."""

    def __init__(self, program: Program, num_warps: int) -> None:
        self.program = program
        self.num_warps = num_warps
        self.lanes = 32 * num_warps
        self.file = RegisterFile(program.kernel.registers, self.lanes)
        self.active = np.zeros(self.lanes, bool)
        self.guarded = np.zeros(self.lanes, bool)
        self.codes: tuple[dict[int, Code], dict[int, Code]] = ({}, {})  # masked, full
        self.specials: dict[tuple[str, str], np.ndarray] = {}
        self.symbols: dict[tuple[Symbol, str], np.ndarray] = {}
        self.fragments: list[Fragment] = []
        self.lane_warp = np.repeat(np.arange(num_warps), 32)

    def start(self, cta: Cta, first_warp: int) -> None:
        """Begin a CTA's warps at the kernel's first instruction."""
        self.cta = cta
        self.machine = cta.machine
        self.first_warp = first_warp
        self.file.clear()
        thread = first_warp * 32 + np.arange(self.lanes)
        live = thread < cta.num_threads
        self.fragments = [Fragment(0, live, int(live.sum()))]
        self.current = self.fragments[0]
        self._count_live()
        self.peek_fails = False
        self.tried: set[int] = set()  # try_wait instructions that have failed once
        self.executed: dict[int, np.ndarray] = {}
        self.lane_actor = cta.first_actor + first_warp + self.lane_warp
        self.local = np.zeros((self.lanes, self.program.kernel.local_bytes), np.uint8)
        for (name, type_name), row in self.specials.items():
            row[...] = special_values(self, name).astype(DTYPES[type_name])
        for (symbol, _), row in self.symbols.items():
            row[...] = self._place(symbol)
        self.pending: dict[str, list] = {}  # asynchronous work of the warps, by kind
        self.flights = [Flight(self.program) for _ in range(self.num_warps)]

    # ---- operands

    def special(self, name: str, type_name: str) -> np.ndarray:
        """Return the lanes' values of a special register."""
        key = (name, type_name)
        if key not in self.specials:
            self.specials[key] = special_values(self, name).astype(DTYPES[type_name])
        return self.specials[key]

    def symbol(self, symbol: Symbol, type_name: str) -> np.ndarray:
        """Return the address of a symbol; 64-bit ones of shared memory stay in its window."""
        key = (symbol, type_name)
        if key not in self.symbols:
            row = np.empty(self.lanes, DTYPES[type_name])
            row[...] = self._place(symbol)
            self.symbols[key] = row
        return self.symbols[key]

    def _place(self, symbol: Symbol) -> int:
        if symbol.space == "shared":
            return self.cta.window + symbol.offset
        return self.machine.memory.symbol_address(symbol)

    # ---- places

    def where(self, instruction: Instruction) -> Where:
        """Name the instruction and the first warp of the current fragment."""
        source = self.program.source(instruction)
        if not self.fragments:
            return Where((0, 0, 0), 0, instruction.line, instruction.text[:200], source)
        warp = self.first_warp + int(self.current.mask.argmax()) // 32
        return Where(self.cta.index, warp, instruction.line, instruction.text[:200], source)

    def name(self, warp: int) -> str:
        """Name one of the warps in a report."""
        return f"CTA {self.cta.index} warp {self.first_warp + warp}"

    def actor(self, warp: int) -> int:
        """Number one of the warps among all of the launch."""
        return self.cta.first_actor + self.first_warp + warp

    def warps_of(self, lanes: np.ndarray) -> list[int]:
        """Return the warps that lanes belong to."""
        return [0] if self.num_warps == 1 else np.unique(lanes // 32).tolist()

    def live_lanes(self) -> np.ndarray:
        """Return the lanes that have not exited."""
        return np.logical_or.reduce([f.mask for f in self.fragments])

    def _count_live(self) -> None:
        """Count the lanes and the warps that have not exited."""
        self.live_threads = sum(f.count for f in self.fragments)
        self.live_warps = 0
        if self.fragments:
            self.live_warps = int(self.live_lanes().reshape(-1, 32).any(1).sum())

    # ---- running

    @property
    def finished(self) -> bool:
        """Whether all lanes have exited."""
        return not self.fragments

    def runnable(self) -> bool:
        """Whether some fragment can go on."""
        return any(f.wait is None or f.wait.ready() for f in self.fragments if not f.converging)

    def run(self, budget: int) -> int:
        """Run up to `budget` blocks; returns how many are left when all lanes wait or are done."""
        while budget > 0 and (fragment := self._choose()) is not None:
            self.current = fragment
            budget = self._advance(fragment, budget)
        return budget

    def _choose(self) -> Fragment | None:
        best = None
        for fragment in self.fragments:
            if fragment.converging:
                continue
            if fragment.wait is not None:
                if not fragment.wait.ready():
                    continue
                if fragment.wait.after is not None:
                    fragment.wait.after()
                fragment.wait = None
            if best is None or fragment.pc < best.pc:
                best = fragment
        return best

    def _advance(self, fragment: Fragment, budget: int) -> int:
        full = fragment.count == self.lanes
        codes = self.codes[full]
        if not full:
            self.active[:] = fragment.mask
        alone = len(self.fragments) == 1
        pc = fragment.pc
        executed = self.executed
        while budget > 0:
            code = codes.get(pc)
            if code is None:
                fragment.pc = pc
                code = codes[pc] = self._link(pc, full=full)
            if not alone and self._meets(fragment, pc, code):
                return budget
            budget -= 1
            if pc not in executed:
                executed[pc] = np.zeros(self.num_warps, np.int64)
            running = 1 if full else self._warps_running()
            executed[pc] += running
            fragment.pc = start = pc
            iterator = iter(code.steps)
            try:
                for step in iterator:
                    step()
                pc = code.following if code.end is None else code.end()
            except EmulatorError as error:
                raise self._located(error, fragment.pc, code, iterator) from error
            if pc == HANDLED:
                if fragment.wait is not None and fragment.pc == start:
                    executed[start] -= running  # it will run when it goes on
                return budget
        fragment.pc = pc
        return budget

    def _warps_running(self) -> np.ndarray | int:
        if self.num_warps == 1:
            return 1
        return self.active.reshape(-1, 32).any(1)

    def _located(self, error: EmulatorError, pc: int, code: Code, iterator: object) -> Exception:
        if error.where is not None:
            return error
        done = len(code.steps) - iterator.__length_hint__()  # type: ignore[attr-defined]
        place = pc + done - (1 if iterator.__length_hint__() or code.end is None else 0)
        instruction = self.program.kernel.instructions[min(place, pc + code.size - 1)]
        return EmulatorError(error.kind, error.message, self.where(instruction))

    def _link(self, pc: int, *, full: bool) -> Code:
        block = self.program.block_at(pc)
        steps = [bind(self, i, masked=not full) for i in block.instructions]
        if self.machine.options.profile == "strict":
            place = unwaited_use(block.instructions)
            if place is not None:
                steps[place] = _unwaited
        if self.program.has_wgmma:
            watch(self, block.instructions, steps)
        end = None
        following = block.start + len(steps)
        if block.ends:
            end = steps.pop()
            if isinstance(end, int):  # an unconditional branch
                end, following = None, end
        return Code(tuple(steps), end, following, block.converges, len(block.instructions))

    # ---- divergence

    def _meets(self, fragment: Fragment, pc: int, code: Code) -> bool:
        """Merge with a fragment that stands here, or give way; True: choose again."""
        fragment.pc = pc
        for other in self.fragments:
            if other is not fragment and other.pc == pc and other.wait is None:
                other.mask = other.mask | fragment.mask
                other.count += fragment.count
                other.converging = False
                self.fragments.remove(fragment)
                return True
        if code.converges and not self._whole_warps(fragment):
            fragment.converging = True
            return True
        lowest = min(
            (f.pc for f in self.fragments if f.wait is None and not f.converging), default=pc
        )
        return lowest < pc

    def _whole_warps(self, fragment: Fragment) -> bool:
        """Whether the fragment has every live lane of its warps."""
        if len(self.fragments) == 1:
            return True
        others = np.zeros(self.lanes, bool)
        for other in self.fragments:
            if other is not fragment:
                others |= other.mask
        ours = fragment.mask.reshape(-1, 32).any(1)
        return not (others.reshape(-1, 32).any(1) & ours).any()

    def release_converging(self) -> None:
        """Let fragments look again for lanes that they wait for: one has exited or merged."""
        for fragment in self.fragments:
            fragment.converging = False

    def diverge(self, taken: np.ndarray, target: int, following: int) -> int:
        """Split the current fragment: lanes of `taken` go to `target`."""
        fragment = self.current
        rest = fragment.mask & ~taken
        count = int(np.count_nonzero(taken))
        self.fragments.remove(fragment)
        self.fragments.append(Fragment(following, rest, fragment.count - count))
        self.fragments.append(Fragment(target, taken.copy(), count))
        return HANDLED

    def exit(self, lanes: np.ndarray | None, following: int) -> int:
        """End lanes of the current fragment, all of them for None."""
        fragment = self.current
        if lanes is not None:
            fragment.mask = fragment.mask & ~lanes
            fragment.count = int(np.count_nonzero(fragment.mask))
            fragment.pc = following
        if lanes is None or fragment.count == 0:
            self.fragments.remove(fragment)
        self.release_converging()
        self._count_live()
        self.cta.lanes_exited()
        return HANDLED

    def block(self, wait: Wait, resume: int, after: Callable[[], None] | None = None) -> int:
        """Let the current fragment wait; it runs `after` and goes on at `resume`."""
        wait.after = after
        self.current.wait = wait
        self.current.pc = resume
        return HANDLED

    def block_parts(self, parts: list[tuple[np.ndarray, Wait]], resume: int) -> int:
        """Let lanes of the current fragment wait, each part for itself; the others go on."""
        fragment = self.current
        self.fragments.remove(fragment)
        rest = fragment.mask.copy()
        for lanes, wait in parts:
            rest &= ~lanes
            self.fragments.append(Fragment(resume, lanes, int(lanes.sum()), wait))
        if rest.any():
            self.fragments.append(Fragment(resume, rest, int(rest.sum())))
        return HANDLED
