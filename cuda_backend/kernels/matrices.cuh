// matrices: a stack of matrices of one shape, from which each row takes some by number: the experts of a layer, or the heads of latent
// attention. Their addresses follow from a stride, or are read from a table on the device (hot experts: expert_stacks.py)

struct Matrices {  // cuda_backend/prototypes.py MATRICES
    const u8 *first, *last;  // matrix 0; matrix `count`, of a shared expert
    const u64* table;        // addresses of numbers 0 to count - 1
    s64 bytes;               // bytes from one to the next; 0: some are elsewhere, perhaps in host memory
    int count;
};

// With MOVED, hot_experts.cu writes addresses up to the kernel before the previous one: a load must not find an older line in L1,
// and products read the table of gates and ups only after waiting.
#ifndef MOVED
#define MOVED 0
#endif
__device__ __forceinline__ u64 address_at(const Matrices& of, int number) {
    return MOVED ? __ldcg(of.table + number) : of.table[number];
}

// A matrix whose number has just been read. An address from the table is one more read to wait for: 0.4 us of a launch, even
// after prefetch_table (docs/experiments/mixtures.md).
__device__ __forceinline__ const u8* matrix_at(const Matrices& of, int number) {
    if (number >= of.count) return of.last;
    return of.bytes ? of.first + number * of.bytes : (const u8*)address_at(of, number);
}
// Prefetches the addresses that matrix_at will read. 16 addresses to a line, of 512 at most; by a warp.
__device__ __forceinline__ void prefetch_table(const Matrices& of) {
    const int at = threadIdx.x % 32 * 16;
    if (!of.bytes && at < of.count) prefetch_l1(of.table + at);
}
