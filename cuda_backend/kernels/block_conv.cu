// block_conv: causal convolution of the rows of a draft's block; each row has taps of its own
// Meaning   common/reference.py NumpyOps.block_conv       Launcher  cuda_backend/rows.py
// In        x (T, C) and row_taps (T, n * G) float32, also as partial sums; base [n][C] float32. For row t and channel c, which is in
//           group c / (C / G), tap i is row_taps[t][i * G + group] + base[i][c]; it multiplies x[t - i][c]
// Out       out [T][C] float32: the sum of n products; rows before the first are zero
// Work      grid (C / 256, T), a thread per channel and row
// Numbers   float32; terms are added in order from the row itself back to its earliest predecessor
// Bound     launches: 2 n reads per output, from the cache
// Tried     nothing on record

extern "C" __global__ void __launch_bounds__(THREADS, 1)
block_conv(In x, In row_taps, const float* base, int C, int n, int G, float* out) {
    begin();
    const int c = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y;
    if (c >= C) return;
    const int group = c / (C / G);
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < n && i <= t; i++) {
        const float *taps = row_of(row_taps, t) + i * G + group, *values = row_of(x, t - i) + c;
        float tap = base[(s64)i * C + c], value = 0.0f;
#pragma unroll 1
        for (int s = 0; s < row_taps.partials; s++) tap += taps[s * row_taps.partial_stride];
#pragma unroll 1
        for (int s = 0; s < x.partials; s++) value += values[s * x.partial_stride];
        sum += tap * value;
    }
    out[(s64)t * C + c] = sum;
}
