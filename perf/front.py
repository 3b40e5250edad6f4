"""The stages of video_sparse_attention around the attention kernel, against a device copy.

Usage: python perf/front.py [--samples 30] [--layout bshd] >> perf/results/front.jsonl

Method: one process. Tokens are bf16, in the order of the sequence; no stage's tensors fit into the
L2 cache but those of the last case. Each stage that has kernels of its own is first compared with
torch: moved tokens bit for bit, means (of normal numbers) within 1e-6. Then all stages run in
turn, as CUDA graphs of one call and eagerly from an idle GPU; `host_us` is the time to issue one
eager call without waiting for it. Times are CUDA events: median, p20 and p80 of the samples. bytes
are those that a stage must read and write at least; of_copy is their rate over that of a large
device copy in this process (read + written). Stages whose name ends in "torch" are the same without
the kernels of sparse_atten.packing.

`stages` gives the calls alone, for other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from revision import git_revision
from timing import capture, host_time, interleaved
from torch import Tensor
from tqdm import tqdm

import sparse_atten
from sparse_atten.contracts import Layout
from sparse_atten.packing import move, preload
from sparse_atten.vsa import (
    VideoLayout,
    coarse_attention,
    pack_and_pool,
    route,
    route_scores,
    unpack_gated,
)

HEAD_DIM = 128


class Case(NamedTuple):
    """Segments, heads, and the share of KV blocks that a query block drops."""

    name: str
    segments: tuple
    heads: int
    sparsity: float


CASES = (
    Case("wan-720p", ((21, 45, 80),), 40, 0.9),
    Case("wan-480p", ((21, 30, 52),), 12, 0.9),
    Case("text-and-video", (512, (21, 45, 80)), 24, 0.9),
    Case("short", ((8, 32, 32),), 24, 0.8),
)


class Stage(NamedTuple):
    """One stage on given tensors, and the bytes that it must move."""

    name: str
    call: Callable[[], object]
    num_bytes: int


def stages(
    inputs: tuple[Tensor, Tensor, Tensor],
    gate: Tensor,
    blocks: VideoLayout,
    *,
    sparsity: float,
    tensor_layout: Layout = "bhsd",
) -> list[Stage]:
    """Run each stage once, and return those around the attention kernel; its output is q's."""
    place = {"tensor_layout": tensor_layout}

    def pack() -> tuple[list[Tensor], list[Tensor]]:
        return pack_and_pool(inputs, blocks, num_pooled=2, **place)

    def pack_with_values() -> tuple[list[Tensor], list[Tensor]]:
        return pack_and_pool(inputs, blocks, num_pooled=3, **place)

    packed, means = pack_with_values()
    slots = packed[0]  # stands for the packed output
    scores = route_scores(*means[:2])
    selection = route(scores, blocks, sparsity=sparsity, **place)
    coarse = coarse_attention(scores, means[2], blocks.block_sizes)
    tokens, table = inputs[0].nbytes, selection.q2k_indices.nbytes
    moved = sum(x.nbytes for x in (*inputs, *packed))

    def unpack() -> Tensor:
        return blocks.unpack(slots, **place)

    def gated() -> Tensor:
        return unpack_gated(slots, gate, coarse, blocks, **place)

    def plain(call: Callable[[], object]) -> Callable[[], object]:
        def without_kernels() -> object:
            with mock.patch.object(move, "runs_kernels", return_value=False):
                return call()

        return without_kernels

    unpacked, unpacked_gated = 2 * tokens, 2 * tokens + gate.nbytes + coarse.nbytes
    return [
        Stage("pack + pool", pack, moved + 2 * means[0].nbytes),
        Stage("pack + pool, values too", pack_with_values, moved + 3 * means[0].nbytes),
        Stage("scores", lambda: route_scores(*means[:2]), scores.nbytes + 2 * means[0].nbytes),
        Stage(
            "route",
            lambda: route(scores, blocks, sparsity=sparsity, **place),
            scores.nbytes + table,
        ),
        Stage(
            "coarse branch",
            lambda: coarse_attention(scores, means[2], blocks.block_sizes),
            scores.nbytes + means[2].nbytes + coarse.nbytes,
        ),
        Stage("unpack", unpack, unpacked),
        Stage("unpack + gate", gated, unpacked_gated),
        Stage("pack + pool, torch", plain(pack), moved + 2 * means[0].nbytes),
        Stage("unpack, torch", plain(unpack), unpacked),
        Stage("unpack + gate, torch", plain(gated), unpacked_gated),
    ]


def main() -> None:
    """Measure all cases and print a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--revision", default=git_revision(), help="the commit, outside a checkout")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd")
    arguments = parser.parse_args()
    preload("cuda")
    bandwidth = copy_bandwidth()
    common = {
        "command": "python " + " ".join(sys.argv),
        "git": arguments.revision,
        "sparse_atten": sparse_atten.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "seed": arguments.seed,
        "layout": arguments.layout,
        "copy_bandwidth": bandwidth,
    }
    cases = [case for case in CASES if arguments.only in case.name]
    for case in tqdm(cases, desc="cases", file=sys.stderr):
        for row in measure_case(case, arguments):
            rate = row["bytes"] / (1e-6 * row["graph_us"][0])
            print(json.dumps({**common, **row, "of_copy": rate / bandwidth}), flush=True)
        torch.cuda.empty_cache()


def measure_case(case: Case, arguments: argparse.Namespace) -> list[dict]:
    """Check and time the stages of one case."""
    generator = torch.Generator("cuda").manual_seed(arguments.seed)
    blocks = VideoLayout.from_segments(case.segments, device="cuda")
    dims = (case.heads, blocks.num_tokens)
    if arguments.layout == "bshd":
        dims = dims[::-1]
    empty = torch.empty(1, *dims, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    q, k, v, gate = (torch.empty_like(empty).normal_(generator=generator) for _ in range(4))
    found = stages((q, k, v), gate, blocks, sparsity=case.sparsity, tensor_layout=arguments.layout)
    check(case, {stage.name: stage.call for stage in found})
    graphs = {s.name: capture(lambda _, call=s.call: call(), [None]).replay for s in found}
    graph_us = interleaved(graphs, arguments.samples)
    eager_us = interleaved({s.name: s.call for s in found}, arguments.samples)
    return [
        {
            "case": case.name,
            "heads": case.heads,
            "tokens": blocks.num_tokens,
            "slots": blocks.num_slots,
            "sparsity": case.sparsity,
            "stage": stage.name,
            "samples": arguments.samples,
            "bytes": stage.num_bytes,
            "graph_us": graph_us[stage.name],
            "eager_us": eager_us[stage.name],
            "host_us": host_time(stage.call, batch=10),
        }
        for stage in found
    ]


def check(case: Case, calls: dict[str, Callable]) -> None:
    """Compare the kernels with torch on the same device."""
    packed, means = calls["pack + pool"]()
    wanted_packed, wanted_means = calls["pack + pool, torch"]()
    same = [torch.equal(a, b) for a, b in zip(packed, wanted_packed, strict=True)]
    for mean, wanted in zip(means, wanted_means, strict=True):
        same.append(bool(((mean - wanted).abs() <= 1e-6).all()))
    same += [
        torch.equal(calls[name](), calls[f"{name}, torch"]())
        for name in ("unpack", "unpack + gate")
    ]
    if not all(same):
        raise SystemExit(f"{case.name}: the kernels do not agree with torch: {same}")


def copy_bandwidth() -> float:
    """Bytes read and written a second by a device copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, 10)
    return 2 * source.nbytes / (1e-6 * times["copy"][0])


if __name__ == "__main__":
    main()
