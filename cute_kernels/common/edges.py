"""What a KV-outer kernel does before it computes: work items, keys, and the query tokens of a tile.

A kernel class derives from `EdgeKernel` and brings a `Schedule` with what this file waits for and
arrives on: `persistent.item_barriers`, k and v, q, and `meta`; and the regions `items`, `clc`, `q`,
`k`, `v`, `meta` and `most_seen`.

The scheduler warp reads rows of the schedule's `work_items` and the load warp entries of the k2q
CSR. Here alone is decided what is dropped: an item that names no row, an entry whose token or slot
lies outside the chunk. A block outside its sequence or the pool is one without keys.

Tiles are counted over all items of the CTA: each has a metadata
slot, and a stage for its Q: `place_of` and `phase_of`, here two that take turns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from sparse_atten.cute_kernels.common import ptx, tiles
from sparse_atten.cute_kernels.common.block_list import BLOCK, read_int
from sparse_atten.cute_kernels.common.persistent import ITEM_SLOTS, Env, PersistentKernel
from sparse_atten.cute_kernels.common.schedule import Schedule
from sparse_atten.cute_kernels.common.tiles import COLUMNS, HALF_BYTES, SWIZZLE_BYTES, TILE_BYTES

TILE_ROWS = 128  # query tokens of a tile times the heads of a group
ITEM_BYTES = 32
META_BYTES = 8192  # of all tiles: two words for each token, the one in the chunk or a negative, and
SEEN = 255  # the keys that it sees in the part of this mask, with the partial's slot above it
MMA_K = 16  # keys of a step of PV
WINDOW = 32  # entries in work at a time, one for each lane


class Tables(NamedTuple):
    """A kernel's arguments beside the TMA descriptors. Strides are in elements."""

    work_items: cute.Pointer  # int32 [capacity, 6]
    num_items: cute.Pointer  # int32 [1]
    row_ptr: cute.Pointer  # int32 [Hkv, R + 1]
    q_indices: cute.Pointer  # int32 [Hkv, E]
    split_slot: cute.Pointer  # int32 [Hkv, E]
    cu_seqlens_q: cute.Pointer  # int32 [B + 1]
    cu_seqlens_k: cute.Pointer  # int32 [B + 1], of flat keys
    seqused_k: cute.Pointer  # int32 [B], may be null
    page_table: cute.Pointer  # int32 [B, P], of paged keys
    lse: cute.Pointer  # float32 [K, chunk, Hq]
    lse_t: cute.Pointer  # float32 [K, chunk, Hq]
    cu_seqlens_q_stride: Int64
    cu_seqlens_k_stride: Int64
    seqused_k_stride: Int64
    page_table_strides: tuple[Int64, Int64]
    capacity: Int32
    num_rows: Int32  # R
    num_entries: Int32  # E
    num_queries: Int32  # Tq
    num_q_heads: Int32
    batch: Int32
    key_rows: Int32  # rows of an outer block of K and V
    key_outer: Int32  # outer blocks: pages, or 1
    num_kv_blocks: Int32
    first_token: Int32
    chunk: Int32
    num_slots: Int32  # K
    scale_log2: Float32  # softmax_scale * log2(e)
    scale_t_log2: Float32  # lse_temperature times that


class Item(NamedTuple):
    """A published work item; one without tiles ends the kernel. Tiles are those of the CTA."""

    first: Int32  # tile
    end: Int32
    kv_head: Int32
    order: Int32  # how many items this CTA took before
    slot: Int32  # 8 times the slot of the queue

    @classmethod
    def none(cls) -> Item:
        """Return what comes before the first item."""
        zero = Int32(0)
        return cls(zero, zero, zero, Int32(-1), zero)


class Job(NamedTuple):
    """What the scheduler warp made of a row of `work_items`."""

    kv_head: Int32
    entry: Int32  # of the head's CSR, the first
    q_count: Int32  # 0: nothing to do
    keys: Int32  # valid keys of the block
    token: Int32  # the token that entry value 0 names
    token_end: Int32
    shift: Int32  # a token sees `token + shift` keys of the block if causal
    row: Int32  # where the block starts
    outer: Int32


def meta_slots(rows: int) -> int:
    """Return how many tiles of so many rows the load warp may be ahead of the last reader."""
    return META_BYTES // (rows * 8)


