"""The machine: clusters that run, the scheduler, and what all CTAs share."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.agents import Agents
from emulator.cta import Cluster, Cta
from emulator.errors import EmulatorError
from emulator.memory import Memory
from emulator.options import Options
from emulator.races import Races
from emulator.report import deadlock
from emulator.traffic import Traffic

if TYPE_CHECKING:
    from emulator.group import Group
    from emulator.program import Program
    from emulator.spaces import Access

_PEEKS = 3  # how often a try_wait may fail before a standstill is a deadlock


class Parameters:
    """The parameter block, as a space that can be read."""

    shadow = None
    written = None

    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data + bytes(16 - len(data) % 16), np.uint8)

    def view(self, unit: int) -> np.ndarray:
        """Return the block as unsigned integers."""
        return self.data.view(f"u{unit}")


class Machine:
    """A launch in progress."""

    def __init__(
        self,
        program: Program,
        dims: tuple[tuple[int, int, int], ...],
        smem_bytes: int,
        memory: Memory,
        options: Options,
    ) -> None:
        self.program = program
        self.kernel = program.kernel
        self.grid, self.block, self.cluster = dims
        self.smem_bytes = smem_bytes
        self.memory = memory
        self.options = options
        self.random = random.Random(options.seed)
        self.parameters = Parameters(b"")
        self.tensor_maps: dict[int, Any] = {}
        self.agents = Agents(self)
        self.races = Races(self) if options.races else None
        self.traffic = Traffic() if options.counts else None
        self.findings: list[str] = []
        self.executed: dict[int, np.ndarray] = {}  # block -> times that each warp id ran it
        self.clusters: list[Cluster] = []
        self.leaders: dict[bytes, int] = {}
        self.actors = 0
        self.num_ctas = 0
        self.blocks_run = 0
        steps = [range(0, g, c) for g, c in zip(self.grid, self.cluster, strict=True)]
        self.waiting = deque((x, y, z) for z in steps[2] for y in steps[1] for x in steps[0])
        self.variant = f"{options.profile} {options.races}"

    # ---- what the CTAs ask for

    def take_group(self, num_warps: int, first_warp: int) -> Group:
        """Return a group of warps for a CTA."""
        return self.program.take_group(num_warps, first_warp, self.variant)

    def take_actors(self, cta: Cta) -> int:
        """Number the warps of a CTA among all warps of the launch."""
        first = self.actors
        self.actors += cta.num_warps
        self.num_ctas += 1
        return first

    def parameter(self, offset: int, dtype: type) -> np.ndarray:
        """Return a value of the parameter block."""
        return np.frombuffer(self.parameters.data, dtype, 1, offset)[0]

    def leader(self, running: np.ndarray) -> int:
        """Choose the lane that elect.sync returns for a mask: always the same one in a run."""
        key = running.tobytes()
        if key not in self.leaders:
            lanes = np.flatnonzero(running).tolist() or [0]
            self.leaders[key] = lanes[0] if self.options.seed == 0 else self.random.choice(lanes)
        return self.leaders[key]

    def take_cluster(self) -> tuple[int, int, int] | None:
        """Return the first CTA of a cluster that has not started, and cancel its launch."""
        return self.waiting.popleft() if self.waiting else None

    # ---- memory order, for the race detector

    def fence(self, group: Group, warps: list[int]) -> None:
        """Run fence or membar."""
        if self.races is not None:
            self.races.fence(group, warps)

    def synchronise(self, access: Access, lanes: Any, where: np.ndarray, sem: str | None) -> None:
        """Order an atomic's address with the thread."""
        if self.races is not None:
            self.races.atomic(access, lanes, where, sem)

    def acquire(self, access: Access, lanes: Any, where: np.ndarray, sem: str) -> None:
        """Order a strong load with the thread."""
        if self.races is not None:
            self.races.atomic(access, lanes, where, sem, stores=False)

    def release(self, access: Access, lanes: Any, where: np.ndarray, sem: str) -> None:
        """Order a strong store with the thread."""
        if self.races is not None:
            self.races.atomic(access, lanes, where, sem, loads=False)

    # ---- running

    def run(self) -> None:
        """Run all CTAs to their end.

        Raises
        ------
        EmulatorError
            Any fault of the kernel.
        """
        standstill, failures = None, 0
        while self.clusters or self.waiting:
            while self.waiting and len(self.clusters) < self.options.resident:
                self.clusters.append(Cluster(self, self.waiting.popleft()))
            if not (self._turn() or self.agents.complete_one()):
                state = self._state()
                failures = failures + 1 if state == standstill else 0
                standstill = state
                if failures == _PEEKS or not self._fail_peeks():
                    raise deadlock(self)
            self._retire()

    def _state(self) -> list[tuple]:
        """Return where everything stands: two equal standstills mean no progress between them."""
        ctas = [cta for cluster in self.clusters for cta in cluster.ctas]
        places = [(f.pc, f.count) for cta in ctas for g in cta.groups for f in g.fragments]
        barriers = [(b.phase, b.pending, b.tx) for c in ctas for b in c.mbarriers.values()]
        return places + barriers

    def _turn(self) -> bool:
        """Let the groups run that can; starved ones only when no other can."""
        groups = [g for c in self.clusters for t in c.ctas for g in t.groups if not g.finished]
        if self.options.seed:
            self.random.shuffle(groups)
        starved = [g for g in groups if self._is_starved(g)]
        others = [g for g in groups if not self._is_starved(g)] if starved else groups
        for candidates in (others, starved):
            ran = False
            for group in candidates:
                if group.runnable():
                    ran = True
                    self._run(group)
                    self.agents.tick()
            if ran:
                return True
        return False

    def _is_starved(self, group: Group) -> bool:
        mask = (1 << group.num_warps) - 1
        starved = self.options.starve >> group.first_warp & mask
        return starved == mask

    def _run(self, group: Group) -> None:
        budget = self.options.slice
        if self.options.seed:
            budget = self.random.randint(1, budget)
        self.blocks_run += budget - group.run(budget)
        if self.blocks_run > self.options.max_blocks:
            raise EmulatorError("endless", f"more than {self.options.max_blocks} blocks")

    def _fail_peeks(self) -> bool:
        """Let every try_wait that stands still report failure once."""
        found = False
        for cluster in self.clusters:
            for cta in cluster.ctas:
                for group in cta.groups:
                    for fragment in group.fragments:
                        if fragment.wait is not None and fragment.wait.peek:
                            fragment.wait = None
                            group.peek_fails = True
                            found = True
        return found

    def _retire(self) -> None:
        """End the clusters whose threads have all exited."""
        done = [c for c in self.clusters if c.finished]
        for cluster in done:
            self.agents.finish(cluster)
            if self.races is not None:
                self.races.forget(cluster)
            for cta in cluster.ctas:
                self._close(cta)
                cta.drop()
            self.clusters.remove(cluster)

    def drop(self) -> None:
        """Drop all memories: cycles would keep them until the collector's next full run."""
        for segment in self.memory.segments:
            segment.shadow = segment.written = None
        for cluster in self.clusters:
            for cta in cluster.ctas:
                cta.drop()

    def _close(self, cta: Cta) -> None:
        if cta.tmem is not None:
            cta.tmem.close()
        for warpgroup in cta.warpgroups.values():
            warpgroup.close()
        for barrier in cta.mbarriers.values():
            if barrier.tx < 0:
                raise EmulatorError(
                    "transaction bytes", f"bytes that nobody expected: {barrier.state()}"
                )
        for group in cta.groups:
            for start, times in group.executed.items():
                row = self.executed.setdefault(start, np.zeros(cta.num_warps, np.int64))
                row[group.first_warp : group.first_warp + group.num_warps] += times
            self.program.give_group(group, self.variant)
