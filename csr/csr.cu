// The q2k -> k2q transposition as a stable counting sort of edges by row: rows ascending by query
// without a single ordered atomic. Compile with -DWIDE=0, or 1 where a head has 2^31 slots or more.
//
// An edge is slot e = token * K + lane of a head's table; its row is the KV block that it names.
// A head's slots are cut into tiles of TILE slots, taken in order by 8 warps of 256 slots each.
//
//   kernel         CTAs                    does
//   build_row_map  1                       running sums over the sequences, clamped; zeroes counters
//   hist           heads x tiles, rows     counts of each tile by digit; bits of placed edges;
//                                          coordinates of rows
//   prefix         heads x bins / 32       tile_prefix: counts become offsets among the tiles;
//                                          row_prefix: the last CTA of a head sums up its bins
//   scatter        heads x tiles           rank in the tile, by ballots; writes in runs of a bin
//
// Up to MAX_BINS rows, the digit is the row and one pass does it. More rows take several passes
// over digits of at most 10 bits, least significant first (hist_pairs, prefix, scatter_pairs), and
// row_bounds then finds the rows in the sorted list. Counts take heads * tiles * bins entries, at
// most heads * (5 / 8 E + MAX_BINS) for E slots a head, since bins <= MAX_BINS = 5 / 8 TILE.
//
// Order. Inside a warp, ballots rank equal digits by lane; warps, tiles and passes are combined by
// prefix sums. Atomics only count: integer sums are the same in any order.
//
// Transposed block lists (mark_lists, pack_lists) go through a bit for each pair of blocks.

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROUNDS = 8;
constexpr int TILE = THREADS * ROUNDS;
constexpr int MAX_BINS = 1280;  // rows of 128k tokens in up to 256 sequences
static_assert(MAX_BINS <= 2 * 1024, "prefix sums two bins a thread");
constexpr int BINS_PER_THREAD = MAX_BINS / THREADS;
constexpr int PREFIX_WARPS = 32;  // of prefix: tiles are summed in so many chunks
constexpr int LISTS_KV = 4096;    // KV blocks of a CTA of mark_lists
constexpr int EMPTY = -1;
constexpr unsigned ALL = 0xFFFFFFFFu;

#if WIDE
using index_t = long long;
#else
using index_t = int;
#endif

// ---- scans ----

template <typename T>
struct Scan {
    T before, through, all;  // of the threads before this one, including it, and of the block
};

// All threads of the block call it; scratch holds 32 values.
template <typename T, typename Combine>
__device__ Scan<T> scan_block(T value, T identity, T* scratch, Combine combine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    T through = value;
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(ALL, through, step);
        if (lane >= step) through = combine(other, through);
    }
    T before = __shfl_up_sync(ALL, through, 1);
    if (lane == 0) before = identity;
    if (lane == 31) scratch[warp] = through;
    __syncthreads();
    if (warp == 0) {
        T sum = lane < warps ? scratch[lane] : identity;
        for (int step = 1; step < 32; step *= 2) {
            const T other = __shfl_up_sync(ALL, sum, step);
            if (lane >= step) sum = combine(other, sum);
        }
        scratch[lane] = sum;
    }
    __syncthreads();
    const T warps_before = warp ? scratch[warp - 1] : identity;
    const Scan<T> found{combine(warps_before, before), combine(warps_before, through),
                        scratch[warps - 1]};
    __syncthreads();
    return found;
}

template <typename T>
__device__ Scan<T> sum_block(T value, T* scratch) {
    return scan_block(value, T(0), scratch, [](T a, T b) { return a + b; });
}

// First position in [0, count) whose value is greater than `key`; count if there is none.
template <typename T, typename K>
__device__ T upper_bound(const int* values, T count, K key) {
    T low = 0, high = count;
    while (low < high) {
        const T middle = low + (high - low) / 2;
        if (values[middle] <= key) low = middle + 1;
        else high = middle;
    }
    return low;
}

// ---- sequences and rows ----

