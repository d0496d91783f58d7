// operands: decodes codes of a cache to float16 operands of tensor cores. For a product of 16 columns, each lane t of four supplies two
// words of two columns each; for a row of D columns a lane has D / 8 words, two for each product.

// Formats of two and three bits, in heads of 256: lane t has columns 32 t to 32 t + 31 of each 128, and a word has columns i and i + 16
// of them, which are decoded together; else it has columns 8 t to 8 t + 7 of each 32, in order.
__device__ constexpr bool in_halves(Format f) { return is_lloyd_max(f) && f != LM4 && D == 256; }

// Position, in a row of float16 tiles that ldmatrix reads, of word i of lane t, and of a column among its halves.
__device__ constexpr int place_of_word(int i, int t) { return i / 2 * 8 + i % 2 * 4 + t; }
template <Format F>
__device__ constexpr int place_of_column(int c) {
    return in_halves(F) ? 2 * place_of_word(c / 128 * 16 + c % 4 * 4 + c % 16 / 4, c / 32 % 4) + c / 16 % 2
                        : 2 * place_of_word(c / 32 * 4 + c % 8 / 2, c / 8 % 4) + c % 2;
}
// Stores columns c to c + 7 of a row (c is a multiple of eight) at their places: at(i) is the address of half i of the row.
template <Format F, class At>
__device__ __forceinline__ void eight_to_places(At at, int c, uint4 eight) {
    const u32 w[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (in_halves(F))
            *at(place_of_column<F>(c + i)) = (u16)(w[i / 2] >> i % 2 * 16);
        else if (i % 2 == 0)
            *(u32*)at(place_of_column<F>(c + i)) = w[i / 2];
    }
}

// Loads N words of shared memory that begin `odd` bytes, 0 or 2, after a multiple of four.
template <int N>
__device__ __forceinline__ void words_at(const u8* from, int odd, u32 (&w)[N]) {
    const u32* at = (const u32*)(from - odd);
    u32 a = at[0];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32 b = i + 1 < N || odd ? at[i + 1] : 0;
        w[i] = __funnelshift_r(a, b, odd * 8), a = b;
    }
}

// Sixteen codes x and sixteen y of two or three bits: out[i] holds x[c] and y[c], where c = i / 4 + i % 4 * 4. `highs` has the
// third bits in bytes: x[0] to x[7], y[0] to y[7], x[8] to x[15], y[8] to y[15]. Scales: of the first eight codes, of the others.
template <Format F>
__device__ __forceinline__ void pairs_of(u32 x, u32 y, u32 highs, u32 scale, u32 other, u32 (&out)[16]) {
    const u32 low[2] = {(x & 0x0f0f0f0fu) | (y << 4 & 0xf0f0f0f0u), (x >> 4 & 0x0f0f0f0fu) | (y & 0xf0f0f0f0u)};
    const u32 swap = (highs ^ highs >> 4) & 0x00f000f0u, high = highs ^ swap ^ swap << 4;  // nibbles of x and of y alternately
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 codes = low[i / 2] >> i % 2 * 2 & 0x33333333u;
        if (F != LM2) codes |= (i < 2 ? high << 2 - i : high >> i - 2) & 0x44444444u;
        look_up<F, 128>(codes, scale, other, out + 4 * i);
    }
}

// Nibbles of eight Lloyd-Max codes, values `first` to `first` + 7 of a group that begins `odd` bytes after a multiple of four.
template <Format F>
__device__ __forceinline__ u32 nibbles(const u8* group, int first, int odd) {
    if constexpr (F == LM4) {
        u32 w[1];
        words_at(group + 2 + first / 2, 2 - odd, w);
        return w[0];
    } else {
        const u32 codes = spread2(*(const u16*)(group + 2 + first / 4));
        if constexpr (F == LM2) return codes;
        return codes | spread1(group[2 + 32 + first / 8]) << 2;
    }
}

// Bytes of 4 N codes of a ggml format, from `first` on of the block of 32 that begins `odd` bytes after a multiple of four.
template <Format F, int N>
__device__ __forceinline__ void code_bytes(const u8* block, int first, int odd, u32 (&w)[N]) {
    words_at(block + 2 + (F == Q8_0 ? first : first % 16), 2 - odd, w);
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = F == Q8_0 ? w[i] ^ 0x80808080u : w[i] >> first / 16 * 4 & 0x0f0f0f0fu;
}
template <Format F>
__device__ __forceinline__ u32 scaled(u32 bytes, u32 which, u32 scale) {  // two codes
    return mul_half2(add_half2(__byte_perm(bytes, 0x64646464u, which), F == Q8_0 ? 0xe480e480u : 0xe408e408u), scale);
}

// Words of lane t of a row of keys that begins `odd` bytes after a multiple of four: 16 of columns 128 n and on, or 4 of columns 32 n and
// on.
template <Format F>
__device__ constexpr int key_words() { return in_halves(F) ? 16 : 4; }
template <Format F>
__device__ __forceinline__ void words_of_keys(const u8* row, int n, int t, int odd, u32 (&out)[key_words<F>()]) {
    if constexpr (in_halves(F)) {
        const int at = n * block_bytes(F, D);
        const u8* codes = row + at + 2;
        u32 low[2], high[1] = {0};
        words_at(codes + t * 8, (odd + at + 2) % 4, low);
        if (F != LM2) words_at(codes + 32 + t * 4, (odd + at + 2) % 4, high);
        const u32 scale = twice(*(const u16*)(row + at));
        pairs_of<F>(low[0], low[1], __byte_perm(high[0], 0, 0x3120), scale, scale, out);
    } else if constexpr (is_lloyd_max(F)) {
        const int at = n / 4 * block_bytes(F, D);
        const u32 scale = twice(*(const u16*)(row + at));
        look_up<F, 128>(nibbles<F>(row + at, n % 4 * 32 + t * 8, (odd + at) % 4), scale, scale, out);
    } else {
        const u8* block = row + n * block_bytes(F, D);
        const u32 scale = twice(*(const u16*)block);
        u32 w[2];
        code_bytes<F>(block, t * 8, (odd + n * block_bytes(F, D)) % 4, w);
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = scaled<F>(w[i / 2], i % 2 ? 0x4342 : 0x4140, scale);
    }
}

// A row's columns 32 * block and on, as float16, to the places of their words in a row of a tile: at(i) is the address of its 16
// bytes number i.
template <Format F, class At>
__device__ __forceinline__ void unpack_to_places(At at, const u8* row, int block) {
    if constexpr (in_halves(F)) {
        u32 w[16];
        words_of_keys<F>(row, block / 4, block % 4, (u32)(u64)row & 2, w);
#pragma unroll
        for (int i = 0; i < 16; i++) ((u32*)at(block / 4 * 16 + place_of_word(i, 0) / 4))[block % 4] = w[i];
    } else {
        unpack_32_to<F, D, true>([&](int i) { return at(block * 4 + i); }, row, block);
    }
}
