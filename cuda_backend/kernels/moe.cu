// moe: the experts of each row, the rows of each expert, and the weighted sum of the experts' outputs
// Meaning   common/reference.py NumpyOps.route_softmax, route_sigmoid, moe  Launcher  cuda_backend/mixture.py
// In        choice (choose.cuh)                        Out  ids [T][k] and its weights: best first, ties to the smaller id
//           ids                                        Out  groups, order: experts.cu
//           y (T * k, C), weights [T][k]               Out  out [T][C] float32
//           changes (address of an entry of a table, its value), n pairs     Out  the entries: addresses of experts
//           down [E][C], ids, weights [T][k]           Out  out [T][C] float32: the weighted biases of a row's experts
// Build     PER of choose.cuh; CHOSEN matrices of a row and PARTIALS, the partial sums of each, for combine_scale
// Work      route: a warp per row. combine: a thread per output, combine_scale per four, experts in the order of ids
// Bound     launches
// Tried     route and group in one launch, a warp per row -> Laguna's step of 16 rows 2.396 ms against 2.323: one CTA reads its code and
//             chooses for all rows after the router's product, where CTAs of route were ready
//           the sum of experts overlaps both previous kernels -> GLM 306 tok/s against 314, Laguna 446 against 441: it occupies an SM

#ifndef CHOSEN
#define CHOSEN 1
#define PARTIALS 1
#endif
#define AT_ONCE (20 / PARTIALS > CHOSEN ? CHOSEN : 20 / PARTIALS > 0 ? 20 / PARTIALS : 1)  // of them, in registers

// Chooses experts, a warp per row. A shared expert, number E, comes after a row's best experts.
extern "C" __global__ void __launch_bounds__(32) route(Choice choice, int* ids) {
    release_next();
    const int t = blockIdx.x, lane = threadIdx.x, k = choice.k, all = k + choice.shared_one;
    float added[PER];
    biases(added, choice);
    depend();
    float* weights = choice.weights + t * all;
    ids += t * all;
    const float total = choose(choice, choice.logits + (s64)t * choice.E, k, added, [&](int j, int id, float p) {
        if (lane == 0) ids[j] = id, weights[j] = p;
    });
    if (choice.shared_one && lane == 0) ids[k] = choice.E, weights[k] = shared_weight(choice, t);
    __syncwarp();
#pragma unroll 1
    for (int j = lane; j < k; j += 32) weights[j] = weights[j] * choice.scale / total;
}

extern "C" __global__ void place(const u64* changes, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) *(u64*)changes[2 * i] = changes[2 * i + 1];
}

// Makes the work list of experts.cu: pairs by expert, in groups of at most `cols`. One CTA.
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

extern "C" __global__ void sum_biases(const float* down, const int* ids, const float* weights, int k, int C, float* out) {
    begin();
    const int c = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (c >= C) return;
    float sum = 0.0f;
    for (int j = t * k; j < (t + 1) * k; j++) sum += weights[j] * down[(s64)ids[j] * C + c];
    out[(s64)t * C + c] = sum;
}

// y (pairs, C), perhaps partial sums; `other` is added if there is one.
extern "C" __global__ void combine(In y, const float* weights, int k, int C, In other, int has_other, float* out) {
    begin();
    const int c = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (c >= C) return;
    const float more = has_other ? load_one(other, row_of(other, t) + c) : 0.0f;
    float sum = 0.0f;
    for (int first = 0; first < k; first += 8) {  // the reads of eight experts are in flight together
        float e[8] = {};
        for (int s = 0; s < y.partials; s++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (first + j < k) e[j] += row_of(y, t * k + first + j)[s * y.partial_stride + c];
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (first + j < k) sum += weights[t * k + first + j] * e[j];
    }
    out[(s64)t * C + c] = sum + more;
}

// x plus this sum, and the outputs of light.cu add_scale for it: the same numbers in one launch. All are readable as float4.
extern "C" __global__ void __launch_bounds__(64, 1)
combine_scale(In y, const float* weights, In other, int has_other, In x, const float* norm_weight, float* sum, float* squares,
              Out out) {
    release_next();
    const int c = (blockIdx.x * 64 + threadIdx.x) * 4, t = blockIdx.y;
    const bool in = c < out.K;
    float4 w = make_float4(1.0f, 1.0f, 1.0f, 1.0f), v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (norm_weight && in) w = *(const float4*)(norm_weight + c);
    depend();
    if (in) {
        const float4 before = *(const float4*)(row_of(x, t) + c);
        const float* from = row_of(y, t * CHOSEN) + c;
        float4 more = v;
        if (has_other) more = sum_of_partials(row_of(other, t) + c, other);
#pragma unroll 1
        for (int first = 0; first < CHOSEN; first += AT_ONCE) {  // the reads of AT_ONCE experts are in flight before anything is added
            float4 e[AT_ONCE][PARTIALS];
            float of[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const bool there = first + j < CHOSEN;
                of[j] = there ? weights[t * CHOSEN + first + j] : 0.0f;
#pragma unroll
                for (int s = 0; s < PARTIALS; s++)
                    if (there) e[j][s] = *(const float4*)(from + (first + j) * y.row + s * y.partial_stride);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (first + j >= CHOSEN) break;
#pragma unroll
                for (int s = 1; s < PARTIALS; s++) e[j][0] = plus(e[j][0], e[j][s]);
                v = plus(v, make_float4(of[j] * e[j][0].x, of[j] * e[j][0].y, of[j] * e[j][0].z, of[j] * e[j][0].w));
            }
        }
        v = plus(before, plus(v, more));
        *(float4*)(sum + (s64)t * out.K + c) = v;
    }
    const float total = warp_sum(v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w));
    if (threadIdx.x % 32 == 0 && in) squares[t * (out.K / 128) + c / 128] = total;
    store_four(out, t, c, make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w));
}
