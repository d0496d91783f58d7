// single: y = x W' for a step of one row and several matrices, its chosen experts or one per head; experts.cu takes more rows
// Meaning   common/reference.py NumpyOps.route_sigmoid, route_softmax, moe, head_linear   Launcher  cuda_backend/expert_products.py
// In        of       the matrices: matrices.cuh; choice  choose.cuh, with CHOICE
//           x        packed rows (store.cuh, cols = 1), x_bytes apart, perhaps of a deferred norm: linear.cu `squares`
//           clamp    with CLAMPED: biases of gates and ups; ids [k] of the experts are written with MADE 0, and read with SWIGLU
//           y        with MADE: floats, perhaps partial sums, from which row j is made: their sum (SUM), or SwiGLU of gate and up (SWIGLU)
// Out       out [part][j][N] float32, with PACK one packed row of all j; with CHOICE and SWIGLU also the weights of the experts
// Build     one type of tile.cuh; COLS=1; STAGES; BLOCKS per multiprocessor; PER of choose.cuh; CHOICE 0 or 1; MADE 0, SUM or
//           SWIGLU; PACK 0 or 1; CLAMPED: SwiGLU is that of rows.cu `clamped`
// Work      a CTA per (j, row block, part of k), as linear.cu. Each CTA computes the choice. If its matrix is known before the
//           previous kernel ends (a head, a shared expert, experts chosen earlier), it loads weights meanwhile
//           Addresses of all experts are loaded with the biases, because a load after the choice would wait for memory
// Numbers   bitwise identical to moe.cu and experts.cu
// Bound     bytes of the matrices
// Tried     variant against the kernel of that time (one row, one H200).
//           matrices of heads as float16, k_up in the gathering kernel and v_up packing its result -> GLM 3.056 ms against
//             3.076, but 5.85 against 4.35 at 16 rows: three times the bytes, no tensor cores
//           with MADE, the third stage of the ring loaded after the wait as well -> GLM 2.000 ms against 1.991, Laguna 1.342 against
//             1.342

#define SUM 1
#define SWIGLU 2
#define KNOWN (!CHOICE || MADE)
#ifndef CLAMPED
#define CLAMPED 0
#endif

struct Clamp {  // cuda_backend/prototypes.py CLAMP
    const float *gate, *up;  // [E][K]
    int* ids;
    float limit;
};

extern "C" __global__ void __launch_bounds__(288, BLOCKS)
single(Matrices of, Choice choice, Clamp clamp, const u8* x, s64 x_bytes, In y, Out out, int N, int K,
       int k_blocks, int parts, u32 parts_inverse, s64 part_stride, s64 row_stride, const float* squares, int norm_parts,
       float columns, float eps) {
#if KNOWN
    release_next();
#endif
    extern __shared__ __align__(128) u8 ring[];
    const u32 full = shared_address(ring + STAGES * STAGE), empty = full + 8 * STAGES, met = empty + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x, row_block = blockIdx.y, j = blockIdx.z;
    const int first_k = quotient(k_blocks * part, parts, parts_inverse);
    const int units = (int)quotient(k_blocks * (part + 1), parts, parts_inverse) - first_k;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, BULK ? 1 : 32);
            barrier_init(empty + 8 * s, 256);
        }
        barrier_init(met, 256);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();

    if (warp == 8) {  // producer
#if CHOICE
        const int k = choice.k;
        [[maybe_unused]] const bool ahead = KNOWN || j == k, writes = MADE && part == 0 && row_block == 0 && j == 0;
        float added[PER];
        u64 at[ADDRESSES];
        [[maybe_unused]] float p = 0.0f, total = 0.0f;
        biases(added, choice);
        if (!MOVED || MADE) places(at, of, j < k);
        if (!ahead || !BULK) depend();
        if (MOVED && !MADE) places(at, of, j < k);  // the previous kernel may have written them
        int mine = 0;
        if (j < k || writes)
            total = choose(choice, choice.logits, writes ? k : j + 1, added, [&](int i, int id, float probability) {
                if (i == j) mine = id;
                if (i == lane) p = probability;
            });
#if CLAMPED && !MADE
        if (part == 0 && row_block == 0 && lane == 0) clamp.ids[j] = mine;  // after waiting, as there is no shared expert
#endif
        const u8* unit = j < k ? place_of(at, of, mine) : of.last;
#else
        [[maybe_unused]] const bool ahead = true;
        const u8* unit = of.first + j * of.bytes;
        if (!BULK) depend();
#endif
        unit += ((s64)row_block * k_blocks + first_k) * UNIT_BYTES;
        x += j * x_bytes + (s64)first_k * XUNIT;
        for (int i = 0; i < units; i++, unit += UNIT_BYTES) {
            const int s = i % STAGES;
            if (i >= STAGES) barrier_wait(empty + 8 * s, (i / STAGES - 1) % 2);
            const u32 to = shared_address(ring + s * STAGE);
            if (lane == 0) barrier_expect(full + 8 * s, MADE ? UNIT_BYTES : STAGE);
            copy(to, unit, UNIT_BYTES, full + 8 * s, lane, true);
#if !MADE
#if BULK
            if (ahead && i < min(PREFETCH, units)) {  // the row of x is copied later
                if (i < min(PREFETCH, units) - 1) continue;
                depend();
                for (int n = 0; n < i; n++)
                    copy(shared_address(ring + n * STAGE) + UNIT_BYTES, x + n * XUNIT, XUNIT, full + 8 * n, lane);
            }
#endif
            copy(to + UNIT_BYTES, x + i * XUNIT, XUNIT, full + 8 * s, lane);
#endif
            copies_arrive(full + 8 * s);
        }
#if CHOICE && MADE
        if (writes) {
            depend();
            if (lane < k) choice.weights[lane] = p * choice.scale / total;
            if (lane == k && choice.shared_one) choice.weights[k] = shared_weight(choice, 0);
        }
#endif
        copies_end();
        return;
    }

    depend();
