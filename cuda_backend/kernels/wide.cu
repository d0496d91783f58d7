// wide: as split.cu, for many rows and a long past on compute capability 9.0; computes only pieces of committed tiles, while split.cu
// computes tiles with the step's own rows
// Meaning   common/reference.py NumpyOps.attention        Launcher  cuda_backend/attention.py
// In        q [T][H][D] float16 and keys and values [K][place][D], float16 or codes
// Out       for every piece sums [place][T][H][D] and stats [place][T][H], (power, sum), for pieces.cu
// Build     formats.cuh, without TURBOQUANT; D, 256; ROWS_EACH of a warp group, 16, 32 or 48; GROUPS=3; STAGES, CODED:
//           warp_groups.cuh; ALONE, EXACT: split.cu; launched as split.cu, without a window
// Work      rows are (t, query head of the group), a third for each of three warp groups, which read the same tiles and otherwise
//           never wait for one another. Products are transposed: positions, then columns of values, are the 64 rows of a product, and rows
//           of the step its columns, at least 16. A fourth warp group copies tiles, alternately of keys and of values; it copies codes
//           unchanged and then decodes them to float16, keys with columns in the order of split.cu. In a cache with exact rows,
//           only tiles without exact rows are computed here
// Numbers   bitwise identical to split.cu: products of a warp group round like those of a warp, and sums have the order of split.cu
// Bound     bytes of keys and values if rows are few (3,600 cycles of a tile of 27B); else a warp group's waits for its own results.
//           Of a tile with 144 rows, 6,700 cycles: products with keys 800, maxima 950, probabilities 1,450, products with values and sums
//           2,450, the rest and the clocks themselves 1,000. The tensor cores need 2,700: a product of 64 x 48 takes 28 cycles
// Tried     us of `wide` per layer, or cycles of a tile: variant against what was here then (22 rows of Qwen3.6-27B, 32K, one H200).
//           addresses of operands computed for each product, exp2f, factors read by twos: 1,186 instructions of a tile instead of 816 ->
//             86.7 against 86.8
//           each thread finds the maxima of its rows, not one thread for all -> 2,030 cycles against 1,460: rounding up shares the pipe of
//             the exponentials
//           warp groups multiply alternately, values and then the next tile's keys, while others find probabilities -> a step 8.26 ms
//             against 8.24, 11.73 against 11.56 at 128K, 12.31 against 12.12 of 64 rows of WeDLM-8B
//           the next tile's keys before the sums of a piece are written -> not timed: 342 bytes of registers spill
//           the statistics of a row in registers -> spills one or two
//           heads of 128 with 64 rows -> 76 against 73 of split.cu; 128 rows 100 against 144, 256 rows 198 against 276
// Origin    FlashAttention-3 (Shah et al., arXiv 2407.08608)

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
wide(const u16* q, Plane keys, Plane values, int H, int group, const StepState* step, const int* positions, int T, float scale, int window,
     int sinks, int causal, int trunk, float* sums, float2* stats, Exact exact) {
    release_next();
    constexpr int N = ROWS_EACH;
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ float4 tops[GROUPS][N];         // of a tile, by 16 positions
    __shared__ float bases[GROUPS][N];         // exponents: a tile's probabilities of a row are divided by 2 to their power
    __shared__ float4 factors[GROUPS][N / 2];  // of two rows: of the sums before a tile, and of its own
    __shared__ float2 stats_so_far[GROUPS][ROWS_EACH];  // of the piece: the greatest exponent, and the sum
    __shared__ int heads[ROWS];                // where a row lies in (T, H), or -1
    __shared__ int ends[ENDS];                 // of tiles: Walk.advance
    [[maybe_unused]] __shared__ float shifts[EXACT ? ROWS : 1];  // of a row's products with codes
    __shared__ Work work;
    u8 *qs = shared, *stages = qs + ROWS * D * 2, *ps = stages + STAGES * TILE_BYTES;
    [[maybe_unused]] u8* coded = ps + ROWS * TILE * 2;
    const u32 full = shared_address(coded + CODED * CODES_BYTES), empty = full + 8 * STAGES;  // a barrier for each stage
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / 4;
    if (warp == 0) find_work(work, keys, values, group, step, trunk, exact, full, empty);
    __syncthreads();
    if (work.is_empty() || !find_heads(heads, work, step, H, group)) return;
    __syncthreads();

    if (team == GROUPS) {
        fewer_registers<32>();
        copy_tiles(work, stages, coded, full, empty, ends);
        return;
    }

    more_registers<160>();
    const int w = warp % 4, g = lane / 4, t = lane % 4, mine = threadIdx.x % 128;
    const u32 p_at = shared_address(ps) + team * N * 128;
    const u32 q_operand = __shfl_sync(FULL, operand(shared_address(qs) + team * N * 128), 0);
    const u32 p_operand = __shfl_sync(FULL, operand(p_at), 0);
    depend();
    copy_queries<N>(qs, q, heads, team * N);
    if (EXACT && mine < N) shifts[team * N + mine] = heads[team * N + mine] < 0 ? 0.0f : exact.shift[heads[team * N + mine]];
    show_products();
    group_sync(1 + team);
    float o[BLOCKS][N / 2];
    const int keeper = t < 2 && w * 16 < N ? w * 16 + t * 8 + g : -1;  // the row of the warp group whose stats this lane keeps
    const u32 p_to = p_at + swizzled(lane / 16 * 8 + lane % 8, 2 * w + lane / 8 % 2);
    auto begin_piece = [&] {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < N / 2; i++) o[b][i] = 0.0f;
        if (keeper >= 0) stats_so_far[team][keeper] = make_float2(MINUS_INFINITY, 0.0f);
    };
    begin_piece();
    int end = 0;
