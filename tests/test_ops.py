"""torch.compile goes through the library op; eager calls do not."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from cases import BLOCK_CASES, TOKEN_CASES

from sparse_atten import sparse_atten_func
from sparse_atten.ops import attention, call

CASES = {
    case.name: case
    for case in (*BLOCK_CASES, *TOKEN_CASES)
    if case.name
    in (
        "causal-sizes",
        "bshd",
        "dense-prefix",
        "paged-nhd",
        "used-keys",
        "temperature",
        "no-queries",
        "value-dim",
    )
}
BACKENDS = ["aot_eager"]
if shutil.which("g++") or shutil.which("c++"):
    BACKENDS.append("inductor")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize("compiler", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_call_gives_the_eager_result(name, compiler):
    (q, k, v), selection, options = CASES[name].build()

    def call(q, k, v):
        results = sparse_atten_func(
            q * 1.5, k, v, selection, causal=options.causal, lse_temperature=0.5
        )
        return tuple(x + 1 for x in results)

    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    for got, want in zip(compiled(q, k, v), call(q, k, v), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", ["causal-sizes", "bshd", "paged-nhd"])
def test_compiled_gradients_are_the_eager_ones(name, return_lse):
    inputs, selection, options = replace(CASES[name], dtype=torch.float64).build()

    def loss(*inputs):
        result = sparse_atten_func(*inputs, selection, causal=options.causal, return_lse=return_lse)
        out, *lse = result if return_lse else (result,)
        return out.square().sum() + sum(x.masked_fill(x.isinf(), 0).sum() for x in lse)

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        gradients.append(torch.autograd.grad(function(*leaves), leaves))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_a_selection_made_inside_the_compiled_function():
    (q, k, v), selection, _ = CASES["dense-prefix"].build()

    def call(q, k, v, indices, counts):
        made = type(selection)(indices, counts, block_size=16, dense_rows=2)
        return sparse_atten_func(q, k, v, made)

    arguments = (q, k, v, selection.q2k_indices, selection.q2k_counts)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), call(*arguments))


def test_out_is_written_by_a_compiled_call():
    (q, k, v), selection, _ = CASES["bshd"].build()
    out = torch.zeros_like(q)
    torch.compile(sparse_atten_func, fullgraph=True, backend="aot_eager")(
        q, k, v, selection, out=out
    )
    assert torch.equal(out, sparse_atten_func(q, k, v, selection))


def test_dynamic_shapes_compile_once():
    compiled = torch.compile(sparse_atten_func, fullgraph=True, backend="aot_eager", dynamic=True)
    case = CASES["bshd"]
    for lengths in ((50, 34), (66, 50), (82, 66)):
        (q, k, v), selection, _ = replace(case, lengths=lengths).build()
        got = compiled(q, k, v, selection)
        torch.testing.assert_close(got, sparse_atten_func(q, k, v, selection))


def test_a_refusal_survives_compilation():
    (q, k, v), selection, _ = CASES["bshd"].build()
    compiled = torch.compile(sparse_atten_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"k must be \[2, 34, 2, 16\]|k must be"):
        compiled(q, k[..., :8], v, selection)


def test_eager_calls_bypass_the_library(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an eager call crossed the library boundary")

    monkeypatch.setattr("sparse_atten.ops.attention", refuse)
    (q, k, v), selection, _ = CASES["bshd"].build()
    sparse_atten_func(q, k, v, selection)


@pytest.mark.parametrize("name", ["causal-sizes", "bshd", "paged-nhd", "temperature"])
def test_opcheck(name, monkeypatch):
    """Torch's own check of the schema, the fake, and autograd registration."""
    case = CASES[name]
    (q, k, v), selection, options = case.build()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    recorded = []
    monkeypatch.setattr(
        "sparse_atten.ops.attention",
        lambda *arguments, **options: recorded.append((arguments, options)) or (q, q, q),
    )
    call(q, k, v, selection, options, backend="auto", max_workspace_bytes=None)
    monkeypatch.undo()
    torch.library.opcheck(attention, *recorded[0])
