"""L1: SentryWard proves the kernels' launches, and refuses what it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")
pytest.importorskip("sentryward", reason="needs sentryward, which pip installs on Linux")

import prove
import sentry
import test_vsa_sm100 as vsa
import torch
from device_cases import packed
from mutations import Mutant, mutated
from ptx_text import Text
from verified import VSA

from sparse_atten.csr import device as csr
from sparse_atten.cute_kernels.common.launch import LaunchPlan, TensorMap
from sparse_atten.cute_kernels.common.steps import Step

# What a verdict may rest on; anything new must be read and put here by hand.
ASSUMPTIONS = {
    "representative_election": "elect.sync chooses lane 0, which no kernel relies on",
    "clc_always_fails": "cluster launch control is not in the verified text: its grid is static",
    "pointers": "tensors do not overlap",
    "tables": "integer tables hold what the launch says, and nobody writes them",
    "isolated launch": "nothing else runs on the same memory",
}


def check(launch: str) -> None:
    verdict = VSA.prove(VSA.text().ptx, launch)
    print(f"{launch}: {verdict}")
    assert verdict.result == sentry.PROVED, verdict
    assert {text.split(":")[0] for text in verdict.assumptions} <= ASSUMPTIONS.keys()
    assert verdict.events > 100_000


def test_the_short_launch_is_proved():
    check("short")


@pytest.mark.slow
@pytest.mark.parametrize("launch", [name for name in VSA.launches if name != "short"])
def test_longer_launches_are_proved(launch: str):
    check(launch)


def test_a_missing_commit_is_refused():
    text = VSA.text()
    mutant = Mutant("drop", "commit", "s_full", "issue_qk", 0)
    verdict = VSA.prove(mutated(mutant, text, VSA.schedule), "short")
    assert verdict.result != sentry.PROVED
    assert any("PTX" in finding and "line" in finding for finding in verdict.findings), verdict


def test_what_is_beyond_it_is_named():
    """The shipped text branches on scores, so that its proof stops there: L2 covers it."""
    text = Text(vsa.compiled("static").ptx)
    launch = VSA.launches["short"]()
    verdict = sentry.prove(text.ptx, launch.plan, launch.contents)
    assert verdict.result == "unsupported"
    assert "control_predicate_not_static" in verdict.findings[0]
    assert "correct" in verdict.findings[0], "the role that looks at factors"


def test_programs_in_cuda_cpp_are_beyond_it():
    """They branch on the ids that they sort: emulation and the GPU's own checker cover them."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")
    tables = packed(torch.Generator().manual_seed(0), [8], [256], width=2, heads=1)
    plans: dict[str, LaunchPlan] = {}

    def bind(steps: Sequence[Step]) -> Callable[..., None]:
        def run(*addresses: int) -> None:
            for step in steps:
                values = tuple(step.values(addresses))
                plans[step.kernel] = LaunchPlan(step.grid, step.block, (1, 1, 1), 0, values)

        return run

    csr.csr_on_device(tables, bind, is_wide=False)
    plan = plans["hist"]
    pointers = [i for i, code in enumerate(csr.SIGNATURES["hist"]) if code == "P"]
    verdict = sentry.prove(
        csr.program(False).compile((10, 0)).ptx, plan, {}, kernel="hist", pointers=pointers
    )
    assert verdict.result == "unsupported"
    assert "control_predicate_not_static" in verdict.findings[0]


def test_the_verdicts_on_record():
    """What `python tests/prove.py` found, rendered; a refutation may not stand there."""
    table = prove.read()
    assert {f"{VSA.name}: {launch}" for launch in VSA.launches} <= table.keys()
    for name, entry in table.items():
        expected = "unsupported" if entry["launch"] == prove.SHIPPED else sentry.PROVED
        assert entry["result"] == expected, name
    text = prove.TABLE.with_suffix(".md").read_text()
    assert text == prove.rendered(list(table.values()))


def test_input_describes_the_launch():
    ptx = """
.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .align 4 .b8 kernel_param_1[12],
	.param .u64 .ptr .global .align 4 kernel_param_2,
	.param .u64 .ptr .global .align 4 kernel_param_3,
	.param .u32 kernel_param_4,
	.param .f32 kernel_param_5
)
"""
    tensor_map = TensorMap(4096, "bf16", (128, 300), (256,), (64, 128))
    plan = LaunchPlan((1, 2, 1), (64, 1, 1), (1, 1, 1), 512, (tensor_map, None, 64, 0, 7, 0.5))
    made = sentry.kernel_input(ptx, plan, {2: [1, -1]})
    assert made["launch"]["grid_dim"] == (1, 2, 1)
    assert made["launch"]["dynamic_shared_bytes"] == 512
    (descriptor,) = made["tma_descriptors"]
    assert (descriptor["parameter"], descriptor["rank"]) == (0, 2)
    assert (descriptor["element_type"], descriptor["swizzle"]) == ("bf16", "128B")
    assert made["declarations"] == [{"parameter": 2, "type": "pointer", "object": "p2"}]
    assert made["shape_arrays"] == [
        {"parameter": 2, "element_type": "u32", "shapes": [[1], [2**32 - 1]]}
    ]
    assert [(a["parameter"], a["type"], a["value"]) for a in made["arguments"]] == [
        (3, "pointer", None),
        (4, "u32", 7),
        (5, "f32", 0.5),
    ]


def test_a_plan_of_another_kernel_is_refused():
    plan = LaunchPlan((1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (1, 2))
    with pytest.raises(ValueError, match="zip"):
        sentry.kernel_input(".visible .entry k(\n\t.param .u32 k_param_0\n)\n", plan, {})
