// to_cache: writes q, keys and values as heads_to_cache.cu, for heads of 128 or 256, readable as float4, in a decoding step
// Meaning   as heads_to_cache.cu, with the same bits
// Launcher  cuda_backend/attention.py
// In        q (T, H, D), k and v (T, K, D) float32, perhaps partial sums
// Out       q_out [T][H][D] float16, and the step's rows of the cache
// Build     D, formats.cuh; ALONE: the step has one row; BIASED: vectors (heads x D) or null are added to q, k and v
// Work      a warp per head, or, where it has more partial sums than a warp reads at once, four, each for every fourth of them,
//           of which the first then norms, rotates and stores it. Angles and weights are loaded before the wait for the previous kernel.
//           Few warps, so that `split`, which takes whole multiprocessors, starts beside them
// Assumes   norm, rope and their parameters are the same for q and k; pairs is 0 or a power of two from 4 to 64
// Bound     launches
// Tried     variant against the kernel of that time (one H200).
//           addresses of the result computed before the wait -> step of one row of Laguna-XS.2 1.44 ms against 1.46 (one H100), kept there;
//             of 16 rows 2.39 against 2.355, whether eight loads are in flight or four (docs/experiments/steps.md)
//           angles of rope read ahead -> 6.4 us against 6.2: partial sums take its time, not angles
//           eight warps per head -> `split` 12.1 us against 9.5 at 16 rows of Qwen3.6-27B: they held the registers that its CTAs need

#define PARTS (D / 128)
#ifndef ALONE
#define ALONE 0
#endif
#ifndef BIASED
#define BIASED 0
#endif
#if ALONE
#define BOUND 128, 1  // otherwise the compiler saves registers, and loads wait for earlier ones
#else
#define BOUND 128
#endif
#define AT_ONCE (1024 / D)  // partial sums in flight; also in cuda_backend/attention.py

// Every `step`th partial sum from `first` on, added in order. After the last one it is read again, and not used: prelude.cuh
// sum_of_partials.
__device__ __forceinline__ void add_partials(float4 (&sum)[PARTS], const float* from, const In& x, int first, int step) {
#pragma unroll
    for (int n = 0; n < PARTS; n++) sum[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (; first < x.partials; first += AT_ONCE * step) {
        float4 e[AT_ONCE][PARTS];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (int n = 0; n < PARTS; n++)
                e[j][n] = *(const float4*)(from + min(first + j * step, x.partials - 1) * x.partial_stride + n * 128);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (int n = 0; n < PARTS; n++)
                if (first + j * step < x.partials) sum[n] = plus(sum[n], e[j][n]);
    }
}

extern "C" __global__ void __launch_bounds__(BOUND)
to_cache(In q, In k, In v, int H, int K, const StepState* step, int T, int norm, const float* q_weight, const float* k_weight,
         float eps, Rope rope, u16* q_out, Plane keys, Plane values, Exact exact, const float* q_bias, const float* k_bias, const float* v_bias) {
    release_next();
    __shared__ float4 parts[4][D / 4];
    const int q_ctas = q.partials > AT_ONCE ? H : (H + 3) / 4, k_ctas = k.partials > AT_ONCE ? K : (K + 3) / 4;
    const int all = q_ctas + k_ctas + (v.partials > AT_ONCE ? K : (K + 3) / 4), t = blockIdx.x / all, cta = blockIdx.x % all;
    const int kind = cta < q_ctas ? 0 : cta < q_ctas + k_ctas ? 1 : 2, warp = threadIdx.x / 32, d = threadIdx.x % 32 * 4;
    const int first = kind == 0 ? cta : kind == 1 ? cta - q_ctas : cta - q_ctas - k_ctas;
    const bool shared = (kind == 0 ? q.partials : kind == 1 ? k.partials : v.partials) > AT_ONCE;
    const int of = shared ? first : first * 4 + warp;
    const float* weight = !norm || kind == 2 || (shared && warp) ? 0 : kind ? k_weight : q_weight;
    const bool turns = kind < 2 && !(shared && warp) && d < 2 * rope.pairs;
    const float4 one = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    float4 w[PARTS], e[PARTS], c = one, s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int n = 0; n < PARTS; n++) w[n] = weight ? *(const float4*)(weight + n * 128 + d) : one;
    const float sign = d < rope.pairs ? -rope.magnitude : rope.magnitude;
    const int rows = step->rows;
    const Run& run = run_at(step, t);
    const int position = run.past + t - run.first, slot = run.slot;
    const double2* radians = (const double2*)(rope.frequencies + (d & rope.pairs - 1));  // per position
    const double2 none = make_double2(0.0, 0.0);
    double2 low = turns ? radians[0] : none, high = turns ? radians[1] : none;
    const int rope_position = turns ? rope.positions[t] : 0;
    if (t >= rows || of >= (kind ? K : H)) return;
#pragma unroll 1
    for (int i = 0; i < 4 && turns; i++) {
        const double turn = rope_position * low.x * 0.15915494309189535;
        low = make_double2(low.y, high.x), high.x = high.y;
        float sine, cosine;
        sincospif((float)(2.0 * (turn - rint(turn))), &sine, &cosine);
        c = make_float4(c.y, c.z, c.w, cosine * rope.magnitude), s = make_float4(s.y, s.z, s.w, sine * sign);
    }
#if BIASED
    const float* bias = kind == 0 ? q_bias : kind == 1 ? k_bias : v_bias;
    float4 added[PARTS];
#pragma unroll
    for (int n = 0; n < PARTS; n++)
        added[n] = bias ? *(const float4*)(bias + of * D + n * 128 + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
#if ALONE  // where the result goes
    Plane plane_of_row = values;
    if (kind == 1) plane_of_row = keys;
    u8* early = kind == 0 ? (u8*)(q_out + ((s64)t * H + of) * D)
                          : row_at(plane_of_row, slot, of, place_of(keys, position), kind == 1 ? row_bytes(KEYS, D) : row_bytes(VALUES, D));
#else
    u8* early = 0;
#endif
    depend();
    In x = q;
    if (kind == 1) x = k;
    if (kind == 2) x = v;
    const float* from = head_of(x, t, of, D) + d;
    add_partials(e, from, x, shared ? warp : 0, shared ? 4 : 1);
    if (shared) {
#pragma unroll
        for (int n = 0; n < PARTS; n++) parts[warp][n * 32 + d / 4] = e[n];
        __syncthreads();
        if (warp) return;
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            const int i = n * 32 + d / 4;
            e[n] = plus(plus(plus(parts[0][i], parts[1][i]), parts[2][i]), parts[3][i]);
        }
    }
#if BIASED
#pragma unroll
    for (int n = 0; n < PARTS; n++) e[n] = plus(e[n], added[n]);
#endif
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < PARTS; n++) squares += e[n].x * e[n].x + e[n].y * e[n].y + (e[n].z * e[n].z + e[n].w * e[n].w);
    const float scale = norm && kind < 2 ? norm_factor(warp_sum(squares), D, eps) : 1.0f;
