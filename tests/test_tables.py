"""The README's tables are what the result files render to, and what they show of made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import masks, plots, tables
from perf.video import GATED, WHOLE

ROOT = Path(__file__).parent.parent


def test_the_readme_shows_the_committed_results():
    text = (ROOT / "README.md").read_text()
    assert tables.render(text) == text
    assert text.count("| msa-4x256x32768-k16 |") == 1


def timed(case, backend, microseconds, **fields):
    times = [microseconds, 0.9 * microseconds, 1.1 * microseconds]
    return {
        "case": case.name,
        "backend": backend,
        "status": "ok",
        "gpu": "a GPU",
        "heads": case.heads[0],
        "kv_heads": case.heads[1],
        "tokens": case.tokens,
        "blocks": case.blocks,
        "kept": case.kept,
        "mask": case.mask,
        "counts": case.counts,
        "sizes": case.sizes,
        "flops": 1e12,
        "tflops": 1e6 / microseconds,
        "graph_us": times,
        "eager_us": [2 * t for t in times],
        **fields,
    }


def test_vsa_lines_hold_times_rates_ratios_and_reasons():
    case = masks.CASES[0]
    rows = [
        timed(case, "ours", 2000.0),
        timed(case, "fa4-sparse", 9000.0, graph_ratio=4.5, eager_ratio=4.5),
        timed(case, "fa4-sparse", 3000.0, graph_ratio=1.5, eager_ratio=1.5),
        timed(case, "flex", 4000.0, graph_us=None, eager_ratio=2.0),
        {"case": case.name, "backend": "cudnn-fixed", "status": "wrong", "reason": "x"},
    ]
    lines = tables.vsa_tables(rows)
    cells = "2.000 ms, 500 TF | 3.000 ms, 333 TF, 1.50x | wrong | - | no graph | - | -"
    assert lines[2] == f"| {case.name} | {cells} |"
    assert "| 4.000 ms, 250 TF | 6.000 ms, 167 TF, 1.50x |" in lines[-1]
    assert "8.000 ms, 125 TF, 2.00x" in lines[-1]
    assert tables.vsa_tables([])[0].startswith("Not measured yet")


def test_video_lines_hold_stages_and_dense_attention():
    row = {"case": "a", "status": "ok", "graph_us": [30e3, 0, 0]}
    dense = {"backend": "fa4-dense", "graph_us": [150e3, 0, 0], "graph_ratio": 5.0}
    rows = [{**row, "backend": WHOLE}, {**row, "backend": GATED}, {**row, **dense}]
    rows.append({"case": "a", "backend": "sdpa", "status": "failed", "reason": "x"})
    line = tables.video_table(rows)[-1]
    assert line.startswith("| a | 30.00 ms | 30.00 ms | - |")
    assert line.endswith("| - | 150.00 ms, 5.00x | - | - | - |")


def test_curves_follow_their_axis_and_become_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        timed(case, backend, 10.0 * case.kept)
        for case in (*masks.CASES, *masks.SWEEP)
        for backend in ("ours", "fa4-dense")
    ]
    ours = [row for row in rows if row["backend"] == "ours"]
    assert [row["kept"] for row in plots.select(ours, "sparsity")] == [8, 16, 32, 64, 128]
    lengths = [row["tokens"] for row in plots.select(ours, "length")]
    assert lengths == [4096, 8192, 16384, 32768, 65536, 131072]
    assert plots.has_curves(rows)
    assert not plots.has_curves([row for row in rows if row["tokens"] == 32768])
    plots.draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
