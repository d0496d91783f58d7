// kv_encode: encodes rows of keys and values in the formats of a KV cache: keys are equalised, then both are rotated
// Meaning   common/kv_formats.py Format.encode, after common/hadamard.py rotate   Launcher  mlx_backend/kv_kernels.py encode
// In        keys [heads][tokens][D] and values [heads][tokens][DV], or keys alone: a plane; mean, scale [heads][D] float
//           (EQUALISED); before, after float signs; boundaries, centroids [16] float of either (Lloyd-Max formats)
// Out       out uchar: the bytes of all keys, then of all values
// Build     KF, VF formats as in include/kv.h; KG, VG groups of 32, 64 or 128; EQUALISED, KEYS_TURN, VALUES_TURN 0 or 1; D
// Work      one SIMD group per group of either, a 32nd of its values per lane in registers; codes that share a byte meet by
//           shuffles; no threadgroup memory, no barrier
// Assumes   threadgroups are 32 wide; keys and values row-contiguous
// Numbers   float inside; sums of squares per lane, then between lanes in the order of rising distance: the definition's
//           bits, which no fast form of sqrt or division may change
// Bound     the bytes of keys and values in; 5 shuffles per value and 10 per group: memory, if a shuffle costs as much as an
//           addition
// Tried     nothing yet: not run on a GPU
#include "kv.h"
#include "wht.h"

inline float inverse_of(float d) {
    const float inverse = d == 0 ? 0.0f : 1 / d;
    return isinf(inverse) ? 0.0f : inverse;
}

inline void put_half(device uchar* at, float value) {
    const float held = isinf(value) ? value : value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
    const ushort bits = as_type<ushort>(half(held));
    at[0] = uchar(bits & 255);
    at[1] = uchar(bits >> 8);
}

template <int R>
inline float group_norm(const thread float* v) {
    float total = v[0] * v[0];
    for (int i = 1; i < R; i++) total = total + v[i] * v[i];
    for (ushort lanes = 1; lanes < 32; lanes *= 2) total = total + simd_shuffle_xor(total, lanes);
    return precise::sqrt(total);
}

// B bits of each of R codes per lane, neighbours in one byte, the first lowest
template <int R, int B>
inline void put_codes(device uchar* out, const thread uint* codes, uint lane) {
    constexpr int bits = R * B, lanes = bits < 8 ? 8 / bits : 1;
    uint field = 0;
    for (int i = 0; i < R; i++) field |= codes[i] << (i * B);
    field <<= lanes > 1 ? lane % lanes * bits : 0;
    for (ushort other = 1; other < lanes; other *= 2) field |= simd_shuffle_xor(field, other);
    if (lane % lanes) return;
    for (int n = 0; n < (bits + 7) / 8; n++) out[lane / lanes * ((bits + 7) / 8) + n] = uchar(field >> (8 * n) & 255);
}

