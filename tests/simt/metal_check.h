// The Metal Shading Language's declarations for clang's C++ for OpenCL, whose address spaces are Metal's under other
// names. One overload per type, none a template, so that a call that Metal finds ambiguous is ambiguous here.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_non_portable_kernel_param_types : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#include "metal_traits.h"

typedef __bf16 bfloat, bfloat16_t;

#define VECTOR_TYPES(T)                                 \
    typedef T T##2 __attribute__((ext_vector_type(2))); \
    typedef T T##3 __attribute__((ext_vector_type(3))); \
    typedef T T##4 __attribute__((ext_vector_type(4)));
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
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class Vector, class... Parts>
Vector vector_of(Parts... parts);  // float4(a, b, c, d) after the checker's rewriting

namespace metal {

template <class To, class From>
To as_type(From from);

#define FLOATS(F) F(float) F(half) F(bfloat)
#define INTS(F) F(int) F(uint) F(short) F(ushort) F(char) F(int8_t) F(uchar) F(long) F(ulong)
#define VECTORS(F, T) F(T##2) F(T##3) F(T##4)
#define FLOAT_VECTORS(F) VECTORS(F, float) VECTORS(F, half) VECTORS(F, bfloat)
#define INT_VECTORS(F) VECTORS(F, int) VECTORS(F, uint) VECTORS(F, short) VECTORS(F, ushort) VECTORS(F, uchar)
#define SMALL_INTS(F) F(int) F(uint) F(short) F(ushort) F(char) F(int8_t) F(uchar)

#define FLOAT_MATH(T) \
    T exp(T);         \
    T exp2(T);        \
    T log(T);         \
    T log2(T);        \
    T sin(T);         \
    T cos(T);         \
    T tanh(T);        \
    T sqrt(T);        \
    T rsqrt(T);
#define ROUNDING(T) \
    T floor(T);     \
    T ceil(T);      \
    T rint(T);      \
    T round(T);     \
    T trunc(T);     \
    T fabs(T);      \
    T fract(T);     \
    T sign(T);      \
    T fma(T, T, T);
#define POWER(T)     \
    T pow(T, T);     \
    T ldexp(T, int); \
    bool isnan(T);   \
    bool isinf(T);
#define ORDERED(T) \
    T min(T, T);   \
    T max(T, T);   \
    T clamp(T, T, T);
#define SELECT(T) T select(T, T, bool);
#define ABS(T) T abs(T);
#define DOT(T)         \
    T dot(T##2, T##2); \
    T dot(T##3, T##3); \
    T dot(T##4, T##4);
FLOATS(FLOAT_MATH)
FLOAT_VECTORS(FLOAT_MATH) FLOATS(ROUNDING) FLOAT_VECTORS(ROUNDING) FLOATS(POWER) FLOATS(ORDERED) INTS(ORDERED)
    FLOAT_VECTORS(ORDERED) INT_VECTORS(ORDERED) FLOATS(SELECT) INTS(SELECT) SELECT(bool) FLOATS(ABS) FLOAT_VECTORS(ABS)
        ABS(int) ABS(short) ABS(long) DOT(float) DOT(half) DOT(bfloat) namespace precise {
    FLOATS(FLOAT_MATH) FLOAT_VECTORS(FLOAT_MATH)
}
namespace fast {
FLOATS(FLOAT_MATH) FLOAT_VECTORS(FLOAT_MATH)
}
uint popcount(uint);
uint clz(uint);
uint ctz(uint);
uint mulhi(uint, uint);
uint extract_bits(uint, uint, uint);

void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

// SIMD functions take neither bool nor 64 bits.
#define SIMD(T)                     \
    T simd_shuffle(T, ushort);      \
    T simd_shuffle_xor(T, ushort);  \
    T simd_shuffle_up(T, ushort);   \
    T simd_shuffle_down(T, ushort); \
    T simd_broadcast(T, ushort);    \
    T simd_broadcast_first(T);      \
    T quad_shuffle_xor(T, ushort);  \
    T simd_sum(T);                  \
    T simd_product(T);              \
    T simd_min(T);                  \
    T simd_max(T);                  \
    T simd_prefix_inclusive_sum(T); \
    T simd_prefix_exclusive_sum(T);
#define SIMD_BITS(T) \
    T simd_and(T);   \
    T simd_or(T);    \
    T simd_xor(T);
FLOATS(SIMD)
SMALL_INTS(SIMD) FLOAT_VECTORS(SIMD) INT_VECTORS(SIMD) SMALL_INTS(SIMD_BITS)
#define SIMD_REFUSED(T)                         \
    void simd_shuffle(T, ushort) = delete;      \
    void simd_shuffle_xor(T, ushort) = delete;  \
    void simd_sum(T) = delete;                  \
    void simd_shuffle_up(T, ushort) = delete;   \
    void simd_shuffle_down(T, ushort) = delete; \
    void simd_broadcast(T, ushort) = delete;    \
    void simd_min(T) = delete;                  \
    void simd_max(T) = delete;
    SIMD_REFUSED(bool) SIMD_REFUSED(long) SIMD_REFUSED(ulong) struct simd_vote {
    explicit operator ulong() const;
};
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "a matrix of a SIMD group is 8 x 8");
    simdgroup_matrix();
    explicit simdgroup_matrix(T diagonal);
    void operator=(const thread simdgroup_matrix&);  // of a variable; of what a function returns: clang without
    void operator=(simdgroup_matrix);                // a generic address space copies no class, hence references below
    thread vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value);
#define MATRIX_IN(space, M, T)                                                                    \
    void simdgroup_load(thread M&, const space T*, ulong = 8, ulong2 = ulong2(0), bool = false); \
    void simdgroup_store(const thread M&, space T*, ulong = 8, ulong2 = ulong2(0), bool = false);
#define MATRIX(M, T)                                                                                  \
    void simdgroup_multiply(thread M&, const thread M&, const thread M&);                             \
    void simdgroup_multiply_accumulate(thread M&, const thread M&, const thread M&, const thread M&); \
    MATRIX_IN(device, M, T) MATRIX_IN(threadgroup, M, T)
MATRIX(simdgroup_float8x8, float)
MATRIX(simdgroup_half8x8, half)
MATRIX(simdgroup_bfloat8x8, bfloat)

enum memory_order_of_metal { relaxed_order };
#define memory_order_relaxed metal::relaxed_order
template <class T>
struct atomic_of_metal {
    T value_of_atomic;
};
#define atomic metal::atomic_of_metal
#define atomic_int metal::atomic_of_metal<int>
#define atomic_uint metal::atomic_of_metal<uint>
#define ATOMIC_IN(space, T)                                                           \
    T atomic_fetch_add_explicit(volatile space atomic<T>*, T, memory_order_of_metal); \
    T atomic_fetch_sub_explicit(volatile space atomic<T>*, T, memory_order_of_metal); \
    T atomic_exchange_explicit(volatile space atomic<T>*, T, memory_order_of_metal);  \
    void atomic_store_explicit(volatile space atomic<T>*, T, memory_order_of_metal);  \
    T atomic_load_explicit(const volatile space atomic<T>*, memory_order_of_metal);
#define ATOMIC_INT_IN(space, T)                                                       \
    T atomic_fetch_min_explicit(volatile space atomic<T>*, T, memory_order_of_metal); \
    T atomic_fetch_max_explicit(volatile space atomic<T>*, T, memory_order_of_metal); \
    T atomic_fetch_or_explicit(volatile space atomic<T>*, T, memory_order_of_metal);  \
    T atomic_fetch_and_explicit(volatile space atomic<T>*, T, memory_order_of_metal);
ATOMIC_IN(device, int)
ATOMIC_IN(device, uint) ATOMIC_IN(device, float) ATOMIC_IN(threadgroup, int) ATOMIC_IN(threadgroup, uint)
    ATOMIC_INT_IN(device, int) ATOMIC_INT_IN(device, uint) ATOMIC_INT_IN(threadgroup, int)
        ATOMIC_INT_IN(threadgroup, uint)

}  // namespace metal
using namespace metal;

// What MLX puts before every kernel.
int64_t elem_to_loc(uint elem, constant const int* shape, constant const int64_t* strides, int ndim);

// Words of OpenCL that Metal leaves to the kernel.
#define kernel kernel_word
#define global global_word
#define local local_word
#define private private_word
#define generic generic_word
#define pipe pipe_word