#pragma unroll 1
    for (int n = 0; end >= 0; n += 2) {
        float s[2][N / 2];
        if (EXACT)
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                const float2 shift = *(const float2*)&shifts[team * N + j * 8 + 2 * t];
                s[0][4 * j] = s[0][4 * j + 2] = shift.x, s[0][4 * j + 1] = s[0][4 * j + 3] = shift.y;
            }
        barrier_wait(full + 8 * stage_of(n), parity_of(n));
        u32 tile = __shfl_sync(FULL, operand(shared_address(stages + stage_of(n) * TILE_BYTES)), 0);
        wgmma_begin();
#pragma unroll
        for (int d = 0; d < D / 16; d++) {  // two sums, as split.cu has them
            const bool adds = d >= 2 || (EXACT && d == 0);
            wgmma<N, 0>(s[d % 2], tile + d / 4 * (TILE * 8) + d % 4 * 2, q_operand + d / 4 * (ROWS * 8) + d % 4 * 2, adds);
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(empty + 8 * stage_of(n));

        // the maximum of each row: of 16 positions of the warp, by halving what a lane keeps, then of all
        float most[N / 4];
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[0][4 * j + e], &y = s[0][4 * j + 2 + e];
                x = (x + s[1][4 * j + e]) * scale, y = (y + s[1][4 * j + 2 + e]) * scale;
                most[2 * j + e] = fmaxf(x, y);
            }
        const bool second_half = lane & 16, second_quarter = lane & 8;
#pragma unroll
        for (int k = 0; k < N / 8; k++) {
            const float keep = second_half ? most[k + N / 8] : most[k], give = second_half ? most[k] : most[k + N / 8];
            most[k] = fmaxf(keep, __shfl_xor_sync(FULL, give, 16));
        }
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
            const float keep = second_quarter ? most[k + N / 16] : most[k], give = second_quarter ? most[k] : most[k + N / 16];
            most[k] = fmaxf(keep, __shfl_xor_sync(FULL, give, 8));
            most[k] = fmaxf(most[k], __shfl_xor_sync(FULL, most[k], 4));
            const int number = second_half * (N / 8) + second_quarter * (N / 16) + k;
            if (!(lane & 4)) ((float*)&tops[team][number / 2 * 8 + 2 * t + number % 2])[w] = most[k];
        }
        group_sync(1 + team);
        if (keeper >= 0) {
            const float4 m = tops[team][keeper];
            float& top = stats_so_far[team][keeper].x;
            const float best = ceilf(fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w))), both = fmaxf(top, best);
            float* to = (float*)&factors[team][keeper / 2] + keeper % 2;
            to[0] = power(top - both), to[2] = power(best - both), top = both, bases[team][keeper] = best == MINUS_INFINITY ? 0.0f : best;
        }
        group_sync(1 + team);
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            u32 p[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 base = *(const float2*)&bases[team][(j + i) * 8 + 2 * t];
                const float* x = s[0] + 4 * (j + i);
                p[2 * i] = to_half2(exp2_for_half(x[0] - base.x), exp2_for_half(x[1] - base.y));
                p[2 * i + 1] = to_half2(exp2_for_half(x[2] - base.x), exp2_for_half(x[3] - base.y));
            }
            stmatrix_transposed(p_to + j * 1024, p[0], p[1], p[2], p[3]);
        }
        show_products();
        group_sync(1 + team);

        barrier_wait(full + 8 * stage_of(n + 1), parity_of(n + 1));
        tile = __shfl_sync(FULL, operand(shared_address(stages + stage_of(n + 1) * TILE_BYTES)), 0);
        float sum[2][N / 2];
        auto multiply = [&](int b) {
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) wgmma<N, 1>(sum[b % 2], tile + b * (TILE * 8) + k * 128, p_operand + k * 2, k > 0);
            wgmma_commit();
        };
        multiply(0);
        if (w * 16 < N) {
            float ones[4] = {};  // probabilities times ones
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                u32 p[4];
                ldmatrix(p, p_at + w * 2048 + swizzled(lane % 16, 2 * k + lane / 16));
                mma(ones, p, 0x3c003c00, 0x3c003c00);
            }
            if (keeper >= 0) {
                float& l = stats_so_far[team][keeper].y;
                const float* by = (const float*)&factors[team][keeper / 2] + keeper % 2;
                l = l * by[0] + (t ? ones[2] : ones[0]) * by[2];
            }
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (b + 1 < BLOCKS) {
                multiply(b + 1);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                const float4 by = factors[team][j * 4 + t];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& x = o[b][4 * j + i];
                    x = __fmaf_rn(sum[b % 2][4 * j + i], i % 2 ? by.w : by.z, x * (i % 2 ? by.y : by.x));  // both products are exact
                }
            }
        }
        end = ends[n / 2 % ENDS];
        if (lane == 0) barrier_arrive(empty + 8 * stage_of(n + 1));
        if (!end) continue;
        const s64 begin = (s64)(abs(end) / 2 - 1) * T * H;
        if (keeper >= 0 && heads[team * N + keeper] >= 0) stats[begin + heads[team * N + keeper]] = stats_so_far[team][keeper];
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = heads[team * N + j * 8 + 2 * t + e];
                if (row < 0) continue;
                float* to = sums + (begin + row) * D + w * 16 + g;
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) to[b * 64] = o[b][4 * j + e], to[b * 64 + 8] = o[b][4 * j + 2 + e];
            }
        begin_piece();
    }
}
