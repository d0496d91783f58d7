// formats: how the rows of a cache, each a head's vector, are stored; encode.cuh writes rows, decode.cuh reads them
// Meaning   common/kv_formats.py and common/hadamard.py: the same bytes, arithmetic in the same order
// Build     KEYS and VALUES: formats below; TURN_KEYS, TURN_VALUES: whether vectors are rotated before they are stored
// Layout    a row is a run of blocks: of 32 values in ggml's formats and in bfloat16, of `wht_group` values in Lloyd-Max formats, where a
//           block is a float16 scale and the codes; of TURBOQUANT, keys alone, the norm, the norm of the residual of tq3_0's codes, the
//           codes and the signs of that residual, rotated once more. Blocks lie at multiples of 2 bytes

enum Format { F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, LM2, LM3, LM4, TQ3_0, TURBOQUANT };

#ifndef KEYS
#define PLAIN_FLOAT16  // no format is defined
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

#define PACKED (KEYS != F16 || VALUES != F16)  // else attention reads float16 as stored

// Values of a head that are rotated together, and share a scale if codes are Lloyd-Max.
__device__ constexpr int wht_group(int WIDE) { return WIDE % 128 == 0 ? 128 : WIDE % 64 == 0 ? 64 : 32; }
__device__ constexpr bool is_lloyd_max(Format f) { return f >= LM2 && f <= TQ3_0; }
__device__ constexpr int code_bits(Format f) {
    return f == F16 || f == BF16 ? 16 : f == Q8_0 ? 8 : f == Q5_0 || f == Q5_1 ? 5 : f == LM2 ? 2 : f == LM3 || f == TQ3_0 ? 3 : 4;
}
__device__ constexpr int scale_bytes(Format f) { return f == F16 || f == BF16 ? 0 : f == Q4_1 || f == Q5_1 || f == TURBOQUANT ? 4 : 2; }
__device__ constexpr int block_values(Format f, int WIDE) { return is_lloyd_max(f) || f == TURBOQUANT ? wht_group(WIDE) : 32; }
__device__ constexpr int block_bytes(Format f, int WIDE) { return scale_bytes(f) + block_values(f, WIDE) * code_bits(f) / 8; }
__device__ constexpr int row_bytes(Format f, int WIDE) { return f == F16 ? 2 * WIDE : WIDE / block_values(f, WIDE) * block_bytes(f, WIDE); }

// ---- Walsh-Hadamard rotation of a group, four values per lane

__device__ __forceinline__ float4 signed_by(u32 w0, u32 w1, u32 w2, u32 w3, int lane, float4 v) {
    const u32 word = lane / 8 == 0 ? w0 : lane / 8 == 1 ? w1 : lane / 8 == 2 ? w2 : w3, bits = word >> lane % 8 * 4;
    return make_float4(__uint_as_float(__float_as_uint(v.x) ^ bits << 31), __uint_as_float(__float_as_uint(v.y) ^ (bits >> 1) << 31),
                       __uint_as_float(__float_as_uint(v.z) ^ (bits >> 2) << 31),
                       __uint_as_float(__float_as_uint(v.w) ^ (bits >> 3) << 31));
}
#define FIRST_SIGNS 0xe46a0359u, 0x42f85949u, 0xa4c63bbbu, 0x49f250a9u
#define SECOND_SIGNS 0x16acee90u, 0x3f628fdcu, 0xb7a5357au, 0xbea56562u
__device__ constexpr float root_of(int group) { return group == 128 ? 0.08838834764831845f : group == 64 ? 0.125f : 0.17677669529663687f; }

// Transforms `group` values by Sylvester's matrix of signs.
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

// The rotation of a residual, and its inverse: the same transform between other signs.
#define THIRD_SIGNS 0x693a565eu, 0x25622d30u, 0x0243e607u, 0xfec58bdau
#define FOURTH_SIGNS 0x3d172324u, 0x203007cbu, 0x9540a34bu, 0x856b1126u
template <int GROUP>
__device__ __forceinline__ float4 projected(float4 v, int lane) {
    lane %= GROUP / 4;
    v = signed_by(FOURTH_SIGNS, lane, hadamard<GROUP>(signed_by(THIRD_SIGNS, lane, v), lane));
    return make_float4(v.x * root_of(GROUP), v.y * root_of(GROUP), v.z * root_of(GROUP), v.w * root_of(GROUP));
}
template <int GROUP>
__device__ __forceinline__ float4 projected_back(float4 v, int lane) {
    lane %= GROUP / 4;
    v = signed_by(THIRD_SIGNS, lane, hadamard<GROUP>(signed_by(FOURTH_SIGNS, lane, v), lane));
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
// Byte `high` of each of centroids first to first + 3 as float16.
template <Format F, int GROUP>
__device__ constexpr u32 table_bytes(int first, bool high) {
    const Codes<F, GROUP> table;
    u32 word = 0;
    for (int i = 0; i < 4; i++) word |= (half_bits(table.centroid[first + i]) >> (high ? 8 : 0) & 255) << 8 * i;
    return word;
}
