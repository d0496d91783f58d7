// dense: y = x W' for a matrix stored as floats, any number of rows of x
// Meaning   common/reference.py NumpyOps.linear, moe, embed   Launcher  cuda_backend/weights.py
// In        w [N][K] (per expert with EXPERTS), x [T][K] float32, perhaps of a norm that is not finished: linear.cu `squares`
// Out       out [T][N] float32, and zeros in further slots
// Build     one of BF16, F16, F32; ROWS of x at a time, 1 or 8; EXPERTS for moe
// Work      a warp per row of w
// Numbers   float32, in an order that depends on K alone
// Bound     bytes of w up to 8 rows of x; more rows read w again from the cache

#ifdef F32
typedef float W;
__device__ __forceinline__ float value(W w) { return w; }
#else
typedef u16 W;
#ifdef BF16
__device__ __forceinline__ float value(W w) { return from_bf16(w); }
#else
__device__ __forceinline__ float value(W w) { return from_half(w); }
#endif
#endif
struct __align__(16) Eight {
    W w[8];
};

#ifndef ROWS
#define ROWS 1
#endif

extern "C" __global__ void __launch_bounds__(256, 2)
dense(const W* w, const float* x, float* out, int N, int K, int T, s64 row_stride, int slots, s64 slot_stride, const int* ids,
      s64 expert_rows, int x_divisor, const float* squares, int parts, float columns, float eps) {
    begin();
    const int lane = threadIdx.x % 32, row = blockIdx.y * 8 + threadIdx.x / 32, first = blockIdx.x * ROWS;
    if (row >= N) return;
#ifdef EXPERTS
    const W* weights = w + (ids[first] * expert_rows + row) * K;
#else
    const W* weights = w + (s64)row * K;
#endif
    const float* xs[ROWS];
#pragma unroll
    for (int c = 0; c < ROWS; c++) xs[c] = x + (s64)(min(first + c, T - 1) / x_divisor) * K;
    float acc[ROWS] = {}, factor[ROWS];
#pragma unroll
    for (int c = 0; c < ROWS; c++) {  // of a norm that has still to divide by the root of the mean of `squares`
        float sum = 0.0f;
        for (int i = lane; i < parts; i += 32) sum += squares[(s64)min(first + c, T - 1) * parts + i];
        factor[c] = parts ? 1.0f / sqrtf(warp_sum(sum) / columns + eps) : 1.0f;
    }
    if (K % 8 == 0) {
#pragma unroll(ROWS == 1 ? 4 : 1)
        for (int k = lane * 8; k < K; k += 256) {
            const Eight e = *(const Eight*)(weights + k);
            float4 v[ROWS][2];
#pragma unroll
            for (int c = 0; c < ROWS; c++) v[c][0] = *(const float4*)(xs[c] + k), v[c][1] = *(const float4*)(xs[c] + k + 4);
#pragma unroll
            for (int c = 0; c < ROWS; c++) {
                const float four[8] = {v[c][0].x, v[c][0].y, v[c][0].z, v[c][0].w, v[c][1].x, v[c][1].y, v[c][1].z, v[c][1].w};
#pragma unroll
                for (int i = 0; i < 8; i++) acc[c] = __fmaf_rn(value(e.w[i]), four[i], acc[c]);
            }
        }
    } else {
        for (int k = lane; k < K; k += 32) {
            const float e = value(weights[k]);
#pragma unroll
            for (int c = 0; c < ROWS; c++) acc[c] = __fmaf_rn(e, xs[c][k], acc[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < ROWS; c++) {
        const float sum = warp_sum(acc[c]) * factor[c];
        if (lane == 0 && first + c < T)
            for (int slot = 0; slot < slots; slot++) out[slot * slot_stride + (first + c) * row_stride + row] = slot ? 0.0f : sum;
    }
}

extern "C" __global__ void embed(const W* w, int rows, int K, const int* tokens, float* out) {
    begin();
    const int token = min(max(tokens[blockIdx.y], 0), rows - 1), k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k < K) out[(s64)blockIdx.y * K + k] = value(w[(s64)token * K + k]);
}

extern "C" __global__ void to_bf16_matrix(const W* w, s64 n, u16* out) {
    for (s64 i = blockIdx.x * (s64)blockDim.x + threadIdx.x; i < n; i += (s64)gridDim.x * blockDim.x)
        out[i] = to_bf16(value(w[i]));
}
