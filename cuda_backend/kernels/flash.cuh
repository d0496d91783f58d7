// flash: code shared by attention.cu, split.cu and pieces.cu: tiles of the cache as tensor cores read them, the pieces
// into which a past is divided, and which rows see which. Positions are absolute; a cache of a window keeps `fixed` rows, then a ring.

#ifndef WINDOWED
#define WINDOWED 1  // 0: no window; the code that finds pieces, loaded from memory in every launch, is then half as long
#endif
#define TILE_POSITIONS 64  // fixed and ring are multiples of it

#if __CUDA_ARCH__ < 800  // copies are complete when they return
__device__ __forceinline__ void copy16(u32 to, const u16* from) { store_16(to, __ldcg((const uint4*)from)); }
__device__ __forceinline__ void commit() {}
template <int N>
__device__ __forceinline__ void wait_all_but() {
    __syncthreads();
}
#else
__device__ __forceinline__ void copy16(u32 to, const u16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_all_but() {  // waits for groups of this thread's copies, and for the block
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    __syncthreads();
}
#endif
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ < 800
    mma_k8(c, a[0], a[1], b0), mma_k8(c, a[2], a[3], b1);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Positions are added up in groups: of 128 up to 4096, of 256 up to 32768, of 1024 up to 131072, of 2048 up to 262144, then of 4096.
// Each of these ranges counts its groups as if positions from 0 on were in groups of its length, and adds the difference.
__device__ __forceinline__ int group_begin(int i) {
    int bits = 7, more = 0;
    if (i >= 32) bits = 8, more = 16;
    if (i >= 144) bits = 10, more = 112;
    if (i >= 240) bits = 11, more = 176;
    if (i >= 304) bits = 12, more = 240;
    return i - more << bits;
}
__device__ __forceinline__ int group_of(int position) {
    int bits = 7, more = 0;
    if (position >= 4096) bits = 8, more = 16;
    if (position >= 32768) bits = 10, more = 112;
    if (position >= 131072) bits = 11, more = 176;
    if (position >= 262144) bits = 12, more = 240;
    return (position >> bits) + more;
}

// Places for the pieces of a window: a power of 2. A window touches at most two pieces more than fit into it.
__device__ __forceinline__ int piece_turns(int pieces) { return 1 << 32 - __clz(pieces + 1); }

#define LOG2_E 1.4426950408889634f  // scores are powers of 2; also in cuda_backend/attention.py

#define MOST_SINGLE 256  // most tiles that are pieces by themselves; also in cuda_backend/layout.py

// The pieces of visible positions that split.cu computes separately, in the order of positions, and the places of their sums
// (cuda_backend/layout.py piece_places). Tiles of committed positions alone are cut into groups, or into tiles where there
// are `shares` enough; the tiles after them, which hold rows of the step, are one piece each. Of a window the pieces from
// `low` on and up to `sinks` are seen; their sums use the same places cyclically, and groups have 128, 256 or 4096
// positions at any position of the window.
struct Pieces {
    bool single;
    int bits, tail, tails, count, trunk;  // bits: of a tile; tail: where the tails begin; count: without them
    static constexpr bool even = WINDOWED;  // all groups are of `group_bits`
#if WINDOWED
    int group_bits, kept, first, turns;
#else
    static constexpr int group_bits = 0, kept = 0, first = 0, turns = 0;
#endif
    __device__ void cut(int tile_bits, int past, int rows, int window, int sinks, int low, int shares, int trunk_places) {
        bits = tile_bits, tail = past >> bits << bits, tails = (past + rows - tail + (1 << bits) - 1) >> bits;
        trunk = trunk_places;
#if WINDOWED
        group_bits = window + sinks <= 4096 ? 7 : window + sinks <= 65536 ? 8 : 12;
#endif
        single = ((even ? window + sinks : past) >> bits) + 4 <= shares;
        const int n = tail ? of(tail - 1) + 1 : 0;
#if WINDOWED
        kept = sinks ? min(n, of(sinks - 1) + 1) : 0;
        first = max(kept, low > 0 ? min(n, of(low)) : 0);
        turns = piece_turns(window >> (single ? bits : group_bits));
#endif
        count = kept + n - first;
    }
    __device__ int of(int position) const { return single ? position >> bits : even ? position >> group_bits : group_of(position); }
    __device__ int begin(int piece) const { return single ? piece << bits : even ? piece << group_bits : group_begin(piece); }
    __device__ int stop(int piece) const { return min(begin(piece + 1), tail); }
    __device__ int operator[](int i) const { return i < kept ? i : first + i - kept; }
    __device__ int place(int i) const {  // place of piece number i; tails follow
        if (i >= count) return trunk + i - count;
        return i < kept || !turns ? (*this)[i] : kept + ((*this)[i] & turns - 1);
    }
    // The number of pieces and tails that begin before `group`.
    __device__ int before(int group) const {
        const int position = even ? group << group_bits : group_begin(group), n = single ? position >> bits : group;
        if (position > tail) return count + min(tails, (position - tail) >> bits);
        return min(count, n < kept ? n : max(kept, n - first + kept));
    }
    // The positions of piece number i, or of a tail.
    __device__ int from(int i) const { return i < count ? begin((*this)[i]) : tail + (i - count << bits); }
    __device__ int to(int i) const { return i < count ? stop((*this)[i]) : from(i) + (1 << bits); }
    __device__ int group(int i) const {  // group of piece number i
        if (i < count && !single) return (*this)[i];
        const int position = i < count ? (*this)[i] << bits : tail + (i - count << bits);
        return even ? position >> group_bits : group_of(position);
    }
};

// The committed tiles that tall.cu or wide.cu computes, all of whose rows are codes, or all float16: pieces `first` to
// `first` + `whole` - 1 and, of piece `resumed` (-1: none), the tiles before position `until`, after which split.cu continues.
struct CommittedTiles {
    int first, whole, resumed, until;
    // sinks, recent: `first` and `recent` of exact.cuh, or 0
    __device__ void find(const Pieces& pieces, int past, int sinks, int recent) {
        first = sinks ? pieces.of(sinks - 1) + 1 : 0;
        until = min(max(past - recent + 1, 0) >> pieces.bits << pieces.bits, pieces.tail);
        const int last = max(until ? pieces.of(until - 1) + 1 : 0, first);
        resumed = last > first && pieces.to(last - 1) > until ? last - 1 : -1;
        whole = last - first - (resumed >= 0);
    }
    __device__ int count() const { return whole + (resumed >= 0); }
};

// The exact factor 2^x of an integer x of at most 0, so that sums do not depend on when they were scaled; 0 if x is -inf
// or not a number.
__device__ __forceinline__ float power(float x) { return x >= -126.0f ? __int_as_float((int)x + 127 << 23) : 0.0f; }

// The work of a CTA in a launch of gridDim.x blocks times `each` shares: a run's rows, times `group`, are divided into blocks of
// `size`, and the pieces that a block sees into `shares`, more after a longer past, so that all are about equal. run -1: none.
// By whole warps. Of a step of one run rows first_t and on, at most T.
struct Part {
    int run, block, blocks, share, shares;
};
// As part_of, of a step of one run: a step may have fewer rows than its graph has blocks for.
__device__ __forceinline__ Part part_alone(int rows, int group, int size, int share, int each) {
    const int blocks = (rows * group + size - 1) / size;
    if (blocks == (int)gridDim.x) return {0, (int)blockIdx.x, blocks, share, each};
    const int n = share * gridDim.x + blockIdx.x, shares = each * gridDim.x / blocks;
    return {n < shares * blocks ? 0 : -1, n % blocks, blocks, n / blocks, shares};
}
__device__ __forceinline__ Part part_of(const StepState* step, int group, int size, int window, int share, int each, int first_t = 0,
                                        int T = 1 << 30) {
    const int runs = step->runs, n = share * gridDim.x + blockIdx.x, all = each * gridDim.x, lane = threadIdx.x % 32;
    if (runs == 1) return part_alone(min(step->run[0].rows - first_t, T), group, size, share, each);
    int blocks[2], tiles[2], shares[2], sum = 0, work = 0, mine = 0;  // for two runs
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const bool real = 2 * lane + j < runs;
        const Run& run = step->run[real ? 2 * lane + j : 0];
        blocks[j] = real ? (run.rows * group + size - 1) / size : 0;
        tiles[j] = (window ? min(run.past, window) : run.past) / TILE_POSITIONS + 4;  // and the time of a block without pieces
        sum += blocks[j], work += blocks[j] * tiles[j];
    }
#pragma unroll
    for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(FULL, sum, m), work += __shfl_xor_sync(FULL, work, m);
    const float spare = 0.9999f * (float)(all - sum) / (float)work;  // rounding does not create a share too many
#pragma unroll
    for (int j = 0; j < 2; j++) shares[j] = 1 + (int)(spare * (float)tiles[j]), mine += blocks[j] * shares[j];
    int end = mine;
#pragma unroll 1
    for (int m = 1; m < 32; m <<= 1) {
        const int other = __shfl_sync(FULL, end, max(lane - m, 0));
        if (lane >= m) end += other;
    }
    const u32 found = __ballot_sync(FULL, n >= end - mine && n < end);
    if (!found) return {-1, 0, 1, 0, 1};
    const int first = blocks[0] * shares[0], own = n - (end - mine), second = own >= first, owner = __ffs(found) - 1;
    const int number = __shfl_sync(FULL, second ? own - first : own, owner);
    const int count = __shfl_sync(FULL, second ? blocks[1] : blocks[0], owner);
    return {2 * owner + __shfl_sync(FULL, second, owner), number % count, count, number / count,
            __shfl_sync(FULL, second ? shares[1] : shares[0], owner)};
}

