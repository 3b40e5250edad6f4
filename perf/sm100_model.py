"""Work of the Blackwell VSA kernel, counted on an emulator, and the bound that it implies: a model.

Usage: python perf/sm100_model.py [--json perf/results/<name>.jsonl] [--sass NAME=CUBIN ...]

Nothing here is a time or was run on a GPU.

Counts. The shipped kernel's PTX is executed through its launch plan; the emulator in tests counts
what each warp issues. Rows of 8 and of 16 KV blocks: the difference is the work of a tile step (one
row x one KV block, 128 x 128 x 128), the rest is the prologue and epilogue of a row. mov, cvta and
register packs are left out of "work" (most vanish in SASS), and a wait counts once.

Bound. Clocks of each unit at the rates in `RATES`, and a replay of the kernel's order of events on
units that run at these rates without any latency: tensor core in the order of the MMA warp, both
softmax warpgroups on one exponential unit, first come first served, the K/V ring, the hand-over of
O between rows. It starts with an empty pipeline and ends with the last row divided and stored; the
setup of a CTA (barriers, tensor memory) and every latency are left out, so a real run is slower.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from revision import git_revision
from rich.console import Console
from rich.table import Table

import sparse_atten
from sparse_atten.contracts import BlockSelection
from sparse_atten.cute_kernels import vsa_sm100
from sparse_atten.cute_kernels.common.schedule import Role
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.vsa_arguments import arguments_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import emulator
from emulator import counts
from emulator.counts import RATES

TARGET = Target("sm_100a")
CONFIG = vsa_sm100.Config(return_lse=True, kv_sizes=True, q_sizes=True)  # every table in use
TILE, MMA_K = vsa_sm100.TILE, vsa_sm100.MMA_K
TILE_BYTES = vsa_sm100.TILE_BYTES
MMA_FLOP = 2 * TILE * TILE * MMA_K
SHORT, LONG = 8, 16  # blocks of a row in the two runs
ROW_LENGTHS = (8, 16, 72)
# Name, blocks of each row, blocks that both rows keep.
SHARING = (
    ("two dense rows of 72", 72, 72),
    ("two dense rows of 8", 8, 8),
    ("video rows, 5 of 8 in common", 8, 5),
)
L2_RATES = (32, 48, 64, 96)  # bytes a clock and SM
UNITS = ("MMA", "ex2", "lanes", "SMEM operands", "SMEM fills", "L2", "issue")
CLASSES = (
    *("issued", "work", "ex2", "cubic", "f32x2", "lanes", "max lanes"),
    *("TMEM words loaded", "TMEM words stored", "MMA", "SMEM operand bytes", "TMA bytes in"),
)
# Rivals: total, softmax, correction, MMA warp, load warp without moves; ex2, cubic, f32x2; TMEM
# words loaded, stored; KiB of K and V; partial / full. Counted by the same rule on their PTX.
RIVALS = {
    "FA4 sparse, 128 rows": (2270, 2072, 44, 100, 55, 452, 64, 704, 512, 256, 64, 4.4),
    "FA4 sparse, 256 rows": (2279, 2137, 38, 76, 28, 452, 64, 704, 512, 256, 32, 4.4),
    "FA4 dense, 1 CTA": (2250, 2108, 38, 75, 29, 452, 64, 704, 512, 256, 32, None),
    "FastVideo": (2690, 2480, 40, 116, 53, 416, 96, 800, 512, 256, 64, 1.6),
    "cuDNN BSA": (3066, 2881, 38, 69, 78, 372, 144, 1200, 512, 256, 64, 1.5),
}
Work = dict[str, Counter]  # role -> class -> amount


# ---- counts --------------------------------------------------------------------------------------


def compiled(config: vsa_sm100.Config = CONFIG) -> Any:
    """Compile the shipped kernel without a GPU."""
    return vsa_sm100.compile_offline(config, TARGET)


def classify(opcode: str) -> Counter[str]:
    """Say what one issue of a PTX instruction by a warp amounts to, class by class."""
    amount = counts.classify(opcode)
    amount["f32x2"] = int("f32x2" in opcode)
    amount["cubic"] = 2 * opcode.startswith("add.rm.f32x2")  # one rounds down for each pair
    amount["max lanes"] = int(opcode.startswith("max"))
    return amount


def work_of(result: emulator.Result, roles: Iterable[Role]) -> Work:
    """Sort what a run has counted by role, in the classes of this model."""
    ranges = {role.name: range(role.first, role.last + 1) for role in roles}
    work = counts.work_of(result, ranges, classify)
    for amounts in work.values():
        amounts["TMEM words loaded"] = amounts["tmem_ld_bytes"] // 128
        amounts["TMEM words stored"] = amounts["tmem_st_bytes"] // 128
        amounts["MMA"] = amounts["mma_flop"] // MMA_FLOP
        amounts["SMEM operand bytes"] = amounts["operand_bytes"]
        amounts["TMA bytes in"] = amounts["tma_bytes_in"]
        for name in amounts.keys() - CLASSES:
            del amounts[name]
    return work


def count(rows: tuple[int, ...], size: int = TILE, config: vsa_sm100.Config = CONFIG) -> Work:
    """Run one head with a Q block for each of `rows`, lists of that many KV blocks of `size` keys.

    Raises
    ------
    RuntimeError
        The kernel issued other MMAs than 16 for each selected block, or the emulator warned.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = max(rows)

    def operand(tokens: int) -> torch.Tensor:
        values = torch.randn(1, 1, tokens, vsa_sm100.HEAD_DIM, generator=generator)
        return values.to(torch.bfloat16)

    q, k, v = operand(TILE * len(rows)), operand(TILE * blocks), operand(TILE * blocks)
    selection = BlockSelection(
        torch.arange(blocks, dtype=torch.int32).expand(1, 1, len(rows), blocks).contiguous(),
        torch.tensor(rows, dtype=torch.int32).reshape(1, 1, -1),
        layout="bhsd",
        kv_block_sizes=torch.full((blocks,), size, dtype=torch.int32),
        q_block_sizes=torch.full((len(rows),), TILE, dtype=torch.int32),
    )
    lse = torch.empty(q.shape[:3])
    arguments = arguments_of(
        q, k, v, torch.empty_like(q), selection, softmax_scale=TILE**-0.5, lse=lse
    )
    plan = vsa_sm100.launch_plan(config, TARGET, arguments)
    result = emulator.run(compiled(config).ptx, plan, counts=True)
    if result.mma != 2 * TILE // MMA_K * sum(rows) or result.findings:
        raise RuntimeError(f"{result.mma} MMAs for {sum(rows)} blocks, {result.findings}")
    work = work_of(result, vsa_sm100.SCHEDULE.roles)
    work["softmax"] = work.pop("softmax0") + work.pop("softmax1")
    return work


