// Rows of scores and their order, for the kernels of block top-k: equal bit for bit to
// topk/reference.py. Compiled by NVRTC, in one text with short.cu or long.cu; includes nothing.
//
// A row is a list of spans of block ids, ascending: regions, each with a budget, and kept spans.
// Every block has a 32-bit key in the order of choice (the reference's keys, shifted to unsigned):
//
//     0            never chosen: NaN, -inf, past the valid count
//     1 ..         scored, +inf the largest; -0.0 and +0.0 share 0x80000000
//     0xFFFFFFFE   the row's local block
//     0xFFFFFFFF   forced: first or last blocks

typedef long long int64;
typedef unsigned long long uint64;

constexpr unsigned kNever = 0u, kLocal = 0xFFFFFFFEu, kForced = 0xFFFFFFFFu, kAll = 0xFFFFFFFFu;
constexpr int kKeep = -1;  // the budget of a kept span
constexpr int kMaxSpans = 32;

__device__ float infinity() { return __int_as_float(0x7F800000); }

struct Span {
    int start, stop, budget;
};

struct Plan {  // mirrored by block_topk.py
    int64 score_stride[3], block_stride;  // elements; row dims 0..2, then the blocks
    int64 valid_stride[3], local_stride[3], out_stride[3];
    int64 width;
    unsigned size[3];
    int num_blocks, first, last;
    int resume, finish;  // continue the rows of an earlier launch; fill their tails
    int num_spans;
    Span spans[kMaxSpans];
};

struct Row {
    const float* scores;
    int64 stride;
    unsigned out;  // its place among the output rows
    int valid, local, first, last;

    __device__ unsigned key(int id) const {
        if (id >= valid) return kNever;
        if (id < first || id >= valid - last) return kForced;
        return id == local ? kLocal : order(scores[id * stride]);
    }

    static __device__ unsigned order(float score) {
        const unsigned bits = __float_as_uint(score);
        const unsigned key = static_cast<int>(bits) < 0 ? 0u - bits : bits | 0x80000000u;
        return score > -infinity() ? key : kNever;
    }
};

__device__ Row row_at(const Plan& plan, const float* scores, const int* valid, const int* local,
                      unsigned i0, unsigned i1, unsigned i2) {
    Row row;
    row.scores = scores + i0 * plan.score_stride[0] + i1 * plan.score_stride[1]
                 + i2 * plan.score_stride[2];
    row.stride = plan.block_stride;
    row.out = static_cast<unsigned>(i0 * plan.out_stride[0] + i1 * plan.out_stride[1]
                                    + i2 * plan.out_stride[2]);
    row.valid = plan.num_blocks;
    row.local = -1;
    row.first = plan.first;
    row.last = plan.last;
    if (valid) {
        const int count = valid[i0 * plan.valid_stride[0] + i1 * plan.valid_stride[1]
                                + i2 * plan.valid_stride[2]];
        row.valid = min(max(count, 0), plan.num_blocks);
    }
    if (local) {
        row.local = local[i0 * plan.local_stride[0] + i1 * plan.local_stride[1]
                          + i2 * plan.local_stride[2]];
    }
    return row;
}

// The row of a linear index; the last dim varies fastest.
__device__ Row row_at(const Plan& plan, const float* scores, const int* valid, const int* local,
                      unsigned index) {
    unsigned i0 = 0, i1 = 0, i2 = index;
    if (index >= plan.size[2]) {
        i1 = index / plan.size[2];
        i2 = index - i1 * plan.size[2];
        i0 = i1 / plan.size[1];
        i1 -= i0 * plan.size[1];
    }
    return row_at(plan, scores, valid, local, i0, i1, i2);
}
