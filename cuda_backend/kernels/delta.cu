// delta: the Gated DeltaNet recurrence along each row's ancestors
// Meaning   common/reference.py NumpyOps.gated_delta      Launcher  cuda_backend/ops.py
// In        q, k (T, Hk, DIM) before L2 normalization; v (T, Hv, DV); a, b (T, Hv); decay, dt_bias (Hv,)
//           state: two matrices [Hv][DV][DK], `flip` apart, and of the last step's rows [2][64]: k [Hk][DK], change [Hv][DV], factor [Hv]
// Out       out [T][Hv][DV] float32
// Build     DK, a multiple of 16 up to 256; DIM: the width of a key, at most DK, zeros behind it in the state
// Work      a CTA per value head and 64 columns; 16 lanes share four columns of the matrix, in registers for all rows: a
//           key that a lane reads from shared memory, whose rate is the limit, serves four columns.
//           The committed path is applied on the way in, and its result written beside the old matrix; this step's
//           rows are kept as (k, change, factor) for the next. A row that does not continue the row before it starts
//           from the written matrix and applies its ancestors again: no state per node
// Assumes   q, k and v are not partial sums; a step of more than 64 rows is a chain (kind 1); it leaves its own matrix
// Numbers   float32; every way to reach a state applies the same operations in the same order, so a row of a chain or a
//           tree equals the row that plain decoding computes, bit for bit
// Bound     bytes of the matrix, read and written once; from about 16 rows the recurrence itself

#define ROWS 64  // of a step that may be a tree
#define NJ ((DK + 63) / 64)  // fours of a key per lane: 4 * lane and every 64 on
#define CHUNK 16  // rows that are read together
#define PER_WARP (CHUNK / 8)
#define WIDE 64  // columns
#define NL ((DK + 31) / 32)  // elements of a key per lane

struct DeltaRows {
    float *k, *change, *factor;
};

__device__ __forceinline__ void read_fours(float4 (&v)[NJ], const float* from, int part) {
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        v[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (DK % 64 == 0 || j * 64 + part * 4 < DK) v[j] = *(const float4*)(from + j * 64 + part * 4);
    }
}
__device__ __forceinline__ void apply(float4 (&s)[NJ], const float4 (&k)[NJ], float change, float factor) {
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        s[j].x = __fmaf_rn(k[j].x, change, __fmul_rn(factor, s[j].x));
        s[j].y = __fmaf_rn(k[j].y, change, __fmul_rn(factor, s[j].y));
        s[j].z = __fmaf_rn(k[j].z, change, __fmul_rn(factor, s[j].z));
        s[j].w = __fmaf_rn(k[j].w, change, __fmul_rn(factor, s[j].w));
    }
}
__device__ __forceinline__ float part_of_dot(const float4 (&s)[NJ], const float4 (&k)[NJ]) {
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        x = __fmaf_rn(s[j].x, k[j].x, x), y = __fmaf_rn(s[j].y, k[j].y, y);
        x = __fmaf_rn(s[j].z, k[j].z, x), y = __fmaf_rn(s[j].w, k[j].w, y);
    }
    return x + y;
}
// Sums over 16 lanes of four columns' parts; a lane gets that of column 2 * (lane % 2) + lane / 2 % 2.
__device__ __forceinline__ float sum_of_sixteen(const float (&v)[4], int part) {
    const bool odd = part & 1, second = part & 2;
    const float a = (odd ? v[2] : v[0]) + __shfl_xor_sync(FULL, odd ? v[0] : v[2], 1);
    const float b = (odd ? v[3] : v[1]) + __shfl_xor_sync(FULL, odd ? v[1] : v[3], 1);
    float sum = (second ? b : a) + __shfl_xor_sync(FULL, second ? a : b, 2);
    sum += __shfl_xor_sync(FULL, sum, 4);
    return sum + __shfl_xor_sync(FULL, sum, 8);
}
// The four columns' values from the lanes that have them.
__device__ __forceinline__ void spread(float (&v)[4], float mine, int part) {
    const bool odd = part & 1, second = part & 2;
    const float other = __shfl_xor_sync(FULL, mine, 2), a = second ? other : mine, b = second ? mine : other;
    const float c = __shfl_xor_sync(FULL, a, 1), d = __shfl_xor_sync(FULL, b, 1);
    v[0] = odd ? c : a, v[1] = odd ? d : b, v[2] = odd ? a : c, v[3] = odd ? b : d;
}
// The matrix's four columns of a lane, `DK` apart; those beyond the last repeat it.
__device__ __forceinline__ void read_matrix(float4 (&s)[4][NJ], const float* columns, int part, int left) {
#pragma unroll
    for (int c = 0; c < 4; c++) read_fours(s[c], columns + min(c, left - 1) * DK, part);
}
__device__ __forceinline__ void write_matrix(const float4 (&s)[4][NJ], float* columns, int part, int left) {
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int j = 0; j < NJ; j++)
            if (c < left && (DK % 64 == 0 || j * 64 + part * 4 < DK)) *(float4*)(columns + c * DK + j * 64 + part * 4) = s[c][j];
}

