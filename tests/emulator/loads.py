"""Loads, stores, atomics, address conversions, and copies that a thread starts (cp.async)."""

from __future__ import annotations

import numpy as np

from emulator.errors import EmulatorError
from emulator.link import Link, Step, op
from emulator.memory import PARAMETER_BASE, SHARED_BASE, UNITS
from emulator.operands import SIZES, Address, Operand, Sink, Symbol
from emulator.registers import DTYPES
from emulator.shared import RANK_SHIFT
from emulator.spaces import Access, add

_SPACE = r"(?P<space>\.(global|shared|local|const))?(?P<window>::cta|::cluster)?"
_ORDER = r"(?P<order>\.(weak|volatile|((relaxed|acquire|release)\.(cta|cluster|gpu|sys))))?"
_CACHE = r"(\.(ca|cg|cs|lu|cv|nc|wb|wt))?(\.L1::\w+)?(\.L2::\w+)*"
_TYPE = r"(\.v(?P<v>[248]))?\.(?P<t>[usb](8|16|32|64)|f32|f64)"


def _space(m) -> str:
    space = (m["space"] or ".generic")[1:]
    if m["window"] and space != "shared":
        raise ValueError("only shared memory has windows")
    if space == "shared":
        return "shared::cluster" if m["window"] == "::cluster" else "shared"
    return "global" if space == "const" else space


def _kind(m) -> str:
    order = m["order"] or ".weak"
    return "plain" if order == ".weak" else "strong"


def _semantics(m) -> str | None:
    """Return acquire, release or relaxed for a strong access, None for a weak one."""
    if _kind(m) == "plain":
        return None
    return next((s for s in ("acquire", "release") if s in m["order"]), "relaxed")


@op(rf"ld{_ORDER}{_SPACE}{_CACHE}{_TYPE}")
def load(c: Link, m, d: Operand, source: Operand) -> Step:
    """Read one unit, or a vector of them; narrow values are extended."""
    outs = [_register(c, item, m["t"]) for item in c.items(d)]
    unit, count = SIZES[m["t"]], int(m["v"] or 1)
    if len(outs) != count:
        raise c.unknown(f"{count} results expected, got {len(outs)}")
    access, address = Access(c.group, _space(m), _kind(m)), c.address(source)
    dtype, mask = DTYPES[m["t"]], c.mask
    sem = _semantics(m)
    group = c.group

    def run() -> None:
        lanes = None if mask is None else np.flatnonzero(mask)
        if lanes is not None and not len(lanes):
            return
        where = address() if lanes is None else address()[lanes]
        values = access.load(where, lanes, unit, count).view(dtype)
        for i, out in enumerate(outs):
            out[slice(None) if lanes is None else lanes] = values[:, i]
        if sem is not None:
            group.machine.acquire(access, lanes, where, sem)

    return run


def _register(c: Link, operand: Operand, type_name: str) -> np.ndarray:
    """Return the whole register as a number of the type's kind: narrow values are extended."""
    if isinstance(operand, Sink):
        return c.write(operand, type_name)
    letter = {"b": "u", "f": "f"}.get(type_name[0], type_name[0])
    bits = {"b16": 16, "b32": 32, "b64": 64}[operand.kind]
    if bits < 8 * SIZES[type_name]:
        raise c.unknown("the register is narrower than the type")
    return c.write(operand, f"{letter}{bits}")


@op(r"ld\.param(?P<x>\.v(?P<v>[24]))?\.(?P<t>[usb](8|16|32|64)|f32|f64)")
def load_parameter(c: Link, m, d: Operand, source: Operand) -> Step:
    """Read the parameter block at an offset that is known when the code is linked."""
    if not (isinstance(source, Address) and isinstance(source.base, Symbol)):
        return _load_computed(c, m, d, source)
    unit, group = SIZES[m["t"]], c.group
    outs = [_register(c, item, m["t"]) for item in c.items(d)]
    start = source.base.offset + source.offset
    steps = [
        c.assign(out, lambda at=start + i * unit: group.machine.parameter(at, DTYPES[m["t"]]))
        for i, out in enumerate(outs)
    ]
    if len(steps) == 1:
        return steps[0]

    def run() -> None:
        for step in steps:
            step()

    return run