def marginal(size: int, config: vsa_sm100.Config = CONFIG) -> tuple[Work, Work]:
    """Return the work of one tile step, and what a row costs besides its steps."""
    short, long = (count((length,) * 4, size, config) for length in (SHORT, LONG))
    step: Work = {}
    row: Work = {}
    for role in short:
        step[role] = Counter(
            {c: (long[role][c] - short[role][c]) / (4 * (LONG - SHORT)) for c in CLASSES}
        )
        row[role] = Counter({c: short[role][c] / 4 - SHORT * step[role][c] for c in CLASSES})
    return step, row


def total(work: Work, name: str) -> float:
    """Sum a class over the roles."""
    return sum(amounts[name] for amounts in work.values())


def clocks(work: Work) -> dict[str, float]:
    """Return the clocks of an SM that each unit needs for the work."""
    return {
        "MMA": total(work, "MMA") * MMA_FLOP / RATES["MMA"],
        "ex2": 32 * total(work, "ex2") / RATES["ex2"],
        "lanes": 32 * total(work, "lanes") / RATES["lanes"],
        "issue": total(work, "work") / RATES["issue"],
        "SMEM operands": total(work, "SMEM operand bytes") / RATES["SMEM operands"],
        "SMEM fills": total(work, "TMA bytes in") / RATES["SMEM fills"],
        "L2": total(work, "TMA bytes in") / RATES["L2"],
    }


# ---- bound ---------------------------------------------------------------------------------------


