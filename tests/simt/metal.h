// Enough of the Metal Shading Language, as C++, to run the text of a kernel on a CPU. Includes no header of C++, so
// that a name from there fails as it does in Metal. What Metal would refuse and C++ takes is for the checker to find.
#pragma once
#include "engine.h"

#define device
#define constant
#define thread
#define kernel
#define threadgroup
#define THREADGROUP_VARIABLE \
    static __attribute__((section("threadgroup"), used))  // what `threadgroup` means before a variable
#define HERE int line = __builtin_LINE()
#define UNWATCHED __attribute__((no_sanitize("thread")))  // of the shim's own accesses

typedef _Float16 half;
#include "metal_traits.h"

namespace metal {

// ---- bfloat16: an operation on two of them is rounded, one with a float is a float's

struct bfloat {
    ushort bits;
    bfloat() = default;
    explicit bfloat(float f) {
        const uint u = __builtin_bit_cast(uint, f);
        bits = f != f ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    }
    template <class T>
    explicit bfloat(T v) : bfloat((float)v) {}
    operator float() const { return __builtin_bit_cast(float, (uint)bits << 16); }
    bfloat operator-() const { return bfloat(-(float)*this); }
};
#define BFLOAT_OPERATOR(op)                                                                \
    inline bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op(float) b); } \
    inline float operator op(bfloat a, float b) { return (float)a op b; }                  \
    inline float operator op(float a, bfloat b) { return a op(float) b; }                  \
    inline bfloat operator op(bfloat a, int b) { return bfloat((float)a op(float) b); }    \
    inline bfloat operator op(int a, bfloat b) { return bfloat((float)a op(float) b); }    \
    inline bfloat& operator op## = (bfloat & a, bfloat b) { return a = bfloat((float)a op(float) b); }
BFLOAT_OPERATOR(+)
BFLOAT_OPERATOR(-)
BFLOAT_OPERATOR(*)
BFLOAT_OPERATOR(/)
typedef bfloat bfloat16_t;

// ---- vectors; SWIZZLES_n are the swizzles that the text uses

template <class T, int N>
struct vec;
template <class T, int N, int... I>
struct Swizzle {
    T v[N];
    operator vec<T, sizeof...(I)>() const { return {v[I]...}; }
    Swizzle& operator=(const vec<T, sizeof...(I)>& from) {
        int i = 0;
        ((v[I] = from[i++]), ...);
        return *this;
    }
};

#define VECTOR_COMMON(N)                                 \
    vec() = default;                                     \
    vec(const vec&) = default;                           \
    vec& operator=(const vec& from) {                    \
        for (int i = 0; i < N; i++) v[i] = from.v[i];    \
        return *this;                                    \
    }                                                    \
    vec(T all) {                                         \
        for (int i = 0; i < N; i++) v[i] = all;          \
    }                                                    \
    template <class U>                                   \
    explicit vec(const vec<U, N>& from) {                \
        for (int i = 0; i < N; i++) v[i] = (T)from.v[i]; \
    }                                                    \
    T& operator[](int i) { return v[i]; }                \
    const T& operator[](int i) const { return v[i]; }

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    union {
        T v[2];
        struct {
            T x, y;
        };
        SWIZZLES_2
    };
    VECTOR_COMMON(2)
    vec(T a, T b) : v{a, b} {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
    union {
        T v[3];
        struct {
            T x, y, z;
        };
        SWIZZLES_3
    };
    VECTOR_COMMON(3)
    vec(T a, T b, T c) : v{a, b, c} {}
    vec(vec<T, 2> a, T c) : v{a[0], a[1], c} {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    union {
        T v[4];
        struct {
            T x, y, z, w;
        };
        SWIZZLES_4
    };
    VECTOR_COMMON(4)
    vec(T a, T b, T c, T d) : v{a, b, c, d} {}
    vec(vec<T, 2> a, vec<T, 2> b) : v{a[0], a[1], b[0], b[1]} {}
    vec(vec<T, 3> a, T d) : v{a[0], a[1], a[2], d} {}
};
#define VECTOR_OPERATOR(op)                                         \
    template <class T, int N>                                       \
    vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
        vec<T, N> out;                                              \
        for (int i = 0; i < N; i++) out[i] = a[i] op b[i];          \
        return out;                                                 \
    }                                                               \
    template <class T, int N>                                       \
    vec<T, N> operator op(const vec<T, N>& a, decltype(T()) b) {    \
        return a op vec<T, N>(b);                                   \
    }                                                               \
    template <class T, int N>                                       \
    vec<T, N> operator op(decltype(T()) a, const vec<T, N>& b) {    \
        return vec<T, N>(a) op b;                                   \
    }                                                               \
    template <class T, int N, class U>                              \
    vec<T, N>& operator op## = (vec<T, N> & a, const U& b) {        \
        return a = a op b;                                          \
    }
