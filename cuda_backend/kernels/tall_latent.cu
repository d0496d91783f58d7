// tall_latent: as tall.cu, over latents: two warp groups share 64 rows, each with half of the output's columns
// Meaning   common/reference.py NumpyOps.latent_attention   Launcher  cuda_backend/latent.py
// In, out, numbers  as latent.cu `latent`: of the committed tiles; `latent` built with TAILS computes the others
// Build     R, latent, 512; D, row of the cache: R and 64 roped channels; STAGES 2, GROUPS 2, ROWS_EACH 32: warp_groups.cuh; KEYS, VALUES F16
// Work      rows are (t, head), 64 for a CTA. A warp group multiplies all channels of its half of a tile's positions, exchanges maxima
//           and probabilities with the other one, by way of shared memory, then multiplies all of the tile's positions with its half of
//           the columns; a third one copies tiles
// Bound     two warp groups that wait for themselves and for each other. Of a tile of GLM-4.7-Flash with 16 rows, 7,300 cycles: products
//           with keys 2,510 (32 columns for a product whose 64 rows come from shared memory, too), probabilities 1,060, products with
//           values and sums 1,830, ends of pieces 1,500 to 1,850, waits 240; measured before a quarter's products hid the addition of
//           two others, 9.37 ms a step, 9.19 since. The tensor cores need 2,180
// Tried     a step of GLM-4.7-Flash of 16 rows at 32K, one H200: variant against the kernel of that time
//           two products with values in progress -> 9.49 ms against 9.37: registers spill
//           rows of sums written 16 bytes at a time -> ends of pieces 1,290 cycles against 1,500 to 1,850, values 1,980 against 1,830
//           sums of a run of pieces added up in L2 (red.v4), so that pieces.cu reads an eighth -> 9.14 ms against 9.37, but 4.67 against
//             4.44 at 2 rows and 5.73 against 5.56 at 4
// Origin    FlashMLA (github.com/deepseek-ai/FlashMLA)

#define COLUMNS (R / 2)    // of a warp group
#define BLOCK_BYTES 8192   // 64 positions of 64 channels
#define STEPS (D / 64)     // products of 16 channels, for a quarter of them
static_assert(R == 512 && D == 576 && STAGES == 2 && ROWS == 64);

// Copies the CTA's tiles to the ring, by a warp group.
__device__ __forceinline__ void copy_latents(const Work& work, u32 stages, u32 full, u32 empty, int* ends) {
    const int row = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
    Walk walk = {};
    walk.next_piece(work);
#pragma unroll 1
    for (int n = 0; walk.at < walk.stop; n++) {
        barrier_wait(empty + 8 * stage_of(n), parity_of(n) ^ 1);
        const u16* from = (const u16*)work.planes[0].at(walk.at, 2 * D) + row * D + chunk * 8;
        const u32 to = stages + stage_of(n) * TILE_BYTES + swizzled(row, chunk);
#pragma unroll
        for (int b = 0; b < D / 64; b++)
#pragma unroll
            for (int i = 0; i < 4; i++) copy16(to + b * BLOCK_BYTES + i * 2048, from + i * 16 * D + b * 64);
        commit();
        ends[n % ENDS] = walk.advance(work);
        copies_wait<0>();
        show_products();
        barrier_arrive(full + 8 * stage_of(n));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
tall_latent(const u16* q, Plane cache, Plane roped, int H, const StepState* step, const int* positions, int T, int first_t, float scale,
            int trunk, float* sums, float2* stats) {
    release_next();
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ int heads[ROWS];            // where a row lies in (T, H), or -1
    __shared__ int ends[ENDS];             // of tiles: Walk.advance
    __shared__ float tops[2][ROWS];        // greatest products of a warp group's half of a tile
    __shared__ float4 totals_of[ROWS][2];  // sums of probabilities of the other warp group's half, for the row's warp group
    __shared__ float totals[256];          // of probabilities, of the thread's row `row` + 8 team
    __shared__ Work work;
    const u32 stages = shared_address(shared + ROWS * D * 2), full = stages + STAGES * TILE_BYTES, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / 4;
    if (warp == 0) find_work(work, cache, cache, H, step, trunk, Exact{}, full, empty);
    __syncthreads();
    if (work.is_empty() || !find_heads(heads, work, step, H, H)) return;
    __syncthreads();

    if (team == GROUPS) {
        fewer_registers<24>();
        copy_latents(work, stages, full, empty, ends);
        return;
    }

    more_registers<240>();
    const int w = warp % 4, g = lane / 4, t = lane % 4, row = w * 16 + g;  // this thread has rows `row` and `row` + 8
    const u32 q_operand = __shfl_sync(FULL, operand(shared_address(shared)), 0);
    depend();
    copy_queries<ROWS_EACH>(shared, q, heads, team * ROWS_EACH);
    show_products();
    two_groups_sync(1);
    float o[COLUMNS / 64][32], top[2];  // of a piece: sums, greatest exponents and sums of probabilities
    float& total = totals[threadIdx.x];
    auto begin_piece = [&] {
#pragma unroll
        for (int b = 0; b < COLUMNS / 64; b++)
#pragma unroll
            for (int i = 0; i < 32; i++) o[b][i] = 0.0f;
        top[0] = top[1] = MINUS_INFINITY, total = 0.0f;
    };
    begin_piece();
    int end = 0;
#pragma unroll 1
    for (int n = 0; end >= 0; n++) {
        const u32 stage = stages + stage_of(n) * TILE_BYTES, tile = __shfl_sync(FULL, operand(stage), 0);
        float s[3][16];  // of 32 positions: sums of a quarter of the channels, as latent.cu has them
        auto multiply_quarter = [&](float(&sum)[16], int quarter) {
            wgmma_begin();
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
                const u32 at = (quarter * STEPS + d) / 4 * (BLOCK_BYTES / 16) + (quarter * STEPS + d) % 4 * 2;
                wgmma<32, 0>(sum, q_operand + at, tile + team * 256 + at, d > 0);
            }
            wgmma_commit();
        };
        barrier_wait(full + 8 * stage_of(n), parity_of(n));
        multiply_quarter(s[0], 0), multiply_quarter(s[1], 1), multiply_quarter(s[2], 2);
        wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < 16; i++) s[0][i] += s[1][i];
        multiply_quarter(s[1], 3);
        wgmma_wait<0>();

        float most[2] = {MINUS_INFINITY, MINUS_INFINITY}, old[2], now[2];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            s[0][i] = (s[0][i] + s[2][i] + s[1][i]) * scale;
            most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[0][i]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            most[h] = fmaxf(most[h], __shfl_xor_sync(FULL, most[h], 1));
            most[h] = fmaxf(most[h], __shfl_xor_sync(FULL, most[h], 2));
            if (t == 0) tops[team][row + 8 * h] = most[h];
        }
        two_groups_sync(1);  // and nothing reads the tile's roped channels any more
        float seen[2][4];  // sums of four probabilities: columns 8 j + 4 (t / 2) on
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float best = ceilf(fmaxf(most[h], tops[1 - team][row + 8 * h])), both = fmaxf(top[h], best);
            const float base = best == MINUS_INFINITY ? 0.0f : best;
            old[h] = power(top[h] - both), now[h] = power(best - both), top[h] = both;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float* x = s[0] + 4 * j + 2 * h;
                x[0] = exp2_for_half(x[0] - base), x[1] = exp2_for_half(x[1] - base);
                seen[h][j] = x[0] + x[1];
                seen[h][j] += __shfl_xor_sync(FULL, seen[h][j], 1);
            }
        }
        uint4* const exchanged = (uint4*)(shared + ROWS * D * 2 + stage_of(n) * TILE_BYTES + R / 64 * BLOCK_BYTES) + threadIdx.x % 128;
