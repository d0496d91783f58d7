// moe: which experts a row takes, and the weighted sum of what they return
// Meaning   common/reference.py NumpyOps.route_softmax, route_sigmoid, moe  Launcher  cuda_backend/ops.py
// In        logits (T, E), bias [E] or null for softmax  Out  ids, weights [T][k]: best first, ties to the smaller id
//           y [T * k][C], weights [T][k]               Out  out [T][C] float32
// Work      route: a warp per row. combine: a thread per output, experts in the order of ids
// Bound     launches

extern "C" __global__ void route(In logits, int T, int E, int k, const float* bias, float scale, int* ids,
                                 float* weights) {
    begin();
    extern __shared__ float shared[];
    float *p = shared, *order = shared + E;  // what an expert weighs, and what it is chosen by
    const int t = blockIdx.x, lane = threadIdx.x;
    float best = -__int_as_float(0x7f800000);
    for (int e = lane; e < E; e += 32) {
        p[e] = load_one(logits, row_of(logits, t) + e);
        best = fmaxf(best, p[e]);
    }
    const float top = warp_max(best);
    for (int e = lane; e < E; e += 32) {
        p[e] = bias ? 1.0f / (1.0f + expf(-p[e])) : expf(p[e] - top);
        order[e] = p[e] + (bias ? bias[e] : 0.0f);
    }
    __syncwarp();
    float total = 0.0f;
    for (int j = 0; j < k; j++) {
        u64 key = 0;  // (order, smaller id first); experts that are chosen or not a number are NaN
        for (int e = lane; e < E; e += 32) {
            const u32 bits = __float_as_uint(order[e]);
            const u32 rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
            if (order[e] == order[e]) key = max(key, (u64)rising << 32 | (u32)(~e));
        }
        for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(FULL, key, m));
        const int e = key ? (int)(~(u32)key) : 0;
        const float w = p[e];
        if (lane == 0) ids[t * k + j] = e, weights[t * k + j] = w;
        __syncwarp();
        if (lane == e % 32) order[e] = __int_as_float(0x7fffffff);
        __syncwarp();
        total += w;
    }
    for (int j = lane; j < k; j += 32) weights[t * k + j] *= scale / total;
}

extern "C" __global__ void combine(const float* y, const float* weights, int k, int C, float* out) {
    begin();
    const int c = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (c >= C) return;
    float sum = 0.0f;
    for (int j = 0; j < k; j++) sum += weights[t * k + j] * y[((s64)t * k + j) * C + c];
    out[(s64)t * C + c] = sum;
}
