// delta: a Gated DeltaNet mixer: short convolution, the delta rule along each row's ancestors, gated norm
// Meaning   common/ops.py delta_mixer; without TAPS common/reference.py NumpyOps.gated_delta
// Launcher  cuda_backend/recurrent.py
// In        q, k (T, Hk, DIM), v (T, Hv, DV), a, b (T, Hv), z (T, Hv, DV); with TAPS q is the convolution's input (T, C), the
//           channels of all three; decay, dt_bias (Hv,)
//           state: two matrices [Hv][DV][DK], `flip` apart, and for the rows of steps [2][MAX_DECODE_ROWS]: k [Hk][DK], change
//           [Hv][DV], factor [Hv]
//           convolution of C = 2 Hk DIM + Hv DV channels: taps [C][TAPS], two tails [TAPS - 1][C], rows [2][MAX_DECODE_ROWS][C]
// Out       NORM: (T, Hv * 128) in the forms of store.cuh; else out.dense [T][Hv][DV] before the norm
// Build     DK, a multiple of 16 up to 256; DIM: the width of a key, at most DK, zeros after it in the state
//           TAPS: of the convolution, 0 without; NORM: with the gated norm, DV = 128 and compute capability 9.0
//           ALONE: a step of one row without prepare.cu: each of three value heads computes the shared work of a key head itself,
//           which takes less time than a launch; PARTIALS, A_PARTIALS, B_PARTIALS as prepare.cu; the names of store.cuh
//           GROUPED as delta.cuh
//           WIDE: 64, or 32 without NORM and ALONE, of few heads: twice the CTAs, each with half of the warps that share a
//           multiprocessor
// Work      a CTA per value head and WIDE columns, two of them a cluster under NORM. A warp per 8 columns runs the recurrence: 16 lanes
//           share four columns of the matrix, in registers for all rows. The other warps read a chunk of rows meanwhile, and finish the
//           last one; chunks have equal length, so that neither group waits for a short one.
//           The committed path is applied first, and its result written beside the old matrix; this step's
//           rows are kept as (k, change, factor) for the next. A row's result is that of the matrix before it, faded, and of its
//           change times k . q: a leaf of a tree does not change the matrix. A tree is computed depth first, leaves first, as the
//           step's `line` says. A matrix that several rows with children continue is saved for them: the innermost in
//           registers, one in shared memory, and more, which few trees have, in `spill`
// Assumes   a step of more than MAX_DECODE_ROWS rows is a chain (kind 1); it leaves its own matrix
// Numbers   float32; every way to reach a state applies the same operations in the same order, so a row of a chain or a
//           tree equals the row that plain decoding computes, bit for bit
// Bound     bytes of the matrix, read and written once; from about 8 rows the recurrence, 200 instructions per warp and row
// Tried     us per layer, variant against the kernel of that time (Qwen3.6-27B, one H200); docs/experiments/recurrent.md has more.
//           one launch for any number of rows -> 52.8 against 33.4 at 64 rows, 6.1 against 8.3 at 2: six CTAs convolve each query and
//             key
//           the committed path brought to shared memory by other warps -> 0.3 to 0.6 less for a path of 8 rows, 0.4 to 0.7 more for
//             one
//           eight committed rows read at once instead of four -> 22.9 against 21.5 for a tree of 24 after a path of 8: longer code
//           committed rows read whether they exist or not -> 14.5 against 13.2 at 16 rows after a path of 8; 5.7 against 6.0 at one
//             row
//           each result sent to the other CTA of the cluster -> 39.5 against 35.9 at 64 rows: 243 instructions per row, not 203
//           128 registers, so that the kernel before fits beside it -> 35.89 against 34.80 at 64 rows: spills
//           the decay in one number per matrix -> recurrence 24.2 against 23.4 at 64 rows: shuffles were hidden behind the
//             multiplications
//           chunks of 8 rows instead of 16 -> 26.0 against 24.8 at 64 rows, 13.4 against 13.6 at 22: as many phases again

#define CHUNK 16  // most rows that are read together; even
#ifndef WIDE
#define WIDE 64              // columns of a CTA
#endif
#define TEAM (4 * WIDE)                             // threads of the recurrence
#define HELPERS (ALONE && DK <= 128 ? 6 : 4)          // the other warps
#define HELD (DK <= 128 && !ALONE)                  // matrices that are saved in registers
#define SHARE (CHUNK / HELPERS / 2)                 // rows of a chunk that 16 lanes read
#define GATED (ALONE ? 1 : 2)                       // rows whose gates a warp reads
#define APPLIED (DK <= 128 && !ALONE ? 4 : 1)       // committed rows read together
#define LEAF 16                                     // a move: cuda_backend/tree_order.py
#if NORM
#define CLUSTER __cluster_dims__(1, 2, 1)
#else
#define CLUSTER
#endif

