"""The README shows what the records render to; what was emulated is the present text."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readme_shows_the_records():
    assert matrix.render(README) == README, "renew it: python tests/matrix.py"


def test_every_kernel_and_module_has_a_row():
    for name in ("vsa_sm100", "msa_k2", "csr", "scheduler", "topk"):
        assert README.count(f"\n| `{name}` |") == 1


def test_what_was_emulated_is_the_present_text():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")
    import emulate
    from emulate import suites

    present = suites()
    for name, stored in emulate.read().items():
        suite = present[name]
        assert stored["cases"] == len(suite.cases), f"python tests/emulate.py {name}"
        if suite.compiler() == stored["compiler"]:
            assert stored["digest"] == suite.digest(), f"python tests/emulate.py {name}"
