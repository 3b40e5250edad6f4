"""The benchmarks without a GPU: cases, rows, rivals, the check of results, and the clock."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from perf import __main__ as command
from perf import contest, masks, progress, rivals, rows, timing, video, vsa
from perf.judge import every_key, judge
from perf.masks import Case, VideoCase
from perf.rivals import Problem, UnsupportedError
from sparse_atten import BlockSelection, sparse_atten_func
from sparse_atten.cute_kernels.common.target import H200

SMALL = Case((4, 2), 768, 3)
RAGGED = Case((4, 2), 1000, 3, counts="random", sizes="ragged")
# VSA's worked example: 130 text tokens, a reference of 4 blocks, 60, 200, a target of 8 blocks.
EXAMPLE = VideoCase((2, 2), (130, (4, 4, 32), 60, 200, (8, 8, 16)), 0.75)


def generator():
    return torch.Generator().manual_seed(3)


def make_problem(case, layout="bhsd", dtype=torch.bfloat16):
    draw = generator()
    selection = case.select(draw, layout)
    return Problem(selection, case.tokens, masks.draw_inputs(case, dtype, layout, draw))


def lists_of(ids, counts):
    """Every row's ids as Python lists."""
    flat = zip(ids.flatten(0, 2).tolist(), counts.flatten().tolist(), strict=True)
    return [row[:count] for row, count in flat]


# Cases


@pytest.mark.parametrize("mask", ["random", "local", "routed"])
@pytest.mark.parametrize("counts", ["fixed", "random"])
def test_rows_are_distinct_ascending_ids(mask, counts):
    case = Case((4, 2), 4096, 6, mask=mask, counts=counts)
    selection = case.select(generator(), "bhsd")
    found = lists_of(selection.q2k_indices, selection.q2k_counts)
    assert len(found) == 4 * 32
    for row in found:
        assert row == sorted(set(row))
        assert all(0 <= i < 32 for i in row)
    lengths = [len(row) for row in found]
    if counts == "fixed":
        assert set(lengths) == {6}
    else:
        assert (min(lengths), max(lengths)) == (1, 11)
        assert abs(sum(lengths) / len(lengths) - 6) < 1


def test_the_kinds_of_mask_differ_in_what_they_are_named_for():
    work, distance = {}, {}
    for mask in ("random", "local", "routed"):
        case = Case((2, 2), 128 * 64, 8, mask=mask)
        selection = case.select(generator(), "bhsd")
        work[mask] = masks.measure_work(selection, case.tokens)
        steps = selection.q2k_indices - torch.arange(64)[:, None]
        distance[mask] = float(steps.abs().float().mean())
    assert 0.05 < work["random"].overlap < 0.25  # 8 of 64
    assert work["routed"].overlap > 0.7
    assert distance["local"] < 8 < 16 < distance["random"]


def test_the_worked_example_of_the_prefix():
    selection = EXAMPLE.select(generator(), "bhsd")
    assert EXAMPLE.name == "2x2176-8of17-prefix5"
    ids, counts = masks.explicit_lists(selection, EXAMPLE.tokens)
    assert counts[0, 0].tolist() == [17] * 5 + [8] * 12
    for row in lists_of(ids, counts):
        assert row[:5] == [0, 1, 2, 3, 4]
        assert row == sorted(set(row))
    assert masks.measure_work(selection, EXAMPLE.tokens).valid_tokens == 1926


def test_the_scaled_example_keeps_its_proportions():
    scaled = next(case for case in masks.CASES if isinstance(case, VideoCase))
    assert scaled.blocks > 200
    starts = scaled.layout.video_tile_spans
    assert [stop - start for start, stop in starts] == [16 * 4, 16 * 8]


