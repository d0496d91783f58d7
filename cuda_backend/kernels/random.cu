// random: for benchmarks: makes blocks of a GGUF type with random codes and moderate scales, and logits that route by a trace
// Meaning   none: any bytes are valid blocks               Launcher  cuda_backend/random_weights.py
// In        routed: ids [tokens][layers][k] int32, the experts of a recorded trace (common/routing_trace.py)
// Out       fill: words [n] uint32, a hash of their index and `seed`. set_halves: float16 `value` at byte `at` of each of n blocks of
//           `size` bytes. set_exponents: byte 0 of each. routed: logits [layers][T][E] float32 whose k largest are the experts of tokens first, first + 1, ...
// Work      fill, set_halves, set_exponents: a thread per word or block. routed: a CTA per row and layer
// Bound     bytes written
// Tried     nothing on record

extern "C" __global__ void fill(u32* words, s64 n, u32 seed) {
    for (s64 i = blockIdx.x * (s64)blockDim.x + threadIdx.x; i < n; i += (s64)gridDim.x * blockDim.x) {
        u32 x = (u32)i * 0x9e3779b9u + seed;  // Murmur3's finalizer
        x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
        words[i] = x;
    }
}

extern "C" __global__ void set_halves(u8* blocks, s64 n, int size, int at, float value) {
    const s64 i = blockIdx.x * (s64)blockDim.x + threadIdx.x;
    if (i >= n) return;
    const u16 half = to_half(value);
    blocks[i * size + at] = (u8)half, blocks[i * size + at + 1] = (u8)(half >> 8);
}

extern "C" __global__ void set_exponents(u8* blocks, s64 n, int size, int exponent) {
    const s64 i = blockIdx.x * (s64)blockDim.x + threadIdx.x;
    if (i < n) blocks[i * size] = (u8)exponent;
}

// Writes logits [layer][T][E] with which row t chooses the experts of token `first` + t in ids [token][layer][k], best first.
extern "C" __global__ void routed(const int* ids, int tokens, int first, int T, int layers, int k, int E, float* logits) {
    const int t = blockIdx.x, layer = blockIdx.y;
    const int* of = ids + ((s64)((first + t) % tokens) * layers + layer) * k;
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        float logit = -4.0f;
        for (int j = 0; j < k; j++)
            if (of[j] == e) logit = 4.0f - 0.1f * j;
        logits[((s64)layer * T + t) * E + e] = logit;
    }
}
