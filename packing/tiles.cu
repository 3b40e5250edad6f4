// Tokens of a video to packed blocks and back: what VideoLayout.pack, pool_blocks, unpack and
// broadcast of interface/vsa do. Compiled by NVRTC; includes nothing.
//
// A thread block moves one block of one head. A row (the HEAD_DIM elements of a token) is read and
// written by kLanes neighbouring threads, 16 bytes each; kRows rows move at once, and a thread has
// the loads of kBatch of its rows in flight before their first store.
//
//     pack            tokens to slots, zeros to padding; the block's mean
//     unpack          slots to tokens
//     unpack_gated... the same, plus gate * coarse, where coarse has one row for each block; the gate
//                     is of the tensors' dtype or float32, and may have one value for a row
//
// tokens[slot] is the token of a packed slot; one outside 0..num_tokens-1 marks padding, which is
// written as zeros and never read.
//
// Constants: BF16 (1 bfloat16, 0 float16); HEAD_DIM (64 or 128).

typedef long long int64;
typedef unsigned short half;  // the bits of an element

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kThreads = 256, kWarps = kThreads / 32, kResident = 4;
constexpr int kLanes = HEAD_DIM / 8, kRows = kThreads / kLanes;
constexpr int kBatch = 4, kGatedBatch = 2;  // the second where each row comes with one of the gate

struct Plan {  // mirrored by plan.py
    int64 video[3], packed[3];  // strides of batch, head and row, in elements
    unsigned num_heads, num_blocks;
    int num_tokens, block_size, heads_first;
};

struct GateStrides {  // mirrored by plan.py
    int64 of[3];  // batch, head and row, in elements
};

struct Block {
    unsigned batch, head, index;
    int dim, row;  // where this thread begins: its 8 elements, and its first row

    __device__ explicit Block(const Plan& plan) {
        const unsigned item = blockIdx.x;
        if (plan.heads_first) {  // neighbours are heads of one block: their rows are adjacent
            head = item % plan.num_heads;
            const unsigned rest = item / plan.num_heads;
            index = rest % plan.num_blocks;
            batch = rest / plan.num_blocks;
        } else {
            index = item % plan.num_blocks;
            const unsigned rest = item / plan.num_blocks;
            head = rest % plan.num_heads;
            batch = rest / plan.num_heads;
        }
        dim = threadIdx.x % kLanes * 8;
        row = threadIdx.x / kLanes;
    }
    __device__ int64 first_slot(const Plan& plan) const {
        return static_cast<int64>(index) * plan.block_size;
    }
    __device__ int64 offset(const int64 (&stride)[3], int64 first) const {
        return batch * stride[0] + head * stride[1] + first * stride[2] + dim;
    }
    // Of this block's row in a contiguous [B, H, num_blocks, HEAD_DIM].
    __device__ int64 summary(const Plan& plan) const {
        const int64 of_head = static_cast<int64>(batch) * plan.num_heads + head;
        return (of_head * plan.num_blocks + index) * HEAD_DIM;
    }
};

__device__ __forceinline__ float to_float(half bits) {
    float value;
#if BF16
    value = __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#endif
    return value;
}

__device__ __forceinline__ unsigned to_halves(float low, float high) {
    unsigned bits;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#endif
    return bits;
}

__device__ __forceinline__ void to_floats(float (&values)[8], const uint4& bits) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = to_float(static_cast<half>(words[i]));
        values[2 * i + 1] = to_float(static_cast<half>(words[i] >> 16));
    }
}

__device__ __forceinline__ uint4 load(const half* at) {
    return __ldg(reinterpret_cast<const uint4*>(at));
}

__device__ __forceinline__ void as_floats(float (&values)[8], const uint4& low, const uint4& high) {
    const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __uint_as_float(words[i]);
}

__device__ __forceinline__ void store(half* at, const uint4& bits) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"  // the compiler would store it in parts
                 :: "l"(__cvta_generic_to_global(at)), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                    "r"(bits.w));
}

// The tokens of every kRows-th slot of a block from `first` on; -1 for padding and past the block.
template <int kCount>
__device__ __forceinline__ void load_tokens(int (&found)[kCount], const Plan& plan,
                                            const int64* tokens, int first) {
    int64 read[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j)
        read[j] = __ldg(tokens + min(first + j * kRows, plan.block_size - 1));
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
        const bool is_token = first + j * kRows < plan.block_size && read[j] >= 0
                              && read[j] < plan.num_tokens;
        found[j] = is_token ? static_cast<int>(read[j]) : -1;
    }
}

// Sum over the thread block, each thread's 8 elements at `dim`; divided and written once.
__device__ __forceinline__ void write_mean(float (&sum)[8], float* mean, int dim, int size) {
    __shared__ float of_warps[kWarps][HEAD_DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += __shfl_xor_sync(kAll, sum[i], step);
    }
    if (lane < kLanes) {
        float4* at = reinterpret_cast<float4*>(&of_warps[warp][dim]);
        at[0] = {sum[0], sum[1], sum[2], sum[3]};
        at[1] = {sum[4], sum[5], sum[6], sum[7]};
    }
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) total += of_warps[i][threadIdx.x];
        mean[threadIdx.x] = total / static_cast<float>(max(size, 1));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
