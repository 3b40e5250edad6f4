"""Backends are chosen by their capabilities, and a refusal says what is supported."""

from __future__ import annotations

import pytest
import torch
from cases import BLOCK_CASES, TOKEN_CASES

from sparse_atten import dispatch as dispatch_module
from sparse_atten import explain, sparse_atten_func
from sparse_atten.contracts import Options, validate
from sparse_atten.dispatch import Backend, choose
from sparse_atten.reference import reference_attention

BLOCK = {case.name: case for case in BLOCK_CASES}
TOKEN = {case.name: case for case in TOKEN_CASES}

# What a device kernel may look like to the dispatcher, on a device that is at hand.
KERNEL = Backend(
    name="kernel",
    entry="test_dispatch:run_kernel",
    granularities=("block",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(128,),
    block_sizes=(128,),
    group_sizes=(1, 2, 4),
    causal=(False,),
    paged=(False,),
)
REFERENCE = dispatch_module.BACKENDS[-1]
CALLS = []


def run_kernel(*arguments, **options):
    CALLS.append(options)
    return reference_attention(*arguments, **options)


@pytest.fixture
def kernel(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(dispatch_module, "BACKENDS", (KERNEL, REFERENCE))


def _capable():
    case = BLOCK["tile-128"]
    assert case.dtype == torch.bfloat16
    (q, k, v), selection, _ = case.build()
    q, k, v = (torch.randn(*x.shape[:3], 128, dtype=torch.bfloat16) for x in (q, k, v))
    return q, k, v, selection


def test_auto_takes_the_first_capable_backend(kernel):
    arguments = _capable()
    assert explain(*arguments).backend == "kernel"
    sparse_atten_func(*arguments, max_workspace_bytes=1 << 20)
    assert CALLS == [{"out": None, "max_workspace_bytes": 1 << 20}]


def test_auto_passes_over_what_is_not_capable_and_explain_says_why(kernel):
    (q, k, v), selection, _ = TOKEN["paged-hnd"].build()
    found = explain(q, k, v, selection, causal=True)
    assert found.backend == "reference"
    assert found.passed_over == {
        "kernel": [
            "selection granularity token (supported: block)",
            "dtype torch.float32 (supported: torch.bfloat16, torch.float16)",
            "head dim of q and k 16 (supported: 128)",
            "head dim of v 16 (supported: 128)",
            "block size 16 (supported: 128)",
            "causal True (supported: False)",
            "paged KV True (supported: False)",
        ]
    }
    assert "not kernel: causal True" in str(found)
    sparse_atten_func(q, k, v, selection, causal=True)
    assert not CALLS


def test_an_explicit_backend_never_falls_back(kernel):
    (q, k, v), selection, _ = BLOCK["random-counts"].build()
    message = r"no backend can run this call: kernel: dtype torch.float32 \(supported: torch.bf"
    with pytest.raises(NotImplementedError, match=message):
        sparse_atten_func(q, k, v, selection, backend="kernel")
    assert not CALLS


def test_gradients_go_to_a_differentiable_backend(kernel):
    q, k, v, selection = _capable()
    q.requires_grad_()
    assert explain(q, k, v, selection).passed_over == {"kernel": ["gradients (forward only)"]}
    sparse_atten_func(q, k, v, selection).sum().backward()
    assert not CALLS
    assert q.grad is not None
    with pytest.raises(NotImplementedError, match=r"kernel: gradients \(forward only\)"):
        sparse_atten_func(q, k, v, selection, backend="kernel")
    with torch.no_grad():
        sparse_atten_func(q, k, v, selection)
    assert len(CALLS) == 1


def test_gradients_are_seen_through_a_compiled_call(kernel):
    """Found: below autograd the op's inputs do not require a gradient, and a kernel was chosen."""
    q, k, v, selection = _capable()
    q.requires_grad_()
    attend = torch.compile(sparse_atten_func, fullgraph=True, backend="aot_eager")
    attend(q, k, v, selection).sum().backward()
    assert not CALLS
    assert q.grad is not None


def test_the_device_decides(kernel, monkeypatch):
    elsewhere = Backend(
        "elsewhere", "nowhere:nothing", ("block",), KERNEL.dtypes, capabilities=((10, 0), (10, 3))
    )
    monkeypatch.setattr(dispatch_module, "BACKENDS", (elsewhere, KERNEL, REFERENCE))
    found = explain(*_capable())
    assert found.backend == "kernel"
    assert found.passed_over["elsewhere"] == [
        "device capability None (supported: (10, 0), (10, 3))"
    ]


def test_unknown_names_are_listed():
    (q, k, v), selection, _ = BLOCK["random-counts"].build()
    problem = validate(q, k, v, selection, Options())
    with pytest.raises(
        ValueError, match="backend must be one of 'auto', 'sm100', 'sm90', 'reference', got 'sm999'"
    ):
        choose(problem, "sm999")
