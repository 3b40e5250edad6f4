// Block top-k on a GPU, equal bit for bit to topk/reference.py. Compiled by NVRTC; includes nothing.
//
// A row is a list of spans of block ids, ascending: regions, each with a budget, and kept spans.
// Every block has a 32-bit key in the order of choice (the reference's keys, shifted to unsigned):
//
//     0            never chosen: NaN, -inf, past the valid count
//     1 ..         scored, +inf the largest; -0.0 and +0.0 share 0x80000000
//     0xFFFFFFFE   the row's local block
//     0xFFFFFFFF   forced: first or last blocks
//
// block_topk_short  spans of up to GROUP * ITEMS blocks. A row belongs to a group of GROUP threads,
//     which hold its keys in registers and search the k-th largest key by counting. ROWS: the group
//     is GROUP lanes of a warp, blocks of a row are adjacent in memory. COLUMNS: the group is one
//     lane of each of GROUP warps, so that 32 adjacent rows are read together (scores [H, n, Tq]).
// block_topk_long   spans of any length. TILE rows (1, or 32 adjacent ones for COLUMNS) to a thread
//     block; a histogram of digits of (key, lowest id first) is refined until the digit that holds
//     the k-th block has at most STAGE blocks, which are then ranked. Ids are digits too: ties end.
// block_topk_parts, block_topk_merge   one very long row over many thread blocks: the k best of
//     each part go to a workspace, and the best of those are the best of the row.
//
// No result depends on the order of atomics: they fill lists that are ranked afterwards.
//
// Constants: COLUMNS, FORCED, REGIONS, THREADS, and GROUP, ITEMS for the short kernel, TILE,
// DIGIT_BITS, STAGE for the others.

typedef long long int64;
typedef unsigned long long uint64;

constexpr unsigned kNever = 0u, kLocal = 0xFFFFFFFEu, kForced = 0xFFFFFFFFu, kAll = 0xFFFFFFFFu;
constexpr unsigned kSign = 0x80000000u;
constexpr float kBase = 8388608.0f;  // 2^23: from here to 2^24 floats are the whole numbers
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

#if defined(GROUP)

constexpr int kThreads = THREADS;
constexpr int kResident = COLUMNS && REGIONS ? 512 : FORCED || REGIONS ? 768 : 1024;  // threads

// What the GROUP lanes of one row say to each other; any over all lanes of a warp.
struct Group {
    int member, lane;

    // A sum of small whole numbers.
    __device__ float sum(float value) const {
        if constexpr (GROUP == 32) {  // integers at the low end of a float's significand
            const unsigned one = __float_as_uint(kBase + value) - __float_as_uint(kBase);
            const unsigned all = __reduce_add_sync(kAll, one);
            return __uint_as_float(__float_as_uint(kBase) + all) - kBase;
        } else {
            for (int step = 1; step < GROUP; step *= 2) value += __shfl_xor_sync(kAll, value, step);
            return value;
        }
    }
    __device__ float largest(float value) const {
        for (int step = 1; step < GROUP; step *= 2)
            value = fmaxf(value, __shfl_xor_sync(kAll, value, step));
        return value;
    }
    __device__ unsigned largest(unsigned value) const {
        if constexpr (GROUP == 32) {
            return __reduce_max_sync(kAll, value);
        } else {
            for (int step = 1; step < GROUP; step *= 2)
                value = max(value, __shfl_xor_sync(kAll, value, step));
            return value;
        }
    }
    // Sum over earlier members, and over all into `total`.
    __device__ int before(int value, int& total) const {
        int through = value;
        for (int step = 1; step < GROUP; step *= 2) {
            const int earlier = __shfl_up_sync(kAll, through, step, GROUP);
            if (member >= step) through += earlier;
        }
        total = __shfl_sync(kAll, through, GROUP - 1, GROUP);
        return through - value;
    }
    __device__ bool any(bool value) const { return __any_sync(kAll, value); }
};

// Item j of a member is block `offset` of the span: four adjacent ones of every 4 * GROUP.
__device__ int offset(int member, int j) { return j / 4 * (4 * GROUP) + member * 4 + j % 4; }

// The blocks of one member's word of chosen blocks.
constexpr int kLanes = GROUP < 8 ? GROUP : 8;  // that exchange their items
constexpr int kWordBlocks = 4 * kLanes % ITEMS ? 4 * kLanes : ITEMS;
static_assert(ITEMS <= 4 * kLanes, "a lane takes one word at most");

