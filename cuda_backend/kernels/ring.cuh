// ring: barriers in shared memory and copies that complete them, for products that one warp feeds and eight compute.

#if __CUDA_ARCH__ >= 900 && !defined(CP_ASYNC)
#define BULK 1
#else
#define BULK 0
#endif
// Stages that are asked for before a kernel waits for the one before it: more would be in the way of what that one reads. Where
// single.cu makes its rows it asks for all of them, which was faster.
#define PREFETCH (STAGES < 2 ? STAGES : 2)

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
// One thread: `full` completes once more when `bytes` have landed.
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
#if BULK
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

// Copy `bytes` (a multiple of 16) to shared memory; `full` completes when they have landed. The whole producer warp; where BULK,
// lanes may each copy for themselves as lane 0. `once`: nobody reads them again, so that they need not push anything else out of
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
#else
    for (int i = lane * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
#endif
}
