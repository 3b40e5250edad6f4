"""The reference backend against torch's dense attention on the CPU at hand.

Usage: python perf/reference_on_cpu.py [--tokens 9216 --heads 4 --sparsity 0.9 ...] >> results.jsonl

Method: one process; the result is first compared with a float64 softmax over the same blocks on
sampled rows; then sparse and dense calls alternate, and the medians are compared. Every row is one
JSON line. The selection is given: routing is not part of the time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from revision import git_revision
from rich.console import Console
from rich.progress import track

import sparse_atten
from sparse_atten import BlockSelection, explain, sparse_atten_func
from sparse_atten.vsa import region_budget


def main() -> None:
    """Measure one shape and print its row."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    shape = (1, arguments.heads, arguments.tokens, 128)
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    num_blocks = -(-arguments.tokens // arguments.block)
    kept = region_budget(arguments.sparsity, num_blocks)
    ids = torch.rand(1, arguments.heads, num_blocks, num_blocks).argsort(-1)[..., :kept]
    counts = torch.full(ids.shape[:3], kept, dtype=torch.int32)
    selection = BlockSelection(ids.int(), counts, block_size=arguments.block)

    error = sampled_error(sparse_atten_func(q, k, v, selection), (q, k, v), selection)
    times = measure(
        {
            "sparse": lambda: sparse_atten_func(q, k, v, selection),
            "dense": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        },
        arguments.repeats,
    )
    found = explain(q, k, v, selection)
    row = {
        "case": f"reference-cpu-{arguments.tokens}x{arguments.heads}-{arguments.sparsity}",
        "command": "python " + " ".join(sys.argv),
        "git": git_revision(),
        "sparse_atten": sparse_atten.__version__,
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": arguments.dtype,
        "seed": arguments.seed,
        "kept_blocks": f"{kept}/{num_blocks}",
        "repeats": arguments.repeats,
        "max_error_sampled": error,
        "useful_gflop": found.flops / 1e9,
        "sparse_ms": times["sparse"],
        "dense_sdpa_ms": times["dense"],
        "speedup": times["dense"][0] / times["sparse"][0],
    }
    print(json.dumps(row))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=9216)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--block", type=int, default=128, help="tokens of a block")
    parser.add_argument("--sparsity", type=float, default=0.9, help="share of blocks dropped")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def measure(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time calls in turn; milliseconds as [median, fastest, slowest] of each."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in track(range(repeats), "repeats", console=Console(stderr=True)):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: [round(f(times), 2) for f in (statistics.median, min, max)]
        for name, times in samples.items()
    }


def sampled_error(
    out: torch.Tensor, inputs: tuple[torch.Tensor, ...], selection: BlockSelection
) -> float:
    """Largest error of some query blocks against a float64 softmax over their keys."""
    q, k, v = (x[0].double() for x in inputs)
    block, worst = selection.block_size, 0.0
    num_heads, num_blocks = selection.q2k_counts.shape[1:]
    for row in range(0, num_heads * num_blocks, 37):
        head, q_block = divmod(row, num_blocks)
        ids = selection.q2k_indices[0, head, q_block].long()
        keys = (ids[:, None] * block + torch.arange(block)).flatten()
        keys = keys[keys < k.shape[1]]
        queries = slice(q_block * block, (q_block + 1) * block)
        weights = (q[head, queries] @ k[head, keys].T / q.shape[-1] ** 0.5).softmax(-1)
        expected = weights @ v[head, keys]
        worst = max(worst, float((out[0, head, queries].double() - expected).abs().max()))
    return worst


if __name__ == "__main__":
    main()
