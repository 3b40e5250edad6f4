"""The commit that a benchmark measured."""

from __future__ import annotations

import subprocess


def git_revision() -> str:
    """Name the commit, with a mark if the tree differs from it; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
