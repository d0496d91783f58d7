// exchange_norm: the sum of exchange.cu, followed by the addition and norm of light.cu add_scale, in one launch
// Meaning   Ops.all_reduce, add and rms_norm of common/reference.py, the norm without the factor 1 / rms, which the product
//           applies          Launcher  cuda_backend/exchange.py Sum.launch_norm
// In        x [T][K] float32, and y, this rank's part of the sum that is added to x; perhaps partial sums, readable as float4;
//           weight [K]; `peers` and `m`: peers.cuh
// Out       sum [T][K], squares [T][K / 128], and rows for a product in a form of store.cuh. If a part does not arrive: NaN
// Build     RANKS; PARTIALS, OTHERS: partial sums of x and y; the macros of store.cuh
// Work      a lane per four columns
// Assumes   all CTAs of a grid are resident at once
// Numbers   bitwise those of exchange.cu followed by light.cu
// Bound     latency of one store to a peer; saves two launches and a copy of the rows
// Tried     nothing on record; exchange.cu has what was tried of exchanges

extern "C" __global__ void __launch_bounds__(64, RANKS > 2 ? 4 : 10)
exchange_scale(In x, In y, const float* weight, float* sum, float* squares, Out out, Peers peers, Meeting m) {
    release_next();
    const int k = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y, at = min(k, out.K - 4);
    const bool in = k < out.K;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f), one = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    const float4 w = weight ? *(const float4*)(weight + at) : one;
    float4 v = zero, own = zero;
    // the first blocks run it before the wait, to load its code: light.cu add_scale
#pragma unroll 1
    for (int real = t >= 2; real < 2; real++) {
        if (real) {
            depend();
            const u32 number = number_of(m), failed = m.state[1];
            load_sums(v, own, row_of(x, t) + at, x.partial_stride, row_of(y, t) + at, y.partial_stride);
            own = as_sent(own);
            const int i = t * (out.K / 4) + k / 4;
            if (in) send(peers, m, number, i, own);
            float4 part[RANKS];
            if (in && !receive(part, m, number, i, own, failed != 0)) {
                if (!failed) give_up(m, number);
#pragma unroll
                for (int r = 0; r < RANKS; r++) part[r] = missing();
            }
            v = in ? plus(v, sum_of(part)) : zero;
        }
        if (sum && in && real) *(float4*)(sum + (s64)t * out.K + k) = v;
        const float total = warp_sum(v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w));
        if (threadIdx.x % 32 == 0 && in && real) squares[t * (out.K / 128) + k / 128] = total;
        store_four(out, t, k, make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w), real);
    }
}
