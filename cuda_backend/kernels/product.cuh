// product: 16 rows of a quantized matrix times a unit's columns of COLS rows of x, on the tensor cores
// In        x   int8 codes with a scale per 128 columns, or 32 (store.cuh), which a type X returns to a lane by these members:
//               codes(half, pair, n)    of two groups of 32 columns of rows 8 n to 8 n + 7: B fragments of two m16n8k32
//               scales(n)               WHOLE: of either half of rows 8 n + 2 t and the next, t = lane % 4
//               scales(half, group, n)  others: of these rows
//               sums(n)                 WHOLE: of x, 32 columns each: B fragment of a bf16 m16n8k16, or before 8.0 of two float16 m16n8k8
// Build     one type of tile.cuh; COLS 1 or a multiple of 8
// Numbers   WHOLE types: 128 columns share a scale of x, and are added in integers. These operations round: the conversion of both
//           halves to float, each times its scale of x, and their sum; minima times sums of x in bf16 (16 bits of a sum), added for
//           256 columns by a tensor core; minima, then scales times the sum of both halves, added to the result. Q2_K adds minima
//           in integers, as scales. Other types: the dot product of each group of 32 columns is exact
// Tried     ms of a step of Qwen3.6-27B, variant against the kernel of that time (one H200); docs/experiments/products.md has more.
//           float16 activations times 2^-6 on wgmma -> 16.1 against 21.3 at 64 rows, but 6.48 against 6.02 at one, which must have
//             the same bits
//           float16 on wgmma, exact weights, a scale of x per 128 columns -> 21.3 against 21.3 at 64 rows: scales take the time
//             that tensor cores save
//           float16 on wgmma, codes times scales as integers, equal bits -> 15.0 against 14.2 at 64 rows, 6.70 against 6.17 at 16:
//             twice the
//             instructions to unpack, twice the bytes of x, and in half of the cycles no warp can issue
//           int8 on wgmma, 24 or 32 rows each -> 16.75 against 14.8 at 64 rows: only a group's sums can be
//             computed until the next one has arrived
//           Q4_K's scales multiplied into the codes, halves apart -> 19.1 against 17.9 at 64 rows: 647 instructions per tile, not 604
//           weights unpacked before x has arrived -> 4.84 against 4.74 at one row: faster in the first unit, slower in the others
//           64 rows as two batches of 32, the second with weights in L2 -> not finished: gate and up 61.4 us at 64 rows, twice 33.8
//             at 32

#if COLS == 1
#define NT 1
#define ACC 2  // columns 1 to 7 are padding
#else
#define NT (COLS / 8)
#define ACC 4
#endif
#define MAGIC 12582912.0f  // 1.5 * 2^23: an int32 accumulator that starts at its bits reads as a float

#if WHOLE
#define START 0
#else
#define START 0x4b400000  // MAGIC
#endif
#if MINS
#define CODES "u8"
#else
#define CODES "s8"
#endif

// c = START + a b
#if __CUDA_ARCH__ < 800
// c += a b of 8 rows, 8 columns, k = 16
__device__ __forceinline__ void mma_8x8(int& c0, int& c1, u32 a, u32 b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32." CODES ".s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+r"(c0), "+r"(c1) : "r"(a), "r"(b));
}
__device__ __forceinline__ void mma_half(int (&c)[4], u32 a0, u32 a1, u32 b) {
    c[0] = c[1] = c[2] = c[3] = START;
    mma_8x8(c[0], c[1], a0, b), mma_8x8(c[2], c[3], a1, b);
}
__device__ __forceinline__ void mma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_half(c, a[0], a[1], b0);
    mma_8x8(c[0], c[1], a[2], b1), mma_8x8(c[2], c[3], a[3], b1);
}
// The float16 minimum of a half, from those of minima_of, twice.
__device__ __forceinline__ u32 minimum_of(u32 both, int half) {
    return add_half2(__byte_perm(both, 0, half ? 0x3232 : 0x1010), 0xe400e400u);
}
#else
__device__ __forceinline__ void mma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32." CODES ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(START));
}
__device__ __forceinline__ void mma_half(int (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32." CODES ".s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(START));
}
__device__ __forceinline__ void less_128(u32& x) {  // of two bf16
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(0x3f803f80u), "r"(0xc300c300u));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, uint2 b) {  // a0 and a1 for k from 8 on, too
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%6,%7}, {%8,%8,%8,%8};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(b.x), "r"(b.y), "f"(0.0f));
}
#endif

