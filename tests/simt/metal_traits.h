// What metal.h, for the run, and metal_check.h, for the check, say alike. Each says first what `constant` and half are.
#pragma once

#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f

typedef unsigned char uchar, uint8_t;
typedef signed char int8_t;
typedef unsigned short ushort, uint16_t;
typedef short int16_t;
typedef unsigned int uint, uint32_t;
typedef int int32_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef long int64_t, ptrdiff_t;
typedef half float16_t;

namespace metal {

template <class A, class B>
constant constexpr bool is_same_v = __is_same(A, B);
template <bool B, class A, class C>
struct conditional {
    typedef A type;
};
template <class A, class C>
struct conditional<false, A, C> {
    typedef C type;
};
template <bool B, class A, class C>
using conditional_t = typename conditional<B, A, C>::type;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
    typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
    static constexpr float max() { return 3.40282347e38f; }
    static constexpr float lowest() { return -max(); }
    static constexpr float infinity() { return INFINITY; }
};
template <>
struct numeric_limits<half> {
    static constexpr half max() { return (half)65504.0f; }
    static constexpr half lowest() { return -max(); }
    static constexpr half infinity() { return (half)INFINITY; }
};
template <>
struct numeric_limits<int> {
    static constexpr int max() { return 0x7fffffff; }
    static constexpr int lowest() { return -max() - 1; }
};
template <>
struct numeric_limits<uint> {
    static constexpr uint max() { return ~0u; }
    static constexpr uint lowest() { return 0; }
};

enum class mem_flags { mem_none = 0, mem_threadgroup = 1, mem_device = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }

}  // namespace metal

// What MLX puts before every kernel.
template <class T, class U>
inline T ceildiv(T n, U m) {
    return (n + m - 1) / m;
}
