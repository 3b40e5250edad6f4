"""The Blackwell MSA partial-attention kernel: what the compiler made of it, and its numbers.

Nothing here has run on a GPU: the numbers are those of an emulator. The oracle is the definition in
float64, one edge at a time, from the table of block lists.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from machine_code import assert_describes, assert_fits, opcodes
from msa_k1_cases import LENGTHS, Call, Case, make_call, oracle, prepare_chunk

from sparse_atten.contracts import validate
from sparse_atten.cute_kernels import msa_k1_sm100
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.msa_arguments import Partials
from sparse_atten.msa import kv_outer
from sparse_atten.preparation import PreparedSelection, QueryChunk
from sparse_atten.scheduler.reference import Splitting, schedule_of

TARGET = Target("sm_100a")
LONGER_Q = ((3, 200, 0, 7, 130, 20), (1, 127, 128, 0, 129, 3))
LONGER_K = ((1, 1, 60, 5, 30, 0), (1, 127, 400, 128, 129, 2))

# Three configurations serve the quick tests.
OPTIONS = Case(
    "options",
    group=4,
    kv_heads=2,
    causal=True,
    layout="nhd",
    lost_pages=True,
    fp32=True,
    temperature=0.5,
)
CASES = [
    OPTIONS,
    Case("lengths"),
    Case("lengths, causal", causal=True),
    Case("queries longer", *LONGER_Q, causal=True, padding=3),
    Case("keys longer", *LONGER_K, causal=True, kv_heads=2),
    Case("G 8", group=8, causal=True),
    Case("G 4", group=4, kv_heads=2),
    Case("G 4, causal", group=4, causal=True),
    Case("G 2", group=2, causal=True, kv_heads=2),
    Case("G 1", group=1, kv_heads=2),
    Case("G 1, causal", group=1, causal=True),
    Case("K 1", width=1, causal=True),
    Case("K 8", (90, 5), (1300, 600), width=8, causal=True),
    Case("K 7", (40, 5), (1300, 600), width=7),
    Case("K 16", (30, 5), (2100, 600), width=16, causal=True),
    Case("K 32", (20, 5), (4200, 600), width=32, causal=True, group=8),
    Case("local blocks", (300, 40), (300, 170), causal=True, ids="local"),
    Case("hot block, split", (400,), (300,), ids="hot", num_sms=4, residents=(1, 2)),
    Case("hot block, one item", (400,), (300,), ids="hot", num_sms=1, residents=(1,)),
    Case("nobody chose", ids="none"),
    Case("repeated ids", ids="repeated", causal=True),
    Case("used", used=(1, 100, 3, 129, 200, 0), spoil=True),
    Case("used, causal", used=(1, 127, 90, 0, 300, 0), spoil=True, causal=True),
    Case("pages hnd", layout="hnd", causal=True),
    Case("pages nhd", layout="nhd", kv_heads=2, group=8),
    Case("lost pages", layout="hnd", lost_pages=True, causal=True),
    Case("strides", *LONGER_Q, strided=True, kv_heads=2, group=8, causal=True),
    Case("strides of pages", *LONGER_K, strided=True, layout="nhd", kv_heads=2, causal=True),
    Case("scale 16", (64, 20), (300, 170), scale=16.0),
    Case("scale 100", (64, 20), (300, 170), scale=100.0, causal=True),
    Case("own softmax scale", (64, 20), (300, 170), softmax_scale=0.5),
    Case("fp16", dtype="fp16", causal=True),
    Case("fp32 partials", fp32=True, causal=True),
    Case("fp32 partials, G 1", fp32=True, group=1),
    Case("temperature", temperature=0.5, causal=True),
    Case("chunk", LENGTHS, LENGTHS, chunk=(200, 300), causal=True),
    Case("chunk of one sequence", (300, 20), (300, 200), chunk=(100, 150), group=4, causal=True),
    Case("static grid", persistent="static", num_sms=4, residents=(4,)),
    Case("many items, one CTA", residents=(1,), num_sms=1000, causal=True),
]
# Fewer queries, with the lengths of keys and the schedule of a small GPU.
_QUERIES = (1, 9, 100, 17, 40, 0)
QUICK = {
    name: replace(next(case for case in CASES if case.name == name), num_sms=4, **changes)
    for name, changes in {
        "options": {"queries": (1, 31, 32, 33, 60, 0)},
        "lengths": {"queries": _QUERIES},
        "queries longer": {"queries": (3, 30, 0, 7, 135, 9), "keys": (1, 9, 128, 0, 129, 3)},
        "hot block, split": {"queries": (64,), "residents": (2,)},
        "used, causal": {"queries": _QUERIES},
        "chunk": {"queries": _QUERIES, "chunk": (100, 60)},
    }.items()
}


def compiled(config: msa_k1_sm100.Config, target: Target = TARGET) -> Any:
    return msa_k1_sm100.compile_offline(config, target)


def run(call: Call, partials: Partials, **options: Any) -> dict[str, Any]:
    """Execute the kernel on the emulator; on a static grid with several items for each CTA."""
    target = Target("sm_100a", num_sms=3)
    plan = msa_k1_sm100.launch_plan(call.case.config, target, call.arguments(partials))
    return emulation.run(compiled(call.case.config).ptx, plan, **options)


def check(case: Case, schedules: list, run: Any = run) -> None:
    """Run a case in every schedule and residency; compare with the oracle and among themselves."""
    call = make_call(case)
    exact, plain = oracle(call), oracle(call, "plain")
    patterns = set()
    for resident, schedule in itertools.product(case.residents, schedules):
        partials = call.partials()
        stats = run(call, partials, resident=resident, **schedule)
        assert stats["warnings"] == []
        compare(call, partials, exact, plain)
        patterns.add(
            b"".join(x.view(torch.uint8).numpy().tobytes() for x in partials if x is not None)
        )
    assert len(patterns) == 1, "the output depends on the schedule"


def compare(call: Call, partials: Partials, exact: tuple, plain: tuple) -> None:
    """What an edge writes is as exact as the formats allow; nothing else is written."""
    written = ~exact[1].isnan()
    o, lse, lse_t = partials
    assert bool(o[~written].isnan().all()), "a slot was written that no edge names"
    assert not bool(o[written].isnan().any())
    if not written.any():
        return
    largest = float((exact[0][written].abs()).max())
    allowed = 2 * float((plain[0] - exact[0])[written].abs().max()) + 1e-5 + 1e-6 * largest
    error = (o.double() - exact[0]).nan_to_num(0).abs()
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert float(error.max()) <= allowed, f"off by {error.max():.3e} > {allowed:.3e} at {worst}"
    for got, wanted, other in ((lse, exact[1], plain[1]), (lse_t, exact[2], plain[2])):
        if got is None:
            continue
        assert torch.equal(got.isnan(), ~written)
        assert torch.equal(got == -math.inf, wanted == -math.inf)
        seen = written & (wanted != -math.inf)
        gap = (got.double() - wanted)[seen].abs()
        rounding = 2 * float((other - wanted)[seen].abs().max()) if seen.any() else 0.0
        allowed = 2e-5 + rounding + 1e-6 * wanted[seen].abs()
        assert bool((gap <= allowed).all()), f"LSE off by {float(gap.max()):.3e}"
    assert bool((o[written & (exact[1] == -math.inf)] == 0).all())


@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
def test_numbers(case: Case):
    check(case, emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_of_all_cases(case: Case):
    check(case, emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
def test_numbers_in_every_schedule(case: Case):
    check(case, emulation.schedules())


def result_of(call: Call, **options: Any) -> Partials:
    partials = call.partials()
    run(call, partials, **options)
    return partials


def same_bits(a: Partials, b: Partials) -> bool:
    pairs = ((x, y) for x, y in zip(a, b, strict=True) if x is not None)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize("name", ["queries longer", "options"])
def test_equals_the_torch_form_of_the_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    # Ids of a device tensor are not checked at the call.
    monkeypatch.setattr(kv_outer, "check", validate)
    call = make_call(QUICK[name])
    got = result_of(call)
    chunk = QueryChunk(0, call.q.shape[0], call.csr, call.schedule)
    prepared = PreparedSelection(call.selection, (chunk,), call.q.shape[1], 0)
    wanted = kv_outer.partial_attention(
        call.q,
        call.k,
        call.v,
        prepared,
        causal=call.case.causal,
        lse_temperature=call.case.temperature,
    )
    torch.testing.assert_close(got.o.float(), wanted[0], atol=1e-2, rtol=1e-2, equal_nan=True)
    for x, y in zip(got[1:], wanted[1:], strict=False):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-6, equal_nan=True)


def test_order_of_items_changes_nothing():
    call = make_call(Case("hot", (60,), (300,), ids="hot", num_sms=1000, causal=True))
    wanted = result_of(call)
    items, count = call.schedule.work_items, int(call.schedule.num_items)
    assert count > 10
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    items[:count] = items[order]
    assert same_bits(result_of(call, resident=2), wanted)


def test_what_no_query_of_a_tile_sees_has_no_effect():
    """Tiles hold 8 tokens: NaN at key 100 reaches the tile of token 100 and those after it."""
    call = make_call(Case("diagonal", (128,), (128,), ids="first", causal=True, width=1))
    clean = result_of(call)
    call.v[100], call.k[101] = math.nan, math.inf
    o, lse, _ = result_of(call)
    assert torch.equal(o[0, :96].view(torch.int16), clean.o[0, :96].view(torch.int16))
    assert torch.equal(lse[0, :100], clean.lse[0, :100])
    assert not o[0, 101:].isfinite().any()


def test_no_integer_is_trusted():
    check_that_no_integer_is_trusted(QUICK["options"], run)


def check_that_no_integer_is_trusted(case: Case, run: Any) -> None:
    """Whatever the tables hold, nothing outside the partials is written and the kernel ends."""
    generator = torch.Generator().manual_seed(3)
    for trial in range(4):
        call = make_call(case)
        tables = [call.csr.row_ptr, call.csr.q_indices, call.schedule.split_slot]
        tables += [call.schedule.work_items, call.schedule.num_items, call.selection.page_table]
        tables += [call.selection.cu_seqlens_q, call.selection.seqused_k]
        for table in tables:
            broken = torch.rand(table.shape, generator=generator) < (0.2, 1.0)[trial % 2]
            noise = torch.randint(-(2**31), 2**31, table.shape, generator=generator)
            noise >>= (0, 20)[trial // 2]
            table.copy_(torch.where(broken, noise, table))
        width = case.width
        guarded = [torch.cat([x] * 3) for x in call.partials()]
        run(call, Partials(*(x[width : 2 * width] for x in guarded)))
        for x in guarded:
            assert x[:width].isnan().all()
            assert x[2 * width :].isnan().all()


# Diagnostics of nvvm that the kernel causes, and why each is expected.
EXPECTED_WARNINGS = {
    "C1": "no visible mbarrier.init: barriers are addressed by computed integers",
    "C5": "no visible completion of expect_tx: the hardware completes a CLC query",
    "C6": "no reachable arrive for a wait: TMA and tcgen05.commit arrive",
}
SHIPPED = {
    "prefill": msa_k1_sm100.Config(causal=True),
    "not causal": msa_k1_sm100.Config(),
    "G 8, pages": msa_k1_sm100.Config(group_size=8, causal=True, paged=True),
    "G 4": msa_k1_sm100.Config(group_size=4, causal=True),
    "G 2, float32": msa_k1_sm100.Config(group_size=2, causal=True, fp32_partials=True),
    "G 1": msa_k1_sm100.Config(group_size=1, causal=True),
    "fp16, static": msa_k1_sm100.Config(dtype="fp16", causal=True, persistent="static"),
    "temperature": msa_k1_sm100.Config(causal=True, temperature=True),
    "options": OPTIONS.config,
}
ALWAYS = ("prefill", "not causal", "options")


@pytest.mark.parametrize(
    "name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in SHIPPED]
)
def test_compiled_kernel_fits(name: str):
    result = compiled(SHIPPED[name])
    assert_fits(name, result, msa_k1_sm100.SCHEDULE)
    assert "griddepcontrol.launch_dependents" in result.ptx


def test_sass_has_no_local_memory(tmp_path: Path):
    """Spills that ptxas made without a frame would show here; also that the text is all there."""
    cubin = compiled(SHIPPED["prefill"]).cubin
    found = [opcode.split(".")[0] for opcode in opcodes(cubin, tmp_path)]
    assert found.count("UTCHMMA") >= 16
    assert not {"STL", "LDL"} & set(found)


@pytest.mark.slow
def test_compiles_for_b300_with_the_same_numbers():
    call = make_call(next(case for case in CASES if case.name == "queries longer"))
    result = compiled(call.case.config, Target("sm_103a"))
    assert result.stack_bytes == 0
    assert ".target sm_103a" in result.ptx
    partials = call.partials()
    plan = msa_k1_sm100.launch_plan(call.case.config, TARGET, call.arguments(partials))
    emulation.run(result.ptx, plan)
    assert same_bits(partials, result_of(call))


def test_plan_has_the_parameters_of_the_kernel():
    call = make_call(Case("any", causal=True))
    plan = msa_k1_sm100.launch_plan(call.case.config, TARGET, call.arguments(call.partials()))
    assert_describes(plan, compiled(call.case.config))
    assert plan.grid == (call.schedule.work_items.shape[0], 1, 1)


def test_tables_fit_the_target():
    msa_k1_sm100.SCHEDULE.check(TARGET)
    text = msa_k1_sm100.SCHEDULE.tables()
    assert "meta_empty   x8    6 arrivals" in text
    assert "item_empty   x2   15 arrivals" in text
    assert "0-255 P over S" in text


@pytest.mark.parametrize("field", [{"dtype": "fp8"}, {"group_size": 3}, {"persistent": "no"}])
def test_config_refuses(field: dict):
    with pytest.raises(ValueError, match=next(iter(field))):
        msa_k1_sm100.Config(**field).check()


def work_of_tiles(case: Case, tokens: int) -> int:
    """PTX instructions of one item of the first `tokens` tokens of a sequence."""
    call = make_call(case)
    call.selection.q2k_indices[:, tokens:] = -1
    call.csr, _ = prepare_chunk(call)
    call.schedule = schedule_of(call.csr, Splitting(case.queries[0], 128 // case.group, 1))
    return run(call, call.partials(), counts=True)["warp_ins"]


@pytest.mark.parametrize(
    ("name", "causal", "lengths", "tiles", "most"),
    [
        ("not causal", False, (384, 128), (16, 48), 4600),
        ("below the diagonal", True, (384, 512), (16, 48), 4600),
        ("on the diagonal", True, (128, 128), (4, 16), 5600),
    ],
)
def test_work_for_a_tile(name: str, causal: bool, lengths: tuple, tiles: tuple, most: int):
    """PTX instructions, moves too, for one more tile; MiniMax issues 7490, 8161 and 10036."""
    case = Case(name, *((n,) for n in lengths), width=1, ids="first", keep=1.0, causal=causal)
    few, many = (work_of_tiles(case, 8 * n) for n in tiles)
    each = (many - few) / (tiles[1] - tiles[0])
    print(f"{name}: {each:.0f} PTX instructions a tile")
    assert each <= most
