// decode: converts 32 values of a row of a cache (formats.cuh) to float16. Codes of Lloyd-Max formats are looked up in a table by byte
// permutes; codes of ggml's formats become float16 numbers by adding 1024 in their bits. Both are multiplied by their block's scale

__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Selects bytes of a (0 to 3) and b (4 to 7) by the nibbles of `which`, none of which is above 7; __byte_perm would mask them again.
__device__ __forceinline__ u32 permuted(u32 a, u32 b, u32 which) {
    u32 c;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(which));
    return c;
}

// Loads N words from an even address.
template <int N>
__device__ __forceinline__ void load_words(u32 (&w)[N], const u8* from) {
    const u32 odd = (u32)(u64)from & 2, shift = odd * 8;
    const u32* at = (const u32*)(from - odd);  // the compiler still knows if it is shared memory
    u32 a = at[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32 b = i + 1 < N || shift ? at[i + 1] : 0;
        w[i] = __funnelshift_r(a, b, shift), a = b;
    }
}
__device__ __forceinline__ u32 twice(u16 half) { return half | (u32)half << 16; }

// Joins two bits and two bits, or a bit each, of eight codes to nibbles.
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

// Looks up eight codes, a nibble each, in a table of at most eight: out[i] holds values 2 i and 2 i + 1. Two scales: one for the first
// four values, one for the others.
template <Format F, int GROUP>
__device__ __forceinline__ void look_up(u32 codes, u32 scale, u32 other, u32* out) {
    constexpr int first = F == LM4 ? 8 : 0, more = F == LM2 ? 0 : first + 4;  // LM4: magnitudes
    constexpr u32 low0 = table_bytes<F, GROUP>(first, false), low1 = table_bytes<F, GROUP>(more, false);
    constexpr u32 high0 = table_bytes<F, GROUP>(first, true), high1 = table_bytes<F, GROUP>(more, true);
    u32 negative = 0;
    if (F == LM4) negative = ~codes & 0x88888888u, codes = (codes ^ (negative - (negative >> 3))) & 0x77777777u;
    u32 high[2] = {permuted(high0, high1, codes), permuted(high0, high1, codes >> 16)};
    const u32 low[2] = {permuted(low0, low1, codes), permuted(low0, low1, codes >> 16)};
    if (F == LM4) {
        const u32 even = negative << 4 & 0x80808080u, odd = negative & 0x80808080u;
        high[0] ^= __byte_perm(even, odd, 0x5140), high[1] ^= __byte_perm(even, odd, 0x7362);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[2 * i] = mul_half2(__byte_perm(low[i], high[i], 0x5140), i ? other : scale);
        out[2 * i + 1] = mul_half2(__byte_perm(low[i], high[i], 0x7362), i ? other : scale);
    }
}

