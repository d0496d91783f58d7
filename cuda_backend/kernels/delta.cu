// delta: the Gated DeltaNet recurrence along each row's ancestors
// Meaning   common/reference.py NumpyOps.gated_delta      Launcher  cuda_backend/ops.py
// In        q, k (T, Hk, DIM) before L2 normalization; v (T, Hv, DV); a, b (T, Hv); decay, dt_bias (Hv,)
//           state: two matrices [Hv][DV][DK], `flip` apart, and of the last step's rows [2][64]: k [Hk][DK], change [Hv][DV], factor [Hv]
// Out       out [T][Hv][DV] float32
// Build     DK, a multiple of 16 up to 256; DIM: the width of a key, at most DK, zeros behind it in the state
// Work      a CTA per value head and 32 columns; four lanes share a column of the matrix, in registers for all rows.
//           The committed path is applied on the way in, and its result written beside the old matrix; this step's
//           rows are kept as (k, change, factor) for the next. A row that does not continue the row before it starts
//           from the written matrix and applies its ancestors again: no state per node
// Assumes   q, k and v are not partial sums; a step of more than 64 rows is a chain (kind 1); it leaves its own matrix
// Numbers   float32; every way to reach a state applies the same operations in the same order, so a row of a chain or a
//           tree equals the row that plain decoding computes, bit for bit
// Bound     bytes of the matrix, read and written once; from about 16 rows the recurrence itself

#define NJ (DK / 16)
#define CHUNK 16
#define NL ((DK + 31) / 32)  // elements of a key per lane

struct DeltaRows {
    float *k, *change, *factor;
};

__device__ __forceinline__ void read_key(float4 (&k)[NJ], const float* from, int part) {
#pragma unroll
    for (int j = 0; j < NJ; j++) k[j] = *(const float4*)(from + j * 16 + part * 4);
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
__device__ __forceinline__ float dot(const float4 (&s)[NJ], const float4 (&k)[NJ]) {
    float x = 0.0f, y = 0.0f, z = 0.0f, w = 0.0f;
#pragma unroll
    for (int j = 0; j < NJ; j++) {
        x = __fmaf_rn(s[j].x, k[j].x, x), y = __fmaf_rn(s[j].y, k[j].y, y);
        z = __fmaf_rn(s[j].z, k[j].z, z), w = __fmaf_rn(s[j].w, k[j].w, w);
    }
    float sum = (x + y) + (z + w);
    sum += __shfl_xor_sync(FULL, sum, 1);
    return sum + __shfl_xor_sync(FULL, sum, 2);
}
__device__ __forceinline__ void read_matrix(float4 (&s)[NJ], const float* column, int part) {
#pragma unroll
    for (int j = 0; j < NJ; j++) s[j] = *(const float4*)(column + j * 16 + part * 4);
}
__device__ __forceinline__ void write_matrix(const float4 (&s)[NJ], float* column, int part) {
#pragma unroll
    for (int j = 0; j < NJ; j++) *(float4*)(column + j * 16 + part * 4) = s[j];
}

// Four of a chunk's rows on their way from memory: a warp has rows `warp`, `warp` + 4, ...
struct Chunk {
    float q[4][NL], k[4][NL], v[4], a, b;

    __device__ __forceinline__ void read(const In& q_, const In& k_, const In& v_, const In& a_, const In& b_, int first,
                                         int rows, int h, int hk, int DV) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = blockIdx.y * 32 + lane;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int t = first + warp + r * 4;
            const float *qt = head_of(q_, t, hk, DIM) + lane, *kt = head_of(k_, t, hk, DIM) + lane;
#pragma unroll
            for (int i = 0; i < NL; i++) {
                const bool in = t < rows && lane + i * 32 < DIM;
                q[r][i] = in ? qt[i * 32] : 0.0f, k[r][i] = in ? kt[i * 32] : 0.0f;
            }
            v[r] = t < rows && c < DV ? head_of(v_, t, h, DV)[c] : 0.0f;
        }
        const int t = first + threadIdx.x;
        if (threadIdx.x < CHUNK && t < rows) a = load_one(a_, row_of(a_, t) + h), b = load_one(b_, row_of(b_, t) + h);
    }
};

