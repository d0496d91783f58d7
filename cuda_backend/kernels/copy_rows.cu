// copy_rows: copies rows of keys and values, or of latents, from one cache to another, or within one cache after a commit
// Meaning   to_first + j of the target becomes first + path[j] of the source, for 0 <= j < n; without a path first + j
// Launcher  cuda_backend/caches/planes.py copy_rows
// In        keys, values: planes of the source (plane.cuh), rows in any format of formats.cuh; equal if there is one plane
//           path [n] int32, or null; slot, to_slot: sequences of the source and the target
// Out       rows of to_keys and to_values, which have the heads and the format of the source's
// Build     UNIT: bytes that divide every row, 2, 4, 8 or 16
// Work      grid (heads of all planes, up to 64), the first `key_heads` of keys; a thread copies one unit of every row of its CTA
// Assumes   a block has as many threads as the longest row has units. If source and target are one memory, the path ascends and the
//           second dimension of the grid is 1: a thread has then read a unit before it overwrites it
// Bound     bytes read and written
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
