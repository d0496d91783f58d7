// pieces: adds up the results of split.cu for the pieces of the positions that a row sees
// Meaning   the end of NumpyOps.attention                    Launcher  cuda_backend/attention.py
// In        sums [place][T][H][D], stats [place][T][H]: power of 2 and sum of each; perhaps a gate (T, H, DIM);
//           sink_logits [H]: one more score of each head, without a value, with SINK_LOGITS
// Out       (T, H * DIM) in each requested form (store.cuh); only dense if groups of 32 straddle heads
// Build     TURN_VALUES: number of columns that are rotated back together, 0: none (formats.cuh); WARPS per run, 1 or 2; GATED: there may
//           be a gate, which takes a third of the registers; FOLDED: sums whose stats are (-inf, 0) may be unwritten (tall.cu);
//           WINDOWED: flash.cuh; ALONE: split.cu; SINK_LOGITS: whether there are any; the macros of store.cuh
// Work      a CTA per row, head and 128 columns; one warp, or two with 64 columns each, adds up one run of eight groups of positions
//           at a time, 8 or 16 of its pieces together; then the first warp adds up the runs
// Numbers   float32; the order of sums depends on positions alone: the tiles of a group (in split.cu or here), the groups of a
//           run, then runs. Pieces that a row does not see add nothing; scaling is exact
// Bound     latency: a few hundred KB
// Tried     us of `combine` per layer, or of a step of 8 layers: variant against the kernel of that time (Qwen3.6-27B, one H200).
//           lists of pieces, every 8th or 16th group a warp's -> 16.1 against 9.9 at 16 rows: lists are made once split's CTAs have
//             left room
//           16 pieces at once in one warp -> 15.8 against 13.6 at 64 rows; WeDLM's step 437 against 441, GLM's 421 against 405:
//             registers
//           the next product starts once this kernel has its pieces -> step 982 to 987 against 983 to 985 at 22 rows: it starts later
//             by as much
//           an empty pass before the wait to load the instructions -> 10.1 against 8.9 at 22 rows: they were loaded already
//           80 registers, half as many again of the warps -> step 1,877 against 1,881 at 64 rows, 845 against 843 at 16: the next
//             product's reads start later; spills on other cards
//           two warps for a run whatever the number of CTAs -> step 984 against 979 at 22 rows, 1,892 against 1,879 at 64: half the
//             runs at once
//           one, two, four warps at 16 rows -> WeDLM 2.037, 2.043, 2.072 ms at 128, 3.159, 3.137, 3.036 at 8,192: three are between
//             them
//           two warps for a run of at most 16 pieces, and of at most 8 -> WeDLM's step of 16 rows at 512 tokens 2.056 ms against 2.109,
//             and at 128 tokens 2.012 against 2.000: kept for 9 to 16 pieces
//           three warps of a run each after a long past, however many the CTAs -> 25.0 against 41.6 at 22 rows and 32K, 37.9 against 63.7
//             at 128K: kept; five at 16 rows 24.9 against 24.4 of two, with two warps for a run 36 and more
//           one warp for a run however few the CTAs, half as many in all -> GLM 2.007 ms against 1.972 at one row, 3.579 against
//             3.320 at 8
//           this work in the CTA of `split` that ends last -> not built: write, fence, counter and read took 1.8 to 2.2 us

#ifndef ALONE
#define ALONE 0
#endif
#ifndef FOLDED
#define FOLDED 0
#endif
#ifndef SINK_LOGITS
#define SINK_LOGITS 0
#endif
#define MUL_SIGMOID 3  // rows.cu
#define RUN 8          // groups; cuda_backend/layout.py run_count
#define AT_ONCE (8 * WARPS)
#define EACH (4 / WARPS)  // columns per lane

__device__ __forceinline__ float4 times(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }

#if WINDOWED || __CUDA_ARCH__ < 1000
#define BOUND 384  // most threads
#else
#define BOUND 512  // with the actual number the compiler limits itself to 56 registers, and spills
#endif

