// light: what lies between the products of a decoding step, for rows whose fours are aligned; rows.cu has the rest
// Meaning   common/reference.py NumpyOps.add, rms_norm, swiglu, mul_sigmoid, gated_rms_norm, and rows.cu heads_to_cache
// Launcher  cuda_backend/ops.py
// In        activations (T, ...) float32 as partial sums (prelude.cuh In), all in fours at multiples of 16 bytes
// Out       as rows.cu (store.cuh)
// Work      a lane per four columns, so that many multiprocessors add partial sums. What no step writes is read before
//           the wait for the kernel before. Code is short: a kernel that runs for 2 us waits most of it for its code
// Bound     launches

#ifndef SLOTS
#define SLOTS 1
#endif
#define AT_ONCE (SLOTS < 24 ? SLOTS : 24)  // partial sums in registers

// The sum x + y, and of it what a norm hands to a product but for the factor that depends on the whole row: linear.cu
// takes that from `squares` [T][K / 128].
extern "C" __global__ void __launch_bounds__(64)
add_scale(In x, In y, int has_y, const float* weight, float* sum, float* squares, Out out) {
    release_next();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y;
    const bool in = k < out.K;
    float4 w = make_float4(1.0f, 1.0f, 1.0f, 1.0f), v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (weight && in) w = *(const float4*)(weight + k);
    depend();
    if (in) {
        v = *(const float4*)(row_of(x, t) + k);
        if (has_y) {
            const float* from = row_of(y, t) + k;
            float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
            for (int first = 0; first < SLOTS; first += AT_ONCE) {
                float4 e[AT_ONCE];
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++)
                    if (first + s < SLOTS) e[s] = *(const float4*)(from + (first + s) * y.slot);
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++)
                    if (first + s < SLOTS) all = plus(all, e[s]);
            }
            v = plus(v, all);
        }
        if (sum) *(float4*)(sum + (s64)t * out.K + k) = v;
    }
    const float total = warp_sum(v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w));
    if (threadIdx.x % 32 == 0 && in) squares[t * (out.K / 128) + k / 128] = total;
    store_four(out, t, k, make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w));
}

// Two rows joined; y may lie in heads.
extern "C" __global__ void __launch_bounds__(64) swiglu(In x, In y, Out out) {
    begin();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (k < out.K) {
        const float4 gate = slots_of(row_of(x, t) + k, x), up = slots_of(row_of(y, t) + k, y);
        v = make_float4(silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z, silu(gate.w) * up.w);
    }
    store_four(out, t, k, v);
}
extern "C" __global__ void __launch_bounds__(64) mul_sigmoid(In x, In y, Out out) {
    begin();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (k < out.K) {
        const float4 e = slots_of(row_of(x, t) + k, x), g = slots_of(place(y, t, k), y);
        v = make_float4(e.x * sigmoid(g.x), e.y * sigmoid(g.y), e.z * sigmoid(g.z), e.w * sigmoid(g.w));
    }
    store_four(out, t, k, v);
}

// gated_rms_norm of heads of 128, a warp each.
extern "C" __global__ void __launch_bounds__(64) gated_norm(In x, int H, int T, const float* weight, float eps, In z, Out out) {
    release_next();
    const int at = blockIdx.x * 2 + threadIdx.x / 32, t = at / H, head = at % H, d = threadIdx.x % 32 * 4;
    const float4 w = *(const float4*)(weight + d);
    depend();
    if (t >= T) return;
    const float4 v = slots_of(head_of(x, t, head, 128) + d, x), g = slots_of(head_of(z, t, head, 128) + d, z);
    const float scale = 1.0f / sqrtf(warp_sum(v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w)) / 128 + eps);
    store_four(out, t, head * 128 + d, make_float4(v.x * scale * w.x * silu(g.x), v.y * scale * w.y * silu(g.y),
                                                   v.z * scale * w.z * silu(g.z), v.w * scale * w.w * silu(g.w)));
    if (head == 0)  // columns that pad a row to a whole unit
#pragma unroll 1
        for (int k = H * 128; k < out.groups * 32; k += 128) store_four(out, t, k + d, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}
