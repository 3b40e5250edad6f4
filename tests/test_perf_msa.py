"""The benchmark of MSA without a GPU: its layers, its judges, its rivals, and its rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_perf import Replay

from perf import contest, msa, msa_judge, msa_rivals
from perf.msa_judge import judge_tokens, wrong_choice
from perf.msa_layer import Case, draw_layer, measure_choice
from perf.rivals import UnsupportedError
from sparse_atten import prepare, sparse_atten_func
from sparse_atten.msa import merge_partials, partial_attention

SMALL = Case(512, heads=(8, 2), topk=2)
UNEVEN = Case(333, heads=(4, 4), topk=2)


@pytest.fixture(scope="module", params=[SMALL, UNEVEN], ids=lambda case: case.name)
def layer(request):
    return draw_layer(request.param, torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def small():
    return draw_layer(SMALL, torch.Generator().manual_seed(5))


def attend(layer, selection):
    return sparse_atten_func(*layer.inputs, selection, causal=True)


# Layers


def test_work_is_what_loops_count(layer):
    lists = layer.select().q2k_indices
    edges = keys = 0
    shares = []
    for rows in lists.tolist():
        for token, row in enumerate(rows):
            ids = [i for i in row if i >= 0]
            edges += len(ids)
            keys += sum(1 for i in ids for key in range(128) if 128 * i + key <= token)
            if token:
                shares.append(len(set(ids) & set(rows[token - 1])) / len(ids))
    work = measure_choice(lists)
    assert (work.edges, work.keys) == (edges, keys)
    assert work.overlap == pytest.approx(sum(shares) / len(shares), abs=1e-6)


def test_smooth_index_queries_make_neighbours_choose_alike():
    overlap = {}
    for kind in ("random", "smooth"):
        case = Case(4096, kind, heads=(2, 1), topk=4)
        lists = draw_layer(case, torch.Generator().manual_seed(1)).select().q2k_indices
        overlap[kind] = measure_choice(lists[:, 2048:]).overlap
    assert overlap["random"] < 0.5 < 0.7 < overlap["smooth"]


def test_names_are_unique():
    names = [case.name for case in msa.CASES]
    assert len(set(names)) == len(names)
    assert msa.CASES[3].name == "64:4x32768-k16-random"


# Judges


def test_a_right_output_passes(layer):
    selection = layer.select()
    verdict = judge_tokens(attend(layer, selection), layer, selection.q2k_indices)
    assert verdict.right
    assert verdict.num_queries >= 12
    q, k, v = msa_rivals.heads_first(layer)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=layer.group > 1
    )
    assert judge_tokens(dense[0].transpose(0, 1), layer, None).right
    assert not judge_tokens(dense[0].transpose(0, 1), layer, selection.q2k_indices).right


@pytest.mark.parametrize("fault", ["not causal", "a block too few", "heads", "NaN"])
def test_a_wrong_output_fails(small, fault):
    selection = small.select()
    out = attend(small, selection)
    if fault == "not causal":
        out = sparse_atten_func(*small.inputs, selection, causal=False)
    elif fault == "a block too few":
        ids = selection.q2k_indices.clone()
        ids[..., 1] = -1
        out = attend(small, replace(selection, q2k_indices=ids))
    elif fault == "heads":
        out = out.flip(1)
    else:
        out[-1, 3, 7] = float("nan")
    assert not judge_tokens(out, small, selection.q2k_indices).right


def test_the_right_choice_passes(layer):
    assert wrong_choice(layer.select().q2k_indices, layer, tokens=80) is None


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([3, 1], "not ascending"),
        ([3, 3], "not ascending"),
        ([-1, 3], "not ascending"),
        ([3, -1], "not 2 up to the local one, 3"),
        ([0, 2], "not 2 up to the local one, 3"),
        (None, "was passed over"),
    ],
)
def test_a_wrong_choice_is_named(small, ids, reason):
    lists = small.select().q2k_indices.clone()
    if ids is None:
        ids = [next(i for i in range(3) if i != int(lists[1, 511, 0])), 3]
    lists[1, 511] = torch.tensor(ids, dtype=torch.int32)
    found = wrong_choice(lists, small)
    assert found.startswith("token 511, KV head 1: ")
    assert reason in found


def test_a_choice_of_the_local_block_alone_is_right(small):
    one = replace(small, topk=1)
    assert wrong_choice(one.select().q2k_indices, one) is None


# Rivals


def test_rivals_that_are_not_installed_say_so(monkeypatch):
    monkeypatch.setattr(msa_rivals, "not_installed", lambda module, package: f"no {package}")
    monkeypatch.setattr(msa_rivals, "no_triton", lambda: "no triton")
    found = {rival.name: rival.missing() for rival in msa_rivals.RIVALS}
    assert found == {
        "fa4-dense": "no flash-attn-4",
        "sdpa": None,
        "flex": "no triton",
        "flash-msa": "no flash-msa",
    }


def test_torch_attends_causally(layer):
    candidate = msa_rivals.SdpaCausal().prepare(layer, layer.select().q2k_indices)
    assert candidate.dense
    assert judge_tokens(candidate.call(), layer, candidate.lists).right


def test_fa4_is_called_causally(monkeypatch, small):
    def flash_attn_func(q, k, v, *, causal=False):
        assert causal
        assert q.shape == (1, 512, 8, 128)
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *inputs, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2), None

    install(monkeypatch, "flash_attn", {})
    install(monkeypatch, "flash_attn.cute", {"flash_attn_func": flash_attn_func})
    candidate = msa_rivals.Fa4Causal().prepare(small, small.select().q2k_indices)
    assert judge_tokens(candidate.call(), small, None).right


def install(monkeypatch, name, contents):
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_gets_a_block_mask_that_means_the_choice(monkeypatch, layer):
    masks = []

    compile_ = torch.compile

    def kept(function, **more):  # flex_attention compiles itself, on a CPU, without fusing
        def call(q, k, v, *, block_mask, enable_gqa):
            masks.append(block_mask)
            return function(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)

        return compile_(function, **more) if "backend" in more else call

    monkeypatch.setattr(torch, "compile", kept)
    lists = layer.select().q2k_indices
    candidate = msa_rivals.FlexTokens().prepare(layer, lists)
    assert judge_tokens(candidate.call(), layer, lists).right
    (mask,) = masks
    tiles = mask.to_dense()[0]
    heads, tokens = layer.q.shape[1], layer.tokens
    assert tiles.shape == (heads, -(-tokens // 128), -(-tokens // 128))
    wanted = torch.zeros_like(tiles)
    for head in range(heads):
        for token, row in enumerate(lists[head // layer.group].tolist()):
            wanted[head, token // 128, [i for i in row if i >= 0]] = 1
    assert torch.equal(tiles, wanted)


def test_tiles_are_full_where_every_query_sees_every_key():
    table = torch.zeros(1, 300, 3, dtype=torch.bool)
    table[0, 128:256, 0] = True  # all of the second block of queries
    table[0, 128:256, 1] = True  # its own block: the diagonal hides keys
    table[0, 256:299, 1] = True  # all but one
    table[0, 5, 2] = True  # the future
    partial, full = msa_rivals.tiles_of(table)
    assert full[0].nonzero().tolist() == [[1, 0]]
    assert partial[0].nonzero().tolist() == [[1, 1], [2, 1]]


def test_flex_is_left_out_of_long_sequences(monkeypatch, small):
    monkeypatch.setattr(msa_rivals, "FLEX_TOKENS", 256)
    with pytest.raises(UnsupportedError, match="left out beyond 256 tokens"):
        msa_rivals.FlexTokens().prepare(small, small.select().q2k_indices)


def test_flash_msa_is_judged_by_its_own_choice(monkeypatch, small):
    own = small.select().q2k_indices.clone()
    own[:, 200, 0] = 0
    unused = own.masked_fill(own < 0, 10_000)  # what follows a short list may be anything

    def select_blocks(q_proxy, k_proxy, *, scale, num_blocks, top_k_blocks):
        assert (q_proxy.shape[1], k_proxy.shape[1]) == (2, 1)
        assert (num_blocks, top_k_blocks) == (4, 2)
        assert scale == pytest.approx(128**-0.5)
        return unused[None]

    def flash_msa_func(q_proxy, k_proxy, *inputs, top_k, scale):
        assert len(inputs) == 3
        assert top_k == 256
        out = attend(small, replace(small.select(), q2k_indices=own))
        return out.flatten(1)[None], torch.zeros(())

    install(monkeypatch, "flash_msa", {"flash_msa_func": flash_msa_func})
    install(monkeypatch, "flash_msa.flash_msa", {"select_blocks": select_blocks})
    candidate = msa_rivals.FlashMsa().prepare(small, small.select().q2k_indices)
    assert torch.equal(candidate.lists, own)
    assert judge_tokens(candidate.call(), small, candidate.lists).right


def test_flash_msa_takes_whole_blocks(monkeypatch):
    install(monkeypatch, "flash_msa", {"flash_msa_func": lambda q_proxy, k_proxy, top_k, scale: 0})
    install(monkeypatch, "flash_msa.flash_msa", {"select_blocks": None})
    uneven = draw_layer(UNEVEN, torch.Generator().manual_seed(5))
    with pytest.raises(UnsupportedError, match="whole blocks"):
        msa_rivals.FlashMsa().prepare(uneven, uneven.select().q2k_indices)


# Rows


class Wrong:
    """A rival whose output is that of another."""

    name = "wrong"

    def missing(self):
        """See `Rival`."""

    def prepare(self, layer, lists):
        """See `Rival`."""
        return msa_rivals.Candidate(lambda: layer.q, lists)


class Broken(Wrong):
    """A rival that raises."""

    name = "broken"

    def prepare(self, layer, lists):
        """See `Rival`."""
        raise RuntimeError("first\nsecond")


@pytest.fixture
def clock(monkeypatch):
    """Call everything once, on the CPU, and say that it took 100 microseconds."""

    def interleaved(calls, samples):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, [100.0] * samples)

    monkeypatch.setattr(contest, "try_capture", Replay)
    monkeypatch.setattr(contest, "interleaved", interleaved)
    monkeypatch.setattr(msa, "DEVICE", "cpu")
    monkeypatch.setattr(msa, "GRAPH_TOKENS", 1024)
    monkeypatch.setattr(msa, "occupy", lambda call, microseconds: None)


def options(**changes):
    fields = {"seed": 0, "samples": 3, "backend": "reference", "rivals": None, "only": ""}
    return SimpleNamespace(**{**fields, "quick": True, "workspace_mib": None, **changes})


STAGES = [
    "scores",
    "top-k",
    "index branch",
    "CSR + schedule",
    "K1",
    "K2",
    "K1 + K2",
    "CSR + schedule + K1 + K2",
    "minimax_sparse_attention",
]


@pytest.mark.usefixtures("clock")
def test_a_layer_becomes_rows(monkeypatch):
    rivals = [msa_rivals.SdpaCausal(), Wrong(), Broken()]
    # 512 tokens, 2 slots, 8 heads, 128 values of 2 bytes and two LSEs: 2.06 MiB in three chunks.
    rows = msa.measure_case(SMALL, rivals, options(workspace_mib=1))
    assert [row["backend"] for row in rows] == [*STAGES, "sdpa", "wrong", "broken"]
    found = {row["backend"]: row for row in rows}
    assert all(found[name]["status"] == "ok" for name in [*STAGES, "sdpa"])
    whole, sdpa = found["minimax_sparse_attention"], found["sdpa"]
    assert whole["repeats"] == 2
    assert whole["graph_us"] == [50.0] * 3
    assert whole["eager_us"] == [100.0] * 3
    assert "eager_us" not in found["K1"]
    assert found["K1"]["graph_share"] == 1
    assert sdpa["graph_ratio"] == sdpa["eager_ratio"] == 1
    # Of the first 128 tokens each has one block, of the others two.
    edges = 2 * (128 + 2 * 384)
    assert whole["edges"] == edges
    assert whole["tile_flops"] == 4 * 128 * 4 * 128 * edges
    assert whole["tile_tflops"] == pytest.approx(whole["tile_flops"] / 50e-6 / 1e12)
    assert whole["flops"] < whole["tile_flops"]
    assert sdpa["flops"] == 4 * 128 * 8 * 512 * 513 // 2
    assert sdpa["tile_flops"] == 4 * 128 * 8 * 128 * 128 * 10
    assert whole["chunks"] == 3
    assert whole["workspace_bytes"] == 171 * 2 * 8 * (256 + 8)
    assert whole["partial_bytes"] == edges * 4 * (256 + 4)
    assert 0 < whole["max_error"] <= whole["error_budget"]
    assert whole["peak_bytes"] is None
    assert found["wrong"]["status"] == "wrong"
    assert found["broken"]["status"] == "failed"
    assert found["broken"]["reason"] == "RuntimeError: first"
    assert "flops" not in found["K2"]


@pytest.mark.usefixtures("clock")
def test_the_command_runs_its_quick_cases(monkeypatch):
    monkeypatch.setattr(msa, "QUICK", (UNEVEN,))
    rows = []
    msa.run(options(rivals="sdpa,flash-msa"), SimpleNamespace(write=rows.append))
    status = {row["backend"]: row["status"] for row in rows}
    assert status.pop("flash-msa") == "missing"
    assert status == dict.fromkeys([*STAGES, "sdpa"], "ok")
    with pytest.raises(SystemExit, match="no rival fa5; there are fa4-dense, sdpa, flex"):
        msa.run(options(rivals="fa5"), SimpleNamespace(write=rows.append))


def test_the_kernels_get_partials_of_each_chunk_in_one_workspace(monkeypatch, small):
    def attend_blocks(inputs, prepared, chunk, options, partials):
        index = prepared.chunks.index(chunk)
        filled = partial_attention(*inputs, prepared, causal=options.causal, chunk=index)
        for target, values in zip(partials, filled, strict=False):
            target.copy_(values)

    def merge(partials, chunk, result):
        counts = chunk.schedule.split_counts
        out, lse = merge_partials(partials.o.float(), partials.lse, counts)
        result.out[chunk.tokens].copy_(out)
        result.lse[chunk.tokens].copy_(lse)

    monkeypatch.setattr(msa.device, "attend_blocks", attend_blocks)
    monkeypatch.setattr(msa.device, "merge", merge)
    selection = small.select()
    for bound in (None, 1 << 20):
        prepared = prepare(selection, small.q, small.k, max_workspace_bytes=bound)
        assert len(prepared.chunks) == (1 if bound is None else 3)
        k1, k2, both = msa.kernel_calls(small, prepared, reference=False)
        assert judge_tokens(both(), small, selection.q2k_indices).right
        k1()
        k2()


@pytest.mark.usefixtures("clock")
def test_without_a_kernel_the_attention_is_unsupported_and_the_rest_is_timed():
    rows = msa.measure_case(SMALL, [], options(backend="auto"))
    status = {row["backend"]: row["status"] for row in rows}
    assert [name for name in STAGES if status[name] == "ok"] == STAGES[:4]
    assert {status[name] for name in STAGES[4:]} == {"unsupported"}
    assert "takes the reference" in rows[-1]["reason"]


@pytest.mark.usefixtures("clock")
def test_a_wrong_choice_or_output_of_ours_ends_in_failure(monkeypatch):
    monkeypatch.setattr(msa, "QUICK", (SMALL,))
    monkeypatch.setattr(msa, "wrong_choice", lambda lists, layer: "token 3: no")
    monkeypatch.setattr(msa, "partial_attention", spoiled(msa.partial_attention))
    rows = []
    with pytest.raises(SystemExit, match="a stage of this package failed"):
        msa.run(options(rivals=""), SimpleNamespace(write=rows.append))
    wrong = {row["backend"]: row["reason"] for row in rows if row["status"] == "wrong"}
    assert sorted(wrong) == ["K1", "K2", "index branch", "scores", "top-k"]
    assert wrong["scores"] == "token 3: no"
    assert "over the budget" in wrong["K1"]


def spoiled(function):
    def call(*given, **more):
        out, lse = function(*given, **more)
        return out + 0.05, lse

    return call


def test_sampled_tokens_hold_the_edges():
    assert {0, 127, 128, 999} <= set(msa_judge.sampled_tokens(1000, 4, 0))
    assert msa_judge.sampled_tokens(100, 200, 0) == list(range(100))
