"""What is verified of the modules in CUDA C++: a small launch of each kernel for SentryWard.

Kernels of a call run one after the other on the emulator, so that each launch comes with what its
input tables hold at that moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import sentry
import test_block_topk
import torch
from device_cases import packed
from emulation import SCHEDULES, emulator
from torch import Tensor

from sparse_atten.csr import device as csr
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.nvrtc import Program
from sparse_atten.cute_kernels.common.steps import Step
from sparse_atten.scheduler import device as scheduler
from sparse_atten.scheduler.reference import splitting_of
from sparse_atten.topk import plan as topk

CAPABILITY = (10, 0)
_BITS = {"i": 32, "I": 32, "q": 64, "P": 64}


@dataclass(frozen=True)
class CudaLaunch:
    """A launch: the text, the kernel's name and signature, the plan, its input tables."""

    ptx: str
    kernel: str
    signature: str
    plan: LaunchPlan
    contents: Mapping[int, Sequence[int]]

    def prove(self, *, seconds: float = 600) -> sentry.Verdict:
        """Let SentryWard check it."""
        pointers = [i for i, code in enumerate(self.signature) if code == "P"]
        return sentry.prove(
            self.ptx,
            self.plan,
            self.contents,
            seconds=seconds,
            kernel=self.kernel,
            pointers=pointers,
        )


@cache
def ptx_of(program: Program) -> str:
    """Compile for the architecture that SentryWard knows."""
    return program.compile(CAPABILITY).ptx


class _Recorder:
    """Runs steps on the emulator, and keeps the first launch of each kernel."""

    def __init__(self, program: Program, signatures: Mapping[str, str]) -> None:
        self.program, self.signatures = program, signatures
        self.launches: dict[str, CudaLaunch] = {}

    def bind(self, steps: Sequence[Step]) -> Callable[..., None]:
        def run(*bases: int) -> None:
            for step in steps:
                self.run(step, step.values(bases))

        return run

    def run(self, step: Step, given: Sequence[float | bytes]) -> None:
        text, codes = ptx_of(self.program), _codes(self.signatures[step.kernel])
        values = [
            value % 2 ** _BITS[code] if isinstance(value, int) else value
            for value, code in zip(given, codes, strict=True)
        ]
        tables = _inputs(self.program.source, step.kernel)
        contents = {i: words for i in tables if values[i] for words in _words(values[i])}
        plan = LaunchPlan(step.grid, step.block, (1, 1, 1), step.shared_bytes, tuple(values))
        made = CudaLaunch(text, step.kernel, codes, plan, contents)
        self.launches.setdefault(step.kernel, made)
        shape = step.grid, step.block, step.shared_bytes
        emulator().run_ptx(text, step.kernel, *shape, values, **SCHEDULES[0])


def _codes(signature: str) -> str:
    """Return one letter for each parameter: a struct of n bytes is "ns" in a signature."""
    return re.sub(r"\d+s", "s", signature)


def _inputs(source: str, kernel: str) -> list[int]:
    """Return the parameters of integer tables that a kernel only reads."""
    head = re.search(rf"__global__[^;{{]*?\b{kernel}\((.*?)\)\s*\{{", source, re.DOTALL)
    names = head.group(1).split(",")
    return [i for i, name in enumerate(names) if re.match(r"\s*const (?!float)\w+\*", name)]


def _words(address: int) -> Iterator[list[int]]:
    """Yield the words of the CPU tensor that an address lies in, from there on."""
    import gc

    for x in gc.get_objects():
        if type(x) is Tensor and x.device.type == "cpu":
            memory = x.untyped_storage()
            start = address - memory.data_ptr()
            if 0 <= start < memory.nbytes():
                whole = torch.empty(0, dtype=torch.uint8).set_(memory)[start:]
                yield whole[: len(whole) // 4 * 4].clone().view(torch.int32).tolist()
                return


@cache
def _csr() -> dict[str, CudaLaunch]:
    recorder = _Recorder(csr.program(False), csr.SIGNATURES)
    make = torch.Generator().manual_seed(0)
    for keys in (256, 1290 * 128):  # one pass; several
        tables = packed(make, [8], [keys], width=2, heads=1)
        csr.csr_on_device(tables, recorder.bind, is_wide=False)
    ids = torch.tensor([[[[0, 1], [1, -1], [2, 0]]]], dtype=torch.int32)
    counts = torch.tensor([[[2, 1, 2]]], dtype=torch.int32)
    run = recorder.bind(csr.lists_steps(ids, counts, 3, 0))
    csr.lists_on_device(ids, counts, 3, run)
    return recorder.launches


@cache
def _scheduler() -> dict[str, CudaLaunch]:
    recorder = _Recorder(scheduler.program(False), scheduler.SIGNATURES)
    make = torch.Generator().manual_seed(0)
    for keys in (256, 1290 * 128):
        tables = packed(make, [8], [keys], width=2, heads=1)
        shape = tuple(tables.q2k_indices.shape)
        split = splitting_of(shape, num_rows=tables.num_rows, num_q_heads=16, num_sms=4)
        found, _ = scheduler.csr_and_schedule_on_device(tables, split, recorder.bind, is_wide=False)
        scheduler.schedule_on_device(found, split, recorder.bind)
    own = scheduler.SIGNATURES.keys() - csr.SIGNATURES.keys()
    return {name: made for name, made in recorder.launches.items() if name in own}


# One case for each way that scores lie.
_TOPK_CASES = (
    ("rows", "rows_33_16"),
    ("columns", "columns_40"),
    ("rows", "long_1025_16"),
    ("rows", "parts"),
)


@cache
def _topk() -> dict[str, CudaLaunch]:
    found: dict[str, CudaLaunch] = {}
    for name, case in _TOPK_CASES:

        def run(config: topk.Config, step: Step, values: list, name: str = name) -> None:
            recorder = _Recorder(topk.program(config), topk.SIGNATURES)
            recorder.run(step, values)
            kernel = step.kernel.removeprefix("block_topk_")
            found[f"{kernel} of {name}"] = recorder.launches[step.kernel]

        test_block_topk.run_steps(test_block_topk.CASES[case], run)
    return found


MODULES: dict[str, Callable[[], dict[str, CudaLaunch]]] = {
    "csr": _csr,
    "scheduler": _scheduler,
    "topk": _topk,
}