// A warp's share of a chunk on its way from memory: rows `warp`, `warp` + 8.
struct Chunk {
    float q[PER_WARP][NL], k[PER_WARP][NL], v[PER_WARP][2], a, b;

    __device__ __forceinline__ void read(const In& q_, const In& k_, const In& v_, const In& a_, const In& b_, int first,
                                         int rows, int h, int hk, int c0, int DV) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            const int i = warp + r * 8, t = first + i;
            const bool is = i < CHUNK && t < rows;
            const float *qt = head_of(q_, t, hk, DIM) + lane, *kt = head_of(k_, t, hk, DIM) + lane;
            const float* vt = head_of(v_, t, h, DV) + c0 + lane;
#pragma unroll
            for (int n = 0; n < NL; n++) {
                const bool in = is && lane + n * 32 < DIM;
                q[r][n] = in ? qt[n * 32] : 0.0f, k[r][n] = in ? kt[n * 32] : 0.0f;
            }
#pragma unroll
            for (int n = 0; n < 2; n++) v[r][n] = is && c0 + lane + n * 32 < DV ? vt[n * 32] : 0.0f;
        }
        const int t = first + threadIdx.x;
        if (threadIdx.x < CHUNK && t < rows) a = load_one(a_, row_of(a_, t) + h), b = load_one(b_, row_of(b_, t) + h);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