#if !KNOWN
    release_next();  // not earlier: the next kernel reads the logits without waiting
#endif
    float factor = 1.0f;
    if (norm_parts) {  // factor of a deferred norm, 1 / the root of the mean of `squares`, added as in experts.cu
        float sum = 0.0f;
        for (int i = lane % 4; i < norm_parts; i += 4) sum += squares[i];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        factor = norm_factor(sum, columns, eps);
    }
#if CLAMPED && MADE
    const int bias_at = clamp.ids[j] * K;
#endif
#if MADE || PACK
    int meetings = 0;
    const auto meet = [&] {  // the warps that multiply
        barrier_arrive(met);
        barrier_wait(met, meetings++ % 2);
    };
#endif
    float acc[NT][ACC] = {};
    for (int i = 0; i < units; i++) {
        const int s = i % STAGES;
#if MADE
        if (s == 0) {  // the rows of as many units as the ring holds, in the places of their copies
            if (i) meet();
            const int end = min(STAGES, units - i) * KBLOCK;
            for (int c = warp * 128 + lane * 4; c / 128 * 128 < end; c += 1024) {
                const int channel = (first_k + i) * KBLOCK + c;
                float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (channel < K) {
                    const float* from = row_of(y, j) + channel;
                    v = sum_of_partials(from, y);
#if MADE == SWIGLU
                    const float4 up = sum_of_partials(from + K, y);
#if CLAMPED
                    const float *of_gate = clamp.gate + bias_at + channel, *of_up = clamp.up + bias_at + channel;
                    v = make_float4(clamped_swiglu(v.x + of_gate[0], up.x + of_up[0], clamp.limit),
                                    clamped_swiglu(v.y + of_gate[1], up.y + of_up[1], clamp.limit),
                                    clamped_swiglu(v.z + of_gate[2], up.z + of_up[2], clamp.limit),
                                    clamped_swiglu(v.w + of_gate[3], up.w + of_up[3], clamp.limit));
#else
                    v = make_float4(silu(v.x) * up.x, silu(v.y) * up.y, silu(v.z) * up.z, silu(v.w) * up.w);
#endif
#endif
                }
                store_four(Out{0, ring + c / KBLOCK * STAGE + UNIT_BYTES, 0, KBLOCK, 1, KBLOCK / 32, !WHOLE}, 0, c % KBLOCK, v);
            }
            meet();
        }
#endif
        barrier_wait(full + 8 * s, (i / STAGES) % 2);
        multiply<MINS && !WHOLE ? 1 : HALVES, NT>(
            acc, ring + s * STAGE + warp * TILE_BYTES, PackedRows{ring + s * STAGE + UNIT_BYTES, lane}, lane);
        give_back<NT>(empty + 8 * s, zero_of(empty), acc);
    }
#if PACK
    __align__(16) __shared__ float columns_of[128];
    if (lane % 4 == 0) columns_of[warp * 16 + lane / 4] = acc[0][0] * factor, columns_of[warp * 16 + lane / 4 + 8] = acc[0][1] * factor;
    meet();
    if (warp == 0) store_four(out, 0, j * N + row_block * 128 + lane * 4, *(const float4*)(columns_of + lane * 4));
#else
    put(acc, out.dense + part * part_stride + j * row_stride, N, 1, row_block * 128 + warp * 16, 0, 1, 0, 0, &factor, lane);
#endif
}