// The scores of a member's items, the first at `at`; -inf past the length.
__device__ __forceinline__ void load_scores(float (&scores)[ITEMS], int member, const float* at,
                                            int64 stride, int length) {
    const float none = -infinity();
    if (stride == 1 && reinterpret_cast<uint64>(at) % 16 == 0) {
#pragma unroll
        for (int j = 0; j < ITEMS; j += 4) {
            const int left = length - offset(member, j);
            float4 four = {none, none, none, none};
            if (left >= 4) {
                four = __ldg(reinterpret_cast<const float4*>(at + offset(0, j)));
            } else {
                if (left > 0) four.x = __ldg(at + offset(0, j));
                if (left > 1) four.y = __ldg(at + offset(0, j) + 1);
                if (left > 2) four.z = __ldg(at + offset(0, j) + 2);
            }
            scores[j] = four.x;
            scores[j + 1] = four.y;
            scores[j + 2] = four.z;
            scores[j + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        scores[j] = none;
        if (offset(member, j) < length) scores[j] = __ldg(at);
        if (j + 1 < ITEMS) at += stride * (offset(0, j + 1) - offset(0, j));
        if (j % 8 == 7) asm volatile("" : "+l"(at));  // few addresses at once
    }
}

// COLUMNS: 32 adjacent rows are read together, and pass through shared memory.
constexpr int kPitch = GROUP * ITEMS + 1;

// The warps take the blocks in turn; a lane reads its row of the tile, whose first block is `at`.
__device__ __forceinline__ void stage_tile(float* tile, const float* at, int64 stride, int length) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float held[ITEMS];
    at += warp * stride;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        held[j] = -infinity();
        if (j * GROUP + warp < length) held[j] = __ldg(at);
        at += GROUP * stride;
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) tile[lane * kPitch + j * GROUP + warp] = held[j];
}

// Blocks of a row that are chosen whatever their scores, k at most: `first` blocks from 0, `last`
// from `last_start`, and the local block where it is none of these.
struct Forced {
    int first, last_start, last, local, count;

    __device__ Forced(const Row& row, int k) {
        first = min(min(row.first, row.valid), k);
        const int all_last = min(row.last, row.valid - first);
        last_start = row.valid - all_last;
        last = min(all_last, k - first);
        count = first + last;
        const bool apart = row.local >= first && row.local < last_start && count < k;
        local = apart ? row.local : -1;
        count += apart;
    }
    // The i-th of them, for i < count.
    __device__ int block(int i) const {
        if (i < first) return i;
        return i < first + last ? last_start + i - first : local;
    }
    // One bit for each that is one of them of up to 32 blocks, of which count_below(b) are below b.
    template <class CountBelow>
    __device__ unsigned mask(CountBelow count_below) const {
        const auto below = [&](int block) {
            const int n = min(count_below(block), kWordBlocks);
            return n >= 32 ? kAll : (1u << max(n, 0)) - 1u;
        };
        return below(first) | (below(last_start) ^ below(last_start + last))
               | (below(local) ^ below(local + 1));
    }
};

// Choose by whole numbers: a score's place between the row's largest and smaller ones, from kBase
// to kTop, in floats whose last bit is 1. `saturate(place - cut)` is then 1 for places over a cut
// and 0 for the others, NaN included, and a count of them two instructions an item at the full rate
// of the FP32 units. One bit for each of a member's items; sets `need` aside where the choice is
// not known to be right: ties, scores too close or too far apart, infinite ones.
constexpr float kTop = 16777216.0f - 131072.0f;
constexpr float kReach = (kTop - kBase) / 3.0f;  // places from the largest to the smallest maximum

__device__ __forceinline__ float over(float place, float cut) { return __saturatef(place - cut); }

__device__ __forceinline__ float count_over(const float (&places)[ITEMS], float cut) {
    float counts[4] = {};
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) counts[j % 4] += over(places[j], cut);
    return counts[0] + counts[1] + (counts[2] + counts[3]);
}

// One bit for each item whose place is over the cut.
__device__ __forceinline__ unsigned items_over(const float (&places)[ITEMS], float cut) {
    unsigned word = 0;
#pragma unroll
    for (int half = 0; half < ITEMS; half += 16) {
        float bits = kBase;
#pragma unroll
        for (int j = half; j < min(half + 16, ITEMS); ++j)
            bits = fmaf(over(places[j], cut), static_cast<float>(1 << (j - half)), bits);
        word |= (__float_as_uint(bits) & 0xFFFFu) << half;
    }
    return word;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quotient(float x, float y) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
    return x * inverse;
}