@pytest.mark.parametrize("case", [RAGGED, EXAMPLE])
def test_work_is_what_loops_count(case):
    selection = case.select(generator(), "bhsd")
    sizes = masks.block_sizes(selection, case.tokens).tolist()
    rows_ = lists_of(*masks.explicit_lists(selection, case.tokens))
    pairs = sum(sizes[i % case.blocks] * sum(sizes[j] for j in row) for i, row in enumerate(rows_))
    shared = [
        len(set(row) & set(rows_[i - 1])) / len(row)
        for i, row in enumerate(rows_)
        if i % case.blocks
    ]
    work = masks.measure_work(selection, case.tokens)
    assert (work.pairs, work.tiles) == (pairs, sum(map(len, rows_)))
    assert work.valid_tokens == sum(sizes)
    assert work.overlap == pytest.approx(sum(shared) / len(shared), abs=1e-6)


def test_names_are_unique():
    for cases in (masks.CASES, masks.SWEEP):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
    assert {case.name for case in masks.QUICK} <= {case.name for case in masks.CASES}


# The check of results


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", [SMALL, RAGGED, EXAMPLE])
def test_a_right_output_passes(case, layout):
    problem = make_problem(case, layout)
    out = sparse_atten_func(*problem.inputs, problem.selection)
    verdict = judge(out, problem.inputs, problem.selection)
    assert verdict.right
    assert verdict.num_queries > 1000


def faults():
    """Name to what spoils an output."""

    def hide(problem):
        counts = problem.selection.q2k_counts - 1
        return sparse_atten_func(
            *problem.inputs, BlockSelection(problem.selection.q2k_indices, counts)
        )

    def scale(problem):
        return sparse_atten_func(*problem.inputs, problem.selection, softmax_scale=0.09)

    def poison(problem):
        out = sparse_atten_func(*problem.inputs, problem.selection)
        out[..., -1, 5] = float("nan")
        return out

    def swap(problem):
        out = sparse_atten_func(*problem.inputs, problem.selection)
        return out.flip(1)

    return {"a block too few": hide, "scale": scale, "NaN": poison, "heads": swap}


@pytest.mark.parametrize("fault", faults())
def test_a_wrong_output_fails(fault):
    problem = make_problem(SMALL)
    verdict = judge(faults()[fault](problem), problem.inputs, problem.selection)
    assert not verdict.right


def test_keys_that_are_padding_count_as_wrong():
    problem = make_problem(Case((2, 2), 1024, 3, sizes="ragged"))
    selection = problem.selection
    seen = BlockSelection(
        selection.q2k_indices, selection.q2k_counts, q_block_sizes=selection.q_block_sizes
    )
    out = sparse_atten_func(*problem.inputs, seen)
    assert not judge(out, problem.inputs, selection, blocks=16).right


def test_every_key_is_dense_attention():
    q, k, v = make_problem(SMALL).inputs
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert judge(out, (q, k, v), every_key(q, layout="bhsd")).right


# Contenders


class Fake:
    """A rival whose answer is that of the reference, spoiled or not."""

    dense = False

    def __init__(self, name, *, absent=None, spoil=0.0, error=None):
        self.name, self.absent, self.spoil, self.error = name, absent, spoil, error

    def missing(self):
        """See `Rival`."""
        return self.absent

    def prepare(self, problem):
        """See `Rival`."""
        if self.error is not None:
            raise self.error
        return lambda q, k, v: sparse_atten_func(q, k, v, problem.selection) + self.spoil


ENTRIES = (
    Fake("right"),
    Fake("absent", absent="right is not installed"),
    Fake("wrong", spoil=0.05),
    Fake("unsupported", error=UnsupportedError("no such shape")),
    Fake("broken", error=RuntimeError("first\nsecond")),
)


def test_every_contender_is_admitted_or_named_with_a_reason():
    problem = make_problem(SMALL)
    contenders, absent = contest.admit(ENTRIES, problem, [problem.inputs], SMALL.tokens)
    assert [entry.rival.name for entry in contenders] == ["right"]
    assert [(row["backend"], row["status"]) for row in absent] == [
        ("absent", "missing"),
        ("wrong", "wrong"),
        ("unsupported", "unsupported"),
        ("broken", "failed"),
    ]
    reasons = [row["reason"] for row in absent]
    assert reasons[0] == "right is not installed"
    assert "over the budget" in reasons[1]
    assert reasons[3] == "RuntimeError: first"


