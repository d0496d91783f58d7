// peers: stores of numbers to the buffers of other GPUs, and the detection of their arrival
// A buffer is [2][capacity / 128][RANKS][4][32] float32. Exchange `number` uses half number % 2. Number 4 * i + n of the part of a rank is at
// [i / 32][rank][n][i % 32], so that a store of a warp is of 128 contiguous bytes. The bits UNSENT, a NaN that no part contains,
// mark numbers that have not arrived, so that no flag, fence or second message is necessary. The thread that has read numbers of
// a part, the only one that does, marks them as unsent again.
// Two halves are enough. A peer stores to half n % 2 again in its exchange n + 2, which follows its exchange n + 1, which waited for this
// rank's part of n + 1, which this rank stored after its exchange n had ended. This requires that kernels of a GPU follow one another,
// also under programmatic launches (every kernel of ours waits for the end of the previous one by `depend`), and that all
// exchanges of a GPU are in one stream.

#define UNSENT 0xffffffffu
#define MAX_RANKS 8

struct Peers {
    float* of[MAX_RANKS];  // buffers of all ranks; every rank writes to all of them
};
// state      [0] exchanges of earlier steps, [1] number of an exchange that failed, else 0
// failed     a word of the host, which gets state[1]
// patience   nanoseconds to wait for a part
// index      exchanges of this step that come before
struct Meeting {
    float* received;  // this rank's buffer
    u32 *state, *failed;
    s64 patience;
    int rank, capacity, index;  // capacity: numbers, a multiple of 128
};

__device__ __forceinline__ float4 missing() {
    const float nan = __uint_as_float(0x7fffffffu);
    return make_float4(nan, nan, nan, nan);
}
__device__ __forceinline__ float as_sent(float v) { return __float_as_uint(v) == UNSENT ? __uint_as_float(0x7fffffffu) : v; }
__device__ __forceinline__ float4 as_sent(float4 v) { return make_float4(as_sent(v.x), as_sent(v.y), as_sent(v.z), as_sent(v.w)); }
__device__ __forceinline__ void store_number(float* to, float v) {
    asm volatile("st.volatile.global.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}
__device__ __forceinline__ float load_number(const float* from) {
    float v;
    asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ bool is_there(float4 v) {
    return __float_as_uint(v.x) != UNSENT && __float_as_uint(v.y) != UNSENT && __float_as_uint(v.z) != UNSENT
        && __float_as_uint(v.w) != UNSENT;
}
// Whether a thread that has polled so often, since `since`, must give up.
__device__ __forceinline__ bool is_late(u32 polls, u64* since, s64 patience) {
    if (polls % 1024) return false;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (!*since) *since = now;
    return (s64)(now - *since) > patience;
}
__device__ __forceinline__ void give_up(const Meeting& m, u32 number) { m.state[1] = number, *m.failed = number; }

__device__ __forceinline__ u32 number_of(const Meeting& m) { return m.state[0] + m.index + 1; }

// The address of the first number of four i of the part of `rank`, in the buffer of one rank, for exchange `number`; the others follow
// at distances of 32 numbers.
__device__ __forceinline__ float* place_of(float* buffer, const Meeting& m, u32 number, int rank, int i) {
    return buffer + (s64)(number % 2) * RANKS * m.capacity + (i / 32 * RANKS + rank) * 128 + i % 32;
}

__device__ __forceinline__ void send(const Peers& peers, const Meeting& m, u32 number, int i, float4 own) {
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        if (r == m.rank) continue;
        float* to = place_of(peers.of[r], m, number, m.rank, i);
        store_number(to, own.x), store_number(to + 32, own.y), store_number(to + 64, own.z), store_number(to + 96, own.w);
    }
}

// Reads four i of all ranks and marks its numbers as unsent; false if one does not arrive, or if an earlier exchange of this
// thread was `lost`.
__device__ __forceinline__ bool receive(float4 (&part)[RANKS], const Meeting& m, u32 number, int i, float4 own, bool lost) {
    u64 since = 0;
#pragma unroll
    for (int r = 0; r < RANKS; r++) part[r] = own;
    for (u32 polls = 1;; polls++) {
        bool all = true;
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
            if (r == m.rank) continue;
            const float* from = place_of(m.received, m, number, r, i);
            part[r] = make_float4(load_number(from), load_number(from + 32), load_number(from + 64), load_number(from + 96));
            all = all && is_there(part[r]);
        }
        if (all) break;
        if (lost || is_late(polls, &since, m.patience)) return false;
    }
#pragma unroll
    for (int r = 0; r < RANKS; r++)
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (r != m.rank) place_of(m.received, m, number, r, i)[32 * n] = __uint_as_float(UNSENT);
    return true;
}

__device__ __forceinline__ float4 sum_of(const float4 (&part)[RANKS]) {
    float4 sum = part[0];
#pragma unroll
    for (int r = 1; r < RANKS; r++) sum = plus(sum, part[r]);
    return sum;
}
