// kv: one value of a vector as a KV cache stores it, common/kv_formats.py
// FORMAT is the format's number in mlx_backend/kv_kernels.py; GROUP, the values that share a norm; `centroids`, the table
// of a Lloyd-Max format, ascending, 16 floats.
enum { KV_NATIVE, KV_F16, KV_BF16, KV_Q4_0, KV_Q4_1, KV_Q5_0, KV_Q5_1, KV_Q8_0, KV_LM2, KV_LM3, KV_LM4 };
// tq3_0 is KV_LM3 with another table

inline float kv_half(const device uchar* at) {
    return float(as_type<half>(ushort(at[0] | at[1] << 8)));
}

// Bytes of `values` values
template <int FORMAT, int GROUP>
inline int kv_bytes(int values) {
    constexpr int scales = FORMAT == KV_Q4_1 || FORMAT == KV_Q5_1 ? 4 : 2;
    constexpr int bits = FORMAT == KV_Q8_0 ? 8 : FORMAT == KV_Q5_0 || FORMAT == KV_Q5_1 ? 5 : FORMAT - KV_LM2 + 2;
    constexpr int code = FORMAT == KV_Q4_0 || FORMAT == KV_Q4_1 ? 4 : bits;
    constexpr int block = FORMAT >= KV_LM2 ? GROUP : 32;
    return FORMAT <= KV_BF16 ? 2 * values : values / block * (scales + block * code / 8);
}

template <int FORMAT, int GROUP>
inline float kv_ggml(const device uchar* row, int e) {
    constexpr bool shifted = FORMAT == KV_Q4_1 || FORMAT == KV_Q5_1, five = FORMAT == KV_Q5_0 || FORMAT == KV_Q5_1;
    const device uchar* block = row + kv_bytes<FORMAT, GROUP>(e / 32 * 32);
    const device uchar* codes = block + (shifted ? 4 : 2) + (five ? 4 : 0);
    const int j = e % 32;
    const float d = kv_half(block);
    if (FORMAT == KV_Q8_0) return d * float(as_type<char>(codes[j]));
    int code = codes[j % 16] >> (j / 16 * 4) & 15;
    if (five) code |= (block[(shifted ? 4 : 2) + j / 8] >> (j % 8) & 1) << 4;
    return shifted ? d * float(code) + kv_half(block + 2) : d * float(code - (five ? 16 : 8));
}

template <int FORMAT, int GROUP>
inline float kv_lloyd_max(const device uchar* row, int e, const device float* centroids) {
    const device uchar* block = row + kv_bytes<FORMAT, GROUP>(e / GROUP * GROUP);
    const device uchar* codes = block + 2;
    const int j = e % GROUP;
    int code;
    if (FORMAT == KV_LM4) {
        code = codes[j / 2] >> (j % 2 * 4) & 15;
    } else {
        code = codes[j / 4] >> (j % 4 * 2) & 3;
        if (FORMAT == KV_LM3) code |= (codes[GROUP / 4 + j / 8] >> (j % 8) & 1) << 2;
    }
    return centroids[code] * kv_half(block);
}

// Value e of the vector at `row`, which is stored in FORMAT
template <int FORMAT, int GROUP, class Element>
inline float kv_value(const device Element* row, int e, const device float* centroids) {
    if (FORMAT == KV_NATIVE) return float(row[e]);
    const device uchar* bytes = (const device uchar*)row;
    if (FORMAT == KV_F16) return kv_half(bytes + 2 * e);
    if (FORMAT == KV_BF16) return as_type<float>(uint(bytes[2 * e] | bytes[2 * e + 1] << 8) << 16);
    if (FORMAT < KV_LM2) return kv_ggml<FORMAT, GROUP>(bytes, e);
    return kv_lloyd_max<FORMAT, GROUP>(bytes, e, centroids);
}
