"""Work of the Blackwell MSA kernel K1, counted on an emulator, and the time it implies: a model.

Usage: python perf/msa_k1_model.py [--json perf/results/<name>.jsonl]

Nothing here is a time or was run on a GPU.

Counts. The shipped kernel's PTX is executed through its launch plan on one work item of few and of
many tiles; the difference is the work of a tile (128 rows x one KV block), the rest is that of an
item. "issued" counts moves and register packs, "work" does not; a wait counts once.

Time. q = k = 32768, Hq 64, Hkv 4, K 16, causal, every query keeps its own block: the tiles of each
row from the definition, the clocks of each unit at the rates of the VSA model, and the bytes at the
bandwidth of the data sheet. Q is read from memory between once in all (every other time from L2)
and once for each tile. The larger of compute and memory is the bound of K1; K2 is memory alone.
Latencies, tails and setup are left out, so a real run is slower.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from revision import git_revision
from rich.console import Console
from rich.table import Table
from sm100_model import MMA_FLOP, RATES, Work, total, work_of

import sparse_atten
from sparse_atten.cute_kernels import msa_k1_sm100
from sparse_atten.cute_kernels.common.target import B200, B300, Target
from sparse_atten.scheduler.reference import Splitting, schedule_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import emulator
from msa_k1_cases import BLOCK, HEAD_DIM, Case, make_call, prepare_chunk

TARGET = Target("sm_100a")
TOKENS = 8  # of a tile at G = 16
QUERIES, HEADS, KV_HEADS, WIDTH = 32768, 64, 4, 16
TILE_BYTES = 128 * HEAD_DIM * 2
LSE_BYTES = 128 * 4
# Tiles of the two runs; causal; query tokens and keys of the sequence.
KINDS = {
    "not causal": ((16, 48), False, 384, 128),
    "below the diagonal": ((16, 48), True, 384, 512),
    "on the diagonal": ((4, 16), True, 128, 128),
}
# MiniMax K1 by the same count on its PTX: issued, moves among them.
RIVAL = {
    "not causal": (7490, 3016),
    "below the diagonal": (8161, 3344),
    "on the diagonal": (10036, 3606),
}
RIVAL_MS = 4.62  # attention, K1 and K2, on a B300 at these sizes, as published


def count(tiles: int, causal: bool, queries: int, keys: int) -> Work:
    """Run one item of `tiles` tiles at G = 16, and sort what each role issues."""
    case = Case("model", (queries,), (keys,), width=1, ids="first", keep=1.0, causal=causal)
    call = make_call(case)
    call.selection.q2k_indices[:, tiles * TOKENS :] = -1
    call.csr, _ = prepare_chunk(call)
    call.schedule = schedule_of(call.csr, Splitting(queries, TOKENS, 1))
    partials = call.partials()
    plan = msa_k1_sm100.launch_plan(case.config, TARGET, call.arguments(partials))
    ptx = msa_k1_sm100.compile_offline(case.config, TARGET).ptx
    work = work_of(emulator.run(ptx, plan, counts=True), msa_k1_sm100.SCHEDULE.roles)
    work["softmax"] = work.pop("softmax0") + work.pop("softmax1")
    return work


def marginal(kind: str) -> tuple[Work, float]:
    """Return the work of one tile, and the instructions that an item issues besides."""
    (few, many), *shape = KINDS[kind]
    small, large = count(few, *shape), count(many, *shape)
    tile: Work = {}
    for role in small:
        names = small[role] | large[role]
        each = {c: (large[role][c] - small[role][c]) / (many - few) for c in names}
        tile[role] = Counter(each)
    return tile, total(small, "issued") - few * total(tile, "issued")


def clocks(work: Work) -> dict[str, float]:
    """Return the clocks of an SM that each unit needs for the work."""
    return {
        "MMA": total(work, "MMA") * MMA_FLOP / RATES["MMA"],
        "ex2": 32 * total(work, "ex2") / RATES["ex2"],
        "lanes": 32 * total(work, "lanes") / RATES["lanes"],
        "issue": total(work, "work") / RATES["issue"],
        "SMEM fills": TILE_BYTES / RATES["SMEM fills"],
    }


def count_tiles() -> tuple[int, int]:
    """Return the edges (query token, KV head, block) of the call, and its tiles at the least."""
    kept = [min(WIDTH, token // BLOCK + 1) for token in range(QUERIES)]
    edges = KV_HEADS * sum(kept)
    return edges, -(-edges // TOKENS)


def predicted(tile: Work, product: Any) -> dict[str, float]:
    """Return milliseconds: units of K1, its memory at the least and most, K2, and both."""
    edges, tiles = count_tiles()
    hertz = B200.tensor_flops / (B200.target.num_sms * RATES["MMA"])
    units = {
        unit: 1e3 * tiles * clock / (product.target.num_sms * hertz)
        for unit, clock in clocks(tile).items()
    }
    written = edges * HEADS // KV_HEADS * (HEAD_DIM * 2 + 4)
    query = QUERIES * HEADS * HEAD_DIM * 2

    def memory(size: float) -> float:
        return 1e3 * size / product.bandwidth

    low, high = memory(written + query), memory(written + tiles * TILE_BYTES)
    merge = memory(written + query)
    compute = max(units.values())
    return {
        **{f"K1 {unit}": time for unit, time in units.items()},
        "K1 memory, Q read once": low,
        "K1 memory, Q read for each tile": high,
        "K2 memory": merge,
        "both, at the least": max(low, compute) + merge,
        "both, at the most": max(high, compute) + merge,
    }


def model() -> list[dict[str, Any]]:
    """Return the record: a row for each kind of tile, and one for each product."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        tile, item = marginal(kind)
        issued, work = total(tile, "issued"), total(tile, "work")
        row = {"case": kind, "issued": issued, "moves": issued - work, "item besides": item}
        row |= {"rival issued": RIVAL[kind][0], "rival moves": RIVAL[kind][1]}
        row |= {"roles": tile, "clocks": clocks(tile)}
        row |= {"bytes written": TILE_BYTES + LSE_BYTES, "bytes of Q": TILE_BYTES}
        rows.append(row)
        if kind == "below the diagonal":
            times = [(p.name, predicted(tile, p)) for p in (B200, B300)]
    rows += [{"case": f"32768 on {name}", "ms": ms, "rival ms": RIVAL_MS} for name, ms in times]
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the record as tables."""
    table = Table(title="Warp instructions of a tile (PTX), ours | MiniMax K1")
    for head in ("", "with moves", "moves", "softmax", "epilogue", "MMA", "load", "store", "item"):
        table.add_column(head, justify="right" if head else "left")
    for row in rows[: len(KINDS)]:
        roles = ("softmax", "epilogue", "mma", "load", "store")
        cells = [f"{row['issued']:.0f} | {row['rival issued']}"]
        cells += [f"{row['moves']:.0f} | {row['rival moves']}"]
        cells += [f"{row['roles'][role]['issued']:.0f}" for role in roles]
        table.add_row(row["case"], *cells, f"{row['item besides']:.0f}")
    console.print(table)
    table = Table(title="Model: clocks of an SM for a tile")
    units = list(rows[0]["clocks"])
    for head in ("", *units):
        table.add_column(head, justify="right" if head else "left")
    for row in rows[: len(KINDS)]:
        table.add_row(row["case"], *(f"{row['clocks'][unit]:.0f}" for unit in units))
    console.print(table)
    table = Table(title=f"Model: ms at q = k = 32768; published for MiniMax on B300: {RIVAL_MS}")
    table.add_column("")
    for row in rows[len(KINDS) :]:
        table.add_column(row["case"].split()[-1], justify="right")
    for name in rows[-1]["ms"]:
        table.add_row(name, *(f"{row['ms'][name]:.2f}" for row in rows[len(KINDS) :]))
    console.print(table)


def main() -> None:
    """Count, print the tables, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the rows, replaced")
    arguments = parser.parse_args()
    rows = model()
    show(rows, Console(width=130))
    if arguments.json:
        common = {
            "kind": "model",
            "command": "python " + " ".join(sys.argv),
            "git": git_revision(),
            "sparse_atten": sparse_atten.__version__,
            "arch": TARGET.arch,
            "config": vars(msa_k1_sm100.Config(causal=True)),
            "rates": RATES,
        }
        arguments.json.write_text("".join(json.dumps({**common, **row}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