#if NORM
__device__ __forceinline__ u32 rank_in_cluster() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ u32 address_at(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Stores four floats to shared memory of a CTA of the cluster; a barrier there counts their arrival.
__device__ __forceinline__ void send(u32 address, float4 v, u32 arrival) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
                 "r"(arrival)
                 : "memory");
}
__device__ __forceinline__ void expect(u32 arrival, int bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(arrival), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void wait_for(u32 arrival, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(arrival), "r"(parity)
                     : "memory");
}
__device__ __forceinline__ void both_have_begun() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#else
__device__ __forceinline__ void both_have_begun() {}
#endif

extern "C" __global__ void __launch_bounds__(TEAM + 32 * HELPERS, 1) CLUSTER
delta(In q, In k, In v, In a, In b, const float* decay, const float* dt_bias, const StepState* step, int Hk, int Hv,
      int DV, float* matrix, s64 flip, float* row_k, float* row_change, float* row_factor, const float* taps, float* tail,
      s64 tail_flip, float* raw_rows, const float* queries, const float* keys, const float* values, const float* gates,
      float4* spill, int shared_saved, int spilled, In z, const float* norm, float eps, Out out) {
    release_next();
    // every step has a first run, which need not wait for the number of runs
    if (!ALONE && blockIdx.z && (int)blockIdx.z >= step->runs) return;
    const Run& run = step->run[ALONE ? 0 : blockIdx.z];
    extern __shared__ __align__(16) float shared[];
    float* ks = shared;                      // [2][CHUNK][DK]
    float* qs = ks + 2 * CHUNK * DK;         // [2][CHUNK][DK]
    float* vs = qs + 2 * CHUNK * DK;         // [2][CHUNK][WIDE]
    float* changes = vs + 2 * CHUNK * WIDE;  // [2][CHUNK][WIDE]
    float* outs = changes + 2 * CHUNK * WIDE;            // [2][CHUNK][WIDE]
    float4* scalars = (float4*)(outs + 2 * CHUNK * WIDE);  // [2][CHUNK]: factor, weight of the change, k times q
    u8* order = (u8*)(scalars + 2 * CHUNK);               // [MAX_DECODE_ROWS] as in StepState
    u8* moves = order + MAX_DECODE_ROWS;                      // [MAX_DECODE_ROWS]
    const int h = (int)blockIdx.x, hk = key_head(h, Hk, Hv), c0 = blockIdx.y * WIDE, lane = threadIdx.x % 32;
    const int store = step->path_store, base = ALONE ? 0 : run.first, rows = ALONE ? 1 : run.rows, path = run.path_length;
    const int path_at = ALONE ? 0 : run.path;
    const bool kept = ALONE || !run.kind, branches = !ALONE && run.branches;
#if !ALONE
    const int state_from = run.from;
    asm volatile("" ::"r"(state_from));  // read together with the other fields, not after a branch that waits for these
#else
    const int& state_from = run.from;
#endif
    // a chunk is read in one phase, goes through the recurrence in the next and is finished in the one after
    const int chunks = ALONE ? 1 : (rows + CHUNK - 1) / CHUNK, phases = chunks ? chunks + 2 : 1;
    const int chunk = ALONE || !chunks ? 1 : (rows + chunks - 1) / chunks;  // rows per chunk
    const DeltaRows now = {row_k + (s64)(1 - store) * MAX_DECODE_ROWS * Hk * DK,
                           row_change + (s64)(1 - store) * MAX_DECODE_ROWS * Hv * DV,
                           row_factor + (1 - store) * MAX_DECODE_ROWS * Hv};
    auto row_at = [&](int i) { return base + (branches ? order[i] : i); };
#if NORM
    float* others = (float*)(moves + MAX_DECODE_ROWS);  // [4][CHUNK / 2][WIDE]: of every second row, from the cluster's other CTA
    float* weights = others + 2 * CHUNK * WIDE;  // [2][CHUNK / 2][128]: norm * silu(z)
    const u32 arrivals = shared_address(weights + CHUNK * 128), rank = rank_in_cluster();  // [4], of outs
    if (threadIdx.x == TEAM) {  // expect the first bytes before any thread waits for another one
        for (int i = 0; i < 4; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(arrivals + 8 * i) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif

    if (threadIdx.x >= TEAM) {  // read rows of the next chunk, and finish rows of the preceding one
        const int thread = threadIdx.x - TEAM;
#if NORM || ALONE
        const int warp = thread / 32;
#endif
#pragma unroll 1
        for (int c = 0; c < phases; c++) {
            const int first = c * chunk, half = c % 2, n = min(chunk, rows - first);  // the chunk that is read
            const int last = first - 2 * chunk, last_n = c > 1 ? min(chunk, rows - last) : 0;  // the chunk that is finished
#if !ALONE
            const int part = lane % 16;
            float4 key[SHARE][NJ], query[SHARE][NJ], value[SHARE];
            depend();
            if (n > 0) {  // after the last row it is read again, and not used
#pragma unroll
                for (int j = 0; j < SHARE; j++) {
                    const s64 row = base + first + min(j * HELPERS * 2 + thread / 16, n - 1), from = (row * Hk + hk) * DK;
                    read_fours(key[j], keys + from, part), read_fours(query[j], queries + from, part);
                    value[j] = *(const float4*)(values + (row * Hv + h) * DV + min(c0 + part * 4, DV - 4));
                }
                if (thread < n)
                    *(float2*)(scalars + half * CHUNK + thread) = *(const float2*)(gates + ((s64)(base + first + thread) * Hv + h) * 2);
            }
#endif
#if NORM
            if (thread == 0 && (int)rank < n) expect(arrivals + c % 4 * 8, (n + 1 - (int)rank) / 2 * WIDE * 4);
            const int buffer = (c + 2) % 4 * CHUNK / 2;
#pragma unroll 1
            // sent first: the other CTA waits for all of them
            for (int j = thread / 16; 2 * j + 1 - (int)rank < last_n; j += HELPERS * 2) {
                const int row = 2 * j + 1 - (int)rank, at = lane % 16 * 4;
                send(address_at(shared_address(others + (buffer + j) * WIDE + at), 1 - rank),
                     *(const float4*)(outs + (half * CHUNK + row) * WIDE + at), address_at(arrivals + (c + 2) % 4 * 8, 1 - rank));
            }
#endif
#pragma unroll 1
            for (int i = thread; i < last_n * WIDE / 4; i += HELPERS * 32) {
                const int row = i / (WIDE / 4), column = i % (WIDE / 4) * 4, from = (half * CHUNK + row) * WIDE + column;
                const s64 at = ((s64)row_at(last + row) * Hv + h) * DV + c0 + column;
                if (c0 + column >= DV) continue;
                if (kept) *(float4*)(now.change + at) = *(const float4*)(changes + from);
                if (!NORM) *(float4*)(out.dense + at) = *(const float4*)(outs + from);
            }
#if NORM
#pragma unroll 1
            for (int j = HELPERS - 1 - warp; 2 * j + (int)rank < last_n; j += HELPERS) {  // the CTA's half of the rows
                const float* from = others + (buffer + j) * WIDE;
                if (lane / 16 == (int)rank) from = outs + (half * CHUNK + 2 * j + (int)rank) * WIDE;
                wait_for(arrivals + (c + 2) % 4 * 8, (c - 2) / 4 % 2);
                const float4 o = *(const float4*)(from + lane % 16 * 4);
                const float4 g = *(const float4*)(weights + (half * CHUNK / 2 + j) * 128 + lane * 4);
                const float scale = norm_factor(warp_sum(o.x * o.x + o.y * o.y + (o.z * o.z + o.w * o.w)), 128, eps);
                float4 e = make_float4(o.x * scale * g.x, o.y * scale * g.y, o.z * scale * g.z, o.w * scale * g.w);
#pragma unroll 1
                for (int k = h * 128; k < (h ? h * 128 + 1 : out.groups * 32); k = max(k + 128, Hv * 128)) {
                    store_four(out, row_at(last + 2 * j + (int)rank), k + lane * 4, e);
                    e = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // columns that pad a row to a whole unit
                }
            }
            const int gated = ALONE ? c : c - 1;  // the chunk of the recurrence, current or next
            const int gated_n = gated < 0 ? 0 : min(chunk, rows - gated * chunk), own = HELPERS - 1 - warp;
            if (2 * own + (int)rank < gated_n) {
                const float4 w = *(const float4*)(norm + lane * 4);
                const float* p[GATED];
                float4 g[GATED] = {};
#pragma unroll
                for (int i = 0; i < GATED; i++)
                    p[i] = head_of(z, row_at(gated * chunk + min(2 * (own + i * HELPERS) + (int)rank, gated_n - 1)), h, 128) + lane * 4;
                depend();
#pragma unroll 1
                for (int s = 0; s < z.partials; s += 4) {
                    float4 e[GATED][4];
#pragma unroll
                    for (int k = 0; k < 4; k++)
#pragma unroll
                        for (int i = 0; i < GATED; i++) e[i][k] = *(const float4*)(p[i] + min(s + k, z.partials - 1) * z.partial_stride);
#pragma unroll
                    for (int k = 0; k < 4; k++)
#pragma unroll
                        for (int i = 0; i < GATED; i++)
                            if (s + k < z.partials) g[i] = plus(g[i], e[i][k]);
                }
#pragma unroll
                for (int i = 0; i < GATED; i++) {
                    const int j = own + i * HELPERS;
                    if (j < CHUNK / 2)
                        *(float4*)(weights + (gated % 2 * CHUNK / 2 + j) * 128 + lane * 4) =
                            make_float4(w.x * silu(g[i].x), w.y * silu(g[i].y), w.z * silu(g[i].z), w.w * silu(g[i].w));
                }
            }
#endif
#if ALONE
            Run alone = run;
            alone.first = alone.path = 0;  // a constant here, to save registers
            const Conv conv = {taps, tail, tail_flip, raw_rows, 2 * Hk * DIM + Hv * DV};
            if (c == 0 && warp < 3) {  // q, k, v
                const bool first_of_key = (int)blockIdx.y == 0 && is_first_of_key(h, Hk, Hv);
                const int wide = warp == 2 ? min(WIDE, DV - c0) : DIM;
                const int channel = warp == 2 ? 2 * Hk * DIM + h * DV + c0 : (warp * Hk + hk) * DIM;
                const float length = warp == 2 ? 0.0f : warp ? 1.0f : rsqrtf((float)DIM);
                const Head head = {q.p + channel, channel, wide, warp == 2 ? WIDE : DK, length};
                int rows[BEFORE + 1];
#pragma unroll
                for (int j = 0; j <= BEFORE; j++) rows[j] = -j;
                float* keep = warp == 1 && first_of_key ? now.k + hk * DK : 0;
                convolve(q, head, conv, step, alone, rows, warp == 2 || first_of_key, true, warp == 2 ? vs : warp ? ks : qs, keep, Hk * DK);
            }
            if (c == 0 && warp == 3 && lane == 0) {
                const float d = decay[h], bias = dt_bias[h];
                depend();
                *(float2*)scalars = gates_of(a, b, base, h, d, bias);
                if ((int)blockIdx.y == 0) now.factor[base * Hv + h] = scalars->x;
            }
#else
            if (n > 0) {
                float both[SHARE];
#pragma unroll
                for (int j = 0; j < SHARE; j++) {
                    const int place = half * CHUNK + j * HELPERS * 2 + thread / 16;
                    write_fours(key[j], ks + place * DK, part), write_fours(query[j], qs + place * DK, part);
                    if (WIDE == 64 || part * 4 < WIDE) *(float4*)(vs + place * WIDE + part * 4) = value[j];
                    both[j] = part_of_dot(key[j], query[j]);
                }
#pragma unroll
                for (int m = 8; m; m >>= 1)
#pragma unroll
                    for (int j = 0; j < SHARE; j++) both[j] += __shfl_xor_sync(FULL, both[j], m);
#pragma unroll
                for (int j = 0; j < SHARE; j++)
                    if (part == 0) scalars[half * CHUNK + j * HELPERS * 2 + thread / 16].z = both[j];
            }
#endif
            if (!c) both_have_begun();
            if (c + 1 < phases) __syncthreads();
        }
        return;
    }

    const int warp = threadIdx.x / 32, part = lane % 16;
    // a lane's four columns, the number of them that exist, and the column whose sums it gets
    const int local = warp * 8 + lane / 16 * 4, column = c0 + local, left = min(4, DV - column);
    const int own = local + part % 4;
    const s64 at = ((s64)h * DV + min(column, DV - 1)) * DK;
    const DeltaRows old = {row_k + (s64)store * MAX_DECODE_ROWS * Hk * DK, row_change + (s64)store * MAX_DECODE_ROWS * Hv * DV,
                           row_factor + store * MAX_DECODE_ROWS * Hv};
    const float* from = matrix + state_from * flip + at;
    auto next = [&] { return matrix + (step->run[ALONE ? 0 : blockIdx.z].from ^ 1) * flip + at; };  // the other state of the pair

    float4 s[4][NJ], key[NJ];
    read_matrix(s, from, part, max(left, 1));
    const int t = threadIdx.x;
    if (branches && t < rows) order[t] = step->line[base + t], moves[t] = step->moves[base + t];
    if (TEAM < MAX_DECODE_ROWS && branches && t + TEAM < rows)
        order[t + TEAM] = step->line[base + t + TEAM], moves[t + TEAM] = step->moves[base + t + TEAM];
#pragma unroll 1
    for (int first = 0; first < path; first += APPLIED) {
        float4 k[APPLIED][NJ];
        float change[APPLIED][4], factor[APPLIED];
#pragma unroll
        for (int i = 0; i < APPLIED; i++) {
            if (first + i >= path) break;
            const int r = step->path[path_at + first + i];
            read_fours(k[i], old.k + ((s64)r * Hk + hk) * DK, part);
#pragma unroll
            for (int c = 0; c < 4; c++) change[i][c] = old.change[((s64)r * Hv + h) * DV + min(column + c, DV - 1)];
            factor[i] = old.factor[r * Hv + h];
        }
#pragma unroll
        for (int i = 0; i < APPLIED; i++) {
            if (first + i >= path) break;
#pragma unroll
            for (int c = 0; c < 4; c++) fade(s[c], factor[i]), add(s[c], k[i], change[i][c]);
        }
    }
    if (kept) write_matrix(s, next(), part, left);
#if !ALONE
#if HELD
    float4 held[4][NJ];
#endif
    float4* saved = (float4*)(moves + MAX_DECODE_ROWS) + (NORM ? (2 * CHUNK * WIDE + CHUNK * 128 + 8) / 4 : 0);  // to the end
    // The previous row's matrix is saved under a number, or a saved one is loaded.
    auto move_matrix = [&](int move) {
        const int number = move & 7;
        const bool saves = move & 8;
#if HELD
        if (number == 1) {
            if (saves)
                copy_matrix(held, s);
            else
                copy_matrix(s, held);
            return;
        }
#endif
        const int i = number - 1 - HELD, size = 4 * NJ * TEAM, least = (6 << HELD + shared_saved) - 2;  // rows of a tree that spills
        const s64 block = h * (int)gridDim.y + (int)blockIdx.y;
        float4* at = i < shared_saved ? saved + i * size : spill + (block * spilled + base / least + i - shared_saved) * size;
#pragma unroll
        for (int k = 0; k < 4 * NJ; k++)
            if (saves)
                at[k * TEAM + t] = s[k / NJ][k % NJ];
            else
                s[k / NJ][k % NJ] = at[k * TEAM + t];
    };
#endif
    depend();  // no kernel of the step writes the data read so far
    both_have_begun();
    if (chunks) __syncthreads();
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        const int first = c * chunk, half = c % 2, place = half * CHUNK;
        const int n = ALONE ? 1 : min(chunk, rows - first);
#if !ALONE
        const int move = branches && lane < n ? moves[first + lane] : 0;
        const u32 moved = __ballot_sync(FULL, move & ~LEAF), leaves = __ballot_sync(FULL, move & LEAF);
#else
        const u32 leaves = 0;
#endif
        const float *k_at = ks + place * DK, *q_at = qs + place * DK, *v_at = vs + place * WIDE + own;
        const float4* scalars_at = scalars + place;
        float* to = (part < 4 ? changes : outs) + place * WIDE + own;
        float4 query[NJ];
        read_fours(key, k_at, part), read_fours(query, q_at, part);
#pragma unroll 1
        for (int i = 0; i < n; i++) {
#if !ALONE
            if (moved >> i & 1) move_matrix(moves[first + i]);
#endif
            const float4 now = *scalars_at;
            const float value = *v_at, both = ALONE ? sum_of_sixteen(part_of_dot(key, query)) : now.z;
            const bool leaf = leaves >> i & 1;
            float with_key[4], with_query[4];
#pragma unroll
            for (int c = 0; c < 4; c++) with_key[c] = part_of_dot(s[c], key);
            const float change = now.y * (value - now.x * sum_of_sixteen(with_key, part));
#pragma unroll
            for (int c = 0; c < 4; c++) with_query[c] = part_of_dot(s[c], query);
#pragma unroll
            for (int c = 0; c < 4; c++) fade(s[c], leaf ? 1.0f : now.x);  // while the sums are still being added
            q_at += DK;
            if (i + 1 < n) read_fours(query, q_at, part);
            const float out_of_row = __fmaf_rn(both, change, now.x * sum_of_sixteen(with_query, part));
            if (part < 8) *to = part < 4 ? change : out_of_row;
            if (!leaf)
#pragma unroll
                for (int c = 0; c < 4; c++) add(s[c], key, __shfl_sync(FULL, change, lane / 16 * 16 + c));
            k_at += DK, v_at += WIDE, scalars_at++, to += WIDE;
            if (i + 1 < n) read_fours(key, k_at, part);
        }
        __syncthreads();
    }
    if (!kept) write_matrix(s, next(), part, left);
}
