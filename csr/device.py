"""The launches of csr.cu: workspace, grids, arguments; nothing is read back.

A `Launch` takes a kernel's name, its numbers of CTAs and threads, and its arguments in the order
of `SIGNATURES`. On a GPU `launcher` gives one; whatever else can run the kernels gives its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.csr.reference import INT32_MAX, K2QCSR
from sparse_atten.cute_kernels.common.nvrtc import Kernel, Program

Launch = Callable[..., None]

THREADS = 256  # of every kernel but these
KERNEL_THREADS = {"build_row_map": 1024, "prefix": 1024, "prefix_and_weigh": 1024}
TILE = 2048  # slots of a CTA of hist and scatter
MAX_BINS = 1280  # rows that one pass orders edges by
MAX_DIGIT_BITS = 10  # of a row, that each of several passes orders edges by
LISTS_KV = 4096  # KV blocks of a CTA of mark_lists

_INT62_MAX = 2**62 - 1  # of a block size: lengths are added to it

_TABLE = "PqqqIqiq"
_ROW_MAP = "PPPi"
_DIGIT = "iii"
_PLACEMENT = "PPPPPP"
SIGNATURES = {
    "build_row_map": "PPPiiqii" + "PPPPiP",
    "hist": _TABLE + _ROW_MAP + _DIGIT + "PPPiPP",
    "hist_pairs": "PqqP" + _DIGIT + "P",
    "prefix": "PqiPPP",
    "scatter": _TABLE + _ROW_MAP + _DIGIT + "PP" + _PLACEMENT + "P",
    "scatter_pairs": "PPIqq" + _DIGIT + "PP" + _PLACEMENT,
    "row_bounds": "PqPiiiP",
    "mark_lists": "PqqqqPqqqiiiiiiiP",
    "pack_lists": "PqiiiPP",
}


class Tables(NamedTuple):
    """The arguments of `build_k2q_csr`, checked; for `key_capacity` see `key_lengths`."""

    q2k_indices: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_size: int
    num_rows: int
    key_capacity: int | None = None

    @property
    def is_wide(self) -> bool:
        """Whether slots of a head need 64 bits."""
        return self.q2k_indices.shape[1] * self.q2k_indices.shape[2] > INT32_MAX


@dataclass(frozen=True)
class Fused:
    """What a schedule adds to the launches: arguments, and pointers of its outputs.

    Parameters
    ----------
    num_weights : int
        int32 counters to add to the workspace.
    split : tuple
        Arguments that say how rows are split into items, `weights` excepted.
    num_groups : int
        CTAs that place items.
    split_slot, split_counts : int
        Pointers.
    items : tuple
        The last arguments of the kernels that place items.
    """

    num_weights: int
    split: tuple[int, ...]
    num_groups: int
    split_slot: int
    split_counts: int
    items: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """Sizes of a call and where the parts of its workspace begin, in bytes."""

    slots: int
    tiles: int
    passes: int
    bits: int
    bins: int
    part: Mapping[str, int]
    num_bytes: int


@cache
def program(is_wide: bool) -> Program:
    """Return csr.cu, for 64-bit slots or for 32-bit ones."""
    return Program.read(Path(__file__).with_name("csr.cu"), WIDE=int(is_wide))


def preload(device: torch.device | str | int) -> None:
    """Compile and load the kernels for a device, so that a CUDA graph can capture their first use.

    For tables of less than 2^31 slots a head; larger ones need a call before the capture.
    """
    program(False).preload(device)


@cache
def launch_on(device: torch.device, is_wide: bool) -> Launch:
    """Launches on the current stream of a device."""
    return launcher(program(is_wide), SIGNATURES, device)


def launcher(program: Program, signatures: Mapping[str, str], device: torch.device) -> Launch:
    """Launch the kernels of a program on the current stream of a device."""
    kernels: dict[str, Kernel] = {}

    def launch(name: str, blocks: int, *values: int) -> None:
        kernel = kernels.get(name)
        if kernel is None:
            kernel = kernels[name] = program.kernel(name, signatures[name], device)
        kernel((blocks, 1, 1), (KERNEL_THREADS.get(name, THREADS), 1, 1), *values)

    return launch


def csr_on_device(
    tables: Tables, launch: Launch, *, is_wide: bool, fused: Fused | None = None
) -> K2QCSR:
    """Build the CSR, and what `fused` adds to it. No table is empty, and there are rows."""
    stages = _Stages(tables, launch, is_wide, fused)
    stages.map_rows()
    stages.count_edges()
    if stages.plan.passes == 1:
        stages.place_edges()
    else:
        stages.sort_edges()
    return stages.csr


class _Stages:
    """One call: its outputs, its workspace, and the arguments that its stages share."""

    def __init__(self, tables: Tables, launch: Launch, is_wide: bool, fused: Fused | None) -> None:
        q2k, num_rows = tables.q2k_indices, tables.num_rows
        heads, num_queries, width = q2k.shape
        self.tables, self.launch, self.fused = tables, launch, fused
        self.batch = tables.cu_seqlens_q.shape[0] - 1
        self.num_weights = fused.num_weights if fused else 0
        self.plan = plan = _plan(q2k.shape, num_rows, self.batch, self.num_weights, is_wide)
        index = torch.int64 if is_wide else torch.int32
        self.csr = csr = K2QCSR(
            row_ptr=q2k.new_empty((heads, num_rows + 1), dtype=index),
            q_indices=q2k.new_empty((heads, plan.slots)),
            edge_ids=q2k.new_empty((heads, plan.slots), dtype=index),
            row_coords=q2k.new_empty((num_rows, 2)),
            num_bad_edges=q2k.new_empty(1, dtype=torch.int64),
            num_queries=num_queries,
            table_width=width,
        )
        self.workspace = q2k.new_empty(plan.num_bytes, dtype=torch.uint8)
        base = self.workspace.data_ptr()
        self.at = at = {name: base + offset for name, offset in plan.part.items()}
        self.row_coords = csr.row_coords.data_ptr()
        self.row_ptr = csr.row_ptr.data_ptr()
        self.edge_ids = csr.edge_ids.data_ptr()
        self.bin_ptr = self.row_ptr if plan.passes == 1 else at["bin_ptr"]

        self.num_tiles = heads * plan.tiles
        self.table = (q2k.data_ptr(), *q2k.stride(), width, plan.slots, heads, plan.tiles)
        self.row_map = (at["q_start"], at["row_start"], at["blocks"], self.batch)
        self.sums = (
            at["counts"],
            plan.tiles,
            plan.bins,
            at["totals"],
            self.bin_ptr,
            at["finished"],
        )
        self.weigh = (*fused.split, at["weights"]) if fused else ()
        split_slot, self.split_counts = (fused.split_slot, fused.split_counts) if fused else (0, 0)
        self.ends = (csr.q_indices.data_ptr(), split_slot, at["row_q_start"], at["placed"])

    def map_rows(self) -> None:
        cu_seqlens_q, cu_seqlens_k, seqused_k = (
            None if x is None or not x.shape[0] else x.contiguous()
            for x in (self.tables.cu_seqlens_q, self.tables.cu_seqlens_k, self.tables.seqused_k)
        )
        capacity = self.tables.key_capacity
        self.launch(
            "build_row_map",
            1,
            *(0 if x is None else x.data_ptr() for x in (cu_seqlens_q, cu_seqlens_k, seqused_k)),
            self.batch,
            min(self.csr.num_queries, INT32_MAX),
            min(self.tables.block_size, _INT62_MAX),
            -1 if capacity is None else min(capacity, INT32_MAX),
            self.tables.num_rows,
            *self.row_map[:3],
            self.at["finished"],
            self.table[6] + self.num_weights,
            self.csr.num_bad_edges.data_ptr(),
        )

    def count_edges(self) -> None:
        self.launch(
            "hist",
            self.num_tiles + -(-self.tables.num_rows // THREADS),
            *self.table,
            *self.row_map,
            *self._digit(0),
            self.at["counts"],
            self.at["placed"],
            self.csr.num_bad_edges.data_ptr(),
            self.tables.num_rows,
            self.row_coords,
            self.at["row_q_start"],
        )

    def place_edges(self) -> None:
        """Sort by row at once: the bins are the rows."""
        scatter = self._scatter((0, self.edge_ids), self.ends)
        if self.fused is None:
            self._sum_up()
            self.launch("scatter", self.num_tiles, *scatter)
            return
        blocks = self.fused.num_groups + self.num_tiles
        self.launch("prefix_and_weigh", self._prefix_blocks(), *self.sums, *self.weigh)
        self.launch(
            "scatter_and_place", blocks, *scatter, self.row_coords, *self.weigh, *self.fused.items
        )

    def sort_edges(self) -> None:
        """Sort by the digits of the row, the lowest first; find the rows in the sorted list."""
        plan, at = self.plan, self.at
        into = (at["rows_0"], at["edges_0"])
        middle = (0, 0, at["row_q_start"], at["placed"])
        self._sum_up()
        self.launch("scatter", self.num_tiles, *self._scatter(into, middle))
        for step in range(1, plan.passes):
            is_last = step == plan.passes - 1
            source, into = into, (at[f"rows_{step % 2}"], at[f"edges_{step % 2}"])
            if is_last:
                into = (into[0], self.edge_ids)
            slots, digit = (plan.slots, plan.tiles), self._digit(step)
            self.launch(
                "hist_pairs",
                self.num_tiles,
                source[0],
                *slots,
                self.bin_ptr,
                *digit,
                at["counts"],
            )
            self._sum_up()
            self.launch(
                "scatter_pairs",
                self.num_tiles,
                *source,
                self.csr.table_width,
                *slots,
                *digit,
                at["counts"],
                self.bin_ptr,
                *into,
                *(self.ends if is_last else middle),
            )
        self._bound_rows(into[0])

    def _bound_rows(self, rows: int) -> None:
        heads, num_rows = self.table[6], self.tables.num_rows
        blocks = -(-heads * (num_rows + 1) // THREADS)
        head_rows = (heads, num_rows)
        values = (rows, self.plan.slots, self.bin_ptr, self.plan.bins, *head_rows, self.row_ptr)
        if self.fused is None:
            self.launch("row_bounds", blocks, *values)
            return
        self.launch("row_bounds_and_weigh", blocks, *values, *self.weigh)
        row_tables = (self.row_ptr, self.row_coords, *head_rows)
        groups = self.fused.num_groups
        self.launch("place", groups, *row_tables, *self.weigh, *self.fused.items)

    def _sum_up(self) -> None:
        self.launch("prefix", self._prefix_blocks(), *self.sums)

    def _prefix_blocks(self) -> int:
        return self.table[6] * -(-self.plan.bins // 32)

    def _digit(self, step: int) -> tuple[int, int, int]:
        return step * self.plan.bits, self.plan.bits, self.plan.bins

    def _scatter(self, into: tuple[int, int], ends: tuple[int, ...]) -> tuple[int, ...]:
        source = (*self.table, *self.row_map, *self._digit(0), self.at["counts"], self.bin_ptr)
        return (*source, *into, *ends, self.split_counts)


def lists_on_device(
    q2k_indices: Tensor,
    q2k_counts: Tensor,
    num_kv_blocks: int,
    *,
    dense_rows: int,
    launch: Launch,
) -> tuple[Tensor, Tensor]:
    """Transpose block lists. There are lists, query blocks and KV blocks."""
    batch, heads, num_q_blocks, width = q2k_indices.shape
    words, kv_tiles = -(-num_q_blocks // 32), -(-num_kv_blocks // LISTS_KV)
    lists = batch * heads
    k2q_indices = q2k_indices.new_empty((batch, heads, num_kv_blocks, num_q_blocks))
    k2q_counts = q2k_indices.new_empty((batch, heads, num_kv_blocks))
    marks = q2k_indices.new_empty((lists, words, num_kv_blocks))
    launch(
        "mark_lists",
        lists * words * kv_tiles,
        q2k_indices.data_ptr(),
        *q2k_indices.stride(),
        q2k_counts.data_ptr(),
        *q2k_counts.stride(),
        heads,
        num_q_blocks,
        width,
        num_kv_blocks,
        dense_rows,
        words,
        kv_tiles,
        marks.data_ptr(),
    )
    launch(
        "pack_lists",
        -(-lists * num_kv_blocks // (THREADS // 32)),
        marks.data_ptr(),
        lists,
        num_q_blocks,
        num_kv_blocks,
        words,
        k2q_indices.data_ptr(),
        k2q_counts.data_ptr(),
    )
    return k2q_indices, k2q_counts


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int, int], num_rows: int, batch: int, num_weights: int, is_wide: bool
) -> _Plan:
    heads, num_queries, width = shape
    slots = num_queries * width
    tiles = -(-slots // TILE)
    row_bits = (num_rows - 1).bit_length()
    passes = 1 if num_rows <= MAX_BINS else -(-row_bits // MAX_DIGIT_BITS)
    bits = -(-row_bits // passes)
    bins = num_rows if passes == 1 else 1 << bits

    index = 8 if is_wide else 4
    sizes = {
        "q_start": 4 * (batch + 1),
        "row_start": 4 * (batch + 1),
        "blocks": 8 * batch,
        "finished": 4 * (heads + num_weights),
        "row_q_start": 4 * num_rows,
        "placed": 4 * heads * -(-slots // 32),
        "totals": index * heads * bins,
        "counts": index * heads * tiles * bins,
    }
    if passes > 1:
        sizes["bin_ptr"] = index * heads * (bins + 1)
        sizes["rows_0"] = sizes["rows_1"] = 4 * heads * slots
        sizes["edges_0"] = index * heads * slots
        sizes["edges_1"] = sizes["edges_0"] if passes > 2 else 0
    part, end = {}, 0
    for name, size in sizes.items():
        part[name] = end
        end += -(-size // 16) * 16
    part["weights"] = part["finished"] + 4 * heads
    return _Plan(slots, tiles, passes, bits, bins, part, end)
