// attention: grouped-query attention of a long step: prefill
// Meaning   common/reference.py NumpyOps.attention        Launcher  cuda_backend/attention.py
// In        q [T][H][D] float16 and keys and values [K][place][D] float16, which already contain the step's rows
//           (heads_to_cache.cu); sink_logits [H]: one more score of each head, without a value, with SINK_LOGITS
// Out       out [T][H][DIM] float32
// Build     formats.cuh; EXACT, of packed rows alone: exact.cuh; D, a multiple of 16 up to 256; DIM: the width of a head of out, at most D,
//           zeros after it in q and cache
//           IN_PARTS: for `part`, which attends to one range of positions per launch
//           SINK_LOGITS: for `whole`, whether there are any
//           SPARSE: positions of a block of keys and of queries; `sight` has the bits of choose_blocks.cu; 0: all keys are seen
// Work      rows are (t, query head of the group), 64 per CTA of four warps; tiles of 64 positions, or POSITIONS, up to the rows' last
//           Rows that are not float16 are unpacked as they are read, in the rotated domain; o is rotated back at the end.
//           EXACT: first tiles of codes, then the first tiles and the latest ones of float16 rows
// Assumes   capacity is a multiple of 64, and memory beyond the last row holds finite numbers; planes are one sequence's
// Numbers   float16 products, float32 sums; online softmax
// Bound     tensor cores
// Origin    FlashAttention-2 (Dao, arXiv 2307.08691)
// Tried     packed rows without a bound on CTAs per multiprocessor -> bf16 heads of 128 (capability 8.0) and lm4 heads of 64 (9.0)
//           spill 8 bytes

#define STRIDE (D + 8)  // halves; an odd number of 16-byte units, so that ldmatrix has no bank conflicts
#ifdef POSITIONS  // positions of a tile, if a card has too little shared memory for two tiles of 64
#define TILE POSITIONS
#define ONE_TILE true  // keys and values use one place alternately
#else
#define TILE TILE_POSITIONS
#define ONE_TILE false
#endif
#ifndef SPARSE
#define SPARSE 0
#endif
#ifndef SINK_LOGITS
#define SINK_LOGITS 0
#endif
#define BLOCKS ((D + 31) / 32)  // blocks of a row of the cache that is not float16
#if D > 64 && !defined(PLAIN_FLOAT16)
#define AND_BLOCKS , 2
#elif D > 64
#define AND_BLOCKS
#else  // without the bound the compiler spills to fit one block more
#define AND_BLOCKS , __CUDA_ARCH__ < 800 ? 2 : __CUDA_ARCH__ < 900 || EXACT || KEYS == TURBOQUANT ? 3 : 4
#endif

template <Format F>
__device__ __forceinline__ void load_tile(u16* to, const Plane& plane, int at) {  // TILE x D
    if constexpr (F == TURBOQUANT) {
        const u8* rows = tile_at(plane, at, row_bytes(F, D));
        constexpr int chunks = (D + 127) / 128;
#pragma unroll 1
        for (int n = threadIdx.x / 32; n < TILE * chunks; n += 4)
            unpack_turboquant<D>(to + n / chunks * STRIDE + n % chunks * 128, rows + n / chunks * row_bytes(F, D),
                n % chunks, threadIdx.x % 32);
    } else if constexpr (F != F16) {
        const u8* rows = tile_at(plane, at, row_bytes(F, D));
#pragma unroll 1
        for (int n = threadIdx.x; n < TILE * BLOCKS; n += 128) {
            const int row = n % TILE, block = (n / TILE + row) % BLOCKS;
            unpack_32<F, D>(to + row * STRIDE + block * 32, rows + row * row_bytes(F, D), block);
        }
    } else {
        const u16* from = (const u16*)tile_at(plane, at, 2 * D);
        for (int i = threadIdx.x; i < TILE * (D / 8); i += 128)
            copy16(shared_address(to + i / (D / 8) * STRIDE + i % (D / 8) * 8), from + (s64)i * 8);
    }
}

