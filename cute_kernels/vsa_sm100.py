"""Block-sparse attention forward with 128 x 128 tiles for Blackwell: VSA, one list for a Q block.

    O_i = softmax(scale * Q_i [K_j for j in list_i]^T) [V_j for j in list_i]

Contract. q, k, v and the output are bf16 or fp16, D = 128, of any strides; LSE is float32
[B, Hq, Sq], natural log. Ids outside 0..Nkv-1 and blocks without a valid key are dropped, counts
are clamped to 0..K, sizes to the rest of the tensor. An empty row is 0 with LSE -inf, and so is a
padding query. A key that no list names, and the part of a block past its size, is never loaded: its
bits cannot reach an output.

Grid. A work item is a pair of Q blocks of one head; a CTA takes its own and then those of CTAs that
it cancels (cluster launch control), or strides over the items (static). The two tiles of a pair
share only the K/V ring: each runs its own number of rounds, and a round is one KV block.

Protocol. The load warp alone decides what is dropped, and publishes a word for each round; all
roles run from these words, at most 8 ahead of their slowest reader (K/V slots, Q and the queue of
items hold the loader back). Warps, barriers, tensor and shared memory are tables in `SCHEDULE`;
`SCHEDULE.tables()` prints them. Tensor memory is allocated whole, so its addresses start at 0.

Masking. A partial block lies at the end of its tile: the rows before it have negative coordinates,
which TMA fills with 0. Their scores become -inf in tensor memory before they are read.

Scaling. Scores live in the log2 domain. The reference maximum m follows the running one only when
that has grown by more than `rescale_threshold`; until then P may reach 2^threshold and O stays as
it is. The correction warps touch O only if one of a warp's 32 factors is not 1.

Steady state, tile 0 and tile 1 in turn (r: round):

    tensor core        softmax 0          softmax 1
    PV0(r) QK0(r+1)    -                  P1(r)
    PV1(r) QK1(r+1)    P0(r+1)            -
    PV0(r+1) ...       -                  P1(r+1)

PV starts when 96 of 128 columns of P are stored. Some exponentials are cubics on the FMA pipe.

Limits. Forward, non-causal, D = 128, 128-token blocks, Q heads and batch at most 65535 each for a
CLC grid. State: compiled and emulated; never run on a GPU.

Sources: VSA (arXiv 2505.13389); FlashAttention-4 (arXiv 2603.05451) for lazy rescaling and the
cubic; PTX ISA for tcgen05, mbarrier, cp.async.bulk.tensor and clusterlaunchcontrol.
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

from sparse_atten.cute_kernels.common import block_list, offline, persistent, ptx, softmax, tiles
from sparse_atten.cute_kernels.common.block_list import KEYS, LAST, Item, Row, Tables
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.persistent import Env, PersistentKernel, Stream
from sparse_atten.cute_kernels.common.schedule import Barrier, Region, Role, Schedule, lanes, once
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.common.tiles import HALF_BYTES, TILE_BYTES, Ring
from sparse_atten.cute_kernels.vsa_arguments import BLOCK, HEAD_DIM, Arguments
from sparse_atten.cute_kernels.vsa_host import host_values, make_maps

TILE = BLOCK  # rows and columns of a tile of scores
KV_SLOTS = 3
MMA_K = 16
KEYS_IN_HEAD = 96  # keys of P that PV may start with; the other 32 follow as the tail

FIRST = 512  # bit that the MMA warp adds to its copy: the row's first round
ONE_BITS = 0x3F800000  # 1.0

SOFTMAX = ("softmax0", "softmax1")  # of tile 0 and tile 1: alike, so that arrivals name the first
P_HEAD_READY = "P[:, :96] is in TMEM, and O is rescaled or free"
SCHEDULE = Schedule(
    roles=(
        Role("softmax0", 0, 4, 192),
        Role("softmax1", 4, 4, 192),
        Role("correction", 8, 4, 80),
        Role("mma", 12, 1, 48),
        Role("store", 13, 1, 48),
        Role("load", 14, 1, 48),
        Role("scheduler", 15, 1, 48),
    ),
    barriers=(
        *persistent.item_barriers((*SOFTMAX, "correction", "mma", "store", "load")),
        persistent.round_barrier((*SOFTMAX, "correction", "mma")),
        Barrier("q_full", 2, once("load"), ("mma",), "Q has landed", TILE_BYTES),
        Barrier("q_empty", 2, once("mma"), ("load",), "the row's last QK is done"),
        Barrier("kv_full", KV_SLOTS, once("load"), ("mma",), "K or V has landed", TILE_BYTES),
        Barrier("kv_empty", KV_SLOTS, once("mma"), ("load",), "the slot's MMAs are done"),
        Barrier("s_full", 2, once("mma"), SOFTMAX, "QK is done, and PV of the round before"),
        Barrier("p_head_full", 2, lanes("softmax0", "correction"), ("mma",), P_HEAD_READY),
        Barrier("p_tail_full", 2, lanes("softmax0"), ("mma",), "P[:, 96:] is in TMEM"),
        Barrier("alpha_full", 2, lanes("softmax0"), ("correction",), "a round's factors of O"),
        Barrier("sum_full", 2, lanes("softmax0"), ("correction",), "a row's sums of P"),
        Barrier("sum_empty", 2, lanes("correction"), SOFTMAX, "the sums have been read"),
        Barrier("o_full", 2, once("mma"), ("correction",), "the row's last PV is done"),
        Barrier("out_full", 2, lanes("correction"), ("store",), "the output tile is in SMEM"),
        Barrier("out_empty", 2, once("store"), ("correction",), "the store has read the tile"),
    ),
    tmem=(
        Region("S0", 128),
        Region("S1", 128),
        Region("O0", 128),
        Region("O1", 128),
        Region("P0", 64, over="S0"),
        Region("P1", 64, over="S1"),
    ),
    smem=(
        Region("q", 2 * TILE_BYTES),
        Region("kv", KV_SLOTS * TILE_BYTES),
        Region("out", 2 * TILE_BYTES),
        Region("alpha", 2 * TILE * 4),
        Region("sum", 2 * TILE * 4),
        Region("rounds", 2 * persistent.ROUND_SLOTS * 8),
        Region("items", persistent.ITEM_SLOTS * 16),
        Region("clc", 16),
        Region("tmem_address", 16),
    ),
)
DTYPES = {"bf16": BFloat16, "fp16": Float16}
Q_BLOCKS = 2  # of a work item
WIDE = {"persistent": "static"}  # fields of a Config for more heads or batches than a grid has


@dataclass(frozen=True)
class Config:
    """What is fixed when the kernel is compiled; with a `Target` it is the cache key.

    Parameters
    ----------
    dtype : {"bf16", "fp16"}
        Element type of q, k, v and the output.
    return_lse : bool
        Write the natural-log LSE.
    kv_sizes, q_sizes : bool
        Whether the tables of block sizes exist.
    persistent : {"clc", "static"}
        Later work items come from cluster launch control, or from a grid-stride loop.
    cubic_pairs : int
        Of every 16 pairs of exponentials, how many are cubics on the FMA pipe (0 to 16).
    rescale_threshold : float
        Powers of two that a row maximum may grow before O is rescaled.
    always_rescale : bool
        The correction warps rescale O in every round and take every round word: no branch depends
        on scores, which is what a static proof can follow. For verification.
    """

    dtype: str = "bf16"
    return_lse: bool = False
    kv_sizes: bool = False
    q_sizes: bool = False
    persistent: str = "clc"
    cubic_pairs: int = 2
    rescale_threshold: float = 8.0
    always_rescale: bool = False

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        choices = (("dtype", tuple(DTYPES)), ("persistent", ("clc", "static")))
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if not 0 <= self.cubic_pairs <= 16:
            raise ValueError(f"cubic_pairs must be in 0..16, got {self.cubic_pairs}")
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"rescale_threshold must be in 0..8, got {self.rescale_threshold}")


ARCHITECTURES = ("sm_100a", "sm_103a")
_CHOICES: Any = itertools.product(DTYPES, *[(False, True)] * 3, ("clc", "static"))
SHIPPED = tuple(Config(*choice) for choice in _CHOICES)  # what a call can ask for


class VsaForwardSm100(PersistentKernel):
    """The kernel: one method for each role, in the order of the data flow."""

    def __init__(self, config: Config) -> None:
        super().__init__(SCHEDULE, config.persistent)
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.has_sizes = (config.kv_sizes, config.q_sizes)

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
        maps = make_maps(operands, operand_strides, tables, tiles.tile_layout(self.dtype))
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
        elif warp <= SCHEDULE.role("correction").last:
            cute.arch.setmaxregister_decrease(SCHEDULE.role("correction").registers)
            self.correction(env)
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

    # ---- load ----------------------------------------------------------------------------------

    @cute.jit
    def load(self, env: Env) -> None:
        """Walk both lists, decide what is kept, publish each round, load Q, K and V."""
        ring = Ring(Int32(0), Int32(1))
        stream0, stream1 = Stream.start(), Stream.start()
        item = self.take_item(env, Int32(0))
        while item.valid != 0:
            row0, stream0, ring = self.load_first(env, 0, item, stream0, ring)
            row1, stream1, ring = self.load_first(env, 1, item, stream1, ring)
            while (stream0.word | stream1.word) != 0:
                row0, stream0, ring = self.load_round(env, 0, row0, stream0, ring)
                row1, stream1, ring = self.load_round(env, 1, row1, stream1, ring)
            item = self.take_item(env, item.order + 1)

    @cute.jit
    def load_first(
        self, env: Env, tile: cutlass.Constexpr, item: Item, stream: Stream, ring: Ring
    ) -> tuple[Row, Stream, Ring]:
        """Open a row; publish its first round and load Q and K, or publish that it has none."""
        row = block_list.open_row(env.tables, item, item.pair * 2 + tile, self.has_sizes)
        if row.pending == 0:
            stream = self.publish_word(env, tile, stream, Int32(0))
        else:
            row, word = block_list.take_block(env.tables, row, self.has_sizes)
            stream = self.publish_word(env, tile, stream, word)
            self.wait(env, "q_empty", tile, (stream.rows & 1) ^ 1)
            full = self.barrier(env, "q_full", tile)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_BYTES)
            source = self.query_tile(env, 0, row.q_block, item)
            tiles.load_tile(env.maps[0][0], source, self.tile_at(env, "q", tile * TILE_BYTES), full)
            ring = self.load_kv(env, 1, row, word, ring)
        return row, stream, ring

    @cute.jit
    def load_round(
        self, env: Env, tile: cutlass.Constexpr, row: Row, stream: Stream, ring: Ring
    ) -> tuple[Row, Stream, Ring]:
        """Load V of the round in work; publish the next round and load its K."""
        word = stream.word
        if word != 0:
            ring = self.load_kv(env, 2, row, word, ring)
            if word >= 0:
                row, word = block_list.take_block(env.tables, row, self.has_sizes)
                stream = self.publish_word(env, tile, stream, word)
                ring = self.load_kv(env, 1, row, word, ring)
            else:
                stream = Stream(Int32(0), stream.cursor, stream.rounds, stream.rows + 1)
        return row, stream, ring

    def load_kv(self, env: Env, operand: int, row: Row, word: Int32, ring: Ring) -> Ring:
        """Load K (operand 1) or V (operand 2) of the block in work, its valid rows at the end."""
        self.wait(env, "kv_empty", 0, ring.phase, ring.slot)
        full = self.barrier(env, "kv_full", 0, ring.slot)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_BYTES)
        origin = ((word & KEYS) - TILE, 0, row.current, row.kv_head, row.batch)
        source = cute.domain_offset(origin, env.maps[operand][1])[(None, None, 0, 0, 0)]
        target = self.tile_at(env, "kv", ring.tile_offset())
        tiles.load_tile(env.maps[operand][0], source, target, full)
        return tiles.advance(ring, KV_SLOTS)

    def tile_at(self, env: Env, region: str, offset: Int32 | int) -> cute.Tensor:
        """View the tile that starts `offset` bytes into a region of shared memory."""
        return tiles.tile_at(env.base, SCHEDULE.smem_offset(region) + offset, self.dtype)

    def query_tile(self, env: Env, operand: int, q_block: Int32, item: Item) -> cute.Tensor:
        """Return the coordinates of a tile of Q (operand 0) or of the output (operand 3)."""
        tensor = env.maps[operand][1][(None, None, item.head, item.batch)]
        return cute.local_tile(tensor, (TILE, HEAD_DIM), (q_block, 0))

    # ---- MMA -----------------------------------------------------------------------------------

    @cute.jit
    def mma(self, env: Env) -> None:
        """Issue S = Q K^T and O += P V for both tiles in turn."""
        ring = Ring(Int32(0), Int32(0))
        stream0, stream1 = Stream.start(), Stream.start()
        item = self.take_item(env, Int32(0))
        while item.valid != 0:
            stream0, ring = self.mma_first(env, 0, stream0, ring)
            stream1, ring = self.mma_first(env, 1, stream1, ring)
            while (stream0.word | stream1.word) != 0:
                stream0, ring = self.mma_round(env, 0, stream0, ring)
                stream1, ring = self.mma_round(env, 1, stream1, ring)
            item = self.take_item(env, item.order + 1)

    @cute.jit
    def mma_first(
        self, env: Env, tile: cutlass.Constexpr, stream: Stream, ring: Ring
    ) -> tuple[Stream, Ring]:
        """Issue the first QK of a row."""
        stream = self.take_word(env, tile, stream)
        if stream.word != 0:
            self.wait(env, "q_full", tile, stream.rows & 1)
            ring = self.issue_qk(env, tile, stream.word, ring)
            stream = stream._replace(word=stream.word | FIRST)
        return stream, ring

    @cute.jit
    def mma_round(
        self, env: Env, tile: cutlass.Constexpr, stream: Stream, ring: Ring
    ) -> tuple[Stream, Ring]:
        """Issue PV of the round in work, then QK of the next one."""
        if stream.word != 0:
            ring = self.issue_pv(env, tile, stream, ring)
            if stream.word > 0:
                stream = self.end_round(env, tile, stream)
                ring = self.issue_qk(env, tile, stream.word, ring)
            else:
                with cute.arch.elect_one():
                    tcgen05.commit(self.barrier(env, "o_full", tile))
                stream = self.end_round(env, tile, stream)
        return stream, ring

    @cute.jit
    def issue_qk(self, env: Env, tile: cutlass.Constexpr, word: Int32, ring: Ring) -> Ring:
        """S = Q K^T, both K-major in shared memory."""
        idesc = ptx.instruction_descriptor(self.dtype, TILE, TILE, b_mn_major=False)
        q = self.descriptor(env, "q", tile * TILE_BYTES, ptx.k_major_descriptor())
        k = self.descriptor(env, "kv", ring.tile_offset(), ptx.k_major_descriptor())
        # 16 columns are 32 bytes inside a 128-byte row; columns 64 to 127 are in the other half.
        steps = [(x % 64 * 2 + x // 64 * HALF_BYTES) >> 4 for x in range(0, HEAD_DIM, MMA_K)]
        self.wait(env, "kv_full", 0, ring.phase, ring.slot)
        with cute.arch.elect_one():
            s = SCHEDULE.tmem_column(f"S{tile}")
            ptx.mma_chain(s, q, k, idesc, steps=[(x, x) for x in steps], accumulate=Int32(0))
            tcgen05.commit(self.barrier(env, "kv_empty", 0, ring.slot))
            tcgen05.commit(self.barrier(env, "s_full", tile))
        if word < 0:
            with cute.arch.elect_one():
                tcgen05.commit(self.barrier(env, "q_empty", tile))
        return tiles.advance(ring, KV_SLOTS)

    @cute.jit
    def issue_pv(self, env: Env, tile: cutlass.Constexpr, stream: Stream, ring: Ring) -> Ring:
        """O += P V, P in tensor memory, V MN-major as it lies; the last 32 keys await their P."""
        idesc = ptx.instruction_descriptor(self.dtype, TILE, HEAD_DIM, b_mn_major=True)
        v = self.descriptor(env, "kv", ring.tile_offset(), ptx.mn_major_descriptor(HALF_BYTES))
        o = SCHEDULE.tmem_column(f"O{tile}")
        p = SCHEDULE.tmem_column(f"P{tile}")
        self.wait(env, "kv_full", 0, ring.phase, ring.slot)
        for part, keys, accumulate in (
            ("p_head_full", range(0, KEYS_IN_HEAD, MMA_K), Int32((stream.word & FIRST) == 0)),
            ("p_tail_full", range(KEYS_IN_HEAD, TILE, MMA_K), Int32(1)),
        ):
            steps = [(key // 2, key * 128 >> 4) for key in keys]
            self.wait(env, part, tile, stream.rounds & 1)
            ptx.fence_tmem_after_sync()
            with cute.arch.elect_one():
                ptx.mma_chain(o, (p,), v, idesc, steps=steps, accumulate=accumulate)
                if const_expr(part == "p_tail_full"):
                    tcgen05.commit(self.barrier(env, "kv_empty", 0, ring.slot))
        return tiles.advance(ring, KV_SLOTS)

    def descriptor(
        self, env: Env, region: str, offset: Int32 | int, constant: int
    ) -> tuple[Int32, int]:
        """Describe the tile that starts `offset` bytes into a region of shared memory."""
        return ptx.smem_descriptor(env.smem + SCHEDULE.smem_offset(region) + offset, constant)

    # ---- softmax -------------------------------------------------------------------------------

    @cute.jit
    def softmax(self, env: Env, tile: cutlass.Constexpr) -> None:
        """Turn S into P, one row for each thread, keeping its running maximum and sum."""
        stream = Stream.start()
        item = self.take_item(env, Int32(0))
        while item.valid != 0:
            m_log2, total = Float32(softmax.FLOOR), Float32(0.0)
            stream = self.take_word(env, tile, stream)
            if stream.word != 0:
                while stream.word != 0:
                    m_log2, total = self.softmax_round(env, tile, stream, m_log2, total)
                    stream = self.end_round(env, tile, stream)
                self.wait(env, "sum_empty", tile, stream.rows & 1)
                ptx.smem_store(*self.stat_address(env, "sum", tile), total)
                self.arrive(env, "sum_full", tile)
            if const_expr(self.config.return_lse):
                self.store_lse(env, tile, item, m_log2, total)
            item = self.take_item(env, item.order + 1)

    def stat_address(self, env: Env, region: str, tile: int) -> tuple[Int32, int]:
        """Return where this thread's float in `alpha` or `sum` lies."""
        thread = cute.arch.thread_idx()[0] & (TILE - 1)
        return env.smem + thread * 4, SCHEDULE.smem_offset(region) + tile * TILE * 4

    def tmem_lanes(self) -> Int32:
        """Return the tensor memory address of the 32 lanes that this warp can reach."""
        return (cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3) << 21

    @cute.jit
    def softmax_round(
        self,
        env: Env,
        tile: cutlass.Constexpr,
        stream: Stream,
        m_log2: Float32,
        total: Float32,
    ) -> tuple[Float32, Float32]:
        """One round: maximum, factor for O, exponentials, P. Returns the new maximum and sum."""
        scale = env.tables.scale_log2
        lanes, s_column = self.tmem_lanes(), SCHEDULE.tmem_column(f"S{tile}")
        self.wait(env, "s_full", tile, stream.rounds & 1)
        ptx.fence_tmem_after_sync()
        if (stream.word & TILE) == 0:
            softmax.mask_lead(lanes, s_column, TILE - (stream.word & KEYS))
        scores = []
        for start in range_constexpr(0, TILE, 32):
            scores += ptx.tmem_load(lanes, s_column + start, 32)
        cute.arch.fence_view_async_tmem_load()

        best = softmax.row_max(scores) * scale
        new_m = cute.arch.fmax(m_log2, best)
        growth = m_log2 - new_m
        alpha = ptx.exp2(growth)
        if growth >= -self.config.rescale_threshold:
            alpha = Float32(1.0)
            new_m = m_log2
        m_log2 = new_m
        # alpha is never negative: its sign tells the correction warps of the row's last round.
        marked = ptx.float_bits(alpha) | (stream.word & LAST)
        ptx.smem_store(*self.stat_address(env, "alpha", tile), marked)
        ptx.fence_tmem_before_sync()  # the correction warps touch O, which PV has written
        self.arrive(env, "alpha_full", tile)
        self.keep_order(env, tile, stream)

        sums = (total * alpha, Float32(0.0))
        for start in range_constexpr(0, TILE, 32):
            values, sums = softmax.exponentials(
                scores[start : start + 32], scale, m_log2, sums, cubic=self.cubic_pairs(start)
            )
            words = softmax.packed(values, self.dtype)
            ptx.tmem_store(lanes, SCHEDULE.tmem_column(f"P{tile}") + start // 2, words)
            if const_expr(start + 32 == KEYS_IN_HEAD):
                self.publish_p(env, "p_head_full", tile)
                self.keep_order(env, tile, stream)
        self.publish_p(env, "p_tail_full", tile)
        return m_log2, sums[0] + sums[1]

    def keep_order(self, env: Env, tile: int, stream: Stream) -> None:
        """Wait for what has passed already: the compiler moves no arrival behind later work."""
        self.wait(env, "s_full", tile, stream.rounds & 1)

    def publish_p(self, env: Env, name: str, tile: int) -> None:
        """Signal that this thread's columns of P are in tensor memory."""
        cute.arch.fence_view_async_tmem_store()
        ptx.fence_tmem_before_sync()
        self.arrive(env, name, tile)

    def cubic_pairs(self, start: int) -> list[bool]:
        """Say which of 16 pairs go to the FMA pipe: the last ones, and none of P's tail."""
        first = 16 - self.config.cubic_pairs if start < KEYS_IN_HEAD else 16
        return [pair >= first for pair in range(16)]

    @cute.jit
    def store_lse(
        self, env: Env, tile: cutlass.Constexpr, item: Item, m_log2: Float32, total: Float32
    ) -> None:
        """Write this row's LSE, -inf where no key was seen or the row is padding."""
        tables = env.tables
        q_block = item.pair * 2 + tile
        thread = cute.arch.thread_idx()[0] & (TILE - 1)
        row = q_block * TILE + thread
        if row < tables.num_queries:
            lse = (m_log2 + ptx.log2(total)) * math.log(2.0)
            seen = total != 0.0
            if const_expr(self.config.q_sizes):
                seen = seen & (thread < block_list.q_size(tables, q_block))
            if not seen:
                lse = -Float32.inf
            head = Int64(item.batch) * tables.num_q_heads + item.head
            cute.arch.store(tables.lse + (head * tables.num_queries + row), lse)

    # ---- correction ----------------------------------------------------------------------------

    @cute.jit
    def correction(self, env: Env) -> None:
        """Rescale O where a maximum grew; at the end of a row divide by the sum and hand O over."""
        stream0, stream1 = Stream.start(), Stream.start()
        item = self.take_item(env, Int32(0))
        while item.valid != 0:
            stream0 = self.correct_first(env, 0, item, stream0)
            stream1 = self.correct_first(env, 1, item, stream1)
            while (stream0.word | stream1.word) != 0:
                stream0 = self.correct_round(env, 0, item, stream0)
                stream1 = self.correct_round(env, 1, item, stream1)
            item = self.take_item(env, item.order + 1)

    @cute.jit
    def correct_first(
        self, env: Env, tile: cutlass.Constexpr, item: Item, stream: Stream
    ) -> Stream:
        """Let the first PV overwrite O, or write the zeros of an empty row."""
        stream = self.take_word(env, tile, stream)
        if stream.word == 0:
            self.wait(env, "out_empty", tile, (item.order & 1) ^ 1)
            for chunk in range_constexpr(HEAD_DIM // 8):
                ptx.smem_store_v4(*self.out_address(env, tile, chunk), [Int32(0)] * 4)
            self.publish_out(env, tile)
        else:
            alpha = self.take_alpha(env, tile, stream)
            self.arrive(env, "p_head_full", tile)
            if const_expr(not self.config.always_rescale):
                stream = stream._replace(word=(alpha & LAST) | 1)
        return stream

    def take_alpha(self, env: Env, tile: int, stream: Stream) -> Int32:
        """Wait for the factors of a round; return the bits of this thread's, marked if the last."""
        self.wait(env, "alpha_full", tile, stream.rounds & 1)
        return ptx.smem_load(*self.stat_address(env, "alpha", tile), Int32)

    @cute.jit
    def correct_round(
        self, env: Env, tile: cutlass.Constexpr, item: Item, stream: Stream
    ) -> Stream:
        """Rescale O for the next round, or finish the row after its last one."""
        word, cursor, rounds, rows = stream
        if word > 0:
            if const_expr(self.config.always_rescale):
                word, cursor, rounds, rows = self.end_round(env, tile, stream)
                alpha = self.take_alpha(env, tile, Stream(word, cursor, rounds, rows))
                self.rescale(env, tile, ptx.bits_float(alpha & ~LAST))
            else:
                rounds += 1
                cursor += 8
                alpha = self.take_alpha(env, tile, Stream(word, cursor, rounds, rows))
                if cute.arch.vote_any_sync(alpha != ONE_BITS):
                    word |= alpha & LAST
                    if cute.arch.vote_any_sync((alpha & ~LAST) != ONE_BITS):
                        self.rescale(env, tile, ptx.bits_float(alpha & ~LAST))
            self.arrive(env, "p_head_full", tile)
        elif word < 0:
            self.finish(env, tile, item, rows)
            word, rounds, rows = Int32(0), rounds + 1, rows + 1
        return Stream(word, cursor, rounds, rows)

    @cute.jit
    def rescale(self, env: Env, tile: cutlass.Constexpr, alpha: Float32) -> None:
        """Multiply this thread's row of O by alpha."""
        ptx.fence_tmem_after_sync()
        for start in range_constexpr(0, HEAD_DIM, 16):
            column = SCHEDULE.tmem_column(f"O{tile}") + start
            values = ptx.tmem_load(self.tmem_lanes(), column, 16)
            cute.arch.fence_view_async_tmem_load()
            ptx.tmem_store(self.tmem_lanes(), column, softmax.scaled(values, alpha))
        cute.arch.fence_view_async_tmem_store()
        ptx.fence_tmem_before_sync()

    @cute.jit
    def finish(
        self,
        env: Env,
        tile: cutlass.Constexpr,
        item: Item,
        rows: Int32,
    ) -> None:
        """O / l, rounded, to shared memory; padding rows become 0."""
        self.wait(env, "sum_full", tile, rows & 1)
        total = ptx.smem_load(*self.stat_address(env, "sum", tile), Float32)
        self.arrive(env, "sum_empty", tile)
        factor = Float32(0.0)
        if total != 0.0:
            factor = cute.arch.rcp_approx(total)
        kept = Int32(1)
        if const_expr(self.config.q_sizes):
            thread = cute.arch.thread_idx()[0] & (TILE - 1)
            kept = Int32(thread < block_list.q_size(env.tables, item.pair * 2 + tile))
        self.wait(env, "o_full", tile, rows & 1)
        self.wait(env, "out_empty", tile, (item.order & 1) ^ 1)
        ptx.fence_tmem_after_sync()
        for start in range_constexpr(0, HEAD_DIM, 16):
            column = SCHEDULE.tmem_column(f"O{tile}") + start
            values = ptx.tmem_load(self.tmem_lanes(), column, 16)
            cute.arch.fence_view_async_tmem_load()
            values = softmax.scaled(values, factor)
            words = softmax.packed(values, self.dtype)
            if const_expr(self.config.q_sizes):
                words = [word & (0 - kept) for word in words]
            for chunk in range_constexpr(2):
                address = self.out_address(env, tile, start // 8 + chunk)
                ptx.smem_store_v4(*address, words[4 * chunk : 4 * chunk + 4])
        ptx.fence_tmem_before_sync()
        self.publish_out(env, tile)

    def out_address(self, env: Env, tile: int, chunk: int) -> tuple[Int32, int]:
        """Return where 16 bytes of this thread's output row lie under the 128-byte swizzle."""
        thread = ptx.opaque(cute.arch.thread_idx()[0] & (TILE - 1))
        half, unit = divmod(chunk, 8)
        offset = SCHEDULE.smem_offset("out") + tile * TILE_BYTES + half * HALF_BYTES
        return env.smem + thread * 128 + (((thread & 7) ^ unit) << 4), offset

    def publish_out(self, env: Env, tile: int) -> None:
        """Make the output tile visible to TMA and signal it."""
        cute.arch.fence_view_async_shared()
        self.arrive(env, "out_full", tile)

    # ---- store ---------------------------------------------------------------------------------

    @cute.jit
    def store(self, env: Env) -> None:
        """Write finished tiles to global memory; rows past the last query are dropped by TMA."""
        item = self.take_item(env, Int32(0))
        while item.valid != 0:
            for tile in range_constexpr(2):
                self.wait(env, "out_full", tile, item.order & 1)
                target = self.query_tile(env, 3, item.pair * 2 + tile, item)
                source, target = tiles.boxes(
                    env.maps[3][0], self.tile_at(env, "out", tile * TILE_BYTES), target
                )
                with cute.arch.elect_one():
                    cute.copy(env.maps[3][0], source, target)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self.arrive(env, "out_empty", tile)
            item = self.take_item(env, item.order + 1)


def compile_kernel(config: Config, options: str = "") -> Any:
    """Compile for the architecture that CuTe-DSL was imported for."""
    return cute.compile(
        VsaForwardSm100(config), *host_values(DTYPES[config.dtype]), options=options
    )


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
        parameters=arguments.kernel_parameters(config.dtype),
    )
