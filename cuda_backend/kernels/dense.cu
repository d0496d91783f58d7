// dense: y = x W' for a matrix of floats and any number of rows of x
// Meaning   common/reference.py NumpyOps.linear, moe, embed   Launcher  cuda_backend/products.py
// In        w [N][K] is the first matrix of `of`; with EXPERTS each pair takes a matrix from the table (matrices.cuh); x [T][K] float32;
//           with `squares` x is multiplied by 1 / rms: linear.cu
// Out       out [T][N] float32, and zeros in further partial sums
// Build     one of BF16, F16, F32; ROWS: rows of x at a time, 1 or 2; EXPERTS for moe
// Work      a warp per row of w
// Numbers   float32, in an order that depends on K alone
// Bound     bytes of w up to 2 rows of x; more rows read w again from the cache
// Tried     the factor of a norm computed after the router's product -> 2.63 us per layer against 2.54; spills on sm_120

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
// Eights of weights per lane that are requested before the first row; for F32, 8 spill on sm_120.
#if defined(F32) && __CUDA_ARCH__ >= 1200
#define AHEAD (ROWS == 1 ? 6 : 2)
#else
#define AHEAD (ROWS == 1 ? 8 : 2)
#endif

extern "C" __global__ void __launch_bounds__(256, 2)
dense(Matrices of, const float* x, float* out, int N, int K, int T, s64 row_stride, int partials, s64 partial_stride,
      const int* ids, int x_divisor, const float* squares, int parts, float columns, float eps) {
    release_next();
    const int lane = threadIdx.x % 32, row = blockIdx.y * 8 + threadIdx.x / 32, first = blockIdx.x * ROWS;
#ifdef EXPERTS
    depend();  // the previous kernel also decides which weights are read
    const W* weights = (const W*)of.table[ids[first]] + (s64)row * K;
#else
    const W* weights = (const W*)of.first + (s64)row * K;
#endif
    const int end = row < N && K % 8 == 0 ? K : 0;
    Eight ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (lane * 8 + i * 256 < end) ahead[i] = *(const Eight*)(weights + lane * 8 + i * 256);
#ifndef EXPERTS
    depend();
#endif
    if (row >= N) return;
    const float* xs[ROWS];
#pragma unroll
    for (int c = 0; c < ROWS; c++) xs[c] = x + (s64)(min(first + c, T - 1) / x_divisor) * K;
    float acc[ROWS] = {}, factor[ROWS];
#pragma unroll
    for (int c = 0; c < ROWS; c++) {  // factor of a deferred norm: 1 / the root of the mean of `squares`
        float sum = 0.0f;
        for (int i = lane; i < parts; i += 32) sum += squares[(s64)min(first + c, T - 1) * parts + i];
        factor[c] = parts ? 1.0f / sqrtf(warp_sum(sum) / columns + eps) : 1.0f;
    }
    if (end) {
#pragma unroll 1
        for (int base = lane * 8; base < K; base += AHEAD * 256) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = base + i * 256, next = k + AHEAD * 256;
                const Eight e = ahead[i];
                if (next < K) ahead[i] = *(const Eight*)(weights + next);
                if (k >= K) continue;
#pragma unroll
                for (int c = 0; c < ROWS; c++) {
                    const float4 low = *(const float4*)(xs[c] + k), high = *(const float4*)(xs[c] + k + 4);
                    const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (int j = 0; j < 8; j++) acc[c] = __fmaf_rn(value(e.w[j]), v[j], acc[c]);
                }
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
            for (int p = 0; p < partials; p++) out[p * partial_stride + (first + c) * row_stride + row] = p ? 0.0f : sum;
    }
}

extern "C" __global__ void embed(const W* w, int rows, int K, const int* tokens, float* out) {
    begin();
    const int token = min(max(tokens[blockIdx.y], 0), rows - 1), k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k < K) out[(s64)blockIdx.y * K + k] = value(w[(s64)token * K + k]);
}

extern "C" __global__ void to_product_matrix(const W* w, s64 n, u16* out) {
    for (s64 i = blockIdx.x * (s64)blockDim.x + threadIdx.x; i < n; i += (s64)gridDim.x * blockDim.x)
        out[i] = to_product(value(w[i]));
}
