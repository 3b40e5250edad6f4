"""CUDA C++ through NVRTC, bit for bit: atomics, scans, matches, divergence, clusters."""

from __future__ import annotations

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


def ptx(fence: str = "__threadfence()") -> str:
    return Program("kernels.cu", SOURCE, (("FENCE", fence),)).compile((9, 0)).ptx


def draw(low: int, high: int, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(low, high, count, np.int32)


def run(name: str, grid: int, block: int, values: list, **options) -> None:
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    text = options.pop("text", None) or ptx()
    emulator.launch(text, name, grid, block, 0, values, tensors=tensors, races=True, **options)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_kernels(schedule):
    x = draw(0, 1000, 1500)
    out = torch.zeros(64, dtype=torch.int32)
    run("histogram", 3, 128, [torch.from_numpy(x), len(x), out], **schedule)
    assert out.tolist() == np.bincount(x & 63, minlength=64).tolist()

    x = draw(-1000, 1000, 128)
    out = torch.zeros(128, dtype=torch.int32)
    run("scan", 1, 128, [torch.from_numpy(x), out], **schedule)
    assert out.tolist() == np.cumsum(x).tolist()

    x = draw(0, 6, 64)
    out = torch.zeros(64, dtype=torch.int32)
    run("match", 1, 64, [torch.from_numpy(x), out], **schedule)
    for i, value in enumerate(x.tolist()):
        peers = [lane for lane in range(32) if x[i // 32 * 32 + lane] == value]
        assert out[i] == len(peers) * 100 + peers[0] + 1

    x = draw(1, 200, 64)
    out = torch.zeros(64, dtype=torch.int32)
    run("collatz", 1, 64, [torch.from_numpy(x), out], **schedule)
    steps = [collatz(value) for value in x.tolist()]
    odd = [sum(s & 1 for s in steps[w : w + 32]) for w in (0, 32)]
    assert out.tolist() == [s + 1000 * odd[i // 32] for i, s in enumerate(steps)]

    x = draw(0, 100, 80)
    out = torch.zeros(64, dtype=torch.int32)
    run("sort_few", 1, 64, [torch.from_numpy(x), out], **schedule)
    for thread in range(64):
        values = [sum(i for i in range(16) if x[thread + i] & 7 == v) for v in range(8)]
        assert out[thread] == sum(3 ** (7 - i) * values[(i + thread) & 7] for i in range(8))

    out = torch.zeros(8 * 32, dtype=torch.int32)
    run("neighbours", 8, 32, [out], **schedule)
    want = [(block % 4 + 1) % 4 * 100 + t for block in range(8) for t in range(32)]
    assert out.tolist() == want


def collatz(value: int) -> int:
    count = 0
    while value != 1:
        value = 3 * value + 1 if value & 1 else value // 2
        count += 1
    return count


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
