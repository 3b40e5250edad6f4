"""Compile what ships, without a GPU, and tabulate what it takes.

    python tests/compile_kernels.py [options]

    --arch sm_100a      one architecture; otherwise all: sm_90a, sm_100a, sm_103a
    --only TEXT         kernels with this text in their name
    --renew             write hashes of the PTX and resources to tests/golden.json, compare nothing

A hash covers the instructions alone, not comments, line information or names: it shows whether a
change of the sources changed a kernel. Hashes hold for one version of CuTe-DSL; with another one
they are not compared. CuTe-DSL kernels are compiled in a process of their own each. Of a kernel in
MANY, those that differ from its first Config in one field are on record; tests compile the others.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ptx_text import digest

from sparse_atten.csr import device as csr
from sparse_atten.cute_kernels.catalogue import Shipped, shipped
from sparse_atten.cute_kernels.common.nvrtc import Program
from sparse_atten.cute_kernels.common.offline import compile_offline
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.packing import plan as packing
from sparse_atten.scheduler import device as scheduler
from sparse_atten.topk import plan as topk

GOLDEN = Path(__file__).with_name("golden.json")
DSL = "nvidia-cutlass-dsl"
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
PROCESSES = 2
MANY = ("msa_k1_sm100", "msa_k1_sm90")

# Diagnostics of nvvm that kernels cause, and why each is expected.
EXPECTED_WARNINGS = {
    "C1": "no visible mbarrier.init: barriers are addressed by computed integers",
    "C5": "no visible completion of expect_tx: the hardware completes a CLC query",
    "C6": "no reachable arrive for a wait: TMA and tcgen05.commit arrive",
}


@dataclass(frozen=True)
class Row:
    """What a kernel takes; None where nothing here can tell."""

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int | None
    smem_bytes: int
    barriers: int | None
    ptx_bytes: int
    warnings: frozenset[str]
    digest: str

    @property
    def takes(self) -> dict[str, int]:
        """Registers of a thread, bytes of stack and shared memory; spills where they are known."""
        found = {
            "registers": self.registers,
            "stack": self.stack_bytes,
            "spills": self.spill_bytes,
            "shared": self.smem_bytes,
        }
        return {name: number for name, number in found.items() if number is not None}

    def problems(self) -> list[str]:
        """Say what makes the kernel unfit to ship."""
        found = []
        if self.stack_bytes or self.spill_bytes:
            found.append(f"{self.stack_bytes} bytes of stack, {self.spill_bytes} spilled")
        if self.smem_bytes > Target().smem_limit:
            found.append(f"{self.smem_bytes} bytes of shared memory")
        new = self.warnings - EXPECTED_WARNINGS.keys()
        if new:
            found.append(f"new warnings of nvvm: {', '.join(sorted(new))}")
        return found


def dsl_row(entry: Any) -> Row:
    """Compile one entry of `sparse_atten.cute_kernels.catalogue`."""
    made = compile_offline(entry.module, entry.config, entry.target)
    schedule = getattr(sys.modules[entry.module], "SCHEDULE", None)
    return Row(
        entry.name,
        made.registers,
        made.stack_bytes,
        _spills(made.ptx, entry.target.arch),
        schedule.smem_bytes if schedule else made.static_smem_bytes,
        made.barriers + made.mbarriers,
        len(made.ptx),
        made.warnings,
        digest(made.ptx),
    )


def _spills(ptx: str, arch: str) -> int | None:
    """Ask ptxas, where it is installed and knows the text's version of PTX."""
    if shutil.which("ptxas") is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = ["ptxas", "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.stderr)
    return sum(map(int, found)) if log.returncode == 0 else None


def cuda_programs() -> Iterator[tuple[str, Program]]:
    """Yield the programs in CUDA C++, each with the constants that it is compiled with."""
    for is_wide in (False, True):
        yield f"csr wide={int(is_wide)}", csr.program(is_wide)
        yield f"scheduler wide={int(is_wide)}", scheduler.program(is_wide)
    for config in packing.CONFIGS:
        yield f"packing {config.dtype} head_dim={config.head_dim}", packing.program(config)
    for config in topk.CONFIGS:
        constants = " ".join(f"{name}={value}" for name, value in config._asdict().items() if value)
        yield f"topk {constants}", topk.program(config)


def cuda_rows(arch: str, only: str = "") -> Iterator[Row]:
    """Compile the programs in CUDA C++ for an architecture, one row for each kernel."""
    for name, program in cuda_programs():
        if only not in f"{name} {arch}":
            continue
        made = program.compile(Target(arch).capability)
        for kernel, takes in made.resources.items():
            yield Row(
                f"{name.split(' ')[0]} {arch} {kernel} {name.partition(' ')[2]}",
                takes.registers,
                takes.stack_bytes,
                takes.spill_bytes,
                takes.shared_bytes,
                None,
                len(made.ptx),
                frozenset(),
                digest(made.ptx),
            )


def recorded() -> list[Shipped]:
    """Return what ships and is on record."""
    return [entry for entry in shipped() if entry.kernel not in MANY or _fields_off(entry) <= 1]


def _fields_off(entry: Shipped) -> int:
    """Count the fields that differ from the first Config of the kernel."""
    first = shipped(only=f"{entry.kernel} ")[0]
    pair = (vars(x.config).values() for x in (entry, first))
    return sum(a != b for a, b in zip(*pair, strict=True))


def golden() -> dict[str, str]:
    """Return the hashes by name; none where another version of CuTe-DSL is installed."""
    stored = json.loads(GOLDEN.read_text())
    return stored["ptx"] if stored[DSL] == version(DSL) else {}


def resources() -> dict[str, dict[str, int]]:
    """Return what kernels took when their hashes were stored, by name; see `Row.takes`."""
    takes: dict[str, dict[str, int]] = json.loads(GOLDEN.read_text()).get("resources", {})
    return takes


def renew(rows: Iterable[Row]) -> None:
    """Store rows beside those that are there: hashes, of CuTe-DSL kernels alone, and resources."""
    rows = list(rows)
    known = golden() if GOLDEN.exists() else {}
    known.update({row.name: row.digest for row in rows if row.barriers is not None})
    takes = resources() if GOLDEN.exists() else {}
    takes.update({row.name: row.takes for row in rows})
    content = {
        DSL: version(DSL),
        "ptx": dict(sorted(known.items())),
        "resources": dict(sorted(takes.items())),
    }
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


def compile_all(architecture: str = "", only: str = "") -> list[Row]:
    """Compile what ships, with a progress bar."""
    from rich.progress import track

    entries = [x for x in recorded() if architecture in ("", x.target.arch) and only in x.name]
    with ThreadPoolExecutor(PROCESSES) as pool:
        made = pool.map(dsl_row, entries)
        rows = list(track(made, "CuTe-DSL", total=len(entries), disable=not entries))
    archs = [architecture] if architecture else ARCHITECTURES
    found = (row for arch in archs for row in cuda_rows(arch, only))
    return [*rows, *track(found, "CUDA C++", total=None)]


def main() -> int:
    """Compile what the command line names; return how many kernels are not as expected."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default="", choices=("", *ARCHITECTURES))
    parser.add_argument("--only", default="")
    parser.add_argument("--renew", action="store_true")
    options = parser.parse_args()
    rows = compile_all(options.arch, options.only)
    if options.renew:
        renew(rows)
    known = golden()
    table = Table("kernel", *("registers", "stack", "spills", "shared", "barriers", "PTX", "hash"))
    bad = 0
    for row in rows:
        state = "-" if row.name not in known else "ok"
        if known.get(row.name, row.digest) != row.digest:
            state = "CHANGED"
        problems = "; ".join(row.problems())
        bad += bool(problems) or state == "CHANGED"
        numbers = (row.registers, row.stack_bytes, row.spill_bytes, row.smem_bytes, row.barriers)
        cells = ["?" if n is None else f"{n:,}" for n in (*numbers, row.ptx_bytes)]
        table.add_row(f"{row.name} {problems}".strip(), *cells, state)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return bad


if __name__ == "__main__":
    sys.exit(main())
