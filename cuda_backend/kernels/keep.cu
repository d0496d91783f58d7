// keep: rows of the heads of one or two planes to other planes: positions first + path[j], or first + j without a path, to
// to_first + j
// Launcher  cuda_backend/caches/planes.py move
// Build     UNIT: bytes that divide every row, 2, 4, 8 or 16
// Work      a CTA per head: of keys, behind them of values. A thread moves one unit of every row, so that an ascending path
//           may be kept in place

#if UNIT == 16
typedef uint4 Unit;
#elif UNIT == 8
typedef uint2 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef u16 Unit;
#endif

extern "C" __global__ void keep(Plane keys, Plane values, int first, Plane to_keys, Plane to_values, int to_first, int key_heads,
                                const int* path, int n) {
    const bool is_key = (int)blockIdx.x < key_heads;
    const int head = is_key ? blockIdx.x : blockIdx.x - key_heads;
    const int row = is_key ? keys.row : values.row, i = threadIdx.x * UNIT;
    if (i >= row) return;
    const u8* from = (is_key ? row_at(keys, head, 0, row) : row_at(values, head, 0, row)) + i;
    u8* to = (is_key ? row_at(to_keys, head, 0, row) : row_at(to_values, head, 0, row)) + i;
    for (int j = blockIdx.y; j < n; j += gridDim.y)  // keys and values lie in the same places
        *(Unit*)(to + (s64)place_of(to_keys, to_first + j) * row) =
            *(const Unit*)(from + (s64)place_of(keys, first + (path ? path[j] : j)) * row);
}
