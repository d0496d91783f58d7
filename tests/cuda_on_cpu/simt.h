// simt: enough of CUDA C++ to run our kernels on a CPU, one block at a time, a fiber per thread.
//
// A thread runs until it waits for others (a barrier, a shuffle, a tensor-core instruction); the last of a warp to arrive
// computes the result for all. Shared memory starts as NaN. What a GPU may reorder runs in one fixed order here: this
// finds wrong arithmetic, indices and reads of memory nobody wrote, and no races.
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
#define __launch_bounds__(...)
#define __shared__ static
#define __CUDA_ARCH__ 800
#define __expf expf_of_cuda

struct dim {
    unsigned x, y, z;
};
static dim threadIdx, blockIdx, blockDim, gridDim;
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
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
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float expf_of_cuda(float x) { return expf(x); }
inline int __float2int_rn(float f) { return std::isnan(f) ? 0 : (int)rintf(f); }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll(x); }
inline void sincospif(float x, float* s, float* c) { *s = (float)sin(M_PI * x), *c = (float)cos(M_PI * x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
    const unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (8 * (select >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}

// What kernels/prelude.cuh writes as PTX.
alignas(256) static char block_memory[232448];
inline unsigned shared_address(const void* p) { return (unsigned)((const char*)p - block_memory); }
inline float from_half(unsigned short h) { return (float)bits_as<_Float16>(h); }
inline unsigned short to_half(float f) { return bits_as<unsigned short>((_Float16)f); }
inline unsigned to_half2(float low, float high) { return to_half(low) | (unsigned)to_half(high) << 16; }
inline float from_bf16_bits(unsigned short h) { return __uint_as_float((unsigned)h << 16); }
inline unsigned short to_bf16_bits(float f) {
    const unsigned u = __float_as_uint(f);
    return std::isnan(f) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline unsigned to_bf16x2(float low, float high) { return to_bf16_bits(low) | (unsigned)to_bf16_bits(high) << 16; }
inline void release_next() {}
inline void depend() {}

// ---- fibers

struct Fiber {
    void* stack_pointer;
    char* stack;
    bool done;
};
static Fiber fibers[1024];
static void *scheduler, (*kernel_of_block)();
static int running, threads_alive, at_barrier, barriers_passed;

extern "C" void switch_stack(void** save, void* to);
asm(R"(
.text
switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

inline void wait_for_others() { switch_stack(&fibers[running].stack_pointer, scheduler); }
static void run_thread() {
    kernel_of_block();
    fibers[running].done = true;
    for (;;) wait_for_others();
}

inline void __syncthreads() {
    const int passed = barriers_passed;
    if (++at_barrier == threads_alive)
        at_barrier = 0, barriers_passed++;
    else
        while (barriers_passed == passed) wait_for_others();
}

struct Warp {
    int arrived, steps;
    void* mine[32];
};
static Warp warps[32];

// Every lane of a whole warp brings `mine`; the last one computes for all.
template <class Compute>
void together(void* mine, Compute compute) {
    const int thread = threadIdx.x;
    Warp& warp = warps[thread / 32];
    const int step = warp.steps;
    warp.mine[thread % 32] = mine;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        compute(warp.mine);
        warp.steps++;
    } else {
        while (warp.steps == step) wait_for_others();
    }
}
inline void __syncwarp() {
    together(nullptr, [](void**) {});
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
inline int atomicAdd(int* at, int value) { return (*at += value) - value; }
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
inline int __reduce_add_sync(unsigned, int v) {
    return reduced(v, [](int a, int b) { return a + b; });
}

// ---- tensor cores: m16n8 products, fragments as in the PTX manual

struct Fragments {
    const void *a, *b, *c;  // c may be null: zero
    void* d;
};
template <class T, class Sum, int K>
void multiply_fragments(const void* a, const void* b, const void* c, void* d, float (*value)(T)) {
    Fragments mine{a, b, c, d};
    together(&mine, [value](void** lanes) {
        const int per = 4 / sizeof(T);  // elements of a register
        double A[16][K], B[K][8];
        for (int lane = 0; lane < 32; lane++) {
            const Fragments* f = (Fragments*)lanes[lane];
            const int g = lane / 4, t = lane % 4;
            for (int r = 0; r < K / per / 2; r++)
                for (int e = 0; e < per; e++)
                    A[g + r % 2 * 8][r / 2 * 4 * per + t * per + e] = value(((const T*)f->a)[r * per + e]);
            for (int r = 0; r < K / per / 4; r++)
                for (int e = 0; e < per; e++) B[r * 4 * per + t * per + e][g] = value(((const T*)f->b)[r * per + e]);
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

static void run_grid(void (*kernel)(), dim grid, dim block) {
    const size_t stack = 1 << 16;
    gridDim = grid, blockDim = block, kernel_of_block = kernel;
    for (unsigned i = 0; i < block.x; i++)
        if (!fibers[i].stack) fibers[i].stack = (char*)aligned_alloc(64, stack);
    for (unsigned b = 0; b < grid.x * grid.y * grid.z; b++) {
        blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        memset(block_memory, 0xff, sizeof block_memory);
        memset(warps, 0, sizeof warps);
        at_barrier = 0, threads_alive = block.x;
        for (unsigned i = 0; i < block.x; i++) {
            void** top = (void**)(fibers[i].stack + stack - 64);
            *--top = nullptr, *--top = (void*)run_thread;
            fibers[i].stack_pointer = top - 6, fibers[i].done = false;
        }
        for (long rounds = 0; threads_alive; rounds++) {
            if (rounds > 10000000) fprintf(stderr, "threads wait for each other forever\n"), abort();
            for (unsigned i = 0; i < block.x; i++) {
                if (fibers[i].done) continue;
                running = i, threadIdx = {i, 0, 0};
                switch_stack(&scheduler, fibers[i].stack_pointer);
                if (!fibers[i].done) continue;
                threads_alive--;
                if (at_barrier && at_barrier == threads_alive) at_barrier = 0, barriers_passed++;
            }
        }
    }
}
