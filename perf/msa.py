"""An MSA layer end to end, its stages, and dense attention: bf16, causal, 64/4 heads, top 16.

Method: one process; one sequence; one index key head; heads of 128. The choice of blocks, the
output of the whole call, of K1 and K2 through `sparse_atten_func`, and of the two stage by stage
are first compared with float64 on tokens chosen at random, all their heads and keys. Then the whole
call (`minimax_sparse_attention`), each stage on what the stage before it made, and the rivals run
in turn, in rounds that begin with another one each: as a CUDA graph of one call (graph_us; of
several where one has few tokens, divided by their number), and, for the whole call, rivals and
what makes no graph, eagerly from an idle GPU (eager_us). Within a graph of several calls the L2
cache holds small tensors; between two graphs of a stage lie those of all others.

"CSR + schedule" is `prepare`, "K1 + K2" `sparse_atten_func` on what it returned; K1 and K2 alone
are all chunks of query tokens one after the other, in one workspace. An edge is a token, a KV head
and a chosen block that holds a key which the token sees. With G query heads to a KV head, flops
counts 4 * 128 * G for each such key up to the token's own position, tile_flops 4 * 128 * 128 * G
for each edge, the local block as a whole; of dense contenders all keys up to the token's own, and
all tiles of 128 x 128 that hold one. tflops and tile_tflops (the selected-block rate) are those
over the time; that of a whole call counts no FLOPs of the index branch. partial_bytes is what K1
writes and K2 reads again; workspace_bytes the partials of the largest chunk, peak_bytes the memory
that a whole call needs beyond its inputs, the output among it. share is a stage's time over the
whole call's, ratio a contender's; overlap the mean share of a token's blocks that the token before
it chose too.

FlexAttention is given the choice, in tiles of 128 queries; flash-msa's time holds its own choice. A
contender or stage that was not timed has a row with a status and a reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perf.contest import telling_line, time_calls
from perf.judge import Verdict
from perf.msa_judge import judge_tokens, wrong_choice
from perf.msa_layer import BLOCK, HEAD_DIM, Case, Layer, Work, draw_layer, measure_choice
from perf.msa_rivals import RIVALS, Rival
from perf.progress import note, shapes
from perf.rivals import UnsupportedError
from perf.rows import RowWriter, clocks
from perf.timing import occupy
from sparse_atten import TokenSelection, explain, preload, prepare, sparse_atten_func
from sparse_atten.contracts import options_of
from sparse_atten.cute_kernels.msa_arguments import Partials
from sparse_atten.msa import (
    block_max_scores,
    device,
    index_branch,
    merge_partials,
    minimax_sparse_attention,
    partial_attention,
    select_blocks,
)
from sparse_atten.preparation import PreparedSelection, partial_bytes
from sparse_atten.reference import Result

DEVICE = "cuda"
GRAPH_TOKENS = 32768  # of the calls of a graph together, at least
LSE_BYTES = 4
WHOLE, ATTENTION, KERNELS = "minimax_sparse_attention", "CSR + schedule + K1 + K2", "K1 + K2"
ATTEND = ("K1", KERNELS, ATTENTION, WHOLE)  # what computes the FLOPs of the choice
CASES = (
    *(Case(tokens) for tokens in (4096, 8192, 16384, 32768, 65536, 131072)),
    Case(32768, "smooth"),
)
QUICK = (Case(8192),)

Calls = dict[str, Callable[[], object]]


class Entry(NamedTuple):
    """A call to time; `verdict` where its output was checked."""

    call: Callable[[], object]
    verdict: Verdict | None = None
    flops: tuple[int, int] | None = None  # of the pairs, of the blocks
    rival: bool = False


class Absent(NamedTuple):
    """Why a call is not timed."""

    status: str
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--backend", default="auto", help="as for sparse_atten_func")
    parser.add_argument("--rivals", help="names with commas between; default: all")
    parser.add_argument("--workspace-mib", type=int, help="bound on the partials of a chunk")


def run(arguments: argparse.Namespace, writer: RowWriter) -> None:
    """Measure the lengths and write a row for each stage and contender."""
    names = [rival.name for rival in RIVALS]
    wanted = names if arguments.rivals is None else [x for x in arguments.rivals.split(",") if x]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise SystemExit(f"no rival {', '.join(unknown)}; there are {', '.join(names)}")
    rivals = [rival for rival in RIVALS if rival.name in wanted]
    ours_failed = False
    for case in shapes(QUICK if arguments.quick else CASES, arguments.only):
        for row in measure_case(case, rivals, arguments):
            writer.write(row)
            if row["status"] != "ok":
                note(f"{case.name}: {row['backend']} {row['status']}: {row['reason']}")
            failed = row["status"] in ("wrong", "failed")
            ours_failed |= failed and row["backend"] not in names
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    if ours_failed:
        raise SystemExit("a stage of this package failed: see the rows")


def measure_case(
    case: Case, rivals: list[Rival], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Check and time one length."""
    layer = draw_layer(case, torch.Generator(DEVICE).manual_seed(arguments.seed))
    selection = layer.select()
    lists = selection.q2k_indices
    work = measure_choice(lists)
    bound = None if arguments.workspace_mib is None else arguments.workspace_mib << 20
    prepared = prepare(selection, layer.q, layer.k, max_workspace_bytes=bound)
    found: dict[str, Entry | Absent] = {
        **index_stages(layer, lists),
        **attention_stages(layer, prepared, work, backend=arguments.backend, bound=bound),
        **{rival.name: admit_rival(rival, layer, lists, work) for rival in rivals},
    }
    entries = {name: entry for name, entry in found.items() if isinstance(entry, Entry)}
    repeats = max(1, GRAPH_TOKENS // case.tokens)
    eager = [name for name, entry in entries.items() if entry.rival or name == WHOLE]
    times = time_calls(
        {name: entry.call for name, entry in entries.items()},
        arguments.samples,
        repeats=repeats,
        eager=eager,
    )
    common = {
        **describe_case(case, layer, prepared, work),
        "samples": arguments.samples,
        "repeats": repeats,
        "peak_bytes": peak_bytes(entries[WHOLE].call) if WHOLE in entries else None,
        "clocks": clocks_at_work(entries, times),
    }
    rows = []
    for name, entry in found.items():
        if isinstance(entry, Absent):
            rows.append({**common, "backend": name, **entry._asdict()})
        else:
            rows.append({**common, **timed_row(name, entry, times)})
    return rows


def describe_case(
    case: Case, layer: Layer, prepared: PreparedSelection, work: Work
) -> dict[str, Any]:
    """Fields that say what was computed, and in how much memory."""
    largest = max(chunk.num_tokens for chunk in prepared.chunks)
    row_bytes = HEAD_DIM * layer.q.element_size() + LSE_BYTES
    return {
        "case": case.name,
        "heads": case.heads[0],
        "kv_heads": case.heads[1],
        "tokens": case.tokens,
        "topk": case.topk,
        "kind": case.kind,
        "edges": work.edges,
        "overlap": work.overlap,
        "chunks": len(prepared.chunks),
        "workspace_bytes": largest * partial_bytes(layer.q, case.topk),
        "partial_bytes": work.edges * layer.group * row_bytes,
    }


def index_stages(layer: Layer, lists: Tensor) -> dict[str, Entry | Absent]:
    """Calls of the index branch, by stage and as a whole, if they make the right choice."""
    fields = layer.fields
    scores = block_max_scores(layer.q_idx, layer.k_idx, **fields)
    chosen = select_blocks(scores, topk=layer.topk, **fields).q2k_indices
    names = ("scores", "top-k", "index branch")
    wrong = [wrong_choice(lists, layer), wrong_choice(chosen, layer)]
    reasons = dict(zip(names, (wrong[1], wrong[1], wrong[0]), strict=True))
    calls: Calls = {
        "scores": lambda: block_max_scores(layer.q_idx, layer.k_idx, **fields),
        "top-k": lambda: select_blocks(scores, topk=layer.topk, **fields),
        "index branch": lambda: index_branch(layer.q_idx, layer.k_idx, topk=layer.topk, **fields),
    }
    return {
        name: Entry(call) if reasons[name] is None else Absent("wrong", str(reasons[name]))
        for name, call in calls.items()
    }


def attention_stages(
    layer: Layer, prepared: PreparedSelection, work: Work, *, backend: str, bound: int | None
) -> dict[str, Entry | Absent]:
    """Calls of the attention, by stage and as a whole, if their outputs are right."""
    selection = prepared.selection
    assert isinstance(selection, TokenSelection)
    found: dict[str, Entry | Absent] = {
        "CSR + schedule": Entry(
            lambda: prepare(selection, layer.q, layer.k, max_workspace_bytes=bound)
        )
    }
    absent = None
    try:
        chosen = preload(*layer.inputs, selection, causal=True, backend=backend)
        if chosen == "reference" != backend:
            passed_over = explain(*layer.inputs, selection, causal=True).passed_over
            reason = f"backend {backend!r} takes the reference: {passed_over}"
            absent = Absent("unsupported", reason)
    except NotImplementedError as error:
        absent = Absent("unsupported", str(error))
    # A kernel that does not compile must not end the measurement of the rivals.
    except Exception as error:
        absent = Absent("failed", telling_line(error))
    if absent is not None:
        return {**found, **dict.fromkeys(("K1", "K2", KERNELS, ATTENTION, WHOLE), absent)}
    attend = partial(sparse_atten_func, *layer.inputs, causal=True, backend=backend)
    k1, k2, merged = kernel_calls(layer, prepared, reference=chosen == "reference")
    more = {"max_workspace_bytes": bound}
    checked: dict[str, tuple[Callable[[], object], Callable[[], Tensor]]] = {
        "K1": (k1, merged),
        "K2": (k2, merged),
        KERNELS: (lambda: attend(prepared),) * 2,
        ATTENTION: (lambda: attend(selection, **more),) * 2,
        WHOLE: (lambda: whole_call(layer, backend, bound),) * 2,
    }
    flops = flops_of(layer, work)
    for name, (call, output) in checked.items():
        entry = admit(call, output, layer, selection.q2k_indices)
        if isinstance(entry, Entry) and name in ATTEND:
            entry = entry._replace(flops=flops)
        found[name] = entry
    return found


def whole_call(layer: Layer, backend: str, bound: int | None) -> Tensor:
    """The layer from index queries to output."""
    out = minimax_sparse_attention(
        *layer.inputs,
        layer.q_idx,
        layer.k_idx,
        topk=layer.topk,
        backend=backend,
        max_workspace_bytes=bound,
        **layer.fields,
    )
    assert isinstance(out, Tensor)
    return out


def kernel_calls(
    layer: Layer, prepared: PreparedSelection, *, reference: bool
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], Tensor]]:
    """K1 over all chunks; K2 over all chunks, of whatever is in the workspace; both in turn."""
    q, chunks = layer.q, prepared.chunks
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    options = options_of(q, causal=True, softmax_scale=None, lse_temperature=None, return_lse=False)
    largest = max(chunk.num_tokens for chunk in chunks)
    dtype = torch.float32 if reference else q.dtype
    flat = q.new_empty(layer.topk * largest * q.shape[1] * HEAD_DIM, dtype=dtype)
    flat_lse = q.new_empty(layer.topk * largest * q.shape[1], dtype=torch.float32)

    def partials(chunk: int) -> Partials:
        shape = layer.topk, chunks[chunk].num_tokens, q.shape[1]
        rows = shape[0] * shape[1] * shape[2]
        o = flat[: rows * HEAD_DIM].view(*shape, HEAD_DIM)
        return Partials(o, flat_lse[:rows].view(shape))

    def k1(chunk: int) -> None:
        target = partials(chunk)
        if not reference:
            device.attend_blocks(layer.inputs, prepared, chunks[chunk], options, target)
            return
        values = partial_attention(*layer.inputs, prepared, causal=True, chunk=chunk)
        target.o.copy_(values[0])
        target.lse.copy_(values[1])

    def k2(chunk: int) -> None:
        source, part = partials(chunk), chunks[chunk]
        if not reference:
            device.merge(source, part, Result(out, lse, None))
            return
        values = merge_partials(source.o, source.lse, part.schedule.split_counts)
        out[part.tokens].copy_(values[0])

    def both() -> Tensor:
        for chunk in range(len(chunks)):
            k1(chunk)
            k2(chunk)
        return out

    def all_of(stage: Callable[[int], None]) -> Callable[[], object]:
        return lambda: [stage(chunk) for chunk in range(len(chunks))]

    return all_of(k1), all_of(k2), both