class Spans(NamedTuple):
    """Clocks of the pieces of a round on units without latency."""

    qk: float  # S = Q K^T
    pv_head: float
    pv_tail: float
    maximum: float  # from S to the first exponential
    exp_head: float
    exp_tail: float
    check: float  # the correction warps look at a round's factors, none of which asks for more
    finish: float  # O / l to shared memory
    fill: float  # a tile of 32 KiB, 0 where fills are not counted


class Span(NamedTuple):
    """A piece of work of a replay."""

    unit: str
    what: str
    tile: int
    round: int  # counted from the start
    start: float
    end: float


def spans_of(step: Work, row: Work, *, fills: bool) -> Spans:
    """Derive the pieces from the counts."""
    mma = clocks(step)["MMA"] / 2
    head = vsa_sm100.KEYS_IN_HEAD / TILE
    softmax = step["softmax"]
    exponentials = 4 * TILE  # of a tile step, by warps
    alphas = softmax["ex2"] + softmax["cubic"] - exponentials
    maxima = softmax["max lanes"] - softmax["cubic"]  # a cubic clamps its argument with a max
    ex2 = 32 / RATES["ex2"]
    lane = 32 / RATES["lanes"]
    lanes_left = lane * (softmax["lanes"] - maxima)
    return Spans(
        qk=mma,
        pv_head=mma * head,
        pv_tail=mma * (1 - head),
        maximum=lane * maxima + ex2 * alphas,
        exp_head=max(ex2 * (head * exponentials - softmax["cubic"]), head * lanes_left),
        exp_tail=max(ex2 * (1 - head) * exponentials, (1 - head) * lanes_left),
        check=step["correction"]["work"] / RATES["issue"],
        finish=lane * row["correction"]["lanes"],
        fill=TILE_BYTES / min(RATES["L2"], RATES["SMEM fills"]) if fills else 0.0,
    )


