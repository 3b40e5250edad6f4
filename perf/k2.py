"""K2, the merge of partials, on a GPU against a device copy of as many bytes.

Method: one process. Each shape is first compared with the torch reference in float64. Then the
merge and a copy that reads half and writes half of its bytes run in turn, each as a CUDA graph with
one call for each of a set of inputs larger than the L2 cache, and eagerly over the same inputs,
host overhead included. Times are for one call, by CUDA events: median, p20 and p80 of the samples,
microseconds. `bytes` counts what the slots in use, the LSEs, the counts and the output hold;
`of_copy` is the merge's bandwidth over the copy's. `host_us` is the time to issue one eager call.
`--sweep` adds other Configs; `--check` checks small shapes of every kind and times nothing, so that
compute-sanitizer can watch.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from perf.progress import shapes
from perf.rows import RowWriter
from perf.timing import ROTATED_BYTES, capture, host_time, interleaved
from sparse_atten.cute_kernels import msa_k2
from sparse_atten.cute_kernels.common.dsl import load_kernel
from sparse_atten.cute_kernels.common.planned import PlannedLaunch
from sparse_atten.cute_kernels.common.target import target_of
from sparse_atten.cute_kernels.msa_k2 import Config
from sparse_atten.cute_kernels.msa_k2_arguments import Arguments, arguments_of
from sparse_atten.msa import merge_partials

HEAD_DIM = 128
CHECKED_BYTES = 256 << 20  # of partials that are compared at a time
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}
SWEEP = tuple(
    {"window": window, "threads": threads, "ctas_per_sm": ctas}
    for window, threads, ctas in product((4, 8, 16), (128, 256), (4, 16, 64))
)


@dataclass(frozen=True)
class Case:
    """A shape; `full` says that every slot is in use, else their number is random."""

    queries: int
    heads: tuple[int, int] = (64, 4)
    width: int = 16
    partial: str = "bf16"
    out: str = "bf16"
    full: bool = True
    temperature: bool = False

    @property
    def name(self) -> str:
        """Tokens x heads x slots, and what is special."""
        parts = [f"{self.queries}x{self.heads[0]}x{self.width}-{self.partial}-{self.out}"]
        parts += ["random"] * (not self.full) + ["temperature"] * self.temperature
        return "-".join(parts)

    @property
    def config(self) -> Config:
        """What the shape is merged with."""
        return msa_k2.config_for(
            self.width, partial=self.partial, out=self.out, temperature=self.temperature
        )


CASES = (
    Case(32768),
    Case(8192),
    Case(2048),
    Case(256),
    Case(8192, (16, 1)),
    Case(8192, full=False),
    Case(8192, width=32),
    Case(16384, width=8),
    Case(16384, width=4),
    Case(8192, temperature=True),
    Case(8192, partial="fp16", out="fp16"),
    Case(4096, partial="fp32"),
)
QUICK = (CASES[3], CASES[2])
SMALL = (
    Case(37, full=False),
    Case(19, (9, 3), 21, full=False, temperature=True),
    Case(50, (16, 1), 8, full=False, partial="fp16", out="fp16"),
    Case(23, (4, 2), 4, full=False, partial="fp32"),
    Case(23, (4, 2), 20, full=False, partial="fp32", out="fp32"),
)


@dataclass(frozen=True)
class Merge:
    """Inputs and outputs of one call."""

    partials: tuple[Tensor, Tensor, Tensor | None]  # outputs, LSEs, temperature LSEs
    counts: Tensor
    outputs: tuple[Tensor, Tensor, Tensor | None]

    @property
    def arguments(self) -> Arguments:
        """What the kernel takes."""
        o_partial, lse_partial, lse_t_partial = self.partials
        out, lse, lse_t = self.outputs
        more = {"lse": lse, "lse_t_partial": lse_t_partial, "lse_t": lse_t}
        return arguments_of(o_partial, lse_partial, self.counts, out, **more)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--sweep", action="store_true", help="try other Configs")
    parser.add_argument("--check", action="store_true", help="check small shapes, time nothing")


def run(arguments: argparse.Namespace, writer: RowWriter) -> None:
    """Check and measure the shapes, and write a row for each contender."""
    generator = torch.Generator("cuda").manual_seed(arguments.seed)
    if arguments.check:
        for case in SMALL:
            check(case, draw(case, generator), case.config)
            print(f"{case.name}: equal", file=sys.stderr)
        return
    cases = QUICK if arguments.quick else CASES
    for case in shapes(cases, arguments.only):
        for row in measure_case(case, arguments, generator):
            writer.write(row)
        torch.cuda.empty_cache()


def draw(case: Case, generator: torch.Generator) -> Merge:
    """Random partials; slots that are not in use hold NaN, and one LSE in 64 is -inf."""
    num_heads, num_kv_heads = case.heads
    shape = (case.width, case.queries, num_heads)
    counts = torch.full((case.queries, num_kv_heads), case.width, dtype=torch.int32, device="cuda")
    if not case.full:
        counts.random_(0, case.width + 1, generator=generator)
    dtype, wide = DTYPES[case.partial], torch.float32
    o_partial = torch.empty(*shape, HEAD_DIM, dtype=dtype, device="cuda")
    o_partial.normal_(generator=generator)
    lses = torch.empty(1 + case.temperature, *shape, device="cuda").normal_(
        0, 3, generator=generator
    )
    hidden = torch.empty(shape, device="cuda").uniform_(generator=generator) < 1 / 64
    absent = torch.arange(case.width, device="cuda")[:, None, None] >= counts.repeat_interleave(
        num_heads // num_kv_heads, 1
    )
    lses.masked_fill_(hidden, float("-inf")).masked_fill_(absent, float("nan"))
    o_partial.masked_fill_((hidden | absent)[..., None], float("nan"))
    out = torch.empty(*shape[1:], HEAD_DIM, dtype=DTYPES[case.out], device="cuda")
    lse = torch.empty(shape[1:], dtype=wide, device="cuda")
    warm = (lses[1], torch.empty_like(lse)) if case.temperature else (None, None)
    return Merge((o_partial, lses[0], warm[0]), counts, (out, lse, warm[1]))


def launcher(config: Config):
    """Return what merges on the current stream."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    kernel = load_kernel(msa_k2.__name__, config, target, torch.device("cuda"))

    def call(merge: Merge) -> None:
        PlannedLaunch(kernel, msa_k2.launch_plan(config, target, merge.arguments))()

    return call


