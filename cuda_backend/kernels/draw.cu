// draw: draws a random token for each row, from logits on the device
// Meaning   common/sampling.py draw_weights, and Sampler.pick with them    Launcher  cuda_backend/sampling.py
// In        logits [T][V] float32; best [T][pieces]: keys, of sample.cu; uniform [T]: 0 to 1
// Scratch   probabilities [T][V]; with top-k or top-p, bins [T][2][BINS]: sums of probabilities and counts of tokens by the first bits of
//           a logit's key, zero before `weigh`
// Out       tokens [T] int32, -1 where a logit is NaN
// Functions weigh, draw: all rows have the same parameters; weigh_each, draw_each: rows of several sequences, each with its own Draw,
//           which names its row of logits, best and tokens; probabilities and bins have places for the drawn rows only
// Work      weigh: many CTAs per row, an exponential per token
//           draw: a CTA per row. Rounds over 11, 11 and 10 bits of the keys find the smallest logit that top-k and top-p keep.
//           Then each warp adds the probabilities of 1/32 of the tokens, the random number selects a warp, and so on to one token
// Numbers   exponentials in float64, equal to the host's up to the last bit; integer sums, which do not depend on the order
// Assumes   V below 2^23
// Bound     bytes that one CTA reads: 12 V, and 4 V for each round except the first of top-k, and of top-p
// Tried     one load in flight per thread -> 206 us for a row of 248,320 logits with top-k 40, against 150 with eight in flight
//             (H200)

#define BINS 2048
#define FLIGHT 8  // loads of a thread in flight together: one CTA has only these to hide latency
#define ONE 1099511627776.0

struct Draw {  // parameters by which a row is sampled
    double temperature, top_p, uniform;
    u64 least;
    int top_k, row;
};

__device__ __forceinline__ void weigh_row(const float* logits, int V, const u64* best, int pieces, int row, double temperature,
                                          int cut, u64* probabilities, u64* bins) {
    __shared__ u64 sum_of[BINS];
    __shared__ u32 tokens_of[BINS];
    logits += (s64)row * V, probabilities += (s64)blockIdx.y * V, bins += blockIdx.y * 2 * BINS;
    u64 key = 0;
    for (int i = threadIdx.x % 32; i < pieces; i += 32) key = max(key, best[row * pieces + i]);
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
    if (key == ~0ull) return;
    for (int i = threadIdx.x; i < BINS; i += THREADS) sum_of[i] = tokens_of[i] = 0;
    __syncthreads();
    const float top = value_of(key);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < V; i += gridDim.x * THREADS) {
        const float x = logits[i];
        const u64 probability = (u64)(x == top ? ONE : rint(exp(((double)x - (double)top) / temperature) * ONE));
        probabilities[i] = probability;
        if (!cut || !probability) continue;
        const u32 bin = order_of(x) >> 21;
        atomicAdd(sum_of + bin, probability);
        atomicAdd(tokens_of + bin, 1u);
    }
    if (!cut) return;
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (tokens_of[i]) {
            atomicAdd(bins + i, sum_of[i]);
            atomicAdd(bins + BINS + i, (u64)tokens_of[i]);
        }
}

extern "C" __global__ void weigh(const float* logits, int V, const u64* best, int pieces, double temperature, int cut,
                                 u64* probabilities, u64* bins) {
    weigh_row(logits, V, best, pieces, blockIdx.y, temperature, cut, probabilities, bins);
}

extern "C" __global__ void weigh_each(const float* logits, int V, const u64* best, int pieces, const Draw* draws, u64* probabilities,
                                      u64* bins) {
    const Draw draw = draws[blockIdx.y];
    weigh_row(logits, V, best, pieces, draw.row, draw.temperature, draw.top_k || draw.top_p < 1.0, probabilities, bins);
}

// The kept tokens: those with a larger key, and the first `ties` tokens with this key, of `probability` each; above: the sum of
// the probabilities of larger keys.
struct Cut {
    u32 key;
    u64 ties, probability, above;
};
struct Shared {
    u64 bins[2][BINS], sums[2][32];  // sums of probabilities, counts of tokens
};

