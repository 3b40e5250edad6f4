"""L0: what ships compiles for each architecture, fits, and is the code that was reviewed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")

import compile_kernels
from compile_kernels import Row
from ptx_text import Text, digest, normalised

from sparse_atten.cute_kernels.catalogue import shipped
from sparse_atten.cute_kernels.common.dsl import config_name
from sparse_atten.cute_kernels.vsa_sm100 import SCHEDULE, Config
from sparse_atten.scheduler import device as scheduler

QUICK = (
    "vsa_sm100 sm_100a return_lse kv_sizes q_sizes",
    "vsa_sm100 sm_103a dtype=fp16",
)
ENTRIES = {entry.name: entry for entry in shipped()}
RECORDED = {entry.name for entry in compile_kernels.recorded()}


def check(row: Row) -> None:
    print(row)
    assert row.problems() == []
    known = compile_kernels.golden()
    if known and row.name in RECORDED:  # of this version of CuTe-DSL
        assert known.get(row.name) == row.digest, (
            f"the code of {row.name} is not the one on record: if that is meant, run "
            "python tests/compile_kernels.py --renew"
        )


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_of_what_ships(name: str):
    row = compile_kernels.dsl_row(ENTRIES[name])
    check(row)
    assert row.registers * SCHEDULE.threads <= 65536
    assert row.barriers == SCHEDULE.num_barriers + 1, "one named barrier, for the whole CTA"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in QUICK])
def test_all_that_ships(name: str):
    check(compile_kernels.dsl_row(ENTRIES[name]))


def test_a_program_in_cuda_cpp():
    """On one target; tests of the modules compile all for all."""
    rows = list(compile_kernels.cuda_rows("sm_90a", "scheduler wide=0"))
    assert {row.name.split()[2] for row in rows} == set(scheduler.SIGNATURES)
    assert {row.name: row.problems() for row in rows if row.problems()} == {}


def test_what_is_on_record_has_every_choice_of_every_field():
    """Two fields of a Config at a time are left to the test that compiles all."""
    assert set(compile_kernels.resources()) >= RECORDED
    for kernel in compile_kernels.MANY:
        every, found = (
            {item for x in entries if x.kernel == kernel for item in vars(x.config).items()}
            for entries in (ENTRIES.values(), compile_kernels.recorded())
        )
        assert every == found


ROW = Row("kernel", 128, 0, None, 1024, 1, 100, frozenset({"C1"}), "")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stack_bytes": 16}, "16 bytes of stack"),
        ({"spill_bytes": 8}, "8 spilled"),
        ({"smem_bytes": 300_000}, "300000 bytes of shared memory"),
        ({"warnings": frozenset({"C1", "C99"})}, "new warnings of nvvm: C99"),
    ],
)
def test_problems_are_named(change: dict, problem: str):
    assert problem in "; ".join(dataclasses.replace(ROW, **change).problems())


PTX = """
.version 8.8
.visible .entry name_of_kernel_0(
\t.param .u32 name_of_kernel_0_param_0
)
{
\t.loc\t1 12 3
\tadd.s32 \t%r1, %r1, 16; // a comment
\tret;
}
\t.file\t1 "kernel.py"
"""


def test_a_hash_covers_instructions_alone():
    other = PTX.replace("name_of_kernel_0", "other").replace("12 3", "13 4").replace("comment", "x")
    other = other.replace("8.8", "9.4")  # that of CuTe-DSL's libraries for CUDA 13
    assert digest(PTX) == digest(other)
    assert digest(PTX) != digest(PTX.replace("16;", "32;"))
    assert "kernel_param_0" in normalised(PTX)


def test_a_line_of_ptx_names_its_python(tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text("\n" * 10 + "def role():\n    pass\n")
    text = Text(PTX.replace('"kernel.py"', f'"{kernel}"'))
    line = next(i for i, code in enumerate(text.lines, 1) if "add.s32" in code)
    assert text.python(line) == ("role", 12)
    assert text.show(line).endswith("// a comment [role, line 12]")


def test_addresses_add_up():
    text = Text("add.s32 %r2, %r1, 16;\nadd.s32 %r3, %r2, 8;\nadd.s32 %r4, %r9, %r3;\n")
    assert text.offset("[%r3+4]") == 28
    assert text.offset("[%r4]") == 24
    assert text.offset("[%r1]") == 0


def test_configs_are_named_by_what_is_no_default():
    assert config_name(Config()) == "default"
    assert config_name(Config(dtype="fp16", q_sizes=True), "-") == "dtype=fp16-q_sizes"


def test_kernels_can_be_listed_and_built_ahead_of_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "sparse_atten.cute_kernels"]

    def printed(*arguments: str) -> list[str]:
        run = subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True, cwd=tmp_path
        )
        return run.stdout.splitlines()

    assert printed("--list") == list(ENTRIES)
    lines = printed("--only", "sm_103a dtype=fp16 return_lse kv_sizes q_sizes persistent")
    assert lines[0].startswith("[1/1] vsa_sm100 sm_103a dtype=fp16 return_lse")
    assert lines[1] == f"in {tmp_path}"
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()].count(".lock") == 1


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="no kernel for architecture 'sm_90a' has 'sm100' in"):
        shipped("sm_90a", "sm100")
