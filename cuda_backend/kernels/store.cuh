// store: writes a row-wise result in each form that its consumers need
// Out       dense (T, K) float32, product (T, K) of prelude.cuh to_product, packed: each if its pointer is not null
//           packed, per 256 columns and 8 rows: the B fragments of eight mma.m16n8k32, 16 bytes per lane and two of them; the
//           scales of either half, row after row; the sums of 32 codes, times their scale, as the B fragment of a bf16
//           mma.m16n8k16: group t of either half at k = 2 t and 2 t + 1, and 8 on what bf16 has left of it; before 8.0
//           the sums of codes alone, as those of two float16 m16n8k8. Where
//           fine, per 128 columns: fragments, and four times 8 scales. The first `whole` rows, then those that are left,
//           `cols`. With cols = 1 the one column of that, row after row: 320 bytes of 256 columns, or 160 of 128
//           code = rint(x / scale), scale = largest magnitude of 128 columns, where fine 32, / 127; NaN reaches it and so the
//           result
// Build     ONLY: rows are packed, with a scale per 128 columns, and nothing else: each alone (1) or in eights (8). A kernel
//           that runs for 2 us waits for its code, most of which is this code

#ifndef ONLY
#define ONLY 0
#endif

struct Out {
    float* dense;
    u8* packed;
    u16* product;
    int K, cols, groups, fine, whole;  // groups: of 32 columns, padded to a whole unit of the widest weight
};

// Columns k to k + 3 of row `t`, lane by lane: where they are packed a warp holds 128 columns from a multiple of 128 on, or
// eight lanes 32 where they are fine.
// `ours`: whether to store them
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
    if (!ONLY && out.product) {
        u16* to = out.product + (s64)t * out.K + k;
        if (whole)
            *(uint2*)to = make_uint2(to_product2(v[0], v[1]), to_product2(v[2], v[3]));
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left) to[i] = to_product(v[i]);
    }
    if (!ONLY && !out.packed) return;
    u32 bits = 0;  // magnitudes compare as integers, so that NaN wins
#pragma unroll
    for (int i = 0; i < 4; i++) bits = max(bits, __float_as_uint(v[i]) & 0x7fffffffu);
    if (fine)
#pragma unroll
        for (int m = 1; m < 8; m <<= 1) bits = max(bits, __shfl_xor_sync(FULL, bits, m));
    else
        bits = __reduce_max_sync(FULL, bits);
    const float scale = __uint_as_float(bits) * (1.0f / 127.0f), inverse = 1.0f / scale;
    u32 codes = 0;
    int total = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int code = scale > 0.0f ? max(-127, min(127, __float2int_rn(v[i] * inverse))) : 0;
        codes |= (u32)(u8)code << (8 * i), total += code;
    }
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) total += __shfl_xor_sync(FULL, total, m);
    if (!ours || k / 32 >= out.groups) return;
    const int lane = k % 128 / 4, pair = lane / 16, word = lane % 4 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    const int wide = fine ? 128 : 256, half = fine ? 0 : k / 128 % 2, blocks = out.groups * 32 / wide;
    const int first = t < out.whole ? 0 : out.whole, rows = t < out.whole ? out.whole : out.cols;  // of a product
    const int column = one ? 0 : t % 8, width = one ? 1 : 8;
    u8* to = out.packed;
    to += one ? ((s64)t * blocks + k / wide) * (fine ? 160 : 320)
              : ((s64)(first / 8 * blocks) + k / wide * (rows / 8) + (t - first) / 8) * (fine ? 1152 : 2368);
    ((u32*)to)[(half * 2 + pair) * 16 * width + column * 16 + word] = codes;
    to += wide * width;
    if (fine) {
        if (lane % 8 == 0) ((float*)to)[lane / 8 * width + column] = scale;
        return;
    }
    if (lane == 0) ((float*)to)[column * 2 + half] = scale;
    if (lane % 8 == 0) {
#if __CUDA_ARCH__ < 800  // without the scale, which is the half's: both are whole numbers
        const u16 high = to_half((float)total);
        u16* sums = (u16*)(to + 8 * width) + column * 16 + lane / 8 * 4 + half * 2;
        sums[0] = high, sums[1] = to_half((float)total - from_half(high));
#else
        const float sum = (float)total * scale;
        const u16 high = to_bf16(sum);
        u16* sums = (u16*)(to + 8 * width) + column * 16 + lane / 8 * 4 + half;
        sums[0] = high, sums[2] = to_bf16(sum - __uint_as_float((u32)high << 16));
#endif
    }
}
