// plane: where the rows of a cache lie: keys, values or latents, [head][place], a row being the bytes of one position

struct Plane {  // cuda_backend/caches/planes.py PLANE
    u8* rows;
    int row, capacity;  // bytes of a row, rows of a head
    int fixed, ring;    // the first `fixed` positions in order, behind them the others in a ring
};
__device__ __forceinline__ int place_of(const Plane& p, int position) {
    return position < p.fixed ? position : p.fixed + (position - p.fixed) % p.ring;
}

// Row number `place` of a head, where the rows of the plane are known to have `bytes`.
__device__ __forceinline__ u8* row_at(const Plane& p, int head, int place, int bytes) {
    return p.rows + (s64)(head * p.capacity + place) * bytes;
}
