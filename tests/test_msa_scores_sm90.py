"""The Hopper kernel of MSA's index scores: its machine code, and its numbers emulated and on a GPU.

The oracle is the definition in float64. Most inputs are small integers, whose products and sums are
exact in float32, so that scores must be equal bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import emulation
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from machine_code import assert_describes, assert_fits, opcodes

from sparse_atten.cute_kernels import msa_scores_sm90 as kernel
from sparse_atten.cute_kernels.common.memo import Memo
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.msa_scores_arguments import (
    MAX_ROUNDS,
    arguments_of,
    is_aligned,
    most_tokens,
)
from sparse_atten.msa import block_max_scores, index_branch, select_blocks
from sparse_atten.msa.scores import blank_selection, scorer_of

TARGET = Target("sm_90a", 132)
BLOCK, TILE = 128, 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PADDING = -9
UNTOUCHED = -77.5  # no score of the cases is a fraction like this


@dataclass(frozen=True)
class Case:
    """One call.

    `inputs`: "integers"; "growing", where the last key that a query sees has the largest score;
    "normal", which are rounded. `used` shortens the sequences, and is how far pages are filled.
    `window` is first token and number of tokens of a chunk.
    """

    name: str
    q: tuple[int, ...] = (300,)  # lengths
    k: tuple[int, ...] = (300,)
    heads: tuple[int, int] = (2, 1)  # Hidx, Hk
    dim: int = 64
    dtype: str = "bf16"
    causal: bool = True
    padding: int = 0
    layout: str = ""
    used: tuple[int, ...] | None = None
    bad_pages: bool = False
    window: tuple[int, int] | None = None
    inputs: str = "integers"
    strided: bool = False
    spoil: bool = False  # a key in the middle of the last sequence is NaN
    num_sms: int = 3


CASES = [
    Case("a triangle", q=(640,), k=(640,), num_sms=4),
    Case("head dim 128", q=(150,), k=(150,), heads=(1, 1), dim=128),
    Case("fp16, head dim 128", dim=128, dtype="fp16", heads=(1, 1)),
    Case("the last key is the largest", q=(140, 70), k=(140, 200), heads=(1, 1), inputs="growing"),
    Case("dense", q=(130, 5), k=(300, 100), causal=False, inputs="growing"),
    Case("rounded inputs", dim=128, inputs="normal"),
    Case("ragged batch", q=(300, 0, 5, 129, 1), k=(300, 40, 133, 129, 0), padding=3),
    Case("queries before the first key", q=(300, 260), k=(90, 0)),
    Case("one query", q=(1,), k=(1300,), heads=(4, 2), num_sms=5),
    Case("many short sequences", q=(3, 1, 7) * 13, k=(5, 140, 7) * 13, heads=(1, 1)),
    Case("key heads of their own", heads=(4, 2), q=(140,), k=(260,)),
    Case("a chunk", q=(200, 300, 50), k=(210, 320, 50), window=(130, 300)),
    Case("a chunk of one query", q=(200, 300), k=(210, 320), window=(250, 1)),
    Case("pages", q=(150, 20), k=(300, 140), layout="hnd", inputs="growing"),
    Case("pages by token", q=(15, 20), k=(300, 140), heads=(2, 2), layout="nhd"),
    Case("pages outside the pool", q=(40,), k=(500,), layout="hnd", bad_pages=True),
    Case("shortened", q=(150, 20), k=(300, 140), used=(200, 0), inputs="growing"),
    Case("shortened beyond", q=(150,), k=(300,), used=(10**6,)),
    Case("NaN", q=(20, 200), k=(20, 300), spoil=True),
    Case("strided", q=(60,), k=(200,), heads=(4, 2), strided=True),
    Case("fewer rounds than CTAs", q=(5,), k=(5,), heads=(1, 1), num_sms=9),
]
BY_NAME = {case.name: case for case in CASES}
QUICK = ("head dim 128", "the last key is the largest", "ragged batch", "pages by token", "a chunk")


class Call(NamedTuple):
    """Inputs of a case; `k` is flat, `keys` what the call is given."""

    q: torch.Tensor
    k: torch.Tensor
    keys: torch.Tensor
    fields: dict[str, Any]
    lengths: list[int]  # of the keys, as the call is to see them
    missing: list[list[int]]  # blocks without keys, for each sequence
    scale: float


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def make_call(case: Case) -> Call:
    draw = torch.Generator().manual_seed(7)
    shapes = (
        (sum(case.q) + case.padding, case.heads[0], case.dim),
        (max(sum(case.k), 1), case.heads[1], case.dim),
    )
    if case.inputs == "normal":
        q, k = (torch.randn(shape, generator=draw) for shape in shapes)
    else:
        q, k = (torch.randint(-3, 4, shape, generator=draw).float() for shape in shapes)
    if case.inputs == "growing":  # 16 a key, which the other dims cannot make up for
        q, k = q.clamp(0, 1), k.clamp(-0.0, 0.0)
        q[..., :2] = 16.0
        position = torch.cat([torch.arange(n) for n in case.k]).view(-1, 1)
        k[..., 0], k[..., 1] = position % 64, position // 64 * 64
    q, k = (x.to(DTYPES[case.dtype]) for x in (q, k))
    if case.spoil:
        k[sum(case.k[:-1]) + case.k[-1] // 2] = math.nan
    if case.strided:
        q, k = (torch.cat((x, x.new_zeros(8, *x.shape[1:])))[:-8] for x in (q, k))
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
        wide = k.new_full((k.shape[0], 3, *k.shape[1:]), math.nan)
        wide[:, 1] = k
        k = wide[:, 1]
    fields: dict[str, Any] = {
        "cu_seqlens_q": offsets(case.q),
        "cu_seqlens_k": offsets(case.k),
        "max_seqlen_q": max(case.q),
        "max_seqlen_k": max(case.k),
    }
    lengths = [min(n, m) for n, m in zip(case.k, case.used or case.k, strict=True)]
    if case.used is not None:
        fields["seqused_k"] = int32(case.used)
    keys, missing = k, [[] for _ in case.k]
    if case.layout:
        keys, missing = into_pages(case, k, fields)
    return Call(q, k, keys, fields, lengths, missing, 1 / math.sqrt(case.dim))


def into_pages(case: Case, k: torch.Tensor, fields: dict) -> tuple[torch.Tensor, list]:
    """Move keys to shuffled pages; what no sequence has is NaN."""
    blocks = [-(-n // BLOCK) for n in case.k]
    order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(3)).tolist()
    pool = k.new_full((len(order), BLOCK, *k.shape[1:]), math.nan)
    table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32)
    missing: list[list[int]] = [[] for _ in blocks]
    ends = offsets(case.k).tolist()
    for b, count in enumerate(blocks):
        for j in range(count):
            if case.bad_pages and j % 2:
                table[b, j] = (-5, pool.shape[0])[j % 4 // 2]
                missing[b].append(j)
                continue
            page = table[b, j] = order.pop()
            rows = k[ends[b] + j * BLOCK : min(ends[b] + (j + 1) * BLOCK, ends[b + 1])]
            pool[page, : rows.shape[0]] = rows
    del fields["cu_seqlens_k"]
    fields |= {"page_table": table, "seqused_k": int32(case.k), "kv_layout": case.layout}
    if case.layout == "hnd":
        pool = pool.transpose(1, 2).contiguous()
    return pool, missing


def definition(case: Case, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [Hidx, n, Tq] in float64, and where a token sees a key of a block."""
    num_blocks = -(-call.fields["max_seqlen_k"] // BLOCK)
    shape = call.q.shape[1], num_blocks, call.q.shape[0]
    scores = torch.full(shape, -math.inf, dtype=torch.float64)
    seen = torch.zeros(shape, dtype=torch.bool)
    bounds = zip(pairwise(offsets(case.q).tolist()), offsets(case.k).tolist(), strict=False)
    for b, ((start, stop), k_start) in enumerate(bounds):
        num_k = call.lengths[b]
        k = call.k[k_start : k_start + num_k].double()
        k = k.repeat_interleave(case.heads[0] // case.heads[1], 1)
        products = torch.einsum("thd,jhd->hjt", call.q[start:stop].double(), k) * call.scale
        key, position = torch.arange(num_k), torch.arange(stop - start) + num_k - (stop - start)
        visible = (key[:, None] <= position) | torch.tensor(not case.causal)
        for j in range(-(-num_k // BLOCK)):
            if j in call.missing[b]:
                continue
            part = slice(j * BLOCK, (j + 1) * BLOCK)
            hidden = ~visible[part]
            scores[:, j, start:stop] = products[:, part].masked_fill(hidden, -math.inf).amax(1)
            seen[:, j, start:stop] = visible[part].any(0)
    return scores, seen


def bounds_of(case: Case, call: Call) -> torch.Tensor:
    """Return blocks up to the last one that a token sees, and the block of its position.

    Padding is `PADDING`.
    """
    num_blocks = -(-call.fields["max_seqlen_k"] // BLOCK)
    bounds = torch.full((2, call.q.shape[0]), PADDING, dtype=torch.int32)
    for (start, stop), num_k in zip(pairwise(offsets(case.q).tolist()), call.lengths, strict=True):
        for token in range(start, stop):
            position = num_k - (stop - token)
            seen = max(0, min(position + 1, num_k)) if case.causal else num_k
            bounds[:, token] = int32([min(-(-seen // BLOCK), num_blocks), position // BLOCK])
    return bounds


def count_rounds(case: Case, call: Call, window: tuple[int, int]) -> int:
    """Count query tiles times blocks that some query of the tile may see."""
    rounds, first = 0, window[0]
    num_blocks = -(-call.fields["max_seqlen_k"] // BLOCK)
    for (start, stop), num_k in zip(pairwise(offsets(case.q).tolist()), call.lengths, strict=True):
        begin, end = max(start, first), min(stop, first + window[1])
        for tile in range(begin, end, TILE):
            last = min(tile + TILE, end) - 1 - start + num_k - (stop - start)
            keys = min(last + 1, num_k) if case.causal else num_k
            rounds += min(max(-(-keys // BLOCK), 0), num_blocks)
    return rounds * case.heads[0]


def window_of(case: Case, call: Call) -> tuple[int, int]:
    return case.window or (0, call.q.shape[0])


def config_for(case: Case) -> kernel.Config:
    return kernel.Config(dtype=case.dtype, head_dim=case.dim)


def compiled(config: kernel.Config) -> Any:
    return kernel.compile_offline(config, TARGET)


def plan_of(
    case: Case, call: Call, scores: torch.Tensor, bounds: torch.Tensor | None = None
) -> Any:
    selection = blank_selection(call.q, call.q.shape[1], call.q.shape[0], call.fields)
    arguments = arguments_of(
        call.q,
        call.keys,
        scores,
        selection,
        causal=case.causal,
        scale=call.scale,
        first_token=window_of(case, call)[0],
        bounds=bounds,
    )
    return kernel.launch_plan(config_for(case), Target("sm_90a", case.num_sms), arguments)


def check(case: Case, schedules: list) -> None:
    """Compare every schedule with the definition, and among themselves."""
    call = make_call(case)
    first, count = window_of(case, call)
    exact, seen = (x[..., first : first + count] for x in definition(case, call))
    patterns = set()
    for schedule in schedules:
        memory = torch.full((*exact.shape[:2], count + 5), UNTOUCHED)
        scores = memory[..., 2:-3]
        bounds = torch.full((2, count), PADDING, dtype=torch.int32)
        stats = emulation.run(
            compiled(config_for(case)).ptx, plan_of(case, call, scores, bounds), **schedule
        )
        assert stats["warnings"] == []
        mmas = 4 * case.dim // 16 * count_rounds(case, call, (first, count))
        assert stats["mma"] == mmas, "an MMA was issued for nothing, or left out"
        assert_agree(scores, exact, seen, exactly=case.inputs != "normal")
        assert torch.equal(bounds, bounds_of(case, call)[:, first : first + count])
        unseen = scores[~seen]
        assert bool(((unseen == UNTOUCHED) | (unseen == -math.inf)).all())
        assert bool((memory[..., :2] == UNTOUCHED).all())
        assert bool((memory[..., -3:] == UNTOUCHED).all())
        patterns.add(memory.numpy().tobytes())
    assert len(patterns) == 1, "the scores depend on the schedule"


def assert_agree(
    scores: torch.Tensor, exact: torch.Tensor, seen: torch.Tensor, *, exactly: bool
) -> None:
    found, wanted = scores[seen].double(), exact[seen]
    if exactly:  # but for the rounding of scale and of its product
        torch.testing.assert_close(found, wanted, atol=0.0, rtol=2.0**-22, equal_nan=True)
    else:
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=[pytest.mark.slow] * (config != kernel.Config()))
        for config in kernel.SHIPPED
    ],
    ids=str,
)
def test_compiled_kernel_fits(config: kernel.Config):
    assert_fits(str(config), compiled(config), kernel.SCHEDULE)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sass_overlaps_its_mmas(head_dim: int, tmp_path: Path):
    """No spills; and where ptxas serialises wgmma, every one would have a wait of its own."""
    found = opcodes(compiled(kernel.Config(head_dim=head_dim)).cubin, tmp_path)
    mmas = sum(opcode.startswith("HGMMA") for opcode in found)
    assert mmas % (2 * head_dim // 16) == 0
    groups = mmas // (head_dim // 16)
    assert sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in found) == groups
    assert not {"STL", "LDL"} & {opcode.split(".")[0] for opcode in found}


def test_sass_takes_maxima_while_mmas_run(tmp_path: Path):
    """In the loop the maxima of each half stand between an MMA and the wait for it."""
    found = opcodes(compiled(kernel.Config()).cubin, tmp_path)
    kinds = {"HGMMA": "M", "WARPGROUP.DEPBAR": "W", "FMNMX": "x"}
    flow = "".join(k for o in found for name, k in kinds.items() if o.startswith(name))
    runs = [run.count("x") for run in flow.split("M") if "W" not in run]
    assert max(runs) >= 60, "maxima under the MMAs of the first half"
    after_first_wait = [
        part.split("W")[1].count("x") for part in flow.split("M") if part.count("W") == 2
    ]
    assert max(after_first_wait) >= 60, "maxima under the MMAs of the second half"


def test_plan_has_the_parameters_and_boxes_of_the_kernel():
    case = BY_NAME["head dim 128"]
    call = make_call(case)
    plan = plan_of(case, call, torch.empty(1, 2, 150))
    assert_describes(plan, compiled(config_for(case)))
    assert plan.grid == (2, 1, 1)


def test_tables_fit_the_target():
    kernel.SCHEDULE.check(TARGET)
    assert "k_empty      x5    8 arrivals  consumer0 + consumer1 -> load" in (
        kernel.SCHEDULE.tables()
    )


@pytest.mark.parametrize("field", [{"dtype": "fp8"}, {"head_dim": 96}])
def test_config_refuses(field: dict):
    with pytest.raises(ValueError, match=next(iter(field))):
        kernel.Config(**field).check()


def test_rounds_have_32_bits():
    case = BY_NAME["head dim 128"]
    call = make_call(case)
    scores = torch.empty(1, 2, 150)
    selection = blank_selection(call.q, 1, 150, call.fields)
    arguments = arguments_of(call.q, call.keys, scores, selection, causal=True, scale=1.0)
    blocks = 1 << 23
    most = most_tokens(arguments.batch, 1, blocks)
    assert most == (MAX_ROUNDS // blocks - 1) * TILE
    fits = replace(arguments, num_blocks=blocks, num_tokens=most)
    assert kernel.launch_plan(kernel.Config(), TARGET, fits).grid == (132, 1, 1)
    with pytest.raises(NotImplementedError, match=f"at most {MAX_ROUNDS}, got "):
        kernel.launch_plan(kernel.Config(), TARGET, replace(fits, num_tokens=most + 2 * TILE))


def test_alignment():
    x = torch.empty(10, 4, 64, dtype=torch.bfloat16)
    assert is_aligned(x)
    assert is_aligned(x[:, ::2])
    assert is_aligned(x[:1, :1])
    assert not is_aligned(x.flatten()[1:2049].view(8, 4, 64))
    assert not is_aligned(x.transpose(1, 2))
    assert not is_aligned(torch.empty(10, 4, 68, dtype=torch.bfloat16)[..., :64])


@pytest.mark.parametrize("name", QUICK)
def test_numbers(name: str):
    check(BY_NAME[name], emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_of_all_cases(case: Case):
    check(case, emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_numbers_in_every_schedule(name: str):
    check(BY_NAME[name], emulation.schedules())


@pytest.mark.parametrize("values", [(0, 500, 20, 10**9), (-7, -(2**31), 2**31 - 1, 3)])
def test_offsets_of_any_value_are_safe(values: tuple[int, ...]):
    """The emulator faults an access outside a tensor."""
    case = Case("any", q=(10, 20, 30), k=(40, 50, 60), heads=(1, 1))
    call = make_call(case)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        call.fields[name].copy_(int32(values))
    scores, bounds = torch.empty(1, 1, 60), torch.empty(2, 60, dtype=torch.int32)
    plan = plan_of(case, call, scores, bounds)
    assert emulation.run(compiled(config_for(case)).ptx, plan)["warnings"] == []


class Fake:
    """Stands in for the kernel: NaN stands where that writes nothing."""

    def __init__(self, scores: torch.Tensor, bounds: torch.Tensor) -> None:
        self.scores = scores.masked_fill(scores == -math.inf, math.nan)
        self.bounds = bounds
        self.chunks: list[tuple[int, int]] = []

    def __call__(
        self, _: Any, scores: torch.Tensor, first_token: int, bounds: torch.Tensor
    ) -> None:
        """Write the scores and the bounds of a chunk."""
        chunk = slice(first_token, first_token + scores.shape[2])
        scores.copy_(self.scores[..., chunk])
        written = self.bounds[:, chunk]
        bounds.copy_(torch.where(written == PADDING, bounds, written))
        self.chunks.append((first_token, scores.shape[2]))


@pytest.mark.parametrize("budget", [1, 10_000, 1_000_000, None])
def test_chunks_of_queries_follow_the_workspace(monkeypatch, budget: int | None):
    case = BY_NAME["ragged batch"]
    call = make_call(case)
    wanted = index_branch(call.q, call.k, topk=2, **call.fields)
    fake = Fake(block_max_scores(call.q, call.k, **call.fields), bounds_of(case, call))
    monkeypatch.setattr("sparse_atten.msa.select.can_score", lambda _: True)
    monkeypatch.setattr("sparse_atten.msa.select.score_tokens", fake)
    found = index_branch(call.q, call.k, topk=2, max_workspace_bytes=budget, **call.fields)
    assert torch.equal(found.q2k_indices, wanted.q2k_indices)
    num_queries = call.q.shape[0]
    step = {1: 1, 10_000: 10_000 // (4 * 2 * (3 + 2 + 2) + 16)}.get(budget or 0, num_queries)
    assert fake.chunks == [
        (start, min(step, num_queries - start)) for start in range(0, num_queries, step)
    ]


# ---- on a GPU ----------------------------------------------------------------------------------


def on_gpu(call: Call) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Copy inputs, with the strides as they are."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return there.copy_(x)

    fields = {name: copy(value) for name, value in call.fields.items()}
    return copy(call.q), copy(call.keys), fields


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_on_a_gpu(monkeypatch, case: Case):
    call = make_call(case)
    exact, seen = definition(case, call)
    q, k, fields = on_gpu(call)
    launched = []
    original = kernel.launch_plan
    monkeypatch.setattr(kernel, "launch_plan", lambda *x: launched.append(x) or original(*x))
    monkeypatch.setattr("sparse_atten.msa.index_device._launches", Memo())
    first = None
    for _ in range(3):
        scores = block_max_scores(q, k, causal=case.causal, **fields)
        assert_agree(scores.cpu(), exact, seen, exactly=case.inputs != "normal")
        assert bool((scores.cpu()[~seen] == -math.inf).all())
        bits = scores.view(torch.int32)
        first = bits if first is None else first
        assert torch.equal(bits, first)
    assert len(launched) == 1
    choice = {"topk": 2, "causal": case.causal, **fields}
    wanted = select_blocks(scores, **choice).q2k_indices
    for budget in (None, 4000):
        found = index_branch(q, k, max_workspace_bytes=budget, **choice).q2k_indices
        assert torch.equal(found, wanted)


def random_index(tokens: int, *, heads: int = 4, dim: int = 128, seed: int = 0) -> tuple:
    """Return q_idx, k_idx and the fields of one long sequence on the GPU."""
    make = torch.Generator(device="cuda").manual_seed(seed)
    q, k = (
        torch.randn(tokens, n, dim, device="cuda", generator=make).bfloat16() for n in (heads, 1)
    )
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    fields = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return q, k, fields | {"max_seqlen_q": tokens, "max_seqlen_k": tokens}


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("dim", [64, 128])
def test_the_torch_path_agrees_on_a_gpu(monkeypatch, dim: int):
    q, k, fields = random_index(4000, dim=dim)
    scores = block_max_scores(q, k, **fields)
    ids = index_branch(q, k, **fields).q2k_indices
    assert torch.equal(ids, select_blocks(scores, **fields).q2k_indices)
    monkeypatch.setattr("sparse_atten.msa.scores.can_score", lambda _: False)
    theirs = block_max_scores(q, k, **fields)
    torch.testing.assert_close(scores, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(scores == -math.inf, theirs == -math.inf)


@pytest.mark.gpu(9, 0)
def test_a_graph_replays_with_other_inputs():
    q, k, fields = random_index(3000)
    options = {"topk": 8, "num_sink_blocks": 1, "max_workspace_bytes": 1 << 20}
    index_branch(q, k, **options, **fields)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = index_branch(q, k, **options, **fields).q2k_indices
    for seed in range(1, 4):
        other_q, other_k, _ = random_index(3000, seed=seed)
        length = torch.tensor([0, 3000 - 700 * seed], dtype=torch.int32, device="cuda")
        q.copy_(other_q)
        k.copy_(other_k)
        fields["cu_seqlens_q"].copy_(length)
        graph.replay()
        eager = index_branch(q, k, **fields, topk=8, num_sink_blocks=1).q2k_indices
        assert torch.equal(captured, eager)


@pytest.mark.gpu(9, 0)
def test_memory_is_bounded_on_a_gpu():
    q, k, fields = random_index(65536)
    bound = 32 << 20  # all scores take 512 MiB
    whole = index_branch(q, k, **fields).q2k_indices
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids = index_branch(q, k, max_workspace_bytes=bound, **fields).q2k_indices
    used = torch.cuda.max_memory_allocated() - before - ids.numel() * 4
    assert used <= bound
    assert torch.equal(ids, whole)


@pytest.mark.gpu(9, 0)
def test_streams_do_not_disturb_each_other():
    calls = [random_index(2000, seed=seed) for seed in range(3)]
    expected = [block_max_scores(q, k, **fields) for q, k, fields in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, (q, k, fields) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(block_max_scores(q, k, **fields))
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_no_kernel_without_a_gpu():
    """What the kernel cannot serve, a CPU here, takes the torch path."""
    from sparse_atten.msa.index_device import can_score

    call = make_call(BY_NAME["head dim 128"])
    options = {"causal": True, "scale": None, "max_workspace_bytes": None}
    assert not can_score(scorer_of(call.q, call.k, call.fields, **options))
