// rows: row-wise ops between two products, and the int8 activations that linear.cu reads
// Meaning   common/reference.py NumpyOps.add, rms_norm, swiglu, geglu, scale, mul_sigmoid, mul_softplus,
//           rope, gated_rms_norm; clamped_swiglu, after biases
// Launcher  cuda_backend/rows.py; of `clamped` cuda_backend/mixture.py
// In        activations (T, ...) float32, strided, perhaps partial sums (prelude.cuh In)
// Out       the forms of store.cuh
// Work      add_norm: a CTA per row. pointwise: a warp per 128 columns. heads: a warp per head
// Assumes   the width of packed heads is a multiple of 128
// Numbers   float32; code = rint(x / scale), scale = largest magnitude / 127; NaN reaches the scale and so the result
// Bound     launches: a few KB per row
// Tried     norms by 256 threads with the row in registers -> 14.7 us against 8.3 (Qwen3.6-27B, H200): nine partial sums in sequence

// The first SPAN columns of a row stay in registers. Each read of a column occurs here once, to keep the code short.
#define TURNS 5
#define SPAN (TURNS * 4 * THREADS)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
add_norm(In x, In y, int has_y, const float* weight, float eps, float* sum, Out out) {
    begin();
    __shared__ float scratch[THREADS / 32];
    const int t = (int)blockIdx.x, K = out.K, columns = out.packed ? out.groups * 32 : K, mine = threadIdx.x * 4;
    const In w = {weight, 0, 0, 0, 1, 0, 1};
    float4 v[TURNS], other[TURNS];
    float squares = 0.0f, scale = 0.0f;
    if (weight)
#pragma unroll 1
        for (int k = mine; k < K; k += 4 * THREADS) prefetch(weight + k);
#pragma unroll 1
    for (int stored = 0; stored < 2; stored++) {
#pragma unroll 1
        for (int base = stored ? 0 : (columns - 1) / SPAN * SPAN; base >= 0 && base < columns; base += stored ? SPAN : -SPAN) {
            const int k = base + mine;
            if (!stored || base) {
#pragma unroll
                for (int i = 0; i < TURNS; i++) v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
                for (int term = 0; term <= has_y; term++) {
                    const In a = {term ? y.p : x.p, term ? y.partial_stride : x.partial_stride, term ? y.row : x.row, 0,
                                  term ? y.partials : x.partials, 0, 1};
                    load_fours(other, row_of(a, t) + k, a, 4 * THREADS, K - k);
#pragma unroll
                    for (int i = 0; i < TURNS; i++) v[i] = plus(v[i], other[i]);
                }
            }
            if (stored) {
#pragma unroll
                for (int i = 0; i < TURNS; i++) other[i] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
                if (weight) load_fours(other, weight + k, w, 4 * THREADS, K - k);
            } else {
#pragma unroll
                for (int i = 0; i < TURNS; i++)
                    squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
            }
            const int end = min(columns, base + SPAN);
#pragma unroll 1
            for (int turn = 0; turn < TURNS && (stored || sum); turn++) {
                const int to = k + turn * 4 * THREADS;
                const float4 first = v[0], f = other[0];
                float4 e = first;
                if (stored) e = make_float4(e.x * scale * f.x, e.y * scale * f.y, e.z * scale * f.z, e.w * scale * f.w);
                Out now = out;
                if (!stored) now.dense = sum, now.packed = 0, now.product = 0;
                if (to / 128 * 128 < end) store_four(now, t, to, e);
#pragma unroll
                for (int i = 0; i < TURNS - 1; i++) v[i] = v[i + 1], other[i] = other[i + 1];
                v[TURNS - 1] = first, other[TURNS - 1] = f;
            }
        }
        if (!stored) scale = norm_factor(block_sum(squares, scratch, THREADS / 32), K, eps);
    }
}

#define COPY 0
#define ADD 1
#define SWIGLU 2
#define MUL_SIGMOID 3
#define MUL_SOFTPLUS 4
#define GEGLU 5

__device__ __forceinline__ float join(int op, float v, float other) {
    if (op == ADD) return v + other;
    if (op == SWIGLU) return silu(v) * other;
    if (op == GEGLU) return gelu(v) * other;
    if (op == MUL_SIGMOID) return v * sigmoid(other);
    if (op == MUL_SOFTPLUS) return v * (other > 20.0f ? other : log1pf(expf(other)));
    return v;
}

