// linear: y = x W' for a quantized W and 1 to 72 rows of x, as partial sums along k; or for two that are stored as different types
// Meaning   common/reference.py NumpyOps.linear          Launcher  cuda_backend/products.py linear
// In        a, b  matrices for the same x, b where SECOND is built; `ctas` of the launch are a's
// Out       out [slot][T][N] float32 of each, to be added in slot order
// Build     first::, and where SECOND second::, of a type of tile.cuh and STAGES each (layout.py source); COLS as layout.py has
//           them; STRIPES; BLOCKS of a multiprocessor, where registers are for BOUND threads each; AHEAD: a warp of its own
//           finds the factors, which for more than 8 rows was slower; CP_ASYNC to force the sm_80 ring
// Work      8 warps multiply, a 16-row tile each; warp 8 feeds a ring of units; where AHEAD, warp 9 finds the factors of a norm
//           meanwhile. The (row block, k block) list is cut into stripes, so that a stripe may end a row block early; each
//           stripe that touches a row block has a slot. A CTA takes up to STRIPES of them
// Assumes   rows padded to 128 and columns to KBLOCK in w and x; stripes do not depend on the number of rows
// Numbers   product.cuh's, unit after unit: the result of a row depends neither on the other rows nor on COLS
// Bound     bytes of w; Origin: the stripes of Marlin (Frantar et al., arXiv 2408.11743)

extern "C" __global__ void __launch_bounds__(BOUND, BLOCKS)
linear(Matrix a, Matrix b, int ctas, Rows x, Partials to) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ float factors[COLS];
#ifdef SECOND
    if ((int)blockIdx.x >= ctas)
        second::multiply_stripes(b, blockIdx.x - ctas, x, to, ring, factors);
    else
#endif
        first::multiply_stripes(a, blockIdx.x, x, to, ring, factors);
}
