// sample: the largest logit of each row; ties go to the smaller id, and a NaN anywhere in the row gives -1
// Meaning   common/sampling.py Sampler.pick at temperature 0   Launcher  cuda_backend/ops.py
// In        logits [T][V] float32                        Out  tokens [T] int32
// Work      partial: 64 CTAs per row leave a key each; final: a warp per row
// Bound     bytes of logits

__device__ __forceinline__ u64 key_of(float v, int i) {
    const u32 bits = __float_as_uint(v);
    if (v != v) return ~0ull;
    return (u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | (u32)(~i);
}

extern "C" __global__ void partial(const float* logits, int V, u64* keys) {
    __shared__ u64 warps[32];
    const float* row = logits + (s64)blockIdx.y * V;
    u64 key = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < V; i += gridDim.x * blockDim.x) key = max(key, key_of(row[i], i));
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < blockDim.x / 32; i++) key = max(key, warps[i]);
        keys[blockIdx.y * gridDim.x + blockIdx.x] = key;
    }
}

extern "C" __global__ void final(const u64* keys, int n, int* tokens) {
    u64 key = 0;
    for (int i = threadIdx.x; i < n; i += 32) key = max(key, keys[blockIdx.x * n + i]);
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    if (threadIdx.x == 0) tokens[blockIdx.x] = key == ~0ull ? -1 : (int)(~(u32)key);
}

// Meaning   common/sampling.py Sampler.pick with a top-k: of the k best, in order, what a uniform number falls on
// In        ids, logp [T][k] (top_k.cu); uniform [T]: 0 to 1     Out  tokens [T] int32, -1 where a logit is NaN
// Work      a thread per row. Numbers  float64, as on the host; logp is float32
extern "C" __global__ void draw(const int* ids, const float* logp, int k, float temperature, float top_p, float min_p,
                                const double* uniform, int* tokens) {
    __shared__ double p[64];
    ids += blockIdx.x * k, logp += blockIdx.x * k;
    for (int i = threadIdx.x; i < k; i += blockDim.x) p[i] = exp(((double)logp[i] - logp[0]) / temperature);
    __syncthreads();
    if (threadIdx.x) return;
    double all = 0.0, kept = 0.0, sum = 0.0;
    for (int i = 0; i < k; i++) all += p[i];
    int keep = k, above = 0;
    for (int i = 0; i < k; i++) above += p[i] >= min_p * p[0];
    if (top_p < 1.0f) {
        keep = 0;
        while (keep < k && sum < top_p) sum += p[keep++] / all;  // the token that crosses top_p stays
    }
    keep = max(1, min_p > 0.0f ? min(keep, above) : keep);
    for (int i = 0; i < keep; i++) kept += p[i];
    int at = 0;
    for (sum = p[0] / kept; at < keep - 1 && sum <= uniform[blockIdx.x]; sum += p[++at] / kept) {}
    tokens[blockIdx.x] = ids[0] < 0 ? -1 : ids[at];
}
