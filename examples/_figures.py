"""What the demo draws: the blocks that one query block kept, and error against sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from _clip import FRAMES_PER_TOKEN, Clip
from _comparison import Row
from _embedding import content_shares
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from PIL import Image

QUERY_COLOUR = "#00e5ff"
SCORE_COLOURS = mpl.colormaps["YlOrRd"]
TINT = 0.45  # weight of the score's colour over the pixels of a kept block
SHADE = 0.3  # brightness of dropped blocks
MAX_PANELS = 6  # time tiles that fit beside each other
PANEL_INCHES = 2.6
DPI = 130
SMALL_DPI = 90


class Tiles(NamedTuple):
    """Where the blocks of a video are in its frames."""

    counts: tuple[int, int, int]  # tiles along t, y, x
    tile: tuple[int, int, int]
    clip: Clip

    @classmethod
    def of(cls, clip: Clip, tile: tuple[int, int, int]) -> Tiles:
        """Count the tiles of a clip, those at ragged edges too."""
        t, y, x = (-(-size // step) for size, step in zip(clip.grid, tile, strict=True))
        return cls((t, y, x), tile, clip)

    def place(self, block: int) -> tuple[int, int, int]:
        """Tile (t, y, x) of a block."""
        t, y, x = np.unravel_index(block, self.counts)
        return int(t), int(y), int(x)

    def middle(self) -> int:
        """Number of the block in the middle."""
        return int(np.ravel_multi_index([(count - 1) // 2 for count in self.counts], self.counts))

    def window(self, block: int) -> tuple[slice, slice]:
        """Pixels (rows, columns) of a block."""
        _, y, x = self.place(block)
        height, width = (step * self.clip.patch for step in self.tile[1:])
        limits = self.clip.frames.shape[1:3]
        return (
            slice(y * height, min((y + 1) * height, limits[0])),
            slice(x * width, min((x + 1) * width, limits[1])),
        )

    def frame(self, step: int) -> tuple[np.ndarray, int]:
        """Return the frame in the middle of a time tile, and its number in the video."""
        first = step * self.tile[0]
        stop = min(first + self.tile[0], self.clip.grid[0])
        index = (first + stop) * FRAMES_PER_TOKEN // 2
        return self.clip.frames[index].numpy(), self.clip.numbers[index]


def draw_kept_blocks(
    path: Path,
    row: Row,
    tiles: Tiles,
    *,
    query_block: int,
    credit: str | None,
    small: bool,
) -> None:
    """Draw a query block in its frame, and the KV blocks that two of the heads kept for it."""
    num_heads, num_blocks = row.scores.shape[1:3]
    heads = sorted({0, num_heads - 1})
    kept = {head: _kept_scores(row, head, query_block) for head in heads}
    values = [score for scores in kept.values() for score in scores.values()]
    norm = Normalize(min(values), max(values))
    query_step = tiles.place(query_block)[0]
    steps = _shown_steps(tiles.counts[0], query_step)

    height, width = tiles.clip.frames.shape[1:3]
    size = (
        PANEL_INCHES * (len(steps) + len(heads)) + 1.5,  # labels and colour bar
        PANEL_INCHES * height / width * len(heads) + 1.2,  # titles and credit
    )
    figure = plt.figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(
        len(heads), len(steps) + 1, width_ratios=[len(heads), *[1] * len(steps)]
    )
    query_axes = figure.add_subplot(grid[:, 0])
    frame, number = tiles.frame(query_step)
    query_axes.imshow(frame)
    query_axes.set_title(f"query block {query_block} (outlined), frame {number}")
    query_axes.set_axis_off()
    _outline(query_axes, tiles.window(query_block), QUERY_COLOUR, 3)

    panels = []
    for i, head in enumerate(heads):
        for j, step in enumerate(steps):
            axes = figure.add_subplot(grid[i, j + 1])
            panels.append(axes)
            number = _draw_step(axes, tiles, step, kept[head], norm)
            if step == query_step:
                _outline(axes, tiles.window(query_block), QUERY_COLOUR, 2.5)
            if j == 0:
                content = content_shares(num_heads)[head]
                axes.set_ylabel(f"head {head}\n{content:.0%} content")
            axes.set_title(f"frame {number}" if i == 0 else "", fontsize=10)
    bar = figure.colorbar(ScalarMappable(norm, SCORE_COLOURS), ax=panels, pad=0.01, aspect=30)
    bar.set_label("score: mean logit of the two blocks")
    budget = len(kept[heads[0]])
    figure.suptitle(
        f"KV blocks that one query block keeps at sparsity {row.sparsity}: {budget} of "
        f"{num_blocks} in each head; dropped blocks are dark",
        fontsize=14,
    )
    if credit:
        figure.supxlabel(f"Frames: {credit}", fontsize=8, color="0.4", x=0.01, ha="left")
    figure.savefig(path, dpi=SMALL_DPI if small else DPI)
    plt.close(figure)
    if small:
        _reduce_colours(path)


def draw_against_sparsity(path: Path, rows: list[Row], *, small: bool) -> None:
    """Draw coverage, both errors and the time of the stages against sparsity."""
    rows = sorted(rows, key=lambda row: float(row.sparsity))
    sparsity = [float(row.sparsity) for row in rows]
    figure, (shares, errors, times) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")

    shares.plot(sparsity, [row.coverage for row in rows], "o-", label="mean")
    shares.plot(sparsity, [row.coverage_p10 for row in rows], "o--", label="10th percentile")
    shares.plot([0, 1], [1, 0], color="0.6", ls=":", label="if it were uniform")
    shares.set(title="Dense probability on kept blocks", ylim=(0, 1.05))

    output_errors = [row.output_error for row in rows]
    own_errors = [row.implementation_error for row in rows]
    errors.semilogy(sparsity, output_errors, "o-", color="C3", label="output, against dense")
    errors.semilogy(
        sparsity, own_errors, "s--", color="C2", label="implementation, against float64"
    )
    errors.set(title="Relative L2 error", ylim=(min(own_errors) / 10, 2))

    attend = [row.seconds["attend"] for row in rows]
    total = [row.total_seconds for row in rows]
    rest = [whole - part for whole, part in zip(total, attend, strict=True)]
    times.semilogy(sparsity, total, "o-", label="all stages")
    times.semilogy(sparsity, attend, "^--", label="attend")
    times.semilogy(sparsity, rest, "v--", color="C4", label="pack, pool, score, route, unpack")
    times.semilogy(
        sparsity, [row.dense_seconds for row in rows], "x:", color="0.3", label="dense SDPA"
    )
    times.set(title=f"Seconds, backend {rows[0].explanation.backend!r}")

    for axes in (shares, errors, times):
        axes.set_xlabel("sparsity")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    errors.legend(fontsize=9, loc="center right", bbox_to_anchor=(1, 0.32))  # between the curves
    figure.savefig(path, dpi=SMALL_DPI if small else DPI)
    plt.close(figure)


def _kept_scores(row: Row, head: int, query_block: int) -> dict[int, float]:
    """Scores of the blocks that one query block kept."""
    scores = row.scores[0, head, query_block].tolist()
    selection = row.selection
    if query_block < selection.dense_rows:
        return dict(enumerate(scores))
    count = int(selection.q2k_counts[0, head, query_block])
    return {i: scores[i] for i in selection.q2k_indices[0, head, query_block, :count].tolist()}


def _shown_steps(count: int, query_step: int) -> list[int]:
    """Time tiles that get a panel: evenly spaced, the query's among them."""
    if count <= MAX_PANELS:
        return list(range(count))
    steps = [round(i * (count - 1) / (MAX_PANELS - 1)) for i in range(MAX_PANELS)]
    nearest = min(range(MAX_PANELS), key=lambda i: abs(steps[i] - query_step))
    steps[nearest] = query_step
    return steps


