// convolve: convolves one row of a head of q, k or v, for prepare.cu and for delta.cu's step of one row
//
// Build     as prepare.cu
// Work      all loads of a lane are unconditional, from a dummy address if the value is not needed, because the compiler serializes
//           conditional loads

#ifndef PARTIALS
#define PARTIALS 1
#define A_PARTIALS 1
#define B_PARTIALS 1
#endif
#define PIECE 128                         // columns of v per warp
#define FOURS ((DK + 127) / 128)          // fours of channels per lane, 128 apart
#define BEFORE (TAPS > 1 ? TAPS - 1 : 0)  // preceding rows that a row's convolution reads

// Inputs of a convolution, and the rows and tails that a step stores.
struct Conv {
    const float* taps;
    float* tail;
    s64 flip;
    float* rows;
    int C;
};

// The channels of a head.
struct Head {
    const float* p;   // of row 0 of the input
    int first, wide;  // of the convolution's; how many there are
    int width;        // padded with zeros up to here
    float norm;       // 0, or the factor of a row normalized to length 1
};

__device__ __forceinline__ float plus(float a, float b) { return a + b; }

// Adds the next N partial sums at p[0], p[1], ..., in order, with all reads in flight.
template <int N, int R, class V>
__device__ __forceinline__ void add_some(V (&sum)[R], const float* (&p)[R], s64 stride) {
    V e[N + 1][R];
#pragma unroll
    for (int s = 0; s < N; s++)
#pragma unroll
        for (int j = 0; j < R; j++, p[j - 1] += stride) e[s][j] = *(const V*)p[j];
#pragma unroll
    for (int s = 0; s < N; s++)
#pragma unroll
        for (int j = 0; j < R; j++) sum[j] = plus(sum[j], e[s][j]);
}

// Adds all N partial sums, with M reads in flight.
template <int N, int M, int R, class V>
__device__ __forceinline__ void add_all(V (&sum)[R], const float* (&p)[R], s64 stride) {
#pragma unroll 1
    for (int s = M; s <= N; s += M) add_some<M>(sum, p, stride);
    add_some<N % M>(sum, p, stride);
}

// Convolves row rows[0] of a run with the rows before it, rows[1] and on, newest first (-1: the newest committed row). If `norm` is not
// 0, divides the result by its length and multiplies it by `norm`. Writes it to `to`, and to its row of `keep` if that is not null.
// ours: whether this warp writes the step's state of these channels; first: whether it also writes the tails.
__device__ __forceinline__ void convolve(const In& in, const Head& head, const Conv& conv, const StepState* step, const Run& run,
                                         const int (&rows)[BEFORE + 1], bool ours, bool first, float* to, float* keep, int stride) {
    const int lane = threadIdx.x % 32, store = step->path_store;
    const bool kept = TAPS && !run.kind && ours;
    float y[FOURS][4], squares = 0.0f;
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        const bool real = f * 128 + lane * 4 < head.wide;
        const int at = min(f * 128 + lane * 4, head.wide - 4), channel = head.first + at;
        float4 x[BEFORE + 1], sum[BEFORE + 1] = {};
        const float* p[BEFORE + 1];
        float tap[4 * TAPS + 1];
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            const float4 e = *(const float4*)(conv.taps + channel * TAPS + 4 * j);
            tap[4 * j] = e.x, tap[4 * j + 1] = e.y, tap[4 * j + 2] = e.z, tap[4 * j + 3] = e.w;
        }
#pragma unroll
        for (int j = 1; j <= BEFORE; j++) {
            if (rows[j] >= 0) continue;
            const int of_path = run.path_length + rows[j];  // committed: no kernel of the step writes it
            x[j] = *(const float4*)(channel
                + (of_path >= 0 ? conv.rows + ((s64)store * MAX_DECODE_ROWS + step->path[run.path + of_path]) * conv.C
                                : conv.tail + run.from * conv.flip + (s64)(BEFORE + of_path) * conv.C));
            if (first && kept && real) *(float4*)(conv.tail + run.to * conv.flip + (s64)(BEFORE - j) * conv.C + channel) = x[j];
        }
#pragma unroll
        for (int j = 0; j <= BEFORE; j++) p[j] = head.p + (run.first + max(rows[j], 0)) * in.row + at;
        depend();
        add_all<PARTIALS, FOURS == 1 ? 5 : 2>(sum, p, in.partial_stride);
#pragma unroll
        for (int j = 0; j <= BEFORE; j++)
            if (j == 0 || rows[j] >= 0) x[j] = sum[j];
        if (kept && real) *(float4*)(conv.rows + ((s64)(1 - store) * MAX_DECODE_ROWS + run.first + rows[0]) * conv.C + channel) = x[0];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[f][i] = (&x[0].x)[i];
            if (TAPS) {
                y[f][i] *= tap[i * TAPS + BEFORE];
#pragma unroll
                for (int j = 1; j <= BEFORE; j++) y[f][i] = __fmaf_rn(tap[i * TAPS + BEFORE - j], (&x[j].x)[i], y[f][i]);
                y[f][i] = silu(y[f][i]);
            }
            if (!real) y[f][i] = 0.0f;
            squares = __fmaf_rn(y[f][i], y[f][i], squares);
        }
    }
    const float scale = head.norm != 0.0f ? rsqrtf(warp_sum(squares) + 1e-6f) * head.norm : 1.0f;
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        const int i = f * 128 + lane * 4;
        if (i >= head.width) continue;
        const float4 e = make_float4(y[f][0] * scale, y[f][1] * scale, y[f][2] * scale, y[f][3] * scale);
        *(float4*)(to + i) = e;
        if (keep) *(float4*)(keep + (s64)(run.first + rows[0]) * stride + i) = e;
    }
}

// The factor by which the matrix fades, and the weight of the change.
__device__ __forceinline__ float2 gates_of(const In& a, const In& b, int t, int h, float decay, float dt_bias) {
    const float *of_a[1] = {row_of(a, t) + h}, *of_b[1] = {row_of(b, t) + h};
    float x[1] = {}, y[1] = {};
    add_all<A_PARTIALS, 8>(x, of_a, a.partial_stride), add_all<B_PARTIALS, 8>(y, of_b, b.partial_stride);
    x[0] += dt_bias;
    return make_float2(expf(decay * (x[0] > 20.0f ? x[0] : log1pf(expf(x[0])))), sigmoid(y[0]));
}
