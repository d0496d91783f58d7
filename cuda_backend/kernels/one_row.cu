// one_row: grouped-query attention of a step with one row per sequence; rows of the cache become tensor-core operands in registers
// Meaning   common/reference.py NumpyOps.attention, common/reference_packed.py NumpyPacked      Launcher  cuda_backend/attention.py
// In, out   as split.cu; sums are bitwise identical to those of split.cu: the same products, added in the same order
// Build     formats.cuh: float16, or both of Lloyd-Max, q8_0 or q4_0; D = 64 (only float16), 128 or 256; BUFFERS: tiles of keys or values
//           in shared memory; CTAS per multiprocessor; WINDOWED: flash.cuh; ALONE: split.cu; EXACT: exact.cuh (the parameter `causal`
//           exists because split.cu is launched with the same arguments)
// Work      the rows of a product are positions or columns, its columns are at most eight query heads of a group. A CTA of four warps
//           goes through its share of the pieces of a sequence; tiles arrive in the format of the cache. Of a tile's keys a warp takes 16
//           positions, of the values a quarter of the columns. Float16 is an operand without a change. The lane that multiplies codes
//           decodes them, in the order of operands.cuh, which split.cu uses too; for values it interleaves the codes of two positions,
//           since an operand holds two positions of a column. Exact tiles, of which there are few, are copied only when they are needed
// Assumes   memory beyond the last row of the cache holds finite numbers; no row belongs to a tree
// Numbers   float16 products, float32 sums; split.cu
// Bound     bytes of keys and values; with codes, half-rate instructions that decode: two to three per value
// Tried     us per layer of Qwen3.6-27B at 32K on one H200, variant against what is here; docs/experiments/attention.md has more.
//           tiles unpacked to float16 in shared memory, as in split.cu -> 49.7 against 30.9 (q8_0), 48.5 against 35.5 (lm4)
//           float16, WeDLM-8B at 32K, CTAs of a multiprocessor x buffers: 4 x 3 -> 3.194 ms a step, 3 x 4 -> 3.150, 2 x 6 -> 3.100,
//             5 x 2 -> 3.158; 2 x 6 leaves 33 shares, and was not measured where 2,000 tokens need more
//           q8_0, heads of 128: 4 or 5 CTAs -> 2.804, 2.816 ms against 2.816 with three
//           one row of each of 64 sequences, 70 us per layer where bytes take 28: pages 68 KB further apart -> 9,190 tokens per second
//             against 9,261; pages of a layer next to each other -> 9,171; combine launched at the end -> 9,352 against 9,298, but 6,053
//             against 6,434 with 16 sequences
//           of the next, us on one H100, lm4 at 32K and 128K, tq3_0 in brackets; 35.6, 100.1 (34.3, 88.5) with what is here, but queries
//           loaded by two bytes:
//           a warp for a tile, eight of a CTA, sums of tiles added up through shared memory -> 39.4, 105.9 (33.1, 87.1); 188.7 (156.1)
//             against 214.1 (176.8) at 256K, but 16.3 (15.0) against 10.3 (10.0) at 2,048 tokens
//           two warps for a tile, sixteen of a CTA -> 35.8, 109.7 (33.1, 93.7); 40 % of cycles are maxima, sums and waits
//           as that, exact rows read where they lie, one warp that finds tiles -> 42.8, 117.1 (37.6, 99.5)
//           four CTAs of a multiprocessor, exact rows read where they lie -> 39.8, 111.6 (33.1, 94.4), 27.8 against 21.0 at 8,192 in
//             three CTAs
//           page numbers read one tile earlier, copies four at a time -> 38.2, 104.1 (32.4, 89.7), with three CTAs and exact rows so read
//           lm4 at 128K in four such CTAs without a part, 112.5 with all: table look-ups 74.9, products with values 72.9, with keys 84.9,
//             copies 100.4; without tensor cores, exponentials or loads from shared memory no less

#define TILE 64
#define CTA 128
#define STRIDE (D + 8)  // halves of a row of a float16 tile
#define MINE (D / 32)   // columns of values of a lane, of codes
#define HEADS 8         // of q, at most
#define PROBABILITIES (TILE + 8)
#define MINUS_INFINITY (-__int_as_float(0x7f800000))
#define NOWHERE (1 << 30)
#define KEY_BYTES row_bytes(KEYS, D)
#define VALUE_BYTES row_bytes(VALUES, D)
#define LONGER (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES)
#define STAGE (TILE * (PACKED ? LONGER : 2 * STRIDE))

