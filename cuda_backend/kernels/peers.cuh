// peers: stores of numbers to the buffers of other GPUs, and the detection of their arrival
// A buffer is [3][RANKS][capacity] float32. Exchange `number` uses third number % 3; the part of a rank is at [rank]. The bits UNSENT,
// a NaN that no part contains, mark numbers that have not arrived, so that no flag, fence or second message is necessary. The
// reader of a part clears it in the next exchange.
// Three thirds are enough. Rank A clears third n % 3 in its exchange n + 1, after its exchange n has read all of it. A peer stores there
// again in its exchange n + 3. That follows its exchange n + 2, which waited for A's part of n + 2, which A stored after its n + 1.
// This requires that kernels of a GPU follow one another, also under programmatic launches (every kernel of ours waits for the end
// of the previous one by `depend`), and that all exchanges of a GPU are in one stream.

#define UNSENT 0xffffffffu
#define MAX_RANKS 8

struct Peers {
    float* of[MAX_RANKS];  // buffers of all ranks; every rank writes to all of them
};
// state      [0] exchanges of earlier steps, [1] number of an exchange that failed, else 0, [2] fours of the last one of those steps
// failed     a word of the host, which gets state[1]
// patience   nanoseconds to wait for a part
// index      exchanges of this step that come before, the last of them of `before` fours
struct Meeting {
    float* received;  // this rank's buffer
    u32 *state, *failed;
    s64 patience;
    int rank, capacity, index, before;
};

__device__ __forceinline__ float4 missing() {
    const float nan = __uint_as_float(0x7fffffffu);
    return make_float4(nan, nan, nan, nan);
}
__device__ __forceinline__ float as_sent(float v) { return __float_as_uint(v) == UNSENT ? __uint_as_float(0x7fffffffu) : v; }
__device__ __forceinline__ float4 as_sent(float4 v) { return make_float4(as_sent(v.x), as_sent(v.y), as_sent(v.z), as_sent(v.w)); }
__device__ __forceinline__ void store_part(float4* to, float4 v) {
    asm volatile("st.volatile.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Stores a part; each of its numbers may arrive separately.
__device__ __forceinline__ float4 load_part(const float4* from) {
    float4 v;
    asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
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

// The address of float4 number i of the part of `rank`, in the buffer of one rank, for exchange `number`.
__device__ __forceinline__ float4* place_of(float* buffer, const Meeting& m, u32 number, int rank, int i) {
    return (float4*)(buffer + ((s64)(number % 3) * RANKS + rank) * m.capacity) + i;
}

__device__ __forceinline__ void send(const Peers& peers, const Meeting& m, u32 number, int i, float4 own) {
#pragma unroll
    for (int r = 0; r < RANKS; r++)
        if (r != m.rank) store_part(place_of(peers.of[r], m, number, m.rank, i), own);
}

// Clears the parts received by the previous exchange: one thread's share of `threads`.
__device__ __forceinline__ void clear(const Meeting& m, u32 number, int thread, int threads) {
    const float unsent = __uint_as_float(UNSENT);
    const int before = m.index ? m.before : (int)m.state[2];
#pragma unroll 1
    for (int i = thread; i < before; i += threads)
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            if (r != m.rank) *place_of(m.received, m, number + 2, r, i) = make_float4(unsent, unsent, unsent, unsent);
}

// Reads four number i of all ranks; false if one does not arrive, or if an earlier exchange of this thread was `lost`.
__device__ __forceinline__ bool receive(float4 (&part)[RANKS], const Meeting& m, u32 number, int i, float4 own, bool lost) {
    u64 since = 0;
    for (u32 polls = 1;; polls++) {
        bool all = true;
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
            part[r] = own;
            if (r == m.rank) continue;
            part[r] = load_part(place_of(m.received, m, number, r, i));
            all = all && is_there(part[r]);
        }
        if (all) return true;
        if (lost || is_late(polls, &since, m.patience)) return false;
    }
}

__device__ __forceinline__ float4 sum_of(const float4 (&part)[RANKS]) {
    float4 sum = part[0];
#pragma unroll
    for (int r = 1; r < RANKS; r++) sum = plus(sum, part[r]);
    return sum;
}
