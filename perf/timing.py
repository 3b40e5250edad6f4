"""How the benchmarks time calls: graphs over rotated inputs, in turn, by CUDA events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def capture(call: Callable, inputs: list[Any]) -> torch.cuda.CUDAGraph:
    """Return a graph that calls once for each input."""
    for _ in range(2):
        call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            call(x)
    return graph


def interleaved(calls: dict[str, Callable], samples: int) -> dict[str, list[float]]:
    """Time calls in turn by CUDA events; microseconds as [median, p20, p80]."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(samples + 2):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if sample >= 2:
                taken[name].append(1e3 * start.elapsed_time(stop))
    quantiles = torch.tensor([0.5, 0.2, 0.8])
    return {name: torch.tensor(t).quantile(quantiles).tolist() for name, t in taken.items()}


def host_time(call: Callable, batch: int = 50, batches: int = 20) -> float:
    """Median time to issue one call, microseconds; few enough at once to never fill the queue."""
    taken = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        taken.append((time.perf_counter() - start) / batch)
    return 1e6 * sorted(taken)[batches // 2]
