"""One JSON line for each measurement, with what it takes to repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

import sparse_atten

PACKAGES = (
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-attn-4",
    "quack-kernels",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "triton",
)
_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


class RowWriter:
    """Append rows to a file, or print them; each holds the common fields and its own.

    Parameters
    ----------
    path : Path or None
        None prints to standard output.
    common : dict
        Fields of every row; a row's own field of the same name wins.
    """

    def __init__(self, path: Path | None, common: dict[str, Any]) -> None:
        self.common = common
        self._file: TextIO = sys.stdout if path is None else path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        """Write one row at once, so that a run that is cut short leaves what it found."""
        print(json.dumps({**self.common, **row}), file=self._file, flush=True)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not sys.stdout:
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; none where it is absent."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def common_fields(command: str, revision: str, seed: int) -> dict[str, Any]:
    """Command, commit, versions, device, driver: what every row of a run on the GPU holds."""
    return {
        "command": command,
        "git": revision,
        "sparse_atten": sparse_atten.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": installed_versions(),
        "gpu": torch.cuda.get_device_name(),
        "driver": "".join(_ask("driver_version") or []) or None,
        "seed": seed,
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on, of those that are installed."""
    known = {package.name: package.version for package in importlib.metadata.distributions()}
    return {name: known[name] for name in PACKAGES if name in known}


def clocks() -> dict[str, float] | None:
    """Clocks, power and temperature of the GPU at this moment; None where nobody tells."""
    values = _ask(",".join(_CLOCKS.values()))
    if values is None:
        return None
    return {
        name: float(value)
        for name, value in zip(_CLOCKS, values, strict=True)
        if value.replace(".", "", 1).isdigit()
    }


def _ask(fields: str) -> list[str] | None:
    """Let nvidia-smi answer for the current device."""
    if not torch.cuda.is_available():
        return None
    command = [
        "nvidia-smi",
        f"--query-gpu={fields}",
        "--format=csv,noheader,nounits",
        f"--id={torch.cuda.current_device()}",
    ]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else [part.strip() for part in done.stdout.split(",")]
