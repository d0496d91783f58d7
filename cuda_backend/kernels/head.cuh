// head: loads one head of an activation to shared memory, and applies norm and rope, for `heads` and `heads_to_cache`

#ifndef BIASED
#define BIASED 0
#endif

// Loads one head into `v` (shared memory, room for a multiple of 4) and applies RMS norm, weight and rope if requested, with BIASED after it
// has added the head's part of `bias`, if that is not null. One warp.
__device__ __forceinline__ void head_into(float* v, const In& x, int t, int head, int D, bool norm, const float* weight,
                                          float eps, const Rope& rope, const float* bias = 0) {
    const int lane = threadIdx.x % 32;
    const float* from = head_of(x, t, head, D);
    float squares = 0.0f;
#pragma unroll 1
    for (int d = lane * 4; d < D; d += 256) {
        float4 e[2];
        load_fours(e, from + d, x, 128, D - d);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (BIASED && bias && d + n * 128 < D) e[n] = plus(e[n], load_apart(bias + head * D + d + n * 128, 0, 1, 1, D - d - n * 128));
            squares += e[n].x * e[n].x + e[n].y * e[n].y + e[n].z * e[n].z + e[n].w * e[n].w;
            if (d + n * 128 < D) *(float4*)(v + d + n * 128) = e[n];
        }
    }
    __syncwarp();
    if (norm) {
        const float scale = norm_factor(warp_sum(squares), D, eps);
#pragma unroll 1
        for (int i = lane; i < D; i += 32) v[i] *= scale * (weight ? weight[i] : 1.0f);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < rope.pairs; i += 32) {
        double turns = rope.positions[t] * rope.frequencies[i] * 0.15915494309189535;  // in double, for positions beyond 1e5
        float s, c;
        sincospif((float)(2.0 * (turns - rint(turns))), &s, &c);
        const float a = v[i], b = v[i + rope.pairs];
        s *= rope.magnitude, c *= rope.magnitude;
        v[i] = a * c - b * s, v[i + rope.pairs] = b * c + a * s;
    }
    __syncwarp();
}

#define HEAD_ROOM(D) (((D) + 15) / 16 * 16)
