"""What can go wrong, and where."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "unknown instruction": "the text has an opcode, modifier or operand that is not modelled",
    "deadlock": "no warp can go on and nothing asynchronous is pending",
    "race": "two accesses, one a write, are not ordered by synchronisation",
    "proxy fence": "the async proxy touches generic writes without fence.proxy.async between",
    "tensor memory fence": "tcgen05 accesses of two threads without tcgen05.fence between (strict)",
    "out of bounds": "an address outside its object",
    "uninitialised read": "memory that nothing has written",
    "unwritten output": "bytes of an output that the kernel never wrote",
    "alignment": "an address that is not a multiple of what the instruction needs",
    "barrier": "an mbarrier or named barrier is misused",
    "transaction bytes": "a phase ended, or the kernel did, with other bytes than were expected",
    "phase lag": "a waiter is two phases behind: its parity is ambiguous",
    "tensor memory": "an access outside its allocation or by the wrong warp; a leak; a double free",
    "descriptor": "a descriptor with illegal or unsupported fields",
    "divergence": "an aligned or full-mask instruction without all its lanes",
    "unfinished work": "asynchronous work is in flight when the kernel ends",
    "unwaited load": "a tcgen05.ld result is used before tcgen05.wait::ld (strict)",
    "wgmma registers": "a register of a wgmma is touched without wgmma.fence or wgmma.wait_group",
    "registers": "setmaxnreg beyond the registers of the CTA",
    "trap": "the kernel ran trap",
    "endless": "more basic blocks than the limit",
}


@dataclass(frozen=True)
class Where:
    """A place in a run: CTA, warp, and the instruction."""

    cta: tuple[int, int, int]
    warp: int
    line: int
    text: str
    source: str = ""

    def __str__(self) -> str:
        place = f"CTA {self.cta} warp {self.warp}, PTX line {self.line}: {self.text}"
        return f"{place} ({self.source})" if self.source else place


class EmulatorError(RuntimeError):
    """A fault of the emulated kernel.

    Attributes
    ----------
    kind : str
        A key of `KINDS`.
    where : Where or None
        The instruction that failed.
    """

    def __init__(self, kind: str, message: str, where: Where | None = None) -> None:
        if kind not in KINDS:
            raise KeyError(kind)
        super().__init__(f"{kind}: {message}" + (f"\n  at {where}" if where else ""))
        self.kind = kind
        self.message = message
        self.where = where
