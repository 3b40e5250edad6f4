"""Faults in the synchronisation of a kernel, as edits of its PTX.

A `Site` is one instruction that orders something, named by what it does, by its barrier and by the
Python function that it comes from. An edit turns the text into that of a kernel with one fault; a
`Mutant` names both, so that it is found again in a text that has changed elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import mutations_of_data as data
from ptx_text import Text

from sparse_atten.cute_kernels.common.schedule import MBARRIER_BYTES, Schedule

# What may order something, by the instruction that does it.
_KINDS = (
    ("wait", r"mbarrier\.try_wait"),
    ("expect_tx", r"mbarrier\.arrive\.expect_tx"),
    ("arrive", r"mbarrier\.arrive"),
    ("init", r"mbarrier\.init"),
    ("commit", r"tcgen05\.commit"),
    ("tensor memory fence", r"tcgen05\.fence"),
    ("tensor memory load wait", r"tcgen05\.wait::ld"),
    ("tensor memory store wait", r"tcgen05\.wait::st"),
    ("proxy fence", r"fence\.proxy\.async"),
    ("init fence", r"fence\.mbarrier_init"),
    ("CTA barrier", r"bar\.sync"),
    ("warp barrier", r"bar\.warp\.sync"),
    ("TMA load", r"cp\.async\.bulk\.tensor\S*shared::cta\.global"),
    ("TMA store", r"cp\.async\.bulk\.tensor\S*global\.shared::cta"),
    ("store group", r"cp\.async\.bulk\.commit_group"),
    ("store wait", r"cp\.async\.bulk\.wait_group"),
    ("tensor memory allocation", r"tcgen05\.alloc"),
    ("tensor memory release", r"tcgen05\.dealloc"),
    ("tensor memory store", r"tcgen05\.st"),
    ("tensor memory load", r"tcgen05\.ld"),
    ("shared store", r"st\.shared"),
    ("shared load", r"ld\.shared"),
)
SYNCHRONISING = frozenset(name for name, _ in _KINDS)
_ACCESS = re.compile(r"st\.shared|ld\.shared|tcgen05\.(ld|st|wait|mma)")
_BOUNDARY = re.compile(r"\s*(@|bra|\$L__|ret|elect\.sync|bar\.)")


@dataclass(frozen=True)
class Site:
    """An instruction: its kind, the barrier or region that it names, its function, its PTX line."""

    kind: str
    object: str
    function: str
    line: int


@dataclass(frozen=True)
class Mutant:
    """An edit of the `number`-th site of a kind, object and function."""

    edit: str
    kind: str
    object: str
    function: str
    number: int

    def __str__(self) -> str:
        parts = (self.edit, self.kind, self.object, "in", self.function, f"#{self.number}")
        return " ".join(part for part in parts if part)


def sites(text: Text, schedule: Schedule) -> Iterator[Site]:
    """Yield every instruction that a fault can be put into."""
    for number, line in enumerate(text.lines, 1):
        code = line.split("//")[0]
        found = (name for name, pattern in (*_KINDS, *data.KINDS) if re.search(pattern, code))
        kind = next(found, None)
        if kind:
            yield Site(kind, _object(code, text, schedule), text.python(number)[0], number)


def _object(code: str, text: Text, schedule: Schedule) -> str:
    """Name the barrier or shared region of an instruction's addresses; the barrier wins."""
    names = dict.fromkeys(
        _place(text.offset(operand), schedule) for operand in re.findall(r"\[%r[^\]{,]*\]", code)
    )
    return " -> ".join(sorted(filter(None, names)))


def _place(offset: int, schedule: Schedule) -> str:
    if not schedule.barriers:
        return ""
    first = schedule.smem_offset("barriers")
    if first <= offset < schedule.smem_bytes:
        index = (offset - first) // MBARRIER_BYTES
        for barrier in schedule.barriers:
            if index < barrier.stages:
                return barrier.name
            index -= barrier.stages
    return ""


