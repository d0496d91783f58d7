// hopper: instructions that only compute capability 9.0 has (sm_90a): products of a warp group, 128 threads, whose operands lie in
// shared memory in blocks of 128 bytes of each row. Chunk c (16 bytes) of row r lies at place c ^ r % 8 (128-byte swizzle), so
// that neither products nor copies have bank conflicts; a block begins at a multiple of 1024 bytes.

__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }  // in a block, bytes

// The first word of the descriptor of an operand at a shared address; `bytes` further on, the word is larger by bytes / 16.
__device__ __forceinline__ u32 operand(u32 at) { return at >> 4 | 1 << 16; }
#define OPERAND(word) ((u64)(64 | 1 << 30) << 32 | (word))  // rows of 128 bytes, 8 of them after 1024 bytes
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA(n, registers, a, b, adds, transposed)                                                                      \
    "{ .reg .pred p; setp.ne.b32 p, " adds ", 0; wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" registers "}, " \
    a ", " b ", p, 1, 1, " transposed ", 0; }"
#define OPERANDS "l"(OPERAND(a)), "l"(OPERAND(b)), "r"((int)adds), "n"(TRANSPOSED)
// d (64 x N) = a b, or d + a b, with k = 16. Shared memory has a [64][16], or with TRANSPOSED [16][64], and b [N][16]. For block j of
// 8 columns, the thread of lane 4 g + t in warp w of the group has d[4 j + 2 h + e]: row 16 w + g + 8 h, column
// 8 j + 2 t + e.
template <int N, int TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], u32 a, u32 b, bool adds) {
    static_assert(N == 16 || N == 32 || N == 48);
    if constexpr (N == 16)
        asm volatile(WGMMA("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11") : EIGHT(0) : OPERANDS);
    else if constexpr (N == 32)
        asm volatile(WGMMA("32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19")
                     : EIGHT(0), EIGHT(8)
                     : OPERANDS);
    else
        asm volatile(WGMMA("48", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23", "%24",
                           "%25", "%26", "%27")
                     : EIGHT(0), EIGHT(8), EIGHT(16)
                     : OPERANDS);
}
#define RESULTS_64                                                                                                             \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
// As `wgmma` with N = 64, of b [64][16].
__device__ __forceinline__ void wgmma_64(float (&d)[32], u32 a, u32 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " RESULTS_64
        ", %32, %33, p, 1, 1, 0, 0; }"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
        : "l"(OPERAND(a)), "l"(OPERAND(b)), "r"((int)adds));
}
// As `wgmma` with N = 64, of b [16][64], and of a as `mma` has it: 16 rows of each warp.
__device__ __forceinline__ void wgmma_of_registers(float (&d)[32], const u32 (&a)[4], u32 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " RESULTS_64
        ", {%32,%33,%34,%35}, %36, p, 1, 1, 1; }"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(OPERAND(b)), "r"((int)adds));
}
// Before products: makes the thread's registers visible; after them: closes a group; then waits for all groups but the last N.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// 2^x for float16: for an x that exp2f would scale, the result is 0.
__device__ __forceinline__ float exp2_for_half(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
// Makes what this thread has written to shared memory visible to products.
__device__ __forceinline__ void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Waits for the thread's copies, all but the last N groups.
template <int N>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Synchronizes the 128 threads that name barrier `id`, 1 to 15; or the 256 threads.
__device__ __forceinline__ void group_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void two_groups_sync(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
// Sets the number of registers per thread of the warp group.
template <int N>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// Four 8 x 8 matrices as `mma` leaves them, to shared memory with rows and columns exchanged; lane 8 i + r has the address of row r of
// matrix i there.
__device__ __forceinline__ void stmatrix_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
