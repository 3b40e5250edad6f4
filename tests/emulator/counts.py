"""What a run costs, counted: work by role and unit, and the clocks that the units need. A model.

A role is a range of warps. Every instruction that a warp issues is counted; `work` leaves out moves
between registers, most of which vanish in SASS. The rates are vendor's and published figures for
B200, none measured here; L2 is an assumption. Latencies, the order of events and the sharing of
ports are left out, so the largest number of clocks is a lower bound on time, never a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from emulator.launch import Result

# Per clock and SM.
RATES = {
    "MMA": 8192,  # FLOP
    "ex2": 16,
    "lanes": 128,
    "issue": 4,  # warp instructions
    "SMEM operands": 128,  # bytes
    "SMEM fills": 128,  # bytes
    "L2": 64,  # bytes
}
_MOVES = ("mov", "cvta")
# Once for each thread, twice for f32x2.
_LANES = (
    *("add", "sub", "mul", "mad", "fma", "max", "min", "neg", "abs", "cvt.", "and", "or", "xor"),
    *("not", "shl", "shr", "shf", "lop3", "prmt", "setp", "selp", "popc", "bfe", "bfi"),
)
_SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")


def classify(opcode: str) -> Counter[str]:
    """Return what one issue by a warp amounts to."""
    amount: Counter[str] = Counter(issued=1)
    amount["work"] = int(not opcode.startswith(_MOVES))
    if opcode.startswith(_SPECIAL):
        amount["special"] = 1
        amount["ex2"] = int(opcode.startswith("ex2"))
    elif match := re.match(r"tcgen05\.(ld|st)\..*\.x(\d+)", opcode):
        amount[f"tmem_{match[1]}_bytes"] = 32 * 4 * int(match[2])
    elif match := re.match(r"(ld|st)\.(?:\w+\.)*?shared", opcode):
        vector = re.search(r"\.v(\d)", opcode)
        width = int(re.search(r"(\d+)$", opcode)[1]) // 8
        amount[f"shared_{match[1]}_bytes"] = 32 * width * int(vector[1] if vector else 1)
    elif opcode.startswith(_LANES):
        amount["lanes"] = 2 if "f32x2" in opcode else 1
    return amount


def work_of(result: Result, roles: Mapping[str, range] | None = None) -> dict[str, Counter[str]]:
    """Return the work of each role; without roles, of each quad of warps.

    Agents' work (`mma_flop`, `operand_bytes`, `tma_bytes_in`, `tma_bytes_out`) belongs to the warp
    that asked for it. A lane operation counts once for a warp.
    """
    count = max((len(times) for times in result.executed.values()), default=0)
    if roles is None:
        roles = {
            f"warps {first}-{min(first + 3, count - 1)}": range(first, min(first + 4, count))
            for first in range(0, count, 4)
        }
    work: dict[str, Counter[str]] = {name: Counter() for name in roles}
    for instruction, times in result.issued():
        amounts = classify(instruction.opcode)
        for name, warps in roles.items():
            issued = int(times[warps.start : warps.stop].sum())
            for unit, amount in amounts.items():
                work[name][unit] += issued * amount
    for warp, amounts in result.agent_work.items():
        for name, warps in roles.items():
            if warp in warps:
                work[name].update(amounts)
    return work


def clocks(work: Mapping[str, Counter[str]]) -> dict[str, float]:
    """Return the clocks of an SM that each unit needs for all roles."""
    total: Counter[str] = Counter()
    for amounts in work.values():
        total.update(amounts)
    return {
        "MMA": total["mma_flop"] / RATES["MMA"],
        "ex2": 32 * total["special"] / RATES["ex2"],
        "lanes": 32 * total["lanes"] / RATES["lanes"],
        "issue": total["work"] / RATES["issue"],
        "SMEM operands": total["operand_bytes"] / RATES["SMEM operands"],
        "SMEM fills": total["tma_bytes_in"] / RATES["SMEM fills"],
        "L2": (total["tma_bytes_in"] + total["tma_bytes_out"]) / RATES["L2"],
    }


COLUMNS = (
    *("issued", "work", "lanes", "special", "tmem_ld_bytes", "tmem_st_bytes"),
    *("shared_ld_bytes", "shared_st_bytes", "mma_flop", "operand_bytes"),
    *("tma_bytes_in", "tma_bytes_out"),
)


def table(work: Mapping[str, Counter[str]], per: float = 1.0) -> str:
    """Print the roles' work, divided by `per`, and the clocks of each unit."""
    lines = [" ".join([f"{'role':14}", *(f"{name:>15}" for name in COLUMNS)])]
    for name, amounts in work.items():
        cells = (f"{amounts[column] / per:15.1f}" for column in COLUMNS)
        lines.append(" ".join([f"{name:14}", *cells]))
    units = {unit: need / per for unit, need in clocks(work).items()}
    slowest = max(units, key=units.get)
    lines.append("clocks (model): " + ", ".join(f"{u} {c:.0f}" for u, c in units.items()))
    lines.append(f"bound (model): {units[slowest]:.0f} clocks, by {slowest}")
    return "\n".join(lines)