extern "C" __global__ void __launch_bounds__(BOUND)
combine(const float* sums, const float2* stats, int H, int D, int DIM, const StepState* step, const int* positions, int T,
        int first_t, int tile_bits, int window, int sinks, int shares, int trunk, const float* sink_logits, int op, In gate,
        Out out) {
    release_next();
    if (!WINDOWED) window = sinks = 0;
    extern __shared__ __align__(16) float4 parts[];  // of each run: [32], after all of them (power, sum)
    __shared__ float4 gates[32];
    const int head = blockIdx.x, t = first_t + blockIdx.y, column = blockIdx.z * 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int mine = column + lane * 4, teams = blockDim.x / 32 / WARPS;
    const Run& run_of_row = ALONE ? step->run[0] : run_at(step, blockIdx.y);
    const int own_t = blockIdx.y - run_of_row.first;  // the row's index in its run
    const Mask mask(step, run_of_row, run_of_row.first, positions, window, sinks, 0, first_t, T);
    Pieces pieces;
    const int rows = run_of_row.branches ? mask.seen(own_t) : mask.rows;  // there are no tiles after the rows that a tree's row sees
    pieces.cut(tile_bits, mask.past, rows, window, sinks, window ? positions[t] - window + 1 : 0, min(shares, MOST_SINGLE), trunk);
    const int kept = pieces.kept ? pieces.group(pieces.kept - 1) / RUN + 1 : 0;  // runs with sinks; the runs from `next` on follow them
    const int next = max(kept, pieces.group(pieces.kept) / RUN);
    const int runs = kept + pieces.group(pieces.count + pieces.tails - 1) / RUN + 1 - next;
    float2* tops = (float2*)(parts + runs * 32);
    const float lowest = -__int_as_float(0x7f800000);
    const u32 row = blockIdx.y * H + head, stride = T * H;
    int run = warp / WARPS - teams, i = 0, end = 0;  // pieces from i on, of which a lane knows one
    u32 at = 0, starts = 0;                          // the place of its sums; bit n: piece i + n is in another group than the one before
    auto advance = [&] {
        i += AT_ONCE;
        int before = -1;  // group of the preceding piece
        if (i >= end) {
            run += teams;
            const int group = (run < kept ? run : run - kept + next) * RUN;
            i = pieces.before(group), end = run < runs ? pieces.before(group + RUN) : 0;
        } else {
            before = pieces.group(i - 1);
        }
        const int own = max(0, min(i + lane, end - 1)), group = pieces.group(own), last = __shfl_sync(FULL, group, max(lane - 1, 0));
        at = pieces.place(own) * stride + row, starts = __ballot_sync(FULL, group != (lane ? last : before));
    };
    advance();
    depend();
    if (own_t >= mask.rows) return;
    const float* from = sums + min(column + (warp % WARPS * 32 + lane) * EACH, D - EACH);
    float sum[EACH] = {}, part[EACH] = {};  // of all groups of a run; of one group
    float top = lowest, total = 0.0f, part_total = 0.0f;
    bool gates_here = GATED && op && warp == blockDim.x / 32 - 1;  // a warp without a run, if there is one
#pragma unroll 1
    while (run < runs || gates_here) {
        float2 stat = make_float2(lowest, 0.0f);
        if (lane < AT_ONCE && i + lane < end) stat = stats[at];
        float e[AT_ONCE][EACH];
#if FOLDED
        const u32 written = __ballot_sync(FULL, stat.x > lowest);
        const u32 read_at = __shfl_sync(FULL, at, !written || written >> lane & 1 ? lane : __ffs(written) - 1);
#else
        const u32 read_at = at;
#endif
        auto read = [&](int n) {  // after the last piece it is read again, times 0: a conditional read would wait for the previous one
            const float* p = from + (u64)__shfl_sync(FULL, read_at, n) * D;
            if (EACH == 4)
                *(float4*)e[n] = *(const float4*)p;
            else
                *(float2*)e[n] = *(const float2*)p;
        };
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) read(n);
        if (GATED && gates_here) {
            float g[4];
            float4 by;
            load_some(g, gate, place(gate, t, head * DIM + column), gate.inner ? lane * 4 : 0, gate.inner, gate.inner ? DIM - column : 1);
#pragma unroll 1
            for (int n = 0; n < 4; n++) {  // four rotations move each to its place
                const float x = g[0], y = op == MUL_SIGMOID ? sigmoid(x) : x > 20.0f ? x : log1pf(expf(x));
                g[0] = g[1], g[1] = g[2], g[2] = g[3], by = make_float4(by.y, by.z, by.w, y);
            }
            gates[lane] = by, gates_here = false;
        }
        const float both = fmaxf(top, warp_max(stat.x)), before = power(top - both), factor = power(stat.x - both), whole = stat.y * factor;
        total *= before, part_total *= before, top = both;
#pragma unroll
        for (int c = 0; c < EACH; c++) sum[c] *= before, part[c] *= before;
        auto add = [&](int n) {
            const float by = __shfl_sync(FULL, factor, n), more_total = __shfl_sync(FULL, whole, n);
            const bool starts_here = starts >> n & 1;
            if (starts_here) total += part_total, part_total = 0.0f;
            part_total += more_total;
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                if (starts_here) sum[c] += part[c], part[c] = 0.0f;
                part[c] += e[n][c] * by;
            }
        };
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) add(n);
        const int done = run;
        const bool goes_on = i + AT_ONCE < end;
        if (goes_on || run + teams < runs)
            advance();
        else  // this read takes long
            run += teams;
        if (goes_on || done >= runs) continue;
        float* to = (float*)(parts + done * 32) + (warp % WARPS * 32 + lane) * EACH;