def admit(
    call: Callable[[], object], output: Callable[[], Tensor], layer: Layer, lists: Tensor | None
) -> Entry | Absent:
    """Check what a contender computes."""
    try:
        verdict = judge_tokens(output(), layer, lists)
    # Whatever one contender does must not end the measurement of the others.
    except Exception as error:
        return Absent("failed", telling_line(error))
    if not verdict.right:
        reason = f"error {verdict.max_error:.3g} over the budget {verdict.budget:.3g}"
        return Absent("wrong", reason)
    return Entry(call, verdict)


def admit_rival(rival: Rival, layer: Layer, lists: Tensor, work: Work) -> Entry | Absent:
    """Prepare and check a rival."""
    reason = rival.missing()
    if reason is not None:
        return Absent("missing", reason)
    try:
        candidate = rival.prepare(layer, lists)
    except UnsupportedError as error:
        return Absent("unsupported", str(error))
    except Exception as error:
        return Absent("failed", telling_line(error))
    if candidate.lists is not None and candidate.lists is not lists:
        work = measure_choice(candidate.lists)
    entry = admit(candidate.call, candidate.call, layer, candidate.lists)
    if isinstance(entry, Absent):
        return entry
    flops = dense_flops(layer) if candidate.dense else flops_of(layer, work)
    return entry._replace(flops=flops, rival=True)


