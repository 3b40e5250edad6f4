"""The Hopper MSA partial-attention kernel: what the compiler made of it, and its numbers.

Calls, oracle and bounds are those of the Blackwell kernel.
"""

from __future__ import annotations

from typing import Any

import emulation
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from msa_k1_cases import Call, Case
from test_msa_k1_sm100 import CASES, QUICK, check

from sparse_atten.cute_kernels import msa_k1_sm90
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.msa_arguments import Partials

TARGET = Target("sm_90a", 132)


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
