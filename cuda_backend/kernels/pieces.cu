// pieces: what attention.cu and latent.cu computed of the pieces of a past, added up
// Meaning   the end of NumpyOps.attention                    Launcher  cuda_backend/ops.py
// In        sums [piece][T][H][D], stats [piece][T][H]: maximum and sum of each; perhaps a gate (T, H, DIM)
// Out       (T, H * DIM) in each form that is wanted (store.cuh), dense alone where groups of 32 straddle heads
// Work      a CTA of 8 warps per row, head and 128 columns; every eighth piece a warp, then the warps in order
// Numbers   float32; the sum of a piece meets its neighbours in an order that depends on its place alone, and pieces that
//           a row does not see add nothing
// Bound     latency: a few hundred KB

#define MUL_SIGMOID 3  // rows.cu

extern "C" __global__ void __launch_bounds__(256)
combine(const float* sums, const float2* stats, int H, int D, int DIM, const StepState* step, const int* positions, int T,
        int first_t, int window, int keep, int op, In gate, Out out) {
    begin();
    __shared__ float share[512], parts[8][129];  // pieces of a million positions
    __shared__ float4 fours[32];
    const int head = blockIdx.x, t = first_t + blockIdx.y, column = blockIdx.z * 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Mask mask(step, positions, window, keep, 0);
    if (t >= mask.rows) return;
    const Pieces pieces(mask.past + mask.rows, window, keep, mask.low(t));
    const s64 stride = (s64)T * H;
    const float2* stat = stats + blockIdx.y * H + head;
    float top = -__int_as_float(0x7f800000);
#pragma unroll 8
    for (int i = lane; i < pieces.count; i += 32) top = fmaxf(top, stat[pieces.place(pieces[i]) * stride].x);
    top = warp_max(top);  // every warp by itself
    for (int i = threadIdx.x; i < pieces.count; i += 256) share[i] = exp2f(stat[pieces.place(pieces[i]) * stride].x - top);
    __syncthreads();
    const float* from = sums + ((s64)blockIdx.y * H + head) * D + column + lane * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float total = 0.0f;
    const bool mine = column + lane * 4 < D;  // D is a multiple of 4
    const int end = pieces.first + pieces.count - pieces.kept;
    for (int turn = pieces.kept ? 0 : 1; turn < 2; turn++) {
        const int from_piece = turn ? pieces.first : 0, to_piece = turn ? end : pieces.kept;
        const float* weight = share + (turn ? pieces.kept - pieces.first : 0);
        // warp w takes the pieces that are w modulo 8, however many there are before them
#pragma unroll 8
        for (int piece = from_piece + (warp - from_piece & 7); piece < to_piece; piece += 8) {
            const float factor = weight[piece];
            const s64 at = pieces.place(piece) * stride;
            total += stat[at].y * factor;
            const float4 e = mine ? *(const float4*)(from + at * D) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            sum.x += e.x * factor, sum.y += e.y * factor, sum.z += e.z * factor, sum.w += e.w * factor;
        }
    }
    parts[warp][lane * 4] = sum.x, parts[warp][lane * 4 + 1] = sum.y;
    parts[warp][lane * 4 + 2] = sum.z, parts[warp][lane * 4 + 3] = sum.w;
    if (lane == 0) parts[warp][128] = total;
    __syncthreads();
    const int d = column + threadIdx.x;
    if (threadIdx.x < 128) {
        float all = 0.0f, whole = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; w++) all += parts[w][threadIdx.x], whole += parts[w][128];
        float v = d < DIM ? all / whole : 0.0f;
        if (op && d < DIM) {
            const float g = load_one(gate, place(gate, t, head * DIM + d));
            v *= op == MUL_SIGMOID ? sigmoid(g) : g > 20.0f ? g : log1pf(expf(g));
        }
        ((float*)fours)[threadIdx.x] = v;
        if (DIM % 32 && d < DIM) out.dense[((s64)t * H + head) * DIM + d] = v;
    }
    __syncthreads();
    if (DIM % 32 || warp) return;
    store_four(out, t, head * DIM + column + lane * 4, fours[lane], column + lane * 4 < DIM);
    if (out.packed && head == 0 && column == 0)  // columns that pad a row to a whole unit
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
