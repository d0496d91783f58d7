// rows: everything between two matrix products that works row by row, and the int8 activations that linear reads
// Meaning   common/reference.py NumpyOps.add, rms_norm, swiglu, mul_sigmoid, mul_softplus, rope,
//           gated_rms_norm
// Launcher  cuda_backend/ops.py
// In        activations (T, ...) float32, strided, as partial sums (prelude.cuh In)
// Out       dense (T, K) float32, bf16 (T, K), packed: each where the pointer is not null
//           packed, per 32 columns and 8 rows: the B fragments of mma.m16n8k32 (256 bytes), the scale of each row, its
//           scale * sum of codes (32 bytes each), and a share of 8 groups' sums as B fragments of mma.m16n8k16: high
//           and low halves in bf16 (32 bytes). With cols = 1 the one column of that (48 bytes), row after row
// Work      add_norm: a CTA per row. pointwise: a warp per 32 columns. heads: a warp per head
// Assumes   K floats fit shared memory (add_norm); packed heads are a multiple of 32 wide
// Numbers   float32; code = rint(x / scale), scale = largest magnitude / 127; NaN reaches the scale and so the result
// Bound     launches: a few KB per row

struct Out {
    float* dense;
    u8* packed;
    u16* bf16;
    int K, cols, groups;  // groups: of 32 columns, padded to a whole unit of the widest weight
};

// The 32 values of a warp as group `group` of row `t`.
__device__ __forceinline__ void store_group(const Out& out, int t, int group, int lane, float v) {
    const int k = group * 32 + lane;
    if (k < out.K) {
        if (out.dense) out.dense[(s64)t * out.K + k] = v;
        if (out.bf16) out.bf16[(s64)t * out.K + k] = to_bf16(v);
    }
    if (!out.packed) return;
    const u32 bits = __reduce_max_sync(FULL, __float_as_uint(v) & 0x7fffffffu);  // as integers, so that NaN wins
    const float scale = __uint_as_float(bits) * (1.0f / 127.0f);
    const int code = scale > 0.0f ? __float2int_rn(v * (1.0f / scale)) : 0;
    const float sum = scale * __reduce_add_sync(FULL, code);
    const int one = out.cols == 1, column = one ? 0 : t % 8, stride = one ? 48 : out.cols / 8 * 352;
    u8* to = out.packed + (one ? (s64)t * out.groups * 48 : t / 8 * 352) + (s64)group * stride;
    to[(column * 4 + lane % 16 / 4) * 8 + lane / 16 * 4 + lane % 4] = (u8)max(-127, min(127, code));
    if (lane == 0) {
        *(float*)(to + (one ? 32 : 256 + column * 4)) = scale;
        *(float*)(to + (one ? 36 : 288 + column * 4)) = sum;
        const u16 high = to_bf16(sum), low = to_bf16(sum - from_bf16(high));
        const int j = group % 8, pair = j / 2;
        u8* block = to - (s64)j * stride;
        *(u16*)(one ? block + 2 * pair * stride + 40 + j % 2 * 2 : block + column * stride + 320 + pair * 8 + j % 2 * 2) = high;
        *(u16*)(one ? block + (2 * pair + 1) * stride + 40 + j % 2 * 2
                    : block + column * stride + 324 + pair * 8 + j % 2 * 2) = low;
    }
}

#define PER_THREAD 6  // columns that a thread of add_norm reads together

extern "C" __global__ void __launch_bounds__(1024)
add_norm(In x, In y, int has_y, const float* weight, float eps, float* sum, Out out) {
    begin();
    extern __shared__ float row[];
    __shared__ float scratch[33];
    const int t = blockIdx.x, lane = threadIdx.x % 32, K = out.K;
    const bool once = K <= PER_THREAD * 1024;
    float v[PER_THREAD], other[PER_THREAD], w[PER_THREAD];
    float squares = 0.0f;
    for (int first = threadIdx.x; first < K; first += PER_THREAD * 1024) {
        load_some(v, x, row_of(x, t), first, 1024, K);
        if (has_y) load_some(other, y, row_of(y, t), first, 1024, K);
#pragma unroll
        for (int n = 0; n < PER_THREAD; n++) {
            const int k = first + n * 1024;
            w[n] = weight && once && k < K ? weight[k] : 1.0f;
        }
#pragma unroll
        for (int n = 0; n < PER_THREAD; n++) {
            const int k = first + n * 1024;
            if (has_y) v[n] += other[n];
            squares += v[n] * v[n];
            if (k >= K) continue;
            if (sum) sum[(s64)t * K + k] = v[n];
            if (!once) row[k] = v[n];
        }
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / K + eps);
    if (once) {
#pragma unroll
        for (int n = 0; n < PER_THREAD; n++)
            if (threadIdx.x + n * 1024 < K) row[threadIdx.x + n * 1024] = v[n] * scale * w[n];
    } else {
        for (int k = threadIdx.x; k < K; k += 1024) row[k] *= scale * (weight ? weight[k] : 1.0f);
    }
    __syncthreads();
    const int groups = out.packed ? out.groups : (K + 31) / 32;
#pragma unroll 1
    for (int group = threadIdx.x / 32; group < groups; group += 32)
        store_group(out, t, group, lane, group * 32 + lane < K ? row[group * 32 + lane] : 0.0f);
}

