"""Each NSA branch against loops over tokens in float64, and the gated sum of the three."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_atten import nsa, sparse_atten_func
from sparse_atten.nsa import (
    nsa_attention,
    nsa_compressed_attention,
    nsa_select_blocks,
    nsa_selected_attention,
    nsa_sliding_window_attention,
)


def random_layer(batch=2, tokens=21, heads=2, group=2, *, value_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, tokens, heads * group, 8, generator=generator),
        torch.randn(batch, tokens, heads, 8, generator=generator),
        torch.randn(batch, tokens, heads, value_dim, generator=generator),
    )


def random_blocks(batch, tokens, heads, num_blocks, width, *, seed=0):
    """Distinct ids in any order, those of later blocks too, with -1 anywhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(batch, tokens, heads, num_blocks, generator=generator).argsort(-1)
    ids = torch.nn.functional.pad(ids, (0, width), value=-1)[..., :width]
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)


def attend_to(q, keys, values, scale):
    """One query of one head over a list of keys."""
    scores = torch.stack([scale * (q.double() * key.double()).sum() for key in keys])
    weights = (scores - scores.max()).exp()
    total = sum(w * value.double() for w, value in zip(weights, values, strict=True))
    return total / weights.sum()


def by_token(q, k, v, keys_of, *, scale=None):
    """Attention in which `keys_of(b, t, h)` lists the (key, value) pairs that a token sees."""
    batch, tokens, heads, dim = q.shape
    group = heads // k.shape[2]
    out = torch.zeros(batch, tokens, heads, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                pairs = keys_of(b, t, h // group)
                if pairs:
                    keys, values = zip(*pairs, strict=True)
                    out[b, t, h] = attend_to(q[b, t, h], keys, values, scale or 1 / math.sqrt(dim))
    return out


def selected_by_token(q, k, v, ids, counts, *, block, **options):
    """The definition: gather the tokens of the counted blocks, up to t."""
    num_blocks = -(-k.shape[1] // block)

    def keys_of(b, t, h):
        chosen = ids[b, t, h, : counts[b, t, h]].tolist()
        tokens = [
            j for i in chosen if 0 <= i < num_blocks
            for j in range(i * block, min((i + 1) * block, k.shape[1])) if j <= t
        ]  # fmt: skip
        return [(k[b, j, h], v[b, j, h]) for j in tokens]

    return by_token(q, k, v, keys_of, **options)


def window_by_token(q, k, v, window, **options):
    def keys_of(b, t, h):
        return [(k[b, j, h], v[b, j, h]) for j in range(max(0, t - window + 1), t + 1)]

    return by_token(q, k, v, keys_of, **options)


def compressed_by_token(q, k, v, block, **options):
    def keys_of(b, t, h):
        spans = [slice(i * block, (i + 1) * block) for i in range(k.shape[1] // block)]
        return [
            (k[b, span, h].double().mean(0), v[b, span, h].double().mean(0))
            for span in spans
            if span.stop <= t + 1
        ]

    return by_token(q, k, v, keys_of, **options)


def heads_first(*tensors):
    return [x.transpose(1, 2).contiguous() for x in tensors]


def assert_close(got, wanted, tolerance=1e-5):
    torch.testing.assert_close(got.double(), wanted.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("value_dim", [8, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_selected_equals_the_definition(group, value_dim, dtype):
    q, k, v = random_layer(group=group, value_dim=value_dim)
    ids = random_blocks(2, 21, 2, 6, 3).to(dtype)
    counts = torch.randint(0, 4, (2, 21, 2), generator=torch.Generator().manual_seed(4)).to(dtype)
    out = nsa_selected_attention(q, k, v, ids, counts, block_size=4)
    assert out.shape == (2, 21, 2 * group, value_dim)
    assert_close(out, selected_by_token(q, k, v, ids, counts, block=4))
    scaled = nsa_selected_attention(q, k, v, ids, counts, block_size=4, softmax_scale=0.7)
    assert_close(scaled, selected_by_token(q, k, v, ids, counts, block=4, scale=0.7))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_selected_of_random_shapes(data):
    draw = data.draw
    batch, tokens, heads = (
        draw(st.integers(1, 2)),
        draw(st.integers(0, 13)),
        draw(st.integers(1, 2)),
    )
    block, width = draw(st.sampled_from([1, 3, 8])), draw(st.integers(0, 4))
    seed = draw(st.integers(0, 99))
    q, k, v = random_layer(batch, tokens, heads, draw(st.integers(1, 3)), seed=seed)
    ids = random_blocks(batch, tokens, heads, -(-tokens // block), width, seed=seed)
    count = draw(st.integers(0, width))
    counts = torch.full((batch, tokens, heads), count)
    wanted = selected_by_token(q, k, v, ids, counts, block=block)
    tables = ids, draw(st.sampled_from([count, counts]))
    out = nsa_selected_attention(q, k, v, *tables, block_size=block)
    assert_close(out, wanted)
    tables = [x if isinstance(x, int) else x.transpose(1, 2) for x in tables]
    first = nsa_selected_attention(
        *heads_first(q, k, v), *tables, block_size=block, head_first=True
    )
    assert_close(first.transpose(1, 2), wanted)


LAYOUTS = {
    "tokens first": lambda x: x,
    "heads first in memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a fused projection": lambda x: torch.stack((x, x, x), 2)[:, :, 1],
}


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_keys_and_values_are_seen_where_they_lie(monkeypatch, layout, head_first, batch):
    q, k, v = (LAYOUTS[layout](x) for x in random_layer(batch))
    ids = random_blocks(batch, 21, 2, 6, 3)
    wanted = nsa_selected_attention(*(x.contiguous() for x in (q, k, v)), ids, block_size=4)

    def spy(q_rows, k_rows, v_rows, *rest, **options):
        assert (k_rows.data_ptr(), v_rows.data_ptr()) == (k.data_ptr(), v.data_ptr())
        return sparse_atten_func(q_rows, k_rows, v_rows, *rest, **options)

    monkeypatch.setattr(nsa, "sparse_atten_func", spy)
    arguments = (q, k, v, ids)
    if head_first:
        arguments = [x.transpose(1, 2) for x in arguments]
    out = nsa_selected_attention(*arguments, block_size=4, head_first=head_first)
    assert torch.equal(out.transpose(1, 2) if head_first else out, wanted)


def test_strides_that_need_a_copy_are_refused():
    cache = random_layer(2, 32)
    q, k, v = (x[:, :21] for x in cache)  # the tokens of batch entries are 32 apart
    ids = random_blocks(2, 21, 2, 6, 3)
    with pytest.raises(ValueError, match=r"k and v must be views of B \* T tokens or of B \* H"):
        nsa_selected_attention(q, k, v, ids, block_size=4)


def test_fillers_of_any_kind_are_unused_slots():
    q, k, v = random_layer(1, 12)
    ids = torch.tensor([1, 0]).expand(1, 12, 2, 2)
    wanted = nsa_selected_attention(q, k, v, ids, block_size=4)
    fillers = torch.tensor([-1, 12, 3, -(2**40), 2**32, 2**32 - 1, 12, -1])
    filled = torch.cat((fillers.expand(1, 12, 2, 8), ids), -1)
    assert torch.equal(nsa_selected_attention(q, k, v, filled, block_size=4), wanted)
    alone = nsa_selected_attention(q, k, v, filled, 8, block_size=4)
    assert torch.equal(alone, torch.zeros_like(alone))


def test_nothing_after_a_token_reaches_it():
    q, k, v = random_layer(1, 16)
    ids = torch.arange(4).expand(1, 16, 2, 4)
    layers = {
        "selected": lambda *x: nsa_selected_attention(*x, ids, block_size=4),
        "window": lambda *x: nsa_sliding_window_attention(*x, window_size=6),
        "compressed": lambda *x: nsa_compressed_attention(*x, block_size=4),
    }
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, 10], bad_v[:, 10] = math.nan, math.inf
    first_seen = {"selected": 10, "window": 10, "compressed": 11}
    for name, attend in layers.items():
        got, wanted = attend(q, bad_k, bad_v), attend(q, k, v)
        stop = first_seen[name]
        assert torch.equal(got[:, :stop], wanted[:, :stop]), name
        assert not got[:, stop].isfinite().any(), name
    assert nsa_sliding_window_attention(q, bad_k, bad_v, window_size=3)[:, 13:].isfinite().all()


@pytest.mark.parametrize("budget", [1, 20_000, None])
@pytest.mark.parametrize("window", [1, 5, 21, 100])
def test_sliding_window_equals_the_definition(window, budget):
    q, k, v = random_layer(group=3, value_dim=16)
    out = nsa_sliding_window_attention(q, k, v, window_size=window, max_workspace_bytes=budget)
    assert_close(out, window_by_token(q, k, v, window))
    first = nsa_sliding_window_attention(
        *heads_first(q, k, v), window_size=window, head_first=True, softmax_scale=0.3
    )
    assert_close(first.transpose(1, 2), window_by_token(q, k, v, window, scale=0.3))


@pytest.mark.parametrize("budget", [1, 4000, None])
@pytest.mark.parametrize("block", [1, 4, 7, 30])
def test_compressed_equals_the_definition(block, budget):
    q, k, v = random_layer(group=3, value_dim=16)
    out, scores = nsa_compressed_attention(
        q, k, v, block_size=block, return_scores=True, max_workspace_bytes=budget
    )
    wanted = compressed_by_token(q, k, v, block)
    assert_close(out, wanted)
    assert (out[:, : block - 1] == 0).all()  # no block is complete yet
    first, first_scores = nsa_compressed_attention(
        *heads_first(q, k, v), block_size=block, head_first=True, return_scores=True
    )
    assert_close(first.transpose(1, 2), wanted)
    assert_close(first_scores.transpose(1, 2), scores)


def test_importance_is_the_weight_of_a_block_in_its_group():
    q, k, v = random_layer(1, 18, heads=2, group=3)
    _, scores = nsa_compressed_attention(q, k, v, block_size=4, return_scores=True)
    assert scores.shape == (1, 18, 2, 5)
    assert scores.dtype == torch.float32
    for t in range(18):
        complete = (t + 1) // 4
        assert (scores[0, t, :, complete:] == -math.inf).all()
        for h in range(2):
            means = k[0, : 4 * complete, h].unflatten(0, (complete, 4)).mean(1).double()
            logits = q[0, t, 3 * h : 3 * h + 3].double() @ means.T / math.sqrt(8)
            assert_close(scores[0, t, h, :complete], logits.softmax(-1).sum(0))


def select_by_sorting(scores, block, selected, first, local):
    """Lists of one token each from scores [T, n]."""
    lists = []
    for t, row in enumerate(scores.tolist()):
        begun = t // block + 1
        forced = {*range(min(first, begun)), *range(max(0, begun - local), begun)}
        rest = [b for b in range(begun) if b not in forced and row[b] > -math.inf]
        rest.sort(key=lambda b, row=row: (-row[b], b))
        lists.append(sorted([*forced, *rest[: selected - len(forced)]]))
    return lists


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_choice_equals_sorting(data):
    draw = data.draw
    block, tokens = draw(st.sampled_from([1, 4])), draw(st.integers(0, 20))
    first, local = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    selected = draw(st.integers(max(1, first + local), 6))
    shape = 2, tokens, 3, -(-tokens // block)
    values = torch.tensor([0.0, 0.5, 1.0, -math.inf])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    scores = values[torch.randint(0, 4, shape, generator=generator)]
    options = {
        "num_selected": selected, "num_first": first, "num_local": local, "block_size": block
    }  # fmt: skip
    ids, counts = nsa_select_blocks(scores, **options)
    assert ids.shape == (2, tokens, 3, selected)
    for b in range(2):
        for h in range(3):
            lists = select_by_sorting(scores[b, :, h], block, selected, first, local)
            assert counts[b, :, h].tolist() == [len(x) for x in lists]
            assert ids[b, :, h].tolist() == [x + [-1] * (selected - len(x)) for x in lists]
    by_head = nsa_select_blocks(scores.transpose(1, 2), head_first=True, **options)
    assert torch.equal(by_head[0].transpose(1, 2), ids)
    assert torch.equal(by_head[1].transpose(1, 2), counts)


@pytest.mark.parametrize("budget", [1, None])
@pytest.mark.parametrize("head_first", [False, True])
def test_three_branches_and_their_gates(head_first, budget):
    q, k, v = random_layer(tokens=37, value_dim=16)
    gates = torch.rand(3, 2, 37, 4, generator=torch.Generator().manual_seed(9))
    choice = {"num_selected": 4, "num_first": 1, "num_local": 2}
    scores = nsa_compressed_attention(q, k, v, block_size=4, return_scores=True)[1]
    ids, counts = nsa_select_blocks(scores, block_size=4, **choice)
    branches = (
        compressed_by_token(q, k, v, 4),
        selected_by_token(q, k, v, ids, counts, block=4),
        window_by_token(q, k, v, 6),
    )
    wanted = sum(gate[..., None] * branch for gate, branch in zip(gates, branches, strict=True))
    arguments = [q, k, v, *gates]
    if head_first:
        arguments = heads_first(*arguments)
    out = nsa_attention(
        *arguments[:3], gates=tuple(arguments[3:]), block_size=4, window_size=6, **choice,
        head_first=head_first, max_workspace_bytes=budget,
    )  # fmt: skip
    assert_close(out.transpose(1, 2) if head_first else out, wanted)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.num_bytes = max(self.num_bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("records_grad", [False, True])
def test_branches_never_hold_all_scores(records_grad):
    tensors = [x.requires_grad_(records_grad) for x in random_layer(1, 1200)]
    budget = 200_000
    with Largest() as largest:
        nsa_sliding_window_attention(*tensors, window_size=400, max_workspace_bytes=budget)
        nsa_compressed_attention(*tensors, block_size=4, max_workspace_bytes=budget)
    assert largest.num_bytes <= budget
    with Largest() as largest:
        nsa_sliding_window_attention(*tensors, window_size=400)
    assert largest.num_bytes > 4 * 400 * 400 * 4


def test_nothing_is_read_on_the_host_of_a_device():
    # Meta tensors hold no values: whatever needs one raises.
    q, k, v = (x.to("meta") for x in random_layer(value_dim=16))
    gates = (torch.ones(2, 21, 4, device="meta"),) * 3
    out = nsa_attention(q, k, v, gates=gates, block_size=4, num_selected=4, window_size=6)
    assert out.shape == (2, 21, 4, 16)
    ids = torch.zeros(2, 21, 2, 3, dtype=torch.int64, device="meta")
    counts = torch.zeros(2, 21, 2, dtype=torch.int64, device="meta")
    assert nsa_selected_attention(q, k, v, ids, counts, block_size=4).shape == (2, 21, 4, 16)


@pytest.mark.parametrize("ambient", ["bfloat16 autocast", "float64 default"])
def test_settings_of_the_callers_program_change_nothing(ambient):
    q, k, v = random_layer()
    gates = (torch.ones(2, 21, 4),) * 3
    options = {"gates": gates, "block_size": 4, "num_selected": 4, "window_size": 6}
    wanted = nsa_attention(q, k, v, **options)
    if ambient == "float64 default":
        torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient == "bfloat16 autocast"):
            out = nsa_attention(q, k, v, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, wanted)
    assert out.dtype == torch.float32


def test_bfloat16_in_and_out():
    q, k, v = (x.bfloat16() for x in random_layer())
    gates = (torch.ones(2, 21, 4),) * 3
    out = nsa_attention(q, k, v, gates=gates, block_size=4, num_selected=4, window_size=6)
    assert out.dtype == torch.bfloat16
    wanted = nsa_attention(
        *(x.double() for x in (q, k, v)), gates=gates, block_size=4, num_selected=4, window_size=6
    )
    assert wanted.dtype == torch.float64
    assert_close(out, wanted, 2e-2)


@pytest.mark.parametrize("budget", [1, None])
def test_gradients_equal_those_of_the_definition(budget):
    tensors = [x.double().requires_grad_() for x in random_layer(1, 11)]
    ids = random_blocks(1, 11, 2, 3, 2)
    counts = torch.full((1, 11, 2), 2)
    pairs = (
        (nsa_selected_attention(*tensors, ids, block_size=4),
         selected_by_token(*tensors, ids, counts, block=4)),
        (nsa_sliding_window_attention(*tensors, window_size=3, max_workspace_bytes=budget),
         window_by_token(*tensors, 3)),
        (nsa_compressed_attention(*tensors, block_size=4, max_workspace_bytes=budget),
         compressed_by_token(*tensors, 4)),
    )  # fmt: skip
    pull = torch.randn(1, 11, 4, 8, generator=torch.Generator().manual_seed(2)).double()
    for got, wanted in pairs:
        grads = (torch.autograd.grad(x, tensors, pull) for x in (got, wanted))
        for x, y in zip(*grads, strict=True):
            assert_close(x, y, 1e-6)


def test_gradients_reach_the_gates():
    tensors = [x.double().requires_grad_() for x in random_layer(1, 11)]
    gates = [torch.rand(1, 11, 4).double().requires_grad_() for _ in range(3)]
    out = nsa_attention(*tensors, gates=gates, block_size=4, num_selected=3, window_size=3)
    out.sum().backward()
    compressed = nsa_compressed_attention(*tensors, block_size=4)
    assert_close(gates[0].grad, compressed.detach().sum(-1))
    assert all(x.grad.isfinite().all() and x.grad.any() for x in (*tensors, *gates))


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_empty_problems(batch, tokens):
    q, k, v = random_layer(batch, tokens, value_dim=16)
    gates = (torch.ones(batch, tokens, 4),) * 3
    assert nsa_attention(q, k, v, gates=gates).shape == (batch, tokens, 4, 16)


def with_layer(**changes):
    q, k, v = random_layer()
    ids = random_blocks(2, 21, 2, 6, 3)
    return {"q": q, "k": k, "v": v, "block_indices": ids, "block_size": 4} | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 21, 4)}, ValueError, r"q must be \[B, T, H, D\], got float32"),
        ({"k": torch.zeros(2, 21, 2, 8).half()}, TypeError, "k must be q's dtype, one of bfloat16"),
        ({"k": torch.zeros(2, 20, 2, 8)}, ValueError, "k must have q's B = 2, T = 21 and D = 8"),
        (
            {"v": torch.zeros(2, 21, 1, 8)},
            ValueError,
            r"v must have k's B, T and H in \[B, T, H, D",
        ),
        (
            {"q": torch.zeros(2, 21, 5, 8)},
            ValueError,
            "q must have a multiple of k's 2 heads, got 5",
        ),
        ({"head_first": 1}, TypeError, "head_first must be a bool, got int 1"),
        (
            {"block_indices": torch.zeros(2, 2, 21, 3, dtype=torch.int32)},
            ValueError,
            r"block_indices must be int32 or int64 \[B, T, H, S\] = \[2, 21, 2, S\], got int32",
        ),
        (
            {"block_indices": torch.zeros(2, 21, 2, 3)},
            TypeError,
            r"block_indices must be int32 or int64 \[B, T, H, S\] = \[2, 21, 2, S\], got float32",
        ),
        (
            {"block_indices": torch.tensor([3, 0, 3]).expand(2, 21, 2, 3)},
            ValueError,
            r"block_indices\[0, 0, 0\] must list each block once, got block 3 twice",
        ),
        ({"block_counts": 4}, ValueError, r"block_counts must be in 0\.\.3, got 4"),
        (
            {"block_counts": torch.full((2, 21, 2), 5)},
            ValueError,
            r"block_counts\[0, 0, 0\] must be in 0\.\.3 \(S\), got 5",
        ),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale must be a finite float > 0"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        nsa_selected_attention(**with_layer(**changes))


def test_bad_arguments_of_the_other_branches_are_named():
    q, k, v = random_layer()
    gates = (torch.ones(2, 21, 4),) * 3
    with pytest.raises(ValueError, match="window_size must be at least 1, got 0"):
        nsa_sliding_window_attention(q, k, v, window_size=0)
    with pytest.raises(ValueError, match="max_workspace_bytes must be at least 1, got 0"):
        nsa_compressed_attention(q, k, v, max_workspace_bytes=0)
    with pytest.raises(TypeError, match="gates must be three Tensors"):
        nsa_attention(q, k, v, gates=gates[:2])
    with pytest.raises(ValueError, match=r"gates\[2\] must be \[2, 21, 4\] on cpu, got float32"):
        nsa_attention(q, k, v, gates=(*gates[:2], torch.ones(2, 4, 21)))
    with pytest.raises(ValueError, match=r"num_first \+ num_local must be at most num_selected 2"):
        nsa_attention(q, k, v, gates=gates, num_selected=2)
    with pytest.raises(ValueError, match=r"scores must be \[B, T, H, n\] with n = ceil\(T / 64\)"):
        nsa_select_blocks(torch.zeros(2, 21, 2, 6))
    with pytest.raises(TypeError, match=r"scores must be float32 \[B, H, T, n\], got float64"):
        nsa_select_blocks(torch.zeros(2, 2, 21, 1).double(), head_first=True)
