"""Prove the launches of every kernel and keep the verdicts: python tests/prove.py [kernel].

tests/proofs.jsonl has one line for each launch and tests/proofs.md renders it. --launch proves one
launch anew. A verdict belongs to a text, which its digest names; the slow tests prove all again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ptx_text import Text, digest
from sentry import Verdict, prove
from subject import Subject
from verified import SUBJECTS

TABLE = Path(__file__).with_name("proofs.jsonl")
SHIPPED = "short, as shipped"  # the text without the changes that make it provable


def read() -> dict[str, dict[str, Any]]:
    """Read the verdicts by kernel and launch."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {f"{entry['kernel']}: {entry['launch']}": entry for entry in map(json.loads, lines)}


def store(kernel: str, launch: str, text: Text, verdict: Verdict) -> None:
    """Add a verdict to the table."""
    entry = {
        "kernel": kernel,
        "launch": launch,
        **dataclasses.asdict(verdict),
        "seconds": round(verdict.seconds),
        "sentryward": version("sentryward"),
        "digest": digest(text.ptx),
    }
    table = {**read(), f"{kernel}: {launch}": entry}
    TABLE.write_text("".join(json.dumps(row) + "\n" for row in table.values()))
    TABLE.with_suffix(".md").write_text(rendered(list(table.values())))


def rendered(entries: list[dict[str, Any]]) -> str:
    """Render the table as markdown, with every assumption and every reason for no verdict."""
    rows = [
        f"| {e['kernel']} | {e['launch']} | {e['result']} | {e['events']:,} | {e['seconds']} |"
        for e in entries
    ]
    assumed = dict.fromkeys(text for e in entries for text in e["assumptions"])
    found = [f"- {e['kernel']}, {e['launch']}: {text}" for e in entries for text in e["findings"]]
    return "\n".join(
        [
            "# Verdicts of SentryWard",
            "",
            "race_free: in every schedule of the launch all warps end, and no two accesses to",
            "global, shared or tensor memory race. `python tests/prove.py` writes this file.",
            "",
            "| kernel | launch | result | events | s |",
            "|---|---|---|---:|---:|",
            *rows,
            "",
            "## Assumptions",
            "",
            *(f"- {text}" for text in assumed),
            "",
            "## What stands in the way",
            "",
            *(found or ["Nothing."]),
            "",
        ]
    )


def prove_launch(subject: Subject, launch: str) -> Verdict:
    """Prove one launch, or find out where the proof of the shipped text stops."""
    text = subject.text()
    if launch == SHIPPED:
        text = subject.shipped()
        first = next(iter(subject.launches.values()))()
        verdict = prove(text.ptx, first.plan, first.contents)
    else:
        verdict = subject.prove(text.ptx, launch, seconds=1800)
    store(subject.name, launch, text, verdict)
    return verdict


def main() -> None:
    """Prove what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", nargs="?", default="vsa_sm100", choices=SUBJECTS)
    parser.add_argument("--launch", default="")
    options = parser.parse_args()
    subject = SUBJECTS[options.kernel]
    for launch in (*subject.launches, SHIPPED):
        if options.launch in ("", launch):
            print(f"{launch}: {prove_launch(subject, launch)}", flush=True)


if __name__ == "__main__":
    main()
