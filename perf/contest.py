"""One problem, several contenders: each is checked, then all are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from torch import Tensor

from perf.judge import SAMPLED_BLOCKS, every_key, judge
from perf.masks import Inputs
from perf.rivals import Attend, Problem, Rival, UnsupportedError
from perf.rows import clocks
from perf.timing import host_time, interleaved, occupy, try_capture

HOST_BUDGET_US = 40e3  # device time of the calls whose issue is timed at once


class Contender(NamedTuple):
    """A rival that gave the right answer, ready to be timed."""

    rival: Rival
    attend: Attend
    inputs: list[Inputs]
    max_error: float
    budget: float


class Times(NamedTuple):
    """Microseconds of a call as [median, p20, p80]; `host_us` to issue one. None: not timed."""

    graph_us: list[float] | None
    eager_us: list[float] | None = None
    host_us: float | None = None

    @property
    def best_us(self) -> float:
        """The median in graphs; eagerly where there is none."""
        times = self.graph_us or self.eager_us
        assert times is not None
        return times[0]


def admit(
    rivals: Sequence[Rival],
    problem: Problem,
    inputs: list[Inputs],
    dense_tokens: int,
    *,
    blocks: int = SAMPLED_BLOCKS,
) -> tuple[list[Contender], list[dict[str, Any]]]:
    """Prepare and check each rival.

    Parameters
    ----------
    rivals : sequence of Rival
    problem : Problem
    inputs : list of (q, k, v)
        Sets of the same shapes; the first is the one checked.
    dense_tokens : int
        Dense rivals attend over the first so many tokens: no padding counts against them.
    blocks : int
        Query blocks of an output that are checked.

    Returns
    -------
    contenders, rows
        A row for each rival that is not timed: "backend", "status" ("missing", "unsupported",
        "wrong" or "failed") and "reason".
    """
    contenders, rows = [], []
    for rival in rivals:
        sets, selection = inputs, problem.selection
        if rival.dense:
            sets = [shortened(x, dense_tokens, selection.layout) for x in inputs]
            selection = every_key(sets[0][0], layout=selection.layout)
        own = Problem(selection, dense_tokens if rival.dense else problem.tokens, sets[0])
        found = _admit_one(rival, own, sets, blocks)
        if isinstance(found, Contender):
            contenders.append(found)
        else:
            rows.append({"backend": rival.name, "status": found[0], "reason": found[1]})
    return contenders, rows


def _admit_one(
    rival: Rival, problem: Problem, inputs: list[Inputs], blocks: int
) -> Contender | tuple[str, str]:
    """Return a contender, or a status and its reason."""
    reason = rival.missing()
    if reason is not None:
        return "missing", reason
    try:
        attend = rival.prepare(problem)
        verdict = judge(attend(*inputs[0]), inputs[0], problem.selection, blocks=blocks)
    except UnsupportedError as error:
        return "unsupported", str(error)
    # Whatever a foreign package does must not end the measurement of the others.
    except Exception as error:
        return "failed", telling_line(error)
    if not verdict.right:
        return "wrong", f"error {verdict.max_error:.3g} over the budget {verdict.budget:.3g}"
    return Contender(rival, attend, inputs, verdict.max_error, verdict.budget)


def time_contenders(
    contenders: Sequence[Contender], samples: int, *, eagerly: bool = True
) -> dict[str, Times]:
    """Time all in turn: as graphs over all inputs, and eagerly, one call from an idle GPU each.

    Without `eagerly` only those are timed eagerly that make no graph.
    """
    graphs: dict[str, Callable[[], object]] = {}
    eager: dict[str, Callable[[], object]] = {}
    for entry in contenders:
        name = entry.rival.name
        call = _spread(entry.attend)
        graph = try_capture(call, entry.inputs)
        if graph is not None:
            graphs[name] = graph.replay
        if eagerly or graph is None:
            turns = cycle(entry.inputs)
            eager[name] = lambda call=call, turns=turns: call(next(turns))
    graph_times, eager_times = interleaved(graphs, samples), interleaved(eager, samples)
    times = {}
    for entry in contenders:
        name, count = entry.rival.name, len(entry.inputs)
        in_graph = [t / count for t in graph_times[name]] if name in graph_times else None
        times[name] = Times(in_graph)
        if name in eager_times:
            batch = int(max(1, min(50, HOST_BUDGET_US / eager_times[name][0])))
            host_us = host_time(eager[name], batch, 10)
            times[name] = Times(in_graph, eager_times[name], host_us)
    return times


def time_calls(
    calls: dict[str, Callable[[], object]],
    samples: int,
    *,
    repeats: int = 1,
    eager: Collection[str] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Time calls without arguments in turn, as graphs and eagerly from an idle GPU.

    Parameters
    ----------
    calls : dict of str to callable
    samples : int
        Rounds.
    repeats : int
        Calls in a graph, whose time is divided by their number.
    eager : collection of str, optional
        The only names that are also timed eagerly if they make a graph; None is all.

    Returns
    -------
    dict of str to dict
        "graph_us" and "eager_us" of each name, [median, p20, p80]; each only where it was timed.
    """
    graphs = {}
    for name, call in calls.items():
        graph = try_capture(lambda _, call=call: call(), [None] * repeats)
        if graph is not None:
            graphs[name] = graph.replay
    eagerly = {
        name: call
        for name, call in calls.items()
        if name not in graphs or eager is None or name in eager
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    for name, times in interleaved(graphs, samples).items():
        found[name]["graph_us"] = [t / repeats for t in times]
    for name, times in interleaved(eagerly, samples).items():
        found[name]["eager_us"] = times
    return found


def clocks_at_work(
    contenders: Sequence[Contender], times: dict[str, Times]
) -> dict[str, float] | None:
    """Read the clocks while the device runs the first contender."""
    for rival, attend, inputs, *_ in contenders[:1]:
        occupy(partial(attend, *inputs[0]), times[rival.name].best_us)
    return clocks()


def shortened(inputs: Inputs, tokens: int, layout: str) -> Inputs:
    """Views of the first tokens."""
    dim = 2 if layout == "bhsd" else 1
    q, k, v = (x.narrow(dim, 0, tokens) for x in inputs)
    return q, k, v


def telling_line(error: BaseException) -> str:
    """Class and the line of an error that says what is wrong, at most 300 characters.

    That is the first line; where a compiler passes on the trace of another process or of another
    exception, the one that the trace ends with.
    """
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    telling = lines[0]
    traces = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if traces:
        flush = [line for line in lines[traces[0] + 1 :] if not line.startswith((" ", "Trace"))]
        telling = flush[0] if flush else telling
    elif telling.endswith(" raised:") and len(lines) > 1:
        telling = lines[1]
    return f"{type(error).__name__}: {telling}"[:300]


def _spread(attend: Attend) -> Callable[[Inputs], Tensor]:
    return lambda inputs: attend(*inputs)
