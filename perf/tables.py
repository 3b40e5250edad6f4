"""Render the README's performance tables from the rows under perf/results.

`python -m perf tables` rewrites what stands between their markers, and the plots in docs/. `TABLES`
says which function makes which part. Of several rows of a case and backend in vsa.jsonl,
vsa_sweep.jsonl, video.jsonl and msa.jsonl the last one counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf import msa
from perf.masks import CASES
from perf.msa_rivals import RIVALS as MSA_RIVALS
from perf.plots import RATE, SPEED, draw_rate, draw_speed, has_curves
from perf.rows import read_rows
from perf.video import GATED, WHOLE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "perf" / "results"
RIVALS = {
    "fa4-sparse": "FA4 128x128",
    "cudnn-fixed": "cuDNN BSA, one count",
    "cudnn-counts": "cuDNN BSA, a count a row",
    "flex": "FlexAttention",
    "fa4-dense": "FA4 dense",
    "sdpa": "torch SDPA dense",
    "sdpa-mask": "torch SDPA, bool mask",
}
SWEEP_COMMAND = "python -m perf vsa --sweep --out perf/results/vsa_sweep.jsonl"

Row = dict[str, Any]


def main() -> None:
    """Rewrite the README, and draw the plots that there are rows for."""
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))
    rows = _sweep_rows()
    if has_curves(rows):
        draw_rate(rows, ROOT / RATE)
        draw_speed(rows, ROOT / SPEED)
    else:
        print(
            f"perf/results/vsa_sweep.jsonl has no rows, so no plots: {SWEEP_COMMAND}",
            file=sys.stderr,
        )


def render(text: str) -> str:
    """Replace what stands between the markers of each table."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(make()) + "\n" + end + rest.split(end)[1]
    return text


