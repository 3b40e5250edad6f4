"""The Blackwell VSA kernel: what the compiler made of it, and its numbers on an emulator.

Nothing here has run on a GPU. The oracle is the definition in float64, one Q block at a time over
the keys that it sees.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch
from machine_code import assert_describes, assert_fits, opcodes

from sparse_atten.contracts import BlockSelection

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from sparse_atten.cute_kernels import vsa_sm90, vsa_sm100
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.vsa_arguments import arguments_of

BLOCK, HEAD_DIM = 128, 128
TARGET = Target("sm_100a")
MMAS = {vsa_sm100: 16, vsa_sm90: 32}  # of a tile; on Hopper each takes 64 rows
FULL = vsa_sm100.Config(return_lse=True, kv_sizes=True, q_sizes=True)
CONFIGS = {
    "plain": vsa_sm100.Config(),
    "full": FULL,
    "fp16": vsa_sm100.Config(dtype="fp16", return_lse=True, kv_sizes=True, q_sizes=True),
    "static": vsa_sm100.Config(return_lse=True, kv_sizes=True, q_sizes=True, persistent="static"),
    "no cubic": vsa_sm100.Config(return_lse=True, cubic_pairs=0),
    "rescale always": vsa_sm100.Config(return_lse=True, rescale_threshold=0.0),
    "verified": vsa_sm100.Config(
        return_lse=True, kv_sizes=True, q_sizes=True, persistent="static", always_rescale=True
    ),
}


@dataclass(frozen=True)
class Case:
    """One call. `counts` repeats over the rows of [B, Hq, Nq]; sizes default to full blocks."""

    name: str
    queries: int = 256
    keys: int = 512
    batch: int = 1
    heads: tuple[int, int] = (2, 2)  # Hq, Hkv
    counts: tuple[int, ...] | None = None
    ids: tuple[tuple[int, ...], ...] | None = None  # rows of the table, repeated; None: random
    width: int | None = None  # K
    kv_sizes: Any = None
    q_sizes: tuple[int, ...] | None = None
    layout: str = "bhsd"
    dense_rows: int = 0
    scale: float = 1.0  # of the inputs
    softmax_scale: float | None = None
    spoil: bool = False  # unseen keys and padding queries are NaN
    huge_key: bool = False
    ramp: float = 0.0  # added to the scores with the key's position, so that maxima keep growing
    config: str = "full"
    residents: tuple[int, ...] = (4,)
    num_sms: int = 3  # of a static grid: several items for each CTA


def prefix_layout() -> dict[str, Any]:
    """Four prefix tiles that see all, two reference groups, a target: 17 tiles, ragged sizes."""
    groups = [range(4), range(4, 8), range(8, 12), range(12, 17)]
    rows = [tuple(range(17))] * 4
    for group in groups[1:]:
        rows += [(*groups[0], *sorted({*list(group)[:2], tile, 16})) for tile in group]
    return {
        "queries": 17 * 128,
        "keys": 17 * 128,
        "heads": (1, 1),
        "ids": tuple(row + (-1,) * (17 - len(row)) for row in rows),
        "counts": tuple(len(row) for row in rows),
        "dense_rows": 4,
        "kv_sizes": tuple(128 if tile % 3 else 96 for tile in range(17)),
        "q_sizes": tuple(128 if tile % 3 else 96 for tile in range(17)),
        "spoil": True,
    }


CASES = [
    Case("full blocks", config="plain"),
    Case("every ring wraps", keys=9 * 128, counts=(9, 7)),
    Case(
        "ragged sizes",
        queries=768,
        keys=768,
        counts=(6, 6, 6, 1, 6, 2),
        kv_sizes=(128, 100, 128, 0, 1, 37),
        spoil=True,
        residents=(1, 4),
    ),
    Case("counts 0 to all", queries=768, keys=768, counts=(4, 1, 3, 0, 2, 5)),
    Case(
        "first block has no key",
        ids=((0, 1, 2, 3),),
        kv_sizes=(0, 128, 5, 128),
        spoil=True,
    ),
    Case("all rows empty", counts=(0,)),
    Case("all sizes 0", kv_sizes=(0, 0, 0, 0), spoil=True),
    Case("alternating empty", queries=1024, counts=(0, 4, 3, 0), residents=(1, 2)),
    Case("odd Nq", queries=640, counts=(4, 2, 1, 3, 4)),
    Case("one row", queries=128, counts=(3,)),
    Case("one query, one key", queries=1, keys=1, counts=(1,)),
    Case("ragged ends", queries=300, keys=417, counts=(4, 2, 3), spoil=True),
    Case("block boundary + 1", queries=257, keys=129, counts=(2, 1), spoil=True),
    Case("GQA 4", queries=384, heads=(8, 2), counts=(2, 1, 3, 0, 4), residents=(1, 4)),
    Case("GQA 8", queries=128, heads=(8, 1), counts=(2, 1, 3, 0, 4)),
    Case(
        "batch 2, own sizes",
        queries=384,
        batch=2,
        heads=(3, 3),
        counts=(4, 3, 2),
        kv_sizes=((128, 3, 128, 77), (5, 128, 0, 128)),
        spoil=True,
        residents=(1, 4),
    ),
    Case(
        "bshd",
        queries=200,
        keys=333,
        batch=2,
        heads=(3, 3),
        counts=(3, 1, 2),
        layout="bshd",
        spoil=True,
    ),
    Case(
        "padding queries",
        queries=512,
        counts=(3, 2, 4),
        q_sizes=(128, 0, 37, 1),
        kv_sizes=(128, 128, 9, 128),
        spoil=True,
    ),
    Case("dense rows", queries=512, keys=640, width=2, dense_rows=3, counts=(0, 1, 2)),
    Case("ids out of range", ids=((-1, 0, 4, 2**31 - 1), (3, -(2**31), 2, 1))),
    Case("counts out of range", counts=(-3, 100)),
    Case("sizes out of range", kv_sizes=(500, -7, 128, 64), spoil=True),
    Case("repeated ids", ids=((1, 1, 2, 1), (0, 3, 3, 0))),
    Case("scale 16", scale=16.0),
    Case("scale 100", scale=100.0, kv_sizes=(128, 100, 3, 128)),
    Case("one huge key", huge_key=True),
    Case("growing maxima", keys=1024, ramp=6.0, residents=(1, 4)),
    Case(
        "growing maxima, many items",
        queries=12 * 128,
        keys=640,
        heads=(1, 1),
        counts=(5, 1, 1, 4, 0, 3, 2, 0, 0, 0, 1, 5),
        ramp=3.0,
        residents=(1,),
    ),
    Case("rescaled in every round", keys=640, ramp=2.0, config="rescale always"),
    Case(
        "every path of the verified variant",
        queries=9 * 128 - 28,
        keys=400,
        heads=(1, 1),
        ids=(
            *((0, 1, 2, 3, 0), (1,) * 5, (0,) * 5, (2, 1, 0, 0, 0), (0, -1, 1, 3, 0)),
            *((1,) * 5, (3,) * 5, (0,) * 5, (1,) * 5),
        ),
        counts=(5, 1, 0, 2, 4, 1, 1, 1, 1),
        kv_sizes=(128, 97, 0, 128),
        q_sizes=(128, 128, 128, 128, 64, 128, 128, 128, 128),
        ramp=3.0,
        spoil=True,
        config="verified",
        residents=(1,),
        num_sms=1,
    ),
    Case("own softmax scale", softmax_scale=0.5),
    Case("ids in windows", keys=40 * 128, heads=(1, 1), counts=(40, 35)),
    Case("fp16", config="fp16", kv_sizes=(128, 3, 0, 100), spoil=True),
    Case("fp16 growing", keys=1024, ramp=6.0, config="fp16"),
    Case("no cubic", config="no cubic"),
    Case(
        "many items, CLC",
        queries=7 * 128,
        heads=(4, 4),
        counts=(4, 1, 0, 2, 3),
        residents=(1, 2, 3),
    ),
    Case(
        "many items, static grid",
        queries=7 * 128,
        heads=(4, 4),
        counts=(4, 1, 0, 2, 3),
        config="static",
        residents=(4,),
    ),
    Case("prefix, references, target", **prefix_layout()),
]
QUICK = {
    "ragged sizes",
    "odd Nq",
    "padding queries",
    "alternating empty",
    "many items, static grid",
}


@dataclass(frozen=True)
class Call:
    """A case with its tensors; q, k, v and out are [B, H, S, D] views."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    selection: BlockSelection
    softmax_scale: float
    visible: list[list[int]] = field(default_factory=list)


