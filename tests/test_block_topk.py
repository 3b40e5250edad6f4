"""The kernels of topk/*.cu against the torch reference, bit for bit.

Everywhere: each shipped config compiles for each architecture without spills, and the launch plan
holds for odd layouts. The PTX runs on the emulator (see emulation.py); with a GPU, the
public function runs. Both take the same cases.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from emulation import SCHEDULES, emulator

from sparse_atten.cute_kernels.common.steps import Step
from sparse_atten.topk import block_topk, plan, preload
from sparse_atten.topk.block_topk import _layout, step_of
from sparse_atten.topk.reference import check_request, largest_blocks

NAN, INF, TINY = math.nan, math.inf, 2.0**-149
DEFAULTS = {
    "k": None,
    "dim": -1,
    "valid_counts": None,
    "local_blocks": None,
    "first_blocks": 0,
    "last_blocks": 0,
    "regions": None,
    "keep_spans": (),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def few_finite(n: int, finite: int) -> torch.Tensor:
    row = torch.full((n,), -INF)
    row[torch.randperm(n, generator=generator())[:finite]] = torch.randn(
        finite, generator=generator(1)
    )
    return row


def hard_row(name: str, n: int) -> torch.Tensor:
    """Return one row of n scores that selection by digits, counts or pivots may get wrong."""
    draw = generator(n)
    pool = torch.tensor([NAN, INF, -INF, 1.0, -NAN, 0.0, -0.0, TINY, -TINY, 3e38, -3e38])
    return {
        "random": lambda: torch.randn(n, generator=draw),
        "all_equal": lambda: torch.ones(n),
        "two_values": lambda: torch.randint(0, 2, (n,), generator=draw).float(),
        "few_finite": lambda: few_finite(n, min(n, 10)),
        "clustered": lambda: 1 + 0.001 * torch.rand(n, generator=draw),
        "outliers": lambda: torch.where(torch.arange(n) % 97 == 5, 3.0, 1.0),
        "neighbours": lambda: (
            torch.randint(0, 3, (n,), generator=draw, dtype=torch.int32) + 0x3F800000
        ).view(torch.float32),
        "denormals": lambda: TINY * torch.randint(-40, 40, (n,), generator=draw).float(),
        "signed_zeros": lambda: torch.tensor([-0.0, 0.0]).repeat(n)[:n],
        "special": lambda: pool[torch.randint(0, len(pool), (n,), generator=draw)],
        "all_nan": lambda: torch.full((n,), NAN),
        "descending": lambda: torch.arange(n, 0, -1).float(),
        "ascending": lambda: torch.arange(n).float(),
        "negative": lambda: -torch.rand(n, generator=draw) * 1e-30,
        "tiny_range_huge_range": lambda: torch.where(
            torch.arange(n) % 2 == 0, 1e30 * torch.rand(n, generator=draw), 1e-38
        ),
    }[name]()


HARD = (
    "random",
    "all_equal",
    "two_values",
    "few_finite",
    "clustered",
    "outliers",
    "neighbours",
    "denormals",
    "signed_zeros",
    "special",
    "all_nan",
    "descending",
    "ascending",
    "negative",
    "tiny_range_huge_range",
)


def hard_rows(n: int) -> torch.Tensor:
    return torch.stack([hard_row(name, n) for name in HARD])


def msa_case(n: int, queries: int, **options) -> dict:
    """Block-max scores [H, n, Tq] with a causal bound and a local block for each query."""
    scores = torch.randn(2, n, queries, generator=generator())
    scores[1] = hard_rows(n)[torch.arange(queries) % len(HARD)].T
    local = (torch.arange(queries) * n // max(1, queries)).to(torch.int32)
    return {
        "scores": scores,
        "k": 16,
        "dim": 1,
        "valid_counts": local + 1,
        "local_blocks": local,
        "first_blocks": 1,
        **options,
    }


def strided_case() -> dict:
    """Five axes, none of them contiguous with the next, in an order unlike that of memory."""
    storage = torch.randn(4, 6, 90, 4, 10, generator=generator())
    scores = storage.permute(3, 0, 4, 1, 2)[::2, 1:, ::3, :, 5:]
    valid = torch.randint(0, 95, (3, 1, 6), generator=generator(1), dtype=torch.int32)
    return {"scores": scores, "k": 9, "valid_counts": valid, "last_blocks": 2}


def video_case(n: int, spans: int) -> dict:
    """Regions and kept spans in turn, with gaps, each with another budget."""
    length = n // spans
    bounds = [(i * length, i * length + length - 1) for i in range(spans)]
    regions = [(*bound, 1 + 3 * i % 11) for i, bound in enumerate(bounds) if i % 3]
    return {"scores": hard_rows(n), "regions": regions[::-1], "keep_spans": bounds[::3]}


CASES = {
    **{
        f"rows_{n}_{k}": {"scores": hard_rows(n), "k": k}
        for n, k in (
            (1, 1),
            (33, 16),
            (64, 16),
            (65, 1),
            (128, 40),
            (256, 16),
            (300, 512),
            (512, 33),
            (720, 72),
            (1000, 97),
            (1024, 16),
            (1024, 300),
        )
    },
    **{
        f"long_{n}_{k}": {"scores": hard_rows(n), "k": k}
        for n, k in ((1025, 16), (2112, 16), (4096, 512), (8192, 12))
    },
    "parts": {"scores": hard_rows(20000), "k": 64, "valid_counts": int32([19999])},
    "parts_forced": {
        "scores": hard_rows(17000),
        "k": 16,
        "valid_counts": int32([8193]),
        "local_blocks": int32([8192]),
        "first_blocks": 3,
        "last_blocks": 2,
    },
    **{f"columns_{n}": msa_case(n, 45) for n in (1, 40, 128, 256, 400, 1024)},
    "columns_ends": msa_case(130, 33, k=5, last_blocks=3, first_blocks=4),
    "columns_long": msa_case(1500, 40, k=100),
    "columns_regions": {
        **msa_case(600, 20, k=None, local_blocks=None, first_blocks=0),
        "regions": [(0, 200, 8), (300, 599, 70)],
        "keep_spans": [(210, 230)],
    },
    "few_queries": msa_case(300, 3),
    "strided": strided_case(),
    "repeated": {"scores": torch.randn(3, 1, generator=generator()).expand(3, 70), "k": 5},
    "video_90_3": video_case(90, 3),
    "video_720_7": video_case(720, 7),
    "video_1000_100": video_case(1000, 100),
    "video_long": video_case(5000, 4),
    "one_region": {"scores": hard_rows(100), "regions": [(11, 83, 7)]},
    "one_long_region": {"scores": hard_rows(20000)[:3], "regions": [(11, 19000, 7)]},
    "no_region": {"scores": hard_rows(10), "regions": []},
    "forced_beyond_k": {
        "scores": hard_rows(50),
        "k": 3,
        "first_blocks": 2,
        "last_blocks": 2**40,
        "local_blocks": int32(20),
    },
    "odd_bounds": {
        "scores": hard_rows(70),
        "k": 6,
        "valid_counts": torch.arange(-2, 13, dtype=torch.int32) * 9,
        "local_blocks": torch.arange(-2, 13, dtype=torch.int32) * (2**27 + 1),
        "first_blocks": 1,
        "last_blocks": 1,
    },
}


def expected(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    options = {**DEFAULTS, **case}
    scores, k = options.pop("scores"), options.pop("k")
    request = check_request(scores, k, **options)
    kept = ("valid_counts", "local_blocks", "first_blocks", "last_blocks")
    return largest_blocks(scores, request, **{name: options[name] for name in kept})


def plan_of(case: dict) -> tuple[plan.Plan, int]:
    options = {**DEFAULTS, **case}
    scores, k = options.pop("scores"), options.pop("k")
    request = check_request(scores, k, **options)
    made = plan.make_plan(
        request,
        tuple(scores.shape),
        scores.stride(),
        valid=_layout(options["valid_counts"]),
        local=_layout(options["local_blocks"]),
        first_blocks=options["first_blocks"],
        last_blocks=options["last_blocks"],
    )
    return made, request.width


def emulate(case: dict, schedule: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the plan of a case on an emulator, in poisoned memory."""
    emu = emulator()

    def run(config: plan.Config, step: Step, values: list) -> None:
        shape = step.grid, step.block, step.shared_bytes
        emu.run_ptx(ptx(config), step.kernel, *shape, values, **schedule)

    return run_steps(case, run)


