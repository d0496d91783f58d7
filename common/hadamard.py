"""The Walsh-Hadamard transform between two diagonals of signs: an orthogonal rotation that spreads outliers."""

from functools import cache

import numpy as np

GROUPS = (128, 64, 32)  # values of a head's vector that `rotate` takes together, the widest first
# bit 1 is -1; element 0 is the lowest bit of word 0. A narrower group takes the first of them.
SIGNS = {
    "S1": (0xE46A0359, 0x42F85949, 0xA4C63BBB, 0x49F250A9),
    "S2": (0x16ACEE90, 0x3F628FDC, 0xB7A5357A, 0xBEA56562),
    "Q1": (0x693A565E, 0x25622D30, 0x0243E607, 0xFEC58BDA),
    "Q2": (0x3D172324, 0x203007CB, 0x9540A34B, 0x856B1126),
}


def wht(x: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Compute after * H(before * x) / sqrt(n) along the last axis: x (..., n), signs (n,), n = 2^k -> (..., n) float32.

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


@cache
def signs(name: str, group: int) -> np.ndarray:
    """Return (group,) float32 of 1 and -1: the first entries of the named sequence."""
    bits = np.unpackbits(np.array(SIGNS[name], "<u4").view(np.uint8), bitorder="little")[:group]
    return 1 - 2 * bits.astype(np.float32)


def group_of(dim: int) -> int:
    """Choose how many values of a head of `dim` are rotated together and share a norm; 0: no transform."""
    return next((group for group in GROUPS if dim % group == 0), 0)


def rotate(x: np.ndarray) -> np.ndarray:
    """Return each group of x (..., dim), rotated: float32."""
    group = group_of(x.shape[-1])
    return wht(_grouped(x, group), signs("S1", group), signs("S2", group)).reshape(x.shape)


def unrotate(y: np.ndarray) -> np.ndarray:
    """Return the inverse of `rotate`."""
    group = group_of(y.shape[-1])
    return wht(_grouped(y, group), signs("S2", group), signs("S1", group)).reshape(y.shape)


def _grouped(x: np.ndarray, group: int) -> np.ndarray:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
