"""K2, the merge of partials: what the compiler made of it, and its numbers.

On an emulator everywhere, and on a GPU where there is one. The oracle is the merge in float64, one
row at a time in Python.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import emulation
import pytest
import torch
from machine_code import opcodes
from ptx_text import normalised
from torch import Tensor

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernel")

from sparse_atten.cute_kernels import msa_k2
from sparse_atten.cute_kernels.common.dsl import config_name, load_kernel
from sparse_atten.cute_kernels.common.planned import PlannedLaunch
from sparse_atten.cute_kernels.common.target import Target, target_of
from sparse_atten.cute_kernels.msa_k2 import Config
from sparse_atten.cute_kernels.msa_k2_arguments import arguments_of

TARGETS = {arch: Target(arch, num_sms=1) for arch in ("sm_90a", "sm_100a", "sm_103a")}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}  # relative error, at most
HEAD_DIM = 128


@dataclass(frozen=True)
class Case:
    """One merge. `counts` repeats over [Tq, Hkv]; slots past a count hold NaN."""

    name: str
    counts: tuple[int, ...]
    width: int = 16
    queries: int = 9
    heads: tuple[int, int] = (4, 2)  # Hq, Hkv
    config: Config = Config()  # noqa: RUF009
    spread: float = 3.0  # of the LSEs
    centre: float = 0.0
    invisible: float = 0.0  # share of the filled slots with LSE -inf and a NaN output
    strided: bool = False


CASES = (
    Case("full", (16,)),
    Case("counts 0 to all", (0, 1, 16, 7, 2, 15)),
    Case("nothing", (0,)),
    Case("one slot", (1, 0), width=1, config=Config(window=4)),
    Case("counts out of range", (-3, 99, 2**31 - 1, -(2**31), 5)),
    Case("several windows", (37, 0, 16, 17, 33, 40), width=40),
    Case("several windows of 8", (3, 8, 9, 0), width=11, config=Config(window=8)),
    Case("top 4", (4, 3, 0, 1), width=4, config=Config(window=4)),
    Case("invisible partials", (16, 9, 3, 1), invisible=0.6),
    Case("no visible partial", (16, 5), invisible=1.0),
    Case("large LSEs", (16, 2), spread=1e4, centre=2e4),
    Case("far apart", (16, 3), spread=300.0),
    Case("temperature", (16, 0, 5), config=Config(temperature=True), invisible=0.2),
    Case(
        "strides",
        (16, 4, 0, 9),
        queries=20,
        heads=(6, 2),
        strided=True,
        config=Config(temperature=True, ctas_per_sm=1),
    ),
    Case("fp16", (16, 0, 3), config=Config(partial="fp16", out="fp16"), invisible=0.2),
    Case("fp32 in, bf16 out", (16, 0, 3), config=Config(partial="fp32")),
    Case("fp32 in, fp32 out", (20, 3), width=20, config=Config(partial="fp32", out="fp32")),
    Case("bf16 in, fp32 out", (16, 3), config=Config(out="fp32"), strided=True),
    Case("one head", (5, 16, 0), heads=(1, 1), queries=11),
    Case("odd heads", (5, 16, 0), heads=(9, 3), queries=5),
    Case("GQA 16", (16, 2), heads=(32, 2), queries=3),
    Case("many rows of a CTA", (16, 2, 0), queries=40, config=Config(ctas_per_sm=1)),
    Case("dependent launch", (16, 2), config=Config(programmatic=True)),
)
QUICK = {
    "counts 0 to all",
    "counts out of range",
    "several windows",
    "invisible partials",
    "strides",
    "fp32 in, bf16 out",
    "odd heads",
}


@dataclass(frozen=True)
class Merge:
    """A case with its tensors."""

    case: Case
    o_partial: Tensor
    lse_partial: Tensor
    lse_t_partial: Tensor | None
    split_counts: Tensor

    def outputs(self) -> dict[str, Tensor | None]:
        """NaN where the kernel writes: the output and its LSEs."""
        num_heads = self.o_partial.shape[2]
        lse = torch.full((self.case.queries, num_heads), math.nan, device=self.o_partial.device)
        out = lse[..., None].repeat(1, 1, HEAD_DIM).to(TYPES[self.case.config.out])
        if self.case.strided:
            out = out.transpose(0, 1).contiguous().transpose(0, 1)
            lse = lse.repeat(1, 2)[:, ::2]
        warm = lse.clone() if self.lse_t_partial is not None else None
        return {"out": out, "lse": lse, "lse_t": warm}


def make_merge(case: Case, device: str = "cpu", seed: int = 0) -> Merge:
    make = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = case.heads
    shape = (case.width, case.queries, num_heads)
    repeated = itertools.islice(itertools.cycle(case.counts), case.queries * num_kv_heads)
    counts = torch.tensor(list(repeated), dtype=torch.int32).view(case.queries, num_kv_heads)
    o_partial = torch.randn(*shape, HEAD_DIM, generator=make)
    lses = case.centre + case.spread * torch.randn(2, *shape, generator=make)
    invisible = torch.rand(shape, generator=make) < case.invisible
    slots = torch.arange(case.width)[:, None, None]
    absent = slots >= counts.repeat_interleave(num_heads // num_kv_heads, 1)
    lses.masked_fill_(invisible, -math.inf).masked_fill_(absent, math.nan)
    o_partial.masked_fill_((invisible | absent)[..., None], math.nan)
    o_partial = o_partial.to(TYPES[case.config.partial])
    lse_partial, lse_t_partial = lses
    if case.strided:  # heads outermost, and a row of a wider one
        wide = o_partial.permute(2, 1, 0, 3).repeat(1, 1, 1, 2)
        o_partial = wide[..., :HEAD_DIM].permute(2, 1, 0, 3)
        lse_partial = lse_partial.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        counts = counts.t().contiguous().t()
    return Merge(
        case,
        o_partial.to(device) if device != "cpu" else o_partial,
        lse_partial.to(device) if device != "cpu" else lse_partial,
        lse_t_partial.to(device) if case.config.temperature else None,
        counts.to(device) if device != "cpu" else counts,
    )


def arguments(merge: Merge, outputs: dict[str, Tensor | None]):
    return arguments_of(
        merge.o_partial,
        merge.lse_partial,
        merge.split_counts,
        outputs["out"],
        lse=outputs["lse"],
        lse_t_partial=merge.lse_t_partial,
        lse_t=outputs["lse_t"],
    )


def check(merge: Merge, outputs: dict[str, Tensor | None]) -> None:
    """Compare with the float64 merge, row by row."""
    width, num_queries, num_heads, _ = merge.o_partial.shape
    group = num_heads // merge.split_counts.shape[1]
    outputs = {name: None if x is None else x.cpu().double() for name, x in outputs.items()}
    counts = merge.split_counts.tolist()
    tensors = (merge.o_partial, merge.lse_partial, merge.lse_t_partial)
    partial, lses, warm = (None if x is None else x.cpu().double() for x in tensors)
    # The output is rounded once; products, sums and weights are those of float32.
    rounding = ROUNDING[merge.case.config.out]
    for token, head in itertools.product(range(num_queries), range(num_heads)):
        used = slice(0, min(max(counts[token][head // group], 0), width))
        visible = lses[used, token, head] != -math.inf
        kept = lses[used, token, head][visible]
        parts = partial[used, token, head][visible]
        exact, allowed = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
        if kept.numel():
            exact = kept.softmax(0) @ parts
            allowed = rounding * exact.abs() + 2e-6 * parts.abs().amax(0)
        gap = (outputs["out"][token, head] - exact).abs()
        assert bool((gap <= allowed).all()), f"out[{token}, {head}] is off by {gap.max():.3g}"
        for name, given in (("lse", lses), ("lse_t", warm)):
            if given is None:
                assert outputs[name] is None
                continue
            want = float(given[used, token, head].logsumexp(0)) if used.stop else -math.inf
            got = float(outputs[name][token, head])
            assert got == want or abs(got - want) <= 1e-5 + 3e-7 * abs(want), (name, token, head)


def emulated(case: Case, arch: str, schedules: list[dict[str, int]]) -> None:
    """Run a case in every schedule and residency; compare with the oracle and among themselves."""
    merge = make_merge(case)
    compiled = msa_k2.compile_offline(case.config, TARGETS[arch])
    patterns = set()
    for resident, schedule in itertools.product((1, 4), schedules):
        outputs = merge.outputs()
        plan = msa_k2.launch_plan(case.config, TARGETS[arch], arguments(merge, outputs))
        stats = emulation.run(compiled.ptx, plan, resident=resident, **schedule)
        assert stats["warnings"] == []
        check(merge, outputs)
        found = [x for x in outputs.values() if x is not None]
        patterns.add(b"".join(x.contiguous().float().numpy().tobytes() for x in found))
    assert len(patterns) == 1, "the output depends on the schedule"


@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda case: case.name)
def test_numbers(case: Case):
    emulated(case, "sm_90a", emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_of_all_cases(case: Case, arch: str):
    emulated(case, arch, emulation.sample())


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda case: case.name)
def test_numbers_in_every_schedule(case: Case):
    emulated(case, "sm_90a", emulation.schedules())


@pytest.mark.slow
@pytest.mark.parametrize("config", dict.fromkeys(case.config for case in CASES), ids=config_name)
def test_the_text_for_sm103_is_that_for_sm100(config: Config):
    texts = [
        normalised(msa_k2.compile_offline(config, TARGETS[arch]).ptx).replace(arch, "arch")
        for arch in ("sm_100a", "sm_103a")
    ]
    assert texts[0] == texts[1]


def test_offsets_past_2_to_the_31():
    """Slots 2^31 elements apart; only the ends of the memory are touched."""
    case = Case("far", (2, 1), width=2, queries=3, heads=(2, 2))
    merge = make_merge(case)
    far, near = 2**31, merge.o_partial[0].numel()
    memory = torch.empty(far + near, dtype=torch.bfloat16)
    shape, strides = merge.o_partial.shape, merge.o_partial.stride()
    distant = memory.as_strided(shape, (far, *strides[1:])).copy_(merge.o_partial)
    merge = replace(merge, o_partial=distant)
    outputs = merge.outputs()
    plan = msa_k2.launch_plan(case.config, TARGETS["sm_90a"], arguments(merge, outputs))
    emulation.run(msa_k2.compile_offline(case.config, TARGETS["sm_90a"]).ptx, plan)
    check(merge, outputs)


CONFIGS = (
    Config(),
    Config(partial="fp32"),
    Config(temperature=True, ctas_per_sm=1),
    Config(temperature=True, programmatic=True),
    Config(window=4),
    Config(window=8),
    Config(partial="fp16", out="fp16"),
    Config(partial="fp32", out="fp32", temperature=True),
)
FITS = [(arch, config) for arch in TARGETS for config in CONFIGS]


@pytest.mark.parametrize(
    ("arch", "config"),
    [*FITS[:3], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in FITS[3:])],
)
def test_compiled_kernel_fits(arch: str, config: Config):
    result = msa_k2.compile_offline(config, TARGETS[arch])
    print(f"{arch} {config}: {result.registers} registers, {result.stack_bytes} bytes of stack")
    assert result.warnings == set()
    assert result.stack_bytes == 0, "spills or local memory"
    assert ".local" not in result.ptx
    assert result.registers * config.threads * 2 <= 65536, "two CTAs would not fit"
    assert ("griddepcontrol.wait" in result.ptx) == config.programmatic


@pytest.mark.parametrize("config", [Config(), Config(partial="fp32")], ids=["bf16", "fp32"])
def test_loads_of_a_window_are_in_flight_together(config: Config, tmp_path: Path):
    """In SASS no use of a slot's output stands between the loads of a window."""
    found = opcodes(msa_k2.compile_offline(config, TARGETS["sm_90a"]).cubin, tmp_path)
    loads = [i for i, name in enumerate(found) if name.startswith("LDG") and "128" in name]
    assert len(loads) == config.window
    between = {name.split(".")[0] for name in found[loads[0] : loads[-1]]}
    assert not between & {"FFMA", "FMUL", "MUFU", "SHFL", "STL", "LDL"}


