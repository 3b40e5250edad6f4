"""The k2q CSR and its schedule on a GPU: device time, host time, growth with edges and rows.

Method: one process. Results are first compared with the torch reference, bit for bit. Each call
then takes the next of several input sets, which together pass the L2 cache; the schedule alone is
made of one CSR. device_us is the time of one call inside a CUDA graph that holds a call for each
set; eager_us the same without a graph, by events; host_us the time until the eager call returns,
over 32 calls or more but for the reference. Kernels and the torch reference on the same GPU take
turns. prepare_read is prepare and every tensor of its result, which are made when first read.
replay_us is the host time to replay a graph of one call. A call that cannot be captured has no
graph's times. Figures are medians with the 20th and 80th percentile, in microseconds; one row for
each case.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from perf.progress import shapes
from perf.rows import RowWriter
from perf.timing import summary, try_capture
from sparse_atten import PreparedSelection, TokenSelection, prepare
from sparse_atten.csr import build_k2q_csr, row_bound
from sparse_atten.csr.reference import k2q_csr_of, key_lengths
from sparse_atten.cute_kernels.common.target import product_of
from sparse_atten.scheduler import build_csr_and_schedule, build_schedule
from sparse_atten.scheduler.reference import schedule_of, splitting_of

GROUP = 16  # query heads of a KV head
BLOCK = 128
CACHE_BYTES = 64 << 20
MOST_SETS = 32
MOST_CPU_SLOTS = 1 << 23  # larger results are compared with the torch reference on the GPU
CSR_TENSORS = ("row_ptr", "q_indices", "edge_ids", "row_coords", "num_bad_edges")
SCHEDULE_TENSORS = ("work_items", "num_items", "split_slot", "split_counts")


@dataclass(frozen=True)
class Case:
    """One shape: `keys` are those of each sequence; `hot` queries all choose one block more."""

    heads: int
    queries: int
    batch: int
    keys: int
    width: int = 16
    hot: bool = False

    @property
    def name(self) -> str:
        """Heads x queries x width, batch x keys."""
        shape = f"{self.heads}x{self.queries}x{self.width}-b{self.batch}x{self.keys}"
        return shape + ("-hot" if self.hot else "")

    @property
    def num_rows(self) -> int:
        """Rows to make room for."""
        return row_bound(self.batch, BLOCK, total_k=self.batch * self.keys)


CASES = (
    *(Case(4, n, 1, n, hot=hot) for n in (8192, 32768) for hot in (False, True)),
    *(Case(4, n, 128, n // 128, hot=hot) for n in (8192, 32768) for hot in (False, True)),
    *(Case(4, n, 128, 65536) for n in (128, 8192, 32768)),
    Case(4, 8192, 512, 16),
    Case(4, 131072, 1, 131072),
    Case(4, 131072, 1, 131072, hot=True),
    Case(4, 262144, 1, 262144),
    Case(4, 1048576, 1, 1048576),
)
QUICK = CASES[:2]


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Add no options: those of all benchmarks are enough."""


def run(arguments: argparse.Namespace, writer: RowWriter) -> None:
    """Measure the cases and write a row for each."""
    cases = QUICK if arguments.quick else CASES
    for case in shapes(cases, arguments.only):
        writer.write(measure_case(case, arguments))
        torch.cuda.empty_cache()


