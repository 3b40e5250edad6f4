"""The launches of schedule.cu: alone on a CSR, or as part of building one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sparse_atten.csr import device as csr_device
from sparse_atten.csr.device import (
    THREADS,
    Bind,
    Fused,
    Recipe,
    Run,
    Tables,
    binder,
    csr_recipe,
    step,
)
from sparse_atten.csr.reference import K2QCSR
from sparse_atten.cute_kernels.common.nvrtc import Program
from sparse_atten.cute_kernels.common.parts import Part, lay_out, words
from sparse_atten.cute_kernels.common.steps import Address, Step
from sparse_atten.scheduler.reference import Schedule, Splitting

STEP_ROWS = 1024  # rows that a CTA takes at a time
MAX_GROUPS = 256  # CTAs that place items: each reads the item counts of all

_SPLIT = "iiiiqP"
_ITEMS = "iPP"
SIGNATURES = {
    **csr_device.SIGNATURES,
    "prefix_and_weigh": csr_device.SIGNATURES["prefix"] + _SPLIT,
    "row_bounds_and_weigh": csr_device.SIGNATURES["row_bounds"] + _SPLIT,
    "scatter_and_place": csr_device.SIGNATURES["scatter"] + "P" + _SPLIT + _ITEMS,
    "place": "PPii" + _SPLIT + _ITEMS,
    "mark_edges": "PqiqPPi" + _SPLIT,
    "number_and_place": "PIqiqPPPPPi" + _SPLIT + _ITEMS,
}


@cache
def program(is_wide: bool) -> Program:
    """Return csr.cu and schedule.cu as one text, for 64-bit slots or for 32-bit ones."""
    folded = csr_device.program(is_wide)
    own = Path(__file__).with_name("schedule.cu").read_text()
    return Program("schedule.cu", folded.source + own, folded.defines)


def preload(device: torch.device | str | int) -> None:
    """Compile and load the kernels for a device, so that a CUDA graph can capture their first use.

    For tables of less than 2^31 slots a head; larger ones need a call before the capture.
    """
    program(False).preload(device)


@cache
def bind_on(device: torch.device, is_wide: bool) -> Bind:
    """Launches on the current stream of a device."""
    return binder(program(is_wide), SIGNATURES, device)


def csr_and_schedule_on_device(
    tables: Tables, splitting: Splitting, bind: Bind, *, is_wide: bool
) -> tuple[K2QCSR, Schedule]:
    """Build both. No table is empty, and there are rows."""
    recipe = csr_and_schedule_recipe(tables, splitting, is_wide)
    return csr_and_schedule_by(recipe, bind(recipe.steps), tables)


def csr_and_schedule_by(recipe: Recipe, run: Run, tables: Tables) -> tuple[K2QCSR, Schedule]:
    """Build both by their recipe."""
    outputs = recipe.run(run, tables)
    csr = K2QCSR.in_parts(outputs, recipe.csr_parts, recipe.csr_fields)
    return csr, Schedule.in_parts(outputs, recipe.schedule_parts, recipe.schedule_fields)


def csr_and_schedule_recipe(tables: Tables, splitting: Splitting, is_wide: bool) -> Recipe:
    """Say how to build both for tables of these shapes and strides."""
    heads, num_queries, width = tables.q2k_indices.shape
    split, num_groups = _split(heads * tables.num_rows, splitting)
    fused = Fused(
        num_weights=num_groups * splitting.heaviest,
        split=split,
        num_groups=num_groups,
        capacity=splitting.capacity,
        outputs=_outputs((heads, num_queries, width), splitting),
        fields={"target_q_per_cta": splitting.target},
    )
    return csr_recipe(tables, is_wide, fused)


@dataclass(frozen=True)
class ScheduleRecipe:
    """A schedule of a CSR without its addresses: launches, outputs, zeros to begin with."""

    steps: tuple[Step, ...]
    parts: Mapping[str, Part]
    target: int
    output_words: int
    zero_words: int


def schedule_on_device(csr: K2QCSR, splitting: Splitting, bind: Bind) -> Schedule:
    """Make the schedule of a CSR that has slots and rows."""
    recipe = schedule_recipe(csr, splitting)
    return schedule_by(recipe, bind(recipe.steps), csr)


def schedule_by(recipe: ScheduleRecipe, run: Run, csr: K2QCSR) -> Schedule:
    """Make the schedule of a CSR like that of the recipe."""
    outputs = csr.q_indices.new_empty(recipe.output_words)
    zeros = csr.q_indices.new_zeros(recipe.zero_words)
    run(*(x.data_ptr() for x in (csr.edge_ids, csr.row_ptr, csr.row_coords, outputs, zeros)))
    return Schedule.in_parts(outputs, recipe.parts, {"target_q_per_cta": recipe.target})


def schedule_recipe(csr: K2QCSR, splitting: Splitting) -> ScheduleRecipe:
    """Say how to make the schedule of a CSR of these shapes."""
    heads, slots = csr.edge_ids.shape
    num_rows, width = csr.row_coords.shape[0], csr.table_width
    parts = lay_out(_outputs((heads, csr.num_queries, width), splitting))
    edge_ids, row_ptr, row_coords = map(Address, range(3))
    out = {name: Address(3, part.offset) for name, part in parts.items()}
    split, num_groups = _split(heads * num_rows, splitting)
    num_bits = heads * -(-slots // 32)
    placed, weights = Address(4), Address(4, 4 * num_bits)
    entry_blocks = -(-heads * slots // THREADS)
    mark = step(
        "mark_edges",
        entry_blocks + -(-heads * num_rows // THREADS),
        edge_ids,
        slots,
        heads,
        entry_blocks,
        placed,
        row_ptr,
        num_rows,
        *split,
        weights,
    )
    place = step(
        "number_and_place",
        num_groups + entry_blocks + -(-heads * csr.num_queries // THREADS),
        edge_ids,
        width,
        slots,
        heads,
        entry_blocks,
        placed,
        out["split_slot"],
        out["split_counts"],
        row_ptr,
        row_coords,
        num_rows,
        *split,
        weights,
        splitting.capacity,
        out["work_items"],
        out["num_items"],
    )
    return ScheduleRecipe(
        steps=(mark, place),
        parts=parts,
        target=splitting.target,
        output_words=words(parts),
        zero_words=num_bits + num_groups * splitting.heaviest,
    )


def _outputs(
    shape: tuple[int, int, int], splitting: Splitting
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of a schedule's tensors for a table [Hkv, Tq, K]."""
    heads, num_queries, width = shape
    return {
        "work_items": ((splitting.capacity, 6), torch.int32),
        "num_items": ((1,), torch.int32),
        "split_slot": ((heads, num_queries * width), torch.int32),
        "split_counts": ((num_queries, heads), torch.int32),
    }


def _split(rows: int, splitting: Splitting) -> tuple[tuple[int, ...], int]:
    """Arguments that say how rows are split and grouped, and the number of groups."""
    steps = -(-rows // STEP_ROWS)
    rows_per_group = STEP_ROWS * -(-steps // MAX_GROUPS)
    groups = -(-rows // rows_per_group)
    target, q_tok, heaviest = splitting.target, splitting.q_tok, splitting.heaviest
    return (target, q_tok, heaviest, groups, rows_per_group), groups
