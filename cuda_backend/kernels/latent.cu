// latent: multi-head latent attention over one row per token for all heads: a latent and a roped key
// Meaning   common/reference.py NumpyOps.latent_attention, expanded_attention   Launcher  cuda_backend/latent.py
// In        cache [capacity][W] float16: the latent padded to R, then the roped key padded to W - R; q [T][H][W] float16 in the
//           same layout. gather writes both                  Out  sums and stats of pieces.cu, sums [place][T][H][R]
// Build     APART: latents have their own plane, in the format KEYS of formats.cuh; R, W: multiples of 16; TILE: positions of a tile, 32
//           or 64; BUFFERS: number of buffers of 32 positions in shared memory, 2 to 5; WINDOWED, 0: flash.cuh; ALONE: split.cu; TAILS: only the
//           tiles with rows of the step; tall_latent.cu computes the others
// Work      latent: 32 rows (t, head) per CTA of 8 warps, the past is divided into pieces of equal length. q stays in registers. For
//           the products of a tile with q, a warp takes a quarter of the channels and half of the positions; eight lanes compute the
//           softmax of a row; for the output a warp takes an eighth of the latent's columns of all rows. Tiles with rows of the
//           step are separate pieces; in a branching tree there is one for the heads of each row
//           whole_rows, spread: for prefill, which expands a range of positions to keys and values of every head and attends to it
//           before it expands the next one (attention.cu part)
// Numbers   as split.cu: a row of a tree is bitwise identical to the row of plain decoding
// Bound     bytes of the cache; from about eight rows on, tensor cores
// Tried     variant against the kernel of that time (GLM-4.7-Flash, one row, context of 32,768, one H200).
//           16 warps -> 223 tok/s against 239: a third more instructions per tile
//           q loaded from global memory to registers -> 17 % of the samples of a profile: 36 loads of 4 bytes per lane
//           products with the values of a tile at the same time as those with the keys of the next -> 17.4 us against 17.4
//           tiles of 32 positions everywhere -> 17.5 us against 15.7; but at a few hundred tokens tiles of 64 take 1.3 us more
//           prefetching the committed part of the step's own tile to L2 before the wait -> 16.5 us against 15.7
//           the share of a CTA computed by the step's runs with one sequence too -> step 2.079 ms against 2.036 at 128 tokens (one H100)
// Origin    DeepSeek-V2 (arXiv 2405.04434), FlashAttention-2 (arXiv 2307.08691)

#define STRIDE (W + 8)  // halves
#define LOAD 32  // positions of a buffer
#define LOADS (TILE / LOAD)
#define ROWS 32
#define STEPS ((W / 16 + 3) / 4)  // steps of 16 channels per warp
#define COLUMNS ((R / 8 + 15) / 16 * 16)  // columns of the latent per warp
#define SCORES (TILE + 8)

#ifndef APART
#define APART 0
#endif
#ifndef ALONE
#define ALONE 0
#endif
#ifndef TAILS
#define TAILS 0
#endif

// Copies a row of W values by eight threads, a line at a time.
__device__ __forceinline__ void load_row(u16* buffer, const u16* from) {
    const u32 to = shared_address(buffer + threadIdx.x / 8 * STRIDE + threadIdx.x % 8 * 8);
    from += threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < W; i += 64)
        if (i + threadIdx.x % 8 * 8 < W) copy16(to + i * 2, from + i);
}

// The same for a position of the cache.
__device__ __forceinline__ void load_place(u16* buffer, const HeadRows (&planes)[2], int place) {
#if APART
    const s64 page = planes[0].page_of(place);
    const u8* row = planes[0].rows + page + (s64)place * row_bytes(KEYS, R);
    const u16* from = (const u16*)(planes[1].rows + page) + (s64)place * (W - R) + threadIdx.x % 8 * 8;
    u16* to = buffer + threadIdx.x / 8 * STRIDE;
#pragma unroll 1
    for (int block = threadIdx.x % 8; block < R / 32; block += 8) unpack_32<KEYS, R>(to + block * 32, row, block);
#pragma unroll
    for (int i = 0; i < W - R; i += 64)
        if (i + threadIdx.x % 8 * 8 < W - R) copy16(shared_address(to + R + threadIdx.x % 8 * 8 + i), from + i);
#else
    load_row(buffer, (const u16*)planes[0].at(place, 2 * W));
#endif
}

