// warp_groups: code shared by tall.cu and wide.cu, in which one warp group copies tiles of keys and values to a ring of stages in shared
// memory, and GROUPS others compute, ROWS_EACH rows of a CTA each
// Build     GROUPS, ROWS_EACH; STAGES: tiles of keys or values in the ring; CODED: tiles of codes in shared memory; FOLDS: warp groups
//           add up the pieces of a run of groups (pieces.cu) that they compute from the run's first piece on

#define ROWS (GROUPS * ROWS_EACH)
#ifndef FOLDS
#define FOLDS 0
#endif

#define TILE 64                    // positions
#define BLOCKS (D / 64)            // blocks of 128 bytes per row
#define TILE_BYTES (TILE * D * 2)  // of keys or values
#define LINE (D / 8)               // copies of 16 bytes per position
#define LAG (STAGES - 2)           // tiles in flight while another is requested
static_assert((STAGES & STAGES - 1) == 0);
#define KEY_BYTES row_bytes(KEYS, D)
#define VALUE_BYTES row_bytes(VALUES, D)
#define CODES_BYTES (TILE * (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES))  // of a tile as the cache has it
#ifndef CODED
#define CODED 0
#endif
#define MINUS_INFINITY (-__int_as_float(0x7f800000))

// The place in the ring of tile n, alternately of keys and of values, and the parity of the number of earlier rounds of the ring.
__device__ __forceinline__ int stage_of(int n) { return n % STAGES; }
__device__ __forceinline__ u32 parity_of(int n) { return n / STAGES % 2; }

#define RUN 8  // groups of positions that pieces.cu adds up before others

// The work of a CTA, in shared memory. Its pieces are `begin` to `end` - 1 with FOLDS; else every `shares`-th, alternately from both ends.
struct Work {
    Part part;
    Pieces pieces;
    CommittedTiles tiles;
    HeadRows planes[2];  // keys, values
    int begin, end;
    // The first piece of a share. The end of a piece costs about half a tile.
    __device__ int cut(int share) const {
        auto cost = [&](int i) { return (pieces.begin(i) >> 5) + i; };
        const int from = tiles.first, to = from + tiles.count();
        const int at = cost(from) + (int)((s64)(cost(to) - cost(from)) * share / part.shares);
        int low = from, high = to;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (cost(middle) <= at ? low : high) = middle;
        }
        return share == part.shares || 2 * at > cost(low) + cost(high) ? high : low;
    }
    __device__ bool is_empty() const { return part.run < 0 || (FOLDS ? begin >= end : part.share >= tiles.count()); }
};

// Iterates over the tiles of a CTA; the next one begins at `at`.
struct Walk {
    int turn, piece, at, stop;
    __device__ __forceinline__ bool next_piece(const Work& work) {
        const Part& part = work.part;
        if (FOLDS) {
            piece = work.begin + turn;
            if (piece >= work.end) return false;
        } else {
            const int item = turn * part.shares + (turn % 2 ? part.shares - 1 - part.share : part.share);
            if (item >= work.tiles.count()) return false;
            piece = work.tiles.first + work.tiles.count() - 1 - item;  // from the newest piece on: newer pieces are larger
        }
        turn++, at = work.pieces.from(piece), stop = min(work.pieces.to(piece), work.tiles.until);
        return true;
    }
    // Goes to the next tile; returns what ends with this one: 0, nothing; else a piece, 2 (place + 1), plus 1 if its sums stay with
    // the warp groups, which add the next piece's to them; negative if it is the last.
    __device__ __forceinline__ int advance(const Work& work) {
        if ((at += TILE) < stop) return 0;
        const int ended = piece;
        const bool goes_on = next_piece(work);
        const bool is_whole = work.pieces.begin(piece + 1) <= work.tiles.until;  // no other CTA adds to the sums of the next piece's group
        const bool stays = FOLDS && goes_on && is_whole && piece % RUN && ended / RUN * RUN >= work.begin && !work.pieces.single;
        const int end = 2 * (work.pieces.place(ended) + 1) + stays;
        return goes_on ? end : -end;
    }
};
#define ENDS 8  // tiles whose ends are kept: more than are in shared memory

// Decodes a tile of codes to float16, by a warp group; keys in the order of operands.cuh.
template <Format F, bool OF_KEYS>
__device__ __forceinline__ void unpack_tile(u8* tile, const u8* codes) {
#pragma unroll 1
    for (int n = threadIdx.x % 128; n < TILE * D / 32; n += 128) {  // neighbours take other rows and other blocks, for the banks
        const int row = n % TILE, block = (n / TILE + (OF_KEYS && in_halves(F) ? row / 8 : row)) % (D / 32);
        const u8* from = codes + row * row_bytes(F, D);
        auto at = [&](int chunk) { return (uint4*)(tile + chunk / 8 * (TILE * 128) + swizzled(row, chunk % 8)); };
        if constexpr (OF_KEYS)
            unpack_to_places<F>(at, from, block);
        else
            unpack_32_to<F, D, false>([&](int i) { return at(block * 4 + i); }, from, block);
    }
}


