"""st.async: stores to the shared memory of the cluster that count on an mbarrier."""

from __future__ import annotations

import numpy as np

from emulator.errors import EmulatorError
from emulator.link import Link, Step, op
from emulator.memory import UNITS
from emulator.operands import SIZES, Operand
from emulator.shared import OFFSET_MASK, RANK_SHIFT


@op(
    r"st\.async(\.weak)?(\.shared::cluster)?\.mbarrier::complete_tx::bytes"
    r"(\.v(?P<v>[24]))?\.(?P<t>[usb](32|64)|f32|f64)"
)
def store(c: Link, m, target: Operand, value: Operand, barrier: Operand) -> Step:
    """Write one unit, or a vector of them, for each lane; each counts its own bytes.

    The mbarrier must lie in the CTA that is written.
    """
    unit, count = SIZES[m["t"]], int(m["v"] or 1)
    rows = [c.read(item, f"b{8 * unit}") for item in c.items(value)]
    if len(rows) != count:
        raise c.unknown(f"{count} values expected, got {len(rows)}")
    to, signal, mask = c.address(target), c.address(barrier), c.mask

    def run() -> None:
        lanes = np.arange(c.lanes) if mask is None else np.flatnonzero(mask)
        for lane in lanes.tolist():
            values = np.array([[row[lane] for row in rows]], UNITS[unit])
            _issue(c, lane, (int(to()[lane]), int(signal()[lane])), values)

    return run


def _issue(c: Link, lane: int, at: tuple[int, int], values: np.ndarray) -> None:
    group = c.group
    machine = group.machine
    if at[0] >> RANK_SHIFT != at[1] >> RANK_SHIFT:
        raise EmulatorError("barrier", "st.async: data and mbarrier are in different CTAs")
    memory, mbarrier = group.cta.cluster.cta_at(at[0]).shared, group.cta.mbarrier(at[1])
    offset = np.array([at[0] & OFFSET_MASK])
    alone = np.zeros(c.lanes, bool)
    alone[lane] = True
    clock = machine.races.fork(group, alone) if machine.races is not None else None

    def perform() -> None:
        if memory.shadow is not None:
            memory.shadow.write_async(clock, offset, values.nbytes, proxy=False)
        memory.scatter(offset, values.itemsize, values)
        if clock is not None:
            machine.races.publish(clock, mbarrier)
        mbarrier.complete(values.nbytes, f"st.async of {group.name(lane // 32)}")

    machine.agents.issue(group, c.instruction, "st.async", perform)