pack(const half* __restrict__ video, half* __restrict__ packed, float* __restrict__ means,
     const int64* __restrict__ tokens, const int* __restrict__ sizes, const Plan plan) {
    const Block block(plan);
    const int64 first_slot = block.first_slot(plan);
    tokens += first_slot;
    video += block.offset(plan.video, 0);
    packed += block.offset(plan.packed, first_slot);

    const int size = means ? __ldg(sizes + block.index) : 0;
    float sum[8] = {};
    for (int first = block.row; first < plan.block_size; first += kBatch * kRows) {
        uint4 rows[kBatch];
        int from[kBatch];
        load_tokens(from, plan, tokens, first);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            rows[j] = {0, 0, 0, 0};
            if (from[j] >= 0) rows[j] = load(video + from[j] * plan.video[2]);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int slot = first + j * kRows;
            if (slot < plan.block_size) store(packed + slot * plan.packed[2], rows[j]);
            float values[8];
            to_floats(values, rows[j]);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] += values[i];
        }
    }
    if (means) write_mean(sum, means + block.summary(plan), block.dim, size);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
unpack(const half* __restrict__ packed, half* __restrict__ video,
       const int64* __restrict__ tokens, const Plan plan) {
    const Block block(plan);
    const int64 first_slot = block.first_slot(plan);
    tokens += first_slot;
    video += block.offset(plan.video, 0);
    packed += block.offset(plan.packed, first_slot);

    for (int first = block.row; first < plan.block_size; first += kBatch * kRows) {
        uint4 rows[kBatch];
        int to[kBatch];
        load_tokens(to, plan, tokens, first);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
            if (to[j] >= 0) rows[j] = load(packed + (first + j * kRows) * plan.packed[2]);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
            if (to[j] >= 0) store(video + to[j] * plan.video[2], rows[j]);
    }
}

// A gate's values for 8 elements, as they stand in memory: of the tensors' dtype or float32, one for
// each element or one for the row.
template <bool kFloat, bool kRow>
struct GateBits {
    uint4 bits[kFloat && !kRow ? 2 : 1];

    __device__ void load_from(const void* gate, int64 offset) {
        const float* floats = static_cast<const float*>(gate) + offset;
        const half* halves = static_cast<const half*>(gate) + offset;
        if constexpr (kRow) {
            bits[0].x = kFloat ? __float_as_uint(__ldg(floats)) : __ldg(halves);
        } else if constexpr (kFloat) {
            bits[0] = __ldg(reinterpret_cast<const uint4*>(floats));
            bits[1] = __ldg(reinterpret_cast<const uint4*>(floats) + 1);
        } else {
            bits[0] = load(halves);
        }
    }
    __device__ void expand(float (&values)[8]) const {
        if constexpr (kRow) {
            const unsigned word = bits[0].x;
            const float one = kFloat ? __uint_as_float(word) : to_float(static_cast<half>(word));
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = one;
        } else if constexpr (kFloat) {
            as_floats(values, bits[0], bits[1]);
        } else {
            to_floats(values, bits[0]);
        }
    }
};

// Products and sums are rounded one by one, as torch does it.
template <bool kFloat, bool kRow>
__device__ __forceinline__ void unpack_with(const half* packed, half* video, const void* gate,
                                            const float* coarse, const int64* tokens,
                                            const Plan& plan, const GateStrides& strides) {
    const Block block(plan);
    const int64 first_slot = block.first_slot(plan);
    tokens += first_slot;
    video += block.offset(plan.video, 0);
    packed += block.offset(plan.packed, first_slot);
    const int64 first_gate = block.offset(strides.of, 0) - (kRow ? block.dim : 0);
    float of_block[8];
    const uint4* at = reinterpret_cast<const uint4*>(coarse + block.summary(plan) + block.dim);
    as_floats(of_block, __ldg(at), __ldg(at + 1));

    for (int first = block.row; first < plan.block_size; first += kGatedBatch * kRows) {
        uint4 rows[kGatedBatch];
        GateBits<kFloat, kRow> gates[kGatedBatch];
        int to[kGatedBatch];
        load_tokens(to, plan, tokens, first);
#pragma unroll
        for (int j = 0; j < kGatedBatch; ++j) {
            if (to[j] < 0) continue;
            rows[j] = load(packed + (first + j * kRows) * plan.packed[2]);
            gates[j].load_from(gate, first_gate + to[j] * strides.of[2]);
        }
#pragma unroll
        for (int j = 0; j < kGatedBatch; ++j) {
            if (to[j] < 0) continue;
            float values[8], weights[8];
            to_floats(values, rows[j]);
            gates[j].expand(weights);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                values[i] = __fadd_rn(values[i], __fmul_rn(weights[i], of_block[i]));
            const uint4 bits = {to_halves(values[0], values[1]), to_halves(values[2], values[3]),
                                to_halves(values[4], values[5]), to_halves(values[6], values[7])};
            store(video + to[j] * plan.video[2], bits);
        }
    }
}

#define UNPACK(name, is_float, is_row)                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, kResident)                            \
    name(const half* __restrict__ packed, half* __restrict__ video, const void* __restrict__ gate, \
         const float* __restrict__ coarse, const int64* __restrict__ tokens, const Plan plan,     \
         const GateStrides strides) {                                                             \
        unpack_with<is_float, is_row>(packed, video, gate, coarse, tokens, plan, strides);        \
    }

UNPACK(unpack_gated, false, false)
UNPACK(unpack_gated_rows, false, true)
UNPACK(unpack_gated_float, true, false)
UNPACK(unpack_gated_float_rows, true, true)
