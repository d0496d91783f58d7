// calibrate: mean and scale of each channel over the first keys and queries of a sequence
// Meaning   common/reference_packed.py Calibration       Launcher  cuda_backend/caches/packed.py
// In        keys [layer][2 K][place][D] float16 of each slot: per layer K heads of keys, then their queries. Committed positions
//           are in order; the step's rows lie at past + row
//           committed  statistics float32 [slot][2][heads of all layers][D], means before scales, `slot_stride` elements per slot,
//           of slots that have committed n keys; it points at the layer's means in slot 0
// Out       mean and scale [row][head][D] float32
// Assumes   without a step the cache has one sequence
// Work      a CTA per head and row, a thread per channel. Without a step, the first n positions give the statistics of one row.
//           With a step, row t uses the committed positions and then the rows that it sees: fewer than n give mean 0 and
//           scale 1; if n are committed, row t takes its slot's statistics from `committed`. The scale is sqrt(deviation of
//           keys / root mean square of queries), whose divisor is at least `least` times the largest one; without queries the
//           scale is the deviation
// Numbers   sums in float64, in the order of the keys: a row's statistics are bitwise identical to those of its path alone
// Bound     latency; it runs once in a sequence
// Tried     the deviation of keys alone -> lm4 costs SmolLM2 1.04 % of perplexity on WikiText-2 against 0.10 %

extern "C" __global__ void calibrate(Plane keys, int D, int K, int n, const StepState* step, const float* committed, int slot_stride,
                                     float least, float* mean, float* scale) {
    begin();
    __shared__ int listed[MAX_DECODE_ROWS];  // rows of the step that this row sees
    const int head = blockIdx.x, t = blockIdx.y, d = threadIdx.x, heads = gridDim.x;
    const int past = step ? run_at(step, t).past : n, slot = step ? run_at(step, t).slot : 0;
    const s64 out = (s64)(t * heads + head) * D + d;
    int count = past;
    if (step && past < n)
        for (int j = 0; j < min(step->rows, MAX_DECODE_ROWS); j++)
            if (step->seen[t][j / 32] >> j % 32 & 1) {
                if (d == 0) listed[count - past] = j;
                count++;
            }
    __syncthreads();
    if (step && t >= step->rows) return;
    if (step && past >= n) {
        if (d >= D) return;
        const float* stats = committed + (s64)slot * slot_stride + head * D + d;
        mean[out] = stats[0], scale[out] = stats[slot_stride / 2];
        return;
    }
    double sum = 0.0, squares = 0.0, query_squares = 0.0, largest_use = 0.0;
    const int key_head = head / K * 2 * K + head % K, items = d < D && count >= n ? n : 0;
    const u16* rows = (const u16*)row_at(keys, slot, key_head, 0, 2 * D) + d;
    const u16* queries = (const u16*)row_at(keys, slot, key_head + K, 0, 2 * D) + d;
    auto from = [&](const u16* head_rows, int i) {
        return (double)from_half(head_rows[(s64)place_of(keys, i < past ? i : past + listed[i - past]) * D]);
    };
#pragma unroll 1
    for (int i = 0; i < items; i++) sum += from(rows, i), query_squares += from(queries, i) * from(queries, i);
    const double middle = sum / n, use = sqrt(query_squares / n);
#pragma unroll 1
    for (int i = 0; i < items; i++) squares += (from(rows, i) - middle) * (from(rows, i) - middle);
    __shared__ double uses[256];
    if (d < D) uses[d] = use;
    __syncthreads();
    if (d >= D) return;
#pragma unroll 1
    for (int i = 0; i < D; i++) largest_use = fmax(largest_use, uses[i]);
    const double deviation = sqrt(squares / n);
    const float width = (float)(largest_use > 0.0 ? sqrt(deviation / fmax(use, largest_use * least)) : deviation);
    mean[out] = (float)middle, scale[out] = width > 0.0f ? width : 1.0f;
}
