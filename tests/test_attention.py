"""The entry: what it returns, where it writes, and that nothing else is touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BLOCK_CASES, TOKEN_CASES
from compare import assert_matches_definition

from sparse_atten import check_selection, sparse_atten_func
from sparse_atten.reference import Result

BLOCK = {case.name: case for case in BLOCK_CASES}
TOKEN = {case.name: case for case in TOKEN_CASES}


@pytest.mark.parametrize("case", [BLOCK["bshd"], BLOCK["gqa-4"], TOKEN["causal"]])
def test_returns_what_was_asked_for(case):
    inputs, selection, options = case.build()
    arguments = {"causal": options.causal}
    out = sparse_atten_func(*inputs, selection, **arguments)
    assert isinstance(out, torch.Tensor)
    out_2, lse = sparse_atten_func(*inputs, selection, return_lse=True, **arguments)
    out_3, lse_3, warm = sparse_atten_func(*inputs, selection, lse_temperature=0.5, **arguments)
    assert torch.equal(out, out_2)
    assert torch.equal(out, out_3)
    assert torch.equal(lse, lse_3)
    result = Result(out, lse, warm)
    assert_matches_definition(result, inputs, selection, options._replace(lse_temperature=0.5))


def test_lse_is_bhs_for_both_layouts():
    (q, k, v), selection, _ = BLOCK["bshd"].build()
    _, lse = sparse_atten_func(q, k, v, selection, return_lse=True)
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # a view: strides are honoured
    out, other = sparse_atten_func(q, k, v, replace(selection, layout="bhsd"), return_lse=True)
    assert torch.equal(lse, other)
    assert out.shape == q.shape


def test_softmax_scale_is_a_factor_of_the_scores():
    (q, k, v), selection, options = BLOCK["random-counts"].build()
    out, lse = sparse_atten_func(q, k, v, selection, softmax_scale=0.5, return_lse=True)
    other, other_lse = sparse_atten_func(
        q * 2, k, v, selection, softmax_scale=0.25, return_lse=True
    )
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(lse, other_lse)
    assert_matches_definition(
        Result(out, lse, None), (q, k, v), selection, options._replace(softmax_scale=0.5)
    )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_out_is_written_in_place_through_its_strides(layout):
    (q, k, v), selection, _ = replace(BLOCK["gqa-4"], layout=layout).build()
    expected = sparse_atten_func(q, k, v, selection)
    buffer = torch.full((*q.shape[:3], q.shape[3] + 16), 7.0)
    out = buffer[..., : q.shape[3]]
    assert sparse_atten_func(q, k, v, selection, out=out) is out
    assert torch.equal(out, expected)
    assert (buffer[..., q.shape[3] :] == 7).all()


def test_inputs_are_not_written():
    for case in (BLOCK["causal-sizes"], TOKEN["paged-hnd"]):
        inputs, selection, options = case.build()
        tables = [x for x in vars(selection).values() if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in (*inputs, *tables)]
        sparse_atten_func(*inputs, selection, causal=options.causal)
        for x, copy in zip((*inputs, *tables), before, strict=True):
            assert torch.equal(x, copy)


def test_tables_of_any_stride():
    (q, k, v), selection, _ = BLOCK["sizes-per-batch"].build()
    expected = sparse_atten_func(q, k, v, selection)
    strided = {}
    for name in ("q2k_indices", "q2k_counts", "kv_block_sizes"):
        table = getattr(selection, name)
        spread = torch.full((*table.shape, 3), -5, dtype=torch.int32)
        spread[..., 1] = table
        strided[name] = spread[..., 1]
    assert torch.equal(sparse_atten_func(q, k, v, replace(selection, **strided)), expected)


def test_gradients_reach_every_input_through_the_entry():
    (q, k, v), selection, _ = BLOCK["gqa-4"].build()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = sparse_atten_func(*inputs, selection, return_lse=True)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in inputs)
    with torch.no_grad():
        assert not sparse_atten_func(*inputs, selection).requires_grad


def test_an_all_empty_selection_has_zero_gradients():
    (q, k, v), selection, _ = BLOCK["nothing"].build()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    sparse_atten_func(*inputs, selection).sum().backward()
    assert all((x.grad == 0).all() for x in inputs)


def test_autocast_does_not_lower_the_precision():
    """Found: inside an autocast region the reference multiplied float32 inputs in bfloat16."""
    inputs, selection, options = BLOCK["gqa-4"].build()
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = sparse_atten_func(*leaves, selection, return_lse=True)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert_matches_definition(Result(out.detach(), lse.detach(), None), inputs, selection, options)
    again = torch.autograd.grad(sparse_atten_func(*leaves, selection).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def test_the_default_dtype_does_not_matter():
    inputs, selection, _ = BLOCK["gqa-4"].build()
    torch.set_default_dtype(torch.float64)
    try:
        out, lse = sparse_atten_func(*inputs, selection, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_inference_mode():
    inputs, selection, _ = BLOCK["gqa-4"].build()
    with torch.inference_mode():
        out = sparse_atten_func(*inputs, selection)
    assert torch.equal(out, sparse_atten_func(*inputs, selection))


def test_check_selection_names_the_first_bad_entry():
    (q, k, v), selection, _ = BLOCK["random-counts"].build()
    check_selection(q, k, v, selection)
    counts = selection.q2k_counts.clone()
    counts[0, 1, 2:] = 9
    with pytest.raises(ValueError, match=r"q2k_counts\[0, 1, 2\] must be in 0\.\.3 \(K\), got 9"):
        check_selection(q, k, v, replace(selection, q2k_counts=counts))


def test_check_selection_counts_from_the_dense_rows():
    (q, k, v), selection, _ = BLOCK["dense-prefix"].build()
    counts = selection.q2k_counts.clone()
    counts[0, 0, :2] = 99  # rows that are not read
    counts[0, 0, 3] = -1
    with pytest.raises(ValueError, match=r"q2k_counts\[0, 0, 3\] must be in 0\.\.3 \(K\), got -1"):
        check_selection(q, k, v, replace(selection, q2k_counts=counts))


@pytest.mark.gpu
def test_device_values_are_checked_on_request_only():
    inputs, selection, _ = BLOCK["random-counts"].build()
    q, k, v = (x.cuda() for x in inputs)
    counts = torch.full_like(selection.q2k_counts, 1000).cuda()
    wild = replace(selection, q2k_indices=selection.q2k_indices.cuda(), q2k_counts=counts)
    with torch.cuda.device(q.device):
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = sparse_atten_func(q, k, v, wild)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()
    with pytest.raises(ValueError, match=r"q2k_counts\[0, 0, 0\] must be in 0\.\.3"):
        check_selection(q, k, v, wild)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [BLOCK["causal-sizes"], TOKEN["paged-nhd"]])
def test_no_synchronisation_and_graph_capture(case):
    """The steady path runs inside a CUDA graph, and a replay sees changed tables."""
    inputs, selection, options = case.build()
    q, k, v = (x.cuda() for x in inputs)
    tables = {n: x.cuda() for n, x in vars(selection).items() if isinstance(x, torch.Tensor)}
    selection = replace(selection, **tables)
    expected = sparse_atten_func(q, k, v, selection, causal=options.causal)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sparse_atten_func(q, k, v, selection, causal=options.causal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse_atten_func(q, k, v, selection, causal=options.causal)
    graph.replay()
    assert torch.equal(captured, expected)
    selection.q2k_indices.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert (captured == 0).all()
