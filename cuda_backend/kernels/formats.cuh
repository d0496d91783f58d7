// formats: the rows of a cache, each a head's vector: what a warp writes, and what the tensor cores read
// Meaning   common/kv_formats.py and common/hadamard.py: the same bytes, arithmetic in the same order
// Build     KEYS and VALUES: formats below; TURN_KEYS, TURN_VALUES: are vectors rotated before they are stored?
// Layout    a row is a run of blocks: of 32 values in ggml's formats, of `wht_group` values in Lloyd-Max formats, where a
//           block is a float16 scale and the codes. Blocks lie at multiples of 2 bytes
// Tried     tables of pairs in shared memory instead of byte permutes: bank conflicts

enum Format { F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, LM2, LM3, LM4, TQ3_0 };

#ifndef KEYS
#define KEYS F16
#endif
#ifndef VALUES
#define VALUES F16
#endif
#ifndef TURN_KEYS
#define TURN_KEYS 0
#endif
#ifndef TURN_VALUES
#define TURN_VALUES 0
#endif

// Values of a head that are rotated together, and share a scale where codes are Lloyd-Max.
__device__ constexpr int wht_group(int WIDE) { return WIDE % 128 == 0 ? 128 : WIDE % 64 == 0 ? 64 : 32; }
__device__ constexpr bool is_lloyd_max(Format f) { return f >= LM2; }
__device__ constexpr int code_bits(Format f) {
    return f == F16 ? 16 : f == Q8_0 ? 8 : f == Q5_0 || f == Q5_1 ? 5 : f == LM2 ? 2 : f == LM3 || f == TQ3_0 ? 3 : 4;
}
__device__ constexpr int scale_bytes(Format f) { return f == F16 ? 0 : f == Q4_1 || f == Q5_1 ? 4 : 2; }
__device__ constexpr int block_values(Format f, int WIDE) { return is_lloyd_max(f) ? wht_group(WIDE) : 32; }
__device__ constexpr int block_bytes(Format f, int WIDE) { return scale_bytes(f) + block_values(f, WIDE) * code_bits(f) / 8; }
__device__ constexpr int row_bytes(Format f, int WIDE) { return f == F16 ? 2 * WIDE : WIDE / block_values(f, WIDE) * block_bytes(f, WIDE); }

// ---- Walsh-Hadamard rotation of a group, four values per lane

__device__ __forceinline__ float4 signed_by(u32 w0, u32 w1, u32 w2, u32 w3, int lane, float4 v) {
    const u32 word = lane / 8 == 0 ? w0 : lane / 8 == 1 ? w1 : lane / 8 == 2 ? w2 : w3, bits = word >> lane % 8 * 4;
    return make_float4(__uint_as_float(__float_as_uint(v.x) ^ bits << 31), __uint_as_float(__float_as_uint(v.y) ^ (bits >> 1) << 31),
                       __uint_as_float(__float_as_uint(v.z) ^ (bits >> 2) << 31), __uint_as_float(__float_as_uint(v.w) ^ (bits >> 3) << 31));
}
#define FIRST_SIGNS 0xe46a0359u, 0x42f85949u, 0xa4c63bbbu, 0x49f250a9u
#define SECOND_SIGNS 0x16acee90u, 0x3f628fdcu, 0xb7a5357au, 0xbea56562u
__device__ constexpr float root_of(int group) { return group == 128 ? 0.08838834764831845f : group == 64 ? 0.125f : 0.17677669529663687f; }