#pragma unroll
        for (int k = 0; k < 2; k++) {  // probabilities, as `mma` has them
            const float* x = s[0] + 8 * k;
            exchanged[(team * 2 + k) * 128] =
                make_uint4(to_half2(x[0], x[1]), to_half2(x[2], x[3]), to_half2(x[4], x[5]), to_half2(x[6], x[7]));
        }
        float mine[4];
        float4 given;
        float* const gives = (float*)&given;
#pragma unroll
        for (int j = 0; j < 4; j++) mine[j] = team ? seen[1][j] : seen[0][j], gives[j] = team ? seen[0][j] : seen[1][j];
        if (t % 2 == 0) totals_of[row + 8 * (1 - team)][t / 2] = given;
        two_groups_sync(1);
        u32 p[TILE / 16][4];
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) *(uint4*)p[k] = exchanged[k * 128];
        float sum[32];
        auto multiply = [&](int b) {
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < TILE / 16; k++)
                wgmma_of_registers(sum, p[k], tile + (team * (COLUMNS / 64) + b) * (BLOCK_BYTES / 16) + k * 128, k > 0);
            wgmma_commit();
        };
        multiply(0);
        const float4 rest = totals_of[row + 8 * team][t / 2];
        const float others[4] = {rest.x, rest.y, rest.z, rest.w};
#pragma unroll
        for (int j = 0; j < 4; j++) mine[j] += others[j], mine[j] += __shfl_xor_sync(FULL, mine[j], 2);
        total = total * (team ? old[1] : old[0]) + ((mine[0] + mine[1]) + (mine[2] + mine[3])) * (team ? now[1] : now[0]);
#pragma unroll
        for (int b = 0; b < COLUMNS / 64; b++) {
            if (b) multiply(b);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < 32; i++) {
                float& x = o[b][i];
                x = __fmaf_rn(sum[i], now[i / 2 % 2], x * old[i / 2 % 2]);  // both products are exact
            }
        }
        end = ends[n % ENDS];
        if (lane == 0) barrier_arrive(empty + 8 * stage_of(n));
        if (!end) continue;
        const s64 begin = (s64)(abs(end) / 2 - 1) * T * H;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int place = heads[row + 8 * h];
            if (place < 0) continue;
            if (t == 0 && h == team) stats[begin + place] = make_float2(top[h], total);
            float* to = sums + (begin + place) * R + team * COLUMNS + 2 * t;
#pragma unroll
            for (int b = 0; b < COLUMNS / 64; b++)
#pragma unroll
                for (int j = 0; j < 8; j++) *(float2*)(to + b * 64 + j * 8) = make_float2(o[b][4 * j + 2 * h], o[b][4 * j + 2 * h + 1]);
        }
        begin_piece();
    }
}
