// split: grouped-query attention in a decoding or verifying step, separately for each piece of what its rows see (flash decoding)
// Meaning   common/reference.py NumpyOps.attention        Launcher  cuda_backend/attention.py
// In        q [T][H][D] float16 and keys and values [K][place][D] float16, which already contain the step's rows
//           (to_cache.cu, heads_to_cache.cu)
// Out       for every piece sums [place][T][H][D] and stats [place][T][H], (power, sum), for pieces.cu
// Build     formats.cuh; D, a multiple of 16 up to 256, of 32 if rows are packed; ROWS per CTA, 16, 32 or 64; OF_WARP: blocks of 16 rows
//           that a warp computes, 2 for 64 rows, else 1; BUFFERS: tiles of keys or values in shared memory; CTAS per multiprocessor;
//           WINDOWED: flash.cuh; ALONE: the step has one sequence, so that its share of the CTAs is known; TAILS: tall.cu or wide.cu
//           computes the tiles of committed positions; EXACT, only for packed rows: exact.cuh
// Work      rows are (t, query head of the group), four warps for OF_WARP blocks of 16 of them. Of a tile's products with q a warp takes 16
//           positions; the probabilities are shared, and it adds a quarter of the values' columns. A CTA keeps its rows
//           and goes through its share of the pieces, whose tiles arrive ahead of it, committed ones before the kernels
//           before this one have ended. Each row of a tree sees different rows: the tiles after the committed ones are gathered
//           for each row and its query heads, its ancestors in the order of their positions. Rows that are not float16 arrive in
//           the format of the cache; each tile is decoded, still rotated, before its products.
//           EXACT: a tile with codes and exact rows is multiplied once in each form; a position adds nothing to a row's sums in the
//           form in which the row does not read it. Both forms are added up before they are added to the preceding tiles, whose sums
//           wait in the place of the piece, so that a tile that is a piece by itself gives the same bits
// Assumes   memory beyond the last row of the cache holds finite numbers
// Numbers   float16 products, float32 sums; a tile is summed by itself and scaled by powers of 2, which is exact: what a
//           row gets depends on the positions that it sees, not on how they are cut into pieces, on where the step's rows
//           lie, or on the other rows. A row of a tree is bitwise identical to the row of plain decoding
// Bound     bytes of keys and values
// Tried     us per layer of `split`, or of a step of 8 layers, variant against what was here then (Qwen3.6-27B, one H200).
//           the walk over tiles written out wherever a tile is fetched -> 62 us against 37 at one row, context of 32K: code that does
//             not fit
//           one CTA per multiprocessor -> 48.4 us: too few warps to hide latency
//           16 rows per CTA above 16 rows -> 17.4 against 12.6 at 22 rows, 48 against 32.5 at 64: tiles are read more often
//           64 rows per CTA -> 435 against 495 at 64 rows and 32K, but one CTA per multiprocessor: 48 against 37 at one row; as a
//             third build 30.8 against 32.5 at 64 rows, but 20.5 against 12.6 at 22
//           96 rows per CTA, three blocks a warp (heads of 256) -> 104 against 117 us at 16 rows and 32K, 199 against 189 at 22; 144 rows
//             203 against 189 at 22 rows, and spill registers; of q8_0 176 against 254 (docs/experiments/attention.md)
//           four warps for 32 rows, a quarter less read of shared memory -> step 950 against 947 at 22 rows: tiles wait for one phase
//             after another
//           three CTAs with three buffers instead of two with four -> WeDLM's step 552 against 541 at 16 rows
//           the committed part of the step's own tile loaded before the wait -> 5.05 ms against 5.09 at one row, 11.25 against 11.11
//             at 22 rows and 32K; it wrote out of bounds for trees of more than 64 rows
//           that part requested in L2 during the wait -> WeDLM's step 408.3 against 409.4; one build spills
//           once through the code over nothing before the wait -> 15.7 against 12.7 at 22 rows: the code was there
//           to_cache inside `split` -> not built: to_cache left out gains WeDLM 0.4 us per layer, `split` would start cold
//           codes decoded straight into fragments, without a tile of float16 -> step of 27B at one row, context of 32K: 5.81 ms
//             against 5.74 for lm4, 5.82 against 5.72 for tq3_0; at 22 rows 12.5 against 12.3 and 12.8 against 12.6
// Origin    FlashAttention-2 (Dao, arXiv 2307.08691)