// What a query token needs of its sequence: block j has row `first + j` where j < count.
struct Blocks {
    int first;  // EMPTY for padding tokens
    int count;  // blocks that have a row, 0 for padding tokens
};

struct RowMap {
    const int* q_start;    // [batch + 1], clamped and non-decreasing
    const int* row_start;  // [batch + 1], not above num_rows
    const Blocks* blocks;  // [batch]
    int batch;
};

__device__ Blocks blocks_of(const RowMap& map, long long token) {
    const int sequence = upper_bound(map.q_start, map.batch + 1, token) - 1;
    if (sequence < 0 || sequence == map.batch) return {EMPTY, 0};
    return map.blocks[sequence];
}

// Lengths come from cu_k, or, where it is null, from `used`, which else shortens them. A
// key_capacity >= 0 clamps offsets to it and makes them non-decreasing, or clamps paged lengths.
extern "C" __global__ void __launch_bounds__(1024) build_row_map(
    const int* cu_q, const int* cu_k, const int* used, int batch, int num_queries, long long block_size,
    int key_capacity, int num_rows, int* q_start, int* row_start, Blocks* blocks,
    int* counters, int num_counters, unsigned long long* num_bad_edges) {
    __shared__ long long scratch[32];
    const auto larger = [](long long a, long long b) { return a > b ? a : b; };
    const bool clamped = key_capacity >= 0;
    for (int i = threadIdx.x; i < num_counters; i += blockDim.x) counters[i] = 0;
    if (threadIdx.x == 0) *num_bad_edges = 0;

    long long last_q = 0, last_key = 0, rows = 0;  // carried from chunk to chunk
    for (long long chunk = 0; chunk <= batch; chunk += blockDim.x) {
        const long long i = chunk + threadIdx.x;  // offset i ends sequence i - 1
        const bool inside = i <= batch, ends = inside && i > 0;
        const long long q = inside ? min(max(cu_q[i], 0), num_queries) : 0;
        const Scan<long long> q_scan = scan_block(larger(q, last_q), 0LL, scratch, larger);

        long long length = 0;
        if (cu_k && clamped) {
            const long long key = inside ? min(max(cu_k[i], 0), key_capacity) : 0;
            const Scan<long long> keys = scan_block(larger(key, last_key), 0LL, scratch, larger);
            length = keys.through - larger(keys.before, last_key);
            last_key = keys.all;
        } else if (ends) {
            length = cu_k ? static_cast<long long>(cu_k[i]) - cu_k[i - 1] : used[i - 1];
            if (clamped) length = min(length, static_cast<long long>(key_capacity));
        }
        if (ends && used) length = min(length, static_cast<long long>(used[i - 1]));
        length = ends ? larger(length, 0) : 0;
        const long long count = (length + block_size - 1) / block_size;
        const Scan<long long> row_scan = sum_block(count, scratch);

        if (inside) {
            const long long limit = num_rows, end = rows + row_scan.through;
            q_start[i] = static_cast<int>(q_scan.through);
            row_start[i] = static_cast<int>(min(end, limit));
            if (ends) {
                const long long first = min(end - count, limit);
                blocks[i - 1] = {static_cast<int>(first), static_cast<int>(min(count, limit - first))};
            }
        }
        last_q = q_scan.all;
        rows += row_scan.all;
    }
}

// Coordinates of rows, and the first query token of their sequence.
__device__ void describe_row(const RowMap& map, int row, int2* row_coords, int* row_q_start) {
    const int sequence = upper_bound(map.row_start + 1, map.batch, row);
    const bool used = sequence < map.batch;
    row_coords[row] = used ? make_int2(sequence, row - map.row_start[sequence])
                           : make_int2(EMPTY, EMPTY);
    row_q_start[row] = used ? map.q_start[sequence] : 0;
}

// ---- edges of a tile ----

struct Table {
    const int* ids;  // [heads, tokens, width] with strides
    long long head_stride, token_stride, lane_stride;
    unsigned width;
    long long slots;  // of a head
};

