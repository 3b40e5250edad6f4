"""Asynchronous work: pieces that happen some time between their issue and when they are waited for.

A pipe is a queue whose pieces happen in order; pieces of different pipes happen in any order. The
options decide when: at issue, at random moments, or only when no warp can go on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import EmulatorError
from emulator.operands import Instruction
from emulator.options import LATE
from emulator.spaces import Access

if TYPE_CHECKING:
    from emulator.group import Group
    from emulator.machine import Machine


@dataclass(eq=False)
class Piece:
    """One piece of asynchronous work, and who issued it."""

    perform: Callable[[], None]
    what: str
    cta: Any
    where: Any
    pipe: Hashable = None
    done: bool = False
    arrives_alone: bool = False  # needs nobody once those before it in its pipe are done


class Agents:
    """All pieces that are pending."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pipes: dict[Hashable, deque[Piece]] = {}
        self.immediate = machine.options.async_delay == 0
        self.mma = 0  # MMA instructions so far
        self.tma = 0  # TMA boxes so far
        self.work: dict[int, Counter[str]] = {}  # warp id -> what its agents moved and multiplied

    def note(self, group: Group, lane: int, **amounts: int) -> None:
        """Count work of an agent for the warp that asked for it."""
        warp = group.first_warp + lane // 32
        self.work.setdefault(warp, Counter()).update(amounts)

    def issue(
        self,
        group: Group,
        instruction: Instruction,
        what: str,
        perform: Callable[[], None],
        *,
        pipe: Hashable = None,
    ) -> Piece:
        """Add a piece to a pipe; without one it is ordered with nothing."""
        where = group.where(instruction)
        piece = Piece(perform, what, group.cta, where, pipe)
        if pipe is None:
            pipe = piece.pipe = piece
        if self.immediate:
            self._perform(piece)
        else:
            self.pipes.setdefault(pipe, deque()).append(piece)
        return piece

    def _perform(self, piece: Piece) -> None:
        try:
            piece.perform()
        except EmulatorError as error:
            if error.where is None:
                raise EmulatorError(
                    error.kind, f"{piece.what}: {error.message}", piece.where
                ) from error
            raise
        piece.done = True

    def _advance(self, pipe: Hashable) -> None:
        queue = self.pipes[pipe]
        piece = queue.popleft()
        if not queue:
            del self.pipes[pipe]
        self._perform(piece)

    def tick(self) -> None:
        """Perhaps let a piece happen."""
        delay = self.machine.options.async_delay
        if self.pipes and delay < LATE and self.machine.random.randrange(delay) == 0:
            self._advance(self.machine.random.choice(list(self.pipes)))

    def complete_one(self) -> bool:
        """Let one piece happen because nothing else can; False: none is pending."""
        if not self.pipes:
            return False
        self._advance(self.machine.random.choice(list(self.pipes)))
        return True

    def force(self, piece: Piece) -> None:
        """Let a piece happen now, after those before it in its pipe."""
        while not piece.done:
            self._advance(piece.pipe)

    def finish(self, cluster: Any) -> None:
        """Check that no work of a cluster that has ended is pending.

        A commit whose MMAs are complete needs no thread to arrive, so it may be the last thing.
        """
        for pipe, queue in list(self.pipes.items()):
            while queue and queue[0].cta in cluster.ctas and queue[0].arrives_alone:
                self._perform(queue.popleft())
            for piece in queue:
                if piece.cta in cluster.ctas:
                    raise EmulatorError("unfinished work", f"{piece.what} is pending", piece.where)
            if not queue:
                del self.pipes[pipe]

    # ---- cp.async

    def copy_async(
        self,
        group: Group,
        instruction: Instruction,
        lanes: np.ndarray,
        *,
        targets: np.ndarray,
        sources: np.ndarray,
        sizes: np.ndarray,
        count: int,
    ) -> None:
        """Copy `sizes` bytes for each lane and fill up to `count` with 0."""
        load, store = Access(group, "global", "plain"), Access(group, "shared", "plain")

        def perform() -> None:
            data = np.zeros((len(lanes), count), np.uint8)
            whole = sizes == count
            if whole.any():
                values = load.load(sources[whole], lanes[whole], min(count, 8), -(-count // 8))
                data[whole] = np.ascontiguousarray(values).view(np.uint8).reshape(-1, count)
            for row in np.flatnonzero(~whole & (sizes > 0)).tolist():
                one = slice(row, row + 1)
                for byte in range(int(sizes[row])):
                    at = sources[one] + np.uint64(byte)
                    data[row, byte] = load.load(at, lanes[one], 1, 1)[0, 0]
            unit = min(count, 8)
            store.store(targets, lanes, data.view(f"u{unit}"))

        piece = self.issue(group, instruction, "cp.async", perform)
        group.pending.setdefault("copies", []).append(piece)

    def commit_copies(self, group: Group) -> None:
        """Close the group of the copies since the last one."""
        groups = group.pending.setdefault("copy groups", [])
        groups.append(group.pending.pop("copies", []))

    def wait_copies(self, group: Group, left: int, *, everything: bool) -> None:
        """Force all groups but the latest `left`."""
        groups = group.pending.setdefault("copy groups", [])
        if everything:
            groups.append(group.pending.pop("copies", []))
            left = 0
        while len(groups) > left:
            for piece in groups.pop(0):
                self.force(piece)
