// encode: writes rows of a cache, by a warp that holds four values per lane, in the order of operations of common/kv_formats.py, so
// that codes are bitwise identical to NumPy's

__device__ __forceinline__ float largest_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }
__device__ __forceinline__ u16 scale_half(float x) { return to_half(x != x ? x : largest_half(x)); }
__device__ __forceinline__ float inverse_of(float d) {
    const float i = 1.0f / d;
    return d == 0.0f || fabsf(i) > 3.402823466e38f ? 0.0f : i;
}

// The square root of a group's sum of squares, in every lane; added in the order of common/kv_formats.py `norms`.
template <int GROUP>
__device__ __forceinline__ float norm_of(float4 v) {
    const float a = v.x * v.x, b = v.y * v.y, c = v.z * v.z, d = v.w * v.w;
    float sum = GROUP == 128 ? a + b + c + d : (a + b) + (c + d);
#pragma unroll
    for (int m = 1; m < GROUP / 4; m <<= 1) sum += __shfl_xor_sync(FULL, sum, m);
    return sqrtf(sum);
}

template <Format F, int GROUP>
__device__ __forceinline__ u32 nearest(float v, float& value) {
    constexpr Codes<F, GROUP> table;
    u32 code = 0;
    value = table.centroid[0];
#pragma unroll
    for (int i = 0; i < 2 * table.HALF - 1; i++)
        if (v >= table.boundary[i]) code = i + 1, value = table.centroid[i + 1];
    return code;
}

template <Format F, int GROUP>
__device__ __forceinline__ void write_lloyd_max(u8* to, int lane, float4 v, bool ours) {
    lane %= GROUP / 4;
    const float norm = norm_of<GROUP>(v), by = inverse_of(norm);
    float4 c;
    const u32 a = nearest<F, GROUP>(v.x * by, c.x), b = nearest<F, GROUP>(v.y * by, c.y);
    const u32 d = nearest<F, GROUP>(v.z * by, c.z), e = nearest<F, GROUP>(v.w * by, c.w);
    float scale = norm * inverse_of(norm_of<GROUP>(c));
    if (!(norm <= 3.402823466e38f)) scale = norm;
    u32 high = (a >> 2) | (b >> 2) << 1 | (d >> 2) << 2 | (e >> 2) << 3;
    high |= __shfl_xor_sync(FULL, high, 1) << 4;  // of an even lane and its neighbour
    if (!ours) return;
    if (lane == 0) *(u16*)to = scale_half(scale);
    if (code_bits(F) == 4) {
        ((u16*)(to + 2))[lane] = a | b << 4 | d << 8 | e << 12;
    } else {
        to[2 + lane] = (a & 3) | (b & 3) << 2 | (d & 3) << 4 | (e & 3) << 6;
        if (code_bits(F) == 3 && lane % 2 == 0) to[2 + GROUP / 4 + lane / 2] = high;
    }
}

// Encodes a group of keys: its norm, the norm of its unit vector's residual, three-bit codes, and for each number of the projected
// residual a bit that is set if the number is not below 0.
template <int GROUP>
__device__ __forceinline__ void write_turboquant(u8* to, int lane, float4 v, bool ours) {
    lane %= GROUP / 4;
    const float norm = norm_of<GROUP>(v), by = inverse_of(norm);
    v = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
    float4 c;
    const u32 a = nearest<TQ3_0, GROUP>(v.x, c.x), b = nearest<TQ3_0, GROUP>(v.y, c.y);
    const u32 d = nearest<TQ3_0, GROUP>(v.z, c.z), e = nearest<TQ3_0, GROUP>(v.w, c.w);
    const float4 residual = make_float4(v.x - c.x, v.y - c.y, v.z - c.z, v.w - c.w);
    const float left = norm_of<GROUP>(residual) * (norm != 0.0f ? 1.0f : 0.0f);
    v = projected<GROUP>(residual, lane);
    u32 high = (a >> 2) | (b >> 2) << 1 | (d >> 2) << 2 | (e >> 2) << 3;
    u32 signs = (v.x >= 0.0f) | (v.y >= 0.0f) << 1 | (v.z >= 0.0f) << 2 | (v.w >= 0.0f) << 3;
    high |= __shfl_xor_sync(FULL, high, 1) << 4, signs |= __shfl_xor_sync(FULL, signs, 1) << 4;  // of an even lane and its neighbour
    if (!ours) return;
    if (lane == 0) ((u16*)to)[0] = scale_half(norm), ((u16*)to)[1] = scale_half(left);
    to[4 + lane] = (a & 3) | (b & 3) << 2 | (d & 3) << 4 | (e & 3) << 6;
    if (lane % 2 == 0) to[4 + GROUP / 4 + lane / 2] = high, to[4 + GROUP / 8 * 3 + lane / 2] = signs;
}

// Encodes a block of 32 values in one of ggml's formats, by eight lanes.
template <Format F>
__device__ __forceinline__ void write_ggml(u8* to, int lane, float4 v, bool ours) {
    lane %= 8;
    constexpr bool has_low = F == Q4_1 || F == Q5_1, five = F == Q5_0 || F == Q5_1;
    float top = 0.0f, low = 0.0f, d, from = 0.0f;
    if (has_low) {
        top = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)), low = fminf(fminf(v.x, v.y), fminf(v.z, v.w));
