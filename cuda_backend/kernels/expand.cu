// expand: decodes a quantized matrix, to half precision for prefill (prelude.cuh to_product), to float32 for embedding rows
// Meaning   common/quants.py dequantize; NumpyOps.embed      Launcher  cuda_backend/gemm.py
// In        units of tile.cuh, as repack.cu writes them       Out       [n][K]
// Build     one type of tile.cuh
// Work      a warp per tile; embed: a warp per KBLOCK columns of a token's row, a lane for four columns and for the four 16 further on
// Numbers   float32, rounded once to the type that cuBLAS multiplies
// Bound     bytes written
// Tried     embed by a warp that unpacks all 16 rows of a tile -> 4.0 us against 1.5: a kernel that runs once waits for its code

// The four columns of word `i` of group `j`.
__device__ __forceinline__ void values(const Scales& scales, int j, int i, u32 word, float (&v)[4]) {
    const int group = GROUP == 32 ? j % 4 : j % 4 * 2 + i / 2;
    const float scale = scales.d * scales.of(group);
#if MINS
    const float offset = scales.m * scales.minimum(group);
#pragma unroll
    for (int b = 0; b < 4; b++) v[b] = scale * byte_of(word, b) + offset;
#else
#pragma unroll
    for (int b = 0; b < 4; b++) v[b] = scale * signed_byte_of(word, b);
#endif
}

extern "C" __global__ void expand(const u8* units, int rows, int K, int k_blocks, int tiles, u16* out, float* dense) {
    const int lane = threadIdx.x % 32, at = blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= tiles * k_blocks) return;
    const int t16 = at / k_blocks, k_block = at % k_blocks;
    const u8* tile = units + ((s64)(t16 / 8) * k_blocks + k_block) * UNIT_BYTES + t16 % 8 * TILE_BYTES;
#pragma unroll
    for (int j = 0; j < KBLOCK / 32; j++) {
        const Scales low(tile, lane / 4, j / 4, SHIFT), high(tile, lane / 4 + 8, j / 4, SHIFT_HIGH);
        u32 a[4];
        unpack(tile + lane * 16, j, a);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = lane / 4 + i % 2 * 8, k = k_block * KBLOCK + j * 32 + i / 2 * 16 + lane % 4 * 4;
            if (t16 * 16 + r >= rows || k >= K) continue;
            float v[4];
            values(i % 2 ? high : low, j, i, a[i], v);
            const s64 to = (s64)(t16 * 16 + r) * K + k;
            if (dense)
                *(float4*)(dense + to) = make_float4(v[0], v[1], v[2], v[3]);
            else
                *(uint2*)(out + to) = make_uint2(to_product2(v[0], v[1]), to_product2(v[2], v[3]));
        }
    }
}

extern "C" __global__ void embed(const u8* units, int rows, int K, int k_blocks, const int* tokens, float* out) {
    begin();
    const int lane = threadIdx.x, t = blockIdx.y, k_block = blockIdx.x;
    const int token = min(max(tokens[t], 0), rows - 1), t16 = token / 16, row = token % 16;
    const u8* tile = units + ((s64)(t16 / 8) * k_blocks + k_block) * UNIT_BYTES + t16 % 8 * TILE_BYTES;
    const int j = lane / 4;  // index among the lanes that own the row, 32 columns each
    if (j >= KBLOCK / 32) return;
    const Scales scales(tile, row, j / 4, row < 8 ? SHIFT : SHIFT_HIGH);
    u32 a[4];
    unpack(tile + (row % 8 * 4 + lane % 4) * 16, j, a);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = k_block * KBLOCK + j * 32 + i / 2 * 16 + lane % 4 * 4;
        if (i % 2 != row / 8 || k >= K) continue;
        float v[4];
        values(scales, j, i, a[i], v);
        *(float4*)(out + (s64)t * K + k) = make_float4(v[0], v[1], v[2], v[3]);
    }
}
