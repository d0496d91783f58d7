// keys: logits as unsigned integers that order them as argmax does
// Meaning   of equal logits the smaller id is the larger key; -0 equals 0; a NaN is the largest of all

__device__ __forceinline__ u32 order_of(float v) {
    const u32 bits = __float_as_uint(v);
    if (bits == 0x80000000u) return bits;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u64 key_of(float v, int i) { return v != v ? ~0ull : (u64)order_of(v) << 32 | (u32)(~i); }
__device__ __forceinline__ float value_of(u64 key) {
    const u32 bits = key >> 32;
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}
