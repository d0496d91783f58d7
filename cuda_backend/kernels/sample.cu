// sample: finds the largest logit of each row; ties go to the smaller id, and a NaN anywhere in the row gives -1
// Meaning   common/sampling.py Sampler.pick at temperature 0   Launcher  cuda_backend/sampling.py
// In        logits [T][V] float32; for add_up partial sums, readable as float4
// Out       tokens [T] int32, also in host memory, and of final and choose at the address that the next step reads; add_up: the
//           logits, unless their address is null
// Work      add_up: a CTA adds up 1,024 logits and writes their largest key. partial: for logits without partial sums, 64 CTAs per
//           row write a key each. final, choose, best_of_rank, chains: a warp per token
// Bound     bytes of logits
// Tried     partial sums added by a separate launch before the search -> a step of WeDLM-8B 1.683 ms against 1.675 (H200), 2.12
//             against 2.11 at 16 rows

// Writes the largest key of a CTA's threads to keys [T][CTAs per row].
__device__ __forceinline__ void leave(u64 key, u64* keys) {
    __shared__ u64 warps[32];
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < blockDim.x / 32; i++) key = max(key, warps[i]);
        keys[blockIdx.y * gridDim.x + blockIdx.x] = key;
    }
}

extern "C" __global__ void __launch_bounds__(256) add_up(In x, int V, float* logits, u64* keys) {
    begin();
    const int i = (blockIdx.x * 256 + threadIdx.x) * 4, t = blockIdx.y;
    u64 key = 0;
    if (i < V) {
        const float4 v = sum_of_partials(row_of(x, t) + i, x);
        if (logits) *(float4*)(logits + (s64)t * V + i) = v;
        key = max(max(key_of(v.x, i), key_of(v.y, i + 1)), max(key_of(v.z, i + 2), key_of(v.w, i + 3)));
    }
    leave(key, keys);
}

extern "C" __global__ void partial(const float* logits, int V, u64* keys) {
    begin();
    const float* row = logits + (s64)blockIdx.y * V;
    u64 key = 0;
#pragma unroll 8
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < V; i += gridDim.x * blockDim.x) key = max(key, key_of(row[i], i));
    leave(key, keys);
}

// Returns the largest of a row's n keys to all lanes of a warp.
__device__ __forceinline__ u64 largest(const u64* keys, int n) {
    u64 key = 0;
    for (int i = threadIdx.x; i < n; i += 32) key = max(key, keys[i]);
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    return key;
}
__device__ __forceinline__ int token_of(u64 key) { return key == ~0ull ? -1 : (int)(~(u32)key); }

extern "C" __global__ void final(const u64* keys, int n, int* tokens, int* next, int* host) {
    const int token = token_of(largest(keys + blockIdx.x * n, n));
    if (threadIdx.x == 0) tokens[blockIdx.x] = next[blockIdx.x] = host[blockIdx.x] = token;
}

// As final, of the real rows of a step, to the addresses that its StepState names: a captured launch serves all steps.
extern "C" __global__ void choose(const u64* keys, int n, const StepState* step, int* next) {
    begin();
    const int row = blockIdx.x;
    if (row >= step->rows) return;
    const int token = token_of(largest(keys + row * n, n));
    if (threadIdx.x == 0) step->tokens[row] = next[row] = step->host[row] = token;
}

// Of a rank with the logits of tokens `first`, first + 1, ...: writes the largest logit, its token, 0 and 0 to best [T][4]. A token is
// exact in float32 below 2^24.
extern "C" __global__ void best_of_rank(const u64* keys, int n, int first, float4* best) {
    begin();
    const u64 key = largest(keys + blockIdx.x * n, n);
    const bool is_nan = key == ~0ull;
    const float4 found = make_float4(is_nan ? __uint_as_float(0x7fffffffu) : value_of(key), is_nan ? 0 : first + token_of(key), 0, 0);
    if (threadIdx.x == 0) best[blockIdx.x] = found;
}

// As choose, from what best_of_rank wrote on each rank: best [T][ranks][4]; a warp for 32 rows.
extern "C" __global__ void choose_of_ranks(const float4* best, int ranks, const StepState* step, int* next) {
    begin();
    const int row = blockIdx.x * 32 + threadIdx.x;
    if (row >= step->rows) return;
    u64 key = 0;
    for (int r = 0; r < ranks; r++) key = max(key, key_of(best[row * ranks + r].x, (int)best[row * ranks + r].y));
    step->tokens[row] = next[row] = step->host[row] = token_of(key);
}

// A draft's pass has `rows` rows of each sequence, with the newest token in the first. `each` tokens per sequence: the newest,
// and the best ones of rows `first`, first + 1, ..., to the addresses that the pass's StepState names
extern "C" __global__ void chains(const u64* keys, int n, const StepState* step, const int* pass, int rows, int first, int each) {
    begin();
    const int row = blockIdx.x / each * rows, at = blockIdx.x % each;
    const int token = at ? token_of(largest(keys + (row + first + at - 1) * n, n)) : pass[row];
    if (threadIdx.x == 0) step->tokens[blockIdx.x] = step->host[blockIdx.x] = token;
}