def check(case: Case, merge: Merge, config: Config) -> None:
    """Compare with the reference in float64, some tokens at a time."""
    launcher(config)(merge)
    torch.cuda.synchronize()
    o_partial, lse_partial, lse_t_partial = merge.partials
    step = max(1, CHECKED_BYTES // (8 * o_partial[:, 0].numel()))
    for start in range(0, case.queries, step):
        part = slice(start, start + step)
        values = o_partial[:, part].double()
        warm = None if lse_t_partial is None else lse_t_partial[:, part].double()
        exact = merge_partials(
            values, lse_partial[:, part].double(), merge.counts[part], lse_t_partial=warm
        )
        got = [x[part].double() for x in merge.outputs if x is not None]
        budget = ROUNDING[case.out] * exact[0].abs() + 2e-6 * values.nan_to_num(0).abs().amax()
        gaps = [(got[0] - exact[0]).abs() - budget]
        for x, y in zip(got[1:], exact[1:], strict=True):
            same = x.eq(y)  # -inf
            gaps.append(((x - y).abs() - 1e-5 - 3e-7 * y.abs()).masked_fill(same, -1))
        # A NaN is no number below 0 either.
        if not all(bool((gap <= 0).all()) for gap in gaps):
            raise SystemExit(f"{case.name}, {config}: not the merge of the reference")


def moved_bytes(merge: Merge) -> int:
    """Bytes that a merge reads and writes."""
    group = merge.partials[0].shape[2] // merge.counts.shape[1]
    slots = int(merge.counts.sum()) * group
    partials = [x for x in merge.partials if x is not None]
    read = sum(slots * x[0, 0, 0].numel() * x.element_size() for x in partials)
    return read + merge.counts.nbytes + sum(x.nbytes for x in merge.outputs if x is not None)


def measure_case(
    case: Case, arguments: argparse.Namespace, generator: torch.Generator
) -> list[dict]:
    """Check and time one shape."""
    size = moved_bytes(first := draw(case, generator))
    merges = [first, *(draw(case, generator) for _ in range(ROTATED_BYTES // size))]
    configs = {"ours": case.config}
    if arguments.sweep:
        for fields in SWEEP:
            if fields["window"] <= case.config.lanes:
                name = "ours-" + "-".join(map(str, fields.values()))
                configs[name] = replace(case.config, **fields)
    for config in configs.values():
        check(case, first, config)
    half = size // 2 // 4096 * 4096  # copies of memory that is not aligned take half as long again
    memory = [[torch.empty(half, dtype=torch.uint8, device="cuda") for _ in "rw"] for _ in merges]
    calls = {name: launcher(config) for name, config in configs.items()}
    graphs = {name: capture(call, merges) for name, call in calls.items()}
    graphs["copy"] = capture(lambda pair: pair[0].copy_(pair[1]), memory)
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, arguments.samples)
    ours = calls["ours"]
    eager = interleaved({"ours": lambda: [ours(merge) for merge in merges]}, arguments.samples)
    rows = []
    for name in graphs:
        graph_us = [t / len(merges) for t in times[name]]
        row = {
            "case": case.name,
            "backend": name,
            "samples": arguments.samples,
            "inputs": len(merges),
            "bytes": size,
            "graph_us": graph_us,
            "gigabytes_per_second": size / graph_us[0] / 1e3,
            "of_copy": times["copy"][0] / times[name][0],
        }
        if name == "ours":
            row["config"] = str(case.config)
            row["eager_us"] = [t / len(merges) for t in eager["ours"]]
            row["host_us"] = host_time(lambda: ours(first))
        rows.append(row)
    return rows