// The slots of one tile that a thread takes: thread (warp, lane) has warp * 256 + round * 32 + lane.
struct Tile {
    int head;
    long long index, start;  // of the head
    int count;               // slots

    __device__ Tile(long long block, long long tiles, long long slots)
        : head(static_cast<int>(block / tiles)), index(block % tiles), start(index * TILE),
          count(static_cast<int>(max(0LL, min(slots - start, static_cast<long long>(TILE))))) {}
    __device__ int slot(int round) const {
        return threadIdx.x / 32 * (32 * ROUNDS) + round * 32 + threadIdx.x % 32;
    }
};

// Rows of the thread's edges, EMPTY where there is none to place; counts bad edges.
__device__ void read_table(const Table& table, const RowMap& map, const Tile& tile, Blocks* tokens,
                           int (&rows)[ROUNDS], int& bad) {
    const long long first_token = tile.start / table.width;
    const unsigned first_lane = static_cast<unsigned>(tile.start - first_token * table.width);
    int token[ROUNDS];
    const int* ids = table.ids + tile.head * table.head_stride;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const unsigned slot = first_lane + tile.slot(round);
        token[round] = slot / table.width;
        const unsigned lane = slot - token[round] * table.width;
        rows[round] = EMPTY;
        if (tile.slot(round) < tile.count)
            rows[round] = ids[(first_token + token[round]) * table.token_stride +
                              lane * table.lane_stride];
    }
    const int num_tokens = tile.count ? (first_lane + tile.count - 1) / table.width + 1 : 0;
    for (int i = threadIdx.x; i < num_tokens; i += THREADS)
        tokens[i] = blocks_of(map, first_token + i);
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int id = rows[round];
        if (id == EMPTY) continue;
        const Blocks blocks = tokens[token[round]];
        const bool placed = id >= 0 && id < blocks.count;
        rows[round] = placed ? blocks.first + id : EMPTY;
        bad += !placed && blocks.first != EMPTY;
    }
}

__device__ void read_pairs(const int* rows_in, const Tile& tile, long long slots,
                           int (&rows)[ROUNDS]) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int slot = tile.slot(round);
        rows[round] = slot < tile.count ? rows_in[tile.head * slots + tile.start + slot] : EMPTY;
    }
}

struct Digit {
    int shift, bits, bins;
    __device__ int of(int row) const { return row >> shift & ((1 << bits) - 1); }
};

__device__ void count_tile(const int (&rows)[ROUNDS], Digit digit, index_t* counts, int* count) {
    for (int bin = threadIdx.x; bin < digit.bins; bin += THREADS) count[bin] = 0;
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round)
        if (rows[round] != EMPTY) atomicAdd(&count[digit.of(rows[round])], 1);
    __syncthreads();
    for (int bin = threadIdx.x; bin < digit.bins; bin += THREADS) counts[bin] = count[bin];
}

// Words of a head's bits: bit e is set where edge e has a row.
__device__ long long words_of(long long slots) { return (slots + 31) / 32; }

// Set bits in [first, last): of a query's first slots, the slot of a partial.
__device__ int bits_between(const unsigned* words, long long first, long long last) {
    if (first >= last) return 0;
    const long long first_word = first / 32, last_word = last / 32;
    const unsigned from = ALL << first % 32, below = (1u << last % 32) - 1;
    if (first_word == last_word) return __popc(words[first_word] & from & below);
    int count = __popc(words[first_word] & from);
    for (long long word = first_word + 1; word < last_word; ++word) count += __popc(words[word]);
    return below ? count + __popc(words[last_word] & below) : count;
}

