"""Run all tests, the slow ones too, and keep what came of them: python tests/full.py.

    --part 1/3      every third test, from the first on
    --commit HASH   where there is no git to ask

Further options go to pytest. tests/full.jsonl has one line for each part of one run of one commit:
the line of a part replaces an older one, and those of another commit or another division go. The
README renders it (python tests/matrix.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("full.jsonl")
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


class Recorder:
    """A plugin of pytest that counts what its summary shows."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.reasons: Counter[str] = Counter()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Count tests, and modules that were skipped whole, once each."""
        found = {
            outcome: {report.nodeid: report for report in terminalreporter.stats.get(outcome, ())}
            for outcome in OUTCOMES
        }
        self.counts = {outcome: len(reports) for outcome, reports in found.items()}
        skipped = found["skipped"].values()
        self.reasons = Counter(r.longrepr[2].removeprefix("Skipped: ") for r in skipped)


def read() -> list[dict[str, Any]]:
    """Read the parts on record."""
    return [json.loads(line) for line in TABLE.read_text().splitlines()] if TABLE.exists() else []


def store(entry: dict[str, Any]) -> None:
    """Keep the line of a part, and those of other parts of the same run."""

    def run(line: dict[str, Any]) -> tuple[str, str]:
        return line["commit"], line["part"].split("/")[1]

    lines = {line["part"]: line for line in read() if run(line) == run(entry)}
    lines[entry["part"]] = entry
    TABLE.write_text("".join(json.dumps(lines[part]) + "\n" for part in sorted(lines)))


def missing(lines: list[dict[str, Any]]) -> list[str]:
    """Name the parts of a run that are not on record."""
    if not lines:
        return ["1/1"]
    count = int(lines[0]["part"].split("/")[1])
    parts = [f"{number}/{count}" for number in range(1, count + 1)]
    found = [line["part"] for line in lines]
    return [part for part in parts if part not in found]


def problems(lines: list[dict[str, Any]]) -> list[str]:
    """Say what a record shows besides tests that passed."""
    bad = [
        f"part {line['part']}: {line[outcome]} {outcome}"
        for line in lines
        for outcome in ("failed", "error", "xpassed")
        if line[outcome]
    ]
    commits = {line["commit"] for line in lines}
    return bad + [f"commits {sorted(commits)}"] * (len(commits) > 1)


def sentence(lines: list[dict[str, Any]]) -> str:
    """Say what came of a run."""
    if missing(lines):
        return "No whole run of `make test-full` is on record."
    total = Counter({name: sum(line[name] for line in lines) for name in OUTCOMES})
    reasons: Counter[str] = Counter()
    for line in lines:
        reasons.update(line["reasons"])
    why = "; ".join(f"{count:,}: {reason}" for reason, count in grouped(reasons).most_common())
    hours = sum(line["seconds"] * line["cores"] for line in lines) / 3600
    return (
        f"`make test-full` at commit {lines[0]['commit'][:7]}: {total['passed']:,} passed, "
        f"{total['failed'] + total['error']:,} failed, {total['xfailed']:,} failed as expected, "
        f"{total['skipped']:,} were skipped ({why}); {hours:.1f} core-hours, "
        f"{lines[0]['compiler']}."
    )


def grouped(reasons: Iterable[str] | Counter[str]) -> Counter[str]:
    """Count reasons by what they have in common: the text before the first ";" or ":"."""
    found: Counter[str] = Counter()
    for reason, count in Counter(reasons).items():
        found[re.split(r"[;:]| of capability", reason)[0]] += count
    return found


def commit() -> str:
    """Name the commit that is checked out, with a "+" where files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(TABLE.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))


def main() -> int:
    """Run what the command line names; return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--commit", default=commit())
    options, others = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each of the processes, one for a core
    recorder, start = Recorder(), time.monotonic()
    arguments = ["-n", "auto", "--dist", "worksteal", f"--part={options.part}", *others]
    status = pytest.main(arguments, plugins=[recorder])
    if recorder.counts:
        store(
            {
                "part": options.part,
                "commit": options.commit,
                **recorder.counts,
                "reasons": dict(recorder.reasons.most_common()),
                "seconds": round(time.monotonic() - start),
                "cores": len(os.sched_getaffinity(0)),
                "compiler": f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}",
            }
        )
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
