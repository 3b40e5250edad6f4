"""Block-sparse attention forward with 128 x 128 tiles for Hopper: VSA, one list for a Q block.

    O_i = softmax(scale * Q_i [K_j for j in list_i]^T) [V_j for j in list_i]

Contract. That of `vsa_sm100`: q, k, v and the output are bf16 or fp16, D = 128, of any strides; LSE
is float32 [B, Hq, Sq], natural log. Ids outside 0..Nkv-1 and blocks without a valid key are
dropped, counts are clamped to 0..K, sizes to the rest of the tensor. An empty row is 0 with LSE
-inf, and so is a padding query. A key that no list names, and the part of a block past its size, is
never loaded: its bits cannot reach an output.

Grid. A work item is a Q block of one head. A CTA starts with the item of its own number and draws
the next ones from a counter in global memory; who draws the last number sets it back to 0. The
last items are taken longest list first, so that no CTA begins a long one when the others are done.

Protocol. The load warp alone decides what is dropped, and publishes a word for each round; the
consumers run from these words. A round is one KV block. Rounds of different items follow one
another without a gap: QK of the next item's first round precedes PV of the last one in work.

Registers. A warpgroup holds Q, S, P and O of its 64 rows, so that its MMAs read K and V alone from
shared memory. The output takes the place that Q was loaded to.

Masking. A partial block lies at the end of its tile: the rows before it have negative coordinates,
which TMA fills with 0. Their scores become -inf.

Scaling. Scores live in the log2 domain. The reference maximum m follows the running one only when
that has grown by more than `rescale_threshold`; until then P may reach 2^threshold and O stays as
it is.

Steady state, each warpgroup with 64 of the 128 queries (r: round):

    tensor core                consumer 0                 consumer 1
    QK0(r+1) PV0(r)            -                          softmax of S1(r), scale O1
    QK1(r+1) PV1(r)            softmax of S0(r+1)         -
    QK0(r+2) PV0(r+1)          -                          softmax of S1(r+1)

Limits. Forward, non-causal, D = 128, 128-token blocks.

Sources: VSA (arXiv 2505.13389); FlashAttention-3 (arXiv 2407.08608) for the two overlaps;
FlashAttention-4 (arXiv 2603.05451) for lazy rescaling; PTX ISA for wgmma, mbarrier and
cp.async.bulk.tensor.
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
from cutlass.cute.runtime import make_ptr

from sparse_atten.cute_kernels.common import (
    block_list,
    offline,
    persistent,
    ptx,
    softmax,
    tiles,
    work_queue,
)
from sparse_atten.cute_kernels.common.block_list import KEYS, Row, Tables
from sparse_atten.cute_kernels.common.fragments import columns, over_quad, pack, reciprocal
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.persistent import Env, Stream
from sparse_atten.cute_kernels.common.schedule import (
    Barrier,
    Region,
    Role,
    Schedule,
    once,
    warps,
)
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.common.tiles import HALF_BYTES, TILE_BYTES, Ring
from sparse_atten.cute_kernels.common.work_queue import Item, QueueKernel
from sparse_atten.cute_kernels.vsa_arguments import BLOCK, HEAD_DIM, Arguments
from sparse_atten.cute_kernels.vsa_host import host_values, make_maps

TILE = BLOCK  # rows and columns of a tile of scores
ROWS = 64  # of a warpgroup
MMA_K = 16
KV_SLOTS = 5
Q_SLOTS = 2
END = 1 << 9  # round word after the last item

CONSUMERS = ("consumer0", "consumer1")
SCHEDULE = Schedule(
    roles=(
        Role("consumer0", 0, 4, 232),
        Role("consumer1", 4, 4, 232),
        Role("load", 8, 1, 40),
        Role("store", 9, 1, 40),
        Role("order", 10, 2, 40),
    ),
    barriers=(
        persistent.round_barrier(CONSUMERS),
        Barrier("q_full", Q_SLOTS, once("load"), CONSUMERS, "Q has landed", TILE_BYTES),
        Barrier("q_empty", Q_SLOTS, once("store"), ("load",), "the output has left Q's place"),
        Barrier("kv_full", KV_SLOTS, once("load"), CONSUMERS, "K or V has landed", TILE_BYTES),
        Barrier("kv_empty", KV_SLOTS, warps(*CONSUMERS), ("load",), "the slot's MMAs are done"),
        work_queue.order_barrier(),
        Barrier("out_full", Q_SLOTS, warps(*CONSUMERS), ("store",), "the output is in Q's place"),
    ),
    tmem=(),
    smem=(
        Region("q", Q_SLOTS * TILE_BYTES),
        Region("kv", KV_SLOTS * TILE_BYTES),
        Region("rounds", 2 * persistent.ROUND_SLOTS * 8),
        Region("items", Q_SLOTS * 16),
        Region("keys", work_queue.LAST_ITEMS * 4),
        Region("order", work_queue.LAST_ITEMS * 4),
    ),
)
DTYPES = {"bf16": BFloat16, "fp16": Float16}
Q_BLOCKS = 1  # of a work item
WIDE: dict[str, Any] = {}  # fields of a Config for more heads or batches than a grid has


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
    rescale_threshold : float
        Powers of two that a row maximum may grow before O is rescaled.
    """

    dtype: str = "bf16"
    return_lse: bool = False
    kv_sizes: bool = False
    q_sizes: bool = False
    rescale_threshold: float = 8.0

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {self.dtype!r}")
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"rescale_threshold must be in 0..8, got {self.rescale_threshold}")