__device__ __forceinline__ constexpr bool odd_words(int bytes) { return bytes / 4 % 8 % 2 || bytes == 136; }
// The row of a tile that lane group g has in the product of a warp; its other row lies NEXT_ROW further on. Avoids bank conflicts.
#define SPREAD (in_halves(KEYS) || (PACKED && odd_words(KEY_BYTES)))
#define NEXT_ROW (SPREAD ? 32 : 8)
__device__ __forceinline__ int row_of_warp(int warp, int g) {
    return !SPREAD ? warp * 16 + g : in_halves(KEYS) ? warp * 2 + g % 2 + g / 2 * 8 : warp + 4 * g;
}

// Nibbles of four Lloyd-Max codes.
template <Format F>
__device__ __forceinline__ u32 four_nibbles(const u8* group, int first) {
    if constexpr (F == LM4) {
        return *(const u16*)(group + 2 + first / 2);
    } else {
        const u32 codes = spread2(group[2 + first / 4]);
        if constexpr (F == LM2) return codes;
        return codes | spread1(group[2 + 32 + first / 8] >> first % 8 & 15) << 2;
    }
}

// Columns first to first + MINE - 1 of two rows, of which the first begins at a multiple of four: even[i] and odd[i] hold
// columns 2 i and 2 i + 1 of both.
template <Format F>
__device__ __forceinline__ void mixed_values(const u8* a, const u8* b, int first, u32 (&even)[MINE / 2], u32 (&odd)[MINE / 2]) {
    if constexpr (is_lloyd_max(F)) {
        const int at = first / 128 * block_bytes(F, D);
        const u32 scale = *(const u16*)(a + at) | (u32)*(const u16*)(b + at) << 16;
        if constexpr (MINE == 8) {
            const u32 x = nibbles<F>(a + at, first % 128, at % 4), y = nibbles<F>(b + at, first % 128, at % 4);
            look_up<F, 128>((x & 0x0f0f0f0fu) | (y & 0x0f0f0f0fu) << 4, scale, scale, even);
            look_up<F, 128>((x >> 4 & 0x0f0f0f0fu) | (y & 0xf0f0f0f0u), scale, scale, odd);
        } else {
            const u32 x = four_nibbles<F>(a, first), y = four_nibbles<F>(b, first);
            u32 both[4];
            look_up<F, 128>((x & 0x0f0fu) | (y & 0x0f0fu) << 4 | (x >> 4 & 0x0f0fu) << 16 | (y & 0xf0f0u) << 16, scale, scale, both);
            even[0] = both[0], even[1] = both[1], odd[0] = both[2], odd[1] = both[3];
        }
    } else {
        const int at = first / 32 * block_bytes(F, D);
        const u32 scale = *(const u16*)(a + at) | (u32)*(const u16*)(b + at) << 16;
        u32 v[MINE / 4], w[MINE / 4];
        code_bytes<F>(a + at, first % 32, at % 4, v), code_bytes<F>(b + at, first % 32, at % 4, w);
#pragma unroll
        for (int i = 0; i < MINE / 2; i++) {
            const u32 both = __byte_perm(v[i / 2], w[i / 2], i % 2 ? 0x7362 : 0x5140);  // a, b of one column and of the next
            even[i] = scaled<F>(both, 0x4140, scale), odd[i] = scaled<F>(both, 0x4342, scale);
        }
    }
}
// Mixes rows of float16 in this way.
__device__ __forceinline__ void mixed_exact(const u16* a, const u16* b, u32 (&even)[MINE / 2], u32 (&odd)[MINE / 2]) {
#pragma unroll
    for (int i = 0; i < MINE / 2; i++) {
        const u32 v = ((const u32*)a)[i], w = ((const u32*)b)[i];
        even[i] = __byte_perm(v, w, 0x5410), odd[i] = __byte_perm(v, w, 0x7632);
    }
}

// Copies a tile of float16 rows that are adjacent in the cache.
__device__ __forceinline__ void copy_exact(u16* tile, const Plane& plane, int slot, int head, int at) {
    const u16* from = (const u16*)row_at(plane, slot, head, place_of(plane, at), 2 * D);
#pragma unroll 1
    for (int n = threadIdx.x; n < TILE * (D / 8); n += CTA)
        copy16(shared_address(tile + n / (D / 8) * STRIDE + n % (D / 8) * 8), from + n * 8);
    commit();
    wait_all_but<0>();
}

