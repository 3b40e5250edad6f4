
// block_topk_short: rows whose spans have up to GROUP * ITEMS blocks. A row belongs to GROUP lanes
// of a warp, which hold its scores in registers. ROWS: blocks of a row are adjacent in memory.
// COLUMNS: rows are (scores [H, n, Tq]); 32 of them pass through shared memory together.
//
// Constants: COLUMNS; FORCED, REGIONS (at most one of them); GROUP, ITEMS, THREADS.

constexpr unsigned kSign = 0x80000000u;
constexpr float kBase = 8388608.0f;  // 2^23: from here to 2^24 floats are the whole numbers
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
constexpr int kWordBlocks = 32 % ITEMS ? 32 : ITEMS;

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

// Quick choice. A score's place is a whole number between kBase and kTop, in a float: the largest
// score of the row lies at kTop, the smallest of the members' largest scores kReach below. Places
// are ordered like scores, so that `count` places over a cut are the `count` best scores, whatever
// was rounded. saturate(place - cut) is 1 for a place over the cut and 0 for the others, NaN
// included: a count takes two instructions an item, both at the full rate of the FP32 units. Ties,
// scores too close or too far apart, and infinite ones leave a wrong count; then exact_choice runs.
constexpr float kTop = 16777216.0f - 131072.0f;
constexpr float kReach = (kTop - kBase) / 3.0f;

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

// One bit for each of a member's items that it chooses. `everything`: there are no more blocks than
// may be chosen, and all but NaN and -inf are. `forced` is the score of a block that is chosen
// anyway and must not count, or NaN; `finite` says that no score is +inf.
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
        GROUP == 8 ? 16.0f : GROUP == 16 ? 44.0f : 111.0f;
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
    // Transpose the 8 x 8 matrix of four-bit digits that eight lanes hold, then order the lanes.
    const int lane = group.lane;
    items = __byte_perm(items, __shfl_xor_sync(kAll, items, 4), lane & 4 ? 0x3276 : 0x5410);
    items = __byte_perm(items, __shfl_xor_sync(kAll, items, 2), lane & 2 ? 0x3715 : 0x6240);
    const unsigned other = __shfl_xor_sync(kAll, items, 1), low = 0x0F0F0F0Fu;
    items = lane & 1 ? (items & ~low) | (other >> 4 & low) : (items & low) | (other & low) << 4;
    constexpr int kEights = GROUP / 8, kParts = 32 / kWordBlocks;
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
