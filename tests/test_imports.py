"""Importing the package needs no GPU, no driver and no DSL, and costs little beside torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("cutlass", "cuda", "triton", "flash_attn", "matplotlib", "av", "torch._inductor")

FRESH = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import sparse_atten, sparse_atten.vsa, sparse_atten.msa, sparse_atten.nsa
import sparse_atten.topk, sparse_atten.csr, sparse_atten.scheduler, sparse_atten.packing
import sparse_atten.cute_kernels
took = time.perf_counter() - start
new = set(sys.modules) - before
heavy = [m for m in sys.argv[1:] if any(n == m or n.startswith(m + ".") for n in new)]
print(f"{took:.3f}", *heavy)
"""


def _run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout


def test_a_fresh_process_imports_nothing_heavy():
    seconds, *heavy = _run(FRESH, *HEAVY).split()
    assert not heavy
    assert float(seconds) < 2.0


def test_the_dsl_and_the_driver_may_be_absent():
    blocked = """
import sys
for name in ("cutlass", "cuda", "triton"):
    sys.modules[name] = None
import torch, sparse_atten
q = torch.randn(1, 1, 4, 8)
ids = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
selection = sparse_atten.BlockSelection(ids, ids[..., 0] + 1, block_size=4)
dense = torch.nn.functional.scaled_dot_product_attention(q, q, q)
print((sparse_atten.sparse_atten_func(q, q, q, selection) - dense).abs().max().item())
"""
    assert float(_run(blocked)) < 1e-6


def test_the_version_is_that_of_the_metadata():
    code = """
import importlib.metadata, sparse_atten
print(sparse_atten.__version__ == importlib.metadata.version("sparse-atten"))
"""
    assert _run(code).strip() == "True"


def test_layers_import_downwards_only():
    """From interface to {csr, packing, scheduler, topk} to cute_kernels to cute_kernels/common."""
    above = {
        "cute_kernels/common": ("contracts", "attention", "csr", "scheduler", "topk", "vsa", "msa"),
        "cute_kernels": ("contracts", "attention", "csr", "scheduler", "topk", "vsa", "msa"),
        "packing": ("contracts", "attention", "csr", "scheduler", "topk", "vsa", "msa", "dispatch"),
        "csr": ("contracts", "attention", "scheduler", "topk", "vsa", "msa", "dispatch"),
        "scheduler": ("contracts", "attention", "topk", "vsa", "msa", "dispatch"),
        "topk": ("contracts", "attention", "csr", "scheduler", "vsa", "msa", "dispatch"),
    }
    for folder, forbidden in above.items():
        for path in (ROOT / folder).glob("*.py"):
            text = path.read_text()
            for name in forbidden:
                assert f"from sparse_atten.{name}" not in text, (path, name)
            assert "from sparse_atten import" not in text, path