VECTOR_OPERATOR(+)
VECTOR_OPERATOR(-)
VECTOR_OPERATOR(*)
VECTOR_OPERATOR(/)
VECTOR_OPERATOR(&)
VECTOR_OPERATOR(|)
VECTOR_OPERATOR(^)
VECTOR_OPERATOR(<<)
VECTOR_OPERATOR(>>)
template <class T, int N>
vec<T, N> operator-(const vec<T, N>& a) {
    return vec<T, N>(T(0)) - a;
}
#define VECTOR_TYPES(T)     \
    typedef vec<T, 2> T##2; \
    typedef vec<T, 3> T##3; \
    typedef vec<T, 4> T##4;
VECTOR_TYPES(float)
VECTOR_TYPES(half)
VECTOR_TYPES(bfloat)
VECTOR_TYPES(int)
VECTOR_TYPES(uint)
VECTOR_TYPES(short)
VECTOR_TYPES(ushort)
VECTOR_TYPES(char)
VECTOR_TYPES(uchar)
VECTOR_TYPES(long)
VECTOR_TYPES(ulong)
VECTOR_TYPES(bool)

template <class To, class From>
To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// ---- math: in float, rounded to the type

#define MATH_1(name, builtin)                                          \
    inline float name(float x) { return builtin(x); }                  \
    inline half name(half x) { return (half)builtin((float)x); }       \
    inline bfloat name(bfloat x) { return bfloat(builtin((float)x)); } \
    template <class T, int N>                                          \
    vec<T, N> name(vec<T, N> x) {                                      \
        for (int i = 0; i < N; i++) x[i] = name(x[i]);                 \
        return x;                                                      \
    }
