// product: a 16-row tile of a quantized matrix times a unit's columns of COLS rows of x, on the tensor cores
// Build     one type of tile.cuh, and COLS as linear.cu

#define XPAIR (COLS == 1 ? 96 : 704)  // bytes of two groups of a row, or of eight rows
#define XUNIT (KBLOCK / 64 * XPAIR * NT)
#define STAGE (UNIT_BYTES + XUNIT)

// The scales of two groups of 32 columns.
#define SCALES_OF_PAIR (64 / GROUP)
__device__ __forceinline__ void read_scales(float (&v)[SCALES_OF_PAIR], const float* from) {
#if GROUP == 32
    const float2 e = *(const float2*)from;
    v[0] = e.x, v[1] = e.y;
#else
    const float4 e = *(const float4*)from;
    v[0] = e.x, v[1] = e.y, v[2] = e.z, v[3] = e.w;
#endif
}

// Two groups of a row of x, or of this lane's share of eight: codes, scales and sums.
struct Pair {
    u32 b[4];
    float2 dx[2], sx[2];
    __device__ __forceinline__ Pair(const u8* pair, int lane) {
        const int t = lane % 4;
#if COLS == 1  // every column of the product is the one column of x
        const uint2 first = *(const uint2*)(pair + t * 8), second = *(const uint2*)(pair + 48 + t * 8);
        b[0] = first.x, b[1] = first.y, b[2] = second.x, b[3] = second.y;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 scale = *(const float2*)(pair + h * 48 + 32);
            dx[h] = make_float2(scale.x, scale.x), sx[h] = make_float2(scale.y, scale.y);
        }
#else
        const uint4 codes = *(const uint4*)(pair + lane * 16);
        b[0] = codes.x, b[1] = codes.y, b[2] = codes.z, b[3] = codes.w;
        const float4 scales = *(const float4*)(pair + 512 + t * 16);
        dx[0] = make_float2(scales.x, scales.y), dx[1] = make_float2(scales.z, scales.w);
#if MINS && !EXACT_MINS && GROUP == 32
        const float4 sums = *(const float4*)(pair + 576 + t * 16);
        sx[0] = make_float2(sums.x, sums.y), sx[1] = make_float2(sums.z, sums.w);
#endif
#endif
    }
};

// One tile times one unit of x.
__device__ __forceinline__ void multiply(float (&acc)[NT][ACC], const u8* tile, const u8* x, float* scratch, int lane) {
    const int row = lane / 4, bits = __float_as_int(MAGIC);
    const int start[4] = {bits, bits, bits, bits};
    __syncwarp();
    decode_scales(tile, lane, scratch);
    __syncwarp();
    const float* scales = scratch + row * SCRATCH_ROW;
#ifdef TABLE
    constexpr bool lookups = true;
#else
    constexpr bool lookups = false;
#endif
    // fewer turns at a time where instructions take more registers than there are
    constexpr bool newer = __CUDA_ARCH__ >= 1000 && (GROUP == 16 || COLS > 32);
    constexpr int unrolled = newer || (lookups && COLS > 32) ? 1 : GROUP == 16 && COLS == 32 ? 2 : KBLOCK / 64;
    const int most = __CUDA_ARCH__ < 1000 ? NT : GROUP == 16 && MINS ? 2 : GROUP == 16 || COLS > 48 ? 4 : NT;  // tiles of x at a time
#pragma unroll
    for (int first = 0; first < NT; first += most) {
#pragma unroll unrolled
        for (int j = 0; j < KBLOCK / 64; j++) {
            float low[SCALES_OF_PAIR], high[SCALES_OF_PAIR];
            const float* at = scales + j * SCALES_OF_PAIR;
            read_scales(low, at), read_scales(high, at + 8 * SCRATCH_ROW);
#if MINS && !EXACT_MINS
            float low_min[SCALES_OF_PAIR], high_min[SCALES_OF_PAIR];
            read_scales(low_min, at + 16 * SCRATCH_ROW), read_scales(high_min, at + 24 * SCRATCH_ROW);
#endif
            u32 a[2][4];
            unpack(tile, 2 * j, lane, a[0]), unpack(tile, 2 * j + 1, lane, a[1]);
#pragma unroll
            for (int n = first; n < NT && n < first + most; n++) {
                const Pair pair(x + (j * NT + n) * XPAIR, lane);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int c[4];
#if GROUP == 32
                    mma(c, a[h], pair.b[2 * h], pair.b[2 * h + 1], start);
                    accumulate(acc[n], c, low[h], high[h], pair.dx[h]);
#if MINS && !EXACT_MINS
                    add_minima(acc[n], low_min[h], high_min[h], pair.sx[h]);
#endif
#else
                    mma_half(c, a[h][0], a[h][1], pair.b[2 * h], start);
                    accumulate(acc[n], c, low[2 * h], high[2 * h], pair.dx[h]);
                    mma_half(c, a[h][2], a[h][3], pair.b[2 * h + 1], start);
                    accumulate(acc[n], c, low[2 * h + 1], high[2 * h + 1], pair.dx[h]);
#if MINS
                    add_minima_of_half(acc[n], low_min[2 * h], high_min[2 * h], pair.dx[h], pair.b[2 * h]);
                    add_minima_of_half(acc[n], low_min[2 * h + 1], high_min[2 * h + 1], pair.dx[h], pair.b[2 * h + 1]);
#endif
#endif
                }
            }
        }
    }
