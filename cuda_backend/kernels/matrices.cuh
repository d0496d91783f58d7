// matrices: numbered matrices, of which each row takes some: the experts of a layer, or the heads of latent attention

struct Matrices {  // cuda_backend/prototypes.py MATRICES
    const u8 *first, *last;  // matrix 0; matrix number `count`, a shared expert
    const u64* table;        // addresses of matrices 0 to count - 1
    s64 bytes;               // from one matrix to the next; 0: some lie elsewhere, perhaps in host memory
    int count;
};

// The address of a matrix whose number has just been read. Reading it from the table is one more wait: 0.4 us of a launch, even
// after prefetch_table (docs/experiments/mixtures.md).
__device__ __forceinline__ const u8* matrix_at(const Matrices& of, int number) {
    if (number >= of.count) return of.last;
    return of.bytes ? of.first + number * of.bytes : (const u8*)of.table[number];
}
// Prefetches the table that matrix_at reads, 16 addresses per line, at most 512; by a warp.
__device__ __forceinline__ void prefetch_table(const Matrices& of) {
    const int at = threadIdx.x % 32 * 16;
    if (!of.bytes && at < of.count) prefetch_l1(of.table + at);
}
