"""The launches of schedule.cu: alone on a CSR, or as part of building one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from sparse_atten.csr import device as csr_device
from sparse_atten.csr.device import THREADS, Fused, Launch, Tables, csr_on_device, launcher
from sparse_atten.csr.reference import K2QCSR
from sparse_atten.cute_kernels.common.nvrtc import Program
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
def launch_on(device: torch.device, is_wide: bool) -> Launch:
    """Launches on the current stream of a device."""
    return launcher(program(is_wide), SIGNATURES, device)


def csr_and_schedule_on_device(
    tables: Tables, splitting: Splitting, launch: Launch, *, is_wide: bool
) -> tuple[K2QCSR, Schedule]:
    """Build both. No table is empty, and there are rows."""
    q2k = tables.q2k_indices
    heads, num_queries, width = q2k.shape
    schedule = _empty_schedule(q2k.new_empty, (heads, num_queries, width), splitting)
    split, num_groups = _split(heads * tables.num_rows, splitting)
    fused = Fused(
        num_weights=num_groups * splitting.heaviest,
        split=split,
        num_groups=num_groups,
        split_slot=schedule.split_slot.data_ptr(),
        split_counts=schedule.split_counts.data_ptr(),
        items=_items(schedule, splitting),
    )
    return csr_on_device(tables, launch, is_wide=is_wide, fused=fused), schedule


def schedule_on_device(csr: K2QCSR, splitting: Splitting, launch: Launch) -> Schedule:
    """Make the schedule of a CSR that has slots and rows."""
    heads, slots = csr.edge_ids.shape
    num_rows, width = csr.row_coords.shape[0], csr.table_width
    shape = (heads, csr.num_queries, width)
    schedule = _empty_schedule(csr.q_indices.new_empty, shape, splitting)
    split, num_groups = _split(heads * num_rows, splitting)
    num_bits = heads * -(-slots // 32)
    zeros = csr.q_indices.new_zeros(num_bits + num_groups * splitting.heaviest)
    placed, weights = zeros.data_ptr(), zeros.data_ptr() + 4 * num_bits
    entry_blocks = -(-heads * slots // THREADS)
    row_ptr, edge_ids = csr.row_ptr.data_ptr(), csr.edge_ids.data_ptr()
    launch(
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
    launch(
        "number_and_place",
        num_groups + entry_blocks + -(-heads * csr.num_queries // THREADS),
        edge_ids,
        width,
        slots,
        heads,
        entry_blocks,
        placed,
        schedule.split_slot.data_ptr(),
        schedule.split_counts.data_ptr(),
        row_ptr,
        csr.row_coords.data_ptr(),
        num_rows,
        *split,
        weights,
        *_items(schedule, splitting),
    )
    return schedule


def _empty_schedule(
    new_empty: Callable[..., torch.Tensor], shape: tuple[int, int, int], splitting: Splitting
) -> Schedule:
    heads, num_queries, width = shape
    return Schedule(
        work_items=new_empty((splitting.capacity, 6)),
        num_items=new_empty(1),
        split_slot=new_empty((heads, num_queries * width)),
        split_counts=new_empty((num_queries, heads)),
        target_q_per_cta=splitting.target,
    )


def _items(schedule: Schedule, splitting: Splitting) -> tuple[int, int, int]:
    return splitting.capacity, schedule.work_items.data_ptr(), schedule.num_items.data_ptr()


def _split(rows: int, splitting: Splitting) -> tuple[tuple[int, ...], int]:
    """Arguments that say how rows are split and grouped, and the number of groups."""
    steps = -(-rows // STEP_ROWS)
    rows_per_group = STEP_ROWS * -(-steps // MAX_GROUPS)
    groups = -(-rows // rows_per_group)
    target, q_tok, heaviest = splitting.target, splitting.q_tok, splitting.heaviest
    return (target, q_tok, heaviest, groups, rows_per_group), groups
