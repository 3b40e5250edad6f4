"""Partial attention, one KV block at a time, for Blackwell: MSA, the KV-outer pass K1.

    o[slot, t, h] = softmax(scale * q[t, h] K_j^T) V_j        lse[slot, t, h] = log sum exp(...)

for each block j and each query token t that chose it; `slot` is which of the token's partials that
is. K2 merges them.

Contract. q, k and v are bf16 or fp16, D = 128, of any strides, keys flat or in pages of 128. The
entries of a work item are rows of the k2q CSR; an entry whose token or slot lies outside the chunk
is dropped, and a block outside its sequence or the pool is one without keys. A query that sees no
key of the block gets 0 and LSE -inf. What no query of a tile sees reaches no output; a non-finite
value that one of them sees may reach the others of the tile. Slots that no entry names are left as
they are.

Grid. A CTA takes its own work item and then those of CTAs that it cancels (cluster launch
control), or strides over the items (static). K and V of an item are loaded once, those of the next
one while the last tiles are in work. The scheduler warp alone decides what is dropped.

Tiles. 128 / G query tokens of the row times the G heads of the group are the 128 rows of a tile.
Tiles alternate between two stages, counted over all items of the CTA: tile n has stage n % 2. The
load warp gathers Q, one TMA box for each token and 64 columns, and publishes for each token where
its partial goes and how many keys it sees, and for the tile the most that one of them sees.

Masking. A row sees the first `seen` keys of the block: those that exist and, if causal, are not
after it. The scores of 32 columns that some row of the warp does not see become -inf in tensor
memory before they are read. PV stops at the keys that some row of the tile sees; the last 16 of
them come from a copy of these rows of V, with 0 for keys that none sees (`tail`).

Softmax. There is one block, hence one step: maximum, exponentials, sum. O is divided by the sum
when it leaves tensor memory, staged in pieces of 128 x 256 bytes and stored by TMA, one box for
each token that exists and 128 bytes.

Steady state (n: tile; the stages take turns):

    tensor core        softmax 0       softmax 1       epilogue
    PV(n) QK(n+2)      -               P(n+1)          O(n-1)
    PV(n+1) QK(n+3)    P(n+2)          -               O(n)
    PV(n+2) ...        -               P(n+3)          O(n+1)

Warps, barriers, tensor and shared memory are tables in `SCHEDULE`; `SCHEDULE.tables()` prints them.
Tensor memory is allocated whole, so its addresses start at 0.

Limits. D = 128, blocks of 128 keys, G in 1, 2, 4, 8, 16. Small groups make many small TMA boxes.
State: compiled and emulated; never run on a GPU.

Sources: MSA (arXiv 2606.13392), section 4; PTX ISA for tcgen05, mbarrier, cp.async.bulk.tensor,
clusterlaunchcontrol and griddepcontrol.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, tcgen05

from sparse_atten.cute_kernels.common import offline, persistent, ptx, softmax, tiles
from sparse_atten.cute_kernels.common.edges import (
    ITEM_BYTES,
    META_BYTES,
    MMA_K,
    SEEN,
    TILE_ROWS,
    WINDOW,
    EdgeKernel,
    Item,
    Tables,
    meta_slots,
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
META_SLOTS = meta_slots(TILE_ROWS)
TAIL_BYTES = MMA_K * HEAD_DIM * 2

SOFTMAX = ("softmax0", "softmax1")  # of the two stages: alike, so that arrivals name the first
META = "where the tile's partials go, and what its rows see"
SCHEDULE = Schedule(
    roles=(
        Role("softmax0", 0, 4, 192),
        Role("softmax1", 4, 4, 192),
        Role("epilogue", 8, 4, 80),
        Role("mma", 12, 1, 48),
        Role("store", 13, 1, 48),
        Role("load", 14, 1, 48),
        Role("scheduler", 15, 1, 48),
    ),
    barriers=(
        *persistent.item_barriers((*SOFTMAX, "epilogue", "mma", "store", "load")),
        Barrier("k_full", 1, once("scheduler"), ("mma",), "K has landed", TILE_BYTES),
        Barrier("k_empty", 1, once("mma"), ("scheduler",), "the item's last QK is done"),
        Barrier("v_full", 1, once("scheduler"), ("mma", *SOFTMAX), "V has landed", TILE_BYTES),
        Barrier("v_empty", 1, once("mma"), ("scheduler",), "the item's last PV is done"),
        Barrier("meta_full", META_SLOTS, lanes("load"), ("mma", "store", *SOFTMAX), META),
        Barrier("meta_empty", META_SLOTS, warps("mma", "store", "softmax0"), ("load",), "read"),
        Barrier("q_full", STAGES, once("load"), ("mma",), "Q has landed", TILE_BYTES),
        Barrier("q_empty", STAGES, once("mma"), ("load",), "QK is done"),
        Barrier("s_full", STAGES, once("mma"), SOFTMAX, "QK is done, and PV of two tiles before"),
        Barrier("p_full", STAGES, lanes("softmax0"), ("mma",), "P is in TMEM, V's tail in SMEM"),
        Barrier("sum_full", STAGES, lanes("softmax0"), ("epilogue",), "the rows' sums of P"),
        Barrier("sum_empty", STAGES, lanes("epilogue"), SOFTMAX, "the sums have been read"),
        Barrier("o_full", STAGES, once("mma"), ("epilogue",), "PV is done"),
        Barrier("o_empty", STAGES, lanes("epilogue"), ("mma",), "O has been read"),
        Barrier("out_full", STAGES, lanes("epilogue"), ("store",), "a piece of O is in SMEM"),
        Barrier("out_empty", STAGES, once("store"), ("epilogue",), "the store has read the piece"),
    ),
    tmem=(
        Region("S", STAGES * BLOCK),
        Region("O", STAGES * HEAD_DIM),
        Region("P", STAGES * BLOCK, over="S"),  # of each stage only the first 64 columns
    ),
    smem=(
        Region("q", STAGES * TILE_BYTES),
        Region("k", TILE_BYTES),
        Region("v", TILE_BYTES),
        Region("out", STAGES * TILE_BYTES),
        Region("tail", STAGES * TAIL_BYTES),
        Region("meta", META_BYTES),
        Region("most_seen", META_SLOTS * 4),
        Region("sum", STAGES * TILE_ROWS * 4),
        Region("items", persistent.ITEM_SLOTS * ITEM_BYTES),
        Region("clc", 16),
        Region("tmem_address", 16),
    ),
)
EXACT = [False] * (BLOCK // 2)  # no pair of exponentials is a cubic
DTYPES = {"bf16": BFloat16, "fp16": Float16}


@dataclass(frozen=True)
class Config:
    """What is fixed when the kernel is compiled; with a `Target` it is the cache key.

    Parameters
    ----------
    dtype : {"bf16", "fp16"}
        Element type of q, k and v.
    group_size : {1, 2, 4, 8, 16}
        G = Hq / Hkv.
    causal : bool
        Hide the keys after a query, by real positions (bottom-right).
    paged : bool
        Keys lie in pages that a table names.
    fp32_partials : bool
        o_partial is float32 instead of `dtype`.
    temperature : bool
        Also write lse_t_partial.
    persistent : {"clc", "static"}
        Later work items come from cluster launch control, or from a grid-stride loop.
    shuffled_maximum : bool
        Shuffles find the most keys that a row of a tile sees, in place of a reduction of the warp,
        whose result a static proof does not follow. For verification.
    """

    dtype: str = "bf16"
    group_size: int = 16
    causal: bool = False
    paged: bool = False
    fp32_partials: bool = False
    temperature: bool = False
    persistent: str = "clc"
    shuffled_maximum: bool = False

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        choices = (
            ("dtype", tuple(DTYPES)),
            ("group_size", GROUP_SIZES),
            ("persistent", ("clc", "static")),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    @property
    def dtypes(self) -> tuple[type, type]:
        """Element types of q, k and v, and of o_partial."""
        return DTYPES[self.dtype], Float32 if self.fp32_partials else DTYPES[self.dtype]


ARCHITECTURES = ("sm_100a", "sm_103a")
# What a call can ask for: each dtype and group size, causal or not, flat or paged, one LSE or two.
_CHOICES: Any = itertools.product(
    DTYPES, reversed(GROUP_SIZES), (True, False), (False, True), (False,), (False, True)
)
SHIPPED = tuple(Config(*choice) for choice in _CHOICES)


class MsaPartialSm100(EdgeKernel):
    """The kernel: one method for each role, in the order of the data flow."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            SCHEDULE,
            config,
            rows=TILE_ROWS,
            persistent=config.persistent,
            shuffled_maximum=config.shuffled_maximum,
        )
        self.pieces = 2 if config.fp32_partials else 1  # of a tile of O

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
        """Set up the CTA, run each warp's role, and clean up."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cutlass.memory.SmemAllocator().allocate(SCHEDULE.smem_bytes, 1024)
        address = cute.recast_ptr(base + SCHEDULE.smem_offset("tmem_address"), dtype=Int32)
        if warp == SCHEDULE.role("mma").first:
            cute.arch.alloc_tmem(512, address)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == SCHEDULE.role("load").first:
            for atom, _ in maps:
                cpasync.prefetch_descriptor(atom)
            self.init_barriers(base)
        ptx.fence_tmem_before_sync()
        cute.arch.barrier()
        ptx.fence_tmem_after_sync()
        env = Env(tables, maps, base, Int32(base.toint()))

        if warp <= SCHEDULE.role("softmax0").last:
            cute.arch.setmaxregister_increase(SCHEDULE.role("softmax0").registers)
            self.softmax(env, 0)
        elif warp <= SCHEDULE.role("softmax1").last:
            cute.arch.setmaxregister_increase(SCHEDULE.role("softmax1").registers)
            self.softmax(env, 1)
        elif warp <= SCHEDULE.role("epilogue").last:
            cute.arch.setmaxregister_decrease(SCHEDULE.role("epilogue").registers)
            self.epilogue(env)
        else:
            cute.arch.setmaxregister_decrease(SCHEDULE.role("mma").registers)
            if warp == SCHEDULE.role("mma").first:
                self.mma(env)
            elif warp == SCHEDULE.role("store").first:
                self.store(env)
            elif warp == SCHEDULE.role("load").first:
                self.load(env)
            else:
                self.scheduler(env)
        ptx.fence_tmem_before_sync()
        cute.arch.barrier()
        if warp == SCHEDULE.role("mma").first:
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
            cute.arch.dealloc_tmem(pointer, 512)

    # ---- MMA -----------------------------------------------------------------------------------

    @cute.jit
    def mma(self, env: Env) -> None:
        """Issue S = Q K^T two tiles ahead of O = P V."""
        item = self.take_item(env, Item.none())
        while item.first < item.end:
            self.wait(env, "k_full", 0, item.order & 1)
            ahead = item.first
            while ahead < item.end + STAGES:
                if ahead >= item.first + STAGES:
                    if ahead == item.first + STAGES:
                        self.wait(env, "v_full", 0, item.order & 1)
                    self.issue_pv(env, ahead - STAGES)
                if ahead < item.end:
                    self.issue_qk(env, ahead, item.end)
                ahead += 1
            with cute.arch.elect_one():
                tcgen05.commit(self.barrier(env, "v_empty"))
            item = self.take_item(env, item)

    @cute.jit
    def issue_qk(self, env: Env, tile: Int32, end: Int32) -> None:
        """S = Q K^T, both K-major in shared memory."""
        idesc = ptx.instruction_descriptor(self.dtype, TILE_ROWS, BLOCK, b_mn_major=False)
        stage = (tile & 1) * 8
        q = self.descriptor(env, "q", stage * (TILE_BYTES // 8), ptx.k_major_descriptor())
        k = self.descriptor(env, "k", 0, ptx.k_major_descriptor())
        # 16 columns are 32 bytes inside a 128-byte row; columns 64 to 127 are in the other half.
        steps = [(x % 64 * 2 + x // 64 * HALF_BYTES) >> 4 for x in range(0, HEAD_DIM, MMA_K)]
        self.wait(env, "q_full", 0, (tile >> 1) & 1, stage)
        s = stage * (BLOCK // 8) + SCHEDULE.tmem_column("S")
        with cute.arch.elect_one():
            ptx.mma_chain(s, q, k, idesc, steps=[(x, x) for x in steps], accumulate=Int32(0))
            tcgen05.commit(self.barrier(env, "q_empty", 0, stage))
            tcgen05.commit(self.barrier(env, "s_full", 0, stage))
        if tile == end - 1:
            with cute.arch.elect_one():
                tcgen05.commit(self.barrier(env, "k_empty"))

    @cute.jit
    def issue_pv(self, env: Env, tile: Int32) -> None:
        """O = P V, P in tensor memory, V MN-major as it lies; only keys that the tile sees."""
        idesc = ptx.instruction_descriptor(self.dtype, TILE_ROWS, HEAD_DIM, b_mn_major=True)
        stage, phase = (tile & 1) * 8, (tile >> 1) & 1
        o = stage * (HEAD_DIM // 8) + SCHEDULE.tmem_column("O")
        p = stage * (BLOCK // 8) + SCHEDULE.tmem_column("P")
        v = self.descriptor(env, "v", 0, ptx.mn_major_descriptor(HALF_BYTES))
        tail_at = stage * (TAIL_BYTES // 8)
        tail = self.descriptor(env, "tail", tail_at, ptx.mn_major_descriptor(TAIL_BYTES // 2))
        self.wait_meta(env, tile)
        most = self.read_most_seen(env, tile)
        self.release_meta(env, tile)
        self.wait(env, "p_full", 0, phase, stage)
        self.wait(env, "o_empty", 0, phase ^ 1, stage)
        ptx.fence_tmem_after_sync()
        steps = [(key // 2, key * SWIZZLE_BYTES >> 4) for key in range(0, BLOCK, MMA_K)]
        last = tail_start(most)
        with cute.arch.elect_one():
            if most == BLOCK:
                ptx.mma_chain(o, (p,), v, idesc, steps=steps, accumulate=Int32(0))
            else:
                for number in range_constexpr(len(steps) - 1):
                    if number * MMA_K < last:
                        step, more = steps[number : number + 1], Int32(number)
                        ptx.mma_chain(o, (p,), v, idesc, steps=step, accumulate=more)
                a = (p + last // 2,)
                ptx.mma_chain(o, a, tail, idesc, steps=[(0, 0)], accumulate=last)
            tcgen05.commit(self.barrier(env, "o_full", 0, stage))

    def descriptor(
        self, env: Env, region: str, offset: Int32 | int, constant: int
    ) -> tuple[Int32, int]:
        """Describe the tile that starts `offset` bytes into a region of shared memory."""
        return ptx.smem_descriptor(env.smem + SCHEDULE.smem_offset(region) + offset, constant)

    # ---- softmax -------------------------------------------------------------------------------

    @cute.jit
    def softmax(self, env: Env, stage: cutlass.Constexpr) -> None:
        """Turn S into P, one row for each thread, for the tiles of one stage."""
        item = self.take_item(env, Item.none())
        while item.first < item.end:
            tile = item.first + ((item.first ^ stage) & 1)
            while tile < item.end:
                self.softmax_tile(env, stage, item, tile)
                tile += STAGES
            item = self.take_item(env, item)

    def tmem_lanes(self) -> Int32:
        """Return the tensor memory address of the 32 lanes that this warp can reach."""
        return (cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3) << 21

    def row(self) -> Int32:
        """Return the row of the tile that this thread has; what follows from it is not kept."""
        return ptx.opaque(cute.arch.thread_idx()[0]) & (TILE_ROWS - 1)

    @cute.jit
    def softmax_tile(self, env: Env, stage: cutlass.Constexpr, item: Item, tile: Int32) -> None:
        """One tile: mask, maximum, exponentials, P, V's tail, sum and LSE."""
        self.wait_meta(env, tile)
        seen = self.read_place(env, tile)[1] & SEEN
        lanes, s_column = self.tmem_lanes(), SCHEDULE.tmem_column("S") + stage * BLOCK
        phase = (tile >> 1) & 1
        self.wait(env, "s_full", stage, phase)
        ptx.fence_tmem_after_sync()
        if cute.arch.vote_any_sync(seen < BLOCK):
            self.mask(lanes, s_column, seen)
        scores = self.load_scores(lanes, s_column)
        best, scale = softmax.row_max(scores), env.tables.scale_log2
        lse_t = Float32(0.0)
        if const_expr(self.config.temperature):
            lse_t = self.temperature_lse(env, lanes + s_column, best)
            scores = self.load_scores(lanes, s_column)  # again: too many to keep
        m_log2 = cute.arch.fmax(best * scale, softmax.FLOOR)
        sums = (Float32(0.0), Float32(0.0))
        for start in range_constexpr(0, BLOCK, 16):  # 32 at a time spill, with some group sizes
            chunk = scores[start : start + 16]
            values, sums = softmax.exponentials(chunk, scale, m_log2, sums, cubic=EXACT)
            words = softmax.packed(values, self.dtype)
            column = SCHEDULE.tmem_column("P") + stage * BLOCK + start // 2
            ptx.tmem_store(lanes, column, words)
        most = self.read_most_seen(env, tile)
        if most < BLOCK:
            self.wait(env, "v_full", 0, item.order & 1)
            self.copy_tail(env, stage, most)
            cute.arch.fence_view_async_shared()
        cute.arch.fence_view_async_tmem_store()
        ptx.fence_tmem_before_sync()
        self.arrive(env, "p_full", stage)

        total = sums[0] + sums[1]
        self.wait(env, "sum_empty", stage, phase ^ 1)
        ptx.smem_store(*self.sum_address(env, stage * TILE_ROWS * 4), total)
        self.arrive(env, "sum_full", stage)
        lse = (m_log2 + ptx.log2(total)) * math.log(2.0)
        self.store_lse(env, tile, item.kv_head, (lse, lse_t))

    def load_scores(self, lanes: Int32, column: int) -> list[Float32]:
        """Read this thread's row of S."""
        scores = []
        for start in range(0, BLOCK, 32):
            scores += ptx.tmem_load(lanes, column + start, 32)
        cute.arch.fence_view_async_tmem_load()
        return scores

    @cute.jit
    def temperature_lse(self, env: Env, source: Int32, best: Float32) -> Float32:
        """Return the LSE of the row's scores times the temperature, read 32 at a time.

        A loop that stays one: unrolled, additions are put off and their terms spilled.
        """
        scale, sums = env.tables.scale_t_log2, (Float32(0.0), Float32(0.0))
        m_log2 = cute.arch.fmax(best * scale, softmax.FLOOR)
        for _ in cutlass.range(BLOCK // 32, unroll=1):
            scores = ptx.tmem_load(source, 0, 32)
            cute.arch.fence_view_async_tmem_load()
            _, sums = softmax.exponentials(scores, scale, m_log2, sums, cubic=EXACT)
            source += 32
        return (m_log2 + ptx.log2(sums[0] + sums[1])) * math.log(2.0)

    def read_place(self, env: Env, tile: Int32) -> tuple[Int32, Int32]:
        """Return what is known of the token of this thread's row."""
        address = env.smem + self.meta_slot(tile)[0] * TILE_ROWS
        address += self.row() // self.group * 8
        offset = SCHEDULE.smem_offset("meta")
        return ptx.smem_load(address, offset, Int32), ptx.smem_load(address, offset + 4, Int32)

    @cute.jit
    def mask(self, lanes: Int32, column: cutlass.Constexpr, seen: Int32) -> None:
        """Overwrite the scores of keys that a row does not see with -inf, 32 columns at a time."""
        for start in range_constexpr(0, BLOCK, 32):
            if cute.arch.vote_any_sync(seen < start + 32):
                scores = ptx.tmem_load(lanes, column + start, 32)
                cute.arch.fence_view_async_tmem_load()
                scores = [ptx.mask_from(x, start + i, seen) for i, x in enumerate(scores)]
                ptx.tmem_store(lanes, column + start, scores)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def copy_tail(self, env: Env, stage: cutlass.Constexpr, most: Int32) -> None:
        """Copy the 16 rows of V that PV ends with, two chunks of 16 bytes for each thread."""
        thread = self.row()
        first = tail_start(most)
        kept = 0 - Int32(first + thread // 8 < most)
        source = env.smem + first * SWIZZLE_BYTES + thread * 16
        target = SCHEDULE.smem_offset("tail") + stage * TAIL_BYTES
        for half in range_constexpr(2):
            rows = ptx.smem_load_v4(source, SCHEDULE.smem_offset("v") + half * HALF_BYTES)
            words = [word & kept for word in rows]
            ptx.smem_store_v4(env.smem + thread * 16, target + half * (TAIL_BYTES // 2), words)

    def sum_address(self, env: Env, stage_offset: Int32 | int) -> tuple[Int32, int]:
        """Return where this thread's sum lies."""
        return env.smem + self.row() * 4 + stage_offset, SCHEDULE.smem_offset("sum")

    @cute.jit
    def store_lse(
        self, env: Env, tile: Int32, kv_head: Int32, values: tuple[Float32, Float32]
    ) -> None:
        """Write this row's LSEs, -inf where it sees no key; nothing where it has no token."""
        token, place = self.read_place(env, tile)
        self.release_meta(env, tile)
        if token >= 0:
            head = kv_head * self.group + (self.row() & (self.group - 1))
            line = Int64(place >> 8) * env.tables.chunk + token
            at = line * env.tables.num_q_heads + head
            cute.arch.store(env.tables.lse + at, values[0])
            if const_expr(self.config.temperature):
                cute.arch.store(env.tables.lse_t + at, values[1])

    # ---- epilogue ------------------------------------------------------------------------------

    @cute.jit
    def epilogue(self, env: Env) -> None:
        """O divided by the sum, rounded, to shared memory."""
        item = self.take_item(env, Item.none())
        while item.first < item.end:
            tile = item.first
            while tile < item.end:
                self.finish(env, tile)
                tile += 1
            item = self.take_item(env, item)

    @cute.jit
    def finish(self, env: Env, tile: Int32) -> None:
        """Divide a tile of O and stage it, piece by piece."""
        stage, phase = (tile & 1) * 8, (tile >> 1) & 1
        self.wait(env, "sum_full", 0, phase, stage)
        total = ptx.smem_load(*self.sum_address(env, stage * (TILE_ROWS * 4 // 8)), Float32)
        self.arrive(env, "sum_empty", 0, stage)
        factor = Float32(0.0)
        if total != 0.0:
            factor = cute.arch.rcp_approx(total)
        self.wait(env, "o_full", 0, phase, stage)
        ptx.fence_tmem_after_sync()
        source = self.tmem_lanes() + stage * (HEAD_DIM // 8)
        columns = HEAD_DIM // self.pieces  # of O in a piece
        for number in range_constexpr(self.pieces):
            piece = tile * self.pieces + number
            slot = (piece & 1) * 8
            self.wait(env, "out_empty", 0, ((piece >> 1) & 1) ^ 1, slot)
            target = self.out_address(env, slot)
            for start in range_constexpr(0, columns, 32):
                column = SCHEDULE.tmem_column("O") + number * columns + start
                values = ptx.tmem_load(source, column, 32)
                cute.arch.fence_view_async_tmem_load()
                values = softmax.scaled(values, factor)
                if const_expr(self.config.fp32_partials):
                    words = [ptx.float_bits(value) for value in values]
                else:
                    words = softmax.packed(values, self.out_dtype)
                first = start * self.pieces // 8
                for chunk in range_constexpr(len(words) // 4):
                    half, unit = divmod(first + chunk, 8)
                    offset = SCHEDULE.smem_offset("out") + half * HALF_BYTES
                    part = words[4 * chunk : 4 * chunk + 4]
                    ptx.smem_store_v4(target ^ (unit << 4), offset, part)
            cute.arch.fence_view_async_shared()
            self.arrive(env, "out_full", 0, slot)
        ptx.fence_tmem_before_sync()
        self.arrive(env, "o_empty", 0, stage)

    def out_address(self, env: Env, slot: Int32) -> Int32:
        """Return where the first 16 bytes of this thread's row lie under the 128-byte swizzle."""
        row = self.row()
        return env.smem + slot * (TILE_BYTES // 8) + row * SWIZZLE_BYTES + ((row & 7) << 4)

    # ---- store ---------------------------------------------------------------------------------

    @cute.jit
    def store(self, env: Env) -> None:
        """Write staged pieces to the slots of their tokens."""
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
        for number in range_constexpr(self.pieces):
            piece = tile * self.pieces + number
            slot = (piece & 1) * 8
            self.wait(env, "out_full", 0, (piece >> 1) & 1, slot)
            address = ptx.opaque(env.smem + slot * (TILE_BYTES // 8)) + SCHEDULE.smem_offset("out")
            for part in range_constexpr(self.parts):
                for j in cutlass.range(self.in_window, unroll=self.unroll):
                    token, place = (cute.arch.shuffle_sync(x, j) for x in places[part])
                    rows = address + (part * WINDOW + j) * self.group * SWIZZLE_BYTES
                    self.store_token(env, rows, (kv_head, number, token, place >> 8))
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.arrive(env, "out_empty", 0, slot)


def compile_kernel(config: Config, options: str = "") -> Any:
    """Compile for the architecture that CuTe-DSL was imported for."""
    return cute.compile(MsaPartialSm100(config), *host_values(config.dtypes), options=options)


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
        grid=arguments.grid(config.persistent, target.num_sms),
        block=(SCHEDULE.threads, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=SCHEDULE.smem_bytes,
        parameters=arguments.kernel_parameters(config.dtype, fp32_partials=config.fp32_partials),
    )
