"""K2 of MSA: merge the partial results of each query, for Hopper and Blackwell. Exact.

    w_s = exp(lse_s - max lse)        out = sum w_s out_s / sum w_s        lse = log sum exp(lse_s)

Contract. o_partial [K, Tq, Hq, 128] bf16, fp16 or fp32; lse_partial fp32 [K, Tq, Hq], natural log;
split_counts int32 [Tq, Hkv] says how many leading slots of a query and KV head are filled, and is
clamped to 0..K; out [Tq, Hq, 128] bf16, fp16 or fp32; lse fp32 [Tq, Hq]. Strides of all are
arbitrary but for the contiguous last dim; offsets are 64-bit. The other slots are not read. A
partial with LSE -inf weighs nothing, even if its output is NaN. Without any weight the output is 0
and the LSE -inf. A temperature LSE is merged likewise, by itself.

Threads. A row (token, head) belongs to 16 lanes (32 for fp32): each loads 16 bytes of every slot.
Lane s also loads the LSE of slot s, and shuffles hand it to the others, which all compute the same
weights. Slots come in windows, whose loads are all issued before the first use; a running maximum
joins the windows, so that every byte is read once, whatever K. CTAs stride over the rows, and the
count of the next row is on its way while one is merged. No shared memory, no barrier.

Steady state of a warp:

    load unit                     arithmetic
    count of row r+1              -
    LSEs, outputs of row r        -
    -                             weights, sum of row r
    store of row r                -

Bound. Memory: K * (256 + 4) bytes in and 260 out for each row of 16-bit partials.

State: compiled, emulated, run on an H200 (compute-sanitizer clean); never on Blackwell.

Limits. D = 128. With `programmatic` it may start before the kernel ahead of it on the stream has
ended, and waits for that one's memory (griddepcontrol.wait).

Sources: MSA (arXiv 2606.13392), section 4; the online softmax of arXiv 1805.02867; PTX ISA for ld,
shfl and griddepcontrol.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_ptr

from sparse_atten.cute_kernels.common import offline, ptx
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.schedule import WARP
from sparse_atten.cute_kernels.common.softmax import FLOOR, packed
from sparse_atten.cute_kernels.common.target import Target
from sparse_atten.cute_kernels.msa_k2_arguments import HEAD_DIM, NO_ARGUMENTS, Arguments

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
VECTOR_BYTES = 16  # what a lane loads of each slot
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """What is fixed when the kernel is compiled; with a `Target` it is the cache key.

    Parameters
    ----------
    partial, out : {"bf16", "fp16", "fp32"}
        Element types of the partials and of the output.
    temperature : bool
        Also merge the temperature LSE.
    programmatic : bool
        Launched as a programmatic dependent of the kernel that writes the partials.
    window : int
        Slots whose loads are in flight together, at most the lanes of a row.
    threads : int
        Of a CTA.
    ctas_per_sm : int
        CTAs of the grid for each multiprocessor; each strides over the rows.
    """

    partial: str = "bf16"
    out: str = "bf16"
    temperature: bool = False
    programmatic: bool = False
    window: int = 16
    threads: int = 128
    ctas_per_sm: int = 16

    @property
    def elements(self) -> int:
        """Elements of a row in one lane."""
        return VECTOR_BYTES * 8 // DTYPES[self.partial].width

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        return HEAD_DIM // self.elements

    @property
    def rows(self) -> int:
        """Rows that a CTA merges at a time."""
        return self.threads // self.lanes

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        for name in ("partial", "out"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(
                    f"{name} must be one of {tuple(DTYPES)}, got {getattr(self, name)!r}"
                )
        if not 1 <= self.window <= self.lanes:
            raise ValueError(f"window must be in 1..{self.lanes}, got {self.window}")
        if self.threads % WARP or not WARP <= self.threads <= 1024:
            raise ValueError(f"threads must be whole warps, at most 1024, got {self.threads}")
        if self.ctas_per_sm < 1:
            raise ValueError(f"ctas_per_sm must be at least 1, got {self.ctas_per_sm}")

    def grid(self, num_rows: int, num_sms: int) -> tuple[int, int, int]:
        """Return as many CTAs as there is work for, within `ctas_per_sm`."""
        return (max(1, min(-(-num_rows // self.rows), num_sms * self.ctas_per_sm)), 1, 1)


def config_for(width: int, **fields: Any) -> Config:
    """Return a Config whose window suits K slots: no load and no weight for more than there are."""
    window = min(16, max(4, 1 << (width - 1).bit_length()))
    return Config(window=window, **fields)


class Parameters(NamedTuple):
    """The kernel's arguments. Strides are in elements; an absent tensor is never touched."""

    o_partial: cute.Pointer  # [K, Tq, Hq, D]
    lse_partial: cute.Pointer  # float32 [K, Tq, Hq]
    lse_t_partial: cute.Pointer
    counts: cute.Pointer  # int32 [Tq, Hkv]
    out: cute.Pointer  # [Tq, Hq, D]
    lse: cute.Pointer  # float32 [Tq, Hq]
    lse_t: cute.Pointer
    o_partial_strides: tuple[Int64, Int64, Int64]
    lse_partial_strides: tuple[Int64, Int64, Int64]
    lse_t_partial_strides: tuple[Int64, Int64, Int64]
    counts_strides: tuple[Int64, Int64]
    out_strides: tuple[Int64, Int64]
    lse_strides: tuple[Int64, Int64]
    lse_t_strides: tuple[Int64, Int64]
    num_rows: Int32
    num_heads: Int32
    group_size: Int32
    width: Int32  # K