// Of `group` values, the sums with the signs of Sylvester's matrix.
template <int GROUP>
__device__ __forceinline__ float4 hadamard(float4 v, int lane) {
    v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
    v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
#pragma unroll
    for (int m = 1; m < GROUP / 4; m <<= 1) {
        const float4 other = make_float4(__shfl_xor_sync(FULL, v.x, m), __shfl_xor_sync(FULL, v.y, m), __shfl_xor_sync(FULL, v.z, m),
                                         __shfl_xor_sync(FULL, v.w, m));
        v = lane & m ? make_float4(other.x - v.x, other.y - v.y, other.z - v.z, other.w - v.w) : plus(v, other);
    }
    return v;
}
template <int GROUP>
__device__ __forceinline__ float4 rotated(float4 v, int lane) {
    lane %= GROUP / 4;
    v = signed_by(SECOND_SIGNS, lane, hadamard<GROUP>(signed_by(FIRST_SIGNS, lane, v), lane));
    return make_float4(v.x * root_of(GROUP), v.y * root_of(GROUP), v.z * root_of(GROUP), v.w * root_of(GROUP));
}
template <int GROUP>
__device__ __forceinline__ float4 rotated_back(float4 v, int lane) {
    lane %= GROUP / 4;
    v = signed_by(FIRST_SIGNS, lane, hadamard<GROUP>(signed_by(SECOND_SIGNS, lane, v), lane));
    return make_float4(v.x * root_of(GROUP), v.y * root_of(GROUP), v.z * root_of(GROUP), v.w * root_of(GROUP));
}

// ---- Lloyd-Max tables: centroids and boundaries above 0 of N(0, 1), of tq3_0 of a unit vector of 128

template <Format F>
struct Table;
template <>
struct Table<LM2> {
    static constexpr int HALF = 2;
    static constexpr double unit = 1.0, centroids[2] = {0.4527800346, 1.510417608}, boundaries[1] = {0.9815988216};
};
template <>
struct Table<LM3> {
    static constexpr int HALF = 4;
    static constexpr double unit = 1.0, centroids[4] = {0.2450941789, 0.7560052812, 1.343909279, 2.151945705},
                            boundaries[3] = {0.5005497301, 1.04995728, 1.747927492};
};
template <>
struct Table<TQ3_0> {
    static constexpr int HALF = 4;
    static constexpr double unit = 128.0, centroids[4] = {0.021460, 0.065717, 0.117832, 0.190685},
                            boundaries[3] = {0.043589, 0.091775, 0.154259};
};
template <>
struct Table<LM4> {
    static constexpr int HALF = 8;
    static constexpr double unit = 1.0,
                            centroids[8] = {0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565,
                                            1.256231197,  1.618046386,  2.069017227,  2.732589571},
                            boundaries[7] = {0.2582216647, 0.522403709, 0.7995497875, 1.099285827, 1.437138792, 1.843531806, 2.400803399};
};
// The square root of unit / group.
__device__ constexpr double table_scale(double unit, int group) {
    return unit > 1.0 ? (group == 128 ? 1.0 : group == 64 ? 1.4142135623730951 : 2.0)
                      : (group == 128 ? 0.08838834764831845 : group == 64 ? 0.125 : 0.17677669529663687);
}
// A table for groups of `GROUP`: ascending centroids, and the boundaries between them.
template <Format F, int GROUP>
struct Codes {
    static constexpr int HALF = Table<F>::HALF;
    float centroid[2 * HALF], boundary[2 * HALF - 1];
    __device__ constexpr Codes() : centroid(), boundary() {
        const double scale = table_scale(Table<F>::unit, GROUP);
        for (int i = 0; i < HALF; i++) {
            centroid[HALF + i] = (float)(Table<F>::centroids[i] * scale), centroid[HALF - 1 - i] = -centroid[HALF + i];
            if (i) boundary[HALF - 1 + i] = (float)(Table<F>::boundaries[i - 1] * scale), boundary[HALF - 1 - i] = -boundary[HALF - 1 + i];
        }
    }
};
// The bits of a normal number as float16.
__device__ constexpr u32 half_bits(double x) {
    const u32 sign = x < 0 ? 0x8000 : 0;
    int e = 15;
    if (x < 0) x = -x;
    while (x >= 2) x /= 2, e++;
    while (x < 1) x *= 2, e--;
    const double m = (x - 1) * 1024;
    u32 r = (u32)m;
    if (m - r > 0.5 || (m - r == 0.5 && r % 2)) r++;
    return sign | ((u32)e << 10) + r;
}
// Byte `high` of the float16 of centroids first to first + 3.
template <Format F, int GROUP>
__device__ constexpr u32 table_bytes(int first, bool high) {
    const Codes<F, GROUP> table;
    u32 word = 0;
    for (int i = 0; i < 4; i++) word |= (half_bits(table.centroid[first + i]) >> (high ? 8 : 0) & 255) << 8 * i;
    return word;
}

