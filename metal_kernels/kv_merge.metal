// kv_merge: adds and divides the strips of kv_attention; the sum over rotated values is rotated back once
// Meaning   the division of a softmax; common/hadamard.py unrotate       Launcher  mlx_backend/kv_kernels.py attend
// In        sums [t][heads][strips][DV] float, most and weights [t][heads][strips] float, of kv_attention: first CODED
//           strips of codes, then those of exact rows; before, after [GROUP] float signs; sinks [heads] float
// Out       out [t][heads][DV] T
// Build     T float, half or bfloat; DV a multiple of 32; GROUP values that are rotated together; ROTATED 0 or 1;
//           SINKS: whether sinks, one more score of each head, joins the sum of weights
// Work      one SIMD group per row and head, DV/32 neighbouring values per lane
// Assumes   threadgroups are 32 wide
// Numbers   float, strips in order; a strip of weight 0 changes no bit
// Bound     4 DV bytes per strip
// Tried     nothing yet: not run on a GPU
#include "wht.h"

[[kernel]] void kv_merge() {
    constexpr int R = DV / 32, L = GROUP / R;
    const int lane = thread_index_in_simdgroup, row = thread_position_in_grid.y, strips = most_shape[2];
    const int coded_strips = coded[0];
    const float sink = SINKS ? sinks[row % most_shape[1]] : -INFINITY;
    float top = sink;
    for (int s = 0; s < strips; s++) {
        const float here = most[size_t(row) * strips + s];
        top = here > top || here != here ? here : top;
    }
    float total = SINKS ? exp(sink - top) : 0.0f, sum[R], exact[R];
    for (int i = 0; i < R; i++) sum[i] = exact[i] = 0;
    for (int s = 0; s < strips; s++) {
        const size_t at = size_t(row) * strips + s;
        const float weight = weights[at] == 0 ? 0.0f : exp(most[at] - top);
        total = fma(weights[at], weight, total);
        for (int i = 0; i < R; i++) {
            const float value = weight == 0 ? 0.0f : sums[at * DV + lane * R + i] * weight;
            if (s < coded_strips) {
                sum[i] += value;
            } else {
                exact[i] += value;
            }
        }
    }
    if (ROTATED) {
        const int first = lane * R % GROUP;
        for (int i = 0; i < R; i++) sum[i] = sum[i] * after[first + i];
        wht_stages<R, L>(sum, lane);
        for (int i = 0; i < R; i++) sum[i] = sum[i] * before[first + i] * wht_scale(GROUP);
    }
    for (int i = 0; i < R; i++) out[size_t(row) * DV + lane * R + i] = T((sum[i] + exact[i]) / total);
}
