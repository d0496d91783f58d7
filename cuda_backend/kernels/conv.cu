// conv: silu of a causal depthwise convolution over each row's ancestors; with PARENTS, copies the parent of each row
// Meaning   common/reference.py NumpyOps.short_conv, .parent_rows       Launcher  cuda_backend/recurrent.py
// In        x (T, C) float32, perhaps partial sums; taps [C][n + 1] float32, the newest row's last; n rows before a row are read
//           state, float32: two tails [n][C], `flip` elements apart, the last n committed rows, oldest first; and
//           rows [2][MAX_DECODE_ROWS][C]: those of the step before, of which the committed path is read, and of this step
// Out       out [T][C] float32; with PARENTS the row of x before each row, without taps and silu
// Build     PARENTS 0 or 1, with n = 1
// Work      grid (C / THREADS, T), a thread per channel and row, in the order of rows. Rows of the latest commit are read from the
//           buffer of the step that computed them; the new tail does not overwrite the old one, so that a step can run twice
// Assumes   a step of more than MAX_DECODE_ROWS rows is a chain (kind 1)
// Numbers   float32; taps are added from the row itself back to its earliest ancestor: a row has the same bits in any step
// Bound     launches: n + 1 reads per output, from the cache
// Tried     nothing on record

#ifndef PARENTS
#define PARENTS 0
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv(In x, const float* taps, int C, int n, float* tail, s64 flip, float* rows, const StepState* step, float* out) {
    release_next();
    const Run& run = run_at(step, blockIdx.y);
    const int c = blockIdx.x * THREADS + threadIdx.x, first = run.first, t = blockIdx.y - first, path = run.path_length;
    if (c >= C) return;
    const float *old_tail = tail + run.from * flip + c, *old_rows = rows + (s64)step->path_store * MAX_DECODE_ROWS * C + c;
    const bool branches = run.branches;
    auto row_at = [&](int i) { return first + (branches ? step->line[first + i] & 0xff : i); };
    auto place_of = [&](int row) {  // a row of the run, in the order of rows; negative: counted back from the newest committed row, -1
        if (row >= 0) return row_of(x, row_at(row)) + c;
        const int from_path = path + row;
        return from_path >= 0 ? old_rows + (s64)step->path[run.path + from_path] * C : old_tail + (s64)(n + from_path) * C;
    };
    const bool real = t < run.rows;
    float sum = 0.0f;
    if (!real) depend();
#pragma unroll 1
    for (int j = real ? n : -1, row = t; j >= 0;) {  // four taps at a time, newest first; their four reads are in flight together
        const float* p[4];
        float v[4], tap[4];
        bool inside[4];
#pragma unroll
        for (int i = 0; i < 4; i++, j--) {
            inside[i] = j >= 0 && row >= 0, p[i] = place_of(row), tap[i] = v[i] = 0.0f;
            if (j < 0) continue;
            if (!PARENTS) tap[i] = taps[c * (n + 1) + j];
            if (!inside[i]) v[i] = *p[i];  // committed: no kernel of the step writes it
            row = row >= 0 && branches ? of_byte(step->parents[first + row]) : row - 1;
        }
        if (j == n - 4) depend();
#pragma unroll 1
        for (int s = 0; s < x.partials; s++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (inside[i]) v[i] += p[i][s * x.partial_stride];
        if (!run.kind && j == n - 4) rows[((s64)(1 - step->path_store) * MAX_DECODE_ROWS + row_at(t)) * C + c] = v[0];
#pragma unroll
        for (int i = 0; i < 4; i++) sum += tap[i] * v[i];
        if (PARENTS) sum = v[1];  // n is 1
    }
    if (real) out[(s64)row_at(t) * C + c] = PARENTS ? sum : silu(sum);
    if (t == 0)
#pragma unroll 1
        for (int j = 0; j < n; j++) {  // oldest first; a step of kind 1 writes its own last rows
            const int row = run.kind ? run.rows - n + j : j - n;
            const float* p = place_of(row);
            float v = 0.0f;
#pragma unroll 1
            for (int s = 0; s < (row >= 0 ? x.partials : 1); s++) v += p[s * x.partial_stride];
            tail[run.to * flip + (s64)j * C + c] = v;
        }
}