// ---- writing

__device__ __forceinline__ float largest_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }
__device__ __forceinline__ u16 scale_half(float x) { return to_half(x != x ? x : largest_half(x)); }
__device__ __forceinline__ float inverse_of(float d) {
    const float i = 1.0f / d;
    return d == 0.0f || fabsf(i) > 3.402823466e38f ? 0.0f : i;
}

// The square root of a group's sum of squares, which every lane gets; added as common/kv_formats.py `norms`.
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

// A block of 32 values of ggml's formats, by eight lanes.
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
    } else {  // the first of the largest magnitudes
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
    u32 codes = 0, fifth = 0;  // a byte each; a bit each
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

// Values 128 * chunk + 4 * lane and the three after it of a row of `WIDE`; lanes whose values lie beyond WIDE hold zeros.
template <Format F, int WIDE>
__device__ __forceinline__ void write_row(u8* row, int chunk, int lane, float4 v) {
    const int d = chunk * 128 + lane * 4;
    const bool ours = d < WIDE;
    u8* to = row + d / block_values(F, WIDE) * block_bytes(F, WIDE);
    if constexpr (F == F16) {
        if (ours) *(uint2*)(row + d * 2) = make_uint2(to_half2(v.x, v.y), to_half2(v.z, v.w));
    } else if constexpr (is_lloyd_max(F)) {
        write_lloyd_max<F, wht_group(WIDE)>(to, lane, v, ours);
    } else {
        write_ggml<F>(to, lane, v, ours);
    }
}

// The same of a head of q, whose row is float16, of keys or of values.
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

#define PACKED (KEYS != F16 || VALUES != F16)

// ---- reading: 32 values as float16, by pairs

__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 add_half2(u32 a, u32 b) {
    u32 c;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// N words from an even address.
template <int N>
__device__ __forceinline__ void load_words(u32 (&w)[N], const u8* from) {
    const u32 shift = ((u64)from & 2) * 8;
    const u32* at = (const u32*)((u64)from & ~(u64)3);
    u32 a = at[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32 b = i + 1 < N || shift ? at[i + 1] : 0;
        w[i] = __funnelshift_r(a, b, shift), a = b;
    }
}
__device__ __forceinline__ u32 twice(u16 half) { return half | (u32)half << 16; }

// Two and two bits, or a bit each, of eight codes, to nibbles.
__device__ __forceinline__ u32 spread2(u32 x) {
    x = (x | x << 8) & 0x00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0fu;
    return (x | x << 2) & 0x33333333u;
}
__device__ __forceinline__ u32 spread1(u32 x) {
    x = (x | x << 12) & 0x000f000fu;
    x = (x | x << 6) & 0x03030303u;
    return (x | x << 3) & 0x11111111u;
}

// Eight codes, a nibble each, from a table of at most eight: out[i] holds values 2 i and 2 i + 1.
template <Format F, int GROUP>
__device__ __forceinline__ void look_up(u32 codes, u32 scale, u32* out) {
    constexpr int first = F == LM4 ? 8 : 0, more = F == LM2 ? 0 : first + 4;  // of LM4 the magnitudes
    constexpr u32 low0 = table_bytes<F, GROUP>(first, false), low1 = table_bytes<F, GROUP>(more, false);
    constexpr u32 high0 = table_bytes<F, GROUP>(first, true), high1 = table_bytes<F, GROUP>(more, true);
    u32 negative = 0;
    if (F == LM4) negative = ~codes & 0x88888888u, codes = (codes ^ (negative - (negative >> 3))) & 0x77777777u;
    u32 high[2] = {__byte_perm(high0, high1, codes), __byte_perm(high0, high1, codes >> 16)};
    const u32 low[2] = {__byte_perm(low0, low1, codes), __byte_perm(low0, low1, codes >> 16)};
    if (F == LM4) {
        const u32 even = negative << 4 & 0x80808080u, odd = negative & 0x80808080u;
        high[0] ^= __byte_perm(even, odd, 0x5140), high[1] ^= __byte_perm(even, odd, 0x7362);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[2 * i] = mul_half2(__byte_perm(low[i], high[i], 0x5140), scale);
        out[2 * i + 1] = mul_half2(__byte_perm(low[i], high[i], 0x7362), scale);
    }
}

// Values 32 * block to 32 * block + 31 of a row of `WIDE`.
template <Format F, int WIDE>
__device__ __forceinline__ void read_32(const u8* row, int block, u32 (&out)[16]) {
    constexpr int per = block_values(F, WIDE) / 32;
    const u8* from = row + block / per * block_bytes(F, WIDE);
    if constexpr (F == F16) {
        load_words(out, from);
    } else if constexpr (is_lloyd_max(F)) {
        constexpr int group = wht_group(WIDE);
        const int part = block % per;
        const u32 scale = twice(*(const u16*)from);
        if constexpr (F == LM4) {
            u32 w[4];
            load_words(w, from + 2 + part * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) look_up<F, group>(w[i], scale, out + 4 * i);
        } else {
            u32 low[2], high[1] = {0};
            load_words(low, from + 2 + part * 8);
            if (F != LM2) load_words(high, from + 2 + group / 4 + part * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 codes = spread2(low[i / 2] >> i % 2 * 16 & 0xffffu);
                if (F != LM2) codes |= spread1(high[0] >> 8 * i & 255) << 2;
                look_up<F, group>(codes, scale, out + 4 * i);
            }
        }
    } else {
        constexpr bool has_low = F == Q4_1 || F == Q5_1, five = F == Q5_0 || F == Q5_1;
        // float16 of 1024 and a code, and what is to be taken from it
        constexpr u32 offset = F == Q8_0 ? 0xe480e480u : F == Q4_0 ? 0xe408e408u : F == Q5_0 ? 0xe410e410u : 0xe400e400u;
        const u32 scale = twice(*(const u16*)from), low = has_low ? twice(*(const u16*)(from + 2)) : 0;
        u32 w[F == Q8_0 ? 8 : 4], fifth[1] = {0};
        if (five) load_words(fifth, from + scale_bytes(F));
        load_words(w, from + scale_bytes(F) + five * 4);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // four values
            u32 codes;
            if constexpr (F == Q8_0)
                codes = w[i] ^ 0x80808080u;
            else
                codes = w[i % 4] >> i / 4 * 4 & 0x0f0f0f0fu;
            if (five) codes |= ((fifth[0] >> 4 * i & 15) * 0x00204081u & 0x01010101u) << 4;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 whole = add_half2(__byte_perm(codes, 0x64646464u, j ? 0x4342 : 0x4140), offset);
                out[2 * i + j] = has_low ? fma_half2(whole, scale, low) : mul_half2(whole, scale);
            }
        }
    }
}

// 32 values of a row as float16 to where `to` points, at a multiple of 16 bytes.
template <Format F, int WIDE>
__device__ __forceinline__ void unpack_32(u16* to, const u8* row, int block) {
    u32 w[16];
    read_32<F, WIDE>(row, block, w);
#pragma unroll
    for (int i = 0; i < 4; i++) ((uint4*)to)[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
}
