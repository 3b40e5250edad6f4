"""How a run is scheduled and what it checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LATE = 1 << 30  # async_delay: asynchronous work happens only when no warp can go on


@dataclass(frozen=True)
class Options:
    """Options of a run; every default is the friendliest choice.

    Parameters
    ----------
    seed : int
        Of the scheduler's choices; 0 takes the warps in order.
    async_delay : int
        0: asynchronous work happens when it is issued. n: a pending piece happens with chance 1/n
        at each turn, in any order that its rules allow. `LATE`: only when no warp can go on.
    slice : int
        Basic blocks that a warp may run in one turn.
    starve : int
        Bit mask of warp ids that run only when all others are blocked.
    resident : int
        Clusters that run at the same time.
    group : int
        Warps that share their turns, instruction by instruction, while they agree on their path.
        1 interleaves every warp; more is faster.
    descending : bool
        Serve the lanes of an atomic from the last to the first.
    profile : {"strict", "practice"}
        strict follows the PTX text on tcgen05 fences and on tcgen05.ld results before their wait;
        practice takes a barrier wait as a tcgen05 fence, as NVIDIA's own kernels do.
    races : bool
        Detect races (vector clocks over warps and asynchronous agents).
    counts : bool
        Count for a model: a try_wait stands still until its phase is complete, so that a wait is
        issued once in every schedule, and the bytes of global memory are followed.
    num_sms : int
        %nsmid.
    truncate : bool
        Round the sums of an MMA towards zero instead of to nearest: the pessimistic variant.
    max_blocks : int
        Basic blocks of all warps after which the run is called endless.
    """

    seed: int = 0
    async_delay: int = 0
    slice: int = 500
    starve: int = 0
    resident: int = 4
    group: int = 1
    descending: bool = False
    profile: str = "practice"
    races: bool = False
    counts: bool = False
    num_sms: int = 148
    truncate: bool = False
    max_blocks: int = 1 << 40

    def __post_init__(self) -> None:
        if self.profile not in ("strict", "practice"):
            raise ValueError(f"profile must be 'strict' or 'practice', got {self.profile!r}")
        for name in ("slice", "resident", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def _schedules() -> tuple[dict[str, Any], ...]:
    """In order, at random, asynchronous work last, and each group of warps starved in turn."""
    plain = [
        {},
        {"seed": 1, "async_delay": 3},
        {"seed": 2, "async_delay": 12},
        {"seed": 3, "async_delay": 40, "slice": 5},
        {"seed": 4, "async_delay": LATE},
        {"seed": 5, "async_delay": LATE, "slice": 3},
    ]
    starved = [
        {"seed": 6 + quad, "async_delay": delay, "starve": 0xF << 4 * quad}
        for quad in range(4)
        for delay in (2, LATE)
    ]
    alone = [{"seed": 20 + warp, "async_delay": 2, "starve": 1 << warp} for warp in range(12, 16)]
    halves = [{"seed": 30, "starve": 0xFF}, {"seed": 31, "starve": 0xFF00}]
    return (*plain, *starved, *alone, *halves)


SCHEDULES = _schedules()
