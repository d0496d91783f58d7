// split: grouped-query attention of the rows of a decoding or verifying step, piece by piece of what they see
// Meaning   common/reference.py NumpyOps.attention        Launcher  cuda_backend/attention.py
// In        q [T][H][D] float16 and the cache, keys and values [K][capacity][D] float16, the step's rows already in it
//           (to_cache.cu, rows.cu heads_to_cache)
// Out       of every piece sums [place][T][H][D] and stats [place][T][H], (power, sum), for pieces.cu
// Build     D, a multiple of 16 up to 256; BUFFERS: tiles of keys or values in shared memory, 2 or 4; CTAS of a multiprocessor
// Work      rows are (t, query head of the group), 32 per CTA of eight warps. Of a tile's products with q a warp takes 16
//           positions; the probabilities are shared, and it adds a quarter of the values' columns. A CTA keeps its rows
//           and goes through its share of the pieces, whose tiles arrive ahead of it, committed ones before the kernels
//           before this one have ended. A tree's row sees other rows than its neighbours: the tiles behind the committed
//           ones are gathered for the group of each, its ancestors in the order of their positions
// Assumes   memory beyond the last row of the cache holds finite numbers
// Numbers   float16 products, float32 sums; a tile is summed by itself and scaled by powers of 2, which is exact: what a
//           row gets depends on the positions that it sees, not on how they are cut into pieces, on where the step's rows
//           lie, or on the other rows. The row of a tree equals the row of plain decoding, bit for bit
// Bound     bytes of keys and values
// Origin    FlashAttention-2 (Dao, arXiv 2307.08691)

#define STRIDE (D + 8)  // halves; an odd number of 16-byte units, so that ldmatrix meets no bank twice
#define TILE 64         // positions
#define ROWS 32
#define PROBABILITIES (TILE + 8)
#define NV ((D / 16 + 3) / 4)  // blocks of 16 columns of a warp
#define MINUS_INFINITY (-__int_as_float(0x7f800000))

// A tile on its way: where it begins, where the sums of its piece lie, and whose it is.
struct Tile {
    int at, place, last;  // last: of its piece
    int row, part, seen;  // row: of a tree, or -1 for all rows of the CTA; part of its group; rows of the step that it sees
};

