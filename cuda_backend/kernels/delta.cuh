// delta: four columns of a matrix of the delta rule in the registers of 16 lanes, for delta.cu and delta_each.cu
//
// Build     DK, as delta.cu; GROUPED: value head h uses key head h / (Hv / Hk), not h % Hk

#define NJ ((DK + 63) / 64)  // fours of a key per lane: 4 * lane and every 64 on

#if GROUPED
__device__ __forceinline__ int key_head(int h, int Hk, int Hv) { return h / (Hv / Hk); }
__device__ __forceinline__ bool is_first_of_key(int h, int Hk, int Hv) { return h % (Hv / Hk) == 0; }
#else
__device__ __forceinline__ int key_head(int h, int Hk, int Hv) { return h % Hk; }
__device__ __forceinline__ bool is_first_of_key(int h, int Hk, int Hv) { return h < Hk; }
#endif

struct DeltaRows {
    float *k, *change, *factor;
};

__device__ __forceinline__ void read_fours(float4 (&v)[NJ], const float* from, int part) {
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        v[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (DK % 64 == 0 || j * 64 + part * 4 < DK) v[j] = *(const float4*)(from + j * 64 + part * 4);
    }
}
__device__ __forceinline__ void write_fours(const float4 (&v)[NJ], float* to, int part) {
#pragma unroll
    for (int j = 0; j < NJ; j++)
        if (DK % 64 == 0 || j * 64 + part * 4 < DK) *(float4*)(to + j * 64 + part * 4) = v[j];
}
__device__ __forceinline__ void copy_matrix(float4 (&to)[4][NJ], const float4 (&from)[4][NJ]) {
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int j = 0; j < NJ; j++) to[c][j] = from[c][j];
}
// The change of a column by a row, in two parts.
__device__ __forceinline__ void fade(float4 (&s)[NJ], float factor) {
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        s[j].x = __fmul_rn(factor, s[j].x), s[j].y = __fmul_rn(factor, s[j].y);
        s[j].z = __fmul_rn(factor, s[j].z), s[j].w = __fmul_rn(factor, s[j].w);
    }
}
__device__ __forceinline__ void add(float4 (&s)[NJ], const float4 (&k)[NJ], float change) {
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        s[j].x = __fmaf_rn(k[j].x, change, s[j].x), s[j].y = __fmaf_rn(k[j].y, change, s[j].y);
        s[j].z = __fmaf_rn(k[j].z, change, s[j].z), s[j].w = __fmaf_rn(k[j].w, change, s[j].w);
    }
}
__device__ __forceinline__ float part_of_dot(const float4 (&s)[NJ], const float4 (&k)[NJ]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        sum = __fmaf_rn(s[j].x, k[j].x, sum), sum = __fmaf_rn(s[j].y, k[j].y, sum);
        sum = __fmaf_rn(s[j].z, k[j].z, sum), sum = __fmaf_rn(s[j].w, k[j].w, sum);
    }
    return sum;
}
__device__ __forceinline__ float sum_of_sixteen(float v) {
#pragma unroll
    for (int m = 8; m; m >>= 1) v += __shfl_xor_sync(FULL, v, m);
    return v;
}
// Adds up the parts of four columns over 16 lanes; a lane gets the sum of column part % 4.
__device__ __forceinline__ float sum_of_sixteen(const float (&v)[4], int part) {
    const bool odd = part & 1, second = part & 2;
    const float x = (odd ? v[1] : v[0]) + __shfl_xor_sync(FULL, odd ? v[0] : v[1], 1);
    const float y = (odd ? v[3] : v[2]) + __shfl_xor_sync(FULL, odd ? v[2] : v[3], 1);
    float sum = (second ? y : x) + __shfl_xor_sync(FULL, second ? x : y, 2);
    sum += __shfl_xor_sync(FULL, sum, 4);
    return sum + __shfl_xor_sync(FULL, sum, 8);
}
// A lane's four columns of the matrix, `DK` apart; columns beyond the last one repeat it.
__device__ __forceinline__ void read_matrix(float4 (&s)[4][NJ], const float* columns, int part, int left) {
#pragma unroll
    for (int c = 0; c < 4; c++) read_fours(s[c], columns + min(c, left - 1) * DK, part);
}
__device__ __forceinline__ void write_matrix(const float4 (&s)[4][NJ], float* columns, int part, int left) {
#pragma unroll
    for (int c = 0; c < 4; c++)
        if (c < left) write_fours(s[c], columns + c * DK, part);
}
