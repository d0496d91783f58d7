// entropy: the best token of each row except `excluded`, and the entropy of its softmax without it
// Meaning   common/sampling.py argmax_entropy               Launcher  mlx_backend/logits.py best_and_entropy
// In        logits [t][n] T; `excluded`, an id. GIVEN: results of an earlier pass for each row, [t][n]: logits, ids, and its
//           totals and offs as sums and moments
// Out       best [t][slices] float, best_ids [t][slices] int; of a slice with the best logit m: totals of e^(x - m),
//           offs of (x - m) e^(x - m). LAST: offs are entropies in nats, and the id is -1 if a logit is NaN
// Build     T float, half or bfloat; GIVEN, LAST 0 or 1
// Work      a SIMD group holds a slice of 512 logits in registers and reduces it; a row of more than one slice
//           needs another pass over the results of its slices
// Assumes   threadgroups are 32 wide; inputs row-contiguous
// Numbers   logits exact, the smaller id of equal logits; H = log S - W / S with S >= 1 and W <= 0: nothing cancels; float sums
//           of 16 per lane, then simd_sum
// Bound     sizeof(T) bytes per logit; per slice 16 exp and 64 operations per lane, 4 reductions (5 shuffles each)
// Tried     nothing yet: not run on a GPU
constant int NONE = 0x7fffffff;

[[kernel]] void entropy() {
    constexpr int N = 16;
    const int lane = thread_index_in_simdgroup, slice = thread_position_in_grid.y, row = thread_position_in_grid.z;
    const int width = logits_shape[1], slices = threads_per_grid.y;
    const size_t start = size_t(row) * width, place = size_t(row) * slices + slice;

    float value[N], sum[N], moment[N];
    float lane_best = -INFINITY;
    int lane_id = NONE;
    for (int i = 0; i < N; i++) {
        const int at = slice * 32 * N + i * 32 + lane;
        const bool inside = at < width;
        value[i] = inside ? float(logits[start + at]) : -INFINITY;
        sum[i] = !inside ? 0.0f : GIVEN ? sums[start + at] : 1.0f;
        moment[i] = inside && GIVEN ? moments[start + at] : 0.0f;
        const int id = !inside ? NONE : GIVEN ? int(ids[start + at]) : at;
        if (!GIVEN && at == excluded[0] && !isnan(value[i])) value[i] = -INFINITY;
        if (value[i] > lane_best || (value[i] == lane_best && id < lane_id)) {
            lane_best = value[i];
            lane_id = id;
        }
    }
    const float top = simd_max(lane_best);
    const int top_id = simd_min(lane_best == top ? lane_id : NONE);

    const float base = isinf(top) ? 0.0f : top;
    float total = 0, off = 0;
    for (int i = 0; i < N; i++) {
        const float d = value[i] - base, e = exp(d);
        total += sum[i] * e;
        off += e > 0.0f ? (moment[i] + d * sum[i]) * e : 0.0f;
    }
    total = simd_sum(total);
    off = simd_sum(off);
    if (lane == 0) {
        best[place] = top;
        best_ids[place] = LAST && isnan(total) ? -1 : top_id;
        totals[place] = total;
        offs[place] = LAST ? log(total) - off / total : off;
    }
}
