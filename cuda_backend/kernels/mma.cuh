// mma: int8 dots of 16 rows of a quantized matrix and 8 rows of x on the tensor cores, and what scales and minima make of them
// Build     GROUP of tile.cuh; COLS 1 or a multiple of 8

#if COLS == 1
#define NT 1
#define ACC 2  // columns 1 to 7 are padding
#else
#define NT (COLS / 8)
#define ACC 4
#endif
#define MAGIC 12582912.0f  // 1.5 * 2^23: an int32 accumulator that starts at its bits reads as a float

// c = MAGIC's bits + a b; the constant stays in registers.
__device__ __forceinline__ void mma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&start)[4]) {
#if GROUP == 32
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start[0]), "r"(start[1]), "r"(start[2]),
          "r"(start[3]));
#endif
}
__device__ __forceinline__ void mma_half(int (&c)[4], u32 a0, u32 a1, u32 b, const int (&start)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%6,%7}, {%8,%8,%8,%8};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1), "f"(0.0f));
}

// acc += scale * dx * dot
__device__ __forceinline__ void accumulate(float (&acc)[ACC], const int (&c)[4], float low, float high, float2 dx) {
    const float from_low = -MAGIC * low, from_high = -MAGIC * high;
    acc[0] = __fmaf_rn(__fmaf_rn(__int_as_float(c[0]), low, from_low), dx.x, acc[0]);
#if COLS == 1
    acc[1] = __fmaf_rn(__fmaf_rn(__int_as_float(c[2]), high, from_high), dx.x, acc[1]);
#else
    acc[1] = __fmaf_rn(__fmaf_rn(__int_as_float(c[1]), low, from_low), dx.y, acc[1]);
    acc[2] = __fmaf_rn(__fmaf_rn(__int_as_float(c[2]), high, from_high), dx.x, acc[2]);
    acc[3] = __fmaf_rn(__fmaf_rn(__int_as_float(c[3]), high, from_high), dx.y, acc[3]);
#endif
}

// acc += offset * sx, with sx = dx * the sum of the group's codes
__device__ __forceinline__ void add_minima(float (&acc)[ACC], float low, float high, float2 sx) {
    acc[0] = __fmaf_rn(low, sx.x, acc[0]);
#if COLS == 1
    acc[1] = __fmaf_rn(high, sx.x, acc[1]);
#else
    acc[1] = __fmaf_rn(low, sx.y, acc[1]);
    acc[2] = __fmaf_rn(high, sx.x, acc[2]), acc[3] = __fmaf_rn(high, sx.y, acc[3]);
#endif
}

// The same for the 16 codes in b, whose sum nobody has stored.
__device__ __forceinline__ void add_minima_of_half(float (&acc)[ACC], float low, float high, float2 dx, u32 b) {
    const int zero[4] = {0, 0, 0, 0};
    int sum[4];
    mma_half(sum, 0x01010101u, 0x01010101u, b, zero);
    add_minima(acc, low, high, make_float2(dx.x * sum[0], dx.y * sum[1]));
}