// Rows first_t.. of a run, at most n, treating earlier rows as committed.
struct Mask {
    const u32 (*sight)[ROW_WORDS];
    const int* positions;
    int window, sinks, causal, past, rows, kind;
    // first  run.first, or 0 if that is known: positions are then read without waiting for it
    __device__ Mask(const StepState* s, const Run& run, int first, const int* p, int w, int k, int c, int first_t = 0, int n = 1 << 30)
        : sight(s->seen + first), positions(p + first + first_t), window(w), sinks(k), causal(c), past(run.past + first_t),
          rows(min(run.rows - first_t, n)), kind(run.kind) {}
    // The first position that row t may see, sinks aside.
    __device__ int low(int t) const { return window ? positions[t] - window + 1 : 0; }
    // The first position that any row may see; by a whole warp.
    __device__ int lowest() const {
        if (!window) return 0;
        int l = low(min((int)threadIdx.x % 32, rows - 1));
        if (rows > 32) l = min(l, low(min((int)threadIdx.x % 32 + 32, rows - 1)));
        for (int m = 16; m; m >>= 1) l = min(l, __shfl_xor_sync(FULL, l, m));
        return l;
    }
    // The number of rows of the run that row t of a tree sees.
    __device__ int seen(int t) const {
        int n = 0;
        for (int w = 0; w < ROW_WORDS; w++) n += __popc(sight[t][w]);
        return n;
    }
    // The last position that row t sees, of a chain, whose row j is at past + j, or of a block.
    __device__ int high(int t) const { return past + (kind == 2 && !causal ? rows - 1 : t); }
    __device__ bool visible(int t, int at) const { return at <= high(t) && (at >= low(t) || at < sinks); }
};
