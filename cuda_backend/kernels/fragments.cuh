// fragments: codes of a cache straight into the B fragments of mma.m16n8k16, from rows as the cache has them
// Layout    Of keys a lane takes pairs 8 t + 2 i of 32 channels, where an unpermuted fragment of two steps has them at
//           16 (i / 2) + 8 (i % 2) + 2 t: queries are stored in that order. Of values column n of block 4 h + i is channel
//           128 h + 32 c + 4 n + i of warp c: sums are written in that order
// Numbers   the float16 numbers of decode.cuh

__device__ constexpr bool is_direct(Format f, int WIDE) { return (is_lloyd_max(f) || f == Q8_0) && WIDE % 128 == 0; }

// Lloyd-Max codes of N = 4 or 8 channels from `first` of a group of 128 on, a nibble each.
template <Format F, int N>
__device__ __forceinline__ u32 nibbles_of(const u8* codes, int first) {
    if constexpr (F == LM4) {
        const u16* at = (const u16*)(codes + first / 2);
        return N == 8 ? at[0] | (u32)at[1] << 16 : at[0];
    }
    const u8* low = codes + first / 4;
    u32 nibbles = spread2(N == 8 ? *(const u16*)low : *low);
    if (F != LM2) nibbles |= spread1(N == 8 ? codes[32 + first / 8] : codes[32 + first / 8] >> first % 8 & 15) << 2;
    return nibbles;
}

// Channels 32 * block + 8 * t to that + 7 of a row of keys, in pairs.
template <Format F, int WIDE>
__device__ __forceinline__ void keys_of(const u8* row, int block, int t, u32 (&w)[4]) {
    if constexpr (F == Q8_0) {
        const u8* from = row + block * 34;
        const u32 scale = twice(*(const u16*)from);
        u32 codes[2];
        load_words(codes, from + 2 + 8 * t);
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = mul_half2(add_half2(__byte_perm(codes[i / 2] ^ 0x80808080u, 0x64646464u, i % 2 ? 0x4342 : 0x4140), 0xe480e480u), scale);
    } else {
        const u8* from = row + block / 4 * block_bytes(F, WIDE);
        look_up<F, 128>(nibbles_of<F, 8>(from + 2, block % 4 * 32 + 8 * t), twice(*(const u16*)from), w);
    }
}

// Channels 128 * h + 32 * c + 4 * g to that + 3 of two rows of values, a pair for each channel.
template <Format F, int WIDE>
__device__ __forceinline__ void values_of(const u8* row, int h, int c, int g, u32 (&w)[4]) {
    constexpr int bytes = row_bytes(F, WIDE);
    const u8* from = row + (F == Q8_0 ? (4 * h + c) * 34 : h * block_bytes(F, WIDE));
    const u32 scale = *(const u16*)from | (u32) * (const u16*)(from + bytes) << 16;
    if constexpr (F == Q8_0) {
        const u16 *a = (const u16*)(from + 2 + 4 * g), *b = (const u16*)(from + bytes + 2 + 4 * g);
        const u32 both[2] = {__byte_perm(a[0], b[0], 0x5140) ^ 0x80808080u, __byte_perm(a[1], b[1], 0x5140) ^ 0x80808080u};
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = mul_half2(add_half2(__byte_perm(both[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140), 0xe480e480u), scale);
    } else {
        u32 codes[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 x = nibbles_of<F, 4>(from + 2 + i * bytes, 32 * c + 4 * g);
            codes[i] = (x | x << 8) & 0x00ff00ffu;
            codes[i] = (codes[i] | codes[i] << 4) & 0x0f0f0f0fu;
        }
        look_up<F, 128>(codes[0] | codes[1] << 4, scale, w);
    }
}

// Where a channel of a tile of float16 values lies, so that ldmatrix gives it to the column of the codes.
__device__ __forceinline__ int column_of(int channel) {
    const int i = channel % 4;
    return (channel / 128 * 2 + i / 2) * 64 + channel % 128 / 32 * 16 + i % 2 * 8 + channel % 32 / 4;
}
