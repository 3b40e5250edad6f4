"""Faults put into the kernels' synchronisation are seen: each is replayed where it was caught.

The tables in tests/mutants were found by `python tests/mutate.py`, which searches all schedules.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")

import emulation
import mutate
import test_msa_k1_sm100 as k1
import test_vsa_sm100 as vsa
import verified_msa_k1
from msa_k1_cases import make_call
from mutate import Record
from mutations import Mutant, mutants, mutated
from ptx_text import Text, normalised
from subject import RACES, Subject
from verified import SUBJECTS, VSA

from sparse_atten.cute_kernels.common.schedule import Barrier, Region, Role, Schedule, lanes, once
from sparse_atten.scheduler.reference import Splitting, schedule_of

TABLES = {name: mutate.read(subject) for name, subject in SUBJECTS.items()}
EVERY = [(name, record) for name, table in TABLES.items() for record in table.values()]


def sampled(records: list[tuple[str, Record]]) -> list[Any]:
    """Name the replays; all but the first fault of each sort of each kernel are slow."""
    sorts: set[tuple[str, ...]] = set()
    replays = []
    for name, record in records:
        sort = (name, record.mutant.edit, record.mutant.kind)
        marks = [pytest.mark.slow] if sort in sorts else []
        replays.append(pytest.param(name, record, marks=marks, id=f"{name}: {record.mutant}"))
        sorts.add(sort)
    return replays


SCHEDULED = [entry for entry in EVERY if entry[1].scheduled]
RACING = [entry for entry in EVERY if entry[1].race and not entry[1].scheduled]
PROVED_WRONG = [entry for entry in EVERY if entry[1].refuted and not entry[1].emulated]


@pytest.mark.parametrize(("name", "record"), sampled(SCHEDULED))
def test_a_schedule_shows(name: str, record: Record):
    subject = SUBJECTS[name]
    schedule = emulation.schedules()[record.schedule]
    fault = subject.fault(mutated(record.mutant, subject.text(), subject.schedule), schedule)
    assert fault, f"{record.mutant} passes in schedule {record.schedule}: {record.line}"


@pytest.mark.parametrize(("name", "record"), sampled(RACING))
def test_the_race_detector_shows(name: str, record: Record):
    subject = SUBJECTS[name]
    fault = subject.fault(mutated(record.mutant, subject.text(), subject.schedule), RACES)
    assert fault, f"{record.mutant} races unseen: {record.line}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "record"), sampled(PROVED_WRONG))
def test_sentryward_sees(name: str, record: Record):
    pytest.importorskip("sentryward", reason="needs sentryward")
    launch = list(record.proofs)[-1]
    assert mutate.prove(SUBJECTS[name], record, SUBJECTS[name].text(), launch).refuted


@pytest.mark.parametrize("limit", [3, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_the_kernel_itself_passes_where_its_mutants_fail(subject: Subject, limit: int | None):
    used = sorted({r.schedule for r in TABLES[subject.name].values() if r.scheduled})[:limit]
    schedules = emulation.schedules()
    faults = {number: subject.fault(subject.text().ptx, schedules[number]) for number in used}
    assert set(faults.values()) == {""}, faults


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_the_race_detector_accepts_the_kernel(subject: Subject):
    assert subject.fault(subject.text().ptx, RACES) == ""


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_the_table_is_that_of_the_kernel(subject: Subject):
    expected = mutate.chosen(subject, subject.text())
    assert TABLES[subject.name].keys() == expected.keys(), "renew it: python tests/mutate.py"


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_no_fault_passes_unexplained(subject: Subject):
    table = TABLES[subject.name]
    survivors = {str(record.mutant) for record in table.values() if not record.caught}
    assert len(table) - len(survivors) >= 25
    assert survivors == mutate.explained(subject).keys()


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_the_table_is_rendered(subject: Subject):
    text = (mutate.FOLDER / f"{subject.name}.md").read_text()
    assert text == mutate.rendered(subject, list(TABLES[subject.name].values()))


def check_vsa(ptx: str) -> None:
    case = next(case for case in vsa.CASES if case.config == "verified")
    vsa.check(dataclasses.replace(case, config="full"), emulation.schedules(), ptx)


def check_msa_k1(ptx: str) -> None:
    for schedule in emulation.schedules():
        verified_msa_k1.emulate(ptx, schedule, WITH_CLC)


WITH_CLC = dataclasses.replace(verified_msa_k1.CASE, verified=False)


@pytest.mark.parametrize(
    ("subject", "shipped", "check"),
    [
        (VSA, lambda: vsa.compiled("full"), check_vsa),
        (verified_msa_k1.MSA_K1, lambda: k1.compiled(WITH_CLC.config), check_msa_k1),
    ],
    ids=("vsa_sm100", "msa_k1_sm100"),
)
@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        ("one more", "init"),
        ("drop", "wait"),
        ("flip", "wait"),
        ("drop", "expect_tx"),
        ("halve", "expect_tx"),
    ],
)
def test_faults_in_asking_for_the_next_item(
    edit: str, kind: str, subject: Subject, shipped: Any, check: Any
):
    """The verification texts have static grids: these sites are in the shipped ones alone."""
    text = Text(shipped().ptx)
    wanted = (edit, kind, "clc_full")
    found = mutants(text, subject.schedule)
    mutant = next(m for m in found if (m.edit, m.kind, m.object) == wanted)
    ptx = normalised(mutated(mutant, text, subject.schedule))
    with pytest.raises((RuntimeError, AssertionError)):
        check(ptx)


def test_metadata_released_too_early():
    """In an item of more than eight tiles alone the store warp falls eight tiles behind."""
    subject, text = verified_msa_k1.MSA_K1, verified_msa_k1.MSA_K1.text()
    starved = {"starve": 1 << subject.schedule.role("store").first}
    case = dataclasses.replace(verified_msa_k1.CASE, queries=(90,), keys=(100,), ids="first")
    call = make_call(case)
    call.schedule = schedule_of(call.csr, Splitting(90, 8, 1))
    partials = call.partials()
    plan = verified_msa_k1.plan_of(call, partials)
    emulation.run(text.ptx, plan, **starved)
    mutant = Mutant("one less", "init", "meta_empty", "kernel", 0)
    ptx = normalised(mutated(mutant, text, subject.schedule))
    with pytest.raises(RuntimeError):
        emulation.run(ptx, plan, **starved)


# ---- the edits, on a small text ---------------------------------------------------------------

SMALL = Schedule(
    roles=(Role("consumer", 0, 4, 64), Role("producer", 4, 1, 64)),
    barriers=(
        Barrier("full", 2, once("producer"), ("consumer",), "", 4096),
        Barrier("empty", 2, lanes("consumer"), ("producer",), ""),
    ),
    tmem=(),
    smem=(Region("data", 64),),
)
PTX = """\
\t.loc\t1 5 1
\tmov.b32 %r9, 128;
\tmbarrier.init.shared.b64 [%r1+80], %r9;
\tadd.s32 %r2, %r1, 64;
\t{
\t.reg .pred P1;
WAIT:
\tmbarrier.try_wait.parity.shared.b64 P1, [%r2], %r3, 10000000;
\t@P1 bra.uni DONE;
\tbra.uni WAIT;
DONE:
\t}
\tst.shared.b32 [%r1+16], %r4;
\tmov.b32 %r5, 1;
\tmbarrier.arrive.shared.b64 %rd1, [%r1+80], %r5;
\tmov.b32 %r6, 4096;
\tmbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2+8], %r6;
\ttcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
\tret;
\t.file\t1 "nowhere/kernel.py"
"""


def edited(edit: str, kind: str, barrier: str = "") -> list[str]:
    """Return the lines that an edit adds, and after a minus those that it takes away."""
    text = Text(PTX)
    after = mutated(Mutant(edit, kind, barrier, "kernel", 0), text, SMALL).splitlines()
    added = [line.strip() for line in after if line not in text.lines]
    gone = [f"-{line.strip()}" for line in text.lines if line not in after]
    return [line for line in added + gone if line.strip("-")]


def test_sites_are_named_by_their_barriers():
    kinds = {(m.kind, m.object) for m in mutants(Text(PTX), SMALL)}
    assert kinds == {
        ("init", "empty"),
        ("wait", "full"),
        ("shared store", ""),
        ("arrive", "empty"),
        ("expect_tx", "full"),
        ("commit", "full"),
    }


def test_edits():
    wait = "-mbarrier.try_wait.parity.shared.b64 P1, [%r2], %r3, 10000000;"
    assert edited("drop", "wait", "full") == ["setp.eq.s32 P1, 0, 0;", wait]
    assert edited("flip", "wait", "full") == [
        ".reg .b32 PARITY;",
        "xor.b32 PARITY, %r3, 1;",
        "mbarrier.try_wait.parity.shared.b64 P1, [%r2], PARITY, 10000000;",
        wait,
    ]
    init = "-mbarrier.init.shared.b64 [%r1+80], %r9;"
    assert edited("one more", "init", "empty") == ["mbarrier.init.shared.b64 [%r1+80], 129;", init]
    assert edited("one less", "init", "empty") == ["mbarrier.init.shared.b64 [%r1+80], 127;", init]
    assert edited("halve", "expect_tx", "full") == [
        "mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2+8], 2048;",
        "-mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2+8], %r6;",
    ]
    assert edited("shift", "shared store") == [
        "st.shared.b32 [%r1+1040], %r4;",
        "-st.shared.b32 [%r1+16], %r4;",
    ]


def test_an_early_signal_comes_before_the_store_that_it_publishes():
    lines = mutated(Mutant("early", "arrive", "empty", "kernel", 0), Text(PTX), SMALL).splitlines()
    signal = lines.index("\tmbarrier.arrive.shared.b64 %rd1, [%r1+80], 1;")
    assert lines[signal + 1].startswith("\tst.shared.b32")


def test_a_site_that_is_gone_is_named():
    with pytest.raises(LookupError, match=r"no site for drop wait full in kernel #7; renew"):
        mutated(Mutant("drop", "wait", "full", "kernel", 7), Text(PTX), SMALL)
    with pytest.raises(ValueError, match="ptx must hold an instruction that synchronises"):
        mutants(Text("ret;\n"), SMALL)
