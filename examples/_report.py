"""What the demo prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from _clip import BUNDLED_CLIP, CREDIT, FRAMES_PER_TOKEN, Clip
from _comparison import CHECKED_BLOCKS, Dense, Row
from _embedding import HEAD_DIM, TEMPERATURE, content_shares
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparse_atten.vsa import VideoLayout


def introduce(
    console: Console, clip: Clip, layout: VideoLayout, options: argparse.Namespace
) -> None:
    """Say what is about to be attended."""
    source = escape(str(options.video)) if options.video else f"{BUNDLED_CLIP}: {CREDIT}"
    shares = ", ".join(f"{share:.0%}" for share in content_shares(options.heads))
    dtype = str(options.dtype).removeprefix("torch.")
    console.print(
        f"[bold]Clip[/]     {source}\n"
        f"         {len(clip.numbers)} evenly spaced frames, {clip.numbers[0]} to "
        f"{clip.numbers[-1]}; a token is {clip.patch} x {clip.patch} pixels of "
        f"{FRAMES_PER_TOKEN} of them\n"
        f"[bold]Tokens[/]   {_times(clip.grid)} = {layout.num_tokens:,} in {layout.num_blocks} "
        f"blocks of {_times(layout.tile)}, "
        f"{layout.num_tokens / layout.num_slots:.0%} full: edges are ragged and padded\n"
        f"[bold]Q, K, V[/]  {options.heads} heads of dim {HEAD_DIM}, {dtype} on {options.device}: "
        "a fixed embedding of the pixels. No trained model is\n"
        "         involved, so these numbers say nothing about the quality of a model.\n"
        f"         A logit is {TEMPERATURE:g} x a cosine; content weighs {shares} in the heads,\n"
        "         position the rest.\n",
        soft_wrap=True,
    )


@contextmanager
def progress(console: Console, first: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar over `total` steps; call what this gives when a step is done, with the next."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=total)
        yield lambda following: bar.update(task, advance=1, description=following)


def print_tables(console: Console, rows: list[Row], dense: Dense, layout: VideoLayout) -> None:
    """Print what each sparsity saves and costs, and where the time goes."""
    heads, num_tokens = dense.lse.shape[1:]
    console.print(_comparison_table(rows, dense_pairs=heads * num_tokens**2, layout=layout))
    console.print(_times_table(rows))
    inside = max(row.explanation.tile_ratio for row in rows)
    spread = dense.effective_keys.median().item()
    num_blocks = heads * layout.num_blocks
    backend = rows[0].explanation.backend
    console.print(
        f"Backend: {backend}. Times are wall-clock on this machine, SDPA and the stages in turns.\n"
        f"Pairs are of valid tokens; whole {layout.block_size}-token blocks hold up to "
        f"{inside:.2f} times as many.\n"
        "Coverage: share of a query's dense probability on the keys that it kept.\n"
        "Output error: relative L2 against dense attention, all queries: what sparsity costs.\n"
        "Implementation error: relative L2 against the float64 definition of the same selection,\n"
        f"for {min(CHECKED_BLOCKS, num_blocks)} of the {num_blocks} query blocks: rounding alone.\n"
        f"Dense attention spreads over {spread:,.0f} keys (median of 1 / sum p^2; one-hot is 1, "
        f"uniform {num_tokens:,}).",
        soft_wrap=True,
    )


def _comparison_table(rows: list[Row], *, dense_pairs: int, layout: VideoLayout) -> Table:
    table = Table(title="What sparsity saves and costs", title_justify="left")
    for heading in (
        "sparsity",
        "KV blocks\nkept",
        "pairs\ncomputed",
        "of\ndense",
        "coverage\nmean",
        "coverage\np10",
        "output\nerror",
        "implementation\nerror",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        found = row.explanation
        kept = found.tiles * layout.num_blocks / found.dense_tiles
        table.add_row(
            row.sparsity,
            f"{kept:g} of {layout.num_blocks}",
            f"{found.pairs / 1e6:,.1f} M",
            f"{found.pairs / dense_pairs:.1%}",
            f"{row.coverage:.1%}",
            f"{row.coverage_p10:.1%}",
            f"{row.output_error:.2g}",
            f"{row.implementation_error:.1g}",
        )
    return table


def _times_table(rows: list[Row]) -> Table:
    table = Table(title="Time, milliseconds", title_justify="left")
    for heading in ("sparsity", *rows[0].seconds, "total", "dense SDPA", "speed-up"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.sparsity,
            *(f"{seconds * 1e3:,.1f}" for seconds in row.seconds.values()),
            f"{row.total_seconds * 1e3:,.1f}",
            f"{row.dense_seconds * 1e3:,.1f}",
            f"{row.dense_seconds / row.total_seconds:.2f}x",
        )
    return table


def _times(sizes: tuple[int, int, int]) -> str:
    return " x ".join(map(str, sizes))
