// pieces: what split.cu computed of the pieces of what a row sees, added up
// Meaning   the end of NumpyOps.attention                    Launcher  cuda_backend/attention.py
// In        sums [place][T][H][D], stats [place][T][H]: power of 2 and sum of each; perhaps a gate (T, H, DIM)
// Out       (T, H * DIM) in each form that is wanted (store.cuh), dense alone where groups of 32 straddle heads
// Work      a CTA per row, head and 128 columns; a warp adds up a run of eight groups of positions at a time, then the runs
// Numbers   float32; what is added first are the tiles of a group, by split.cu or here, then the groups of a run, then runs: an
//           order that depends on positions alone. Pieces that a row does not see add nothing; scaling is exact
// Bound     latency: a few hundred KB

#define MUL_SIGMOID 3  // rows.cu
#define RUN 8          // groups; cuda_backend/layout.py run_count

__device__ __forceinline__ float4 times(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }

extern "C" __global__ void __launch_bounds__(512)
combine(const float* sums, const float2* stats, int H, int D, int DIM, const StepState* step, const int* positions, int T,
        int first_t, int tile_bits, int window, int keep, int shares, int trunk, int op, In gate, Out out) {
    release_next();
    extern __shared__ __align__(16) float4 parts[];  // of each run: [32], behind all of them (power, sum)
    __shared__ float4 gates[32];
    const int head = blockIdx.x, t = first_t + blockIdx.y, column = blockIdx.z * 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int mine = column + lane * 4;
    const Mask mask(step, positions, window, keep, 0, first_t, T);
    Pieces pieces;
    const int rows = step->branches ? mask.seen(blockIdx.y) : mask.rows;  // tiles behind what a tree's row sees do not exist
    pieces.cut(tile_bits, mask.past, rows, window, keep, mask.low(blockIdx.y), min(shares, MOST_SINGLE), trunk);
    const int kept = pieces.kept ? pieces.group(pieces.kept - 1) / RUN + 1 : 0;  // runs; behind them follow those from `next` on
    const int next = max(kept, pieces.group(pieces.kept) / RUN), runs = kept + pieces.group(pieces.count + pieces.tails - 1) / RUN + 1 - next;
    float2* tops = (float2*)(parts + runs * 32);
    const float lowest = -__int_as_float(0x7f800000);
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const u32 row = blockIdx.y * H + head, stride = T * H;
    int run = warp - blockDim.x / 32, i = 0, end = 0;  // pieces from i on, of which a lane knows one
    u32 at = 0, starts = 0;                            // where its sums lie; bit n: number i + n is another group than the one before
    auto advance = [&] {
        i += 8;
        int before = -1;  // the group of the last piece
        if (i >= end) {
            run += blockDim.x / 32;
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
    if ((int)blockIdx.y >= mask.rows) return;
    const float* from = sums + min(mine, D - 4);
    float4 sum = zero, part = zero;  // of all groups of a run, of one
    float top = lowest, total = 0.0f, part_total = 0.0f;
    bool gates_here = op && warp == blockDim.x / 32 - 1;  // a warp with no run, if there is one
#pragma unroll 1
    do {
        float2 stat = make_float2(lowest, 0.0f);
        if (lane < 8 && i + lane < end) stat = stats[at];
        float4 e[8];  // behind the last piece that again, times 0: a conditional read would wait for the one before it
#pragma unroll
        for (int n = 0; n < 8; n++) e[n] = *(const float4*)(from + (u64)__shfl_sync(FULL, at, n) * D);
        if (gates_here) {
            float g[4];
            float4 by;
            load_some(g, gate, place(gate, t, head * DIM + column), gate.inner ? lane * 4 : 0, gate.inner, gate.inner ? DIM - column : 1);
#pragma unroll 1
            for (int n = 0; n < 4; n++) {  // four turns bring each to its place
                const float x = g[0], y = op == MUL_SIGMOID ? sigmoid(x) : x > 20.0f ? x : log1pf(expf(x));
                g[0] = g[1], g[1] = g[2], g[2] = g[3], by = make_float4(by.y, by.z, by.w, y);
            }
            gates[lane] = by, gates_here = false;
        }
        const float both = fmaxf(top, warp_max(stat.x)), before = power(top - both), factor = power(stat.x - both), whole = stat.y * factor;
        sum = times(sum, before), total *= before, part = times(part, before), part_total *= before, top = both;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            if (starts >> n & 1) sum = plus(sum, part), total += part_total, part = zero, part_total = 0.0f;
            part = plus(part, times(e[n], __shfl_sync(FULL, factor, n))), part_total += __shfl_sync(FULL, whole, n);
        }
        const int done = run;
        advance();
        if (run == done || done >= runs) continue;
        parts[done * 32 + lane] = plus(sum, part);
        if (lane == 0) tops[done] = make_float2(top, total + part_total);
        sum = part = zero, top = lowest, total = part_total = 0.0f;
    } while (run < runs);
    __syncthreads();
    if (warp) return;
    for (int r = lane; r < runs; r += 32) top = fmaxf(top, tops[r].x);
    top = warp_max(top);
#pragma unroll 4
    for (int r = 0; r < runs; r++) {
        const float factor = power(tops[r].x - top);
        sum = plus(sum, times(parts[r * 32 + lane], factor)), total += tops[r].y * factor;
    }
    const float4 by = op ? gates[lane] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    const float inverse = mine < DIM ? 1.0f / total : 0.0f;
    sum = make_float4(sum.x * inverse * by.x, sum.y * inverse * by.y, sum.z * inverse * by.z, sum.w * inverse * by.w);
    if (DIM % 32) {  // dense alone, of a width that fours may not divide
        const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (mine + i < DIM) out.dense[((s64)t * H + head) * DIM + mine + i] = v[i];
        return;
    }
    int k = head * DIM + mine, pad = H * DIM + lane * 4;  // columns that pad a row to a whole unit
    bool ours = mine < DIM;
#pragma unroll 1
    for (const bool pads = out.packed && head == 0 && column == 0;; pad += 128) {
        store_four(out, t, k, sum, ours);
        if (!pads || pad - lane * 4 >= out.groups * 32) return;
        k = pad, ours = true, sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Rows of [capacity][D] planes from one cache to another: positions base + path[j], or base + j without a
// path, to to_base + j. A thread moves 8 values of every row, so that an ascending path may be kept in place.
extern "C" __global__ void keep(const u16* from, s64 from_capacity, Places from_places, int base, u16* to, s64 to_capacity,
                                Places to_places, int to_base, const int* path, int n, int D) {
    const int i = threadIdx.x * 8;
    from += blockIdx.x * from_capacity * D + i, to += blockIdx.x * to_capacity * D + i;
    for (int j = blockIdx.y; j < n; j += gridDim.y)
        *(uint4*)(to + (s64)place_of(to_places, to_base + j) * D) =
            *(const uint4*)(from + (s64)place_of(from_places, base + (path ? path[j] : j)) * D);
}