extern "C" __global__ void __launch_bounds__(THREADS) hist(
    const int* ids, long long head_stride, long long token_stride, long long lane_stride,
    unsigned width, long long slots, int heads, long long tiles,
    const int* q_start, const int* row_start, const Blocks* blocks, int batch,
    int shift, int bits, int bins, index_t* counts, unsigned* placed,
    unsigned long long* num_bad_edges, int num_rows, int2* row_coords, int* row_q_start) {
    __shared__ Blocks tokens[TILE];
    __shared__ int count[MAX_BINS];
    const RowMap map{q_start, row_start, blocks, batch};
    const long long row_block = blockIdx.x - heads * tiles;
    if (row_block >= 0) {
        const long long row = row_block * THREADS + threadIdx.x;
        if (row < num_rows) describe_row(map, static_cast<int>(row), row_coords, row_q_start);
        return;
    }
    const Table table{ids, head_stride, token_stride, lane_stride, width, slots};
    const Tile tile(blockIdx.x, tiles, slots);
    int rows[ROUNDS], bad = 0;
    read_table(table, map, tile, tokens, rows, bad);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const unsigned word = __ballot_sync(ALL, rows[round] != EMPTY);
        if (threadIdx.x % 32 == 0 && tile.slot(round) < tile.count)
            placed[tile.head * words_of(slots) + (tile.start + tile.slot(round)) / 32] = word;
    }
    bad = __reduce_add_sync(ALL, bad);
    if (bad && threadIdx.x % 32 == 0)
        atomicAdd(num_bad_edges, static_cast<unsigned long long>(bad));
    count_tile(rows, {shift, bits, bins}, counts + static_cast<long long>(blockIdx.x) * bins, count);
}

// Passes after the first: edges are pairs (row, edge), as many as the pass before has placed.
extern "C" __global__ void __launch_bounds__(THREADS) hist_pairs(
    const int* rows_in, long long slots, long long tiles, const index_t* bin_ptr,
    int shift, int bits, int bins, index_t* counts) {
    __shared__ int count[MAX_BINS];
    const int head = static_cast<int>(blockIdx.x / tiles);
    const Tile tile(blockIdx.x, tiles, bin_ptr[head * (bins + 1LL) + bins]);
    int rows[ROUNDS];
    read_pairs(rows_in, tile, slots, rows);
    count_tile(rows, {shift, bits, bins}, counts + static_cast<long long>(blockIdx.x) * bins, count);
}

// ---- prefix sums ----

struct Bins {
    int head, bin;
    index_t total;
    bool valid;
};