__device__ __forceinline__ void sum_by_warp(Shared& shared, u64 a, u64 b) {
    for (int m = 16; m; m >>= 1) a += __shfl_xor_sync(FULL, a, m), b += __shfl_xor_sync(FULL, b, m);
    __syncthreads();  // the previous sums have been read
    if (threadIdx.x % 32 == 0) shared.sums[0][threadIdx.x / 32] = a, shared.sums[1][threadIdx.x / 32] = b;
    __syncthreads();
}

// The shortest prefix whose probabilities (of 0) or tokens (of 1) reach `need`, which all tokens together reach.
__device__ Cut cut_at(u64 need, int of, const float* logits, const u64* probabilities, int V, const u64* bins, Shared& shared) {
    u64 above = 0, sought = 0, key = 0;  // of larger keys: probabilities, and probabilities or tokens as `need`
    for (int high = 32, low = 21;; high = low, low = low == 21 ? 10 : 0) {
        for (int i = threadIdx.x; i < BINS; i += 1024)
            for (int j = 0; j < 2; j++) shared.bins[j][i] = high == 32 ? bins[j * BINS + i] : 0;
        __syncthreads();
        for (int i = threadIdx.x; high < 32 && i < V; i += FLIGHT * 1024) {
            float x[FLIGHT];
#pragma unroll
            for (int j = 0; j < FLIGHT; j++) x[j] = logits[min(i + j * 1024, V - 1)];
#pragma unroll
            for (int j = 0; j < FLIGHT; j++) {
                const int at = i + j * 1024;
                const u32 order = order_of(x[j]);
                if (at >= V || order >> high != key || !probabilities[at]) continue;
                const u32 bin = (order >> low) % (1 << (high - low));
                atomicAdd(shared.bins[0] + bin, probabilities[at]);
                atomicAdd(shared.bins[1] + bin, (u64)1);
            }
        }
        __syncthreads();
        const int mine = threadIdx.x / 32 * 64 + threadIdx.x % 32;
        sum_by_warp(shared, shared.bins[0][mine] + shared.bins[0][mine + 32], shared.bins[1][mine] + shared.bins[1][mine + 32]);
        int bin = 31;
        for (; sought + shared.sums[of][bin] < need; bin--) sought += shared.sums[of][bin], above += shared.sums[0][bin];
        for (bin = 64 * bin + 63; sought + shared.bins[of][bin] < need; bin--)
            sought += shared.bins[of][bin], above += shared.bins[0][bin];
        key = key << (high - low) | bin;
        const u64 probability = shared.bins[0][bin], tokens = shared.bins[1][bin];
        __syncthreads();
        if (low) continue;
        const u64 each = probability / tokens, rest = need - sought;
        return {(u32)key, of ? rest : (rest + each - 1) / each, each, above};
    }
}

struct OfAll {  // parameters of all rows, and the random number of each
    int k;
    double p;
    u64 weight;
    const double* numbers;
    __device__ __forceinline__ int top_k() const { return k; }
    __device__ __forceinline__ double top_p() const { return p; }
    __device__ __forceinline__ u64 least() const { return weight; }
    __device__ __forceinline__ double uniform() const { return numbers[blockIdx.x]; }
    __device__ __forceinline__ int row() const { return blockIdx.x; }
};
struct OfRow {  // in shared memory, read at each use to save registers
    const volatile Draw* draw;
    __device__ __forceinline__ int top_k() const { return draw->top_k; }
    __device__ __forceinline__ double top_p() const { return draw->top_p; }
    __device__ __forceinline__ u64 least() const { return draw->least; }
    __device__ __forceinline__ double uniform() const { return draw->uniform; }
    __device__ __forceinline__ int row() const { return draw->row; }
};