@dataclass
class Replay:
    """The kernel's order of events for work items of two rows of `length` blocks each.

    Two things that the kernel does not do: `shared` blocks, placed first in both lists, are loaded
    once for both rows; with `early` a tile's first QK of the next item follows its own last PV,
    instead of the last PV of both.
    """

    spans: Spans
    length: int
    items: int = 1
    shared: int = 0
    early: bool = False
    trace: list[Span] = field(default_factory=list)

    def run(self) -> float:
        """Return the clock at which the last output has left."""
        spans = self.spans
        self._plan_loads()
        self.mma_end = 0.0
        self.exp_end = 0.0
        self.loader_end = 0.0
        self.used: dict[tuple, float] = {}  # MMA -> its end
        self.landed: dict[int, float] = {}
        self.p_head: dict[tuple[int, int], float] = {}
        self.p_tail: dict[tuple[int, int], float] = {}
        finished = [0.0, 0.0]
        for item in range(self.items):
            first = item * self.length
            for tile in (0, 1):
                if item == 0 or not self.early:
                    self._qk(tile, first)
            for r in range(first, first + self.length):
                for tile in (0, 1):
                    ready = max(self.p_head[tile, r], finished[tile] if r == first else 0.0)
                    loaded = self._load("V", tile, r)
                    head = max(self.mma_end, ready, loaded)
                    self._issue("PV head", tile, r, head, spans.pv_head)
                    tail = max(self.mma_end, self.p_tail[tile, r])
                    self._issue("PV tail", tile, r, tail, spans.pv_tail)
                    self.used["V", tile, r] = self.mma_end
                    last = r + 1 == first + self.length
                    if last:
                        finished[tile] = self.mma_end + spans.finish
                        self.trace.append(
                            Span("correction", "O / l", tile, r, self.mma_end, finished[tile])
                        )
                    if not last or (self.early and item + 1 < self.items):
                        self._qk(tile, r + 1)
        return max(finished) + spans.fill

    def _qk(self, tile: int, r: int) -> None:
        start = max(self.mma_end, self._load("Q", tile, r), self._load("K", tile, r))
        self._issue("QK", tile, r, start, self.spans.qk)
        self.used["K", tile, r] = self.used["Q", tile, r] = self.mma_end
        ready = self.mma_end + self.spans.maximum
        self.trace.append(Span(f"softmax {tile}", "max", tile, r, self.mma_end, ready))
        checked = ready + self.spans.check
        self.trace.append(Span("correction", "alpha", tile, r, ready, checked))
        start = max(ready, self.exp_end)
        self.p_head[tile, r] = max(start + self.spans.exp_head, checked)
        self.p_tail[tile, r] = self.exp_end = self.p_head[tile, r] + self.spans.exp_tail
        self.trace.append(Span(f"softmax {tile}", "P head", tile, r, start, self.p_head[tile, r]))
        self.trace.append(
            Span(f"softmax {tile}", "P tail", tile, r, self.p_head[tile, r], self.exp_end)
        )

    def _issue(self, what: str, tile: int, r: int, start: float, length: float) -> None:
        self.mma_end = start + length
        self.trace.append(Span("tensor core", what, tile, r, start, self.mma_end))

    def _plan_loads(self) -> None:
        """List the loads in the order of the load warp, each with the MMAs that read it."""
        self.loads: list[list[tuple]] = []
        self.load_of: dict[tuple, int] = {}

        def add(what: str, tile: int, r: int) -> None:
            key = (what, tile, r)
            if what != "Q" and tile == 1 and r % self.length < self.shared:
                self.load_of[key] = self.load_of[what, 0, r]
                self.loads[self.load_of[key]].append(key)
            else:
                self.load_of[key] = len(self.loads)
                self.loads.append([key])

        def open_row(tile: int, r: int) -> None:
            add("Q", tile, r)
            add("K", tile, r)

        rounds = self.items * self.length
        for r in range(rounds):
            if r % self.length == 0 and (r == 0 or not self.early):
                open_row(0, r)
                open_row(1, r)
            for tile in (0, 1):
                add("V", tile, r)
                if (r + 1) % self.length:
                    add("K", tile, r + 1)
                elif self.early and r + 1 < rounds:
                    open_row(tile, r + 1)
        self.ring = [i for i, readers in enumerate(self.loads) if readers[0][0] != "Q"]
        self.place = {load: i for i, load in enumerate(self.ring)}

    def _load(self, what: str, tile: int, r: int) -> float:
        """Return when a tile has landed; the loads before it are issued first."""
        if what == "Q" and r % self.length:
            return 0.0
        last = self.load_of[what, tile, r]
        for load in range(len(self.landed), last + 1):
            start = max(self.loader_end, self._free(load))
            self.landed[load] = self.loader_end = start + self.spans.fill
            kind, owner, of_round = self.loads[load][0]
            self.trace.append(Span("TMA", kind, owner, of_round, start, self.loader_end))
        return self.landed[last]

    def _free(self, load: int) -> float:
        """Return when a load's place is free: a slot of the ring, or the tile's Q buffer."""
        kind, tile, r = self.loads[load][0]
        if kind == "Q":
            return self.used["K", tile, r - 1] if r else 0.0
        before = self.place[load] - vsa_sm100.KV_SLOTS
        if before < 0:
            return 0.0
        return max(self.used[reader] for reader in self.loads[self.ring[before]])


def bound(spans: Spans, length: int, **options: Any) -> tuple[float, float]:
    """Return clocks / MMA clocks of a lone work item, and of one more item of a busy CTA."""
    mma = 2 * length * (spans.qk + spans.pv_head + spans.pv_tail)
    ends = [Replay(spans, length, items, **options).run() for items in (1, 4, 8)]
    return ends[0] / mma, (ends[2] - ends[1]) / (4 * mma)


def one_port(step: Work, length: int, shared: int) -> float:
    """Return the bound / MMA if operand reads and fills passed one port of 128 bytes a clock."""
    unit = clocks(step)
    fill = TILE_BYTES / RATES["SMEM fills"]
    fills = (2 * (2 * length - shared) + 2) * fill  # K and V, and two tiles of Q
    port = 2 * length * unit["SMEM operands"] + fills
    return max(port / (2 * length * unit["MMA"]), 1.0)


# ---- SASS ----------------------------------------------------------------------------------------


def disassembler() -> Path | None:
    """Find nvdisasm of the wheel nvidia-cuda-nvdisasm, in any of its layouts."""
    for folder in map(Path, sys.path):
        for path in folder.glob("nvidia/*/bin/nvdisasm"):
            return path
    return None


