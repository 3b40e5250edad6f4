"""Who touched each cell of memory last, and whether the next one knows.

A cell is the narrowest access of the kernel. Shared and tensor memory keep the clock of every
reader; global memory keeps the last writer and two readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import EmulatorError
from emulator.tmem import CELL_LANES, COLUMNS, LANES, NUM_CELLS, column_cells

if TYPE_CHECKING:
    from emulator.group import Group
    from emulator.races import Clock, Domain, Races

_SEEN, _PROXY, _TENSOR = range(3)
_PLAIN, _STRONG = 0, 1


def _span(offsets: np.ndarray, size: int, grain: int) -> np.ndarray:
    """Return the cells of accesses of `size` bytes: [accesses, cells]."""
    first = offsets // grain
    count = max(1, size // grain)
    return first[:, None] + np.arange(count) if count > 1 else first[:, None]


class CellShadow:
    """Cells of a memory that one cluster sees."""

    def __init__(self, races: Races, domain: Domain, size: int, grain: int, name: str) -> None:
        self.races = races
        self.domain = domain
        self.grain = grain
        self.name = name
        cells = size // grain
        self.writer = np.zeros(cells, np.int16)
        self.written = np.zeros(cells, np.int32)  # the writer's time; 0: never
        self.strong = np.zeros(cells, bool)
        self.block = np.zeros(cells, np.int32)  # first instruction of the writer's block
        self.reads = np.zeros((domain.capacity, cells), np.int32)
        # The latest times of each actor anywhere: who knows them need not look at the cells.
        self.latest_write = np.zeros(domain.capacity, np.int32)
        self.latest_read = np.zeros(domain.capacity, np.int32)

    # ---- reports

    def _raise(self, kind: str, what: str, cell: int, other: int, block: int | None) -> None:
        place = "" if block is None else self._place(block)
        raise EmulatorError(
            kind,
            f"{what} of {self.name} at {self._address(cell)} is not ordered after the "
            f"{'write' if block is not None else 'read'} by {self.domain.names[other]}{place}",
        )

    def _place(self, block: int) -> str:
        instruction = self.races.machine.kernel.instructions[block]
        return f" in the block at PTX line {instruction.line}"

    def _address(self, cell: int) -> str:
        return f"{cell * self.grain:#x}"

    # ---- checks

    def _check_writer(self, cells: np.ndarray, bad: np.ndarray, what: str, kind: str) -> None:
        if bad.any():
            cell = int(np.broadcast_to(cells, bad.shape)[bad][0])
            self._raise(kind, what, cell, int(self.writer[cell]), int(self.block[cell]))

    def _check_readers(self, cells: np.ndarray, known: np.ndarray, what: str, kind: str) -> None:
        """`known` holds the times that the accessor knows of each actor."""
        rows = np.flatnonzero(self.latest_read > known)
        if not len(rows):
            return
        bad = self.reads[rows[:, None], cells] > known[rows, None]
        if bad.any():
            row, at = (int(i) for i in np.argwhere(bad)[0])
            self._raise(kind, what, int(cells[at]), int(rows[row]), None)

    def _note_read(self, actor: int, cells: np.ndarray, time: int) -> None:
        self.reads[actor, cells] = time
        self.latest_read[actor] = time

    # ---- generic accesses

    def read(
        self, group: Group, lanes: np.ndarray, offsets: np.ndarray, size: int, *, strong: bool
    ) -> None:
        """Check and note a load."""
        cells = _span(offsets, size, self.grain)
        actors = self.domain.lanes(group)[lanes][:, None]
        known = self.domain.planes[actors, _SEEN, self.writer[cells]]
        bad = self.written[cells] > known
        if strong:
            bad &= ~self.strong[cells]
        self._check_writer(cells, bad, "read", "race")
        self.reads[actors, cells] = self.domain.time[actors]
        self.latest_read[actors] = self.domain.time[actors]

    def write(
        self, group: Group, lanes: np.ndarray, offsets: np.ndarray, size: int, *, strong: bool
    ) -> None:
        """Check and note a store."""
        cells = _span(offsets, size, self.grain)
        actors = self.domain.lanes(group)[lanes][:, None]
        known = self.domain.planes[actors, _SEEN, self.writer[cells]]
        bad = self.written[cells] > known
        if strong:
            bad &= ~self.strong[cells]
        self._check_writer(cells, bad, "write", "race")
        for warp in group.warps_of(lanes):
            actor = self.domain.warp(group, warp)
            mine = cells[actors[:, 0] == actor].reshape(-1)
            if not strong:
                self._check_readers(mine, self.domain.planes[actor, _SEEN], "write", "race")
            self._note(mine, actor, self.domain.time[actor], group.current.pc, strong=strong)
        if group.num_warps > 1 and not strong:
            self._check_writer(cells, self.writer[cells] != actors, "write", "race")

    def update(self, group: Group, lanes: np.ndarray, offsets: np.ndarray, size: int) -> None:
        """Check and note an atomic: it does not race with others."""
        self.write(group, lanes, offsets, size, strong=True)

    def _note(
        self, cells: np.ndarray, actor: int, time: int, block: int, *, strong: bool = False
    ) -> None:
        self.latest_write[actor] = time
        self.writer[cells] = actor
        self.written[cells] = time
        self.strong[cells] = strong
        self.block[cells] = block

    # ---- accesses of agents

    def read_async(self, clock: Clock, offsets: np.ndarray, size: int) -> None:
        """Check and note a read through the async proxy."""
        cells = _span(offsets, size, self.grain).reshape(-1)
        self._check_async(clock, cells, "read by the async proxy")
        self._note_read(clock.actor, cells, clock.time)

    def _check_async(
        self, clock: Clock, cells: np.ndarray, what: str, *, proxy: bool = True
    ) -> None:
        ordered = self.latest_write <= clock.planes[_SEEN]
        published = self.domain.is_async | (self.latest_write <= clock.planes[_PROXY]) | (not proxy)
        if (ordered & published).all():
            return
        writer, written = self.writer[cells], self.written[cells]
        self._check_writer(cells, written > clock.planes[_SEEN][writer], what, "race")
        unpublished = proxy & (written > clock.planes[_PROXY][writer])
        unpublished &= ~self.domain.is_async[writer]
        self._check_writer(cells, unpublished, what, "proxy fence")

    def write_async(
        self, clock: Clock, offsets: np.ndarray, size: int, *, proxy: bool = True
    ) -> None:
        """Check and note a write through the async proxy, or by an agent of the generic one."""
        what = "write by the async proxy" if proxy else "asynchronous write"
        cells = np.unique(_span(offsets, size, self.grain))
        self._check_async(clock, cells, what, proxy=proxy)
        self._check_readers(cells, clock.planes[_SEEN], what, "race")
        self._note(cells, clock.actor, clock.time, 0)


class TensorShadow(CellShadow):
    """Cells of a tensor memory: loads and stores of a warp are agents of their own.

    A cell is a column of 16 lanes, the part that every access reaches whole.
    """

    def __init__(self, races: Races, domain: Domain) -> None:
        super().__init__(races, domain, NUM_CELLS, 1, "tensor memory")

    def _address(self, cell: int) -> str:
        lane, column = divmod(cell, COLUMNS)
        return f"lane {lane * CELL_LANES}, column {column}"

    def _check(
        self,
        cells: np.ndarray,
        planes: np.ndarray,
        what: str,
        *,
        readers: bool,
        fences: bool = True,
    ) -> None:
        """Check against SEEN (a race), then against TENSOR (only a fence is missing)."""
        for plane, kind in ((_SEEN, "race"), (_TENSOR, "tensor memory fence"))[: 1 + fences]:
            known = planes[plane]
            if (self.latest_write > known).any():
                bad = self.written[cells] > known[self.writer[cells]]
                self._check_writer(cells, bad, what, kind)
            if readers:
                self._check_readers(cells, known, what, kind)

    def _agent(self, group: Group, warp: int, kind: str) -> tuple[int, int]:
        domain = self.domain
        actor = domain.warp(group, warp)
        agent = domain.agent((kind, actor), f"tcgen05 {kind}s of {domain.names[actor]}")
        domain.time[agent] += 1
        return actor, agent

    def load(self, group: Group, warp: int, cells: np.ndarray) -> None:
        """Check and note tcgen05.ld."""
        actor, agent = self._agent(group, warp, "load")
        self._check(cells, self.domain.planes[actor], "tcgen05.ld", readers=False)
        self._note_read(agent, cells, self.domain.time[agent])
        if not self.races.strict:  # what uses the registers waits for them
            self.domain.planes[actor, (_SEEN, _TENSOR), agent] = self.domain.time[agent]

    def store(self, group: Group, warp: int, cells: np.ndarray) -> None:
        """Check and note tcgen05.st; the warp's earlier stores are in order with it."""
        actor, agent = self._agent(group, warp, "store")
        planes = self.domain.planes[actor].copy()
        planes[(_SEEN, _TENSOR), agent] = self.domain.time[agent]
        self._check(cells, planes, "tcgen05.st", readers=True)
        self._note(cells, agent, self.domain.time[agent], group.current.pc)

    def read_mma(self, clock: Clock, cells: np.ndarray) -> None:
        """Check and note an MMA's read."""
        self._check(cells, clock.planes, "read by tcgen05.mma", readers=False)
        self._note_read(clock.actor, cells, clock.time)

    def write_mma(self, clock: Clock, cells: np.ndarray) -> None:
        """Check and note an MMA's result."""
        self._check(cells, clock.planes, "write by tcgen05.mma", readers=True)
        self._note(cells, clock.actor, clock.time, 0)

    def free(self, group: Group, column: int, count: int) -> None:
        """Check that an allocation's accesses are ordered before its end, and forget them."""
        cells = column_cells(LANES, column, count)
        warp = int(group.current.mask.argmax()) // 32
        planes = self.domain.planes[self.domain.warp(group, warp)]
        self._check(cells, planes, "tcgen05.dealloc", readers=True, fences=False)
        self.written[cells] = 0
        self.reads[np.flatnonzero(self.latest_read)[:, None], cells] = 0


