// tile: how a quantized matrix lies in device memory, and how a warp reads 16 rows x KBLOCK columns of it.
//
// A unit is 128 rows x KBLOCK columns: 8 tiles of 16 rows, one per warp, contiguous; units run along k, then down rows.
// A tile holds bit planes in the order in which the lanes of mma.m16n8k32 need them, then the scales of its 16 rows.
// Lane (g = lane / 4, t = lane % 4) owns per 32 columns four words of four codes: a0 (row g, columns 4t..4t+3),
// a1 (row g + 8, same columns), a2 and a3 (as a0, a1, 16 columns on).
//   4-bit plane   two words per group, a0 | a1 << 4 and a2 | a3 << 4; 16 bytes per lane and two groups
//   2-bit plane   one word per group, a_i at bit 2 i of each byte; 16 bytes per lane and four groups
//   1-bit plane   half a word per group: a_i at bit 4 (group % 2) + i of each byte; 16 bytes per lane and eight groups
//   8-bit plane   four words per group
//   6-bit plane   three words per group, a0, a1 and a2 above the lowest 2 bits of each byte, in which a3 lies, from the top
//                 on; 16 bytes per lane and four words
// Codes of signed types are stored as two's complement and unpacked at the top of the byte, so that no offset is left.
// Same bits per weight as the file, but for Q3_K (3.56 instead of 3.44) and
// IQ4_XS (4.31 instead of 4.25), whose 6-bit group scales become bytes.
//
// Build  -D one type name (Q4_K, ...). GROUP: columns that share a scale. MINS: codes are unsigned, groups have a minimum.
//        WHOLE: scales of groups are whole numbers, times a float of the row. SHIFT: unpacked codes are 2^SHIFT times
//        those of the file, SHIFT_HIGH for rows 8 to 15.
// Tried     Q6_K as planes of 4 and 2 bits -> 15 instructions to unpack four words of a lane, 9 as a 6-bit plane: 6.87 ms against
//             6.77 at 22 rows of Qwen3.6-27B (H200)
//           a ring address that goes from stage to stage, 7 to 27 instructions less -> 4.763 ms against 4.738 at one row, 13.73
//             against 13.25 at 64: registers
//           halves of a unit of 24 rows kept apart by __syncwarp, so that Q6_K needs no loop -> 7.53 ms against 6.94 at 22 rows:
//             reads wait

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
#define P6 1
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
#ifndef P6
#define P6 0
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

#if MINS && P4 && !P1
#define SHIFT_HIGH 4  // spares a shift
#else
#define SHIFT_HIGH SHIFT
#endif
#if defined(Q2_K) || defined(Q3_K) || defined(Q4_K) || defined(Q5_K) || defined(Q6_K) || defined(IQ4_XS)
#define WHOLE 1
#else
#define WHOLE 0
#endif
#define GROUPS (KBLOCK / GROUP)  // scales per row
#define AT4 (P8 * 16 * KBLOCK + P6 * 12 * KBLOCK)
#define AT2 (AT4 + P4 * 8 * KBLOCK)
#define AT1 (AT2 + P2 * 4 * KBLOCK)
#define SCALES (AT1 + P1 * 2 * KBLOCK)  // byte offset of the scales
#if defined(Q4_K) || defined(Q5_K)
// Per row two float16, d and dmin; a byte per group, its scale above the low 2 bits of its minimum; the high 4 bits of the
// minima in a word: of group j of the first half at bit 8 j + 2, of the second half after them. Scales, which each lane
// needs all of, are a mask away.
#define SCALE_BYTES 256
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
static_assert(TILE_BYTES == EXPECTED_TILE_BYTES, "cuda_backend/layout.py has a table of its own");

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
// Eight 4-bit codes, two per byte -> four int8 of the low halves, four of the high halves.
__device__ __forceinline__ void lookup(u32 codes, u32& low, u32& high) {
    const u32 select = codes & 0x77777777u, merge = (codes & 0x88888888u) >> 1 | 0x32103210u;  // bit 3 chooses the second table
    const u32 first = __byte_perm(__byte_perm(TABLE0, TABLE1, select), __byte_perm(TABLE2, TABLE3, select), merge);
    const u32 last = __byte_perm(__byte_perm(TABLE0, TABLE1, select >> 16), __byte_perm(TABLE2, TABLE3, select >> 16), merge >> 16);
    low = __byte_perm(first, last, 0x6420), high = __byte_perm(first, last, 0x7531);
}
#endif

