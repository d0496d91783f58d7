// flash: what attention.cu and latent.cu share: tiles of the cache on their way to the tensor cores, the pieces into
// which a past is cut, and who sees whom. Positions are absolute; a cache of a window keeps `fixed` rows, then a ring.

#define TILE_POSITIONS 64  // fixed and ring are multiples of it

__device__ __forceinline__ void copy16(u16* to, const u16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_all_but(int one) {
    if (one)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
}
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
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where the cache holds a position.
struct Places {
    int fixed, ring;
};
__device__ __forceinline__ int place_of(const Places& p, int position) {
    return position < p.fixed ? position : p.fixed + (position - p.fixed) % p.ring;
}

// Pieces of 64 positions up to 4096, of 256 up to 32768, of 1024 up to 131072, then of 4096.
__device__ __forceinline__ int split_begin(int i) {
    if (i < 64) return i * 64;
    if (i < 176) return 4096 + (i - 64) * 256;
    if (i < 272) return 32768 + (i - 176) * 1024;
    return 131072 + (i - 272) * 4096;
}
__device__ __forceinline__ int piece_of(int position) {
    if (position < 4096) return position / 64;
    if (position < 32768) return 64 + (position - 4096) / 256;
    if (position < 131072) return 176 + (position - 32768) / 1024;
    return 272 + (position - 131072) / 4096;
}

// The pieces that a row sees of `end` positions: of a window those from `low` on and up to `keep`. A window of at most
// 16384 is cut into pieces of 64 wherever it is, whose sums lie in turn in the same places (cuda_backend/layout.py
// piece_places).
struct Pieces {
    int kept, first, count, turns;
    __device__ Pieces(int end, int window, int keep, int low) {
        const bool fine = window && window + keep <= 16384;
        const int n = fine ? (end + 63) / 64 : piece_of(end - 1) + 1;
        kept = window && keep ? min(n, fine ? (keep + 63) / 64 : piece_of(keep - 1) + 1) : 0;
        first = max(kept, window && low > 0 ? (fine ? low / 64 : piece_of(low)) : 0);
        count = kept + max(0, n - first);
        turns = fine ? (window + 64) / 64 + 3 : 0;
    }
    __device__ int operator[](int i) const { return i < kept ? i : first + i - kept; }
    __device__ int begin(int piece) const { return turns ? piece * 64 : split_begin(piece); }
    __device__ int place(int piece) const { return piece < kept || !turns ? piece : kept + piece % turns; }
};

struct Mask {
    const StepState* step;
    const int* positions;
    int window, keep, causal, past, rows, kind;
    __device__ Mask(const StepState* s, const int* p, int w, int k, int c)
        : step(s), positions(p), window(w), keep(k), causal(c), past(s->past), rows(s->rows), kind(s->kind) {}
    // The first position that row t may see, but for those that are kept.
    __device__ int low(int t) const { return window ? positions[kind == 2 ? 0 : t] - window + 1 : 0; }
    __device__ int lowest() const {
        int l = low(0);
        for (int t = 1; window && t < rows; t++) l = min(l, low(t));
        return l;
    }
    __device__ bool visible(int t, int at) const {
        const int row = at - past;
        if (row >= 0 && (row >= rows || (causal && row > t) || !(kind == 1 ? row <= t : step->seen[t] >> row & 1))) return false;
        if (!window) return true;
        const int position = row < 0 ? at : positions[row];
        return position >= low(t) || position < keep;
    }
};