// 32 bins of a head: counts [tiles, bins] become sums over the tiles before. The CTA of a head
// that finishes last turns the totals of all bins into bin_ptr [bins + 1]. Returns, in the last
// warp, the total of each lane's bin.
__device__ Bins prefix_bins(index_t* counts, long long tiles, int bins, index_t* totals,
                            index_t* bin_ptr, int* finished) {
    __shared__ index_t sums[PREFIX_WARPS][32];
    __shared__ index_t scratch[32];
    __shared__ bool is_last;
    const int groups = (bins + 31) / 32, head = blockIdx.x / groups;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int bin = blockIdx.x % groups * 32 + lane;
    const bool valid = bin < bins;
    const long long chunk = (tiles + PREFIX_WARPS - 1) / PREFIX_WARPS;
    const long long begin = min(tiles, warp * chunk), end = min(tiles, begin + chunk);
    index_t* column = counts + head * tiles * bins + bin;

    index_t sum = 0;
    if (valid) {
#pragma unroll 8
        for (long long tile = begin; tile < end; ++tile) sum += column[tile * bins];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    index_t before = 0;
    for (int other = 0; other < warp; ++other) before += sums[other][lane];
    const index_t total = before + sum;  // of all tiles, in the last warp
    if (valid) {
        if (warp == PREFIX_WARPS - 1) totals[head * static_cast<long long>(bins) + bin] = total;
#pragma unroll 8
        for (long long tile = begin; tile < end; ++tile) {
            const index_t count = column[tile * bins];
            column[tile * bins] = before;
            before += count;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {  // releases what the barrier has shown it, acquires for the next one
        __threadfence();
        is_last = atomicAdd(&finished[head], 1) == groups - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last) {
        const index_t* of_head = totals + head * static_cast<long long>(bins);
        const int first = 2 * threadIdx.x;
        const index_t even = first < bins ? of_head[first] : 0;
        const index_t odd = first + 1 < bins ? of_head[first + 1] : 0;
        const Scan<index_t> scan = sum_block(even + odd, scratch);
        index_t* starts = bin_ptr + head * (bins + 1LL);
        if (first < bins) starts[first] = scan.before;
        if (first + 1 < bins) starts[first + 1] = scan.before + even;
        if (threadIdx.x == 0) {
            starts[bins] = scan.all;
            finished[head] = 0;  // for the next pass
        }
    }
    return {head, bin, total, valid && warp == PREFIX_WARPS - 1};
}

extern "C" __global__ void __launch_bounds__(32 * PREFIX_WARPS, 1) prefix(
    index_t* counts, long long tiles, int bins, index_t* totals, index_t* bin_ptr, int* finished) {
    prefix_bins(counts, tiles, bins, totals, bin_ptr, finished);
}

// Rows of a list sorted by row: row r begins where the first r' >= r stands.
__device__ index_t row_begin(const int* sorted, index_t count, int row) {
    return upper_bound(sorted, count, row - 1LL);
}

extern "C" __global__ void __launch_bounds__(THREADS) row_bounds(
    const int* sorted, long long slots, const index_t* bin_ptr, int bins, int heads, int num_rows,
    index_t* row_ptr) {
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const long long head = i / (num_rows + 1LL);
    if (head >= heads) return;
    const index_t count = bin_ptr[head * (bins + 1) + bins];
    row_ptr[i] = row_begin(sorted + head * slots, count, static_cast<int>(i % (num_rows + 1LL)));
}

// ---- scatter ----

// Where edges go. Null: not wanted.
struct Placement {
    int* rows;              // row of each edge, for a further pass or row_bounds
    index_t* edges;
    int* q_indices;         // the last pass only
    int* split_slot;
    const int* row_q_start;
    const unsigned* placed;
    unsigned width;
    long long slots;

    __device__ void put(int head, index_t position, int row, long long edge) const {
        const long long at = head * slots + position;
        edges[at] = static_cast<index_t>(edge);
        if (rows) rows[at] = row;
        if (!q_indices) return;
        const long long token = WIDE ? edge / width : static_cast<unsigned>(edge) / width;
        q_indices[at] = static_cast<int>(token - row_q_start[row]);
        if (split_slot)
            split_slot[at] = bits_between(placed + head * words_of(slots), token * width, edge);
    }
    // Slots of the tile past the last edge of the head.
    __device__ void clear(const Tile& tile, index_t count) const {
        if (!q_indices) return;
        const long long end = min(slots, tile.start + TILE);
        for (long long i = max(static_cast<long long>(count), tile.start) + threadIdx.x; i < end;
             i += THREADS) {
            edges[tile.head * slots + i] = EMPTY;
            q_indices[tile.head * slots + i] = EMPTY;
            if (split_slot) split_slot[tile.head * slots + i] = EMPTY;
        }
    }
};

struct ScatterMemory {
    unsigned short count[WARPS][MAX_BINS];
    index_t offset[MAX_BINS];  // position of a bin's run minus its position in the tile
    union {
        Blocks tokens[TILE];
        struct {
            int row[TILE];
            unsigned short slot[TILE];
        } sorted;
    };
    unsigned scratch[32];
};

// Order the edges of a tile by digit, slots ascending inside a bin, and write each bin's run.
// edge_of(slot) is the edge that stands in a slot of the tile.
template <typename EdgeOf>
__device__ void scatter_tile(const int (&rows)[ROUNDS], const Tile& tile, Digit digit,
                             const index_t* offsets, const index_t* starts,
                             const Placement& placement, ScatterMemory& memory, EdgeOf edge_of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int bin = lane; bin < digit.bins; bin += 32) memory.count[warp][bin] = 0;
    __syncwarp();
    int rank[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const bool valid = rows[round] != EMPTY;
        const int bin = digit.of(rows[round]);
        unsigned peers = __ballot_sync(ALL, valid);
        for (int bit = 0; bit < digit.bits; ++bit) {
            const bool set = bin >> bit & 1;
            const unsigned vote = __ballot_sync(ALL, set);
            peers &= set ? vote : ~vote;
        }
        const int lower = __popc(peers & ((1u << lane) - 1));
        const int before = valid ? memory.count[warp][bin] : 0;
        __syncwarp();
        if (valid && lower == 0) memory.count[warp][bin] = before + __popc(peers);
        __syncwarp();
        rank[round] = before + lower;
    }
    __syncthreads();

    // Each thread takes BINS_PER_THREAD bins in turn: sums over the warps, then over the bins.
    unsigned in_bin[BINS_PER_THREAD], in_thread = 0;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        const int bin = threadIdx.x * BINS_PER_THREAD + i;
        in_bin[i] = 0;
        if (bin < digit.bins)
            for (int other = 0; other < WARPS; ++other) in_bin[i] += memory.count[other][bin];
        in_thread += in_bin[i];
    }
    const Scan<unsigned> scan = sum_block(in_thread, memory.scratch);
    unsigned position = scan.before;
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) {
        const int bin = threadIdx.x * BINS_PER_THREAD + i;
        if (bin >= digit.bins) break;
        memory.offset[bin] = starts[bin] + offsets[bin] - static_cast<index_t>(position);
        unsigned next = position;
        for (int other = 0; other < WARPS; ++other) {
            const unsigned count = memory.count[other][bin];
            memory.count[other][bin] = next;
            next += count;
        }
        position = next;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        if (rows[round] == EMPTY) continue;
        const int at = memory.count[warp][digit.of(rows[round])] + rank[round];
        memory.sorted.row[at] = rows[round];
        memory.sorted.slot[at] = tile.slot(round);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < scan.all; i += THREADS) {
        const int row = memory.sorted.row[i];
        placement.put(tile.head, memory.offset[digit.of(row)] + i, row,
                      edge_of(memory.sorted.slot[i]));
    }
    placement.clear(tile, starts[digit.bins]);
}