#define COPY 0
#define ADD 1
#define SWIGLU 2
#define MUL_SIGMOID 3
#define MUL_SOFTPLUS 4

extern "C" __global__ void pointwise(int op, In x, In y, Out out) {
    begin();
    const int lane = threadIdx.x % 32, group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int k = group * 32 + lane, t = blockIdx.y;
    if (group >= out.groups) return;
    float v = 0.0f;
    if (k < out.K) {
        v = load_one(x, place(x, t, k));
        const float other = op == COPY ? 0.0f : load_one(y, place(y, t, k));
        if (op == ADD) v += other;
        if (op == SWIGLU) v = silu(v) * other;
        if (op == MUL_SIGMOID) v *= sigmoid(other);
        if (op == MUL_SOFTPLUS) v *= other > 20.0f ? other : log1pf(expf(other));
    }
    store_group(out, t, group, lane, v);
}

struct Rope {
    const double* frequencies;  // radians per position
    const int* positions;
    int pairs;
    float magnitude;
};

// One head into `v` (shared memory, D floats): RMS norm, weight, rope, each where asked for. One warp.
__device__ __forceinline__ void head_into(float* v, const In& x, int t, int head, int D, bool norm, const float* weight,
                                          float eps, const Rope& rope) {
    const int lane = threadIdx.x % 32;
    float squares = 0.0f;
    for (int first = lane; first < D; first += 256) {
        float e[8];
        load_some(e, x, head_of(x, t, head, D), first, 32, D);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (first + n * 32 < D) v[first + n * 32] = e[n];
            squares += e[n] * e[n];
        }
    }
    if (norm) {
        const float scale = 1.0f / sqrtf(warp_sum(squares) / D + eps);
#pragma unroll 1
        for (int i = lane; i < D; i += 32) v[i] *= scale * (weight ? weight[i] : 1.0f);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < rope.pairs; i += 32) {
        double turns = rope.positions[t] * rope.frequencies[i] * 0.15915494309189535;  // in double: positions beyond 1e5
        float s, c;
        sincospif((float)(2.0 * (turns - rint(turns))), &s, &c);
        const float a = v[i], b = v[i + rope.pairs];
        s *= rope.magnitude, c *= rope.magnitude;
        v[i] = a * c - b * s, v[i + rope.pairs] = b * c + a * s;
    }
    __syncwarp();
}

// norm: bit 0 normalizes; z: the gate of gated_rms_norm where `gated`.
extern "C" __global__ void heads(In x, int H, int D, int T, int norm, const float* weight, float eps, Rope rope, In z,
                                 int gated, Out out) {
    begin();
    extern __shared__ float values[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int at = blockIdx.x * (blockDim.x / 32) + warp, t = at / H, head = at % H;
    if (t >= T) return;
    float* v = values + warp * D;
    head_into(v, x, t, head, D, norm, weight, eps, rope);
    for (int first = lane; gated && first < D; first += 256) {
        float gate[8];
        load_some(gate, z, head_of(z, t, head, D), first, 32, D);
#pragma unroll
        for (int n = 0; n < 8; n++)
            if (first + n * 32 < D) v[first + n * 32] *= silu(gate[n]);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < (D + 31) / 32 * 32; i += 32) {
        if (D % 32 == 0)
            store_group(out, t, (head * D + i) / 32, lane, v[i]);
        else if (i < D)
            out.dense[(s64)t * out.K + head * D + i] = v[i];
    }
    // columns that pad a row to a whole unit
    if (out.packed && head == 0)
#pragma unroll 1
        for (int group = H * D / 32; group < out.groups; group++) store_group(out, t, group, lane, 0.0f);
}

// What attention reads: q (T, H, D) as float16, and this step's keys and values in the cache; heads padded to `wide`.
extern "C" __global__ void heads_to_cache(In q, In k, In v, int H, int K, int D, int wide, const StepState* step, int T,
                                          int q_norm, const float* q_weight, float q_eps, Rope q_rope, int k_norm,
                                          const float* k_weight, float k_eps, Rope k_rope, u16* q_out, u16* keys,
                                          u16* values_out, s64 capacity) {
    begin();
    extern __shared__ float values[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = H + 2 * K;
    const int at = blockIdx.x * (blockDim.x / 32) + warp, t = at / all, head = at % all;
    if (t >= T || t >= step->rows) return;
    float* e = values + warp * D;
    const bool is_q = head < H, is_k = !is_q && head < H + K;
    const int of = is_q ? head : is_k ? head - H : head - H - K;
    In x = q;
    Rope rope = q_rope;
    if (is_k) x = k, rope = k_rope;
    if (!is_q && !is_k) x = v, rope.pairs = 0;
    head_into(e, x, t, of, D, is_q ? q_norm : is_k && k_norm, is_q ? q_weight : k_weight,
              is_q ? q_eps : k_eps, rope);
    u16* to = is_q ? q_out + ((s64)t * H + of) * wide
                   : (is_k ? keys : values_out) + (of * capacity + step->past + t) * wide;
#pragma unroll 1
    for (int i = lane; i < wide; i += 32) to[i] = i < D ? to_half(e[i]) : 0;
}