class GlobalShadow:
    """Cells of an object in global memory; clusters of all times touch them."""

    def __init__(self, races: Races, segment: Any, grain: int) -> None:
        self.races = races
        self.segment = segment
        self.grain = grain
        cells = len(segment.memory) // grain
        self.slots = {
            name: (
                np.zeros(cells, np.int32),  # cluster
                np.zeros(cells, np.int16),  # actor
                np.zeros(cells, np.int32),  # time; 0: never
                np.zeros(cells, bool),  # strong
            )
            for name in ("write", "read", "other read")
        }
        self.used: set[str] = set()  # slots that hold anything

    def _known(self, domain: Domain, planes: np.ndarray, foreign: dict, slot: tuple, cells: Any):
        """Return which cells' last accesses in a slot are ordered before."""
        cluster, actor, time, _ = (array[cells] for array in slot)
        ours = cluster == domain.number
        known = np.where(ours, planes[actor], 0)
        for number in np.unique(cluster[~ours & (time > 0)]).tolist():
            if number in foreign:
                theirs = foreign[number][_SEEN][actor]
                known = np.where(cluster == number, theirs, known)
        return time <= known

    def _check(self, what: str, actor: int, view: tuple, cells: np.ndarray, slots, strong) -> None:
        domain, planes, foreign = view
        for name in self.used.intersection(slots):
            slot = self.slots[name]
            good = self._known(domain, planes, foreign, slot, cells)
            if strong:
                good |= slot[3][cells]
            if not good.all():
                cell = int(cells[~good][0])
                number, other = int(slot[0][cell]), int(slot[1][cell])
                who = self._name(number, other)
                raise EmulatorError(
                    "race",
                    f"{what} of {self.segment.name} at byte "
                    f"{cell * self.grain + self.segment.start - self.segment.base} is not "
                    f"ordered after the {name.split()[-1]} by {who}",
                )

    def _name(self, number: int, actor: int) -> str:
        for domain in self.races.domains.values():
            if domain.number == number:
                first = domain.cluster.ctas[0].index
                return f"{domain.names[actor]}, cluster of CTA {first}"
        return f"cluster {number}"

    def _access(self, what: str, actor: int, view: tuple, cells: np.ndarray, time, strong) -> None:
        domain, planes, foreign = view
        if what == "read":
            self._check(what, actor, view, cells, ("write",), strong)
            first = self.slots["read"]
            same = (first[0][cells] == domain.number) & (first[1][cells] == actor)
            free = self._known(domain, planes, foreign, first, cells) | same
            for name, chosen in (("read", cells[free]), ("other read", cells[~free])):
                self._note(name, chosen, domain.number, actor, time, strong)
            return
        self._check(what, actor, view, cells, ("write", "read", "other read"), strong)
        self._note("write", cells, domain.number, actor, time, strong)

    def _note(self, name: str, cells: np.ndarray, number, actor, time, strong) -> None:
        if not len(cells):
            return
        self.used.add(name)
        for array, value in zip(self.slots[name], (number, actor, time, strong), strict=True):
            array[cells] = value

    def _generic(self, what: str, group: Group, lanes, offsets, size, strong) -> None:
        domain = self.races.domain(group.cta)
        cells = _span(offsets, size, self.grain)
        actors = domain.lanes(group)[lanes]
        for warp in group.warps_of(lanes):
            actor = domain.warp(group, warp)
            view = (domain, domain.planes[actor, _SEEN], domain.foreign[actor])
            mine = cells[actors == actor].reshape(-1)
            self._access(what, actor, view, mine, domain.time[actor], strong)

    def read(self, group: Group, lanes, offsets, size: int, *, strong: bool) -> None:
        """Check and note a load."""
        self._generic("read", group, lanes, offsets, size, strong)

    def write(self, group: Group, lanes, offsets, size: int, *, strong: bool) -> None:
        """Check and note a store."""
        self._generic("write", group, lanes, offsets, size, strong)

    def update(self, group: Group, lanes, offsets, size: int) -> None:
        """Check and note an atomic."""
        self._generic("write", group, lanes, offsets, size, True)

    def _async(self, what: str, clock: Clock, offsets, size: int, strong: bool) -> None:
        cells = _span(offsets, size, self.grain).reshape(-1)
        view = (clock.domain, clock.planes[_SEEN], clock.foreign)
        self._access(what, clock.actor, view, cells, clock.time, strong)

    def read_async(self, clock: Clock, offsets, size: int) -> None:
        """Check and note a read by TMA."""
        self._async("read", clock, offsets, size, False)

    def write_async(self, clock: Clock, offsets, size: int, *, atomic: bool = False) -> None:
        """Check and note a write by TMA."""
        self._async("write", clock, offsets, size, atomic)