def _load_computed(c: Link, m, d: Operand, source: Operand) -> Step:
    """Read the parameter block where a register points."""
    unit, dtype, mask = SIZES[m["t"]], DTYPES[m["t"]], c.mask
    outs = [_register(c, item, m["t"]) for item in c.items(d)]
    access, address = Access(c.group, "param", "plain"), c.address(source)

    def run() -> None:
        lanes = np.arange(c.lanes) if mask is None else np.flatnonzero(mask)
        if len(lanes):
            values = access.load(address()[lanes], lanes, unit, len(outs)).view(dtype)
            for i, out in enumerate(outs):
                out[lanes] = values[:, i]

    return run


@op(rf"st{_ORDER}{_SPACE}{_CACHE}{_TYPE}")
def store(c: Link, m, target: Operand, a: Operand) -> Step:
    """Write one unit, or a vector of them."""
    kind = f"b{8 * SIZES[m['t']]}"
    rows = [c.read(item, kind) for item in c.items(a)]
    if len(rows) != int(m["v"] or 1):
        raise c.unknown("wrong number of values")
    access, address = Access(c.group, _space(m), _kind(m)), c.address(target)
    mask, unit = c.mask, SIZES[m["t"]]
    sem = _semantics(m)
    group = c.group

    def run() -> None:
        lanes = None if mask is None else np.flatnonzero(mask)
        if lanes is not None and not len(lanes):
            return
        where = address() if lanes is None else address()[lanes]
        values = np.empty((len(where), len(rows)), UNITS[unit])
        for i, row in enumerate(rows):
            values[:, i] = row if lanes is None else row[lanes]
        if sem is not None:
            group.machine.release(access, lanes, where, sem)
        access.store(where, lanes, values)

    return run


# ---- atomics

_CHANGES = {
    "add": add,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: np.where(old >= value, 0, old + 1).astype(old.dtype),
    "dec": lambda old, value: np.where((old == 0) | (old > value), value, old - 1).astype(
        old.dtype
    ),
}
_SEM = r"(\.(?P<sem>relaxed|acquire|release|acq_rel))?(\.(cta|cluster|gpu|sys))?"


@op(
    rf"(?P<f>atom|red)(\.async)?{_SEM}{_SPACE}(\.(cta|cluster|gpu|sys))?"
    r"\.(?P<o>add|min|max|and|or|xor|exch|inc|dec)(\.noftz)?(\.L2::\w+)*"
    r"\.(?P<t>[usb](32|64)|f32|f64)"
)
def atomic(c: Link, m, *operands: Operand) -> Step:
    """Read, change and write, lane after lane; red returns nothing."""
    *first, target, value = operands
    kind = m["t"]
    out = c.write(first[0], kind) if first else None
    if len(first) != (m["f"] == "atom"):
        raise c.unknown("wrong number of operands")
    return _update(c, m, target, c.read(value, kind), out, _CHANGES[m["o"]])


@op(rf"atom{_SEM}{_SPACE}(\.(cta|cluster|gpu|sys))?\.cas(\.L2::\w+)*\.(?P<t>b(16|32|64))")
def compare_and_swap(
    c: Link, m, d: Operand, target: Operand, expected: Operand, value: Operand
) -> Step:
    """Write the value where the old one is what was expected."""
    access, address = Access(c.group, _space(m), "atomic"), c.address(target)
    want, new, out, mask = (
        c.read(expected, m["t"]),
        c.read(value, m["t"]),
        c.write(d, m["t"]),
        c.mask,
    )
    group = c.group

    def run() -> None:
        lanes = np.arange(c.lanes) if mask is None else np.flatnonzero(mask)
        where = address()[lanes]
        for i in range(len(lanes)):
            one = slice(i, i + 1)
            wanted = want[lanes[one]]
            group.machine.synchronise(access, lanes[one], where[one], m["sem"])
            out[lanes[one]] = access.update(
                where[one],
                lanes[one],
                new[lanes[one]],
                lambda old, fresh, wanted=wanted: np.where(old == wanted, fresh, old),
            )

    return run


def _update(c: Link, m, target: Operand, value, out, change) -> Step:
    access, address, mask = Access(c.group, _space(m), "atomic"), c.address(target), c.mask
    group, sem = c.group, m["sem"]

    def run() -> None:
        lanes = None if mask is None else np.flatnonzero(mask)
        if lanes is not None and not len(lanes):
            return
        where = address() if lanes is None else address()[lanes]
        group.machine.synchronise(access, lanes, where, sem)
        old = access.update(where, lanes, value if lanes is None else value[lanes], change)
        if out is not None:
            out[slice(None) if lanes is None else lanes] = old

    return run