#define STRIDE (D + 8)  // halves; an odd number of 16-byte units, so that ldmatrix meets no bank twice
#define TILE 64         // positions
#ifndef OF_WARP
#define OF_WARP 1
#endif
#ifndef TAILS
#define TAILS 0
#endif
#define CTA (ROWS * 8 / OF_WARP)  // threads
#define LINE (D / 8)    // copies of 16 bytes per position
#define PROBABILITIES (TILE + 8)
#define NV ((D / 16 + 3) / 4)  // blocks of 16 columns per warp
#define MINUS_INFINITY (-__int_as_float(0x7f800000))
#define NOWHERE (1 << 30)

#define KEY_BYTES row_bytes(KEYS, D)
#define VALUE_BYTES row_bytes(VALUES, D)
#define BLOCKS ((D + 31) / 32)  // blocks of a row
#define STAGE (TILE * (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES))  // a tile as the cache has it

#define TILES (PACKED ? 1 : BUFFERS)  // of float16, as layout.py split_tiles counts them
#define AS_OPERANDS (PACKED && KEYS != TURBOQUANT)  // columns of keys and queries have the order of one_row.cu
#define AT_ONCE (KEYS == TURBOQUANT && D > 128 && ROWS == 32 ? 1 : CTAS)  // two spill registers

// Decodes a tile of rows to float16.
template <Format F, bool IN_ORDER>
__device__ __forceinline__ void unpack_tile(u16* tile, const u8* stage) {
    if constexpr (F == TURBOQUANT) {
        constexpr int chunks = (D + 127) / 128;
#pragma unroll 1
        for (int n = threadIdx.x / 32; n < TILE * chunks; n += CTA / 32)
            unpack_turboquant<D>(tile + n / chunks * STRIDE + n % chunks * 128, stage + n / chunks * row_bytes(F, D), n % chunks,
                                 threadIdx.x % 32);
    } else {
#pragma unroll 1
        for (int n = threadIdx.x; n < TILE * BLOCKS; n += CTA) {  // neighbours take other rows and other blocks, for the banks
            const int row = n % TILE, block = (n / TILE + (!IN_ORDER && in_halves(F) ? row / 8 : row)) % BLOCKS;
            if constexpr (IN_ORDER)
                unpack_32<F, D>(tile + row * STRIDE + block * 32, stage + row * row_bytes(F, D), block);
            else
                unpack_to_places<F>([&](int i) { return (uint4*)(tile + row * STRIDE) + i; }, stage + row * row_bytes(F, D), block);
        }
    }
    __syncthreads();
}

// Loads a tile of float16 rows, from position `at` on or those that `from` lists. Waits for all copies of the CTA.
__device__ __forceinline__ void copy_tile(u16* tile, const Plane& plane, int slot, int head, int at, const int* from) {
    const u8* whole = from ? 0 : row_at(plane, slot, head, place_of(plane, at), 2 * D);  // a tile lies in one run of the cache
#pragma unroll 1
    for (int n = threadIdx.x; n < TILE * LINE; n += CTA) {
        const int row = n / LINE;
        const u8* begin = from ? row_at(plane, slot, head, place_of(plane, from[row]), 2 * D) : whole + row * 2 * D;
        copy16(shared_address(tile + row * STRIDE + n % LINE * 8), (const u16*)begin + n % LINE * 8);
    }
    commit();
    wait_all_but<0>();
}

