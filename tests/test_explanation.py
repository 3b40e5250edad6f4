"""explain counts what the definition's mask holds."""

from __future__ import annotations

import pytest
import torch
from cases import BLOCK_CASES, TOKEN_CASES, BlockCase

from sparse_atten import explain
from sparse_atten.definition import block_visibility, define_attention
from sparse_atten.reference import Result

CASES = BLOCK_CASES + TOKEN_CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case).__name__}-{case.name}")
def test_pairs_are_those_of_the_mask(case):
    (q, k, v), selection, options = case.build()
    if case.duplicates:
        with pytest.raises(ValueError, match="must list each block once"):
            explain(q, k, v, selection)
        return
    pairs = 0

    def count(q, k, v, seen, options):
        nonlocal pairs
        pairs += int((seen > 0).sum())
        empty = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
        return Result(empty, empty[..., 0], None)

    define_attention(q, k, v, selection, options, attend=count)
    found = explain(q, k, v, selection, causal=options.causal)
    assert found.pairs == pairs
    assert found.tile_pairs >= found.pairs
    assert found.flops == pairs * 2 * (q.shape[-1] + v.shape[-1])
    assert 0 <= found.tiles <= found.dense_tiles
    assert str(pairs) in str(found).replace(",", "")


def test_tiles_and_bytes_of_full_blocks():
    case = BlockCase("full", batch=2, heads=(4, 2), lengths=(64, 96), counts="all", width=3)
    (q, k, v), selection, _ = case.build()
    found = explain(q, k, v, selection)
    assert found.tiles == 2 * 4 * 4 * 3
    assert found.dense_tiles == 2 * 4 * 4 * 6
    assert found.density == 0.5
    assert found.tile_ratio == 1.0
    assert found.pairs == int(block_visibility(q, k, selection).sum())
    assert found.memory_bytes == 4 * (2 * q.numel() + k.numel() + v.numel())
    assert found.gathered_bytes == found.tiles * 16 * (16 + 16) * 4
    assert found.workspace_bytes == 32 << 20
    assert explain(q, k, v, selection, max_workspace_bytes=5).workspace_bytes == 5


def test_tile_ratio_shows_what_ragged_blocks_waste():
    sizes = torch.full((4,), 4, dtype=torch.int32)
    (q, k, v), selection, _ = BlockCase("ragged", counts="all", width=4).build()
    ragged = type(selection)(
        selection.q2k_indices, selection.q2k_counts, block_size=16, kv_block_sizes=sizes
    )
    assert explain(q, k, v, ragged).tile_ratio == 4.0


def test_roofline_is_for_a_known_target_and_16_bit_tensors():
    (q, k, v), selection, _ = BlockCase("bf16", dtype=torch.bfloat16, heads=(8, 8)).build()
    assert explain(q, k, v, selection).roofline is None
    assert "name" not in str(explain(q, k, v, selection, target="B200"))
    found = explain(q, k, v, selection, target="B200")
    model = found.roofline
    assert model.target == "B200"
    assert model.math == pytest.approx(found.tile_flops / 2250e12)
    assert model.memory == pytest.approx(found.memory_bytes / 8e12)
    expected = model.route + model.index + max(model.math, model.memory) + model.launch
    assert model.total == expected
    assert "model" in str(found)
    single = [x.float() for x in (q, k, v)]
    assert explain(*single, selection, target="B200").roofline is None
    with pytest.raises(ValueError, match="target must be one of H200, B200, B300, got 'A100'"):
        explain(q, k, v, selection, target="A100")
