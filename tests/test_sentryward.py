"""L1: SentryWard proves the kernels' launches, and refuses what it should."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")
pytest.importorskip("sentryward", reason="needs sentryward, which pip installs on Linux")

import prove
import sentry
from mutations import Mutant, mutated
from ptx_text import digest
from subject import Subject
from verified import SUBJECTS, VSA
from verified_cuda import MODULES
from verified_msa_k1 import MSA_K1
from verified_msa_k2 import MSA_K2

from sparse_atten.cute_kernels.common.launch import LaunchPlan, TensorMap

# What a verdict may rest on; anything new must be read and put here by hand.
ASSUMPTIONS = {
    "representative_election": "elect.sync chooses lane 0, which no kernel relies on",
    "clc_always_fails": "cluster launch control is not in the verified text: its grid is static",
    "pointers": "tensors do not overlap",
    "tables": "integer tables hold what the launch says, and nobody writes them",
    "isolated launch": "nothing else runs on the same memory",
}


PROOFS = prove.read()
LONG = 300  # seconds; a proof that took longer stands in the table while the text is the same
LONGER = [
    (subject.name, launch)
    for subject in SUBJECTS.values()
    for launch in subject.launches
    if (subject.name, launch) != (VSA.name, "short")
    and subject is not MSA_K2  # it has a test of its own
    and PROOFS[f"{subject.name}: {launch}"]["seconds"] <= LONG
]


def check(subject: Subject, launch: str) -> None:
    verdict = subject.prove(subject.text().ptx, launch, seconds=1800)
    print(f"{launch}: {verdict}")
    assert verdict.result == sentry.PROVED, verdict
    assert {text.split(":")[0] for text in verdict.assumptions} <= ASSUMPTIONS.keys()
    assert verdict.events > 100_000


def test_the_short_launch_is_proved():
    check(VSA, "short")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "launch"), LONGER)
def test_longer_launches_are_proved(name: str, launch: str):
    check(SUBJECTS[name], launch)


@pytest.mark.slow
def test_lanes_that_write_one_word_are_refused():
    """Found in MSA's partial attention: all lanes of the load warp wrote a tile's most keys."""
    lines = MSA_K1.text().lines.copy()
    offset = MSA_K1.schedule.smem_offset("most_seen")
    store = next(i for i, line in enumerate(lines) if re.search(rf"st\.shared.*\+{offset}\]", line))
    guard = max(i for i in range(store) if "bra" in lines[i])
    lines[guard] = ""
    assert MSA_K1.prove("\n".join(lines), "short").result == "potential_race"


@pytest.mark.parametrize(
    "launch",
    [
        name if name == "short" else pytest.param(name, marks=pytest.mark.slow)
        for name in MSA_K2.launches
    ],
)
def test_the_merge_is_proved_as_it_ships(launch: str):
    verdict = MSA_K2.prove(MSA_K2.text().ptx, launch)
    assert verdict.result == sentry.PROVED, verdict
    assert {text.split(":")[0] for text in verdict.assumptions} <= ASSUMPTIONS.keys()
    assert verdict.events > 50_000


def test_a_missing_commit_is_refused():
    text = VSA.text()
    mutant = Mutant("drop", "commit", "s_full", "issue_qk", 0)
    verdict = VSA.prove(mutated(mutant, text, VSA.schedule), "short")
    assert verdict.result != sentry.PROVED
    assert any("PTX" in finding and "line" in finding for finding in verdict.findings), verdict


@pytest.mark.parametrize(("name", "role"), [("vsa_sm100", "correct"), ("msa_k1_sm100", "softmax")])
def test_what_is_beyond_it_is_named(name: str, role: str):
    """The shipped texts branch on scores or on a reduced value: L2 covers them."""
    subject = SUBJECTS[name]
    launch = subject.launches["short"]()
    verdict = sentry.prove(subject.shipped().ptx, launch.plan, launch.contents)
    assert verdict.result == "unsupported"
    assert "control_predicate_not_static" in verdict.findings[0]
    assert role in verdict.findings[0], "the role that branches"


def test_wgmma_is_beyond_it():
    """Hence no kernel of Hopper has a proof."""
    fence = "wgmma.fence.sync.aligned;"
    ptx = f"""
.version 8.3
.target sm_90a
.address_size 64
.visible .entry kernel(
	.param .u32 kernel_param_0
)
{{
	{fence}
	ret;
}}
"""
    plan = LaunchPlan((1, 1, 1), (128, 1, 1), (1, 1, 1), 0, (7,))
    assert sentry.prove(ptx.replace(fence, ""), plan, {}).result == sentry.PROVED
    verdict = sentry.prove(ptx, plan, {})
    assert (verdict.result, *verdict.findings) == ("unsupported", "unsupported_ptx_instruction")


@pytest.mark.slow
def test_a_program_in_cuda_cpp_is_proved_where_integers_alone_decide():
    verdict = MODULES["csr"]()["pack_lists"].prove()
    assert verdict.result == sentry.PROVED, verdict


@pytest.mark.slow
def test_a_program_that_branches_on_what_atomics_return_is_beyond_it():
    verdict = MODULES["csr"]()["prefix"].prove()
    assert verdict.result == "unsupported"
    assert "control_predicate_not_static" in verdict.findings[0]


def test_the_verdicts_on_record():
    """What `python tests/prove.py` found, rendered; a refutation may not stand there."""
    for kernel in SUBJECTS:
        assert {f"{kernel}: {launch}" for launch in prove.launches(kernel)} <= PROOFS.keys()
    assert {entry["kernel"] for entry in PROOFS.values()} >= MODULES.keys()
    for name, entry in PROOFS.items():
        is_beyond = entry["launch"] == prove.SHIPPED or entry["kernel"] in MODULES
        expected = (sentry.PROVED, "unsupported") if is_beyond else (sentry.PROVED,)
        assert entry["result"] in expected, name
        assert entry["result"] == sentry.PROVED or entry["findings"], f"{name}: no reason"
    text = prove.TABLE.with_suffix(".md").read_text()
    assert text == prove.rendered(list(PROOFS.values()))


@pytest.mark.parametrize(
    "kernel",
    [*SUBJECTS, *prove.BEYOND, *(pytest.param(name, marks=pytest.mark.slow) for name in MODULES)],
)
def test_the_verdicts_are_those_of_the_present_text(kernel: str):
    of_kernel = [entry for entry in PROOFS.values() if entry["kernel"] == kernel]
    made_by = {entry["compiler"] for entry in of_kernel}
    if made_by != {prove.compiler(kernel)}:
        pytest.skip(f"proved on texts of {made_by}, which {prove.compiler(kernel)} may not make")
    changed = [
        entry["launch"]
        for entry in of_kernel
        if digest(prove.text_of(kernel, entry["launch"]).ptx) != entry["digest"]
    ]
    assert changed == [], f"the text of {kernel} is another one: python tests/prove.py {kernel}"


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