def make_call(case: Case) -> Call:
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float16 if CONFIGS[case.config].dtype == "fp16" else torch.bfloat16

    def operand(heads: int, tokens: int) -> torch.Tensor:
        shape = (case.batch, heads, tokens, HEAD_DIM)
        if case.layout == "bshd":
            shape = (case.batch, tokens, heads, HEAD_DIM)
        tensor = (torch.randn(shape, generator=generator) * case.scale).to(dtype)
        return tensor.transpose(1, 2) if case.layout == "bshd" else tensor

    num_q, num_kv = -(-case.queries // BLOCK), -(-case.keys // BLOCK)
    rows = (case.batch, case.heads[0], num_q)
    q = operand(case.heads[0], case.queries)
    k, v = operand(case.heads[1], case.keys), operand(case.heads[1], case.keys)
    if case.huge_key:
        k[:, :, 17] *= 40.0
    if case.ramp:
        q[..., 0] = 1.0
        position = torch.arange(case.keys) // BLOCK
        k[..., 0] = (case.ramp * math.sqrt(HEAD_DIM) * position).to(dtype)
    if case.ids:
        table = list(itertools.islice(itertools.cycle(case.ids), math.prod(rows)))
    else:
        width = case.width or num_kv
        table = [
            torch.randperm(num_kv, generator=generator)[:width].tolist()
            for _ in range(math.prod(rows))
        ]
    # The table is a slice of a wider one and transposed in memory: no stride is the natural one.
    indices = torch.tensor(table, dtype=torch.int32).reshape(*rows, -1)
    spread = torch.full((*indices.shape[::-1], 3), -77, dtype=torch.int32)
    spread[..., 1] = indices.permute(3, 2, 1, 0)
    counts = itertools.islice(itertools.cycle(case.counts or (indices.shape[-1],)), math.prod(rows))
    kv_sizes = torch.full((num_kv,), BLOCK) if case.kv_sizes is None else case.kv_sizes
    q_sizes = torch.full((num_q,), BLOCK) if case.q_sizes is None else case.q_sizes
    selection = BlockSelection(
        spread[..., 1].permute(3, 2, 1, 0),
        torch.tensor(list(counts), dtype=torch.int32).reshape(rows),
        layout="bhsd",
        kv_block_sizes=torch.as_tensor(kv_sizes, dtype=torch.int32),
        q_block_sizes=torch.as_tensor(q_sizes, dtype=torch.int32),
        dense_rows=case.dense_rows,
    )
    call = Call(case, q, k, v, selection, case.softmax_scale or 1 / math.sqrt(HEAD_DIM))
    if case.spoil:
        spoil(call)
    return call


def keys_of_block(call: Call, batch: int, block: int) -> list[int]:
    """Positions of the valid keys of a KV block; none for an id outside the tensor."""
    num_kv = -(-call.case.keys // BLOCK)
    if not 0 <= block < num_kv:
        return []
    sizes = call.selection.kv_block_sizes
    size = int(sizes[block] if sizes.dim() == 1 else sizes[batch, block])
    first = block * BLOCK
    return list(range(first, min(first + max(min(size, BLOCK), 0), call.case.keys)))


def spoil(call: Call) -> None:
    """Fill every key that no row may see, and every padding query, with NaN."""
    for batch in range(call.case.batch):
        for block in range(-(-call.case.keys // BLOCK)):
            seen = len(keys_of_block(call, batch, block))
            first = block * BLOCK
            for tensor in (call.k, call.v):
                tensor[batch, :, first + seen : first + BLOCK] = math.nan
    for block, size in enumerate(call.selection.q_block_sizes.tolist()):
        call.q[:, :, block * BLOCK + size : (block + 1) * BLOCK] = math.nan


def visible_rows(call: Call):
    """Yield (batch, head, rows, key positions) for each Q block that sees a key."""
    case, selection = call.case, call.selection
    num_kv = -(-case.keys // BLOCK)
    for batch, head, block in itertools.product(*map(range, selection.q2k_counts.shape)):
        if block < case.dense_rows:
            ids = list(range(num_kv))
        else:
            count = int(selection.q2k_counts[batch, head, block])
            ids = selection.q2k_indices[batch, head, block].tolist()[: max(count, 0)]
        keys = [key for i in ids for key in keys_of_block(call, batch, i)]
        size = int(selection.q_block_sizes[block])
        rows = slice(block * BLOCK, min(block * BLOCK + size, case.queries))
        if keys and rows.start < rows.stop:
            yield batch, head, rows, keys


def oracle(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 by its definition: out, and natural-log LSE."""
    out = torch.zeros(call.q.shape, dtype=torch.float64)
    lse = torch.full(call.q.shape[:3], -math.inf, dtype=torch.float64)
    group = call.case.heads[0] // call.case.heads[1]
    for batch, head, rows, keys in visible_rows(call):
        k, v = (t[batch, head // group, keys].double() for t in (call.k, call.v))
        scores = call.q[batch, head, rows].double() @ k.T * call.softmax_scale
        out[batch, head, rows] = scores.softmax(-1) @ v
        lse[batch, head, rows] = scores.logsumexp(-1)
    return out, lse


def budget(call: Call, exact: torch.Tensor) -> float:
    """Twice the error of a plain run in the kernel's precision, and a little."""
    group, dtype = call.case.heads[0] // call.case.heads[1], call.q.dtype
    error, largest = 0.0, 0.0
    for batch, head, rows, keys in visible_rows(call):
        k, v = (t[batch, head // group, keys].float() for t in (call.k, call.v))
        scores = call.q[batch, head, rows].float() @ k.T * call.softmax_scale
        out = (scores.softmax(-1).to(dtype).float() @ v).to(dtype).double()
        error = max(error, float((out - exact[batch, head, rows]).abs().max()))
        largest = max(largest, float(scores.abs().max()) * float(v.abs().max()))
    return 2 * error + 1e-5 + 1e-6 * largest


def compiled(name: str):
    return vsa_sm100.compile_offline(CONFIGS[name], TARGET)


@cache
def prepared(case: Case) -> tuple[Call, torch.Tensor, torch.Tensor, float, int]:
    """Return a case's call, its oracle, the budget of its error, and how many tiles it computes."""
    call = make_call(case)
    exact, exact_lse = oracle(call)
    tiles = sum(
        bool(keys_of_block(call, batch, block))
        for batch, head, row in itertools.product(*map(range, call.selection.q2k_counts.shape))
        if int(call.selection.q_block_sizes[row]) > 0
        for block in row_ids(call, batch, head, row)
    )
    return call, exact, exact_lse, budget(call, exact), tiles


def check(case: Case, schedules: list[dict[str, int]], ptx: str | None = None) -> None:
    """Run a case in every schedule and residency, on the text of its Config or on another."""
    config, target = CONFIGS[case.config], Target("sm_100a", case.num_sms)
    run_case(case, schedules, ptx or compiled(case.config).ptx, (vsa_sm100, config, target))


def run_case(case: Case, schedules: list[dict[str, int]], ptx: str, kernel: tuple) -> None:
    """Compare every schedule and residency with the oracle and among themselves.

    `kernel` is a module, a Config, and the target of the launch.
    """
    module, config, target = kernel
    call, exact, exact_lse, allowed, tiles = prepared(case)
    patterns = set()
    for resident, schedule in itertools.product(case.residents, schedules):
        out = torch.full_like(call.q, math.nan)
        lse = torch.full(call.q.shape[:3], math.nan)
        queue = torch.zeros(1, dtype=torch.int32)
        arguments = arguments_of(
            call.q,
            call.k,
            call.v,
            out,
            call.selection,
            softmax_scale=call.softmax_scale,
            lse=lse if config.return_lse else None,
            queue=queue,
        )
        stats = emulation.run(
            ptx, module.launch_plan(config, target, arguments), resident=resident, **schedule
        )
        assert stats["warnings"] == []
        assert stats["mma"] == MMAS[module] * tiles, "a step was issued for nothing, or left out"
        assert queue == 0, "the counter of work items was left behind"
        assert not out.isnan().any(), f"{int(out.isnan().sum())} values are NaN or were not written"
        error = (out.double() - exact).abs()
        worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        assert float(error.max()) <= allowed, f"off by {error.max():.3e} > {allowed:.3e} at {worst}"
        if config.return_lse:
            empty = exact_lse == -math.inf
            assert torch.equal(lse == -math.inf, empty)
            gap = (lse.double() - exact_lse)[~empty].abs()
            assert bool((gap <= 1e-3 + 1e-6 * exact_lse[~empty].abs()).all())
        patterns.add(out.contiguous().view(torch.int16).numpy().tobytes() + lse.numpy().tobytes())
    assert len(patterns) == 1, "the output depends on the schedule"


def row_ids(call: Call, batch: int, head: int, row: int) -> list[int]:
    """Ids of a row's list, wherever they point."""
    if row < call.case.dense_rows:
        return list(range(-(-call.case.keys // BLOCK)))
    count = max(int(call.selection.q2k_counts[batch, head, row]), 0)
    return call.selection.q2k_indices[batch, head, row].tolist()[:count]


@pytest.mark.parametrize(
    "name",
    ["full", "static", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "fp16"))]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("no cubic", "rescale always")],
)
def test_compiled_kernel_fits(name: str):
    assert_fits(name, compiled(name), vsa_sm100.SCHEDULE)


def test_sass_has_no_local_memory(tmp_path: Path):
    """Spills that ptxas made without a frame would show here; also that the text is all there."""
    found = [opcode.split(".")[0] for opcode in opcodes(compiled("full").cubin, tmp_path)]
    assert found.count("UTCHMMA") >= 2 * (16 + 8)
    assert not {"STL", "LDL"} & set(found)


def test_plan_has_the_parameters_and_boxes_of_the_kernel():
    call = make_call(Case("any"))
    arguments = arguments_of(call.q, call.k, call.v, call.q, call.selection, softmax_scale=1.0)
    plan = vsa_sm100.launch_plan(FULL, TARGET, arguments)
    assert_describes(plan, compiled("full"))
    assert plan.grid == (1, 2, 1)


def test_tables_fit_the_target():
    vsa_sm100.SCHEDULE.check(TARGET)
    text = vsa_sm100.SCHEDULE.tables()
    assert "p_head_full  x2  256 arrivals  softmax0 + correction -> mma" in text
    assert "item_empty   x2   15 arrivals" in text
    assert "128-191 P1 over S1" in text


@pytest.mark.parametrize(
    "field",
    [{"dtype": "fp8"}, {"persistent": "no"}, {"cubic_pairs": 17}, {"rescale_threshold": 9.0}],
)
def test_config_refuses(field: dict):
    with pytest.raises(ValueError, match=next(iter(field))):
        vsa_sm100.Config(**field).check()


@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda case: case.name)
def test_numbers(case: Case):
    check(replace(case, residents=case.residents[:1]), emulation.sample())


def work_of_rows(length: int, size: int) -> dict[str, int]:
    """Instructions of each role for four rows of `length` blocks with `size` valid keys."""
    counts, sizes = (length,), (size,) * length
    call = make_call(Case("rows", 512, length * BLOCK, heads=(1, 1), counts=counts, kv_sizes=sizes))
    out, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3])
    arguments = arguments_of(
        call.q, call.k, call.v, out, call.selection, softmax_scale=call.softmax_scale, lse=lse
    )
    plan = vsa_sm100.launch_plan(FULL, TARGET, arguments)
    issued = emulation.issued(compiled("full").ptx, plan)
    return {
        role.name: sum(issued[warp] for warp in range(role.first, role.last + 1))
        for role in vsa_sm100.SCHEDULE.roles
    }


@pytest.mark.slow
def test_work_for_a_tile():
    """PTX instructions without moves for one more 128 x 128 tile; FlashAttention-4 issues 2270."""
    steps = 4 * 8

    def marginal(size: int) -> dict[str, float]:
        few, many = work_of_rows(8, size), work_of_rows(16, size)
        return {role: (many[role] - few[role]) / steps for role in many}

    full, partial = marginal(128), marginal(100)
    assert sum(full.values()) <= 2250
    assert full["softmax0"] + full["softmax1"] <= 2100
    assert sum(partial.values()) <= 1.15 * sum(full.values())
    assert full["store"] == full["scheduler"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_of_all_cases(case: Case):
    check(case, emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda case: case.name)
def test_numbers_in_every_schedule(case: Case):
    check(case, emulation.schedules())
