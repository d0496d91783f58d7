// to_cache: rows.cu heads_to_cache for heads of 128 or 256, aligned in fours, in a decoding step
// Launcher  cuda_backend/attention.py
// In        q, k, v (T, heads, D) float32 as partial sums     Out  q_out [T][H][D] and the step's rows of the cache, float16
// Build     D
// Work      a CTA per head: four warps for 128 columns, each for every fourth partial sum; the first then norms, turns and
//           stores all columns. Angles and weights before the wait for the kernel before
// Assumes   norm, rope and their parameters are the same for q and k; pairs is 0 or a power of two from 4 to 64
// Bound     launches

extern "C" __global__ void __launch_bounds__(D)
to_cache(In q, In k, In v, int H, int K, const StepState* step, int T, int norm, const float* q_weight, const float* k_weight,
         float eps, Rope rope, u16* q_out, u16* keys, u16* values, s64 capacity, int fixed, int ring) {
    release_next();
    __shared__ float4 parts[4][D / 4];
    const int all = H + 2 * K, t = blockIdx.x / all, head = blockIdx.x % all, warp = threadIdx.x / 32;
    const int d = threadIdx.x % 32 * 4, kind = head < H ? 0 : head < H + K ? 1 : 2;
    const int of = kind == 0 ? head : kind == 1 ? head - H : head - H - K;
    const float* weight = !norm || kind == 2 || warp ? 0 : kind ? k_weight : q_weight;
    const bool turns = kind < 2 && warp == 0 && d < 2 * rope.pairs;
    const float4 one = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    float4 w[D / 128], e[D / 128], c = one, s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int n = 0; n < D / 128; n++) w[n] = weight ? *(const float4*)(weight + n * 128 + d) : one;
    const float sign = d < rope.pairs ? -rope.magnitude : rope.magnitude;
    const int rows = step->rows, position = step->past + t;
    const double2* radians = (const double2*)(rope.frequencies + (d & rope.pairs - 1));  // per position
    const double2 none = make_double2(0.0, 0.0);
    double2 first = turns ? radians[0] : none, second = turns ? radians[1] : none;
    const int turned = turns ? rope.positions[t] : 0;
    if (t >= rows) return;
#pragma unroll 1
    for (int i = 0; i < 4 && turns; i++) {
        const double turn = turned * first.x * 0.15915494309189535;
        first = make_double2(first.y, second.x), second.x = second.y;
        float sine, cosine;
        sincospif((float)(2.0 * (turn - rint(turn))), &sine, &cosine);
        c = make_float4(c.y, c.z, c.w, cosine * rope.magnitude), s = make_float4(s.y, s.z, s.w, sine * sign);
    }
    depend();
    In x = q;
    if (kind == 1) x = k;
    if (kind == 2) x = v;
    const int mine = warp % 4, column = warp / 4 * 128 + d;
    const float* from = head_of(x, t, of, D) + column + mine * x.slot;
    x.slots = (x.slots - mine + 3) / 4, x.slot *= 4;
    parts[mine][column / 4] = slots_of(from, x);
    __syncthreads();
    if (warp) return;
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < D / 128; n++) {
        const int i = n * 32 + d / 4;
        e[n] = plus(plus(plus(parts[0][i], parts[1][i]), parts[2][i]), parts[3][i]);
        squares += e[n].x * e[n].x + e[n].y * e[n].y + (e[n].z * e[n].z + e[n].w * e[n].w);
    }
    const float scale = norm && kind < 2 ? 1.0f / sqrtf(warp_sum(squares) / D + eps) : 1.0f;
#pragma unroll
    for (int n = 0; n < D / 128; n++)
        e[n] = make_float4(e[n].x * scale * w[n].x, e[n].y * scale * w[n].y, e[n].z * scale * w[n].z, e[n].w * scale * w[n].w);
    const int apart = rope.pairs / 4;  // lanes
    const float4 self = e[0];
    const float4 other = make_float4(__shfl_xor_sync(FULL, self.x, apart), __shfl_xor_sync(FULL, self.y, apart),
                                     __shfl_xor_sync(FULL, self.z, apart), __shfl_xor_sync(FULL, self.w, apart));
    if (turns)
        e[0] = make_float4(self.x * c.x + other.x * s.x, self.y * c.y + other.y * s.y, self.z * c.z + other.z * s.z,
                           self.w * c.w + other.w * s.w);
    const int slot = position < fixed ? position : fixed + (position - fixed) % ring;
    u16* to = kind == 0 ? q_out + ((s64)t * H + of) * D : (kind == 1 ? keys : values) + (of * capacity + slot) * D;
#pragma unroll
    for (int n = 0; n < D / 128; n++)
        *(uint2*)(to + n * 128 + d) = make_uint2(to_half2(e[n].x, e[n].y), to_half2(e[n].z, e[n].w));
}
