"""A PTX text by lines: which Python line each comes from, and what its addresses are."""

from __future__ import annotations

import ast
import hashlib
import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

_ADD = re.compile(r"\s*add\.s32\s+(%r\d+), (%r\d+), (\d+|%r\d+);")
# Roles whose code is not in the kernel's own file, and parts of them.
_SHARED_ROLES = ("scheduler", "load", "load_keys", "publish_tokens", "load_tokens", "read_places")
_NOISE = re.compile(r"(\.(loc|file|version)\s.*)?$")


class Mark(NamedTuple):
    """A ``.loc`` directive: the PTX line that it stands on, and file, line and column it names."""

    at: int
    file: int
    line: int
    column: int


@dataclass(frozen=True)
class Text:
    """One kernel. PTX lines count from 1."""

    ptx: str

    @cached_property
    def lines(self) -> list[str]:
        """The lines."""
        return self.ptx.splitlines()

    @cached_property
    def files(self) -> dict[int, Path]:
        """Python files by their number in ``.loc``."""
        found = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', self.ptx, re.MULTILINE)
        return {int(number): Path(path) for number, path in found}

    @cached_property
    def marks(self) -> list[Mark]:
        """All ``.loc`` directives; column 0 stands for a whole function."""
        marks = []
        for number, line in enumerate(self.lines, 1):
            found = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)", line)
            if found:
                marks.append(Mark(number, *map(int, found.groups())))
        return marks

    def python(self, line: int) -> tuple[str, int]:
        """Return the function of the kernel's own file, and the line in it, before a PTX line."""
        for mark in reversed(self.marks[: bisect_right(self.marks, (line, 1 << 30))]):
            known = mark.line and mark.column
            function = _function(self.files[mark.file], mark.line) if known else ""
            if function and (mark.file == 1 or function in _SHARED_ROLES):
                return function, mark.line
        return "", 0

    def show(self, line: int) -> str:
        """Return a PTX line with its number, its text and where it comes from."""
        function, number = self.python(line)
        where = f" [{function}, line {number}]" if function else ""
        return f"PTX {line}: {' '.join(self.lines[line - 1].split())[:100]}{where}"

    @cached_property
    def _sums(self) -> dict[str, tuple[str, str]]:
        """Registers that are a sum: their terms, where they are assigned once."""
        found: dict[str, list[tuple[str, str]]] = {}
        for line in self.lines:
            add = _ADD.match(line)
            if add:
                found.setdefault(add.group(1), []).append((add.group(2), add.group(3)))
        return {register: terms[0] for register, terms in found.items() if len(terms) == 1}

    def offset(self, operand: str) -> int:
        """Add up the constants of an address such as ``[%r1+16]``, through sums in registers."""
        register, _, constant = operand.strip("[]").partition("+")
        total = int(constant or 0)
        while register in self._sums:
            register, term = self._sums[register]
            if not term.startswith("%"):
                total += int(term)
            elif term in self._sums:
                total += self.offset(term)
        return total


@cache
def _function(path: Path, line: int) -> str:
    """Name the innermost function of a Python file that a line lies in."""
    if not path.is_file():
        return path.stem
    inside = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(inside, key=lambda node: node.lineno).name if inside else path.stem


def normalised(ptx: str) -> str:
    """Drop comments, line information, the kernel's name and the version of PTX.

    What is left is what runs: CuTe-DSL's libraries for CUDA 12 and 13 differ in the version alone.
    """
    entry = re.search(r"\.entry\s+(\w+)", ptx)
    if entry:
        ptx = ptx.replace(entry.group(1), "kernel")
    lines = (" ".join(line.split("//")[0].split()) for line in ptx.splitlines())
    return "\n".join(line for line in lines if not _NOISE.match(line))


def digest(ptx: str) -> str:
    """Hash what runs."""
    return hashlib.sha256(normalised(ptx).encode()).hexdigest()