// Columns first to first + 7 of four rows of two or three bits, the second after the first and eight rows on: as mixed_values has
// those of two. Pairs of eight rows on follow those of the first.
template <Format F>
__device__ __forceinline__ void four_rows(const u8* rows, int first, u32 (&even)[2][MINE / 2], u32 (&odd)[2][MINE / 2]) {
    if constexpr (in_halves(F)) {
        const u8 *a = rows + first / 128 * block_bytes(F, D), *b = a + VALUE_BYTES, *c = a + 8 * VALUE_BYTES, *d = b + 8 * VALUE_BYTES;
        const int low = 2 + first % 128 / 4, high = 34 + first % 128 / 8;
        auto both = [](const u8* x, const u8* y, int at) { return *(const u16*)(x + at) | (u32)*(const u16*)(y + at) << 16; };
        const u32 highs = F == LM2 ? 0 : (a[high] | b[high] << 8) | (c[high] | d[high] << 8) << 16;
        u32 out[16];
        pairs_of<F>(both(a, c, low), both(b, d, low), highs, both(a, b, 0), both(c, d, 0), out);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // column i lies in word i % 4 * 4 + i / 4
            auto& to = i % 2 ? odd : even;
            to[0][i / 2] = out[i % 4 * 4 + i / 4], to[1][i / 2] = out[i % 4 * 4 + i / 4 + 2];
        }
    }
}

// Multiplies 16 positions by q.
__device__ __forceinline__ void multiply_keys(float (&s)[2][4], const u8* a, int t, int odd, const u32 (&q)[D / 8]) {
    constexpr int words = key_words<KEYS>();
#pragma unroll
    for (int n = 0; n < D / 8 / words; n++) {
        u32 v[words], w[words];
        words_of_keys<KEYS>(a, n, t, odd, v), words_of_keys<KEYS>(a + NEXT_ROW * KEY_BYTES, n, t, (odd + NEXT_ROW * KEY_BYTES) % 4, w);
#pragma unroll
        for (int i = 0; i < words; i += 2) {
            const u32 rows[4] = {v[i], w[i], v[i + 1], w[i + 1]};
            mma(s[i / 2 % 2], rows, q[n * words + i], q[n * words + i + 1]);
        }
    }
}
// Multiplies 16 positions of a tile of float16, from `rows` on, by q.
__device__ __forceinline__ void multiply_exact(float (&s)[2][4], const u16* rows, int lane, const u32 (&q)[D / 8]) {
    const u32 k_at = shared_address(rows + lane % 16 * STRIDE + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < D / 32; n++) {
        u32 k[4];
        ldmatrix(k, k_at + n * 64);
        mma(s[0], k, q[4 * n], q[4 * n + 1]);
        ldmatrix(k, k_at + n * 64 + 32);
        mma(s[1], k, q[4 * n + 2], q[4 * n + 3]);
    }
}