// Values 32 * block to 32 * block + 31 of a row of `WIDE`.
template <Format F, int WIDE>
__device__ __forceinline__ void read_32(const u8* row, int block, u32 (&out)[16]) {
    constexpr int per = block_values(F, WIDE) / 32;
    const u8* from = row + block / per * block_bytes(F, WIDE);
    if constexpr (F == F16) {
        load_words(out, from);
    } else if constexpr (F == BF16) {
        load_words(out, from);
#pragma unroll
        for (int i = 0; i < 16; i++) out[i] = to_half2(__uint_as_float(out[i] << 16), __uint_as_float(out[i] & 0xffff0000u));
    } else if constexpr (is_lloyd_max(F)) {
        constexpr int group = wht_group(WIDE);
        const int part = block % per;
        const u32 scale = twice(*(const u16*)from);
        if constexpr (F == LM4) {
            u32 w[4];
            load_words(w, from + 2 + part * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) look_up<F, group>(w[i], scale, scale, out + 4 * i);
        } else {
            u32 low[2], high[1] = {0};
            load_words(low, from + 2 + part * 8);
            if (F != LM2) load_words(high, from + 2 + group / 4 + part * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 codes = spread2(low[i / 2] >> i % 2 * 16 & 0xffffu);
                if (F != LM2) codes |= spread1(high[0] >> 8 * i & 255) << 2;
                look_up<F, group>(codes, scale, scale, out + 4 * i);
            }
        }
    } else {
        constexpr bool has_low = F == Q4_1 || F == Q5_1, five = F == Q5_0 || F == Q5_1;
        // float16 of 1024 + code, and the number to subtract from it
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

// The place of pair `i` of 32 values if eight adjacent values are one lane's operands of two products: product, half, lane.
__device__ constexpr int operand_place(int i) { return i / 2 % 2 * 8 + i % 2 * 4 + i / 4; }

// Decodes 32 values of a row to float16, to the 16 bytes each at at(0) to at(3); AS_OPERANDS: in the order of operand_place.
template <Format F, int WIDE, bool AS_OPERANDS, class At>
__device__ __forceinline__ void unpack_32_to(At at, const u8* row, int block) {
    if constexpr (F == BF16) {  // few values at a time, to spare registers
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            u32 w[4];
            load_words(w, row + block * 64 + i * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                w[j] = to_half2(__uint_as_float(w[j] << 16), __uint_as_float(w[j] & 0xffff0000u));
                if (AS_OPERANDS) ((u32*)at(operand_place(j) / 4))[i] = w[j];
            }
            if (!AS_OPERANDS) *at(i) = make_uint4(w[0], w[1], w[2], w[3]);
        }
        return;
    }
    u32 w[16], v[16];
    read_32<F, WIDE>(row, block, w);
#pragma unroll
    for (int i = 0; i < 16; i++) v[AS_OPERANDS ? operand_place(i) : i] = w[i];
#pragma unroll
    for (int i = 0; i < 4; i++) *at(i) = make_uint4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
}
// Decodes 32 values of a row to float16 at `to`, a multiple of 16 bytes.
template <Format F, int WIDE>
__device__ __forceinline__ void unpack_32(u16* to, const u8* row, int block) {
    unpack_32_to<F, WIDE, false>([&](int i) { return (uint4*)to + i; }, row, block);
}

// The number of a tq3_0 code.
template <int GROUP>
__device__ __forceinline__ float number_of(u32 code) {
    constexpr Codes<TQ3_0, GROUP> table;
    constexpr float a = table.centroid[4], b = table.centroid[5], c = table.centroid[6], d = table.centroid[7];
    const u32 from_0 = code & 4 ? code : ~code;
    const float magnitude = from_0 & 2 ? (from_0 & 1 ? d : c) : from_0 & 1 ? b : a;
    return code & 4 ? magnitude : -magnitude;
}

// The square root of pi / 2 / GROUP: times the norm of a residual, the magnitude of each of its signs.
template <int GROUP>
__device__ constexpr float root_of_half_pi() { return GROUP == 128 ? 0.11077837f : GROUP == 64 ? 0.15666426f : 0.22155673f; }

// Decodes values 128 * chunk to 128 * chunk + 127 of a row of turboquant keys to float16, by a warp: four values per lane.
template <int WIDE>
__device__ __forceinline__ void unpack_turboquant(u16* to, const u8* row, int chunk, int lane) {
    constexpr int GROUP = wht_group(WIDE);
    const int d = chunk * 128 + lane * 4, own = lane % (GROUP / 4);
    // lanes beyond a row read its last group
    const u8* from = row + (WIDE % 128 ? min(d, WIDE - 1) / GROUP : chunk) * block_bytes(TURBOQUANT, WIDE);
    const u32 signs = from[4 + GROUP / 8 * 3 + own / 2] >> own % 2 * 4;
    float4 v = make_float4(signs & 1 ? 1.0f : -1.0f, signs & 2 ? 1.0f : -1.0f, signs & 4 ? 1.0f : -1.0f, signs & 8 ? 1.0f : -1.0f);
    v = projected_back<GROUP>(v, own);
    __syncwarp();  // the following reads come after it, to spare registers
    const float norm = from_half(((const u16*)from)[0]), by = from_half(((const u16*)from)[1]) * root_of_half_pi<GROUP>();
    const u32 low = from[4 + own], high = from[4 + GROUP / 4 + own / 2] >> own % 2 * 4;
    float e[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) e[i] = (number_of<GROUP>((low >> 2 * i & 3) | (high >> i & 1) << 2) + by * e[i]) * norm;
    if (d < WIDE) *(uint2*)(to + lane * 4) = make_uint2(to_half2(e[0], e[1]), to_half2(e[2], e[3]));
}
