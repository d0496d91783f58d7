// product: 16 rows of a quantized matrix times a unit's columns of COLS rows of x, on the tensor cores
// In        x   int8 codes with a scale per 128 columns, or 32 (store.cuh), where a type X with these members finds them for a lane:
//               codes(half, pair, n)    of two groups of 32 columns of rows 8 n to 8 n + 7: B fragments of two m16n8k32
//               scales(half, group, n)  of rows 8 n + 2 t and the next, t = lane % 4
//               sums(half, n)           of codes, a float16 per 16 columns: B fragment of m16n8k8
// Build     one type of tile.cuh; COLS 1 or a multiple of 8
// Numbers   WHOLE types: 128 columns, which share a scale of x, add up in whole numbers, so that what follows is all that
//           rounds: one conversion, scale, minima, scale of x, in this order. Others: the dot of each group of 32 columns is exact

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
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

#if WHOLE
// sum += scale * dot: of the four results of a lane, or of its two rows where all columns are one
__device__ __forceinline__ void add(int (&sum)[ACC], const int (&c)[4], int low, int high) {
#pragma unroll
    for (int i = 0; i < ACC; i++)  // beside the tensor cores, which multiply-adds of floats would hold up
        sum[i] += (i < ACC / 2 ? low : high) * c[i * 4 / ACC];
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

// acc += one tile times one unit of x, of which `tiles` eights of rows are there. AT_ONCE: halves whose instructions may be
// in flight together, MOST: eights that are summed up together; fewer take fewer registers.
template <int AT_ONCE, int MOST, class X>
__device__ __forceinline__ void multiply(float (&acc)[NT][ACC], const u8* tile, const X& x, int lane, int tiles = NT) {
    const u8* codes = tile + lane * 16;
#pragma unroll AT_ONCE
    for (int half = 0; half < HALVES; half++) {
        if (AT_ONCE < HALVES) asm volatile("" ::: "memory");  // read scales here, not those of all halves before
        const Scales low(tile, lane / 4, half, SHIFT), high(tile, lane / 4 + 8, half, SHIFT_HIGH);
#if MINS && WHOLE
        const u32 low_minima = low.minima_of(lane % 4), high_minima = high.minima_of(lane % 4);
        const float low_m = low.m * (1.0f / MINIMA_UNIT), high_m = high.m * (1.0f / MINIMA_UNIT);
#endif
#pragma unroll
        for (int first = 0; first < NT; first += MOST) {
#if WHOLE
            int sum[MOST][ACC] = {};
#endif
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const int j = half * 4 + pair * 2;
                u32 a[2][4];
                unpack(codes, j, a[0]), unpack(codes, j + 1, a[1]);
#if WHOLE
                int scales[2][64 / GROUP];
#pragma unroll
                for (int i = 0; i < 64 / GROUP; i++)
                    scales[0][i] = low.of(pair * 64 / GROUP + i), scales[1][i] = high.of(pair * 64 / GROUP + i);
#else
                float scales[2][2], minima[2][2] = {};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    scales[i][0] = low.d * low.of(pair * 2 + i), scales[i][1] = high.d * high.of(pair * 2 + i);
#if MINS
                    minima[i][0] = low.minimum(pair * 2 + i), minima[i][1] = high.minimum(pair * 2 + i);
#endif
                }
#endif
#pragma unroll
                for (int n = first; n < min(first + MOST, NT); n++) {
                    if (n >= tiles) break;
                    const uint4 b = x.codes(half, pair, n);
                    int c[4];
#if !WHOLE
                    mma(c, a[0], b.x, b.y), add(acc[n], c, scales[0], minima[0], x.scales(half, pair * 2, n), b.x, b.y);
                    mma(c, a[1], b.z, b.w), add(acc[n], c, scales[1], minima[1], x.scales(half, pair * 2 + 1, n), b.z, b.w);
#elif GROUP == 32
                    mma(c, a[0], b.x, b.y), add(sum[n - first], c, scales[0][0], scales[1][0]);
                    mma(c, a[1], b.z, b.w), add(sum[n - first], c, scales[0][1], scales[1][1]);
#else
                    mma_half(c, a[0][0], a[0][1], b.x), add(sum[n - first], c, scales[0][0], scales[1][0]);
                    mma_half(c, a[0][2], a[0][3], b.y), add(sum[n - first], c, scales[0][1], scales[1][1]);
                    mma_half(c, a[1][0], a[1][1], b.z), add(sum[n - first], c, scales[0][2], scales[1][2]);
                    mma_half(c, a[1][2], a[1][3], b.w), add(sum[n - first], c, scales[0][3], scales[1][3]);
#endif
                }
            }
#if WHOLE
#pragma unroll
            for (int n = first; n < min(first + MOST, NT); n++) {
                if (n >= tiles) break;
                const float2 dx = x.scales(half, 0, n);
#if MINS
                float minima[4];
                mma_f16(minima, low_minima, high_minima, x.sums(half, n));
#endif
#pragma unroll
                for (int i = 0; i < ACC; i++) {
                    float v = (i < ACC / 2 ? low.d : high.d) * (float)sum[n - first][i];
#if MINS
                    v = __fmaf_rn(i < ACC / 2 ? low_m : high_m, minima[i * 4 / ACC], v);
#endif
                    acc[n][i] = __fmaf_rn(v, i * 4 / ACC % 2 ? dx.y : dx.x, acc[n][i]);
                }
            }
#endif
        }
    }
}
