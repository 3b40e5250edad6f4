"""CUDA C++ through NVRTC, bit for bit: atomics, scans, matches, divergence, clusters, floats.

The same kernels run on the GPU where there is one, on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import emulator
import numpy as np
import pytest
import torch

from sparse_atten.cute_kernels.common.nvrtc import Program

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")
SOURCE = r"""
extern "C" __global__ void histogram(const int* x, int n, int* out) {
    __shared__ int bins[64];
    if (threadIdx.x < 64) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[x[i] & 63], 1);
    __syncthreads();
    if (threadIdx.x < 64) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}
extern "C" __global__ void scan(const int* x, int* out) {
    __shared__ int sums[4];
    int value = x[threadIdx.x];
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, value, step);
        if (threadIdx.x % 32 >= step) value += other;
    }
    if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < threadIdx.x / 32; ++warp) value += sums[warp];
    out[threadIdx.x] = value;
}
extern "C" __global__ void match(const int* x, int* out) {
    const unsigned peers = __match_any_sync(~0u, x[threadIdx.x]);
    out[threadIdx.x] = __popc(peers) * 100 + __ffs(peers);
}
extern "C" __global__ void collatz(const int* x, int* out) {
    long long v = x[threadIdx.x];
    int steps = 0;
    while (v != 1) {
        if (v & 1) v = 3 * v + 1;
        else v /= 2;
        ++steps;
    }
    const unsigned ballot = __ballot_sync(~0u, steps & 1);
    out[threadIdx.x] = steps + 1000 * __popc(ballot);
}
extern "C" __global__ void __cluster_dims__(4, 1, 1) neighbours(int* out) {
    __shared__ int mine[32];
    unsigned rank, address, value;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    mine[threadIdx.x] = rank * 100 + threadIdx.x;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    const unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(mine + threadIdx.x));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address) : "r"(local), "r"((rank + 1) % 4));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    out[blockIdx.x * 32 + threadIdx.x] = value;
}
extern "C" __global__ void sort_few(const int* x, int* out) {
    int values[8];
    for (int i = 0; i < 8; ++i) values[i] = 0;
    for (int i = 0; i < 16; ++i) values[x[threadIdx.x + i] & 7] += i;
    int sum = 0;
    for (int i = 0; i < 8; ++i) sum = sum * 3 + values[(i + threadIdx.x) & 7];
    out[threadIdx.x] = sum;
}
// ptxas may contract a - b * b where no rounding is named: the device did, the emulator does not.
extern "C" __global__ void arithmetic(const float* x, const float* y, int* out) {
    const float a = x[threadIdx.x], b = y[threadIdx.x];
    const float results[] = {a + b,        a * b,        fmaf(a, b, a),      a / b,
                             sqrtf(fabsf(a)), fminf(a, b), __fadd_rz(a, b),   __fmul_ru(a, b),
                             1.0f / a,     truncf(a),    rintf(b),
                             __fsub_rn(a, __fmul_rn(b, b))};
    for (int i = 0; i < 12; ++i) out[16 * threadIdx.x + i] = __float_as_int(results[i]);
    int packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(a), "f"(b));
    out[16 * threadIdx.x + 12] = packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(a), "f"(b));
    out[16 * threadIdx.x + 13] = packed;
    out[16 * threadIdx.x + 14] = __float2int_rn(a);
    out[16 * threadIdx.x + 15] = __float2uint_rz(b);
}
extern "C" __global__ void reduce(const int* x, int* out) {
    const int value = x[threadIdx.x];
    const unsigned half = 0xFFFFu << (threadIdx.x & 16);
    int same;
    const unsigned all = __match_all_sync(half, value >> 4, &same);
    const int sum = __reduce_add_sync(half, value), low = __reduce_min_sync(half, value);
    const int other = __shfl_xor_sync(~0u, value, 9), first = __shfl_sync(~0u, value, 5, 8);
    const int any = __any_sync(half, value > 90), every = __all_sync(half, value > 3);
    out[threadIdx.x] = (sum * 31 + low) * 31 + (other * 7 + first) * 4 + any * 2 + every;
    out[threadIdx.x + 64] = all + same;
}
extern "C" __global__ void last_block(const int* x, int* partial, int* count, int* out) {
    __shared__ bool is_last;
    partial[blockIdx.x] = x[blockIdx.x] * 2;
    FENCE;
    if (threadIdx.x == 0) is_last = atomicAdd(count, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    FENCE;
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += *static_cast<volatile int*>(partial + i);
    if (threadIdx.x == 0) *out = sum;
}
extern "C" __global__ void last_block_of_warps(const int* x, int* partial, int* count, int* out) {
    __shared__ bool is_last;
    if (threadIdx.x == 32) {
        partial[blockIdx.x] = x[blockIdx.x] * 2;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        FENCE;
        is_last = atomicAdd(count, 1) == gridDim.x - 1;
        FENCE;
    }
    __syncthreads();
    if (!is_last || threadIdx.x != 32) return;
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += partial[i];
    *out = sum;
}
"""
SCHEDULES = [{"group": 8}, {"seed": 3, "slice": 3}, {"seed": 9, "descending": True, "group": 2}]


class Case(NamedTuple):
    """A launch: what the kernel takes before its output, and what it must give."""

    grid: int
    block: int
    inputs: tuple[torch.Tensor | int, ...]
    want: Callable[[], list[int]] | None
    num_outputs: int


def draw(low: int, high: int, count: int) -> torch.Tensor:
    numbers = np.random.default_rng(0).integers(low, high, count, np.int32)
    return torch.from_numpy(numbers)


def floats(seed: int) -> torch.Tensor:
    """Draw 64 floats of all sizes, none of which is NaN, infinite or 0; sums may overflow."""
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-30, 30, 64)
    return torch.from_numpy((generator.standard_normal(64) * 2.0**exponents).astype(np.float32))


def scanned() -> list[int]:
    return np.cumsum(draw(-1000, 1000, 128).numpy()).tolist()


def matched() -> list[int]:
    x, want = draw(0, 6, 64).tolist(), []
    for i, value in enumerate(x):
        peers = [lane for lane in range(32) if x[i // 32 * 32 + lane] == value]
        want.append(len(peers) * 100 + peers[0] + 1)
    return want


def collatz_steps() -> list[int]:
    steps = [collatz(value) for value in draw(1, 200, 64).tolist()]
    odd = [sum(s & 1 for s in steps[w : w + 32]) for w in (0, 32)]
    return [s + 1000 * odd[i // 32] for i, s in enumerate(steps)]


def collatz(value: int) -> int:
    count = 0
    while value != 1:
        value = 3 * value + 1 if value & 1 else value // 2
        count += 1
    return count


def sorted_few() -> list[int]:
    x, want = draw(0, 100, 80).tolist(), []
    for thread in range(64):
        values = [sum(i for i in range(16) if x[thread + i] & 7 == v) for v in range(8)]
        want.append(sum(3 ** (7 - i) * values[(i + thread) & 7] for i in range(8)))
    return want


def reduced() -> list[int]:
    x = draw(0, 100, 64).tolist()
    first, second = [], []
    for i in range(len(x)):
        half, warp, bits = i // 16 * 16, i // 32 * 32, 0xFFFF << (i & 16)
        peers = x[half : half + 16]
        same = len({p >> 4 for p in peers}) == 1
        other, chosen = x[i ^ 9], x[warp + i % 32 // 8 * 8 + 5]
        votes = 2 * any(p > 90 for p in peers) + all(p > 3 for p in peers)
        first.append((sum(peers) * 31 + min(peers)) * 31 + (other * 7 + chosen) * 4 + votes)
        second.append(((bits if same else 0) + same + 2**31) % 2**32 - 2**31)
    return first + second


CASES = {
    "histogram": Case(
        3,
        128,
        (draw(0, 1000, 1500), 1500),
        lambda: np.bincount(draw(0, 1000, 1500) & 63, minlength=64).tolist(),
        64,
    ),
    "scan": Case(1, 128, (draw(-1000, 1000, 128),), scanned, 128),
    "match": Case(1, 64, (draw(0, 6, 64),), matched, 64),
    "reduce": Case(1, 64, (draw(0, 100, 64),), reduced, 128),
    "collatz": Case(1, 64, (draw(1, 200, 64),), collatz_steps, 64),
    "sort_few": Case(1, 64, (draw(0, 100, 80),), sorted_few, 64),
    "neighbours": Case(
        8,
        32,
        (),
        lambda: [(block % 4 + 1) % 4 * 100 + t for block in range(8) for t in range(32)],
        256,
    ),
    "arithmetic": Case(1, 64, (floats(1), floats(2)), None, 1024),
}


def program(fence: str = "__threadfence()") -> Program:
    return Program("kernels.cu", SOURCE, (("FENCE", fence),))


def ptx(fence: str = "__threadfence()") -> str:
    return program(fence).compile((9, 0)).ptx


def run(name: str, grid: int, block: int, values: list, **options) -> None:
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    text = options.pop("text", None) or ptx()
    emulator.launch(text, name, grid, block, 0, values, tensors=tensors, races=True, **options)


def emulated(name: str, **options) -> torch.Tensor:
    case = CASES[name]
    out = torch.zeros(case.num_outputs, dtype=torch.int32)
    run(name, case.grid, case.block, [*case.inputs, out], **options)
    return out


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_kernels(schedule):
    text = ptx()
    for name, case in CASES.items():
        out = emulated(name, text=text, **schedule)
        if case.want is not None:
            assert out.tolist() == case.want(), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_device_agrees_bit_for_bit(name):
    capability = torch.cuda.get_device_capability()
    if capability < (9, 0):
        pytest.skip(f"needs compute capability 9.0 (clusters), this device has {capability}")
    case = CASES[name]
    values = [v.cuda() if isinstance(v, torch.Tensor) else v for v in case.inputs]
    out = torch.zeros(case.num_outputs, dtype=torch.int32, device="cuda")
    values.append(out)
    signature = "".join("P" if isinstance(v, torch.Tensor) else "i" for v in values)
    kernel = program().kernel(name, signature, out.device)
    kernel(
        (case.grid, 1, 1),
        (case.block, 1, 1),
        *(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values),
    )
    torch.cuda.synchronize()
    here = emulated(name, text=program().compile(capability).ptx)
    torch.testing.assert_close(out.cpu(), here, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_last_block_sees_the_others_only_with_fences(seed):
    x = torch.arange(6, dtype=torch.int32)
    partial, count, out = (torch.zeros(n, dtype=torch.int32) for n in (6, 1, 1))
    run("last_block", 6, 32, [x, partial, count, out], seed=seed, resident=6)
    assert out.item() == 2 * sum(range(6))
    count.zero_()
    with pytest.raises(emulator.EmulatorError, match="race"):
        run("last_block", 6, 32, [x, partial, count, out], seed=seed, text=ptx("(void)0"))


@pytest.mark.parametrize("group", [1, 2])
def test_the_thread_that_signals_must_fence(group):
    """Its fence covers what a barrier has shown it; that of the thread that stored does not."""
    x = torch.arange(6, dtype=torch.int32)
    partial, count, out = (torch.zeros(n, dtype=torch.int32) for n in (6, 1, 1))
    run("last_block_of_warps", 6, 64, [x, partial, count, out], resident=6, group=group)
    assert out.item() == 2 * sum(range(6))
    count.zero_()
    with pytest.raises(emulator.EmulatorError, match="race"):
        run(
            "last_block_of_warps",
            6,
            64,
            [x, partial, count, out],
            resident=6,
            group=group,
            text=ptx("(void)0"),
        )
