// qmv: up to 8 rows of x through a matrix of GGUF blocks, or any number of rows, each through its expert's matrix
// Meaning   x @ dequantize(weight).T, common/quants.py      Launcher  mlx_backend/quantized.py
// In        x [t][columns] T, words [E][rows][blocks * W] uint32, halves [E][rows][blocks * H] uint16,
//           codebook [4 magnitudes] uint32 (IQ2, IQ3), experts [t] int32 (GATHER), slots [experts] int32, the matrix
//           of each expert (GATHER 2)      Out       out [t][rows] T
// Build     T float, half or bfloat; TYPE, BLOCK, W, H of include/{blocks,codebooks}.h; M 1, 2, 4 or 8; GATHER 0, 1 or 2
// Work      a SIMD group multiplies 4 rows of the matrix with M rows of x: lanes take neighbouring words, a weight is decoded once
//           for M products; the two SIMD groups of a threadgroup have the same rows of x
// Assumes   columns a multiple of BLOCK; x and the matrix row-contiguous
// Numbers   float weights, exact; per lane one fma per product in the order of the columns, for any t, M and GATHER,
//           then simd_sum: the bits of a row do not depend on the other rows
// Bound     the file's bytes once per 8 rows of x (Q6_K 0.82 per weight, where MLX's 8-bit groups take 1.13); per 8
//           Q6_K weights 43 operations to decode them and 8 M fma, per output one simd_sum (5 shuffles)
// Tried     nothing yet: not run on a GPU
#include "blocks.h"
#include "codebooks.h"
#include "unroll.h"

template <class T>
inline float4 four(const device T* from) {
    return float4(float(from[0]), float(from[1]), float(from[2]), float(from[3]));
}

inline float add_products(float sum, float4 a, float4 b) {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

[[kernel]] void qmv() {
    constexpr int R = 4, PARTS = BLOCK / 8;
    const int lane = thread_index_in_simdgroup, row = thread_position_in_grid.y * R;
    const int columns = x_shape[1], blocks = columns / BLOCK, rows = words_shape[1];
    const int first = thread_position_in_grid.z * M, last = min(first + M, x_shape[0]);

    float sums[R][M] = {};
    for (int begin = first; begin < last;) {  // rows of one expert
        const int expert = GATHER ? int(experts[begin]) : 0, matrix = GATHER == 2 ? int(slots[expert]) : expert;
        int end = GATHER ? begin + 1 : last;
        while (end < last && int(experts[end]) == expert) end++;
        for (int i = lane; i < columns / 8; i += 32) {
            const int block = i / PARTS, part = i % PARTS;
            float4 a[R], b[R];
            UNROLL for (int r = 0; r < R; r++) {
                const size_t at = (size_t(matrix) * rows + min(row + r, rows - 1)) * blocks + block;
                Block<TYPE>::decode(words + at * W, halves + at * H, codebook, part, a[r], b[r]);
            }
            const int column = block * BLOCK + Block<TYPE>::column(part);
            UNROLL for (int m = 0; m < M; m++) {
                if (first + m < begin || first + m >= end) continue;
                const device T* from = x + size_t(first + m) * columns + column;
                const float4 xa = four(from), xb = four(from + Block<TYPE>::apart());
                UNROLL for (int r = 0; r < R; r++) {
                    sums[r][m] = add_products(add_products(sums[r][m], a[r], xa), b[r], xb);
                }
            }
        }
        begin = end;
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int m = 0; m < M; m++) {
            const float sum = simd_sum(sums[r][m]);
            if (lane == 0 && row + r < rows && first + m < last) out[size_t(first + m) * rows + row + r] = T(sum);
        }
    }
}
