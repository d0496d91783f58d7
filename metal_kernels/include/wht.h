// wht: the Walsh-Hadamard transform of a group of values that LANES lanes of a SIMD group hold, R neighbours each
// Numbers   float, stages in the order of rising distance, as common/hadamard.py; without signs and without scale
template <int R, int LANES>
inline void wht_stages(thread float* v, uint lane) {
    for (int step = 1; step < R; step *= 2) {
        for (int i = 0; i < R; i++) {
            if (i & step) continue;
            const float a = v[i], b = v[i + step];
            v[i] = a + b;
            v[i + step] = a - b;
        }
    }
    for (ushort lanes = 1; lanes < LANES; lanes *= 2) {
        for (int i = 0; i < R; i++) {
            const float other = simd_shuffle_xor(v[i], lanes);
            v[i] = lane & lanes ? other - v[i] : v[i] + other;
        }
    }
}

// 1 / sqrt(n) of a group of n values
inline float wht_scale(int n) {
    return n == 32 ? 0.17677669529663687f : n == 64 ? 0.125f : n == 128 ? 0.08838834764831845f : 0.0625f;
}
