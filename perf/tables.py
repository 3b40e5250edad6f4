"""Render the README's performance tables from the rows under perf/results.

Usage: python perf/tables.py          rewrites the tables between their markers in README.md
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "perf" / "results"


def main() -> None:
    """Rewrite the README."""
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))


def render(text: str) -> str:
    """Replace what stands between the markers of each table."""
    tables = {"topk": topk_table(), "csr": csr_table(), "k1": k1_table(), "k2": k2_table()}
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(table) + "\n" + end + rest.split(end)[1]
    return text


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


def _read(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


if __name__ == "__main__":
    main()
