// kv_attention: attention of each row of a step over one strip of a cache, whose keys and values are decoded in registers
// Meaning   common/reference.py NumpyOps.attention over a compressed cache    Launcher  mlx_backend/kv_kernels.py attend
// In        q [t][heads][D] float, scaled, and for codes equalised and rotated; bias [t][heads] float, added to the scores;
//           keys, values [kv_heads][room] vectors; positions [t] int, of the step's rows; seen [t][t] uchar: which rows of
//           the step a row attends to; key_table, value_table [16] float; places [8] int: committed tokens; rows of the cache
//           before the step's; early, late: row r holds token r if r < early, else token late + r - early; the numbers of
//           first and of latest tokens that are read exactly
// Out       sums [t][heads][strips][DV] float, of weights times values; most, weights [t][heads][strips] float: the largest
//           score and the sum of weights exp(score - most); -inf and 0 of a strip of which a row sees nothing
// Build     KF, VF formats as in include/kv.h; D, DV heads' sizes, multiples of 32; KG, VG groups; HEADS query heads per KV
//           head; STRIP rows of a strip; PART 0: all rows, 1: the codes of tokens that are not read exactly, 2: the
//           exact copies
// Work      one SIMD group per strip, row of the step and KV head: a vector is decoded once for all HEADS query heads, D/32
//           neighbouring values per lane in registers; rows of the step are apart in the grid
// Assumes   threadgroups are 32 wide; keys and values row-contiguous
// Numbers   float; the scores of a row in the order of the cache, strip by strip from row 0: bitwise identical in
//           steps of one row and of several; kv_merge adds the strips
// Bound     bytes of a vector per HEADS rows; per vector and query head D/32 fma, 5 shuffles and 2 exp per lane
// Tried     nothing yet: not run on a GPU
#include "kv.h"

[[kernel]] void kv_attention() {
    constexpr int R = D / 32, RV = DV / 32;
    const int lane = thread_index_in_simdgroup, strip = thread_position_in_grid.y;
    const int kv_heads = keys_shape[0], room = keys_shape[1], T = positions_shape[0], strips = threads_per_grid.y;
    const int t = thread_position_in_grid.z / kv_heads, kv = thread_position_in_grid.z % kv_heads;
    const int past = places[0], before = places[1], early = places[2], late = places[3], first = places[4];
    const int recent = places[5], own = positions[t], heads = kv_heads * HEADS;

    float query[HEADS][R], sum[HEADS][RV], top[HEADS], total[HEADS];
    for (int h = 0; h < HEADS; h++) {
        for (int i = 0; i < R; i++) query[h][i] = q[(size_t(t) * heads + kv * HEADS + h) * D + lane * R + i];
        for (int i = 0; i < RV; i++) sum[h][i] = 0;
        top[h] = -INFINITY;
        total[h] = 0;
    }
    const int end = min((strip + 1) * STRIP, before + T);
    for (int r = strip * STRIP; r < end; r++) {
        const int token = r < early ? r : late + r - early;
        const bool committed = r < before;
        if (!committed && !seen[t * T + r - before]) continue;
        const int position = committed ? token : positions[r - before];
        if (PART) {
            const bool exact = position < first || position > own - recent;
            if (exact != (PART == 2)) continue;
        }
        const size_t row = size_t(kv) * room + r;
        float key[R], value[RV];
        for (int i = 0; i < R; i++) {
            key[i] = kv_value<KF, KG>(keys + row * keys_shape[2], lane * R + i, key_table);
        }
        for (int i = 0; i < RV; i++) {
            value[i] = kv_value<VF, VG>(values + row * values_shape[2], lane * RV + i, value_table);
        }
        for (int h = 0; h < HEADS; h++) {
            float score = 0;
            for (int i = 0; i < R; i++) score = fma(query[h][i], key[i], score);
            score = simd_sum(score) + bias[t * heads + kv * HEADS + h];
            const float most_now = max(top[h], score);
            const float kept = exp(top[h] - most_now), weight = exp(score - most_now);
            top[h] = score != score ? score : most_now;  // NaN stays
            total[h] = total[h] * kept + weight;
            for (int i = 0; i < RV; i++) sum[h][i] = fma(weight, value[i], sum[h][i] * kept);
        }
    }
    for (int h = 0; h < HEADS; h++) {
        const size_t at = (size_t(t) * heads + kv * HEADS + h) * strips + strip;
        for (int i = 0; i < RV; i++) sums[at * DV + lane * RV + i] = sum[h][i];
        if (lane == 0) {
            most[at] = top[h];
            weights[at] = total[h];
        }
    }
}
