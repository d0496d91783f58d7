// attention: grouped-query attention over the cache and the step's visible rows
// Meaning   common/reference.py NumpyOps.attention        Launcher  cuda_backend/ops.py
// In        q [T][H][D] float16 and the cache, keys and values [K][capacity][D] float16, step's rows already in it
//           (rows.cu heads_to_cache)                      Out       out [T][H][DIM] float32
// Build     D, a multiple of 16 up to 256; DIM: the width of a head of out, at most D, zeros behind it in q and cache
// Work      rows are (t, query head of the group), 64 per CTA of four warps; tiles of 64 positions
//           split: for decoding and verifying, one piece of the past per CTA, partial sums to `sums` [split][T * H][D] and
//           (maximum, sum) to `stats`; combine adds them in order. Pieces start at fixed positions (split_begin)
//           whole: for prefill, all tiles up to the rows' last visible one
// Assumes   capacity is a multiple of 64, and memory beyond the last row holds finite numbers
// Numbers   float16 products, float32 sums; online softmax, tile by tile at fixed positions, so that hidden tiles change
//           nothing and the row of a chain equals the row that plain decoding computes, bit for bit
// Bound     bytes of keys and values; for prefill the tensor cores
// Origin    FlashAttention-2 (Dao, arXiv 2307.08691)

#define STRIDE (D + 8)  // halves; an odd number of 16-byte units, so that ldmatrix meets no bank twice
#define TILE 64

__device__ __forceinline__ void load_tile(u16* to, const u16* from, int rows) {  // rows x D, contiguous
    for (int i = threadIdx.x; i < rows * (D / 8); i += 128)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i / (D / 8) * STRIDE + i % (D / 8) * 8)),
                     "l"(from + (s64)i * 8)
                     : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_all_but(int one) {
    if (one)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
}
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Pieces of 64 positions up to 4096, of 256 up to 32768, of 1024 up to 131072, then of 4096.
__device__ __forceinline__ int split_begin(int i) {
    if (i < 64) return i * 64;
    if (i < 176) return 4096 + (i - 64) * 256;
    if (i < 272) return 32768 + (i - 176) * 1024;
    return 131072 + (i - 272) * 4096;
}
__device__ __forceinline__ int split_count(int n) {
    if (n <= 4096) return (n + 63) / 64;
    if (n <= 32768) return 64 + (n - 4096 + 255) / 256;
    if (n <= 131072) return 176 + (n - 32768 + 1023) / 1024;
    return 272 + (n - 131072 + 4095) / 4096;
}

struct Mask {
    const StepState* step;
    const int* positions;
    int window, past, rows, kind;
    __device__ Mask(const StepState* s, const int* p, int w)
        : step(s), positions(p), window(w), past(s->past), rows(s->rows), kind(s->kind) {}
    __device__ bool visible(int t, int slot) const {
        const int row = slot - past;
        if (row >= 0 && (row >= rows || !(kind ? row <= t : step->seen[t] >> row & 1))) return false;
        return !window || (row < 0 ? slot : positions[row]) > positions[t] - window;
    }
};

