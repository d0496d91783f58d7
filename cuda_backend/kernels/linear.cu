// linear: y = x W' for a quantized W and 1 to 72 rows of x, as partial sums along k; or for two W of different types in one launch
// Meaning   common/reference.py NumpyOps.linear          Launcher  cuda_backend/products.py linear
// In        a, b  matrices for the same x; b only with SECOND. The first `ctas` CTAs of the launch compute a
// Out       out [partial][T][N] float32 of each matrix, to be added in this order
// Build     namespace first, with SECOND also second, each of a type of tile.cuh and STAGES (sources.py); COLS: layout.py; STRIPES;
//           BLOCKS per multiprocessor, with the registers of BOUND threads each; AHEAD: a separate warp computes the factors of
//           a norm, which was slower above 8 rows; CP_ASYNC to force the sm_80 ring
// Work      8 warps multiply, a 16-row tile each; warp 8 loads units to a ring; with AHEAD, warp 9 computes the factors of a norm.
//           The list of (row block, k block) is cut into stripes, which may begin and end inside a row block; each stripe that
//           touches a row block writes a partial sum. A CTA takes up to STRIPES of them
// Assumes   rows padded to 128 and columns to KBLOCK in w and x; stripes do not depend on the number of rows
// Numbers   as product.cuh, one unit after the other: the result of a row depends neither on the other rows nor on COLS
// Bound     bytes of w; Origin: the stripes of Marlin (Frantar et al., arXiv 2408.11743)
// Tried     ms of a step: variant against the kernel of that time (Q: Qwen3.6-27B, W: WeDLM-8B, one H200); more in
//             docs/experiments/products.md.
//           one CTA per multiprocessor for few rows -> Q 6.54 against 5.43 at one row: eight warps do not hide each other's latency
//           registers for three or four CTAs -> Q 5.50, 6.08 against 5.18: CTAs of the next product crowd on few multiprocessors
//           two row blocks and 16 warps a CTA -> Q 24.0 against 21.3 at 64 rows, 6.91 against 6.02 at one: fewer stages
//           two CTAs per multiprocessor at 32 rows, in 96 registers -> Q 8.88 against 8.43: the tile is unpacked twice, loads wait
//           two warps to a tile, each with half of the rows -> Q 17.9 against 16.3 at 64 rows: the tile is unpacked twice
//           four warps with two tiles each, x read once for both -> Q 18.3 against 14.6 at 64 rows: half as many warps
//           two tiles of a warp, x read once for both -> Q 8.20 against 8.23 at 32 rows, 13.61 against 13.27 at 64: later kernels
//             start later
//           eight warps that copy their own tiles, no ninth -> Q 16.9 against 14.8 at 64 rows: waits delay the products
//           72 registers at 16 rows -> W 2.35 against 2.07 with 80; 80 registers at one row -> W 1.681 against 1.661, Q 4.721 against
//             4.735
//           factors of norms by the loading warp once the ring is full -> W 1.691 against 1.640: the ring is not refilled meanwhile
//           factors of norms of 16 rows by a separate warp -> W 1.985 against 1.964; one after the other 2.248 against 2.104
//           the loading warp begins before the others -> W 1.659 against 1.646, cause not known
//           72 rows as products of 64 and 8 -> Q 19.6 against 15.9: 8 rows take as long as reading the matrix; 96 at once would spill
//           partial sums, addition and norm in the launch, by a cluster of four CTAs -> W 1.633 against 1.640, but 4.43 against 4.33
//             at 64 rows
//           an empty first pass to load the instructions early -> Q 6.10 against 6.01: they are loaded already

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