extern "C" __global__ void __launch_bounds__(CTA, AT_ONCE)
split(const u16* q, Plane keys, Plane values, int H, int group, const StepState* step,
      const int* positions, int T, float scale, int window, int sinks, int causal, int trunk, float* sums, float2* stats, Exact exact) {
    release_next();
    if (!WINDOWED) window = sinks = 0;
    extern __shared__ __align__(16) u16 shared[];
    __shared__ Pieces pieces;
    // Tiles requested: where each begins, + 1 if sums are written after it, + 2 exact rows, + 4 joins what was written, + 8 by tall.cu
    // or wide.cu; and the place of its piece.
    __shared__ int2 coming[4];
    __shared__ int place, opened;  // of the piece that is fetched next, and its first tile; thread 0's
    __shared__ int items, jobs;  // pieces for all rows, tiles for rows of a tree
    [[maybe_unused]] __shared__ CommittedTiles others;  // TAILS: what tall.cu or wide.cu computes
    __shared__ int ctas, first_job, past;  // of the run; of those tiles, this CTA's first; committed positions
    __shared__ int2 spans[ROWS];  // first and last position that a row sees
    __shared__ int heads[ROWS];   // where a row lies in (T, H)
    // Where in the cache a tree's row finds the positions of a tile: its ancestors in their order; EXACT: positions, the places of codes.
    __shared__ int from[TILE];
    __shared__ float shifts[EXACT ? ROWS : 1];    // of a row's products with codes
    // Stats of alternate tiles: a warp may write those of a tile while another joins it to the one before.
    [[maybe_unused]] __shared__ float2 written[2][EXACT ? ROWS : 1];
    [[maybe_unused]] __shared__ u8 offsets[EXACT ? MAX_DECODE_ROWS + 1 : 1];  // positions of the step's rows after the committed ones
    u16 *qs = shared, *tiles = qs + ROWS * STRIDE, *ps = tiles + TILES * TILE * STRIDE;
    float* tops = (float*)(ps + ROWS * PROBABILITIES);  // maxima of each row over 16 positions
    u8* stages = (u8*)(tops + ROWS * (TILE / 16));      // tiles of packed rows, which are decoded one after another
    __shared__ Part own;
    __shared__ HeadRows planes[2];  // keys, values
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = warp / 4, c = warp % 4, head = blockIdx.y;
    const int parts = (group + ROWS - 1) / ROWS;
    if (warp == 0) {
        const Part part = ALONE ? Part{0, (int)blockIdx.x, (int)gridDim.x, (int)blockIdx.z, (int)gridDim.z}
                                : part_of(step, group, ROWS, window, blockIdx.z, gridDim.z);
        if (part.run >= 0) {
            const Run& run = step->run[ALONE ? 0 : part.run];
            const Mask mask(step, run, ALONE ? 0 : run.first, positions, window, sinks, causal);
            for (int i = lane; EXACT && i < mask.rows; i += 32) offsets[i] = positions[run.first + i] - mask.past;
            const int lowest = mask.lowest();
            if (lane == 0) {
                const bool branches = run.branches;
                planes[0] = rows_of(keys, run.slot, head, KEY_BYTES), planes[1] = rows_of(values, run.slot, head, VALUE_BYTES);
                pieces.cut(6, mask.past, mask.rows, window, sinks, lowest, min((int)gridDim.z, MOST_SINGLE), trunk);
                if (TAILS) others.find(pieces, mask.past, EXACT ? exact.first : 0, EXACT ? exact.recent : 0);
                items = part.block * ROWS >= mask.rows * group
                            ? 0
                            : pieces.count - (TAILS ? others.whole : 0) + (branches ? 0 : pieces.tails);
                jobs = branches ? mask.rows * pieces.tails * parts : 0;
                ctas = part.shares * part.blocks, first_job = ctas - 1 - (part.share * part.blocks + part.block), past = mask.past;
            }
        }
        if (lane == 0) own = part;
    }
    __syncthreads();

    if (own.run < 0) return;
    if (own.share >= items && first_job >= jobs) return;
    // first the pieces that all rows see, then tiles of single rows of a tree, one after another
#pragma unroll 1
    for (int job = -1; job < jobs; job = job < 0 ? first_job : job + ctas) {
        const Run& run = step->run[ALONE ? 0 : own.run];
        const Mask mask(step, run, ALONE ? 0 : run.first, positions, window, sinks, causal);  // read again, to spare registers
        const int row_of_tree = job < 0 ? 0 : job / parts / pieces.tails, part = job < 0 ? 0 : job % parts;
        const int first_row = job < 0 ? own.block * ROWS : row_of_tree * group + part * ROWS;
        const int rows = min(ROWS, job < 0 ? mask.rows * group - first_row : group - part * ROWS);
        const int seen = job < 0 ? 0 : mask.seen(row_of_tree);

        // the tile that is fetched next, where its piece ends and where that one's sums lie, and the pieces of the CTA so far
        int ahead = job < 0 ? 0 : pieces.tail + job / parts % pieces.tails * TILE, stop = ahead + TILE, turn = 0;
        int start = 0;  // where the cache has the tile whose keys were fetched last
        // whether some row may read codes, or exact rows, of the tile at `at`
        auto has_codes = [&](int at) { return at + TILE > exact.first && at <= mask.past + mask.rows - 1 - exact.recent; };
        auto has_exact = [&](int at) { return at < exact.first || at + TILE > mask.past - exact.recent + 1; };
        bool goes_exact = EXACT && (job < 0 || !has_codes(ahead));  // the exact rows of the tile at `ahead` are next
        if (job >= 0 && threadIdx.x == 0) place = trunk + job / parts % pieces.tails, opened = ahead;
        if (job >= 0 && ahead >= mask.past + seen) continue;  // no row that this one sees
        auto advance = [&] {
            if (EXACT && !goes_exact && has_exact(ahead)) {
                goes_exact = true;
                return;
            }
            ahead += TILE;
            if (EXACT) goes_exact = !has_codes(ahead);
            if (ahead < stop) return;
            // alternately forwards and backwards, for equal shares
            const int item = turn * own.shares + (turn % 2 ? own.shares - 1 - own.share : own.share);
            turn++, ahead = NOWHERE;
            if (item >= items || job >= 0) return;
            const int number = TAILS ? item + (item < others.first ? 0 : others.whole)
                                     : item < pieces.count ? pieces.count - 1 - item : item;  // from the newest on, which are the largest
            ahead = pieces.from(number), stop = pieces.to(number);
            if (TAILS && EXACT && number == others.resumed) ahead = others.until;
            if (EXACT) goes_exact = !has_codes(ahead);
            if (threadIdx.x == 0) place = pieces.place(number), opened = ahead;
        };
        if (job >= 0) __syncthreads();
        if (threadIdx.x < ROWS) {
            const int row = first_row + (int)threadIdx.x, t = min(row / group, mask.rows - 1);
            // EXACT: how many it reads from codes, from exact.first on
            const int low = EXACT ? max(0, positions[run.first + t] - exact.recent + 1 - exact.first) : mask.low(t);
            spans[threadIdx.x] = make_int2(low, job < 0 ? mask.high(t) : mask.past + seen - 1);
            heads[threadIdx.x] = (run.first + t) * H + head * group + row - t * group;
        }
        if (job >= 0 && warp == 0) {
            const int begin = EXACT ? ahead : place_of(keys, ahead);
            int r = mask.past - ahead;  // of the first that the row sees
            from[lane] = begin + lane, from[lane + 32] = begin + lane + 32;
            __syncwarp();
#pragma unroll
            for (int w = 0; w < ROW_WORDS; w++) {
                const u32 bits = mask.sight[row_of_tree][w];
                const int mine = r + __popc(bits & ((1u << lane) - 1));
                const int at = mask.past + w * 32 + lane;
                if (bits >> lane & 1 && mine >= 0 && mine < TILE) from[mine] = EXACT ? at : place_of(keys, at);
                r += __popc(bits);
            }
        }
        __syncthreads();

        // load i, alternately of keys and of values, -1: none, before the first tile; `later`: not of the first tile, which alone may be
        // a tree's row's
        auto fetch = [&](int i, bool later) {
            const bool of_values = i % 2;
            // in other builds a branch would spill a register
            if (!of_values && (PACKED || !ALONE || D > 128 || ahead < NOWHERE)) start = place_of(keys, ahead);
            if (!of_values && threadIdx.x == 0) {
                const bool both = EXACT && has_codes(ahead + TILE) && has_exact(ahead + TILE);  // of the next tile, which begins anew
                const bool ends = (ahead + TILE >= stop || both) && (!EXACT || goes_exact || !has_exact(ahead));
                const bool resumes = TAILS && EXACT && goes_exact && ahead == others.until && others.resumed >= 0;
                const bool joins = resumes || (EXACT && goes_exact && ahead != opened && has_codes(ahead));
                coming[i / 2 % 4] = make_int2(ahead + ends + (goes_exact ? 2 : 0) + (joins ? 4 : 0) + (resumes ? 8 : 0), place);
            }
            if (EXACT && goes_exact) {  // exact rows are read only when they are needed, since they are few
                if (of_values && ahead < NOWHERE) advance();
            } else if (PACKED && ahead < NOWHERE) {
                const int bytes = of_values ? VALUE_BYTES : KEY_BYTES;
                u8* stage = stages + i % BUFFERS * STAGE;
                if (later || ahead + TILE <= past || !seen) {
                    const u8* begin = planes[of_values].at(start, bytes);
#pragma unroll 1
                    for (int n = threadIdx.x; n < TILE / 16 * bytes; n += CTA)
                        copy16(shared_address(stage + n * 16), (const u16*)(begin + n * 16));
                } else {  // by twos, since rows lie at no larger multiples
#pragma unroll 1
                    for (int n = threadIdx.x; n < TILE / 2 * bytes; n += CTA) {
                        const int row = 2 * n / bytes;
                        ((u16*)stage)[n] = *(const u16*)(planes[of_values].at(from[row], bytes) + 2 * n % bytes);
                    }
                }
                if (of_values) advance();
            } else if (ahead < NOWHERE) {
                u16* tile = tiles + i % BUFFERS * TILE * STRIDE;
                if (!later && i < 0) {
                } else if (later || ahead + TILE <= past || !seen) {  // a tile lies in one run of the cache
                    const u16* begin = (const u16*)planes[of_values].at(start, 2 * D) + threadIdx.x * 8;
                    const u32 to = shared_address(tile + threadIdx.x / LINE * STRIDE + threadIdx.x % LINE * 8);
#pragma unroll 4
                    for (int j = 0; j < TILE * LINE; j += CTA) {
                        const int n = j + threadIdx.x;
                        if (CTA % LINE == 0 && TILE * LINE % CTA == 0)
                            copy16(to + j / LINE * STRIDE * 2, begin + j * 8);
                        else if (n < TILE * LINE)
                            copy16(shared_address(tile + n / LINE * STRIDE + n % LINE * 8), begin + j * 8);
                    }
                } else {
#pragma unroll 1
                    for (int n = threadIdx.x; n < TILE * LINE; n += CTA)
                        copy16(shared_address(tile + n / LINE * STRIDE + n % LINE * 8),
                               (const u16*)planes[of_values].at(from[n / LINE], 2 * D) + n % LINE * 8);
                }
                if (of_values) advance();
            }
            commit();
        };
        bool waits = job < 0;
#pragma unroll 1
        for (int i = job < 0 ? -1 : 0; i <= BUFFERS; i++) {
            if (waits && i >= 0 && (i == BUFFERS || ahead + TILE > past)) depend(), waits = false;
            if (i < BUFFERS) fetch(i, false);
        }
#pragma unroll 1
        for (int n = threadIdx.x; n < ROWS * LINE; n += CTA) {
            const int r = n / LINE;
            u16* to = qs + r * STRIDE + n % LINE * 8;
            if (r < rows && AS_OPERANDS)
                eight_to_places<KEYS>([&](int i) { return qs + r * STRIDE + i; }, n % LINE * 8,
                                      *(const uint4*)(q + (s64)heads[r] * D + n % LINE * 8));
            else if (r < rows)
                copy16(shared_address(to), q + (s64)heads[r] * D + n % LINE * 8);
            else
                *(uint4*)to = make_uint4(0, 0, 0, 0);
        }
        if (EXACT && threadIdx.x < ROWS) shifts[threadIdx.x] = threadIdx.x < rows ? exact.shift[heads[threadIdx.x]] : 0.0f;
        commit();
        wait_all_but<0>();
        const bool active = m * OF_WARP * 16 < rows;
        auto own_row = [&](int j, int half) { return (m * OF_WARP + j) * 16 + lane / 4 + half * 8; };
        float o[OF_WARP][2 * NV][4], l[OF_WARP][2], top[OF_WARP][2], best[OF_WARP][2];  // of rows lane / 4 and that + 8 of each block
        auto begin_piece = [&] {
#pragma unroll
            for (int j = 0; j < OF_WARP; j++) {
                l[j][0] = l[j][1] = 0.0f, top[j][0] = top[j][1] = MINUS_INFINITY;
#pragma unroll
                for (int n = 0; n < 2 * NV; n++) o[j][n][0] = o[j][n][1] = o[j][n][2] = o[j][n][3] = 0.0f;
            }
        };
        begin_piece();
#pragma unroll 1
        for (int tile = 0; coming[tile % 4].x < NOWHERE; tile++) {
            const int at = coming[tile % 4].x / (EXACT ? TILE : 2) * (EXACT ? TILE : 2);
            auto is_exact = [&] { return EXACT && coming[tile % 4].x & 2; };
            auto copy_exact = [&](const Plane& plane) {
                copy_tile(tiles, plane, run.slot, head, at, seen ? from : 0);
            };
            if (EXACT && is_exact() != (tile && coming[(tile + 3) % 4].x & 2)) {  // the queries there are those of the tile before
                const u16* queries = is_exact() ? exact.q : q;
#pragma unroll 1
                for (int n = threadIdx.x; n < rows * LINE; n += CTA) {
                    const uint4 eight = *(const uint4*)(queries + (s64)heads[n / LINE] * D + n % LINE * 8);
                    if (AS_OPERANDS && !is_exact())
                        eight_to_places<KEYS>([&](int i) { return qs + n / LINE * STRIDE + i; }, n % LINE * 8, eight);
                    else
                        *(uint4*)(qs + n / LINE * STRIDE + n % LINE * 8) = eight;
                }
            }
            if (EXACT && TAILS && coming[tile % 4].x & 8 && threadIdx.x < rows)  // tall.cu or wide.cu wrote what this tile joins
                written[coming[tile % 4].x / TILE % 2 ^ 1][threadIdx.x] = stats[(s64)coming[tile % 4].y * T * H + heads[threadIdx.x]];
            if (is_exact())
                copy_exact(exact.keys);
            else if constexpr (PACKED)
                unpack_tile<KEYS, !AS_OPERANDS>(tiles, stages + 2 * tile % BUFFERS * STAGE);
            float s[2][OF_WARP][2][4] = {};
            if (EXACT && !is_exact())
#pragma unroll
                for (int i = 0; i < 8 * OF_WARP; i++) s[0][i / 8][i / 4 % 2][i % 4] = shifts[own_row(i / 8, i % 4 / 2)];
            if (active) {
                const u32 q_at = shared_address(qs + (m * OF_WARP * 16 + lane % 16) * STRIDE + lane / 16 * 8);
                const int k_row = (PACKED ? 0 : 2 * tile % BUFFERS * TILE) + c * 16 + lane % 8 + lane / 16 * 8;
                const u32 k_at = shared_address(tiles + k_row * STRIDE + lane / 8 % 2 * 8);
                auto multiply = [&](float (&sum)[OF_WARP][2][4], int d) {
                    u32 a[4], k[4];
#pragma unroll
                    for (int j = 0; j < OF_WARP; j++) {
                        ldmatrix(a, q_at + (j * 16 * STRIDE + d * 16) * 2);
                        if (j == 0) ldmatrix(k, k_at + d * 32);
                        mma(sum[j][0], a, k[0], k[1]);
                        mma(sum[j][1], a, k[2], k[3]);
                    }
                };
#pragma unroll 4
                for (int d = 0; d < D / 16; d += 2) {  // two sums, since one would wait for itself
                    multiply(s[0], d);
                    if (D / 16 % 2 == 0 || d + 1 < D / 16) multiply(s[1], d + 1);
                }
                [[maybe_unused]] const bool all = at + TILE <= past && !window;
#pragma unroll
                for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float most = MINUS_INFINITY;
                        const int2 span = spans[own_row(j, half)];
#pragma unroll
                        for (int n = 0; n < 2; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                float& x = s[0][j][n][2 * half + e];
                                const int position = at + c * 16 + n * 8 + lane % 4 * 2 + e;
#if EXACT
                                const int own = position - mask.past;
                                const int p = job < 0 && own >= 0 ? mask.past + offsets[min(own, MAX_DECODE_ROWS)] : position;
                                const bool see = position <= span.y && (u32)(p - exact.first) < (u32)span.x != is_exact();
#else
                                const bool see = all || (position <= span.y && (position >= span.x || position < sinks));
#endif
                                x = see ? (x + s[1][j][n][2 * half + e]) * scale : MINUS_INFINITY;
                                most = fmaxf(most, x);
                            }
                        most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
                        most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
                        if (lane % 4 == 0) tops[c * ROWS + own_row(j, half)] = most;
                    }
            }
            __syncthreads();
            fetch(2 * tile + BUFFERS, BUFFERS > 1 || tile > 0);  // with one buffer, the values of this tile
            if (active)
#pragma unroll
                for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int r = own_row(j, half);
                        float most = tops[r];
#pragma unroll
                        for (int w = 1; w < TILE / 16; w++) most = fmaxf(most, tops[w * ROWS + r]);
                        best[j][half] = ceilf(most);
                        const float base = most == MINUS_INFINITY ? 0.0f : best[j][half];
#pragma unroll
                        for (int n = 0; n < 2; n++)
                            *(u32*)(ps + r * PROBABILITIES + c * 16 + n * 8 + lane % 4 * 2) =
                                to_half2(exp2f(s[0][j][n][2 * half] - base), exp2f(s[0][j][n][2 * half + 1] - base));
                    }
            wait_all_but<BUFFERS - 1>();
            if (is_exact())
                copy_exact(exact.values);
            else if constexpr (PACKED)
                unpack_tile<VALUES, true>(tiles, stages + (2 * tile + 1) % BUFFERS * STAGE);
            if (active) {
                const u32 p_at = shared_address(ps + (m * OF_WARP * 16 + lane % 16) * PROBABILITIES + lane / 16 * 8);
                auto load_probabilities = [&](u32 (&to)[4], int j, int k) { ldmatrix(to, p_at + (j * 16 * PROBABILITIES + k * 16) * 2); };
                u32 p[OF_WARP == 1 ? TILE / 16 : 1][4];  // with more blocks they are read again
                float before[OF_WARP][2], after[OF_WARP][2];  // factors
#pragma unroll
                for (int j = 0; j < OF_WARP; j++) {
                    float ones[4] = {};  // probabilities times ones
#pragma unroll
                    for (int k = 0; k < TILE / 16; k++) {
                        u32(&own)[4] = p[OF_WARP == 1 ? k : 0];
                        load_probabilities(own, j, k);
                        mma(ones, own, 0x3c003c00, 0x3c003c00);
                    }
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float both = fmaxf(top[j][half], best[j][half]);
                        before[j][half] = power(top[j][half] - both), after[j][half] = power(best[j][half] - both);
                        l[j][half] = l[j][half] * before[j][half] + ones[2 * half] * after[j][half];
                        top[j][half] = both;
                    }
                }
                const int v_row = (PACKED ? 0 : (2 * tile + 1) % BUFFERS * TILE) + lane % 16;
                const u32 v_at = shared_address(tiles + v_row * STRIDE + c * 16 + lane / 16 * 8);
#pragma unroll
                for (int n = 0; n < NV; n++) {
                    if (D % 64 && (n * 4 + c) * 16 >= D) break;
                    float sum[OF_WARP][2][4] = {};
#pragma unroll (OF_WARP > 1 ? 2 : 4)  // with more blocks, all at once would spill registers
                    for (int k = 0; k < TILE / 16; k++) {
                        u32 v[4];
                        ldmatrix_transposed(v, v_at + (k * 16 * STRIDE + n * 64) * 2);
#pragma unroll
                        for (int j = 0; j < OF_WARP; j++) {
                            u32(&own)[4] = p[OF_WARP == 1 ? k : 0];
                            if (OF_WARP > 1) load_probabilities(own, j, k);
                            mma(sum[j][0], own, v[0], v[1]);
                            mma(sum[j][1], own, v[2], v[3]);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                        for (int i = 0; i < 2; i++)
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                float& x = o[j][2 * n + i][e];
                                x = __fmaf_rn(sum[j][i][e], after[j][e / 2], x * before[j][e / 2]);  // both products are exact
                            }
                }
                if (EXACT && coming[tile % 4].x & 4) {
#pragma unroll
                    for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const int r = own_row(j, half);
                            if (r >= rows) continue;
                            const float2 rest = written[coming[tile % 4].x / TILE % 2 ^ 1][r];
                            const float both = fmaxf(top[j][half], rest.x), here = power(top[j][half] - both), there = power(rest.x - both);
                            l[j][half] = l[j][half] * here + rest.y * there, top[j][half] = both;
                            const float* in = sums + ((s64)coming[tile % 4].y * T * H + heads[r]) * D + c * 16 + lane % 4 * 2;
#pragma unroll
                            for (int n = 0; n < NV; n++)
#pragma unroll
                                for (int i = 0; i < 2; i++) {
                                    if (D % 64 && (n * 4 + c) * 16 >= D) continue;
                                    const float2 x = *(const float2*)(in + n * 64 + i * 8);
                                    float(&mine)[4] = o[j][2 * n + i];
                                    mine[2 * half] = __fmaf_rn(mine[2 * half], here, x.x * there);
                                    mine[2 * half + 1] = __fmaf_rn(mine[2 * half + 1], here, x.y * there);
                                }
                        }
                }
                if (coming[tile % 4].x % 2) {
#pragma unroll
                    for (int j = 0; j < OF_WARP; j++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const int r = own_row(j, half);
                            if (r >= rows) continue;
                            const s64 to = (s64)coming[tile % 4].y * T * H + heads[r];
                            if (c == 0 && lane % 4 == 0) stats[to] = make_float2(top[j][half], l[j][half]);
                            if (EXACT && c == 0 && lane % 4 == 0)
                                written[coming[tile % 4].x / TILE % 2][r] = make_float2(top[j][half], l[j][half]);
                            float* out = sums + to * D + c * 16 + lane % 4 * 2;
#pragma unroll
                            for (int n = 0; n < NV; n++)
#pragma unroll
                                for (int i = 0; i < 2; i++)
                                    if (D % 64 == 0 || (n * 4 + c) * 16 < D)
                                        *(float2*)(out + n * 64 + i * 8) =
                                            make_float2(o[j][2 * n + i][2 * half], o[j][2 * n + i][2 * half + 1]);
                        }
                    begin_piece();
                }
            }
            if (BUFFERS <= 2) {  // the next values must not wait for the keys before them
                __syncthreads();
                fetch(2 * tile + 1 + BUFFERS, true);
            }
            wait_all_but<BUFFERS <= 2 ? BUFFERS - 1 : BUFFERS - 2>();
            if (BUFFERS > 2) fetch(2 * tile + 1 + BUFFERS, true);
        }
    }
}
