// moe: which experts a row takes, which rows an expert gets, and the weighted sum of what they return
// Meaning   common/reference.py NumpyOps.route_softmax, route_sigmoid, moe  Launcher  cuda_backend/ops.py
// In        logits (T, E), bias [E] or null for softmax  Out  ids, weights [T][k]: best first, ties to the smaller id
//           ids                                        Out  groups, order: experts.cu
//           y (T * k, C), weights [T][k]               Out  out [T][C] float32
// Work      route: a thread per expert, a CTA per row; of one row it leaves the groups too. combine: a thread per output, experts in the
//           order of ids
// Bound     launches

extern "C" __global__ void __launch_bounds__(1024)
route(In logits, int T, int E, int k, const float* bias, float scale, int* ids, float* weights, int4* groups, int* pairs) {
    begin();
    extern __shared__ float shared[];
    // of the experts, and what the best ones weigh: apart by whole vectors, as the compiler reads four at once
    float *chosen_by = shared, *chosen = shared + (E + 3) / 4 * 4;
    __shared__ float tops[32];
    const int t = blockIdx.x, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const float *row = row_of(logits, t), lowest = -__int_as_float(0x7f800000);
    float top = lowest;
    for (int e = threadIdx.x; e < E && !bias; e += blockDim.x) top = fmaxf(top, load_one(logits, row + e));
    top = warp_max(top);
    if (lane == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    top = warp_max(lane < warps ? tops[lane] : lowest);
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        const float x = load_one(logits, row + e), p = bias ? 1.0f / (1.0f + expf(-x)) : expf(x - top);
        const float by = p + (bias ? bias[e] : 0.0f);
        chosen_by[e] = by == by ? by : lowest;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += blockDim.x) {  // its place is the number of experts before it
        const float mine = chosen_by[e];
        int place = 0;
#pragma unroll 8
        for (int i = 0; i < E; i++) place += chosen_by[i] > mine || (chosen_by[i] == mine && i < e);
        if (place >= k) continue;
        const float x = load_one(logits, row + e), p = bias ? 1.0f / (1.0f + expf(-x)) : expf(x - top);
        ids[t * k + place] = e, chosen[place] = p;
        if (groups) groups[1 + place] = make_int4(e, place, 1, 0), pairs[place] = place;
    }
    __syncthreads();
    if (groups && threadIdx.x == 0) groups[0] = make_int4(k, 0, 0, 0);
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        float total = 0.0f;
        for (int i = 0; i < k; i++) total += chosen[i];
        weights[t * k + j] = chosen[j] * scale / total;
    }
}

// The list that experts.cu works through: pairs by expert, in groups of at most `cols`. One CTA.
extern "C" __global__ void __launch_bounds__(1024)
group(const int* ids, const StepState* step, int T, int k, int E, int cols, int4* groups, int* order) {
    begin();
    extern __shared__ int counts[];
    int *first = counts + E, *tile = first + E;  // of each expert: its place in `order`, its first group
    const int pairs = (step ? min(T, step->rows) : T) * k, lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < E; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) atomicAdd(counts + ids[p], 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        const int per = (E + 31) / 32, begin = min(lane * per, E), end = min(begin + per, E);
        int rows = 0, tiles = 0, rows_before = 0, tiles_before = 0, all = 0;
        for (int e = begin; e < end; e++) rows += counts[e], tiles += (counts[e] + cols - 1) / cols;
        for (int i = 0; i < 32; i++) {
            const int r = __shfl_sync(FULL, rows, i), t = __shfl_sync(FULL, tiles, i);
            if (i < lane) rows_before += r, tiles_before += t;
            all += t;
        }
        for (int e = begin; e < end; e++) {
            first[e] = rows_before, tile[e] = tiles_before;
            rows_before += counts[e], tiles_before += (counts[e] + cols - 1) / cols;
        }
        if (lane == 0) groups[0] = make_int4(all, 0, 0, 0);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += blockDim.x)
        for (int c = 0; c * cols < counts[e]; c++)
            groups[1 + tile[e] + c] = make_int4(e, first[e] + c * cols, min(cols, counts[e] - c * cols), 0);
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) order[atomicAdd(first + ids[p], 1)] = p;
}

// y (pairs, C), perhaps partial sums; `other` is added where there is one.
extern "C" __global__ void combine(In y, const float* weights, int k, int C, In other, int has_other, float* out) {
    begin();
    const int c = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (c >= C) return;
    const float more = has_other ? load_one(other, row_of(other, t) + c) : 0.0f;
    float sum = 0.0f;
    for (int first = 0; first < k; first += 8) {  // the reads of eight experts are in flight together
        float e[8] = {};
        for (int slot = 0; slot < y.slots; slot++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (first + j < k) e[j] += row_of(y, t * k + first + j)[slot * y.slot + c];
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (first + j < k) sum += weights[t * k + first + j] * e[j];
    }
    out[(s64)t * C + c] = sum + more;
}
