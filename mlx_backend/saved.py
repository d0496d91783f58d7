"""Conversion of MLX arrays to NumPy arrays of the same bytes, and back; bfloat16, which NumPy lacks, becomes uint16."""

import mlx.core as mx
import numpy as np

from common.step import Shape

TYPES = {
    mx.float32: np.dtype(np.float32),
    mx.float16: np.dtype(np.float16),
    mx.bfloat16: np.dtype(np.uint16),
    mx.uint8: np.dtype(np.uint8),
}


def shape_of(array: mx.array) -> Shape:
    """Return the shape and the NumPy dtype of `to_host(array)`."""
    return array.shape, TYPES[array.dtype]


def to_host(array: mx.array) -> np.ndarray:
    """Copy the array's bytes to a NumPy array."""
    array = mx.contiguous(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def from_host(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Convert the result of `to_host` back to an array of `dtype`."""
    held = mx.array(array)
    return held.view(mx.bfloat16) if dtype == mx.bfloat16 else held