def run_steps(case: dict, run: Callable[[plan.Config, Step, list], None]) -> tuple:
    """Let `run` execute the launches of a case, in poisoned memory; returns ids and counts."""
    made, width = plan_of(case)
    scores, dim = case["scores"], case.get("dim", -1)
    rows = scores.movedim(dim, -1).shape[:-1]
    indices = torch.full((*rows, width), -7, dtype=torch.int32)
    counts = torch.full(rows, -7, dtype=torch.int32)
    workspace = torch.full((made.workspace_bytes + 8,), 0xEE, dtype=torch.uint8)
    tensors = (
        scores,
        case.get("valid_counts"),
        case.get("local_blocks"),
        indices,
        counts,
        workspace,
    )
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    for launch in made.launches:
        step = step_of(launch, width)
        run(launch.config, step, step.values(pointers))
    return indices, counts


PTX: dict[plan.Config, str] = {}


def ptx(config: plan.Config) -> str:
    if config not in PTX:
        PTX[config] = plan.program(config).compile((9, 0)).ptx
    return PTX[config]


def assert_same(result: tuple, wanted: tuple) -> None:
    assert torch.equal(result[1].cpu(), wanted[1])
    assert torch.equal(result[0].cpu(), wanted[0])


SPILLS_BEFORE_13_5 = (plan.Config(0, 0, 1, 32, 32, 128), (9, 0), 8)  # seen with NVRTC 13.0


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)], ids=str)
@pytest.mark.parametrize("config", plan.CONFIGS, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.slow
def test_every_config_compiles_without_spills(config, capability):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")
    compiled = plan.program(config).compile(capability)
    assert "warning" not in compiled.log
    threads = config.threads or (32 * config.group if config.columns else 256)
    for name, found in compiled.resources.items():
        assert found.registers * threads <= 65536, name
        if found.spill_bytes and capability[0] == 10 and config.items >= 24:
            pytest.xfail(f"24 and 32 blocks a lane spill on sm_10x: {found.spill_bytes} bytes")
        old = nvrtc.nvrtcVersion()[1:] < (13, 5)
        if old and (config, capability, found.spill_bytes) == SPILLS_BEFORE_13_5:
            pytest.xfail("the widest rows of regions spill 8 bytes with NVRTC before 13.5")
        assert found.spill_bytes == 0, name


def test_the_widest_choice_fits_shared_memory():
    assert max(c.shared_bytes(512) for c in plan.CONFIGS if c.tile) <= 227 << 10


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[2]], ids=["plain", "hostile"])
@pytest.mark.parametrize("name", CASES)
def test_the_ptx_equals_the_reference(name, schedule):
    assert_same(emulate(CASES[name], schedule), expected(CASES[name]))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", ["rows_256_16", "columns_128", "long_2112_16", "columns_long"])
