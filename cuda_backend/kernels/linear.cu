// linear: y = x W' for a quantized W and 1 to 64 rows of x, as partial sums along k
// Meaning   common/reference.py NumpyOps.linear, moe     Launcher  cuda_backend/weights.py linear
// In        w    units of tile.cuh                        Out       out [slot][T][N] float32, to be added in slot order
//           x    int8 codes per 32 columns, with scale and scale * sum (rows.cu writes them)
// Build     one type of tile.cuh; COLS 1, 8, 16, 24, 32, 48, 64; STAGES; EXPERTS for moe; CP_ASYNC to force the sm_80 ring
// Work      256 threads multiply, one 16-row tile per warp; warp 8 feeds a ring of units. A CTA takes a stripe of the
//           (row block, k block) list, so it may end a row block early; each CTA that touches a row block has a slot.
//           EXPERTS: a CTA takes whole row blocks of (row, expert) pairs instead, COLS = 1
// Assumes   rows padded to 128 and columns to KBLOCK in w and x; gridDim.x does not depend on the number of rows
// Numbers   integer dots are exact, scales applied in float32 in a fixed order: the result of a row depends neither on
//           the other rows nor on COLS
// Bound     bytes of w; Origin: the stripes of Marlin (Frantar et al., arXiv 2408.11743)

#if COLS == 1
#define NT 1
#define ACC 2  // columns 1 to 7 are padding
#define XTILE 48
#else
#define NT (COLS / 8)
#define ACC 4
#define XTILE 352
#endif
#define XGROUP (XTILE * NT)
#define XUNIT (KBLOCK / 32 * XGROUP)
#define STAGE (UNIT_BYTES + XUNIT)
#define MAGIC 12582912.0f  // 1.5 * 2^23: an int32 accumulator that starts at its bits reads as a float

#if COLS > 32 || __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define BLOCKS 1  // per multiprocessor: of 100 KB of shared memory, two would have too small a ring
#else
#define BLOCKS 2
#endif

#if __CUDA_ARCH__ >= 900 && !defined(CP_ASYNC)
#define BULK 1
#else
#define BULK 0
#endif

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

// Copy `bytes` (a multiple of 16) to shared memory; `full` completes when they have landed. The whole producer warp.
__device__ __forceinline__ void copy(u32 to, const u8* from, int bytes, u32 full, int lane) {
#if BULK
    if (lane == 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
            "l"(from), "r"(bytes), "r"(full)
            : "memory");
#else
    for (int i = lane * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
#endif
}

// c = MAGIC's bits + a b; the constant stays in registers.
__device__ __forceinline__ void mma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&start)[4]) {
#if GROUP == 32
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start[0]), "r"(start[1]), "r"(start[2]),
          "r"(start[3]));
#endif
}
__device__ __forceinline__ void mma_half(int (&c)[4], u32 a0, u32 a1, u32 b, const int (&start)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%6,%7}, {%8,%8,%8,%8};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1), "f"(0.0f));
}

// acc += scale * dx * dot
__device__ __forceinline__ void accumulate(float (&acc)[ACC], const int (&c)[4], float low, float high, float2 dx) {
    const float from_low = -MAGIC * low, from_high = -MAGIC * high;
    acc[0] = __fmaf_rn(__fmaf_rn(__int_as_float(c[0]), low, from_low), dx.x, acc[0]);
#if COLS == 1
    acc[1] = __fmaf_rn(__fmaf_rn(__int_as_float(c[2]), high, from_high), dx.x, acc[1]);
#else
    acc[1] = __fmaf_rn(__fmaf_rn(__int_as_float(c[1]), low, from_low), dx.y, acc[1]);
    acc[2] = __fmaf_rn(__fmaf_rn(__int_as_float(c[2]), high, from_high), dx.x, acc[2]);
    acc[3] = __fmaf_rn(__fmaf_rn(__int_as_float(c[3]), high, from_high), dx.y, acc[3]);
#endif
}

