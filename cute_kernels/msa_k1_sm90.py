"""Partial attention, one KV block at a time, for Hopper: MSA, the KV-outer pass K1.

    o[slot, t, h] = softmax(scale * q[t, h] K_j^T) V_j        lse[slot, t, h] = log sum exp(...)

for each block j and each query token t that chose it; `slot` is which of the token's partials that
is. K2 merges them.

Contract. That of `msa_k1_sm100`: q, k and v are bf16 or fp16, D = 128, of any strides, keys flat or
in pages of 128. The entries of a work item are rows of the k2q CSR; an entry whose token or slot
lies outside the chunk is dropped, and a block outside its sequence or the pool is one without keys.
A query that sees no key of the block gets 0 and LSE -inf. What no query of a tile sees reaches no
output; a non-finite value that one of them sees may reach the others of the tile. Slots that no
entry names are left as they are.

Grid. CTAs stride over the work items. K and V of an item are loaded once, those of the next one
while the last tiles are in work. The scheduler warp alone decides what is dropped.

Tiles. 128 / G query tokens of the row times the G heads of the group are the 128 rows of a tile, 64
for each warpgroup. Tile n, counted over all items of the CTA, has stage n % 2. The load warp
gathers Q, one TMA box for each token and 64 columns, and publishes for each token where its partial
goes and how many keys it sees, and for the tile the most that one of them sees.

Masking. A row sees the first `seen` keys of the block: those that exist and, if causal, are not
after it; the scores of the others become -inf. PV reads the 16 keys where the tile's last one lies,
and all after them, from a copy of those 16 rows of V with 0 for keys that none sees (`tail`).

Softmax. There is one block, hence one step: maximum, exponentials, sum. O is divided by the sum
when it leaves the registers, and stored by TMA, one box for each token that exists and 128 bytes.

Steady state, each warpgroup with 64 rows (n: tile, of this item or the next):

    tensor core                consumer 0                 consumer 1
    QK0(n+1) PV0(n)            -                          softmax of S1(n), O1(n-1) out
    QK1(n+1) PV1(n)            softmax of S0(n+1), O0(n)  -
    QK0(n+2) PV0(n+1)          -                          softmax of S1(n+1), O1(n)

Limits. D = 128, blocks of 128 keys, G in 1, 2, 4, 8, 16. Small groups make many small TMA boxes.

Sources: MSA (arXiv 2606.13392), section 4; FlashAttention-3 (arXiv 2407.08608) for the two
overlaps; PTX ISA for wgmma, mbarrier, cp.async.bulk.tensor and griddepcontrol.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from sparse_atten.cute_kernels.common import offline, persistent, ptx, softmax, tiles
from sparse_atten.cute_kernels.common.edges import (
    ITEM_BYTES,
    META_BYTES,
    META_SLOTS,
    MMA_K,
    SEEN,
    WINDOW,
    EdgeKernel,
    Item,
    Tables,
    tail_start,
)
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.persistent import Env
from sparse_atten.cute_kernels.common.schedule import (
    Barrier,
    Region,
    Role,
    Schedule,
    lanes,
    once,
    warps,
)
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.common.tiles import HALF_BYTES, SWIZZLE_BYTES, TILE_BYTES
from sparse_atten.cute_kernels.msa_arguments import (
    BLOCK,
    GROUP_SIZES,
    HEAD_DIM,
    Arguments,
)
from sparse_atten.cute_kernels.msa_host import host_values, make_maps

STAGES = 2
ROWS = 64  # of a warpgroup
TAIL_BYTES = MMA_K * SWIZZLE_BYTES  # of 64 columns

CONSUMERS = ("consumer0", "consumer1")
META = "where the tile's partials go, and what its rows see"
SCHEDULE = Schedule(
    roles=(
        Role("consumer0", 0, 4, 232),
        Role("consumer1", 4, 4, 232),
        Role("load", 8, 1, 40),
        Role("store", 9, 1, 40),
        Role("scheduler", 10, 1, 40),
        Role("idle", 11, 1, 40),
    ),
    barriers=(
        *persistent.item_barriers((*CONSUMERS, "store", "load")),
        Barrier("k_full", 1, once("scheduler"), CONSUMERS, "K has landed", TILE_BYTES),
        Barrier("k_empty", 1, warps(*CONSUMERS), ("scheduler",), "the item's last QK is done"),
        Barrier("v_full", 1, once("scheduler"), CONSUMERS, "V has landed", TILE_BYTES),
        Barrier("v_empty", 1, warps(*CONSUMERS), ("scheduler",), "the item's last PV is done"),
        Barrier("meta_full", META_SLOTS, lanes("load"), ("store", *CONSUMERS), META),
        Barrier("meta_empty", META_SLOTS, warps("store", *CONSUMERS), ("load",), "read"),
        Barrier("q_full", STAGES, once("load"), CONSUMERS, "Q has landed", TILE_BYTES),
        Barrier("q_empty", STAGES, warps(*CONSUMERS), ("load",), "QK is done"),
        Barrier("out_full", STAGES, warps(*CONSUMERS), ("store",), "O is in SMEM"),
        Barrier("out_empty", STAGES, once("store"), CONSUMERS, "the store has read O"),
    ),
    tmem=(),
    smem=(
        Region("q", STAGES * TILE_BYTES),
        Region("k", TILE_BYTES),
        Region("v", TILE_BYTES),
        Region("out", STAGES * TILE_BYTES),
        # The halves of a tail lie as far apart as those of V.
        Region("tail", 2 * TAIL_BYTES),
        Region("meta", META_SLOTS * META_BYTES),
        Region("apart", HALF_BYTES - 2 * TAIL_BYTES - META_SLOTS * META_BYTES),
        Region("tail_half", 2 * TAIL_BYTES),
        Region("most_seen", META_SLOTS * 4),
        Region("items", persistent.ITEM_SLOTS * ITEM_BYTES),
    ),
)
DTYPES = {"bf16": BFloat16, "fp16": Float16}


@dataclass(frozen=True)
class Config:
    """What is fixed when the kernel is compiled; with a `Target` it is the cache key.

    Parameters
    ----------
    dtype : {"bf16", "fp16"}
        Element type of q, k, v and o_partial.
    group_size : {1, 2, 4, 8, 16}
        G = Hq / Hkv.
    causal : bool
        Hide the keys after a query, by real positions (bottom-right).
    paged : bool
        Keys lie in pages that a table names.
    temperature : bool
        Also write lse_t_partial.
    """

    dtype: str = "bf16"
    group_size: int = 16
    causal: bool = False
    paged: bool = False
    temperature: bool = False

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        for name, allowed in (("dtype", tuple(DTYPES)), ("group_size", GROUP_SIZES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    @property
    def dtypes(self) -> tuple[type, type]:
        """Element types of q, k and v, and of o_partial."""
        return DTYPES[self.dtype], DTYPES[self.dtype]


class Fragments(NamedTuple):
    """A warpgroup's operands in registers: tensors whose elements are values of the DSL."""

    s: Any  # scores, then P before it is rounded
    p: Any
    o: Any


