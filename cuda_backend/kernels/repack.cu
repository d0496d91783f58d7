// repack: converts rows of a GGUF block type to the units that linear.cu reads
// Meaning   common/quants.py dequantize of the same rows   Launcher  cuda_backend/weights.py
// In        rows [n][row_bytes] as in the file             Out       units of tile.cuh, from row `first` (a multiple of 16)
//           bad    set to 1 if a scale is not finite
// Build     one type of tile.cuh
// Work      a warp per tile of 16 rows x KBLOCK columns; rows and columns that pad the matrix get zero scales
// Numbers   exact: the same codes and scales, except 6-bit scales of Q3_K and IQ4_XS, which become bytes (tile.cuh)
// Bound     bytes read and written
// Tried     scales checked by the host while it copies -> 0.71 s against 0.59 for a file of 16.5 GB; by twelve other threads 1.6
//             (H200)

// A block of COLUMNS in the file: its bytes, the number of its float16 scales, and their offset.
#if defined(Q4_K) || defined(Q5_K) || defined(Q6_K) || defined(Q2_K) || defined(Q3_K) || defined(IQ4_XS)
#define COLUMNS 256
#else
#define COLUMNS 32
#endif
#if defined(Q4_K)
#define BLOCK 144
#define AT 0
#define FLOATS 2
#elif defined(Q5_K)
#define BLOCK 176
#define AT 0
#define FLOATS 2
#elif defined(Q6_K)
#define BLOCK 210
#define AT 208
#define FLOATS 1
#elif defined(Q3_K)
#define BLOCK 110
#define AT 108
#define FLOATS 1
#elif defined(Q2_K)
#define BLOCK 84
#define AT 80
#define FLOATS 2
#elif defined(IQ4_XS)
#define BLOCK 136
#define AT 0
#define FLOATS 1
#elif defined(MXFP4)
#define BLOCK 17
#define AT 0
#define FLOATS 0  // a byte, an exponent
#elif defined(Q4_1)
#define BLOCK 20
#define AT 0
#define FLOATS 2
#elif defined(Q5_0)
#define BLOCK 22
#define AT 0
#define FLOATS 1
#elif defined(Q5_1)
#define BLOCK 24
#define AT 0
#define FLOATS 2
#elif defined(Q8_0)
#define BLOCK 34
#define AT 0
#define FLOATS 1
#else
#define BLOCK 18
#define AT 0
#define FLOATS 1
#endif

