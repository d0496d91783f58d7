// matrix: the parameters of linear.cu, for each matrix and for the launch

struct Matrix {
    const u8* w;  // units of tile.cuh
    float* out;   // [partial][T][N]
    int N, k_blocks, units;  // of a row block, and of all; units times stripes are less than 2^32 for 2^38 weights
    int stripes, each;       // stripes into which its units are divided, and stripes per CTA
    u32 k_blocks_inverse, units_inverse, stripes_inverse;  // for `quotient`
};

// Packed rows (store.cuh). If `parts` is not 0, the RMS norm is deferred: rows must be divided by the root of their mean square, the
// sum of `squares` [T][parts] / columns.
struct Rows {
    const u8* packed;
    const float* squares;
    int T, parts;
    float columns, eps;
};

struct Partials {  // partial sums of the output
    s64 partial_stride, row;  // elements from one partial sum, or row, to the next
    int partials;
};
