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
// Constants: COLUMNS, REGIONS and GROUP, ITEMS for the short kernel; THREADS, TILE, DIGIT_BITS, STAGE
// for the others.

typedef long long int64;
typedef unsigned long long uint64;

constexpr unsigned kNever = 0u, kLocal = 0xFFFFFFFEu, kForced = 0xFFFFFFFFu, kAll = 0xFFFFFFFFu;
constexpr int kKeep = -1;  // the budget of a kept span
constexpr int kMaxSpans = 32;

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
    int64 out;  // its place among the output rows
    int valid, local, first, last;

    __device__ unsigned key(int id) const {
        if (id >= valid) return kNever;
        if (id < first || id >= valid - last) return kForced;
        return id == local ? kLocal : order(scores[id * stride]);
    }

    static __device__ unsigned order(float score) {
        const unsigned bits = __float_as_uint(score);
        const unsigned key = static_cast<int>(bits) < 0 ? 0u - bits : bits | 0x80000000u;
        return score > -__int_as_float(0x7F800000) ? key : kNever;
    }
};

__device__ Row row_at(const Plan& plan, const float* scores, const int* valid, const int* local,
                      unsigned i0, unsigned i1, unsigned i2) {
    Row row;
    row.scores = scores + i0 * plan.score_stride[0] + i1 * plan.score_stride[1]
                 + i2 * plan.score_stride[2];
    row.stride = plan.block_stride;
    row.out = i0 * plan.out_stride[0] + i1 * plan.out_stride[1] + i2 * plan.out_stride[2];
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

// What the threads of one row say to each other: sum, largest, and the sum over earlier members of
// a value; any over the threads that run together (a warp, or for COLUMNS the thread block).
#if COLUMNS
constexpr int kThreads = 32 * GROUP;

struct Group {
    unsigned (*slots)[GROUP][32];
    int member, lane, phase;

    template <class Join>
    __device__ unsigned join(unsigned value, Join joined) {
        slots[phase][member][lane] = value;
        __syncthreads();
        unsigned all = 0;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) all = joined(all, slots[phase][i][lane], i);
        phase ^= 1;  // the next exchange writes the other half: one barrier each is enough
        return all;
    }
    __device__ unsigned sum(unsigned value) {
        return join(value, [](unsigned all, unsigned one, int) { return all + one; });
    }
    __device__ unsigned largest(unsigned value) {
        return join(value, [](unsigned all, unsigned one, int) { return max(all, one); });
    }
    __device__ unsigned before(unsigned value) {
        const int me = member;
        return join(value, [me](unsigned all, unsigned one, int i) {
            return i < me ? all + one : all;
        });
    }
    __device__ bool any(bool value) const { return __syncthreads_or(value); }
};
#else
constexpr int kThreads = 256;

struct Group {
    int member, lane;

    __device__ unsigned sum(unsigned value) const {
        if constexpr (GROUP == 32) {
            return __reduce_add_sync(kAll, value);
        } else {
            for (int step = 1; step < GROUP; step *= 2) value += __shfl_xor_sync(kAll, value, step);
            return value;
        }
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
    __device__ unsigned before(unsigned value) const {
        unsigned total = value;
        for (int step = 1; step < GROUP; step *= 2) {
            const unsigned earlier = __shfl_up_sync(kAll, total, step, GROUP);
            if (member >= step) total += earlier;
        }
        return total - value;
    }
    __device__ bool any(bool value) const { return __any_sync(kAll, value); }
};
#endif

// Item j of a member is block `offset` of the span.
__device__ int offset(int member, int j) {
    return COLUMNS ? member * ITEMS + j : j * GROUP + member;
}

// The blocks of one member's word of chosen blocks begin here.
constexpr int kWordBlocks = COLUMNS ? ITEMS : 32;

// The keys of a member's items; `at` is its first item.
__device__ __forceinline__ void load_keys(unsigned (&keys)[ITEMS], int member, const float* at,
                                          int64 stride, int length) {
    const int64 step = stride * (offset(0, 1) - offset(0, 0));
    constexpr int kBatch = 8;  // loads whose addresses are held at once
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        keys[j] = 0xFF800000u;  // -inf
        if (offset(member, j) < length) keys[j] = __float_as_uint(__ldg(at + j % kBatch * step));
        if (j % kBatch == kBatch - 1) {
            at += kBatch * step;
            asm volatile("" : "+l"(at));
        }
    }
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) keys[j] = Row::order(__uint_as_float(keys[j]));
}

