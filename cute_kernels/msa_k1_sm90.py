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

Tiles. 64 / G query tokens of the row times the G heads of the group are the 64 rows of a tile. Tile
n, counted over all items of the CTA, belongs to warpgroup n % 3 and has stage n % 9. The load warp
gathers Q, one TMA box for each token and 64 columns, and publishes for each token where its partial
goes and how many keys it sees, and for the tile the most that one of them sees.

Masking. A row sees the first `seen` keys of the block: those that exist and, if causal, are not
after it; the scores of the others become -inf. PV reads the 16 keys where the tile's last one lies,
and all after them, from a copy of those 16 rows of V with 0 for keys that none sees (the tail).

Softmax. There is one block, hence one step: maximum, exponentials, sum. O is divided by the sum
when it leaves the registers, and stored by TMA, one box for each token that exists and 128 bytes.

Overlap. Each warpgroup works off its tiles one step after the other; the tensor core is shared by
three of them, so that it has work while two compute softmax and store. Of Q's place in shared
memory, the tail takes the first rows once QK is done, and O all of them once PV is:

    load     Q(n)                                                       Q(n+9)
    place    Q(n) ............... tail(n) ....... O(n) ........ (free)  Q(n+9)
    wgmma          QK(n)                  PV(n)
    threads               softmax(n)            O / sum
    store                                              O(n)

Limits. D = 128, blocks of 128 keys, G in 1, 2, 4, 8, 16. Small groups make many small TMA boxes.

Sources: MSA (arXiv 2606.13392), section 4; PTX ISA for wgmma, mbarrier,
cp.async.bulk.tensor and griddepcontrol.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from sparse_atten.cute_kernels.common import offline, ptx, softmax, tiles
from sparse_atten.cute_kernels.common.edges import (
    ITEM_BYTES,
    META_BYTES,
    MMA_K,
    SEEN,
    WINDOW,
    EdgeKernel,
    Item,
    Place,
    Tables,
    meta_slots,
    tail_start,
)
from sparse_atten.cute_kernels.common.fragments import columns, over_quad, pack, reciprocal
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.persistent import ITEM_SLOTS, Env
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

