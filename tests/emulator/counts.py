"""What a run costs, counted: work by role and unit, and the clocks that the units need. A model.

The run needs the option `counts`, so that a wait counts once and global memory is followed.

A role is a range of warps. Every instruction that a warp issues is counted; `work` leaves out moves
between registers, most of which vanish in SASS. The rates are vendor's and published figures for
B200, none measured here; L2 is an assumption. Latencies, the order of events and the sharing of
ports are left out, so the largest number of clocks is a lower bound on time, never a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    "HBM": 29,  # bytes: 8 TB/s over 148 SMs at 1.86 GHz
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


def work_of(
    result: Result,
    roles: Mapping[str, range] | None = None,
    classes: Callable[[str], Counter[str]] = classify,
) -> dict[str, Counter[str]]:
    """Return the work of each role; without roles, of each quad of warps.

    Agents' work (`mma_flop`, `operand_bytes`, `tma_bytes_in`, `tma_bytes_out`: whole boxes) belongs
    to the warp that asked for it, and so do the bytes of `Traffic`. A lane operation counts once
    for a warp. `classes` says what an issue of an opcode amounts to.
    """
    if result.traffic is None:
        raise ValueError("result must be that of a run with counts=True")
    count = max((len(times) for times in result.executed.values()), default=0)
    if roles is None:
        roles = {
            f"warps {first}-{min(first + 3, count - 1)}": range(first, min(first + 4, count))
            for first in range(0, count, 4)
        }
    work: dict[str, Counter[str]] = {name: Counter() for name in roles}
    for instruction, times in result.issued():
        amounts = classes(instruction.opcode)
        for name, warps in roles.items():
            issued = int(times[warps.start : warps.stop].sum())
            for unit, amount in amounts.items():
                work[name][unit] += issued * amount
    for warp, amounts in (*result.agent_work.items(), *result.traffic.work.items()):
        for name, warps in roles.items():
            if warp in warps:
                work[name].update(amounts)
    return work


def clocks(work: Mapping[str, Counter[str]], touched: tuple[int, int]) -> dict[str, float]:
    """Return the clocks of an SM that each unit needs for all roles.

    `touched` are the bytes that must come from memory and go there (`Traffic.touched`).
    """
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
        "L2": sum(total[name] for name in _GLOBAL) / RATES["L2"],
        "HBM": sum(touched) / RATES["HBM"],
    }


_GLOBAL = ("tma_ld_bytes", "tma_st_bytes", "global_ld_bytes", "global_st_bytes")
COLUMNS = (
    *("issued", "work", "lanes", "special", "tmem_ld_bytes", "tmem_st_bytes"),
    *("shared_ld_bytes", "shared_st_bytes", "mma_flop", "operand_bytes", *_GLOBAL),
)


@dataclass(frozen=True)
class Cost:
    """The work of a launch by role, and the bytes that it touches, for each of some equal parts."""

    work: dict[str, Counter[str]]
    touched: tuple[float, float]

    @classmethod
    def of(cls, result: Result, roles: Mapping[str, range] | None, parts: float) -> Cost:
        """Divide what a launch did by `parts`."""
        work = {
            name: Counter({unit: amount / parts for unit, amount in amounts.items()})
            for name, amounts in work_of(result, roles).items()
        }
        read, written = result.traffic.touched()
        return cls(work, (read / parts, written / parts))

    def bound(self) -> tuple[float, str]:
        """Return the most clocks that a unit needs, and the unit."""
        units = clocks(self.work, self.touched)
        slowest = max(units, key=units.get)
        return units[slowest], slowest

    def table(self) -> str:
        """Print the roles' work and the clocks of each unit."""
        lines = [" ".join([f"{'role':11}", *(f"{name:>15}" for name in COLUMNS)])]
        for name, amounts in self.work.items():
            cells = (f"{amounts[column]:15.1f}" for column in COLUMNS)
            lines.append(" ".join([f"{name:11}", *cells]))
        units = ", ".join(f"{u} {c:.0f}" for u, c in clocks(self.work, self.touched).items())
        read, written = self.touched
        need, slowest = self.bound()
        lines += [
            f"HBM bytes, at the least: {read:.0f} read, {written:.0f} written",
            f"clocks (model): {units}",
            f"bound (model): {need:.0f} clocks, by {slowest}",
        ]
        return "\n".join(lines)


def comparison(costs: Mapping[str, Cost]) -> str:
    """Print a row for each kernel: instructions, the clocks of each unit, the bound."""
    lines = [
        " ".join([f"{'kernel':8}", *(f"{n:>14}" for n in ("issued", "work", *RATES, "bound"))])
    ]
    for name, cost in costs.items():
        units = clocks(cost.work, cost.touched)
        issued, work = (sum(a[n] for a in cost.work.values()) for n in ("issued", "work"))
        cells = [issued, work, *(units[unit] for unit in RATES), cost.bound()[0]]
        lines.append(" ".join([f"{name:8}", *(f"{cell:14.0f}" for cell in cells)]))
    return "\n".join(lines)
