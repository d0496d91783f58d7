// exact: the tokens of a compressed cache that attention reads as float16 beside the codes, and the statistics that
// equalise keys before they are encoded
// Meaning   common/reference_states.py NumpyPacked
// Build     EXACT: the cache has such rows

#ifndef EXACT
#define EXACT 0
#endif

// A row at position p reads a token before `first` or after p - `recent` from `keys` and `values`, others from codes.
struct Exact {
    Plane keys, values;        // float16; values rotated where the codes are
    u16* q;                    // [T][H][D] float16; products with codes take q times `scale`, rotated
    float* shift;              // [T][H] q times `mean`, which belongs to every product with a code
    const float *mean, *scale; // [K][D] of each channel of the keys; null: keys are encoded as they are
    int own, slots, first, recent;  // elements from the statistics of a row, and of a slot, to the next; 0: they are shared
};
// Where the statistics of row t of a sequence begin.
__device__ __forceinline__ s64 statistics_of(const Exact& exact, int t, int slot) { return (s64)t * exact.own + (s64)slot * exact.slots; }
