// copy_rows: copies rows of all heads of one or two planes: position first + path[j] (without a path first + j) of the source to
// position to_first + j of the target
// Launcher  cuda_backend/caches/planes.py copy_rows
// Build     UNIT: bytes that divide every row, 2, 4, 8 or 16
// Work      a CTA per head, first heads of keys, then heads of values. A thread copies one unit of every row, so that source and
//           target may be the same memory if the path ascends
// Tried     nothing on record

#if UNIT == 16
typedef uint4 Unit;
#elif UNIT == 8
typedef uint2 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef u16 Unit;
#endif

extern "C" __global__ void copy_rows(Plane keys, Plane values, int slot, int first, Plane to_keys, Plane to_values, int to_slot,
                                     int to_first, int key_heads, const int* path, int n) {
    const bool is_key = (int)blockIdx.x < key_heads;
    const int head = is_key ? blockIdx.x : blockIdx.x - key_heads;
    const int row = is_key ? keys.row : values.row, i = threadIdx.x * UNIT;
    if (i >= row) return;
    Plane from = values, to = to_values;
    if (is_key) from = keys, to = to_keys;
    for (int j = blockIdx.y; j < n; j += gridDim.y)
        *(Unit*)(row_at(to, to_slot, head, place_of(to, to_first + j), row) + i) =
            *(const Unit*)(row_at(from, slot, head, place_of(from, first + (path ? path[j] : j)), row) + i);
}
