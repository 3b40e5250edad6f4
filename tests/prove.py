"""Prove the launches of every kernel and keep the verdicts: python tests/prove.py [kernel].

tests/proofs.jsonl has one line for each launch and tests/proofs.md renders it. --launch proves one
launch anew. A verdict belongs to the text whose digest it names, as one compiler makes it; the
tests compare them, and the slow ones prove all again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import verified_vsa_sm90
from ptx_text import Text, digest
from sentry import Verdict, prove
from subject import Launch
from verified import SUBJECTS
from verified_cuda import MODULES

TABLE = Path(__file__).with_name("proofs.jsonl")
SHIPPED = "short, as shipped"  # the text without the changes that make it provable
BEYOND = {"vsa_sm90": verified_vsa_sm90}  # kernels that no change makes provable


def read() -> dict[str, dict[str, Any]]:
    """Read the verdicts by kernel and launch."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {f"{entry['kernel']}: {entry['launch']}": entry for entry in map(json.loads, lines)}


def compiler(kernel: str) -> str:
    """Name what makes the text of a kernel here."""
    if kernel not in MODULES:
        return f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"
    from cuda.bindings import nvrtc

    return "nvrtc " + ".".join(map(str, nvrtc.nvrtcVersion()[1:]))


def text_of(kernel: str, launch: str) -> Text:
    """Return the text that a launch runs."""
    if kernel in MODULES:
        return Text(MODULES[kernel]()[launch].ptx)
    if kernel in BEYOND:
        return BEYOND[kernel].text()
    subject = SUBJECTS[kernel]
    return subject.shipped() if launch == SHIPPED and subject.shipped else subject.text()


def store(kernel: str, launch: str, text: Text, verdict: Verdict) -> None:
    """Add a verdict to the table."""
    entry = {
        "kernel": kernel,
        "launch": launch,
        **dataclasses.asdict(verdict),
        "seconds": round(verdict.seconds),
        "sentryward": version("sentryward"),
        "compiler": compiler(kernel),
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


def launches(kernel: str) -> list[str]:
    """Name the launches of a kernel or module."""
    if kernel in MODULES:
        return list(MODULES[kernel]())
    if kernel in BEYOND:
        return [SHIPPED]
    subject = SUBJECTS[kernel]
    return [*subject.launches, *([SHIPPED] if subject.shipped else [])]


def smallest_launch(kernel: str) -> Launch:
    """Return the launch that the shipped text is tried in."""
    if kernel in BEYOND:
        return BEYOND[kernel].launch()
    return next(iter(SUBJECTS[kernel].launches.values()))()


def prove_launch(kernel: str, launch: str) -> Verdict:
    """Prove one launch, or find out where the proof of the shipped text stops."""
    text = text_of(kernel, launch)
    if kernel in MODULES:
        verdict = MODULES[kernel]()[launch].prove()
    elif launch == SHIPPED:
        smallest = smallest_launch(kernel)
        verdict = prove(text.ptx, smallest.plan, smallest.contents)
    else:
        verdict = SUBJECTS[kernel].prove(text.ptx, launch, seconds=1800)
    store(kernel, launch, text, verdict)
    return verdict


def main() -> None:
    """Prove what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kernel", nargs="?", default="vsa_sm100", choices=(*SUBJECTS, *BEYOND, *MODULES)
    )
    parser.add_argument("--launch", default="")
    options = parser.parse_args()
    for launch in launches(options.kernel):
        if options.launch in ("", launch):
            print(f"{launch}: {prove_launch(options.kernel, launch)}", flush=True)


if __name__ == "__main__":
    main()
