// gated_delta: the gated delta rule along the paths of a chain or a tree
// Meaning   common/reference.py delta_rule and NumpyOps.gated_delta    Launcher  mlx_backend/recurrent.py
// In        q, k [t][Hk][DK] T, v [t][Hv][Dv] T by its strides, g (log decay) and beta [t][Hv] float,
//           matrix [Hv][Dv][DK] float, walk [n] int: the rows in the order of computation; ~row starts from `matrix` again
// Out       out [n][Hv][Dv] T of every row in this order, after [Hv][Dv][DK] float, the matrix after the last row
// Build     T float, half or bfloat; DK, of which a multiple of 32 leaves no lane idle
// Work      a SIMD group owns one row of the matrix, N neighbouring numbers per lane in registers. It computes the path from
//           the root to each leaf, one leaf after the other; rows that paths share are computed again
// Assumes   threadgroups are 32 wide; all but v row-contiguous; value head h uses key head h % Hk
// Numbers   float; per lane fma in the order of the columns, then simd_sum: a row has the same bits in a tree, in a
//           chain of any length and in a replay
// Bound     8 DK bytes per matrix row and launch; per row 3 N fma and N products, 2 simd_sum (10 shuffles)
// Tried     nothing yet: not run on a GPU
[[kernel]] void gated_delta() {
    constexpr int N = (DK + 31) / 32;
    const int lane = thread_index_in_simdgroup, column = thread_position_in_grid.y, head = thread_position_in_grid.z;
    const int width = DK % 32 == 0 ? N : clamp(DK - lane * N, 0, N);  // of the lane's part of the row
    const int Hk = k_shape[1], Hv = v_shape[1], Dv = v_shape[2];
    const size_t row = (size_t(head) * Dv + column) * DK + lane * N;

    float state[N];
    for (int n = 0; n < width; n++) state[n] = matrix[row + n];
    for (int i = 0; i < walk_shape[0]; i++) {
        int t = walk[i];
        if (t < 0) {
            t = ~t;
            for (int n = 0; n < width; n++) state[n] = matrix[row + n];
        }
        const size_t at = (size_t(t) * Hk + head % Hk) * DK + lane * N;
        const float decay = exp(g[t * Hv + head]);
        float held = 0;
        for (int n = 0; n < width; n++) {
            state[n] *= decay;
            held = fma(state[n], float(k[at + n]), held);
        }
        held = simd_sum(held);
        const float value = float(v[t * v_strides[0] + head * v_strides[1] + column * v_strides[2]]);
        const float correction = beta[t * Hv + head] * (value - held);
        float read = 0;
        for (int n = 0; n < width; n++) {
            state[n] = fma(float(k[at + n]), correction, state[n]);
            read = fma(state[n], float(q[at + n]), read);
        }
        read = simd_sum(read);
        if (lane == 0) out[(size_t(i) * Hv + head) * Dv + column] = T(read);
    }
    for (int n = 0; n < width; n++) after[row + n] = state[n];
}
