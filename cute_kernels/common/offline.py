"""Compile a kernel without a GPU, in a process of its own.

CuTe-DSL reads the architecture from the environment when it is imported, so each architecture needs
a fresh process. The parent never imports it here.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_atten.cute_kernels.common.env import child_environment
from sparse_atten.cute_kernels.common.target import Target

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_WARNING = re.compile(r"^ *warning(?:\[nvvm-diag:|: \[)(\w+)\]", re.MULTILINE)
# Attributes of .nv.info, those of a kernel included.
_REGISTER_COUNT, _FRAME_SIZE, _BARRIERS, _MBARRIERS = 0x2F, 0x11, 0x4C, 0x38


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel.

    Parameters
    ----------
    ptx, ir : str
        PTX text with the Python lines that it comes from, and MLIR text.
    cubin : bytes
        The ELF image.
    registers : int
        Registers of a thread at launch, before any setmaxnreg.
    stack_bytes : int
        Local memory of a thread: spills and arrays; 0 in a kernel that is fit to ship.
    barriers, mbarriers : int
        Named barriers of a CTA, and mbarriers that it initialises.
    static_smem_bytes : int
        Shared memory of a CTA beside what a launch asks for: what the system reserves, too.
    warnings : frozenset of str
        Codes of the diagnostics of nvvm, such as "C1".
    """

    ptx: str
    ir: str
    cubin: bytes
    registers: int
    stack_bytes: int
    barriers: int
    mbarriers: int
    static_smem_bytes: int
    warnings: frozenset[str]


@functools.cache
def compile_offline(module: str, config: Any, target: Target) -> Compiled:
    """Compile ``module.compile_kernel(config, options)`` for a target; results are kept.

    Raises
    ------
    RuntimeError
        The compiler failed; the message ends with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="sparse_atten_") as folder:
        result = Path(folder) / "compiled.pickle"
        environment = child_environment(
            CUTE_DSL_ARCH=target.arch,
            CUTE_DSL_KEEP="ir",
            CUTE_DSL_DUMP_DIR=folder,
            CUTE_DSL_DISABLE_FILE_CACHING="1",
            CUTE_DSL_COMPILER_OPT="warnings{nvvm}",
            CUTE_DSL_LINEINFO="1",  # directives only: no instruction differs
        )
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(result)],
            input=pickle.dumps((module, config, target.arch)),
            env=environment,
            cwd=folder,
            capture_output=True,
            check=False,
        )
        log = _ANSI.sub("", (child.stdout + child.stderr).decode(errors="replace"))
        if child.returncode:
            raise RuntimeError(f"compiling {module} for {target.arch} failed:\n{log[-4000:]}")
        ptx, ir, cubin = pickle.loads(result.read_bytes())
    sections = _sections(cubin)
    attributes = _attributes(cubin, sections)
    return Compiled(
        ptx,
        ir,
        cubin,
        registers=attributes[_REGISTER_COUNT],
        stack_bytes=attributes[_FRAME_SIZE],
        barriers=attributes.get(_BARRIERS, 0),
        mbarriers=attributes.get(_MBARRIERS, 0),
        static_smem_bytes=sum(
            size for name, _, size in sections if re.match(r"\.nv\.shared\.(?!reserved)", name)
        ),
        warnings=frozenset(_WARNING.findall(log)),
    )


def _sections(cubin: bytes) -> list[tuple[str, int, int]]:
    """List the sections of a cubin: name, offset, size."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 40)
    count, names_index = struct.unpack_from("<HH", cubin, 60)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, sections_at + 64 * i) for i in range(count)
    ]
    names_at = sections[names_index][4]
    return [
        (cubin[names_at + name :].split(b"\0", 1)[0].decode(), start, size)
        for name, _, _, _, start, size, *_ in sections
    ]


def _attributes(cubin: bytes, sections: list[tuple[str, int, int]]) -> dict[int, int]:
    """Read the attributes of a cubin with one kernel: the largest value of each."""
    attributes: dict[int, int] = {}
    for name, start, size in sections:
        if not name.startswith(".nv.info"):
            continue
        at = start
        while at < start + size:
            kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            value = length  # of one or two bytes, stored in place
            if kind == 4:  # `length` bytes follow: a symbol and a value, or a list
                value = struct.unpack_from("<II", cubin, at)[1] if length == 8 else 0
                at += length
            attributes[attribute] = max(value, attributes.get(attribute, 0))
    return attributes


def _child(result: Path) -> None:
    module, config, arch = pickle.load(sys.stdin.buffer)
    kernel = importlib.import_module(module)
    compiled = kernel.compile_kernel(config, f"--gpu-arch {arch} --keep-ptx --keep-cubin")
    made = (compiled.__ptx__.rstrip("\0"), str(compiled.__mlir__), bytes(compiled.__cubin__))
    result.write_bytes(pickle.dumps(made))


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