#if WHOLE
static_assert(HALVES == 2, "two scales of x");

// sum += scale * dot: of the four results of a lane, or of its two rows where all columns are one
__device__ __forceinline__ void add(int (&sum)[ACC], const int (&c)[4], int low, int high) {
#pragma unroll
    for (int i = 0; i < ACC; i++)  // parallel to the tensor cores, which multiply-adds of floats would delay
        sum[i] += (i < ACC / 2 ? low : high) * c[i * 4 / ACC];
}
// v += sum * scale of x, likewise
__device__ __forceinline__ void scaled(float (&v)[ACC], const int (&sum)[ACC], float dx, float next_dx) {
#pragma unroll
    for (int i = 0; i < ACC; i++) v[i] = __fmaf_rn((float)sum[i], i * 4 / ACC % 2 ? next_dx : dx, v[i]);
}
// acc += factor * v, likewise
template <int N>
__device__ __forceinline__ void add(float (&acc)[ACC], const float (&v)[N], float low, float high) {
#pragma unroll
    for (int i = 0; i < ACC; i++) acc[i] = __fmaf_rn(i < ACC / 2 ? low : high, v[i * N / ACC], acc[i]);
}
#else
// acc += dx * (scale * dot + minimum * sum of codes), likewise
__device__ __forceinline__ void add(float (&acc)[ACC], const int (&c)[4], const float (&scale)[2], const float (&minimum)[2],
                                    float2 dx, u32 b0, u32 b1) {
#if MINS
    const u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    int sum[4];
    mma(sum, ones, b0, b1);
#endif
#pragma unroll
    for (int i = 0; i < ACC; i++) {
        const int e = i * 4 / ACC, high = i >= ACC / 2;
        float v = scale[high] * (__int_as_float(c[e]) - MAGIC);
#if MINS
        v = __fmaf_rn(minimum[high], __int_as_float(sum[e]) - MAGIC, v);
#endif
        acc[i] = __fmaf_rn(v, e % 2 ? dx.y : dx.x, acc[i]);
    }
}
#endif

#if SUMS
// acc += minima of a tile times sums of x, which a tensor core adds up for 256 columns
template <class X>
__device__ __forceinline__ void add_minima(float (&acc)[NT][ACC], const u8* tile, const X& x, int lane, int tiles) {
    const Scales low(tile, lane / 4, 0, SHIFT), high(tile, lane / 4 + 8, 0, SHIFT_HIGH);
    u32 low_minima = minima_of(tile, lane / 4, lane % 4), high_minima = minima_of(tile, lane / 4 + 8, lane % 4);
#if __CUDA_ARCH__ >= 800
    less_128(low_minima), less_128(high_minima);
#endif
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if (n >= tiles) break;
        float minima[4];
#if __CUDA_ARCH__ < 800
        float of[2][4] = {};
        const uint2 sums = x.sums(n);
        const float4 dx = x.scales(n);
#pragma unroll
        for (int half = 0; half < 2; half++)
            mma_k8(of[half], minimum_of(low_minima, half), minimum_of(high_minima, half), half ? sums.y : sums.x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            minima[i] = __fmaf_rn(of[1][i], i % 2 ? dx.w : dx.y, of[0][i] * (i % 2 ? dx.z : dx.x));
#else
        mma_bf16(minima, low_minima, high_minima, x.sums(n));
#endif
        add(acc[n], minima, low.m, high.m);
    }
}
#endif

