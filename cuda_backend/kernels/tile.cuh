// tile: how a quantized matrix lies in device memory, and how a warp reads 16 rows x KBLOCK columns of it.
//
// A unit is 128 rows x KBLOCK columns: 8 tiles of 16 rows, one per warp, contiguous; units run along k, then down rows.
// A tile holds bit planes in the order in which the lanes of mma.m16n8k32 want them, then the scales of its 16 rows.
// Lane (g = lane / 4, t = lane % 4) owns per 32 columns four words of four codes: a0 (row g, columns 4t..4t+3),
// a1 (row g + 8, same columns), a2 and a3 (as a0, a1, 16 columns on).
//   4-bit plane   two words per group, a0 | a1 << 4 and a2 | a3 << 4; 16 bytes per lane and two groups
//   2-bit plane   one word per group, a_i at bit 2 i of each byte; 16 bytes per lane and four groups
//   1-bit plane   half a word per group: a_i at bit 4 (group % 2) + i of each byte; 16 bytes per lane and eight groups
//   8-bit plane   four words per group
// Codes of signed types are stored as two's complement and unpacked at the top of the byte, so that no offset is left:
// UNIT is what a code is then multiplied by. Same bits per weight as the file, but for Q3_K (3.56 instead of 3.44) and
// IQ4_XS (4.31 instead of 4.25), whose 6-bit group scales become bytes.
//
// Build  -D one type name (Q4_K, ...). GROUP: columns that share a scale. MINS: groups have a minimum to subtract.

#if defined(Q4_K) || defined(Q4_1)
#define P4 1
#define MINS 1
#elif defined(Q4_0)
#define P4 1
#define SHIFT 4
#elif defined(Q5_K) || defined(Q5_1)
#define P4 1
#define P1 1
#define MINS 1
#elif defined(Q5_0)
#define P4 1
#define P1 1
#define SHIFT 3
#elif defined(Q6_K)
#define P4 1
#define P2 1
#define GROUP 16
#define SHIFT 2
#elif defined(Q3_K)
#define P2 1
#define P1 1
#define GROUP 16
#define SHIFT 5
#elif defined(Q2_K)
#define P2 1
#define GROUP 16
#define MINS 1
#elif defined(Q8_0)
#define P8 1
#define KBLOCK 128
#elif defined(IQ4_NL) || defined(IQ4_XS) || defined(MXFP4)
#define P4 1
#define TABLE 1
#endif
#ifndef KBLOCK
#define KBLOCK 256
#endif
#ifndef GROUP
#define GROUP 32
#endif
#ifndef P8
#define P8 0
#endif
#ifndef P4
#define P4 0
#endif
#ifndef P2
#define P2 0
#endif
#ifndef P1
#define P1 0
#endif
#ifndef SHIFT
#define SHIFT 0
#endif
#ifndef MINS
#define MINS 0
#endif

#if defined(Q4_K) || defined(Q5_K)
#define EXACT_MINS 1  // whole numbers times one factor per row: linear.cu multiplies them by tensor cores
#else
#define EXACT_MINS 0
#endif
#define GROUPS (KBLOCK / GROUP)  // scales per row
#define AT4 (P8 * 16 * KBLOCK)
#define AT2 (AT4 + P4 * 8 * KBLOCK)
#define AT1 (AT2 + P2 * 4 * KBLOCK)
#define SCALES (AT1 + P1 * 2 * KBLOCK)  // byte offset of the scales
#if defined(Q4_K) || defined(Q5_K)
#define SCALE_BYTES 256  // the file's 16 bytes per row: d, dmin, 12 bytes of 6-bit scales and minima
#elif defined(Q4_0) || defined(Q5_0) || defined(IQ4_NL) || defined(Q8_0)
#define SCALE_BYTES (16 * GROUPS * 2)  // float16 per group
#elif defined(Q4_1) || defined(Q5_1)
#define SCALE_BYTES (16 * GROUPS * 4)  // float16 scale and offset per group
#elif defined(Q6_K) || defined(Q3_K)
#define SCALE_BYTES (16 * 16 + 32)  // int8 per group for each row, then a float16 per row
#elif defined(Q2_K)
#define SCALE_BYTES (16 * 16 + 64)  // scale | minimum << 4 per group for each row, then two float16 per row
#elif defined(IQ4_XS)
#define SCALE_BYTES (16 * 8 + 32)  // int8 per group for each row, then a float16 per row
#elif defined(MXFP4)
#define SCALE_BYTES (16 * 8)  // an exponent per group
#endif
#define TILE_BYTES (SCALES + SCALE_BYTES)
#define UNIT_BYTES (8 * TILE_BYTES)
static_assert(TILE_BYTES == EXPECTED_TILE_BYTES, "cuda_backend/weights.py allocates by its own table");

