// qmm: 9 to 64 rows of x through a matrix of GGUF blocks
// Meaning   x @ dequantize(weight).T, common/quants.py      Launcher  mlx_backend/quantized.py
// In        x [t][columns] T, words [rows][blocks * W] uint32, halves [rows][blocks * H] uint16,
//           codebook [4 magnitudes] uint32 (IQ2, IQ3)       Out       out [t][rows] T
// Build     T float, half or bfloat; TYPE, BLOCK, W, H of include/{blocks,codebooks}.h; TILES 2, 4 or 8: eights of rows of x
// Work      a SIMD group multiplies 16 rows of the matrix with all rows of x, by 8 x 8 matrices. The eight weights that a lane
//           decodes (a part: blocks.h) are its two elements of four matrices, so that no weight is exchanged between lanes; the
//           columns of x are taken in the order of the parts
// Assumes   threadgroups are 32 wide; x and the matrix row-contiguous; a lane has the two elements of a SIMD group's matrix
//           that MLX's own kernels give it (steel/gemm/mma.h)
// Numbers   float weights, exact; products and sums in float, in the order of simdgroup_multiply_accumulate: a row's bits
//           do not depend on t and TILES
// Bound     the file's bytes once; per lane, 8 Q6_K weights and 64 rows of x 43 operations to decode them (qmv 344), 32 loads
//           of x (qmv 128) and 32 matrix products, of 16 fma per lane each (qmv 512 fma)
// Tried     nothing yet: not run on a GPU
#include "blocks.h"
#include "codebooks.h"
#include "unroll.h"

[[kernel]] void qmm() {
    constexpr int R = 2, PARTS = BLOCK / 8;  // R eights of the matrix's rows
    const int lane = thread_index_in_simdgroup;
    const int down = lane / 16 * 4 + lane / 2 % 4, across = lane / 8 % 2 * 4 + lane % 2 * 2;  // its elements: across, + 1
    const int columns = x_shape[1], blocks = columns / BLOCK, rows = words_shape[0], last = x_shape[0] - 1;
    const int row = thread_position_in_grid.y * (8 * R) + down;

    simdgroup_float8x8 sums[R][TILES];  // the matrix's rows down, those of x across
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int i = 0; i < TILES; i++) sums[r][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int four = 0; four < columns / 8; four += 4) {  // four parts of one block
        const int block = four / PARTS, part = four % PARTS;
        float4 a[R], b[R];
        UNROLL for (int r = 0; r < R; r++) {
            const size_t at = size_t(min(row + 8 * r, rows - 1)) * blocks + block;
            Block<TYPE>::decode(words + at * W, halves + at * H, codebook, part + across / 2, a[r], b[r]);
        }
        const device T* from = x + block * BLOCK + Block<TYPE>::column(part + down / 2) + down % 2;
        UNROLL for (int pair = 0; pair < 4; pair++) {  // of columns: two of each part's a, the other two, two of its b, ...
            simdgroup_float8x8 weights[R], values;
            UNROLL for (int r = 0; r < R; r++) {
                const float4 half_part = pair < 2 ? a[r] : b[r];
                weights[r].thread_elements()[0] = pair % 2 ? half_part.z : half_part.x;
                weights[r].thread_elements()[1] = pair % 2 ? half_part.w : half_part.y;
            }
            const device T* column = from + pair / 2 * Block<TYPE>::apart() + pair % 2 * 2;
            UNROLL for (int i = 0; i < TILES; i++) {
                values.thread_elements()[0] = float(column[size_t(min(8 * i + across, last)) * columns]);
                values.thread_elements()[1] = float(column[size_t(min(8 * i + across + 1, last)) * columns]);
                UNROLL for (int r = 0; r < R; r++) {
                    simdgroup_multiply_accumulate(sums[r][i], weights[r], values, sums[r][i]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int i = 0; i < TILES; i++) {
            UNROLL for (int e = 0; e < 2; e++) {
                const int n = row + 8 * r, t = 8 * i + across + e;
                if (n < rows && t <= last) out[size_t(t) * rows + n] = T(sums[r][i].thread_elements()[e]);
            }
        }
    }
}
