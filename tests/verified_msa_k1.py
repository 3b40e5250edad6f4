"""The MSA partial-attention kernel as it is verified: G = 16, causal, flat keys, a static grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import emulation
import test_msa_k1_sm100 as k1
from msa_k1_cases import Call, Case, make_call, oracle
from ptx_text import Text
from subject import Launch, Subject

from sparse_atten.cute_kernels import msa_k1_sm100
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.msa_arguments import Partials

# A mutant that runs for longer than this is stuck.
_BOUND = {"max_blocks": 300_000}
# One CTA takes six items of 12 tiles in all, and drops entries. All rings wrap, blocks are full,
# partial and cut by the diagonal, and tiles have tokens that do not exist.
CASE = Case(
    "mutants", (40, 9), (150, 300), width=2, causal=True, num_sms=1, verified=True, keep=0.9
)
_PROOF = dataclasses.replace(CASE, name="proof", width=1, ids="first", keep=1.0)


def plan_of(call: Call, partials: Partials) -> LaunchPlan:
    """Describe a launch on a GPU of one SM."""
    target = Target("sm_100a", num_sms=1)
    return msa_k1_sm100.launch_plan(call.case.config, target, call.arguments(partials))


def _launch(*rows: tuple[int, int]) -> Callable[[], Launch]:
    """Give a launch of one CTA whose items are the first blocks of sequences: queries and keys."""

    @cache
    def make() -> Launch:
        queries, keys = zip(*rows, strict=True)
        call = make_call(dataclasses.replace(_PROOF, queries=queries, keys=keys))
        plan = plan_of(call, call.partials())
        tables = (
            call.schedule.work_items,
            call.schedule.num_items,
            call.csr.row_ptr,
            call.csr.q_indices,
            call.schedule.split_slot,
            call.selection.cu_seqlens_q,
            call.selection.cu_seqlens_k,
        )
        first = plan.parameters.index(call.schedule.work_items.data_ptr())
        return Launch(plan, {first + i: t.flatten().tolist() for i, t in enumerate(tables)})

    return make


def _text() -> Text:
    return Text(k1.compiled(CASE.config).ptx)


def _shipped() -> Text:
    return Text(k1.compiled(msa_k1_sm100.Config(causal=True, persistent="static")).ptx)


@cache
def _expected(case: Case) -> tuple[Call, tuple, tuple]:
    call = make_call(case)
    return call, oracle(call), oracle(call, "plain")


def emulate(ptx: str, schedule: Mapping[str, Any], case: Case = CASE) -> None:
    """Run a text of the kernel, one CTA at a time; raise where a fault or a wrong number shows."""
    call, exact, plain = _expected(case)
    partials = call.partials()
    options = {**schedule, "resident": 1}
    stats = emulation.run(ptx, plan_of(call, partials), **options, **_BOUND)
    assert stats["warnings"] == []
    k1.compare(call, partials, exact, plain)


MSA_K1 = Subject(
    "msa_k1_sm100",
    msa_k1_sm100.SCHEDULE,
    _text,
    _shipped,
    {
        # A full block, then one that the diagonal cuts: K, V and a slot of items are used again.
        "short": _launch((8, 200), (5, 40)),
        # The queue of items wraps, and so do the rings of the first stage.
        "three items": _launch((3, 200), (2, 40), (1, 1)),
    },
    2,
    emulate,
)
