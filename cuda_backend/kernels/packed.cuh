// packed: rows of x as store.cuh packs them for a step, and the output of their products
// Build     one type of tile.cuh, and COLS as layout.py has them

#define XPART (COLS == 1 ? 160 * HALVES : WHOLE ? 2368 : 1152)  // bytes of a row, or of eight rows: of a unit, or 128 columns of it
#define XUNIT (COLS == 1 ? XPART : (WHOLE ? 1 : HALVES) * NT * XPART)
#define STAGE (UNIT_BYTES + XUNIT)

// A unit of packed rows: store.cuh.
struct PackedRows {
    const u8* from;
    int lane;
#if COLS == 1  // every column of the product is the only row of x
    __device__ __forceinline__ uint4 codes(int half, int pair, int) const {
        return *(const uint4*)(from + half * (WHOLE ? 128 : 160) + pair * 64 + lane % 4 * 16);
    }
#if WHOLE
    __device__ __forceinline__ float4 scales(int) const {
        const float2 both = *(const float2*)(from + 256);
        return make_float4(both.x, both.y, both.x, both.y);
    }
    __device__ __forceinline__ uint2 sums(int) const { return *(const uint2*)(from + 264 + lane % 4 * 8); }
#else
    __device__ __forceinline__ float2 scales(int half, int group, int) const {
        const float scale = ((const float*)(from + half * 160 + 128))[group];
        return make_float2(scale, scale);
    }
#endif
#elif WHOLE
    __device__ __forceinline__ uint4 codes(int half, int pair, int n) const {
        return *(const uint4*)(from + n * XPART + half * 1024 + pair * 512 + lane * 16);
    }
    __device__ __forceinline__ float4 scales(int n) const { return *(const float4*)(from + n * XPART + 2048 + lane % 4 * 16); }
    __device__ __forceinline__ uint2 sums(int n) const { return *(const uint2*)(from + n * XPART + 2112 + lane * 8); }
#else
    __device__ __forceinline__ uint4 codes(int half, int pair, int n) const {
        return *(const uint4*)(from + (half * NT + n) * XPART + pair * 512 + lane * 16);
    }
    __device__ __forceinline__ float2 scales(int half, int group, int n) const {
        return *(const float2*)(from + (half * NT + n) * XPART + 1024 + group * 32 + lane % 4 * 8);
    }
#endif
};

// Writes a stripe's part of a row block, times a factor per row of x, to partial sum `partial`, and zeros to the partial sums up to
// `end`. out [partial][T][N] begins at this matrix's first column.
__device__ __forceinline__ void put(const float (&acc)[NT][ACC], float* out, int N, int T, int row, int partial, int end,
                                    s64 partial_stride, s64 row_stride, const float* factors, int lane) {
    row += lane / 4;
#pragma unroll 1
    for (int p = partial; p < end; p++) {
        const bool own = p == partial;
#if COLS == 1
        float* to = out + p * partial_stride + row;
        const float factor = factors[0];
        if (lane % 4 == 0) {
            if (row < N) to[0] = own ? acc[0][0] * factor : 0.0f;
            if (row + 8 < N) to[8] = own ? acc[0][1] * factor : 0.0f;
        }
#else
        const int column = lane % 4 * 2;
        float* to = out + p * partial_stride + column * row_stride + row;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int left = T - column - 8 * n;
            const float first = factors[column + 8 * n], second = factors[column + 8 * n + 1];
            if (left > 0 && row < N) to[0] = own ? acc[n][0] * first : 0.0f;
            if (left > 1 && row < N) to[row_stride] = own ? acc[n][1] * second : 0.0f;
            if (left > 0 && row + 8 < N) to[8] = own ? acc[n][2] * first : 0.0f;
            if (left > 1 && row + 8 < N) to[row_stride + 8] = own ? acc[n][3] * second : 0.0f;
            to += 8 * row_stride;
        }
#endif
    }
}