// A group, GROUP / 32 neighbouring values per lane, to `to`
template <int FORMAT, int GROUP, bool ROTATED>
inline void encode_group(device uchar* to, thread float* v, uint lane, const device float* before, const device float* after,
                         const device float* boundaries, const device float* centroids) {
    constexpr int R = GROUP / 32;
    const uint first = lane * R;
    if (ROTATED) {
        for (int i = 0; i < R; i++) v[i] = v[i] * before[first + i];
        wht_stages<R, 32>(v, lane);
        for (int i = 0; i < R; i++) v[i] = v[i] * after[first + i] * wht_scale(GROUP);
    }

    uint codes[R];
    if (FORMAT >= KV_LM2) {
        constexpr int B = FORMAT < KV_LM2 ? 2 : FORMAT - KV_LM2 + 2;
        const float norm = group_norm<R>(v), inverse = inverse_of(norm);
        float nearest[R];
        for (int i = 0; i < R; i++) {
            const float unit = v[i] * inverse;
            codes[i] = 0;
            for (int n = 0; n < (1 << B) - 1; n++) codes[i] += boundaries[n] <= unit;
            nearest[i] = centroids[codes[i]];
        }
        const float length = group_norm<R>(nearest);
        if (lane == 0) put_half(to, isinf(norm) ? norm : norm * inverse_of(length));
        if (B == 3) {
            uint low[R], high[R];
            for (int i = 0; i < R; i++) {
                low[i] = codes[i] & 3;
                high[i] = codes[i] >> 2;
            }
            put_codes<R, 2>(to + 2, low, lane);
            put_codes<R, 1>(to + 2 + GROUP / 4, high, lane);
        } else {
            put_codes<R, B == 3 ? 2 : B>(to + 2, codes, lane);
        }
    } else {  // ggml's blocks of 32, which 32 / R lanes share
        constexpr int L = 32 / R;
        constexpr bool shifted = FORMAT == KV_Q4_1 || FORMAT == KV_Q5_1, five = FORMAT == KV_Q5_0 || FORMAT == KV_Q5_1;
        device uchar* block = to + kv_bytes<FORMAT, GROUP>(int(first) / 32 * 32);
        const uint place = lane % L;
        float low = v[0], high = v[0], signed_most = v[0];
        for (int i = 1; i < R; i++) {
            low = v[i] < low || v[i] != v[i] ? v[i] : low;
            high = v[i] > high || v[i] != v[i] ? v[i] : high;
            signed_most = abs(v[i]) > abs(signed_most) || v[i] != v[i] ? v[i] : signed_most;
        }
        for (ushort lanes = 1; lanes < L; lanes *= 2) {
            const float other_low = simd_shuffle_xor(low, lanes), other_high = simd_shuffle_xor(high, lanes);
            const float other = simd_shuffle_xor(signed_most, lanes);
            low = other_low < low || other_low != other_low ? other_low : low;
            high = other_high > high || other_high != other_high ? other_high : high;
            const bool tied = abs(other) == abs(signed_most) && (place & lanes);  // the first one, if several have the largest magnitude
            signed_most = abs(other) > abs(signed_most) || tied || other != other ? other : signed_most;
        }
        const float d = FORMAT == KV_Q8_0 ? abs(signed_most) / 127
                        : shifted         ? (high - low) / (five ? 31.0f : 15.0f)
                                          : signed_most / (five ? -16.0f : -8.0f);
        const float inverse = inverse_of(d);
        if (place == 0) {
            put_half(block, d);
            if (shifted) put_half(block + 2, low);
        }
        device uchar* at = block + (shifted ? 4 : 2);
        for (int i = 0; i < R; i++) {
            if (FORMAT == KV_Q8_0) {
                const float scaled = v[i] * inverse, rounded = trunc(scaled + (scaled < 0 ? -0.5f : 0.5f));
                at[place * R + i] = uchar(int(rounded != rounded ? 0.0f : rounded) & 255);
            }
            const float wide = shifted ? (v[i] - low) * inverse + 0.5f : v[i] * inverse + (five ? 16.5f : 8.5f);
            const float most = five ? 31.0f : 15.0f;
            codes[i] = uint(wide != wide ? 0.0f : wide > most ? most : wide);
        }
        if (FORMAT != KV_Q8_0) {
            if (five) {
                uint fifth = 0;
                for (int i = 0; i < R; i++) fifth |= codes[i] >> 4 << (place * R + i);
                for (ushort lanes = 1; lanes < L; lanes *= 2) fifth |= simd_shuffle_xor(fifth, lanes);
                if (place == 0) {
                    for (int n = 0; n < 4; n++) at[n] = uchar(fifth >> (8 * n) & 255);
                }
                at += 4;
            }
            for (int i = 0; i < R; i++) {
                const uint above = simd_shuffle_xor(codes[i] & 15, ushort(L / 2));
                if (place < L / 2) at[place * R + i] = uchar((codes[i] & 15) | above << 4);
            }
        }
    }
}

[[kernel]] void kv_encode() {
    constexpr int groups = D / KG;
    const uint lane = thread_index_in_simdgroup, row = thread_position_in_grid.y, tokens = keys_shape[2];
    const uint key_rows = keys_shape[1] * tokens * groups;
    if (row < key_rows) {
        constexpr int R = KG / 32;
        float v[R];
        for (int i = 0; i < R; i++) v[i] = float(keys[size_t(row) * KG + lane * R + i]);
        if (EQUALISED) {
            const size_t at = size_t(row / (groups * tokens)) * D + row % groups * KG + lane * R;
            for (int i = 0; i < R; i++) v[i] = (v[i] - mean[at + i]) / scale[at + i];
        }
        device uchar* to = out + size_t(row) * kv_bytes<KF, KG>(KG);
        encode_group<KF, KG, KEYS_TURN>(to, v, lane, before, after, key_boundaries, key_centroids);
    } else {
        constexpr int R = VG / 32;
        const uint of_values = row - key_rows;
        float v[R];
        for (int i = 0; i < R; i++) v[i] = float(values[size_t(of_values) * VG + lane * R + i]);
        device uchar* to = out + size_t(key_rows) * kv_bytes<KF, KG>(KG) + size_t(of_values) * kv_bytes<VF, VG>(VG);
        encode_group<VF, VG, VALUES_TURN>(to, v, lane, before, after, value_boundaries, value_centroids);
    }
}