extern "C" __global__ void __launch_bounds__(CTA, CTAS)
one_row(const u16* q, Plane keys, Plane values, int H, int group, const StepState* step, const int* positions, int T, float scale,
        int window, int sinks, int causal, int trunk, float* sums, float2* stats, Exact exact) {
    release_next();
    if (!WINDOWED) window = sinks = 0;
    extern __shared__ __align__(16) u8 stages[];
    u16 *tile16 = (u16*)(stages + BUFFERS * STAGE), *ps = tile16 + EXACT * TILE * STRIDE;  // ps: probabilities of a head at each position
    __shared__ Pieces pieces;
    __shared__ int2 coming[4];  // split.cu
    __shared__ float tops[4][HEADS];
    [[maybe_unused]] __shared__ float2 written[2][HEADS];  // split.cu
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
    const Part own = ALONE ? Part{0, 0, 1, (int)blockIdx.z, (int)gridDim.z} : part_of(step, group, HEADS, window, blockIdx.z, gridDim.z);
    if (own.run < 0) return;
    const Run& run = step->run[own.run];
    const int past = run.past, slot = run.slot, row = ALONE ? 0 : run.first, low = window ? positions[row] - window + 1 : 0;
    if (threadIdx.x == 0) pieces.cut(6, past, 1, window, sinks, low, min((int)gridDim.z, MOST_SINGLE), trunk);
    const HeadRows of_keys = rows_of(keys, slot, head, KEY_BYTES), of_values = rows_of(values, slot, head, VALUE_BYTES);
    __syncthreads();
    const int items = pieces.count + pieces.tails;
    if (own.share >= items) return;

    // the tile that is fetched next, where its piece ends and where that one's sums lie, and the pieces of the CTA so far
    int ahead = 0, stop = 0, turn = 0, place = 0, opened = 0;  // opened: the first tile of that piece
    auto has_codes = [&](int at) { return !EXACT || (at + TILE > exact.first && at <= past - exact.recent); };
    auto has_exact = [&](int at) { return EXACT && (at < exact.first || at + TILE > past - exact.recent + 1); };
    bool goes_exact = true;
    auto advance = [&] {
        if (!goes_exact && has_exact(ahead)) {
            goes_exact = true;
            return;
        }
        ahead += TILE;
        if (ahead >= stop) {
            // alternately forwards and backwards, for equal shares
            const int item = turn * own.shares + (turn % 2 ? own.shares - 1 - own.share : own.share);
            turn++, ahead = NOWHERE;
            if (item >= items) return;
            const int number = item < pieces.count ? pieces.count - 1 - item : item;  // from the newest piece on: newer pieces are larger
            ahead = pieces.from(number), stop = pieces.to(number), place = pieces.place(number), opened = ahead;
        }
        goes_exact = !has_codes(ahead);
    };
    advance();
    int start = 0, page = 0;  // of the tile at `ahead`: where its rows lie, and in which page
    auto fetch = [&](int i, bool is_values) {  // load i, alternately of keys and of values
        if (!is_values && threadIdx.x == 0) {
            const bool both = has_codes(ahead + TILE) && has_exact(ahead + TILE);  // of the next tile, which begins anew
            const bool ends = (ahead + TILE >= stop || both) && (goes_exact || !has_exact(ahead));
            const bool joins = EXACT && goes_exact && ahead != opened && has_codes(ahead);
            coming[i / 2 % 4] = make_int2(ahead + (ahead < NOWHERE ? ends + (goes_exact ? 2 : 0) + (joins ? 4 : 0) : 0), place);
        }
        if (ahead < NOWHERE) {
            if (!goes_exact || !EXACT) {
                if (!is_values) start = place_of(keys, ahead);
                if (!is_values && of_keys.table) page = of_keys.table[start / PAGE], start %= PAGE;  // for the values as well
                const int bytes = is_values ? VALUE_BYTES : KEY_BYTES;
                const u8* from = (is_values ? of_values.rows + page * of_values.block : of_keys.rows + page * of_keys.block)
                    + (s64)start * bytes;
                const u32 to = shared_address(stages + i % BUFFERS * STAGE);
                if (PACKED) {
#pragma unroll 1
                    for (int n = threadIdx.x; n < TILE / 16 * bytes; n += CTA) copy16(to + n * 16, (const u16*)(from + n * 16));
                } else {
                    const u16* begin = (const u16*)from + threadIdx.x * 8;
                    const u32 line = to + threadIdx.x / (D / 8) * STRIDE * 2 + threadIdx.x % (D / 8) * 16;
#pragma unroll 4
                    for (int n = 0; n < TILE * (D / 8); n += CTA) copy16(line + n / (D / 8) * STRIDE * 2, begin + n * 8);
                }
            }
            if (is_values) advance();
        }
        commit();
    };
    bool waits = true;
#pragma unroll 1
    for (int i = 0; i < BUFFERS; i++) {
        if (waits && (i == BUFFERS - 1 || ahead + TILE > past)) depend(), waits = false;
        if (i < BUFFERS - 1) fetch(i, i % 2);
    }
    const int first_head = row * H + head * group;
    u32 query[D / 8];
    bool exact_query = false;
    auto load_query = [&](bool exactly) {
        const u16* from = (exactly && PACKED ? exact.q : q) + (s64)(first_head + min(g, group - 1)) * D;
        if (exactly) {  // as the columns lie
#pragma unroll
            for (int i = 0; i < D / 8; i++) query[i] = ((const u32*)from)[t + i * 4];
        } else if constexpr (in_halves(KEYS)) {
#pragma unroll
            for (int n = 0; n < D / 128; n++)
#pragma unroll
                for (int c = 0; c < 16; c += 8) {  // and those 16 on
                    const uint4 *eight = (const uint4*)(from + n * 128 + t * 32 + c), x = eight[0], y = eight[2];
                    const u32 v[4] = {x.x, x.y, x.z, x.w}, w[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        query[n * 16 + i % 4 * 4 + (c + i) / 4] = __byte_perm(v[i / 2], w[i / 2], i % 2 ? 0x7632 : 0x5410);
                }
        } else {
#pragma unroll
            for (int i = 0; i < D / 8; i += 4) {
                const uint4 eight = *(const uint4*)(from + i * 8 + t * 8);
                query[i] = eight.x, query[i + 1] = eight.y, query[i + 2] = eight.z, query[i + 3] = eight.w;
            }
        }
        exact_query = exactly;
    };
    load_query(!PACKED);
    float shifts[2] = {0.0f, 0.0f};
    if (EXACT)
        for (int e = 0; e < 2; e++) shifts[e] = exact.shift[first_head + min(2 * t + e, group - 1)];
#if EXACT
    const int coded = max(0, positions[row] - exact.recent + 1 - exact.first);  // positions that it reads from codes
#endif

    float o[D / 64][4] = {}, l[2] = {0.0f, 0.0f}, top[2] = {MINUS_INFINITY, MINUS_INFINITY}, best[2];  // of heads 2 t and 2 t + 1
    const int first = warp * (D / 4) + g * (PACKED ? MINE : 1);  // of the lane's columns
#pragma unroll 1
    for (int i = 0;; i++) {
        wait_all_but<BUFFERS - 2>();
        const int kind = coming[i % 4].x % TILE, at = coming[i % 4].x - kind;
        if (at >= NOWHERE) break;
        fetch(2 * i + BUFFERS - 1, BUFFERS % 2 == 0);
        const bool exactly = EXACT && kind & 2;
        if (EXACT && exactly != exact_query) load_query(exactly);
        float s[2][4] = {};
        const u8* stage = stages + 2 * i % BUFFERS * STAGE;
        const int mine = exactly ? warp * 16 + g : row_of_warp(warp, g), second = exactly ? 8 : NEXT_ROW;
        if (exactly) {
            copy_exact(tile16, exact.keys, slot, head, at);
            multiply_exact(s, tile16 + warp * 16 * STRIDE, lane, query);
        } else if constexpr (PACKED) {
            s[0][0] = s[0][2] = shifts[0], s[0][1] = s[0][3] = shifts[1];
            multiply_keys(s, stage + mine * KEY_BYTES, t, KEY_BYTES % 4 ? mine * KEY_BYTES % 4 : 0, query);
        } else {
            multiply_exact(s, (const u16*)stage + warp * 16 * STRIDE, lane, query);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float most = MINUS_INFINITY;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float& x = s[0][e + 2 * n];
                const int position = at + mine + n * second;
                bool see = position <= past && (!WINDOWED || position >= low || position < sinks);
#if EXACT
                see &= (u32)(position - exact.first) < (u32)coded != exactly;
#endif
                x = see ? (x + s[1][e + 2 * n]) * scale : MINUS_INFINITY;
                most = fmaxf(most, x);
            }
#pragma unroll
            for (int m = 4; m < 32; m <<= 1) most = fmaxf(most, __shfl_xor_sync(FULL, most, m));
            if (g == 0) tops[warp][2 * t + e] = most;
        }
        __syncthreads();
        fetch(2 * i + BUFFERS, BUFFERS % 2);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int r = 2 * t + e;
            best[e] = ceilf(fmaxf(fmaxf(tops[0][r], tops[1][r]), fmaxf(tops[2][r], tops[3][r])));
            const float base = best[e] == MINUS_INFINITY ? 0.0f : best[e];
            const u32 both = to_half2(exp2f(s[0][e] - base), exp2f(s[0][e + 2] - base));
            ps[r * PROBABILITIES + mine] = (u16)both, ps[r * PROBABILITIES + mine + second] = (u16)(both >> 16);
        }
        if (exactly) copy_exact(tile16, exact.values, slot, head, at);
        wait_all_but<BUFFERS - 1>();
        u32 p[TILE / 16][2];
        float before[2], after[2], ones[4] = {};  // factors; times ones
        const u32 p_at = shared_address(ps + lane % 8 * PROBABILITIES + lane / 8 * 8),
            one[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
#pragma unroll
        for (int k = 0; k < TILE / 16; k += 2) {
            u32 r[4];
            ldmatrix(r, p_at + k * 32);
            p[k][0] = r[0], p[k][1] = r[1], p[k + 1][0] = r[2], p[k + 1][1] = r[3];
            mma(ones, one, p[k][0], p[k][1]), mma(ones, one, p[k + 1][0], p[k + 1][1]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float both = fmaxf(top[e], best[e]);
            before[e] = power(top[e] - both), after[e] = power(best[e] - both);
            l[e] = l[e] * before[e] + ones[e] * after[e], top[e] = both;
        }
        float sum[D / 64][4] = {};
        stage = stages + (2 * i + 1) % BUFFERS * STAGE;
        if constexpr (PACKED) {
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                u32 even[2][MINE / 2], odd[2][MINE / 2];
                const int position = k * 16 + t * 2;
                if (exactly) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u16* a = tile16 + (position + h * 8) * STRIDE + first;
                        mixed_exact(a, a + STRIDE, even[h], odd[h]);
                    }
                } else if (in_halves(VALUES)) {
                    four_rows<VALUES>(stage + position * VALUE_BYTES, first, even, odd);
                } else {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const u8* v = stage + (position + h * 8) * VALUE_BYTES;
                        mixed_values<VALUES>(v, v + VALUE_BYTES, first, even[h], odd[h]);
                    }
                }
#pragma unroll
                for (int n = 0; n < D / 64; n++) {
                    const u32 v[4] = {even[0][n], odd[0][n], even[1][n], odd[1][n]};
                    mma(sum[n], v, p[k][0], p[k][1]);
                }
            }
        } else {
            const u32 v_at = shared_address((const u16*)stage + (lane % 8 + lane / 16 * 8) * STRIDE + warp * (D / 4) + lane / 8 % 2 * 8);
#pragma unroll
            for (int k = 0; k < TILE / 16; k++)
#pragma unroll
                for (int n = 0; n < D / 64; n++) {
                    u32 v[4];
                    ldmatrix_transposed(v, v_at + (k * 16 * STRIDE + n * 16) * 2);
                    mma(sum[n], v, p[k][0], p[k][1]);
                }
        }