inline float rsqrt_of(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float fract_of(float x) { return x - __builtin_floorf(x); }
inline float sign_of(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }
#define FLOAT_MATH                \
    MATH_1(exp, __builtin_expf)   \
    MATH_1(exp2, __builtin_exp2f) \
    MATH_1(log, __builtin_logf)   \
    MATH_1(log2, __builtin_log2f) \
    MATH_1(sin, __builtin_sinf)   \
    MATH_1(cos, __builtin_cosf)   \
    MATH_1(tanh, __builtin_tanhf) \
    MATH_1(sqrt, __builtin_sqrtf) \
    MATH_1(rsqrt, rsqrt_of)
FLOAT_MATH
namespace precise {
FLOAT_MATH
}
namespace fast {
FLOAT_MATH
}
MATH_1(floor, __builtin_floorf)
MATH_1(ceil, __builtin_ceilf)
MATH_1(rint, __builtin_rintf)
MATH_1(round, __builtin_roundf)
MATH_1(trunc, __builtin_truncf)
MATH_1(fabs, __builtin_fabsf)
MATH_1(fract, fract_of)
MATH_1(sign, sign_of)
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float ldexp(float x, int n) { return __builtin_ldexpf(x, n); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return (half)__builtin_fma((float)a, (float)b, (float)c); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }

#define ORDERED(T)                                   \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; } \
    inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define ABS(T) \
    inline T abs(T x) { return x < 0 ? (T) - x : x; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float clamp(float x, float low, float high) { return min(max(x, low), high); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline half abs(half x) { return (half)__builtin_fabsf((float)x); }
inline bfloat abs(bfloat x) { return bfloat(__builtin_fabsf((float)x)); }
ORDERED(half)
ORDERED(bfloat)
ORDERED(int)
ORDERED(uint)
ORDERED(short)
ORDERED(ushort)
ORDERED(char)
ORDERED(int8_t)
ORDERED(uchar)
ORDERED(long)
ORDERED(ulong)
ABS(int)
ABS(short)
ABS(long)
template <class T, int N>
vec<T, N> min(vec<T, N> a, vec<T, N> b) {
    for (int i = 0; i < N; i++) a[i] = min(a[i], b[i]);
    return a;
}
template <class T, int N>
vec<T, N> max(vec<T, N> a, vec<T, N> b) {
    for (int i = 0; i < N; i++) a[i] = max(a[i], b[i]);
    return a;
}
template <class T, int N>
T dot(vec<T, N> a, vec<T, N> b) {
    T sum = a[0] * b[0];
    for (int i = 1; i < N; i++) sum = sum + a[i] * b[i];
    return sum;
}
template <class T>
T select(T no, T yes, bool choose) {
    return choose ? yes : no;
}
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
inline uint mulhi(uint a, uint b) { return (ulong)a * b >> 32; }
inline uint extract_bits(uint x, uint offset, uint bits) { return bits ? x >> offset & ~0u >> (32 - bits) : 0; }

// ---- other threads

inline void threadgroup_barrier(mem_flags flags, HERE) {
    simt::barrier("threadgroup_barrier", line, (simt::Order)flags);
}
inline void simdgroup_barrier(mem_flags flags, HERE) {
    simt::meet("simdgroup_barrier", line, nullptr, [](void**, void*) {}, nullptr, (simt::Order)flags);
}

template <class T>
struct Lane {
    T in, out;
    int from;  // the lane whose `in` is read; outside 0..31: this lane's own
    bool given;
};
template <class T>
UNWATCHED T from_lane(const char* what, int line, T value, int from) {
    Lane<T> lane{value, value, from, true};
    simt::together(what, line, &lane, [](void** lanes) UNWATCHED {
        for (int i = 0; i < 32; i++) {
            Lane<T>* to = (Lane<T>*)lanes[i];
            if (!to || to->from < 0 || to->from > 31) continue;
            to->given = lanes[to->from];
            if (to->given) to->out = ((Lane<T>*)lanes[to->from])->in;
        }
    });
    if (!lane.given) simt::fail("%s at line %d reads lane %d, which the group does not have", what, line, from);
    return lane.out;
}
template <class T>
T simd_shuffle(T v, ushort lane, HERE) {
    return from_lane("simd_shuffle", line, v, lane);
}
template <class T>
T simd_broadcast(T v, ushort lane, HERE) {
    return from_lane("simd_broadcast", line, v, lane);
}
template <class T>
T simd_broadcast_first(T v, HERE) {
    return from_lane("simd_broadcast_first", line, v, 0);
}
template <class T>
T simd_shuffle_xor(T v, ushort mask, HERE) {
    return from_lane("simd_shuffle_xor", line, v, simt::self->lane ^ mask);
}
template <class T>
T quad_shuffle_xor(T v, ushort mask, HERE) {
    return from_lane("quad_shuffle_xor", line, v, simt::self->lane ^ (mask & 3));
}
template <class T>
T simd_shuffle_down(T v, ushort by, HERE) {
    return from_lane("simd_shuffle_down", line, v, (int)simt::self->lane + by);
}
template <class T>
T simd_shuffle_up(T v, ushort by, HERE) {
    return from_lane("simd_shuffle_up", line, v, (int)simt::self->lane - by);
}

// The tree of today's GPUs: lanes 1 apart, then 2, 4, 8, 16. A lane that does not exist adds nothing.
template <class T, class Join>
UNWATCHED T reduced(const char* what, int line, T value, Join join) {
    Lane<T> lane{value, value, 0, true};
    simt::together(what, line, &lane, [join](void** lanes) UNWATCHED {
        T all[32];
        bool there[32];
        for (int i = 0; i < 32; i++)
            if ((there[i] = lanes[i])) all[i] = ((Lane<T>*)lanes[i])->in;
        for (int step = 1; step < 32; step *= 2)
            for (int i = 0; i < 32; i += 2 * step)
                if (there[i + step]) all[i] = join(all[i], all[i + step]);
        for (int i = 0; i < 32; i++)
            if (lanes[i]) ((Lane<T>*)lanes[i])->out = all[0];
    });
    return lane.out;
}
#define REDUCTION(name, expression)                                               \
    template <class T>                                                            \
    T name(T v, HERE) {                                                           \
        return reduced(#name, line, v, [](T a, T b) { return (T)(expression); }); \
    }
REDUCTION(simd_sum, a + b)
REDUCTION(simd_product, a* b)
REDUCTION(simd_min, min(a, b))
REDUCTION(simd_max, max(a, b))
REDUCTION(simd_and, a& b)
REDUCTION(simd_or, a | b)
REDUCTION(simd_xor, a ^ b)
inline bool simd_any(bool v, HERE) {
    return reduced("simd_any", line, v, [](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool v, HERE) {
    return reduced("simd_all", line, v, [](bool a, bool b) { return a && b; });
}
template <class T>
UNWATCHED T prefix_sum(const char* what, int line, T value, bool inclusive) {
    Lane<T> lane{value, T(0), inclusive, true};
    simt::together(what, line, &lane, [](void** lanes) UNWATCHED {
        T sum = T(0);
        for (int i = 0; i < 32; i++) {
            Lane<T>* at = (Lane<T>*)lanes[i];
            if (!at) continue;
            at->out = at->from ? sum + at->in : sum;
            sum = sum + at->in;
        }
    });
    return lane.out;
}
template <class T>
T simd_prefix_inclusive_sum(T v, HERE) {
    return prefix_sum("simd_prefix_inclusive_sum", line, v, true);
}
template <class T>
T simd_prefix_exclusive_sum(T v, HERE) {
    return prefix_sum("simd_prefix_exclusive_sum", line, v, false);
}
struct simd_vote {
    ulong bits;
    explicit operator ulong() const { return bits; }
};
inline simd_vote simd_ballot(bool v, HERE) {
    return {reduced("simd_ballot", line, (ulong)v << simt::self->lane, [](ulong a, ulong b) { return a | b; })};
}
inline bool simd_is_first() { return simt::self->lane == 0; }

// ---- matrices of a SIMD group: a lane has the two neighbours of a row that it has on Apple's GPUs (MLX's mma.h)

inline int matrix_row() { return simt::self->lane / 16 * 4 + simt::self->lane / 2 % 4; }
inline int matrix_column() { return simt::self->lane / 8 % 2 * 4 + simt::self->lane % 2 * 2; }

constexpr uchar UNFILLED = 0xff;  // the bytes of a NaN that no arithmetic makes

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "a matrix of a SIMD group is 8 x 8");
    vec<T, 2> own;
    simdgroup_matrix() { __builtin_memset(&own, UNFILLED, sizeof own); }
    explicit simdgroup_matrix(T diagonal) : own(T(0.0f)) {
        for (int i = 0; i < 2; i++)
            if (matrix_column() + i == matrix_row()) own[i] = diagonal;
    }
    vec<T, 2>& thread_elements() { return own; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, Columns, Rows> out;
    out.own = vec<T, 2>(value);
    return out;
}

template <class T>
struct Product {
    vec<T, 2> a, b, sum;
    int row, column;
    UNWATCHED bool unfilled() const {
        for (int i = 0; i < 3 * sizeof a; i += sizeof(T)) {
            uint all = UNFILLED;
            for (int byte = 0; byte < sizeof(T); byte++) all &= ((const uchar*)this)[i + byte];
            if (all == UNFILLED) return true;
        }
        return false;
    }
};
// Adds in the order of k, by fma in float; what order and rounding a GPU has is not known.
template <class T>
UNWATCHED void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& to, simdgroup_matrix<T, 8, 8> a,
                                             simdgroup_matrix<T, 8, 8> b, simdgroup_matrix<T, 8, 8> sum, HERE) {
    Product<T> mine{a.own, b.own, sum.own, matrix_row(), matrix_column()};
    simt::together("simdgroup_multiply_accumulate", line, &mine, [line](void** lanes) UNWATCHED {
        float a[8][8], b[8][8];
        for (int i = 0; i < 64; i++) {
            const Product<T>* p = (Product<T>*)lanes[i / 2];
            if (!p) simt::fail("simdgroup_multiply_accumulate at line %d by a group without lane %d", line, i / 2);
            if (p->unfilled())
                simt::fail("uninitialised: lane %d has filled a matrix of line %d in part or not at all", i / 2, line);
            a[p->row][p->column + i % 2] = p->a[i % 2], b[p->row][p->column + i % 2] = p->b[i % 2];
        }
        for (int i = 0; i < 64; i++) {
            Product<T>* p = (Product<T>*)lanes[i / 2];
            float sum = p->sum[i % 2];
            for (int k = 0; k < 8; k++) sum = __builtin_fmaf(a[p->row][k], b[k][p->column + i % 2], sum);
            p->sum[i % 2] = T(sum);
        }
    });
    to.own = mine.sum;
}
template <class T>
void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& to, simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b, HERE) {
    simdgroup_multiply_accumulate(to, a, b, make_filled_simdgroup_matrix<T, 8, 8>(T(0.0f)), line);
}

// An 8 x 8 part of memory, which all lanes name alike, and where in it a lane's two elements are.
struct MatrixInMemory {
    const void* start;
    ulong per_row, x, y;
    bool transposed;
    bool operator==(const MatrixInMemory& b) const {
        return start == b.start && per_row == b.per_row && x == b.x && y == b.y && transposed == b.transposed;
    }
    ulong element(int i) const {
        const int row = matrix_row(), column = matrix_column() + i;
        return (y + (transposed ? column : row)) * per_row + x + (transposed ? row : column);
    }
};
inline UNWATCHED void agree(const char* what, int line, MatrixInMemory mine) {
    simt::together(what, line, &mine, [what, line](void** lanes) UNWATCHED {
        for (int i = 0; i < 32; i++) {
            if (!lanes[i]) simt::fail("%s at line %d by a group without lane %d", what, line, i);
            if (!(*(MatrixInMemory*)lanes[i] == *(MatrixInMemory*)lanes[0]))
                simt::fail("%s at line %d: lane %d names another matrix than lane 0", what, line, i);
        }
    });
}
template <class T>
__attribute__((noinline)) UNWATCHED void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const T* from, ulong per_row = 8,
                                                        ulong2 origin = ulong2(0), bool transposed = false, HERE) {
    const MatrixInMemory memory = {from, per_row, origin.x, origin.y, transposed};
    agree("simdgroup_load", line, memory);
    for (int i = 0; i < 2; i++) {
        const T* at = from + memory.element(i);
        simt::note(at, sizeof *at, true, false, false, __builtin_return_address(0));
        to.own[i] = *at;
    }
}
template <class T>
__attribute__((noinline)) UNWATCHED void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, T* to, ulong per_row = 8,
                                                         ulong2 origin = ulong2(0), bool transposed = false, HERE) {
    const MatrixInMemory memory = {to, per_row, origin.x, origin.y, transposed};
    agree("simdgroup_store", line, memory);
    for (int i = 0; i < 2; i++) {
        T* at = to + memory.element(i);
        simt::note(at, sizeof *at, false, true, false, __builtin_return_address(0));
        *at = matrix.own[i];
    }
}

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
    T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
#define ATOMIC(name, reads, expression)                                                 \
    template <class T, class U>                                                         \
    __attribute__((noinline)) UNWATCHED T name(atomic<T>* p, U operand, memory_order) { \
        simt::note(p, sizeof *p, reads, true, true, __builtin_return_address(0));       \
        const T old = p->value, b = (T)operand;                                         \
        p->value = (expression);                                                        \
        return old;                                                                     \
    }
ATOMIC(atomic_fetch_add_explicit, true, old + b)
ATOMIC(atomic_fetch_sub_explicit, true, old - b)
ATOMIC(atomic_fetch_min_explicit, true, b < old ? b : old)
ATOMIC(atomic_fetch_max_explicit, true, old < b ? b : old)
ATOMIC(atomic_fetch_or_explicit, true, old | b)
ATOMIC(atomic_fetch_and_explicit, true, old& b)
ATOMIC(atomic_exchange_explicit, true, b)
ATOMIC(atomic_store_explicit, false, b)
template <class T>
__attribute__((noinline)) UNWATCHED T atomic_load_explicit(const atomic<T>* p, memory_order) {
    simt::note(p, sizeof *p, true, false, true, __builtin_return_address(0));
    return p->value;
}

// ---- attributes

inline uint3 index3(const simt::Index& i) { return {i.x, i.y, i.z}; }
inline uint product(const simt::Index& i) { return i.x * i.y * i.z; }

}  // namespace metal
using namespace metal;

