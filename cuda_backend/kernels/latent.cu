// latent: multi-head latent attention over one row per token for all heads, a latent and a roped key
// Meaning   common/reference.py NumpyOps.latent_attention, expanded_attention   Launcher  cuda_backend/ops.py
// In        cache [capacity][W] float16, a row being the latent padded to R, then the roped key padded to W - R; q
//           [T][H][W] float16 alike. gather writes both      Out  sums and stats of pieces.cu, sums [piece][T][H][R]
// Build     R, W: multiples of 16; TILE: positions at a time, 64 or 32; BUFFERS: tiles in shared memory, 2 or 1
// Work      split: 32 rows (t, head) per CTA of 8 warps; of a tile's products with q a warp computes 16 x 16, shares the
//           probabilities, and adds a quarter of the latent's columns for 16 rows
//           expand: keys and values of every head, which prefill attends to as they are (attention.cu whole)
// Numbers   as attention.cu: a hidden tile changes nothing
// Bound     bytes of the cache, from some eight rows on the tensor cores
// Origin    DeepSeek-V2 (arXiv 2405.04434), FlashAttention-2 (arXiv 2307.08691)

#define STRIDE (W + 8)  // halves
#define ROWS 32
#define COLUMNS ((R / 4 + 15) / 16 * 16)  // of the latent per warp

__device__ __forceinline__ void load_tile(u16* to, const u16* from) {  // TILE x W, contiguous
    for (int i = threadIdx.x; i < TILE * (W / 8); i += 256) copy16(to + i / (W / 8) * STRIDE + i % (W / 8) * 8, from + (s64)i * 8);
}

