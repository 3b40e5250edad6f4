"""Who does what in a CTA: warp roles with their registers, barriers, and the two memory plans.

These are plain tables. A kernel declares them as data, shows them in its docstring and derives from
them every id, arrival count, offset and size, so that no number is typed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sparse_atten.cute_kernels.common.target import Target

WARP = 32
WARPGROUP = 4  # warps that change their register count together
MBARRIER_BYTES = 8


@dataclass(frozen=True)
class Role:
    """Consecutive warps with one duty, and the registers that each of their threads may hold."""

    name: str
    first: int
    warps: int
    registers: int

    @property
    def last(self) -> int:
        """Id of the last warp."""
        return self.first + self.warps - 1


class Signal(Enum):
    """How a role arrives on a barrier in one phase."""

    LANES = "every lane"
    WARPS = "one lane of each warp"
    ONCE = "once: one lane, one tcgen05.commit, or one arrive.expect_tx"


@dataclass(frozen=True)
class Barrier:
    """`stages` mbarriers of one meaning.

    Parameters
    ----------
    name : str
        ``<what>_full`` or ``<what>_empty`` where it guards a buffer.
    stages : int
        Copies: slots of a ring, or one for each Q tile of the work item.
    producers : tuple of (role name, Signal)
        Who arrives in each phase; the arrival count follows from it.
    consumers : tuple of role names
        Who waits.
    means : str
        What is true when a phase completes.
    tx_bytes : int
        Bytes that a phase also waits for.
    """

    name: str
    stages: int
    producers: tuple[tuple[str, Signal], ...]
    consumers: tuple[str, ...]
    means: str
    tx_bytes: int = 0


def lanes(*roles: str) -> tuple[tuple[str, Signal], ...]:
    """Return producers of whom every lane arrives."""
    return tuple((role, Signal.LANES) for role in roles)


def warps(*roles: str) -> tuple[tuple[str, Signal], ...]:
    """Return producers of whom every warp arrives."""
    return tuple((role, Signal.WARPS) for role in roles)


def once(*roles: str) -> tuple[tuple[str, Signal], ...]:
    """Return producers who arrive once."""
    return tuple((role, Signal.ONCE) for role in roles)


@dataclass(frozen=True)
class Region:
    """A named range: bytes of shared memory or columns of tensor memory; `over` names its host."""

    name: str
    size: int
    over: str | None = None


@dataclass(frozen=True)
class Schedule:
    """The tables of one kernel, checked against a target by `check`."""

    roles: tuple[Role, ...]
    barriers: tuple[Barrier, ...]
    tmem: tuple[Region, ...]
    smem: tuple[Region, ...]

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * sum(role.warps for role in self.roles)

    @property
    def num_barriers(self) -> int:
        """Mbarriers of a CTA."""
        return sum(barrier.stages for barrier in self.barriers)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA, bytes."""
        return self.smem_offset("barriers") + self.num_barriers * MBARRIER_BYTES

    def role(self, name: str) -> Role:
        """Look a role up."""
        return next(role for role in self.roles if role.name == name)

    def arrivals(self, barrier: Barrier) -> int:
        """Count the arrivals that complete a phase of `barrier`."""
        per_role = {Signal.LANES: WARP, Signal.WARPS: 1}
        return sum(
            per_role[signal] * self.role(name).warps if signal in per_role else 1
            for name, signal in barrier.producers
        )

    def barrier_index(self, name: str) -> int:
        """Return the index of the first mbarrier called `name`."""
        index = 0
        for barrier in self.barriers:
            if barrier.name == name:
                return index
            index += barrier.stages
        raise KeyError(name)

    def smem_offset(self, name: str) -> int:
        """Return where a region of shared memory starts, bytes; the barriers come last."""
        return _offset((*self.smem, Region("barriers", 0)), name)

    def tmem_column(self, name: str) -> int:
        """Return the first column of a region of tensor memory."""
        return _offset(self.tmem, name)

    def check(self, target: Target) -> None:
        """Raise ValueError where the tables contradict each other or the target."""
        ids = [w for role in self.roles for w in range(role.first, role.last + 1)]
        if ids != list(range(len(ids))):
            raise ValueError(
                f"roles must cover the warps 0..{len(ids) - 1} once, in order, got {ids}"
            )
        registers = [role.registers for role in self.roles for _ in range(role.warps)]
        for group in range(0, len(registers), WARPGROUP):
            if len(set(registers[group : group + WARPGROUP])) > 1:
                raise ValueError(f"the warps of group {group // WARPGROUP} must agree on registers")
        if any(count % 8 or not 24 <= count <= 256 for count in registers):
            raise ValueError(f"registers must be multiples of 8 in 24..256, got {registers}")
        if WARP * sum(registers) > target.registers:
            raise ValueError(
                f"registers must sum to at most {target.registers}, got {WARP * sum(registers)}"
            )
        names = {role.name for role in self.roles}
        for barrier in self.barriers:
            unknown = {name for name, _ in barrier.producers} | set(barrier.consumers)
            if unknown - names:
                raise ValueError(f"barrier {barrier.name} names no role: {sorted(unknown - names)}")
        columns = sum(region.size for region in self.tmem if region.over is None)
        if columns > target.tmem_columns:
            raise ValueError(f"TMEM must fit in {target.tmem_columns} columns, got {columns}")
        for region in self.tmem:
            host = next((r for r in self.tmem if r.name == region.over), region)
            if region.size > host.size:
                raise ValueError(f"TMEM region {region.name} is larger than {host.name}")
        if self.smem_bytes > target.smem_limit:
            raise ValueError(f"SMEM must be at most {target.smem_limit}, got {self.smem_bytes}")

    def tables(self) -> str:
        """Print the tables, as a kernel's docstring shows them."""
        lines = ["Warps"]
        for role in self.roles:
            ids = f"{role.first}-{role.last}" if role.warps > 1 else f"{role.first}"
            lines.append(f"  {ids:<6} {role.name:<11} {role.registers:>3} registers")
        lines.append("Edges")
        for barrier in self.barriers:
            source = " + ".join(name for name, _ in barrier.producers)
            sinks = ", ".join(barrier.consumers)
            lines.append(
                f"  {barrier.name:<12} x{barrier.stages}  {self.arrivals(barrier):>3} arrivals  "
                f"{source} -> {sinks}: {barrier.means}"
            )
        lines.append("TMEM columns")
        for region in self.tmem:
            first = self.tmem_column(region.name)
            note = f" over {region.over}" if region.over else ""
            lines.append(f"  {first:>3}-{first + region.size - 1:<3} {region.name}{note}")
        lines.append("SMEM bytes")
        lines += [f"  {region.size:>6} {region.name}" for region in self.smem]
        lines.append(f"  {self.num_barriers * MBARRIER_BYTES:>6} barriers")
        lines.append(f"  {self.smem_bytes:>6} in all")
        return "\n".join(lines)


def _offset(regions: tuple[Region, ...], name: str) -> int:
    offset = 0
    for region in regions:
        if region.name == name:
            return _offset(regions, region.over) if region.over else offset
        offset += 0 if region.over else region.size
    raise KeyError(name)
