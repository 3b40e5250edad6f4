"""What a persistent, warp-specialised kernel is made of: barriers, work items, rounds.

A kernel class derives from `PersistentKernel` and brings a `Schedule` that holds `item_barriers`,
`round_barrier` and the regions `items`, `clc` and `rounds`.

Work items come from the grid through a queue. The rounds of an item's rows come from the load warp,
as words: valid keys in the low byte, the sign for a row's last round, 0 for a row without any. All
other roles run from these words, so that they agree on trip counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from sparse_atten.cute_kernels.common import ptx
from sparse_atten.cute_kernels.common.block_list import BLOCK, Item, Tables
from sparse_atten.cute_kernels.common.schedule import MBARRIER_BYTES, Barrier, Schedule, once, warps

ITEM_SLOTS = 2
ROUND_SLOTS = 8  # for each of two tiles


def item_barriers(readers: tuple[str, ...]) -> tuple[Barrier, ...]:
    """Return the barriers of the queue: the scheduler warp fills it, `readers` empty it."""
    return (
        Barrier("item_full", ITEM_SLOTS, once("scheduler"), readers, "the slot names a work item"),
        Barrier("item_empty", ITEM_SLOTS, warps(*readers), ("scheduler",), "all have read it"),
        Barrier("clc_full", 1, once("scheduler"), ("scheduler",), "the hardware has answered", 16),
    )


def round_barrier(readers: tuple[str, ...]) -> Barrier:
    """Return the barriers of the round words: the load warp fills a slot, `readers` run from it."""
    meaning = "the slot holds a round word"
    return Barrier("rounds_full", 2 * ROUND_SLOTS, once("load"), readers, meaning)


class Env(NamedTuple):
    """What a role may touch."""

    tables: Any  # the kernel's arguments beside the TMA descriptors
    maps: tuple  # TMA (atom, tensor) of q, k, v and the output
    base: cute.Pointer  # shared memory
    smem: Int32  # shared address of `base`


class Stream(NamedTuple):
    """How far a role is with one of the two Q tiles."""

    word: Int32  # round word in work, 0: none
    cursor: Int32  # 8 times the round words taken since the kernel began
    rounds: Int32  # rounds finished since the kernel began
    rows: Int32  # rows with at least one round finished since the kernel began

    @classmethod
    def start(cls) -> Stream:
        """Return the state before the first item."""
        return cls(Int32(0), Int32(0), Int32(0), Int32(0))


class PersistentKernel:
    """Barriers by name, and work items that come from the grid."""

    def __init__(self, schedule: Schedule, persistent: str) -> None:
        self.schedule = schedule
        self.persistent = persistent

    def init_barriers(self, base: cute.Pointer) -> None:
        """Initialise every mbarrier. One warp."""
        first = cute.recast_ptr(base + self.schedule.smem_offset("barriers"), dtype=Int64)
        with cute.arch.elect_one():
            for barrier in self.schedule.barriers:
                arrivals = self.schedule.arrivals(barrier)
                for stage in range(barrier.stages):
                    index = self.schedule.barrier_index(barrier.name) + stage
                    cute.arch.mbarrier_init(first + index, arrivals)
        cute.arch.mbarrier_init_fence()

    def barrier(
        self, env: Env, name: str, stage: int = 0, offset: Int32 | None = None
    ) -> cute.Pointer:
        """Return the mbarrier of a stage, or `offset` bytes after it."""
        address = env.smem if offset is None else env.smem + offset
        index = self.schedule.barrier_index(name) + stage
        address += self.schedule.smem_offset("barriers") + MBARRIER_BYTES * index
        return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=MBARRIER_BYTES)

    def wait(
        self, env: Env, name: str, stage: int, phase: Int32, offset: Int32 | None = None
    ) -> None:
        """Block until the phase of that parity is complete."""
        cute.arch.mbarrier_wait(self.barrier(env, name, stage, offset), phase)

    def arrive(self, env: Env, name: str, stage: int = 0, offset: Int32 | None = None) -> None:
        """Arrive once for the calling lane."""
        cute.arch.mbarrier_arrive(self.barrier(env, name, stage, offset))

    @cute.jit
    def take_item(self, env: Env, index: Int32) -> Item:
        """Wait for the CTA's work item number `index`."""
        slot = (index & (ITEM_SLOTS - 1)) * MBARRIER_BYTES
        self.wait(env, "item_full", 0, (index >> 1) & 1, slot)
        words = ptx.smem_load_v4(env.smem + slot * 2, self.schedule.smem_offset("items"))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(env, "item_empty", 0, slot)
        return Item(words[0], words[1], words[2], words[3], index)

    @cute.jit
    def scheduler(self, env: Env) -> None:
        """Publish this CTA's own work item, then those of CTAs that will not be launched."""
        tables = env.tables
        x, y, z = cute.arch.block_idx()
        pairs = ((tables.num_queries + BLOCK - 1) // BLOCK + 1) // 2
        linear = x
        item = Item(x, y, z, Int32(1), Int32(0))
        if const_expr(self.persistent == "static"):
            item = self.unravel(tables, linear, pairs)
        self.publish_item(env, Int32(0), item)
        index = Int32(1)
        while item.valid != 0:
            slot = (index & (ITEM_SLOTS - 1)) * MBARRIER_BYTES
            self.wait(env, "item_empty", 0, ((index >> 1) & 1) ^ 1, slot)
            if const_expr(self.persistent == "static"):
                linear += cute.arch.grid_dim()[0]
                item = self.unravel(tables, linear, pairs)
            else:
                item = Item(*self.cancel_cta(env, (index & 1) ^ 1), index)
            self.publish_item(env, index, item)
            index += 1

    def cancel_cta(self, env: Env, phase: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Cancel a CTA that is not launched yet; return its index x, y, z, and if there was one."""
        response = cute.recast_ptr(env.base + self.schedule.smem_offset("clc"), dtype=Int32)
        with cute.arch.elect_one():
            clc_full = self.barrier(env, "clc_full")
            cute.arch.mbarrier_arrive_and_expect_tx(clc_full, 16)
            cute.arch.issue_clc_query(clc_full, response, multicast=False)
        self.wait(env, "clc_full", 0, phase)
        cta = cute.arch.clc_response(response)
        # The next response is written by the asynchronous proxy: this read comes first.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        return cta

    def unravel(self, tables: Tables, linear: Int32, pairs: Int32) -> Item:
        """Split a work item number: Q pair fastest, then head, then batch."""
        rest = linear // pairs
        batch = rest // tables.num_q_heads
        head = rest - batch * tables.num_q_heads
        valid = Int32(batch < tables.batch)
        return Item(linear - rest * pairs, head, batch, valid, Int32(0))

    def publish_item(self, env: Env, index: Int32, item: Item) -> None:
        """Write an item to its slot and signal it."""
        slot = (index & (ITEM_SLOTS - 1)) * MBARRIER_BYTES
        with cute.arch.elect_one():
            ptx.smem_store_v4(
                env.smem + slot * 2, self.schedule.smem_offset("items"), list(item[:4])
            )
            self.arrive(env, "item_full", 0, slot)

    @cute.jit
    def take_word(self, env: Env, tile: cutlass.Constexpr, stream: Stream) -> Stream:
        """Wait for the next round word of a tile."""
        word = ptx.smem_load(*self.await_word(env, tile, stream), Int32)
        return Stream(word, stream.cursor + 8, stream.rounds, stream.rows)

    def await_word(self, env: Env, tile: int, stream: Stream) -> tuple[Int32, int]:
        """Wait for the next round word of a tile; return where it lies."""
        slot = stream.cursor & (8 * ROUND_SLOTS - 1)
        phase = (stream.cursor >> 6) & 1
        self.wait(env, "rounds_full", tile * ROUND_SLOTS, phase, slot)
        return env.smem + slot, self.schedule.smem_offset("rounds") + tile * ROUND_SLOTS * 8

    @cute.jit
    def end_round(self, env: Env, tile: cutlass.Constexpr, stream: Stream) -> Stream:
        """Go on to the row's next round, or leave word 0 after the last one."""
        word = stream.word
        stream = Stream(Int32(0), stream.cursor, stream.rounds + 1, stream.rows)
        if word >= 0:
            stream = self.take_word(env, tile, stream)
        else:
            stream = Stream(Int32(0), stream.cursor, stream.rounds, stream.rows + 1)
        return stream

    def publish_word(self, env: Env, tile: int, stream: Stream, word: Int32) -> Stream:
        """Tell the other roles of a tile's next round, or with word 0 that the row has none."""
        slot = stream.cursor & (8 * ROUND_SLOTS - 1)
        offset = self.schedule.smem_offset("rounds") + tile * ROUND_SLOTS * 8
        with cute.arch.elect_one():
            ptx.smem_store(env.smem + slot, offset, word)
            self.arrive(env, "rounds_full", tile * ROUND_SLOTS, slot)
        return stream._replace(word=word, cursor=stream.cursor + 8)
