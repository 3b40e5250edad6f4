"""The README's tables are what the result files render to, and what they show of made-up rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from perf import masks, msa, plots, tables
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
        {"case": "another", "backend": "sdpa", "status": "missing", "reason": "x"},
    ]
    lines = tables.vsa_tables(rows)
    titles = "FA4 128x128 | cuDNN BSA, one count | FlexAttention | torch SDPA dense |"
    assert lines[0].endswith(f"| ours | {titles}")
    cells = "2.000 ms, 500 TF | 3.000 ms, 333 TF, 1.50x | wrong | no graph | -"
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


def test_msa_lines_hold_stages_rates_workspace_and_rivals():
    common = {"case": "a", "status": "ok", "workspace_bytes": 3 << 30}
    whole = {**common, "backend": msa.WHOLE, "graph_us": [4e3, 0, 0], "tile_tflops": 321.4}
    fa4 = {**whole, "backend": "fa4-dense", "graph_us": [20e3, 0, 0], "graph_ratio": 5.0}
    eager = {**common, "backend": "flash-msa", "eager_us": [60e3, 0, 0], "eager_ratio": 15.0}
    absent = {**common, "backend": "flex", "status": "missing", "reason": "x"}
    lines = tables.msa_table([whole, {**common, "backend": "K2", "graph_us": [900, 0, 0]}, fa4])
    assert lines[2].startswith(
        "| a | 4.000 ms, 321 TF | - | - | - | - | 0.900 ms | - | - | 3.00 GiB"
    )
    assert lines[0].endswith("| workspace | fa4-dense |")
    assert lines[2].endswith("| 3.00 GiB | 20.000 ms, 321 TF, 5.00x |")
    lines = tables.msa_table([whole, eager, absent])
    assert lines[0].endswith("| workspace | flex | flash-msa |")
    assert lines[2].endswith("| 3.00 GiB | missing | 60.000 ms eager, 15.00x |")
    assert tables.msa_table([])[0].startswith("Not measured yet")


def sweep_rows():
    """Made-up rows of the sweep: ours is twice as fast as FA4's, which keeps 600 TFLOP/s."""
    found = []
    for case in masks.SWEEP:
        flops = 4 * 128 * 128 * 128 * 24 * case.blocks * case.kept
        dense = flops * case.blocks / case.kept
        for backend, work in (("ours", flops / 2), ("fa4-sparse", flops), ("fa4-dense", dense)):
            tiles = dense if backend == "fa4-dense" else flops
            row = timed(case, backend, work / 600e6, roofline_us=tiles / 989e6, tile_flops=tiles)
            found.append({**row, "tile_tflops": tiles / row["graph_us"][0] / 1e6})
    found.append({"case": "x", "backend": "all", "status": "left out", "reason": "y"})
    found.append({**timed(masks.SWEEP[0], "flex", 1.0), "graph_us": None})
    return found


def test_panels_have_a_mask_a_length_and_lines_by_sparsity():
    grid = plots.panels_of(sweep_rows())
    assert [line[0].mask for line in grid] == ["random", "routed"]
    lengths = [8192, 16384, 32768, 65536]
    assert [[panel.tokens for panel in line] for line in grid] == [lengths, lengths]
    ours = grid[1][2].of("ours")
    assert [row["kept"] for row in ours] == [128, 77, 51, 26, 13]
    assert [round(plots.dropped(row), 1) for row in ours] == [0.5, 0.7, 0.8, 0.9, 0.9]
    assert grid[0][0].of("flex") == []
    assert plots.has_curves(sweep_rows())
    assert not plots.has_curves(sweep_rows()[:3])


def curves(path, monkeypatch, draw):
    """Each panel's lines by label, as the figure is saved."""
    figure_module = pytest.importorskip("matplotlib.figure")
    kept = []
    save = figure_module.Figure.savefig

    def savefig(figure, *given, **more):
        kept.append(figure)
        save(figure, *given, **more)

    monkeypatch.setattr(figure_module.Figure, "savefig", savefig)
    draw(sweep_rows(), path)
    (figure,) = kept
    assert figure.axes[4].get_xlabel()
    assert figure.axes[4].get_ylabel()
    return [
        {str(line.get_label()): line.get_xydata() for line in axes.lines} for axes in figure.axes
    ]


def test_the_rate_of_selected_blocks_is_drawn_with_its_roofline(monkeypatch, tmp_path):
    path = tmp_path / "rate.svg"
    panels = curves(path, monkeypatch, plots.draw_rate)
    assert len(panels) == 8
    for panel in panels:
        assert set(panel) == {
            "sparse-atten",
            "FA4 128x128",
            "FA4 dense (all blocks)",
            "roofline",
        }
        assert panel["sparse-atten"][:, 1] == pytest.approx(5 * [1200])
        assert panel["roofline"][:, 1] == pytest.approx(5 * [989])
    first = path.read_text()
    assert len(first) < 150_000
    curves(path, monkeypatch, plots.draw_rate)
    assert path.read_text() == first


def test_the_speed_up_over_dense_attention_is_drawn(monkeypatch, tmp_path):
    path = tmp_path / "speed.svg"
    panels = curves(path, monkeypatch, plots.draw_speed)
    for panel in panels:
        allowed = panel["1 / share kept"][:, 1]
        assert panel["FA4 128x128"][:, 1] == pytest.approx(allowed)
        assert panel["sparse-atten"][:, 1] == pytest.approx(2 * allowed)
        assert not any(label.startswith("FA4 dense") for label in panel)
    assert path.stat().st_size < 150_000


def test_the_command_draws_what_there_is_and_names_what_there_is_not(monkeypatch, tmp_path, capsys):
    results = tmp_path / "perf" / "results"
    shutil.copytree(ROOT / "perf" / "results", results)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", results)
    (results / "vsa_sweep.jsonl").unlink(missing_ok=True)
    tables.main()
    assert f"vsa_sweep.jsonl has no rows, so no plots: {tables.SWEEP_COMMAND}" in (
        capsys.readouterr().err
    )
    assert f"Not measured yet: `{tables.SWEEP_COMMAND}`." in (tmp_path / "README.md").read_text()
    pytest.importorskip("matplotlib")
    lines = [json.dumps(row) + "\n" for row in sweep_rows()]
    (results / "vsa_sweep.jsonl").write_text("".join(lines))
    tables.main()
    text = (tmp_path / "README.md").read_text()
    for name in (plots.RATE, plots.SPEED):
        assert f"]({name})" in text
        assert (tmp_path / name).stat().st_size > 10_000
