"""State of barriers: mbarrier objects, named barriers, the cluster's barrier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from emulator.errors import EmulatorError

if TYPE_CHECKING:
    from emulator.cta import Cta

MAX_COUNT = (1 << 20) - 1


@dataclass(eq=False)
class MBarrier:
    """An mbarrier: arrivals and bytes that its current phase still awaits.

    `phase` counts the phases that are complete; `clock` and `moments` belong to the race detector.
    """

    cta: Cta
    offset: int
    expected: int
    pending: int = 0
    tx: int = 0
    phase: int = 0
    clock: Any = None
    seen: dict[int, int] = field(default_factory=dict)  # actor -> phases that it has seen complete
    arrivals: list[str] = field(default_factory=list)  # the latest ones, for reports
    moments: list[tuple[int, int, int]] = field(default_factory=list)  # phase, actor, its clock

    def __post_init__(self) -> None:
        self.pending = self.expected

    def name(self) -> str:
        """Name the barrier in a report."""
        return f"mbarrier at {self.offset:#x} of CTA {self.cta.index}"

    def state(self) -> str:
        """Describe the phase."""
        last = ", ".join(self.arrivals[-3:]) or "none"
        return (
            f"{self.name()}: phase {self.phase} (parity {self.phase & 1}), "
            f"{self.pending} of {self.expected} arrivals pending, tx {self.tx}, latest: {last}"
        )

    def arrive(self, count: int, who: str) -> None:
        """Count arrivals."""
        if count < 1 or count > self.pending:
            raise EmulatorError("barrier", f"{count} arrivals by {who} at {self.state()}")
        self.pending -= count
        self._note(who)
        self._advance()

    def expect(self, num_bytes: int) -> None:
        """Expect more bytes in this phase."""
        self.tx += num_bytes
        if abs(self.tx) > MAX_COUNT:
            raise EmulatorError("barrier", f"tx-count out of range: {self.state()}")

    def complete(self, num_bytes: int, who: str) -> None:
        """Count bytes that have arrived."""
        self.tx -= num_bytes
        if abs(self.tx) > MAX_COUNT:
            raise EmulatorError("barrier", f"tx-count out of range: {self.state()}")
        self._note(who)
        self._advance()

    def _note(self, who: str) -> None:
        self.arrivals.append(who)
        del self.arrivals[:-3]

    def _advance(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected

    def passed(self, parity: int) -> bool:
        """Whether the latest phase of that parity is complete: the current one has the other."""
        return self.phase & 1 != parity & 1


class NamedBarrier:
    """One of a CTA's 16 barriers; counts warps."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta = cta
        self.number = number
        self.generation = 0
        self.arrived = 0
        self.expected: int | None = None  # warps; None: all that live
        self.tally: dict[int, list[int]] = {}  # generation -> predicates that are true, threads
        self.clock: Any = None

    def arrive(self, warps: int, expected: int | None) -> int:
        """Count warps; returns the generation that they belong to."""
        if self.arrived and expected != self.expected:
            raise EmulatorError(
                "barrier",
                f"barrier {self.number} awaits {self.expected} warps, a warp arrives with a count "
                f"of {expected}",
            )
        self.expected = expected
        self.arrived += warps
        generation = self.generation
        if expected is not None and self.arrived > expected:
            raise EmulatorError(
                "barrier", f"barrier {self.number}: {self.arrived} warps for {expected}"
            )
        self.check()
        return generation

    def check(self) -> None:
        """Open the barrier where all have arrived."""
        if not self.arrived:
            return
        wanted = self.cta.live_warps() if self.expected is None else self.expected
        if self.arrived >= wanted:
            self.generation += 1
            self.arrived = 0

    def state(self) -> str:
        """Describe who is missing."""
        wanted = self.cta.live_warps() if self.expected is None else self.expected
        return f"barrier {self.number} of CTA {self.cta.index}: {self.arrived} of {wanted} warps"


class ClusterBarrier:
    """The barrier of all threads of a cluster; arrive and wait are separate."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.generation = 0
        self.arrived = 0
        self.clock: Any = None

    def arrive(self, lanes: int) -> int:
        """Count threads; returns the generation that they belong to."""
        self.arrived += lanes
        generation = self.generation
        self.check()
        return generation

    def check(self) -> None:
        """Open the barrier where all live threads have arrived."""
        if self.arrived and self.arrived >= sum(c.live_threads() for c in self.cluster.ctas):
            self.generation += 1
            self.arrived = 0

    def state(self) -> str:
        """Describe who is missing."""
        wanted = sum(c.live_threads() for c in self.cluster.ctas)
        return f"barrier of the cluster: {self.arrived} of {wanted} threads"