__device__ __forceinline__ unsigned quick_choice(const Group& group, float (&scores)[ITEMS],
                                                 int need, bool everything, float forced,
                                                 bool& finite) {
    float best = -infinity();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) best = fmaxf(best, scores[j]);
    const float largest = group.largest(best);
    const float smallest = -group.largest(best == -infinity() ? best : -best);
    finite = largest < infinity();

    float scale = kReach / (largest - smallest), shift = fmaf(-largest, scale, kTop);
    const bool search = !everything && need > 0 && scale > 0.0f && fabsf(shift) < 1.0e12f;
    scale = search ? scale : 0.0f;
    shift = search ? shift : kBase + 1.0f;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) scores[j] = fmaf(scores[j], scale, shift);
    forced = fmaf(forced, scale, shift);

    // Places over `high` are fewer than needed, those over `low` - 1 enough, or `low` is kBase. A
    // pivot is interpolated from the logarithms of the counts, and halves the interval where the
    // last one did not. A row that is done keeps its cut, and finds the same again.
    constexpr float kMaxima =  // expected places over the smallest maximum
        GROUP == 4 ? 6.0f : GROUP == 8 ? 16.0f : GROUP == 16 ? 44.0f : 111.0f;
    const float wanted = need, log_wanted = log2_of(wanted - 0.25f);
    float low = kBase, high = search ? fmaf(largest, scale, shift) : kBase;
    float log_low = log_wanted + 1.6f, log_high = -2.0f;
    float cut = kTop - kReach + kReach * fmaxf(0.0f, 0.6f - 0.6f / kMaxima * wanted);
    if (!search) cut = need > 0 ? kBase : infinity();
    bool searching = search;
    while (group.any(searching)) {
        float count = count_over(scores, cut);
        if (FORCED) count -= over(forced, cut);
        count = group.sum(count);
        const float width = high - low, log_count = log2_of(count + 0.25f);
        const bool enough = count >= wanted;
        low = enough ? cut + 1.0f : low;
        high = enough ? high : cut;
        log_low = enough ? log_count : log_low;
        log_high = enough ? log_high : log_count;
        const float left = high - low;
        searching = left > 0.0f && count != wanted && (FORCED || count != wanted - 1.0f);
        float share = quotient(log_low - log_wanted, log_low - log_high);
        share = left > 0.5f * width ? 0.5f : share;
        const float next = fmaxf(low, fminf(fmaf(share, left, low), high - 1.0f));
        cut = searching ? next : cut;
    }
    const bool one_short = !FORCED && search && cut == high;
    if (group.any(one_short)) {  // the largest place that is not over `high`
        const float bound = high + 1.0f;
        int nearest = 0;  // of negative numbers, the closest to 0 has the smallest bits
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) nearest = min(nearest, __float_as_int(scores[j] - bound));
        nearest = ~group.largest(~(nearest ^ kSign)) ^ kSign;
        if (one_short) cut = __int_as_float(nearest) + bound - 1.0f;
    }
    return items_over(scores, cut);
}

// One bit for each block of the member's word, from one for each of its items.
__device__ __forceinline__ unsigned word_of(const Group& group, unsigned items) {
    // Transpose the 8 x 8 or 4 x 4 matrix of four-bit digits of as many lanes, then order the lanes.
    const int lane = group.lane;
    if constexpr (kLanes == 8)
        items = __byte_perm(items, __shfl_xor_sync(kAll, items, 4), lane & 4 ? 0x3276 : 0x5410);
    items = __byte_perm(items, __shfl_xor_sync(kAll, items, 2), lane & 2 ? 0x3715 : 0x6240);
    const unsigned other = __shfl_xor_sync(kAll, items, 1), low = 0x0F0F0F0Fu;
    items = lane & 1 ? (items & ~low) | (other >> 4 & low) : (items & low) | (other & low) << 4;
    constexpr int kEights = GROUP / kLanes, kParts = 4 * kLanes / kWordBlocks;
    if constexpr (kEights > 1 || kParts > 1) {
        const int word = group.member / kParts;
        items = __shfl_sync(kAll, items, word % kEights * 8 + word / kEights, GROUP);
    }
    if constexpr (kParts > 1)
        items = items >> group.member % kParts * kWordBlocks & kAll >> (32 - kWordBlocks);
    return items;
}

