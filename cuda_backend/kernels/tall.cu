// tall: as wide.cu, for more rows: rows of the step are the 64 rows of a product, so that probabilities stay in registers
// Meaning   common/reference.py NumpyOps.attention        Launcher  cuda_backend/attention.py
// In, out, numbers  as wide.cu; with FOLDS, pieces whose sums are part of a later piece's have stats (-inf, 0) and no sums
// Build     formats.cuh, without TURBOQUANT; D, 128 or 256; GROUPS, 1 or 2; STAGES, CODED, FOLDS: warp_groups.cuh; CTAS per multiprocessor;
//           ALONE, EXACT: split.cu; launched as split.cu, without a window
// Work      rows are (t, query head of the group), 64 for each warp group. A warp group never waits for another but the one that copies
// Bound     a warp group's waits for its own results. Of a tile of WeDLM-8B with 128 rows, 2,850 cycles: products with keys 560,
//           probabilities 910, products with values and sums 780, waits for tiles 410, ends of pieces 170. The tensor cores need 1,024
//           for two warp groups, the exponentials 610; sums of pieces of Qwen3.6-27B are more bytes than keys and values
// Tried     us of `tall` per layer at 32K, one H200: variant against the kernel of that time
//           64 rows, heads of 128:
//             three warp groups of 64 rows -> a step 11.47 ms against 9.99: 256 rows are two blocks of 192
//             queries in registers -> 9.82 ms against 9.93: no room for the sums of a run
//             sums of a run in shared memory, not registers -> 127 against 119
//             the next tile's keys multiplied before this one's values -> 139 against 123
//             the same, and the two warp groups in turns -> 153 against 147
//             one product with values in progress, not two -> 128 against 119
//             no multiplication by a factor of 1 -> 129 against 119: without the branch it happens while the products are waited for
//             rows of sums written whole, by way of shared memory -> 122 against 119
//             consecutive pieces divided by positions alone -> 119 against 115: the end of a piece takes time, too
//           64 rows, heads of 256:
//             sums of a run added up in global memory -> 244 against 202
//             consecutive pieces for each CTA without FOLDS -> 202 against 184
//             rows of sums written whole, by way of shared memory -> 202 against 210
//             `totals` in registers -> 184 against 172, and four of them spill
//             wide.cu -> 233 against 172; 127 against 115 at 32 rows, 71 against 63 at 16, but 88 against 123 at 22: two blocks
// Origin    FlashAttention-3 (Shah et al., arXiv 2407.08608)

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), CTAS)
tall(const u16* q, Plane keys, Plane values, int H, int group, const StepState* step, const int* positions, int T, float scale, int window,
     int sinks, int causal, int trunk, float* sums, float2* stats, Exact exact) {
    release_next();
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ int heads[ROWS];  // where a row lies in (T, H), or -1
    __shared__ int ends[ENDS];   // of tiles: Walk.advance
    __shared__ Work work;
    __shared__ float totals[256 * GROUPS];
    u8 *qs = shared, *stages = qs + ROWS * D * 2;
    [[maybe_unused]] u8* coded = stages + STAGES * TILE_BYTES;
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

    more_registers<GROUPS == 1 ? 224 : 232>();
    const int w = warp % 4, g = lane / 4, t = lane % 4;
    const u32 q_operand = __shfl_sync(FULL, operand(shared_address(qs) + team * ROWS_EACH * 128), 0);
    depend();
    copy_queries<ROWS_EACH>(qs, q, heads, team * ROWS_EACH);
    const int* own = heads + team * ROWS_EACH + w * 16 + g;  // rows own[0] and own[8] are this thread's
    float shift[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (EXACT && own[8 * h] >= 0) shift[h] = exact.shift[own[8 * h]];
    show_products();
    group_sync(1 + team);
    float o[BLOCKS][32], top[2];  // of a piece: sums, greatest exponents and sums of probabilities
    float* total = totals + threadIdx.x * 2;
    auto begin_piece = [&] {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < 32; i++) o[b][i] = 0.0f;
        top[0] = top[1] = MINUS_INFINITY, total[0] = total[1] = 0.0f;
    };
    begin_piece();
#if FOLDS
    float run_o[BLOCKS][32] = {}, run_top[2] = {MINUS_INFINITY, MINUS_INFINITY}, run_total[2] = {};  // of pieces of a run
#endif
    int end = 0;
#pragma unroll 1
    for (int n = 0; end >= 0; n += 2) {
        float s[2][32];
        if (EXACT)
#pragma unroll
            for (int i = 0; i < 32; i++) s[0][i] = shift[i / 2 % 2];
        barrier_wait(full + 8 * stage_of(n), parity_of(n));
        u32 tile = __shfl_sync(FULL, operand(shared_address(stages + stage_of(n) * TILE_BYTES)), 0);
        wgmma_begin();
#pragma unroll
        for (int d = 0; d < D / 16; d++) {  // two sums, as split.cu has them
            const bool adds = d >= 2 || (EXACT && d == 0);
            wgmma_64(s[d % 2], q_operand + d / 4 * (ROWS * 8) + d % 4 * 2, tile + d / 4 * (TILE * 8) + d % 4 * 2, adds);
        }
        wgmma_commit();
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(empty + 8 * stage_of(n));

        float most[2] = {MINUS_INFINITY, MINUS_INFINITY}, old[2], now[2], base[2];
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[0][i] = (s[0][i] + s[1][i]) * scale;
            most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[0][i]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            most[h] = fmaxf(most[h], __shfl_xor_sync(FULL, most[h], 1));
            most[h] = fmaxf(most[h], __shfl_xor_sync(FULL, most[h], 2));
            const float best = ceilf(most[h]), both = fmaxf(top[h], best);
            old[h] = power(top[h] - both), now[h] = power(best - both), top[h] = both, base[h] = best == MINUS_INFINITY ? 0.0f : best;
        }
        u32 p[TILE / 16][4];
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* x = s[0] + 8 * k + 2 * i;
                p[k][i] = to_half2(exp2_for_half(x[0] - base[i % 2]), exp2_for_half(x[1] - base[i % 2]));
            }

        barrier_wait(full + 8 * stage_of(n + 1), parity_of(n + 1));
        tile = __shfl_sync(FULL, operand(shared_address(stages + stage_of(n + 1) * TILE_BYTES)), 0);
        constexpr int AHEAD = D == 128 ? 2 : 1;  // products in progress: two would spill registers of heads of 256
        float sum[AHEAD][32];
        auto multiply = [&](int b) {
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) wgmma_of_registers(sum[b % AHEAD], p[k], tile + b * (TILE * 8) + k * 128, k > 0);
            wgmma_commit();
        };
        multiply(0);
        float ones[4] = {};  // probabilities times ones
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) mma(ones, p[k], 0x3c003c00, 0x3c003c00);
#pragma unroll
        for (int h = 0; h < 2; h++) total[h] = total[h] * old[h] + ones[2 * h] * now[h];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (AHEAD == 1 && b) multiply(b);
            if (AHEAD == 2 && b + 1 < BLOCKS) {
                multiply(b + 1);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
#pragma unroll
            for (int i = 0; i < 32; i++) {
                float& x = o[b][i];
                x = __fmaf_rn(sum[b % AHEAD][i], now[i / 2 % 2], x * old[i / 2 % 2]);  // both products are exact
            }
        }
        end = ends[n / 2 % ENDS];
        if (lane == 0) barrier_arrive(empty + 8 * stage_of(n + 1));
        if (!end) continue;
        const s64 begin = (s64)(abs(end) / 2 - 1) * T * H;
