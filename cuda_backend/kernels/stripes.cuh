// stripes: the part of a CTA in y = x W' for one quantized matrix: linear.cu
// Build     one type of tile.cuh; STAGES; HALVES_AT_ONCE and EIGHTS_AT_ONCE: cuda_backend/occupancy.py; COLS, STRIPES and
//           AHEAD as linear.cu
// Tried     ms of a step: variant against the kernel of that time (W: WeDLM-8B, one H200).
//           the fewest stripes with the same longest stripe -> Qwen3.6-27B 7.59 against 7.40 at 16 rows: CTAs stay idle at the end
//           gate and up in 256 stripes, two partial sums instead of three -> W 1.684 against 1.672 with 264; 236 to 262 1.670 to
//             1.719 against 1.650
//           down in 256, 250, 220 stripes -> W 1.685, 1.696, 1.703 against 1.672: CTAs that end at the same time leave no room for an
//           early start
//           four units a stripe of the output projection -> W 1.675 and 1.684 against 1.674 with three, 2.047 against 2.032 at 16
//             rows
//           three or four units where fewer CTAs than multiprocessors are left -> Laguna 1.362, 1.380 against 1.324; GLM 2.000, 2.023
//             against 1.955
//           stripes of two types by bytes on average, by units, Q6_K as 1.25 or 0.8 of its bytes -> W 1.736 to 1.743 against 1.731 to
//             1.736
//           evict_first at 16 rows for all matrices -> Qwen3.6-27B 5.98 against 5.91, from 24 rows on at 22 6.88 against 6.82; causes
//             not known

#define OF_EACH (AHEAD ? COLS : (COLS + 7) / 8)  // rows whose factor one warp computes

// Factors of rows first, first + apart, ...: 1 / the root of the mean of their squares. The shuffles of all rows are in
// flight together; a lane per row finishes it and arrives at `ready`, which counts rows.
__device__ __forceinline__ void find_factors(float* factors, const Rows& x, int first, int apart, u32 ready, int lane) {
    float sums[OF_EACH] = {};
#pragma unroll 1
    for (int i = lane; i - lane < x.parts; i += 32)
#pragma unroll
        for (int r = 0; r < OF_EACH; r++) {
            const int t = first + r * apart;
            sums[r] += t < x.T && i < x.parts ? x.squares[t * x.parts + i] : 0.0f;
        }
#pragma unroll
    for (int m = 16; m; m >>= 1)
#pragma unroll
        for (int r = 0; r < OF_EACH; r++) sums[r] += __shfl_xor_sync(FULL, sums[r], m);
    float sum = sums[0];
#pragma unroll
    for (int r = 1; r < OF_EACH; r++)
        if (lane == r) sum = sums[r];
    if (lane < OF_EACH) {
        factors[first + lane * apart] = x.parts ? norm_factor(sum, x.columns, x.eps) : 1.0f;
        barrier_arrive(ready);
    }
}

__device__ __forceinline__ void multiply_stripes(const Matrix& m, int cta, const Rows& x, const Partials& to, u8* ring, float* factors) {
    const u32 full = shared_address(ring + STAGES * STAGE), empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, BULK ? 1 : 32);
            barrier_init(empty + 8 * s, 256);
        }
        barrier_init(ready, COLS);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    release_next();
    __syncthreads();
    int stripe = STRIPES > 1 ? cta * m.each : cta;
    const auto first_of = [&](int of) { return (int)quotient((u32)m.units * of, m.stripes, m.stripes_inverse); };  // unit of a stripe
    const int first = first_of(stripe), units = first_of(STRIPES > 1 ? min(stripe + m.each, m.stripes) : stripe + 1) - first;
    int row_block = quotient(first, m.k_blocks, m.k_blocks_inverse), k_block = first - row_block * m.k_blocks;

    if (warp == 8) {  // producer
#if !BULK
        depend();
#endif
        const u8* unit = m.w + (s64)first * UNIT_BYTES;
        // weights leave the L2 cache first: a gain of 1 or 2 %, but a loss for 24 rows, and for 8 and 16 where W has no more k blocks than
        // row blocks
        const bool once = COLS == 1 || COLS > 24 || (COLS < 24 && m.k_blocks * m.k_blocks > m.units);
        const auto copy_x = [&](int s) {  // of the next unit
            copy(shared_address(ring + s * STAGE) + UNIT_BYTES, x.packed + (s64)k_block * XUNIT, XUNIT, full + 8 * s, lane);
            if (++k_block == m.k_blocks) k_block = 0;
        };
        for (int i = 0; i < units; i++, unit += UNIT_BYTES) {
            const int s = i % STAGES;
            if (i >= STAGES) barrier_wait(empty + 8 * s, (i / STAGES - 1) % 2);
            if (lane == 0) barrier_expect(full + 8 * s, STAGE);
            copy(shared_address(ring + s * STAGE), unit, UNIT_BYTES, full + 8 * s, lane, once);
#if BULK
            // weights do not depend on earlier kernels: some are loaded while the previous kernel ends, then x
            if (i == min(PREFETCH, units) - 1) {
                depend();
#pragma unroll
                for (int j = 0; j < PREFETCH; j++)
                    if (j <= i) copy_x(j);
            }
            if (i < PREFETCH) continue;
#endif
            copy_x(s);
            copies_arrive(full + 8 * s);
        }
        copies_end();
        return;
    }

    depend();  // the previous kernel may still read the memory of the result
    if (!AHEAD || warp == 8 + 1) {
        find_factors(factors, x, AHEAD ? 0 : warp, AHEAD ? 1 : 8, ready, lane);
        __syncwarp();  // changes the order of a product's instructions: docs/experiments/products.md, Divisions
        if (AHEAD) return;
    }
    float acc[NT][ACC] = {};
    int left = STRIPES > 1 ? first_of(min(stripe + 1, m.stripes)) - first : units;  // of this stripe, and of others
    [[maybe_unused]] int more = units - left;
    int s = 0;
    u32 phase = 0;
    // as every stripe does: saying so spares registers here, and costs some for more rows
    if (COLS == 16 || COLS == 24) __builtin_assume(left > 0);
    const u32 none = zero_of(empty);
#pragma unroll 1
    while (left) {
        barrier_wait(full + 8 * s, phase);
        multiply<HALVES_AT_ONCE, EIGHTS_AT_ONCE>(acc, ring + s * STAGE + warp * TILE_BYTES,
            PackedRows{ring + s * STAGE + UNIT_BYTES, lane}, lane);
        // with many rows `none` would take a register from the unit
        give_back<EIGHTS_AT_ONCE>(empty + 8 * s, COLS > 32 ? zero_of(empty + 8 * s) : none, acc);
        if (++s == STAGES) s = 0, phase ^= 1;
        const bool done = ++k_block == m.k_blocks;
        if (--left && !done) continue;
        // the stripe that holds unit u is ((u + 1) * stripes - 1) / units
        const int partial = stripe - (int)quotient((u32)(row_block * m.k_blocks + 1) * m.stripes - 1, m.units, m.units_inverse);
        barrier_wait(ready, 0);
        // the stripe that ends a row block clears the partial sums without a stripe
        put(acc, m.out, m.N, x.T, row_block * 128 + warp * 16, partial, done ? to.partials : partial + 1, to.partial_stride,
            to.row, factors, lane);
        if (done) row_block++, k_block = 0;
        if (STRIPES > 1 && !left) stripe++, left = more, more = 0;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < ACC; e++) acc[n][e] = 0.0f;
    }
}
