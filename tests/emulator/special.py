"""Special registers, lane by lane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import EmulatorError

if TYPE_CHECKING:
    from emulator.group import Group

_AXES = {"x": 0, "y": 1, "z": 2}


def special_values(group: Group, name: str) -> np.ndarray:
    """Return a special register of a group's threads.

    Raises
    ------
    EmulatorError
        The register is not modelled.
    """
    cta = group.cta
    lane = np.arange(group.lanes) % 32
    thread = group.first_warp * 32 + np.arange(group.lanes)
    base, _, axis = name[1:].partition(".")
    if axis in _AXES:
        at = _AXES[axis]
        x, y, _ = cta.block
        values = {
            "tid": (thread % x, thread // x % y, thread // (x * y))[at],
            "ntid": cta.block[at],
            "ctaid": cta.index[at],
            "nctaid": cta.machine.grid[at],
            "cluster_ctaid": cta.index_in_cluster[at],
            "cluster_nctaid": cta.machine.cluster[at],
            "clusterid": cta.index[at] // cta.machine.cluster[at],
            "nclusterid": cta.machine.grid[at] // cta.machine.cluster[at],
        }
    else:
        one = np.uint64(1)
        bit = one << lane.astype(np.uint64)
        values = {
            "laneid": lane,
            "warpid": thread // 32,
            "nwarpid": -(-cta.num_threads // 32),
            "smid": cta.smid,
            "nsmid": cta.machine.options.num_sms,
            "cluster_ctarank": cta.rank,
            "cluster_nctarank": len(cta.cluster.ctas),
            "is_explicit_cluster": int(len(cta.cluster.ctas) > 1),
            "dynamic_smem_size": cta.machine.smem_bytes,
            "total_smem_size": cta.machine.smem_bytes + group.program.kernel.shared_bytes,
            "lanemask_eq": bit,
            "lanemask_lt": bit - one,
            "lanemask_le": bit * np.uint64(2) - one,
            "lanemask_gt": np.uint64(2**32) - bit * np.uint64(2),
            "lanemask_ge": np.uint64(2**32) - bit,
        }
    if base not in values:
        raise EmulatorError("unknown instruction", f"special register {name} is not modelled")
    return np.broadcast_to(np.asarray(values[base]), (group.lanes,)).copy()
