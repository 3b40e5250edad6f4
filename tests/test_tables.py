"""The README's tables are what the result files render to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_shows_the_committed_results():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "perf" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "README.md").read_text()
    assert tables.render(text) == text
    assert text.count("| msa-4x256x32768-k16 |") == 1