#ifdef TABLE
#ifdef MXFP4
#define TABLE0 0x03020100u  // twice the value of an e2m1 code
#define TABLE1 0x0c080604u
#define TABLE2 0xfdfeff00u
#define TABLE3 0xf4f8fafcu
#else
#define TABLE0 0xbfad9881u  // -127 -104 -83 -65
#define TABLE1 0xf6eaddcfu  // -49 -35 -22 -10
#define TABLE2 0x26190d01u  // 1 13 25 38
#define TABLE3 0x71594535u  // 53 69 89 113
#endif
__device__ __forceinline__ u32 lookup(u32 codes) {  // four 4-bit codes, one per byte -> four int8
    u32 select = codes & 0x07070707u;
    select = (select | select >> 4) & 0x00ff00ffu;
    select = (select | select >> 8) & 0xffffu;
    u32 low = __byte_perm(TABLE0, TABLE1, select), high = __byte_perm(TABLE2, TABLE3, select);
    u32 mask = ((codes >> 3) & 0x01010101u) * 0xffu;
    return (low & ~mask) | (high & mask);
}
#endif

__device__ __forceinline__ u32 word_of(const u8* from, int i) {  // one of four, read together: the others are wanted next
    const uint4 w = *(const uint4*)from;
    return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w;
}

// The four words of group `j` (32 columns) of a tile, for this lane.
__device__ __forceinline__ void unpack(const u8* tile, int j, int lane, u32 (&a)[4]) {
#if P8
    uint4 w = *(const uint4*)(tile + (j * 32 + lane) * 16);
    a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
#elif P4
    const uint4 both = *(const uint4*)(tile + AT4 + ((j / 2) * 32 + lane) * 16);
    const uint2 w = j % 2 ? make_uint2(both.z, both.w) : make_uint2(both.x, both.y);
#if P2
    const u32 h = word_of(tile + AT2 + ((j / 4) * 32 + lane) * 16, j % 4);
    a[0] = ((w.x << 2) & 0x3c3c3c3cu) | ((h << 6) & 0xc0c0c0c0u);
    a[1] = ((w.x >> 2) & 0x3c3c3c3cu) | ((h << 4) & 0xc0c0c0c0u);
    a[2] = ((w.y << 2) & 0x3c3c3c3cu) | ((h << 2) & 0xc0c0c0c0u);
    a[3] = ((w.y >> 2) & 0x3c3c3c3cu) | (h & 0xc0c0c0c0u);
#elif P1
    const u32 h = word_of(tile + AT1 + lane * 16, j / 2) >> (4 * (j % 2));
#if SHIFT
    a[0] = ((w.x << 3) & 0x78787878u) | ((h << 7) & 0x80808080u);
    a[1] = ((w.x >> 1) & 0x78787878u) | ((h << 6) & 0x80808080u);
    a[2] = ((w.y << 3) & 0x78787878u) | ((h << 5) & 0x80808080u);
    a[3] = ((w.y >> 1) & 0x78787878u) | ((h << 4) & 0x80808080u);
#else
    a[0] = (w.x & 0x0f0f0f0fu) | ((h << 4) & 0x10101010u);
    a[1] = ((w.x >> 4) & 0x0f0f0f0fu) | ((h << 3) & 0x10101010u);
    a[2] = (w.y & 0x0f0f0f0fu) | ((h << 2) & 0x10101010u);
    a[3] = ((w.y >> 4) & 0x0f0f0f0fu) | ((h << 1) & 0x10101010u);
#endif
#elif defined(TABLE)
    a[0] = lookup(w.x & 0x0f0f0f0fu), a[1] = lookup((w.x >> 4) & 0x0f0f0f0fu);
    a[2] = lookup(w.y & 0x0f0f0f0fu), a[3] = lookup((w.y >> 4) & 0x0f0f0f0fu);
#elif SHIFT
    a[0] = (w.x << 4) & 0xf0f0f0f0u, a[1] = w.x & 0xf0f0f0f0u;
    a[2] = (w.y << 4) & 0xf0f0f0f0u, a[3] = w.y & 0xf0f0f0f0u;
#else
    a[0] = w.x & 0x0f0f0f0fu, a[1] = (w.x >> 4) & 0x0f0f0f0fu;
    a[2] = w.y & 0x0f0f0f0fu, a[3] = (w.y >> 4) & 0x0f0f0f0fu;
#endif
#else  // a 2-bit plane, with or without a 1-bit plane above it
    const u32 l = word_of(tile + AT2 + ((j / 4) * 32 + lane) * 16, j % 4);
#if P1
    const u32 h = word_of(tile + AT1 + lane * 16, j / 2) >> (4 * (j % 2));
    a[0] = ((l << 5) & 0x60606060u) | ((h << 7) & 0x80808080u);
    a[1] = ((l << 3) & 0x60606060u) | ((h << 6) & 0x80808080u);
    a[2] = ((l << 1) & 0x60606060u) | ((h << 5) & 0x80808080u);
    a[3] = ((l >> 1) & 0x60606060u) | ((h << 4) & 0x80808080u);
#else
    a[0] = l & 0x03030303u, a[1] = (l >> 2) & 0x03030303u;
    a[2] = (l >> 4) & 0x03030303u, a[3] = (l >> 6) & 0x03030303u;
#endif
#endif
}

