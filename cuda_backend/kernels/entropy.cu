// entropy: the best token of each row except `excluded`, and the entropy of its softmax without it; a NaN in the row gives -1
// Meaning   common/sampling.py argmax_entropy; of equal logits the smaller id   Launcher  cuda_backend/sampling.py
// In        logits [T][V] float32; `excluded`, an id
// Out       ids [T] int32, entropies [T] float32 in nats; both also in host memory, ids first
// Work      partial: `pieces` CTAs per row; each finds the best key of its piece and, with its maximum m, the sums of e^(x - m) and
//           of (x - m) e^(x - m). final: a warp per row rescales the pieces to one maximum and adds them
// Assumes   at most THREADS * OWN logits per CTA
// Numbers   H = log S - W / S with S >= 1 and W <= 0: both terms are positive, so that nothing cancels; a fixed order of sums
// Bound     bytes of logits
// Tried     nothing on record

#define THREADS 256
#define OWN 16   // logits per thread

// Rescales sums of exponentials to a maximum that is larger by d.
__device__ __forceinline__ float2 lowered(float2 sums, float d) {
    const float by = d == 0.0f ? 1.0f : expf(d);
    return by > 0.0f ? make_float2(sums.x * by, (sums.y + d * sums.x) * by) : make_float2(0.0f, 0.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
partial(const float* logits, int V, int excluded, u64* keys, float2* sums) {
    __shared__ u64 best[THREADS / 32];
    __shared__ float scratch[THREADS / 32];
    const int pieces = gridDim.x, size = (V + pieces - 1) / pieces, first = blockIdx.x * size, t = threadIdx.x;
    const int end = min(first + size, V), at = blockIdx.y * pieces + blockIdx.x;
    const float* row = logits + (s64)blockIdx.y * V;
    const float low = -__int_as_float(0x7f800000);
    float v[OWN];
    u64 key = 0;
#pragma unroll
    // the compiler would make a conditional read wait for the previous one
    for (int i = 0; i < OWN; i++) v[i] = row[min(first + i * THREADS + t, V - 1)];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int id = first + i * THREADS + t;
        const bool counts = id < end && id != excluded;
        if (counts || (id < end && v[i] != v[i])) key = max(key, key_of(v[i], id));
        if (!counts) v[i] = low;
    }
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    if (t % 32 == 0) best[t / 32] = key;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) key = max(key, best[i]);
    const float top = key ? value_of(key) : low;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const float d = v[i] - top, e = v[i] > low ? expf(d) : 0.0f;
        sum.x += e;
        if (e > 0.0f) sum.y += e * d;
    }
    sum.x = block_sum(sum.x, scratch, THREADS / 32);
    sum.y = block_sum(sum.y, scratch, THREADS / 32);
    if (t == 0) keys[at] = key, sums[at] = sum;
}

extern "C" __global__ void final(const u64* keys, const float2* sums, int pieces, int* ids, float* entropies, int* host) {
    keys += blockIdx.x * pieces, sums += blockIdx.x * pieces;
    u64 key = 0;
    for (int i = threadIdx.x; i < pieces; i += 32) key = max(key, keys[i]);
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    const float top = value_of(key);
    float2 all = make_float2(0.0f, 0.0f);
    for (int i = threadIdx.x; i < pieces; i += 32) {
        if (sums[i].x == 0.0f) continue;
        const float2 one = lowered(sums[i], value_of(keys[i]) - top);
        all.x += one.x, all.y += one.y;
    }
    all.x = warp_sum(all.x), all.y = warp_sum(all.y);
    if (threadIdx.x) return;
    const float entropy = logf(all.x) - all.y / all.x;
    ids[blockIdx.x] = host[blockIdx.x] = key == ~0ull ? -1 : (int)(~(u32)key);
    entropies[blockIdx.x] = entropy;
    host[gridDim.x + blockIdx.x] = __float_as_int(entropy);
}
