
// block_topk_long: rows of spans of any length. TILE rows (1, or 32 adjacent ones for COLUMNS) to a
// thread block; a histogram of digits of (key, lowest id first) is refined until the digit that
// holds the k-th block has at most STAGE blocks, which are then ranked. Ids are digits too: ties end.
// block_topk_parts, block_topk_merge: one very long row over many thread blocks. The k best of each
// part go to a workspace, and the best of those are the best of the row.
//
// No result depends on the order of atomics: they fill lists that are ranked afterwards.
//
// Constants: COLUMNS, THREADS, TILE, DIGIT_BITS, STAGE.

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