#pragma unroll
    for (int n = 0; n < PARTS; n++)
        e[n] = make_float4(e[n].x * scale * w[n].x, e[n].y * scale * w[n].y, e[n].z * scale * w[n].z, e[n].w * scale * w[n].w);
    const int apart = rope.pairs / 4;  // lanes
    const float4 self = e[0];
    const float4 other = make_float4(__shfl_xor_sync(FULL, self.x, apart), __shfl_xor_sync(FULL, self.y, apart),
                                     __shfl_xor_sync(FULL, self.z, apart), __shfl_xor_sync(FULL, self.w, apart));
    if (turns)
        e[0] = make_float4(self.x * c.x + other.x * s.x, self.y * c.y + other.y * s.y, self.z * c.z + other.z * s.z,
                           self.w * c.w + other.w * s.w);
    const int place = place_of(keys, position);
    if constexpr (EXACT) {
        u8* row = ALONE       ? early
                  : kind == 0 ? (u8*)(q_out + ((s64)t * H + of) * D)
                  : kind == 1 ? row_at(keys, slot, of, place, row_bytes(KEYS, D))
                              : row_at(values, slot, of, place, row_bytes(VALUES, D));
        const int exact_place = place_of(exact.keys, position);
        u8* exact_row = kind == 0   ? (u8*)(exact.q + ((s64)t * H + of) * D)
                        : kind == 1 ? row_at(exact.keys, slot, of, exact_place, 2 * D)
                                    : row_at(exact.values, slot, of, exact_place, 2 * D);
        u8* query_row = kept_query(exact, slot, t, exact_place, kind == 0, kind == 1, of, H, K, 2 * D);
        const s64 at = statistics_of(exact, t, slot) + (kind ? of : of / (H / K)) * D;
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < PARTS; n++)
            part += store_both<D>(exact, at, kind == 0, kind == 1, row, exact_row, query_row, n, threadIdx.x % 32, e[n]);
        if (kind) return;
        part = warp_sum(part);
        if (threadIdx.x % 32 == 0) exact.shift[t * H + of] = part;
    } else if constexpr (PACKED || TURN_KEYS || TURN_VALUES) {
        u8* row = ALONE       ? early
                  : kind == 0 ? (u8*)(q_out + ((s64)t * H + of) * D)
                  : kind == 1 ? row_at(keys, slot, of, place, row_bytes(KEYS, D))
                              : row_at(values, slot, of, place, row_bytes(VALUES, D));
#pragma unroll
        for (int n = 0; n < PARTS; n++) store_row<D>(kind == 0, kind == 1, row, n, threadIdx.x % 32, e[n]);
    } else {
        Plane plane = values;
        if (kind == 1) plane = keys;
        u16* to = ALONE ? (u16*)early : kind == 0 ? q_out + ((s64)t * H + of) * D : (u16*)row_at(plane, slot, of, place, 2 * D);
#pragma unroll
        for (int n = 0; n < PARTS; n++)
            *(uint2*)(to + n * 128 + d) = make_uint2(to_half2(e[n].x, e[n].y), to_half2(e[n].z, e[n].w));
    }
}