class Sum(NamedTuple):
    """A running log-sum-exp: the sum of exp(lse - peak)."""

    peak: Float32
    total: Float32


class MergePartials:
    """The kernel."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.partial, self.out = DTYPES[config.partial], DTYPES[config.out]

    @cute.jit
    def __call__(
        self, parameters: Parameters, grid: tuple[Int32, Int32, Int32], stream: Any
    ) -> None:
        """Launch."""
        self.kernel(parameters).launch(
            grid=grid,
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=self.config.programmatic,
        )

    @cute.kernel
    def kernel(self, p: Parameters) -> None:
        """Stride over the rows, a few for each CTA at a time."""
        config = self.config
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        if const_expr(config.programmatic):
            cute.arch.griddepcontrol_wait()
        row = cute.arch.block_idx()[0] * config.rows + thread // config.lanes
        step = cute.arch.grid_dim()[0] * config.rows
        step_tokens, step_heads = step // p.num_heads, step % p.num_heads
        token, head = row // p.num_heads, row % p.num_heads
        count = self.count_of(p, row, token, head)
        # The lanes of a warp stay together: it is done when its first row is past the end.
        while row - lane // config.lanes < p.num_rows:
            place = (row, token, head)
            row += step
            token, head = token + step_tokens, head + step_heads
            if head >= p.num_heads:
                token, head = token + 1, head - p.num_heads
            next_count = self.count_of(p, row, token, head)
            self.merge_row(p, place, count)
            count = next_count

    @cute.jit
    def count_of(self, p: Parameters, row: Int32, token: Int32, head: Int32) -> Int32:
        """Return how many slots of a row are filled, 0 past the last row."""
        count = Int32(0)
        if row < p.num_rows:
            offset = _offset(p.counts_strides, (token, head // p.group_size))
            count = cutlass.min(cute.arch.load(p.counts + offset, Int32), p.width)
        return count

    @cute.jit
    def merge_row(self, p: Parameters, place: tuple, count: Int32) -> None:
        """Merge the slots of one row, and write it."""
        lanes, window = self.config.lanes, self.config.window
        lane = cute.arch.lane_idx() % lanes
        row, token, head = place
        most = count
        if const_expr(lanes < WARP):
            most = cutlass.max(count, cute.arch.shuffle_sync_bfly(count, lanes))
        plain = warm = Sum(Float32(FLOOR), Float32(0.0))
        values = tuple([Float32(0.0)] * self.config.elements)
        start = Int32(0)
        while start < most:
            own = (start + lane, token, head)
            kept = (lane < window) & (start + lane < count)
            lse = _load_float(p.lse_partial, p.lse_partial_strides, own, kept)
            if const_expr(self.config.temperature):
                lse_t = _load_float(p.lse_t_partial, p.lse_t_partial_strides, own, kept)
            words = self.load_window(p, (start, token, head), count)
            cute.arch.sync_warp()  # no load is moved past it, to where it is used
            if const_expr(self.config.temperature):
                warm, _, _ = _weigh(warm, self.share(lse_t))
            lses = self.share(lse)
            plain, fade, weights = _weigh(plain, lses)
            values = self.add(values, fade, weights, lses, words)
            start += window
        if row < p.num_rows:
            self.store_row(p, (token, head), plain, values)
            if const_expr(self.config.temperature):
                self.store_lse(p.lse_t, p.lse_t_strides, (token, head), warm)

    def load_window(self, p: Parameters, place: tuple, count: Int32) -> list[tuple]:
        """Load this lane's 16 bytes of the outputs of a window, zeros past the last slot."""
        lane = cute.arch.lane_idx() % self.config.lanes
        address = (p.o_partial + _offset(p.o_partial_strides, place)).toint()
        address += Int64(lane) * VECTOR_BYTES
        step = p.o_partial_strides[0] * (self.partial.width // 8)
        words = []
        for slot in range(self.config.window):
            words.append(ptx.gmem_load_v4_if(address, place[0] + slot < count))
            address += step
        return words

    def share(self, own: Float32) -> list[Float32]:
        """Return the values that the first `window` lanes of the row hold."""
        first = cute.arch.lane_idx() & (WARP - self.config.lanes)
        return [cute.arch.shuffle_sync(own, first + slot) for slot in range(self.config.window)]

    def add(self, values: tuple, fade: Float32, weights: list, lses: list, words: list) -> tuple:
        """Add the outputs of a window by their weights to `values`, which fade."""
        sums = [value * fade for value in values]
        for weight, lse, vector in zip(weights, lses, words, strict=True):
            mask = Int32(0) - Int32(lse != -Float32.inf)  # what weighs nothing may be NaN
            parts = [part for word in vector for part in ptx.unpack(word & mask, self.partial)]
            sums = [s + weight * part for s, part in zip(sums, parts, strict=True)]
        return tuple(sums)

    @cute.jit
    def store_row(self, p: Parameters, place: tuple, merged: Sum, values: tuple) -> None:
        """Write a row of the output, and its LSE."""
        factor = Float32(0.0)
        if merged.total != 0.0:
            factor = cute.arch.rcp_approx(merged.total)
        scaled = [value * factor for value in values]
        lane = cute.arch.lane_idx() % self.config.lanes
        words = scaled if self.out is Float32 else packed(scaled, self.out)
        offset = _offset(p.out_strides, place) + lane * self.config.elements
        ptx.gmem_store((p.out + offset).toint(), words)
        self.store_lse(p.lse, p.lse_strides, place, merged)

    @cute.jit
    def store_lse(self, lse: cute.Pointer, strides: tuple, place: tuple, merged: Sum) -> None:
        """Write a log-sum-exp, -inf where nothing was summed. One lane of a row."""
        if cute.arch.lane_idx() % self.config.lanes == 0:
            value = merged.peak + ptx.log2(merged.total) * math.log(2.0)
            if merged.total == 0.0:
                value = -Float32.inf
            cute.arch.store(lse + _offset(strides, place), value)


def _offset(strides: tuple, place: tuple) -> Int64:
    """Return where an element lies, in elements."""
    terms = [Int64(index) * stride for index, stride in zip(place, strides, strict=True)]
    return sum(terms[1:], terms[0])


def _load_float(pointer: cute.Pointer, strides: tuple, place: tuple, kept: Any) -> Float32:
    """Load an LSE, -inf where it is not kept."""
    return ptx.gmem_load_float_if((pointer + _offset(strides, place)).toint(), kept)


def _weigh(merged: Sum, lses: list) -> tuple[Sum, Float32, list]:
    """Take LSEs into a sum; return it, the factor of what was summed before, and the weights."""
    peak = merged.peak
    for lse in lses:
        peak = cute.arch.fmax(peak, lse)
    fade = ptx.exp2((merged.peak - peak) * LOG2_E)
    weights = [ptx.exp2((lse - peak) * LOG2_E) for lse in lses]
    total = merged.total * fade
    for weight in weights:
        total += weight
    return Sum(peak, total), fade, weights


def compile_kernel(config: Config, options: str = "") -> Any:
    """Compile for the architecture that CuTe-DSL was imported for."""
    types = (DTYPES[config.partial], Float32, Float32, Int32, DTYPES[config.out], Float32, Float32)
    parameters = Parameters._make(
        [
            *(make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=4) for kind in types),
            *(tuple(Int64(x) for x in view.strides) for view in NO_ARGUMENTS.views),
            *(Int32(x) for x in NO_ARGUMENTS.sizes),
        ]
    )
    values = (parameters, (Int32(1),) * 3, cuda.CUstream(0))
    return cute.compile(MergePartials(config), *values, options=options)


def compile_offline(config: Config, target: Target) -> offline.Compiled:
    """Compile without a GPU, in a process of its own, and keep the text.

    Raises
    ------
    ValueError
        A field of `config` is out of range.
    """
    config.check()
    return offline.compile_offline(__name__, config, target)


def launch_plan(config: Config, target: Target, arguments: Arguments) -> LaunchPlan:
    """Describe a launch, parameter by parameter."""
    return LaunchPlan(
        grid=config.grid(arguments.num_rows, target.num_sms),
        block=(config.threads, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=0,
        parameters=arguments.kernel_parameters(),
        programmatic=config.programmatic,
    )


ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
SHIPPED = tuple(  # what a call can ask for
    config_for(width, partial=dtype, out=dtype, temperature=temperature, programmatic=True)
    for dtype in ("bf16", "fp16")
    for temperature in (False, True)
    for width in (4, 8, 16)
)