// acc += one tile times one unit of x, which has `tiles` groups of eight rows. AT_ONCE: halves whose instructions may be in flight
// together, MOST: groups of eight that are summed up together; fewer take fewer registers.
#if WHOLE
template <int AT_ONCE, int MOST, class X>
__device__ __forceinline__ void multiply(float (&acc)[NT][ACC], const u8* tile, const X& x, int lane, int tiles = NT) {
    const u8* codes = tile + lane * 16;
#if SUMS
    add_minima(acc, tile, x, lane, tiles);
#endif
#pragma unroll
    for (int first = 0; first < NT; first += MOST) {
        float v[MOST][ACC] = {};
#ifdef Q2_K
        float minima[MOST][ACC] = {};
#endif
#pragma unroll AT_ONCE
        for (int half = 0; half < HALVES; half++) {
            if (AT_ONCE < HALVES) asm volatile("" ::: "memory");  // read scales here, not both halves' scales earlier
            const Scales low(tile, lane / 4, half, SHIFT), high(tile, lane / 4 + 8, half, SHIFT_HIGH);
            int sum[MOST][ACC] = {};
#ifdef Q2_K
            int minima_sum[MOST][ACC] = {};
#endif
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const int j = half * 4 + pair * 2;
                u32 a[2][4];
                unpack(codes, j, a[0]), unpack(codes, j + 1, a[1]);
                int scales[2][64 / GROUP];
#pragma unroll
                for (int i = 0; i < 64 / GROUP; i++)
                    scales[0][i] = low.of(pair * 64 / GROUP + i), scales[1][i] = high.of(pair * 64 / GROUP + i);
#pragma unroll
                for (int n = first; n < min(first + MOST, NT); n++) {
                    if (n >= tiles) break;
                    const uint4 b = x.codes(half, pair, n);
                    int c[4];
#if GROUP == 32
                    mma(c, a[0], b.x, b.y), add(sum[n - first], c, scales[0][0], scales[1][0]);
                    mma(c, a[1], b.z, b.w), add(sum[n - first], c, scales[0][1], scales[1][1]);
#else
                    mma_half(c, a[0][0], a[0][1], b.x), add(sum[n - first], c, scales[0][0], scales[1][0]);
                    mma_half(c, a[0][2], a[0][3], b.y), add(sum[n - first], c, scales[0][1], scales[1][1]);
                    mma_half(c, a[1][0], a[1][1], b.z), add(sum[n - first], c, scales[0][2], scales[1][2]);
                    mma_half(c, a[1][2], a[1][3], b.w), add(sum[n - first], c, scales[0][3], scales[1][3]);
#endif
#ifdef Q2_K
                    const u32 columns[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        mma_half(c, low.minima_of(pair * 4 + i), high.minima_of(pair * 4 + i), columns[i]);
                        add(minima_sum[n - first], c, 1, 1);
                    }
#endif
                }
            }
#pragma unroll
            for (int n = first; n < min(first + MOST, NT); n++) {
                if (n >= tiles) break;
                const float4 dx = x.scales(n);
                scaled(v[n - first], sum[n - first], half ? dx.y : dx.x, half ? dx.w : dx.z);
#ifdef Q2_K
                scaled(minima[n - first], minima_sum[n - first], half ? dx.y : dx.x, half ? dx.w : dx.z);
#endif
            }
        }
        const Scales low(tile, lane / 4, 0, SHIFT), high(tile, lane / 4 + 8, 0, SHIFT_HIGH);
#pragma unroll
        for (int n = first; n < min(first + MOST, NT); n++) {
            if (n >= tiles) break;
#ifdef Q2_K
            add(acc[n], minima[n - first], low.m, high.m);
#endif
            add(acc[n], v[n - first], low.d, high.d);
        }
    }
}
#else
template <int AT_ONCE, int MOST, class X>
__device__ __forceinline__ void multiply(float (&acc)[NT][ACC], const u8* tile, const X& x, int lane, int tiles = NT) {
    const u8* codes = tile + lane * 16;
#pragma unroll AT_ONCE
    for (int half = 0; half < HALVES; half++) {
        if (AT_ONCE < HALVES) asm volatile("" ::: "memory");  // likewise
        const Scales low(tile, lane / 4, half, SHIFT), high(tile, lane / 4 + 8, half, SHIFT_HIGH);
#pragma unroll
        for (int first = 0; first < NT; first += MOST) {
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const int j = half * 4 + pair * 2;
                u32 a[2][4];
                unpack(codes, j, a[0]), unpack(codes, j + 1, a[1]);
                float scales[2][2], minima[2][2] = {};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    scales[i][0] = low.d * low.of(pair * 2 + i), scales[i][1] = high.d * high.of(pair * 2 + i);
#if MINS
                    minima[i][0] = low.minimum(pair * 2 + i), minima[i][1] = high.minimum(pair * 2 + i);
#endif
                }
#pragma unroll
                for (int n = first; n < min(first + MOST, NT); n++) {
                    if (n >= tiles) break;
                    const uint4 b = x.codes(half, pair, n);
                    int c[4];
                    mma(c, a[0], b.x, b.y), add(acc[n], c, scales[0], minima[0], x.scales(half, pair * 2, n), b.x, b.y);
                    mma(c, a[1], b.z, b.w), add(acc[n], c, scales[1], minima[1], x.scales(half, pair * 2 + 1, n), b.z, b.w);
                }
            }
        }
    }
}
#endif