extern "C" __global__ void __launch_bounds__(256, CTAS)
split(const u16* q, const u16* keys, const u16* values, s64 capacity, Places places, int H, int K, const StepState* step,
      const int* positions, int T, float scale, int window, int keep, int causal, int shares, int trunk, float* sums,
      float2* stats) {
    release_next();
    extern __shared__ __align__(16) u16 shared[];
    __shared__ Pieces pieces;
    __shared__ Tile coming[4];
    __shared__ int item, job, stop;  // the next of the CTA's pieces, and of its tiles of rows of a tree; where a piece stops
    __shared__ short lines[2][MOST_ROWS];  // the rows of the step that a tree's row sees, in the order of their positions
    u16 *qs = shared, *tiles = qs + ROWS * STRIDE, *ps = tiles + BUFFERS * TILE * STRIDE;
    float* tops = (float*)(ps + ROWS * PROBABILITIES);  // of each row, by 16 positions
    const Mask mask(step, positions, window, keep, causal);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = warp % 2, c = warp / 2;
    const int group = H / K, head = blockIdx.y, cta = blockIdx.x, ctas = gridDim.x;
    const int blocks = ctas / shares;  // of rows, of which there may be fewer
    if (threadIdx.x == 0) {
        pieces.cut(6, mask.past, mask.rows, window, keep, mask.lowest(), shares, trunk);
        item = cta % blocks * ROWS < mask.rows * group ? cta / blocks : 1 << 30, job = cta, stop = 0;
        coming[3] = {0, 0, 1, -1, 0, 0};
    }
    __syncthreads();

    // By one thread: the tile to be loaded after `last`, of which none is left where its place is -1.
    auto next = [&](const Tile& last) {
        const int tails = step->branches ? 0 : pieces.tails, items = tails + pieces.count;  // those that all rows share
        Tile tile = last;
        if (!last.last) {
            tile.at += TILE;
        } else if (item < items) {  // tails first, then pieces from the newest on
            const int i = item < tails ? pieces.count + item : items - 1 - item;
            tile.place = pieces.place(i);
            tile.at = i < pieces.count ? pieces.begin(pieces[i]) : pieces.tail + (i - pieces.count) * TILE;
            stop = i < pieces.count ? pieces.stop(pieces[i]) : tile.at + TILE;
            item += shares;
        } else {
            const int parts = (group + ROWS - 1) / ROWS, jobs = step->branches ? mask.rows * pieces.tails * parts : 0;
            for (tile.place = -1; job < jobs && tile.place < 0; job += ctas) {
                const int n = job / parts % pieces.tails;
                tile.part = job % parts, tile.row = job / parts / pieces.tails;
                tile.seen = mask.seen(tile.row);
                tile.at = pieces.tail + n * TILE, stop = tile.at + TILE;
                if (tile.at < mask.past + tile.seen) tile.place = pieces.trunk + n;  // else it holds no row that this one sees
            }
        }
        tile.last = tile.at + TILE >= stop;
        return tile;
    };
    // Positions of a tile, committed ones (1), those of the step (2) or both (3).
    auto load = [&](u16* tile, bool of_keys, const Tile& of, const short* line, int which) {
        const u16* plane = (of_keys ? keys : values) + head * capacity * D;
        const int start = place_of(places, of.at);
        const u32 to = shared_address(tile + warp * STRIDE + lane * 8);
        if (of.at + TILE <= mask.past) {
            const u16* from = plane + (s64)(start + warp) * D + lane * 8;
#pragma unroll 4
            for (int i = 0; i < TILE / 8; i++)
#pragma unroll
                for (int e = 0; e < D; e += 256)
                    if (D % 256 == 0 || e + lane * 8 < D) copy16(to + (i * 8 * STRIDE + e) * 2, from + i * 8 * D + e);
            return;
        }
        const int total = places.fixed + places.ring, begin_of_rows = place_of(places, mask.past);
#pragma unroll 1
        for (int i = 0; i < TILE; i += 8) {
            const int row = of.at + warp + i - mask.past;
            if (!(which & (row < 0 ? 1 : 2))) continue;
            int place = row < 0 ? start + warp + i : begin_of_rows + (of.seen ? line[min(row, of.seen - 1)] : row);
            if (row >= 0 && place >= total) place -= places.ring;
            const u16* from = plane + (s64)place * D + lane * 8;
#pragma unroll
            for (int e = 0; e < D; e += 256)
                if (D % 256 == 0 || e + lane * 8 < D) copy16(to + (i * STRIDE + e) * 2, from + e);
        }
    };

    float o[2 * NV][4], l[2], top[2], best[2];  // of rows lane / 4 and that + 8 of a warp's 16
    int low[2], high[2], place_of_row[2];       // positions that a row sees; -1 for rows that are none
    auto clear = [&] {
        l[0] = l[1] = 0.0f, top[0] = top[1] = MINUS_INFINITY;
#pragma unroll
        for (int n = 0; n < 2 * NV; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    };
    clear();
    const u32 q_at = shared_address(qs + (m * 16 + lane % 16) * STRIDE + lane / 16 * 8);
    const u32 p_at = shared_address(ps + (m * 16 + lane % 16) * PROBABILITIES + lane / 16 * 8);
    bool active = false;  // does the warp have rows?
#pragma unroll 1
    for (int load_of = -BUFFERS;; load_of++) {  // one of keys or values after the other
        u16* buffer = tiles + (load_of + BUFFERS) % BUFFERS * TILE * STRIDE;
        const bool first = load_of % 2 == 0;
        if (load_of == 0) {
            depend();
            __syncthreads();
            bool waits = false;
#pragma unroll 1
            for (int i = 0; i < BUFFERS; i++) {  // what the step has written of the tiles that are on their way
                const Tile& of = coming[i / 2];
                if (of.place < 0 || of.at + TILE <= mask.past) continue;
                load(tiles + i * TILE * STRIDE, i % 2 == 0, of, lines[i / 2 % 2], 2);
                waits = true;
            }
            commit();
            if (waits) wait_all_but(0);
        }
        if (load_of >= 0) {
            wait_all_but(BUFFERS - 1);
            if (coming[load_of / 2 % 4].place < 0) break;
        }
        const Tile& now = coming[max(load_of, 0) / 2 % 4];
        if (load_of >= 0 && first) {
            if (load_of == 0 || now.row >= 0) {  // other rows
                const int first_row = now.row < 0 ? cta % blocks * ROWS : now.row * group + now.part * ROWS;
                const int rows = min(ROWS, now.row < 0 ? mask.rows * group - first_row : group - now.part * ROWS);
                active = m * 16 < rows;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = m * 16 + lane / 4 + half * 8, t = min((first_row + r) / group, mask.rows - 1);
                    place_of_row[half] = r < rows ? t * H + head * group + first_row + r - t * group : -1;
                    low[half] = mask.low(t), high[half] = now.row < 0 ? mask.high(t) : mask.past + now.seen - 1;
                }
#pragma unroll 1
                for (int r = warp; r < ROWS; r += 8) {
                    const int t = (first_row + r) / group;
                    const u16* from = q + ((s64)t * H + head * group + first_row + r - t * group) * D;
                    for (int e = lane * 8; e < D; e += 256)
                        *(uint4*)(qs + r * STRIDE + e) = r < rows ? *(const uint4*)(from + e) : make_uint4(0, 0, 0, 0);
                }
                __syncthreads();
            }
            float s[2][2][4] = {};
            if (active) {
                const u32 k_at = shared_address(buffer + (c * 16 + lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
                auto multiply = [&](float (&sum)[2][4], int d) {
                    u32 a[4], k[4];
                    ldmatrix(a, q_at + d * 32);
                    ldmatrix(k, k_at + d * 32);
                    mma(sum[0], a, k[0], k[1]);
                    mma(sum[1], a, k[2], k[3]);
                };
#pragma unroll 2
                for (int d = 0; d < D / 16; d += 2) {  // two sums, since one would wait for itself
                    multiply(s[0], d);
                    if (D / 16 % 2 == 0 || d + 1 < D / 16) multiply(s[1], d + 1);
                }
                const bool all = now.at + TILE <= mask.past && !window;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float most = MINUS_INFINITY;
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float& x = s[0][n][2 * half + e];
                            const int at = now.at + c * 16 + n * 8 + lane % 4 * 2 + e;
                            const bool see = all || (at <= high[half] && (at >= low[half] || at < keep));
                            x = see ? (x + s[1][n][2 * half + e]) * scale : MINUS_INFINITY;
                            most = fmaxf(most, x);
                        }
                    most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
                    if (lane % 4 == 0) tops[c * ROWS + m * 16 + lane / 4 + half * 8] = most;
                }
            }
            __syncthreads();
            if (active)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = m * 16 + lane / 4 + half * 8;
                    float most = tops[r];
#pragma unroll
                    for (int w = 1; w < TILE / 16; w++) most = fmaxf(most, tops[w * ROWS + r]);
                    best[half] = ceilf(most);
                    const float base = most == MINUS_INFINITY ? 0.0f : best[half];
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        *(u32*)(ps + r * PROBABILITIES + c * 16 + n * 8 + lane % 4 * 2) =
                            to_half2(exp2f(s[0][n][2 * half] - base), exp2f(s[0][n][2 * half + 1] - base));
                }
        }
        if (load_of >= 0 && !first && active) {
            u32 p[TILE / 16][4];
            float before[2], after[2], ones[4] = {};  // factors; times ones
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                ldmatrix(p[k], p_at + k * 32);
                mma(ones, p[k], 0x3c003c00, 0x3c003c00);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float both = fmaxf(top[half], best[half]);
                before[half] = power(top[half] - both), after[half] = power(best[half] - both);
                l[half] = l[half] * before[half] + ones[2 * half] * after[half];
                top[half] = both;
            }
            const u32 v_at = shared_address(buffer + lane % 16 * STRIDE + c * 16 + lane / 16 * 8);
#pragma unroll
            for (int n = 0; n < NV; n++) {
                if (D % 64 && (n * 4 + c) * 16 >= D) break;
                float sum[2][4] = {};
#pragma unroll
                for (int k = 0; k < TILE / 16; k++) {
                    u32 v[4];
                    ldmatrix_transposed(v, v_at + (k * 16 * STRIDE + n * 64) * 2);
                    mma(sum[0], p[k], v[0], v[1]);
                    mma(sum[1], p[k], v[2], v[3]);
                }
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& x = o[2 * n + j][e];
                        x = __fmaf_rn(sum[j][e], after[e / 2], x * before[e / 2]);  // both products are exact
                    }
            }
            if (now.last) {  // of its piece
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    if (place_of_row[half] < 0) continue;
                    const s64 to = (s64)now.place * T * H + place_of_row[half];
                    if (c == 0 && lane % 4 == 0) stats[to] = make_float2(top[half], l[half]);
                    float* out = sums + to * D + c * 16 + lane % 4 * 2;
#pragma unroll
                    for (int n = 0; n < NV; n++)
#pragma unroll
                        for (int j = 0; j < 2; j++)
                            if (D % 64 == 0 || (n * 4 + c) * 16 < D)
                                *(float2*)(out + n * 64 + j * 8) = make_float2(o[2 * n + j][2 * half], o[2 * n + j][2 * half + 1]);
                }
                clear();
            }
        }
        const int ordinal = (load_of + BUFFERS) / 2;
        Tile& ahead = coming[ordinal % 4];  // whose load takes this buffer
        if (first && threadIdx.x == 224) {  // of a warp that has nothing to do in plain decoding
            const Tile& last = coming[(ordinal + 3) % 4];
            if (last.place < 0)
                ahead.place = -1;
            else
                ahead = next(last);
        }
        __syncthreads();
        if (first && ahead.place >= 0 && ahead.seen) {
            if (warp == 0) {
                int before = 0;
#pragma unroll
                for (int w = 0; w < MOST_ROWS / 32; w++) {
                    const u32 bits = step->seen[ahead.row][w];
                    if (bits >> lane & 1) lines[ordinal % 2][before + __popc(bits & ((1u << lane) - 1))] = w * 32 + lane;
                    before += __popc(bits);
                }
            }
            __syncthreads();
        }
        if (ahead.place >= 0) load(buffer, first, ahead, lines[ordinal % 2], load_of < 0 ? 1 : 3);
        commit();
    }
}