def latest(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """Return the last row of each (case, backend)."""
    return {(row["case"], row["backend"]): row for row in rows}


def vsa_tables(rows: list[Row]) -> list[str]:
    """Kernel times under graphs, then with host overhead: one line for each shape and mask.

    A rival has a column where it has a row, be it one that says why it is missing.
    """
    found = latest(rows)
    names = [case.name for case in CASES if any(case.name == name for name, _ in found)]
    if not names:
        return ["Not measured yet: `python -m perf vsa --out perf/results/vsa.jsonl`."]
    shown = {key: title for key, title in RIVALS.items() if any(key == x for _, x in found)}
    lines = []
    for kind, title in (("graph", "in graphs"), ("eager", "with host overhead")):
        columns = [f"{title}: heads x tokens, kept blocks, mask", "ours", *shown.values()]
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for name in names:
            cells = [_vsa_cell(found.get((name, key)), kind) for key in ("ours", *shown)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines[:-1]


def sweep_plots() -> list[str]:
    """The plots of sparsity x length."""
    if not has_curves(_sweep_rows()):
        return [f"Not measured yet: `{SWEEP_COMMAND}`."]
    return [
        f"![TFLOP/s of selected blocks against sparsity, with the roofline]({RATE})",
        "",
        f"![Times as fast as dense FA4 against sparsity]({SPEED})",
    ]


def _sweep_rows() -> list[Row]:
    return list(latest(_read("vsa_sweep.jsonl")).values())


def _vsa_cell(row: Row | None, kind: str) -> str:
    """Time, rate, and how many times as fast ours is; or why there is none."""
    if row is None:
        return "-"
    if row["status"] != "ok":
        return row["status"]
    times = row[f"{kind}_us"]
    if times is None:
        return "no graph"
    parts = [f"{times[0] / 1e3:,.3f} ms", f"{row['flops'] / times[0] / 1e6:,.0f} TF"]
    if row["backend"] != "ours" and f"{kind}_ratio" in row:
        parts.append(f"{row[f'{kind}_ratio']:.2f}x")
    return ", ".join(parts)


def video_table(rows: list[Row]) -> list[str]:
    """One line for each sparsity: the whole call, its stages, dense attention."""
    cases: dict[str, dict[str, Row]] = {}
    for (case, backend), row in latest(rows).items():
        if row["status"] == "ok" and "graph_us" in row:
            cases.setdefault(case, {})[backend] = row
    if not cases:
        return ["Not measured yet: `python -m perf video --out perf/results/video.jsonl`."]
    stages = (
        "pack + pool",
        "scores",
        "route",
        "attention",
        "unpack",
        "coarse branch",
        "unpack + gate",
    )
    dense = ("fa4-dense", "fa4-dense padded", "sdpa", "sdpa padded")
    columns = ["heads x video, sparsity", "whole call", "with a gate", *stages, *dense]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case, found in cases.items():
        cells = [case] + [
            f"{found[key]['graph_us'][0] / 1e3:,.2f} ms"
            + (f", {found[key]['graph_ratio']:.2f}x" if key in dense else "")
            if key in found
            else "-"
            for key in (WHOLE, GATED, *stages, *dense)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def msa_table(rows: list[Row]) -> list[str]:
    """One line for each length: the whole call, its stages, rates, memory, rivals with rows."""
    cases: dict[str, dict[str, Row]] = {}
    for (case, backend), row in latest(rows).items():
        cases.setdefault(case, {})[backend] = row
    if not cases:
        return ["Not measured yet: `python -m perf msa --out perf/results/msa.jsonl`."]
    stages = ("scores", "top-k", "CSR + schedule", "K1", "K2", msa.KERNELS, msa.ATTENTION)
    named = {backend for found in cases.values() for backend in found}
    rivals = [rival.name for rival in MSA_RIVALS if rival.name in named]
    columns = ["heads x tokens, blocks", "whole call", *stages, "workspace", *rivals]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case, found in cases.items():
        cells = [case, *(_msa_cell(found.get(key)) for key in (msa.WHOLE, *stages))]
        cells.append(f"{next(iter(found.values()))['workspace_bytes'] / 2**30:.2f} GiB")
        cells += [_msa_cell(found.get(key)) for key in rivals]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _msa_cell(row: Row | None) -> str:
    """Time in a graph (or eagerly, and said so), rate of whole blocks, ratio to the whole call."""
    if row is None:
        return "-"
    if row["status"] != "ok":
        return row["status"]
    kind = "graph" if "graph_us" in row else "eager"
    parts = [f"{row[f'{kind}_us'][0] / 1e3:,.3f} ms" + " eager" * (kind == "eager")]
    parts += [f"{row['tile_tflops']:,.0f} TF"] if "tile_tflops" in row else []
    parts += [f"{row[f'{kind}_ratio']:.2f}x"] if f"{kind}_ratio" in row else []
    return ", ".join(parts)


def topk_table() -> list[str]:
    """One line for each shape: ours, torch.topk without and with sorted ids, FlashInfer, floor."""
    rows: dict[str, dict[str, dict]] = {}
    for row in _read("topk.jsonl"):
        rows.setdefault(row["case"], {})[row["backend"]] = row
    lines = [
        "| shape | `block_topk` | `torch.topk` | + sorted ids | `flashinfer.top_k` "
        "| ratio to `topk` | read floor | host cost of a call, of a replay |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, found in rows.items():
        if "torch.topk" not in found:
            continue
        ours, plain, ordered = (
            found[name]["graph_us"][0] for name in ("ours", "torch.topk", "torch.topk+sort")
        )
        rival = found.get("flashinfer.top_k")
        flashinfer = f"{rival['graph_us'][0]:,.0f} us" if rival else "-"
        floor = found["ours"]["floor_us"]
        host = f"{found['ours']['host_us']:.0f}, {found['ours']['replay_host_us']:.0f} us"
        lines.append(
            f"| {case} | {ours:.1f} us | {plain:,.0f} us | {ordered:,.0f} us "
            f"| {flashinfer} | {plain / ours:.1f}x | {floor:.1f} us | {host} |"
        )
    return lines


def csr_table() -> list[str]:
    """One line for each shape: CSR and schedule together, and the torch reference on the GPU."""
    lines = [
        "| heads x queries x K, batch x keys | CSR + schedule | torch reference | workspace "
        "| host cost of a call, of `prepare`, of a replay |",
        "|---|---|---|---|---|",
    ]
    for row in _read("csr.jsonl"):
        ours, reference = (row[name]["device_us"][0] for name in ("fused", "torch_reference"))
        costs = [
            row[name][cost][0] if name in row else None
            for name, cost in (
                ("fused", "host_us"),
                ("prepare", "host_us"),
                ("fused", "replay_us"),
            )
        ]
        host = ", ".join("-" if cost is None else f"{cost:.0f}" for cost in costs)
        lines.append(
            f"| {row['case'].removeprefix('csr-')} | {ours:,.1f} us | {reference:,.0f} us "
            f"| {row['workspace_bytes'] / 2**20:,.1f} MiB | {host} us |"
        )
    return lines


def k1_table() -> list[str]:
    """One line for each kind of tile, and one for the predicted time on each GPU."""
    lines = [
        "| 128-row tile of K1 | instructions (moves) | MMA, ex2, issue clocks | bytes written |",
        "|---|---|---|---|",
    ]
    for row in _read("msa_k1_model.jsonl"):
        if "issued" not in row:
            continue
        clocks = ", ".join(f"{row['clocks'][unit]:,.0f}" for unit in ("MMA", "ex2", "issue"))
        lines.append(
            f"| {row['case']} | {row['issued']:,.0f} ({row['moves']:,.0f}) | {clocks} "
            f"| {row['bytes written']:,} |"
        )
    return lines


def k2_table() -> list[str]:
    """One line for each shape: the merge, a copy of as many bytes, the fastest of all copies."""
    lines = [
        "| queries x heads x K, partials to output | K2 | bandwidth | a copy's | of the copy's "
        "| of the fastest copy's |",
        "|---|---|---|---|---|---|",
    ]
    rows = _read("k2.jsonl")
    fastest = max(row["gigabytes_per_second"] for row in rows[1::2])
    for ours, copy in zip(rows[::2], rows[1::2], strict=True):
        lines.append(
            f"| {ours['case']} | {ours['graph_us'][0]:,.1f} us "
            f"| {ours['gigabytes_per_second'] / 1e3:.2f} TB/s "
            f"| {copy['gigabytes_per_second'] / 1e3:.2f} TB/s | {100 * ours['of_copy']:.0f} % "
            f"| {100 * ours['gigabytes_per_second'] / fastest:.0f} % |"
        )
    return lines


def _read(name: str) -> list[Row]:
    return read_rows(RESULTS / name)


TABLES: dict[str, Callable[[], list[str]]] = {
    "vsa": lambda: vsa_tables(_read("vsa.jsonl")),
    "sweep": sweep_plots,
    "video": lambda: video_table(_read("video.jsonl")),
    "msa": lambda: msa_table(_read("msa.jsonl")),
    "topk": topk_table,
    "csr": csr_table,
    "k1": k1_table,
    "k2": k2_table,
}
