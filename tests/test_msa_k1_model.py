"""The model of the Blackwell MSA kernel K1: its arithmetic by hand."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")
pytest.importorskip("rich", reason="the tool prints with rich")
sys.path.insert(0, str(Path(__file__).parents[1] / "perf"))

import msa_k1_model as model

from sparse_atten.cute_kernels.common.target import B200


def test_tiles_of_the_call():
    # The first 15 blocks of 128 queries keep 1 to 15 blocks, all others 16.
    edges = 4 * (128 * sum(range(1, 16)) + (32768 - 15 * 128) * 16)
    assert model.count_tiles() == (edges, edges // 8)


def test_clocks_of_a_tile():
    work = {"mma": Counter({"MMA": 16.0}), "softmax": Counter(ex2=512.0, lanes=400.0, work=1000.0)}
    # 16 MMAs of 2 * 128 * 128 * 16 FLOP at 8192; 512 warps of 32 exponentials at 16.
    units = {"MMA": 1024.0, "ex2": 1024.0, "lanes": 100.0, "issue": 250.0, "SMEM fills": 256.0}
    assert model.clocks(work) == units


def test_predicted_time():
    work = {"mma": Counter({"MMA": 16.0}), "softmax": Counter()}
    times = model.predicted(work, B200)
    edges, tiles = model.count_tiles()
    # 4 MFLOP * 2 of a tile at the rate of the data sheet.
    assert times["K1 MMA"] == pytest.approx(1e3 * tiles * 4 * 128**3 / 2250e12)
    written = edges * 16 * 260
    query = 32768 * 64 * 256
    assert times["K2 memory"] == pytest.approx(1e3 * (written + query) / 8e12)
    gathered = 1e3 * (written + tiles * 32768) / 8e12
    assert times["K1 memory, Q read for each tile"] == pytest.approx(gathered)
    assert times["both, at the most"] == pytest.approx(
        max(gathered, times["K1 MMA"]) + times["K2 memory"]
    )
