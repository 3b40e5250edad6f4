"""The launches of csr.cu: workspace, grids, arguments; nothing is read back.

A `Recipe` is all of a call but its addresses: it follows from shapes and strides alone, so callers
keep it. `Bind` makes of its steps what runs them, given the addresses. On a GPU `binder` does that
with `Launches`; whatever else can run the kernels does it in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_atten.csr.reference import INT32_MAX, K2QCSR
from sparse_atten.cute_kernels.common.nvrtc import Kernel, Program
from sparse_atten.cute_kernels.common.parts import Part, lay_out, words
from sparse_atten.cute_kernels.common.steps import Address, Launches, Step

Argument = int | Address
Run = Callable[..., None]  # of addresses, in the order that `Address.base` counts
Bind = Callable[[Sequence[Step]], Run]

THREADS = 256  # of every kernel but these
KERNEL_THREADS = {"build_row_map": 1024, "prefix": 1024, "prefix_and_weigh": 1024}
TILE = 2048  # slots of a CTA of hist and scatter
MAX_BINS = 1280  # rows that one pass orders edges by
MAX_DIGIT_BITS = 10  # of a row, that each of several passes orders edges by
LISTS_KV = 4096  # KV blocks of a CTA of mark_lists

NULL = 0
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
    """What a schedule adds to the launches.

    Parameters
    ----------
    num_weights : int
        int32 counters to add to the workspace.
    split : tuple
        Arguments that say how rows are split into items, `weights` excepted.
    num_groups : int
        CTAs that place items.
    capacity : int
        Items to make room for.
    outputs : mapping
        Shapes and dtypes of the schedule's tensors.
    fields : mapping
        The schedule's other fields.
    """

    num_weights: int
    split: tuple[int, ...]
    num_groups: int
    capacity: int
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    fields: Mapping[str, Any]


# What the addresses of a recipe count from.
_Q2K, _CU_Q, _CU_K, _USED_K, _OUTPUTS, _WORKSPACE = range(6)


@dataclass(frozen=True)
class Recipe:
    """A call without its addresses: launches, and where the tensors of the results lie."""

    steps: tuple[Step, ...]
    csr_parts: Mapping[str, Part]
    csr_fields: Mapping[str, Any]
    schedule_parts: Mapping[str, Part]
    schedule_fields: Mapping[str, Any]
    output_words: int
    workspace_words: int

    def run(self, run: Run, tables: Tables) -> Tensor:
        """Run the steps on tables like those that the recipe is for; returns all outputs."""
        q2k = tables.q2k_indices
        outputs, workspace = q2k.new_empty(self.output_words), q2k.new_empty(self.workspace_words)
        others = [None if x is None else x.contiguous() for x in tables[1:4]]
        cu_q, cu_k, used_k = [0 if x is None else x.data_ptr() for x in others]
        run(q2k.data_ptr(), cu_q, cu_k, used_k, outputs.data_ptr(), workspace.data_ptr())
        return outputs


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
def bind_on(device: torch.device, is_wide: bool) -> Bind:
    """Launches on the current stream of a device."""
    return binder(program(is_wide), SIGNATURES, device)


def binder(program: Program, signatures: Mapping[str, str], device: torch.device) -> Bind:
    """Launch the kernels of a program on the current stream of a device."""
    kernels: dict[str, Kernel] = {}

    def kernel(name: str) -> Kernel:
        if name not in kernels:
            kernels[name] = program.kernel(name, signatures[name], device)
        return kernels[name]

    return lambda steps: Launches([kernel(step.kernel) for step in steps], steps)


def step(name: str, blocks: int, *arguments: Argument) -> Step:
    """One launch of a kernel."""
    return Step(name, (blocks, 1, 1), (KERNEL_THREADS.get(name, THREADS), 1, 1), arguments)


def csr_on_device(tables: Tables, bind: Bind, *, is_wide: bool) -> K2QCSR:
    """Build the CSR. No table is empty, and there are rows."""
    recipe = csr_recipe(tables, is_wide)
    return csr_by(recipe, bind(recipe.steps), tables)


def csr_by(recipe: Recipe, run: Run, tables: Tables) -> K2QCSR:
    """Build the CSR by its recipe."""
    return K2QCSR.in_parts(recipe.run(run, tables), recipe.csr_parts, recipe.csr_fields)


def csr_recipe(tables: Tables, is_wide: bool, fused: Fused | None = None) -> Recipe:
    """Say how to build the CSR of tables of these shapes and strides, and what `fused` adds."""
    stages = _Stages(tables, is_wide, fused)
    stages.map_rows()
    stages.count_edges()
    if stages.plan.passes == 1:
        stages.place_edges()
    else:
        stages.sort_edges()
    return stages.recipe()


class _Stages:
    """The steps of one recipe, the layout of its outputs, and what its stages share."""

    def __init__(self, tables: Tables, is_wide: bool, fused: Fused | None) -> None:
        q2k, num_rows = tables.q2k_indices, tables.num_rows
        heads, num_queries, width = q2k.shape
        self.heads, self.num_queries, self.width = heads, num_queries, width
        self.tables, self.fused = tables, fused
        self.steps: list[Step] = []
        self.batch = tables.cu_seqlens_q.shape[0] - 1
        self.num_weights = fused.num_weights if fused else 0
        self.plan = plan = _plan(
            (heads, num_queries, width), num_rows, self.batch, self.num_weights, is_wide
        )
        index, word = torch.int64 if is_wide else torch.int32, torch.int32
        self.csr_parts = lay_out(
            {
                "row_ptr": ((heads, num_rows + 1), index),
                "q_indices": ((heads, plan.slots), word),
                "edge_ids": ((heads, plan.slots), index),
                "row_coords": ((num_rows, 2), word),
                "num_bad_edges": ((1,), torch.int64),
            }
        )
        self.schedule_parts = lay_out(fused.outputs if fused else {}, 4 * words(self.csr_parts))
        self.at = at = {name: Address(_WORKSPACE, offset) for name, offset in plan.part.items()}
        self.out = out = {
            name: Address(_OUTPUTS, part.offset)
            for name, part in (*self.csr_parts.items(), *self.schedule_parts.items())
        }
        self.bin_ptr = out["row_ptr"] if plan.passes == 1 else at["bin_ptr"]

        self.num_tiles = heads * plan.tiles
        self.table: tuple[Argument, ...] = (
            Address(_Q2K),
            *q2k.stride(),
            width,
            plan.slots,
            heads,
            plan.tiles,
        )
        self.row_map: tuple[Argument, ...] = (
            at["q_start"],
            at["row_start"],
            at["blocks"],
            self.batch,
        )
        self.sums: tuple[Argument, ...] = (
            at["counts"],
            plan.tiles,
            plan.bins,
            at["totals"],
            self.bin_ptr,
            at["finished"],
        )
        self.weigh: tuple[Argument, ...] = ()
        self.items: tuple[Argument, ...] = ()
        if fused:
            self.weigh = (*fused.split, at["weights"])
            self.items = (fused.capacity, out["work_items"], out["num_items"])
        split_slot: Argument = out.get("split_slot", NULL)
        self.ends: tuple[Argument, ...] = (
            out["q_indices"],
            split_slot,
            at["row_q_start"],
            at["placed"],
        )

    def recipe(self) -> Recipe:
        return Recipe(
            steps=tuple(self.steps),
            csr_parts=self.csr_parts,
            csr_fields={"num_queries": self.num_queries, "table_width": self.width},
            schedule_parts=self.schedule_parts,
            schedule_fields=self.fused.fields if self.fused else {},
            output_words=words({**self.csr_parts, **self.schedule_parts}),
            workspace_words=-(-self.plan.num_bytes // 4),
        )

    def map_rows(self) -> None:
        capacity = self.tables.key_capacity
        self._add(
            "build_row_map",
            1,
            Address(_CU_Q),
            Address(_CU_K),
            Address(_USED_K),
            self.batch,
            min(self.num_queries, INT32_MAX),
            min(self.tables.block_size, _INT62_MAX),
            -1 if capacity is None else min(capacity, INT32_MAX),
            self.tables.num_rows,
            *self.row_map[:3],
            self.at["finished"],
            self.heads + self.num_weights,
            self.out["num_bad_edges"],
        )

    def count_edges(self) -> None:
        self._add(
            "hist",
            self.num_tiles + -(-self.tables.num_rows // THREADS),
            *self.table,
            *self.row_map,
            *self._digit(0),
            self.at["counts"],
            self.at["placed"],
            self.out["num_bad_edges"],
            self.tables.num_rows,
            self.out["row_coords"],
            self.at["row_q_start"],
        )

    def place_edges(self) -> None:
        """Sort by row at once: the bins are the rows."""
        scatter = self._scatter((NULL, self.out["edge_ids"]), self.ends)
        if self.fused is None:
            self._sum_up()
            self._add("scatter", self.num_tiles, *scatter)
            return
        blocks = self.fused.num_groups + self.num_tiles
        self._add("prefix_and_weigh", self._prefix_blocks(), *self.sums, *self.weigh)
        self._add(
            "scatter_and_place", blocks, *scatter, self.out["row_coords"], *self.weigh, *self.items
        )

    def sort_edges(self) -> None:
        """Sort by the digits of the row, the lowest first; find the rows in the sorted list."""
        plan, at = self.plan, self.at
        into = (at["rows_0"], at["edges_0"])
        middle = (NULL, NULL, at["row_q_start"], at["placed"])
        self._sum_up()
        self._add("scatter", self.num_tiles, *self._scatter(into, middle))
        for turn in range(1, plan.passes):
            is_last = turn == plan.passes - 1
            source, into = into, (at[f"rows_{turn % 2}"], at[f"edges_{turn % 2}"])
            if is_last:
                into = (into[0], self.out["edge_ids"])
            slots, digit = (plan.slots, plan.tiles), self._digit(turn)
            self._add(
                "hist_pairs",
                self.num_tiles,
                source[0],
                *slots,
                self.bin_ptr,
                *digit,
                at["counts"],
            )
            self._sum_up()
            self._add(
                "scatter_pairs",
                self.num_tiles,
                *source,
                self.width,
                *slots,
                *digit,
                at["counts"],
                self.bin_ptr,
                *into,
                *(self.ends if is_last else middle),
            )
        self._bound_rows(into[0])

    def _bound_rows(self, rows: Argument) -> None:
        heads, num_rows = self.heads, self.tables.num_rows
        blocks = -(-heads * (num_rows + 1) // THREADS)
        head_rows = (heads, num_rows)
        values = (
            rows,
            self.plan.slots,
            self.bin_ptr,
            self.plan.bins,
            *head_rows,
            self.out["row_ptr"],
        )
        if self.fused is None:
            self._add("row_bounds", blocks, *values)
            return
        self._add("row_bounds_and_weigh", blocks, *values, *self.weigh)
        row_tables = (self.out["row_ptr"], self.out["row_coords"], *head_rows)
        groups = self.fused.num_groups
        self._add("place", groups, *row_tables, *self.weigh, *self.items)

    def _add(self, name: str, blocks: int, *arguments: Argument) -> None:
        self.steps.append(step(name, blocks, *arguments))

    def _sum_up(self) -> None:
        self._add("prefix", self._prefix_blocks(), *self.sums)

    def _prefix_blocks(self) -> int:
        return self.heads * -(-self.plan.bins // 32)

    def _digit(self, turn: int) -> tuple[int, int, int]:
        return turn * self.plan.bits, self.plan.bits, self.plan.bins

    def _scatter(
        self, into: tuple[Argument, Argument], ends: tuple[Argument, ...]
    ) -> tuple[Argument, ...]:
        source = (*self.table, *self.row_map, *self._digit(0), self.at["counts"], self.bin_ptr)
        return (*source, *into, *ends, self.out.get("split_counts", NULL))


def lists_on_device(
    q2k_indices: Tensor, q2k_counts: Tensor, num_kv_blocks: int, run: Run
) -> tuple[Tensor, Tensor]:
    """Transpose block lists by the steps of `lists_steps` for lists like these."""
    batch, heads, num_q_blocks, _ = q2k_indices.shape
    k2q_indices = q2k_indices.new_empty((batch, heads, num_kv_blocks, num_q_blocks))
    k2q_counts = q2k_indices.new_empty((batch, heads, num_kv_blocks))
    marks = q2k_indices.new_empty(batch * heads * -(-num_q_blocks // 32) * num_kv_blocks)
    run(*(x.data_ptr() for x in (q2k_indices, q2k_counts, k2q_indices, k2q_counts, marks)))
    return k2q_indices, k2q_counts


def lists_steps(
    q2k_indices: Tensor, q2k_counts: Tensor, num_kv_blocks: int, dense_rows: int
) -> tuple[Step, Step]:
    """Say how to transpose block lists of these shapes and strides; none is empty."""
    batch, heads, num_q_blocks, width = q2k_indices.shape
    words, kv_tiles = -(-num_q_blocks // 32), -(-num_kv_blocks // LISTS_KV)
    lists = batch * heads
    ids, counts, k2q_indices, k2q_counts, marks = map(Address, range(5))
    mark = step(
        "mark_lists",
        lists * words * kv_tiles,
        ids,
        *q2k_indices.stride(),
        counts,
        *q2k_counts.stride(),
        heads,
        num_q_blocks,
        width,
        num_kv_blocks,
        dense_rows,
        words,
        kv_tiles,
        marks,
    )
    pack = step(
        "pack_lists",
        -(-lists * num_kv_blocks // (THREADS // 32)),
        marks,
        lists,
        num_q_blocks,
        num_kv_blocks,
        words,
        k2q_indices,
        k2q_counts,
    )
    return mark, pack


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