// The score of a key.
__device__ float score_of(unsigned key) {
    return __uint_as_float(key & kSign ? key ^ kSign : 0u - key);
}

// The k-th largest score of a row, or a score that parts the k largest from the others; the
// smallest finite one where fewer than k can be chosen.
//
// Between lo (at least k keys are as large; that of -inf stands for all) and hi (fewer than k are
// larger) a pivot is interpolated from the counts, and halves the interval where the last one did
// not.
__device__ float kth_largest(const Group& group, const float (&scores)[ITEMS], int k) {
    float best = -infinity();
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) best = fmaxf(best, scores[j]);
    constexpr unsigned kLeast = 0u - 0xFF800000u;  // the key of -inf
    unsigned lo = kLeast, hi = max(lo, Row::order(group.largest(best)));
    if (k == 0) lo = hi;
    int above = 0, at_least = GROUP * ITEMS;
    bool halve = false;
    while (group.any(lo < hi)) {
        const unsigned width = hi - lo;
        const float share = halve ? 0.5f : __fdividef(at_least - k + 0.5f, at_least - above);
        const unsigned step = min(width - 1, static_cast<unsigned>(share * width));
        const unsigned pivot = lo + 1 + step;
        const float least = score_of(pivot);
        float mine = 0.0f;
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) mine += scores[j] >= least ? 1.0f : 0.0f;
        const int count = group.sum(mine);
        if (lo >= hi) continue;
        if (count >= k) {
            lo = pivot;
            at_least = count;
            if (count == k) hi = lo;
        } else {
            hi = pivot - 1;
            above = count;
        }
        halve = !halve && (hi - lo) > width / 2;
    }
    return score_of(max(lo, kLeast + 1));
}

// How many of a member's items are blocks below a bound.
__device__ int items_below(int member, int bound) {
    if (bound <= 0) return 0;
    const int rest = bound % (4 * GROUP) - 4 * member;
    return bound / (4 * GROUP) * 4 + min(max(rest, 0), 4);
}