// Scale of `row` (0..15) in `group`, divided by what `unpack` multiplied the codes by; and the minimum, negated. Of the
// types whose scales `decode_scales` does not take apart itself.
__device__ __forceinline__ void scale_of(const u8* scales, int row, int group, float& scale, float& offset) {
    offset = 0.0f;
#if defined(Q4_0) || defined(Q5_0) || defined(IQ4_NL) || defined(Q8_0)
    scale = from_half(((const u16*)scales)[row * GROUPS + group]) * (1.0f / (1 << SHIFT));
#elif defined(Q4_1) || defined(Q5_1)
    u32 dm = ((const u32*)scales)[row * GROUPS + group];
    scale = from_half((u16)dm), offset = from_half((u16)(dm >> 16));
#elif defined(Q2_K)
    u32 dd = ((const u32*)(scales + 256))[row];
    int both = scales[row * 16 + group];
    scale = from_half((u16)dd) * (both & 15), offset = -from_half((u16)(dd >> 16)) * (both >> 4);
#elif defined(IQ4_XS)
    scale = from_half(((const u16*)(scales + 128))[row]) * ((const s8*)scales)[row * 8 + group];
#elif defined(MXFP4)
    int e = scales[row * 8 + group];  // 2^(e - 128): subnormal below 2
    scale = e >= 2 ? __uint_as_float((u32)(e - 1) << 23) : __uint_as_float(0x00200000u << e);
#endif
}

#if EXACT_MINS
#define SCRATCH_ROW 20  // floats: 8 scales, 8 minima as bf16, the factor of the minima, negated; the rest spreads rows over banks
#define SCRATCH (16 * SCRATCH_ROW)
#else
#define SCRATCH_ROW (GROUPS + 4)  // floats; the padding spreads rows over banks
#define SCRATCH (16 * SCRATCH_ROW * (1 + MINS))
#endif

// Byte i of a word as a float.
__device__ __forceinline__ float byte_of(u32 word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650u | i)) - 8388608.0f;  // 2^23 + byte
}

// All scales of a tile into `scratch` (floats), and with MINS the negated minima behind them. One warp.
__device__ __forceinline__ void decode_scales(const u8* tile, int lane, float* scratch) {
    const int row = lane / 2, half = lane % 2, first = half * (GROUPS / 2);
    float* to = scratch + row * SCRATCH_ROW + first;
    float scale[GROUPS / 2];
#if EXACT_MINS
    const uint4 w = *(const uint4*)(tile + SCALES + row * 16);
    const float d = from_half((u16)w.x);
    const u32 sc = half ? (w.w & 0x0f0f0f0fu) | ((w.y >> 2) & 0x30303030u) : w.y & 0x3f3f3f3fu;
    const u32 mn = half ? ((w.w >> 4) & 0x0f0f0f0fu) | ((w.z >> 2) & 0x30303030u) : w.z & 0x3f3f3f3fu;
#pragma unroll
    for (int i = 0; i < 4; i++) scale[i] = d * byte_of(sc, i);
    u32* mins = (u32*)(scratch + row * SCRATCH_ROW + 8);
    mins[half * 2] = to_bf16x2(byte_of(mn, 0), byte_of(mn, 1));
    mins[half * 2 + 1] = to_bf16x2(byte_of(mn, 2), byte_of(mn, 3));
    if (!half) scratch[row * SCRATCH_ROW + 12] = -from_half((u16)(w.x >> 16));
#elif defined(Q6_K) || defined(Q3_K)
    const uint2 w = *(const uint2*)(tile + SCALES + row * 16 + half * 8);
    const float d = from_half(((const u16*)(tile + SCALES + 256))[row]) * (1.0f / (1 << SHIFT));
#pragma unroll
    for (int i = 0; i < 8; i++) scale[i] = d * (byte_of((i < 4 ? w.x : w.y) ^ 0x80808080u, i % 4) - 128.0f);
#else
    float offset[GROUPS / 2];
#pragma unroll
    for (int i = 0; i < GROUPS / 2; i++) scale_of(tile + SCALES, row, first + i, scale[i], offset[i]);
#if MINS
#pragma unroll
    for (int i = 0; i < GROUPS / 2; i += 2)
        *(float2*)(to + 16 * SCRATCH_ROW + i) = make_float2(offset[i], offset[i + 1]);
#endif
#endif
#if GROUPS >= 8
#pragma unroll
    for (int i = 0; i < GROUPS / 2; i += 4) *(float4*)(to + i) = make_float4(scale[i], scale[i + 1], scale[i + 2], scale[i + 3]);
#else
    *(float2*)to = make_float2(scale[0], scale[1]);
#endif
}

// The minimum of `group` of `row`, negated, after decode_scales.
__device__ __forceinline__ float offset_of(const float* scratch, int row, int group) {
#if EXACT_MINS
    return scratch[row * SCRATCH_ROW + 12] * from_bf16(((const u16*)(scratch + row * SCRATCH_ROW + 8))[group]);
#elif MINS
    return scratch[16 * SCRATCH_ROW + row * SCRATCH_ROW + group];
#else
    return 0.0f;
#endif
}