template <class How>
__device__ __forceinline__ void draw_row(const float* logits, int V, const u64* best, int pieces, const u64* probabilities,
                                         const u64* bins, How how, int* tokens) {
    __shared__ Shared shared;
    logits += (s64)how.row() * V, probabilities += (s64)blockIdx.x * V, bins += blockIdx.x * 2 * BINS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 nan = 0;
    for (int i = lane; i < pieces; i += 32) nan = max(nan, best[how.row() * pieces + i]);
    for (int m = 16; m; m >>= 1) nan = max(nan, __shfl_xor_sync(FULL, nan, m));
    if (nan == ~0ull) {
        if (threadIdx.x == 0) tokens[how.row()] = -1;
        return;
    }
    Cut cut = {0, 0, 0, 0};  // below every key
    if (how.top_k() || how.top_p() < 1.0) {
        sum_by_warp(shared, bins[threadIdx.x] + bins[threadIdx.x + 1024], bins[BINS + threadIdx.x] + bins[BINS + threadIdx.x + 1024]);
        u64 all = 0, count = 0;
        for (int i = 0; i < 32; i++) all += shared.sums[0][i], count += shared.sums[1][i];
#pragma unroll 1
        for (int of = 1; of >= 0; of--) {  // by number of tokens, then by their probabilities
            if (of ? !how.top_k() || how.top_k() >= count : how.top_p() >= 1.0) continue;
            const u64 need = of ? how.top_k() : max((u64)1, min(all, (u64)ceil(how.top_p() * (double)all)));
            cut = cut_at(need, of, logits, probabilities, V, bins, shared);
            all = cut.above + cut.ties * cut.probability;
        }
    }
    u64 at = 0;
    for (int first = 0, end = V; end - first > 1;) {
        const int size = (end - first + 31) / 32, to = min(first + (warp + 1) * size, end);
        u64 sum = 0, ties = 0;
        for (int i = first + warp * size + lane; i < to; i += FLIGHT / 2 * 32) {
            u64 probability[FLIGHT / 2];
            float x[FLIGHT / 2];
#pragma unroll
            for (int j = 0; j < FLIGHT / 2; j++) probability[j] = i + j * 32 < to ? probabilities[i + j * 32] : 0;
#pragma unroll
            for (int j = 0; j < FLIGHT / 2; j++) x[j] = cut.key && i + j * 32 < to ? logits[i + j * 32] : 0.0f;
#pragma unroll
            for (int j = 0; j < FLIGHT / 2; j++) {
                const u32 key = order_of(x[j]);
                if (probability[j] < how.least()) continue;
                if (key > cut.key) sum += probability[j];
                ties += key == cut.key;
            }
        }
        sum_by_warp(shared, sum, ties);
        if (first == 0 && end == V) {
            u64 all = 0, tied = 0;
            for (int i = 0; i < 32; i++) all += shared.sums[0][i], tied += shared.sums[1][i];
            all += min(tied, cut.ties) * cut.probability;
            at = min((u64)(how.uniform() * (double)all), all - 1);
        }
        for (int piece = 0;; piece++) {
            const u64 tied = min(shared.sums[1][piece], cut.ties), here = shared.sums[0][piece] + tied * cut.probability;
            if (at < here) {
                first += piece * size, end = min(first + size, end);
                break;
            }
            at -= here, cut.ties -= tied;
        }
        if (end - first == 1 && threadIdx.x == 0) tokens[how.row()] = first;
    }
    if (V == 1 && threadIdx.x == 0) tokens[how.row()] = 0;
}

extern "C" __global__ void __launch_bounds__(1024) draw(const float* logits, int V, const u64* best, int pieces,
                                                        const u64* probabilities, const u64* bins, int top_k, double top_p,
                                                        u64 least, const double* uniform, int* tokens) {
    draw_row(logits, V, best, pieces, probabilities, bins, OfAll{top_k, top_p, least, uniform}, tokens);
}

extern "C" __global__ void __launch_bounds__(1024) draw_each(const float* logits, int V, const u64* best, int pieces,
                                                             const u64* probabilities, const u64* bins, const Draw* draws,
                                                             int* tokens) {
    __shared__ Draw draw;
    if (threadIdx.x == 0) draw = draws[blockIdx.x];
    __syncthreads();
    draw_row(logits, V, best, pieces, probabilities, bins, OfRow{&draw}, tokens);
}
