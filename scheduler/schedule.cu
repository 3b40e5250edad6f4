// Work items of KV-outer attention, by a stable counting sort; compiled after the text of csr.cu.
//
// A row of n entries makes n / target full items and one of the rest. An item weighs its tiles, 1
// to `heaviest` <= MAX_WEIGHTS; bucket b holds the items of weight heaviest - b, so bucket 0 comes
// first and holds all full items. Rows of all heads, in order, are cut into groups of
// rows_per_group, at most MAX_GROUPS of them.
//
//   kernel                   does
//   prefix_and_weigh         csr.cu's prefix; counts the items of each group and bucket
//   row_bounds_and_weigh     csr.cu's row_bounds, the same
//   scatter_and_place        csr.cu's scatter; each group places its items
//   place                    each group places its items
//   mark_edges               of a CSR alone: bits of its edges; counts the items
//   number_and_place         of a CSR alone: slots and numbers of partials; each group places
//
// An item's position is that of its bucket, plus the items of the groups, rows and row parts
// before it: prefix sums, no ordered atomics. A group costs O(rows_per_group + MAX_GROUPS), so that
// the whole is linear in rows.

constexpr int MAX_WEIGHTS = 128;
constexpr int PLACE_ROUNDS = 4;
constexpr int STEP_ROWS = THREADS * PLACE_ROUNDS;  // rows that a CTA takes at a time
constexpr int ITEM_FIELDS = 6;

struct Split {
    int target, queries_per_tile, heaviest, groups;
    long long rows_per_group;

    // Bucket of a row's last item, EMPTY where all its items are full.
    __device__ int last_bucket(index_t length) const {
        const int rest = static_cast<int>(length % target);
        return rest ? heaviest - (rest + queries_per_tile - 1) / queries_per_tile : EMPTY;
    }
    __device__ void weigh(int* weights, long long row, index_t length) const {
        if (length <= 0) return;
        int* of_group = weights + row / rows_per_group * heaviest;
        const int full = static_cast<int>(length / target), bucket = last_bucket(length);
        if (full) atomicAdd(&of_group[0], full);
        if (bucket != EMPTY) atomicAdd(&of_group[bucket], 1);
    }
};

struct Rows {
    const index_t* row_ptr;  // [heads, num_rows + 1]
    const int2* coords;      // [num_rows]
    int heads, num_rows;

    __device__ long long count() const { return static_cast<long long>(heads) * num_rows; }
    __device__ index_t length(long long row) const {
        const index_t* begin = row_ptr + row + row / num_rows;  // a head has one pointer more
        return max(begin[1] - begin[0], index_t(0));
    }
};

struct PlaceMemory {
    int count[WARPS][MAX_WEIGHTS];  // items of a warp's rows by bucket, then their positions
    int position[MAX_WEIGHTS];      // of the next item of each bucket
    int first[STEP_ROWS];           // position of each row's first item in bucket 0
    int scratch[32];
    int total[MAX_WEIGHTS];
    int before[MAX_WEIGHTS];
};

// First item of each bucket of a group; returns the number of all items.
__device__ int open_buckets(const int* weights, const Split& split, int group,
                            PlaceMemory& memory) {
    const int bucket = threadIdx.x % MAX_WEIGHTS;
    if (threadIdx.x < MAX_WEIGHTS) memory.total[bucket] = memory.before[bucket] = 0;
    __syncthreads();
    if (bucket < split.heaviest) {
        int total = 0, before = 0;
#pragma unroll 8
        for (int other = threadIdx.x / MAX_WEIGHTS; other < split.groups;
             other += THREADS / MAX_WEIGHTS) {
            const int items = weights[static_cast<long long>(other) * split.heaviest + bucket];
            total += items;
            before += other < group ? items : 0;
        }
        atomicAdd(&memory.total[bucket], total);
        atomicAdd(&memory.before[bucket], before);
    }
    __syncthreads();
    const bool mine = threadIdx.x < MAX_WEIGHTS;
    const Scan<int> scan = sum_block(mine ? memory.total[bucket] : 0, memory.scratch);
    if (mine) memory.position[bucket] = scan.before + memory.before[bucket];
    __syncthreads();
    return scan.all;
}

__device__ void write_item(int* work_items, int position, const Rows& rows, long long row,
                           int begin, int count) {
    const int of_head = static_cast<int>(row % rows.num_rows);
    const int2 coords = rows.coords[of_head];
    int* item = work_items + static_cast<long long>(position) * ITEM_FIELDS;
    item[0] = static_cast<int>(row / rows.num_rows);
    item[1] = of_head;
    item[2] = begin;
    item[3] = count;
    item[4] = coords.x;
    item[5] = coords.y;
}

