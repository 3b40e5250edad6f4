"""The work schedule, alone or with its CSR: arguments checked once, then kernels or torch."""

from __future__ import annotations

from torch import Tensor

from sparse_atten.csr.build import check_tables, csr_of
from sparse_atten.csr.device import Recipe, Run, Tables
from sparse_atten.csr.reference import INT32_MAX, K2QCSR
from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels
from sparse_atten.scheduler.device import (
    ScheduleRecipe,
    bind_on,
    csr_and_schedule_by,
    csr_and_schedule_recipe,
    schedule_by,
    schedule_recipe,
)
from sparse_atten.scheduler.reference import Schedule, schedule_of, splitting_of

_SCHEDULES: Memo[tuple[ScheduleRecipe, Run]] = Memo()
_BOTH: Memo[tuple[Recipe, Run]] = Memo()


def build_schedule(csr: K2QCSR, *, num_q_heads: int, num_sms: int) -> Schedule:
    """Make the work items of a k2q CSR, and the partial slot of each of its entries.

    Parameters
    ----------
    csr : K2QCSR
        What `build_k2q_csr` returned.
    num_q_heads : int
        Hq, a multiple of the CSR's Hkv.
    num_sms : int
        SMs that the items are spread over.

    Returns
    -------
    Schedule
        Every entry of the CSR lies in exactly one item.

    Raises
    ------
    TypeError
        An argument has the wrong class.
    ValueError
        `num_q_heads` is no multiple of Hkv, or a number is out of its range.

    Notes
    -----
    An item's weight is its number of tiles, ``ceil(q_count / q_tok)``: what its time grows with.
    The order is the same on every run and never decides a result, since slots are fixed.
    Nothing is read on the host. Splitting hot rows and slots instead of float atomics are those of
    MSA (arXiv 2606.13392), section 4.

    CUDA tensors on a GPU of compute capability 9.0 or newer take two kernels of schedule.cu, and a
    workspace of a bit for each slot and 128 KiB; `build_csr_and_schedule` saves launches.
    """
    if not isinstance(csr, K2QCSR):
        raise TypeError(f"csr must be a K2QCSR, got {describe(csr)}")
    on_device = runs_kernels(csr.edge_ids)
    if on_device:
        fields = csr.edge_ids, csr.row_ptr, csr.row_coords, csr.num_queries, csr.table_width
        key = key_of(*fields, num_q_heads, num_sms)
        known = _SCHEDULES.find(key)
        if known is not None:
            return schedule_by(*known, csr)
    num_kv_heads, num_slots = csr.edge_ids.shape
    num_rows = csr.row_coords.shape[0]
    shape = (num_kv_heads, csr.num_queries, csr.table_width)
    splitting = splitting_of(shape, num_rows=num_rows, num_q_heads=num_q_heads, num_sms=num_sms)
    if on_device and num_kv_heads * num_slots * num_rows:
        recipe = schedule_recipe(csr, splitting)
        run = bind_on(csr.edge_ids.device, num_slots > INT32_MAX)(recipe.steps)
        return schedule_by(*_SCHEDULES.keep(key, (recipe, run)), csr)
    return schedule_of(csr, splitting)


def build_csr_and_schedule(
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    num_q_heads: int,
    num_sms: int,
    num_rows: int,
    block_size: int = 128,
    seqused_k: Tensor | None = None,
    key_capacity: int | None = None,
) -> tuple[K2QCSR, Schedule]:
    """Build the k2q CSR of a token selection and its schedule, in as few launches as they take.

    Parameters
    ----------
    q2k_indices, cu_seqlens_q, cu_seqlens_k, num_rows, block_size, seqused_k
        As for `build_k2q_csr`.
    num_q_heads, num_sms
        As for `build_schedule`.
    key_capacity : int, optional
        What the tables of keys may not pass, so that no kernel that follows them leaves a tensor.
        Flat KV: Tk; offsets are clamped to [0, Tk], and one that decreases counts as its
        predecessor. Paged KV: the keys that a sequence's pages hold; lengths are clamped to it.

    Returns
    -------
    K2QCSR, Schedule
        What the two functions give one after the other.

    Raises
    ------
    TypeError, ValueError
        As for the two functions.

    Notes
    -----
    Four launches up to 1280 rows, nine up to 2^20, twelve up to 2^30. Deterministic, and without
    a synchronisation. The workspace is linear in edges and rows: for E = Tq * K slots a head and R
    rows, at most ``Hkv * 2.7 * E`` bytes up to 1280 rows, ``Hkv * 14.7 * E`` up to 2^20 and
    ``Hkv * 18.7 * E`` beyond; ``4 * R + 24 * B``; and 15 KiB for each head and 128 KiB. Indices of
    64 bits, where E >= 2^31, double the parts that hold them.

    On a GPU all tensors of the results lie in one allocation, each made when it is first read, and
    a call like an earlier one (layouts of the tensors, numbers) finds its checks and launches done.
    """
    tables = Tables(
        q2k_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, block_size, num_rows, key_capacity
    )
    on_device = runs_kernels(q2k_indices)
    if on_device:
        key = key_of(*tables, num_q_heads, num_sms)
        known = _BOTH.find(key)
        if known is not None:
            return csr_and_schedule_by(*known, tables)
    check_tables(tables)
    heads, num_queries, width = q2k_indices.shape
    splitting = splitting_of(
        (heads, num_queries, width), num_rows=num_rows, num_q_heads=num_q_heads, num_sms=num_sms
    )
    if on_device and q2k_indices.numel() and num_rows:
        recipe = csr_and_schedule_recipe(tables, splitting, tables.is_wide)
        run = bind_on(q2k_indices.device, tables.is_wide)(recipe.steps)
        return csr_and_schedule_by(*_BOTH.keep(key, (recipe, run)), tables)
    csr = csr_of(tables)
    return csr, schedule_of(csr, splitting)