// Choose the `need` best that are not forced, ties to the lowest ids: always right, and slower.
__device__ __forceinline__ unsigned exact_choice(const Group& group, float (&scores)[ITEMS], int need,
                                                 unsigned forced) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j)
        if (forced >> j & 1) scores[j] = -infinity();
    const float least = kth_largest(group, scores, need);
    unsigned items = 0, ties = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (scores[j] >= least) items |= 1u << j;
        if (scores[j] == least) ties |= 1u << j;
    }
    const unsigned word = word_of(group, items), tied = word_of(group, ties);
    int total, all_tied;
    group.before(__popc(word), total);
    const int before = group.before(__popc(tied), all_tied);
    const int keep = all_tied - max(0, total - need) - before;
    unsigned kept = tied;
    while (__popc(kept) > max(0, keep)) kept ^= kSign >> __clz(kept);
    return (word & ~tied) | kept;
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident > kThreads ? kResident / kThreads : 1)
block_topk_short(const float* __restrict__ scores, const int* __restrict__ valid,
                 const int* __restrict__ local, int* __restrict__ indices,
                 int* __restrict__ counts, const __grid_constant__ Plan plan) {
    Group group;
    group.lane = threadIdx.x % 32;
    group.member = group.lane % GROUP;
#if COLUMNS
    extern __shared__ float tile[];
    const unsigned tiles = (plan.size[2] + 31) / 32;
    const unsigned outer = blockIdx.x / tiles, i2 = (blockIdx.x - outer * tiles) * 32 + group.lane;
    const unsigned i0 = outer / plan.size[1], i1 = outer - i0 * plan.size[1];
    Row row = row_at(plan, scores, valid, local, i0, i1, i2 < plan.size[2] ? i2 : 0);
    if (i2 >= plan.size[2]) row.valid = 0;
    const Row staged = row;  // of the tile this lane reads one row and chooses for another
    const int chooses = threadIdx.x / GROUP;
    const bool active = __shfl_sync(kAll, i2, chooses) < plan.size[2];
    row.out = __shfl_sync(kAll, row.out, chooses);
    row.valid = __shfl_sync(kAll, row.valid, chooses);
    row.local = __shfl_sync(kAll, row.local, chooses);
#else
    const unsigned index = blockIdx.x * (kThreads / GROUP) + threadIdx.x / GROUP;
    const bool active = index < plan.size[0] * plan.size[1] * plan.size[2];
    Row row = row_at(plan, scores, valid, local, active ? index : 0);
    if (!active) row.valid = 0;
#endif
    int base = plan.resume && active ? counts[row.out] : 0;

    for (int s = 0; s < (REGIONS ? plan.num_spans : 1); ++s) {
        const Span span = plan.spans[s];
        const int length = max(0, min(span.stop, row.valid) - span.start);
        int* const out = indices + row.out * plan.width + base;
        if (REGIONS && span.budget == kKeep) {
            for (int i = group.member; i < length; i += GROUP) out[i] = span.start + i;
            base += length;
            continue;
        }
#if COLUMNS
        if (s) __syncthreads();
        stage_tile(tile, staged.scores + span.start * staged.stride, staged.stride,
                   min(span.stop, staged.valid) - span.start);
        __syncthreads();
        const float* const at = tile + chooses * kPitch;
        constexpr int kStride = 1;
        const auto load = [&](float (&held)[ITEMS]) {
#pragma unroll
            for (int j = 0; j < ITEMS; ++j) held[j] = at[offset(group.member, j)];
        };
#else
        const float* const at = row.scores + span.start * row.stride;
        const int64 kStride = row.stride;
        const auto load = [&](float (&held)[ITEMS]) {
            load_scores(held, group.member, at + offset(group.member, 0) * row.stride, row.stride,
                        length);
        };
#endif
        float held[ITEMS], apart = __int_as_float(0x7FFFFFFF);
        load(held);
        int num_forced = 0;
        unsigned forced_word = 0, forced_items = 0;
        const int start = group.member * kWordBlocks;
        if (FORCED) {
            const Forced forced(row, span.budget);
            num_forced = forced.count;
            if (group.member < num_forced) apart = at[forced.block(group.member) * kStride];
            forced_word = forced.mask([&](int block) { return block - start; });
            forced_items = forced.mask([&](int block) { return items_below(group.member, block); });
        }
        const int need = span.budget - num_forced;
        const bool everything = length <= span.budget;
        bool finite;
        unsigned word = forced_word | word_of(
            group, quick_choice(group, held, need, everything, apart, finite));
        int chosen, before = group.before(__popc(word), chosen);
        const bool sure = finite && (chosen == span.budget ? num_forced <= GROUP : everything);
        if (group.any(!sure)) {
            load(held);
            const unsigned exact = exact_choice(group, held, need, forced_items);
            if (!sure) word = exact | forced_word;
            before = group.before(__popc(word), chosen);
        }
        int* end = out + before + __popc(word);
        while (word) {
            unsigned bit;
            asm("bfind.u32 %0, %1;" : "=r"(bit) : "r"(word));
            *--end = span.start + start + bit;
            word ^= 1u << bit;
        }
        base += chosen;
    }
    if (plan.resume) group.any(false);  // every member has read counts before one writes it
    if (!active) return;
    if (plan.finish)
        for (int64 i = base + group.member; i < plan.width; i += GROUP)
            indices[row.out * plan.width + i] = -1;
    if (group.member == 0) counts[row.out] = base;
}

#else  // the long kernels

constexpr int kThreads = THREADS;
constexpr int kSlices = kThreads / TILE;  // threads of one row
constexpr int kBins = 1 << DIGIT_BITS;

// (key, lowest id first) as one number, so that no two blocks of a row are equal; 0 is no block.
__device__ uint64 ranked(unsigned key, int id) {
    return key == kNever ? 0 : static_cast<uint64>(key) << 32 | ~static_cast<unsigned>(id);
}

__device__ int id_of(uint64 rank) { return static_cast<int>(~static_cast<unsigned>(rank)); }

// Blocks of a row, as rank(i) for i in 0 .. length - 1.
struct ScoredBlocks {
    Row row;
    int start, length;
    __device__ uint64 rank(int i) const { return ranked(row.key(start + i), start + i); }
};

struct ListedBlocks {
    const uint64* ranks;
    int length;
    __device__ uint64 rank(int i) const { return ranks[i]; }
};

// Where the search of one row stands: blocks with rank >> shift > prefix are chosen, `need` more
// are among those with rank >> shift == prefix.
struct Search {
    uint64 prefix;
    int shift, need, open;
    int num_chosen, num_staged;
};