// Place the items of STEP_ROWS rows from `first_row` on; each warp owns 128 of them.
__device__ void place_step(const Rows& rows, const Split& split, long long first_row,
                           long long end_row, int* work_items, PlaceMemory& memory) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int own = warp * (32 * PLACE_ROUNDS) + lane;
    for (int bucket = lane; bucket < MAX_WEIGHTS; bucket += 32) memory.count[warp][bucket] = 0;
    __syncwarp();
    int last[PLACE_ROUNDS], rank[PLACE_ROUNDS], in_first = 0;
    index_t length[PLACE_ROUNDS];
#pragma unroll
    for (int round = 0; round < PLACE_ROUNDS; ++round) {
        const long long row = first_row + own + round * 32;
        length[round] = row < end_row ? rows.length(row) : 0;
        last[round] = split.last_bucket(length[round]);

        const int items = static_cast<int>(length[round] / split.target) + (last[round] == 0);
        int through = items;  // of bucket 0
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(ALL, through, step);
            if (lane >= step) through += other;
        }
        memory.first[own + round * 32] = in_first + through - items;
        in_first += __shfl_sync(ALL, through, 31);

        const bool valid = last[round] > 0;
        unsigned peers = __ballot_sync(ALL, valid);
        for (int bit = 1; bit < MAX_WEIGHTS; bit *= 2) {
            const bool set = last[round] & bit;
            const unsigned vote = __ballot_sync(ALL, set);
            peers &= set ? vote : ~vote;
        }
        const int lower = __popc(peers & ((1u << lane) - 1));
        const int before = valid ? memory.count[warp][last[round]] : 0;
        __syncwarp();
        if (valid && lower == 0) memory.count[warp][last[round]] = before + __popc(peers);
        __syncwarp();
        rank[round] = before + lower;
    }
    if (lane == 0) memory.count[warp][0] = in_first;
    const int full_begin = memory.position[0];
    __syncthreads();
    if (threadIdx.x < MAX_WEIGHTS) {
        int next = memory.position[threadIdx.x];
        for (int other = 0; other < WARPS; ++other) {
            const int items = memory.count[other][threadIdx.x];
            memory.count[other][threadIdx.x] = next;
            next += items;
        }
        memory.position[threadIdx.x] = next;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < PLACE_ROUNDS; ++round) {
        memory.first[own + round * 32] += memory.count[warp][0];
        if (last[round] > 0) {
            const int rest = static_cast<int>(length[round] % split.target);
            write_item(work_items, memory.count[warp][last[round]] + rank[round], rows,
                       first_row + own + round * 32, static_cast<int>(length[round] - rest), rest);
        }
    }
    __syncthreads();
    // Bucket 0 item by item: a hot row has many.
    for (int at = full_begin + threadIdx.x; at < memory.position[0]; at += THREADS) {
        const int owner = upper_bound(memory.first, STEP_ROWS, at) - 1;
        const index_t begin = static_cast<index_t>(at - memory.first[owner]) * split.target;
        const index_t left = rows.length(first_row + owner) - begin;
        write_item(work_items, at, rows, first_row + owner, static_cast<int>(begin),
                   static_cast<int>(min(left, static_cast<index_t>(split.target))));
    }
    __syncthreads();
}

__device__ void place_group(const Rows& rows, const Split& split, int group, const int* weights,
                            int capacity, int* work_items, int* num_items, PlaceMemory& memory) {
    const int items = open_buckets(weights, split, group, memory);
    if (items > capacity) __trap();  // work_capacity proves that this cannot be
    if (group == 0 && threadIdx.x == 0) *num_items = items;
    const long long stride = static_cast<long long>(split.groups) * THREADS;
    const long long tail = static_cast<long long>(items) * ITEM_FIELDS;
    for (long long i = tail + group * THREADS + threadIdx.x;
         i < static_cast<long long>(capacity) * ITEM_FIELDS; i += stride)
        work_items[i] = EMPTY;
    const long long begin = group * split.rows_per_group;
    const long long end = min(rows.count(), begin + split.rows_per_group);
    for (long long row = begin; row < end; row += STEP_ROWS)
        place_step(rows, split, row, end, work_items, memory);
}