def flops_of(layer: Layer, work: Work) -> tuple[int, int]:
    """FLOPs of the chosen keys that are seen, and of the chosen blocks."""
    per_key = 4 * HEAD_DIM * layer.group
    return per_key * work.keys, per_key * BLOCK * work.edges


def dense_flops(layer: Layer) -> tuple[int, int]:
    """FLOPs of all keys that are seen, and of the tiles of 128 x 128 that hold them."""
    tokens, heads = layer.tokens, layer.q.shape[1]
    blocks = -(-tokens // BLOCK)
    per_pair = 4 * HEAD_DIM * heads
    return (
        per_pair * tokens * (tokens + 1) // 2,
        per_pair * BLOCK * BLOCK * blocks * (blocks + 1) // 2,
    )


def timed_row(name: str, entry: Entry, times: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Times and rates of a call, and what they are of the whole call's."""
    own, whole = times[name], times.get(WHOLE, {})
    row: dict[str, Any] = {"backend": name, "status": "ok", **own}
    if entry.verdict is not None:
        row["max_error"], row["error_budget"] = entry.verdict[:2]
    if entry.flops is not None:
        microseconds = own.get("graph_us", own.get("eager_us", []))[0]
        row["flops"], row["tile_flops"] = entry.flops
        row["tflops"], row["tile_tflops"] = (x / microseconds / 1e6 for x in entry.flops)
    for kind in ("graph", "eager"):
        if f"{kind}_us" in own and f"{kind}_us" in whole:
            what = "ratio" if entry.rival else "share"
            row[f"{kind}_{what}"] = own[f"{kind}_us"][0] / whole[f"{kind}_us"][0]
    return row


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Device memory that a call takes at most, beyond what was taken before it."""
    if DEVICE != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def clocks_at_work(
    entries: dict[str, Entry], times: dict[str, dict[str, list[float]]]
) -> dict[str, float] | None:
    """Read the clocks while the device runs the whole call, or what else there is."""
    for name in (WHOLE, *entries):
        if "eager_us" in times.get(name, {}):
            occupy(entries[name].call, times[name]["eager_us"][0])
            break
    return clocks()
