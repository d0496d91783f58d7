"""The Walsh-Hadamard transform between two diagonals of signs: an orthogonal rotation that spreads outliers."""

import numpy as np


def wht(x: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """after * H(before * x) / sqrt(n) along the last axis: x (..., n), signs (n,), n = 2^k -> (..., n) float32.

    H is Sylvester's matrix in natural order. It is symmetric: the inverse is this function with the signs swapped.
    Sums are float32, stages in the order of rising distance: the bits that kernels give.
    """
    n = x.shape[-1]
    y = x.astype(np.float32) * before
    distance = 1
    while distance < n:
        pairs = y.reshape(*x.shape[:-1], n // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    return (y * after * np.float32(n**-0.5)).astype(np.float32)