// First pass. split_counts is null where no schedule is wanted.
__device__ void scatter_table(const Table& table, const RowMap& map, long long block, int heads,
                              long long tiles, Digit digit, const index_t* counts,
                              const index_t* bin_ptr, const Placement& placement,
                              int* split_counts, ScatterMemory& memory) {
    const Tile tile(block, tiles, table.slots);
    int rows[ROUNDS], bad = 0;
    read_table(table, map, tile, memory.tokens, rows, bad);
    scatter_tile(rows, tile, digit, counts + block * digit.bins,
                 bin_ptr + tile.head * (digit.bins + 1LL), placement, memory,
                 [&](int slot) { return tile.start + slot; });
    if (!split_counts) return;
    const unsigned* words = placement.placed + tile.head * words_of(table.slots);
    const long long end = tile.start + tile.count;
    for (long long token = (tile.start + table.width - 1) / table.width + threadIdx.x;
         token * table.width < end; token += THREADS)
        split_counts[token * heads + tile.head] =
            bits_between(words, token * table.width, (token + 1) * table.width);
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter(
    const int* ids, long long head_stride, long long token_stride, long long lane_stride,
    unsigned width, long long slots, int heads, long long tiles,
    const int* q_start, const int* row_start, const Blocks* blocks, int batch,
    int shift, int bits, int bins, const index_t* counts, const index_t* bin_ptr,
    int* rows_out, index_t* edges_out, int* q_indices, int* split_slot, const int* row_q_start,
    const unsigned* placed, int* split_counts) {
    __shared__ ScatterMemory memory;
    scatter_table({ids, head_stride, token_stride, lane_stride, width, slots},
                  {q_start, row_start, blocks, batch}, blockIdx.x, heads, tiles,
                  {shift, bits, bins}, counts, bin_ptr,
                  {rows_out, edges_out, q_indices, split_slot, row_q_start, placed, width, slots},
                  split_counts, memory);
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter_pairs(
    const int* rows_in, const index_t* edges_in, unsigned width, long long slots, long long tiles,
    int shift, int bits, int bins, const index_t* counts, const index_t* bin_ptr,
    int* rows_out, index_t* edges_out, int* q_indices, int* split_slot, const int* row_q_start,
    const unsigned* placed) {
    __shared__ ScatterMemory memory;
    const int head = static_cast<int>(blockIdx.x / tiles);
    const index_t* starts = bin_ptr + head * (bins + 1LL);
    const Tile tile(blockIdx.x, tiles, starts[bins]);
    int rows[ROUNDS];
    read_pairs(rows_in, tile, slots, rows);
    scatter_tile(
        rows, tile, {shift, bits, bins}, counts + static_cast<long long>(blockIdx.x) * bins, starts,
        {rows_out, edges_out, q_indices, split_slot, row_q_start, placed, width, slots}, memory,
        [&](int slot) { return edges_in[head * slots + tile.start + slot]; });
}

// ---- transposed block lists ----

// marks [lists, words, num_kv]: bit q % 32 of word q / 32 is set where query block q chose the KV
// block. One CTA: one word of one list, LISTS_KV KV blocks.
extern "C" __global__ void __launch_bounds__(THREADS) mark_lists(
    const int* ids, long long batch_stride, long long head_stride, long long q_stride,
    long long lane_stride, const int* list_counts, long long counts_batch_stride,
    long long counts_head_stride, long long counts_q_stride, int heads, int num_q, int width,
    int num_kv, int dense_rows, int words, int kv_tiles, unsigned* marks) {
    __shared__ unsigned bits[LISTS_KV];
    const int kv_tile = blockIdx.x % kv_tiles, word = blockIdx.x / kv_tiles % words;
    const long long list = blockIdx.x / kv_tiles / words;
    const long long batch = list / heads, head = list % heads;
    const int first_kv = kv_tile * LISTS_KV, kv_count = min(LISTS_KV, num_kv - first_kv);
    const int dense = min(max(dense_rows - word * 32, 0), 32);
    for (int i = threadIdx.x; i < kv_count; i += THREADS)
        bits[i] = dense == 32 ? ALL : (1u << dense) - 1;
    __syncthreads();
    for (int bit = threadIdx.x / 32; bit < 32; bit += WARPS) {
        const long long q = word * 32 + bit;
        if (q < dense_rows || q >= num_q) continue;
        const int count = list_counts[batch * counts_batch_stride + head * counts_head_stride +
                                      q * counts_q_stride];
        const int* row = ids + batch * batch_stride + head * head_stride + q * q_stride;
        for (int lane = threadIdx.x % 32; lane < min(count, width); lane += 32) {
            const unsigned kv = row[lane * lane_stride] - first_kv;
            if (row[lane * lane_stride] >= 0 && kv < kv_count) atomicOr(&bits[kv], 1u << bit);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kv_count; i += THREADS)
        marks[(list * words + word) * num_kv + first_kv + i] = bits[i];
}

// One warp for each KV block of each list.
extern "C" __global__ void __launch_bounds__(THREADS) pack_lists(
    const unsigned* marks, long long num_lists, int num_q, int num_kv, int words,
    int* k2q_indices, int* k2q_counts) {
    const int lane = threadIdx.x % 32;
    const long long row = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= num_lists * num_kv) return;
    const unsigned* column = marks + row / num_kv * words * num_kv + row % num_kv;
    int* out = k2q_indices + row * num_q;
    int count = 0;
    for (int chunk = 0; chunk < words; chunk += 32) {
        const int mine = chunk + lane;
        const unsigned loaded = mine < words ? column[static_cast<long long>(mine) * num_kv] : 0;
        for (int i = 0; i < min(32, words - chunk); ++i) {
            const unsigned word = __shfl_sync(ALL, loaded, i);
            const int q = (chunk + i) * 32 + lane;
            if (q < num_q && word >> lane & 1) out[count + __popc(word & ((1u << lane) - 1))] = q;
            count += __popc(word);
        }
    }
    if (lane == 0) k2q_counts[row] = count;
    for (int i = count + lane; i < num_q; i += 32) out[i] = EMPTY;
}