// One bit for each item of a member whose offset is below a bound.
__device__ unsigned items_below(int member, int bound) {
    const int items = COLUMNS ? bound - member * ITEMS : (bound - member + GROUP - 1) / GROUP;
    return items >= 32 ? kAll : (1u << max(items, 0)) - 1u;
}

// Raise the keys of forced blocks; the span is the whole row.
__device__ void force_keys(unsigned (&keys)[ITEMS], int member, const Row& row) {
    const unsigned valid = items_below(member, row.valid);
    const unsigned ends = items_below(member, row.first)
                          | ~items_below(member, max(0, row.valid - row.last));
    unsigned local = 0;
    if (row.local >= 0 && row.local < row.valid)
        local = items_below(member, row.local) ^ items_below(member, row.local + 1);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        if (local >> j & 1) keys[j] = kLocal;
        if ((ends & valid) >> j & 1) keys[j] = kForced;
    }
}

// One bit for each block of the member's word, from a predicate of its items.
template <class Predicate>
__device__ unsigned word_of(const Group& group, Predicate holds) {
    unsigned word = 0;
#if COLUMNS
#pragma unroll
    for (int j = 0; j < ITEMS; ++j)
        if (holds(j)) word |= 1u << j;
#else
    // A ballot has GROUP bits of each row of the warp: parts of a row's words, 32 / GROUP to a word.
    const unsigned row = group.lane / GROUP;
#pragma unroll
    for (int j = 0; j < ITEMS; j += 32 / GROUP) {
        unsigned found = __ballot_sync(kAll, holds(j));
        if constexpr (GROUP == 16) {
            found = __byte_perm(found, __ballot_sync(kAll, holds(j + 1)), row ? 0x7632 : 0x5410);
        } else if constexpr (GROUP == 8) {
            const unsigned pick = row | (row + 4) << 4;
            const unsigned low = __byte_perm(found, __ballot_sync(kAll, holds(j + 1)), pick);
            const unsigned third = __ballot_sync(kAll, holds(j + 2));
            const unsigned high = __byte_perm(third, __ballot_sync(kAll, holds(j + 3)), pick);
            found = __byte_perm(low, high, 0x5410);
        }
        if (group.member == j / (32 / GROUP)) word = found;
    }
#endif
    return word;
}

// For each member, the smallest of its RANK largest keys.
template <int RANK>
__device__ unsigned ranked_key(const unsigned (&keys)[ITEMS]) {
    unsigned best[RANK] = {};
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
        unsigned key = keys[j];
#pragma unroll
        for (int i = 0; i < RANK; ++i) {
            const unsigned smaller = min(best[i], key);
            best[i] = max(best[i], key);
            key = smaller;
        }
    }
    return best[RANK - 1];
}

// Add 1 if the key is at least the pivot, in two instructions where the compiler takes three.
__device__ __forceinline__ void count_up(unsigned& count, unsigned key, unsigned pivot) {
    asm("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p add.u32 %0, %0, 1; }"
        : "+r"(count) : "r"(key), "r"(pivot));
}

// The k-th largest key of a row, or a key that parts the k largest from the others; 1 where fewer
// than k can be chosen. `length` bounds how many can.
//
// Between lo (at least k keys are as large; 0 stands for all) and hi (fewer than k are larger) a
// pivot is interpolated from the counts, and halves the interval where the last one did not. One
// key short of k, the answer is the largest key up to hi.
__device__ unsigned kth_largest(Group& group, const unsigned (&keys)[ITEMS], int k, int length) {
    const unsigned best = ranked_key<1>(keys);
    unsigned hi = group.largest(best), lo = 0;
    int above = 0, at_least = GROUP * ITEMS;
    if (k <= 3 * GROUP) {  // the RANK largest of each member make at least k keys
        const unsigned rank = k <= GROUP       ? best
                              : k <= 2 * GROUP ? ranked_key<2>(keys)
                                               : ranked_key<3>(keys);
        lo = ~group.largest(~rank);
        at_least = min(at_least, 2 * k);  // a guess: the true count is not needed
    }
    bool searching = length > k, one_short = false, halve = false;
    if (!searching) lo = 0;
    while (true) {
        if (searching && lo >= hi) searching = false;
        if (searching && above == k - 1) {
            one_short = true;
            searching = false;
        }
        if (!group.any(searching)) break;
        const unsigned width = hi - lo;
        const float share = halve ? 0.5f : __fdividef(at_least - k + 0.5f, at_least - above);
        const unsigned step = min(width - 1, static_cast<unsigned>(share * width));
        const unsigned pivot = lo + 1 + step;
        unsigned mine = 0;
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) count_up(mine, keys[j], pivot);
        const int count = group.sum(mine);
        if (!searching) continue;
        if (count >= k) {
            lo = pivot;
            at_least = count;
            if (count == k) searching = false;
        } else {
            hi = pivot - 1;
            above = count;
        }
        halve = !halve && (hi - lo) > width / 2;
    }
    if (group.any(one_short)) {
        unsigned mine = 0;
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) mine = max(mine, keys[j] <= hi ? keys[j] : 0u);
        const unsigned below = group.largest(mine);
        if (one_short) lo = below;
    }
    return max(lo, 1u);
}

