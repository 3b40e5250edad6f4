"""CUTLASS's CuTe-DSL examples for Blackwell, compiled without a GPU from a checkout.

Usage: python cutlass_examples.py EXAMPLE FOLDER writes kernel.ptx and kernel.mlir to the folder.
CUTLASS_CHECKOUT names the checkout; its files are imported from there.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "CUTLASS_CHECKOUT"
EXAMPLES = Path(os.environ.get(VARIABLE, "")) / "examples/python/CuTeDSL"
GEMM = (512, 512, 256)  # M, N, K
FMHA = {"batch": 1, "queries": 256, "keys": 384, "heads": 2, "group": 2, "width": 128}
# Constants that host functions of the tutorial GEMMs take besides their tensors: active clusters.
_GEMM_CONSTANTS = {"3": (2,), "3_1": (2,), "4": (2, 2), "5": (2,)}


class Kernel(NamedTuple):
    """Text and intermediate code."""

    ptx: str
    mlir: str


@functools.cache
def compiled(example: str) -> Kernel:
    """Compile "gemm 0" to "gemm 5", "fmha none" or "fmha causal" in a process of its own.

    Raises
    ------
    RuntimeError
        The compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": "sm_100a",
            "CUTE_DSL_KEEP": "ir,ptx",
            "CUTE_DSL_DUMP_DIR": folder,
        }
        done = subprocess.run(
            [sys.executable, __file__, example, folder],
            env=environment,
            cwd=folder,
            capture_output=True,
            check=False,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"compiling {example} failed:\n{done.stderr[-3000:]}")
        at = Path(folder)
        return Kernel((at / "kernel.ptx").read_text(), (at / "kernel.mlir").read_text())


class _Hardware:
    """Stands for the query of a device: only two numbers are asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_device_multiprocessor_count(self, *args: Any, **kwargs: Any) -> int:
        return 148

    def get_max_active_clusters(self, *args: Any, **kwargs: Any) -> int:
        return 74


def _tensor(dtype: Any, *shape: int) -> Any:
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=32)


def _compile_gemm(number: str) -> Any:
    from cutlass import cute

    sys.path.insert(0, str(EXAMPLES / "cute/blackwell/tutorial/tutorial_gemm"))
    module = importlib.import_module(f"fp16_gemm_{number}")
    m, n, k = GEMM
    tensors = [_tensor(module.io_dtype, *shape) for shape in ((m, k), (n, k), (m, n))]
    return cute.compile(module.host_function, *tensors, *_GEMM_CONSTANTS.get(number, ()))


def _compile_fmha(mask: str) -> Any:
    import cutlass
    from cuda.bindings import driver
    from cutlass import Float32, Int32, cute

    sys.path.insert(0, str(EXAMPLES / "cute/blackwell/kernel/attention/fmha"))
    fmha = importlib.import_module("fmha")
    batch, queries, keys, heads, group, width = FMHA.values()
    forward = fmha.BlackwellFusedMultiHeadAttentionForward(
        Float32,
        Float32,
        (128, 128),
        width,
        False,
        fmha.fmha_utils.MaskEnum.WINDOW_MASK,
        False,
        False,
    )
    sizes = (batch, queries, queries, keys, heads * group, heads, width, width)
    scale = 1 / math.sqrt(width)
    right = Int32(0) if mask == "causal" else None

    @cute.jit
    def host(q, k, v, out, stream):
        forward(
            *(q, k, v, out, sizes, None, None, None, None),
            *(Float32(scale * math.log2(math.e)), Float32(scale), Float32(1.0)),
            *(None, None, right, None, None, stream, False),
        )

    q = _tensor(cutlass.Float16, batch, queries, heads, group, width)
    k, v = (_tensor(cutlass.Float16, batch, keys, heads, 1, width) for _ in range(2))
    return cute.compile(host, q, k, v, q, driver.CUstream(0))


def _child(example: str, folder: Path) -> None:
    import cutlass.utils

    cutlass.utils.HardwareInfo = _Hardware
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "cute")]
    kind, which = example.split()
    made = _compile_gemm(which) if kind == "gemm" else _compile_fmha(which)
    (folder / "kernel.ptx").write_text(made.__ptx__.rstrip("\0"))
    (folder / "kernel.mlir").write_text(str(made.__mlir__))


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