extern "C" __global__ void __launch_bounds__(256)
split(const u16* q, const u16* cache, int H, const StepState* step, const int* positions, int T, int first_t, float scale,
      float* sums, float2* stats) {
    begin();
    extern __shared__ __align__(16) u16 shared[];
    u16 *qs = shared, *tiles = qs + ROWS * STRIDE, *ps = tiles + BUFFERS * TILE * STRIDE;
    float* tops = (float*)(ps + ROWS * (TILE + 8));  // of each row, by the warps that share it
    const Mask mask(step, positions, 0, 0, 0);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = warp % 2, c = warp / 2;
    const int rows = max(0, min(T, mask.rows - first_t)) * H, blocks = (rows + ROWS - 1) / ROWS, end = mask.past + mask.rows;
    const int items = (piece_of(end - 1) + 1) * blocks;
    const u32 q_at = shared_address(qs + (m * 16 + lane % 16) * STRIDE + lane / 16 * 8);
    const u32 p_at = shared_address(ps + (m * 16 + lane % 16) * (TILE + 8) + lane / 16 * 8);
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int piece = item / blocks, first_row = item % blocks * ROWS;
        const int begin = split_begin(piece), stop = min(split_begin(piece + 1), end);
        __syncthreads();
        load_tile(tiles, cache + (s64)begin * W);
        for (int i = threadIdx.x; i < ROWS * (W / 8); i += 256) {
            const int r = first_row + i / (W / 8);
            u16* to = qs + i / (W / 8) * STRIDE + i % (W / 8) * 8;
            if (r < rows)
                copy16(to, q + ((s64)first_t * H + r) * W + i % (W / 8) * 8);
            else
                *(uint4*)to = make_uint4(0, 0, 0, 0);
        }
        commit();
        const int row_of[2] = {first_row + m * 16 + lane / 4, first_row + m * 16 + lane / 4 + 8};
        float o[COLUMNS / 8][4] = {}, top[2], sum[2] = {0.0f, 0.0f};
        top[0] = top[1] = -__int_as_float(0x7f800000);
        int buffer = 0;
        for (int at = begin; at < stop; at += TILE) {
            const u16* tile = tiles + buffer * TILE * STRIDE;
            const bool more = at + TILE < stop;
#if BUFFERS == 2
            if (more) load_tile(tiles + (1 - buffer) * TILE * STRIDE, cache + (s64)(at + TILE) * W);
            commit();
            wait_all_but(1);
            buffer = 1 - buffer;
#else
            wait_all_but(0);
#endif
            float s[2][4] = {};
            float best[2] = {-__int_as_float(0x7f800000), -__int_as_float(0x7f800000)};
            if (c * 16 < TILE) {
                const u32 k_at = shared_address(tile + (c * 16 + lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
#pragma unroll 4
                for (int d = 0; d < W / 16; d++) {
                    u32 a[4], b[4];
                    ldmatrix(a, q_at + d * 32);
                    ldmatrix(b, k_at + d * 32);
                    mma(s[0], a, b[0], b[1]);
                    mma(s[1], a, b[2], b[3]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int t = first_t + row_of[half] / H;
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float& x = s[n][2 * half + e];
                            const int position = at + c * 16 + n * 8 + lane % 4 * 2 + e;
                            const bool see = row_of[half] < rows && (position < mask.past || mask.visible(t, position));
                            x = see ? x * scale : -__int_as_float(0x7f800000);
                            best[half] = fmaxf(best[half], x);
                        }
                    best[half] = fmaxf(best[half], __shfl_xor_sync(FULL, best[half], 1));
                    best[half] = fmaxf(best[half], __shfl_xor_sync(FULL, best[half], 2));
                }
            }
            if (lane % 4 == 0) tops[c * ROWS + m * 16 + lane / 4] = best[0], tops[c * ROWS + m * 16 + lane / 4 + 8] = best[1];
            __syncthreads();
            float keep[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float next = top[half];
#pragma unroll
                for (int w = 0; w < 4; w++) next = fmaxf(next, tops[w * ROWS + m * 16 + lane / 4 + half * 8]);
                const float base = next == -__int_as_float(0x7f800000) ? 0.0f : next;
                keep[half] = exp2f(top[half] - base);
                top[half] = next;
                float more_sum = 0.0f;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float x = exp2f(s[n][2 * half] - base), y = exp2f(s[n][2 * half + 1] - base);
                    more_sum += x + y;
                    if (c * 16 < TILE)
                        *(u32*)(ps + (m * 16 + lane / 4 + half * 8) * (TILE + 8) + c * 16 + n * 8 + lane % 4 * 2) = to_half2(x, y);
                }
                sum[half] = sum[half] * keep[half] + (c * 16 < TILE ? more_sum : 0.0f);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                for (int half = 0; half < 2; half++) o[n][2 * half] *= keep[half], o[n][2 * half + 1] *= keep[half];
            __syncthreads();
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                u32 a[4];
                ldmatrix(a, p_at + k * 32);
                const u32 v_at = shared_address(tile + (k * 16 + lane % 16) * STRIDE + c * COLUMNS + lane / 16 * 8);
#pragma unroll
                for (int n = 0; n < COLUMNS / 16; n++) {
                    if (c * COLUMNS + n * 16 >= R) break;
                    u32 b[4];
                    ldmatrix_transposed(b, v_at + n * 32);
                    mma(o[2 * n], a, b[0], b[1]);
                    mma(o[2 * n + 1], a, b[2], b[3]);
                }
            }
            __syncthreads();
#if BUFFERS == 1
            if (more) load_tile(tiles, cache + (s64)(at + TILE) * W);
            commit();
#endif
        }
        wait_all_but(0);
        // a row's sum lies in the lanes and warps that hold its columns of the probabilities
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] += __shfl_xor_sync(FULL, sum[half], 1);
            sum[half] += __shfl_xor_sync(FULL, sum[half], 2);
            if (lane % 4 == 0) tops[c * ROWS + m * 16 + lane / 4 + half * 8] = sum[half];
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row_of[half] >= rows) continue;
            const s64 to = ((s64)piece * T + row_of[half] / H) * H + row_of[half] % H;
            if (c == 0 && lane % 4 == 0) {
                const float* all = tops + m * 16 + lane / 4 + half * 8;
                stats[to] = make_float2(top[half], all[0] + all[ROWS] + all[2 * ROWS] + all[3 * ROWS]);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
                const int column = c * COLUMNS + n * 8;
                if (column < R)
                    *(float2*)(sums + to * R + column + lane % 4 * 2) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
            }
        }
    }
}

