"""Walk a Q block's list of KV blocks, 32 entries at a time, on the device.

This is the one place where a block is dropped: an id outside the tensor, a block without a valid
key (a negative size counts as none, a negative count as an empty list). What is taken is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

BLOCK = 128
WINDOW = 32  # entries in work at a time, one for each lane

# A round word: its low byte counts the valid keys, its sign marks the row's last round; 0 is none.
LAST = -(2**31)
KEYS = 255


class Tables(NamedTuple):
    """A kernel's arguments beside the TMA descriptors. Strides are in elements."""

    indices: cute.Pointer  # int32 [B, Hq, Nq, K]
    counts: cute.Pointer  # int32 [B, Hq, Nq]
    kv_sizes: cute.Pointer  # int32 [B, Nkv]
    q_sizes: cute.Pointer  # int32 [Nq]
    lse: cute.Pointer  # float32 [B, Hq, Sq], contiguous
    indices_strides: tuple[Int64, Int64, Int64, Int64]
    counts_strides: tuple[Int64, Int64, Int64]
    kv_sizes_strides: tuple[Int64, Int64]
    q_sizes_stride: Int64
    batch: Int32
    num_q_heads: Int32
    group_size: Int32  # Hq / Hkv
    num_queries: Int32
    num_keys: Int32
    table_width: Int32  # K
    dense_rows: Int32
    scale_log2: Float32  # softmax_scale * log2(e)


class Item(NamedTuple):
    """A work item: Q blocks 2 * pair and 2 * pair + 1 of one head; `valid` 0 ends the kernel."""

    pair: Int32
    head: Int32
    batch: Int32
    valid: Int32
    order: Int32  # how many items this CTA took before


class Row(NamedTuple):
    """A place in one list."""

    pending: Int32  # bit of each lane whose entry is kept and not yet taken
    block: Int32  # the lane's KV block
    size: Int32  # the lane's valid keys
    next: Int32  # first entry after the window
    length: Int32  # entries of the list
    batch: Int32
    head: Int32
    q_block: Int32
    kv_head: Int32
    current: Int32  # the KV block that was taken last


def read_int(pointer: cute.Pointer, offset: Int64) -> Int32:
    """Read one int32, `offset` elements from `pointer`."""
    return cute.arch.load(pointer + offset, Int32)


def q_size(tables: Tables, q_block: Int32) -> Int32:
    """Return how many queries of a Q block are no padding."""
    return read_int(tables.q_sizes, Int64(q_block) * tables.q_sizes_stride)


@cute.jit
def row_length(tables: Tables, item: Any, q_block: Int32, has_sizes: cutlass.Constexpr) -> Int32:
    """Read how many entries the list of a Q block of the item's head has; negative for none."""
    count = Int32(0)
    if q_block * BLOCK < tables.num_queries:
        if q_block < tables.dense_rows:
            count = (tables.num_keys + BLOCK - 1) // BLOCK
        else:
            b, h, n = tables.counts_strides
            offset = Int64(item.batch) * b + Int64(item.head) * h + Int64(q_block) * n
            count = read_int(tables.counts, offset)
            count = cutlass.min(count, tables.table_width)
        if const_expr(has_sizes[1]):
            count *= Int32(q_size(tables, q_block) > 0)
    return count


@cute.jit
def open_row(tables: Tables, item: Any, q_block: Int32, has_sizes: cutlass.Constexpr) -> Row:
    """Read how long the list of a Q block of the item's head is, and its first window.

    `has_sizes` says which tables of sizes exist: of KV blocks, of Q blocks.
    """
    count = row_length(tables, item, q_block, has_sizes)
    zero = Int32(0)
    place = (item.batch, item.head, q_block, item.head // tables.group_size)
    return refill(tables, Row(zero, zero, zero, zero, count, *place, zero), has_sizes)


@cute.jit
def refill(tables: Tables, row: Row, has_sizes: cutlass.Constexpr) -> Row:
    """Read windows until one holds a kept block or the list ends."""
    lane = cute.arch.lane_idx()
    num_blocks = (tables.num_keys + BLOCK - 1) // BLOCK
    while (row.pending == 0) & (row.next < row.length):
        entry = row.next + lane
        block = Int32(-1)
        size = Int32(0)
        if entry < row.length:
            block = entry
            if row.q_block >= tables.dense_rows:
                b, h, n, k = tables.indices_strides
                offset = Int64(row.batch) * b + Int64(row.head) * h + Int64(row.q_block) * n
                block = read_int(tables.indices, offset + Int64(entry) * k)
        if (block >= 0) & (block < num_blocks):
            size = cutlass.min(tables.num_keys - block * BLOCK, BLOCK)
            if const_expr(has_sizes[0]):
                b, n = tables.kv_sizes_strides
                given = read_int(tables.kv_sizes, Int64(row.batch) * b + Int64(block) * n)
                size = cutlass.min(given, size)
        pending = Int32(cute.arch.vote_ballot_sync(size > 0))
        row = row._replace(pending=pending, block=block, size=size, next=row.next + WINDOW)
    return row


@cute.jit
def take_block(tables: Tables, row: Row, has_sizes: cutlass.Constexpr) -> tuple[Row, Int32]:
    """Take the first pending entry; return the row after it and the round word."""
    lowest = row.pending & (0 - row.pending)
    source = cute.arch.popc(lowest - 1)
    block = cute.arch.shuffle_sync(row.block, source)
    word = cute.arch.shuffle_sync(row.size, source)
    row = row._replace(pending=row.pending ^ lowest, current=block)
    row = refill(tables, row, has_sizes)
    if row.pending == 0:
        word = word | LAST
    return row, word