#pragma unroll
        for (int c = 0; c < EACH; c++) to[c] = sum[c] + part[c], sum[c] = part[c] = 0.0f;
        if (lane == 0) tops[done] = make_float2(top, total + part_total);
        top = lowest, total = part_total = 0.0f;
    }
    __syncthreads();
    if (warp) return;
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int r = lane; r < runs; r += 32) top = fmaxf(top, tops[r].x);
    top = warp_max(top);
#pragma unroll 4
    for (int r = 0; r < runs; r++) {
        const float factor = power(tops[r].x - top);
        all = plus(all, times(parts[r * 32 + lane], factor)), total += tops[r].y * factor;
    }
#if SINK_LOGITS
    const float sink = sink_logits[head] * LOG2_E, both = fmaxf(top, ceilf(sink)), here = power(top - both);
    all = times(all, here), total = total * here + exp2f(sink - both);
#endif
    const float4 by = GATED && op ? gates[lane] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    const float inverse = mine < DIM ? 1.0f / total : 0.0f;
    all = make_float4(all.x * inverse, all.y * inverse, all.z * inverse, all.w * inverse);
#if TURN_VALUES
    all = rotated_back<TURN_VALUES>(all, lane);
#endif
    all = make_float4(all.x * by.x, all.y * by.y, all.z * by.z, all.w * by.w);
    if (DIM % 32) {  // dense alone, whose width may not be a multiple of four
        const float v[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (mine + i < DIM) out.dense[((s64)t * H + head) * DIM + mine + i] = v[i];
        return;
    }
    int k = head * DIM + mine, pad = H * DIM + lane * 4;  // columns that pad a row to a whole unit
    bool ours = mine < DIM;
#pragma unroll 1
    for (const bool pads = out.packed && head == 0 && column == 0;; pad += 128) {
        store_four(out, t, k, all, ours);
        if (!pads || pad - lane * 4 >= out.groups * 32) return;
        k = pad, ours = true, all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}
