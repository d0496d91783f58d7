// choose_blocks: chooses the blocks of keys that the rows of a long step see, if rows may leave out keys with little attention
// Meaning   common/block_sparse.py attend                 Launcher  cuda_backend/block_sparse.py
// In        q [T][H][D] float16; keys [K][place][D] float16 of one sequence, which already contain the step's rows
// Out       means [block][K][D] of whole blocks of keys, and [block][H][D] of the step's queries times `scale`, float32
//           sight [K][block of the step][words]: a bit for each block of keys
// Build     BLOCK: positions of a block; SINKS and LATEST: blocks that are always seen; MOST: others; MASS: the share of the
//           predicted attention, in thousandths, that is enough
// Work      means: a CTA per block and head, a thread for two columns. choose: a CTA per block of the step and head of keys: shares of
//           attention by the means, averaged over the queries' heads; then the largest of them, one after the other
// Assumes   the step's first position is a multiple of BLOCK; D is at most 256
// Numbers   float32
// Bound     bytes of keys, of which attention reads some again for each block of queries
// Tried     nothing on record

#define CTA 128

extern "C" __global__ void __launch_bounds__(CTA)
means(const u16* q, Plane keys, int H, int K, int D, int T, int key_blocks, float scale, float* of_keys, float* of_queries) {
    begin();
    const bool is_key = (int)blockIdx.x < key_blocks;
    const int block = is_key ? blockIdx.x : blockIdx.x - key_blocks, head = blockIdx.y, heads = is_key ? K : H, column = 2 * threadIdx.x;
    if (head >= heads || column >= D) return;
    keys.rows = head_at(keys, min(head, K - 1), 2 * D);
    const int rows = is_key ? BLOCK : min(BLOCK, T - block * BLOCK);
    const s64 row = is_key ? D : (s64)H * D;
    const u16* from = (is_key ? (const u16*)tile_at(keys, block * BLOCK, 2 * D) : q + ((s64)block * BLOCK * H + head) * D) + column;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
    for (int i = 0; i < rows; i++) {
        const u32 both = *(const u32*)(from + i * row);
        sum.x += from_half((u16)both), sum.y += from_half((u16)(both >> 16));
    }
    const float factor = (is_key ? 1.0f : scale) / (float)rows;
    *(float2*)((is_key ? of_keys : of_queries) + ((s64)block * heads + head) * D + column) = make_float2(sum.x * factor, sum.y * factor);
}

__device__ __forceinline__ float block_max(float v, float* scratch) {
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    return fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
}

extern "C" __global__ void __launch_bounds__(CTA)
choose(const float* of_keys, const float* of_queries, int H, int K, int D, int first, int words, u32* sight) {
    begin();
    extern __shared__ float shares[];  // shares of each block before the queries' own; `words` words of bits; logits of the blocks
    __shared__ float scratch[CTA / 32];
    const int own = first + blockIdx.x, head = blockIdx.y, group = H / K, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    u32* bits = (u32*)(shares + own);
    float* logits = (float*)(bits + words);
    const int late = max(own - LATEST + 1, 0), sinks = min(SINKS, own + 1);
    for (int b = thread; b < own; b += CTA) shares[b] = 0.0f;
    for (int w = thread; w < words; w += CTA) {
        u32 word = 0;
        for (int i = 0; i < 32; i++) {
            const int b = w * 32 + i;
            word |= (u32)(b < sinks || (b >= late && b <= own)) << i;
        }
        bits[w] = word;
    }
#pragma unroll 1
    for (int h = 0; h < group; h++) {
        const float* query = of_queries + ((s64)blockIdx.x * H + head * group + h) * D;
        float most = -__int_as_float(0x7f800000), sum = 0.0f;
        for (int b = warp; b < own; b += CTA / 32) {
            const float* key = of_keys + ((s64)b * K + head) * D;
            float dot = 0.0f;
            for (int d = lane; d < D; d += 32) dot = __fmaf_rn(query[d], key[d], dot);
            dot = warp_sum(dot);
            if (lane == 0) logits[b] = dot;
        }
        __syncthreads();
        for (int b = thread; b < own; b += CTA) most = fmaxf(most, logits[b]);
        most = block_max(most, scratch);
        for (int b = thread; b < own; b += CTA) sum += __expf(logits[b] - most);
        sum = block_sum(sum, scratch, CTA / 32);
        for (int b = thread; b < own; b += CTA) shares[b] += __expf(logits[b] - most) / sum / (float)group;
        __syncthreads();
    }
    float mass = 0.0f;
    for (int b = thread; b < own; b += CTA) mass += b < sinks || b >= late ? shares[b] : 0.0f;
    mass = block_sum(mass, scratch, CTA / 32);
#pragma unroll 1
    for (int n = 0; n < MOST && mass < MASS * 0.001f; n++) {
        float best = -1.0f;
        int at = own;
        for (int b = sinks + thread; b < late; b += CTA)
            if (shares[b] > best) best = shares[b], at = b;
        const float largest = block_max(best, scratch);
        if (largest < 0.0f) break;
        const int chosen = -(int)block_max(best == largest ? (float)-at : (float)-own, scratch);  // the first of equal shares
        if (thread == 0) bits[chosen / 32] |= 1u << chosen % 32, shares[chosen] = -1.0f;
        mass += largest;
        __syncthreads();
    }
    for (int w = thread; w < words; w += CTA) sight[((s64)head * gridDim.x + blockIdx.x) * words + w] = bits[w];
}
