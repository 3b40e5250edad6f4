"""Block-max scores of MSA's index branch for Hopper.

    M[h, b, t] = scale * the largest q[t, h] . k[j, h / G] among the keys j of block b that t sees

Contract. q [Tq, Hidx, d] and k [Tk, Hk, d], or pages of k [pages, Hk, 128, d] in any order of dims,
are bf16 or fp16, d = 64 or 128; G = Hidx / Hk. M is float32 [Hidx, n, C] for C query tokens from
`first_token`, written for the blocks up to the last one that a query of the token's tile sees, -inf
where the token sees no key of the block. The rest of M is left as it is: a token has no key there.
NaN where a token sees a key whose score is NaN; keys that it does not see have no effect. A page id
outside the pool stands for a block without keys. Offsets and lengths are clamped to the tensors.
With `bounds` the kernel also writes what a top-k needs of each token of a sequence: the number of
blocks up to the last one that it sees, and the block that holds its position.

Work. A round is a tile of 256 queries of one head and one KV block. Rounds are in order of
sequence, query tile, head and block; each CTA does an equal run of them, so that a causal triangle,
or any mix of lengths, is balanced to one round. The part of a run in one tile and head is a
segment: its queries stay in registers. The load warp finds its run by itself: its lanes count the
rounds of 32 query tiles at a time. Sequence b has its tiles in slots from ``start_b / 256 + b`` on,
which are enough for any lengths, so that a binary search turns a slot into a sequence.

Registers. A warpgroup holds 128 queries in two halves of 64, each with its own scores. The MMAs of
one half run while the maxima of the other are taken.

Masking. Only where a block ends after the first query's position or the last key. The scores of
hidden keys become -inf before the maximum.

Stores. After a shuffle among the four lanes of a row, 16 lanes of a warp write 16 adjacent floats.

Steady state, each warpgroup with 128 of the 256 queries (r: round; a, b: halves):

    tensor core            consumer 0             consumer 1
    Qa0 K(r)               maxima of b0(r-1)      -
    Qb1 K(r-1)             -                      maxima of a1(r-1)
    Qb0 K(r)               maxima of a0(r)        -
    Qa1 K(r)               -                      maxima of b1(r-1)

Limits. Blocks of 128 keys, d = 64 or 128, fewer than 2^31 rounds.

Sources: MSA (arXiv 2606.13392), sections 3 and 4; PTX ISA for wgmma, mbarrier and
cp.async.bulk.tensor.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_ptr

from sparse_atten.cute_kernels.common import offline, ptx, tiles
from sparse_atten.cute_kernels.common.block_list import read_int
from sparse_atten.cute_kernels.common.edges import clamp, extent
from sparse_atten.cute_kernels.common.fragments import columns, over_quad
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.persistent import Env, PersistentKernel
from sparse_atten.cute_kernels.common.schedule import (
    WARP,
    Barrier,
    Region,
    Role,
    Schedule,
    lanes,
    once,
    warps,
)
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.common.tiles import HALF_BYTES, TILE_BYTES, Ring
from sparse_atten.cute_kernels.msa_scores_arguments import (
    BLOCK,
    HEAD_DIMS,
    MAX_ROUNDS,
    NO_ARGUMENTS,
    QUERIES,
    Arguments,
)

TILE = BLOCK  # keys of a round, and queries of a warpgroup
ROWS = 64  # of a half
MMA_K = 16
K_SLOTS = 5

CONSUMERS = ("consumer0", "consumer1")
SCHEDULE = Schedule(
    roles=(
        Role("consumer0", 0, 4, 232),
        Role("consumer1", 4, 4, 232),
        Role("load", 8, 1, 40),
        Role("bound", 9, 3, 40),
    ),
    barriers=(
        Barrier("q_full", 1, once("load"), CONSUMERS, "a segment and its Q are there"),
        Barrier("q_empty", 1, lanes(*CONSUMERS), ("load",), "both are in registers"),
        Barrier("k_full", K_SLOTS, once("load"), CONSUMERS, "K has landed"),
        Barrier("k_empty", K_SLOTS, warps(*CONSUMERS), ("load",), "the slot's MMAs are done"),
    ),
    tmem=(),
    smem=(
        Region("q", 2 * TILE_BYTES),
        Region("k", K_SLOTS * TILE_BYTES),
        Region("segment", 32),
        Region("keys", K_SLOTS * 8),
    ),
)
DTYPES = {"bf16": BFloat16, "fp16": Float16}


@dataclass(frozen=True)
class Config:
    """What is fixed when the kernel is compiled; with a `Target` it is the cache key.

    Parameters
    ----------
    dtype : {"bf16", "fp16"}
        Element type of q and k.
    head_dim : {64, 128}
        d.
    """

    dtype: str = "bf16"
    head_dim: int = 128

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {self.dtype!r}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {self.head_dim}")


ARCHITECTURES = ("sm_90a",)
SHIPPED = tuple(itertools.starmap(Config, itertools.product(DTYPES, HEAD_DIMS)))


class Tables(NamedTuple):
    """The kernel's arguments beside the TMA descriptors. Strides are in elements."""

    cu_seqlens_q: cute.Pointer  # int32 [B + 1]
    cu_seqlens_k: cute.Pointer  # int32 [B + 1]; null for paged keys
    seqused_k: cute.Pointer  # int32 [B]; may be null for flat keys
    page_table: cute.Pointer  # int32 [B, pages]; null for flat keys
    scores: cute.Pointer  # float32 [Hidx, n, C]
    bounds: cute.Pointer  # int32 [2, C]; may be null
    cu_seqlens_q_stride: Int64
    cu_seqlens_k_stride: Int64
    seqused_k_stride: Int64
    page_table_strides: tuple[Int64, Int64]
    scores_strides: tuple[Int64, Int64]  # of head, block
    batch: Int32
    num_queries: Int32  # Tq
    key_rows: Int32  # Tk, or 128
    key_outer: Int32  # 1, or pages
    num_heads: Int32  # Hidx
    group_size: Int32  # Hidx / Hk
    num_blocks: Int32  # most blocks of a sequence
    first_token: Int32
    num_tokens: Int32  # C
    causal: Int32
    scale: Float32


