// exchange: rows that several GPUs hold parts of, added up: every GPU ends with the same sums, in the order of the ranks
// Meaning   Ops.all_reduce: ((rank 0 + rank 1) + rank 2) + ..., each in float32: bits equal on all ranks, and for a row they
//           depend on nothing but what the ranks bring of it       Launcher  cuda_backend/exchange.py
// In        x [T][K] float32 of this rank, partial sums allowed; `peers`: where the buffer of each rank lies, which every rank
//           may write, and `received`, this rank's; state[0]: exchanges of earlier steps, state[1]: number of an exchange that failed, else 0
// Out       out [T][K] float32. Where a part does not come: NaN, and the number of the exchange in state[1] and *failed
// Build     RANKS
// Work      a thread per two neighbours: it stores {a, number, b, number}, 16 bytes, into every peer's buffer, then polls what
//           the peers stored into its own. `number` counts exchanges on every rank alike, so that it is the flag: no fence, no
//           second message. A buffer is [2][RANKS][capacity] of such; exchange `number` uses half number & 1.
//           Two halves suffice. A rank overwrites what it stored in exchange n - 2 once its own exchange n - 1 is over; then it has
//           every peer's part of n - 1, which the peer stores after its own kernel of n - 2, and that one had read all
//           that it awaited. This rests on kernels that follow one another: under programmatic launches too, since all of
//           ours wait (`depend`) for the whole of the one before, and on all exchanges of a GPU being in one stream.
// Assumes   all CTAs of a grid are resident at once (AT_ONCE pairs of a thread per turn, as many turns as needed); K is even
// Numbers   sums of partial sums in index order, then ranks in order; a number comes again after 2^32 exchanges: the launcher
//           begins again before
// Bound     latency of one store to a peer; beyond about 16 rows bytes of NVLink, 8 per number and peer. A wait ends after
//           `patience` nanoseconds, and then every later exchange of the step ends at once
// Tried     2 x H200, (rows, 5,120), us at 1, 4, 16, 64 rows: 2.28, 2.62, 4.01, 10.1 as here, in a prototype of this kernel; a flag
//           per block with release and acquire 3.31, 3.64, 4.40, 7.60; NCCL 2.28.9 6.94, 6.71, 8.21, 14.9. Parts pulled by the
//           receiver never end over PCIe.

#define AT_ONCE 4
#define MAX_RANKS 8

struct Peers {
    uint4* of[MAX_RANKS];
};

// 8 aligned bytes of a volatile access arrive as one: a number and the flag beside it
__device__ __forceinline__ void store_flagged(uint4* to, float a, float b, u32 number) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(__float_as_uint(a)), "r"(number),
                 "r"(__float_as_uint(b)), "r"(number)
                 : "memory");
}
__device__ __forceinline__ uint4 load_flagged(const uint4* from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
// Whether a thread that has polled so often, for the first time `since`, is to give up.
__device__ __forceinline__ bool is_late(u32 polls, u64* since, s64 patience) {
    if (polls % 1024) return false;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (!*since) *since = now;
    return (s64)(now - *since) > patience;
}
__device__ __forceinline__ void give_up(u32* state, u32* failed, u32 number) { state[1] = number, *failed = number; }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
exchange(In x, int K, int pairs, Peers peers, const uint4* received, int rank, int capacity, u32* state, int index, u32* failed,
         s64 patience, float2* out) {
    begin();
    const u32 number = state[0] + index + 1;
    const s64 half = (s64)(number & 1) * RANKS * capacity;
    const int stride = gridDim.x * THREADS;
    received += half;
    bool lost = state[1] != 0;
    for (int first = blockIdx.x * THREADS + threadIdx.x; first < pairs; first += AT_ONCE * stride) {
        float own[AT_ONCE][2];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = first + n * stride;
            if (i >= pairs) break;
            const int t = 2 * i / K;
            load_some(own[n], x, row_of(x, t) + (2 * i - t * K), 0, 1, 2);
#pragma unroll
            for (int r = 0; r < RANKS; r++)
                if (r != rank) store_flagged(peers.of[r] + half + (s64)rank * capacity + i, own[n][0], own[n][1], number);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = first + n * stride;
            if (i >= pairs) break;
            float2 part[RANKS];
            u64 since = 0;
            for (u32 polls = 1;; polls++) {
                bool all = true;
#pragma unroll
                for (int r = 0; r < RANKS; r++) {
                    part[r] = make_float2(own[n][0], own[n][1]);
                    if (r == rank) continue;
                    const uint4 v = load_flagged(received + (s64)r * capacity + i);
                    part[r] = make_float2(__uint_as_float(v.x), __uint_as_float(v.z));
                    all = all && v.y == number && v.w == number;
                }
                if (all) break;
                lost = lost || is_late(polls, &since, patience);
                if (lost) break;
            }
            float2 sum = part[0];
#pragma unroll
            for (int r = 1; r < RANKS; r++) sum = make_float2(sum.x + part[r].x, sum.y + part[r].y);
            if (lost) sum = make_float2(__int_as_float(0x7fffffff), __int_as_float(0x7fffffff));
            out[i] = sum;
        }
    }
    if (lost && !state[1]) give_up(state, failed, number);
}

// Count the exchanges of a step that is over.
extern "C" __global__ void count_exchanges(u32* state, int exchanges) {
    begin();
    if (threadIdx.x == 0) state[0] += exchanges;
}
