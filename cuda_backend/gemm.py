"""Matrices expanded to half precision, and their products with many rows by cuBLAS."""

import cupy
import numpy as np
from cupy.cuda import cublas

from cuda_backend.caches.planes import Plane
from cuda_backend.launch import Stream, kernel
from cuda_backend.layout import FLOATS, UNITS, tile_defines
from cuda_backend.memory import Arena
from cuda_backend.weights import Segment, Weight

ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)  # cuBLAS reads its factors from the host
CUDA_R_32F, CUDA_R_16F = 0, 2
HALF = {"F16": CUDA_R_16F, "BF16": 14}  # CUDA_R_16BF
CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 0, 1, 68, -1


def expand(s: Segment, row: int, n: int, out: int, stream: Stream, dense: int = 0) -> None:
    """Rows row..row+n of a segment of one expert to the card's `half` at `out`, or to float32 at `dense`."""
    if s.type in UNITS:
        tiles = -(-n // 16)
        units = s.memory.address + row // 128 * s.k_blocks * 8 * UNITS[s.type][1]
        sizes = (n, s.columns, s.k_blocks, tiles)
        kernel("expand", "expand", tile_defines(s.type))(
            (-(-tiles * s.k_blocks // 8),),
            (256,),
            (units, *sizes, out, dense),
            stream=stream,
        )
    else:
        source = s.memory.address + row * s.columns * FLOATS[s.type]
        args = (source, n * s.columns, out)
        kernel("dense", "to_product_matrix", (s.type,))((2048,), (256,), args, stream=stream)


def gemm(x: int, w: int, out: int, T: int, rows: int, columns: int, row_stride: int, half: str, stream: Stream) -> None:
    """out (T, rows) float32 = x (T, columns) w' (rows, columns), of type `half`; in cuBLAS's column order w' x'."""
    with stream.cuda:  # CuPy hands its current stream to cuBLAS
        cublas.gemmEx(
            cupy.cuda.device.get_cublas_handle(),
            CUBLAS_OP_T,
            CUBLAS_OP_N,
            rows,
            T,
            columns,
            ONE.ctypes.data,
            w,
            HALF[half],
            columns,
            x,
            HALF[half],
            columns,
            ZERO.ctypes.data,
            out,
            CUDA_R_32F,
            row_stride,
            CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DEFAULT,
        )


def head_matrices(w: Weight, arena: Arena, stream: Stream) -> int:
    """The address of the matrices of all heads in float16."""
    (s,) = w.segments
    size = s.rows * s.columns
    matrices = arena.take(s.experts * size * 2)
    if s.type in UNITS:
        padded_rows = s.experts * s.row_blocks * 128
        dense, stride, kind = arena.take(padded_rows * s.columns * 4), s.row_blocks * 128 * s.columns, 0
        expand(s, 0, padded_rows, 0, stream, dense)
    else:
        dense, stride, kind = s.memory.address, size, ("F32", "F16", "BF16").index(s.type)
    kernel("latent", "halves", ("R=16", "W=16", "TILE=32", "BUFFERS=2"))(
        (min(-(-size // 256), 1024), s.experts),
        (256,),
        (dense, kind, stride, size, matrices),
        stream=stream,
    )
    return matrices


def expand_heads(
    w: Weight, matrices: int, transposed: bool, latents: Plane, n: int, out: Plane, stream: Stream
) -> None:
    """Write the first n latents times the matrix of each head to the heads of `out`, float16.

    w         (H, columns of a latent, channels), or where it is `transposed` (H, channels, columns of a latent)
    matrices  address of `head_matrices` of it
    """
    (s,) = w.segments
    size = s.rows * s.columns
    channels, inner = (s.rows, s.columns) if transposed else (s.columns, s.rows)
    for h in range(s.experts):
        with stream.cuda:
            cublas.gemmEx(
                cupy.cuda.device.get_cublas_handle(),
                CUBLAS_OP_T if transposed else CUBLAS_OP_N,
                CUBLAS_OP_N,
                channels,
                n,
                inner,
                ONE.ctypes.data,
                matrices + h * size * 2,
                CUDA_R_16F,
                s.columns,
                latents.address,
                CUDA_R_16F,
                latents.width,
                ZERO.ctypes.data,
                out.address + h * out.head_bytes,
                CUDA_R_16F,
                out.width,
                CUBLAS_COMPUTE_32F,
                CUBLAS_GEMM_DEFAULT,
            )
