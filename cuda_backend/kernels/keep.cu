// keep: rows of [capacity][D] planes from one cache to another: positions base + path[j], or base + j without a path, to
// to_base + j
// Launcher  cuda_backend/states.py move
// Work      a thread moves 8 values of every row, so that an ascending path may be kept in place

extern "C" __global__ void keep(const u16* from, s64 from_capacity, Places from_places, int base, u16* to, s64 to_capacity,
                                Places to_places, int to_base, const int* path, int n, int D) {
    const int i = threadIdx.x * 8;
    from += blockIdx.x * from_capacity * D + i, to += blockIdx.x * to_capacity * D + i;
    for (int j = blockIdx.y; j < n; j += gridDim.y)
        *(uint4*)(to + (s64)place_of(to_places, to_base + j) * D) =
            *(const uint4*)(from + (s64)place_of(from_places, base + (path ? path[j] : j)) * D);
}
