"""`video_sparse_attention` end to end, its stages, and dense attention on the same video.

Method: one process; videos of 21 x 45 x 80 tokens (Wan 2.1 at 720p), 40 heads of 128, cut into
tiles of 4 x 4 x 8. Queries and keys are noise and, as strong, a field that is smooth in time and
space, so that neighbouring tiles keep much the same tiles (overlap). The output is first compared
with float64 on query blocks chosen at random. Then the whole call without and with a gate, each
public stage on the tensors that the stage before it made, a device copy of the packed tensors and
the dense contenders run in turn: as a CUDA graph of one call (graph_us; the tensors are far larger
than the L2 cache) and eagerly from an idle GPU (eager_us). Dense contenders attend over the video's
tokens, those called "padded" over as many as the blocks have slots. share is a stage's time over
that of the whole call without a gate, ratio a contender's. bandwidth is in bytes/s, of what a stage
bound by memory must read and write.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from perf.contest import admit, time_calls
from perf.judge import Verdict, every_key, judge
from perf.masks import Work, measure_work
from perf.progress import note, shapes
from perf.rivals import Fa4Dense, Problem, Sdpa
from perf.rows import RowWriter, clocks
from perf.timing import occupy
from sparse_atten import preload, sparse_atten_func
from sparse_atten.contracts import Layout
from sparse_atten.vsa import (
    VideoLayout,
    coarse_attention,
    pack_and_pool,
    route,
    route_scores,
    unpack_gated,
    video_sparse_attention,
)

DEVICE = "cuda"
HEAD_DIM = 128
CORRELATED_TOKENS = 40  # between the points of the smooth field
FIELD = 2.0  # of those points; interpolation leaves about half of it
WHOLE, GATED = "video_sparse_attention", "video_sparse_attention + gate"


class Case(NamedTuple):
    """A video, its heads, and the share of KV blocks that a query block drops."""

    grid: tuple[int, int, int]
    heads: int
    sparsity: float

    @property
    def name(self) -> str:
        """Heads x grid, sparsity."""
        return f"{self.heads}x{'x'.join(map(str, self.grid))}-{self.sparsity}"


CASES = tuple(Case((21, 45, 80), 40, sparsity) for sparsity in (0.8, 0.9, 0.95))
QUICK = (Case((21, 30, 52), 12, 0.9),)


class Stages(NamedTuple):
    """Calls to time by name, whether the result is right, and what was kept."""

    calls: dict[str, Callable[[], object]]
    num_bytes: dict[str, int]  # that a stage bound by memory must move
    verdict: Verdict
    work: Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--backend", default="auto", help="as for sparse_atten_func")
    parser.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd")


def run(arguments: argparse.Namespace, writer: RowWriter) -> None:
    """Measure the videos and write a row for each stage and contender."""
    for case in shapes(QUICK if arguments.quick else CASES, arguments.only):
        for row in measure_case(case, arguments):
            writer.write(row)
            if row["status"] != "ok":
                note(f"{case.name}: {row['backend']} {row['status']}: {row['reason']}")
        torch.cuda.empty_cache()


def measure_case(case: Case, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time one video."""
    generator = torch.Generator(DEVICE).manual_seed(arguments.seed)
    blocks = VideoLayout.from_segments([case.grid], device=DEVICE)
    layout: Layout = arguments.layout
    q, k = (smooth_tokens(case, layout, generator) for _ in range(2))
    v, gate = (noise(case.heads, blocks.num_tokens, layout, generator) for _ in range(2))
    stages = make_stages((q, k, v), gate, blocks, case.sparsity, arguments)
    if not stages.verdict.right:
        raise SystemExit(f"{case.name}: the output is over the error budget: {stages.verdict}")
    padded = tuple(noise(case.heads, blocks.num_slots, layout, generator) for _ in range(3))
    dense, absent = dense_calls({"": (q, k, v), " padded": padded}, layout)
    found = time_calls({**stages.calls, **dense}, arguments.samples)
    whole = found[WHOLE]
    occupy(stages.calls[WHOLE], whole["eager_us"][0])
    common = {
        "case": case.name,
        "heads": case.heads,
        "tokens": blocks.num_tokens,
        "slots": blocks.num_slots,
        "blocks": blocks.num_blocks,
        "sparsity": case.sparsity,
        "density": stages.work.tiles / (case.heads * blocks.num_blocks**2),
        "overlap": stages.work.overlap,
        "layout": layout,
        "samples": arguments.samples,
        "max_error": stages.verdict.max_error,
        "error_budget": stages.verdict.budget,
        "clocks": clocks(),
    }
    rows = []
    for name, times in found.items():
        compared = "ratio" if name in dense else "share"
        row: dict[str, Any] = {"backend": name, "status": "ok", **times}
        if name in stages.num_bytes and "graph_us" in times:
            row["bytes"] = stages.num_bytes[name]
            row["bandwidth"] = row["bytes"] / (1e-6 * times["graph_us"][0])
        for kind in ("graph", "eager"):
            if f"{kind}_us" in times and f"{kind}_us" in whole:
                row[f"{kind}_{compared}"] = times[f"{kind}_us"][0] / whole[f"{kind}_us"][0]
        rows.append({**common, **row})
    return rows + [{**common, **row} for row in absent]


