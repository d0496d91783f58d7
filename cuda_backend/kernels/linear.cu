// linear: y = x W' for a quantized W and 1 to 72 rows of x, as partial sums along k
// Meaning   common/reference.py NumpyOps.linear          Launcher  cuda_backend/products.py linear
// In        w    units of tile.cuh                        Out       out [slot][T][N] float32, to be added in slot order
//           x    packed rows (store.cuh); where `parts` is not 0, rows that an RMS norm has still to divide by the root
//           of their mean square, the sum of `squares` [T][parts] / columns
// Build     one type of tile.cuh; COLS as layout.py has them; STAGES; AHEAD: a warp of its own finds the factors, which for
//           more than 8 rows would be late; CP_ASYNC to force the sm_80 ring
// Work      8 warps multiply, a 16-row tile each; warp 8 feeds a ring of units; where AHEAD, warp 9 finds the factors of a norm
//           meanwhile. The (row block, k block) list is cut into stripes, so that a stripe may end a row block early; each
//           stripe that touches a row block has a slot. A CTA takes up to STRIPES of them
// Assumes   rows padded to 128 and columns to KBLOCK in w and x; `stripes` does not depend on the number of rows
// Numbers   product.cuh's, unit after unit: the result of a row depends neither on the other rows nor on COLS
// Bound     bytes of w; Origin: the stripes of Marlin (Frantar et al., arXiv 2408.11743)

// Blocks per multiprocessor. Of 100 KB of shared memory, two would have too small a ring.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200 || STRIPES > 1 || \
    (COLS > 16 && MINS && !WHOLE)  // these would spill
#define BLOCKS 1
#else
#define BLOCKS 2
#endif

// Fewer instructions in flight where they would take more registers than there are: product.cuh multiply.
#define HALVES_AT_ONCE \
    (__CUDA_ARCH__ >= 1000 && COLS > 24 || __CUDA_ARCH__ == 800 && (COLS == 24 && MINS || COLS > 64) || COLS == 16 && !WHOLE ? 1 : HALVES)
#define EIGHTS_AT_ONCE (__CUDA_ARCH__ != 900 && COLS > 32 ? GROUP / 16 : MINS && !WHOLE ? 1 : NT)
#define ONCE (COLS == 1 || COLS > 24)  // weights leave the L2 cache first: a gain of 2 % or none, but a loss of 1 % for 16 rows
#define OF_EACH (AHEAD ? COLS : (COLS + 7) / 8)  // rows whose factor a warp finds

extern "C" __global__ void __launch_bounds__(288 + 32 * AHEAD, BLOCKS)
linear(const u8* w, const u8* x, float* out, int N, int T, int row_blocks, int k_blocks, int stripes, int slots,
       s64 slot_stride, s64 row_stride, const float* squares, int parts, float columns, float eps) {
    extern __shared__ __align__(128) u8 ring[];
    const u32 full = shared_address(ring + STAGES * STAGE), empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, BULK ? 1 : 32);
            barrier_init(empty + 8 * s, 256);
        }
        barrier_init(ready, AHEAD ? 1 : 8);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    release_next();
    __syncthreads();
    const int each = STRIPES > 1 && stripes > gridDim.x ? STRIPES : 1;
    int stripe = blockIdx.x * each;
    const u32 all = row_blocks * k_blocks, first = (u64)all * stripe / stripes;
    const int units = (int)((u64)all * min(stripe + each, stripes) / stripes - first);
    int row_block = first / k_blocks, k_block = first % k_blocks;

    if (warp == 8) {  // producer
#if !BULK
        depend();
#endif
        const auto copy_x = [&](int i) {  // for unit i
            copy(shared_address(ring + i % STAGES * STAGE) + UNIT_BYTES, x + (s64)((k_block + i) % k_blocks) * XUNIT, XUNIT,
                 full + 8 * (i % STAGES), lane);
        };
        const u8* unit = w + (s64)first * UNIT_BYTES;
        for (int i = 0; i < units; i++, unit += UNIT_BYTES) {
            const int s = i % STAGES;
            if (i >= STAGES) barrier_wait(empty + 8 * s, (i / STAGES - 1) % 2);
            if (lane == 0) barrier_expect(full + 8 * s, STAGE);
            copy(shared_address(ring + s * STAGE), unit, UNIT_BYTES, full + 8 * s, lane, ONCE);
#if BULK
            // weights depend on nothing: the ring fills while the kernel before this one ends, and x follows
            if (i == min(STAGES, units) - 1) {
                depend();
                for (int j = 0; j <= i; j++) copy_x(j);
            }
            if (i < STAGES) continue;
#endif
            copy_x(i);
#if !BULK
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + 8 * s) : "memory");
#endif
        }
#if !BULK
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
        return;
    }

    depend();  // the memory that the result takes may still be read
    __shared__ float factors[COLS];
    if (!AHEAD || warp == 8 + 1) {
        float sums[OF_EACH] = {};  // of rows that are read together
#pragma unroll 1
        for (int i = lane; i - lane < parts; i += 32)
#pragma unroll
            for (int r = 0; r < OF_EACH; r++) {
                const int t = AHEAD ? r : warp + r * 8;
                sums[r] += t < T && i < parts ? squares[t * parts + i] : 0.0f;
            }
#pragma unroll
        for (int r = 0; r < OF_EACH; r++) {
            const int t = AHEAD ? r : warp + r * 8;
            const float sum = parts ? warp_sum(sums[r]) : 0.0f;
            if (lane == 0 && t < COLS) factors[t] = parts ? 1.0f / sqrtf(sum / columns + eps) : 1.0f;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ready);  // the factors: wanted at the end
        if (AHEAD) return;
    }
    float acc[NT][ACC] = {};
    // the stripe that holds unit u is ((u + 1) * stripes - 1) / all
    const auto slot_of = [&](int block) { return (int)(stripe - ((u64)((u32)block * k_blocks + 1) * stripes - 1) / all); };
    int slot = AHEAD ? slot_of(row_block) : 0;  // the division while x is on its way, where a register is left for it
    int left = (int)((u64)all * min(stripe + 1, stripes) / stripes - first);  // units of this stripe, and of others
    [[maybe_unused]] int more = units - left;
    int s = 0;
    u32 phase = 0;
#pragma unroll 1
    while (left) {
        barrier_wait(full + 8 * s, phase);
        multiply<HALVES_AT_ONCE, EIGHTS_AT_ONCE>(acc, ring + s * STAGE + warp * TILE_BYTES, PackedRows{ring + s * STAGE + UNIT_BYTES, lane}, lane);
        barrier_arrive(empty + 8 * s);
        if (++s == STAGES) s = 0, phase ^= 1;
        const bool done = ++k_block == k_blocks;
        if (--left && !done) continue;
        barrier_wait(ready, 0);
        if (!AHEAD) slot = slot_of(row_block);
        // the stripe that ends a row block clears the slots that nobody has
        put(acc, out, N, T, row_block * 128 + warp * 16, slot, done ? slots : slot + 1, slot_stride, row_stride, factors, lane);
        slot = 0;  // of a row block that begins here
        if (done) row_block++, k_block = 0;
        if (STRIPES > 1 && !left) stripe++, left = more, more = 0;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < ACC; e++) acc[n][e] = 0.0f;
    }
}
