// linear: y = x W' for a quantized W and 1 to 64 rows of x, as partial sums along k
// Meaning   common/reference.py NumpyOps.linear          Launcher  cuda_backend/weights.py linear
// In        w    units of tile.cuh                        Out       out [slot][T][N] float32, to be added in slot order
//           x    int8 codes per 32 columns, with scale and scale * sum (store.cuh); where `parts` is not 0, rows that an
//           RMS norm has still to divide by the root of their mean square, the sum of `squares` [T][parts] / columns
// Build     one type of tile.cuh; COLS 1, 8, 16, 24, 32, 48, 64; STAGES; AHEAD: a warp of its own finds the factors, which for
//           more than 8 rows would be late; CP_ASYNC to force the sm_80 ring
// Work      256 threads multiply, one 16-row tile per warp; warp 8 feeds a ring of units; where AHEAD, warp 9 finds the
//           factors of a norm meanwhile. A CTA takes a stripe of the (row block, k block) list, so it may end a row block
//           early; each CTA that touches a row block has a slot.
// Assumes   rows padded to 128 and columns to KBLOCK in w and x; gridDim.x does not depend on the number of rows
// Numbers   integer dots are exact, scales applied in float32 in a fixed order: the result of a row depends neither on
//           the other rows nor on COLS
// Bound     bytes of w; Origin: the stripes of Marlin (Frantar et al., arXiv 2408.11743)

// Blocks per multiprocessor. Of 100 KB of shared memory, two would have too small a ring; and two leave a thread 96
// registers, which these products pass.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define BLOCKS 1
#elif COLS > (__CUDA_ARCH__ < 900 ? 32 : 48) || (COLS > (GROUP == 16 ? 8 : 16) && MINS && !EXACT_MINS) || \
    (COLS > 24 && GROUP == 16 && (COLS > 32 || !P4))
#define BLOCKS 1
#else
#define BLOCKS 2
#endif

#define OF_EACH (AHEAD ? COLS : (COLS + 7) / 8)  // rows whose factor a warp finds

extern "C" __global__ void __launch_bounds__(288 + 32 * AHEAD, BLOCKS)
linear(const u8* w, const u8* x, float* out, int N, int T, int row_blocks, int k_blocks, int slots, s64 slot_stride,
       s64 row_stride, const float* squares, int parts, float columns, float eps) {
    extern __shared__ __align__(128) u8 shared[];
    u8* ring = shared;
    float* scratch = (float*)(shared + STAGES * STAGE);
    const u32 full = shared_address(scratch + 8 * SCRATCH), empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, BULK ? 1 : 32);
            barrier_init(empty + 8 * s, 8);
        }
        barrier_init(ready, AHEAD ? 1 : 8);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    release_next();
    __syncthreads();
    const u32 all = row_blocks * k_blocks, first = (u64)all * blockIdx.x / gridDim.x;
    const int units = (int)((u64)all * (blockIdx.x + 1) / gridDim.x - first);
    int row_block = first / k_blocks, k_block = first % k_blocks;

    if (warp == 8) {  // producer
#if !BULK
        depend();
#endif
        const u8* unit = w + (s64)first * UNIT_BYTES;
        for (int i = 0; i < units; i++, unit += UNIT_BYTES) {
            const int s = i % STAGES;
            if (i >= STAGES) barrier_wait(empty + 8 * s, (i / STAGES - 1) % 2);
            const u32 to = shared_address(ring + s * STAGE);
            if (lane == 0) barrier_expect(full + 8 * s, STAGE);
            copy(to, unit, UNIT_BYTES, full + 8 * s, lane);
#if BULK
            // weights depend on nothing: the ring fills while the kernel before this one ends, and x follows
            if (i == min(STAGES, units) - 1) {
                depend();
                for (int j = 0; j <= i; j++)
                    copy(shared_address(ring + j * STAGE) + UNIT_BYTES, x + (s64)((k_block + j) % k_blocks) * XUNIT, XUNIT,
                         full + 8 * j, lane);
            }
            if (i < STAGES) continue;
#endif
            copy(to + UNIT_BYTES, x + (s64)((k_block + i) % k_blocks) * XUNIT, XUNIT, full + 8 * s, lane);
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
    if (!AHEAD || warp == 9) {
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
    // the CTA that holds unit u is ((u + 1) * G - 1) / U
    const auto slot_of = [&](int block) { return (int)(blockIdx.x - ((u64)((u32)block * k_blocks + 1) * gridDim.x - 1) / all); };
    int slot = AHEAD ? slot_of(row_block) : 0;  // the division while x is on its way, where a register is left for it
    for (int i = 0; i < units; i++) {
        const int s = i % STAGES;
        barrier_wait(full + 8 * s, (i / STAGES) % 2);
        multiply(acc, ring + s * STAGE + warp * TILE_BYTES, ring + s * STAGE + UNIT_BYTES, scratch + warp * SCRATCH, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * s);
        const bool done = ++k_block == k_blocks;
        if (!done && i != units - 1) continue;
        barrier_wait(ready, 0);
        if (!AHEAD) slot = slot_of(row_block);
        // the CTA that ends a row block clears the slots that nobody has
        put(acc, out, N, T, row_block * 128 + warp * 16, slot, done ? slots : slot + 1, slot_stride, row_stride, factors, lane);
        row_block++, k_block = 0, slot = 0;  // of a row block that begins here
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < ACC; e++) acc[n][e] = 0.0f;
    }
}
