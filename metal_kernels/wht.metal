// wht: signs, a Walsh-Hadamard transform of each row, signs
// Meaning   common/hadamard.py wht                    Launcher  mlx_backend/hadamard.py wht
// In        x [rows][N] T, before [N] float, after [N] float      Out  out [rows][N] T
// Build     T float, half or bfloat; N 32, 64, 128 or 256
// Work      one SIMD group per row, N/32 neighbouring values per lane in registers: the first stages inside the lane, the
//           last five between lanes by shuffles; no threadgroup memory, no barrier
// Assumes   threadgroups are 32 wide, so that a row is a SIMD group; x row-contiguous
// Numbers   float inside, stages in the order of the definition: its bits, rounded once to T
// Bound     2 sizeof(T) bytes, 5 shuffles and log2(N) additions per value: memory, if a shuffle costs as much as an addition
// Tried     nothing yet: not run on a GPU
#include "wht.h"

[[kernel]] void wht() {
    constexpr int R = N / 32;
    const uint lane = thread_index_in_simdgroup;
    const uint first = lane * R;
    const device T* row = x + size_t(thread_position_in_grid.y) * N + first;
    device T* row_out = out + size_t(thread_position_in_grid.y) * N + first;

    float v[R];
    for (int i = 0; i < R; i++) v[i] = float(row[i]) * before[first + i];
    wht_stages<R, 32>(v, lane);
    const float scale = wht_scale(N);
    for (int i = 0; i < R; i++) row_out[i] = T(v[i] * after[first + i] * scale);
}
