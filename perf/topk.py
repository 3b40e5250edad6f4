"""block_topk on a GPU against torch.topk and the time to read the scores once.

Method: one process. Each shape is first compared with the torch reference, bit for bit. Then the
contenders run in turn, in two ways: as a CUDA graph that calls a contender once for each of a set
of inputs larger than the L2 cache, and eagerly over the same inputs, host overhead included. Times
are for one call, by CUDA events: median, p20 and p80 of the samples. `host_us` is the time to issue
one eager call, without waiting for it, `replay_host_us` that to issue a graph of one call. The read
floor is the bytes of the scores over the bandwidth of a large device copy measured in this process
(read + written). Every row is one JSON line.

Contenders: ours; torch.topk; torch.topk and the ids sorted, which is what ours gives (for scores
[H, n, Tq] both along dim 1); for contiguous rows, where flashinfer is installed, its radix top-k,
ids not sorted. `--sweep` adds the other ways to spread a row over threads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from perf.progress import shapes
from perf.rivals import not_installed
from perf.rows import RowWriter
from perf.timing import ROTATED_BYTES, capture, host_time, interleaved
from sparse_atten.topk import block_topk, plan
from sparse_atten.topk.reference import check_request, largest_blocks

SWEEP = ((4, 16), (8, 16), (8, 32), (16, 16), (16, 32), (32, 8), (32, 24), (32, 32))
SWEEP_THREADS = (64, 128, 256)  # of a thread block, for rows; for columns one shape has one number


class Case(NamedTuple):
    """A shape of scores, the axis of the blocks, k, and whether rows have causal bounds."""

    name: str
    shape: tuple[int, ...]
    dim: int
    k: int
    causal: bool = False


CASES = (
    Case("rows-131072x256-k16", (131072, 256), -1, 16),
    Case("rows-131072x1024-k16", (131072, 1024), -1, 16),
    Case("rows-32768x64-k16", (32768, 64), -1, 16),
    Case("rows-28800x720-k72", (28800, 720), -1, 72),
    Case("msa-4x256x32768-k16", (4, 256, 32768), 1, 16),
    Case("msa-4x256x32768-k16-causal-local", (4, 256, 32768), 1, 16, causal=True),
    Case("msa-4x1024x16384-k16", (4, 1024, 16384), 1, 16),
    Case("long-2048x8192-k16", (2048, 8192), -1, 16),
    Case("long-1x1048576-k512", (1, 1 << 20), -1, 512),
    Case("msa-4x8192x2048-k16", (4, 8192, 2048), 1, 16),
)
QUICK = (CASES[2], CASES[3])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--sweep", action="store_true", help="try other configs of short rows")


def run(arguments: argparse.Namespace, writer: RowWriter) -> None:
    """Measure the shapes and write a row for each contender."""
    bandwidth = copy_bandwidth()
    absent = not_installed("flashinfer", "flashinfer-python")
    if absent:
        print(f"not measured: flashinfer.top_k ({absent})", file=sys.stderr)
    cases = QUICK if arguments.quick else CASES
    for case in shapes(cases, arguments.only):
        for row in measure_case(case, arguments.samples, sweep=arguments.sweep):
            floor_us = 1e6 * row["score_bytes"] / bandwidth
            ratio = row["graph_us"][0] / floor_us
            writer.write(
                {"copy_bandwidth": bandwidth, **row, "floor_us": floor_us, "of_floor": ratio}
            )


def measure_case(case: Case, samples: int, *, sweep: bool) -> list[dict]:
    """Check and time one shape."""
    count = max(2, -(-ROTATED_BYTES // (4 * torch.Size(case.shape).numel())))
    inputs = [torch.randn(case.shape, device="cuda") for _ in range(count)]
    options = causal_options(case)
    check(case, inputs[0], options)
    contenders: dict[str, Callable] = {
        "ours": lambda x: block_topk(x, case.k, dim=case.dim, **options)
    }
    if not case.causal:
        contenders["torch.topk"] = lambda x: x.topk(case.k, dim=case.dim)
        contenders["torch.topk+sort"] = lambda x: x.topk(case.k, dim=case.dim)[1].sort(case.dim)
    if case.dim == -1 and not_installed("flashinfer", "flashinfer-python") is None:
        import flashinfer

        contenders["flashinfer.top_k"] = lambda x: flashinfer.top_k(x, case.k)
    graphs = {name: capture(call, inputs) for name, call in contenders.items()}
    if sweep and case.shape[case.dim] <= 1024:
        graphs |= sweep_graphs(case, inputs, options)
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, samples)
    eager = interleaved(
        {name: lambda call=call: [call(x) for x in inputs] for name, call in contenders.items()},
        samples,
    )
    rows = []
    for name in graphs:
        row = {
            "case": case.name,
            "backend": name,
            "samples": samples,
            "inputs": count,
            "score_bytes": inputs[0].nbytes,
            "graph_us": [t / count for t in times[name]],
            "ratio_to_topk": None if case.causal else times["torch.topk"][0] / times[name][0],
        }
        if name in contenders:
            row["eager_us"] = [t / count for t in eager[name]]
            row["host_us"] = host_time(lambda call=contenders[name]: call(inputs[0]))
            row["replay_host_us"] = host_time(capture(contenders[name], inputs[:1]).replay)
        rows.append(row)
    return rows


def causal_options(case: Case) -> dict:
    """Bounds and local blocks of queries that are spread evenly over the keys."""
    if not case.causal:
        return {}
    num_blocks, queries = case.shape[1:]
    local = (torch.arange(queries, device="cuda") * num_blocks // queries).int()
    return {"valid_counts": local + 1, "local_blocks": local, "first_blocks": 1}


def check(case: Case, scores: torch.Tensor, options: dict) -> None:
    """Compare with the reference, run by torch on the same device."""
    defaults = {"valid_counts": None, "local_blocks": None, "first_blocks": 0, "last_blocks": 0}
    filled = {**defaults, **options}
    request = check_request(scores, case.k, dim=case.dim, regions=None, keep_spans=(), **filled)
    wanted = largest_blocks(scores, request, **filled)
    result = block_topk(scores, case.k, dim=case.dim, **options)
    if not all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True)):
        raise SystemExit(f"{case.name}: the result is not that of the reference")


def sweep_graphs(case: Case, inputs: list, options: dict) -> dict[str, torch.cuda.CUDAGraph]:
    """Graphs of ours with each short config that takes the rows."""
    shipped, graphs = plan.CONFIGS, {}
    columns = int(case.dim == 1)
    for group, items in SWEEP:
        if group * items < case.shape[case.dim]:
            continue
        for threads in (32 * group,) if columns else SWEEP_THREADS:
            config = plan.Config(
                columns=columns, forced=int(case.causal), group=group, items=items, threads=threads
            )
            plan.CONFIGS = (config, *shipped)
            forget_plans()
            graphs[f"ours-{group}x{items}-{threads}"] = capture(
                lambda x: block_topk(x, case.k, dim=case.dim, **options), inputs
            )
    plan.CONFIGS = shipped
    forget_plans()
    return graphs


def forget_plans() -> None:
    """Let calls of known shapes choose among the configs anew."""
    sys.modules["sparse_atten.topk.block_topk"]._CALLS.clear()


def copy_bandwidth() -> float:
    """Bytes read and written a second by a device copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, 10)
    return 2 * source.nbytes / (1e-6 * times["copy"][0])
