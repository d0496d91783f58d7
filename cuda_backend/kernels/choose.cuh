// choose: one warp chooses the experts of a row and finds the addresses of their matrices
// Build     PER: experts per lane
// Numbers   float32; best first, ties to the smaller number, NaN last

#ifndef PER
#define PER 1
#endif

// Maps floats to positive integers of the same order.
__device__ __forceinline__ u32 ordered(float f) {
    const u32 bits = __float_as_uint(f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// k of E experts, by logits [T][E]; bias [E] is null for softmax. weights [T][k], or [T][k + 1] with a shared expert's,
// which is the sigmoid of its logit in `gate` where it is gated, else 1. The others are scale times the probabilities among the
// k chosen, or with `whole` among all experts.
struct Choice {
    const float *logits, *bias;
    float* weights;
    In gate;
    int E, k, shared_one, gated, whole;
    float scale;
};

// The biases of a lane's experts; zeros without biases.
__device__ __forceinline__ void biases(float (&added)[PER], const Choice& of) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = i * 32 + threadIdx.x % 32;
        added[i] = of.bias && e < of.E ? of.bias[e] : 0.0f;
    }
}

// Addresses from the table: a lane keeps those of its experts if there are registers; with more experts the address is read
// after the choice.
#define ADDRESSES (PER <= 8 ? PER : 1)
__device__ __forceinline__ void places(u64 (&at)[ADDRESSES], const Matrices& of, bool some) {
    const int lane = threadIdx.x % 32;
    if (PER > 8 && !MOVED) prefetch_table(of);
#pragma unroll
    for (int i = 0; i < ADDRESSES; i++) at[i] = PER <= 8 && some && i * 32 + lane < of.count ? address_at(of, i * 32 + lane) : 0;
}

// The address of expert `id`, for every lane.
__device__ __forceinline__ const u8* place_of(const u64 (&at)[ADDRESSES], const Matrices& of, int id) {
    if (PER > 8) return matrix_at(of, id);
    u64 mine = 0;
#pragma unroll
    for (int i = 0; i < ADDRESSES; i++)
        if (i * 32 + threadIdx.x % 32 == id) mine = at[i];
    const u32 low = __shfl_sync(FULL, (u32)mine, id % 32), high = __shfl_sync(FULL, (u32)(mine >> 32), id % 32);
    return (const u8*)((u64)high << 32 | low);
}

__device__ __forceinline__ float shared_weight(const Choice& of, int t) {
    return of.gated ? sigmoid(load_one(of.gate, row_of(of.gate, t))) : 1.0f;
}

// Finds the best k of a row: calls put(j, id, probability) in every lane, and returns the sum of the probabilities, which with
// `whole` is that of all experts.
template <class Put>
__device__ __forceinline__ float choose(const Choice& from, const float* logits, int k, const float (&added)[PER], Put put) {
    const int lane = threadIdx.x % 32, E = from.E;
    const bool softmax = !from.bias;
    const float lowest = -__int_as_float(0x7f800000);
    float p[PER], top = lowest, total = 0.0f;
    u32 key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) p[i] = i * 32 + lane < E ? __ldcg(logits + i * 32 + lane) : lowest, top = fmaxf(top, p[i]);
    if (softmax) top = warp_max(top);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        p[i] = softmax ? expf(p[i] - top) : 1.0f / (1.0f + expf(-p[i]));
        const float by = p[i] + added[i];
        key[i] = i * 32 + lane < E ? ordered(by == by ? by : lowest) : 0;
    }
#pragma unroll 1
    for (int j = 0; j < k; j++) {
        u32 best = 0;
        int at = 0;
        float of = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (key[i] > best) best = key[i], at = i * 32 + lane, of = p[i];
        const u32 most = __reduce_max_sync(FULL, best);
        const int id = E - (int)__reduce_max_sync(FULL, best == most ? E - at : 0);  // the first among equals
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (i * 32 + lane == id) key[i] = 0;
        of = __shfl_sync(FULL, of, id % 32);
        total += of;
        put(j, id, of);
    }
    if (from.whole) {
        total = 0.0f;
#pragma unroll
        for (int i = 0; i < PER; i++) total += p[i];
        total = warp_sum(total);
    }
    return total;
}
