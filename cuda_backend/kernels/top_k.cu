// top_k: the k most probable tokens of each row, best first, with their log-probabilities; a NaN in the row gives ids of -1
// Meaning   common/sampling.py top_k; of equal logits the smaller id comes first   Launcher  cuda_backend/sampling.py
// In        logits [T][V] float32; k up to 64
// Out       ids [T][k] int32, logp [T][k] float32
// Work      partial: `pieces` CTAs per row, each the best k of its piece, and its maximum and sum of exponentials
//           final: a CTA per row, the best k of all pieces. A thread holds OWN values. One warp finds the kth largest of the threads'
//           best values; at most k threads hold values at least as large, and each of these values gets its rank among them
// Assumes   at most THREADS * OWN values per CTA
// Bound     bytes of logits; then the k rounds of a warp
// Tried     15 rows of 248,320 logits, k 8, one H200: without a threshold from the kth best of the threads -> 42.2 us against 28.4, both
//             launches
//           conditional loads -> 28.6 us against 26.0

#define THREADS 256
#define OWN 16   // values per thread
#define MOST 64  // largest k

struct Best {
    u64 of_thread[THREADS], good[MOST * OWN], limit;
    int count;
};

// Writes the k largest of key(0), key(1), ... of all threads to best[0], best[1], ..., and 0 if there are fewer. All keys differ,
// except 0 and the key of a NaN, which then comes first.
template <class Key>
__device__ __forceinline__ void best_of(Key key, int k, Best& s, u64* best) {
    const int t = threadIdx.x;
    u64 mine = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) mine = max(mine, key(i));
    s.of_thread[t] = mine;
    if (t < k) best[t] = 0;
    if (t == 0) s.count = 0;
    __syncthreads();
    if (t < 32) {
        u64 left[THREADS / 32], top = 0, limit = 0;
#pragma unroll
        for (int i = 0; i < THREADS / 32; i++) left[i] = s.of_thread[i * 32 + t], top = max(top, left[i]);
#pragma unroll 1
        for (int j = 0; j < k; j++) {
            limit = top;
            for (int m = 16; m; m >>= 1) limit = max(limit, __shfl_xor_sync(FULL, limit, m));
            if (limit == ~0ull) break;
            if (top != limit) continue;
            top = 0;
#pragma unroll
            for (int i = 0; i < THREADS / 32; i++) {
                if (left[i] == limit) left[i] = 0;
                top = max(top, left[i]);
            }
        }
        if (t == 0) s.limit = max(limit, 1ull);
    }
    __syncthreads();
    if (mine >= s.limit)
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (key(i) >= s.limit) {
                const int at = atomicAdd(&s.count, 1);
                if (at < MOST * OWN) s.good[at] = key(i);
            }
    __syncthreads();
    const int count = min(s.count, MOST * OWN);
#pragma unroll 1
    for (int i = t; i < count; i += THREADS) {
        const u64 one = s.good[i];
        int rank = 0;
#pragma unroll 1
        for (int j = 0; j < count; j++) rank += s.good[j] > one;
        if (rank < k) best[rank] = one;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
partial(const float* logits, int V, int k, u64* keys, float2* sums) {
    __shared__ Best scratch;
    __shared__ float by_warp[THREADS / 32];
    const int pieces = gridDim.x, size = (V + pieces - 1) / pieces, first = blockIdx.x * size, t = threadIdx.x;
    const int end = min(first + size, V), at = blockIdx.y * pieces + blockIdx.x;
    const float* row = logits + (s64)blockIdx.y * V;
    const float low = -__int_as_float(0x7f800000);
    float v[OWN], top = low, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i++) v[i] = row[min(first + i * THREADS + t, V - 1)];  // a conditional read would wait for the previous one
#pragma unroll
    for (int i = 0; i < OWN; i++) top = fmaxf(top, v[i] = first + i * THREADS + t < end ? v[i] : low);
    top = warp_max(top);
    if (t % 32 == 0) by_warp[t / 32] = top;
    const auto key = [&](int i) { return first + i * THREADS + t < end ? key_of(v[i], first + i * THREADS + t) : 0; };
    best_of(key, k, scratch, keys + (s64)at * k);
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) top = fmaxf(top, by_warp[i]);
#pragma unroll
    for (int i = 0; i < OWN; i++) sum += top > low ? expf(v[i] - top) : 0.0f;
    sum = block_sum(sum, by_warp, THREADS / 32);
    if (t == 0) sums[at] = make_float2(top, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
final(const u64* keys, const float2* sums, int pieces, int k, int* ids, float* logp) {
    __shared__ Best scratch;
    __shared__ u64 best[MOST];
    __shared__ float by_warp[THREADS / 32];
    keys += (s64)blockIdx.x * pieces * k, sums += blockIdx.x * pieces;
    const int t = threadIdx.x;
    const float2 piece = t < pieces ? sums[t] : make_float2(0.0f, 0.0f);
    best_of([&](int i) { return i * THREADS + t < pieces * k ? keys[i * THREADS + t] : 0; }, k, scratch, best);
    __syncthreads();
    const float top = value_of(best[0]);
    const float sum = block_sum(piece.y > 0.0f ? piece.y * expf(piece.x - top) : 0.0f, by_warp, THREADS / 32);
    if (t >= k) return;
    ids[blockIdx.x * k + t] = best[t] == ~0ull ? -1 : (int)~(u32)best[t];
    logp[blockIdx.x * k + t] = value_of(best[t]) - top - logf(sum);
}