ARCHITECTURES = ("sm_90a",)
_CHOICES: Any = itertools.product(DTYPES, *[(False, True)] * 3)
SHIPPED = tuple(Config(*choice) for choice in _CHOICES)  # what a call can ask for


class Pair(NamedTuple):
    """The running maximum (log2 domain) and this thread's share of the sum, of its two rows."""

    m0: Float32
    m1: Float32
    l0: Float32
    l1: Float32

    @classmethod
    def start(cls) -> Pair:
        """Return the state before a row's first key."""
        floor, zero = Float32(softmax.FLOOR), Float32(0.0)
        return cls(floor, floor, zero, zero)


class Fragments(NamedTuple):
    """A warpgroup's operands in registers: tensors whose elements are values of the DSL."""

    q: Any
    s: Any  # scores, then P before it is rounded
    p: Any
    o: Any


class Pending(NamedTuple):
    """A round whose K is loaded and whose V is not."""

    word: Int32  # 0: none
    block: Int32
    kv_head: Int32
    batch: Int32


class VsaForwardSm90(QueueKernel):
    """The kernel: one method for each role, in the order of the data flow."""

    def __init__(self, config: Config) -> None:
        super().__init__(SCHEDULE, (config.kv_sizes, config.q_sizes))
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(  # noqa: PLR0917
        self,
        operands: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
        tables: Tables,
        operand_strides: tuple,
        queue: cute.Pointer,
        grid: tuple[Int32, Int32, Int32],
        stream: Any,
    ) -> None:
        """Make the TMA descriptors and launch."""
        maps = make_maps(operands, operand_strides, tables, tiles.tile_layout(self.dtype))
        self.kernel(maps, tables, queue).launch(
            grid=grid,
            block=[SCHEDULE.threads, 1, 1],
            smem=SCHEDULE.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, maps: tuple, tables: Tables, queue: cute.Pointer) -> None:
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
                self.load(env, queue)
            elif warp == SCHEDULE.role("store").first:
                self.store(env)
            else:
                self.order(env)

    # ---- load ----------------------------------------------------------------------------------

    @cute.jit
    def load(self, env: Env, queue: cute.Pointer) -> None:
        """Walk the lists, decide what is kept, publish each round, load Q, K and V."""
        ring = Ring(Int32(0), Int32(1))
        stream = Stream.start()
        zero = Int32(0)
        pending = Pending(zero, zero, zero, zero)
        item = self.item_of(env.tables, cute.arch.block_idx()[0], zero)
        while item.valid != 0:
            drawn = self.draw(env.tables, queue)
            row = block_list.open_row(env.tables, item, item.q_block, self.has_sizes)
            if row.pending == 0:
                stream = self.publish_word(env, 0, stream, Int32(0))
                self.open_item(env, item, Int32(0))
                ring = self.load_pending(env, pending, ring)
                pending = Pending(zero, zero, zero, zero)
            else:
                row, word = block_list.take_block(env.tables, row, self.has_sizes)
                stream = self.publish_word(env, 0, stream, word)
                self.open_item(env, item, word)
                ring, pending = self.load_round(env, word, row, pending, ring)
                while row.pending != 0:
                    row, word = block_list.take_block(env.tables, row, self.has_sizes)
                    stream = self.publish_word(env, 0, stream, word)
                    ring, pending = self.load_round(env, word, row, pending, ring)
            number = self.reorder(env, cute.arch.shuffle_sync(drawn, 0))
            item = self.item_of(env.tables, number, item.order + 1)
        stream = self.publish_word(env, 0, stream, Int32(END))
        self.open_item(env, item, Int32(0))
        self.load_pending(env, pending, ring)

    @cute.jit
    def open_item(self, env: Env, item: Item, word: Int32) -> None:
        """Wait for the place of Q and the output, name the item that takes it, load its Q.

        Without a first round there is no Q to load.
        """
        slot = item.order & (Q_SLOTS - 1)
        full = self.barrier(env, "q_full", 0, slot * 8)
        self.wait(env, "q_empty", 0, ((item.order >> 1) & 1) ^ 1, slot * 8)
        with cute.arch.elect_one():
            words = [item.q_block, item.head, item.batch, item.valid]
            ptx.smem_store_v4(env.smem + slot * 16, SCHEDULE.smem_offset("items"), words)
        if word == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_BYTES)
            tensor = env.maps[0][1][(None, None, item.head, item.batch)]
            source = cute.local_tile(tensor, (TILE, HEAD_DIM), (item.q_block, 0))
            target = self.tile_at(env, "q", slot * TILE_BYTES)
            tiles.load_tile(env.maps[0][0], source, target, full)

    @cute.jit
    def load_round(
        self, env: Env, word: Int32, row: Row, pending: Pending, ring: Ring
    ) -> tuple[Ring, Pending]:
        """Load K of a round, then V of the one before it."""
        taken = Pending(word, row.current, row.kv_head, row.batch)
        ring = self.load_kv(env, 1, taken, ring)
        ring = self.load_pending(env, pending, ring)
        return ring, taken

    @cute.jit
    def load_pending(self, env: Env, pending: Pending, ring: Ring) -> Ring:
        """Load V of the round whose K came last, if there is one."""
        if pending.word != 0:
            ring = self.load_kv(env, 2, pending, ring)
        return ring

    def load_kv(self, env: Env, operand: int, taken: Pending, ring: Ring) -> Ring:
        """Load K (operand 1) or V (operand 2) of a round, its valid rows at the end."""
        self.wait(env, "kv_empty", 0, ring.phase, ring.slot)
        full = self.barrier(env, "kv_full", 0, ring.slot)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_BYTES)
        origin = ((taken.word & KEYS) - TILE, 0, taken.block, taken.kv_head, taken.batch)
        source = cute.domain_offset(origin, env.maps[operand][1])[(None, None, 0, 0, 0)]
        target = self.tile_at(env, "kv", ring.tile_offset())
        tiles.load_tile(env.maps[operand][0], source, target, full)
        return tiles.advance(ring, KV_SLOTS)

    def tile_at(self, env: Env, region: str, offset: Int32 | int) -> cute.Tensor:
        """View the tile that starts `offset` bytes into a region of shared memory."""
        return tiles.tile_at(env.base, SCHEDULE.smem_offset(region) + offset, self.dtype)

    # ---- consumers -----------------------------------------------------------------------------

    @cute.jit
    def consume(self, env: Env, warp: Int32) -> None:
        """Compute 64 rows of each item: runs of rounds, and empty rows between them."""
        group = warp >> 2
        qk, pv = self.mmas()
        s = cute.make_rmem_tensor(qk.partition_shape_C((ROWS, TILE)), Float32)
        o = cute.make_rmem_tensor(pv.partition_shape_C((ROWS, HEAD_DIM)), Float32)
        p = cute.make_rmem_tensor(pv.partition_shape_A((ROWS, TILE)), self.dtype)
        q = cute.make_rmem_tensor(qk.partition_shape_A((ROWS, HEAD_DIM)), self.dtype)
        fragments = Fragments(q, s, p, o)
        o.fill(0.0)
        ring = Ring(Int32(0), Int32(0))
        if group == 1:
            self.pass_turn(0)
        stream = self.take(env, Stream.start())
        while stream.word != END:
            if stream.word == 0:
                self.await_query(env, stream)
                self.finish(env, group, fragments, stream, Pair.start())
                stream = self.take(env, stream._replace(rows=stream.rows + 1))
            else:
                stream, ring = self.run(env, group, fragments, stream, ring)
        self.await_query(env, stream)
        self.publish_out(env, stream)
        if group == 0:
            self.take_turn(0)

    def mmas(self) -> tuple:
        """Return the MMA of S = Q K^T and that of O += P V, P in registers, V as it lies."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        shape = (ROWS, TILE, MMA_K)
        source = warpgroup.OperandSource.RMEM
        qk = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, k_major, k_major)
        pv = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, k_major, mn_major)
        return cute.make_tiled_mma(qk), cute.make_tiled_mma(pv)

    @cute.jit
    def run(
        self, env: Env, group: Int32, fragments: Fragments, stream: Stream, ring: Ring
    ) -> tuple[Stream, Ring]:
        """Work off rounds until an empty row or the end of the work comes."""
        o = fragments.o
        self.read_query(env, group, fragments, stream)
        self.wait(env, "kv_full", 0, ring.phase, ring.slot)
        self.issue_qk(env, fragments, ring)
        warpgroup.wait_group(0)
        self.release(env, ring)
        ring = tiles.advance(ring, KV_SLOTS)
        pair, _, _ = self.maxima(env, fragments, stream.word, Pair.start())
        pair = self.exponentials(env, fragments, pair, 0)
        pair = self.exponentials(env, fragments, pair, 1)
        pack(fragments.s, fragments.p, self.dtype)
        following = self.follow(env, stream)
        while (following.word & KEYS) != 0:
            if stream.word < 0:
                self.read_query(env, group, fragments, following)
            v_ring = tiles.advance(ring, KV_SLOTS)
            self.wait(env, "kv_full", 0, ring.phase, ring.slot)
            self.take_turn(group)
            self.issue_qk(env, fragments, ring)
            self.wait(env, "kv_full", 0, v_ring.phase, v_ring.slot)
            self.issue_pv(env, fragments, v_ring)
            self.pass_turn(1 - group)
            warpgroup.wait_group(1)
            self.release(env, ring)
            done = pair
            if stream.word < 0:
                pair = Pair.start()
            pair, alpha0, alpha1 = self.maxima(env, fragments, following.word, pair)
            pair = self.exponentials(env, fragments, pair, 0)
            after = self.follow(env, following)
            warpgroup.wait_group(0)
            self.release(env, v_ring)
            pair = self.exponentials(env, fragments, pair, 1)
            ring = tiles.advance(v_ring, KV_SLOTS)
            pack(fragments.s, fragments.p, self.dtype)
            if stream.word < 0:
                self.finish(env, group, fragments, stream, done)
                o.fill(0.0)
            elif cute.arch.vote_any_sync((alpha0 != 1.0) | (alpha1 != 1.0)):
                self.rescale(o, alpha0, alpha1)
            stream, following = following, after
        self.wait(env, "kv_full", 0, ring.phase, ring.slot)
        self.issue_pv(env, fragments, ring)
        warpgroup.wait_group(0)
        self.release(env, ring)
        self.finish(env, group, fragments, stream, pair)
        o.fill(0.0)
        return following, tiles.advance(ring, KV_SLOTS)

    @cute.jit
    def take(self, env: Env, stream: Stream) -> Stream:
        """Wait for the next round word; the lane that later frees slots reads it for all."""
        place = self.await_word(env, 0, stream)
        word = Int32(0)
        if cute.arch.lane_idx() == 0:
            word = ptx.smem_load(*place, Int32)
        word = cute.arch.shuffle_sync(word, 0)
        return stream._replace(word=word, cursor=stream.cursor + 8)

    def follow(self, env: Env, stream: Stream) -> Stream:
        """Take the word after the one in work; `rows` counts the items before its own."""
        following = self.take(env, stream)
        rows = stream.rows + Int32(stream.word < 0)
        return Stream(following.word, following.cursor, following.rounds, rows)

    def await_query(self, env: Env, stream: Stream) -> None:
        """Wait for Q of the item of a round."""
        slot = stream.rows & (Q_SLOTS - 1)
        self.wait(env, "q_full", 0, (stream.rows >> 1) & 1, slot * 8)

    def read_query(self, env: Env, group: Int32, fragments: Fragments, stream: Stream) -> None:
        """Wait for Q of a round's item and read it to registers."""
        self.await_query(env, stream)
        words = cute.recast_tensor(fragments.q, Int32)
        for k in range(HEAD_DIM // MMA_K):
            address = self.matrix_address(env, group, stream, 2 * k)
            for i, word in enumerate(ptx.smem_load_matrices(*address)):
                words[4 * k + i] = word

    def take_turn(self, group: Int32 | int) -> None:
        """Wait until the other warpgroup has issued its MMAs."""
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=256)

    def pass_turn(self, group: Int32 | int) -> None:
        """Let a warpgroup issue its MMAs."""
        cute.arch.barrier_arrive(barrier_id=1 + group, number_of_threads=256)

    def release(self, env: Env, ring: Ring) -> None:
        """Give a slot of the ring back."""
        with cute.arch.elect_one():
            self.arrive(env, "kv_empty", 0, ring.slot)

    def issue_qk(self, env: Env, fragments: Fragments, ring: Ring) -> None:
        """Start S = Q K^T, K K-major as it lies."""
        qk, _ = self.mmas()
        k_tile = self.tile_at(env, "kv", ring.tile_offset())
        self.issue(qk, fragments.q, k_tile, fragments.s, accumulate=False)

    def issue_pv(self, env: Env, fragments: Fragments, ring: Ring) -> None:
        """Start O += P V, V MN-major as it lies."""
        _, pv = self.mmas()
        v_tile = self.tile_at(env, "kv", ring.tile_offset())
        v_tile = cute.make_tensor(v_tile.iterator, cute.select(v_tile.layout, mode=[1, 0]))
        self.issue(pv, fragments.p, v_tile, fragments.o, accumulate=True)

    def issue(self, mma: Any, a: Any, b_tile: Any, d: Any, *, accumulate: bool) -> None:
        """Start D (+)= A B^T, A in registers, as one group."""
        slice_ = mma.get_slice(0)
        b = slice_.make_fragment_B(slice_.partition_B(b_tile))
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        for k in range(TILE // MMA_K):
            cute.gemm(mma, d, a[(None, None, k)], b[(None, None, k)], d)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def maxima(
        self, env: Env, fragments: Fragments, word: Int32, pair: Pair
    ) -> tuple[Pair, Float32, Float32]:
        """Mask S; return the state with new reference maxima, and the factors of O."""
        s = fragments.s
        if (word & TILE) == 0:
            lead = TILE - (word & KEYS) - (cute.arch.lane_idx() & 3) * 2
            for i in range_constexpr(cute.size(s)):
                s[i] = ptx.mask_below(s[i], i // 4 * 8 + i % 2, lead)
        m, alphas = [], []
        for r in range_constexpr(2):
            best = softmax.row_max2([s[i] for i in columns(r)])
            best = over_quad(cute.arch.fmax, best)
            new_m, alpha = self.grow(pair[r], best * env.tables.scale_log2)
            alphas.append(alpha)
            m.append(new_m)
        grown = Pair(m[0], m[1], pair.l0 * alphas[0], pair.l1 * alphas[1])
        return grown, alphas[0], alphas[1]

    def exponentials(self, env: Env, fragments: Fragments, pair: Pair, r: int) -> Pair:
        """Turn a row of S into P in place, and add to its sum."""
        s = fragments.s
        total = [pair[2 + r], Float32(0.0)]
        for i in columns(r):
            x = s[i] * env.tables.scale_log2 - pair[r]
            value = ptx.exp2(x)
            s[i] = value
            total[i % 2] = total[i % 2] + value
        return pair._replace(**{f"l{r}": total[0] + total[1]})

    @cute.jit
    def grow(self, m: Float32, best: Float32) -> tuple[Float32, Float32]:
        """Return the reference maximum after a round, and the factor of what came before."""
        new_m = cute.arch.fmax(m, best)
        alpha = ptx.exp2(m - new_m)
        if m - new_m >= -self.config.rescale_threshold:
            alpha = Float32(1.0)
            new_m = m
        return new_m, alpha

    def rescale(self, o: cute.Tensor, alpha0: Float32, alpha1: Float32) -> None:
        """Multiply the two rows of O by their factors."""
        for i in range(cute.size(o)):
            o[i] = o[i] * (alpha1 if i % 4 >= 2 else alpha0)

    @cute.jit
    def finish(
        self, env: Env, group: Int32, fragments: Fragments, stream: Stream, pair: Pair
    ) -> None:
        """O / l, rounded, into Q's place; padding rows become 0; the LSE to global memory."""
        o = fragments.o
        item = self.item_at(env, stream.rows)
        first = self.first_row(group)
        totals, factors, keeps = [], [], []
        for r in range_constexpr(2):
            total = over_quad(operator.add, pair[2 + r])
            totals.append(total)
            factors.append(reciprocal(total))
            kept = Int32(1)
            if const_expr(self.config.q_sizes):
                kept = Int32(first + 8 * r < block_list.q_size(env.tables, item.q_block))
            keeps.append(0 - kept)
        for n in range_constexpr(0, HEAD_DIM // 8, 2):
            words = []
            for i in range_constexpr(4 * n, 4 * n + 8, 2):
                r = i % 4 // 2
                word = ptx.pack(o[i] * factors[r], o[i + 1] * factors[r], self.dtype)
                if const_expr(self.config.q_sizes):
                    word = word & keeps[r]
                words.append(word)
            ptx.smem_store_matrices(*self.matrix_address(env, group, stream, n), words)
        self.publish_out(env, stream)
        if const_expr(self.config.return_lse):
            for r in range_constexpr(2):
                self.store_lse(env, item, first + 8 * r, pair[r], totals[r])

    def first_row(self, group: Int32) -> Int32:
        """Return the first of this thread's two rows of the tile; the other is 8 below."""
        warp = cute.arch.warp_idx() & 3
        return group * ROWS + warp * 16 + (cute.arch.lane_idx() >> 2)

    def matrix_address(self, env: Env, group: Int32, stream: Stream, n: int) -> tuple[Int32, int]:
        """Return where this lane's row of four 8 x 8 matrices lies, under the 128-byte swizzle."""
        lane = cute.arch.lane_idx()
        row = group * ROWS + (cute.arch.warp_idx() & 3) * 16 + (lane & 15)
        half, unit = divmod(n, 8)
        chunk = ((lane >> 4) + unit) ^ (lane & 7)
        slot = (stream.rows & (Q_SLOTS - 1)) * TILE_BYTES
        offset = SCHEDULE.smem_offset("q") + half * HALF_BYTES
        return env.smem + slot + row * 128 + (chunk << 4), offset

    def publish_out(self, env: Env, stream: Stream) -> None:
        """Make the output visible to TMA and signal it."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        slot = (stream.rows & (Q_SLOTS - 1)) * 8
        with cute.arch.elect_one():
            self.arrive(env, "out_full", 0, slot)

    @cute.jit
    def store_lse(self, env: Env, item: Item, row: Int32, m_log2: Float32, total: Float32) -> None:
        """Write a row's LSE, -inf where no key was seen or the row is padding; one lane of 4."""
        tables = env.tables
        query = item.q_block * TILE + row
        if (query < tables.num_queries) & (cute.arch.lane_idx() & 3 == 0):
            lse = (m_log2 + ptx.log2(total)) * math.log(2.0)
            seen = total != 0.0
            if const_expr(self.config.q_sizes):
                seen = seen & (row < block_list.q_size(tables, item.q_block))
            if not seen:
                lse = -Float32.inf
            head = Int64(item.batch) * tables.num_q_heads + item.head
            cute.arch.store(tables.lse + (head * tables.num_queries + query), lse)

    def item_at(self, env: Env, rows: Int32) -> Item:
        """Read which item the slot holds."""
        slot = rows & (Q_SLOTS - 1)
        words = ptx.smem_load_v4(env.smem + slot * 16, SCHEDULE.smem_offset("items"))
        return Item(words[0], words[1], words[2], words[3], rows)

    # ---- store ---------------------------------------------------------------------------------

    @cute.jit
    def store(self, env: Env) -> None:
        """Write finished tiles to global memory; rows past the last query are dropped by TMA."""
        rows = Int32(0)
        more = Int32(1)
        while more != 0:
            slot = rows & (Q_SLOTS - 1)
            self.wait(env, "out_full", 0, (rows >> 1) & 1, slot * 8)
            item = self.item_at(env, rows)
            more = item.valid
            if more != 0:
                tensor = env.maps[3][1][(None, None, item.head, item.batch)]
                target = cute.local_tile(tensor, (TILE, HEAD_DIM), (item.q_block, 0))
                source = self.tile_at(env, "q", slot * TILE_BYTES)
                source, target = tiles.boxes(env.maps[3][0], source, target)
                with cute.arch.elect_one():
                    cute.copy(env.maps[3][0], source, target)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self.arrive(env, "q_empty", 0, slot * 8)
            rows += 1


def compile_kernel(config: Config, options: str = "") -> Any:
    """Compile for the architecture that CuTe-DSL was imported for."""
    *values, grid, stream = host_values(DTYPES[config.dtype])
    queue = make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=4)
    return cute.compile(VsaForwardSm90(config), *values, queue, grid, stream, options=options)


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
    items = arguments.num_q_blocks * arguments.num_q_heads * arguments.batch
    return LaunchPlan(
        grid=(min(items, target.num_sms), 1, 1),
        block=(SCHEDULE.threads, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=SCHEDULE.smem_bytes,
        parameters=(*arguments.kernel_parameters(config.dtype), arguments.queue_address),
    )