// The code of column `k`, already in two's complement where tile.cuh unpacks it as signed.
__device__ __forceinline__ u32 code_of(const u8* row, int k) {
#if defined(Q4_0) || defined(IQ4_NL) || defined(Q4_1) || defined(MXFP4)
    const u8* b = row + k / 32 * BLOCK + BLOCK - 16;
    const u32 code = (b[k % 16] >> (k % 32 / 16 * 4)) & 15;
#ifdef Q4_0
    return code ^ 8;
#else
    return code;
#endif
#elif defined(Q5_0) || defined(Q5_1)
    const u8* b = row + k / 32 * BLOCK + 2 * FLOATS;
    const u32 code = ((b[4 + k % 16] >> (k % 32 / 16 * 4)) & 15) | ((b[k % 32 / 8] >> (k % 8)) & 1) << 4;
#ifdef Q5_0
    return code ^ 16;
#else
    return code;
#endif
#elif defined(Q8_0)
    return row[k / 32 * BLOCK + 2 + k % 32];
#else
    const int i = k % 256;
#if defined(Q2_K)
    return (row[k / 256 * BLOCK + 16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
#elif defined(Q3_K)
    const u8* b = row + k / 256 * BLOCK;
    const u32 low = (b[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
    return (low | ((b[i % 32] >> (i / 32)) & 1) << 2) ^ 4;
#elif defined(Q4_K)
    return (row[k / 256 * BLOCK + 16 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4)) & 15;
#elif defined(Q5_K)
    const u8* b = row + k / 256 * BLOCK;
    return ((b[48 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4)) & 15) | ((b[16 + i % 32] >> (i / 32)) & 1) << 4;
#elif defined(Q6_K)
    const u8* b = row + k / 256 * BLOCK;
    const u32 low = (b[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15;
    return (low | ((b[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3) << 4) ^ 32;
#elif defined(IQ4_XS)
    return (row[k / 256 * BLOCK + 8 + i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4)) & 15;
#endif
#endif
}

// The scales of one row (0..15 of the tile) for columns from `k`; `row` is null for a row that pads the matrix.
__device__ void put_scales(u8* scales, int r, const u8* row, int k, int K) {
#if defined(Q4_K) || defined(Q5_K)
    const u8* b = row + k / 256 * BLOCK;
    u32 high = 0;
    for (int i = 0; i < 4; i++) scales[r * 16 + i] = row ? b[i] : 0;
    for (int j = 0; j < 8; j++) {  // 6 bits each: four scales, four minima, and below their high bits those of the other eight
        int scale = 0, minimum = 0;
        if (row) {
            const u8 *of = b + 4 + j % 4;
            scale = j < 4 ? of[0] & 63 : (of[8] & 15) | of[0] >> 6 << 4;
            minimum = j < 4 ? of[4] & 63 : of[8] >> 4 | of[4] >> 6 << 4;
        }
        scales[r * 16 + 4 + j] = (u8)(scale << 2 | minimum & 3);
        high |= (u32)(minimum >> 2) << (j % 4 * 8 + j / 4 * 4);
    }
    ((u32*)scales)[r * 4 + 3] = high << 2 | high >> 30;
#elif defined(Q6_K) || defined(Q3_K)
    for (int j = 0; j < 16; j++) {
        int scale = 0;
        if (row) {
#ifdef Q6_K
            scale = row[k / 256 * BLOCK + 192 + j];
#else
            const u8* s = row + k / 256 * BLOCK + 96;
            scale = ((s[j % 8] >> (j / 8 * 4)) & 15 | ((s[8 + j % 4] >> (j / 4 * 2)) & 3) << 4) - 32;
#endif
        }
        scales[r * 16 + j] = (u8)scale;
    }
    const u8* d = row + k / 256 * BLOCK + AT;
    for (int i = 0; i < 2; i++) scales[256 + r * 2 + i] = row ? d[i] : 0;
#elif defined(Q2_K)
    const u8* b = row + k / 256 * BLOCK;
    for (int j = 0; j < 16; j++) scales[r * 16 + j] = row ? b[j] : 0;
    for (int i = 0; i < 4; i++) scales[256 + r * 4 + i] = row ? b[AT + i] : 0;
#elif defined(IQ4_XS)
    const u8* b = row + k / 256 * BLOCK;
    for (int j = 0; j < 8; j++) {
        int scale = 0;
        if (row) scale = ((b[4 + j / 2] >> (j % 2 * 4)) & 15 | ((b[2 + j / 4] >> (j % 4 * 2)) & 3) << 4) - 32;
        scales[r * 8 + j] = (u8)scale;
    }
    for (int i = 0; i < 2; i++) scales[128 + r * 2 + i] = row ? b[i] : 0;
#elif defined(MXFP4)
    for (int j = 0; j < 8; j++) scales[r * 8 + j] = row && k + j * 32 < K ? row[(k / 32 + j) * BLOCK] : 0;
#else  // a block of 32 columns per group, led by its float16 scale (and offset)
    for (int j = 0; j < GROUPS; j++)
        for (int i = 0; i < 2 * FLOATS; i++)
            scales[(r * GROUPS + j) * 2 * FLOATS + i] = row && k + j * 32 < K ? row[(k / 32 + j) * BLOCK + i] : 0;
#endif
}

// Whether a scale of the KBLOCK columns from `k` on is not finite.
__device__ __forceinline__ bool is_bad(const u8* row, int k, int K) {
    bool bad = false;
    for (int j = 0; j < KBLOCK && k + j < K; j += COLUMNS) {
        const u8* block = row + (k + j) / COLUMNS * BLOCK + AT;
#if FLOATS
        for (int i = 0; i < FLOATS; i++) bad |= (block[2 * i + 1] & 0x7c) == 0x7c;
#else
        bad |= *block == 0xff;
#endif
    }
    return bad;
}

extern "C" __global__ void repack(const u8* rows, s64 row_bytes, int n, int K, int first, int tiles, int k_blocks, u8* units, u32* bad) {
    const int lane = threadIdx.x % 32, at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= tiles * k_blocks) return;
    const int tile = at / k_blocks, k_block = at % k_blocks, row0 = tile * 16, t16 = first / 16 + tile;
    u8* to = units + ((s64)(t16 / 8) * k_blocks + k_block) * UNIT_BYTES + t16 % 8 * TILE_BYTES;
    for (int j = 0; j < KBLOCK / 32; j++) {
#if P6
        u32 words[3] = {0, 0, 0};
#endif
#if P4
        u32 low[2] = {0, 0};
#endif
#if P2
        u32 middle = 0;
#endif
#if P1
        u32 high = 0;
#endif
        for (int i = 0; i < 4; i++)
            for (int b = 0; b < 4; b++) {
                const int r = row0 + lane / 4 + i % 2 * 8, k = k_block * KBLOCK + j * 32 + i / 2 * 16 + lane % 4 * 4 + b;
                const u32 code = r < n && k < K ? code_of(rows + r * row_bytes, k) : 0;
#if P8
                to[(j * 32 + lane) * 16 + i * 4 + b] = (u8)code;
#elif P6
                for (int n = 0; n < 3; n++) {
                    const u32 bits = i == 3 ? code >> (4 - 2 * n) & 3 : i == n ? (code & 63) << 2 : 0;
                    words[n] |= bits << (b * 8);
                }
#elif P4
                low[i / 2] |= (code & 15) << (b * 8 + i % 2 * 4);
#endif
#if P2
                middle |= (code & 3) << (b * 8 + i * 2);
#endif
#if P1
                high |= (code >> (4 * P4 + 2 * P2) & 1) << (b * 8 + i);
#endif
            }
#if P6
        for (int n = j * 3; n < j * 3 + 3; n++) ((u32*)to)[(n / 4 * 32 + lane) * 4 + n % 4] = words[n - j * 3];
#endif
#if P4
        *(uint2*)(to + AT4 + ((j / 2) * 32 + lane) * 16 + j % 2 * 8) = make_uint2(low[0], low[1]);
#endif
#if P2
        *(u32*)(to + AT2 + ((j / 4) * 32 + lane) * 16 + j % 4 * 4) = middle;
#endif
#if P1
        u32* word = (u32*)(to + AT1 + lane * 16 + j / 2 * 4);
        *word = j % 2 ? *word | high << 4 : high;
#endif
    }
    if (lane < 16) {
        const int r = row0 + lane;
        put_scales(to + SCALES, lane, r < n ? rows + r * row_bytes : 0, k_block * KBLOCK, K);
        if (r < n && is_bad(rows + r * row_bytes, k_block * KBLOCK, K)) *bad = 1;
    }
}