class Tile(NamedTuple):
    """What a thread keeps of a tile until its O is done."""

    factor0: Float32  # of O, for its two rows
    factor1: Float32
    most: Int32  # keys that a row of the tile sees


class Rows(NamedTuple):
    """A thread's two rows of a tile: the token in the chunk or a negative, and where and what."""

    token0: Int32
    place0: Int32
    token1: Int32
    place1: Int32


class MsaPartialSm90(EdgeKernel):
    """The kernel: one method for each role, in the order of the data flow."""

    def __init__(self, config: Config) -> None:
        super().__init__(SCHEDULE, config, persistent="static")

    @cute.jit
    def __call__(
        self,
        operands: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
        tables: Tables,
        operand_strides: tuple,
        grid: tuple[Int32, Int32, Int32],
        stream: Any,
    ) -> None:
        """Make the TMA descriptors and launch."""
        key_tile = tiles.tile_layout(self.dtype)
        maps = make_maps(operands, operand_strides, tables, self.group, key_tile)
        self.kernel(maps, tables).launch(
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
            elif warp == SCHEDULE.role("store").first:
                self.store(env)
            elif warp == SCHEDULE.role("scheduler").first:
                self.scheduler(env)

    # ---- consumers -----------------------------------------------------------------------------

    @cute.jit
    def consume(self, env: Env, warp: Int32) -> None:
        """Compute 64 rows of each tile."""
        group = warp >> 2
        qk, pv = self.mmas()
        s = cute.make_rmem_tensor(qk.partition_shape_C((ROWS, BLOCK)), Float32)
        o = cute.make_rmem_tensor(pv.partition_shape_C((ROWS, HEAD_DIM)), Float32)
        p = cute.make_rmem_tensor(pv.partition_shape_A((ROWS, BLOCK)), self.dtype)
        fragments = Fragments(s, p, o)
        if group == 1:
            self.pass_turn(0)
        item = self.take_item(env, Item.none())
        if item.first < item.end:
            self.run(env, group, fragments, item)
        if group == 0:
            self.take_turn(0)

    def mmas(self) -> tuple:
        """Return the MMA of S = Q K^T, and that of O = P V, P in registers, V as it lies."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shape = (ROWS, BLOCK, MMA_K)
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        qk = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, smem, k_major, k_major)
        pv = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, rmem, k_major, mn_major)
        return cute.make_tiled_mma(qk), cute.make_tiled_mma(pv)

    @cute.jit
    def run(self, env: Env, group: Int32, fragments: Fragments, item: Item) -> None:
        """Work off all tiles; `item.first` is the one in work."""
        self.await_operands(env, item)
        self.issue_qk(env, group, fragments, item)
        warpgroup.wait_group(0)
        self.release_qk(env, item)
        rows, most = self.read_rows(env, group, item)
        maxima = self.maxima(env, fragments, rows)
        totals = [self.exponentials(env, fragments, maxima[r], r) for r in range(2)]
        self.pack(fragments)
        tile = self.end_tile(env, group, item, (rows, most), maxima, totals)
        following = self.next_tile(env, item)
        while following.first < following.end:
            self.await_operands(env, following)
            self.take_turn(group)
            self.issue_qk(env, group, fragments, following)
            self.wait(env, "v_full", 0, item.order & 1)
            self.issue_pv(env, group, fragments, tile.most)
            self.pass_turn(1 - group)
            rows, most = self.read_rows(env, group, following)
            warpgroup.wait_group(1)
            self.release_qk(env, following)
            maxima = self.maxima(env, fragments, rows)
            first = self.exponentials(env, fragments, maxima[0], 0)
            warpgroup.wait_group(0)
            self.release_pv(env, item)
            second = self.exponentials(env, fragments, maxima[1], 1)
            self.pack(fragments)
            self.finish(env, group, fragments, item, tile)
            tile = self.end_tile(env, group, following, (rows, most), maxima, [first, second])
            # The scheduler names an item when V of the one before it is on its way.
            item, following = following, self.next_tile(env, following)
        self.wait(env, "v_full", 0, item.order & 1)
        self.issue_pv(env, group, fragments, tile.most)
        warpgroup.wait_group(0)
        self.finish(env, group, fragments, item, tile)

    @cute.jit
    def next_tile(self, env: Env, item: Item) -> Item:
        """Go on to the next tile, of the next item after the last one."""
        following = Item(item.first + 1, item.end, item.kv_head, item.order, item.slot)
        if following.first == following.end:
            following = self.take_item(env, following)
        return following

    def await_operands(self, env: Env, item: Item) -> None:
        """Wait for K of an item and Q of its tile."""
        stage = (item.first & 1) * 8
        self.wait(env, "k_full", 0, item.order & 1)
        self.wait(env, "q_full", 0, (item.first >> 1) & 1, stage)

    @cute.jit
    def release_qk(self, env: Env, item: Item) -> None:
        """Give Q's stage back, and K's after the last tile."""
        with cute.arch.elect_one():
            self.arrive(env, "q_empty", 0, (item.first & 1) * 8)
        if item.first + 1 == item.end:
            with cute.arch.elect_one():
                self.arrive(env, "k_empty")

    @cute.jit
    def release_pv(self, env: Env, item: Item) -> None:
        """Give V's place back after the last tile."""
        if item.first + 1 == item.end:
            with cute.arch.elect_one():
                self.arrive(env, "v_empty")

    def take_turn(self, group: Int32 | int) -> None:
        """Wait until the other warpgroup has issued its MMAs."""
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=256)

    def pass_turn(self, group: Int32 | int) -> None:
        """Let a warpgroup issue its MMAs."""
        cute.arch.barrier_arrive(barrier_id=1 + group, number_of_threads=256)

    def tile_at(self, env: Env, region: str, offset: Int32 | int) -> cute.Tensor:
        """View the tile that starts `offset` bytes into a region of shared memory."""
        return tiles.tile_at(env.base, SCHEDULE.smem_offset(region) + offset, self.dtype)

    def issue_qk(self, env: Env, group: Int32, fragments: Fragments, item: Item) -> None:
        """Start S = Q K^T, both K-major in shared memory."""
        mma = self.mmas()[0]
        slice_ = mma.get_slice(0)
        place = (item.first & 1) * TILE_BYTES + group * (ROWS * SWIZZLE_BYTES)
        queries = cute.local_tile(self.tile_at(env, "q", place), (ROWS, HEAD_DIM), (0, 0))
        a = slice_.make_fragment_A(slice_.partition_A(queries))
        b = slice_.make_fragment_B(slice_.partition_B(self.tile_at(env, "k", 0)))
        steps = [(a[(None, None, k)], b[(None, None, k)]) for k in range(HEAD_DIM // MMA_K)]
        self.issue(mma, steps, fragments.s)

    def issue_pv(self, env: Env, group: Int32, fragments: Fragments, most: Int32) -> None:
        """Start O = P V, V MN-major as it lies; from the tile's last key on the tail instead."""
        mma = self.mmas()[1]
        slice_ = mma.get_slice(0)
        tail = Int32(SCHEDULE.smem_offset("tail") - SCHEDULE.smem_offset("v")) + group * TAIL_BYTES
        steps = []
        for k in range(BLOCK // MMA_K):
            whole = Int32(most >= (k + 1) * MMA_K)
            place = tail + whole * (k * TAIL_BYTES - tail)
            values = self.tile_at(env, "v", place)
            values = cute.make_tensor(values.iterator, cute.select(values.layout, mode=[1, 0]))
            b = slice_.make_fragment_B(slice_.partition_B(values))
            steps.append((fragments.p[(None, None, k)], b[(None, None, 0)]))
        self.issue(mma, steps, fragments.o)

    def issue(self, mma: Any, steps: list, d: Any) -> None:
        """Start D = sum of A B^T over the steps, as one group."""
        warpgroup.fence()
        for number, (a, b) in enumerate(steps):
            mma.set(warpgroup.Field.ACCUMULATE, number > 0)
            cute.gemm(mma, d, a, b, d)
        warpgroup.commit_group()

    def first_row(self, group: Int32) -> Int32:
        """Return the first of this thread's two rows of the tile; the other is 8 below."""
        warp = cute.arch.warp_idx() & 3
        return group * ROWS + warp * 16 + (cute.arch.lane_idx() >> 2)

    def read_rows(self, env: Env, group: Int32, item: Item) -> tuple[Rows, Int32]:
        """Return what is known of this thread's rows, and the most that one of the tile sees."""
        self.wait_meta(env, item.first)
        address = env.smem + (item.first & (META_SLOTS - 1)) * META_BYTES
        offset = SCHEDULE.smem_offset("meta")
        words = []
        for r in range(2):
            place = address + (self.first_row(group) + 8 * r) // self.group * 8
            words += [ptx.smem_load(place, offset + word, Int32) for word in (0, 4)]
        return Rows(*words), self.read_most_seen(env, item.first)

    @cute.jit
    def maxima(self, env: Env, fragments: Fragments, rows: Rows) -> tuple[Float32, Float32]:
        """Mask S; return the largest score of this thread's two rows."""
        s = fragments.s
        seen = (rows.place0 & SEEN, rows.place1 & SEEN)
        if cute.arch.vote_any_sync(cutlass.min(*seen) < BLOCK):
            first = (cute.arch.lane_idx() & 3) * 2
            for i in range_constexpr(cute.size(s)):
                s[i] = ptx.mask_from(s[i], i // 4 * 8 + i % 2, seen[i % 4 // 2] - first)
        best = []
        for r in range_constexpr(2):
            largest = softmax.row_max2([s[i] for i in self.columns(r)])
            for offset in (1, 2):
                other = cute.arch.shuffle_sync_bfly(largest, offset)
                largest = cute.arch.fmax(largest, other)
            best.append(largest)
        return best[0], best[1]

    def columns(self, r: int) -> list[int]:
        """List this thread's elements of its row r of an accumulator."""
        return [4 * n + 2 * r + c for n in range(BLOCK // 8) for c in range(2)]

    def exponentials(
        self, env: Env, fragments: Fragments, best: Float32, r: int
    ) -> tuple[Float32, Float32]:
        """Turn a row of S into P in place; return its sums, plain and with temperature."""
        warm = Float32(0.0)
        if self.config.temperature:
            warm = self.powers(fragments.s, env.tables.scale_t_log2, best, r)
        return self.powers(fragments.s, env.tables.scale_log2, best, r, keep=True), warm

    def powers(
        self, s: cute.Tensor, scale: Float32, best: Float32, r: int, *, keep: bool = False
    ) -> Float32:
        """Return this thread's sum of 2^(scale * (s - best)) over a row, and keep the terms."""
        m_log2 = cute.arch.fmax(best * scale, softmax.FLOOR)
        total = [Float32(0.0), Float32(0.0)]
        for i in self.columns(r):
            value = ptx.exp2(s[i] * scale - m_log2)
            total[i % 2] = total[i % 2] + value
            if keep:
                s[i] = value
        return total[0] + total[1]

    def pack(self, fragments: Fragments) -> None:
        """Round P to the operand of the next MMA: both hold a row in the same order."""
        s, p = fragments.s, fragments.p
        words = cute.recast_tensor(p, Int32)
        for i in range(cute.size(words)):
            words[i] = ptx.pack(s[2 * i], s[2 * i + 1], self.dtype)

    @cute.jit
    def end_tile(
        self,
        env: Env,
        group: Int32,
        item: Item,
        known: tuple[Rows, Int32],
        maxima: tuple,
        totals: list,
    ) -> Tile:
        """Write the LSEs, copy V's tail; return what the tile's O needs."""
        rows, most = known
        self.release_meta(env, item.first)
        factors = []
        for r in range_constexpr(2):
            total, warm = (self.over_quad(x) for x in totals[r])
            factors.append(self.reciprocal(total))
            lse = self.lse(maxima[r], env.tables.scale_log2, total)
            lse_t = lse
            if const_expr(self.config.temperature):
                lse_t = self.lse(maxima[r], env.tables.scale_t_log2, warm)
            row = self.first_row(group) + 8 * r
            self.store_lse(env, item, row, (rows[2 * r], rows[2 * r + 1]), (lse, lse_t))
        if most < BLOCK:
            self.wait(env, "v_full", 0, item.order & 1)
            self.meet(group)  # all four warps are done with the tail before
            self.copy_tail(env, group, most)
            cute.arch.fence_view_async_shared()
            self.meet(group)
        return Tile(factors[0], factors[1], most)

    def meet(self, group: Int32) -> None:
        """Wait for the other warps of the warpgroup."""
        cute.arch.barrier(barrier_id=3 + group, number_of_threads=128)

    def over_quad(self, value: Float32) -> Float32:
        """Add the shares of a row's four lanes."""
        for offset in (1, 2):
            value = value + cute.arch.shuffle_sync_bfly(value, offset)
        return value

    @cute.jit
    def reciprocal(self, total: Float32) -> Float32:
        """Return 1 / total, 0 for 0."""
        factor = Float32(0.0)
        if total != 0.0:
            factor = cute.arch.rcp_approx(total)
        return factor

    def lse(self, best: Float32, scale: Float32, total: Float32) -> Float32:
        """Return the natural log of the sum of exponentials."""
        m_log2 = cute.arch.fmax(best * scale, softmax.FLOOR)
        return (m_log2 + ptx.log2(total)) * math.log(2.0)

    @cute.jit
    def store_lse(
        self, env: Env, item: Item, row: Int32, known: tuple, values: tuple[Float32, Float32]
    ) -> None:
        """Write a row's LSEs, -inf where it sees no key; nothing where it has no token."""
        token, place = known
        if (token >= 0) & (cute.arch.lane_idx() & 3 == 0):
            head = item.kv_head * self.group + (row & (self.group - 1))
            line = Int64(place >> 8) * env.tables.chunk + token
            at = line * env.tables.num_q_heads + head
            cute.arch.store(env.tables.lse + at, values[0])
            if const_expr(self.config.temperature):
                cute.arch.store(env.tables.lse_t + at, values[1])

    @cute.jit
    def copy_tail(self, env: Env, group: Int32, most: Int32) -> None:
        """Copy 16 rows of V, two chunks of 16 bytes for each thread of the warpgroup."""
        thread = cute.arch.thread_idx()[0] & 127
        first = tail_start(most)
        kept = 0 - Int32(first + thread // 8 < most)
        source = env.smem + first * SWIZZLE_BYTES + thread * 16
        target = env.smem + group * TAIL_BYTES + thread * 16
        for half in range_constexpr(2):
            place = half * HALF_BYTES
            words = ptx.smem_load_v4(source, SCHEDULE.smem_offset("v") + place)
            words = [word & kept for word in words]
            ptx.smem_store_v4(target, SCHEDULE.smem_offset("tail") + place, words)

    @cute.jit
    def finish(self, env: Env, group: Int32, fragments: Fragments, item: Item, tile: Tile) -> None:
        """O divided by the sum, rounded, to shared memory."""
        o = fragments.o
        stage, phase = (item.first & 1) * 8, (item.first >> 1) & 1
        self.wait(env, "out_empty", 0, phase ^ 1, stage)
        lane = cute.arch.lane_idx()
        row = group * ROWS + (cute.arch.warp_idx() & 3) * 16 + (lane & 15)
        address = env.smem + stage * (TILE_BYTES // 8) + row * SWIZZLE_BYTES
        for n in range_constexpr(0, HEAD_DIM // 8, 2):
            words = []
            for i in range_constexpr(4 * n, 4 * n + 8, 2):
                factor = tile[i % 4 // 2]
                words.append(ptx.pack(o[i] * factor, o[i + 1] * factor, self.dtype))
            half, unit = divmod(n, 8)
            chunk = ((lane >> 4) + unit) ^ (lane & 7)
            offset = SCHEDULE.smem_offset("out") + half * HALF_BYTES
            ptx.smem_store_matrices(address + (chunk << 4), offset, words)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(env, "out_full", 0, stage)

    # ---- store ---------------------------------------------------------------------------------

    @cute.jit
    def store(self, env: Env) -> None:
        """Write staged tiles to the slots of their tokens."""
        item = self.take_item(env, Item.none())
        while item.first < item.end:
            tile = item.first
            while tile < item.end:
                self.store_tile(env, tile, item.kv_head)
                tile += 1
            item = self.take_item(env, item)

    @cute.jit
    def store_tile(self, env: Env, tile: Int32, kv_head: Int32) -> None:
        """Write a tile, a box for each token that exists and 128 bytes."""
        places = self.read_places(env, tile)
        stage = (tile & 1) * 8
        self.wait(env, "out_full", 0, (tile >> 1) & 1, stage)
        address = ptx.opaque(env.smem + stage * (TILE_BYTES // 8)) + SCHEDULE.smem_offset("out")
        for part in range_constexpr(self.parts):
            for j in cutlass.range(self.in_window, unroll=self.unroll):
                token, place = (cute.arch.shuffle_sync(x, j) for x in places[part])
                rows = address + (part * WINDOW + j) * self.group * SWIZZLE_BYTES
                self.store_token(env, rows, (kv_head, 0, token, place >> 8))
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.arrive(env, "out_empty", 0, stage)


def compile_kernel(config: Config, options: str = "") -> Any:
    """Compile for the architecture that CuTe-DSL was imported for."""
    return cute.compile(MsaPartialSm90(config), *host_values(config.dtypes), options=options)


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
    """Describe a launch, parameter by parameter."""
    return LaunchPlan(
        grid=arguments.grid("static", target.num_sms),
        block=(SCHEDULE.threads, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=SCHEDULE.smem_bytes,
        parameters=arguments.kernel_parameters(config.dtype, fp32_partials=False),
    )