#pragma unroll
        for (int m = 1; m < 8; m <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, m)), low = fminf(low, __shfl_xor_sync(FULL, low, m));
        d = (top - low) / (five ? 31.0f : 15.0f), from = low;
    } else {  // the first one, if several have the largest magnitude
        top = v.x;
        if (fabsf(v.y) > fabsf(top)) top = v.y;
        if (fabsf(v.z) > fabsf(top)) top = v.z;
        if (fabsf(v.w) > fabsf(top)) top = v.w;
#pragma unroll
        for (int m = 1; m < 8; m <<= 1) {
            const float other = __shfl_xor_sync(FULL, top, m);
            if (lane & m ? fabsf(other) >= fabsf(top) : fabsf(other) > fabsf(top)) top = other;
        }
        d = F == Q8_0 ? fabsf(top) / 127.0f : top / (five ? -16.0f : -8.0f);
    }
    const float by = inverse_of(d);
    if (F == Q8_0) {
        const float e[4] = {v.x * by, v.y * by, v.z * by, v.w * by};
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) codes |= (u32)(u8)(int)(e[i] + (e[i] < 0.0f ? -0.5f : 0.5f)) << 8 * i;
        if (!ours) return;
        if (lane == 0) *(u16*)to = scale_half(d);
        ((u16*)(to + 2))[lane * 2] = codes, ((u16*)(to + 2))[lane * 2 + 1] = codes >> 16;
        return;
    }
    const float half = has_low ? 0.5f : five ? 16.5f : 8.5f, most = five ? 31.0f : 15.0f;
    const float e[4] = {v.x, v.y, v.z, v.w};
    u32 codes = 0, fifth = 0;  // a byte per code; a bit per code
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 code = (u32)fminf((e[i] - from) * by + half, most);
        codes |= (code & 15) << 8 * i, fifth |= code >> 4 << (4 * lane + i);
    }
    codes |= __shfl_xor_sync(FULL, codes, 4) << 4;  // of the first four lanes
    if (five)
#pragma unroll
        for (int m = 1; m < 8; m <<= 1) fifth |= __shfl_xor_sync(FULL, fifth, m);
    if (!ours) return;
    u16* out = (u16*)to;
    if (lane == 0) {
        *out = scale_half(d);
        if (has_low) out[1] = scale_half(low);
        if (five) out[scale_bytes(F) / 2] = fifth, out[scale_bytes(F) / 2 + 1] = fifth >> 16;
    }
    if (lane < 4) out += scale_bytes(F) / 2 + five * 2, out[lane * 2] = codes, out[lane * 2 + 1] = codes >> 16;
}

// Writes values 128 * chunk + 4 * lane and the three after it of a row of `WIDE`; lanes beyond WIDE hold zeros.
template <Format F, int WIDE>
__device__ __forceinline__ void write_row(u8* row, int chunk, int lane, float4 v) {
    const int d = chunk * 128 + lane * 4;
    const bool ours = d < WIDE;
    u8* to = row + d / block_values(F, WIDE) * block_bytes(F, WIDE);
    if constexpr (F == F16) {
        if (ours) *(uint2*)(row + d * 2) = make_uint2(to_half2(v.x, v.y), to_half2(v.z, v.w));
    } else if constexpr (F == BF16) {
        if (ours) *(uint2*)(row + d * 2) = make_uint2(to_bf16x2(v.x, v.y), to_bf16x2(v.z, v.w));
    } else if constexpr (is_lloyd_max(F)) {
        write_lloyd_max<F, wht_group(WIDE)>(to, lane, v, ours);
    } else if constexpr (F == TURBOQUANT) {
        write_turboquant<wht_group(WIDE)>(to, lane, v, ours);
    } else {
        write_ggml<F>(to, lane, v, ours);
    }
}

// As above for a head of q, whose row is float16, of keys or of values.
template <int WIDE>
__device__ __forceinline__ void store_row(bool is_q, bool is_k, u8* row, int chunk, int lane, float4 v) {
    if ((is_q || is_k) ? TURN_KEYS : TURN_VALUES) v = rotated<wht_group(WIDE)>(v, lane);
    if (is_q)
        write_row<F16, WIDE>(row, chunk, lane, v);
    else if (is_k)
        write_row<KEYS, WIDE>(row, chunk, lane, v);
    else
        write_row<VALUES, WIDE>(row, chunk, lane, v);
}

// As above, and writes float16 rows that attention reads exactly, keys with `exact.mean` and `exact.scale` at `at`, and the
// query of exact.cuh kept_query. Returns the part of the lane's values of q in exact.shift.
template <int WIDE>
__device__ __forceinline__ float store_both(const Exact& exact, s64 at, bool is_q, bool is_k, u8* row, u8* exact_row, u8* query_row,
                                            int chunk, int lane, float4 v) {
    const int d = chunk * 128 + lane * 4;
    float part = 0.0f;
    if (query_row) write_row<F16, WIDE>(query_row, chunk, lane, is_q ? v : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (is_q || is_k) {
        write_row<F16, WIDE>(exact_row, chunk, lane, v);
        if (exact.mean && d < WIDE) {
            const float4 m = *(const float4*)(exact.mean + at + d), s = *(const float4*)(exact.scale + at + d);
            if (is_q) {
                part = (v.x * m.x + v.y * m.y) + (v.z * m.z + v.w * m.w);
                v = make_float4(v.x * s.x, v.y * s.y, v.z * s.z, v.w * s.w);
            } else {
                v = make_float4((v.x - m.x) / s.x, (v.y - m.y) / s.y, (v.z - m.z) / s.z, (v.w - m.w) / s.w);
            }
        }
    } else {
        write_row<F16, WIDE>(exact_row, chunk, lane, TURN_VALUES ? rotated<wht_group(WIDE)>(v, lane) : v);
    }
    store_row<WIDE>(is_q, is_k, row, chunk, lane, v);
    return part;
}