extern "C" __global__ void __launch_bounds__(256, 1)
latent(const u16* q, Plane cache, Plane roped, int H, const StepState* step, const int* positions, int T, int first_t, float scale,
      int trunk, float* sums, float2* stats) {
    release_next();
    extern __shared__ __align__(16) u16 shared[];
    __shared__ u8 line[MAX_DECODE_ROWS];  // the rows of the step that a tree's row sees, in the order of their positions
    __shared__ Pieces pieces;
    __shared__ int tails;
    __shared__ volatile float2 factors[ROWS];  // factors of a row's sums so far and of a tile; read at each use, to spare registers
    u16 *buffers = shared, *ps = buffers + BUFFERS * LOAD * STRIDE;  // ps: the probabilities
    float *scores = (float*)(ps + ROWS * (TILE + 8));
    const float lowest = -__int_as_float(0x7f800000);
    __shared__ Part own;
#if ALONE
    constexpr int first_of_run = 0;
#else
    __shared__ int first_of_run;
    if (threadIdx.x < 32) {
        const Part part = part_of(step, H, ROWS, 0, blockIdx.z, gridDim.z, first_t, T);
        if (threadIdx.x == 0) own = part, first_of_run = step->run[max(part.run, 0)].first;
    }
    __syncthreads();
    if (own.run < 0) return;
#endif
    // latents, or whole rows, and roped keys; for tails, whose pages are read before the wait
    __shared__ HeadRows planes[2], own_planes[2];
    __shared__ int own_pages[2];                   // the first and the last page
    __shared__ int ctas, first_job, first_row, end_row;  // CTAs of the run, and this one's first tile after the trunk; rows of a tile
    const int parts = (H + ROWS - 1) / ROWS;
    if (threadIdx.x == 0) {
        if (ALONE) own = part_alone(min(step->run[0].rows - first_t, T), H, ROWS, blockIdx.z, gridDim.z);
        const Run& run = step->run[max(own.run, 0)];
        const Mask mask(step, run, first_of_run, positions, 0, 0, 0, first_t, T);
        ctas = own.shares * own.blocks, first_job = ctas - 1 - (own.share * own.blocks + own.block);
        planes[0] = rows_of(cache, run.slot, 0, cache.row), planes[1] = rows_of(roped, run.slot, 0, roped.row);
        pieces.cut(TILE == 64 ? 6 : 5, mask.past, mask.rows, 0, 0, 0, min((int)gridDim.z, MOST_SINGLE), trunk);
        tails = pieces.tails * (run.branches ? mask.rows * parts : own.blocks);
        const int page = mask.past / PAGE, last = (mask.past + max(mask.rows, 1) - 1) / PAGE;
        for (int i = 0; i < 2; i++) {
            own_planes[i] = planes[i];
            if (planes[i].table) own_planes[i].table = own_pages - page;
        }
        if (planes[0].table) own_pages[0] = planes[0].table[page], own_pages[1] = planes[0].table[last];
    }
    __syncthreads();
    if (own.run < 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = warp % 4, half = warp / 4, mine = threadIdx.x / 8;
    // first the pieces that begin within this share of the trunk, then tiles of the tail, for a block of rows or for one row of a tree
    for (int job = TAILS ? first_job : -1; job < tails; job = job < 0 ? first_job : job + ctas) {
        const Run& run = step->run[own.run];
        const Mask mask(step, run, first_of_run, positions, 0, 0, 0, first_t, T);  // read again, to save registers
        const int rows = max(0, mask.rows) * H;
        const int who = job < 0 ? own.block : job / pieces.tails, tree = job >= 0 && run.branches, t_of_tree = tree ? who / parts : 0;
        const int first = tree ? t_of_tree * H + who % parts * ROWS : who * ROWS;
        const int end = min(first + ROWS, tree ? (t_of_tree + 1) * H : rows), seen = tree ? mask.seen(t_of_tree) : 0;
        // the last CTA has least work: it takes tails
        const int low = pieces.tail * own.share / own.shares, high = pieces.tail * (own.share + 1) / own.shares;
        int piece = low ? pieces.of(low - 1) + 1 : 0;
        const int after = high ? pieces.of(high - 1) + 1 : 0, tail = job < 0 ? 0 : job % pieces.tails;
        const int begin = job < 0 ? pieces.begin(piece) : pieces.tail + tail * TILE;
        const int stop = job >= 0 ? begin + TILE : after > piece ? pieces.stop(after - 1) : begin;
        if (begin >= stop || first >= end || (tree && begin >= mask.past + seen)) continue;
        __syncthreads();
        if (threadIdx.x == 0) first_row = first, end_row = end;
        auto load = [&](int buffer, const HeadRows (&from)[2], int place) { load_place(buffers + buffer * LOAD * STRIDE, from, place); };
        if (job < 0)  // before this step's rows are written
#pragma unroll 1
            for (int i = 0; i < BUFFERS - LOADS; i++)
                if (begin + i * LOAD < stop) load(i, planes, begin + i * LOAD + mine);
        if (tree && warp == 0) {
            int before = 0;
#pragma unroll
            for (int w = 0; w < ROW_WORDS; w++) {
                const u32 bits = mask.sight[t_of_tree][w];
                if (bits >> lane & 1) line[before + __popc(bits & ((1u << lane) - 1))] = w * 32 + lane;
                before += __popc(bits);
            }
        }
        depend();
        __syncthreads();
        if (job >= 0)
#pragma unroll 1
            for (int i = 0; i < LOADS; i++) {
                const int at = begin + i * LOAD + mine, n = at - mask.past;  // number n of the step's rows, or of those seen
                load(i, own_planes, tree && n >= 0 ? mask.past + line[min(n, seen - 1)] : at);
            }
        u16* qs = buffers + (BUFFERS - 1) * LOAD * STRIDE;  // until it is overwritten by a tile
        if (first_row + mine < end_row)
            load_row(qs, q + ((s64)(first_of_run + first_t) * H + first_row + mine) * W);
        else
#pragma unroll 1
            for (int i = threadIdx.x % 8 * 8; i < W; i += 64) *(uint4*)(qs + mine * STRIDE + i) = make_uint4(0, 0, 0, 0);
        commit();
        wait_all_but<0>();
        u32 a[2][STEPS][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int d = 0; d < STEPS; d++)
                if (quarter * STEPS + d < W / 16)
                    ldmatrix(a[m][d], shared_address(qs + (m * 16 + lane % 16) * STRIDE + (quarter * STEPS + d) * 16 + lane / 16 * 8));
        float o[2][COLUMNS / 8][4] = {}, top = lowest, sum = 0.0f;  // top and sum: of row `mine`
        const int row = first_row + mine, last = tree ? mask.past + seen - 1 : mask.high(min(row / H, mask.rows - 1));
        int buffer = 0;
#pragma unroll 1
        for (int at = begin; at < stop; at += TILE) {
            wait_all_but<BUFFERS - 2 * LOADS>();
#pragma unroll 1
            for (int i = 0; i < LOADS; i++) {  // to the place of the previous tile
                const int next = at + (BUFFERS - LOADS + i) * LOAD;
                if (next < stop) load((buffer + BUFFERS - LOADS + i) % BUFFERS, planes, next + mine);
                commit();
            }
            auto tile_of = [&](int i) { return buffers + (buffer + i < BUFFERS ? buffer + i : buffer + i - BUFFERS) * LOAD * STRIDE; };
            float s[2][2 * LOADS][4] = {};
            const u16* keys = LOADS == 1 ? tile_of(0) + half * 16 * STRIDE : tile_of(half);
            const u32 k_at = shared_address(keys + (lane % 8 + lane / 16 * 8) * STRIDE + quarter * STEPS * 16 + lane / 8 % 2 * 8);
#pragma unroll
            for (int d = 0; d < STEPS; d++)
                if (W / 16 % 4 == 0 || quarter * STEPS + d < W / 16)
#pragma unroll
                    for (int n = 0; n < LOADS; n++) {
                        u32 b[4];
                        ldmatrix(b, k_at + (n * 16 * STRIDE + d * 16) * 2);
#pragma unroll
                        for (int m = 0; m < 2; m++) mma(s[m][2 * n], a[m][d], b[0], b[1]), mma(s[m][2 * n + 1], a[m][d], b[2], b[3]);
                    }
            float* score = scores + (quarter * ROWS + lane / 4) * SCORES + half * TILE / 2 + lane % 4 * 2;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 2 * LOADS; n++) {
                    *(float2*)(score + m * 16 * SCORES + n * 8) = make_float2(s[m][n][0], s[m][n][1]);
                    *(float2*)(score + (m * 16 + 8) * SCORES + n * 8) = make_float2(s[m][n][2], s[m][n][3]);
                }
            __syncthreads();
            float x[LOADS][4], best = lowest, more = 0.0f;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const float4* scored = (const float4*)(scores + mine * SCORES + i * LOAD) + threadIdx.x % 8;
                float4 four = scored[0];
#pragma unroll
                for (int w = 1; w < 4; w++) four = plus(four, scored[w * ROWS * SCORES / 4]);
                const int position = at + i * LOAD + threadIdx.x % 8 * 4;
                x[i][0] = four.x * scale, x[i][1] = four.y * scale, x[i][2] = four.z * scale, x[i][3] = four.w * scale;
#pragma unroll
                for (int e = 0; e < 4; e++) best = fmaxf(best, x[i][e] = position + e <= last ? x[i][e] : lowest);
            }
#pragma unroll
            for (int i = 1; i < 8; i <<= 1) best = fmaxf(best, __shfl_xor_sync(FULL, best, i));
            best = ceilf(best);
            const float base = best == lowest ? 0.0f : best, both = fmaxf(top, best);
            const float keep = power(top - both), take = power(best - both);
            top = both;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) x[i][e] = exp2f(x[i][e] - base);
                more += (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
                *(uint2*)(ps + mine * (TILE + 8) + i * LOAD + threadIdx.x % 8 * 4) =
                    make_uint2(to_half2(x[i][0], x[i][1]), to_half2(x[i][2], x[i][3]));
            }
#pragma unroll
            for (int i = 1; i < 8; i <<= 1) more += __shfl_xor_sync(FULL, more, i);
            sum = sum * keep + more * take;
            if (threadIdx.x % 8 == 0) factors[mine].x = keep, factors[mine].y = take;
            __syncthreads();
            u32 p[TILE / 16][2][4];
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int k = 0; k < TILE / 16; k++)
                    ldmatrix(p[k][h], shared_address(ps + (h * 16 + lane % 16) * (TILE + 8) + k * 16 + lane / 16 * 8));
            u32 v_at[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) v_at[i] = shared_address(tile_of(i) + lane % 16 * STRIDE + warp * COLUMNS + lane / 16 * 8);
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                if (R % (8 * COLUMNS) && warp * COLUMNS + n * 16 >= R) break;
                float tiles_sum[2][2][4] = {};