#if EXACT_MINS  // the sum over 8 groups as one product: minima times the high and the low half of sx
    const int t = lane % 4;
    const u32 low_min = ((const u32*)(scales + 8))[t], high_min = ((const u32*)(scales + 8 + 8 * SCRATCH_ROW))[t];
    const float low_factor = scales[12], high_factor = scales[12 + 8 * SCRATCH_ROW];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float m[4];
#if COLS == 1
        mma_bf16(m, low_min, high_min, *(const u32*)(x + t * XPAIR + 40), *(const u32*)(x + t * XPAIR + 88));
        acc[n][0] = __fmaf_rn(low_factor, m[0], acc[n][0]), acc[n][1] = __fmaf_rn(high_factor, m[2], acc[n][1]);
#else
        const uint2 b = *(const uint2*)(x + (row / 2 * NT + n) * XPAIR + 640 + row % 2 * 32 + t * 8);
        mma_bf16(m, low_min, high_min, b.x, b.y);
        acc[n][0] = __fmaf_rn(low_factor, m[0], acc[n][0]), acc[n][1] = __fmaf_rn(low_factor, m[1], acc[n][1]);
        acc[n][2] = __fmaf_rn(high_factor, m[2], acc[n][2]), acc[n][3] = __fmaf_rn(high_factor, m[3], acc[n][3]);
#endif
    }
#endif
}

// A stripe's part of a row block, times a factor per row of x, to partial sum `slot`, and zeros to those up to `end`.
// out [slot][T][N] from this matrix's first column on.
__device__ __forceinline__ void put(const float (&acc)[NT][ACC], float* out, int N, int T, int row, int slot, int end,
                                    s64 slot_stride, s64 row_stride, const float* factors, int lane) {
    row += lane / 4;
#pragma unroll 1
    for (int to_slot = slot; to_slot < end; to_slot++) {
        const bool keep = to_slot == slot;
#if COLS == 1
        float* to = out + to_slot * slot_stride + row;
        const float factor = factors[0];
        if (lane % 4 == 0) {
            if (row < N) to[0] = keep ? acc[0][0] * factor : 0.0f;
            if (row + 8 < N) to[8] = keep ? acc[0][1] * factor : 0.0f;
        }
#else
        const int column = lane % 4 * 2;
        float* to = out + to_slot * slot_stride + column * row_stride + row;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int left = T - column - 8 * n;
            const float first = factors[column + 8 * n], second = factors[column + 8 * n + 1];
            if (left > 0 && row < N) to[0] = keep ? acc[n][0] * first : 0.0f;
            if (left > 1 && row < N) to[row_stride] = keep ? acc[n][1] * second : 0.0f;
            if (left > 0 && row + 8 < N) to[8] = keep ? acc[n][2] * first : 0.0f;
            if (left > 1 && row + 8 < N) to[row_stride + 8] = keep ? acc[n][3] * second : 0.0f;
            to += 8 * row_stride;
        }
#endif
    }
}