// Shared memory of a thread block, in this order.
struct Shared {
    uint64* chosen;      // [TILE][capacity]
    uint64* staged;      // [TILE][STAGE]
    unsigned* histogram; // [kBins][TILE]
    Search* search;      // [TILE]
};

__device__ Shared shared_memory(int capacity) {
    extern __shared__ uint64 memory[];
    Shared shared;
    shared.chosen = memory;
    shared.staged = shared.chosen + TILE * capacity;
    shared.search = reinterpret_cast<Search*>(shared.staged + TILE * STAGE);
    shared.histogram = reinterpret_cast<unsigned*>(shared.search + TILE);
    return shared;
}

// One warp finds the digit that holds the needed block and refines the search by it.
__device__ void refine(Search& search, const unsigned* histogram, int tile, int width) {
    const int lane = threadIdx.x % 32;
    constexpr int kShare = kBins / 32;
    const int first = (31 - lane) * kShare;  // lane 0 has the largest digits
    unsigned mine = 0;
    for (int i = 0; i < kShare; ++i) mine += histogram[(first + i) * TILE + tile];
    unsigned through = mine;
    for (int step = 1; step < 32; step *= 2) {
        const unsigned earlier = __shfl_up_sync(kAll, through, step);
        if (lane >= step) through += earlier;
    }
    const unsigned total = __shfl_sync(kAll, through, 31);
    const unsigned need = search.need;
    const bool all = search.shift == 64 && total <= need;
    __syncwarp();
    if (all) {  // no more than needed
        if (lane == 0) {
            search.prefix = 0;
            search.shift = 32;
            search.need = 0;
            search.open = 0;
        }
        return;
    }
    unsigned above = through - mine;
    if (above < need && through >= need) {
        int digit = first + kShare - 1;
        unsigned count = histogram[digit * TILE + tile];
        while (above + count < need) {
            above += count;
            --digit;
            count = histogram[digit * TILE + tile];
        }
        search.prefix = search.prefix << width | static_cast<unsigned>(digit);
        search.shift -= width;
        search.need = need - above;
        search.open = count > STAGE;
    }
}

// Choose the `budget` largest blocks of each row of the tile into shared.chosen, in no order.
template <class Blocks>
__device__ void choose(const Blocks& blocks, int budget, int capacity, const Shared& shared) {
    const int tile = threadIdx.x % TILE, slice = threadIdx.x / TILE, warp = threadIdx.x / 32;
    Search& search = shared.search[tile];
    if (slice == 0) search = {0, 64, budget, 1, 0, 0};
    __syncthreads();
    for (int shift = 64; __syncthreads_or(search.open);) {
        const int width = min(DIGIT_BITS, shift);
        for (int i = threadIdx.x; i < kBins * TILE; i += kThreads) shared.histogram[i] = 0;
        __syncthreads();
        if (search.open) {
            const uint64 prefix = search.prefix;
            for (int i = slice; i < blocks.length; i += kSlices) {
                const uint64 rank = blocks.rank(i);
                if (rank && (shift == 64 || rank >> shift == prefix)) {
                    const unsigned digit = rank >> (shift - width) & ((1u << width) - 1u);
                    atomicAdd(&shared.histogram[digit * TILE + tile], 1u);
                }
            }
        }
        __syncthreads();
        for (int t = warp; t < TILE; t += kThreads / 32)
            if (shared.search[t].open) refine(shared.search[t], shared.histogram, t, width);
        shift -= width;
        __syncthreads();
    }
    uint64* const chosen = shared.chosen + tile * capacity;
    uint64* const staged = shared.staged + tile * STAGE;
    const uint64 prefix = search.prefix;
    const int shift = search.shift;
    for (int i = slice; i < blocks.length; i += kSlices) {
        const uint64 rank = blocks.rank(i);
        if (!rank) continue;
        const uint64 head = shift == 64 ? 0 : rank >> shift;
        if (head > prefix) chosen[atomicAdd(&search.num_chosen, 1)] = rank;
        if (head == prefix) staged[atomicAdd(&search.num_staged, 1)] = rank;
    }
    __syncthreads();
    for (int i = slice; i < search.num_staged; i += kSlices) {
        const uint64 rank = staged[i];
        int larger = 0;
        for (int j = 0; j < search.num_staged; ++j) larger += staged[j] > rank;
        if (larger < search.need) chosen[atomicAdd(&search.num_chosen, 1)] = rank;
    }
    __syncthreads();
}