class Place(NamedTuple):
    """Where Q of a tile lies."""

    stage: Int32  # 8 times the stage
    offset: Int32  # of its first row in the region, bytes


class Window(NamedTuple):
    """32 entries of a CSR row, one for each lane; -1 after the last."""

    local: Int32
    slot: Int32


def clamp(value: Int32, low: Int32 | int, high: Int32 | int) -> Int32:
    """Return the value if it is in [low, high], else the nearer end."""
    return cutlass.min(cutlass.max(value, low), high)


def extent(
    offsets: cute.Pointer, stride: Int64, batch: Int32, length: Int32
) -> tuple[Int32, Int32]:
    """Return first and end of a sequence of a packed tensor of `length` tokens."""
    start = clamp(read_int(offsets, Int64(batch) * stride), 0, length)
    return start, clamp(read_int(offsets, Int64(batch + 1) * stride), start, length)


def tail_start(most: Int32) -> Int32:
    """Return the first of the 16 keys of which PV reads a copy, if the tile sees `most` < 128."""
    return (cutlass.max(most, 1) - 1) & ~(MMA_K - 1)


class EdgeKernel(PersistentKernel):
    """Roles `scheduler` and `load`, and what the other roles read of items and tiles."""

    def __init__(
        self,
        schedule: Schedule,
        config: Any,
        *,
        rows: int,
        persistent: str,
        shuffled_maximum: bool = False,
    ) -> None:
        super().__init__(schedule, persistent)
        self.config = config
        self.rows = rows
        self.shuffled_maximum = shuffled_maximum
        self.dtype, self.out_dtype = config.dtypes
        self.group = config.group_size
        self.meta_slots = meta_slots(rows)
        self.tokens = rows // self.group  # of a tile
        self.parts = max(1, self.tokens // WINDOW)  # windows of a tile
        self.in_window = min(self.tokens, WINDOW)  # of a tile's tokens
        self.unroll = 1 if self.in_window == WINDOW else self.in_window  # of loops over these

    def place_of(self, tile: Int32) -> Place:
        """Return where Q of a tile lies: two stages that take turns."""
        stage = (tile & 1) * 8
        return Place(stage, stage * (TILE_BYTES // 8))

    def phase_of(self, tile: Int32) -> Int32:
        """Return the parity of the times that a tile's stage was filled before."""
        return (tile >> 1) & 1

    @cute.jit
    def scheduler(self, env: Env) -> None:
        """Read work items, publish those with something to do, and load their K and V."""
        tables = env.tables
        count = clamp(read_int(tables.num_items, Int64(0)), 0, tables.capacity)
        index, taken, published = cute.arch.block_idx()[0], Int32(0), Int32(0)
        while index < count:
            job = self.read_job(tables, index)
            if job.q_count > 0:
                self.publish(env, published, job)
                self.load_keys(env, published, job)
                published += 1
            if const_expr(self.persistent == "static"):
                index += cute.arch.grid_dim()[0]
            else:
                x, _, _, valid = self.cancel_cta(env, taken & 1)
                index = x
                if valid == 0:
                    index = count
                taken += 1
        # K2 may take the SMs that have nothing left to begin; it waits for the whole grid itself.
        cute.arch.griddepcontrol_launch_dependents()
        zero = Int32(0)
        self.publish(env, published, Job(*(zero,) * 9))

    def read_job(self, tables: Tables, index: Int32) -> Job:
        """Read a work item and clamp it to the tensors."""
        at = Int64(index) * 6
        kv_head, row, begin, q_count, batch, block = (
            read_int(tables.work_items, at + i) for i in range(6)
        )
        num_kv_heads = tables.num_q_heads // self.group
        legal = (kv_head >= 0) & (kv_head < num_kv_heads) & (row >= 0) & (row < tables.num_rows)
        legal = legal & (batch >= 0) & (batch < tables.batch)
        kv_head, row, batch, q_count = (x * Int32(legal) for x in (kv_head, row, batch, q_count))

        entries = tables.num_entries
        start = read_int(tables.row_ptr, Int64(kv_head) * (tables.num_rows + 1) + row)
        start = clamp(start, 0, entries)
        start += clamp(begin, 0, entries - start)
        q_count = clamp(q_count, 0, entries - start)

        of_query = tables.cu_seqlens_q, tables.cu_seqlens_q_stride
        q_start, q_end = extent(*of_query, batch, tables.num_queries)
        length, block, origin = self.locate(tables, batch, block)
        token = cutlass.max(q_start, tables.first_token)
        token_end = cutlass.min(q_end, tables.first_token + tables.chunk)
        shift = length - q_end + 1 - block * BLOCK
        keys = clamp(length - block * BLOCK, 0, BLOCK)
        return Job(kv_head, start, q_count, keys, token, token_end, shift, *origin)

    @cute.jit
    def locate(
        self, tables: Tables, batch: Int32, block: Int32
    ) -> tuple[Int32, Int32, tuple[Int32, Int32]]:
        """Return the keys of a sequence, 0 if it has no such block, the block, and its place."""
        exists = Int32((block >= 0) & (block < tables.num_kv_blocks))
        block *= exists
        if const_expr(self.config.paged):
            used = read_int(tables.seqused_k, Int64(batch) * tables.seqused_k_stride)
            length = clamp(used, 0, tables.num_kv_blocks * BLOCK)
            row, column = tables.page_table_strides
            page = read_int(tables.page_table, Int64(batch) * row + Int64(block) * column)
            exists = exists & Int32((page >= 0) & (page < tables.key_outer))
            place = (Int32(0), page * exists)
        else:
            of_key = tables.cu_seqlens_k, tables.cu_seqlens_k_stride
            start, end = extent(*of_key, batch, tables.key_rows)
            length = end - start
            if tables.seqused_k.toint() != 0:
                used = read_int(tables.seqused_k, Int64(batch) * tables.seqused_k_stride)
                length = clamp(used, 0, length)
            place = (start + block * BLOCK, Int32(0))
        return length * exists, block, place

    @cute.jit
    def publish(self, env: Env, order: Int32, job: Job) -> None:
        """Write a job to the queue for all other roles, once its slot is free."""
        slot = (order & (ITEM_SLOTS - 1)) * 8
        self.wait(env, "item_empty", 0, ((order >> 1) & 1) ^ 1, slot)
        num_tiles = (job.q_count + (self.tokens - 1)) // self.tokens
        address, offset = env.smem + slot * (ITEM_BYTES // 8), self.schedule.smem_offset("items")
        with cute.arch.elect_one():
            words = [num_tiles, job.kv_head, job.q_count, job.keys]
            ptx.smem_store_v4(address, offset, words)
            words = [job.entry, job.token, job.token_end, job.shift]
            ptx.smem_store_v4(address, offset + 16, words)
            self.arrive(env, "item_full", 0, slot)

    @cute.jit
    def load_keys(self, env: Env, order: Int32, job: Job) -> None:
        """Load K and V, each when the item before is done with its own; without keys, zeros."""
        row = job.row
        if job.keys == 0:
            row = Int32(-BLOCK)
        for operand, name in ((1, "k"), (2, "v")):
            self.wait(env, f"{name}_empty", 0, (order & 1) ^ 1)
            full = self.barrier(env, f"{name}_full")
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_BYTES)
            atom, keys = env.maps[operand]
            origin = (row, 0, job.outer, job.kv_head)
            source = cute.domain_offset(origin, keys)[(None, None, 0, 0)]
            source = cute.local_tile(source, (BLOCK, COLUMNS), (0, 0))
            target = tiles.tile_at(env.base, self.schedule.smem_offset(name), self.dtype)
            tiles.load_tile(atom, source, target, full)

    @cute.jit
    def next_item(self, env: Env, item: Item) -> Item:
        """Wait for the item after `item`; its slot is not given back yet."""
        order = item.order + 1
        slot = (order & (ITEM_SLOTS - 1)) * 8
        self.wait(env, "item_full", 0, (order >> 1) & 1, slot)
        address = env.smem + slot * (ITEM_BYTES // 8)
        words = ptx.smem_load_v4(address, self.schedule.smem_offset("items"))
        return Item(item.end, item.end + words[0], words[1], order, slot)

    def release(self, env: Env, item: Item) -> None:
        """Give the item's slot back. One warp of each role and all its warps."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(env, "item_empty", 0, item.slot)

    @cute.jit
    def take_item(self, env: Env, item: Item) -> Item:
        """Take the item after `item`."""
        item = self.next_item(env, item)
        self.release(env, item)
        return item

    # ---- load ----------------------------------------------------------------------------------

    @cute.jit
    def load(self, env: Env) -> None:
        """Gather the query tokens of each tile and publish what is known of them."""
        item = self.next_item(env, Item.none())
        while item.first < item.end:
            address, offset = (
                env.smem + item.slot * (ITEM_BYTES // 8),
                self.schedule.smem_offset("items"),
            )
            _, kv_head, q_count, keys = ptx.smem_load_v4(address, offset)
            entry, token, token_end, shift = ptx.smem_load_v4(address, offset + 16)
            self.release(env, item)
            zero = Int32(0)
            job = Job(kv_head, entry, q_count, keys, token, token_end, shift, zero, zero)
            first, tile = Int32(0), item.first
            window = self.read_window(env.tables, job, first)
            while first < q_count:
                most = zero
                for part in range_constexpr(self.parts):
                    here = window
                    first += WINDOW
                    window = self.read_window(env.tables, job, first)
                    token, place, seen = self.look_up(env.tables, job, here)
                    for start in range_constexpr(0, WINDOW, self.in_window):
                        if first - WINDOW + start < q_count or part > 0:
                            most = self.most_seen(job, seen, start, most)
                            self.publish_tokens(env, tile, (token, place, most), start, part)
                            self.load_tokens(env, tile, (token, kv_head), start, part)
                            if const_expr(part == self.parts - 1):
                                tile += 1
                                most = zero
            item = self.next_item(env, item)
        self.release(env, item)

    @cute.jit
    def read_window(self, tables: Tables, job: Job, first: Int32) -> Window:
        """Read the entries from number `first` of the item."""
        number = first + cute.arch.lane_idx()
        local, slot = Int32(-1), Int32(-1)
        if number < job.q_count:
            at = Int64(job.kv_head) * tables.num_entries + (job.entry + number)
            local = read_int(tables.q_indices, at)
            slot = read_int(tables.split_slot, at)
        return Window(local, slot)

    @cute.jit
    def look_up(self, tables: Tables, job: Job, window: Window) -> tuple[Int32, Int32, Int32]:
        """Return the lane's token, -1 if there is none, its slot with the keys seen, the latter."""
        token, place, seen = Int32(-1), Int32(0), Int32(0)
        local, slot = window
        exists = (local >= 0) & (local < tables.num_queries)
        exists = exists & (slot >= 0) & (slot < tables.num_slots)
        if exists & (local < job.token_end - job.token):
            token = job.token + local
            seen = job.keys
            if const_expr(self.config.causal):
                seen = clamp(token + job.shift, 0, job.keys)
            place = slot * (SEEN + 1) + seen
        return token, place, seen

    def most_seen(self, job: Job, seen: Int32, start: int, before: Int32) -> Int32:
        """Return the most keys that a token of the tile sees, or one of those `before`."""
        if const_expr(not self.config.causal):
            return job.keys
        lane = cute.arch.lane_idx()
        seen *= Int32((lane >= start) & (lane < start + self.in_window))
        if const_expr(self.shuffled_maximum):
            for distance in (16, 8, 4, 2, 1):
                seen = cutlass.max(seen, cute.arch.shuffle_sync_bfly(seen, distance))
            return cutlass.max(before, seen)
        return cutlass.max(before, cute.arch.warp_redux_sync(seen, "max"))

    @cute.jit
    def publish_tokens(
        self,
        env: Env,
        tile: Int32,
        words: tuple[Int32, Int32, Int32],
        start: cutlass.Constexpr,
        part: cutlass.Constexpr,
    ) -> None:
        """Write two words for each token of a tile's window, after its last one also the most."""
        token, place, most = words
        slot, phase = self.meta_slot(tile)
        if const_expr(part == 0):
            self.wait(env, "meta_empty", 0, phase ^ 1, slot)
        lane = cute.arch.lane_idx() - start
        if (lane >= 0) & (lane < self.in_window):
            address = env.smem + slot * self.rows + lane * 8
            offset = self.schedule.smem_offset("meta") + part * WINDOW * 8
            ptx.smem_store(address, offset, token - env.tables.first_token)
            ptx.smem_store(address, offset + 4, place)
        if const_expr(part == self.parts - 1):
            if lane == 0:
                offset = self.schedule.smem_offset("most_seen")
                ptx.smem_store(env.smem + (slot >> 1), offset, most)
            self.arrive(env, "meta_full", 0, slot)

    @cute.jit
    def load_tokens(
        self,
        env: Env,
        tile: Int32,
        row: tuple[Int32, Int32],
        start: cutlass.Constexpr,
        part: cutlass.Constexpr,
    ) -> None:
        """Load Q of a tile's window; a token that does not exist, -1, is read as 0."""
        token, kv_head = row
        place = self.place_of(tile)
        full = self.barrier(env, "q_full", 0, place.stage)
        if const_expr(part == 0):
            self.wait(env, "q_empty", 0, self.phase_of(tile) ^ 1, place.stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.rows * 2 * SWIZZLE_BYTES)
        address = ptx.opaque(env.smem + place.offset)
        address += self.schedule.smem_offset("q") + part * WINDOW * self.group * SWIZZLE_BYTES
        for j in cutlass.range(self.in_window, unroll=self.unroll):
            one = cute.arch.shuffle_sync(token, start + j)
            for half in range_constexpr(2):
                rows = address + (half * HALF_BYTES + j * self.group * SWIZZLE_BYTES)
                box = tiles.box_at(rows, self.group, self.dtype)
                self.copy_box(env, 0, box, (kv_head, half, one), full)

    def copy_box(
        self, env: Env, operand: int, box: cute.Tensor, place: tuple, full: Any = None
    ) -> None:
        """Load a box of Q (operand 0) or store one of O (3); place: KV head, 128 bytes, token."""
        atom, tensor = env.maps[operand]
        token = (None, None, *place[2:])
        rows = cute.local_tile(tensor[token], box.shape, place[:2])
        source, target = tiles.boxes(atom, box, rows)
        if const_expr(operand == 0):
            cute.copy(atom, target, source, tma_bar_ptr=full)
        else:
            cute.copy(atom, source, target)

    def meta_slot(self, tile: Int32) -> tuple[Int32, Int32]:
        """Return 8 times the slot of a tile's metadata, and the parity of its turn there."""
        shift = self.meta_slots.bit_length() - 1
        return (tile & (self.meta_slots - 1)) * 8, (tile >> shift) & 1

    def wait_meta(self, env: Env, tile: Int32) -> None:
        """Wait for what is known of a tile."""
        slot, phase = self.meta_slot(tile)
        self.wait(env, "meta_full", 0, phase, slot)

    def read_most_seen(self, env: Env, tile: Int32) -> Int32:
        """Return the most keys that a row of a tile sees. Its metadata have been waited for."""
        address = env.smem + (tile & (self.meta_slots - 1)) * 4
        return ptx.smem_load(address, self.schedule.smem_offset("most_seen"), Int32)

    def release_meta(self, env: Env, tile: Int32) -> None:
        """Say that the warp has read what is known of a tile."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(env, "meta_empty", 0, self.meta_slot(tile)[0])

    # ---- store ---------------------------------------------------------------------------------

    def read_places(self, env: Env, tile: Int32) -> list:
        """Return token and place of a tile's tokens, a lane for each; one pair for a window."""
        self.wait_meta(env, tile)
        places = []
        here = env.smem + self.meta_slot(tile)[0] * self.rows
        here += (cute.arch.lane_idx() & (self.in_window - 1)) * 8
        for part in range(self.parts):
            offset = self.schedule.smem_offset("meta") + part * WINDOW * 8
            places.append([ptx.smem_load(here, offset + word, Int32) for word in (0, 4)])
        self.release_meta(env, tile)
        return places

    @cute.jit
    def store_token(self, env: Env, rows: Int32, place: tuple) -> None:
        """Write a token's rows of a piece, unless it is negative; KV head, piece, token, slot."""
        kv_head, number, token, partial = place
        if token >= 0:
            with cute.arch.elect_one():
                for half in range_constexpr(2):
                    box = tiles.box_at(rows + half * HALF_BYTES, self.group, self.out_dtype)
                    self.copy_box(env, 3, box, (kv_head, number * 2 + half, token, partial))
