// sample: the largest logit of each row; ties go to the smaller id, and a NaN anywhere in the row gives -1
// Meaning   common/sampling.py Sampler.pick at temperature 0   Launcher  cuda_backend/choose.py
// In        logits [T][V] float32                        Out  tokens [T] int32
// Work      partial: 64 CTAs per row leave a key each; final: a warp per row
// Bound     bytes of logits

extern "C" __global__ void partial(const float* logits, int V, u64* keys) {
    __shared__ u64 warps[32];
    const float* row = logits + (s64)blockIdx.y * V;
    u64 key = 0;
#pragma unroll 8
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