// Adds tiles [begin, end) of positions for the 64 rows of q in `qs`; o and m, l per lane: rows g and g + 8 of its warp.
// An EXACT cache: only positions that the rows read in the formats KEYS_AS and VALUES_AS; CODED: these formats are codes, to whose
// products with a row its `shifts` must be added. SPARSE: only blocks with a bit in `seen`, which the first block always has.
template <Format KEYS_AS, Format VALUES_AS, bool CODED>
__device__ __forceinline__ void attend(float (&o)[D / 8][4], float (&m)[2], float (&l)[2], const u16* qs, u16* ks, u16* vs,
                                       Plane keys, Plane values, int begin, int end,
                                       const Mask& mask, int first_row, int group, int rows, float scale,
                                       const Exact& exact, const float* shifts, const u32* seen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t_of[2] = {(first_row + warp * 16 + lane / 4) / group, (first_row + warp * 16 + lane / 4 + 8) / group};
    const bool active = first_row + warp * 16 < rows;
    const u32 q_at = shared_address(qs + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 8);
    const u32 k_at = shared_address(ks + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
    const u32 v_at = shared_address(vs + (lane % 16) * STRIDE + lane / 16 * 8);
    auto after = [&](int at) {
        at += TILE;
#if SPARSE
        while (at < end && !(seen[at / SPARSE / 32] >> at / SPARSE % 32 & 1)) at += TILE;
#endif
        return at;
    };
    if (begin < end) load_tile<KEYS_AS>(ks, keys, begin);
    commit();
    for (int at = begin, next; at < end; at = next) {
        next = after(at);
        if (!ONE_TILE) load_tile<VALUES_AS>(vs, values, at);
        commit();
        wait_all_but<ONE_TILE ? 0 : 1>();
        float s[TILE / 8][4] = {};
        if (active) {
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                u32 a[4];
                ldmatrix(a, q_at + d * 32);
#pragma unroll
                for (int n = 0; n < TILE / 16; n++) {
                    u32 b[4];
                    ldmatrix(b, k_at + (n * 16 * STRIDE + d * 16) * 2);
                    mma(s[2 * n], a, b[0], b[1]);
                    mma(s[2 * n + 1], a, b[2], b[3]);
                }
            }
        }
        __syncthreads();
        const bool more = next < end;
        if (ONE_TILE)
            load_tile<VALUES_AS>(vs, values, at);
        else if (more)
            load_tile<KEYS_AS>(ks, keys, next);
        commit();
        u32 p[TILE / 8][2];
        if (active) {
            const bool all = !EXACT && at + TILE <= mask.past && !mask.window;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = m[half];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[n][2 * half + e];
                        const int position = at + n * 8 + lane % 4 * 2 + e;
                        bool see = all || (t_of[half] < mask.rows && mask.visible(t_of[half], position));
                        if (EXACT) {
                            see &= (position < exact.first || position > mask.past + t_of[half] - exact.recent) != CODED;
                            if (CODED) x += shifts[warp * 16 + lane / 4 + half * 8];
                        }
                        x = see ? x * scale : -__int_as_float(0x7f800000);
                        top = fmaxf(top, x);
                    }
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
                const float base = top == -__int_as_float(0x7f800000) ? 0.0f : top;
                const float keep = exp2f(m[half] - base);
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < TILE / 8; n++) {
                    const float x = exp2f(s[n][2 * half] - base), y = exp2f(s[n][2 * half + 1] - base);
                    sum += x + y;
                    p[n][half] = to_half2(x, y);
                }
                l[half] = l[half] * keep + sum;
                m[half] = top;
#pragma unroll
                for (int n = 0; n < D / 8; n++) o[n][2 * half] *= keep, o[n][2 * half + 1] *= keep;
            }
        }
        wait_all_but<ONE_TILE ? 0 : 1>();
        if (active) {
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                const u32 a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    u32 b[4];
                    ldmatrix_transposed(b, v_at + (k * 16 * STRIDE + n * 16) * 2);
                    mma(o[2 * n], a, b[0], b[1]);
                    mma(o[2 * n + 1], a, b[2], b[3]);
                }
            }
        }
        __syncthreads();
        if (ONE_TILE && more) load_tile<KEYS_AS>(ks, keys, next);
    }
    wait_all_but<0>();
}

// Adds up the sums of a row over the four lanes that hold it, after the last tile.
__device__ __forceinline__ void add_lanes(float (&l)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        l[half] += __shfl_xor_sync(FULL, l[half], 1);
        l[half] += __shfl_xor_sync(FULL, l[half], 2);
    }
}

// A bit for each group of 32 columns changes the sign of one column: columns n * 8 + lane % 4 * 2 + e of a group.
template <int GROUP>
__device__ __forceinline__ void turn_signs(float (&o)[D / 8][4], int lane, u32 w0, u32 w1, u32 w2, u32 w3) {
    const u32 words[4] = {w0, w1, w2, w3};
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const u32 bits = words[n * 8 % GROUP / 32] >> n * 8 % 32 >> lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = __uint_as_float(__float_as_uint(o[n][i]) ^ (bits >> i % 2) << 31);
    }
}

