// ring: barriers in shared memory, and copies that complete them, for products in which one warp loads and eight compute
// Tried     ms of a step: variant against the kernel of that time (Q: Qwen3.6-27B, W: WeDLM-8B, one H200); more in
//             docs/experiments/products.md.
//           all three stages loaded before the wait -> Q 4.79 against 4.70 with two: delays loads of the small kernels
//           five stages, one to four before the wait -> Q 4.95, 4.79, 4.85, 4.89 against 4.70: takes shared memory that the next kernel
//             needs to begin
//           four, five, six stages for more than 8 rows -> Q 14.7, 14.9, 15.1 against 14.55 at 64 rows: the products gain 0.5 us, the
//             rest loses more
//           one or three stages ahead at 16 rows -> W 2.157 and 2.203 against 2.10
//           no more stages than a stripe has units -> W 2.093 against 2.111 at 16 rows, but another build for each length
//           half a microsecond or one between the two loads -> W 1.684 against 1.689, Q 4.72 against 4.72
//           at most two copies in flight -> Q 5.23 against 5.18: gate and up alone 28.3 us against 29.5, a step is not faster
//           units after the ring prefetched to L2 -> Q 5.32 against 5.08: DRAM is busy with the previous kernel
//           x of one row loaded to registers, not through the ring -> W 1.706 against 1.686: a load to wait for in each unit
//           x of the first two units by cp.async of the multiplying warps -> W 1.74 against 1.69: 200 instructions more
//           stages given back by bar.arrive and bar.sync -> Q 14.847 against 14.969 at 64 rows; Q6_K of 64 rows spills on sm_120
//           one arrival per warp -> Q 4.990 against 4.994, within spread; racecheck associates an arrival only with its thread

#if __CUDA_ARCH__ >= 900 && !defined(CP_ASYNC)
#define BULK 1
#else
#define BULK 0
#endif
// Stages that are requested before a kernel waits for the previous one: more would delay reads of that kernel. single.cu with
// MADE requests all stages, which was faster.
#define PREFETCH (STAGES < 2 ? STAGES : 2)
#define IN_FLIGHT 16  // reads of 16 bytes per lane before 8.0, where a warp has no read in flight while it stores

#if __CUDA_ARCH__ < 800
// 8 bytes, as an mbarrier has: how many have arrived; twice how many must, and the parity of the phase. A thread arrives for
// the next phase only after waiting for this one.
__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    write_shared(barrier, 0), write_shared(barrier + 4, 2 * count);
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    const u32 lanes = __activemask(), n = __popc(lanes);
    __syncwarp(lanes);
    if (threadIdx.x % 32 != __ffs(lanes) - 1) return;
    const u32 all = read_shared(barrier + 4);
    if (add_shared(barrier, n) + n < all / 2) return;
    write_shared(barrier, 0), write_shared(barrier + 4, all ^ 1);
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    while (read_shared(barrier + 4) % 2 == parity);
}
#else
__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
            "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
            "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}
#endif
// Arrives after the reads of a stage have returned: the address of the arrival depends on a sum of each read. Otherwise the arrival
// would be issued while the last reads are still queued, and a bulk copy could overtake these reads: docs/experiments/products.md,
// A race. The first sum of each tile depends on its reads of x and of matrix rows 0 to 7; the last sum of a tile depends on the reads
// of rows 8 to 15, which TOGETHER tiles share.
// none      zero_of(empty)
template <int TOGETHER, int TILES, int EACH_TILE>
__device__ __forceinline__ void give_back(u32 empty, u32 none, const float (&acc)[TILES][EACH_TILE]) {
    u32 bits = 0;
#pragma unroll
    for (int n = 0; n < TILES; n++) bits |= __float_as_uint(acc[n][0]) | (n % TOGETHER ? 0 : __float_as_uint(acc[n][EACH_TILE - 1]));
    barrier_arrive(empty + (bits & none));
}
// 0, but not a constant to the compiler: shared memory has fewer than 2^20 bytes.
__device__ __forceinline__ u32 zero_of(u32 shared_address) { return shared_address >> 20; }
// By one thread: `full` completes its next phase when `bytes` have arrived.
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
#if BULK
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

// Copy `bytes` (a multiple of 16) to shared memory; `full` completes when they have landed. The whole producer warp; where BULK,
// lanes may each copy for themselves as lane 0. `once`: they are not read again, and need not evict other data from
// the L2 cache.
__device__ __forceinline__ void copy(u32 to, const u8* from, int bytes, u32 full, int lane, bool once = false) {
#if BULK
#define BULK_COPY "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    if (lane == 0 && once)
        asm volatile("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n" BULK_COPY
                     ".L2::cache_hint [%0], [%1], %2, [%3], policy; }" ::"r"(to), "l"(from), "r"(bytes), "r"(full)
                     : "memory");
    else if (lane == 0)
        asm volatile(BULK_COPY " [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(full) : "memory");
#elif __CUDA_ARCH__ < 800
    for (int i = lane * 16; i < bytes; i += 512 * IN_FLIGHT) {
        uint4 v[IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++)
            if (i + j * 512 < bytes) v[j] = __ldcg((const uint4*)(from + i + j * 512));
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++)
            if (i + j * 512 < bytes) store_16(to + i + j * 512, v[j]);
    }
#else
    for (int i = lane * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
#endif
}
// Without BULK, called by each lane of the producer warp: `full` completes when its copies have arrived; none is in flight then.
__device__ __forceinline__ void copies_arrive(u32 full) {
#if __CUDA_ARCH__ < 800
    barrier_arrive(full);
#elif !BULK
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
#endif
}
__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800 && !BULK
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