#pragma unroll
                for (int k = 0; k < TILE / 16; k++) {
                    u32 b[4];
                    ldmatrix_transposed(b, v_at[k / 2] + (k % 2 * 16 * STRIDE + n * 16) * 2);
#pragma unroll
                    for (int h = 0; h < 2; h++) mma(tiles_sum[h][0], p[k][h], b[0], b[1]), mma(tiles_sum[h][1], p[k][h], b[2], b[3]);
                }
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float before = factors[h * 16 + lane / 4 + i * 8].x, here = factors[h * 16 + lane / 4 + i * 8].y;
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            float& y = o[h][2 * n + j / 2][2 * i + j % 2];
                            y = __fmaf_rn(tiles_sum[h][j / 2][2 * i + j % 2], here, y * before);  // both products are exact
                        }
                    }
            }
            buffer = (buffer + LOADS) % BUFFERS;
            if (job < 0 && at + TILE < pieces.stop(piece)) continue;
            const s64 place = ((s64)(job < 0 ? piece++ : trunk + job % pieces.tails) * T + first_of_run) * H + first_row;
            if (threadIdx.x % 8 == 0 && row < end_row) stats[place + mine] = make_float2(top, sum);
            float* out = sums + (place + lane / 4) * R + warp * COLUMNS + lane % 4 * 2;
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    if (R % (8 * COLUMNS) && warp * COLUMNS + n * 8 >= R) break;
                    if (first_row + h * 16 + lane / 4 < end_row) *(float2*)(out + h * 16 * R + n * 8) = make_float2(o[h][n][0], o[h][n][1]);
                    if (first_row + h * 16 + lane / 4 + 8 < end_row) *(float2*)(out + (h * 16 + 8) * R + n * 8) =
                        make_float2(o[h][n][2], o[h][n][3]);
                    o[h][n][0] = o[h][n][1] = o[h][n][2] = o[h][n][3] = 0.0f;
                }
            top = lowest, sum = 0.0f;
        }
    }
}

