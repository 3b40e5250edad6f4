"""Search for faults that no check sees: python tests/mutate.py [kernel].

Every mutant of a kernel is emulated (L2) in one schedule after the other until one shows the fault,
then, where none does, once with the race detector, then given to SentryWard (L1). What was found is
kept in tests/mutants/<kernel>.jsonl, one mutant a line, and rendered in tests/mutants/<kernel>.md.
A search goes on where the last one stopped; --renew starts anew. The tests replay each mutant in
the schedule that shows it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import emulation
import sentry
from mutations import Mutant, mutants, mutated
from ptx_text import Text
from subject import RACES, Subject
from verified import SUBJECTS

FOLDER = Path(__file__).with_name("mutants")
# Schedules in the order that finds most faults soonest; then all the others.
_FIRST = (4, 3, 0, 9)
STUCK = "shared_control_blocked"  # SentryWard's word for warps that wait for each other's values


@dataclass(frozen=True)
class Record:
    """What is known of a mutant.

    Parameters
    ----------
    mutant : Mutant
    line : str
        The PTX line that it changes.
    schedule : int or None
        Number of the emulator's schedule that shows the fault, -1 where none does, None: not run.
    fault : str
        What the emulator said.
    race : str or None
        What its race detector said; None: not run.
    proofs : dict
        SentryWard's result by launch.
    """

    mutant: Mutant
    line: str
    schedule: int | None = None
    fault: str = ""
    race: str | None = None
    proofs: dict[str, str] = field(default_factory=dict)

    @property
    def refuted(self) -> bool:
        """Whether SentryWard refused a launch: it found a fault, or warps that cannot go on."""
        return any(
            result.split(":")[0] in sentry.REFUTED or STUCK in result
            for result in self.proofs.values()
        )

    @property
    def emulated(self) -> bool:
        """Whether a schedule or the race detector shows the fault."""
        return self.scheduled or bool(self.race)

    @property
    def scheduled(self) -> bool:
        """Whether a schedule shows the fault."""
        return self.schedule is not None and self.schedule >= 0

    @property
    def caught(self) -> str:
        """By which step: "both", "L1", "L2", "" where all let it pass."""
        steps = {(True, True): "both", (True, False): "L1", (False, True): "L2"}
        return steps.get((self.refuted, self.emulated), "")


def read(subject: Subject) -> dict[Mutant, Record]:
    """Read the table of a kernel; empty where there is none."""
    path = FOLDER / f"{subject.name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [
        Record(**{**entry, "mutant": Mutant(**entry["mutant"])}) for entry in map(json.loads, lines)
    ]
    return {record.mutant: record for record in records}


def explained(subject: Subject) -> dict[str, str]:
    """Read why mutants that nothing catches are harmless, by their names; written by hand."""
    content = json.loads((FOLDER / "explained.json").read_text())
    reasons: dict[str, str] = content.get(subject.name, {})
    return reasons


def write(subject: Subject, records: Iterable[Record]) -> None:
    """Write the table and its rendering."""
    FOLDER.mkdir(exist_ok=True)
    records = list(records)
    lines = [json.dumps(asdict(record)) for record in records]
    (FOLDER / f"{subject.name}.jsonl").write_text("\n".join(lines) + "\n")
    (FOLDER / f"{subject.name}.md").write_text(rendered(subject, records))


def rendered(subject: Subject, records: list[Record]) -> str:
    """Render a table as markdown: a summary by kind of edit, survivors, then all."""
    counts = Counter((f"{r.mutant.edit} {r.mutant.kind}", r.caught) for r in records)
    total = Counter(r.caught for r in records)
    rows = [
        f"| {kind} | " + " | ".join(str(counts[kind, step] or "") for step in _STEPS) + " |"
        for kind in dict.fromkeys(kind for kind, _ in counts)
    ]
    head = f"| fault | {' | '.join(label for label in _STEPS.values())} |"
    rule = "|---|" + "---:|" * len(_STEPS)
    last = "| all | " + " | ".join(str(total[step]) for step in _STEPS) + " |"
    why = explained(subject)
    survivors = [
        f"- {r.mutant}: `{r.line}`. {why.get(str(r.mutant), 'Not explained.')}"
        for r in records
        if not r.caught
    ]
    every = [f"| {r.mutant} | {_proofs(r)} | {_schedule(r)} | {_race(r)} |" for r in records]
    return "\n".join(
        [
            f"# Mutants of {subject.name}",
            "",
            f"{len(records)} faults in the PTX of the verification Config, one at a time. L1 is",
            "SentryWard, L2 the emulator; `python tests/mutate.py` writes this file.",
            "",
            head,
            rule,
            *rows,
            last,
            "",
            "## Seen by neither",
            "",
            *(survivors or ["None."]),
            "",
            "## All",
            "",
            "| mutant | L1: result by launch | L2: schedule, what it shows | L2: race detector |",
            "|---|---|---|---|",
            *every,
            "",
        ]
    )


_STEPS = {"both": "L1 and L2", "L1": "L1 alone", "L2": "L2 alone", "": "neither"}


def _proofs(record: Record) -> str:
    return "; ".join(f"{launch}: {result}" for launch, result in record.proofs.items()) or "not run"


def _schedule(record: Record) -> str:
    if record.schedule is None:
        return "not run"
    return f"{record.schedule}: {_cell(record.fault)}" if record.scheduled else "none"


def _race(record: Record) -> str:
    return "not run" if record.race is None else _cell(record.race) or "nothing"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:110]


def emulate(subject: Subject, record: Record, text: Text) -> Record:
    """Find a schedule that shows the fault."""
    ptx = mutated(record.mutant, text, subject.schedule)
    schedules = emulation.schedules()
    order = [*_FIRST, *(i for i in range(len(schedules)) if i not in _FIRST)]
    for number in order:
        fault = subject.fault(ptx, schedules[number])
        if fault:
            return replace(record, schedule=number, fault=fault)
    return replace(record, schedule=-1)


def prove(subject: Subject, record: Record, text: Text, launch: str) -> Record:
    """Ask SentryWard about a mutant."""
    ptx = mutated(record.mutant, text, subject.schedule)
    verdict = subject.prove(ptx, launch)
    first = verdict.findings[0].split(";")[0] if verdict.findings else ""
    result = verdict.result if verdict.result == sentry.PROVED else f"{verdict.result}: {first}"
    return replace(record, proofs={**record.proofs, launch: result})


def chosen(subject: Subject, text: Text) -> dict[Mutant, Record]:
    """Return the mutants of the sites that stand for all of their kind, barrier and function."""
    found = mutants(text, subject.schedule, subject.kinds)
    return {m: Record(m, line) for m, line in found.items() if m.number in subject.numbers}


def main() -> None:
    """Search as the command line asks."""
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", nargs="?", default="vsa_sm100", choices=SUBJECTS)
    parser.add_argument("--renew", action="store_true", help="forget what was found before")
    parser.add_argument("--launches", type=int, help="how many to prove in; else the small ones")
    parser.add_argument("--survivors", action="store_true", help="prove those that L2 misses alone")
    options = parser.parse_args()
    subject = SUBJECTS[options.kernel]
    text = subject.text()
    known = {} if options.renew else read(subject)
    found = chosen(subject, text)
    records = {m: replace(known.get(m, record), line=record.line) for m, record in found.items()}
    for mutant in track([m for m in records if records[m].schedule is None], "emulating"):
        records[mutant] = emulate(subject, records[mutant], text)
        write(subject, records.values())
    watched = [m for m in records if records[m].race is None and not records[m].scheduled]
    for mutant in track(watched, "detecting races"):
        ptx = mutated(mutant, text, subject.schedule)
        records[mutant] = replace(records[mutant], race=subject.fault(ptx, RACES))
        write(subject, records.values())
    count = subject.small if options.launches is None else options.launches
    for launch in tuple(subject.launches)[:count]:
        waiting = [
            m
            for m, record in records.items()
            if not record.refuted
            and launch not in record.proofs
            and not (options.survivors and record.emulated)
        ]
        for mutant in track(waiting, f"proving {launch}"):
            records[mutant] = prove(subject, records[mutant], text, launch)
            write(subject, records.values())


if __name__ == "__main__":
    main()
