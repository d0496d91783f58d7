// dense: y = x W' for a matrix stored as floats, any number of rows of x
// Meaning   common/reference.py NumpyOps.linear, moe, embed   Launcher  cuda_backend/weights.py
// In        w [N][K] (per expert with EXPERTS), x [T][K] float32      Out  out [T][N] float32, and zeros in further slots
// Build     one of BF16, F16, F32; EXPERTS for moe
// Work      a warp per row of w, eight rows of x at a time
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

extern "C" __global__ void __launch_bounds__(256)
dense(const W* w, const float* x, float* out, int N, int K, int T, s64 row_stride, int slots, s64 slot_stride, const int* ids, s64 expert_rows,
      int x_divisor) {
    begin();
    const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= N) return;
#ifdef EXPERTS
    const int first = blockIdx.y, last = first + 1;
    const W* weights = w + (ids[first] * expert_rows + row) * K;
#else
    const int first = blockIdx.y * 8, last = min(first + 8, T);
    const W* weights = w + (s64)row * K;
#endif
    float acc[8] = {};
    if (K % 8 == 0) {
        for (int k = lane * 8; k < K; k += 256) {
            const Eight e = *(const Eight*)(weights + k);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                if (first + c >= last) break;
                const float* xs = x + (s64)((first + c) / x_divisor) * K + k;
#pragma unroll
                for (int i = 0; i < 8; i++) acc[c] = __fmaf_rn(value(e.w[i]), xs[i], acc[c]);
            }
        }
    } else {
        for (int k = lane; k < K; k += 32) {
            const float e = value(weights[k]);
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (first + c < last) acc[c] = __fmaf_rn(e, x[(s64)((first + c) / x_divisor) * K + k], acc[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
        const float sum = warp_sum(acc[c]);
        if (lane == 0 && first + c < last)
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
