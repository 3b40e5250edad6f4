"""The work schedule in plain torch: what device kernels must equal bit for bit.

A work item is what one CTA does: load the K and V of one row (a KV block of one sequence) for one
KV head, then attend to it from up to `target` of the queries that chose it. A row that more
queries chose is split into several items. A query gets one partial result for each block of its
list, in a slot of its own, so that no two items write to the same place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_atten.csr.reference import EMPTY, K2QCSR
from sparse_atten.cute_kernels.common.arguments import expect_int
from sparse_atten.cute_kernels.common.parts import Record

MMA_ROWS = 128  # rows of a tile: query tokens times the heads of a group
ITEMS_PER_SM = 8  # equal items for each SM, so that the last to finish adds at most 1/8
# K and V are 64 KiB at D = 128, 16 bits; a tile reads 32 KiB of Q and writes 32 KiB of partial O.
MIN_TILES = 4  # K and V are 1/5 of the traffic of such an item
MAX_TILES = 128  # K and V are less than 1/100 of the traffic of such an item


@dataclass(frozen=True, eq=False)
class Schedule(Record):
    """The work items of one KV-outer attention call, and where each of its partials goes.

    E = Tq * K is the number of slots of a head's table, as in `K2QCSR`. Whatever is not used is -1
    and stands at the end.

    Parameters
    ----------
    work_items : Tensor, int32 [capacity, 6]
        (kv_head, row, q_begin, q_count, batch, kv_block) of each item: entries
        ``row_ptr[kv_head, row] + q_begin`` and the q_count - 1 that follow, of the CSR's row.
        Most MMA tiles first; among equals, by kv_head, row and q_begin.
    num_items : Tensor, int32 [1]
        How many items are in use.
    split_slot : Tensor, int32 [Hkv, E]
        For each entry of the CSR, which of its query's partials it writes: 0 to
        ``split_counts - 1`` without holes, in the order of the query's list.
    split_counts : Tensor, int32 [Tq, Hkv]
        How many partials each query token has for each KV head. 0 for an empty list and for
        padding tokens.
    target_q_per_cta : int
        The most query tokens of an item.
    """

    work_items: Tensor
    num_items: Tensor
    split_slot: Tensor
    split_counts: Tensor
    target_q_per_cta: int


def target_q_per_cta(
    *, num_queries: int, table_width: int, num_q_heads: int, num_kv_heads: int, num_sms: int
) -> int:
    """Choose the most query tokens of a work item, from shapes alone.

    A tile holds ``q_tok = max(1, 128 // G)`` query tokens of G heads each, so the edges of a call
    fill at most ``T = ceil(Hkv * Tq * K / q_tok)`` tiles. An item gets ``ceil(T / (8 * num_sms))``
    of them: then it is about an eighth of what an SM has to do, and a late one delays the call by
    no more than that. But it gets at least 4, so that K and V are not loaded for too few queries,
    unless that would leave some SM without an item, ``ceil(T / num_sms) < 4``; and at most 128,
    from where loading K and V is negligible.

    Parameters
    ----------
    num_queries : int
        Tq, query tokens of all sequences.
    table_width : int
        K, slots of each query's list.
    num_q_heads, num_kv_heads : int
        Hq and Hkv; G is their quotient.
    num_sms : int
        SMs that the items are spread over.

    Returns
    -------
    int
        A multiple of q_tok, at least q_tok.

    Raises
    ------
    TypeError, ValueError
        A number is no int or out of its range, or Hkv does not divide Hq.
    """
    expect_int("num_queries", num_queries, 0)
    expect_int("table_width", table_width, 0)
    expect_int("num_sms", num_sms, 1)
    q_tok = _queries_per_tile(num_q_heads, num_kv_heads)
    tiles = _ceil_div(num_kv_heads * num_queries * table_width, q_tok)
    balanced = _ceil_div(tiles, ITEMS_PER_SM * num_sms)
    one_per_sm = _ceil_div(tiles, num_sms)
    return q_tok * max(1, min(max(balanced, MIN_TILES), one_per_sm, MAX_TILES))


def work_capacity(*, num_kv_heads: int, num_rows: int, num_slots: int, target: int) -> int:
    """Bound the number of work items from shapes alone.

    A row of n > 0 entries makes ``ceil(n / target) <= (n + target - 1) / target`` items. A head
    has at most `num_slots` entries, in at most ``min(num_rows, num_slots)`` rows that are not
    empty, so the items of a head number at most
    ``(num_slots + min(num_rows, num_slots) * (target - 1)) // target``. Rows that hold one entry
    more than a multiple of the target reach the bound. Without rows there are no items.

    Parameters
    ----------
    num_kv_heads, num_rows, num_slots : int
        Hkv, R and E = Tq * K of the CSR.
    target : int
        The most query tokens of an item.

    Returns
    -------
    int
        A number of items that no CSR of these shapes exceeds.

    Raises
    ------
    TypeError, ValueError
        A number is no int or out of its range.
    """
    expect_int("num_kv_heads", num_kv_heads, 0)
    expect_int("num_rows", num_rows, 0)
    expect_int("num_slots", num_slots, 0)
    expect_int("target", target, 1)
    rows = min(num_rows, num_slots)
    if rows == 0:
        return 0
    return num_kv_heads * ((num_slots + rows * (target - 1)) // target)


class Splitting(NamedTuple):
    """How the rows of a CSR are split into items, from shapes alone."""

    target: int  # most query tokens of an item
    q_tok: int  # query tokens of a tile
    capacity: int  # bound of the number of items

    @property
    def heaviest(self) -> int:
        """Most tiles of an item."""
        return self.target // self.q_tok


def splitting_of(
    shape: tuple[int, int, int], *, num_rows: int, num_q_heads: int, num_sms: int
) -> Splitting:
    """Decide how to split the rows of a table [Hkv, Tq, K]."""
    num_kv_heads, num_queries, width = shape
    target = target_q_per_cta(
        num_queries=num_queries,
        table_width=width,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
    )
    capacity = work_capacity(
        num_kv_heads=num_kv_heads, num_rows=num_rows, num_slots=num_queries * width, target=target
    )
    return Splitting(target, _queries_per_tile(num_q_heads, num_kv_heads), capacity)


def schedule_of(csr: K2QCSR, splitting: Splitting) -> Schedule:
    """Make the schedule of a CSR; see `build_schedule`."""
    work_items, num_items = _split_rows(csr, splitting)
    split_slot, split_counts = _number_partials(csr)
    return Schedule(work_items, num_items, split_slot, split_counts, splitting.target)


def _split_rows(csr: K2QCSR, splitting: Splitting) -> tuple[Tensor, Tensor]:
    """Items [capacity, 6], heaviest first, and their number [1]."""
    target, q_tok, capacity = splitting
    num_rows = csr.row_coords.shape[0]
    lengths = csr.row_ptr.diff(dim=1).flatten().to(torch.int64)
    items = (lengths + target - 1) // target
    ends = items.cumsum(dim=0)

    item = torch.arange(capacity, device=lengths.device)
    owner = torch.searchsorted(ends, item, right=True).clamp(max=lengths.shape[0] - 1)
    q_begin = (item - ends[owner] + items[owner]) * target
    q_count = (lengths[owner] - q_begin).clamp(0, target)  # 0 past the last item
    kv_head, row = owner // max(num_rows, 1), owner % max(num_rows, 1)
    fields = torch.stack((kv_head, row, q_begin, q_count, *csr.row_coords[row].unbind(1)), dim=1)

    tiles = (q_count + q_tok - 1) // q_tok
    order = tiles.argsort(descending=True, stable=True)
    work_items = fields.masked_fill((q_count == 0).unsqueeze(1), EMPTY)[order].to(torch.int32)
    return work_items, items.sum(dtype=torch.int32).reshape(1)


def _number_partials(csr: K2QCSR) -> tuple[Tensor, Tensor]:
    """Slot of each entry [Hkv, E] and partials of each query [Tq, Hkv]."""
    num_kv_heads, num_slots = csr.q_indices.shape
    unused = csr.edge_ids < 0
    edges = csr.edge_ids.to(torch.int64).masked_fill(unused, num_slots)
    placed = torch.zeros(
        (num_kv_heads, num_slots + 1), dtype=torch.int32, device=edges.device
    ).scatter_(1, edges, 1)
    placed = placed[:, :num_slots].reshape(num_kv_heads, csr.num_queries, csr.table_width)
    rank = placed.cumsum(dim=2, dtype=torch.int32) - placed
    rank = torch.nn.functional.pad(rank.flatten(1), (0, 1), value=EMPTY)
    split_counts = placed.sum(dim=2, dtype=torch.int32).t().contiguous()
    return rank.gather(1, edges), split_counts


def _queries_per_tile(num_q_heads: int, num_kv_heads: int) -> int:
    expect_int("num_q_heads", num_q_heads, 0)
    expect_int("num_kv_heads", num_kv_heads, 0)
    if num_q_heads % max(num_kv_heads, 1) or (num_q_heads and not num_kv_heads):
        raise ValueError(
            f"num_q_heads must be a multiple of the {num_kv_heads} KV heads, got {num_q_heads}"
        )
    group = num_q_heads // max(num_kv_heads, 1)
    return max(1, MMA_ROWS // max(group, 1))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
