// blocks: eight weights of a GGUF block, as common/quants.py decodes them
// Block<TYPE>, TYPE being ggml's number of the type, cuts a block of BLOCK weights into BLOCK / 8 parts of two fours:
// `a` starts at `column(part)`, `b` lies `apart()` columns after it. A part is one word of codes, or half of one.
// A block's words are its bytes without the 16-bit fields, which come as `halves`, in the order of the file.
// Numbers   products of at most 24 bits, so exact in float; Q2_K's difference and Q5_1's sum are rounded once

constant float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline float4 bytes(uint word) {
    return float4(as_type<uchar4>(word));
}

inline float4 iq4(uint nibbles) {
    const uchar4 code = as_type<uchar4>(nibbles & 0x0f0f0f0f);
    return float4(IQ4_VALUES[code.x], IQ4_VALUES[code.y], IQ4_VALUES[code.z], IQ4_VALUES[code.w]);
}

template <class Halves>
inline float half_at(Halves halves, int i) {
    return float(as_type<half>(halves[i]));
}

template <int TYPE>
struct Block;

template <>
struct Block<14> {  // Q6_K: 32 words of low nibbles, 16 of high pairs, 16 scales of 8 bits; d
    static int column(int part) { return part / 16 * 128 + part % 16 / 8 * 32 + part % 8 * 4; }
    static int apart() { return 64; }
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook, int part, thread float4& a, thread float4& b) {
        const int half_block = part / 16, run = part % 16 / 8;
        const uint low = words[part], high = words[32 + half_block * 8 + part % 8] >> (2 * run);
        const int shift = 24 - 8 * (2 * run + part % 8 / 4);
        const float d = half_at(halves, 0);
        a = bytes((low & 0x0f0f0f0f) | (high & 0x03030303) << 4) - 32.0f;
        b = bytes((low >> 4 & 0x0f0f0f0f) | (high >> 4 & 0x03030303) << 4) - 32.0f;
        a = a * (d * float(int(words[48 + 2 * half_block] << shift) >> 24));
        b = b * (d * float(int(words[49 + 2 * half_block] << shift) >> 24));
    }
};

// Q2_K and Q3_K: word w of the codes holds columns of 4 runs of 32, two of which are a part's.
inline int two_bit_column(int part) {
    return part % 16 / 8 * 128 + part / 16 * 64 + part % 8 * 4;
}

template <>
struct Block<10> {  // Q2_K: 16 bytes of scales and minima, 16 words of codes; d, dmin
    static int column(int part) { return two_bit_column(part); }
    static int apart() { return 32; }
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook, int part, thread float4& a, thread float4& b) {
        const int group = column(part) / 16;
        const uint codes = words[4 + part % 16] >> (part / 16 * 4);
        const uint scales = words[group / 4] >> (group % 4 * 8), next = words[group / 4] >> (group % 4 * 8 + 16);
        const float d = half_at(halves, 0), least = half_at(halves, 1);
        a = bytes(codes & 0x03030303) * (d * float(scales & 15)) - least * float(scales >> 4 & 15);
        b = bytes(codes >> 2 & 0x03030303) * (d * float(next & 15)) - least * float(next >> 4 & 15);
    }
};

template <>
struct Block<11> {  // Q3_K: 8 words of high bits, 16 of low pairs, 16 scales of 6 bits in 3; d
    static int column(int part) { return two_bit_column(part); }
    static int apart() { return 32; }
    template <class Words>
    static float scale(Words words, int group) {
        const uint low = words[24 + group % 8 / 4] >> (group % 4 * 8 + group / 8 * 4) & 15;
        const uint high = words[26] >> (group % 4 * 8 + group / 4 * 2) & 3;
        return float(int(low | high << 4) - 32);
    }
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook, int part, thread float4& a, thread float4& b) {
        const int group = column(part) / 16;
        const uint low = words[8 + part % 16] >> (part / 16 * 4);
        const uint high = words[part % 8] >> (part % 16 / 8 * 4 + part / 16 * 2);
        const float d = half_at(halves, 0);
        a = (bytes((low & 0x03030303) | (high & 0x01010101) << 2) - 4.0f) * (d * scale(words, group));
        b = (bytes((low >> 2 & 0x03030303) | (high >> 1 & 0x01010101) << 2) - 4.0f) * (d * scale(words, group + 2));
    }
};

// Q5_0 and Q5_1: a word of fifth bits, 4 of nibbles; the fifth bits of four columns as bytes.
inline uint fifth(uint bits, int column) {
    return ((bits >> column & 15) * 0x00204081 & 0x01010101) << 4;
}
struct FiveBits {
    static int column(int part) { return part * 4; }
    static int apart() { return 16; }
    template <class Words>
    static void codes(Words words, int part, thread float4& a, thread float4& b) {
        a = bytes((words[1 + part] & 0x0f0f0f0f) | fifth(words[0], part * 4));
        b = bytes((words[1 + part] >> 4 & 0x0f0f0f0f) | fifth(words[0], 16 + part * 4));
    }
};

template <>
struct Block<6> : FiveBits {  // Q5_0: d
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook, int part, thread float4& a, thread float4& b) {
        const float d = half_at(halves, 0);
        codes(words, part, a, b);
        a = (a - 16.0f) * d, b = (b - 16.0f) * d;
    }
};

template <>
struct Block<7> : FiveBits {  // Q5_1: d, m
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook, int part, thread float4& a, thread float4& b) {
        const float d = half_at(halves, 0), least = half_at(halves, 1);
        codes(words, part, a, b);
        a = a * d + least, b = b * d + least;
    }
};

template <>
struct Block<20> {  // IQ4_NL: 4 words of codes; d
    static int column(int part) { return part * 4; }
    static int apart() { return 16; }
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook, int part, thread float4& a, thread float4& b) {
        const float d = half_at(halves, 0);
        a = iq4(words[part]) * d;
        b = iq4(words[part] >> 4) * d;
    }
};

template <>
struct Block<23> {  // IQ4_XS: a word of the scales' low nibbles, 32 of codes; d, the scales' high pairs
    static int column(int part) { return part / 4 * 32 + part % 4 * 4; }
    static int apart() { return 16; }
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook, int part, thread float4& a, thread float4& b) {
        const int group = part / 4;
        const uint scale = (words[0] >> (4 * group) & 15) | (uint(halves[1]) >> (2 * group) & 3) << 4;
        const float d = half_at(halves, 0) * float(int(scale) - 32);
        a = iq4(words[1 + part]) * d;
        b = iq4(words[1 + part] >> 4) * d;
    }
};
