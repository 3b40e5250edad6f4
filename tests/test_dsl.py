"""Compiled kernels come from memory, then from the disk cache, then from the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sparse_atten.cute_kernels.common import dsl
from sparse_atten.cute_kernels.common.target import Target

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile a kernel")

KERNEL = "sparse_atten.cute_kernels.vsa_sm100"

# One process an architecture: the DSL reads it when it is imported.
SCRIPT = f"""
import os
from unittest import mock
from sparse_atten.cute_kernels import vsa_sm100
from sparse_atten.cute_kernels.common import dsl
from sparse_atten.cute_kernels.common.target import Target
config, target = vsa_sm100.Config(), Target("sm_100a")
with mock.patch.object(dsl, "_compile", wraps=dsl._compile) as compiler:
    first = dsl.build("{KERNEL}", config, target)
    again = dsl.build("{KERNEL}", config, target)
print(first[:4] == b"\\x7fELF", first == again, compiler.call_count, os.listdir())
"""


def test_a_second_process_loads_what_the_first_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    empty = tmp_path / "elsewhere"  # the compiler's dumps must not stay where a user is
    empty.mkdir()
    printed = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            cwd=empty,
        ).stdout.split()
        for _ in range(2)
    ]
    assert printed == [["True", "True", "1", "[]"], ["True", "True", "0", "[]"]]


def test_a_capture_is_refused_where_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"call sparse_atten\.preload\(\) with the same"):
        dsl.load_kernel(KERNEL, "a config that nobody loaded", Target(), torch.device("cuda", 0))


def test_any_change_of_a_source_is_another_key(tmp_path, monkeypatch):
    (tmp_path / "kernel.py").write_text("a = 1\n")
    monkeypatch.setattr(dsl, "_SOURCES", tmp_path)
    before = dsl._fingerprint.__wrapped__()
    assert before == dsl._fingerprint.__wrapped__()
    (tmp_path / "kernel.py").write_text("a = 2\n")
    assert dsl._fingerprint.__wrapped__() != before
