"""What is verified: a table of kernels, and the subject that the VSA kernel is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import test_vsa_sm100 as vsa
import torch
from ptx_text import Text
from subject import BOUND, Launch, Subject
from verified_msa_k1 import MSA_K1
from verified_msa_k2 import MSA_K2

from sparse_atten.contracts import BlockSelection
from sparse_atten.cute_kernels import vsa_sm100
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.vsa_arguments import arguments_of


def _vsa_launch(
    lists: Sequence[Sequence[int]], *, queries: int, kv_sizes: Sequence[int]
) -> Callable[[], Launch]:
    @cache
    def make() -> Launch:
        width = max(1, *map(len, lists))
        case = vsa.Case(
            "proof",
            queries=queries,
            keys=128 * len(kv_sizes),
            heads=(1, 1),
            ids=tuple((*ids, *(-1,) * (width - len(ids))) for ids in lists),
            counts=tuple(map(len, lists)),
            kv_sizes=tuple(kv_sizes),
            config="verified",
        )
        call = vsa.make_call(case)
        given = call.selection
        # The tables' values are handed over as they lie in memory.
        selection = BlockSelection(
            given.q2k_indices.contiguous(),
            given.q2k_counts,
            kv_block_sizes=given.kv_block_sizes,
            q_block_sizes=given.q_block_sizes,
        )
        lse = torch.empty(call.q.shape[:3])
        arguments = arguments_of(
            call.q, call.k, call.v, call.q, selection, softmax_scale=0.1, lse=lse
        )
        tables = (
            selection.q2k_indices,
            selection.q2k_counts,
            selection.kv_block_sizes,
            selection.q_block_sizes,
        )
        plan = vsa_sm100.launch_plan(vsa.CONFIGS["verified"], Target("sm_100a", 1), arguments)
        first = plan.parameters.index(selection.q2k_indices.data_ptr())
        contents = {first + i: table.flatten().tolist() for i, table in enumerate(tables)}
        return Launch(plan, contents)

    return make


def _vsa_text() -> Text:
    return Text(vsa.compiled("verified").ptx)


def _vsa_shipped() -> Text:
    return Text(vsa.compiled("static").ptx)


_VSA_CASE = next(case for case in vsa.CASES if case.config == "verified")


def _vsa_emulate(ptx: str, schedule: Mapping[str, Any]) -> None:
    vsa.check(_VSA_CASE, [{**schedule, **BOUND}], ptx)


VSA = Subject(
    "vsa_sm100",
    vsa_sm100.SCHEDULE,
    _vsa_text,
    _vsa_shipped,
    {
        # One CTA takes two items: a partial block beside a full one, then an empty row and a tile
        # past the last query. Rings of K/V, items and outputs wrap.
        "short": _vsa_launch(((0,), (1,), ()), queries=300, kv_sizes=(97, 128)),
        # O is rescaled, the maximum carried on.
        "two rounds": _vsa_launch(((0, 1), ()), queries=256, kv_sizes=(97, 128)),
        # A row after a row: what one leaves behind meets the next one.
        "two rows": _vsa_launch(((0,), (), (1,)), queries=300, kv_sizes=(97, 128)),
        # The queue of items wraps twice.
        "three items": _vsa_launch(((0,), *[()] * 4), queries=600, kv_sizes=(128, 128)),
        # The ring of round words wraps: a row of one round, then eight empty ones.
        "nine items": _vsa_launch(((0,), *[()] * 16), queries=17 * 128 - 28, kv_sizes=(128, 128)),
    },
    4,
    _vsa_emulate,
)
SUBJECTS = {subject.name: subject for subject in (VSA, MSA_K1, MSA_K2)}
