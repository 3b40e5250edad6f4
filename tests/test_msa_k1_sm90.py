"""The Hopper MSA partial-attention kernel: what the compiler made of it, and its numbers.

Calls, oracle and bounds are those of the Blackwell kernel.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import emulation
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from machine_code import assert_describes, assert_fits, opcodes
from msa_k1_cases import Call, Case, make_call, oracle
from test_msa_k1_sm100 import (
    CASES,
    QUICK,
    check,
    check_that_no_integer_is_trusted,
    compare,
)

from sparse_atten.cute_kernels import msa_k1_sm90
from sparse_atten.cute_kernels.common.dsl import load_kernel
from sparse_atten.cute_kernels.common.planned import PlannedLaunch
from sparse_atten.cute_kernels.common.target import Target, target_of
from sparse_atten.cute_kernels.msa_arguments import Partials

TARGET = Target("sm_90a", 132)
# Cases of what only the Blackwell kernel has.
OWN = [case for case in CASES if not case.fp32 and case.persistent == "clc"]
OWN.append(replace(CASES[0], name="options", fp32=False))
QUICK_OWN = {name: replace(case, fp32=False) for name, case in QUICK.items()}


def config_for(case: Case) -> msa_k1_sm90.Config:
    return msa_k1_sm90.Config(
        dtype=case.dtype,
        group_size=case.group,
        causal=case.causal,
        paged=case.layout is not None,
        temperature=case.temperature is not None,
    )


def compiled(config: msa_k1_sm90.Config) -> Any:
    return msa_k1_sm90.compile_offline(config, TARGET)


def run(call: Call, partials: Partials, **options: Any) -> dict[str, Any]:
    """Execute the kernel on the emulator, several items for each CTA."""
    config = config_for(call.case)
    plan = msa_k1_sm90.launch_plan(config, Target("sm_90a", num_sms=3), call.arguments(partials))
    return emulation.run(compiled(config).ptx, plan, **options)


@pytest.mark.parametrize("case", QUICK_OWN.values(), ids=QUICK_OWN)
def test_numbers(case: Case):
    check(case, emulation.sample(), run)


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_numbers_of_all_cases(case: Case):
    check(case, emulation.sample(), run)


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK_OWN.values(), ids=QUICK_OWN)
def test_numbers_in_every_schedule(case: Case):
    check(case, emulation.schedules(), run)


@pytest.mark.parametrize(
    "config",
    [
        msa_k1_sm90.Config(causal=True),
        msa_k1_sm90.Config(group_size=1, causal=True, paged=True, temperature=True),
        *(
            pytest.param(config, marks=pytest.mark.slow)
            for config in (
                msa_k1_sm90.Config(),
                msa_k1_sm90.Config(group_size=2, causal=True, temperature=True),
                msa_k1_sm90.Config(group_size=4, dtype="fp16", causal=True),
                msa_k1_sm90.Config(group_size=8, causal=True, paged=True),
            )
        ),
    ],
)
def test_compiled_kernel_fits(config: msa_k1_sm90.Config):
    result = compiled(config)
    assert_fits(str(config), result, msa_k1_sm90.SCHEDULE)
    assert "griddepcontrol.launch_dependents" in result.ptx


def test_sass_waits_once_for_each_product(tmp_path: Path):
    """No spills; and where ptxas serialises wgmma, every one would have a wait of its own."""
    found = opcodes(compiled(msa_k1_sm90.Config(causal=True)).cubin, tmp_path)
    assert sum(opcode.startswith("HGMMA") for opcode in found) == 2 * 8
    assert sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in found) == 2
    assert not {"STL", "LDL"} & {opcode.split(".")[0] for opcode in found}


def test_plan_has_the_parameters_and_boxes_of_the_kernel():
    call = make_call(Case("any", causal=True))
    config = config_for(call.case)
    plan = msa_k1_sm90.launch_plan(config, TARGET, call.arguments(call.partials()))
    assert_describes(plan, compiled(config))
    assert plan.grid == (min(call.schedule.work_items.shape[0], 132), 1, 1)


def test_tables_fit_the_target():
    msa_k1_sm90.SCHEDULE.check(TARGET)
    text = msa_k1_sm90.SCHEDULE.tables()
    assert "q_empty      x9    1 arrivals  store -> load" in text
    assert "k_empty      x1   12 arrivals" in text


@pytest.mark.parametrize("field", [{"dtype": "fp8"}, {"group_size": 3}])
def test_config_refuses(field: dict):
    with pytest.raises(ValueError, match=next(iter(field))):
        msa_k1_sm90.Config(**field).check()


def test_what_no_query_of_a_tile_sees_has_no_effect():
    """Tiles hold 4 tokens: NaN at key 100 reaches the tile of token 100 and those after it."""
    call = make_call(Case("diagonal", (128,), (128,), ids="first", causal=True, width=1))
    clean, spoilt = call.partials(), call.partials()
    run(call, clean)
    call.v[100], call.k[101] = float("nan"), float("inf")
    run(call, spoilt)
    assert torch.equal(spoilt.o[0, :100].view(torch.int16), clean.o[0, :100].view(torch.int16))
    assert torch.equal(spoilt.lse[0, :100], clean.lse[0, :100])
    assert not spoilt.o[0, 101:].isfinite().any()


def test_a_warpgroup_that_is_ahead_waits_for_its_own_tile():
    """Loads that land as late as they can, in any order.

    With eight stages for three warpgroups a stage changed hands, and its next owner took the fill
    before its own, which had not landed, for its own: both end a phase of the parity it waits for.
    """
    case = next(case for case in OWN if case.name == "hot block, split")
    check(replace(case, residents=(1,)), emulation.schedules()[4:6], run)


def test_no_integer_is_trusted():
    check_that_no_integer_is_trusted(QUICK_OWN["options"], run)


@pytest.mark.gpu(9, 0)
@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_numbers_on_a_gpu(case: Case):
    call = make_call(case)
    exact, plain = oracle(call), oracle(call, "plain")
    held = replace(
        call,
        **{name: on_gpu(getattr(call, name)) for name in ("q", "k", "v")},
        selection=moved(call.selection),
        csr=moved(call.csr),
        schedule=moved(call.schedule),
    )
    config = config_for(case)
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    kernel = load_kernel(msa_k1_sm90.__name__, config, target, held.q.device)
    first = None
    for _ in range(3):
        partials = Partials(*(None if x is None else x.cuda() for x in call.partials()))
        PlannedLaunch(kernel, msa_k1_sm90.launch_plan(config, target, held.arguments(partials)))()
        back = Partials(*(None if x is None else x.cpu() for x in partials))
        compare(call, back, exact, plain)
        bits = [x.view(torch.uint8) for x in back if x is not None]
        first = first or bits
        assert all(torch.equal(x, y) for x, y in zip(bits, first, strict=True))


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """Copy with the strides as they are."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return copy.copy_(x)


def moved(record: Any) -> Any:
    """Move the tensors of a record."""
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return replace(
        record, **{n: on_gpu(x) for n, x in fields.items() if isinstance(x, torch.Tensor)}
    )
