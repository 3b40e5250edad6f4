"""Work items that CTAs draw from a counter in global memory; the last ones longest list first.

A CTA starts with the item of its own number and draws the next ones; who draws the last number
sets the counter back to 0. Late items decide when a grid is done, so the last are sorted by length:
two warps of each CTA do it when the kernel begins, and all come to the same order.

A kernel class derives from `QueueKernel` and brings a `Schedule` with the role `order`,
`order_barrier` and the regions `keys` and `order`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from sparse_atten.cute_kernels.common import block_list, ptx
from sparse_atten.cute_kernels.common.block_list import BLOCK, Tables
from sparse_atten.cute_kernels.common.persistent import Env, PersistentKernel
from sparse_atten.cute_kernels.common.schedule import Barrier, Schedule, lanes

LAST_ITEMS = 256  # that are taken longest list first


def order_barrier() -> Barrier:
    """Return the barrier of the order: the role `order` fills it, the load warp waits."""
    return Barrier("order_full", 1, lanes("order"), ("load",), "the last items are in order")


class Item(NamedTuple):
    """A work item: a Q block of one head; `valid` 0 ends the kernel."""

    q_block: Int32
    head: Int32
    batch: Int32
    valid: Int32
    order: Int32  # how many items this CTA took before


class QueueKernel(PersistentKernel):
    """Barriers by name, and items from the counter."""

    def __init__(self, schedule: Schedule, has_sizes: tuple[bool, bool]) -> None:
        super().__init__(schedule, "")
        self.has_sizes = has_sizes

    @cute.jit
    def draw(self, tables: Tables, queue: cute.Pointer) -> Int32:
        """Draw the number of this CTA's next item (lane 0 has it); the last draw resets."""
        number: Any = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add(queue, Int32(1), sem="relaxed", scope="gpu")
            if number == self.num_items(tables) - 1:
                cute.arch.store(queue, Int32(0))
            number += cute.arch.grid_dim()[0]
        return number

    @cute.jit
    def reorder(self, env: Env, number: Int32) -> Int32:
        """Return the item that a drawn number stands for."""
        first = self.first_of_last(env.tables)
        if (number >= first) & (number < self.num_items(env.tables)):
            self.wait(env, "order_full", 0, Int32(0))
            place = env.smem + (number - first) * 4
            number = first + ptx.smem_load(place, self.schedule.smem_offset("order"), Int32)
        return number

    def first_of_last(self, tables: Tables) -> Int32:
        """Return the first of the items that are taken longest list first; all are drawn."""
        items = self.num_items(tables)
        return items - cutlass.min(items - cute.arch.grid_dim()[0], LAST_ITEMS)

    def num_items(self, tables: Tables) -> Int32:
        """Count the work items: Q blocks of all heads."""
        return (tables.num_queries + BLOCK - 1) // BLOCK * tables.num_q_heads * tables.batch

    def item_of(self, tables: Tables, number: Int32, order: Int32) -> Item:
        """Split a work item number: Q block fastest, then head, then batch."""
        blocks = (tables.num_queries + BLOCK - 1) // BLOCK
        rest = number // blocks
        batch = rest // tables.num_q_heads
        head = rest - batch * tables.num_q_heads
        return Item(number - rest * blocks, head, batch, Int32(batch < tables.batch), order)

    @cute.jit
    def order(self, env: Env) -> None:
        """Rank the last items: longer lists first, then in order."""
        thread = cute.arch.thread_idx()[0] - self.schedule.role("order").first * 32
        threads = self.schedule.role("order").warps * 32
        first, items = self.first_of_last(env.tables), self.num_items(env.tables)
        keys = []
        for n in range_constexpr(0, LAST_ITEMS, threads):
            key = Int32(-1)
            item = self.item_of(env.tables, first + n + thread, Int32(0))
            if first + n + thread < items:
                length = block_list.row_length(env.tables, item, item.q_block, self.has_sizes)
                key = cutlass.max(length, 0) * LAST_ITEMS + (LAST_ITEMS - 1 - n) - thread
            ptx.smem_store(env.smem + thread * 4, self.schedule.smem_offset("keys") + n * 4, key)
            keys.append(key)
        cute.arch.barrier(barrier_id=3, number_of_threads=threads)
        ranks = [Int32(0) for _ in keys]
        address = env.smem
        while address < env.smem + LAST_ITEMS * 4:
            others = ptx.smem_load_v4(address, self.schedule.smem_offset("keys"))
            for i in range_constexpr(len(keys)):
                for other in others:
                    ranks[i] += Int32(other > keys[i])
            address += 16
        for i in range_constexpr(len(keys)):
            if keys[i] >= 0:
                place = env.smem + ranks[i] * 4
                number = thread + i * threads
                ptx.smem_store(place, self.schedule.smem_offset("order"), number)
        self.arrive(env, "order_full")