// formats.cuh rotated_back, for accumulators.
__device__ __forceinline__ void rotate_back(float (&o)[D / 8][4], int lane) {
    constexpr int GROUP = wht_group(D);
    turn_signs<GROUP>(o, lane, SECOND_SIGNS);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const float a = o[n][i], b = o[n][i + 1];
            o[n][i] = a + b, o[n][i + 1] = a - b;
        }
#pragma unroll
        for (int m = 1; m < 4; m <<= 1)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float other = __shfl_xor_sync(FULL, o[n][i], m);
                o[n][i] = lane & m ? other - o[n][i] : o[n][i] + other;
            }
    }
#pragma unroll
    for (int distance = 1; distance < GROUP / 8; distance <<= 1)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (!(n & distance))
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float a = o[n][i], b = o[n + distance][i];
                    o[n][i] = (a + b) * (2 * distance < GROUP / 8 ? 1.0f : root_of(GROUP));
                    o[n + distance][i] = (a - b) * (2 * distance < GROUP / 8 ? 1.0f : root_of(GROUP));
                }
    turn_signs<GROUP>(o, lane, FIRST_SIGNS);
}

// Loads 64 rows of q, (t, query head of the group), zeros beyond the last row.
__device__ __forceinline__ void load_queries(u16* qs, const u16* q, int first_row, int group, int H, int head0, int rows) {
    for (int i = threadIdx.x; i < 64 * (D / 8); i += 128) {
        const int r = first_row + i / (D / 8), c = i % (D / 8) * 8;
        uint4 e = make_uint4(0, 0, 0, 0);
        if (r < rows) e = *(const uint4*)(q + ((s64)(r / group) * H + head0 + r % group) * D + c);
        *(uint4*)(qs + i / (D / 8) * STRIDE + c) = e;
    }
}

extern "C" __global__ void __launch_bounds__(128 AND_BLOCKS)
whole(const u16* q, Plane keys, Plane values, int H, int K, const StepState* step,
      const int* positions, int T, float scale, int window, int sinks, const float* sink_logits, float* out, Exact exact, const u32* sight,
      int words) {
    begin();
    extern __shared__ __align__(16) u16 shared[];
    u16 *qs = shared, *ks = qs + 64 * STRIDE, *vs = ONE_TILE ? ks : ks + TILE * STRIDE;
    Run run = step->run[0];  // a long step has one sequence
    run.first = 0;           // a constant here, to save registers
    const Mask mask(step, run, run.first, positions, window, sinks, 0);
    const int group = H / K, rows = T * group, head = blockIdx.y, lane = threadIdx.x % 32;
    const int first_row = (gridDim.x - 1 - blockIdx.x) * 64;  // blocks with the most keys first
    const int last = min(first_row + 63, rows - 1) / group;
    float o[D / 8][4] = {}, m[2], l[2] = {0.0f, 0.0f};
    m[0] = m[1] = -__int_as_float(0x7f800000);
    load_queries(qs, q, first_row, group, H, head * group, rows);
#if !EXACT && !SPARSE && __CUDA_ARCH__ >= 800  // other builds have no register for it: attention.py whole
    if constexpr (!PACKED) keys = of_slot(keys, run.slot), values = of_slot(values, run.slot);
#endif
    keys.rows = head_at(keys, head, row_bytes(KEYS, D)), values.rows = head_at(values, head, row_bytes(VALUES, D));
#if EXACT
    __shared__ float shifts[64];
    if (threadIdx.x < 64) {
        const int r = min(first_row + (int)threadIdx.x, rows - 1);
        shifts[threadIdx.x] = exact.shift[(s64)(r / group) * H + head * group + r % group];
    }
    const int stop = mask.past + last + 1, oldest = max(0, mask.past + first_row / group - exact.recent + 1) / TILE * TILE;
    const int first_exact = min(stop, (exact.first + TILE - 1) / TILE * TILE);
    __syncthreads();
    attend<KEYS, VALUES, true>(o, m, l, qs, ks, vs, keys, values, exact.first / TILE * TILE, stop - exact.recent, mask, first_row,
                               group, rows, scale, exact, shifts, 0);
    load_queries(qs, exact.q, first_row, group, H, head * group, rows);
    keys = exact.keys, values = exact.values;
    keys.rows = head_at(keys, head, 2 * D), values.rows = head_at(values, head, 2 * D);
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        __syncthreads();
        attend<F16, F16, false>(o, m, l, qs, ks, vs, keys, values, turn ? max(first_exact, oldest) : 0, turn ? stop : first_exact, mask,
                                first_row, group, rows, scale, exact, shifts, 0);
    }