delta(In q, In k, In v, In a, In b, const float* decay, const float* dt_bias, const StepState* step, int Hk, int Hv,
      int DV, float* matrix, s64 flip, float* row_k, float* row_change, float* row_factor, float* out) {
    begin();
    extern __shared__ __align__(16) float shared[];
    float* ks = shared;               // [ROWS][DK]
    float* qs = ks + ROWS * DK;          // [CHUNK][DK]
    float* vs = qs + CHUNK * DK;         // [CHUNK][WIDE]
    float* changes = vs + CHUNK * WIDE;  // [ROWS][WIDE]
    float* factors = changes + ROWS * WIDE;
    float* betas = factors + ROWS;       // [CHUNK]
    u32* breaks = (u32*)(betas + CHUNK);  // bit t: row t does not continue row t - 1
    const int h = (int)blockIdx.x, hk = h % Hk, warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % 16;
    // a lane's four columns, those of them that exist, and the one whose sums it gets
    const int local = warp * 8 + lane / 16 * 4, column = blockIdx.y * WIDE + local, left = min(4, DV - column);
    const int own = local + part % 2 * 2 + part / 2 % 2;
    const bool stores = part < 4 && blockIdx.y * WIDE + own < DV;
    const int current = step->current, rows = step->rows, kept = !step->kind;
    const s64 place = ((s64)h * DV + min(column, DV - 1)) * DK;
    const DeltaRows old = {row_k + (s64)current * 64 * Hk * DK, row_change + (s64)current * 64 * Hv * DV,
                           row_factor + current * 64 * Hv};
    const DeltaRows now = {row_k + (s64)(1 - current) * 64 * Hk * DK, row_change + (s64)(1 - current) * 64 * Hv * DV,
                           row_factor + (1 - current) * 64 * Hv};
    const float* from = matrix + current * flip + place;
    float* next = matrix + (1 - current) * flip + place;

    float4 s[4][NJ], key[NJ];
    read_matrix(s, from, part, max(left, 1));
    if (warp < 2) {
        const u32 bits = __ballot_sync(FULL, kept && threadIdx.x < rows && step->parents[threadIdx.x] != (int)threadIdx.x - 1);
        if (lane == 0) breaks[warp] = bits;
    }
#pragma unroll 1
    for (int i = 0; i < step->path_length; i++) {
        const int r = step->path[i];
        read_fours(key, old.k + ((s64)r * Hk + hk) * DK, part);
#pragma unroll
        for (int c = 0; c < 4; c++)
            apply(s[c], key, old.change[((s64)r * Hv + h) * DV + min(column + c, DV - 1)], old.factor[r * Hv + h]);
    }
    if (kept) write_matrix(s, next, part, left);
    depend();  // no kernel of the step writes what has been read so far
    Chunk chunk;
    chunk.read(q, k, v, a, b, 0, rows, h, hk, blockIdx.y * WIDE, DV);

#pragma unroll 1
    for (int first = 0; first < rows; first += CHUNK) {
        __syncthreads();
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            const int i = warp + r * 8, t = first + i;
            float qq = 0.0f, kk = 0.0f;
#pragma unroll
            for (int n = 0; n < NL; n++) qq += chunk.q[r][n] * chunk.q[r][n], kk += chunk.k[r][n] * chunk.k[r][n];
            const float q_scale = rsqrtf(warp_sum(qq) + 1e-6f) * rsqrtf((float)DIM);
            const float k_scale = rsqrtf(warp_sum(kk) + 1e-6f);
            if (i >= CHUNK || t >= rows) continue;
#pragma unroll
            for (int n = 0; n < NL; n++) {
                const int d = lane + n * 32;
                if (d >= DK) continue;
                const float ke = chunk.k[r][n] * k_scale;
                qs[i * DK + d] = chunk.q[r][n] * q_scale, ks[t % ROWS * DK + d] = ke;
                if (kept && (int)blockIdx.y == 0 && h < Hk) now.k[((s64)t * Hk + h) * DK + d] = ke;
            }
#pragma unroll
            for (int n = 0; n < 2; n++) vs[i * WIDE + lane + n * 32] = chunk.v[r][n];
        }
        if (threadIdx.x < CHUNK && first + threadIdx.x < rows) {
            const int t = first + threadIdx.x;
            const float x = chunk.a + dt_bias[h];
            const float factor = expf(decay[h] * (x > 20.0f ? x : log1pf(expf(x))));
            factors[t % ROWS] = factor;
            betas[threadIdx.x] = 1.0f / (1.0f + expf(-chunk.b));
            if (kept && (int)blockIdx.y == 0) now.factor[t * Hv + h] = factor;
        }
        __syncthreads();
        const int n = min(CHUNK, rows - first);
        if (n < rows - first) chunk.read(q, k, v, a, b, first + CHUNK, rows, h, hk, blockIdx.y * WIDE, DV);  // meanwhile
        const u32 marks = kept ? breaks[first / 32] >> (first % 32) : 0;
        const s64 place_of_row = ((s64)first * Hv + h) * DV + blockIdx.y * WIDE + own;
        const int row_step = Hv * DV;
        float *out_at = out + place_of_row - row_step, *change_at = now.change + place_of_row;
        const float *k_at = ks + first % ROWS * DK, *q_at = qs, *v_at = vs + own, *beta_at = betas, *factor_at = factors + first % ROWS;
        float* kept_at = changes + first % ROWS * WIDE + own;
        float o[4] = {};  // parts of the row before, whose sums are taken beside the next row's
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            if (marks >> i & 1) {
                __syncwarp();
                read_matrix(s, left > 0 ? next : from, part, max(left, 1));
#pragma unroll 1
                for (u64 seen = step->seen[first + i] & ~(1ull << (first + i)); seen; seen &= seen - 1) {
                    const int j = __ffsll(seen) - 1;
                    read_fours(key, ks + j * DK, part);
#pragma unroll
                    for (int c = 0; c < 4; c++) apply(s[c], key, changes[j * WIDE + local + c], factors[j]);
                }
            }
            read_fours(key, k_at, part);
            const float factor = *factor_at, beta = *beta_at, value = *v_at;
            float dots[4];
#pragma unroll
            for (int c = 0; c < 4; c++) dots[c] = part_of_dot(s[c], key);
            const float dot = sum_of_sixteen(dots, part), out_of_last = sum_of_sixteen(o, part);
            if (i && stores) *out_at = out_of_last;
            const float change = beta * (value - factor * dot);
            spread(dots, change, part);
#pragma unroll
            for (int c = 0; c < 4; c++) apply(s[c], key, dots[c], factor);
            read_fours(key, q_at, part);
#pragma unroll
            for (int c = 0; c < 4; c++) o[c] = part_of_dot(s[c], key);
            if (kept && part < 4) {
                *kept_at = change;
                if (stores) *change_at = change;
            }
            k_at += DK, q_at += DK, v_at += WIDE, beta_at++, factor_at++, kept_at += WIDE;
            out_at += row_step, change_at += row_step;
        }
        const float last = sum_of_sixteen(o, part);
        if (stores) *out_at = last;
    }
    if (!kept) write_matrix(s, next, part, left);
}
