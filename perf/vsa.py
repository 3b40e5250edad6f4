"""Block-sparse attention with blocks of 128 against dense attention and every sparse rival.

Method: one process. For each shape and mask every contender first computes the output, which is
compared with float64 on query blocks chosen at random, all their keys read; one that is over the
package's error budget is reported as wrong and not timed. The others then run in turn, each round
beginning with another one, in two ways: as a CUDA graph that calls the contender once for each of a
set of inputs that together pass the L2 cache (graph_us, of one call: the kernels alone), and as one
eager call from an idle GPU, host overhead included (eager_us). Times are by CUDA events: median,
p20 and p80. host_us is the time to issue one eager call. Tables are made before the time begins.

tflops counts 4 * 128 for each pair of a valid query and a valid key that the mask keeps (for dense
contenders: for all pairs of valid tokens), tile_tflops whole blocks. of_roofline is the larger of
the data sheet's time for the whole blocks and for every tensor once, over graph_us. overlap is the
mean share of a query block's KV blocks that its neighbour keeps too. A dense contender attends over
the valid tokens alone, without the padding of ragged blocks. Contenders that were not timed have
rows with a status and a reason.

--sweep measures sparsity x length x mask for the plots instead, in graphs alone, with fewer rounds,
rivals and checked query blocks. What does not fit into --seconds is left out, and said so in rows.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch

from perf.contest import Contender, Times, admit, clocks_at_work, time_contenders
from perf.judge import SAMPLED_BLOCKS
from perf.masks import (
    CASES,
    HEAD_DIM,
    QUICK,
    SPARSITIES,
    SWEEP,
    Case,
    VideoCase,
    Work,
    draw_inputs,
    measure_work,
)
from perf.progress import note, shapes
from perf.rivals import RIVALS, Ours, Problem, Rival
from perf.rows import RowWriter
from perf.timing import ROTATED_BYTES
from sparse_atten.cute_kernels.common.target import product_of

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUICK_RIVALS = ("fa4-dense", "fa4-sparse", "cudnn-fixed", "cudnn-counts")
SWEEP_RIVALS = ("fa4-dense", "fa4-sparse", "cudnn-fixed")
SWEEP_SAMPLES, SWEEP_BLOCKS = 5, 4  # rounds of timing, and query blocks that are checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--sweep", action="store_true", help="the shapes of the plots instead")
    parser.add_argument("--seconds", type=float, default=140, help="bound on --sweep")
    parser.add_argument("--rivals", help="names with commas between; default: all, or a few")
    parser.add_argument("--backend", default="auto", help="ours: as for sparse_atten_func")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd")


def run(arguments: argparse.Namespace, writer: RowWriter) -> None:
    """Measure the shapes and write a row for each contender."""
    cases: tuple[Case | VideoCase, ...] = QUICK if arguments.quick else CASES
    few: tuple[str, ...] | None = QUICK_RIVALS if arguments.quick else None
    stop = math.inf
    if arguments.sweep:
        cases, few = SWEEP[:: len(SPARSITIES)] if arguments.quick else SWEEP, SWEEP_RIVALS
        stop = time.monotonic() + arguments.seconds
    rivals: list[Rival] = [Ours(arguments.backend), *choose_rivals(arguments.rivals, few)]
    ours_failed = False
    for case in shapes(cases, arguments.only):
        if time.monotonic() > stop:
            rows = [left_out(case, arguments.seconds)]
        else:
            rows = measure_case(case, rivals, arguments)
        for row in rows:
            writer.write(row)
            if row["status"] != "ok":
                note(f"{case.name}: {row['backend']} {row['status']}: {row['reason']}")
        ours_failed |= rows[0]["status"] in ("wrong", "failed")
        torch.cuda.empty_cache()
    if ours_failed:
        raise SystemExit("this package's own kernel failed: see the rows")


def left_out(case: Case | VideoCase, seconds: float) -> dict[str, Any]:
    """Row for a shape that the time did not suffice for."""
    reason = f"the {seconds:.0f} seconds of --seconds are over"
    return {"case": case.name, "backend": "all", "status": "left out", "reason": reason}


def choose_rivals(names: str | None, few: tuple[str, ...] | None) -> list[Rival]:
    """Rivals by name; without names the few, or all.

    Raises
    ------
    SystemExit
        There is none of a name.
    """
    known = {rival.name: rival for rival in RIVALS}
    chosen = (few or tuple(known)) if names is None else names.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise SystemExit(f"no rival {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in chosen]


def measure_case(
    case: Case | VideoCase, rivals: list[Rival], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Check and time one shape; the first row is ours."""
    generator = torch.Generator(DEVICE).manual_seed(arguments.seed)
    dtype, layout = DTYPES[arguments.dtype], arguments.layout
    selection = case.select(generator, layout)
    inputs = [draw_inputs(case, dtype, layout, generator)]
    size = sum(x.nbytes for x in inputs[0])
    inputs += [draw_inputs(case, dtype, layout, generator) for _ in range(ROTATED_BYTES // size)]
    work = measure_work(selection, case.tokens)
    problem = Problem(selection, case.tokens, inputs[0])
    samples, checked = arguments.samples, SAMPLED_BLOCKS
    if arguments.sweep:
        samples, checked = min(samples, SWEEP_SAMPLES), SWEEP_BLOCKS
    contenders, absent = admit(rivals, problem, inputs, work.valid_tokens, blocks=checked)
    times = time_contenders(contenders, samples, eagerly=not arguments.sweep)
    tables = selection.q2k_indices.nbytes + selection.q2k_counts.nbytes
    memory_bytes = size + inputs[0][0].nbytes + tables  # the output is as large as q
    common = {
        **describe_case(case, work),
        "dtype": arguments.dtype,
        "layout": layout,
        "samples": samples,
        "inputs": len(inputs),
        "clocks": clocks_at_work(contenders, times),
    }
    rows = [{**common, **timed_row(case, work, entry, times, memory_bytes)} for entry in contenders]
    rows += [{**common, **row} for row in absent]
    return sorted(rows, key=lambda row: row["backend"] != "ours")


def describe_case(case: Case | VideoCase, work: Work) -> dict[str, Any]:
    """Fields that say what was computed."""
    return {
        "case": case.name,
        "heads": case.heads[0],
        "kv_heads": case.heads[1],
        "tokens": case.tokens,
        "valid_tokens": work.valid_tokens,
        "blocks": case.blocks,
        "kept": case.kept,
        "mask": case.mask,
        "counts": case.counts,
        "sizes": case.sizes,
        "density": work.tiles / (case.heads[0] * case.blocks**2),
        "overlap": work.overlap,
    }


def timed_row(
    case: Case | VideoCase,
    work: Work,
    entry: Contender,
    times: dict[str, Times],
    memory_bytes: int,
) -> dict[str, Any]:
    """Times and rates of one contender, and how many times as fast ours is."""
    name, dense = entry.rival.name, entry.rival.dense
    own = times[name]
    flops, tile_flops = count_flops(case, work, dense)
    microseconds = own.best_us
    row: dict[str, Any] = {
        "backend": name,
        "status": "ok",
        "dense": dense,
        "max_error": entry.max_error,
        "error_budget": entry.budget,
        "flops": flops,
        "tile_flops": tile_flops,
        **own._asdict(),
        "tflops": flops / microseconds / 1e6,
        "tile_tflops": tile_flops / microseconds / 1e6,
    }
    product = product_of(entry.inputs[0][0].device)
    if product is not None:
        floor = max(tile_flops / product.tensor_flops, memory_bytes / product.bandwidth)
        row["roofline_us"] = 1e6 * floor
        row["of_roofline"] = 1e6 * floor / microseconds
    if "ours" in times:
        row |= ratios(own, times["ours"])
    return row


def ratios(theirs: Times, ours: Times) -> dict[str, float]:
    """How many times as fast ours is, as graphs and eagerly."""
    found = {}
    if theirs.eager_us and ours.eager_us:
        found["eager_ratio"] = theirs.eager_us[0] / ours.eager_us[0]
    if theirs.graph_us and ours.graph_us:
        found["graph_ratio"] = theirs.graph_us[0] / ours.graph_us[0]
    return found


def count_flops(case: Case | VideoCase, work: Work, dense: bool) -> tuple[int, int]:
    """FLOPs of the pairs that count, and of the tiles that hold them."""
    heads = case.heads[0]
    pairs, tiles = work.pairs, work.tiles
    if dense:
        pairs, tiles = heads * work.valid_tokens**2, heads * (-(-work.valid_tokens // 128)) ** 2
    return 4 * HEAD_DIM * pairs, 4 * HEAD_DIM * 128 * 128 * tiles
