"""Split PTX text into statements: braces, labels, directives and instructions, with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_SPACE = re.compile(r"[\s;\0]+")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LINE = re.compile(r"(?:\.loc|\.file|\.version|\.target|\.address_size)\b[^\n;]*;?")
_SECTION = re.compile(r"\.section\b[^{]*\{[^}]*\}")
_HEADER = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(?:entry|func)\b[^{;]*")
_STATEMENT = re.compile(r'(?:"[^"]*"|[^";])+')


class Statement(NamedTuple):
    """A piece of text: kind is open, close, label, header, or statement."""

    kind: str
    text: str
    line: int


def statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a module in order."""
    text = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    position, line = 0, 1
    while position < len(text):
        kind, match = _next(text, position)
        if match is None:
            raise ValueError(f"line {line}: cannot split {text[position : position + 60]!r}")
        if kind:
            payload = match[1] if kind == "label" else match[0].strip()
            yield Statement(kind, payload, line)
        line += match[0].count("\n")
        position = match.end()


def _next(text: str, position: int) -> tuple[str, re.Match | None]:
    character = text[position]
    if match := _SPACE.match(text, position):
        return "", match
    if character in "{}":
        return "open" if character == "{" else "close", re.compile(r"[{}]").match(text, position)
    if character == ".":
        if match := _LINE.match(text, position):
            return "statement", match
        if match := _SECTION.match(text, position):
            return "", match
        if match := _HEADER.match(text, position):
            return "header", match
    if match := _LABEL.match(text, position):
        return "label", match
    return "statement", _STATEMENT.match(text, position)


def split_commas(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts
