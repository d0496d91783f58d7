// conv: silu of a causal depthwise convolution along each row's ancestors
// Meaning   common/reference.py NumpyOps.short_conv       Launcher  cuda_backend/ops.py
// In        x (T, C), taps [C][n + 1], state: two tails [n][C], `flip` apart, and rows [2][64][C]   Out  out [T][C] float32
// Work      a thread per channel and row. The last committed path is still in the other step's rows: it is read there,
//           and the tail that it leaves is written beside the old one, so that a step can run twice
// Assumes   a step of more than 64 rows is a chain (kind 1)
// Bound     launches: 4 reads per output, from the cache

struct History {
    const float *tail, *rows;
    const StepState* step;
    int n, C;
    __device__ float at(int back, int c) const {  // back 1: the newest committed row
        const int from_path = step->path_length - back;
        return from_path >= 0 ? rows[(s64)step->path[from_path] * C + c]
                              : tail[(s64)(n - (back - step->path_length)) * C + c];
    }
};

extern "C" __global__ void conv(In x, const float* taps, int C, int n, float* tail, s64 flip, float* rows, const StepState* step,
                                float* out) {
    begin();
    const int c = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, current = step->current;
    if (c >= C) return;
    const History past = {tail + current * flip, rows + (s64)current * 64 * C, step, n, C};
    float* next_tail = tail + (1 - current) * flip;
    if (t < step->rows) {
        const float own = load_one(x, row_of(x, t) + c);
        if (!step->kind) rows[((s64)(1 - current) * 64 + t) * C + c] = own;
        float sum = taps[c * (n + 1) + n] * own;
#pragma unroll 3
        for (int j = n - 1, row = t; j >= 0; j--) {
            row = row >= 0 && !step->kind ? step->parents[row] : row - 1;
            sum += taps[c * (n + 1) + j] * (row >= 0 ? load_one(x, row_of(x, row) + c) : past.at(-row, c));
        }
        out[(s64)t * C + c] = silu(sum);
    }
    if (t == 0)
#pragma unroll 1
        for (int j = 0; j < n; j++) {  // oldest first; a step of kind 1 leaves its own last rows
            const int row = step->kind ? step->rows - n + j : j - n;
            next_tail[(s64)j * C + c] = row >= 0 ? load_one(x, row_of(x, row) + c) : past.at(-row, c);
        }
}
