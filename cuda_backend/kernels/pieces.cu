// pieces: what split.cu computed of the pieces of what a row sees, added up
// Meaning   the end of NumpyOps.attention                    Launcher  cuda_backend/attention.py
// In        sums [place][T][H][D], stats [place][T][H]: power of 2 and sum of each; perhaps a gate (T, H, DIM)
// Out       (T, H * DIM) in each form that is wanted (store.cuh), dense alone where groups of 32 straddle heads
// Work      a CTA per row, head and 256 columns; every fourth group of positions 64 threads, then these in order
// Numbers   float32; what is added first are the tiles of a group, by split.cu or here, then groups: an order that depends
//           on positions alone. Pieces that a row does not see add nothing
// Bound     latency: a few hundred KB

#define MUL_SIGMOID 3  // rows.cu

extern "C" __global__ void __launch_bounds__(256)
combine(const float* sums, const float2* stats, int H, int D, int DIM, const StepState* step, const int* positions, int T,
        int first_t, int tile_bits, int window, int keep, int shares, int trunk, int op, In gate, Out out) {
    begin();
    __shared__ float powers[512], totals[512], tops[8], wholes[4];  // pieces of a million positions
    __shared__ short groups[512], places[512];
    __shared__ float4 parts[4][64], gates[64];
    const int head = blockIdx.x, t = first_t + blockIdx.y, column = blockIdx.z * 256, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Mask mask(step, positions, window, keep, 0, first_t, T);
    if ((int)blockIdx.y >= mask.rows) return;
    const int turn = threadIdx.x / 64, four = threadIdx.x % 64, mine = column + four * 4;
    float g = 1.0f;
    if (op && column + threadIdx.x < DIM) {
        g = load_one(gate, place(gate, t, head * DIM + column + threadIdx.x));
        g = op == MUL_SIGMOID ? sigmoid(g) : g > 20.0f ? g : log1pf(expf(g));
    }
    ((float*)gates)[threadIdx.x] = g;
    Pieces pieces;
    const int rows = step->branches ? mask.seen(blockIdx.y) : mask.rows;  // tiles behind what a tree's row sees do not exist
    pieces.cut(tile_bits, mask.past, rows, window, keep, mask.low(blockIdx.y), shares, trunk);
    const int count = pieces.count + pieces.tails, row = blockIdx.y * H + head;
    float top = -__int_as_float(0x7f800000);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += 256) {
        const int at = pieces.place(i);
        const float2 of = stats[(s64)at * T * H + row];
        top = fmaxf(top, of.x);
        powers[i] = of.x, totals[i] = of.y, groups[i] = pieces.group(i), places[i] = at;
    }
    top = warp_max(top);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    top = warp_max(tops[lane % 8]);
    const float* from = sums + (s64)row * D + mine;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), part = sum;  // of all groups of these threads, of one
    float total = 0.0f, part_total = 0.0f;
    int group = -1;
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
        u32 left = __ballot_sync(FULL, first + lane < count && (groups[min(first + lane, count - 1)] & 3) == turn);
#pragma unroll 1
        while (left) {
            float4 e[8];
            int at[8];
#pragma unroll
            for (int n = 0; n < 8; n++, left &= left - 1) {
                at[n] = left ? first + __ffs(left) - 1 : -1, e[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (left && mine < D && powers[at[n]] >= top - 126.0f)  // D is a multiple of 4
                    e[n] = *(const float4*)(from + (s64)places[at[n]] * T * H * D);
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                if (at[n] < 0) break;
                if (groups[at[n]] != group) {
                    sum = plus(sum, part), total += part_total, group = groups[at[n]];
                    part = make_float4(0.0f, 0.0f, 0.0f, 0.0f), part_total = 0.0f;
                }
                const float factor = power(powers[at[n]] - top);
                part = plus(part, make_float4(e[n].x * factor, e[n].y * factor, e[n].z * factor, e[n].w * factor));
                part_total += totals[at[n]] * factor;
            }
        }
    }
    parts[turn][four] = plus(sum, part);
    if (four == 0) wholes[turn] = total + part_total;
    __syncthreads();
    if (turn) return;
    sum = parts[0][four], total = wholes[0];
#pragma unroll
    for (int i = 1; i < 4; i++) sum = plus(sum, parts[i][four]), total += wholes[i];
    const float4 by = gates[four];
    sum = make_float4(sum.x / total * by.x, sum.y / total * by.y, sum.z / total * by.z, sum.w / total * by.w);
    if (DIM % 32) {  // dense alone, of a width that fours may not divide
        const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (mine + i < DIM) out.dense[((s64)t * H + head) * DIM + mine + i] = v[i];
        return;
    }
    store_four(out, t, head * DIM + mine, sum, mine < DIM);
    if (out.packed && head == 0 && column == 0 && warp == 0)  // columns that pad a row to a whole unit
        for (int k = H * DIM; k < out.groups * 32; k += 128) store_four(out, t, k + lane * 4, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
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