#define ATTRIBUTE(type, name, value) \
    inline type attribute_##name() { return value; }
ATTRIBUTE(uint3, thread_position_in_grid,
          index3(simt::group) * index3(simt::whole_group) + index3(simt::self->position))
ATTRIBUTE(uint3, thread_position_in_threadgroup, index3(simt::self->position))
ATTRIBUTE(uint3, threadgroup_position_in_grid, index3(simt::group))
ATTRIBUTE(uint3, threads_per_threadgroup, index3(simt::group_size))
ATTRIBUTE(uint3, dispatch_threads_per_threadgroup, index3(simt::whole_group))
ATTRIBUTE(uint3, threads_per_grid, index3(simt::threads))
ATTRIBUTE(uint3, grid_size, index3(simt::threads))
ATTRIBUTE(uint3, grid_origin, uint3(0))
ATTRIBUTE(uint3, threadgroups_per_grid, index3(simt::groups))
ATTRIBUTE(uint, thread_index_in_threadgroup, simt::self->index)
ATTRIBUTE(uint, thread_index_in_simdgroup, simt::self->lane)
ATTRIBUTE(uint, thread_index_in_quadgroup, simt::self->lane % 4)
ATTRIBUTE(uint, simdgroup_index_in_threadgroup, simt::self->simd)
ATTRIBUTE(uint, quadgroup_index_in_threadgroup, simt::self->index / 4)
ATTRIBUTE(uint, simdgroups_per_threadgroup, (product(simt::group_size) + 31) / 32)
ATTRIBUTE(uint, dispatch_simdgroups_per_threadgroup, (product(simt::whole_group) + 31) / 32)
ATTRIBUTE(uint, quadgroups_per_threadgroup, (product(simt::group_size) + 3) / 4)
ATTRIBUTE(uint, dispatch_quadgroups_per_threadgroup, (product(simt::whole_group) + 3) / 4)
ATTRIBUTE(uint, threads_per_simdgroup, 32)
ATTRIBUTE(uint, thread_execution_width, 32)

// What MLX puts before every kernel.
template <class Index = int64_t>
inline Index elem_to_loc(Index elem, const int* shape, const int64_t* strides, int ndim) {
    Index at = 0;
    for (int i = ndim - 1; i >= 0 && elem > 0; --i) at += elem % shape[i] * Index(strides[i]), elem /= shape[i];
    return at;
}