@op(r"(?P<f>fence|membar)\.(?P<how>(sc|acq_rel)\.(cta|cluster|gpu|sys)|cta|gl|sys)")
def fence(c: Link, m) -> Step:
    """Order what comes before with what comes after, for strong accesses of the thread."""
    group = c.group
    return lambda: group.machine.fence(group, c.active_warps())


# ---- addresses


@op(r"cvta(?P<to>\.to)?\.(?P<space>global|shared|local|const|param)(::\w+)?\.u64")
def convert_address(c: Link, m, d: Operand, a: Operand) -> Step:
    """Between the generic space and another; only shared memory moves."""
    out = c.write(d, "u64")
    value = c.read(a, "u64")
    if m["space"] != "shared":
        return c.assign(out, lambda: value)
    base = np.uint64(SHARED_BASE)
    if m["to"]:
        return c.assign(out, lambda: value - base)
    return c.assign(out, lambda: value + base)


@op(r"mapa(?P<space>\.shared::cluster)?\.(?P<t>u32|u64)")
def map_address(c: Link, m, d: Operand, a: Operand, rank: Operand) -> Step:
    """The same offset in another CTA of the cluster."""
    value, cta, kind = c.read(a, m["t"]), c.read(rank, "u32"), np.dtype(DTYPES[m["t"]]).type
    low = kind((1 << RANK_SHIFT) - 1)
    base = kind(0) if m["space"] else kind(SHARED_BASE)
    return c.assign(
        c.write(d, m["t"]),
        lambda: base + ((value & low) | (cta.astype(kind) << kind(RANK_SHIFT))),
    )


@op(r"getctarank(?P<space>\.shared::cluster)?\.(?P<t>u32|u64)")
def rank_of_address(c: Link, m, d: Operand, a: Operand) -> Step:
    """The rank in an address of the cluster's window."""
    value = c.read(a, m["t"])
    shift = value.dtype.type(RANK_SHIFT)
    return c.assign(c.write(d, "u32"), lambda: (value >> shift) & value.dtype.type(0xFF))


@op(r"isspacep\.(?P<space>global|shared|local|param)(::\w+)?")
def is_space(c: Link, m, d: Operand, a: Operand) -> Step:
    """Whether a generic address lies in a space."""
    value = c.read(a, "u64")
    bounds = {
        "global": (0, SHARED_BASE),
        "shared": (SHARED_BASE, 2 * SHARED_BASE),
        "local": (2 * SHARED_BASE, PARAMETER_BASE),
        "param": (PARAMETER_BASE, 2 * PARAMETER_BASE),
    }
    low, high = (np.uint64(b) for b in bounds[m["space"]])
    return c.assign(c.write(d, "pred"), lambda: (value >= low) & (value < high))


# ---- cp.async


@op(r"cp\.async\.(?P<cache>ca|cg)\.shared(::cta)?\.global(\.L2::\w+)*")
def copy_async(
    c: Link, m, target: Operand, source: Operand, size: Operand, read: Operand | None = None
) -> Step:
    """Copy 4, 8 or 16 bytes; those past the source size become 0."""
    count = int(size.text, 0)
    if count not in (4, 8, 16):
        raise c.unknown("size must be 4, 8 or 16")
    to, at, mask, group = c.address(target), c.address(source), c.mask, c.group
    wanted = c.read(read, "u32") if read is not None else None

    def run() -> None:
        lanes = np.arange(c.lanes) if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return
        sizes = np.full(len(lanes), count) if wanted is None else wanted[lanes]
        if (sizes > count).any():
            raise EmulatorError("out of bounds", f"cp.async source size above {count}")
        group.machine.agents.copy_async(
            group,
            c.instruction,
            lanes,
            targets=to()[lanes].copy(),
            sources=at()[lanes].copy(),
            sizes=sizes,
            count=count,
        )

    return run


@op(r"cp\.async\.commit_group")
def commit_copies(c: Link, m) -> Step:
    """Close the group of the copies before."""
    group = c.group
    return lambda: group.machine.agents.commit_copies(group)


@op(r"cp\.async\.(?P<f>wait_group|wait_all)")
def wait_copies(c: Link, m, number: Operand | None = None) -> Step:
    """Complete all but the latest groups."""
    group, left = c.group, int(number.text, 0) if number is not None else 0
    everything = m["f"] == "wait_all"
    return lambda: group.machine.agents.wait_copies(group, left, everything=everything)