def _draw_step(axes: Axes, tiles: Tiles, step: int, kept: dict[int, float], norm: Normalize) -> int:
    """Draw the frame of a time tile, its kept blocks coloured by score; return its number."""
    frame, number = tiles.frame(step)
    grey = SHADE * frame.mean(-1, keepdims=True) / 255
    image = np.repeat(grey, 3, axis=-1)
    for block, score in kept.items():
        if tiles.place(block)[0] == step:
            window = tiles.window(block)
            colour = np.array(SCORE_COLOURS(norm(score))[:3])
            image[window] = TINT * colour + (1 - TINT) * frame[window] / 255
            _outline(axes, window, "white", 0.8)
    axes.imshow(image)
    axes.set(xticks=[], yticks=[])
    return number


def _outline(axes: Axes, window: tuple[slice, slice], colour: str, width: float) -> None:
    rows, columns = window
    size = columns.stop - columns.start, rows.stop - rows.start
    corner = columns.start - 0.5, rows.start - 0.5
    axes.add_patch(Rectangle(corner, *size, fill=False, ec=colour, lw=width, clip_on=False))


def _reduce_colours(path: Path) -> None:
    """Rewrite a picture with a palette of 256 colours, dithered."""
    with Image.open(path) as picture:
        full = picture.convert("RGB")
    full.quantize(palette=full.quantize(256, kmeans=4)).save(path, optimize=True)
