"""Draw TFLOP/s and the speed-up over dense attention, against sparsity and against length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLOT = "docs/vsa_speed.png"
TOKENS = 32768  # of the curves against sparsity
BLOCKS_KEPT = 8  # of the curves against length: one block in so many
HEADS = 24
DENSE = "fa4-dense"
STYLES = {
    "ours": ("sparse-atten", "#c05621", "o"),
    "fa4-sparse": ("FA4 128x128", "#2b6cb0", "s"),
    "cudnn-fixed": ("cuDNN BSA, one count", "#2f855a", "^"),
    "cudnn-counts": ("cuDNN BSA, a count a row", "#68d391", "v"),
    "flex": ("FlexAttention", "#805ad5", "D"),
    "fa4-dense": ("FA4 dense", "#4a5568", "x"),
}

Row = dict[str, Any]


def has_curves(rows: Sequence[Row]) -> bool:
    """Whether there are points of ours for both axes."""
    ours = [row for row in rows if row["backend"] == "ours"]
    return all(len(select(ours, axis)) > 1 for axis in ("sparsity", "length"))


def select(rows: Sequence[Row], axis: str) -> list[Row]:
    """Timed rows of the plain random masks along an axis, in its order."""
    plain = [
        row
        for row in rows
        if row["status"] == "ok"
        and row.get("graph_us")
        and row["heads"] == row["kv_heads"] == HEADS
        and (row["mask"], row["counts"], row["sizes"]) == ("random", "fixed", "full")
    ]
    if axis == "sparsity":
        chosen = [row for row in plain if row["tokens"] == TOKENS]
        return sorted(chosen, key=lambda row: row["kept"])
    chosen = [row for row in plain if row["kept"] * BLOCKS_KEPT == row["blocks"]]
    return sorted(chosen, key=lambda row: row["tokens"])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the figure of four panels; times are those of graphs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    titles = {
        "sparsity": f"{HEADS} heads x {TOKENS:,} tokens",
        "length": f"{HEADS} heads, 1 in {BLOCKS_KEPT} blocks kept",
    }
    for column, axis in enumerate(titles):
        chosen = select(rows, axis)
        dense = {row["case"]: row["graph_us"][0] for row in chosen if row["backend"] == DENSE}
        rate, speed = panels[0][column], panels[1][column]
        for backend, (label, color, marker) in STYLES.items():
            own = [row for row in chosen if row["backend"] == backend]
            if not own:
                continue
            style = {"label": label, "color": color, "marker": marker}
            rate.plot([_place(row, axis) for row in own], [row["tflops"] for row in own], **style)
            own = [row for row in own if row["case"] in dense]
            speed.plot(
                [_place(row, axis) for row in own],
                [dense[row["case"]] / row["graph_us"][0] for row in own],
                **style,
            )
        rate.set(title=titles[axis], ylabel="TFLOP/s of kept pairs", ylim=(0, None))
        speed.set(ylabel="times as fast as FA4 dense", ylim=(0, None))
        for panel in (rate, speed):
            panel.grid(alpha=0.3)
            panel.set(xlabel="share of blocks dropped")
            if axis == "length":
                ticks = sorted({row["tokens"] for row in chosen})
                panel.set(xlabel="tokens", xscale="log")
                panel.set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
                panel.minorticks_off()
    panels[0][0].legend(fontsize="small")
    devices = sorted({row["gpu"] for row in rows})
    figure.suptitle(f"Kernel time in CUDA graphs, {', '.join(devices)}, head dim 128, forward")
    figure.savefig(path, dpi=90)


def _place(row: Row, axis: str) -> float:
    return row["tokens"] if axis == "length" else 1 - row["kept"] / row["blocks"]