// Tiles [begin, end) of positions for 64 rows of q that lie in `qs`; o and m, l per lane: rows g and g + 8 of its warp.
__device__ __forceinline__ void attend(float (&o)[D / 8][4], float (&m)[2], float (&l)[2], const u16* qs, u16* ks, u16* vs,
                                       const u16* keys, const u16* values, int begin, int end, const Mask& mask,
                                       int first_row, int group, int rows, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t_of[2] = {(first_row + warp * 16 + lane / 4) / group, (first_row + warp * 16 + lane / 4 + 8) / group};
    const bool active = first_row + warp * 16 < rows;
    const u32 q_at = shared_address(qs + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 8);
    const u32 k_at = shared_address(ks + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
    const u32 v_at = shared_address(vs + (lane % 16) * STRIDE + lane / 16 * 8);
    if (begin < end) load_tile(ks, keys + (s64)begin * D, TILE);
    commit();
    for (int at = begin; at < end; at += TILE) {
        load_tile(vs, values + (s64)at * D, TILE);
        commit();
        wait_all_but(1);
        float s[8][4] = {};
        if (active) {
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                u32 a[4];
                ldmatrix(a, q_at + d * 32);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 b[4];
                    ldmatrix(b, k_at + (n * 16 * STRIDE + d * 16) * 2);
                    mma(s[2 * n], a, b[0], b[1]);
                    mma(s[2 * n + 1], a, b[2], b[3]);
                }
            }
        }
        __syncthreads();
        const bool more = at + TILE < end;
        if (more) load_tile(ks, keys + (s64)(at + TILE) * D, TILE);
        commit();
        u32 p[8][2];
        if (active) {
            const bool all = at + TILE <= mask.past && !mask.window;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = m[half];
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[n][2 * half + e];
                        const bool see = all || (t_of[half] < mask.rows &&
                                                 mask.visible(t_of[half], at + n * 8 + lane % 4 * 2 + e));
                        x = see ? x * scale : -__int_as_float(0x7f800000);
                        top = fmaxf(top, x);
                    }
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
                const float base = top == -__int_as_float(0x7f800000) ? 0.0f : top;
                const float keep = exp2f(m[half] - base);
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const float x = exp2f(s[n][2 * half] - base), y = exp2f(s[n][2 * half + 1] - base);
                    sum += x + y;
                    p[n][half] = to_half2(x, y);
                }
                l[half] = l[half] * keep + sum;
                m[half] = top;
#pragma unroll
                for (int n = 0; n < D / 8; n++) o[n][2 * half] *= keep, o[n][2 * half + 1] *= keep;
            }
        }
        wait_all_but(1);
        if (active) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    u32 b[4];
                    ldmatrix_transposed(b, v_at + (k * 16 * STRIDE + n * 16) * 2);
                    mma(o[2 * n], a, b[0], b[1]);
                    mma(o[2 * n + 1], a, b[2], b[3]);
                }
            }
        }
        __syncthreads();
    }
    wait_all_but(0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        l[half] += __shfl_xor_sync(FULL, l[half], 1);
        l[half] += __shfl_xor_sync(FULL, l[half], 2);
    }
}

// 64 rows of q, (t, query head of the group), zero beyond the last.
__device__ __forceinline__ void load_queries(u16* qs, const u16* q, int first_row, int group, int H, int head0, int rows) {
    for (int i = threadIdx.x; i < 64 * (D / 8); i += 128) {
        const int r = first_row + i / (D / 8), c = i % (D / 8) * 8;
        uint4 e = make_uint4(0, 0, 0, 0);
        if (r < rows) e = *(const uint4*)(q + ((s64)(r / group) * H + head0 + r % group) * D + c);
        *(uint4*)(qs + i / (D / 8) * STRIDE + c) = e;
    }
}

extern "C" __global__ void __launch_bounds__(128)
split(const u16* q, const u16* keys, const u16* values, s64 capacity, int H, int K, const StepState* step,
      const int* positions, int T, float scale, int window, float* sums, float2* stats) {
    begin();
    extern __shared__ __align__(16) u16 shared[];
    u16 *qs = shared, *ks = qs + 64 * STRIDE, *vs = ks + TILE * STRIDE;
    const Mask mask(step, positions, window);
    const int group = H / K, rows = min(T, mask.rows) * group, blocks = (rows + 63) / 64, end = mask.past + mask.rows;
    const int items = split_count(end) * K * blocks, lane = threadIdx.x % 32;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int piece = item / (K * blocks), head = item / blocks % K, first_row = item % blocks * 64;
        float o[D / 8][4] = {}, m[2], l[2] = {0.0f, 0.0f};
        m[0] = m[1] = -__int_as_float(0x7f800000);
        __syncthreads();
        load_queries(qs, q, first_row, group, H, head * group, rows);
        attend(o, m, l, qs, ks, vs, keys + head * capacity * D, values + head * capacity * D, split_begin(piece),
               min(split_begin(piece + 1), end), mask, first_row, group, rows, scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = first_row + threadIdx.x / 32 * 16 + lane / 4 + half * 8;
            if (r >= rows) continue;
            const s64 to = (s64)piece * T * H + (r / group) * H + head * group + r % group;
            if (lane % 4 == 0) stats[to] = make_float2(m[half], l[half]);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *(float2*)(sums + to * D + n * 8 + lane % 4 * 2) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
        }
    }
}