#else
#if SPARSE
    sight += ((s64)head * ((T + SPARSE - 1) / SPARSE) + first_row / group / SPARSE) * words;
#endif
    const int begin = max(0, mask.low(first_row / group)) / TILE * TILE, kept = min(begin, window ? (sinks + 63) / 64 * 64 : 0);
#pragma unroll 1
    for (int turn = kept ? 0 : 1; turn < 2; turn++) {
        __syncthreads();
        attend<KEYS, VALUES, PACKED>(o, m, l, qs, ks, vs, keys, values, turn ? begin : 0, turn ? mask.past + last + 1 : kept, mask,
                                     first_row, group, rows, scale, exact, 0, sight);
    }
#endif
    add_lanes(l);
    if (TURN_VALUES) rotate_back(o, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = first_row + threadIdx.x / 32 * 16 + lane / 4 + half * 8;
        if (r >= rows) continue;
        const int head_of_q = head * group + r % group;
#if SINK_LOGITS
        const float sink = sink_logits[head_of_q] * LOG2_E, both = fmaxf(m[half], sink), here = exp2f(m[half] - both);
        const float inverse = here / (l[half] * here + exp2f(sink - both));
#else
        const float inverse = 1.0f / l[half];
#endif
        float* to = out + ((s64)(r / group) * H + head_of_q) * DIM;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + lane % 4 * 2 + e < DIM) to[n * 8 + lane % 4 * 2 + e] = o[n][2 * half + e] * inverse;
    }
}

// Attention over positions [from, to), which are at the planes' places from 0 on, a head of keys per head of q; launched for one
// range after the other, from 0 on. Until a row has all of its positions, out holds its sums, and `held` [T][H][4] the largest
// score and the sum of weights of each of the four lanes: the bits are those of one launch. `from` is a multiple of TILE.
extern "C" __global__ void __launch_bounds__(128 AND_BLOCKS)
part(const u16* q, Plane keys, Plane values, int H, const StepState* step, const int* positions, int T, float scale, int from, int to,
     float* out, float2* held) {
#ifdef IN_PARTS
    begin();
    extern __shared__ __align__(16) u16 shared[];
    u16 *qs = shared, *ks = qs + 64 * STRIDE, *vs = ONE_TILE ? ks : ks + TILE * STRIDE;
    const Mask mask(step, step->run[0], 0, positions, 0, 0, 0);
    const int head = blockIdx.y, lane = threadIdx.x % 32, first_row = (gridDim.x - 1 - blockIdx.x) * 64;
    const int stop = mask.past + min(first_row + 63, T - 1) + 1;
    if (from >= stop) return;
    const bool ends = to >= stop;
    float o[D / 8][4] = {}, m[2], l[2] = {0.0f, 0.0f};
    m[0] = m[1] = -__int_as_float(0x7f800000);
    auto row_of_half = [&](int half) { return first_row + threadIdx.x / 32 * 16 + lane / 4 + half * 8; };
    auto sums_of = [&](int r) { return out + ((s64)r * H + head) * DIM + lane % 4 * 2; };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row_of_half(half);
        if (!from || r >= T) continue;
        const float2 before = held[((s64)r * H + head) * 4 + lane % 4];
        m[half] = before.x, l[half] = before.y;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + lane % 4 * 2 + e < DIM) o[n][2 * half + e] = sums_of(r)[n * 8 + e];
    }
    load_queries(qs, q, first_row, 1, H, head, T);
    keys.fixed = values.fixed = 0x7fffffff;
    keys.rows = head_at(keys, head, 2 * D) - (s64)from * 2 * D, values.rows = head_at(values, head, 2 * D) - (s64)from * 2 * D;
    __syncthreads();
    attend<F16, F16, false>(o, m, l, qs, ks, vs, keys, values, from, min(to, stop), mask, first_row, 1, T, scale, Exact(), 0, 0);
    if (ends) add_lanes(l);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row_of_half(half);
        if (r >= T) continue;
        if (!ends) held[((s64)r * H + head) * 4 + lane % 4] = make_float2(m[half], l[half]);
        const float factor = ends ? 1.0f / l[half] : 1.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + lane % 4 * 2 + e < DIM) sums_of(r)[n * 8 + e] = o[n][2 * half + e] * factor;
    }
#endif
}
