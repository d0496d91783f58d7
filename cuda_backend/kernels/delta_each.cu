// delta_each: the delta rule for one row of each of many sequences, with NORM followed by the gated norm
// Meaning   common/ops.py delta_mixer                     Launcher  cuda_backend/recurrent.py
// In        queries, keys, values, gates: as prepare.cu writes them; z (T, Hv, DV); the state as delta.cu
// Out       NORM: (T, Hv * 128) in the forms of store.cuh; else out.dense [T][Hv][DV] before the norm
// Build     DK and GROUPED as delta.cu; NORM: with the gated norm, DV = 128; the names of store.cuh
// Work      a CTA per value head and sequence: eight warps compute 64 columns at a time, eight per warp as in delta.cu. The
//           committed path is applied first; the result does not overwrite the old matrix. The next columns are read while the sums
//           of the current ones are added
// Numbers   bitwise identical to delta.cu: the same operations in the same order
// Bound     bytes of the matrices, read and written once; a CTA waits for little besides its matrix, because prepare.cu has convolved
//           its row
// Tried     ms of a step of 16 and of 64 sequences, variant against 6.86 and 17.78 (Qwen3.6-27B, one H200); more in
//           docs/experiments/recurrent.md.
//           two CTAs per multiprocessor -> 6.95 and 17.98
//           gates of the norm by a ninth warp -> 6.90 and 17.87 with two CTAs; three spill: 7.26 and 19.03

#define COLUMNS 64  // columns that eight warps compute at a time
#if __CUDA_ARCH__ >= 1000
#define CTAS (DK <= 128 ? 2 : 1)  // three would spill registers
#else
#define CTAS (DK <= 128 ? 3 : 1)
#endif

extern "C" __global__ void __launch_bounds__(256, CTAS)
delta_each(const StepState* step, int Hk, int Hv, int DV, float* matrix, s64 flip, const float* row_k, float* row_change,
           const float* row_factor, const float* queries, const float* keys, const float* values, const float* gates, In z,
           const float* norm, float eps, Out out) {
    release_next();
    const int h = blockIdx.x, hk = key_head(h, Hk, Hv), number = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (number >= step->runs) return;
    const Run run = step->run[number];
    const int row = run.first;

#if NORM
    __align__(16) __shared__ float outs[128];
#endif
    // a lane's four columns of the first 64, and the one whose sums it gets
    const int part = lane % 16, local = warp * 8 + lane / 16 * 4, store = step->path_store;
    const s64 old = (s64)store * MAX_DECODE_ROWS;
    float* const changes = row_change + ((s64)((1 - store) * MAX_DECODE_ROWS + row) * Hv + h) * DV;
    float* const from = matrix + run.from * flip + (s64)h * DV * DK;
    float* const to = matrix + (run.from ^ 1) * flip + (s64)h * DV * DK;
    float4 s[4][NJ], key[NJ];
    const auto read_columns = [&](int column) {
        read_matrix(s, from + (s64)min(column, DV - 1) * DK, part, max(min(4, DV - column), 1));
    };
    read_columns(local);
    depend();
    read_fours(key, keys + ((s64)number * Hk + hk) * DK, part);
    const float2 gate = *(const float2*)(gates + ((s64)number * Hv + h) * 2);
#pragma unroll 1
    for (int first = 0; first < DV; first += COLUMNS) {
        const int column = first + local, own = column + part % 4;
        const float value = values[((s64)number * Hv + h) * DV + min(own, DV - 1)];
#pragma unroll 1
        for (int i = 0; i < run.path_length; i++) {
            const s64 r = old + step->path[run.path + i];
            float4 k[NJ];
            float change[4];
            read_fours(k, row_k + (r * Hk + hk) * DK, part);
#pragma unroll
            for (int c = 0; c < 4; c++) change[c] = row_change[(r * Hv + h) * DV + min(column + c, DV - 1)];
            const float factor = row_factor[r * Hv + h];
#pragma unroll
            for (int c = 0; c < 4; c++) fade(s[c], factor), add(s[c], k, change[c]);
        }
        write_matrix(s, to + (s64)min(column, DV - 1) * DK, part, min(4, DV - column));
        float4 query[NJ];  // read again, to save registers
        read_fours(query, queries + ((s64)number * Hk + hk) * DK, part);
        const float both = sum_of_sixteen(part_of_dot(key, query));
        float with_key[4], with_query[4];
#pragma unroll
        for (int c = 0; c < 4; c++) with_key[c] = part_of_dot(s[c], key), with_query[c] = part_of_dot(s[c], query);
        if (first + COLUMNS < DV) read_columns(column + COLUMNS);
        const float change = gate.y * (value - gate.x * sum_of_sixteen(with_key, part));
        const float result = __fmaf_rn(both, change, gate.x * sum_of_sixteen(with_query, part));
        if (own >= DV) continue;
        if (part < 4) changes[own] = change;
#if NORM
        if (part / 4 == 1) outs[own] = result;
#else
        if (part / 4 == 1) out.dense[((s64)row * Hv + h) * DV + own] = result;
#endif
    }
#if NORM
    if (warp) {
        __syncthreads();
        return;
    }
    float4 g = sum_of_partials(head_of(z, row, h, 128) + lane * 4, z);
    const float4 w = *(const float4*)(norm + lane * 4);
    g = make_float4(w.x * silu(g.x), w.y * silu(g.y), w.z * silu(g.z), w.w * silu(g.w));
    __syncthreads();
    const float4 o = *(const float4*)(outs + lane * 4);
    const float scale = norm_factor(warp_sum(o.x * o.x + o.y * o.y + (o.z * o.z + o.w * o.w)), 128, eps);
    float4 e = make_float4(o.x * scale * g.x, o.y * scale * g.y, o.z * scale * g.z, o.w * scale * g.w);
#pragma unroll 1
    for (int k = h * 128; k < (h ? h * 128 + 1 : out.groups * 32); k = max(k + 128, Hv * 128)) {
        store_four(out, row, k + lane * 4, e);
        e = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // columns that pad a row to a whole unit
    }
#endif
}
