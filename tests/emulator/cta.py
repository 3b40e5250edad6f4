"""A CTA and its cluster: shared memory, barriers, groups of warps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.barriers import MAX_COUNT, ClusterBarrier, MBarrier, NamedBarrier
from emulator.errors import EmulatorError
from emulator.flight import Warpgroup
from emulator.group import Group
from emulator.memory import SHARED_BASE
from emulator.shared import OFFSET_MASK, RANK_SHIFT, SharedMemory

if TYPE_CHECKING:
    from emulator.machine import Machine


class Cta:
    """One CTA that runs."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int]) -> None:
        machine = cluster.machine
        self.cluster = cluster
        self.machine = machine
        self.rank = rank
        self.index = index
        self.index_in_cluster = tuple(i % c for i, c in zip(index, machine.cluster, strict=True))
        self.block = machine.block
        self.num_threads = int(np.prod(machine.block))
        self.num_warps = -(-self.num_threads // 32)
        self.window = rank << RANK_SHIFT
        self.smid = 0
        self.shared = SharedMemory(machine.kernel.shared_bytes + machine.smem_bytes)
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.registers: dict[int, int] = {}
        self.warpgroups: dict[int, Warpgroup] = {}
        self.tmem = None  # TensorMemory, from the first tcgen05.alloc on
        self.groups: list[Group] = []
        self.first_actor = machine.take_actors(self)

    def start(self) -> None:
        """Give the warps their groups."""
        size = self.machine.options.group
        for first in range(0, self.num_warps, size):
            group = self.machine.take_group(min(size, self.num_warps - first), first)
            group.start(self, first)
            self.groups.append(group)

    def drop(self) -> None:
        """Drop the memories of a CTA that runs no more."""
        self.shared = self.tmem = None

    def live_warps(self) -> int:
        """Count the warps that have not exited."""
        return sum(g.live_warps for g in self.groups)

    def live_threads(self) -> int:
        """Count the threads that have not exited."""
        return sum(g.live_threads for g in self.groups)

    def lanes_exited(self) -> None:
        """Open the barriers that waited for lanes that are gone."""
        for barrier in self.barriers.values():
            if barrier.expected is None:
                barrier.check()
        self.cluster.barrier.check()

    # ---- barriers

    def barrier(self, number: int) -> NamedBarrier:
        """Return a named barrier."""
        if number not in self.barriers:
            self.barriers[number] = NamedBarrier(self, number)
        return self.barriers[number]

    def follow_wgmma(self, warp: int, what: tuple) -> None:
        """Compare a warp's wgmma instruction with those of its warpgroup."""
        number = warp // 4
        if number not in self.warpgroups:
            self.warpgroups[number] = Warpgroup(f"warpgroup {number} of CTA {self.index}")
        self.warpgroups[number].follow(warp % 4, what)

    def init_mbarrier(self, address: int, count: int) -> None:
        """Make an mbarrier in this CTA's shared memory."""
        offset = self._offset(address)
        if not 1 <= count <= MAX_COUNT:
            raise EmulatorError("barrier", f"mbarrier.init with a count of {count}")
        if offset in self.mbarriers:
            raise EmulatorError("barrier", f"init again: {self.mbarriers[offset].state()}")
        self.mbarriers[offset] = MBarrier(self, offset, count)
        self.shared.valid[offset : offset + 8] = False

    def _offset(self, address: int) -> int:
        offset = address & OFFSET_MASK
        if offset % 8:
            raise EmulatorError("alignment", f"mbarrier address {address:#x} is no multiple of 8")
        self.shared.check_range(offset, offset + 8)
        return offset

    def mbarrier(self, address: int) -> MBarrier:
        """Return the mbarrier at an address of the cluster's window."""
        cta = self.cluster.cta_at(address & (SHARED_BASE - 1))
        offset = cta._offset(address)
        if offset not in cta.mbarriers:
            raise EmulatorError(
                "barrier", f"no mbarrier was initialised at {offset:#x} of CTA {cta.index}"
            )
        return cta.mbarriers[offset]


class Cluster:
    """CTAs that share their shared memories and a barrier."""

    def __init__(self, machine: Machine, first: tuple[int, int, int]) -> None:
        self.machine = machine
        self.first = first
        self.ctas: list[Cta] = []
        self.barrier = ClusterBarrier(self)
        x, y, z = machine.cluster
        for rank in range(x * y * z):
            place = (rank % x, rank // x % y, rank // (x * y))
            index = tuple(f + p for f, p in zip(first, place, strict=True))
            self.ctas.append(Cta(self, rank, index))
        self.domain: Any = None  # of the race detector
        if machine.races is not None:
            machine.races.watch_cluster(self)
        for cta in self.ctas:
            cta.start()

    @property
    def finished(self) -> bool:
        """Whether all threads have exited."""
        return all(g.finished for c in self.ctas for g in c.groups)

    def cta_at(self, address: int) -> Cta:
        """Return the CTA that an address of the shared window points into."""
        rank = (address >> RANK_SHIFT) & 0xFF
        if rank >= len(self.ctas):
            raise EmulatorError("out of bounds", f"shared address {address:#x}: no CTA {rank}")
        return self.ctas[rank]

    def shared(self, rank: int, source: Cta, space: str) -> SharedMemory:
        """Return the memory of a CTA; .shared without ::cluster reaches only one's own."""
        if rank >= len(self.ctas):
            raise EmulatorError("out of bounds", f"shared address: no CTA {rank} in the cluster")
        if space == "shared" and rank != source.rank:
            raise EmulatorError("out of bounds", f"shared::cta address in CTA {rank}")
        return self.ctas[rank].shared
