// simt: enough of CUDA C++ to run our kernels on a CPU, by the engine of tests/simt: one block at a time, a fiber per thread.
//
// A thread runs until it waits for others (a barrier, a shuffle, a tensor-core instruction); the last of a warp to arrive
// computes the result for all. Shared memory starts as NaN. What a GPU may reorder runs in one fixed order here: this
// finds wrong arithmetic, indices, divergence and reads of memory nobody wrote, and under BIMETAL_RACES=1 races in shared
// memory, for kernels that order it by __syncthreads and __syncwarp alone.
#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using std::max;
using std::min;
inline float max(float a, int b) { return a > b ? a : b; }

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("threadgroup"), used))
#define __expf expf_of_cuda

#define threadIdx simt::self->position
#define blockIdx simt::group
#define blockDim simt::whole_group
#define gridDim simt::groups
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct int2 {
    int x, y;
};
struct double2 {
    double x, y;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
To bits_as(From value) {
    To out;
    std::memcpy(&out, &value, sizeof out);
    return out;
}
inline unsigned __float_as_uint(float f) { return bits_as<unsigned>(f); }
inline int __float_as_int(float f) { return bits_as<int>(f); }
inline float __uint_as_float(unsigned u) { return bits_as<float>(u); }
inline float __int_as_float(int i) { return bits_as<float>(i); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float expf_of_cuda(float x) { return expf(x); }
inline int __float2int_rn(float f) { return std::isnan(f) ? 0 : (int)rintf(f); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll(x); }
inline void sincospif(float x, float* s, float* c) { *s = (float)sin(M_PI * x), *c = (float)cos(M_PI * x); }
// what a kernel assumes the tests check
#define __builtin_assume(condition) do { if (!(condition)) __builtin_trap(); } while (0)
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
    const unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (8 * (select >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}

inline unsigned permuted(unsigned low, unsigned high, unsigned select) {
    if (select & 0x8888) __builtin_trap();  // PTX would repeat a sign
    return __byte_perm(low, high, select);
}

// What kernels/prelude.cuh writes as PTX.
alignas(1024) __shared__ char block_memory[232448];
inline unsigned shared_address(const void* p) { return (unsigned)((const char*)p - block_memory); }
inline float from_half(unsigned short h) { return (float)bits_as<_Float16>(h); }
inline unsigned short to_half(float f) { return bits_as<unsigned short>((_Float16)f); }
inline unsigned to_half2(float low, float high) { return to_half(low) | (unsigned)to_half(high) << 16; }
inline unsigned by_halves(unsigned a, unsigned b, unsigned c, float (*f)(float, float, float)) {
    const auto one = [&](int at) { return (unsigned)to_half(f(from_half(a >> at), from_half(b >> at), from_half(c >> at))) << at; };
    return one(0) | one(16);
}
inline unsigned mul_half2(unsigned a, unsigned b) { return by_halves(a, b, 0, [](float x, float y, float) { return x * y; }); }
inline unsigned add_half2(unsigned a, unsigned b) { return by_halves(a, b, 0, [](float x, float y, float) { return x + y; }); }
inline unsigned fma_half2(unsigned a, unsigned b, unsigned c) {
    return by_halves(a, b, c, [](float x, float y, float z) { return x * y + z; });  // exact in float32 but for the last rounding
}
inline float from_bf16_bits(unsigned short h) { return __uint_as_float((unsigned)h << 16); }
inline unsigned short to_bf16_bits(float f) {
    const unsigned u = __float_as_uint(f);
    return std::isnan(f) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline unsigned to_bf16x2(float low, float high) { return to_bf16_bits(low) | (unsigned)to_bf16_bits(high) << 16; }
inline void release_next() {}
inline void depend() {}
inline void prefetch(const void*) {}
inline void prefetch_l1(const void*) {}
template <class T>
T __ldcg(const T* at) {
    return *at;
}

// What kernels/peers.cuh does beside other GPUs. A kernel that misses another GPU's part runs to its end, and once more
// when that GPU has gone on, with what it wrote before of no account; or it is told that nobody will go on.
static int waits_for_a_peer, peers_are_lost, part_is_stored;
// whether the last launch did; how the next one ends, and whether it has run before and so stored its part, which peers may
// have read and cleared since
extern "C" inline __attribute__((used)) int waited(int lost, int again) {
    const int before = waits_for_a_peer;
    waits_for_a_peer = 0, peers_are_lost = lost, part_is_stored = again;
    return before;
}
inline void store_number(float* to, float v) {
    if (!part_is_stored) *to = v;
}
inline float load_number(const float* from) { return *from; }
inline bool is_late(unsigned, unsigned long long*, long long) { return waits_for_a_peer = 1; }
template <class M>
inline void give_up(const M& m, unsigned number) {
    if (peers_are_lost) m.state[1] = number, *m.failed = number;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }

// ---- other threads

inline void wait_for_others() { simt::yield(); }
inline void __syncthreads() { simt::barrier("__syncthreads", 0, simt::ORDERS_ALL); }
inline unsigned __activemask() { return 1u << threadIdx.x % 32; }  // a fiber runs by itself
inline void __syncwarp(unsigned) {}                               // of the lanes that __activemask names
inline void __syncwarp() {
    simt::meet("__syncwarp", 0, nullptr, [](void**, void*) {}, nullptr, simt::ORDERS_ALL);
}

// Every lane of a whole warp brings `mine`; the last one computes for all. Lines tell warp instructions apart.
template <class Compute>
void together(void* mine, Compute compute, int line = __builtin_LINE()) {
    simt::together("a warp instruction", line, mine, compute);
}

template <class T>
struct Lane {
    T in, out;
    int mask;
};
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    Lane<T> lane{value, value, mask};
    together(&lane, [](void** lanes) {
        for (int i = 0; i < 32; i++) {
            Lane<T>* to = (Lane<T>*)lanes[i];
            to->out = ((Lane<T>*)lanes[i ^ to->mask])->in;
        }
    });
    return lane.out;
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
    Lane<T> lane{value, value, source};
    together(&lane, [](void** lanes) {
        for (int i = 0; i < 32; i++) {
            Lane<T>* to = (Lane<T>*)lanes[i];
            to->out = ((Lane<T>*)lanes[to->mask])->in;
        }
    });
    return lane.out;
}
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T atomicAdd(T* at, T value) {
#ifdef __SANITIZE_THREAD__  // else nothing reports plain stores
    simt::note(at, sizeof *at, true, true, true, __builtin_return_address(0));
#endif
    return (*at += value) - value;
}
template <class T, class Join>
T reduced(T value, Join join) {
    Lane<T> lane{value, value, 0};
    together(&lane, [join](void** lanes) {
        T all = ((Lane<T>*)lanes[0])->in;
        for (int i = 1; i < 32; i++) all = join(all, ((Lane<T>*)lanes[i])->in);
        for (int i = 0; i < 32; i++) ((Lane<T>*)lanes[i])->out = all;
    });
    return lane.out;
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    return reduced(v, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __ballot_sync(unsigned, bool v) {
    return reduced((unsigned)v << (threadIdx.x % 32), [](unsigned a, unsigned b) { return a | b; });
}
inline int __reduce_add_sync(unsigned, int v) {
    return reduced(v, [](int a, int b) { return a + b; });
}

// ---- tensor cores: m16n8 products, fragments as in the PTX manual

struct Fragments {
    const void *a, *b, *c;  // c may be null: zero
    void* d;
};
template <class TA, class TB, class Sum, int K>
void multiply_fragments(const void* a, const void* b, const void* c, void* d, float (*value_a)(TA), float (*value_b)(TB)) {
    Fragments mine{a, b, c, d};
    together(&mine, [value_a, value_b](void** lanes) {
        const int per = 4 / sizeof(TA);  // elements of a register
        double A[16][K], B[K][8];
        for (int lane = 0; lane < 32; lane++) {
            const Fragments* f = (Fragments*)lanes[lane];
            const int g = lane / 4, t = lane % 4;
            for (int r = 0; r < K / per / 2; r++)
                for (int e = 0; e < per; e++)
                    A[g + r % 2 * 8][r / 2 * 4 * per + t * per + e] = value_a(((const TA*)f->a)[r * per + e]);
            for (int r = 0; r < K / per / 4; r++)
                for (int e = 0; e < per; e++) B[r * 4 * per + t * per + e][g] = value_b(((const TB*)f->b)[r * per + e]);
        }
        for (int lane = 0; lane < 32; lane++) {
            const Fragments* f = (Fragments*)lanes[lane];
            for (int i = 0; i < 4; i++) {
                double sum = f->c ? (double)((const Sum*)f->c)[i] : 0;
                for (int k = 0; k < K; k++) sum += A[lane / 4 + i / 2 * 8][k] * B[k][lane % 4 * 2 + i % 2];
                ((Sum*)f->d)[i] = (Sum)sum;
            }
        }
    });
}
inline float of_int8(signed char x) { return x; }

// ---- a launch

extern char __start_threadgroup[] __attribute__((visibility("hidden")));
extern char __stop_threadgroup[] __attribute__((visibility("hidden")));

static const char* run_grid(void (*kernel)(), const unsigned* grid, const unsigned* block) {
    const simt::Index threads = {grid[0] * block[0], grid[1] * block[1], grid[2] * block[2]};
    const unsigned long shared_bytes = __stop_threadgroup - __start_threadgroup;
    const simt::Launch launch = {kernel, threads, {block[0], block[1], block[2]}, simt::FORWARD, true,
                                 __start_threadgroup, shared_bytes, 600.0};
    return simt_run(&launch, nullptr, 0, nullptr);
}

// Whether the last CTA wrote beyond the dynamic shared memory that it was launched with: CTAs begin with bytes of 0xff.
extern "C" inline __attribute__((used)) int wrote_beyond(unsigned bytes) {
    const unsigned end = bytes + 16384 < sizeof block_memory ? bytes + 16384 : sizeof block_memory;
    for (unsigned i = bytes; i < end; i++)
        if (block_memory[i] != (char)0xff) return 1;
    return 0;
}