// acc += offset * sx, with sx = dx * the sum of the group's codes
__device__ __forceinline__ void add_minima(float (&acc)[ACC], float low, float high, float2 sx) {
    acc[0] = __fmaf_rn(low, sx.x, acc[0]);
#if COLS == 1
    acc[1] = __fmaf_rn(high, sx.x, acc[1]);
#else
    acc[1] = __fmaf_rn(low, sx.y, acc[1]);
    acc[2] = __fmaf_rn(high, sx.x, acc[2]), acc[3] = __fmaf_rn(high, sx.y, acc[3]);
#endif
}

// The same for the 16 codes in b, whose sum nobody has stored.
__device__ __forceinline__ void add_minima_of_half(float (&acc)[ACC], float low, float high, float2 dx, u32 b) {
    const int zero[4] = {0, 0, 0, 0};
    int sum[4];
    mma_half(sum, 0x01010101u, 0x01010101u, b, zero);
    add_minima(acc, low, high, make_float2(dx.x * sum[0], dx.y * sum[1]));
}

__device__ __forceinline__ void read4(float (&v)[4], const float* from) {
    const float4 e = *(const float4*)from;
    v[0] = e.x, v[1] = e.y, v[2] = e.z, v[3] = e.w;
}

// One tile times one unit of x.
__device__ __forceinline__ void multiply(float (&acc)[NT][ACC], const u8* tile, const u8* x, float* scratch, int lane) {
    const int row = lane / 4, t = lane % 4, bits = __float_as_int(MAGIC);
    const int start[4] = {bits, bits, bits, bits};
    const int step = GROUP == 32 ? 4 : 2;  // groups of 32 columns that four scales cover
    __syncwarp();
    decode_scales(tile, lane, scratch);
    __syncwarp();
    const float* scales = scratch + row * SCRATCH_ROW;
    // column tiles at a time, so that nothing spills
    const int most = GROUP == 32 || !MINS ? 4 : __CUDA_ARCH__ < 1000 ? 8 : 2;
#pragma unroll
    for (int first = 0; first < NT; first += most) {
        float low[4], high[4];
#if __CUDA_ARCH__ >= 1000 && GROUP == 16
        constexpr int unrolled = 2;  // a product of 16 columns takes more registers there
#else
        constexpr int unrolled = KBLOCK / 32;
#endif
#pragma unroll unrolled
        for (int j = 0; j < KBLOCK / 32; j++) {
            const float* at = scales + j / step * 4;
            if (j % step == 0) read4(low, at), read4(high, at + 8 * SCRATCH_ROW);
#if MINS && !EXACT_MINS
            float low_min[4], high_min[4];
            read4(low_min, at + 16 * SCRATCH_ROW), read4(high_min, at + 24 * SCRATCH_ROW);
#endif
            u32 a[4];
            unpack(tile, j, lane, a);
#pragma unroll
            for (int n = first; n < NT && n < first + most; n++) {
                const u8* group = x + j * XGROUP + n * XTILE;
                int c[4];
#if COLS == 1  // every column of the product is the one column of x
                const uint2 b = *(const uint2*)(group + t * 8);
                const float d = *(const float*)(group + 32);
                const float2 dx = make_float2(d, d);
#else
                const uint2 b = *(const uint2*)(group + lane * 8);
                const float2 dx = *(const float2*)(group + 256 + t * 8);
#endif
#if GROUP == 32
                mma(c, a, b.x, b.y, start);
                accumulate(acc[n], c, low[j % 4], high[j % 4], dx);
#if MINS && !EXACT_MINS
                const float* sum = (const float*)(group + (COLS == 1 ? 36 : 288 + t * 8));
                add_minima(acc[n], low_min[j % 4], high_min[j % 4], make_float2(sum[0], sum[COLS != 1]));
#endif
#else
                const int g = j % 2 * 2;
                mma_half(c, a[0], a[1], b.x, start);
                accumulate(acc[n], c, low[g], high[g], dx);
                mma_half(c, a[2], a[3], b.y, start);
                accumulate(acc[n], c, low[g + 1], high[g + 1], dx);
#if MINS
                add_minima_of_half(acc[n], low_min[g], high_min[g], dx, b.x);
                add_minima_of_half(acc[n], low_min[g + 1], high_min[g + 1], dx, b.y);
#endif
#endif
            }
        }
    }
#if EXACT_MINS  // the sum over 8 groups as one product: minima times the high and the low half of sx
    const u32 low_min = ((const u32*)(scales + 8))[t], high_min = ((const u32*)(scales + 8 + 8 * SCRATCH_ROW))[t];
    const float low_factor = scales[12], high_factor = scales[12 + 8 * SCRATCH_ROW];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float m[4];
#if COLS == 1
        mma_bf16(m, low_min, high_min, *(const u32*)(x + 2 * t * XGROUP + 40), *(const u32*)(x + (2 * t + 1) * XGROUP + 40));
        acc[n][0] = __fmaf_rn(low_factor, m[0], acc[n][0]), acc[n][1] = __fmaf_rn(high_factor, m[2], acc[n][1]);
#else
        const uint2 b = *(const uint2*)(x + row * XGROUP + n * XTILE + 320 + t * 8);
        mma_bf16(m, low_min, high_min, b.x, b.y);
        acc[n][0] = __fmaf_rn(low_factor, m[0], acc[n][0]), acc[n][1] = __fmaf_rn(low_factor, m[1], acc[n][1]);
        acc[n][2] = __fmaf_rn(high_factor, m[2], acc[n][2]), acc[n][3] = __fmaf_rn(high_factor, m[3], acc[n][3]);
#endif
    }