def test_plan_has_the_parameters_of_the_kernel():
    merge = make_merge(CASES[0])
    config, target = CASES[0].config, Target("sm_90a", num_sms=2)
    plan = msa_k2.launch_plan(config, target, arguments(merge, merge.outputs()))
    text = msa_k2.compile_offline(config, target).ptx
    head = text[text.index(".entry") :].split(")")[0]
    assert head.count(".param") == len(plan.parameters)
    assert plan.grid == (-(-9 * 4 // 8), 1, 1)
    assert msa_k2.launch_plan(replace(config, ctas_per_sm=1), target,
                              arguments(merge, merge.outputs())).grid == (2, 1, 1)  # fmt: skip
    assert f".reqntid {plan.block[0]}" in text


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"partial": "fp8"}, r"partial must be one of .*, got 'fp8'"),
        ({"out": "fp8"}, r"out must be one of .*, got 'fp8'"),
        ({"window": 17}, r"window must be in 1\.\.16, got 17"),
        ({"threads": 48}, r"threads must be whole warps, at most 1024, got 48"),
        ({"ctas_per_sm": 0}, r"ctas_per_sm must be at least 1, got 0"),
    ],
)
def test_config_refuses(field: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Config(**field).check()


def test_arguments_refuse():
    merge = make_merge(CASES[0])
    out, row_lse, lse = merge.outputs()["out"], merge.outputs()["lse"], merge.lse_partial
    wide = torch.zeros(16, 9, 4, 256, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="o_partial must have head dim 128, got 256"):
        arguments_of(wide, lse, merge.split_counts, out, lse=row_lse)
    for rows in (wide[..., 1:129], wide[..., ::2]):
        with pytest.raises(ValueError, match="o_partial must have contiguous rows that start at"):
            arguments_of(rows, lse, merge.split_counts, out, lse=row_lse)
    with pytest.raises(ValueError, match="out must have contiguous rows that start at"):
        arguments_of(merge.o_partial, lse, merge.split_counts, wide[0][..., 4:132], lse=row_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_on_a_gpu(case: Case):
    merge, outputs = launched(case)
    check(merge, outputs)
    again = launched(case)[1]
    for name, x in outputs.items():
        assert x is None or torch.equal(x, again[name])


def launched(case: Case) -> tuple[Merge, dict[str, Tensor | None]]:
    """Run a case on the current GPU."""
    merge = make_merge(case, device="cuda")
    outputs = merge.outputs()
    target = target_of(merge.o_partial.device)
    kernel = load_kernel(msa_k2.__name__, case.config, target, merge.o_partial.device)
    plan = msa_k2.launch_plan(case.config, target, arguments(merge, outputs))
    PlannedLaunch(kernel, plan)()
    torch.cuda.synchronize()
    return merge, outputs
