"""How results are judged: an error budget from a run of the same arithmetic without tiling."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_atten.contracts import Options, Selection
from sparse_atten.definition import define_attention
from sparse_atten.reference import Result


class ComparisonRun:
    """Float32 scores and softmax, P cast to the dtype, PV in float32, no tiling."""

    def __init__(self) -> None:
        self.max_score = 0.0
        self.max_value = 0.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: Options) -> Result:
        """Attend, and keep the largest finite score and value that a query sees."""
        visible = seen > 0
        v = v.float().masked_fill(~visible.any(-2)[..., None], 0)
        scores = options.softmax_scale * (q.float() @ k.float().transpose(-1, -2))
        self.max_score = max(self.max_score, _largest(scores.masked_fill(~visible, 0)))
        self.max_value = max(self.max_value, _largest(v))
        logits = (scores + seen.float().log()).masked_fill(~visible, float("-inf"))
        empty = ~visible.any(-1, keepdim=True)
        weights = logits.masked_fill(empty, 0).softmax(-1).masked_fill(~visible, 0)
        out = (weights.to(q.dtype).float() @ v).to(q.dtype)
        return Result(out.double(), logits.logsumexp(-1).double(), None)


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0


def assert_matches_definition(
    result: Result, inputs: tuple[Tensor, Tensor, Tensor], selection: Selection, options: Options
) -> None:
    """Compare a result with the float64 definition: NaN and Inf positions, then the budget.

    Outputs may err twice as much as the comparison run, plus 1e-5 and 1e-6 * max |score| *
    max |V|; LSEs 1e-3 + 1e-6 * |LSE|.
    """
    oracle = define_attention(*inputs, selection, options)
    attend = ComparisonRun()
    run = define_attention(
        *inputs, selection, options._replace(lse_temperature=None), attend=attend
    )
    out = result.out.double()
    assert out.shape == oracle.out.shape
    _assert_same_finiteness("out", out, oracle.out)
    allowance = 1e-5 + 1e-6 * attend.max_score * attend.max_value
    budget = 2 * _worst(run.out, oracle.out) + allowance
    _assert_within("out", out, oracle.out, torch.tensor(budget, dtype=torch.float64))
    for name in ("lse", "lse_t"):
        got, want = getattr(result, name), getattr(oracle, name)
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == torch.float32
            assert got.shape == want.shape
            _assert_same_finiteness(name, got, want)
            _assert_within(name, got.double(), want, 1e-3 + 1e-6 * want.nan_to_num(0, 0, 0).abs())


def _assert_same_finiteness(name: str, got: Tensor, want: Tensor) -> None:
    wrong = got.isfinite() != want.isfinite()
    if name != "out":  # -inf is the LSE of an empty row, and must be met exactly
        wrong |= (got == float("-inf")) != (want == float("-inf"))
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{name}{list(place)} is {got[place]}, expected {want[place]}")


def _worst(got: Tensor, want: Tensor) -> float:
    both = got.isfinite() & want.isfinite()
    return float((got - want)[both].abs().max()) if both.any() else 0.0


def _assert_within(name: str, got: Tensor, want: Tensor, budget: Tensor) -> None:
    finite = want.isfinite()
    excess = torch.where(finite, (got - want).abs() - budget, -1.0)
    if excess.numel() and excess.max() > 0:
        place = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{name}{list(place)} is {float(got[place])!r}, expected {float(want[place])!r}, "
            f"which is {float(excess.max()):.3g} over the budget"
        )
