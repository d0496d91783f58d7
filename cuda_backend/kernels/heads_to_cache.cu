// heads_to_cache: biases, norm and rope of q and k where they were deferred; then q as float16 for attention, and keys and values to the cache
// Meaning   the ops norm_rope or rope before NumpyOps.attention, and its write of the step's rows    Launcher  cuda_backend/attention.py
// In        q (T, H, D), k and v (T, K, D) float32 with any strides, perhaps partial sums; of q and of k: whether to norm, weight [D]
//           or null, eps, and a Rope (`pairs` 0: none)
// Out       q_out [T][H][wide] float16, zeros after D; the step's rows of the planes `keys` and `values` (formats.cuh); with EXACT
//           also their float16 copies and one query of each group (exact.cuh)
// Build     for a cache that is not float16: WIDTH of a head, and the macros of formats.cuh; BIASED: vectors (heads x D) or null
//           are added to q, k and v
// Work      a warp per row and head of q, k or v; the head lies in shared memory
// Assumes   `wide` is D rounded up to a multiple of 16
// Numbers   float32, rounded once to float16; codes are bitwise those of NumPy (encode.cuh)
// Bound     launches; bytes of q, k and v in prefill
// Tried     nothing on record

extern "C" __global__ void __launch_bounds__(THREADS, 1)
heads_to_cache(In q, In k, In v, int H, int K, int D, int wide, const StepState* step, int T, int q_norm, const float*
               q_weight, float q_eps, Rope q_rope, int k_norm, const float* k_weight, float k_eps, Rope k_rope, u16*
               q_out, Plane keys, Plane values, Exact exact, const float* q_bias, const float* k_bias, const float* v_bias) {
    begin();
    extern __shared__ __align__(16) float shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = H + 2 * K;
    const int place = blockIdx.x * (THREADS / 32) + warp, t = place / all, head = place % all;
    if (t >= T || t >= step->rows) return;
    float* e = shared + warp * HEAD_ROOM(D);
    const bool is_q = head < H, is_k = !is_q && head < H + K;
    const int of = is_q ? head : is_k ? head - H : head - H - K;
    In x = q;
    Rope rope = q_rope;
    if (is_k) x = k, rope = k_rope;
    if (!is_q && !is_k) x = v, rope.pairs = 0;
    head_into(e, x, t, of, D, is_q ? q_norm : is_k && k_norm, is_q ? q_weight : k_weight,
              is_q ? q_eps : k_eps, rope, is_q ? q_bias : is_k ? k_bias : v_bias);
    const Run& run = run_at(step, t);
    const int place_in_cache = place_of(keys, run.past + t - run.first);
    Plane plane = values;
    if (is_k) plane = keys;
#ifdef WIDTH
    u8* row = is_q ? (u8*)(q_out + ((s64)t * H + of) * WIDTH) : row_at(plane, run.slot, of, place_in_cache, plane.row);
#if EXACT
    const int exact_place = place_of(exact.keys, run.past + t - run.first);
    u8* exact_row = is_q   ? (u8*)(exact.q + ((s64)t * H + of) * WIDTH)
                    : is_k ? row_at(exact.keys, run.slot, of, exact_place, 2 * WIDTH)
                           : row_at(exact.values, run.slot, of, exact_place, 2 * WIDTH);
    u8* query_row = kept_query(exact, run.slot, t, exact_place, is_q, is_k, of, H, K, 2 * WIDTH);
    const s64 at = statistics_of(exact, t, run.slot) + (is_q ? of / (H / K) : of) * WIDTH;
    float part = 0.0f;
#endif
#pragma unroll
    for (int chunk = 0; chunk < (WIDTH + 127) / 128; chunk++) {
        const int d = chunk * 128 + lane * 4;
        const float4 four = d < WIDTH ? *(const float4*)(e + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if EXACT
        part += store_both<WIDTH>(exact, at, is_q, is_k, row, exact_row, query_row, chunk, lane, four);
#else
        store_row<WIDTH>(is_q, is_k, row, chunk, lane, four);
#endif
    }
#if EXACT
    part = warp_sum(part);
    if (is_q && lane == 0) exact.shift[t * H + of] = part;
#endif
#else
    u16* to = is_q ? q_out + ((s64)t * H + of) * wide : (u16*)row_at(plane, run.slot, of, place_in_cache, 2 * wide);
#pragma unroll 1
    for (int i = lane; i < wide; i += 32) to[i] = i < D ? to_half(e[i]) : 0;
#endif
}
