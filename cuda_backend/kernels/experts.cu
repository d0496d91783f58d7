// experts: y = x W' in which each row has its own matrix of a stack: an expert's, or that of a head of latent attention
// Meaning   common/reference.py NumpyOps.moe, head_linear   Launcher  cuda_backend/expert_products.py
// In        of      the matrices, units of tile.cuh: matrices.cuh
//           x       packed rows, not interleaved (store.cuh, cols = 1), perhaps of a deferred norm: linear.cu
//           groups  their number, then (matrix, first, rows, 0) of at most COLS rows each
//           order   numbers of (row, matrix) pairs, sorted by matrix; pair p has row p / x_divisor of x (moe.cu group)
// Out       out [part][pair][N] float32, to be added in the order of the parts
// Build     one type of tile.cuh; COLS 8 (decode) or 32 (prefill); STAGES; BLOCKS per multiprocessor; CP_ASYNC to
//           force the sm_80 ring
// Work      256 threads multiply, one 16-row tile per warp; warp 8 loads units to a ring and gathers the rows of x.
//           each CTA computes items (group, row block, part of k), gridDim.x apart
// Assumes   rows padded to 128 and columns to KBLOCK in w and x
// Numbers   as linear.cu; the result of a row depends on its matrix alone, not on COLS, its group or its place there
// Bound     bytes of the chosen matrices; each is read once if one group holds all of its rows
// Tried     tokens per second at one row: variant against the kernel of that time (one H200); docs/experiments/mixtures.md has more.
//           k divided for three CTAs per multiprocessor -> GLM 386 against 424, Laguna 492 against 545: only two are resident
//           k divided for one CTA -> GLM 364 against 424, Laguna 532 against 545: loads of one CTA do not hide each other's latency
//           no overlap with the previous kernel, to leave room for the shared expert -> GLM 316 against 325, Laguna 444 against 441
//           the shared expert after the experts, on one stream -> Laguna 381 against 406: three more kernels in sequence

#define XROW (HALVES * 160 + (HALVES == 1 ? 32 : 0))  // bytes of a gathered row: two rows have no bank conflict
#define XBYTES (HALVES * 160)  // of which it fills
#define STAGE (UNIT_BYTES + COLS * XROW)

// A unit of gathered rows, each packed separately: store.cuh.
struct GatheredRows {
    const u8* from;
    int row, t;  // of the lane
    __device__ __forceinline__ uint4 codes(int half, int pair, int n) const {
        return *(const uint4*)(from + (n * 8 + row) * XROW + half * (WHOLE ? 128 : 160) + pair * 64 + t * 16);
    }
#if WHOLE
    __device__ __forceinline__ float4 scales(int n) const {
        const u8* first = from + (n * 8 + 2 * t) * XROW + 256;
        const float2 one = *(const float2*)first, next = *(const float2*)(first + XROW);
        return make_float4(one.x, one.y, next.x, next.y);
    }
    __device__ __forceinline__ uint2 sums(int n) const { return *(const uint2*)(from + (n * 8 + row) * XROW + 264 + t * 8); }
#else
    __device__ __forceinline__ float2 scales(int half, int group, int n) const {
        const u8* first = from + (n * 8 + 2 * t) * XROW + half * 160 + 128 + group * 4;
        return make_float2(*(const float*)first, *(const float*)(first + XROW));
    }
#endif
};

// An item: `units` units along k, from first_k on, in row block `row_block` of matrix `group.x`.
struct Item {
    int4 group;
    int part, row_block, first_k, units;
    __device__ Item(int i, const int4* groups, int row_blocks, int k_blocks, int parts, u32 row_blocks_inverse, u32 parts_inverse) {
        const int block = quotient(i, parts, parts_inverse), of_group = quotient(block, row_blocks, row_blocks_inverse);
        group = __ldcg(groups + 1 + of_group);
        part = i - block * parts, row_block = block - of_group * row_blocks;
        first_k = quotient(k_blocks * part, parts, parts_inverse);
        units = (int)quotient(k_blocks * (part + 1), parts, parts_inverse) - first_k;
    }
};

