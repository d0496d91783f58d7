// dequantize: rows of GGUF blocks as numbers
// Meaning   common/quants.py dequantize                     Launcher  mlx_backend/quantized.py
// In        words [rows][blocks * W] uint32, halves [rows][blocks * H] uint16,
//           codebook [4 magnitudes] uint32 (IQ2, IQ3)       Out       out [rows][blocks * BLOCK] T
// Build     T float, half or bfloat; TYPE, BLOCK, W, H of include/{blocks,codebooks}.h
// Work      a thread decodes eight weights of one row
// Assumes   inputs row-contiguous
// Numbers   the definition's float, rounded once to T
// Bound     the file's bytes, and sizeof(T) per weight
// Tried     nothing yet: not run on a GPU
#include "blocks.h"
#include "codebooks.h"

[[kernel]] void dequantize() {
    constexpr int PARTS = BLOCK / 8;
    const int block = thread_position_in_grid.x / PARTS, part = thread_position_in_grid.x % PARTS;
    const size_t at = size_t(thread_position_in_grid.y) * (words_shape[1] / W) + block;
    float4 a, b;
    Block<TYPE>::decode(words + at * W, halves + at * H, codebook, part, a, b);
    device T* to = out + at * BLOCK + Block<TYPE>::column(part);
    for (int i = 0; i < 4; i++) {
        to[i] = T(a[i]);
        to[i + Block<TYPE>::apart()] = T(b[i]);
    }
}