def test_no_schedule_changes_a_result(name, schedule):
    assert_same(emulate(CASES[name], schedule), expected(CASES[name]))


def test_pieces_of_the_rows_make_the_whole(monkeypatch):
    monkeypatch.setattr(plan, "_MAX_ROWS", 20)
    for name in ("columns_40", "strided"):
        assert len(plan_of(CASES[name])[0].launches) > 1
        assert_same(emulate(CASES[name], {}), expected(CASES[name]))


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("rows_1024_16", ["block_topk_short"]),
        ("long_1025_16", ["block_topk_long"]),
        ("parts", ["block_topk_parts", "block_topk_merge"]),
        ("columns_1024", ["block_topk_short"]),
        ("columns_long", ["block_topk_long"]),
        ("video_1000_100", ["block_topk_short"] * 4),
    ],
)
def test_the_kernels_of_a_plan(name, kernels):
    assert [launch.kernel for launch in plan_of(CASES[name])[0].launches] == kernels


def test_scores_of_the_msa_layout_are_read_along_the_queries():
    (launch,) = plan_of(CASES["columns_256"])[0].launches
    assert launch.config.columns == 1
    (launch,) = plan_of(CASES["few_queries"])[0].launches
    assert launch.config.columns == 0


def test_the_workspace_is_bounded():
    scores = torch.empty(3, 1 << 20, device="meta")
    made, _ = plan_of({"scores": scores, "k": 512})
    assert 0 < made.workspace_bytes <= 264 * 512 * 8
    assert plan_of({"scores": torch.empty(5000, 1 << 14, device="meta"), "k": 512})[0][1] == 0