def mutants(
    text: Text, schedule: Schedule, kinds: Collection[str] = SYNCHRONISING
) -> dict[Mutant, str]:
    """Return every mutant of a kernel in these kinds of sites, with the PTX line that it changes.

    Raises
    ------
    ValueError
        No site was found: the text is not that of the kernel.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    found: dict[Mutant, str] = {}
    for site in sites(text, schedule):
        if site.kind not in kinds:
            continue
        key = (site.kind, site.object, site.function)
        for edit in EDITS[site.kind]:
            if _apply(edit, text, site.line) is not None:
                found[Mutant(edit, *key, seen[key])] = text.show(site.line)
        seen[key] += 1
    if not found:
        raise ValueError("ptx must hold an instruction that synchronises, got none")
    return found


def mutated(mutant: Mutant, text: Text, schedule: Schedule) -> str:
    """Return the text of a mutant.

    Raises
    ------
    LookupError
        The kernel has no such site any more: the table of mutants must be renewed.
    """
    same = [
        site
        for site in sites(text, schedule)
        if (site.kind, site.object, site.function) == (mutant.kind, mutant.object, mutant.function)
    ]
    if mutant.number >= len(same):
        raise LookupError(f"no site for {mutant}; renew the table: python tests/mutate.py")
    lines = _apply(mutant.edit, text, same[mutant.number].line)
    if lines is None:
        raise LookupError(f"{mutant} cannot be made; renew the table: python tests/mutate.py")
    return "\n".join(lines) + "\n"


# ---- edits: each returns the changed lines, or None where it does not apply --------------------

Edit = data.Edit


def _apply(edit: str, text: Text, line: int) -> list[str] | None:
    return _FUNCTIONS[edit](list(text.lines), line - 1)


def _drop(lines: list[str], at: int) -> list[str]:
    """Leave the instruction out; a wait passes at once."""
    passes = re.match(r"\s*mbarrier\.try_wait\S*\s+(\w+),", lines[at])
    lines[at] = f"\tsetp.eq.s32 {passes.group(1)}, 0, 0;" if passes else ""
    return lines


def _flip(lines: list[str], at: int) -> list[str] | None:
    """Wait for the other parity."""
    found = re.match(r"(.*\], )(%r\d+|0|1)(, .*)", lines[at])
    if not found:
        return None
    before, parity, after = found.groups()
    if not parity.startswith("%"):
        lines[at] = f"{before}{1 - int(parity)}{after}"
        return lines
    lines[at] = f"{before}PARITY{after}"
    scope = max(i for i in range(at) if lines[i].strip() == "{")
    lines[scope] = f"\t{{\n\t.reg .b32 PARITY;\n\txor.b32 PARITY, {parity}, 1;"
    return lines


def _halve(lines: list[str], at: int) -> list[str] | None:
    """Expect half of the bytes."""
    found = re.match(r"(.*\], )(%r\d+);", lines[at])
    value = found and _constant(lines, at, found.group(2))
    if not found or value is None:
        return None
    lines[at] = f"{found.group(1)}{value // 2};"
    return lines


def _one_more(lines: list[str], at: int) -> list[str] | None:
    """Await one arrival more in each phase."""
    found = re.match(r"(.*\], )(%r\d+);", lines[at])
    value = found and _constant(lines, at, found.group(2))
    if not found or value is None:
        return None
    lines[at] = f"{found.group(1)}{value + 1};"
    return lines


def _one_less(lines: list[str], at: int) -> list[str] | None:
    """Await one arrival less in each phase, where there are several."""
    found = re.match(r"(.*\], )(%r\d+);", lines[at])
    value = found and _constant(lines, at, found.group(2))
    if not found or value is None or value < 2:
        return None
    lines[at] = f"{found.group(1)}{value - 1};"
    return lines


def _early(lines: list[str], at: int) -> list[str] | None:
    """Move a signal before the last access, or its wait, that it follows in its basic block."""
    start = at
    while not _BOUNDARY.match(lines[start - 1]):
        start -= 1
    for place in range(at - 1, start - 1, -1):
        if _ACCESS.search(lines[place]):
            break
    else:
        return None
    signal = lines[at]
    used = re.findall(r"%r\d+", signal)
    count = used and re.match(r".*\], (%r\d+);", signal)
    if count:
        value = _constant(lines, at, count.group(1))
        if value is None:
            return None
        signal, used = signal.replace(count.group(1), str(value)), used[:-1]
    for line in lines[place:at]:
        assigned = re.match(r"\s*\S+\s+(%r\d+),", line)
        if assigned and assigned.group(1) in used:
            return None
    return [*lines[:place], signal, *lines[place:at], *lines[at + 1 :]]


def _shift(lines: list[str], at: int) -> list[str] | None:
    """Use the shared or tensor memory next to the right one."""
    return _moved(lines, at, 16 if "tcgen05" in lines[at] else 1024)


def _quadrant(lines: list[str], at: int) -> list[str] | None:
    """Use the 32 lanes of tensor memory that belong to the next warp."""
    return _moved(lines, at, 32 << 16)


def _moved(lines: list[str], at: int, step: int) -> list[str] | None:
    """Add to the address that an instruction stores to, or the only one that it loads from."""
    found = re.match(r"(\s*\S+\s+\[%r\d+)(?:\+(\d+))?(\].*|\], \{.*)", lines[at])
    found = found or re.match(r"(.*?ld\..*, \[%r\d+)(?:\+(\d+))?(\];.*)", lines[at])
    if not found:
        return None
    before, constant, after = found.groups()
    lines[at] = f"{before}+{int(constant or 0) + step}{after}"
    return lines


def _constant(lines: list[str], at: int, register: str) -> int | None:
    """Return what was last moved to a register before a line."""
    for line in reversed(lines[:at]):
        found = re.match(rf"\s*mov\.b32\s+{re.escape(register)}, (\d+);", line)
        if found:
            return int(found.group(1))
        if re.match(rf"\s*\S+\s+{re.escape(register)},", line):
            return None
    return None


_FUNCTIONS: dict[str, Edit] = {
    **data.FUNCTIONS,
    "drop": _drop,
    "flip": _flip,
    "halve": _halve,
    "one more": _one_more,
    "one less": _one_less,
    "early": _early,
    "shift": _shift,
    "quadrant": _quadrant,
}
EDITS: dict[str, tuple[str, ...]] = {
    **data.EDITS,
    "wait": ("drop", "flip"),
    "expect_tx": ("drop", "halve"),
    "arrive": ("drop", "early"),
    "init": ("one more", "one less"),
    "commit": ("drop", "early"),
    "TMA load": ("shift",),
    "TMA store": ("drop",),
    "tensor memory store": ("shift", "quadrant"),
    "tensor memory load": ("shift", "quadrant"),
    "shared store": ("shift",),
    "shared load": ("shift",),
    **dict.fromkeys(
        (
            "tensor memory fence",
            "tensor memory load wait",
            "tensor memory store wait",
            "proxy fence",
            "init fence",
            "CTA barrier",
            "warp barrier",
            "store group",
            "store wait",
            "tensor memory allocation",
            "tensor memory release",
        ),
        ("drop",),
    ),
}
