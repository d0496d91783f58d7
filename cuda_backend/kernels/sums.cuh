// sums: loads rows given as partial sums and adds them, for kernels after a product
// Build     PARTIALS: partial sums of x; OTHERS: of y, 0 without y

#ifndef PARTIALS
#define PARTIALS 1
#define OTHERS 1
#endif
#ifdef RANKS
#define AT_ONCE 10  // partial sums in registers: all CTAs of exchange_norm.cu must be resident
#else
#define AT_ONCE 32  // for more than one block at a time the compiler would read five
#endif

// Adds the partial sums of four columns of x from p on, and of y from q on, in order.
__device__ __forceinline__ void load_sums(float4& x_sum, float4& y_sum, const float* p, s64 x_stride, const float* q, s64 y_stride) {
    x_sum = y_sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int first = 0; first < PARTIALS + OTHERS; first += AT_ONCE) {
        if (first) asm volatile("" ::: "memory");  // otherwise the compiler has more reads in flight, and spills
        float4 e[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int s = first + i - PARTIALS;
            if (s < OTHERS) e[i] = *(const float4*)(s < 0 ? p + (s + PARTIALS) * x_stride : q + s * y_stride);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i < PARTIALS)
                x_sum = plus(x_sum, e[i]);
            else if (first + i < PARTIALS + OTHERS)
                y_sum = plus(y_sum, e[i]);
        }
    }
}
