"""Cluster launch control: a CTA takes the work of a cluster that has not started.

The response is opaque to the kernel; here it is x, y | z << 16 and a bit that says whether a
cluster was cancelled, in three words.
"""

from __future__ import annotations

import numpy as np

from emulator.link import Link, Step, op
from emulator.operands import Operand, Vector
from emulator.shared import OFFSET_MASK


@op(
    r"clusterlaunchcontrol\.try_cancel\.async(\.shared::cta)?\.mbarrier::complete_tx::bytes"
    r"(?P<cast>\.multicast::cluster::all)?\.b128"
)
def try_cancel(c: Link, m, target: Operand, barrier: Operand) -> Step:
    """Ask for the work of another cluster; the response is 16 bytes, counted on an mbarrier."""
    to, signal = c.address(target), c.address(barrier)

    def run() -> None:
        lanes = np.arange(c.lanes) if c.mask is None else np.flatnonzero(c.mask)
        for lane in lanes.tolist():
            _issue(c, int(to()[lane]) & OFFSET_MASK, int(signal()[lane]), bool(m["cast"]))

    return run


def _issue(c: Link, offset: int, at: int, cast: bool) -> None:
    group = c.group
    machine, own = group.machine, group.cta
    targets = own.cluster.ctas if cast else [own]
    barriers = [own.mbarrier(cta.rank << 24 | at & OFFSET_MASK) for cta in targets]
    clock = machine.races.fork(group, c.mask) if machine.races is not None else None

    def perform() -> None:
        found = machine.take_cluster()
        x, y, z = found or (0, 0, 0)
        response = np.array([x, y | z << 16, found is not None, 0], np.uint32).view(np.uint8)
        for cta, barrier in zip(targets, barriers, strict=True):
            shared = cta.shared
            shared.check_range(offset, offset + 16)
            if shared.shadow is not None:
                shared.shadow.write_async(clock, np.array([offset]), 16)
                machine.races.publish(clock, barrier)
            shared.bytes[offset : offset + 16] = response
            shared.valid[offset : offset + 16] = True
            barrier.complete(16, "cluster launch control")

    machine.agents.issue(group, c.instruction, "clusterlaunchcontrol.try_cancel", perform)


@op(r"clusterlaunchcontrol\.query_cancel\.is_canceled\.pred\.b128")
def is_canceled(c: Link, m, d: Operand, response: Operand) -> Step:
    """Whether a cluster was cancelled."""
    words = c.group.file.view(response.kind, response.index, "words")
    return c.assign(c.write(d, "pred"), lambda: words[:, 2] != 0)


@op(r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid(::(?P<axis>[xyz])\.b32|\.v4\.b32)\.b128")
def first_cta(c: Link, m, d: Operand, response: Operand) -> Step:
    """The first CTA of the cancelled cluster."""
    words = c.group.file.view(response.kind, response.index, "words")
    low = np.uint32(0xFFFF)
    parts = {
        "x": lambda: words[:, 0],
        "y": lambda: words[:, 1] & low,
        "z": lambda: words[:, 1] >> np.uint32(16),
    }
    if not isinstance(d, Vector):
        return c.assign(c.write(d, "u32"), parts[m["axis"]])
    outs = [
        c.assign(c.write(item, "u32"), part)
        for item, part in zip(d.items, parts.values(), strict=False)
        if type(item).__name__ != "Sink"
    ]

    def run() -> None:
        for out in outs:
            out()

    return run
