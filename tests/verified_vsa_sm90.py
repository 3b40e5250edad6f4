"""The Hopper VSA kernel for SentryWard, which does not follow it: its text as it ships, a launch.

Its work items are drawn from a counter, and a branch on what an atomic returned is beyond a static
proof; so is wgmma. The emulator's race detector stands alone.
"""

from __future__ import annotations

import test_vsa_sm90 as sm90
import torch
from ptx_text import Text
from subject import Launch
from test_vsa_sm100 import Case, make_call

from sparse_atten.cute_kernels import vsa_sm90
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.vsa_arguments import arguments_of


def text() -> Text:
    """Compile the Config with all tables."""
    return Text(sm90.compiled(sm90.FULL).ptx)


def launch() -> Launch:
    """Give a launch of one CTA: two Q blocks with one KV block each, one without any."""
    case = Case("proof", queries=300, keys=256, heads=(1, 1), ids=((0,), (1,), (0,)))
    call = make_call(case)
    lse = torch.empty(call.q.shape[:3])
    arguments = arguments_of(
        *(call.q, call.k, call.v, call.q, call.selection), softmax_scale=0.1, lse=lse
    )
    plan = vsa_sm90.launch_plan(sm90.FULL, Target("sm_90a", 1), arguments)
    given = call.selection
    tables = (
        given.q2k_indices,
        given.q2k_counts,
        given.kv_block_sizes,
        given.q_block_sizes,
    )
    first = plan.parameters.index(given.q2k_indices.data_ptr())
    contents = {first + i: table.flatten().tolist() for i, table in enumerate(tables)}
    return Launch(plan, contents)