def sass(cubin: bytes, tool: Path) -> tuple[list[str], dict[str, int]]:
    """Disassemble: opcodes and operands in order, and where each label points."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], check=True, capture_output=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.decode().splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return code, labels


def sass_row(name: str, cubin: bytes, tool: Path) -> dict[str, Any]:
    """Describe the softmax loop: the smallest one that holds a row's exponentials.

    A branch over stores to tensor memory that come before the scores are loaded is the mask of a
    partial block; its instructions are counted apart. Registers are the highest number in the code
    from one setmaxnreg to the next, as roles lie; waits that follow the last exit are left out.
    """
    code, labels = sass(cubin, tool)
    opcodes = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for text in code]
    jumps = [
        (i, labels[found[1]])
        for i, text in enumerate(code)
        if (found := re.search(r"\bBRA.*?(\.L_x_\d+)", text)) and found[1] in labels
    ]
    loops = [(target, i + 1) for i, target in jumps if target <= i]
    body = min(
        (loop for loop in loops if opcodes[slice(*loop)].count("MUFU.EX2") >= TILE * 3 // 4),
        key=lambda loop: loop[1] - loop[0],
    )
    read = next(i for i in range(*body) if opcodes[i].startswith("LDTM"))
    masks = [end - i - 1 for i, end in jumps if body[0] <= i < end <= read]
    stored = any(op.startswith("STTM") for op in opcodes[body[0] : read])
    mask = max(masks, default=0) if stored else 0
    length = body[1] - body[0]
    end = max(i for i, op in enumerate(opcodes) if op == "EXIT")
    cuts = [i for i, op in enumerate(opcodes) if op.startswith("USETMAXREG")]
    registers = [
        1 + max((int(n) for n in re.findall(r"\bR(\d+)\b", "\n".join(code[a:b]))), default=-1)
        for a, b in zip(cuts, [*cuts[1:], end], strict=True)
    ]
    histogram = Counter(op.split(".")[0] for op in opcodes[slice(*body)])
    return {
        "case": f"sass {name}",
        "softmax_loop_instructions": length,
        "of_them_mask": mask,
        "per_element_full_block": (length - mask) / TILE,
        "per_element_static": length / TILE,
        "local_memory_instructions": sum(op.startswith(("STL", "LDL")) for op in opcodes),
        "instructions": len(code),
        "registers": registers,
        "classes": dict(histogram.most_common(12)),
    }


# ---- report --------------------------------------------------------------------------------------


def bound_rows(step: Work, row: Work) -> list[dict[str, Any]]:
    """Bounds of rows of several lengths, (lone item, one more item)."""
    free, filled = (spans_of(step, row, fills=fills) for fills in (False, True))
    rows = [
        {
            "case": f"bound rows of {length}",
            "no_fills": bound(free, length),
            "fills": bound(filled, length),
            "no_fills_early_qk": bound(free, length, early=True),
        }
        for length in ROW_LENGTHS
    ]
    more_cubic = replace(CONFIG, cubic_pairs=4)
    spans = spans_of(*marginal(TILE, more_cubic), fills=False)
    rows.append(
        {
            "case": "bound rows of 8, 4 of 16 pairs cubic",
            "stack_bytes": compiled(more_cubic).stack_bytes,
            "no_fills": bound(spans, 8),
            "fills": bound(spans._replace(fill=filled.fill), 8),
            "no_fills_early_qk": bound(spans, 8, early=True),
        }
    )
    return rows


def sharing_rows(step: Work, row: Work) -> list[dict[str, Any]]:
    """What it would change to load once a K/V block that both rows of a pair keep."""
    spans = spans_of(step, row, fills=False)
    rows = []
    for name, length, shared in SHARING:
        for apart in (0, shared):
            loads = {
                f"L2 {rate}": bound(spans._replace(fill=TILE_BYTES / rate), length, shared=apart)[1]
                for rate in L2_RATES
            }
            rows.append(
                {
                    "case": f"sharing: {name}",
                    "blocks_loaded_once": apart,
                    "no_fills": bound(spans, length, shared=apart)[1],
                    **loads,
                    "one_port": one_port(step, length, apart),
                }
            )
    return rows


def model() -> list[dict[str, Any]]:
    """Count and derive everything but SASS, one dict for each row of the record."""
    step, row = marginal(TILE)
    partial, _ = marginal(100)
    pair, even = count((4, 16)), count((10, 10))
    rows: list[dict[str, Any]] = [
        {"case": "tile step, full block", "roles": step, "clocks": clocks(step)},
        {"case": "tile step, 100 of 128 keys", "roles": partial, "clocks": clocks(partial)},
        {"case": "row besides its steps", "roles": row, "clocks": clocks(row)},
        {
            "case": "pair of rows of 4 and 16",
            "selected_blocks": 20,
            "mma_groups": total(pair, "MMA") * MMA_K / (2 * TILE),
            "work_over_a_pair_of_10_and_10": total(pair, "work") / total(even, "work"),
        },
        {"case": "spans", **spans_of(step, row, fills=True)._asdict()},
    ]
    return rows + bound_rows(step, row) + sharing_rows(step, row)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the record as tables."""
    named = {row["case"]: row for row in rows}
    step, partial = (named[f"tile step, {n}"] for n in ("full block", "100 of 128 keys"))
    ratio = total(partial["roles"], "work") / total(step["roles"], "work")
    table = Table(title="Warp instructions of a tile step (PTX, without moves), normal data")
    for head in ("", "ours", *RIVALS):
        table.add_column(head, justify="right" if head else "left")
    roles = step["roles"]
    parts = [roles[name]["work"] for name in ("softmax", "correction", "mma", "load")]
    classes = ("ex2", "cubic", "f32x2", "TMEM words loaded", "TMEM words stored")
    ours = [total(roles, "work"), *parts, *(total(roles, name) for name in classes)]
    ours += [total(roles, "TMA bytes in") / 1024, ratio]
    labels = ("all", "softmax", "correction", "MMA warp", "load warp", *classes)
    for i, label in enumerate((*labels, "K and V, KiB", "partial / full")):
        cells = [ours[i], *(rival[i] for rival in RIVALS.values())]
        digits = 2 if label.startswith("partial") else 0
        table.add_row(label, *("-" if x is None else f"{x:.{digits}f}" for x in cells))
    console.print(table)
    table = Table(title="Model: clocks of an SM for a tile step")
    for head in ("", *UNITS):
        table.add_column(head, justify="right" if head else "left")
    for label, row in (("full block", step), ("100 of 128 keys", partial)):
        table.add_row(label, *(f"{row['clocks'][unit]:.0f}" for unit in UNITS))
    console.print(table)
    table = Table(title="Model: bound / MMA, a lone work item | one more of a busy CTA")
    for head in ("rows of", "fills not counted", "with fills", "not counted, early first QK"):
        table.add_column(head)
    for row in rows:
        if row["case"].startswith("bound"):
            cells = (row["no_fills"], row["fills"], row["no_fills_early_qk"])
            table.add_row(row["case"][14:], *(f"{a:.3f} | {b:.3f}" for a, b in cells))
    console.print(table)
    table = Table(title="Model: bound / MMA of one more work item if K/V loads were shared")
    rates = [f"L2 {rate}" for rate in L2_RATES]
    for head in ("rows of a pair", "loaded once", "no fills", *rates, "one SMEM port"):
        table.add_column(head, justify="right")
    for row in rows:
        if row["case"].startswith("sharing"):
            cells = (row[name] for name in ("no_fills", *rates, "one_port"))
            once = str(row["blocks_loaded_once"])
            table.add_row(row["case"][9:], once, *(f"{cell:.3f}" for cell in cells))
    console.print(table)
    for row in rows:
        if row["case"].startswith(("pair", "sass")):
            console.print(row)


def main() -> None:
    """Count, print the tables, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the rows, replaced")
    parser.add_argument("--sass", action="append", default=[], metavar="NAME=CUBIN")
    arguments = parser.parse_args()
    rows = model()
    if tool := disassembler():
        cubins = dict(entry.split("=", 1) for entry in arguments.sass)
        rows.append(sass_row("ours", compiled().cubin, tool))
        rows += [sass_row(name, Path(path).read_bytes(), tool) for name, path in cubins.items()]
    show(rows, Console(width=150))
    if arguments.json:
        common = {
            "kind": "model",
            "command": "python " + " ".join(part.split("=")[0] for part in sys.argv),
            "git": git_revision(),
            "sparse_atten": sparse_atten.__version__,
            "arch": TARGET.arch,
            "config": vars(CONFIG),
            "rates": RATES,
        }
        arguments.json.write_text("".join(json.dumps({**common, **row}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
