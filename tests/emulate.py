"""Run the case lists on the emulator, strictly and with its race detector, and keep what ran.

    python tests/emulate.py [kernel] [--schedules 2] [--processes 1]

tests/emulated.jsonl has one line for each kernel or module whose cases all passed, with the digest
of what they ran. The kernels' own tests replay a sample of the same cases.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import device_cases
import emulation
import packing_cases
import test_block_topk
import test_csr_device
import test_msa_k1_sm90
import test_msa_k1_sm100
import test_msa_k2
import test_msa_scores_sm90
import test_packing
import test_schedule_device
import test_vsa_sm90
import test_vsa_sm100
from ptx_text import digest
from subject import RACES
from verified import SUBJECTS

from sparse_atten.csr import device as csr
from sparse_atten.csr.build import csr_of
from sparse_atten.cute_kernels import msa_k1_sm90
from sparse_atten.cute_kernels.common.nvrtc import Program
from sparse_atten.packing import plan as packing
from sparse_atten.scheduler import device as scheduler
from sparse_atten.topk import plan as topk

TABLE = Path(__file__).with_name("emulated.jsonl")
Schedule = Mapping[str, Any]
# Schedules in the order that finds most faults soonest.
_KERNELS_FIRST, _PROGRAMS_FIRST = (4, 3, 0, 9), (2, 3, 1, 4, 0)


@dataclass(frozen=True)
class Suite:
    """The cases of a kernel.

    Parameters
    ----------
    cases : mapping
        ``cases[name](schedule)`` raises where a run is faulty, or its result not the expected one.
    digest : callable
        Identifies the text: of the PTX of a verification Config, of the source of a CUDA program.
    is_program : bool
        CUDA C++.
    """

    cases: Mapping[str, Callable[[Schedule], None]]
    digest: Callable[[], str]
    is_program: bool = False

    def compiler(self) -> str:
        """Name what the digest depends on besides the sources."""
        return "any" if self.is_program else f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"

    def schedules(self, count: int) -> list[Schedule]:
        """Return the first so many option sets."""
        if self.is_program:
            every, order = emulation.SCHEDULES, _PROGRAMS_FIRST
        else:
            every, order = emulation.schedules(), _KERNELS_FIRST
        order = (*order, *(i for i in range(len(every)) if i not in order))
        return [{**every[number], **RACES} for number in order[:count]]


def _of_source(*programs: Program) -> Callable[[], str]:
    text = "".join(dict.fromkeys(program.source for program in programs))
    return lambda: hashlib.sha256(text.encode()).hexdigest()


def _of_subject(name: str) -> Callable[[], str]:
    return lambda: digest(SUBJECTS[name].text().ptx)


def _tables() -> Iterable[tuple[str, Any]]:
    for name in device_cases.CASES:
        if name != test_csr_device.THREE_PASSES:  # a million rows: hours here, run on a GPU
            yield name, device_cases.tables_of(name)
    for seed in range(12):
        yield f"random {seed}", device_cases.random_tables(seed)


def _csr_case(tables: Any, schedule: Schedule) -> None:
    found = test_csr_device.emulate(tables, schedule)
    device_cases.assert_same(found, csr_of(tables), device_cases.CSR_TENSORS)


def _scheduler_case(tables: Any, schedule: Schedule) -> None:
    split = test_schedule_device.splitting(tables, 16, 4)
    test_schedule_device.check_fused(tables, split, schedule)
    test_schedule_device.check_alone(tables, split, schedule)


def _topk_case(case: dict, schedule: Schedule) -> None:
    found = test_block_topk.emulate(case, schedule)
    test_block_topk.assert_same(found, test_block_topk.expected(case))


def _packing_cases() -> Iterable[tuple[str, Callable[[Schedule], None]]]:
    for name, case in packing_cases.CASES.items():
        yield f"pack {name}", partial(test_packing.check_packed, case)
        yield f"unpack {name}", partial(test_packing.check_unpacked, case)
    for name, kind, is_float in itertools.product(
        test_packing.GATED, packing_cases.GATES, (False, True)
    ):
        check = partial(test_packing.check_gated, packing_cases.CASES[name], kind)
        yield f"unpack {name}, gate {kind} {is_float}", partial(check, is_float=is_float)


def _each(run: Callable[[Any, Schedule], None], cases: Iterable[tuple[str, Any]]) -> dict:
    return {name: lambda schedule, case=case: run(case, schedule) for name, case in cases}


@cache
def suites() -> dict[str, Suite]:
    """Return the suites by kernel."""
    return {
        "vsa_sm100": Suite(
            _each(
                lambda case, schedule: test_vsa_sm100.check(case, [dict(schedule)]),
                ((case.name, case) for case in test_vsa_sm100.CASES),
            ),
            _of_subject("vsa_sm100"),
        ),
        "vsa_sm90": Suite(
            _each(
                lambda case, schedule: test_vsa_sm90.check(case, [dict(schedule)]),
                ((case.name, case) for case in test_vsa_sm90.OWN),
            ),
            lambda: digest(test_vsa_sm90.compiled(test_vsa_sm90.FULL).ptx),
        ),
        "msa_k1_sm100": Suite(
            _each(
                lambda case, schedule: test_msa_k1_sm100.check(case, [dict(schedule)]),
                ((case.name, case) for case in test_msa_k1_sm100.CASES),
            ),
            _of_subject("msa_k1_sm100"),
        ),
        "msa_k1_sm90": Suite(
            _each(
                lambda case, schedule: test_msa_k1_sm100.check(
                    case, [dict(schedule)], test_msa_k1_sm90.run
                ),
                ((case.name, case) for case in test_msa_k1_sm90.OWN),
            ),
            lambda: digest(test_msa_k1_sm90.compiled(msa_k1_sm90.Config(causal=True)).ptx),
        ),
        "msa_k2": Suite(
            _each(
                lambda case, schedule: test_msa_k2.emulated(case, "sm_100a", [dict(schedule)]),
                ((case.name, case) for case in test_msa_k2.CASES),
            ),
            _of_subject("msa_k2"),
        ),
        "msa_scores_sm90": Suite(
            _each(
                lambda case, schedule: test_msa_scores_sm90.check(case, [dict(schedule)]),
                ((case.name, case) for case in test_msa_scores_sm90.CASES),
            ),
            lambda: digest(test_msa_scores_sm90.compiled(test_msa_scores_sm90.kernel.Config()).ptx),
        ),
        "csr": Suite(_each(_csr_case, _tables()), _of_source(csr.program(False)), is_program=True),
        "scheduler": Suite(
            _each(_scheduler_case, _tables()),
            _of_source(scheduler.program(False)),
            is_program=True,
        ),
        "packing": Suite(
            dict(_packing_cases()),
            _of_source(*(packing.program(config) for config in packing.CONFIGS)),
            is_program=True,
        ),
        "topk": Suite(
            _each(_topk_case, test_block_topk.CASES.items()),
            _of_source(*(topk.program(config) for config in topk.CONFIGS)),
            is_program=True,
        ),
    }


def read() -> dict[str, dict[str, Any]]:
    """Read what was emulated, by kernel."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    return {entry["kernel"]: entry for entry in map(json.loads, lines)}


