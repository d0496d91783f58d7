// exact: the tokens of a compressed cache that attention reads as float16, not as codes, and the statistics that
// equalise keys before they are encoded
// Meaning   common/reference_packed.py NumpyPacked
// Build     EXACT: the cache has such rows

#ifndef EXACT
#define EXACT 0
#endif

// A row at position p reads tokens before `first` or after p - `recent` from `keys` and `values`, other tokens from codes.
struct Exact {
    Plane keys, values;        // float16; values rotated if their codes are. With `mean`, heads K to 2 K - 1 of keys are queries
    u16* q;                    // [T][H][D] float16; products with codes read q times `scale`, rotated
    float* shift;              // [T][H] q times `mean`, a term of every product with a code
    const float *mean, *scale; // [K][D], of each channel of the keys; null: keys are encoded unchanged
    const int* positions;      // [T], of the rows of the step
    int own, slots, first, recent;  // elements from a row's statistics, and from a slot's, to the next; 0: they are shared
};
// Offset of the statistics of row t of a sequence.
__device__ __forceinline__ s64 statistics_of(const Exact& exact, int t, int slot) { return (s64)t * exact.own + (s64)slot * exact.slots; }

// Address at which row t keeps a query of a KV head for calibration: the query of head `of` of its group, if it is this head's
// turn (position % heads of a group). Rows without queries (H = 0) keep zeros in the place of head `of` of the keys. Null: none.
__device__ __forceinline__ u8* kept_query(const Exact& exact, int slot, int t, int place, bool is_q, bool is_k, int of, int H, int K,
                                          int bytes) {
    const int group = H / K;
    if (!exact.mean || !(is_q ? of % group == exact.positions[t] % group : is_k && H == 0)) return 0;
    return row_at(exact.keys, slot, K + (is_q ? of / group : of), place, bytes);
}
