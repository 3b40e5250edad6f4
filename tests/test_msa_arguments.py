"""A partial-attention call as numbers: strides, TMA maps, the order of kernel parameters."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from sparse_atten.contracts import TokenSelection
from sparse_atten.cute_kernels.msa_arguments import Arguments, Partials, arguments_of


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(layout: str | None = None, **changes) -> tuple[Arguments, torch.Tensor, torch.Tensor]:
    """Hq 8, Hkv 2, Tq 20, K 3; flat keys: Tk 500; or 6 pages."""
    q = torch.zeros(20, 8, 128, dtype=torch.bfloat16)
    shape = {None: (500, 2), "hnd": (6, 2, 128), "nhd": (6, 128, 2)}[layout]
    k = torch.zeros(*shape, 128, dtype=torch.bfloat16)
    paged = {"page_table": torch.zeros(2, 7, dtype=torch.int32), "seqused_k": int32(3, 500)}
    selection = TokenSelection(
        torch.zeros(2, 20, 3, dtype=torch.int32),
        int32(0, 4, 20),
        int32(0, 100, 500) if layout is None else None,
        16,
        500,
        **({} if layout is None else {**paged, "kv_layout": layout}),
    )
    tables = {
        "row_ptr": torch.zeros(2, 6, dtype=torch.int32),
        "q_indices": torch.zeros(2, 60, dtype=torch.int32),
        "work_items": torch.zeros(11, 6, dtype=torch.int32),
        "num_items": int32(0),
        "split_slot": torch.zeros(2, 60, dtype=torch.int32),
    }
    tables.update({name: changes.pop(name) for name in tables if name in changes})
    partials = changes.pop("partials", None) or Partials(
        torch.zeros(3, 20, 8, 128, dtype=torch.bfloat16), torch.zeros(3, 20, 8)
    )
    tables = SimpleNamespace(**tables)
    made = arguments_of(
        changes.pop("q", q),
        changes.pop("k", k),
        k,
        partials,
        selection,
        csr=tables,
        schedule=tables,
        softmax_scale=0.5,
        **changes,
    )
    return made, q, k


def test_scalars_of_flat_keys():
    arguments, q, k = call(first_token=5, lse_temperature=0.25)
    assert arguments.q == (q.data_ptr(), (8 * 128, 128))
    assert arguments.k == (k.data_ptr(), (2 * 128, 128, 128))
    assert arguments.scalars == (11, 5, 60, 20, 8, 2, 500, 1, 4, 5, 20, 3)
    assert arguments.group_size == 4
    assert math.isclose(arguments.scale_log2, 0.5 / math.log(2))
    assert math.isclose(arguments.scale_t_log2, 0.125 / math.log(2))
    assert arguments.strides == (1, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("layout", "strides"),
    [("hnd", (128, 2 * 128 * 128, 128 * 128)), ("nhd", (2 * 128, 2 * 128 * 128, 128))],
)
def test_strides_of_pages_are_row_page_head(layout: str, strides: tuple[int, int, int]):
    arguments, _, _ = call(layout)
    assert arguments.k.strides == strides
    assert (arguments.key_rows, arguments.key_outer, arguments.num_kv_blocks) == (128, 6, 7)
    assert arguments.strides == (1, 0, 1, 7, 1)
    assert arguments.key_map(arguments.k, "bf16").dims == (128, 128, 6, 2)


def test_maps():
    arguments, _, _ = call()
    query = arguments.query_map("bf16")
    assert query.dims == (128, 8, 20)
    assert query.strides == (256, 8 * 256)
    assert query.box == (64, 4, 1)
    keys = arguments.key_map(arguments.k, "bf16")
    assert keys.dims == (128, 500, 1, 2)
    assert keys.strides == (512, 256, 256)
    assert keys.box == (64, 128, 1, 1)
    half, full = arguments.partial_map("bf16"), arguments.partial_map("fp32")
    assert half.dims == full.dims == (128, 8, 20, 3)
    assert half.strides == (256, 8 * 256, 20 * 8 * 256)
    assert full.strides == (512, 8 * 512, 20 * 8 * 512)
    assert (half.box, full.box) == ((64, 4, 1, 1), (32, 4, 1, 1))


def test_parameters_come_in_the_order_of_the_kernel():
    arguments, _, _ = call()
    parameters = arguments.kernel_parameters("fp16", fp32_partials=True)
    maps = parameters[:8:2]
    assert [m.dtype for m in maps] == ["fp16", "fp16", "fp16", "fp32"]
    assert parameters[1:8:2] == (None,) * 4
    addresses = parameters[8:19]
    assert [name for name, x in zip(range(11), addresses, strict=True) if x == 0] == [7, 8, 10]
    assert parameters[19:24] == arguments.strides
    assert parameters[24:36] == arguments.scalars
    assert parameters[36:] == (arguments.scale_log2, arguments.scale_t_log2)


def test_grid():
    arguments, _, _ = call()
    assert arguments.grid("clc", 148) == (11, 1, 1)
    assert arguments.grid("static", 148) == (11, 1, 1)
    assert arguments.grid("static", 4) == (4, 1, 1)


def test_empty_keys_have_a_descriptor():
    arguments, q, _ = call(k=torch.zeros(0, 2, 128, dtype=torch.bfloat16))
    assert arguments.k.address == q.data_ptr()
    assert (arguments.key_rows, arguments.num_kv_blocks) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(20, 6, 128)}, r"Hq / Hkv must be one of .* got 3"),
        ({"row_ptr": torch.zeros(2, 6, dtype=torch.int64)}, r"row_ptr must be int32.* got int64"),
    ],
)
def test_refuses_what_the_kernels_lack(changes: dict, message: str):
    with pytest.raises(NotImplementedError, match=message):
        call(**changes)


def test_refuses_tables_with_gaps():
    gaps = torch.zeros(2, 120, dtype=torch.int32)[:, ::2]
    with pytest.raises(ValueError, match=r"q_indices must be contiguous, got int32 \[2, 60\]"):
        call(q_indices=gaps)
    gaps = Partials(torch.zeros(3, 20, 8, 256)[..., ::2], torch.zeros(3, 20, 8))
    with pytest.raises(ValueError, match=r"o must be contiguous"):
        call(partials=gaps)


def test_tensors_are_kept_alive():
    arguments, q, _ = call()
    assert arguments.tensors[0] is q
    assert dataclasses.replace(arguments, tensors=()) == arguments