def emulate(kernel: str, count: int, processes: int) -> dict[str, Any]:
    """Run all cases of a kernel under `count` schedules; returns the line of the table."""
    from rich.progress import track

    suite = suites()[kernel]
    schedules = suite.schedules(count)
    runs = [(kernel, name, schedule) for name in suite.cases for schedule in schedules]
    start = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for _ in track(pool.map(_run, *zip(*runs, strict=True)), kernel, total=len(runs)):
            pass
    return {
        "kernel": kernel,
        "cases": len(suite.cases),
        "schedules": len(schedules),
        "checks": "strict profile, race detector",
        "seconds": round(time.monotonic() - start),
        "compiler": suite.compiler(),
        "digest": suite.digest(),
    }


def _run(kernel: str, name: str, schedule: Schedule) -> None:
    try:
        suites()[kernel].cases[name](schedule)
    except Exception as error:
        raise RuntimeError(f"case {name!r} fails in schedule {schedule}") from error


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kernel", nargs="?", default="", choices=("", *suites()))
    parser.add_argument("--schedules", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    for kernel in suites():
        if options.kernel in ("", kernel):
            entry = emulate(kernel, options.schedules, options.processes)
            table = {**read(), kernel: entry}  # others may have written meanwhile
            TABLE.write_text("".join(json.dumps(table[name]) + "\n" for name in sorted(table)))


if __name__ == "__main__":
    main()
