"""Products of several rows on MLX's CPU device by NumPy's BLAS, in MLX's memory: MLX's own product is a plain loop.

A product of few rows waits for MLX's thread only once, for its input: NumPy decodes the usual groups itself. Few rows
are multiplied at a time, so that OpenBLAS starts no threads: on a busy machine the slowest thread would delay all.
"""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_backend.quantized import Blocks
from mlx_backend.sizes import HOST_VALUES
from mlx_backend.weights import Packed, Part

ROWS = 2  # rows from which decoding the weights for BLAS is faster than MLX's loop over the rows
FEW = 32  # rows up to which a product is divided so that OpenBLAS keeps it on the calling thread
ONE_THREAD = 2**18  # multiplications below which OpenBLAS does


def serves(x: mx.array) -> bool:
    """Test whether `matmul` is faster than MLX's product for x (T, columns)."""
    return len(x) >= ROWS and x.dtype == mx.float32 and mx.default_device().type == mx.DeviceType.cpu


def matmul(x: mx.array, part: Part) -> mx.array:
    """Multiply x (T, columns) by the matrix (rows, columns) transposed, in float32: (T, rows).

    A long step's product is written into MLX's memory, without a copy; a short one's is copied, without a wait.
    """
    assert not isinstance(part, Blocks), "Metal only"
    rows, few = np.array(x, copy=False), len(x) <= FEW
    T, columns = rows.shape
    N = (part.codes if isinstance(part, Packed) else part).shape[0]
    out = mx.zeros((T, N), mx.float32)  # unused, and therefore not computed, in a short step
    sums = np.empty((T, N), np.float32) if few else np.array(out, copy=False)
    if not isinstance(part, Packed):
        np.matmul(rows, np.array(part, copy=False).T, out=sums)
    else:
        fast = few and part.mode == "affine" and part.bits in (4, 8)
        decode = _affine(part) if fast else partial(_dequantized, part)
        step = max(1, (ONE_THREAD // T if few else HOST_VALUES) // columns)
        for at in range(0, N, step):
            np.matmul(rows, decode(slice(at, at + step)).T, out=sums[:, at : at + step])
    return mx.array(sums) if few else out


def _affine(part: Packed) -> Callable[[slice], np.ndarray]:
    """Return a decoder in NumPy of some rows of a matrix of 4 or 8 bits: (n, columns) float32."""
    assert part.biases is not None
    size, codes = part.group_size, np.array(part.codes, copy=False).view(np.uint8)
    scales, biases = (np.array(plane, copy=False)[..., None] for plane in (part.scales, part.biases))

    def decoded(rows: slice) -> np.ndarray:
        values = codes[rows]
        if part.bits == 4:
            values = np.stack([values & 15, values >> 4], axis=-1)
        out = np.multiply(values.reshape(len(values), -1, size), scales[rows], dtype=np.float32)
        out += biases[rows]
        return out.reshape(len(out), -1)

    return decoded


def _dequantized(part: Packed, rows: slice) -> np.ndarray:
    """Decode some rows of the matrix, (n, columns) float32, by MLX."""
    codes, scales = part.codes[rows], part.scales[rows]
    biases = None if part.biases is None else part.biases[rows]
    block = mx.dequantize(codes, scales, biases, part.group_size, part.bits, part.mode, dtype=mx.float32)
    return np.array(block, copy=False)
