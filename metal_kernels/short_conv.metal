// short_conv: silu of a causal depthwise convolution along each row's ancestors
// Meaning   common/reference.py NumpyOps.short_conv         Launcher  mlx_backend/recurrent.py short_conv
// In        stream [TAPS - 1 + t][C] T, the committed rows first, taps [C][TAPS] float,
//           parents [t] int, -1 for the committed past (TREE)      Out       out [t][C] T
// Build     T float, half or bfloat; TAPS 2 or more; TREE 0 or 1
// Work      a thread computes one channel of one row
// Assumes   inputs row-contiguous
// Numbers   float, from the row itself back through its ancestors, rounded once to T
// Bound     2 sizeof(T) bytes per output, since caches serve TAPS - 1 of its reads; no SIMD-group operation
// Tried     nothing yet: not run on a GPU
[[kernel]] void short_conv() {
    const int c = thread_position_in_grid.x, t = thread_position_in_grid.y, channels = stream_shape[1];
    float sum = 0;
    int at = TAPS - 1 + t;  // in the stream
    for (int j = TAPS - 1; j >= 0; j--) {
        sum = fma(taps[c * TAPS + j], float(stream[size_t(at) * channels + c]), sum);
        at = TREE && at >= TAPS - 1 ? TAPS - 1 + int(parents[at - TAPS + 1]) : at - 1;
    }
    out[size_t(t) * channels + c] = T(sum / (1.0f + exp(-sum)));
}
