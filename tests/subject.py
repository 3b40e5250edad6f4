"""A kernel as it is verified: its text, its launches for a proof, its emulated case.

A `Subject` answers two questions about a text, the kernel's own or a mutant of it: does SentryWard
prove it (L1), and does the emulator find fault with it in a schedule (L2)?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import emulation
import sentry
from ptx_text import Text, normalised

from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.schedule import Schedule

# The project's own emulator detects races; another one, named by the environment, may stand in.
HAS_DETECTOR = emulation.OWN
RACES: dict[str, Any] = {"races": True, "profile": "strict"}
# A mutant that runs for longer than this is stuck.
BOUND = {"max_blocks": 3_000_000} if HAS_DETECTOR else {"max_ins": 20_000_000}


@dataclass(frozen=True)
class Launch:
    """A launch for SentryWard: the plan, and what the tables that parameters point to hold."""

    plan: LaunchPlan
    contents: Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Subject:
    """A kernel.

    Parameters
    ----------
    name : str
    schedule : Schedule
        Names of its barriers.
    text, shipped : callable
        Compile the verification variant, and the text without the changes that make it provable.
    launches : mapping
        Launches for a proof by name, the smallest first.
    small : int
        How many of them are small enough to prove every mutant in.
    emulate : callable
        ``emulate(ptx, schedule)`` raises where the emulator, or a wrong output, finds fault.
    """

    name: str
    schedule: Schedule
    text: Callable[[], Text]
    shipped: Callable[[], Text]
    launches: Mapping[str, Callable[[], Launch]]
    small: int
    emulate: Callable[[str, Mapping[str, Any]], None]

    def prove(self, ptx: str, launch: str, *, seconds: float = 600) -> sentry.Verdict:
        """Let SentryWard check a text in one of the launches."""
        chosen = self.launches[launch]()
        return sentry.prove(ptx, chosen.plan, chosen.contents, seconds=seconds)

    def fault(self, ptx: str, schedule: Mapping[str, Any]) -> str:
        """Return what the emulator finds in a schedule; nothing where all is well."""
        emulation.emulator()
        try:
            self.emulate(normalised(ptx), schedule)
        except (RuntimeError, AssertionError) as error:
            return f"{type(error).__name__}: {error}".split("\n")[0][:160]
        return ""
