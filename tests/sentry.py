"""Prove a launch plan with SentryWard: every schedule ends, and no two accesses race.

SentryWard (PyPI, Apache-2.0) reads PTX and one launch, and follows all schedules of it. It takes
the contents of integer tables as given, so that trip counts that a kernel reads from memory are
followed, too; a branch on anything else that was loaded stalls it. A verdict holds for this launch
and under the assumptions that it names. Fences and numbers are outside its model.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptx_text import Text

from sparse_atten.cute_kernels.common.launch import LaunchPlan, TensorMap

PROVED = "race_free"
REFUTED = ("not_wellsynced", "potential_race", "invalid_lifecycle")
_ELEMENTS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
_MEMORY_MIB = 8192


@dataclass(frozen=True)
class Verdict:
    """What SentryWard says of one launch.

    Parameters
    ----------
    result : str
        `PROVED`, one of `REFUTED`, or why there is no answer, such as "unsupported" or "timeout".
    findings : tuple of str
        What was found or stood in the way, with PTX and Python lines.
    assumptions : tuple of str
        What the verdict rests on, in SentryWard's words, then the limits of this launch.
    events : int
        Events of the program that was checked.
    seconds : float
        Wall time.
    """

    result: str
    findings: tuple[str, ...]
    assumptions: tuple[str, ...]
    events: int
    seconds: float

    def __str__(self) -> str:
        head = f"{self.result}: {self.events} events, {self.seconds:.0f} s"
        parts = [head, *(f"  found {finding}" for finding in self.findings)]
        return "\n".join([*parts, *(f"  assumes {text}" for text in self.assumptions)])


def kernel_input(
    ptx: str,
    plan: LaunchPlan,
    contents: Mapping[int, Sequence[int]],
    *,
    kernel: str = "",
    pointers: Collection[int] = (),
) -> dict[str, Any]:
    """Describe a launch as SentryWard reads it.

    Parameters
    ----------
    ptx : str
    plan : LaunchPlan
    contents : mapping
        Values of the integer tables that decide about trip counts, by the number of the parameter
        that points to them.
    kernel : str
        Which of several kernels of the text.
    pointers : collection of int
        Parameters that are addresses, where the text does not say so.
    """
    start = ptx.index(f".entry {kernel}")
    head = ptx[start : ptx.index(")", start)]
    declared = re.findall(r"\.param\s+([^,\n]*?)\s+\S+?,?(?:\n|$)", head)
    maps, scalars, objects, tables = [], [], [], []
    for number, (value, kind) in enumerate(zip(plan.parameters, declared, strict=True)):
        if value is None:
            continue
        if isinstance(value, TensorMap):
            maps.append(_descriptor(number, value))
        elif (".ptr" in kind or number in pointers) and value:
            objects.append({"parameter": number, "type": "pointer", "object": f"p{number}"})
            if number in contents:
                shapes = [[entry % 2**32] for entry in contents[number]]
                tables.append({"parameter": number, "element_type": "u32", "shapes": shapes})
        elif isinstance(value, bytes):  # a struct, word by word
            words = memoryview(value).cast("I")
            scalars += [
                {"parameter": number, "offset": 4 * i, "type": "u32", "value": word}
                for i, word in enumerate(words)
            ]
        else:
            is_null = ".ptr" in kind or number in pointers
            scalar = "pointer" if is_null else kind.split()[0].lstrip(".")
            given = None if is_null else value
            scalars.append({"parameter": number, "offset": 0, "type": scalar, "value": given})
    entry = {"entry": kernel} if kernel else {}
    return {
        **entry,
        "schema": "spverify.kernel-input/v1",
        "launch": {
            "grid_dim": plan.grid,
            "block_dim": plan.block,
            "cluster_dim": plan.cluster,
            "dynamic_shared_bytes": plan.smem_bytes,
        },
        "tma_descriptors": maps,
        "arguments": scalars,
        "declarations": objects,
        "shape_arrays": tables,
    }


def _descriptor(number: int, tensor_map: TensorMap) -> dict[str, Any]:
    return {
        "parameter": number,
        "object": f"p{number}",
        "element_type": _ELEMENTS[tensor_map.dtype],
        "rank": len(tensor_map.dims),
        "global_shape": tensor_map.dims,
        "global_strides_bytes": tensor_map.strides,
        "box_shape": tensor_map.box,
        "element_strides": [1] * len(tensor_map.dims),
        "swizzle": f"{tensor_map.swizzle}B",
        "interleave": "none",
        "oob_fill": "zero",
    }


def prove(
    ptx: str,
    plan: LaunchPlan,
    contents: Mapping[int, Sequence[int]],
    *,
    seconds: float = 600,
    **choices: Any,
) -> Verdict:
    """Check a launch, described as for `kernel_input`, for so many seconds."""
    import sentryward

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sparse_atten_") as folder:
        kernel, given = Path(folder) / "kernel.ptx", Path(folder) / "input.json"
        kernel.write_text(ptx)
        given.write_text(json.dumps(kernel_input(ptx, plan, contents, **choices)))
        report = sentryward.verify(
            str(kernel),
            input=str(given),
            timeout_seconds=seconds,
            memory_limit_mib=_MEMORY_MIB,
        )
    text = Text(ptx)
    found = [_finding(entry, text) for entry in _entries(report)]
    return Verdict(
        report["result"],
        tuple(dict.fromkeys(found)),
        _assumptions(report),
        report.get("counts", {}).get("events", 0),
        time.monotonic() - start,
    )


def _entries(report: Mapping[str, Any]) -> list[Any]:
    return [*report.get("diagnostics", ()), *report.get("races", ())][:8]


def _finding(entry: Mapping[str, Any], text: Text) -> str:
    """Say what an entry of a report is about, with the lines that it names."""
    named = sorted(_lines(entry))
    lines = [text.show(line) for line in named if 0 < line <= len(text.lines)]
    code = str(entry.get("code", entry.get("kind", "race")))
    return "; ".join([code, *lines[:4]])


def _lines(node: Any) -> set[int]:
    """Collect the PTX lines that a part of a report names."""
    if isinstance(node, Mapping):
        own = {node["line"]} if isinstance(node.get("line"), int) else set()
        return own.union(*map(_lines, node.values()))
    if isinstance(node, list):
        return set().union(*map(_lines, node))
    return set()


def _assumptions(report: Mapping[str, Any]) -> tuple[str, ...]:
    named = [
        f"{entry['key']}: {entry['text']}"
        for entry in report.get("assumptions", ())
        if entry["enabled"] and entry.get("triggered") is not False
    ]
    model = report.get("frontend_assumptions", {})
    if "pointer_contract" in model:
        named.append(f"pointers: {model['pointer_contract']['aliasing']}")
    if "shape_input_contract" in model:
        named.append(f"tables: {model['shape_input_contract']['text']}")
    if model.get("isolated_launch"):
        named.append("isolated launch: nothing else runs on the same memory")
    return tuple(named)