def noise(heads: int, tokens: int, layout: Layout, generator: torch.Generator) -> Tensor:
    """Normal bf16 tokens."""
    dims = (heads, tokens) if layout == "bhsd" else (tokens, heads)
    empty = torch.empty(1, *dims, HEAD_DIM, dtype=torch.bfloat16, device=generator.device)
    return empty.normal_(generator=generator)


def smooth_tokens(case: Case, layout: Layout, generator: torch.Generator) -> Tensor:
    """Noise and a smooth field over the video's grid, bf16."""
    coarse_grid = [2 + size // CORRELATED_TOKENS for size in case.grid]
    shape = (case.heads, HEAD_DIM, *coarse_grid)
    coarse = torch.empty(shape, device=generator.device).normal_(0, FIELD, generator=generator)
    field = interpolate(coarse, size=case.grid, mode="trilinear", align_corners=True)
    field = field.flatten(2).transpose(1, 2)[None]  # [1, H, S, D]
    if layout == "bshd":
        field = field.transpose(1, 2)
    return noise(case.heads, math.prod(case.grid), layout, generator).add_(field)


def make_stages(
    inputs: tuple[Tensor, Tensor, Tensor],
    gate: Tensor,
    blocks: VideoLayout,
    sparsity: float,
    arguments: argparse.Namespace,
) -> Stages:
    """Run each public stage once, judge the result, and return the calls that repeat them."""
    layout, backend = arguments.layout, arguments.backend
    place: dict[str, Any] = {"tensor_layout": layout}

    def whole(gate: Tensor | None) -> Tensor:
        return video_sparse_attention(
            *inputs, blocks, sparsity=sparsity, gate=gate, backend=backend, **place
        )

    def pack(num_pooled: int) -> tuple[list[Tensor], list[Tensor]]:
        return pack_and_pool(inputs, blocks, num_pooled=num_pooled, **place)

    packed, means = pack(3)
    scores = route_scores(*means[:2])
    selection = route(scores, blocks, sparsity=sparsity, **place)
    chosen = preload(*packed, selection, return_lse=True, backend=backend)
    if chosen == "reference" != backend:
        raise SystemExit(f"backend {backend!r} takes the reference: nothing to measure")

    def attend() -> Tensor:
        return sparse_atten_func(*packed, selection, return_lse=True, backend=backend)[0]

    out = attend()

    def coarse() -> Tensor:
        return coarse_attention(scores, means[2], blocks.block_sizes)

    coarse_out = coarse()
    verdict = judge(blocks.pack(whole(None), **place), (packed[0], packed[1], packed[2]), selection)
    tokens, slots = (sum(x.nbytes for x in some) for some in (inputs, packed))
    return Stages(
        {
            WHOLE: lambda: whole(None),
            GATED: lambda: whole(gate),
            "pack + pool": lambda: pack(2),
            "scores": lambda: route_scores(*means[:2]),
            "route": lambda: route(scores, blocks, sparsity=sparsity, **place),
            "attention": attend,
            "unpack": lambda: blocks.unpack(out, **place),
            "coarse branch": coarse,
            "unpack + gate": lambda: unpack_gated(out, gate, coarse_out, blocks, **place),
            "copy": lambda: [x.clone() for x in packed],
        },
        {
            "pack + pool": tokens + slots,
            "unpack": 2 * gate.nbytes,
            "unpack + gate": 3 * gate.nbytes,
            "copy": 2 * slots,
        },
        verdict,
        measure_work(selection, blocks.num_slots),
    )


def dense_calls(
    inputs: dict[str, tuple[Tensor, ...]], layout: Layout
) -> tuple[dict[str, Callable[[], Tensor]], list[dict[str, Any]]]:
    """Calls of the dense contenders on each set of inputs, and rows for those that are absent."""
    calls: dict[str, Callable[[], Tensor]] = {}
    rows = []
    for suffix, (q, k, v) in inputs.items():
        tokens = q.shape[2 if layout == "bhsd" else 1]
        problem = Problem(every_key(q, layout=layout), tokens, (q, k, v))
        contenders, absent = admit([Fa4Dense(), Sdpa()], problem, [(q, k, v)], tokens)
        for entry in contenders:
            calls[entry.rival.name + suffix] = lambda attend=entry.attend, sets=entry.inputs: (
                attend(*sets[0])
            )
        rows += [{**row, "backend": row["backend"] + suffix} for row in absent]
    return calls, rows