#pragma unroll
        for (int n = 0; n < D / 64; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] = __fmaf_rn(sum[n][e], after[e % 2], o[n][e] * before[e % 2]);  // both products are exact
        if (EXACT && kind & 4) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (2 * t + e >= group) continue;
                const float2 rest = written[at / TILE % 2 ^ 1][2 * t + e];
                const float both = fmaxf(top[e], rest.x), here = power(top[e] - both), there = power(rest.x - both);
                l[e] = l[e] * here + rest.y * there, top[e] = both;
                const float2* in = (const float2*)(sums + ((s64)coming[i % 4].y * T * H + first_head + 2 * t + e) * D + first);
#pragma unroll
                for (int n = 0; n < D / 64; n++) {
                    const float2 x = in[n];
                    o[n][e] = __fmaf_rn(o[n][e], here, x.x * there), o[n][e + 2] = __fmaf_rn(o[n][e + 2], here, x.y * there);
                }
            }
        }
        if (kind % 2) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (2 * t + e >= group) continue;
                const s64 to = (s64)coming[i % 4].y * T * H + first_head + 2 * t + e;
                if (warp == 0 && g == 0) stats[to] = make_float2(top[e], l[e]);
                if (EXACT && warp == 0 && g == 0) written[at / TILE % 2][2 * t + e] = make_float2(top[e], l[e]);
                float* out = sums + to * D + first;
                if (PACKED) {
#pragma unroll
                    for (int n = 0; n < D / 64; n += 2)
                        *(float4*)(out + 2 * n) = make_float4(o[n][e], o[n][e + 2], o[n + 1][e], o[n + 1][e + 2]);
                } else {
#pragma unroll
                    for (int n = 0; n < D / 64; n++) out[n * 16] = o[n][e], out[n * 16 + 8] = o[n][e + 2];
                }
            }
            l[0] = l[1] = 0.0f, top[0] = top[1] = MINUS_INFINITY;
#pragma unroll
            for (int n = 0; n < D / 64; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
        }
    }
}
