// store: a row-wise result in each form that its consumers want
// Out       dense (T, K) float32, bf16 (T, K), packed: each where the pointer is not null
//           packed, per 128 columns and 8 rows: the B fragments of four mma.m16n8k32, 16 bytes per lane and two of them; the
//           scales, 8 or, where fine, 4 times 8; the sums of 16 codes in float16, which holds them, as the B fragment of
//           m16n8k8. The first `whole` rows, then those that are left, `cols`. With cols = 1 the one column of that,
//           row after row: 128 bytes of codes, 16 of sums, 16 of scales
//           code = rint(x / scale), scale = largest magnitude of 128 columns, where fine 32, / 127; NaN reaches it and so the
//           result
// Build     ONLY: rows are packed, with a scale per 128 columns, and nothing else: each alone (1) or in eights (8). A kernel
//           that runs for 2 us waits for its code, of which that is the larger part

#ifndef ONLY
#define ONLY 0
#endif

struct Out {
    float* dense;
    u8* packed;
    u16* bf16;
    int K, cols, groups, fine, whole;  // groups: of 32 columns, padded to a whole unit of the widest weight
};

// Columns k to k + 3 of row `t`, lane by lane: where they are packed a warp holds 128 columns from a multiple of 128 on, or
// eight lanes 32 where they are fine.
// `ours`: are they to be stored?
__device__ __forceinline__ void store_four(const Out& out, int t, int k, float4 four, bool ours = true) {
    const float v[4] = {four.x, four.y, four.z, four.w};
    const int left = ours ? out.K - k : 0;
    const bool whole = left >= 4 && out.K % 4 == 0, fine = !ONLY && out.fine, one = ONLY ? ONLY == 1 : out.cols == 1;
    if (!ONLY && out.dense) {
        float* to = out.dense + (s64)t * out.K + k;
        if (whole)
            *(float4*)to = four;
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left) to[i] = v[i];
    }
    if (!ONLY && out.bf16) {
        u16* to = out.bf16 + (s64)t * out.K + k;
        if (whole)
            *(uint2*)to = make_uint2(to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]));
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left) to[i] = to_bf16(v[i]);
    }
    if (!ONLY && !out.packed) return;
    u32 bits = 0;  // magnitudes compare as integers, so that NaN wins
#pragma unroll
    for (int i = 0; i < 4; i++) bits = max(bits, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) bits = max(bits, __shfl_xor_sync(FULL, bits, m));
    if (!fine) bits = max(bits, __shfl_xor_sync(FULL, bits, 8)), bits = max(bits, __shfl_xor_sync(FULL, bits, 16));
    const float scale = __uint_as_float(bits) * (1.0f / 127.0f), inverse = 1.0f / scale;
    u32 codes = 0;
    int total = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int code = scale > 0.0f ? max(-127, min(127, __float2int_rn(v[i] * inverse))) : 0;
        codes |= (u32)(u8)code << (8 * i), total += code;
    }
    total += __shfl_xor_sync(FULL, total, 1);
    total += __shfl_xor_sync(FULL, total, 2);
    if (!ours || k / 32 >= out.groups) return;
    const int lane = k % 128 / 4, pair = lane / 16, word = lane % 4 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    const int blocks = out.groups / 4, eight = fine ? 1280 : 1184;  // of 128 columns; bytes of eight rows of one
    const int first = t < out.whole ? 0 : out.whole, rows = t < out.whole ? out.whole : out.cols;  // of a product
    u8* to = out.packed;
    to += one ? ((s64)t * blocks + k / 128) * 160 : ((s64)(first / 8 * blocks) + k / 128 * (rows / 8) + (t - first) / 8) * eight;
    const int column = one ? 0 : t % 8;
    ((u32*)to)[pair * (one ? 16 : 128) + column * 16 + word] = codes;
    if ((lane & (fine ? 7 : 31)) == 0) ((float*)(to + (one ? 144 : 1024)))[lane / 8 * (one ? 1 : 8) + column] = scale;
    if (lane % 4 == 0) ((u16*)(to + (one ? 128 : eight - 128)))[column * 8 + lane / 4] = to_half((float)total);
}
