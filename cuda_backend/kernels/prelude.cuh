// prelude: types, conversions and tensor-core instructions that every kernel file may use. Written out as PTX so that
// NVRTC needs no toolkit header.

typedef signed char s8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define FULL 0xffffffffu

// Allows the next kernel to start, and waits until the previous ones are done: a graph overlaps the start of a kernel with the
// end of the previous one (programmatic dependent launch, sm_90). Nothing that a step writes is touched before `depend`.
__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void depend() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void begin() {
    release_next();
    depend();
}

#define THREADS 256

// An activation (T, heads, D) in float32, possibly as partial sums: `partials` copies to be added in index order.
struct In {
    const float* p;
    s64 partial_stride, row, head;  // strides in elements
    int partials, width, inner;     // width of a head, 0: a row is contiguous; inner: stride in a head, 0 or 1
};

// v[n] = element first + n * stride of a row or head that begins at p, where that is below end, else 0. All reads of
// four partial sums are in flight together; the code is short, because a kernel that runs once takes the time to load its code.
template <int N>
__device__ __forceinline__ void load_some(float (&v)[N], const In& a, const float* p, int first, int stride, int end) {
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = 0.0f;
#pragma unroll 1
    for (int s = 0; s < a.partials; s += 4) {
        float e[4][N];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int i = first + n * stride;
                e[j][n] = s + j < a.partials && i < end ? p[i + (s + j) * a.partial_stride] : 0.0f;
            }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < N; n++) v[n] += e[j][n];
    }
}

__device__ __forceinline__ float load_one(const In& a, const float* p) {
    float v[1];
    load_some(v, a, p, 0, 1, 1);
    return v[0];
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Four columns, the partial sums of `a` added in order, four reads in flight. None is conditional, because the compiler makes a
// conditional read wait for the previous one: after the last partial sum it is read again, and not used.
__device__ __forceinline__ float4 sum_of_partials(const float* p, const In& a) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int s = 0; s < a.partials; s += 4) {
        float4 e[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            e[j] = *(const float4*)p;
            if (s + j < a.partials - 1) p += a.partial_stride;
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (s + j < a.partials) v = plus(v, e[j]);
    }
    return v;
}

// Address of row t, and of its head `head`, `wide` columns each.
__device__ __forceinline__ const float* row_of(const In& a, int t) { return a.p + t * a.row; }
__device__ __forceinline__ const float* head_of(const In& a, int t, int head, int wide) {
    return a.p + t * a.row + (a.width ? head * a.head : (s64)head * wide);
}

// Element i of row t, for any strides.
__device__ __forceinline__ const float* place(const In& a, int t, int i) {
    return row_of(a, t) + (a.width ? (s64)(i / a.width) * a.head + i % a.width * a.inner : i);
}

// Elements 0 to 3 of a run of `left` that starts at p, without alignment.
__device__ __forceinline__ float4 load_apart(const float* p, s64 partial_stride, int partials, int inner, int left) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int i = 0; i < 4; i++, p += inner) {
        float sum = 0.0f;
#pragma unroll 1
        for (int s = 0; s < partials && i < left; s++) sum += p[s * partial_stride];
        v = make_float4(v.y, v.z, v.w, sum);  // four rotations move each to its place
    }
    return v;
}

// v[n] = four elements from p + n * stride on, with the partial sums of `a` added; zeros from `left` elements after p on.
template <int N>
__device__ __forceinline__ void load_fours(float4 (&v)[N], const float* p, const In& a, int stride, int left) {
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a.inner && ((u64)p | a.partial_stride * 4 | left * 4) % 16 == 0) {
#pragma unroll 1
        for (int s = 0; s < a.partials; s++, p += a.partial_stride) {
            float4 e[N];
#pragma unroll
            for (int n = 0; n < N; n++) {
                e[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (n * stride < left) e[n] = *(const float4*)(p + n * stride);
            }
#pragma unroll
            for (int n = 0; n < N; n++) v[n].x += e[n].x, v[n].y += e[n].y, v[n].z += e[n].z, v[n].w += e[n].w;
        }
        return;
    }
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        const float4 e = load_apart(p + n * stride, a.partial_stride, a.partials, a.inner, left - n * stride);
#pragma unroll
        for (int m = 0; m < N - 1; m++) v[m] = v[m + 1];
        v[N - 1] = e;
    }
}

struct Rope {
    const double* frequencies;  // radians per position
    const int* positions;
    int pairs;
    float magnitude;
};