struct Turn {  // a rope, as rows.cu has it
    const double* frequencies;  // radians per position
    const int* positions;
    int pairs;
    float magnitude;
};

// Channel i of `wide` roped channels in half-split pairs; x points to the first.
__device__ __forceinline__ float roped(const In& a, const float* x, int i, int t, const Turn& rope) {
    const float own = load_one(a, x + i);
    if (i >= 2 * rope.pairs) return own;
    const int pair = i % rope.pairs;
    const float other = load_one(a, x + (i < rope.pairs ? i + rope.pairs : pair));
    double turns = rope.positions[t] * rope.frequencies[pair] * 0.15915494309189535;  // in double: positions beyond 1e5
    float s, c;
    sincospif((float)(2.0 * (turns - rint(turns))), &s, &c);
    return own * c * rope.magnitude + (i < rope.pairs ? -other : other) * s * rope.magnitude;
}

// q as float16: `main` channels as they are, zeros up to `at`, then the roped ones, zeros up to `wide`; and the row of the
// cache, whose latent is normed on the way where `normed`. A block per (t, head); head H is the cache's.
extern "C" __global__ void __launch_bounds__(1024)
gather(In q, In q_rope, In latent, In k_rope, int T, int H, int main, int at, int P, int wide, Turn q_turn, Turn k_turn, int normed,
       const float* weight, float eps, int latent_dim, const StepState* step, u16* q_out, u16* cache) {
    begin();
    __shared__ float squares_of[32];
    const int t = blockIdx.x / (H + 1), head = blockIdx.x % (H + 1);
    if (t >= step->rows) return;
    if (head < H) {
        u16* to = q_out + ((s64)t * H + head) * wide;
        const float *from = head_of(q, t, head, main), *turned = head_of(q_rope, t, head, P);
        for (int i = threadIdx.x; i < wide; i += blockDim.x)
            to[i] = i < at ? (i < main ? to_half(load_one(q, from + i)) : 0)
                           : (i - at < P ? to_half(roped(q_rope, turned, i - at, t, q_turn)) : 0);
        return;
    }
    u16* to = cache + (s64)(step->past + t) * W;
    const float* from = row_of(latent, t);
    float squares = 0.0f;
    for (int i = threadIdx.x; normed && i < latent_dim; i += blockDim.x) {
        const float v = load_one(latent, from + i);
        squares += v * v;
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) squares_of[threadIdx.x / 32] = squares;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    squares = warp_sum(lane < blockDim.x / 32 ? squares_of[lane] : 0.0f);
    const float scale = normed ? 1.0f / sqrtf(squares / latent_dim + eps) : 1.0f;
    for (int i = threadIdx.x; i < W; i += blockDim.x) {
        if (i < R)
            to[i] = i < latent_dim ? to_half(load_one(latent, from + i) * scale * (normed && weight ? weight[i] : 1.0f)) : 0;
        else
            to[i] = i - R < P ? to_half(roped(k_rope, row_of(k_rope, t), i - R, t, k_turn)) : 0;
    }
}

// The roped keys of n rows of the cache as channels N.. of every head's keys [H][capacity][wide], zeros behind them.
extern "C" __global__ void spread(const u16* cache, int n, int N, int P, int wide, s64 capacity, u16* keys) {
    begin();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / (wide - N), column = i % (wide - N);
    if (row < n) keys[(blockIdx.y * capacity + row) * wide + N + column] = column < P ? cache[(s64)row * W + R + column] : 0;
}

// Matrices [H][rows][K] as float16 [H][rows][K]; those of `from` lie `stride` elements apart. type: 0 F32, 1 F16, 2 BF16
extern "C" __global__ void halves(const void* from, int type, s64 stride, s64 n, u16* to) {
    begin();
    const s64 first = blockIdx.y * stride;
    for (s64 i = blockIdx.x * (s64)blockDim.x + threadIdx.x; i < n; i += (s64)gridDim.x * blockDim.x) {
        const u16 stored = type ? ((const u16*)from)[first + i] : 0;
        to[blockIdx.y * n + i] = type == 0 ? to_half(((const float*)from)[first + i]) : type == 1 ? stored : to_half(from_bf16(stored));
    }
}
