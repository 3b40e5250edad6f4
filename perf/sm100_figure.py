"""Draw the timetable of the Blackwell VSA kernel from the model's replay.

Usage: python perf/sm100_figure.py [docs/vsa_sm100_timetable.png]

Every span is work counted on the emulator over the rates in `sm100_model.RATES`; none is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
from sm100_model import TILE, Replay, Span, Spans, marginal, spans_of

mpl.use("Agg")
import matplotlib.pyplot as plt

LENGTH = 8  # blocks of a row
UNITS = ("TMA", "tensor core", "softmax 0", "softmax 1", "correction")
COLORS = (("#2b6cb0", "#90cdf4"), ("#c05621", "#fbd38d"))  # of tile 0 and 1: operand of S, of O
HEIGHT = 0.62
CLOCKS = 3600


def color(span: Span) -> str:
    """Pick the tile's colour: dark where scores are made or their K moves, light otherwise."""
    dark = span.what in ("QK", "K", "Q", "max", "alpha")
    return COLORS[span.tile][0 if dark else 1]


def label(span: Span) -> str:
    """Name a span with its tile and round, short enough to stand in it."""
    what = {
        "max": "m",
        "P head": "P",
        "P tail": "P'",
        "PV head": "PV",
        "PV tail": "PV'",
        "alpha": "",
    }
    name = what.get(span.what, span.what)
    if name in ("", "m", "P'", "PV'", "Q"):
        return name
    return f"{name}{span.tile}({span.round % LENGTH})"


def draw(
    axes: plt.Axes, trace: list[Span], units: tuple[str, ...], window: tuple[float, float]
) -> None:
    """Draw the spans inside a window of clocks, one lane for each unit."""
    first, last = window
    for span in trace:
        left, right = max(span.start, first), min(span.end, last)
        if right <= left or span.unit not in units:
            continue
        lane = units.index(span.unit)
        box = (left - first, right - left)
        axes.broken_barh(
            [box], (lane - HEIGHT / 2, HEIGHT), facecolor=color(span), edgecolor="white", lw=0.8
        )
        text = label(span)
        if right - left >= 22 * len(text):
            ink = "white" if color(span) == COLORS[span.tile][0] else "black"
            middle = box[0] + box[1] / 2
            axes.text(middle, lane, text, ha="center", va="center", fontsize=7.5, color=ink)
    axes.set_xlim(0, last - first)
    axes.set_ylim(len(units) - 0.45, -0.6)
    axes.set_yticks(range(len(units)), units, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def replayed(spans: Spans) -> list[Span]:
    """Replay two work items."""
    replay = Replay(spans, LENGTH, items=2)
    replay.run()
    return replay.trace


def find(trace: list[Span], what: str, tile: int, r: int) -> Span:
    """Look a span up."""
    return next(s for s in trace if (s.what, s.tile, s.round) == (what, tile, r))


def draw_waits(axes: plt.Axes, trace: list[Span], r: int, first: float) -> None:
    """Draw what a round of tile 0 waits for, each arrow with the barrier's name."""
    waits = (
        ("QK", "max", "s_full", (6, 3)),
        ("P head", "PV head", "p_head_full", (-64, 0)),
        ("P tail", "PV tail", "p_tail_full", (8, -5)),
        ("K", "QK", "kv_full", (4, -1)),
        ("max", "alpha", "alpha_full", (4, 0)),
    )
    for source, target, name, offset in waits:
        start, end = find(trace, source, 0, r), find(trace, target, 0, r)
        lanes = UNITS.index(start.unit), UNITS.index(end.unit)
        edge = HEIGHT / 2 if lanes[1] > lanes[0] else -HEIGHT / 2
        tip = (end.start - first, lanes[1] - edge)
        tail = (start.end - first, lanes[0] + edge)
        style = {"arrowstyle": "->", "color": "#444444", "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tip, tail, arrowprops=style)
        middle = ((tip[0] + tail[0]) / 2, (tip[1] + tail[1]) / 2)
        axes.annotate(
            name, middle, offset, textcoords="offset points", va="center", fontsize=7, color="#444"
        )


def main() -> None:
    """Replay two work items and draw the steady state and the step from one to the next."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", default="docs/vsa_sm100_timetable.png")
    path = Path(parser.parse_args().path)
    step, row = marginal(TILE)
    figure, (steady, border) = plt.subplots(
        *(2, 1), figsize=(11, 6), constrained_layout=True, gridspec_kw={"height_ratios": (5, 4)}
    )
    trace = replayed(spans_of(step, row, fills=True))
    first = find(trace, "PV head", 0, 3).start
    draw(steady, trace, UNITS, (first, first + CLOCKS))
    draw_waits(steady, trace, 4, first)
    steady.set_title("Steady state, fills counted", fontsize=10, loc="left")
    trace = replayed(spans_of(step, row, fills=False))
    first = find(trace, "PV head", 0, LENGTH - 1).start - 300
    draw(border, trace, UNITS[1:], (first, first + CLOCKS))
    title = (
        f"From a pair of rows of {LENGTH} to the next, fills not counted; gaps of the tensor core"
    )
    border.set_title(title, fontsize=10, loc="left")
    border.set_xlabel(
        "clocks (model: counted work over published rates, no latency; not a measurement)\n"
        "blue: tile 0, orange: tile 1, (round)     m: row maximum     P, PV: keys 0-95     "
        "P', PV': keys 96-127     correction: alpha (bar), O / l",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