// Finds the work of this CTA, and initializes the barriers `full` and `empty` of each stage. By warp 0.
__device__ __forceinline__ void find_work(Work& work, Plane keys, Plane values, int group, const StepState* step, int trunk,
                                          const Exact& exact, u32 full, u32 empty) {
    const Part part = ALONE ? Part{0, (int)blockIdx.x, (int)gridDim.x, (int)blockIdx.z, (int)gridDim.z}
                            : part_of(step, group, ROWS, 0, blockIdx.z, gridDim.z);
    if (threadIdx.x) return;
    const Run& run = step->run[max(part.run, 0)];
    work.part = part;
    work.planes[0] = rows_of(keys, run.slot, blockIdx.y, KEY_BYTES), work.planes[1] = rows_of(values, run.slot, blockIdx.y, VALUE_BYTES);
    work.pieces.cut(6, run.past, run.rows, 0, 0, 0, min((int)gridDim.z, MOST_SINGLE), trunk);
    work.tiles.find(work.pieces, run.past, EXACT ? exact.first : 0, EXACT ? exact.recent : 0);
    if (FOLDS) work.begin = work.cut(part.share), work.end = work.cut(part.share + 1);
    for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 128), barrier_init(empty + 8 * i, 4 * GROUPS);
}

// Finds where the rows of the CTA lie in (T, H), -1: nowhere; returns false if it has none.
__device__ __forceinline__ bool find_heads(int* heads, const Work& work, const StepState* step, int H, int group) {
    const Run& run = step->run[ALONE ? 0 : work.part.run];
    const int first = work.part.block * ROWS, rows = run.rows * group - first;
    if (threadIdx.x < ROWS) {
        const int row = first + (int)threadIdx.x, t = row / group;
        heads[threadIdx.x] = (int)threadIdx.x < rows ? (run.first + t) * H + (int)blockIdx.y * group + row - t * group : -1;
    }
    return rows > 0;
}

// Copies all tiles to the ring, by a warp group: loads n, alternately of keys and of values, whose ends go to `ends`. Codes are decoded.
__device__ __forceinline__ void copy_tiles(const Work& work, u8* stages, [[maybe_unused]] u8* coded, u32 full, u32 empty, int* ends) {
    const int mine = threadIdx.x % 128;
    Walk walk = {};
    walk.next_piece(work);
#if CODED
    auto request = [&](int n) {  // load n, alternately of keys and of values
        if (walk.at < walk.stop) {
            const int bytes = n % 2 ? VALUE_BYTES : KEY_BYTES;
            const u8* from = work.planes[n % 2].at(walk.at, bytes);
            const u32 to = shared_address(coded + n % CODED * CODES_BYTES);
#pragma unroll 1
            for (int i = mine; i < TILE / 16 * bytes; i += 128) copy16(to + i * 16, (const u16*)(from + i * 16));
            if (n % 2) ends[n / 2 % ENDS] = walk.advance(work);
        }
        commit();
    };
    for (int n = 0; n < CODED - 1; n++) request(n);
#pragma unroll 1
    for (int n = 0; n % 2 || n == 0 || ends[(n / 2 - 1) % ENDS] >= 0; n++) {
        copies_wait<CODED - 2>();
        group_sync(1 + GROUPS);
        request(n + CODED - 1);
        barrier_wait(empty + 8 * stage_of(n), parity_of(n) ^ 1);
        u8* tile = stages + stage_of(n) * TILE_BYTES;
        const u8* codes = coded + n % CODED * CODES_BYTES;
        if (n % 2)
            unpack_tile<VALUES, false>(tile, codes);
        else
            unpack_tile<KEYS, true>(tile, codes);
        show_products();
        barrier_arrive(full + 8 * stage_of(n));
    }
#else
    auto land = [&](int n) {
        show_products();
        barrier_arrive(full + 8 * stage_of(n));
    };
    int n = 0;  // loads, alternately of keys and of values
#pragma unroll 1
    for (; walk.at < walk.stop; n++) {
        barrier_wait(empty + 8 * stage_of(n), parity_of(n) ^ 1);
        const u16* from = (const u16*)work.planes[n % 2].at(walk.at, 2 * D) + mine * 8;
        const u32 to = shared_address(stages + stage_of(n) * TILE_BYTES) + mine % LINE / 8 * (TILE * 128);
#pragma unroll 8
        for (int i = 0; i < TILE * LINE / 128; i++) copy16(to + swizzled((i * 128 + mine) / LINE, mine % 8), from + i * 1024);
        commit();
        if (n % 2) ends[n / 2 % ENDS] = walk.advance(work);
        if (n < LAG) continue;
        copies_wait<LAG>();
        land(n - LAG);
    }
    copies_wait<0>();
    for (int i = max(n - LAG, 0); i < n; i++) land(i);
#endif
}

// Copies N rows of queries, from row `first` of the CTA on, to shared memory, by a warp group; zeros for heads[row] < 0.
template <int N>
__device__ __forceinline__ void copy_queries(u8* qs, const u16* q, const int* heads, int first) {
    for (int n = threadIdx.x % 128; n < N * LINE; n += 128) {
        const int r = n / LINE, c = n % LINE, row = heads[first + r];
        auto at = [&](int chunk) { return qs + chunk / 8 * (ROWS * 128) + first * 128 + swizzled(r, chunk % 8); };
        const uint4 eight = row < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4*)(q + (s64)row * D + c * 8);
        if constexpr (PACKED)
            eight_to_places<KEYS>([&](int i) { return (u16*)at(i / 8) + i % 8; }, c * 8, eight);
        else
            *(uint4*)at(c) = eight;
    }
}
