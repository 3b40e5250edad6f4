"""The merge of MSA's partial results as it is verified: the text that ships for 16 slots.

It branches on counts alone, which are integers that a proof takes as given. No barrier and no
shared memory orders anything, so that the faults put into it are those of its loads, stores,
shuffles and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import emulation
import mutations_of_data
import test_msa_k2 as k2
from ptx_text import Text
from subject import Launch, Subject

from sparse_atten.cute_kernels import msa_k2
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.schedule import Schedule

_CONFIG = msa_k2.Config(temperature=True, programmatic=True)
_TARGET = k2.TARGETS["sm_100a"]
_BOUND = {"max_blocks": 20_000}


@cache
def _merge(**fields: Any) -> k2.Merge:
    return k2.make_merge(k2.Case("verified", config=_CONFIG, **fields))


def _plan(merge: k2.Merge, outputs: dict, *, ctas: int) -> LaunchPlan:
    config = replace(_CONFIG, ctas_per_sm=ctas)  # of the grid alone: the text is the same
    return msa_k2.launch_plan(config, _TARGET, k2.arguments(merge, outputs))


def _launch(**fields: Any) -> Callable[[], Launch]:
    @cache
    def make() -> Launch:
        merge = _merge(**fields)
        plan = _plan(merge, merge.outputs(), ctas=1)
        counts = plan.parameters.index(merge.split_counts.data_ptr())
        return Launch(plan, {counts: merge.split_counts.flatten().tolist()})

    return make


def _text() -> Text:
    return Text(msa_k2.compile_offline(_CONFIG, _TARGET).ptx)


# Rows that end a window, begin the next one, or have no slot; counts out of range; partials that
# weigh nothing. One CTA strides over them, or several take them at once: then a warp has a row past
# the last one, which has all slots.
_CASE = {
    "counts": (99, 0, 17, 16, 1, -3, 17),
    "width": 17,
    "queries": 5,
    "heads": (9, 3),
    "invisible": 0.2,
}


def _emulate(ptx: str, schedule: Mapping[str, Any]) -> None:
    merge = _merge(**_CASE)
    for ctas in (1, 6):
        outputs = merge.outputs()
        plan = _plan(merge, outputs, ctas=ctas)
        stats = emulation.run(ptx, plan, **schedule, **_BOUND)
        assert stats["warnings"] == []
        k2.check(merge, outputs)


MSA_K2 = Subject(
    "msa_k2",
    Schedule(roles=(), barriers=(), tmem=(), smem=()),
    _text,
    None,
    {
        # Two rounds of rows, two windows of slots, rows past the end.
        "short": _launch(counts=(17, 0, 3), width=17, queries=6, heads=(2, 1)),
        # Heads that do not divide the rows of a CTA, several tokens a round.
        "odd heads": _launch(counts=(5, 16, 0), width=16, queries=5, heads=(3, 3)),
        # Every row has all slots, and counts are out of range.
        "wild counts": _launch(counts=(99, -3), width=16, queries=8, heads=(2, 2)),
    },
    3,
    _emulate,
    frozenset(mutations_of_data.EDITS) | {"warp barrier"},
    frozenset((0, 1, 16)),  # of 16 slots, for each of two LSEs
)