__device__ __forceinline__ u32 word_of(const u8* from, int i) {  // one of four, read together: the others are needed next
    const uint4 w = *(const uint4*)from;
    return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w;
}

// The four words of group `j` (32 columns) of a tile, for the lane whose first 16 bytes `codes` points to.
__device__ __forceinline__ void unpack(const u8* codes, int j, u32 (&a)[4]) {
#if P8
    uint4 w = *(const uint4*)(codes + j * 512);
    a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
#elif P6
    u32 w[3];
#pragma unroll
    for (int i = 0; i < 3; i++) w[i] = word_of(codes + (j / 4 * 3 + (j % 4 * 3 + i) / 4) * 512, (j % 4 * 3 + i) % 4);
    a[0] = w[0] & 0xfcfcfcfcu, a[1] = w[1] & 0xfcfcfcfcu, a[2] = w[2] & 0xfcfcfcfcu;
    a[3] = ((w[0] << 6) & 0xc0c0c0c0u) | ((w[1] << 4) & 0x30303030u) | ((w[2] << 2) & 0x0c0c0c0cu);
#elif P4
    const uint4 both = *(const uint4*)(codes + AT4 + j / 2 * 512);
    const uint2 w = j % 2 ? make_uint2(both.z, both.w) : make_uint2(both.x, both.y);
#if P1
    const u32 h = word_of(codes + AT1, j / 2) >> (4 * (j % 2));
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
    lookup(w.x, a[0], a[1]), lookup(w.y, a[2], a[3]);
#elif SHIFT
    a[0] = (w.x << 4) & 0xf0f0f0f0u, a[1] = w.x & 0xf0f0f0f0u;
    a[2] = (w.y << 4) & 0xf0f0f0f0u, a[3] = w.y & 0xf0f0f0f0u;
#else
    a[0] = w.x & 0x0f0f0f0fu, a[1] = w.x & 0xf0f0f0f0u;
    a[2] = w.y & 0x0f0f0f0fu, a[3] = w.y & 0xf0f0f0f0u;
#endif
#else  // a 2-bit plane, with or without a 1-bit plane above it
    const u32 l = word_of(codes + AT2 + j / 4 * 512, j % 4);
#if P1
    const u32 h = word_of(codes + AT1, j / 2) >> (4 * (j % 2));
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

#if WHOLE
typedef int Scale;
#else
typedef float Scale;
#endif
#define HALVES (KBLOCK / 128)

__device__ __forceinline__ u32 rotated_by_4(u32 word) { return word >> 4 | word << 28; }
__device__ __forceinline__ int byte_of(u32 word, int i) { return __byte_perm(word, 0, 0x4440 | i); }
__device__ __forceinline__ int signed_byte_of(u32 word, int i) { return (s8)(word >> (8 * i)); }

// The scales of 128 columns of one row (0..15) of a tile: a weight is d * of(group) * its unpacked code + m * the minimum of
// its group, groups counted from the first of the 128 columns.
struct Scales {
    float d, m;
#if GROUP == 32 && WHOLE
    u32 words[1];  // bytes
#elif MINS && !WHOLE
    u32 words[4];  // float16 scales, and minima above them
#elif defined(MXFP4)
    u32 words[1];  // bytes
#else
    u32 words[2];  // bytes, or float16
#endif
#if MINS && WHOLE
    u32 minima[32 / GROUP];  // bytes
#endif
    __device__ __forceinline__ Scales(const u8* tile, int row, int half, int shift) : d(1.0f / (1 << shift)), m(1.0f) {
        const u8* from = tile + SCALES;
#if defined(Q4_K) || defined(Q5_K)
        const uint4 w = *(const uint4*)(from + row * 16);
        const u32 both = half ? w.z : w.y;
        d *= 0.25f * from_half((u16)w.x), m = -from_half((u16)(w.x >> 16));
        words[0] = both & 0xfcfcfcfcu;  // four times the scales
        minima[0] = (both & 0x03030303u) | ((half ? rotated_by_4(w.w) : w.w) & 0x3c3c3c3cu);
#elif defined(Q2_K)
        const u32 both = ((const u32*)(from + 256))[row];
        const uint2 w = *(const uint2*)(from + row * 16 + half * 8);
        d *= from_half((u16)both), m = -from_half((u16)(both >> 16));
        words[0] = w.x & 0x0f0f0f0fu, words[1] = w.y & 0x0f0f0f0fu;
        minima[0] = (w.x >> 4) & 0x0f0f0f0fu, minima[1] = (w.y >> 4) & 0x0f0f0f0fu;
#elif WHOLE && GROUP == 16
        const uint2 w = *(const uint2*)(from + row * 16 + half * 8);
        d *= from_half(((const u16*)(from + 256))[row]), words[0] = w.x, words[1] = w.y;
#elif WHOLE
        d *= from_half(((const u16*)(from + 128))[row]), words[0] = ((const u32*)from)[row * 2 + half];
#elif MINS
        const uint4 w = *(const uint4*)(from + row * 32 + half * 16);
        words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
#elif defined(MXFP4)
        words[0] = ((const u32*)from)[row * 2 + half];
#else
        const uint2 w = *(const uint2*)(from + (row * HALVES + half) * 8);
        words[0] = w.x, words[1] = w.y;
#endif
    }
    __device__ __forceinline__ Scale of(int group) const {
#if WHOLE && MINS
        return byte_of(words[group / 4], group % 4);
#elif WHOLE
        return signed_byte_of(words[group / 4], group % 4);
#elif MINS
        return from_half((u16)words[group]);
#elif defined(MXFP4)
        const int e = byte_of(words[0], group);  // 2^(e - 128): subnormal below 2
        return e >= 2 ? __uint_as_float((u32)(e - 1) << 23) : __uint_as_float(0x00200000u << e);
#else
        return from_half((u16)(words[group / 2] >> (group % 2 * 16)));
#endif
    }
#if MINS
    __device__ __forceinline__ float minimum(int group) const {
#if WHOLE
        return (float)byte_of(minima[group / 4], group % 4);
#else
        return from_half((u16)(words[group] >> 16));
#endif
    }
#endif
#ifdef Q2_K
    __device__ __forceinline__ u32 minima_of(int group) const { return __byte_perm(minima[group / 4], 0, group % 4 * 0x1111); }
#endif
};

#define SUMS (MINS && WHOLE && GROUP == 32)  // minima meet sums of x, 32 columns each
#if SUMS
// The minima of groups t of either half of a row, 0..15, and 128 each, as two bf16; before 8.0 and 1024 each, as two float16.
__device__ __forceinline__ u32 minima_of(const u8* tile, int row, int t) {
    const uint4 w = *(const uint4*)(tile + SCALES + row * 16);
    const u32 bytes = 0x0400 | t * 0x0101;  // t of the first word, and in the upper half t of the second
    const u32 high = __byte_perm(w.w, rotated_by_4(w.w), bytes), low = __byte_perm(w.y, w.z, bytes);
    const u32 base = __CUDA_ARCH__ < 800 ? 0x64006400u : 0x43004300u;
    return base | (high & 0x003c003cu) | (low & 0x00030003u);
}
#endif