#endif
}

// Counts through this CTA's units: row block, k block, and with EXPERTS the (row, expert) pair.
struct Work {
    int units, row_block, k_block, k_blocks, item, row_blocks;
    __device__ Work(int row_blocks_, int k_blocks_, int pairs) : k_blocks(k_blocks_), row_blocks(row_blocks_) {
#ifdef EXPERTS
        item = blockIdx.x, k_block = 0;
        int items = pairs * row_blocks;
        units = item < items ? ((items - 1 - item) / (int)gridDim.x + 1) * k_blocks : 0;
        row_block = item % row_blocks;
#else
        u32 all = row_blocks * k_blocks, first = (u64)all * blockIdx.x / gridDim.x;
        units = (u64)all * (blockIdx.x + 1) / gridDim.x - first;
        row_block = first / k_blocks, k_block = first % k_blocks, item = 0;
#endif
    }
    __device__ void next() {
        if (++k_block == k_blocks) {
            k_block = 0;
#ifdef EXPERTS
            item += gridDim.x, row_block = item % row_blocks;
#else
            row_block++;
#endif
        }
    }
};

extern "C" __global__ void __launch_bounds__(288, BLOCKS)
linear(const u8* w, const u8* x, float* out, int N, int T, int row_blocks, int k_blocks, int slots, s64 slot_stride,
       s64 row_stride, const int* ids, s64 expert_bytes, int x_divisor, s64 x_bytes) {
    extern __shared__ __align__(128) u8 shared[];
    u8* ring = shared;
    float* scratch = (float*)(shared + STAGES * STAGE);
    const u32 full = shared_address(scratch + 8 * SCRATCH), empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, BULK ? 1 : 32);
            barrier_init(empty + 8 * s, 8);
        }
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    release_next();
    __syncthreads();
    Work work(row_blocks, k_blocks, T);

    if (warp == 8) {  // producer
#if !BULK || defined(EXPERTS)
        depend();  // here even the address of the weights comes from the kernel before
#else
        const int first_k = work.k_block, work_units = work.units;
#endif
        const u8* unit = w + ((s64)work.row_block * k_blocks + work.k_block) * UNIT_BYTES;
        for (int i = 0; i < work.units; i++, work.next()) {
            const int s = i % STAGES;
            const u8* x_unit = x + (s64)work.k_block * XUNIT;
#ifdef EXPERTS
            const int pair = work.item / row_blocks;
            x_unit += (pair / x_divisor) * x_bytes;
            unit = w + ids[pair] * expert_bytes + ((s64)work.row_block * k_blocks + work.k_block) * UNIT_BYTES;
#endif
            if (i >= STAGES) barrier_wait(empty + 8 * s, (i / STAGES - 1) % 2);
            const u32 to = shared_address(ring + s * STAGE);
#if BULK
            if (lane == 0)
                asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(full + 8 * s),
                             "r"(STAGE)
                             : "memory");
#endif
            copy(to, unit, UNIT_BYTES, full + 8 * s, lane);
            unit += UNIT_BYTES;
#if BULK && !defined(EXPERTS)
            // weights depend on nothing: the ring fills while the kernel before this one ends, and x follows
            if (i == min(STAGES, work_units) - 1) {
                depend();
                for (int j = 0; j <= i; j++)
                    copy(shared_address(ring + j * STAGE) + UNIT_BYTES, x + (s64)((first_k + j) % k_blocks) * XUNIT, XUNIT,
                         full + 8 * j, lane);
            }
            if (i < STAGES) continue;
#endif
            copy(to + UNIT_BYTES, x_unit, XUNIT, full + 8 * s, lane);
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
    float acc[NT][ACC] = {};
    for (int i = 0; i < work.units; i++) {
        const int s = i % STAGES;
        barrier_wait(full + 8 * s, (i / STAGES) % 2);
        multiply(acc, ring + s * STAGE + warp * TILE_BYTES, ring + s * STAGE + UNIT_BYTES, scratch + warp * SCRATCH, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * s);
        const int row_block = work.row_block, done = work.k_block == k_blocks - 1;
#ifdef EXPERTS
        const int pair = work.item / row_blocks;
#endif
        work.next();
        if (!done && i != work.units - 1) continue;

        const int row = row_block * 128 + warp * 16 + lane / 4;
#ifdef EXPERTS
        float* to = out + pair * row_stride + row;
        if (lane % 4 == 0) {
            if (row < N) to[0] = acc[0][0];
            if (row + 8 < N) to[8] = acc[0][1];
        }
#else
        // the CTA that holds unit u is ((u + 1) * G - 1) / U
        const u32 first = ((u64)((u32)row_block * k_blocks + 1) * gridDim.x - 1) / (u32)(row_blocks * k_blocks);
        const int slot = blockIdx.x - first;
        for (int to_slot = slot; to_slot < (done ? slots : slot + 1); to_slot++) {  // the last one clears unused slots
            const bool keep = to_slot == slot;
#if COLS == 1
            float* to = out + to_slot * slot_stride + row;
            if (lane % 4 == 0) {
                if (row < N) to[0] = keep ? acc[0][0] : 0.0f;
                if (row + 8 < N) to[8] = keep ? acc[0][1] : 0.0f;
            }
#else
            float* to = out + to_slot * slot_stride + lane % 4 * 2 * row_stride + row;
            int left = T - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (left > 0 && row < N) to[0] = keep ? acc[n][0] : 0.0f;
                if (left > 1 && row < N) to[row_stride] = keep ? acc[n][1] : 0.0f;
                if (left > 0 && row + 8 < N) to[8] = keep ? acc[n][2] : 0.0f;
                if (left > 1 && row + 8 < N) to[row_stride + 8] = keep ? acc[n][3] : 0.0f;
                to += 8 * row_stride, left -= 8;
            }
#endif
        }
#endif
        for (int n = 0; n < NT; n++)
            for (int e = 0; e < ACC; e++) acc[n][e] = 0.0f;
    }
}