// Write the ids of a row's chosen blocks, ascending.
__device__ int write_ids(const Shared& shared, int capacity, int* out) {
    const int tile = threadIdx.x % TILE, slice = threadIdx.x / TILE;
    const uint64* const chosen = shared.chosen + tile * capacity;
    const int count = shared.search[tile].num_chosen;
    for (int i = slice; i < count; i += kSlices) {
        const int id = id_of(chosen[i]);
        int place = 0;
        for (int j = 0; j < count; ++j) place += id_of(chosen[j]) < id;
        out[place] = id;
    }
    __syncthreads();
    return count;
}

__device__ void finish_row(const Plan& plan, int64 row, int base, int* indices, int* counts) {
    const int slice = threadIdx.x / TILE;
    if (plan.finish)
        for (int64 i = base + slice; i < plan.width; i += kSlices)
            indices[row * plan.width + i] = -1;
    if (slice == 0) counts[row] = base;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
block_topk_long(const float* __restrict__ scores, const int* __restrict__ valid,
                const int* __restrict__ local, int* __restrict__ indices,
                int* __restrict__ counts, const __grid_constant__ Plan plan, int capacity) {
    const Shared shared = shared_memory(capacity);
    const unsigned tiles = (plan.size[2] + TILE - 1) / TILE;
    const unsigned outer = blockIdx.x / tiles;
    const unsigned i2 = (blockIdx.x - outer * tiles) * TILE + threadIdx.x % TILE;
    const bool active = i2 < plan.size[2];
    const unsigned i0 = outer / plan.size[1], i1 = outer - i0 * plan.size[1];
    Row row = row_at(plan, scores, valid, local, i0, i1, active ? i2 : 0);
    if (!active) row.valid = 0;
    int* const out = indices + row.out * plan.width;
    int base = plan.resume && active ? counts[row.out] : 0;
    for (int s = 0; s < plan.num_spans; ++s) {
        const Span span = plan.spans[s];
        const int length = max(0, min(span.stop, row.valid) - span.start);
        if (span.budget == kKeep) {
            for (int i = threadIdx.x / TILE; i < length; i += kSlices)
                out[base + i] = span.start + i;
            base += length;
            continue;
        }
        choose(ScoredBlocks{row, span.start, length}, span.budget, capacity, shared);
        base += write_ids(shared, capacity, out + base);
    }
    __syncthreads();  // every thread has read counts before one writes it
    if (active) finish_row(plan, row.out, base, indices, counts);
}

#if TILE == 1

// The k best blocks of part blockIdx.y of row blockIdx.x, as ranks, 0 where there are fewer.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
block_topk_parts(const float* __restrict__ scores, const int* __restrict__ valid,
                 const int* __restrict__ local, uint64* __restrict__ parts,
                 const __grid_constant__ Plan plan, int capacity, int part_blocks) {
    const Shared shared = shared_memory(capacity);
    const Row row = row_at(plan, scores, valid, local, blockIdx.x);
    const Span span = plan.spans[0];
    const int start = span.start + blockIdx.y * part_blocks;
    const int length = max(0, min(min(start + part_blocks, span.stop), row.valid) - start);
    choose(ScoredBlocks{row, start, length}, span.budget, capacity, shared);
    uint64* const out = parts + (static_cast<int64>(blockIdx.x) * gridDim.y + blockIdx.y) * span.budget;
    for (int i = threadIdx.x; i < span.budget; i += kThreads)
        out[i] = i < shared.search[0].num_chosen ? shared.chosen[i] : 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
block_topk_merge(const uint64* __restrict__ parts, int* __restrict__ indices,
                 int* __restrict__ counts, const __grid_constant__ Plan plan, int capacity,
                 int num_parts) {
    const Shared shared = shared_memory(capacity);
    const int budget = plan.spans[0].budget, length = num_parts * budget;
    const uint64* const ranks = parts + static_cast<int64>(blockIdx.x) * length;
    const int64 row = row_at(plan, nullptr, nullptr, nullptr, blockIdx.x).out;
    choose(ListedBlocks{ranks, length}, budget, capacity, shared);
    const int count = write_ids(shared, capacity, indices + row * plan.width);
    finish_row(plan, row, count, indices, counts);
}

#endif
#endif
