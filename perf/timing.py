"""How the benchmarks time calls: graphs over rotated inputs, in turn, by CUDA events."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2
ROTATED_BYTES = 512 << 20  # inputs of one graph together, several times the L2 cache

Clock = Callable[[Callable[[], object]], float]


def capture(call: Callable, inputs: list[Any]) -> torch.cuda.CUDAGraph:
    """Return a graph that calls once for each input."""
    for _ in range(WARM_UPS):
        call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            call(x)
    return graph


def try_capture(call: Callable, inputs: list[Any]) -> torch.cuda.CUDAGraph | None:
    """Return a graph, replayed once; None, and say so, where a call cannot be captured."""
    try:
        graph = capture(call, inputs)
    # Whatever a foreign package does must not end the measurement of the others.
    except Exception as error:
        torch.cuda.synchronize()
        print(f"no graph: {error}", file=sys.stderr)
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph


def event_time(call: Callable[[], object]) -> float:
    """Microseconds between a CUDA event before a call and one after it; waits for the second."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop)


def interleaved(
    calls: dict[str, Callable[[], object]], samples: int, *, clock: Clock = event_time
) -> dict[str, list[float]]:
    """Time calls in turn, in rounds that each begin with another one.

    Parameters
    ----------
    calls : dict of str to callable
        By name; results are dropped.
    samples : int
        Rounds, after two that do not count.
    clock : callable
        Runs a call and returns what it took, in microseconds.

    Returns
    -------
    dict of str to [median, p20, p80]
        Microseconds.
    """
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for sample in range(samples + WARM_UPS):
        first = sample % max(len(names), 1)
        for name in names[first:] + names[:first]:
            duration = clock(calls[name])
            if sample >= WARM_UPS:
                taken[name].append(duration)
    return {name: summary(durations) for name, durations in taken.items()}


def occupy(call: Callable[[], object], microseconds: float, span: float = 300e3) -> None:
    """Queue calls that take so long each until the device is busy for a while; do not wait."""
    for _ in range(math.ceil(span / microseconds)):
        call()


def summary(durations: list[float]) -> list[float]:
    """Median, 20th and 80th percentile."""
    quantiles = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    return torch.tensor(durations, dtype=torch.float64).quantile(quantiles).tolist()


def host_time(call: Callable[[], object], batch: int = 50, batches: int = 20) -> float:
    """Median time to issue one call, microseconds; few enough at once to never fill the queue."""
    taken = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        taken.append((time.perf_counter() - start) / batch)
    torch.cuda.synchronize()
    return 1e6 * sorted(taken)[batches // 2]
