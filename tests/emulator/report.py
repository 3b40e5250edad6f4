"""Reports of a run that stands still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emulator.errors import EmulatorError

if TYPE_CHECKING:
    from emulator.machine import Machine


def deadlock(machine: Machine) -> EmulatorError:
    """Say what each warp waits for; a phase that lacks only bytes is named as such."""
    lines = []
    kind, first = "deadlock", None
    for cluster in machine.clusters:
        for cta in cluster.ctas:
            for group in cta.groups:
                for fragment in group.fragments:
                    group.current = fragment
                    instruction = machine.kernel.instructions[fragment.pc]
                    where = group.where(instruction)
                    first = first or where
                    lanes = f", {fragment.count} lanes" if fragment.count % 32 else ""
                    if fragment.converging:
                        if all(f.wait is None for f in group.fragments):
                            kind, first = "divergence", where
                        reason = "waits for the other lanes of its warp"
                    elif fragment.wait is None:
                        reason = "could go on"
                    else:
                        reason = fragment.wait.describe()
                        for barrier in fragment.wait.barriers:
                            if barrier.pending == 0 and barrier.tx and kind == "deadlock":
                                kind, first = "transaction bytes", where
                    lines.append(f"{where}{lanes}\n    {reason}")
    return EmulatorError(kind, "no warp can go on:\n  " + "\n  ".join(lines), first)
