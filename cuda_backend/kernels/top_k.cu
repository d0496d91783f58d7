// top_k: the k likeliest tokens of each row, best first, with their log-probabilities; a NaN in the row gives ids of -1
// Meaning   common/sampling.py top_k; of equal logits the smaller id comes first   Launcher  cuda_backend/choose.py
// In        logits [T][V] float32; k up to 64
// Out       ids [T][k] int32, logp [T][k] float32
// Work      partial: PIECES CTAs per row, each the best k of its piece, and its maximum and sum of exponentials
//           final: a CTA per row, the best k of all pieces'. A thread holds the best of its own values, and looks again
//           when that is taken
// Assumes   at most 64 values per thread: V up to a million
// Bound     bytes of logits; below a few hundred thousand of them, k rounds of a reduction

#define THREADS 256

__device__ __forceinline__ u64 largest(u64 key, u64* warps) {  // of the CTA, in every thread
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = key;
    __syncthreads();
    key = warps[threadIdx.x % (THREADS / 32)];
    for (int m = THREADS / 64; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    __syncthreads();
    return key;
}

extern "C" __global__ void partial(const float* logits, int V, int k, u64* keys, float2* sums) {
    __shared__ u64 warps[THREADS / 32];
    __shared__ float total;
    const int pieces = gridDim.x, size = (V + pieces - 1) / pieces, first = blockIdx.x * size;
    const int end = min(first + size, V), at = blockIdx.y * pieces + blockIdx.x;
    const float* row = logits + (s64)blockIdx.y * V;
    u64 taken = 0, mine = 0;
    for (int i = first + threadIdx.x; i < end; i += THREADS) mine = max(mine, key_of(row[i], i));
    float top = 0.0f;
    for (int j = 0; j < k; j++) {
        const u64 best = largest(mine, warps);
        if (j == 0) top = value_of(best);
        if (threadIdx.x == 0) keys[(s64)at * k + j] = best;
        if (best != mine || !best || best == ~0ull) continue;
        taken |= 1ull << (((int)~(u32)best - first) / THREADS);
        mine = 0;
        for (int i = first + threadIdx.x, e = 0; i < end; i += THREADS, e++)
            if (!(taken >> e & 1)) mine = max(mine, key_of(row[i], i));
    }
    const float low = -__int_as_float(0x7f800000);
    float sum = 0.0f;
    for (int i = first + threadIdx.x; i < end && top > low; i += THREADS) sum += expf(row[i] - top);
    for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(FULL, sum, m);
    float* by_warp = (float*)warps;
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0.0f;
        for (int i = 0; i < THREADS / 32; i++) total += by_warp[i];
        sums[at] = make_float2(first < end ? top : low, total);
    }
}

extern "C" __global__ void final(const u64* keys, const float2* sums, int pieces, int k, int* ids, float* logp) {
    __shared__ u64 warps[THREADS / 32];
    keys += (s64)blockIdx.x * pieces * k, sums += blockIdx.x * pieces;
    u64 taken = 0, mine = 0;
    for (int i = threadIdx.x; i < pieces * k; i += THREADS) mine = max(mine, keys[i]);
    float top = 0.0f, total = 0.0f;
    for (int j = 0; j < k; j++) {
        const u64 best = largest(mine, warps);
        if (j == 0) {
            top = value_of(best);
            for (int i = 0; i < pieces; i++) total += sums[i].y > 0.0f ? sums[i].y * expf(sums[i].x - top) : 0.0f;
        }
        if (threadIdx.x == 0) {
            ids[blockIdx.x * k + j] = best == ~0ull ? -1 : (int)~(u32)best;
            logp[blockIdx.x * k + j] = value_of(best) - top - logf(total);
        }
        if (best != mine || !best || best == ~0ull) continue;
        for (int i = threadIdx.x, e = 0; i < pieces * k; i += THREADS, e++)
            if (keys[i] == best) taken |= 1ull << e;
        mine = 0;
        for (int i = threadIdx.x, e = 0; i < pieces * k; i += THREADS, e++)
            if (!(taken >> e & 1)) mine = max(mine, keys[i]);
    }
}