// The step as the host uploads it; the same offsets as cuda_backend/replay.py.
#define MAX_DECODE_ROWS 136  // common/step.py
#define ROW_WORDS ((MAX_DECODE_ROWS + 31) / 32)
#define MAX_RUNS 64  // sequences of a step
struct __align__(16) Run {  // the rows of one sequence, which lie together; other arrays count them from its first
    int slot, first, rows, past;        // of the pool; the step's row that is its first; how many; positions committed before
    int from, to, path, path_length;    // its recurrent states to read and to write; committed rows to apply, in StepState.path
    int kind, branches, unused[2];      // kind: 0 tree, 1 chain of any length, 2 block
};
struct __align__(16) StepState {
    int rows, runs, path_store, unused;  // number of the store with the rows of the paths; this step's go to another
    int *tokens, *host, spare[8];  // where sample.cu `choose` writes the most probable token of each row
    int path[MAX_DECODE_ROWS];         // rows of the step before
    u32 seen[MAX_DECODE_ROWS][ROW_WORDS];  // bit j: this row of a tree sees row j of its run
    // of branches, in the order of rows, a byte each: the row and three before it, newest first; -1 is the newest committed
    u32 line[MAX_DECODE_ROWS];
    u8 moves[MAX_DECODE_ROWS];  // of branches, in the order of rows, like the next: cuda_backend/tree_order.py
    u8 parents[MAX_DECODE_ROWS];
    u8 run_of[MAX_DECODE_ROWS], unused_bytes[8];
    Run run[MAX_RUNS];
};
// The run of row t of the step, or of row t in the order of rows; for a step of one row nothing is read.
__device__ __forceinline__ const Run& run_at(const StepState* step, int t) { return step->run[t && step->runs > 1 ? step->run_of[t] : 0]; }
// The lowest byte as a row, or as an index in the order of rows; 253 to 255 are -3 to -1.
__device__ __forceinline__ int of_byte(u32 byte) { return (u8)(byte + 3) - 3; }

__device__ __forceinline__ float from_half(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ u16 to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ u32 to_half2(float low, float high) {
#if __CUDA_ARCH__ < 800
    return to_half(low) | (u32)to_half(high) << 16;
#else
    u32 h;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    return h;
#endif
}
__device__ __forceinline__ u32 add_half2(u32 a, u32 b) {
    u32 c;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ float from_bf16(u16 h) { return __uint_as_float((u32)h << 16); }
#if __CUDA_ARCH__ < 800
__device__ __forceinline__ u16 to_bf16(float f) {  // to nearest, ties to even
    const u32 bits = __float_as_uint(f), rounded = bits + 0x7fffu + (bits >> 16 & 1);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u16)(rounded >> 16);
}
__device__ __forceinline__ u32 to_bf16x2(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
#else
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 h;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    return h;
}
__device__ __forceinline__ u16 to_bf16(float f) { return (u16)to_bf16x2(f, 0.0f); }
#endif

// The type of cuBLAS's products in a long step (cuda_backend/gemm.py HALF): bf16, or before 8.0, whose tensor cores lack it,
// float16, in which larger finite numbers become the largest float16.
#if __CUDA_ARCH__ < 800
__device__ __forceinline__ u16 to_product(float f) {
    const u32 bits = __float_as_uint(f), magnitude = bits & 0x7fffffffu;  // 65504 is 0x477fe000
    const bool large = magnitude > 0x477fe000u && magnitude < 0x7f800000u;
    return large ? (u16)(bits >> 16 & 0x8000u | 0x7bffu) : to_half(f);
}
__device__ __forceinline__ u32 to_product2(float low, float high) { return to_product(low) | (u32)to_product(high) << 16; }
#else
__device__ __forceinline__ u16 to_product(float f) { return to_bf16(f); }
__device__ __forceinline__ u32 to_product2(float low, float high) { return to_bf16x2(low, high); }
#endif

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Only for data that the previous kernel does not write.
__device__ __forceinline__ void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

__device__ __forceinline__ float warp_sum(float v) {
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(FULL, v, m);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
    for (int m = 16; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, m));
    return v;
}
#if __CUDA_ARCH__ < 800  // from 8.0 on there is an instruction
__device__ __forceinline__ u32 __reduce_max_sync(u32 lanes, u32 v) {
    for (int m = 16; m; m >>= 1) v = max(v, __shfl_xor_sync(lanes, v, m));
    return v;
}
#endif
// the divisor may be infinite: the quotient is then 0
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
#define CLAMPED_GAIN 1.702f  // common/ops.py
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {  // fminf would hide NaN
    gate = gate > limit ? limit : gate, up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.0f) * gate * sigmoid(CLAMPED_GAIN * gate);
}
__device__ __forceinline__ float gelu(float x) {  // x (1 + tanh(u)) / 2 = x sigmoid(2 u)
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
}
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// The factor of an RMS norm of a row of `columns`: 1 / the root of the mean of its squares, within two units of the last place.
__device__ __forceinline__ float norm_factor(float sum, float columns, float eps) {
    return rsqrtf(__fmaf_rn(sum, __fdividef(1.0f, columns), eps));
}

// The sum over the `warps` warps of a block, at most 32, in every thread. `scratch` holds a float per warp.
__device__ __forceinline__ float block_sum(float v, float* scratch, int warps) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

// n / d for n below 2^32, with inverse = (2^32 - 1) / d from the host: a division takes a hundred cycles
__device__ __forceinline__ u32 quotient(u32 n, u32 d, u32 inverse) {
    const u32 q = __umulhi(n, inverse);  // the quotient or one less
    return q + (n - q * d >= d);
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ < 800
// ---- compute capability 7.5: no asynchronous copies, no mbarriers, tensor cores of smaller shapes. The functions of 8.0
// are made of these.

__device__ __forceinline__ void store_16(u32 to, uint4 v) {  // 16 bytes to shared memory
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// A word of shared memory: add n and return the old value; read; write `v`. Each orders earlier writes of threads of the block
// before it.
__device__ __forceinline__ u32 add_shared(u32 at, u32 n) {
    u32 before;
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(at), "r"(n) : "memory");
    return before;
}
__device__ __forceinline__ u32 read_shared(u32 at) {
    u32 v;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void write_shared(u32 at, u32 v) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// c += a b of float16, 16 rows, 8 columns, k = 8
__device__ __forceinline__ void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
#endif
