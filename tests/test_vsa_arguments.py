"""A VSA call as numbers: strides of both layouts, TMA maps, the order of kernel parameters."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sparse_atten.contracts import BlockSelection
from sparse_atten.cute_kernels.vsa_arguments import Arguments, arguments_of


def call(layout: str, batch: int = 2, **fields) -> tuple[Arguments, torch.Tensor, torch.Tensor]:
    """Hq 6, Hkv 2, Sq 300, Skv 500, K 4."""

    def operand(heads: int, tokens: int) -> torch.Tensor:
        dims = (heads, tokens) if layout == "bhsd" else (tokens, heads)
        return torch.zeros(batch, *dims, 128, dtype=torch.bfloat16)

    q, k = operand(6, 300), operand(2, 500)
    selection = BlockSelection(
        torch.zeros(batch, 6, 3, 4, dtype=torch.int32),
        torch.zeros(batch, 6, 3, dtype=torch.int32),
        layout=layout,
        **fields,
    )
    lse = torch.zeros(batch, 6, 300)
    out = torch.empty_like(q)
    return arguments_of(q, k, k, out, selection, softmax_scale=0.5, lse=lse), q, k


@pytest.mark.parametrize(
    ("layout", "strides"),
    [("bhsd", (6 * 300 * 128, 300 * 128, 128)), ("bshd", (6 * 300 * 128, 128, 6 * 128))],
)
def test_strides_are_batch_head_token(layout: str, strides: tuple[int, int, int]):
    arguments, q, _ = call(layout)
    assert arguments.q.strides == strides
    assert arguments.q.address == q.data_ptr()
    assert (arguments.num_queries, arguments.num_keys) == (300, 500)
    assert (arguments.num_q_heads, arguments.group_size) == (6, 3)
    assert (arguments.num_q_blocks, arguments.num_kv_blocks) == (3, 4)
    assert math.isclose(arguments.scale_log2, 0.5 / math.log(2))


def test_a_dim_of_size_one_gets_an_aligned_stride():
    arguments, *_ = call("bhsd", batch=1)
    assert arguments.q.strides[0] * 2 % 16 == 0


def test_key_rows_are_addressed_inside_their_block():
    arguments, _, k = call("bshd")
    tensor_map = arguments.key_map(arguments.k, "bf16")
    assert tensor_map.dims == (128, 128, 4, 2, 2)
    token, head, batch = (k.stride(d) * 2 for d in (1, 2, 0))
    assert tensor_map.strides == (token, 128 * token, head, batch)
    assert tensor_map.box == (64, 128, 1, 1, 1)


def test_absent_and_shared_tables():
    arguments, *_ = call("bhsd")
    assert arguments.kv_sizes.address == arguments.q_sizes.address == 0
    shared, *_ = call("bhsd", kv_block_sizes=torch.full((4,), 128, dtype=torch.int32))
    assert shared.kv_sizes.strides == (0, 1)
    own, *_ = call("bhsd", kv_block_sizes=torch.full((2, 4), 128, dtype=torch.int32))
    assert own.kv_sizes.strides == (4, 1)


def test_parameters_come_in_the_order_of_the_kernel():
    arguments, *_ = call("bhsd", dense_rows=2)
    parameters = arguments.kernel_parameters("fp16")
    maps = parameters[:8:2]
    assert [m.address for m in maps] == [
        operand.address for operand in (arguments.q, arguments.k, arguments.v, arguments.out)
    ]
    assert {m.dtype for m in maps} == {"fp16"}
    assert parameters[1:8:2] == (None,) * 4
    assert parameters[13:23] == (72, 12, 4, 1, 18, 3, 1, 0, 0, 0)
    assert parameters[23:] == (2, 6, 3, 300, 500, 4, 2, arguments.scale_log2)


def test_grid():
    arguments, *_ = call("bhsd")
    assert arguments.grid("clc", 148) == (2, 6, 2)
    assert arguments.grid("static", 148) == (24, 1, 1)
    assert arguments.grid("static", 16) == (16, 1, 1)
    huge = dataclasses.replace(arguments, batch=65536)
    with pytest.raises(NotImplementedError, match=r"batch must be at most 65535 .* got 65536"):
        huge.grid("clc", 148)
