// codebooks: eight weights of a GGUF block whose codes are entries of a codebook, in the form of include/blocks.h
// Eight neighbouring columns are a part: an entry of eight numbers (IQ2) or two of four (IQ3), one sign bit per column, and
// a scale of 16 or 32 columns. The codebook comes as words of four magnitudes. Of seven stored sign bits, the eighth makes
// the number of minus signs even.
// Numbers   products of at most 22 bits, so exact in float

inline float4 signed_four(uint magnitudes, uint signs) {
    const float4 v = bytes(magnitudes);
    return float4(signs & 1 ? -v.x : v.x, signs & 2 ? -v.y : v.y, signs & 4 ? -v.z : v.z, signs & 8 ? -v.w : v.w);
}

inline uint even_signs(uint seven) {
    return seven | (popcount(seven) & 1) << 7;
}

template <class Words>
inline uint byte_at(Words words, int i) {
    return words[i / 4] >> (i % 4 * 8) & 255;
}

struct EightColumns {
    static int column(int part) { return part * 8; }
    static int apart() { return 4; }
};

template <>
struct Block<16> : EightColumns {  // IQ2_XXS: for 32 columns a word of 4 codes, one of 4 times 7 signs and a scale; d
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook codebook, int part, thread float4& a, thread float4& b) {
        const int group = part / 4, i = part % 4;
        const uint code = words[2 * group] >> (8 * i) & 255, rest = words[2 * group + 1];
        const uint signs = even_signs(rest >> (7 * i) & 127);
        const float scale = half_at(halves, 0) * (float(rest >> 28) + 0.5f) * 0.25f;
        a = signed_four(codebook[2 * code], signs) * scale;
        b = signed_four(codebook[2 * code + 1], signs >> 4) * scale;
    }
};

template <>
struct Block<17> : EightColumns {  // IQ2_XS: 32 codes of 9 bits with 7 signs, 16 scales of 4 bits; d
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook codebook, int part, thread float4& a, thread float4& b) {
        const uint both = words[part / 2] >> (part % 2 * 16), code = both & 511;
        const uint signs = even_signs(both >> 9 & 127), fine = words[16 + part / 16] >> (part / 2 % 8 * 4) & 15;
        const float scale = half_at(halves, 0) * (float(fine) + 0.5f) * 0.25f;
        a = signed_four(codebook[2 * code], signs) * scale;
        b = signed_four(codebook[2 * code + 1], signs >> 4) * scale;
    }
};

template <>
struct Block<22> : EightColumns {  // IQ2_S: 32 bytes of codes, 32 of signs, 32 high pairs, 16 scales of 4 bits; d
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook codebook, int part, thread float4& a, thread float4& b) {
        const uint code = byte_at(words, part) | (words[16 + part / 16] >> (part % 16 * 2) & 3) << 8;
        const uint signs = byte_at(words + 8, part), fine = words[18 + part / 16] >> (part / 2 % 8 * 4) & 15;
        const float scale = half_at(halves, 0) * (float(fine) + 0.5f) * 0.25f;
        a = signed_four(codebook[2 * code], signs) * scale;
        b = signed_four(codebook[2 * code + 1], signs >> 4) * scale;
    }
};

template <>
struct Block<18> : EightColumns {  // IQ3_XXS: 64 bytes of codes, for 32 columns a word of 4 times 7 signs and a scale; d
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook codebook, int part, thread float4& a, thread float4& b) {
        const uint codes = words[part / 2] >> (part % 2 * 16), rest = words[16 + part / 4];
        const uint signs = even_signs(rest >> (part % 4 * 7) & 127);
        const float scale = half_at(halves, 0) * (float(rest >> 28) + 0.5f) * 0.5f;
        a = signed_four(codebook[codes & 255], signs) * scale;
        b = signed_four(codebook[codes >> 8 & 255], signs >> 4) * scale;
    }
};

template <>
struct Block<21> : EightColumns {  // IQ3_S: 64 bytes of codes, 64 high bits, 32 bytes of signs, 8 scales of 4 bits; d
    template <class Words, class Halves, class Codebook>
    static void decode(Words words, Halves halves, Codebook codebook, int part, thread float4& a, thread float4& b) {
        const uint codes = words[part / 2] >> (part % 2 * 16), high = words[16 + part / 16] >> (part % 16 * 2);
        const uint signs = byte_at(words + 18, part);
        const float scale = half_at(halves, 0) * (2.0f * float(words[26] >> (part / 4 * 4) & 15) + 1.0f);
        a = signed_four(codebook[(codes & 255) | (high & 1) << 8], signs) * scale;
        b = signed_four(codebook[(codes >> 8 & 255) | (high >> 1 & 1) << 8], signs >> 4) * scale;
    }
};
