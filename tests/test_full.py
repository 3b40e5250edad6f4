"""The record of the whole suite is whole, shows no failure, and is what the README cites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import full
import pytest

LINE = {
    "part": "1/2",
    "commit": "0123456789",
    "passed": 1200,
    "failed": 0,
    "error": 0,
    "skipped": 3,
    "xfailed": 2,
    "xpassed": 0,
    "reasons": {"needs a CUDA device; none is present": 2, "needs b": 1},
    "seconds": 60,
    "cores": 8,
    "compiler": "nvidia-cutlass-dsl 4.8.1",
}
OTHER = {
    **LINE,
    "part": "2/2",
    "reasons": {"needs a CUDA device of capability 9.0; none is present": 3},
}


def test_the_record_is_of_a_whole_run_without_a_failure():
    lines = full.read()
    assert full.problems(lines) == []  # of the parts of a run that is not whole yet, too
    if full.missing(lines):
        pytest.skip("no whole run is on record: make test-full")
    assert sum(line["passed"] for line in lines) > 2000
    assert all(sum(line["reasons"].values()) == line["skipped"] for line in lines)


def test_a_sentence_sums_up_the_parts():
    assert full.sentence([LINE, OTHER]) == (
        "`make test-full` at commit 0123456: 2,400 passed, 0 failed, 4 failed as expected, 6 were "
        "skipped (5: needs a CUDA device; 1: needs b); 0.3 core-hours, nvidia-cutlass-dsl 4.8.1."
    )


def test_a_run_is_whole_when_each_part_is_on_record():
    assert full.missing([LINE, OTHER]) == []
    assert full.missing([LINE]) == ["2/2"]
    assert full.missing([]) == ["1/1"]
    assert full.sentence([LINE]) == full.sentence([])


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([LINE, {**OTHER, "failed": 2}], "part 2/2: 2 failed"),
        ([{**LINE, "xpassed": 1}, OTHER], "part 1/2: 1 xpassed"),
        ([LINE, {**OTHER, "commit": "9"}], "commits ['0123456789', '9']"),
    ],
)
def test_what_is_wrong_with_a_record_is_named(lines: list, problem: str):
    assert full.problems([LINE, OTHER]) == []
    assert full.problems(lines) == [problem]


def test_a_line_replaces_that_of_its_part_and_those_of_other_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(full, "TABLE", tmp_path / "full.jsonl")
    for entry in (LINE, OTHER, {**LINE, "passed": 7}):
        full.store(entry)
    assert full.read() == [{**LINE, "passed": 7}, OTHER]
    full.store({**LINE, "part": "1/1"})
    assert [line["part"] for line in full.read()] == ["1/1"]


def test_the_recorder_counts_outcomes(tmp_path, monkeypatch):
    """Over two processes, a module that is skipped whole included."""
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_skipped(): pytest.skip('no device')\n"
        "@pytest.mark.xfail\n"
        "def test_known(): assert False\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_broken(broken): pass\n"
    )
    (tmp_path / "test_b.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    recorder = full.Recorder()
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    arguments = ["-q", "-p", "no:cacheprovider", "-n", "2", "--rootdir", str(tmp_path)]
    assert pytest.main([*arguments, str(tmp_path)], plugins=[recorder]) == 1
    assert recorder.counts == {
        "passed": 1,
        "failed": 1,
        "error": 1,
        "skipped": 2,
        "xfailed": 1,
        "xpassed": 0,
    }
    assert recorder.reasons["no device"] == 1


def test_the_processes_of_a_run_collect_the_same_tests_in_the_same_order():
    """A set of kernel configurations once gave each process an order of its own: nothing ran."""

    def collected(seed: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            str(Path(__file__).parent),
        ]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [line for line in run.stdout.splitlines() if "::" in line]

    first = collected("1")
    assert len(first) > 2000
    assert first == collected("2")