def test_offsets_past_32_bits():
    scores = torch.empty(1, device="meta").as_strided(
        (5, 4, 3, 2, 64), (2**40, 2**36, 2**34, 64, 1)
    )
    made, width = plan_of({"scores": scores, "k": 4})
    starts = [step_of(launch, width).values([0] * 6)[0] for launch in made.launches]
    assert starts == [4 * 2**40 * i for i in range(5)]


@pytest.mark.parametrize(
    "shape", [(0,), (2, 0), (0, 5), (3, 0, 4)], ids=lambda shape: "x".join(map(str, shape))
)
def test_no_rows_or_no_blocks(shape):
    if math.prod(shape[:-1]) == 0:
        return
    case = {"scores": torch.empty(shape), "k": 4, "first_blocks": 1}
    assert_same(emulate(case, {}), expected(case))


def to_cuda(case: dict) -> dict:
    """Move a case to the GPU; the layouts of its tensors stay."""

    def move(value):
        if not torch.is_tensor(value):
            return value
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        flat = value.as_strided((span if value.numel() else 0,), (1,)).cuda()
        return flat.as_strided(value.shape, value.stride())

    return {name: move(value) for name, value in case.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_equals_the_reference_without_a_synchronisation(name):
    case = to_cuda(CASES[name])
    block_topk(**case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [block_topk(**case) for _ in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = expected(CASES[name])
    for result in results:
        assert_same(result, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4000, 256), (999, 1024), (64, 5000), (2, 1 << 20), (1, 70000)])
@pytest.mark.parametrize("k", [1, 16, 72, 512])
def test_random_rows_on_the_gpu(shape, k):
    scores = torch.randn(shape, generator=generator(k))
    scores = torch.where(torch.rand(shape, generator=generator(1)) < 0.3, scores.round(), scores)
    assert_same(block_topk(scores.cuda(), k), expected({"scores": scores, "k": k}))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    scores = torch.zeros(2_300_000, 1024, device="cuda")
    scores[-1, 5] = scores[-1, 900] = scores[2_200_000, 77] = 1.0
    indices, counts = block_topk(scores, 2)
    assert indices[-1].tolist() == [5, 900]
    assert indices[2_200_000].tolist() == [0, 77]
    assert indices[123_456].tolist() == [0, 1]
    assert (counts == 2).all()
    columns = scores.T
    assert torch.equal(block_topk(columns, 2, dim=0)[0], indices)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rows_256_16", "columns_256", "long_4096_512", "parts"])
def test_a_captured_call_follows_its_inputs(name):
    case = to_cuda(CASES[name])
    preload("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = block_topk(**case)
    case["scores"].copy_(case["scores"].flip(-1).clone())
    result[0].fill_(-7)
    graph.replay()
    changed = {**CASES[name], "scores": case["scores"].cpu()}
    assert_same(result, expected(changed))


@pytest.mark.gpu
def test_streams_and_threads_do_not_meet():
    cases = [CASES[name] for name in ("rows_256_16", "columns_256", "parts", "video_90_3")]
    results = [None] * len(cases)
    on_device = [to_cuda(case) for case in cases]
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                results[i] = block_topk(**on_device[i])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, case in zip(results, cases, strict=True):
        assert_same(result, expected(case))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_of_the_scores_is_used():
    scores = torch.randn(100, 300, generator=generator())
    with torch.cuda.device(0):
        result = block_topk(scores.to("cuda:1"), 7)
    assert result[0].device == torch.device("cuda:1")
    assert_same(result, expected({"scores": scores, "k": 7}))
