// light: row-wise ops between the products of a decoding step, for rows readable as float4; rows.cu has the general forms
// Meaning   common/reference.py NumpyOps.add, rms_norm, swiglu, geglu, mul_sigmoid, gated_rms_norm
// Launcher  cuda_backend/rows.py
// In        activations (T, ...) float32, perhaps partial sums (prelude.cuh In), readable as float4
// Out       as rows.cu (store.cuh)
// Build     the macros of sums.cuh and of store.cuh
// Work      a lane per four columns, so that many multiprocessors add partial sums. Inputs that no step writes are loaded before
//           the wait for the previous kernel. The code is short, because loading instructions takes much of a kernel's 2 us
// Bound     launches
// Tried     variant against the kernel of that time (Qwen3.6-27B, one H200); docs/experiments/steps.md has more.
//           norms by one CTA of 256 threads per row -> 14.7 us against 2.9: one multiprocessor adds up to nine partial sums one
//           after another
//           ten partial sums in flight instead of eight -> 5.98 ms against 5.92 a step: longer code
//           two rows per CTA -> 1 us longer; eight rows 6 us: one multiprocessor adds them up
//           128 lanes per CTA from 8 rows on -> SwiGLU 4.0 us against 3.8 at 16 rows, 5.6 against 4.7 at 64
//           addition, norm and router in one launch -> GLM 2.130 ms against 2.131, Laguna 1.749 against 1.737: every CTA adds up the
//             row
//           shared-memory preference set for all kernels -> 7.06 ms a step against 6.88

// The sum x + y, and its norm as a product reads it, without the factor 1 / rms, which linear.cu computes from
// `squares` [T][K / 128].
extern "C" __global__ void __launch_bounds__(64, 1)
add_scale(In x, In y, const float* weight, float* sum, float* squares, Out out) {
    release_next();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y, at = min(k, out.K - 4);
    const bool in = k < out.K;
    float4 w = make_float4(1.0f, 1.0f, 1.0f, 1.0f), v = make_float4(0.0f, 0.0f, 0.0f, 0.0f), other = v;
    if (weight) w = *(const float4*)(weight + at);
    // the first blocks of a multiprocessor also run it before the wait, without effect, to load its code
#pragma unroll 1
    for (int real = t >= 2; real < 2; real++) {
        if (real) {
            depend();
            load_sums(v, other, row_of(x, t) + at, x.partial_stride, row_of(y, t) + at, y.partial_stride);
            v = in ? plus(v, other) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        if (sum && in && real) *(float4*)(sum + (s64)t * out.K + k) = v;
        const float total = warp_sum(v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w));
        if (threadIdx.x % 32 == 0 && in && real) squares[t * (out.K / 128) + k / 128] = total;
        store_four(out, t, k, make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w), real);
    }
}

// Joins two rows; y may consist of heads.
extern "C" __global__ void __launch_bounds__(64, 1) swiglu(In x, In y, Out out) {
    begin();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y, at = min(k, out.K - 4);
    float4 g, u, v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    load_sums(g, u, row_of(x, t) + at, x.partial_stride, row_of(y, t) + at, y.partial_stride);
    if (k < out.K) v = make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
    store_four(out, t, k, v);
}
extern "C" __global__ void __launch_bounds__(64, 1) geglu(In x, In y, Out out) {
    begin();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y, at = min(k, out.K - 4);
    float4 g, u, v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    load_sums(g, u, row_of(x, t) + at, x.partial_stride, row_of(y, t) + at, y.partial_stride);
    if (k < out.K) v = make_float4(gelu(g.x) * u.x, gelu(g.y) * u.y, gelu(g.z) * u.z, gelu(g.w) * u.w);
    store_four(out, t, k, v);
}
extern "C" __global__ void __launch_bounds__(64, 1) mul_sigmoid(In x, In y, Out out) {
    begin();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y, at = min(k, out.K - 4);
    float4 e, g, v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    load_sums(e, g, row_of(x, t) + at, x.partial_stride, place(y, t, at), y.partial_stride);
    if (k < out.K) v = make_float4(e.x * sigmoid(g.x), e.y * sigmoid(g.y), e.z * sigmoid(g.z), e.w * sigmoid(g.w));
    store_four(out, t, k, v);
}

// gated_rms_norm of heads of 128, one warp per head.
extern "C" __global__ void __launch_bounds__(64, 1) gated_norm(In x, int H, int T, const float* weight, float eps, In z, Out out) {
    release_next();
    const int at = blockIdx.x * 2 + threadIdx.x / 32, t = at / H, head = at % H, d = threadIdx.x % 32 * 4;
    const float4 w = *(const float4*)(weight + d);
    depend();
    if (t >= T) return;
    const float4 v = sum_of_partials(head_of(x, t, head, 128) + d, x), g = sum_of_partials(head_of(z, t, head, 128) + d, z);
    const float scale = norm_factor(warp_sum(v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w)), 128, eps);
    const float4 gate = make_float4(w.x * silu(g.x), w.y * silu(g.y), w.z * silu(g.z), w.w * silu(g.w));  // as delta.cu
    store_four(out, t, head * 128 + d, make_float4(v.x * scale * gate.x, v.y * scale * gate.y, v.z * scale * gate.z, v.w * scale * gate.w));
    if (head == 0)  // columns that pad a row to a whole unit
#pragma unroll 1
        for (int k = H * 128; k < out.groups * 32; k += 128) store_four(out, t, k + d, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}
