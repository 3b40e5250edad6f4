"""Files stay short enough to hold in mind, and the repository small enough to send."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 700
MAX_REPOSITORY_BYTES = 6 << 20


def _tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files"], check=False, capture_output=True, text=True, cwd=ROOT
    )
    if listing.returncode:
        pytest.skip("not a git checkout: the list of files is unknown")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_source_file_is_over_700_lines():
    sources = [path for path in _tracked() if path.suffix in (".py", ".cu")]
    assert sources
    long = {path.name: len(path.read_text().splitlines()) for path in sources}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_the_repository_is_small():
    assert sum(path.stat().st_size for path in _tracked()) < MAX_REPOSITORY_BYTES