def test_ours_refuses_to_be_the_reference():
    with pytest.raises(UnsupportedError, match="takes the reference"):
        rivals.Ours().prepare(make_problem(SMALL))


def test_rivals_that_are_not_installed_say_so(monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    found = {rival.name: rival.missing() for rival in rivals.RIVALS}
    assert found["fa4-dense"] == found["fa4-sparse"] == "flash-attn-4 is not installed"
    assert found["cudnn-fixed"] == "nvidia-cudnn-frontend is not installed"
    assert found["flex"] == "triton is not installed"
    assert found["sdpa"] is found["sdpa-mask"] is None
    assert rivals.not_installed("no_such_package.module", "such") == "such is not installed"


def test_triton_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr(rivals, "not_installed", lambda module, package: None)
    monkeypatch.setenv("CC", "cc")
    assert rivals.Flex().missing() is None
    monkeypatch.delenv("CC")
    monkeypatch.setattr(rivals.shutil, "which", {"clang": "/clang"}.get)
    assert rivals.Flex().missing() is None
    monkeypatch.setattr(rivals.shutil, "which", lambda name: None)
    assert "no C compiler" in rivals.Flex().missing()


INNER = """An exception occurred in a subprocess:

Traceback (most recent call last):
  File "a.py", line 1, in f
    raise RuntimeError("x")
RuntimeError: Python.h is not there

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("first\nsecond", "first"),
        ("", ""),
        (INNER, "RuntimeError: Python.h is not there"),
        ("backend='inductor' raised:\nRuntimeError: no gcc\n\nSet X", "RuntimeError: no gcc"),
        ("a raised:", "a raised:"),
        ("Traceback (most recent call last):\n  cut", "Traceback (most recent call last):"),
    ],
)
def test_of_an_error_the_line_that_tells_is_kept(text, line):
    assert contest.telling_line(ValueError(text)) == f"ValueError: {line}"
    assert len(contest.telling_line(ValueError(500 * "x"))) == 300


def test_an_unknown_parameter_is_refused_by_name():
    rivals.expect_parameters(judge, ["blocks", "seed"])
    with pytest.raises(UnsupportedError, match=r"judge of this version has no parameter sort, k$"):
        rivals.expect_parameters(judge, {"sort": 1, "seed": 2, "k": 3})


def test_lists_split_by_kind_of_block():
    selection = Case((2, 2), 2048, 5, counts="random").select(generator(), "bhsd")
    partial = torch.rand(16, generator=generator()) < 0.4
    parts = rivals.split_lists(selection.q2k_indices, selection.q2k_counts, partial)
    given = lists_of(selection.q2k_indices, selection.q2k_counts)
    for (ids, counts), wanted in zip(parts, (True, False), strict=True):
        assert ids.dtype == counts.dtype == torch.int32
        assert lists_of(ids, counts) == [[i for i in row if partial[i] == wanted] for row in given]


# What foreign packages are given: stand-ins with their signatures, which read it as documented.

PEER_CASES = (SMALL, RAGGED, EXAMPLE)


class Lists(NamedTuple):
    """Block lists by FA4's names."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


def install(monkeypatch, **modules):
    """Put modules with these contents in place of packages; "a__b" is a.b."""
    for name, contents in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def attend_by_lists(inputs, lists, block, visible):
    """Dense attention in float32 over [B, S, H, D] and Python lists of KV blocks a row."""
    q, k, v = (x.transpose(1, 2).float() for x in inputs)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    blocks = -(-q.shape[2] // block)
    for i, row in enumerate(lists):
        head, start = i // blocks, i % blocks * block
        for j in row:
            seen[0, head, start : start + block, j * block : (j + 1) * block] = True
    logits = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~(seen & visible), -1e30)
    return (logits.softmax(-1) @ v).to(inputs[0].dtype).transpose(1, 2)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", PEER_CASES)
def test_fa4_gets_lists_that_mean_the_selection(monkeypatch, case, layout):
    def flash_attn_func(q, k, v, *, mask_mod=None, aux_tensors=None, block_sparse_tensors=None):
        assert (mask_mod is None) == (aux_tensors is None)
        given = block_sparse_tensors
        assert given.block_size == (128, 128)
        partial = lists_of(given.mask_block_idx, given.mask_block_cnt)
        full = lists_of(given.full_block_idx, given.full_block_cnt)
        valid = torch.ones(k.shape[1], dtype=torch.bool)
        if aux_tensors is not None:
            valid = aux_tensors[0] > 0
            padded = {i for i, keys in enumerate(valid.split(128)) if not keys.all()}
            assert not any(padded & set(row) for row in full)
        lists = [a + b for a, b in zip(partial, full, strict=True)]
        return attend_by_lists((q, k, v), lists, 128, valid), None

    install(
        monkeypatch,
        flash_attn={},
        flash_attn__cute={"flash_attn_func": flash_attn_func},
        flash_attn__cute__block_sparsity={"BlockSparseTensorsTorch": Lists},
    )
    monkeypatch.setattr(rivals, "_fa4_mask", lambda: "valid keys")
    problem = make_problem(case, layout)
    attend = rivals.Fa4Sparse().prepare(problem)
    assert judge(attend(*problem.inputs), problem.inputs, problem.selection).right


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", PEER_CASES)
def test_cudnn_gets_lists_that_mean_the_selection(monkeypatch, case, layout):
    def block_sparse_attention_forward(
        q,
        k,
        v,
        q2k_block_index,
        *,
        block_sparse_num=None,
        block_sizes=None,
        q2k_block_nums=None,
        sparse_block_size=None,
        layout="bhsd",
    ):
        assert sparse_block_size == 128
        assert (block_sparse_num is None) != (q2k_block_nums is None)
        counts = q2k_block_nums
        if counts is None:
            counts = torch.full(q2k_block_index.shape[:3], block_sparse_num)
        inputs = (q, k, v) if layout == "bshd" else [x.transpose(1, 2) for x in (q, k, v)]
        tokens = inputs[1].shape[1]
        place = torch.arange(tokens)
        valid = torch.ones(tokens, dtype=torch.bool)
        if block_sizes is not None:
            valid = place % 128 < block_sizes[place // 128]
        out = attend_by_lists(inputs, lists_of(q2k_block_index, counts), 128, valid)
        return {"o_tensor": out if layout == "bshd" else out.transpose(1, 2)}

    install(monkeypatch, cudnn={"block_sparse_attention_forward": block_sparse_attention_forward})
    problem = make_problem(case, layout)
    attend = rivals.CudnnSparse(per_row=True).prepare(problem)
    assert judge(attend(*problem.inputs), problem.inputs, problem.selection).right
    if case is SMALL:
        attend = rivals.CudnnSparse(per_row=False).prepare(problem)
        assert judge(attend(*problem.inputs), problem.inputs, problem.selection).right
    else:
        with pytest.raises(UnsupportedError, match="one count for all rows"):
            rivals.CudnnSparse(per_row=False).prepare(problem)


@pytest.mark.parametrize("case", PEER_CASES)
def test_flex_gets_a_block_mask_that_means_the_selection(monkeypatch, case):
    given = {}

    def run(q, k, v, *, block_mask, enable_gqa):
        given.update(mask=block_mask, gqa=enable_gqa)
        return q

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: run)
    problem = make_problem(case)
    rivals.Flex().prepare(problem)(*problem.inputs)
    mask = given["mask"]
    kept = torch.zeros(mask.to_dense().shape)
    for i, row in enumerate(lists_of(*masks.explicit_lists(problem.selection, case.tokens))):
        kept[0, i // case.blocks, i % case.blocks, row] = 1
    assert torch.equal(mask.to_dense().float(), kept)
    sizes = masks.block_sizes(problem.selection, case.tokens)
    full = lists_of(mask.full_kv_indices, mask.full_kv_num_blocks)
    assert all(sizes[i] == 128 for row in full for i in row)
    keys = torch.arange(case.tokens)
    assert torch.equal(mask.mask_mod(0, 0, 0, keys), keys % 128 < sizes[keys // 128])
    assert given["gqa"] == (case.heads[0] != case.heads[1])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_torch_attends_to_everything(layout):
    problem = make_problem(SMALL, layout, torch.float32)
    attend = rivals.Sdpa().prepare(problem)
    q = problem.inputs[0]
    assert judge(attend(*problem.inputs), problem.inputs, every_key(q, layout=layout)).right


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", PEER_CASES)
def test_torch_attends_by_a_mask(case, layout):
    problem = make_problem(case, layout, torch.float32)
    attend = rivals.SdpaMasked().prepare(problem)
    assert judge(attend(*problem.inputs), problem.inputs, problem.selection).right


def test_a_mask_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(rivals, "MASK_BYTES", 1 << 20)
    with pytest.raises(UnsupportedError, match=r"a mask of 0\.0 GiB; at most 0"):
        rivals.SdpaMasked().prepare(make_problem(SMALL))


# Time


def test_rounds_take_turns_and_warm_ups_do_not_count():
    order = []
    durations = {"a": iter([99.0, 98.0, 1.0, 2.0, 3.0, 4.0]), "b": iter([99.0, 98.0] + [7.0] * 4)}
    calls = {name: lambda name=name: order.append(name) or name for name in durations}
    times = timing.interleaved(calls, 4, clock=lambda call: next(durations[call()]))
    assert order == list("abbaabbaabba")
    assert times["a"] == pytest.approx([2.5, 1.6, 3.4])
    assert times["b"] == [7.0, 7.0, 7.0]
    assert timing.interleaved({}, 4) == {}


def test_a_device_is_kept_busy_for_a_while():
    calls = []
    timing.occupy(lambda: calls.append(1), 70.0, span=200.0)
    assert len(calls) == 3


class Replay:
    """A graph that is not one."""

    def __init__(self, call, inputs):
        self.call, self.inputs = call, inputs

    def replay(self):
        """Call once for each input."""
        for x in self.inputs:
            self.call(x)


@pytest.fixture
def clock(monkeypatch):
    """Time on the CPU, by a clock that goes 100 microseconds a call of `tick`."""
    now = [0.0]

    def tick():
        now[0] += 100.0

    def elapsed(call):
        before = now[0]
        call()
        return now[0] - before

    def interleaved(calls, samples):
        return timing.interleaved(calls, samples, clock=elapsed)

    monkeypatch.setattr(contest, "try_capture", Replay)
    monkeypatch.setattr(contest, "interleaved", interleaved)
    monkeypatch.setattr(contest, "host_time", lambda call, batch, batches: 12.5)
    monkeypatch.setattr(vsa, "ROTATED_BYTES", 3 << 20)
    monkeypatch.setattr(vsa, "DEVICE", "cpu")
    monkeypatch.setattr(video, "DEVICE", "cpu")
    for module in (contest, video):
        monkeypatch.setattr(module, "occupy", lambda call, microseconds: None)
    return tick


class Ticking(Fake):
    """A rival that takes so many ticks."""

    def __init__(self, name, tick, ticks):
        super().__init__(name)
        self.tick, self.ticks = tick, ticks

    def prepare(self, problem):
        """See `Rival`."""
        attend = super().prepare(problem)

        def call(q, k, v):
            for _ in range(self.ticks):
                self.tick()
            return attend(q, k, v)

        return call


def options(**changes):
    fields = {"seed": 0, "samples": 1, "dtype": "bf16", "layout": "bhsd", "backend": "reference"}
    fields |= {"only": "", "quick": True, "sweep": False, "seconds": 140.0, "rivals": None}
    return SimpleNamespace(**{**fields, **changes})


def test_a_case_becomes_rows(clock, monkeypatch):
    monkeypatch.setattr(vsa, "product_of", lambda device: H200)
    entries = [Ticking("slow", clock, 3), Ticking("ours", clock, 2), ENTRIES[2]]
    found = vsa.measure_case(SMALL, entries, options())
    assert [row["backend"] for row in found] == ["ours", "slow", "wrong"]
    ours, slow, wrong = found
    assert ours["inputs"] > 1
    assert ours["graph_us"] == ours["eager_us"] == [200.0] * 3
    assert (slow["graph_ratio"], slow["eager_ratio"]) == (1.5, 1.5)
    assert ours["flops"] == ours["tile_flops"] == 4 * 128 * 128 * 128 * 4 * 6 * 3
    assert ours["tflops"] == pytest.approx(ours["flops"] / 200e-6 / 1e12)
    assert ours["host_us"] == 12.5
    assert ours["clocks"] is None
    # q and the output have 4 heads, k and v 2; a row of the table holds 3 ids and a count.
    memory = 2 * 768 * 128 * (4 + 4 + 2 + 2) + 4 * (4 * 6) * (3 + 1)
    floor = max(memory / 4.8e12, ours["tile_flops"] / 989e12)
    assert ours["roofline_us"] == pytest.approx(1e6 * floor)
    assert ours["of_roofline"] == pytest.approx(1e6 * floor / 200)
    assert 0 < ours["max_error"] <= ours["error_budget"]
    assert (ours["case"], ours["density"]) == (SMALL.name, 3 / 6)
    assert wrong["status"] == "wrong"
    assert "graph_us" not in wrong


def test_a_sweep_times_graphs_alone_and_stops_when_its_time_is_over(clock, monkeypatch):
    entries = [Ticking("ours", clock, 1), Ticking("fa4-dense", clock, 4)]
    monkeypatch.setattr(vsa, "Ours", lambda backend: entries[0])
    monkeypatch.setattr(vsa, "choose_rivals", lambda names, few: entries[1:])
    monkeypatch.setattr(vsa, "SWEEP", (SMALL, RAGGED))
    now = iter([0.0, 100.0, 150.0])
    monkeypatch.setattr(vsa.time, "monotonic", lambda: next(now))
    found = []
    writer = SimpleNamespace(write=found.append)
    vsa.run(options(sweep=True, quick=False, samples=20), writer)
    assert [(row["case"], row["backend"], row["status"]) for row in found] == [
        (SMALL.name, "ours", "ok"),
        (SMALL.name, "fa4-dense", "ok"),
        (RAGGED.name, "all", "left out"),
    ]
    assert found[0]["samples"] == 5
    assert found[0]["eager_us"] is found[0]["host_us"] is None
    assert found[1]["graph_ratio"] == 4
    assert "eager_ratio" not in found[1]
    assert found[2]["reason"] == "the 140 seconds of --seconds are over"


def test_what_makes_no_graph_is_timed_eagerly_in_a_sweep_too(clock, monkeypatch):
    monkeypatch.setattr(contest, "try_capture", lambda call, inputs: None)
    (row,) = vsa.measure_case(SMALL, [Ticking("ours", clock, 2)], options(sweep=True))
    assert row["graph_us"] is None
    assert row["eager_us"] == [200.0] * 3
    assert row["tflops"] == pytest.approx(row["flops"] / 200e-6 / 1e12)


def test_dense_contenders_leave_padding_out(clock):
    case = Case((2, 2), 1024, 3, sizes="ragged")
    entry = Ticking("dense", clock, 1)
    entry.dense = True
    (row,) = vsa.measure_case(case, [entry], options())
    assert row["valid_tokens"] < 1024
    assert row["flops"] == 4 * 128 * 2 * row["valid_tokens"] ** 2


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.usefixtures("clock")
def test_a_video_becomes_rows(monkeypatch, layout):
    monkeypatch.setattr(
        contest, "interleaved", lambda calls, _: {name: [50.0, 49.0, 51.0] for name in calls}
    )
    case = video.Case((4, 8, 12), 1, 0.5)
    found = video.measure_case(case, options(layout=layout))
    names = [row["backend"] for row in found if row["status"] == "ok"]
    assert names[:3] == [video.WHOLE, video.GATED, "pack + pool"]
    assert {"attention", "unpack + gate", "copy", "sdpa", "sdpa padded"} <= set(names)
    assert {row["case"] for row in found} == {"1x4x8x12-0.5"}
    assert (found[0]["tokens"], found[0]["slots"]) == (4 * 8 * 12, 128 * 4)
    assert found[2]["graph_share"] == 1
    missing = [row["backend"] for row in found if row["status"] == "missing"]
    if rivals.Fa4Dense().missing():
        assert missing == ["fa4-dense", "fa4-dense padded"]


@pytest.mark.usefixtures("clock")
def test_a_video_that_falls_to_the_reference_is_not_measured():
    with pytest.raises(SystemExit, match="backend 'auto' takes the reference"):
        video.measure_case(video.Case((4, 8, 12), 1, 0.5), options(backend="auto"))


# Rows and the command


def test_rows_are_appended_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    for number in (1, 2):
        with rows.RowWriter(path, {"git": "abc", "seed": 0}) as writer:
            writer.write({"case": "a", "seed": number, "graph_us": None})
            assert len(rows.read_rows(path)) == number
    assert rows.read_rows(path) == [
        {"git": "abc", "seed": n, "case": "a", "graph_us": None} for n in (1, 2)
    ]
    assert rows.read_rows(tmp_path / "absent.jsonl") == []


def test_rows_go_to_standard_output_without_a_file(capsys):
    with rows.RowWriter(None, {"git": "abc"}) as writer:
        writer.write({"case": "a"})
    assert json.loads(capsys.readouterr().out) == {"git": "abc", "case": "a"}


def test_clocks_are_read_or_left_out(monkeypatch):
    monkeypatch.setattr(rows, "_ask", lambda fields: ["1980", "1980", "3201", "698.4", "[N/A]"])
    assert rows.clocks() == {
        "sm_mhz": 1980.0,
        "sm_max_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "power_w": 698.4,
    }
    monkeypatch.setattr(rows, "_ask", lambda fields: None)
    assert rows.clocks() is None


def test_the_command_names_its_cases():
    parse = command.make_parser().parse_args
    for case in command.CASES:
        arguments = parse([case, "--quick", "--revision", "abc", "--only", "x"])
        assert (arguments.case, arguments.quick, arguments.revision) == (case, True, "abc")
    with pytest.raises(SystemExit):
        parse(["nothing"])


def test_a_case_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="python -m perf vsa needs a CUDA device"):
        command.main(["vsa", "--quick"])


def test_shapes_are_chosen_by_parts_of_names(capsys):
    assert progress.chosen(masks.CASES, "") == list(masks.CASES)
    names = [case.name for case in progress.shapes(masks.CASES, "8x8192,prefix")]
    assert names == ["8x8192-16of64-random", "24x30976-98of242-prefix50"]
    assert "shapes" in capsys.readouterr().err


def test_rivals_are_chosen_by_name():
    assert [rival.name for rival in vsa.choose_rivals("flex,sdpa", None)] == ["flex", "sdpa"]
    assert len(vsa.choose_rivals(None, None)) == len(rivals.RIVALS)
    few = vsa.choose_rivals(None, vsa.SWEEP_RIVALS)
    assert [rival.name for rival in few] == ["fa4-dense", "fa4-sparse", "cudnn-fixed"]
    with pytest.raises(SystemExit, match=r"no rival fa5; there are fa4-dense, "):
        vsa.choose_rivals("fa5", None)


def test_a_row_names_no_place_of_a_machine():
    given = ["vsa", "--out", "/a/b.jsonl", "--quick", "--out=c"]
    assert command.shown(given) == ["vsa", "--quick"]
