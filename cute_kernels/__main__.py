"""Compile the kernels that ship ahead of time, by ``python -m sparse_atten.cute_kernels``.

They land in the cache that calls read, so that no call compiles. SPARSE_ATTEN_CACHE_DIR names
another cache; with SPARSE_ATTEN_DUMP_DIR, PTX and machine code are written there instead. No GPU is
needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from sparse_atten.cute_kernels.catalogue import Shipped, shipped
from sparse_atten.cute_kernels.common import dsl
from sparse_atten.cute_kernels.common.env import cache_dir, child_environment, dump_dir


def main() -> None:
    """List or compile what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the names, compile nothing")
    parser.add_argument("--arch", default="", help="one architecture, such as sm_100a")
    parser.add_argument("--only", default="", help="kernels with this text in their name")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    entries = shipped(options.arch, options.only)
    if options.list:
        print("\n".join(entry.name for entry in entries))
    elif options.child:
        _build(entries)
    else:
        # CuTe-DSL reads the architecture when it is imported: each has a process of its own.
        for arch in dict.fromkeys(entry.target.arch for entry in entries):
            command = [sys.executable, "-m", __package__, "--child", "--arch", arch]
            command += ["--only", options.only]
            subprocess.run(command, env=child_environment(CUTE_DSL_ARCH=arch), check=True)


def _build(entries: list[Shipped]) -> None:
    for number, entry in enumerate(entries, 1):
        start = time.monotonic()
        size = len(dsl.build(entry.module, entry.config, entry.target))
        seconds = time.monotonic() - start
        progress = f"[{number}/{len(entries)}]"
        print(f"{progress} {entry.name}: {size:,} bytes, {seconds:.1f} s", flush=True)
    print(f"in {dump_dir() or cache_dir()}")


if __name__ == "__main__":
    main()