def draw(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Distinct random blocks for each query, as many as there are; -1 after them."""
    blocks = -(-case.keys // BLOCK)
    shape = (case.heads, case.queries, case.width)
    ids = torch.full(shape, -1, dtype=torch.int32, device="cuda")
    kept = min(blocks, case.width)
    start = torch.randint(0, blocks, shape[:2], generator=generator, device="cuda")
    step = torch.randint(0, max(blocks // kept, 1), shape[:2], generator=generator, device="cuda")
    lane = torch.arange(kept, device="cuda")
    ids[..., :kept] = ((start[..., None] + lane * (1 + step[..., None])) % blocks).int()
    if case.hot:
        ids[..., 0] = 0
    return ids


def measure_case(case: Case, arguments: argparse.Namespace) -> dict[str, object]:
    """Check one case, then time it."""
    generator = torch.Generator("cuda").manual_seed(arguments.seed)
    slots = case.heads * case.queries * case.width
    num_sets = max(2, min(MOST_SETS, -(-CACHE_BYTES // (4 * slots))))
    tables = [draw(case, generator) for _ in range(num_sets)]
    lengths = torch.full((case.batch,), case.queries // case.batch, dtype=torch.int32)
    cu_q = offsets(lengths)
    cu_k = offsets(torch.full_like(lengths, case.keys))
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    options = {"num_q_heads": GROUP * case.heads, "num_sms": num_sms}

    def fused(table: torch.Tensor) -> tuple[object, object]:
        return build_csr_and_schedule(table, cu_q, cu_k, num_rows=case.num_rows, **options)

    def csr(table: torch.Tensor) -> object:
        return build_k2q_csr(table, cu_q, cu_k, num_rows=case.num_rows)

    built = build_k2q_csr(tables[0], cu_q, cu_k, num_rows=case.num_rows)

    def schedule(_: torch.Tensor) -> object:
        return build_schedule(built, **options)

    def torch_reference(table: torch.Tensor) -> tuple[object, object]:
        return by_torch(table, cu_q, cu_k, case.num_rows, options)

    check(
        fused(tables[0]), torch_reference(tables[0].cpu() if slots <= MOST_CPU_SLOTS else tables[0])
    )
    calls = {"fused": fused, "csr": csr, "schedule": schedule, "torch_reference": torch_reference}
    prepared = prepare_call(case, cu_q, cu_k)
    if prepared is not None:
        calls["prepare"] = prepared
        calls["prepare_read"] = lambda table: tensors_of(prepared(table))

    found = time_calls(calls, tables, arguments.samples)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = fused(tables[0])
    peak = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_allocated() - before
    del outputs
    product = product_of(tables[0].device)
    floor = (
        None if product is None else 1e6 * (4 * 4 * slots + 8 * case.num_rows) / product.bandwidth
    )
    return {
        "case": f"csr-{case.name}",
        "sets": num_sets,
        "repeats": arguments.samples,
        "slots": slots,
        "rows": case.heads * case.num_rows,
        "bandwidth_floor_us": floor,
        "workspace_bytes": peak - kept,
        "workspace_bytes_per_slot": (peak - kept) / slots,
        **found,
        "rival": "torch_reference",
        "ratio": best(found["torch_reference"]) / best(found["fused"]),
    }


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of a list of lengths, on the GPU."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()


def by_torch(
    table: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    num_rows: int,
    options: dict[str, int],
) -> tuple[object, object]:
    """Build both with the reference's torch ops, on the table's device."""
    cu_q, cu_k = cu_q.to(table.device), cu_k.to(table.device)
    lengths = key_lengths(cu_k, None)
    csr = k2q_csr_of(table, cu_q, lengths, block_size=BLOCK, num_rows=num_rows)
    splitting = splitting_of(tuple(table.shape), num_rows=num_rows, **options)
    return csr, schedule_of(csr, splitting)


def prepare_call(
    case: Case, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> Callable[[torch.Tensor], PreparedSelection] | None:
    """`prepare` on tensors of the case's shape; None where keys would take too much memory."""
    if case.batch * case.keys > 1 << 21:
        return None
    q = torch.zeros(case.queries, GROUP * case.heads, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(case.batch * case.keys, case.heads, 128, dtype=torch.bfloat16, device="cuda")

    def call(table: torch.Tensor) -> PreparedSelection:
        lengths = (case.queries // case.batch, case.keys)
        return prepare(TokenSelection(table, cu_q, cu_k, *lengths), q, k)

    return call


def tensors_of(prepared: PreparedSelection) -> list[torch.Tensor]:
    """Every tensor of a CSR and its schedule."""
    csr, schedule = prepared.csr, prepared.schedule
    return [
        *(getattr(csr, name) for name in CSR_TENSORS),
        *(getattr(schedule, name) for name in SCHEDULE_TENSORS),
    ]


def check(found: tuple[object, object], expected: tuple[object, object]) -> None:
    """Stop where a tensor differs from the reference's."""
    for got, want, names in zip(found, expected, (CSR_TENSORS, SCHEDULE_TENSORS), strict=True):
        for name in names:
            if not torch.equal(
                getattr(got, name).to(getattr(want, name).device), getattr(want, name)
            ):
                raise SystemExit(f"{name} differs from the reference")


def time_calls(
    calls: dict[str, Callable[[torch.Tensor], object]], tables: list[torch.Tensor], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Time the calls in turn; microseconds of one call as [median, 20th, 80th percentile]."""
    graphs = {name: try_capture(call, tables) for name, call in calls.items()}
    single = {name: try_capture(call, tables[:1]) for name, call in calls.items()}
    samples: dict[str, dict[str, list[float]]] = {
        name: {"device_us": [], "eager_us": [], "host_us": [], "replay_us": []} for name in calls
    }
    for _ in tqdm(range(repeats), desc="rounds", file=sys.stderr):
        for name, call in calls.items():
            into = samples[name]
            rounds = 1 if name == "torch_reference" else -(-MOST_SETS // len(tables))

            def eager(call: Callable[[torch.Tensor], object] = call, rounds: int = rounds) -> None:
                for table in tables * rounds:
                    call(table)

            device, host = elapsed(eager, rounds * len(tables))
            into["eager_us"].append(device)
            into["host_us"].append(host)
            graph, one = graphs[name], single[name]
            if graph is not None and one is not None:
                into["device_us"].append(elapsed(graph.replay, len(tables))[0])
                into["replay_us"].append(elapsed(one.replay, 1)[1])
    return {
        name: {kind: summary(values) for kind, values in kinds.items() if values}
        for name, kinds in samples.items()
    }


def elapsed(work: Callable[[], object], calls: int) -> tuple[float, float]:
    """Time of a call on the device and on the host, in microseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    work()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / calls, 1e6 * host / calls


def best(times: dict[str, list[float]]) -> float:
    """Median device time, without a graph where there is none."""
    return times.get("device_us", times["eager_us"])[0]