struct Turn {  // a rope, as in rows.cu
    const double* frequencies;  // radians per position
    const int* positions;
    int pairs;
    float magnitude;
};

// Writes q as float16: `main` channels unchanged, zeros up to `at`, then the roped channels, zeros up to `wide`; and the row of the
// cache, whose latent is normed first if `normed`. A block per (t, head), a thread per channel; head H is the row of the
// cache. Rope pairs are half-split; their sine and cosine are computed before the channels arrive.
extern "C" __global__ void __launch_bounds__(1024)
gather(In q, In q_rope, In latent, In k_rope, int T, int H, int main, int at, int P, int wide, Turn q_turn, Turn k_turn, int normed,
       const float* weight, float eps, int latent_dim, const StepState* step, u16* q_out, int rotates, Plane cache, Plane roped) {
    release_next();
    __shared__ float squares_of[32];
    const int t = blockIdx.x / (H + 1), head = blockIdx.x % (H + 1), i = threadIdx.x, lane = i % 32;
    const bool is_row = head == H;
    const int first_roped = is_row ? R : at, channel = i < first_roped ? i : i - first_roped;
    const Turn turn = is_row ? k_turn : q_turn;
    const bool turns = i >= first_roped && channel < 2 * turn.pairs;
    float s = 0.0f, c = 0.0f, factor = 1.0f;
    if (turns) {
        const double circles = turn.positions[t] * turn.frequencies[channel % turn.pairs] * 0.15915494309189535;  // beyond 1e5
        sincospif((float)(2.0 * (circles - rint(circles))), &s, &c);
    }
    if (is_row && normed && weight && i < latent_dim) factor = weight[i];
    if (t >= step->rows) {
        depend();
        return;
    }
    __shared__ u8* cached;  // the row of the cache, found before the wait
    [[maybe_unused]] __shared__ u8* roped_cached;
    if (is_row) {
        if (threadIdx.x == 0) {
            const Run& run = ALONE ? step->run[0] : run_at(step, t);
            const int place = run.past + t - run.first;
            cached = row_at(cache, run.slot, 0, place, cache.row), roped_cached = APART ? row_at(roped, run.slot, 0, place, roped.row) : 0;
        }
        __syncthreads();
    }
    depend();
    const In x = i < first_roped ? (is_row ? latent : q) : is_row ? k_rope : q_rope;
    const int have = i < first_roped ? (is_row ? latent_dim : main) : P;
    const float* from = is_row ? row_of(x, t) : head_of(x, t, head, have);
    float v = channel < have ? load_one(x, from + channel) : 0.0f;
    if (turns) {
        const bool first = channel < turn.pairs;
        const float other = load_one(x, from + (first ? channel + turn.pairs : channel - turn.pairs));
        v = v * c * turn.magnitude + (first ? -other : other) * s * turn.magnitude;
    }
    if (is_row && normed) {
        const float squares = warp_sum(i < latent_dim ? v * v : 0.0f);
        if (lane == 0) squares_of[i / 32] = squares;
        __syncthreads();
        const float all = warp_sum(lane < blockDim.x / 32 ? squares_of[lane] : 0.0f);
        if (i < latent_dim) v = v * norm_factor(all, latent_dim, eps) * factor;
    }
#if APART
    __shared__ float4 latents[R / 4];
    if (is_row || rotates) {  // by a warp per 128 channels
        if (i < R) ((float*)latents)[i] = v;
        __syncthreads();
        if (i / 32 * 128 < R) {
            const float4 four = i * 4 < R ? latents[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            u8* row = is_row ? cached : (u8*)(q_out + ((s64)t * H + head) * wide);
            store_row<R>(!is_row, is_row, row, i / 32, lane, four);
        }
        if (i >= R && i < W) (is_row ? (u16*)roped_cached - R : q_out + ((s64)t * H + head) * wide)[i] = to_half(v);
        return;
    }
#endif
    if (i < (is_row ? W : wide)) (is_row ? (u16*)cached : q_out + ((s64)t * H + head) * wide)[i] = to_half(v);
}

// n rows of the cache from position `first` on as float16 [n][W], rotated back; a warp per 128 channels.
extern "C" __global__ void __launch_bounds__(256) whole_rows(Plane cache, Plane roped, int slot, int first, int n, u16* out) {
#if APART
    begin();
    __shared__ uint4 unpacked[8][16];
    constexpr int chunks = (R + 127) / 128;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, job = blockIdx.x * 8 + warp, row = job / chunks, chunk = job % chunks;
    if (row >= n) return;
    if (lane < 4 && chunk * 128 + lane * 32 < R)
        unpack_32<KEYS, R>((u16*)unpacked[warp] + lane * 32, row_at(cache, slot, 0, first + row, row_bytes(KEYS, R)), chunk * 4 + lane);
    __syncwarp();
    const int d = chunk * 128 + lane * 4;
    const u32 low = ((const u32*)unpacked[warp])[lane * 2], high = ((const u32*)unpacked[warp])[lane * 2 + 1];
    float4 v = make_float4(from_half((u16)low), from_half((u16)(low >> 16)), from_half((u16)high), from_half((u16)(high >> 16)));
    if (TURN_KEYS) v = rotated_back<wht_group(R)>(v, lane);
    u16* to = out + (s64)row * W;
    if (d < R) *(uint2*)(to + d) = make_uint2(to_half2(v.x, v.y), to_half2(v.z, v.w));
    for (int i = lane; chunk == 0 && i < W - R; i += 32) to[R + i] = ((const u16*)row_at(roped, slot, 0, first + row, 2 * (W - R)))[i];
#endif
}

// Copies the roped keys of n rows of the cache to channels N and on of every head's keys [H][capacity][wide], followed by zeros.
extern "C" __global__ void spread(Plane cache, int n, int N, int P, int wide, Plane keys) {
    begin();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / (wide - N), column = i % (wide - N);
    if (row >= n) return;
    u16* to = (u16*)row_at(keys, 0, blockIdx.y, row, keys.row);
    to[N + column] = column < P ? ((const u16*)cache.rows)[(s64)row * W + R + column] : 0;
}

// Converts matrices [H][rows][K], `stride` elements apart in `from`, to float16 [H][rows][K]. type: 0 F32, 1 F16, 2 BF16
extern "C" __global__ void halves(const void* from, int type, s64 stride, s64 n, u16* to) {
    begin();
    const s64 first = blockIdx.y * stride;
    for (s64 i = blockIdx.x * (s64)blockDim.x + threadIdx.x; i < n; i += (s64)gridDim.x * blockDim.x) {
        const u16 stored = type ? ((const u16*)from)[first + i] : 0;
        to[blockIdx.y * n + i] = type == 0 ? to_half(((const float*)from)[first + i]) : type == 1 ? stored : to_half(from_bf16(stored));
    }
}
