// store: a row-wise result in each form that its consumers want
// Out       dense (T, K) float32, bf16 (T, K), packed: each where the pointer is not null
//           packed, per 64 columns and 8 rows: the B fragments of two mma.m16n8k32, 16 bytes per lane, the scales
//           (64 bytes), scale * sum of codes (64 bytes), and a share of 8 groups' sums as B fragments of mma.m16n8k16:
//           high and low halves in bf16 (64 bytes). With cols = 1 per 32 columns the one column of that (48 bytes), row
//           after row
//           code = rint(x / scale), scale = largest magnitude / 127; NaN reaches the scale and so the result

struct Out {
    float* dense;
    u8* packed;
    u16* bf16;
    int K, cols, groups;  // groups: of 32 columns, padded to a whole unit of the widest weight
};

// Columns k to k + 3 of row `t`, lane by lane: eight lanes hold a group of 32 columns. `ours`: are they to be stored?
__device__ __forceinline__ void store_four(const Out& out, int t, int k, float4 four, bool ours = true) {
    const float v[4] = {four.x, four.y, four.z, four.w};
    const int left = ours ? out.K - k : 0;
    const bool whole = left >= 4 && out.K % 4 == 0;
    if (out.dense) {
        float* to = out.dense + (s64)t * out.K + k;
        if (whole)
            *(float4*)to = four;
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left) to[i] = v[i];
    }
    if (out.bf16) {
        u16* to = out.bf16 + (s64)t * out.K + k;
        if (whole)
            *(uint2*)to = make_uint2(to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]));
        else
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < left) to[i] = to_bf16(v[i]);
    }
    if (!out.packed) return;
    u32 bits = 0;  // magnitudes compare as integers, so that NaN wins
#pragma unroll
    for (int i = 0; i < 4; i++) bits = max(bits, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) bits = max(bits, __shfl_xor_sync(FULL, bits, m));
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
    const int group = k / 32, in = k % 32;
    if (!ours || group >= out.groups) return;
    const float sum = scale * total;
    const u16 high = to_bf16(sum), low = to_bf16(sum - from_bf16(high));
    const int j = group % 8, odd = group % 2;
    if (out.cols == 1) {
        u8* to = out.packed + ((s64)t * out.groups + group) * 48;
        *(u32*)(to + in % 16 / 4 * 8 + in / 16 * 4) = codes;
        if (in) return;
        *(float2*)(to + 32) = make_float2(scale, sum);
        to += 40 - j * 48 + j / 2 * 96 + odd * 2;
        *(u16*)to = high, *(u16*)(to + 48) = low;
    } else {  // pairs of groups, each for the eights of rows: product.cuh Pair
        const int column = t % 8, stride = out.cols / 8 * 704;
        u8* to = out.packed + (s64)(group / 2) * stride + t / 8 * 704;
        *(u32*)(to + (column * 4 + in % 16 / 4) * 16 + odd * 8 + in / 16 * 4) = codes;
        if (in) return;
        *(float*)(to + 512 + column / 2 * 16 + odd * 8 + column % 2 * 4) = scale;
        *(float*)(to + 576 + column / 2 * 16 + odd * 8 + column % 2 * 4) = sum;
        to += (column / 2 - j / 2) * stride + 640 + column % 2 * 32 + j / 2 * 8 + odd * 2;
        *(u16*)to = high, *(u16*)(to + 4) = low;
    }
}
