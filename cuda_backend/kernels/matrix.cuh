// matrix: what linear.cu is given, once for each matrix and once for all

struct Matrix {
    const u8* w;  // units of tile.cuh
    float* out;   // [slot][T][N]
    int N, row_blocks, k_blocks;
    int stripes, each;  // into which its units are cut, and how many of them a CTA takes
};

// Packed rows (store.cuh). Where `parts` is not 0 an RMS norm has still to divide them by the root of their mean square, the
// sum of `squares` [T][parts] / columns.
struct Rows {
    const u8* packed;
    const float* squares;
    int T, parts;
    float columns, eps;
};

struct Partials {  // of the output
    s64 slot, row;   // from one to the next
    int slots;
};