extern "C" __global__ void __launch_bounds__(288, BLOCKS)
experts(Matrices of, const u8* x, float* out, int N, int row_blocks, int k_blocks, int parts, u32 row_blocks_inverse,
        u32 parts_inverse, s64 part_stride, s64 row_stride, const int4* groups, const int* order, int x_divisor, int known,
        s64 x_bytes, const float* squares, int norm_parts, float columns, float eps) {
    extern __shared__ __align__(128) u8 shared[];
    u8* ring = shared;
    const u32 full = shared_address(shared + STAGES * STAGE), empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, BULK ? 1 : 32);
            barrier_init(empty + 8 * s, 256);
        }
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    if (warp == 8 && !MOVED) prefetch_table(of);
    if (!known) depend();  // the previous kernel also decides which weights are read
    release_next();        // not earlier: the next kernel reads the groups without waiting
    __syncthreads();
    int at = blockIdx.x, i = 0;  // units so far
    const auto item_of = [&](int n) { return Item(n, groups, row_blocks, k_blocks, parts, row_blocks_inverse, parts_inverse); };
    Item item = item_of(at);  // read together with the number of groups, even if there is no such group
    const int items = __ldcg(&groups[0].x) * row_blocks * parts;

    if (warp == 8) {  // producer
        bool late = known;  // whether the rows are not loaded yet
        for (; at < items; at += gridDim.x) {
            if (i) item = item_of(at);
            const u8* unit = matrix_at(of, item.group.x) + ((s64)item.row_block * k_blocks + item.first_k) * UNIT_BYTES;
            const int pair = lane < item.group.z ? __ldcg(order + item.group.y + lane) : 0;
            const u8* rows = x + (s64)item.first_k * XBYTES;
            const auto gather = [&](int k, int s) {
                const u32 to = shared_address(ring + s * STAGE) + UNIT_BYTES;
#if BULK
                if (lane < item.group.z)
                    copy(to + lane * XROW, rows + k * XBYTES + (pair / x_divisor) * x_bytes, XBYTES, full + 8 * s, 0);
#else
                for (int r = 0; r < item.group.z; r++) {
                    const int one = __shfl_sync(FULL, pair, r);
                    copy(to + r * XROW, rows + k * XBYTES + (one / x_divisor) * x_bytes, XBYTES, full + 8 * s, lane);
                }
#endif
            };
            for (int k = 0; k < item.units; k++, i++, unit += UNIT_BYTES) {
                const int s = i % STAGES;
                if (i >= STAGES) barrier_wait(empty + 8 * s, (i / STAGES - 1) % 2);
                if (lane == 0) barrier_expect(full + 8 * s, UNIT_BYTES + item.group.z * XBYTES);
                copy(shared_address(ring + s * STAGE), unit, UNIT_BYTES, full + 8 * s, lane);  // while `pair` is being read
                __syncwarp();
#if BULK
                if (late) {  // known weights are loaded while the previous kernel ends
                    if (k + 1 < min(PREFETCH, item.units)) continue;
                    depend();
                    for (int n = 0; n < k; n++) gather(n, n);
                    late = false;
                }
                gather(k, s);
#else
                if (late) depend(), late = false;
                gather(k, s);
                copies_arrive(full + 8 * s);
#endif
            }
        }
        copies_end();
        return;
    }

    depend();
    for (; at < items; at += gridDim.x) {
        if (i) item = item_of(at);
        const int pair = lane < item.group.z ? __ldcg(order + item.group.y + lane) : -1;  // of column `lane`
        float factor[2] = {1.0f, 1.0f};
#if NT == 1  // factor of a deferred norm, 1 / the root of the mean of `squares`: a column for four lanes
        if (norm_parts) {
            float sum = 0.0f;
            const int own = __shfl_sync(FULL, pair, lane / 4);
            for (int j = lane % 4; own >= 0 && j < norm_parts; j += 4) sum += squares[(s64)(own / x_divisor) * norm_parts + j];
            sum += __shfl_xor_sync(FULL, sum, 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            sum = norm_factor(sum, columns, eps);
            factor[0] = __shfl_sync(FULL, sum, lane % 4 * 8), factor[1] = __shfl_sync(FULL, sum, lane % 4 * 8 + 4);
        }
#endif
        float acc[NT][4] = {};
        const u32 none = zero_of(empty);
        for (int k = 0; k < item.units; k++, i++) {
            const int s = i % STAGES;
            barrier_wait(full + 8 * s, (i / STAGES) % 2);
            const GatheredRows rows{ring + s * STAGE + UNIT_BYTES, lane / 4, lane % 4};
            multiply<NT == 1 ? HALVES : 1, NT == 1 ? 1 : 2>(acc, ring + s * STAGE + warp * TILE_BYTES, rows, lane, (item.group.z + 7) / 8);
            give_back<NT == 1 ? 1 : 2>(empty + 8 * s, none, acc);
        }
        const int row = item.row_block * 128 + warp * 16 + lane / 4;
        float* to = out + item.part * part_stride + row;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int p = __shfl_sync(FULL, pair, n * 8 + lane % 4 * 2 + e);
                if (p < 0) continue;
                float* result = to + p * row_stride;
                if (row < N) result[0] = acc[n][e] * factor[e];
                if (row + 8 < N) result[8] = acc[n][2 + e] * factor[e];
            }
    }
}
