"""The shapes of a run, one after the other, with a bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from tqdm import tqdm


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """What `--only` is compared with."""


T = TypeVar("T", bound=Named)


def chosen(cases: Sequence[T], only: str) -> list[T]:
    """Pick the cases whose name holds one of the parts, which commas separate."""
    return [case for case in cases if any(part in case.name for part in only.split(","))]


def shapes(cases: Sequence[T], only: str) -> Iterator[T]:
    """Go through the chosen cases."""
    yield from tqdm(chosen(cases, only), "shapes", file=sys.stderr)


def note(text: str) -> None:
    """Say something without breaking the bar."""
    tqdm.write(text, file=sys.stderr)
