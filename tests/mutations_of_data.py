"""Faults in loads, stores, shuffles and branches: edits for kernels that few instructions order.

`mutations` takes them up beside its own. Only the subjects that ask for these kinds get them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

KINDS = (
    ("guarded load", r"@p ld\.global"),
    ("load", r"\bld\.global"),
    ("store", r"\bst\.global"),
    ("shuffle", r"\bshfl\.sync"),
    ("clamp", r"\b(min|max)\.s32"),
    ("branch", r"@!?%p\d+ bra"),
    ("comparison", r"\bsetp\.(eq|neu)\.f32"),
    ("dependency wait", r"\bgriddepcontrol\.wait"),
)

Edit = Callable[[list[str], int], list[str] | None]


def _open(lines: list[str], at: int) -> list[str] | None:
    """Load whatever the guard says."""
    lines[at] = re.sub(r"setp\.ne\.s32 p, %r\d+, 0;", "setp.eq.s32 p, 0, 0;", lines[at])
    return lines


def _unread(lines: list[str], at: int) -> list[str] | None:
    """Leave a guarded load out, so that its destination keeps what stands for no value."""
    lines[at] = re.sub(r"@p ld\.global[^;]*;", "", lines[at])
    return lines


def _leave_out(lines: list[str], at: int) -> list[str] | None:
    lines[at] = ""
    return lines


def _next(lines: list[str], at: int) -> list[str] | None:
    """Use the global memory next to the right one."""
    step = 16 if ".v4." in lines[at] else 4
    lines[at] = re.sub(
        r"\[(%rd\d+)(?:\+(\d+))?\]",
        lambda found: f"[{found.group(1)}+{int(found.group(2) or 0) + step}]",
        lines[at],
    )
    return lines


def _own(lines: list[str], at: int) -> list[str] | None:
    """Take a lane's own value instead of another one's, or the first of two values."""
    found = re.match(r"\s*\S+\s+(%r\d+), (%r\d+), ", lines[at])
    if not found:
        return None
    lines[at] = f"\tmov.b32 {found.group(1)}, {found.group(2)};"
    return lines


def _neighbour(lines: list[str], at: int) -> list[str] | None:
    """Take the value of the lane next to the right one, or of half the distance."""
    found = re.match(r"\s*(\S+)\s+(%r\d+), (%r\d+), (%r\d+|\d+), (.*);", lines[at])
    if not found:
        return None
    opcode, target, source, lane, rest = found.groups()
    if not lane.startswith("%"):
        lines[at] = f"\t{opcode} {target}, {source}, {int(lane) // 2 or 1}, {rest};"
        return lines
    lines[at] = (
        "\t{\n\t.reg .b32 LANE;\n"
        f"\txor.b32 LANE, {lane}, 1;\n"
        f"\t{opcode} {target}, {source}, LANE, {rest};\n\t}}"
    )
    return lines


def _always(lines: list[str], at: int) -> list[str] | None:
    lines[at] = re.sub(r"@!?%p\d+ (bra)", r"\1", lines[at])
    return lines


def _opposite(lines: list[str], at: int) -> list[str] | None:
    """Swap equal and not equal."""
    swapped = {"eq": "neu", "neu": "eq"}
    lines[at] = re.sub(
        r"setp\.(eq|neu)\.", lambda found: f"setp.{swapped[found.group(1)]}.", lines[at]
    )
    return lines


FUNCTIONS: dict[str, Edit] = {
    "open": _open,
    "unread": _unread,
    "leave out": _leave_out,
    "next": _next,
    "own": _own,
    "neighbour": _neighbour,
    "always": _always,
    "opposite": _opposite,
}
EDITS: dict[str, tuple[str, ...]] = {
    "guarded load": ("open", "unread", "next"),
    "load": ("next",),
    "store": ("leave out", "next"),
    "shuffle": ("own", "neighbour"),
    "clamp": ("own",),
    "branch": ("leave out", "always"),
    "comparison": ("opposite",),
    "dependency wait": ("leave out",),
}