// Take the last `excess` of a row's tied blocks out of its words.
__device__ unsigned drop_ties(Group& group, unsigned word, unsigned tied, int excess) {
    const int before = group.before(__popc(tied)), total = group.sum(__popc(tied));
    int keep = max(0, total - excess - before);
    unsigned kept = tied;
    while (__popc(kept) > keep) kept ^= 0x80000000u >> __clz(kept);
    return (word & ~tied) | kept;
}

extern "C" __global__ void __launch_bounds__(kThreads, (REGIONS ? 512 : 1024) / kThreads)
block_topk_short(const float* __restrict__ scores, const int* __restrict__ valid,
                 const int* __restrict__ local, int* __restrict__ indices,
                 int* __restrict__ counts, const __grid_constant__ Plan plan) {
    Group group;
    group.lane = threadIdx.x % 32;
#if COLUMNS
    __shared__ unsigned slots[2][GROUP][32];
    group.slots = slots;
    group.phase = 0;
    group.member = threadIdx.x / 32;
    const unsigned tiles = (plan.size[2] + 31) / 32;
    const unsigned outer = blockIdx.x / tiles;
    const unsigned i2 = (blockIdx.x - outer * tiles) * 32 + group.lane;
    const bool active = i2 < plan.size[2];
    const unsigned i0 = outer / plan.size[1], i1 = outer - i0 * plan.size[1];
    Row row = row_at(plan, scores, valid, local, i0, i1, active ? i2 : 0);
#else
    group.member = group.lane % GROUP;
    const unsigned index = blockIdx.x * (kThreads / GROUP) + threadIdx.x / GROUP;
    const bool active = index < plan.size[0] * plan.size[1] * plan.size[2];
    Row row = row_at(plan, scores, valid, local, active ? index : 0);
#endif
    if (!active) row.valid = 0;
    int* const out = indices + row.out * plan.width;
    int base = plan.resume && active ? counts[row.out] : 0;
    const bool forcing = !REGIONS && (plan.first || plan.last || local);

    for (int s = 0; s < (REGIONS ? plan.num_spans : 1); ++s) {
        const Span span = plan.spans[s];
        const int length = max(0, min(span.stop, row.valid) - span.start);
        if (REGIONS && span.budget == kKeep) {
            for (int i = group.member; i < length; i += GROUP) out[base + i] = span.start + i;
            base += length;
            continue;
        }
        unsigned keys[ITEMS];
        const float* at = row.scores + (span.start + offset(group.member, 0)) * row.stride;
        if (!COLUMNS && row.stride == 1)
            load_keys(keys, group.member, at, 1, length);
        else
            load_keys(keys, group.member, at, row.stride, length);
        if (forcing) force_keys(keys, group.member, row);
        const unsigned least = kth_largest(group, keys, span.budget, length);
        unsigned word = word_of(group, [&](int j) { return keys[j] >= least; });
        int chosen = group.sum(__popc(word));
        if (group.any(chosen > span.budget)) {
            const unsigned tied = word_of(group, [&](int j) { return keys[j] == least; });
            word = drop_ties(group, word, tied, max(0, chosen - span.budget));
            chosen = min(chosen, span.budget);
        }
        int place = base + group.before(__popc(word));
        const int first_id = span.start + group.member * kWordBlocks;
        for (; word; word &= word - 1) out[place++] = first_id + __ffs(word) - 1;
        base += chosen;
    }
    if (plan.resume) group.any(false);  // every member has read counts before one writes it
    if (!active) return;
    if (plan.finish)
        for (int64 i = base + group.member; i < plan.width; i += GROUP) out[i] = -1;
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
