// top_k: the k best of each slice of a row, and the slice's log-sum-exp
// Meaning   common/sampling.py top_k                        Launcher  mlx_backend/logits.py best_of_rows
// In        logits [t][n] T, ids [t][n] int (GIVEN; without, a logit's id is its place)
// Out       best [t][slices][K] float, best_ids [t][slices][K] int, best first, -inf and NONE if a slice has fewer;
//           log_sums [t][slices] float, NaN if a logit is NaN
// Build     T float, half or bfloat; K up to 128; GIVEN 0 or 1
// Work      a SIMD group holds a slice of 512 logits in registers and takes its best K times; a row of more than one slice
//           needs a second pass, over the best of its slices
// Assumes   threadgroups are 32 wide; inputs row-contiguous
// Numbers   logits exact, of equal ones the smaller id first; float sums of 16 per lane, then simd_sum
// Bound     sizeof(T) bytes per logit; per slice 80 K operations per lane, 2 K + 2 reductions (5 shuffles each)
// Tried     nothing yet: not run on a GPU
constant int NONE = 0x7fffffff;

[[kernel]] void top_k() {
    constexpr int N = 16;
    const int lane = thread_index_in_simdgroup, slice = thread_position_in_grid.y, row = thread_position_in_grid.z;
    const int width = logits_shape[1], slices = threads_per_grid.y;
    const size_t place = size_t(row) * slices + slice;

    float value[N];
    int id[N];
    for (int i = 0; i < N; i++) {
        const int at = slice * 32 * N + i * 32 + lane;
        const bool there = at < width;
        value[i] = there ? float(logits[size_t(row) * width + at]) : -INFINITY;
        id[i] = !there ? NONE : GIVEN ? int(ids[size_t(row) * width + at]) : at;
    }

    float most = value[0], sum = 0;
    for (int i = 1; i < N; i++) most = max(most, value[i]);
    most = simd_max(most);
    const float base = isinf(most) ? 0.0f : most;
    for (int i = 0; i < N; i++) sum += exp(value[i] - base);
    sum = simd_sum(sum);
    if (lane == 0) log_sums[place] = base + log(sum);

    for (int k = 0; k < K; k++) {
        float lane_best = -INFINITY;
        int lane_id = NONE;
        for (int i = 0; i < N; i++) {
            if (value[i] > lane_best || (value[i] == lane_best && id[i] < lane_id)) {
                lane_best = value[i];
                lane_id = id[i];
            }
        }
        const float chosen = simd_max(lane_best);
        const int chosen_id = simd_min(lane_best == chosen ? lane_id : NONE);
        for (int i = 0; i < N; i++) {
            if (id[i] != chosen_id) continue;
            value[i] = -INFINITY;
            id[i] = NONE;
        }
        if (lane == 0) {
            best[place * K + k] = chosen;
            best_ids[place * K + k] = chosen_id;
        }
    }
}
