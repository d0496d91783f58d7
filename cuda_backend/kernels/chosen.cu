// chosen: y = x W' for a step of one row and the matrices of a stack that it chooses; experts.cu has more rows
// Meaning   common/reference.py NumpyOps.route_sigmoid, route_softmax, moe   Launcher  cuda_backend/weights.py chosen_linear
// In        w, last  as experts.cu; logits [E], bias [E] or null for softmax, gate: as moe.cu route
//           x        a packed row (store.cuh, cols = 1), perhaps of a norm that is not finished: linear.cu `squares`
//           y        with SWIGLU instead of x: (choice, 2 F) gates and ups of each choice, perhaps partial sums
// Out       out [part][choice][N] float32; without SWIGLU also weights [choices]
// Build     one type of tile.cuh; COLS=1; STAGES; PER of choose.cuh; SWIGLU 0 or 1; CP_ASYNC to force the sm_80 ring
// Work      a CTA per (choice, row block, part of k), as linear.cu. Each makes the choice for itself; with SWIGLU while
//           the kernel before ends, as it fills its ring: the logits were there two kernels ago. The others do so for the
//           shared matrix, which needs no choice
// Numbers   bit by bit those of moe.cu and experts.cu
// Bound     bytes of the chosen matrices

#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define BLOCKS 1
#else
#define BLOCKS 2
#endif

extern "C" __global__ void __launch_bounds__(288, BLOCKS)
chosen(const u8* w, s64 matrix_bytes, const u8* last, const float* logits, const float* bias, int E, int k, float scale, int shared_one,
       In gate, int gated, float* weights, const u8* x, In y, int F, float* out, int N, int row_blocks, int k_blocks,
       int parts, s64 part_stride, s64 row_stride, const float* squares, int norm_parts, float columns, float eps) {
#if SWIGLU
    release_next();
#endif
    extern __shared__ __align__(128) u8 shared[];
    u8* ring = shared;
    float* scratch = (float*)(shared + STAGES * STAGE);
    const u32 full = shared_address(scratch + 8 * SCRATCH), empty = full + 8 * STAGES, met = empty + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % parts, row_block = blockIdx.x / parts % row_blocks, j = blockIdx.x / parts / row_blocks;
    const int first_k = k_blocks * part / parts, units = k_blocks * (part + 1) / parts - first_k;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, BULK ? 1 : 32);
            barrier_init(empty + 8 * s, 8);
        }
        barrier_init(met, 8);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();

    if (warp == 8) {  // producer
        float added[PER];
        biases(added, bias, E);
        const bool ahead = SWIGLU || j == k;
        if (!ahead || !BULK) depend();
        const u8* unit = last;
        if (j < k) {
            int mine = 0;
            float p = 0.0f;
            const float total = choose(logits, E, k, !bias, added, [&](int i, int id, float of) {
                if (i == j) mine = id;
                if (i == lane) p = of;
            });
            unit = w + mine * matrix_bytes;
#if !SWIGLU
            if (blockIdx.x == 0) {
                if (lane < k) weights[lane] = p * scale / total;
                if (shared_one && lane == k) weights[k] = gated ? sigmoid(load_one(gate, row_of(gate, 0))) : 1.0f;
            }
#endif
        }
        unit += ((s64)row_block * k_blocks + first_k) * UNIT_BYTES;
        x += (s64)first_k * XUNIT;
        for (int i = 0; i < units; i++, unit += UNIT_BYTES) {
            const int s = i % STAGES;
            if (i >= STAGES) barrier_wait(empty + 8 * s, (i / STAGES - 1) % 2);
            const u32 to = shared_address(ring + s * STAGE);
            if (lane == 0) barrier_expect(full + 8 * s, SWIGLU ? UNIT_BYTES : STAGE);
            copy(to, unit, UNIT_BYTES, full + 8 * s, lane);
#if !SWIGLU
#if BULK
            if (ahead && i < min(STAGES, units)) {  // the row follows
                if (i < min(STAGES, units) - 1) continue;
                depend();
                for (int n = 0; n < i; n++)
                    copy(shared_address(ring + n * STAGE) + UNIT_BYTES, x + n * XUNIT, XUNIT, full + 8 * n, lane);
            }
#endif
            copy(to + UNIT_BYTES, x + i * XUNIT, XUNIT, full + 8 * s, lane);
#endif
#if !BULK
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + 8 * s) : "memory");
#endif
        }
#if !BULK
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
        return;
    }

    depend();
    float factor = 1.0f;
#if SWIGLU
    int meetings = 0;
    const auto meet = [&] {  // the warps that multiply
        __syncwarp();
        if (lane == 0) barrier_arrive(met);
        barrier_wait(met, meetings++ % 2);
    };
#else
    release_next();  // not before: what comes next takes the logits for granted
    if (norm_parts) {  // of a norm that has still to divide by the root of the mean of `squares`, as experts.cu adds them
        float sum = 0.0f;
        for (int i = lane % 4; i < norm_parts; i += 4) sum += squares[i];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        factor = 1.0f / sqrtf(sum / columns + eps);
    }
#endif
    float acc[NT][ACC] = {};
    for (int i = 0; i < units; i++) {
        const int s = i % STAGES;
#if SWIGLU
        if (s == 0) {  // the rows of as many units as the ring holds, where their copies would be
            if (i) meet();
            const int end = min(STAGES, units - i) * KBLOCK;
            for (int c = warp * 128 + lane * 4; c / 128 * 128 < end; c += 1024) {
                const int channel = (first_k + i) * KBLOCK + c;
                float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (channel < F) {
                    const float* from = row_of(y, j) + channel;
                    const float4 g = slots_of(from, y), up = slots_of(from + F, y);
                    v = make_float4(silu(g.x) * up.x, silu(g.y) * up.y, silu(g.z) * up.z, silu(g.w) * up.w);
                }
                store_four(Out{0, ring + c / KBLOCK * STAGE + UNIT_BYTES, 0, KBLOCK, 1, KBLOCK / 32}, 0, c % KBLOCK, v);
            }
            meet();
        }
#endif
        barrier_wait(full + 8 * s, (i / STAGES) % 2);
        multiply(acc, ring + s * STAGE + warp * TILE_BYTES, ring + s * STAGE + UNIT_BYTES, scratch + warp * SCRATCH, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * s);
    }
    put(acc, out + part * part_stride + j * row_stride, N, 1, row_block * 128 + warp * 16, 0, 1, 0, 0, &factor, lane);
}