#if FOLDS
        float by[2], more[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float both = fmaxf(run_top[h], top[h]);
            by[h] = power(run_top[h] - both), more[h] = power(top[h] - both), run_top[h] = both;
            run_total[h] = run_total[h] * by[h] + total[h] * more[h];
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < 32; i++) run_o[b][i] = __fmaf_rn(o[b][i], more[i / 2 % 2], run_o[b][i] * by[i / 2 % 2]);
        if (end % 2) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (t == 0 && own[8 * h] >= 0) stats[begin + own[8 * h]] = make_float2(MINUS_INFINITY, 0.0f);
            begin_piece();
            continue;
        }
        const auto &result = run_o;
        const float *result_top = run_top, *result_total = run_total;
#else
        const auto &result = o;
        const float *result_top = top, *result_total = total;
#endif
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = own[8 * h];
            if (row < 0) continue;
            if (t == 0) stats[begin + row] = make_float2(result_top[h], result_total[h]);
            float* to = sums + (begin + row) * D + 2 * t;
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    *(float2*)(to + b * 64 + j * 8) = make_float2(result[b][4 * j + 2 * h], result[b][4 * j + 2 * h + 1]);
        }
        begin_piece();
#if FOLDS
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < 32; i++) run_o[b][i] = 0.0f;
        run_top[0] = run_top[1] = MINUS_INFINITY, run_total[0] = run_total[1] = 0.0f;
#endif
    }
}
