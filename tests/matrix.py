"""Render the README's matrix of what is verified from the committed records.

Usage: python tests/matrix.py          rewrites what is between its markers in README.md

Records of the matrix: tests/golden.json (L0, what kernels take), tests/proofs.jsonl (L1,
SentryWard), the tables in tests/mutants, tests/emulated.jsonl (L2, the emulator), perf/results
(runs on a GPU). A kernel has a row as soon as one of the first four knows it. tests/full.jsonl
makes a sentence of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import full

TESTS = Path(__file__).parent
ROOT = TESTS.parent
HEAD = (
    "kernel or module",
    "registers, spills, shared memory",
    "SentryWard",
    "faults put in: seen, of",
    "emulated: cases x schedules",
    "run on",
)
# Which measurements compare the results of a kernel first.
_RUNS = {
    "vsa_sm90": "vsa",
    "packing": "video",
    "msa_k1_sm90": "msa",
    "msa_scores_sm90": "msa",
    "msa_k2": "k2",
    "csr": "csr",
    "scheduler": "csr",
    "topk": "topk",
}
# What SentryWard says where it has no verdict.
_REASONS = {
    "control_predicate_not_static": "beyond it, branches on data",
    "atomic_add_memory_semantics_unsupported": "beyond it, atomics",
    "atomic_memory_semantics": "beyond it, atomics",
    "shared_control_collective_variant": "beyond it, barriers that vote",
}


def main() -> None:
    """Rewrite the README."""
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))


def render(text: str) -> str:
    """Replace what stands between the markers."""
    rendered = {"verification": matrix(), "test-full": [full.sentence(full.read())]}
    for name, lines in rendered.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    return text


def matrix() -> list[str]:
    """One line for each kernel or module."""
    takes = json.loads((TESTS / "golden.json").read_text()).get("resources", {})
    proofs = _lines(TESTS / "proofs.jsonl")
    emulated = {entry["kernel"]: entry for entry in _lines(TESTS / "emulated.jsonl")}
    mutants = {path.stem for path in (TESTS / "mutants").glob("*.jsonl")}
    named = (name.split(" ")[0] for name in takes)
    known = {*named, *(entry["kernel"] for entry in proofs), *emulated, *mutants}
    rows = [
        (
            f"`{kernel}`",
            _resources(takes, kernel),
            _verdicts([entry for entry in proofs if entry["kernel"] == kernel]),
            _faults(kernel),
            _emulated(emulated.get(kernel)),
            _run(kernel),
        )
        for kernel in sorted(known)
    ]
    return [_row(HEAD), _row(["---"] * len(HEAD)), *map(_row, rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _resources(takes: dict[str, dict[str, int]], kernel: str) -> str:
    """The most that one of the texts on record takes."""
    found = [numbers for name, numbers in takes.items() if name.split(" ")[0] == kernel]
    if not found:
        return "not on record"
    most = {key: max(x.get(key, 0) for x in found) for key in ("registers", "stack", "shared")}
    spilled = max(x.get("spills", x["stack"]) for x in found)
    texts = f"{len(found)} text{'s' * (len(found) > 1)}"
    return f"{most['registers']}, {spilled} B, {most['shared']:,} B ({texts})"


def _verdicts(proofs: list[dict[str, Any]]) -> str:
    """How many launches are race-free, and why others have no verdict."""
    if not proofs:
        return "not tried"
    reasons: dict[str, list[str]] = {}
    for entry in proofs:
        if entry["result"] != "race_free":
            code = entry["findings"][0].split(";")[0]
            reasons.setdefault(_REASONS.get(code, code), []).append(entry["launch"])
    proved = len(proofs) - sum(map(len, reasons.values()))
    beyond = [f"{reason} ({', '.join(names)})" for reason, names in reasons.items()]
    return "; ".join([f"{proved} of {len(proofs)} launches race-free", *beyond])


def _faults(kernel: str) -> str:
    """Sum up the table of a kernel's mutants: seen by both steps, by one, by neither."""
    path = TESTS / "mutants" / f"{kernel}.md"
    if not path.exists():
        return "-"
    last = next(line for line in path.read_text().splitlines() if line.startswith("| all |"))
    counts = [int(cell) for cell in last.split("|")[2:-1]]
    return f"{sum(counts[:-1])} of {sum(counts)}"


def _emulated(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "not on record"
    return f"{entry['cases']} x {entry['schedules']}, {entry['checks']}: clean"


def _run(kernel: str) -> str:
    """The GPU whose measurements, which compare results first, are on record."""
    if kernel not in _RUNS:
        return "no GPU"
    rows = _lines(ROOT / "perf" / "results" / f"{_RUNS[kernel]}.jsonl")
    return ", ".join(sorted({row["gpu"].removeprefix("NVIDIA ") for row in rows if "gpu" in row}))


if __name__ == "__main__":
    main()
