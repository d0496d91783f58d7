// exchange: all-reduce or all-gather of rows among the GPUs of one process; every GPU gets the result
// Meaning   exchange: Ops.all_reduce: ((rank 0 + rank 1) + rank 2) + ..., each in float32; gather: Ops.all_gather. Results are
//           bitwise identical on all ranks, and a row depends only on the ranks' parts of it  Launcher  cuda_backend/exchange.py
// In        x [T][K] float32 of this rank, perhaps partial sums, readable as float4; `peers` and `m`: peers.cuh
// Out       out float32, [T][K] from exchange, [T][RANKS][K] from gather. If a part does not arrive: NaN, and the number of the
//           exchange in state[1] and *failed
// Build     RANKS
// Work      a thread per float4: it stores its numbers to the buffer of every peer, then polls its own buffer for the peers' parts
// Assumes   all CTAs of a grid are resident at once (each thread takes AT_ONCE float4 per pass)
// Numbers   partial sums are added in index order, then ranks in order. Exchange numbers repeat after 2^32 exchanges: the launcher
//           resets them before
// Bound     latency of one store to a peer; above about 16 rows the bandwidth of NVLink, 4 bytes per number and peer. A wait times
//           out after `patience` nanoseconds; then every later exchange of the step ends at once
// Tried     2 x H200, (rows, 5,120), us at 1, 4, 16, 64 rows: a flag with every number, 8 bytes per number: 2.28, 2.62, 4.01, 10.1;
//           a flag per block with release and acquire 3.31, 3.64, 4.40, 7.60; NCCL 2.28.9 6.94, 6.71, 8.21, 14.9. Reading
//           parts from the peers never ended over PCIe. Two H200, Qwen3.6-27B, ms of a step of 1, 16, 64 rows: stores of 16 bytes per
//           thread 2.97, 4.06, 8.28; of 4 bytes, 128 contiguous ones per warp, 2.97, 4.00, 8.25; these with numbers of 24 bits in place
//           of 32: 2.94, 3.97, 8.12, but rounded sums

#define AT_ONCE 2

template <bool GATHERS>
__device__ __forceinline__ void meet(const In& x, int K, int fours, const Peers& peers, const Meeting& m, float4* out) {
    begin();
    const u32 number = number_of(m);
    const int stride = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x, wide = K / 4;
    bool lost = m.state[1] != 0, fails = false;
#pragma unroll 1
    for (int first = thread; first < fours || first == thread; first += AT_ONCE * stride) {
        float4 own[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = first + n * stride, t = i / wide;
            if (i >= fours) break;
            own[n] = as_sent(sum_of_partials(row_of(x, t) + 4 * (i - t * wide), x));
            send(peers, m, number, i, own[n]);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = first + n * stride, t = i / wide;
            if (i >= fours) break;
            float4 part[RANKS];
            if (!receive(part, m, number, i, own[n], lost)) {
                lost = fails = true;
#pragma unroll
                for (int r = 0; r < RANKS; r++) part[r] = missing();
            }
            if (GATHERS)
#pragma unroll
                for (int r = 0; r < RANKS; r++) out[(s64)(t * RANKS + r) * wide + i - t * wide] = part[r];
            else
                out[i] = sum_of(part);
        }
    }
    if (fails && !m.state[1]) give_up(m, number);
}

extern "C" __global__ void __launch_bounds__(128, 4) exchange(In x, int K, int fours, Peers peers, Meeting m, float4* out) {
    meet<false>(x, K, fours, peers, m, out);
}
extern "C" __global__ void __launch_bounds__(128, 4) gather(In x, int K, int fours, Peers peers, Meeting m, float4* out) {
    meet<true>(x, K, fours, peers, m, out);
}

// Counts the exchanges of a finished step.
extern "C" __global__ void count_exchanges(u32* state, int exchanges) {
    begin();
    if (threadIdx.x == 0) state[0] += exchanges;
}
