// prepare: computes the inputs of delta.cu: convolved and normalized queries and keys, convolved values, and gates
// Meaning   cuda_backend/kernels/delta.cu                  Launcher  cuda_backend/recurrent.py
// In        as delta.cu, readable as float4
// Out       in the order of rows: queries, keys [T][Hk][DK], values [T][Hv][DV], gates [T][Hv][2]; of the step's rows, where they may be
//           committed: row_k, row_factor, and of the convolution the rows, and the tails after the last path
// Build     DK, DIM, TAPS as delta.cu; PARTIALS: partial sums of q, k and v; A_PARTIALS, B_PARTIALS: of a and of b; EACH: each
//           sequence has one row
// Work      a warp per row and head of q, k or v, in the order of rows: a row reads the rows before it again, which the cache holds
//           for neighbours. The code is short, because loading instructions takes much of the 3 us of the kernel
// Numbers   float32, as delta.cu with ALONE: bitwise identical
// Bound     launches
// Tried     us per layer of the mixer at a tree of 22 rows: variant against 17.9 (Qwen3.6-27B, one H200).
//           CTAs of 16 rows, which read these and their ancestors into shared memory once -> 18.3, a chain of 64 33.7 against 30.6:
//             barriers
//           a warp convolves four rows one after the other -> 23.5: each waits for memory once more
//           ancestors of rows that do not follow the one before read in three more rounds -> 21.1

#ifndef EACH
#define EACH 0
#endif

extern "C" __global__ void __launch_bounds__(128, FOURS == 1 && DK >= 64 && PARTIALS <= 8 ? 4 : 1)
prepare(In q, In k, In v, In a, In b, const float* decay, const float* dt_bias, const StepState* step, int Hk, int Hv, int DV,
        float* row_k, float* row_factor, const float* taps, float* tail, s64 tail_flip, float* raw_rows, float* queries,
        float* keys, float* values, float* gates) {
    release_next();
    const int T = step->rows, other = 1 - step->path_store;
    const int lane = threadIdx.x % 32, pieces = (DV + PIECE - 1) / PIECE, unit = (int)blockIdx.x - 2 * Hk;
    if (unit >= Hv * pieces) {  // a and b of 16 heads
        const int h = (unit - Hv * pieces) * 16 + threadIdx.x % 16;
        if (h >= Hv) return;
        const float d = decay[h], bias = dt_bias[h];
#pragma unroll 1
        for (int i = blockIdx.y * 8 + threadIdx.x / 16; i < T; i += gridDim.y * 8) {
            const Run& run = EACH ? step->run[i] : run_at(step, i);
            const int t = EACH ? run.first : run.branches ? run.first + (step->line[i] & 0xff) : i;
            depend();
            const float2 g = gates_of(a, b, t, h, d, bias);
            *(float2*)(gates + ((s64)i * Hv + h) * 2) = g;
            if (!run.kind) row_factor[(other * MAX_DECODE_ROWS + t) * Hv + h] = g.x;
        }
        return;
    }
    const Conv conv = {taps, tail, tail_flip, raw_rows, 2 * Hk * DIM + Hv * DV};
    const bool is_v = unit >= 0, is_k = !is_v && unit >= -Hk;
    const int h = is_v ? unit / pieces : is_k ? unit + Hk : unit + 2 * Hk, c0 = is_v ? unit % pieces * PIECE : 0;
    const int wide = is_v ? min(PIECE, DV - c0) : DIM, channel = is_v ? 2 * Hk * DIM + h * DV + c0 : (is_k * Hk + h) * DIM;
#if TAPS
    const In& in = q;
    const float* p = q.p + channel;
#else
    const In in = is_v ? v : is_k ? k : q;
    const float* p = head_of(in, 0, h, is_v ? DV : DIM) + c0;
#endif
    const Head head = {p, channel, wide, is_v ? wide : DK, is_v ? 0.0f : is_k ? 1.0f : rsqrtf((float)DIM)};
    float* keep = is_k ? row_k + ((s64)other * MAX_DECODE_ROWS * Hk + h) * DK : 0;
    float* out = is_v ? values + h * DV + c0 : (is_k ? keys : queries) + h * DK;
    const int stride = is_v ? Hv * DV : Hk * DK;
#pragma unroll 1
    for (int i = blockIdx.y * 4 + threadIdx.x / 32; i < T; i += gridDim.y * 4) {
        const Run& run = EACH ? step->run[i] : run_at(step, i);
        const u32 line = !EACH && run.branches ? step->line[i] : 0;
        int rows[BEFORE + 1];
#pragma unroll
        for (int j = 0; j <= BEFORE; j++) rows[j] = EACH ? -j : run.branches ? of_byte(line >> 8 * j) : i - run.first - j;
        convolve(in, head, conv, step, run, rows, true, EACH || i == run.first, out + (s64)i * stride,
                 !run.kind ? keep : 0, Hk * DK);
    }
    const Run& run = step->run[0];
    if (!EACH && TAPS > 1 && run.kind && blockIdx.y + 1 == gridDim.y && threadIdx.x < 32)  // the last rows of a long chain
#pragma unroll 1
        for (int j = 0; j < BEFORE; j++)
#pragma unroll 1
            for (int i = lane; i < wide; i += 32)
                tail[run.to * tail_flip + (s64)j * conv.C + channel + i] = load_one(in, p + (s64)(T - BEFORE + j) * in.row + i);
}
