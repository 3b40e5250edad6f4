"""The race detector: vector clocks over warps and asynchronous agents.

Every warp is an actor, and so is every agent that works for it: a TMA box, the MMAs of a CTA, the
tensor memory loads and stores of a warp. An actor's clock counts its releases; a warp knows of the
others up to the clocks in its planes:

    SEEN       all that happened before, by synchronisation
    PROXY      the part of it that generic accesses published to the async proxy (fence.proxy.async)
    TENSOR     the part that orders tcgen05 accesses
    SENT, GOT  what tcgen05.fence::before published, and what awaits tcgen05.fence::after
    PUBLIC     what a fence at the GPU's scope published; an atomic carries it
    PENDING    what atomics brought and awaits a fence

Barriers collect the planes of those who arrive, and when a phase ends give them to those who wait.
Under the practice profile a barrier carries TENSOR itself. Actors are numbered inside a cluster;
`foreign` has what a warp knows of other clusters (through atomics in global memory), by cluster.

Not seen: races between lanes of one warp; in global memory, more than two readers of a cell that
are not ordered among themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.memory import window_of
from emulator.operands import SIZES
from emulator.shadow import CellShadow, GlobalShadow, TensorShadow

if TYPE_CHECKING:
    from emulator.cta import Cluster, Cta
    from emulator.group import Group
    from emulator.memory import Segment
    from emulator.spaces import Access

SEEN, PROXY, TENSOR, SENT, GOT, PUBLIC, PENDING = range(7)
PLANES = 7
_SLOTS = 768  # pieces of work of a cluster that can be told apart at a time
_AGENTS = 8  # lasting agents of a CTA besides the two of each warp


class Clock:
    """What an asynchronous piece knows: planes, and its own actor and time."""

    def __init__(self, domain: Domain, planes: np.ndarray, foreign: dict, actor: int) -> None:
        self.domain = domain
        self.planes = planes
        self.foreign = foreign
        self.actor = actor
        self.time = domain.time[actor]


class Domain:
    """The actors of a cluster, of which `num_slots` are pieces of asynchronous work."""

    def __init__(self, cluster: Cluster, number: int, num_slots: int) -> None:
        self.cluster = cluster
        self.num_slots = num_slots
        self.number = number
        self.warps_per_cta = -(-int(np.prod(cluster.machine.block)) // 32)
        self.num_warps = self.warps_per_cta * int(np.prod(cluster.machine.cluster))
        ctas = self.num_warps // self.warps_per_cta
        self.capacity = 4 * self.num_warps + _AGENTS * ctas + num_slots
        self.planes = np.zeros((self.num_warps, PLANES, self.capacity), np.int32)
        self.time = np.zeros(self.capacity, np.int32)
        self.time[: self.num_warps] = 1
        warps = np.arange(self.num_warps)
        self.planes[warps, SEEN, warps] = 1
        self.foreign: list[dict[int, np.ndarray]] = [{} for _ in range(self.num_warps)]
        self.names = [
            f"warp {w % self.warps_per_cta} of CTA rank {w // self.warps_per_cta}"
            for w in range(self.num_warps)
        ]
        self.is_async = np.zeros(self.capacity, bool)
        self.agents: dict[Any, int] = {}
        self.slots: list[int] = []
        self.pipes: dict[Any, Clock] = {}

    def agent(self, key: Any, name: str, *, is_async: bool = True) -> int:
        """Return the actor of a lasting agent."""
        if key not in self.agents:
            self.agents[key] = self._new(name, is_async=is_async)
        return self.agents[key]

    def _new(self, name: str, *, is_async: bool) -> int:
        actor = len(self.names)
        if actor == self.capacity:
            raise RuntimeError("the race detector has run out of actors")
        self.names.append(name)
        self.is_async[actor] = is_async
        return actor

    def slot(self, seen: np.ndarray, name: str) -> int:
        """Return an actor for one piece of work: a new one, or one whose last end is known."""
        for actor in self.slots:
            if seen[actor] >= self.time[actor]:
                self.names[actor] = name
                return actor
        if len(self.slots) == self.num_slots:  # reuse the oldest: its last work may be missed
            self.slots.append(self.slots.pop(0))
            self.names[self.slots[-1]] = name
            return self.slots[-1]
        self.slots.append(self._new(name, is_async=True))
        return self.slots[-1]

    def warp(self, group: Group, warp: int) -> int:
        """Return the actor of a warp of a group."""
        return group.cta.rank * self.warps_per_cta + group.first_warp + warp

    def lanes(self, group: Group) -> np.ndarray:
        """Return the actor of each lane of a group."""
        return group.cta.rank * self.warps_per_cta + group.first_warp + group.lane_warp


class Holder:
    """What a barrier or an address gives to those who wait: planes, by cluster."""

    def __init__(self) -> None:
        self.by_cluster: dict[int, np.ndarray] = {}

    def join(self, number: int, planes: np.ndarray) -> None:
        """Collect."""
        if number in self.by_cluster:
            held = self.by_cluster[number]
            np.maximum(held, planes, out=held)
        else:
            self.by_cluster[number] = planes.copy()

    def merge(self, other: Holder) -> None:
        """Collect all that another one holds."""
        for number, planes in other.by_cluster.items():
            self.join(number, planes)


class Races:
    """The detector of a launch; all its methods are called by the instructions."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.strict = machine.options.profile == "strict"
        self.domains: dict[int, Domain] = {}
        self.addresses: dict[tuple, Holder] = {}
        self.grains = _grains(machine.kernel)
        self.num_slots = _SLOTS if _has_agents(machine.kernel) else _AGENTS
        machine.memory.on_new = self.watch_segment
        for segment in machine.memory.segments:
            self.watch_segment(segment)

    # ---- what is watched

    def watch_segment(self, segment: Segment) -> None:
        """Follow an object in global memory."""
        segment.shadow = GlobalShadow(self, segment, self.grains["global"])

    def watch_cluster(self, cluster: Cluster) -> None:
        """Follow the shared memory of a new cluster."""
        domain = Domain(cluster, len(self.domains), self.num_slots)
        self.domains[id(cluster)] = domain
        cluster.domain = domain
        for cta in cluster.ctas:
            cta.shared.shadow = CellShadow(
                self, domain, len(cta.shared.bytes), self.grains["shared"], "shared memory"
            )

    def watch_tmem(self, memory: Any) -> None:
        """Follow a tensor memory."""
        memory.shadow = TensorShadow(self, memory.cta.cluster.domain)

    def forget(self, cluster: Cluster) -> None:
        """Drop what only a cluster that has ended needs."""
        domain = cluster.domain
        domain.pipes.clear()
        domain.foreign.clear()
        domain.planes = domain.planes[:0].copy()

    def domain(self, cta: Cta) -> Domain:
        """Return the actors that a CTA belongs to."""
        return cta.cluster.domain

    # ---- barriers

    def release(self, group: Group, warps: list[int], barrier: Any) -> None:
        """Give what the warps know to a barrier; what they do next is later."""
        domain = self.domain(group.cta)
        barrier.clock = barrier.clock or Holder()
        for warp in warps:
            actor = domain.warp(group, warp)
            planes = domain.planes[actor]
            if not self.strict:
                np.maximum(planes[SENT], planes[TENSOR], out=planes[SENT])
            barrier.clock.join(domain.number, planes)
            for number, known in domain.foreign[actor].items():
                barrier.clock.join(number, known)
            self._tick(domain, actor)

    def note_arrivals(self, group: Group, warps: list[int], barrier: Any) -> None:
        """Keep when the warps arrive at a phase; the latest 64 arrivals are kept."""
        domain = self.domain(group.cta)
        actors = [domain.warp(group, warp) for warp in warps]
        barrier.moments += [(barrier.phase, actor, int(domain.time[actor])) for actor in actors]
        del barrier.moments[:-64]

    def phases_known(self, group: Group, warp: int, barrier: Any) -> int:
        """Count the phases that were complete at some arrival that the warp knows of."""
        domain = self.domain(group.cta)
        seen = domain.planes[domain.warp(group, warp), SEEN]
        known = (phase for phase, actor, time in barrier.moments if seen[actor] >= time)
        return max(known, default=0)

    def _tick(self, domain: Domain, actor: int) -> None:
        domain.time[actor] += 1
        domain.planes[actor, SEEN, actor] = domain.time[actor]

    def acquire(self, group: Group, warps: list[int], barrier: Any) -> None:
        """Take what the arrivals of a barrier's complete phases knew."""
        if barrier.opened is None:
            return
        domain = self.domain(group.cta)
        for warp in warps:
            actor = domain.warp(group, warp)
            for number, held in barrier.opened.by_cluster.items():
                if number == domain.number:
                    self._take(domain.planes[actor], held)
                else:
                    _join_foreign(domain.foreign[actor], number, held)

    def _take(self, planes: np.ndarray, held: np.ndarray) -> None:
        # Not PUBLIC and PENDING: a fence serves the atomics of its own thread.
        for plane in (SEEN, PROXY):
            np.maximum(planes[plane], held[plane], out=planes[plane])
        # What a fence published stays so along a chain of barriers: only its ends need fences.
        for plane in (SENT, GOT if self.strict else TENSOR):
            np.maximum(planes[plane], held[SENT], out=planes[plane])

    # ---- fences

    def fence_proxy(self, group: Group, warps: list[int]) -> None:
        """Publish all that is known to the async proxy."""
        domain = self.domain(group.cta)
        for warp in warps:
            planes = domain.planes[domain.warp(group, warp)]
            np.maximum(planes[PROXY], planes[SEEN], out=planes[PROXY])

    def fence_tmem(self, group: Group, warps: list[int], *, before: bool) -> None:
        """Run tcgen05.fence."""
        domain = self.domain(group.cta)
        source, target = (TENSOR, SENT) if before else (GOT, TENSOR)
        for warp in warps:
            planes = domain.planes[domain.warp(group, warp)]
            np.maximum(planes[target], planes[source], out=planes[target])

    def fence(self, group: Group, warps: list[int]) -> None:
        """Run fence or membar: publish what is known, take what atomics brought."""
        domain = self.domain(group.cta)
        for warp in warps:
            actor = domain.warp(group, warp)
            for planes in (domain.planes[actor], *domain.foreign[actor].values()):
                np.maximum(planes[SEEN], planes[PENDING], out=planes[SEEN])
                np.maximum(planes[PUBLIC], planes[SEEN], out=planes[PUBLIC])
            self._tick(domain, actor)

    # ---- atomics and strong accesses

    def atomic(
        self,
        access: Access,
        lanes: Any,
        where: np.ndarray,
        sem: str | None,
        *,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        """Order the warps with the addresses of an atomic, a strong load or a strong store."""
        group = access.group
        domain = self.domain(group.cta)
        actors = domain.lanes(group)
        actors = actors if lanes is None else actors[lanes]
        for actor in np.unique(actors).tolist():
            for address in np.unique(where[actors == actor]).tolist():
                holder = self.addresses.setdefault(self._key(access, address), Holder())
                if loads:
                    self._receive(domain, actor, holder, sem or "relaxed")
                if stores:
                    self._send(domain, actor, holder, sem or "relaxed")

    def _key(self, access: Access, address: int) -> tuple:
        space, base = window_of(address) if access.space == "generic" else (access.space, 0)
        owner = id(access.group.cta.cluster) if space.startswith("shared") else 0
        return owner, address - base

    def _receive(self, domain: Domain, actor: int, holder: Holder, sem: str) -> None:
        plane = SEEN if sem in ("acquire", "acq_rel") else PENDING
        for number, held in holder.by_cluster.items():
            mine = domain.planes[actor]
            if number != domain.number:
                mine = domain.foreign[actor].setdefault(number, np.zeros_like(held))
            np.maximum(mine[plane], held[PUBLIC], out=mine[plane])

    def _send(self, domain: Domain, actor: int, holder: Holder, sem: str) -> None:
        planes, foreign = domain.planes[actor], domain.foreign[actor]
        if sem in ("release", "acq_rel"):
            for known in (planes, *foreign.values()):
                np.maximum(known[PUBLIC], known[SEEN], out=known[PUBLIC])
        holder.join(domain.number, planes)
        for number, known in foreign.items():
            holder.join(number, known)
        self._tick(domain, actor)

    # ---- asynchronous work

    def fork(self, group: Group, mask: np.ndarray | None) -> Clock:
        """Return the clock of a piece of work that a warp starts now."""
        domain = self.domain(group.cta)
        warp = 0 if mask is None else int(mask.argmax()) // 32
        issuer = domain.warp(group, warp)
        planes = domain.planes[issuer].copy()
        actor = domain.slot(planes[SEEN], f"work of {domain.names[issuer]}")
        domain.time[actor] += 1
        planes[SEEN, actor] = domain.time[actor]
        self._tick(domain, issuer)
        return Clock(domain, planes, dict(domain.foreign[issuer]), actor)

    def publish(self, clock: Clock, barrier: Any) -> None:
        """Let a piece of work that is done arrive at a barrier."""
        barrier.clock = barrier.clock or Holder()
        planes = clock.planes.copy()
        planes[SEEN, clock.actor] = max(planes[SEEN, clock.actor], clock.time)
        np.maximum(planes[SENT], planes[TENSOR], out=planes[SENT])
        barrier.clock.join(clock.domain.number, planes)
        for number, known in clock.foreign.items():
            barrier.clock.join(number, known)

    def join(self, group: Group, mask: np.ndarray | None, clock: Clock) -> None:
        """Let a warp know that a piece of work is done."""
        domain = self.domain(group.cta)
        warps = range(group.num_warps) if mask is None else np.unique(np.flatnonzero(mask) // 32)
        for warp in warps:
            planes = domain.planes[domain.warp(group, int(warp))]
            np.maximum(planes[SEEN], clock.planes[SEEN], out=planes[SEEN])

    # ---- tensor cores

    def issue_mma(self, group: Group, mask: np.ndarray | None, pipe: Any) -> Clock:
        """Return the clock of an MMA: all of a CTA are one actor, in order."""
        domain = self.domain(group.cta)
        warp = 0 if mask is None else int(mask.argmax()) // 32
        issuer = domain.warp(group, warp)
        actor = domain.agent(pipe, f"MMAs of CTA rank {group.cta.rank}")
        planes = domain.planes[issuer].copy()
        if pipe in domain.pipes:
            np.maximum(planes, domain.pipes[pipe].planes, out=planes)
        domain.time[actor] += 1
        planes[SEEN, actor] = planes[TENSOR, actor] = domain.time[actor]
        self._tick(domain, issuer)
        clock = Clock(domain, planes, dict(domain.foreign[issuer]), actor)
        domain.pipes[pipe] = clock
        return clock

    def commit(self, group: Group, pipe: Any) -> Clock | None:
        """Return the clock of the latest MMA of a pipe, which a commit passes on."""
        domain = self.domain(group.cta)
        if pipe not in domain.pipes:
            return self.fork(group, None)
        return domain.pipes[pipe]

    def wait_tmem(self, group: Group, warp: int, *, loads: bool) -> None:
        """Let a warp know that its loads or stores of tensor memory are done."""
        domain = self.domain(group.cta)
        actor = domain.warp(group, warp)
        key = ("load" if loads else "store", actor)
        if key in domain.agents:
            agent = domain.agents[key]
            domain.planes[actor, (SEEN, TENSOR), agent] = domain.time[agent]

    def free_tmem(self, group: Group, memory: Any, column: int, count: int) -> None:
        """Check that all accesses to an allocation are ordered before its end."""
        memory.shadow.free(group, column, count)


def _join_foreign(foreign: dict[int, np.ndarray], number: int, held: np.ndarray) -> None:
    mine = foreign.setdefault(number, np.zeros_like(held))
    np.maximum(mine[SEEN], held[SEEN], out=mine[SEEN])


def _has_agents(kernel: Any) -> bool:
    """Whether a kernel starts work that others do: TMA, MMAs, stores to other CTAs."""
    names = ("tcgen05.", "wgmma.", ".bulk", "clusterlaunchcontrol.", "st.async", "red.async")
    return any(name in i.opcode for i in kernel.instructions for name in names)


def _grains(kernel: Any) -> dict[str, int]:
    """Return the narrowest access of a kernel to each space, in bytes (at most 4)."""
    grains = {"shared": 4, "global": 4}
    for instruction in kernel.instructions:
        opcode = instruction.opcode
        if opcode.startswith(("ld.", "st.", "atom.", "red.")) and ".param" not in opcode:
            width = SIZES[opcode.rsplit(".", 1)[1]]
            for space, narrowest in grains.items():
                if space in opcode or not any(s in opcode for s in grains):
                    grains[space] = min(narrowest, width)
        elif opcode.startswith(("cp.async.bulk.tensor", "cp.reduce.async")):
            grains["global"] = min(grains["global"], 2)
    return grains