class QueryTile(NamedTuple):
    """Up to 256 queries of a sequence; each lane of the load warp has one of its own."""

    token: Int32  # first query, from `first_token`
    rows: Int32  # queries
    first: Int32  # position of the first query
    sequence: Int32
    keys: Int32  # of the sequence
    blocks: Int32  # that some query sees; 0: no work


class Segment(NamedTuple):
    """Adjacent blocks for one query tile and head; without rounds it ends the kernel."""

    token: Int32
    rows: Int32
    first: Int32  # position of the first query; after all keys if every query sees them all
    head: Int32
    block: Int32  # first
    rounds: Int32


class Row(NamedTuple):
    """What a thread does in its half of a segment."""

    bound: Int32  # keys that its first row sees, less those before its first column
    limit: Int32  # keys that the half's first row sees
    address: Int64  # where the maximum goes that it writes
    rows: Int32  # it writes where this is positive


class BlockScoresSm90(PersistentKernel):
    """The kernel: one method for each role, in the order of the data flow."""

    def __init__(self, config: Config) -> None:
        super().__init__(SCHEDULE, "")
        self.head_dim = config.head_dim
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self,
        operands: tuple[cute.Pointer, cute.Pointer],
        tables: Tables,
        strides: tuple,
        grid: tuple[Int32, Int32, Int32],
        stream: Any,
    ) -> None:
        """Make the TMA descriptors and launch."""
        token, head = (cute.assume(x, divby=8) for x in strides[0])
        queries = (tables.num_queries, self.head_dim, tables.num_heads)
        row, outer, key_head = (cute.assume(x, divby=8) for x in strides[1])
        heads = tables.num_heads // tables.group_size
        keys = (tables.key_rows, self.head_dim, tables.key_outer, heads)
        layouts = (
            cute.make_layout(queries, stride=(token, 1, head)),
            cute.make_layout(keys, stride=(row, 1, outer, key_head)),
        )
        maps = []
        for pointer, layout in zip(operands, layouts, strict=True):
            op = cpasync.CopyBulkTensorTileG2SOp()
            tensor = cute.make_tensor(pointer, layout)
            tile = tiles.tile_layout(self.dtype, self.head_dim)
            info = cpasync.make_tiled_tma_atom(op, tensor, tile, (TILE, self.head_dim))
            maps.append((info[0], info[1]))
        self.kernel(tuple(maps), tables).launch(
            grid=grid,
            block=[SCHEDULE.threads, 1, 1],
            smem=SCHEDULE.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, maps: tuple, tables: Tables) -> None:
        """Set up the CTA and run each warp's role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cutlass.memory.SmemAllocator().allocate(SCHEDULE.smem_bytes, 1024)
        if warp == SCHEDULE.role("load").first:
            for atom, _ in maps:
                cpasync.prefetch_descriptor(atom)
            self.init_barriers(base)
        cute.arch.barrier()
        env = Env(tables, maps, base, Int32(base.toint()))
        if warp <= SCHEDULE.role("consumer1").last:
            cute.arch.setmaxregister_increase(SCHEDULE.role("consumer0").registers)
            self.consume(env, warp)
        else:
            cute.arch.setmaxregister_decrease(SCHEDULE.role("load").registers)
            if warp == SCHEDULE.role("load").first:
                self.load(env)
            else:
                self.bound(tables, warp)

    # ---- load ----------------------------------------------------------------------------------

    @cute.jit
    def load(self, env: Env) -> None:
        """Find this CTA's run of rounds; publish its segments, load their Q and K."""
        tables = env.tables
        total = Int64(self.count_rounds(tables))
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cursor, end = Int32(total * cta // ctas), Int32(total * (cta + 1) // ctas)
        ring = Ring(Int32(0), Int32(1))
        phase = Int32(1)
        lane, slot, base = cute.arch.lane_idx(), Int32(0), Int32(0)
        while cursor < end:
            own = self.tile_of(tables, slot + lane)
            through = base + self.sum_through(own.blocks * tables.num_heads)
            last = cute.arch.shuffle_sync(through, WARP - 1)
            while cursor < cutlass.min(last, end):
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= cursor))
                tile = QueryTile._make(cute.arch.shuffle_sync(x, owner) for x in own)
                start = cute.arch.shuffle_sync(through, owner) - tile.blocks * tables.num_heads
                head = (cursor - start) // tile.blocks
                block = cursor - start - head * tile.blocks
                count = cutlass.min(tile.blocks - block, end - cursor)
                first = tile.first
                if tables.causal == 0:
                    first = tile.keys
                segment = Segment(tile.token, tile.rows, first, head, block, count)
                self.open_segment(env, segment, phase)
                phase ^= 1
                cursor += count
                while count > 0:
                    ring = self.load_keys(env, tile, head, block, ring)
                    block += 1
                    count -= 1
            base, slot = last, slot + WARP
        zero = Int32(0)
        self.open_segment(env, Segment(zero, zero, zero, zero, zero, zero), phase)

    @cute.jit
    def count_rounds(self, tables: Tables) -> Int32:
        """Count the rounds of all query tiles and heads. A warp."""
        rounds, slot = Int32(0), cute.arch.lane_idx()
        while slot < self.num_slots(tables):
            rounds += self.tile_of(tables, slot).blocks * tables.num_heads
            slot += WARP
        return cute.arch.warp_reduction_sum(rounds)

    def num_slots(self, tables: Tables) -> Int32:
        """Count the slots that may hold a query tile."""
        return tables.num_tokens // QUERIES + tables.batch

    @cute.jit
    def sum_through(self, value: Int32) -> Int32:
        """Add up the values of the lanes up to the calling one."""
        lane = cute.arch.lane_idx()
        for step in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(value, step)
            if lane >= step:
                value += other
        return value

    @cute.jit
    def tile_of(self, tables: Tables, slot: Int32) -> QueryTile:
        """Return the query tile in a slot; past the last one it has no work."""
        sequence, step = Int32(0), Int32(1)
        while step < tables.batch:
            step += step
        while step > 0:
            further = cutlass.min(sequence + step, tables.batch)
            if (further < tables.batch) & (self.slot_of(tables, further) <= slot):
                sequence = further
            step >>= 1
        last_token = tables.first_token + tables.num_tokens
        q_start, q_end = extent(
            tables.cu_seqlens_q, tables.cu_seqlens_q_stride, sequence, tables.num_queries
        )
        number = slot - self.slot_of(tables, sequence)
        token = clamp(q_start, tables.first_token, last_token) + number * QUERIES
        rows = Int32(0)
        if number >= 0:
            rows = clamp(cutlass.min(q_end, last_token) - token, 0, QUERIES)
        keys = self.count_keys(tables, sequence)
        first = token - q_start + keys - (q_end - q_start)
        blocks = Int32(0)
        if rows > 0:
            blocks = self.count_blocks(tables, first + rows - 1, keys)
        return QueryTile(token - tables.first_token, rows, first, sequence, keys, blocks)

    @cute.jit
    def count_blocks(self, tables: Tables, position: Int32, keys: Int32) -> Int32:
        """Count the blocks up to the last one that a query sees."""
        seen = keys
        if tables.causal != 0:
            seen = clamp(position + 1, 0, keys)
        return cutlass.min((seen + (BLOCK - 1)) // BLOCK, tables.num_blocks)

    def slot_of(self, tables: Tables, sequence: Int32) -> Int32:
        """Return the slot of a sequence's first query tile."""
        start = read_int(tables.cu_seqlens_q, Int64(sequence) * tables.cu_seqlens_q_stride)
        last_token = tables.first_token + tables.num_tokens
        start = clamp(start, tables.first_token, last_token) - tables.first_token
        return start // QUERIES + sequence

    @cute.jit
    def count_keys(self, tables: Tables, sequence: Int32) -> Int32:
        """Count the keys of a sequence."""
        keys = tables.num_blocks * BLOCK
        if tables.page_table.toint() == 0:
            start, end = self.key_extent(tables, sequence)
            keys = end - start
        if tables.seqused_k.toint() != 0:
            used = read_int(tables.seqused_k, Int64(sequence) * tables.seqused_k_stride)
            keys = clamp(used, 0, keys)
        return keys

    def key_extent(self, tables: Tables, sequence: Int32) -> tuple[Int32, Int32]:
        """Return first and end of the flat keys of a sequence."""
        offsets = tables.cu_seqlens_k, tables.cu_seqlens_k_stride
        return extent(*offsets, sequence, tables.key_rows)

    @cute.jit
    def open_segment(self, env: Env, segment: Segment, phase: Int32) -> None:
        """Publish a segment and load its Q, once the one before it is in registers."""
        self.wait(env, "q_empty", 0, phase)
        full = self.barrier(env, "q_full")
        zero = Int32(0)
        offset = SCHEDULE.smem_offset("segment")
        with cute.arch.elect_one():
            ptx.smem_store_v4(env.smem, offset, list(segment[:4]))
            ptx.smem_store_v4(env.smem, offset + 16, [*segment[4:], zero, zero])
        if segment.rounds == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * TILE * self.head_dim * 2)
            atom, tensor = env.maps[0]
            for part in range_constexpr(2):
                token = env.tables.first_token + segment.token + part * TILE
                rows = cute.domain_offset((token, 0, segment.head), tensor)[(None, None, 0)]
                source = cute.local_tile(rows, (TILE, self.head_dim), (0, 0))
                tiles.load_tile(atom, source, self.tile_at(env, "q", part * TILE_BYTES), full)

    @cute.jit
    def load_keys(self, env: Env, tile: QueryTile, head: Int32, block: Int32, ring: Ring) -> Ring:
        """Load the keys of a block, and say how many there are."""
        tables = env.tables
        row, outer = block * BLOCK, Int32(0)
        keys = cutlass.min(tile.keys - block * BLOCK, BLOCK)
        if tables.page_table.toint() != 0:
            strides = tables.page_table_strides
            offset = Int64(tile.sequence) * strides[0] + Int64(block) * strides[1]
            row, outer = Int32(0), read_int(tables.page_table, offset)
            if (outer < 0) | (outer >= tables.key_outer):
                outer, keys = Int32(0), Int32(0)
        else:
            row += self.key_extent(tables, tile.sequence)[0]
        self.wait(env, "k_empty", 0, ring.phase, ring.slot)
        full = self.barrier(env, "k_full", 0, ring.slot)
        with cute.arch.elect_one():
            ptx.smem_store(env.smem + ring.slot, SCHEDULE.smem_offset("keys"), keys)
            cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * self.head_dim * 2)
        atom, tensor = env.maps[1]
        origin = (row, 0, outer, head // tables.group_size)
        rows = cute.domain_offset(origin, tensor)[(None, None, 0, 0)]
        source = cute.local_tile(rows, (TILE, self.head_dim), (0, 0))
        tiles.load_tile(atom, source, self.tile_at(env, "k", ring.tile_offset()), full)
        return tiles.advance(ring, K_SLOTS)

    def tile_at(self, env: Env, region: str, offset: Int32 | int) -> cute.Tensor:
        """View the tile that starts `offset` bytes into a region of shared memory."""
        start = SCHEDULE.smem_offset(region) + offset
        return tiles.tile_at(env.base, start, self.dtype, self.head_dim)

    @cute.jit
    def bound(self, tables: Tables, warp: Int32) -> None:
        """Write how many blocks each query may choose from, and its local block."""
        role, lane = SCHEDULE.role("bound"), cute.arch.lane_idx()
        slot = cute.arch.block_idx()[0] * role.warps + warp - role.first
        while (slot < self.num_slots(tables)) & (tables.bounds.toint() != 0):
            tile = self.tile_of(tables, slot)
            row = lane
            while row < tile.rows:
                position = tile.first + row
                place = tables.bounds + (tile.token + row)
                cute.arch.store(place, self.count_blocks(tables, position, tile.keys))
                cute.arch.store(place + tables.num_tokens, position >> BLOCK.bit_length() - 1)
                row += WARP
            slot += cute.arch.grid_dim()[0] * role.warps

    # ---- consumers -----------------------------------------------------------------------------

    @cute.jit
    def consume(self, env: Env, warp: Int32) -> None:
        """Compute 128 rows of each segment."""
        group = warp >> 2
        mma = self.mma()
        s = [cute.make_rmem_tensor(mma.partition_shape_C((ROWS, TILE)), Float32) for _ in range(2)]
        shape = mma.partition_shape_A((ROWS, self.head_dim))
        q = [cute.make_rmem_tensor(shape, self.dtype) for _ in range(2)]
        ring = Ring(Int32(0), Int32(0))
        phase = Int32(0)
        segment = self.take_segment(env, phase)
        while segment.rounds != 0:
            for half in range_constexpr(2):
                self.read_query(env, group, half, q[half])
            self.arrive(env, "q_empty")  # every lane: each has read the segment too
            ring = self.run(env, group, (q, s), segment, ring)
            phase ^= 1
            segment = self.take_segment(env, phase)

    def mma(self) -> Any:
        """Return the MMA of S = Q K^T, Q in registers, K K-major as it lies."""
        shape, k_major = (ROWS, TILE, MMA_K), OperandMajorMode.K
        source = warpgroup.OperandSource.RMEM
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, k_major, k_major)
        return cute.make_tiled_mma(op)

    def take_segment(self, env: Env, phase: Int32) -> Segment:
        """Wait for a segment and its Q."""
        self.wait(env, "q_full", 0, phase)
        offset = SCHEDULE.smem_offset("segment")
        words = [*ptx.smem_load_v4(env.smem, offset), *ptx.smem_load_v4(env.smem, offset + 16)]
        return Segment._make(words[:6])

    def read_query(self, env: Env, group: Int32, half: int, q: cute.Tensor) -> None:
        """Read Q of a half to registers, through the 128-byte swizzle."""
        words = cute.recast_tensor(q, Int32)
        lane = cute.arch.lane_idx()
        row = half * ROWS + (cute.arch.warp_idx() & 3) * 16 + (lane & 15)
        base = env.smem + group * TILE_BYTES + row * 128
        for k in range(self.head_dim // MMA_K):
            part, unit = divmod(2 * k, 8)
            chunk = ((lane >> 4) + unit) ^ (lane & 7)
            offset = SCHEDULE.smem_offset("q") + part * HALF_BYTES
            for i, word in enumerate(ptx.smem_load_matrices(base + (chunk << 4), offset)):
                words[4 * k + i] = word

    @cute.jit
    def run(self, env: Env, group: Int32, fragments: tuple, segment: Segment, ring: Ring) -> Ring:
        """Work off a segment: MMAs of one half under the maxima of the other.

        Without a barrier ptxas moves the maxima of the first half behind the wait for the second.
        """
        (q0, q1), (s0, s1) = fragments
        row0, row1 = (self.row_of(env, group, half, segment) for half in range(2))
        self.wait(env, "k_full", 0, ring.phase, ring.slot)
        keys = self.keys_of(env, ring)
        self.issue(env, q0, ring, s0)
        self.issue(env, q1, ring, s1)
        warpgroup.wait_group(1)
        row0 = self.store_maxima(env, s0, keys, row0)
        cute.arch.sync_warp()
        warpgroup.wait_group(0)
        self.release(env, ring)
        ring = tiles.advance(ring, K_SLOTS)
        left = segment.rounds
        while left > 1:
            before = keys
            self.wait(env, "k_full", 0, ring.phase, ring.slot)
            keys = self.keys_of(env, ring)
            self.issue(env, q0, ring, s0)
            row1 = self.store_maxima(env, s1, before, row1)
            self.issue(env, q1, ring, s1)
            warpgroup.wait_group(1)
            row0 = self.store_maxima(env, s0, keys, row0)
            cute.arch.sync_warp()
            warpgroup.wait_group(0)
            self.release(env, ring)
            ring = tiles.advance(ring, K_SLOTS)
            left -= 1
        self.store_maxima(env, s1, keys, row1)
        return ring

    @cute.jit
    def row_of(self, env: Env, group: Int32, half: cutlass.Constexpr, segment: Segment) -> Row:
        """Return this thread's place in its half: lanes 0 and 1 of four write rows 8 apart."""
        tables, lane = env.tables, cute.arch.lane_idx()
        start = group * TILE + half * ROWS
        row = start + (cute.arch.warp_idx() & 3) * 16 + (lane >> 2)
        limit = segment.first + 1 - segment.block * BLOCK
        written = row + (lane & 1) * 8
        place = Int64(segment.head) * tables.scores_strides[0]
        place += Int64(segment.block) * tables.scores_strides[1] + segment.token + written
        rows = segment.rows - written
        if (lane & 2) != 0:
            rows = Int32(0)
        bound = limit + row - (lane & 3) * 2
        return Row(bound, limit + start, (tables.scores + place).toint(), rows)

    def keys_of(self, env: Env, ring: Ring) -> Int32:
        """Read how many keys there are in a slot."""
        return ptx.smem_load(env.smem + ring.slot, SCHEDULE.smem_offset("keys"), Int32)

    def release(self, env: Env, ring: Ring) -> None:
        """Give a slot of K back; whichever lane does it, all have read it."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(env, "k_empty", 0, ring.slot)

    def issue(self, env: Env, q: Any, ring: Ring, s: Any) -> None:
        """Start S = Q K^T as one group."""
        mma = self.mma()
        slice_ = mma.get_slice(0)
        k_tile = self.tile_at(env, "k", ring.tile_offset())
        k = slice_.make_fragment_B(slice_.partition_B(k_tile))
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for step in range(self.head_dim // MMA_K):
            cute.gemm(mma, s, q[(None, None, step)], k[(None, None, step)], s)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def store_maxima(self, env: Env, s: Any, keys: Int32, row: Row) -> Row:
        """Write the largest scores of the rows that this thread answers for; go on by a block."""
        tables, lane = env.tables, cute.arch.lane_idx()
        if cutlass.min(row.limit, keys) < BLOCK:
            column = (lane & 3) * 2
            bounds = [cutlass.min(row.bound + 8 * r, keys - column) for r in range(2)]
            for i in range_constexpr(cute.size(s)):
                s[i] = ptx.mask_from(s[i], i // 4 * 8 + i % 2, bounds[i % 4 // 2])
        best = []
        for r in range_constexpr(2):
            most = self.largest([s[i] for i in columns(r)])
            best.append(over_quad(ptx.max_nan, most))
        value = best[0]
        if (lane & 1) != 0:
            value = best[1]
        ptx.gmem_store_float_if(row.address, value * tables.scale, row.rows > 0)
        address = row.address + tables.scores_strides[1] * 4
        return Row(row.bound - BLOCK, row.limit - BLOCK, address, row.rows)

    def largest(self, scores: list) -> Float32:
        """Return the largest score, NaN if one is NaN; in two chains."""
        best = scores[:2]
        for i, score in enumerate(scores[2:]):
            best[i % 2] = ptx.max_nan(best[i % 2], score)
        return ptx.max_nan(*best)


def compile_kernel(config: Config, options: str = "") -> Any:
    """Compile for the architecture that CuTe-DSL was imported for."""

    def pointer(kind: type, align: int = 4) -> Any:
        return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=align)

    arguments = NO_ARGUMENTS
    strides = [tuple(Int64(x) for x in view.strides) for view in arguments.views]
    tables = Tables._make(
        [
            *(pointer(Int32) for _ in strides[:-1]),
            pointer(Float32),
            pointer(Int32),
            *(x[0] if len(x) == 1 else x for x in strides),
            *(Int32(x) for x in arguments.scalars),
            Float32(arguments.scale),
        ]
    )
    operands = tuple(pointer(DTYPES[config.dtype], 16) for _ in range(2))
    steps = tuple(tuple(Int64(x) for x in view.strides) for view in (arguments.q, arguments.k))
    values = (operands, tables, steps, (Int32(1),) * 3, cuda.CUstream(0))
    return cute.compile(BlockScoresSm90(config), *values, options=options)


def compile_offline(config: Config, target: Target) -> offline.Compiled:
    """Compile without a GPU, in a process of its own, and keep the text.

    Raises
    ------
    ValueError
        The tables do not fit the target, or a field of `config` is out of range.
    """
    config.check()
    SCHEDULE.check(target)
    return offline.compile_offline(__name__, config, target)


def launch_plan(config: Config, target: Target, arguments: Arguments) -> LaunchPlan:
    """Describe a launch, parameter by parameter.

    Raises
    ------
    NotImplementedError
        There may be 2^31 rounds or more.
    """
    rounds = arguments.most_rounds
    if rounds > MAX_ROUNDS:
        raise NotImplementedError(
            f"query tiles x heads x KV blocks must be at most {MAX_ROUNDS}, got {rounds}"
        )
    return LaunchPlan(
        grid=(min(rounds, target.num_sms), 1, 1),
        block=(SCHEDULE.threads, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=SCHEDULE.smem_bytes,
        parameters=arguments.kernel_parameters(config.dtype),
    )