extern "C" __global__ void __launch_bounds__(128, 2)
delta(In q, In k, In v, In a, In b, const float* decay, const float* dt_bias, const StepState* step, int Hk, int Hv, int DV,
      float* matrix, s64 flip, float* row_k, float* row_change, float* row_factor, float* out) {
    begin();
    extern __shared__ __align__(16) float shared[];
    float* ks = shared;                  // [64][DK]
    float* qs = ks + 64 * DK;            // [CHUNK][DK]
    float* vs = qs + CHUNK * DK;         // [CHUNK][32]
    float* changes = vs + CHUNK * 32;    // [64][32]
    float* factors = changes + 64 * 32;  // [64]
    float* betas = factors + 64;         // [CHUNK]
    const int h = blockIdx.x, hk = h % Hk, warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % 4;
    const int local = warp * 8 + lane / 4, column = blockIdx.y * 32 + local;
    const bool inside = column < DV;
    const int current = step->current, rows = step->rows, kept = !step->kind;
    const s64 at = ((s64)h * DV + (inside ? column : 0)) * DK;
    const DeltaRows old = {row_k + (s64)current * 64 * Hk * DK, row_change + (s64)current * 64 * Hv * DV,
                           row_factor + current * 64 * Hv};
    const DeltaRows now = {row_k + (s64)(1 - current) * 64 * Hk * DK, row_change + (s64)(1 - current) * 64 * Hv * DV,
                           row_factor + (1 - current) * 64 * Hv};
    float* next = matrix + (1 - current) * flip + at;

    float4 s[NJ], key[NJ];
    read_matrix(s, matrix + current * flip + at, part);
    Chunk chunk;
    chunk.read(q, k, v, a, b, 0, rows, h, hk, DV);
#pragma unroll 1
    for (int i = 0; i < step->path_length; i++) {
        const int r = step->path[i];
        read_key(key, old.k + ((s64)r * Hk + hk) * DK, part);
        apply(s, key, old.change[((s64)r * Hv + h) * DV + (inside ? column : 0)], old.factor[r * Hv + h]);
    }
    if (kept && inside) write_matrix(s, next, part);

    int reached = -1;  // the row whose matrix is in registers
    for (int first = 0; first < rows; first += CHUNK) {
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int i = warp + r * 4, t = first + i;
            float qq = 0.0f, kk = 0.0f;
#pragma unroll
            for (int n = 0; n < NL; n++) qq += chunk.q[r][n] * chunk.q[r][n], kk += chunk.k[r][n] * chunk.k[r][n];
            const float q_scale = rsqrtf(warp_sum(qq) + 1e-6f) * rsqrtf((float)DIM);
            const float k_scale = rsqrtf(warp_sum(kk) + 1e-6f);
            if (t >= rows) continue;
#pragma unroll
            for (int n = 0; n < NL; n++) {
                const int d = lane + n * 32;
                if (d >= DK) continue;
                const float ke = chunk.k[r][n] * k_scale;
                qs[i * DK + d] = chunk.q[r][n] * q_scale, ks[t % 64 * DK + d] = ke;
                if (kept && blockIdx.y == 0 && h < Hk) now.k[((s64)t * Hk + h) * DK + d] = ke;
            }
            vs[i * 32 + lane] = chunk.v[r];
        }
        if (threadIdx.x < CHUNK && first + threadIdx.x < rows) {
            const int t = first + threadIdx.x;
            const float x = chunk.a + dt_bias[h];
            const float factor = expf(decay[h] * (x > 20.0f ? x : log1pf(expf(x))));
            factors[t % 64] = factor;
            betas[threadIdx.x] = 1.0f / (1.0f + expf(-chunk.b));
            if (kept && blockIdx.y == 0) now.factor[t * Hv + h] = factor;
        }
        __syncthreads();
        if (first + CHUNK < rows) chunk.read(q, k, v, a, b, first + CHUNK, rows, h, hk, DV);  // while this one is computed
#pragma unroll 1
        for (int i = 0; i < CHUNK && first + i < rows; i++) {
            const int t = first + i;
            if (kept && step->parents[t] != reached) {
                read_matrix(s, inside ? next : matrix + current * flip + at, part);
#pragma unroll 1
                for (u64 seen = step->seen[t] & ~(1ull << t); seen; seen &= seen - 1) {
                    const int j = __ffsll(seen) - 1;
                    read_key(key, ks + j * DK, part);
                    apply(s, key, changes[j * 32 + local], factors[j]);
                }
            }
            const float factor = factors[t % 64];
            read_key(key, ks + t % 64 * DK, part);
            const float change = betas[i] * (vs[i * 32 + local] - factor * dot(s, key));
            apply(s, key, change, factor);
            read_key(key, qs + i * DK, part);
            const float o = dot(s, key);
            reached = t;
            if (part == 0) {
                if (kept) changes[t * 32 + local] = change;
                if (inside) {
                    out[((s64)t * Hv + h) * DV + column] = o;
                    if (kept) now.change[((s64)t * Hv + h) * DV + column] = change;
                }
            }
            __syncwarp();
        }
    }
    if (!kept && inside) write_matrix(s, next, part);
}