extern "C" __global__ void combine(const float* sums, const float2* stats, int H, const StepState* step, int T, float* out) {
    begin();
    __shared__ float share[512], scratch[32];  // pieces of a million positions
    const int head = blockIdx.x, t = blockIdx.y;
    if (t >= step->rows) return;
    const int n = split_count(step->past + step->rows);
    const s64 piece = (s64)T * H;
    const float2* stat = stats + t * H + head;
    float top = -__int_as_float(0x7f800000);
    for (int i = threadIdx.x % 32; i < n; i += 32) top = fmaxf(top, stat[i * piece].x);
    top = warp_max(top);  // every warp by itself
    float total = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        share[i] = exp2f(stat[i * piece].x - top);
        total += stat[i * piece].y * share[i];
    }
    total = block_sum(total, scratch, (blockDim.x + 31) / 32);  // and a barrier for `share`
    const float* from = sums + (t * H + head) * D;
    for (int d = threadIdx.x; d < DIM; d += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < n; i++) sum += from[i * piece * D + d] * share[i];
        out[((s64)t * H + head) * DIM + d] = sum / total;
    }
}

extern "C" __global__ void __launch_bounds__(128)
whole(const u16* q, const u16* keys, const u16* values, s64 capacity, int H, int K, const StepState* step,
      const int* positions, int T, float scale, int window, float* out) {
    begin();
    extern __shared__ __align__(16) u16 shared[];
    u16 *qs = shared, *ks = qs + 64 * STRIDE, *vs = ks + TILE * STRIDE;
    const Mask mask(step, positions, window);
    const int group = H / K, rows = T * group, head = blockIdx.y, lane = threadIdx.x % 32;
    const int first_row = (gridDim.x - 1 - blockIdx.x) * 64;  // the longest first
    const int last = min(first_row + 63, rows - 1) / group;
    float o[D / 8][4] = {}, m[2], l[2] = {0.0f, 0.0f};
    m[0] = m[1] = -__int_as_float(0x7f800000);
    load_queries(qs, q, first_row, group, H, head * group, rows);
    const int begin = window ? max(0, positions[first_row / group] - window + 1) / TILE * TILE : 0;
    attend(o, m, l, qs, ks, vs, keys + head * capacity * D, values + head * capacity * D, begin, mask.past + last + 1, mask,
           first_row, group, rows, scale);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = first_row + threadIdx.x / 32 * 16 + lane / 4 + half * 8;
        if (r >= rows) continue;
        const float inverse = 1.0f / l[half];
        float* to = out + ((s64)(r / group) * H + head * group + r % group) * DIM;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + lane % 4 * 2 + e < DIM) to[n * 8 + lane % 4 * 2 + e] = o[n][2 * half + e] * inverse;
    }
}

// Rows `path` of [layer][head][capacity][D] planes, from row `base`, to rows from `to_base` of others. A thread moves 8
// values of every row, so that an ascending path may be kept in place.
extern "C" __global__ void keep(const u16* from, s64 from_capacity, s64 base, u16* to, s64 to_capacity, s64 to_base,
                                const int* path, int n) {
    const int i = threadIdx.x * 8;
    from += (blockIdx.x * from_capacity + base) * D + i, to += (blockIdx.x * to_capacity + to_base) * D + i;
    for (int j = 0; j < n; j++) *(uint4*)(to + (s64)j * D) = *(const uint4*)(from + (s64)(path ? path[j] : j) * D);
}