extern "C" __global__ void __launch_bounds__(32 * PREFIX_WARPS, 1) prefix_and_weigh(
    index_t* counts, long long tiles, int bins, index_t* totals, index_t* bin_ptr, int* finished,
    int target, int queries_per_tile, int heaviest, int groups, long long rows_per_group,
    int* weights) {
    const Bins found = prefix_bins(counts, tiles, bins, totals, bin_ptr, finished);
    const Split split{target, queries_per_tile, heaviest, groups, rows_per_group};
    if (found.valid)
        split.weigh(weights, static_cast<long long>(found.head) * bins + found.bin, found.total);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_bounds_and_weigh(
    const int* sorted, long long slots, const index_t* bin_ptr, int bins, int heads, int num_rows,
    index_t* row_ptr, int target, int queries_per_tile, int heaviest, int groups,
    long long rows_per_group, int* weights) {
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const long long head = i / (num_rows + 1LL);
    const int row = static_cast<int>(i % (num_rows + 1LL));
    index_t begin = 0, count = 0;
    if (head < heads) {
        count = bin_ptr[head * (bins + 1) + bins];
        begin = row_begin(sorted + head * slots, count, row);
        row_ptr[i] = begin;
    }
    index_t end = __shfl_down_sync(ALL, begin, 1);
    if (head >= heads || row == num_rows) return;
    if (threadIdx.x % 32 == 31) end = row_begin(sorted + head * slots, count, row + 1);
    const Split split{target, queries_per_tile, heaviest, groups, rows_per_group};
    split.weigh(weights, head * num_rows + row, end - begin);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) scatter_and_place(
    const int* ids, long long head_stride, long long token_stride, long long lane_stride,
    unsigned width, long long slots, int heads, long long tiles,
    const int* q_start, const int* row_start, const Blocks* blocks, int batch,
    int shift, int bits, int bins, const index_t* counts, const index_t* bin_ptr,
    int* rows_out, index_t* edges_out, int* q_indices, int* split_slot, const int* row_q_start,
    const unsigned* placed, int* split_counts,
    const int2* row_coords, int target, int queries_per_tile, int heaviest, int groups,
    long long rows_per_group, const int* weights, int capacity, int* work_items, int* num_items) {
    __shared__ union {
        ScatterMemory scatter;
        PlaceMemory place;
    } memory;
    if (blockIdx.x < groups) {
        place_group({bin_ptr, row_coords, heads, bins},
                    {target, queries_per_tile, heaviest, groups, rows_per_group}, blockIdx.x,
                    weights, capacity, work_items, num_items, memory.place);
        return;
    }
    scatter_table({ids, head_stride, token_stride, lane_stride, width, slots},
                  {q_start, row_start, blocks, batch}, blockIdx.x - groups, heads, tiles,
                  {shift, bits, bins}, counts, bin_ptr,
                  {rows_out, edges_out, q_indices, split_slot, row_q_start, placed, width, slots},
                  split_counts, memory.scatter);
}

extern "C" __global__ void __launch_bounds__(THREADS) place(
    const index_t* row_ptr, const int2* row_coords, int heads, int num_rows, int target,
    int queries_per_tile, int heaviest, int groups, long long rows_per_group, const int* weights,
    int capacity, int* work_items, int* num_items) {
    __shared__ PlaceMemory memory;
    place_group({row_ptr, row_coords, heads, num_rows},
                {target, queries_per_tile, heaviest, groups, rows_per_group}, blockIdx.x, weights,
                capacity, work_items, num_items, memory);
}

// The first CTAs take entries, the others rows. `placed` and `weights` are zero before.
extern "C" __global__ void __launch_bounds__(THREADS) mark_edges(
    const index_t* edge_ids, long long slots, int heads, long long entry_blocks, unsigned* placed,
    const index_t* row_ptr, int num_rows, int target, int queries_per_tile, int heaviest,
    int groups, long long rows_per_group, int* weights) {
    if (blockIdx.x < entry_blocks) {
        const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
        if (i >= heads * slots) return;
        const long long edge = edge_ids[i];
        if (edge >= 0 && edge < slots)
            atomicOr(&placed[i / slots * words_of(slots) + edge / 32], 1u << edge % 32);
        return;
    }
    const Rows rows{row_ptr, nullptr, heads, num_rows};
    const long long row = (blockIdx.x - entry_blocks) * THREADS + threadIdx.x;
    const Split split{target, queries_per_tile, heaviest, groups, rows_per_group};
    if (row < rows.count()) split.weigh(weights, row, rows.length(row));
}

// CTAs of groups, then of entries, then of (token, head).
extern "C" __global__ void __launch_bounds__(THREADS) number_and_place(
    const index_t* edge_ids, unsigned width, long long slots, int heads, long long entry_blocks,
    const unsigned* placed, int* split_slot, int* split_counts,
    const index_t* row_ptr, const int2* row_coords, int num_rows, int target,
    int queries_per_tile, int heaviest, int groups, long long rows_per_group, const int* weights,
    int capacity, int* work_items, int* num_items) {
    __shared__ PlaceMemory memory;
    if (blockIdx.x < groups) {
        place_group({row_ptr, row_coords, heads, num_rows},
                    {target, queries_per_tile, heaviest, groups, rows_per_group}, blockIdx.x,
                    weights, capacity, work_items, num_items, memory);
        return;
    }
    const long long block = blockIdx.x - groups;
    if (block < entry_blocks) {
        const long long i = block * THREADS + threadIdx.x;
        if (i >= heads * slots) return;
        const long long edge = edge_ids[i];
        const bool valid = edge >= 0 && edge < slots;
        split_slot[i] = valid ? bits_between(placed + i / slots * words_of(slots),
                                             edge - edge % width, edge)
                              : EMPTY;
        return;
    }
    const long long i = (block - entry_blocks) * THREADS + threadIdx.x;
    const long long token = i / heads;
    if (token < slots / width)
        split_counts[i] = bits_between(placed + i % heads * words_of(slots), token * width,
                                       (token + 1) * width);
}
