"""Draw TFLOP/s and the speed-up over dense attention against sparsity, for each length and mask.

Lines differ in colour, dash and marker, so that they can be told apart without colour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATE, SPEED = "docs/vsa_rate.svg", "docs/vsa_speed_up.svg"
DENSE = "fa4-dense"


class Style(NamedTuple):
    """How a contender is drawn."""

    label: str
    color: str
    marker: str
    dash: str


STYLES = {
    "ours": Style("sparse-atten", "#c05621", "o", "-"),
    "fa4-sparse": Style("FA4 128x128", "#2b6cb0", "s", "--"),
    "cudnn-fixed": Style("cuDNN BSA", "#2f855a", "^", "-."),
    "flex": Style("FlexAttention", "#805ad5", "D", ":"),
    DENSE: Style("FA4 dense (all blocks)", "#4a5568", "x", (0, (1, 1))),
}

Row = dict[str, Any]


class Panel(NamedTuple):
    """The timed rows of a length and a kind of mask."""

    tokens: int
    mask: str
    rows: list[Row]

    def of(self, backend: str) -> list[Row]:
        """Rows of a contender, from few dropped blocks to many."""
        return sorted((r for r in self.rows if r["backend"] == backend), key=dropped)


def panels_of(rows: Sequence[Row]) -> list[list[Panel]]:
    """Panels of each mask (a line of them), by length; only rows with a time in a graph count."""
    timed = [row for row in rows if row["status"] == "ok" and row["graph_us"]]
    lengths = sorted({row["tokens"] for row in timed})
    return [
        [
            Panel(n, mask, [r for r in timed if (r["tokens"], r["mask"]) == (n, mask)])
            for n in lengths
        ]
        for mask in sorted({row["mask"] for row in timed})
    ]


def has_curves(rows: Sequence[Row]) -> bool:
    """Whether there is a line of ours to draw."""
    return any(len(panel.of("ours")) > 1 for line in panels_of(rows) for panel in line)


def dropped(row: Row) -> float:
    """Share of the blocks that is dropped."""
    return 1 - row["kept"] / row["blocks"]


def draw_rate(rows: Sequence[Row], path: Path) -> None:
    """Write the figure of TFLOP/s of the selected blocks, with the roofline of the data sheet."""

    def fill(axes: Axes, panel: Panel) -> None:
        for backend, style in STYLES.items():
            _line(axes, panel.of(backend), style, lambda row: row["tile_tflops"])
        bound = [row for row in panel.of("ours") if "roofline_us" in row]
        if bound:
            heights = [row["tile_flops"] / row["roofline_us"] / 1e6 for row in bound]
            axes.plot([*map(dropped, bound)], heights, color="black", lw=1, label="roofline")
        axes.set_ylim(0, None)

    _figure(rows, path, fill, "TFLOP/s of selected blocks")


def draw_speed(rows: Sequence[Row], path: Path) -> None:
    """Write the figure of the speed-up over dense FA4, with what the dropped blocks allow."""

    def fill(axes: Axes, panel: Panel) -> None:
        dense = {row["case"]: row["graph_us"][0] for row in panel.of(DENSE)}
        for backend, style in STYLES.items():
            own = [row for row in panel.of(backend) if row["case"] in dense and backend != DENSE]
            _line(axes, own, style, lambda row: dense[row["case"]] / row["graph_us"][0])
        shares = sorted({dropped(row) for row in panel.rows})
        allowed = [1 / (1 - share) for share in shares if share < 1]
        axes.plot(shares[: len(allowed)], allowed, color="black", lw=1, label="1 / share kept")
        axes.axhline(1, color="#a0aec0", lw=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")

    _figure(rows, path, fill, "times as fast as FA4 dense")


def _line(axes: Axes, rows: list[Row], style: Style, height: Callable[[Row], float]) -> None:
    if rows:
        places, heights = [*map(dropped, rows)], [*map(height, rows)]
        label, color, marker, dash = style
        axes.plot(places, heights, label=label, color=color, marker=marker, ls=dash, ms=4, lw=1.2)


def _figure(
    rows: Sequence[Row], path: Path, fill: Callable[[Axes, Panel], None], quantity: str
) -> None:
    """Write a grid of panels: a line for each mask, a column for each length."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    grid = panels_of(rows)
    devices = ", ".join(sorted({row["gpu"] for line in grid for p in line for row in p.rows}))
    heads = ", ".join(sorted({str(row["heads"]) for line in grid for p in line for row in p.rows}))
    with mpl.rc_context({"svg.hashsalt": "sparse-atten", "svg.fonttype": "none", "font.size": 8}):
        size = 1.5 + 2.3 * len(grid[0]), 1.1 + 2.1 * len(grid)
        figure = Figure(figsize=size, layout="constrained")
        squares = figure.subplots(len(grid), len(grid[0]), sharex=True, sharey=True, squeeze=False)
        for i, line in enumerate(grid):
            for j, panel in enumerate(line):
                axes = squares[i, j]
                fill(axes, panel)
                axes.set_title(f"{panel.mask} blocks, {panel.tokens // 1024}k tokens", fontsize=8)
                axes.set(xlabel="share of KV blocks dropped", ylabel=quantity)
                axes.grid(alpha=0.3)
                axes.label_outer()
        handles = {
            label: handle
            for axes in squares.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles)
        )
        figure.suptitle(
            f"Kernel time in CUDA graphs, {devices}, {heads} heads of 128, forward", fontsize=9
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