// Columns k to k + 3, zeros from `end` on.
__device__ __forceinline__ float4 load_four(const In& a, int t, int k, int end) {
    float4 v[1] = {};
    if (a.width % 4 == 0) {
        load_fours(v, place(a, t, k), a, 0, end - k);
    } else {
#pragma unroll 1
        for (int i = k; i < k + 4; i++)
            v[0] = make_float4(v[0].y, v[0].z, v[0].w, load_apart(place(a, t, i), a.partial_stride, a.partials, 0, end - i).x);
    }
    return v[0];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pointwise(int op, In x, In y, Out out) {
    begin();
    const int k = (blockIdx.y * THREADS + threadIdx.x) * 4, t = (int)blockIdx.x;
    if (k / 128 * 128 >= (out.packed ? out.groups * 32 : out.K)) return;
    float4 a = load_four(x, t, k, out.K), b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (op != COPY) b = load_four(y, t, k, out.K);
#pragma unroll 1
    for (int i = 0; i < 4 && op != COPY; i++)
        a = make_float4(a.y, a.z, a.w, join(op, a.x, b.x)), b = make_float4(b.y, b.z, b.w, b.x);
    store_four(out, t, k, a);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
scale(In x, float factor, Out out) {
    begin();
    const int k = (blockIdx.y * THREADS + threadIdx.x) * 4, t = (int)blockIdx.x;
    if (k / 128 * 128 >= (out.packed ? out.groups * 32 : out.K)) return;
    const float4 v = load_four(x, t, k, out.K);
    store_four(out, t, k, make_float4(factor * v.x, factor * v.y, factor * v.z, factor * v.w));
}

// Row t has expert ids[t], whose biases [E][K] are added to gates and ups.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
clamped(In gate, In up, const int* ids, const float* gate_bias, const float* up_bias, float limit, Out out) {
    begin();
    const int k = (blockIdx.y * THREADS + threadIdx.x) * 4, t = (int)blockIdx.x;
    if (k / 128 * 128 >= (out.packed ? out.groups * 32 : out.K)) return;
    float4 a = load_four(gate, t, k, out.K), b = load_four(up, t, k, out.K);
    const s64 at = (s64)ids[t] * out.K + k;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        float v = 0.0f;
        if (k + i < out.K) v = clamped_swiglu(a.x + gate_bias[at + i], b.x + up_bias[at + i], limit);
        a = make_float4(a.y, a.z, a.w, v), b = make_float4(b.y, b.z, b.w, 0.0f);
    }
    store_four(out, t, k, a);
}

// z: the gate of gated_rms_norm if `gated`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
heads(In x, int H, int D, int T, int norm, const float* weight, float eps, Rope rope, In z, int gated, Out out) {
    begin();
    extern __shared__ __align__(16) float shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int place = blockIdx.x * (THREADS / 32) + warp, t = place / H, head = place % H;
    if (t >= T) return;
    float* v = shared + warp * HEAD_ROOM(D);
    head_into(v, x, t, head, D, norm, weight, eps, rope);
    const float* gate = gated ? head_of(z, t, head, D) : 0;
#pragma unroll 1
    for (int d = lane * 4; d / 128 * 128 < D; d += 128) {
        const bool ours = d < D;
        float4 e = ours ? *(const float4*)(v + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (gated) {
            float4 g[1];
            load_fours(g, gate + d, z, 0, D - d);
#pragma unroll 1
            for (int i = 0; i < 4; i++)
                e = make_float4(e.y, e.z, e.w, e.x * silu(g[0].x)), g[0] = make_float4(g[0].y, g[0].z, g[0].w, 0.0f);
        }
        if (D % 32 == 0) {
            store_four(out, t, head * D + d, e, ours);
        } else {
            for (int i = 0; i < 4 && d + i < D; i++, e = make_float4(e.y, e.z, e.w, 0.0f))
                out.dense[(s64)t * out.K + head * D + d + i] = e.x;
        }
    }
    if (out.packed && head == 0)  // columns that pad a row to a whole unit
#pragma unroll 1
        for (int k = H * D; k < out.groups * 32; k += 128) store_four(out, t, k + lane * 4, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}