ROWS = 64  # of a tile
CONSUMERS = ("consumer0", "consumer1", "consumer2")
READERS = (*CONSUMERS, "store", "load")  # of work items
# A multiple of the consumers: a stage never changes hands, so that who waits for a fill has seen
# the one before it, and its parity tells them apart.
STAGES = 9
HALF_TILE_BYTES = ROWS * SWIZZLE_BYTES  # 64 columns
META_SLOTS = meta_slots(ROWS)
META = "where the tile's partials go, and what its rows see"
SCHEDULE = Schedule(
    roles=(
        Role("consumer0", 0, 4, 152),
        Role("consumer1", 4, 4, 152),
        Role("consumer2", 8, 4, 152),
        Role("load", 12, 1, 56),
        Role("store", 13, 1, 56),
        Role("scheduler", 14, 1, 56),
        Role("idle", 15, 1, 56),
    ),
    barriers=(
        Barrier("item_full", ITEM_SLOTS, once("scheduler"), READERS, "the slot names a work item"),
        Barrier("item_empty", ITEM_SLOTS, lanes(*READERS), ("scheduler",), "all have read it"),
        Barrier("k_full", 1, once("scheduler"), CONSUMERS, "K has landed", TILE_BYTES),
        Barrier("k_empty", 1, warps(*CONSUMERS), ("scheduler",), "the item's last QK is done"),
        Barrier("v_full", 1, once("scheduler"), CONSUMERS, "V has landed", TILE_BYTES),
        Barrier("v_empty", 1, warps(*CONSUMERS), ("scheduler",), "the item's last PV is done"),
        Barrier("meta_full", META_SLOTS, lanes("load"), ("store", *CONSUMERS), META),
        # Of the consumers the tile's own.
        Barrier("meta_empty", META_SLOTS, lanes("store", "consumer0"), ("load",), "read"),
        Barrier("q_full", STAGES, once("load"), CONSUMERS, "Q has landed", 2 * HALF_TILE_BYTES),
        Barrier("q_empty", STAGES, once("store"), ("load",), "O has left Q's place"),
        Barrier("out_full", STAGES, warps("consumer0"), ("store",), "O is in Q's place"),
    ),
    tmem=(),
    smem=(
        Region("q", STAGES // 2 * TILE_BYTES + HALF_BYTES + HALF_TILE_BYTES),
        Region("k", TILE_BYTES),
        Region("v", TILE_BYTES),
        Region("meta", META_BYTES),
        Region("most_seen", META_SLOTS * 4),
        Region("items", ITEM_SLOTS * ITEM_BYTES),
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


ARCHITECTURES = ("sm_90a",)
_CHOICES: Any = itertools.product(
    DTYPES, reversed(GROUP_SIZES), (True, False), (False, True), (False, True)
)
SHIPPED = tuple(Config(*choice) for choice in _CHOICES)  # what a call can ask for


class Rows(NamedTuple):
    """A thread's two rows of a tile: the token in the chunk or a negative, and where and what."""

    token0: Int32
    place0: Int32
    token1: Int32
    place1: Int32


class MsaPartialSm90(EdgeKernel):
    """The kernel: one method for each role, in the order of the data flow."""

    def __init__(self, config: Config) -> None:
        super().__init__(SCHEDULE, config, rows=ROWS, persistent="static")

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
        if warp <= SCHEDULE.role("consumer2").last:
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

    def place_of(self, tile: Int32) -> Place:
        """Return where Q of a tile lies: stages that take turns.

        Two of them lie as the rows of one 128 x 128 tile, so that the halves of a tail lie as far
        apart as those of V.
        """
        stage = tile % STAGES
        return Place(stage * 8, (stage >> 1) * TILE_BYTES + (stage & 1) * HALF_TILE_BYTES)

    def phase_of(self, tile: Int32) -> Int32:
        """Return the parity of the times that a tile's stage was filled before."""
        return (tile // STAGES) & 1

    def release(self, env: Env, item: Item) -> None:
        """Give the item's slot back. Every lane of a role: each has read it."""
        self.arrive(env, "item_empty", 0, item.slot)

    def release_meta(self, env: Env, tile: Int32) -> None:
        """Give the tile's metadata back. Every lane of a role: each has read its own."""
        self.arrive(env, "meta_empty", 0, self.meta_slot(tile)[0])

    # ---- consumers -----------------------------------------------------------------------------

    @cute.jit
    def consume(self, env: Env, warp: Int32) -> None:
        """Work off the tiles of one warpgroup; K and V are given back after each item."""
        tile = warp >> 2
        item = self.take_item(env, Item.none())
        while item.first < item.end:
            self.wait(env, "k_full", 0, item.order & 1)
            if tile >= item.end:
                self.release_keys(env, "k_empty")
            while tile < item.end:
                self.attend(env, item, tile)
                tile += len(CONSUMERS)
            self.wait(env, "v_full", 0, item.order & 1)
            self.release_keys(env, "v_empty")
            item = self.take_item(env, item)

    @cute.jit
    def attend(self, env: Env, item: Item, tile: Int32) -> None:
        """One tile: QK, softmax, LSE, PV, O."""
        place = self.place_of(tile)
        qk, pv = self.mmas()
        s = cute.make_rmem_tensor(qk.partition_shape_C((ROWS, BLOCK)), Float32)
        o = cute.make_rmem_tensor(pv.partition_shape_C((ROWS, HEAD_DIM)), Float32)
        p = cute.make_rmem_tensor(pv.partition_shape_A((ROWS, BLOCK)), self.dtype)
        self.wait(env, "q_full", 0, self.phase_of(tile), place.stage)
        self.issue_qk(env, place, s)
        rows, most = self.read_rows(env, tile)
        warpgroup.wait_group(0)
        if tile + len(CONSUMERS) >= item.end:
            self.release_keys(env, "k_empty")
        factors = self.softmax(env, item, rows, s)
        pack(s, p, self.dtype)
        self.wait(env, "v_full", 0, item.order & 1)
        if most < BLOCK:
            self.copy_tail(env, place, most)
        self.issue_pv(env, place, most, (p, o))
        warpgroup.wait_group(0)
        self.meet()
        self.finish(env, place, o, factors)

    def release_keys(self, env: Env, name: str) -> None:
        """Say that the warp is done with K or V of an item."""
        with cute.arch.elect_one():
            self.arrive(env, name)

    def mmas(self) -> tuple:
        """Return the MMA of S = Q K^T, and that of O = P V, P in registers, V as it lies."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shape = (ROWS, BLOCK, MMA_K)
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        qk = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, smem, k_major, k_major)
        pv = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, rmem, k_major, mn_major)
        return cute.make_tiled_mma(qk), cute.make_tiled_mma(pv)

    def meet(self) -> None:
        """Wait for the other warps of the warpgroup."""
        barrier = 1 + (cute.arch.warp_idx() >> 2)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)

    def tile_at(self, env: Env, offset: Int32 | int) -> cute.Tensor:
        """View the tile that starts `offset` bytes into shared memory."""
        return tiles.tile_at(env.base, offset, self.dtype)

    def issue_qk(self, env: Env, place: Place, s: Any) -> None:
        """Start S = Q K^T, both K-major in shared memory."""
        mma = self.mmas()[0]
        slice_ = mma.get_slice(0)
        queries = self.tile_at(env, SCHEDULE.smem_offset("q") + place.offset)
        queries = cute.local_tile(queries, (ROWS, HEAD_DIM), (0, 0))
        keys = self.tile_at(env, SCHEDULE.smem_offset("k"))
        a = slice_.make_fragment_A(slice_.partition_A(queries))
        b = slice_.make_fragment_B(slice_.partition_B(keys))
        steps = [(a[(None, None, k)], b[(None, None, k)]) for k in range(HEAD_DIM // MMA_K)]
        self.issue(mma, steps, s)

    def issue_pv(self, env: Env, place: Place, most: Int32, operands: tuple) -> None:
        """Start O = P V, V MN-major as it lies; from the tile's last key on the tail instead."""
        p, o = operands
        mma = self.mmas()[1]
        slice_ = mma.get_slice(0)
        tail = SCHEDULE.smem_offset("q") + place.offset
        steps = []
        for k in range(BLOCK // MMA_K):
            whole = Int32(most >= (k + 1) * MMA_K)
            start = SCHEDULE.smem_offset("v") + k * MMA_K * SWIZZLE_BYTES
            values = self.tile_at(env, tail + whole * (start - tail))
            values = cute.make_tensor(values.iterator, cute.select(values.layout, mode=[1, 0]))
            b = slice_.make_fragment_B(slice_.partition_B(values))
            steps.append((p[(None, None, k)], b[(None, None, 0)]))
        self.issue(mma, steps, o)

    def issue(self, mma: Any, steps: list, d: Any) -> None:
        """Start D = sum of A B^T over the steps, as one group."""
        warpgroup.fence()
        for number, (a, b) in enumerate(steps):
            mma.set(warpgroup.Field.ACCUMULATE, number > 0)
            cute.gemm(mma, d, a, b, d)
        warpgroup.commit_group()

    def first_row(self) -> Int32:
        """Return the first of this thread's two rows of the tile; the other is 8 below."""
        return (cute.arch.warp_idx() & 3) * 16 + (cute.arch.lane_idx() >> 2)

    def read_rows(self, env: Env, tile: Int32) -> tuple[Rows, Int32]:
        """Return what is known of this thread's rows, and the most that one of the tile sees."""
        self.wait_meta(env, tile)
        address = env.smem + self.meta_slot(tile)[0] * ROWS
        offset = SCHEDULE.smem_offset("meta")
        words = []
        for r in range(2):
            here = address + (self.first_row() + 8 * r) // self.group * 8
            words += [ptx.smem_load(here, offset + word, Int32) for word in (0, 4)]
        most = self.read_most_seen(env, tile)
        self.release_meta(env, tile)
        return Rows(*words), most

    @cute.jit
    def softmax(self, env: Env, item: Item, rows: Rows, s: Any) -> tuple[Float32, Float32]:
        """Turn S into P in place and write the LSEs; return the factors of O."""
        seen = (rows.place0 & SEEN, rows.place1 & SEEN)
        if cute.arch.vote_any_sync(cutlass.min(*seen) < BLOCK):
            first = (cute.arch.lane_idx() & 3) * 2
            for i in range_constexpr(cute.size(s)):
                s[i] = ptx.mask_from(s[i], i // 4 * 8 + i % 2, seen[i % 4 // 2] - first)
        factors = []
        for r in range_constexpr(2):
            best = softmax.row_max2([s[i] for i in columns(r)])
            best = over_quad(cute.arch.fmax, best)
            lse_t = Float32(0.0)
            if const_expr(self.config.temperature):
                lse_t, _ = self.exponentials(s, env.tables.scale_t_log2, best, r, keep=False)
            lse, total = self.exponentials(s, env.tables.scale_log2, best, r, keep=True)
            factors.append(reciprocal(total))
            row = self.first_row() + 8 * r
            self.store_lse(env, item, row, (rows[2 * r], rows[2 * r + 1]), (lse, lse_t))
        return factors[0], factors[1]

    def exponentials(
        self, s: Any, scale: Float32, best: Float32, r: int, *, keep: bool
    ) -> tuple[Float32, Float32]:
        """Return a row's LSE of scale * s and its sum of exponentials; keep these in place of s."""
        m_log2 = cute.arch.fmax(best * scale, softmax.FLOOR)
        sums = [Float32(0.0), Float32(0.0)]
        for i in columns(r):
            value = ptx.exp2(s[i] * scale - m_log2)
            sums[i % 2] = sums[i % 2] + value
            if keep:
                s[i] = value
        total = over_quad(operator.add, sums[0] + sums[1])
        return (m_log2 + ptx.log2(total)) * math.log(2.0), total

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
    def copy_tail(self, env: Env, place: Place, most: Int32) -> None:
        """Copy 16 rows of V over Q, two chunks of 16 bytes for each thread of the warpgroup."""
        self.meet()  # the other warps' MMAs have read Q
        thread = cute.arch.thread_idx()[0] & 127
        first = tail_start(most)
        kept = 0 - Int32(first + thread // 8 < most)
        source = env.smem + first * SWIZZLE_BYTES + thread * 16
        target = env.smem + place.offset + thread * 16
        for half in range_constexpr(2):
            rows = ptx.smem_load_v4(source, SCHEDULE.smem_offset("v") + half * HALF_BYTES)
            words = [word & kept for word in rows]
            ptx.smem_store_v4(target, SCHEDULE.smem_offset("q") + half * HALF_BYTES, words)
        cute.arch.fence_view_async_shared()
        self.meet()

    @cute.jit
    def finish(self, env: Env, place: Place, o: Any, factors: tuple[Float32, Float32]) -> None:
        """O divided by the sum, rounded, to Q's place."""
        lane = cute.arch.lane_idx()
        row = (cute.arch.warp_idx() & 3) * 16 + (lane & 15)
        address = env.smem + place.offset + row * SWIZZLE_BYTES
        for n in range_constexpr(0, HEAD_DIM // 8, 2):
            words = []
            for i in range_constexpr(4 * n, 4 * n + 8, 2):
                factor = factors[i % 4 // 2]
                words.append(ptx.pack(o[i] * factor, o[i + 1] * factor, self.dtype))
            half, unit = divmod(n, 8)
            chunk = ((lane >> 4) + unit) ^ (lane & 7)
            offset = SCHEDULE.smem_offset("q") + half * HALF_BYTES
            ptx.smem_store_matrices(address + (chunk << 4), offset, words)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(env, "out_full", 0, place.stage)

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
        here = self.place_of(tile)
        self.wait(env, "out_full", 0, self.phase_of(tile), here.stage)
        address = ptx.opaque(env.smem + here.offset) + SCHEDULE.smem_offset("q")
        for part in range_constexpr(self.parts):
            for j in cutlass.range(self.in_window, unroll=self.unroll):
                token, place = (cute.arch.shuffle_sync(x, j) for x in places[part])
                rows = address + (part * WINDOW + j) * self.group * SWIZZLE_BYTES
                self.store_token(env, rows, (kv_head, 0, token, place >> 8))
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.arrive(env, "q_empty", 0, here.stage)


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
