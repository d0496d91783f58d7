"""Expand matrices to half precision, and multiply many rows by them with cuBLAS."""

import ctypes
import os
from functools import cache
from typing import Any

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
    """Expand rows row..row+n of a segment of one expert to the card's `half` at `out`, or to float32 at `dense`."""
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
    """Compute out (T, rows) float32 = x (T, columns) w' (rows, columns), of type `half`; cuBLAS, by columns: w' x'."""
    one, zero = ONE.ctypes.data, ZERO.ctypes.data
    types = CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
    shapes = CUBLAS_OP_T, CUBLAS_OP_N, rows, T, columns
    left, right = (w, HALF[half], columns), (x, HALF[half], columns)
    handle = cupy.cuda.device.get_cublas_handle()
    library = _library() if stream.is_captured else None
    if library is None:
        with stream.cuda:  # CuPy passes its current stream to cuBLAS
            cublas.gemmEx(handle, *shapes, one, *left, *right, zero, out, CUDA_R_32F, row_stride, *types)
        return
    status = library.cublasSetStream_v2(handle, stream.ptr) or library.cublasGemmEx(
        handle, *shapes, one, *left, *right, zero, out, CUDA_R_32F, row_stride, *types
    )
    if status:
        raise RuntimeError(f"cuBLAS returned {status} for a product of {T} rows by {rows} x {columns}")


@cache
def _library() -> Any:
    """Find the cuBLAS that CuPy has loaded, since CuPy's own function refuses a captured stream; None: not found."""
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    try:
        library = ctypes.CDLL(f"cublas64_{major}.dll" if os.name == "nt" else f"libcublas.so.{major}")
    except OSError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cublasSetStream_v2.argtypes = pointer, pointer
    matrix = pointer, number, number
    library.cublasGemmEx.argtypes = (
        *(pointer, *(number,) * 5),
        *(pointer, *matrix, *matrix),
        *(pointer, *matrix, number, number),
    )
    return library


def head_matrices(w: Weight, arena: Arena, stream: Stream) -> int:
    """Return the address of the matrices of all heads in float16."""
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
    """Multiply the first n latents by the matrix of each head, and write the heads of `out`, float16.

    w         (H, columns of a latent, channels), or, if `transposed`, (H, channels, columns of a latent)
    matrices  address of `head_matrices` of it
    """
    (s,) = w.segments
    channels, inner = (s.rows, s.columns) if transposed else (s.columns, s.rows)
    with stream.cuda:  # one call: a call per head would take the host longer than the device computes
        cublas.gemmStridedBatchedEx(
            cupy.cuda.device.get_cublas_handle(),
            CUBLAS_OP_T if transposed else CUBLAS_OP_N,
            CUBLAS_OP_N,
            channels,
            n,
            inner,
            ONE.ctypes.data,
            matrices,
            CUDA_R_16F,
            s.columns,
            s.rows * s.columns,
            latents.address,
            CUDA_R_16F,
            latents.width,
            0,
            ZERO.ctypes.data,
            out.address,
            CUDA_R_16F,
            out.width,
            out.head_bytes // 2,
            s.experts,
            CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DEFAULT,
        )
